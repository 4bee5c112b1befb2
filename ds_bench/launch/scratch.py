"""Names and removes what a run creates temporarily: swap files, checkpoints, shared memory, temporary files.

A killed run removes nothing. Every name therefore identifies its owner: host, process id and start time. (A host's
trial folder names it in a file.) The next run by the same user on the same host removes what belongs to dead processes.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ..config.spec import Trial
from ..records.rank_files import HOST_FOLDER_PREFIX, Assignment
from ..system.processes import is_alive, start_ticks

OWNER_FILE = "owner"
"""Holds the owner of a host's private trial folder, whose name every rank has to know."""
_SHARED_MEMORY = Path("/dev/shm")
_CODE_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that name the folders from which torch and Triton load compiled code."""
_LOAD_SECONDS = 60.0
"""Upper bound on the time to load a built op; loading holds the op's lock too."""


@cache
def _host() -> str:
    # Containers may share the folders and the host's name, and each has a process 1. Their process namespaces differ.
    with contextlib.suppress(OSError):
        return hashlib.sha256(f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}".encode()).hexdigest()[:8]
    return socket.gethostname()


def owner() -> str:
    """Return the text that identifies this process in file names."""
    return f"{_host()}.{os.getpid()}-{start_ticks(os.getpid())}"


def remove_abandoned(*folders: Path) -> list[Path]:
    """Remove and return what this user's dead processes left behind on this host.

    ``folders``: searched in addition to shared memory and the temporary folder.
    """
    owner_pattern = re.compile(rf"{re.escape(_host())}\.(\d+)-(\d+)")
    removed = []
    for folder in dict.fromkeys([_SHARED_MEMORY, Path(tempfile.gettempdir()), *folders]):
        for path in list(folder.glob("*ds_bench_*")):
            text = path.name
            if text.startswith(HOST_FOLDER_PREFIX):
                with contextlib.suppress(OSError):
                    text = (path / OWNER_FILE).read_text()
            match = owner_pattern.search(text)
            # The kernel reuses process ids, so the start time is compared too.
            if match is None or (is_alive(int(match[1])) and start_ticks(int(match[1])) == int(match[2])):
                continue
            if _remove_own(path):
                removed.append(path)
    return removed


def _remove_own(path: Path) -> bool:
    """Remove a file or folder if this user owns it; a link is not followed, as the folders are open to every user."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if status.st_uid == os.getuid():
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
            return True
    return False


@cache
def temporary_folder() -> str:
    """Return this process's folder for temporary files, which is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix=f"ds_bench_tmp.{owner()}.")
    # The sockets of multiprocessing too (multiprocessing/util.py, get_temp_dir).
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def temporary_folder_variables(environ: Mapping[str, str], ops_folder: str) -> tuple[dict[str, str], list[str]]:
    """Return variables that send temporary files of child processes to :func:`temporary_folder`, and notes.

    Killed compilers leave files, and so does a killed import of DeepSpeed, which compiles to find out which libraries
    exist (op_builder/builder.py, ``has_function``). Code that torch and Triton compile for later runs is next to
    the folder that holds ``ops_folder``, or where ``environ`` says, but never where another user can write: that user
    could run code here.
    """
    named = {name: Path(environ[name]).resolve() for name in _CODE_CACHES if environ.get(name)}
    variables = {"TMPDIR": temporary_folder()}
    variables |= {name: str(folder) for name, folder in named.items() if make_private(folder)}
    notes = [
        f"{name} is not used: {named[name]} cannot be created, or another user can write to it"
        for name in named.keys() - variables
    ]
    ours = Path(ops_folder).parents[1] / f"compiled_{os.getuid()}"
    folder = ours if make_private(ours) else Path(variables["TMPDIR"])
    for name in {"TORCHINDUCTOR_CACHE_DIR", *named}:
        variables.setdefault(name, str(folder / name.partition("_")[0].lower()))
    return variables, notes


def make_private(folder: Path) -> bool:
    """Create a folder if it does not exist. Return whether this user owns it and no other can write to or replace it.

    The owner of a parent folder could replace it, and so could everybody if all may write there, unless the parent is
    sticky as /tmp is. A parent's group is trusted.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own, above = folder.lstat(), [each.lstat() for each in folder.resolve().parents]
        replaceable = any(
            each.st_uid not in (0, os.getuid()) or each.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
            for each in above
        )
        is_open = own.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return not replaceable and not is_open and own.st_uid == os.getuid() and stat.S_ISDIR(own.st_mode)
    return False


def new_scratch_id() -> str:
    """Return nine random digits, so that hardly any two trials on a machine have the same.

    Digits, because the id is the MASTER_PORT of ranks that meet through a file (worker/rank.py).
    """
    return str(secrets.randbelow(9 * 10**8) + 10**8)


def rendezvous_file(scratch_id: str) -> Path:
    """Return the file through which the ranks of a trial find each other, in a folder whose path is valid in a URL.

    Its name is also their MASTER_ADDR, so that the names of their shared memory hold the owner.
    """
    folders = (tempfile.gettempdir(), "/tmp", str(_SHARED_MEMORY))
    # In a file:// address these characters end the path.
    folder = next(folder for folder in folders if not set(folder) & set("?#"))
    return Path(folder) / f"ds_bench_meet.{owner()}.{scratch_id}"


def swap_folder(trial: Trial, scratch_id: str) -> str | None:
    """Return the private folder for this trial's swap files; None if it does not swap."""
    if trial.placement.nvme_path is None or not trial.configuration.uses_nvme:
        return None
    return str(Path(trial.placement.nvme_path).resolve() / f"ds_bench_swap.{owner()}.{scratch_id}")


def checkpoint_folder(trial: Trial, folder: Path, scratch_id: str) -> str | None:
    """Return the private folder for this trial's checkpoint, or for its script's output; None without either.

    ``folder``: the trial's.
    """
    script = trial.workload.script
    if not trial.inspection.checkpoint and not (script is not None and script.uses("output_dir")):
        return None
    parent = Path(trial.inspection.checkpoint_path or folder)
    return str(parent.resolve() / f"ds_bench_checkpoint.{owner()}.{scratch_id}")


def create_scratch(assignment: Assignment) -> None:
    """Create the rendezvous file and the private folders of a trial on this host."""
    if assignment.rendezvous is not None:
        # It exists for as long as the trial runs: a rank started by hand afterwards finds it missing.
        Path(assignment.rendezvous.removeprefix("file://")).touch(mode=0o600, exist_ok=False)
    if assignment.swap_folder is not None:
        Path(assignment.swap_folder).mkdir()
    if assignment.checkpoint_folder is not None:
        Path(assignment.checkpoint_folder).mkdir(exist_ok=True)  # another host of the trial may share the disk


def remove_scratch(assignment: Assignment) -> None:
    """Remove what a trial has created on this host, if it exists, and the op locks that its ranks left behind."""
    for folder in (assignment.swap_folder, assignment.checkpoint_folder):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    # DeepSpeed never unlinks its segments, whose names hold buffer, user, MASTER_ADDR, MASTER_PORT and rank (shm.cpp).
    for segment in list(_SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{assignment.scratch_id}_*")):
        _remove_own(segment)
    if assignment.rendezvous is not None:
        Path(assignment.rendezvous.removeprefix("file://")).unlink(missing_ok=True)
    if ops_folder := assignment.environment.get("TORCH_EXTENSIONS_DIR"):
        with contextlib.suppress(OSError):  # in a shared cache the lock may be another user's
            remove_stale_locks(Path(ops_folder))


def remove_stale_locks(folder: Path) -> list[Path]:
    """Remove and return the locks of killed programs in a folder of ops. Later builds and loads would wait for them.

    torch creates an empty file named ``lock`` to build or load an op, and removes it afterwards
    (torch/utils/file_baton.py).
    """
    removed = []
    for lock in folder.glob("*/lock"):
        # One by one, so that hardly any time passes between the check and the removal.
        if not _is_open(lock):
            lock.unlink(missing_ok=True)
            removed.append(lock)
    return removed


def _is_open(lock: Path) -> bool:
    """Whether a process has the file open. The kernel grants a write lease only if none has (fcntl(2), F_SETLEASE)."""
    try:
        with lock.open("rb") as file:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # breaking a lease kills its holder by default
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return False
    except (BlockingIOError, FileNotFoundError):  # open elsewhere, or removed since it was listed
        return True
    except OSError:  # another user's file, or a network file system
        with contextlib.suppress(OSError):
            return time.time() - lock.lstat().st_mtime <= _LOAD_SECONDS
        return True
