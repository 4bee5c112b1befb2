"""Reads JSON as DeepSpeed does, with the place of every key in the text.

DeepSpeed reads with hjson: comments, trailing commas and text without quotes are allowed, duplicate keys are not
(``runtime/config.py``, ``runtime/config_utils.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LocatedObject(dict[str, Any]):
    """A JSON object that knows where in the text the value of each key begins."""

    offsets: dict[str, int]


class ConfigSyntaxError(Exception):
    """DeepSpeed cannot read the text; ``line`` counts from 1."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem)
        self.problem, self.line = problem, line


def parse(text: str) -> Any:
    """Return the value of a text; its objects are LocatedObjects. Raises ConfigSyntaxError."""
    import hjson
    from hjson import decoder

    def parse_object(state: Any, encoding: Any, strict: Any, scan: Callable[..., Any], *rest: Any) -> Any:
        """hjson's own, which passes the hook below the pairs of an object; each value is scanned in their order."""
        starts: list[int] = []

        def scan_noting_start(string: str, start: int) -> Any:
            starts.append(start)
            return scan(string, start)

        def located(pairs: list[tuple[str, Any]]) -> LocatedObject:
            found = LocatedObject()
            found.offsets = {}
            for (name, value), start in zip(pairs, starts, strict=True):
                if name in found:
                    raise ConfigSyntaxError(f"the key {name!r} appears twice in one block", line_at(text, start))
                found[name], found.offsets[name] = value, start
            return found

        return decoder.JSONObject(state, encoding, strict, scan_noting_start, None, located, *rest[2:])

    reader = decoder.HjsonDecoder()
    reader.parse_object = parse_object
    # After parse_object is set, since make_scanner keeps the function that it finds there.
    reader.scan_once, reader.scan_object_once = decoder.make_scanner(reader)
    try:
        return reader.decode(text)
    except hjson.HjsonDecodeError as error:
        problem = error.msg.replace(" %r", "").removesuffix(" at")
        raise ConfigSyntaxError(problem, error.lineno) from None
    except (IndexError, OverflowError, ValueError) as error:  # an open comment, 1e999, a number of thousands of digits
        raise ConfigSyntaxError(f"cannot be read: {error}", text.count("\n") + 1) from None


def line_at(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def line_of(text: str, data: Any, path: str) -> int | None:
    """Return the line of the key with this path, or of the innermost block on the way that exists; None without one."""
    line = None
    for name in path.split("."):
        if not isinstance(data, LocatedObject) or name not in data:
            break
        line, data = line_at(text, data.offsets[name]), data[name]
    return line
