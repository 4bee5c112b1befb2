"""Makes runs of the rows of flat JSON files, which hold figures, but neither series nor DeepSpeed configurations."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

from ..config import axis_rows, strategies
from ..config.deepspeed_config import minimal_config
from ..config.spec import Configuration, Placement, Strategy, Trial, Workload
from ..models.presets import find_preset
from ..records.schema import SUCCESS
from ..system.environment import Environment
from ..system.gpus import GpuFacts
from ..units import BYTES_PER_GB
from .row import MIG_SUFFIX, Row, Run

_MOST_GPUS = 1024
"""Largest number of GPUs of a host, so that a damaged row cannot ask for millions of objects."""
_preset = cache(find_preset)


def flat_run(row: Row) -> Run:
    """Make the run of a row without its record. Raises ValueError if the values contradict each other."""
    run = Run(row=row, flat_trial=_trial(row), environment=_environment(row))
    if (run.outcome.status == SUCCESS) != row.success:
        raise ValueError(f"success is {str(row.success).lower()} and status is {row.status}")
    if row.success and not (row.avg_step_time_ms and row.throughput_tokens_per_sec):
        raise ValueError("a row that succeeded has a step time and a throughput")
    return run


def _trial(row: Row) -> Trial:
    configuration = _configuration(row.strategy, row.stage, row.engine)
    facts, ranks, nodes = _preset(row.model), row.num_gpus, row.num_nodes or 1
    if not 1 <= nodes <= ranks:
        raise ValueError(f"num_nodes is {nodes} and num_gpus {ranks}")
    workload: dict[str, Any] = {
        name: value
        for name in ("batch_policy", "seq_policy", "pass_type", "synchronized", "vocab_size", "dropout")
        if (value := getattr(row, name)) is not None
    }
    point = json.loads(row.point or "{}")
    if not isinstance(point, dict):
        raise ValueError("point is no JSON object")
    return Trial(
        trial_id=row.trial_id or f"{row.strategy}_r{row.repeat}",
        repeat=row.repeat,
        configuration=configuration,
        workload=Workload(
            model=row.model,
            model_source="preset" if facts else "factory" if ":" in row.model else "hub",
            model_type=facts.model_type if facts else None,
            model_config=facts.config if facts else {},
            batch_size=row.batch_size,
            seq_length=row.seq_length,
            grad_accum=row.grad_accum,
            num_steps=row.num_steps,
            warmup_steps=row.warmup_steps,
            precision=row.precision,  # type: ignore[arg-type]
            activation_checkpointing=row.activation_checkpointing,
            data_path=row.data_file,
            **workload,
        ),
        placement=Placement(
            accelerator=row.accelerator,  # type: ignore[arg-type]
            num_gpus=ranks,
            launcher="deepspeed" if row.launch == "deepspeed" else "warm",
            gpu_memory_limit_bytes=_emulated_bytes(row),
            hosts=tuple((f"node{node}", ranks // nodes + (node < ranks % nodes)) for node in range(nodes))
            if nodes > 1
            else (),
        ),
        ds_config=configuration.deepspeed_config,
        round_position=row.round_position,
        point=point,
    )


@cache
def _configuration(name: str, stage: int, engine: Any) -> Configuration:
    """Return the strategy of the catalogue, else a configuration of that name without offload."""
    base, values = axis_rows.split_name(name)
    strategy = strategies.find_strategy(base, stage) or Strategy(name=base, label=base, stage=stage)
    strategy = replace(strategy, engine=engine or strategy.engine)
    made = strategies.make_configuration(strategy, minimal_config(strategy))
    if not values:
        return made
    label = axis_rows.row_label(made.label, values)
    axis_values = {value.axis_name: value.text for value in values}
    return replace(made, name=name, label=label, source="axis", axis_values=axis_values)


def _emulated_bytes(row: Row) -> int | None:
    """Return the memory of an emulated GPU, which ``gpu_percent`` is a share of; None if that is the real one."""
    used = row.gpu_peak_reserved_gb or row.gpu_peak_gb
    if not (row.gpu_total_gb and row.gpu_percent and used):
        return None
    size = used / (row.gpu_percent / 100)
    # Percent and size of a real GPU give its total again, but for rounding.
    return round(size * BYTES_PER_GB) if size < row.gpu_total_gb * (1 - 1e-6) else None


def _environment(row: Row) -> Environment | None:
    """Return what decides whether results compare; None if the row does not hold it.

    GPUs of several kinds become one kind with all their names: such a row compares only with rows of the same kinds.
    """
    if not row.cpu_logical_cores:
        return None
    gpu = GpuFacts(
        index=0,
        name=row.gpu_name and row.gpu_name.removesuffix(MIG_SUFFIX),
        memory_total_bytes=None if row.gpu_memory_gb is None else round(row.gpu_memory_gb * BYTES_PER_GB),
        mig=bool(row.gpu_name and row.gpu_name.endswith(MIG_SUFFIX)),
    )
    versions = {
        "torch": row.torch_version,
        "deepspeed": row.deepspeed_version,
        "transformers": row.transformers_version,
    }
    return Environment(
        hostname="",
        packages={name: version for name, version in versions.items() if version},
        gpus=tuple(replace(gpu, index=index) for index in range(min(row.gpu_count or 0, _MOST_GPUS))),
        cpu_model=row.cpu_model,
        logical_cores=row.cpu_logical_cores,
        physical_cores=row.cpu_physical_cores,
        cpu_quota_cores=row.cpu_quota_cores,
        torch_cuda_version=row.cuda_version,
        gpu_driver_version=row.gpu_driver_version,
    )
