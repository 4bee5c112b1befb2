"""Pure: (Strategy, Workload, Placement) → the DeepSpeed configuration that trains it.

Two steps. :func:`base_config` makes what the user's script may edit: the batch, the optimizer and
the ZeRO block for one GPU, every default written out that DeepSpeed has changed between versions.
:func:`complete` adds what only the run knows: world size, precision, the optimizer that works
here, NVMe buffers. What DeepSpeed would silently ignore or change is refused by
:func:`refusal`; a top-level key that it does not know, by ``dskeys``.

Sources: DeepSpeed 0.19.8, ``runtime/zero/config.py``, ``runtime/zero/offload_config.py``,
``runtime/config.py``, ``runtime/constants.py``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from .spec import Placement, Strategy, Workload

Config = dict[str, Any]

OPTIMIZERS = ("AdamW", "Adam", "Adagrad", "Lion", "SGD")
"""What ``--optimizer`` takes."""
_CPU_OPTIMIZERS = ("adamw", "adam", "adagrad", "lion")


def base_config(strategy: Strategy, batch_size: int, grad_accum: int = 1) -> Config:
    """A complete configuration for one GPU; bucket sizes are DeepSpeed's own defaults."""
    return {
        "train_batch_size": batch_size * grad_accum,
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": grad_accum,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "zero_optimization": zero_block(strategy),
    }


def zero_block(strategy: Strategy) -> Config:
    """The ``zero_optimization`` block with the defaults that matter written out."""
    block: Config = {"stage": strategy.stage}
    if strategy.stage >= 1:
        block |= {
            "contiguous_gradients": True,
            "overlap_comm": strategy.stage == 3,
            "reduce_scatter": True,
            "reduce_bucket_size": 500_000_000,
            "allgather_bucket_size": 500_000_000,
        }
    if strategy.stage == 3:
        block |= {
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "sub_group_size": 1_000_000_000,
        }
    if strategy.offload_optimizer != "none":
        block["offload_optimizer"] = {"device": strategy.offload_optimizer, "pin_memory": True, "ratio": 1.0}
    if strategy.offload_param != "none":
        block["offload_param"] = {"device": strategy.offload_param, "pin_memory": True}
    if strategy.offload_param == "nvme":
        # With the default of 1e9 elements a smaller model keeps every parameter gathered and its swap buffer
        # taken, and the second step dies of "Not enough buffers" (partitioned_param_coordinator.py).
        block["stage3_max_reuse_distance"] = 0
    return block


def complete(
    base: Mapping[str, Any],
    workload: Workload,
    placement: Placement,
    *,
    torch_adam: bool,
    largest_parameter: int | None,
) -> Config:
    """What the user's function returned, made whole for this run.

    ``torch_adam``: use torch's AdamW where the optimizer is not offloaded (DeepSpeed's FusedAdam
    cannot be built here). ``largest_parameter``: elements in the model's largest tensor; NVMe
    buffers are sized from it. Keys the user set are kept.
    """
    config: Config = copy.deepcopy(dict(base))
    _complete_batch(config, placement.num_gpus)
    _complete_precision(config, workload)
    _complete_optimizer(config, torch_adam)
    _complete_nvme(config, placement, largest_parameter)
    config.setdefault("steps_per_print", 2**31 - 1)
    config.setdefault("wall_clock_breakdown", False)
    # DeepSpeed's own throughput timer synchronises the device around every step (utils/timer.py).
    config.setdefault("timers", {"throughput": {"enabled": False}})
    return config


def _complete_batch(config: Config, num_gpus: int) -> None:
    micro, accum = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps", 1)
    if type(micro) is not int or type(accum) is not int or micro < 1 or accum < 1:
        raise UsageError(
            f"train_micro_batch_size_per_gpu is {micro!r} and gradient_accumulation_steps is {accum!r}",
            remedy="both must be whole numbers of 1 or more",
        )
    total = config.get("train_batch_size", micro * accum)
    if total not in (micro * accum, micro * accum * num_gpus):
        raise UsageError(
            f"train_batch_size {total} is neither {micro} × {accum} (one GPU) nor {micro} × {accum} × {num_gpus} GPUs",
            remedy="leave train_batch_size out, or make it agree with the other keys and --batch-size, --grad-accum",
        )
    config["gradient_accumulation_steps"] = accum
    config["train_batch_size"] = micro * accum * num_gpus


def _complete_precision(config: Config, workload: Workload) -> None:
    if any(block in config for block in ("bf16", "fp16", "torch_autocast")):
        return
    if workload.precision != "fp32":
        config[workload.precision] = {"enabled": True}


def _complete_optimizer(config: Config, torch_adam: bool) -> None:
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict):
        raise UsageError("the DeepSpeed config has no optimizer", remedy="keep its 'optimizer' block")
    name = str(optimizer.get("type", "")).lower()
    if name in ("adam", "adamw") and torch_adam and not offload_device(config, "offload_optimizer"):
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
    if name not in ("adam", "adamw", "lion", "adagrad"):
        config.setdefault("zero_allow_untested_optimizer", True)


def with_optimizer(config: Config, name: str) -> Config:
    """The same configuration with another optimizer and the parameters that it takes."""
    given = config.get("optimizer", {}).get("params", {})
    lr, decay = given.get("lr", 1e-4), given.get("weight_decay", 0.01)
    params: Config = {"lr": lr, "weight_decay": decay}
    if name.lower() in ("adam", "adamw"):
        params |= {"betas": [0.9, 0.999], "eps": 1e-8}
    if name.lower() == "adam":
        params["adam_w_mode"] = False  # DeepSpeed's default makes AdamW of it (runtime/engine.py)
    return {**config, "optimizer": {"type": name, "params": params}}


def _complete_nvme(config: Config, placement: Placement, largest_parameter: int | None) -> None:
    zero = config.get("zero_optimization", {})
    on_nvme = [key for key in ("offload_optimizer", "offload_param") if offload_device(config, key) == "nvme"]
    if not on_nvme:
        return
    for key in on_nvme:
        zero[key].setdefault("nvme_path", placement.nvme_path)
    if "offload_optimizer" in on_nvme:
        # Parameter, two Adam moments and one gradient: offload_config.py wants states + 1.
        zero["offload_optimizer"].setdefault("buffer_count", 4)
    if "offload_param" in on_nvme:
        param = zero["offload_param"]
        param.setdefault("buffer_count", 5)
        # 0: every parameter lives on the disk; DeepSpeed's 1e9 would keep the first billion in memory.
        param.setdefault("max_in_cpu", 0)
        if largest_parameter is not None:
            param.setdefault("buffer_size", _aligned(largest_parameter))
    config.setdefault(
        "aio",
        {
            "block_size": 1048576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    )


def _aligned(elements: int, to: int = 2**20) -> int:
    return -(-elements // to) * to


def with_swap_folder(config: Mapping[str, Any], folder: str) -> Config:
    """The configuration with every ``nvme_path`` replaced by the trial's private folder."""
    private = copy.deepcopy(dict(config))
    for key in ("offload_optimizer", "offload_param"):
        if offload_device(private, key) == "nvme":
            private["zero_optimization"][key]["nvme_path"] = folder
    return private


def uses_nvme(config: Mapping[str, Any]) -> bool:
    """Whether the configuration puts anything on NVMe, whatever its strategy is called."""
    return "nvme" in (offload_device(config, "offload_optimizer"), offload_device(config, "offload_param"))


def offload_device(config: Mapping[str, Any], key: str) -> str | None:
    """``cpu``, ``nvme`` or None for ``offload_optimizer`` / ``offload_param``."""
    zero = config.get("zero_optimization")
    block = zero.get(key) if isinstance(zero, Mapping) else None
    device = block.get("device", "none") if isinstance(block, Mapping) else "none"
    return None if device in (None, "none") else str(device)


def refusal(config: Mapping[str, Any], placement: Placement) -> str | None:
    """Why DeepSpeed would not do what this configuration says; None where it would.

    Every case was read in, or run against, the pinned version: without it the row would show a
    number for something that did not happen.
    """
    stage = config.get("zero_optimization", {}).get("stage", 0)
    optimizer, params = offload_device(config, "offload_optimizer"), offload_device(config, "offload_param")
    name = str(config.get("optimizer", {}).get("type", "")).lower()
    return (
        _refused_offload(stage, optimizer, params)
        or _refused_disk(placement, optimizer, params)
        or _refused_optimizer(name, optimizer, placement)
        or _refused_precision(config, placement)
    )


def _refused_offload(stage: int, optimizer: str | None, params: str | None) -> str | None:
    if stage == 0 and (optimizer or params):
        return "ZeRO stage 0 does not offload (DeepSpeed ignores or rejects it); use stage 1, 2 or 3"
    if params and stage != 3:
        return f"parameters are offloaded at stage 3 only; at stage {stage} DeepSpeed ignores it; use --stage 3"
    if optimizer == "nvme" and stage != 3:
        return f"stage {stage} with NVMe runs as CPU offload in DeepSpeed (stage_1_and_2.py); use --stage 3"
    return None


def _refused_disk(placement: Placement, *devices: str | None) -> str | None:
    if "nvme" in devices and placement.nvme_path is None:
        return "offload to NVMe needs a folder on the disk; add --nvme-path DIR"
    return None


def _refused_optimizer(name: str, offload: str | None, placement: Placement) -> str | None:
    if offload and name not in _CPU_OPTIMIZERS:
        return f"optimizer {name!r} has no CPU version in DeepSpeed; use AdamW, Adam, Adagrad or Lion to offload it"
    if name == "lion" and not offload and placement.accelerator == "cpu":
        return "FusedLion does not exist for the CPU accelerator; use AdamW, or offload the optimizer"
    return None


def _refused_precision(config: Mapping[str, Any], placement: Placement) -> str | None:
    enabled = [block for block in ("bf16", "fp16") if config.get(block, {}).get("enabled")]
    if len(enabled) == 2:
        return "bf16 and fp16 are both enabled; keep one"
    for precision in ("bf16", "fp16"):
        if precision in enabled and precision not in placement.supported_precisions:
            return f"{precision} is not supported on this {placement.accelerator} device; use --precision fp32"
    return None


def changes_of(config: Mapping[str, Any], strategy: Strategy, workload: Workload, placement: Placement) -> Config:
    """What a completed configuration says that the strategy alone would not have given it; its batch is left out.

    Laid over another strategy's configuration it makes the same changes there.
    """
    optimizer = config.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    torch_adam = bool(params.get("torch_adam")) if isinstance(params, Mapping) else False
    base = base_config(strategy, workload.batch_size, workload.grad_accum)
    own = complete(base, workload, placement, torch_adam=torch_adam, largest_parameter=None)
    changed = _difference(config, own)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        changed.pop(key, None)
    if isinstance(block := changed.get("zero_optimization"), dict):
        for key in ("stage", "offload_optimizer", "offload_param"):
            block.pop(key, None)
    return {key: value for key, value in changed.items() if value != {}}


def _difference(config: Mapping[str, Any], base: Mapping[str, Any]) -> Config:
    """The values of ``config`` that ``base`` has not, block by block."""
    found: Config = {}
    for key, value in config.items():
        below = base.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            inner = _difference(value, below)
            found |= {key: inner} if inner else {}
        elif key not in base or value != below:
            found[key] = copy.deepcopy(value)
    return found


def overlay(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Config:
    """``changes`` laid over ``config``, block by block; a value of None removes the key, at any depth."""
    merged: Config = copy.deepcopy(dict(config))
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = overlay(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def parse_set(text: str) -> Config:
    """``a.b=value`` to ``{"a": {"b": value}}``; the value is JSON, or text where it is not.

    Raises UsageError where there is no ``=`` or an empty name.
    """
    path, separator, raw = text.partition("=")
    names = path.split(".")
    if not separator or not all(names):
        raise UsageError(
            f"--set {text!r} is not key.path=value", remedy="e.g. --set zero_optimization.overlap_comm=false"
        )
    try:
        value: Any = json.loads(raw)
    except json.JSONDecodeError:
        value = raw
    for name in reversed(names):
        value = {name: value}
    return dict(value)
