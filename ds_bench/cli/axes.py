"""The command ``axes``: the axes of ``--axis``, with what each sets and is expected to change."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from ..config.axes import AXES, CHANGES, Axis
from ..config.axis_rows import describe_rows, describe_values, find_axis
from ..system import terminal


def list_axes(names: Sequence[str], as_json: bool) -> int:
    """Print the named axes, or all of them if none is named. Return 0. Raises UsageError for an unknown name."""
    axes = [find_axis(name) for name in names] or list(AXES.values())
    if as_json:
        terminal.print_json(json.dumps([to_dict(axis) for axis in axes], indent=2, ensure_ascii=False))
        return 0
    for group, members in groupby(axes, key=lambda axis: axis.group):
        terminal.print_text(f"{group}\n")
        for axis in members:
            _print_wrapped(f"{axis.name}: {axis.meaning}", "  ", "    ")
            for title, text in axis_description(axis).items():
                _print_wrapped(text, f"    {title:<11}", " " * 15)
            terminal.print_text("")
    return 0


def _print_wrapped(text: str, first: str, others: str) -> None:
    """Print text in lines of at most 80 columns; the first begins with ``first``, the rest with ``others``."""
    terminal.print_text(textwrap.fill(text, 80, initial_indent=first, subsequent_indent=others))


def axis_description(axis: Axis) -> dict[str, str]:
    """Return the facts about an axis by short title, without empty ones."""
    sets = [*axis.keys, *(f"the workload's {name}" for name in axis.fields)]
    facts = {
        "values": f"{describe_values(axis)} (default: {axis.default})",
        "sets": ", ".join([*sets, *(f"the variable {name}" for name in axis.variables)]),
        "applies to": describe_rows(axis),
        "requires": "; ".join(requirements(axis)),
        "changes": "; ".join(CHANGES[change] for change in axis.changes),
        "note": axis.note,
        "source": axis.source,
    }
    return {title: text for title, text in facts.items() if text}


def requirements(axis: Axis) -> list[str]:
    """Return the requirements of values other than the default."""
    needs = [f"a GPU: {axis.cuda_only}"] if axis.cuda_only else []
    for value, required in axis.requires.items():
        needs += [f"for {value}, a GPU: {required.reason}"] if required.accelerator == "cuda" else []
        needs += [f"for {value}, DeepSpeed's {op.removesuffix('Builder')} op" for op in required.ops]
        needs += [f"for {value}, {required.min_nodes} nodes or more"] if required.min_nodes > 1 else []
    return needs


def to_dict(axis: Axis) -> dict[str, Any]:
    """Convert an axis to JSON values."""
    return {
        **{name: getattr(axis, name) for name in ("name", "group", "meaning", "values")},
        "numbers": axis.numbers and asdict(axis.numbers),
        "default": axis.default,
        "sets": {"keys": axis.keys, "workload": axis.fields, "variables": axis.variables},
        **{name: getattr(axis, name) for name in ("stages", "offload", "engines")},
        "requires": requirements(axis),
        "changes": axis.changes,
        "unsupported_on_cpu": axis.cuda_only or None,
        "note": axis.note,
        "source": axis.source,
    }
