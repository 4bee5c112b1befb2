"""The text and remedy of each caveat: what a reader must know about a row or a comparison.

A caveat stores its kind and numbers; its text is made here from a template.
``analysis/trial_caveats.py`` and ``analysis/loss_parity.py`` find the caveats of one row, and
``analysis/comparison.py`` finds those of a whole comparison. The plan, the launcher and the ranks report what only
they see, as a ``Caveat`` or as plain text, which becomes a note. ``report/comparison_report.py`` adds the reasons why
a row failed or has no ratio, which no file stores as caveats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ..system import invocation
from ..units import format_template

_UNSTABLE = "raise --num-steps, or use a quieter machine"
_LOSSES = (
    "compare the row's ds_config.json with the other row's, then run both with --precision fp32: rounding differences "
    "nearly vanish there; differences from a wrong configuration remain"
)
_NOT_FINITE = "check the learning rate in the row's ds_config.json, then try --precision fp32"
_FIRST_LOSS = "check how the model initializes its weights: a standard deviation of 0.02 is usual for matrices"
_PREDICTION = "trust the measurement: predictions for this model's other rows may be off by as much"
_CPU = "stop the other programs or wait for them, then measure again"
_THROTTLED = "check cooling and the power limit (nvidia-smi -q -d PERFORMANCE); measure again when the card is cool"
_QUIRK = (
    "a known quirk: at stage 0 in bf16 or fp16, DeepSpeed takes an Adam step on zero gradients at initialization "
    "(fp16/fused_optimizer.py)"
)
_SEED = "seed the model's weights and the data in the script, then compare what both rows learn"
_NOT_TO_USE = "do not use this row until you know why"


class CaveatKind(StrEnum):
    """All kinds of caveats; files store the enum's values.

    Each has a template, a remedy or None, and says whether it disqualifies its row: such a row is never recommended.
    """

    template: str
    remedy: str | None
    disqualifies: bool

    def __new__(cls, value: str, template: str, remedy: str | None = None, disqualifies: bool = False) -> CaveatKind:
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.template, kind.remedy, kind.disqualifies = template, remedy, disqualifies
        return kind

    # fmt: off
    NOTE = "note", "{text}"
    """Text that belongs to none of the other kinds."""

    # The times of a row.
    UNSTABLE_RUNS = ("unstable_runs", "unstable: the means of {runs} runs vary by {variation:percent}",
        "raise --repeats, or use a quieter machine")
    UNSTABLE_STEPS = "unstable_steps", "unstable: step times vary by more than 5 %", _UNSTABLE
    NOT_STEADY = ("not_steady", "not steady: the two halves of the measured steps differ by more than 5 %",
        "raise --warmup-steps")
    OUTLIERS = "outliers", "outliers: {count} of {steps} measured steps took far longer: {slowest}; all are counted"
    NO_WARM_UP = ("no_warm_up", "no warm-up: the first step, with its one-time costs, is in the window",
        "use --warmup-steps")
    ONE_STEP = "one_step", "one measured step: the spread is unknown", "raise --num-steps"
    NOT_SYNCHRONIZED = ("not_synchronized", "not synchronized (wrong on purpose): {meaning}", "leave out --no-sync",
        True)
    DATA_WAIT = ("data_wait", "each step waits for data for {wait:ms} of its {step:ms} ms",
        "raise --data-workers, or use a faster disk")
    DISK_BOUND = ("disk_bound",
        "disk-bound: a step waits {wait:ms} ms for the disk; everything else takes {other:ms} ms",
        "use a faster disk or several in RAID 0, or keep as much in host memory as fits")
    CPU_BUSY = ("cpu_busy", "the CPU was busy: other programs used {other:.1f} of {cores:g} cores during the run",
        _CPU, True)
    CPU_QUOTA = ("cpu_quota",
        "CPU quota: the container was throttled in {fraction:percent0} of the quota's periods during the run",
        "raise the container's CPU limit or run less in it, then measure again", True)
    CLOCKS_THROTTLED = "clocks_throttled", "GPU {gpu} was throttled while this ran: {reasons}", _THROTTLED
    SLOW_GPU = ("slow_gpu",
        "GPU {gpu} ran at {clock:.0f} MHz on average, GPU {other} at {fastest:.0f}: the slowest sets the pace",
        _THROTTLED)
    COMPILED_MASK = ("compiled_mask", "uses an explicit attention mask, which SDPA's flash kernel does not support: "
        "Transformers builds it while torch.compile traces; uncompiled rows use is_causal",
        "flash_attention_2, a value of the axis attention, needs no mask")
    MFU_ABOVE_1 = "mfu_above_1", "MFU of {mfu:percent0} is impossible", "check --peak-tflops"

    # What a row trained.
    BATCH_MISMATCH = ("batch_mismatch",
        "ran with micro-batch {ran}, as the DeepSpeed config says, not the flags' {asked}")
    OTHER_OFFLOAD = ("other_offload",
        "{part} offload was {used}, as the DeepSpeed config says; this row's name stands for {named}", None, True)
    TORCH_ADAM = ("torch_adam",
        "torch's AdamW instead of DeepSpeed's FusedAdam, which does not build here (stage 0 in bf16 or fp16 then also "
        "has a different wrapper): {reason}", f"see why the op does not build: {invocation.command('ops')}")
    OTHER_OPTIMIZER = ("other_optimizer",
        "trained with {used}, not with the {asked} that the DeepSpeed config requests",
        f"see why the op does not build: {invocation.command('ops')}", True)
    OTHER_ADAM = ("other_adam", "uses {used}, while {row} uses {other}: that explains part of any speed difference",
        "use --set optimizer.params.torch_adam=true to train all rows with torch's AdamW")
    OWN_BATCHES = ("own_batches",
        "the factory makes its own batches: a sample counts as {seq_length} tokens, whatever it holds")
    STEPS_SKIPPED = ("steps_skipped",
        "the optimizer skipped {count} measured steps (overflow or NaN in gradients)")
    ALL_STEPS_SKIPPED = ("all_steps_skipped",
        "the optimizer skipped all {count} measured steps (overflow or NaN in gradients)", None, True)
    DOES_NOT_TRAIN = ("does_not_train", "does not train: no weight changed in the whole trial",
        "check the learning rate and the optimizer in the row's ds_config.json", True)
    FROZEN_WEIGHTS_CHANGED = ("frozen_weights_changed", "the frozen weights changed in training",
        "compare the row's ds_config.json with another row's: parameters whose requires_grad is False must not train",
        True)
    FIRST_LOSS = ("first_loss",
        "the first loss is {loss:.1f}, but ln(vocabulary) is {expected:.1f}: the initial weights are too large",
        _FIRST_LOSS)
    FIRST_LOSS_FAR = ("first_loss_far",
        "the first loss is {loss:.1f}, but ln(vocabulary) is {expected:.1f}: the initial weights are far too large",
        _FIRST_LOSS, True)
    LOSS_NOT_FINITE = "loss_not_finite", "loss is not finite (NaN or infinity)", _NOT_FINITE, True
    LOSS_DIFFERS = ("loss_differs",
        f"loss differs by {{difference:percent2}} from {{row}}'s: more than rounding explains; {_NOT_TO_USE}", _LOSSES,
        True)
    LOSS_OF_FORMAT_DIFFERS = ("loss_of_format_differs",
        f"loss differs by {{difference:percent2}} from {{row}}'s: more than the number format explains; {_NOT_TO_USE}",
        _LOSSES, True)
    TRAINED_DIFFERENTLY = ("trained_differently", f"trained differently from {{row}}: {{how}}; {_NOT_TO_USE}", _LOSSES,
        True)
    LOSS_QUIRK = "loss_quirk", f"loss differs by {{difference:percent3}} from the other rows', {_QUIRK}"
    WEIGHTS_QUIRK = "weights_quirk", f"trained differently from {{row}}: {{how}}, {_QUIRK}"
    TRAINED_WRONGLY = "trained_wrongly", "{text}", None, True
    """This version of DeepSpeed trains the row wrongly, as its code shows (``config/rules.py``)."""
    MAY_TRAIN_WRONGLY = "may_train_wrongly", "{text}"
    """The same, but only for models of a certain kind."""
    OTHER_TRAINING = ("other_training", "trains differently on purpose: {how}",
        "compare what both rows learn in a full training run before you choose by speed")
    """Never recommended for its speed (``recommend/decision.py``)."""
    OTHER_ENGINE = ("other_engine", "the script's engine ran with {ran}; this row's file says {asked}",
        "pass the configuration to the script another way (docs/own_work.md)", True)
    OTHER_PARAMETERS = ("other_parameters",
        "trains {own} parameters, but {row} trains {theirs}: a different model", None, True)
    OTHER_TOKENS = ("other_tokens", "step {step} on rank {rank} has {own}, but {theirs} in {row}: different work",
        "make the script's data and accumulation independent of the configuration", True)
    OTHER_DATA = ("other_data", "trained on different data from {row}'s, starting at step {step} (rank {rank})",
        "seed the data separately from the model: random numbers drawn after the model is built depend on the stage")
    OTHER_FIRST_LOSS = "other_first_loss", "the first loss is {own:.4f}, but {theirs:.4f} in {row}", _SEED
    OTHER_LOSSES = "other_losses", "loss differs by {difference:percent} from {row}'s in the first ten steps", _SEED
    EVALUATED = ("evaluated",
        "{count} of {steps} measured steps include an evaluation or a save and take {apart:ms} ms; the others take "
        "{usual:ms} ms", "to measure training steps only, turn evaluation and saving off in the script's arguments")
    STAGE_3_ALONE = "stage_3_alone", "loss parity was checked only among stage-3 rows, not against another stage"

    # The memory of a row.
    NEAR_CAPACITY = ("near_capacity", "near capacity: {fraction:percent} of the card was in use at the peak",
        "leave room for longer sequences and fragmentation: a smaller --batch-size, --activation-checkpointing, or a "
        "strategy that keeps less on the card")
    ALLOCATOR_RETRIED = ("allocator_retried", "the allocator retried near the memory limit, which slows the row down",
        "lower --batch-size, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and measure again")
    BUCKET_DOMINATES = ("bucket_dominates",
        "DeepSpeed's buffers make up most of its tensors' memory (reduce_bucket_size is {elements:,.0f} elements "
        "whatever the model)", "shrink them with --set zero_optimization.reduce_bucket_size=50000000")
    BUCKET_NOT_RESIDENT = ("bucket_not_resident",
        "DeepSpeed's buffers make up most of its tensors' memory (reduce_bucket_size is {elements:,.0f} elements "
        "whatever the model); on the CPU almost none of it was touched, but a GPU would hold all of it")
    MEMORY_PREDICTION_MISSED = ("memory_prediction_missed", "predicted memory is {ratio:.2f} times the measured peak",
        _PREDICTION)
    TENSOR_PREDICTION_MISSED = ("tensor_prediction_missed",
        "predicted tensor memory is {ratio:.2f} times the counted tensor memory", _PREDICTION)
    LONGEST_POSSIBLE = "longest_possible", "no sequence longer than {tokens:,} tokens was tried: {limit}"
    SEARCH_TIMED_OUT = ("search_timed_out",
        "a larger size may fit: the search ended when {size} hit a time limit, which says nothing about memory",
        "raise --timeout or --stall-timeout and continue the search with --resume RUN_DIR --retry Timeout")
    NVME_IN_MEMORY = "nvme_in_memory", "--nvme-path is in memory ({file_system}), not on an NVMe disk", None, True
    NOTHING_SWAPPED = ("nothing_swapped",
        "nothing was swapped: DeepSpeed keeps tensors under {block} bytes in memory; this row does not use NVMe "
        "offload", None, True)
    PARAMETERS_NOT_SWAPPED = ("parameters_not_swapped",
        "the parameters stayed in memory: each partition is under {block} bytes; only the optimizer is swapped")
    NOTHING_REACHED_DISK = ("nothing_reached_disk",
        "no bytes reached the disk in the measured steps: the path is in memory or a cache, not on NVMe", None, True)

    # A row; added only in the report.
    NOT_COMPARABLE = "not_comparable", "no ratio, because the rows differ: {differences}"
    FAILED = "failed", "{text}", None, True

    # A whole comparison.
    TOO_FEW_REPEATS = ("too_few_repeats",
        "{few} of {rows} rows have fewer than {needed} successful runs: their differences are not tested",
        "use --repeats 3 or more")
    SHORT_WINDOW = ("short_window",
        "the shortest measured window is {seconds:.2f} s: below 2 s a card's clock is still settling, and a single "
        "pause of the host has a large effect", "raise --num-steps")
    ONE_GPU = ("one_gpu", "with one GPU or rank, ZeRO 1–3 shard nothing and save no memory without offload",
        "use two GPUs or more to see what stages 1 to 3 save")
    CPU_ACCELERATOR = ("cpu_accelerator", "CPU accelerator: these figures say nothing about GPUs",
        "run the same command where there is a GPU")
    ENVIRONMENT_DIFFERS = ("environment_differs", "environments differ: {differences}",
        "measure both again on one machine with the same versions")
    MEASURED_APART = ("measured_apart", "rows were measured {where}: {runs}",
        "if a difference is small, measure these rows in one run")
    OTHER_PROCESS = ("other_process", "other processes ({processes}) also use {gpu}, which slows the rows down",
        "stop the other processes, or choose a free card with CUDA_VISIBLE_DEVICES")
    THROTTLED_BEFORE = "throttled_before", "{gpu} was throttled before the first trial: {reasons}", _THROTTLED
    WSL = ("wsl", "measured under WSL, whose driver would otherwise move GPU memory to the host: each rank was limited "
        "to the memory that was free on its GPU when it started", "measure on native Linux for figures that hold there")
    SWAP_USED = ("swap_used", "{host} has {swapped:bytes} swapped out",
        "free host memory before measuring, especially for offload rows")
    # fmt: on


UNSTABLE_KINDS = frozenset((CaveatKind.UNSTABLE_RUNS, CaveatKind.UNSTABLE_STEPS))
CPU_KINDS = frozenset((CaveatKind.CPU_BUSY, CaveatKind.CPU_QUOTA))
LOSS_KINDS = frozenset(
    (
        CaveatKind.LOSS_NOT_FINITE,
        CaveatKind.LOSS_DIFFERS,
        CaveatKind.LOSS_OF_FORMAT_DIFFERS,
        CaveatKind.TRAINED_DIFFERENTLY,
        CaveatKind.LOSS_QUIRK,
        CaveatKind.WEIGHTS_QUIRK,
    )
)


@dataclass(frozen=True, slots=True)
class Caveat:
    """One caveat about one row or about the whole comparison, as files store it."""

    kind: CaveatKind
    values: Mapping[str, str | int | float] = field(default_factory=dict)
    """Values for the names in the template: seconds, bytes, fractions, labels."""

    def __post_init__(self) -> None:
        try:
            self.text  # noqa: B018 - raises if the values do not fit the template
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"the caveat {self.kind.value} cannot be written with the values {dict(self.values)}"
            ) from error

    def __hash__(self) -> int:
        return hash((self.kind, frozenset(self.values.items())))

    @property
    def text(self) -> str:
        """One line: the observation with its numbers."""
        return format_template(self.kind.template, self.values)

    @property
    def line(self) -> str:
        """The text and the remedy."""
        return self.text if self.kind.remedy is None else f"{self.text}; {self.kind.remedy}"


def note(text: str) -> Caveat:
    """Return a note: text that belongs to none of the other kinds."""
    return Caveat(CaveatKind.NOTE, {"text": text})


def as_caveat(stored: Caveat | str) -> Caveat:
    """Return a stored caveat as a Caveat; plain text becomes a note."""
    return note(stored) if isinstance(stored, str) else stored


def has_kind(caveats: Iterable[Caveat], *kinds: CaveatKind) -> bool:
    """Whether one of the caveats is of one of these kinds."""
    return any(caveat.kind in kinds for caveat in caveats)
