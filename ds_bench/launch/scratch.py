"""What a run leaves outside its folder: swap files, shared memory, temporary files; and their removal.

A run that is killed removes nothing. So each process notes in a file of its own, beside the shared memory, what it is
about to make; the next run of the same user removes what owners that no longer live have noted. Swap folders, on disks
of their own, carry their owner in their name.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
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

from ..config.deepspeed_config import uses_nvme
from ..config.spec import Trial
from ..records.rank_files import Assignment, append_line
from ..system.processes import is_alive, start_ticks

_SWAP_PREFIX = "ds_bench_swap"
_OWNER_PREFIX = "ds_bench_owner"
_SHARED_MEMORY = Path("/dev/shm")
_REMOVABLE = ("deepspeed_allreduce_buffer_", "ds_bench_meet_", "pymp-")
"""How the names begin of what may be noted; nothing else is removed, whatever a file says."""


def _host_and_namespace() -> str:
    """Host and process namespace: a process number means something only inside both."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"{socket.gethostname()}.{namespace}"


def _own_process() -> str:
    return f"{os.getpid()}-{start_ticks(os.getpid())}"


def _is_gone(owner: str) -> bool:
    """Whether a process of this host and namespace, as :func:`_own_process` names it, has ended; False if unknown."""
    pid, _, started = owner.partition("-")
    if not pid.isdecimal():
        return False
    return not is_alive(int(pid)) or (started.isdecimal() and start_ticks(int(pid)) != int(started))


def _owner_folders() -> list[Path]:
    return [folder for folder in (_SHARED_MEMORY, Path(tempfile.gettempdir())) if os.access(folder, os.W_OK)]


def note_owned(*patterns: str) -> None:
    """Notes absolute paths, as patterns of :mod:`glob`, that this process is about to make and will remove.

    Where neither shared memory nor the temporary folder can be written, nothing is noted.
    """
    for folder in _owner_folders()[:1]:
        path = folder / f"{_OWNER_PREFIX}.{_host_and_namespace()}.{_own_process()}"
        if not path.exists():
            atexit.register(path.unlink, missing_ok=True)
        with contextlib.suppress(OSError):
            append_line(path, list(patterns))


def temporary_folder() -> str:
    """A folder of this process for temporary files, multiprocessing's own, removed when it ends; noted."""
    folder = multiprocessing.util.get_temp_dir()
    note_owned(glob.escape(folder))
    return folder


def temporary_folder_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that send the temporary files of this process's children into :func:`temporary_folder`.

    Compilers leave theirs when they are killed, and so does DeepSpeed's import, which compiles to learn which libraries
    there are (op_builder/builder.py, ``has_function``). torch's cache of compiled code, which is to outlive the run,
    stays outside (torch/_inductor/runtime/cache_dir_utils.py).
    """
    cache = Path(tempfile.gettempdir()).absolute() / f"torchinductor_{os.getuid()}"
    return {
        "TMPDIR": temporary_folder(),
        "TORCHINDUCTOR_CACHE_DIR": environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache)),
    }


def remove_abandoned() -> list[Path]:
    """Removes what this user's processes of this host have noted and no longer live to remove. Returns what it was."""
    removed: list[Path] = []
    for folder in _owner_folders():
        for entry in folder.glob(f"{_OWNER_PREFIX}.{glob.escape(_host_and_namespace())}.*"):
            owner = entry.name.rpartition(".")[2]
            with contextlib.suppress(OSError, ValueError, TypeError):
                if not _is_gone(owner) or not _is_mine(entry, stat.S_ISREG):
                    continue
                for line in entry.read_text(encoding="utf-8").splitlines():
                    for pattern in json.loads(line):
                        removed += _removed(pattern)
                entry.unlink()
    return removed


def _is_mine(path: Path, kind: Callable[[int], bool]) -> bool:
    found = path.lstat()
    return found.st_uid == os.getuid() and kind(found.st_mode)


def _removed(pattern: str) -> list[Path]:
    removed = []
    for path in list(Path("/").glob(pattern.lstrip("/"))):
        if not path.name.startswith(_REMOVABLE):
            continue
        if _is_mine(path, stat.S_ISDIR):
            shutil.rmtree(path, ignore_errors=True)
        elif _is_mine(path, stat.S_ISREG):
            path.unlink(missing_ok=True)
        else:
            continue
        removed.append(path)
    return removed


def new_scratch_id() -> str:
    """Digits that no other trial on this machine uses."""
    return str(secrets.randbelow(9 * 10**8) + 10**8)


def shared_memory(scratch_id: str) -> str:
    """Pattern of a trial's segments.

    DeepSpeed never unlinks them: shm.cpp names them buffer, user, MASTER_ADDR, MASTER_PORT, rank.
    """
    return f"{_SHARED_MEMORY}/deepspeed_allreduce_buffer_*_{scratch_id}_*"


def meeting_file(scratch_id: str) -> Path:
    """Where the ranks of a trial meet: in the temporary folder, but for characters that a URL takes for its own."""
    folders = (tempfile.gettempdir(), "/tmp", str(_SHARED_MEMORY))
    folder = next(each for each in folders if not set(each) & set("?#"))
    return Path(folder) / f"ds_bench_meet_{os.getuid()}_{scratch_id}"


def swap_folder(trial: Trial, scratch_id: str) -> str | None:
    """The private folder for this trial's swap files; None where nothing swaps.

    The name carries host and process, so that a later run can tell that its owner is gone.
    """
    if trial.placement.nvme_path is None or not uses_nvme(trial.ds_config):
        return None
    name = f"{_SWAP_PREFIX}.{_host_and_namespace()}.{_own_process()}.{scratch_id}"
    return str(Path(trial.placement.nvme_path).resolve() / name)


def disk_is_full(folder: str | None) -> bool:
    """Whether the file system of a swap folder has no room for 8 MiB more."""
    if folder is None:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, 8 * 2**20)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


def remove_scratch(assignment: Assignment) -> None:
    """Removes swap folder, shared-memory segments and rendezvous file; what is gone already is fine."""
    if assignment.swap_folder is not None:
        shutil.rmtree(assignment.swap_folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        _removed(shared_memory(assignment.scratch_id))
    if assignment.rendezvous is not None:
        Path(assignment.rendezvous.removeprefix("file://")).unlink(missing_ok=True)


def remove_abandoned_swap(nvme_path: Path) -> list[str]:
    """Removes swap folders whose owner on this host no longer lives. Returns their names."""
    removed = []
    for folder in nvme_path.glob(f"{_SWAP_PREFIX}.{glob.escape(_host_and_namespace())}.*.*"):
        if _is_gone(folder.name.split(".")[-2]):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed
