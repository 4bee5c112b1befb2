"""The numbers of one trial, derived from its record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.caveats import Caveat, as_caveat
from ..config.deepspeed_config import hash_config, is_full_config
from ..config.spec import Workload
from ..models.presets import ModelFacts
from ..prediction import trial_predictions
from ..records.schema import EarlyWindow, RankMeasurement, TrialRecord, measured_values, ranks_of_nodes
from ..system.environment import Environment
from . import flops, trial_caveats
from .checkpoints import CheckpointCost, checkpoint_costs, is_restored
from .intervals import sample_std
from .phase_memory import NodePhaseMemory, largest, node_phase_memory, total
from .step_costs import NO_COSTS, StepCosts, step_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSummary:
    """The numbers of one trial, whole job unless said otherwise; None where not measured."""

    record: TrialRecord
    mean_step_seconds: float | None = None
    """Duration of the measured window divided by the number of steps, on the slowest rank."""
    step_seconds_std: float | None = None
    """Sample standard deviation of the slowest rank's step times."""
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    samples_per_second: float | None = None
    model_flops_per_token: int | None = None
    """Forward and backward, full attention, without recomputation; by ``flops_convention``. A third of it where only
    forward passes ran (``Workload.pass_type``), here and in what follows from it."""
    flops_convention: str | None = None
    """How ``model_flops_per_token`` was had: by the formula of PaLM's appendix B, or counted on what ran."""
    causal_flops_per_token: int | None = None
    """As ``model_flops_per_token``, with the attention term halved."""
    hardware_flops_per_token: int | None = None
    """As ``model_flops_per_token``, with the recomputation of activation checkpointing added."""
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
    """In use on the GPU outside torch's allocator after the last measured step (``prediction.trial_predictions``)."""
    host_peak_bytes: int | None = None
    """Peak resident size, summed over the ranks of a node; of the node with the largest sum."""
    host_pss_bytes: int | None = None
    phase_memory: Mapping[str, NodePhaseMemory] = field(default_factory=dict)
    """Phase (``schema.MEMORY_PHASES``) → its memory."""
    checkpoint: Mapping[str, CheckpointCost] = field(default_factory=dict)
    """Action (``schema.CHECKPOINT_ACTIONS``) → its cost; empty if no checkpoint was measured."""
    checkpoint_restored: bool | None = None
    """Whether loading the checkpoint restored what was saved."""
    nvme_stored_bytes: int | None = None
    nvme_read_bytes_per_step: float | None = None
    nvme_written_bytes_per_step: float | None = None
    losses: tuple[float | None, ...] = ()
    """Mean over ranks, warm-up steps first."""
    micro_batch_size: int | None = None
    grad_accum: int | None = None
    data_parallel_size: int | None = None
    repeated_loss: float | None = None
    """Loss on the first batch of each rank, computed again after the last measured step; mean over ranks."""
    weight_change: tuple[float, ...] | None = None
    """Count sketch of the change of the weights by training (worker/weight_change.py)."""
    weight_change_norm: float | None = None
    """Norm of that change over all weights, estimated from the sketch within some 10 %."""
    weight_change_cosine: float | None = None
    """Cosine between this change and that of the reference row (``loss_parity``)."""
    early_window: EarlyWindow | None = None
    """The change of the weights over the first steps; None without warm-up steps."""
    first_grad_norm: float | None = None
    """Norm of the gradients in the first step, before clipping; None where the engine reports none."""
    grad_norm: float | None = None
    """The same in a step after the measured window."""
    predicted_over_measured: float | None = None
    """Predicted GPU memory to measured (``prediction.trial_predictions``); None without a prediction or a GPU."""
    predicted_over_ledger: float | None = None
    """Predicted ledger to the counted one; None without a prediction or a ledger."""
    costs: StepCosts = NO_COSTS
    """What a step's time is spent on besides computing."""
    caveats: tuple[Caveat, ...] = ()
    """Caveats that were written with the record, then those that its numbers show."""
    environment: Environment | None = None
    """Hardware and versions of the host it ran on; None if the result does not hold them."""
    num_nodes: int | None = None
    """Number of hosts that the ranks ran on, or were to; None for a trial of an earlier version over a hostfile that
    measured nothing."""
    host_peak_bytes_of_nodes: Mapping[str, int] = field(default_factory=dict)
    """Host → peak resident size, summed over its ranks; empty on one node. Without a node of which a rank did not
    measure it."""
    slowest_rank_host: str | None = None
    """Host of the rank that the others waited for: the one that waited least in collective operations where that was
    measured, else the one with the longest window. None on one node."""
    run_id: str | None = None
    """Name of the run's folder; None if the result does not hold it."""
    flat_config_hash: str | None = None
    """``config_hash`` of a flat row; None for a summary of a record."""
    round: int | None = None
    """Number of the round in which it ran, set where several results are merged; None: the trial's ``repeat``."""

    @property
    def config_hash(self) -> str | None:
        """The first 12 hexadecimal digits of the SHA-256 of the DeepSpeed configuration that ran, without its folders.

        Equal for equal configurations on any machine. None if the result does not hold the configuration.
        """
        trial = self.record.trial
        if not is_full_config(trial):
            return self.flat_config_hash
        return hash_config(trial.ds_config, trial.configuration.engine)

    @property
    def step_seconds_cv(self) -> float | None:
        """Coefficient of variation of the step times: ``step_seconds_std`` divided by ``mean_step_seconds``."""
        if self.step_seconds_std is None or not self.mean_step_seconds:
            return None
        return self.step_seconds_std / self.mean_step_seconds

    @property
    def gpu_fraction(self) -> float | None:
        """Peak reserved memory as a fraction of the GPU's, real or emulated, on the fullest rank."""
        return trial_caveats.gpu_fraction(self.record)


def summarise(
    record: TrialRecord,
    facts: ModelFacts | None,
    peak_flops: float | None,
    environment: Environment | None = None,
    run_id: str | None = None,
) -> TrialSummary:
    """Computes the numbers of one trial.

    ``facts``: of its model; None leaves out FLOPs and MFU. ``peak_flops``: FLOP/s of one device in the trial's
    precision; None leaves out MFU. ``environment`` and ``run_id`` are stored in the summary.
    """
    caveats = dict.fromkeys(map(as_caveat, record.caveats))
    if not record.ranks:
        placement = record.trial.placement
        # Records of earlier versions hold the path of a hostfile and not its hosts.
        known = bool(placement.hosts) or placement.hostfile is None
        return TrialSummary(
            record=record,
            caveats=tuple(caveats),
            environment=environment,
            num_nodes=placement.num_nodes if known else None,
            run_id=run_id,
        )
    ranks, workload = record.ranks, record.trial.workload
    slowest = record.slowest_rank
    step_seconds_std = sample_std(slowest.step_seconds)
    # Of the window, at whose ends the device is synchronised, and not of the single steps.
    mean_step_seconds = slowest.window_seconds / len(slowest.step_seconds)
    # Not world_size: ranks of a tensor-parallel group train the same samples.
    samples_per_second = slowest.micro_batch_size * slowest.grad_accum * slowest.data_parallel_size / mean_step_seconds
    tokens_per_second = samples_per_second * workload.seq_length
    efficiency = _efficiency(
        # The formula first, so that all rows of a known model are of one convention: two do not compare.
        _flops_of_shape(facts, workload) or _counted_flops(slowest, workload),
        tokens_per_second / slowest.world_size,
        peak_flops,
    )
    over_measured = trial_predictions.predicted_over_measured(record)
    over_ledger = trial_predictions.predicted_over_ledger(record)
    # A mapping as an ordered set: a caveat that was written with the record is not found twice.
    caveats |= dict.fromkeys(
        trial_caveats.trial_caveats(record, step_seconds_std, efficiency.get("mfu"), over_measured, over_ledger)
    )
    weight_change = _sum_of_sketches([rank.weight_change for rank in ranks])
    host_peaks = _totals_of_nodes(ranks, "host_peak_bytes")
    return TrialSummary(
        record=record,
        mean_step_seconds=mean_step_seconds,
        step_seconds_std=step_seconds_std,
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=tokens_per_second / slowest.world_size,
        samples_per_second=samples_per_second,
        **efficiency,
        **{name: max(values) for name in GPU_FIELDS if (values := measured_values(ranks, name))},
        gpu_outside_allocator_bytes=trial_predictions.outside_allocator_bytes(record.ranks),
        host_peak_bytes=largest(host_peaks.values()),
        host_pss_bytes=largest(_totals_of_nodes(ranks, "host_pss_bytes").values()),
        phase_memory=node_phase_memory(ranks),
        checkpoint=checkpoint_costs(ranks),
        checkpoint_restored=is_restored(ranks),
        nvme_stored_bytes=_total(ranks, "nvme_stored_bytes"),
        nvme_read_bytes_per_step=_per_step(ranks, "nvme_read_bytes"),
        nvme_written_bytes_per_step=_per_step(ranks, "nvme_written_bytes"),
        losses=_mean_losses(ranks),
        repeated_loss=_mean_repeated_loss(ranks),
        weight_change=weight_change,
        weight_change_norm=None if weight_change is None else math.hypot(*weight_change),
        early_window=_early_window(ranks),
        first_grad_norm=next(iter(ranks[0].grad_norms), None),
        grad_norm=ranks[0].grad_norm,
        micro_batch_size=slowest.micro_batch_size,
        grad_accum=slowest.grad_accum,
        data_parallel_size=slowest.data_parallel_size,
        num_nodes=len(host_peaks),
        host_peak_bytes_of_nodes={host: size for host, size in host_peaks.items() if size is not None}
        if len(host_peaks) > 1
        else {},
        slowest_rank_host=_slowest_rank_host(record),
        predicted_over_measured=over_measured,
        predicted_over_ledger=over_ledger,
        costs=step_costs(record),
        caveats=tuple(caveats),
        environment=environment,
        run_id=run_id,
    )


GPU_FIELDS = (
    "gpu_total_bytes",
    "gpu_init_peak_bytes",
    "gpu_peak_bytes",
    "gpu_peak_reserved_bytes",
    "gpu_allocated_bytes",
    "gpu_reserved_bytes",
    "gpu_device_used_bytes",
    "gpu_alloc_retries",
)
"""Fields of the summary that are the largest of the ranks' fields of the same name."""


def _flops_of_shape(facts: ModelFacts | None, workload: Workload) -> dict[str, Any]:
    """FLOPs per token by formula; empty for a model whose shape is not known."""
    if facts is None:
        return {}
    length = workload.seq_length
    forward_alone = workload.pass_type == "forward"  # a third of both, and nothing is recomputed
    parts, recomputes = (3, False) if forward_alone else (1, workload.activation_checkpointing)
    return {
        "model_flops_per_token": flops.model_flops_per_token(facts, length) // parts,
        "causal_flops_per_token": flops.causal_flops_per_token(facts, length) // parts,
        "hardware_flops_per_token": flops.hardware_flops_per_token(facts, length, recomputes) // parts,
        "flops_convention": flops.FORWARD_CONVENTION if forward_alone else flops.MODEL_CONVENTION,
    }


def _counted_flops(rank: RankMeasurement, workload: Workload) -> dict[str, Any]:
    """FLOPs per token as they were counted on a rank; empty where they were not. Ranks that share data share them."""
    if not rank.forward_backward_flops:
        return {}
    # The share of one rank, as the FLOPs are those of one rank.
    tokens = rank.micro_batch_size * workload.seq_length * rank.data_parallel_size / rank.world_size
    executed = rank.forward_backward_flops + (rank.recomputed_flops or 0)
    return {
        "model_flops_per_token": round(rank.forward_backward_flops / tokens),
        "hardware_flops_per_token": round(executed / tokens),
        "flops_convention": flops.COUNTED_CONVENTION,
    }


def _efficiency(
    flops_of_token: dict[str, Any], tokens_per_second_per_gpu: float, peak_flops: float | None
) -> dict[str, Any]:
    """The fields of a summary about FLOPs; empty if they are not known."""
    if not flops_of_token:
        return {}
    per_token = flops_of_token["model_flops_per_token"]
    return {
        **flops_of_token,
        "model_tflops_per_gpu": per_token * tokens_per_second_per_gpu / 1e12,
        "mfu": flops.mfu(per_token, tokens_per_second_per_gpu, peak_flops),
    }


def _total(ranks: Sequence[RankMeasurement], name: str) -> int | None:
    """The sum over all ranks; None if a rank did not measure it."""
    return total(getattr(rank, name) for rank in ranks)


def _totals_of_nodes(ranks: Sequence[RankMeasurement], name: str) -> dict[str, int | None]:
    """Host → the sum over its ranks."""
    return {host: _total(own, name) for host, own in ranks_of_nodes(ranks).items()}


def _slowest_rank_host(record: TrialRecord) -> str | None:
    """See ``TrialSummary.slowest_rank_host``."""
    ranks = record.ranks
    if len({rank.hostname for rank in ranks}) == 1:
        return None
    # The slowest rank waits least; where waiting was not timed on all ranks, the window has to tell.
    waits = [[operation.wait_seconds for operation in rank.communication or ()] for rank in ranks]
    if all(own and None not in own for own in waits):
        sums = [math.fsum(each for each in own if each is not None) for own in waits]
        return ranks[sums.index(min(sums))].hostname
    return record.slowest_rank.hostname


def _per_step(ranks: Sequence[RankMeasurement], name: str) -> float | None:
    moved = _total(ranks, name)
    return None if moved is None else moved / len(ranks[0].step_seconds)


def _mean_losses(ranks: Sequence[RankMeasurement]) -> tuple[float | None, ...]:
    """The mean over ranks of each step's loss; None where a rank's is not finite."""
    if len(ranks) == 1:
        return ranks[0].losses
    count, steps = len(ranks), zip(*(rank.losses for rank in ranks), strict=False)
    if all(None not in rank.losses for rank in ranks):  # nearly always, and twice as fast
        return tuple([total / count for total in map(math.fsum, steps)])
    return tuple(None if None in step else math.fsum(step) / count for step in steps)


def _mean_repeated_loss(ranks: Sequence[RankMeasurement]) -> float | None:
    values = measured_values(ranks, "repeated_loss")
    return math.fsum(values) / len(values) if len(values) == len(ranks) else None


def _early_window(ranks: Sequence[RankMeasurement]) -> EarlyWindow | None:
    windows = measured_values(ranks, "early_window")
    if len(windows) < len(ranks):
        return None
    return replace(windows[0], weight_change=_sum_of_sketches([window.weight_change for window in windows]))  # type: ignore[no-any-return]


def _sum_of_sketches(sketches: Sequence[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    """The sketch of the whole model's change: that of a rank covers its own share of the weights.

    None if a rank has none, or sizes differ. The sum is right because a count sketch is linear (Charikar, Chen and
    Farach-Colton, "Finding frequent items in data streams", ICALP 2002).
    """
    known = [sketch for sketch in sketches if sketch is not None]
    if len(known) < len(sketches) or len({len(sketch) for sketch in known}) != 1:
        return None
    return tuple(map(math.fsum, zip(*known, strict=True)))
