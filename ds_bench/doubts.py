"""What one trial's numbers say about themselves: the caveats that need no other row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .dsconfig import offload_device, uses_nvme
from .record import RankMeasurement, TrialRecord
from .spec import Workload

UNSTABLE_CV = 0.05
"""Coefficient of variation of step times above which a row is called unstable (metrics.md)."""
NOT_STEADY = 0.05
"""Difference of the medians of both halves of the window above which a row is not steady (metrics.md)."""
_BUCKET_SHARE = 0.5


def known(ranks: Sequence[RankMeasurement], name: str) -> list[int]:
    """A field of the ranks, where measured."""
    return [value for rank in ranks if (value := getattr(rank, name)) is not None]


def own_caveats(record: TrialRecord, slowest: RankMeasurement, mfu: float | None) -> list[str]:
    """What one trial's numbers say about themselves."""
    checks = (
        _spread(slowest.step_seconds),
        _drift(slowest.step_seconds),
        _batch(record.trial.workload, slowest),
        _swapped_nothing(record),
        _skipped(slowest),
        _lost(record),
        _bucket(record),
        _window(record),
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
    stored = sum(known(record.ranks, "nvme_stored_bytes"))
    moved = sum(known(record.ranks, "nvme_read_bytes")) + sum(known(record.ranks, "nvme_written_bytes"))
    # DeepSpeed: the larger of 1 MiB and aio.block_size (swap_tensor/optimizer_utils.py, MIN_AIO_BYTES).
    block = max(2**20, int(record.trial.ds_config.get("aio", {}).get("block_size", 2**20)))
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


def _window(record: TrialRecord) -> str | None:
    work = record.trial.workload
    if work.warmup_steps == 0:
        return "no warm-up: the first step, with all that happens once, is in the window; use --warmup-steps"
    return "one measured step: nothing is known of its spread; use more --num-steps" if work.num_steps == 1 else None


def _bucket(record: TrialRecord) -> str | None:
    """DeepSpeed's default buckets are sized for large models; on a small one they are most of the memory."""
    size = record.trial.ds_config.get("zero_optimization", {}).get("reduce_bucket_size", 500_000_000)
    for row in record.ranks[0].ledger.values():
        held = row.get("deepspeed_buffers", 0)
        if held > _BUCKET_SHARE * sum(row.values()):
            return (
                f"DeepSpeed's buffers are most of the counted memory (reduce_bucket_size is {size:,} elements "
                "whatever the model); a smaller one saves it"
            )
    return None
