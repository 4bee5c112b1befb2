"""Makes the configuration of a row from a file of ``--configs``, at a micro-batch.

The file rules in everything but the batch: stage, offload, optimizer, scheduler and precision are the row's. What would
reach beyond the comparison is not taken from a file: folders, and monitors that write or send data.

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
from .rules import RULES, without_ignored
from .spec import BATCH_KEYS, OFFLOAD_BLOCKS, BatchPolicy, Configuration

_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
"""Blocks with which DeepSpeed writes or sends values of every step."""
_DECIDED_FOR_THE_ROW = frozenset(rule.name for rule in RULES if rule.row == "refusal")
"""Rules of which ``validation.unsupported_reason`` tells with the flags and the machine, such as ``--nvme-path``."""
_OLD_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRowMaker:
    """Makes the configurations of files for one workload on one placement."""

    facts: TrainingFacts
    """Of the workload; a row that differs says so in its ``workload_changes``. Its precision is also what a file
    without any is trained in."""
    keep_batch: bool = False
    """Whether the batch keys of a file rule."""
    change: Callable[[Config], Config] = lambda config: config
    """Applies the flags that change every row's configuration."""

    def make(
        self, file: ConfigurationFile, batch_size: int | None = None, policy: BatchPolicy = "given"
    ) -> Configuration:
        """Makes the configuration of a file at a micro-batch; None for that of the workload.

        Where DeepSpeed refuses the file, the configuration has the reason as ``refusal`` and is not to be run.
        """
        common = self.facts
        micro, accumulation = batch_size or common.batch_size, common.grad_accum
        changes: dict[str, Any] = {} if policy == "given" else {"batch_policy": policy}
        try:
            if self.keep_batch:
                micro, accumulation = batch_of_file(file, common.num_gpus, micro, accumulation)
            config, resolved, caveats = self._resolve(file, micro, accumulation)
        except UsageError as error:
            # A row that shows the reason, so that the other files are compared all the same.
            return _refused(file, micro, str(error))
        for name, value, usual in (
            ("batch_size", micro, common.batch_size),
            ("grad_accum", accumulation, common.grad_accum),
            ("precision", deepspeed_config.trained_precision(config, common.precision), common.precision),
            ("activation_checkpointing", file.activation_checkpointing, False),
            # DeepSpeed splits a model while it is built at stage 3 alone.
            ("zero_init", file.zero_init or config.get("zero_optimization", {}).get("stage") != 3, True),
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
        """The configuration with its "auto" resolved, the resolved values, and caveats. Raises UsageError."""
        written = json_values(self.change(copy.deepcopy(dict(file.config))))
        if written.get("optimizer") != file.config.get("optimizer"):  # the flags' optimizer, which may be any
            written.setdefault("zero_allow_untested_optimizer", True)
        # Before "auto" is resolved, as the Trainer fills in bf16 and not bfloat16.
        _replace_old_forms(written)
        written, unknown = _without_unknown_keys(written)
        facts = replace(
            self.facts,
            batch_size=micro,
            grad_accum=accumulation,
            precision=file.precision or self.facts.precision,
            arguments=file.arguments,
        )
        resolution = resolve(written, facts)
        # complete_config computes the total batch, for the number of ranks of the run.
        config = {key: value for key, value in resolution.config.items() if key != "train_batch_size"}
        config |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
        # Before spellings are replaced, since DeepSpeed refuses one setting under two names.
        _check_values(config)  # after "auto" is resolved, as DeepSpeed sees it
        config, caveats = as_deepspeed_reads_it(config), []
        side_effects = _remove_side_effects(config)
        if not any(name in config for name in deepspeed_config.PRECISION_BLOCKS):
            if file.precision == "fp32" != self.facts.precision:
                # Without a block the row would get that of the other rows.
                config["bf16"] = {"enabled": False}
                caveats.append("its file asks for no mixed precision: trained in fp32")
            elif facts.precision != "fp32":
                config[facts.precision] = {"enabled": True}
            if file.precision is None and facts.precision != "fp32":
                caveats.append(f"its file names no precision: trained in {facts.precision}, not in DeepSpeed's fp32")
        elif facts.precision != "fp32" and deepspeed_config.trained_precision(config, facts.precision) == "fp32":
            caveats.append("its file enables neither bf16 nor fp16: trained in fp32")
        if "optimizer" not in config:
            config["optimizer"] = _missing_optimizer(file)
            params = config["optimizer"]["params"]
            caveats.append(f"its file has no optimizer: AdamW of learning rate {params['lr']:g}")
        config, ignored = without_ignored(config)  # of the completed one, as some rules ask for the optimizer
        if left_out := [*unknown, *ignored, *side_effects]:
            caveats.insert(0, f"left out of the copy that runs: {'; '.join(left_out)}")
        return config, {**resolution.values, **dict.fromkeys(resolution.left_to_deepspeed)}, caveats


def batch_of_file(file: ConfigurationFile, num_gpus: int, batch_size: int, grad_accum: int) -> tuple[int, int]:
    """Returns the micro-batch and accumulation of a file as DeepSpeed computes them; the given ones where it has none,
    or "auto".

    Raises UsageError where its keys contradict each other or the number of GPUs.
    """
    ranks = _data_parallel_ranks(file, num_gpus)
    micro, accumulation = _own_batch(file, ranks)
    micro, accumulation = micro or batch_size, accumulation or grad_accum
    total = _batch_value(file.config, BATCH_KEYS[0])
    if total not in (None, micro * accumulation * ranks):
        raise UsageError(
            f"train_batch_size {total} is not {micro} × {accumulation} × {ranks} data-parallel ranks, and DeepSpeed "
            "refuses that",
            remedy="use another --num-gpus, or leave --keep-batch out",
        )
    return micro, accumulation


def gives_accumulation(file: ConfigurationFile, num_gpus: int) -> bool:
    """Whether the accumulation of :func:`batch_of_file` is the file's own. Raises UsageError for an invalid key."""
    return bool(_own_batch(file, _data_parallel_ranks(file, num_gpus))[1])


def _data_parallel_ranks(file: ConfigurationFile, num_gpus: int) -> int:
    return max(1, num_gpus // deepspeed_config.sequence_parallel_size(file.config))


def _own_batch(file: ConfigurationFile, ranks: int) -> tuple[int | None, int | None]:
    """The micro-batch and the accumulation that a file gives; None or 0 where it gives none."""
    given = file.batch_arguments
    total, micro, accumulation = (_batch_value(file.config, key) for key in BATCH_KEYS)
    micro = micro or given.get("per_device_train_batch_size")
    accumulation = accumulation or given.get("gradient_accumulation_steps")
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
    return micro, accumulation


def _batch_value(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None or value == AUTO:
        return None
    if type(value) is not int or value < 1:
        raise UsageError(f"{key} is {value!r}", remedy="give a whole number of 1 or more")
    return value


def has_other_batch(file: ConfigurationFile, num_gpus: int, batch_size: int, grad_accum: int) -> bool:
    """Whether the batch keys of a file ask for another batch than this one, or contradict it."""
    try:
        return batch_of_file(file, num_gpus, batch_size, grad_accum) != (batch_size, grad_accum)
    except UsageError:
        return True


def _replace_old_forms(config: Config) -> None:
    """Replaces what DeepSpeed still reads and this program does not: ``bfloat16``, and ZeRO without a block."""
    if "bfloat16" in config:
        # DeepSpeed reads bfloat16 only where there is no bf16 block.
        config.setdefault("bf16", config.pop("bfloat16"))
    if isinstance(zero := config.get("zero_optimization"), bool):
        config["zero_optimization"] = {"stage": int(zero)}


def as_deepspeed_reads_it(config: Mapping[str, Any]) -> Config:
    """Returns a configuration with old and alternative spellings replaced by those that this program reads."""
    read: Config = copy.deepcopy(dict(config))
    for name in ("bf16", "fp16"):
        enabled = read.get(name, {}).get("enabled")
        if isinstance(enabled, str):  # as pydantic reads a text
            read[name]["enabled"] = enabled.lower() in ("true", "yes", "on", "1", "t", "y")
    if isinstance(optimizer := read.get("optimizer"), dict) and optimizer.get("params") is None:
        optimizer["params"] = {}
    zero = read.setdefault("zero_optimization", {})
    _rename_zero_keys(zero)
    if isinstance(stage := zero.get("stage"), (bool, float)):  # as pydantic reads them
        zero["stage"] = int(stage)
    return read


def _rename_zero_keys(zero: Config) -> None:
    for old, new in _OLD_OFFLOADS.items():
        if old in zero and zero.pop(old):
            zero[new] = {"device": "cpu"}
    for name, facts in deepspeed_keys.keys_of("zero_optimization").items():
        if facts.get("same_as") in zero:  # such as prefetch_bucket_size, of which the usual name has stage3_ before it
            zero.setdefault(name, zero.pop(facts["same_as"]))


def _without_unknown_keys(config: Config) -> tuple[Config, list[str]]:
    """The configuration without the top-level keys that DeepSpeed does not know and ignores, and a text about them."""
    known = deepspeed_keys.top_level_keys() | deepspeed_keys.removed_keys()
    unknown = []
    for key in config.keys() - known:
        near = deepspeed_keys.nearest_key(key, known, 0.85)
        unknown.append(f"{key} (did you mean {near}?)" if near else key)
    text = f"{format_names(sorted(unknown))}, which DeepSpeed does not know"
    return {key: value for key, value in config.items() if key in known}, [text] if unknown else []


def _remove_side_effects(config: Config) -> list[str]:
    """Removes what would write to folders that the file names, or send data. Returns what was removed."""
    removed = []
    for name in _MONITORS:
        if isinstance(block := config.pop(name, None), Mapping) and block.get("enabled"):
            removed.append(f"{name} (a comparison writes nothing elsewhere and sends nothing)")
    if isinstance(profiler := config.get("flops_profiler"), dict) and profiler.pop("output_file", None):
        removed.append("flops_profiler.output_file")
    for name in OFFLOAD_BLOCKS:
        if isinstance(block := config["zero_optimization"].get(name), dict):
            block.pop("nvme_path", None)  # a private folder below --nvme-path takes its place
    return removed


def _missing_optimizer(file: ConfigurationFile) -> Config:
    """The AdamW of a file without optimizer: that of the Trainer's arguments, else that of every other row."""
    if file.kind != "trainer":
        return {"type": "AdamW", "params": dict(deepspeed_config.ADAMW_PARAMETERS)}
    arguments = {**TRAINING_DEFAULTS, **file.arguments}
    betas = [arguments["adam_beta1"], arguments["adam_beta2"]]
    rest = {"eps": arguments["adam_epsilon"], "weight_decay": arguments["weight_decay"]}
    return {"type": "AdamW", "params": {"lr": arguments["learning_rate"], "betas": betas, **rest}}


def _check_values(config: Config) -> None:
    """Raises UsageError for what DeepSpeed refuses (``lint``), and for an optimizer that is none."""
    lint.refuse(config, lambda finding: finding.level == "error" and finding.rule not in _DECIDED_FOR_THE_ROW)
    optimizer = config.get("optimizer", {"type": "AdamW"})
    if not isinstance(optimizer.get("type"), str):
        raise UsageError("optimizer has no type", remedy="correct the file")
    if not isinstance(params := optimizer.get("params") or {}, dict):
        raise UsageError(f"optimizer.params is {params!r}, not a block", remedy="correct the file")


def _refused(file: ConfigurationFile, batch_size: int, reason: str) -> Configuration:
    """The configuration of a file that is not run: as much of it as can be shown."""
    zero = file.config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else 0
    # type() and not isinstance(), for which true is an int.
    known = stage if type(stage) is int and 0 <= stage <= 3 else 0
    return Configuration(
        name=file.name,
        label=file.name,
        deepspeed_config={
            "train_micro_batch_size_per_gpu": batch_size,
            "optimizer": {"type": "AdamW", "params": {}},
            "zero_optimization": {"stage": known},
        },
        source="file",
        file_text=file.text,
        refusal=reason,
    )
