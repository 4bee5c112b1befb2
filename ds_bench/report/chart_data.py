"""The charts of a comparison as values: what is drawn, in the unit that the axis names. ``charts`` draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.row_difference import ledger_of_row
from ..analysis.step_costs import PARTS, step_parts
from ..prediction.trial_predictions import stored_prediction
from ..recommend.remedies import predicted_bytes
from ..records.schema import OOM, OOM_DISK, OOM_HOST, SKIPPED, Tier, measured_values
from ..units import BYTES_PER_GB, MISSING, format_significant, to_gb, to_ms
from .table import Column, Table, make_table

if TYPE_CHECKING:
    from ..analysis.row import Run

MAX_OVERLAID_ROWS = 8
"""More lines in one chart cannot be distinguished."""
MAX_BARS = 40
MAX_POINTS = 300
"""Points per line; longer lines keep the extremes of each section."""
MAX_ROWS_IN_ALT_TEXT = 12
CATEGORIES = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations", "other")

_TIERS: Mapping[Tier, tuple[str, str]] = {
    "gpu": ("Device memory", "on the fullest rank"),
    "cpu": ("Host memory", "sum over the ranks of the fullest node"),
    "nvme": ("NVMe", "sum over the ranks of the fullest node"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The fields of every chart."""

    name: str
    """Stem of its files, such as ``throughput``."""
    title: str
    axis: str
    """Quantity and unit: of the horizontal axis in bars and stacks, of the vertical one otherwise."""
    note: str = ""
    """How to read it, and which rows are left out."""

    @property
    def values(self) -> Sequence[tuple[str, str]]:
        """Label and value of each row drawn."""
        raise NotImplementedError

    @property
    def alt_text(self) -> str:
        """The text alternative: title, axis and the value of each row."""
        drawn = [" ".join(pair) for pair in self.values]
        more = len(drawn) - MAX_ROWS_IN_ALT_TEXT
        listed = [*drawn[:MAX_ROWS_IN_ALT_TEXT], *([f"{more} more rows"] if more > 0 else [])]
        return f"{self.title}, {self.axis}: {'; '.join(listed)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row's value."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the geometric mean; None below three runs."""
    runs: tuple[float, ...] = ()
    """Mean of each successful run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart(Chart):
    """Horizontal bars from zero."""

    bars: tuple[Bar, ...]

    @property
    def values(self) -> Sequence[tuple[str, str]]:
        return [(bar.label, format_value(bar.value)) for bar in self.bars]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One row's parts, in the order of the chart's categories."""

    label: str
    parts: tuple[float, ...]
    """Empty if the row failed, so that only its request is drawn."""
    measured: float | None = None
    """A measured total to compare with the stack; None if not measured."""
    predicted: float | None = None
    """The total predicted before the run; None without a prediction."""
    requested: float | None = None
    """Lower bound of what a row that ran out of memory needed; None for other rows, and if unknown."""
    value: str = ""
    """Text at the right end of the row."""

    @property
    def largest(self) -> float:
        """The largest number drawn, apart from the request."""
        return max(sum(self.parts), self.measured or 0.0, self.predicted or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackChart(Chart):
    """Horizontal stacked bars from zero."""

    categories: tuple[str, ...]
    stacks: tuple[Stack, ...]
    value_heading: str
    """Heading of ``Stack.value`` in the table of numbers."""
    capacity: float | None = None
    """Drawn as a line; None if unknown or meaningless."""
    capacity_label: str = ""

    @property
    def values(self) -> Sequence[tuple[str, str]]:
        return [(stack.label, stack.value) for stack in self.stacks]

    @property
    def table(self) -> Table:
        """The numbers drawn, which no other table of the page has."""

        def part(index: int) -> Callable[[Stack], str]:
            return lambda stack: format_value(stack.parts[index]) if stack.parts else MISSING

        columns: list[tuple[Column, Callable[[Stack], str]]] = [
            (Column(heading="Strategy"), lambda stack: stack.label),
            *((Column(heading=category), part(index)) for index, category in enumerate(self.categories)),
            (Column(heading="predicted"), lambda stack: format_value(stack.predicted)),
            (Column(heading=self.value_heading), lambda stack: stack.value),
        ]
        return make_table(columns, self.stacks)

    @property
    def end(self) -> float:
        """Highest value of the axis.

        The axis reaches the capacity if bars stay readable or a row asked for more memory than that. Requests extend
        it to at most twice the rest.
        """
        end = max(stack.largest for stack in self.stacks)
        requests = [stack.requested for stack in self.stacks if stack.requested is not None]
        if self.capacity is not None and (requests or end >= 0.25 * self.capacity):
            end = max(end, self.capacity)
        asked = max(requests, default=0.0)
        return max(end, min(asked, 2 * end or asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row's value at each step."""

    label: str
    points: tuple[tuple[float, float], ...]
    """(step, value), steps rising."""
    style: int
    """Number of its colour and marker, the same in every chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart(Chart):
    """Values over optimizer steps, rows overlaid."""

    lines: tuple[Line, ...]
    warmup: int = 0
    """Steps 1 to this one are warm-up and are shaded."""
    min_span: float = 0.0
    """The axis spans at least this fraction of its highest value, so that small variations look small."""

    @property
    def values(self) -> Sequence[tuple[str, str]]:
        return [
            (line.label, f"{format_value(line.points[0][1])} to {format_value(line.points[-1][1])}")
            for line in self.lines
        ]

    @property
    def limits(self) -> tuple[float, float]:
        """Ends of the vertical axis: all measured steps, and warm-up if it is not far beyond them."""
        values = [value for line in self.lines for _, value in line.points]
        measured = [value for line in self.lines for step, value in line.points if step > self.warmup] or values
        low, high = min(measured), max(measured)
        # The axis needs a length even if all values are equal.
        span = max(high - low, self.min_span * high, 1e-9 * abs(high), 1e-12)
        if min(values) >= low - 2 * span and max(values) <= high + 2 * span:
            low, high = min(values), max(values)
        extra = (max(high - low, span) - (high - low)) / 2 + 0.05 * span
        return (max(0.0, low - extra) if low >= 0 else low - extra), high + extra

    @property
    def cut_off(self) -> str:
        """How far warm-up is beyond the axis, such as ``, up to 120``; empty if it is not."""
        top = max(value for line in self.lines for _, value in line.points)
        return f", up to {format_value(top)}" if top > self.limits[1] else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One row of a Pareto plot."""

    label: str
    x: float
    y: float
    """0 for a row that ran out of memory, whose ``x`` is what it asked for."""
    on_front: bool = False
    style: int | None = None
    """As in ``Line``; None for further rows, which are grey."""
    excluded: bool = False
    """Disqualified or not comparable: shown, but not compared with others."""
    recommended: bool = False
    failed: str = ""
    """How a row failed and what it asked for, ``OOM, ≥ 127``; empty for a measured row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterChart(Chart):
    """Throughput against memory; a line joins the front."""

    horizontal: str
    """Quantity and unit of the horizontal axis."""
    dots: tuple[Dot, ...]
    capacity: float | None = None
    capacity_label: str = ""

    @property
    def values(self) -> Sequence[tuple[str, str]]:
        return [(dot.label, dot.failed or f"{format_value(dot.y)} at {format_value(dot.x)} GB") for dot in self.dots]

    @property
    def front(self) -> list[Dot]:
        """Sorted by memory."""
        return sorted((dot for dot in self.dots if dot.on_front), key=lambda dot: (dot.x, dot.y))

    @property
    def end(self) -> float:
        """Highest value of the horizontal axis. Failed rows that asked for far more are drawn at its end."""
        end = max(dot.x for dot in self.dots if not dot.failed)
        asked = max((dot.x for dot in self.dots if dot.failed), default=0.0)
        if self.capacity is not None and (asked or end >= 0.5 * self.capacity):
            end = max(end, self.capacity)
        return max(end, min(asked, 1.5 * end))


def format_value(value: float | None) -> str:
    """A value with three significant digits, also for small models: ``45,000``, ``12.3``, ``0.000413``."""
    small = value is not None and 0 < abs(value) < 0.01
    return f"{value:.3g}" if small else format_significant(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """What can be drawn, and a sentence for each chart that cannot."""

    charts: tuple[Chart, ...]
    missing: tuple[str, ...]


def charts_of(comparison: Comparison, recommended: str | None = None) -> Charts:
    """Every chart that a comparison has numbers for, in reading order.

    Rows that failed appear only in charts of memory, at what they asked for. ``recommended``: key of the row to mark.
    """
    rows = _Rows(comparison=comparison, recommended=recommended)
    on_gpus = any(row.gpu_peak_bytes is not None for row in comparison.rows)
    ledgers = [_ledger_chart(rows, tier) for tier in _TIERS]
    candidates = (
        _pareto_chart(rows, "device") if on_gpus else None,
        _pareto_chart(rows, "host"),
        _throughput_chart(rows),
        *ledgers,
        _phase_chart(rows),
        _step_time_chart(rows),
        _loss_chart(rows),
    )
    charts = tuple(chart for chart in candidates if chart is not None)
    if not rows.measured:
        sentence = "only the memory that rows asked for is drawn" if charts else "there is nothing to draw"
        return Charts(charts=charts, missing=(f"No row succeeded, so {sentence}.",))
    names = {chart.name for chart in charts}
    has_ledger = any(chart is not None and len(chart.categories) > 1 for chart in ledgers)
    sentences = {
        "No row has a throughput.": "throughput" in names,
        "These results hold no memory by category.": has_ledger,
        "These results hold no series of steps.": "steps" in names,
        "These results hold no phases of a step.": "phases" in names,
        "These results hold no losses per step.": "losses" in names,
    }
    return Charts(charts=charts, missing=tuple(sentence for sentence, drawn in sentences.items() if not drawn))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of a comparison with their labels and styles, and which of them to draw."""

    comparison: Comparison
    recommended: str | None

    @cached_property
    def measured(self) -> tuple[ComparisonRow, ...]:
        return tuple(row for row in self.comparison.rows if row.succeeded)

    @cached_property
    def failed(self) -> tuple[ComparisonRow, ...]:
        """The first rows that failed, as many as a reader can distinguish."""
        return tuple(row for row in self.comparison.rows if not row.succeeded)[:MAX_OVERLAID_ROWS]

    @cached_property
    def styles(self) -> Mapping[str, int]:
        """Numbers of colour and marker, by the row's key, of the rows that overlays draw."""
        return {row.key: style for style, row in enumerate(self.to_draw(self.measured, MAX_OVERLAID_ROWS))}

    def to_draw(self, rows: Sequence[ComparisonRow], limit: int = MAX_BARS) -> list[ComparisonRow]:
        """The recommended row, the baseline and the fastest rows, ``limit`` in all, in order of appearance."""
        keys = {row.key for row in sorted(rows, key=self.importance)[:limit]}
        return [row for row in rows if row.key in keys]

    def importance(self, row: ComparisonRow) -> tuple[bool, bool, float]:
        """Sort key: the recommended row, the baseline, then the fastest."""
        return row.key != self.recommended, not self._is_baseline(row), -(row.tokens_per_second or 0)

    def _is_baseline(self, row: ComparisonRow) -> bool:
        return self.comparison.baseline is not None and row.key == self.comparison.baseline.key

    def label(self, row: ComparisonRow) -> str:
        """The row's label, with a star if it is recommended."""
        return f"★ {row.label}" if row.key == self.recommended else row.label

    def label_with_status(self, row: ComparisonRow) -> str:
        """The label, and why the row's numbers must not be compared with other rows."""
        if row.differences:
            return f"{self.label(row)} (not comparable)"
        return self.label(row) if row.invalid_reason is None else f"{self.label(row)} (disqualified)"

    def bar_label(self, row: ComparisonRow) -> str:
        return self.label_with_status(row) + (" (baseline)" if self._is_baseline(row) else "")

    def note(self, text: str, rows: Sequence[object], drawn: Sequence[object]) -> str:
        """The text, and how many of the rows are drawn if not all are."""
        if len(drawn) >= len(rows):
            return text
        chosen = "the baseline and the fastest" if self.recommended is None else "★, the baseline and the fastest"
        return f"{text} {len(drawn)} of {len(rows)} rows are drawn: {chosen}."


def downsample(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> tuple[tuple[float, float], ...]:
    """At most ``limit`` points: the lowest and the highest of each section, so that no spike is lost."""
    if len(points) <= limit:
        return tuple(points)
    sections = limit // 2
    extremes: list[tuple[float, float]] = []
    for index in range(sections):
        section = points[index * len(points) // sections : (index + 1) * len(points) // sections]
        # In the order of their steps; a set, since the lowest and the highest may be one point.
        extremes += sorted({min(section, key=lambda point: point[1]), max(section, key=lambda point: point[1])})
    return tuple(extremes)


def _throughput_chart(rows: _Rows) -> Chart | None:
    measured = [row for row in rows.measured if row.tokens_per_second is not None]
    if not measured:
        return None
    drawn = rows.to_draw(measured)
    bars = tuple(
        Bar(
            label=rows.bar_label(row),
            value=row.tokens_per_second or 0.0,
            interval=row.interval,
            runs=tuple(measured_values([run.row for run in row.successes], "throughput_tokens_per_sec")),
        )
        for row in drawn
    )
    if any(bar.interval for bar in bars):
        note = "Bars are geometric means over runs, whiskers their 95 % confidence intervals, dots the runs."
    elif any(len(bar.runs) > 1 for bar in bars):
        note = "Bars are geometric means over runs, dots the runs; an interval needs three runs (--repeats 3)."
    else:
        note = "One run each: --repeats 3 gives intervals."
    return BarChart(
        name="throughput", title="Throughput", axis="tokens/s", bars=bars, note=rows.note(note, measured, drawn)
    )


def _ledger_chart(rows: _Rows, tier: Tier) -> StackChart | None:
    """Memory of one tier by category, with the measured peak; only the peak for rows without a ledger.

    None if no row used the tier and none ran out of it.
    """
    drawn = rows.to_draw(rows.measured)
    keys = {row.key for row in (*drawn, *rows.failed)}
    candidates = (_memory_stack(row, tier, rows) for row in rows.comparison.rows if row.key in keys)
    stacks = [stack for stack in candidates if stack is not None]
    if not any(stack.parts or stack.requested is not None for stack in stacks):
        return None
    heading, scope = _TIERS[tier]
    categories = [category.replace("_", " ").replace("deepspeed", "DeepSpeed") for category in CATEGORIES]
    # Without a ledger only the last part has bytes: it is then the peak itself.
    by_category = any(any(stack.parts[:-1]) for stack in stacks)
    if by_category:
        note = f"Bytes by category, {scope}, each category at its own maximum"
        if any(stack.measured is not None for stack in stacks):
            note += ", so a stack may exceed the measured peak; the rest of the peak is in no tensor that was found"
    else:
        categories, note = [], f"Measured peak, {scope}"
        stacks = [
            Stack(label=s.label, parts=s.parts[-1:], predicted=s.predicted, requested=s.requested, value=s.value)
            for s in stacks
        ]
    if any(not stack.parts for stack in stacks):
        note += ". Hatched: lower bound for rows that ran out of memory"
    capacity, label = _capacity_gb(rows.comparison, tier)
    return StackChart(
        name=f"ledger-{tier}",
        title=f"{heading} by category" if by_category else heading,
        axis="GB",
        categories=(*categories, "rest of the peak") if by_category else ("measured peak",),
        stacks=tuple(stacks),
        value_heading="peak",
        capacity=capacity,
        capacity_label=label,
        note=rows.note(f"{note}.", rows.measured, drawn),
    )


def _capacity_bytes(comparison: Comparison, tier: Tier) -> int | None:
    return {"gpu": comparison.device_capacity_bytes, "cpu": comparison.host_capacity_bytes}.get(tier)


def _capacity_gb(comparison: Comparison, tier: Tier) -> tuple[float | None, str]:
    """Capacity of a tier and the label of its line; None for NVMe and if unknown."""
    capacity = to_gb(_capacity_bytes(comparison, tier))
    return capacity, "" if capacity is None else f"{'card' if tier == 'gpu' else 'host'} {format_value(capacity)} GB"


def _memory_stack(row: ComparisonRow, tier: Tier, rows: _Rows) -> Stack | None:
    """The bytes of the run with most of them; None if the row has none in this tier, or failed for another reason."""
    label = rows.label(row)
    if not row.succeeded:
        if (request := _request(row, tier, rows.comparison)) is None:
            return None
        return Stack(label=label, parts=(), requested=request[0], value=request[1])
    bytes_by_category = ledger_of_row(row, tier) or Counter[str]()
    stored = max((run.row.nvme_stored_gb or 0 for run in row.successes), default=0) * BYTES_PER_GB or None
    peak = {"gpu": row.gpu_peak_bytes, "cpu": row.host_peak_bytes, "nvme": stored}[tier]
    total = sum(bytes_by_category[category] for category in CATEGORIES)
    if not total and not peak:
        return None
    # Categories, each at its own maximum, may exceed the peak; the rest is then nothing.
    parts = (*(bytes_by_category[category] for category in CATEGORIES), max(0, (peak or 0) - total))
    return Stack(
        label=label,
        parts=tuple(size / BYTES_PER_GB for size in parts),
        measured=to_gb(peak),
        predicted=to_gb(_predicted_bytes(row.successes[0], tier)),
        value=format_value(to_gb(peak or total)),
    )


def _predicted_bytes(run: Run, tier: Tier) -> int | None:
    """The prediction comparable with the measured bytes of a tier; None without one.

    On a GPU it leaves out what is assumed outside torch's allocator. On the CPU accelerator it is None, because
    untouched pages are not resident (``prediction.trial_predictions``).
    """
    prediction = stored_prediction(run.trial)
    if prediction is None or prediction.unknown is not None:
        return None
    if tier == "cpu" and run.row.accelerator == "cpu":
        return None
    size = predicted_bytes(run, tier)
    return size - prediction.gpu.get("overhead", 0) if size is not None and tier == "gpu" else size


def _request(row: ComparisonRow, tier: Tier, comparison: Comparison) -> tuple[float | None, str] | None:
    """GB that a failed row needed at least, with a text; None if it did not run out of this tier's memory.

    The bytes in use when an allocation failed plus that allocation, else the prediction; None GB if neither is known.
    """
    run, capacity = row.runs[0], _capacity_bytes(comparison, tier)
    outcome, predicted = run.outcome, predicted_bytes(run, tier)
    if outcome.status == SKIPPED:
        too_much = predicted is not None and capacity is not None and predicted > capacity
        return (to_gb(predicted), f"not run, predicted {format_value(to_gb(predicted))}") if too_much else None
    if tier != {OOM: "cpu" if row.on_cpu else "gpu", OOM_HOST: "cpu", OOM_DISK: "nvme"}.get(outcome.status):
        return None
    requested, free = outcome.requested_bytes, outcome.free_bytes
    if requested is not None and free is not None and capacity is not None and free <= capacity:
        needed = to_gb(capacity - free + requested)
        return needed, f"OOM, ≥ {format_value(needed)}"
    if predicted is None:
        return None, "OOM"
    return to_gb(predicted), f"OOM, predicted {format_value(to_gb(predicted))}"


def _pareto_chart(rows: _Rows, memory: str) -> Chart | None:
    """``memory``: ``device`` or ``host``, on the horizontal axis."""
    on_device, comparison = memory == "device", rows.comparison
    front = comparison.pareto_device if on_device else comparison.pareto_host
    dots = []
    for row in sorted(rows.measured, key=rows.importance):
        peak_gb = to_gb(row.gpu_peak_bytes if on_device else row.host_peak_bytes)
        if peak_gb is not None and row.tokens_per_second is not None:
            dots.append(
                Dot(
                    label=rows.label_with_status(row),
                    x=peak_gb,
                    y=row.tokens_per_second,
                    on_front=row.key in front,
                    style=rows.styles.get(row.key),
                    excluded=bool(row.differences) or row.invalid_reason is not None,
                    recommended=row.key == rows.recommended,
                )
            )
    if not front or len(dots) < 2:
        return None
    note = "Up and left is better; no row beats those on the line (filled) in both."
    if any(dot.excluded for dot in dots):
        note += " Crossed-out rows are disqualified or not comparable and take no part."
    if any(dot.style is None for dot in dots):
        note += " Rows without a label are in the table."
    for row in rows.failed:
        needed_gb, text = _request(row, "gpu" if on_device else "cpu", comparison) or (None, "")
        if needed_gb is not None:
            dots.append(Dot(label=row.label, x=needed_gb, y=0.0, failed=text))
    if any(dot.failed for dot in dots):
        note += " Crosses on the axis: rows that ran out of memory, at a lower bound of what they needed."
    capacity, label = _capacity_gb(comparison, "gpu" if on_device else "cpu")
    return ScatterChart(
        name=f"pareto-{memory}",
        title=f"Throughput against {memory} memory",
        axis="tokens/s",
        horizontal=f"peak {memory} memory, GB",
        dots=tuple(dots),
        capacity=capacity,
        capacity_label=label,
        note=note,
    )


def _phase_chart(rows: _Rows) -> Chart | None:
    """The parts of a step as shares of their sum."""
    # Of the run nearest to the row's mean that has any.
    parts_of_row = (
        (row, next(filter(None, (step_parts(run.ranks) for run in row.nearest_to_mean)), {})) for row in rows.measured
    )
    measured = [(row, parts) for row, parts in parts_of_row if sum(parts.values())]
    if not measured:
        return None
    names = [name for name in PARTS if any(name in parts for _, parts in measured)]
    drawn = {row.key for row in rows.to_draw([row for row, _ in measured])}
    stacks = tuple(
        Stack(
            label=rows.label(row),
            parts=tuple(100 * parts.get(name, 0.0) / sum(parts.values()) for name in names),
            value=f"{format_value(to_ms(sum(parts.values())))} ms",
        )
        for row, parts in measured
        if row.key in drawn
    )
    note = "From a separate pass with synchronisation around each phase, so the sum may exceed a step of the table."
    if "communication" in names:
        note += " Communication is timed with each operation made synchronous"
        others = any("communication" not in parts for _, parts in measured)
        note += "; in rows without it, it is in the phases." if others else "."
    if any(len(row.successes) > 1 for row, _ in measured):
        note += " The run nearest to the row's mean is shown."
    return StackChart(
        name="phases",
        title="Phases of a step",
        axis="% of the sum",
        categories=tuple(names),
        stacks=stacks,
        value_heading="sum",
        note=rows.note(note, measured, stacks),
    )


def _step_time_chart(rows: _Rows) -> Chart | None:
    def step_ms(run: Run) -> list[float | None]:
        if run.record is None or not run.ranks:
            return []
        slowest = run.record.slowest_rank
        return [to_ms(seconds) for seconds in (*slowest.warmup_step_seconds, *slowest.step_seconds)]

    note = "The slowest rank of the run nearest to the row's mean; warm-up steps are in no statistic."
    return _line_chart("steps", "Step times", "ms per optimizer step", note, rows, step_ms, min_span=0.2)


def _loss_chart(rows: _Rows) -> Chart | None:
    note = "Seed and data are the same in every row, so the lines should coincide."
    return _line_chart("losses", "Losses", "loss", note, rows, lambda run: run.losses)


def _line_chart(
    name: str,
    title: str,
    axis: str,
    note: str,
    rows: _Rows,
    values_of: Callable[[Run], Sequence[float | None]],
    *,
    min_span: float = 0.0,
) -> Chart | None:
    """One line for each row that has a style and a value at two steps or more; None without lines."""
    lines = []
    for row in rows.measured:
        if row.key in rows.styles:
            values = values_of(row.nearest_to_mean[0])
            points = [(float(step), value) for step, value in enumerate(values, 1) if value is not None]
            if len(points) > 1:
                lines.append(Line(label=rows.label(row), points=downsample(points), style=rows.styles[row.key]))
    if not lines:
        return None
    # Warm-up lasts until a real step was taken: the fewest steps of any run are warm-up in every run.
    ranks = (rank for row in rows.measured for run in row.successes for rank in run.ranks)
    return LineChart(
        name=name,
        title=title,
        axis=axis,
        lines=tuple(lines),
        warmup=min((len(rank.warmup_step_seconds) for rank in ranks), default=0),
        min_span=min_span,
        note=rows.note(note, rows.measured, lines),
    )
