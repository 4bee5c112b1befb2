"""Finds what is wrong, ineffective or unset in a DeepSpeed configuration, without DeepSpeed, torch or a GPU.

Keys, types and defaults are generated from DeepSpeed (``deepspeed_keys``); other facts come from ``rules``. An error
is something that DeepSpeed rejects, when it reads the configuration or later. A warning is something that it ignores,
or does differently from what the file says. A hint is worth knowing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UsageError
from ..system.redaction import REDACTED, looks_secret, redacted_config
from ..units import format_bytes, format_count, format_items, format_names, format_series
from . import deepspeed_keys
from .automatic_values import TrainingFacts, fill_in
from .axes import ZERO
from .deepspeed_config import ADAMW_PARAMETERS, AUTO, nested, paths_of_auto
from .rules import RULES, TRAINING_STARTS, Case, Level, ModelSize, without_later_keys
from .spec import BATCH_KEYS

Config = Mapping[str, Any]
_CONFIG, _ENGINE = "runtime/config.py", "runtime/engine.py"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about a configuration."""

    rule: str
    """Stable name: ``unknown-key``."""
    level: Level
    path: str
    """Dotted path of the key, blocks first; empty for the whole configuration."""
    reason: str
    remedy: str
    source: str
    """DeepSpeed source file that shows it, relative to the package."""
    line: int | None = None
    """Line of the file, from 1; None if unknown."""
    stops_when: str = ""
    """When DeepSpeed raises its error; empty: when it reads the configuration, or never."""
    column: int | None = None
    """Column of the line at which the key begins, from 1; None if unknown."""

    def at(self, position: tuple[int, int] | None) -> Finding:
        """Return the finding with this line and column; unchanged if ``position`` is None."""
        return self if position is None else replace(self, line=position[0], column=position[1])

    @property
    def text(self) -> str:
        return f"{self.reason}: DeepSpeed stops when {self.stops_when}" if self.stops_when else self.reason


def check_config(
    config: Config,
    *,
    num_gpus: int | None = None,
    model: ModelSize | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> list[Finding]:
    """Return the findings, in the order of the checks.

    ``num_gpus``: ranks of the job, for the batch sizes. ``model``: for the sizes of buffers. ``compute_capability``:
    the oldest GPU's, for the number format.
    """
    # Findings about keys use the spelling of the file; the other checks see what DeepSpeed reads: bfloat16 if
    # there is no bf16, and no key of a later version.
    written = Case(config=config)
    renamed = {**config, "bf16": config["bfloat16"]} if "bfloat16" in config and config.get("bf16") is None else config
    read = without_later_keys(renamed)
    case = Case(config=read, num_gpus=num_gpus, model=model, compute_capability=compute_capability)
    removed = f"the feature was removed in DeepSpeed {deepspeed_keys.REMOVED_IN}, which rejects the key"
    found = [
        *_unknown_top_level_keys(config),
        *(
            Finding("removed-key", "error", path, removed, _REMOVED_REMEDIES.get(path, "remove it"), _CONFIG)
            for path in sorted(deepspeed_keys.removed_keys())
            if not deepspeed_keys.is_before(deepspeed_keys.REMOVED_IN)
            if path.rpartition(".")[2] in (written.block(path.rpartition(".")[0]) if "." in path else config)
        ),
        *_nested_findings(written),
        *_batch_findings(case),
        *_optimizer_findings(case),
        *_scheduler_findings(case),
        *_text_arguments(case),
    ]
    # Rules skip a key that DeepSpeed rejects anyway.
    refused = {finding.path for finding in found if finding.level == "error"}
    for rule in RULES:
        if rule.level and rule.path not in refused and rule.applies(case):
            reason = rule.reason_for(case)
            found.append(
                Finding(rule.name, rule.level, rule.path, reason, rule.remedy, rule.source, None, rule.stops_when)
            )
    found += [*_keys_without_reader(case), *_buffer_findings(case), *_automatic_values(config)]
    # Findings that say less than a rule about the same key are left out.
    less = ("unknown-key", "ignored-key")
    reported = {finding.path for finding in found if finding.rule not in less}
    return [finding for finding in found if finding.rule not in less or finding.path not in reported]


def refuse(config: Config, is_refused: Callable[[Finding], bool]) -> None:
    """Raise UsageError for the first finding that the caller refuses."""
    found = next(filter(is_refused, check_config(config)), None)
    if found is not None:
        raise UsageError(f"{found.path}: {found.text}", remedy=found.remedy)


# Keys


_BLOCKS_WITH_COMMON_KEYS = ("autotuning", "data_efficiency", "expert_parallel", "checkpoint.writer")
"""Blocks with key names so common that a match does not tell where a misplaced key belongs."""
_MEANT = {
    "comms_config": "did you mean comms_logger?",
    "cuda_visible_devices": "set the environment variable CUDA_VISIBLE_DEVICES, or start with --include",
    "autotuning_config": "did you mean autotuning?",
    "compile.backend": "give it to engine.compile()",
    "compile.disable": "remove it; nothing is compiled before engine.compile() is called",
}
"""Remedies for keys found in public configurations that resemble no DeepSpeed key."""
_REMOVED_REMEDIES = {
    "amp": "use bf16, fp16 or torch_autocast",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
    "elasticity": "set the batch keys themselves",
    f"{ZERO}mics_shard_size": "use zero_hpz_partition_size (ZeRO++), or DeepSpeed 0.19.6 for MiCS",
    f"{ZERO}mics_hierarchical_params_gather": "remove it with mics_shard_size, or use DeepSpeed 0.19.6",
}


def _unknown_top_level_keys(config: Config) -> Iterator[Finding]:
    unknown, known = [], deepspeed_keys.top_level_keys()
    for key, value in config.items():
        if key in known or key in deepspeed_keys.removed_keys():
            continue
        if key.startswith(("_", "//", "#")) or key.lower() in ("comment", "comments", "description"):
            reason = "DeepSpeed has no such key and ignores it"
            instead = "remove it, or write it after //, which DeepSpeed accepts but the Trainer and Accelerate reject"
            yield Finding("comment-key", "hint", key, reason, instead, _CONFIG)
            continue
        if since := deepspeed_keys.keys_added_later().get(key):
            reason = f"DeepSpeed {deepspeed_keys.version()} ignores it; {since} reads it"
            yield Finding("later-key", "warning", key, reason, f"use DeepSpeed {since} or later", _CONFIG)
            continue
        inner = [name for name in value if name in known] if isinstance(value, Mapping) else []
        if key in _MEANT:
            remedy = _MEANT[key]
        elif places := _blocks_with(key):
            remedy = f"it belongs inside {' or '.join(places[:3])}"
        elif near := deepspeed_keys.nearest_key(key.replace("-", "_"), known, 0.85):
            remedy = f"did you mean {near}?"
        elif inner:
            remedy = f"its {format_names(inner)} belong{'s' if len(inner) == 1 else ''} at the top level"
        else:
            unknown.append(key)
            continue
        yield Finding("ignored-key", "warning", key, "DeepSpeed ignores it at the top level", remedy, _CONFIG)
    if unknown:
        count, them = format_items(len(unknown), "top-level key"), "it" if len(unknown) == 1 else "them"
        reason = f"DeepSpeed ignores {count} that it does not know: {format_names(unknown)}"
        yield Finding("ignored-key", "warning", unknown[0], reason, f"remove {them}", _CONFIG)


def _blocks_with(key: str) -> list[str]:
    blocks = deepspeed_keys.blocks().items()
    return [path for path, block in blocks if path and key in block["keys"] and path not in _BLOCKS_WITH_COMMON_KEYS]


def _nested_findings(case: Case) -> Iterator[Finding]:
    for path, block in deepspeed_keys.blocks().items():
        values = case.block(path) if path else case.config
        source, known = block.get("source", _CONFIG), block["keys"]
        for key, value in values.items():
            place = f"{path}.{key}" if path else key
            if key not in known:
                if path and place not in deepspeed_keys.removed_keys():
                    yield _unknown_nested_key(path, key, values, block)
                continue
            if "deprecated" in known[key]:
                yield _old_name(place, known[key]["deprecated"], values, known, source)
            if value != AUTO and (problem := _type_problem(place, value, known[key])):
                yield Finding("type", "error", place, *problem, source)
            elif "schema" not in known[key] and isinstance(value, str) and value != AUTO:
                default = known[key]["default"]
                if isinstance(default, bool):
                    reason = f"the text {_shown(value)} counts as true, since DeepSpeed does not convert it"
                    remedy = "write true or false without quotes"
                    yield Finding("text-as-switch", "warning", place, reason, remedy, source)
                elif isinstance(default, (int, float)):
                    reason = f"DeepSpeed does not convert the text {_shown(value)} to a number"
                    remedy = "write the number without quotes"
                    yield Finding("text-as-number", "warning", place, reason, remedy, source)
            if (same_as := known[key].get("same_as")) in values:
                reason = f"DeepSpeed rejects {same_as} together with {key}, which is the same setting"
                yield Finding("named-twice", "error", f"{path}.{same_as}", reason, "keep one", source)


def _unknown_nested_key(path: str, key: str, values: Config, block: Mapping[str, Any]) -> Finding:
    # A switch under the name of its block: {"fp16": {"fp16": true}}.
    switch = "enabled" if key == path and "enabled" in block["keys"] else None
    near = switch or deepspeed_keys.nearest_key(key, block["keys"], 0.7)
    if since := deepspeed_keys.keys_added_later().get(f"{path}.{key}"):
        remedy = f"use DeepSpeed {since} or later, or remove it"
    elif near is not None:
        remedy = f"did you mean {near}, which is set already?" if near in values else f"did you mean {near}?"
    elif key == path:
        remedy = f"put its keys into {path} itself"
    elif key in deepspeed_keys.top_level_keys():
        remedy = "it belongs at the top level"
    elif f"{path}.{key}" in _MEANT:
        remedy = _MEANT[f"{path}.{key}"]
    else:
        others, few = _blocks_with(key), len(block["keys"]) <= 12
        remedy = f"remove it; {path} accepts {', '.join(sorted(block['keys']))}" if few and not others else "remove it"
        remedy = f"remove it; it is a key of {' and '.join(others[:3])}" if others else remedy
    source = block.get("source", _CONFIG)
    # DeepSpeed drops "auto" before its pydantic model sees the key (runtime/config_utils.py).
    if block["unknown"] == "refused" and values[key] != AUTO:
        reason = f"{path} has no such key, and DeepSpeed rejects it"
        return Finding("unknown-key", "error", f"{path}.{key}", reason, remedy, source)
    reason = "DeepSpeed does not know this key here and ignores it"
    return Finding("unknown-key", "warning", f"{path}.{key}", reason, remedy, source)


def _old_name(
    place: str, deprecated: Mapping[str, Any], values: Config, known: Mapping[str, Any], source: str
) -> Finding:
    use = deprecated["use"]
    if not deprecated["sets"]:
        remedy = f"set pin_memory in {use}" if "pin_memory" in place else f"use {use}"
        return Finding("old-name", "warning", place, "DeepSpeed no longer reads it", remedy, source)
    if "cpu_offload" in place and values[place.rpartition(".")[2]] is False:
        return Finding("old-name", "warning", place, f"an old name; false means no {use}", "remove it", source)
    names = {use, *(name for name, entry in known.items() if entry.get("same_as") == use)}
    use = next((name for name in names if name.startswith("stage3_")), use)  # the usual name
    if names & values.keys():
        reason = f"DeepSpeed rejects this old name of {use} together with it"
        return Finding("old-name", "error", place, reason, "remove it", source)
    example = f'"{use}": {{"device": "cpu"}}' if "cpu_offload" in place else use
    reason = f"this is an old name, which DeepSpeed reads as {use}"
    return Finding("old-name", "warning", place, reason, f"write {example}", source)


def _type_problem(place: str, value: object, entry: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why DeepSpeed rejects the type or size of the value, with the remedy; None if DeepSpeed accepts it."""
    if "accepts" in entry:
        names_of = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
        kind = names_of.get(type(value), "object" if isinstance(value, Mapping) else "null")
        if kind in entry["accepts"]:
            return None
        kinds = [each for each in entry["accepts"] if each != "boolean" or isinstance(entry["default"], bool)]
        kinds = [each for each in kinds if each != "null"] or kinds
        names = [{"object": "an object {…}", "null": "null"}.get(each, f"a {each}") for each in kinds]
        reason = f"DeepSpeed rejects {_shown_without_secrets(place, value)}, a JSON {kind}"
        return reason, f"give {format_series(names)}"
    schema = entry.get("schema", {"type": "any"})
    if schema["type"] == "any":
        return None
    message = "no JSON value fits"
    if schema["type"] != "never":
        from pydantic_core import SchemaValidator, ValidationError

        try:
            SchemaValidator(dict(schema)).validate_python(value)
            return None
        except ValidationError as error:
            message = error.errors()[0]["msg"]
    reason = f"DeepSpeed rejects {_shown_without_secrets(place, value)}"
    if allowed := schema.get("expected"):
        return reason, f"give {format_series(allowed)}"
    remedy = f"correct it, or remove it: the default is {_shown(entry['default'])}"
    return f"{reason}: {message[0].lower()}{message[1:]}", remedy


# Batch sizes


def _batch_findings(case: Case) -> Iterator[Finding]:
    """Check whether train_batch_size = micro-batch × accumulation × ranks can hold (``DeepSpeedConfig``)."""
    written = [case.config.get(key) for key in BATCH_KEYS]
    total, micro, accumulation = values = [case.value(key) for key in BATCH_KEYS]
    if not all(isinstance(value, (int, float, type(None))) for value in values):
        return  # reported as a wrong type
    for key, value in zip(BATCH_KEYS, values, strict=True):
        if value is not None and value <= 0:
            reason = f"DeepSpeed rejects {_shown(value)}, which is not above 0"
            yield Finding("batch-size", "error", key, reason, "give 1 or more", _CONFIG)
            return
    if written[0] is None and written[1] is None:
        reason = "DeepSpeed needs train_batch_size or train_micro_batch_size_per_gpu, and the file has neither"
        remedy = "add train_micro_batch_size_per_gpu, unless the training script adds it"
        yield Finding("batch-size", "error", "", reason, remedy, _CONFIG)
    if AUTO in written or total is None:
        return  # the product is unknown if another program fills a key in
    given = zip(BATCH_KEYS[1:], (micro, accumulation), strict=True)
    parts = [f"{key} {_shown(value)}" for key, value in given if value is not None]
    product = (micro or 1) * (accumulation or 1)
    # DeepSpeed divides the ranks by sequence_parallel_size too (runtime/config.py).
    ranks = case.num_gpus / max(1, case.number("sequence_parallel_size", 1)) if case.num_gpus else None
    exactly = ranks is not None and len(parts) == 2
    if total % (product * (ranks or 1)) or (exactly and total != product * (ranks or 1)):
        factors = " × ".join([*parts, *([f"{ranks:g} data-parallel ranks"] if ranks else [])])
        relation = "is not" if exactly else "is not a multiple of"
        reason = f"train_batch_size {_shown(total)} {relation} {factors}, and DeepSpeed rejects it"
        remedy = "leave train_batch_size out, and DeepSpeed computes it"
        yield Finding("batch-size", "error", "train_batch_size", reason, remedy, _CONFIG)
    elif ranks is None and len(parts) == 2:
        needed = int(total // product)
        reason = f"the three batch keys are consistent only with {format_items(needed, 'data-parallel rank')}"
        remedy = "leave train_batch_size out to use the file with any number of GPUs"
        yield Finding("batch-for-one-number-of-ranks", "hint", "train_batch_size", reason, remedy, _CONFIG)


# Optimizer and scheduler


def _stops(rule: str, path: str, reason: str, remedy: str, source: str = _ENGINE) -> Finding:
    return Finding(rule, "error", path, reason, remedy, source, stops_when=TRAINING_STARTS)


def _optimizer_findings(case: Case) -> Iterator[Finding]:
    name, known, path = case.value("optimizer.type"), deepspeed_keys.tables()["optimizers"], "optimizer.type"
    if not isinstance(name, str):
        return
    if case.optimizer in {"onebitadam", "onebitlamb", "zerooneadam"} - {*known["names"]}:
        if deepspeed_keys.is_before(deepspeed_keys.REMOVED_IN):
            return
        reason = f"{name} was removed in DeepSpeed {deepspeed_keys.REMOVED_IN}"
        yield _stops("removed-optimizer", path, reason, "use AdamW, or DeepSpeed 0.19.6")
        return
    if case.optimizer not in known["names"] and name not in known["torch_names"]:
        spellings = {each.lower(): each for each in (*known["torch_names"], *known["names"])}
        near = deepspeed_keys.nearest_key(name.lower(), spellings)
        others = "use AdamW, Adam, Adagrad, Lamb, Lion, Muon or an optimizer from torch.optim"
        reason = f"neither DeepSpeed nor torch.optim has an optimizer {name!r}"
        yield _stops("unknown-optimizer", path, reason, f"did you mean {spellings[near]}?" if near else others)
        return
    tested = case.stage not in (1, 2, 3) or case.optimizer in ("adam", "adamw", "adagrad", "lion", "muon")
    if not tested and not case.is_on("zero_allow_untested_optimizer"):
        remedy = "add zero_allow_untested_optimizer: true, or use AdamW"
        yield _stops("untested-optimizer", path, f"{name} is not tested with ZeRO", remedy)
    class_name: str | None  # of the optimizer that DeepSpeed instantiates; None if it accepts any parameters
    offloaded, read_by_deepspeed = case.offload("optimizer") is not None, tuple[str, ...]()
    if case.optimizer in ("adam", "adamw"):
        on_cpu = "ZenFlowCPUAdam" if case.has_block(f"{ZERO}zenflow") else "DeepSpeedCPUAdam"
        own_adam = on_cpu if offloaded else "FusedAdam"
        class_name = "torch.optim.AdamW" if case.is_on("optimizer.params.torch_adam") else own_adam
        read_by_deepspeed = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
    elif case.optimizer in known["names"]:
        class_name = {
            "adagrad": "DeepSpeedCPUAdagrad" if offloaded else "torch.optim.Adagrad",
            "lion": "DeepSpeedCPULion" if offloaded else "FusedLion",
            "lamb": "FusedLamb",
        }.get(case.optimizer)
    else:
        class_name = f"torch.optim.{name}"
    if class_name is not None:
        given = [key for key in case.block("optimizer.params") if key not in (*read_by_deepspeed, "max_grad_norm")]
        yield from _argument_findings("optimizer", class_name, given, known["classes"][class_name], _ENGINE)


def _argument_findings(
    block: str, maker: str, given: list[str], arguments: Mapping[str, Any], source: str
) -> Iterator[Finding]:
    takes = arguments["takes"]
    for key in given:
        if takes is not None and key not in takes:
            near = deepspeed_keys.nearest_key(key, takes)
            remedy = f"did you mean {near}?" if near else f"remove it; {maker} takes {format_names(takes)}"
            reason = f"{maker} takes no argument {key}"
            yield _stops("unknown-argument", f"{block}.params.{key}", reason, remedy, source)
    if missing := format_names([key for key in arguments["needs"] if key not in given]):
        yield _stops("missing-argument", f"{block}.params", f"{maker} needs {missing}", f"add {missing}", source)


def _scheduler_findings(case: Case) -> Iterator[Finding]:
    name, known, source = case.value("scheduler.type"), deepspeed_keys.tables()["schedulers"], "runtime/lr_schedules.py"
    if not isinstance(name, str):
        return
    if name not in known:
        near = deepspeed_keys.nearest_key(name, known)
        remedy = f"did you mean {near}?" if near else "use WarmupLR, WarmupDecayLR, WarmupCosineLR or OneCycle"
        reason = f"neither DeepSpeed nor torch has a scheduler {name!r}"
        yield _stops("unknown-scheduler", "scheduler.type", reason, remedy)
        return
    params = case.value("scheduler.params")
    if not isinstance(params, Mapping):
        yield _stops("missing-argument", "scheduler", "the scheduler has no params", "add params, at least {}")
        return
    yield from _argument_findings("scheduler", name, list(params), known[name], source)
    steps = params.get("warmup_num_steps", 1)
    if name.startswith("Warmup") and steps != AUTO and (type(steps) is not int or steps <= 0):
        reason = f"{_shown(steps)} is not a whole number above 0"
        yield _stops("warmup-steps", "scheduler.params.warmup_num_steps", reason, "give 1 or more", source)


def _text_arguments(case: Case) -> Iterator[Finding]:
    """Find numbers in optimizer or scheduler parameters that are text, which DeepSpeed does not convert."""

    def is_number(text: str) -> bool:
        try:
            float(text)
        except ValueError:
            return False
        return True

    for block in ("optimizer", "scheduler"):
        for key, value in case.block(f"{block}.params").items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and text != AUTO and (key in ADAMW_PARAMETERS or is_number(text)):
                    reason, path = f"{_shown(text)} is text, not a number", f"{block}.params.{key}"
                    yield _stops("text-argument", path, reason, "write a number, without quotes")


# Settings that nothing reads, and buffers


_REPORTED_ELSEWHERE = ("stage", "offload_optimizer", "offload_param", "zenflow", "cpu_offload")
"""Keys of ``zero_optimization`` whose lack of effect other findings report."""


def _keys_without_reader(case: Case) -> Iterator[Finding]:
    zero, stage = case.block("zero_optimization"), case.stage
    dead = {"disable_allgather": _ENGINE, f"{ZERO}allgather_partitions": _ENGINE}
    if not case.has_block(f"{ZERO}zenflow"):  # ZenFlow's selective optimizer has buckets of this size
        # all_gather_dp_groups splits by this size only if PyTorch lacks all_gather_into_tensor.
        dead[f"{ZERO}allgather_bucket_size"] = "runtime/utils.py"
    for path, source in dead.items():
        if path.removeprefix(ZERO) in (zero if path.startswith(ZERO) else case.config):
            reason = f"nothing in DeepSpeed {deepspeed_keys.version()} acts on it"
            yield Finding("dead-key", "hint", path, reason, "remove it", source)
    reported = {*_REPORTED_ELSEWHERE, *(path.removeprefix(ZERO) for path in dead)}
    known = deepspeed_keys.keys_of("zero_optimization").keys() - reported
    unread = [
        key for key in zero if stage is not None and key in known and not deepspeed_keys.is_read_at_stage(key, stage)
    ]
    if unread:
        reason = f"DeepSpeed does not act on {format_names(unread)} at stage {stage}"
        they = "them" if len(unread) > 1 else "it"
        remedy = f"remove {they}, or keep {they} for another stage"
        yield Finding("unread-key", "hint", f"{ZERO}{unread[0]}", reason, remedy, _ENGINE)


def _buffer_findings(case: Case) -> Iterator[Finding]:
    model, stage = case.model, case.stage
    if model is None or stage is None or stage == 0:
        return
    defaults = {key: entry["default"] for key, entry in deepspeed_keys.keys_of("zero_optimization").items()}

    def elements(key: str) -> float:
        # "auto" is not a size that could be compared with the model's.
        return 0 if case.block("zero_optimization").get(key) == AUTO else case.number(f"{ZERO}{key}", defaults[key])

    bucket, parameters = elements("reduce_bucket_size"), format_count(model.parameters)
    if bucket > model.parameters:
        reason = (
            f"reduce_bucket_size {format_count(bucket)} is more than the {parameters} parameters of {model.name}: a "
            f"buffer of {format_bytes(2 * bucket)} in bf16 or fp16, whatever the model"
        )
        remedy = f"set it to {_round_size(model.parameters)} or less"
        source = "runtime/zero/stage_1_and_2.py" if stage < 3 else "runtime/zero/stage3.py"
        yield Finding("bucket-larger-than-model", "warning", f"{ZERO}reduce_bucket_size", reason, remedy, source)
    if stage != 3:
        return
    path, live = f"{ZERO}stage3_max_live_parameters", elements("stage3_max_live_parameters")
    # One rank has nothing to gather, unless the parameters are offloaded.
    if live >= model.parameters and (case.num_gpus != 1 or case.offload("param")):
        reason = (
            f"stage3_max_live_parameters {format_count(live)} lets all {parameters} parameters of {model.name} stay "
            "gathered on every GPU, so stage 3 saves little"
        )
        limit = _round_size(model.parameters / 10)
        remedy = f"set stage3_max_live_parameters and stage3_max_reuse_distance to {limit} or less"
        source = "runtime/zero/partitioned_param_coordinator.py"
        yield Finding("model-stays-gathered", "hint", path, reason, remedy, source)
    path = f"{ZERO}offload_param.buffer_size"
    buffer = case.number(path, deepspeed_keys.keys_of(f"{ZERO}offload_param")["buffer_size"]["default"])
    needed = -(-model.largest_parameter // case.num_gpus) if case.num_gpus else 0
    if case.offload("param") == "nvme" and buffer < needed:
        reason = (
            f"buffer_size {format_count(buffer)} is less than the {format_count(needed)} elements of {model.name}'s "
            "largest tensor that a rank holds"
        )
        source, remedy = "runtime/swap_tensor/partitioned_param_swapper.py", f"set it to {needed} or more"
        yield Finding("swap-buffer-too-small", "error", path, reason, remedy, source, stops_when="it swaps that tensor")


def _round_size(elements: float) -> str:
    """Round a size down to two digits: ``120000000``."""
    digits = max(0, len(str(int(elements))) - 2)
    return str(int(elements) // 10**digits * 10**digits)


# Automatic values

_ANY_FACTS = TrainingFacts(num_gpus=1, precision="bf16", hidden_size=1)


def _automatic_values(config: Config) -> Iterator[Finding]:
    automatic = []
    for path in paths_of_auto(config):
        parent, _, key = path.rpartition(".")
        block = deepspeed_keys.blocks().get(parent)
        if block is not None and block["keys"].get(key, {}).get("default") == AUTO:
            continue  # DeepSpeed's own value
        read = not deepspeed_keys.refuses_unknown(parent) and (parent or key in deepspeed_keys.top_level_keys())
        # Ask the code that fills in "auto", so that the keys are listed nowhere else; any facts will do.
        if read and any(paths_of_auto(fill_in(nested(path, AUTO), _ANY_FACTS)[0])):
            reason = 'neither the Trainer nor Accelerate fills in "auto" here, and DeepSpeed treats it as text'
            yield Finding("unfilled-automatic-value", "warning", path, reason, "give a value", _CONFIG)
        else:
            automatic.append(path)
    if not automatic:
        return
    case = Case(config=config)
    dropped = [path for path in automatic if deepspeed_keys.refuses_unknown(path.rpartition(".")[0])]
    as_text = [path for path in automatic if path not in dropped]
    # DeepSpeed 0.16 and earlier do not convert the fp16 and bf16 switches: both together are rejected, and one alone
    # counts as true.
    fails = "fails on" + (", or treats as true," if {"bf16.enabled", "fp16.enabled"} & {*as_text} else "")
    in_fp32 = case.precision == "fp32" and not case.is_on("torch_autocast.enabled")
    otherwise = [
        *([f"uses its default for {format_names(dropped, most=4)}"] if dropped else []),
        *(["trains in fp32"] if in_fp32 and {"bf16.enabled", "fp16.enabled"} & set(dropped) else []),
    ]
    effects = " and ".join(otherwise)
    if as_text:
        then = f"; once these have values, it {effects}" if effects else ""
        effects = f"{fails} {format_names(as_text, most=4)}{then}"
    several = f'{len(automatic)} values are "auto"' if len(automatic) > 1 else 'a value is "auto"'
    reason = f"{several}, which only the Trainer and Accelerate fill in; on its own, DeepSpeed {effects}"
    remedy = "give values if a training script passes the file directly to DeepSpeed"
    yield Finding("automatic-value", "hint", automatic[0], reason, remedy, "runtime/config_utils.py")


# Texts


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def _shown_without_secrets(place: str, value: object) -> str:
    """Return a value as JSON without credentials, since findings are shown to others in logs and annotations."""
    if isinstance(value, (int, float)):
        return REDACTED if looks_secret(place, str(value)) else _shown(value)
    return _shown(redacted_config({place: value})[place])
