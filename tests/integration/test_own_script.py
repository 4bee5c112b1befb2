"""Training scripts as users have them, one per stack, unchanged: what each row shows, and how each script is ended."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_trials import ROOT
from tests.support.shared_files import shared_files

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("built_ops")]

TRAINER = (
    "--use_cpu --output_dir {output_dir} --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
    "--max_steps 100 --report_to none --bf16 true"
)
BY_VARIABLES = ("--accelerate-env",)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script with its arguments, and what its rows show."""

    command: str
    configs: str
    """Names of the rows' files."""
    ranks: int = 1
    flags: tuple[str, ...] = ()
    needs: str | None = None
    """Package that the script imports."""
    status: str = "✅ Success"
    error: str = ""
    """Pattern in the error."""
    kind: str | None = None
    """Of the failure, if the program acts on it."""
    row: dict[str, Any] = field(default_factory=dict)
    """Column → value, in every row."""
    tokens: tuple[int, ...] | None = None
    """Of the first steps on rank 0."""
    caveat: str = ""
    """Pattern in the caveats of the last row."""


WITH_DEEPSPEED = f"b_trainer.py --deepspeed {{config}} {TRAINER}"
TRL = f"d_trl_sft_lora.py --deepspeed {{config}} {TRAINER}"
LORA = {"parameter_count": 433_792, "trainable_parameter_count": 7_168, "main_engine": "PeftModelForCausalLM"}
CASES = {
    "plain": Case(
        command="a_plain.py --deepspeed --deepspeed_config {config}",
        configs="zero0 zero1 zero3",
        row={"first_loss": pytest.approx(6.2492, abs=1e-4), "seq_length": None, "config_source": "command"},
        tokens=(256, 256, 256),
    ),
    "plain, two ranks": Case(
        command="a_plain.py --deepspeed --deepspeed_config {config}", configs="zero2 zero3", ranks=2, tokens=(256, 256)
    ),
    "trainer": Case(
        command=f"{WITH_DEEPSPEED} --save_steps 4 --eval_strategy steps --eval_steps 3",
        configs="auto2 auto3",
        row={"batch_size": 4, "grad_accum": 2, "precision": "bf16"},
        tokens=(512, 512),
        caveat="3 of 5 measured steps include an evaluation or a save",
    ),
    "trainer, other values": Case(
        command=WITH_DEEPSPEED.replace("batch_size 4 --gradient_accumulation_steps 2", "batch_size 8"),
        configs="zero1",
        status="❌ ValueError",
        error="mismatch TrainingArguments values.*'auto'",
    ),
    "trainer, by variables": Case(
        command=f"b_trainer.py {TRAINER}", configs="auto2", flags=BY_VARIABLES, row={"config_source": "accelerate_env"}
    ),
    "accelerate": Case(command="c_accelerate.py", configs="auto2", flags=BY_VARIABLES, tokens=(512, 512)),
    "accelerate, two ranks": Case(command="c_accelerate.py", configs="gas2n", flags=BY_VARIABLES, ranks=2),
    "accelerate, two optimizers": Case(
        command="c_accelerate.py", configs="gas2", flags=BY_VARIABLES, status="❌ ValueError", error="an optimizer"
    ),
    "trl": Case(command=TRL, configs="auto2 auto3", needs="trl", row=LORA, tokens=(424, 360, 392)),
    "trl, packed": Case(
        command=f"{TRL} --packing true --max_length 64", configs="auto2", needs="trl", tokens=(488, 493), row=LORA
    ),
    "accumulates each": Case(
        command="g_own_accumulation.py --style each --deepspeed_config {config}",
        configs="gas2",
        row={"first_loss": pytest.approx(6.2618, abs=1e-3)},
        tokens=(512, 512),
    ),
    "accumulates once": Case(
        command="g_own_accumulation.py --style once --deepspeed_config {config}",
        configs="zero2",
        row={"first_loss": pytest.approx(6.2618, abs=1e-3)},
        tokens=(512, 512),
    ),
    "accumulates to a boundary": Case(
        command="g_own_accumulation.py --style boundary --deepspeed_config {config}",
        configs="gas2",
        row={"first_loss": pytest.approx(6.2618 / 2, abs=1e-3)},
        tokens=(512, 512),
    ),
    "draws data after the model": Case(
        command="i_zero_init.py {config}",
        configs="zero2 zero3",
        caveat="trained on different data from configs_zero2's",
    ),
    "overridden": Case(
        command="i_zero_init.py {configs}/zero2.json",
        configs="zero3",
        flags=("--override-config",),
        row={"stage": 3, "config_source": "override"},
    ),
    "ignored by the script": Case(
        command="i_zero_init.py {configs}/zero2.json --ignored {config}",
        configs="zero3",
        caveat="the script's engine ran with stage 2.*this row's file says stage 3",
    ),
    "evaluates and saves": Case(
        command="j_eval_save.py --deepspeed_config {config}",
        configs="zero2",
        caveat="3 of 5 measured steps include an evaluation or a save",
    ),
    "spawned workers": Case(command="j_eval_save.py --deepspeed_config {config} --context spawn", configs="zero2"),
    "no engine": Case(
        command="k_no_deepspeed.py --deepspeed_config {config}",
        configs="zero2",
        status="❌ NoEngine",
        error="before a DeepSpeed engine took a step",
    ),
    "fails on one rank": Case(
        command="k_fails.py --rank 1 --deepspeed_config {config}",
        configs="zero2",
        ranks=2,
        status="❌ KeyError",
        error="KeyError between two steps: .*column 'text' is not in the data set",
    ),
    "ends early": Case(
        command="k_short.py --steps 4 --deepspeed_config {config}",
        configs="zero2",
        status="❌ EndedEarly",
        error="4 of 7 steps",
    ),
    "catches everything": Case(command="p_swallows.py --deepspeed_config {config}", configs="zero2"),
    "auto without a trainer": Case(
        command="a_plain.py --deepspeed_config {config}",
        configs="auto2",
        status="❌ TypeError",
        kind="auto_refused",
        error='in init: only the Trainer, Accelerate and TRL replace "auto", here at train_',
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_script(case: Case, tmp_path: Path) -> None:
    folder = shared_files("own_scripts", "*.py")[0].parent
    rows, records = run(folder, case, tmp_path)
    for row in rows:
        assert (row["status"], row["error"]) == (case.status, row["error"] if case.error else None)
        assert re.search(case.error, row["error"] or "")
        assert {name: row[name] for name in case.row} == case.row
        assert row["wall_seconds"] < 100
    assert case.kind in (None, records[0]["outcome"]["kind"])
    if case.tokens is not None:
        for record in records:
            assert tuple(record["ranks"][0]["script"]["tokens"][: len(case.tokens)]) == case.tokens
    caveats = rows[-1]["caveats"] or ""
    assert re.search(case.caveat, caveats)
    assert ("the script's engine ran" in caveats) == ("the script's engine ran" in case.caveat)
    text = "".join(log.read_text() for log in tmp_path.rglob("rank*.log"))
    assert ("FINISHED" in text or "FINALLY" in text) == (case.status in ("❌ NoEngine", "❌ EndedEarly"))
    # Neither a checkpoint in the private folder nor a process of the script is left.
    assert not [*tmp_path.rglob("ds_bench_checkpoint.*")]
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], stdout=subprocess.PIPE, check=False).stdout


def run(folder: Path, case: Case, tmp_path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run a script in an empty folder. Return its flat rows and its records."""
    if case.needs is not None and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    script, *arguments = case.command.replace("{configs}", str(folder / "configs")).split()
    command = [
        *(sys.executable, "-m", "ds_bench", "run", "--accelerator", "cpu", "--num-gpus", str(case.ranks)),
        *("--warmup-steps", "2", "--num-steps", "5", "--output-dir", "out", "--timeout", "200", *case.flags),
        *("--configs", *(str(folder / "configs" / f"{name}.json") for name in case.configs.split())),
        *("--", str(folder / script), *arguments),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if case.status == "✅ Success" else 1), done.stdout + done.stderr
    (flat,) = tmp_path.glob("out/comparison_*.json")
    (records,) = tmp_path.glob("out/runs/*/records.jsonl")
    return json.loads(flat.read_text()), [json.loads(line) for line in records.read_text().splitlines()]


BESIDE_ANOTHER = """
import sys, deepspeed, torch
class Critic(torch.nn.Linear): pass
def engine(model): return deepspeed.initialize(model=model, config=sys.argv[1], model_parameters=model.parameters())[0]
critic, model = engine(Critic(8, 1)), engine(torch.nn.Embedding(64, 32))
model.eval()
for _ in range(50):
    critic(torch.ones(2, 8).bfloat16())
    model.backward(model(torch.randint(0, 64, (4, 16))).float().square().mean())
    model.step()
"""
DPO = """
from datasets import Dataset
from d_trl_sft_lora import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, TrlParser
(args,) = TrlParser((DPOConfig,)).parse_args_and_config()
llama = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
class Reference(LlamaForCausalLM): pass
data = Dataset.from_list([{"prompt": "w1 w2", "chosen": "w3 w4 w5", "rejected": "w6"}] * 400)
DPOTrainer(LlamaForCausalLM(llama), Reference(llama), args, train_dataset=data, processing_class=tokenizer()).train()
"""


@pytest.mark.parametrize(
    ("text", "case", "other", "evaluations"),
    [
        (BESIDE_ANOTHER, Case(command="{config}", configs="zero2", tokens=(64,)), "Critic", 0),
        (
            DPO,
            Case(command=f"--deepspeed {{config}} {TRAINER}", configs="auto2", needs="trl", tokens=(80,)),
            "Reference",
            2,
        ),
    ],
    ids=["in evaluation mode", "DPO"],
)
def test_only_the_engine_that_steps_is_measured(
    text: str, case: Case, other: str, evaluations: int, tmp_path: Path
) -> None:
    folder = shared_files("own_scripts", "*.py")[0].parent
    (path := tmp_path / "train.py").write_text(f"import sys; sys.path.append({str(folder)!r})\n{text}")
    ((row,), (record,)) = run(folder, replace(case, command=f"{path} {case.command}"), tmp_path)
    seen = record["ranks"][0]["script"]
    # Of the pairs both texts, padded to five tokens: 2 micro-batches × 4 pairs × 2 × 5.
    assert seen["tokens"] == [*(case.tokens or ())] * 7
    assert seen["evaluation_forwards"] == [evaluations] * 7
    assert row["other_engines"] == other
    assert row["throughput_tokens_per_sec"] == pytest.approx(seen["tokens"][0] / row["avg_step_time_ms"] * 1000)


EXAMPLES = ROOT / "examples" / "own_script"


@pytest.mark.parametrize(
    ("name", "stages"), [("deepspeed", "2 3"), ("trainer", "3"), ("accelerate", "2"), ("trl", "3")]
)
def test_example_of_the_docs_trains(name: str, stages: str, tmp_path: Path) -> None:
    if name == "trl" and importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    page = (ROOT / "docs" / "own_work.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^ds-compare (.* -- train_{name}\.py.*)$", page, re.MULTILINE)
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    words, _, script = line.partition(" -- ")
    short = "--accelerator cpu --num-gpus 1 --warmup-steps 1 --num-steps 2 --output-dir out"
    cpu = " --use_cpu --max_steps 50" if "output_dir" in script else ""
    assert "--stages 2 3" in words
    words = words.replace("--stages 2 3", f"--stages {stages}")
    command = [sys.executable, "-m", "ds_bench", *f"{words} {short} -- {script}{cpu}".split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (flat,) = tmp_path.glob("out/comparison_*.json")
    rows = json.loads(flat.read_text())
    assert [(row["status"], row["stage"]) for row in rows] == [("✅ Success", int(stage)) for stage in stages.split()]
    # The printed command is the same command, with the recommended row's file.
    assert "recommended/ds_config.json" in done.stderr
