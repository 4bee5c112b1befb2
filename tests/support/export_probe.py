"""Loads exported configurations with the libraries they are for: ``python -W ignore export_probe.py < jobs.json``.

A job is ``{"folder": …, "world": ranks, "trainer_command": words}``; the answer to each is one JSON line. One
process for all of them, since the imports take seconds. World sizes above one are simulated.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from deepspeed.runtime import config as deepspeed_config
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig


class World:
    """Stands in for the process group that DeepSpeedConfig asks for its size."""

    size = 1

    def get_rank(self) -> int:
        return 0

    def get_world_size(self, *_: Any) -> int:
        return self.size


class Arguments(TrainingArguments):
    """Real TrainingArguments of a job of ``World.size`` ranks."""

    @property
    def world_size(self) -> int:
        return World.size


def resolved(config: Any) -> dict[str, Any]:
    """The values that DeepSpeed resolves a configuration to and on which the three files must agree."""
    made = deepspeed_config.DeepSpeedConfig(config)
    zero = made.zero_config.model_dump(mode="json")
    return {
        "batch": [made.train_batch_size, made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps],
        "clipping": made.gradient_clipping,
        "bf16": made.bfloat16_config.model_dump(mode="json"),
        "fp16": made.float16_config.model_dump(mode="json"),
        "zero": zero,
        "aio": made.aio_config,
        "optimizer": [made.optimizer_name, made.optimizer_params],
    }


def trainer(folder: Path, words: list[str], model: Any) -> dict[str, Any]:
    """The Trainer's file, filled in from the command line that the README gives."""
    (arguments,) = HfArgumentParser((Arguments,)).parse_args_into_dataclasses(  # type: ignore[arg-type]
        args=[*words, "--output_dir", str(folder / "out"), "--use_cpu", "true", "--report_to", "none"]
    )
    config = HfTrainerDeepSpeedConfig(str(folder / "ds_config_trainer.json"))
    config.trainer_config_process(arguments)
    config.trainer_config_finalize(arguments, model, 100)
    return {"config": config.config, "dtype": str(config.dtype()), "resolved": resolved(config.config)}


def accelerate(folder: Path) -> dict[str, Any]:
    """The YAML as ``accelerate launch`` reads it, and the plugin that the launched process makes of it."""
    loaded = load_config_from_file(str(folder / "accelerate.yaml"))
    arguments = launch_command_parser().parse_args(["--config_file", str(folder / "accelerate.yaml"), "train.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    arguments.main_process_port = 0
    command, environment = prepare_deepspeed_cmd_env(arguments)
    kept = dict(os.environ)
    os.environ.update({name: value for name, value in environment.items() if name.startswith("ACCELERATE_")})
    try:
        plugin = DeepSpeedPlugin()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    plugin.set_mixed_precision("no")
    micro, accumulated = (
        plugin.get_value(k) for k in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    plugin.deepspeed_config_process(
        must_match=False, train_batch_size=micro * accumulated * World.size, train_micro_batch_size_per_gpu=micro
    )
    given = DeepSpeedPlugin(hf_ds_config=str(folder / "ds_config_accelerate.json"))
    config = {key: value for key, value in plugin.deepspeed_config.items() if key != "steps_per_print"}
    return {
        "yaml": yaml.safe_load((folder / "accelerate.yaml").read_text(encoding="utf-8")),
        "num_processes": loaded.num_processes,
        "num_machines": loaded.num_machines,
        "distributed_type": str(loaded.distributed_type.value),
        "use_deepspeed": bool(arguments.use_deepspeed),
        "zero3_init": plugin.zero3_init_flag,
        "stages": [plugin.zero_stage, given.zero_stage],
        "command": command,
        "config": config,
        "resolved": resolved(plugin.deepspeed_config),
    }


def main() -> None:
    deepspeed_config.dist = World()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    )
    out, sys.stdout = sys.stdout, sys.stderr
    for job in json.load(sys.stdin):
        folder, World.size = Path(job["folder"]), job["world"]
        answer = {
            "raw": tried(resolved, str(folder / "ds_config.json")),
            "trainer": tried(trainer, folder, job["trainer_command"], model),
            "accelerate": tried(accelerate, folder),
        }
        World.size *= 3
        answer["accelerate_on_three_times_the_ranks"] = tried(accelerate, folder)
        print(json.dumps(answer, default=str), file=out, flush=True)


def tried(load: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """A library's answer to a file, or its refusal."""
    try:
        return load(*arguments)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
