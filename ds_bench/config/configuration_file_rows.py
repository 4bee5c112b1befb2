"""Makes a row's configuration from a file of ``--configs`` and a micro-batch.

The file decides everything but the batch: stage, offload, optimizer, scheduler and precision. Settings with effects
outside the comparison are left out: folders, and monitors that write or send data.

Sources: DeepSpeed 0.19.8, ``runtime/config.py``, ``runtime/zero/config.py``, ``monitor/config.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UsageError
from ..units import format_names
from . import deepspeed_config, deepspeed_keys, lint
from .automatic_values import TRAINING_DEFAULTS, TrainingFacts, resolve
from .configuration_files import ConfigurationFile
from .deepspeed_config import AUTO, Config, json_values
from .rules import RULES, Case, keys_read_later, without_ignored, without_later_keys
from .spec import BATCH_KEYS, OFFLOAD_BLOCKS, BatchPolicy, Configuration

_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
"""Blocks that make DeepSpeed write or send values at every step."""
_DECIDED_FOR_THE_ROW = frozenset(rule.name for rule in RULES if rule.row == "refusal")
"""Rules that depend on the machine and on flags such as ``--nvme-path``; ``validation.unsupported_reason`` applies
them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRowMaker:
    """Makes the configurations of files for one workload on one placement."""

    facts: TrainingFacts
    """Facts of the workload; their precision applies to a file without one."""
    keep_batch: bool = False
    """Whether the file's batch keys override the workload's."""
    change: Callable[[Config], Config] = lambda config: config
    """Applies the flags that change every row."""

    def make(
        self, file: ConfigurationFile, batch_size: int | None = None, policy: BatchPolicy = "given"
    ) -> Configuration:
        """Make the configuration of a file for a micro-batch; None for the workload's.

        If DeepSpeed rejects the file, the configuration has the reason as ``refusal`` and must not be run.
        """
        common = self.facts
        micro, accumulation = batch_size or common.batch_size, common.grad_accum
        try:
            if self.keep_batch:
                micro, accumulation = batch_of_file(file, common.num_gpus, micro, accumulation)
            config, resolved, caveats = self._resolve(file, micro, accumulation)
        except UsageError as error:
            # A row that shows the reason, so that the other files are still compared.
            return Configuration(
                name=file.name,
                label=file.name,
                deepspeed_config={
                    "train_micro_batch_size_per_gpu": micro,
                    "optimizer": {"type": "AdamW", "params": {}},
                    "zero_optimization": {"stage": Case(config=file.config).stage or 0},
                },
                source="file",
                file_text=file.text,
                refusal=str(error),
            )
        changes: dict[str, Any] = {} if policy == "given" else {"batch_policy": policy}
        for name, value, usual in (
            ("batch_size", micro, common.batch_size),
            ("grad_accum", accumulation, common.grad_accum),
            ("precision", deepspeed_config.trained_precision(config, common.precision), common.precision),
            ("activation_checkpointing", file.activation_checkpointing, False),
            # Only at stage 3 does DeepSpeed shard a model while building it.
            ("zero_init", file.zero_init or config["zero_optimization"].get("stage") != 3, True),
        ):
            if value != usual:
                changes[name] = value
        own_batch = self.keep_batch and (micro, accumulation) != (common.batch_size, common.grad_accum)
        return Configuration(
            name=file.name,
            label=f"{file.name}, micro-batch {micro} × {accumulation}" if own_batch else file.name,
            deepspeed_config=config,
            workload_changes=changes,
            source="file",
            file_text=file.text,
            resolved_values=resolved,
            caveats=tuple(caveats),
        )

    def _resolve(
        self, file: ConfigurationFile, micro: int, accumulation: int
    ) -> tuple[Config, dict[str, Any], list[str]]:
        """Return the configuration with its "auto" resolved, the resolved values, and caveats. Raises UsageError."""
        written = json_values(self.change(copy.deepcopy(dict(file.config))))
        # --optimizer may name one that DeepSpeed has not tested with ZeRO.
        if written.get("optimizer") != file.config.get("optimizer"):
            written.setdefault("zero_allow_untested_optimizer", True)
        # Rewrite the spellings that DeepSpeed still reads and this program does not, before "auto" is resolved, since
        # the Trainer fills in bf16.
        if "bfloat16" in written:  # ignored next to bf16
            written.setdefault("bf16", written.pop("bfloat16"))
        if isinstance(zero := written.get("zero_optimization"), bool):
            written["zero_optimization"] = {"stage": int(zero)}
        known = deepspeed_keys.top_level_keys() | deepspeed_keys.removed_keys()
        version = deepspeed_keys.version()
        unknown = sorted(keys_read_later(written))
        written = without_later_keys(written)
        for key in sorted(written.keys() - known):
            near = deepspeed_keys.nearest_key(key, known, 0.85)
            unknown.append(f"{key} (did you mean {near}?)" if near else key)
        precision = file.precision or self.facts.precision
        facts = replace(
            self.facts, batch_size=micro, grad_accum=accumulation, precision=precision, arguments=file.arguments
        )
        resolved, values = resolve({key: value for key, value in written.items() if key in known}, facts)
        # complete_config computes the total batch for the run's number of ranks.
        config = {key: value for key, value in resolved.items() if key != "train_batch_size"}
        config |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
        # Reject what DeepSpeed rejects: after "auto" is resolved, as DeepSpeed sees it, and before spellings are
        # replaced, since DeepSpeed rejects a setting under two names.
        lint.refuse(config, lambda finding: finding.level == "error" and finding.rule not in _DECIDED_FOR_THE_ROW)
        optimizer = config.get("optimizer", {"type": "AdamW"})
        if not isinstance(optimizer.get("type"), str):
            raise UsageError("optimizer has no type", remedy="correct the file")
        if not isinstance(params := optimizer.get("params") or {}, dict):
            raise UsageError(f"optimizer.params is {params!r}, not a block", remedy="correct the file")
        config = as_deepspeed_reads_it(config)
        left_out = [f"{format_names(unknown)}, which DeepSpeed {version} does not read"] if unknown else []
        side_effects = _remove_side_effects(config)
        caveats = _complete_precision(config, file, facts.precision, self.facts.precision)
        if "optimizer" not in config:
            params = dict(deepspeed_config.ADAMW_PARAMETERS)
            if file.kind == "trainer":
                given = {**TRAINING_DEFAULTS, **file.arguments}
                params = {"lr": given["learning_rate"], "betas": [given["adam_beta1"], given["adam_beta2"]]}
                params |= {"eps": given["adam_epsilon"], "weight_decay": given["weight_decay"]}
            config["optimizer"] = {"type": "AdamW", "params": params}
            caveats.append(f"its file has no optimizer: trains with AdamW, learning rate {params['lr']:g}")
        config, ignored = without_ignored(config)  # after completion: some rules need the optimizer
        if left_out := [*left_out, *ignored, *side_effects]:
            caveats.insert(0, f"left out of the copy that runs: {'; '.join(left_out)}")
        return config, values, caveats


def batch_of_file(file: ConfigurationFile, num_gpus: int, batch_size: int, grad_accum: int) -> tuple[int, int]:
    """Return the micro-batch and accumulation of a file as DeepSpeed computes them, or the given ones if it has none.

    Raises UsageError if its keys contradict each other or the number of GPUs.
    """
    micro, accumulation, ranks = _own_batch(file, num_gpus)
    micro, accumulation = micro or batch_size, accumulation or grad_accum
    total = _batch_value(file.config, BATCH_KEYS[0])
    if total not in (None, micro * accumulation * ranks):
        problem = f"train_batch_size {total} is not {micro} × {accumulation} × {ranks} data-parallel ranks"
        remedy = "change --num-gpus, or leave --keep-batch out"
        raise UsageError(f"{problem}, so DeepSpeed rejects it", remedy=remedy)
    return micro, accumulation


def gives_accumulation(file: ConfigurationFile, num_gpus: int) -> bool:
    """Return whether the accumulation of :func:`batch_of_file` is the file's own. Raises UsageError."""
    return bool(_own_batch(file, num_gpus)[1])


def _own_batch(file: ConfigurationFile, num_gpus: int) -> tuple[int | None, int | None, int]:
    """Return a file's micro-batch and accumulation (None or 0 if it has none), and the data-parallel ranks."""
    ranks = max(1, num_gpus // deepspeed_config.sequence_parallel_size(file.config))
    total, micro, accumulation = (_batch_value(file.config, key) for key in BATCH_KEYS)
    micro = micro or file.batch_arguments.get("per_device_train_batch_size")
    accumulation = accumulation or file.batch_arguments.get("gradient_accumulation_steps")
    # The divisions of DeepSpeed's _set_batch_related_parameters (runtime/config.py).
    if total is not None:
        if micro is None and accumulation is None:
            accumulation = 1
        if micro is None:
            micro = total // ranks // (accumulation or 1)
        if accumulation is None:
            accumulation = total // micro // ranks
    elif micro is not None and BATCH_KEYS[2] not in file.config:
        accumulation = accumulation or 1
    return micro, accumulation, ranks


def _batch_value(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None or value == AUTO:
        return None
    if type(value) is not int or value < 1:
        raise UsageError(f"{key} is {value!r}", remedy="give a whole number of 1 or more")
    return value


def has_different_batch(file: ConfigurationFile, num_gpus: int, batch_size: int, grad_accum: int) -> bool:
    """Return whether a file's batch keys give a different batch or contradict each other."""
    try:
        return batch_of_file(file, num_gpus, batch_size, grad_accum) != (batch_size, grad_accum)
    except UsageError:
        return True


def as_deepspeed_reads_it(config: Mapping[str, Any]) -> Config:
    """Return a configuration with old and alternative spellings replaced with those that this program reads."""
    case, read = Case(config=config), copy.deepcopy(dict(config))
    for name in ("bf16", "fp16"):
        if "enabled" in read.get(name, {}):
            read[name]["enabled"] = case.is_on(f"{name}.enabled")
    if isinstance(optimizer := read.get("optimizer"), dict) and optimizer.get("params") is None:
        optimizer["params"] = {}
    zero = read.setdefault("zero_optimization", {})
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.pop(old, False):
            zero[new] = {"device": "cpu"}
    for name, facts in deepspeed_keys.keys_of("zero_optimization").items():
        if facts.get("same_as") in zero:  # prefetch_bucket_size, usually stage3_prefetch_bucket_size
            zero.setdefault(name, zero.pop(facts["same_as"]))
    if isinstance(stage := zero.get("stage"), (bool, float)):  # as pydantic reads them
        zero["stage"] = int(stage)
    return read


def _remove_side_effects(config: Config) -> list[str]:
    """Remove settings that would write outside the results or send data. Return the removed settings."""
    removed = []
    for name in _MONITORS:
        if isinstance(block := config.pop(name, None), Mapping) and block.get("enabled"):
            removed.append(f"{name} (a comparison writes only to its own folder and sends nothing)")
    if isinstance(profiler := config.get("flops_profiler"), dict) and profiler.pop("output_file", None):
        removed.append("flops_profiler.output_file")
    for name in OFFLOAD_BLOCKS:
        if isinstance(block := config["zero_optimization"].get(name), dict):
            block.pop("nvme_path", None)  # replaced by a private folder below --nvme-path
    return removed


def _complete_precision(config: Config, file: ConfigurationFile, wanted: str, usual: str) -> list[str]:
    """Set the precision explicitly if the file has no block for it. Return caveats.

    ``usual``: the precision of the other rows. ``wanted``: the file's precision, or ``usual`` if it has none.
    """
    if any(name in config for name in deepspeed_config.PRECISION_BLOCKS):
        in_fp32 = deepspeed_config.trained_precision(config, "bf16") == "fp32"
        return ["its file enables neither bf16 nor fp16: trained in fp32"] if in_fp32 and wanted != "fp32" else []
    if file.precision == "fp32" != usual:
        # Without a block the row would get the precision of the other rows.
        config["bf16"] = {"enabled": False}
        return ["its file turns mixed precision off: trained in fp32"]
    if wanted == "fp32":
        return []
    config[wanted] = {"enabled": True}
    unnamed = f"its file names no precision: trained in {wanted}, not in DeepSpeed's default, fp32"
    return [unnamed] if file.precision is None else []
