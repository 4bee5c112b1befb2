"""Every way a trial can end, each with real rank processes on the CPU accelerator."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_bench.analysis.row import make_run
from ds_bench.config.caveat_texts import CaveatKind
from ds_bench.config.spec import Workload
from ds_bench.launch import Limits, rank_environment
from ds_bench.launch import trial as cold
from ds_bench.records.rank_files import Assignment, Heartbeat, read_beat
from ds_bench.system import processes
from tests.support import fakes
from tests.support.built_models import facts_from_config
from tests.support.fakes import preset
from tests.support.real_trials import SHORT, SUPPORT, Launch, make_trial

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("built_ops")]


STALL = dataclasses.replace(SHORT, stall_timeout_seconds=6)
ENDINGS: dict[str, tuple[Limits, dict[str, object], str, int | None, str]] = {  # → status, rank, words of the error
    "device_oom_on_rank_0_after_lost_peer": (SHORT, {}, "OOM", 1, "requested 2.00 GB, free 1.50 GB"),
    "host_allocation_beyond_limit": (SHORT, {"cpu_memory_limit_bytes": 4 * 2**30}, "OOM (host)", None, "64.00 GB"),
    "killed": (SHORT, {}, "Killed", 0, "SIGKILL"),
    "segfault": (SHORT, {}, "Crashed", None, "SIGSEGV"),
    "raises_value_error": (SHORT, {}, "ValueError", None, "the model does not like this batch"),
    "hangs_ignoring_sigterm": (dataclasses.replace(SHORT, timeout_seconds=3), {}, "Timeout", None, "--timeout"),
    "hangs": (STALL, {}, "Timeout", 0, "--stall-timeout"),
    "becomes_another_program": (STALL, {}, "Timeout", None, "--stall-timeout"),
    "stops_the_whole_trial": (STALL, {}, "Timeout", None, "--stall-timeout"),
}


@pytest.mark.parametrize("fault", ENDINGS)
def test_the_cause_of_an_ending_is_its_row_and_nothing_is_left(launch: Launch, fault: str, tmp_path: Path) -> None:
    limits, more, status, rank, said = ENDINGS[fault]
    outcome = launch(fault=fault, limits=limits, **more).outcome  # asserts that no process is left
    assert outcome.status == status, outcome
    assert rank in (None, outcome.rank)
    assert said in (outcome.error or "")
    folder = tmp_path / "trial"
    log = folder / f"rank{outcome.rank}.log"
    assert str(log) in (outcome.details or "")
    assert "Traceback" in log.read_text() or status != "ValueError"
    if fault == "hangs":
        assert "faults.py" in (folder / "rank0.stacks").read_text()
        assert "most recent call first" in (folder / "rank1.stacks").read_text()
    # Shared memory and the meeting file have the trial's number in their names, as other trials may run meanwhile.
    number = Assignment.load(folder).scratch_id
    assert [path for place in ("/dev/shm", "/tmp") for path in Path(place).glob(f"*{number}*")] == []


def test_a_row_that_changes_a_frozen_weight_says_so(launch: Launch) -> None:
    for fault, changed in (("changes_a_frozen_weight", True), ("keeps_frozen_weights", False)):
        record = launch(make_trial(fakes.zero(1), fault=fault, num_gpus=1))
        assert [rank.frozen_weights_changed for rank in record.ranks] == [changed], record.outcome.details
        kinds = [caveat.kind for caveat in make_run(record).caveats]
        assert (CaveatKind.FROZEN_WEIGHTS_CHANGED in kinds) is changed


def test_a_hang_at_exit_after_the_result_was_written_is_success_with_a_caveat(launch: Launch) -> None:
    record = launch(fault="hangs_at_exit")
    assert record.outcome.status == "Success"
    assert any("hung at exit" in caveat for caveat in record.caveats)


def test_a_grandchild_in_its_own_session_that_ignores_sigterm_is_ended(launch: Launch) -> None:
    assert launch(fault="leaves_a_stubborn_grandchild").outcome.status == "Success"  # launch asserts none is left


def test_nan_loss_is_measured_and_reported(launch: Launch) -> None:
    record = launch(fault="loses_its_loss")
    assert record.ranks[0].losses == (None,) * 4
    caveats = make_run(record).caveats
    assert any("not finite" in caveat.text for caveat in caveats)
    json.dumps(record.to_dict(), allow_nan=False)


def test_a_failure_after_the_window_keeps_what_was_measured_with_a_caveat(launch: Launch) -> None:
    record = launch(fault="fails_after_the_window")
    assert record.outcome.status == "Success"
    assert all(len(rank.step_seconds) == 3 and not rank.ledger for rank in record.ranks)
    assert record.failures[0].phase == "inspect"
    assert any("no room for an inspection); the measured steps had finished" in caveat for caveat in record.caveats)


def test_a_leader_that_is_killed_takes_its_ranks_with_it(launch: Launch, tmp_path: Path) -> None:
    before = processes.descendants()

    killer = threading.Thread(target=kill_when_it_trains, args=(tmp_path / "trial", lambda beat: os.getsid(beat.pid)))
    killer.start()
    outcome = launch(fault="hangs").outcome
    killer.join()
    assert outcome.status == "Crashed"
    assert processes.descendants() <= before


def kill_when_it_trains(folder: Path, choose: Callable[[Heartbeat], int]) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        time.sleep(0.05)
        beat = read_beat(folder, 0)
        if beat is not None and beat.step >= 1:
            os.kill(choose(beat), signal.SIGKILL)
            return


def cold_launcher() -> cold.DeepSpeedLauncher:
    trial = make_trial()
    return cold.DeepSpeedLauncher(rank_environment.rank_environment(trial.placement, os.environ), SHORT)


@pytest.mark.slow
def test_a_deepspeed_launcher_that_is_killed_is_a_row_and_leaves_no_rank(tmp_path: Path) -> None:
    """The launcher itself would leave orphans, and could even end with code 0."""
    before = processes.descendants()
    os.environ["PYTHONPATH"] = str(SUPPORT)

    def kill_the_launcher() -> None:
        beat = None
        while beat is None or beat.step < 1:
            time.sleep(0.05)
            beat = read_beat(tmp_path, 0)
        for pid in processes.descendants() - before:
            if b"deepspeed.launcher.launch" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_the_launcher)
    killer.start()
    try:
        record = cold_launcher().launch(make_trial(fault="hangs"), tmp_path, lambda _progress: None)
    finally:
        killer.join()
        del os.environ["PYTHONPATH"]
    assert record.outcome.status in ("Crashed", "Killed"), record.outcome
    assert processes.descendants() <= before


def test_a_rank_that_dies_before_hello_is_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "launch_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    outcome = cold_launcher().launch(make_trial(), tmp_path, lambda _progress: None).outcome
    assert outcome.status == "Crashed"
    assert "before its first heartbeat (exit code 3)" in (outcome.error or "")


@pytest.mark.nvme
def test_a_full_swap_disk_is_oom_disk_and_nothing_stays_on_it(launch: Launch, small_disk: Path) -> None:
    tiny = preset("tiny")
    config = {**tiny.config, "n_embd": 512, "vocab_size": 10_000}
    facts = facts_from_config("wide", "gpt2", config)
    work = Workload(
        model="wide", model_source="preset", model_type="gpt2", model_config=config, batch_size=1, seq_length=32,
        num_steps=2,
    )  # fmt: skip
    nvme, largest = fakes.offload("nvme"), facts.largest_parameter
    record = launch(make_trial(nvme, workload=work, nvme_path=str(small_disk), largest_parameter=largest))
    assert record.outcome.status == "OOM (disk)", record.outcome.details
    assert list(small_disk.iterdir()) == []
