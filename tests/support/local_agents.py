"""Agents of several hosts that are all this one, each with a temporary folder of its own, as children of the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_bench.config.spec import Trial
from ds_bench.launch.host_connections import agent_words
from tests.support.real_trials import make_trial


def local_agents(folder: Path) -> Callable[[str], list[str]]:
    """The command that starts the agent of a host, by the host's name; temporary files go to a folder of that name."""

    def command_of(host: str) -> list[str]:
        (folder / host).mkdir(exist_ok=True)
        return ["env", f"TMPDIR={folder / host}", *agent_words()]

    return command_of


def make_hosts_trial(**more: object) -> Trial:
    """A trial of one rank on each of the hosts a and b, started by their agents."""
    return make_trial(launcher="deepspeed", hosts=(("a", 1), ("b", 1)), master_addr="127.0.0.1", **more)  # type: ignore[arg-type]
