"""DeepSpeed's ops on a simulated card: the CPU accelerator's from its own cache, and FusedAdam from torch."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock


def install(accelerator: Any) -> None:
    """Replace the op builders of ``CUDA_Accelerator``."""
    import deepspeed.ops.op_builder.cpu as builders

    known: dict[str, Any] = {}

    def get_op_builder(self: Any, class_name: str) -> Any:
        base = getattr(builders, class_name, None)
        if base is None or class_name == "ShareMemCommBuilder":  # which the CUDA accelerator lacks
            return builders.NotImplementedBuilder
        if class_name == "PinMemoryBuilder":  # its load() calls that of the class above it, whatever its own class is
            return base
        if class_name not in known:
            load = _load_fused_adam if class_name == "FusedAdamBuilder" else _from_cpu_cache(base.load)
            known[class_name] = type(class_name, (base,), {"load": load})
        return known[class_name]

    accelerator.get_op_builder = get_op_builder
    accelerator.create_op_builder = lambda self, class_name: get_op_builder(self, class_name)()


def _from_cpu_cache(load: Any) -> Any:
    def load_op(self: Any, verbose: bool = True) -> Any:
        from ds_bench.launch.ops import cache_folder

        with mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=str(cache_folder("cpu"))):
            return load(self, verbose)

    return load_op


def _load_fused_adam(self: Any, verbose: bool = True) -> Any:
    return SimpleNamespace(multi_tensor_adam=_multi_tensor_adam)


def _multi_tensor_adam(
    chunk_size: int, noop_flag: Any, tensors: list[list[Any]], lr: float, beta1: float, beta2: float, eps: float,
    step: int, adam_w_mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """In place of csrc/adam/multi_tensor_adam.cu of DeepSpeed: torch's fused kernel, which allocates nothing either."""
    import torch

    assert bias_correction
    gradients, parameters, means, variances = tensors
    steps = [torch.tensor(float(step)) for _ in parameters]
    kernel = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_
    with torch.no_grad():
        kernel(
            parameters, gradients, means, variances, [], steps, lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
