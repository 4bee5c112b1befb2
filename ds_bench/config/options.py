"""What the user requested, as one frozen value, and how each part of it is said: by a flag, by a key of a recipe.

``cli.arguments`` makes Options of flags, ``config.recipe`` of a recipe.
"""
# ruff: noqa: RUF009 - option() makes a field, as dataclasses.field() does

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..units import from_gb
from .deepspeed_config import OPTIMIZERS
from .option_declaration import AMOUNT, COUNT, MAX_NUMBER, Flag, Key, Option, Value, option, options_of
from .shard import Shard
from .spec import (
    DEFAULT_PREFETCH,
    INSPECTION_FIELDS,
    MAX_DATA_WORKERS,
    MAX_PREFETCH,
    MONITORS,
    MOST_PROFILE_STEPS,
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
from .strategies import STRATEGY_NAMES
from .token_file import TOKEN_TYPES, TokenFile, TokenType

if TYPE_CHECKING:
    from .axis_rows import AxisValues
    from .configuration_files import ConfigurationFile

Family = Literal["zero", "offload", "recipe"]
"""What asked for a comparison: one of the scripts, or a recipe."""
MAX_RANKS = 2**16
MAX_REPEATS = 1000
MAX_PORT = 2**16 - 1
DEFAULT_BATCH_SIZE = 4
FACTORY = r"^[^:]+:[^:]+$"
"""The form of ``--model-factory``."""
ALL = "all"
"""Stands for every strategy."""
SEQ_LENGTH_HELP = "tokens per sequence (default: 512, or the model's positions where it has fewer)"
EMPTY_PATH = "an empty text is no path; . is the current folder"
GOALS = ("speed", "balanced", "memory")
"""Aims of a recommendation (docs/choosing.md)."""
ROW_FORMATS = ("json", "csv", "parquet")
"""Forms in which ``report`` writes the flat rows of results."""
FAIL_ON = ("regression", "missing", "unmatched", "noisy")
"""What ``baseline check`` may fail on: a regression; a row of the saved run that the result lacks; a row that trained
and has no baseline; a row whose noise hides a regression."""
TRACKERS = ("tensorboard",)
"""Programs that show runs; each is a package of this name."""
SEVERAL_NODES = (
    "hostfile", "include", "exclude", "host_command", "env", "master_addr", "master_port",
)  # fmt: skip
"""Fields of Options that reach other machines: a run folder alone does not give them."""
FAIL_ON_DEFAULT = ("regression", "missing", "unmatched")
_STEP = {"ge": -1, "le": MAX_NUMBER}
"""Limits of the number of a step; -1 leaves it open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user requested. The fields are in the order of a recipe, and each has the name of its flag."""

    family: Family

    # model
    model: str = option(
        Value(str, "gpt2", {"min_length": 1}),
        Key("model.name", "Preset, local folder or name on the Hub."),
        Flag("preset, local path or Hub name (default: gpt2)", "NAME"),
    )
    model_factory: str | None = option(
        Value(str, None, {"pattern": FACTORY}),
        Key("model.factory", "package.module:function that returns a model of your own."),
        Flag("function that returns your own model", "PKG.MOD:FN"),
    )
    trust_remote_code: bool = option(
        Value(bool, False),
        Key("model.trust_remote_code", "Run modelling code that comes with the model."),
        Flag("run modelling code that comes with the model"),
    )

    # training
    seq_length: int | None = option(
        Value(int, None, COUNT, auto=True),
        Key(
            "training.seq_len",
            "Tokens per sequence; without it 512, or the model's positions where it has fewer; auto: the longest "
            "sequence that trains.",
        ),
        Flag(f"{SEQ_LENGTH_HELP}; auto: the longest that trains, for each row by itself"),
    )
    """None, also while it is searched for: 512, or the model's positions if it has fewer."""
    batch_size: int = option(
        Value(int, DEFAULT_BATCH_SIZE, COUNT, auto=True),
        Key(
            "training.local_batch_size",
            "Micro-batch: sequences per GPU in one forward pass; auto: the largest that trains.",
        ),
        Flag("micro-batch per GPU, in sequences; auto: the largest that trains, for each row by itself (default: 4)"),
    )
    """1 if it is searched for."""
    global_batch_size: int | None = option(
        Value(int, None, COUNT),
        Key(
            "training.global_batch_size",
            "Sequences per optimizer step on all GPUs; accumulation follows from it: global_batch_size / "
            "(local_batch_size × data-parallel ranks).",
        ),
    )
    grad_accum: int = option(
        Value(int, None, COUNT),
        Key(
            "training.grad_accum",
            "Micro-batches per optimizer step, where global_batch_size does not say; without both 1.",
        ),
        Flag("micro-batches per optimizer step (default: 1)", default=1),
    )
    """1 until the number of ranks is known, if it follows from the global batch."""
    num_steps: int = option(
        Value(int, 20, COUNT),
        Key("training.steps", "Optimizer steps that are measured."),
        Flag("measured optimizer steps (default: 20)"),
    )
    warmup_steps: int = option(
        Value(int, 5, {"ge": 0, "le": MAX_NUMBER}),
        Key("training.warmup_steps", "Steps run first and left out of every statistic."),
        Flag("steps run first and left out of every statistic (default: 5)"),
    )
    precision: Precision | Literal["auto"] = option(
        Value(str, "auto", choices=("auto", *PRECISIONS)),
        Key("training.precision", "Number format; auto: bf16 where the device has it."),
        Flag("number format (default: auto = bf16 where the device has it)"),
    )
    activation_checkpointing: bool = option(
        Value(bool, False),
        Key("training.activation_checkpointing", "Recompute activations in the backward pass."),
        Flag("recompute activations in the backward pass"),
    )
    seed: int = option(
        Value(int, 42, {"ge": 0, "le": 2**32 - 1}),
        Key("training.seed", "Seed of weights and data."),
        Flag("seed of weights and data (default: 42)"),
    )
    dropout: float | None = option(
        Value(float, None, {"ge": 0, "lt": 1}),
        Key("training.dropout", "Probability of every dropout; without it the model's own."),
        Flag("probability of every dropout in the model, from 0 to below 1 (default: the model's own)", "P"),
    )
    pass_type: PassType = option(
        Value(str, "train", choices=PASS_TYPES),
        Key(
            "training.pass_type",
            "What a step is: the model's forward pass, forward and backward, or with the optimizer's step; all but "
            "train at stage 0 alone.",
        ),
    )
    synchronized: bool = option(
        Value(bool, True),
        Key("training.synchronized", "false is wrong on purpose: the clock is read without waiting for the device."),
    )

    # configurations
    stages: tuple[int, ...] = option(
        Value(int, (), choices=(0, 1, 2, 3), many=True),
        Key("configurations.stages", "ZeRO stages, in order."),
        Flag("ZeRO stages, in this order (default: 0 1 2 3, without --strategies)", default=None),
    )
    strategies: tuple[str, ...] = option(
        Value(str, (), choices=(ALL, *STRATEGY_NAMES), many=True),
        Key(
            "configurations.strategies",
            "Strategies by name, after the stages; all: every stage and offload strategy.",
        ),
        Flag("strategies, after the stages; all: every stage and offload strategy in one table", default=None),
    )
    stage: int = option(
        Value(int, 3, choices=(1, 2, 3)),
        Key("configurations.stage", "ZeRO stage of the offload strategies."),
        Flag("ZeRO stage of the offload strategies (default: 3)"),
    )
    configs: tuple[Path, ...] = option(
        Value(Path, (), many=True),
        Key(
            "configurations.configs",
            "Configurations of your own, each file one row: DeepSpeed JSON, Accelerate YAML, folders.",
        ),
        Flag(
            "configurations of your own, each file one row: DeepSpeed JSON, Accelerate YAML, a Trainer's arguments",
            "FILE_OR_DIR",
            default=None,
        ),
    )
    keep_batch: bool = option(
        Value(bool, False),
        Key("configurations.keep_batch", "The batch keys of each file of configs rule, not those of training."),
        Flag("the batch keys of each file of --configs rule, not --batch-size and --grad-accum"),
    )
    inline: tuple[ConfigurationFile, ...] = option(
        Value(dict, ()),
        Key(
            "configurations.inline",
            'DeepSpeed configurations by name, each one row, "auto" resolved as the Trainer does; under the name of '
            "a strategy it stands for that strategy's.",
        ),
    )
    """As if each were read from a file."""
    set: tuple[Mapping[str, Any], ...] = option(
        Value(dict, ()),
        Key(
            "configurations.deepspeed",
            "Values that replace those of every DeepSpeed configuration, such as zero_optimization: …",
        ),
        Flag(
            "a value that replaces every configuration's, e.g. zero_optimization.overlap_comm=false; may be repeated",
            "KEY.PATH=VALUE",
            action="append",
            default=[],
        ),
    )
    """Each as ``{"zero_optimization": {"overlap_comm": False}}``; they come after those of ``ds_config``."""
    common_batch: bool = option(
        Value(bool, False),
        Key(
            "configurations.common_batch",
            "With local_batch_size auto: also rows at the largest that all of them train.",
        ),
        Flag("with --batch-size auto: also rows at the largest that all of them train"),
    )
    relative_to: str | None = option(
        Value(str),
        Key("configurations.relative_to", "Row that ratios refer to; without it the first good one."),
        Flag("row that ratios refer to (default: the first good one)", "STRATEGY"),
    )

    # dataset
    data: Path | None = option(
        Value(Path),
        Key("dataset.path", "File of token ids, relative to the recipe; without it random ids."),
        Flag("train on the token ids of this file, through a data loader (default: random ids)", "FILE"),
    )
    data_dtype: TokenType | None = option(
        Value(str, choices=TOKEN_TYPES),
        Key("dataset.dtype", "Type of the file's ids; without it as its suffix says."),
        Flag("type of the file's ids (default: as its suffix says, .uint16 or .uint32)"),
    )
    vocab_size: int | None = option(
        Value(int, None, COUNT),
        Key(
            "dataset.vocab_size",
            "Random ids are below it, and those of the file must be; without it the model's number.",
        ),
        Flag("draw random ids below N, and refuse a file that has others (default: the model's number of ids)"),
    )

    # dataloader
    data_workers: int | None = option(
        Value(int, None, {"ge": 0, "le": MAX_DATA_WORKERS}),
        Key(
            "dataloader.workers",
            "Worker processes of torch's DataLoader, 0: the rank itself. Without it 0 for a file; random ids are on "
            "the device before.",
        ),
        Flag("worker processes of the data loader, 0: the rank itself (default: 0 with --data, else no data loader)"),
    )
    data_pin_memory: bool = option(
        Value(bool, False),
        Key("dataloader.pin_memory", "Copy micro-batches to page-locked memory first."),
        Flag("the data loader copies micro-batches to page-locked memory"),
    )
    data_prefetch: int = option(
        Value(int, DEFAULT_PREFETCH, {"ge": 1, "le": MAX_PREFETCH}),
        Key("dataloader.prefetch", "Micro-batches that each worker process loads ahead."),
        Flag("micro-batches that each worker process loads ahead (default: 2)"),
    )

    # optimizer
    optimizer: str | None = option(
        Value(str, choices=OPTIMIZERS),
        Key("optimizer.type", "Without it AdamW."),
        Flag("optimizer of every row (default: AdamW)"),
    )

    # profiling
    profiles: tuple[ProfileName, ...] = option(
        Value(str, (), choices=PROFILES, many=True),
        Key("profiling.profiles", "Profilers, in order, each with steps of its own."),
        Flag(
            "torch: trace and table of operators; memory: what allocates it; nsys: a window for Nsight Systems",
            name="--profile",
        ),
    )
    profile_steps: int = option(
        Value(int, NO_INSPECTION.profile_steps, {"ge": 1, "le": MOST_PROFILE_STEPS}),
        Key("profiling.steps", "Steps that each profiler observes."),
        Flag("steps that each profiler observes (default: 2)"),
    )
    profile_ranks: tuple[int, ...] = option(
        Value(int, NO_INSPECTION.profile_ranks, {"ge": 0, "le": MAX_RANKS}, many=True),
        Key("profiling.ranks", "Ranks that write a profile."),
        Flag("ranks that write a profile (default: 0)", "RANK"),
    )
    nsys_start: int = option(
        Value(int, -1, _STEP),
        Key(
            "profiling.nsys_start",
            "First step of the window that nsys records, among those after the measured ones, numbered from 0, the "
            "first warm-up step; it adds the profiler nsys. -1: the first of them.",
        ),
        Flag(
            "first step that nsys records, numbered from 0, the first warm-up step; adds --profile nsys (default: -1, "
            "the first after the measured ones)",
            "STEP",
        ),
    )
    nsys_end: int = option(
        Value(int, -1, _STEP),
        Key("profiling.nsys_end", "Last step of that window. -1: the last of them."),
        Flag("last step that nsys records (default: -1, the last that --profile-steps gives)", "STEP"),
    )

    # launch
    num_gpus: int | None = option(
        Value(int, None, {"ge": 1, "le": MAX_RANKS}),
        Key("launch.num_gpus", "GPUs, or CPU ranks; without it all GPUs, or 1 rank."),
        Flag("GPUs, or CPU ranks (default: all GPUs, or 1 rank)"),
    )
    accelerator: str = option(
        Value(str, "auto", choices=("auto", "cuda", "cpu")),
        Key("launch.accelerator", "Device type."),
        Flag("device type (default: auto)"),
    )
    launcher: str = option(
        Value(str, "auto", choices=("auto", "warm", "deepspeed")),
        Key(
            "launch.launcher",
            "warm: ranks forked from one preloaded process; deepspeed: its launcher for every trial.",
        ),
        Flag("warm: ranks forked from one preloaded process; deepspeed: its launcher for every trial (default: auto)"),
    )
    hostfile: Path | None = option(
        Value(Path),
        Key("launch.hostfile", "DeepSpeed hostfile, for several nodes."),
        Flag("DeepSpeed hostfile: the hosts of every trial, reached by ssh (docs/many_nodes.md)", "FILE"),
    )
    include: str | None = option(
        Value(str),
        Key("launch.include", "Hosts and slots of the hostfile to use, in DeepSpeed's syntax: a@b:0,1."),
        Flag("hosts and slots of the hostfile to use, e.g. a@b:0,1", "HOST[:SLOTS]@..."),
    )
    exclude: str | None = option(
        Value(str),
        Key("launch.exclude", "Hosts and slots of the hostfile to leave out."),
        Flag("hosts and slots of the hostfile to leave out, e.g. a@b:0,1", "HOST[:SLOTS]@..."),
    )
    host_command: str | None = option(
        Value(str),
        Key("launch.host_command", "Command that runs a program on {host}; without it ssh {host}, in Slurm srun."),
        Flag(
            "runs a program on {host}, e.g. 'kubectl exec -i {host} --' (default: ssh {host}; in a Slurm job srun)",
            "COMMAND",
        ),
    )
    env: tuple[str, ...] = option(
        Value(str, (), many=True),
        Key("launch.env", "Variables that the ranks get on every host, each NAME or NAME=VALUE."),
        Flag(
            "variable for the ranks of every host, besides NCCL_*, HF_* … (docs/many_nodes.md); may be repeated",
            "NAME[=VALUE]",
            action="append",
            nargs=None,
            default=[],
        ),
    )
    master_addr: str | None = option(
        Value(str),
        Key("launch.master_addr", "Address of the first host that all others reach; without it its first."),
        Flag("address of the first host that all others reach (default: its first)", "ADDR"),
    )
    master_port: int | None = option(
        Value(int, None, {"ge": 1, "le": MAX_PORT}),
        Key("launch.master_port", "Port of that address; without it a free one."),
        Flag("port of it (default: a free one)", "PORT"),
    )
    nvme_path: Path | None = option(
        Value(Path),
        Key("launch.nvme_path", "Folder on the NVMe disk."),
        Flag("folder on the NVMe disk", "DIR"),
    )
    cpu_memory_limit: float | None = option(
        Value(float, None, AMOUNT),
        Key("launch.cpu_memory_limit", "Limit of each rank's data, in GB (2^30)."),
        Flag("limit of each rank's data, enforced by the kernel, in GB (2^30)", "GB"),
    )
    gpu_memory_limit: float | None = option(
        Value(float, None, AMOUNT),
        Key("launch.gpu_memory_limit", "Emulate a GPU of this memory, in GB (2^30)."),
        Flag("emulate a GPU of this memory, in GB (2^30)", "GB"),
    )
    peak_tflops: float | None = option(
        Value(float, None, AMOUNT),
        Key("launch.peak_tflops", "Dense peak of one GPU in TFLOP/s, for MFU; without it known GPUs."),
        Flag("dense peak of one GPU in TFLOP/s, for MFU (default: known GPUs)", "T"),
    )
    timeout: float = option(
        Value(float, 3600.0, AMOUNT),
        Key("launch.timeout", "Seconds after which a trial is ended."),
        Flag("end a trial that takes longer (default: 3600)", "SECONDS"),
    )
    stall_timeout: float = option(
        Value(float, 600.0, AMOUNT),
        Key("launch.stall_timeout", "Seconds without a sign of life after which a trial is ended."),
        Flag(
            "end a trial without a sign of life for so long; until the first step, growth of memory and disk I/O are "
            "signs too (default: 600)",
            "SECONDS",
        ),
    )
    skip_predicted_oom: bool = option(
        Value(bool, False),
        Key("launch.skip_predicted_oom", "Leave out rows that are predicted not to fit."),
        Flag("leave out rows that are predicted not to fit; never one that may"),
    )
    force: bool = option(
        Value(bool, False),
        Key("launch.force", "Run also what is predicted to need more than 1.5 times the host memory there is."),
        Flag("run also what is predicted to need more than 1.5 times the host memory there is"),
    )

    # output
    output_dir: Path = option(
        Value(Path, Path("results")),
        Key("output.dir", "Folder of the results, in the current folder; made when missing."),
        Flag("folder of the results, created when missing (default: results)", "DIR"),
    )
    repeats: int = option(
        Value(int, 1, {"ge": 1, "le": MAX_REPEATS}),
        Key("output.repeats", "Runs of every row; 3 or more give intervals."),
        Flag(
            "runs of every row, in rounds whose order is rotated and reversed; 3 or more give intervals (default: 1)",
            "R",
        ),
    )
    goal: str = option(
        Value(str, "balanced", choices=GOALS),
        Key("output.goal", "The fastest row, the least memory, or both."),
        Flag("what the recommendation is for: the fastest row, the least memory, or both (default: balanced)"),
    )
    export: str | None = option(
        Value(str),
        Key("output.export", "Row whose configuration is written too; the recommended one always is."),
        Flag(
            "write this row's configuration for DeepSpeed, Trainer and Accelerate (default: the recommended row's)",
            "STRATEGY",
        ),
    )
    monitor: Monitor | None = option(
        Value(str, choices=MONITORS),
        Key(
            "output.monitor",
            "Write loss, memory and throughput of each step while a trial runs: to steps.jsonl in its folder; "
            "tensorboard: to TensorBoard's files too.",
        ),
        Flag(
            "write loss, memory and throughput of each step to steps.jsonl in the trial's folder while it runs; "
            "tensorboard: to TensorBoard's files too (default with no value: steps)",
            nargs="?",
            const="steps",
        ),
    )
    checkpoint: bool = option(
        Value(bool, False),
        Key(
            "output.checkpoint",
            "Save, convert and load a checkpoint of every row after its measured steps, and time it.",
        ),
        Flag("save, convert and load a checkpoint of every row, and time it; its files are removed afterwards"),
    )
    checkpoint_path: str | None = option(
        Value(str),
        Key(
            "output.checkpoint_path",
            "Folder on the disk to save to; adds checkpoint. Without it the folder of the results.",
        ),
        Flag("folder on the disk to save to; adds --checkpoint (default: the folder of the results)", "DIR"),
    )
    csv: Path | None = option(
        Value(Path),
        Key("output.csv", "File for the flat rows as CSV, besides that in dir; in the current folder, replaced."),
    )

    # flags alone
    axes: tuple[AxisValues, ...] = option(
        Value(str, ()),
        Flag(
            "make a row of each value, in every row where it acts, e.g. overlap_comm=true,false; several make every "
            "combination (the command axes lists them)",
            "NAME=V1,V2,...",
            name="--axis",
            action="append",
            default=[],
        ),
    )
    """The values of each axis."""
    ds_config: Mapping[str, Any] = option(
        Value(Path),
        Flag("JSON file whose values replace those of every configuration", "FILE"),
    )
    """Content of the file."""
    resume: Path | None = option(
        Value(Path),
        Flag(
            "run what is missing of an earlier run on the same machine, with its flags; flags that run code or reach "
            "other machines, and values that may be credentials, must be given again",
            "RUN_DIR",
        ),
    )
    retry: tuple[str, ...] = option(
        Value(str, ()),
        Flag("with --resume: also rows with this outcome, e.g. Timeout,OOM", "CLASS,...", default=""),
    )
    shard: Shard | None = option(
        Value(Shard),
        Flag(
            "run the I-th of N parts of the plan's trials; report reads the results of all parts together "
            "(docs/recipes.md)",
            "I/N",
        ),
    )
    """The part of the plan that this run has; None for all of it."""
    dry_run: bool = option(
        Value(bool, False),
        Flag("print each trial's configuration and command, run nothing"),
    )
    print_recipe: bool = option(
        Value(bool, False),
        Flag("print the recipe that makes the same comparison, run nothing"),
    )
    format: str = option(
        Value(str, "table", choices=("table", "markdown", "json")),
        Flag("form of the summary (default: table)"),
    )
    quiet: bool = option(
        Value(bool, False),
        Flag("print the summary only"),
    )
    verbose: bool = option(
        Value(bool, False),
        Flag("print the table with all columns and notes, and each trial's caveats and files as they come"),
    )
    strict: bool = option(
        Value(bool, False),
        Flag("exit 1 when any row failed"),
    )

    # what follows from the above, or from the command
    auto_batch: bool = False
    """Run each strategy at the largest micro-batch that trains."""
    auto_seq: bool = False
    """Run each row at the longest sequence that trains."""
    budget: float | None = None
    """Minutes after which no further trial begins; None without a limit."""
    point: tuple[tuple[str, Any], ...] = ()
    """Key paths of a recipe and their values at this point of its sweep; empty without a sweep."""
    files: tuple[ConfigurationFile, ...] | None = None
    """The configurations of ``configs`` and ``inline``; None until they are read (``planner.with_files``)."""
    file_lines: tuple[str, ...] = ()
    """What the user must know about them."""
    token_file: TokenFile | None = None
    """What was read of ``data``; None until the plan is made."""

    @classmethod
    def of(cls, **values: Any) -> Options:
        """Makes Options of the values of flags or of a recipe, where ``auto`` is a size that is searched for."""
        auto_batch, auto_seq = values["batch_size"] == "auto", values["seq_length"] == "auto"
        if auto_batch:
            values["batch_size"] = 1
        if auto_seq:
            values["seq_length"] = None
        values["model"] = values["model_factory"] or values["model"]
        return cls(**values, auto_batch=auto_batch, auto_seq=auto_seq)

    @property
    def inspection(self) -> Inspection:
        """What is observed of each trial besides its measured steps."""
        return Inspection(**{name: getattr(self, name) for name in INSPECTION_FIELDS})

    @property
    def searches_size(self) -> bool:
        """Whether each row's micro-batch or sequence length is searched for by probes."""
        return self.auto_batch or self.auto_seq

    @property
    def config_changes(self) -> tuple[Mapping[str, Any], ...]:
        """What replaces values of every DeepSpeed configuration, one after the other."""
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


OPTIONS: Mapping[str, Option] = options_of(Options)
"""Every option, by the name of its field."""
FLAGS: Mapping[str, str] = {option.flag.name: name for name, option in OPTIONS.items() if option.flag is not None}
"""Flag → the name of the field that it gives."""
