"""Recipes: a comparison as sections of named values, read from YAML and validated as a whole.

A recipe becomes the same Options as the flags of the scripts (:data:`PATHS`), and Options become a recipe again
(:func:`recipe_of`). Lists of values and the section ``sweep`` are expanded beforehand (``sweep.find_sweep``): a
:data:`Recipe` is one point.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from ..errors import UsageError
from ..units import format_place
from . import axis_rows, deepspeed_config, deepspeed_keys, strategies
from .configuration_files import ConfigurationFile
from .deepspeed_config import Config, MakeConfig, base_config
from .options import ALL, COUNT, EMPTY_PATH, FACTORY, LORA, OPTIONS, Option, Options
from .recipe_file import Data, KeyPath, RecipeText
from .spec import BATCH_KEYS, Strategy
from .strategies import STRATEGY_NAMES

Values: TypeAlias = Mapping[str, Any]
"""Key path of a recipe → its checked value; ``axes`` as a whole."""


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple, which pydantic and Options expect; a single value becomes a tuple of one."""
    return tuple(value) if isinstance(value, list) else (value,)


def _require_path(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():  # pydantic would take it for the current folder
        raise ValueError(EMPTY_PATH)
    return value


_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$"
AxisValue: TypeAlias = bool | int | float | str


def _type_of(value: Option, path: str) -> Any:
    """Return the type of an option's value, as pydantic expects it."""
    if value.kind is dict:
        inline: Any = dict[Annotated[str, Field(pattern=_NAME)], dict[str, Any]]
        return inline if path == "configurations.inline" else dict[str, Any]
    one: Any = value.kind
    if value.kind is Path:
        one = Annotated[Path, BeforeValidator(_require_path)]
    elif value.kind is int and value.choices:
        one = Annotated[int, Field(ge=min(value.choices), le=max(value.choices))]
    elif value.choices:
        one = Literal[tuple(value.choices)]
    elif value.limits:
        one = Annotated[one, Field(**value.limits)]
    if value.auto:
        one = one | Literal["auto"]
    if not value.many:
        return one | None if value.default is None else one
    if value.kind is str:
        return Annotated[tuple[one, ...], BeforeValidator(_as_tuple, json_schema_input_type=list[one] | one)]
    return Annotated[tuple[one, ...], Field(min_length=1)] if value.default else tuple[one, ...]


class _Section(BaseModel):
    # strict: otherwise pydantic would accept the text "4" as a number.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _section(name: str, purpose: str, **more_keys: Any) -> Any:
    """Make a recipe section and its default: a key for each of its options, then ``more_keys``."""
    keys: dict[str, Any] = {}
    for option in OPTIONS.values():
        if option.key is not None and option.key.startswith(f"{name}."):
            default = {} if option.kind is dict else option.default
            described = Field(default=default, description=f"{option.help[0].upper()}{option.help[1:]}.")
            keys[option.key.removeprefix(f"{name}.")] = (_type_of(option, option.key), described)
    model = create_model(name.capitalize(), __base__=_Section, __doc__=purpose, **keys, **more_keys)
    return model, model()


_LENGTH = "Tokens per sequence, if training.seq_len is not set."
_PARAMETERS = "Its parameters under DeepSpeed's names, such as lr and weight_decay."
_AXES = (
    "Name of an axis → its values: one row for each, where the axis applies; several axes give every combination "
    "(ds-compare axes lists the axes)."
)
_ROWS = "The rows of the comparison. Without stages, strategies, configs and inline: stages 0, 1, 2 and 3."
# fmt: off
Recipe: type[BaseModel] = create_model(
    "Recipe",
    __base__=_Section,
    __doc__="One comparison: a model, how it is trained, in which configurations, and where.",
    model=_section("model", "The model that is trained, with random weights."),
    training=_section("training", "How it is trained."),
    configurations=_section("configurations", _ROWS),
    dataset=_section("dataset", "The data: random ids, or a file.",
                     seq_len=(Annotated[int, Field(**COUNT)] | None, Field(default=None, description=_LENGTH))),
    dataloader=_section("dataloader", "How micro-batches reach the device."),
    optimizer=_section("optimizer", "The optimizer of every row.",
                       params=(dict[str, Any], Field(default={}, description=_PARAMETERS))),
    axes=(dict[str, AxisValue | list[AxisValue]], Field(default={}, description=_AXES)),
    script=(_type_of(OPTIONS["script"], "script"), Field(default=(), description=f"{OPTIONS['script'].text}.")),
    profiling=_section("profiling", "Profilers that observe further steps after the measured ones."),
    launch=_section("launch", "The devices, and how trials are started and ended."),
    output=_section("output", "Where results go, how often rows run, and what the recommendation is for."),
)
# fmt: on
"""The model of a recipe at one point of its sweep."""

SweptValue: TypeAlias = AxisValue | list[Any] | None
"""A value at a point; betas are a list."""


class SweepSection(_Section):
    """Several workloads in one run: every combination of the values in matrix and in the sections' lists."""

    matrix: dict[str, Annotated[list[SweptValue], Field(min_length=1)]] = {}
    include: list[Annotated[dict[str, SweptValue], Field(min_length=1)]] = []
    exclude: list[Annotated[dict[str, SweptValue], Field(min_length=1)]] = []


_RecipeFile = create_model("Recipe", __base__=Recipe, sweep=(SweepSection, SweepSection()))

SWEPT_SECTIONS = ("model", "training", "dataset", "dataloader", "optimizer")
"""Sections whose values may be lists, which make points of a sweep."""
_SWEPT_KEYS = ("launch.num_gpus", "launch.cpu_memory_limit", "launch.gpu_memory_limit")
"""Other values that may be lists."""
_SWEPT_BLOCKS = ("optimizer.params", "configurations.deepspeed")
"""Blocks of DeepSpeed's own keys, whose values may be swept; those of the second block only in the section ``sweep``,
since lists in that block are DeepSpeed's own."""
_WHOLE_SECTIONS = ("model", "training")
"""Sections that a printed recipe contains in full."""


@cache
def known_paths() -> Values:
    """Key path of every value of a recipe → its default."""
    return {path: default for path, default in _by_path(Recipe()).items() if path != "axes"}


def _by_path(recipe: BaseModel) -> Values:
    sections = recipe.model_dump()
    whole = {name: sections.pop(name) for name in ("axes", "script")}
    return whole | {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


PATHS: Mapping[str, str] = {
    name: option.key for name, option in OPTIONS.items() if option.key is not None and option.kind is not dict
}
"""Field of Options → the recipe's key path with the same value."""


# ------------------------------------------------------------------ from a file


def check_recipe(text: RecipeText, data: Data | None = None) -> Values:
    """Return the checked values of a recipe. ``data``: one point of its sweep, instead of its own values.

    Raises UsageError for the first wrong value, with its line.
    """
    values = text.data if data is None else data
    # A section without keys has its defaults; unknown names are kept, so that they are rejected.
    values = {name: keys for name, keys in values.items() if keys is not None or name not in Recipe.model_fields}
    return _by_path(validated(Recipe, values, text, ()))


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], values: object, text: RecipeText, place: KeyPath) -> Model:
    """Return a part of a recipe as its model. Raises UsageError for the first wrong value, with its line."""
    try:
        # As JSON: a strict model then accepts lists for tuples and strings for paths.
        return model.model_validate_json(json.dumps(values))
    except ValidationError as error:
        errors = error.errors()
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    path = (*place, *_known_part(first["loc"]))
    shown = format_place(path)
    if first["type"] == "extra_forbidden":
        near, section = nearest_path(path), str(path[0])
        known = [*known_paths(), *(f"sweep.{name}" for name in SweepSection.model_fields)]
        keys = [each.removeprefix(f"{section}.") for each in known if each.startswith(f"{section}.")]
        has = f"the keys of {section} are" if keys else "the sections are"
        names = f"{has} {', '.join(keys or _RecipeFile.model_fields)}; docs/recipes.md describes them"
        is_key = re.fullmatch(r"[\w.\[\]-]{1,80}", shown)  # another file's content may be secret
        problem = f"unknown key {shown}" if is_key else "not a key of a recipe"
        raise text.error(path, problem, f"did you mean {near}?" if near else names)
    reasons = [_reason(each) for each in errors if _known_part(each["loc"]) == path[len(place) :]]
    value = json.dumps(first["input"], default=str)
    value = value if len(value) <= 40 else f"{value[:36]} …"
    raise text.error(path, f"{shown} is {value}", " or ".join(dict.fromkeys(reasons)))


def _reason(error: Any) -> str:
    context = error.get("ctx", {})
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        names = {name.casefold(): name for name in re.findall("'([^']+)'", context["expected"])}
        for near in difflib.get_close_matches(given := error["input"].casefold(), names, n=1, cutoff=0.65):
            if near[0] != given[0]:  # such as gpu and cpu, which mean different things
                break
            return f"did you mean {names[near]}?"
    forms = {
        FACTORY: "package.module:function",
        LORA: "a rank, or a rank and modules such as 16:q_proj,v_proj",
        _NAME: "a name of letters, digits, dots, dashes and underscores",
    }
    if (form := forms.get(context.get("pattern"))) is not None:
        return f"it must be {form}"
    said = str(error["msg"]).removeprefix("Value error, ").replace("a valid array", "a list")
    said = said.removesuffix(" after validation, not 0")
    return re.sub("^(Input|List|Tuple|Dictionary) should", "it must", said)


def _known_part(path: KeyPath) -> KeyPath:
    """Return a place in the recipe, without pydantic's names for a value's alternatives."""
    names = ("constrained-int", "int", "str", "bool", "float", "nullable")
    return tuple(step for step in path if not (isinstance(step, str) and ("[" in step or step in names)))


def can_be_swept(path: str) -> bool:
    """Return whether a sweep may vary a key path."""
    if path.startswith(tuple(f"{block}." for block in _SWEPT_BLOCKS)):
        return all(path.split("."))
    is_known = path in known_paths() and path not in _SWEPT_BLOCKS
    return is_known and (path in _SWEPT_KEYS or path.startswith(tuple(f"{section}." for section in SWEPT_SECTIONS)))


_OTHER_NAMES: Mapping[str, str] = {
    "lr": "optimizer.params.lr",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "optimizer.name": "optimizer.type",
    "dtype": "training.precision",
    "max_steps": "training.steps",
    "gradient_checkpointing": "training.activation_checkpointing",
    "gradient_accumulation_steps": "training.grad_accum",
    "train_micro_batch_size_per_gpu": "training.local_batch_size",
    "per_device_train_batch_size": "training.local_batch_size",
    "train_batch_size": "training.global_batch_size",
    "set": "configurations.deepspeed",
}
"""Other programs' names that have little in common with ours."""


def nearest_path(path: KeyPath) -> str | None:
    """Return the key path that an unknown one most likely means, in its own section if possible."""
    *section, key = map(str, path)
    known = {**PATHS, **_OTHER_NAMES}
    if found := known.get(".".join([*section, key])) or known.get(key):
        return found
    if key in deepspeed_keys.top_level_keys():
        return f"configurations.deepspeed.{key}"
    names = {path: path.rpartition(".")[2] for path in known_paths()}
    if len(path) == 1:
        names |= {section: section for section in _RecipeFile.model_fields}
    own = {path: name for path, name in names.items() if path.startswith(".".join([*section, ""]))}
    # Across sections, only names that are nearly the same: dataset.tokens is not dataloader.workers.
    for candidates, similarity in ((own, 0.6), (names, 0.6 if len(path) == 1 else 0.8)):
        near = difflib.get_close_matches(key, candidates.values(), n=1, cutoff=similarity)
        if near:
            return next(path for path, name in candidates.items() if name == near[0])
    return None


# ------------------------------------------------------------------ a recipe as Options


def options_of(recipe: Values, folder: Path, **run_flags: Any) -> Options:
    """Return the Options of one point.

    ``folder``: the recipe's folder, to which its file names are relative. ``run_flags``: fields of Options that a
    recipe cannot set. Raises UsageError for values that contradict each other.
    """
    values = {name: recipe[path] for name, path in PATHS.items()}
    if values["global_batch_size"] is not None and values["grad_accum"] is not None:
        problem = "training.global_batch_size and training.grad_accum cannot be combined"
        raise UsageError(problem, remedy="give one of them: accumulation follows from the global batch")
    if values["global_batch_size"] is not None and values["batch_size"] == "auto":
        problem = "training.global_batch_size cannot be combined with local_batch_size auto"
        raise UsageError(problem, remedy="give grad_accum instead, or a local_batch_size in sequences")
    lengths = {path: recipe[path] for path in ("training.seq_len", "dataset.seq_len") if recipe[path] is not None}
    if len(set(lengths.values())) > 1:
        problem = " and ".join(f"{path} {length}" for path, length in lengths.items())
        raise UsageError(f"{problem} contradict each other", remedy="keep one of them")
    values["seq_length"] = next(iter(lengths.values()), None)
    # 1 until the ranks are known, if the global batch is given (planning.trial_planner).
    values["grad_accum"] = values["grad_accum"] or 1
    for name in recipe["configurations.inline"]:
        if name in strategies.REFERENCES:
            problem = f"configurations.inline.{name}: {name} rows train without DeepSpeed, and read no configuration"
            raise UsageError(problem, remedy="give it another name")
    inline = tuple(
        ConfigurationFile(
            path=Path(name), kind="deepspeed", name=name, text=json.dumps(config, indent=2), config=config
        )
        for name, config in recipe["configurations.inline"].items()
        if name not in STRATEGY_NAMES
    )
    values["strategies"] = _strategies(values["strategies"], values["stage"], values["nvme_path"] is not None)
    values["strategies"] += tuple(name for name in recipe["configurations.inline"] if name in STRATEGY_NAMES)
    has_rows = values["stages"] or values["strategies"] or values["configs"] or inline
    if not has_rows and not values["script"]:
        values["stages"] = (0, 1, 2, 3)
    values["stages"] = tuple(dict.fromkeys(values["stages"]))
    # Stage 2 and the strategy zero2 are the same row.
    named = {strategies.ZERO_STAGES[stage].name for stage in values["stages"]}
    values["strategies"] = tuple(name for name in dict.fromkeys(values["strategies"]) if name not in named)
    values["configs"] = tuple(folder / path for path in values["configs"])
    for name in ("data", "hostfile", "base_config"):
        if values[name] is not None:
            values[name] = folder / values[name]
    changes = recipe["configurations.deepspeed"] | {
        f"optimizer.params.{key}": value for key, value in recipe["optimizer.params"].items()
    }
    axes = {
        name: [str(value).lower() if isinstance(value, bool) else str(value) for value in _as_tuple(given)]
        for name, given in recipe["axes"].items()
    }
    return Options.of(
        family="recipe",
        **values,
        inline=inline,
        axes=tuple(axis_rows.read_values(name, texts) for name, texts in axes.items()),
        ds_config={},
        set=tuple(deepspeed_config.nested(path, value) for path, value in changes.items()),
        **run_flags,
    )


def _strategies(names: tuple[str, ...], stage: int, has_nvme: bool) -> tuple[str, ...]:
    """Return the names; if ``all`` is among them, every stage and offload strategy, each configuration once."""
    if ALL not in names:
        return names
    by_label: dict[str, str] = {}
    stages = [strategy.name for strategy in strategies.ZERO_STAGES.values()]
    for name in (*stages, *STRATEGY_NAMES):
        strategy = strategies.named_strategy(name, stage)
        disk = "nvme" in (strategy.offload_optimizer, strategy.offload_param)
        if strategy.engine == "deepspeed" and (has_nvme or not disk):
            by_label.setdefault(strategy.label, name)
    return tuple(by_label.values())


def config_maker(recipe: Values) -> MakeConfig:
    """Return the function that makes each strategy's configuration: the recipe's own if any, else the built-in one."""

    def make(strategy: Strategy, batch_size: int, grad_accum: int) -> Config:
        config = base_config(strategy, batch_size, grad_accum)
        own = recipe["configurations.inline"].get(strategy.name)
        # A recipe's own configuration may leave out batch and optimizer, but no row can run without them.
        return config if own is None else {key: config[key] for key in (*BATCH_KEYS, "optimizer")} | copy.deepcopy(own)

    return make


# ------------------------------------------------------------------ Options as a recipe


def recipe_of(options: Options, make_config: MakeConfig, rows: list[Strategy]) -> Data:
    """Return the recipe that runs the same comparison as these Options with ``make_config``, a script's function.

    ``rows``: the strategies of the Options. The sections model and training are complete; the others have only values
    that differ from the defaults.
    """
    data: Data = {section: {} for section in Recipe.model_fields}
    for name, path in PATHS.items():
        section, _, key = path.partition(".")
        value = _json_value(getattr(options, name))
        # A field without a flag has the script's value anyway.
        is_empty = value is None or value is False or value == [] or OPTIONS[name].flag is None
        if is_empty or (section not in _WHOLE_SECTIONS and value == _json_value(known_paths()[path])):
            continue
        data[section][key] = value
    data["axes"] = {
        values[0].axis_name: [{"true": True, "false": False}.get(each.text, each.text) for each in values]
        for values in options.axes
    }
    if options.model_factory is not None:
        # Options.model then holds the factory (Options.of).
        del data["model"]["name"]
    if options.auto_batch:
        data["training"]["local_batch_size"] = "auto"
    if options.auto_seq:
        data["training"]["seq_len"] = "auto"
    names = data["configurations"].get("strategies")
    if options.family == "offload" and names and options.nvme_path is not None and "nvme" not in names:
        names.append("nvme")
    # The configurations of a script whose function was edited, without unchanged batch keys. torch's engines do not use
    # the function.
    inline = {}
    for strategy in (row for row in rows if row.engine == "deepspeed"):
        built_in = base_config(strategy, options.batch_size, options.grad_accum)
        config = make_config(strategy, options.batch_size, options.grad_accum)
        if config != built_in:
            same = [key for key in BATCH_KEYS if config.get(key) == built_in[key]]
            written = deepspeed_config.json_values(config)
            inline[strategy.name] = {key: value for key, value in written.items() if key not in same}
    changes = reduce(deepspeed_config.merge, options.config_changes)
    data["configurations"] |= {key: value for key, value in (("inline", inline), ("deepspeed", changes)) if value}
    return {section: values for section, values in data.items() if values}


def _json_value(value: Any) -> Any:
    """Return a value of Options as it appears in a recipe; paths are absolute, since the recipe may be anywhere."""
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    return str(value.absolute()) if isinstance(value, Path) else value


# ------------------------------------------------------------------ JSON Schema


def recipe_schema() -> Data:
    """Return the JSON Schema of a recipe file, with lists for values that may be swept, and with ``sweep``."""
    schema = _RecipeFile.model_json_schema()
    for path in filter(can_be_swept, known_paths()):
        section, _, key = path.partition(".")
        properties = schema["$defs"][section.capitalize()]["properties"]
        value = properties[key]
        notes = {name: value.pop(name) for name in ("description", "default", "title") if name in value}
        listed = {"type": "array", "items": copy.deepcopy(value), "minItems": 1}
        alternatives = value["anyOf"] if set(value) == {"anyOf"} else [value]
        properties[key] = {**notes, "anyOf": [*alternatives, listed]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "ds_bench recipe"}
