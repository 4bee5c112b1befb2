"""The flat row of one trial: the columns of JSON and CSV (docs/metrics.md).

``_gb`` is 2**30 bytes, ``_ms`` milliseconds; a value that was not measured is None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..records.schema import CHECKPOINT_ACTIONS, SUCCESS, RankMeasurement
from ..system.environment import Environment
from ..units import to_gb, to_ms
from .loss_parity import with_loss_caveats
from .step_costs import step_parts
from .summary import TrialSummary
from .trial_caveats import measured_values

_SIGNS = {"Skipped": "⏭️", "Unsupported": "❌", "Interrupted": "⏹️"}

Column = tuple[str, Callable[[TrialSummary], Any]]


def _of_first_rank(read: Callable[[RankMeasurement], Any]) -> Callable[[TrialSummary], Any]:
    """The value of a column that is equal on all ranks; None if the trial measured nothing."""
    return lambda summary: read(summary.record.ranks[0]) if summary.record.ranks else None


def _of_environment(read: Callable[[Environment], Any]) -> Callable[[TrialSummary], Any]:
    """The value of a column of hardware or versions; None if the environment is not known."""
    return lambda summary: None if summary.environment is None else read(summary.environment)


def _phase_ms(phase: str) -> Callable[[TrialSummary], float | None]:
    """Time of one phase of a step on the slowest rank; None if it was not measured."""

    def value(summary: TrialSummary) -> float | None:
        seconds = [rank.phase_seconds[phase] for rank in summary.record.ranks if phase in rank.phase_seconds]
        return to_ms(max(seconds, default=None))

    return value


def _ledger_gb(tier: str, category: str) -> Callable[[TrialSummary], float | None]:
    """One cell of the ledger, on the fullest rank; None without a ledger, and for a tier that the trial has not."""

    def value(summary: TrialSummary) -> float | None:
        trial, ledgers = summary.record.trial, [rank.ledger for rank in summary.record.ranks]
        without_tier = (tier == "gpu" and trial.placement.accelerator == "cpu") or (
            tier == "nvme" and not trial.configuration.uses_nvme
        )
        if without_tier or not any(ledgers):
            return None
        return to_gb(max(ledger.get(tier, {}).get(category, 0) for ledger in ledgers))

    return value


def _phase_gb(phase: str, size: str) -> Callable[[TrialSummary], float | None]:
    """Host memory of one phase on the fullest node; ``size``: ``peak`` or ``end``. None if it was not measured."""

    def value(summary: TrialSummary) -> float | None:
        return to_gb(getattr(summary.phase_memory.get(phase), f"host_{size}_bytes", None))

    return value


def _checkpoint(action: str, value: str) -> Callable[[TrialSummary], float | None]:
    """One value of what was done with the checkpoint; None if it was not done. Bytes in GB."""

    def read(summary: TrialSummary) -> float | None:
        measured = getattr(summary.checkpoint.get(action), value, None)
        return measured if value == "seconds" else to_gb(measured)

    return read


def _json_gb(sizes: Mapping[str, int]) -> str | None:
    """Sizes by name as JSON, in GB; None without any."""
    return json.dumps({name: to_gb(size) for name, size in sizes.items()}) if sizes else None


def _gpu_names(environment: Environment) -> str | None:
    names = {f"{gpu.name or 'unnamed'}{MIG_SUFFIX if gpu.mig else ''}" for gpu in environment.gpus}
    return " + ".join(sorted(names)) or None


def _smallest_gpu_gb(environment: Environment) -> float | None:
    """None without GPUs, or if the memory of one is not known."""
    sizes = [gpu.memory_total_bytes for gpu in environment.gpus]
    return None if None in sizes else to_gb(min((size for size in sizes if size is not None), default=None))


_CATEGORIES = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations", "other")
_LEDGER_CELLS = (
    *((tier, category) for tier in ("gpu", "cpu") for category in _CATEGORIES),
    ("nvme", "parameters"),
    ("nvme", "optimizer_states"),
)
HOST_PHASES = ("import", "build", "initialize", "first_step", "steady")
"""Phases that have columns of host memory."""
CHECKPOINT_COLUMNS = {"seconds": "seconds", "gb": "written_bytes", "cpu_peak_gb": "host_peak_bytes"}
"""End of the name of a column → field of ``CheckpointCost``."""
MIG_SUFFIX = " (MIG)"
"""Follows the name of a GPU that is divided into MIG instances."""

COLUMNS: list[Column] = [
    ("stage", lambda s: s.record.trial.configuration.stage),
    ("strategy", lambda s: s.record.trial.configuration.name),
    ("model", lambda s: s.record.trial.workload.model),
    ("batch_size", lambda s: s.micro_batch_size or s.record.trial.workload.batch_size),
    ("seq_length", lambda s: s.record.trial.workload.seq_length),
    ("grad_accum", lambda s: s.grad_accum or s.record.trial.workload.grad_accum),
    ("num_steps", lambda s: s.record.trial.workload.num_steps),
    ("warmup_steps", lambda s: s.record.trial.workload.warmup_steps),
    ("avg_step_time_ms", lambda s: to_ms(s.mean_step_seconds)),
    ("std_step_time_ms", lambda s: to_ms(s.step_seconds_std)),
    ("throughput_tokens_per_sec", lambda s: s.tokens_per_second),
    ("gpu_peak_gb", lambda s: to_gb(s.gpu_peak_bytes)),
    ("gpu_allocated_gb", lambda s: to_gb(s.gpu_allocated_bytes)),
    ("gpu_reserved_gb", lambda s: to_gb(s.gpu_reserved_bytes)),
    ("cpu_used_gb", lambda s: to_gb(s.host_peak_bytes)),
    ("success", lambda s: s.record.outcome.success),
    ("status", lambda s: status_text(s.record.outcome.status)),
    ("error", lambda s: s.record.outcome.error),
    ("error_details", lambda s: s.record.outcome.details),
    ("caveats", lambda s: "; ".join(caveat.text for caveat in s.caveats) or None),
    ("repeat", lambda s: s.record.trial.repeat),
    ("trial_id", lambda s: s.record.trial.trial_id),
    ("num_gpus", lambda s: s.record.trial.placement.num_gpus),
    ("accelerator", lambda s: s.record.trial.placement.accelerator),
    ("device", _of_first_rank(lambda r: r.device_name)),
    ("precision", lambda s: s.record.trial.workload.precision),
    ("batch_policy", lambda s: s.record.trial.workload.batch_policy),
    ("activation_checkpointing", lambda s: s.record.trial.workload.activation_checkpointing),
    ("optimizer", _of_first_rank(lambda r: r.optimizer_class)),
    ("launch", lambda s: s.record.launch),
    ("data_parallel_size", lambda s: s.data_parallel_size),
    ("parameter_count", _of_first_rank(lambda r: r.parameter_count)),
    ("throughput_tokens_per_sec_per_gpu", lambda s: s.tokens_per_second_per_gpu),
    ("throughput_samples_per_sec", lambda s: s.samples_per_second),
    ("model_tflops_per_gpu", lambda s: s.model_tflops_per_gpu),
    ("model_flops_per_token", lambda s: s.model_flops_per_token),
    ("causal_flops_per_token", lambda s: s.causal_flops_per_token),
    ("hardware_flops_per_token", lambda s: s.hardware_flops_per_token),
    ("flops_convention", lambda s: s.flops_convention),
    ("mfu", lambda s: s.mfu if s.mfu is not None and s.mfu <= 1 else None),
    ("first_loss", lambda s: s.losses[0] if s.losses else None),
    ("final_loss", lambda s: s.losses[-1] if s.losses else None),
    ("gpu_peak_reserved_gb", lambda s: to_gb(s.gpu_peak_reserved_bytes)),
    ("gpu_init_peak_gb", lambda s: to_gb(s.gpu_init_peak_bytes)),
    ("gpu_device_used_gb", lambda s: to_gb(s.gpu_device_used_bytes)),
    ("gpu_total_gb", lambda s: to_gb(s.gpu_total_bytes)),
    ("gpu_percent", lambda s: None if s.gpu_fraction is None else s.gpu_fraction * 100),
    ("gpu_alloc_retries", lambda s: s.gpu_alloc_retries),
    ("predicted_over_measured", lambda s: s.predicted_over_measured),
    ("cpu_pss_gb", lambda s: to_gb(s.host_pss_bytes)),
    ("nvme_stored_gb", lambda s: to_gb(s.nvme_stored_bytes)),
    ("nvme_read_gb_per_step", lambda s: to_gb(s.nvme_read_bytes_per_step)),
    ("nvme_written_gb_per_step", lambda s: to_gb(s.nvme_written_bytes_per_step)),
    *((f"ledger_{tier}_{category}_gb", _ledger_gb(tier, category)) for tier, category in _LEDGER_CELLS),
    ("phase_forward_ms", _phase_ms("forward")),
    ("phase_backward_ms", _phase_ms("backward")),
    ("phase_step_ms", _phase_ms("step")),
    ("skipped_steps", _of_first_rank(lambda r: r.skipped_steps)),
    ("start_seconds", lambda s: s.record.start_seconds),
    ("wall_seconds", lambda s: s.record.wall_seconds),
    ("started_at", lambda s: s.record.started_at),
    ("method_version", lambda s: s.record.method_version),
    ("predicted_over_ledger", lambda s: s.predicted_over_ledger),
    ("dropout", lambda s: s.record.ranks[0].dropout if s.record.ranks else s.record.trial.workload.dropout),
    ("repeated_loss", lambda s: s.repeated_loss),
    ("weight_change_norm", lambda s: s.weight_change_norm),
    ("weight_change_cosine", lambda s: s.weight_change_cosine),
    ("cpu_threads", _of_first_rank(lambda r: r.cpu_threads)),
    ("cpu_other_cores", lambda s: max(measured_values(s.record.ranks, "cpu_other_cores"), default=None)),
    ("num_nodes", lambda s: s.num_nodes),
    ("run_id", lambda s: s.run_id),
    ("config_hash", lambda s: s.config_hash),
    ("gpu_name", _of_environment(_gpu_names)),
    ("gpu_count", _of_environment(lambda e: len(e.gpus))),
    ("gpu_memory_gb", _of_environment(_smallest_gpu_gb)),
    ("cpu_model", _of_environment(lambda e: e.cpu_model)),
    ("cpu_logical_cores", _of_environment(lambda e: e.logical_cores)),
    ("cpu_physical_cores", _of_environment(lambda e: e.physical_cores)),
    ("cpu_quota_cores", _of_environment(lambda e: e.cpu_quota_cores)),
    ("torch_version", _of_environment(lambda e: e.packages.get("torch"))),
    ("deepspeed_version", _of_environment(lambda e: e.packages.get("deepspeed"))),
    ("transformers_version", _of_environment(lambda e: e.packages.get("transformers"))),
    ("cuda_version", _of_environment(lambda e: e.torch_cuda_version)),
    ("gpu_driver_version", _of_environment(lambda e: e.gpu_driver_version)),
    ("round_position", lambda s: s.record.trial.round_position),
    ("gpu_outside_allocator_gb", lambda s: to_gb(s.gpu_outside_allocator_bytes)),
    ("engine", lambda s: s.record.trial.configuration.engine),
    ("pass_type", lambda s: s.record.trial.workload.pass_type),
    ("step_time_cv_percent", lambda s: None if s.step_seconds_cv is None else s.step_seconds_cv * 100),
    ("synchronized", lambda s: s.record.trial.workload.synchronized),
    ("phase_communication_ms", lambda s: to_ms(s.costs.communication_seconds)),
    ("phase_transfer_ms", lambda s: to_ms(s.costs.transfer_seconds)),
    ("communication_wait_ms", lambda s: to_ms(s.costs.communication_wait_seconds)),
    ("communication_gb_per_step", lambda s: to_gb(s.costs.communication_bytes)),
    ("cpu_adam_gb_per_sec", lambda s: to_gb(s.costs.cpu_adam_bytes_per_second)),
    ("nvme_needed_gb_per_sec", lambda s: to_gb(s.costs.disk_needed_bytes_per_second)),
    ("nvme_measured_gb_per_sec", lambda s: to_gb(s.costs.disk_measured_bytes_per_second)),
    ("disk_bound", lambda s: s.costs.disk_bound),
    ("profiled_flops_per_token", lambda s: s.costs.profiled_flops_per_token),
    *((f"cpu_{phase}_{size}_gb", _phase_gb(phase, size)) for phase in HOST_PHASES for size in ("peak", "end")),
    ("seq_policy", lambda s: s.record.trial.workload.seq_policy),
    ("phase_data_ms", lambda s: to_ms(step_parts(s.record).get("data_wait"))),
    ("data_wait_ms", lambda s: to_ms(max(measured_values(s.record.ranks, "data_wait_seconds"), default=None))),
    ("vocab_size", lambda s: s.record.trial.workload.vocab_size),
    ("data_file", lambda s: s.record.trial.workload.data_path),
    ("point", lambda s: json.dumps(dict(s.record.trial.point)) if s.record.trial.point else None),
    ("trainable_parameter_count", _of_first_rank(lambda r: r.trainable_parameter_count)),
    *(
        (f"checkpoint_{action}_{column}", _checkpoint(action, value))
        for action in CHECKPOINT_ACTIONS
        for column, value in CHECKPOINT_COLUMNS.items()
        if (action, column) != ("load", "gb")
    ),
    ("checkpoint_restored", lambda s: s.checkpoint_restored),
    ("slowest_rank_host", lambda s: s.slowest_rank_host),
    ("cpu_used_gb_of_nodes", lambda s: _json_gb(s.host_peak_bytes_of_nodes)),
]


def status_text(status: str) -> str:
    """``✅ Success``, ``❌ OOM``, ``❌ RuntimeError``, …"""
    return f"{'✅' if status == SUCCESS else _SIGNS.get(status, '❌')} {status}"


def flat_rows(summaries: Sequence[TrialSummary]) -> list[dict[str, Any]]:
    """One flat row per trial, each with all columns."""
    return [{name: get(summary) for name, get in COLUMNS} for summary in with_loss_caveats(summaries)]
