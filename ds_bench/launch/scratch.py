"""Names and removes what a run creates for a time: swap files, checkpoints, shared memory, temporary files.

A run that is killed removes nothing. So each process notes what it is about to create in a file of its own, beside the
shared memory; the next run of the same user removes what processes have noted that no longer exist. Folders of swap
files and checkpoints, on other disks, carry their owner in their name.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import json
import multiprocessing.util
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ..config.spec import Trial
from ..records.json_files import append_line
from ..records.rank_files import HOST_FOLDER_PREFIX, Assignment
from ..system.processes import is_alive, start_ticks

_SWAP_PREFIX = "ds_bench_swap"
_CHECKPOINT_PREFIX = "ds_bench_checkpoint"
_OWNER_PREFIX = "ds_bench_owner"
_SHARED_MEMORY = Path("/dev/shm")
# multiprocessing begins the names of its temporary folders with "pymp-" (multiprocessing/util.py, get_temp_dir).
_REMOVABLE = ("deepspeed_allreduce_buffer_", "ds_bench_meet_", HOST_FOLDER_PREFIX, "pymp-")
"""Beginnings of the names that may be removed, whatever a file of notes contains."""
_CODE_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that name the folders from which torch and Triton load compiled code."""


def _host_and_namespace() -> str:
    """Host and process namespace, within which a process id is unique."""
    try:
        # Containers may share the folders, and have a process of the same id each.
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"{socket.gethostname()}.{namespace}"


def _name_own_process() -> str:
    # With its start, as the kernel gives ids again.
    return f"{os.getpid()}-{start_ticks(os.getpid())}"


def _is_gone(owner: str) -> bool:
    """Whether the process that :func:`_name_own_process` has named so has ended; False for any other text."""
    pid, _, started = owner.partition("-")
    if not pid.isdecimal():
        return False
    return not is_alive(int(pid)) or (started.isdecimal() and start_ticks(int(pid)) != int(started))


def _owner_folders() -> list[Path]:
    return [folder for folder in (_SHARED_MEMORY, Path(tempfile.gettempdir())) if os.access(folder, os.W_OK)]


def note_owned(*patterns: str) -> None:
    """Notes absolute paths, as patterns of :mod:`glob`, that this process will create and remove.

    Nothing is noted where neither shared memory nor the temporary folder can be written.
    """
    # One is enough: remove_abandoned looks into both, as a process may have been able to write only the other.
    for folder in _owner_folders()[:1]:
        path = folder / f"{_OWNER_PREFIX}.{_host_and_namespace()}.{_name_own_process()}"
        if not path.exists():
            atexit.register(path.unlink, missing_ok=True)
        with contextlib.suppress(OSError):
            append_line(path, list(patterns))


def temporary_folder() -> str:
    """The folder of this process for temporary files, which multiprocessing removes when the process ends."""
    folder = multiprocessing.util.get_temp_dir()
    note_owned(glob.escape(folder))
    return folder


def temporary_folder_variables(environ: Mapping[str, str], ops_folder: str) -> tuple[dict[str, str], list[str]]:
    """Variables that make child processes put their temporary files into :func:`temporary_folder`, and notes on them.

    Killed compilers leave files, and so does a killed import of DeepSpeed, which compiles to find out which libraries
    exist (op_builder/builder.py, ``has_function``). Code that torch and Triton compile for later runs is next to
    ``ops_folder`` or where ``environ`` says, but never where another user can write, who could run code here.
    """
    asked = {name: Path(environ[name]).resolve() for name in _CODE_CACHES if environ.get(name)}
    variables = {"TMPDIR": temporary_folder()}
    variables |= {name: str(folder) for name, folder in asked.items() if _make_private(folder)}
    notes = [f"{name} is not used: another user can write to {asked[name]}" for name in asked.keys() - variables]
    ours = Path(ops_folder).parents[1] / f"compiled_{os.getuid()}"
    folder = ours if _make_private(ours) else Path(variables["TMPDIR"])
    for name in {"TORCHINDUCTOR_CACHE_DIR", *asked}:
        variables.setdefault(name, str(folder / name.partition("_")[0].lower()))
    return variables, notes


def _make_private(folder: Path) -> bool:
    """Create a folder if it does not exist. Return whether this user owns it and no other user can replace it.

    The owner of a folder above it could, and so could everybody who may write there, unless it is sticky as /tmp is.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        above = [each.lstat() for each in folder.resolve().parents]
        replaceable = any(
            each.st_uid not in (0, os.getuid()) or each.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
            for each in above
        )
        is_open = folder.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return not replaceable and not is_open and _is_mine(folder, stat.S_ISDIR)
    return False


def remove_abandoned() -> list[Path]:
    """Removes what this user's processes of this host have noted and have not removed before they ended. Returns it."""
    removed: list[Path] = []
    for folder in _owner_folders():
        for entry in folder.glob(f"{_OWNER_PREFIX}.{glob.escape(_host_and_namespace())}.*"):
            owner = entry.name.rpartition(".")[2]
            with contextlib.suppress(OSError, ValueError, TypeError):
                if not _is_gone(owner) or not _is_mine(entry, stat.S_ISREG):
                    continue
                for line in entry.read_text(encoding="utf-8").splitlines():
                    for pattern in json.loads(line):
                        removed += _remove_matches(pattern)
                entry.unlink()
    return removed


def _is_mine(path: Path, kind: Callable[[int], bool]) -> bool:
    # Not stat(): these folders are open to every user, and a link to somebody else's files must not be followed.
    status = path.lstat()
    return status.st_uid == os.getuid() and kind(status.st_mode)


def _remove_matches(pattern: str) -> list[Path]:
    """Removes this user's files and folders of that pattern with a name of ours. Returns them."""
    removed = []
    # A list first, since the loop removes what glob goes through. The pattern is only as good as the file it is from:
    # name and owner are checked for each match.
    for path in list(Path("/").glob(pattern.lstrip("/"))):
        if path.name.startswith(_REMOVABLE) and _is_mine(path, stat.S_ISDIR):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        elif path.name.startswith(_REMOVABLE) and _is_mine(path, stat.S_ISREG):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def new_scratch_id() -> str:
    """Nine random digits, which no other trial on this machine has."""
    # Digits alone: it is the MASTER_PORT of ranks that meet through a file, where it makes the names of their shared
    # memory unique (worker/rank.py).
    return str(secrets.randbelow(9 * 10**8) + 10**8)


def shared_memory(scratch_id: str) -> str:
    """Pattern of the shared-memory segments of a trial.

    DeepSpeed never unlinks them. It names them by buffer, user, MASTER_ADDR, MASTER_PORT and rank (shm.cpp).
    """
    return f"{_SHARED_MEMORY}/deepspeed_allreduce_buffer_*_{scratch_id}_*"


def rendezvous_file(scratch_id: str) -> Path:
    """The file through which the ranks of a trial find each other, in a folder whose path may stand in a URL."""
    folders = (tempfile.gettempdir(), "/tmp", str(_SHARED_MEMORY))
    # In a file:// address these signs end the path.
    folder = next(folder for folder in folders if not set(folder) & set("?#"))
    return Path(folder) / f"ds_bench_meet_{os.getuid()}_{scratch_id}"


def swap_folder(trial: Trial, scratch_id: str) -> str | None:
    """The private folder for this trial's swap files; None where nothing is swapped.

    Its name contains host and process, so that a later run can find out that its owner has ended.
    """
    if trial.placement.nvme_path is None or not trial.configuration.uses_nvme:
        return None
    return _private_folder(trial.placement.nvme_path, _SWAP_PREFIX, scratch_id)


def checkpoint_folder(trial: Trial, folder: Path, scratch_id: str) -> str | None:
    """The private folder for this trial's checkpoint, likewise named; None where none is measured.

    ``folder``: of the trial.
    """
    if not trial.inspection.checkpoint:
        return None
    return _private_folder(trial.inspection.checkpoint_path or folder, _CHECKPOINT_PREFIX, scratch_id)


def _private_folder(parent: str | Path, prefix: str, scratch_id: str) -> str:
    return str(Path(parent).resolve() / f"{prefix}.{_host_and_namespace()}.{_name_own_process()}.{scratch_id}")


def create_scratch(assignment: Assignment) -> None:
    """Creates the rendezvous file and the private folders of a trial on this host, for :func:`remove_scratch`."""
    meeting = None if assignment.rendezvous is None else assignment.rendezvous.removeprefix("file://")
    # Before they exist: a run that is killed in between must not leave what no later run knows of.
    note_owned(shared_memory(assignment.scratch_id), *([] if meeting is None else [glob.escape(meeting)]))
    if meeting is not None:
        # It exists for as long as the trial runs: a rank started by hand afterwards finds it missing.
        Path(meeting).touch(mode=0o600, exist_ok=False)
    if assignment.swap_folder is not None:
        Path(assignment.swap_folder).mkdir()
    if assignment.checkpoint_folder is not None:
        Path(assignment.checkpoint_folder).mkdir(exist_ok=True)  # another host of the trial may share the disk


def remove_scratch(assignment: Assignment) -> None:
    """Removes the private folders, shared-memory segments and rendezvous file, if they exist."""
    for folder in (assignment.swap_folder, assignment.checkpoint_folder):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        _remove_matches(shared_memory(assignment.scratch_id))
    if assignment.rendezvous is not None:
        Path(assignment.rendezvous.removeprefix("file://")).unlink(missing_ok=True)


def remove_abandoned_folders(parent: Path) -> list[str]:
    """Removes private folders in ``parent`` whose owner on this host has ended. Returns their names."""
    removed = []
    for prefix in (_SWAP_PREFIX, _CHECKPOINT_PREFIX):
        for folder in parent.glob(f"{prefix}.{glob.escape(_host_and_namespace())}.*.*"):
            if _is_gone(folder.name.split(".")[-2]):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder.name)
    return removed
