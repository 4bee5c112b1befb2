"""The command ``run``: recipes and flags, what a run keeps, resuming, and scripts as recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_bench import runner
from ds_bench.cli import arguments, commands
from ds_bench.cli.report import build_reports
from ds_bench.config import placement, recipe, recipe_file
from ds_bench.config.identity import work_key
from ds_bench.config.spec import Strategy, Trial
from ds_bench.planner import make_run_plan, requested_rows
from ds_bench.records.schema import TrialRecord
from ds_bench.system import gpus
from tests.support import fakes
from tests.support.fakes import FakeLauncher
from tests.support.scripted_run import Run, ScriptedRun

SMALL = """
model: {name: tiny}
training: {seq_len: 16, local_batch_size: 2, steps: 4, warmup_steps: 1}
configurations: {stages: [0, 2]}
launch: {accelerator: cpu}
"""
SWEEP = SMALL.replace("seq_len: 16", "seq_len: [16, 32]")


def test_a_recipe_runs_and_its_files_have_the_name_of_no_script(run: Run, scripted: ScriptedRun) -> None:
    assert run(SMALL) == 0
    assert scripted.trials == [(16, "zero0", 0), (16, "zero2", 0)]
    folder = scripted.folder
    assert folder.name.startswith("comparison_")
    assert (scripted.output / f"{folder.name}.json").is_file()
    stored = json.loads((folder / "run.json").read_text())
    assert stored["family"] == "recipe"
    assert stored["recipe"]["values"]["training"]["seq_len"] == 16
    assert (folder / "recommended" / "ds_config.json").is_file()


def test_flags_and_settings_replace_values_of_the_recipe(run: Run, scripted: ScriptedRun) -> None:
    flags = ("--stages", "1", "--seq-length", "8", "--set", "training.steps=3", "--set", "optimizer.params.lr=0.5")
    assert run(SWEEP, *flags) == 0
    (trial,) = scripted.launcher.launched
    assert (trial.configuration.name, trial.workload.seq_length, trial.workload.num_steps) == ("zero1", 8, 3)
    assert trial.ds_config["optimizer"]["params"]["lr"] == 0.5


def test_configurations_in_the_recipe_are_rows_or_stand_for_a_strategy(run: Run, scripted: ScriptedRun) -> None:
    own = "{zero_optimization: {stage: 2, reduce_bucket_size: auto}, gradient_clipping: 0.25}"
    text = SMALL.replace("{stages: [0, 2]}", f"{{stages: [2], inline: {{mine: {own}, zero2: {own}}}}}")
    assert run(text, "--set", "configurations.inline.zero2.zero_optimization.reduce_bucket_size=1000") == 0
    zero2, mine = scripted.launcher.launched
    assert (zero2.configuration.name, zero2.ds_config["gradient_clipping"]) == ("zero2", 0.25)
    assert zero2.ds_config["zero_optimization"]["reduce_bucket_size"] == 1000
    assert (mine.configuration.name, mine.ds_config["gradient_clipping"]) == ("mine", 0.25)
    assert mine.ds_config["zero_optimization"]["reduce_bucket_size"] == 128 * 128  # as the Trainer resolves "auto"


def test_axes_of_a_recipe_and_of_flags_make_rows(run: Run, scripted: ScriptedRun) -> None:
    text = SMALL + "axes: {overlap_comm: [true, false], reduce_bucket_size: 1000000}"
    assert run(text, "--axis", "overlap_comm=false", "--stages", "2") == 0
    assert [trial.configuration.name for trial in scripted.launcher.launched] == [
        "zero2+overlap_comm=false+reduce_bucket_size=1000000"
    ]


def test_points_of_a_sweep_run_round_by_round_in_one_result(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SWEEP, "--repeats", "2") == 0
    first = [(16, "zero0", 0), (16, "zero2", 0), (32, "zero0", 0), (32, "zero2", 0)]
    assert scripted.trials == [*first, *((length, name, 1) for length, name, _ in reversed(first))]
    identities = [trial.trial_id for trial in scripted.launcher.launched]
    assert identities == sorted(identities)
    assert len(scripted.rows()) == 8
    folder = scripted.folder
    (first_point, second_point) = json.loads((folder / "recommendation.json").read_text())["points"]
    assert (first_point["point"], second_point["point"]) == ({"training.seq_len": 16}, {"training.seq_len": 32})
    assert (folder / "points" / "32" / "recommended" / "ds_config.json").is_file()
    shown = capsys.readouterr().out
    assert "2 points · tiny" in shown
    assert "16 tokens: " in shown
    assert commands.main(["report", str(folder)]) == 0
    assert "micro-batch 2 × 32 tokens" in capsys.readouterr().out


def test_a_report_keeps_the_goal_and_the_reference_row_of_the_recipe(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SMALL, "--relative-to", "2", "--goal", "memory") == 0
    reports = build_reports([scripted.folder])
    assert reports[0].recommendation.goal == "memory"
    baseline = reports[0].comparison.baseline
    assert baseline is not None
    assert baseline.configuration.name == "zero2"
    assert reports[0].commands[0].startswith("python -m ds_bench run ")


def test_each_point_finds_its_own_largest_micro_batch(run: Run, scripted: ScriptedRun) -> None:
    def fits(trial: Trial) -> TrialRecord:
        tokens = trial.workload.batch_size * trial.workload.seq_length
        return fakes.success(trial) if tokens <= 128 else fakes.failure(trial)

    text = SWEEP.replace("local_batch_size: 2", "local_batch_size: auto")
    assert run(text, "--stages", "2", script=FakeLauncher(by_strategy={"zero2": fits})) == 0
    assert [(row["seq_length"], row["batch_size"], row["success"]) for row in scripted.rows()] == [
        (16, 8, True),
        (32, 4, True),
    ]


def test_an_interrupted_sweep_goes_on_from_its_folder_alone(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SWEEP, script=FakeLauncher("Success", "Success", "Interrupted")) == 130
    folder = scripted.folder
    assert f"go on with: python -m ds_bench run --resume {folder}" in capsys.readouterr().err
    scripted.launcher = FakeLauncher()
    assert commands.main(["run", "--resume", str(folder)]) == 0
    assert scripted.trials == [(32, "zero0", 0), (32, "zero2", 0)]
    assert len(scripted.rows()) == 4


@pytest.mark.parametrize(
    ("text", "named"),
    [("model: {name: tiny, trust_remote_code: true}", "asks for --trust-remote-code")],
)
def test_a_run_folder_alone_starts_no_code(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    recipe_text = SMALL.replace("model: {name: tiny}", text)
    assert run(recipe_text, script=FakeLauncher("Interrupted")) == 130
    scripted.launcher = FakeLauncher()
    capsys.readouterr()
    assert commands.main(["run", "--resume", str(scripted.folder)]) == 2
    assert named in capsys.readouterr().err
    assert run(recipe_text, "--resume", str(scripted.folder)) == 0
    assert len(scripted.launcher.launched) == 2


def test_a_value_that_may_be_a_credential_is_not_kept(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "hf_" + "Ab1" * 12
    text = SMALL.replace("{stages: [0, 2]}", f"{{stages: [0], deepspeed: {{wandb: {{project: {secret}}}}}}}")
    run(text, script=FakeLauncher("Interrupted"))
    folder = scripted.folder
    assert secret not in (folder / "run.json").read_text()
    capsys.readouterr()
    assert commands.main(["run", "--resume", str(folder)]) == 2
    assert "not kept" in capsys.readouterr().err


REFUSED = {
    "training: {seq_len: 4096}\nmodel: {name: gpt2}": "training.seq_len 4096 is beyond the 1024 positions",
    "training: {global_batch_size: 6, local_batch_size: 4}": "give 4 or 8, or another local_batch_size",
    "configurations: {strategies: nvme}": "configurations.strategies nvme needs a disk (add launch.nvme_path DIR",
    "configurations: {relative_to: zero9}": "configurations.relative_to zero9: no such row",
    "configurations: {deepspeed: {zero_optimisation: {}}}": "did you mean zero_optimization",
    "training: {steps: [1, 2, 3]}\nmodel: {name: no-such-model}": "--model no-such-model is no preset",
    "axes: {micro_batch: [1, 2]}\ntraining: {local_batch_size: 2}": "axes.micro_batch and training.local_batch_size",
    "model: {name: tiny}\ndataset: {vocab_size: 2000}": "dataset.vocab_size 2000 is beyond the 1000 ids of tiny",
    "dataset: {path: none.uint16}": "none.uint16: No such file or directory",
    "dataset: {dtype: uint16}": "dataset.dtype without dataset.path",
    "dataloader: {prefetch: 4}": "dataloader.prefetch 4 without worker processes (add dataloader.workers 1 or more)",
    "profiling: {steps: 4}": "profiling.steps or profiling.ranks without profiling.profiles (add profiling.profiles",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(text) == 2
    error = capsys.readouterr().err
    assert REFUSED[text] in error
    assert error.count("\n") == 1
    assert not scripted.output.exists()


def test_a_sweep_of_a_million_trials_asks_first(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    lists = {name: f"{list(range(1, 101))}" for name in ("seq_len", "steps", "grad_accum")}
    text = "training: {" + ", ".join(f"{name}: {values}" for name, values in lists.items()) + "}"
    assert run(text) == 2
    assert "makes 4,000,000 trials" in capsys.readouterr().err


def test_accumulation_follows_from_the_global_batch_and_the_ranks(run: Run, scripted: ScriptedRun) -> None:
    assert run(SMALL.replace("steps: 4", "steps: 4, global_batch_size: 12"), "--num-gpus", "3", "--stages", "0") == 0
    (trial,) = scripted.launcher.launched
    assert (trial.workload.grad_accum, trial.ds_config["train_batch_size"]) == (2, 12)


def test_rows_whose_axes_change_what_a_rank_computes_keep_the_global_batch(run: Run, scripted: ScriptedRun) -> None:
    text = SMALL.replace("local_batch_size: 2", "global_batch_size: 16") + "axes: {micro_batch: [1, 4]}"
    assert run(text, "--num-gpus", "2", "--stages", "2") == 0
    batches = [
        (trial.workload.batch_size, trial.workload.grad_accum, trial.ds_config["train_batch_size"])
        for trial in scripted.launcher.launched
    ]
    assert batches == [(1, 8, 16), (4, 2, 16)]
    launched = len(scripted.launcher.launched)
    assert run(text.replace("[1, 4]", "[1, 3]"), "--num-gpus", "2", "--stages", "2") == 2
    assert run(SMALL + "axes: {grad_accum: [1, 2]}", "--set", "training.global_batch_size=8") == 2
    assert len(scripted.launcher.launched) in (0, launched)


def test_rows_whose_own_configuration_shares_data_among_ranks_keep_the_global_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, in the recipe, or of every row: as rows of the axes autotp and sequence_parallel do."""
    monkeypatch.chdir(tmp_path)
    for shares in ({"sequence_parallel_size": 2}, {"tensor_parallel": {"autotp_size": 2}}):
        Path("mine.json").write_text(json.dumps({**shares, "zero_optimization": {"stage": 2}}))
        block = json.dumps(shares)
        for rows, accumulation in (
            ("{stages: [2], configs: [mine.json]}", {"zero2": 1, "mine": 2}),
            (f"{{stages: [2], inline: {{mine: {block}}}}}", {"zero2": 1, "mine": 2}),
            (f"{{stages: [2], deepspeed: {block}}}", {"zero2": 2}),
        ):
            text = SMALL.replace("{stages: [0, 2]}", rows).replace("steps: 4", "steps: 4, global_batch_size: 4")
            read = recipe.check_recipe(recipe_file.parse_recipe(text.replace("cpu}", "cpu, num_gpus: 2}")))
            options = recipe.options_of(read, tmp_path)
            plan = make_run_plan([options], recipe.config_maker(read), fakes.machine())
            assert {trial.configuration.name: trial.workload.grad_accum for trial in plan.trials} == accumulation
            assert {trial.ds_config["gradient_accumulation_steps"] for trial in plan.trials} == {*accumulation.values()}


def test_a_global_batch_with_files_that_keep_their_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that gives no accumulation keeps none: it follows from the global batch, and is checked."""
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text(json.dumps({"sequence_parallel_size": 2, "zero_optimization": {"stage": 2}}))
    text = SMALL.replace("{stages: [0, 2]}", "{configs: [mine.json], keep_batch: true}")
    assert run(text.replace("steps: 4", "steps: 4, global_batch_size: 16"), "--num-gpus", "4") == 0
    assert {trial.ds_config["train_batch_size"] for trial in scripted.launcher.launched} == {16}
    assert run(text.replace("steps: 4", "steps: 4, global_batch_size: 10"), "--num-gpus", "4") == 2
    assert "is not a multiple of 2 sequences × 2 data-parallel ranks in mine" in capsys.readouterr().err
    # Ranks that a sequence cannot be split among make one row unsupported, and refuse no other.
    other = SMALL.replace("{stages: [0, 2]}", "{stages: [0], configs: [mine.json]}").replace(
        "batch_size: 2", "batch_size: 1"
    )
    assert run(other.replace("steps: 4", "steps: 4, global_batch_size: 3"), "--num-gpus", "3") == 0
    assert "does not divide the 3 ranks" in capsys.readouterr().out


def test_accumulation_given_beside_a_global_batch_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    text = SMALL.replace("steps: 4", "steps: 4, global_batch_size: 16")
    assert run(text.replace("{stages: [0, 2]}", "{stages: [0], deepspeed: {gradient_accumulation_steps: 7}}")) == 2
    assert "gradient_accumulation_steps 7 in ZeRO-0" in capsys.readouterr().err


def test_a_global_batch_need_be_whole_only_for_the_ranks_that_see_other_data(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SMALL.replace("steps: 4", "steps: 4, global_batch_size: 2")
    assert run(text, "--num-gpus", "2") == 2
    assert "not a multiple of 2 sequences × 2 data-parallel ranks in ZeRO-0" in capsys.readouterr().err
    assert run(text + "axes: {sequence_parallel: [2]}", "--num-gpus", "2") == 0
    assert {trial.ds_config["train_batch_size"] for trial in scripted.launcher.launched} == {2}


# ------------------------------------------------------------------ scripts as recipes


def edited(strategy: Strategy, batch_size: int, grad_accum: int) -> dict[str, Any]:
    """A script's function that somebody edited."""
    config = fakes.make_config(strategy, batch_size, grad_accum)
    return {**config, "gradient_clipping": 0.25} if strategy.stage < 3 else config


FLAGS = [
    ("zero", ""),
    ("zero", "--model tiny --batch-size 2 --seq-length 64 --grad-accum 3 --num-steps 7 --warmup-steps 0 --seed 0"),
    ("zero", "--model tiny --stages 3 1 --strategies cpu_optimizer zero2_offload --repeats 2 --precision fp32"),
    ("zero", "--model tiny --optimizer Lion --set zero_optimization.overlap_comm=false --set bf16.enabled=true"),
    ("zero", "--model tiny --activation-checkpointing --dropout 0.0 --num-gpus 2 --cpu-memory-limit 3 --relative-to 2"),
    ("offload", "--model tiny --stage 2 --strategies none cpu_optimizer"),
    ("offload", "--model tiny --nvme-path /nonexistent --trust-remote-code"),
    ("zero", "--model tiny --configs mine.json --keep-batch --relative-to mine"),
    ("zero", "--model tiny --stages 1 --configs mine.json"),
    ("zero", "--model tiny --stages 0 --strategies ddp fsdp2"),
    ("zero", "--model tiny --stages 0 2 --axis overlap_comm=true,false --axis reduce_bucket_size=5e7,1000000"),
    ("zero", "--model tiny --data ids.bin --data-dtype uint16 --data-workers 2 --data-prefetch 3 --vocab-size 100"),
    ("zero", "--model tiny --data-workers 0 --data-pin-memory"),
    ("offload", '--model tiny --ds-config changes.json --set gradient_clipping=2 --set scheduler={"type":"WarmupLR"}'),
]


@pytest.mark.parametrize("make", [fakes.make_config, edited])
@pytest.mark.parametrize(("family", "flags"), FLAGS)
def test_the_recipe_of_a_script_makes_the_same_trials(
    family: Any, flags: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("changes.json").write_text('{"zero_optimization": {"reduce_bucket_size": 1000}, "gradient_clipping": 1.5}')
    Path("ids.bin").write_bytes(b"\x07\0" * 512)
    Path("mine.json").write_text('{"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}')
    options = arguments.parse(family, "script.py", flags.split())
    rows = [row.origin for row in requested_rows(options) if isinstance(row.origin, Strategy)]
    text = recipe_file.parse_recipe(recipe.yaml_text(recipe.recipe_of(options, make, rows)))
    read = recipe.check_recipe(text)
    again = recipe.options_of(read, text.folder)
    first = make_run_plan([options], make, fakes.machine())
    second = make_run_plan([again], recipe.config_maker(read), fakes.machine())
    assert [work_key(trial) for trial in first.trials] == [work_key(trial) for trial in second.trials]
    assert [trial.trial_id for trial in first.trials] == [trial.trial_id for trial in second.trials]
    for name in ("goal", "relative_to", "timeout", "output_dir"):
        assert str(getattr(options, name)) in (str(getattr(again, name)), Path(str(getattr(again, name))).name)


# ------------------------------------------------------------------ the recipes that ship


RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_that_ships_can_be_planned(
    path: Path, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "read_gpus", lambda: fakes.inventory(cards=8))
    monkeypatch.setattr(placement.environment, "torch_cuda_version", lambda: "13.0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert path.read_text().startswith("# yaml-language-server: $schema=../docs/recipe.schema.json\n# ")
    assert commands.main(["run", str(path), "--dry-run", "--output-dir", str(scripted.output)]) == 0
    shown = capsys.readouterr().out
    assert " trials" in shown
    assert "memory is not predicted" not in shown
    assert not scripted.output.exists()


# ------------------------------------------------------------------ the plan, and a budget


def test_the_plan_says_how_much_there_is_to_do(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SWEEP, "--repeats", "2", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 points × 2 rows × 2 runs = 8 trials")
    assert lines[3].split()[:3] == ["seq_len", "16", "4"]
    assert run(SMALL, "--dry-run", "--verbose") == 0
    shown = capsys.readouterr().out
    assert "ZeRO-2 " in shown
    assert '"train_micro_batch_size_per_gpu": 2' in shown
    assert not scripted.output.exists()


def test_a_budget_ends_the_run_between_two_trials_lists_the_rest_and_resume_runs_it(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(runner.time, "monotonic", lambda: float(next(clock)))
    assert run(SWEEP, "--budget", "1") == 0
    assert scripted.trials == [(16, "zero0", 0)]
    assert capsys.readouterr().err.splitlines()[-5:-3] == [
        "--budget 1 is used up; --resume RUN_DIR runs the 3 trials left:",
        "  ZeRO-2 at seq_len 16; ZeRO-0 at seq_len 32; ZeRO-2 at seq_len 32",
    ]
    scripted.launcher = FakeLauncher()
    assert commands.main(["run", "--resume", str(scripted.folder)]) == 0
    assert scripted.trials == [(16, "zero2", 0), (32, "zero0", 0), (32, "zero2", 0)]
    assert len(scripted.rows()) == 4


def test_a_plan_says_of_no_row_that_it_fits_whose_memory_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_path = tmp_path / "unknown.yaml"
    recipe_path.write_text(
        "model: {name: gpt2}\nconfigurations: {stages: [2]}\naxes: {compile: [none, torch]}\n"
        "training: {seq_len: 128, local_batch_size: 1}\nlaunch: {num_gpus: 2, accelerator: cpu}\n"
    )
    assert commands.main(["run", str(recipe_path), "--dry-run"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("ZeRO-2")]
    assert ["?" in row for row in rows] == [False, True]
    assert "≥" in rows[1]
