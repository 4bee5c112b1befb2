"""Runs one rank of a trial, from its first heartbeat to its file.

``run`` never raises: it turns whatever happens into ``rank<N>.json``, with a measurement or a failure.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from ..config.spec import CpuBinding
from ..records.json_files import write_json
from ..records.rank_files import (
    CONFIG_FILE,
    Assignment,
    HeartbeatWriter,
    log_file,
    partial_rank_file,
    rank_file,
    stacks_file,
)
from ..system import host_resources, processes, redaction
from .failure import device_free_bytes, failure_facts


def run(folder: Path, *, rank: int, local_rank: int, world_size: int) -> int:
    """Run this rank and write its file. Return the exit code: 0 for a measurement, 1 for a failure."""
    # First, so that the log has everything that is printed.
    processes.redirect_streams(log_file(folder, rank))
    # Never closed, because the handlers write to its descriptor. The trial's watcher sends SIGUSR2 to ranks that hang.
    stacks = stacks_file(folder, rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    heartbeat = HeartbeatWriter(folder, rank)
    emulated = limited = False
    try:
        assignment = Assignment.load(folder)
        emulated = assignment.trial.placement.gpu_memory_limit_bytes is not None
        limit_bytes = assignment.trial.placement.cpu_memory_limit_bytes
        limited = limit_bytes is not None
        threads_of_server = os.environ.get("OMP_NUM_THREADS")
        os.environ.update(rank_environment(assignment, rank, local_rank, world_size))
        if (threads := os.environ.get("OMP_NUM_THREADS")) is not None and threads != threads_of_server:
            set_threads(threads)
        # DeepSpeed's launcher sets LOCAL_SIZE; if neither variable is set, all ranks count as this node's.
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world_size)))
        if (binding := assignment.trial.workload.cpu_binding) != "none":
            # As DeepSpeed's launcher does with --bind_cores_to_rank through numactl (utils/numa.py). Threads that this
            # rank starts inherit the binding.
            cpus = choose_cpus(
                binding, sorted(os.sched_getaffinity(0)), host_resources.numa_cpus(), local_rank, local_size
            )
            os.sched_setaffinity(0, cpus)
            set_threads(str(len(cpus)))
        if assignment.working_folder is not None:
            with contextlib.suppress(FileNotFoundError):  # on another node, which may lack it
                os.chdir(assignment.working_folder)
        # When a trial is run again by hand, this rank could wait for others that nobody starts.
        if world_size != (ranks := assignment.trial.placement.num_gpus):
            raise RuntimeError(f"the trial has {ranks} ranks, but WORLD_SIZE is {world_size}")
        rendezvous_file = (assignment.rendezvous or "").removeprefix("file://")
        if ranks > 1 and rendezvous_file and not Path(rendezvous_file).exists():
            raise RuntimeError("the trial has ended: the file through which its ranks meet is gone; repeat the run")
        if limit_bytes is not None:
            # Limits this process's private writable memory (setrlimit(2)).
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        heartbeat.beat("import")
        from . import measure  # imports torch, DeepSpeed and Transformers, under the limit

        config = _read_config(folder)
        if secrets := redaction.secrets_of(config):  # DeepSpeed logs its whole configuration at level INFO

            def redact(message: logging.LogRecord) -> bool:
                message.msg, message.args = redaction.without(message.getMessage(), secrets), None
                return True

            logging.getLogger("DeepSpeed").addFilter(redact)
        # Python's own generator, for a factory's code; building the model seeds torch's.
        random.seed(assignment.trial.workload.seed)

        def save_partial(measured: dict[str, Any]) -> None:
            write_json(partial_rank_file(folder, measured["rank"]), {"measurement": measured})

        measured = measure.measure(assignment, config, heartbeat, save_partial, folder)
        heartbeat.beat("write")
        result = {"measurement": measured}
        code = 0
    except BaseException as error:  # KeyboardInterrupt and SystemExit too: a rank always leaves its file
        failure = failure_facts(
            error,
            rank=rank,
            phase=heartbeat.phase,
            step=heartbeat.step if heartbeat.step >= 0 else None,
            emulated=emulated,
            limited=limited,
            device_free_bytes=device_free_bytes(),
        )
        # A configuration that cannot be read now was not read before, so message and traceback hold none of its
        # secrets.
        with contextlib.suppress(OSError, ValueError):
            secrets = redaction.secrets_of(_read_config(folder))
            failure |= {name: redaction.without(failure[name], secrets) for name in ("message", "traceback")}
        print(failure["traceback"], file=sys.stderr, flush=True)
        result = {"failure": failure}
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # After the flush: the log is complete once this file exists.
    write_json(rank_file(folder, rank), result)
    heartbeat.beat("exit")
    return code


def rank_environment(assignment: Assignment, rank: int, local_rank: int, world_size: int) -> dict[str, str]:
    """Return the variables of a rank: the assignment's and, if ranks meet through a file, those that launchers set."""
    variables = dict(assignment.environment)
    if assignment.rendezvous is not None:
        variables |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size),
            # No port is opened: DeepSpeed names its shared memory after both (ops/csrc/cpu/comm/shm_interface.cpp).
            # The file's name holds the owner (launch/scratch.py).
            "MASTER_ADDR": Path(assignment.rendezvous).name,
            "MASTER_PORT": assignment.scratch_id,
        }
    return variables


def set_threads(count: str) -> None:
    """Set the number of threads of a parallel region, in ``OMP_NUM_THREADS`` and in torch."""
    os.environ["OMP_NUM_THREADS"] = count
    if "torch" in sys.modules:  # in a fork of the warm server torch has already read the variable
        sys.modules["torch"].set_num_threads(int(count))


def choose_cpus(
    binding: CpuBinding, allowed: list[int], numa_nodes: list[list[int]], local_rank: int, local_size: int
) -> list[int]:
    """Return the processors of a rank: an equal share of the allowed ones, or of one NUMA node's.

    Raises ValueError if a rank would get none.
    """
    if binding == "numa":
        # Rounded up: the last node may have fewer ranks.
        local_size_on_node = -(-local_size // len(numa_nodes))
        allowed = sorted(set(allowed) & set(numa_nodes[local_rank // local_size_on_node]))
        local_rank, local_size = local_rank % local_size_on_node, local_size_on_node
    # Leftover processors stay unused, so that all ranks have the same number.
    each = len(allowed) // local_size
    if each == 0:
        raise ValueError(f"{local_size} ranks cannot be bound to {len(allowed)} processors: each needs at least one")
    return allowed[local_rank * each : (local_rank + 1) * each]


def _read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / CONFIG_FILE).read_text()))
