"""Pure: from records to one Summary per trial, and what a reader must know before comparing them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import flops
from .dsconfig import offload_device, uses_nvme
from .models import ModelFacts
from .record import RankMeasurement, TrialRecord
from .spec import Workload

UNSTABLE_CV = 0.05
"""Coefficient of variation of step times above which a row is called unstable (metrics.md)."""
NOT_STEADY = 0.05
"""Difference of the medians of both halves of the window above which a row is not steady (metrics.md)."""
_LOSS_STEPS = 10
_LOSS_TOLERANCE = {"fp32": 2e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Relative difference of losses that rounding explains within the first ten steps."""
_QUIRK_TOLERANCE = 2e-5
_STAGE0_WRAPPERS = ("FP16_UnfusedOptimizer", "FP16_Optimizer")
_BUCKET_SHARE = 0.5


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
    caveats: tuple[str, ...] = ()

    @property
    def gpu_fraction(self) -> float | None:
        """Peak reserved memory as a fraction of the card, real or emulated, on the rank nearest to running out."""
        limit = self.record.trial.placement.gpu_memory_limit_bytes
        fractions = []
        for rank in self.record.ranks:
            used = rank.gpu_peak_reserved_bytes or rank.gpu_peak_bytes
            if used is not None and rank.gpu_total_bytes:
                fractions.append(used / min(rank.gpu_total_bytes, limit or rank.gpu_total_bytes))
        return max(fractions, default=None)


def summarise(record: TrialRecord, facts: ModelFacts | None, peak_flops: float | None) -> Summary:
    """The numbers of one trial. ``peak_flops``: FLOP/s of one device in the trial's precision."""
    if not record.ranks:
        return Summary(record=record, caveats=record.caveats)
    slowest = max(record.ranks, key=lambda rank: rank.window_seconds)
    step = slowest.window_seconds / len(slowest.step_seconds)
    samples = slowest.micro_batch_size * slowest.grad_accum * slowest.data_parallel_size / step
    tokens = samples * record.trial.workload.seq_length
    per_gpu = tokens / slowest.world_size
    tflops, mfu = _efficiency(facts, record.trial.workload.seq_length, per_gpu, peak_flops)
    return Summary(
        record=record,
        step_seconds=step,
        step_seconds_std=statistics.stdev(slowest.step_seconds) if len(slowest.step_seconds) > 1 else None,
        tokens_per_second=tokens,
        tokens_per_second_per_gpu=per_gpu,
        samples_per_second=samples,
        model_tflops_per_gpu=tflops,
        mfu=mfu,
        **{name: _worst(record.ranks, name) for name in _GPU_FIELDS},
        host_peak_bytes=_total_per_node(record.ranks, "host_peak_bytes"),
        host_pss_bytes=_total_per_node(record.ranks, "host_pss_bytes"),
        nvme_stored_bytes=_total(record.ranks, "nvme_stored_bytes"),
        nvme_read_bytes_per_step=_per_step(record.ranks, "nvme_read_bytes"),
        nvme_written_bytes_per_step=_per_step(record.ranks, "nvme_written_bytes"),
        losses=_mean_losses(record.ranks),
        micro_batch_size=slowest.micro_batch_size,
        grad_accum=slowest.grad_accum,
        data_parallel_size=slowest.data_parallel_size,
        caveats=(*record.caveats, *_own_caveats(record, slowest, mfu)),
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


def _efficiency(
    facts: ModelFacts | None, seq_length: int, tokens_per_second_per_gpu: float, peak: float | None
) -> tuple[float | None, float | None]:
    if facts is None:
        return None, None
    per_token = flops.model_flops_per_token(facts, seq_length)
    return per_token * tokens_per_second_per_gpu / 1e12, flops.mfu(per_token, tokens_per_second_per_gpu, peak)


def _known(ranks: Sequence[RankMeasurement], name: str) -> list[int]:
    return [value for rank in ranks if (value := getattr(rank, name)) is not None]


def _worst(ranks: Sequence[RankMeasurement], name: str) -> int | None:
    return max(_known(ranks, name), default=None)


def _total(ranks: Sequence[RankMeasurement], name: str) -> int | None:
    values = _known(ranks, name)
    return sum(values) if len(values) == len(ranks) else None


def _total_per_node(ranks: Sequence[RankMeasurement], name: str) -> int | None:
    """The fullest node's sum over its ranks."""
    nodes: dict[str, list[RankMeasurement]] = {}
    for rank in ranks:
        nodes.setdefault(rank.hostname, []).append(rank)
    totals = [_total(members, name) for members in nodes.values()]
    return max((total for total in totals if total is not None), default=None)


def _per_step(ranks: Sequence[RankMeasurement], name: str) -> float | None:
    total = _total(ranks, name)
    return None if total is None else total / len(ranks[0].step_seconds)


def _mean_losses(ranks: Sequence[RankMeasurement]) -> tuple[float | None, ...]:
    """Per step the mean over ranks; None where any rank's is not finite."""
    steps = zip(*(rank.losses for rank in ranks), strict=False)
    return tuple(
        None if None in step else statistics.fmean(loss for loss in step if loss is not None) for step in steps
    )


def _own_caveats(record: TrialRecord, slowest: RankMeasurement, mfu: float | None) -> list[str]:
    """What one trial's numbers say about themselves."""
    checks = (
        _spread(slowest.step_seconds),
        _drift(slowest.step_seconds),
        _batch(record.trial.workload, slowest),
        _swapped_nothing(record),
        _skipped(slowest),
        _lost(record),
        _bucket(record.ranks[0].ledger),
        "the allocator retried near the memory limit: throughput is not what it would be with room"
        if any(rank.gpu_alloc_retries for rank in record.ranks)
        else None,
        f"MFU of {mfu:.0%} is an error of accounting (wrong peak?)" if mfu is not None and mfu > 1 else None,
    )
    notes = [note for rank in record.ranks for note in rank.notes]
    return [text for text in checks if text is not None] + list(dict.fromkeys(notes))


def _spread(seconds: Sequence[float]) -> str | None:
    if len(seconds) < 2:
        return None
    variation = statistics.stdev(seconds) / statistics.fmean(seconds)
    if variation <= UNSTABLE_CV:
        return None
    return f"unstable: step times vary by more than {UNSTABLE_CV:.0%}; use more --num-steps, or a quieter machine"


def _drift(seconds: Sequence[float]) -> str | None:
    if len(seconds) < 4:
        return None
    half = len(seconds) // 2
    first, second = statistics.median(seconds[:half]), statistics.median(seconds[-half:])
    if abs(second / first - 1) <= NOT_STEADY:
        return None
    return f"not steady: the halves of the window differ by more than {NOT_STEADY:.0%}; use more --warmup-steps"


def _batch(workload: Workload, rank: RankMeasurement) -> str | None:
    if (rank.micro_batch_size, rank.grad_accum) == (workload.batch_size, workload.grad_accum):
        return None
    return (
        f"ran micro-batch {rank.micro_batch_size} × accumulation {rank.grad_accum}, as the DeepSpeed config says, "
        f"not the flags' {workload.batch_size} × {workload.grad_accum}"
    )


def _swapped_nothing(record: TrialRecord) -> str | None:
    if not uses_nvme(record.trial.ds_config):
        return None
    stored = sum(_known(record.ranks, "nvme_stored_bytes"))
    moved = sum(_known(record.ranks, "nvme_read_bytes")) + sum(_known(record.ranks, "nvme_written_bytes"))
    block = record.trial.ds_config.get("aio", {}).get("block_size", 2**20)
    if stored == 0:
        return (
            f"nothing was swapped: DeepSpeed keeps tensors under {block} bytes in memory; this row is not NVMe offload"
        )
    parameters = sum(rank.ledger.get("nvme", {}).get("parameters", 0) for rank in record.ranks)
    if offload_device(record.trial.ds_config, "offload_param") == "nvme" and parameters == 0:
        return (
            f"the parameters stayed in memory: every partition of one is under {block} bytes; only the optimizer swaps"
        )
    if moved == 0:
        return "no bytes reached the disk in the measured steps: the path is memory or cache, not NVMe"
    return None


def _skipped(rank: RankMeasurement) -> str | None:
    if not rank.skipped_steps:
        return None
    return f"{rank.skipped_steps} measured steps were skipped by the optimizer (overflow or NaN in gradients)"


def _lost(record: TrialRecord) -> str | None:
    finite = all(loss is not None for rank in record.ranks for loss in rank.losses)
    return None if finite else "loss is not finite (NaN or infinity): a fast wrong configuration is no result"


def _bucket(ledger: Mapping[str, Mapping[str, int]]) -> str | None:
    """DeepSpeed's default buckets are sized for large models; on a small one they are most of the memory."""
    for row in ledger.values():
        held = row.get("deepspeed_buffers", 0)
        if held > _BUCKET_SHARE * sum(row.values()):
            return (
                "DeepSpeed's buffers are most of the counted memory (reduce_bucket_size is 5e8 elements "
                "whatever the model); a smaller one saves it"
            )
    return None


def compare_losses(summaries: Sequence[Summary]) -> dict[int, str]:
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
        if _has_stage0_quirk(summary) and difference > _QUIRK_TOLERANCE:
            found[index] = (
                f"loss differs by {difference:.2%}, a known quirk: at stage 0 in 16 bit DeepSpeed takes "
                "an Adam step on zero gradients at initialisation (fp16/fused_optimizer.py)"
            )
        elif difference > _LOSS_TOLERANCE[precision]:
            found[index] = (
                f"loss differs by {difference:.2%} from {reference.record.trial.strategy.label}'s: "
                "more than rounding explains; do not use this row before you know why"
            )
    return found


def _has_stage0_quirk(summary: Summary) -> bool:
    stage = summary.record.trial.strategy.stage
    return stage == 0 and summary.record.ranks[0].engine_optimizer_class in _STAGE0_WRAPPERS


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
    return max(abs(x - y) / max(abs(x), 1e-12) for x, y in pairs if x is not None and y is not None)
