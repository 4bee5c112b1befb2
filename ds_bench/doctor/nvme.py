"""The folder for NVMe offload: what disk it is on, whether DeepSpeed can use it, its free space and its speed."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import deepspeed_config, strategies
from ..config.caveats import Caveat, CaveatKind, as_caveat
from ..config.spec import Placement, Workload
from ..errors import PreflightError
from ..launch.scratch import remove_abandoned
from ..models.lookup import ResolvedModel
from ..system import files
from ..system.host_memory import read_text
from ..system.tools import run_tool
from ..units import format_bytes, format_millions, from_gb
from .findings import Finding, SystemAccess, ok, problem, run_checks, unreadable, warning

SWAP_BYTES_PER_PARAMETER = 18
"""On disk while training: fp32 weight, gradient and two moments (16) and the 16-bit weight (2)."""
_MIN_SWAP_BYTES = files.FULL_DISK_BYTES
"""Free bytes that every row needs which swaps."""
_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "fuse", "ceph", "9p", "virtiofs")
_SLOW_BYTES_PER_SECOND = from_gb(5.0)
_MIN_TEST_BYTES, _MAX_TEST_BYTES = 64 * 2**20, 2**30
_SECONDS_EACH_WAY = 5.0
_PAGE_BYTES = 4096
"""A length that every file system accepts for O_DIRECT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeFolder:
    """A folder for NVMe offload that exists and can be written."""

    file_system: str | None
    """Type of the file system; None if the kernel does not show it."""
    caveat: str | Caveat | None
    """Why it is not a local NVMe disk; None if the type of the file system does not show that."""


def check_folder(path: Path) -> NvmeFolder:
    """Checks the folder for swapping, and removes swap files that ended runs left in it.

    Raises PreflightError if it is missing or not writable.
    """
    if not path.is_dir():
        if path.exists():
            raise PreflightError(f"--nvme-path {path} is a file, not a folder", remedy="give a folder on the NVMe disk")
        raise PreflightError(f"--nvme-path {path} is not a folder", remedy="create it on the NVMe disk")
    files.require_writable(path, "--nvme-path")
    remove_abandoned(path)
    kind = file_system(path)
    caveat: str | Caveat | None = None
    if kind in _IN_MEMORY:
        caveat = Caveat(CaveatKind.NVME_IN_MEMORY, {"file_system": str(kind)})
    elif kind == "overlay":
        caveat = "--nvme-path is a container's overlay (overlay), not an NVMe disk"
    elif kind is not None and kind.startswith(_NETWORK):
        caveat = f"--nvme-path is on a network or shared file system ({kind}), not a local NVMe disk"
    return NvmeFolder(file_system=kind, caveat=caveat)


def lack_of_space(path: Path, model: ResolvedModel) -> str | None:
    """Why rows that swap to ``path`` cannot run, with the remedy. None if space is enough or the need is unknown."""
    free = shutil.disk_usage(path).free
    parameters = 0 if model.facts is None else model.facts.parameters
    need = max(SWAP_BYTES_PER_PARAMETER * parameters, _MIN_SWAP_BYTES)
    if free >= need:
        return None
    return (
        f"--nvme-path {path} has {format_bytes(free)} free, and swapping {model.name} needs about "
        f"{format_bytes(need)}; free some space, or give another disk"
    )


def file_system(path: Path) -> str | None:
    """The type of the file system that holds ``path``; None if the kernel does not show it."""
    import psutil

    with contextlib.suppress(OSError):
        mounts = [(Path(mount.mountpoint), mount.fstype) for mount in psutil.disk_partitions(all=True)]
        # Of the mounts above the path the deepest holds it; of several at one place the last, which covers the others.
        holding = [mount for mount in reversed(mounts) if path.resolve().is_relative_to(mount[0])]
        return max(holding, key=lambda mount: len(mount[0].parts), default=(None, None))[1]
    return None


def check(system: SystemAccess, path: Path, folder: NvmeFolder | None = None) -> Iterator[Finding]:
    """Everything but the speed. ``folder``: the result of :func:`check_folder` if it was called already.

    Raises PreflightError if the folder cannot be used at all.
    """
    folder = check_folder(path) if folder is None else folder
    if folder.caveat is not None:
        yield warning("NVMe path", as_caveat(folder.caveat).text, "give a folder on a local NVMe disk")
    elif folder.file_system is None:
        yield unreadable("NVMe path", "the kernel does not tell the file system")
    else:
        yield ok("NVMe path", f"{path}, {folder.file_system}, can be written")
    yield from run_checks(
        {
            "NVMe space": lambda: _check_space(path),
            "NVMe disk": lambda: _check_device(system, path),
            "direct I/O": lambda: _check_direct_io(path),
        }
    )


def _check_space(path: Path) -> Finding:
    free = shutil.disk_usage(path).free
    parameters = free // SWAP_BYTES_PER_PARAMETER
    text = f"{format_bytes(free)} free: room for a model of {format_millions(parameters)} parameters"
    if parameters < 10**9:
        return warning("NVMe space", text, "free some space: NVMe offload is for models that fit nowhere else")
    return ok("NVMe space", text)


def _check_device(system: SystemAccess, path: Path) -> Finding:
    """The disks that hold the folder, as far as the kernel shows them under /sys."""
    number = path.stat().st_dev
    entry = system.root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        return unreadable("NVMe disk", "this file system shows no block device")
    device = entry.resolve()
    # In /sys a partition has neither ``slaves`` nor ``queue``; the folder above it, the whole disk's, has both.
    disk = device.parent if (device / "partition").exists() else device
    # The disks of an array or of a logical volume.
    members = sorted(member.name for member in disk.glob("slaves/*")) or [disk.name]
    rotational = (read_text(disk / "queue/rotational") or "").strip()
    text = disk.name if members == [disk.name] else f"{disk.name} of {', '.join(members)}"
    if all(name.startswith("nvme") for name in members):
        return ok("NVMe disk", text)
    remedy = "offload to a local NVMe disk, or read the figures as this disk's"
    if rotational == "1":
        return warning("NVMe disk", f"{text} is rotational, or a virtual disk that says so", remedy)
    return warning("NVMe disk", f"{text} is no NVMe disk" + ("" if rotational == "0" else ", or hides it"), remedy)


def _check_direct_io(path: Path) -> Finding:
    """Whether files can be opened with O_DIRECT, as DeepSpeed opens every swap file (csrc/aio)."""
    try:
        _write_directly(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = "could not be tried: the disk is full"
            return problem("direct I/O", text, "free some space, or give another disk")
        text = f"files cannot be opened and written with O_DIRECT ({error.strerror}), and DeepSpeed does nothing else"
        return problem("direct I/O", text, "give a folder on a local disk with ext4 or xfs")
    return ok("direct I/O", "works")


def _write_directly(path: Path) -> None:
    # A page from mmap has the alignment that O_DIRECT asks of a buffer.
    with tempfile.TemporaryFile(dir=path) as file, mmap.mmap(-1, _PAGE_BYTES) as page:
        # The file has no name, so that nothing is left behind, but ``tempfile`` cannot create it with O_DIRECT: it is
        # opened a second time through its descriptor.
        descriptor = os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_DIRECT)
        try:
            os.write(descriptor, page)
        finally:
            os.close(descriptor)


def check_speed(path: Path, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Measures the disk with DeepSpeed's own op. ``variables``: name the cache that holds the built async_io op."""
    free = shutil.disk_usage(path).free
    size = min(_MAX_TEST_BYTES, free // 4)
    if size < _MIN_TEST_BYTES:
        text = f"not measured: {format_bytes(free)} free is too little to write"
        yield warning("NVMe speed", text, "free some space")
        return
    aio = configured_aio(path)
    settings = json.dumps({**aio, "bytes": size, "seconds": _SECONDS_EACH_WAY})
    reply = run_tool("worker.disk_speed", str(path.resolve()), settings, environment=variables)
    yield speed_finding(reply.last_object("the measurement"), aio)


def configured_aio(path: Path) -> dict[str, Any]:
    """The ``aio`` block that the nvme strategy trains with."""
    # Only ``aio`` is used of it, which depends neither on the model nor on the accelerator.
    config = deepspeed_config.complete_config(
        deepspeed_config.base_config(strategies.offload_strategy("nvme"), 1),
        Workload(model="any", model_source="preset"),
        Placement(accelerator="cpu", nvme_path=str(path)),
        torch_adam=True,
        largest_parameter=None,
    )
    return dict(config["aio"])


def speed_finding(measured: Mapping[str, Any], aio: Mapping[str, Any]) -> Finding:
    """The finding for what ``worker.disk_speed`` printed, measured with the settings ``aio``."""
    name = "NVMe speed"
    if "error" in measured:
        return problem(name, f"DeepSpeed cannot use the folder: {measured['error']}", "give another folder")
    read, write = float(measured["read_bytes_per_second"]), float(measured["write_bytes_per_second"])
    text = (
        f"reads {format_bytes(read)}/s, writes {format_bytes(write)}/s in sequence "
        f"(DeepSpeed's async I/O, blocks of {format_bytes(aio['block_size'])}, queue depth {aio['queue_depth']}, "
        f"{aio['intra_op_parallelism']} thread(s), {format_bytes(measured['bytes'])})"
    )
    if measured.get("from_disk") is False:
        remedy = "do not trust the reading speed; give a folder on a local disk with ext4 or xfs"
        return warning(name, f"{text}; part of it was read from a cache, not from the disk", remedy)
    slow = [way for way, speed in (("reading", read), ("writing", write)) if speed < _SLOW_BYTES_PER_SECOND]
    if not slow:
        return ok(name, text)
    text += f"; {' and '.join(slow)} below {format_bytes(_SLOW_BYTES_PER_SECOND)}/s"
    remedy = "NVMe rows will wait for the disk: use a faster one or several as RAID 0, or try --set aio.queue_depth=32"
    return warning(name, text, remedy)
