"""Configuration files of users as rows, trained by real DeepSpeed on two CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ds_bench.records.run_folder import RunFolder
from ds_bench.records.schema import TrialRecord
from tests.support.real_trials import ROOT

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow, pytest.mark.usefixtures("built_ops")]

AUTO = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
CPU = {"device": "cpu", "pin_memory": True}
RATES = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 2, "total_num_steps": 102}
SCHEDULER = {"type": "WarmupDecayLR", "params": {**RATES, "warmup_type": "linear"}}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": "auto", **keys}}


FILES: dict[str, Any] = {
    "full_offload.json": {**AUTO, "optimizer": ADAMW, **zero(3, offload_optimizer=CPU, offload_param=CPU)},
    "scheduler.json": {**AUTO, "optimizer": ADAMW, "scheduler": SCHEDULER, **zero(2, cpu_offload=True)},
    "half.json": {"fp16": {"enabled": True}, "optimizer": ADAMW, **zero(2)},
    "batch.json": '{//\n"train_batch_size": 12, "gradient_accumulation_steps": 2, "bf16": {"enabled": true},'
    '"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e7,}}',
    "accelerate.yaml": "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n",
    "trainer.yaml": "deepspeed: full_offload.json\nbf16: true\nlearning_rate: 3.0e-4\ngradient_checkpointing: true\n",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrialRecord]:
    """The record of each file's row, by its name."""
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    command = [sys.executable, str(ROOT / "zero_stage_comparison.py"), "--configs", str(folder), "--keep-batch"]
    command += ["--model", "tiny", "--batch-size", "2", "--seq-length", "16", "--num-steps", "3", "--warmup-steps", "1"]
    command += ["--num-gpus", "2", "--accelerator", "cpu", "--output-dir", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "out" / "runs").iterdir()
    records = RunFolder.open(run).records()
    return {record.trial.configuration.name: record for record in records}


def test_every_file_trains_as_it_says(trained: dict[str, TrialRecord]) -> None:
    assert {name.rpartition(".")[0] for name in FILES} == trained.keys()
    half = trained["half"]
    if "fp16" in half.trial.placement.supported_precisions:  # on a processor with instructions for it
        assert half.ranks[0].resolved_config["float16_config"]["enabled"]
    else:
        assert (half.outcome.status, half.ranks) == ("Unsupported", ())
    for name in trained.keys() - {"half"}:
        record = trained[name]
        assert record.outcome.success, (name, record.outcome)
        (first, second) = record.ranks
        assert first.losses[-1] is not None
        assert first.resolved_config["bfloat16_config"]["enabled"], name
        assert first.resolved_config["zero_config"]["stage"] == record.trial.configuration.stage
        assert len(second.losses) == len(first.losses)
    assert trained["scheduler"].ranks[0].optimizer_class == "DeepSpeedCPUAdam"
    names = ("full_offload", "accelerate", "trainer")
    rates = [trained[name].ranks[0].optimizer_settings[0]["lr"] for name in names]
    assert rates == [5e-5, 1e-4, 3e-4]
    assert trained["trainer"].trial.workload.activation_checkpointing
    assert trained["trainer"].trial.configuration.resolved_values["optimizer.params.lr"] == 3e-4
    assert (trained["batch"].ranks[0].micro_batch_size, trained["batch"].ranks[0].grad_accum) == (3, 2)
    # Four steps leave the scheduler at iteration 3 (from 0) of 102, the first 2 being its warm-up.
    rate = trained["scheduler"].ranks[0].optimizer_settings[0]["lr"]
    assert rate == pytest.approx(1e-2 * (102 - 3) / (102 - 2))
