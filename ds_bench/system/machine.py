"""This machine, read once at the start of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from . import environment, gpus
from .environment import Environment
from .gpus import GpuInventory


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Host, GPUs, versions and variables at one moment."""

    environment: Environment
    """The facts that are stored with the results."""
    gpus: GpuInventory
    """Every GPU of the host, visible to CUDA or not."""
    variables: Mapping[str, str]
    """Environment variables of this process."""

    @property
    def visible_gpu_indices(self) -> tuple[int, ...]:
        """NVML's indices of the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order."""
        return tuple(gpu.index for gpu in self.environment.gpus)


def read_machine() -> Machine:
    """Reads GPUs, host, versions and variables. Never raises: a fact that cannot be read is None."""
    variables, inventory = dict(os.environ), gpus.read_gpus()
    return Machine(environment=environment.read_environment(variables, inventory), gpus=inventory, variables=variables)
