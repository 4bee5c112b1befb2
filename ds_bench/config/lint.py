"""Finds what is wrong, ineffective or left open in a DeepSpeed configuration, without DeepSpeed, torch or a GPU.

The keys, their types and defaults are generated from DeepSpeed (``deepspeed_keys``), the facts are those of ``rules``.
An error is what DeepSpeed refuses, when it reads the configuration or when training starts; a warning is what it
ignores or does otherwise than the file says; a hint is what the reader may want to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..system.redaction import REDACTED, looks_secret, redacted_config
from ..units import format_bytes, format_count, format_names
from . import deepspeed_keys
from .automatic_values import TrainingFacts, fill_in
from .deepspeed_config import ADAMW_PARAMETERS, AUTO, nested, paths_of_auto
from .rules import RULES, Case, Level, ModelSize
from .spec import BATCH_KEYS

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about a configuration."""

    rule: str
    """Stable name: ``unknown-key``."""
    level: Level
    path: str
    """Key, its blocks before it with dots; empty for the whole configuration."""
    reason: str
    remedy: str
    source: str
    """File of DeepSpeed, below its package, that shows it."""
    line: int | None = None
    """Line of the file, from 1; None where the place is not known."""


def check_config(
    config: Config,
    *,
    num_gpus: int | None = None,
    model: ModelSize | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> list[Finding]:
    """Returns what is found, in the order of the checks.

    ``num_gpus``: ranks of the job, for the batch sizes. ``model``: for the sizes of buffers. ``compute_capability``: of
    the oldest GPU, for the number format.
    """
    # Findings about keys use the spelling of the file; the other checks see the blocks that DeepSpeed reads.
    written = Case(config=config)
    # DeepSpeed reads the block under its old name where there is no bf16.
    renamed = {**config, "bf16": config["bfloat16"]} if "bfloat16" in config and config.get("bf16") is None else config
    case = Case(config=renamed, num_gpus=num_gpus, model=model, compute_capability=compute_capability)
    found = [
        *_unknown_top_level_keys(config),
        *_removed_keys(written),
        *_nested_findings(written),
        *_batch_findings(case),
        *_optimizer_findings(case),
        *_scheduler_findings(case),
        *_text_arguments(case),
    ]
    # A key that DeepSpeed refuses anyway is not told again by a rule.
    refused = {finding.path for finding in found if finding.level == "error"}
    found += [
        Finding(rule.name, rule.level, rule.path, rule.reason_for(case), rule.remedy, rule.source)
        for rule in RULES
        if rule.level and rule.path not in refused and rule.applies(case)
    ]
    found += [*_keys_without_reader(case), *_buffer_findings(case), *_automatic_values(config)]
    told = {finding.path for finding in found if finding.rule not in _UNKNOWN}
    return [finding for finding in found if finding.rule not in _UNKNOWN or finding.path not in told]


def refuse(config: Config, is_refused: Callable[[Finding], bool]) -> None:
    """Raises UsageError for the first finding that the caller refuses."""
    found = next(filter(is_refused, check_config(config)), None)
    if found is not None:
        raise UsageError(f"{found.path}: {found.reason}", remedy=found.remedy)


_UNKNOWN = ("unknown-key", "ignored-key")
"""Findings that say less than a rule about the same key."""


# Keys


_ALSO_IN_OTHER_FILES = ("autotuning", "data_efficiency", "expert_parallel", "checkpoint.writer")
"""Blocks with keys of such common names that a key of that name elsewhere was not meant for them."""
_MEANT = {
    "comms_config": "did you mean comms_logger?",
    "cuda_visible_devices": "set the environment variable CUDA_VISIBLE_DEVICES, or start with --include",
    "autotuning_config": "did you mean autotuning?",
    "compile.backend": "give it to engine.compile()",
    "compile.disable": "remove it; nothing is compiled before engine.compile() is called",
}
"""What keys of public configurations were meant to do, where no key of DeepSpeed resembles them."""
_SIMILAR = 0.85


def _unknown_top_level_keys(config: Config) -> Iterator[Finding]:
    """Keys that DeepSpeed ignores. Those without any resemblance are told in one finding."""
    source, strangers = "runtime/config.py", []
    for key, value in config.items():
        if key in deepspeed_keys.top_level_keys() or key in deepspeed_keys.removed_keys():
            continue
        if _is_comment(key):
            reason = "DeepSpeed reads no comment of this form, and ignores the key"
            yield Finding("comment-key", "hint", key, reason, "write it behind //, which DeepSpeed reads", source)
        elif remedy := _place_of(key, value):
            yield Finding("ignored-key", "warning", key, "DeepSpeed ignores it at the top level", remedy, source)
        else:
            strangers.append(key)
    if strangers:
        several = f"DeepSpeed ignores {len(strangers)} top-level keys that it does not know: {format_names(strangers)}"
        reason = several if len(strangers) > 1 else "DeepSpeed ignores this top-level key, which it does not know"
        remedy = "remove them" if len(strangers) > 1 else "remove it"
        yield Finding("ignored-key", "warning", strangers[0], reason, remedy, source)


def _is_comment(key: str) -> bool:
    return key.startswith(("_", "//", "#")) or key.lower() in ("comment", "comments", "description")


def _place_of(key: str, value: object) -> str | None:
    """Where an unknown top-level key belongs, or what was meant; None if nothing is near."""
    if key in _MEANT:
        return _MEANT[key]
    places = [path for path in deepspeed_keys.blocks_with(key) if path not in _ALSO_IN_OTHER_FILES]
    if places:
        return f"it belongs inside {' or '.join(places[:3])}"
    inner = [name for name in value if name in deepspeed_keys.top_level_keys()] if isinstance(value, Mapping) else []
    near = deepspeed_keys.nearest_key(key.replace("-", "_"), deepspeed_keys.top_level_keys(), _SIMILAR)
    if near is not None:
        return f"did you mean {near}?"
    return f"its {format_names(inner)} belongs at the top level" if inner else None


_REMOVED_REMEDIES = {
    "amp": "use bf16, fp16 or torch_autocast",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
    "elasticity": "set the batch keys themselves",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size (ZeRO++), or DeepSpeed 0.19.6 for MiCS",
    "zero_optimization.mics_hierarchical_params_gather": "remove it with mics_shard_size, or use DeepSpeed 0.19.6",
}


def _removed_keys(case: Case) -> Iterator[Finding]:
    for path in sorted(deepspeed_keys.removed_keys()):
        parent, _, key = path.rpartition(".")
        if key in (case.block(parent) if parent else case.config):
            reason = "the feature was removed from DeepSpeed (0.19.7 or 0.19.8), which refuses the key"
            yield Finding(
                "removed-key", "error", path, reason, _REMOVED_REMEDIES.get(path, "remove it"), "runtime/config.py"
            )


def _nested_findings(case: Case) -> Iterator[Finding]:
    """Unknown keys, old names and wrong types, block by block."""
    for path, block in deepspeed_keys.blocks().items():
        values = case.block(path) if path else case.config
        source, known = block.get("source", "runtime/config.py"), block["keys"]
        for key, value in values.items():
            place = f"{path}.{key}" if path else key
            if key not in known:
                if path and place not in deepspeed_keys.removed_keys():
                    yield _unknown_nested_key(path, key, value, block)
                continue
            if "deprecated" in known[key]:
                yield _old_name(place, known[key]["deprecated"], values, known, source)
            if value != AUTO and (problem := _type_problem(place, value, known[key])):
                yield Finding("type", "error", place, *problem, source)
            elif "schema" not in known[key] and isinstance(value, str) and value != AUTO:
                yield from _text_for_another_type(place, value, known[key]["default"], source)
        yield from _named_twice(path, values, known, source)


def _unknown_nested_key(path: str, key: str, value: object, block: Mapping[str, Any]) -> Finding:
    # DeepSpeed drops "auto" before its pydantic model sees the key (runtime/config_utils.py).
    refused = block["unknown"] == "refused" and value != AUTO
    # A switch under the name of its block: {"fp16": {"fp16": true}}.
    near = "enabled" if key == path else deepspeed_keys.nearest_key(key, block["keys"], 0.7)
    others = [other for other in deepspeed_keys.blocks_with(key) if other not in _ALSO_IN_OTHER_FILES]
    if near is not None:
        remedy = f"did you mean {near}?"
    elif key in deepspeed_keys.top_level_keys():
        remedy = "it belongs at the top level"
    elif f"{path}.{key}" in _MEANT:
        remedy = _MEANT[f"{path}.{key}"]
    else:
        remedy = f"remove it; it is a key of {' and '.join(others[:3])}" if others else "remove it"
    reason = (
        f"DeepSpeed refuses this key, which {path} does not have"
        if refused
        else "DeepSpeed ignores this key, which it does not know here"
    )
    source = block.get("source", "runtime/config.py")
    return Finding("unknown-key", "error" if refused else "warning", f"{path}.{key}", reason, remedy, source)


def _old_name(
    place: str, deprecated: Mapping[str, Any], values: Config, known: Mapping[str, Any], source: str
) -> Finding:
    use = deprecated["use"]
    if not deprecated["sets"]:
        return Finding(
            "old-name",
            "warning",
            place,
            "DeepSpeed reads it no more",
            f"use pin_memory of {use}" if "pin_memory" in place else f"use {use}",
            source,
        )
    names = {use, *(name for name, entry in known.items() if entry.get("same_as") == use)}
    use = next((name for name in names if name.startswith("stage3_")), use)  # the usual name
    if names & values.keys():
        reason = f"DeepSpeed refuses this old name of {use} beside it"
        return Finding("old-name", "error", place, reason, "remove it", source)
    example = f'"{use}": {{"device": "cpu"}}' if "cpu_offload" in place else use
    return Finding(
        "old-name", "warning", place, f"this is an old name, which DeepSpeed reads as {use}", f"write {example}", source
    )


def _named_twice(path: str, values: Config, known: Mapping[str, Any], source: str) -> Iterator[Finding]:
    for key in values:
        same_as = known.get(key, {}).get("same_as")
        if same_as in values:
            reason = f"DeepSpeed refuses {same_as} beside {key}, which is the same setting"
            yield Finding("named-twice", "error", f"{path}.{same_as}", reason, "keep one", source)


_JSON_TYPES: dict[type, str] = {bool: "boolean", int: "number", float: "number", str: "string", list: "list"}


def _type_problem(place: str, value: object, entry: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why DeepSpeed refuses the value for its type or limits, with the remedy; None if it takes it."""
    if "accepts" in entry:
        kind = "null" if value is None else _JSON_TYPES.get(type(value), "object")
        if kind in entry["accepts"]:
            return None
        reason = f"DeepSpeed refuses {_shown_without_secrets(place, value)}, a JSON {kind}"
        kinds = [each for each in entry["accepts"] if each != "boolean" or isinstance(entry["default"], bool)]
        kinds = [each for each in kinds if each != "null"] or kinds
        return reason, f"give {_alternatives(map(_with_article, kinds))}"
    message = _schema_problem(value, entry.get("schema"))
    if message is None:
        return None
    allowed = entry["schema"].get("expected")
    remedy = f"give {_alternatives(map(str, allowed))}" if allowed else f"its default is {_shown(entry['default'])}"
    return f"DeepSpeed refuses {_shown_without_secrets(place, value)}: {message}", remedy


def _schema_problem(value: object, schema: Mapping[str, Any] | None) -> str | None:
    if schema is None or schema["type"] == "any":
        return None
    if schema["type"] == "never":
        return "no value of JSON fits"
    from pydantic_core import SchemaValidator, ValidationError

    try:
        SchemaValidator(dict(schema)).validate_python(value)
    except ValidationError as error:
        message: str = error.errors()[0]["msg"]
        return message[0].lower() + message[1:]
    return None


def _text_for_another_type(place: str, value: str, default: object, source: str) -> Iterator[Finding]:
    if isinstance(default, bool):
        reason = f"the text {_shown(value)} counts as true, since DeepSpeed does not convert it"
        yield Finding("text-as-switch", "warning", place, reason, "write true or false without quotes", source)
    elif isinstance(default, (int, float)):
        reason = f"DeepSpeed does not convert the text {_shown(value)} to a number"
        yield Finding("text-as-number", "warning", place, reason, "write the number without quotes", source)


# Batch sizes


def _batch_findings(case: Case) -> Iterator[Finding]:
    """Whether train_batch_size = micro-batch × accumulation × ranks can hold (``DeepSpeedConfig``)."""
    written = [case.config.get(key) for key in BATCH_KEYS]
    values = [case.value(key) for key in BATCH_KEYS]
    if not all(isinstance(value, (int, float, type(None))) for value in values):
        return  # the wrong type is told
    for key, value in zip(BATCH_KEYS, values, strict=True):
        if value is not None and value <= 0:
            reason = f"DeepSpeed refuses {_shown(value)}, which is not above 0"
            yield Finding("batch-size", "error", key, reason, "give 1 or more", "runtime/config.py")
            return
    if written[0] is None and written[1] is None:
        reason = "DeepSpeed needs train_batch_size or train_micro_batch_size_per_gpu, and the file has neither"
        remedy = "add train_micro_batch_size_per_gpu, unless the training script adds it"
        yield Finding("batch-size", "error", "", reason, remedy, "runtime/config.py")
    elif AUTO not in written and written[0] is not None:
        # Where another program fills a key in, the product is not known.
        total, micro, accumulation = values
        yield from _total_findings(case, total, micro, accumulation)


def _total_findings(case: Case, total: float, micro: float | None, accumulation: float | None) -> Iterator[Finding]:
    given = zip(BATCH_KEYS[1:], (micro, accumulation), strict=True)
    parts = [f"{key} {_shown(value)}" for key, value in given if value is not None]
    product = (micro or 1) * (accumulation or 1)
    # DeepSpeed divides the ranks by sequence_parallel_size too (runtime/config.py).
    ranks = case.num_gpus / max(1, case.number("sequence_parallel_size", 1)) if case.num_gpus else None
    exactly = ranks is not None and len(parts) == 2
    if total % (product * (ranks or 1)) or (exactly and total != product * (ranks or 1)):
        factors = " × ".join([*parts, *([f"{ranks:g} data-parallel ranks"] if ranks else [])])
        relation = "is not" if exactly else "is no multiple of"
        reason = f"train_batch_size {_shown(total)} {relation} {factors}, and DeepSpeed refuses it"
        remedy = "leave train_batch_size out, and DeepSpeed computes it"
        yield Finding("batch-size", "error", "train_batch_size", reason, remedy, "runtime/config.py")
    elif ranks is None and len(parts) == 2:
        needed = int(total // product)
        reason = f"the three batch keys agree on {needed} data-parallel {'rank' if needed == 1 else 'ranks'} only"
        remedy = "leave train_batch_size out to use the file with any number of GPUs"
        yield Finding("batch-for-one-number-of-ranks", "hint", "train_batch_size", reason, remedy, "runtime/config.py")


# Optimizer and scheduler


_REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
_SUPPORTED_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")


def _optimizer_findings(case: Case) -> Iterator[Finding]:
    name, known = case.value("optimizer.type"), deepspeed_keys.tables()["optimizers"]
    source = "runtime/engine.py"
    if not isinstance(name, str):
        return
    if case.optimizer in _REMOVED_OPTIMIZERS:
        reason = f"{name} was removed in DeepSpeed 0.19.7: DeepSpeed stops when training starts"
        yield Finding("removed-optimizer", "error", "optimizer.type", reason, "use AdamW, or DeepSpeed 0.19.6", source)
        return
    if case.optimizer not in known["names"] and name not in known["torch_names"]:
        spellings = {each.lower(): each for each in (*known["torch_names"], *known["names"])}
        near = deepspeed_keys.nearest_key(name.lower(), spellings)
        remedy = (
            f"did you mean {spellings[near]}?"
            if near
            else "use AdamW, Adam, Adagrad, Lamb, Lion, Muon or one of torch.optim"
        )
        reason = f"neither DeepSpeed nor torch.optim has an optimizer {name!r}: DeepSpeed stops when training starts"
        yield Finding("unknown-optimizer", "error", "optimizer.type", reason, remedy, source)
        return
    untested = case.stage in (1, 2, 3) and case.optimizer not in _SUPPORTED_WITH_ZERO
    if untested and not case.is_on("zero_allow_untested_optimizer"):
        reason = f"{name} is not tested with ZeRO: DeepSpeed stops when training starts"
        remedy = "add zero_allow_untested_optimizer: true, or use AdamW"
        yield Finding("untested-optimizer", "error", "optimizer.type", reason, remedy, source)
    class_name, read_before = _optimizer_class(case, name)
    if class_name is not None:
        given = [key for key in case.block("optimizer.params") if key not in (*read_before, "max_grad_norm")]
        yield from _argument_findings("optimizer", class_name, given, known["classes"][class_name], source)


def _optimizer_class(case: Case, name: str) -> tuple[str | None, tuple[str, ...]]:
    """The class that DeepSpeed makes, and the parameters that it reads itself; None where it gives on only some."""
    offloaded = case.offload("optimizer") is not None
    read_before = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
    if case.optimizer in ("adam", "adamw"):
        if case.is_on("optimizer.params.torch_adam"):
            return "torch.optim.AdamW", read_before
        on_cpu = "ZenFlowCPUAdam" if case.has_block("zero_optimization.zenflow") else "DeepSpeedCPUAdam"
        return on_cpu if offloaded else "FusedAdam", read_before
    own = {
        "adagrad": "DeepSpeedCPUAdagrad" if offloaded else "torch.optim.Adagrad",
        "lion": "DeepSpeedCPULion" if offloaded else "FusedLion",
        "lamb": "FusedLamb",
    }
    if case.optimizer in deepspeed_keys.tables()["optimizers"]["names"]:
        return own.get(case.optimizer), ()
    return f"torch.optim.{name}", ()


def _argument_findings(
    block: str, maker: str, given: list[str], arguments: Mapping[str, Any], source: str
) -> Iterator[Finding]:
    """Arguments that the class does not take, or that it needs."""
    takes = arguments["takes"]
    for key in given:
        if takes is not None and key not in takes:
            near = deepspeed_keys.nearest_key(key, takes)
            remedy = f"did you mean {near}?" if near else f"remove it; {maker} takes {format_names(takes)}"
            reason = f"{maker} takes no argument {key}: DeepSpeed stops when training starts"
            yield Finding("unknown-argument", "error", f"{block}.params.{key}", reason, remedy, source)
    missing = [key for key in arguments["needs"] if key not in given]
    if missing:
        reason = f"{maker} needs {format_names(missing)}: DeepSpeed stops when training starts"
        yield Finding("missing-argument", "error", f"{block}.params", reason, f"add {format_names(missing)}", source)


def _scheduler_findings(case: Case) -> Iterator[Finding]:
    name, known, source = case.value("scheduler.type"), deepspeed_keys.tables()["schedulers"], "runtime/lr_schedules.py"
    if not isinstance(name, str):
        return
    if name not in known:
        near = deepspeed_keys.nearest_key(name, known)
        reason = f"neither DeepSpeed nor torch has a scheduler {name!r}: DeepSpeed stops when training starts"
        remedy = f"did you mean {near}?" if near else "use WarmupLR, WarmupDecayLR, WarmupCosineLR or OneCycle"
        yield Finding("unknown-scheduler", "error", "scheduler.type", reason, remedy, "runtime/engine.py")
        return
    params = case.value("scheduler.params")
    if not isinstance(params, Mapping):
        reason = "a scheduler without params: DeepSpeed stops when training starts"
        yield Finding("missing-argument", "error", "scheduler", reason, "add params, {} at least", "runtime/engine.py")
        return
    yield from _argument_findings("scheduler", name, list(params), known[name], source)
    steps = params.get("warmup_num_steps", 1)
    if name.startswith("Warmup") and steps != AUTO and (type(steps) is not int or steps <= 0):
        reason = f"{_shown(steps)} is no whole number above 0: DeepSpeed stops when training starts"
        yield Finding("warmup-steps", "error", "scheduler.params.warmup_num_steps", reason, "give 1 or more", source)


def _text_arguments(case: Case) -> Iterator[Finding]:
    """Numbers that are given to the optimizer or the scheduler as text, which DeepSpeed passes on as it is."""
    for block in ("optimizer", "scheduler"):
        for key, value in case.block(f"{block}.params").items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and text != AUTO and (key in ADAMW_PARAMETERS or _is_number(text)):
                    reason = f"{_shown(text)} is text, not a number: DeepSpeed stops when training starts"
                    remedy = "write a number, without quotes"
                    yield Finding(
                        "text-argument", "error", f"{block}.params.{key}", reason, remedy, "runtime/engine.py"
                    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# Settings that nothing reads, and buffers


def _keys_without_reader(case: Case) -> Iterator[Finding]:
    zero, source = case.block("zero_optimization"), "runtime/engine.py"
    dead = [path for path in _DEAD_KEYS if path in case.config or path.rpartition(".")[2] in zero]
    for path in dead:
        yield Finding("dead-key", "hint", path, "nothing in DeepSpeed 0.19.8 acts on it", "remove it", source)
    known = deepspeed_keys.keys_of("zero_optimization").keys() - _TOLD_ELSEWHERE
    stage = case.stage
    unread = [
        key for key in zero if stage is not None and key in known and not deepspeed_keys.is_read_at_stage(key, stage)
    ]
    if unread:
        reason = f"DeepSpeed does not act on {format_names(unread)} at stage {stage}"
        they = "them" if len(unread) > 1 else "it"
        remedy = f"remove {they}, or keep {they} for another stage"
        yield Finding("unread-key", "hint", f"zero_optimization.{unread[0]}", reason, remedy, source)


_DEAD_KEYS = ("disable_allgather", "zero_optimization.allgather_partitions")
_TOLD_ELSEWHERE = ("stage", "offload_optimizer", "offload_param", "zenflow", "cpu_offload", "allgather_partitions")
"""Keys of ``zero_optimization`` of which other findings tell where they have no effect."""


def _buffer_findings(case: Case) -> Iterator[Finding]:
    """Buffers that are larger than the model."""
    if case.model is None or case.stage in (None, 0):
        return
    size, zero = case.model, "zero_optimization"
    defaults = {key: entry["default"] for key, entry in deepspeed_keys.keys_of(zero).items()}

    def elements(key: str) -> float:
        # "auto" asks for no size that could be compared with the model's.
        automatic = case.has_block(zero) and case.config[zero].get(key) == AUTO
        return 0 if automatic else case.number(f"{zero}.{key}", defaults[key])

    bucket = elements("reduce_bucket_size")
    if bucket > size.parameters:
        reason = (
            f"reduce_bucket_size {format_count(bucket)} is more than the {format_count(size.parameters)} parameters of "
            f"{size.name}: a buffer of {format_bytes(2 * bucket)} in 16 bit, whatever the model"
        )
        remedy = f"set it to {_round_size(size.parameters)} or less"
        yield Finding(
            "bucket-larger-than-model",
            "warning",
            f"{zero}.reduce_bucket_size",
            reason,
            remedy,
            "runtime/zero/stage_1_and_2.py" if case.stage < 3 else "runtime/zero/stage3.py",
        )
    if case.stage == 3:
        live = elements("stage3_max_live_parameters")
        if live >= size.parameters:
            reason = (
                f"stage3_max_live_parameters {format_count(live)} lets all {format_count(size.parameters)} parameters "
                f"of {size.name} stay gathered on every GPU, and stage 3 then saves little"
            )
            least = _round_size(size.parameters / 10)
            remedy = f"set stage3_max_live_parameters and stage3_max_reuse_distance to {least} or less"
            yield Finding(
                "model-stays-gathered",
                "hint",
                f"{zero}.stage3_max_live_parameters",
                reason,
                remedy,
                "runtime/zero/partitioned_param_coordinator.py",
            )
        yield from _swap_buffer_findings(case, size)


def _swap_buffer_findings(case: Case, size: ModelSize) -> Iterator[Finding]:
    path = "zero_optimization.offload_param.buffer_size"
    buffer = case.number(path, deepspeed_keys.keys_of("zero_optimization.offload_param")["buffer_size"]["default"])
    if (
        case.offload("param") == "nvme"
        and case.num_gpus
        and buffer < (needed := -(-size.largest_parameter // case.num_gpus))
    ):
        reason = (
            f"buffer_size {format_count(buffer)} is less than the {format_count(needed)} elements that a rank holds of "
            f"the largest tensor of {size.name}: DeepSpeed stops when it swaps it"
        )
        yield Finding(
            "swap-buffer-too-small",
            "error",
            path,
            reason,
            f"set it to {needed} or more",
            "runtime/swap_tensor/partitioned_param_swapper.py",
        )


def _round_size(elements: float) -> str:
    """A size of two digits at most, as a number of JSON: ``120000000``."""
    digits = max(0, len(str(int(elements))) - 2)
    return str(int(elements) // 10**digits * 10**digits)


# Automatic values


def _automatic_values(config: Config) -> Iterator[Finding]:
    """What "auto" means to DeepSpeed, which does not know it."""
    automatic = [path for path in paths_of_auto(config) if not _is_deepspeeds_own(path)]
    unfilled = [path for path in automatic if _is_unfilled(path)]
    for path in unfilled:
        reason = 'neither the Trainer nor Accelerate fills in "auto" here, and DeepSpeed takes it as text'
        yield Finding("unfilled-automatic-value", "warning", path, reason, "give a value", "runtime/config.py")
    automatic = [path for path in automatic if path not in unfilled]
    if not automatic:
        return
    case = Case(config=config)
    dropped = [path for path in automatic if path.rpartition(".")[0] in deepspeed_keys.refusing_blocks()]
    as_text = [path for path in automatic if path not in dropped]
    in_fp32 = case.precision == "fp32" and not case.is_on("torch_autocast.enabled")
    effects = [
        *([f"fails at this text in {format_names(as_text, most=4)}"] if as_text else []),
        *([f"takes its default for {format_names(dropped, most=4)}"] if dropped else []),
        *(["trains in fp32"] if in_fp32 and {"bf16.enabled", "fp16.enabled"} & set(dropped) else []),
    ]
    several = f'{len(automatic)} values are "auto"' if len(automatic) > 1 else 'a value is "auto"'
    itself = f"DeepSpeed itself {format_names(effects, separator='; it ')}"
    reason = f"{several}, which only the Trainer and Accelerate fill in; {itself}"
    remedy = "give values where a training script passes the file to DeepSpeed itself"
    yield Finding("automatic-value", "hint", automatic[0], reason, remedy, "runtime/config_utils.py")


def _is_unfilled(path: str) -> bool:
    """Whether nobody replaces an "auto" at this path: neither the Trainer, nor DeepSpeed by its default."""
    parent, _, key = path.rpartition(".")
    if parent in deepspeed_keys.refusing_blocks() or (not parent and key not in deepspeed_keys.top_level_keys()):
        return False
    # Asked of the code that fills them in, so that there is no second list of such keys.
    return any(paths_of_auto(fill_in(nested(path, AUTO), _ANY_FACTS).config))


_ANY_FACTS = TrainingFacts(num_gpus=1, precision="bf16", hidden_size=1)
"""To ask which values the Trainer fills in, whatever they are."""


def _is_deepspeeds_own(path: str) -> bool:
    """Whether "auto" is a value that DeepSpeed knows for the key."""
    parent, _, key = path.rpartition(".")
    block = deepspeed_keys.blocks().get(parent)
    return block is not None and block["keys"].get(key, {}).get("default") == AUTO


# Texts


def _shown(value: object) -> str:
    """A value as JSON, cut to a length that fits a line."""
    import json

    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def _shown_without_secrets(place: str, value: object) -> str:
    """A value as JSON, without what may be a credential: findings go into logs and annotations that others read."""
    if isinstance(value, (int, float)):
        return REDACTED if looks_secret(place, str(value)) else _shown(value)
    return _shown(redacted_config({place: value})[place])


def _alternatives(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _with_article(kind: str) -> str:
    return {"object": "an object {…}", "null": "null"}.get(kind, f"a {kind}")
