"""Where the ranks of several hosts meet."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from ds_bench.config.spec import Placement
from ds_bench.launch import rank_environment
from ds_bench.worker.rendezvous import serve_store
from tests.support.real_trials import free_port


def listening() -> set[object]:
    """Addresses at which this process listens; process groups of earlier tests may have left some."""
    return {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def test_the_store_listens_at_the_masters_address_alone() -> None:
    port, before = free_port(), listening()

    def serve(address: str) -> TCPStore | None:
        return serve_store({"MASTER_ADDR": address, "MASTER_PORT": str(port)})

    # A name may be 127.0.1.1 on its own host, and an address may be translated on the way: both are left to torch.
    assert [serve(address) for address in ("localhost", "192.0.2.77", "")] == [None] * 3
    store = serve("127.0.0.1")
    assert store is not None
    assert listening() - before == {("127.0.0.1", port)}
    TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10)).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        serve("127.0.0.1")


def test_no_collective_ends_before_the_trials_own_limits(tmp_path: Path) -> None:
    """In a process group that DeepSpeed makes for itself too; torch's own default for NCCL is 10 minutes."""
    program = f"""
import os
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
import torch.distributed
from types import SimpleNamespace
from ds_bench.worker.rendezvous import connect_ranks
assignment = SimpleNamespace(rendezvous="file://{tmp_path}/meet", collective_timeout_seconds=7320.0)
connect_ranks(assignment, "cpu")
groups = torch.distributed.distributed_c10d
import deepspeed.comm
for group in (None, deepspeed.comm.new_group([0])):
    backend = (group or groups._get_default_group())._get_backend(torch.device("cpu"))
    print(backend.options._timeout.total_seconds(), flush=True)
print(groups._get_default_timeout("nccl").total_seconds())
"""
    variables = rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=False)
    assert done.stdout.split()[-3:] == ["7320.0"] * 3, done.stderr
