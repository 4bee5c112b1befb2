"""Identifies the work of a trial, and lists how the facts of two trials differ.

``work_key`` answers every question of the form "is this the same work?": resuming matches trials by it, a comparison
pools repeats by it, and results are merged by it. Its callers differ only in the facts that they leave out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ..system.redaction import redacted_config
from .deepspeed_config import paths_of
from .spec import SAME_TRAINING_FIELDS, Placement, Trial, Workload

Role = Literal["work", "computation", "window", "policy", "place", "cosmetic", "config", "name", "repeat", "inspection"]
"""``work``: what is trained and measured. ``computation``: how a step is computed, which a row may vary on purpose.
``window``: how many steps run. ``policy``: how a micro-batch or sequence length was chosen. ``place``: where the trial
runs. ``cosmetic``: no influence on the measurement."""

_ROLES: Mapping[str, Role] = {
    **dict.fromkeys(SAME_TRAINING_FIELDS, "computation"),
    "num_steps": "window",
    "warmup_steps": "window",
    "batch_policy": "policy",
    "seq_policy": "policy",
    "launcher": "place",
    "nvme_path": "place",
    "supported_precisions": "place",
    # What counts is how many hosts there are and how many ranks each has, not their names or where the ranks meet.
    "hostfile": "cosmetic",
    "hosts": "cosmetic",
    "include": "cosmetic",
    "master_addr": "cosmetic",
    "master_port": "cosmetic",
    "host_command": "cosmetic",
    "forwarded_variables": "cosmetic",
    # The device's name and the supported precisions cover it.
    "compute_capability": "cosmetic",
    "ds_config": "config",
    "settings": "config",
    "configuration": "name",
    "repeat": "repeat",
    "inspection": "inspection",
}
"""Role of each fact; a field that is not listed is part of the work."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact with different values in two trials or runs."""

    fact: str
    """Name of a field or key; inside a mapping, its dotted path."""
    a: Any
    b: Any

    @property
    def field(self) -> str:
        """The first part of the path."""
        return self.fact.partition(".")[0]

    @property
    def text(self) -> str:
        return f"{self.fact} {format_fact(self.a)} vs {format_fact(self.b)}"


def format_fact(value: object) -> str:
    """Format a value: ``unset``, ``true``, ``4``, ``2, 2``."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def role_of(fact: str) -> Role:
    """Return the role of a fact, by its name in ``facts``."""
    return _ROLES.get(fact, "work")


def facts(trial: Trial, *, leave_out: Collection[Role | str] = ()) -> dict[str, Any]:
    """Return the requested facts, by name. ``leave_out``: roles and names of facts to leave out."""
    requested = {
        **{each.name: getattr(trial.workload, each.name) for each in fields(Workload)},
        "script": None if trial.workload.script is None else asdict(trial.workload.script),
        **placement_facts(trial.placement),
        "engine": trial.configuration.engine,
        "variables": dict(trial.configuration.variables),
        "settings": trial.common_settings,
        "configuration": trial.configuration.name,
        "ds_config": trial.ds_config,
        "repeat": trial.repeat,
        # A checkpoint on a different disk does not make the trial a different one.
        "inspection": {**asdict(trial.inspection), "checkpoint_path": None},
    }
    return {
        name: value for name, value in requested.items() if role_of(name) not in leave_out and name not in leave_out
    }


def placement_facts(placement: Placement) -> dict[str, Any]:
    """Return the facts of a placement that are not cosmetic; for several hosts, the number of ranks on each."""
    values = {each.name: getattr(placement, each.name) for each in fields(Placement)}
    nodes = sorted((slots for _, slots in placement.hosts), reverse=True)
    return {
        **{name: value for name, value in values.items() if role_of(name) != "cosmetic"},
        "num_nodes": placement.num_nodes,
        "ranks_of_nodes": nodes if placement.num_nodes > 1 else None,
    }


def work_key(trial: Trial, *, leave_out: Collection[Role | str] = ()) -> str:
    """Return a hash of the facts, equal for trials that do the same work. Credentials are not part of it.

    ``leave_out``: roles and names of facts that may differ.
    """
    known = facts(trial, leave_out=leave_out)
    if "ds_config" in known:
        known["ds_config"] = redacted_config(known["ds_config"])
    text = json.dumps(known, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def row_key(trial: Trial) -> str:
    """Return the key shared by all repeats of a row, whatever is inspected in them."""
    return work_key(trial, leave_out=("repeat", "inspection"))


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by dotted path, with tuples as lists and without empty mappings."""
    flat = {path: list(value) if isinstance(value, tuple) else value for path, value in paths_of(values)}
    return {path: value for path, value in flat.items() if not isinstance(value, Mapping)}


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return the facts that differ, nested ones by their paths; a missing fact counts as None."""
    left, right = flatten(a), flatten(b)
    pairs = [(name, left.get(name), right.get(name)) for name in dict.fromkeys([*left, *right])]
    return [Difference(name, *values) for name, *values in pairs if values[0] != values[1]]
