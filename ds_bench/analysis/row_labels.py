"""Makes unique labels for the rows of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .comparability import (
    REQUESTED_AS,
    differing,
    format_value,
    requested_facts,
    run_facts,
)

if TYPE_CHECKING:
    from .row import Run

_LABEL_FACTS = {
    "model": "{}",
    "batch_size": "micro-batch {}",
    "seq_length": "{} tokens",
    "grad_accum": "{} accumulated",
    "precision": "{}",
    "dropout": "dropout {}",
    "num_gpus": "{} ranks",
    "num_nodes": "{} nodes",
    "stage": "stage {}",
    "device": "{}",
    "torch": "torch {}",
    "deepspeed": "DeepSpeed {}",
}
_MOST_FACTS = 3
"""Largest number of facts in a label; labels that are still equal are numbered."""


def unique_labels(runs: Sequence[Run]) -> list[str]:
    """Returns a unique label for each row: the configuration's, with the facts in which rows of equal labels differ."""
    labels = [run.trial.configuration.label for run in runs]
    indices: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        indices.setdefault(label, []).append(index)
    for label, shared in indices.items():
        if len(shared) > 1:
            for index, facts in zip(shared, _distinguishing_facts([runs[i] for i in shared]), strict=True):
                labels[index] = f"{label} ({facts})" if facts else label
    return _number_equal_labels(labels)


def _number_equal_labels(labels: Sequence[str]) -> list[str]:
    taken: set[str] = set()
    counts: dict[str, int] = {}
    unique = []
    for label in labels:
        text = label
        # Another row may be called like that by itself.
        while text in taken:
            counts[label] = counts.get(label, 1) + 1
            text = f"{label} #{counts[label]}"
        taken.add(text)
        unique.append(text)
    return unique


def _distinguishing_facts(runs: Sequence[Run]) -> list[str]:
    """The facts in which the runs differ, as text for each; DeepSpeed settings only if no other fact differs."""
    columns = differing(_label_columns(runs))
    if len({*zip(*(map(format_value, column) for column in columns.values()), strict=True)}) < len(runs):
        columns |= differing({"": [run.trial.ds_config for run in runs]})
    names = list(columns)[:_MOST_FACTS]
    formats = {name: _LABEL_FACTS.get(name, f"{name.rpartition('.')[2]} {{}}") for name in names}
    return [
        ", ".join(formats[name].format(format_value(columns[name][index])) for name in names)
        for index in range(len(runs))
    ]


def _label_columns(runs: Sequence[Run]) -> dict[str, Sequence[Any]]:
    """Facts by name, one value per run, the best known facts first."""
    trials = [run.trial for run in runs]
    columns: dict[str, Sequence[Any]] = {
        name: [getattr(trial.configuration, name) for trial in trials] for name in ("stage", "name")
    }
    columns |= requested_facts(trials)
    if all(run.ranks for run in runs):  # a failed row would differ by facts that are not known of it
        ran = [*map(run_facts, runs)]
        columns |= {name: [facts[name] for facts in ran] for name in ran[0] if name not in REQUESTED_AS}
    return {name: columns[name] for name in dict.fromkeys([*_LABEL_FACTS, *columns]) if name in columns}
