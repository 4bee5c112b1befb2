"""How the ranks of a trial find each other: through a file on one host, at the master's address on several."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # named in its documentation

from ..records.rank_files import Assignment

_served: list[TCPStore] = []
"""The store that this rank serves, which ends with its last reference."""


def connect_ranks(assignment: Assignment, accelerator: str) -> None:
    """Make the process group of all ranks. Raises whatever torch or DeepSpeed raises."""
    limit = timedelta(seconds=assignment.collective_timeout_seconds or 3600.0)
    # DeepSpeed passes no timeout to new_group (comm/torch.py), and its data-parallel group is one (utils/groups.py):
    # torch would end every rank after its own default, 10 minutes with NCCL.
    groups: Any = torch.distributed.distributed_c10d  # which exports neither name
    groups.default_pg_timeout = groups.default_pg_nccl_timeout = limit
    through_file: dict[str, Any] = {}  # otherwise through MASTER_ADDR and MASTER_PORT
    if assignment.rendezvous is not None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        through_file = {"init_method": assignment.rendezvous, "rank": rank, "world_size": world_size}
    elif os.environ.get("RANK") == "0" and (store := serve_store(os.environ)) is not None:
        _served.append(store)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # so that torch connects to it (distributed/rendezvous.py)
    # None: DeepSpeed takes the accelerator's own backend.
    backend = "nccl" if accelerator == "cuda" else None
    deepspeed.init_distributed(dist_backend=backend, timeout=limit, **through_file)


def serve_store(environ: Mapping[str, str]) -> TCPStore | None:
    """Serve the store through which the ranks of several hosts meet, only at MASTER_ADDR and MASTER_PORT.

    torch by itself listens on every interface, and anybody who connects may write into the store. None where
    MASTER_ADDR is a name, which may stand for another address here than elsewhere, or no address of this host.
    Raises OSError if the port is taken.
    """
    try:
        address = ipaddress.ip_address(environ["MASTER_ADDR"])
    except (KeyError, ValueError):
        return None
    port = int(environ["MASTER_PORT"])
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as listening:
        # Else a port is refused while connections of a program that has ended wait to be forgotten (TIME_WAIT).
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((str(address), port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            raise
        listening.listen(2048)
        # Detached: leaving the context would close the descriptor, which is the store's from here on.
        return TCPStore(str(address), port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
