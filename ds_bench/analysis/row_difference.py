"""Explains why one row needs more or less memory and time than another: by category, by phase, by configuration key.

The differences by memory category add up to the difference of the totals. If a row measured nothing, predictions stand
in for both rows, and are marked. The savings of other configurations were predicted after the trial ended
(``prediction.what_if.savings``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..config import deepspeed_keys
from ..config.deepspeed_config import layout_config, paths_of
from ..config.identity import differences, facts
from ..config.spec import Configuration
from ..prediction.predicted_memory import UNCOUNTED, Saving
from ..prediction.trial_predictions import stored_prediction
from ..records.schema import MEMORY_PHASES, Tier
from ..system import environment
from ..units import BYTES_PER_GB
from .comparability import incomparable_facts
from .comparison import ComparisonRow, ratio_between
from .intervals import RatioInterval

if TYPE_CHECKING:
    from .row import Run

REST = "rest"
"""Category for the part of the total outside counted tensors; negative if the categories, each at its own peak, sum to
more than the total."""
TOTAL = "total"
"""The only category if a row has no ledger."""
PHASES = ("forward", "backward", "step")
_MIN_SAVING_FRACTION = 0.05
"""Smallest saving to mention, as a fraction of the row's memory."""
_MAX_SAVINGS_SHOWN = 2

Moment = Literal["peak", "after_step"]
Scope = Literal["fullest rank", "fullest node"]

ACTS_ON: Mapping[str, tuple[str, ...]] = {
    "zero_optimization.stage": ("parameters", "gradients", "optimizer_states", "deepspeed_buffers"),
    "zero_optimization.offload_optimizer.device": ("optimizer_states", "gradients", "deepspeed_buffers", "step"),
    "zero_optimization.offload_optimizer.ratio": ("optimizer_states", "gradients", "step"),
    "zero_optimization.offload_optimizer.pin_memory": ("pinned_rounding", "step"),
    "zero_optimization.offload_optimizer.buffer_count": ("deepspeed_buffers",),
    "zero_optimization.offload_param.device": ("parameters", "forward", "backward"),
    "zero_optimization.offload_param.pin_memory": ("pinned_rounding", "forward", "backward"),
    "zero_optimization.offload_param.buffer_count": ("deepspeed_buffers",),
    "zero_optimization.offload_param.buffer_size": ("deepspeed_buffers",),
    "zero_optimization.offload_param.max_in_cpu": ("parameters",),
    "zero_optimization.reduce_bucket_size": ("deepspeed_buffers", "backward"),
    "zero_optimization.overlap_comm": ("deepspeed_buffers", "backward"),
    "zero_optimization.contiguous_gradients": ("deepspeed_buffers",),
    "zero_optimization.reduce_scatter": ("temporaries", "backward"),
    "zero_optimization.round_robin_gradients": ("gradients", "step"),
    "zero_optimization.stage3_prefetch_bucket_size": ("gathered_parameters", "forward", "backward"),
    "zero_optimization.stage3_param_persistence_threshold": ("parameters", "forward", "backward"),
    "zero_optimization.stage3_max_live_parameters": ("gathered_parameters", "forward", "backward"),
    "zero_optimization.stage3_max_reuse_distance": ("gathered_parameters", "backward"),
    "zero_optimization.stage3_allgather_sequential": ("gathered_parameters", "forward", "backward"),
    "zero_optimization.sub_group_size": ("temporaries", "step"),
    "zero_optimization.zero_hpz_partition_size": ("parameters", "backward"),
    "zero_optimization.zero_quantized_weights": ("gathered_parameters", "forward", "backward"),
    "zero_optimization.zero_quantized_gradients": ("temporaries", "backward"),
    "optimizer.type": ("optimizer_states", "step"),
    "optimizer.params.torch_adam": ("temporaries", "step"),
    "bf16.enabled": ("parameters", "gradients", "optimizer_states", "activations"),
    "bf16.bf16_master_weights_and_grads": ("optimizer_states", "gradients"),
    "bf16.bf16_optimizer_states": ("optimizer_states", "gradients"),
    "fp16.enabled": ("parameters", "gradients", "optimizer_states", "activations"),
    "torch_autocast.enabled": ("activations", "forward", "backward"),
    "data_types.grad_accum_dtype": ("gradients",),
    "gradient_accumulation_steps": ("gradients", "forward", "backward"),
    "train_micro_batch_size_per_gpu": ("activations", "forward", "backward"),
    "communication_data_type": ("deepspeed_buffers", "temporaries", "backward"),
    "gradient_clipping": ("step",),
    "aio.block_size": ("step",),
    "aio.queue_depth": ("step",),
    "aio.intra_op_parallelism": ("step",),
    "precision": ("parameters", "gradients", "optimizer_states", "activations"),
    "activation_checkpointing": ("activations", "backward"),
    "batch_size": ("activations", "forward", "backward"),
    "seq_length": ("activations", "forward", "backward"),
    "dropout": ("activations",),
    "grad_accum": ("gradients", "forward", "backward"),
    "num_gpus": ("parameters", "gradients", "optimizer_states"),
    "attention": ("activations", "forward", "backward"),
    "loss": ("activations", "logits_and_loss", "forward", "backward"),
    "tiled_mlp": ("activations", "forward", "backward"),
    "compile": ("activations", "forward", "backward"),
    "cpu_binding": ("forward", "backward", "step"),
    "zero_init": ("build",),
    "tensor_parallel.autotp_size": ("parameters", "gradients", "optimizer_states", "activations"),
    "sequence_parallel_size": ("activations", "forward", "backward"),
    "engine": ("parameters", "gradients", "optimizer_states", "deepspeed_buffers"),
}
"""DeepSpeed key, or field of workload or placement → the memory categories and phases that it affects. From the
formulas of ``prediction`` and from DeepSpeed 0.19.8."""

_RESOLVED_BLOCKS = {
    "zero_optimization": "zero_config",
    "bf16": "bfloat16_config",
    "fp16": "float16_config",
    "aio": "aio_config",
    "compile": "compile_config",
}
"""Block of a DeepSpeed configuration → its name in the configuration that the engine resolved (runtime/config.py)."""
_RESOLVED_KEYS = {
    "optimizer.type": "optimizer_name",
    "torch_autocast.enabled": "torch_autocast_enabled",
    "data_types.grad_accum_dtype": "grad_accum_dtype",
}
_NVME_KEYS = ("buffer_count", "buffer_size", "max_in_cpu")
"""Keys of the offload blocks that are read only for the device ``nvme``."""
_LEFT_OUT_KEYS = ("train_batch_size", "steps_per_print", "nvme_path", "gradient_accumulation_steps")
"""Last parts of keys that are not compared, because they follow from others or do not affect measurements.
Accumulation is compared as a field of the workload, and so is the micro-batch, unless a script sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryDifference:
    """One category of memory in both rows, in bytes."""

    category: str
    """A category of the ledger or of a prediction, or ``rest`` or ``total``."""
    a_bytes: int
    b_bytes: int

    @property
    def difference_bytes(self) -> int:
        return self.b_bytes - self.a_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierDifference:
    """One tier of memory at one moment in both rows; the categories sum to the totals."""

    tier: Tier
    moment: Moment
    """``peak``: in the measured steps, each category at its own peak. ``after_step``: between two steps."""
    scope: Scope
    categories: tuple[CategoryDifference, ...]
    """The largest difference first."""
    predicted: bool = False
    """Whether both rows are predictions, at their fullest moment, because one of them measured nothing."""
    uncounted: tuple[CategoryDifference, ...] = ()
    """Predicted categories that a ledger does not count, at the fullest moment: the likely content of ``rest``. Empty
    unless both rows have predictions."""

    @property
    def a_bytes(self) -> int:
        return sum(each.a_bytes for each in self.categories)

    @property
    def b_bytes(self) -> int:
        return sum(each.b_bytes for each in self.categories)

    @property
    def difference_bytes(self) -> int:
        return self.b_bytes - self.a_bytes


@dataclass(frozen=True, slots=True)
class Pair:
    """One value in both rows; None if not measured."""

    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        return None if self.a is None or self.b is None else self.b - self.a


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeDifference:
    """Time per optimizer step of two rows that both trained."""

    step_seconds: Pair
    tokens_per_second: Pair
    same_tokens: bool
    """Whether both rows train the same number of tokens per step; if not, only their throughputs can be compared."""
    interval: RatioInterval | None
    """Interval of b's throughput divided by a's; None if it was not tested or the rows are not comparable."""
    incomparable_reasons: tuple[str, ...]
    """Why the rows have no ratio; empty if they have one."""
    phase_seconds: Mapping[str, Pair]
    """``forward``, ``backward`` and ``step``, then ``communication`` and ``transfer`` within them: from synchronized
    steps after the window of the run nearest the row's mean, each on its slowest rank. Only phases that both measured.
    """
    gap_seconds: Pair
    """Time in a user script's step before its forward passes."""
    nvme_read_bytes: Pair
    """Per step, largest of any run."""
    nvme_written_bytes: Pair
    """Per step, largest of any run."""
    skipped_steps: Pair
    """Largest count of any run."""
    allocator_retries: Pair
    """Largest count of any run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDifference:
    """A setting that differs between the rows."""

    path: str
    """Key path of the DeepSpeed configuration, an environment variable, or a field of workload or placement."""
    a: Any
    b: Any
    """None: not set, or not read in this row."""
    acts_on: tuple[str, ...]
    """Memory categories and step phases; empty if not known."""
    from_layout: bool = False
    """Whether both values follow from stage, offload devices, batch and precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDifference:
    """Why row ``b`` needs more or less memory and time than row ``a``."""

    a: ComparisonRow
    b: ComparisonRow
    memory: tuple[TierDifference, ...]
    """First the peak of training memory: the GPU's or, on the CPU accelerator, the host's."""
    resident_bytes: Pair
    """Peak resident size of a node's ranks on the CPU accelerator, with libraries but without pages that were never
    written. None on GPUs, where it is the total of the tier ``cpu``."""
    phase_peaks: Mapping[str, Pair]
    """Phase → peak host memory of the fullest node, worst run; only phases that both rows measured."""
    time: TimeDifference | None
    """None unless both rows trained."""
    keys: tuple[KeyDifference, ...]
    environment_differences: tuple[str, ...]
    """Hardware, versions and other settings of the machine."""
    larger: ComparisonRow
    """The row with the higher peak; ``b`` if the peaks are equal or unknown. ``savings`` apply to it."""
    savings: tuple[Saving, ...]
    """Predicted for ``larger``, largest first: at most two, each at least 5 % of its memory."""
    unknown: tuple[str, ...]
    """Missing parts of the results."""

    @property
    def main(self) -> TierDifference | None:
        """The peak of training memory, the first in ``memory``; None if neither row has one."""
        return next((each for each in self.memory if each.moment == "peak"), None)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; sizes in bytes, times in seconds, an infinite end of an interval as None."""
        from pydantic_core import to_jsonable_python

        def row(of: ComparisonRow) -> dict[str, Any]:
            outcome = of.representative.outcome
            return {"name": of.configuration.name, "label": of.label, "runs": len(of.runs), "outcome": outcome}

        def sizes(of: CategoryDifference | TierDifference) -> dict[str, int]:
            return {name: getattr(of, name) for name in ("a_bytes", "b_bytes", "difference_bytes")}

        values = {
            "a": row(self.a),
            "b": row(self.b),
            "memory": [
                {
                    **asdict(tier),
                    "categories": [{"category": each.category, **sizes(each)} for each in tier.categories],
                    "uncounted": [{"category": each.category, **sizes(each)} for each in tier.uncounted],
                    **sizes(tier),
                }
                for tier in self.memory
            ],
            "resident_bytes": self.resident_bytes,
            "phase_peaks": self.phase_peaks,
            "time": self.time,
            "keys": self.keys,
            "environment_differences": self.environment_differences,
            "savings_of": self.larger.configuration.name,
            "savings": self.savings,
            "unknown": self.unknown,
        }
        found: dict[str, Any] = to_jsonable_python(values, inf_nan_mode="null")
        return found


def explain(a: ComparisonRow, b: ComparisonRow) -> RowDifference:
    """Explain how row ``b`` differs from row ``a`` in memory and time."""
    memory = tuple(_memory_differences(a, b))
    trained = a.succeeded and b.succeeded
    time = _time_difference(a, b) if trained else None
    peaks = [each for each in memory if each.moment == "peak"]
    larger = a if peaks and peaks[0].difference_bytes < 0 else b
    phase_peaks = {
        phase: Pair(*(row.largest_in_phase(phase, "host_peak_bytes") for row in (a, b))) for phase in MEMORY_PHASES
    }
    first, second = (row.representative.environment for row in (a, b))
    machines: list[str] = []
    if first is not None and second is not None:
        compared = environment.comparability_differences(first, second)
        machines = [*compared, *environment.setting_differences(first, second)]
    representatives = [row.representative for row in (a, b)]
    missing = {
        "the DeepSpeed configurations": not all(run.has_record for run in representatives),
        "predictions": None in [stored_prediction(run.trial) for run in representatives],
        "memory by category": trained and not any(each.categories[0].category != TOTAL for each in peaks),
        "memory between steps": trained and not any(each.moment == "after_step" for each in memory),
        "the phases of a step": time is not None and "forward" not in time.phase_seconds,
    }
    return RowDifference(
        a=a,
        b=b,
        memory=memory,
        resident_bytes=Pair(a.host_peak_bytes, b.host_peak_bytes) if a.on_cpu and b.on_cpu else Pair(None, None),
        phase_peaks={phase: pair for phase, pair in phase_peaks.items() if pair.difference is not None},
        time=time,
        keys=tuple(_key_differences(*representatives)),
        environment_differences=tuple(machines),
        larger=larger,
        savings=tuple(_savings(larger)),
        unknown=tuple(name for name, is_missing in missing.items() if is_missing),
    )


# ------------------------------------------------------------------ memory


def ledger_of_row(row: ComparisonRow, tier: str, moment: Moment = "peak") -> Counter[str] | None:
    """Return the bytes by category of the fullest GPU or, for memory that ranks share, of the fullest node in any run.

    None if no run counted tensors.
    """
    attribute = "ledger" if moment == "peak" else "ledger_after_step"
    ledgers: list[Counter[str]] = []
    for ranks in (run.ranks for run in row.successes if any(getattr(rank, attribute) for rank in run.ranks)):
        totals: dict[str | int, Counter[str]] = {}
        for rank in ranks:
            holder = rank.rank if tier == "gpu" else rank.hostname
            totals.setdefault(holder, Counter()).update(getattr(rank, attribute).get(tier, {}))
        ledgers += totals.values()
    return max(ledgers, key=Counter.total, default=None)


def _memory_differences(a: ComparisonRow, b: ComparisonRow) -> Iterator[TierDifference]:
    """Yield the tiers that either row uses, first the peak of training memory."""
    device: Tier = "cpu" if a.on_cpu and b.on_cpu else "gpu"
    moments: list[tuple[Tier, Moment]] = [(device, "peak"), (device, "after_step")]
    moments += [(tier, "peak") for tier in ("cpu", "nvme") if tier != device]
    predictions = [each for row in (a, b) if (each := stored_prediction(row.representative.trial)) is not None]
    for tier, moment in moments:
        measured = _measured_categories(a, b, tier, moment)
        predicted: tuple[CategoryDifference, ...] = ()
        if moment == "peak" and len(predictions) == 2:
            predicted = _categories(*(each.in_tier(tier) for each in predictions))
        # The measured peak is the allocator's, and overhead lies outside the allocator.
        outside = ("overhead",) if tier == "gpu" else ()
        uncounted = (each for each in predicted if each.category in UNCOUNTED and each.category not in outside)
        difference = TierDifference(
            tier=tier,
            moment=moment,
            scope="fullest rank" if tier == "gpu" else "fullest node",
            categories=predicted if measured is None else measured,
            predicted=measured is None,
            uncounted=() if measured is None or tier == "nvme" else tuple(uncounted),
        )
        if difference.a_bytes or difference.b_bytes:
            yield difference


def _measured_categories(
    a: ComparisonRow, b: ComparisonRow, tier: Tier, moment: Moment
) -> tuple[CategoryDifference, ...] | None:
    """Return the measured categories; None unless both rows have a total, or both a ledger."""

    def total(row: ComparisonRow) -> int | None:
        """Return the sum of the categories and ``rest``; None if only the ledger covers this tier."""
        if tier == "gpu":
            allocated = row.measured("gpu_allocated_gb")
            return (
                row.gpu_peak_bytes if moment == "peak" else round(max(allocated) * BYTES_PER_GB) if allocated else None
            )
        # The resident size of CPU ranks counts libraries and leaves out pages that were never written.
        return row.host_peak_bytes if tier == "cpu" and not row.on_cpu else None

    totals = [total(row) for row in (a, b)]
    ledgers = [ledger_of_row(row, tier, moment) for row in (a, b)]
    if None in ledgers and None in totals:
        return None
    if None in ledgers:
        # The categories of only one row explain nothing.
        sides = [{TOTAL: total or 0} for total in totals]
    else:
        sides = [dict(ledger or {}) for ledger in ledgers]
        if None not in totals:
            # For both rows or neither: a rest in only one would look like a difference.
            for side, whole in zip(sides, totals, strict=True):
                side[REST] = (whole or 0) - sum(side.values())
    return _categories(*sides)


def _categories(a: Mapping[str, int], b: Mapping[str, int]) -> tuple[CategoryDifference, ...]:
    found = [
        CategoryDifference(category=name, a_bytes=a.get(name, 0), b_bytes=b.get(name, 0))
        for name in dict.fromkeys([*a, *b])
        if a.get(name) or b.get(name)
    ]
    return tuple(sorted(found, key=lambda each: -abs(each.difference_bytes)))


def _savings(row: ComparisonRow) -> list[Saving]:
    """Return the largest savings in the row's training memory, as predicted after its trial ended."""
    prediction = stored_prediction(row.representative.trial)
    if prediction is None:
        return []
    on_gpu = bool(prediction.gpu)
    whole = prediction.gpu_bytes if on_gpu else prediction.host_bytes
    saved = {each.name: each.gpu_bytes if on_gpu else each.host_bytes for each in prediction.savings}
    enough = [each for each in prediction.savings if saved[each.name] >= _MIN_SAVING_FRACTION * whole]
    return sorted(enough, key=lambda each: saved[each.name], reverse=True)[:_MAX_SAVINGS_SHOWN]


# ------------------------------------------------------------------ time


def _time_difference(a: ComparisonRow, b: ComparisonRow) -> TimeDifference:
    runs = [row.representative for row in (a, b)]
    reasons = [each.text for each in incomparable_facts(*runs)]
    first, second = (run.environment for run in runs)
    if first is not None and second is not None:
        reasons += environment.hardware_differences(first, second)
    reasons += [f"{row.label}: {row.invalid_reason}" for row in (a, b) if row.invalid_reason is not None]

    def largest(name: str, scale: float = 1) -> Pair:
        return Pair(*(max(values) * scale if values else None for values in (a.measured(name), b.measured(name))))

    def tokens_per_step(run: Run) -> int:
        row = run.row
        if row.script is not None:
            return round((row.throughput_tokens_per_sec or 0.0) * (row.avg_step_time_ms or 0.0) / 1000)
        sizes = (row.batch_size, row.grad_accum, row.data_parallel_size or row.num_gpus, row.seq_length)
        return math.prod(size or 1 for size in sizes)

    def phases(row: ComparisonRow) -> dict[str, float]:
        for run in row.nearest_to_mean:
            known = {name: getattr(run.row, f"phase_{name}_ms") for name in (*PHASES, "communication", "transfer")}
            if any(known[phase] is not None for phase in PHASES):
                return {name: each / 1000 for name, each in known.items() if each is not None}
        return {}

    ours, theirs = phases(a), phases(b)
    return TimeDifference(
        step_seconds=Pair(a.mean_step_seconds, b.mean_step_seconds),
        tokens_per_second=Pair(a.tokens_per_second, b.tokens_per_second),
        same_tokens=len(set(map(tokens_per_step, runs))) == 1,
        interval=None if reasons else ratio_between(b, a),
        incomparable_reasons=tuple(reasons),
        phase_seconds={name: Pair(ours[name], theirs[name]) for name in ours if name in theirs},
        gap_seconds=largest("gap_ms", 1 / 1000),
        nvme_read_bytes=largest("nvme_read_gb_per_step", BYTES_PER_GB),
        nvme_written_bytes=largest("nvme_written_gb_per_step", BYTES_PER_GB),
        skipped_steps=largest("skipped_steps"),
        allocator_retries=largest("gpu_alloc_retries"),
    )


# ------------------------------------------------------------------ configuration


def _key_differences(a: Run, b: Run) -> Iterator[KeyDifference]:
    """Yield differing DeepSpeed keys, as resolved if known, then differing fields of workload and placement."""
    if a.has_record == b.has_record:  # a flat row has only stage and devices
        yield from _config_differences(a, b)
    optimizers = [run.row.optimizer for run in (a, b)]
    if None not in optimizers and optimizers[0] != optimizers[1]:
        yield KeyDifference(path="optimizer class", a=optimizers[0], b=optimizers[1], acts_on=("step",))
    left_out = ("window", "policy", "place", "config", "name", "repeat", "inspection", "model_config")
    for each in differences(*(facts(run.trial, leave_out=left_out) for run in (a, b))):
        acts_on = ACTS_ON.get(each.fact, ())
        yield KeyDifference(path=each.fact.removeprefix("variables."), a=each.a, b=each.b, acts_on=acts_on)


def _config_differences(a: Run, b: Run) -> Iterator[KeyDifference]:
    trials = [run.trial for run in (a, b)]
    written = [dict(paths_of(trial.ds_config)) for trial in trials]
    resolved = [dict(paths_of(run.ranks[0].resolved_config)) if run.ranks else {} for run in (a, b)]
    defaults = [
        dict(paths_of(layout_config(each.ds_config, each.configuration, each.workload, each.placement)))
        for each in trials
    ]
    # Known keys first, even if nobody wrote them: DeepSpeed may have resolved them to different values.
    for path in dict.fromkeys([*ACTS_ON, *written[0], *written[1]]):
        if path == "engine" or path.rpartition(".")[2] in _LEFT_OUT_KEYS:  # the engine is a fact of the trial
            continue
        if path == "train_micro_batch_size_per_gpu" and not any(trial.workload.script for trial in trials):
            continue
        known = [_effective_value(path, *each) for each in zip(written, resolved, strict=True)]
        values = [
            value if _is_read(path, trial.configuration) else None for value, trial in zip(known, trials, strict=True)
        ]
        block, _, key = path.partition(".")
        name = key.partition(".")[0]
        lower_stages_only = block == "zero_optimization" and not deepspeed_keys.is_read_at_stage(name, 3)
        # A key that only stages 1 and 2 read adds nothing if the stage 3 row sets it to the same value.
        if values[0] == values[1] or (known[0] == known[1] and lower_stages_only):
            continue
        from_layout = all(
            path not in own or own[path] == default.get(path) for own, default in zip(written, defaults, strict=True)
        )
        acts_on = ACTS_ON.get(path, ())
        if path.endswith(".overlap_comm") and not any(
            value is True and trial.configuration.stage < 3 for value, trial in zip(values, trials, strict=True)
        ):
            # only stages 1 and 2 allocate a second bucket for it
            acts_on = tuple(name for name in acts_on if name != "deepspeed_buffers")
        yield KeyDifference(path=path, a=values[0], b=values[1], acts_on=acts_on, from_layout=from_layout)


def _is_read(path: str, configuration: Configuration) -> bool:
    """Return whether the row's engine reads the key at its stage and with its offload devices."""
    block, _, key = path.partition(".")
    if block != "zero_optimization":
        return True
    if configuration.is_reference or key == "stage":
        return not configuration.is_reference
    name, _, inner = key.partition(".")
    if inner in _NVME_KEYS and getattr(configuration, name, None) != "nvme":
        return False
    stage = configuration.stage
    return stage == 3 if key == "offload_optimizer.ratio" else deepspeed_keys.is_read_at_stage(name, stage)


def _effective_value(path: str, written: Mapping[str, Any], resolved: Mapping[str, Any]) -> Any:
    """Return the value as the engine resolved it, else as written; None if neither is known."""
    block, _, key = path.partition(".")
    name = _RESOLVED_KEYS.get(path)
    if name is None and block in _RESOLVED_BLOCKS:
        # DeepSpeed's fields are named without the prefix; the keys are aliases (runtime/zero/config.py).
        name = f"{_RESOLVED_BLOCKS[block]}.{key.removeprefix('stage3_')}"
    elif name is None:
        name = path.replace("optimizer.params.", "optimizer_params.")
    value = resolved.get(name, written.get(path))
    if path.endswith(".device") and value == "none":
        return None  # same as not set
    return value.lower() if path == "optimizer.type" and isinstance(value, str) else value
