"""The numbers of one trial, derived from its record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ..config.deepspeed_config import hash_config, is_full_config
from ..models.presets import ModelFacts
from ..prediction import trial_predictions
from ..records.schema import RankMeasurement, TrialRecord
from ..system.environment import Environment
from . import flops, trial_caveats
from .caveats import Caveat
from .intervals import sample_std
from .trial_caveats import measured_values


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSummary:
    """The numbers of one trial, whole job unless said otherwise; None where not measured."""

    record: TrialRecord
    mean_step_seconds: float | None = None
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
    gpu_outside_allocator_bytes: int | None = None
    """In use on the card beyond torch's allocator after the last measured step (``prediction.trial_predictions``)."""
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
    repeated_loss: float | None = None
    """Mean over ranks of the loss on each one's first batch after the last measured step."""
    weight_change: tuple[float, ...] | None = None
    """Count sketch of what training changed of the weights (worker/weight_change.py)."""
    weight_change_norm: float | None = None
    """Norm of that change over all weights, estimated from the sketch within some 10 %."""
    weight_change_cosine: float | None = None
    """Its cosine to the change of the row that this one is held against (``loss_parity``)."""
    predicted_over_measured: float | None = None
    """Predicted GPU memory to measured (``prediction.trial_predictions``); None without a prediction or a GPU."""
    predicted_over_ledger: float | None = None
    """Predicted ledger to the counted one; None without a prediction or a ledger."""
    caveats: tuple[Caveat, ...] = ()
    """What was known before it ran, then what its numbers say."""
    environment: Environment | None = None
    """Hardware and versions of the host it ran on; None where the result does not tell."""
    num_nodes: int | None = None
    """Hosts that the ranks ran on; None for a trial over a hostfile that measured nothing."""
    run_id: str | None = None
    """Name of the run's folder; None where the result does not tell."""
    flat_config_hash: str | None = None
    """``config_hash`` as a flat row tells it; None for a summary of a record."""
    round: int | None = None
    """Number of the round in which it ran, where several results are taken together; None: its trial's ``repeat``."""

    @property
    def config_hash(self) -> str | None:
        """The first 12 hexadecimal digits of the SHA-256 of the DeepSpeed configuration that ran, without its folders.

        Equal for equal configurations on any machine. None where the result does not tell the configuration.
        """
        trial = self.record.trial
        return hash_config(trial.ds_config) if is_full_config(trial) else self.flat_config_hash

    @property
    def gpu_fraction(self) -> float | None:
        """Peak reserved memory as a fraction of the card, real or emulated, on the rank nearest to running out."""
        return trial_caveats.gpu_fraction(self.record)


def summarise(record: TrialRecord, facts: ModelFacts | None, peak_flops: float | None) -> TrialSummary:
    """The numbers of one trial. ``peak_flops``: FLOP/s of one device in the trial's precision."""
    written = trial_caveats.written_caveats(record.caveats)
    if not record.ranks:
        alone = record.trial.placement.hostfile is None
        return TrialSummary(record=record, caveats=tuple(written), num_nodes=1 if alone else None)
    slowest = max(record.ranks, key=lambda rank: rank.window_seconds)
    step = slowest.window_seconds / len(slowest.step_seconds)
    deviation = sample_std(slowest.step_seconds)
    of_measured = trial_predictions.predicted_over_measured(record)
    of_ledger = trial_predictions.predicted_over_ledger(record)
    samples = slowest.micro_batch_size * slowest.grad_accum * slowest.data_parallel_size / step
    tokens = samples * record.trial.workload.seq_length
    per_gpu = tokens / slowest.world_size
    work = record.trial.workload
    change = _sum_of_sketches(record.ranks)
    tflops, mfu = _efficiency(facts, work.seq_length, per_gpu, peak_flops)
    return TrialSummary(
        record=record,
        mean_step_seconds=step,
        step_seconds_std=deviation,
        tokens_per_second=tokens,
        tokens_per_second_per_gpu=per_gpu,
        samples_per_second=samples,
        **_flops_per_token(facts, work.seq_length, work.activation_checkpointing),
        model_tflops_per_gpu=tflops,
        mfu=mfu,
        **_max_over_ranks(record.ranks),
        gpu_outside_allocator_bytes=trial_predictions.outside_allocator_bytes(record),
        host_peak_bytes=_total_per_node(record.ranks, "host_peak_bytes"),
        host_pss_bytes=_total_per_node(record.ranks, "host_pss_bytes"),
        nvme_stored_bytes=_total(record.ranks, "nvme_stored_bytes"),
        nvme_read_bytes_per_step=_per_step(record.ranks, "nvme_read_bytes"),
        nvme_written_bytes_per_step=_per_step(record.ranks, "nvme_written_bytes"),
        losses=_mean_losses(record.ranks),
        repeated_loss=_mean_repeated_loss(record.ranks),
        weight_change=change,
        weight_change_norm=None if change is None else math.hypot(*change),
        micro_batch_size=slowest.micro_batch_size,
        grad_accum=slowest.grad_accum,
        data_parallel_size=slowest.data_parallel_size,
        num_nodes=len({rank.hostname for rank in record.ranks}),
        predicted_over_measured=of_measured,
        predicted_over_ledger=of_ledger,
        caveats=tuple(
            dict.fromkeys(
                [*written, *trial_caveats.trial_caveats(record, slowest, deviation, mfu, of_measured, of_ledger)]
            )
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


def _flops_per_token(facts: ModelFacts | None, seq_length: int, checkpointing: bool) -> dict[str, Any]:
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


def _max_over_ranks(ranks: Sequence[RankMeasurement]) -> dict[str, Any]:
    """The largest of each of ``_GPU_FIELDS``, where any rank measured it."""
    columns = zip(_GPU_FIELDS, zip(*map(_gpu_values, ranks), strict=True), strict=True)
    return {name: max(found) for name, values in columns if (found := [each for each in values if each is not None])}


def _total(ranks: Sequence[RankMeasurement], name: str) -> int | None:
    values = measured_values(ranks, name)
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


def _mean_repeated_loss(ranks: Sequence[RankMeasurement]) -> float | None:
    values = measured_values(ranks, "repeated_loss")
    return math.fsum(values) / len(values) if len(values) == len(ranks) else None


def _sum_of_sketches(ranks: Sequence[RankMeasurement]) -> tuple[float, ...] | None:
    """The whole model's: each rank's is of its own share of the weights. None where a rank has none."""
    sketches = measured_values(ranks, "weight_change")
    if len(sketches) < len(ranks) or len({len(each) for each in sketches}) != 1:
        return None
    return tuple(map(math.fsum, zip(*sketches, strict=True)))
