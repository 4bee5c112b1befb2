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

    def noise(self, text: str) -> Scene:
        with (self.folder / "exits.jsonl").open("a") as file:
            file.write(text)
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


def test_success_is_every_ranks_valid_file_however_the_trial_ended(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name in ("all", "one"):
        (tmp_path / name).mkdir()
    both, one = Scene(tmp_path / "all").measured(0, 1), Scene(tmp_path / "one").measured(0)
    both.wrote(2, "garbage")  # of a rank beyond the world
    (one.folder / ".rank1.json.77.tmp").write_text(VALID)  # of a rank that died writing
    for ending in ENDINGS:
        with subtests.test(ending):
            found = both.findings(ending)
            assert found.outcome == Outcome(status="Success")
            assert [rank.rank for rank in found.measurements] == [0, 1]
            missing = one.ended(0, code=0).ended(1, code=0).findings(ending)
            assert (missing.outcome.success, missing.measurements) == (False, ())


def test_a_bad_end_after_the_file_is_success_with_a_caveat(tmp_path: Path, subtests: pytest.Subtests) -> None:
    ways: list[tuple[dict[str, int], Ending, str | None]] = [
        ({"code": 0}, "ended", None),
        ({"code": 3}, "ended", "code 3"),
        ({"by": signal.SIGSEGV}, "ended", "SIGSEGV"),
        ({"by": 99}, "ended", "signal 99"),
        ({"by": signal.SIGKILL}, "hung_at_exit", "hung at exit: still there 10 s after its results were written"),
    ]
    for number, (how, ending, said) in enumerate(ways):
        with subtests.test(how=how):
            folder = tmp_path / str(number)
            folder.mkdir()
            found = Scene(folder).measured(0, 1).ended(0, code=0).ended(1, **how).findings(ending)
            assert found.outcome.success
            assert len(found.caveats) == (said is not None)
            assert not said or said in found.caveats[0]


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


# ------------------------------------------------------------------ invalid files


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
        "", VALID[: len(VALID) // 2], "null", '{"measurement": {}}', '{"failure": {"rank": 1}}', b"\xff\xfe\x00garbage",
        damaged(rank=0), damaged(world_size=4), damaged(colour="red"), damaged(step_seconds=[]),
        damaged(step_seconds=[0.1, -0.1]), damaged(step_seconds=["fast"]), damaged(step_seconds=[float("nan")]),
        damaged(window_seconds=float("inf")), damaged(window_seconds=0), damaged(losses=[float("nan")]),
        damaged(micro_batch_size=0),
    ):  # fmt: skip
        with subtests.test(content=content):
            found = scene.wrote(1, content).findings()
            assert (found.outcome.status, found.outcome.rank) == ("Crashed", 1)
            assert "rank1.json is not a valid rank file" in (found.outcome.error or "")
            assert found.measurements == ()


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


def test_unknown_bytes_are_not_guessed(scene: Scene) -> None:
    assert "free 0 B" in (scene.failed(0, kind="device_oom", free_bytes=0).outcome(world=1).error or "")
    error = scene.failed(0, kind="device_oom").outcome(world=1).error or ""
    assert "free" not in error
    assert "asked" not in error


# ------------------------------------------------------------------ the cause: by class, then by time, never by rank


def watchdog(number: int, operation: str = "OpType=ALLREDUCE, NumelIn=8, NumelOut=8") -> str:
    return (
        f"[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, {operation}, Timeout(ms)=600000) ran for 600024 milliseconds before timing out.\n"
    )


TERM, KILL, ABRT, SEGV, BUS = signal.SIGTERM, signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS
Build = Callable[[Scene], Scene]
CAUSES: dict[str, tuple[Build, Ending, str, int | None, str]] = {  # → status, rank, what its error must say
    "of two that ran out the first": (
        lambda s: s.failed(0, kind="device_oom", time=61.0).failed(1, kind="host_oom", time=60.0),
        "ended", "OOM (host)", 1, ""),
    "a rank that was killed": (lambda s: s.ended(1, by=KILL), "rank_failed", "Killed", 1, "no sign of lack of memory"),
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
        lambda s: s.logged(0, watchdog(78)).ended(0, by=ABRT, at=700.0).failed(1, error_class="ValueError", time=100.0),
        "rank_failed", "ValueError", 1, ""),
    "a rank that waits in an earlier collective is late": (
        lambda s: s.logged(0, watchdog(78)).logged(1, watchdog(71, "OpType=BROADCAST")).ended(0, by=ABRT),
        "rank_failed", "Timeout", 1, "late: rank 1; waiting: rank 0 in OpType=ALLREDUCE"),
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
        lambda s: s.failed(0, kind="peer_lost").wrote(1, "{").ended(0, code=1).ended(1, code=1),
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
    "nothing at all": (lambda s: s, "ended", "Crashed", 0, "rank 0 ended before saying hello (no exit code seen)"),
    "exit code 0 without a file": (
        lambda s: s.measured(0).ended(1, code=0), "ended", "Crashed", 1, "before saying hello (exit code 0)"),
    "of missing ranks one that is known to have ended": (lambda s: s.ended(1, code=9), "ended", "Crashed", 1, ""),
    "exits that are torn or foreign": (
        lambda s: s.noise('{"rank": 0}\nnull\n[1]\ngarbage\n').ended(1, by=SEGV).noise('{"rank": 1, "pi'),
        "ended", "Crashed", 1, "SIGSEGV"),
}  # fmt: skip


def test_the_cause_of_an_ending(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for number, (name, (build, ending, status, rank, said)) in enumerate(CAUSES.items()):
        with subtests.test(name):
            folder = tmp_path / str(number)
            folder.mkdir()
            outcome = build(Scene(folder)).outcome(ending)
            assert (outcome.status, outcome.rank) == (status, rank)
            assert said in (outcome.error or "")
    assert Scene(tmp_path / "gone").outcome().status == "Crashed"


@pytest.mark.parametrize("number", [SEGV, ABRT, BUS, signal.SIGILL, signal.SIGFPE])
def test_a_rank_that_crashed_is_crashed_and_the_signal_is_named(scene: Scene, number: signal.Signals) -> None:
    outcome = scene.ended(0, by=number).outcome("rank_failed", host_ran_out=True)
    assert (outcome.status, outcome.rank) == ("Crashed", 0)
    assert number.name in (outcome.error or "")
    assert outcome.kind == ("bus_error" if number == BUS else None)


def test_what_the_kernel_and_the_disk_say_explains_a_signal(scene: Scene) -> None:
    scene.reached(1, "forward").ended(1, by=KILL)
    by_kernel = scene.outcome("rank_failed", host_ran_out=True)
    assert (by_kernel.status, by_kernel.rank, by_kernel.phase) == ("OOM (host)", 1, "forward")
    by_disk = scene.outcome("rank_failed", disk_full=True)
    assert (by_disk.status, by_disk.rank) == ("OOM (disk)", 1)
    assert scene.outcome("rank_failed").status == "Killed"
    (scene.folder / "exits.jsonl").unlink()
    assert scene.ended(None, code=247).outcome(host_ran_out=True).status == "OOM (host)", "the launcher's code"


def test_an_end_from_outside_explains_the_ranks_unless_memory_ran_out(scene: Scene) -> None:
    scene.ended(0, by=KILL).failed(1, kind="peer_lost")
    lost, refused = HostLostError("b", "no answer for 15 s"), HostError("b", "OSError: x")
    for facts, status, error in (
        ({"host_error": lost}, "Timeout", "host b: no answer for 15 s"),
        ({"host_error": refused}, "Crashed", "host b: OSError: x"),
        ({"server_died": True}, "Killed", "the preloaded server, the parent of its ranks, was ended from outside"),
        ({"server_died": True, "host_ran_out": True}, "OOM (host)", "the kernel killed the preloaded server or a rank"),
        ({"disk_full": True}, "OOM (disk)", "no space left in the swap folder"),
    ):
        outcome = scene.outcome("host_lost", **facts)
        assert outcome.status == status
        assert (outcome.error or "").startswith(error)
    scene.failed(1, kind="device_oom")
    assert scene.outcome("host_lost", host_error=lost).status == "OOM"


def test_an_interruption_is_reported_as_one_whatever_the_ranks_say_while_dying(scene: Scene) -> None:
    outcome = scene.failed(0, error_class="KeyboardInterrupt").ended(1, by=KILL).outcome(None)
    assert (outcome.status, outcome.error) == ("Interrupted", "interrupted while it ran")


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


# ------------------------------------------------------------------ collectives that time out


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


def test_ranks_in_different_collectives_of_one_number_did_not_run_the_same_program(scene: Scene) -> None:
    scene.logged(0, watchdog(78)).logged(1, watchdog(78, "OpType=ALLREDUCE, NumelIn=512, NumelOut=512"))
    outcome = scene.ended(0, by=signal.SIGABRT).outcome("rank_failed")
    assert outcome.status == "Timeout"
    assert "ranks ran different collectives" in (outcome.error or "")


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


# ------------------------------------------------------------------ any combination


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


def test_a_success_without_a_measurement_is_no_record() -> None:
    with pytest.raises(ValueError, match="measurement of every rank"):
        replace(fakes.success(), ranks=())
