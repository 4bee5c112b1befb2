"""The charts of a comparison before they are drawn: values, text alternatives and tables of numbers.

``charts`` draws them, for the page and for files. Values are in the unit that the axis names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.summary import TrialSummary
from ..records.schema import RankMeasurement
from ..units import BYTES_PER_GB, MISSING, format_bytes, to_gb, to_ms

MAX_OVERLAID_ROWS = 8
"""More lines in one chart cannot be distinguished."""
MAX_BARS = 40
"""More bars in one chart cannot be read."""
MAX_POINTS = 300
"""Points per line; of more, the extremes of each section are drawn."""
MAX_ROWS_IN_ALT_TEXT = 12
"""Further rows are only in the table of numbers."""
CATEGORIES = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations", "other")
PHASES = ("forward", "backward", "step")

_TIERS = {
    "gpu": ("Device memory", "on the fullest rank"),
    "cpu": ("Host memory", "sum over the ranks of the fullest node"),
    "nvme": ("NVMe", "sum over the ranks of the fullest node"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The fields of every chart."""

    name: str
    """``throughput``: the stem of its files and part of its ids."""
    title: str
    axis: str
    """Quantity and unit: of the horizontal axis in bars and stacks, of the vertical one otherwise."""
    note: str = ""
    """How to read it, and what was left out and why."""

    @property
    def headings(self) -> tuple[str, ...]:
        """The headings of the table of numbers."""
        raise NotImplementedError

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        """The numbers drawn, one row per configuration."""
        raise NotImplementedError

    @property
    def alt_text(self) -> str:
        """The text alternative: the numbers of each row in words."""
        rows, sentences = self.table, []
        for label, *cells in rows[:MAX_ROWS_IN_ALT_TEXT]:
            pairs = zip(self.headings[1:], cells, strict=True)
            sentences.append(
                f"{label}: {', '.join(f'{heading} {cell}' for heading, cell in pairs if cell != MISSING)}."
            )
        if more := len(rows) - len(sentences):
            sentences.append(f"{more} further rows are in the table of numbers.")
        return " ".join(sentences)


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
                " to ".join(map(format_value, bar.interval)) if bar.interval else MISSING,
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
    """A measured total, to compare the stack with; None if not measured."""

    @property
    def total(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackChart(Chart):
    """Horizontal stacked bars from zero."""

    categories: tuple[str, ...]
    stacks: tuple[Stack, ...]
    capacity: float | None = None
    """Drawn as a line; None if not known or without meaning."""
    capacity_label: str = ""
    marker_label: str = ""
    """What ``Stack.marker`` is; empty if no row has one."""

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
        marker = [self.marker_label] if self.marker_label else []
        return ("Strategy", *self.categories, f"total, {self.axis}", *marker)

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        rows = []
        for stack in self.stacks:
            marker = [stack.marker] if self.marker_label else []
            rows.append((stack.label, *map(format_value, (*stack.parts, stack.total, *marker))))
        return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row's value at each step."""

    label: str
    points: tuple[tuple[float, float], ...]
    """(step, value), steps rising."""
    style: int
    """Number of its colour, dash and marker, the same in every chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart(Chart):
    """Values over steps, rows overlaid."""

    lines: tuple[Line, ...]
    warmup: int = 0
    """Steps 1 to this one are warm-up and are shaded."""
    horizontal: str = "optimizer step"
    min_span: float = 0.0
    """The axis spans at least this fraction of its highest value, so that small variations look small."""

    @property
    def limits(self) -> tuple[float, float]:
        """Ends of the vertical axis: all measured steps, and warm-up if it is not far beyond them."""
        values = [value for line in self.lines for _, value in line.points]
        measured = [value for line in self.lines for step, value in line.points if step > self.warmup] or values
        low, high = min(measured), max(measured)
        span = max(high - low, self.min_span * high, 1e-9 * abs(high), 1e-12)
        if min(values) >= low - 2 * span and max(values) <= high + 2 * span:
            low, high = min(values), max(values)
        extra = (max(high - low, span) - (high - low)) / 2 + 0.05 * span
        return (max(0.0, low - extra) if low >= 0 else low - extra), high + extra

    @property
    def cut_off(self) -> str:
        """How far warm-up is beyond the axis: ``up to 120.3``; empty if it is not."""
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
    """As in ``Line``; None for a row that is not in the legend."""
    excluded: bool = False
    """Disqualified or not comparable: shown, but not compared with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterChart(Chart):
    """Throughput against memory; a line joins the front."""

    horizontal: str
    """Quantity and unit of the horizontal axis."""
    dots: tuple[Dot, ...]
    capacity: float | None = None
    capacity_label: str = ""

    @property
    def front(self) -> tuple[Dot, ...]:
        """Sorted by memory."""
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
    """A value with about four digits: ``45,012``, ``12.30``, ``0.01230``."""
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
    rows = tuple(row for row in comparison.rows if row.succeeded)
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
    """The row's label, and why its numbers must not be compared with those of others."""
    if row.differences:
        return f"{row.label} (not comparable)"
    return row.label if row.invalid_reason is None else f"{row.label} (disqualified)"


def downsample(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> tuple[tuple[float, float], ...]:
    """At most ``limit`` points: the lowest and the highest of each section, so that no spike is lost."""
    if len(points) <= limit:
        return tuple(points)
    sections = limit // 2
    extremes: list[tuple[float, float]] = []
    for index in range(sections):
        section = points[index * len(points) // sections : (index + 1) * len(points) // sections]
        extremes += sorted({min(section, key=lambda point: point[1]), max(section, key=lambda point: point[1])})
    return tuple(extremes)


def _note(text: str, rows: Sequence[ComparisonRow], drawn: Sequence[object]) -> str:
    """The text, and how many of the rows are drawn if not all are."""
    if len(drawn) >= len(rows):
        return text
    return f"{text} {len(drawn)} of {len(rows)} rows are drawn: the baseline and the fastest."


def _run_nearest_mean(row: ComparisonRow) -> TrialSummary:
    """The run that is drawn if only one can be."""
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
        note=_note(note, measured, drawn),
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
        note=_note(note, rows, drawn),
    )


def _memory_stack(row: ComparisonRow, tier: str) -> Stack | None:
    """The bytes of the run with most of them; None if no run has a ledger."""
    runs = [run.record.ranks for run in row.successes if any(rank.ledger for rank in run.record.ranks)]
    if not runs:
        return None
    bytes_by_category = max((_tier_bytes(ranks, tier) for ranks in runs), key=Counter.total)
    return Stack(
        label=row.label,
        parts=tuple(bytes_by_category[category] / BYTES_PER_GB for category in CATEGORIES),
        marker=to_gb({"gpu": row.gpu_peak_bytes, "cpu": row.host_peak_bytes}.get(tier)),
    )


def _tier_bytes(ranks: Sequence[RankMeasurement], tier: str) -> Counter[str]:
    """Bytes by category of the fullest rank on a GPU; elsewhere of the fullest node, whose ranks share the memory."""
    totals: dict[str | int, Counter[str]] = {}
    for rank in ranks:
        totals.setdefault(rank.rank if tier == "gpu" else rank.hostname, Counter()).update(rank.ledger.get(tier, {}))
    return max(totals.values(), key=Counter.total)


def _pareto_chart(comparison: Comparison, styles: Mapping[str, int], memory: str) -> Chart | None:
    """``memory``: ``device`` or ``host``, that of the horizontal axis."""
    on_device = memory == "device"
    front = comparison.pareto_device if on_device else comparison.pareto_host
    dots = []
    for row in comparison.rows:
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
    note = "Up and left is better; no row beats those on the line (filled) in both."
    if any(dot.excluded for dot in dots):
        note += " Crossed-out rows are disqualified or not comparable and take no part."
    if any(dot.style is None for dot in dots):
        note += " Grey dots are rows that the legend has no room for."
    return ScatterChart(
        name=f"pareto-{memory}",
        title=f"Throughput against {memory} memory",
        axis="tokens/s",
        horizontal=f"peak {memory} memory, GB",
        dots=tuple(dots),
        capacity=to_gb(comparison.device_capacity_bytes if on_device else comparison.host_capacity_bytes),
        capacity_label="card" if on_device else "host",
        note=note,
    )


def _phase_chart(rows: Sequence[ComparisonRow], baseline: ComparisonRow | None) -> Chart | None:
    measured = [row for row in rows if any(rank.phase_seconds for rank in _run_nearest_mean(row).record.ranks)]
    if not measured:
        return None
    drawn, stacks = rows_to_draw(measured, baseline), []
    for row in drawn:
        ranks = _run_nearest_mean(row).record.ranks
        slowest = (max(rank.phase_seconds.get(phase, 0.0) for rank in ranks) for phase in PHASES)
        stacks.append(Stack(label=row.label, parts=tuple(to_ms(seconds) or 0.0 for seconds in slowest)))
    note = "From a separate pass with synchronisation around each phase, so the sum may exceed a step of the table."
    return StackChart(
        name="phases",
        title="Phases of a step",
        axis="ms",
        categories=PHASES,
        stacks=tuple(stacks),
        note=_note(note, measured, drawn),
    )


def _step_time_chart(rows: Sequence[ComparisonRow], styles: Mapping[str, int]) -> Chart | None:
    def step_ms(run: TrialSummary) -> list[float | None]:
        if not run.record.ranks:
            return []
        slowest = max(run.record.ranks, key=lambda rank: rank.window_seconds)
        return [to_ms(seconds) for seconds in (*slowest.warmup_step_seconds, *slowest.step_seconds)]

    note = "The slowest rank of the run nearest to the row's mean; warm-up steps are in no statistic."
    return _line_chart("steps", "Step times", "ms per optimizer step", note, rows, styles, step_ms, min_span=0.2)


def _loss_chart(rows: Sequence[ComparisonRow], styles: Mapping[str, int]) -> Chart | None:
    note = "Same seed and data in every row, so the lines should lie on each other."
    return _line_chart("losses", "Losses", "loss", note, rows, styles, lambda run: run.losses)


def _line_chart(
    name: str,
    title: str,
    axis: str,
    note: str,
    rows: Sequence[ComparisonRow],
    styles: Mapping[str, int],
    values_of: Callable[[TrialSummary], Sequence[float | None]],
    *,
    min_span: float = 0.0,
) -> Chart | None:
    """One line for each row that has a style and a value at two steps or more; None without lines."""
    lines = []
    for row in rows:
        if row.key in styles:
            values = values_of(_run_nearest_mean(row))
            points = [(float(step), value) for step, value in enumerate(values, 1) if value is not None]
            if len(points) > 1:
                lines.append(Line(label=row.label, points=downsample(points), style=styles[row.key]))
    if not lines:
        return None
    # Warm-up lasts until a real step was taken: the fewest steps of any run are warm-up in every run.
    warmups = (len(rank.warmup_step_seconds) for row in rows for run in row.successes for rank in run.record.ranks)
    return LineChart(
        name=name,
        title=title,
        axis=axis,
        lines=tuple(lines),
        warmup=min(warmups, default=0),
        min_span=min_span,
        note=_note(note, rows, lines),
    )
