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
_GIVEN_SIZE = re.compile(r"\b(\d+)[ -]?GI?B\b", re.IGNORECASE)
_FORM = re.compile(r"\b(?:SXM\d?|PCIE|HBM\d?E?|NVL|OAM|GENERATION)\b", re.IGNORECASE)
"""What a driver adds to a card's name without telling another size."""
_MOST_GB = 10_000
_USUAL = ["A100-80GB", "H100", "H200", "L40S", "MI300X", "RTX-4090"]
"""Named where nothing is near."""


def names() -> tuple[str, ...]:
    """Every card of the table."""
    return tuple(_table())


def capacity(text: str) -> int:
    """Bytes of a card's name, or of a size such as ``80GB``, ``24GiB`` or ``79.1``, always of 2**30 bytes.

    A name may also be as nvidia-smi prints it: ``NVIDIA H100 80GB HBM3``. A size is taken as it stands: ``80GB`` is
    80 × 2**30, more than an "80 GB" card shows. Raises UsageError with the nearest names for anything else.
    """
    found = _matches(text)
    if len(found) == 1:
        return from_gb(_table()[found[0]])
    if size := _SIZE.fullmatch(text.strip()):  # after the names, of which 4090 is one
        return _sensible(text, float(size[1]))
    found = found or _begun(text)
    near = found or _near(text) or _USUAL
    raise UsageError(
        f"--gpu {text!r} {'may be ' + ' or '.join(found) if found else 'is no card known here'}",
        remedy=f"{'name one' if found else 'nearest: ' + ', '.join(near) if near != _USUAL else _known()}"
        ", or give its memory, such as --gpu 80GB",
    )


def _known() -> str:
    return f"known are {', '.join(_USUAL)} and {len(_table()) - len(_USUAL)} more"


def _sensible(text: str, size_gb: float) -> int:
    if not 0 < size_gb <= _MOST_GB:
        why = "no memory" if size_gb <= 0 else f"beyond {_MOST_GB:,} GB"
        shown = text if len(text) < 20 else f"{text[:20]}…"
        raise UsageError(f"--gpu {shown!r} is {why}", remedy="give a card or its memory, such as --gpu 80GB")
    return from_gb(size_gb)


def _matches(text: str) -> list[str]:
    """The card of that name; else without its form factor; else without its size too, where that agrees.

    Else every card that the name begins but for a size, as ``A100`` begins two.
    """
    bare = _FORM.sub(" ", text)
    named, sizes = _GIVEN_SIZE.sub(" ", bare), _GIVEN_SIZE.findall(bare)
    exact = _named(text) or _named(bare)
    if exact or not _plain(named):
        return exact
    if sizes:
        return [name for name in _named(named) if all(_agrees(_table()[name], float(size)) for size in sizes)]
    return [name for name in _table() if re.fullmatch(rf"{re.escape(_plain(named))}\d+gb", _plain(name))]


def _named(text: str) -> list[str]:
    return [name for name in _table() if _plain(name) == _plain(text)]


def _agrees(shown_gb: float, given_gb: float) -> bool:
    """A card shows a little less than the size in its name."""
    return 0.85 * given_gb <= shown_gb <= 1.02 * given_gb


def _begun(text: str) -> list[str]:
    wanted = _plain(_FORM.sub(" ", text))
    return [name for name in _table() if _plain(name).startswith(wanted)] if len(wanted) >= 4 else []


def _near(text: str) -> list[str]:
    plain = {_plain(name): name for name in _table()}
    return [plain[match] for match in get_close_matches(_plain(text), plain, n=3, cutoff=0.5)]


def _plain(text: str) -> str:
    """Without what people write differently: case, maker, spaces and dashes."""
    return re.sub(r"^(nvidia|amd|geforce|instinct|tesla|rtx)+|[^a-z0-9]", "", re.sub(r"[^a-z0-9]", "", text.casefold()))


@cache
def _table() -> dict[str, float]:
    cards = json.loads((files(__package__) / "cards.json").read_text(encoding="utf-8"))
    return {card["name"]: card["gb"] for card in cards}
