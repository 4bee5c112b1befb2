"""The DeepSpeed configuration for a workload, a strategy and a placement, and the changes that users make to it.

:func:`base_config` makes the part that a user's script may edit: batch, optimizer and ZeRO block for one GPU, with
explicit values where DeepSpeed has changed a default. :func:`apply_changes` merges in ``--ds-config`` and ``--set``.
:func:`complete_config` adds what only the run knows: number of ranks, precision, the optimizer that works here, NVMe
buffers. ``rules`` finds settings that DeepSpeed would reject, ignore or change.

Sources: DeepSpeed 0.19.8, ``runtime/zero/config.py``, ``runtime/zero/offload_config.py``,
``runtime/config.py``, ``runtime/constants.py``.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..system import files
from .spec import (
    BATCH_KEYS,
    OFFLOAD_BLOCKS,
    Configuration,
    Engine,
    Placement,
    Precision,
    Strategy,
    Workload,
    block_of,
    offload_device,
)

Config = dict[str, Any]
MakeConfig = Callable[[Strategy, int, int], Config]
"""(strategy, micro-batch, accumulation) → what the user's ``create_deepspeed_config`` returns."""

AUTO = "auto"
"""A value that the Transformers Trainer or Accelerate fills in (``automatic_values``)."""
REMOVED_BY_ENGINE = ("optimizer.params.torch_adam", "optimizer.params.adam_w_mode")
"""Keys that DeepSpeed before 0.19 removes from its configuration when it makes the optimizer (``runtime/engine.py``,
``_configure_basic_optimizer``)."""
OPTIMIZERS = ("AdamW", "Adam", "Adagrad", "Lion", "SGD")
"""Values of ``--optimizer``."""
ADAMW_PARAMETERS: Config = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
"""AdamW parameters of every configuration in the catalogue."""
PRECISION_BLOCKS = ("bf16", "fp16", "torch_autocast")
"""Top-level keys that may decide the number format; see :func:`trained_precision`."""
MEASURING_KEYS: Config = {
    "steps_per_print": 2**31 - 1,
    "wall_clock_breakdown": False,
    # DeepSpeed's own throughput timer synchronizes the device around every step (utils/timer.py).
    "timers": {"throughput": {"enabled": False}},
}
"""Added to every configuration for the measurement; none of it changes what is trained."""
DEFAULT_SIZES = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""DeepSpeed's default buffer sizes in elements, by key of ``zero_optimization``."""
_ZERO_ON_NVME = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance")
"""Sizes that are 0 if parameters live on NVMe.

With the default reuse distance, a model of fewer than 1e9 elements keeps every parameter gathered and its swap buffer
occupied, so the second step fails with "Not enough buffers" (swap_tensor/partitioned_param_swapper.py). Prefetching
requests a parameter twice if its next two uses are close together: "param 24 already assigned swap buffer id 1" (same
file; partitioned_param_coordinator.py, __prefetch_nvme_param_partitions).
"""
_LARGEST_FILE_BYTES = 2**22
_MAX_LEVELS = 20
"""Maximum nesting of a change; DeepSpeed reads five levels."""


def base_config(strategy: Strategy | Configuration, batch_size: int, grad_accum: int = 1) -> Config:
    """Make a configuration for one GPU from stage, offload devices and batch; bucket sizes are DeepSpeed's defaults."""
    return {
        "train_batch_size": batch_size * grad_accum,
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": grad_accum,
        # Explicit, since its default was 0 before DeepSpeed 0.19.3.
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": copy.deepcopy(ADAMW_PARAMETERS)},
        "zero_optimization": zero_block(strategy),
    }


def zero_block(strategy: Strategy | Configuration) -> Config:
    """Make the ``zero_optimization`` block, with the defaults that affect memory or speed."""
    block: Config = {"stage": strategy.stage}
    # torch's engines read nothing else in this block (validation.ineffective_settings).
    if strategy.engine != "deepspeed":
        return block
    if strategy.stage >= 1:
        block |= {
            "contiguous_gradients": True,
            # DeepSpeed's own default (runtime/zero/config.py, overlap_comm_valid).
            "overlap_comm": strategy.stage == 3,
            "reduce_scatter": True,
            **sizes_for(DEFAULT_SIZES, strategy.stage, None),
        }
    if strategy.stage == 3:
        block["sub_group_size"] = 1_000_000_000
    # pin_memory is explicit in both blocks, since its default was false before DeepSpeed 0.19.5.
    if strategy.offload_optimizer != "none":
        block["offload_optimizer"] = {"device": strategy.offload_optimizer, "pin_memory": True, "ratio": 1.0}
    if strategy.offload_param != "none":
        block["offload_param"] = {"device": strategy.offload_param, "pin_memory": True}
    if strategy.offload_param == "nvme":
        block |= dict.fromkeys(_ZERO_ON_NVME, 0)
    return block


def sizes_for(sizes: Mapping[str, int], stage: int, offload_param: str | None) -> dict[str, int]:
    """Return the sizes that take effect at a stage, without those that must stay 0 with parameters on NVMe."""
    fixed = _ZERO_ON_NVME if offload_param == "nvme" else ()
    return {
        key: size for key, size in sizes.items() if (stage == 3 or not key.startswith("stage3_")) and key not in fixed
    }


def with_offload(config: Config, strategy: Strategy) -> Config:
    """Return a configuration made for the strategy's stage, with the strategy's offload blocks added."""
    stage_alone = replace(strategy, offload_optimizer="none", offload_param="none")
    added = _difference(zero_block(strategy), zero_block(stage_alone))
    return {**config, "zero_optimization": {**config.get("zero_optimization", {}), **added}} if added else config


def complete_config(
    base: Mapping[str, Any],
    workload: Workload,
    placement: Placement,
    *,
    torch_adam: bool,
    largest_parameter: int | None,
) -> Config:
    """Complete a configuration for a run; keys that the user set are kept. Raises UsageError if it is unusable.

    ``torch_adam``: whether torch's AdamW replaces DeepSpeed's FusedAdam, because that does not build here.
    ``largest_parameter``: elements in the model's largest tensor, which decides the size of NVMe buffers.
    """
    config: Config = copy.deepcopy(dict(base))
    micro, accum = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps", 1)
    # type() and not isinstance(), for which True is an int.
    if type(micro) is not int or type(accum) is not int or micro < 1 or accum < 1:
        raise UsageError(
            f"train_micro_batch_size_per_gpu is {micro!r} and gradient_accumulation_steps is {accum!r}",
            remedy="both must be whole numbers of 1 or more",
        )
    # train_batch_size counts each sequence-parallel group once, but every rank of a tensor-parallel one (config.py).
    batch_ranks = max(1, placement.num_gpus // sequence_parallel_size(config))
    total = config.get("train_batch_size", micro * accum)
    # base_config writes the total of one GPU; a user's configuration may have the total of all GPUs.
    if total not in (micro * accum, micro * accum * batch_ranks):
        raise UsageError(
            f"train_batch_size {total} is not micro-batch {micro} × accumulation {accum} × {batch_ranks} ranks",
            remedy="leave train_batch_size out, or make it agree with the other keys, --batch-size and --grad-accum",
        )
    config |= {"gradient_accumulation_steps": accum, "train_batch_size": micro * accum * batch_ranks}
    if workload.precision != "fp32" and not any(block in config for block in PRECISION_BLOCKS):
        config[workload.precision] = {"enabled": True}
    if not isinstance(config.get("optimizer"), dict):
        raise UsageError("the DeepSpeed config has no optimizer", remedy="keep its 'optimizer' block")
    name = optimizer_kind(config)
    if name in ("adam", "adamw") and torch_adam and not offload_device(config, "offload_optimizer"):
        config["optimizer"].setdefault("params", {}).setdefault("torch_adam", True)
    # DeepSpeed rejects optimizers that it has not tested with ZeRO (runtime/engine.py), such as SGD.
    if name not in ("adam", "adamw", "lion", "adagrad"):
        config.setdefault("zero_allow_untested_optimizer", True)
    _complete_nvme(config, placement, largest_parameter)
    for key, value in MEASURING_KEYS.items():
        config.setdefault(key, copy.deepcopy(value))
    return config


def trained_precision(config: Mapping[str, Any], requested: Precision) -> Precision:
    """Return the number format that a DeepSpeed configuration trains in.

    ``requested``: the workload's format, which applies without a precision block or with ``torch_autocast``.
    """
    if "torch_autocast" in config or not any(block in config for block in PRECISION_BLOCKS):
        return requested
    formats: tuple[Precision, ...] = ("bf16", "fp16")
    return next((name for name in formats if config.get(name, {}).get("enabled")), "fp32")


def with_optimizer(config: Config, name: str) -> Config:
    """Return the configuration with the optimizer ``name`` and the parameters that it takes."""
    given = block_of(block_of(config, "optimizer"), "params")
    params: Config = {key: given.get(key, ADAMW_PARAMETERS[key]) for key in ("lr", "weight_decay")}
    if name.lower() in ("adam", "adamw"):
        params |= {key: ADAMW_PARAMETERS[key] for key in ("betas", "eps")}
    if name.lower() == "adam":
        params["adam_w_mode"] = False  # by default DeepSpeed makes it AdamW (runtime/engine.py)
    return {**config, "optimizer": {"type": name, "params": params}}


def _complete_nvme(config: Config, placement: Placement, largest_parameter: int | None) -> None:
    zero = config.get("zero_optimization", {})
    on_nvme = [key for key in OFFLOAD_BLOCKS if offload_device(config, key) == "nvme"]
    if not on_nvme:
        return
    for key in on_nvme:
        zero[key].setdefault("nvme_path", placement.nvme_path)
    if "offload_optimizer" in on_nvme:
        # Parameter, gradient and two Adam moments: offload_config.py wants a buffer for each of these states.
        zero["offload_optimizer"].setdefault("buffer_count", 4)
    if "offload_param" in on_nvme:
        param = zero["offload_param"]
        param.setdefault("buffer_count", 5)
        # 0: every parameter lives on the disk; DeepSpeed's 1e9 would keep the first billion in memory.
        param.setdefault("max_in_cpu", 0)
        # DeepSpeed asserts that a buffer holds a rank's part of any tensor
        # (runtime/swap_tensor/partitioned_param_swapper.py); one that holds the largest tensor always does.
        if largest_parameter is not None:
            param.setdefault("buffer_size", -(-largest_parameter // 2**20) * 2**20)
    # DeepSpeed's own defaults (runtime/swap_tensor/aio_config.py), so that the record shows them.
    aio = {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1}
    config.setdefault("aio", {**aio, "single_submit": False, "overlap_events": True})


def with_swap_folder(config: Mapping[str, Any], folder: str) -> Config:
    """Return the configuration with every ``nvme_path`` replaced with the trial's private folder."""
    private = copy.deepcopy(dict(config))
    for key in OFFLOAD_BLOCKS:
        if offload_device(private, key) == "nvme":
            private["zero_optimization"][key]["nvme_path"] = folder
    return private


def changes_of(
    config: Mapping[str, Any], configuration: Configuration, workload: Workload, placement: Placement
) -> Config:
    """Return the settings of ``config`` that do not follow from stage, offload devices and batch.

    :func:`overlay` makes the same changes to the configuration of another strategy; precision blocks must be added
    whole (``what_if.with_settings``).
    """
    changed = _difference(config, layout_config(config, configuration, workload, placement))
    for key in BATCH_KEYS:
        changed.pop(key, None)
    for key in ("stage", *OFFLOAD_BLOCKS):
        block_of(changed, "zero_optimization").pop(key, None)
    if trained_precision(config, "fp32") != "fp32":  # a disabled block next to the enabled one sets nothing
        for key in PRECISION_BLOCKS:
            if block_of(changed, key).get("enabled") is False:
                del changed[key]
    return {key: value for key, value in changed.items() if value != {}}


def layout_config(
    config: Mapping[str, Any], configuration: Configuration, workload: Workload, placement: Placement
) -> Config:
    """Make the configuration that stage, offload devices and batch imply, with ``torch_adam`` as in ``config``."""
    torch_adam = bool(block_of(block_of(config, "optimizer"), "params").get("torch_adam"))
    base = base_config(configuration, workload.batch_size, workload.grad_accum)
    return complete_config(base, workload, placement, torch_adam=torch_adam, largest_parameter=None)


def _difference(config: Mapping[str, Any], base: Mapping[str, Any]) -> Config:
    """Return the values of ``config`` that differ from ``base``, block by block."""
    different: Config = {}
    for key, value in config.items():
        base_value = base.get(key)
        if isinstance(value, Mapping) and isinstance(base_value, Mapping):
            if inner := _difference(value, base_value):
                different[key] = inner
        elif key not in base or value != base_value:
            different[key] = copy.deepcopy(value)
    return different


def paths_of(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path of each value of a configuration, and the value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from paths_of(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def paths_of_auto(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted path of each key whose value is "auto"."""
    return (path for path, value in paths_of(config) if value == AUTO)


def minimal_config(strategy: Strategy | Configuration) -> dict[str, Any]:
    """Make a configuration with only stage and offload devices, for a row whose full configuration is unknown."""
    devices = {"offload_optimizer": strategy.offload_optimizer, "offload_param": strategy.offload_param}
    offloads = {name: {"device": device} for name, device in devices.items() if device != "none"}
    return {"zero_optimization": {"stage": strategy.stage, **offloads}}


def hash_config(ds_config: Mapping[str, Any], engine: Engine = "deepspeed") -> str:
    """Return 12 hexadecimal digits of the SHA-256 of a DeepSpeed configuration without ``nvme_path``.

    For a reference engine, the hash also covers its name.
    """
    named = ds_config if engine == "deepspeed" else {**ds_config, "engine": engine}
    text = json.dumps(_without_folders(named), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(inner) for key, inner in value.items() if key != "nvme_path"}
    return value


def optimizer_kind(config: Mapping[str, Any]) -> str:
    """Return the optimizer's name in lower case; empty if the configuration has none."""
    return str(block_of(config, "optimizer").get("type", "")).lower()


def tensor_parallel_size(config: Mapping[str, Any]) -> int:
    """Return the number of ranks that share every layer (AutoTP); 1 without it."""
    return _size(block_of(config, "tensor_parallel").get("autotp_size"))


def sequence_parallel_size(config: Mapping[str, Any]) -> int:
    """Return the number of ranks that share every sequence (Ulysses); 1 without it."""
    return _size(config.get("sequence_parallel_size"))


def _size(value: object) -> int:
    return value if type(value) is int and value > 1 else 1


def is_deepcompiled(config: Mapping[str, Any]) -> bool:
    return bool(block_of(config, "compile").get("deepcompile"))


# Changes


def overlay(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Config:
    """Return a copy of ``config`` with ``changes`` merged in, block by block; None removes a key."""
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


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> Config:
    """Merge two sets of changes block by block; the second takes precedence. Unlike :func:`overlay`, it keeps None."""
    merged: Config = dict(first)
    for key, value in second.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def nested(path: str, value: Any) -> Config:
    """Return ``a.b`` and a value as ``{"a": {"b": value}}``. Raises UsageError for too many levels."""
    if path.count(".") >= _MAX_LEVELS:
        raise UsageError(f"{path[:60]}… has more than {_MAX_LEVELS} levels", remedy="give a DeepSpeed key")
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def parse_set(text: str) -> Config:
    """Parse ``a.b=value`` into ``{"a": {"b": value}}``; a value that is not JSON is text. Raises UsageError."""
    path, separator, raw = text.partition("=")
    if not separator or not all(path.split(".")):
        problem = f"--set {text!r} is not key.path=value"
        raise UsageError(problem, remedy="for example, --set zero_optimization.overlap_comm=false")
    try:
        value: Any = json.loads(raw)
    except json.JSONDecodeError:
        value = raw
    except (RecursionError, ValueError):  # Python refuses to parse integers of more than 4,300 digits
        problem = f"--set {path[:60]} has too many digits or levels"
        raise UsageError(problem, remedy="give a value that DeepSpeed accepts") from None
    return nested(path, value)


def apply_changes(config: Mapping[str, Any], *layers: Mapping[str, Any]) -> Config:
    """Return ``config`` with layers of changes merged in, in order.

    If they set micro-batch or accumulation but not ``train_batch_size``, that is dropped, and ``complete_config``
    computes it again.
    """
    total, *parts = BATCH_KEYS
    changed = {key for layer in layers for key in layer}
    result = dict(config)
    if changed.intersection(parts) and total not in changed:
        result.pop(total, None)
    for layer in layers:
        result = overlay(result, layer)
    return result


def json_values(config: Mapping[str, Any]) -> Config:
    """Convert a configuration to JSON types. Raises UsageError for any other value (NaN, a torch.dtype)."""
    try:
        return dict(json.loads(json.dumps(config, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the DeepSpeed config cannot be written as JSON: {error}",
            remedy="use only text, finite numbers, true, false, lists and objects",
        ) from None


def read_changes(path: Path | None) -> Config:
    """Read the changes of ``--ds-config``; empty without the flag. Raises UsageError."""
    if path is None:
        return {}
    try:
        data = json.loads(files.read_bytes(path, _LARGEST_FILE_BYTES).decode("utf-8"))
    except OSError as error:
        raise UsageError(f"--ds-config {path}: {error.strerror}", remedy="give a readable JSON file") from None
    except ValueError as error:
        problem = f"--ds-config {path} is not JSON: {error}"
        raise UsageError(problem, remedy="remove comments and trailing commas") from None
    except RecursionError:
        raise UsageError(f"--ds-config {path} is nested too deeply", remedy="give a DeepSpeed configuration") from None
    if not isinstance(data, dict):
        raise UsageError(f"--ds-config {path} is not a JSON object", remedy="write {…}")
    if (place := next(paths_of_auto(data), None)) is not None:
        problem = f'--ds-config {path}: {place} is "auto"'
        raise UsageError(problem, remedy="only the Trainer or Accelerate fills that in; give a value")
    return data
