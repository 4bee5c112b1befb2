"""From plain JSON values to our frozen dataclasses, checked against the dataclasses' own annotations.

For files that somebody may have edited: a wrong type is found here, with its place, and not three modules later.
What a value means is not known here, beyond what ``__post_init__`` of its class asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from operator import itemgetter
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

LARGEST = 1e60
"""No figure of ours is near it, and the product of any four is still a float."""
DEEPEST = 64
"""Levels of objects and lists below a field of free form (a DeepSpeed configuration has six)."""
_MOST_REMEMBERED = 1024
_NUMBERS = frozenset((int, float))
_NAMES: dict[type, str] = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false",
    NoneType: "null", list: "a list", dict: "an object",
}  # fmt: skip

T = TypeVar("T")
Check = Callable[[Any], Any]
"""Takes a JSON value to what the field holds. Raises ShapeError."""


class ShapeError(ValueError):
    """A value has another shape than its field; ``str()`` names the place and the reason."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place} {reason}".strip())
        self.reason, self.place = reason, place

    def inside(self, outer: str) -> ShapeError:
        """The same, seen from one level further out."""
        joint = "" if not self.place or self.place.startswith("[") else "."
        return ShapeError(self.reason, f"{outer}{joint}{self.place}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is left to do with objects that have the same keys and the same types of values."""

    numbers: Callable[[Mapping[str, Any]], Any] | None
    deep: tuple[tuple[str, Check], ...]
    known: tuple[str, ...] | None
    """The keys to take where there are others besides; None where all are taken."""


class Builder:
    """Makes dataclasses of objects; values of ``shared`` fields are checked and made once per object, not per row."""

    def __init__(self, shared: Sequence[str] = ()) -> None:
        self._shared = frozenset(shared)
        self.ignored: dict[str, None] = {}
        """``Class.key`` of every key that no field has, in order."""
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._made: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._checks: dict[type, dict[str, tuple[frozenset[type], Check | None]]] = {}

    def build(self, kind: type[T], value: Any) -> T:
        """A ``kind`` from a JSON object. Raises ShapeError."""
        if type(value) is not dict:
            raise ShapeError(f"is {_described(value)}, not an object")
        signature = (kind, tuple(value), tuple(map(type, value.values())))
        plan = self._plans.get(signature)
        if plan is None:
            plan = self._plan(kind, value)
            _forget_when_full(self._plans)
            self._plans[signature] = plan
        if plan.numbers is not None and _immense(plan.numbers(value)):
            raise _too_large(value)
        values = dict(value) if plan.known is None else {name: value[name] for name in plan.known}
        for name, check in plan.deep:
            try:
                values[name] = check(value[name])
            except ShapeError as error:
                raise error.inside(name) from None
        try:
            return kind(**values)
        except (ValueError, TypeError) as error:
            raise ShapeError(f"is not usable: {error}") from None

    def _plan(self, kind: type, value: Mapping[str, Any]) -> _Plan:
        checks = self._checks_of(kind)
        for name in _required(kind):
            if name not in value:
                raise ShapeError("is missing", name)
        known = tuple(name for name in value if name in checks)
        self.ignored |= dict.fromkeys(f"{kind.__name__}.{name}" for name in value if name not in checks)
        numbers, deep = [], []
        for name in known:
            allowed, check = checks[name]
            found = type(value[name])
            if found not in allowed:
                raise ShapeError(f"is {_described(value[name])}, not {_listed(allowed)}", name)
            if check is not None and found is not NoneType:
                deep.append((name, check))
            elif found in _NUMBERS:
                numbers.append(name)
        return _Plan(numbers=_getter(numbers), deep=tuple(deep), known=None if len(known) == len(value) else known)

    def _checks_of(self, kind: type) -> dict[str, tuple[frozenset[type], Check | None]]:
        if kind not in self._checks:
            self._checks[kind] = {name: self._check_of(name, hint) for name, hint in _hints(kind).items()}
        return self._checks[kind]

    def _check_of(self, name: str, hint: Any) -> tuple[frozenset[type], Check | None]:
        allowed, check = self._check(hint)
        return allowed, check if check is None or name not in self._shared else self._once(name, check)

    def _check(self, hint: Any) -> tuple[frozenset[type], Check | None]:
        """The JSON types that an annotation allows, and what remains to be looked at where types do not tell."""
        origin, arguments = get_origin(hint), get_args(hint)
        if hint is Any:
            return frozenset(_NAMES), _free
        if is_dataclass(hint) and isinstance(hint, type):
            made: type = hint
            return frozenset((dict,)), lambda value: self.build(made, value)
        if origin is Literal:
            return frozenset(map(type, arguments)), _one_of(arguments)
        if origin in (Union, UnionType):
            parts = [self._check(part) for part in arguments]
            checks = [check for _, check in parts if check is not None]
            return frozenset().union(*(allowed for allowed, _ in parts)), checks[0] if checks else None
        if origin is tuple:
            repeated = arguments[1:] == (Ellipsis,)
            items = [self._check(part) for part in (arguments[:1] if repeated else arguments)]
            return frozenset((list,)), _series(*items[0]) if repeated else _fixed(items)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            if arguments[1] is Any:
                return frozenset((dict,)), _free
            return frozenset((dict,)), _table(*self._check(arguments[1]))
        return (_NUMBERS if hint is float else frozenset((hint,))), None

    def _once(self, name: str, check: Check) -> Check:
        """Remembers by identity: the parser hands out one object for equal texts. Holding it keeps its id its own."""

        def remembered(value: Any) -> Any:
            entry = self._made.get((name, id(value)))
            if entry is None:
                _forget_when_full(self._made)
                entry = self._made[name, id(value)] = value, check(value)
            return entry[1]

        return remembered


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


@cache
def _required(kind: type) -> tuple[str, ...]:
    return tuple(entry.name for entry in fields(kind) if entry.default is MISSING and entry.default_factory is MISSING)


def _forget_when_full(memory: dict[Any, Any]) -> None:
    if len(memory) >= _MOST_REMEMBERED:
        memory.clear()


def _getter(names: list[str]) -> Callable[[Mapping[str, Any]], Any] | None:
    """The values of those names as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return (lambda value: (value[names[0]],)) if names else None


def _free(value: Any, depth: int = 0) -> Any:
    """Any JSON value of bounded depth and numbers, as it is."""
    if depth > DEEPEST:
        raise ShapeError("is nested too deeply")
    if type(value) is dict:
        for name, item in value.items():
            if type(item) in _LOOKED_INTO:
                _within(name, item, depth)
    elif type(value) is list:
        for index, item in enumerate(value):
            if type(item) in _LOOKED_INTO:
                _within(f"[{index}]", item, depth)
    elif type(value) in _NUMBERS and not -LARGEST <= value <= LARGEST:
        raise ShapeError("is a number beyond all measure")
    return value


_LOOKED_INTO = frozenset((dict, list, int, float))


def _within(place: str, value: Any, depth: int) -> None:
    try:
        _free(value, depth + 1)
    except ShapeError as error:
        raise error.inside(place) from None


def _one_of(allowed: tuple[Any, ...]) -> Check:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise ShapeError(f"is {_described(value)}, not one of {', '.join(map(str, allowed))}")
        return value

    return check


def _item(allowed: frozenset[type], check: Check | None, place: str, value: Any) -> Any:
    if type(value) not in allowed:
        raise ShapeError(f"is {_described(value)}, not {_listed(allowed)}", place)
    if type(value) in _NUMBERS and not -LARGEST <= value <= LARGEST:
        raise ShapeError("is a number beyond all measure", place)
    if check is None or value is None:
        return value
    try:
        return check(value)
    except ShapeError as error:
        raise error.inside(place) from None


def _series(allowed: frozenset[type], check: Check | None) -> Check:
    """A list of any length as a tuple."""

    def checked(value: list[Any]) -> tuple[Any, ...]:
        found = set(map(type, value))
        if check is not None or not found <= allowed:
            return tuple([_item(allowed, check, f"[{index}]", item) for index, item in enumerate(value)])
        if not _bounded(found, value):
            raise _too_large(dict(enumerate(value)))
        return tuple(value)

    return checked


def _fixed(items: list[tuple[frozenset[type], Check | None]]) -> Check:
    """A list of that many values as a tuple."""

    def checked(value: list[Any]) -> tuple[Any, ...]:
        if len(value) != len(items):
            raise ShapeError(f"has {len(value)} values, not {len(items)}")
        return tuple(_item(*kind, f"[{index}]", item) for index, (kind, item) in enumerate(zip(items, value)))  # noqa: B905

    return checked


def _table(allowed: frozenset[type], check: Check | None) -> Check:
    """An object with values of one kind."""

    def checked(value: dict[str, Any]) -> dict[str, Any]:
        found = set(map(type, value.values()))
        if check is not None or not found <= allowed:
            return {name: _item(allowed, check, name, item) for name, item in value.items()}
        if not _bounded(found, value.values()):
            raise _too_large(value)
        return value

    return checked


def _bounded(found: set[type], values: Collection[Any]) -> bool:
    """Whether none of the numbers is beyond all measure. ``found``: the types among the values."""
    numbers = values if found <= _NUMBERS else [value for value in values if type(value) in _NUMBERS]
    return not numbers or not _immense(numbers)


def _immense(numbers: Iterable[float]) -> bool:
    """Whether one of them is beyond all measure. Their norm is no less than the largest, and one call for all."""
    try:
        return not math.hypot(*numbers) <= LARGEST
    except OverflowError:
        return True


def _too_large(values: Mapping[Any, Any]) -> ShapeError:
    name, _ = max(values.items(), key=lambda item: abs(item[1]) if type(item[1]) in _NUMBERS else -1)
    return ShapeError("is a number beyond all measure", name if isinstance(name, str) else f"[{name}]")


def _described(value: Any) -> str:
    if type(value) in (str, int, float):
        text = repr(value) if not isinstance(value, int) or abs(value) < LARGEST else "a huge number"
        return text if len(text) <= 40 else f"{text[:36]} …"
    return {True: "true", False: "false"}[value] if type(value) is bool else _NAMES[type(value)]


def _listed(allowed: frozenset[type]) -> str:
    kinds = [kind for kind in _NAMES if kind in allowed and not (kind is int and float in allowed)]
    return " or ".join(_NAMES[kind] for kind in kinds)
