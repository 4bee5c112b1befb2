"""Checks rows before the run: ignored keys, configurations that cannot run here, and settings without effect.

DeepSpeed accepts most of these silently. An unknown key is the user's mistake (:func:`check_keys`), a configuration
that cannot run here makes a row Unsupported (:func:`unsupported_reason`), and a setting without effect becomes a caveat
(:func:`ineffective_settings`). Facts about configurations are in ``rules``; this module adds those about the workload,
the machine and torch's own engines.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from ..system import host_resources
from ..system.environment import installed_version
from . import deepspeed_keys, lint
from .caveat_texts import Caveat
from .deepspeed_config import MEASURING_KEYS, is_deepcompiled, sequence_parallel_size, tensor_parallel_size
from .rules import Case, keys_read_later, refusals, row_caveats
from .spec import BATCH_KEYS, DEFAULT_PREFETCH, Configuration, Placement, Workload, block_of

Config = Mapping[str, Any]

_BLOCKS = ("aio", "bf16", "fp16", "optimizer", "timers", "zero_optimization")
"""Keys whose value must be an object, since this program reads the keys in it."""
_REFUSED = ("ignored-key", "comment-key", "removed-key", "old-name-of-bf16")
"""Findings about keys that a row would train without."""


def check_keys(config: Config) -> None:
    """Raise UsageError for a key that DeepSpeed would ignore or reject, and for a block that is not an object."""
    for key in _BLOCKS:
        if not isinstance(config.get(key, {}), Mapping):
            problem = f"{key!r} in the DeepSpeed config is {config[key]!r}, not an object"
            raise UsageError(problem, remedy=f"set a key inside it, like {key}.KEY=VALUE")
    lint.refuse(config, lambda each: each.rule in _REFUSED or (each.rule == "unknown-key" and each.level == "error"))


def unsupported_reason(configuration: Configuration, placement: Placement) -> str | None:
    """Return why DeepSpeed or this program would not run a configuration as it says; None if it would.

    Without the refusal, the row would show a number for something that did not happen. The workload's precision is
    checked only once the DeepSpeed configuration is complete.
    """
    case = Case(config=configuration.deepspeed_config, placement=placement)
    return (
        missing_requirement(configuration, placement)
        or (_refused_by_reference(configuration, placement) if configuration.is_reference else None)
        or next(refusals(case), None)
        # The copy of a file leaves unread keys out, with a note.
        or (None if configuration.source == "file" or configuration.is_reference else unread_key(case.config))
    )


def unread_key(config: Config) -> str | None:
    """Return the refusal for a key that only a later DeepSpeed reads: a row with it would not be what it says."""
    later = keys_read_later(config)
    if not later:
        return None
    path = min(later)
    return f"DeepSpeed {deepspeed_keys.version()} does not read {path}; use {later[path]} or later"


def missing_requirement(configuration: Configuration, placement: Placement) -> str | None:
    """Return which accelerator, ranks or hosts a configuration lacks here, or why it is refused; None if it runs."""
    needs, name = configuration.requires, configuration.label
    if configuration.refusal:
        return configuration.refusal
    if needs.accelerator not in (None, placement.accelerator):
        why = f": {needs.reason}" if needs.reason else f" needs the accelerator {needs.accelerator}"
        return f"{name}{why}; use --accelerator {needs.accelerator}"
    if needs.min_ranks > placement.num_gpus:
        return f"{name} needs {needs.min_ranks} ranks or more; use --num-gpus {needs.min_ranks}"
    if needs.min_nodes > placement.num_nodes:
        return f"{name} needs {needs.min_nodes} nodes or more; give them with --hostfile"
    return None


_NO_AUTOTP = ("deberta", "flaubert", "fsmt", "gpt2", "led", "longformer", "xlm", "xlnet")
"""Architectures that DeepSpeed's AutoTP does not support (module_inject/auto_tp.py, AutoTP.supported)."""
_HEADS = ("num_attention_heads", "n_head")
"""Names of the number of attention heads in models' configurations."""
_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Attention implementation → the package that Transformers imports for it."""


def unsupported_workload_reason(configuration: Configuration, workload: Workload, placement: Placement) -> str | None:
    """Return why a workload's attention, loss, data loader, groups of ranks or pass do not run here; None if they do.

    ``configuration``: with its completed DeepSpeed configuration.
    """
    config = configuration.deepspeed_config
    reason = (
        _unsupported_step(workload, placement)
        or _unsupported_host_use(workload, placement)
        or _unsupported_groups(workload, placement, config)
    )
    if reason is not None or workload.pass_type == "train":
        return reason
    what = f"pass_type {workload.pass_type} times only the model"
    if configuration.is_reference or configuration.layout != (0, "none", "none"):
        return f"{what}, without what {configuration.label} adds; time it at stage 0"
    if workload.compile != "none" or is_deepcompiled(config):
        return f"{what}, uncompiled; leave compile out"
    if max(tensor_parallel_size(config), sequence_parallel_size(config)) > 1:
        return f"{what}, on one rank; leave autotp_size and sequence_parallel_size out"
    return None


def _unsupported_step(workload: Workload, placement: Placement) -> str | None:
    attention, loss = workload.attention or "", workload.loss
    if attention and workload.model_source == "factory":
        return f"the model's factory chooses its attention, so {attention} has no effect; leave attention out"
    if attention == "flex_attention" and placement.accelerator != "cuda":
        return "attention flex_attention trains on GPUs only; use sdpa here"
    if attention.startswith("flash") and workload.precision == "fp32":
        return f"attention {attention} computes in bf16 or fp16 only; use --precision bf16, or attention sdpa"
    for what, package, instead in (
        (f"attention {attention}", _FLASH_PACKAGES.get(attention), "sdpa"),
        (f"loss {loss}", "liger_kernel" if loss == "liger" else None, "chunked or tiled"),
    ):
        if package is not None and placement.accelerator != "cuda":
            return f"{what} runs on GPUs only; use {instead} here"
        if package is not None and importlib.util.find_spec(package) is None:
            return f"{what} needs the package {package}, which is not installed; install it, or use {instead}"
    for what, wanted, since in (
        ("loss chunked", loss == "chunked", "0.19"),
        ("loss tiled", loss == "tiled", "0.17"),
        ("tiled_mlp", workload.tiled_mlp, "0.17"),
    ):
        if wanted and deepspeed_keys.is_before(since):
            return f"DeepSpeed {deepspeed_keys.version()} has no {what}; use {since} or later"
    if loss == "tiled" and workload.precision == "fp16":
        return "loss tiled computes gradients before the loss scaling that fp16 needs; use --precision bf16"
    return None


def _unsupported_host_use(workload: Workload, placement: Placement) -> str | None:
    """Why the data loader or the binding to processors has no effect here."""
    # With a hostfile, ranks run on machines whose processors are unknown here.
    if workload.cpu_binding == "numa" and placement.hostfile is None and len(host_resources.numa_cpus()) < 2:
        return "this machine has one NUMA node; use cpu_binding cores"
    if workload.cpu_binding != "none" and placement.hostfile is None:
        # Not os.cpu_count(): a container or taskset may leave this process fewer.
        cores = len(os.sched_getaffinity(0))
        if cores < placement.num_gpus:
            return f"{placement.num_gpus} ranks cannot be bound to {cores} cores; use fewer ranks (--num-gpus)"
    if workload.data_workers is None and (workload.data_pin_memory or workload.data_prefetch != DEFAULT_PREFETCH):
        return "data_pin_memory and data_prefetch need a data loader; add data_workers"
    if workload.data_pin_memory and placement.accelerator != "cuda":
        return "the CPU accelerator pins no memory; use data_pin_memory false"
    return None


def _unsupported_groups(workload: Workload, placement: Placement, config: Config) -> str | None:
    """Why the ranks cannot be divided into the tensor-parallel or sequence-parallel groups of a configuration."""
    tensor, sequence = tensor_parallel_size(config), sequence_parallel_size(config)
    size, name = max(tensor, sequence), "autotp_size" if tensor > 1 else "sequence_parallel_size"
    # If the number of heads is unknown, the default passes the check below.
    heads = next((workload.model_config[key] for key in _HEADS if key in workload.model_config), size)
    ranks, length = placement.num_gpus, workload.seq_length
    if tensor > 1 and workload.model_type in _NO_AUTOTP:
        return f"AutoTP cannot split {workload.model_type} (module_inject/auto_tp.py); use another model"
    if min(tensor, sequence) > 1:
        return "autotp_size and sequence_parallel_size cannot be combined here; keep one"
    if ranks % size:
        return f"{name} {size} does not divide the {ranks} ranks; use --num-gpus {size}"
    if heads % size:
        return f"{name} {size} does not divide the {heads} attention heads; use a divisor of {heads}"
    if sequence > 1 and (length % sequence or length < 2 * sequence):
        return (
            f"sequence_parallel_size {sequence} does not divide --seq-length {length} into parts of two tokens or "
            f"more; use a multiple of {sequence}"
        )
    if sequence > 1 and workload.attention == "eager":
        return "Ulysses does not split eager attention; use attention sdpa"
    if tensor > 1 and workload.loss != "model":
        return f"loss {workload.loss} needs the whole output layer, which AutoTP splits; use loss model"
    return None


def ineffective_settings(configuration: Configuration, workload: Workload, placement: Placement) -> list[str | Caveat]:
    """Return caveats for settings that have no effect, slow down the measured steps, or are known to train wrongly.

    ``configuration``: with its completed DeepSpeed configuration.
    """
    config = configuration.deepspeed_config
    if not configuration.is_reference:
        return list(row_caveats(Case(config=config, workload=workload, placement=placement)))
    keys = sorted(block_of(config, "zero_optimization").keys() - {"stage"})
    names = ", ".join(f"zero_optimization.{key}" for key in keys)
    return [f"{configuration.label} does not read {names}: torch has no such setting"] if keys else []


# torch's own engines


_READ_BY_REFERENCES = {"bf16", "fp16", "gradient_clipping", "optimizer", "zero_optimization", *BATCH_KEYS}
"""Keys that mean the same to a reference engine."""
_ABOUT_DEEPSPEED = {
    *("activation_checkpointing", "aio", "checkpoint", "dump_state", "log_level", "memory_breakdown"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", *MEASURING_KEYS),
}
"""Keys that do not affect what is trained, so that a reference engine may leave them out."""
_BF16_KEYS = {"enabled", "check_grad_overflow", "immediate_grad_update"}


def _refused_by_reference(configuration: Configuration, placement: Placement) -> str | None:
    """Why a reference engine would not train as the configuration says; None if it would."""
    config, label = configuration.deepspeed_config, configuration.label
    optimizer = str(block_of(config, "optimizer").get("type", ""))
    without = f"remove it, or leave --strategies {configuration.name} out"
    on_cpu = configuration.engine == "fsdp2" and placement.accelerator == "cpu"
    if on_cpu and (installed_version("torch") or "").startswith("2.6."):
        return f"{label} on the CPU needs torch 2.7 or later, whose CPU streams record events"
    if configuration.offloads:
        return f"{label} does not offload here; {without}"
    if block_of(config, "fp16").get("enabled"):
        return f"{label} in fp16 would need a loss scaler other than DeepSpeed's; use --precision bf16 or fp32"
    if optimizer.lower() not in ("adam", "adamw", "sgd"):  # which torch and DeepSpeed both have
        return f"{label} and DeepSpeed do not both have {optimizer or 'an optimizer'}; use AdamW, Adam or SGD"
    # Only known keys pass: a setting of a later DeepSpeed may change what is trained.
    others = sorted(config.keys() - _READ_BY_REFERENCES - _ABOUT_DEEPSPEED)
    others += [f"bf16.{key}" for key in sorted(block_of(config, "bf16").keys() - _BF16_KEYS)]
    return f"{label} does not support {', '.join(others)} from the DeepSpeed config; {without}" if others else None
