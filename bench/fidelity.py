"""Does the product's harness change what it measures? Its step time next to a bare DeepSpeed loop's.

Measured: ``avg_step_time_ms`` of one configuration in ``bare_loop.py``, started by DeepSpeed's
launcher, and in ``zero_stage_comparison.py``, alternately. Both read the same ds_config.json and get
the same model, batch, thread count, ops cache and network variables; only the harness differs.
The median of the per-round ratios product/bare should be 1 within its own spread.

Not measured: start-up (``overhead.py``), memory, throughput. On a shared machine, both columns
carry its noise. It neither passes nor fails: exit code 0 says that every run worked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import harness
from harness import BenchError, Setting

from ds_bench.records.json_files import write_json

LAUNCHERS = {"warm": ("warm",), "deepspeed": ("deepspeed",), "both": ("warm", "deepspeed")}
_BUSY = 0.1
"""The figures are reported as noisy if others use more than this share of all cores."""
Round = dict[str, float]
"""Seconds per optimizer step: ``bare``, and one entry per launcher of the product."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    harness.add_setting_flags(parser, num_steps=50)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="ZeRO stage (default: 2)")
    parser.add_argument("--num-gpus", type=int, default=None, metavar="N", help="default: all GPUs, or 1 CPU rank")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of both in turn (default: 5)")
    parser.add_argument("--launcher", choices=tuple(LAUNCHERS), default="warm", help="the product's (default: warm)")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="per run (default: 1800)")
    harness.add_runs_flag(parser)
    return parser.parse_args(arguments)


class Bench:
    """One setting, run by both sides in a scratch folder."""

    def __init__(self, setting: Setting, stage: int, scratch: Path, timeout_seconds: float) -> None:
        self.setting, _, self._variables = harness.decide(setting)
        self._stage, self._scratch, self._timeout = stage, scratch, timeout_seconds
        self._count = 0
        self.ds_config: dict[str, Any] = {}
        self.busy_before: list[float] = []
        """Share of all cores in use by others, just before each run."""

    def prepare(self) -> None:
        """An untimed run of the product: it builds the ops and writes the configuration that both sides read."""
        folder = self._new_name("prepare")
        harness.run_product(self.setting, [self._stage], "warm", folder, timeout_seconds=self._timeout)
        self._config_path = harness.ds_config_path(folder, self._stage)
        self.ds_config = json.loads(self._config_path.read_text())

    def bare(self) -> float:
        """Seconds per step in the bare loop."""
        self.busy_before.append(harness.busy_fraction())
        result, log, port = self._new_name("bare.json"), self._new_name("bare.log"), harness.free_port()
        command = harness.bare_command(self.setting, self._config_path, port, result)
        try:
            harness.timed(command, self._variables, log, "the bare loop", self._timeout)
        except BenchError:
            if not result.exists():
                raise
            # Seen in 2 of about 40 runs: "terminate called without an active exception" as the interpreter shuts down.
            print("note: the bare loop ended badly after its measurement", file=sys.stderr)
        finally:
            harness.remove_shared_memory(port)
        if not result.exists():
            raise BenchError(f"the bare loop wrote no result\n{harness.tail(log)}")
        found = json.loads(result.read_text())
        self._check_device(found["device"])
        return float(found["step_seconds"])

    def product(self, launcher: str) -> float:
        """Seconds per step from the product's flat row."""
        self.busy_before.append(harness.busy_fraction())
        folder = self._new_name(launcher)
        run = harness.run_product(self.setting, [self._stage], launcher, folder, timeout_seconds=self._timeout)
        path = harness.ds_config_path(folder, self._stage)
        if json.loads(path.read_text()) != self.ds_config:
            raise BenchError("the product's ds_config.json changed between two runs of the same setting")
        row = run.rows[0]
        if row["launch"] != launcher:
            raise BenchError(f"the product launched {row['launch']}, not {launcher}")
        self._check_device(row["accelerator"])
        return float(row["avg_step_time_ms"]) / 1000

    def _check_device(self, device: str) -> None:
        if device != self.setting.accelerator:
            raise BenchError(f"a run trained on {device}, not on {self.setting.accelerator}")

    def _new_name(self, name: str) -> Path:
        self._count += 1
        return self._scratch / f"{self._count:03d}_{name}"


def run_rounds(bench: Bench, rounds: int, launchers: Sequence[str]) -> Iterator[list[Round]]:
    """Bare, product, bare, product, …; yields all rounds so far after each."""
    print("round    bare ms" + "".join(f"{name + ' ms':>14}   ratio" for name in launchers))
    done = []
    for number in range(1, rounds + 1):
        seen: Round = {"bare": bench.bare()}
        line = f"{number:5d} {seen['bare'] * 1000:10.3f}"
        for name in launchers:
            seen[name] = bench.product(name)
            line += f"{seen[name] * 1000:14.3f} {seen[name] / seen['bare']:7.3f}"
        print(line, flush=True)
        done.append(seen)
        yield done


def summarize(rounds: Sequence[Round], launchers: Sequence[str]) -> dict[str, dict[str, float]]:
    """Per launcher: median, smallest and largest ratio product/bare of the rounds, and the ratio of the fastest rounds.

    Other users of the machine only ever add time, so if the rounds vary widely, the fastest ones say more.
    """
    summary = {}
    fastest = {name: min(seen[name] for seen in rounds) for name in ("bare", *launchers)}
    for name in launchers:
        ratios = [seen[name] / seen["bare"] for seen in rounds]
        ends = {"min": min(ratios), "max": max(ratios), "of_fastest": fastest[name] / fastest["bare"]}
        summary[name] = {"median": median(ratios), **ends}
    return summary


def spread(seconds: Sequence[float]) -> float:
    """(largest − smallest) / median: how much one column varies between rounds."""
    return (max(seconds) - min(seconds)) / median(seconds)


def show(rounds: Sequence[Round], summary: dict[str, dict[str, float]], busy: Sequence[float]) -> None:
    for name, ratio in summary.items():
        text = f"product ({name}) / bare: median {ratio['median']:.3f}, min {ratio['min']:.3f}, max {ratio['max']:.3f}"
        print(f"{text} over {len(rounds)} rounds; fastest / fastest {ratio['of_fastest']:.3f}")
    columns = ", ".join(f"{name} {spread([seen[name] for seen in rounds]):.1%}" for name in rounds[0])
    print(f"spread between rounds, (max - min) / median: {columns}")
    if max(busy) > _BUSY:
        print(f"others used up to {max(busy):.0%} of all cores just before a run: these ratios carry their noise")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    launchers = LAUNCHERS[args.launcher]
    with harness.folder_of_runs(args.runs) as folder:
        bench = Bench(harness.setting_of(args), args.stage, folder, args.timeout)
        setting, facts = bench.setting, harness.machine_facts(bench.setting)
        shape = f"micro-batch {setting.batch_size} × {setting.seq_length}"
        steps = f"{setting.num_steps} steps after {setting.warmup_steps}"
        print(f"fidelity: {setting.model}, ZeRO-{args.stage}, {shape}, {setting.device_word}, {steps}")
        print(harness.facts_line(facts), flush=True)
        bench.prepare()
        asked = {"setting": asdict(setting), "stage": args.stage, "machine": facts, "ds_config": bench.ds_config}
        for rounds in run_rounds(bench, args.rounds, launchers):
            summary = summarize(rounds, launchers)
            if args.output is not None:
                seen = {"step_seconds": rounds, "ratio_to_bare": summary, "busy_before": bench.busy_before}
                write_json(args.output, {**asked, **seen})
    show(rounds, summary, bench.busy_before)
    return 0


if __name__ == "__main__":
    harness.run("fidelity", main)
