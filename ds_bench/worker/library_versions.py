"""Where DeepSpeed, Transformers and torch differ between the versions that this package supports.

Each function hides one difference, so that its callers need not check versions. The supported ranges are in
pyproject.toml.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..config import deepspeed_keys


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The keyword argument of Transformers' ``from_config`` for the number format; ``torch_dtype`` before 4.56."""
    import transformers
    from packaging.version import Version

    return {"dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype": dtype}


def no_init_weights() -> contextlib.AbstractContextManager[None]:
    """Transformers' context manager for building a model without drawing its weights."""
    try:
        from transformers.initialization import no_init_weights as context
    except ImportError:  # before Transformers 5
        from transformers.modeling_utils import no_init_weights as context
    found: contextlib.AbstractContextManager[None] = context()
    return found


def adapt_transformers() -> None:
    """Replace the functions of Transformers 5 that read values of tensors, which fake tensors do not have."""
    try:
        from transformers import masking_utils
        from transformers.integrations import moe
    except ImportError:  # before Transformers 5
        return
    # Real runs find no packed sequences in the position ids and so need no mask.
    masking_utils.find_packed_sequence_indices = lambda *_args, **_kwargs: None
    original = moe._can_use_grouped_mm

    def can_use_grouped_mm(given: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        # The shape rule of grouped_mm supports 16-bit formats only; the fallback saves the same tensors.
        return given.dtype is not torch.float32 and bool(original(given, *args, **kwargs))

    moe._can_use_grouped_mm = can_use_grouped_mm


def adapt_engine(engine: Any) -> None:
    """Make ``engine.step`` work on several CPU ranks.

    Before 0.19, stages 1 and 2 flatten parameters with gradients enabled (``runtime/zero/stage_1_and_2.py``). The
    parameters are then views of one buffer, and gloo refuses to gather into them. A step needs no gradients.
    """
    if deepspeed_keys.is_before("0.19"):
        engine.step = torch.no_grad()(engine.step)


def partition_rank(parameter: Any) -> int:
    """This rank's place among those that hold a parameter at stage 3; DeepSpeed has stored it since 0.19."""
    kept = getattr(parameter, "ds_zero_partition_rank", None)
    if kept is not None:
        return int(kept)
    from deepspeed import comm

    return int(comm.get_rank(group=parameter.ds_process_group))


def is_partitioned_at_stage_0(optimizer: Any) -> bool:
    """Return whether the optimizer is ``BF16_Optimizer``, which DeepSpeed before 0.17.6 uses at stage 0 in bf16."""
    return hasattr(optimizer, "bf16_groups")


def gradient_buckets(optimizer: Any) -> list[Any]:
    """The buffers where stages 1 to 3 collect gradients: one per number format, or before 0.17 a single one."""
    buckets = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    return buckets or [getattr(optimizer, "ipg_buffer", None)]


def step_methods(optimizer: Any) -> list[str]:
    """The methods of DeepSpeed's CPU optimizer that compute a step; ``step_subgroup`` has existed since 0.18."""
    return [name for name in ("step", "step_subgroup") if hasattr(optimizer, name)]


def loss_scale(optimizer: Any) -> float:
    """The current loss scale of DeepSpeed's ``FP16_UnfusedOptimizer``, which held it itself before 0.18."""
    return float(getattr(optimizer, "loss_scale_config", optimizer).cur_scale)


def set_allocator_settings(settings: str) -> None:
    """Pass the value of ``PYTORCH_CUDA_ALLOC_CONF`` to the allocator of a process that has already loaded torch."""
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):  # since torch 2.8
        torch._C._accelerator_setAllocatorSettings(settings)
    else:
        torch.cuda.memory._set_allocator_settings(settings)
