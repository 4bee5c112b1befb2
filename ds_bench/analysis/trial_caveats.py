"""Caveats that the measurements of one trial show by themselves, without another row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ..config.deepspeed_config import offload_device, uses_nvme
from ..config.spec import Workload
from ..prediction.trial_predictions import is_miss
from ..records.schema import RankMeasurement, TrialRecord
from ..units import format_percent, format_ratio
from .caveats import Caveat, CaveatText, parse_caveat, skipped_steps
from .intervals import sample_std

UNSTABLE_CV = 0.05
"""Coefficient of variation of step times above which a row is called unstable."""
NOT_STEADY = 0.05
"""Difference of the medians of both halves of the window above which a row is not steady."""
NEAR_CAPACITY = 0.95
"""Fraction of the card above which a row is near running out."""
_BUCKET_SHARE = 0.5
_SMALL_BUCKET = 50_000_000
"""Elements; the size that the remedy asks for: at or below it there is nothing to advise."""
_DEFAULT_BUCKET = 500_000_000
_HIGH_FIRST_LOSS = 0.5
"""Excess over ln(V), relative, above which a first loss is named; above twice that the row is no result. Random
logits of standard deviation s add s²/2: matrices of N(0, 0.02²) under a final norm give s² = 0.0004 × hidden size, in
all 1.6 at the 8,192 of a 70B model (ln V is 9 to 12), 3.3 at 16,384. Embeddings of N(0, 1) tied to the head start at 44
or 85."""
_LEAST_EXCESS_LOSS = 2.0
"""For small vocabularies, whose ln(V) is of the size of chance."""
_LEAST_OTHER_CORES = 0.5
"""Cores that other programs must use on average before a row counts as disturbed. What an otherwise idle machine does
beside a trial is far less; a single busy loop beside two ranks on two cores gets about two thirds of a core."""
_OTHER_CORES_SHARE = 0.05
"""The same as a fraction of the cores, for large machines, where more runs in the background."""
_MOST_THROTTLED = 0.05
"""Fraction of a quota's periods (0.1 s each as a rule) that may end in a stop."""
_FEWEST_STEPS = 8
"""Steps below which quartiles say too little to call one an outlier."""
_FENCE = 3.0
"""Interquartile ranges above the third quartile: Tukey's outer fence ("Exploratory Data Analysis", 1977)."""
_LEAST_EXCESS = 1.25
"""Times the median that an outlier takes at least: of steps that hardly vary, the fence finds every small blip."""
_MOST_NAMED = 3
_OPTIMIZER_FAMILIES = ("muon", "adagrad", "adam", "lion", "lamb", "sgd")
"""As they occur in names of optimizers and of their classes; ``MuonWithAuxAdam`` is a Muon."""


def measured_values(measurements: Sequence[object], name: str) -> list[Any]:
    """The values of one field of several ranks or runs, without those that were not measured."""
    return [value for each in measurements if (value := getattr(each, name)) is not None]


def gpu_fraction(record: TrialRecord) -> float | None:
    """Peak reserved memory as a fraction of the GPU's, real or emulated, on the fullest rank; None without a GPU."""
    limit = record.trial.placement.gpu_memory_limit_bytes
    fractions = []
    for rank in record.ranks:
        used = rank.gpu_peak_reserved_bytes or rank.gpu_peak_bytes
        if used is not None and rank.gpu_total_bytes:
            fractions.append(used / min(rank.gpu_total_bytes, limit or rank.gpu_total_bytes))
    return max(fractions, default=None)


def written_caveats(texts: Sequence[str]) -> list[Caveat]:
    """The texts that the plan, the launcher or the ranks stored with a trial, as caveats, each once."""
    return [parse_caveat(text) for text in dict.fromkeys(texts)]


def trial_caveats(
    record: TrialRecord,
    slowest: RankMeasurement,
    deviation: float | None,
    mfu: float | None,
    predicted_over_measured: float | None,
    predicted_over_ledger: float | None,
) -> list[Caveat]:
    """The caveats of one trial. ``deviation``: standard deviation of the slowest rank's step times, in seconds."""
    checks = (
        _unstable(slowest.step_seconds, deviation),
        _not_steady(slowest.step_seconds),
        _outliers(slowest.step_seconds),
        _batch_mismatch(record.trial.workload, slowest),
        _swapped_nothing(record),
        _skipped_steps(slowest),
        _non_finite_loss(record),
        _high_first_loss(record),
        _busy_cpu(record),
        _bucket_dominates(record),
        _short_window(record),
        _near_capacity(record),
        _allocator_retries(record),
        _optimizer_mismatch(record, slowest),
        _prediction_missed(predicted_over_measured, predicted_over_ledger),
        CaveatText.MFU_ABOVE_1.caveat(f"{mfu:.0%} is an error of accounting (wrong peak?)")
        if mfu is not None and mfu > 1
        else None,
    )
    notes = [text for rank in record.ranks for text in rank.notes]
    return [caveat for caveat in checks if caveat is not None] + written_caveats(notes)


def _prediction_missed(of_measured: float | None, of_ledger: float | None) -> Caveat | None:
    """A prediction that missed the GPU's peak, or without a GPU the tensors that the ledger counts."""
    if of_measured is not None:
        caveat = CaveatText.MEMORY_PREDICTION_MISSED.caveat(f" {of_measured:.2f} of what was measured")
        return caveat if is_miss(of_measured) else None
    if of_ledger is not None:
        caveat = CaveatText.TENSOR_PREDICTION_MISSED.caveat(f" {of_ledger:.2f} of those that the ledger counted")
        return caveat if is_miss(of_ledger) else None
    return None


def _unstable(seconds: Sequence[float], deviation: float | None) -> Caveat | None:
    if deviation is None or deviation <= UNSTABLE_CV * (sum(seconds) / len(seconds)):
        return None
    form = CaveatText.UNSTABLE_STEPS
    return form.caveat(f"step times vary by more than {UNSTABLE_CV:.0%}; {form.next_step}")


def _not_steady(seconds: Sequence[float]) -> Caveat | None:
    if len(seconds) < 4:
        return None
    half = len(seconds) // 2
    first, second = statistics.median(seconds[:half]), statistics.median(seconds[-half:])
    if abs(second / first - 1) <= NOT_STEADY:
        return None
    form = CaveatText.NOT_STEADY
    return form.caveat(f"the halves of the window differ by more than {NOT_STEADY:.0%}; {form.next_step}")


def _outliers(seconds: Sequence[float]) -> Caveat | None:
    """Steps that took far longer than the others; they are reported and stay in every statistic."""
    if len(seconds) < _FEWEST_STEPS:
        return None
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    fence = max(third + _FENCE * (third - first), _LEAST_EXCESS * median)
    far = sorted((step for step in range(len(seconds)) if seconds[step] > fence), key=lambda step: -seconds[step])
    if not far:
        return None
    named = [f"step {step + 1} ({format_ratio(seconds[step] / median)} the median)" for step in far[:_MOST_NAMED]]
    more = [f"{len(far) - _MOST_NAMED} more"] if len(far) > _MOST_NAMED else []
    text = f"{len(far)} of {len(seconds)} measured steps took far longer: {', '.join([*named, *more])}"
    return CaveatText.OUTLIERS.caveat(f"{text}, all counted")


def unstable_between_runs(means: Sequence[float]) -> Caveat | None:
    """The caveat of a row whose runs vary too much. ``means``: one per successful run, in any unit."""
    deviation = sample_std(means)
    if deviation is None:
        return None
    variation = deviation / (math.fsum(means) / len(means))
    if variation <= UNSTABLE_CV:
        return None
    text = f"{len(means)} runs vary by {format_percent(variation)}, more than {UNSTABLE_CV:.0%}"
    return CaveatText.UNSTABLE_RUNS.caveat(text)


def _batch_mismatch(workload: Workload, rank: RankMeasurement) -> Caveat | None:
    if (rank.micro_batch_size, rank.grad_accum) == (workload.batch_size, workload.grad_accum):
        return None
    return CaveatText.BATCH_MISMATCH.caveat(
        f" {rank.micro_batch_size} × accumulation {rank.grad_accum}, as the DeepSpeed config says, "
        f"not the flags' {workload.batch_size} × {workload.grad_accum}"
    )


def _swapped_nothing(record: TrialRecord) -> Caveat | None:
    if not uses_nvme(record.trial.ds_config):
        return None
    stored = sum(measured_values(record.ranks, "nvme_stored_bytes"))
    moved = sum(measured_values(record.ranks, "nvme_read_bytes")) + sum(
        measured_values(record.ranks, "nvme_written_bytes")
    )
    # DeepSpeed: the larger of 1 MiB and aio.block_size (swap_tensor/optimizer_utils.py, MIN_AIO_BYTES).
    block = max(2**20, int(record.trial.ds_config.get("aio", {}).get("block_size", 2**20)))
    if stored == 0:
        text = f": DeepSpeed keeps tensors under {block} bytes in memory; this row is not NVMe offload"
        return CaveatText.NOTHING_SWAPPED.caveat(text)
    parameters = sum(rank.ledger.get("nvme", {}).get("parameters", 0) for rank in record.ranks)
    if offload_device(record.trial.ds_config, "offload_param") == "nvme" and parameters == 0:
        text = f" in memory: every partition of one is under {block} bytes; only the optimizer swaps"
        return CaveatText.PARAMETERS_NOT_SWAPPED.caveat(text)
    if moved == 0:
        text = " the disk in the measured steps: the path is memory or cache, not NVMe"
        return CaveatText.NOTHING_REACHED_DISK.caveat(text)
    return None


def _skipped_steps(rank: RankMeasurement) -> Caveat | None:
    if not rank.skipped_steps:
        return None
    return skipped_steps(rank.skipped_steps, len(rank.step_seconds))


def _non_finite_loss(record: TrialRecord) -> Caveat | None:
    if all(None not in rank.losses for rank in record.ranks):
        return None
    return CaveatText.LOSS_NOT_FINITE.caveat(" (NaN or infinity): a fast wrong configuration is no result")


def _high_first_loss(record: TrialRecord) -> Caveat | None:
    """A first loss far above ln(V), the loss of an untrained model on random tokens: wrong initial weights."""
    ranks = [rank for rank in record.ranks if rank.losses and rank.losses[0] is not None]
    vocabulary = min((rank.vocabulary_size for rank in ranks if rank.vocabulary_size), default=0)
    if vocabulary < 2:
        return None
    first = math.fsum(rank.losses[0] or 0.0 for rank in ranks) / len(ranks)
    expected = math.log(vocabulary)
    if first - expected <= max(_HIGH_FIRST_LOSS * expected, _LEAST_EXCESS_LOSS):
        return None
    far = first - expected > 2 * max(_HIGH_FIRST_LOSS * expected, _LEAST_EXCESS_LOSS)
    form = CaveatText.FIRST_LOSS_FAR_TOO_LARGE if far else CaveatText.FIRST_LOSS_TOO_LARGE
    size = form.contains or "too large"
    return form.caveat(f"{first:.1f}, where ln(vocabulary) is {expected:.1f}: the weights begin {size}")


def _busy_cpu(record: TrialRecord) -> Caveat | None:
    """Other programs used processors that this trial needed, or a CPU quota stopped it."""
    nodes: dict[str, list[RankMeasurement]] = {}
    for rank in record.ranks:
        nodes.setdefault(rank.hostname, []).append(rank)
    for ranks in nodes.values():
        first = next((rank for rank in ranks if rank.cpu_other_cores is not None), None)
        if first is None or not first.cpu_cores:
            continue
        cores, other = first.cpu_cores, first.cpu_other_cores or 0.0
        wanted = first.cpu_own_cores or 0.0
        if record.trial.placement.accelerator == "cpu":
            wanted = max(wanted, float(sum(measured_values(ranks, "cpu_threads"))))
        if other >= max(_LEAST_OTHER_CORES, _OTHER_CORES_SHARE * cores) and wanted + other > cores:
            text = f": other programs used {other:.1f} of {cores:g} cores while this row ran"
            return CaveatText.CPU_BUSY.caveat(text)
        if (first.cpu_throttled_fraction or 0.0) > _MOST_THROTTLED:
            text = (
                ": the container's CPU quota stopped this row in "
                f"{format_percent(first.cpu_throttled_fraction, digits=0)} of its periods"
            )
            return CaveatText.CPU_BUSY.caveat(text)
    return None


def _short_window(record: TrialRecord) -> Caveat | None:
    work = record.trial.workload
    if work.warmup_steps == 0:
        return CaveatText.NO_WARM_UP.caveat(
            "the first step, with all that happens once, is in the window; use --warmup-steps"
        )
    if work.num_steps == 1:
        return CaveatText.ONE_STEP.caveat("nothing is known of its spread; use more --num-steps")
    return None


def _bucket_dominates(record: TrialRecord) -> Caveat | None:
    """DeepSpeed's default buckets are sized for large models; for a small model they are most of the memory."""
    size = record.trial.ds_config.get("zero_optimization", {}).get("reduce_bucket_size", _DEFAULT_BUCKET)
    tier = "cpu" if record.trial.placement.accelerator == "cpu" else "gpu"
    ledgers = [rank.ledger.get(tier, {}) for rank in record.ranks]
    fullest = max(ledgers, key=lambda cells: sum(cells.values()))
    held = fullest.get("deepspeed_buffers", 0)
    if not isinstance(size, int | float) or size <= _SMALL_BUCKET or held <= _BUCKET_SHARE * sum(fullest.values()):
        return None
    text = f" of the counted memory (reduce_bucket_size is {size:,.0f} elements whatever the model)"
    if tier == "cpu" and sum(fullest.values()) > max(measured_values(record.ranks, "host_peak_bytes"), default=0):
        form = CaveatText.BUCKET_NOT_RESIDENT
        return form.caveat(f"{text}; {form.contains} became resident, on a GPU it would be held whole")
    return CaveatText.BUCKET_DOMINATES.caveat(f"{text}; a smaller one saves it")


def _near_capacity(record: TrialRecord) -> Caveat | None:
    fraction = gpu_fraction(record)
    if fraction is None or fraction <= NEAR_CAPACITY:
        return None
    return CaveatText.NEAR_CAPACITY.caveat(f"{format_percent(fraction)} of the card was reserved at the peak")


def _allocator_retries(record: TrialRecord) -> Caveat | None:
    if not any(rank.gpu_alloc_retries for rank in record.ranks):
        return None
    return CaveatText.ALLOCATOR_RETRIED.caveat(" near the memory limit: throughput is not what it would be with room")


def _optimizer_mismatch(record: TrialRecord, rank: RankMeasurement) -> Caveat | None:
    """The optimizer is of another family than the one in the configuration; its implementation may differ."""
    requested = str(record.trial.ds_config.get("optimizer", {}).get("type", ""))
    wanted, used = optimizer_family(requested), optimizer_family(rank.optimizer_class)
    if wanted is None or used is None or wanted == used:
        return None
    form = CaveatText.OTHER_OPTIMIZER
    return form.caveat(f"{rank.optimizer_class}{form.contains}{requested} that the DeepSpeed config asks for")


def optimizer_family(name: str) -> str | None:
    """``adam`` for Adam, AdamW and their implementations, likewise for the others; None for an unknown family."""
    return next((family for family in _OPTIMIZER_FAMILIES if family in name.lower()), None)
