"""From hand-made evidence to one cause: by class and by time, never by rank. Only files make a Success."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ds_bench.launch.host_connections import HostError, HostLostError
from ds_bench.launch.outcome import Evidence, TrialOutcome, determine_outcome
from ds_bench.launch.trial_watcher import Ending, Limits
from ds_bench.records import schema
from ds_bench.records.json_files import append_line, write_json
from ds_bench.records.rank_files import HeartbeatWriter, RankExit
from ds_bench.records.schema import Outcome
from ds_bench.worker.failure import failure_facts
from tests.support import fakes
from tests.support.shared_files import shared_files

LIMITS = Limits(timeout_seconds=90, stall_timeout_seconds=30, failure_grace_seconds=5, exit_grace_seconds=10)
PAIR = fakes.trial(on=fakes.placement(num_gpus=2))
ENDINGS: list[Ending | None] = ["ended", "hung_at_exit", "rank_failed", "timeout", "stalled", None]
TERM, KILL, ABRT, SEGV, BUS = signal.SIGTERM, signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS


class Scene:
    """A trial's folder, and what is known besides."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def measured(self, *ranks: int, suffix: str = ".json") -> Scene:
        for rank in ranks:
            seen = fakes.measurement(PAIR, rank=rank)
            write_json(self.folder / f"rank{rank}{suffix}", fakes.measured_file(seen))
        return self

    def failed(self, rank: int, **changes: Any) -> Scene:
        write_json(self.folder / f"rank{rank}.json", fakes.failed_file(fakes.rank_failure(rank=rank, **changes)))
        return self

    def wrote(self, name: str, text: str) -> Scene:
        (self.folder / name).write_text(text)
        return self

    def ended(self, rank: int | None, *, code: int | None = None, by: int | None = None, at: float = 100.0) -> Scene:
        line = RankExit(rank=rank, pid=1000 + (rank or 0), code=code, signal=by, time=at)
        append_line(self.folder / "exits.jsonl", asdict(line))
        return self

    def reached(self, rank: int, phase: str, step: int = 3) -> Scene:
        HeartbeatWriter(self.folder, rank).beat(phase, step)
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


# ------------------------------------------------------------------ success is one thing

VALID = json.dumps(fakes.measured_file(fakes.measurement(PAIR, rank=1)))


def test_success_is_every_ranks_valid_file_however_the_trial_ended(tmp_path: Path) -> None:
    both, one = Scene(tmp_path / "all").measured(0, 1), Scene(tmp_path / "one").measured(0)
    both.wrote("rank2.json", "garbage")  # of a rank beyond the world
    one.wrote(".rank1.json.77.tmp", VALID)  # of a rank that died writing
    one.ended(0, code=0).ended(1, code=0)
    for ending in ENDINGS:
        found, missing = both.findings(ending), one.findings(ending)
        assert (found.outcome, [rank.rank for rank in found.measurements]) == (Outcome(status="Success"), [0, 1])
        assert (missing.outcome.success, missing.measurements) == (False, ())
    with pytest.raises(ValueError, match="measurement of every rank"):
        replace(fakes.success(), ranks=())


def test_bad_end_after_the_file_is_success_with_a_caveat(tmp_path: Path) -> None:
    ways: list[tuple[dict[str, int], Ending, str]] = [
        ({"code": 0}, "ended", ""),
        ({"code": 3}, "ended", "ended with code 3 after its results were written"),
        ({"by": SEGV}, "ended", "ended with signal SIGSEGV after its results were written"),
        ({"by": 99}, "ended", "ended with signal signal 99 after its results were written"),
        ({"by": KILL}, "hung_at_exit", "hung at exit: still there 10 s after its results were written"),
    ]
    for number, (how, ending, said) in enumerate(ways):
        found = Scene(tmp_path / str(number)).measured(0, 1).ended(0, code=0).ended(1, **how).findings(ending)
        assert (found.outcome.success, found.caveats) == (True, (said,) if said else ())


def test_failure_after_the_window_leaves_a_success_with_what_failed(scene: Scene) -> None:
    scene.measured(0, 1, suffix=".measured.json").failed(0, kind="peer_lost", message="connection closed", time=101.0)
    scene.failed(1, error_class="OutOfMemoryError", kind="device_oom", message="CUDA out\nof memory " + 999 * "x")
    found = scene.findings("rank_failed")
    assert found.outcome.success
    assert [failure.rank for failure in found.failures] == [1, 0], "by time"
    (caveat,) = found.caveats
    assert "(OutOfMemoryError on rank 1: CUDA out of memory" in caveat
    assert caveat.endswith("; the measured steps had finished")
    assert len(caveat) < 350
    assert scene.wrote("rank1.json", "{").outcome("rank_failed").status == "Crashed", "what failed is not known"


def damaged(**changes: Any) -> str:
    content = json.loads(VALID)
    content["measurement"].update(changes)
    return json.dumps(content)


@pytest.mark.parametrize(
    "content",
    [
        "", VALID[: len(VALID) // 2], "null", '{"failure": {"rank": 1}}', damaged(rank=0), damaged(world_size=4),
        damaged(color="red"), damaged(step_seconds=[]), damaged(step_seconds=[0.1, -0.1]),
        damaged(losses=[float("nan")]), damaged(window_seconds=0),
    ],
)  # fmt: skip
def test_file_that_is_torn_foreign_or_impossible_is_a_crash_of_that_rank(scene: Scene, content: str) -> None:
    found = scene.measured(0).ended(0, code=0).ended(1, code=0).wrote("rank1.json", content).findings()
    assert (found.outcome.status, found.outcome.rank, found.measurements) == ("Crashed", 1, ())
    assert "rank1.json is not a valid rank file" in (found.outcome.error or "")


# ------------------------------------------------------------------ resources: whoever says it ran out


def test_oom_on_rank_1_wins_over_the_broken_collective_that_rank_0_saw_first(scene: Scene) -> None:
    scene.failed(0, kind="peer_lost", error_class="DistBackendError", message="Connection closed by peer", time=50.0)
    scene.failed(
        1, kind="device_oom", error_class="OutOfMemoryError", message="CUDA out of memory.", time=60.0,
        requested_bytes=2 * 2**30, free_bytes=3 * 2**29, phase="backward",
    )  # fmt: skip
    error = "OutOfMemoryError in backward, requested 2.00 GB, free 1.50 GB: CUDA out of memory."
    assert scene.ended(0, code=1, at=51).ended(1, code=1, at=61).outcome() == Outcome(
        status="OOM", rank=1, phase="backward", kind="device_oom", requested_bytes=2 * 2**30, free_bytes=3 * 2**29,
        error=error, details=f"{error}; phase backward; rank 1; log {scene.folder / 'rank1.log'}",
    )  # fmt: skip
    assert "free 0 B" in (scene.failed(0, kind="device_oom", free_bytes=0).outcome(world=1).error or "")
    unknown = scene.failed(0, kind="device_oom").outcome(world=1).error
    assert unknown == "RuntimeError in backward: shapes do not match", "unknown bytes are not guessed"


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
def test_what_ran_out_is_named_however_the_trial_ended(scene: Scene, kind: str, status: str) -> None:
    scene.failed(1, kind=kind).ended(0, by=KILL, at=99)
    for ending in ENDINGS:
        outcome = scene.outcome(ending)
        assert (outcome.status, outcome.rank, outcome.kind) == (status, 1, kind), ending


# ------------------------------------------------------------------ the cause: by class, then by time, never by rank


def watchdog(number: int, operation: str = "OpType=ALLREDUCE, NumelIn=8, NumelOut=8") -> str:
    return (
        f"[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, {operation}, Timeout(ms)=600000) ran for 600024 milliseconds before timing out.\n"
    )


Build = Callable[[Scene], Scene]
CAUSES: dict[str, tuple[Build, Ending, str, int | None, str]] = {  # → status, rank, what its error must say
    "of two that ran out the first": (
        lambda s: s.failed(0, kind="device_oom", time=61.0).failed(1, kind="host_oom", time=60.0),
        "ended", "OOM (host)", 1, ""),
    "a rank that was killed": (lambda s: s.ended(1, by=KILL), "rank_failed", "Killed", 1, "no sign that memory"),
    "a signal from outside, then ours": (
        lambda s: s.ended(1, by=signal.SIGXCPU, at=100).ended(0, by=TERM, at=105),
        "rank_failed", "Killed", 1, "SIGXCPU"),
    "the first signal": (lambda s: s.ended(0, by=ABRT, at=101).ended(1, by=SEGV, at=100),
        "ended", "Crashed", 1, "SIGSEGV"),
    "killed before it could report": (
        lambda s: s.failed(0, kind="peer_lost", time=100.2).ended(1, by=KILL, at=100.0).ended(0, code=1, at=100.3),
        "ended", "Killed", 1, ""),
    "a survivor that NCCL's watchdog aborts hides no exception": (
        lambda s: s.failed(1, error_class="ValueError", time=100.0).ended(0, by=ABRT, at=101).ended(1, code=1),
        "rank_failed", "ValueError", 1, ""),
    "a signal of ours hides no exception": (
        lambda s: s.failed(1, error_class="ValueError", time=100.0).ended(0, by=KILL, at=105.5).ended(1, code=1),
        "rank_failed", "ValueError", 1, ""),
    "a signal of ours does not explain a lost peer": (
        lambda s: s.failed(0, kind="peer_lost", time=100.0).ended(0, code=1, at=100.1).ended(1, by=KILL, at=106.0),
        "rank_failed", "Crashed", 1, ""),
    "killed long after another finished": (
        lambda s: s.measured(0).ended(0, code=0, at=10.0).ended(1, by=KILL, at=100.0), "ended", "Killed", 1, ""),
    "a signal after the file": (
        lambda s: s.measured(0).ended(0, by=SEGV, at=90).failed(1, error_class="ValueError"),
        "ended", "ValueError", 1, ""),
    "an interrupt that the script raised itself": (
        lambda s: s.failed(1, error_class="KeyboardInterrupt").ended(1, by=signal.SIGINT),
        "rank_failed", "KeyboardInterrupt", 1, ""),
    "an interrupt from outside": (lambda s: s.ended(1, by=signal.SIGINT), "rank_failed", "Killed", 1, "SIGINT"),
    "the launcher's code 256 - 9": (lambda s: s.ended(None, code=247), "ended", "Killed", None, ""),
    "the launcher's code 256 - 11": (lambda s: s.ended(None, code=245), "ended", "Crashed", None, "SIGSEGV"),
    "the launcher's signal is late": (
        lambda s: s.failed(0, error_class="RuntimeError", time=100.0).ended(None, code=247, at=101.0),
        "ended", "Killed", None, ""),
    "an ordinary code of the launcher": (lambda s: s.ended(None, code=191), "ended", "Crashed", 0, "exit code 191"),
    "a rank's own code is not a signal": (lambda s: s.ended(1, code=247), "ended", "Crashed", 1, "exit code 247"),
    "an exception behind the launcher": (
        lambda s: s.failed(1, error_class="ValueError").ended(None, code=1), "ended", "ValueError", 1, ""),
    "an exception before the collective that waited": (
        lambda s: s.wrote("rank0.log", watchdog(78)).ended(0, by=ABRT, at=700.0).failed(1, error_class="ValueError"),
        "rank_failed", "ValueError", 1, ""),
    "a rank that waits in an earlier collective is late": (
        lambda s: s.wrote("rank0.log", watchdog(78)).wrote("rank1.log", watchdog(71, "OpType=BROADCAST")),
        "rank_failed", "Timeout", 1, "late: rank 1; waiting: rank 0 in OpType=ALLREDUCE"),
    "different collectives of one number": (
        lambda s: s.wrote("rank0.log", watchdog(78)).wrote("rank1.log", watchdog(78, "OpType=ALLREDUCE, NumelIn=5")),
        "rank_failed", "Timeout", 0, "ranks ran different collectives"),
    "the first exception": (
        lambda s: s.failed(0, time=100.5).failed(1, error_class="KeyError", time=100.0),
        "ended", "KeyError", 1, "KeyError in backward: shapes do not match"),
    "an exception after the broken collective that it caused": (
        lambda s: s.failed(0, kind="peer_lost", time=99.0).failed(1, error_class="AssertionError", time=100.0),
        "ended", "AssertionError", 1, ""),
    "every rank has a broken collective": (
        lambda s: s.failed(0, kind="peer_lost", time=101.0).failed(1, kind="peer_lost", error_class="Dist", time=100.0),
        "ended", "Dist", 1, ""),
    "a rank that ended in silence": (
        lambda s: s.failed(0, kind="peer_lost", time=100.0).ended(1, code=1, at=99.0).reached(1, "init"),
        "ended", "Crashed", 1, "rank 1 ended without writing its file (exit code 1)"),
    "a rank with a broken file": (
        lambda s: s.failed(0, kind="peer_lost").wrote("rank1.json", "{").ended(0, code=1).ended(1, code=1),
        "ended", "Crashed", 1, ""),
    "a peer that finished well is not silent": (
        lambda s: s.measured(0).ended(0, code=0).failed(1, kind="peer_lost", error_class="Dist").ended(1, code=1),
        "ended", "Dist", 1, ""),
    "over its time: the rank that came least far": (
        lambda s: s.reached(0, "backward").reached(1, "forward"),
        "timeout", "Timeout", 1, "still running after 1 min 30 s (--timeout); stacks of every rank in "),
    "stalled: the rank that was silent longest": (
        lambda s: s.reached(1, "step").reached(0, "step"),
        "stalled", "Timeout", 1, "no sign of life for 30 s (--stall-timeout)"),
    "stalled: a rank that never said hello": (lambda s: s.reached(0, "step"), "stalled", "Timeout", 1, ""),
    "stalled: not a rank that had written its file": (
        lambda s: s.reached(0, "exit").reached(1, "step").measured(0), "stalled", "Timeout", 1, ""),
    "a timeout, and signals of ours": (lambda s: s.ended(0, by=KILL).ended(1, by=TERM), "timeout", "Timeout", 0, ""),
    "nothing at all": (lambda s: s, "ended", "Crashed", 0, "rank 0 ended before its first heartbeat"),
    "exit code 0 without a file": (
        lambda s: s.measured(0).ended(1, code=0), "ended", "Crashed", 1, "before its first heartbeat (exit code 0)"),
    "of missing ranks one that is known to have ended": (lambda s: s.ended(1, code=9), "ended", "Crashed", 1, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_cause_of_an_ending(scene: Scene, name: str) -> None:
    build, ending, status, rank, said = CAUSES[name]
    outcome = build(scene).outcome(ending)
    assert (outcome.status, outcome.rank) == (status, rank)
    assert said in (outcome.error or "")


@pytest.mark.parametrize(
    ("phase", "steps", "code", "status"),
    [("step", 3, 7, "Crashed"), ("step", 3, 0, "EndedEarly"), ("build", -1, 0, "NoEngine")],
)
def test_a_script_that_exits_early_is_reported_with_its_step_count(
    phase: str, steps: int, code: int, status: str, scene: Scene
) -> None:
    outcome = scene.reached(0, phase, step=steps).ended(0, code=code).outcome(world=1, script_steps=7)
    text = f"the script ended (exit code {code}) after {max(steps, 0)} of 7 steps"
    assert (outcome.status, outcome.error) == (status, text)


def test_rank_that_never_joined_a_collective_is_named_though_the_others_were_aborted(scene: Scene) -> None:
    scene.wrote("rank0.log", watchdog(78)).wrote("rank2.log", watchdog(78)).wrote("rank1.log", "step 4\n")
    scene.reached(1, "forward").ended(0, by=ABRT).ended(2, by=ABRT)
    outcome = scene.outcome("rank_failed", world=3)
    assert (outcome.status, outcome.rank, outcome.phase) == ("Timeout", 1, "forward")
    assert (outcome.kind, outcome.error) == (
        "collective_timeout",
        "collective timed out after 10 min 0 s, late: rank 1; waiting: "
        "ranks 0, 2 in OpType=ALLREDUCE, NumelIn=8, NumelOut=8 (SeqNum 78)",
    )


@pytest.mark.parametrize("number", [SEGV, ABRT, BUS, signal.SIGILL, signal.SIGFPE])
def test_rank_that_crashed_is_crashed_and_the_signal_is_named(scene: Scene, number: signal.Signals) -> None:
    outcome = scene.ended(0, by=number).outcome("rank_failed", host_ran_out=True)
    assert (outcome.status, outcome.rank) == ("Crashed", 0)
    assert number.name in (outcome.error or "")
    assert outcome.kind == ("bus_error" if number == BUS else None)


def test_what_the_kernel_and_the_disk_say_explains_a_signal(scene: Scene) -> None:
    scene.reached(1, "forward").ended(1, by=KILL)
    for facts, status in (({}, "Killed"), ({"host_ran_out": True}, "OOM (host)"), ({"disk_full": True}, "OOM (disk)")):
        outcome = scene.outcome("rank_failed", **facts)
        assert (outcome.status, outcome.rank, outcome.phase) == (status, 1, "forward")
    (scene.folder / "exits.jsonl").unlink()
    assert scene.ended(None, code=247).outcome(host_ran_out=True).status == "OOM (host)", "the launcher's code"


def test_end_from_outside_explains_the_ranks_unless_memory_ran_out(scene: Scene) -> None:
    scene.ended(0, by=KILL).failed(1, kind="peer_lost")
    lost = HostLostError("b", "no answer for 15 s")
    for facts, status, error in (
        ({"host_error": lost}, "Timeout", "host b: no answer for 15 s"),
        ({"host_error": HostError("b", "OSError: x")}, "Crashed", "host b: OSError: x"),
        ({"server_died": True}, "Killed", "the preloaded server, the parent of the ranks, was killed from outside"),
        ({"server_died": True, "host_ran_out": True}, "OOM (host)", "the kernel killed the preloaded server or a rank"),
        ({"disk_full": True}, "OOM (disk)", "no space left in the swap folder"),
    ):
        outcome = scene.outcome("host_lost", **facts)
        assert outcome.status == status
        assert (outcome.error or "").startswith(error)
    interrupted = scene.failed(0, error_class="KeyboardInterrupt").outcome(None)
    assert (interrupted.status, interrupted.error) == ("Interrupted", "interrupted while it ran")
    assert scene.failed(1, kind="device_oom").outcome("host_lost", host_error=lost).status == "OOM"


def test_exception_cannot_call_itself_what_it_is_not(scene: Scene) -> None:
    """A class named Success in a model's own code must not make a success."""
    for name in (*schema.STATUSES, "not a name", "", "❌"):
        outcome = scene.failed(0, error_class=name).outcome(world=1)
        assert (outcome.status, outcome.success) == ("Crashed", False), name


# ------------------------------------------------------------------ logs of real failures

# File → status, kind and what the cause must name, as INDEX.csv has it.
CRASHES = {
    "02": ("OOM (host)", "host_oom", "requested 20.00 GB"),
    "04": ("Timeout", "collective_timeout", "ranks ran different collectives"),
    "05": ("RuntimeError", "shared_memory", "shared memory segment"),
    "07": ("OOM (disk)", "disk_full", "PytorchStreamWriter failed writing"),
    "08": ("OOM (host)", "pinned_memory", "invalid argument"),
    "11": ("OOM", "device_oom", "requested 6.00 MB"),
    "13": ("OOM (host)", "host_oom", "482.00GB"),
    "15": ("OOM (host)", "pinned_memory", "out of memory"),
}


def pin_memory(error: BaseException) -> None:
    raise error


def raised(text: str) -> BaseException:
    """The exception in a log; for a log without one, its text."""
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
        lines = re.findall(r"^.*?\[(?:rank)?(\d)\](?=:\[E| .*NCCL).*$", text, re.MULTILINE)
        by_rank = {int(rank): [each for each in text.splitlines() if f"{rank}]" in each] for rank in lines or ["0"]}
        for number, own in by_rank.items():
            own_text = "\n".join(own) if lines else text
            scene.wrote(f"rank{number}.log", own_text)
            if kind == "collective_timeout":
                scene.ended(number, by=ABRT)
                continue
            facts = failure_facts(raised(own_text), rank=number, phase="step", step=None)
            write_json(scene.folder / f"rank{number}.json", {"failure": {**facts, "time": 100.0 + number}})
        with subtests.test(log.name):
            outcome = scene.outcome("rank_failed", world=max(by_rank) + 1)
            assert (outcome.status, outcome.kind) == (status, kind)
            assert named in (outcome.error or "")


# ------------------------------------------------------------------ any combination

ENDS = ["measured", "other", "peer_lost", "device_oom", "broken", "missing"]


def test_any_two_ends_in_any_way_make_one_outcome(tmp_path: Path) -> None:
    """No combination may end in an exception of ours, and only two measured ranks are a success."""
    for first, second, exits in product(ENDS, ENDS, ["none", "codes", "signals", "launcher"]):
        scene = Scene(tmp_path / first / second / exits)
        for rank, end in enumerate((first, second)):
            if end == "measured":
                scene.measured(rank)
            elif end == "broken":
                scene.wrote(f"rank{rank}.json", "{")
            elif end != "missing":
                scene.failed(rank, kind=end, time=100.0 + rank)
            if exits == "codes":
                scene.ended(rank, code=int(end != "measured"), at=100.1 + rank)
            elif exits == "signals":
                scene.ended(rank, by=KILL, at=100.1 + rank)
        if exits == "launcher":
            scene.ended(None, code=1, at=103.0)
        for ending in ENDINGS:
            outcome = scene.outcome(ending)
            assert outcome.success is (first == second == "measured")
            assert outcome.success or outcome.error
            assert outcome.status == "OOM" or "device_oom" not in (first, second)


def test_a_script_that_ends_with_an_exit_code_is_told_by_its_last_line(tmp_path: Path) -> None:
    ways = {0: ("EndedEarly", "3 of 7"), 2: ("SystemExit", "3 of 7, with exit code 2: error: no such flag")}
    for code, expected in ways.items():
        scene = Scene(tmp_path / str(code)).ended(0, code=code)
        scene.failed(0, kind="ended_early", message="3 of 7", traceback="error: no such flag")
        found = scene.outcome(world=1)
        assert (found.status, found.error) == expected
