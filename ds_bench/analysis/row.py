"""The columns of JSON and CSV (:class:`Row`, docs/metrics.md), computed from a record; :class:`Run` holds both.

A column is declared once, with its meaning, source and unit. ``_gb`` is 2**30 bytes, ``_ms`` milliseconds; None means
not measured.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field

from ..config.caveat_texts import Caveat, as_caveat
from ..config.deepspeed_config import hash_config
from ..config.spec import Trial
from ..models.presets import ModelFacts
from ..prediction import trial_predictions
from ..records.reader import StoredRecord
from ..records.schema import (
    CHECKPOINT_ACTIONS,
    MEMORY_PHASES,
    CheckpointAction,
    EarlyWindow,
    Outcome,
    PhaseMemory,
    RankMeasurement,
    ScriptMeasurement,
    TrialRecord,
    measured_values,
    ranks_of_nodes,
    status_text,
)
from ..system.environment import Environment
from ..units import BYTES_PER_GB, to_gb
from . import flops, trial_caveats
from .intervals import sample_std
from .step_costs import step_costs, step_parts

MIG_SUFFIX = " (MIG)"
"""Suffix to the name of a GPU that is divided into MIG instances."""


# ------------------------------------------------------------------ memory and checkpoints of the whole job


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePhaseMemory:
    """Memory of one phase: host memory of the fullest node, GPU memory of the fullest GPU. None if not measured."""

    host_peak_bytes: int | None = None
    """Sum of the ranks' peaks, shared pages counted once."""
    host_end_bytes: int | None = None
    """The same at the end of the phase."""
    gpu_peak_bytes: int | None = None


def node_phase_memory(ranks: Sequence[RankMeasurement]) -> dict[str, NodePhaseMemory]:
    """Return the memory of each phase (``schema.MEMORY_PHASES``) that the ranks measured."""
    return {
        phase: _fullest_node((rank.hostname, rank.phase_memory.get(phase, PhaseMemory())) for rank in ranks)
        for phase in MEMORY_PHASES
        if any(phase in rank.phase_memory for rank in ranks)
    }


def _fullest_node(ranks: Iterable[tuple[str, PhaseMemory]]) -> NodePhaseMemory:
    def peak_share(memory: PhaseMemory) -> int | None:
        """Return a rank's part of its node's peak: its own peak, with its share of pages used by several processes.

        The kernel keeps no peak of the proportional size (PSS). The correction for shared pages and data loader
        processes is taken at the end of the phase, since it hardly changes within one.
        """
        if memory.host_peak_bytes is None or memory.host_end_bytes is None or memory.host_end_pss_bytes is None:
            return None
        return memory.host_peak_bytes - memory.host_end_bytes + memory.host_end_pss_bytes

    nodes: dict[str, list[PhaseMemory]] = {}
    for host, memory in ranks:
        nodes.setdefault(host, []).append(memory)
    return NodePhaseMemory(
        host_peak_bytes=_largest(_total(map(peak_share, node)) for node in nodes.values()),
        host_end_bytes=_largest(_total(each.host_end_pss_bytes for each in node) for node in nodes.values()),
        gpu_peak_bytes=_largest(each.gpu_peak_bytes for node in nodes.values() for each in node),
    )


def _total(sizes: Iterable[int | None]) -> int | None:
    """Return the sum; None if any size is unknown."""
    known = list(sizes)
    return None if None in known else sum(filter(None, known))


def _largest(sizes: Iterable[int | None]) -> int | None:
    """Return the largest; None if any size is unknown, since it may be the largest."""
    known = list(sizes)
    return None if None in known else max((size for size in known if size is not None), default=None)


def checkpoint_costs(ranks: Sequence[RankMeasurement]) -> dict[str, dict[str, Any]]:
    """Return the cost of each checkpoint action for the whole job: seconds on the slowest rank, bytes written, peak
    host memory on the fullest node. An action that some rank did not finish is left out."""
    costs: dict[str, dict[str, Any]] = {}
    for name in CHECKPOINT_ACTIONS:
        actions = [rank.checkpoint.get(name, CheckpointAction()) for rank in ranks]
        # The job has a checkpoint only if every rank wrote its part.
        if not ranks or any(action.not_done is not None or action.seconds is None for action in actions):
            continue
        memory = _fullest_node((rank.hostname, action.memory) for rank, action in zip(ranks, actions, strict=True))
        costs[name] = {
            "seconds": max(action.seconds or 0.0 for action in actions),
            "written_bytes": next(iter(measured_values(actions, "written_bytes")), None),
            "host_peak_bytes": memory.host_peak_bytes,
        }
    return costs


def is_restored(parts: Sequence[object]) -> bool | None:
    """Whether loading a checkpoint restored the saved state on all ranks, or in all runs; None if not measured."""
    known = measured_values(parts, "checkpoint_restored")
    return all(known) if known else None


# ------------------------------------------------------------------ what columns are computed from


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One trial and the figures that several columns share, in seconds and bytes. None or empty if not measured."""

    record: TrialRecord
    facts: ModelFacts | None
    peak_flops: float | None
    environment: Environment | None
    run_id: str | None

    @cached_property
    def trial(self) -> Trial:
        return self.record.trial

    @cached_property
    def ranks(self) -> tuple[RankMeasurement, ...]:
        return self.record.ranks

    @cached_property
    def rank(self) -> RankMeasurement | None:
        """The first rank, for values that are equal on all ranks."""
        return next(iter(self.ranks), None)

    @cached_property
    def slowest(self) -> RankMeasurement | None:
        return self.record.slowest_rank if self.ranks else None

    @cached_property
    def mean_step_seconds(self) -> float | None:
        """Length of the window divided by its steps.

        The window begins with a device synchronization and, if ``Workload.synchronized``, ends with one.
        """
        return self.slowest.window_seconds / len(self.slowest.step_seconds) if self.slowest else None

    @cached_property
    def step_seconds_std(self) -> float | None:
        return sample_std(self.slowest.step_seconds) if self.slowest else None

    @cached_property
    def samples_per_second(self) -> float | None:
        if self.script is not None:
            return self.seen_per_second("samples")
        if self.slowest is None or self.mean_step_seconds is None:
            return None
        # Not world_size: ranks of a tensor-parallel group train on the same samples.
        samples = self.slowest.micro_batch_size * self.slowest.grad_accum * self.slowest.data_parallel_size
        return samples / self.mean_step_seconds

    @cached_property
    def script(self) -> ScriptMeasurement | None:
        """Measurement of a user's script on its first rank; None for the built-in training."""
        return self.rank.script if self.rank else None

    def seen_per_second(self, name: str) -> float | None:
        """Return the samples or tokens (``name``) per second of a script in the window, over all ranks."""
        if self.script is None or self.slowest is None:
            return None
        seen = [rank.in_window(name) for rank in self.ranks]
        return sum(map(sum, seen)) / self.slowest.window_seconds or None

    @cached_property
    def tokens_per_second(self) -> float | None:
        if self.script is not None:
            return self.seen_per_second("tokens")
        samples = self.samples_per_second
        return None if samples is None else samples * self.trial.workload.seq_length

    @cached_property
    def tokens_per_second_per_gpu(self) -> float | None:
        return self.tokens_per_second / self.slowest.world_size if self.tokens_per_second and self.slowest else None

    @cached_property
    def flops(self) -> dict[str, Any]:
        """FLOPs per token, by formula if one covers the model, otherwise as counted, and their rates.

        The formula comes first, so that all rows of a known model share one convention; figures are not comparable
        across conventions.
        """
        rank, workload, facts, rate = self.slowest, self.trial.workload, self.facts, self.tokens_per_second_per_gpu
        if rank is None or rate is None:
            return {}
        found: dict[str, Any]
        if facts is not None:
            forward_only = workload.pass_type == "forward"  # a third of forward + backward, and no recomputation
            parts, recomputes = (3, False) if forward_only else (1, workload.activation_checkpointing)
            found = {
                "model": flops.model_flops_per_token(facts, workload.seq_length) // parts,
                "causal": flops.causal_flops_per_token(facts, workload.seq_length) // parts,
                "hardware": flops.hardware_flops_per_token(facts, workload.seq_length, recomputes) // parts,
                "convention": flops.FORWARD_CONVENTION if forward_only else flops.MODEL_CONVENTION,
            }
        elif rank.forward_backward_flops:
            # One rank's share, because the FLOPs were counted on one rank.
            tokens = rank.micro_batch_size * workload.seq_length * rank.data_parallel_size / rank.world_size
            found = {
                "model": round(rank.forward_backward_flops / tokens),
                "hardware": round((rank.forward_backward_flops + (rank.recomputed_flops or 0)) / tokens),
                "convention": flops.COUNTED_CONVENTION,
            }
        else:
            return {}
        found["tflops_per_gpu"] = found["model"] * rate / 1e12
        found["mfu"] = None if self.peak_flops is None else found["model"] * rate / self.peak_flops
        return found

    @cached_property
    def costs(self) -> dict[str, Any]:
        return step_costs(self.record) if self.ranks else {}

    @cached_property
    def phases(self) -> dict[str, NodePhaseMemory]:
        return node_phase_memory(self.ranks)

    @cached_property
    def checkpoint(self) -> dict[str, dict[str, Any]]:
        return checkpoint_costs(self.ranks)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Part of a step → seconds."""
        return step_parts(self.ranks)

    @cached_property
    def nodes(self) -> dict[str, list[RankMeasurement]]:
        return ranks_of_nodes(self.ranks)

    @cached_property
    def host_peaks(self) -> dict[str, int | None]:
        """Host → peak resident size of its ranks."""
        return {host: _total(rank.host_peak_bytes for rank in own) for host, own in self.nodes.items()}

    @cached_property
    def losses(self) -> tuple[float | None, ...]:
        return _mean_losses(self.ranks)

    @cached_property
    def weight_change(self) -> tuple[float, ...] | None:
        return _sum_of_sketches([rank.weight_change for rank in self.ranks])

    @cached_property
    def gpu_power_watts(self) -> float | None:
        """Power of all GPUs of the job; None if unknown for any of them."""
        known = [each.mean_power_watts for each in self.record.gpu_windows if each.mean_power_watts is not None]
        return math.fsum(known) if known and len(known) == len(self.record.gpu_windows) else None

    @cached_property
    def over_measured(self) -> float | None:
        return trial_predictions.predicted_over_measured(self.record) if self.ranks else None

    @cached_property
    def over_ledger(self) -> float | None:
        return trial_predictions.predicted_over_ledger(self.record) if self.ranks else None

    @property
    def num_nodes(self) -> int | None:
        placement = self.trial.placement
        if self.ranks:
            return len(self.host_peaks)
        # The number is unknown if the hostfile was never read.
        return placement.num_nodes if placement.hosts or placement.hostfile is None else None

    @property
    def host_peaks_json(self) -> str | None:
        known = {host: to_gb(size) for host, size in self.host_peaks.items() if size is not None}
        return json.dumps(known) if known and len(self.host_peaks) > 1 else None

    @property
    def slowest_rank_host(self) -> str | None:
        """The host of the rank that the others waited for; None on one node."""
        if len({rank.hostname for rank in self.ranks}) < 2:
            return None
        # The slowest rank waits least. If waiting was not timed on all ranks, the window decides.
        waits = [[operation.wait_seconds for operation in rank.communication or ()] for rank in self.ranks]
        if all(own and None not in own for own in waits):
            sums = [math.fsum(each for each in own if each is not None) for own in waits]
            return self.ranks[sums.index(min(sums))].hostname
        return self.record.slowest_rank.hostname

    @property
    def device_names(self) -> str | None:
        return " + ".join(sorted({rank.device_name for rank in self.ranks})) or None

    @property
    def gpu_names(self) -> str | None:
        gpus = self.environment.gpus if self.environment else ()
        return " + ".join(sorted({f"{gpu.name or 'unnamed'}{MIG_SUFFIX if gpu.mig else ''}" for gpu in gpus})) or None

    @property
    def smallest_gpu_bytes(self) -> int | None:
        """None if any GPU's size is unknown."""
        sizes = [gpu.memory_total_bytes for gpu in self.environment.gpus] if self.environment else []
        return None if None in sizes else min((size for size in sizes if size is not None), default=None)

    @property
    def repeated_loss(self) -> float | None:
        values = measured_values(self.ranks, "repeated_loss")
        return math.fsum(values) / len(values) if values and len(values) == len(self.ranks) else None

    @property
    def mfu(self) -> float | None:
        mfu: float | None = self.flops.get("mfu")
        # Above 1 it is an accounting error, which a caveat reports.
        return mfu if mfu is not None and mfu <= 1 else None

    @property
    def step_time_cv(self) -> float | None:
        if self.step_seconds_std is None or not self.mean_step_seconds:
            return None
        return self.step_seconds_std / self.mean_step_seconds


Source = Callable[[Measured], Any]
_SCALES = {"ms": 1000.0, "GB": 1 / BYTES_PER_GB, "GB/s": 1 / BYTES_PER_GB, "GB/step": 1 / BYTES_PER_GB, "%": 100}
"""Unit of a column → factor to it from the source's unit: seconds, bytes or fractions."""
_LARGEST = 10**60
"""Above any measurement, and low enough that its square is finite."""


@dataclass(frozen=True, slots=True)
class Column:
    """How a column gets its value; as ``json_schema_extra`` it puts the unit into the JSON Schema."""

    source: Source
    unit: str
    scale: float | None
    """Factor from seconds, bytes or fractions to this unit; None for any other unit."""

    def __call__(self, schema: dict[str, Any]) -> None:
        schema["unit"] = self.unit

    def value(self, measured: Measured) -> Any:
        """Return the value in the column's unit; None if not measured."""
        found = self.source(measured)
        return found if found is None or self.scale is None else found * self.scale


def column(meaning: str, source: str | Source, unit: str = "", default: Any = None, *, signed: bool = False) -> Any:
    """Declare a column.

    ``source``: a function, or attributes and keys of :class:`Measured` joined by dots; if one of them is None or a key
    is missing, the value is None. ``default``: ``...`` if every row has the column. ``signed``: it may have negative
    values.
    """
    names = source.split(".") if isinstance(source, str) else []

    def read_attributes(measured: Measured) -> Any:
        found: Any = measured
        for name in names:
            found = found.get(name) if type(found) is dict else getattr(found, name)
            if found is None:
                return None
        return found

    read = read_attributes if isinstance(source, str) else source
    minimum, maximum = (None, None) if signed else (0, _LARGEST)
    made = Column(read, unit, _SCALES.get(unit))
    return Field(default, description=meaning, ge=minimum, le=maximum, json_schema_extra=made)


def text(meaning: str, source: str | Source, default: Any = None) -> Any:
    """Declare a column of text, of booleans, or of numbers without limits."""
    return column(meaning, source, "", default, signed=True)


def _built_in(name: str) -> Source:
    """Return the source of a workload field; its value is None for a script, which chooses its own."""
    return lambda m: getattr(m.trial.workload, name) if m.trial.workload.script is None else None


def _later(_measured: Measured) -> None:
    """Source of a value that is set when rows are compared (``Run.with_row``)."""


def _worst(name: str) -> Source:
    """Return the source of a field's largest value over the ranks that measured it."""
    return lambda m: max(measured_values(m.ranks, name), default=None)


def _sum(name: str, *, per_step: bool = False) -> Source:
    """Return the source of a field's sum over all ranks; None if a rank did not measure it."""

    def value(m: Measured) -> float | None:
        moved = _total(getattr(rank, name) for rank in m.ranks) if m.ranks else None
        return moved / len(m.ranks[0].step_seconds) if per_step and moved is not None else moved

    return value


def _phase(name: str) -> Source:
    """Return the source of the longest time of one phase of a step, over the ranks."""
    return lambda m: max((rank.phase_seconds[name] for rank in m.ranks if name in rank.phase_seconds), default=None)


def _ledger(tier: str, category: str) -> Source:
    """Return the source of a ledger cell's largest value over ranks; None without a ledger or for an unused tier."""

    def value(m: Measured) -> int | None:
        ledgers = [rank.ledger for rank in m.ranks]
        if tier == "gpu":
            used = m.trial.placement.accelerator != "cpu"
        else:
            used = tier == "cpu" or m.trial.configuration.uses_nvme
        if not any(ledgers) or not used:
            return None
        return max(ledger.get(tier, {}).get(category, 0) for ledger in ledgers)

    return value


# ------------------------------------------------------------------ the row


class Row(BaseModel):
    """The numbers of one trial, exactly as JSON and CSV hold them, in the order of their columns.

    Figures are for the whole job unless the column's meaning says otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    stage: int = column("ZeRO stage", "trial.configuration.stage", default=...)
    strategy: str = text("Name of the configuration", "trial.configuration.name", ...)
    model: str = text("Model", "trial.workload.model", ...)
    batch_size: int | None = column(
        "Micro-batch that the engine ran, else the requested one",
        lambda m: m.slowest.micro_batch_size if m.slowest else _built_in("batch_size")(m),
        "samples",
    )
    seq_length: int | None = column("Sequence length", _built_in("seq_length"), "tokens")
    grad_accum: int | None = column(
        "Micro-batches per step that the engine ran, else the requested number",
        lambda m: m.slowest.grad_accum if m.slowest else _built_in("grad_accum")(m),
    )
    num_steps: int = column("Measured steps", "trial.workload.num_steps", default=...)
    warmup_steps: int = column("Steps before the measured window", "trial.workload.warmup_steps", default=...)
    avg_step_time_ms: float | None = column("Window divided by its steps, slowest rank", "mean_step_seconds", "ms")
    std_step_time_ms: float | None = column("Sample standard deviation of its steps", "step_seconds_std", "ms")
    throughput_tokens_per_sec: float | None = column("Tokens per second", "tokens_per_second", "tokens/s")
    gpu_peak_gb: float | None = column("Peak allocated in the window, fullest rank", _worst("gpu_peak_bytes"), "GB")
    gpu_allocated_gb: float | None = column(
        "Allocated at the end of the window, fullest rank", _worst("gpu_allocated_bytes"), "GB"
    )
    gpu_reserved_gb: float | None = column(
        "Reserved at the end of the window, fullest rank", _worst("gpu_reserved_bytes"), "GB"
    )
    cpu_used_gb: float | None = column(
        "Peak resident size of a node's ranks, fullest node", lambda m: _largest(m.host_peaks.values()), "GB"
    )
    success: bool = text("Whether every rank finished its measurement", "record.outcome.success", ...)
    status: str = text("How the trial ended, with a symbol", lambda m: status_text(m.record.outcome.status), ...)
    error: str | None = text("What happened, in one line", "record.outcome.error")
    error_details: str | None = text("Cause, phase, rank and log", "record.outcome.details")
    caveats: str | None = text("Texts of ``caveat_list``", _later)
    repeat: int = column("0-based number of the repetition", "trial.repeat", default=...)
    trial_id: str | None = text("Folder of the trial in its run", "trial.trial_id")
    num_gpus: int = column("Ranks of the job", "trial.placement.num_gpus", default=...)
    accelerator: str = text("``cuda`` or ``cpu``", "trial.placement.accelerator", ...)
    device: str | None = text("Names of the ranks' devices, as reported by the driver", "device_names")
    precision: str = text(
        "Number format", lambda m: m.script.precision if m.script else m.trial.workload.precision, ...
    )
    batch_policy: str | None = text("``given`` or ``largest``", "trial.workload.batch_policy")
    activation_checkpointing: bool | None = text(
        "Whether activations are recomputed", _built_in("activation_checkpointing")
    )
    optimizer: str | None = text("Class that updated the weights", "rank.optimizer_class")
    launch: str | None = text("``warm``, ``deepspeed`` or ``script``", "record.launch")
    data_parallel_size: int | None = column("Ranks with samples of their own", "slowest.data_parallel_size")
    parameter_count: int | None = column("Elements of all parameters", "rank.parameter_count")
    throughput_tokens_per_sec_per_gpu: float | None = column(
        "Throughput divided by the ranks", "tokens_per_second_per_gpu", "tokens/s"
    )
    throughput_samples_per_sec: float | None = column("Samples per second", "samples_per_second", "samples/s")
    model_tflops_per_gpu: float | None = column("Model FLOPs per second of a rank", "flops.tflops_per_gpu", "TFLOP/s")
    model_flops_per_token: int | None = column("By ``flops_convention``", "flops.model", "FLOP")
    causal_flops_per_token: int | None = column("With half the attention term", "flops.causal", "FLOP")
    hardware_flops_per_token: int | None = column("With recomputation", "flops.hardware", "FLOP")
    flops_convention: str | None = text("Source of ``model_flops_per_token``", "flops.convention")
    mfu: float | None = column("Model FLOPs as a fraction of the device's dense peak", "mfu")
    first_loss: float | None = text("Mean over ranks", lambda m: m.losses[0] if m.losses else None)
    final_loss: float | None = text("Mean over ranks", lambda m: m.losses[-1] if m.losses else None)
    gpu_peak_reserved_gb: float | None = column(
        "Peak reserved in the window, fullest rank", _worst("gpu_peak_reserved_bytes"), "GB"
    )
    gpu_init_peak_gb: float | None = column(
        "Peak allocated while model and engine were built", _worst("gpu_init_peak_bytes"), "GB"
    )
    gpu_device_used_gb: float | None = column(
        "In use on the card at the end of the window, by all processes", _worst("gpu_device_used_bytes"), "GB"
    )
    gpu_total_gb: float | None = column("Memory of the card", _worst("gpu_total_bytes"), "GB")
    gpu_percent: float | None = column(
        "Peak in use, as a share of the card, real or emulated", lambda m: trial_caveats.gpu_fraction(m.record), "%"
    )
    gpu_alloc_retries: int | None = column("Allocator retries in the window", _worst("gpu_alloc_retries"))
    predicted_over_measured: float | None = column("Predicted GPU memory divided by the peak", "over_measured")
    cpu_pss_gb: float | None = column(
        "As ``cpu_used_gb``, shared pages counted once, at the end of the window",
        lambda m: _largest(_total(rank.host_pss_bytes for rank in own) for own in m.nodes.values()),
        "GB",
    )
    nvme_stored_gb: float | None = column("Size of the swap files", _sum("nvme_stored_bytes"), "GB")
    nvme_read_gb_per_step: float | None = column("Read", _sum("nvme_read_bytes", per_step=True), "GB/step")
    nvme_written_gb_per_step: float | None = column("Written", _sum("nvme_written_bytes", per_step=True), "GB/step")
    ledger_gpu_parameters_gb: float | None = column("Tensors on the GPU", _ledger("gpu", "parameters"), "GB")
    ledger_gpu_gradients_gb: float | None = column("Tensors on the GPU", _ledger("gpu", "gradients"), "GB")
    ledger_gpu_optimizer_states_gb: float | None = column(
        "Tensors on the GPU", _ledger("gpu", "optimizer_states"), "GB"
    )
    ledger_gpu_deepspeed_buffers_gb: float | None = column(
        "Tensors on the GPU", _ledger("gpu", "deepspeed_buffers"), "GB"
    )
    ledger_gpu_activations_gb: float | None = column("Tensors on the GPU", _ledger("gpu", "activations"), "GB")
    ledger_gpu_other_gb: float | None = column("Tensors on the GPU", _ledger("gpu", "other"), "GB")
    ledger_cpu_parameters_gb: float | None = column("Tensors on the host", _ledger("cpu", "parameters"), "GB")
    ledger_cpu_gradients_gb: float | None = column("Tensors on the host", _ledger("cpu", "gradients"), "GB")
    ledger_cpu_optimizer_states_gb: float | None = column(
        "Tensors on the host", _ledger("cpu", "optimizer_states"), "GB"
    )
    ledger_cpu_deepspeed_buffers_gb: float | None = column(
        "Tensors on the host", _ledger("cpu", "deepspeed_buffers"), "GB"
    )
    ledger_cpu_activations_gb: float | None = column("Tensors on the host", _ledger("cpu", "activations"), "GB")
    ledger_cpu_other_gb: float | None = column("Tensors on the host", _ledger("cpu", "other"), "GB")
    ledger_nvme_parameters_gb: float | None = column("Tensors on NVMe", _ledger("nvme", "parameters"), "GB")
    ledger_nvme_optimizer_states_gb: float | None = column("Tensors on NVMe", _ledger("nvme", "optimizer_states"), "GB")
    phase_forward_ms: float | None = column("Synchronized forward pass", _phase("forward"), "ms")
    phase_backward_ms: float | None = column("Synchronized backward pass", _phase("backward"), "ms")
    phase_step_ms: float | None = column("Synchronized optimizer step", _phase("step"), "ms")
    skipped_steps: int | None = column("Measured steps that the optimizer skipped", "rank.skipped_steps")
    start_seconds: float | None = column("From launch to the first warm-up step", "record.start_seconds", "s")
    wall_seconds: float | None = column("From launch until no process is left", "record.wall_seconds", "s")
    started_at: str | None = text("ISO 8601, UTC", "record.started_at")
    method_version: int = column("``schema.METHOD_VERSION`` of the record", "record.method_version", default=...)
    predicted_over_ledger: float | None = column("Predicted bytes of tensors divided by the ledger", "over_ledger")
    dropout: float | None = column(
        "Largest dropout probability",
        lambda m: m.rank.dropout if m.rank else m.trial.workload.dropout,
    )
    repeated_loss: float | None = text("Loss on the first batches after all steps, mean over ranks", "repeated_loss")
    weight_change_norm: float | None = column(
        "Norm of the change in weights", lambda m: None if m.weight_change is None else math.hypot(*m.weight_change)
    )
    weight_change_cosine: float | None = text("Cosine with the reference row's change", _later)
    cpu_threads: int | None = column("Threads in a parallel region of torch", "rank.cpu_threads")
    cpu_other_cores: float | None = column("Cores that other programs used", _worst("cpu_other_cores"), "cores")
    num_nodes: int | None = column("Hosts of the job", "num_nodes")
    run_id: str | None = text("Folder of the run", "run_id")
    config_hash: str | None = text(
        "Hash of the DeepSpeed configuration without its folders",
        lambda m: hash_config(m.trial.ds_config, m.trial.configuration.engine),
    )
    gpu_name: str | None = text("Names of the host's GPUs", "gpu_names")
    gpu_count: int | None = column("GPUs of the host", lambda m: len(m.environment.gpus) if m.environment else None)
    gpu_memory_gb: float | None = column("Memory of the smallest GPU", "smallest_gpu_bytes", "GB")
    cpu_model: str | None = text("Processor", "environment.cpu_model")
    cpu_logical_cores: int | None = column("Threads of the host", "environment.logical_cores")
    cpu_physical_cores: int | None = column("Cores of the host", "environment.physical_cores")
    cpu_quota_cores: float | None = column("CPU quota of the cgroup", "environment.cpu_quota_cores", "cores")
    torch_version: str | None = text("Version", "environment.packages.torch")
    deepspeed_version: str | None = text("Version", "environment.packages.deepspeed")
    transformers_version: str | None = text("Version", "environment.packages.transformers")
    cuda_version: str | None = text("Version that torch was built for", "environment.torch_cuda_version")
    gpu_driver_version: str | None = text("Version", "environment.gpu_driver_version")
    round_position: int | None = column("0-based position in its round", "trial.round_position")
    gpu_outside_allocator_gb: float | None = column(
        "In use outside torch's allocator, fullest rank",
        lambda m: trial_predictions.outside_allocator_bytes(m.ranks),
        "GB",
    )
    engine: str | None = text("``deepspeed``, ``ddp`` or ``fsdp2``", "trial.configuration.engine")
    pass_type: str | None = text("``train``, ``forward_backward`` or ``forward``", "trial.workload.pass_type")
    step_time_cv_percent: float | None = column("Coefficient of variation of the step times", "step_time_cv", "%")
    synchronized: bool | None = text("Whether the clock waited for the device", "trial.workload.synchronized")
    phase_communication_ms: float | None = column("Collective operations", "costs.communication_seconds", "ms")
    phase_transfer_ms: float | None = column("Waiting for swap files and copies", "costs.transfer_seconds", "ms")
    communication_wait_ms: float | None = column("Waiting for other ranks", "costs.communication_wait_seconds", "ms")
    communication_gb_per_step: float | None = column("Volume", "costs.communication_bytes", "GB/step")
    cpu_adam_gb_per_sec: float | None = column("Speed of CPU Adam", "costs.cpu_adam_bytes_per_second", "GB/s")
    nvme_needed_gb_per_sec: float | None = column(
        "Disk speed that would hide all transfers", "costs.disk_needed_bytes_per_second", "GB/s"
    )
    nvme_measured_gb_per_sec: float | None = column("Speed of the disk", "costs.disk_measured_bytes_per_second", "GB/s")
    disk_bound: bool | None = text("Whether the disk takes longer than everything else", "costs.disk_bound")
    profiled_flops_per_token: float | None = column("Always None: no profiler counts them", _later, "FLOP")
    cpu_import_peak_gb: float | None = column("Host memory by phase", "phases.import.host_peak_bytes", "GB")
    cpu_import_end_gb: float | None = column("Host memory by phase", "phases.import.host_end_bytes", "GB")
    cpu_build_peak_gb: float | None = column("Host memory by phase", "phases.build.host_peak_bytes", "GB")
    cpu_build_end_gb: float | None = column("Host memory by phase", "phases.build.host_end_bytes", "GB")
    cpu_initialize_peak_gb: float | None = column("Host memory by phase", "phases.initialize.host_peak_bytes", "GB")
    cpu_initialize_end_gb: float | None = column("Host memory by phase", "phases.initialize.host_end_bytes", "GB")
    cpu_first_step_peak_gb: float | None = column("Host memory by phase", "phases.first_step.host_peak_bytes", "GB")
    cpu_first_step_end_gb: float | None = column("Host memory by phase", "phases.first_step.host_end_bytes", "GB")
    cpu_steady_peak_gb: float | None = column("Host memory by phase", "phases.steady.host_peak_bytes", "GB")
    cpu_steady_end_gb: float | None = column("Host memory by phase", "phases.steady.host_end_bytes", "GB")
    seq_policy: str | None = text("``given`` or ``longest``", "trial.workload.seq_policy")
    phase_data_ms: float | None = column("Waiting for the data loader, synchronized steps", "parts.data_wait", "ms")
    data_wait_ms: float | None = column("Waiting for the data loader, in the window", _worst("data_wait_seconds"), "ms")
    vocab_size: int | None = column("Token ids, random or from a file, are below this", "trial.workload.vocab_size")
    data_file: str | None = text("File of token ids", "trial.workload.data_path")
    point: str | None = text(
        "Values of a sweep's point, as JSON", lambda m: json.dumps(dict(m.trial.point)) if m.trial.point else None
    )
    trainable_parameter_count: int | None = column("Elements that train", "rank.trainable_parameter_count")
    checkpoint_save_seconds: float | None = column("Slowest rank", "checkpoint.save.seconds", "s")
    checkpoint_save_gb: float | None = column("Size of the files", "checkpoint.save.written_bytes", "GB")
    checkpoint_save_cpu_peak_gb: float | None = column("Host memory", "checkpoint.save.host_peak_bytes", "GB")
    checkpoint_load_seconds: float | None = column("Slowest rank", "checkpoint.load.seconds", "s")
    checkpoint_load_cpu_peak_gb: float | None = column("Host memory", "checkpoint.load.host_peak_bytes", "GB")
    checkpoint_model_16bit_seconds: float | None = column("Slowest rank", "checkpoint.model_16bit.seconds", "s")
    checkpoint_model_16bit_gb: float | None = column("Size of the files", "checkpoint.model_16bit.written_bytes", "GB")
    checkpoint_model_16bit_cpu_peak_gb: float | None = column(
        "Host memory", "checkpoint.model_16bit.host_peak_bytes", "GB"
    )
    checkpoint_restored: bool | None = text("Whether loading restored the saved state", lambda m: is_restored(m.ranks))
    slowest_rank_host: str | None = text("Host of the rank that the others waited for", "slowest_rank_host")
    cpu_used_gb_of_nodes: str | None = text("``cpu_used_gb`` of each of several nodes, as JSON", "host_peaks_json")
    first_grad_norm: float | None = column(
        "Norm of the gradients in the first step", lambda m: next(iter(m.rank.grad_norms), None) if m.rank else None
    )
    grad_norm: float | None = column("Norm of the gradients after the measured window", "rank.grad_norm")
    script: str | None = text(
        "Command of the user's own script",
        lambda m: shlex.join(m.trial.workload.script.command) if m.trial.workload.script else None,
    )
    script_hash: str | None = text("Hash of the script's file", "trial.workload.script.digest")
    python: str | None = text("Interpreter that ran the script", "trial.workload.script.python")
    config_source: str | None = text("How the configuration reached the script", "trial.workload.script.config_source")
    tokens_unpadded_per_sec: float | None = column(
        "Throughput of a script, without padding tokens", lambda m: m.seen_per_second("unpadded_tokens"), "tokens/s"
    )
    gap_ms: float | None = column(
        "Time of a script's step before its forward passes, slowest rank",
        lambda m: (
            statistics.fmean(m.slowest.in_window("gap_seconds"))
            if m.slowest and any(m.slowest.in_window("micro_steps"))
            else None
        ),
        "ms",
    )
    main_engine: str | None = text("Model class of the engine that was measured", "script.main_engine")
    other_engines: str | None = text(
        "Model classes of a script's other engines",
        lambda m: ", ".join(m.script.other_engines) or None if m.script else None,
    )
    gpu_sm_clock_mhz: float | None = column(
        "Mean clock of the slowest GPU in the window",
        lambda m: min(
            (each.mean_sm_clock_mhz for each in m.record.gpu_windows if each.mean_sm_clock_mhz), default=None
        ),
        "MHz",
    )
    gpu_temperature_celsius: float | None = column(
        "Highest temperature of any GPU in the window",
        lambda m: max(filter(None, (each.max_temperature_celsius for each in m.record.gpu_windows)), default=None),
        "°C",
    )
    gpu_power_watts: float | None = column("Mean in the window, all GPUs of the job", "gpu_power_watts", "W")
    gpu_joules_per_token: float | None = column(
        "GPU energy per token",
        lambda m: m.gpu_power_watts / m.tokens_per_second if m.gpu_power_watts and m.tokens_per_second else None,
        "J",
    )
    lora: str | None = text("Rank and modules of the adapters", "trial.workload.lora")
    freeze: str | None = text("Names of frozen parameters", "trial.workload.freeze")

    caveat_list: tuple[Caveat, ...] = ()
    """Only in JSON: caveats stored in the record, then caveats derived from its numbers."""

    @property
    def rate_unit(self) -> str:
        """``tokens/s``; for a script without token ids ``samples/s``, or ``steps/s`` if it shows no samples either."""
        if self.script is None or not self.success or self.throughput_tokens_per_sec is not None:
            return "tokens/s"
        return "steps/s" if self.throughput_samples_per_sec is None else "samples/s"

    @property
    def rate(self) -> float | None:
        """The throughput by which rows are compared, in :attr:`rate_unit`."""
        if self.rate_unit == "steps/s":
            return self.avg_step_time_ms and 1000 / self.avg_step_time_ms
        return self.throughput_tokens_per_sec if self.rate_unit == "tokens/s" else self.throughput_samples_per_sec

    def values(self) -> dict[str, Any]:
        """Return the values by the names of their columns, in order, and ``caveat_list``."""
        values = {name: getattr(self, name) for name in COLUMNS}
        return {**values, "caveat_list": [asdict(caveat) for caveat in self.caveat_list]}


COLUMNS: dict[str, Column] = {
    name: each.json_schema_extra
    for name, each in Row.model_fields.items()
    if isinstance(each.json_schema_extra, Column)
}
"""Name of each column → how it gets its value, in order."""


def column_type(name: str) -> type:
    """Return the type of a column's values other than None."""
    annotation = Row.model_fields[name].annotation
    kind: type = next(each for each in get_args(annotation) or (annotation,) if each is not type(None))
    return kind


# ------------------------------------------------------------------ a run: a row with its record


@dataclass(frozen=True, kw_only=True)
class Run:
    """One trial: its row and its record; a row of a flat file has none."""

    row: Row
    stored: TrialRecord | StoredRecord
    """The record, or where it is. Two runs whose records were not read come from one run folder: their cards and
    versions are the same, and their losses have been compared."""
    environment: Environment | None = None
    """Hardware and versions of the host; None if the result does not hold them."""
    round: int | None = None
    """Number of its round, set when several results are merged; None: the trial's ``repeat``."""

    @property
    def trial(self) -> Trial:
        """The trial; for a flat file, only what the columns describe."""
        return self.stored.trial

    @property
    def record(self) -> TrialRecord | None:
        """The record, read if necessary; None for a row of a flat file."""
        return self.stored.record if isinstance(self.stored, StoredRecord) else self.stored

    @property
    def has_record(self) -> bool:
        """Whether there is a record, read or not."""
        return not isinstance(self.stored, StoredRecord) or self.stored.path is not None

    @property
    def ranks(self) -> tuple[RankMeasurement, ...]:
        """Measurements of the ranks; empty for a failed trial, and for a row of a flat file."""
        record = self.record
        return () if record is None else record.ranks

    @cached_property
    def outcome(self) -> Outcome:
        """How the trial ended; for a flat file, only what the columns describe."""
        record = None if self.row.success else self.record
        if record is not None:
            return record.outcome
        sign, _, rest = self.row.status.partition(" ")
        # A status may have two words without a sign: "OOM (host)".
        status = self.row.status if sign[:1].isalnum() else rest
        return Outcome(status=status, error=self.row.error, details=self.row.error_details)

    @property
    def caveats(self) -> tuple[Caveat, ...]:
        return self.row.caveat_list

    @property
    def phase_memory(self) -> dict[str, NodePhaseMemory]:
        """Memory by phase; empty for a row of a flat file, whose columns hold only the host's part."""
        return node_phase_memory(self.ranks)

    @cached_property
    def losses(self) -> tuple[float | None, ...]:
        """Mean loss of each step over all ranks, warm-up steps first; None if a rank's is not finite."""
        return _mean_losses(self.ranks)

    @cached_property
    def weight_change(self) -> tuple[float, ...] | None:
        """Count sketch of how training changed the weights (worker/weight_change.py)."""
        return _sum_of_sketches([rank.weight_change for rank in self.ranks])

    @cached_property
    def early_window(self) -> EarlyWindow | None:
        """Change of the weights over the early window (worker/weight_change.py); None unless every rank has one."""
        windows: list[EarlyWindow] = measured_values(self.ranks, "early_window")
        if not windows or len(windows) < len(self.ranks):
            return None
        return replace(windows[0], weight_change=_sum_of_sketches([each.weight_change for each in windows]))

    def with_row(self, *, caveats: Sequence[Caveat] | None = None, **changes: Any) -> Run:
        """Return the run with changed values in its row."""
        if caveats is not None:
            changes |= {"caveat_list": tuple(caveats), "caveats": "; ".join(each.text for each in caveats) or None}
        return replace(self, row=self.row.model_copy(update=changes))


def make_run(
    record: TrialRecord,
    facts: ModelFacts | None = None,
    peak_flops: float | None = None,
    environment: Environment | None = None,
    run_id: str | None = None,
) -> Run:
    """Compute the row of a trial from its record.

    ``facts``: of its model, for FLOPs by formula; None: FLOPs as counted, if they were. ``peak_flops``: FLOP/s of one
    device in the trial's precision; None leaves out MFU.
    """
    if record.trial.workload.lora is not None or record.trial.workload.freeze is not None:
        facts = None  # no FLOP formula covers a model that is trained in part
    measured = Measured(record=record, facts=facts, peak_flops=peak_flops, environment=environment, run_id=run_id)
    # A dict as an ordered set: a caveat stored in the record is not listed twice.
    caveats = dict.fromkeys(map(as_caveat, record.caveats))
    if record.ranks:
        found = trial_caveats.trial_caveats(
            record,
            measured.flops.get("mfu"),
            measured.over_measured,
            measured.over_ledger,
        )
        caveats |= dict.fromkeys(found)
    row = Row(**{name: each.value(measured) for name, each in COLUMNS.items()})
    run = Run(row=row, stored=record, environment=environment)
    return run.with_row(caveats=tuple(caveats)) if caveats else run


def _mean_losses(ranks: Sequence[RankMeasurement]) -> tuple[float | None, ...]:
    """Return the mean loss of each step over all ranks; None if a rank's is not finite."""
    count, steps = len(ranks), zip(*(rank.losses for rank in ranks), strict=False)
    return tuple(None if None in step else math.fsum(filter(None, step)) / count for step in steps)


def _sum_of_sketches(sketches: Sequence[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    """Return the sketch of the whole model's change; each rank's sketch covers its own share of the weights.

    None if a rank has none or their sizes differ. The sum is right because a count sketch is linear (Charikar, Chen and
    Farach-Colton, "Finding frequent items in data streams", ICALP 2002).
    """
    known = [sketch for sketch in sketches if sketch is not None]
    if len(known) < len(sketches) or len({len(sketch) for sketch in known}) != 1:
        return None
    return tuple(map(math.fsum, zip(*known, strict=True)))
