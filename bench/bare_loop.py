"""A DeepSpeed training loop as a user would write it: the yardstick of ``fidelity.py`` and ``overhead.py``.

Measured: the wall time of ``--num-steps`` optimizer steps after ``--warmup-steps``, with the device
synchronized before the first and after the last, on the slowest rank. Not measured: memory,
phases, single steps, or anything before the window.

Started by DeepSpeed's launcher. The configuration is the given file, unchanged; the model is a
preset's architecture with random weights, the data a pool of random tokens. Nothing of
``ds_bench.worker`` is used, so an error in the product's loop cannot hide in this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from ds_bench.models.presets import find_preset

POOL = 64  # micro-batches, used again and again


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ds-config", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    return parser.parse_args()


def dtype_of(config: dict[str, Any]) -> torch.dtype:
    if config.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    return torch.float16 if config.get("fp16", {}).get("enabled") else torch.float32


def build_model(name: str, config: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """At stage 3, Transformers builds it partitioned; otherwise directly on the device, in the training precision."""
    preset = find_preset(name)
    if preset is None:
        raise SystemExit(f"{name} is not a preset")
    architecture = AutoConfig.for_model(preset.model_type, **preset.config)
    place = contextlib.nullcontext() if config["zero_optimization"]["stage"] == 3 else device
    with place:
        model: torch.nn.Module = AutoModelForCausalLM.from_config(architecture, dtype=dtype_of(config))
    return model.train()


def make_batches(batch_size: int, seq_length: int, vocabulary: int, count: int, device: torch.device) -> list[Any]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (batch_size, seq_length)
    return [torch.randint(0, vocabulary, shape, generator=generator).to(device) for _ in range(min(count, POOL))]


def train(engine: Any, batches: Any, micro_steps: int) -> None:
    for _ in range(micro_steps):
        ids = next(batches)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def main() -> None:
    args = parse()
    config = json.loads(args.ds_config.read_text())
    device = torch.device("cuda", args.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deepspeed.init_distributed()
    # Kept alive while training: it tells Transformers about stage 3.
    stage3 = HfDeepSpeedConfig(config) if config["zero_optimization"]["stage"] == 3 else None
    model = build_model(args.model, config, device)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    accum = engine.gradient_accumulation_steps()
    count = (args.warmup_steps + args.num_steps) * accum
    micro_batch, vocabulary = engine.train_micro_batch_size_per_gpu(), model.config.vocab_size
    batches = cycle(make_batches(micro_batch, args.seq_length, vocabulary, count, device))

    train(engine, batches, args.warmup_steps * accum)
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    train(engine, batches, args.num_steps * accum)
    synchronize(device)
    window = slowest(time.perf_counter() - start, device)

    del stage3
    if dist.get_rank() == 0:
        args.output.write_text(json.dumps({"step_seconds": window / args.num_steps, "device": device.type}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
