"""The product's cost around the measurement: wall times, start-up, and the parent's use of the processor.

Measured, with the ops built before:

- the wall time of a comparison of the four ZeRO stages, warm and cold, next to a shell loop that starts
  ``bare_loop.py`` with DeepSpeed's launcher once per stage, with the same steps and configurations.
  A product trial does more than the loop: its window is followed by a pass of at least four further
  steps that times phases and counts memory; the warm wall time includes loading the preloaded server;
- ``start_seconds`` of the trials, warm and cold: from launch to the first warm-up step;
- the wall time of ``--help``;
- processor time of the product's own process while a trial trains, in percent of one core, without
  and with a terminal to draw progress on. Ranks, the trial's leader and the preloaded server are
  other processes and do not count; nor does what comes before the first step or after the last.

Not measured: step times (``fidelity.py``). Figures of a shared machine carry its noise.
"""

from __future__ import annotations

import argparse
import math
import os
import pty
import select
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import harness
from harness import BenchError, Run, Setting

from ds_bench.records.json_files import write_json
from ds_bench.records.rank_files import Heartbeat, read_beat

STAGES = (0, 1, 2, 3)
_TRAINING = ("forward", "backward", "step")
_POLL_SECONDS = 0.1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    harness.add_setting_flags(parser, num_steps=20)
    parser.add_argument("--num-gpus", type=int, default=None, metavar="N", help="default: 2, or 1 on a single GPU")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds; medians are shown (default: 3)")
    parser.add_argument(
        "--trial-seconds", type=float, default=12.0, metavar="S", help="trial that shows the parent's use (default: 12)"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="per run (default: 1800)")
    return parser.parse_args(arguments)


def two_devices(setting: Setting) -> Setting:
    """Two ranks if available, unless a different number is requested."""
    if setting.num_gpus is None:
        found, _, _ = harness.decide(setting)
        ranks = 2 if found.accelerator == "cpu" else min(2, found.num_gpus or 1)
        setting = replace(setting, num_gpus=ranks)
    return harness.decide(setting)[0]


class Bench:
    """The same four stages started in three ways."""

    def __init__(self, setting: Setting, scratch: Path, timeout_seconds: float) -> None:
        self.setting = setting
        self._variables = harness.decide(setting)[2]
        self._scratch, self._timeout = scratch, timeout_seconds
        self._count = 0

    def prepare(self) -> Run:
        """An untimed run: builds the ops, fills the page cache, writes the configurations."""
        self._prepared = self.new_folder("prepare")
        return harness.run_product(self.setting, STAGES, "warm", self._prepared, timeout_seconds=self._timeout)

    def product(self, launcher: str) -> Run:
        """The four stages in one comparison."""
        folder = self.new_folder(launcher)
        run = harness.run_product(self.setting, STAGES, launcher, folder, timeout_seconds=self._timeout)
        if any(row["launch"] != launcher for row in run.rows):
            raise BenchError(f"the product did not launch {launcher}")
        return run

    def shell_loop(self) -> float:
        """Wall time of the bare loop under DeepSpeed's launcher, once per stage, from one shell."""
        folder, port = self.new_folder("shell"), harness.free_port()
        folder.mkdir()
        results = [folder / f"{stage}.json" for stage in STAGES]
        configs = [harness.ds_config_path(self._prepared, stage) for stage in STAGES]
        lines = [
            shlex.join(harness.bare_command(self.setting, config, port, result))
            for config, result in zip(configs, results, strict=True)
        ]
        # A stage is judged by its result, not by its exit code: the interpreter may abort as it shuts down.
        command = ["bash", "-c", "\n".join([*lines, "true"])]
        try:
            wall = harness.timed(command, self._variables, folder / "log", "the shell loop", self._timeout)
        finally:
            harness.remove_shared_memory(port)
        if not all(result.exists() for result in results):
            raise BenchError(f"the shell loop left a stage out\n{harness.tail(folder / 'log')}")
        return wall

    def help_wall(self) -> float:
        """Wall time of ``--help``."""
        return harness.timed([sys.executable, str(harness.PRODUCT), "--help"], {}, self._scratch / "help.log", "--help")

    def new_folder(self, name: str) -> Path:
        self._count += 1
        return self._scratch / f"{self._count:03d}_{name}"


def cpu_seconds(pid: int) -> float | None:
    """User and system time of one process, children not counted (proc(5), stat); None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def slowest_beat(output_dir: Path) -> Heartbeat | None:
    """The heartbeat of the slowest rank of the one trial in ``output_dir``; None until every rank has reported."""
    beats = [read_beat(path.parent, int(path.stem[4:])) for path in output_dir.glob("runs/*/trials/*/rank*.beat")]
    known = [beat for beat in beats if beat is not None]
    return min(known, key=lambda beat: beat.step) if known and len(known) == len(beats) else None


def parent_percent(setting: Setting, folder: Path, *, terminal: bool) -> tuple[float, float]:
    """(percent of one core, seconds watched) of the product's process between the first step and the last."""
    folder.mkdir()
    command = harness.product_command(setting, [0], "warm", folder)
    master, slave = pty.openpty()
    stderr = slave if terminal else (folder / "stderr.log").open("wb")
    try:
        with harness.started(
            command, {"TERM": "xterm", "COLUMNS": "120"}, stdout=(folder / "out").open("wb"), stderr=stderr
        ) as process:
            samples = _watch(process, folder, master)
            if process.wait() != 0:
                raise BenchError(f"the product ended with code {process.returncode}")
    finally:
        os.close(master)
        os.close(slave)
    harness.read_rows(folder)
    if len(samples) < 2:
        raise BenchError("the trial was too short to watch; raise --trial-seconds")
    (start, used_before), (end, used_after) = samples[0], samples[-1]
    return (used_after - used_before) / (end - start) * 100, end - start


def _watch(process: Any, folder: Path, master: int) -> list[tuple[float, float]]:
    """(clock, processor seconds) of the product while its trial trains; what it draws is read and discarded."""
    samples = []
    while process.poll() is None:
        if select.select([master], [], [], _POLL_SECONDS)[0]:
            os.read(master, 65536)
            time.sleep(_POLL_SECONDS / 10)
        beat = slowest_beat(folder)
        used = cpu_seconds(process.pid)
        if beat is not None and beat.step >= 1 and beat.phase in _TRAINING and used is not None:
            samples.append((time.perf_counter(), used))
    return samples


def long_setting(setting: Setting, row: dict[str, Any], seconds: float) -> Setting:
    """The same setting with enough steps to train for ``seconds``, judging by the step time seen before."""
    return replace(setting, num_steps=max(10, math.ceil(seconds * 1000 / row["avg_step_time_ms"])))


def measure(bench: Bench, rounds: int, trial_seconds: float) -> dict[str, Any]:
    """Every figure; the three ways alternate, so that a busy minute of the machine favors none."""
    prepared = bench.prepare()
    walls: dict[str, list[float]] = {"warm": [], "cold": [], "shell": []}
    starts: dict[str, list[float]] = {"warm": [], "cold": []}
    for _ in range(rounds):
        for way, launcher in (("warm", "warm"), ("cold", "deepspeed")):
            run = bench.product(launcher)
            walls[way].append(run.wall_seconds)
            starts[way] += [row["start_seconds"] for row in run.rows]
        walls["shell"].append(bench.shell_loop())
        print(
            f"round {len(walls['shell'])}: " + ", ".join(f"{way} {walls[way][-1]:.1f} s" for way in walls), flush=True
        )
    longer = long_setting(bench.setting, dict(prepared.rows[0]), trial_seconds)
    plain, watched = parent_percent(longer, bench.new_folder("parent"), terminal=False)
    drawn, _ = parent_percent(longer, bench.new_folder("parent_terminal"), terminal=True)
    return {
        "wall_seconds": walls,
        "start_seconds": starts,
        "help_seconds": [bench.help_wall() for _ in range(5)],
        "parent_percent_of_one_core": {"no_terminal": plain, "terminal": drawn, "watched_seconds": watched},
    }


def show(figures: dict[str, Any]) -> None:
    walls = {way: median(values) for way, values in figures["wall_seconds"].items()}
    starts = {way: mean(values) for way, values in figures["start_seconds"].items()}
    parent = figures["parent_percent_of_one_core"]
    print(
        f"four stages, product warm   {walls['warm']:8.1f} s   {walls['warm'] / walls['shell']:.2f} of the shell loop"
    )
    print(
        f"four stages, product cold   {walls['cold']:8.1f} s   {walls['cold'] / walls['shell']:.2f} of the shell loop"
    )
    print(f"four stages, shell loop     {walls['shell']:8.1f} s")
    print(f"start of a trial, mean      {starts['warm']:8.2f} s warm, {starts['cold']:.2f} s cold")
    print(f"--help, median of 5         {median(figures['help_seconds']):8.3f} s")
    shares = f"{parent['no_terminal']:.2f} % of one core, {parent['terminal']:.2f} % with a terminal"
    print(f"parent while training       {shares} (over {parent['watched_seconds']:.0f} s)")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    setting = two_devices(harness.setting_of(args))
    facts = harness.machine_facts(setting)
    shape = f"micro-batch {setting.batch_size} × {setting.seq_length}"
    steps = f"{setting.warmup_steps} + {setting.num_steps} steps a stage"
    print(f"overhead: {setting.model}, {shape}, {setting.device_word}, {steps}, medians of {args.rounds}")
    print(harness.facts_line(facts), flush=True)
    with tempfile.TemporaryDirectory(prefix="ds_bench_overhead_") as scratch:
        figures = measure(Bench(setting, Path(scratch), args.timeout), args.rounds, args.trial_seconds)
    show(figures)
    if args.output is not None:
        write_json(args.output, {"setting": asdict(setting), "machine": facts, **figures})
    return 0


if __name__ == "__main__":
    harness.run("overhead", main)
