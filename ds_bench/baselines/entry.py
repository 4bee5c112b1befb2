"""One baseline as it stands in ``baselines.json``: the figures to be held to, and what they were measured on.

Of the environment only what decides whether two results compare is kept: the file is meant to be committed, and needs
no host names and no variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, ClassVar

from .. import __version__
from ..system.environment import Environment
from ..system.gpus import GpuFacts
from .result import BenchmarkResult, Memory

DEFAULT_TOLERANCE = 0.05
_HOST = (
    "cpu_model", "logical_cores", "physical_cores", "cpu_quota_cores", "torch_cuda_version", "gpu_driver_version",
)  # fmt: skip
_PACKAGES = ("torch", "deepspeed", "transformers")
_GPU = ("name", "memory_total_bytes", "mig")
_FIGURES = ("throughput_tokens_per_sec", "peak_memory_mb", "samples_per_sec", "average_memory_mb")
_SHARED = (
    "throughput_tokens_per_sec", "peak_memory_mb", "samples_per_sec", "average_memory_mb", "memory",
    "tokens_per_sec_runs", "peak_memory_mb_runs", "step_variation", "workload", "environment", "run_id",
)  # fmt: skip


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineEntry:
    """What a benchmark is held to. The first six fields suffice: such an entry is a limit set by hand."""

    KEYS: ClassVar[frozenset[str]]
    """What stands in the file under names of ours; any other key is left alone."""

    name: str
    throughput_tokens_per_sec: float | None = None
    """Tokens per second of the whole job; None: not guarded."""
    peak_memory_mb: float | None = None
    """Peak memory in MB (2**20), of ``memory``'s kind; None: not guarded."""
    tolerance: float = DEFAULT_TOLERANCE
    """Fraction by which throughput may fall or memory rise."""
    version: str = __version__
    """Of ds_bench, which wrote the entry."""
    timestamp: str = field(default_factory=_now)
    """ISO 8601, UTC."""
    samples_per_sec: float | None = None
    average_memory_mb: float | None = None
    """See ``BenchmarkResult``."""
    memory: Memory | None = None
    """``gpu`` or ``host``."""
    tokens_per_sec_runs: tuple[float, ...] = ()
    """Mean of every run, for a test against noise."""
    peak_memory_mb_runs: tuple[float, ...] = ()
    step_variation: float | None = None
    """Coefficient of variation of step times inside a run."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """What has to be the same (``benchresult.workload_facts``)."""
    environment: Environment | None = None
    """Hardware and versions that have to be the same."""
    run_id: str | None = None
    """Of the run that was saved: its rows are expected together in a result that is checked."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError("name must be a text, and not empty")
        if not _is_number(self.tolerance) or not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance!r}: must be a number from 0 to below 1")
        for key in _FIGURES:
            value = getattr(self, key)
            if value is not None and not (_is_number(value) and value > 0):
                raise ValueError(f"{key} is {value!r}: must be a number above 0, or null")
        for key in ("tokens_per_sec_runs", "peak_memory_mb_runs"):
            if not all(_is_number(value) for value in getattr(self, key)):
                raise ValueError(f"{key} must be a list of numbers")
        if self.step_variation is not None and not (_is_number(self.step_variation) and self.step_variation >= 0):
            raise ValueError(f"step_variation is {self.step_variation!r}: must be a number of 0 or more, or null")
        if not isinstance(self.run_id, str | None):
            raise ValueError(f"run_id is {self.run_id!r}: must be a text, or null")
        if self.memory not in ("gpu", "host", None):
            raise ValueError(f"memory is {self.memory!r}: must be gpu or host")

    @property
    def set_by_hand(self) -> bool:
        """A limit that somebody chose, not a measurement: it holds on any machine."""
        return self.environment is None and not self.workload

    @classmethod
    def of(cls, result: BenchmarkResult, tolerance: float = DEFAULT_TOLERANCE) -> BaselineEntry:
        """A result as the baseline of its name. Raises ValueError for one that did not succeed."""
        if not result.succeeded:
            raise ValueError(f"{result.name} ended with {result.status}: not a baseline")
        return cls(name=result.name, tolerance=tolerance, **{key: getattr(result, key) for key in _SHARED})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the six keys that every entry has, then what is known besides."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["environment"] = None if self.environment is None else _plain_environment(self.environment)
        more = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return {key: value for key, value in more.items() if key in _ALWAYS or value not in (None, [], {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BaselineEntry:
        """The inverse of :meth:`to_dict`; other keys are left out. Raises TypeError or ValueError on other shapes."""
        values = {key: value for key, value in data.items() if key in cls.KEYS}
        for key in ("tokens_per_sec_runs", "peak_memory_mb_runs"):
            values[key] = tuple(values.get(key) or ())
        if not isinstance(values.setdefault("workload", {}), dict):
            raise ValueError("workload must be an object")
        if values.get("environment") is not None:
            values["environment"] = _environment(values["environment"])
        return cls(**values)


BaselineEntry.KEYS = frozenset(each.name for each in fields(BaselineEntry))
_ALWAYS = ("name", "throughput_tokens_per_sec", "peak_memory_mb", "tolerance", "version", "timestamp")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plain_environment(environment: Environment) -> dict[str, Any]:
    versions = {name: environment.packages[name] for name in _PACKAGES if name in environment.packages}
    cards = [{name: getattr(gpu, name) for name in _GPU} for gpu in environment.gpus]
    return {**{name: getattr(environment, name) for name in _HOST}, "packages": versions, "gpus": cards}


def _environment(plain: Any) -> Environment:
    """Only what is compared is there; the rest keeps its defaults."""
    try:
        cards = enumerate(plain.get("gpus", ()))
        return Environment(
            hostname="",  # required, and compared nowhere
            **{name: plain[name] for name in _HOST if name in plain},
            packages=dict(plain.get("packages", {})),
            gpus=tuple(GpuFacts(index=index, **{name: card.get(name) for name in _GPU}) for index, card in cards),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"environment is not readable: {error}") from None
