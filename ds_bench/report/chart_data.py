"""The charts of a comparison before they are drawn: values, text alternatives and tables of numbers.

``charts_of`` makes every chart that the results have numbers for; ``charts`` draws them, for the page and for files.
Values are in the unit that the axis names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.summary import TrialSummary
from ..records.schema import RankMeasurement
from ..units import BYTES_PER_GB, MISSING, format_bytes, to_gb, to_ms

MAX_OVERLAID_ROWS = 8
"""Lines that can still be told apart."""
MAX_BARS = 40
"""Bars that can still be read in one chart."""
MAX_POINTS = 300
"""Points per line; of more, the extremes of each stretch are drawn."""
MAX_ROWS_IN_ALT_TEXT = 12
"""A text alternative that lists more rows than this is worse than the table of numbers beside it."""
CATEGORIES = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations", "other")
PHASES = ("forward", "backward", "step")

_TIERS = {
    "gpu": ("Device memory", "on the fullest rank"),
    "cpu": ("Host memory", "sum over the ranks of the fullest node"),
    "nvme": ("NVMe", "sum over the ranks of the fullest node"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What every chart has."""

    name: str
    """Stem of its files and part of its ids: ``throughput``."""
    title: str
    axis: str
    """Quantity and unit: of the horizontal axis in bars and stacks, of the vertical one otherwise."""
    note: str = ""
    """One sentence or more on how to read it; what was left out, and why."""

    @property
    def headings(self) -> tuple[str, ...]:
        """Of the table of numbers."""
        raise NotImplementedError

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        """The numbers drawn, one row per configuration."""
        raise NotImplementedError

    @property
    def alt_text(self) -> str:
        """The text alternative: the numbers of each row in words."""
        rows = self.table
        sentences = [_sentence(self.headings, row) for row in rows[:MAX_ROWS_IN_ALT_TEXT]]
        if more := len(rows) - len(sentences):
            sentences.append(f"{more} further rows are in the table of numbers.")
        return " ".join(sentences)


def _sentence(headings: Sequence[str], row: Sequence[str]) -> str:
    cells = zip(headings[1:], row[1:], strict=True)
    return f"{row[0]}: {', '.join(f'{heading} {cell}' for heading, cell in cells if cell != MISSING)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row's value."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the geometric mean; None below three runs."""
    runs: tuple[float, ...] = ()
    """Each successful run's mean."""
    baseline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart(Chart):
    """Horizontal bars from zero."""

    bars: tuple[Bar, ...]

    @property
    def headings(self) -> tuple[str, ...]:
        return ("Strategy", self.axis, "95 % interval", "runs")

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (
                bar.label,
                format_value(bar.value),
                MISSING
                if bar.interval is None
                else f"{format_value(bar.interval[0])} to {format_value(bar.interval[1])}",
                str(len(bar.runs)),
            )
            for bar in self.bars
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One row's parts, in the order of the chart's categories."""

    label: str
    parts: tuple[float, ...]
    marker: float | None = None
    """A measured total to hold against the stack; None where there is none."""

    @property
    def total(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackChart(Chart):
    """Horizontal stacked bars from zero."""

    categories: tuple[str, ...]
    stacks: tuple[Stack, ...]
    capacity: float | None = None
    """Drawn as a line; None where unknown or meaningless."""
    capacity_label: str = ""
    marker_label: str = ""
    """What ``Stack.marker`` is; empty where no row has one."""

    @property
    def largest(self) -> float:
        """The largest number drawn, capacity aside."""
        return max(max(stack.total, stack.marker or 0.0) for stack in self.stacks)

    @property
    def capacity_is_near(self) -> bool:
        """Whether bars stay readable on an axis that reaches the capacity."""
        return self.capacity is not None and self.largest >= 0.25 * self.capacity

    @property
    def headings(self) -> tuple[str, ...]:
        marker = (self.marker_label,) if self.marker_label else ()
        return ("Strategy", *self.categories, f"total, {self.axis}", *marker)

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self._row(stack) for stack in self.stacks)

    def _row(self, stack: Stack) -> tuple[str, ...]:
        marker = (format_value(stack.marker),) if self.marker_label else ()
        return (stack.label, *map(format_value, stack.parts), format_value(stack.total), *marker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row's value at each step."""

    label: str
    points: tuple[tuple[float, float], ...]
    """(step, value), steps rising."""
    style: int
    """Which colour, dash and marker; the same row has the same in every chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart(Chart):
    """Values over steps, rows overlaid."""

    lines: tuple[Line, ...]
    warmup: int = 0
    """Steps 1 to this one are warm-up and are shaded."""
    horizontal: str = "optimizer step"
    least_span: float = 0.0
    """The axis spans at least this fraction of its top, so that small jitter looks small."""

    @property
    def limits(self) -> tuple[float, float]:
        """Of the vertical axis: the measured steps, and warm-up too where that does not flatten them."""
        values = [value for line in self.lines for _, value in line.points]
        measured = [value for line in self.lines for step, value in line.points if step > self.warmup] or values
        low, high = min(measured), max(measured)
        span = max(high - low, self.least_span * high, 1e-9 * abs(high), 1e-12)
        if min(values) >= low - 2 * span and max(values) <= high + 2 * span:
            low, high = min(values), max(values)
        extra = (max(high - low, span) - (high - low)) / 2 + 0.05 * span
        return (max(0.0, low - extra) if low >= 0 else low - extra), high + extra

    @property
    def cut_off(self) -> str:
        """How far warm-up leaves the axis; empty where it does not."""
        top = max(value for line in self.lines for _, value in line.points)
        return f"up to {format_value(top)}" if top > self.limits[1] else ""

    @property
    def headings(self) -> tuple[str, ...]:
        return ("Strategy", "first", "lowest", "highest", "last")

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        rows = []
        for line in self.lines:
            values = [value for _, value in line.points]
            rows.append((line.label, *map(format_value, (values[0], min(values), max(values), values[-1]))))
        return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One row of a Pareto plot."""

    label: str
    x: float
    y: float
    on_front: bool
    style: int | None
    """As in Line; None for a row that the legend has no room for."""
    excluded: bool = False
    """Disqualified or not comparable: shown, but held against no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterChart(Chart):
    """Throughput against memory; the front is joined."""

    horizontal: str
    """Quantity and unit of the horizontal axis."""
    dots: tuple[Dot, ...]
    capacity: float | None = None
    capacity_label: str = ""

    @property
    def front(self) -> tuple[Dot, ...]:
        """From the least memory to the most."""
        return tuple(sorted((dot for dot in self.dots if dot.on_front), key=lambda dot: (dot.x, dot.y)))

    @property
    def headings(self) -> tuple[str, ...]:
        return ("Strategy", self.horizontal, self.axis, "on the front")

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (dot.label, format_value(dot.x), format_value(dot.y), "yes" if dot.on_front else "no") for dot in self.dots
        )


def format_value(value: float | None) -> str:
    """A value in its axis' unit, about four digits: ``45,012``, ``12.30``, ``0.01230``."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """What can be drawn, and a sentence for each chart that cannot."""

    charts: tuple[Chart, ...]
    missing: tuple[str, ...]


def charts_of(comparison: Comparison) -> Charts:
    """Every chart that a comparison has numbers for, in reading order. Rows that failed are in none."""
    rows = tuple(row for row in comparison.results if row.succeeded)
    if not rows:
        return Charts(charts=(), missing=("No row succeeded, so there is nothing to draw.",))
    baseline = comparison.baseline
    styles = {row.key: style for style, row in enumerate(rows_to_draw(rows, baseline, MAX_OVERLAID_ROWS))}
    candidates = (
        _throughput_chart(rows, baseline),
        *(_ledger_chart(rows, tier, comparison) for tier in _TIERS),
        _pareto_chart(comparison, styles, "device"),
        _pareto_chart(comparison, styles, "host"),
        _step_time_chart(rows, styles),
        _phase_chart(rows, baseline),
        _loss_chart(rows, styles),
    )
    charts = tuple(chart for chart in candidates if chart is not None)
    names = {chart.name for chart in charts}
    sentences = {
        "throughput": "No throughput: no row has one.",
        "ledger-gpu ledger-cpu ledger-nvme": "No memory by category: these results hold no ledger.",
        "steps": "No step times: these results hold no series of steps.",
        "phases": "No phases: these results hold none.",
        "losses": "No losses per step: these results hold none.",
    }
    missing = tuple(sentence for wanted, sentence in sentences.items() if not names & set(wanted.split()))
    return Charts(charts=charts, missing=missing)


def rows_to_draw(
    rows: Sequence[ComparisonRow], baseline: ComparisonRow | None, limit: int = MAX_BARS
) -> list[ComparisonRow]:
    """The baseline and the fastest rows, ``limit`` in all, in order of appearance."""
    ranked = sorted(rows, key=lambda row: (baseline is None or row.key != baseline.key, -(row.tokens_per_second or 0)))
    keys = {row.key for row in ranked[:limit]}
    return [row for row in rows if row.key in keys]


def label_with_status(row: ComparisonRow) -> str:
    """The row's label, and why its numbers are not to be held against the others'."""
    if row.differences:
        return f"{row.label} (not comparable)"
    return row.label if row.invalid_reason is None else f"{row.label} (disqualified)"


def downsample(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> tuple[tuple[float, float], ...]:
    """At most ``limit`` points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return tuple(points)
    stretches = limit // 2
    extremes: list[tuple[float, float]] = []
    for index in range(stretches):
        stretch = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        extremes += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return tuple(extremes)


def _note(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def _truncation_note(rows: Sequence[ComparisonRow], drawn: Sequence[object]) -> str:
    if len(drawn) >= len(rows):
        return ""
    return f"{len(drawn)} of {len(rows)} rows are drawn: the baseline and the fastest."


def _run_nearest_mean(row: ComparisonRow) -> TrialSummary:
    """The run that stands for the row where only one can be drawn."""
    mean = row.tokens_per_second or 0.0
    return min(row.successes, key=lambda run: abs((run.tokens_per_second or 0.0) - mean))


def _throughput_chart(rows: Sequence[ComparisonRow], baseline: ComparisonRow | None) -> Chart | None:
    measured = [row for row in rows if row.tokens_per_second is not None]
    if not measured:
        return None
    drawn = rows_to_draw(measured, baseline)
    bars = tuple(
        Bar(
            label=label_with_status(row),
            value=row.tokens_per_second or 0.0,
            interval=row.interval,
            runs=tuple(run.tokens_per_second for run in row.successes if run.tokens_per_second is not None),
            baseline=baseline is not None and row.key == baseline.key,
        )
        for row in drawn
    )
    if any(bar.interval for bar in bars):
        note = "Bars are geometric means of the runs' means, whiskers their 95 % confidence intervals, dots the runs."
    elif any(len(bar.runs) > 1 for bar in bars):
        note = "Bars are geometric means of the runs' means, dots the runs; an interval needs three runs (--repeats 3)."
    else:
        note = "One run each, so there is no interval; --repeats 3 gives one."
    return BarChart(
        name="throughput",
        title="Throughput",
        axis="tokens/s",
        bars=bars,
        note=_note(note, _truncation_note(measured, drawn)),
    )


def _ledger_chart(rows: Sequence[ComparisonRow], tier: str, comparison: Comparison) -> Chart | None:
    drawn = rows_to_draw(rows, comparison.baseline)
    stacks = [stack for row in drawn if (stack := _memory_stack(row, tier)) is not None]
    if not any(stack.total for stack in stacks):
        return None
    heading, scope = _TIERS[tier]
    capacity = {"gpu": comparison.device_capacity_bytes, "cpu": comparison.host_capacity_bytes}.get(tier)
    has_peaks = any(stack.marker is not None for stack in stacks)
    note = f"Bytes by category, {scope}, each category at its own largest"
    note += (
        ", so a stack may be longer than the measured peak, or shorter by what no tensor holds." if has_peaks else "."
    )
    return StackChart(
        name=f"ledger-{tier}",
        title=f"{heading} by category",
        axis="GB",
        categories=tuple(category.replace("_", " ").replace("deepspeed", "DeepSpeed") for category in CATEGORIES),
        stacks=tuple(stacks),
        capacity=to_gb(capacity),
        capacity_label=f"{'card' if tier == 'gpu' else 'host'} {format_bytes(capacity)}" if capacity else "",
        marker_label="measured peak, GB" if has_peaks else "",
        note=_note(note, _truncation_note(rows, drawn)),
    )


def _memory_stack(row: ComparisonRow, tier: str) -> Stack | None:
    """The bytes of the run that held most; None where no run has a ledger."""
    ledgers = [
        _tier_bytes(run.record.ranks, tier) for run in row.successes if any(rank.ledger for rank in run.record.ranks)
    ]
    if not ledgers:
        return None
    largest = max(ledgers, key=lambda cells: sum(cells.values()))
    peak = {"gpu": row.gpu_peak_bytes, "cpu": row.host_peak_bytes}.get(tier)
    return Stack(
        label=row.label,
        parts=tuple(largest.get(category, 0) / BYTES_PER_GB for category in CATEGORIES),
        marker=to_gb(peak),
    )


def _tier_bytes(ranks: Sequence[RankMeasurement], tier: str) -> Mapping[str, int]:
    """On a GPU the fullest rank's cells; elsewhere those of all ranks of the fullest node, which share the memory."""
    if tier == "gpu":
        return max((rank.ledger.get(tier, {}) for rank in ranks), key=lambda cells: sum(cells.values()))
    nodes: dict[str, dict[str, int]] = {}
    for rank in ranks:
        node = nodes.setdefault(rank.hostname, {})
        for category, size in rank.ledger.get(tier, {}).items():
            node[category] = node.get(category, 0) + size
    return max(nodes.values(), key=lambda cells: sum(cells.values()))


def _pareto_chart(comparison: Comparison, styles: Mapping[str, int], place: str) -> Chart | None:
    """``place``: ``device`` or ``host``, whose memory is the horizontal axis."""
    on_device = place == "device"
    front = comparison.pareto_device if on_device else comparison.pareto_host
    dots = []
    for row in comparison.results:
        peak_gb = to_gb(row.gpu_peak_bytes if on_device else row.host_peak_bytes)
        if row.succeeded and peak_gb is not None and row.tokens_per_second is not None:
            dots.append(
                Dot(
                    label=label_with_status(row),
                    x=peak_gb,
                    y=row.tokens_per_second,
                    on_front=row.key in front,
                    style=styles.get(row.key),
                    excluded=bool(row.differences) or row.invalid_reason is not None,
                )
            )
    if not front or len(dots) < 2:
        return None
    note = _note(
        "Up and left is better; no row beats those on the line (filled) in both.",
        "Crossed-out rows are disqualified or not comparable and take no part."
        if any(d.excluded for d in dots)
        else "",
        "Grey dots are rows that the legend has no room for." if any(d.style is None for d in dots) else "",
    )
    return ScatterChart(
        name=f"pareto-{place}",
        title=f"Throughput against {place} memory",
        axis="tokens/s",
        horizontal=f"peak {place} memory, GB",
        dots=tuple(dots),
        capacity=to_gb(comparison.device_capacity_bytes if on_device else comparison.host_capacity_bytes),
        capacity_label="card" if on_device else "host",
        note=note,
    )


def _phase_chart(rows: Sequence[ComparisonRow], baseline: ComparisonRow | None) -> Chart | None:
    measured = [row for row in rows if any(rank.phase_seconds for rank in _run_nearest_mean(row).record.ranks)]
    if not measured:
        return None
    drawn = rows_to_draw(measured, baseline)
    note = "From a separate pass with synchronisation around each phase, so the sum may exceed a step of the table."
    return StackChart(
        name="phases",
        title="Phases of a step",
        axis="ms",
        categories=PHASES,
        stacks=tuple(
            Stack(label=row.label, parts=_slowest_phases_ms(_run_nearest_mean(row).record.ranks)) for row in drawn
        ),
        note=_note(note, _truncation_note(measured, drawn)),
    )


def _slowest_phases_ms(ranks: Sequence[RankMeasurement]) -> tuple[float, ...]:
    """Per phase the slowest rank's milliseconds."""
    return tuple(max(to_ms(rank.phase_seconds.get(phase, 0.0)) or 0.0 for rank in ranks) for phase in PHASES)


def _step_time_chart(rows: Sequence[ComparisonRow], styles: Mapping[str, int]) -> Chart | None:
    def step_ms(run: TrialSummary) -> list[float | None]:
        if not run.record.ranks:
            return []
        slowest = max(run.record.ranks, key=lambda rank: rank.window_seconds)
        return [to_ms(seconds) for seconds in (*slowest.warmup_step_seconds, *slowest.step_seconds)]

    lines = _lines(rows, styles, step_ms)
    if not lines:
        return None
    note = "The slowest rank of the run nearest to the row's mean; warm-up steps are in no statistic."
    return LineChart(
        name="steps",
        title="Step times",
        axis="ms per optimizer step",
        lines=lines,
        warmup=_warmup_steps(rows),
        least_span=0.2,
        note=_note(note, _truncation_note(rows, lines)),
    )


def _loss_chart(rows: Sequence[ComparisonRow], styles: Mapping[str, int]) -> Chart | None:
    lines = _lines(rows, styles, lambda run: list(run.losses))
    if not lines:
        return None
    note = "Same seed and data in every row, so the lines should lie on each other."
    return LineChart(
        name="losses",
        title="Losses",
        axis="loss",
        lines=lines,
        warmup=_warmup_steps(rows),
        note=_note(note, _truncation_note(rows, lines)),
    )


def _warmup_steps(rows: Sequence[ComparisonRow]) -> int:
    """The fewest of any run: warm-up lasts until a real step was taken, so these are warm-up in every run."""
    counts = [len(rank.warmup_step_seconds) for row in rows for run in row.successes for rank in run.record.ranks]
    return min(counts, default=0)


def _lines(
    rows: Sequence[ComparisonRow], styles: Mapping[str, int], values_of: Callable[[TrialSummary], list[float | None]]
) -> tuple[Line, ...]:
    """One line for each row that has a style and a value at two steps or more."""
    lines = []
    for row in rows:
        if row.key in styles:
            values = values_of(_run_nearest_mean(row))
            points = [(float(step), value) for step, value in enumerate(values, 1) if value is not None]
            if len(points) > 1:
                lines.append(Line(label=row.label, points=downsample(points), style=styles[row.key]))
    return tuple(lines)
