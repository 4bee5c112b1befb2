"""Confidence intervals of throughputs and their ratios (docs/reading.md, "How rows are told apart").

The sample is the run, not the step. Steps of one run share its clocks, its temperature and its place in memory, so they
are not independent; counting them as samples finds differences that do not exist. Rows of one comparison are analyzed
together (:class:`RowRatios`); rows of two results, which share no rounds, by Welch's interval
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
"""Number of runs of a row below which nothing is tested."""
ERROR_RATE = 0.05
"""Accepted fraction of tables of equal rows that show a false difference; 1 minus the confidence."""
_TABLE_LEVEL = 0.028
"""Family level in a table of three rows or more: for all comparisons with the baseline, and again for all pairs. It is
below ``ERROR_RATE`` because noise adds to it, as ``bench/false_differences.py`` shows."""
_TEST_LEVEL = 0.01
"""Significance level of the test for differing rounds, and of all tests together for a row that varies more than the
others."""
_MIN_FREEDOM_WITH_BLOCKS = 4
"""Degrees of freedom that must remain for the noise if rounds are blocks."""
_MAX_BLOCKS = 200
"""Number of rounds above which they are no blocks and only the trend is fitted."""
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
    """Of this interval by itself. It is higher with several rows, since chance makes some of many rows differ."""
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

        Ranks on the CPU accelerator share their processors with all other programs: such a spread comes from what else
        ran, not from the rows.
        """
        return replace(self, too_wide=self.high > _MAX_RATIO_ON_SHARED_PROCESSOR * self.low)


def sample_std(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None below two values.

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
    freedom = _satterthwaite(variances, [len(logs) - 1 for logs in samples])
    margin = student_t_quantile(1 - ERROR_RATE / 2, freedom) * math.sqrt(math.fsum(variances))
    ratio, low, high = (_exp(difference + shift) for shift in (0.0, -margin, margin))
    return RatioInterval(ratio=ratio, low=low, high=high, degrees_of_freedom=freedom)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the geometric mean of per-run means, from their logarithms: its ends are positive.

    None below three runs, if a value is not positive and finite, or if the upper end exceeds the largest float.
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


def _satterthwaite(variances: Sequence[float], freedoms: Sequence[int]) -> float:
    """Degrees of freedom of a sum of estimated variances: (Σ v)² / Σ (v² / f). The sum of ``freedoms`` if all are 0."""
    total = math.fsum(variances)
    if total == 0:
        return float(sum(freedoms))
    shares = [variance / total for variance in variances]  # squares of tiny variances would underflow
    return 1 / math.fsum(share**2 / freedom for share, freedom in zip(shares, freedoms, strict=True))


def student_t_quantile(p: float, df: float) -> float:
    """The value below which Student's t with ``df`` degrees of freedom lies with probability ``p``."""
    from scipy.special import stdtrit

    return float(stdtrit(df, p))


@cache
def normal_range_quantile(count: int) -> float:
    """Return the range that ``count`` independent standard normal values exceed with probability ``ERROR_RATE``.

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

    Model: the logarithm of a run's mean is the level of its row, plus a linear trend over the order of the starts, plus
    noise. If rounds differ by more than that (F test at 1 %), they are blocks. The noise variance is estimated from all
    rows together; a row that varies far more than the others (F tests at 1 % in all) has its own estimate. An interval
    covers the ratio of the geometric means, both as measured and with the trend removed, with the margin around each.
    Noise that lasts from run to run is not independent, but the shuffled order of the runs
    (``trial_planner.ordered_for_round``) still keeps false differences rare (``bench/false_differences.py``).

    Sources: blocks and their preliminary test: T. A. Bancroft, "Analysis and inference for incompletely specified
    models involving the use of preliminary test(s) of significance", Biometrics 20 (1964); several rows: S. Holm, "A
    simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979).
    """

    def __init__(self, rows: Mapping[str, Sequence[RunMean]], baseline: str | None) -> None:
        """Leave out rows with fewer than three runs or with a mean that is not positive and finite."""
        usable = {key: runs for key, runs in rows.items() if _enough_positive_values([run.mean for run in runs])}
        # Consecutive, as RunDesign needs them: rows that are left out have no index.
        self._index = {key: index for index, key in enumerate(usable)}
        self._baseline = baseline
        self._level = ERROR_RATE if len(usable) < 3 else _TABLE_LEVEL
        self._levels: dict[str, float] = {}
        self._from_baseline: dict[str, LogDifference] = {}
        # between() then never needs the fit.
        if len(usable) < 2:
            return
        indices = [self._index[key] for key, runs in usable.items() for _ in runs]
        runs = [run for row_runs in usable.values() for run in row_runs]
        design = RunDesign(indices, [run.round for run in runs], [run.position for run in runs])
        self._fit = design.fit([[math.log(run.mean) for run in runs]])
        if baseline in self._index:
            self._from_baseline = {key: self._difference(key, baseline) for key in usable if key != baseline}
            levels = holm_levels([each.probability for each in self._from_baseline.values()], self._level)
            self._levels = dict(zip(self._from_baseline, levels, strict=True))

    def between(self, row: str, other: str) -> RatioInterval | None:
        """Return the interval of the ratio of ``row`` to ``other``; None if either is left out or both are the same.

        Between a row and the baseline the level follows Holm's method, so that the interval excludes 1 exactly if that
        method finds a difference. Between two other rows it is Bonferroni's level for all pairs, so that the fastest
        row may be compared although nobody knew beforehand which one it is. The level for one row against all others
        would be too weak: the fastest row is chosen because it is ahead, so any pair may be the one compared.
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
        return self._fit.differences(self._index[row], self._index[other])[0]


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
        # All runs of each row are equal, so no difference is due to chance.
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

    The k-th smallest of n probabilities is tested at ``family_level`` / (n − k + 1). The first that exceeds its level
    ends the method; all larger ones share that level.
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


class RunDesign:
    """Row, round and position of every run: everything known of runs besides their measured values."""

    def __init__(self, rows: Sequence[int], rounds: Sequence[int], positions: Sequence[float]) -> None:
        """``rows``: for each run the index of its row; indices start at 0 and have no gaps."""
        import numpy as np

        self.rows = np.asarray(rows)
        self.run_counts = np.bincount(self.rows).astype(float)
        order = np.asarray(positions, dtype=float)
        # Scaled to a range of 1, like the columns of rounds. All positions are equal if no order is known.
        self._trend = ((order - order.mean()) / (np.ptp(order) or 1.0))[:, None]
        numbers = sorted(set(rounds))
        use_blocks = 1 < len(numbers) <= _MAX_BLOCKS
        # One column of zeros and ones for each round but the first.
        self._rounds = (np.asarray(rounds)[:, None] == np.asarray(numbers[1:])).astype(float) if use_blocks else None
        self._covariates: dict[bytes, tuple[_Covariates, _Covariates | None]] = {}

    def fit(self, logs: Any) -> RunFit:
        """Fit the model. ``logs``: logarithms of the runs' means, one line for each of several independent data sets.

        A comparison is one data set; simulations have thousands.
        """
        return RunFit(self, logs)

    def row_means(self, values: Any) -> Any:
        """Return the mean of each row. The last axis of ``values`` is the runs; that of the result is the rows."""
        import numpy as np

        sums = np.zeros((*values.shape[:-1], len(self.run_counts)))
        index: Any = (..., self.rows)
        np.add.at(sums, index, values)
        return sums / self.run_counts

    def covariates(self, noisy: Any) -> tuple[_Covariates, _Covariates | None]:
        """Return the trend by itself, and trend with rounds; None for the latter if the runs cannot estimate both.

        ``noisy``: for each row, whether it has its own noise variance; such rows do not count in the estimate.
        """
        import numpy as np

        key = noisy.tobytes()
        if key not in self._covariates:
            trend, blocks = _Covariates(self, self._trend, noisy), None
            if self._rounds is not None:
                rounds_alone = _Covariates(self, self._rounds, noisy)
                both = _Covariates(self, np.hstack([self._trend, self._rounds]), noisy)
                # If the order within every round is the same, rounds and trend cannot be estimated together.
                if both.rank > rounds_alone.rank and both.freedom >= _MIN_FREEDOM_WITH_BLOCKS:
                    blocks = both
            self._covariates[key] = trend, blocks
        return self._covariates[key]


class _Covariates:
    """Columns that may influence a run's value besides its row, and their least-squares estimate."""

    def __init__(self, design: RunDesign, columns: Any, noisy: Any) -> None:
        import numpy as np

        self.row_means = design.row_means(columns.T).T
        self.within_rows = columns - self.row_means[design.rows]
        """Deviations from the row means: the levels of the rows drop out of the estimate."""
        # Runs of noisy rows become zeros, which change no slope.
        counted = ~noisy[design.rows]
        left, scales, right = np.linalg.svd(self.within_rows * counted[:, None], full_matrices=False)
        # A column that others explain has a singular value near rounding error; with columns of range 1, an absolute
        # limit is enough.
        kept = scales > 1e-9
        self.rank = int(kept.sum())
        self.solution = (right[kept].T / scales[kept]) @ left[:, kept].T
        """Pseudo-inverse: its product with the runs' values is the slopes."""
        # Runs minus one level per row, minus the slopes.
        self.freedom = int(counted.sum() - (~noisy).sum()) - self.rank

    def variance_factor(self, row: int, other: int) -> float:
        """Variance that the estimated slopes add to the difference of two rows, in units of the noise variance."""
        import numpy as np

        return float(np.sum(((self.row_means[row] - self.row_means[other]) @ self.solution) ** 2))


class RunFit:
    """The least-squares fit of rows, trend and, if they differ, rounds to each of several data sets.

    Arrays have one line for each data set, and one column for each row or run.
    """

    def __init__(self, design: RunDesign, logs: Any) -> None:
        import numpy as np

        self._design = design
        values = np.asarray(logs, dtype=float)
        self._means = design.row_means(values)
        self._within_rows = values - self._means[:, design.rows]
        self._adjusted, self._variances, self._freedoms = (np.zeros_like(self._means) for _ in range(3))
        self._has_blocks = np.zeros(len(values), dtype=bool)
        self._noisy = np.zeros(self._means.shape, dtype=bool)
        # The residuals of a first fit, with one variance for all rows, show the noisy rows.
        self._find_noisy_rows(self._fit_sets(np.arange(len(values))))
        self._covariates = []
        # Data sets with the same noisy rows are fitted again together, without these rows in trend and variance.
        for noisy in np.unique(self._noisy, axis=0):
            sets = (self._noisy == noisy).all(axis=1)
            self._covariates.append((sets, *design.covariates(noisy)))
            if noisy.any():
                self._fit_sets(np.nonzero(sets)[0])
        # All other rows share one variance, which min() picks.
        self._common_variance = np.where(self._noisy, np.inf, self._variances).min(axis=1)

    def _fit_sets(self, sets: Any) -> Any:
        """Fit the data sets of these indices, which all have the same noisy rows.

        Return the sum of squared residuals of each row.
        """
        import numpy as np
        from scipy.special import fdtri

        noisy, within_rows = self._noisy[sets[0]], self._within_rows[sets]
        trend, blocks = self._design.covariates(noisy)
        counted = ~noisy[self._design.rows]
        # With the trend only.
        slopes = within_rows @ trend.solution.T
        removed, residuals = slopes @ trend.row_means.T, within_rows - slopes @ trend.within_rows.T
        freedom, has_blocks = np.full(len(sets), float(trend.freedom)), np.zeros(len(sets), dtype=bool)
        if blocks is not None:
            # With rounds as blocks too, kept if they explain more than chance would.
            slopes = within_rows @ blocks.solution.T
            residuals_with_blocks = within_rows - slopes @ blocks.within_rows.T
            before, after = ((each[:, counted] ** 2).sum(axis=1) for each in (residuals, residuals_with_blocks))
            spent = trend.freedom - blocks.freedom
            # F test: ((before − after) / spent) / (after / freedom), multiplied out because ``after`` may be 0.
            limit = fdtri(spent, blocks.freedom, 1 - _TEST_LEVEL)
            has_blocks = (before - after) * blocks.freedom > limit * spent * after
            removed = np.where(has_blocks[:, None], slopes @ blocks.row_means.T, removed)
            residuals = np.where(has_blocks[:, None], residuals_with_blocks, residuals)
            freedom[has_blocks] = blocks.freedom
        # Each row's variance: its own if it is noisy, else the common one.
        squares = self._design.row_means(residuals**2) * self._design.run_counts
        own_freedom = self._design.run_counts - 1
        common_variance = squares[:, ~noisy].sum(axis=1) / freedom
        self._adjusted[sets] = self._means[sets] - removed
        self._variances[sets] = np.where(noisy, squares / own_freedom, common_variance[:, None])
        self._freedoms[sets] = np.where(noisy, own_freedom, freedom[:, None])
        self._has_blocks[sets] = has_blocks
        return squares

    def _find_noisy_rows(self, squares: Any) -> None:
        """Find the rows that vary far more than the others, noisiest first; leave at least two rows.

        ``squares``: sums of squared residuals of a fit without noisy rows.
        """
        import numpy as np
        from scipy.special import fdtri

        counts = self._design.run_counts
        # The degrees of freedom belong to all rows together: each row gets a share by its number of runs.
        freedoms = self._freedoms * counts / counts.sum()
        sets, noisy = np.arange(len(squares)), self._noisy
        for _ in range(len(counts) - 2):
            # -1 is below any variance: rows that were found are not found again.
            noisiest = np.where(noisy, -1.0, squares / freedoms).argmax(axis=1)
            own, own_freedom = squares[sets, noisiest], freedoms[sets, noisiest]
            rest = np.where(noisy, 0.0, squares).sum(axis=1) - own
            rest_freedom = np.where(noisy, 0.0, freedoms).sum(axis=1) - own_freedom
            limits = fdtri(own_freedom, rest_freedom, 1 - _TEST_LEVEL / len(counts))
            # Multiplied out, since the rest may be 0, or below 0 by rounding.
            exceeds = own * rest_freedom > limits * own_freedom * np.maximum(rest, 0.0)
            if not exceeds.any():
                break
            noisy[sets[exceeds], noisiest[exceeds]] = True

    def differences(self, row: int, other: int) -> list[LogDifference]:
        """Return the difference between two rows in each data set."""
        import numpy as np

        # What the estimated slopes add to the variance of the difference.
        factors = np.zeros(len(self._means))
        for sets, trend, blocks in self._covariates:
            factors[sets] = trend.variance_factor(row, other)
            if blocks is not None:
                factors[sets & self._has_blocks] = blocks.variance_factor(row, other)
        # Plus the noise in the two rows' means.
        variance, other_variance = (self._variances[:, each] / self._design.run_counts[each] for each in (row, other))
        with np.errstate(invalid="ignore", divide="ignore"):  # Satterthwaite's formula, as in ``_satterthwaite``
            share = variance / (variance + other_variance)
            freedom = 1 / (share**2 / self._freedoms[:, row] + (1 - share) ** 2 / self._freedoms[:, other])
        # Not finite if both variances are 0: then use the fit's degrees of freedom.
        same_noise = ~(self._noisy[:, row] | self._noisy[:, other]) | ~np.isfinite(freedom)
        columns = (
            self._means[:, row] - self._means[:, other],
            self._adjusted[:, row] - self._adjusted[:, other],
            np.sqrt(variance + other_variance + self._common_variance * factors),
            np.where(same_noise, self._freedoms[:, row], freedom),
        )
        return list(map(LogDifference, *(values.tolist() for values in columns)))
