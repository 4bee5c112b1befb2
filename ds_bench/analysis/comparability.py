"""Groups runs into rows, finds the facts that rule out a ratio between two rows, and labels rows."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..config.axes import PARALLEL_AXES, workload_fields
from ..config.deepspeed_config import sequence_parallel_size, tensor_parallel_size
from ..config.identity import Difference, differences, facts, flatten, format_fact, row_key, work_key
from ..config.spec import SAME_TRAINING_FIELDS, Trial
from ..records.schema import TrialRecord

if TYPE_CHECKING:
    from .row import Run

REQUESTED_AS = {"micro_batch_size": "batch_size", "grad_accum": "grad_accum", "data_parallel_size": "num_gpus"}
"""Measured fact → the requested fact that explains a difference in it, so that the difference is reported once."""
_parts = attrgetter("configuration", "workload", "placement", "ds_config")


def group_repeats(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by row key, in order of first appearance.

    Trials that do the same work form one row, whatever their configuration's name; the row has the key of the first.
    Runs of a row that are not comparable (different GPUs or versions) form separate groups, the later ones under
    ``<key>-2`` and so on. A run that measured nothing is in the first group.
    """
    groups: dict[str, list[Run]] = {}
    variants: dict[str, list[tuple[dict[str, object], str | None]]] = {}
    keys: dict[tuple[int, ...], str] = {}
    key_of_work: dict[str, str] = {}
    for run in runs:
        part_ids = tuple(map(id, _parts(run.trial)))  # repeats read from one file share these objects
        if part_ids not in keys:
            work = row_key(run.trial)
            # The name of a flat row may contain axis values that no column holds, so there it counts. Elsewhere
            # neither the name nor the configuration's folders count; the hash leaves them out.
            if run.row.config_hash is not None and run.has_record:
                leave_out = ("config", "name", "engine", "repeat", "inspection")
                work = run.row.config_hash + work_key(run.trial, leave_out=leave_out)
            keys[part_ids] = key_of_work.setdefault(work, row_key(run.trial))
        key = keys[part_ids]
        # A run that measured nothing has no facts that could differ.
        if _is_measured(run):
            known = run_facts(run), run.row.config_hash
            known_variants = variants.setdefault(key, [])
            if known not in known_variants:
                known_variants.append(known)
            # The first variant keeps the plain key.
            number = known_variants.index(known) + 1
            key = key if number == 1 else f"{key}-{number}"
        groups.setdefault(key, []).append(run)
    return groups


def _is_measured(run: Run) -> bool:
    return run.row.avg_step_time_ms is not None


def incomparable_facts(a: Run, b: Run) -> list[Difference]:
    """Return the facts that rule out a ratio between two rows; empty if nothing does.

    The ratio is of tokens per second, so two rows may differ in what the comparison varies, in micro-batch if each
    uses its largest, and in sequence length if each uses its longest. Facts known only from the run (versions, GPUs,
    the engine's batch) are compared if both rows were measured.
    """
    requested = [
        facts(run.trial, leave_out=("config", "name", "engine", "variables", "repeat", "inspection")) for run in (a, b)
    ]
    # ranks_of_nodes is None on one host; num_nodes already shows that one job has several hosts and the other does not.
    if None in (each["ranks_of_nodes"] for each in requested):
        requested = [{**each, "ranks_of_nodes": None} for each in requested]
    found = {each.fact: each for each in differences(*requested)}
    if _is_measured(a) and _is_measured(b):
        if None not in (a.row.dropout, b.row.dropout):
            found.pop("dropout", None)  # a requested dropout may equal the model's own: compare the measured ones
        for each in differences(run_facts(a), run_facts(b)):
            if REQUESTED_AS.get(each.fact, each.fact) not in found:
                found[each.fact] = each
    # If both rows were measured, run_facts has compared it.
    elif a.row.method_version != b.row.method_version:
        found["method_version"] = Difference("method_version", a.row.method_version, b.row.method_version)
    # Last, because measured facts also differ in what was varied.
    allowed = may_differ(a.trial, b.trial)
    return [each for each in found.values() if each.fact not in allowed]


def may_differ(a: Trial, b: Trial) -> set[str]:
    """Return the facts that may differ between comparable rows: what the comparison varies, and a size found by search.

    A comparison may vary how a step is computed, what an axis sets, a file's own batch, or how many ranks share data.
    """
    names = set[str]()
    for trial in (a, b):
        configuration, config = trial.configuration, trial.ds_config
        own_fields = {*SAME_TRAINING_FIELDS, *(("batch_size", "grad_accum") if configuration.source == "file" else ())}
        names |= own_fields & configuration.workload_changes.keys()
        names |= workload_fields(configuration.axis_values)
        if trial.workload.script is not None:
            names |= {"micro_batch_size", "grad_accum"}
        # Flat files lack the DeepSpeed configuration, so the axes are read too.
        shares_data = max(tensor_parallel_size(config), sequence_parallel_size(config)) > 1
        if shares_data or not configuration.axis_values.keys().isdisjoint(PARALLEL_AXES):
            names.add("data_parallel_size")
    if a.workload.batch_policy == b.workload.batch_policy == "largest":
        names |= {"batch_size", "micro_batch_size"}
    if a.workload.seq_policy == b.workload.seq_policy == "longest":
        names.add("seq_length")
    return names


def run_facts(run: Run) -> dict[str, Any]:
    """Return, by name, the facts that affect a measurement and that only the run shows."""
    row, ranks = run.row, run.stored.ranks if isinstance(run.stored, TrialRecord) else ()
    names = [each.device_name for each in ranks] or [row.device or row.accelerator] * row.num_gpus
    rank = next(iter(ranks), None)
    return {
        "micro_batch_size": row.batch_size,
        "grad_accum": row.grad_accum,
        "data_parallel_size": row.data_parallel_size,
        # Sorted, because the order of ranks does not matter.
        "device": ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))),
        "torch": rank.torch_version if rank else row.torch_version,
        "deepspeed": rank.deepspeed_version if rank else row.deepspeed_version,
        "launch": row.launch,
        "method_version": row.method_version,
        "dropout": row.dropout,
        "tf32": row.precision == "fp32" and bool(rank and rank.tf32),
    }


# ------------------------------------------------------------------ labels

_LABEL_FACTS = {
    "model": "{}",
    "batch_size": "micro-batch {}",
    "seq_length": "{} tokens",
    "grad_accum": "accumulation {}",
    "precision": "{}",
    "dropout": "dropout {}",
    "num_gpus": "{} ranks",
    "num_nodes": "{} nodes",
    "stage": "stage {}",
    "device": "{}",
    "torch": "torch {}",
    "deepspeed": "DeepSpeed {}",
}
_MAX_FACTS = 3
"""Labels that are still equal with this many facts are numbered."""


def unique_labels(runs: Sequence[Run]) -> list[str]:
    """Return a unique label for each row: the configuration's, with facts that distinguish rows with equal labels."""
    labels = [run.trial.configuration.label for run in runs]
    indices: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        indices.setdefault(label, []).append(index)
    for label, shared in indices.items():
        if len(shared) > 1:
            for index, known in zip(shared, _distinguishing_facts([runs[i] for i in shared]), strict=True):
                labels[index] = f"{label} ({known})" if known else label
    unique: list[str] = []
    for label in labels:
        text, number = label, 1
        # Another row may have this label already.
        while text in unique:
            number += 1
            text = f"{label} #{number}"
        unique.append(text)
    return unique


def _distinguishing_facts(runs: Sequence[Run]) -> list[str]:
    """Return a label that distinguishes each run, with DeepSpeed settings only if the other facts do not suffice."""
    measured = all(run.row.device for run in runs)  # a failed row lacks the facts of a run
    known = []
    for run in runs:
        requested = facts(run.trial, leave_out=("config", "name", "repeat", "inspection"))
        ran = {name: value for name, value in run_facts(run).items() if name not in REQUESTED_AS} if measured else {}
        names = {"stage": run.trial.configuration.stage, "name": run.trial.configuration.name}
        known.append({**names, **flatten(requested), **ran})
    columns = _differing_columns(known)
    if len({*zip(*(map(format_fact, column) for column in columns.values()), strict=True)}) < len(runs):
        columns |= _differing_columns([flatten(run.trial.ds_config) for run in runs])
    shown = sorted(columns, key=lambda name: [*_LABEL_FACTS, name].index(name))[:_MAX_FACTS]
    formats = {name: _LABEL_FACTS.get(name, f"{name.rpartition('.')[2]} {{}}") for name in shown}
    return [
        ", ".join(formats[name].format(format_fact(columns[name][index])) for name in shown)
        for index in range(len(runs))
    ]


def _differing_columns(known: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the facts that differ between rows: name → the value in each row."""
    columns = {
        name: [each.get(name) for each in known] for name in dict.fromkeys(name for each in known for name in each)
    }
    return {name: column for name, column in columns.items() if column.count(column[0]) < len(column)}
