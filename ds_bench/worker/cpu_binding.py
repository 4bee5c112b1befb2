"""Binds a rank to processors, before torch is imported where it is started cold.

What DeepSpeed's launcher does with ``--bind_cores_to_rank`` through numactl (utils/numa.py), without that program.
"""

from __future__ import annotations

import os
import sys

from ..config.spec import CpuBinding
from ..system import host_memory


def bind(binding: CpuBinding, local_rank: int, local_size: int) -> None:
    """Binds this rank, and the threads that it starts, to its processors; ``none`` changes nothing.

    ``local_size``: ranks of this node.
    """
    if binding == "none":
        return
    cpus = choose_cpus(binding, sorted(os.sched_getaffinity(0)), host_memory.numa_cpus(), local_rank, local_size)
    os.sched_setaffinity(0, cpus)
    set_threads(str(len(cpus)))


def set_threads(count: str) -> None:
    """Sets the number of threads of a parallel region, as ``OMP_NUM_THREADS`` has it."""
    os.environ["OMP_NUM_THREADS"] = count
    if "torch" in sys.modules:  # forked from the warm server, torch has read the variable before
        sys.modules["torch"].set_num_threads(int(count))


def choose_cpus(
    binding: CpuBinding, allowed: list[int], numa_nodes: list[list[int]], local_rank: int, local_size: int
) -> list[int]:
    """The processors of a rank: an equal part of those that are allowed, or of those of one NUMA node.

    Ranks of a NUMA node share its processors. Raises ValueError where a rank would get none.
    """
    if binding == "numa":
        # Rounded up: the last node may have fewer ranks.
        local_size_on_node = -(-local_size // len(numa_nodes))
        allowed = sorted(set(allowed) & set(numa_nodes[local_rank // local_size_on_node]))
        local_rank, local_size = local_rank % local_size_on_node, local_size_on_node
    # Processors that the division leaves over are not used: all ranks have equally many.
    each = len(allowed) // local_size
    if each == 0:
        raise ValueError(f"{local_size} ranks cannot be bound to {len(allowed)} processors, one each at least")
    return allowed[local_rank * each : (local_rank + 1) * each]
