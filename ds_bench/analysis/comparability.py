"""Which trials are repeats of one row, and what forbids a ratio between two rows, by name and with both values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

from ..config.spec import Placement, Strategy, Workload
from ..records.schema import TrialRecord
from .summary import Summary

Pairs = dict[str, tuple[object, object]]
Columns = dict[str, list[Any]]

_FIELDS = {
    part: tuple(each.name for each in fields(of)) for part, of in (("workload", Workload), ("placement", Placement))
}
_SAME_AS = {"micro_batch_size": "batch_size", "grad_accum": "grad_accum", "data_parallel_size": "num_gpus"}
"""What the engine ran, and the field that explains it where that differs already."""
_parts = attrgetter("strategy", "workload", "placement", "ds_config")
_workload_values = attrgetter(*_FIELDS["workload"])
_dumps = json.JSONEncoder(sort_keys=True, default=str).encode


def row_key(record: TrialRecord) -> str:
    """The key of the trial with repeat 0: the same for every repeat of one row.

    Equals ``replace(trial, repeat=0).key`` and is several times cheaper, for results of thousands of records.
    """
    trial = record.trial
    text = (
        f'{{"ds_config": {_dumps(trial.ds_config)}, "placement": {_flat_text(trial.placement)}, "repeat": 0, '
        f'"strategy": {_flat_text(trial.strategy)}, "workload": {_workload_text(trial.workload)}}}'
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache(maxsize=1024)
def _flat_text(part: Placement | Strategy) -> str:
    return _dumps(asdict(part))


def _workload_text(workload: Workload) -> str:
    return _dumps(dict(zip(_FIELDS["workload"], _workload_values(workload), strict=True)))


def grouped(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """By key, in order of appearance: the repeats of each row.

    Trials of one configuration and workload on one placement are one row, whatever their strategies are called: it has
    the key of the first.
    Runs of one row that do not compare with each other (another card, other versions) are kept apart, the later
    ones under ``<key>-2`` and so on; a run that measured nothing stays with the first.
    """
    groups: dict[str, list[Summary]] = {}
    variants: dict[str, list[tuple[object, ...]]] = {}
    keys: dict[tuple[int, ...], str] = {}
    alike: dict[tuple[object, ...], str] = {}
    for summary in summaries:
        same = tuple(map(id, _parts(summary.record.trial)))  # of records read from one file, repeats share these
        if same not in keys:
            keys[same] = alike.setdefault(_content(summary), row_key(summary.record))
        key = keys[same]
        if summary.record.ranks:
            ran = (*_ran(summary.record), summary.flat_config_hash)
            seen = variants.setdefault(key, [])
            if ran not in seen:
                seen.append(ran)
            number = seen.index(ran) + 1
            key = key if number == 1 else f"{key}-{number}"
        groups.setdefault(key, []).append(summary)
    return groups


def _content(summary: Summary) -> tuple[object, ...]:
    """What a trial is, but for its strategy's name; with that where the configuration is not known."""
    trial, config = summary.record.trial, summary.config_hash
    told = row_key(summary.record) if config is None else config
    return told, _flat_text(trial.placement), _workload_text(trial.workload)


_OWN_BATCH = ("batch_size", "micro_batch_size")
"""May differ between rows that are each at their own largest micro-batch."""


def differences(a: TrialRecord, b: TrialRecord) -> list[str]:
    """What forbids a ratio between two rows, e.g. ``batch_size 4 against 8``; empty where nothing does.

    Rows each at their own largest micro-batch are compared at those. What only a run tells (versions, cards, the
    batch that the engine ran) is compared where both measured.
    """
    found: Pairs = {}
    for part in ("workload", "placement"):
        ours, theirs = getattr(a.trial, part), getattr(b.trial, part)
        if ours != theirs:
            found |= _unequal({name: (getattr(ours, name), getattr(theirs, name)) for name in _FIELDS[part]})
    if a.ranks and b.ranks:
        if None not in (a.ranks[0].dropout, b.ranks[0].dropout):
            found.pop("dropout", None)  # asked for or the model's own: what ran decides
        left, right = _ran(a), _ran(b)
        if left != right:
            ran = _unequal(dict(zip(_RAN, zip(left, right, strict=True), strict=True)))
            found |= {name: pair for name, pair in ran.items() if _SAME_AS.get(name, name) not in found}
    elif a.method_version != b.method_version:
        found["method_version"] = (a.method_version, b.method_version)
    if a.trial.workload.batch_policy == b.trial.workload.batch_policy == "largest":
        found = {name: pair for name, pair in found.items() if name not in _OWN_BATCH}
    return [f"{name} {_shown(ours)} against {_shown(theirs)}" for name, (ours, theirs) in found.items()]


def _unequal(pairs: Pairs) -> Pairs:
    """The pairs that differ; of two mappings only the inner ones that do, their names joined by dots."""
    found: Pairs = {}
    for name, (ours, theirs) in pairs.items():
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            inner = dict.fromkeys([*ours, *theirs])
            found |= _unequal({f"{name}.{key}": (ours.get(key), theirs.get(key)) for key in inner})
        elif ours != theirs:
            found[name] = (ours, theirs)
    return found


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


_RAN = (
    "micro_batch_size",
    "grad_accum",
    "data_parallel_size",
    "device",
    "torch",
    "deepspeed",
    "launch",
    "method_version",
    "dropout",
)
"""What decides a measurement and is known from the run alone."""


def _ran(record: TrialRecord) -> tuple[object, ...]:
    """The values of ``_RAN``."""
    rank = record.ranks[0]
    return (
        rank.micro_batch_size,
        rank.grad_accum,
        rank.data_parallel_size,
        _devices(record),
        rank.torch_version,
        rank.deepspeed_version,
        record.launch,
        record.method_version,
        rank.dropout,
    )


def _devices(record: TrialRecord) -> str:
    """``2 x NVIDIA H200``; the kinds sorted, as the order of ranks does not matter."""
    names = [rank.device_name for rank in record.ranks]
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))


_LABEL_FACTS = {
    "model": "{}",
    "batch_size": "micro-batch {}",
    "seq_length": "{} tokens",
    "grad_accum": "{} accumulated",
    "precision": "{}",
    "dropout": "dropout {}",
    "num_gpus": "{} ranks",
    "stage": "stage {}",
    "device": "{}",
    "torch": "torch {}",
    "deepspeed": "DeepSpeed {}",
}
_MOST_FACTS = 3
"""Facts that a label is lengthened by; what they do not tell apart is numbered."""


def unique_labels(records: Sequence[TrialRecord]) -> list[str]:
    """A label for every row: the strategy's, and what tells it from the others that share it."""
    labels = [record.trial.strategy.label for record in records]
    places: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    for label, shared in places.items():
        if len(shared) > 1:
            told = _told_apart([records[place] for place in shared])
            for place, facts in zip(shared, told, strict=True):
                labels[place] = f"{label} ({facts})" if facts else label
    return _numbered(labels)


def _numbered(labels: Sequence[str]) -> list[str]:
    taken: set[str] = set()
    counts: dict[str, int] = {}
    found = []
    for label in labels:
        text = label
        while text in taken:
            counts[label] = counts.get(label, 1) + 1
            text = f"{label} #{counts[label]}"
        taken.add(text)
        found.append(text)
    return found


def _told_apart(records: Sequence[TrialRecord]) -> list[str]:
    """For each record the facts in which they differ; the DeepSpeed configuration's only where no others tell."""
    told = _differing(_label_columns(records))
    if len({*zip(*(map(_shown, column) for column in told.values()), strict=True)}) < len(records):
        told |= _differing({"": [record.trial.ds_config for record in records]})
    names = list(told)[:_MOST_FACTS]
    return [", ".join(_labelled(name, told[name][place]) for name in names) for place in range(len(records))]


def _label_columns(records: Sequence[TrialRecord]) -> Columns:
    """Facts by name, a value for each record; those first that a reader looks for first."""
    trials = [record.trial for record in records]
    columns: Columns = {name: [getattr(trial.strategy, name) for trial in trials] for name in ("stage", "name")}
    for part, names in _FIELDS.items():
        columns |= {name: [getattr(getattr(trial, part), name) for trial in trials] for name in names}
    if all(record.ranks for record in records):  # else a failed row would be told apart by what is not known of it
        ran = zip(*map(_ran, records), strict=True)
        columns |= {name: list(values) for name, values in zip(_RAN, ran, strict=True) if name not in _SAME_AS}
    return {name: columns[name] for name in dict.fromkeys([*_LABEL_FACTS, *columns]) if name in columns}


def _differing(columns: Columns, prefix: str = "") -> Columns:
    """The columns whose values are not all the same; of mappings the inner ones, their names joined by dots."""
    found: Columns = {}
    for name, values in columns.items():
        if values.count(values[0]) == len(values):
            continue
        if all(isinstance(value, Mapping) for value in values):
            inner = dict.fromkeys(key for value in values for key in value)
            parts = {key: [value.get(key) for value in values] for key in inner}
            found |= _differing(parts, f"{prefix}{name}." if name else "")
        else:
            found[f"{prefix}{name}"] = values
    return found


def _labelled(name: str, value: object) -> str:
    return _LABEL_FACTS.get(name, f"{name.rpartition('.')[2]} {{}}").format(_shown(value))
