"""The folder for NVMe offload: what disk it is, whether DeepSpeed can use it, its room and its speed."""

from __future__ import annotations

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
from ..config.spec import Placement, Workload
from ..errors import PreflightError
from ..launch.scratch import remove_abandoned_swap
from ..models.lookup import ResolvedModel
from ..system.host_memory import read_text
from ..system.processes import run_worker_tool
from ..units import format_bytes, format_millions, from_gb
from .findings import Finding, SystemAccess, ok, one_by_one, problem, unreadable, warning

SWAP_BYTES_PER_PARAMETER = 18
"""On disk while training: fp32 weight, gradient and two moments (16) and the 16-bit weight (2)."""
_LEAST_SWAP_BYTES = 8 * 2**20
"""Free bytes that any row needs which swaps; below, a disk counts as full (``launch.scratch.disk_is_full``)."""
_NOT_A_DISK = {"tmpfs": "memory", "ramfs": "memory", "overlay": "a container's overlay"}
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "fuse", "ceph", "9p", "virtiofs")
_SLOW_BYTES_PER_SECOND = from_gb(5.0)
_LEAST_BYTES, _MOST_BYTES = 64 * 2**20, 2**30
_SECONDS_EACH_WAY = 5.0
_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeFolder:
    """A folder for NVMe offload that exists and can be written."""

    file_system: str | None
    """Type of the file system; None where the kernel does not show it."""
    caveat: str | None
    """Why it is not a local NVMe disk, as far as the type of the file system shows."""


def check_folder(path: Path) -> NvmeFolder:
    """Checks the folder for swapping, and removes swap files that ended runs left in it.

    Raises PreflightError where it is missing or not writable.
    """
    if not path.is_dir():
        raise PreflightError(f"--nvme-path {path} is not a folder", remedy="create it on the NVMe disk")
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise PreflightError(
            f"--nvme-path {path} cannot be written: {error.strerror}", remedy="give a folder that you may write to"
        ) from None
    remove_abandoned_swap(path)
    kind = file_system(path)
    caveat = None
    if kind in _NOT_A_DISK:
        caveat = f"--nvme-path is {_NOT_A_DISK[kind]} ({kind}), not an NVMe disk"
    elif kind is not None and kind.startswith(_NETWORK):
        caveat = f"--nvme-path is on a network or shared file system ({kind}), not a local NVMe disk"
    return NvmeFolder(file_system=kind, caveat=caveat)


def lack_of_space(path: Path, choice: ResolvedModel) -> str | None:
    """Why rows that swap to ``path`` cannot run, with the remedy; None where there is room, or the need is unknown."""
    free = shutil.disk_usage(path).free
    need = max(swap_bytes(choice), _LEAST_SWAP_BYTES)
    if free >= need:
        return None
    return (
        f"--nvme-path {path} has {format_bytes(free)} free, and swapping {choice.name} needs about "
        f"{format_bytes(need)}; free some space, or give another disk"
    )


def swap_bytes(choice: ResolvedModel) -> int:
    """Bytes on disk while training with NVMe offload; 0 where the number of parameters is unknown."""
    return SWAP_BYTES_PER_PARAMETER * choice.facts.parameters if choice.facts is not None else 0


def file_system(path: Path) -> str | None:
    """The type of the file system that holds ``path`` (/proc/self/mountinfo, proc(5))."""
    target = str(path.resolve())
    best, kind = "", None
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount = fields.split()[4].replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, rest.split()[0]
    return kind


def check(machine: SystemAccess, path: Path, folder: NvmeFolder | None = None) -> Iterator[Finding]:
    """All but the speed. ``folder``: of :func:`check_folder`, where it has been called already.

    Raises PreflightError where the folder cannot be used at all.
    """
    if path.exists() and not path.is_dir():
        raise PreflightError(f"--nvme-path {path} is a file, not a folder", remedy="give a folder on the NVMe disk")
    folder = check_folder(path) if folder is None else folder
    kind = folder.file_system
    if folder.caveat is not None:
        yield warning("NVMe path", folder.caveat, "give a folder on a local NVMe disk")
    elif kind is None:
        yield unreadable("NVMe path", "/proc/self/mountinfo does not tell the file system")
    else:
        yield ok("NVMe path", f"{path}, {kind}, can be written")
    yield from one_by_one(
        {
            "NVMe space": lambda: _space(path),
            "NVMe disk": lambda: _device(machine, path),
            "direct I/O": lambda: _direct(path),
        }
    )


def _space(path: Path) -> Finding:
    free = shutil.disk_usage(path).free
    parameters = free // SWAP_BYTES_PER_PARAMETER
    text = f"{format_bytes(free)} free: room for a model of {format_millions(parameters)} parameters"
    if parameters < 10**9:
        return warning("NVMe space", text, "free some space: NVMe offload is for models that fit nowhere else")
    return ok("NVMe space", text)


def _device(machine: SystemAccess, path: Path) -> Finding:
    """The disks below the folder, as far as the kernel shows them under /sys."""
    number = path.stat().st_dev
    entry = machine.root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        return unreadable("NVMe disk", "this file system shows no block device")
    device = entry.resolve()
    disk = device.parent if (device / "partition").exists() else device
    members = sorted(member.name for member in disk.glob("slaves/*")) or [disk.name]
    rotational = (read_text(disk / "queue/rotational") or "").strip()
    text = disk.name if members == [disk.name] else f"{disk.name} of {', '.join(members)}"
    if all(name.startswith("nvme") for name in members):
        return ok("NVMe disk", text)
    remedy = "offload to a local NVMe disk, or read the figures as this disk's"
    if rotational == "1":
        return warning("NVMe disk", f"{text} is rotational, or a virtual disk that says so", remedy)
    return warning("NVMe disk", f"{text} is no NVMe disk" + ("" if rotational == "0" else ", or hides it"), remedy)


def _direct(path: Path) -> Finding:
    """Whether the file system takes O_DIRECT, with which DeepSpeed opens every swap file (csrc/aio)."""
    try:
        _write_directly(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return problem(
                "direct I/O", "could not be tried: the disk is full", "free some space, or give another disk"
            )
        text = f"files cannot be opened and written with O_DIRECT ({error.strerror}), and DeepSpeed does nothing else"
        return problem("direct I/O", text, "give a folder on a local disk with ext4 or xfs")
    return ok("direct I/O", "works")


def _write_directly(path: Path) -> None:
    with tempfile.TemporaryFile(dir=path) as file, mmap.mmap(-1, _ALIGNMENT_BYTES) as page:
        descriptor = os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_DIRECT)
        try:
            os.write(descriptor, page)
        finally:
            os.close(descriptor)


def check_speed(path: Path, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Starts the measurement; ``variables`` name the cache in which the async_io op is built."""
    free = shutil.disk_usage(path).free
    size = min(_MOST_BYTES, free // 4)
    if size < _LEAST_BYTES:
        yield warning(
            "NVMe speed", f"not measured: {format_bytes(free)} free is too little to write", "free some space"
        )
        return
    aio = configured_aio(path)
    settings = json.dumps({**aio, "bytes": size, "seconds": _SECONDS_EACH_WAY})
    reply = run_worker_tool("disk_speed", str(path.resolve()), settings, environment=variables)
    yield judged(reply.last_object("the measurement"), aio)


def configured_aio(path: Path) -> dict[str, Any]:
    """The ``aio`` block that the nvme strategy trains with."""
    config = deepspeed_config.complete_config(
        deepspeed_config.base_config(strategies.offload_strategy("nvme"), 1),
        Workload(model="any", model_source="preset"),
        Placement(accelerator="cpu", nvme_path=str(path)),
        torch_adam=True,
        largest_parameter=None,
    )
    return dict(config["aio"])


def judged(answer: Mapping[str, Any], aio: Mapping[str, Any]) -> Finding:
    """What the child has measured, as a finding."""
    if "error" in answer:
        return problem("NVMe speed", f"DeepSpeed cannot use the folder: {answer['error']}", "give another folder")
    read, write = float(answer["read_bytes_per_second"]), float(answer["write_bytes_per_second"])
    text = (
        f"reads {format_bytes(read)}/s, writes {format_bytes(write)}/s in sequence "
        f"(DeepSpeed's async I/O, blocks of {format_bytes(aio['block_size'])}, queue depth {aio['queue_depth']}, "
        f"{aio['intra_op_parallelism']} thread(s), {format_bytes(answer['bytes'])})"
    )
    if answer.get("from_disk") is False:
        remedy = "do not trust the reading speed; give a folder on a local disk with ext4 or xfs"
        return warning("NVMe speed", f"{text}; part of it was read from a cache, not from the disk", remedy)
    slow = [way for way, speed in (("reading", read), ("writing", write)) if speed < _SLOW_BYTES_PER_SECOND]
    if slow:
        remedy = (
            "NVMe rows will wait for the disk: use a faster one or several as RAID 0, or try --set aio.queue_depth=32"
        )
        return warning(
            "NVMe speed", f"{text}; {' and '.join(slow)} below {format_bytes(_SLOW_BYTES_PER_SECOND)}/s", remedy
        )
    return ok("NVMe speed", text)
