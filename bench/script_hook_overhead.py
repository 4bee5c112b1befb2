#!/usr/bin/env python3
"""Cost per step of the hook in a user's script, in pairs of blocks within one process.

    python bench/script_hook_overhead.py [--blocks 2000] [--steps 1]

Every other block of steps runs with DeepSpeed's own methods in place of the hook's, so that drift of the machine
affects both equally. The model is small, since the cost does not depend on it and the noise does. Prints the median
step without the hook and the median of the paired differences with its standard error, for wall time and for CPU time.
Medians, since a busy machine makes some steps many times as long. The goal is at most 0.5 % of a step of 30 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ds_bench.config import strategies  # noqa: E402
from ds_bench.config.spec import Placement, Trial, Workload  # noqa: E402
from ds_bench.config.training_script import Script  # noqa: E402
from ds_bench.launch.rank_environment import rank_environment  # noqa: E402
from ds_bench.launch.script_ranks import script_variables, script_words  # noqa: E402
from ds_bench.records.rank_files import CONFIG_FILE, Assignment  # noqa: E402

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}
SCRIPT = """
import json, sys, time
import deepspeed, torch
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import GPT2Config, GPT2LMHeadModel

blocks, steps = map(int, sys.argv[2:])
hooked = {name: getattr(DeepSpeedEngine, name) for name in ("forward", "backward", "step")}
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=512, bos_token_id=0, eos_token_id=0))
engine, *_ = deepspeed.initialize(model=model, config=sys.argv[1], model_parameters=model.parameters())
ids = torch.randint(0, 512, (4, 64)).to(engine.device)
found = []
for block in range(blocks + 20):
    for name, function in hooked.items():
        setattr(DeepSpeedEngine, name, function if block % 2 else function.__wrapped__)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        engine.backward(engine(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss)
        engine.step()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    found.append([(time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps])
print(json.dumps(found[20:]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        command = (str(folder / "train.py"), "{config}", str(asked.blocks), str(asked.steps))
        script = Script(command=command, digest=None, python=sys.executable, config_source="command")
        # More steps than the script runs, so that the hook never ends it.
        workload = Workload(model="train.py", model_source="script", num_steps=10**6, script=script)
        row = strategies.make_configuration(strategies.ZERO_STAGES[1], CONFIG)
        accelerator = os.environ.get("DS_ACCELERATOR", "cpu")
        place = Placement(accelerator=accelerator)  # type: ignore[arg-type]
        trial = Trial(trial_id="0", repeat=0, configuration=row, workload=workload, placement=place, ds_config=CONFIG)
        Assignment(trial=trial, rendezvous=None, scratch_id="0").save(folder, CONFIG)
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
        variables = {**os.environ, **rank_environment(place, os.environ)}
        environment = {**script_variables(trial, folder, variables), **ranks}
        words = script_words(trial, folder / CONFIG_FILE, None)
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    blocks = json.loads(done.stdout.splitlines()[-1])
    for place_of, what in enumerate(("wall", "CPU")):
        plain, hooked = ([block[place_of] for block in blocks[first::2]] for first in (0, 1))
        differences = [b - a for a, b in zip(plain, hooked, strict=True)]
        step, mean = statistics.median(plain), statistics.median(differences)
        deviation = 1.4826 * statistics.median(abs(each - mean) for each in differences)
        error = 1.253 * deviation / math.sqrt(len(differences))
        print(
            f"{what}: step {step * 1e3:.2f} ms, hook {mean * 1e6:+.0f} ± {error * 1e6:.0f} µs "
            f"({mean / step:+.2%} ± {error / step:.2%}; of a step of 30 ms {mean / 0.03:+.2%}), {len(plain)} pairs"
        )


if __name__ == "__main__":
    main()
