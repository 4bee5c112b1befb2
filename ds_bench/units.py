"""Bytes, seconds and counts as text, or converted to a different unit.

GB means 2**30 bytes everywhere (README.md). A missing value is ``None`` and is shown as an em dash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from string import Formatter
from typing import Any

BYTES_PER_GB = 2**30
BYTES_PER_MB = 2**20
MISSING = "—"


def to_gb(count_bytes: float | None) -> float | None:
    """Bytes to GB (2**30), unrounded; ``None`` stays ``None``."""
    return None if count_bytes is None else count_bytes / BYTES_PER_GB


def from_gb(count_gb: float) -> int:
    """GB (2**30) to whole bytes."""
    return int(count_gb * BYTES_PER_GB)


def in_bytes(count_gb: float | None) -> float | None:
    """GB (2**30) to bytes; ``None`` stays ``None``."""
    return None if count_gb is None else count_gb * BYTES_PER_GB


def in_seconds(milliseconds: float | None) -> float | None:
    """Milliseconds to seconds; ``None`` stays ``None``."""
    return None if milliseconds is None else milliseconds / 1000.0


def to_ms(seconds: float | None) -> float | None:
    """Seconds to milliseconds, unrounded; ``None`` stays ``None``."""
    return None if seconds is None else seconds * 1000.0


def format_bytes(count_bytes: float | None) -> str:
    """``1.25 GB``, ``310 MB``, ``12.00 KB``, ``17 B``; powers of 1024."""
    if count_bytes is None:
        return MISSING
    for size, name in ((BYTES_PER_GB, "GB"), (BYTES_PER_MB, "MB"), (2**10, "KB")):
        if abs(count_bytes) >= size:
            value = count_bytes / size
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.2f} {name}"
    return f"{count_bytes:.0f} B"


def format_gigabytes(count_bytes: float) -> str:
    """Bytes in GB, whatever the size, with three significant digits and the unit."""
    return f"{format_significant(count_bytes / BYTES_PER_GB)} GB"


def format_gb(count_bytes: float | None) -> str:
    """The number of GB with two decimals and no unit, for a column headed GB."""
    return MISSING if count_bytes is None else f"{count_bytes / BYTES_PER_GB:.2f}"


def format_ms(seconds: float | None) -> str:
    """Milliseconds without the unit: one decimal from 10 up, otherwise two."""
    if seconds is None:
        return MISSING
    milliseconds = seconds * 1000.0
    return f"{milliseconds:,.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def format_duration(seconds: float | None) -> str:
    """``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds is None:
        return MISSING
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_count(count: float | None) -> str:
    """Thousands separated by commas: ``124,439,808``."""
    return MISSING if count is None else f"{count:,.0f}"


def format_rate(rate: float | None) -> str:
    """A count per second, with three significant digits below 100: ``18,220``, ``7.94``."""
    return format_count(rate) if rate is None or rate >= 100 else f"{rate:.3g}"


def format_items(count: int, noun: str) -> str:
    """``1 row``, ``3 rows``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_names(names: Iterable[object], most: int = 8, separator: str = ", ") -> str:
    """``a, b, c``; if there are more than ``most``, the first ones and how many are left: ``a, b and 4 more``."""
    shown = list(map(str, names))
    left = len(shown) - most
    return separator.join(shown[:most]) + (f" and {left} more" if left > 0 else "")


def format_series(names: Iterable[object], word: str = "or") -> str:
    """``a, b or c``; a single name as it is."""
    *others, last = map(str, names)
    return f"{', '.join(others)} {word} {last}" if others else last


def format_place(place: Sequence[str | int]) -> str:
    """Keys and list indices on the way to a value: ``ranks[0].losses[4]``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).removeprefix(".")


def format_significant(value: float | None) -> str:
    """Three significant digits, at most three decimals: ``19,100``, ``70.6``, ``4.00``, ``0.052``."""
    if value is None:
        return MISSING
    rounded = round(float(f"{value:.3g}"), 3)
    decimals = next((count for count, least in ((0, 100), (1, 10), (2, 1)) if abs(rounded) >= least), 3)
    return f"{rounded:,.{decimals}f}" if rounded else "0"


def format_with_suffix(count: float | None) -> str:
    """A count with a suffix: ``124 M``, ``6.74 B``, ``950 K``."""
    if count is None:
        return MISSING
    rounded = float(f"{count:.3g}")  # as in format_significant: 999,885,952 is 1.00 B, not 1,000 M
    for size, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if abs(rounded) >= size:
            return f"{format_significant(count / size)} {name}"
    return f"{count:.0f}"


def format_parameters(count: int, trained: int | None = None) -> str:
    """``6.74 B parameters``; if only a part is trained, ``1.10 B parameters, 0.8 % trained``."""
    text = f"{format_with_suffix(count)} parameters"
    return text if trained is None or trained == count else f"{text}, {format_trained(trained / count)} trained"


def format_trained(fraction: float) -> str:
    """A fraction as percent with two significant digits, so that a small one is not shown as 0: ``0.062 %``."""
    return f"{float(f'{fraction * 100:.2g}'):g} %"


def format_ratio(ratio: float | None) -> str:
    """``1.00x`` against a baseline."""
    return MISSING if ratio is None else f"{ratio:.2f}x"


def format_percent(fraction: float | None, *, digits: int = 1) -> str:
    """A fraction as percent: 0.123 → ``12.3 %``."""
    return MISSING if fraction is None else f"{fraction * 100:.{digits}f} %"


def format_template(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template of ``str.format`` that may name units: ``{size:bytes}``, ``{wait:ms}``, ``{share:percent0}``."""
    formats: dict[str | None, Callable[[Any], str]] = {
        "bytes": format_bytes,
        "gigabytes": format_gigabytes,
        "ms": format_ms,
    }
    text = ""
    for literal, name, unit, _ in _parsed(template):
        text += literal
        if name is None:
            continue
        if unit in formats:
            text += formats[unit](values[name])
        elif unit is not None and unit.startswith("percent"):
            text += format_percent(values[name], digits=int(unit.removeprefix("percent") or 1))
        else:
            text += format(values[name], unit or "")
    return text


@cache
def _parsed(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    return list(Formatter().parse(template))
