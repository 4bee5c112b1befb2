"""What is told while trials run: plain lines into a file, one live line on a terminal, nothing when quiet."""

from __future__ import annotations

import io
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.analysis.row import make_run
from ds_bench.config.spec import Trial
from ds_bench.launch import Progress
from ds_bench.records.schema import Profile
from ds_bench.report.progress import ProgressReporter, nsys_command, profile_files_line
from ds_bench.system import terminal as module
from ds_bench.system.terminal import StatusLine
from tests.support import fakes

GB = fakes.GB


class Stream(io.StringIO):
    """A stream of an encoding of choice, a terminal or not."""

    def __init__(self, encoding: str = "utf-8", terminal: bool = False) -> None:
        super().__init__()
        self._encoding, self._terminal = encoding, terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


class Clock:
    """A clock of which every look is two seconds later."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 2.0
        return self.now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Stream:
    monkeypatch.setattr(module, "time", Clock())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return Stream(terminal=True)


def trials() -> list[Trial]:
    return [fakes.trial(fakes.zero(stage)) for stage in (0, 1)]


def at(phase: str = "forward", step: int = 5, last: float | None = 0.5, elapsed: float = 10.0) -> Progress:
    return Progress(phase=phase, step=step, last_step_seconds=last, elapsed_seconds=elapsed)


def reporter_to(
    stream: Stream, plan: list[Trial] | None = None, *, quiet: bool = False, verbose: bool = False, repeats: int = 1
) -> ProgressReporter:
    return ProgressReporter(StatusLine(stream, quiet=quiet), plan or trials(), repeats, verbose=verbose)


# ------------------------------------------------------------------ into a file


def test_passes_of_the_model_alone_are_not_called_by_a_stage() -> None:
    stream = Stream()
    trial = fakes.trial(fakes.zero(0), of=fakes.workload(pass_type="forward"))
    reporter = reporter_to(stream, [trial])
    reporter.begin(trial)
    reporter.end(fakes.success(trial))
    assert stream.text.startswith("[1/1] forward passes ✓ ")


def test_a_file_gets_one_result_line_as_each_trial_ends_with_the_time_left() -> None:
    """Two trials of 12.5 s; 4 × 128 tokens in 0.1 s, 2 GB on the host."""
    stream = Stream()
    reporter = reporter_to(stream)
    for trial in trials():
        listen = reporter.begin(trial)
        for step in range(20):
            listen(at(step=step))
        reporter.end(fakes.success(trial))
    assert stream.getvalue().splitlines() == [
        "[1/2] ZeRO-0 ✓ 5,120 tok/s 2.00 GB of host memory · about 12 s left",
        "[2/2] ZeRO-1 ✓ 5,120 tok/s 2.00 GB of host memory",
    ]


def test_repeats_are_counted_and_the_time_left_is_of_all_that_is_left() -> None:
    """Mean of 12.5 s and 3 s, and four more."""
    on = fakes.placement(accelerator="cuda")
    plan = [fakes.trial(fakes.zero(stage), on=on, repeat=repeat) for repeat in range(3) for stage in (0, 1)]
    stream = Stream()
    reporter = reporter_to(stream, plan, repeats=3)
    reporter.begin(plan[0])
    reporter.end(fakes.success(plan[0], gpu_peak_bytes=int(75.42 * GB)))
    reporter.begin(plan[1])
    reporter.end(fakes.failure(plan[1], requested_bytes=int(50.24 * GB), free_bytes=int(3.6 * GB), phase="init"))
    reporter.begin(plan[2])
    reporter.end(fakes.failure(plan[2], "Interrupted"))
    assert stream.getvalue().splitlines() == [
        "[1/6] ZeRO-0 run 1/3 ✓ 5,120 tok/s 75.4 GB · about 1 min 2 s left",
        "[2/6] ZeRO-1 run 1/3 ✗ OOM in optimizer init, asked 50.2 GB, 3.60 GB free · about 31 s left",
        "[3/6] ZeRO-0 run 2/3 ✗ Interrupted in backward: asked 2.00 GB",
    ]


def test_a_failure_is_told_with_its_place_and_cause_in_one_line(subtests: pytest.Subtests) -> None:
    for outcome, text in (
        ({"error": "OOM in backward: asked 2.00 GB"}, "✗ OOM in backward: asked 2.00 GB"),
        ({"status": "ValueError", "error": "ValueError in forward:\n no"}, "✗ ValueError in forward: no"),
        ({"status": "Killed", "error": "killed by SIGTERM"}, "✗ Killed in backward: killed by SIGTERM"),
        ({"status": "Unsupported", "error": None, "phase": None}, "✗ Unsupported"),
    ):
        with subtests.test(outcome=outcome, text=text):
            stream = Stream()
            reporter = reporter_to(stream, trials()[:1])
            reporter.begin(trials()[0])
            reporter.end(fakes.failure(trials()[0], **outcome))
            assert stream.getvalue() == f"[1/1] ZeRO-0 {text}\n"


def test_every_line_is_there_at_once_for_whoever_follows_the_file() -> None:
    flushed: list[str] = []

    class Watched(Stream):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    reporter_to(Watched(), verbose=True).begin(trials()[0])
    assert flushed[-1] == "[1/2] ZeRO-0 …\n"


def test_verbose_tells_durations_caveats_and_details_too_and_normal_does_not() -> None:
    texts = []
    for verbose in (False, True):
        stream = Stream()
        reporter_to(stream, verbose=verbose).end(replace(fakes.failure(), caveats=("it is warm",)))
        texts.append(stream.getvalue())
    normal, detailed = texts
    for text in ("took 3.0 s", "it is warm", "log /run/rank0.log"):
        assert text not in normal
        assert text in detailed
    stream = Stream()
    reporter_to(stream, verbose=True).end(replace(fakes.failure(), wall_seconds=None))  # never launched
    assert "took" not in stream.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_quiet_tells_nothing_at_all(is_terminal: bool) -> None:
    stream = Stream(terminal=is_terminal)
    reporter = reporter_to(stream, quiet=True)
    reporter.begin(trials()[0])(at())
    reporter.end(fakes.failure())
    assert stream.getvalue() == ""


def test_a_file_gets_a_line_of_what_takes_long_every_15_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks two seconds apart, the first of them when the line is made."""
    monkeypatch.setattr(module, "time", Clock())
    stream = Stream()
    line = StatusLine(stream)
    for second in range(1, 20):
        line.show(f"building CPUAdam … {2 * second} s")
    assert stream.getvalue().splitlines() == ["building CPUAdam … 16 s", "building CPUAdam … 32 s"]


# ------------------------------------------------------------------ on a terminal


def shown(terminal: Stream, seen: Progress, done: int = 0) -> str:
    """What the live line says of one look, after ``done`` trials of 12.5 s each."""
    plan = [fakes.trial(fakes.zero(stage)) for stage in (0, 1, 2, 3)]
    line = StatusLine(terminal)
    reporter = ProgressReporter(line, plan)
    for trial in plan[:done]:
        reporter.begin(trial)
        reporter.end(fakes.success(trial))
    reporter.begin(plan[done])(seen)
    text = terminal.text
    line.close()
    return text


def test_a_terminal_shows_the_step_of_the_trial_and_the_time_left_of_the_comparison(
    terminal: Stream, subtests: pytest.Subtests
) -> None:
    """7 steps of 0.5 s and two trials of 12.5 s are 28.5 s; without a finished trial 13.5 s + 3 × 13.5 s - 10 s."""
    for seen, done, text in (
        (at("import", step=-1, last=None), 0, "[1/4] ZeRO-0 · import"),
        (at(step=1), 0, "warm-up 1/2 (forward)"),
        (at("backward", step=5), 0, "[1/4] ZeRO-0 · step 3/10 (backward), last step 0.5 s, about 44 s left"),
        (at(step=5), 1, "about 28 s left"),
        (at("inspect", step=99), 0, "step 10/10"),  # fp16 may warm up longer than asked
        (at(last=0.0), 0, "step 3/10 (forward)"),
    ):
        with subtests.test(text):
            terminal.truncate(0)
            live = shown(terminal, seen, done)
            assert text in live
            assert ("left" in live) == bool(seen.last_step_seconds)


def test_a_terminal_is_left_with_its_cursor_shown(terminal: Stream) -> None:
    line = StatusLine(terminal)
    with line:
        ProgressReporter(line, trials()).begin(trials()[0])(at())
    written = terminal.getvalue()
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")


def test_the_terminal_is_redrawn_at_most_once_a_second(terminal: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        now = 100.0

        @classmethod
        def monotonic(cls) -> float:
            cls.now += 0.1
            return cls.now

    monkeypatch.setattr(module, "time", Slow)
    line = StatusLine(terminal)
    drawn: list[int] = []
    for step in range(35):
        before = terminal.getvalue()
        line.show(f"step {step}")
        drawn += [step] if terminal.getvalue() != before else []
    line.close()
    assert 3 <= len(drawn) <= 4


# ------------------------------------------------------------------ profiles


def test_the_line_at_the_end_of_a_run_counts_the_files_of_profiles_that_are_there(tmp_path: Path) -> None:
    profile = Profile(name="torch", files=("trials/00_zero1/profiles/torch_rank0.txt", "deleted.txt"))
    run = make_run(fakes.success(profiles=(profile,)))
    assert profile_files_line([run], tmp_path) is None
    path = tmp_path / profile.files[0]
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 2048)
    assert profile_files_line([run], tmp_path) == f"Profiles: 1 file, 2.00 KB, in {tmp_path}/trials/*/profiles"


def test_the_command_for_nsys_repeats_the_run_with_ranks_that_it_can_record() -> None:
    arguments = ["--model", "gpt2", "--set", "a=b c", "--profile", "nsys"]
    command = nsys_command("zero", arguments, {})
    assert command is not None
    words = shlex.split(command)
    assert words[:2] == ["nsys", "profile"]
    assert "--capture-range=cudaProfilerApi" in words
    run = ["python", "zero_stage_comparison.py", *arguments, "--launcher", "deepspeed"]
    assert words[words.index("python") :] == run
    assert nsys_command("zero", arguments, {"NSYS_PROFILING_SESSION_ID": "1"}) is None
