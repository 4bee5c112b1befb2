"""The ledger of a rank: bytes by tier and category, from the storages of live tensors, each counted once.

Storages, not tensors, because ZeRO's parameters are views into flat buffers and a tied weight is one storage. A storage
belongs to the first category that claims it (:func:`_deepspeed_tensors`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from .library_versions import gradient_buckets
from .reference_engines import ReferenceEngine

Ledger = dict[str, dict[str, int]]
_SETTLE_SECONDS = 0.01
_GRADIENT_NAMES = (
    "averaged_gradients",
    "grad_partitions_flat_buffer",
    "accumulated_grads_in_cpu",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
    "fp32_groups_gradients_flat",
    "bf16_groups_gradients",
    "all_grad_tensors",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
)
"""Attributes of DeepSpeed's optimizers that hold gradients (runtime/zero/, bf16_optimizer.py)."""
_STATE_NAMES = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat",
    "fp32_groups_flat_partition",
    "_muon_pending_momentum",
)
"""Attributes that hold the fp32 master weights and Muon's copy of the momentum for the next step: optimizer states."""


def find_tensors(value: object, depth: int = 6) -> Iterator[torch.Tensor]:
    """Yield the tensors inside nested containers and DeepSpeed's own objects; each object is searched once."""
    seen: set[int] = set()
    # Breadth first, so that each object is met at its lowest depth and the limit hides as little as possible.
    queue: deque[tuple[object, int]] = deque([(value, 0)])
    while queue:
        item, level = queue.popleft()
        if id(item) in seen or level > depth:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
            continue
        children: Iterable[object] = ()
        if isinstance(item, dict):
            children = item.values()
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            children = item
        # Modules hold parameters, which are claimed as such; objects of other packages could lead anywhere.
        elif type(item).__module__.startswith("deepspeed") and not isinstance(item, torch.nn.Module):
            children = getattr(item, "__dict__", {}).values()
        queue.extend((child, level + 1) for child in list(children))


class StorageCounter:
    """Bytes per tier and category, each storage once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()
        self.ledger: Ledger = {}

    def claim(self, category: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Add the storages of ``tensors`` that no earlier call has claimed."""
        for tensor in tensors:
            try:
                if tensor is None or tensor.device.type == "meta" or tensor.is_sparse:
                    continue
                tensor = _own_part(tensor)
                storage = tensor.untyped_storage()
                size, pointer = storage.nbytes(), storage.data_ptr()
            except (RuntimeError, NotImplementedError):  # functional, fake and half-collected tensors have no memory
                continue
            device = tensor.device.type
            # At stage 3 a parameter's storage is empty while it is partitioned.
            if size == 0 or pointer == 0 or (device, pointer) in self._seen:
                continue
            self._seen.add((device, pointer))
            row = self.ledger.setdefault("cpu" if device == "cpu" else "gpu", {})
            row[category] = row.get(category, 0) + size


def count_storages(engine: Any, *, others: bool = True) -> StorageCounter:
    """Count the storages alive now. ``others``: also those of tensors that none of the engine's objects holds."""
    count = StorageCounter()
    held = engine.tensors_by_category() if isinstance(engine, ReferenceEngine) else _deepspeed_tensors(engine)
    for category, tensors in held:
        count.claim(category, tensors)
    if others:
        # A thread that has run a collective releases its tensors when it next gets the interpreter's lock.
        time.sleep(_SETTLE_SECONDS)
        # Not isinstance, which reads __class__ and so runs code of proxies and lazy modules.
        count.claim("other", (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)))
    return count


def optimizer_states(engine: Any) -> Iterator[torch.Tensor]:
    """Yield this rank's part of the optimizer states other than weights, such as Adam's moments."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    yield from map(_own_part, find_tensors({id(key): value for key, value in getattr(base, "state", {}).items()}))


def stays_after_reduction(engine: Any, parameter: torch.Tensor) -> bool:
    """Return whether the tensor that backward computes remains this parameter's gradient until backward ends.

    At stage 1 with overlap it is copied: into a bucket or, for this rank's partition, out of the way
    (runtime/zero/stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads, copy_grads_in_partition).
    """
    wrapper, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage != 1 or not (getattr(wrapper, "overlap_comm", False) and wrapper.contiguous_gradients):
        return bool(stage < 2)
    if engine.gradient_accumulation_steps() > 1 or wrapper.use_grad_accum_attribute:
        return True
    is_own = wrapper.is_param_in_current_partition[wrapper.get_param_id(parameter)]
    return parameter.numel() > wrapper.reduce_bucket_size and not is_own


def _deepspeed_tensors(engine: Any) -> Iterator[tuple[str, Iterable[torch.Tensor | None]]]:
    """Yield categories and their tensors; the first to claim a storage gets it."""
    wrapper, module = engine.optimizer, engine.module
    base = getattr(wrapper, "optimizer", wrapper)
    parameters = list(module.parameters())
    yield "parameters", parameters
    yield "parameters", (getattr(parameter, "ds_tensor", None) for parameter in parameters)
    yield "parameters", (getattr(parameter, "ds_secondary_tensor", None) for parameter in parameters)  # of hpZ
    # Before the optimizer states: after its step a pipelined swapper leaves the master weights as views of its buffers
    # (runtime/swap_tensor/pipelined_optimizer_swapper.py, _complete_swap_out).
    swapper = getattr(wrapper, "optimizer_swapper", None)
    yield "deepspeed_buffers", find_tensors(getattr(swapper, "swap_buffer_manager", None))
    # What the optimizer updates: the fp32 master weights or, without any, the parameters, claimed above.
    groups = getattr(base, "param_groups", ())
    masters = [each for group in groups for each in group["params"] if isinstance(each, torch.Tensor)]
    for name in _STATE_NAMES:
        masters += find_tensors(getattr(wrapper, name, None))
    yield "optimizer_states", masters
    yield "optimizer_states", optimizer_states(engine)
    # A gradient larger than the bucket waits outside it to be dropped, or copied to a place that is counted below
    # (runtime/zero/stage_1_and_2.py, extra_large_param_to_reduce).
    waiting = find_tensors(getattr(wrapper, "extra_large_param_to_reduce", None))
    yield "other", [each.grad for each in waiting if not stays_after_reduction(engine, each)]
    # Before the gradients, which are views into the bucket while backward runs.
    yield "deepspeed_buffers", find_tensors(gradient_buckets(wrapper))
    yield "gradients", (each.grad for each in (*parameters, *masters))
    for name in _GRADIENT_NAMES:
        yield "gradients", find_tensors(getattr(wrapper, name, None))
    # What is left in DeepSpeed's objects once the categories above have claimed theirs.
    yield "deepspeed_buffers", find_tensors(vars(wrapper) if wrapper is not base else {})
    yield "deepspeed_buffers", find_tensors({k: v for k, v in vars(engine).items() if k != "module"}, depth=4)
    yield "deepspeed_buffers", find_tensors([getattr(p, "nvme_swapper", None) for p in parameters])


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is split among ranks (FSDP2's DTensor), else the tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


@contextlib.contextmanager
def saved_storages(
    parameters: Iterable[torch.Tensor], call: Callable[[torch.Tensor, torch.UntypedStorage], None]
) -> Iterator[None]:
    """Call ``call`` with each tensor that autograd saves for backward within this context, and its storage.

    Parameters are left out. A storage may be reported more than once.
    """
    # Kept alive, or an activation may get the address of a storage that stage 3 frees when it gathers the parameter.
    storages = [_own_part(parameter).untyped_storage() for parameter in parameters]
    known = {storage._cdata for storage in storages}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # The base of a view, such as a transposed weight, is the parameter.
        base = tensor._base if tensor._base is not None else tensor
        if not isinstance(base, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                call(tensor, storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def count_activations(forward: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> tuple[Any, dict[str, int]]:
    """Run ``forward`` and count the storages that autograd saves for backward, except parameters.

    Return the result of ``forward``, and the bytes by tier.
    """
    saved: dict[tuple[str, int], int] = {}

    def note(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        saved[tensor.device.type, storage.data_ptr()] = storage.nbytes()

    with saved_storages(parameters, note):
        result = forward()
    tiers: dict[str, int] = {}
    for (device, _), size in saved.items():
        tier = "cpu" if device == "cpu" else "gpu"
        tiers[tier] = tiers.get(tier, 0) + size
    return result, tiers


@contextlib.contextmanager
def gradient_hooks(
    parameters: Iterable[torch.nn.Parameter], call: Callable[[torch.nn.Parameter, torch.Tensor], None]
) -> Iterator[None]:
    """Call ``call`` with each trained parameter and its gradient when backward computes it, within this context.

    More than once for a parameter whose gradient comes in parts, as in a tiled MLP.
    """
    handles = [
        parameter.register_hook(functools.partial(call, parameter))  # type: ignore[no-untyped-call]
        for parameter in parameters
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def swapped_bytes(folder: str | None, rank: int) -> dict[str, int]:
    """Return this rank's swapped bytes by category (swap_tensor/optimizer_utils.py, partitioned_param_swapper.py).

    Empty without a swap folder.
    """
    sizes: dict[str, int] = {}
    if folder is None:
        return sizes
    for directory, _, names in os.walk(folder):
        parts = Path(directory).parts
        if f"rank{rank}" not in parts:
            continue
        category = "optimizer_states" if "optimizer" in parts else "parameters"
        for name in names:
            with contextlib.suppress(OSError):  # removed between the listing and now
                sizes[category] = sizes.get(category, 0) + Path(directory, name).stat().st_size
    return sizes
