"""The main path of a run, with a fake launcher: each record saved before it is seen, and an end that loses nothing.

The last part goes the whole way from Options to exit code with that launcher, without a process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis import load_results
from ds_bench.cli import script as cli
from ds_bench.config.spec import Trial
from ds_bench.doctor import disk
from ds_bench.planning import trial_planner
from ds_bench.prediction import what_if
from ds_bench.records import schema
from ds_bench.records.resume import remaining_trials
from ds_bench.records.run_folder import RunFolder
from ds_bench.records.schema import TrialRecord
from ds_bench.runner import ResultBuilder
from ds_bench.system import environment, gpu_state, processes
from tests.support import fakes
from tests.support.fakes import FakeLauncher
from tests.support.scripted_run import ScriptedRun

# ------------------------------------------------------------------ the loop


def test_every_record_is_saved_and_the_flat_files_are_whole_before_the_next_trial(scripted: ScriptedRun) -> None:
    seen: list[tuple[int, int]] = []

    def count(trial: Trial) -> TrialRecord:
        rows = scripted.rows() if list(scripted.output.glob("*_comparison_*.json")) else []
        seen.append((len(RunFolder.open(scripted.folder).records()), len(rows)))
        return fakes.success(trial)

    scripted.run(script=FakeLauncher(*[count] * 4))
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a bug of ours")])
def test_an_exception_of_the_launcher_leaves_what_had_finished(scripted: ScriptedRun, error: BaseException) -> None:
    ends = contextlib.nullcontext() if isinstance(error, KeyboardInterrupt) else pytest.raises(RuntimeError)
    with ends:
        assert scripted.run(script=FakeLauncher("Success", error)) == 130
    assert [each.outcome.status for each in RunFolder.open(scripted.folder).records()] == ["Success"]


def test_a_trial_is_saved_before_changes_to_it_are_judged_which_takes_seconds(
    scripted: ScriptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(what_if, "alternatives", killed)
        assert scripted.run("--stages", "0", "1", script=FakeLauncher("OOM")) == 130
    store = RunFolder.open(scripted.folder)
    assert [each.outcome.status for each in store.records()] == ["OOM"]
    assert [row["status"] for row in scripted.rows()] == ["❌ OOM"]
    assert scripted.resume(script=FakeLauncher("OOM")) == 1
    assert [trial.configuration.stage for trial in scripted.launcher.launched] == [1]
    # Then the record is saved again, with the changes, and is still one row.
    assert [bool(each.trial.prediction["alternatives"]) for each in store.records() if each.trial.prediction] == [
        False, False, True
    ]  # fmt: skip
    assert [run.outcome.status for run in load_results.load(scripted.folder).runs] == ["OOM", "OOM"]


def test_an_unsupported_trial_is_never_launched_and_its_reason_is_kept(scripted: ScriptedRun) -> None:
    assert scripted.run("--stage", "2", family="offload") == 0
    assert [trial.configuration.name for trial in scripted.launcher.launched] == ["none", "cpu_optimizer"]
    refused = RunFolder.open(scripted.folder).records()[2]
    assert (refused.outcome.status, refused.outcome.error) == (schema.UNSUPPORTED, refused.trial.unsupported)
    assert (refused.ranks, refused.launch, refused.wall_seconds) == ((), None, None)
    assert not (scripted.folder / "trials" / refused.trial.trial_id).exists()


# ------------------------------------------------------------------ resuming


def test_a_trial_without_a_record_that_counts_remains_to_be_run() -> None:
    plan = [fakes.trial(fakes.zero(stage), trial_id=f"0_{stage}") for stage in (0, 1, 2)]
    done = [fakes.failure(plan[0], "OOM"), fakes.failure(plan[1], "Timeout"), fakes.success(plan[2])]
    clipped = replace(plan[2], ds_config={**plan[2].ds_config, "gradient_clipping": 0.5})
    for records, left in (
        ([], plan),
        (done[1:2], [plan[0], plan[2]]),
        (done, []),
        ([fakes.failure(each, schema.INTERRUPTED) for each in plan], plan),
        ([*done[:2], fakes.success(clipped)], [plan[2]]),
    ):
        assert remaining_trials(plan, records) == left


def test_results_are_in_the_order_of_the_plan_with_the_latest_record_of_each_trial() -> None:
    """A record of a trial outside the plan follows and is not lost."""
    options = fakes.options("zero", "--model", "tiny", "--seq-length", "16", "--stages", "0", "1")
    plan = trial_planner.make_run_plan([options], fakes.make_config, fakes.machine())
    results = ResultBuilder(plan, fakes.environment(), "run")
    first, second = plan.trials
    stranger = fakes.success(fakes.trial(fakes.zero(3)))
    for record in (stranger, fakes.success(second), fakes.failure(first), then := fakes.success(first)):
        results.add(record)
    assert [run.record for run in results.runs] == [then, fakes.success(second), stranger]


def test_an_interrupted_run_keeps_its_rows_and_is_completed_by_resuming(
    scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        scripted.run("--num-steps", "7", "--stall-timeout", "20", script=FakeLauncher("Timeout", "Interrupted")) == 130
    )
    assert [row["stage"] for row in scripted.rows()] == [0, 1]
    assert scripted.resume() == 0
    assert [trial.configuration.stage for trial in scripted.launcher.launched] == [1, 2, 3]
    assert scripted.launcher.folders[0].name == "01_zero1_attempt2"  # a fresh folder for every attempt
    capsys.readouterr()
    assert scripted.resume() == 0
    assert scripted.launcher.launched == []
    assert "ZeRO-2" in capsys.readouterr().out
    assert scripted.resume("--retry", "timeout", "--stall_timeout", "30") == 0  # under its other name
    assert [(trial.configuration.stage, trial.workload.num_steps) for trial in scripted.launcher.launched] == [(0, 7)]
    assert [(row["stage"], row["success"]) for row in scripted.rows()] == [(s, True) for s in (0, 1, 2, 3)]


def test_a_run_is_resumed_only_as_it_began(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.json"
    text = json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "train_batch_size": 8})
    mine.write_text(text)
    flags = ("--stages", "0", "--configs", str(mine), "--profile", "torch")
    assert scripted.run(*flags, script=FakeLauncher("Success", "Interrupted")) == 130
    mine.write_text(text.replace("8", "12"))
    for family, more, problem in (
        ("offload", [], "was started by zero_stage_comparison.py"),
        (
            "zero",
            ["--profile", "memory"],
            "different --profile, --checkpoint or --monitor flags from those it began with",
        ),
        ("zero", ["--profile", "torch"], "the file of mine has changed since the run began"),
    ):
        mine.write_text(text.replace("8", "12") if "mine" in problem else text)
        assert scripted.resume(*more, family=family) == 2
        assert problem in capsys.readouterr().err
    mine.write_text(text)
    assert scripted.resume() == 0
    assert [trial.inspection.profiles for trial in scripted.launcher.launched] == [("torch",)]
    assert [row["success"] for row in scripted.rows()] == [True, True]


# ------------------------------------------------------------------ signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_acts_only_while_waiting(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with processes.handling_signals():
        assert signal.getsignal(number) != before
        with pytest.raises(KeyboardInterrupt), processes.raising_on_interrupt():
            os.kill(os.getpid(), number)
    with processes.handling_signals():
        os.kill(os.getpid(), number)  # while cleaning up: remembered until the next wait
        os.kill(os.getpid(), signal.SIGTERM)
        assert processes.interrupt_requested()
        with pytest.raises(KeyboardInterrupt), processes.raising_on_interrupt():
            pytest.fail("it went on")
    assert signal.getsignal(number) == before
    # One that is ignored stays ignored, as nohup and background jobs of a shell require.
    signal.signal(number, signal.SIG_IGN)
    try:
        with processes.handling_signals(), processes.raising_on_interrupt():
            os.kill(os.getpid(), number)
            assert not processes.interrupt_requested()
    finally:
        signal.signal(number, before)


def succeed_and_interrupt(trial: Trial) -> TrialRecord:
    os.kill(os.getpid(), signal.SIGINT)
    return fakes.success(trial)


@pytest.mark.parametrize(
    ("script", "last", "records"),
    [
        (FakeLauncher("Success", "Interrupted"), "continue with: python zero_stage_comparison.py --resume ", 2),
        (FakeLauncher(succeed_and_interrupt), "continue with: python zero_stage_comparison.py --resume ", 1),
        # A signal that comes as the last trial ends leaves nothing to continue.
        (FakeLauncher("Success", succeed_and_interrupt), "every trial had finished", 2),
    ],
)
def test_an_interruption_says_how_to_go_on(
    script: FakeLauncher, last: str, records: int, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.launcher = script
    flags = ["--model", "tiny", "--seq-length", "16", "--output-dir", str(scripted.output), "--stages", "0", "1"]
    assert cli.main("zero", fakes.make_config, flags) == 130
    folder = scripted.folder
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"interrupted; {last}{folder if last.startswith('continue') else ''}"
    assert len(RunFolder.open(folder).records()) == records


# ------------------------------------------------------------------ the whole way, from flags to exit code


def test_a_trial_that_runs_again_on_other_hosts_is_the_same_row(scripted: ScriptedRun) -> None:
    """As in the next allocation of a cluster."""
    assert scripted.run("--stages", "0", "1", script=FakeLauncher("Success", "Timeout")) == 0
    (path,) = (scripted.output / "runs").glob("*/records.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["trial"]["placement"]["hosts"] = [["another", 1]]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert scripted.resume("--retry", "Timeout") == 0
    result = load_results.load(path.parent)
    assert [each.outcome.status for each in result.runs] == ["Success", "Success"]
    assert result.notes == ()


def test_a_file_that_is_refused_is_a_row_among_others_and_alone_a_mistake(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 7}}))
    bad_file = ("--configs", str(tmp_path / "mine.json"))
    assert scripted.run(*bad_file) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert not scripted.output.exists()
    assert scripted.run("--stages", "1", *bad_file) == 0
    assert [row["status"] for row in scripted.rows()] == ["✅ Success", "❌ Unsupported"]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_of_a_launcher_runs(
    rank: int, scripted: ScriptedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert scripted.run("--stages", "1") == 0
    assert [trial.placement.num_gpus for trial in scripted.launcher.launched] == [2] * (rank == 0)
    if rank:
        assert capsys.readouterr() == ("", "")


def test_a_dry_run_prints_every_config_and_checks_what_the_run_would_and_writes_nothing(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripted.run("--dry-run", "--checkpoint", "--axis", "loss=model,tiled") == 0
    out = capsys.readouterr().out
    assert out.count('"train_batch_size": 4') == 8
    assert out.count("deepspeed.launcher.runner") == 8
    assert out.count("# sets loss=tiled") == 4
    assert "# whether there is room for a checkpoint is checked when this is run" in out
    missing = str(tmp_path / "missing")
    assert scripted.run("--dry-run", "--checkpoint-path", missing) == scripted.run("--checkpoint-path", missing) == 2
    assert capsys.readouterr().err.count(f"--checkpoint-path {missing} is not a folder") == 2
    assert not scripted.output.exists()


def test_every_fact_is_read_once_and_every_row_planned_and_predicted_once(
    scripted: ScriptedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, counted)

    once = [(gpu_state, "read_gpus"), (environment, "read_environment"), (disk, "check_nvme_folder")]
    others = [(trial_planner, "make_trials"), (fakes, "make_config"), (what_if, "alternatives")]
    for owner, name in (*once, *others):
        count(owner, name)
    assert scripted.run("--repeats", "2", "--nvme-path", str(tmp_path), family="offload") == 0
    assert counts == {**{name: 1 for _, name in once}, "make_trials": 1, "make_config": 4}
    # Further configurations are predicted for a row that lacks memory.


# ------------------------------------------------------------------ what the end of a run says and leaves


def test_the_end_recommends_a_row_and_leaves_its_configuration(
    scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripted.run("--stages", "1", "3") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "? Too close to call between ZeRO-1 and 3. Start with ZeRO-1, the simplest." in shown
    (folder,) = (scripted.output / "runs").glob("*/recommended")
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "accelerate.yaml",
        "ds_config.json",
        "ds_config_accelerate.json",
        "ds_config_trainer.json",
        "recommendation.json",
    }
    stored = json.loads((folder / "recommendation.json").read_text(encoding="utf-8"))
    assert (stored["choice"], stored["decided"], stored["tied"]) == ("ZeRO-1", False, ["ZeRO-1", "ZeRO-3"])
    # The suggested command is the one that works: it adds two rounds to this run.
    assert stored["try_next"] == f"python zero_stage_comparison.py --resume {folder.parent} --repeats 3"
    assert f"Next: {stored['try_next']}" in shown
    assert json.loads((folder.parent / "run.json").read_text(encoding="utf-8"))["recommendation"] == stored
    assert json.loads((folder.parent / "recommendation.json").read_text(encoding="utf-8")) == stored
    (beside,) = scripted.output.glob("zero_recommendation_*.json")
    assert json.loads(beside.read_text(encoding="utf-8")) == stored
    scripted.output = scripted.output.with_name("none")
    assert scripted.run(script=FakeLauncher("OOM", "OOM", "OOM", "OOM")) == 1
    assert "✗ No row trained: 4 OOM." in capsys.readouterr().out
    assert not (scripted.folder / "recommended").exists()
    assert json.loads((scripted.folder / "recommendation.json").read_text(encoding="utf-8"))["choice"] is None
    scripted.output = scripted.output.with_name("json")
    assert scripted.run("--stages", "1", "--format", "json") == 0
    assert [row["recommendation"]["choice"] for row in json.loads(capsys.readouterr().out)] == ["ZeRO-1"]


def test_results_have_the_requested_order_of_rows_whatever_the_order_of_the_rounds(scripted: ScriptedRun) -> None:
    assert scripted.run("--stages", "2", "0", "1", "--repeats", "2") == 0
    assert [row["stage"] for row in scripted.rows()] == [2, 0, 1] * 2
    ran = [record.trial for record in RunFolder.open(scripted.folder).records()]
    assert [trial.trial_id for trial in ran] == sorted(trial.trial_id for trial in ran)
    assert [trial.configuration.stage for trial in ran[:3]] != [2, 0, 1], "choose another seed"
    for file in scripted.output.glob("*comparison_*"):
        file.unlink()  # then the order is that of run.json
    assert [run.row.stage for run in load_results.load(scripted.folder).runs] == [2, 0, 1] * 2


def test_files_are_rows_that_can_be_exported_and_compared_with(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without other rows, they are the only ones; a kept batch is the row's own."""
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "train_batch_size": 8}))
    flags = ("--configs", str(mine), "--keep-batch", "--num-gpus", "2", "--grad-accum", "2")
    assert scripted.run(*flags, "--export", "mine") == 0
    assert [(row["strategy"], row["batch_size"], row["grad_accum"]) for row in scripted.rows()] == [("mine", 4, 1)]
    assert json.loads((scripted.folder / "export_mine" / "ds_config.json").read_text())["train_batch_size"] == 8
    stored = json.loads((scripted.folder / "run.json").read_text())["trials"][0]["configuration"]
    assert stored["file_text"] == mine.read_text()
    slow = FakeLauncher(by_strategy={"zero3": lambda trial: fakes.success(trial, step_seconds=(0.2,) * 20)})
    assert scripted.run("--stages", "1", "3", "--relative-to", "3", "--format", "markdown", script=slow) == 0
    assert "2.00x" in capsys.readouterr().out


def test_output_that_cannot_be_written_costs_neither_the_files_nor_the_configuration(
    scripted: ScriptedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)
        assert scripted.run("--stages", "1", "3") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert len(scripted.rows()) == 2
    assert list((scripted.output / "runs").glob("*/recommended/ds_config.json"))


@pytest.mark.parametrize(
    ("method", "call", "shown"), [("write_rows", 3, ["ZeRO-1", "ZeRO-3"]), ("append", 2, ["ZeRO-1"])]
)
def test_a_full_disk_does_not_lose_the_table_of_finished_rows(
    method: str,
    call: int,
    shown: list[str],
    scripted: ScriptedRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Full when the rows are written at the end, or the record of the second trial."""
    write, calls = getattr(RunFolder, method), []

    def fail_from(*values: Any) -> None:
        calls.append(values)
        if len(calls) >= call:
            raise OSError(errno.ENOSPC, "No space left on device", "results")
        write(*values)

    monkeypatch.setattr(RunFolder, method, fail_from)
    assert scripted.run("--stages", "1", "3") == 1
    printed = capsys.readouterr()
    assert all(f"{label} " in printed.out for label in shown)
    assert printed.err.count("No space left on device") == 1
    assert "make room, then: " in printed.err
