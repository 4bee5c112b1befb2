"""The micro-batches of a rank: random tokens, tokens from a file, or batches that the model's factory makes.

They are held on the device, or come through torch's DataLoader with worker processes, as in training scripts. Random
tokens are the same either way, in the same order: a loader adds only the transfer from a worker process to the device
and, with a file, the time to read it.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..config.spec import Workload
from ..config.token_file import NUMPY_TYPES, item_bytes
from . import model as build
from .rank_layout import RankLayout
from .training_loop import Batch

MAX_BATCHES = 64
"""Maximum number of micro-batches held on the device; a run that needs more repeats them in the same order."""
_MAX_BATCHES_BYTES = 256 * 2**20
"""Once this many bytes are held, no further micro-batch is made, because images are large."""
_TOKENS = (torch.int64, torch.int32, torch.bool)
"""Number formats of token ids and of masks over them."""
_GOLDEN_RATIO = 0.6180339887498949
"""Its consecutive multiples, modulo 1, are far apart."""

BatchAt = Callable[[int], Batch]
"""Number of this rank's micro-batch, from 0 → the micro-batch in host memory."""


def prepare_batches(
    built: build.BuiltModel,
    workload: Workload,
    config: dict[str, Any],
    layout: RankLayout,
    device: torch.device,
    *,
    batch_size: int,
    count: int,
) -> tuple[list[Batch], Iterator[Batch] | None]:
    """Return the micro-batches held on the device, and those from a data loader, or None without one.

    ``count``: micro-batches of the run. With a data loader only the first is held. Raises ValueError if the workload's
    file is not the one that was checked, or if it has a file although the factory makes its own batches.
    """
    make_batch, reader = built.make_batch, None
    if workload.data_path is not None:
        if built.make_batch is not None:
            raise ValueError("the factory makes its own batches, so --data would not be read: leave one of them out")
        reader = TokenReader(
            workload,
            batch_size=batch_size,
            vocabulary=build.vocabulary_size(built.module),
            data_rank=layout.data_rank,
            data_parallel_size=layout.data_parallel_size,
        )
        make_batch = in_order(reader)
    elif make_batch is None:
        vocabulary = build.vocabulary_size(built.module)
        make_batch = random_tokens(min(vocabulary, workload.vocab_size or vocabulary))
    # A factory's batches already hold all arguments of its model's forward pass.
    positions = None if built.make_batch else build.position_ids(built.module, batch_size, workload.seq_length)
    make_own = functools.partial(
        make_batches,
        make_batch,
        batch_size=batch_size,
        seq_length=workload.seq_length,
        seed=workload.seed,
        rank=layout.data_rank,
        dtype=build.training_dtype(config),
        # With a file, all micro-batches of the run are read instead of repeating 64; the limit in bytes still applies.
        max_count=MAX_BATCHES if reader is None else count,
    )

    def on_device(where: torch.device, count: int) -> list[Batch]:
        own = None if positions is None else positions.to(where)  # one tensor in all batches
        return [_complete(batch, own, layout) for batch in make_own(device=where, count=count)]

    def open_batches() -> BatchAt:
        if reader is not None:  # starts over after the run's steps, as without a data loader
            return lambda number: _complete(reader(number % count), positions, layout)
        batches = on_device(torch.device("cpu"), count)
        return lambda number: batches[number % len(batches)]

    if workload.data_workers is None:
        return on_device(device, count), None
    # The held batch is for the loss on the first batch, which is computed without the loader.
    return on_device(device, 1), LoadedBatches(workload, open_batches, device)


def _complete(batch: Batch, positions: torch.Tensor | None, layout: RankLayout) -> Batch:
    """Return the batch with the position of each token, reduced to this rank's part of sequences that ranks share."""
    return layout.part_of(batch if positions is None else {**batch, "position_ids": positions})


def random_tokens(vocabulary: int) -> build.MakeBatch:
    """Return a function that makes random tokens: ids of shape (samples, sequence length), and labels equal to them."""

    def make_batch(batch_size: int, seq_length: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(0, vocabulary, (batch_size, seq_length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return make_batch


def in_order(batch_at: BatchAt) -> build.MakeBatch:
    """Return a function that returns a reader's batches one after another; it ignores its arguments."""
    numbers = itertools.count()
    return lambda _batch_size, _seq_length, _generator: batch_at(next(numbers))


def make_batches(
    make_batch: build.MakeBatch,
    *,
    batch_size: int,
    seq_length: int,
    seed: int,
    rank: int,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    max_count: int = MAX_BATCHES,
) -> list[Batch]:
    """Make ``count`` micro-batches on the device with this rank's generator.

    At least one, at most ``max_count``, and no more once 256 MiB are held. Floating-point tensors get the training
    ``dtype``. Raises TypeError or ValueError unless ``make_batch`` returns tensors of ``batch_size`` samples: otherwise
    throughput would count samples that do not exist.
    """
    # Not torch's global generator: stages draw from it differently while they build the model. Below 100,003 ranks
    # no two pairs of seed and rank have the same number.
    generator = torch.Generator().manual_seed(seed * 100_003 + rank)
    batches: list[Batch] = []
    held_bytes = 0
    while len(batches) < min(count, max_count) and (not batches or held_bytes < _MAX_BATCHES_BYTES):
        batch = make_batch(batch_size, seq_length, generator)
        if not isinstance(batch, Mapping) or not all(isinstance(value, torch.Tensor) for value in batch.values()):
            raise TypeError("the factory's make_batch must return a dict of tensors, the arguments of the model")
        if not any(value.shape[:1] == (batch_size,) for value in batch.values()):
            raise ValueError(f"the factory's make_batch returned no tensor of the requested {batch_size} samples")
        moved = {  # one copy of each tensor, however many names it has
            id(value): value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)
            for value in batch.values()
        }
        batches.append({name: moved[id(value)] for name, value in batch.items()})
        held_bytes += sum(value.nbytes for value in batches[-1].values())
    return batches


def has_token_per_position(batch: Batch, batch_size: int, seq_length: int) -> bool:
    """Return whether every sample of a micro-batch is a sequence of ``seq_length`` tokens, optionally with a class."""
    shapes = {tuple(value.shape[:2]) for value in batch.values()} - {(batch_size,)}
    return all(value.dtype in _TOKENS for value in batch.values()) and shapes == {(batch_size, seq_length)}


class _MicroBatches(IterableDataset[Batch]):
    """Endless micro-batches; each of n workers makes every n-th."""

    def __init__(self, open_batches: Callable[[], BatchAt]) -> None:
        self._open_batches = open_batches

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        first, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batch_at = self._open_batches()
        # The loader takes from its workers in turn, so batches arrive in the order of their numbers.
        for number in itertools.count(first, workers):
            # Copies, because sending a tensor moves its storage to shared memory, and held batches are sent repeatedly.
            yield {name: tensor.clone() for name, tensor in batch_at(number).items()}


class LoadedBatches:
    """Micro-batches on the device from the DataLoader that a workload describes."""

    def __init__(self, workload: Workload, open_batches: Callable[[], BatchAt], device: torch.device) -> None:
        """``open_batches``: called in each worker process."""
        workers = workload.data_workers or 0
        self._device = device
        self._loader = DataLoader(
            _MicroBatches(open_batches),
            batch_size=None,  # the data set makes whole micro-batches
            num_workers=workers,
            pin_memory=workload.data_pin_memory and device.type == "cuda",
            prefetch_factor=workload.data_prefetch if workers else None,
            # open_batches is a closure, which cannot be sent to a spawned process.
            multiprocessing_context="fork" if workers else None,
        )
        self._batches = iter(self._loader)
        self.wait_seconds = 0.0
        """Time that training has waited for the loader so far, and for copies that are not asynchronous."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        batch = {name: tensor.to(self._device, non_blocking=True) for name, tensor in next(self._batches).items()}
        self.wait_seconds += time.perf_counter() - start
        return batch


class TokenReader:
    """The micro-batches of one rank, or of a group of ranks that share their data, from a memory-mapped file.

    A sequence is ``seq_length`` consecutive ids; labels are the same ids, which the model shifts. The seed decides the
    order of the sequences, which jumps around the whole file like a shuffled data set: each comes once before any is
    repeated, every rank has its own, and all rows of a comparison use the same ones. Every pass has the same order.
    """

    def __init__(
        self, workload: Workload, *, batch_size: int, vocabulary: int, data_rank: int, data_parallel_size: int
    ) -> None:
        """Raises FileNotFoundError or ValueError if this host's file is not the one that was checked."""
        assert workload.data_path is not None, "the workload has a file"
        assert workload.data_dtype is not None, "a file has a type for its ids"
        self._path, self._dtype = workload.data_path, workload.data_dtype
        self._batch_size, self._seq_length, self._seed = batch_size, workload.seq_length, workload.seed
        self._vocabulary = vocabulary if workload.vocab_size is None else min(vocabulary, workload.vocab_size)
        self._data_rank, self._data_parallel_size = data_rank, data_parallel_size
        self._tokens = workload.data_tokens or 0
        found, expected = os.path.getsize(self._path), self._tokens * item_bytes(self._dtype)  # noqa: PTH202
        if found != expected:
            host = socket.gethostname()
            raise ValueError(f"{self._path} has {found:,} bytes on {host}, but the plan found {expected:,}")
        self._sequences = self._tokens // self._seq_length
        if not self._sequences:
            raise ValueError(f"{self._path} has {self._tokens} tokens, fewer than one sequence of {self._seq_length}")
        self._step = coprime_step(self._sequences)

    # Not in the constructor, which only looks at the file's size: the first micro-batch that is read maps the file.
    @cached_property
    def _ids(self) -> Any:
        """All sequences as rows of the memory map."""
        ids = numpy.memmap(self._path, dtype=NUMPY_TYPES[self._dtype], mode="r")
        return ids[: self._sequences * self._seq_length].reshape(self._sequences, self._seq_length)

    def sequence_numbers(self, number: int) -> list[int]:
        """Return the sequences of this rank's micro-batch, by their places in the file; ``number`` counts from 0."""
        first = (number * self._data_parallel_size + self._data_rank) * self._batch_size
        return [(self._seed + place * self._step) % self._sequences for place in range(first, first + self._batch_size)]

    def __call__(self, number: int) -> Batch:
        """Return a micro-batch in host memory. Raises ValueError for an id that the model does not know."""
        ids = numpy.asarray(self._ids[self.sequence_numbers(number)], dtype=numpy.int64)
        if ids.max() >= self._vocabulary:
            raise ValueError(f"{self._path} holds the id {ids.max()}, beyond the {self._vocabulary} ids of the model")
        tokens = torch.from_numpy(ids)
        return {"input_ids": tokens, "labels": tokens}


def coprime_step(count: int) -> int:
    """Return a step that visits each of ``count`` places before repeating any, with consecutive ones far apart."""
    step = max(1, round(count * _GOLDEN_RATIO))
    while math.gcd(step, count) != 1:
        step += 1
    return step
