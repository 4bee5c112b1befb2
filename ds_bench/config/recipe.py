"""Recipes: everything that a comparison is asked for, as sections of named values, read from YAML and checked whole.

A recipe becomes the same Options that the flags of the scripts become (:data:`PATHS`), and Options become a recipe
again (:func:`recipe_of`), so that scripts and recipes run the same way. Lists of values and the section ``sweep`` are
expanded by ``sweep`` beforehand: a :class:`Recipe` is one point.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from ..errors import UsageError
from ..units import format_place
from . import axis_rows, overrides, strategies
from .configuration_files import ConfigurationFile
from .deepspeed_config import OPTIMIZERS, Config, MakeConfig, base_config
from .options import EMPTY_PATH, MAX_NUMBER, MAX_PORT, MAX_RANKS, MAX_REPEATS, Options
from .recipe_file import FLOAT, Data, KeyPath, RecipeText
from .spec import (
    BATCH_KEYS,
    DEFAULT_PREFETCH,
    INSPECTION_FIELDS,
    MAX_DATA_WORKERS,
    MAX_PREFETCH,
    MOST_PROFILE_STEPS,
    PROFILES,
    MultiNodeLauncher,
    PassType,
    Strategy,
)
from .strategies import STRATEGY_NAMES
from .token_file import TokenType

ALL = "all"
"""Stands for every strategy in ``configurations.strategies``."""


def _listed(value: Any) -> Any:
    """A list as pydantic and Options want it; one value stands for a list of it."""
    return tuple(value) if isinstance(value, list) else (value,)


def _require_path(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError(EMPTY_PATH)
    return value


GivenPath: TypeAlias = Annotated[Path, BeforeValidator(_require_path)]
"""A path that is not empty: pydantic would take an empty text for the current folder."""


def _require_one_of(names: tuple[str, ...]) -> AfterValidator:
    """Refuses a text that is none of these names, and says the nearest."""

    def check(name: str) -> str:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise ValueError(f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(names)}")
        return name

    return AfterValidator(check)


def _enum(names: tuple[str, ...]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "enum": list(names)})


_FACTORY = r"^[^:]+:[^:]+$"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$"
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Quantity: TypeAlias = Annotated[float, Field(gt=0, le=MAX_NUMBER)]
_ROW_NAMES = (ALL, *STRATEGY_NAMES)
AxisValue: TypeAlias = bool | int | float | str
StrategyName: TypeAlias = Annotated[str, _require_one_of(_ROW_NAMES), _enum(_ROW_NAMES)]
ProfilerName: TypeAlias = Annotated[str, _require_one_of(PROFILES), _enum(PROFILES)]
OptimizerName: TypeAlias = Annotated[str, _require_one_of(OPTIMIZERS), _enum(OPTIMIZERS)]


class _Section(BaseModel):
    # strict: otherwise pydantic would take the text "4" for a number.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Model(_Section):
    """The model that is trained, with random weights."""

    name: Annotated[str, Field(min_length=1, description="Preset, local folder or name on the Hub.")] = "gpt2"
    factory: Annotated[
        str | None,
        Field(pattern=_FACTORY, description="package.module:function that returns a model of your own."),
    ] = None
    trust_remote_code: Annotated[bool, Field(description="Run modelling code that comes with the model.")] = False


class Training(_Section):
    """How it is trained."""

    seq_len: Annotated[
        Count | Literal["auto"] | None,
        Field(
            description="Tokens per sequence; without it 512, or the model's positions where it has fewer; auto: the "
            "longest sequence that trains."
        ),
    ] = None
    local_batch_size: Annotated[
        Count | Literal["auto"],
        Field(description="Micro-batch: sequences per GPU in one forward pass; auto: the largest that trains."),
    ] = 4
    global_batch_size: Annotated[
        Count | None,
        Field(
            description="Sequences per optimizer step on all GPUs; accumulation follows from it: "
            "global_batch_size / (local_batch_size × data-parallel ranks)."
        ),
    ] = None
    grad_accum: Annotated[
        Count | None,
        Field(description="Micro-batches per optimizer step, where global_batch_size does not say; without both 1."),
    ] = None
    steps: Annotated[Count, Field(description="Optimizer steps that are measured.")] = 20
    warmup_steps: Annotated[
        int, Field(ge=0, le=MAX_NUMBER, description="Steps run first and left out of every statistic.")
    ] = 5
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        Field(description="Number format; auto: bf16 where the device has it."),
    ] = "auto"
    activation_checkpointing: Annotated[bool, Field(description="Recompute activations in the backward pass.")] = False
    seed: Annotated[int, Field(ge=0, le=2**32 - 1, description="Seed of weights and data.")] = 42
    dropout: Annotated[
        float | None, Field(ge=0, lt=1, description="Probability of every dropout; without it the model's own.")
    ] = None
    pass_type: Annotated[
        PassType,
        Field(
            description="What a step is: the model's forward pass, forward and backward, or with the optimizer's step; "
            "all but train at stage 0 alone."
        ),
    ] = "train"
    synchronized: Annotated[
        bool,
        Field(description="false is wrong on purpose: the clock is read without waiting for the device."),
    ] = True


class Configurations(_Section):
    """The rows of the comparison. Without stages, strategies, configs and inline: stages 0, 1, 2 and 3."""

    stages: Annotated[tuple[Annotated[int, Field(ge=0, le=3)], ...], Field(description="ZeRO stages, in order.")] = ()
    strategies: Annotated[
        tuple[StrategyName, ...],
        BeforeValidator(_listed, json_schema_input_type=list[StrategyName] | StrategyName),
        Field(description="Strategies by name, after the stages; all: every stage and offload strategy."),
    ] = ()
    stage: Annotated[int, Field(ge=1, le=3, description="ZeRO stage of the offload strategies.")] = 3
    configs: Annotated[
        tuple[GivenPath, ...],
        Field(description="Configurations of your own, each file one row: DeepSpeed JSON, Accelerate YAML, folders."),
    ] = ()
    keep_batch: Annotated[
        bool, Field(description="The batch keys of each file of configs rule, not those of training.")
    ] = False
    inline: Annotated[
        dict[Annotated[str, Field(pattern=_NAME)], dict[str, Any]],
        Field(
            description='DeepSpeed configurations by name, each one row, "auto" resolved as the Trainer does; under '
            "the name of a strategy it stands for that strategy's."
        ),
    ] = {}
    deepspeed: Annotated[
        dict[str, Any],
        Field(description="Values that replace those of every DeepSpeed configuration, such as zero_optimization: …"),
    ] = {}
    common_batch: Annotated[
        bool, Field(description="With local_batch_size auto: also rows at the largest that all of them train.")
    ] = False
    relative_to: Annotated[
        str | None, Field(description="Row that ratios refer to; without it the first good one.")
    ] = None


class Optimizer(_Section):
    """The optimizer of every row."""

    type: Annotated[OptimizerName | None, Field(description="Without it AdamW.")] = None
    params: Annotated[
        dict[str, Any], Field(description="Its parameters, such as lr and weight_decay, as DeepSpeed takes them.")
    ] = {}


class Profiling(_Section):
    """Profilers that observe further steps after the measured ones."""

    profiles: Annotated[
        tuple[ProfilerName, ...],
        BeforeValidator(_listed, json_schema_input_type=list[ProfilerName] | ProfilerName),
        Field(description="Profilers, in order, each with steps of its own."),
    ] = ()
    steps: Annotated[int, Field(ge=1, le=MOST_PROFILE_STEPS, description="Steps that each profiler observes.")] = 2
    ranks: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_RANKS)], ...],
        Field(min_length=1, description="Ranks that write a profile."),
    ] = (0,)
    nsys_start: Annotated[
        int,
        Field(
            ge=-1,
            le=MAX_NUMBER,
            description="First step of the window that nsys records, among those after the measured ones, numbered "
            "from 0, the first warm-up step; it adds the profiler nsys. -1: the first of them.",
        ),
    ] = -1
    nsys_end: Annotated[
        int, Field(ge=-1, le=MAX_NUMBER, description="Last step of that window. -1: the last of them.")
    ] = -1


class Dataset(_Section):
    """What is trained on: random ids, or those of a file."""

    path: Annotated[
        GivenPath | None, Field(description="File of token ids, relative to the recipe; without it random ids.")
    ] = None
    dtype: Annotated[TokenType | None, Field(description="Type of the file's ids; without it as its suffix says.")] = (
        None
    )
    vocab_size: Annotated[
        Count | None,
        Field(description="Random ids are below it, and those of the file must be; without it the model's number."),
    ] = None
    seq_len: Annotated[Count | None, Field(description="Tokens per sequence, where training.seq_len does not say.")] = (
        None
    )


class Dataloader(_Section):
    """How micro-batches come to the device."""

    workers: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_DATA_WORKERS,
            description="Worker processes of torch's DataLoader, 0: the rank itself. Without it 0 for a file; random "
            "ids are on the device before.",
        ),
    ] = None
    pin_memory: Annotated[bool, Field(description="Copy micro-batches to page-locked memory first.")] = False
    prefetch: Annotated[
        int, Field(ge=1, le=MAX_PREFETCH, description="Micro-batches that each worker process loads ahead.")
    ] = DEFAULT_PREFETCH


class Launch(_Section):
    """The devices, and how trials are started and ended."""

    num_gpus: Annotated[
        int | None, Field(ge=1, le=MAX_RANKS, description="GPUs, or CPU ranks; without it all GPUs, or 1 rank.")
    ] = None
    accelerator: Annotated[Literal["auto", "cuda", "cpu"], Field(description="Device type.")] = "auto"
    launcher: Annotated[
        Literal["auto", "warm", "deepspeed"],
        Field(description="warm: ranks forked from one preloaded process; deepspeed: its launcher for every trial."),
    ] = "auto"
    hostfile: Annotated[GivenPath | None, Field(description="DeepSpeed hostfile, for several nodes.")] = None
    include: Annotated[
        str | None, Field(description="Hosts and slots of the hostfile to use, in DeepSpeed's syntax: a@b:0,1.")
    ] = None
    exclude: Annotated[str | None, Field(description="Hosts and slots of the hostfile to leave out.")] = None
    multi_node_launcher: Annotated[
        MultiNodeLauncher | None,
        Field(description="Program with which DeepSpeed starts ranks on several nodes; without it pdsh."),
    ] = None
    master_addr: Annotated[
        str | None, Field(description="Address of the first host that all others reach; without it its first.")
    ] = None
    master_port: Annotated[
        int | None, Field(ge=1, le=MAX_PORT, description="Port of that address; without it a free one.")
    ] = None
    launcher_args: Annotated[str | None, Field(description="Further arguments of that program, as one text.")] = None
    nvme_path: Annotated[GivenPath | None, Field(description="Folder on the NVMe disk.")] = None
    cpu_memory_limit: Annotated[Quantity | None, Field(description="Limit of each rank's data, in GB (2^30).")] = None
    gpu_memory_limit: Annotated[Quantity | None, Field(description="Emulate a GPU of this memory, in GB (2^30).")] = (
        None
    )
    peak_tflops: Annotated[
        Quantity | None, Field(description="Dense peak of one GPU in TFLOP/s, for MFU; without it known GPUs.")
    ] = None
    timeout: Annotated[Quantity, Field(description="Seconds after which a trial is ended.")] = 3600.0
    stall_timeout: Annotated[
        Quantity, Field(description="Seconds without a sign of life after which a trial is ended.")
    ] = 600.0
    skip_predicted_oom: Annotated[bool, Field(description="Leave out rows that are predicted not to fit.")] = False
    force: Annotated[
        bool, Field(description="Run also what is predicted to need more than 1.5 times the host memory there is.")
    ] = False


class Output(_Section):
    """Where results go, how often rows run, and what the recommendation is for."""

    dir: Annotated[GivenPath, Field(description="Folder of the results, in the current folder; made when missing.")] = (
        Path("results")
    )
    repeats: Annotated[int, Field(ge=1, le=MAX_REPEATS, description="Runs of every row; 3 or more give intervals.")] = 1
    goal: Annotated[
        Literal["speed", "balanced", "memory"],
        Field(description="The fastest row, the least memory, or both."),
    ] = "balanced"
    export: Annotated[
        str | None, Field(description="Row whose configuration is written too; the recommended one always is.")
    ] = None
    monitor: Annotated[
        Literal["steps", "tensorboard"] | None,
        Field(
            description="Write loss, memory and throughput of each step while a trial runs: to steps.jsonl in its "
            "folder; tensorboard: to TensorBoard's files too."
        ),
    ] = None
    checkpoint: Annotated[
        bool,
        Field(description="Save, convert and load a checkpoint of every row after its measured steps, and time it."),
    ] = False
    checkpoint_path: Annotated[
        str | None,
        Field(description="Folder on the disk to save to; adds checkpoint. Without it the folder of the results."),
    ] = None
    csv: Annotated[
        GivenPath | None,
        Field(description="File for the flat rows as CSV, besides that in dir; in the current folder, replaced."),
    ] = None


class Recipe(_Section):
    """One comparison: a model, how it is trained, which configurations, and where."""

    model: Model = Model()
    training: Training = Training()
    configurations: Configurations = Configurations()
    dataset: Dataset = Dataset()
    dataloader: Dataloader = Dataloader()
    optimizer: Optimizer = Optimizer()
    axes: Annotated[
        dict[str, AxisValue | list[AxisValue]],
        Field(
            description="Name of an axis → its values: a row of each, in every row where it acts; several axes make "
            "every combination (python -m ds_bench axes lists them)."
        ),
    ] = {}
    profiling: Profiling = Profiling()
    launch: Launch = Launch()
    output: Output = Output()


SWEPT_SECTIONS = ("model", "training", "dataset", "dataloader", "optimizer")
"""Sections whose values may be lists, each value then makes points of a sweep."""
_SWEPT_KEYS = ("launch.num_gpus", "launch.cpu_memory_limit", "launch.gpu_memory_limit")
"""Other values that may be lists."""
_SWEPT_BLOCKS = ("optimizer.params", "configurations.deepspeed")
"""Blocks of DeepSpeed's own keys, whose values may be swept too; of the second in the section ``sweep`` alone, as its
lists are DeepSpeed's."""
_WHOLE_SECTIONS = ("model", "training")
"""Sections of which a printed recipe has every value."""
_LISTS_OF_DEEPSPEED = ("betas",)
"""Values of an optimizer that are lists themselves."""
_OTHER_NAMES = {
    "model.name": "model",
    "model.factory": "model_factory",
    "training.seq_len": "seq_length",
    "training.local_batch_size": "batch_size",
    "training.steps": "num_steps",
    "dataset.path": "data",
    "dataset.dtype": "data_dtype",
    "dataloader.workers": "data_workers",
    "dataloader.pin_memory": "data_pin_memory",
    "dataloader.prefetch": "data_prefetch",
    "optimizer.type": "optimizer",
    "profiling.steps": "profile_steps",
    "profiling.ranks": "profile_ranks",
    "output.dir": "output_dir",
}
"""Key path → the field of Options that it gives, where their names differ."""
_NO_FIELD = ("configurations.inline", "configurations.deepspeed", "optimizer.params", "dataset.seq_len")
"""Key paths that Options have in another form (:func:`options_of`)."""


@cache
def known_paths() -> Mapping[str, Any]:
    """Key path of every value of a recipe → its default."""
    sections = Recipe().model_dump(exclude={"axes"})
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


PATHS: Mapping[str, str] = {
    _OTHER_NAMES.get(path, path.rpartition(".")[2]): path for path in known_paths() if path not in _NO_FIELD
}
"""Field of Options, or of its Inspection → key path of the recipe."""
_OF_RECIPES_ALONE = ("pass_type", "synchronized")
"""Fields of Options that no flag of the scripts sets."""


# ------------------------------------------------------------------ from a file


def check_recipe(text: RecipeText, data: Data | None = None) -> Recipe:
    """The checked recipe of a text. ``data``: one point of its sweep, in place of its own values.

    Raises UsageError for the first value that cannot be used, with its line.
    """
    values = text.data if data is None else data
    values = {section: keys for section, keys in values.items() if keys is not None}  # a section without keys
    try:
        # As JSON, of which a strict model takes lists for tuples and texts for paths; of Python values it does not.
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise _usage_error(error, text) from None


def _usage_error(error: ValidationError, text: RecipeText) -> UsageError:
    errors = error.errors()
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    path = _known_part(first["loc"])
    place, shown = text.place(path), format_place(path)
    if first["type"] == "extra_forbidden":
        near = nearest_path(path)
        sections = f"the sections are {', '.join(Recipe.model_fields)} and sweep; docs/recipes.md lists their keys"
        return UsageError(f"{place}unknown key {shown}", remedy=f"did you mean {near}?" if near else sections)
    reasons = [_reason(each) for each in errors if _known_part(each["loc"]) == path]
    value = json.dumps(first["input"], default=str)
    value = value if len(value) <= 40 else f"{value[:36]} …"
    return UsageError(f"{place}{shown} is {value}", remedy=" or ".join(dict.fromkeys(reasons)))


_RULES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "model_type": "a block of keys",
    "dict_type": "a block of keys",
    "tuple_type": "a list",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "greater_than": "above {gt}",
    "less_than": "below {lt}",
    "literal_error": "{expected}",
    _FACTORY: "package.module:function",
    _NAME: "a name of letters, digits, dots, dashes and underscores",
}
"""Kind of a pydantic error, or the pattern of a text → what the value must be."""


def _reason(error: Any) -> str:
    rule = _RULES.get(error.get("ctx", {}).get("pattern", error["type"]))
    if rule is None:
        return str(error["msg"]).removeprefix("Value error, ")
    return "it must be " + rule.format(**error.get("ctx", {}))


def _known_part(path: KeyPath) -> KeyPath:
    """A place as pydantic gives it, without the names of the alternatives of a value."""
    return tuple(step for step in path if not (isinstance(step, str) and ("[" in step or step in _ALTERNATIVES)))


_ALTERNATIVES = ("constrained-int", "int", "str", "bool", "float", "nullable")


def can_be_swept(path: str) -> bool:
    """Whether a sweep may have several values of a key path."""
    if path.startswith(tuple(f"{block}." for block in _SWEPT_BLOCKS)):
        return all(path.split("."))
    is_known = path in known_paths() and path not in _SWEPT_BLOCKS
    return is_known and (path in _SWEPT_KEYS or path.startswith(tuple(f"{section}." for section in SWEPT_SECTIONS)))


def is_swept_list(path: str, value: Any) -> bool:
    """Whether a value in a recipe is a list of values of a sweep, not a list that is one value."""
    if not isinstance(value, list) or path.startswith("configurations."):
        return False
    return path.rpartition(".")[2] not in _LISTS_OF_DEEPSPEED or any(isinstance(item, list) for item in value)


def nearest_path(path: KeyPath) -> str | None:
    """The key path that an unknown one most likely stands for: of the same section if one is near, else of another."""
    *section, key = map(str, path)
    if key in PATHS:  # the name of a script's flag
        return PATHS[key]
    names = {known: known.rpartition(".")[2] for known in known_paths()}
    if len(path) == 1:
        names |= {section: section for section in (*Recipe.model_fields, "sweep")}
    own = {known: name for known, name in names.items() if known.startswith(".".join([*section, ""]))}
    for candidates in (own, names):
        near = difflib.get_close_matches(key, candidates.values(), n=1, cutoff=0.6)
        if near:
            return next(known for known, name in candidates.items() if name == near[0])
    return None


# ------------------------------------------------------------------ a recipe as Options


def options_of(recipe: Recipe, folder: Path, **run_flags: Any) -> Options:
    """The Options of one point. ``folder``: of the recipe, to which the files that it names are relative.

    ``run_flags``: fields of Options that no recipe holds: they say how this one command behaves.

    Raises UsageError for values that contradict each other.
    """
    values = {name: attrgetter(path)(recipe) for name, path in PATHS.items()}
    _require_one_accumulation(values)
    values["seq_length"] = _seq_length(recipe)
    # 1 until the ranks are known, where the global batch is given (planner.with_accumulation).
    values["grad_accum"] = values["grad_accum"] or 1
    values["strategies"] = _strategies(values["strategies"], values["stage"], values["nvme_path"] is not None)
    inline = _inline_rows(recipe)
    if not values["stages"] and not values["strategies"] and not values["configs"] and not inline:
        values["stages"] = (0, 1, 2, 3)
    stages = dict.fromkeys(values["stages"])
    # Stage 2 and the strategy zero2 are one row.
    named = {strategies.ZERO_STAGES[stage].name for stage in stages}
    values["stages"] = tuple(stages)
    values["strategies"] = tuple(name for name in dict.fromkeys(values["strategies"]) if name not in named)
    values["configs"] = tuple(folder / path for path in values["configs"])
    for name in ("data", "hostfile"):
        if values[name] is not None:
            values[name] = folder / values[name]
    return Options.of(
        family="recipe",
        **values,
        inline=inline,
        axes=tuple(
            axis_rows.read_values(name, [_axis_text(value) for value in _listed(values)])
            for name, values in recipe.axes.items()
        ),
        ds_config={},
        set=(
            *(overrides.nested(key, value) for key, value in recipe.configurations.deepspeed.items()),
            *(overrides.nested(f"optimizer.params.{key}", value) for key, value in recipe.optimizer.params.items()),
        ),
        **run_flags,
    )


def _seq_length(recipe: Recipe) -> int | Literal["auto"] | None:
    given = {"training.seq_len": recipe.training.seq_len, "dataset.seq_len": recipe.dataset.seq_len}
    lengths = {length for length in given.values() if length is not None}
    if len(lengths) > 1:
        problem = " and ".join(f"{path} {length}" for path, length in given.items())
        raise UsageError(f"{problem} contradict each other", remedy="keep one of them")
    return next(iter(lengths), None)


def _require_one_accumulation(values: Mapping[str, Any]) -> None:
    if values["global_batch_size"] is None:
        return
    if values["grad_accum"] is not None:
        raise UsageError(
            "training.global_batch_size and training.grad_accum together",
            remedy="give one of them: accumulation follows from the global batch",
        )
    if values["batch_size"] == "auto":
        raise UsageError(
            "training.global_batch_size with local_batch_size auto",
            remedy="give grad_accum, or a local_batch_size in sequences",
        )


def _strategies(names: tuple[str, ...], stage: int, has_nvme: bool) -> tuple[str, ...]:
    """The names, ``all`` replaced by every stage and offload strategy, each configuration once."""
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


def _axis_text(value: AxisValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _inline_rows(recipe: Recipe) -> tuple[ConfigurationFile, ...]:
    """The recipe's own configurations, without those that stand for a strategy's."""
    return tuple(
        ConfigurationFile(
            path=Path(name), kind="deepspeed", name=name, text=json.dumps(config, indent=2), config=config
        )
        for name, config in recipe.configurations.inline.items()
        if name not in STRATEGY_NAMES
    )


def config_maker(recipe: Recipe) -> MakeConfig:
    """The function that makes each strategy's configuration: the recipe's own where it gives one, else the built-in."""

    def make(strategy: Strategy, batch_size: int, grad_accum: int) -> Config:
        config = base_config(strategy, batch_size, grad_accum)
        own = recipe.configurations.inline.get(strategy.name)
        # A recipe's own configuration may leave out batch and optimizer, without which no row can run.
        return config if own is None else {key: config[key] for key in (*BATCH_KEYS, "optimizer")} | copy.deepcopy(own)

    return make


# ------------------------------------------------------------------ Options as a recipe


def recipe_of(options: Options, make_config: MakeConfig, rows: list[Strategy]) -> Data:
    """The values of the recipe that runs what these Options and this function of a script run.

    ``rows``: the strategies that the Options ask for. Sections that every reader wants to see are whole, of the others
    only what differs from the defaults.
    """
    data: Data = {section: {} for section in Recipe.model_fields}
    for name, path in PATHS.items():
        section, _, key = path.partition(".")
        value = _json_value(getattr(options.inspection if name in INSPECTION_FIELDS else options, name))
        is_empty = value is None or value is False or value == [] or name in _OF_RECIPES_ALONE
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
    if options.family == "offload" and options.nvme_path is not None and "nvme" not in options.strategies:
        data["configurations"]["strategies"].append("nvme")
    inline = dict(_edited_configurations(options, make_config, rows))
    changes = reduce(overrides.merge, options.config_changes)
    data["configurations"] |= {key: value for key, value in (("inline", inline), ("deepspeed", changes)) if value}
    return {section: values for section, values in data.items() if values}


def _json_value(value: Any) -> Any:
    """A value of Options as a recipe has it: paths are absolute, since the recipe may be anywhere."""
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    return str(value.absolute()) if isinstance(value, Path) else value


def _edited_configurations(
    options: Options, make_config: MakeConfig, rows: list[Strategy]
) -> Iterator[tuple[str, Config]]:
    """The configurations of a script whose function was edited, without the batch keys that it left alone."""
    for strategy in rows:
        if strategy.engine != "deepspeed":  # torch's engines do not follow the function
            continue
        built_in = base_config(strategy, options.batch_size, options.grad_accum)
        config = make_config(strategy, options.batch_size, options.grad_accum)
        if config != built_in:
            config = overrides.json_values(config)
            same = [key for key in BATCH_KEYS if config.get(key) == built_in[key]]
            yield strategy.name, {key: value for key, value in config.items() if key not in same}


def yaml_text(data: Data) -> str:
    """A recipe as YAML that ``recipe_file.parse_recipe`` reads back to the same values."""
    return str(
        yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=100, allow_unicode=True)
    )


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes texts that YAML 1.2 reads as numbers, writes lists in one line, and no anchors."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


_Dumper.add_representer(
    list, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)
)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


# ------------------------------------------------------------------ JSON Schema


def recipe_schema() -> Data:
    """The JSON Schema of a recipe's file, for editors, with lists in the sections that may be swept, and ``sweep``."""
    schema = Recipe.model_json_schema()
    for path in filter(can_be_swept, known_paths()):
        section, _, key = path.partition(".")
        properties = schema["$defs"][section.capitalize()]["properties"]
        value = properties[key]
        notes = {name: value.pop(name) for name in ("description", "default", "title") if name in value}
        listed = {"type": "array", "items": copy.deepcopy(value), "minItems": 1}
        alternatives = value["anyOf"] if set(value) == {"anyOf"} else [value]
        properties[key] = {**notes, "anyOf": [*alternatives, listed]}
    values = {"type": ["boolean", "integer", "number", "string", "null", "array"]}  # betas are a list
    point = {"type": "object", "additionalProperties": values}
    schema["properties"]["sweep"] = {
        "type": "object",
        "description": "Several workloads in one run: every combination of the values in matrix and in lists.",
        "additionalProperties": False,
        "properties": {
            "matrix": {"type": "object", "additionalProperties": {"type": "array", "items": values, "minItems": 1}},
            "include": {"type": "array", "items": point},
            "exclude": {"type": "array", "items": point},
        },
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "ds_bench recipe"}
