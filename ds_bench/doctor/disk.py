"""Checks the folders for NVMe offload (disk, direct I/O, space, and speed in a short test) and for checkpoints."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import deepspeed_config, strategies
from ..config.caveat_texts import Caveat, CaveatKind, note
from ..config.spec import Placement, Trial, Workload
from ..errors import PreflightError
from ..launch.scratch import remove_abandoned
from ..models.lookup import ResolvedModel
from ..prediction.model_profile import ModelProfile
from ..system import files
from ..system.files import IN_MEMORY, NETWORK, file_system
from ..system.helper_programs import run_tool
from ..system.host_resources import read_text
from ..units import format_bytes, format_items, format_with_suffix, from_gb
from .findings import Finding, SystemAccess, ok, problem, run_checks, unreadable, warning

SWAP_BYTES_PER_PARAMETER = 18
"""On disk while training: fp32 weight, gradient and two moments (16) and the 16-bit weight (2)."""
_CHECKPOINT_BYTES = 14
"""Per parameter of a checkpoint: the 16-bit weight, its fp32 master and Adam's two moments."""
_SWAPPED_BYTES = 12
"""Added if the optimizer is on a disk: DeepSpeed copies its swap files into the checkpoint."""
_SLOW_BYTES_PER_SECOND = from_gb(5.0)
_MIN_TEST_BYTES, _MAX_TEST_BYTES = 64 * 2**20, 2**30
_SECONDS_EACH_WAY = 5.0
_PAGE_BYTES = 4096
"""A length that every file system accepts for O_DIRECT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeFolder:
    """A folder for NVMe offload that exists and is writable."""

    file_system: str | None
    """Type of the file system; None if the kernel does not show it."""
    caveat: Caveat | None
    """Why it is not a local NVMe disk; None if the type of the file system does not show that."""


def check_nvme_folder(path: Path) -> NvmeFolder:
    """Check the folder that rows swap to, and remove swap files that dead runs left in it.

    Raises PreflightError if it is missing or not writable.
    """
    if not path.is_dir():
        if path.exists():
            raise PreflightError(f"--nvme-path {path} is a file, not a folder", remedy="give a folder on the NVMe disk")
        raise PreflightError(f"--nvme-path {path} does not exist", remedy="create it on the NVMe disk")
    files.require_writable(path, "--nvme-path")
    remove_abandoned(path)
    kind = file_system(path)
    caveat = None
    if kind in IN_MEMORY:
        caveat = Caveat(CaveatKind.NVME_IN_MEMORY, {"file_system": kind})
    elif kind == "overlay":
        caveat = note("--nvme-path is on a container's overlay file system, not an NVMe disk")
    elif kind is not None and kind.startswith(NETWORK):
        caveat = note(f"--nvme-path is on a network or shared file system ({kind}), not a local NVMe disk")
    return NvmeFolder(file_system=kind, caveat=caveat)


def lack_of_space(path: Path, model: ResolvedModel) -> str | None:
    """Return why rows that swap to ``path`` cannot run, with the remedy; None if there is room, as far as is known."""
    free = shutil.disk_usage(path).free
    parameters = 0 if model.facts is None else model.facts.parameters
    need = max(SWAP_BYTES_PER_PARAMETER * parameters, files.FULL_DISK_BYTES)
    if free >= need:
        return None
    return (
        f"--nvme-path {path} has {format_bytes(free)} free, and swapping {model.name} needs about "
        f"{format_bytes(need)}; free some space, or give another disk"
    )


def check_nvme(system: SystemAccess, path: Path, folder: NvmeFolder | None = None) -> Iterator[Finding]:
    """Yield the findings for everything but the speed.

    ``folder``: the result of :func:`check_nvme_folder`, if called already. Raises PreflightError if the folder cannot
    be used at all.
    """
    folder = check_nvme_folder(path) if folder is None else folder
    if folder.caveat is not None:
        yield warning("NVMe path", folder.caveat.text, "give a folder on a local NVMe disk")
    elif folder.file_system is None:
        yield unreadable("NVMe path", "the kernel does not show the file system")
    else:
        yield ok("NVMe path", f"{path}, {folder.file_system}, writable")
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
    text = f"{format_bytes(free)} free: room for a model of {format_with_suffix(parameters)} parameters"
    if parameters < 10**9:
        return warning("NVMe space", text, "free some space: NVMe offload is for models that fit nowhere else")
    return ok("NVMe space", text)


def _check_device(system: SystemAccess, path: Path) -> Finding:
    """The disks that hold the folder, as far as the kernel shows them under /sys."""
    number = path.stat().st_dev
    entry = system.root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        return unreadable("NVMe disk", "no block device is known for this file system")
    device = entry.resolve()
    # In /sys a partition has neither ``slaves`` nor ``queue``; the folder above it, the whole disk's, has both.
    disk = device.parent if (device / "partition").exists() else device
    # The disks of an array or of a logical volume.
    members = sorted(member.name for member in disk.glob("slaves/*")) or [disk.name]
    text = disk.name if members == [disk.name] else f"{disk.name} ({', '.join(members)})"
    if all(name.startswith("nvme") for name in members):
        return ok("NVMe disk", text)
    kind = {"1": "is a rotational or virtual disk", "0": "is not an NVMe device"}
    rotational = (read_text(disk / "queue/rotational") or "").strip()
    text = f"{text} {kind.get(rotational, 'does not look like an NVMe device')}"
    return warning(
        "NVMe disk", text, "offload to a local NVMe disk, or keep in mind that the figures are for this disk"
    )


def _check_direct_io(path: Path) -> Finding:
    """Whether files can be opened with O_DIRECT, as DeepSpeed opens every swap file (csrc/aio)."""
    try:
        # A page from mmap has the alignment that O_DIRECT requires of a buffer.
        with tempfile.TemporaryFile(dir=path) as file, mmap.mmap(-1, _PAGE_BYTES) as page:
            # The file has no name, so that nothing is left behind. As ``tempfile`` cannot create it with O_DIRECT, it
            # is opened a second time through its descriptor.
            descriptor = os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_DIRECT)
            try:
                os.write(descriptor, page)
            finally:
                os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return problem("direct I/O", "not tried: the disk is full", "free some space, or give another disk")
        text = f"O_DIRECT does not work here ({error.strerror}); DeepSpeed requires it"
        return problem("direct I/O", text, "give a folder on a local disk with ext4 or xfs")
    return ok("direct I/O", "works")


def check_speed(path: Path, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Measure the disk with DeepSpeed's own op.

    ``variables``: environment variables of the measuring process; one of them names the folder of the built op.
    """
    free = shutil.disk_usage(path).free
    size = min(_MAX_TEST_BYTES, free // 4)
    if size < _MIN_TEST_BYTES:
        yield warning("NVMe speed", f"not measured: only {format_bytes(free)} free", "free some space")
        return
    # Only the ``aio`` block is used, which depends neither on the model nor on the accelerator.
    config = deepspeed_config.complete_config(
        deepspeed_config.base_config(strategies.offload_strategy("nvme"), 1),
        Workload(model="any", model_source="preset"),
        Placement(accelerator="cpu", nvme_path=str(path)),
        torch_adam=True,
        largest_parameter=None,
    )
    settings = json.dumps({**config["aio"], "bytes": size, "seconds": _SECONDS_EACH_WAY})
    reply = run_tool("worker.disk_speed", str(path.resolve()), settings, environment=variables)
    yield speed_finding(reply.last_object("the measurement"), config["aio"])


def speed_finding(measured: Mapping[str, Any], aio: Mapping[str, Any]) -> Finding:
    """Return the finding for what ``worker.disk_speed`` printed, measured with the settings ``aio``."""
    name = "NVMe speed"
    if "error" in measured:
        return problem(name, f"DeepSpeed cannot use the folder: {measured['error']}", "give another folder")
    read, write = float(measured["read_bytes_per_second"]), float(measured["write_bytes_per_second"])
    text = (
        f"reads {format_bytes(read)}/s, writes {format_bytes(write)}/s sequentially "
        f"(DeepSpeed's async I/O, blocks of {format_bytes(aio['block_size'])}, queue depth {aio['queue_depth']}, "
        f"{format_items(aio['intra_op_parallelism'], 'thread')}, {format_bytes(measured['bytes'])})"
    )
    if measured.get("from_disk") is False:
        remedy = "do not trust the read speed; give a folder on a local disk with ext4 or xfs"
        return warning(name, f"{text}; part of the data was read from a cache, not from the disk", remedy)
    slow = [way for way, speed in (("reading", read), ("writing", write)) if speed < _SLOW_BYTES_PER_SECOND]
    if not slow:
        return ok(name, text)
    text += f"; {' and '.join(slow)} below {format_bytes(_SLOW_BYTES_PER_SECOND)}/s"
    remedy = "NVMe rows will wait for the disk: use a faster one or several in RAID 0, or try --set aio.queue_depth=32"
    return warning(name, text, remedy)


def require_checkpoint_folder(given: str | None, trials: Sequence[Trial]) -> Path:
    """Return the folder of the trials' checkpoints, or the nearest existing one above it.

    ``given``: as the user named it; None for the folder of the results. Raises PreflightError if it is not writable.
    """
    if given is not None and not Path(given).is_dir():
        raise PreflightError(f"--checkpoint-path {given} is not a folder", remedy="create it, or give another")
    # The folder of the results is made later.
    path = files.nearest_existing(Path(given or trials[0].inspection.checkpoint_path or "."))
    files.require_writable(path, "--checkpoint-path")
    return path


def check_checkpoint_folder(given: str | None, profiles: Sequence[ModelProfile], trials: Sequence[Trial]) -> None:
    """Remove checkpoints that dead runs left, and check that the largest model's would fit. Raises PreflightError.

    ``given``: as for :func:`require_checkpoint_folder`.
    """
    path = require_checkpoint_folder(given, trials)
    remove_abandoned(path)
    if not profiles:  # the models' sizes are not known
        return
    parameters, name = max((each.all_parameters, each.name) for each in profiles)
    swaps = any(trial.configuration.offload_optimizer == "nvme" for trial in trials)
    bytes_each = _CHECKPOINT_BYTES + _SWAPPED_BYTES * swaps
    free, need = shutil.disk_usage(path).free, bytes_each * parameters
    if free < need:
        raise PreflightError(
            f"{path} has {format_bytes(free)} free, and a checkpoint of {name} takes about {format_bytes(need)} "
            f"({format_with_suffix(parameters)} parameters, {bytes_each} bytes each)",
            remedy="free some space, or give a folder on another disk with --checkpoint-path",
        )
