"""Benchmarks from Python and under pytest: one configuration, trained for a few steps by real DeepSpeed processes.

A benchmark is one row of a comparison script and runs the same way (``runner.py``), so its figures mean the same.
:func:`run_under` puts the measured optimizer steps into the table and the JSON of pytest-benchmark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import shutil
import tempfile
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

from .analysis import load_results
from .baselines.result import BenchmarkResult, benchmark_result
from .cli import arguments as flags
from .config import deepspeed_config
from .config.options import Family
from .config.strategies import OFFLOAD_NAMES, ZERO_STAGES
from .errors import DsBenchError, UsageError
from .runner import INTERRUPTED_CODE, run_comparison

__all__ = [
    "BenchmarkConfig",
    "BenchmarkFailedError",
    "BenchmarkResult",
    "MemoryBenchmark",
    "ThroughputBenchmark",
    "run_under",
    "step_clock",
]

_STAGES = {strategy.name: stage for stage, strategy in ZERO_STAGES.items()}


class BenchmarkFailedError(DsBenchError):
    """A run of the benchmark did not succeed. The message says how it ended and where its logs are."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """The model, device and duration of a benchmark."""

    name: str
    """Name of its baseline."""
    _: KW_ONLY
    model_name: str = "gpt2"
    """Preset, local path or Hub name."""
    batch_size: int = 4
    """Micro-batch: sequences per GPU in one forward pass."""
    seq_length: int = 512
    """Tokens per sequence."""
    num_steps: int = 10
    """Measured optimizer steps of one run."""
    warmup_steps: int = 2
    """Optimizer steps run first and left out of every statistic."""
    backend: str = "deepspeed"
    """How ranks are started: ``deepspeed``, by its launcher in new processes; ``warm``, forked from one preloaded
    process that lives as long as this one; or ``auto``. See docs/ci_and_python.md."""
    device: str = "auto"
    """``cuda``, ``cpu``, or ``auto``: GPUs if there are any."""
    strategy: str = "zero0"
    """``zero0`` to ``zero3``, or an offload strategy: ``none``, ``cpu_optimizer``, ``cpu_full``, ``nvme``."""
    repeats: int = 1
    """Number of runs. With three or more, a difference can be tested against noise."""
    arguments: tuple[str, ...] = ()
    """Further flags of the comparison scripts, such as ``("--num-gpus", "2", "--precision", "fp32")``."""

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("seq_length", 1),
            ("num_steps", 1),
            ("repeats", 1),
            ("warmup_steps", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}: must be a whole number of {least} or more")
        for name, choices in (
            ("backend", ("deepspeed", "warm", "auto")),
            ("device", ("auto", "cuda", "cpu")),
            ("strategy", (*_STAGES, *OFFLOAD_NAMES)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}: must be one of {', '.join(choices)}")
        if not self.name or not self.model_name:
            raise ValueError("name and model_name must not be empty")

    @property
    def family(self) -> Family:
        """The comparison script that has this strategy."""
        return "zero" if self.strategy in _STAGES else "offload"

    def flags(self) -> list[str]:
        """The flags of that script for this benchmark, without ``--output-dir``."""
        rows = ["--stages", str(_STAGES[self.strategy])] if self.family == "zero" else ["--strategies", self.strategy]
        values = {
            "--model": self.model_name,
            "--batch-size": self.batch_size,
            "--seq-length": self.seq_length,
            "--num-steps": self.num_steps,
            "--warmup-steps": self.warmup_steps,
            "--launcher": self.backend,
            "--accelerator": self.device,
            "--repeats": self.repeats,
        }
        return [*(word for flag, value in values.items() for word in (flag, str(value))), *rows, *self.arguments]


class _Benchmark:
    """A configuration that can be run."""

    group: ClassVar[str]
    """Heading of its table in pytest-benchmark's output."""

    def __init__(self, config: BenchmarkConfig | None = None, **values: Any) -> None:
        """``values``: fields of a BenchmarkConfig; they replace fields of ``config``."""
        self.config = BenchmarkConfig(**values) if config is None else dataclasses.replace(config, **values)

    @property
    def rounds(self) -> int:
        """Measured optimizer steps of all runs together."""
        # Further flags may override the fields.
        options = flags.parse(self.config.family, "benchmark", self.config.flags())
        return options.num_steps * options.repeats

    def run(self) -> BenchmarkResult:
        """Train and measure, as a comparison script does. The temporary folder is kept only if a run fails.

        Raises DsBenchError for a request that cannot be run, BenchmarkFailedError for a run that failed, and
        KeyboardInterrupt.
        """
        config, folder = self.config, Path(tempfile.mkdtemp(prefix="ds_bench_benchmark_"))
        own_variables = dict(os.environ)
        arguments = [*config.flags(), "--quiet", "--format", "json", "--output-dir", str(folder)]
        try:
            options = flags.parse(config.family, "benchmark", arguments)
            os.environ.update(options.variables)
            with contextlib.redirect_stdout(io.StringIO()):
                code = run_comparison([options], deepspeed_config.base_config, arguments)
            if code == INTERRUPTED_CODE:
                raise KeyboardInterrupt
            # The folder was made for this run and holds no other.
            (run,) = (folder / "runs").iterdir()
            loaded = load_results.load(run)
        except BaseException:
            # The request was refused or interrupted. A failed run raises nothing here: the result records it.
            shutil.rmtree(folder)
            raise
        finally:
            os.environ.clear()
            os.environ.update(own_variables)
        result = benchmark_result(loaded.runs, loaded.environment, config.name)
        if result.failed_runs:
            runs = len(loaded.runs)
            failed = f"{result.failed_runs} of {runs} runs failed" if runs > 1 else "failed"
            problem = f"benchmark {config.name} {failed}"
            if not result.succeeded:
                problem += f": {', '.join(filter(None, [result.status, result.error]))}"
            raise BenchmarkFailedError(problem, remedy=f"logs in {run}")
        shutil.rmtree(folder)
        return result


class ThroughputBenchmark(_Benchmark):
    """A throughput benchmark; its result also includes memory."""

    group = "throughput"


class MemoryBenchmark(_Benchmark):
    """A peak-memory benchmark; its result also includes throughput."""

    group = "memory"


# ------------------------------------------------------------------ under pytest-benchmark

# The wall time of a benchmark's function would include process start and model build. So the trial runs once, and
# pytest-benchmark then times one round for each step, with a clock that shows the sum of measured step times. Only
# its documented interface is used: ``pedantic``, the ``timer`` of its marker, ``extra_info``, ``group``, ``stats``.


class _StepClock:
    """A timer that shows the sum of measured step times instead of the time of day."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.__name__ = "step_clock"  # what pytest-benchmark writes into its JSON as the timer

    def __call__(self) -> float:
        return self.seconds


step_clock = _StepClock()
"""The timer for ``@pytest.mark.benchmark(timer=step_clock)``: pytest-benchmark then records the trial's step times."""


def run_under(benchmark: Any, bench: _Benchmark) -> BenchmarkResult:
    """Run ``bench`` once under pytest-benchmark's fixture; every measured optimizer step becomes a round in its table.

    Figures other than times go to ``extra_info``. With ``--benchmark-disable`` the benchmark runs and nothing is
    recorded. Raises what ``bench.run`` raises, and UsageError for a test without
    ``@pytest.mark.benchmark(timer=step_clock)``.
    """
    results: list[BenchmarkResult] = []
    # Keep a group that the test itself set.
    benchmark.group = benchmark.group or bench.group

    def before_round() -> None:
        # pytest-benchmark calls this before every round; the trial runs before the first.
        if not results:
            # stats is None with --benchmark-disable, which times nothing.
            if benchmark.stats is not None and benchmark.stats.options.get("timer") is not step_clock:
                raise UsageError(
                    f"{benchmark.name} would be timed by the wall clock, process start and model build included",
                    remedy="mark it @pytest.mark.benchmark(timer=ds_bench.benchmarks.step_clock)",
                )
            results.append(bench.run())
            benchmark.extra_info.update(extra_info(results[0]))
        step_clock.seconds = 0.0

    calls = itertools.count()

    def show_next_step() -> None:
        """What pytest-benchmark times: each call adds the time of the next measured step to ``step_clock``."""
        steps = results[0].step_seconds
        step_clock.seconds += steps[next(calls) % len(steps)]  # with a profile, pytest-benchmark calls once more

    benchmark.pedantic(show_next_step, setup=before_round, rounds=bench.rounds)
    return results[0]


def extra_info(result: BenchmarkResult) -> dict[str, Any]:
    """Figures for pytest-benchmark's JSON in addition to the step times."""
    names = (
        "throughput_tokens_per_sec", "samples_per_sec", "peak_memory_mb", "average_memory_mb", "memory",
        "step_variation", "device",
    )  # fmt: skip
    workload_keys = ("model", "strategy", "batch_size", "seq_length", "grad_accum", "precision", "num_gpus", "launch")
    return {
        "name": result.name,
        **{name: getattr(result, name) for name in names},
        **{name: result.workload.get(name) for name in workload_keys},
    }
