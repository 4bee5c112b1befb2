"""Sweeps: several workloads in one recipe, from lists of values and the section ``sweep``.

Like the matrix of a CI system: every combination of the axes is a point, except those that an entry of ``exclude``
matches. An entry of ``include`` adds its other values to each point that matches its values on the axes; if none
does, the entry is a point of its own.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ..errors import UsageError
from ..units import format_place
from . import deepspeed_config
from .recipe import SweepSection, can_be_swept, nearest_path, validated
from .recipe_file import Data, KeyPath, RecipeText

_DEEPSPEED_LISTS = ("betas",)
"""Optimizer parameters whose values are lists."""

MAX_TRIALS = 10_000
"""Maximum number of trials unless the user confirms more."""

Point = dict[str, Any]
"""Key path of the recipe → its value at one point of the sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points of a recipe, before they are expanded."""

    base: Data
    """The values of the recipe without its lists and its section ``sweep``."""
    axes: Mapping[str, Sequence[Any]]
    """Key path → its values, in the order of the recipe; empty for a recipe of one point."""
    include: Sequence[Point]
    exclude: Sequence[Point]

    @property
    def max_points(self) -> int:
        """The maximum number of points, found without expanding them."""
        return math.prod(len(values) for values in self.axes.values()) + (len(self.include) if self.axes else 0)

    @property
    def first_point(self) -> Point:
        return {path: values[0] for path, values in self.axes.items()}

    def points(self) -> list[Point]:
        """Return the points in order, the last axis varying fastest; one empty point without axes.

        Raises UsageError if every point is excluded and nothing is included.
        """
        products = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        points = [point for point in products if not any(_matches(point, entry) for entry in self.exclude)]
        if not points and not self.include:
            raise UsageError("sweep.exclude leaves no point of the sweep", remedy="remove some of its entries")
        # As in CI systems: an entry may add values to points, but not change the axes.
        added: list[Point] = [{} for _ in points]
        others = []
        for entry in self.include:
            on_axes = {path: value for path, value in entry.items() if path in self.axes}
            matching = [number for number, point in enumerate(points) if _matches(point, on_axes)]
            for number in matching:
                added[number] |= entry
            if not matching:
                others.append(dict(entry))
        return [*(point | more for point, more in zip(points, added, strict=True)), *others]

    def data_of(self, point: Point) -> Data:
        return reduce(
            deepspeed_config.merge, (deepspeed_config.nested(path, value) for path, value in point.items()), self.base
        )


def _matches(point: Point, entry: Point) -> bool:
    return all(path in point and point[path] == value for path, value in entry.items())


def find_sweep(text: RecipeText) -> Sweep:
    """Return the sweep of a recipe. Raises UsageError for unusable axes, and for axes that contradict each other."""
    base = {section: values for section, values in copy.deepcopy(text.data).items() if section != "sweep"}
    block = text.data.get("sweep")
    if isinstance(block, dict):
        block = {name: value for name, value in block.items() if value is not None}
    section = validated(SweepSection, block or {}, text, ("sweep",))
    axes = dict(_listed_axes(text, base, ()))
    given = dict(deepspeed_config.paths_of(base))
    for path, values in section.matrix.items():
        place: KeyPath = ("sweep", "matrix", path)
        _require_swept(text, place, path)
        if path in axes or path in given:
            problem = f"{path} is given in sweep.matrix and in the section {path.partition('.')[0]}"
            raise text.error(place, problem, "keep one of them")
        axes[path] = _checked_values(text, place, values)
    for name, entries in (("include", section.include), ("exclude", section.exclude)):
        for number, entry in enumerate(entries):
            for path, wanted in entry.items():
                place = ("sweep", name, number, path)
                _require_swept(text, place, path)
                if name == "exclude" and path not in axes:
                    known = f"the axes are {', '.join(axes)}" if axes else "the recipe has no axes"
                    raise text.error(place, f"sweep.exclude names {path}, which is not an axis", known)
                if name == "exclude" and wanted not in axes[path]:
                    known = f"its values are {', '.join(map(str, axes[path]))}"
                    raise text.error(place, f"sweep.exclude: {path} has no value {wanted!r}", known)
    if section.include and not axes:
        raise text.error(("sweep", "include"), "sweep.include without any axis", "add sweep.matrix")
    return Sweep(base=base, axes=axes, include=section.include, exclude=section.exclude)


def _listed_axes(text: RecipeText, block: Data, place: KeyPath) -> Iterator[tuple[str, list[Any]]]:
    """Remove the lists of swept values from a block and its inner blocks, and yield them."""
    for key, value in list(block.items()):
        path = format_place((*place, key))
        if isinstance(value, dict):
            yield from _listed_axes(text, value, (*place, key))
        elif is_swept_list(path, value) and can_be_swept(path):
            yield path, _checked_values(text, (*place, key), block.pop(key))


def _require_swept(text: RecipeText, place: KeyPath, path: str) -> None:
    """Raise UsageError for a key path that cannot be swept."""
    if can_be_swept(path):
        return
    near = nearest_path(tuple(path.split(".")))
    is_another = near is not None and near != path and can_be_swept(near)
    remedy = f"did you mean {near}?" if is_another else "docs/recipes.md lists the values that can"
    raise text.error(place, f"{path} cannot be swept", remedy)


def _checked_values(text: RecipeText, place: KeyPath, values: list[Any]) -> list[Any]:
    """Return the values of an axis after checking them: at least one, no nested lists, no repeats."""
    name = format_place(place).removeprefix("sweep.matrix.")
    if not values:
        raise text.error(place, f"{name} has no values", "write [VALUE, …]")
    seen: list[tuple[type, Any]] = []
    for value in values:
        if isinstance(value, dict) or is_swept_list(name, value):
            what = "a block" if isinstance(value, dict) else "a list"
            raise text.error(place, f"{name} has {what} among its values", "write [VALUE, …]")
        # With its type, since 1, 1.0 and True are equal.
        if (type(value), value) in seen:
            raise text.error(place, f"{name} has {value!r} twice", "leave one out")
        seen.append((type(value), value))
    return values


def is_swept_list(path: str, value: Any) -> bool:
    """Return whether a value in a recipe is a sweep's list of values, not a single value that is a list."""
    if not isinstance(value, list) or path.startswith("configurations."):
        return False
    return path.rpartition(".")[2] not in _DEEPSPEED_LISTS or any(isinstance(item, list) for item in value)
