"""Where the ranks of several hosts meet."""

from __future__ import annotations

from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from ds_bench.worker.rendezvous import serve_store
from tests.support.real_trials import free_port


def listening() -> set[object]:
    """Addresses at which this process listens; process groups of earlier tests may have left some."""
    return {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def test_the_store_listens_at_the_masters_address_alone() -> None:
    port, before = free_port(), listening()
    store = serve_store({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert store is not None
    assert listening() - before == {("127.0.0.1", port)}
    TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10)).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        serve_store({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


def test_a_name_and_an_address_of_another_host_are_left_to_torch(subtests: pytest.Subtests) -> None:
    """A name may be 127.0.1.1 on its own host; an address may be translated on the way."""
    for address in ("localhost", "192.0.2.77", ""):
        with subtests.test(address=address):
            assert serve_store({"MASTER_ADDR": address, "MASTER_PORT": str(free_port())}) is None
