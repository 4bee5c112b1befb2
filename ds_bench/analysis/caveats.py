"""What a reader must know before using a row: a closed set of kinds, each with what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class CaveatKind(StrEnum):
    """The closed set; the value is what JSON and CSS classes hold."""

    UNSTABLE = "unstable"
    NOT_STEADY = "not_steady"
    TOO_FEW_REPEATS = "too_few_repeats"
    LOSS_DIFFERS = "loss_differs"
    NEAR_CAPACITY = "near_capacity"
    ALLOCATOR_RETRIED = "allocator_retried"
    OTHER_PROCESS = "other_process"
    CLOCKS_THROTTLED = "clocks_throttled"
    SWAP_USED = "swap_used"
    OTHER_OPTIMIZER = "other_optimizer"
    ONE_GPU = "one_gpu"
    BUCKET_DOMINATES = "bucket_dominates"
    PREDICTION_MISSED = "prediction_missed"
    ENVIRONMENT_DIFFERS = "environment_differs"
    CPU_ACCELERATOR = "cpu_accelerator"
    CPU_BUSY = "cpu_busy"
    FIRST_LOSS = "first_loss"
    SHORT_WINDOW = "short_window"
    NOTE = "note"
    """What a rank, the launcher or the plan wrote down that is none of the above."""


NEXT_STEPS: Mapping[CaveatKind, str | None] = MappingProxyType(
    {
        CaveatKind.UNSTABLE: "use more --num-steps, or a quieter machine",
        CaveatKind.NOT_STEADY: "use more --warmup-steps",
        CaveatKind.TOO_FEW_REPEATS: "use --repeats 3 or more",
        CaveatKind.LOSS_DIFFERS: "compare the row's ds_config.json with the other row's, then run both with "
        "--precision fp32: what rounding does is gone there, what a wrong configuration does is not",
        CaveatKind.NEAR_CAPACITY: "leave room for longer sequences and fragmentation: a smaller --batch-size, "
        "--activation-checkpointing, or a strategy that keeps less on the card",
        CaveatKind.ALLOCATOR_RETRIED: "lower --batch-size, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, "
        "and measure again",
        CaveatKind.OTHER_PROCESS: "end the other process, or choose a free card with CUDA_VISIBLE_DEVICES",
        CaveatKind.CLOCKS_THROTTLED: "look at cooling and the power limit (nvidia-smi -q -d PERFORMANCE), "
        "and measure again when the card is cool",
        CaveatKind.SWAP_USED: "free host memory before measuring, offload rows above all",
        CaveatKind.OTHER_OPTIMIZER: "see why the op does not build: python -m ds_bench ops",
        CaveatKind.ONE_GPU: "use two GPUs or more to see what stages 1 to 3 save",
        CaveatKind.BUCKET_DOMINATES: "try --set zero_optimization.reduce_bucket_size=50000000",
        CaveatKind.PREDICTION_MISSED: "believe the measurement; plan for this model with more room",
        CaveatKind.ENVIRONMENT_DIFFERS: "measure both again on one machine with the same versions",
        CaveatKind.CPU_ACCELERATOR: "run the same command where there is a GPU",
        CaveatKind.CPU_BUSY: "end the other programs, or wait for them, and measure again",
        CaveatKind.FIRST_LOSS: "see how the model draws its weights: matrices of standard deviation 0.02 are usual",
        CaveatKind.SHORT_WINDOW: "use more --num-steps",
        CaveatKind.NOTE: None,
    }
)
"""What to do about each kind; None where it depends on the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caveat:
    """One doubt about one row, or about all of them."""

    kind: CaveatKind
    text: str
    """One line: what was seen, with the row's numbers."""
    next_step: str | None = None
    """What to do about it; None where nothing can be done."""
    disqualifying: bool = False
    """Such a row is never recommended (its loss differs, it did not train what was asked)."""

    @property
    def line(self) -> str:
        """The text and what to do about it."""
        return self.text if self.unsaid_step is None else f"{self.text}; {self.unsaid_step}"

    @property
    def unsaid_step(self) -> str | None:
        """The next step, where the text does not end with it already."""
        return None if self.next_step is None or self.text.endswith(self.next_step) else self.next_step


def typed(kind: CaveatKind, text: str, *, disqualifying: bool = False) -> Caveat:
    """A caveat with its kind's next step."""
    return Caveat(kind=kind, text=text, next_step=NEXT_STEPS[kind], disqualifying=disqualifying)


def note(text: str, *, disqualifying: bool = False) -> Caveat:
    """A free text of none of the other kinds."""
    return typed(CaveatKind.NOTE, text, disqualifying=disqualifying)
