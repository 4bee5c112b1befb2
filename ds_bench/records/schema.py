"""Observations of a trial: a RankMeasurement per rank, an Outcome, and the TrialRecord that holds both.

Samples are stored; ``analysis`` derives figures from them, which ``report`` rounds. Names end in the unit, such as
bytes or seconds. None means that a value could not be measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..config.caveat_texts import Caveat
from ..config.spec import Trial

SCHEMA_VERSION = 1
"""Format of the stored records; files of a different version are refused. History: 1 (2026-11-24)."""
METHOD_VERSION = 2
"""How numbers are measured; rows of different methods are not compared.

History: 1 (2026-11) first method. 2 (2026-11-21) models train with their own dropout instead of none; CPU ranks wait
passively, with as many threads as the CPU quota leaves them.
"""

Tier = Literal["gpu", "cpu", "nvme"]

SUCCESS = "Success"
OOM = "OOM"
OOM_HOST = "OOM (host)"
OOM_DISK = "OOM (disk)"
KILLED = "Killed"
TIMEOUT = "Timeout"
CRASHED = "Crashed"
UNSUPPORTED = "Unsupported"
SKIPPED = "Skipped"
INTERRUPTED = "Interrupted"
NO_ENGINE = "NoEngine"
ENDED_EARLY = "EndedEarly"
STATUSES = (
    SUCCESS, OOM, OOM_HOST, OOM_DISK, KILLED, TIMEOUT, CRASHED, UNSUPPORTED, SKIPPED, INTERRUPTED, NO_ENGINE,
    ENDED_EARLY,
)  # fmt: skip
"""Besides these, a status is the class name of an exception raised in a rank (docs/metrics.md, "How a trial ends")."""

_SIGNS = {SUCCESS: "✅", SKIPPED: "⏭️", INTERRUPTED: "⏹️"}


def status_text(status: str) -> str:
    """Return ``✅ Success``, ``❌ OOM``, ``❌ RuntimeError``, …"""
    return f"{_SIGNS.get(status, '❌')} {status}"


MEMORY_PHASES = ("import", "build", "initialize", "first_step", "warm_up", "steady")
"""Phases of a rank whose memory is measured, in order (docs/metrics.md, "Memory by phase")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Memory of one rank within one phase of the trial."""

    host_peak_bytes: int | None = None
    """Peak resident size within the phase (VmHWM); None if the kernel does not report it."""
    host_end_bytes: int | None = None
    """Resident size at the end of the phase."""
    host_end_pss_bytes: int | None = None
    """The same with each shared page divided among its processes, data loader included."""
    gpu_peak_bytes: int | None = None
    """Peak allocated on the GPU within the phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Files and findings of one profiler on one rank (docs/reading.md)."""

    name: str
    """As in ``--profile``."""
    files: tuple[str, ...] = ()
    """Paths relative to the run folder."""
    lines: tuple[str, ...] = ()
    """The first rows of its table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTimes:
    """Mean cost of offloading in a synchronized step after the measured window, on one rank.

    A field is None if DeepSpeed's CPU Adam did not step, or nothing is swapped to a disk.
    """

    cpu_adam_seconds: float | None = None
    cpu_adam_bytes: float | None = None
    """Moved between host memory and processor by CPU Adam: weights, gradients and moments read and written."""
    disk_read_bytes: float | None = None
    disk_written_bytes: float | None = None
    disk_wait_seconds: float | None = None
    """Time that training waited for the disk."""
    disk_busy_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationOperation:
    """Mean cost of one kind of collective operation in a synchronized step, on one rank."""

    name: str
    """As in ``deepspeed.comm``, such as ``all_gather_into_tensor``."""
    count: float
    bytes: float
    """Of the whole tensors; an all-reduce counts twice, as a reduce-scatter and an all-gather."""
    seconds: float
    wait_seconds: float | None
    """The part of ``seconds`` beyond the fastest rank's, which waited for no other; None if unknown."""


CHECKPOINT_ACTIONS = ("save", "load", "model_16bit")
"""Actions with a checkpoint after the measured window, in order (docs/metrics.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAction:
    """One of ``CHECKPOINT_ACTIONS`` on one rank."""

    seconds: float | None = None
    """Until the rank's own part was done; None if it was not done."""
    memory: PhaseMemory = PhaseMemory()
    """Of the rank during the action."""
    written_bytes: int | None = None
    """Size of the files of the whole job, only on the first rank."""
    not_done: str | None = None
    """Why it could not be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyWindow:
    """How one rank's share of the weights changed over the early window (worker/weight_change.py, ``early_window``)."""

    first_step: int
    """0-based number of the first step in the window, warm-up steps included."""
    steps: int
    skipped_steps: int = 0
    """Steps in the window that the optimizer skipped (fp16 overflow)."""
    weight_change: tuple[float, ...] | None = None
    """Count sketch; None if the weights could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptMeasurement:
    """What a rank of a user's script trained (worker/script_hook). Series have a value per step, warm-up first."""

    tokens: tuple[int, ...]
    """Token ids in the micro-batches, padding included; 0 if none were seen."""
    unpadded_tokens: tuple[int, ...]
    """The same without those that an attention mask hides."""
    id_sums: tuple[int | None, ...]
    """Sum of the token ids, which shows whether ranks of two rows read the same data; None if none were seen."""
    micro_steps: tuple[int, ...]
    """Forward passes that train."""
    gap_seconds: tuple[float, ...]
    """Time before the forward passes: data loader, logging, evaluation, saving, generation."""
    evaluation_forwards: tuple[int, ...]
    """Forward passes that do not train, of any engine's module."""
    saves: tuple[int, ...]
    """Checkpoints saved by the engine."""
    stage: int
    offload_optimizer: str
    """Device of the engine's optimizer states: ``none``, ``cpu`` or ``nvme``."""
    offload_param: str
    precision: str
    """Number format of the trained parameters: ``bf16``, or ``bf16+fp32`` for several."""
    main_engine: str
    """Class of the measured engine's module."""
    other_engines: tuple[str, ...]
    """The same for the script's other engines."""
    samples: tuple[int, ...] = ()
    """First dimension of the micro-batches without token ids; 0 for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """Measurements of one rank in one trial; of this rank only unless noted."""

    rank: int
    world_size: int
    hostname: str
    device_name: str
    """Name of the GPU according to its driver; ``cpu`` on the CPU accelerator."""
    torch_version: str
    deepspeed_version: str
    micro_batch_size: int
    """Read back from the engine."""
    grad_accum: int
    """Read back from the engine."""
    data_parallel_size: int
    """Read back from the engine."""
    optimizer_class: str
    """Class of the optimizer that updated the weights: ``FusedAdam``, ``AdamW``, ``DeepSpeedCPUAdam``."""
    engine_optimizer_class: str
    """Class of DeepSpeed's wrapper around that optimizer."""
    parameter_count: int
    """Elements of all parameters of the whole model; shared parameters count once."""
    resolved_config: Mapping[str, Any]
    step_seconds: tuple[float, ...]
    """Durations of the measured optimizer steps, in order."""
    warmup_step_seconds: tuple[float, ...]
    """Durations of the steps before the measured window; no statistic uses them."""
    window_seconds: float
    """Wall time from before the first measured step to after the last, with the device synchronized at both ends."""
    losses: tuple[float | None, ...]
    """Mean loss over this rank's micro-batches, warm-up steps first; None if not finite."""
    skipped_steps: int
    """Measured steps that the optimizer skipped (fp16 overflow)."""
    gpu_total_bytes: int | None = None
    gpu_init_peak_bytes: int | None = None
    """Peak allocated while the model and the engine were built."""
    gpu_peak_bytes: int | None = None
    """Peak allocated in the measured steps (``max_memory_allocated``)."""
    gpu_peak_reserved_bytes: int | None = None
    gpu_allocated_bytes: int | None = None
    """Allocated after the last measured step."""
    gpu_reserved_bytes: int | None = None
    gpu_device_used_bytes: int | None = None
    """In use on the whole GPU after the last measured step, other processes included."""
    gpu_alloc_retries: int | None = None
    """Times the allocator had to flush its cache and retry during the measured steps."""
    host_peak_bytes: int | None = None
    """Peak resident size of this rank from its start to its end (VmHWM)."""
    host_peak_steps_bytes: int | None = None
    """Peak resident size from the first warm-up step on."""
    host_pss_bytes: int | None = None
    """Proportional set size after the last measured step: each shared page divided among the processes that map it."""
    nvme_stored_bytes: int | None = None
    """Size of this trial's swap files (whole node), after the last measured step."""
    nvme_read_bytes: int | None = None
    """Read from block devices in the measured steps (kernel I/O counters)."""
    nvme_written_bytes: int | None = None
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Tier → category → bytes of tensors, each storage counted once; each category at its largest in a step."""
    ledger_after_step: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The same between two steps, when gradients and activations have been freed."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """``forward``, ``backward`` and ``step`` → seconds per step, from separate synchronized steps."""
    dropout: float | None = None
    """Highest probability of any dropout in the model, as trained; 0 for a model without dropout."""
    optimizer_settings: tuple[Mapping[str, Any], ...] | None = None
    """For each parameter group, the optimizer's lr, betas, eps, weight_decay and momentum after the last measured step,
    if it has them."""
    vocabulary_size: int | None = None
    """Number of token ids that the model knows; None for a factory that makes its own batches."""
    repeated_loss: float | None = None
    """Loss on this rank's first batch, computed without dropout after all steps of the trial."""
    weight_change: tuple[float, ...] | None = None
    """Count sketch of how training changed this rank's share of the weights (worker/weight_change.py). The sketch of
    the whole model is the sum over ranks."""
    early_window: EarlyWindow | None = None
    """The same over the first steps; None without warm-up steps."""
    grad_norms: tuple[float | None, ...] = ()
    """Norm of the whole model's gradients before clipping, for each step of ``losses``; None for skipped steps, and if
    the engine computes none."""
    grad_norm: float | None = None
    """The same for a step after the measured window, from any engine that holds or reports it."""
    cpu_cores: float | None = None
    """Cores that this rank may use: the affinity mask's, or the cgroup's CPU quota if that is less."""
    cpu_threads: int | None = None
    """Threads in a parallel region of torch."""
    cpu_own_cores: float | None = None
    """Cores used by every process of the trial on this node that may run on this rank's processors, and by the programs
    that started it; mean from the first warm-up step to the last measured step."""
    cpu_other_cores: float | None = None
    """Cores used in the same time by other programs, or withheld by a hypervisor, on the processors that this rank may
    use."""
    cpu_throttled_fraction: float | None = None
    """Fraction of the scheduler's periods, over the same time, in which the cgroup's CPU quota stopped its processes;
    None without a quota."""
    attention: str | None = None
    """Transformers' attention implementation that the model used; None for a model from another library."""
    compiled_graphs: int | None = None
    """Graphs that torch.compile or DeepCompile compiled by the end of the measured steps; None for a model that runs
    uncompiled."""
    data_wait_seconds: float | None = None
    """Mean time that a measured step waited for the data loader; None if micro-batches were already on the device."""
    cpus_allowed: tuple[int, ...] | None = None
    """Numbers of the processors that this rank was bound to; None if it was not bound."""
    offload: OffloadTimes | None = None
    """None without offloading."""
    step_parts: Mapping[str, float] = field(default_factory=dict)
    """``forward``, ``backward``, ``step``, ``communication``, ``transfer`` (to or from a disk, and between host and
    device) and ``data_wait`` → seconds per synchronized step, without overlap; only those that were measured
    (docs/metrics.md, "Parts of a step")."""
    communication: tuple[CommunicationOperation, ...] | None = None
    """None if collectives were not timed: with a reference engine, a compiled model, or one CPU rank."""
    phase_memory: Mapping[str, PhaseMemory] = field(default_factory=dict)
    """Each of ``MEMORY_PHASES`` that the trial had → this rank's memory in it."""
    trainable_parameter_count: int | None = None
    """Elements of the parameters that are trained."""
    frozen_weights_changed: bool | None = None
    """Whether this rank's share of the frozen parameters had changed at the end; None without any, or if unchecked."""
    forward_backward_flops: int | None = None
    """Floating-point operations of the matrix products and convolutions of one micro-batch, forward and backward, on
    this rank, without what activation checkpointing recomputes (worker/flop_count.py); None if not counted."""
    recomputed_flops: int | None = None
    """Those that activation checkpointing recomputes."""
    tf32: bool | None = None
    """Whether the GPU computed fp32 matrix products in TF32; None on the CPU accelerator."""
    checkpoint: Mapping[str, CheckpointAction] = field(default_factory=dict)
    """Each of ``CHECKPOINT_ACTIONS`` that was tried → its result; empty without ``Inspection.checkpoint``."""
    checkpoint_restored: bool | None = None
    """Whether loading restored the weights and loss of the saved state; None if that was not tried, or if the step in
    between had not changed this rank's weights."""
    notes: tuple[str | Caveat, ...] = ()
    """Caveats that the rank itself reports about its numbers."""
    profiles: tuple[Profile, ...] = ()
    """Profiles of steps after the measured ones, in the profilers' order."""
    script: ScriptMeasurement | None = None
    """None for the built-in training loop."""

    def __post_init__(self) -> None:
        # The sum is finite only if every duration is.
        if not self.step_seconds or not math.isfinite(sum(self.step_seconds)) or min(self.step_seconds) <= 0:
            raise ValueError("step_seconds must have at least one value, all positive and finite")
        if not (math.isfinite(self.window_seconds) and self.window_seconds > 0):
            raise ValueError("window_seconds must be positive and finite")
        for name in ("micro_batch_size", "grad_accum", "data_parallel_size", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")

    @property
    def all_step_seconds(self) -> tuple[float, ...]:
        """The time of every step, warm-up first."""
        return (*self.warmup_step_seconds, *self.step_seconds)

    def in_window(self, name: str) -> tuple[Any, ...]:
        """Return a series of ``script`` without its warm-up; empty without a script."""
        series: tuple[Any, ...] = () if self.script is None else getattr(self.script, name)
        return series[-len(self.step_seconds) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """An error that a rank reported before it ended; ``launch.outcome`` determines the root cause from all of them."""

    rank: int
    error_class: str
    message: str
    phase: str
    time: float
    """Seconds since the epoch, on the rank's node."""
    kind: str = "other"
    """What ran out: ``device_oom``, ``host_oom``, ``pinned_memory``, ``disk_full``, ``shared_memory`` (/dev/shm) or
    ``memlock`` (locked memory of InfiniBand). Other causes: ``peer_access`` (GPUs without it), ``fabric_manager`` (not
    running), ``collective_timeout`` (NCCL's watchdog), ``gathered_views`` (DeepSpeed before 0.19 on CPU ranks),
    ``peer_lost`` (a broken collective), or for a script ``no_engine``, ``ended_early`` and ``auto_refused`` (DeepSpeed
    got "auto" in place of a value); otherwise ``other``."""
    requested_bytes: int | None = None
    free_bytes: int | None = None
    traceback: str = ""
    """For ``no_engine`` and ``ended_early``, the last line of the rank's output."""
    step: int | None = None
    """0-based number of the step where it happened, warm-up steps included."""

    def __post_init__(self) -> None:
        if not isinstance(self.time, (int, float)) or not math.isfinite(self.time):
            raise ValueError("time must be a finite number")


_PHASE_TEXTS = {
    "hello": "while its ranks started",
    "import": "while importing",
    "build": "while building the model",
    "init": "in init",
    "warmup": "in warm-up",
    "loop": "between two steps",
    "forward": "in forward",
    "backward": "in backward",
    "step": "in the optimizer step",
}


def phase_text(phase: str) -> str:
    """Return ``in backward``, ``between two steps``: when something happened, for a sentence."""
    return _PHASE_TEXTS.get(phase, f"in phase {phase}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trial ended, with one root cause, chosen by class and time."""

    status: str
    error: str | None = None
    """What happened, in one line."""
    phase: str | None = None
    """One of ``records.rank_files.PHASES``; None if unknown."""
    rank: int | None = None
    """The rank of the root cause."""
    details: str | None = None
    """Cause, phase, rank and log path in one text, for ``error_details``."""
    requested_bytes: int | None = None
    free_bytes: int | None = None
    kind: str | None = None
    """``RankFailure.kind`` of the root cause, or ``bus_error``; None if only the status is known."""

    @property
    def success(self) -> bool:
        return self.status == SUCCESS

    @property
    def where(self) -> str:
        """`` in backward``, for a sentence about what happened; empty if the phase is unknown."""
        return f" {phase_text(self.phase)}" if self.phase else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWindow:
    """One GPU during the measured steps, read from NVML about once per second. None if NVML does not report a value."""

    index: int
    """NVML's index on its host."""
    host: str | None = None
    """Name of the host; None if there is only one."""
    samples: int
    mean_sm_clock_mhz: float | None = None
    max_temperature_celsius: int | None = None
    mean_power_watts: float | None = None
    """Energy used from the first to the last sample, at least a second apart, divided by the time between them."""
    throttled_by: tuple[str, ...] = ()
    """Faults among the reasons for a low clock in any sample."""

    @property
    def name(self) -> str | int:
        """The index, with the host if there are several."""
        return self.index if self.host is None else f"{self.index} of {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial and its observations: one line of records.jsonl."""

    trial: Trial
    outcome: Outcome
    ranks: tuple[RankMeasurement, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    launch: str | None = None
    """``warm``, ``deepspeed`` or ``script``; None if nothing was launched."""
    started_at: str | None = None
    """ISO 8601, UTC."""
    wall_seconds: float | None = None
    """From the launch until no process of the trial is left."""
    start_seconds: float | None = None
    """From the launch to the first warm-up step."""
    gpu_free_start_bytes: int | None = None
    """Free memory of the job's fullest GPU just before the launch; None without GPUs, or if NVML does not report it."""
    gpu_windows: tuple[GpuWindow, ...] = ()
    """Clock, power and temperature of each GPU of the job in the measured steps; empty without GPUs."""
    caveats: tuple[str | Caveat, ...] = ()
    schema_version: int = SCHEMA_VERSION
    method_version: int = METHOD_VERSION

    def __post_init__(self) -> None:
        if self.outcome.success and not self.ranks:
            raise ValueError("a trial that succeeded must have a measurement of every rank")

    @property
    def slowest_rank(self) -> RankMeasurement:
        """The rank with the longest measured window. Raises ValueError if nothing was measured."""
        return max(self.ranks, key=lambda rank: rank.window_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, with the configuration's credentials redacted."""
        return {**asdict(self), "trial": self.trial.to_dict()}


def measured_values(measurements: Sequence[object], name: str) -> list[Any]:
    """Return the values of one field of several ranks, runs or steps, without those that were not measured."""
    return [value for each in measurements if (value := getattr(each, name)) is not None]


def largest_by_category(*ledgers: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the largest size in each tier and category among ledgers taken at several moments."""
    peak: dict[str, dict[str, int]] = {}
    for ledger in ledgers:
        for tier, row in ledger.items():
            for category, size in row.items():
                peak.setdefault(tier, {})[category] = max(size, peak.get(tier, {}).get(category, 0))
    return peak


def ranks_of_nodes(ranks: Sequence[RankMeasurement]) -> dict[str, list[RankMeasurement]]:
    """Return host → its ranks."""
    nodes: dict[str, list[RankMeasurement]] = {}
    for rank in ranks:
        nodes.setdefault(rank.hostname, []).append(rank)
    return nodes
