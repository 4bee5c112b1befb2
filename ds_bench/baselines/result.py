"""The figures that a baseline guards, reduced from the runs of one row, and the name of the baseline.

MB is 2**20 bytes here, just as GB is 2**30 elsewhere.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..analysis.intervals import geometric_mean
from ..analysis.provenance import unnamed_values
from ..config.caveat_texts import CPU_KINDS, CaveatKind
from ..config.spec import point_text
from ..records.schema import SUCCESS, measured_values
from ..system.environment import Environment

if TYPE_CHECKING:
    from ..analysis.row import Run

Memory = Literal["gpu", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a result and a baseline entry have in common.

    Figures are for the whole job unless noted; None if not measured, or not guarded by the entry.
    """

    name: str
    """Name of the baseline."""
    throughput_tokens_per_sec: float | None = None
    """Geometric mean of the successful runs' means."""
    samples_per_sec: float | None = None
    """Sequences per second; geometric mean of the successful runs' means."""
    peak_memory_mb: float | None = None
    """Maximum over the runs: peak allocated on the fullest GPU in the measured steps; on the CPU accelerator, peak
    resident memory of a node's ranks."""
    average_memory_mb: float | None = None
    """Mean over the runs, not over time, of the memory in use after the last measured step, when activations are freed:
    allocated on the fullest GPU; on the CPU accelerator, the proportional set size of a node's ranks."""
    memory: Memory | None = None
    """Kind of memory of the two fields above; None if not known."""
    tokens_per_sec_runs: tuple[float, ...] = ()
    """Mean of each successful run: the samples for the test against noise."""
    samples_per_sec_runs: tuple[float, ...] = ()
    peak_memory_mb_runs: tuple[float, ...] = ()
    step_variation: float | None = None
    """Largest coefficient of variation of step times within a run: a rough guide to noise."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Facts that a result and its baseline must share (``workload_facts``); empty if not known."""
    environment: Environment | None = None
    """Hardware and versions, which must be equal."""
    run_id: str | None = None
    """Name of the run, or of the first of several; a later result is expected to have every row of that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult(Figures):
    """The pooled runs of one benchmark."""

    step_seconds: tuple[float, ...] = ()
    """Times of the measured optimizer steps on the slowest rank, run after run."""
    status: str = SUCCESS
    """Status of the last run if none succeeded."""
    error: str | None = None
    """Why that run failed, in one line."""
    failed_runs: int = 0
    doubts: tuple[str, ...] = ()
    """Texts of the caveats that disqualify the figures: a loss that is not finite, a strategy that did not run."""
    disturbances: tuple[str, ...] = ()
    """Texts of the caveats that other programs used the processors, which may have lowered the figures."""

    @property
    def succeeded(self) -> bool:
        return self.status == SUCCESS

    @property
    def device(self) -> str | None:
        """The accelerator's name as the driver gives it."""
        return self.workload.get("device")


def benchmark_result(
    runs: Sequence[Run], environment: Environment | None = None, name: str | None = None
) -> BenchmarkResult:
    """Reduce the runs of one row. ``name``: defaults to ``baseline_name``. Raises ValueError without runs."""
    if not runs:
        raise ValueError("runs must hold at least one run")
    good = [run for run in runs if run.outcome.success]
    representative = (good or runs)[-1]
    figures: dict[str, Any] = {}
    if good:
        rows = [run.row for run in good]
        on_gpu = rows[-1].accelerator == "cuda"
        peaks = measured_values(rows, "gpu_peak_gb" if on_gpu else "cpu_used_gb")
        held = measured_values(rows, "gpu_allocated_gb" if on_gpu else "cpu_pss_gb")
        rates = measured_values(rows, "throughput_tokens_per_sec")
        samples = measured_values(rows, "throughput_samples_per_sec")
        variations = measured_values(rows, "step_time_cv_percent")
        records = [run.record for run in good if run.record]
        figures = {
            "throughput_tokens_per_sec": geometric_mean(rates),
            "samples_per_sec": geometric_mean(samples),
            "peak_memory_mb": max(peaks) * 1024 if peaks else None,
            "average_memory_mb": statistics.fmean(held) * 1024 if held else None,
            "memory": "gpu" if on_gpu else "host",
            "tokens_per_sec_runs": tuple(rates),
            "samples_per_sec_runs": tuple(samples),
            "peak_memory_mb_runs": tuple(peak * 1024 for peak in peaks),
            "step_seconds": tuple(seconds for record in records for seconds in record.slowest_rank.step_seconds),
            "step_variation": max(variations) / 100 if variations else None,
        }
    return BenchmarkResult(
        name=name or baseline_name(representative),
        **figures,
        status=representative.outcome.status,
        error=representative.outcome.error,
        failed_runs=len(runs) - len(good),
        doubts=_caveat_texts(good, lambda kind: kind not in CPU_KINDS),
        disturbances=_caveat_texts(good, lambda kind: kind in CPU_KINDS),
        workload=workload_facts(representative),
        environment=environment,
        run_id=next((run.row.run_id for run in runs if run.row.run_id), None),
    )


def _caveat_texts(runs: Sequence[Run], chosen: Callable[[CaveatKind], bool]) -> tuple[str, ...]:
    """Return the texts of the disqualifying caveats of these kinds, without repeats."""
    caveats = (caveat for run in runs for caveat in run.caveats if caveat.kind.disqualifies and chosen(caveat.kind))
    return tuple(dict.fromkeys(caveat.text for caveat in caveats))


def workload_facts(run: Run) -> dict[str, Any]:
    """Return the facts that two rows must share to measure the same quantity; None for those a failed row lacks.

    The number of steps is not one of them: more steps measure the same quantity with less noise. ``ds_config`` is a
    hash that shows whether the DeepSpeed configuration changed.
    """
    script = {} if run.row.script is None else {"script": run.row.script}
    return {name: getattr(run.row, name) for name in _WORKLOAD_FACTS} | script | {"ds_config": run.row.config_hash}


_WORKLOAD_FACTS = (
    "model", "parameter_count", "strategy", "stage", "batch_size", "seq_length", "grad_accum", "precision",
    "activation_checkpointing", "dropout", "optimizer", "accelerator", "device", "num_gpus", "data_parallel_size",
    "launch", "method_version",
)  # fmt: skip


def baseline_name(run: Run) -> str:
    """Return ``<model>/<strategy>``, then the values that are not the scripts' defaults: ``/batch8-seq1024-4ranks``.

    It does not depend on other rows. Hardware, versions and the DeepSpeed configuration are left out, so that a row
    keeps its name, and its baseline, when these change. For a user's own script, batch size, accumulation and precision
    are left out too: the script decides them, so a row that failed does not know them.
    """
    facts, workload = workload_facts(run), run.trial.workload
    # The file of token ids, and values of a sweep's point that no other part shows.
    texts = [] if workload.data_path is None else [f"data {Path(workload.data_path).name}"]
    texts += [point_text({path: value}) for path, value in unnamed_values(run.trial)]
    by_stage, built_in = facts["strategy"] == f"zero{facts['stage']}", workload.script is None
    parts = (
        # Written out, so that a new default of a flag does not rename stored baselines.
        (f"batch{facts['batch_size']}", built_in and facts["batch_size"] != 4),
        (f"seq{facts['seq_length']}", facts["seq_length"] not in (None, 512)),
        (f"accum{facts['grad_accum']}", built_in and facts["grad_accum"] != 1),
        (facts["precision"], built_in and facts["precision"] != "bf16"),
        ("checkpointing", facts["activation_checkpointing"]),
        (f"stage{facts['stage']}", not by_stage and facts["stage"] != 3),
        (f"{facts['num_gpus']}ranks", facts["num_gpus"] != 1),
        (workload.pass_type, workload.pass_type != "train"),
        ("not_synchronized", not workload.synchronized),
        *((re.sub(r"[^A-Za-z0-9._+]+", "_", text).strip("_"), True) for text in texts),
    )
    suffix = "-".join(text for text, differs in parts if differs)
    return "/".join([facts["model"], facts["strategy"], *([suffix] if suffix else [])])
