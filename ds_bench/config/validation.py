"""Finds, before anything runs, what DeepSpeed or this program refuses or ignores in a configuration.

DeepSpeed accepts most of these silently. An unknown key is a mistake of the user (:func:`check_keys`), a configuration
that cannot run here makes a row Unsupported (:func:`unsupported_reason`), and a setting without effect becomes a caveat
(:func:`ineffective_settings`). The keys are those of ``deepspeed_keys``, the facts those of ``rules``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import UsageError
from ..system import host_memory
from . import deepspeed_keys, reference_engines
from .deepspeed_config import is_deepcompiled, sequence_parallel_size, tensor_parallel_size
from .rules import RULES, Case, RowUse
from .spec import DEFAULT_PREFETCH, Configuration, Placement, Workload

Config = Mapping[str, Any]

_BLOCKS = ("aio", "bf16", "fp16", "optimizer", "timers", "zero_optimization")
"""Keys whose value must be an object, as this program reads inside it."""
_MOST_LISTED = 12
"""Keys of a block that a message names."""


def check_keys(config: Mapping[str, Any]) -> None:
    """Raises UsageError for a top-level key that DeepSpeed would ignore, a nested key that it would refuse, and a block
    that is not an object.
    """
    known_keys = deepspeed_keys.top_level_keys() - {"bfloat16"}  # which DeepSpeed still reads and this program does not
    for key in config:
        if key in deepspeed_keys.removed_keys():
            raise UsageError(f"DeepSpeed refuses {key}, which it no longer has", remedy="remove it")
        if key not in known_keys:
            near = deepspeed_keys.nearest_key(key, known_keys)
            hint = f"did you mean {near!r}?" if near else "DeepSpeed would ignore it silently; remove it"
            raise UsageError(f"unknown top-level key {key!r} in the DeepSpeed config", remedy=hint)
    for path, known in deepspeed_keys.refusing_blocks().items():
        for key in Case(config=config).block(path):
            if key not in known:
                near = deepspeed_keys.nearest_key(key, known)
                listed = f"it knows {', '.join(sorted(known))}" if len(known) <= _MOST_LISTED else "remove it"
                hint = f"did you mean {near!r}?" if near else listed
                raise UsageError(f"DeepSpeed refuses {path}.{key}, which it does not know", remedy=hint)
    for key in _BLOCKS:
        if not isinstance(config.get(key, {}), Mapping):
            problem = f"{key!r} in the DeepSpeed config is {config[key]!r}, not an object"
            raise UsageError(problem, remedy=f"set a key inside it, like {key}.KEY=VALUE")


def unsupported_reason(configuration: Configuration, placement: Placement) -> str | None:
    """Returns why DeepSpeed or this program would not run a configuration as it says; None if it would.

    Each case was read in the code of DeepSpeed's pinned version, or run with it: without the refusal the row would
    show a number for something that did not happen. A precision of the workload is refused only once the DeepSpeed
    configuration is completed.
    """
    case = Case(config=configuration.deepspeed_config, placement=placement)
    return (
        configuration.refusal
        or _missing_requirement(configuration, placement)
        or (reference_engines.refused_setting(configuration) if configuration.is_reference else None)
        or next(_row_texts(case, "refusal", "ignored"), None)
    )


def unsupported_workload_reason(configuration: Configuration, workload: Workload, placement: Placement) -> str | None:
    """Returns why a workload's attention, loss, data loader, groups of ranks or pass do not run here; None if they do.

    ``configuration``: with its completed DeepSpeed configuration.
    """
    return (
        _unsupported_step(workload, placement)
        or _unsupported_host_use(workload, placement)
        or _unsupported_groups(workload, placement, configuration.deepspeed_config)
        or _unsupported_pass(configuration, workload)
    )


def _unsupported_pass(configuration: Configuration, workload: Workload) -> str | None:
    """Why only whole training steps are timed in a row; None if other passes are, or none are asked for."""
    config = configuration.deepspeed_config
    if workload.pass_type == "train":
        return None
    what = f"pass_type {workload.pass_type} is that of the model alone"
    if configuration.is_reference or configuration.layout != (0, "none", "none"):
        return f"{what}, without what {configuration.label} adds; time it at stage 0"
    if workload.compile != "none" or is_deepcompiled(config):
        return f"{what}, which runs uncompiled; leave compile out"
    if max(tensor_parallel_size(config), sequence_parallel_size(config)) > 1:
        return f"{what}, which is not split among ranks; leave autotp_size and sequence_parallel_size out"
    return None


def _unsupported_groups(workload: Workload, placement: Placement, config: Config) -> str | None:
    """Why the ranks cannot be divided into the tensor-parallel or sequence-parallel groups of a configuration."""
    tensor, sequence = tensor_parallel_size(config), sequence_parallel_size(config)
    size, name = max(tensor, sequence), "autotp_size" if tensor > 1 else "sequence_parallel_size"
    # Where the number of heads is not known, the default passes the check below.
    heads = next((workload.model_config[key] for key in _HEADS if key in workload.model_config), size)
    ranks, length = placement.num_gpus, workload.seq_length
    if tensor > 1 and workload.model_type in _NO_AUTOTP:
        return f"AutoTP does not know how to split {workload.model_type} (module_inject/auto_tp.py); use another model"
    if min(tensor, sequence) > 1:
        return "autotp_size and sequence_parallel_size are not trained together here; keep one"
    if ranks % size:
        return f"{name} {size} does not divide the {ranks} ranks; use --num-gpus {size}"
    if heads % size:
        return f"{name} {size} does not divide the {heads} attention heads; use a divisor of {heads}"
    if sequence > 1 and (length % sequence or length < 2 * sequence):
        return (
            f"sequence_parallel_size {sequence} does not divide --seq-length {length} into two tokens or more each; "
            f"use a multiple of {sequence}"
        )
    if sequence > 1 and workload.attention == "eager":
        return "Ulysses does not split eager attention; use attention sdpa"
    if tensor > 1 and workload.loss != "model":
        return f"loss {workload.loss} needs the whole output layer, which AutoTP splits; use loss model"
    return None


_NO_AUTOTP = ("deberta", "flaubert", "fsmt", "gpt2", "led", "longformer", "xlm", "xlnet")
"""Architectures that DeepSpeed's AutoTP refuses (module_inject/auto_tp.py, AutoTP.supported)."""
_HEADS = ("num_attention_heads", "n_head")
"""Names of the number of attention heads in models' configurations."""


def _unsupported_host_use(workload: Workload, placement: Placement) -> str | None:
    """Why the data loader or the binding to processors does nothing here."""
    # With a hostfile ranks run on machines whose processors are not known here.
    if workload.cpu_binding == "numa" and placement.hostfile is None and len(host_memory.numa_cpus()) < 2:
        return "this machine has one NUMA node; use cpu_binding cores"
    if workload.cpu_binding != "none" and placement.hostfile is None:
        # Not os.cpu_count(): a container or taskset may leave this process fewer.
        cores = len(os.sched_getaffinity(0))
        if cores < placement.num_gpus:
            return f"{placement.num_gpus} ranks cannot be bound to {cores} cores; use fewer ranks (--num-gpus)"
    if workload.data_workers is None and (workload.data_pin_memory or workload.data_prefetch != DEFAULT_PREFETCH):
        return "data_pin_memory and data_prefetch are of a data loader; add data_workers"
    if workload.data_pin_memory and placement.accelerator != "cuda":
        return "the CPU accelerator pins no memory; use data_pin_memory false"
    return None


def _unsupported_step(workload: Workload, placement: Placement) -> str | None:
    attention, loss = workload.attention or "", workload.loss
    if attention and workload.model_source == "factory":
        return f"the model's factory chooses its attention itself, not {attention}; leave it out"
    if attention == "flex_attention" and placement.accelerator != "cuda":
        return "attention flex_attention trains on GPUs alone; use sdpa here"
    if attention.startswith("flash"):
        if workload.precision == "fp32":
            return f"attention {attention} computes in 16 bit alone; use --precision bf16, or attention sdpa"
        return _lacks_gpu_package(f"attention {attention}", _FLASH_PACKAGES[attention], "sdpa", placement)
    if loss == "liger":
        return _lacks_gpu_package("loss liger", "liger_kernel", "chunked or tiled", placement)
    if loss == "tiled" and workload.precision == "fp16":
        return "loss tiled computes gradients before the loss scale, which fp16 needs; use --precision bf16"
    return None


_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Attention implementation → the package that Transformers imports for it."""


def _lacks_gpu_package(what: str, package: str, instead: str, placement: Placement) -> str | None:
    if placement.accelerator != "cuda":
        return f"{what} runs on GPUs alone; use {instead} here"
    if importlib.util.find_spec(package) is None:
        return f"{what} needs the package {package}, which is not installed; install it, or use {instead}"
    return None


def _missing_requirement(configuration: Configuration, placement: Placement) -> str | None:
    needs, name = configuration.requires, configuration.label
    if needs.accelerator not in (None, placement.accelerator):
        if needs.reason:
            return f"{name}: {needs.reason}; use --accelerator {needs.accelerator}"
        return f"{name} needs the accelerator {needs.accelerator}; add --accelerator {needs.accelerator}"
    if needs.min_ranks > placement.num_gpus:
        return f"{name} needs {needs.min_ranks} ranks or more; use --num-gpus {needs.min_ranks}"
    if needs.min_nodes > placement.num_nodes:
        return f"{name} needs {needs.min_nodes} nodes or more; give them with --hostfile"
    return None


def ineffective_settings(configuration: Configuration, workload: Workload, placement: Placement) -> list[str]:
    """Returns caveats for settings that have no effect, or that slow down what is measured.

    ``configuration``: with its completed DeepSpeed configuration.
    """
    if configuration.is_reference:
        return reference_engines.ignored_settings(configuration)
    config = configuration.deepspeed_config
    return list(_row_texts(Case(config=config, workload=workload, placement=placement), "caveat"))


def _row_texts(case: Case, *uses: RowUse) -> Iterator[str]:
    return (rule.row_text_for(case) for rule in RULES if rule.row in uses and rule.applies(case))
