"""The reader of NVML with a fake library (no GPU is needed) and the selection of GPUs."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.system.gpu_state import (
    GpuFacts,
    GpuInventory,
    read_gpus,
    select_visible,
    throttle_faults,
)
from tests.support.nvml_replay import MACHINES, NvmlReplay
from tests.support.real_trials import ROOT

GB = 2**30
RESERVED = GB // 2


class FakeNvml:
    """The calls of pynvml that are used, for ``cards`` alike; those named in ``failing`` raise."""

    def __init__(self, *, cards: int = 2, failing: frozenset[str] = frozenset(), **answers: Any) -> None:
        self.failing = failing
        self.sessions = 0
        process = SimpleNamespace
        running = [process(pid=77, usedGpuMemory=3 * GB), process(pid=os.getpid(), usedGpuMemory=1)]
        facts = {
            "Name": "NVIDIA H200", "CudaComputeCapability": (9, 0), "MaxClockInfo": 1980, "Temperature": 41,
            "PowerUsage": 310_500, "TotalEnergyConsumption": 7_000_250,
            "EnforcedPowerLimit": 700_000, "PowerManagementDefaultLimit": 800_000, "PersistenceMode": 1,
            "CurrentClocksEventReasons": 0x1 | 0x40 | 0x8000, "ComputeRunningProcesses": running, "MigMode": [0, 0],
            "GraphicsRunningProcesses": [process(pid=12, usedGpuMemory=None)],
            # The second version of the structure leaves out what the driver reserves.
            "MemoryInfo": SimpleNamespace(total=140 * GB, reserved=RESERVED, used=1 * GB),
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
            "nvmlDeviceGetUUID": lambda handle: f"{'MIG' if 'instance' in handle else 'GPU'}-{handle[-1]}",
            "nvmlDeviceGetClockInfo": lambda _, kind: {1: 345, 2: 3201}[kind],
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda _, number: [f"instance {each}" for each in range(2)][number],
        }

    def _count(self, change: int) -> None:
        self.sessions += change

    def __getattr__(self, name: str) -> Any:
        if name in self.failing:
            return self._fail
        return self.by_arguments[name] if name in self.by_arguments else lambda *_: self.answers[name]

    def _fail(self, *_: object) -> None:
        raise RuntimeError("not supported")


CALLS = sorted({*FakeNvml().answers, *FakeNvml().by_arguments})


def test_each_fact_has_the_unit_of_its_name() -> None:
    inventory = read_gpus(FakeNvml())
    assert inventory.driver_version == "580.65.06"
    assert inventory.gpus[1] == GpuFacts(
        index=1, name="NVIDIA H200", uuid="GPU-1", compute_capability=(9, 0),
        memory_total_bytes=140 * GB - RESERVED, memory_used_bytes=1 * GB, sm_clock_mhz=345, max_sm_clock_mhz=1980,
        memory_clock_mhz=3201, temperature_celsius=41, energy_joules=7000.25,
        power_limit_watts=700.0, default_power_limit_watts=800.0,
        persistence_mode=True, throttle_reasons=("gpu_idle", "hw_thermal_slowdown", "0x8000"),
        other_processes=((12, None), (77, 3 * GB)), mig=False,
    )  # fmt: skip
    empty_slot = FakeNvml(nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=3)
    assert [(gpu.mig, gpu.mig_uuids) for gpu in read_gpus(empty_slot).gpus] == [(True, ("MIG-0", "MIG-1"))] * 2


@given(st.sampled_from(CALLS), st.frozensets(st.sampled_from(CALLS)))
def test_failing_call_costs_only_its_own_fact_and_the_session_is_closed(call: str, more: frozenset[str]) -> None:
    for failing in (frozenset([call]), more | {call}):
        nvml = FakeNvml(failing=failing)
        assert len(read_gpus(nvml).gpus) == (0 if failing & {"nvmlInit", "nvmlDeviceGetCount"} else 2)
        assert nvml.sessions == (1 if "nvmlShutdown" in failing and "nvmlInit" not in failing else 0)
    cards = read_gpus(FakeNvml(failing=frozenset([call]))).gpus
    if cards and call != "nvmlDeviceGetHandleByIndex":
        whole = read_gpus(FakeNvml()).gpus[0]
        lost = [name for name in GpuFacts.__slots__ if getattr(cards[0], name) != getattr(whole, name)]
        assert len(lost) <= 2, lost


RECORDED: dict[str, dict[str, Any]] = {
    # The driver keeps 479 of 81,559 MiB.
    "h100": {"memory_total_bytes": 81_080 * 2**20, "memory_used_bytes": 19_818 * 2**20, "sm_clock_mhz": 1980,
             "power_limit_watts": 700.0, "throttle_reasons": (), "temperature_celsius": 59, "mig": False,
             "other_processes": ((11327, 2566 * 2**20), (11328, 1542 * 2**20), (11345, 15690 * 2**20))},
    "h200": {"memory_total_bytes": 143_157 * 2**20, "memory_clock_mhz": 3201, "compute_capability": (9, 0)},
    "a100_mig": {"memory_total_bytes": 81_051 * 2**20, "mig": True, "persistence_mode": False,
                 "mig_uuids": ("MIG-0-0", "MIG-0-1", "MIG-0-2", "MIG-0-3"), "default_power_limit_watts": 500.0},
    # On GeForce cards MIG is N/A; Chrome is in both lists of processes.
    "rtx4090": {"memory_total_bytes": 24_210 * 2**20, "mig": None, "throttle_reasons": ("gpu_idle",),
                "other_processes": tuple((pid, mib * 2**20)
                                         for pid, mib in ((1180, 290), (1424, 110), (3132, 64), (12636, 60)))},
    "wsl2": {"memory_total_bytes": 7948 * 2**20, "memory_used_bytes": 0, "other_processes": (), "mig": None,
             "power_limit_watts": 61.24, "max_sm_clock_mhz": 3105},
}  # fmt: skip


class WithHandles(NvmlReplay):
    """A recorded machine whose handles say nothing, like the pointers of the real library."""

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)

        def with_handles(*arguments: Any) -> Any:
            answer = call(*(getattr(each, "text", each) for each in arguments))
            return SimpleNamespace(text=answer) if name.endswith("HandleByIndex") else answer

        return with_handles


def test_recorded_machines_are_read_and_recorded_again_as_they_were(subtests: pytest.Subtests) -> None:
    spec = importlib.util.spec_from_file_location("gpu_probe", ROOT / "scripts" / "gpu_probe.py")
    assert spec is not None
    assert spec.loader is not None
    probe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(probe)
    assert sorted(RECORDED) == list(MACHINES)
    for machine, expected in RECORDED.items():
        with subtests.test(machine):
            (gpu,) = read_gpus(NvmlReplay(machine)).gpus
            assert {name: getattr(gpu, name) for name in expected} == expected
            replay = WithHandles(machine)
            again = probe.record_nvml(replay)["calls"]
            assert {text: again.get(text) for text in replay.calls} == replay.calls
            assert all("error" in again[text] for text in again.keys() - replay.calls)
            functions = {text.partition("(")[0] for text in again.keys() - replay.calls}
            assert functions == {each for each in replay.unknown if " (" not in each}


def test_without_the_module_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    inventory = read_gpus()  # the real library, with a driver or without
    assert [gpu.index for gpu in inventory.gpus] == list(range(len(inventory.gpus)))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus() == GpuInventory()


def test_power_cap_is_a_fault_only_below_the_default_limit() -> None:
    facts = {"index": 0, "throttle_reasons": ("gpu_idle", "sw_power_cap", "hw_slowdown")}
    limits = {(700.0, 700.0): ("hw_slowdown",), (350.0, 700.0): ("sw_power_cap", "hw_slowdown")}
    for (limit, default), faults in limits.items():
        gpu = GpuFacts(power_limit_watts=limit, default_power_limit_watts=default, **facts)  # type: ignore[arg-type]
        assert throttle_faults(gpu) == faults


def visible(selection: str, gpus: tuple[GpuFacts, ...]) -> tuple[int, ...]:
    return tuple(gpu.index for gpu in select_visible({"CUDA_VISIBLE_DEVICES": selection}, gpus))


def test_selection_is_read_as_torch_reads_it() -> None:
    cards = tuple(GpuFacts(index=index, uuid=f"GPU-{index}abc-{index}") for index in range(4))
    assert select_visible({}, cards) == cards
    expected = {
        "0,2": (0, 2), "3,1": (3, 1), " 1 , 0 ": (1, 0), "+1": (1,), "007,1": (), "01": (1,), "1gpu,2ampere": (1, 2),
        "0,-1,2": (0,), "0,9,1": (0,), "0,,1": (0,), "GPU-2abc,GPU-0": (2, 0), "GPU-2abc,1": (2,), "0,GPU-2abc": (0,),
        "0," + "9" * 10_000: (0,),
        # The first entry names no GPU, or the beginning of every UUID.
        **dict.fromkeys(("", " ", "-1", "NoDevFiles", ",0", "4", "GPU-", "GPU-zzz", "MIG-zzz", "MIG-"), ()),
        # A GPU is named twice.
        **dict.fromkeys(("0,0", "1,2,1", "1,01", "0,9,0", "GPU-1,GPU-1", "GPU-1,GPU-1abc"), ()),
    }  # fmt: skip
    assert {selection: visible(selection, cards) for selection in expected} == expected
    divided = (cards[0], GpuFacts(index=1, uuid="GPU-bb", mig=True, mig_uuids=("MIG-b1", "MIG-b2")))
    assert [visible(text, divided) for text in ("MIG-b2", "MIG-b2,MIG-b1")] == [(1,)] * 2
