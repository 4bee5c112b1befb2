"""Shell scripts in kernel namespaces of their own."""

from __future__ import annotations

import subprocess

import pytest


def in_namespace(*flags: str, script: str) -> str:
    """What a shell script prints in namespaces of its own; skips where they are not allowed."""
    command = ["unshare", *flags, "--fork", "sh", "-ec", script]
    if subprocess.run([*command[:-1], "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of its own for this user")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
