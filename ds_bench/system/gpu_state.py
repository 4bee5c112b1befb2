"""The NVIDIA GPUs of this host: their state, read from NVML without a CUDA context.

No call here changes a clock, a power limit or a mode. A fact that NVML does not give is ``None``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU at the moment of reading."""

    index: int
    """NVML's number: the order of the PCI bus, before ``CUDA_VISIBLE_DEVICES`` is applied."""
    name: str | None = None
    """Product name, e.g. ``NVIDIA H100 80GB HBM3``; peak rates are looked up by it."""
    uuid: str | None = None
    """``GPU-…``; the same across reboots and in containers."""
    compute_capability: tuple[int, int] | None = None
    """Major and minor, e.g. (9, 0)."""
    memory_total_bytes: int | None = None
    """Memory of the whole GPU without what the driver reserves; ``None`` if it shares the host's."""
    memory_used_bytes: int | None = None
    """Memory in use on the whole GPU, by every process."""
    sm_clock_mhz: int | None = None
    """Clock of the multiprocessors at this moment; low on an idle GPU."""
    max_sm_clock_mhz: int | None = None
    """The highest clock of the multiprocessors."""
    memory_clock_mhz: int | None = None
    temperature_celsius: int | None = None
    energy_joules: float | None = None
    """Energy used since the driver was loaded; None before Volta and on some GeForce cards."""
    power_limit_watts: float | None = None
    """The limit in force, the lowest of all that apply."""
    default_power_limit_watts: float | None = None
    """The limit set by the manufacturer."""
    persistence_mode: bool | None = None
    """Whether the driver stays loaded when no process uses the GPU. If not, each cold start loads it again."""
    throttle_reasons: tuple[str, ...] | None = None
    """Why the clock is below its maximum now; empty if nothing lowers it. ``gpu_idle`` is not a fault."""
    other_processes: tuple[tuple[int, int | None], ...] | None = None
    """Process id and bytes on the GPU of all but this process. In a container the ids may be the host's, or hidden."""
    mig: bool | None = None
    """Whether the GPU is divided into MIG instances. The other figures are the whole GPU's either way."""
    mig_uuids: tuple[str, ...] = ()
    """``MIG-…`` of each visible instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInventory:
    """Every GPU that NVML shows, visible to CUDA or not."""

    driver_version: str | None = None
    """Version of the NVIDIA driver, one for the host."""
    gpus: tuple[GpuFacts, ...] = ()
    """GPUs in NVML's order."""


def read_gpus(library: Any = None) -> GpuInventory:
    """Read every GPU from NVML, the library of NVIDIA's driver. Never raises: without a driver the list is empty.

    ``library``: replaces the ``pynvml`` module in tests.
    """
    try:
        if library is None:
            import pynvml

            library = pynvml
        library.nvmlInit()
    except Exception:  # no module, no driver, or a mismatched driver: in each case no GPUs
        return GpuInventory()
    try:
        count = _call(library, "nvmlDeviceGetCount") or 0
        driver = _call(library, "nvmlSystemGetDriverVersion")
        return GpuInventory(driver_version=driver, gpus=tuple(_read_gpu(library, index) for index in range(count)))
    finally:
        _call(library, "nvmlShutdown")


def select_visible(environ: Mapping[str, str], gpus: tuple[GpuFacts, ...]) -> tuple[GpuFacts, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible, read the way torch reads it, as the ranks will.

    A list ends at the first entry that names no GPU; naming a GPU twice leaves none. A number is NVML's index: CUDA
    agrees if all GPUs are alike or ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``; otherwise it puts the fastest first. CUDA
    gives a process at most one MIG instance, so only the first entry counts if it names one.
    """
    selection = environ.get("CUDA_VISIBLE_DEVICES")
    if selection is None:
        return gpus
    entries = selection.split(",")
    # The entries of the same kind as the first, up to the first of a different kind.
    if selection.startswith("MIG-"):
        entries = entries[:1]
    elif selection.startswith("GPU-"):
        entries = list(takewhile(lambda entry: entry.startswith("GPU-"), entries))
    else:  # only leading digits count; "-1" or a name ends the list
        numbers = takewhile(bool, (re.match(r"\s*\+?0*([0-9]+)", entry) for entry in entries))
        entries = [number[1] for number in numbers if number]
    named: list[GpuFacts] = []
    for entry in entries:
        # The beginning of a UUID is enough if no other begins with it.
        matches = [
            gpu
            for gpu in gpus
            if entry == str(gpu.index) or any(known.startswith(entry) for known in (gpu.uuid or "", *gpu.mig_uuids))
        ]
        if len(matches) != 1:
            break
        named += matches
    named_twice = len(set(entries)) < len(entries) or len({gpu.index for gpu in named}) < len(named)
    return () if named_twice else tuple(named)


def _call(nvml: Any, function: str, *arguments: Any) -> Any:
    """The result of one call, or ``None`` if it fails.

    A GPU may lack a sensor, a driver a function, a container the permission, and each raises its own error: a
    missing fact must never stop a run.
    """
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:
        return None


# Numbers from NVML's C interface. They are stable, whereas the module's names for them differ between versions.
_CLOCK_SM, _CLOCK_MEMORY, _SENSOR_CHIP = 1, 2, 0
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2: the version, and 40 bytes
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
_HARMLESS_REASONS = frozenset({"gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting"})


def _read_gpu(nvml: Any, index: int) -> GpuFacts:
    """All facts about one GPU. A GPU without any is still counted."""
    handle = _call(nvml, "nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return GpuFacts(index=index)

    def get(name: str, *arguments: Any) -> Any:
        return _call(nvml, f"nvmlDeviceGet{name}", handle, *arguments)

    # The first version of this call includes what the driver reserves in both total and used.
    memory = get("MemoryInfo", _MEMORY_V2)
    capability, mig_modes = get("CudaComputeCapability"), get("MigMode")
    energy_millijoules = get("TotalEnergyConsumption")
    limit_milliwatts, default_milliwatts = get("EnforcedPowerLimit"), get("PowerManagementDefaultLimit")
    persistence_mode = get("PersistenceMode")
    lists = [get("ComputeRunningProcesses"), get("GraphicsRunningProcesses")]
    used_bytes = {process.pid: process.usedGpuMemory for processes in lists for process in processes or ()}
    mig_count = (get("MaxMigDeviceCount") or 0) if mig_modes and mig_modes[0] else 0
    instances = [get("MigDeviceHandleByIndex", number) for number in range(mig_count)]
    mig_uuids = [_call(nvml, "nvmlDeviceGetUUID", instance) for instance in instances if instance is not None]
    throttle_bits = get("CurrentClocksEventReasons")
    return GpuFacts(
        index=index,
        name=get("Name"),
        uuid=get("UUID"),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        memory_total_bytes=None if memory is None else int(memory.total) - int(memory.reserved),
        memory_used_bytes=None if memory is None else int(memory.used),
        sm_clock_mhz=get("ClockInfo", _CLOCK_SM),
        max_sm_clock_mhz=get("MaxClockInfo", _CLOCK_SM),
        memory_clock_mhz=get("ClockInfo", _CLOCK_MEMORY),
        temperature_celsius=get("Temperature", _SENSOR_CHIP),
        energy_joules=None if energy_millijoules is None else energy_millijoules / 1000,
        power_limit_watts=None if limit_milliwatts is None else limit_milliwatts / 1000,
        default_power_limit_watts=None if default_milliwatts is None else default_milliwatts / 1000,
        persistence_mode=None if persistence_mode is None else bool(persistence_mode),
        throttle_reasons=None
        if throttle_bits is None
        else tuple(
            _THROTTLE_REASONS.get(1 << place, hex(1 << place))
            for place in range(throttle_bits.bit_length())
            if throttle_bits >> place & 1
        ),
        other_processes=None
        if lists == [None, None]
        else tuple((pid, used_bytes[pid]) for pid in sorted(used_bytes) if pid != os.getpid()),
        mig=None if mig_modes is None else bool(mig_modes[0]),
        mig_uuids=tuple(filter(None, mig_uuids)),
    )


def throttle_faults(gpu: GpuFacts) -> tuple[str, ...]:
    """Return the faults among the reasons for a low clock, without idleness and clocks that a user has set.

    An H100 or H200 runs with ``sw_power_cap`` under load: it is a fault only if the power limit was lowered.
    """
    limit, default = gpu.power_limit_watts, gpu.default_power_limit_watts
    lowered = limit is not None and default is not None and limit < default
    harmless = _HARMLESS_REASONS if lowered else _HARMLESS_REASONS | {"sw_power_cap"}
    return tuple(reason for reason in gpu.throttle_reasons or () if reason not in harmless)
