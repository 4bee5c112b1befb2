"""The NVIDIA cards of this host and their state, as NVML tells them, without a CUDA context on any of them.

Only reading: no call here changes a clock, a power limit or a mode. Whatever NVML does not tell is ``None``.

:class:`GpuQuery` is the seam. Real code passes :class:`NvmlQuery`; a test passes any object with one method::

    class OneCard:
        def read(self) -> GpuInventory:
            return GpuInventory(driver_version="580.65", gpus=(GpuFacts(index=0, name="NVIDIA H200"),))
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One card, at the moment of reading."""

    index: int
    """NVML's number: the order of the PCI bus, before ``CUDA_VISIBLE_DEVICES`` is applied."""
    name: str | None = None
    """Product name, e.g. ``NVIDIA H100 80GB HBM3``: the key of the table of peak rates."""
    uuid: str | None = None
    """``GPU-…``; names the card for good, across reboots and containers."""
    compute_capability: tuple[int, int] | None = None
    """Major and minor, e.g. (9, 0)."""
    memory_total_bytes: int | None = None
    """Memory of the whole card; ``None`` where it shares the host's."""
    memory_used_bytes: int | None = None
    """Memory in use on the whole card, by every process and the driver."""
    sm_clock_mhz: int | None = None
    """Clock of the multiprocessors at this moment; an idle card shows a low one."""
    max_sm_clock_mhz: int | None = None
    """The highest clock of the multiprocessors."""
    memory_clock_mhz: int | None = None
    """Clock of the memory at this moment."""
    temperature_celsius: int | None = None
    """Temperature of the chip."""
    power_limit_watts: float | None = None
    """The limit in force, the least of all that apply."""
    default_power_limit_watts: float | None = None
    """The limit the card is shipped with."""
    persistence_mode: bool | None = None
    """Whether the driver stays loaded when nobody uses the card; where it does not, each trial pays for loading."""
    throttle_reasons: tuple[str, ...] | None = None
    """Why the clock is below its maximum now; empty: nothing holds it. ``gpu_idle`` is no fault."""
    other_processes: tuple[tuple[int, int | None], ...] | None = None
    """Process id and bytes on the card of all but this process. In a container the ids may be the host's, or hidden."""
    mig: bool | None = None
    """Whether the card is cut into MIG instances; the figures above are then still the whole card's."""
    mig_uuids: tuple[str, ...] = ()
    """``MIG-…`` of each instance that can be seen."""

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ValueError(f"index must not be negative, not {self.index}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInventory:
    """Every card NVML shows, visible to CUDA or not."""

    driver_version: str | None = None
    """Version of the NVIDIA driver, one for the host."""
    gpus: tuple[GpuFacts, ...] = ()
    """Cards in NVML's order."""


class GpuQuery(Protocol):
    """Anything that can tell the cards of this host."""

    def read(self) -> GpuInventory:
        """The cards as they are now. Never raises: no driver means no cards."""
        ...


@dataclass(frozen=True, slots=True)
class KnownGpus:
    """GPUs that have been read already, for callers that take a :class:`GpuQuery`."""

    inventory: GpuInventory

    def read(self) -> GpuInventory:
        """The inventory; the driver is not asked again."""
        return self.inventory


class NvmlQuery:
    """Asks NVML; a host without NVIDIA's driver has no cards."""

    def __init__(self, library: Any = None) -> None:
        """``library`` stands in for the ``pynvml`` module in tests."""
        self._library = library

    def read(self) -> GpuInventory:
        """One session with the driver: every card, or none where there is no driver."""
        try:
            nvml = _pynvml() if self._library is None else self._library
            nvml.nvmlInit()
        except Exception:  # no module, no driver, a driver of another version: in each case no cards
            return GpuInventory()
        try:
            count = _ask(nvml, "nvmlDeviceGetCount") or 0
            driver = _string(_ask(nvml, "nvmlSystemGetDriverVersion"))
            return GpuInventory(driver_version=driver, gpus=tuple(_facts(nvml, index) for index in range(count)))
        finally:
            _ask(nvml, "nvmlShutdown")


def visible_gpu_count(environ: Mapping[str, str], query: GpuQuery) -> int:
    """How many cards a process started with ``environ`` would see."""
    return len(visible_indices(environ, query))


def visible_indices(environ: Mapping[str, str], query: GpuQuery) -> tuple[int, ...]:
    """NVML's indices of the cards a process started with ``environ`` would see, in its order."""
    return tuple(gpu.index for gpu in select_visible(environ, query.read().gpus))


def select_visible(environ: Mapping[str, str], gpus: tuple[GpuFacts, ...]) -> tuple[GpuFacts, ...]:
    """The cards that ``CUDA_VISIBLE_DEVICES`` leaves, read the way torch reads it, as the ranks will.

    A list ends at the first entry that names no card; an entry given twice leaves none. A number is taken as
    NVML's index: CUDA agrees if all cards are alike or ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``, for otherwise it
    puts the fastest first. CUDA gives a process one MIG instance at most, so the first one named decides.
    """
    selection = environ.get("CUDA_VISIBLE_DEVICES")
    if selection is None:
        return gpus
    if selection.startswith("MIG-"):
        return _resolved(selection.split(",")[:1], gpus)
    entries = _entries(selection)
    chosen = _resolved(entries, gpus)
    given_twice = len(set(entries)) < len(entries) or len({gpu.index for gpu in chosen}) < len(chosen)
    return () if given_twice else chosen


def _entries(selection: str) -> list[str]:
    """The entries that count: those of the first one's kind, up to the first that is of none."""
    words = selection.split(",")
    if selection.startswith("GPU-"):
        return list(takewhile(lambda word: word.startswith("GPU-"), words))
    # Only the leading digits count; "-1" or a name is where the list ends.
    numbers = takewhile(bool, (re.match(r"\s*\+?0*([0-9]+)", word) for word in words))
    return [number[1] for number in numbers if number]


def _resolved(entries: list[str], gpus: tuple[GpuFacts, ...]) -> tuple[GpuFacts, ...]:
    """The card of each entry, up to the first that names none."""
    chosen = []
    for entry in entries:
        if (gpu := _find(entry, gpus)) is None:
            break
        chosen.append(gpu)
    return tuple(chosen)


def _find(entry: str, gpus: tuple[GpuFacts, ...]) -> GpuFacts | None:
    """The one card that an index or the beginning of a UUID names; ``None`` if none does, or several."""
    # Before driver 470 a MIG instance was named by its card: MIG-GPU-<uuid of the card>/<numbers>.
    uuid = entry.removeprefix("MIG-").partition("/")[0] if entry.startswith("MIG-GPU-") else entry
    matches = [
        gpu
        for gpu in gpus
        if entry == str(gpu.index) or any(known.startswith(uuid) for known in (gpu.uuid or "", *gpu.mig_uuids))
    ]
    return matches[0] if len(matches) == 1 else None


def _pynvml() -> Any:
    import pynvml

    return pynvml


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """What one call answers, or ``None``.

    A card may lack a sensor, a driver a function, a container the permission, and each raises its own error: a
    missing fact must never stop a run.
    """
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:
        return None


def _ask_either(nvml: Any, newer: str, older: str, *arguments: Any) -> Any:
    """The newer name of a call, or the older one where driver or module do not know it."""
    answer = _ask(nvml, newer, *arguments)
    return _ask(nvml, older, *arguments) if answer is None else answer


def _facts(nvml: Any, index: int) -> GpuFacts:
    """Everything about one card; a card that does not answer still counts as one."""
    card = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
    if card is None:
        return GpuFacts(index=index)
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", card)
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", card)
    power_milliwatts = _ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", card)
    default_milliwatts = _ask(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", card)
    mig_modes = _ask(nvml, "nvmlDeviceGetMigMode", card)
    return GpuFacts(
        index=index,
        name=_string(_ask(nvml, "nvmlDeviceGetName", card)),
        uuid=_string(_ask(nvml, "nvmlDeviceGetUUID", card)),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_used_bytes=None if memory is None else int(memory.used),
        sm_clock_mhz=_ask(nvml, "nvmlDeviceGetClockInfo", card, _CLOCK_SM),
        max_sm_clock_mhz=_ask(nvml, "nvmlDeviceGetMaxClockInfo", card, _CLOCK_SM),
        memory_clock_mhz=_ask(nvml, "nvmlDeviceGetClockInfo", card, _CLOCK_MEMORY),
        temperature_celsius=_ask_either(
            nvml, "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", card, _SENSOR_CHIP
        ),
        power_limit_watts=None if power_milliwatts is None else power_milliwatts / 1000,
        default_power_limit_watts=None if default_milliwatts is None else default_milliwatts / 1000,
        persistence_mode=_flag(_ask(nvml, "nvmlDeviceGetPersistenceMode", card)),
        throttle_reasons=_throttle_reasons(nvml, card),
        other_processes=_other_processes(nvml, card),
        mig=None if mig_modes is None else bool(mig_modes[0]),
        mig_uuids=_mig_uuids(nvml, card) if mig_modes and mig_modes[0] else (),
    )


# Numbers of NVML's C interface, which stay when names come and go between versions of the module.
_CLOCK_SM, _CLOCK_MEMORY, _SENSOR_CHIP = 1, 2, 0
_THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}


_HARMLESS = frozenset({"gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting"})


def throttle_faults(gpu: GpuFacts) -> tuple[str, ...]:
    """Reasons for a clock below its maximum that are a fault; not an idle card, nor a clock that somebody set.

    ``sw_power_cap`` is how an H100 or H200 runs under load; it is a fault only where the limit was lowered.
    """
    limit, default = gpu.power_limit_watts, gpu.default_power_limit_watts
    lowered = limit is not None and default is not None and limit < default
    harmless = _HARMLESS if lowered else _HARMLESS | {"sw_power_cap"}
    return tuple(reason for reason in gpu.throttle_reasons or () if reason not in harmless)


def _throttle_reasons(nvml: Any, card: Any) -> tuple[str, ...] | None:
    bits = _ask_either(
        nvml, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons", card
    )
    if bits is None:
        return None
    present = [1 << place for place in range(int(bits).bit_length()) if bits >> place & 1]
    return tuple(_THROTTLE_REASONS.get(bit, hex(bit)) for bit in present)


def _other_processes(nvml: Any, card: Any) -> tuple[tuple[int, int | None], ...] | None:
    """Compute and graphics processes but this one; ``None`` if neither list can be read."""
    lists = [_ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", card) for kind in ("Compute", "Graphics")]
    if lists == [None, None]:
        return None
    used = {process.pid: process.usedGpuMemory for listed in lists for process in listed or ()}
    return tuple((pid, used[pid]) for pid in sorted(used) if pid != os.getpid())


def _mig_uuids(nvml: Any, card: Any) -> tuple[str, ...]:
    most = _ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", card) or 0
    instances = (_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", card, number) for number in range(most))
    uuids = (_string(_ask(nvml, "nvmlDeviceGetUUID", instance)) for instance in instances if instance is not None)
    return tuple(uuid for uuid in uuids if uuid)


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _string(value: Any) -> str | None:
    """Text from NVML, which older modules hand over as bytes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else None
