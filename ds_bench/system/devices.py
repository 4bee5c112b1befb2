"""Memory and peak rates of accelerators, by the name of the device.

``devices.json`` holds two facts. ``memory_gb``: what CUDA or HIP reports as the device's total
(``torch.cuda.mem_get_info``) with ECC on where it is by default, in GB of 2**30 bytes, by the name a user gives. It is
less than the name says where the maker counts in 10**9, or where the driver and ECC keep a share: an "80 GB" H100
shows about 79.1, and drivers differ by some tenths. ``*_tflops``: dense rates in 10**12 FLOP/s, without 2:4 sparsity,
accumulating in fp32; null where the device has no such units or the rate is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import UsageError
from ..units import from_gb

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:GB|GIB|G)?", re.IGNORECASE)
_GIVEN_SIZE = re.compile(r"\b(\d+)[ -]?G(?:I?B)?\b", re.IGNORECASE)
_MEMORY_TYPE = re.compile(r"\bHBM\d?E?\b", re.IGNORECASE)
_FORM = re.compile(r"\b(?:SXM\d?|PCIE|NVL|OAM|GENERATION)\b", re.IGNORECASE)
"""Form factor and line, which a driver adds to a device's name."""
_MOST_GB = 10_000
_USUAL = ["A100-80GB", "H100", "H200", "L40S", "MI300X", "RTX-4090"]
"""Named in the error message where no name is near."""


def names() -> tuple[str, ...]:
    """Every device whose memory is known."""
    return tuple(_memory_gb())


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense peak of one device in 10**12 FLOP/s, for the name as NVML or torch reports it.

    ``precision``: bf16, fp16, fp32 or tf32. None for a device that is not in the table, or without such units (bf16 on
    a V100). A part of a device (MIG, vGPU) and a relative of one (Laptop, Ti, D) are other devices.
    """
    devices = {row["name"]: row for row in _table()}
    matching = matching_names(device_name, devices)
    return devices[matching[0]][f"{precision}_tflops"] if matching else None


def matching_names(text: str, names: Iterable[str]) -> list[str]:
    """Of ``names`` those that ``text`` means: as it stands, else without what a driver adds to a device's name.

    Left out are first form factor and memory type, then the size, then size and memory type, then all three. So
    "H100 PCIe 80GB" is the "H100 PCIe" where there is one, and never another device that its name begins.
    """
    bare = _GIVEN_SIZE.sub(" ", text)
    without_type = _MEMORY_TYPE.sub(" ", bare)
    for variant in (text, _without_form(text), bare, without_type, _FORM.sub(" ", without_type)):
        if matching := [name for name in names if _plain(name) == _plain(variant)]:
            return matching
    return []


def _without_form(text: str) -> str:
    return _FORM.sub(" ", _MEMORY_TYPE.sub(" ", text))


def memory_bytes(text: str) -> int:
    """Bytes of a card's name, or of a size such as ``80GB``, ``24GiB`` or ``79.1``, always of 2**30 bytes.

    A name may also be as nvidia-smi prints it: ``NVIDIA H100 80GB HBM3``. A size is taken as it stands: ``80GB`` is
    80 × 2**30, more than an "80 GB" card shows. Raises UsageError with the nearest names for anything else.
    """
    matching = _devices_of(text)
    if len(matching) == 1:
        return from_gb(_memory_gb()[matching[0]])
    if size := _SIZE.fullmatch(text.strip()):  # after the names, of which 4090 is one
        return _checked_size(text, float(size[1]))
    begun = _plain(_without_form(text))
    matching = matching or [name for name in names() if len(begun) >= 4 and _plain(name).startswith(begun)]
    plain_names = {_plain(name): name for name in names()}
    from difflib import get_close_matches

    near = [plain_names[each] for each in get_close_matches(_plain(text), plain_names, n=3, cutoff=0.5)]
    if matching:
        problem, remedy = f"may be {' or '.join(matching)}", "name one"
    else:
        problem = "is no card known here"
        known = f"known are {', '.join(_USUAL)} and {len(names()) - len(_USUAL)} more"
        remedy = f"nearest: {', '.join(near)}" if near else known
    raise UsageError(f"--gpu {text!r} {problem}", remedy=f"{remedy}, or give its memory, such as --gpu 80GB")


def _checked_size(text: str, size_gb: float) -> int:
    if not 0 < size_gb <= _MOST_GB:
        why = "no memory" if size_gb <= 0 else f"beyond {_MOST_GB:,} GB"
        shown = text if len(text) < 20 else f"{text[:20]}…"
        raise UsageError(f"--gpu {shown!r} is {why}", remedy="give a card or its memory, such as --gpu 80GB")
    return from_gb(size_gb)


def _devices_of(text: str) -> list[str]:
    """Names of devices with known memory that ``text`` means; a size in it must agree with the device's memory.

    If there is none, every name that ``text`` begins and a size completes: ``A100`` begins two.
    """
    memory, sizes = _memory_gb(), _GIVEN_SIZE.findall(_without_form(text))
    matching = matching_names(text, memory)
    if matching or sizes:
        # A device shows a little less memory than the size in its name.
        return [name for name in matching if all(0.85 * int(gb) <= memory[name] <= 1.02 * int(gb) for gb in sizes)]
    begun = _plain(_without_form(text))
    return [name for name in memory if begun and re.fullmatch(rf"{re.escape(begun)}\d+gb", _plain(name))]


def _plain(text: str) -> str:
    """Without what people write differently: case, maker, spaces and dashes."""
    return re.sub(r"^(nvidia|amd|geforce|instinct|tesla|rtx)+|[^a-z0-9]", "", re.sub(r"[^a-z0-9]", "", text.casefold()))


@cache
def _memory_gb() -> dict[str, float]:
    return {name: size for row in _table() for name, size in row.get("memory_gb", {}).items()}


@cache
def _table() -> list[dict[str, Any]]:
    import json

    rows: list[dict[str, Any]] = json.loads((files(__package__) / "devices.json").read_text(encoding="utf-8"))
    return rows
