"""A benchmark under pytest-benchmark: its table and its JSON count the measured optimizer steps.

The wall time of a benchmark's function would be that of starting processes and building the model. So the trial runs
once, and pytest-benchmark then times, on a clock that moves by measured step times alone, one round for each step. Only
its documented interface is used: ``pedantic``, the ``timer`` of its marker, ``extra_info``, ``group``, ``stats``.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import UsageError
from .result import BenchmarkResult


class Bench(Protocol):
    """What can be run under pytest-benchmark."""

    group: str
    """Heading of its table."""

    @property
    def rounds(self) -> int:
        """Optimizer steps that will be measured, in all runs together."""
        ...

    def run(self) -> BenchmarkResult:
        """Trains and measures."""
        ...


class _StepClock:
    """A timer that goes forward by measured step times alone."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.__name__ = "step_clock"  # what pytest-benchmark writes into its JSON as the timer

    def __call__(self) -> float:
        return self.seconds


step_clock = _StepClock()
"""The timer for ``@pytest.mark.benchmark(timer=step_clock)``: pytest-benchmark then counts the trial's own steps."""


def run_under(benchmark: Any, bench: Bench) -> BenchmarkResult:
    """Runs ``bench`` once under pytest-benchmark's fixture; every measured optimizer step is a round of its table.

    Figures that are no times go to ``extra_info``. With ``--benchmark-disable`` the benchmark runs and nothing is
    recorded. Raises as ``bench.run`` does, and UsageError for a test without
    ``@pytest.mark.benchmark(timer=step_clock)``.
    """
    results: list[BenchmarkResult] = []
    benchmark.group = benchmark.group or bench.group

    def before_round() -> None:
        if not results:
            _require_step_clock(benchmark)
            results.append(bench.run())
            benchmark.extra_info.update(extra_info(results[0]))
        step_clock.seconds = 0.0

    steps = _Steps(results)
    benchmark.pedantic(steps, setup=before_round, rounds=bench.rounds)
    return results[0]


class _Steps:
    """Called once for each measured step, in order; takes as long on ``step_clock`` as the step took."""

    def __init__(self, results: list[BenchmarkResult]) -> None:
        self._results, self._done = results, 0

    def __call__(self) -> None:
        steps = self._results[0].step_seconds
        step_clock.seconds += steps[self._done % len(steps)]  # a profile asked for calls once more
        self._done += 1


def _require_step_clock(benchmark: Any) -> None:
    """Found out before minutes are spent, not after."""
    if benchmark.stats is not None and benchmark.stats.options.get("timer") is not step_clock:
        raise UsageError(
            f"{benchmark.name} would be timed by the wall clock, process start and model build included",
            remedy="mark it @pytest.mark.benchmark(timer=ds_bench.benchmarks.step_clock)",
        )


def extra_info(result: BenchmarkResult) -> dict[str, Any]:
    """What pytest-benchmark's JSON is to hold beside the step times."""
    names = (
        "throughput_tokens_per_sec", "samples_per_sec", "peak_memory_mb", "average_memory_mb", "memory",
        "step_variation", "device",
    )  # fmt: skip
    told = ("model", "strategy", "batch_size", "seq_length", "grad_accum", "precision", "num_gpus", "launch")
    return {
        "name": result.name,
        **{name: getattr(result, name) for name in names},
        **{name: result.workload.get(name) for name in told},
    }
