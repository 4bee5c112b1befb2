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
from ..config.caveats import Caveat
from ..config.deepspeed_config import minimal_config
from ..config.spec import Configuration, Engine, Placement, Strategy, Trial, Workload
from ..errors import UsageError
from ..models.presets import find_preset
from ..records.json_files import check_numbers, invalid_value
from ..records.schema import SUCCESS, Outcome, RankMeasurement, TrialRecord
from ..system.environment import Environment
from ..system.gpus import GpuFacts
from .checkpoints import CheckpointCost
from .flat_rows import FLAT_COLUMNS, MIG_SUFFIX, PARTS, unit_scale
from .phase_memory import NodePhaseMemory
from .step_costs import StepCosts
from .summary import GPU_FIELDS, TrialSummary

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_NEEDED = (
    "stage", "strategy", "model", "batch_size", "seq_length", "grad_accum", "num_steps", "warmup_steps", "success",
    "status", "repeat", "num_gpus", "accelerator", "precision", "activation_checkpointing", "method_version",
)  # fmt: skip
KNOWN_COLUMNS = frozenset([*(column.name for column in FLAT_COLUMNS), "caveat_list"])
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

    columns: dict[str, Any] = {"caveat_list": NotRequired[list[Caveat] | None]}
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
    values = _values(row)
    parts = {name: values.pop(name, {}) for name in PARTS if name}
    measured = "mean_step_seconds" in values
    if measured and not values.get("tokens_per_second"):
        raise ValueError("has a step time and no throughput_tokens_per_sec")
    # Without a step nothing was measured.
    figures = _figures(row, values, parts["costs"]) if measured else {}
    record = TrialRecord(
        trial=_trial(row, parts),
        outcome=_outcome(row, parts["outcome"]),
        ranks=(_rank(row, figures, parts["rank"]),) if measured else (),
        **parts["record"],
    )
    known = {name: values.get(name) for name in ("num_nodes", "run_id", "flat_config_hash")}
    return TrialSummary(
        record=record,
        caveats=tuple(row.get("caveat_list") or ()),
        environment=_environment(row, parts["environment"]),
        **{**known, **figures},
    )


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row by their places (``flat_rows.Column.place``), in seconds and bytes: ``{"workload":
    {"model": …}, "mean_step_seconds": …}``. What the row does not tell is left out."""
    values: dict[str, Any] = {}
    for column in FLAT_COLUMNS:
        value = row.get(column.name)
        # An empty text tells nothing, like null, where a row need not tell it.
        if column.place is not None and value is not None and (value != "" or column.name in _NEEDED):
            *way, field = column.place.split(".")
            holder = values
            for name in way:
                holder = holder.setdefault(name, {})
            holder[field] = _in_base_unit(column.name, value)
    return values


def _in_base_unit(column: str, value: Any) -> Any:
    """A value in seconds, in bytes, or as it stands."""
    if (scale := unit_scale(column)) is None:
        return value
    return round(value / scale) if column.endswith("_gb") else value / scale


def _environment(row: Mapping[str, Any], values: dict[str, Any]) -> Environment | None:
    """The hardware and versions of a row, as far as they decide whether results compare; None if it holds none.

    A row with GPUs of several kinds gets one kind with all their names, which no host has: it compares only with rows
    of the same kinds.
    """
    if not values.get("logical_cores"):
        return None
    name, size = row.get("gpu_name"), row.get("gpu_memory_gb")
    gpu = GpuFacts(
        index=0,
        name=name and name.removesuffix(MIG_SUFFIX),
        memory_total_bytes=None if size is None else _in_base_unit("gpu_memory_gb", size),
        mig=bool(name and name.endswith(MIG_SUFFIX)),
    )
    packages = {package: row.get(f"{package}_version") for package in ("torch", "deepspeed", "transformers")}
    return Environment(
        hostname="",
        packages={package: version for package, version in packages.items() if version},
        gpus=tuple(replace(gpu, index=index) for index in range(min(row.get("gpu_count") or 0, _MAX_GPUS))),
        **values,
    )


def _sizes_of_nodes(row: Mapping[str, Any]) -> dict[str, int]:
    """Host → bytes of ``cpu_used_gb_of_nodes``; empty where it holds something else."""
    try:
        sizes = json.loads(row.get("cpu_used_gb_of_nodes") or "{}")
        # The cell is a text to check_rows, so that anything may be in it.
        return {str(name): round(size * units.BYTES_PER_GB) for name, size in sizes.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _figures(row: Mapping[str, Any], values: dict[str, Any], costs: dict[str, Any]) -> dict[str, Any]:
    """The fields of the summary that ``summary.summarise`` computes from a record."""
    if row["accelerator"] == "cpu":  # files without the second column hold its value in the first
        over_measured = values.pop("predicted_over_measured", None)
        values.setdefault("predicted_over_ledger", over_measured)
    return {
        **values,
        "costs": StepCosts(**costs),
        "host_peak_bytes_of_nodes": _sizes_of_nodes(row),
        "phase_memory": {name: NodePhaseMemory(**each) for name, each in values.get("phase_memory", {}).items()},
        "checkpoint": {name: CheckpointCost(**each) for name, each in values.get("checkpoint", {}).items()},
        "losses": _losses(row),
        "micro_batch_size": row["batch_size"],
        "grad_accum": row["grad_accum"],
    }


def read_efficiency(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a TrialSummary that need the model's shape."""
    names = ("model_flops_per_token", "causal_flops_per_token", "hardware_flops_per_token", "model_tflops_per_gpu")
    return {name: row.get(name) for name in (*names, "mfu", "flops_convention")}


def _losses(row: Mapping[str, Any]) -> tuple[float | None, ...]:
    first, last = row.get("first_loss"), row.get("final_loss")
    if first is None and last is None:
        return ()
    steps = min(row["num_steps"] + row["warmup_steps"], _MAX_LOSSES)
    return (first, *[None] * (steps - 2), last) if steps > 1 else (first,)


def _outcome(row: Mapping[str, Any], values: dict[str, Any]) -> Outcome:
    sign, _, rest = row["status"].partition(" ")
    # A status may have two words without a sign: "OOM (host)".
    status = row["status"] if sign[:1].isalnum() else rest
    if not status or (status == SUCCESS) != row["success"]:
        raise ValueError(f"says success {str(row['success']).lower()} and status {row['status']}")
    return Outcome(status=status, **values)


def _trial(row: Mapping[str, Any], parts: Mapping[str, dict[str, Any]]) -> Trial:
    configuration = _configuration(**parts["configuration"])
    setting = _axes_setting(row["strategy"], row["stage"], row["num_gpus"])
    if setting.variables:
        configuration = replace(configuration, variables=setting.variables)
    return Trial(
        configuration=configuration,
        workload=_workload(row, setting, parts["workload"]),
        placement=_placement(row, parts["placement"]),
        ds_config=configuration.deepspeed_config,
        point=_point(row),
        **{"trial_id": f"{configuration.name}_r{row['repeat']}", **parts["trial"]},
    )


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a sweep's point. Raises ValueError for a text that holds none."""
    values = json.loads(row.get("point") or "{}")
    if not isinstance(values, dict):
        raise ValueError("has a point that is no JSON object")
    return values


@cache
def _configuration(name: str, stage: int, engine: Engine | None = None) -> Configuration:
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


def _workload(row: Mapping[str, Any], setting: Setting, values: dict[str, Any]) -> Workload:
    facts = _preset(row["model"])
    elsewhere = "factory" if ":" in row["model"] else "hub"  # or a local folder: the row does not say
    own = {
        "model_source": "preset" if facts else elsewhere,
        "model_type": facts.model_type if facts else None,
        "model_config": facts.config if facts else {},
        "batch_size": row["batch_size"],
        "grad_accum": row["grad_accum"],
        "dropout": row.get("dropout"),
    }
    # Another text than the one that is known changes nothing of how the row is compared.
    policies = {
        name: known if values.get(name) == known else "given"
        for name, known in (("batch_policy", "largest"), ("seq_policy", "longest"))
    }
    # The columns come last: the axes in a name give only what no column tells.
    return Workload(**{**setting.workload, **own, **values, **policies})


def _placement(row: Mapping[str, Any], values: dict[str, Any]) -> Placement:
    if row["accelerator"] not in ("cuda", "cpu"):
        raise ValueError(f"has the accelerator {row['accelerator']!r}, which is neither cuda nor cpu")
    return Placement(
        launcher="deepspeed" if row.get("launch") == "deepspeed" else "warm",
        gpu_memory_limit_bytes=_emulated(row),
        hosts=_hosts(row),
        **values,
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


def _rank(row: Mapping[str, Any], figures: Mapping[str, Any], values: dict[str, Any]) -> RankMeasurement:
    """One rank with the figures of the whole job. ``figures``: fields of the summary; ``values``: of the rank."""
    facts = _preset(row["model"])
    # "" and 0 stand for what no column tells; comparisons take them for unknown.
    unknown = {"device_name": row["accelerator"], "optimizer_class": "", "parameter_count": 0, "skipped_steps": 0}
    of_job = {
        name: figures.get(name) for name in (*GPU_FIELDS, "host_peak_bytes", "host_pss_bytes", "nvme_stored_bytes")
    }
    return RankMeasurement(
        rank=0,
        world_size=row["num_gpus"],
        hostname="",
        pid=0,
        torch_version="",
        deepspeed_version="",
        micro_batch_size=row["batch_size"],
        grad_accum=row["grad_accum"],
        data_parallel_size=row.get("data_parallel_size") or row["num_gpus"],
        engine_optimizer_class="",
        largest_parameter=facts.largest_parameter if facts else 0,
        resolved_config={},
        # One step of the mean duration: the mean of this window is that of the row.
        step_seconds=(figures["mean_step_seconds"],),
        warmup_step_seconds=(),
        window_seconds=figures["mean_step_seconds"],
        losses=figures["losses"],
        import_seconds=0.0,
        build_seconds=0.0,
        init_seconds=0.0,
        first_step_seconds=None,
        dropout=row.get("dropout"),
        **{**unknown, **of_job, **values},
    )
