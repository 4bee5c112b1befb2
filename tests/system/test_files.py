"""Full disks, and files and numbers that are not what they should be: nothing finished is lost, nothing hangs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_bench import cli
from ds_bench.cli import commands
from ds_bench.config.spec import Trial
from ds_bench.launch.outcome import Evidence, determine_outcome
from ds_bench.launch.trial_watcher import Limits, watch
from ds_bench.records.json_files import append_line
from ds_bench.records.schema import TrialRecord
from ds_bench.system.files import disk_is_full
from tests.support import fakes
from tests.support.fakes import FakeLauncher
from tests.support.mounts import mounted
from tests.support.real_trials import ROOT
from tests.support.scripted_run import ScriptedRun

DEEP = '{"a":' * 20_000


def make(path: Path, kind: str) -> None:
    """Something else in place of a file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(3 * 2**30)
    elif kind != "missing":
        path.write_bytes({"empty": b"", "nul": b"\0" * 100, "latin": b"\xff\xfe{}", "deep": DEEP.encode()}[kind])


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "large", "deep"])
def test_what_a_rank_puts_in_place_of_its_files_ends_in_a_row_in_time(tmp_path: Path, kind: str) -> None:
    """Every file that the parent reads while a trial runs and after it."""
    start = time.monotonic()
    for name in ("rank0.json", "rank0.beat", "exits.jsonl", "rank1.measured.json"):
        make(tmp_path / name, kind)
    limits = Limits(timeout_seconds=1, stall_timeout_seconds=1, failure_grace_seconds=0.1, exit_grace_seconds=0.1)
    ending, _ = watch(tmp_path, 2, limits, lambda _seconds: False, lambda _progress: None)
    outcome = determine_outcome(Evidence(folder=tmp_path, world_size=2, ending=ending, limits=limits)).outcome
    assert outcome.status in ("Crashed", "Timeout")
    assert time.monotonic() - start < 60


KINDS = ("pipe", "folder", "device", "loop", "large", "missing", "empty", "nul", "latin", "deep")
HOSTFILES = {
    "slots": f"host slots={'9' * 5000}\n",
    "arabic": "host slots=٣\n",
    "option": "-oProxyCommand=touch${IFS}hit slots=1\n",
}
NUMBERS = ("nan", "inf", "-inf", "1e300", "-1", "0", "", " ", "٣", "9" * 5000, "0x10", "1" + "0" * 30)
OF_RUNS = ("--num-steps", "--batch-size", "--grad-accum", "--seq-length", "--num-gpus", "--repeats", "--timeout",
           "--stall-timeout", "--cpu-memory-limit", "--gpu-memory-limit", "--peak-tflops")  # fmt: skip
SCRIPT = ("zero", "--dry-run", "--model", "tiny")


def test_no_file_or_number_given_to_a_flag_is_waited_for_or_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ds_bench"])
    lines: list[tuple[str, ...]] = []
    for kind in KINDS:
        make(tmp_path / kind, kind)
        lines += [(*SCRIPT, flag, kind) for flag in ("--ds-config", "--hostfile", "--resume")]
        lines += [("report", kind), ("compare", kind, kind), ("baseline", "check", kind, "--baselines", kind)]
    for name, text in HOSTFILES.items():
        (tmp_path / name).write_text(text)
        lines.append((*SCRIPT, "--hostfile", name))
    of_files = len(lines)
    lines += [(*SCRIPT, flag, number) for flag in OF_RUNS for number in NUMBERS]
    lines += [("plan", flag, number) for flag in ("--num-gpus", "--host-memory", "--gpu") for number in NUMBERS]
    lines += [("baseline", "save", "x", "--tolerance", number) for number in NUMBERS]
    for place, line in enumerate(lines):
        try:
            is_script = line[0] == "zero"
            code = cli.main("zero", fakes.make_config, line[1:]) if is_script else commands.main(line)
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        err = capsys.readouterr().err
        assert code in ((2,) if place < of_files else (0, 1, 2)), (line, code, err)
        assert code != 2 or (err.count("\n") == 1 and err.startswith("ds-compare: ")), (line, err)


# ------------------------------------------------------------------ a full disk


@pytest.mark.parametrize("left", [0, 4096, 12288])
def test_line_that_a_full_disk_takes_in_part_leaves_the_file_as_it_was(small_disk: Path, left: int) -> None:
    path, filler, facts = small_disk / "records.jsonl", small_disk / "filler", os.statvfs(small_disk)
    append_line(path, {"n": 0})
    filler.write_bytes(b"x" * ((facts.f_bavail - 1) * facts.f_frsize - left))
    with pytest.raises(OSError, match=r"No space left on device.*records\.jsonl"):
        append_line(path, {"n": 1, "text": "y" * 40_000})
    assert path.read_text() == '{"n": 0}\n'
    filler.unlink()
    append_line(path, {"n": 2})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 2]


def test_disk_is_full_only_without_room_or_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (str(tmp_path), None, str(tmp_path / "gone"))
    assert [disk_is_full(folder) for folder in folders] == [False] * 3
    for number in (errno.ENOSPC, errno.EDQUOT):

        def refuse(*_: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        assert disk_is_full(str(tmp_path))


@pytest.mark.parametrize(("options", "code"), [("size=64k", 2), ("nr_inodes=2", 2), ("nr_inodes=4", 1)])
def test_full_disk_at_the_first_file_is_one_line_with_the_remedy(
    options: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted(tmp_path / "disk", options) as disk:
        scripted = ScriptedRun(disk, monkeypatch)
        assert scripted.run() == code
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "No space left on device" in line
        assert "Free space or inodes on that disk, or give a folder on another one" in line
        assert scripted.launcher.launched == []


# ------------------------------------------------------------------ folders that are removed


def test_removed_working_folder_is_one_line_with_the_remedy(
    tmp_path: Path, scripted: ScriptedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert [scripted.run(), commands.main(["models"])] == [2, 2]
    lines = [line.partition(": ")[2] for line in capsys.readouterr().err.strip().splitlines()]
    assert lines == ["the current folder no longer exists. Go to one that does"] * 2


@pytest.mark.parametrize("part", ["", "runs"])
def test_output_folder_that_is_removed_during_a_run_ends_it_in_one_line(
    part: str, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def remove(trial: Trial) -> TrialRecord:
        shutil.rmtree(scripted.output / part)
        return fakes.success(trial)

    assert scripted.run("--stages", "0", "1", "2", script=FakeLauncher("Success", remove)) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert "Give a folder that you can write to, and leave it in place while this runs" in line
    assert "ZeRO-0 " in printed.out  # what had finished is shown
    assert len(scripted.launcher.launched) == 2


def test_leader_whose_trial_folder_was_removed_ends_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ds_bench.launch.leader", str(tmp_path / "removed"), '["true"]', "/"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
