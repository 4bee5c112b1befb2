"""Shared by tests with real processes: a trial of two CPU ranks, time limits, and a script as a user starts it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_bench.config import deepspeed_config, strategies
from ds_bench.config.spec import Configuration, Placement, Trial, Workload
from ds_bench.launch import Limits
from ds_bench.records.schema import TrialRecord
from ds_bench.system import processes

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
"""Folder of the model factories ``faults`` and ``factories``; ranks find them on PYTHONPATH."""
SHORT = Limits(
    timeout_seconds=480,
    stall_timeout_seconds=60,
    failure_grace_seconds=5,
    exit_grace_seconds=8,
    kill_grace_seconds=2,
)

Launch = Callable[..., TrialRecord]
Train = Callable[[Trial], TrialRecord]


def make_trial(
    row: Configuration | None = None,
    *,
    fault: str = "fine",
    num_steps: int = 3,
    workload: Workload | None = None,
    changes: dict[str, Any] | None = None,
    largest_parameter: int | None = None,
    **placement: Any,
) -> Trial:
    """A trial of two CPU ranks that trains ``faults.<fault>`` unless a workload is given."""
    row = row or strategies.make_configuration(strategies.ZERO_STAGES[1])
    place = Placement(**{"accelerator": "cpu", "num_gpus": 2, **placement})
    work = workload or Workload(
        model=f"faults:{fault}", model_source="factory", batch_size=2, seq_length=8, num_steps=num_steps, warmup_steps=1
    )
    base = deepspeed_config.overlay(deepspeed_config.base_config(row, work.batch_size, work.grad_accum), changes or {})
    config = deepspeed_config.complete_config(base, work, place, torch_adam=True, largest_parameter=largest_parameter)
    row = replace(row, deepspeed_config=base)
    return Trial(trial_id="t", repeat=0, configuration=row, workload=work, placement=place, ds_config=config)


@dataclass
class Script:
    """A comparison script as a user starts it."""

    process: subprocess.Popen[str]
    output_dir: Path

    def wait(self, seconds: float = 300) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Waits until the condition holds; fails if the script ends first, or time runs out."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended early: {self.process.communicate()}"
            assert time.monotonic() < deadline, "took too long"
            time.sleep(0.05)

    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.output_dir)

    def beats(self, trial_id: str) -> list[Path]:
        return sorted(self.output_dir.glob(f"runs/*/trials/{trial_id}*/rank*.beat"))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*comparison_*.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def gone_within(pids: set[int], seconds: float) -> set[int]:
    """Waits for the processes to end. Returns those still alive when time is up."""
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in pids if processes.is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
