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


def test_missing_packages_of_the_tests_are_named_in_one_line_and_stop_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path, "test", {"c++": "exit 1"})
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    packages = done.stderr.partition("apt-get install ")[2].split()
    assert packages[:4] == ["libaio-dev", "chromium", "chromium-driver", "fonts-dejavu-core"]
    assert packages[4:] == ["iproute2", "openssh-client", "openssh-server", "munge", "slurmctld", "slurmd"]


def test_without_a_compiler_nothing_can_be_built_and_one_line_says_so(tmp_path: Path) -> None:
    done = run_script(tmp_path, "base", {"python3": "exit 0"})
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "apt-get install g++" in done.stderr


def test_nothing_is_said_where_everything_is_there(tmp_path: Path) -> None:
    there = "chromedriver chromium ip ssh sshd munged slurmctld slurmd".split()
    done = run_script(tmp_path, "test", {"c++": "exit 0"} | dict.fromkeys(there, ""))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
