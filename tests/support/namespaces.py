"""Shell scripts in kernel namespaces of their own."""

from __future__ import annotations

import subprocess

import pytest


def in_namespace(*flags: str, script: str) -> str:
    """The output of a shell script in namespaces of its own; skips the test if they are not allowed."""
    command = ["unshare", *flags, "--fork", "sh", "-ec", script]
    if subprocess.run([*command[:-1], "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of its own for this user")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
