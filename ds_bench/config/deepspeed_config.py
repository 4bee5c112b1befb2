"""Pure: (Strategy or Configuration, Workload, Placement) → the DeepSpeed configuration that trains it.

Two steps. :func:`base_config` makes what the user's script may edit: the batch, the optimizer and
the ZeRO block for one GPU, every default written out that DeepSpeed has changed between versions.
:func:`complete_config` adds what only the run knows: world size, precision, the optimizer that works
here, NVMe buffers. What DeepSpeed would refuse, ignore or change is found by ``validation``.

Sources: DeepSpeed 0.19.8, ``runtime/zero/config.py``, ``runtime/zero/offload_config.py``,
``runtime/config.py``, ``runtime/constants.py``.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from .spec import Configuration, Placement, Strategy, Trial, Workload, offload_device

Config = dict[str, Any]

OPTIMIZERS = ("AdamW", "Adam", "Adagrad", "Lion", "SGD")
"""What ``--optimizer`` takes."""


def base_config(strategy: Strategy | Configuration, batch_size: int, grad_accum: int = 1) -> Config:
    """A complete configuration for one GPU, of that stage and offload alone; bucket sizes are DeepSpeed's defaults."""
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


def zero_block(strategy: Strategy | Configuration) -> Config:
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


def complete_config(
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


def changes_of(
    config: Mapping[str, Any], configuration: Configuration, workload: Workload, placement: Placement
) -> Config:
    """What ``config`` says that stage and offload devices alone would not have given it; its batch is left out.

    ``config``: the configuration's own, completed or not. Laid over the configuration of another stage the result
    makes the same changes there.
    """
    optimizer = config.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    torch_adam = bool(params.get("torch_adam")) if isinstance(params, Mapping) else False
    base = base_config(configuration, workload.batch_size, workload.grad_accum)
    own = complete_config(base, workload, placement, torch_adam=torch_adam, largest_parameter=None)
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


def minimal_config(strategy: Strategy | Configuration) -> dict[str, Any]:
    """The stage and the offload devices alone: all that a row of a flat file tells of its configuration.

    It stands in ``Trial.ds_config`` of such a row. It is not what ran and must not be shown, exported or compared as
    such (:func:`is_full_config`).
    """
    devices = {"offload_optimizer": strategy.offload_optimizer, "offload_param": strategy.offload_param}
    offloads = {name: {"device": device} for name, device in devices.items() if device != "none"}
    return {"zero_optimization": {"stage": strategy.stage, **offloads}}


def hash_config(ds_config: Mapping[str, Any]) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of a DeepSpeed configuration without its ``nvme_path`` folders."""
    text = json.dumps(_without_folders(ds_config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(inner) for key, inner in value.items() if key != "nvme_path"}
    return value


def is_full_config(trial: Trial) -> bool:
    """Whether ``ds_config`` is what ran: one that ran has at least its batch and its optimizer besides."""
    return bool(trial.ds_config) and trial.ds_config != minimal_config(trial.configuration)
