"""A whole run, from flags to exit code, on a machine without processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_bench import runner
from ds_bench.cli import script as cli
from ds_bench.doctor import software
from ds_bench.launch import ops, rank_environment
from ds_bench.system import gpu_state
from tests.support import fakes
from tests.support.fakes import FakeLauncher

Run = Callable[..., int]  # the text of a recipe and flags → the exit code of ``ds_bench run``


class ScriptedRun:
    """A machine without processes: scripted trials, ops that are ready, no cards, compilers assumed to be installed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = folder / "out"
        self.launcher = FakeLauncher()
        ready = {op: ops.OpState(op=op, ready=True) for op in (ops.CPU_ADAM, ops.SHARED_MEMORY)}
        monkeypatch.setattr(rank_environment, "build_ops", lambda *_: ready)
        monkeypatch.setattr(runner, "start_server", lambda *_: None)
        monkeypatch.setattr(runner, "choose_launcher", lambda *_: (self.launcher, None))
        monkeypatch.setattr(gpu_state, "read_gpus", gpu_state.GpuInventory)
        monkeypatch.setattr(software, "check_programs", lambda *_: [])
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)

    def run(self, *arguments: str, script: FakeLauncher | None = None, family: Any = "zero") -> int:
        self.launcher = script or FakeLauncher()
        given = ["--model", "tiny", "--seq-length", "16", "--output-dir", str(self.output), "--quiet", *arguments]
        return cli.main(family, fakes.make_config, given)

    def resume(self, *arguments: str, script: FakeLauncher | None = None, family: Any = "zero") -> int:
        self.launcher = script or FakeLauncher()
        return cli.main(family, fakes.make_config, ["--resume", str(self.folder), *arguments])

    @property
    def folder(self) -> Path:
        """The folder of the only run."""
        (folder,) = (self.output / "runs").iterdir()
        return folder

    @property
    def trials(self) -> list[tuple[int, str, int]]:
        """Sequence length, row and repeat of every trial that the last run launched, in order."""
        return [(t.workload.seq_length, t.configuration.name, t.repeat) for t in self.launcher.launched]

    def rows(self) -> list[dict[str, Any]]:
        (path,) = self.output.glob("*comparison_*.json")
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return rows
