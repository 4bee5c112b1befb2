"""One rank of one trial, from its first beat to its file.

``run`` never raises: whatever happens becomes ``rank<N>.json``, a measurement or a failure.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import random
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config.spec import Trial
from ..records.rank_files import (
    CONFIG_FILE,
    Assignment,
    HeartbeatWriter,
    log_file,
    partial_rank_file,
    rank_file,
    stacks_file,
    write_json,
)
from ..system import redaction
from . import memory
from .failure import rank_failure


def run(folder: Path, *, rank: int, local_rank: int, world_size: int) -> int:
    """Runs this rank and writes its file. Returns the exit code: 0 for a measurement, 1 for a failure."""
    started = time.time()
    _redirect_output(log_file(folder, rank))
    stacks = stacks_file(folder, rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    beat = HeartbeatWriter(folder, rank)
    emulated = limited = False
    try:
        assignment = Assignment.load(folder)
        emulated = assignment.trial.placement.gpu_memory_limit_bytes is not None
        limited = assignment.trial.placement.cpu_memory_limit_bytes is not None
        os.environ.update(rank_environment(assignment, rank, local_rank, world_size))
        if assignment.working_folder is not None:
            with contextlib.suppress(FileNotFoundError):  # of another node, which may lack it
                os.chdir(assignment.working_folder)
        result = _measure(folder, assignment, beat, started)
        code = 0
    except BaseException as error:  # a rank's end is always a value, KeyboardInterrupt and SystemExit too
        step = beat.step if beat.step >= 0 else None
        failure = rank_failure(
            error,
            rank=rank,
            phase=beat.phase,
            step=step,
            emulated=emulated,
            limited=limited,
            device_free_bytes=memory.device_free_bytes(),
        )
        with contextlib.suppress(OSError, ValueError):
            secrets = redaction.secrets_of(_config(folder))
            failure = replace(
                failure,
                message=redaction.without(failure.message, secrets),
                traceback=redaction.without(failure.traceback, secrets),
            )
        print(failure.traceback, file=sys.stderr, flush=True)
        result = {"failure": asdict(failure)}
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    write_json(rank_file(folder, rank), result)
    beat.beat("exit")
    return code


def rank_environment(assignment: Assignment, rank: int, local_rank: int, world_size: int) -> dict[str, str]:
    """What launchers set, for one node meeting through a file; nothing where a launcher set it already."""
    variables = dict(assignment.environment)
    if assignment.rendezvous is not None:
        variables |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            # Never bound: DeepSpeed names its shared memory by it (ops/csrc/cpu/comm/shm_interface.cpp).
            "MASTER_PORT": assignment.scratch_id,
        }
    return variables


def _redirect_output(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _measure(folder: Path, assignment: Assignment, beat: HeartbeatWriter, started: float) -> dict[str, Any]:
    trial = assignment.trial
    if trial.placement.cpu_memory_limit_bytes is not None:
        memory.limit_data_segment(trial.placement.cpu_memory_limit_bytes)
    beat.beat("import")
    from . import measure

    imported = time.time()
    config = _config(folder)
    secrets = redaction.secrets_of(config)
    if secrets:  # DeepSpeed logs its whole configuration at level INFO

        def hide(said: logging.LogRecord) -> bool:
            said.msg, said.args = redaction.without(said.getMessage(), secrets), None
            return True

        logging.getLogger("DeepSpeed").addFilter(hide)
    _seed_everything(trial)
    own = {"hostname": socket.gethostname(), "pid": os.getpid(), "import_seconds": imported - started}

    def keep(measured: dict[str, Any]) -> None:
        write_json(partial_rank_file(folder, measured["rank"]), {"measurement": {**measured, **own}})

    measured = measure.measure(assignment, config, beat, keep)
    beat.beat("write")
    return {"measurement": {**measured, **own}}


def _config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / CONFIG_FILE).read_text()))


def _seed_everything(trial: Trial) -> None:
    random.seed(trial.workload.seed)
