"""Decides which caveats follow from the measurements of one trial, with their figures, without another row."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from ..config.caveat_texts import Caveat, CaveatKind, as_caveat
from ..config.deepspeed_config import AUTO, REMOVED_BY_ENGINE
from ..config.deepspeed_keys import use_version
from ..config.identity import differences
from ..config.rules import WRONG_TRAINING, Case, row_caveats
from ..config.spec import Trial
from ..config.training_script import OWN_KEYS
from ..config.validation import unread_key
from ..prediction.trial_predictions import is_gpu_miss, is_miss, outside_allocator_bytes
from ..prediction.what_if import DEFAULT_BUCKET, SMALL_BUCKET
from ..records.schema import RankMeasurement, TrialRecord, measured_values
from ..system.redaction import redacted_config
from ..units import format_ratio
from .intervals import sample_std
from .step_costs import disk_wait

UNSTABLE_CV = 0.05
"""Coefficient of variation of step times, or of the means of runs, above which a row is called unstable."""
NOT_STEADY = 0.05
"""Relative difference between the medians of the window's two halves above which a row is not steady."""
NEAR_CAPACITY = 0.95
"""Fraction of the GPU's memory above which a row is near running out."""
_BUCKET_FRACTION = 0.5
"""Fraction of the counted memory above which DeepSpeed's buffers dominate."""
_EXCESS_OF_FIRST_LOSS = 0.5
"""Relative excess over ln(V) above which a first loss is reported; above twice this, the row is disqualified.

Random logits of standard deviation s add s²/2 to ln(V): matrices of N(0, 0.02²) under a final norm give
s² = 0.0004 × hidden size, which adds 1.6 at the 8,192 of a 70B model (ln V is 9 to 12) and 3.3 at 16,384. Embeddings of
N(0, 1) tied to the head start at a loss of 44 or more.
"""
_MIN_EXCESS_OF_FIRST_LOSS = 2.0
"""The same in absolute terms: with a small vocabulary, half of ln(V) is within random variation."""
_MIN_OTHER_CORES = 0.5
"""Cores that other programs must use on average before a row counts as disturbed.

An otherwise idle machine uses far fewer during a trial; one busy loop next to two ranks on two cores gets about two
thirds of a core.
"""
_MIN_OTHER_CORES_FRACTION = 0.05
"""The same as a fraction of the cores, for large machines, which run more in the background."""
_MAX_THROTTLED_FRACTION = 0.05
"""Fraction of a CPU quota's periods (0.1 s by default) that may be throttled before the row says so."""
_MAX_DATA_WAIT = 0.05
"""Fraction of a step that may be spent waiting for the data loader before the row says so."""
_MIN_STEPS_FOR_OUTLIERS = 8
"""Number of steps below which quartiles are too uncertain to call a step an outlier."""
_OUTLIER_FENCE = 3.0
"""Interquartile ranges above the third quartile: Tukey's outer fence ("Exploratory Data Analysis", 1977)."""
_MIN_OUTLIER_RATIO = 1.25
"""An outlier takes at least this multiple of the median: if steps hardly vary, Tukey's fence flags tiny deviations."""
_MAX_CLOCK_DIFFERENCE = 0.05
"""GPUs of one model run within a few percent of each other when none is throttled."""
_MAX_NAMED_OUTLIERS = 3
_MAX_NAMED_KEYS = 3
_KEYS_SET_BY_LIBRARIES = {"steps_per_print", "zero_allow_untested_optimizer", "checkpoint.use_node_local_storage"}
"""Keys that Accelerate and the Trainer set whatever the file says."""
_OPTIMIZER_FAMILIES = ("muon", "adagrad", "adam", "lion", "lamb", "sgd")
"""Substrings of the names of optimizers and their classes; the first match counts: ``MuonWithAuxAdam`` is a Muon."""


def gpu_fraction(record: TrialRecord) -> float | None:
    """Return peak memory as a fraction of the GPU's, real or emulated, on the fullest rank; None without a GPU.

    It counts what torch's allocator reserved, since a GPU runs out of reserved memory, and what was in use outside it:
    CUDA's context, NCCL, other processes. An emulated limit applies only to the allocator.
    """
    limit = record.trial.placement.gpu_memory_limit_bytes
    fractions = []
    for rank in record.ranks:
        used = rank.gpu_peak_reserved_bytes or rank.gpu_peak_bytes
        if used is not None and rank.gpu_total_bytes:
            outside = 0 if limit else outside_allocator_bytes([rank]) or 0
            fractions.append((used + outside) / min(rank.gpu_total_bytes, limit or rank.gpu_total_bytes))
    return max(fractions, default=None)


def trial_caveats(
    record: TrialRecord,
    mfu: float | None,
    predicted_over_measured: float | None,
    predicted_over_ledger: float | None,
) -> Iterator[Caveat]:
    """Yield the caveats that follow from one trial's measurements, then the notes that its ranks wrote."""
    trial, ranks, slowest = record.trial, record.ranks, record.slowest_rank
    if not trial.workload.synchronized:
        meaning = "these are launch times; the throughput, TFLOP/s and MFU from them are wrong"
        if trial.placement.accelerator == "cpu":
            meaning = "harmless here: a CPU has finished when a call returns; on a GPU these would be launch times"
        yield Caveat(CaveatKind.NOT_SYNCHRONIZED, {"meaning": meaning})
    usual, evaluated = _usual_steps(slowest)
    yield from _script_caveats(record, list(usual.values()), evaluated)
    yield from _step_time_caveats(usual, len(slowest.step_seconds))
    ran, asked = (slowest.micro_batch_size, slowest.grad_accum), (trial.workload.batch_size, trial.workload.grad_accum)
    if ran != asked and trial.workload.script is None:
        values = {"ran": "{} × accumulation {}".format(*ran), "asked": "{} × {}".format(*asked)}
        yield Caveat(CaveatKind.BATCH_MISMATCH, values)
    longest = max(ranks, key=lambda rank: rank.data_wait_seconds or 0.0)
    wait, step = longest.data_wait_seconds or 0.0, statistics.fmean(longest.step_seconds)
    if wait > _MAX_DATA_WAIT * step:
        yield Caveat(CaveatKind.DATA_WAIT, {"wait": wait, "step": step})
    if trial.configuration.uses_nvme and trial.workload.script is None:
        yield from _nvme_caveats(record)
    yield from _training_caveats(record)
    yield from _cpu_caveats(record)
    yield from _bucket_caveats(record)
    if trial.workload.warmup_steps == 0 and not slowest.warmup_step_seconds:
        yield Caveat(CaveatKind.NO_WARM_UP)
    elif trial.workload.num_steps == 1:
        yield Caveat(CaveatKind.ONE_STEP)
    yield from _gpu_caveats(record)
    fraction = gpu_fraction(record)
    if fraction is not None and fraction > NEAR_CAPACITY:
        yield Caveat(CaveatKind.NEAR_CAPACITY, {"fraction": fraction})
    if any(rank.gpu_alloc_retries for rank in ranks):
        yield Caveat(CaveatKind.ALLOCATOR_RETRIED)
    # The optimizer's implementation may differ from the configured one; its family must not.
    requested = (
        "" if "optimizer" in _keys_of_script(trial) else str(trial.ds_config.get("optimizer", {}).get("type", ""))
    )
    families = optimizer_family(requested), optimizer_family(slowest.optimizer_class)
    if None not in families and families[0] != families[1]:
        yield Caveat(CaveatKind.OTHER_OPTIMIZER, {"used": slowest.optimizer_class, "asked": requested})
    if predicted_over_measured is not None:
        if is_gpu_miss(predicted_over_measured, record):
            yield Caveat(CaveatKind.MEMORY_PREDICTION_MISSED, {"ratio": predicted_over_measured})
    elif predicted_over_ledger is not None and is_miss(predicted_over_ledger):
        yield Caveat(CaveatKind.TENSOR_PREDICTION_MISSED, {"ratio": predicted_over_ledger})
    if mfu is not None and mfu > 1:
        yield Caveat(CaveatKind.MFU_ABOVE_1, {"mfu": mfu})
    yield from map(as_caveat, dict.fromkeys(each for rank in ranks for each in rank.notes))


def _script_caveats(record: TrialRecord, usual: Sequence[float], evaluated: Sequence[float]) -> Iterator[Caveat]:
    """Yield the caveats of one trial of a script: an engine other than the row's, settings that this DeepSpeed trains
    wrongly or does not read, batches without tokens, evaluations and saves.

    ``usual``, ``evaluated``: from :func:`_usual_steps`.
    """
    asked, rank = record.trial.configuration, record.slowest_rank
    script = rank.script
    if script is None:
        return
    ran, named = (script.stage, script.offload_optimizer, script.offload_param), asked.layout
    resolved, own = record.ranks[0].resolved_config, _keys_of_script(record.trial)
    # Values of the row's file that the script's engine does not have; none if the engine's are unknown.
    unlike = [
        each
        for each in differences(resolved, redacted_config(record.trial.ds_config))
        if resolved and each.b not in (None, AUTO) and each.fact not in _KEYS_SET_BY_LIBRARIES and each.field not in own
        if each.a is not None or each.fact not in REMOVED_BY_ENGINE
    ][:_MAX_NAMED_KEYS]
    if ran != named:
        texts = [f"stage {stage}, optimizer on {_place(a)}, parameters on {_place(b)}" for stage, a, b in (ran, named)]
        yield Caveat(CaveatKind.OTHER_ENGINE, {"ran": texts[0], "asked": texts[1]})
    elif unlike:
        ran_values = [f"{each.fact} {'not set' if each.a is None else json.dumps(each.a)}" for each in unlike]
        asked_values = [json.dumps(each.b) for each in unlike]
        yield Caveat(CaveatKind.OTHER_ENGINE, {"ran": ", ".join(ran_values), "asked": ", ".join(asked_values)})
    with use_version(rank.deepspeed_version):  # may differ from this program's
        case = Case(config={**rank.resolved_config, "gradient_accumulation_steps": rank.grad_accum})
        found = list(row_caveats(case, WRONG_TRAINING))
        found += filter(None, [unread_key(record.trial.ds_config)])
    seen = [name for name in ("tokens", "samples") if any(sum(rank.in_window(name)) for rank in record.ranks)]
    if "tokens" not in seen:
        missing = (
            "token ids found in the script's batches" if any(script.micro_steps) else "forward pass of the engine found"
        )
        found.append(f"no {missing}: rows are compared by {(*seen, 'steps')[0]} per second")
    yield from map(as_caveat, found)
    if evaluated and usual:
        values = {"count": len(evaluated), "steps": len(evaluated) + len(usual)}
        means = {"apart": statistics.fmean(evaluated), "usual": statistics.fmean(usual)}
        yield Caveat(CaveatKind.EVALUATED, {**values, **means})


def _keys_of_script(trial: Trial) -> tuple[str, ...]:
    """Return the keys that the script keeps when the row's file replaces its configuration."""
    script = trial.workload.script
    return OWN_KEYS if script is not None and script.config_source == "override" else ()


def _place(device: str) -> str:
    return "the device" if device == "none" else device


def _usual_steps(rank: RankMeasurement) -> tuple[dict[int, float], list[float]]:
    """Return number → duration of the measured steps without an evaluation or save, and durations of those with one."""
    steps = dict(enumerate(rank.step_seconds, 1))
    if rank.script is None:
        return steps, []
    extra = zip(steps, rank.in_window("evaluation_forwards"), rank.in_window("saves"), strict=True)
    evaluated = [number for number, *counts in extra if any(counts)]
    # If every step has one, as with a reference model, none is unusual.
    if len(evaluated) == len(steps):
        return steps, []
    return {number: steps[number] for number in steps if number not in evaluated}, [steps[each] for each in evaluated]


def _step_time_caveats(usual: Mapping[int, float], measured_steps: int) -> Iterator[Caveat]:
    seconds = list(usual.values())
    std = sample_std(seconds)
    if std is not None and std > UNSTABLE_CV * (sum(seconds) / len(seconds)):
        yield Caveat(CaveatKind.UNSTABLE_STEPS)
    # At least two steps in each half.
    if len(seconds) >= 4:
        half = len(seconds) // 2
        # Medians, so that one slow step in a half does not count as drift.
        first, second = statistics.median(seconds[:half]), statistics.median(seconds[-half:])
        if abs(second / first - 1) > NOT_STEADY:
            yield Caveat(CaveatKind.NOT_STEADY)
    if len(seconds) < _MIN_STEPS_FOR_OUTLIERS:
        return
    # Steps that took far longer than the others; they stay in every statistic.
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    fence = max(third + _OUTLIER_FENCE * (third - first), _MIN_OUTLIER_RATIO * median)
    slow = sorted((number for number in usual if usual[number] > fence), key=lambda number: -usual[number])
    if slow:
        parts = [f"step {number} ({format_ratio(usual[number] / median)} the median)" for number in slow]
        if len(slow) > _MAX_NAMED_OUTLIERS:
            parts[_MAX_NAMED_OUTLIERS:] = [f"{len(slow) - _MAX_NAMED_OUTLIERS} more"]
        yield Caveat(CaveatKind.OUTLIERS, {"count": len(slow), "steps": measured_steps, "slowest": ", ".join(parts)})


def unstable_between_runs(means: Sequence[float]) -> Caveat | None:
    """Return the caveat of a row whose runs vary too much, or None. ``means``: one per successful run, in any unit."""
    std = sample_std(means)
    variation = 0.0 if std is None else std / (math.fsum(means) / len(means))
    if variation <= UNSTABLE_CV:
        return None
    return Caveat(CaveatKind.UNSTABLE_RUNS, {"runs": len(means), "variation": variation})


def _nvme_caveats(record: TrialRecord) -> Iterator[Caveat]:
    """Report NVMe offload that did not happen, did not reach a disk, or was disk-bound."""
    config, ranks = record.trial.ds_config, record.ranks
    # DeepSpeed: the larger of 1 MiB and aio.block_size (swap_tensor/optimizer_utils.py, MIN_AIO_BYTES).
    block_bytes = max(2**20, int(config.get("aio", {}).get("block_size", 2**20)))
    swapped_parameter_bytes = sum(rank.ledger.get("nvme", {}).get("parameters", 0) for rank in ranks)
    if not sum(measured_values(ranks, "nvme_stored_bytes")):
        yield Caveat(CaveatKind.NOTHING_SWAPPED, {"block": block_bytes})
    elif record.trial.configuration.offload_param == "nvme" and not swapped_parameter_bytes:
        yield Caveat(CaveatKind.PARAMETERS_NOT_SWAPPED, {"block": block_bytes})
    elif not any(measured_values(ranks, "nvme_read_bytes") + measured_values(ranks, "nvme_written_bytes")):
        yield Caveat(CaveatKind.NOTHING_REACHED_DISK)
    wait, other = disk_wait(record) or (0.0, 0.0)
    if wait > other:
        yield Caveat(CaveatKind.DISK_BOUND, {"wait": wait, "other": other})


def _training_caveats(record: TrialRecord) -> Iterator[Caveat]:
    """Report skipped steps, losses that are not finite or start too high, weights that did not train, frozen ones that
    did.

    ln(V), with V the size of the vocabulary, is the loss of an untrained model on random tokens; a first loss far above
    it shows wrong initial weights.
    """
    slowest = record.slowest_rank
    if slowest.skipped_steps:
        skipped_all = slowest.skipped_steps >= len(slowest.step_seconds)
        kind = CaveatKind.ALL_STEPS_SKIPPED if skipped_all else CaveatKind.STEPS_SKIPPED
        yield Caveat(kind, {"count": slowest.skipped_steps})
    if any(None in rank.losses for rank in record.ranks):
        yield Caveat(CaveatKind.LOSS_NOT_FINITE)
    first_losses = [loss for rank in record.ranks for loss in rank.losses[:1] if loss is not None]
    vocabulary_size = min((rank.vocabulary_size for rank in record.ranks if rank.vocabulary_size), default=0)
    if first_losses and vocabulary_size > 1:
        first, expected = math.fsum(first_losses) / len(first_losses), math.log(vocabulary_size)
        allowed_excess = max(_EXCESS_OF_FIRST_LOSS * expected, _MIN_EXCESS_OF_FIRST_LOSS)
        if first - expected > allowed_excess:
            far = first - expected > 2 * allowed_excess
            kind = CaveatKind.FIRST_LOSS_FAR if far else CaveatKind.FIRST_LOSS
            yield Caveat(kind, {"loss": first, "expected": expected})
    changes = [rank.weight_change for rank in record.ranks]
    if None not in changes and not any(any(change or ()) for change in changes):
        yield Caveat(CaveatKind.DOES_NOT_TRAIN)
    if any(rank.frozen_weights_changed for rank in record.ranks):
        yield Caveat(CaveatKind.FROZEN_WEIGHTS_CHANGED)


def _cpu_caveats(record: TrialRecord) -> Iterator[Caveat]:
    """Report that other programs used cores the trial needed or, failing that, that a CPU quota throttled it.

    Yields at most one caveat, for the busiest processors.
    """
    sharing: dict[object, list[RankMeasurement]] = {}
    for rank in record.ranks:
        # Ranks that are bound have processors of their own; the others share the node's.
        sharing.setdefault((rank.hostname, rank.cpus_allowed), []).append(rank)
    busiest = [max(ranks, key=lambda rank: rank.cpu_other_cores or 0.0) for ranks in sharing.values()]
    for rank in sorted(busiest, key=lambda rank: -(rank.cpu_other_cores or 0.0)):
        if rank.cpu_other_cores is None or not rank.cpu_cores:
            continue
        needed_cores = rank.cpu_own_cores or 0.0
        if record.trial.placement.accelerator == "cpu":
            # Threads that wait for each other use no core (OMP_WAIT_POLICY=passive), but need one when they resume.
            ranks = sharing[rank.hostname, rank.cpus_allowed]
            needed_cores = max(needed_cores, float(sum(measured_values(ranks, "cpu_threads"))))
        disturbing_cores = max(_MIN_OTHER_CORES, _MIN_OTHER_CORES_FRACTION * rank.cpu_cores)
        # With cores to spare for both, other programs slow nothing down.
        if rank.cpu_other_cores >= disturbing_cores and needed_cores + rank.cpu_other_cores > rank.cpu_cores:
            yield Caveat(CaveatKind.CPU_BUSY, {"other": rank.cpu_other_cores, "cores": rank.cpu_cores})
            return
    throttled = max(measured_values(record.ranks, "cpu_throttled_fraction"), default=0.0)
    if throttled > _MAX_THROTTLED_FRACTION:
        yield Caveat(CaveatKind.CPU_QUOTA, {"fraction": throttled})


def _gpu_caveats(record: TrialRecord) -> Iterator[Caveat]:
    """Report a GPU slower than the others, and masks that only a compiled model builds."""
    clocks = {each.name: each.mean_sm_clock_mhz for each in record.gpu_windows if each.mean_sm_clock_mhz}
    if clocks:
        slowest, fastest = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
        if clocks[slowest] < (1 - _MAX_CLOCK_DIFFERENCE) * clocks[fastest]:
            values = {"gpu": slowest, "clock": clocks[slowest], "other": fastest, "fastest": clocks[fastest]}
            yield Caveat(CaveatKind.SLOW_GPU, values)
    rank = record.slowest_rank
    if rank.compiled_graphs is not None and rank.attention == "sdpa" and record.trial.workload.script is None:
        yield Caveat(CaveatKind.COMPILED_MASK)


def _bucket_caveats(record: TrialRecord) -> Iterator[Caveat]:
    """Report buckets that take most of the memory: DeepSpeed's default size is meant for large models."""
    size = record.trial.ds_config.get("zero_optimization", {}).get("reduce_bucket_size", DEFAULT_BUCKET)
    tier = "cpu" if record.trial.placement.accelerator == "cpu" else "gpu"
    fullest = max((rank.ledger.get(tier, {}) for rank in record.ranks), key=lambda cells: sum(cells.values()))
    counted_bytes, buffer_bytes = sum(fullest.values()), fullest.get("deepspeed_buffers", 0)
    # The remedy suggests the small size, so a bucket no larger than that needs no advice.
    if not isinstance(size, int | float) or size <= SMALL_BUCKET or buffer_bytes <= _BUCKET_FRACTION * counted_bytes:
        return
    resident = tier == "gpu" or counted_bytes <= max(measured_values(record.ranks, "host_peak_bytes"), default=0)
    yield Caveat(CaveatKind.BUCKET_DOMINATES if resident else CaveatKind.BUCKET_NOT_RESIDENT, {"elements": size})


@cache
def optimizer_family(name: str) -> str | None:
    """Return ``adam`` for Adam, AdamW and their implementations, ``lion``, …; None for an unknown family."""
    return next((family for family in _OPTIMIZER_FAMILIES if family in name.lower()), None)
