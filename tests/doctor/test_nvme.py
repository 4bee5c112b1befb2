"""The folder for NVMe offload: real ones on this machine, and disks made up under /sys."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_bench.doctor import nvme
from ds_bench.doctor.findings import Finding, SystemAccess, run_check

MIB, GB = 2**20, 2**30
AIO = {"block_size": MIB, "queue_depth": 8, "intra_op_parallelism": 1}


def looked(path: Path, root: Path = Path("/")) -> dict[str, Finding]:
    found = run_check("NVMe path", lambda: nvme.check(SystemAccess(root=root), path), failed_level="problem")
    return {each.name: each for each in found}


def made_up(root: Path, path: Path, name: str, *, partition: str = "", rotational: str = "", **slaves: str) -> None:
    """A block device of the folder's number in a /sys of its own."""
    device = root / "devices" / name
    (device / "queue").mkdir(parents=True)
    if rotational:
        (device / "queue/rotational").write_text(rotational)
    for slave in slaves.values():
        (device / "slaves" / slave).mkdir(parents=True)
    target = device / partition if partition else device
    target.mkdir(exist_ok=True)
    if partition:
        (target / "partition").write_text("1")
    number = path.stat().st_dev
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(target)


# ------------------------------------------------------------------ the folder


def test_a_real_folder_on_a_disk_can_be_used(tmp_path: Path) -> None:
    if nvme.file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary folders of this machine lie in memory")
    found = looked(tmp_path)
    assert "problem" not in {each.level for each in found.values()}
    assert found["direct I/O"].level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (found,) = looked(tmp_path / "file").values()
    assert found.level == "problem"
    assert "not a folder" in found.text
    assert found.remedy == "give a folder on the NVMe disk"  # to create one there would fail


def test_a_folder_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    assert [each.level for each in looked(tmp_path / "missing").values()] == ["problem"]


def test_a_folder_that_may_not_be_written_is_a_problem() -> None:
    (found,) = looked(Path("/proc/self")).values()  # not even root may write there
    assert found.level == "problem"
    assert "cannot be written" in found.text


def test_a_name_with_a_null_byte_is_a_problem_and_no_traceback() -> None:
    assert [each.level for each in looked(Path("a\0b")).values()] == ["problem"]


def test_memory_passed_off_as_a_disk_is_said() -> None:
    found = looked(Path("/dev/shm"))
    assert found["NVMe path"].level == "warning"
    assert "tmpfs" in found["NVMe path"].text


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_twelve_mib_are_told_as_little_and_not_measured(small: Path) -> None:
    assert looked(small)["NVMe space"].level == "warning"
    (speed,) = nvme.check_speed(small, {})
    assert speed.text == "not measured: 12.00 MB free is too little to write"
    assert list(small.iterdir()) == []


def test_a_full_disk_is_a_finding_and_leaves_nothing_behind(small: Path) -> None:
    with (small / "all").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(small).f_bavail * os.statvfs(small).f_frsize)
    found = looked(small)
    assert found["NVMe space"].level == "warning"
    assert found["direct I/O"].level == "problem"
    assert os.listdir(small) == ["all"]  # noqa: PTH208


def test_a_file_system_without_direct_io_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(nvme, "_write_directly", refuse)
    found = looked(tmp_path)["direct I/O"]
    assert found.level == "problem"
    assert "O_DIRECT" in found.text


# ------------------------------------------------------------------ the device


def device(root: Path, path: Path) -> Finding:
    return looked(path, root)["NVMe disk"]


def test_a_partition_of_an_nvme_disk_is_that_disk(tmp_path: Path) -> None:
    made_up(tmp_path / "root", tmp_path, "nvme0n1", partition="nvme0n1p2", rotational="0")
    found = device(tmp_path / "root", tmp_path)
    assert (found.level, found.text) == ("ok", "nvme0n1")


def test_an_array_of_nvme_disks_is_nvme(tmp_path: Path) -> None:
    made_up(tmp_path / "root", tmp_path, "md0", rotational="0", a="nvme1n1", b="nvme0n1")
    found = device(tmp_path / "root", tmp_path)
    assert (found.level, found.text) == ("ok", "md0 of nvme0n1, nvme1n1")


def test_an_array_with_one_disk_of_another_kind_is_not(tmp_path: Path) -> None:
    made_up(tmp_path / "root", tmp_path, "md0", rotational="0", a="nvme1n1", b="sda")
    assert device(tmp_path / "root", tmp_path).level == "warning"


@pytest.mark.parametrize(("rotational", "said"), [("1", "rotational"), ("0", "is no NVMe disk"), ("", "or hides it")])
def test_another_disk_is_a_warning_whatever_it_says_of_itself(tmp_path: Path, rotational: str, said: str) -> None:
    made_up(tmp_path / "root", tmp_path, "sda", rotational=rotational)
    found = device(tmp_path / "root", tmp_path)
    assert found.level == "warning"
    assert said in found.text


def test_a_file_system_that_shows_no_device_cannot_be_read(tmp_path: Path) -> None:
    assert "could not be read" in device(tmp_path / "root", tmp_path).text


# ------------------------------------------------------------------ the verdict on a speed


def judged(**answer: Any) -> Finding:
    base = {"bytes": GB, "write_bytes_per_second": 6 * GB, "read_bytes_per_second": 7 * GB, "from_disk": True}
    return nvme.speed_finding({**base, **answer}, AIO)


def test_a_fast_disk_is_ok_and_its_figures_have_a_unit() -> None:
    found = judged()
    assert found.level == "ok"
    assert "reads 7.00 GB/s, writes 6.00 GB/s" in found.text
    assert "blocks of 1.00 MB, queue depth 8" in found.text


def test_below_five_gb_a_second_is_said_of_the_way_it_is_true_of(subtests: pytest.Subtests) -> None:
    for read, write, said in (
        (4.99, 5.0, "; reading below 5.00 GB/s"),
        (5.0, 4.99, "; writing below 5.00 GB/s"),
        (1.0, 1.0, "; reading and writing below 5.00 GB/s"),
    ):
        with subtests.test(read=read):
            found = judged(read_bytes_per_second=read * GB, write_bytes_per_second=write * GB)
            assert found.level == "warning"
            assert found.text.endswith(said)


def test_a_read_that_came_from_a_cache_is_no_speed_of_the_disk() -> None:
    found = judged(from_disk=False)
    assert found.level == "warning"
    assert "cache" in found.text


def test_where_the_kernel_does_not_tell_nothing_is_claimed_of_a_cache() -> None:
    assert judged(from_disk=None).level == "ok"


def test_an_error_of_the_child_is_a_problem_with_its_words() -> None:
    found = nvme.speed_finding({"error": "RuntimeError: no space"}, AIO)
    assert found.level == "problem"
    assert "no space" in found.text


def test_what_is_measured_is_what_the_nvme_strategy_trains_with(tmp_path: Path) -> None:
    assert nvme.configured_aio(tmp_path) == {
        "block_size": 1048576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
    }


@pytest.mark.parametrize(
    ("program", "said"),
    [("print('nonsense')", "ended with code 0"), ("print('[1]')", "code 0"), ("raise SystemExit(3)", "code 3")],
)
def test_a_child_that_answers_nonsense_or_dies_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    (found,) = nvme.check_speed(tmp_path, {"PYTHONPATH": ""})
    assert found.level == "problem"
    assert said in found.text
