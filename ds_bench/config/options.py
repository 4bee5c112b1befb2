"""What the user requested, as one frozen value; ``cli.arguments`` makes it of the flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..units import from_gb
from .shard import Shard
from .spec import (
    DEFAULT_PREFETCH,
    INSPECTION_FIELDS,
    NO_INSPECTION,
    Inspection,
    MultiNodeLauncher,
    PassType,
    Precision,
    point_text,
)
from .token_file import TokenFile, TokenType

if TYPE_CHECKING:
    from .axis_rows import AxisValues
    from .configuration_files import ConfigurationFile

Family = Literal["zero", "offload", "recipe"]
"""What asked for a comparison: one of the scripts, or a recipe."""
MAX_NUMBER = 10**9
"""More than any batch, step count, time in seconds or memory in GB; with more, clocks and kernel limits overflow."""
MAX_RANKS = 2**16
MAX_REPEATS = 1000
MAX_PORT = 2**16 - 1
DEFAULT_BATCH_SIZE = 4
EMPTY_PATH = "an empty text is no path; . is the current folder"
GOALS = ("speed", "balanced", "memory")
"""Aims of a recommendation (docs/choosing.md)."""
ROW_FORMATS = ("json", "csv", "parquet")
"""Forms in which ``report`` writes the flat rows of results."""
FAIL_ON = ("regression", "missing", "unmatched", "noisy")
"""What ``baseline check`` may fail on: a regression; a row of the saved run that the result lacks; a row that trained
and has no baseline; a row whose noise hides a regression."""
TRACKERS = ("trackio", "wandb", "tensorboard")
"""Programs that show runs; each is a package of this name."""
SEVERAL_NODES = (
    "hostfile", "include", "exclude", "multi_node_launcher", "master_addr", "master_port", "launcher_args",
)  # fmt: skip
"""Fields of Options that reach other machines: a run folder alone does not give them."""
FAIL_ON_DEFAULT = ("regression", "missing", "unmatched")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags of a script; each field is named after its flag."""

    family: Family
    model: str
    batch_size: int
    """1 if it is searched for."""
    auto_batch: bool
    """Run each strategy at the largest micro-batch that trains."""
    common_batch: bool
    """Also run all at the largest micro-batch that every strategy trains."""
    seq_length: int | None
    """None: 512, or the model's positions if it has fewer."""
    auto_seq: bool = False
    """Run each row at the longest sequence that trains."""
    num_steps: int
    warmup_steps: int
    output_dir: Path
    grad_accum: int
    """1 until the number of ranks is known, if it follows from the global batch."""
    stages: tuple[int, ...]
    strategies: tuple[str, ...]
    stage: int
    nvme_path: Path | None
    num_gpus: int | None
    accelerator: str
    precision: Precision | Literal["auto"]
    launcher: str
    hostfile: Path | None
    repeats: int
    relative_to: str | None
    """Name of the strategy that ratios refer to; None: the first valid row."""
    goal: str
    export: str | None
    """Name of the strategy whose configuration is exported; None: the recommended one."""
    seed: int
    dropout: float | None
    """None: the model's own."""
    timeout: float
    stall_timeout: float
    activation_checkpointing: bool
    optimizer: str | None
    configs: tuple[Path, ...]
    """Files and folders of configurations, each file one row."""
    keep_batch: bool
    """Whether the batch keys of a file of ``configs`` are used instead of ``batch_size`` and ``grad_accum``."""
    ds_config: Mapping[str, Any]
    """Content of the file of ``--ds-config``, which replaces values of every DeepSpeed configuration."""
    set: tuple[Mapping[str, Any], ...]
    """The same of each ``--set``, after that of the file: ``{"zero_optimization": {"overlap_comm": False}}``."""
    axes: tuple[AxisValues, ...] = ()
    """The values of each axis."""
    model_factory: str | None
    trust_remote_code: bool
    cpu_memory_limit: float | None
    gpu_memory_limit: float | None
    peak_tflops: float | None
    resume: Path | None = None
    retry: tuple[str, ...] = ()
    skip_predicted_oom: bool
    force: bool
    """Also run trials that are predicted to need far more host memory than there is."""
    dry_run: bool = False
    format: str = "table"
    quiet: bool = False
    verbose: bool = False
    strict: bool = False
    print_recipe: bool = False
    inline: tuple[ConfigurationFile, ...] = ()
    """Configurations that a recipe holds itself, each one row, as if read from a file."""
    shard: Shard | None = None
    """The part of the plan that this run has; None for all of it."""
    budget: float | None = None
    """Minutes that the trials may take, by the estimate of the plan; None without a limit."""
    include: str | None = None
    """Hosts and slots of the hostfile that are used, in DeepSpeed's syntax; None: all."""
    exclude: str | None = None
    """Hosts and slots of the hostfile that are not used; None: none."""
    multi_node_launcher: MultiNodeLauncher | None = None
    """None: pdsh."""
    master_addr: str | None = None
    master_port: int | None = None
    launcher_args: str | None = None
    """Further arguments of the program that starts the ranks, as a shell would read them."""
    point: tuple[tuple[str, Any], ...] = ()
    """Key paths of a recipe and their values at this point of its sweep; empty without a sweep."""
    global_batch_size: int | None = None
    """Sequences per optimizer step on all ranks, from which accumulation follows; None: ``grad_accum`` is given."""
    vocab_size: int | None = None
    """Random ids are drawn below it, and those of ``data`` must be; None: the model's own."""
    data: Path | None = None
    """File of token ids; None: random ids."""
    data_dtype: TokenType | None = None
    """Type of its ids; None: as its suffix says."""
    data_workers: int | None = None
    """Worker processes of the data loader; None: 0 with ``data``, else no data loader."""
    data_pin_memory: bool = False
    data_prefetch: int = DEFAULT_PREFETCH
    token_file: TokenFile | None = None
    """What was read of ``data``; None until the plan is made."""
    pass_type: PassType = "train"
    synchronized: bool = True
    csv: Path | None = None
    """File that the flat rows are written to besides the run's own; replaced if it exists."""
    inspection: Inspection = NO_INSPECTION
    """What is observed of each trial besides its measured steps."""

    @classmethod
    def of(cls, **values: Any) -> Options:
        """Makes Options of the values of flags or of a recipe, where ``auto`` stands for a size that is searched for,
        and what is observed of a trial stands beside the rest.
        """
        inspection = Inspection(**{name: values.pop(name) for name in INSPECTION_FIELDS})
        auto_batch, auto_seq = values["batch_size"] == "auto", values["seq_length"] == "auto"
        if auto_batch:
            values["batch_size"] = 1
        if auto_seq:
            values["seq_length"] = None
        values["model"] = values["model_factory"] or values["model"]
        return cls(**values, auto_batch=auto_batch, auto_seq=auto_seq, inspection=inspection)

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
