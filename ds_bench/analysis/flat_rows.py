"""The flat row of one trial: the columns of JSON and CSV (docs/metrics.md).

``_gb`` is 2**30 bytes, ``_ms`` milliseconds; a value that was not measured is None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from ..records.schema import CHECKPOINT_ACTIONS, SUCCESS, measured_values
from ..system.environment import Environment
from ..units import BYTES_PER_GB, to_gb
from .loss_parity import with_loss_caveats
from .step_costs import step_parts
from .summary import TrialSummary

_SIGNS = {"Skipped": "⏭️", "Unsupported": "❌", "Interrupted": "⏹️"}


class Column(NamedTuple):
    """A column of JSON and CSV."""

    name: str
    value: Callable[[TrialSummary], Any]
    """In seconds or bytes where the name tells another unit (:func:`unit_scale`)."""
    kind: type[str | bool | int | float] = float
    """Type of its values where they are not None."""
    place: str | None = None
    """The field that holds its value, with its part of the summary (:func:`_part`) before a dot, and where
    :mod:`flat_reader` puts it back; None if it is computed from several."""


PARTS: dict[str, Callable[[TrialSummary], Any]] = {
    "": lambda summary: summary,
    "environment": attrgetter("environment"),
    "costs": attrgetter("costs"),
    "record": attrgetter("record"),
    "outcome": attrgetter("record.outcome"),
    # The first one, for what is equal on all ranks.
    "rank": lambda summary: summary.record.ranks[0] if summary.record.ranks else None,
    "trial": attrgetter("record.trial"),
    "configuration": attrgetter("record.trial.configuration"),
    "workload": attrgetter("record.trial.workload"),
    "placement": attrgetter("record.trial.placement"),
}
"""Parts of a summary whose fields are columns; None where it has no such part."""


def _part(name: str) -> Callable[[TrialSummary], Any]:
    """One of ``PARTS``, or the value of a key in a mapping of the summary: ``checkpoint.save``."""
    if name in PARTS:
        return PARTS[name]
    mapping, _, key = name.partition(".")
    mapping_of = attrgetter(mapping)
    return lambda summary: mapping_of(summary).get(key)


def _stored(name: str, place: str | None = None, kind: type[str | bool | int | float] = float) -> Column:
    """A column that holds one field as it is. ``place``: None for the field of the summary with the column's name."""
    place = place or name
    part_name, _, field = place.rpartition(".")
    part, read = _part(part_name), attrgetter(field)
    return Column(name, lambda s: None if (holder := part(s)) is None else read(holder), kind, place)


def _of_environment(read: Callable[[Environment], Any]) -> Callable[[TrialSummary], Any]:
    """The value of a column of hardware or versions; None if the environment is not known."""
    return lambda summary: None if summary.environment is None else read(summary.environment)


def _largest_of_ranks(field: str) -> Callable[[TrialSummary], Any]:
    """The largest value of a field of the ranks; None if none measured it."""
    return lambda summary: max(measured_values(summary.record.ranks, field), default=None)


def _phase(name: str) -> Callable[[TrialSummary], float | None]:
    """Time of one phase of a step on the slowest rank; None if it was not measured."""
    return lambda summary: max(
        (rank.phase_seconds[name] for rank in summary.record.ranks if name in rank.phase_seconds), default=None
    )


def _ledger(tier: str, category: str) -> Callable[[TrialSummary], int | None]:
    """One cell of the ledger, on the fullest rank; None without a ledger, and for a tier that the trial has not."""

    def value(summary: TrialSummary) -> int | None:
        trial, ledgers = summary.record.trial, [rank.ledger for rank in summary.record.ranks]
        without_tier = (tier == "gpu" and trial.placement.accelerator == "cpu") or (
            tier == "nvme" and not trial.configuration.uses_nvme
        )
        if without_tier or not any(ledgers):
            return None
        return max(ledger.get(tier, {}).get(category, 0) for ledger in ledgers)

    return value


def _json_gb(sizes: Mapping[str, int]) -> str | None:
    """Sizes by name as JSON, in GB; None without any."""
    return json.dumps({name: to_gb(size) for name, size in sizes.items()}) if sizes else None


def _gpu_names(environment: Environment) -> str | None:
    names = {f"{gpu.name or 'unnamed'}{MIG_SUFFIX if gpu.mig else ''}" for gpu in environment.gpus}
    return " + ".join(sorted(names)) or None


def _smallest_gpu_bytes(environment: Environment) -> int | None:
    """None without GPUs, or if the memory of one is not known."""
    sizes = [gpu.memory_total_bytes for gpu in environment.gpus]
    return None if None in sizes else min((size for size in sizes if size is not None), default=None)


_CATEGORIES = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations", "other")
_LEDGER_CELLS = (
    *((tier, category) for tier in ("gpu", "cpu") for category in _CATEGORIES),
    ("nvme", "parameters"),
    ("nvme", "optimizer_states"),
)
"""Tier and category of memory that have a column."""
_CHECKPOINT_COLUMNS = {"seconds": "seconds", "gb": "written_bytes", "cpu_peak_gb": "host_peak_bytes"}
"""End of the name of a column → field of ``CheckpointCost``."""
MIG_SUFFIX = " (MIG)"
"""Follows the name of a GPU that is divided into MIG instances."""

FLAT_COLUMNS: list[Column] = [
    _stored("stage", "configuration.stage", int),
    _stored("strategy", "configuration.name", str),
    _stored("model", "workload.model", str),
    # What the engine ran, if it ran: a DeepSpeed configuration may ask for another batch than the flags.
    Column("batch_size", lambda s: s.micro_batch_size or s.record.trial.workload.batch_size, int),
    _stored("seq_length", "workload.seq_length", int),
    Column("grad_accum", lambda s: s.grad_accum or s.record.trial.workload.grad_accum, int),
    _stored("num_steps", "workload.num_steps", int),
    _stored("warmup_steps", "workload.warmup_steps", int),
    _stored("avg_step_time_ms", "mean_step_seconds"),
    _stored("std_step_time_ms", "step_seconds_std"),
    _stored("throughput_tokens_per_sec", "tokens_per_second"),
    _stored("gpu_peak_gb", "gpu_peak_bytes"),
    _stored("gpu_allocated_gb", "gpu_allocated_bytes"),
    _stored("gpu_reserved_gb", "gpu_reserved_bytes"),
    _stored("cpu_used_gb", "host_peak_bytes"),
    Column("success", lambda s: s.record.outcome.success, bool),
    Column("status", lambda s: status_text(s.record.outcome.status), str),
    _stored("error", "outcome.error", str),
    _stored("error_details", "outcome.details", str),
    Column("caveats", lambda s: "; ".join(caveat.text for caveat in s.caveats) or None, str),
    _stored("repeat", "trial.repeat", int),
    _stored("trial_id", "trial.trial_id", str),
    _stored("num_gpus", "placement.num_gpus", int),
    _stored("accelerator", "placement.accelerator", str),
    _stored("device", "rank.device_name", str),
    _stored("precision", "workload.precision", str),
    _stored("batch_policy", "workload.batch_policy", str),
    _stored("activation_checkpointing", "workload.activation_checkpointing", bool),
    _stored("optimizer", "rank.optimizer_class", str),
    _stored("launch", "record.launch", str),
    _stored("data_parallel_size", kind=int),
    _stored("parameter_count", "rank.parameter_count", int),
    _stored("throughput_tokens_per_sec_per_gpu", "tokens_per_second_per_gpu"),
    _stored("throughput_samples_per_sec", "samples_per_second"),
    _stored("model_tflops_per_gpu"),
    _stored("model_flops_per_token", kind=int),
    _stored("causal_flops_per_token", kind=int),
    _stored("hardware_flops_per_token", kind=int),
    _stored("flops_convention", kind=str),
    # Above 1 it is an error of accounting, which the caveat MFU_ABOVE_1 tells.
    Column("mfu", lambda s: s.mfu if s.mfu is not None and s.mfu <= 1 else None, place="mfu"),
    Column("first_loss", lambda s: s.losses[0] if s.losses else None),
    Column("final_loss", lambda s: s.losses[-1] if s.losses else None),
    _stored("gpu_peak_reserved_gb", "gpu_peak_reserved_bytes"),
    _stored("gpu_init_peak_gb", "gpu_init_peak_bytes"),
    _stored("gpu_device_used_gb", "gpu_device_used_bytes"),
    _stored("gpu_total_gb", "gpu_total_bytes"),
    Column("gpu_percent", lambda s: None if s.gpu_fraction is None else s.gpu_fraction * 100),
    _stored("gpu_alloc_retries", kind=int),
    _stored("predicted_over_measured"),
    _stored("cpu_pss_gb", "host_pss_bytes"),
    _stored("nvme_stored_gb", "nvme_stored_bytes"),
    _stored("nvme_read_gb_per_step", "nvme_read_bytes_per_step"),
    _stored("nvme_written_gb_per_step", "nvme_written_bytes_per_step"),
    *(
        Column(f"ledger_{tier}_{category}_gb", _ledger(tier, category), place=f"rank.ledger.{tier}.{category}")
        for tier, category in _LEDGER_CELLS
    ),
    Column("phase_forward_ms", _phase("forward"), place="rank.phase_seconds.forward"),
    Column("phase_backward_ms", _phase("backward"), place="rank.phase_seconds.backward"),
    Column("phase_step_ms", _phase("step"), place="rank.phase_seconds.step"),
    _stored("skipped_steps", "rank.skipped_steps", int),
    _stored("start_seconds", "record.start_seconds"),
    _stored("wall_seconds", "record.wall_seconds"),
    _stored("started_at", "record.started_at", str),
    _stored("method_version", "record.method_version", int),
    _stored("predicted_over_ledger"),
    Column("dropout", lambda s: s.record.ranks[0].dropout if s.record.ranks else s.record.trial.workload.dropout),
    _stored("repeated_loss"),
    _stored("weight_change_norm"),
    _stored("weight_change_cosine"),
    _stored("cpu_threads", "rank.cpu_threads", int),
    Column("cpu_other_cores", _largest_of_ranks("cpu_other_cores"), place="rank.cpu_other_cores"),
    _stored("num_nodes", kind=int),
    _stored("run_id", kind=str),
    Column("config_hash", lambda s: s.config_hash, str, "flat_config_hash"),
    Column("gpu_name", _of_environment(_gpu_names), str),
    Column("gpu_count", _of_environment(lambda e: len(e.gpus)), int),
    Column("gpu_memory_gb", _of_environment(_smallest_gpu_bytes)),
    _stored("cpu_model", "environment.cpu_model", str),
    _stored("cpu_logical_cores", "environment.logical_cores", int),
    _stored("cpu_physical_cores", "environment.physical_cores", int),
    _stored("cpu_quota_cores", "environment.cpu_quota_cores"),
    Column("torch_version", _of_environment(lambda e: e.packages.get("torch")), str),
    Column("deepspeed_version", _of_environment(lambda e: e.packages.get("deepspeed")), str),
    Column("transformers_version", _of_environment(lambda e: e.packages.get("transformers")), str),
    _stored("cuda_version", "environment.torch_cuda_version", str),
    _stored("gpu_driver_version", "environment.gpu_driver_version", str),
    _stored("round_position", "trial.round_position", int),
    _stored("gpu_outside_allocator_gb", "gpu_outside_allocator_bytes"),
    _stored("engine", "configuration.engine", str),
    _stored("pass_type", "workload.pass_type", str),
    Column("step_time_cv_percent", lambda s: None if s.step_seconds_cv is None else s.step_seconds_cv * 100),
    _stored("synchronized", "workload.synchronized", bool),
    _stored("phase_communication_ms", "costs.communication_seconds"),
    _stored("phase_transfer_ms", "costs.transfer_seconds"),
    _stored("communication_wait_ms", "costs.communication_wait_seconds"),
    _stored("communication_gb_per_step", "costs.communication_bytes"),
    _stored("cpu_adam_gb_per_sec", "costs.cpu_adam_bytes_per_second"),
    _stored("nvme_needed_gb_per_sec", "costs.disk_needed_bytes_per_second"),
    _stored("nvme_measured_gb_per_sec", "costs.disk_measured_bytes_per_second"),
    _stored("disk_bound", "costs.disk_bound", bool),
    _stored("profiled_flops_per_token", "costs.profiled_flops_per_token"),
    *(
        _stored(f"cpu_{phase}_{size}_gb", f"phase_memory.{phase}.host_{size}_bytes")
        for phase in ("import", "build", "initialize", "first_step", "steady")
        for size in ("peak", "end")
    ),
    _stored("seq_policy", "workload.seq_policy", str),
    Column("phase_data_ms", lambda s: step_parts(s.record).get("data_wait"), place="rank.phase_seconds.data_wait"),
    Column("data_wait_ms", _largest_of_ranks("data_wait_seconds"), place="rank.data_wait_seconds"),
    _stored("vocab_size", "workload.vocab_size", int),
    _stored("data_file", "workload.data_path", str),
    Column("point", lambda s: json.dumps(dict(s.record.trial.point)) if s.record.trial.point else None, str),
    _stored("trainable_parameter_count", "rank.trainable_parameter_count", int),
    *(
        _stored(f"checkpoint_{action}_{column}", f"checkpoint.{action}.{field}")
        for action in CHECKPOINT_ACTIONS
        for column, field in _CHECKPOINT_COLUMNS.items()
        # Loading writes nothing.
        if (action, column) != ("load", "gb")
    ),
    _stored("checkpoint_restored", kind=bool),
    _stored("slowest_rank_host", kind=str),
    Column("cpu_used_gb_of_nodes", lambda s: _json_gb(s.host_peak_bytes_of_nodes), str),
    _stored("first_grad_norm"),
    _stored("grad_norm"),
]


def status_text(status: str) -> str:
    """``✅ Success``, ``❌ OOM``, ``❌ RuntimeError``, …"""
    return f"{'✅' if status == SUCCESS else _SIGNS.get(status, '❌')} {status}"


@cache
def unit_scale(column: str) -> float | None:
    """How many of a column's unit a second or a byte is, by its name; None for a column of neither."""
    if column.endswith("_ms"):
        return 1000.0
    return 1 / BYTES_PER_GB if column.endswith("_gb") or "_gb_per_" in column else None


def flat_row(summary: TrialSummary) -> dict[str, Any]:
    """The row of one trial, with all columns; JSON also has its caveats as values, ``caveat_list``."""
    row = {column.name: column.value(summary) for column in FLAT_COLUMNS}
    for name, value in row.items():
        if value is not None and (scale := unit_scale(name)) is not None:
            row[name] = value * scale
    row["caveat_list"] = [asdict(caveat) for caveat in summary.caveats]
    return row


def flat_rows(summaries: Sequence[TrialSummary]) -> list[dict[str, Any]]:
    """One flat row per trial, with what comparing their losses shows."""
    return [*map(flat_row, with_loss_caveats(summaries))]
