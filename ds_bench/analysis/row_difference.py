"""Explains why one row needs more or less memory and time than another: by category, by phase, by configuration key.

Categories of memory sum to the difference of the totals. What was measured is taken first; a prediction takes its place
only where a row measured nothing, for both rows and marked so. What a change of the configuration would save was
predicted when the trial was planned (``prediction.what_if.savings``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..config import deepspeed_keys
from ..config.deepspeed_config import layout_config, paths_of
from ..config.identity import differences, facts
from ..config.spec import Configuration
from ..prediction.memory import UNCOUNTED, Saving
from ..prediction.trial_predictions import stored_prediction
from ..records.schema import MEMORY_PHASES, RankMeasurement, Tier, measured_values
from ..system import environment
from ..units import BYTES_PER_GB
from .comparability import incomparable_facts
from .comparison import ComparisonRow, ratio_between
from .intervals import RatioInterval

if TYPE_CHECKING:
    from .row import Run

REST = "rest"
"""Category of what is in the total and in no tensor that the ledger counted; negative where categories, each at its own
largest, sum to more than the total."""
TOTAL = "total"
"""The only category where a row has no ledger."""
PHASES = ("forward", "backward", "step")
_LEAST_SAVING = 0.05
"""Fraction of the row's memory below which a saving is not named."""
_MOST_SAVINGS = 2

Moment = Literal["peak", "after_step"]
Scope = Literal["fullest rank", "fullest node", "one rank", "whole job"]

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
"""Key of the DeepSpeed configuration, or field of workload or placement → the categories of memory and the phases of a
step that it acts on. From the formulas of ``prediction`` and from DeepSpeed 0.19.8."""

_RESOLVED_BLOCKS = {
    "zero_optimization": "zero_config",
    "bf16": "bfloat16_config",
    "fp16": "float16_config",
    "aio": "aio_config",
    "compile": "compile_config",
}
"""Block of a DeepSpeed configuration → its name in the configuration as the engine resolved it (runtime/config.py)."""
_RESOLVED_KEYS = {
    "optimizer.type": "optimizer_name",
    "torch_autocast.enabled": "torch_autocast_enabled",
    "data_types.grad_accum_dtype": "grad_accum_dtype",
}
_NVME_KEYS = ("buffer_count", "buffer_size", "max_in_cpu")
"""Keys of the offload blocks that are read with the device ``nvme`` alone."""
_LEFT_OUT_KEYS = ("train_batch_size", "steps_per_print", "nvme_path", "gradient_accumulation_steps")
"""Last parts of keys that are not compared: those that follow from other keys or change nothing that is measured.
Accumulation is compared as a field of the workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryDifference:
    """One category of memory in both rows, in bytes."""

    category: str
    """Of the ledger or of a prediction, ``rest`` or ``total``."""
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
    """``peak``: of the measured steps, the categories each at its own largest. ``after_step``: between two steps."""
    scope: Scope
    categories: tuple[CategoryDifference, ...]
    """The largest difference first."""
    predicted: bool = False
    """Whether both rows are predicted, at their fullest moment, because one of them measured nothing."""
    uncounted: tuple[CategoryDifference, ...] = ()
    """Predicted categories that no ledger counts, at the fullest moment: what ``rest`` is likely to consist of. Empty
    without predictions of both rows."""

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
    """One value in both rows; None where it was not measured."""

    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        return None if self.a is None or self.b is None else self.b - self.a


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeDifference:
    """Time of an optimizer step in both rows, which have both trained."""

    step_seconds: Pair
    tokens_per_second: Pair
    same_tokens: bool
    """Whether both rows train as many tokens in a step; else only throughputs compare."""
    interval: RatioInterval | None
    """Of the throughput of b divided by that of a; None if it was not tested or the rows do not compare."""
    incomparable_reasons: tuple[str, ...]
    """Why there is no ratio; empty if there is one."""
    phase_seconds: Mapping[str, Pair]
    """``forward``, ``backward`` and ``step``: measured apart from the window, with the device synchronised between
    phases, on the slowest rank of the run nearest to the row's mean, which the chart of phases shows too. Empty where a
    row has none. Within them ``communication`` and ``transfer``, where both rows have them."""
    nvme_read_bytes: Pair
    """Per step."""
    nvme_written_bytes: Pair
    """Per step."""
    skipped_steps: Pair
    """Most of any run."""
    allocator_retries: Pair
    """Most of any run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDifference:
    """A setting in which the rows differ."""

    path: str
    """Key path of the DeepSpeed configuration, an environment variable, or a field of workload or placement."""
    a: Any
    b: Any
    """None: not set, or not read at this row's stage."""
    acts_on: tuple[str, ...]
    """Categories of memory and phases of a step; empty if not known."""
    from_layout: bool
    """Whether both values follow from stage and offload devices alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDifference:
    """Why row ``b`` needs more or less than row ``a``."""

    a: ComparisonRow
    b: ComparisonRow
    memory: tuple[TierDifference, ...]
    resident_bytes: Pair
    """On the CPU accelerator the peak resident size of a node's ranks, which counts libraries but no page of a tensor
    that nobody wrote; elsewhere it is the total of host memory, and None here."""
    phase_peaks: Mapping[str, Pair]
    """Phase → peak of host memory of the fullest node in it, worst run; empty where a row did not measure it."""
    time: TimeDifference | None
    """None unless both rows trained."""
    keys: tuple[KeyDifference, ...]
    environment_differences: tuple[str, ...]
    """Hardware, versions and other settings of the machine."""
    larger: ComparisonRow
    """The row with the higher peak, which ``savings`` change; ``b`` if that is not known."""
    savings: tuple[Saving, ...]
    """Predicted for ``larger``, the greatest first, at most two of at least 5 % of its memory."""
    unknown: tuple[str, ...]
    """What the results do not hold, so that nothing is said of it."""

    @property
    def main(self) -> TierDifference | None:
        """The peak of the memory that the rows train in: of the GPU, or of the host on the CPU accelerator."""
        peaks = [each for each in self.memory if each.moment == "peak"]
        return next((each for each in peaks if each.tier == "gpu"), next(iter(peaks), None))

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values; sizes in bytes, times in seconds."""

        def category(each: CategoryDifference) -> dict[str, Any]:
            return {**asdict(each), "difference_bytes": each.difference_bytes}

        memory = [
            {
                **asdict(tier),
                "categories": [*map(category, tier.categories)],
                "uncounted": [*map(category, tier.uncounted)],
                **{name: getattr(tier, name) for name in ("a_bytes", "b_bytes", "difference_bytes")},
            }
            for tier in self.memory
        ]
        return {
            "a": _row_facts(self.a),
            "b": _row_facts(self.b),
            "memory": memory,
            "resident_bytes": asdict(self.resident_bytes),
            "phase_peaks": {phase: asdict(pair) for phase, pair in self.phase_peaks.items()},
            "time": None if self.time is None else _finite(asdict(self.time)),
            "keys": [asdict(each) for each in self.keys],
            "environment_differences": list(self.environment_differences),
            "savings_of": self.larger.configuration.name,
            "savings": [asdict(each) for each in self.savings],
            "unknown": list(self.unknown),
        }


def _finite(value: Any) -> Any:
    """The value with None in place of the infinite ends that an interval may have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row_facts(row: ComparisonRow) -> dict[str, Any]:
    outcome = row.representative.outcome
    return {"name": row.configuration.name, "label": row.label, "runs": len(row.runs), "outcome": asdict(outcome)}


def explain(a: ComparisonRow, b: ComparisonRow) -> RowDifference:
    """Explains how row ``b`` differs from row ``a`` in memory and time."""
    memory = tuple(_memory_differences(a, b))
    on_cpu = a.on_cpu and b.on_cpu
    peaks = [each for each in memory if each.moment == "peak"]
    # The first peak is of the memory that the rows train in (_memory_differences).
    larger = a if peaks and peaks[0].difference_bytes < 0 else b
    return RowDifference(
        a=a,
        b=b,
        memory=memory,
        resident_bytes=Pair(a.host_peak_bytes, b.host_peak_bytes) if on_cpu else Pair(None, None),
        phase_peaks=_phase_peaks(a, b),
        time=_time_difference(a, b) if a.succeeded and b.succeeded else None,
        keys=tuple(_key_differences(a.representative, b.representative)),
        environment_differences=tuple(_environment_differences(a, b)),
        larger=larger,
        savings=tuple(_savings(larger)),
        unknown=tuple(_unknown(a, b, memory)),
    )


def _phase_peaks(a: ComparisonRow, b: ComparisonRow) -> dict[str, Pair]:
    def peak(row: ComparisonRow, phase: str) -> int | None:
        phases = [run.phase_memory[phase] for run in row.successes if phase in run.phase_memory]
        return max(measured_values(phases, "host_peak_bytes"), default=None)

    pairs = {phase: Pair(peak(a, phase), peak(b, phase)) for phase in MEMORY_PHASES}
    return {phase: pair for phase, pair in pairs.items() if pair.difference is not None}


# ------------------------------------------------------------------ memory


def ledger_of_tier(ranks: Sequence[RankMeasurement], tier: str, moment: Moment = "peak") -> Counter[str]:
    """Bytes by category of the fullest rank on a GPU; elsewhere of the fullest node, whose ranks share the memory."""
    totals: dict[str | int, Counter[str]] = {}
    for rank in ranks:
        ledger = rank.ledger if moment == "peak" else rank.ledger_after_step
        totals.setdefault(rank.rank if tier == "gpu" else rank.hostname, Counter()).update(ledger.get(tier, {}))
    return max(totals.values(), key=Counter.total)


def ledger_of_row(row: ComparisonRow, tier: str, moment: Moment = "peak") -> Counter[str] | None:
    """That of the run with most bytes; None if no run counted any tensor."""
    attribute = "ledger" if moment == "peak" else "ledger_after_step"
    counted = [run.ranks for run in row.successes if any(getattr(rank, attribute) for rank in run.ranks)]
    return max((ledger_of_tier(ranks, tier, moment) for ranks in counted), key=Counter.total, default=None)


def _memory_differences(a: ComparisonRow, b: ComparisonRow) -> Iterator[TierDifference]:
    """The tiers that either row uses: first the peak of that which the rows train in."""
    device: Tier = "cpu" if a.on_cpu and b.on_cpu else "gpu"
    moments: list[tuple[Tier, Moment]] = [(device, "peak"), (device, "after_step")]
    moments += [(tier, "peak") for tier in ("cpu", "nvme") if tier != device]
    for tier, moment in moments:
        difference = _measured_difference(a, b, tier, moment)
        if difference is None and moment == "peak":
            difference = _predicted_difference(a, b, tier)
        if difference is not None and (difference.a_bytes or difference.b_bytes):
            yield difference


def _measured_difference(a: ComparisonRow, b: ComparisonRow, tier: Tier, moment: Moment) -> TierDifference | None:
    """None if a row measured neither a total nor a ledger."""
    totals = [_measured_total(row, tier, moment) for row in (a, b)]
    ledgers = [ledger_of_row(row, tier, moment) for row in (a, b)]
    if None in ledgers and None in totals:
        return None
    scope = _scope(a, b, tier)
    if None in ledgers:
        # Categories of one row alone explain no difference.
        sides = [{TOTAL: total or 0} for total in totals]
    else:
        sides = [dict(ledger or {}) for ledger in ledgers]
        if None not in totals:
            # Of both rows or of none: a rest against nothing would look like a difference.
            for side, total in zip(sides, totals, strict=True):
                side[REST] = (total or 0) - sum(side.values())
    uncounted = _uncounted(a, b, tier) if moment == "peak" else ()
    return TierDifference(tier=tier, moment=moment, scope=scope, categories=_categories(*sides), uncounted=uncounted)


def _scope(a: ComparisonRow, b: ComparisonRow, tier: Tier) -> Scope:
    if tier == "gpu":
        return "fullest rank"
    return "fullest node" if _has_all_ranks(a) and _has_all_ranks(b) else "one rank"


def _has_all_ranks(row: ComparisonRow) -> bool:
    """Whether every rank's measurement is there; a flat file has the largest of the ranks alone."""
    return all(run.has_record for run in row.successes)


def _measured_total(row: ComparisonRow, tier: Tier, moment: Moment) -> int | None:
    """The total that the categories and ``rest`` sum to; None where only the ledger tells."""
    if tier == "gpu":
        allocated = measured_values([run.row for run in row.successes], "gpu_allocated_gb")
        return row.gpu_peak_bytes if moment == "peak" else round(max(allocated) * BYTES_PER_GB) if allocated else None
    # On CPU ranks the resident size has libraries too and lacks pages that nobody wrote: the ledger alone tells.
    if tier == "cpu" and not row.on_cpu and _has_all_ranks(row):
        return row.host_peak_bytes
    return None


def _predicted_difference(a: ComparisonRow, b: ComparisonRow, tier: Tier) -> TierDifference | None:
    """Both rows at their predicted fullest moment; None without predictions of both."""
    predictions = [stored_prediction(row.representative.trial) for row in (a, b)]
    if None in predictions:
        return None
    sides = [each.in_tier(tier) for each in predictions if each is not None]
    scope: Scope = "fullest rank" if tier == "gpu" else "fullest node"
    return TierDifference(tier=tier, moment="peak", scope=scope, categories=_categories(*sides), predicted=True)


def _uncounted(a: ComparisonRow, b: ComparisonRow, tier: Tier) -> tuple[CategoryDifference, ...]:
    predicted = _predicted_difference(a, b, tier)
    if predicted is None or tier == "nvme":
        return ()
    outside = ("overhead",) if tier == "gpu" else ()  # the allocator's peak has no memory outside the allocator
    return tuple(each for each in predicted.categories if each.category in UNCOUNTED and each.category not in outside)


def _categories(a: Mapping[str, int], b: Mapping[str, int]) -> tuple[CategoryDifference, ...]:
    found = [
        CategoryDifference(category=name, a_bytes=a.get(name, 0), b_bytes=b.get(name, 0))
        for name in dict.fromkeys([*a, *b])
    ]
    return tuple(
        sorted((each for each in found if each.a_bytes or each.b_bytes), key=lambda each: -abs(each.difference_bytes))
    )


def _savings(row: ComparisonRow) -> Iterator[Saving]:
    """The greatest savings of the memory that the row trains in, as they were predicted with it."""
    prediction = stored_prediction(row.representative.trial)
    if prediction is None:
        return
    on_gpu = bool(prediction.gpu)
    whole = prediction.gpu_bytes if on_gpu else prediction.host_bytes

    def saved(saving: Saving) -> int:
        return saving.gpu_bytes if on_gpu else saving.host_bytes

    enough = [each for each in prediction.savings if saved(each) >= _LEAST_SAVING * whole]
    yield from sorted(enough, key=saved, reverse=True)[:_MOST_SAVINGS]


# ------------------------------------------------------------------ time


def _time_difference(a: ComparisonRow, b: ComparisonRow) -> TimeDifference:
    runs = [row.representative for row in (a, b)]
    reasons = [*(each.text for each in incomparable_facts(*runs)), *_hardware_differences(*runs)]
    reasons += [f"{row.label}: {row.invalid_reason}" for row in (a, b) if row.invalid_reason is not None]
    first, second = _phase_seconds(a), _phase_seconds(b)
    rows = [[run.row for run in row.successes] for row in (a, b)]

    def most(name: str, measured: Sequence[Sequence[object]], size: float = 1) -> Pair:
        largest = (max(measured_values(of_row, name), default=None) for of_row in measured)
        return Pair(*(None if value is None else value * size for value in largest))

    return TimeDifference(
        step_seconds=Pair(a.mean_step_seconds, b.mean_step_seconds),
        tokens_per_second=Pair(a.tokens_per_second, b.tokens_per_second),
        same_tokens=len({_tokens_per_step(run) for run in runs}) == 1,
        interval=None if reasons else ratio_between(b, a),
        incomparable_reasons=tuple(reasons),
        phase_seconds={name: Pair(first[name], second[name]) for name in first if name in second},
        nvme_read_bytes=most("nvme_read_gb_per_step", rows, BYTES_PER_GB),
        nvme_written_bytes=most("nvme_written_gb_per_step", rows, BYTES_PER_GB),
        skipped_steps=most("skipped_steps", rows),
        allocator_retries=most("gpu_alloc_retries", rows),
    )


def _tokens_per_step(run: Run) -> int:
    row = run.row
    return row.batch_size * row.grad_accum * (row.data_parallel_size or row.num_gpus) * row.seq_length


def _phase_seconds(row: ComparisonRow) -> dict[str, float]:
    """See ``TimeDifference.phase_seconds``; without those that were not measured, empty without any phase."""
    for run in row.nearest_to_mean:
        measured = {phase: getattr(run.row, f"phase_{phase}_ms") for phase in PHASES}
        phases = {phase: each / 1000 for phase, each in measured.items() if each is not None}
        if phases:
            within = {"communication": run.row.phase_communication_ms, "transfer": run.row.phase_transfer_ms}
            return phases | {name: each / 1000 for name, each in within.items() if each is not None}
    return {}


def _hardware_differences(a: Run, b: Run) -> list[str]:
    if a.environment is None or b.environment is None:
        return []
    return environment.hardware_differences(a.environment, b.environment)


def _environment_differences(a: ComparisonRow, b: ComparisonRow) -> list[str]:
    first, second = (row.representative.environment for row in (a, b))
    if first is None or second is None:
        return []
    return [
        *environment.comparability_differences(first, second),
        *environment.setting_differences(first, second),
    ]


# ------------------------------------------------------------------ configuration


def _key_differences(a: Run, b: Run) -> Iterator[KeyDifference]:
    """Keys of the DeepSpeed configurations, as resolved where that is known; then fields of workload and placement."""
    trials = a.trial, b.trial
    if a.has_record == b.has_record:  # of flat rows stage and devices
        yield from _config_differences(a, b)
    optimizers = [run.row.optimizer for run in (a, b)]
    if None not in optimizers and optimizers[0] != optimizers[1]:
        yield KeyDifference(
            path="optimizer class", a=optimizers[0], b=optimizers[1], acts_on=("step",), from_layout=False
        )
    left_out = ("window", "policy", "place", "config", "name", "repeat", "inspection", "model_config")
    for each in differences(*(facts(trial, leave_out=left_out) for trial in trials)):
        acts_on = ACTS_ON.get(each.fact, ())
        path = each.fact.removeprefix("variables.")
        yield KeyDifference(path=path, a=each.a, b=each.b, acts_on=acts_on, from_layout=False)


def _config_differences(a: Run, b: Run) -> Iterator[KeyDifference]:
    runs = a, b
    configurations = [run.trial.configuration for run in runs]
    written = [dict(paths_of(run.trial.ds_config)) for run in runs]
    resolved = [dict(paths_of(run.ranks[0].resolved_config)) if run.ranks else {} for run in runs]
    defaults = [
        dict(paths_of(layout_config(each.ds_config, each.configuration, each.workload, each.placement)))
        for each in (a.trial, b.trial)
    ]
    # Known keys first, though nobody wrote them: what DeepSpeed resolved them to may differ.
    paths = dict.fromkeys([*ACTS_ON, *written[0], *written[1]])
    for path in paths:
        if path.rpartition(".")[2] in _LEFT_OUT_KEYS:
            continue
        known = [_effective_value(path, *each) for each in zip(written, resolved, strict=True)]
        values = [
            value if _is_read(path, configuration) else None
            for value, configuration in zip(known, configurations, strict=True)
        ]
        # What stages 1 and 2 alone read is no further difference to a row of stage 3 in which it is set alike.
        if values[0] == values[1] or (known[0] == known[1] and _is_of_lower_stages(path)):
            continue
        from_layout = all(
            path not in own or own[path] == default.get(path) for own, default in zip(written, defaults, strict=True)
        )
        acts_on = ACTS_ON.get(path, ())
        if path.endswith(".overlap_comm") and not any(
            value is True and configuration.stage < 3
            for value, configuration in zip(values, configurations, strict=True)
        ):
            acts_on = tuple(name for name in acts_on if name != "deepspeed_buffers")  # a second bucket: stages 1 and 2
        yield KeyDifference(path=path, a=values[0], b=values[1], acts_on=acts_on, from_layout=from_layout)


def _is_of_lower_stages(path: str) -> bool:
    """Whether it is a key of ``zero_optimization`` that is read at stages 1 and 2 and not at stage 3."""
    block, _, key = path.partition(".")
    return block == "zero_optimization" and not deepspeed_keys.is_read_at_stage(key.partition(".")[0], 3)


def _is_read(path: str, configuration: Configuration) -> bool:
    """Whether the row's engine reads the key for its stage and offload devices."""
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
    """The value as the engine resolved it, else as it was written; None if neither is known."""
    block, _, key = path.partition(".")
    name = _RESOLVED_KEYS.get(path)
    if name is None and block in _RESOLVED_BLOCKS:
        # DeepSpeed's fields are named without the prefix; the keys are aliases (runtime/zero/config.py).
        name = f"{_RESOLVED_BLOCKS[block]}.{key.removeprefix('stage3_')}"
    elif name is None:
        name = path.replace("optimizer.params.", "optimizer_params.")
    value = resolved.get(name, written.get(path))
    if path.endswith(".device") and value == "none":
        return None  # which is the same
    return value.lower() if path == "optimizer.type" and isinstance(value, str) else value


# ------------------------------------------------------------------ what is not known


def _unknown(a: ComparisonRow, b: ComparisonRow, memory: Sequence[TierDifference]) -> Iterator[str]:
    trials = [row.representative.trial for row in (a, b)]
    if not all(row.representative.has_record for row in (a, b)):
        yield "the DeepSpeed configurations"
    if None in map(stored_prediction, trials):
        yield "predictions"
    if a.succeeded and b.succeeded:
        if not any(each.moment == "peak" and each.categories[0].category != TOTAL for each in memory):
            yield "memory by category"
        if not any(each.moment == "after_step" for each in memory):
            yield "memory between steps"
        if any("forward" not in _phase_seconds(row) for row in (a, b)):
            yield "the phases of a step"
