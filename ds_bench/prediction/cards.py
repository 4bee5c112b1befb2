"""How much memory a card gives to a program: by name, or as a size.

``cards.json`` holds what CUDA or HIP reports as the card's total (``torch.cuda.mem_get_info``) with ECC on where it is
by default, in GB of 2**30 bytes: less than the name says where the maker counts in 10**9, or where the driver and ECC
keep a share. An "80 GB" H100 shows about 79.1; drivers differ by some tenths. Not here: the cards' speed
(``devices.json``).
"""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from ..errors import UsageError
from ..units import from_gb

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:GB|GIB|G)?", re.IGNORECASE)


def names() -> tuple[str, ...]:
    """Every card of the table."""
    return tuple(_table())


def capacity(text: str) -> int:
    """Bytes of a card's name, or of a size such as ``80GB``, ``24GiB`` or ``79.1``, always of 2**30 bytes.

    A size is taken as it stands: ``80GB`` is 80 × 2**30, more than an "80 GB" card shows. Raises UsageError with the
    nearest names for anything else.
    """
    found = _matches(_plain(text))
    if len(found) == 1:
        return from_gb(_table()[found[0]])
    if size := _SIZE.fullmatch(text.strip()):  # after the names, of which 4090 is one
        return _positive(text, float(size[1]))
    near = found or _near(text)
    raise UsageError(
        f"--gpu {text!r} {'may be ' + ' or '.join(found) if found else 'is no card known here'}",
        remedy=f"{'name one' if found else 'nearest: ' + ', '.join(near) if near else 'see the table in cards.json'}"
        ", or give its memory, such as --gpu 80GB",
    )


def _positive(text: str, size_gb: float) -> int:
    if size_gb <= 0:
        raise UsageError(f"--gpu {text!r} is no memory", remedy="give a card or its memory, such as --gpu 80GB")
    return from_gb(size_gb)


def _matches(wanted: str) -> list[str]:
    """The card of that name; else every card that the name begins, as ``A100`` begins two."""
    exact = [name for name in _table() if _plain(name) == wanted or _plain(name) == f"rtx{wanted}"]
    return exact or [name for name in _table() if re.match(rf"(?:rtx)?{re.escape(wanted)}(?:\d+gb)$", _plain(name))]


def _near(text: str) -> list[str]:
    plain = {_plain(name): name for name in _table()}
    return [plain[match] for match in get_close_matches(_plain(text), plain, n=3, cutoff=0.5)]


def _plain(text: str) -> str:
    """Without what people write differently: case, maker, spaces and dashes."""
    return re.sub(r"^(nvidia|amd|geforce|instinct|tesla)+|[^a-z0-9]", "", re.sub(r"[^a-z0-9]", "", text.casefold()))


@cache
def _table() -> dict[str, float]:
    cards = json.loads((files(__package__) / "cards.json").read_text(encoding="utf-8"))
    return {card["name"]: card["gb"] for card in cards}
