"""Full disks and files of other programs: nothing finished is lost, nothing hangs, no traceback."""

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
from ds_bench.records.rank_files import HeartbeatWriter, read_beat, read_exits
from ds_bench.records.schema import TrialRecord
from ds_bench.system.files import disk_is_full
from tests.support import fakes
from tests.support.fakes import FakeLauncher
from tests.support.mounts import mounted
from tests.support.real_trials import ROOT
from tests.support.scripted_run import ScriptedRun

PARENT_SECONDS = 20
"""No file of a rank is worth more of the parent's time."""


# ------------------------------------------------------------------ a disk that is full


def fill(folder: Path, leave_bytes: int) -> Path:
    facts, filler = os.statvfs(folder), folder / "filler"
    filler.write_bytes(b"x" * (facts.f_bavail * facts.f_frsize - leave_bytes))
    return filler


@pytest.mark.parametrize("left", [0, 4096, 12288])
def test_a_line_that_a_full_disk_takes_in_part_leaves_the_file_as_it_was(small_disk: Path, left: int) -> None:
    path = small_disk / "records.jsonl"
    append_line(path, {"n": 0})
    filler = fill(small_disk, left)
    with pytest.raises(OSError, match=r"No space left on device.*records\.jsonl"):
        append_line(path, {"n": 1, "text": "y" * 40_000})
    assert path.read_text() == '{"n": 0}\n'
    filler.unlink()
    append_line(path, {"n": 2})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 2]


# ------------------------------------------------------------------ what a rank writes

DEEP = "[" * 100_000
EXIT_LINES = (
    '{"rank": 0, "pid": 1, "code": 0, "signal": null, "time": "noon"}',
    '{"rank": "0", "pid": 1, "code": 0, "signal": null, "time": 1.0}',
    '{"rank": 0, "pid": 1, "code": 0, "signal": null, "time": NaN}',
    f'{{"rank": {DEEP}', "9" * 5000, "null", "[1]", "{}", '{"rank": 1}', '{"colour": "red"}', "", "\0",
)  # fmt: skip


def test_lines_of_exits_that_no_leader_wrote_are_left_out(tmp_path: Path) -> None:
    good = '{"rank": 1, "pid": 7, "code": 3, "signal": null, "time": 5.0}'
    (tmp_path / "exits.jsonl").write_text("\n".join([*EXIT_LINES, good, *EXIT_LINES]))
    assert [entry.pid for entry in read_exits(tmp_path)] == [7]


def test_a_beat_that_no_rank_wrote_is_none(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path, 0)
    beat = tmp_path / "rank0.beat"
    whole = beat.read_bytes()
    for other in (
        whole + b"x",
        whole[:16] + (2**40).to_bytes(8, "little") + whole[24:],
        whole[:16] + b"\xff" * 8 + whole[24:],
        whole[:8] + b"\xff" * 8 + whole[16:],
    ):
        beat.write_bytes(other)
        assert read_beat(tmp_path, 0) is None
    beat.write_bytes(whole)
    assert read_beat(tmp_path, 0) is not None


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "three gigabytes":
        with path.open("wb") as file:
            file.truncate(3 * 2**30)
    else:
        path.write_text(DEEP)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "three gigabytes", "deep nesting"])
def test_files_of_a_rank_that_are_none_end_in_a_row_in_time(tmp_path: Path, kind: str) -> None:
    """Every file that the parent reads while a trial runs and after it, replaced by the rank's own code."""
    start = time.monotonic()
    for name in ("rank0.json", "rank0.beat", "exits.jsonl", "rank1.measured.json"):
        replace(tmp_path / name, kind)
    limits = Limits(timeout_seconds=1, stall_timeout_seconds=1, failure_grace_seconds=0.1, exit_grace_seconds=0.1)
    ending, _ = watch(tmp_path, 2, limits, lambda _seconds: False, lambda _progress: None)
    outcome = determine_outcome(Evidence(folder=tmp_path, world_size=2, ending=ending, limits=limits)).outcome
    assert outcome.status in ("Crashed", "Timeout")
    assert time.monotonic() - start < PARENT_SECONDS


# ------------------------------------------------------------------ what a user gives


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Files that are none of what a flag asks for, by name."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "nul").write_bytes(b"\0" * 100)
    (tmp_path / "deep").write_text('{"a":' * 5000)
    (tmp_path / "digits").write_text("9" * 5000)
    (tmp_path / "slots").write_text(f"host slots={'9' * 5000}\n")
    (tmp_path / "arabic").write_text("host slots=٣\n")
    (tmp_path / "option").write_text("-oProxyCommand=touch${IFS}hit slots=1\n")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "latin").write_bytes(b"\xff\xfe{}")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(3 * 2**30)
    return tmp_path


FILES = ("pipe", "folder", "empty", "nul", "deep", "digits", "loop", "latin", "large", "missing", "/dev/zero", "a\nb")
NUMBERS = (
    "nan", "inf", "-inf", "1e300", "1e999", "-1", "0", "", " ", "٣", "9" * 5000, "0x10", "1_000_000e400",
    "1" + "0" * 30,
)  # fmt: skip
WHOLE = ("--num-steps", "--batch-size", "--grad-accum", "--seq-length", "--num-gpus", "--repeats")
PLAIN = ("--timeout", "--stall-timeout", "--cpu-memory-limit", "--gpu-memory-limit", "--peak-tflops")


def run_line(line: list[str]) -> int:
    if line[0] == "zero":
        return cli.main("zero", fakes.make_config, ["--dry-run", "--model", "tiny", *line[1:]])
    return commands.main(line)


def test_no_file_or_number_given_to_a_flag_is_waited_for_or_a_traceback(
    given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(given)
    monkeypatch.setattr(sys, "argv", ["ds_bench"])
    lines = []
    for name in FILES:
        path = name if name.startswith("/") else str(given / name)
        lines += [["zero", "--ds-config", path], ["zero", "--hostfile", path], ["zero", "--resume", path]]
        lines += [["report", path], ["compare", path, path], ["baseline", "check", path, "--baselines", path]]
    lines += [["zero", "--hostfile", str(given / name)] for name in ("slots", "arabic", "option")]
    of_files = len(lines)
    lines += [["zero", flag, number] for flag in (*WHOLE, *PLAIN) for number in NUMBERS]
    lines += [["plan", flag, number] for flag in ("--num-gpus", "--host-memory", "--gpu") for number in NUMBERS]
    lines += [["baseline", "save", "x", "--tolerance", number] for number in NUMBERS]
    for place, line in enumerate(lines):
        try:
            code = run_line(line)
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        err = capsys.readouterr().err
        assert code in ((2,) if place < of_files else (0, 1, 2)), (line, code, err)
        if code == 2:
            assert err.count("\n") == 1, (line, err)
            assert err.startswith("ds_bench: "), (line, err)


# ------------------------------------------------------------------ a full disk


def test_disk_is_full_only_without_room_or_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (str(tmp_path), None, str(tmp_path / "gone"))
    assert [disk_is_full(folder) for folder in folders] == [False] * 3
    assert list(tmp_path.iterdir()) == []
    for number in (errno.ENOSPC, errno.EDQUOT):

        def refuse(*_: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        assert disk_is_full(str(tmp_path))


# ------------------------------------------------------------------ folders that cannot be written


@pytest.mark.parametrize(("options", "code"), [("size=64k", 2), ("nr_inodes=2", 2), ("nr_inodes=4", 1)])
def test_full_disk_at_the_first_file_is_one_line_with_the_remedy(
    options: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted(tmp_path / "disk", options) as disk:
        scripted = ScriptedRun(disk, monkeypatch)
        assert scripted.run() == code
        said = capsys.readouterr().err.strip()
        assert said.count("\n") == 0, said
        assert "No space left on device" in said
        assert "(free space or inodes on that disk, or give a folder on another one)" in said
        assert scripted.launcher.launched == []


def test_removed_working_folder_is_one_line_with_the_remedy(
    tmp_path: Path, scripted: ScriptedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for code in (scripted.run(), commands.main(["models"]), commands.main(["report", "x"])):
        assert code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert {line.partition(": ")[2] for line in lines} == {"the current folder no longer exists (cd to one that does)"}


@pytest.mark.parametrize("part", ["", "runs"])
def test_output_folder_that_is_removed_during_a_run_ends_it_in_one_line(
    part: str, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def remove(trial: Trial) -> TrialRecord:
        shutil.rmtree(scripted.output / part)
        return fakes.success(trial)

    assert scripted.run("--stages", "0", "1", "2", script=FakeLauncher("Success", remove)) == 1
    printed = capsys.readouterr()
    assert printed.err.strip().count("\n") == 0, printed.err
    assert "give a folder that you may write to, and leave it in place while this runs" in printed.err
    assert "ZeRO-0 " in printed.out  # what had finished is shown
    assert len(scripted.launcher.launched) == 2


def test_leader_whose_trial_folder_was_removed_ends_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ds_bench.launch.leader", str(tmp_path / "removed"), '["true"]', "/"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
