"""The few SVG elements that charts are made of, escaped, and axes with round numbers. No colours: those are CSS."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

CHARACTER_WIDTH = 6.4
"""Of 12 px sans-serif, on the wide side: text that is guessed too long is cut, never overlapped."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 2", "6 2 1 2 1 2")
"""By style, as colours are (``--c0`` to ``--c7``)."""


def number(value: float) -> str:
    """A coordinate: a tenth of a pixel is enough."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def element(name: str, *content: str, **attributes: object) -> str:
    """One element. ``content`` is markup already; attributes are escaped, ``_`` is ``-``, ``None`` is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(content)}</{name}>" if content else f"<{name}{written}/>"


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else html.escape(str(value))


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """One line of text, its baseline at y."""
    return element("text", html.escape(content), x=x, y=y, **attributes)


def tooltip(content: str) -> str:
    """What a pointer resting on the parent shows."""
    return element("title", html.escape(content))


def shortened(content: str, width: float) -> str:
    """Cut to about ``width`` pixels."""
    most = max(4, int(width / CHARACTER_WIDTH))
    return content if len(content) <= most else content[: most - 1].rstrip() + "…"


def path(points: Sequence[tuple[float, float]], **attributes: object) -> str:
    """Straight lines through the points."""
    steps = " ".join(f"{'L' if index else 'M'}{number(x)} {number(y)}" for index, (x, y) in enumerate(points))
    return element("path", d=steps, **attributes)


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear, from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside [low, high], about ``count`` of them: steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """``45,000``, ``0.25``."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def marker(style: int, x: float, y: float, size: float, **attributes: object) -> str:
    """One of eight shapes by style: shapes tell rows apart where colours do not."""
    if style % 8 == 0:
        return element("circle", cx=x, cy=y, r=size, **attributes)
    corners = [(x + dx * size, y + dy * size) for dx, dy in _SHAPES[style % 8 - 1]]
    written = " ".join(f"{number(a)},{number(b)}" for a, b in corners)
    return element("polygon", points=written, **attributes)


def _regular(corners: int, turn: float = 0.0, inner: float = 1.0) -> tuple[tuple[float, float], ...]:
    """A polygon, or a star where ``inner`` is below 1; pointing up at turn 0."""
    found = []
    for index in range(corners):
        angle = math.tau * (index / corners + turn) - math.tau / 4
        radius = 1.25 * (inner if index % 2 else 1.0)
        found.append((radius * math.cos(angle), radius * math.sin(angle)))
    return tuple(found)


_SHAPES = (
    ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    _regular(3),
    _regular(4),
    _regular(3, turn=0.5),
    _regular(10, inner=0.45),
    _regular(8, turn=1 / 16, inner=0.4),
    _regular(6),
)
