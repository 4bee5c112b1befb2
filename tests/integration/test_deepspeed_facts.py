"""Facts about the installed DeepSpeed that this program relies on: a version that changes one fails here first."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ds_bench
from ds_bench.config import deepspeed_config, deepspeed_keys, strategies
from ds_bench.launch import ops

_ASK = """
import json, sys
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
out = sys.stdout; sys.stdout = sys.stderr
zero = DeepSpeedZeroConfig(stage=3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
def raises(config):
    try:
        DeepSpeedConfig({"train_batch_size": 1, **config})
    except Exception as error:
        return type(error).__name__
    return None
answer = {
    "version": deepspeed.__version__,
    "gradient_clipping": DeepSpeedConfig({"train_batch_size": 1}).gradient_clipping,
    "pin_memory": [zero.offload_optimizer.pin_memory, zero.offload_param.pin_memory],
    "overlap_comm": [DeepSpeedZeroConfig(stage=stage).overlap_comm for stage in range(4)],
    "defaults": DeepSpeedZeroConfig(stage=3).model_dump(mode="json"),
    "max_in_cpu": zero.offload_param.max_in_cpu,
    "mics": raises({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}),
    "typo_in_block": raises({"zero_optimization": {"stage": 1, "overlap_com": True}}),
    "typo_at_top": raises({"gradient_cliping": 1.0}),
    "comms_logger": DeepSpeedConfig({"train_batch_size": 1, "comms_logger": {"enabled": False}})
    .comms_config.comms_logger_enabled,
}
print(json.dumps(answer), file=out)
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _ASK],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_keys_that_we_ship_are_those_of_the_installed_version() -> None:
    """Keys, types and defaults, removed keys, optimizers, schedulers; the script without ``--print`` writes them."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "make_deepspeed_keys.py"
    command = [sys.executable, str(script), "--print"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    name = f"{deepspeed_keys.MINOR_VERSIONS[-1]}.json"
    shipped = Path(ds_bench.__path__[0], "config", "deepspeed_keys_by_version", name).read_text(encoding="utf-8")
    assert shipped == done.stdout, "run scripts/make_deepspeed_keys.py"


def source(path: str) -> str:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / path).read_text()


def test_the_defaults_we_write_out_are_the_installed_ones(facts: dict[str, Any]) -> None:
    config = deepspeed_config.base_config(strategies.offload_strategy("cpu_full"), 1)
    assert config["gradient_clipping"] == facts["gradient_clipping"]
    written = {key: value for key, value in config["zero_optimization"].items() if not key.startswith("offload")}
    default = {**facts["defaults"], **{f"stage3_{key}": value for key, value in facts["defaults"].items()}}
    assert {key: default[key] for key in written} == written
    assert facts["pin_memory"] == [True, True]


def test_communication_overlaps_by_default_at_stage_3_only(facts: dict[str, Any]) -> None:
    assert facts["overlap_comm"] == [False, False, False, True]
    for stage in (1, 2, 3):
        block = deepspeed_config.zero_block(strategies.ZERO_STAGES[stage])
        assert block["overlap_comm"] == facts["overlap_comm"][stage]


def test_what_deepspeed_refuses_accepts_and_switches_on(facts: dict[str, Any]) -> None:
    assert facts["typo_in_block"] == "ValidationError"
    assert facts["typo_at_top"] is None
    assert facts["mics"] == "DeepSpeedConfigError"
    assert facts["comms_logger"] is True, "by the presence of its block"
    assert facts["max_in_cpu"] == 1_000_000_000, "parameters offloaded to NVMe stay in memory by default"


def test_source_has_what_we_rely_on() -> None:
    """Stages 1 and 2 offload to the CPU only; names of shared memory and swap files; the launcher's exit code."""
    text = source("runtime/zero/stage_1_and_2.py")
    assert "OffloadDeviceEnum.nvme" not in text
    assert "swap_tensor" not in text
    text = source("ops/csrc/cpu/comm/shm.cpp")
    assert '#define SHM_BUFFER_NAME "deepspeed_allreduce_buffer"' in text
    assert re.search(r'"%s_%d_%s_%s",\s*SHM_BUFFER_NAME,\s*getuid\(\),\s*addr_string,\s*port_string', text)
    text = source("runtime/swap_tensor/partitioned_param_swapper.py")
    assert "'zero_stage_3', f'{torch_dtype_string}params'" in text
    assert "'optimizer'" in source("runtime/swap_tensor/optimizer_utils.py")
    assert "if result.returncode > 0:" in source("launcher/runner.py")
    text = source("runtime/comm/coalesced_collectives.py")
    assert ".div_(world_sz)" in text, "with Ulysses too stage 3 divides by all ranks (docs/metrics.md)"
    assert "sequence" not in text


_TRAIN = """
import os, sys
import deepspeed, torch
folder, resumed = sys.argv[1], sys.argv[2] == "resume"
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
deepspeed.init_distributed("gloo", init_method=f"file://{folder}/meet{ranks}", rank=rank, world_size=ranks)
data = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
def engine(**more):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    config = {"train_micro_batch_size_per_gpu": 4 // ranks, "zero_optimization": {"stage": 3}, **more,
              "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
def losses(engine, steps):
    for _ in range(steps):
        loss = (engine(data.chunk(ranks)[rank]) - data.chunk(ranks)[rank]).float().square().mean()
        engine.backward(loss)
        engine.step()
        torch.distributed.all_reduce(mean := loss.detach().clone())
        yield mean.item() / ranks
if resumed:
    try:
        engine().load_checkpoint(folder)
        print("accepted")
    except Exception as error:
        print("refused", "Automatic adjustment" in str(error))
    trained = engine(checkpoint={"load_universal": True})
    trained.load_checkpoint(folder)
else:
    trained = engine()
    list(losses(trained, 5))
    trained.save_checkpoint(folder)
print("losses", *losses(trained, 3))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_universal_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """The commands of docs/questions.md."""
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCH_EXTENSIONS_DIR": str(ops.cache_folder("cpu"))}

    def train(ranks: int, action: str) -> list[str]:
        command = [sys.executable, "-c", _TRAIN, str(tmp_path), action]
        started = []
        for rank in map(str, range(ranks)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ | place))
        try:
            return [process.communicate(timeout=250)[0] for process in started].pop().splitlines()
        finally:
            for process in started:
                process.kill()

    (saved,) = [line for line in train(2, "save") if line.startswith("losses")]
    page = Path(__file__).resolve().parents[2].joinpath("docs", "questions.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^python (-m deepspeed.checkpoint.ds_to_universal .*)$", page, re.MULTILINE)
    words = shown.replace("ckpt/global_step100", f"{tmp_path}/global_step5").split()
    subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=250, env=environ)
    lines = train(1, "resume")
    assert "refused True" in lines
    (went_on,) = [line for line in lines if line.startswith("losses")]
    assert [*map(float, went_on.split()[1:])] == pytest.approx([*map(float, saved.split()[1:])], rel=0.01)
