"""The files between parent and ranks: whole or not at all, a beat that can be read while it is written."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.caveat_texts import Caveat, CaveatKind
from ds_bench.records.json_files import append_line, write_json
from ds_bench.records.rank_files import PHASES, Assignment, HeartbeatWriter, RankExit, read_beat, read_exits
from ds_bench.system.files import write_text
from tests.support import fakes

ASSIGNMENT = Assignment(
    trial=fakes.trial(fakes.offload("nvme"), on=fakes.placement(num_gpus=2, nvme_path="/mnt/nvmé"), caveats=("a",)),
    rendezvous="file:///tmp/meet",
    scratch_id="123456789",
    environment={"A": "1"},
    swap_folder="/mnt/nvmé/mine",
)

# ------------------------------------------------------------------ whole or not at all


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), "fsync", "replace"])
def test_what_cannot_be_written_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    if value in ("fsync", "replace"):
        monkeypatch.setattr(*((os, "fsync", fail) if value == "fsync" else (Path, "replace", fail)))
    with pytest.raises((ValueError, TypeError, OSError)):
        write_json(path, {"new": value})
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"old": 1}
    assert names(tmp_path) == ["a.json"]


def test_a_dataclass_is_written_as_an_object_in_files_as_in_lines(tmp_path: Path) -> None:
    """Notes of a rank are strings and caveats."""
    caveat = Caveat(CaveatKind.OWN_BATCHES, {"seq_length": 8})
    write_json(tmp_path / "a.json", [caveat])
    append_line(tmp_path / "a.jsonl", [caveat])
    for name in ("a.json", "a.jsonl"):
        assert json.loads((tmp_path / name).read_text()) == [{"kind": "own_batches", "values": {"seq_length": 8}}]


def test_the_data_is_on_disk_before_the_name_points_to_it_and_each_process_has_its_own_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (order.append(self.name), replace(self, to))[1])
    for pid in (101, 102):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        write_text(tmp_path / "a", "x")
    assert order[::2] == ["sync", "sync"]
    assert len(set(order[1::2])) == 2
    assert all(name.startswith(".") for name in order[1::2]), "a result folder would list it among the results"


# ------------------------------------------------------------------ the assignment


def test_an_assignment_survives_its_file(tmp_path: Path) -> None:
    """Names of folders may be in another encoding."""
    folder = os.fsdecode(b"/mnt/caf\xe9")
    trial = replace(ASSIGNMENT.trial, placement=replace(ASSIGNMENT.trial.placement, nvme_path=folder))
    for assignment in (ASSIGNMENT, replace(ASSIGNMENT, trial=trial, swap_folder=folder, working_folder=folder)):
        assignment.save(tmp_path, {"train_batch_size": 8})
        assert Assignment.load(tmp_path) == assignment
        assert json.loads((tmp_path / "ds_config.json").read_text()) == {"train_batch_size": 8}
    with pytest.raises(ValueError, match="color"):
        Assignment.from_dict({**ASSIGNMENT.to_dict(), "color": "red"})


# ------------------------------------------------------------------ the beat


def test_a_beat_is_read_as_it_was_written_by_its_rank_and_keeps_what_it_does_not_say(tmp_path: Path) -> None:
    writer, other = HeartbeatWriter(tmp_path, 3), HeartbeatWriter(tmp_path, 1)

    def read() -> tuple[str, int, float | None]:
        beat = read_beat(tmp_path, 3)
        assert beat is not None
        assert beat.pid == os.getpid()
        return beat.phase, beat.step, beat.last_step_seconds

    assert read() == ("hello", -1, None)
    for phase in PHASES:
        writer.beat(phase, 7, 0.25)
        other.beat("step", 9)
        assert read() == (phase, 7, 0.25)
    writer.beat("forward")
    assert read() == ("forward", 7, 0.25)
    assert read_beat(tmp_path, 10) is None
    assert read_beat(tmp_path / "missing", 0) is None


def test_every_beat_differs_from_the_one_before_and_none_makes_the_file_grow(tmp_path: Path) -> None:
    """So that a rank that repeats itself is seen to live."""
    writer, path = HeartbeatWriter(tmp_path, 0), tmp_path / "rank0.beat"
    before = path.stat()
    seen = set()
    for _ in range(50):
        writer.beat("forward", 1)
        seen.add(path.read_bytes())
    assert len(seen) == 50
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size) == (before.st_ino, 48)


NOT_A_TIME = bytes(8) + b"\xff" * 8 + bytes(32)


@pytest.mark.parametrize("data", [b"", *(b"\x01" * length for length in (47, 48, 49)), NOT_A_TIME])
def test_a_torn_or_foreign_beat_is_no_beat(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rank0.beat").write_bytes(data)
    assert read_beat(tmp_path, 0) is None


# ------------------------------------------------------------------ exits


def test_exits_come_back_in_order_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    exits = [
        RankExit(rank=1, pid=11, code=None, signal=9, time=5.0),
        RankExit(rank=None, pid=12, code=247, signal=None, time=6.0),
    ]
    for each in exits:
        append_line(tmp_path / "exits.jsonl", asdict(each))
    with (tmp_path / "exits.jsonl").open("ab") as file:
        file.write(b'{"rank": 0, "pi\xff')
    assert read_exits(tmp_path) == exits


def test_a_link_keeps_its_target_and_a_device_stays_a_device(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_text(link, "1")
    assert link.is_symlink()
    assert target.read_text() == "1"
    write_text(Path("/dev/null"), "1")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="No space left"):
        write_text(Path("/dev/full"), "1")
    assert Path("/dev/full").is_char_device()
