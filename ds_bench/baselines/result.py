"""The figures of one benchmark, reduced from the runs of one row, and the name of its baseline.

MB is 2**20 bytes here, as GB is 2**30 elsewhere.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..analysis.intervals import geometric_mean
from ..analysis.provenance import unnamed_values
from ..analysis.summary import TrialSummary
from ..config.caveats import CPU_KINDS, CaveatKind
from ..config.spec import Trial, point_text
from ..records.schema import SUCCESS, measured_values
from ..system.environment import Environment
from ..units import BYTES_PER_MB

Memory = Literal["gpu", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """The runs of one benchmark taken together. Figures are of the whole job unless noted; None if not measured."""

    name: str
    """Name of its baseline."""
    throughput_tokens_per_sec: float | None = None
    """Geometric mean of the successful runs' means."""
    samples_per_sec: float | None = None
    """Sequences per second; geometric mean of the successful runs' means."""
    peak_memory_mb: float | None = None
    """Highest of the runs: peak allocated on the fullest GPU in the measured steps; on the CPU accelerator the peak
    resident memory of a node's ranks."""
    average_memory_mb: float | None = None
    """Mean over the runs, not over time, of the memory in use after the last measured step, when activations are freed:
    allocated on the fullest GPU; on the CPU accelerator the ranks' proportional set size."""
    memory: Memory | None = None
    """Kind of memory of the two fields above; None if not known."""
    tokens_per_sec_runs: tuple[float, ...] = ()
    """Mean of each successful run: the samples of the test against noise."""
    peak_memory_mb_runs: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    """Measured optimizer steps on the slowest rank, run after run."""
    step_variation: float | None = None
    """Coefficient of variation of step times within a run, the largest of the runs: a rough guide to noise."""
    status: str = SUCCESS
    """Status of the last run if none succeeded."""
    error: str | None = None
    """One line on how that run failed."""
    failed_runs: int = 0
    doubts: tuple[str, ...] = ()
    """Texts of the caveats that disqualify the figures: a loss that is not finite, a strategy that did not run."""
    disturbances: tuple[str, ...] = ()
    """Texts of the caveats that other programs used the processors: the figures may be too low for that reason."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """See ``workload_facts``; empty if not known."""
    environment: Environment | None = None
    run_id: str | None = None
    """Name of the run, the first of several; rows of one run are expected together in later results."""

    @property
    def succeeded(self) -> bool:
        return self.status == SUCCESS

    @property
    def device(self) -> str | None:
        """The accelerator's name as the driver gives it."""
        return self.workload.get("device")


def benchmark_result(
    summaries: Sequence[TrialSummary], environment: Environment | None = None, name: str | None = None
) -> BenchmarkResult:
    """Reduces the runs of one row. ``name``: None takes ``baseline_name``. Raises ValueError without runs."""
    if not summaries:
        raise ValueError("summaries must hold one run at least")
    good = [summary for summary in summaries if summary.record.outcome.success]
    representative = (good or summaries)[-1]
    return BenchmarkResult(
        name=name or baseline_name(representative),
        **_figures(good),
        status=representative.record.outcome.status,
        error=representative.record.outcome.error,
        failed_runs=len(summaries) - len(good),
        doubts=_caveat_texts(good, lambda kind: kind not in CPU_KINDS),
        disturbances=_caveat_texts(good, lambda kind: kind in CPU_KINDS),
        workload=workload_facts(representative),
        environment=environment,
        run_id=next((run.run_id for run in summaries if run.run_id), None),
    )


def _caveat_texts(runs: Sequence[TrialSummary], chosen: Callable[[CaveatKind], bool]) -> tuple[str, ...]:
    """Texts of the disqualifying caveats of these kinds, each once."""
    caveats = (caveat for run in runs for caveat in run.caveats if caveat.disqualifying and chosen(caveat.kind))
    return tuple(dict.fromkeys(caveat.text for caveat in caveats))


def _figures(good: Sequence[TrialSummary]) -> dict[str, Any]:
    """Fields of a BenchmarkResult from its successful runs; empty without any."""
    if not good:
        return {}
    on_gpu = good[-1].record.trial.placement.accelerator == "cuda"
    peaks = measured_values(good, "gpu_peak_bytes" if on_gpu else "host_peak_bytes")
    held = measured_values(good, "gpu_allocated_bytes" if on_gpu else "host_pss_bytes")
    rates = measured_values(good, "tokens_per_second")
    return {
        "throughput_tokens_per_sec": geometric_mean(rates),
        "samples_per_sec": geometric_mean(measured_values(good, "samples_per_second")),
        "peak_memory_mb": max(peaks) / BYTES_PER_MB if peaks else None,
        "average_memory_mb": statistics.fmean(held) / BYTES_PER_MB if held else None,
        "memory": "gpu" if on_gpu else "host",
        "tokens_per_sec_runs": tuple(rates),
        "peak_memory_mb_runs": tuple(peak / BYTES_PER_MB for peak in peaks),
        "step_seconds": tuple(seconds for run in good for seconds in run.record.slowest_rank.step_seconds),
        "step_variation": max(measured_values(good, "step_seconds_cv"), default=None),
    }


def workload_facts(summary: TrialSummary) -> dict[str, Any]:
    """Facts that must be equal for two rows to measure the same quantity; None for those that a failed row has not.

    The number of steps is not among them: more steps measure the same quantity with less noise. ``ds_config`` is a hash
    that shows whether the DeepSpeed configuration changed.
    """
    record = summary.record
    workload, placement, strategy = record.trial.workload, record.trial.placement, record.trial.configuration
    rank = record.ranks[0] if record.ranks else None
    return {
        "model": workload.model,
        # flat_reader puts 0 and "" where a file does not tell: None, which is not compared.
        "parameter_count": (rank.parameter_count or None) if rank else None,
        "strategy": strategy.name,
        "stage": strategy.stage,
        "batch_size": summary.micro_batch_size or workload.batch_size,
        "seq_length": workload.seq_length,
        "grad_accum": summary.grad_accum or workload.grad_accum,
        "precision": workload.precision,
        "activation_checkpointing": workload.activation_checkpointing,
        "dropout": rank.dropout if rank else workload.dropout,
        "optimizer": (rank.optimizer_class or None) if rank else None,
        "accelerator": placement.accelerator,
        "device": rank.device_name if rank else None,
        "num_gpus": placement.num_gpus,
        "data_parallel_size": summary.data_parallel_size,
        "launch": record.launch,
        "method_version": record.method_version,
        "ds_config": summary.config_hash,
    }


def _other_data_and_point(trial: Trial) -> Iterator[str]:
    """The file of a trial that does not train on random ids, and values of a sweep's point that no other part shows."""
    if trial.workload.data_path is not None:
        yield f"data {Path(trial.workload.data_path).name}"
    yield from (point_text({path: value}) for path, value in unnamed_values(trial))


def _plain_text(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+]+", "_", text).strip("_")


def baseline_name(summary: TrialSummary) -> str:
    """``<model>/<strategy>``, then the values that are not the scripts' defaults, as in ``/batch8-seq1024-4ranks``.

    Depends on the row alone, not on the other rows. Hardware, versions and the DeepSpeed configuration are left out, so
    that a row keeps its name, and its baseline, when these change.
    """
    facts, workload = workload_facts(summary), summary.record.trial.workload
    by_stage = facts["strategy"] == f"zero{facts['stage']}"
    parts = (
        # Written out, so that another default of a flag does not rename baselines that are stored.
        (f"batch{facts['batch_size']}", facts["batch_size"] != 4),
        (f"seq{facts['seq_length']}", facts["seq_length"] != 512),
        (f"accum{facts['grad_accum']}", facts["grad_accum"] != 1),
        (facts["precision"], facts["precision"] != "bf16"),
        ("checkpointing", facts["activation_checkpointing"]),
        (f"stage{facts['stage']}", not by_stage and facts["stage"] != 3),
        (f"{facts['num_gpus']}ranks", facts["num_gpus"] != 1),
        (workload.pass_type, workload.pass_type != "train"),
        ("not_synchronized", not workload.synchronized),
        *((_plain_text(text), True) for text in _other_data_and_point(summary.record.trial)),
    )
    suffix = "-".join(text for text, differs in parts if differs)
    return "/".join([facts["model"], facts["strategy"], *([suffix] if suffix else [])])
