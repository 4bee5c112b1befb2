"""Folders for NVMe offload and checkpoints: real ones on this machine, and disks made up under /sys."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_bench.config.identity import work_key
from ds_bench.config.spec import Inspection
from ds_bench.doctor import disk
from ds_bench.doctor.findings import Finding, SystemAccess, run_check
from ds_bench.errors import PreflightError
from ds_bench.prediction.model_profile import find_profile
from ds_bench.system.files import file_system
from tests.support import fakes

MIB, GB = 2**20, 2**30


def looked(path: Path, root: Path = Path("/")) -> dict[str, Finding]:
    found = run_check("NVMe path", lambda: disk.check_nvme(SystemAccess(root=root), path), failed_level="problem")
    return {each.name: each for each in found}


# ------------------------------------------------------------------ the folder


def test_real_folder_on_a_disk_can_be_used_if_it_takes_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary folders of this machine are in memory")
    found = looked(tmp_path)
    assert "problem" not in {each.level for each in found.values()}
    assert found["direct I/O"].level == "ok"
    assert list(tmp_path.iterdir()) == []

    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(disk.mmap, "mmap", refuse)
    refused = looked(tmp_path)["direct I/O"]
    assert (refused.level, "O_DIRECT" in refused.text) == ("problem", True)


def test_folder_that_cannot_be_used_is_one_problem_and_one_in_memory_disqualifies_a_row(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # Not even root may write to /proc/self.
    for path in (tmp_path / "file", tmp_path / "missing", Path("/proc/self"), Path("a\0b")):
        assert [each.level for each in looked(path).values()] == ["problem"], path
    (found,) = looked(tmp_path / "file").values()
    assert found.remedy == "give a folder on the NVMe disk"  # to create one there would fail
    found = looked(Path("/dev/shm"))["NVMe path"]
    assert (found.level, "tmpfs" in found.text) == ("warning", True)
    caveat = disk.check_nvme_folder(Path("/dev/shm")).caveat
    assert caveat is not None
    assert caveat.kind.disqualifies


def test_full_disk_is_a_finding_is_not_measured_and_stays_clean(small_disk: Path) -> None:
    assert looked(small_disk)["NVMe space"].level == "warning"
    (speed,) = disk.check_speed(small_disk, {})
    assert (speed.level, "12.00 MB" in speed.text) == ("warning", True)
    with (small_disk / "all").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize)
    assert looked(small_disk)["direct I/O"].level == "problem"
    assert [path.name for path in small_disk.iterdir()] == ["all"]


# ------------------------------------------------------------------ the device and its speed


def device(folder: Path, name: str, rotational: str = "0", partition: str = "", members: tuple[str, ...] = ()) -> Any:
    """Level and text for a block device of the folder's number in a /sys of its own."""
    root = folder / "root"
    made = root / "devices" / name
    (made / "queue").mkdir(parents=True)
    (made / "queue/rotational").write_text(rotational)
    for member in members:
        (made / "slaves" / member).mkdir(parents=True)
    target = made / partition
    target.mkdir(exist_ok=True)
    if partition:
        (target / "partition").write_text("1")
    number = folder.stat().st_dev
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    found = looked(folder, root)["NVMe disk"]
    shutil.rmtree(root)
    return found.level, found.text


def test_disk_of_a_folder_is_nvme_or_a_warning(tmp_path: Path) -> None:
    assert device(tmp_path, "nvme0n1", partition="nvme0n1p2") == ("ok", "nvme0n1")
    assert device(tmp_path, "md0", members=("nvme1n1", "nvme0n1")) == ("ok", "md0 (nvme0n1, nvme1n1)")
    assert device(tmp_path, "md0", members=("nvme1n1", "sda"))[0] == "warning"
    assert device(tmp_path, "sda", "1") == ("warning", "sda is a rotational or virtual disk")
    assert device(tmp_path, "sda") == ("warning", "sda is not an NVMe device")
    assert "could not be read" in looked(tmp_path, tmp_path)["NVMe disk"].text


def judged(read: float = 7, write: float = 6, **answer: Any) -> Finding:
    base = {"bytes": GB, "write_bytes_per_second": write * GB, "read_bytes_per_second": read * GB, "from_disk": True}
    aio = {"block_size": MIB, "queue_depth": 8, "intra_op_parallelism": 1}
    return disk.speed_finding({**base, **answer}, aio)


def test_speed_below_five_gb_a_second_or_from_a_cache_is_a_warning() -> None:
    assert judged().level == judged(from_disk=None).level == "ok"
    assert "reads 7.00 GB/s, writes 6.00 GB/s" in judged().text
    assert "blocks of 1.00 MB, queue depth 8" in judged().text
    for read, write, slow in ((4.99, 5, "reading"), (5, 4.99, "writing"), (1, 1, "reading and writing")):
        found = judged(read, write)
        assert (found.level, found.text.endswith(f"; {slow} below 5.00 GB/s")) == ("warning", True)
    cached, failed = judged(from_disk=False), judged(error="RuntimeError: no space")
    assert (cached.level, "cache" in cached.text) == ("warning", True)
    assert (failed.level, "no space" in failed.text) == ("problem", True)


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(("name", "each"), [("cpu_optimizer", 14), ("nvme", 26)])
def test_disk_without_room_for_a_checkpoint_is_refused_with_the_bytes_needed(
    name: str, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = find_profile(fakes.preset("tiny"), 32, accelerator="cpu")
    asked = Inspection(checkpoint=True, checkpoint_path=str(tmp_path / "made" / "later"))
    trials = [fakes.trial(fakes.offload(name), on=fakes.placement(nvme_path="/d"), inspection=asked)]
    need = each * profile.parameters
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=need))
    disk.check_checkpoint_folder(None, [profile], trials)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=need - 1))
    with pytest.raises(PreflightError, match=f"{each} bytes each"):
        disk.check_checkpoint_folder(None, [profile], trials)
    disk.check_checkpoint_folder(None, [], trials)  # a model of unknown size
    moved = replace(trials[0], inspection=replace(asked, checkpoint_path="/elsewhere"))
    assert work_key(moved) == work_key(trials[0]), "the folder is not part of the work"
    with pytest.raises(PreflightError, match="is not a folder"):
        disk.check_checkpoint_folder(str(tmp_path / "missing"), [], trials)
