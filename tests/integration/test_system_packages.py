"""The script that installs system packages, on a machine where it may install nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.real_trials import ROOT

SCRIPT = ROOT / "scripts" / "install_system_packages.sh"


def run_script(folder: Path, group: str, commands: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs the script with only bash, id, cat and ``commands`` (name → shell text) on its path; no apt-get."""
    tools = {name: f'exec /usr/bin/{name} "$@"' for name in ("bash", "id", "cat")} | commands
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    variables = {"PATH": str(folder), "PYTHON": "python3"}
    return subprocess.run(["/bin/bash", SCRIPT, group], env=variables, capture_output=True, text=True, check=False)


def test_missing_packages_are_named_in_one_line_and_only_a_compiler_is_required(tmp_path: Path) -> None:
    there = dict.fromkeys("chromedriver chromium ip ssh sshd munged slurmctld slurmd".split(), "")
    for group, commands, code, words in (
        (
            "test",
            {"c++": "exit 1"},
            0,
            "apt-get install libaio-dev chromium chromium-driver fonts-dejavu-core",
        ),
        ("base", {"python3": "exit 0"}, 1, "apt-get install g++"),
        ("test", {"c++": "exit 0", **there}, 0, ""),
    ):
        folder = tmp_path / f"{group}{code}{len(commands)}"
        folder.mkdir()
        done = run_script(folder, group, commands)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", int(bool(words)))
        assert words in done.stderr
