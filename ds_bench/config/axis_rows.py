"""Reads axis values from text and makes rows from them, one for each distinct combination.

Axes change what the strategy or file sets; ``--ds-config`` and ``--set`` come last. It is an error if an axis and a
flag set the same key.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from ..errors import UsageError
from ..system import invocation
from ..units import format_series
from .axes import AXES, Axis, NotForThisRowError, RowFacts, Setting, Value
from .deepspeed_config import merge, nested, paths_of
from .spec import Requirements

MAX_ROWS = 64
"""Maximum number of rows that axes may make. Recipes are limited by ``sweep.MAX_TRIALS``."""
# float() would also accept nan, inf and 1_000.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
# For remedies only: other spellings of a switch are rejected.
_TRUTHS = {"on": "true", "yes": "true", "1": "true", "off": "false", "no": "false", "0": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisValue:
    """One value of an axis in a row."""

    axis_name: str
    text: str
    """As the user gave it."""
    value: Value

    @property
    def axis(self) -> Axis:
        return AXES[self.axis_name]

    @property
    def label(self) -> str:
        """Short text for tables: ``overlap_comm off``."""
        shown = {"true": "on", "false": "off"}.get(self.text, self.text)
        return f"{self.axis.title} {shown}"

    def __str__(self) -> str:
        return f"{self.axis_name}={self.text}"


AxisValues = tuple[AxisValue, ...]


def read_axes(texts: Sequence[str]) -> tuple[AxisValues, ...]:
    """Read the values of ``--axis``, each ``NAME=V1,V2…``, in order. Raises UsageError."""
    axes: dict[str, AxisValues] = {}
    for text in texts:
        name, separator, values = (part.strip() for part in text.partition("="))
        if not separator or not values:
            raise UsageError(f"axis {text!r} is not NAME=V1,V2,…", remedy="for example, --axis overlap_comm=true,false")
        if name in axes:
            raise UsageError(f"axis {name} is given twice", remedy="give all its values together")
        axes[name] = read_values(name, [value.strip() for value in values.split(",")])
    return tuple(axes.values())


def read_values(name: str, texts: Sequence[str]) -> AxisValues:
    """Read the values of one axis; a value given twice counts once. Raises UsageError."""
    axis = find_axis(name)
    if not texts:
        raise UsageError(f"axis {name} has no value", remedy=f"give {describe_values(axis)}")
    values: dict[Value, AxisValue] = {}
    for text in texts:
        value = _read_value(axis, text)
        # Row names join values with plus signs, so 1e+8 is written 1e8.
        spelling = text.lower() if isinstance(value, bool) else text.replace("+", "")
        values.setdefault(value, AxisValue(axis_name=axis.name, text=spelling, value=value))
    return tuple(values.values())


def find_axis(name: str) -> Axis:
    """Return the axis of that name. Raises UsageError for an unknown name, with the nearest known one."""
    if name in AXES:
        return AXES[name]
    # Users know DeepSpeed's keys: stage3_prefetch_bucket_size.
    by_spelling = {key.rpartition(".")[2]: axis.name for axis in AXES.values() for key in axis.keys if key != "bf16"}
    by_spelling |= {axis: axis for axis in AXES}
    near = difflib.get_close_matches(name, by_spelling, n=1)
    remedy = f"did you mean {by_spelling[near[0]]!r}?" if near else f"list them with {invocation.command('axes')}"
    raise UsageError(f"Unknown axis {name!r}", remedy=remedy)


def _read_value(axis: Axis, text: str) -> Value:
    if axis.switch and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in axis.values:
        return text
    if axis.numbers is not None and _NUMBER.fullmatch(text):
        number, bounds = float(text), axis.numbers
        if not bounds.least <= number <= bounds.most or (bounds.whole and number != math.floor(number)):
            raise UsageError(f"axis {axis.name}: {text} is out of range", remedy=f"give {describe_values(axis)}")
        return int(number) if bounds.whole else number
    near = [_TRUTHS[text.lower()]] if axis.switch and text.lower() in _TRUTHS else []
    near += difflib.get_close_matches(text.lower(), axis.values, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"give {describe_values(axis)}"
    raise UsageError(f"axis {axis.name}: {text!r} is not one of its values", remedy=remedy)


def describe_values(axis: Axis) -> str:
    """Describe the values of an axis: ``true or false``; ``a whole number from 1 to 1e13, or auto``."""
    parts = []
    if axis.numbers is not None:
        kind = "a whole number" if axis.numbers.whole else "a number"
        parts.append(f"{kind} from {_bound(axis.numbers.least)} to {_bound(axis.numbers.most)}")
    if axis.values:
        parts.append(format_series(axis.values))
    return ", or ".join(parts)


def acts(axis: Axis, row: RowFacts) -> bool:
    """Return whether an axis changes anything in rows made from this one."""
    optimizer, param = row.offload_optimizer, row.offload_param
    needed = {"optimizer": optimizer, "optimizer or parameters": optimizer or param, "nvme": optimizer == "nvme"}
    offloads = axis.offload is None or needed[axis.offload]
    return bool(offloads) and row.stage in axis.stages and row.engine in axis.engines


def _bound(limit: float) -> str:
    return f"{limit:,.0f}" if limit < 1e10 else f"{limit:.0e}".replace("+", "")


def describe_rows(axis: Axis) -> str:
    """Describe the rows to which an axis applies: ``rows of stage 3 that offload the optimizer``."""
    parts = []
    if axis.stages != (0, 1, 2, 3):
        parts.append(f"of stage{'s' if len(axis.stages) > 1 else ''} {format_series(axis.stages, 'and')}")
    if axis.offload is not None:
        parts.append(
            "that offload the optimizer to NVMe" if axis.offload == "nvme" else f"that offload the {axis.offload}"
        )
    if axis.engines == ("deepspeed",) and not parts:
        return "DeepSpeed rows"
    return " ".join(["rows", *parts]) if parts else "all rows"


def combinations(selected: Sequence[AxisValues], row: RowFacts) -> list[AxisValues]:
    """Return the combinations of values of the axes that apply to a row; one empty combination if none applies.

    ``selected``: the values of each axis.
    """
    return list(itertools.product(*(values for values in selected if acts(values[0].axis, row))))


def idle_axis_notes(selected: Sequence[AxisValues], rows: Mapping[str, RowFacts]) -> list[str]:
    """Return a note for each axis that does not apply to some rows. ``rows``: by label.

    Raises UsageError for an axis that applies to no row.
    """
    notes = []
    for values in selected:
        axis = values[0].axis
        idle = [label for label, row in rows.items() if not acts(axis, row)]
        if len(idle) == len(rows):
            problem = f"axis {axis.name} applies only to {describe_rows(axis)}, and no such row is compared"
            raise UsageError(problem, remedy="leave it out, or compare such a row")
        if idle:
            notes.append(f"{axis.name} applies only to {describe_rows(axis)}: not varied in {', '.join(idle)}")
    return notes


def require_few(count: int) -> None:
    """Raise UsageError for too many rows."""
    if count > MAX_ROWS:
        problem = f"the axes make {count} rows; the limit is {MAX_ROWS}"
        raise UsageError(problem, remedy="give fewer values, fewer axes or fewer strategies")


def row_name(base: str, values: AxisValues) -> str:
    """Return the name of a row: ``zero2+overlap_comm=false``."""
    return "+".join([base, *map(str, values)])


def row_label(base: str, values: AxisValues) -> str:
    """Return the short text of a row for tables: ``ZeRO-2, overlap_comm off``."""
    return ", ".join([base, *(value.label for value in values)])


def split_name(name: str) -> tuple[str, AxisValues]:
    """Invert :func:`row_name`. A name without axes is returned unchanged, with no values."""
    base, *parts = name.split("+")
    try:
        return base, tuple(read_values(axis, [value])[0] for axis, _, value in (part.partition("=") for part in parts))
    except UsageError:
        return name, ()


def setting_of(values: AxisValues, facts: RowFacts) -> Setting:
    """Return all that the values set in a row. Raises UsageError if one cannot be set or two contradict each other.

    They are applied in the order of ``AXES``, since ZenFlow's intervals depend on the accumulation.
    """
    total = Setting()
    setters: list[tuple[str, Any, AxisValue]] = []
    for value in sorted(values, key=lambda each: list(AXES).index(each.axis_name)):
        setting = _setting(value, replace(facts, grad_accum=total.workload.get("grad_accum", facts.grad_accum)))
        others = {"workload": setting.workload, "variable": setting.variables}
        for path, set_to in paths_of({**setting.config, **{kind: each for kind, each in others.items() if each}}):
            for other_path, other_set_to, other in setters:
                agree = other is value or (path, set_to) == (other_path, other_set_to)
                if not agree and _overlap(path, other_path):
                    problem = f"axes {other} and {value} contradict each other"
                    raise UsageError(problem, remedy=f"both set {path}")
            setters.append((path, set_to, value))
        first, second = total.requires, setting.requires
        total = Setting(
            # merge keeps None, which removes a key from the row's configuration later; overlay would drop it.
            config=merge(total.config, setting.config),
            workload={**total.workload, **setting.workload},
            variables={**total.variables, **setting.variables},
            requires=Requirements(
                ops=tuple(dict.fromkeys((*first.ops, *second.ops))),
                accelerator=first.accelerator or second.accelerator,
                min_ranks=max(first.min_ranks, second.min_ranks),
                min_nodes=max(first.min_nodes, second.min_nodes),
                reason=first.reason or second.reason,
            ),
        )
    return total


def _setting(value: AxisValue, facts: RowFacts) -> Setting:
    """Return what one value sets and requires."""
    axis = value.axis
    try:
        if axis.compute is not None:
            setting = axis.compute(value.value, facts)
        elif isinstance(value.value, str) and value.value in axis.settings:
            setting = axis.settings[value.value]
        else:
            # Keys of an offload block are set only in rows that have it: get() returns "" for names of other blocks,
            # and None for a block that the row lacks.
            blocks = {"offload_optimizer": facts.offload_optimizer, "offload_param": facts.offload_param}
            keys = [path for path in axis.keys if all(blocks.get(name, "") is not None for name in path.split("."))]
            setting = Setting(
                config=reduce(merge, (nested(path, value.value) for path in keys), {}),
                workload=dict.fromkeys(axis.fields, value.value),
                variables=dict.fromkeys(axis.variables, value.text),
            )
    except NotForThisRowError as error:
        raise UsageError(f"axis {value} {error}", remedy="leave this value out") from None
    requires = axis.requires.get(value.text, setting.requires)
    if axis.cuda_only and value.text != axis.default:
        requires = replace(requires, accelerator="cuda", reason=axis.cuda_only)
    return replace(setting, requires=requires)


def _overlap(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


def require_no_override(selected: Sequence[AxisValues], other: str, changes: Mapping[str, Any]) -> None:
    """Raise UsageError if an axis and ``changes`` set the same key. ``other``: name of the source of ``changes``."""
    changed = [path for path, _ in paths_of(changes)]
    for values in selected:
        axis = values[0].axis
        path = next((path for path in changed for key in axis.keys if _overlap(path, key)), None)
        if path is not None:
            raise UsageError(f"axis {axis.name} and {other} both set {path}", remedy="leave one of them out")
