"""Reads flat rows, the rows of a result's JSON, to summaries.

A flat row holds figures, status and caveats, but neither the series of step times and losses nor the DeepSpeed
configuration. The summary of a row gives the same row again (``flat_rows.FLAT_COLUMNS``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from .. import units
from ..config import axis_rows, strategies
from ..config.axes import RowFacts, Setting
from ..config.deepspeed_config import minimal_config
from ..config.spec import Configuration, Engine, Placement, Strategy, Trial, Workload
from ..errors import UsageError
from ..models.presets import find_preset
from ..records.json_files import check_numbers, invalid_value
from ..records.schema import CHECKPOINT_ACTIONS, SUCCESS, Outcome, RankMeasurement, TrialRecord
from ..system.environment import Environment
from ..system.gpus import GpuFacts
from .caveats import parse_caveats
from .checkpoints import CheckpointCost
from .flat_rows import CHECKPOINT_COLUMNS, FLAT_COLUMNS, HOST_PHASES, LEDGER_CELLS, MIG_SUFFIX
from .phase_memory import NodePhaseMemory
from .step_costs import StepCosts
from .summary import GPU_FIELDS, TrialSummary

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_NEEDED = (
    "stage", "strategy", "model", "batch_size", "seq_length", "grad_accum", "num_steps", "warmup_steps", "success",
    "status", "repeat", "num_gpus", "accelerator", "precision", "activation_checkpointing", "method_version",
)  # fmt: skip
KNOWN_COLUMNS = frozenset(column.name for column in FLAT_COLUMNS)
_SIGNED = frozenset(("first_loss", "final_loss", "repeated_loss", "weight_change_cosine"))
_MAX_GPUS = 1024
"""GPUs of a host at most, so that a damaged row cannot ask for millions of objects."""
_MAX_LOSSES = 100_000
"""Length of a series of losses at most, for the same reason."""


def check_rows(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Checks rows and returns their known columns. Raises InvalidValueError, whose place begins with the row's
    index."""
    from pydantic import ValidationError
    from pydantic_core import to_json

    check_numbers(rows)
    try:
        return _row_adapter().validate_json(to_json(rows), strict=True)
    except ValidationError as error:
        raise invalid_value(error) from None


@cache
def _row_adapter() -> TypeAdapter[list[dict[str, Any]]]:
    """Makes the checker: each column has its type, and all but ``_NEEDED`` may be null or missing.

    It ends at the first row that is wrong: of some other JSON every value is, and all errors together fill the memory.
    """
    from pydantic import FailFast, Field, TypeAdapter
    from typing_extensions import TypedDict

    columns: dict[str, Any] = {}
    for name, _, kind, _ in FLAT_COLUMNS:
        checked: Any = Annotated[kind, Field(ge=0)] if kind in (int, float) and name not in _SIGNED else kind
        columns[name] = checked if name in _NEEDED else NotRequired[checked | None]
    # Of typing_extensions, as pydantic refuses that of typing before Python 3.12; Any, as mypy reads no type made here.
    make_type: Any = TypedDict
    row: Any = make_type("row", columns)
    rows: Any = Annotated[list[row], FailFast()]
    return TypeAdapter(rows)


def read_summary(row: Mapping[str, Any]) -> TrialSummary:
    """Makes the summary of a checked row. Raises ValueError if its values are impossible.

    Its record has one rank, which holds the figures of the whole job. The rank's ``step_seconds`` is the mean alone;
    losses between the first and the last are None.
    """
    trial = _trial(row)
    figures = {} if row.get("avg_step_time_ms") is None else _figures(row)
    ranks = (_rank(row, figures),) if figures else ()
    if ranks and not row.get("throughput_tokens_per_sec"):
        raise ValueError("has a step time and no throughput_tokens_per_sec")
    record = TrialRecord(
        trial=trial,
        outcome=_outcome(row),
        ranks=ranks,
        launch=row.get("launch"),
        started_at=row.get("started_at"),
        wall_seconds=row.get("wall_seconds"),
        start_seconds=row.get("start_seconds"),
        method_version=row["method_version"],
    )
    return TrialSummary(
        record=record,
        caveats=tuple(parse_caveats(row.get("caveats") or "", row["num_steps"])),
        environment=_environment(row),
        num_nodes=row.get("num_nodes"),
        run_id=row.get("run_id"),
        flat_config_hash=row.get("config_hash"),
        **figures,
    )


def _environment(row: Mapping[str, Any]) -> Environment | None:
    """The hardware and versions of a row, as far as they decide whether results compare; None if it holds none.

    A row with GPUs of several kinds gets one kind with all their names, which no host has: it compares only with rows
    of the same kinds.
    """
    if not row.get("cpu_logical_cores"):
        return None
    name, memory_bytes = row.get("gpu_name"), _value(row, "gpu_memory_gb")
    gpu = GpuFacts(
        index=0,
        name=name and name.removesuffix(MIG_SUFFIX),
        memory_total_bytes=memory_bytes,
        mig=bool(name and name.endswith(MIG_SUFFIX)),
    )
    packages = {package: row.get(f"{package}_version") for package in ("torch", "deepspeed", "transformers")}
    return Environment(
        hostname="",
        cpu_model=row.get("cpu_model"),
        logical_cores=row["cpu_logical_cores"],
        physical_cores=row.get("cpu_physical_cores"),
        cpu_quota_cores=row.get("cpu_quota_cores"),
        packages={package: version for package, version in packages.items() if version},
        torch_cuda_version=row.get("cuda_version"),
        gpu_driver_version=row.get("gpu_driver_version"),
        gpus=tuple(replace(gpu, index=index) for index in range(min(row.get("gpu_count") or 0, _MAX_GPUS))),
    )


def _sizes_of_nodes(row: Mapping[str, Any]) -> dict[str, int]:
    """Host → bytes of ``cpu_used_gb_of_nodes``; empty where it holds something else."""
    try:
        sizes = json.loads(row.get("cpu_used_gb_of_nodes") or "{}")
        # The cell is a text to check_rows, so that anything may be in it.
        return {str(name): round(size * units.BYTES_PER_GB) for name, size in sizes.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the summary that ``summary.summarise`` computes from a record."""
    figures = {column.field: _value(row, column.name) for column in FLAT_COLUMNS if column.field is not None}
    costs = {name: figures.pop(name) for name in list(figures) if name.startswith("costs.")}
    if row["accelerator"] == "cpu":  # files without the second column hold its value in the first
        over_measured = figures.pop("predicted_over_measured")
        if figures["predicted_over_ledger"] is None:
            figures["predicted_over_ledger"] = over_measured
    return {
        **figures,
        "costs": StepCosts(**{name.removeprefix("costs."): value for name, value in costs.items()}),
        "host_peak_bytes_of_nodes": _sizes_of_nodes(row),
        "phase_memory": _phase_memory(row),
        "checkpoint": _checkpoint(row),
        "losses": _losses(row),
        "micro_batch_size": row["batch_size"],
        "grad_accum": row["grad_accum"],
    }


def _phase_memory(row: Mapping[str, Any]) -> dict[str, NodePhaseMemory]:
    phases = {
        phase: NodePhaseMemory(
            host_peak_bytes=_value(row, f"cpu_{phase}_peak_gb"), host_end_bytes=_value(row, f"cpu_{phase}_end_gb")
        )
        for phase in HOST_PHASES
    }
    return {phase: memory for phase, memory in phases.items() if memory != NodePhaseMemory()}


def _checkpoint(row: Mapping[str, Any]) -> dict[str, CheckpointCost]:
    actions = {
        action: CheckpointCost(
            **{field: _value(row, f"checkpoint_{action}_{column}") for column, field in CHECKPOINT_COLUMNS.items()}
        )
        for action in CHECKPOINT_ACTIONS
    }
    return {action: cost for action, cost in actions.items() if cost != CheckpointCost()}


def read_efficiency(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a TrialSummary that need the model's shape."""
    names = ("model_flops_per_token", "causal_flops_per_token", "hardware_flops_per_token", "model_tflops_per_gpu")
    return {name: row.get(name) for name in (*names, "mfu", "flops_convention")}


def _value(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column in seconds, in bytes, or as it stands: the inverse of what ``flat_rows`` writes."""
    value = row.get(column)
    if value is None:
        return None
    if column.endswith("_ms"):
        return value / 1000.0
    if "_gb_per_" in column:
        return value * units.BYTES_PER_GB
    return round(value * units.BYTES_PER_GB) if column.endswith("_gb") else value


def _losses(row: Mapping[str, Any]) -> tuple[float | None, ...]:
    first, last = row.get("first_loss"), row.get("final_loss")
    if first is None and last is None:
        return ()
    steps = min(row["num_steps"] + row["warmup_steps"], _MAX_LOSSES)
    return (first, *[None] * (steps - 2), last) if steps > 1 else (first,)


def _outcome(row: Mapping[str, Any]) -> Outcome:
    sign, _, rest = row["status"].partition(" ")
    # A status may have two words without a sign: "OOM (host)".
    status = row["status"] if sign[:1].isalnum() else rest
    if not status or (status == SUCCESS) != row["success"]:
        raise ValueError(f"says success {str(row['success']).lower()} and status {row['status']}")
    return Outcome(status=status, error=row.get("error"), details=row.get("error_details"))


def _trial(row: Mapping[str, Any]) -> Trial:
    configuration = _configuration(row["strategy"], row["stage"], row.get("engine"))
    setting = _axes_setting(row["strategy"], row["stage"], row["num_gpus"])
    if setting.variables:
        configuration = replace(configuration, variables=setting.variables)
    return Trial(
        trial_id=row.get("trial_id") or f"{configuration.name}_r{row['repeat']}",
        repeat=row["repeat"],
        round_position=row.get("round_position"),
        configuration=configuration,
        workload=_workload(row, setting),
        placement=_placement(row),
        ds_config=configuration.deepspeed_config,
        point=_point(row),
    )


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a sweep's point. Raises ValueError for a text that holds none."""
    values = json.loads(row.get("point") or "{}")
    if not isinstance(values, dict):
        raise ValueError("has a point that is no JSON object")
    return values


@cache
def _configuration(name: str, stage: int, engine: Engine | None) -> Configuration:
    """The configuration of the catalogue's strategy; of another name the offload devices are not known."""
    base, values = axis_rows.split_name(name)
    strategy = strategies.find_strategy(base, stage) or Strategy(name=base, label=base, stage=stage)
    strategy = replace(strategy, engine=engine or strategy.engine)
    made = strategies.make_configuration(strategy, minimal_config(strategy))
    if not values:
        return made
    axis_values = {value.axis_name: value.text for value in values}
    label = axis_rows.row_label(made.label, values)
    return replace(made, name=name, label=label, source="axis", axis_values=axis_values)


@cache
def _axes_setting(name: str, stage: int, ranks: int) -> Setting:
    """What the axes in a row's name set besides the DeepSpeed configuration, which no column may tell.

    A value that cannot be set in such a row is left out.
    """
    facts = RowFacts(stage=stage, grad_accum=1, ranks=ranks)
    workload: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for value in axis_rows.split_name(name)[1]:
        with contextlib.suppress(UsageError):
            setting = axis_rows.setting_of((value,), facts)
            workload |= setting.workload
            variables |= setting.variables
    return Setting(workload=workload, variables=variables)


_preset = cache(find_preset)


def _workload(row: Mapping[str, Any], setting: Setting) -> Workload:
    facts = _preset(row["model"])
    elsewhere = "factory" if ":" in row["model"] else "hub"  # or a local folder: the row does not say
    columns = {
        "model": row["model"],
        "model_source": "preset" if facts else elsewhere,
        "model_type": facts.model_type if facts else None,
        "model_config": facts.config if facts else {},
        "batch_size": row["batch_size"],
        "batch_policy": "largest" if row.get("batch_policy") == "largest" else "given",
        "seq_length": row["seq_length"],
        "seq_policy": "longest" if row.get("seq_policy") == "longest" else "given",
        "grad_accum": row["grad_accum"],
        "num_steps": row["num_steps"],
        "warmup_steps": row["warmup_steps"],
        "precision": row["precision"],
        "activation_checkpointing": row["activation_checkpointing"],
        "dropout": row.get("dropout"),
        "vocab_size": row.get("vocab_size"),
        "data_path": row.get("data_file"),
        "pass_type": row.get("pass_type") or "train",
        "synchronized": row.get("synchronized") is not False,
    }
    # The columns come last: the axes in a name give only what no column tells.
    return Workload(**{**setting.workload, **columns})


def _placement(row: Mapping[str, Any]) -> Placement:
    if row["accelerator"] not in ("cuda", "cpu"):
        raise ValueError(f"has the accelerator {row['accelerator']!r}, which is neither cuda nor cpu")
    return Placement(
        accelerator=row["accelerator"],
        num_gpus=row["num_gpus"],
        launcher="deepspeed" if row.get("launch") == "deepspeed" else "warm",
        gpu_memory_limit_bytes=_emulated(row),
        hosts=_hosts(row),
    )


def _hosts(row: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Nodes without their names, equally many ranks on each; empty on one node. Raises ValueError."""
    ranks, nodes = row["num_gpus"], row.get("num_nodes") or 1
    if nodes > max(ranks, 1):
        raise ValueError(f"has {nodes} nodes and {ranks} ranks")
    if nodes == 1:
        return ()
    return tuple((f"node{index}", ranks // nodes + (index < ranks % nodes)) for index in range(nodes))


def _emulated(row: Mapping[str, Any]) -> int | None:
    """Bytes of an emulated GPU, which ``gpu_percent`` is a percentage of; None if that is the real one."""
    total, percent = row.get("gpu_total_gb"), row.get("gpu_percent")
    used = row.get("gpu_peak_reserved_gb") or row.get("gpu_peak_gb")
    if not total or not percent or not used:
        return None
    size = used / (percent / 100)
    # Percent and bytes of a real GPU give its total again, but for rounding.
    return round(size * units.BYTES_PER_GB) if size < total * (1 - 1e-6) else None


def _rank(row: Mapping[str, Any], figures: Mapping[str, Any]) -> RankMeasurement:
    """One rank with the figures of the whole job. ``figures``: fields of the summary."""
    read, facts = row.get, _preset(row["model"])
    return RankMeasurement(
        rank=0,
        world_size=row["num_gpus"],
        hostname="",
        pid=0,
        device_name=read("device") or row["accelerator"],
        torch_version="",
        deepspeed_version="",
        micro_batch_size=row["batch_size"],
        grad_accum=row["grad_accum"],
        data_parallel_size=read("data_parallel_size") or row["num_gpus"],
        # Here and below "" and 0 stand for what no column tells; comparisons take them for unknown.
        optimizer_class=read("optimizer") or "",
        engine_optimizer_class="",
        parameter_count=read("parameter_count") or 0,
        trainable_parameter_count=read("trainable_parameter_count"),
        largest_parameter=facts.largest_parameter if facts else 0,
        resolved_config={},
        # One step of the mean duration: the mean of this window is that of the row.
        step_seconds=(figures["mean_step_seconds"],),
        warmup_step_seconds=(),
        window_seconds=figures["mean_step_seconds"],
        losses=figures["losses"],
        skipped_steps=read("skipped_steps") or 0,
        import_seconds=0.0,
        build_seconds=0.0,
        init_seconds=0.0,
        first_step_seconds=None,
        **{name: figures[name] for name in (*GPU_FIELDS, "host_peak_bytes", "host_pss_bytes", "nvme_stored_bytes")},
        data_wait_seconds=_value(row, "data_wait_ms"),
        ledger=_ledger(row),
        phase_seconds=_phases(row),
        dropout=read("dropout"),
        cpu_threads=read("cpu_threads"),
        cpu_other_cores=read("cpu_other_cores"),
    )


def _ledger(row: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    ledger: dict[str, dict[str, int]] = {}
    for tier, category in LEDGER_CELLS:
        size = _value(row, f"ledger_{tier}_{category}_gb")
        if size is not None:
            ledger.setdefault(tier, {})[category] = size
    return ledger


def _phases(row: Mapping[str, Any]) -> dict[str, float]:
    columns = {"forward": "forward", "backward": "backward", "step": "step", "data_wait": "data"}
    phases = {name: _value(row, f"phase_{column}_ms") for name, column in columns.items()}
    return {name: seconds for name, seconds in phases.items() if seconds is not None}
