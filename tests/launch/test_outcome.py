"""From hand-made evidence to one cause: by class and by time, never by rank, and Success by files alone."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ds_bench.launch.monitor import Ending, Limits
from ds_bench.launch.outcome import Evidence, TrialOutcome, determine_outcome
from ds_bench.records import schema
from ds_bench.records.json_files import append_line, write_json
from ds_bench.records.rank_files import PHASES, HeartbeatWriter, RankExit
from ds_bench.records.schema import Outcome
from ds_bench.worker.failure import rank_failure as failure_report
from tests.support import fakes
from tests.support.shared_files import shared_files

LIMITS = Limits(timeout_seconds=90, stall_timeout_seconds=30, failure_grace_seconds=5, exit_grace_seconds=10)
PAIR = fakes.trial(on=fakes.placement(num_gpus=2))


class Scene:
    """A trial's folder, and what is known besides."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def measured(self, *ranks: int, world: int = 2) -> Scene:
        for rank in ranks:
            seen = fakes.measurement(PAIR, rank=rank, world_size=world, data_parallel_size=world)
            write_json(self.folder / f"rank{rank}.json", fakes.measured_file(seen))
        return self

    def failed(self, rank: int, **changes: Any) -> Scene:
        failure = fakes.rank_failure(rank=rank, **changes)
        write_json(self.folder / f"rank{rank}.json", fakes.failed_file(failure))
        return self

    def wrote(self, rank: int, content: str | bytes) -> Scene:
        raw = content if isinstance(content, bytes) else content.encode()
        (self.folder / f"rank{rank}.json").write_bytes(raw)
        return self

    def logged(self, rank: int, text: str) -> Scene:
        (self.folder / f"rank{rank}.log").write_text(text)
        return self

    def ended(self, rank: int | None, *, code: int | None = None, by: int | None = None, at: float = 100.0) -> Scene:
        line = RankExit(rank=rank, pid=1000 + (rank or 0), code=code, signal=by, time=at)
        append_line(self.folder / "exits.jsonl", asdict(line))
        return self

    def reached(self, rank: int, phase: str) -> Scene:
        assert phase in PHASES
        HeartbeatWriter(self.folder, rank).beat(phase, 3)
        return self

    def findings(self, ending: Ending | None = "ended", *, world: int = 2, **more: Any) -> TrialOutcome:
        evidence = Evidence(folder=self.folder, world_size=world, ending=ending, limits=LIMITS, **more)
        return determine_outcome(evidence)

    def outcome(self, ending: Ending | None = "ended", **more: Any) -> Outcome:
        return self.findings(ending, **more).outcome


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of files are written here, and none has to survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


ENDINGS: list[Ending | None] = ["ended", "hung_at_exit", "rank_failed", "timeout", "stalled", None]


# ------------------------------------------------------------------ success is one thing


def test_success_is_every_ranks_valid_file_however_the_trial_ended(scene: Scene, subtests: pytest.Subtests) -> None:
    scene.measured(0, 1)
    for ending in ENDINGS:
        with subtests.test(ending):
            found = scene.findings(ending)
            assert found.outcome == Outcome(status="Success")
            assert [rank.rank for rank in found.measurements] == [0, 1]


def test_one_missing_file_is_never_success_even_with_exit_codes_of_0(scene: Scene, subtests: pytest.Subtests) -> None:
    scene.measured(0).ended(0, code=0).ended(1, code=0)
    for ending in ENDINGS:
        with subtests.test(ending):
            found = scene.findings(ending)
            assert not found.outcome.success
            assert found.measurements == ()


def test_an_exit_code_of_0_and_no_file_is_a_crash_that_names_rank_and_code(scene: Scene) -> None:
    outcome = scene.ended(0, code=0).outcome(world=1)
    assert outcome.status == "Crashed"
    assert "rank 0 ended before saying hello (exit code 0)" in (outcome.error or "")


def test_a_rank_that_hung_at_exit_after_its_file_is_success_with_a_caveat(scene: Scene) -> None:
    found = scene.measured(0, 1).ended(1, by=signal.SIGKILL).findings("hung_at_exit")
    assert found.outcome.success
    assert found.caveats == ("hung at exit: still there 10 s after its results were written",)


@pytest.mark.parametrize(
    ("how", "said"), [({"code": 3}, "code 3"), ({"by": signal.SIGSEGV}, "SIGSEGV"), ({"by": 99}, "signal 99")]
)
def test_a_bad_end_after_the_file_is_success_with_a_caveat(scene: Scene, how: dict[str, int], said: str) -> None:
    found = scene.measured(0, 1).ended(0, code=0).ended(1, **how).findings()
    assert found.outcome.success
    assert len(found.caveats) == 1
    assert said in found.caveats[0]


def test_a_failure_after_the_window_leaves_a_success_with_what_failed(scene: Scene) -> None:
    for rank in (0, 1):
        seen = fakes.measurement(PAIR, rank=rank, world_size=2, data_parallel_size=2)
        write_json(scene.folder / f"rank{rank}.measured.json", fakes.measured_file(seen))
    scene.failed(0, kind="peer_lost", message="connection closed", time=99.0)
    scene.failed(1, error_class="OutOfMemoryError", kind="device_oom", message="CUDA out\nof memory " + 999 * "x")
    found = scene.findings("rank_failed")
    assert found.outcome.success
    (caveat,) = found.caveats
    assert "(OutOfMemoryError on rank 1: CUDA out of memory" in caveat
    assert caveat.endswith("; the measured steps had finished")
    assert len(caveat) < 350


def test_a_clean_success_has_no_caveat(scene: Scene) -> None:
    assert scene.measured(0, 1).ended(0, code=0).ended(1, code=0).findings().caveats == ()


# ------------------------------------------------------------------ files that are none


VALID = json.dumps(fakes.measured_file(fakes.measurement(PAIR, rank=1)))


def damaged(**changes: Any) -> str:
    content = json.loads(VALID)
    content["measurement"].update(changes)
    return json.dumps(content)


def test_a_file_that_is_torn_foreign_or_impossible_is_a_crash_of_that_rank(
    scene: Scene, subtests: pytest.Subtests
) -> None:
    scene.measured(0).ended(0, code=0).ended(1, code=0)
    for content in (
        "",
        "{",
        VALID[: len(VALID) // 2],
        VALID[:-1],
        "null",
        "[]",
        "3",
        "{}",
        '{"measurement": null}',
        '{"measurement": {}}',
        '{"failure": null}',
        '{"failure": {"rank": 1}}',
        '{"failure": 3}',
        b"\xff\xfe\x00garbage",
        b"\x00" * 4096,
        damaged(rank=0),
        damaged(rank=7),
        damaged(world_size=4),
        damaged(colour="red"),
        damaged(step_seconds=[]),
        damaged(step_seconds=[0.1, -0.1]),
        damaged(step_seconds=[0.0]),
        damaged(step_seconds=["fast"]),
        damaged(step_seconds=None),
        damaged(step_seconds=[float("nan")]),
        damaged(window_seconds=float("inf")),
        damaged(window_seconds=float("nan")),
        damaged(window_seconds=0),
        damaged(losses=[float("nan")]),
        damaged(micro_batch_size=0),
        damaged(data_parallel_size=None),
        damaged(gpu_peak_bytes=float("-inf")),
    ):
        with subtests.test(content=content):
            found = scene.wrote(1, content).findings()
            assert (found.outcome.status, found.outcome.rank) == ("Crashed", 1)
            assert "rank1.json is not a valid rank file" in (found.outcome.error or "")
            assert found.measurements == ()


def test_a_file_of_a_rank_beyond_the_world_is_not_looked_at(scene: Scene) -> None:
    assert scene.measured(0, 1).wrote(2, "garbage").outcome().success


def test_a_temporary_file_of_a_rank_that_died_writing_is_no_file(scene: Scene) -> None:
    (scene.folder / ".rank1.json.77.tmp").write_text(VALID)
    assert scene.measured(0).ended(1, code=1).outcome().status == "Crashed"


# ------------------------------------------------------------------ resources: whoever says it ran out


def test_oom_on_rank_1_wins_over_the_broken_collective_that_rank_0_saw_first(scene: Scene) -> None:
    scene.failed(0, kind="peer_lost", error_class="DistBackendError", message="Connection closed by peer", time=50.0)
    scene.failed(
        1, kind="device_oom", error_class="OutOfMemoryError", message="CUDA out of memory.", time=60.0,
        requested_bytes=2 * 2**30, free_bytes=3 * 2**29, phase="backward",
    )  # fmt: skip
    outcome = scene.ended(0, code=1, at=51).ended(1, code=1, at=61).outcome()
    assert (outcome.status, outcome.rank, outcome.phase) == ("OOM", 1, "backward")
    assert (outcome.requested_bytes, outcome.free_bytes) == (2 * 2**30, 3 * 2**29)
    assert "asked 2.00 GB, free 1.50 GB" in (outcome.error or "")
    assert outcome.details == f"{outcome.error}; phase backward; rank 1; log {scene.folder / 'rank1.log'}"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("device_oom", "OOM"),
        ("host_oom", "OOM (host)"),
        ("pinned_memory", "OOM (host)"),
        ("disk_full", "OOM (disk)"),
        ("shared_memory", "RuntimeError"),
    ],
)
def test_what_ran_out_is_named_however_the_trial_ended(
    scene: Scene, kind: str, status: str, subtests: pytest.Subtests
) -> None:
    scene.failed(1, kind=kind).ended(0, by=signal.SIGKILL, at=99)
    for ending in ENDINGS:
        with subtests.test(ending):
            outcome = scene.outcome(ending)
            assert (outcome.status, outcome.rank, outcome.kind) == (status, 1, kind)


def test_of_two_that_ran_out_the_first_is_the_cause_whatever_its_rank(scene: Scene) -> None:
    scene.failed(0, kind="device_oom", time=61.0).failed(1, kind="host_oom", time=60.0)
    assert (scene.outcome().status, scene.outcome().rank) == ("OOM (host)", 1)


def test_no_free_bytes_at_all_are_told_and_unknown_ones_are_not_guessed(scene: Scene) -> None:
    assert "free 0 B" in (scene.failed(0, kind="device_oom", free_bytes=0).outcome(world=1).error or "")
    error = scene.failed(0, kind="device_oom").outcome(world=1).error or ""
    assert "free" not in error
    assert "asked" not in error


def test_a_disk_that_is_full_explains_the_rank_that_died_of_an_assertion(scene: Scene) -> None:
    outcome = scene.ended(1, by=signal.SIGABRT).outcome("rank_failed", disk_full=True)
    assert (outcome.status, outcome.rank) == ("OOM (disk)", 1)


# ------------------------------------------------------------------ signals


def test_a_rank_killed_with_the_kernels_word_for_it_is_host_oom(scene: Scene) -> None:
    outcome = scene.reached(1, "forward").ended(1, by=signal.SIGKILL).outcome("rank_failed", host_ran_out=True)
    assert (outcome.status, outcome.rank, outcome.phase) == ("OOM (host)", 1, "forward")


def test_a_rank_killed_without_it_is_killed_and_memory_is_not_blamed(scene: Scene) -> None:
    outcome = scene.ended(1, by=signal.SIGKILL).outcome("rank_failed")
    assert outcome.status == "Killed"
    assert "SIGKILL, with no sign of lack of memory" in (outcome.error or "")


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE])
def test_a_rank_that_crashed_is_crashed_and_the_signal_is_named(scene: Scene, number: signal.Signals) -> None:
    outcome = scene.ended(0, by=number).outcome("rank_failed", host_ran_out=True)
    assert (outcome.status, outcome.rank) == ("Crashed", 0)
    assert number.name in (outcome.error or "")
    assert outcome.kind == ("bus_error" if number == signal.SIGBUS else None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGXCPU])
def test_a_rank_ended_by_a_signal_from_outside_is_killed_and_the_signal_is_named(
    scene: Scene, number: signal.Signals
) -> None:
    outcome = scene.ended(1, by=number, at=100).ended(0, by=signal.SIGTERM, at=105).outcome("rank_failed")
    assert (outcome.status, outcome.rank) == ("Killed", 1)
    assert number.name in (outcome.error or "")


def test_the_first_signal_is_the_cause_and_not_the_first_rank(scene: Scene) -> None:
    scene.ended(0, by=signal.SIGABRT, at=101).ended(1, by=signal.SIGSEGV, at=100)
    assert (scene.outcome().rank, "SIGSEGV" in (scene.outcome().error or "")) == (1, True)


def test_a_rank_killed_before_it_could_report_explains_its_peers_broken_collective(scene: Scene) -> None:
    scene.failed(0, kind="peer_lost", error_class="RuntimeError", time=100.2)
    outcome = scene.ended(1, by=signal.SIGKILL, at=100.0).ended(0, code=1, at=100.3).outcome()
    assert (outcome.status, outcome.rank) == ("Killed", 1)


def test_a_survivor_that_aborts_after_an_exception_does_not_hide_it(scene: Scene) -> None:
    """NCCL's watchdog aborts the ranks that wait for one that raised."""
    scene.failed(1, error_class="ValueError", message="bad shape", time=100.0).ended(1, code=1, at=100.1)
    outcome = scene.ended(0, by=signal.SIGABRT, at=101.0).outcome("rank_failed")
    assert (outcome.status, outcome.rank) == ("ValueError", 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_of_ours_that_ended_a_survivor_does_not_hide_the_exception(scene: Scene, number: int) -> None:
    scene.failed(1, error_class="ValueError", time=100.0).ended(1, code=1, at=100.1)
    outcome = scene.ended(0, by=number, at=105.5).outcome("rank_failed")
    assert (outcome.status, outcome.rank) == ("ValueError", 1)


def test_a_signal_of_ours_is_not_taken_for_the_cause_of_a_lost_peer(scene: Scene) -> None:
    scene.failed(0, kind="peer_lost", time=100.0).ended(0, code=1, at=100.1)
    outcome = scene.ended(1, by=signal.SIGKILL, at=106.0).outcome("rank_failed")
    assert outcome.status != "Killed"


def test_a_rank_killed_late_is_not_excused_by_one_that_had_finished_long_before(scene: Scene) -> None:
    outcome = scene.measured(0).ended(0, code=0, at=10.0).ended(1, by=signal.SIGKILL, at=100.0).outcome()
    assert (outcome.status, outcome.rank) == ("Killed", 1)


def test_a_signal_after_the_file_was_written_is_no_cause(scene: Scene) -> None:
    outcome = scene.measured(0).ended(0, by=signal.SIGSEGV, at=90).failed(1, error_class="ValueError").outcome()
    assert outcome.status == "ValueError"


# ------------------------------------------------------------------ the deepspeed launcher, which hides its ranks


@pytest.mark.parametrize(
    ("code", "ran_out", "status"),
    [(247, False, "Killed"), (247, True, "OOM (host)"), (245, False, "Crashed"), (250, False, "Crashed")],
)
def test_the_launchers_code_tells_the_signal_of_a_rank(scene: Scene, code: int, ran_out: bool, status: str) -> None:
    outcome = scene.ended(None, code=code).outcome(host_ran_out=ran_out)
    assert (outcome.status, outcome.rank) == (status, None)


def test_the_launchers_signal_counts_though_it_ends_later_than_the_survivors_exception(scene: Scene) -> None:
    scene.failed(0, kind="other", error_class="RuntimeError", time=100.0)
    assert scene.ended(None, code=247, at=101.0).outcome().status == "Killed"


@pytest.mark.parametrize("code", [0, 1, 127, 255 - 64])
def test_an_ordinary_code_of_the_launcher_is_no_signal(scene: Scene, code: int) -> None:
    outcome = scene.ended(None, code=code).outcome()
    assert outcome.status == "Crashed"
    assert f"exit code {code}" in (outcome.error or "")


def test_a_code_of_a_rank_itself_is_never_read_as_a_signal(scene: Scene) -> None:
    assert scene.ended(1, code=247).outcome().status == "Crashed"


def test_an_exception_behind_the_launcher_is_found_in_its_file(scene: Scene) -> None:
    outcome = scene.failed(1, error_class="ValueError").ended(None, code=1).outcome()
    assert (outcome.status, outcome.rank) == ("ValueError", 1)


# ------------------------------------------------------------------ collectives that time out


def watchdog(number: int, operation: str = "OpType=ALLREDUCE, NumelIn=8, NumelOut=8") -> str:
    return (
        f"[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, {operation}, Timeout(ms)=600000) ran for 600024 milliseconds before timing out.\n"
    )


def test_a_rank_that_never_joined_a_collective_is_named_though_the_others_were_aborted(scene: Scene) -> None:
    scene.logged(0, watchdog(78)).logged(2, watchdog(78)).logged(1, "step 4\n").reached(1, "forward")
    scene.ended(0, by=signal.SIGABRT).ended(2, by=signal.SIGABRT)
    outcome = scene.outcome("rank_failed", world=3)
    assert (outcome.status, outcome.rank, outcome.phase) == ("Timeout", 1, "forward")
    assert outcome.kind == "collective_timeout"
    assert outcome.error == (
        "collective timed out after 10 min 0 s, late: rank 1; waiting: "
        "ranks 0, 2 in OpType=ALLREDUCE, NumelIn=8, NumelOut=8 (SeqNum 78)"
    )


def test_a_rank_that_waits_in_an_earlier_collective_is_late(scene: Scene) -> None:
    scene.logged(0, watchdog(78)).logged(1, watchdog(71, "OpType=BROADCAST")).ended(0, by=signal.SIGABRT)
    outcome = scene.outcome("rank_failed")
    assert outcome.rank == 1
    assert "late: rank 1; waiting: rank 0 in OpType=ALLREDUCE" in (outcome.error or "")


def test_ranks_in_different_collectives_of_one_number_did_not_run_the_same_program(scene: Scene) -> None:
    scene.logged(0, watchdog(78)).logged(1, watchdog(78, "OpType=ALLREDUCE, NumelIn=512, NumelOut=512"))
    outcome = scene.ended(0, by=signal.SIGABRT).outcome("rank_failed")
    assert outcome.status == "Timeout"
    assert "ranks ran different collectives" in (outcome.error or "")


def test_an_exception_goes_before_the_collective_that_waited_for_its_rank(scene: Scene) -> None:
    scene.logged(0, watchdog(78)).ended(0, by=signal.SIGABRT, at=700.0).failed(1, error_class="ValueError", time=100.0)
    assert scene.outcome("rank_failed").status == "ValueError"


# ------------------------------------------------------------------ logs of real failures

# File → status, kind and what the cause must name, as INDEX.csv has it.
CRASHES = {
    "02": ("OOM (host)", "host_oom", "asked 20.00 GB"),
    "04": ("Timeout", "collective_timeout", "ranks ran different collectives"),
    "05": ("RuntimeError", "shared_memory", "shared memory segment"),
    "07": ("OOM (disk)", "disk_full", "PytorchStreamWriter failed writing"),
    "08": ("OOM (host)", "pinned_memory", "invalid argument"),
    "11": ("OOM", "device_oom", "asked 6.00 MB"),
    "13": ("OOM (host)", "host_oom", "482.00GB"),
    "15": ("OOM (host)", "pinned_memory", "out of memory"),
}


def pin_memory(error: BaseException) -> None:
    raise error


def raised(text: str) -> BaseException:
    """The exception that a log tells of; of a log without one, its text."""
    last = re.findall(r"^(?:\S+: )?(\w+Error): (.*)", text, re.DOTALL | re.MULTILINE)
    error = RuntimeError(last[-1][1] if last else text)
    if "pin_memory" not in text:
        return error
    try:
        pin_memory(error if last else RuntimeError("CUDA error: out of memory"))  # its last line is cut off
    except RuntimeError as caught:
        return caught
    raise AssertionError


def test_logs_of_real_failures_have_their_causes(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for log in shared_files("crash_logs", "*.txt"):
        status, kind, named = CRASHES[log.name[:2]]
        text, scene = log.read_text(), Scene(tmp_path / log.stem)
        scene.folder.mkdir()
        lines = re.findall(r"^.*?\[(?:rank)?(\d)\](?=:\[E| .*NCCL).*$", text, re.MULTILINE)
        by_rank = {int(rank): [each for each in text.splitlines() if f"{rank}]" in each] for rank in lines or ["0"]}
        world = max(by_rank) + 1
        for number, own in by_rank.items():
            own_text = "\n".join(own) if lines else text
            scene.logged(number, own_text)
            if kind == "collective_timeout":
                scene.ended(number, by=signal.SIGABRT)
                continue
            failure = failure_report(raised(own_text), rank=number, phase="step", step=None)
            write_json(scene.folder / f"rank{number}.json", fakes.failed_file(replace(failure, time=100.0 + number)))
        with subtests.test(log.name):
            outcome = scene.outcome("rank_failed", world=world)
            assert (outcome.status, outcome.kind) == (status, kind)
            assert named in (outcome.error or "")


# ------------------------------------------------------------------ exceptions


def test_the_first_exception_in_time_is_the_cause_whatever_its_rank(scene: Scene) -> None:
    scene.failed(0, error_class="RuntimeError", time=100.5).failed(1, error_class="KeyError", time=100.0)
    outcome = scene.outcome()
    assert (outcome.status, outcome.rank, outcome.phase) == ("KeyError", 1, "backward")
    assert outcome.error == "KeyError in backward: shapes do not match"


def test_an_exception_wins_over_the_broken_collective_seen_before_it_was_written(scene: Scene) -> None:
    scene.failed(0, kind="peer_lost", time=99.0).failed(1, error_class="AssertionError", time=100.0)
    assert (scene.outcome().status, scene.outcome().rank) == ("AssertionError", 1)


def test_a_broken_collective_is_the_cause_only_where_every_rank_reports_one(scene: Scene) -> None:
    scene.failed(0, kind="peer_lost", error_class="DistBackendError", time=101.0)
    scene.failed(1, kind="peer_lost", error_class="DistStoreError", time=100.0)
    assert (scene.outcome().status, scene.outcome().rank) == ("DistStoreError", 1)


def test_a_rank_that_ended_in_silence_is_the_cause_of_its_peers_broken_collective(scene: Scene) -> None:
    scene.failed(0, kind="peer_lost", time=100.0).ended(1, code=1, at=99.0).ended(0, code=1, at=100.1)
    outcome = scene.reached(1, "init").outcome()
    assert (outcome.status, outcome.rank, outcome.phase) == ("Crashed", 1, "init")
    assert "rank 1 ended without writing its file (exit code 1)" in (outcome.error or "")


def test_a_rank_with_a_broken_file_is_the_cause_of_its_peers_broken_collective(scene: Scene) -> None:
    scene.failed(0, kind="peer_lost").wrote(1, "{").ended(0, code=1).ended(1, code=1)
    assert (scene.outcome().status, scene.outcome().rank) == ("Crashed", 1)


def test_a_peer_that_had_finished_well_is_not_silent(scene: Scene) -> None:
    scene.measured(0).ended(0, code=0, at=99).failed(1, kind="peer_lost", error_class="DistBackendError")
    outcome = scene.ended(1, code=1, at=100).outcome()
    assert (outcome.status, outcome.rank) == ("DistBackendError", 1)


def test_an_exception_cannot_call_itself_what_it_is_not(scene: Scene, subtests: pytest.Subtests) -> None:
    """A class named Success in a model's own code must not make a success."""
    for name in (*schema.STATUSES, "not a name", "", "❌"):
        with subtests.test(name):
            outcome = scene.failed(0, error_class=name).outcome(world=1)
            assert outcome.status == "Crashed"
            assert not outcome.success


def test_every_report_is_kept_in_order_of_time(scene: Scene) -> None:
    found = scene.failed(0, time=101.0).failed(1, time=100.0).findings()
    assert [failure.rank for failure in found.failures] == [1, 0]


# ------------------------------------------------------------------ time, and the user


def test_a_trial_over_its_time_names_the_flag_the_rank_and_where_its_stacks_lie(scene: Scene) -> None:
    outcome = scene.reached(0, "backward").reached(1, "forward").outcome("timeout")
    assert (outcome.status, outcome.rank, outcome.phase) == ("Timeout", 1, "forward"), "the rank that came least far"
    assert "still running after 1 min 30 s (--timeout)" in (outcome.error or "")
    assert f"{scene.folder}/rank*.stacks" in (outcome.error or "")


def test_a_stalled_trial_names_the_rank_that_was_silent_longest(scene: Scene) -> None:
    scene.reached(0, "step").reached(1, "step")
    old = RankBeat(scene.folder, 1)
    old.age(60)
    outcome = scene.outcome("stalled")
    assert (outcome.status, outcome.rank) == ("Timeout", 1)
    assert "no sign of life for 30 s (--stall-timeout)" in (outcome.error or "")


class RankBeat:
    """A rank's last beat, to be made older."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank{rank}.beat"

    def age(self, seconds: float) -> None:
        import struct

        layout = struct.Struct("<qdqqdq")
        values = list(layout.unpack(self.path.read_bytes()))
        values[1] -= seconds
        self.path.write_bytes(layout.pack(*values))


def test_a_rank_that_never_said_hello_is_the_one_that_stalled(scene: Scene) -> None:
    outcome = scene.reached(0, "step").outcome("stalled")
    assert (outcome.rank, outcome.phase) == (1, None)


def test_a_rank_that_had_written_its_file_is_not_the_one_that_stalled(scene: Scene) -> None:
    assert scene.reached(0, "exit").reached(1, "step").measured(0).outcome("stalled").rank == 1


@pytest.mark.parametrize("ending", ["timeout", "stalled"])
def test_the_signals_we_send_after_a_timeout_do_not_hide_it(scene: Scene, ending: Ending) -> None:
    scene.ended(0, by=signal.SIGKILL).ended(1, by=signal.SIGTERM)
    assert scene.outcome(ending).status == "Timeout"


def test_an_interruption_is_told_as_one_whatever_the_ranks_say_while_dying(scene: Scene) -> None:
    scene.failed(0, error_class="KeyboardInterrupt").ended(1, by=signal.SIGKILL)
    outcome = scene.outcome(None)
    assert outcome.status == "Interrupted"
    assert outcome.error == "interrupted while it ran"


# ------------------------------------------------------------------ nothing to go by


def test_a_trial_that_left_nothing_at_all_is_a_crash_before_hello(scene: Scene) -> None:
    outcome = scene.outcome()
    assert (outcome.status, outcome.rank, outcome.phase) == ("Crashed", 0, None)
    assert "rank 0 ended before saying hello (no exit code seen)" in (outcome.error or "")


def test_of_several_missing_ranks_one_that_is_known_to_have_ended_is_named(scene: Scene) -> None:
    assert scene.ended(1, code=9).outcome().rank == 1


def test_a_folder_that_is_gone_is_a_crash_and_no_exception_of_ours(tmp_path: Path) -> None:
    assert Scene(tmp_path / "gone").outcome().status == "Crashed"


def test_exits_that_are_torn_or_foreign_are_passed_over(scene: Scene) -> None:
    (scene.folder / "exits.jsonl").write_text('{"rank": 0}\nnull\n[1]\ngarbage\n')
    scene.ended(1, by=signal.SIGSEGV)
    with (scene.folder / "exits.jsonl").open("a") as file:
        file.write('{"rank": 1, "pi')
    assert (scene.outcome().status, scene.outcome().rank) == ("Crashed", 1)


ENDS = ["measured", "other", "peer_lost", "device_oom", "broken", "missing"]


def test_any_two_ends_in_any_way_make_one_outcome(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """No combination may end in an exception of ours, and only two measured ranks are a success."""
    for first, second, exits in product(ENDS, ENDS, ["none", "codes", "signals", "launcher"]):
        folder = tmp_path / first / second / exits
        folder.mkdir(parents=True)
        scene = staged(Scene(folder), first, second, exits)
        for ending in ENDINGS:
            with subtests.test(f"{first}, {second}, {exits}, {ending}"):
                outcome = scene.outcome(ending)
                assert outcome.success is (first == second == "measured")
                assert outcome.success or outcome.error
                if "device_oom" in (first, second):
                    assert outcome.status == "OOM"


def staged(scene: Scene, first: str, second: str, exits: str) -> Scene:
    """Two ranks that ended so, and what is known of their exits."""
    for rank, end in enumerate((first, second)):
        if end == "measured":
            scene.measured(rank)
        elif end == "broken":
            scene.wrote(rank, "{")
        elif end != "missing":
            scene.failed(rank, kind=end, time=100.0 + rank)
        if exits == "codes":
            scene.ended(rank, code=int(end != "measured"), at=100.1 + rank)
        elif exits == "signals":
            scene.ended(rank, by=signal.SIGKILL, at=100.1 + rank)
    return scene.ended(None, code=1, at=103.0) if exits == "launcher" else scene


def test_the_details_name_cause_phase_rank_and_log(scene: Scene) -> None:
    outcome = scene.failed(1, error_class="KeyError", message="'h'", phase="init").outcome()
    log = os.fspath(scene.folder / "rank1.log")
    assert outcome.details == f"KeyError in init: 'h'; phase init; rank 1; log {log}"


def test_a_success_without_a_measurement_is_no_record() -> None:
    with pytest.raises(ValueError, match="measurement of every rank"):
        replace(fakes.success(), ranks=())
