"""The cost of ``--monitor``: processor time of a step with it divided by that of a step without, and of a written line.

Blocks of steps of a small model run alternately with and without the recorder in one process, so that a busy minute
of the machine favors neither. Processor time of the process is compared, not wall time, which other programs
disturb. The parent's part, which runs next to the ranks, is measured separately.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness  # noqa: F401 - makes the package importable
import torch

from ds_bench.config.spec import Configuration, Inspection, Placement, Trial, Workload
from ds_bench.launch.step_monitor import StepMonitor
from ds_bench.records.rank_files import HeartbeatWriter
from ds_bench.records.step_files import StepFileWriter, StepSample
from ds_bench.worker import training_loop
from ds_bench.worker.step_clock import StepClock, StepRecorder


class SmallEngine:
    """Trains one linear layer; stands in for DeepSpeed's engine."""

    def __init__(self, width: int, device: str) -> None:
        self._layer = torch.nn.Linear(width, width, device=device)
        self._optimizer = torch.optim.AdamW(self._layer.parameters())

    def gradient_accumulation_steps(self) -> int:
        return 1

    def __call__(self, inputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self._layer(inputs).square().mean())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def cpu_seconds_per_step(trainer: training_loop.Trainer, steps: int) -> float:
    before = time.process_time()
    trainer.time_steps(steps, measured=True)
    return (time.process_time() - before) / steps


def paired_ratios(folder: Path, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """(ratio with to without, microseconds without) of each pair of blocks, whose order alternates."""
    batch = {"inputs": torch.randn(args.width, args.width, device=args.device)}
    trainer = training_loop.Trainer(
        SmallEngine(args.width, args.device), [batch], args.device, HeartbeatWriter(folder, 0)
    )
    recorder = StepRecorder(folder, 0, args.device, 1, 1)
    trainer.time_steps(args.steps)
    ratios, plain = [], []
    for number in range(args.pairs):
        cost = {}
        for monitored in (False, True) if number % 2 else (True, False):
            trainer.recorder = recorder if monitored else None
            cost[monitored] = cpu_seconds_per_step(trainer, args.steps)
        ratios.append(cost[True] / cost[False])
        plain.append(cost[False] * 1e6)
    return ratios, plain


def microseconds_each(act: Callable[[], Any], count: int) -> float:
    before = time.process_time()
    for _ in range(count):
        act()
    return (time.process_time() - before) / count * 1e6


def recorder_microseconds(folder: Path, device: str) -> float:
    """Processor time of the recorder in microseconds per step, without a model around it."""
    recorder, clock = StepRecorder(folder, 0, device, 1, 1), StepClock(device)
    losses = [torch.zeros((), device=device)]
    clock.mark()

    def record_step() -> None:
        recorder.take_losses(losses)
        clock.mark()
        recorder.end_step(clock, measured=True)

    return microseconds_each(record_step, 5000)


def parent_microseconds(folder: Path) -> tuple[float, float]:
    """Processor time of the parent in microseconds: for one look at two ranks without news, and for one line."""
    workload = Workload(model="tiny", model_source="preset", batch_size=1, seq_length=1, num_steps=1, warmup_steps=0)
    trial = Trial(
        trial_id="t", repeat=0, configuration=Configuration(name="zero0", label="ZeRO-0", deepspeed_config={}),
        workload=workload, placement=Placement(accelerator="cpu", num_gpus=2), ds_config={},
        inspection=Inspection(monitor="steps"),
    )  # fmt: skip
    writers = [StepFileWriter(folder, rank, 1) for rank in (0, 1)]
    monitor = StepMonitor(trial, folder)
    look = microseconds_each(monitor.update, 500)
    sample = StepSample(measured=True, time=1.0, seconds=0.1, loss=1.0, host_resident_bytes=1)
    for writer, _ in itertools.product(writers, range(500)):
        writer.add(sample)
    line = microseconds_each(monitor.update, 1) / 500
    monitor.close()
    return look, line


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=512, metavar="N", help="width of the model (default: 512)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps per block (default: 10)")
    parser.add_argument("--pairs", type=int, default=300, metavar="N", help="pairs of blocks (default: 300)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ds_bench_monitor_") as scratch:
        ratios, plain = paired_ratios(Path(scratch), args)
        recorder = recorder_microseconds(Path(scratch), args.device)
        look, line = parent_microseconds(Path(scratch))
    low, middle, high = statistics.quantiles(ratios, n=4)
    step = statistics.median(plain)
    print(
        f"a step without --monitor    {step:10.1f} us of processor time, median of {args.pairs} blocks of {args.steps}"
    )
    print(f"with, divided by without    {middle:10.4f} median of pairs; middle half of them {low:.4f} to {high:.4f}")
    print(f"the recorder by itself      {recorder:10.1f} us a step")
    print(f"the parent, two ranks       {look:10.1f} us a look, five looks a second; {line:.1f} us a line")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
