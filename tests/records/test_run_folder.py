"""The run directory under everything that can go wrong: two runs at once, torn lines, failing disks, odd text."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_bench.analysis.comparison import rows_of
from ds_bench.analysis.row import make_run
from ds_bench.errors import PreflightError, UsageError
from ds_bench.records import json_files, run_folder
from ds_bench.records.reader import RunInfo
from ds_bench.records.result_files import csv_text
from ds_bench.records.run_folder import RunFolder, latest_run
from ds_bench.records.schema import TrialRecord
from tests.support import fakes


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "results", "zero")


def flat(*records: TrialRecord) -> list[dict[str, Any]]:
    return rows_of([make_run(each) for each in records])


class FrozenClock:
    """``datetime`` whose now() moves on only when sleep is called."""

    def __init__(self) -> None:
        self.second = 0

    def now(self) -> datetime:
        return datetime(2026, 11, 21, 9, 30, self.second)

    def sleep(self, _seconds: float) -> None:
        self.second += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FrozenClock:
    frozen = FrozenClock()
    monkeypatch.setattr(run_folder, "datetime", frozen)
    monkeypatch.setattr(run_folder, "time", frozen)
    return frozen


# ------------------------------------------------------------------ names


def test_files_are_named_by_family_and_the_next_free_second(tmp_path: Path, clock: FrozenClock) -> None:
    (tmp_path / "zero_comparison_20261121_093000.csv").write_text("mine")
    for family, prefix, second in (("zero", "zero_", 1), ("offload", "offload_", 1), ("recipe", "", 1)):
        made = RunFolder.create(tmp_path, family)
        stamp = f"20261121_09300{second}"
        assert made.json_path == tmp_path / f"{prefix}comparison_{stamp}.json"
        assert made.csv_path == tmp_path / f"{prefix}comparison_{stamp}.csv"
        assert made.folder == tmp_path / "runs" / f"{prefix or 'comparison_'}{stamp}"
    assert (tmp_path / "zero_comparison_20261121_093000.csv").read_text() == "mine"


def test_many_runs_started_at_once_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = iter(range(10_000))
    lock = threading.Lock()

    class Coarse:
        """Three calls in a row get the same second."""

        @staticmethod
        def now() -> datetime:
            with lock:
                tick = next(stamps) // 3
            return datetime(2026, 1, 1, 0, tick // 60 % 60, tick % 60)

    monkeypatch.setattr(run_folder, "datetime", Coarse)
    made: list[RunFolder] = []
    threads = [threading.Thread(target=lambda: made.append(RunFolder.create(tmp_path, "zero"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.folder for each in made}) == 8


def test_a_folder_that_cannot_be_written_fails_before_any_work_and_names_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "results"
    with pytest.raises(PreflightError) as caught:
        RunFolder.create(path, "zero")
    assert f"--output-dir {path} cannot be written" in str(caught.value)
    assert "Give a folder that you can write to" in str(caught.value)
    assert caught.value.exit_code == 2


# ------------------------------------------------------------------ whole or not at all


@pytest.mark.parametrize("number", [1, 2])
def test_a_disk_that_fills_at_either_table_leaves_both_as_they_were(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run.write_rows(flat(fakes.success()))
    before = run.json_path.read_bytes(), run.csv_path.read_bytes()
    calls: list[int] = []

    def fill(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) >= number:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(OSError, match="No space") as caught:
        run.write_rows(flat(fakes.failure()))
    assert caught.value.filename == str((run.json_path, run.csv_path)[number - 1])
    with pytest.raises(TypeError):
        run.write_rows([{"stage": object()}])
    assert (run.json_path.read_bytes(), run.csv_path.read_bytes()) == before
    files = sorted(path.name for path in run.json_path.parent.iterdir())
    assert files == sorted([run.json_path.name, run.csv_path.name, "runs"])


def test_what_a_killed_writer_left_is_removed_by_the_next_that_holds_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = run.json_path.with_name(".zero_comparison_20200101_000000.json.7.tmp")  # of a run that may live
    stranger.touch()
    (run.folder / "recommended").mkdir()
    trial_folder = run.trial_folder("00_zero0_r0")
    written: list[Callable[[], None]] = [
        lambda: run.write_rows(flat(fakes.success())),
        lambda: run.save_run({}),
        lambda: json_files.write_json(run.folder / "recommended" / "ds_config.json", {}),
        lambda: json_files.write_json(trial_folder / "rank0.json", {}),
    ]
    monkeypatch.setattr(os, "fsync", lambda _descriptor: os.kill(os.getpid(), signal.SIGKILL))
    for write in written:
        child = os.fork()
        if child == 0:
            write()
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])

    def temporaries() -> list[Path]:
        return list(run.json_path.parent.rglob("*.tmp"))

    assert len(temporaries()) == 1 + len(written)
    with run.locked():
        assert temporaries() == [stranger]


# ------------------------------------------------------------------ records.jsonl


FULL = fakes.success(
    fakes.trial(fakes.offload("nvme"), on=fakes.placement(accelerator="cuda", num_gpus=2, nvme_path="/d")),
    losses=(7.0, None, 6.5),
    ledger={"gpu": {"parameters": 1}, "nvme": {"optimizer_states": 2}},
    notes=("one", "two"),
    nvme_stored_bytes=5,
    nvme_read_bytes=0,
    nvme_written_bytes=7,
)


@pytest.mark.parametrize("damage", [b"", b"null\n", b'{"trial": 1}\n', b'{"trial": {"tri'])
def test_records_come_back_in_order_without_lines_that_are_none(run: RunFolder, damage: bytes) -> None:
    """What ``--resume`` does after a crash: the first record it writes must not be glued to the torn line."""
    assert run.records() == []
    several = (fakes.rank_failure(requested_bytes=1, free_bytes=0, step=None),)
    kept = [
        FULL,
        fakes.failure(requested_bytes=2**40, free_bytes=0, rank=None, phase=None),
        replace(fakes.failure(status="ValueError"), failures=several, caveats=("known",)),
    ]
    for each in kept:
        run.append(each)
        with (run.folder / "records.jsonl").open("ab") as file:
            file.write(damage)
    assert run.records() == kept


@settings(deadline=None, max_examples=30)
@given(text=st.text(max_size=20))
@example("a\u2028b")
@example("a\u0085b")
@example("a\nb")
@example("a\x0cb")
def test_no_text_at_all_can_break_the_file(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Some letters end a line for Python but not for JSON."""
    folder = tmp_path_factory.mktemp("run")
    made = RunFolder(folder=folder / "runs" / "zero_1")
    made.folder.mkdir(parents=True)
    made.append(fakes.failure(error=text, details=text))
    made.write_rows(flat(fakes.failure(error=text, details=text)))
    made.append(fakes.success())
    assert [each.outcome.error for each in made.records()] == [text, None]
    (row,) = json.loads(made.json_path.read_text(encoding="utf-8"))
    assert row["error"] == text


# ------------------------------------------------------------------ flat rows in JSON and CSV


def test_the_csv_has_the_rows_and_columns_of_the_json(run: RunFolder) -> None:
    run.write_rows(flat(fakes.success(), fakes.failure(fakes.trial(fakes.zero(1))), fakes.success()))
    rows = json.loads(run.json_path.read_text(encoding="utf-8"))
    assert all(isinstance(row.pop("caveat_list"), list) for row in rows)
    with run.csv_path.open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [list(row) for row in read] == [list(row) for row in rows]
    for cells, row in zip(read, rows, strict=True):
        assert cells == {name: "" if value is None else str(value) for name, value in row.items()}


def test_a_number_that_is_none_is_null_in_json_and_empty_in_csv_and_zero_is_not_missing(run: RunFolder) -> None:
    bad = {name: float(name) for name in ("nan", "inf", "-inf")}
    run.write_rows([{**bad, "a": 0, "b": 0.0, "c": False, "d": None, "e": ""}])
    (row,) = json.loads(run.json_path.read_text())
    assert row == {**dict.fromkeys(bad), "a": 0, "b": 0.0, "c": False, "d": None, "e": ""}
    assert run.csv_path.read_text() == "nan,inf,-inf,a,b,c,d,e\n,,,0,0.0,False,,\n"


def test_text_that_a_spreadsheet_would_run_is_made_harmless() -> None:
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", '=HYPERLINK("http://x")'):
        (cell,) = [row["a"] for row in csv.DictReader(io.StringIO(csv_text([{"a": text, "b": 1}]), newline=""))]
        assert cell == "'" + text.replace("\r", "\n")


# ------------------------------------------------------------------ an earlier run


def test_an_earlier_run_is_found_again_with_its_files_from_inside_itself_too(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save_run({"family": "zero", "arguments": ["--model", "gpt2"], "of another version": 1})
    monkeypatch.chdir(run.folder)
    for again in (RunFolder.open(run.folder), RunFolder.open(Path())):
        assert (again.folder.resolve(), again.json_path.resolve()) == (run.folder.resolve(), run.json_path.resolve())
        assert again.load_run() == RunInfo(family="zero", arguments=("--model", "gpt2"), trial_count=0)


def test_a_folder_that_is_no_run_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UsageError, match=r"no run\.json there\. Give a folder below <output-dir>/runs"):
            RunFolder.open(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("{", "is not JSON"),
        ("[]", "schema_version is None"),
        ('{"schema_version": 99}', "schema_version is 99"),
        ('{"schema_version": 1, "arguments": [5]}', "arguments[0] is 5"),
        ('{"schema_version": 1, "shard": {"number": 1}}', "shard.count is missing"),
    ],
)
def test_a_damaged_run_is_refused_in_one_line_with_the_reason(run: RunFolder, text: str, reason: str) -> None:
    (run.folder / "run.json").write_text(text)
    with pytest.raises(UsageError, match=f"run\\.json.*{re.escape(reason)}") as caught:
        run.load_run()
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ folders of trials


def test_a_second_attempt_at_a_trial_keeps_the_files_of_the_first(run: RunFolder) -> None:
    first = run.trial_folder("00_zero0")
    (first / "rank0.log").write_text("the evidence")
    second, third = run.trial_folder("00_zero0"), run.trial_folder("00_zero0")
    assert [folder.name for folder in (first, second, third)] == ["00_zero0", "00_zero0_attempt2", "00_zero0_attempt3"]
    assert (first / "rank0.log").read_text() == "the evidence"
    assert list(second.iterdir()) == []


def test_a_record_is_on_disk_when_append_returns(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    run.append(fakes.success())
    assert (run.folder / "records.jsonl").stat().st_ino in synced


def test_a_folder_that_cannot_be_locked_is_written_all_the_same_with_a_note(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with run.locked() as note:
        assert note is None
    monkeypatch.setattr(fcntl, "flock", refuse)
    with run.locked() as note:
        assert note is not None
        assert os.strerror(errno.ENOLCK) in note


def test_the_latest_run_is_found_by_its_trials_after_copying_and_after_a_resume(tmp_path: Path) -> None:
    def trial_of(day: int) -> TrialRecord:
        return replace(fakes.success(), started_at=f"2026-11-{day:02d}T09:30:00+00:00")

    earlier, later = (fakes.write_run(tmp_path, [trial_of(day)]) for day in (1, 2))
    os.utime(later.folder / "records.jsonl", (1e9, 1e9))
    assert latest_run(tmp_path) == later.folder
    earlier.append(trial_of(3))
    # Found before the records of many trials that did not run.
    for _ in range(100):
        earlier.append(fakes.failure(fakes.trial(), "Skipped"))
    os.utime(earlier.folder / "records.jsonl", (1e9, 1e9))
    assert latest_run(tmp_path) == earlier.folder
