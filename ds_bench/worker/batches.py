"""The micro-batches of a rank: random tokens, a file of token ids, or what the model's factory makes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ..config.spec import Workload
from . import model as build
from . import training_loop
from .data_loader import BatchAt, LoadedBatches
from .rank_layout import RankLayout
from .token_reader import TokenReader
from .training_loop import Batch


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
        make_batch = training_loop.in_order(reader)
    elif make_batch is None:
        vocabulary = build.vocabulary_size(built.module)
        make_batch = training_loop.random_tokens(min(vocabulary, workload.vocab_size or vocabulary))
    positions = None if built.make_batch else build.position_ids(built.module, batch_size, workload.seq_length)
    make_batches = functools.partial(
        training_loop.make_batches,
        make_batch,
        batch_size=batch_size,
        seq_length=workload.seq_length,
        seed=workload.seed,
        rank=layout.data_rank,
        dtype=build.training_dtype(config),
        most=training_loop.MAX_BATCHES if reader is None else count,
    )

    def on_device(where: torch.device, count: int) -> list[Batch]:
        own = None if positions is None else positions.to(where)  # one tensor in all batches
        return [_complete(batch, own, layout) for batch in make_batches(device=where, count=count)]

    def open_batches() -> BatchAt:
        if reader is not None:  # after the run's steps from the first one on, as without a data loader
            return lambda number: _complete(reader(number % count), positions, layout)
        batches = on_device(torch.device("cpu"), count)
        return lambda number: batches[number % len(batches)]

    if workload.data_workers is None:
        return on_device(device, count), None
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
