"""Which trials are repeats of one row, and which fields forbid a ratio between two rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..config.axes import PARALLEL_AXES, workload_fields
from ..config.deepspeed_config import sequence_parallel_size, tensor_parallel_size
from ..config.spec import SAME_TRAINING_FIELDS, Trial, Workload

if TYPE_CHECKING:
    from .row import Run

Values = Mapping[str, Sequence[Any]]
"""Name of a fact → its value in each of several rows."""

REQUESTED_AS = {"micro_batch_size": "batch_size", "grad_accum": "grad_accum", "data_parallel_size": "num_gpus"}
"""Fact of the run → the requested field that explains a difference in it, so that the difference is reported once."""
_parts = attrgetter("configuration", "workload", "placement", "ds_config")


def group_repeats(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups runs by row key, in order of first appearance.

    Trials with equal DeepSpeed configuration, workload and placement are one row, whatever the name of the
    configuration; the row has the key of the first. Runs of a row that do not compare with each other (another GPU,
    other versions) are separate groups, the later ones under ``<key>-2`` and so on. A run that measured nothing is in
    the first group.
    """
    groups: dict[str, list[Run]] = {}
    variants: dict[str, list[tuple[dict[str, object], str | None]]] = {}
    keys: dict[tuple[int, ...], str] = {}
    key_of_content: dict[str, str] = {}
    for run in runs:
        part_ids = tuple(map(id, _parts(run.trial)))  # shared by repeats that were read from one file
        if part_ids not in keys:
            keys[part_ids] = key_of_content.setdefault(_content(run), run.trial.row_key)
        key = keys[part_ids]
        # A run that measured nothing has no facts to differ by.
        if _is_measured(run):
            facts = run_facts(run), run.row.config_hash
            known_variants = variants.setdefault(key, [])
            if facts not in known_variants:
                known_variants.append(facts)
            # The first kind of runs keeps the plain key.
            number = known_variants.index(facts) + 1
            key = key if number == 1 else f"{key}-{number}"
        groups.setdefault(key, []).append(run)
    return groups


def _is_measured(run: Run) -> bool:
    return run.row.avg_step_time_ms is not None


def _content(run: Run) -> str:
    """What identifies a row: not the configuration's name, unless the DeepSpeed configuration is not known."""
    trial, config = run.trial, run.row.config_hash
    # The name of a flat row may hold values of axes that no column holds.
    if config is None or run.record is None:
        return trial.row_key
    return json.dumps([config, trial.measured_facts], sort_keys=True, default=str)


_OWN_BATCH = ("batch_size", "micro_batch_size")
"""Fields that may differ between rows that are each at their own largest micro-batch."""


_BATCH_OF_FILE = ("batch_size", "grad_accum")
"""Fields that a file sets with ``--keep-batch``."""


def incomparable_fields(a: Run, b: Run) -> list[str]:
    """Returns the fields that forbid a ratio between two rows, as ``batch_size 4 against 8``; empty if there are none.

    The micro-batch may differ between rows that are each at their own largest one, the sequence between those at their
    own longest one, and so may what a row is there to show: ratios are of tokens per second. Facts known from the run
    alone (versions, GPUs, the batch that the engine ran) are compared if both rows were measured.
    """
    pairs = differing(requested_facts([a.trial, b.trial]))
    if _is_measured(a) and _is_measured(b):
        if None not in (a.row.dropout, b.row.dropout):
            pairs.pop("dropout", None)  # a requested dropout may equal the model's own: compare those that ran
        ran = differing({"": [run_facts(a), run_facts(b)]})
        pairs |= {name: pair for name, pair in ran.items() if REQUESTED_AS.get(name, name) not in pairs}
    # Where both rows were measured, run_facts has compared it.
    elif a.row.method_version != b.row.method_version:
        pairs["method_version"] = (a.row.method_version, b.row.method_version)
    # Last, as the facts of the runs differ too in what was varied.
    for name in varied_on_purpose(a.trial) | varied_on_purpose(b.trial):
        pairs.pop(name, None)
    if a.trial.workload.batch_policy == b.trial.workload.batch_policy == "largest":
        pairs = {name: pair for name, pair in pairs.items() if name not in _OWN_BATCH}
    if a.trial.workload.seq_policy == b.trial.workload.seq_policy == "longest":
        pairs.pop("seq_length", None)
    return [
        f"{name} {format_value(value_a)} against {format_value(value_b)}" for name, (value_a, value_b) in pairs.items()
    ]


def varied_on_purpose(trial: Trial) -> set[str]:
    """What a row is there to show: how a step is computed, what an axis sets, a file's batch, ranks that share data."""
    configuration, config = trial.configuration, trial.ds_config
    own_fields = {*SAME_TRAINING_FIELDS, *(_BATCH_OF_FILE if configuration.source == "file" else ())}
    computed = own_fields & configuration.workload_changes.keys()
    # Flat files do not hold the configuration.
    shares_data = max(tensor_parallel_size(config), sequence_parallel_size(config)) > 1
    shares_data |= not configuration.axis_values.keys().isdisjoint(PARALLEL_AXES)
    groups = {"data_parallel_size"} if shares_data else set[str]()
    return computed | groups | workload_fields(configuration.axis_values)


def requested_facts(trials: Sequence[Trial]) -> dict[str, Sequence[Any]]:
    """Fields of the workload and facts of the placement that decide a measurement: name → its value in each trial.

    Facts that only several nodes have are left out if one placement is of one node: ``num_nodes`` then says it.
    """
    facts = [
        {**_workload_values(each.workload), "num_nodes": each.placement.num_nodes, **each.placement.measured_facts}
        for each in trials
    ]
    return {name: [each[name] for each in facts] for name in facts[0] if all(name in each for each in facts)}


def _workload_values(workload: Workload) -> dict[str, Any]:
    return {each.name: getattr(workload, each.name) for each in fields(workload)}


def differing(facts: Values) -> dict[str, Sequence[Any]]:
    """The facts that are not equal in all rows; of mappings their inner values that are not, named by dotted paths."""
    different: dict[str, Sequence[Any]] = {}
    for name, values in facts.items():
        # No set: values may be lists and mappings.
        if values.count(values[0]) == len(values):
            continue
        if all(isinstance(value, Mapping) for value in values):
            path = f"{name}." if name else ""
            keys = dict.fromkeys(key for value in values for key in value)
            different |= differing({f"{path}{key}": [value.get(key) for value in values] for key in keys})
        else:
            different[name] = values
    return different


def format_value(value: object) -> str:
    """Formats the value of a field; ``none`` for None."""
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run_facts(run: Run) -> dict[str, object]:
    """Return the facts that decide a measurement and are known only from the run, by name."""
    row, rank = run.row, next(iter(run.ranks), None)
    return {
        "micro_batch_size": row.batch_size,
        "grad_accum": row.grad_accum,
        "data_parallel_size": row.data_parallel_size,
        "device": _devices(run),
        "torch": rank.torch_version if rank else row.torch_version,
        "deepspeed": rank.deepspeed_version if rank else row.deepspeed_version,
        "launch": row.launch,
        "method_version": row.method_version,
        "dropout": row.dropout,
        "tf32": row.precision == "fp32" and bool(rank and rank.tf32),
    }


def _devices(run: Run) -> str:
    """The GPUs of all ranks as ``2 x NVIDIA H200``, sorted, because the order of ranks does not matter."""
    names = [rank.device_name for rank in run.ranks] or [run.row.device or run.row.accelerator] * run.row.num_gpus
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
