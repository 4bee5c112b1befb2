"""The closed set of caveats: kinds, beginnings of their texts, remedies, and which ones disqualify a row.

The texts are stored in the ``caveats`` column of CSV and JSON and recognised there by their beginnings
(:func:`parse_caveat`), which are therefore part of the file format.

Stored in a record are those that only the run could see (``launch/``, ``worker/measure.py``). All others are found when
results are read: of one trial in ``trial_caveats.py``, of a comparison in ``comparison_caveats.py`` and
``loss_parity.py``. A plan has those of ``planner.py`` and ``prediction/trial_predictions.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from ..system import invocation


class CaveatKind(StrEnum):
    """The kinds of caveats and what to do about each; their values are stored in JSON and are names of CSS classes."""

    next_step: str | None
    """None if that depends on the text."""

    def __new__(cls, value: str, next_step: str | None = None) -> CaveatKind:
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.next_step = next_step
        return kind

    UNSTABLE = "unstable", "use more --num-steps, or a quieter machine"
    NOT_STEADY = "not_steady", "use more --warmup-steps"
    TOO_FEW_REPEATS = "too_few_repeats", "use --repeats 3 or more"
    LOSS_DIFFERS = (
        "loss_differs",
        "compare the row's ds_config.json with the other row's, then run both with "
        "--precision fp32: what rounding does is gone there, what a wrong configuration does is not",
    )
    DOES_NOT_TRAIN = "does_not_train", "check the learning rate and the optimizer in the row's ds_config.json"
    OTHER_TRAINING = "other_training", "compare what both rows learn in a whole training before you choose by speed"
    NEAR_CAPACITY = (
        "near_capacity",
        "leave room for longer sequences and fragmentation: a smaller --batch-size, "
        "--activation-checkpointing, or a strategy that keeps less on the card",
    )
    ALLOCATOR_RETRIED = (
        "allocator_retried",
        "lower --batch-size, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and measure again",
    )
    OTHER_PROCESS = "other_process", "end the other process, or choose a free card with CUDA_VISIBLE_DEVICES"
    CLOCKS_THROTTLED = (
        "clocks_throttled",
        "look at cooling and the power limit (nvidia-smi -q -d PERFORMANCE), and measure again when the card is cool",
    )
    SWAP_USED = "swap_used", "free host memory before measuring, offload rows above all"
    OTHER_OPTIMIZER = "other_optimizer", f"see why the op does not build: {invocation.command('ops')}"
    ONE_GPU = "one_gpu", "use two GPUs or more to see what stages 1 to 3 save"
    BUCKET_DOMINATES = "bucket_dominates", "try --set zero_optimization.reduce_bucket_size=50000000"
    PREDICTION_MISSED = "prediction_missed", "believe the measurement; plan for this model with more room"
    ENVIRONMENT_DIFFERS = "environment_differs", "measure both again on one machine with the same versions"
    MEASURED_APART = "measured_apart", "where a difference is small, measure these rows in one run"
    CPU_ACCELERATOR = "cpu_accelerator", "run the same command where there is a GPU"
    CPU_BUSY = "cpu_busy", "end the other programs, or wait for them, and measure again"
    FIRST_LOSS = (
        "first_loss",
        "see how the model draws its weights: matrices of standard deviation 0.02 are usual",
    )
    SHORT_WINDOW = "short_window", "use more --num-steps"
    DISK_BOUND = (
        "disk_bound",
        "give a faster disk or several as RAID 0, or keep in host memory what has room there",
    )
    DATA_WAIT = "data_wait", "use more --data-workers, or a faster disk"
    NOTE = "note"
    """None of the others; in most cases a text that a rank, the launcher or the plan wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caveat:
    """One caveat about one row or about the whole comparison."""

    kind: CaveatKind
    text: str
    """One line: the observation with its numbers."""
    next_step: str | None = None
    """What to do about it; None if nothing can be done."""
    disqualifying: bool = False
    """The row is never recommended: its loss differs, or it did not train as requested."""
    form: CaveatText | None = None
    """The text of the closed set that it is written in; None for any other text."""

    @property
    def line(self) -> str:
        """The text and the next step."""
        step = self.next_step_if_not_in_text
        return self.text if step is None else f"{self.text}; {step}"

    @property
    def next_step_if_not_in_text(self) -> str | None:
        """The next step; None if there is none, or the text ends with it already."""
        return None if self.next_step is None or self.text.endswith(self.next_step) else self.next_step


def caveat_of_kind(kind: CaveatKind, text: str, *, disqualifying: bool = False) -> Caveat:
    """A caveat with the next step of its kind."""
    return Caveat(kind=kind, text=text, next_step=kind.next_step, disqualifying=disqualifying)


def note(text: str, *, disqualifying: bool = False) -> Caveat:
    """A free text of none of the other kinds."""
    return caveat_of_kind(CaveatKind.NOTE, text, disqualifying=disqualifying)


_ONE_OPTIMIZER = "--set optimizer.params.torch_adam=true compares all rows with torch's AdamW"


class CaveatText(Enum):
    """A caveat of one row that is recognised by the beginning of its text and by words in it."""

    def __init__(
        self, kind: CaveatKind, start: str, contains: str = "", disqualifying: bool = False, next_step: str | None = ""
    ) -> None:
        self.kind = kind
        self.start = start
        """Beginning of the text; empty for a text that is recognised by ``contains`` alone."""
        self.contains = contains
        """Words in the text by which it differs from others with the same beginning."""
        self.disqualifying = disqualifying
        # Not None, which a member gives whose text has no next step.
        self.next_step = kind.next_step if next_step == "" else next_step

    # No two members may have equal values: Enum would make the second one a name of the first.
    # The first member that matches a text is taken, so of two with one beginning that with more conditions is first.
    UNSTABLE_RUNS = (
        CaveatKind.UNSTABLE, "unstable: the means of ", "", False, "use more --repeats, or a quieter machine"
    )  # fmt: skip
    UNSTABLE_STEPS = CaveatKind.UNSTABLE, "unstable: "
    NOT_STEADY = CaveatKind.NOT_STEADY, "not steady: "
    OUTLIERS = CaveatKind.NOTE, "outliers: "
    NEAR_CAPACITY = CaveatKind.NEAR_CAPACITY, "near capacity: "
    ALLOCATOR_RETRIED = CaveatKind.ALLOCATOR_RETRIED, "the allocator retried"
    TORCH_ADAM = CaveatKind.OTHER_OPTIMIZER, "torch's AdamW instead of"
    """Written by the plan."""
    BUCKET_NOT_RESIDENT = CaveatKind.NOTE, "DeepSpeed's buffers are most", "on the CPU hardly any of it"
    BUCKET_DOMINATES = CaveatKind.BUCKET_DOMINATES, "DeepSpeed's buffers are most"
    LOSS_NOT_FINITE = CaveatKind.LOSS_DIFFERS, "loss is not finite", "", True
    LOSS_DIFFERS_KNOWN_QUIRK = CaveatKind.LOSS_DIFFERS, "loss differs by ", "a known quirk", False, None
    LOSS_DIFFERS = CaveatKind.LOSS_DIFFERS, "loss differs by ", "", True
    TRAINED_DIFFERENTLY_KNOWN_QUIRK = CaveatKind.LOSS_DIFFERS, "trained differently from ", "a known quirk", False, None
    TRAINED_DIFFERENTLY = CaveatKind.LOSS_DIFFERS, "trained differently from ", "", True
    DOES_NOT_TRAIN = CaveatKind.DOES_NOT_TRAIN, "does not train: ", "", True
    OTHER_TRAINING = CaveatKind.OTHER_TRAINING, "trains differently on purpose: "
    """Never recommended for its speed (recommend/eligibility.py)."""
    LOSS_PARITY_STAGE_3_ALONE = CaveatKind.NOTE, "loss parity was checked"
    FIRST_LOSS_FAR_TOO_LARGE = CaveatKind.FIRST_LOSS, "the first loss is ", "far too large", True
    FIRST_LOSS_TOO_LARGE = CaveatKind.FIRST_LOSS, "the first loss is "
    CPU_BUSY = CaveatKind.CPU_BUSY, "the CPU was busy", "", True
    NOT_SYNCHRONIZED = (
        CaveatKind.NOTE, "not synchronised", "", True, "leave --no-sync out"
    )  # fmt: skip
    WEIGHT_CHANGE_NOT_MEASURED = CaveatKind.NOTE, "the weights' change was not"
    """Written by a rank."""
    DATA_WAIT = CaveatKind.DATA_WAIT, "steps wait for data: "
    NO_WARM_UP = CaveatKind.NOTE, "no warm-up: "
    ONE_STEP = CaveatKind.NOTE, "one measured step: "
    MEMORY_PREDICTION_MISSED = CaveatKind.PREDICTION_MISSED, "memory was predicted as"
    TENSOR_PREDICTION_MISSED = CaveatKind.PREDICTION_MISSED, "the bytes of tensors were predicted as"
    CLOCKS_THROTTLED = CaveatKind.CLOCKS_THROTTLED, "GPU ", "was held back"
    """Written by the launcher."""
    BATCH_MISMATCH = CaveatKind.NOTE, "ran micro-batch"
    PARAMETERS_NOT_SWAPPED = CaveatKind.NOTE, "the parameters stayed"
    MFU_ABOVE_1 = CaveatKind.NOTE, "MFU of "
    OTHER_OPTIMIZER_OFFLOAD = CaveatKind.NOTE, "ran optimizer offload", "", True
    """Written by the plan."""
    OTHER_PARAMETER_OFFLOAD = CaveatKind.NOTE, "ran parameter offload", "", True
    """Written by the plan."""
    NVME_PATH_IN_MEMORY = CaveatKind.NOTE, "--nvme-path is memory", "", True
    """Written by the plan."""
    FROZEN_WEIGHTS_CHANGED = (
        CaveatKind.NOTE, "the frozen weights changed", "", True,
        "compare the row's ds_config.json with another row's: parameters whose requires_grad is False must not train",
    )  # fmt: skip
    OWN_BATCHES = CaveatKind.NOTE, "the factory makes its own batches"
    """Written by a rank."""
    NOTHING_SWAPPED = CaveatKind.NOTE, "nothing was swapped", "", True
    NOTHING_REACHED_DISK = CaveatKind.NOTE, "no bytes reached", "", True
    DISK_BOUND = CaveatKind.DISK_BOUND, "disk-bound: "
    OTHER_OPTIMIZER = CaveatKind.OTHER_OPTIMIZER, "", " stepped, not the ", True
    OTHER_ADAM = CaveatKind.NOTE, "", " steps here, ", False, _ONE_OPTIMIZER
    ALL_POSITIONS = CaveatKind.NOTE, "no longer sequence was tried: "
    """Written by the search of the longest sequence."""
    STEPS_SKIPPED = CaveatKind.NOTE, "", " measured steps were skipped"

    def caveat(self, text: str) -> Caveat:
        """The caveat whose text is ``start`` followed by ``text``."""
        return Caveat(
            kind=self.kind,
            text=f"{self.start}{text}",
            next_step=self.next_step,
            disqualifying=self.disqualifying,
            form=self,
        )


def _known_text(text: str) -> CaveatText | None:
    """The member of the closed set that matches ``text``; None for a free note."""
    return next((each for each in CaveatText if text.startswith(each.start) and each.contains in text), None)


def has_text(caveats: Iterable[Caveat], form: CaveatText) -> bool:
    """Whether one of the caveats was written with that text."""
    return any(caveat.form is form for caveat in caveats)


def parse_caveat(text: str) -> Caveat:
    """The caveat that was written as ``text``; a free text becomes a note."""
    known = _known_text(text)
    return note(text) if known is None else known.caveat(text[len(known.start) :])


def parse_caveats(cell: str, measured_steps: int) -> list[Caveat]:
    """The caveats of a row's ``caveats`` cell, in which their texts are joined by ``; ``.

    A text may contain that separator too: a part that is not the beginning of a known text continues the part before.
    ``measured_steps``: number of measured steps of the row.
    """
    parts: list[str] = []
    for part in cell.split("; "):
        if parts and _known_text(part) is None:
            parts[-1] += f"; {part}"
        else:
            parts.append(part)
    # Skipped steps apart: whether they disqualify follows from the number of steps, which the text does not hold.
    return [_parse_skipped_steps(part, measured_steps) or parse_caveat(part) for part in parts if part]


def skipped_steps(count: int, measured_steps: int) -> Caveat:
    """The caveat of a row whose optimizer skipped ``count`` steps: disqualifying if it took no step at all."""
    form = CaveatText.STEPS_SKIPPED
    caveat = form.caveat(f"{count}{form.contains} by the optimizer (overflow or NaN in gradients)")
    return replace(caveat, disqualifying=count >= measured_steps)


def _parse_skipped_steps(text: str, measured_steps: int) -> Caveat | None:
    count, skipped, _ = text.partition(CaveatText.STEPS_SKIPPED.contains)
    is_count = count.isdecimal() and len(count) < 10  # int() of a text of any length takes quadratic time
    if not (skipped and is_count):
        return None
    return replace(CaveatText.STEPS_SKIPPED.caveat(text), disqualifying=int(count) >= measured_steps)
