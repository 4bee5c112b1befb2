"""The search for the largest micro-batch or sequence: the sizes it tries, and whole searches with scripted trials."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.cli import commands
from ds_bench.cli import script as cli
from ds_bench.config.spec import Trial
from ds_bench.planning.largest_batch_search import largest_trained, next_size, resolution
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.fakes import FakeLauncher
from tests.support.scripted_run import ScriptedRun

# ------------------------------------------------------------------ the next micro-batch to try


def search(answer: int, start: int, limit: int = 4096) -> tuple[int | None, list[int]]:
    """The result if exactly the sizes up to ``answer`` train, and the probes it took."""
    known: dict[int, bool] = {}
    while (size := next_size(known, start, limit)) is not None:
        assert size not in known, f"{size} tried twice"
        known[size] = size <= answer
        assert len(known) <= 64
    return largest_trained(known), list(known)


@given(st.integers(0, 2000), st.integers(1, 3000))
def test_largest_that_trains_is_found_from_any_start(answer: int, start: int) -> None:
    """Exactly below 64, else to 1/32, with probes that grow with the logarithm of the error of the prediction."""
    best, probes = search(answer, start)
    assert len(probes) <= 2 * abs(answer - start).bit_length() + 4
    if answer == 0:
        assert best is None
    else:
        assert best is not None
        assert 0 <= answer - best < resolution(best)
        assert answer >= 64 or best == answer


@given(st.integers(1, 2000), st.floats(0.85, 1.15))
def test_exact_prediction_costs_two_probes_and_a_near_one_few(answer: int, factor: float) -> None:
    assert search(answer, answer)[1] == [answer, answer + resolution(answer)]
    assert len(search(answer, max(1, round(answer * factor)))[1]) <= 9


def test_limit_is_tried_and_never_exceeded_and_luck_above_a_failure_does_not_count() -> None:
    for start in (1, 7, 64):
        best, probes = search(10**6, start, limit=64)
        assert (best, max(probes)) == (64, 64)
    assert search(0, 1) == (None, [1])
    assert largest_trained({4: True, 8: False, 16: True}) == 4
    assert next_size({4: True, 8: False, 16: True}, 4, 64) == 6


# ------------------------------------------------------------------ whole searches

Ends = Callable[[Trial], TrialRecord]


def trains_up_to(sizes: dict[str, int], otherwise: str = "OOM", *, field: str = "batch_size") -> Ends:
    return runs_out_in_the_row(None, sizes, otherwise, field=field)


def runs_out_in_the_row(
    probes: int | None, rows: dict[str, int], status: str = "OOM", *, field: str = "batch_size"
) -> Ends:
    """Probes train up to one size (None: the row's), and the rows, which run for longer, only up to a smaller one."""

    def end(trial: Trial) -> TrialRecord:
        is_probe = probes is not None and trial.trial_id.startswith("probe")
        most = probes if is_probe else rows[trial.configuration.name]
        seconds = (0.1,) * trial.workload.num_steps
        fits = getattr(trial.workload, field) <= most
        return fakes.success(trial, step_seconds=seconds) if fits else fakes.failure(trial, status)

    return end


class Machine(ScriptedRun):
    """Searches; ``end`` says how each trial ends."""

    def search(self, end: Ends, *arguments: str) -> int:
        return self.run("--batch-size", "auto", *arguments, script=in_every_row(end))

    def probes(self) -> list[dict[str, Any]]:
        (path,) = self.output.glob("runs/*/probes.jsonl")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def sizes(self) -> list[tuple[Any, ...]]:
        return [(row["strategy"], row["batch_size"], row["success"]) for row in self.rows()]


def in_every_row(end: Ends) -> FakeLauncher:
    return FakeLauncher(by_strategy={f"zero{stage}": end for stage in range(4)})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_each_strategy_is_compared_at_its_own_largest_and_on_request_at_the_common_one(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = trains_up_to({"zero1": 5, "zero3": 11})
    assert machine.search(ends, "--stages", "1", "3", "--common-batch") == 0
    assert [(row["strategy"], row["batch_size"], row["batch_policy"]) for row in machine.rows()] == [
        ("zero1", 5, "largest"),
        ("zero3", 11, "largest"),
        ("zero1", 5, "given"),
        ("zero3", 5, "given"),
    ]
    assert {entry["outcome"]["status"] for entry in machine.probes()} == {"OOM", "Success"}
    machine.output = machine.output.with_name("own")
    capsys.readouterr()
    assert machine.search(ends, "--stages", "1", "3") == 0
    assert machine.sizes() == [("zero1", 5, True), ("zero3", 11, True)]
    out = capsys.readouterr().out
    assert "each row's largest micro-batch" in out
    assert "2.20× slower ?" in out  # 11 / 5 at equal step times: compared although the batches differ
    assert "★ Use ZeRO-3" in out


@pytest.mark.parametrize("status", ["OOM", "RuntimeError"])
def test_row_shows_why_nothing_trains_and_resume_probes_again_what_was_no_lack_of_memory(
    machine: Machine, status: str
) -> None:
    assert machine.search(trains_up_to({"zero1": 0}, status), "--stages", "1") == 1
    assert machine.rows()[0]["status"] == f"❌ {status}"
    # No smaller micro-batch helps against another failure.
    assert (machine.rows()[0]["batch_size"] == 1) if status == "OOM" else len(machine.probes()) == 1
    earlier = [probe["trial"]["workload"]["batch_size"] for probe in machine.probes()]
    assert machine.resume(script=in_every_row(trains_up_to({"zero1": 5}))) == (status == "OOM")
    again = [probe["trial"]["workload"]["batch_size"] for probe in machine.probes()][len(earlier) :]
    assert again[:1] == ([] if status == "OOM" else earlier)
    assert (("zero1", 5, True) in machine.sizes()) == (status != "OOM")


def test_interrupted_search_runs_no_row_and_is_resumed_without_repeating_a_probe(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    fits = trains_up_to({"zero1": 5, "zero3": 5})

    def interrupted_at_zero3(trial: Trial) -> TrialRecord:
        return fakes.failure(trial, "Interrupted") if trial.configuration.stage == 3 else fits(trial)

    machine.launcher = in_every_row(interrupted_at_zero3)
    flags = ["--model", "tiny", "--seq-length", "16", "--output-dir", str(machine.output), "--batch-size", "auto"]
    assert cli.main("zero", fakes.make_config, [*flags, "--stages", "1", "3"]) == 130
    assert "continue with: python zero_stage_comparison.py --resume " in capsys.readouterr().err
    assert not list(machine.output.glob("*_comparison_*.json"))
    before = len(machine.probes())
    assert machine.resume(script=in_every_row(fits)) == 0
    assert {entry["trial"]["configuration"]["name"] for entry in machine.probes()[before:]} == {"zero3"}
    assert machine.sizes() == [("zero1", 5, True), ("zero3", 5, True)]


def fails_above(probes: dict[int, str], rows: dict[int, str] | None = None, *, phase: str = "forward") -> Ends:
    """Trials above a size fail: size → status, the largest first. ``rows``: None for the same as probes."""

    def end(trial: Trial) -> TrialRecord:
        limits = probes if rows is None or trial.trial_id.startswith("probe") else rows
        failed = (status for most, status in limits.items() if trial.workload.batch_size > most)
        status = next(failed, None)
        return fakes.success(trial) if status is None else fakes.failure(trial, status, phase=phase)

    return end


SLOW_ABOVE_8 = fails_above({12: "OOM", 8: "Timeout"})
ROW_OF_ZERO3_HANGS = fails_above({8: "OOM"}, {0: "Timeout"}, phase="init")
ROW_OF_ZERO3_NEEDS_MORE = fails_above({8: "OOM"}, {5: "OOM"})


@pytest.mark.parametrize(
    ("commands", "rows", "slow_probes"),
    [
        pytest.param(
            [{"zero1": fails_above({5: "Timeout"})}],
            {(4, "✅ Success", 3): ["micro-batch 8"]},
            [4096 >> halved for halved in range(10)],
            id="sizes are halved until one trains",
        ),
        pytest.param(
            [{"zero1": fails_above({0: "Timeout"})}],
            {(1, "❌ Timeout", 3): []},
            [4096 >> halved for halved in range(13)],
            id="none trains in time",
        ),
        pytest.param(
            [{"zero1": fails_above({0: "Timeout"}, phase="init")}],
            {(4096, "❌ Timeout", 3): []},
            [4096],
            id="a hang before the first step is no size that is too slow",
        ),
        pytest.param(
            [{"zero1": fails_above({64: "OOM"}, {16: "Timeout"})}],
            {(64, "❌ Timeout", 1): [], (32, "❌ Timeout", 1): [], (16, "✅ Success", 3): ["micro-batch 32"]},
            [],
            id="only the row is too slow",
        ),
        pytest.param(
            [{"zero1": fails_above({64: "OOM"}, {32: "Timeout", 31: "OOM"})}],
            {(64, "❌ Timeout", 1): [], (32, "❌ OOM", 1): [], (31, "✅ Success", 3): []},
            [],
            id="after the time limit memory ends the search",
        ),
        pytest.param(
            [{"zero1": SLOW_ABOVE_8, "zero3": ROW_OF_ZERO3_HANGS},
             {"zero1": SLOW_ABOVE_8, "zero3": ROW_OF_ZERO3_NEEDS_MORE}],
            {(8, "✅ Success", 3): ["micro-batch 12"]},
            [12, 12],
            id="a step back of another row repeats no probe of this command",
        ),
        pytest.param(
            [{"zero1": SLOW_ABOVE_8}, {"zero1": fails_above({8: "OOM"})}],
            {(8, "✅ Success", 3): []},
            [12],
            id="a later search ends at the same size for another reason",
        ),
        pytest.param(
            [{"zero1": SLOW_ABOVE_8}, {"zero1": fails_above({15: "OOM"})}],
            {(15, "✅ Success", 3): [], (8, "✅ Success", 3): []},
            [12],
            id="a later search finds a larger size",
        ),
        pytest.param(
            [{"zero1": fails_above({5: "Timeout"})}, {"zero1": fails_above({100: "Timeout"})}],
            {(64, "✅ Success", 3): ["micro-batch 128"], (4, "✅ Success", 3): []},
            [*(4096 >> halved for halved in range(10)), *(4096 >> halved for halved in range(6))],
            id="with a longer limit sizes are halved again",
        ),
    ],
)  # fmt: skip
def test_time_limit_ends_a_search_and_is_no_lack_of_memory(
    machine: Machine,
    commands: list[dict[str, Ends]],
    rows: dict[tuple[int, str, int], list[str]],
    slow_probes: list[int],
) -> None:
    """``rows``: size, status and number of runs of ZeRO-1 → the sizes that its caveats on the search name."""
    first, *later = (FakeLauncher(by_strategy=ends) for ends in commands)
    stages = [name.removeprefix("zero") for name in commands[0]]
    machine.run("--batch-size", "auto", "--repeats", "3", "--stages", *stages, script=first)
    for launcher in later:
        machine.resume("--retry", "timeout", script=launcher)
    runs = [(each["batch_size"], each["status"], each["caveat_list"]) for each in machine.rows() if each["stage"] == 1]
    count = Counter((size, status) for size, status, _ in runs)
    assert {
        (size, status, count[size, status]): [each["values"]["size"] for each in caveats if "size" in each["values"]]
        for size, status, caveats in runs
    } == rows
    slow = [each["trial"] for each in machine.probes() if each["outcome"]["status"] == "Timeout"]
    assert [trial["workload"]["batch_size"] for trial in slow] == slow_probes


def test_points_of_a_sweep_over_ranks_search_for_themselves(machine: Machine, tmp_path: Path) -> None:
    def ends(trial: Trial) -> TrialRecord:
        fits = trial.workload.batch_size <= 8 * trial.placement.num_gpus
        return fakes.success(trial) if fits else fakes.failure(trial, "OOM")

    text = "model: {name: tiny}\ntraining: {seq_len: 16, local_batch_size: auto}\nconfigurations: {stages: [1]}\n"
    (path := tmp_path / "ranks.yaml").write_text(f"{text}launch: {{accelerator: cpu, num_gpus: [1, 2]}}\n")
    machine.launcher = in_every_row(ends)
    assert commands.main(["run", str(path), "--output-dir", str(machine.output)]) == 0
    assert [(row["num_gpus"], row["batch_size"]) for row in machine.rows()] == [(1, 8), (2, 16)]


# ------------------------------------------------------------------ the longest sequence


def test_longest_sequence_is_chosen_whatever_its_speed(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = trains_up_to({"zero1": 100, "zero3": 200}, field="seq_length")
    flags = ("--batch-size", "1", "--seq-length", "auto", "--stages", "1", "3")
    assert machine.run(*flags, script=in_every_row(lengths)) == 0
    found = [(row["strategy"], row["seq_length"], row["seq_policy"]) for row in machine.rows()]
    assert found == [("zero1", 96, "longest"), ("zero3", 192, "longest")]  # to 16 tokens of a model of 256 positions
    out = " ".join(capsys.readouterr().out.split())
    assert "each row's longest sequence" in out
    assert "Use ZeRO-3: it trains sequences of 192 tokens, the longest" in out
    (told,) = machine.output.glob("runs/*/run.json")
    assert "ZeRO-1 is left out: it trained sequences of 96 tokens at most" in told.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("tokens", "length", "limit"),
    [(None, 256, "the model has no more positions"), (100, 96, "the token file has no more")],
)
def test_search_ends_at_the_positions_of_the_model_or_the_end_of_the_tokens(
    machine: Machine, tmp_path: Path, tokens: int | None, length: int, limit: str
) -> None:
    ids = tmp_path / "ids.uint16"
    ids.write_bytes(bytes(2 * (tokens or 0)))
    data = () if tokens is None else ("--data", str(ids))
    script = in_every_row(trains_up_to({"zero1": 10**6}, field="seq_length"))
    assert machine.run("--seq-length", "auto", "--stages", "1", *data, script=script) == 0
    (row,) = machine.rows()
    assert row["seq_length"] == length
    assert f"{length} tokens was tried: {limit}" in row["caveats"]


def test_row_that_runs_out_at_its_largest_size_steps_back_in_the_same_run(
    machine: Machine, subtests: pytest.Subtests, capsys: pytest.CaptureFixture[str]
) -> None:
    for status in ("OOM", "OOM (host)"):
        with subtests.test(status):
            machine.output = machine.output.with_name(status)
            rows = {"zero1": 4, "zero3": 5}
            assert machine.search(runs_out_in_the_row(5, rows, status), "--stages", "1", "3", "--repeats", "3") == 0
            sizes = {(row["strategy"], row["batch_size"]): row["success"] for row in machine.rows()}
            assert sizes == {("zero1", 5): False, ("zero1", 4): True, ("zero3", 5): True}
            # The two other runs at the size that is too large are not worth their time.
            assert [row["repeat"] for row in machine.rows() if row["batch_size"] == 4] == [0, 1, 2]
            assert len(machine.rows()) == 7
            out = capsys.readouterr().out
            assert "✗ ZeRO-1" in out
            assert "--activation-checkpointing" not in out  # the row is there, one size below


def test_steps_back_grow_until_a_size_trains_or_the_least_does_not(machine: Machine) -> None:
    """A row that needs much more memory than its probes costs a few failed runs and still gets a result."""
    assert machine.search(runs_out_in_the_row(64, {"zero1": 40}), "--stages", "1") == 0
    assert machine.sizes() == [("zero1", 33, True), *(("zero1", size, False) for size in (64, 63, 61, 57, 49))]
    machine.output = machine.output.with_name("least")
    assert machine.search(runs_out_in_the_row(3, {"zero1": 0}), "--stages", "1") == 1
    assert sorted(row["batch_size"] for row in machine.rows()) == [1, 2, 3]


def test_interrupted_step_back_shows_finished_rows_and_is_resumed(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    ends, failed = runs_out_in_the_row(64, {"zero1": 64, "zero3": 40}), []

    def interrupted_after_the_failure(trial: Trial) -> TrialRecord:
        if failed:
            return fakes.failure(trial, "Interrupted")
        record = ends(trial)
        if not record.outcome.success and not trial.trial_id.startswith("probe"):
            failed.append(trial)
        return record

    assert machine.search(interrupted_after_the_failure, "--stages", "1", "3") == 130
    captured = capsys.readouterr()
    assert "ZeRO-1" in captured.out
    assert "continue with: " in captured.err
    assert machine.resume(script=FakeLauncher(by_strategy={"zero1": ends, "zero3": ends})) == 0
    assert {row["strategy"] for row in machine.rows() if row["success"]} == {"zero1", "zero3"}
    assert all(row["batch_size"] < 64 for row in machine.rows() if row["strategy"] == "zero3" and row["success"])
