"""The command ``axes``: the axes of ``--axis``, with what each sets and is expected to change."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ..config.axes import AXES, CHANGES, Axis
from ..config.axis_rows import describe_rows, describe_values, find_axis
from ..system import terminal

_WIDTH = 80
_INDENT = 14


def list_axes(names: Sequence[str], as_json: bool) -> int:
    """Prints the axes of these names, all without names. Returns 0. Raises UsageError for an unknown name."""
    axes = [find_axis(name) for name in names] or list(AXES.values())
    if as_json:
        terminal.print_json(json.dumps([to_dict(axis) for axis in axes], indent=2, ensure_ascii=False))
        return 0
    group = None
    for axis in axes:
        if axis.group != group:
            group = axis.group
            terminal.print_text(f"{group}\n")
        for line in _lines(axis):
            terminal.print_text(line)
        terminal.print_text("")
    return 0


def _lines(axis: Axis) -> Iterator[str]:
    yield from textwrap.wrap(f"{axis.name}: {axis.meaning}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
    for title, text in described(axis).items():
        yield from textwrap.wrap(
            f"{title:<{_INDENT - 4}}{text}", _WIDTH, initial_indent="    ", subsequent_indent=" " * _INDENT
        )


def described(axis: Axis) -> dict[str, str]:
    """Returns what there is to know of an axis, by short title."""
    facts = {
        "values": f"{describe_values(axis)} (default: {axis.default})",
        "sets": ", ".join(what_it_sets(axis)),
        "acts in": describe_rows(axis),
        "requires": "; ".join(what_it_requires(axis)),
        "changes": "; ".join(CHANGES[change] for change in axis.changes),
        "note": axis.note,
        "source": axis.source,
    }
    return {title: text for title, text in facts.items() if text}


def what_it_sets(axis: Axis) -> list[str]:
    """Returns the DeepSpeed keys, fields of the workload and variables that an axis sets."""
    return [
        *axis.keys,
        *(f"the workload's {name}" for name in axis.fields),
        *(f"the variable {name}" for name in axis.variables),
    ]


def what_it_requires(axis: Axis) -> list[str]:
    """Returns what values other than the default need."""
    needs = [f"a GPU: {axis.cuda_only}"] if axis.cuda_only else []
    for value, required in axis.requires.items():
        needs += [f"{value}: DeepSpeed's {op.removesuffix('Builder')} op" for op in required.ops]
        needs += [f"{value}: {required.min_nodes} nodes or more"] if required.min_nodes > 1 else []
    return needs


def to_dict(axis: Axis) -> dict[str, Any]:
    """Converts an axis to JSON values."""
    return {
        "name": axis.name,
        "group": axis.group,
        "meaning": axis.meaning,
        "values": list(axis.values),
        "numbers": None
        if axis.numbers is None
        else {"least": axis.numbers.least, "most": axis.numbers.most, "whole": axis.numbers.whole},
        "default": axis.default,
        "sets": {"keys": list(axis.keys), "workload": list(axis.fields), "variables": list(axis.variables)},
        "stages": list(axis.stages),
        "offload": axis.offload,
        "engines": list(axis.engines),
        "requires": what_it_requires(axis),
        "changes": list(axis.changes),
        "unsupported_on_cpu": axis.cuda_only or None,
        "note": axis.note,
        "source": axis.source,
    }
