"""The module ``pynvml`` of the simulated machine: cards answer like recorded ones, with the bytes in use on them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from nvml_replay import NVMLError, NvmlReplay

from simulated_card import CardPlan, read_plans, simulated_folder, used_bytes

__all__ = ["NVMLError"]
WATTS = 300


class NVMLError_GpuIsLost(NVMLError): ...  # noqa: N801, N818


OTHER_PROGRAM = 999_999
"""Process id of the program that holds ``CardPlan.held_bytes``."""


class SimulatedCard:
    """NVML's answers about one card. Its calls are recorded for ``GPU 0``, whatever its number here."""

    def __init__(self, index: int, plan: CardPlan) -> None:
        self._index, self._plan = index, plan
        self._replay = NvmlReplay(plan.machine)
        self._replay.calls |= plan.answers

    @property
    def capacity(self) -> int:
        """Bytes as CUDA reports them, without what the driver reserves."""
        memory = self._replay.calls["nvmlDeviceGetMemoryInfo(GPU 0, 33554472)"]
        return self._plan.total_bytes or int(memory["total"] - memory["reserved"])

    def recorded(self, name: str) -> Any:
        """The recorded answer to a call about the card, lost or not."""
        return getattr(self._replay, name)("GPU 0")

    @property
    def processes(self) -> list[tuple[int, int]]:
        """Process id and bytes, including those of the other program."""
        found = sorted(used_bytes(self._index, self._plan.freed_after_seconds))
        return [*found, *([(OTHER_PROGRAM, self._plan.held_bytes)] if self._plan.held_bytes else [])]

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity - sum(size for _, size in self.processes))

    def answer(self, name: str, handle: str, *arguments: Any) -> Any:
        """Answer a call about this card, or one of its MIG instances."""
        if self._plan.lost_when_used and list(used_bytes(self._index, self._plan.freed_after_seconds)):
            raise NVMLError_GpuIsLost(name)
        if name == "nvmlDeviceGetMemoryInfo":
            reserved = self._replay.calls["nvmlDeviceGetMemoryInfo(GPU 0, 33554472)"]["reserved"]
            free = self.free_bytes
            used = self.capacity - free + (0 if arguments else reserved)  # as the first version of the call counts
            return SimpleNamespace(total=self.capacity + reserved, free=free, used=used, reserved=reserved)
        if name == "nvmlDeviceGetComputeRunningProcesses":
            return [SimpleNamespace(pid=process, usedGpuMemory=size) for process, size in self.processes]
        if name == "nvmlDeviceGetTotalEnergyConsumption":
            return int(time.monotonic() * WATTS * 1000)  # millijoules
        recorded = getattr(self._replay, name)(handle.replace(f"GPU {self._index}", "GPU 0", 1), *arguments)
        return recorded.replace("-0", f"-{self._index}", 1) if name == "nvmlDeviceGetUUID" else recorded


def simulated_card(index: int) -> SimulatedCard:
    return SimulatedCard(index, read_plans(simulated_folder())[index])


def __getattr__(name: str) -> Any:
    if not name.startswith("nvml"):
        raise AttributeError(name)

    def call(*arguments: Any) -> Any:
        if name in ("nvmlInit", "nvmlShutdown"):
            return None
        if name == "nvmlDeviceGetCount":
            return len(read_plans(simulated_folder()))
        if name == "nvmlDeviceGetHandleByIndex":
            simulated_card(arguments[0])
            return f"GPU {arguments[0]}"
        if arguments and str(arguments[0]).startswith("GPU "):
            answer = simulated_card(int(str(arguments[0]).split()[1])).answer(name, *arguments)
            if name == "nvmlDeviceGetMigDeviceHandleByIndex":
                return f"{arguments[0]} MIG {arguments[1]}"
            return answer
        return getattr(NvmlReplay(read_plans(simulated_folder())[0].machine), name)(*arguments)

    return call
