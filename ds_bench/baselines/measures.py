"""Throughput and peak memory of a result beside those of its baseline: beyond the tolerance, or inside the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import units
from ..analysis.intervals import RatioInterval, ratio_interval
from .entry import BaselineEntry
from .result import BenchmarkResult

_ROUNDING = 1e-9
"""Relative: what is computed to lie at the limit exactly is not beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure held against the baseline's."""

    kind: str
    label: str
    value: float
    base: float
    more_is_worse: bool
    interval: RatioInterval | None
    """None below three runs on either side."""
    show: Callable[[float], str]

    @property
    def ratio(self) -> float:
        return self.value / self.base

    @property
    def worse(self) -> bool:
        return self.value > self.base if self.more_is_worse else self.value < self.base

    def beyond(self, tolerance: float) -> bool:
        """Acceptance B3."""
        if self.more_is_worse:
            return self.value > self.base * (1 + tolerance) * (1 + _ROUNDING)
        return self.value < self.base * (1 - tolerance) * (1 - _ROUNDING)

    @property
    def above_noise(self) -> bool:
        """Whether runs vary too little to explain it; taken to be so where nothing can be tested."""
        if self.interval is None:
            return True
        if self.interval.too_wide:
            return False
        return self.interval.low > 1 if self.more_is_worse else self.interval.high < 1

    def regressed(self, tolerance: float) -> bool:
        return self.beyond(tolerance) and self.above_noise

    @property
    def unseen(self) -> float | None:
        """The largest change for the worse, as a fraction, that varies no more than the runs; None where not tested."""
        if self.interval is None:
            return None
        centre, low, high = self.interval.ratio, self.interval.low, self.interval.high
        if self.more_is_worse:
            return centre / low - 1 if low > 0 else math.inf
        return 1 - centre / high

    def noisy(self, tolerance: float) -> bool:
        """Whether a regression beyond the tolerance would go unseen, and what was measured does not rule one out."""
        if self.interval is None or self.unseen is None or self.regressed(tolerance):
            return False
        worst = self.interval.high - 1 if self.more_is_worse else 1 - self.interval.low
        return min(self.unseen, worst) > tolerance + _ROUNDING

    def text(self, tolerance: float) -> str:
        """``tokens/s 940 against 1,000 (-6.0 %), beyond the tolerance of 5.0 %``."""
        where = "beyond" if self.beyond(tolerance) else "within" if self.worse else None
        judged = f"{where} the tolerance of {units.format_percent(tolerance)}" if where else "no worse"
        change = f"{self.label} {self.show(self.value)} against {self.show(self.base)} ({_signed(self.ratio)})"
        return f"{change}, {judged}{self._noise(where == 'beyond')}"

    def _noise(self, beyond: bool) -> str:
        if self.interval is None:
            return ""
        span = f"95 % interval {_signed(self.interval.low)} to {_signed(self.interval.high)}"
        if self.interval.distinguishable or self.interval.low == self.interval.high:
            return f" ({span})"
        return f"{' but' if beyond else ' and'} inside the noise ({span})"


def _signed(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _tested(result: BenchmarkResult, runs: Sequence[float], runs_before: Sequence[float]) -> RatioInterval | None:
    """The interval of the ratio; of a result of the CPU accelerator, one that is too wide decides nothing."""
    interval = ratio_interval(runs, runs_before)
    return interval.on_shared_processor if interval is not None and result.memory == "host" else interval


def measures(result: BenchmarkResult, baseline: BaselineEntry) -> list[Measure]:
    """Throughput and peak memory, as far as both sides know them."""
    memory = {"gpu": "peak GPU memory", "host": "peak CPU memory", None: "peak memory"}
    found = []
    rate, rate_before = result.throughput_tokens_per_sec, baseline.throughput_tokens_per_sec
    if rate is not None and rate_before is not None:
        found.append(
            Measure(
                kind="throughput", label="tokens/s", value=rate, base=rate_before, more_is_worse=False,
                interval=_tested(result, result.tokens_per_sec_runs, baseline.tokens_per_sec_runs),
                show=units.format_count,
            )
        )  # fmt: skip
    peak, peak_before = result.peak_memory_mb, baseline.peak_memory_mb
    if peak is not None and peak_before is not None:
        found.append(
            Measure(
                kind="memory", label=memory[result.memory], value=peak, base=peak_before, more_is_worse=True,
                interval=_tested(result, result.peak_memory_mb_runs, baseline.peak_memory_mb_runs),
                show=lambda count_mb: units.format_bytes(count_mb * units.BYTES_PER_MB),
            )
        )  # fmt: skip
    return found
