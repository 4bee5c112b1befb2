"""Exports: the three configurations say what ran, to the library each is for, and the README is true and safe."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from syrupy.assertion import SnapshotAssertion

from ds_bench.config import deepspeed_config
from ds_bench.config.automatic_values import TrainingFacts
from ds_bench.config.configuration_file_rows import FileRowMaker
from ds_bench.config.configuration_files import read_configuration_file
from ds_bench.config.spec import Configuration, Placement, Trial
from ds_bench.errors import UsageError
from ds_bench.launch import rank_environment
from ds_bench.launch.ops import OpState
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from ds_bench.report import configuration_export, table_layout
from ds_bench.system.environment import Environment
from tests.support.fakes import GB, failure, offload, placement, success, workload, zero
from tests.support.real_trials import SUPPORT, free_port

NVME = "/mnt/nvme"
FILES = ["ds_config.json", "ds_config_trainer.json", "ds_config_accelerate.json", "accelerate.yaml", "README.md"]


def row(
    strategy: Configuration | None = None,
    *,
    accelerator: str = "cuda",
    num_gpus: int = 1,
    hostfile: str | None = None,
    changes: dict[str, Any] | None = None,
    optimizer: str | None = None,
    torch_adam: bool = False,
    **work: Any,
) -> Trial:
    """A trial with the configuration that the scripts would make of these wishes."""
    strategy = strategy or zero(2)
    on = Placement(accelerator=accelerator, num_gpus=num_gpus, hostfile=hostfile, nvme_path=NVME)  # type: ignore[arg-type]
    of = workload(**work)
    base = deepspeed_config.base_config(strategy, of.batch_size, of.grad_accum)
    if optimizer is not None:
        base = deepspeed_config.with_optimizer(base, optimizer)
    base = deepspeed_config.overlay(base, changes or {})
    config = deepspeed_config.complete_config(base, of, on, torch_adam=torch_adam, largest_parameter=1000)
    strategy = replace(strategy, deepspeed_config=base)
    return Trial(trial_id="t", repeat=0, configuration=strategy, workload=of, placement=on, ds_config=config)


STRATEGIES = [
    *(zero(stage) for stage in range(4)),
    *(offload(name) for name in ("none", "cpu_optimizer", "cpu_full", "nvme")),
    offload("cpu_optimizer", 1),
    offload("cpu_optimizer", 2),
]
# Every strategy in every precision; accumulation and ranks alternate so that each pair of settings occurs.
MATRIX = {
    f"{strategy.name}_stage{strategy.stage}_{precision}": row(
        strategy, precision=precision, grad_accum=(1, 4)[(i + j) % 2], num_gpus=(1, 2)[(i // 2 + j) % 2]
    )
    for i, strategy in enumerate(STRATEGIES)
    for j, precision in enumerate(("bf16", "fp16", "fp32"))
}
BF16_STATES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
WARMUP = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7, "warmup_max_lr": 3e-4, "total_num_steps": 100}}
ODD = {
    "sgd": row(optimizer="SGD"),
    "sgd_momentum": row(zero(3), optimizer="SGD", changes={"optimizer": {"params": {"momentum": 0.9}}}),
    "adam": row(zero(1), optimizer="Adam"),
    "lion": row(optimizer="Lion"),
    "lion_betas": row(optimizer="Lion", changes={"optimizer": {"params": {"betas": [0.95, 0.98]}}}),
    "lion_offloaded": row(offload("cpu_optimizer"), num_gpus=2, optimizer="Lion"),
    "adagrad_offloaded": row(offload("cpu_optimizer", 2), optimizer="Adagrad"),
    "muon": row(changes={"optimizer": {"type": "Muon", "params": {"lr": 0.02, "muon_lr": 0.01, "betas": None}}}),
    "bf16_states": row(changes=BF16_STATES, num_gpus=2),
    "fp16_scale": row(precision="fp16", changes={"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 3}}),
    "own_keys": row(changes={"comms_logger": {"enabled": True}, "zero_optimization": {"round_robin_gradients": True}}),
    "autocast": row(changes={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "scheduler": row(changes={"scheduler": WARMUP}),
    "clipping": row(changes={"gradient_clipping": 0.3}),
    "no_clipping": row(changes={"gradient_clipping": 0}),
    "default_clipping": row(changes={"gradient_clipping": None}),
    "no_zero_block": row(zero(0), changes={"zero_optimization": None}),
    "small_buckets": row(zero(3), changes={"zero_optimization": {"reduce_bucket_size": 12345}}),
    "weird_rates": row(changes={"optimizer": {"params": {"lr": 1e-7, "eps": 1e-12, "betas": [0.5, 0.1]}}}),
    "checkpointing": row(activation_checkpointing=True),
    "own_batch": row(num_gpus=2, changes={"train_micro_batch_size_per_gpu": 3, "train_batch_size": None}),
    "on_cpu": row(accelerator="cpu", num_gpus=2, torch_adam=True),
}
CASES = {**MATRIX, **ODD}


def command(readme: str, word: str) -> list[str]:
    """The words of the README's command that has this word in it."""
    (line,) = (line.strip() for line in readme.splitlines() if word in line and "train.py" in line and "`" not in line)
    return shlex.split(line)


def write(trial: Trial | TrialRecord, folder: Path) -> dict[str, Any]:
    """The exports read back by name: JSON and YAML as values, the README as text."""
    record = trial if isinstance(trial, TrialRecord) else success(trial)
    before = json.dumps(record.to_dict(), sort_keys=True)
    paths = configuration_export.write_exports(record, folder)
    assert json.dumps(record.to_dict(), sort_keys=True) == before  # exporting changes nothing
    assert [path.name for path in paths] == FILES
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    return {
        name: json.loads(text) if name.endswith("json") else yaml.safe_load(text) if name.endswith("yaml") else text
        for name, text in texts.items()
    }


# With the libraries themselves: one child process, as the tests' own never loads them.


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Case → what DeepSpeed, the Trainer and Accelerate make of its files."""
    root = tmp_path_factory.mktemp("exports")
    jobs = []
    for name, trial in CASES.items():
        folder = root / name
        words = command(write(trial, folder)["README.md"], "ds_config_trainer.json")
        words = words[words.index("train.py") + 1 :]
        words[words.index("--deepspeed") : words.index("--deepspeed") + 2] = []
        jobs.append({"folder": str(folder), "world": trial.placement.num_gpus, "trainer_command": words})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "export_probe.py")],
        input=json.dumps(jobs),
        env={**scrubbed(), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


def scrubbed() -> dict[str, str]:
    """This environment without what an outer launcher may have left in it."""
    leaked = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "ACCELERATE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(leaked)}


def test_deepspeed_reads_the_batch_and_the_zero_block_that_ran(loaded: dict[str, Any]) -> None:
    for name, trial in CASES.items():
        raw, config = loaded[name]["raw"], trial.ds_config
        assert "error" not in raw, (name, raw)
        micro, accumulated = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
        assert raw["batch"] == [micro * accumulated * trial.placement.num_gpus, micro, accumulated], name
        assert raw["optimizer"][0].lower() == config["optimizer"]["type"].lower(), name
        assert raw["optimizer"][1] == config["optimizer"]["params"], name
        written = config.get("zero_optimization", {"stage": 0})
        renamed = {key.removeprefix("stage3_"): value for key, value in written.items() if not isinstance(value, dict)}
        assert renamed.items() <= raw["zero"].items(), name


def test_the_trainer_told_what_the_readme_says_trains_exactly_what_ran(loaded: dict[str, Any]) -> None:
    dtypes = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
    for name, trial in CASES.items():
        trainer, expected = loaded[name]["trainer"], copy.deepcopy(loaded[name]["raw"])
        assert "error" not in trainer, (name, trainer)
        if name == "scheduler":  # the scheduler's maximum is what is trained with
            expected["optimizer"][1]["lr"] = WARMUP["params"]["warmup_max_lr"]  # type: ignore[index]
        assert trainer["resolved"] == expected, name
        config = trial.ds_config
        assert trainer["config"]["zero_optimization"] == config.get("zero_optimization", {"stage": 0}), name
        assert trainer["config"].get("aio") == config.get("aio"), name
        assert trainer["dtype"] == ("torch.float32" if name == "autocast" else dtypes[trial.workload.precision]), name
        text = json.dumps(trainer["config"]).replace("auto_cast", "").replace("torch_autocast", "")
        assert "auto" not in text.split('"'), name


def test_accelerate_launches_and_trains_what_ran_but_for_the_optimizer(loaded: dict[str, Any]) -> None:
    for name, trial in CASES.items():
        given = loaded[name]["accelerate"]
        assert "error" not in given, (name, given)
        expected = {
            "resolved": {**loaded[name]["raw"], "optimizer": [None, None]},
            "distributed_type": "DEEPSPEED",
            "num_processes": trial.placement.num_gpus,
            "num_machines": 1,
            "stages": [trial.configuration.stage] * 2,
            "zero3_init": trial.configuration.stage == 3,
        }
        assert {key: given[key] for key in expected} == expected, name
        assert given["use_deepspeed"], name


def test_accelerate_takes_the_same_file_to_another_world_size(loaded: dict[str, Any]) -> None:
    for answer in loaded.values():
        total, *others = answer["raw"]["batch"]
        wider = answer["accelerate_on_three_times_the_ranks"]
        assert "error" not in wider, wider
        assert wider["resolved"]["batch"] == [3 * total, *others]


def test_the_yaml_says_nothing_that_accelerate_refuses_beside_a_config_file(loaded: dict[str, Any]) -> None:
    refused = {
        "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
        "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model",
        "mixed_precision",
    }  # fmt: skip
    for answer in loaded.values():
        said = answer["accelerate"]["yaml"]
        assert refused & {*said, *said["deepspeed_config"]} == set()


# The files by themselves.


def test_the_raw_file_is_what_ran_but_for_the_private_swap_folder(tmp_path: Path) -> None:
    trial = row(offload("nvme"), num_gpus=2)
    private = deepspeed_config.with_swap_folder(trial.ds_config, f"{NVME}/ds_bench_swap.node.1.2.3")
    files = write(replace(trial, ds_config=private), tmp_path)
    assert files["ds_config.json"] == trial.ds_config
    assert "ds_bench_swap" not in "".join(path.read_text() for path in tmp_path.iterdir())
    assert f"`nvme_path`: `{NVME}`" in files["README.md"]


def test_defaults_that_versions_differ_in_are_written_as_the_engine_resolved_them(tmp_path: Path) -> None:
    left_out = {
        "gradient_clipping": None,
        "zero_optimization": {"overlap_comm": None, "offload_optimizer": {"pin_memory": None}},
    }
    trial = row(offload("cpu_optimizer"), changes=left_out)
    resolved = {
        "gradient_clipping": 1.0,
        "zero_config": {"overlap_comm": True, "offload_optimizer": {"pin_memory": False}, "offload_param": None},
    }
    files = write(success(trial, resolved_config=resolved), tmp_path)
    raw = files["ds_config.json"]
    assert raw["gradient_clipping"] == 1.0
    assert raw["zero_optimization"]["overlap_comm"] is True
    assert raw["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert "--max_grad_norm 1.0" in files["README.md"]


def test_what_was_auto_in_the_users_file_stays_auto_for_the_trainer_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    zero_block = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7, "sub_group_size": "auto"}
    path.write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": zero_block}))
    maker = FileRowMaker(facts=TrainingFacts(num_gpus=1, batch_size=4, precision="bf16", hidden_size=128))
    configuration = maker.make(read_configuration_file(path))
    trial = replace(row(zero(3)), configuration=configuration, ds_config=row(configuration).ds_config)
    trial = replace(trial, ds_config={**trial.ds_config, **configuration.deepspeed_config})
    blocks = {
        "raw": configuration_export.raw_config(success(trial)),
        "trainer": configuration_export.trainer_config(success(trial)),
    }
    assert blocks["raw"]["zero_optimization"]["reduce_bucket_size"] == 128 * 128
    block = blocks["trainer"]["zero_optimization"]
    assert (block["reduce_bucket_size"], block["stage3_prefetch_bucket_size"]) == ("auto", 7)
    assert "sub_group_size" not in block


def test_parameters_that_are_not_of_the_trainers_form_stay_as_they_ran_and_are_named(tmp_path: Path) -> None:
    adafactor = {"type": "Adafactor", "params": {"lr": 0.01, "eps": [1e-30, 1e-3], "betas": None}}
    files = write(row(changes={"optimizer": adafactor}), tmp_path)
    params = files["ds_config_trainer.json"]["optimizer"]["params"]
    assert params == {"lr": "auto", "eps": [1e-30, 1e-3], "weight_decay": "auto"}
    assert "--adam_epsilon" not in files["README.md"]
    assert "The Trainer refuses this form of `optimizer.params.eps`" in files["README.md"]


def test_accelerate_is_kept_from_replacing_an_offloaded_optimizer_that_is_not_adam(tmp_path: Path) -> None:
    lion = write(ODD["lion_offloaded"], tmp_path / "lion")
    assert lion["ds_config_accelerate.json"]["zero_force_ds_cpu_optimizer"] is False
    assert "deepspeed.ops.lion.DeepSpeedCPULion(model.parameters(), lr=0.0001" in lion["README.md"]
    adam = write(row(offload("cpu_optimizer")), tmp_path / "adam")
    assert "zero_force_ds_cpu_optimizer" not in adam["ds_config_accelerate.json"]
    assert "replaces by DeepSpeed's CPU version" in adam["README.md"]


def test_the_readme_names_the_class_that_accelerate_code_must_make(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for trial, maker in (
        (row(), "deepspeed.ops.adam.FusedAdam(model.parameters(), lr=0.0001, betas=[0.9, 0.999], eps=1e-08"),
        (row(torch_adam=True), "torch.optim.AdamW(model.parameters(), lr=0.0001"),
        (row(optimizer="Adam"), "deepspeed.ops.adam.FusedAdam(model.parameters(), lr=0.0001"),
        (row(offload("cpu_optimizer"), optimizer="Adam"), "torch.optim.Adam(model.parameters(), lr=0.0001"),
        (row(optimizer="SGD"), "torch.optim.SGD(model.parameters(), lr=0.0001, weight_decay=0.01)"),
        (row(optimizer="Lion"), "deepspeed.ops.lion.FusedLion(model.parameters(), lr=0.0001"),
        (ODD["adagrad_offloaded"], "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(model.parameters(), lr=0.0001"),
        (ODD["muon"], "accelerate.utils.DummyOptim"),
    ):
        with subtests.test(maker):
            assert maker in write(trial, tmp_path)["README.md"]


# Several nodes.


def test_several_nodes_are_named_in_every_command_and_counted_from_where_the_ranks_ran(tmp_path: Path) -> None:
    seen = success(row(num_gpus=4, hostfile="/home/me/my hosts"))
    ranks = tuple(replace(rank, hostname=f"node-{rank.rank // 2}") for rank in seen.ranks)
    files = write(replace(seen, ranks=ranks), tmp_path)
    said = files["accelerate.yaml"]
    assert (said["num_machines"], said["num_processes"]) == (2, 4)
    assert said["deepspeed_config"]["deepspeed_hostfile"] == "/home/me/my hosts"
    words = command(files["README.md"], "--deepspeed_config")
    assert words[:4] == ["deepspeed", "--hostfile", "/home/me/my hosts", "train.py"]
    assert "host slots=GPUS" in files["README.md"]


def test_a_failed_row_of_several_nodes_counts_them_from_its_hostfile(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\nc slots=2\n")
    failed = failure(row(num_gpus=6, hostfile=str(hostfile)))
    assert write(failed, tmp_path / "out")["accelerate.yaml"]["num_machines"] == 3
    hostfile.unlink()
    assert write(failed, tmp_path / "out")["accelerate.yaml"]["num_machines"] == 1


# The README.


def test_the_readme_of_a_row_that_trained_and_of_one_that_did_not(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    environment = Environment(
        hostname="node-0", logical_cores=8, packages={"torch": "2.13.0", "transformers": "5.23.0"}
    )
    seen = success(row(zero(3), num_gpus=2, grad_accum=4), gpu_peak_bytes=8 * GB)
    configuration_export.write_exports(seen, tmp_path, environment, doubt="Too close to call.")
    assert (tmp_path / "README.md").read_text() == snapshot(name="trained")
    work = {"attention": "eager", "loss": "tiled", "tiled_mlp": True, "compile": "torch", "data_workers": 2}
    changes = {"sequence_parallel_size": 2, "steps_per_print": 10, "wall_clock_breakdown": True}
    trial = row(offload("nvme"), changes=changes, num_gpus=2, cpu_binding="cores", zero_init=False, **work)
    values = {"axis_values": {"pin_memory_backend": "native"}, "variables": {"DS_PIN_MEMORY_BACKEND": "native"}}
    failed = failure(replace(trial, configuration=replace(trial.configuration, **values)), error="why <it>\nended")
    failed = replace(failed, caveats=("--nvme-path is memory (tmpfs), not an NVMe disk",))
    assert write(failed, tmp_path)["README.md"] == snapshot(name="failed")
    unsupported = replace(row(offload("cpu_optimizer", 1)), unsupported="needs a folder; add --nvme-path DIR")
    readme = write(failure(unsupported, schema.UNSUPPORTED, error=None), tmp_path)["README.md"]
    assert "(Unsupported): needs a folder; add --nvme-path DIR" in readme


HOSTILE = "``evil`` \"quoted\" 'name'\n# <script>alert(1)</script>\n```\n- deepspeed_config: !!python/object:os.system"


def test_a_hostile_model_name_cannot_write_markup_into_the_readme(tmp_path: Path) -> None:
    seen = success(row(model=HOSTILE), device_name=HOSTILE)
    readme = write(replace(seen, caveats=(HOSTILE,)), tmp_path)["README.md"]
    html = MarkdownIt().render(readme)
    assert "<script" not in html
    assert html.count("<h1>") == 1
    assert html.count("<h2>") == readme.count("\n## ")
    assert len(readme.splitlines()) == len(write(replace(seen, caveats=("x",)), tmp_path)["README.md"].splitlines())


TEXT = st.text() | st.text(alphabet="`~*_<>&;[]()!#|-+=\\ \n\t1.ab/:")


@given(TEXT)
def test_any_text_stays_one_line_keeps_its_code_span_and_opens_no_markup(text: str) -> None:
    assert MarkdownIt().render("x " + table_layout.escape(text)).count("<") == 2  # of the paragraph itself
    for shown in (table_layout.inline_code(text), table_layout.escape(text)):
        assert shown.isprintable()
    rendered = MarkdownIt().render(f"x {table_layout.inline_code('a' + text + 'a')} y")
    assert rendered.count("<code>") == 1
    assert rendered.startswith("<p>x <code>a")
    assert rendered.endswith("a</code> y</p>\n")


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=50))
@example("\x85")
def test_any_path_comes_back_out_of_the_yaml(text: str) -> None:
    trial = row(hostfile="/" + text)
    said = yaml.safe_load(
        configuration_export.accelerate_yaml(success(trial), Path("/" + text.replace("\0", "")) / "f.json")
    )
    assert said["deepspeed_config"]["deepspeed_hostfile"] == "/" + text
    assert said["deepspeed_config"]["deepspeed_config_file"] == str(Path("/" + text.replace("\0", "")) / "f.json")


# Folders.


def test_a_folder_that_cannot_be_written_is_one_line_with_a_remedy(subtests: pytest.Subtests, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken" / "README.md" / "full").mkdir(parents=True)
    for folder in (tmp_path / "file" / "deep", tmp_path / "taken", tmp_path / "a\0b"):
        with subtests.test(str(folder)):
            with pytest.raises(UsageError) as caught:
                configuration_export.write_exports(success(row()), folder)
            assert len(str(caught.value).splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_value_that_json_cannot_hold_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    trial = row(changes={"gradient_clipping": math.nan})
    with pytest.raises(UsageError, match="cannot export this row"):
        configuration_export.write_exports(success(trial), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_older_files_are_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for stage in (1, 3):
        assert write(row(zero(stage)), tmp_path)["ds_config.json"]["zero_optimization"]["stage"] == stage
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_a_configuration_of_unexpected_types_is_exported_as_it_is(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for config in ({}, {"optimizer": 5, "zero_optimization": "x", "bf16": [], "scheduler": {"params": 1}}):
        with subtests.test(config=config):
            read = write(failure(replace(row(), ds_config=config)), tmp_path)
            assert read["ds_config.json"] == config
            assert all(isinstance(content, dict) for name, content in read.items() if name != "README.md")
            used = read["accelerate.yaml"]["deepspeed_config"]["deepspeed_config_file"]
            assert used == str(tmp_path / "ds_config_accelerate.json")


def test_the_folder_of_a_strategy_keeps_its_name_and_leads_nowhere_else() -> None:
    folder = {
        "zero2": "ds_config_zero2",
        "../../etc": "ds_config_.._.._etc",
        "/": "ds_config__",
        "a\0b\\c d": "ds_config_a_b_c_d",
        "cpu_optimizer-2.1": "ds_config_cpu_optimizer-2.1",
    }
    assert {strategy: configuration_export.folder_name(strategy) for strategy in folder} == folder


# For real: the README's three commands, word for word, each with two steps of training on one CPU rank.

COMMON = """
import json, sys, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = type("Config", (), {"hidden_size": 8})()
        self.a, self.b = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)
    def forward(self, x, labels=None):
        loss = (self.b(torch.relu(self.a(x.to(self.a.weight.dtype)))).float() - 1).pow(2).mean()
        return {"loss": loss}
torch.manual_seed(0)
data = [{"x": torch.randn(8)} for _ in range(64)]
def report(engine, losses):
    print("REPORT " + json.dumps({
        "batch": [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(),
                  engine.gradient_accumulation_steps()],
        "stage": engine.zero_optimization_stage(), "optimizer": type(engine.basic_optimizer).__name__,
        "bf16": engine.bfloat16_enabled(), "steps": engine.global_steps, "losses": losses}))
"""
SCRIPTS = {
    "--deepspeed_config": """
import argparse, deepspeed
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
net = Net()
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
losses = []
for _ in range(4):
    loss = engine(torch.stack([row["x"] for row in data[:4]]))["loss"]
    engine.backward(loss); engine.step(); losses.append(float(loss.detach()))
report(engine, losses)
""",
    "ds_config_trainer.json": """
from transformers import HfArgumentParser, Trainer, TrainingArguments
(args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
args.max_steps, args.save_strategy, args.report_to = 2, "no", []
trainer = Trainer(model=Net(), args=args, train_dataset=data)
result = trainer.train()
report(trainer.model_wrapped, [result.training_loss])
""",
    "accelerate.yaml": """
from accelerate import Accelerator
accelerator = Accelerator()
net = Net()
loader = torch.utils.data.DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.0001, betas=[0.9, 0.999], eps=1e-08, weight_decay=0.01)
engine, optimizer, loader = accelerator.prepare(net, optimizer, loader)
losses = []
for _, batch in zip(range(4), loader):
    with accelerator.accumulate(engine):
        loss = engine(**batch)["loss"]
        accelerator.backward(loss); optimizer.step(); optimizer.zero_grad(); losses.append(float(loss.detach()))
report(engine, losses)
""",
}


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("file", SCRIPTS)
def test_the_readmes_command_trains_with_the_exported_file(
    file: str, built_ops: dict[str, OpState], tmp_path: Path
) -> None:
    trial = row(offload("cpu_optimizer", 2), accelerator="cpu", grad_accum=2)
    readme = write(trial, tmp_path)["README.md"]
    (tmp_path / "train.py").write_text(COMMON + SCRIPTS[file])
    seen = run_command(command(readme, file), tmp_path)
    assert seen["batch"] == [8, 4, 2]
    assert (seen["stage"], seen["optimizer"], seen["bf16"], seen["steps"]) == (2, "DeepSpeedCPUAdam", True, 2)
    assert seen["losses"]
    assert all(map(math.isfinite, seen["losses"]))


def run_command(words: list[str], folder: Path) -> dict[str, Any]:
    """What the script reports of its engine; the only liberty taken is a free port."""
    variables = {
        **scrubbed(),
        **rank_environment.rank_environment(placement(), os.environ),
        "HF_HUB_OFFLINE": "1",
    }
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    at, flag = (1, "--master_port") if words[0] == "deepspeed" else (2, "--main_process_port")
    port = free_port()
    words[at:at] = [flag, str(port)]
    words[0] = str(Path(sys.executable).with_name(words[0]))
    process = subprocess.Popen(
        words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            segment.unlink()  # DeepSpeed never does (ops/csrc/cpu/comm/shm.cpp)
    (line,) = [line for line in out.splitlines() if "REPORT " in line] or [pytest.fail(out[-4000:])]
    report: dict[str, Any] = json.loads(line.partition("REPORT ")[2])
    return report
