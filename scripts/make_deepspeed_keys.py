#!/usr/bin/env python3
"""Writes the keys that the installed DeepSpeed reads, with types and defaults, to the file of its minor version.

The files are in ds_bench/config/deepspeed_keys_by_version, one for each minor version that this package supports.

Nothing is typed by hand. DeepSpeed's own ``DeepSpeedConfig`` is given objects that note every key it looks up. A block
that goes to a pydantic model is taken from the fields of that model, as pydantic-core schemas. Optimizers and
schedulers are taken from the signatures of their classes. Keys that DeepSpeed refuses because a feature was removed
come from its own list.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import inspect
import json
import logging
import os
import pathlib
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "ds_bench" / "config" / "deepspeed_keys_by_version"
PROBE = "a key that no model has"
SEEDS: dict[tuple[str, ...], dict[str, Any]] = {
    (): {"train_batch_size": 1},
    ("optimizer",): {"type": "Adam"},
    ("fp16",): {"enabled": True, "initial_scale_power": 16},
    ("scheduler",): {"type": "WarmupLR"},
    ("expert_parallel",): {"enabled": True},
}
"""Values without which DeepSpeed reads no further in a block."""
PASSED_ON = ("params", "model_info", "data_sampling", "data_routing")
"""Blocks that DeepSpeedConfig passes on unchanged to their readers."""
SAMPLES: dict[str, tuple[Any, ...]] = {
    "null": (None,),
    "boolean": (True,),
    "number": (1,),
    "string": ("text", "fp32", "mean", "warn", "fast", "replica"),
    "list": (["text"],),
    "object": ({},),
}
"""JSON types with values to try; some keys accept only certain strings."""


class RecordingDict(dict[str, Any]):
    """A block that notes which keys are looked up, with the caller's default, and whether it is read as a whole."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.asked: dict[str, Any] = {}
        self.read_whole = False

    def get(self, key: str, default: Any = None) -> Any:
        if self.asked.get(key) is None:
            self.asked[key] = copy.deepcopy(default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.setdefault(key, None)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return _RecordingKeys(self)

    def items(self) -> Any:
        self.read_whole = True
        return super().items()

    def __copy__(self) -> RecordingDict:
        return self


class _RecordingKeys:
    def __init__(self, owner: RecordingDict) -> None:
        self._owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self._owner

    def __iter__(self) -> Iterator[str]:
        self._owner.read_whole = True
        return iter(dict.keys(self._owner))


def deepspeed_keys() -> dict[str, Any]:
    """The contents of the file."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed import comm
    from deepspeed.runtime import config as runtime_config

    comm.get_rank, comm.get_world_size = lambda *_: 0, lambda *_: 1
    # Before 0.19 no feature had been removed.
    removed = sorted(getattr(runtime_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ()))
    removed += sorted(f"zero_optimization.{key}" for key in getattr(runtime_config, "_REMOVED_ZERO_CONFIG_KEYS", ()))
    blocks: dict[str, Any] = {}
    _explore((), blocks)
    top = blocks[""]["keys"]
    for key in re.findall(r'(?:config\["|config\.get\("|")(\w+)"(?:\]| in config|, \{\})', _initialize_source()):
        top.setdefault(key, {"default": None})
    for key in removed:
        top.pop(key, None)
    return {
        "version": deepspeed.__version__,
        "removed": removed,
        "blocks": dict(sorted(blocks.items())),
        "optimizers": _optimizers(runtime_config.DEEPSPEED_OPTIMIZERS),
        "schedulers": _schedulers(),
    }


def _initialize_source() -> str:
    """Source of ``deepspeed.initialize``, which reads some keys before DeepSpeedConfig does."""
    import deepspeed

    return inspect.getsource(deepspeed.initialize)


def _explore(path: tuple[str, ...], blocks: dict[str, Any]) -> None:
    """Adds the block at ``path``, and those inside it."""
    recorder = RecordingDict(SEEDS.get(path))
    error = _read(path, recorder)
    name = ".".join(path)
    if model := _model_at(path):
        _add_model(path, model, blocks)
        return
    if path and (error is not None or not (recorder.asked or recorder.read_whole)):
        return
    keys = {key: {"default": _json_value(default)} for key, default in sorted(recorder.asked.items())}
    if recorder.read_whole and not keys:
        return  # passed on as it is
    blocks[name] = {"unknown": "read" if recorder.read_whole and path else "ignored", "keys": keys}
    for key, entry in keys.items():
        if entry["default"] in (None, {}) and key not in PASSED_ON:
            _explore((*path, key), blocks)
        accepted = _accepted_types((*path, key))
        # If no type is accepted, DeepSpeed needs a further key. use_gds depends on the accelerator.
        if 0 < len(accepted) < len(SAMPLES) and (*path, key) != ("aio", "use_gds"):
            entry["accepts"] = accepted


def _read(path: tuple[str, ...], value: Any) -> Exception | None:
    """Lets DeepSpeed read a configuration that has ``value`` at ``path``. Returns its exception, if it raises one."""
    from deepspeed.runtime.config import DeepSpeedConfig

    for key in reversed(path):
        value = {key: value}
    if path:
        batch = "train_batch_size" if path[0] != "train_batch_size" else "train_micro_batch_size_per_gpu"
        value = {batch: 1, **value}
    try:
        DeepSpeedConfig(value)
    except Exception as error:
        return error
    return None


def _model_at(path: tuple[str, ...]) -> Any:
    """The pydantic model that reads the block; None if no model does."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from pydantic import ValidationError

    error = _read(path, {PROBE: 1})
    if not path or not isinstance(error, ValidationError):
        return None
    nested = error.errors()[0]["loc"][:-1]
    model = next(each for each in _subclasses(DeepSpeedConfigModel) if each.__name__ == error.title)
    for name in nested:  # the monitors are fields of one model
        model = model.model_fields[name].annotation
    return model


def _subclasses(model: Any) -> Iterator[Any]:
    for each in model.__subclasses__():
        yield each
        yield from _subclasses(each)


def _accepted_types(path: tuple[str, ...]) -> list[str]:
    """JSON types that DeepSpeed reads at ``path`` without an exception."""
    return [
        name for name, values in SAMPLES.items() if any(_read(path, copy.deepcopy(each)) is None for each in values)
    ]


def _add_model(path: tuple[str, ...], model: Any, blocks: dict[str, Any]) -> None:
    assert model.model_config["extra"] == "forbid"
    source = Path(inspect.getfile(model)).as_posix().rpartition("/deepspeed/")[2]
    keys: dict[str, Any] = {}
    for key, field in model.model_fields.items():
        inner = _inner_model(field.annotation)
        entry: dict[str, Any] = {"default": _json_value(field.get_default(call_default_factory=True))}
        accepted = _accepted_types((*path, key))
        schema = _schema(field)
        if inner is None and _types_taken(schema) >= set(accepted):
            entry["schema"] = schema
        elif len(accepted) < len(SAMPLES):
            entry["accepts"] = accepted  # DeepSpeed changes the value before the model sees it
        extra = field.json_schema_extra or {}
        if extra.get("deprecated"):
            entry["deprecated"] = {"use": extra["new_param"], "sets": extra.get("set_new_param", True)}
        keys[key] = entry
        if field.alias:
            keys[field.alias] = {**entry, "same_as": key}
        for each in filter(None, (key, field.alias) if inner is not None else ()):
            _add_model((*path, each), inner, blocks)
    blocks[".".join(path)] = {"unknown": "refused", "source": source, "keys": dict(sorted(keys.items()))}


def _inner_model(annotation: Any) -> Any:
    from pydantic import BaseModel

    for each in (annotation, *typing.get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _schema(field: Any) -> dict[str, Any]:
    """The pydantic-core schema of a field, with its limits."""
    schema = _schema_of(field.annotation)
    for limit in field.metadata:
        for name in ("gt", "ge", "lt", "le"):
            if hasattr(limit, name):
                schema[name] = getattr(limit, name)
    return schema


def _types_taken(schema: dict[str, Any]) -> set[str]:
    """JSON types that the schema accepts, judged by the samples."""
    from pydantic_core import SchemaValidator

    if schema["type"] == "never":
        return set()
    validator = SchemaValidator(schema)  # type: ignore[arg-type]
    return {name for name, values in SAMPLES.items() if any(map(validator.isinstance_python, values))}


_SCALARS = {bool: "bool", int: "int", float: "float", str: "str", pathlib.Path: "str", dict: "dict", list: "list"}


def _schema_of(annotation: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"type": "literal", "expected": [each.value for each in annotation]}
    if origin is typing.Literal:
        return {"type": "literal", "expected": list(arguments)}
    if origin is typing.Union:
        inner = [_schema_of(each) for each in arguments if each is not type(None)]
        schema = inner[0] if len(inner) == 1 else {"type": "union", "choices": inner}
        return {"type": "nullable", "schema": schema} if type(None) in arguments else schema
    if origin is list:
        return {"type": "list", "items_schema": _schema_of(arguments[0])}
    if origin is dict:
        return {"type": "dict"}
    if annotation is tuple:
        return {"type": "list"}
    return {"type": "any"} if annotation in (object, Any) else {"type": "never"}  # such as torch.dtype


def _json_value(value: Any) -> Any:
    """A default as JSON; null if JSON has no such value."""
    if hasattr(value, "model_dump"):
        return {}
    if isinstance(value, enum.Enum):
        return value.value
    try:
        return json.loads(json.dumps(copy.copy(value)))
    except TypeError:
        return None


def _parameters(maker: Any) -> dict[str, list[str] | None]:
    """Argument names of an optimizer or a scheduler, without the first, which DeepSpeed passes; null: any."""
    taken = list(inspect.signature(maker).parameters.values())[1:]
    if any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in taken):
        return {"takes": None, "needs": []}
    required: list[str] | None = [each.name for each in taken if each.default is each.empty]
    return {"takes": sorted(each.name for each in taken), "needs": required}


def _optimizers(own: list[str]) -> dict[str, Any]:
    """The names that ``optimizer.type`` can have, and the arguments of the classes that DeepSpeed creates."""
    import torch
    from deepspeed.ops import adagrad, adam, lamb, lion

    ours = (
        adam.FusedAdam,
        adam.DeepSpeedCPUAdam,
        *([adam.ZenFlowCPUAdam] if hasattr(adam, "ZenFlowCPUAdam") else []),  # since 0.17
        adagrad.DeepSpeedCPUAdagrad,
        lamb.FusedLamb,
        lion.FusedLion,
        lion.DeepSpeedCPULion,
    )
    torchs = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    classes = {kind.__name__: _parameters(kind) for kind in ours}
    classes |= {f"torch.optim.{name}": _parameters(kind) for name, kind in sorted(torchs.items())}
    return {"names": sorted(own), "torch_names": sorted(torchs), "classes": classes}


def _schedulers() -> dict[str, Any]:
    """The names that ``scheduler.type`` can have, with the arguments of each."""
    import torch
    from deepspeed.runtime import lr_schedules

    own = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    base = torch.optim.lr_scheduler.LRScheduler
    torchs = {
        name: kind
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, base) and not name.startswith("_")
    }
    kinds = {**own, **{name: kind for name, kind in torchs.items() if name not in own}}
    return {name: _parameters(kind) for name, kind in sorted(kinds.items()) if name != base.__name__}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # DeepSpeed warns about what it is given here
    with contextlib.redirect_stdout(sys.stderr):
        found = deepspeed_keys()
    written = json.dumps(found, indent=1) + "\n"
    if sys.argv[1:] == ["--print"]:
        print(written, end="")
    else:
        minor = found["version"].rpartition(".")[0]
        (FOLDER / f"{minor}.json").write_text(written, encoding="utf-8")
