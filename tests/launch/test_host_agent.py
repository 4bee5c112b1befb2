"""Processes of a trial on one host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ds_bench.launch.host_agent import find_trial_processes
from ds_bench.records.rank_files import TRIAL_VARIABLE
from ds_bench.system import processes

# A rank that starts a process without any variable, and that one another one.
RANK = """
import subprocess, sys
inner = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", inner], env={}, stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
sys.stdin.read()
"""


def test_children_without_the_trials_variable_belong_to_the_trial(tmp_path: Path) -> None:
    mark = str(time.time_ns())
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK],
        env={**os.environ, TRIAL_VARIABLE: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert rank.stdout is not None
    with rank, rank.stdout:
        started = {rank.pid, *map(int, rank.stdout.readline().split())}
        found = find_trial_processes(mark)
        processes.end_processes(lambda: {pid for pid in started if processes.is_alive(pid)})
    assert len(started) == 3
    assert found == started
