"""Feeds micro-batches through torch's DataLoader with worker processes, as training scripts do.

Random tokens are the same as without a loader and in the same order: what is measured is the way of a micro-batch from
a worker process to the device; with a file of token ids (``token_reader``) its reading too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..config.spec import Workload
from .training_loop import Batch

BatchAt = Callable[[int], Batch]
"""Number of a micro-batch of this rank, from 0 → the micro-batch in host memory."""


class _MicroBatches(IterableDataset[Batch]):
    """Micro-batches without end; each of several workers makes every n-th of them."""

    def __init__(self, open_batches: Callable[[], BatchAt]) -> None:
        self._open_batches = open_batches

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        first, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batch_at = self._open_batches()
        # The loader takes from its workers in turn, so that batches arrive in the order of their numbers.
        for number in count(first, workers):
            # Copies: to send a tensor moves its storage into shared memory, and a held batch is sent again and again.
            yield {name: tensor.clone() for name, tensor in batch_at(number).items()}


class LoadedBatches:
    """Micro-batches on the device, from a DataLoader as a workload describes it."""

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
            # open_batches is a closure, which cannot be sent to a process that is started anew.
            multiprocessing_context="fork" if workers else None,
        )
        self._batches = iter(self._loader)
        self.wait_seconds = 0.0
        """Time that training has waited for the loader so far, and that copying took where it is not asynchronous."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        batch = {name: tensor.to(self._device, non_blocking=True) for name, tensor in next(self._batches).items()}
        self.wait_seconds += time.perf_counter() - start
        return batch
