"""Progress of a run: plain lines in a file, one live line on a terminal, nothing when quiet."""

from __future__ import annotations

import io
import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_bench.analysis.row import make_run
from ds_bench.config.spec import Trial
from ds_bench.launch import Progress
from ds_bench.planning import trial_planner
from ds_bench.prediction.trial_predictions import MemoryCapacity
from ds_bench.records.schema import Profile, TrialRecord
from ds_bench.report.progress import ProgressReporter, nsys_command, profile_files_line, run_plan_lines
from ds_bench.system import terminal as module
from ds_bench.system.terminal import StatusLine
from tests.support import fakes

GB = fakes.GB
TRIALS = [fakes.trial(fakes.zero(stage)) for stage in range(4)]


class Stream(io.StringIO):
    """A stream that is a terminal or not, and what was written before each flush."""

    encoding = "utf-8"

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self._terminal = terminal
        self.flushed = ""

    def isatty(self) -> bool:
        return self._terminal

    def flush(self) -> None:
        self.flushed = self.getvalue()

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


def set_clock(monkeypatch: pytest.MonkeyPatch, step_seconds: float) -> None:
    """A clock that is ``step_seconds`` later each time it is read."""
    times = itertools.count(100.0, step_seconds)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))


def at(phase: str = "forward", step: int = 5, last: float | None = 0.5, elapsed: float = 10.0) -> Progress:
    return Progress(phase=phase, step=step, last_step_seconds=last, elapsed_seconds=elapsed)


def lines_of(plan: Sequence[Trial], records: Sequence[TrialRecord], **options: Any) -> list[str]:
    """The lines in a file after trials ended with these records."""
    stream = Stream()
    reporter = ProgressReporter(StatusLine(stream), plan, **options)
    for record in records:
        listen = reporter.begin(record.trial)
        for step in range(20):
            listen(at(step=step))
        reporter.end(record)
    assert stream.flushed == stream.getvalue()  # at once, for whoever follows the file
    return stream.getvalue().splitlines()


# ------------------------------------------------------------------ into a file


def test_a_file_gets_one_line_as_each_trial_ends_with_the_time_left() -> None:
    """Two trials of 12.5 s; 4 × 128 tokens in 0.1 s, 2 GB on the host."""
    assert lines_of(TRIALS[:2], [*map(fakes.success, TRIALS[:2])]) == [
        "[1/2] ZeRO-0 ✓ 5,120 tok/s 2.00 GB of host memory · about 12 s left",
        "[2/2] ZeRO-1 ✓ 5,120 tok/s 2.00 GB of host memory",
    ]
    forward = fakes.trial(fakes.zero(0), of=fakes.workload(pass_type="forward"))
    (line,) = lines_of([forward], [fakes.success(forward)])
    assert line.startswith("[1/1] forward passes ✓ ")  # of the model without DeepSpeed


def test_repeats_are_counted_and_the_time_left_is_of_all_that_is_left() -> None:
    """Mean of 12.5 s and 3 s, and five more. After an interruption no further trial runs."""
    on = fakes.placement(accelerator="cuda")
    plan = [fakes.trial(fakes.zero(stage), on=on, repeat=repeat) for repeat in range(3) for stage in (0, 1)]
    records = [
        fakes.success(plan[0], gpu_peak_bytes=int(75.42 * GB)),
        fakes.failure(plan[1], requested_bytes=int(50.24 * GB), free_bytes=int(3.6 * GB), phase="init"),
        fakes.failure(plan[2], "ValueError", error="ValueError in forward:\n no"),
        fakes.failure(plan[3], "Killed", error="killed by SIGTERM"),
        fakes.failure(plan[4], "Unsupported", error=None, phase=None),
        fakes.failure(plan[5], "Interrupted", error="interrupted while it ran"),
    ]
    assert lines_of([*plan, fakes.trial(fakes.zero(2))], records, repeats=3) == [
        "[1/7] ZeRO-0 run 1/3 ✓ 5,120 tok/s 75.4 GB · about 1 min 15 s left",
        "[2/7] ZeRO-1 run 1/3 ✗ OOM in init, requested 50.2 GB, 3.60 GB free · about 39 s left",
        "[3/7] ZeRO-0 run 2/3 ✗ ValueError in forward: no · about 25 s left",
        "[4/7] ZeRO-1 run 2/3 ✗ Killed in backward: killed by SIGTERM · about 16 s left",
        "[5/7] ZeRO-0 run 3/3 ✗ Unsupported · about 9.8 s left",
        "[6/7] ZeRO-1 run 3/3 ✗ Interrupted in backward",
    ]


def test_verbose_adds_beginnings_durations_caveats_and_details() -> None:
    record = replace(fakes.failure(), caveats=("it is warm",))
    (line,) = lines_of(TRIALS[:1], [record])
    assert lines_of(TRIALS[:1], [record], verbose=True) == [
        "[1/1] ZeRO-0 …",
        f"{line} · took 3.0 s",
        "      it is warm",
        f"      {record.outcome.details}",
    ]


# ------------------------------------------------------------------ on a terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Stream:
    set_clock(monkeypatch, 2.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return Stream(terminal=True)


@pytest.mark.parametrize(
    ("seen", "done", "text"),
    [
        (at("import", step=-1, last=None), 0, "[1/4] ZeRO-0 · import"),
        (at(step=1), 0, "warm-up 1/2 (forward)"),
        (at("backward", step=5), 0, "[1/4] ZeRO-0 · step 3/10 (backward), last step 0.5 s, about 44 s left"),
        (at(step=5), 1, "about 28 s left"),
        (at("inspect", step=99), 0, "step 10/10"),  # fp16 may warm up longer than asked
        (at(last=0.0), 0, "step 3/10 (forward)"),
    ],
)
def test_a_terminal_shows_the_step_of_the_trial_and_the_time_left_of_the_comparison(
    seen: Progress, done: int, text: str, terminal: Stream
) -> None:
    """7 steps of 0.5 s and two trials of 12.5 s are 28.5 s; without a finished trial 13.5 s + 3 × 13.5 s - 10 s."""
    with StatusLine(terminal) as line:
        reporter = ProgressReporter(line, TRIALS)
        for trial in TRIALS[:done]:
            reporter.begin(trial)
            reporter.end(fakes.success(trial))
        terminal.truncate(0)
        reporter.begin(TRIALS[done])(seen)
        assert text in terminal.text
        assert ("left" in terminal.text) == bool(seen.last_step_seconds)
    written = terminal.getvalue()
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is shown again


@pytest.mark.parametrize(
    ("is_terminal", "quiet", "step_seconds", "drawn"),
    [(True, False, 0.1, range(3, 5)), (False, False, 2.0, range(2, 3)), (True, True, 2.0, range(1))],
)
def test_a_terminal_is_redrawn_once_a_second_a_file_every_15_seconds(
    is_terminal: bool, quiet: bool, step_seconds: float, drawn: range, terminal: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, step_seconds)
    stream = Stream(terminal=is_terminal)
    changes = 0
    with StatusLine(stream, quiet=quiet) as line:
        for second in range(1, 35 if is_terminal else 20):
            before = stream.getvalue()
            line.show(f"building CPUAdam … {second} s")
            changes += stream.getvalue() != before
        if quiet:
            ProgressReporter(line, TRIALS).begin(TRIALS[0])(at())
            ProgressReporter(line, TRIALS).end(fakes.failure())
    assert changes in drawn
    assert not quiet or stream.getvalue() == ""


# ------------------------------------------------------------------ the plan


def test_the_plan_of_a_run_has_the_predicted_memory_and_what_fits() -> None:
    """Cards of 10 GB; predicted are 9, 12 and 2 GB; of the last row a part is unknown, and the fourth has none."""
    made = trial_planner.make_run_plan([fakes.options("zero", "--repeats", "2")], fakes.make_config, fakes.machine())
    (plan,) = made.plans
    sizes, on = {"zero0": 9, "zero1": 12, "zero2": 2}, replace(plan.placement, accelerator="cuda")

    def predicted(trial: Trial) -> Trial:
        name = trial.configuration.name
        unknown = "activations" if name == "zero2" else None
        of = fakes.prediction(gpu={"parameters": sizes.get(name, 0) * GB}, host={"x": 1}, unknown=unknown)
        return replace(trial, placement=on, prediction=of if name in sizes else None)

    facts = replace(plan.facts, memory=MemoryCapacity(gpu_bytes=10 * GB, host_bytes=None))
    plan = replace(plan, trials=[*map(predicted, plan.trials)], facts=facts, placement=on)
    assert run_plan_lines(replace(made, plans=[plan]), 3) == [
        "4 rows × 2 runs = 8 trials",
        "",
        "Configuration  trials    GPU memory   fits",
        "ZeRO-0              2  9.00–16.0 GB  tight",
        "ZeRO-1              2  12.0–19.1 GB     no",
        "ZeRO-2              2     ≥ 2.00 GB      ?",
        "and 1 more",
    ]
    points = [replace(plan, options=replace(plan.options, point={"training.seq_len": size})) for size in (64, 128)]
    lines = run_plan_lines(replace(made, plans=points), 20)
    assert lines[0] == "2 points × 4 rows × 2 runs = 16 trials"
    assert [line.split("  ")[-2:] for line in lines[3:]] == [["2.00 GB – 12.00 GB", "0 of 4, 1 tight, 2 ?"]] * 2


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
