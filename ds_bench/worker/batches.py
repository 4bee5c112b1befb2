"""The micro-batches of a rank: random tokens, a file of token ids, or what the model's factory makes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..config.spec import Workload
from . import model as build
from .data_loader import BatchAt, LoadedBatches
from .rank_layout import RankLayout
from .token_reader import TokenReader
from .training_loop import Batch

MAX_BATCHES = 64
"""Different micro-batches held on the device; a run that needs more uses them again in the same order."""
_MAX_BATCHES_BYTES = 256 * 2**20
"""Once these are held, no further micro-batch is made: images are large."""
_TOKENS = (torch.int64, torch.int32, torch.bool)
"""Number formats of token ids and of masks over them."""


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
    """The micro-batches that are held on the device, and those that come through a data loader; None without one.

    ``count``: micro-batches of the run. Of a run with a data loader only the first one is held. Raises ValueError where
    the workload's file is not the one that was checked, or the factory makes batches of its own beside it.
    """
    make_batch, reader = built.make_batch, None
    if workload.data_path is not None:
        reader = _open_tokens(built, workload, layout, batch_size)
        make_batch = in_order(reader)
    elif make_batch is None:
        vocabulary = build.vocabulary_size(built.module)
        make_batch = random_tokens(min(vocabulary, workload.vocab_size or vocabulary))
    # A factory's batches hold all arguments of its model's forward pass already.
    positions = None if built.make_batch else build.position_ids(built.module, batch_size, workload.seq_length)
    make_own = functools.partial(
        make_batches,
        make_batch,
        batch_size=batch_size,
        seq_length=workload.seq_length,
        seed=workload.seed,
        rank=layout.data_rank,
        dtype=build.training_dtype(config),
        # Of a file every micro-batch of the run is read, not the first 64 again and again; the limit in bytes applies.
        most=MAX_BATCHES if reader is None else count,
    )

    def on_device(where: torch.device, count: int) -> list[Batch]:
        own = None if positions is None else positions.to(where)  # one tensor in all batches
        return [_complete(batch, own, layout) for batch in make_own(device=where, count=count)]

    def open_batches() -> BatchAt:
        if reader is not None:  # after the run's steps from the first one on, as without a data loader
            return lambda number: _complete(reader(number % count), positions, layout)
        batches = on_device(torch.device("cpu"), count)
        return lambda number: batches[number % len(batches)]

    if workload.data_workers is None:
        return on_device(device, count), None
    # The one that is held is for the loss on the first batch, which is computed without the loader.
    return on_device(device, 1), LoadedBatches(workload, open_batches, device)


def _complete(batch: Batch, positions: torch.Tensor | None, layout: RankLayout) -> Batch:
    """The batch with the position of each token; of sequences that ranks share, this rank's part."""
    return layout.part_of(batch if positions is None else {**batch, "position_ids": positions})


def _open_tokens(built: build.BuiltModel, workload: Workload, layout: RankLayout, batch_size: int) -> TokenReader:
    if built.make_batch is not None:
        raise ValueError("the factory makes its own batches, so that --data is not read: leave one of them out")
    return TokenReader(
        workload,
        batch_size=batch_size,
        vocabulary=build.vocabulary_size(built.module),
        data_rank=layout.data_rank,
        data_parallel_size=layout.data_parallel_size,
    )


def random_tokens(vocabulary: int) -> build.MakeBatch:
    """A function that makes batches of random tokens: ids of shape (samples, sequence length), labels the same ids."""

    def make_batch(batch_size: int, seq_length: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(0, vocabulary, (batch_size, seq_length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return make_batch


def in_order(batch_at: Callable[[int], Batch]) -> build.MakeBatch:
    """A function that makes the batches of a reader one after the other, which draws nothing."""
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
    most: int = MAX_BATCHES,
) -> list[Batch]:
    """``count`` micro-batches on the device (at most ``most`` and 256 MB, at least one), drawn from a generator of this
    rank.

    Floating-point tensors are given the training ``dtype``. Raises TypeError or ValueError where ``make_batch`` returns
    no batch of ``batch_size`` samples: throughput would count samples that are not there.
    """
    # Not torch's global generator, from which stages draw differently while they build the model. Below 100,003 ranks
    # no two pairs of seed and rank have the same number.
    generator = torch.Generator().manual_seed(seed * 100_003 + rank)
    batches: list[Batch] = []
    held_bytes = 0
    while len(batches) < min(count, most) and (not batches or held_bytes < _MAX_BATCHES_BYTES):
        batch = make_batch(batch_size, seq_length, generator)
        if not isinstance(batch, Mapping) or not all(isinstance(value, torch.Tensor) for value in batch.values()):
            raise TypeError("the factory's make_batch must return a dict of tensors, the arguments of the model")
        if not any(value.shape[:1] == (batch_size,) for value in batch.values()):
            raise ValueError(f"the factory's make_batch returned no tensor of {batch_size} samples, as it was asked to")
        batches.append(_move_to_device(batch, device, dtype))
        held_bytes += sum(value.nbytes for value in batches[-1].values())
    return batches


def has_token_per_position(batch: Batch, batch_size: int, seq_length: int) -> bool:
    """Whether every sample of a micro-batch is a sequence of ``seq_length`` tokens and nothing else but a class."""
    shapes = {tuple(value.shape[:2]) for value in batch.values()} - {(batch_size,)}
    return all(value.dtype in _TOKENS for value in batch.values()) and shapes == {(batch_size, seq_length)}


def _move_to_device(batch: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> Batch:
    """One copy of each tensor, however many names it has."""
    moved = {
        id(value): value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)
        for value in batch.values()
    }
    return {name: moved[id(value)] for name, value in batch.items()}
