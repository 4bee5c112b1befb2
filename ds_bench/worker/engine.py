"""Creates the engine that trains the model, and describes it as it really runs, defaults included."""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch

from ..config.spec import Engine, Placement, Workload
from ..system.host_resources import is_wsl
from ..system.redaction import redacted_config
from .library_versions import adapt_engine
from .reference_engines import DdpEngine, Fsdp2Engine, PassEngine, ReferenceEngine

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OPTIMIZER_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum")


def select_device(placement: Placement) -> torch.device:
    """This rank's device, made the current one on CUDA. Its memory is limited if a smaller GPU is emulated, else
    under WSL to the memory that is free now, so that allocations fail there instead of going to host memory.
    """
    if placement.accelerator == "cpu":
        return torch.device("cpu")
    from deepspeed.accelerator import cuda_accelerator

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    # DeepSpeed asks NVML for free memory at stages 1 and 2, and the preloaded server closed NVML before the fork.
    if cuda_accelerator.pynvml is not None:
        cuda_accelerator.pynvml.nvmlInit()
    if placement.gpu_memory_limit_bytes is None and is_wsl(os.uname().release):
        free, total = torch.cuda.mem_get_info(local_rank)
        torch.cuda.set_per_process_memory_fraction(free / total)
    if placement.gpu_memory_limit_bytes is not None:
        total = torch.cuda.get_device_properties(local_rank).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, placement.gpu_memory_limit_bytes / total))
        # DeepSpeed must see the free memory of the emulated GPU: it flattens parameters on the GPU if they fit there.
        limit, device = placement.gpu_memory_limit_bytes, deepspeed.accelerator.get_accelerator()
        original = device.available_memory

        def available_memory(device_index: int | None = None) -> int:
            return min(int(original(device_index)), max(0, limit - torch.cuda.memory_allocated(device_index)))

        device.available_memory = available_memory
    return torch.device("cuda", local_rank)


def create_engine(
    name: Engine,
    model: torch.nn.Module,
    config: dict[str, Any],
    device: torch.device,
    mpu: Any,
    workload: Workload,
    report_progress: Callable[[], None],
) -> Any:
    if workload.pass_type != "train":
        return PassEngine(model, config, device, with_backward=workload.pass_type == "forward_backward")
    if name == "ddp":
        return DdpEngine(model, config, device)
    if name == "fsdp2":
        return Fsdp2Engine(model, config, device, seed=workload.seed, report_progress=report_progress)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config, mpu=mpu)
    adapt_engine(engine)
    return engine


def engine_facts(engine: Any) -> dict[str, Any]:
    """Return the fields of a RankMeasurement that say how the engine was set up.

    ``resolved_config``: every public value of DeepSpeed's ``engine._config`` (runtime/config.py), or of a reference
    engine's settings, credentials redacted.
    """
    wrapper = engine.optimizer
    groups = getattr(wrapper, "param_groups", None) or []
    settings = engine.settings if isinstance(engine, ReferenceEngine) else vars(engine._config)
    return {
        "micro_batch_size": int(engine.train_micro_batch_size_per_gpu()),
        "grad_accum": int(engine.gradient_accumulation_steps()),
        "optimizer_settings": [
            {name: _to_json_value(group[name]) for name in _OPTIMIZER_SETTINGS if group.get(name) is not None}
            for group in groups
        ],
        "optimizer_class": "none" if wrapper is None else type(getattr(wrapper, "optimizer", wrapper)).__name__,
        "engine_optimizer_class": "none" if wrapper is None else type(wrapper).__name__,
        "resolved_config": redacted_config(
            {name: _to_json_value(value) for name, value in sorted(settings.items()) if not name.startswith("_")}
        ),
    }


def _to_json_value(value: Any, depth: int = 8) -> Any:
    """A value for a JSON file: models, mappings and objects whose text has an address by field; others as their text.

    Addresses in memory, which differ from run to run, are left out. ``depth``: limit for objects within objects.
    """
    if value is None or isinstance(value, (bool, int, str)):
        # Members of an enum may be strings or whole numbers too.
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "model_dump"):
        return _to_json_value(value.model_dump(), depth)
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_to_json_value(item, depth) for item in value]
    text = str(value)
    if _ADDRESS.search(text) is None:
        return text
    fields = {str(key): item for key, item in getattr(value, "__dict__", {}).items()} if depth else {}
    return {key: _to_json_value(item, depth - 1) for key, item in fields.items()} or _ADDRESS.sub("", text)
