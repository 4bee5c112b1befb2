"""Benchmarks from Python and under pytest: one configuration, trained for a few steps by real DeepSpeed processes.

A benchmark is one row of a comparison script and goes the same way (:mod:`comparison`), so its figures mean the same
(README.md). How it stands in pytest-benchmark's table is for :mod:`stepclock`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
import tempfile
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

from . import run as comparison
from .analysis import load_results
from .baselines import result as benchresult
from .baselines.result import BenchmarkResult
from .baselines.step_clock import run_under, step_clock
from .cli import arguments as flags
from .config import deepspeed_config
from .config.options import Family
from .config.spec import Strategy
from .config.strategies import OFFLOAD_NAMES, ZERO_STAGES
from .errors import DsBenchError

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
    """A run of the benchmark did not succeed: how it ended, and where its logs are."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """What a benchmark trains, on what, and for how long."""

    name: str
    """What its baseline is called."""
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
    """How ranks are started: ``deepspeed``, its launcher, everything anew; ``warm``, forked from one preloaded process,
    which this process then keeps; ``auto``. See docs/ci.md."""
    device: str = "auto"
    """``cuda``, ``cpu``, or ``auto``: GPUs where there are any."""
    strategy: str = "zero0"
    """``zero0`` to ``zero3``, or an offload strategy: ``none``, ``cpu_optimizer``, ``cpu_full``, ``nvme``."""
    repeats: int = 1
    """Runs; three or more let a difference be tested against noise."""
    arguments: tuple[str, ...] = ()
    """Further flags of the comparison scripts, such as ``("--num-gpus", "2", "--precision", "fp32")``."""

    def __post_init__(self) -> None:
        for field_name, least in (("batch_size", 1), ("seq_length", 1), ("num_steps", 1), ("warmup_steps", 0)):
            _require_whole(field_name, getattr(self, field_name), least)
        _require_whole("repeats", self.repeats, 1)
        _require_one_of("backend", self.backend, ("deepspeed", "warm", "auto"))
        _require_one_of("device", self.device, ("auto", "cuda", "cpu"))
        _require_one_of("strategy", self.strategy, (*_STAGES, *OFFLOAD_NAMES))
        if not self.name or not self.model_name:
            raise ValueError("name and model_name must not be empty")

    @property
    def family(self) -> Family:
        """The comparison script that has this strategy."""
        return "zero" if self.strategy in _STAGES else "offload"

    def flags(self) -> list[str]:
        """The same as flags of that script, but for where the files go."""
        stages = ["--stages", str(_STAGES[self.strategy])] if self.family == "zero" else ["--strategies", self.strategy]
        return [
            *("--model", self.model_name),
            *("--batch-size", str(self.batch_size)),
            *("--seq-length", str(self.seq_length)),
            *("--num-steps", str(self.num_steps)),
            *("--warmup-steps", str(self.warmup_steps)),
            *("--launcher", self.backend),
            *("--accelerator", self.device),
            *("--repeats", str(self.repeats)),
            *stages,
            *self.arguments,
        ]


def _require_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}: must be a whole number of {least} or more")


def _require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: must be one of {', '.join(choices)}")


class _Benchmark:
    """A configuration that can be run."""

    group: ClassVar[str]
    """Heading of pytest-benchmark's table."""

    def __init__(self, config: BenchmarkConfig | None = None, **values: Any) -> None:
        """``values``: fields of a BenchmarkConfig, over those of ``config`` where one is given."""
        self.config = BenchmarkConfig(**values) if config is None else dataclasses.replace(config, **values)

    @property
    def rounds(self) -> int:
        """Optimizer steps that are measured, in all runs together."""
        return self.config.num_steps * self.config.repeats

    def run(self) -> BenchmarkResult:
        """Trains and measures. Raises DsBenchError for a request that cannot be run, BenchmarkFailedError for a run
        that failed; KeyboardInterrupt passes through."""
        return measure(self.config)


class ThroughputBenchmark(_Benchmark):
    """Guards tokens/s above all; its result has the memory too."""

    group = "throughput"


class MemoryBenchmark(_Benchmark):
    """Guards peak memory above all; its result has the throughput too."""

    group = "memory"


def measure(config: BenchmarkConfig) -> BenchmarkResult:
    """One configuration through the whole way of a comparison script, in a folder that is kept only on failure."""
    folder = Path(tempfile.mkdtemp(prefix="ds_bench_benchmark_"))
    try:
        run = _compared(config, [*config.flags(), "--quiet", "--format", "json", "--output-dir", str(folder)])
        loaded = load_results.load(run)
    except BaseException:
        shutil.rmtree(folder)
        raise
    result = benchresult.of_runs(loaded.summaries, loaded.environment, config.name)
    if result.failed_runs:
        raise BenchmarkFailedError(_failure(result, config), remedy=f"logs in {run}")
    shutil.rmtree(folder)
    return result


def _compared(config: BenchmarkConfig, arguments: list[str]) -> Path:
    """The run folder of a comparison of this one row; what it prints is left out."""
    options = flags.parse(config.family, "benchmark", arguments)
    with contextlib.redirect_stdout(io.StringIO()):
        code = comparison.run_comparison(options, _make_config, arguments)
    if code == comparison.INTERRUPTED_CODE:
        raise KeyboardInterrupt
    (run,) = (options.output_dir / "runs").iterdir()
    return run


def _make_config(strategy: Strategy, batch_size: int, grad_accum: int) -> dict[str, Any]:
    return deepspeed_config.base_config(strategy, batch_size, grad_accum)


def _failure(result: BenchmarkResult, config: BenchmarkConfig) -> str:
    many = f"{result.failed_runs} of {config.repeats} runs failed" if config.repeats > 1 else "failed"
    cause = "" if result.succeeded else f": {result.status}{f', {result.error}' if result.error else ''}"
    return f"benchmark {config.name} {many}{cause}"
