"""The command ``run``: recipes and flags, what a run keeps, resuming, and scripts as recipes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest

from ds_bench import runner
from ds_bench.analysis import load_results
from ds_bench.baselines.result import baseline_name
from ds_bench.cli import arguments, commands
from ds_bench.cli.report import build_reports
from ds_bench.config import placement, recipe, recipe_file
from ds_bench.config.identity import work_key
from ds_bench.config.spec import Strategy
from ds_bench.planning.requested_rows import requested_rows
from ds_bench.planning.trial_planner import make_run_plan
from ds_bench.system import gpu_state
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


def test_flags_and_settings_replace_values_of_the_recipe(run: Run, scripted: ScriptedRun) -> None:
    flags = ("--stages", "1", "--seq-length", "8", "--set", "training.steps=3", "--set", "optimizer.params.lr=0.5")
    assert run(SWEEP, *flags) == 0
    (trial,) = scripted.launcher.launched
    assert (trial.configuration.name, trial.workload.seq_length, trial.workload.num_steps) == ("zero1", 8, 3)
    assert trial.ds_config["optimizer"]["params"]["lr"] == 0.5
    stored = json.loads((scripted.folder / "run.json").read_text())
    assert (stored["family"], stored["recipe"]["values"]["training"]["seq_len"]) == ("recipe", 8)


def test_configurations_in_the_recipe_are_rows_or_replace_a_strategy(run: Run, scripted: ScriptedRun) -> None:
    own = "{zero_optimization: {stage: 2, reduce_bucket_size: auto}, gradient_clipping: 0.25}"
    text = SMALL.replace("{stages: [0, 2]}", f"{{stages: [2], inline: {{mine: {own}, zero2: {own}}}}}")
    assert run(text, "--set", "configurations.inline.zero2.zero_optimization.reduce_bucket_size=1000") == 0
    zero2, mine = scripted.launcher.launched
    assert (zero2.configuration.name, zero2.ds_config["gradient_clipping"]) == ("zero2", 0.25)
    assert zero2.ds_config["zero_optimization"]["reduce_bucket_size"] == 1000
    assert (mine.configuration.name, mine.ds_config["gradient_clipping"]) == ("mine", 0.25)
    assert mine.ds_config["zero_optimization"]["reduce_bucket_size"] == 128 * 128  # as the Trainer resolves "auto"


def test_points_of_a_sweep_run_round_by_round_in_one_result(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SWEEP, "--repeats", "2") == 0
    first = [(16, "zero2", 0), (16, "zero0", 0), (32, "zero2", 0), (32, "zero0", 0)]  # shuffled by the seed
    assert scripted.trials == [*first, *((length, name, 1) for length, name, _ in reversed(first))]
    identities = [trial.trial_id for trial in scripted.launcher.launched]
    assert identities == sorted(identities)
    assert len(scripted.rows()) == 8
    points = json.loads((scripted.folder / "recommendation.json").read_text())["points"]
    assert [each["point"] for each in points] == [{"training.seq_len": 16}, {"training.seq_len": 32}]
    assert (scripted.folder / "points" / "32" / "recommended" / "ds_config.json").is_file()
    shown = capsys.readouterr().out
    assert "2 points · tiny" in shown
    assert re.search(r"Workload +ZeRO-0 +ZeRO-2", shown)  # as requested, whatever the order of running
    assert "16 tokens: " in shown


def test_axes_of_a_recipe_and_of_flags_make_rows_and_a_report_keeps_goal_and_baseline(
    run: Run, scripted: ScriptedRun
) -> None:
    text = SMALL + "axes: {overlap_comm: [true, false], reduce_bucket_size: 1000000}"
    name = "zero2+overlap_comm=false+reduce_bucket_size=1000000"
    flags = ("--axis", "overlap_comm=false", "--stages", "1", "2", "--relative-to", name, "--goal", "memory")
    assert run(text, *flags) == 0
    assert [trial.configuration.name for trial in scripted.launcher.launched] == [name.replace("2", "1", 1), name]
    (report,) = build_reports([scripted.folder])
    assert report.recommendation.goal == "memory"
    assert report.comparison.baseline is not None
    assert report.comparison.baseline.configuration.name == name
    assert report.commands[0].startswith("python -m ds_bench run ")


def test_a_run_folder_starts_no_code_and_keeps_no_credential(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "hf_" + "Ab1" * 12
    own_code = SMALL.replace("{name: tiny}", "{name: tiny, trust_remote_code: true}")
    with_secret = SMALL.replace("{stages: [0, 2]}", f"{{stages: [0, 2], deepspeed: {{wandb: {{project: {secret}}}}}}}")
    for text, problem in ((own_code, "requests --trust-remote-code"), (with_secret, "not kept")):
        assert run(text, script=FakeLauncher("Interrupted")) == 130
        folder = scripted.folder
        assert secret not in (folder / "run.json").read_text()
        capsys.readouterr()
        assert commands.main(["run", "--resume", str(folder)]) == 2
        assert problem in capsys.readouterr().err
        assert run(text, "--resume", str(folder)) == 0
        assert len(scripted.launcher.launched) == 2
        shutil.rmtree(scripted.output)


HUNDRED = list(range(1, 101))
REFUSED = {
    "training: {seq_len: 4096}\nmodel: {name: gpt2}": "training.seq_len 4096 is beyond the 1024 positions",
    "configurations: {strategies: nvme}": "configurations.strategies nvme needs a disk. Add launch.nvme_path DIR",
    "configurations: {relative_to: zero9}": "configurations.relative_to zero9: no such row",
    "axes: {micro_batch: [1, 2]}\ntraining: {local_batch_size: 2}": "axis micro_batch and training.local_batch_size",
    "axes: {prefetch: [1]}\nconfigurations: {deepspeed: {zero_optimization: {stage3_prefetch_bucket_size: 3}}}": (
        "axis prefetch and configurations.deepspeed both set"
    ),
    "launch: {include: a}": "launch.include without launch.hostfile. Add launch.hostfile FILE",
    "launch: {accelerator: cuda}": "launch.accelerator cuda, but ",
    "configurations: {configs: [refused.json]}": "configurations.configs refused: ",
    "launch: {env: [A B]}": "launch.env 'A B' is not a variable",
    "model: {name: tiny}\ndataset: {vocab_size: 2000}": "dataset.vocab_size 2000 is beyond the 1000 ids of tiny",
    "dataset: {dtype: uint16}": "dataset.dtype without dataset.path",
    "dataloader: {prefetch: 4}": "dataloader.prefetch 4 without worker processes. Add dataloader.workers 1 or more",
    "dataset: {path: ids.uint16}\nmodel: {name: tiny}": "has the id 2000",
    "dataset: {path: short.uint16}\nmodel: {name: tiny}": "8 tokens, fewer than one sequence of 256. Give a longer",
    f"training: {{seq_len: {HUNDRED}, steps: {HUNDRED}, grad_accum: {HUNDRED}}}": "makes 4,000,000 trials",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_a_recipe_that_cannot_run_is_refused_before_anything_starts(
    text: str,
    run: Run,
    scripted: ScriptedRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_ids(tmp_path / "ids.uint16", largest=2000)
    write_ids(tmp_path / "short.uint16", 8, 9)
    (tmp_path / "refused.json").write_text('{"zero_optimization": {"stage": 7}}')
    assert run(text) == 2
    error = capsys.readouterr().err
    assert REFUSED[text] in error
    assert error.count("--") == error.count("add --yes")  # the only flag without a key
    assert error.count("\n") == 1
    assert not scripted.output.exists()


GLOBAL_BATCHES: list[tuple[str, int, int, list[tuple[int, int, int]] | str]] = [
    # rows, ranks, global batch, and micro-batch, accumulation and train_batch_size of each row, or the error
    ("{stages: [0]}", 3, 12, [(2, 2, 12)]),
    ("{stages: [0]}", 2, 6, "Give 4 or 8, or another local_batch_size"),
    ("{stages: [2]}\naxes: {sequence_parallel: [2]}", 2, 2, [(2, 1, 2)]),  # whole for the ranks with different data
    ("{stages: [2]}", 2, 2, "not a multiple of 2 sequences × 2 data-parallel ranks in ZeRO-2"),
    # Rows of a recipe split sequences too, and so does a value of every row.
    ("{stages: [2], inline: {mine: {sequence_parallel_size: 2}}}", 2, 4, [(2, 1, 4), (2, 2, 4)]),
    ("{stages: [2], deepspeed: {sequence_parallel_size: 2}}", 2, 4, [(2, 2, 4)]),
    ("{stages: [2]}\naxes: {micro_batch: [1, 4]}", 2, 16, [(1, 8, 16), (4, 2, 16)]),
    ("{stages: [2]}\naxes: {micro_batch: [1, 3]}", 2, 16, "is not a multiple of 3 sequences"),
    ("{stages: [2]}\naxes: {grad_accum: [1, 2]}", 2, 16, "accumulation follows from the global batch"),
    ("{stages: [0], deepspeed: {gradient_accumulation_steps: 7}}", 2, 16, "gradient_accumulation_steps 7 in ZeRO-0"),
    # A file that gives no accumulation keeps none: it follows from the global batch, and is checked.
    ("{configs: [mine.json], keep_batch: true}", 4, 16, [(2, 4, 16)]),
    (
        "{configs: [mine.json], keep_batch: true}",
        4,
        10,
        "is not a multiple of 2 sequences × 2 data-parallel ranks in mi",
    ),
    # Ranks that a sequence cannot be split among make one row unsupported, and no other.
    ("{stages: [0], configs: [mine.json]}", 3, 6, [(2, 1, 6)]),
]


@pytest.mark.parametrize(("rows", "ranks", "total", "expected"), GLOBAL_BATCHES)
def test_accumulation_follows_from_the_global_batch(
    rows: str,
    ranks: int,
    total: int,
    expected: list[tuple[int, int, int]] | str,
    run: Run,
    scripted: ScriptedRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"sequence_parallel_size": 2, "zero_optimization": {"stage": 2}}))
    text = SMALL.replace("{stages: [0, 2]}", rows).replace("steps: 4", f"steps: 4, global_batch_size: {total}")
    if "micro_batch" in rows:
        text = text.replace("local_batch_size: 2, ", "")
    assert run(text, "--num-gpus", str(ranks)) == (2 if isinstance(expected, str) else 0)
    if isinstance(expected, str):
        assert expected in capsys.readouterr().err
    else:
        assert expected == [
            (trial.workload.batch_size, trial.workload.grad_accum, trial.ds_config["train_batch_size"])
            for trial in scripted.launcher.launched
        ]


# ------------------------------------------------------------------ scripts as recipes


def edited(strategy: Strategy, batch_size: int, grad_accum: int) -> dict[str, Any]:
    """A script's function that somebody edited."""
    config = fakes.make_config(strategy, batch_size, grad_accum)
    return {**config, "gradient_clipping": 0.25} if strategy.stage < 3 else config


FLAGS = [
    ("zero", "--model tiny --batch-size 2 --seq-length 64 --grad-accum 3 --num-steps 7 --warmup-steps 0 --seed 0"),
    ("zero", "--model tiny --stages 3 1 --strategies cpu_optimizer zero2_offload --repeats 2 --precision fp32"),
    ("zero", "--model tiny --optimizer Lion --set zero_optimization.overlap_comm=false --set bf16.enabled=true"),
    ("zero", "--model tiny --activation-checkpointing --dropout 0.0 --num-gpus 2 --cpu-memory-limit 3 --relative-to 2"),
    ("offload", "--model tiny --stage 2 --strategies none cpu_optimizer"),
    ("offload", "--model tiny --nvme-path /nonexistent --trust-remote-code"),
    ("offload", "--model tiny --nvme-path /nonexistent --configs mine.json"),
    ("zero", "--model tiny --stages 0 --strategies ddp --configs mine.json --keep-batch --relative-to mine"),
    ("zero", "--model tiny --stages 1 --monitor tensorboard --checkpoint --profile torch --profile-steps 3"),
    ("zero", "--model tiny --stages 0 2 --axis overlap_comm=true,false --axis reduce_bucket_size=5e7,1000000"),
    ("zero", "--model tiny --data ids.bin --data-dtype uint16 --data-workers 2 --data-prefetch 3 --vocab-size 100"),
    ("offload", '--model tiny --ds-config changes.json --set gradient_clipping=2 --set scheduler={"type":"WarmupLR"}'),
]


@pytest.mark.parametrize(("family", "flags"), FLAGS)
def test_the_recipe_of_a_script_makes_the_same_trials(
    family: Any, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = edited
    monkeypatch.chdir(tmp_path)
    Path("changes.json").write_text('{"zero_optimization": {"reduce_bucket_size": 1000}, "gradient_clipping": 1.5}')
    Path("ids.bin").write_bytes(b"\x07\0" * 512)
    Path("mine.json").write_text('{"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}')
    options = arguments.parse(family, "script.py", flags.split())
    rows = [row.origin for row in requested_rows(options) if isinstance(row.origin, Strategy)]
    text = recipe_file.parse_recipe(recipe_file.yaml_text(recipe.recipe_of(options, make, rows)))
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
    monkeypatch.setattr(gpu_state, "read_gpus", lambda: fakes.inventory(cards=8))
    monkeypatch.setattr(placement.environment, "torch_built_for", {"cuda": "13.0"}.get)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert path.read_text().startswith("# yaml-language-server: $schema=../docs/recipe.schema.json\n# ")
    assert commands.main(["run", str(path), "--dry-run", "--output-dir", str(scripted.output)]) == 0
    shown = capsys.readouterr().out
    assert " trials" in shown
    assert "memory is not predicted" not in shown
    assert not scripted.output.exists()


# ------------------------------------------------------------------ a budget


def test_a_budget_ends_the_run_between_two_trials_lists_the_rest_and_resume_runs_it(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(runner.time, "monotonic", lambda: float(next(clock)))
    assert run(SWEEP, "--budget", "1") == 0
    assert scripted.trials == [(16, "zero0", 0)]
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "--budget 1 is used up; --resume RUN_DIR runs the 3 trials left:",
        "  ZeRO-2 at seq_len 16; ZeRO-0 at seq_len 32; ZeRO-2 at seq_len 32",
    ]
    scripted.launcher = FakeLauncher()
    assert commands.main(["run", "--resume", str(scripted.folder)]) == 0
    assert scripted.trials == [(16, "zero2", 0), (32, "zero0", 0), (32, "zero2", 0)]
    assert len(scripted.rows()) == 4


# ------------------------------------------------------------------ points of other kinds


RANKS_AND_RATES = SMALL.replace("accelerator: cpu", "accelerator: cpu, num_gpus: [1, 2]") + (
    "optimizer: {params: {lr: [1e-4, 1e-3], betas: [0.9, 0.95]}}\n"
)


def test_points_may_differ_in_ranks_and_in_the_optimizer_and_are_planned_resumed_and_reported_apart(
    run: Run, scripted: ScriptedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(RANKS_AND_RATES, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 points × 2 rows = 8 trials")
    assert lines[3].startswith("num_gpus 1, lr 0.0001")
    assert run(RANKS_AND_RATES, script=FakeLauncher(*["Success"] * 5, "Interrupted")) == 130
    launched = scripted.launcher.launched[:5]
    scripted.launcher = FakeLauncher()
    capsys.readouterr()
    assert commands.main(["run", "--resume", str(scripted.folder)]) == 0
    launched += scripted.launcher.launched
    made = [
        (trial.placement.num_gpus, trial.ds_config["optimizer"]["params"]["lr"], trial.configuration.name)
        for trial in launched
    ]
    assert made == [(n, lr, name) for n in (1, 2) for lr in (1e-4, 1e-3) for name in ("zero0", "zero2")]
    assert {trial.ds_config["train_batch_size"] for trial in launched} == {2, 4}
    assert {tuple(trial.ds_config["optimizer"]["params"]["betas"]) for trial in launched} == {(0.9, 0.95)}
    assert len({work_key(trial) for trial in launched}) == 8
    shown = capsys.readouterr().out
    assert "4 points · tiny" in shown
    assert "1 CPU rank · lr 0.0001: " in shown
    flat = scripted.output / f"{scripted.folder.name}.json"
    names = {baseline_name(summary) for summary in load_results.load(flat).runs}
    assert ("tiny/zero2/batch2-seq16-2ranks-lr_0.001" in names, len(names)) == (True, 8)
    of_folder = build_reports([scripted.folder])
    for name in ("run.json", "records.jsonl"):
        (scripted.folder / name).unlink()
    for reports in (of_folder, build_reports([flat])):  # from the records, then from the columns alone
        assert [len(report.comparison.rows) for report in reports] == [2] * 4
        assert len({report.title for report in reports}) == 4
        assert all(row.label in ("ZeRO-0", "ZeRO-2") for report in reports for row in report.comparison.rows)


def test_any_value_of_every_deepspeed_configuration_may_be_swept_in_the_matrix(run: Run, scripted: ScriptedRun) -> None:
    matrix = (
        "optimizer.params.betas: [[0.9, 0.95], [0.9, 0.99]], configurations.deepspeed.gradient_clipping: [0.5, 1.0]"
    )
    included = "{optimizer.type: Adagrad, launch.num_gpus: 2, configurations.deepspeed.gradient_clipping: 2.0}"
    assert run(SMALL + f"sweep: {{matrix: {{{matrix}}}, include: [{included}]}}", "--stages", "0") == 0
    made = [(t.ds_config["optimizer"], t.ds_config["gradient_clipping"]) for t in scripted.launcher.launched]
    assert [(o["params"].get("betas"), clip) for o, clip in made[:4]] == [
        ([0.9, second], clip) for second in (0.95, 0.99) for clip in (0.5, 1.0)
    ]
    assert (made[4][0]["type"], made[4][1]) == ("Adagrad", 2.0)


# ------------------------------------------------------------------ files of token ids


def write_ids(path: Path, count: int = 4096, largest: int = 999) -> Path:
    ids = numpy.arange(count, dtype="<u2") % largest
    ids[count // 2] = largest
    ids.tofile(path)
    return path


WITH_FILE = SMALL + "dataset: {path: my ids.uint16, seq_len: 16}\ndataloader: {workers: [0, 2]}\n"


def test_a_recipe_names_a_file_beside_it_and_its_loader(
    run: Run, scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_ids(tmp_path / "my ids.uint16")
    assert run(WITH_FILE.replace("seq_len: 16, local", "local")) == 0
    works = [trial.workload for trial in scripted.launcher.launched]
    assert [
        (work.data_workers, work.data_path, work.data_dtype, work.data_tokens, work.seq_length) for work in works
    ] == [(workers, str(path), "uint16", 4096, 16) for workers in (0, 0, 2, 2)]
    assert "data my ids.uint16" in capsys.readouterr().out
    assert {row["data_file"] for row in scripted.rows()} == {str(path)}


def test_a_changed_file_is_a_different_trial_and_is_not_resumed(
    run: Run, scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_ids(tmp_path / "my ids.uint16")
    assert run(WITH_FILE, script=FakeLauncher("Interrupted")) == 130
    write_ids(path, largest=998)
    capsys.readouterr()
    scripted.launcher = FakeLauncher()
    for dry in ([], ["--dry-run"]):
        assert commands.main(["run", "--resume", str(scripted.folder), *dry]) == 2
        assert f"the file {path} has changed since the run began. Put it back as it was" in capsys.readouterr().err
    write_ids(path)
    assert commands.main(["run", "--resume", str(scripted.folder)]) == 0
    assert len(scripted.launcher.launched) == 4


def test_a_script_takes_a_file_and_goes_on_from_another_folder(
    scripted: ScriptedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_ids(tmp_path / "ids.bin")
    Path("mine.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    flags = ["--data", "ids.bin", "--data-dtype", "uint16", "--configs", "mine.json", "--relative-to", "mine"]
    assert scripted.run(*flags, script=FakeLauncher("Interrupted")) == 130
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert scripted.resume("--dry-run") == 0
    assert scripted.resume() == 0
    (trial,) = scripted.launcher.launched
    assert (trial.workload.data_path, trial.configuration.name) == (str(tmp_path / "ids.bin"), "mine")
    assert trial.workload.data_workers == 0
