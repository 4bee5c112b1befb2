"""The flat row of one trial: the columns of JSON and CSV (docs/metrics.md).

``_gb`` is 2**30 bytes, ``_ms`` milliseconds; a value that was not measured is None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ..records.schema import CHECKPOINT_ACTIONS, SUCCESS, RankMeasurement, measured_values
from ..system.environment import Environment
from ..units import to_gb, to_ms
from .loss_parity import with_loss_caveats
from .step_costs import step_parts
from .summary import TrialSummary

_SIGNS = {"Skipped": "⏭️", "Unsupported": "❌", "Interrupted": "⏹️"}


class Column(NamedTuple):
    """A column of JSON and CSV."""

    name: str
    value: Callable[[TrialSummary], Any]
    kind: type[str | bool | int | float] = float
    """Type of its values where they are not None."""
    field: str | None = None
    """The field of the summary that it holds, ``costs.*`` of its costs; None if it is computed from others."""


def _figure(name: str, field: str | None = None, kind: type[str | bool | int | float] = float) -> Column:
    """A column that holds one field of the summary (None: that of its own name), in the unit that its name tells.

    :mod:`flat_reader` reads the field back from it.
    """
    read = attrgetter(field or name)
    if name.endswith("_ms"):
        return Column(name, lambda summary: to_ms(read(summary)), kind, field or name)
    if name.endswith("_gb") or "_gb_per_" in name:
        return Column(name, lambda summary: to_gb(read(summary)), kind, field or name)
    return Column(name, read, kind, field or name)


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
LEDGER_CELLS = (
    *((tier, category) for tier in ("gpu", "cpu") for category in _CATEGORIES),
    ("nvme", "parameters"),
    ("nvme", "optimizer_states"),
)
"""Tier and category of memory that have a column."""
HOST_PHASES = ("import", "build", "initialize", "first_step", "steady")
"""Phases that have columns of host memory."""
CHECKPOINT_COLUMNS = {"seconds": "seconds", "gb": "written_bytes", "cpu_peak_gb": "host_peak_bytes"}
"""End of the name of a column → field of ``CheckpointCost``."""
MIG_SUFFIX = " (MIG)"
"""Follows the name of a GPU that is divided into MIG instances."""

FLAT_COLUMNS: list[Column] = [
    Column("stage", lambda s: s.record.trial.configuration.stage, int),
    Column("strategy", lambda s: s.record.trial.configuration.name, str),
    Column("model", lambda s: s.record.trial.workload.model, str),
    # What the engine ran, if it ran: a DeepSpeed configuration may ask for another batch than the flags.
    Column("batch_size", lambda s: s.micro_batch_size or s.record.trial.workload.batch_size, int),
    Column("seq_length", lambda s: s.record.trial.workload.seq_length, int),
    Column("grad_accum", lambda s: s.grad_accum or s.record.trial.workload.grad_accum, int),
    Column("num_steps", lambda s: s.record.trial.workload.num_steps, int),
    Column("warmup_steps", lambda s: s.record.trial.workload.warmup_steps, int),
    _figure("avg_step_time_ms", "mean_step_seconds"),
    _figure("std_step_time_ms", "step_seconds_std"),
    _figure("throughput_tokens_per_sec", "tokens_per_second"),
    _figure("gpu_peak_gb", "gpu_peak_bytes"),
    _figure("gpu_allocated_gb", "gpu_allocated_bytes"),
    _figure("gpu_reserved_gb", "gpu_reserved_bytes"),
    _figure("cpu_used_gb", "host_peak_bytes"),
    Column("success", lambda s: s.record.outcome.success, bool),
    Column("status", lambda s: status_text(s.record.outcome.status), str),
    Column("error", lambda s: s.record.outcome.error, str),
    Column("error_details", lambda s: s.record.outcome.details, str),
    Column("caveats", lambda s: "; ".join(caveat.text for caveat in s.caveats) or None, str),
    Column("repeat", lambda s: s.record.trial.repeat, int),
    Column("trial_id", lambda s: s.record.trial.trial_id, str),
    Column("num_gpus", lambda s: s.record.trial.placement.num_gpus, int),
    Column("accelerator", lambda s: s.record.trial.placement.accelerator, str),
    Column("device", _of_first_rank(lambda r: r.device_name), str),
    Column("precision", lambda s: s.record.trial.workload.precision, str),
    Column("batch_policy", lambda s: s.record.trial.workload.batch_policy, str),
    Column("activation_checkpointing", lambda s: s.record.trial.workload.activation_checkpointing, bool),
    Column("optimizer", _of_first_rank(lambda r: r.optimizer_class), str),
    Column("launch", lambda s: s.record.launch, str),
    _figure("data_parallel_size", kind=int),
    Column("parameter_count", _of_first_rank(lambda r: r.parameter_count), int),
    _figure("throughput_tokens_per_sec_per_gpu", "tokens_per_second_per_gpu"),
    _figure("throughput_samples_per_sec", "samples_per_second"),
    _figure("model_tflops_per_gpu"),
    _figure("model_flops_per_token", kind=int),
    _figure("causal_flops_per_token", kind=int),
    _figure("hardware_flops_per_token", kind=int),
    _figure("flops_convention", kind=str),
    # Above 1 it is an error of accounting, which the caveat MFU_ABOVE_1 tells.
    Column("mfu", lambda s: s.mfu if s.mfu is not None and s.mfu <= 1 else None, field="mfu"),
    Column("first_loss", lambda s: s.losses[0] if s.losses else None),
    Column("final_loss", lambda s: s.losses[-1] if s.losses else None),
    _figure("gpu_peak_reserved_gb", "gpu_peak_reserved_bytes"),
    _figure("gpu_init_peak_gb", "gpu_init_peak_bytes"),
    _figure("gpu_device_used_gb", "gpu_device_used_bytes"),
    _figure("gpu_total_gb", "gpu_total_bytes"),
    Column("gpu_percent", lambda s: None if s.gpu_fraction is None else s.gpu_fraction * 100),
    _figure("gpu_alloc_retries", kind=int),
    _figure("predicted_over_measured"),
    _figure("cpu_pss_gb", "host_pss_bytes"),
    _figure("nvme_stored_gb", "nvme_stored_bytes"),
    _figure("nvme_read_gb_per_step", "nvme_read_bytes_per_step"),
    _figure("nvme_written_gb_per_step", "nvme_written_bytes_per_step"),
    *(Column(f"ledger_{tier}_{category}_gb", _ledger_gb(tier, category)) for tier, category in LEDGER_CELLS),
    Column("phase_forward_ms", _phase_ms("forward")),
    Column("phase_backward_ms", _phase_ms("backward")),
    Column("phase_step_ms", _phase_ms("step")),
    Column("skipped_steps", _of_first_rank(lambda r: r.skipped_steps), int),
    Column("start_seconds", lambda s: s.record.start_seconds),
    Column("wall_seconds", lambda s: s.record.wall_seconds),
    Column("started_at", lambda s: s.record.started_at, str),
    Column("method_version", lambda s: s.record.method_version, int),
    _figure("predicted_over_ledger"),
    Column("dropout", lambda s: s.record.ranks[0].dropout if s.record.ranks else s.record.trial.workload.dropout),
    _figure("repeated_loss"),
    _figure("weight_change_norm"),
    _figure("weight_change_cosine"),
    Column("cpu_threads", _of_first_rank(lambda r: r.cpu_threads), int),
    Column("cpu_other_cores", lambda s: max(measured_values(s.record.ranks, "cpu_other_cores"), default=None)),
    Column("num_nodes", lambda s: s.num_nodes, int),
    Column("run_id", lambda s: s.run_id, str),
    Column("config_hash", lambda s: s.config_hash, str),
    Column("gpu_name", _of_environment(_gpu_names), str),
    Column("gpu_count", _of_environment(lambda e: len(e.gpus)), int),
    Column("gpu_memory_gb", _of_environment(_smallest_gpu_gb)),
    Column("cpu_model", _of_environment(lambda e: e.cpu_model), str),
    Column("cpu_logical_cores", _of_environment(lambda e: e.logical_cores), int),
    Column("cpu_physical_cores", _of_environment(lambda e: e.physical_cores), int),
    Column("cpu_quota_cores", _of_environment(lambda e: e.cpu_quota_cores)),
    Column("torch_version", _of_environment(lambda e: e.packages.get("torch")), str),
    Column("deepspeed_version", _of_environment(lambda e: e.packages.get("deepspeed")), str),
    Column("transformers_version", _of_environment(lambda e: e.packages.get("transformers")), str),
    Column("cuda_version", _of_environment(lambda e: e.torch_cuda_version), str),
    Column("gpu_driver_version", _of_environment(lambda e: e.gpu_driver_version), str),
    Column("round_position", lambda s: s.record.trial.round_position, int),
    _figure("gpu_outside_allocator_gb", "gpu_outside_allocator_bytes"),
    Column("engine", lambda s: s.record.trial.configuration.engine, str),
    Column("pass_type", lambda s: s.record.trial.workload.pass_type, str),
    Column("step_time_cv_percent", lambda s: None if s.step_seconds_cv is None else s.step_seconds_cv * 100),
    Column("synchronized", lambda s: s.record.trial.workload.synchronized, bool),
    _figure("phase_communication_ms", "costs.communication_seconds"),
    _figure("phase_transfer_ms", "costs.transfer_seconds"),
    _figure("communication_wait_ms", "costs.communication_wait_seconds"),
    _figure("communication_gb_per_step", "costs.communication_bytes"),
    _figure("cpu_adam_gb_per_sec", "costs.cpu_adam_bytes_per_second"),
    _figure("nvme_needed_gb_per_sec", "costs.disk_needed_bytes_per_second"),
    _figure("nvme_measured_gb_per_sec", "costs.disk_measured_bytes_per_second"),
    _figure("disk_bound", "costs.disk_bound", bool),
    _figure("profiled_flops_per_token", "costs.profiled_flops_per_token"),
    *(Column(f"cpu_{phase}_{size}_gb", _phase_gb(phase, size)) for phase in HOST_PHASES for size in ("peak", "end")),
    Column("seq_policy", lambda s: s.record.trial.workload.seq_policy, str),
    Column("phase_data_ms", lambda s: to_ms(step_parts(s.record).get("data_wait"))),
    Column("data_wait_ms", lambda s: to_ms(max(measured_values(s.record.ranks, "data_wait_seconds"), default=None))),
    Column("vocab_size", lambda s: s.record.trial.workload.vocab_size, int),
    Column("data_file", lambda s: s.record.trial.workload.data_path, str),
    Column("point", lambda s: json.dumps(dict(s.record.trial.point)) if s.record.trial.point else None, str),
    Column("trainable_parameter_count", _of_first_rank(lambda r: r.trainable_parameter_count), int),
    *(
        Column(f"checkpoint_{action}_{column}", _checkpoint(action, value))
        for action in CHECKPOINT_ACTIONS
        for column, value in CHECKPOINT_COLUMNS.items()
        # Loading writes nothing.
        if (action, column) != ("load", "gb")
    ),
    _figure("checkpoint_restored", kind=bool),
    _figure("slowest_rank_host", kind=str),
    Column("cpu_used_gb_of_nodes", lambda s: _json_gb(s.host_peak_bytes_of_nodes), str),
]


def status_text(status: str) -> str:
    """``✅ Success``, ``❌ OOM``, ``❌ RuntimeError``, …"""
    return f"{'✅' if status == SUCCESS else _SIGNS.get(status, '❌')} {status}"


def flat_row(summary: TrialSummary) -> dict[str, Any]:
    """The row of one trial, with all columns."""
    return {column.name: column.value(summary) for column in FLAT_COLUMNS}


def flat_rows(summaries: Sequence[TrialSummary]) -> list[dict[str, Any]]:
    """One flat row per trial, with what comparing their losses shows."""
    return [*map(flat_row, with_loss_caveats(summaries))]
