"""The ledger: where the bytes live, by counting the storages of live tensors once each.

Storages, not tensors: ZeRO's parameters are views into flat buffers, and a tied weight is one
storage. A storage belongs to the first category that claims it, in the order parameters,
optimizer states, gradients, DeepSpeed's buffers, other.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

Ledger = dict[str, dict[str, int]]
_GRADIENT_NAMES = (
    "averaged_gradients",
    "grad_partitions_flat_buffer",
    "accumulated_grads_in_cpu",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
    "fp32_groups_gradients_flat",
    "bf16_groups_gradients",
    "all_grad_tensors",
)
"""Attributes of DeepSpeed's optimizers that hold gradients (runtime/zero/, bf16_optimizer.py)."""
_STATE_NAMES = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat",
    "fp32_groups_flat_partition",
)
"""Attributes that hold the fp32 master weights, which count as optimizer states."""


def tensors_in(value: object, depth: int = 6) -> Iterator[torch.Tensor]:
    """Tensors inside nested containers and DeepSpeed's own objects, each object looked into once."""
    seen: set[int] = set()
    queue: deque[tuple[object, int]] = deque([(value, 0)])
    while queue:
        item, level = queue.popleft()
        if id(item) in seen or level > depth:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        else:
            queue.extend((child, level + 1) for child in _children(item))


def _children(item: object) -> Iterable[object]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return list(item)
    if isinstance(item, torch.nn.Module) or not type(item).__module__.startswith("deepspeed"):
        return ()
    return list(getattr(item, "__dict__", {}).values())


class StorageCounter:
    """Bytes per tier and category, each storage once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()
        self.ledger: Ledger = {}
        self.pinned_bytes = 0
        self._cuda = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def claim(self, category: str, tensors: Iterable[torch.Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is None or tensor.device.type == "meta" or tensor.is_sparse:
                continue
            self._claim_storage(category, tensor)

    def _claim_storage(self, category: str, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            size, pointer = storage.nbytes(), storage.data_ptr()
        except (RuntimeError, NotImplementedError):  # functional or fake tensors have no memory
            return
        device = tensor.device.type
        if size == 0 or pointer == 0 or (key := (device, pointer)) in self._seen:
            return
        self._seen.add(key)
        self.add("cpu" if device == "cpu" else "gpu", category, size)
        if device == "cpu" and self._cuda and tensor.is_pinned():
            self.pinned_bytes += size

    def add(self, tier: str, category: str, size: int) -> None:
        row = self.ledger.setdefault(tier, {})
        row[category] = row.get(category, 0) + size


def count_storages(engine: Any, *, others: bool = True) -> StorageCounter:
    """Counts everything that is alive now. ``others``: also tensors that nothing above claims."""
    count = StorageCounter()
    wrapper, module = engine.optimizer, engine.module
    base = getattr(wrapper, "optimizer", wrapper)
    parameters = list(module.parameters())
    count.claim("parameters", parameters)
    count.claim("parameters", (getattr(parameter, "ds_tensor", None) for parameter in parameters))
    count.claim("optimizer_states", _master_and_states(wrapper, base))
    # Before the gradients, which are views into the bucket while backward runs.
    count.claim("deepspeed_buffers", tensors_in([b.buffer for b in getattr(wrapper, "ipg_buckets", {}).values()]))
    count.claim("gradients", _gradients(wrapper, base, parameters))
    count.claim("deepspeed_buffers", tensors_in(vars(wrapper) if wrapper is not base else {}))
    count.claim("deepspeed_buffers", tensors_in({k: v for k, v in vars(engine).items() if k != "module"}, depth=4))
    swappers = {id(swapper): swapper for p in parameters if (swapper := getattr(p, "nvme_swapper", None)) is not None}
    count.claim("deepspeed_buffers", tensors_in(swappers))
    if others:
        live = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
        count.claim("other", live)
    return count


def _master_and_states(wrapper: Any, base: Any) -> Iterator[torch.Tensor]:
    for group in getattr(base, "param_groups", ()):
        yield from (parameter for parameter in group["params"] if isinstance(parameter, torch.Tensor))
    for name in _STATE_NAMES:
        yield from tensors_in(getattr(wrapper, name, None))
    yield from tensors_in({id(key): value for key, value in getattr(base, "state", {}).items()})


def _gradients(wrapper: Any, base: Any, parameters: list[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
    for group in getattr(base, "param_groups", ()):
        yield from (p.grad for p in group["params"] if isinstance(p, torch.Tensor) and p.grad is not None)
    for name in _STATE_NAMES:
        yield from (m.grad for m in tensors_in(getattr(wrapper, name, None)) if m.grad is not None)
    for name in _GRADIENT_NAMES:
        yield from tensors_in(getattr(wrapper, name, None))
    yield from tensors_in(getattr(wrapper, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", None))


def with_activations(forward: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> tuple[Any, dict[str, int]]:
    """Runs ``forward`` and counts, per tier, the storages autograd saved for backward that are not parameters."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    saved: dict[tuple[str, int], int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor._base if tensor._base is not None else tensor
        if not isinstance(base, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[tensor.device.type, storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    tiers: dict[str, int] = {}
    for (device, _), size in saved.items():
        tier = "cpu" if device == "cpu" else "gpu"
        tiers[tier] = tiers.get(tier, 0) + size
    return result, tiers


def peak_of(*ledgers: Ledger) -> Ledger:
    """Category by category the largest of several moments."""
    peak: Ledger = {}
    for ledger in ledgers:
        for tier, row in ledger.items():
            for category, size in row.items():
                peak.setdefault(tier, {})[category] = max(size, peak.get(tier, {}).get(category, 0))
    return peak


def swapped_bytes(folder: str | None, rank: int) -> dict[str, int]:
    """Bytes of this rank's swap files by category (swap_tensor/optimizer_utils.py, partitioned_param_swapper.py)."""
    sizes: dict[str, int] = {}
    if folder is None:
        return sizes
    for directory, _, names in os.walk(folder):
        parts = Path(directory).parts
        if f"rank{rank}" not in parts:
            continue
        category = "optimizer_states" if "optimizer" in parts else "parameters"
        for name in names:
            sizes[category] = sizes.get(category, 0) + _size(Path(directory, name))
    return sizes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed between the listing and now
        return 0
