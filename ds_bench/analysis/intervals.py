"""Confidence intervals of throughputs and their ratios (docs/reading.md, "How rows are told apart").

The sample is the run, not the step. Steps of one run share its clocks, its temperature and its place in memory, so they
are not independent; counting them as samples finds differences that do not exist. Rows of one comparison are analyzed
together (:class:`RowRatios`); rows of two results, which share no rounds, with Welch's interval
(:func:`ratio_interval`). All computations are on logarithms: means are geometric means, differences are ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

FEWEST_RUNS = 3
"""A row with fewer runs is not tested."""
ERROR_RATE = 0.05
"""Accepted fraction of tables of equal rows that show a false difference; 1 minus the confidence."""
_TABLE_LEVEL = 0.028
"""Family level in a table of three rows or more: for all comparisons with the baseline, and again for all pairs. It is
below ``ERROR_RATE``: noise that lasts from run to run adds false differences (``bench/false_differences.py``)."""
_TEST_LEVEL = 0.01
"""Significance level of the test for differing rounds; also that of all tests for a row that varies more than the
others, taken together."""
_MIN_DF_WITH_BLOCKS = 4
"""Degrees of freedom that must remain for the noise if rounds are blocks."""
_MAX_BLOCKS = 200
"""Largest number of rounds that are used as blocks; with more, only the trend is fitted."""
_MAX_RATIO_ON_SHARED_PROCESSOR = 2.0
"""Upper end divided by lower end above which an interval on a shared processor is too wide to decide anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioInterval:
    """A ratio of mean throughputs with its confidence interval."""

    ratio: float
    """Ratio of the geometric means."""
    low: float
    high: float
    degrees_of_freedom: float
    confidence: float = 1 - ERROR_RATE
    """Confidence of this interval taken alone. With several rows it is above 95 %, to correct for multiple comparisons.
    """
    too_wide: bool = False
    """True if it is too wide to decide anything (on the CPU accelerator: more than a factor of two)."""

    @property
    def distinguishable(self) -> bool:
        """True if the interval excludes 1 and is not too wide to decide anything."""
        return not self.too_wide and not self.low <= 1.0 <= self.high

    @property
    def inverse(self) -> RatioInterval:
        """The interval of the inverse ratio."""
        low, ratio, high = (1 / value if value else math.inf for value in (self.high, self.ratio, self.low))
        return replace(self, low=low, ratio=ratio, high=high)

    @property
    def on_shared_processor(self) -> RatioInterval:
        """This interval, marked ``too_wide`` if its ends are more than a factor of two apart.

        Ranks on the CPU accelerator share their processors with all other programs: such a spread comes from those
        programs, not from the rows.
        """
        return replace(self, too_wide=self.high > _MAX_RATIO_ON_SHARED_PROCESSOR * self.low)


def sample_std(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None with fewer than two values.

    ``statistics.stdev`` computes in exact fractions, which is too slow for thousands of records.
    """
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))


def geometric_mean(values: Sequence[float]) -> float | None:
    """Geometric mean of per-run means, used everywhere as a row's estimate; None without values, 0 if one is 0."""
    if not values:
        return None
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0


def ratio_interval(values: Sequence[float], baseline: Sequence[float]) -> RatioInterval | None:
    """Welch's 95 % interval of the ratio of two rows, from the logarithms of their per-run means.

    For rows of two results, which share neither rounds nor a trend; for rows of one comparison :class:`RowRatios` uses
    both. None if either row has fewer than three runs or a value that is not positive and finite.

    Source: B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
    involved", Biometrika 34 (1947); degrees of freedom: F. E. Satterthwaite, "An approximate distribution of estimates
    of variance components", Biometrics Bulletin 2 (1946).
    """
    if not (_enough_positive_values(values) and _enough_positive_values(baseline)):
        return None
    samples = [[math.log(value) for value in each] for each in (values, baseline)]
    difference = statistics.fmean(samples[0]) - statistics.fmean(samples[1])
    variances = [(sample_std(logs) or 0.0) ** 2 / len(logs) for logs in samples]
    df = _satterthwaite(variances, [len(logs) - 1 for logs in samples])
    margin = student_t_quantile(1 - ERROR_RATE / 2, df) * math.sqrt(math.fsum(variances))
    ratio, low, high = (_exp(difference + shift) for shift in (0.0, -margin, margin))
    return RatioInterval(ratio=ratio, low=low, high=high, degrees_of_freedom=df)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the geometric mean of per-run means, from their logarithms: its ends are positive.

    None with fewer than three runs, with a value that is not positive and finite, or if the upper end exceeds the
    largest float.
    """
    if not _enough_positive_values(values):
        return None
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    margin = student_t_quantile(1 - ERROR_RATE / 2, len(logs) - 1) * (sample_std(logs) or 0.0) / math.sqrt(len(logs))
    low, high = _exp(mean - margin), _exp(mean + margin)
    return (low, high) if math.isfinite(high) else None


def _exp(exponent: float) -> float:
    """``math.exp``, but infinity instead of an overflow."""
    # math.log of the largest float is 709.78.
    return math.exp(exponent) if exponent < 709 else math.inf


def _enough_positive_values(values: Sequence[float]) -> bool:
    return len(values) >= FEWEST_RUNS and all(math.isfinite(value) and value > 0 for value in values)


def _satterthwaite(variances: Sequence[float], dfs: Sequence[float]) -> float:
    """Degrees of freedom of a sum of estimated variances: (Σ v)² / Σ (v² / f). The sum of ``dfs`` if all are 0."""
    total = math.fsum(variances)
    if total == 0:
        return float(sum(dfs))
    shares = [variance / total for variance in variances]  # squares of tiny variances would underflow
    return 1 / math.fsum(share**2 / df for share, df in zip(shares, dfs, strict=True))


def student_t_quantile(p: float, df: float) -> float:
    """The value below which Student's t with ``df`` degrees of freedom lies with probability ``p``."""
    from scipy.special import stdtrit

    return float(stdtrit(df, p))


@cache
def normal_range_quantile(count: int) -> float:
    """Return the value that the range of ``count`` standard normal values exceeds with probability ``ERROR_RATE``.

    P(range ≤ w) = n ∫ φ(z) (Φ(z) − Φ(z − w))ⁿ⁻¹ dz: H. O. Hartley, "The range in random samples", Biometrika 32 (1942).
    It is the studentized range with infinite degrees of freedom. Importing ``scipy.stats`` for it would take a second.
    """
    import numpy as np
    from scipy.special import ndtr

    largest, ranges = np.arange(-9, 9, 0.02), np.arange(0, 15, 0.005)
    density = np.exp(-(largest**2) / 2) / math.sqrt(2 * math.pi)
    others = (ndtr(largest) - ndtr(largest - ranges[:, None])) ** (count - 1)
    return float(np.interp(1 - ERROR_RATE, count * 0.02 * (others @ density), ranges))


# ------------------------------------------------------------------ rows of one comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMean:
    """The mean of one run, and its place in time."""

    mean: float
    round: int
    position: float
    """Position by start time among all runs of the comparison; equal for runs whose order is unknown."""


class RowRatios:
    """Ratios between the rows of one comparison, estimated from all its runs together.

    Model: the logarithm of a run's mean is the level of its row, plus a linear trend over the order in which runs
    started, plus noise. If rounds differ by more than trend and noise explain (F test at 1 %), they are treated as
    blocks. The noise variance is estimated from all rows together; a row that varies far more than the others (F tests
    at 1 % overall) has its own estimate. An interval spans two ratios of geometric means, the one as measured and the
    one without trend and blocks, plus the margin on both sides. Noise that lasts from run to run is not independent,
    but the shuffled order of the runs (``planning.trial_planner``) still keeps false differences rare
    (``bench/false_differences.py``).

    Sources: blocks and their preliminary test: T. A. Bancroft, "Analysis and inference for incompletely specified
    models involving the use of preliminary test(s) of significance", Biometrics 20 (1964); several rows: S. Holm, "A
    simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979).
    """

    def __init__(self, rows: Mapping[str, Sequence[RunMean]], baseline: str | None) -> None:
        """Leave out rows with fewer than three runs or with a mean that is not positive and finite."""
        usable = {key: runs for key, runs in rows.items() if _enough_positive_values([run.mean for run in runs])}
        # Consecutive, as RunFit needs them: rows that are left out have no index.
        self._index = {key: index for index, key in enumerate(usable)}
        self._baseline = baseline
        self._level = ERROR_RATE if len(usable) < 3 else _TABLE_LEVEL
        self._levels: dict[str, float] = {}
        self._from_baseline: dict[str, LogDifference] = {}
        # With fewer than two rows, between() never needs the fit.
        if len(usable) < 2:
            return
        indices = [self._index[key] for key, runs in usable.items() for _ in runs]
        runs = [run for row_runs in usable.values() for run in row_runs]
        logs = [math.log(run.mean) for run in runs]
        self._fit = RunFit(indices, [run.round for run in runs], [run.position for run in runs], logs)
        if baseline in self._index:
            self._from_baseline = {key: self._difference(key, baseline) for key in usable if key != baseline}
            levels = holm_levels([each.probability for each in self._from_baseline.values()], self._level)
            self._levels = dict(zip(self._from_baseline, levels, strict=True))

    def between(self, row: str, other: str) -> RatioInterval | None:
        """Return the interval of the ratio of ``row`` to ``other``; None if either is left out or both are the same.

        Between a row and the baseline the level follows Holm's method, so that the interval excludes 1 exactly when
        that method finds a difference. Between two other rows it is Bonferroni's level for all pairs, so that the
        fastest row may be compared although nobody knew beforehand which one it would be. The level for one row against
        all others would be too lenient: the fastest row is chosen because it is ahead, so any pair may be the one
        compared.
        """
        if row == other or row not in self._index or other not in self._index:
            return None
        if row == self._baseline:
            interval = self.between(other, row)
            return interval and interval.inverse
        if other == self._baseline:
            return self._from_baseline[row].interval(self._levels[row])
        return self._difference(row, other).interval(self._level / math.comb(len(self._index), 2))

    def _difference(self, row: str, other: str) -> LogDifference:
        return self._fit.difference(self._index[row], self._index[other])


@dataclass(frozen=True, slots=True)
class LogDifference:
    """Difference of two rows' mean logarithms."""

    plain: float
    """As measured."""
    adjusted: float
    """With the trend, and the blocks if there are any, removed."""
    standard_error: float
    degrees_of_freedom: float

    @property
    def probability(self) -> float:
        """Two-sided probability that equal rows differ by at least this much, both as measured and adjusted.

        1 if the two differences have different signs.
        """
        smaller = min(abs(self.plain), abs(self.adjusted)) if self.plain * self.adjusted > 0 else 0.0
        # There is no noise, so no difference is due to chance.
        if self.standard_error == 0:
            return 0.0 if smaller else 1.0
        from scipy.special import stdtr

        return float(2 * stdtr(self.degrees_of_freedom, -smaller / self.standard_error))

    def interval(self, level: float) -> RatioInterval:
        """The interval of the ratio with confidence 1 − ``level``."""
        margin = student_t_quantile(1 - level / 2, self.degrees_of_freedom) * self.standard_error
        return RatioInterval(
            ratio=_exp(self.plain),
            low=_exp(min(self.plain, self.adjusted) - margin),
            high=_exp(max(self.plain, self.adjusted) + margin),
            degrees_of_freedom=self.degrees_of_freedom,
            confidence=1 - level,
        )


def holm_levels(probabilities: Sequence[float], family_level: float) -> list[float]:
    """Return the level at which Holm's method tests each hypothesis.

    The k-th smallest of n probabilities is tested at ``family_level`` / (n − k + 1). The procedure stops at the first
    that exceeds its level; all larger ones share that level.
    """
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    levels = [0.0] * len(order)
    level = 0.0
    stopped = False
    for rank, index in enumerate(order):
        level = level if stopped else family_level / (len(order) - rank)
        levels[index] = level
        stopped = stopped or probabilities[index] > level
    return levels


class RunFit:
    """The least-squares fit to the runs of one comparison: the rows' levels, a trend, and rounds if they differ."""

    def __init__(
        self, rows: Sequence[int], rounds: Sequence[int], positions: Sequence[float], logs: Sequence[float]
    ) -> None:
        """The sequences have one element per run. ``rows``: indices from 0 without gaps.

        ``logs``: logarithms of the means.
        """
        import numpy as np

        self._rows, values = np.asarray(rows), np.asarray(logs, dtype=float)
        self._counts = np.bincount(self._rows).astype(float)
        order = np.asarray(positions, dtype=float)
        # Scaled to a range of 1, like the columns of rounds. All positions are equal if no order is known.
        self._trend = ((order - order.mean()) / (np.ptp(order) or 1.0))[:, None]
        numbers = sorted(set(rounds))
        # One column of zeros and ones for each round but the first.
        self._rounds = (np.asarray(rounds)[:, None] == np.asarray(numbers[1:])).astype(float)
        self._may_have_blocks = 1 < len(numbers) <= _MAX_BLOCKS
        self._means = self._row_means(values)
        self._within_rows = values - self._means[self._rows]
        self._noisy = np.zeros(len(self._counts), dtype=bool)
        """Rows with a noise variance of their own.

        They are excluded from the estimates of trend, rounds and common variance.
        """
        # The residuals of a first fit, with one variance for all rows, show the noisy rows.
        self._noisy = self._find_noisy_rows(self._fit())
        if self._noisy.any():
            self._fit()

    def _row_means(self, values: Any) -> Any:
        import numpy as np

        return np.bincount(self._rows, values) / self._counts

    def _covariates(self, columns: Any) -> _Covariates:
        import numpy as np

        means = np.stack([self._row_means(column) for column in columns.T], axis=1)
        return _Covariates(means, columns - means[self._rows], self._noisy, ~self._noisy[self._rows])

    def _fit(self) -> Any:
        """Fit the model with the noisy rows found so far. Return the sum of squared residuals of each row."""
        import numpy as np
        from scipy.special import fdtri

        noisy, counted = self._noisy, ~self._noisy[self._rows]
        self._used = trend = self._covariates(self._trend)
        removed, residuals = trend.explain(self._within_rows)
        if self._may_have_blocks:
            both = self._covariates(np.hstack([self._trend, self._rounds]))
            # If the order within every round is the same, rounds and trend cannot be estimated together.
            if both.rank > self._covariates(self._rounds).rank and both.df >= _MIN_DF_WITH_BLOCKS:
                # Rounds are blocks if they explain more than chance would.
                removed_with_blocks, residuals_with_blocks = both.explain(self._within_rows)
                before, after = (float((each[counted] ** 2).sum()) for each in (residuals, residuals_with_blocks))
                spent = trend.df - both.df
                # F test: ((before − after) / spent) / (after / df), multiplied out because ``after`` may be 0.
                if (before - after) * both.df > fdtri(spent, both.df, 1 - _TEST_LEVEL) * spent * after:
                    self._used, removed, residuals = both, removed_with_blocks, residuals_with_blocks
        squares, own_df = self._row_means(residuals**2) * self._counts, self._counts - 1
        self._adjusted = self._means - removed
        self._common_variance = float(squares[~noisy].sum() / self._used.df)
        self._variances = np.where(noisy, squares / own_df, self._common_variance)
        self._dfs = np.where(noisy, own_df, float(self._used.df))
        return squares

    def _find_noisy_rows(self, squares: Any) -> Any:
        """Return a mask of the rows that vary far more than the others; at least two rows are never marked.

        ``squares``: sums of squared residuals of a fit that treats no row as noisy.
        """
        import numpy as np
        from scipy.special import fdtri

        # The degrees of freedom belong to all rows together: each row gets a share in proportion to its runs.
        dfs = self._dfs * self._counts / self._counts.sum()
        noisy = np.zeros(len(squares), dtype=bool)
        for _ in range(len(squares) - 2):
            # -1 is below any variance, so a row already marked is not chosen again.
            noisiest = np.where(noisy, -1.0, squares / dfs).argmax()
            own, own_df = squares[noisiest], dfs[noisiest]
            rest, rest_df = squares[~noisy].sum() - own, dfs[~noisy].sum() - own_df
            limit = fdtri(own_df, rest_df, 1 - _TEST_LEVEL / len(squares))
            # Multiplied out, since the rest may be 0, or below 0 by rounding.
            if own * rest_df <= limit * own_df * max(rest, 0.0):
                break
            noisy[noisiest] = True
        return noisy

    def difference(self, row: int, other: int) -> LogDifference:
        """Return the difference between the mean logarithms of two rows."""
        # The noise in the two rows' means, plus that of the estimated slopes.
        variances = [float(self._variances[each] / self._counts[each]) for each in (row, other)]
        slopes = self._common_variance * self._used.variance_factor(row, other)
        dfs = [float(self._dfs[each]) for each in (row, other)]
        return LogDifference(
            plain=float(self._means[row] - self._means[other]),
            adjusted=float(self._adjusted[row] - self._adjusted[other]),
            standard_error=math.sqrt(sum(variances) + slopes),
            # Rows that share one variance share its degrees of freedom.
            degrees_of_freedom=_satterthwaite(variances, dfs) if self._noisy[row] or self._noisy[other] else dfs[0],
        )


class _Covariates:
    """Columns that may influence a run's value besides its row, and the least-squares estimate of their slopes."""

    def __init__(self, row_means: Any, within_rows: Any, noisy: Any, counted: Any) -> None:
        """``within_rows``: deviations of the columns from ``row_means``: the levels of the rows drop out.

        ``counted``: mask of the runs that enter the estimate; runs of ``noisy`` rows do not.
        """
        import numpy as np

        self._row_means, self._within_rows = row_means, within_rows
        # Runs that do not count become zeros, which change no slope.
        left, scales, right = np.linalg.svd(within_rows * counted[:, None], full_matrices=False)
        # If a column is a combination of others, a singular value is near rounding error; with columns of range 1, an
        # absolute limit is enough.
        kept = scales > 1e-9
        self.rank = int(kept.sum())
        self._solution = (right[kept].T / scales[kept]) @ left[:, kept].T
        """Pseudo-inverse: its product with the runs' values gives the slopes."""
        # Runs minus one level per row, minus the slopes.
        self.df = int(counted.sum() - (~noisy).sum()) - self.rank

    def explain(self, within_rows: Any) -> tuple[Any, Any]:
        """Return the part of each row's mean that the columns explain, and of each run's deviation that they do not."""
        slopes = self._solution @ within_rows
        return self._row_means @ slopes, within_rows - self._within_rows @ slopes

    def variance_factor(self, row: int, other: int) -> float:
        """Variance that the estimated slopes add to the difference of two rows, in units of the noise variance."""
        import numpy as np

        return float(np.sum(((self._row_means[row] - self._row_means[other]) @ self._solution) ** 2))
