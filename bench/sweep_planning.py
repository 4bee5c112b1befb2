"""How long planning a sweep takes, on whatever machine this runs on: reading, expanding, checking and predicting.

    python bench/sweep_planning.py

1,200 trials: five models, four lengths, five micro-batches, two precisions, with and without checkpointing, three rows.
"""

from __future__ import annotations

import sys
import time

import harness  # noqa: F401 - makes the package importable

from ds_bench import runner
from ds_bench.config import recipe, recipe_file, sweep
from ds_bench.planning.trial_planner import make_run_plan
from ds_bench.system.environment import read_machine

_TEXT = """
model: {name: [gpt2, gpt2-medium, facebook/opt-1.3b, meta-llama/Llama-2-7b-hf, Qwen/Qwen3-8B]}
training:
  seq_len: [128, 256, 512, 1024]
  local_batch_size: [1, 2, 4, 8, 16]
  precision: [bf16, fp32]
  activation_checkpointing: [true, false]
configurations: {stages: [0, 1, 2]}
launch: {accelerator: cpu, num_gpus: 2}
"""


def main() -> int:
    machine = read_machine()
    for _ in range(3):
        start = time.perf_counter()
        text = recipe_file.parse_recipe(_TEXT)
        found = sweep.find_sweep(text)
        recipes = [recipe.check_recipe(text, found.data_of(point)) for point in found.points()]
        points = [recipe.options_of(each, text.folder).checked() for each in recipes]
        plan = runner.with_predictions(make_run_plan(points, recipe.config_maker(recipes[0]), machine), machine)
        seconds = time.perf_counter() - start
        print(f"{len(plan.trials):,} trials of {len(points)} points planned in {seconds:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
