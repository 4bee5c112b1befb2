"""The reader of NVML with a fake library: no GPU is needed."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.system.gpu_state import GpuFacts, GpuInventory, read_gpus, select_visible, throttle_faults

GB = 2**30


class NvmlError(Exception):
    """Stands for any of NVML's errors."""


class FakeNvml:
    """The calls of pynvml that are used, for ``cards`` alike; those named in ``failing`` raise."""

    def __init__(self, *, cards: int = 2, failing: frozenset[str] = frozenset(), **answers: Any) -> None:
        self.failing = failing
        self.sessions = 0
        process = SimpleNamespace
        running = [process(pid=77, usedGpuMemory=3 * GB), process(pid=os.getpid(), usedGpuMemory=1)]
        facts = {
            "Name": "NVIDIA H200", "MemoryInfo": SimpleNamespace(total=140 * GB, used=1 * GB),
            "CudaComputeCapability": (9, 0), "MaxClockInfo": 1980, "TemperatureV": 41, "EnforcedPowerLimit": 700_000,
            "PowerManagementDefaultLimit": 700_000, "PersistenceMode": 1, "CurrentClocksEventReasons": 0,
            "ComputeRunningProcesses": running, "MigMode": [0, 0],
            "GraphicsRunningProcesses": [process(pid=12, usedGpuMemory=None)],
        }  # fmt: skip
        self.answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": "580.65.06",
            "nvmlDeviceGetCount": cards,
            **{f"nvmlDeviceGet{name}": value for name, value in facts.items()},
            **answers,
        }
        self.by_arguments = {
            "nvmlInit": lambda: self._count(1),
            "nvmlShutdown": lambda: self._count(-1),
            "nvmlDeviceGetHandleByIndex": lambda index: f"card {index}",
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle[-1] * 8}",
            "nvmlDeviceGetClockInfo": lambda _, kind: {1: 345, 2: 3201}[kind],
        }

    def _count(self, change: int) -> None:
        self.sessions += change

    def __getattr__(self, name: str) -> Any:
        if name in self.failing:
            return self._fail
        if name in self.answers:
            return lambda *_: self.answers[name]
        if name in self.by_arguments:
            return self.by_arguments[name]
        raise AttributeError(name)

    def _fail(self, *_: object) -> None:
        raise NvmlError("not supported")


USED_CALLS = sorted({*FakeNvml().answers, *FakeNvml().by_arguments})


def cards(count: int, **facts: Any) -> tuple[GpuFacts, ...]:
    return tuple(GpuFacts(index=index, uuid=f"GPU-{index}abc-{index}", **facts) for index in range(count))


def visible(selection: str, gpus: tuple[GpuFacts, ...] = cards(4)) -> tuple[int, ...]:
    return tuple(gpu.index for gpu in select_visible({"CUDA_VISIBLE_DEVICES": selection}, gpus))


def test_each_fact_has_the_unit_of_its_name() -> None:
    inventory = read_gpus(FakeNvml())
    assert inventory.driver_version == "580.65.06"
    assert inventory.gpus[1] == GpuFacts(
        index=1, name="NVIDIA H200", uuid="GPU-11111111", compute_capability=(9, 0), memory_total_bytes=140 * GB,
        memory_used_bytes=1 * GB, sm_clock_mhz=345, max_sm_clock_mhz=1980, memory_clock_mhz=3201,
        temperature_celsius=41, power_limit_watts=700.0, persistence_mode=True, default_power_limit_watts=700.0,
        throttle_reasons=(), other_processes=((12, None), (77, 3 * GB)), mig=False,
    )  # fmt: skip


def test_one_failing_call_costs_only_its_own_fact() -> None:
    whole = read_gpus(FakeNvml())
    for call in USED_CALLS:
        maimed = read_gpus(FakeNvml(failing=frozenset([call])))
        if call in ("nvmlInit", "nvmlDeviceGetCount"):
            assert maimed.gpus == (), call
        elif call == "nvmlDeviceGetHandleByIndex":
            assert maimed.gpus == (GpuFacts(index=0), GpuFacts(index=1))
        else:
            pairs = [(getattr(maimed.gpus[0], name), getattr(whole.gpus[0], name)) for name in GpuFacts.__slots__]
            assert sum(ours != full for ours, full in pairs) <= 2, call


@given(st.frozensets(st.sampled_from(USED_CALLS)))
def test_no_set_of_failing_calls_makes_reading_raise_and_the_session_is_closed(failing: frozenset[str]) -> None:
    nvml = FakeNvml(failing=failing)
    assert len(read_gpus(nvml).gpus) in (0, 2)
    assert nvml.sessions == (1 if "nvmlShutdown" in failing and "nvmlInit" not in failing else 0)


def test_without_the_module_there_are_no_gpus_and_the_real_library_never_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inventory = read_gpus()
    assert [gpu.index for gpu in inventory.gpus] == list(range(len(inventory.gpus)))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus() == GpuInventory()


def test_older_drivers_and_modules_and_newer_reasons_are_read() -> None:
    newer = frozenset(["nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons"])
    older = {"nvmlDeviceGetTemperature": 55, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4}
    gpu = read_gpus(FakeNvml(failing=newer, nvmlDeviceGetName=b"Tesla V100", **older)).gpus[0]
    assert (gpu.name, gpu.temperature_celsius, gpu.throttle_reasons) == ("Tesla V100", 55, ("sw_power_cap",))
    gpu = read_gpus(FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=0x1 | 0x40 | 0x8000)).gpus[0]
    assert gpu.throttle_reasons == ("gpu_idle", "hw_thermal_slowdown", "0x8000")


def test_power_cap_is_a_fault_only_below_the_default_limit() -> None:
    facts = {"index": 0, "throttle_reasons": ("gpu_idle", "sw_power_cap", "hw_slowdown")}
    limits = {(700.0, 700.0): ("hw_slowdown",), (350.0, 700.0): ("sw_power_cap", "hw_slowdown")}
    for (limit, default), faults in limits.items():
        gpu = GpuFacts(power_limit_watts=limit, default_power_limit_watts=default, **facts)  # type: ignore[arg-type]
        assert throttle_faults(gpu) == faults


def test_mig_instances_are_listed_although_some_slots_are_empty() -> None:
    nvml = FakeNvml(cards=1, nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=3)

    def instance(_card: str, number: int) -> str:
        if number == 1:
            raise NvmlError("not found")
        return f"instance {number}"

    nvml.by_arguments["nvmlDeviceGetMigDeviceHandleByIndex"] = instance
    nvml.by_arguments["nvmlDeviceGetUUID"] = lambda handle: f"MIG-{handle[-1]}" if "instance" in handle else "GPU-1"
    gpu = read_gpus(nvml).gpus[0]
    assert (gpu.mig, gpu.mig_uuids) == (True, ("MIG-0", "MIG-2"))


def test_memory_is_what_programs_can_use_without_the_drivers_part() -> None:
    """On an H100 the first version of the call counts the driver's 0.56 GiB as total and as used."""
    total, reserved = int(79.65 * GB), int(0.56 * GB)
    second = SimpleNamespace(total=total, reserved=reserved, used=1 * GB)
    first = SimpleNamespace(total=total, used=1 * GB + reserved)
    fake = FakeNvml(cards=1)
    del fake.answers["nvmlDeviceGetMemoryInfo"]
    fake.by_arguments["nvmlDeviceGetMemoryInfo"] = lambda _, version=None: second if version == 0x02000028 else first
    (card,) = read_gpus(fake).gpus
    assert (card.memory_total_bytes, card.memory_used_bytes) == (total - reserved, 1 * GB)
    (card,) = read_gpus(FakeNvml(cards=1)).gpus
    assert card.memory_total_bytes == 140 * GB


# ------------------------------------------------------------------ CUDA_VISIBLE_DEVICES


def test_selection_is_read_as_torch_reads_it() -> None:
    assert select_visible({}, cards(3)) == cards(3)
    expected = {
        "0,2": (0, 2), "3,1": (3, 1), " 1 , 0 ": (1, 0), "+1": (1,), "007,1": (), "01": (1,), "1gpu,2ampere": (1, 2),
        "0,-1,2": (0,), "0,9,1": (0,), "0,,1": (0,), "GPU-2abc,GPU-0": (2, 0), "GPU-2abc,1": (2,), "0,GPU-2abc": (0,),
        "0," + "9" * 10_000: (0,),
        # The first entry names no GPU.
        **dict.fromkeys(("", " ", "-1", "NoDevFiles", ",0", "4", "GPU-", "GPU-zzz", "MIG-zzz", "MIG-"), ()),
        # A GPU is named twice.
        **dict.fromkeys(("0,0", "1,2,1", "1,01", "0,9,0", "GPU-1,GPU-1", "GPU-1,GPU-1abc"), ()),
    }  # fmt: skip
    assert {selection: visible(selection) for selection in expected} == expected


def test_beginning_of_a_uuid_names_one_gpu_and_only_the_first_mig_instance_counts() -> None:
    twins = (GpuFacts(index=0, uuid="GPU-ab1"), GpuFacts(index=1, uuid="GPU-ab2"))
    assert (visible("GPU-ab", twins), visible("GPU-ab2", twins)) == ((), (1,))
    divided = (
        GpuFacts(index=0, uuid="GPU-aa"),
        GpuFacts(index=1, uuid="GPU-bb", mig=True, mig_uuids=("MIG-b1", "MIG-b2")),
    )
    assert [visible(text, divided) for text in ("MIG-b2", "MIG-b2,MIG-b1", "MIG-GPU-bb/3/0")] == [(1,)] * 3
