"""What the user asked for, as one frozen value; ``flags`` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..units import from_gb

Family = Literal["zero", "offload"]
GOALS = ("speed", "balanced", "memory")
"""What a recommendation may be for (docs/choosing.md)."""
FAIL_ON = ("regression", "missing", "unmatched", "noisy")
"""What ``baseline check`` may fail on: a regression; a row of the saved run that the result lacks; a row that trained
and has no baseline; a row whose noise hides a regression."""
FAIL_ON_DEFAULT = ("regression", "missing", "unmatched")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for; field names are those of the flags."""

    family: Family
    model: str
    batch_size: int
    """1 where it is searched for."""
    auto_batch: bool
    """Each strategy at the largest micro-batch that trains."""
    common_batch: bool
    """Also all at the largest that every strategy trains."""
    seq_length: int | None
    """None: 512, or the model's positions where it has fewer."""
    num_steps: int
    warmup_steps: int
    output_dir: Path
    grad_accum: int
    stages: tuple[int, ...]
    strategies: tuple[str, ...]
    stage: int
    nvme_path: Path | None
    num_gpus: int | None
    accelerator: str
    precision: str
    launcher: str
    hostfile: Path | None
    repeats: int
    relative_to: str | None
    """Name of the strategy that ratios refer to; None: the first good row."""
    goal: str
    export: str | None
    """Name of the strategy whose configuration is written out; None: the recommended one's."""
    seed: int
    dropout: float | None
    """None: the model's own."""
    timeout: float
    stall_timeout: float
    activation_checkpointing: bool
    optimizer: str | None
    ds_config: Path | None
    set: tuple[str, ...]
    model_factory: str | None
    trust_remote_code: bool
    cpu_memory_limit: float | None
    gpu_memory_limit: float | None
    peak_tflops: float | None
    resume: Path | None
    retry: tuple[str, ...]
    skip_predicted_oom: bool
    force: bool
    """Run also what is predicted to need far more host memory than there is."""
    dry_run: bool
    format: str
    quiet: bool
    verbose: bool
    strict: bool

    @property
    def cpu_memory_limit_bytes(self) -> int | None:
        return None if self.cpu_memory_limit is None else from_gb(self.cpu_memory_limit)

    @property
    def gpu_memory_limit_bytes(self) -> int | None:
        return None if self.gpu_memory_limit is None else from_gb(self.gpu_memory_limit)
