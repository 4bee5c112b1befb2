"""Whether rows differ, by runs and not by steps (docs/reading.md, "How rows are told apart").

Steps inside a run share its clocks, its heat and its place in memory: they are not independent, and counting them as
samples finds differences that are not there. A run contributes one number, its mean. Nothing here knows what is
measured. Rows of one comparison are analysed together (:class:`RowRatios`), two results that share no rounds by Welch's
interval (:func:`ratio_interval`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

FEWEST_RUNS = 3
"""Runs on either side below which nothing is tested."""
ERROR_RATE = 0.05
"""Of all tables whose rows are equal, the share in which some difference is claimed at most."""
_EVIDENCE = 0.01
"""Significance level of the tests whether rounds differ, and whether one row varies more than the others."""
_FEWEST_FREEDOMS = 4
"""Degrees of freedom that must be left for rounds to be taken as blocks."""
_MOST_ROUNDS = 200
"""Rounds beyond which they are not taken as blocks: the trend alone is fitted."""
_WIDEST = 2.0
"""Ratio of its ends above which an interval on a shared processor decides nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioInterval:
    """A ratio of mean throughputs with its confidence interval."""

    ratio: float
    """Of the geometric means."""
    low: float
    high: float
    degrees_of_freedom: float
    confidence: float = 1 - ERROR_RATE
    """Of this interval alone. Among several rows it is higher, so that of all intervals together at least 95 % of
    tables show no false difference."""
    too_wide: bool = False
    """Spans so much that it decides nothing (on the CPU accelerator: more than a factor of two)."""

    @property
    def distinguishable(self) -> bool:
        """Whether the interval leaves out 1 and is not too wide to decide anything."""
        return not self.too_wide and not self.low <= 1.0 <= self.high

    @property
    def inverse(self) -> RatioInterval:
        """Of the other row to this one."""
        low, ratio, high = (1 / value if value else math.inf for value in (self.high, self.ratio, self.low))
        return replace(self, low=low, ratio=ratio, high=high)

    @property
    def on_shared_processor(self) -> RatioInterval:
        """The same, marked ``too_wide`` where it spans more than a factor of two.

        Ranks on the CPU accelerator share their processors with everything else that runs: a spread like that is of
        what else ran, and no property of the rows.
        """
        return replace(self, too_wide=self.high > _WIDEST * self.low)


def sample_std(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None below two values.

    ``statistics.stdev`` works in exact fractions, many times slower: too slow for thousands of records.
    """
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))


def geometric_mean(values: Sequence[float]) -> float | None:
    """The one estimate of a row from its per-run means, for table, ratio, lead and picture alike; None without any.

    0 where one of them is 0.
    """
    if not values:
        return None
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0


def ratio_interval(
    values: Sequence[float], baseline: Sequence[float], confidence: float = 0.95
) -> RatioInterval | None:
    """The ratio of two sets of per-run means by Welch's interval on their logs, which may spread differently.

    For results of different sessions, which share neither rounds nor a trend; of rows of one comparison
    :class:`RowRatios` knows more.
    None below three runs on either side, or where a value is not a positive finite number. Source: B. L. Welch,
    "The generalization of 'Student's' problem when several different population variances are involved",
    Biometrika 34 (1947); degrees of freedom after Satterthwaite (1946).
    """
    if not (_enough_positive_values(values) and _enough_positive_values(baseline)):
        return None
    ours, theirs = [math.log(value) for value in values], [math.log(value) for value in baseline]
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    variances = [(sample_std(logs) or 0.0) ** 2 / len(logs) for logs in (ours, theirs)]
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
    if not _enough_positive_values(values):
        return None
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    margin = student_t_quantile((1 + confidence) / 2, len(logs) - 1) * (sample_std(logs) or 0.0) / math.sqrt(len(logs))
    low, high = _exp(mean - margin), _exp(mean + margin)
    return (low, high) if math.isfinite(high) else None


def _enough_positive_values(values: Sequence[float]) -> bool:
    return len(values) >= FEWEST_RUNS and all(math.isfinite(value) and value > 0 for value in values)


def _satterthwaite(variances: Sequence[float], freedoms: Sequence[int]) -> float:
    """Degrees of freedom of a sum of estimated variances; of runs that do not vary at all, those of both together."""
    total = math.fsum(variances)
    if total == 0:
        return float(sum(freedoms))
    shares = [variance / total for variance in variances]  # of squares alone, tiny ones would vanish
    return 1 / math.fsum(share**2 / freedom for share, freedom in zip(shares, freedoms, strict=True))


# ------------------------------------------------------------------ rows of one comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run's mean and when it ran."""

    mean: float
    round: int
    place: float
    """In the order in which all runs of the comparison really ran; runs whose order is not known share a place."""


class RowRatios:
    """Ratios between the rows of one comparison, estimated from all its runs together.

    Model: the logarithm of a run's mean is the level of its row, plus a linear trend over the order in which the runs
    were started, plus noise. Where rounds differ by more than that (F test at 1 %), they are blocks. The noise is
    estimated from all rows together; a row that varies far more than the others (at 1 %) has its own estimate. An
    interval covers the ratio of geometric means with and without the trend removed, each with its margin. The error
    rates are checked by simulation under independent, autocorrelated, drifting, wandering and heavy-tailed noise
    (tests/analysis/test_intervals.py). Sources: blocks and their preliminary test after T. A. Bancroft, "Analysis and
    inference for incompletely specified models involving the use of preliminary test(s) of significance", Biometrics
    20 (1964); S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6
    (1979).
    """

    def __init__(self, rows: Mapping[str, Sequence[Run]], baseline: str | None) -> None:
        """Rows with fewer than three runs, or with a mean that is no positive finite number, take no part."""
        usable = {key: runs for key, runs in rows.items() if _enough_positive_values([run.mean for run in runs])}
        self._index = {key: number for number, key in enumerate(usable)}
        self._baseline = baseline
        self._levels: dict[str, float] = {}
        self._from_baseline: dict[str, LogDifference] = {}
        self._fit: RunFit | None = None
        if len(usable) < 2:
            return
        runs = [(number, run) for number, own in enumerate(usable.values()) for run in own]
        design = RunDesign(
            [number for number, _ in runs], [run.round for _, run in runs], [run.place for _, run in runs]
        )
        self._fit = design.fit([[math.log(run.mean) for _, run in runs]])
        if baseline in self._index:
            self._from_baseline = {key: self._difference(key, baseline) for key in usable if key != baseline}
            levels = holm_levels([found.probability for found in self._from_baseline.values()])
            self._levels = dict(zip(self._from_baseline, levels, strict=True))

    def between(self, row: str, other: str) -> RatioInterval | None:
        """Of ``row`` to ``other``; None where either takes no part.

        Of a row to the baseline at its level by Holm's method, so that the interval leaves out 1 exactly where that
        method finds a difference. Of any other two at the level of Bonferroni's for one row held against all others:
        the fastest row, say, whichever it turns out to be.
        """
        if row == other or row not in self._index or other not in self._index:
            return None
        if row == self._baseline:
            found = self.between(other, row)
            return found and found.inverse
        if other == self._baseline:
            return self._from_baseline[row].interval(self._levels[row])
        return self._difference(row, other).interval(ERROR_RATE / (len(self._index) - 1))

    def _difference(self, row: str, other: str) -> LogDifference:
        assert self._fit is not None  # two rows take part
        return self._fit.differences(self._index[row], self._index[other])[0]


@dataclass(frozen=True, slots=True)
class LogDifference:
    """Two rows' difference of mean logarithms, as it is and with the trend taken out, and what their noise is."""

    plain: float
    adjusted: float
    standard_error: float
    degrees_of_freedom: float

    @property
    def probability(self) -> float:
        """That rows which are equal differ as much in both; 1 where the two disagree in sign."""
        smaller = min(abs(self.plain), abs(self.adjusted)) if self.plain * self.adjusted > 0 else 0.0
        if self.standard_error == 0:
            return 0.0 if smaller else 1.0
        from scipy.special import stdtr

        return float(2 * stdtr(self.degrees_of_freedom, -smaller / self.standard_error))

    def interval(self, level: float) -> RatioInterval:
        """With confidence 1 − ``level``."""
        margin = student_t_quantile(1 - level / 2, self.degrees_of_freedom) * self.standard_error
        return RatioInterval(
            ratio=_exp(self.plain),
            low=_exp(min(self.plain, self.adjusted) - margin),
            high=_exp(max(self.plain, self.adjusted) + margin),
            degrees_of_freedom=self.degrees_of_freedom,
            confidence=1 - level,
        )


def holm_levels(probabilities: Sequence[float]) -> list[float]:
    """The level at which Holm's method tests each hypothesis; those that it does not reach share that of its last."""
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    levels = [0.0] * len(order)
    level = 0.0
    stopped = False
    for rank, number in enumerate(order):
        level = level if stopped else ERROR_RATE / (len(order) - rank)
        levels[number] = level
        stopped = stopped or probabilities[number] > level
    return levels


class RunDesign:
    """Which run is of which row, in which round and at which place: all that is known of runs before their figures."""

    def __init__(self, rows: Sequence[int], rounds: Sequence[int], places: Sequence[float]) -> None:
        """``rows``: numbers from 0 on without a gap."""
        import numpy as np

        self.rows = np.asarray(rows)
        self.counts = np.bincount(self.rows).astype(float)
        order = np.asarray(places, dtype=float)
        self._trend = ((order - order.mean()) / (np.ptp(order) or 1.0))[:, None]
        numbers = sorted(set(rounds))
        known = 1 < len(numbers) <= _MOST_ROUNDS
        self._rounds = np.asarray(rounds)[:, None] == np.asarray(numbers[1:])[None, :] if known else None
        self._made: dict[tuple[bool, ...], tuple[_Covariates, _Covariates | None]] = {}

    def fit(self, logs: Any) -> RunFit:
        """``logs``: of the runs' means, a line for each of several independent sets of figures."""
        return RunFit(self, logs)

    def row_means(self, values: Any) -> Any:
        """Of each row, along the last axis; ``values`` has one for each run there."""
        import numpy as np

        sums = np.zeros((*values.shape[:-1], len(self.counts)))
        index: Any = (..., self.rows)
        np.add.at(sums, index, values)
        return sums / self.counts

    def covariates(self, apart: Any) -> tuple[_Covariates, _Covariates | None]:
        """The trend alone, and with rounds as blocks where that is possible; told by the rows not ``apart``."""
        import numpy as np

        key = tuple(apart.tolist())
        if key not in self._made:
            trend, blocks = _Covariates(self, self._trend, apart), None
            if self._rounds is not None:
                alone = _Covariates(self, self._rounds.astype(float), apart)
                both = _Covariates(self, np.hstack([self._trend, self._rounds]), apart)
                # Where the order within each round is the same, rounds as blocks leave nothing to tell the trend by.
                if both.rank > alone.rank and both.freedom >= _FEWEST_FREEDOMS:
                    blocks = both
            self._made[key] = trend, blocks
        return self._made[key]


class _Covariates:
    """What besides its row a run's figure may depend on, and the least-squares solution for it."""

    def __init__(self, design: RunDesign, columns: Any, apart: Any) -> None:
        import numpy as np

        self.row_means = design.row_means(columns.T).T
        self.within = columns - self.row_means[design.rows]
        told = ~apart[design.rows]
        left, scales, right = np.linalg.svd(self.within * told[:, None], full_matrices=False)
        kept = scales > 1e-9
        self.rank = int(kept.sum())
        self.solution = (right[kept].T / scales[kept]) @ left[:, kept].T
        self.freedom = int(told.sum() - (~apart).sum()) - self.rank

    def variance_factor(self, row: int, other: int) -> float:
        """By which the noise's variance enters the difference of two rows through what is taken out of it."""
        import numpy as np

        return float(np.sum(((self.row_means[row] - self.row_means[other]) @ self.solution) ** 2))


class RunFit:
    """The least-squares fit of rows, trend and, where they differ, rounds, to each of several sets of figures."""

    def __init__(self, design: RunDesign, logs: Any) -> None:
        import numpy as np

        self._design = design
        values = np.asarray(logs, dtype=float)
        self._means = design.row_means(values)
        self._within = values - self._means[:, design.rows]
        self._adjusted, self._variances, self._freedoms = (np.zeros_like(self._means) for _ in range(3))
        self._blocked = np.zeros(len(values), dtype=bool)
        self._apart = np.zeros(self._means.shape, dtype=bool)
        self._find_noise_apart(self._solve(np.arange(len(values))))
        self._alike = []
        for apart in np.unique(self._apart, axis=0):
            sets = (self._apart == apart).all(axis=1)
            self._alike.append((sets, *design.covariates(apart)))
            if apart.any():
                self._solve(np.nonzero(sets)[0])
        self._shared = np.where(self._apart, np.inf, self._variances).min(axis=1)

    def _solve(self, sets: Any) -> Any:
        """Fills in these sets of figures, in which the same rows are apart; returns the squares of each row's noise."""
        import numpy as np
        from scipy.special import fdtri

        apart, within = self._apart[sets[0]], self._within[sets]
        trend, blocks = self._design.covariates(apart)
        told = ~apart[self._design.rows]
        slopes = within @ trend.solution.T
        taken, noise = slopes @ trend.row_means.T, within - slopes @ trend.within.T
        freedom, blocked = np.full(len(sets), float(trend.freedom)), np.zeros(len(sets), dtype=bool)
        if blocks is not None:
            slopes = within @ blocks.solution.T
            noise_within = within - slopes @ blocks.within.T
            before, after = ((each[:, told] ** 2).sum(axis=1) for each in (noise, noise_within))
            fewer = trend.freedom - blocks.freedom
            limit = fdtri(fewer, blocks.freedom, 1 - _EVIDENCE)
            blocked = (before - after) * blocks.freedom > limit * fewer * after
            taken = np.where(blocked[:, None], slopes @ blocks.row_means.T, taken)
            noise = np.where(blocked[:, None], noise_within, noise)
            freedom[blocked] = blocks.freedom
        squares = self._design.row_means(noise**2) * self._design.counts
        own = self._design.counts - 1
        shared = squares[:, ~apart].sum(axis=1) / freedom
        self._adjusted[sets] = self._means[sets] - taken
        self._variances[sets] = np.where(apart, squares / own, shared[:, None])
        self._freedoms[sets] = np.where(apart, own, freedom[:, None])
        self._blocked[sets] = blocked
        return squares

    def _find_noise_apart(self, squares: Any) -> None:
        """Finds the rows that vary far more than the others, the worst first; two rows at least stay together."""
        import numpy as np
        from scipy.special import fdtri

        counts = self._design.counts
        freedoms = self._freedoms * counts / counts.sum()
        sets, apart = np.arange(len(squares)), self._apart
        for _ in range(len(counts) - 2):
            worst = np.where(apart, -1.0, squares / freedoms).argmax(axis=1)
            own, own_freedom = squares[sets, worst], freedoms[sets, worst]
            rest = np.where(apart, 0.0, squares).sum(axis=1) - own
            rest_freedom = np.where(apart, 0.0, freedoms).sum(axis=1) - own_freedom
            limits = fdtri(own_freedom, rest_freedom, 1 - _EVIDENCE)
            found = own * rest_freedom > limits * own_freedom * np.maximum(rest, 0.0)
            if not found.any():
                break
            apart[sets[found], worst[found]] = True

    def differences(self, row: int, other: int) -> list[LogDifference]:
        """Of two rows, in each set of figures."""
        import numpy as np

        factors = np.zeros(len(self._means))
        for sets, trend, blocks in self._alike:
            factors[sets] = trend.variance_factor(row, other)
            if blocks is not None:
                factors[sets & self._blocked] = blocks.variance_factor(row, other)
        ours, theirs = (self._variances[:, each] / self._design.counts[each] for each in (row, other))
        with np.errstate(invalid="ignore", divide="ignore"):
            share = ours / (ours + theirs)
            own = 1 / (share**2 / self._freedoms[:, row] + (1 - share) ** 2 / self._freedoms[:, other])
        together = ~(self._apart[:, row] | self._apart[:, other]) | ~np.isfinite(own)
        found = (
            self._means[:, row] - self._means[:, other],
            self._adjusted[:, row] - self._adjusted[:, other],
            np.sqrt(ours + theirs + self._shared * factors),
            np.where(together, self._freedoms[:, row], own),
        )
        return list(map(LogDifference, *(values.tolist() for values in found)))


def student_t_quantile(p: float, df: float) -> float:
    """The value below which Student's t with ``df`` degrees of freedom lies with probability ``p``."""
    from scipy.special import stdtrit

    return float(stdtrit(df, p))
