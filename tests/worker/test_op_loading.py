"""Loading an op while another program holds its lock: torch's own loader, real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

HOLDER = "import sys, time; held = open(sys.argv[1], 'x'); print('held', flush=True); time.sleep(60)"
WAITER = """
import sys
from torch.utils.file_baton import FileBaton
from ds_bench.worker.op_loading import wait_only_for_living_programs
wait_only_for_living_programs()
print('waits', flush=True)
FileBaton(sys.argv[1]).wait()
"""


def test_a_load_waits_for_a_program_that_lives_and_ends_soon_after_it_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    with (
        subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE) as holder,
        subprocess.Popen([sys.executable, "-c", WAITER, str(lock)], stdout=subprocess.PIPE) as waiter,
    ):
        try:
            assert holder.stdout is not None
            assert waiter.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            assert waiter.stdout.readline() == b"waits\n"
            time.sleep(0.5)
            assert waiter.poll() is None
            assert lock.exists()
            holder.kill()
            assert waiter.wait(30) == 0
            assert not lock.exists()
        finally:
            holder.kill()
            waiter.kill()
