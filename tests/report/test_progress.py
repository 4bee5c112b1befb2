"""What is told while trials run: plain lines into a file, one live line on a terminal, nothing when quiet."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest

from ds_bench.config.spec import Trial
from ds_bench.launch import Progress
from ds_bench.report.progress import ProgressReporter
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


def test_a_stream_that_prints_ascii_only_gets_ascii() -> None:
    stream = Stream(encoding="ascii")
    trial = fakes.trial(fakes.offload("cpu_optimizer"))
    reporter = reporter_to(stream, [trial], verbose=True)
    reporter.begin(trial)
    reporter.end(replace(fakes.success(trial), caveats=("2 × 3 …",)))
    assert stream.getvalue().isascii()
    assert "ZeRO-3 + CPU optimizer ok 5,120 tok/s" in stream.getvalue()


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


def test_a_terminal_shows_where_the_trial_is(terminal: Stream) -> None:
    text = shown(terminal, at("backward", step=5))  # two of them warm-up
    assert "[1/4] ZeRO-0 · step 3/10 (backward), last step 0.5 s" in text


def test_warm_up_steps_are_told_apart_from_measured_ones(terminal: Stream) -> None:
    assert "warm-up 1/2 (forward)" in shown(terminal, at(step=1))


def test_before_the_first_step_the_phase_is_told(terminal: Stream) -> None:
    text = shown(terminal, at("import", step=-1, last=None))
    assert "[1/4] ZeRO-0 · import" in text
    assert "left" not in text


def test_the_time_left_is_of_the_whole_comparison(terminal: Stream) -> None:
    """7 steps of 0.5 s here, then two more trials of 12.5 s each: 28.5 s."""
    assert "about 28 s left" in shown(terminal, at(step=5), done=1)


def test_without_a_finished_trial_the_others_are_taken_to_last_as_long_as_this_one(terminal: Stream) -> None:
    """10 s so far and 3.5 s to go: 13.5 s a trial, and three more of them: 44 s."""
    assert "about 44 s left" in shown(terminal, at(step=5, elapsed=10.0))


def test_steps_beyond_the_plan_do_not_count_beyond_it(terminal: Stream) -> None:
    """fp16 may warm up longer than asked."""
    text = shown(terminal, at("inspect", step=99))
    assert "step 10/10" in text


def test_the_live_line_is_gone_before_a_line_that_stays(terminal: Stream) -> None:
    line = StatusLine(terminal)
    reporter = ProgressReporter(line, trials()[:1])
    reporter.begin(trials()[0])(at())
    assert line._live is not None
    reporter.end(fakes.success(trials()[0]))
    assert line._live is None
    assert terminal.text.rstrip().endswith("ZeRO-0 ✓ 5,120 tok/s 2.00 GB of host memory")


def test_a_terminal_is_left_with_its_cursor_shown(terminal: Stream) -> None:
    line = StatusLine(terminal)
    with line:
        ProgressReporter(line, trials()).begin(trials()[0])(at())
    written = terminal.getvalue()
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")


def test_closing_twice_or_without_a_line_is_no_error(terminal: Stream) -> None:
    line = StatusLine(terminal)
    line.close()
    line.close()
    assert terminal.getvalue() == ""


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


def test_a_listener_takes_whatever_a_watch_may_tell(terminal: Stream) -> None:
    listen = reporter_to(terminal).begin(trials()[0])
    looks: list[dict[str, Any]] = [{"step": -1}, {"last": None}, {"step": 0}, {"elapsed": 0.0}, {"last": 0.0}]
    for look in looks:
        listen(at(**look))
    assert "ZeRO-0" in terminal.text
