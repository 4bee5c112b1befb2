"""The part of a trial on several hosts that the run sees: files that hosts send, and hosts whose ranks have ended."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from ds_bench.launch.host_connections import Hosts
from ds_bench.launch.remote_trial import FileReceiver, RemoteTrial, forwarded_variables
from ds_bench.records import json_files, rank_files
from ds_bench.records.rank_files import Assignment, HeartbeatWriter
from tests.support.local_agents import local_agents, make_hosts_trial


def test_files_of_another_host_stay_within_the_folder_of_the_trial(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "target")
    part = {"start": 0, "data": "eA==", "whole": False, "last": True}
    names = ["../x", "/x", "a/../../x", "", ".x", "a//x", "link", "a\nb", "a/b/c/d/e"]
    for name in [*names, "trial.json", "ds_config.json", "rank0.json", "rank3.log", "rank03.beat/x"]:
        receiver = FileReceiver(folder, 1, range(1, 3))
        receiver.receive({"file": name, **part})
        assert receiver.problem is not None, name
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "trial"]


def test_a_file_that_is_left_out_keeps_no_later_file_from_being_written(tmp_path: Path) -> None:
    part = {"start": 0, "data": "eA==", "whole": True, "last": True}
    receiver = FileReceiver(tmp_path, 1, range(2, 4))
    for name in ("core.python 3.1234", "trace,0.json", "rank2.json", "profiles/torch_rank3.json"):
        receiver.receive({"file": name, **part})
    assert receiver.problem == "a file of another host has the name 'core.python 3.1234' and was left out"
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == ["rank2.json", "torch_rank3.json"]


def test_times_of_another_host_become_those_of_this_ones_clock(tmp_path: Path) -> None:
    """Else a rank whose host's clock is behind would always have failed first."""
    theirs, here = tmp_path / "theirs", tmp_path / "here"
    theirs.mkdir()
    here.mkdir()
    rank_files.append_exit(theirs, 1, 77, 9)
    rank_files.append_exit(theirs, None, 78, 0)
    json_files.write_json(theirs / "rank1.json", {"failure": {"rank": 1, "time": 5000.0, "message": "x"}})
    HeartbeatWriter(theirs, 1).beat("step", 3)
    before, beat = rank_files.read_exits(theirs), rank_files.read_beat(theirs, 1)
    receiver = FileReceiver(here, 1, range(1, 2))
    receiver.clock_ahead_seconds = 3600.0
    for path in theirs.iterdir():
        data = base64.b64encode(path.read_bytes()).decode()
        receiver.receive({"file": path.name, "start": 0, "data": data, "whole": path.suffix != ".jsonl", "last": True})
    after, moved = rank_files.read_exits(here), rank_files.read_beat(here, 1)
    assert [(each.rank, each.signal) for each in after] == [(1, 9), (None, None)]
    assert [round(old.time - new.time, 3) for old, new in zip(before, after, strict=True)] == [3600.0] * 2
    assert json.loads((here / "rank1.json").read_text())["failure"] == {"rank": 1, "time": 1400.0, "message": "x"}
    assert beat is not None
    assert moved is not None
    assert (round(beat.time - moved.time, 3), moved.step) == (3600.0, 3)


def test_a_host_whose_ranks_all_ended_without_their_files_is_noticed(tmp_path: Path) -> None:
    hosts = Hosts(["a", "b"], local_agents(tmp_path))
    remote = RemoteTrial(hosts, tmp_path, Assignment(trial=make_hosts_trial(), rendezvous=None, scratch_id="1"))
    assert not remote.ended_without_file([])
    remote._receivers[1].receive({"leader_ended": True})
    assert [remote.ended_without_file(written) for written in ([], [0], [1], [0, 1])] == [True, True, False, False]


def test_variables_are_forwarded_by_prefix_and_by_name_but_no_credential_unasked() -> None:
    environ = {"NCCL_DEBUG": "INFO", "UCX_TLS": "tcp", "HF_HOME": "/hf", "HF_TOKEN": "hf_x", "OTHER": "1", "MINE": "2"}
    assert forwarded_variables(environ, ["MINE"]).keys() == {"NCCL_DEBUG", "UCX_TLS", "HF_HOME", "MINE"}
    assert forwarded_variables(environ, ["HF_TOKEN", "GONE"])["HF_TOKEN"] == "hf_x"
