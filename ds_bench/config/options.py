"""The request: every option of a run, declared once with its values, its help, its flag and its recipe key.

``cli.arguments`` makes the flags from these declarations, ``config.recipe`` the model of recipes and its JSON Schema.
Both make an :class:`Options`.
"""
# ruff: noqa: RUF009 - option() makes a field, as dataclasses.field() does

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import UsageError
from ..units import from_gb
from .deepspeed_config import OPTIMIZERS
from .shard import Shard
from .spec import (
    DEFAULT_PREFETCH,
    INSPECTION_FIELDS,
    MAX_DATA_WORKERS,
    MAX_PREFETCH,
    MAX_PROFILE_STEPS,
    MONITORS,
    NO_INSPECTION,
    PASS_TYPES,
    PRECISIONS,
    PROFILES,
    Inspection,
    Monitor,
    PassType,
    Precision,
    ProfileName,
    point_text,
)
from .strategies import REFERENCES, STRATEGY_NAMES
from .token_file import TOKEN_TYPES, TokenFile, TokenType
from .training_script import Script

if TYPE_CHECKING:
    from .axis_rows import AxisValues
    from .configuration_files import ConfigurationFile

Family = Literal["zero", "offload", "recipe"]
"""Where the request comes from: one of the scripts, or a recipe."""
MAX_NUMBER = 10**9
"""Upper bound on batches, steps, seconds and GB; clocks and kernel limits overflow above it."""
MAX_RANKS = 2**16
MAX_REPEATS = 1000
MAX_PORT = 2**16 - 1
COUNT: Mapping[str, Any] = {"ge": 1, "le": MAX_NUMBER}
DEFAULT_BATCH_SIZE = 4
FACTORY = r"^[^:]+:[^:]+$"
"""The form of ``--model-factory``."""
LORA = r"^[1-9][0-9]{0,4}(:\s*[^:,\s]+(\s*,\s*[^:,\s]+)*\s*)?$"
"""The form of ``--lora``."""
ALL = "all"
"""Selects every strategy."""
EMPTY_PATH = "a path must not be empty; . is the current folder"
GOALS = ("speed", "balanced", "memory")
"""Aims of a recommendation (docs/reading.md)."""
ROW_FORMATS = ("json", "csv", "parquet")
"""Output formats of flat rows in ``report``."""
FAIL_ON = ("regression", "missing", "unmatched", "noisy")
"""Reasons for ``baseline check`` to fail: a regression; a row of the saved run that the result lacks; a trained row
without a baseline; a row whose noise could hide a regression."""
FAIL_ON_DEFAULT = ("regression", "missing", "unmatched")
TRACKERS = ("tensorboard",)
"""Programs that show runs, by the name of their package."""
SEVERAL_NODES = (
    "hostfile", "include", "exclude", "host_command", "env", "master_addr", "master_port",
)  # fmt: skip
"""Options that reach other machines; ``--resume`` does not take them from a run folder."""
SCRIPT_OPTIONS = ("base_config", "python", "override_config", "accelerate_env", "engine")
"""Options that have no meaning without a script."""
_AMOUNT: Mapping[str, Any] = {"gt": 0, "le": MAX_NUMBER}
_MIN_RANK_DATA_GB = 0.5
"""A rank needs 0.4 GB before it builds a model. With less, some ranks cannot load libraries; others wait for them."""
_STEP: Mapping[str, Any] = {"ge": -1, "le": MAX_NUMBER}
"""Limits on a step number; -1 leaves it unset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The values of one field of ``Options``, and the flag and key that set it."""

    kind: type
    """bool, int, float, str or Path, or a class that ``cli.arguments`` and ``config.recipe`` can read."""
    text: str
    """Description, for ``--help`` and the JSON Schema."""
    default: Any = None
    """None: the option may be unset."""
    default_text: str = ""
    """Text for the default, if the value alone does not show it."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """As pydantic names them: ``ge``, ``gt``, ``le``, ``lt`` for a number, ``min_length``, ``pattern`` for a string."""
    choices: Sequence[Any] = ()
    """All allowed values; empty if the limits define them."""
    auto: bool = False
    """Whether ``auto`` is allowed too."""
    many: bool = False
    """Whether it is a list; one with a non-empty default cannot be empty."""
    key: str | None = None
    """Key path in a recipe, ``training.steps``; None if only a flag sets it."""
    flag: str | None = None
    """``--num-steps``; None if only a recipe sets it."""
    metavar: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``add_argument`` that do not follow from the other fields."""

    @property
    def help(self) -> str:
        shown = self.default_text or (str(self.default) if self.default or type(self.default) is int else "")
        return f"{self.text} (default: {shown})" if shown and self.default is not True else self.text


def option(kind: type, default: Any, text: str, *, flag: str | bool = True, **facts: Any) -> Any:
    """Declare a field of ``Options``. ``flag``: True to name it after the field, False for none."""
    return field(default=default, metadata={"kind": kind, "default": default, "text": text, "flag": flag, **facts})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The user's request. The fields are in the order of a recipe, and most have the name of their flag."""

    family: Family

    # fmt: off
    # model
    model: str = option(str, "gpt2", "built-in model, local folder or Hub name", key="model.name", metavar="NAME",
        limits={"min_length": 1})
    model_factory: str | None = option(str, None, "function that returns your own model", key="model.factory",
        metavar="PKG.MOD:FN", limits={"pattern": FACTORY})
    trust_remote_code: bool = option(bool, False, "run modeling code that comes with the model",
        key="model.trust_remote_code")

    # training
    seq_length: int | None = option(int, None,
        "tokens per sequence; auto: for each row, the longest that trains",
        default_text="512, or the model's limit if lower", key="training.seq_len", limits=COUNT, auto=True)
    """None (also during a search): 512, or the model's limit if lower."""
    batch_size: int = option(int, DEFAULT_BATCH_SIZE,
        "micro-batch per GPU, in sequences; auto: for each row, the largest that trains",
        key="training.local_batch_size", limits=COUNT, auto=True)
    """1 if it is searched for."""
    global_batch_size: int | None = option(int, None,
        "sequences per optimizer step on all GPUs; accumulation follows from it: global_batch_size / "
        "(local_batch_size × data-parallel ranks)", flag=False, key="training.global_batch_size", limits=COUNT)
    grad_accum: int = option(int, None, "micro-batches per optimizer step", default_text="1", key="training.grad_accum",
        limits=COUNT, arguments={"default": 1})
    """1 until the number of ranks is known, if it follows from the global batch."""
    num_steps: int = option(int, 20, "measured optimizer steps", key="training.steps", limits=COUNT)
    warmup_steps: int = option(int, 5, "steps run first and left out of all statistics", key="training.warmup_steps",
        limits={"ge": 0, "le": MAX_NUMBER})
    precision: Precision | Literal["auto"] = option(str, "auto", "number format",
        default_text="auto, bf16 if the device supports it", key="training.precision", choices=("auto", *PRECISIONS))
    activation_checkpointing: bool = option(bool, False, "recompute activations in the backward pass",
        key="training.activation_checkpointing")
    seed: int = option(int, 42, "seed for weights and data", key="training.seed", limits={"ge": 0, "le": 2**32 - 1})
    dropout: float | None = option(float, None, "dropout probability throughout the model, at least 0 and below 1",
        default_text="the model's own", key="training.dropout", metavar="P", limits={"ge": 0, "lt": 1})
    lora: str | None = option(str, None,
        "train only LoRA adapters of rank R (peft), on all linear modules or on those named",
        key="training.lora", metavar="R[:MODULE,...]", limits={"pattern": LORA})
    freeze: str | None = option(str, None,
        "parameters to freeze: vision, or those whose names contain one of these strings, e.g. layers.0.,embed_tokens",
        key="training.freeze", metavar="NAME,...", limits={"min_length": 1})
    pass_type: PassType = option(str, "train",
        "what a step is: the model's forward pass, forward and backward, or a training step; above stage 0 only train",
        flag=False, key="training.pass_type", choices=PASS_TYPES)
    synchronized: bool = option(bool, True,
        "false is wrong on purpose: the clock is read without waiting for the device", flag=False,
        key="training.synchronized")

    # configurations
    stages: tuple[int, ...] = option(int, (), "ZeRO stages, in the order given",
        default_text="0 1 2 3, unless --strategies or --configs is given", key="configurations.stages",
        choices=(0, 1, 2, 3), many=True, arguments={"default": None})
    strategies: tuple[str, ...] = option(str, (),
        "strategies, listed after the stages; none: no offload; all: every stage and offload strategy in one table",
        key="configurations.strategies", choices=(ALL, *STRATEGY_NAMES), many=True, arguments={"default": None})
    stage: int = option(int, 3, "ZeRO stage of the offload strategies", key="configurations.stage", choices=(1, 2, 3))
    configs: tuple[Path, ...] = option(Path, (),
        "your own configurations, one row per file: DeepSpeed JSON, Accelerate YAML, Trainer arguments",
        key="configurations.configs", many=True, metavar="FILE_OR_DIR", arguments={"default": None})
    keep_batch: bool = option(bool, False,
        "use the batch keys of each file in --configs, not --batch-size and --grad-accum",
        key="configurations.keep_batch")
    base_config: Path | None = option(Path, None,
        "with a script: your DeepSpeed configuration, which --stages, --strategies and --axis edit", flag=True,
        key="configurations.base_config", metavar="FILE")
    inline: tuple[ConfigurationFile, ...] = option(dict, (),
        'DeepSpeed configurations by name, one row each, with "auto" resolved as the Trainer does; one with the name '
        "of a strategy replaces that strategy's", flag=False, key="configurations.inline")
    """As if each were read from a file."""
    set: tuple[Mapping[str, Any], ...] = option(dict, (),
        "set a key in every DeepSpeed configuration, e.g. zero_optimization.overlap_comm=false; may be repeated",
        key="configurations.deepspeed", metavar="KEY.PATH=VALUE", arguments={"action": "append", "default": []})
    """Each as ``{"zero_optimization": {"overlap_comm": False}}``; they are applied after ``ds_config``."""
    common_batch: bool = option(bool, False,
        "with --batch-size auto: also run all rows at the largest micro-batch at which all of them train",
        key="configurations.common_batch")
    relative_to: str | None = option(str, None,
        "row that the Relative column (--verbose, --markdown, --html) compares with",
        default_text="the first usable row", key="configurations.relative_to", metavar="STRATEGY")

    # dataset
    data: Path | None = option(Path, None, "train on the token ids of this file, through a data loader",
        default_text="random ids", key="dataset.path", metavar="FILE")
    data_dtype: TokenType | None = option(str, None, "type of the file's ids",
        default_text="from its suffix, .uint16 or .uint32", key="dataset.dtype", choices=TOKEN_TYPES)
    vocab_size: int | None = option(int, None, "draw random token ids below N; reject a file with larger ids",
        default_text="the model's vocabulary", key="dataset.vocab_size", limits=COUNT)

    # dataloader
    data_workers: int | None = option(int, None, "worker processes of the data loader; 0: each rank loads its own data",
        default_text="0 with --data, else no data loader", key="dataloader.workers",
        limits={"ge": 0, "le": MAX_DATA_WORKERS})
    data_pin_memory: bool = option(bool, False, "copy micro-batches to page-locked memory in the data loader",
        key="dataloader.pin_memory")
    data_prefetch: int = option(int, DEFAULT_PREFETCH, "micro-batches that each worker process loads ahead",
        key="dataloader.prefetch", limits={"ge": 1, "le": MAX_PREFETCH})

    # optimizer
    optimizer: str | None = option(str, None, "optimizer of every row", default_text="AdamW", key="optimizer.type",
        choices=OPTIMIZERS)

    # profiling
    profiles: tuple[ProfileName, ...] = option(str, (),
        "torch: trace and table of operators; memory: what allocates memory; nsys: a window for Nsight Systems",
        flag="--profile", key="profiling.profiles", choices=PROFILES, many=True)
    profile_steps: int = option(int, NO_INSPECTION.profile_steps, "steps that each profiler observes",
        key="profiling.steps", limits={"ge": 1, "le": MAX_PROFILE_STEPS})
    profile_ranks: tuple[int, ...] = option(int, NO_INSPECTION.profile_ranks, "ranks that write a profile",
        default_text="0", key="profiling.ranks", metavar="RANK", limits={"ge": 0, "le": MAX_RANKS}, many=True)
    nsys_start: int = option(int, -1,
        "first step that nsys records; step 0 is the first warm-up step; adds --profile nsys",
        default_text="-1, the first after the measured ones", key="profiling.nsys_start", metavar="STEP", limits=_STEP)
    nsys_end: int = option(int, -1, "last step that nsys records", default_text="-1, the last of --profile-steps",
        key="profiling.nsys_end", metavar="STEP", limits=_STEP)

    # a script of the user's own
    script: tuple[str, ...] = option(str, (),
        "your own training script and its arguments, instead of a model (docs/own_work.md)", flag=False,
        key="script", many=True)
    python: str | None = option(str, None, "interpreter that runs the script", default_text="this one",
        key="launch.python", metavar="PROGRAM", limits={"min_length": 1})
    override_config: bool = option(bool, False, "each row's configuration replaces the one that the script gives to "
        "DeepSpeed, except batch, optimizer, scheduler and precision", key="launch.override_config")
    accelerate_env: bool = option(bool, False, "pass each row's configuration in Accelerate's environment variables",
        key="launch.accelerate_env")
    engine: str | None = option(str, None, "measure the engine of this model class, if the script has several",
        default_text="the one that steps first", key="launch.engine", metavar="NAME", limits={"min_length": 1})

    # launch
    num_gpus: int | None = option(int, None, "GPUs, or CPU ranks", default_text="all GPUs, or 1 rank",
        key="launch.num_gpus", limits={"ge": 1, "le": MAX_RANKS})
    accelerator: str = option(str, "auto", "device type", key="launch.accelerator", choices=("auto", "cuda", "cpu"))
    launcher: str = option(str, "auto",
        "warm: ranks forked from one preloaded process; deepspeed: DeepSpeed's launcher for every trial",
        key="launch.launcher", choices=("auto", "warm", "deepspeed"))
    hostfile: Path | None = option(Path, None,
        "DeepSpeed hostfile: the hosts of every trial, reached by ssh (docs/many_machines.md)", key="launch.hostfile",
        metavar="FILE")
    include: str | None = option(str, None, "hosts and slots of the hostfile to use, e.g. a@b:0,1",
        key="launch.include", metavar="HOST[:SLOTS]@...")
    exclude: str | None = option(str, None, "hosts and slots of the hostfile to leave out, e.g. a@b:0,1",
        key="launch.exclude", metavar="HOST[:SLOTS]@...")
    host_command: str | None = option(str, None,
        "command that runs a program on {host}, e.g. 'kubectl exec -i {host} --'",
        default_text="ssh {host}, or srun in a Slurm job", key="launch.host_command", metavar="COMMAND")
    env: tuple[str, ...] = option(str, (),
        "variable to pass to the ranks on every host, in addition to NCCL_*, HF_* … (docs/many_machines.md); may be "
        "repeated",
        key="launch.env", metavar="NAME[=VALUE]", many=True,
        arguments={"action": "append", "nargs": None, "default": []})
    master_addr: str | None = option(str, None, "address at which the other hosts reach the first one",
        default_text="its address on the route to the second host", key="launch.master_addr", metavar="ADDR")
    master_port: int | None = option(int, None, "port on the first host", default_text="a free one",
        key="launch.master_port", metavar="PORT", limits={"ge": 1, "le": MAX_PORT})
    nvme_path: Path | None = option(Path, None, "folder on the NVMe disk", key="launch.nvme_path", metavar="DIR")
    cpu_memory_limit: float | None = option(float, None,
        "limit on each rank's own memory (RLIMIT_DATA), enforced by the kernel, in GB (2^30)",
        key="launch.cpu_memory_limit", metavar="GB", limits={"ge": _MIN_RANK_DATA_GB, "le": MAX_NUMBER})
    gpu_memory_limit: float | None = option(float, None, "emulate a GPU with this much memory, in GB (2^30)",
        key="launch.gpu_memory_limit", metavar="GB", limits=_AMOUNT)
    peak_tflops: float | None = option(float, None, "dense peak of one GPU in TFLOP/s, for MFU",
        default_text="from a table of known GPUs", key="launch.peak_tflops", metavar="T", limits=_AMOUNT)
    timeout: float = option(float, 3600.0, "end a trial that takes longer than this", default_text="3600",
        key="launch.timeout", metavar="SECONDS", limits=_AMOUNT)
    stall_timeout: float = option(float, 600.0,
        "end a trial after this long without a sign of life (heartbeat, memory growth, disk I/O)",
        default_text="600", key="launch.stall_timeout", metavar="SECONDS", limits=_AMOUNT)
    skip_predicted_oom: bool = option(bool, False,
        "skip rows that are predicted not to fit; rows that may fit still run", key="launch.skip_predicted_oom")
    force: bool = option(bool, False, "also run rows predicted to need more than 1.5 times the host memory",
        key="launch.force")

    # output
    output_dir: Path = option(Path, Path("results"), "folder for the results, created if missing", key="output.dir",
        metavar="DIR")
    repeats: int = option(int, 1,
        "runs of every row, in rounds, each in shuffled order; 3 or more give confidence intervals",
        key="output.repeats", metavar="R", limits={"ge": 1, "le": MAX_REPEATS})
    goal: str = option(str, "balanced", "what the recommendation is for: the fastest row, the least memory, or both",
        key="output.goal", choices=GOALS)
    export: str | None = option(str, None, "write this row's configuration for DeepSpeed, Trainer and Accelerate",
        default_text="the recommended row", key="output.export", metavar="STRATEGY")
    monitor: Monitor | None = option(str, None,
        "write loss, memory and throughput of each step to steps.jsonl in the trial's folder while it runs; "
        "tensorboard: also as TensorBoard files; without a value: steps", key="output.monitor", choices=MONITORS,
        arguments={"nargs": "?", "const": "steps"})
    checkpoint: bool = option(bool, False,
        "save and load a checkpoint of every row, save its 16-bit weights, and time each of these; the files are "
        "removed",
        key="output.checkpoint")
    checkpoint_path: str | None = option(str, None, "folder on the disk to save to; adds --checkpoint",
        default_text="the folder for the results", key="output.checkpoint_path", metavar="DIR")
    csv: Path | None = option(Path, None,
        "also write the flat rows as CSV to this file, replacing it; relative to the current folder", flag=False,
        key="output.csv")

    # flags without a key
    axes: tuple[AxisValues, ...] = option(str, (),
        "one row for each value, where the axis applies, e.g. overlap_comm=true,false; several axes give every "
        "combination (ds-compare axes lists the axes)", flag="--axis", metavar="NAME=V1,V2,...",
        arguments={"action": "append", "default": []})
    """The values of each axis."""
    ds_config: Mapping[str, Any] = option(Path, None, "JSON file whose values replace those of every configuration",
        metavar="FILE")
    """Content of the file."""
    resume: Path | None = option(Path, None,
        "finish an earlier run on the same machine, with its flags; flags that run code or reach "
        "other machines, and values that may be credentials, must be given again", metavar="RUN_DIR")
    retry: tuple[str, ...] = option(str, (),
        "with --resume: also rerun rows with one of these outcomes, e.g. Timeout,OOM",
        metavar="CLASS,...", arguments={"default": ""})
    shard: Shard | None = option(Shard, None,
        "run only part I of N of the plan's trials; report combines the results of all parts "
        "(docs/recipes.md)", metavar="I/N")
    """The part of the plan that this run executes; None for all of it."""
    dry_run: bool = option(bool, False,
        "print the plan with each trial's configuration and command (ds-compare run: only with --verbose); run nothing")
    print_recipe: bool = option(bool, False, "print the recipe of this comparison; run nothing")
    format: str = option(str, "table", "format of the summary", choices=("table", "markdown", "json"))
    quiet: bool = option(bool, False, "print only the summary")
    verbose: bool = option(bool, False,
        "print the table with more columns and all notes, and each trial's caveats and files when it ends")
    strict: bool = option(bool, False, "exit 1 if any row failed")

    # fmt: on
    # derived from the above, or set by the command
    auto_batch: bool = False
    """Run each strategy at the largest micro-batch that trains."""
    auto_seq: bool = False
    """Run each row at the longest sequence that trains."""
    budget: float | None = None
    """Minutes after which no further trial begins; None without a limit."""
    point: tuple[tuple[str, Any], ...] = ()
    """Key paths of a recipe and their values at this point of its sweep; empty without a sweep."""
    files: tuple[ConfigurationFile, ...] | None = None
    """The configurations of ``configs`` and ``inline``; None until they are read (``planning.requested_rows``)."""
    file_lines: tuple[str, ...] = ()
    """Notes on them for the user."""
    token_file: TokenFile | None = None
    """The token file of ``data``; None until the plan is made."""
    base_file: ConfigurationFile | None = None
    """The configuration of ``base_config``; None until it is read, or if there is none."""
    own_script: Script | None = None
    """The script of ``script``; None until the plan is made, or if there is none."""
    typed: frozenset[str] | None = None
    """Options whose flags were typed over a recipe; None without a recipe file."""

    @classmethod
    def of(cls, **values: Any) -> Options:
        """Make Options from the values of flags or of a recipe, where ``auto`` is a size to search for."""
        auto_batch, auto_seq = values["batch_size"] == "auto", values["seq_length"] == "auto"
        if auto_batch:
            values["batch_size"] = 1
        if auto_seq:
            values["seq_length"] = None
        values["model"] = values["model_factory"] or values["model"]
        return cls(**values, auto_batch=auto_batch, auto_seq=auto_seq)

    @property
    def variables(self) -> dict[str, str]:
        """The variables that ``env`` gives with a value."""
        return dict(text.split("=", 1) for text in self.env if text.find("=") > 0)

    def spelling_of(self, name: str) -> str:
        """Return how the user spells an option: its flag, or its key in the recipe."""
        option = OPTIONS[name]
        key = "axes" if name == "axes" else option.key
        by_flag = key is None or self.family != "recipe" or self.typed is None or name in self.typed
        return str(option.flag if by_flag and option.flag else key)

    def checked(self) -> Options:
        """Return the options with derived values filled in. Raises UsageError if two of them contradict each other."""
        # An axis may give rows a data loader that the options themselves do not show.
        has_loader = self.data is not None or self.data_workers is not None or "data_workers" in self.axis_names
        auto = f"{self.spelling_of('batch_size')} auto"
        configs, data = self.spelling_of("configs"), self.spelling_of("data")
        for name, other, other_text, remedy in (
            ("common_batch", not self.auto_batch, f"without {auto}", f"add {auto}"),
            ("keep_batch", self.auto_batch, f"with {auto}", "leave one of them out"),
            ("keep_batch", not self.configs, f"without {configs}", f"add {configs} FILE"),
            ("retry", self.resume is None, "without --resume", "add --resume RUN_DIR"),
            *((name, not self.script, "without a script", "add -- SCRIPT.py and its arguments")
              for name in SCRIPT_OPTIONS),
            ("quiet", self.verbose, "and --verbose cannot be combined", "give one of them"),
            ("csv", self.shard is not None, "with --shard: each shard would replace the file",
             "leave it out; report --format csv --output FILE reads all shards"),
            ("data_dtype", self.data is None, f"without {data}", f"add {data} FILE"),
            ("data_pin_memory", not has_loader, "without a data loader",
             f"add {self.spelling_of('data_workers')} N"),
        ):  # fmt: skip
            if other and getattr(self, name):
                raise UsageError(f"{self.spelling_of(name)} {other_text}", remedy=remedy)
        if self.auto_batch and self.auto_seq:
            raise UsageError(f"{auto} with {self.spelling_of('seq_length')} auto", remedy="give one of them a number")
        if self.data_prefetch != DEFAULT_PREFETCH and not self.data_workers and "data_workers" not in self.axis_names:
            problem = f"{self.spelling_of('data_prefetch')} {self.data_prefetch} without worker processes"
            raise UsageError(problem, remedy=f"add {self.spelling_of('data_workers')} 1 or more")
        if self.script:
            self._check_script()
        if self.launcher == "warm" and self.hostfile is not None:
            name, hosts = self.spelling_of("launcher"), self.spelling_of("hostfile")
            raise UsageError(f"{name} warm works only on one node", remedy=f"leave {name} out, or drop {hosts}")
        return replace(
            self,
            profiles=self._checked_profiles(),
            profile_ranks=tuple(dict.fromkeys(self.profile_ranks)),
            checkpoint=self.checkpoint or self.checkpoint_path is not None,
        )

    def _check_script(self) -> None:
        """Raise UsageError for options that cannot be combined with a script."""
        references = [name for name in self.strategies if name in REFERENCES]
        if references or self.launcher == "warm":
            name, value = ("strategies", references[0]) if references else ("launcher", "warm")
            remedy = "leave it out: the script trains with DeepSpeed, in processes of its own"
            raise UsageError(f"{self.spelling_of(name)} {value} and a script cannot be combined", remedy=remedy)
        if self.configs and self.base_config is not None:
            names = f"{self.spelling_of('configs')} and {self.spelling_of('base_config')}"
            raise UsageError(
                f"{names} cannot be combined", remedy="give one of them: files as rows, or one file to edit"
            )
        if self.base_config is None and (self.stages or self.strategies):
            names = f"{self.spelling_of('stages')} and {self.spelling_of('strategies')}"
            problem = f"{names} need a configuration to edit when a script is given"
            raise UsageError(problem, remedy=f"add {self.spelling_of('base_config')} FILE")
        if self.base_config is None and not self.configs and not self.inline:
            names = f"{self.spelling_of('configs')} FILE …, or {self.spelling_of('base_config')} FILE"
            raise UsageError("the script has no configurations to run with", remedy=f"give {names}")

    def _checked_profiles(self) -> tuple[ProfileName, ...]:
        """The profilers, each once, with nsys if it has a window.

        Raises UsageError for a window outside the profiled steps.
        """
        has_window = self.nsys_start >= 0 or self.nsys_end >= 0
        names = dict.fromkeys((*self.profiles, *(("nsys",) if has_window else ())))
        usual = (NO_INSPECTION.profile_steps, NO_INSPECTION.profile_ranks)
        if not names and (self.profile_steps, self.profile_ranks) != usual:
            steps_or_ranks = f"{self.spelling_of('profile_steps')} or {self.spelling_of('profile_ranks')}"
            profile = self.spelling_of("profiles")
            raise UsageError(f"{steps_or_ranks} without {profile}", remedy=f"add {profile} torch")
        # Profilers observe steps after the measured ones, so that they do not disturb them.
        steps_before = self.warmup_steps + self.num_steps
        observed = self.inspection.profiled_steps(steps_before)
        window = self.inspection.nsys_window(steps_before)
        if not window or window.start < observed.start or window.stop > observed.stop:
            start, end = self.spelling_of("nsys_start"), self.spelling_of("nsys_end")
            asked_for = f"nsys is to record steps {window.start} to {window.stop - 1}, but"
            if self.nsys_end < 0 and window.start >= observed.stop:  # the window has no end of its own
                asked_for = f"{start} {window.start} is beyond the last step, {observed.stop - 1}:"
            raise UsageError(
                f"{asked_for} steps 0 to {observed.start - 1} are warm-up and measured, and profilers observe "
                f"{observed.start} to {observed.stop - 1}",
                remedy=f"give {start} and {end} among these, or raise {self.spelling_of('profile_steps')}",
            )
        return tuple(names)

    @property
    def inspection(self) -> Inspection:
        """Profiles, checkpoint and monitor of each trial."""
        return Inspection(**{name: getattr(self, name) for name in INSPECTION_FIELDS})

    @property
    def searches_size(self) -> bool:
        """Whether each row's micro-batch or sequence length is searched for by probes."""
        return self.auto_batch or self.auto_seq

    @property
    def config_changes(self) -> tuple[Mapping[str, Any], ...]:
        """Changes to every DeepSpeed configuration, in the order in which they apply."""
        return self.ds_config, *self.set

    @property
    def axis_names(self) -> list[str]:
        return [values[0].axis_name for values in self.axes]

    @property
    def point_text(self) -> str:
        """``gpt2, seq_len 1024``: the values of this point in one line; empty without a sweep."""
        return point_text(dict(self.point))

    @property
    def cpu_memory_limit_bytes(self) -> int | None:
        return None if self.cpu_memory_limit is None else from_gb(self.cpu_memory_limit)

    @property
    def gpu_memory_limit_bytes(self) -> int | None:
        return None if self.gpu_memory_limit is None else from_gb(self.gpu_memory_limit)


OPTIONS: Mapping[str, Option] = {
    each.name: Option(**{**each.metadata, "flag": f"--{each.name.replace('_', '-')}" if flag is True else flag or None})
    for each in fields(Options)
    if (flag := each.metadata.get("flag")) is not None
}
"""Every option, by the name of its field."""
FLAGS: Mapping[str, str] = {option.flag: name for name, option in OPTIONS.items() if option.flag is not None}
"""Flag → name of the field that it sets."""
