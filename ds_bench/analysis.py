"""Pure: from records to one Summary per trial, and what a reader must know before comparing them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from . import doubts, flops
from .caveats import Caveat, CaveatKind, typed
from .doubts import known
from .inference import spread
from .models import ModelFacts
from .prediction import hindsight
from .record import RankMeasurement, TrialRecord

_LOSS_STEPS = 10
_LOSS_TOLERANCE = {"fp32": 2e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Relative difference of losses that rounding explains within the first ten steps."""
_QUIRK_TOLERANCE = 2e-5
_QUIRK_LIMIT = 0.02
"""Beyond this the one Adam step too many does not explain a difference."""
_QUIRK_TEXT = (
    "loss differs by {difference:.2%}, a known quirk: at stage 0 in 16 bit DeepSpeed takes "
    "an Adam step on zero gradients at initialisation (fp16/fused_optimizer.py)"
)
_STAGE0_WRAPPERS = ("FP16_UnfusedOptimizer", "FP16_Optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of one trial, whole job unless said otherwise; None where not measured (metrics.md)."""

    record: TrialRecord
    step_seconds: float | None = None
    """Window divided by steps, on the slowest rank."""
    step_seconds_std: float | None = None
    """Sample standard deviation of the slowest rank's step times."""
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    samples_per_second: float | None = None
    model_flops_per_token: int | None = None
    """PaLM appendix B: 6·N_matmul + 12·L·H·Q·T, full attention; forward and backward."""
    causal_flops_per_token: int | None = None
    """The same with the attention term halved."""
    hardware_flops_per_token: int | None = None
    """With what recomputation adds."""
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None
    """Fraction of the device's dense peak, PaLM convention."""
    gpu_total_bytes: int | None = None
    gpu_init_peak_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    gpu_peak_reserved_bytes: int | None = None
    gpu_allocated_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    gpu_device_used_bytes: int | None = None
    gpu_alloc_retries: int | None = None
    """All ``gpu_*``: the worst rank."""
    host_peak_bytes: int | None = None
    """Sum over the ranks of one node of their peak resident size."""
    host_pss_bytes: int | None = None
    nvme_stored_bytes: int | None = None
    nvme_read_bytes_per_step: float | None = None
    nvme_written_bytes_per_step: float | None = None
    losses: tuple[float | None, ...] = ()
    """Mean over ranks, warm-up steps first."""
    micro_batch_size: int | None = None
    grad_accum: int | None = None
    data_parallel_size: int | None = None
    predicted_over_measured: float | None = None
    """Predicted GPU memory to measured (``prediction.hindsight``); None without a prediction or a GPU."""
    predicted_over_ledger: float | None = None
    """Predicted ledger to the counted one; None without a prediction or a ledger."""
    caveats: tuple[Caveat, ...] = ()
    """What was known before it ran, then what its numbers say."""

    @property
    def gpu_fraction(self) -> float | None:
        """Peak reserved memory as a fraction of the card, real or emulated, on the rank nearest to running out."""
        return doubts.gpu_fraction(self.record)


def summarise(record: TrialRecord, facts: ModelFacts | None, peak_flops: float | None) -> Summary:
    """The numbers of one trial. ``peak_flops``: FLOP/s of one device in the trial's precision."""
    written = doubts.written_caveats(record.caveats)
    if not record.ranks:
        return Summary(record=record, caveats=tuple(written))
    slowest = max(record.ranks, key=lambda rank: rank.window_seconds)
    step = slowest.window_seconds / len(slowest.step_seconds)
    deviation = spread(slowest.step_seconds)
    of_measured, of_ledger = hindsight.of_record(record)
    samples = slowest.micro_batch_size * slowest.grad_accum * slowest.data_parallel_size / step
    tokens = samples * record.trial.workload.seq_length
    per_gpu = tokens / slowest.world_size
    work = record.trial.workload
    tflops, mfu = _efficiency(facts, work.seq_length, per_gpu, peak_flops)
    return Summary(
        record=record,
        step_seconds=step,
        step_seconds_std=deviation,
        tokens_per_second=tokens,
        tokens_per_second_per_gpu=per_gpu,
        samples_per_second=samples,
        **_flops_per_token(facts, work.seq_length, work.activation_checkpointing),
        model_tflops_per_gpu=tflops,
        mfu=mfu,
        **_worst(record.ranks),
        host_peak_bytes=_total_per_node(record.ranks, "host_peak_bytes"),
        host_pss_bytes=_total_per_node(record.ranks, "host_pss_bytes"),
        nvme_stored_bytes=_total(record.ranks, "nvme_stored_bytes"),
        nvme_read_bytes_per_step=_per_step(record.ranks, "nvme_read_bytes"),
        nvme_written_bytes_per_step=_per_step(record.ranks, "nvme_written_bytes"),
        losses=_mean_losses(record.ranks),
        micro_batch_size=slowest.micro_batch_size,
        grad_accum=slowest.grad_accum,
        data_parallel_size=slowest.data_parallel_size,
        predicted_over_measured=of_measured,
        predicted_over_ledger=of_ledger,
        caveats=tuple(
            dict.fromkeys([*written, *doubts.own_caveats(record, slowest, deviation, mfu, of_measured, of_ledger)])
        ),
    )


_GPU_FIELDS = (
    "gpu_total_bytes",
    "gpu_init_peak_bytes",
    "gpu_peak_bytes",
    "gpu_peak_reserved_bytes",
    "gpu_allocated_bytes",
    "gpu_reserved_bytes",
    "gpu_device_used_bytes",
    "gpu_alloc_retries",
)
_gpu_values = attrgetter(*_GPU_FIELDS)


def _flops_per_token(facts: ModelFacts | None, seq_length: int, checkpointing: bool) -> dict[str, int]:
    if facts is None:
        return {}
    return {
        "model_flops_per_token": flops.model_flops_per_token(facts, seq_length),
        "causal_flops_per_token": flops.causal_flops_per_token(facts, seq_length),
        "hardware_flops_per_token": flops.hardware_flops_per_token(facts, seq_length, checkpointing),
    }


def _efficiency(
    facts: ModelFacts | None, seq_length: int, tokens_per_second_per_gpu: float, peak: float | None
) -> tuple[float | None, float | None]:
    if facts is None:
        return None, None
    per_token = flops.model_flops_per_token(facts, seq_length)
    return per_token * tokens_per_second_per_gpu / 1e12, flops.mfu(per_token, tokens_per_second_per_gpu, peak)


def _worst(ranks: Sequence[RankMeasurement]) -> dict[str, int]:
    """The largest of each of ``_GPU_FIELDS``, where any rank measured it."""
    columns = zip(_GPU_FIELDS, zip(*map(_gpu_values, ranks), strict=True), strict=True)
    return {name: max(found) for name, values in columns if (found := [each for each in values if each is not None])}


def _total(ranks: Sequence[RankMeasurement], name: str) -> int | None:
    values = known(ranks, name)
    return sum(values) if len(values) == len(ranks) else None


def _total_per_node(ranks: Sequence[RankMeasurement], name: str) -> int | None:
    """The fullest node's sum over its ranks; None where a rank did not report, as its node may be the fullest."""
    nodes: dict[str, list[RankMeasurement]] = {}
    for rank in ranks:
        nodes.setdefault(rank.hostname, []).append(rank)
    totals = [total for members in nodes.values() if (total := _total(members, name)) is not None]
    return max(totals) if len(totals) == len(nodes) else None


def _per_step(ranks: Sequence[RankMeasurement], name: str) -> float | None:
    total = _total(ranks, name)
    return None if total is None else total / len(ranks[0].step_seconds)


def _mean_losses(ranks: Sequence[RankMeasurement]) -> tuple[float | None, ...]:
    """Per step the mean over ranks; None where any rank's is not finite."""
    if len(ranks) == 1:
        return ranks[0].losses
    count, steps = len(ranks), zip(*(rank.losses for rank in ranks), strict=False)
    if all(None not in rank.losses for rank in ranks):  # nearly always, and twice as fast
        return tuple([total / count for total in map(math.fsum, steps)])
    return tuple(None if None in step else math.fsum(step) / count for step in steps)


def with_comparison(summaries: Sequence[Summary]) -> list[Summary]:
    """The summaries with the caveats added that only show beside each other; a row that has one gets no second."""
    extra = compare_losses(summaries)
    return [
        replace(summary, caveats=(*summary.caveats, extra[index]))
        if index in extra and not any(caveat.kind is CaveatKind.LOSS_DIFFERS for caveat in summary.caveats)
        else summary
        for index, summary in enumerate(summaries)
    ]


def compare_losses(summaries: Sequence[Summary]) -> dict[int, Caveat]:
    """Caveats by position for rows whose losses leave the reference's: the first row without a known quirk."""
    comparable = [(i, s) for i, s in enumerate(summaries) if s.losses and None not in s.losses]
    reference = next((s for _, s in comparable if not _has_stage0_quirk(s)), None)
    if reference is None:
        return {}
    found = {}
    for index, summary in comparable:
        difference = _loss_difference(reference, summary)
        precision = summary.record.trial.workload.precision
        if difference is None or summary is reference:
            continue
        if _has_stage0_quirk(summary) and _QUIRK_TOLERANCE < difference < _QUIRK_LIMIT:
            found[index] = Caveat(kind=CaveatKind.LOSS_DIFFERS, text=_QUIRK_TEXT.format(difference=difference))
        elif difference > _LOSS_TOLERANCE[precision]:
            text = (
                f"loss differs by {difference:.2%} from {reference.record.trial.strategy.label}'s: "
                "more than rounding explains; do not use this row before you know why"
            )
            found[index] = typed(CaveatKind.LOSS_DIFFERS, text, disqualifying=True)
    return found


def _has_stage0_quirk(summary: Summary) -> bool:
    stage = summary.record.trial.strategy.stage
    rank = summary.record.ranks[0]
    adam = "adam" in rank.optimizer_class.lower()
    return stage == 0 and adam and rank.engine_optimizer_class in _STAGE0_WRAPPERS


def _loss_difference(a: Summary, b: Summary) -> float | None:
    """Largest relative difference in the first steps; None where the workload or the batch differs."""
    same = (a.record.trial.workload, a.micro_batch_size, a.grad_accum, a.data_parallel_size) == (
        b.record.trial.workload,
        b.micro_batch_size,
        b.grad_accum,
        b.data_parallel_size,
    )
    pairs = list(zip(a.losses, b.losses, strict=False))[:_LOSS_STEPS]
    if not same or not pairs:
        return None
    return max([abs(x - y) / max(abs(x), 1e-12) for x, y in pairs if x is not None and y is not None])
