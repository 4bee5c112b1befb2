"""How the ranks of a trial find each other, and which of them train on the same data.

On one host they rendezvous through a file; on several hosts, at the master's address. Ranks that share data form a
tensor-parallel group (AutoTP) or a sequence-parallel group (Ulysses).

A group consists of consecutive ranks. Ranks of a tensor-parallel group get the same batch; ranks of a
sequence-parallel group get different parts of the same sequences. No run has both.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # named in its documentation

from ..config.deepspeed_config import sequence_parallel_size, tensor_parallel_size
from ..records.rank_files import Assignment
from .training_loop import Batch

_NO_TARGET = -100
"""Label of a token that has no next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The groups of a run, and this rank's place in them."""

    rank: int
    world_size: int
    tensor_size: int = 1
    """Ranks among which every layer is split."""
    sequence_size: int = 1
    """Ranks among which every sequence is split."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RankLayout:
        """The layout that a DeepSpeed configuration requests, in the existing process group."""
        return cls(
            rank=torch.distributed.get_rank(),
            world_size=torch.distributed.get_world_size(),
            tensor_size=tensor_parallel_size(config),
            sequence_size=sequence_parallel_size(config),
        )

    @property
    def data_parallel_size(self) -> int:
        """Number of groups that see different data."""
        return self.world_size // (self.tensor_size * self.sequence_size)

    @property
    def data_rank(self) -> int:
        """Number of this rank's group."""
        return self.rank // (self.tensor_size * self.sequence_size)

    @property
    def dropout_rank(self) -> int:
        """Equal on ranks that must drop the same elements: they compute the same activations between split layers."""
        return self.rank // self.tensor_size

    def loss_share(self, seq_length: int) -> float:
        """This rank's share of the group's tokens that have a next token; the last token of the last rank has none."""
        if self.sequence_size == 1:
            return 1.0
        own = seq_length // self.sequence_size - (self.rank % self.sequence_size == self.sequence_size - 1)
        return own / (seq_length - 1)

    def part_of(self, batch: Batch) -> Batch:
        """This rank's part of whole sequences, with each token's position and the token that follows it.

        This is the input that UlyssesSPDataLoaderAdapter prepares (runtime/sequence_parallel/ulysses_sp.py), without
        gathering other ranks' batches: every rank of a group already draws the same batch.
        """
        if self.sequence_size == 1:
            return batch
        ids = batch["input_ids"]
        # Before the sequence is cut: the last token of a part is followed by the first of the next part.
        targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=_NO_TARGET)
        length = ids.shape[1] // self.sequence_size
        own = slice(length * (self.rank % self.sequence_size), length * (self.rank % self.sequence_size + 1))
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        # Transformers computes a loss if there are labels, and from shift_labels if those are given.
        return {
            "input_ids": ids[:, own].contiguous(),
            "position_ids": positions[:, own].contiguous(),
            "labels": targets[:, own].contiguous(),
            "shift_labels": targets[:, own].contiguous(),
        }


def register_sequence_attention(model: Any, layout: RankLayout, micro_batch_size: int, seq_length: int) -> Any:
    """Make the model's attention gather whole sequences for a subset of the heads. Return DeepSpeed's ``mpu``.

    None without sequence parallelism. Raises ValueError if the heads cannot be split (UlyssesSPAttentionHF).
    """
    if layout.sequence_size == 1:
        return None
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    config = model.config.get_text_config()
    if not hasattr(config, "num_key_value_heads"):  # of an architecture older than grouped-query attention
        config.num_key_value_heads = config.num_attention_heads
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=config._attn_implementation,
        sequence_parallel_size=layout.sequence_size,
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
        seq_length_is_variable=False,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # DeepSpeed has replaced the model's attention function with its own (ulysses_sp.py).
    gathering = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]

    def keep_heads(module: Any, query: torch.Tensor, *arguments: Any, **named: Any) -> tuple[torch.Tensor, Any]:
        """Reshape the output as Transformers' own functions do; GPT-2 relies on it."""
        output, weights = gathering(module, query, *arguments, **named)
        return output.unflatten(-1, (query.shape[1], -1)), weights

    ALL_ATTENTION_FUNCTIONS[config._attn_implementation] = keep_heads
    return mpu


_served: list[TCPStore] = []
"""Keeps this rank's store alive: it shuts down with its last reference."""


def connect_ranks(assignment: Assignment, accelerator: str) -> None:
    """Make the process group of all ranks. Raises whatever torch or DeepSpeed raises."""
    limit = timedelta(seconds=assignment.collective_timeout_seconds or 3600.0)
    # DeepSpeed passes no timeout to new_group (comm/torch.py), which makes its data-parallel group (utils/groups.py):
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
    # None: DeepSpeed uses the accelerator's own backend.
    backend = "nccl" if accelerator == "cuda" else None
    deepspeed.init_distributed(dist_backend=backend, timeout=limit, **through_file)


def serve_store(environ: Mapping[str, str]) -> TCPStore | None:
    """Serve the store through which ranks on several hosts meet, only on MASTER_ADDR and MASTER_PORT.

    By default torch listens on every interface, and anyone who connects can write to the store. Return None if
    MASTER_ADDR is a host name, which may resolve differently here than elsewhere, or is not an address of this host.
    Raises OSError if the port is taken.
    """
    try:
        address = ipaddress.ip_address(environ["MASTER_ADDR"])
    except (KeyError, ValueError):
        return None
    port = int(environ["MASTER_PORT"])
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as listening:
        # Otherwise bind fails while connections of an earlier program are in TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((str(address), port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            raise
        listening.listen(2048)
        # Detached: leaving the context would close the descriptor, which belongs to the store from here on.
        return TCPStore(str(address), port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
