"""The flat record of one trial: the one list of columns behind JSON, CSV and every table.

``_gb`` is 2**30 bytes, ``_ms`` milliseconds; a value that was not measured is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..config.deepspeed_config import uses_nvme
from ..records.schema import SUCCESS
from ..system.environment import Environment
from ..system.gpus import GpuFacts
from ..units import to_gb, to_ms
from .flops import MODEL_CONVENTION
from .loss_parity import with_loss_caveats
from .summary import TrialSummary

_SIGNS = {"Skipped": "⏭️", "Unsupported": "❌", "Interrupted": "⏹️"}

Column = tuple[str, Callable[[TrialSummary], Any]]


def _first(summary: TrialSummary) -> float | None:
    return summary.losses[0] if summary.losses else None


def _last(summary: TrialSummary) -> float | None:
    return summary.losses[-1] if summary.losses else None


def _other_cores(summary: TrialSummary) -> float | None:
    """Of the node with the most."""
    return max((r.cpu_other_cores for r in summary.record.ranks if r.cpu_other_cores is not None), default=None)


def _ledger_gb(summary: TrialSummary, tier: str, category: str) -> float | None:
    """The fullest rank's bytes of one cell of the ledger; None where the trial has no ledger."""
    if not summary.record.ranks:
        return None
    cells = [rank.ledger.get(tier, {}).get(category, 0) for rank in summary.record.ranks]
    return to_gb(max(cells)) if any(rank.ledger for rank in summary.record.ranks) else None


def _ledger_columns() -> list[Column]:
    """``ledger_<tier>_<category>_gb`` for every cell; GPU cells are null where there is no GPU."""
    categories = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations", "other")

    def cell(tier: str, category: str) -> Callable[[TrialSummary], Any]:
        def value(summary: TrialSummary) -> float | None:
            if tier == "gpu" and summary.record.trial.placement.accelerator == "cpu":
                return None
            if tier == "nvme" and not uses_nvme(summary.record.trial.ds_config):
                return None
            return _ledger_gb(summary, tier, category)

        return value

    cells = [(tier, category) for tier in ("gpu", "cpu") for category in categories]
    cells += [("nvme", "parameters"), ("nvme", "optimizer_states")]
    return [(f"ledger_{tier}_{category}_gb", cell(tier, category)) for tier, category in cells]


def _of_environment(read: Callable[[Environment], Any]) -> Callable[[TrialSummary], Any]:
    """The value of a column that tells hardware or versions; None where the result does not tell its environment."""
    return lambda summary: None if summary.environment is None else read(summary.environment)


def _card_name(gpu: GpuFacts) -> str:
    return f"{gpu.name or 'unnamed'}{MIG_SUFFIX if gpu.mig else ''}"


def _least_card_gb(environment: Environment) -> float | None:
    """None without cards, or where one of them does not tell its memory."""
    sizes = [gpu.memory_total_bytes for gpu in environment.gpus]
    return to_gb(min((size for size in sizes if size is not None), default=None)) if None not in sizes else None


MIG_SUFFIX = " (MIG)"
"""Behind the name of a card that is cut into MIG instances."""

COLUMNS: list[Column] = [
    ("stage", lambda s: s.record.trial.strategy.stage),
    ("strategy", lambda s: s.record.trial.strategy.name),
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
    ("device", lambda s: s.record.ranks[0].device_name if s.record.ranks else None),
    ("precision", lambda s: s.record.trial.workload.precision),
    ("batch_policy", lambda s: s.record.trial.workload.batch_policy),
    ("activation_checkpointing", lambda s: s.record.trial.workload.activation_checkpointing),
    ("optimizer", lambda s: s.record.ranks[0].optimizer_class if s.record.ranks else None),
    ("launch", lambda s: s.record.launch),
    ("data_parallel_size", lambda s: s.data_parallel_size),
    ("parameter_count", lambda s: s.record.ranks[0].parameter_count if s.record.ranks else None),
    ("throughput_tokens_per_sec_per_gpu", lambda s: s.tokens_per_second_per_gpu),
    ("throughput_samples_per_sec", lambda s: s.samples_per_second),
    ("model_tflops_per_gpu", lambda s: s.model_tflops_per_gpu),
    ("model_flops_per_token", lambda s: s.model_flops_per_token),
    ("causal_flops_per_token", lambda s: s.causal_flops_per_token),
    ("hardware_flops_per_token", lambda s: s.hardware_flops_per_token),
    ("flops_convention", lambda s: None if s.model_flops_per_token is None else MODEL_CONVENTION),
    ("mfu", lambda s: s.mfu if s.mfu is not None and s.mfu <= 1 else None),
    ("first_loss", _first),
    ("final_loss", _last),
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
    *_ledger_columns(),
    ("phase_forward_ms", lambda s: _phase_ms(s, "forward")),
    ("phase_backward_ms", lambda s: _phase_ms(s, "backward")),
    ("phase_step_ms", lambda s: _phase_ms(s, "step")),
    ("skipped_steps", lambda s: s.record.ranks[0].skipped_steps if s.record.ranks else None),
    ("start_seconds", lambda s: s.record.start_seconds),
    ("wall_seconds", lambda s: s.record.wall_seconds),
    ("started_at", lambda s: s.record.started_at),
    ("method_version", lambda s: s.record.method_version),
    ("predicted_over_ledger", lambda s: s.predicted_over_ledger),
    ("dropout", lambda s: s.record.ranks[0].dropout if s.record.ranks else s.record.trial.workload.dropout),
    ("repeated_loss", lambda s: s.repeated_loss),
    ("weight_change_norm", lambda s: s.weight_change_norm),
    ("weight_change_cosine", lambda s: s.weight_change_cosine),
    ("cpu_threads", lambda s: s.record.ranks[0].cpu_threads if s.record.ranks else None),
    ("cpu_other_cores", _other_cores),
    ("num_nodes", lambda s: s.num_nodes),
    ("run_id", lambda s: s.run_id),
    ("config_hash", lambda s: s.config_hash),
    ("gpu_name", _of_environment(lambda e: " + ".join(sorted({_card_name(gpu) for gpu in e.gpus})) or None)),
    ("gpu_count", _of_environment(lambda e: len(e.gpus))),
    ("gpu_memory_gb", _of_environment(_least_card_gb)),
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
]


def _phase_ms(summary: TrialSummary, phase: str) -> float | None:
    values = [rank.phase_seconds[phase] for rank in summary.record.ranks if phase in rank.phase_seconds]
    return to_ms(max(values, default=None))


def status_text(status: str) -> str:
    """``✅ Success``, ``❌ OOM``, ``❌ RuntimeError``, …"""
    return f"{'✅' if status == SUCCESS else _SIGNS.get(status, '❌')} {status}"


def flat_rows(summaries: Sequence[TrialSummary]) -> list[dict[str, Any]]:
    """One flat record per trial, every one with every key."""
    return [{name: get(summary) for name, get in COLUMNS} for summary in with_loss_caveats(summaries)]
