"""Reads micro-batches from a file of token ids, through a memory map.

A sequence is ``seq_length`` consecutive ids; labels are the same ids, which the model shifts. The sequences come in an
order that the seed decides and that jumps through the whole file, as a shuffled data set does: each once before any
comes again, every rank its own, and the same ones in every row of a comparison.
"""

from __future__ import annotations

import math
import os
import socket
from functools import cached_property
from typing import Any

import numpy
import torch

from ..config.spec import Workload
from ..config.token_file import NUMPY_TYPES, item_bytes
from .training_loop import Batch

_GOLDEN_RATIO = 0.6180339887498949
"""Consecutive multiples of it, modulo 1, lie far apart."""


class TokenReader:
    """The micro-batches of one rank, or of a group of ranks that share their data."""

    def __init__(
        self, workload: Workload, *, batch_size: int, vocabulary: int, data_rank: int, data_parallel_size: int
    ) -> None:
        """Raises FileNotFoundError or ValueError where this host has another file than the one that was checked."""
        assert workload.data_path is not None, "the workload has a file"
        assert workload.data_dtype is not None, "a file has a type of its ids"
        self._path, self._dtype = workload.data_path, workload.data_dtype
        self._batch_size, self._seq_length, self._seed = batch_size, workload.seq_length, workload.seed
        self._vocabulary = vocabulary if workload.vocab_size is None else min(vocabulary, workload.vocab_size)
        self._data_rank, self._data_parallel_size = data_rank, data_parallel_size
        self._tokens = workload.data_tokens or 0
        found, expected = os.path.getsize(self._path), self._tokens * item_bytes(self._dtype)  # noqa: PTH202
        if found != expected:
            host = socket.gethostname()
            raise ValueError(f"{self._path} has {found:,} bytes on {host}, where the plan found {expected:,}")
        self._sequences = self._tokens // self._seq_length
        if not self._sequences:
            raise ValueError(f"{self._path} has {self._tokens} tokens, fewer than one sequence of {self._seq_length}")
        self._step = coprime_step(self._sequences)

    # Not in the constructor: with a data loader the worker processes map the file, and the rank does not.
    @cached_property
    def _ids(self) -> Any:
        """All sequences, as rows that lie in the file."""
        ids = numpy.memmap(self._path, dtype=NUMPY_TYPES[self._dtype], mode="r")
        return ids[: self._sequences * self._seq_length].reshape(self._sequences, self._seq_length)

    def sequence_numbers(self, number: int) -> list[int]:
        """The sequences of a micro-batch of this rank, by their places in the file; ``number`` counts from 0."""
        first = (number * self._data_parallel_size + self._data_rank) * self._batch_size
        return [(self._seed + place * self._step) % self._sequences for place in range(first, first + self._batch_size)]

    def __call__(self, number: int) -> Batch:
        """A micro-batch in host memory. Raises ValueError for an id that the model does not know."""
        ids = numpy.asarray(self._ids[self.sequence_numbers(number)], dtype=numpy.int64)
        if ids.max() >= self._vocabulary:
            raise ValueError(f"{self._path} holds the id {ids.max()}, beyond the {self._vocabulary} ids of the model")
        tokens = torch.from_numpy(ids)
        return {"input_ids": tokens, "labels": tokens}


def coprime_step(count: int) -> int:
    """A step that visits each of ``count`` places before any again, far apart one after the other."""
    step = max(1, round(count * _GOLDEN_RATIO))
    while math.gcd(step, count) != 1:
        step += 1
    return step
