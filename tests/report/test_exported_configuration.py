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
from ds_bench.report import exported_configuration
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
    hosts: tuple[tuple[str, int], ...] = (),
    changes: dict[str, Any] | None = None,
    optimizer: str | None = None,
    torch_adam: bool = False,
    **work: Any,
) -> Trial:
    """A trial with the configuration that the scripts would make of these wishes."""
    strategy = strategy or zero(2)
    on = Placement(
        accelerator=accelerator,  # type: ignore[arg-type]
        num_gpus=num_gpus,
        hostfile=hostfile,
        hosts=hosts,
        nvme_path=NVME,
    )
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
    "sgd_momentum": row(zero(3), optimizer="SGD", changes={"optimizer": {"params": {"momentum": 0.9}}}),
    "lion_betas": row(optimizer="Lion", changes={"optimizer": {"params": {"betas": [0.95, 0.98]}}}),
    "lion_offloaded": row(offload("cpu_optimizer"), num_gpus=2, optimizer="Lion"),
    "adagrad_offloaded": row(offload("cpu_optimizer", 2), optimizer="Adagrad"),
    "muon": row(changes={"optimizer": {"type": "Muon", "params": {"lr": 0.02, "muon_lr": 0.01, "betas": None}}}),
    "bf16_states": row(changes=BF16_STATES, num_gpus=2),
    "fp16_scale": row(precision="fp16", changes={"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 3}}),
    "own_keys": row(changes={"comms_logger": {"enabled": True}, "zero_optimization": {"round_robin_gradients": True}}),
    "autocast": row(changes={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "scheduler": row(changes={"scheduler": WARMUP}),
    "no_clipping": row(changes={"gradient_clipping": 0}),
    "default_clipping": row(changes={"gradient_clipping": None}),
    "no_zero_block": row(zero(0), changes={"zero_optimization": None}),
    "small_buckets": row(zero(3), changes={"zero_optimization": {"reduce_bucket_size": 12345}}),
    "weird_rates": row(changes={"optimizer": {"params": {"lr": 1e-7, "eps": 1e-12, "betas": [0.5, 0.1]}}}),
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
    paths = exported_configuration.write_exports(record, folder)
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


REFUSED_BY_ACCELERATE = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model",
    "mixed_precision",
}  # fmt: skip
"""Keys of the YAML that Accelerate refuses beside a configuration file."""


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
            "use_deepspeed": True,
        }
        assert {key: given[key] for key in expected} == expected, name
        assert REFUSED_BY_ACCELERATE.isdisjoint({*given["yaml"], *given["yaml"]["deepspeed_config"]})
        # The same file at another world size.
        total, *others = loaded[name]["raw"]["batch"]
        assert loaded[name]["accelerate_on_three_times_the_ranks"]["resolved"]["batch"] == [3 * total, *others], name


# The files by themselves.


def test_the_raw_file_is_what_ran_but_for_the_private_swap_folder(tmp_path: Path) -> None:
    trial = row(offload("nvme"), num_gpus=2)
    private = deepspeed_config.with_swap_folder(trial.ds_config, f"{NVME}/ds_bench_swap.node.1.2.3")
    files = write(replace(trial, ds_config=private), tmp_path)
    assert files["ds_config.json"] == trial.ds_config
    assert "ds_bench_swap" not in "".join(path.read_text() for path in tmp_path.iterdir())
    assert f"`nvme_path`: `{NVME}`" in files["README.md"]


def test_defaults_that_versions_differ_in_are_written_as_the_engine_resolved_them(tmp_path: Path) -> None:
    zero_block = {"overlap_comm": None, "offload_optimizer": {"pin_memory": None}}
    trial = row(offload("cpu_optimizer"), changes={"gradient_clipping": None, "zero_optimization": zero_block})
    known = {"overlap_comm": True, "offload_optimizer": {"pin_memory": False}, "offload_param": None}
    files = write(success(trial, resolved_config={"gradient_clipping": 1.0, "zero_config": known}), tmp_path)
    raw = files["ds_config.json"]
    written = raw["zero_optimization"]
    found = raw["gradient_clipping"], written["overlap_comm"], written["offload_optimizer"]["pin_memory"]
    assert found == (1.0, True, False)
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
        "raw": exported_configuration.raw_config(success(trial)),
        "trainer": exported_configuration.trainer_config(success(trial)),
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
    assert "The Trainer rejects this form of `optimizer.params.eps`" in files["README.md"]


REPLACED = ", which Accelerate replaces with DeepSpeed's CPU version."


@pytest.mark.parametrize(
    ("trial", "maker", "forces"),
    [
        (row(), "deepspeed.ops.adam.FusedAdam(model.parameters(), lr=0.0001, betas=[0.9, 0.999], eps=1e-08", None),
        (row(torch_adam=True), "torch.optim.AdamW(model.parameters(), lr=0.0001", None),
        (row(optimizer="Adam"), "deepspeed.ops.adam.FusedAdam(model.parameters(), lr=0.0001", None),
        (row(offload("cpu_optimizer"), optimizer="Adam"), "torch.optim.Adam(model.parameters(), lr=0.0001", None),
        (row(offload("cpu_optimizer")), REPLACED, None),
        (row(optimizer="SGD"), "torch.optim.SGD(model.parameters(), lr=0.0001, weight_decay=0.01)", None),
        (row(optimizer="Lion"), "deepspeed.ops.lion.FusedLion(model.parameters(), lr=0.0001", None),
        # Accelerate would put Adam in the place of any other offloaded optimizer.
        (ODD["lion_offloaded"], "deepspeed.ops.lion.DeepSpeedCPULion(model.parameters(), lr=0.0001", False),
        (ODD["adagrad_offloaded"], "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(model.parameters(), lr=0.0001", False),
        (ODD["muon"], "accelerate.utils.DummyOptim", None),
    ],
)
def test_the_readme_names_the_class_that_accelerate_code_must_make(
    trial: Trial, maker: str, forces: bool | None, tmp_path: Path
) -> None:
    files = write(trial, tmp_path)
    assert maker in files["README.md"]
    assert files["ds_config_accelerate.json"].get("zero_force_ds_cpu_optimizer") is forces


# Several nodes.


def test_several_nodes_are_named_in_every_command_and_counted(tmp_path: Path) -> None:
    hostfile = tmp_path / "my hosts"
    files = write(row(num_gpus=4, hostfile=str(hostfile), hosts=(("a", 2), ("b", 2))), tmp_path)
    said = files["accelerate.yaml"]
    assert (said["num_machines"], said["num_processes"]) == (2, 4)
    assert said["deepspeed_config"]["deepspeed_hostfile"] == str(hostfile)
    words = command(files["README.md"], "--deepspeed_config")
    assert words[:4] == ["deepspeed", "--hostfile", str(hostfile), "train.py"]


def test_accelerate_is_started_on_each_node_if_there_is_no_hostfile(tmp_path: Path) -> None:
    files = write(row(num_gpus=4, hosts=(("a", 2), ("b", 2))), tmp_path)
    assert files["accelerate.yaml"]["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    assert "--machine_rank I --main_process_ip FIRST_NODE" in files["README.md"]


# The README.


def test_the_readme_of_a_row_that_trained_and_of_one_that_did_not(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    environment = Environment(
        hostname="node-0", logical_cores=8, packages={"torch": "2.13.0", "transformers": "5.23.0"}
    )
    seen = success(row(zero(3), num_gpus=2, grad_accum=4), gpu_peak_bytes=8 * GB)
    exported_configuration.write_exports(seen, tmp_path, environment, doubt="Too close to call.")
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


def test_any_path_comes_back_out_of_the_yaml(subtests: pytest.Subtests) -> None:
    for text in ("\x85 \u2028", "\ud800", "'\"\n: #", "{a: !!python/object:os.system}"):
        with subtests.test(ascii(text)):
            file = Path(f"/{text}/f.json")
            said = yaml.safe_load(exported_configuration.accelerate_yaml(success(row(hostfile=f"/{text}")), file))
            assert said["deepspeed_config"]["deepspeed_hostfile"] == f"/{text}"
            assert said["deepspeed_config"]["deepspeed_config_file"] == str(file)
            assert said["deepspeed_config"]["zero3_init_flag"] is False, "of stage 2"


def test_what_cannot_be_written_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken" / "README.md" / "full").mkdir(parents=True)
    odd = success(row(changes={"gradient_clipping": math.nan}))
    for record, folder in (
        (success(row()), "file/deep"),
        (success(row()), "taken"),
        (success(row()), "a\0b"),
        (odd, "x"),
    ):
        with pytest.raises(UsageError) as caught:
            exported_configuration.write_exports(record, tmp_path / folder)
        assert len(str(caught.value).splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "x").iterdir()) == []


def test_older_files_are_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for stage in (1, 3):
        assert write(row(zero(stage)), tmp_path)["ds_config.json"]["zero_optimization"]["stage"] == stage
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    assert exported_configuration.folder_name("../a\0b\\c d-2.1") == "ds_config_.._a_b_c_d-2.1"


# For real: two of the README's commands, word for word, each with two steps of training on one CPU rank.

TRAIN = """
import argparse, sys, torch
net = torch.nn.Linear(8, 8)
if "--deepspeed" in sys.argv:
    import deepspeed
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int)
    engine, *_ = deepspeed.initialize(args=parser.parse_args(), model=net, model_parameters=net.parameters())
else:
    from accelerate import Accelerator
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0001)
    engine, *_ = Accelerator().prepare(net, optimizer, torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=4))
for _ in range(4):
    engine.backward(engine(torch.ones(4, 8).to(engine.module.weight.dtype)).float().pow(2).mean())
    engine.step()
print("REPORT", engine.train_batch_size(), engine.zero_optimization_stage(), engine.bfloat16_enabled(),
      engine.global_steps, type(engine.basic_optimizer).__name__)
"""


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("file", ["--deepspeed_config", "accelerate.yaml"])
def test_the_readmes_command_trains_with_the_exported_file(
    file: str, built_ops: dict[str, OpState], tmp_path: Path
) -> None:
    words = command(
        write(row(offload("cpu_optimizer", 2), accelerator="cpu", grad_accum=2), tmp_path)["README.md"], file
    )
    (tmp_path / "train.py").write_text(TRAIN)
    variables = {**scrubbed(), **rank_environment.rank_environment(placement(), os.environ), "HF_HUB_OFFLINE": "1"}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    # The only liberty taken is a free port.
    at, flag, port = *((1, "--master_port") if words[0] == "deepspeed" else (2, "--main_process_port")), free_port()
    words[at:at] = [flag, str(port)]
    words[0] = str(Path(sys.executable).with_name(words[0]))
    process = subprocess.Popen(
        words, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            segment.unlink()  # DeepSpeed never does (ops/csrc/cpu/comm/shm.cpp)
    assert "REPORT 8 2 True 2 DeepSpeedCPUAdam" in out, out[-4000:]
