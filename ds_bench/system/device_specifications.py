"""Memory and peak rates of accelerators, by the name of the device.

``device_specifications.json`` has three facts per device. ``compute_capability``: for NVIDIA's devices only
(developer.nvidia.com/cuda-gpus).
``memory_gb``: the device's total as CUDA or HIP reports it (``torch.cuda.mem_get_info``), with ECC on if that is the
default, in GB of 2**30 bytes, by the name that a user gives. It is less than the name says if the manufacturer counts
in 10**9, or driver and ECC take some: an "80 GB" H100 shows about 79.1, and drivers differ by a few tenths.
``*_tflops``: dense rates in 10**12 FLOP/s, without 2:4 sparsity, accumulating in fp32; null if the device has no such
units or the rate is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import UsageError
from ..units import format_series, from_gb

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:GB|GIB|G)?", re.IGNORECASE)
_SIZE_IN_NAME = re.compile(r"\b(\d+)[ -]?G(?:I?B)?\b", re.IGNORECASE)
_MEMORY_TYPE = re.compile(r"\bHBM\d?E?\b", re.IGNORECASE)
_FORM = re.compile(r"\b(?:SXM\d?(?: AC)?|PCIE|NVL|OAM|GENERATION)\b", re.IGNORECASE)
"""Form factor and product line, which a driver adds to a device's name."""
_MAX_GB = 10_000
_EXAMPLES = ["A100-80GB", "H100", "H200", "L40S", "MI300X", "RTX-4090"]
"""Named in the error message if no name is similar."""


def names() -> tuple[str, ...]:
    """Return the names of all devices whose memory is known."""
    return tuple(_memory_gb())


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense peak of one device in 10**12 FLOP/s, given its name as NVML or torch reports it.

    ``precision``: bf16, fp16, fp32 or tf32. None for a device that is not in the table, or has no such units (bf16 on
    a V100). A part of a device (MIG, vGPU) and a relative of one (Laptop, Ti, D) count as different devices.
    """
    devices = {row["name"]: row for row in _table()}
    matching = matching_names(device_name, devices)
    return devices[matching[0]][f"{precision}_tflops"] if matching else None


def compute_capability(text: str) -> tuple[int, int] | None:
    """Return the capability of the NVIDIA device that a user's or driver's name refers to; None for anything else."""
    rows = {name: row for row in _table() for name in (row["name"], *row.get("memory_gb", {}))}
    for name in (*matching_names(text, rows), *_devices_with_memory(text)):
        if "compute_capability" in rows[name]:
            major, minor = rows[name]["compute_capability"]
            return major, minor
    return None


def is_size(text: str) -> bool:
    """Return whether a text is a size and not the name of a device."""
    return not _devices_with_memory(text) and _SIZE.fullmatch(text.strip()) is not None


def matching_names(text: str, names: Iterable[str]) -> list[str]:
    """Return the ``names`` that ``text`` refers to: literally, or without what a driver adds to a device's name.

    Form factor and memory type are left out first, then the size, then size and memory type, then all three. So
    "H100 PCIe 80GB" is the "H100 PCIe" if that exists, and never a different device whose name begins the same way.
    """
    without_size = _SIZE_IN_NAME.sub(" ", text)
    without_type = _MEMORY_TYPE.sub(" ", without_size)
    for variant in (text, _without_form(text), without_size, without_type, _FORM.sub(" ", without_type)):
        if matching := [name for name in names if _normalize(name) == _normalize(variant)]:
            return matching
    return []


def _without_form(text: str) -> str:
    return _FORM.sub(" ", _MEMORY_TYPE.sub(" ", text))


def memory_bytes(text: str) -> int:
    """Return the memory in bytes for a GPU's name or for a size in GB: ``80GB``, ``24GiB`` or ``79.1``.

    A name may also be one that nvidia-smi prints: ``NVIDIA H100 80GB HBM3``. A size is taken literally: ``80GB`` is
    80 × 2**30, more than an "80 GB" GPU shows. Raises UsageError with the most similar names for anything else.
    """
    matching = _devices_with_memory(text)
    if len(matching) == 1:
        return from_gb(_memory_gb()[matching[0]])
    if size := _SIZE.fullmatch(text.strip()):  # after the names, as 4090 is one of them
        size_gb = float(size[1])
        if 0 < size_gb <= _MAX_GB:
            return from_gb(size_gb)
        why = "not a positive size" if size_gb <= 0 else f"more than {_MAX_GB:,} GB"
        shown = text if len(text) < 20 else f"{text[:20]}…"
        raise UsageError(f"--gpu {shown!r} is {why}", remedy="give a card or its memory, such as --gpu 80GB")
    prefix = _normalize(_without_form(text))
    matching = matching or [name for name in names() if len(prefix) >= 4 and _normalize(name).startswith(prefix)]
    names_by_spelling = {_normalize(name): name for name in names()}
    from difflib import get_close_matches

    near = [names_by_spelling[each] for each in get_close_matches(_normalize(text), names_by_spelling, n=3, cutoff=0.5)]
    if matching:
        problem, remedy = f"may be {' or '.join(matching)}", "name one"
    else:
        problem = "is not a known GPU"
        known = f"known GPUs are {', '.join(_EXAMPLES)} and {len(names()) - len(_EXAMPLES)} more."
        remedy = f"did you mean {format_series(near)}?" if near else known
        remedy += " Or give its memory: --gpu 80GB"
    raise UsageError(f"--gpu {text!r} {problem}", remedy=remedy)


def _devices_with_memory(text: str) -> list[str]:
    """Names of devices with known memory that ``text`` refers to; a size in it must agree with the device's memory.

    If no name matches, every name that is ``text`` followed by a size: ``A100`` fits two.
    """
    memory, sizes = _memory_gb(), _SIZE_IN_NAME.findall(_without_form(text))
    matching = matching_names(text, memory)
    if matching or sizes:
        # A device shows a little less memory than the size in its name.
        return [name for name in matching if all(0.85 * int(gb) <= memory[name] <= 1.02 * int(gb) for gb in sizes)]
    prefix = _normalize(_without_form(text))
    return [name for name in memory if prefix and re.fullmatch(rf"{re.escape(prefix)}\d+gb", _normalize(name))]


def _normalize(text: str) -> str:
    """The name without what people write differently: case, manufacturer, spaces and dashes."""
    return re.sub(r"^(nvidia|amd|geforce|instinct|tesla|rtx)+|[^a-z0-9]", "", re.sub(r"[^a-z0-9]", "", text.casefold()))


@cache
def _memory_gb() -> dict[str, float]:
    return {name: size for row in _table() for name, size in row.get("memory_gb", {}).items()}


@cache
def _table() -> list[dict[str, Any]]:
    import json

    rows: list[dict[str, Any]] = json.loads(
        (files(__package__) / "device_specifications.json").read_text(encoding="utf-8")
    )
    return rows
