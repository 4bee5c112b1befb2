"""Shared by the tests of the command ``run``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_bench.cli import commands
from tests.support.fakes import FakeLauncher
from tests.support.scripted_run import Run, ScriptedRun


@pytest.fixture
def run(scripted: ScriptedRun, tmp_path: Path) -> Run:
    """Runs ``ds_bench run`` on the text of a recipe, with trials that a FakeLauncher plays; returns the exit code."""

    def call(text: str | None, *flags: str, script: FakeLauncher | None = None) -> int:
        scripted.launcher = script or FakeLauncher()
        path = tmp_path / "my recipe.yaml"
        path.write_text(text or "")
        return commands.main(
            ["run", *([] if text is None else [str(path)]), "--output-dir", str(scripted.output), *flags]
        )

    return call
