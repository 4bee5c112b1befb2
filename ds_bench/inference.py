"""Whether two strategies differ in speed, by runs and not by steps (metrics.md, "Repeats and comparing").

Steps inside a run share its clocks, its heat and its place in memory: they are not independent, and counting them as
samples finds differences that are not there. A run contributes one number, its mean. Nothing here knows what is
measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

FEWEST_RUNS = 3
"""Runs on either side below which nothing is tested."""
_SMALLEST = 1e-300
"""Stands for a zero denominator in Lentz's method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioInterval:
    """A ratio of mean throughputs with its confidence interval."""

    ratio: float
    """Of the geometric means: the logs are what is averaged."""
    low: float
    high: float
    degrees_of_freedom: float

    @property
    def distinguishable(self) -> bool:
        """Whether the interval leaves out 1."""
        return not self.low <= 1.0 <= self.high


def spread(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None below two values.

    ``statistics.stdev`` works in exact fractions, many times slower: too slow for thousands of records.
    """
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))


def ratio_interval(
    values: Sequence[float], baseline: Sequence[float], confidence: float = 0.95
) -> RatioInterval | None:
    """The ratio of two sets of per-run means by Welch's interval on their logs, which may spread differently.

    None below three runs on either side, or where a value is not a positive finite number. Source: B. L. Welch,
    "The generalization of 'Student's' problem when several different population variances are involved",
    Biometrika 34 (1947); degrees of freedom after Satterthwaite (1946).
    """
    if not (_usable(values) and _usable(baseline)):
        return None
    ours, theirs = [math.log(value) for value in values], [math.log(value) for value in baseline]
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    variances = [(spread(logs) or 0.0) ** 2 / len(logs) for logs in (ours, theirs)]
    freedom = _satterthwaite(variances, [len(ours) - 1, len(theirs) - 1])
    margin = student_t_quantile((1 + confidence) / 2, freedom) * math.sqrt(math.fsum(variances))
    ratio, low, high = (_exp(difference + shift) for shift in (0.0, -margin, margin))
    return RatioInterval(ratio=ratio, low=low, high=high, degrees_of_freedom=freedom)


def _exp(exponent: float) -> float:
    """An interval may be wider than a float reaches."""
    return math.exp(exponent) if exponent < 709 else math.inf


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's interval of the geometric mean of per-run means: on their logs, as the ratio's, so never below 0.

    None below three runs, or where one is no positive finite number, or where the interval is wider than a float holds.
    """
    if not _usable(values):
        return None
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    margin = student_t_quantile((1 + confidence) / 2, len(logs) - 1) * (spread(logs) or 0.0) / math.sqrt(len(logs))
    low, high = _exp(mean - margin), _exp(mean + margin)
    return (low, high) if math.isfinite(high) else None


def _usable(values: Sequence[float]) -> bool:
    return len(values) >= FEWEST_RUNS and all(math.isfinite(value) and value > 0 for value in values)


def _satterthwaite(variances: Sequence[float], freedoms: Sequence[int]) -> float:
    """Degrees of freedom of a sum of estimated variances; of runs that do not vary at all, those of both together."""
    total = math.fsum(variances)
    if total == 0:
        return float(sum(freedoms))
    shares = [variance / total for variance in variances]  # of squares alone, tiny ones would vanish
    return 1 / math.fsum(share**2 / freedom for share, freedom in zip(shares, freedoms, strict=True))


@lru_cache(maxsize=4096)
def student_t_quantile(p: float, df: float) -> float:
    """The value below which Student's t with ``df`` degrees of freedom lies with probability ``p``.

    Raises ValueError outside 0 < p < 1 or for df not above 0. Both tails of t together hold I_x(df/2, 1/2) with
    x = df / (df + t²) (Abramowitz and Stegun 26.7.1), which is solved for t by Newton's method.
    """
    if not (0 < p < 1 and df > 0):
        raise ValueError(f"p must lie between 0 and 1 and df above 0, not {p} and {df}")
    if p <= 0.5:
        return 0.0 if p == 0.5 else -student_t_quantile(1 - p, df)
    # The tail is convex in t and t's quantile lies beyond the normal one: from there Newton's steps cannot overshoot.
    t, wanted = statistics.NormalDist().inv_cdf(p), 2 * (1 - p)
    for _ in range(500):
        step = (_both_tails(t, df) - wanted) / (2 * _density(t, df))
        t += step
        if abs(step) <= 1e-13 * t:
            break
    return t


def _density(t: float, df: float) -> float:
    return math.exp(-_log_beta(df / 2, 0.5) - (df + 1) / 2 * math.log1p(t * t / df)) / math.sqrt(df)


def _both_tails(t: float, df: float) -> float:
    """The probability of a value farther from 0 than ``t``."""
    return _incomplete_beta(df / (df + t * t), df / 2, 0.5)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b): Digital Library of Mathematical Functions, 8.17."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly its mirror image does not (8.17.4)
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - _log_beta(a, b)) / a
    return front / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction 1 + d1/(1 + d2/(1 + …)) of 8.17.22, forwards by Lentz's method."""
    value = c = 1.0
    d = 0.0
    for n in range(1, 10_000):
        term = _term(n, x, a, b)
        d = 1 / ((1 + term * d) or _SMALLEST)
        c = (1 + term / c) or _SMALLEST
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _term(n: int, x: float, a: float, b: float) -> float:
    m = n // 2
    if n % 2:
        return -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
    return m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
