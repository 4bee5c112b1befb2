"""The charts of a comparison before they are drawn: values, text alternatives and tables of numbers.

``charts`` draws them, for the page and for files. Values are in the unit that the axis names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.row_difference import ledger_of_row
from ..analysis.step_costs import PARTS, step_parts
from ..analysis.summary import TrialSummary
from ..prediction.trial_predictions import stored_prediction
from ..recommend.shortage import predicted_bytes
from ..records.schema import OOM, OOM_DISK, OOM_HOST, SKIPPED, Tier, TrialRecord
from ..units import BYTES_PER_GB, MISSING, format_significant, to_gb, to_ms

MAX_OVERLAID_ROWS = 8
"""More lines in one chart cannot be distinguished."""
MAX_BARS = 40
"""More bars in one chart cannot be read."""
MAX_POINTS = 300
"""Points per line; of more, the extremes of each section are drawn."""
MAX_ROWS_IN_ALT_TEXT = 12
"""Further rows are only in the table of numbers."""
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
    measured: float | None = None
    """A measured total, to compare the stack with; None if not measured."""
    predicted: float | None = None
    """The total predicted before the run; None without a prediction."""
    requested: float | None = None
    """What a row that ran out of memory would have needed at least; None for other rows, and if not known."""
    value: str = ""
    """The text at the right end of the row; empty for the total."""

    @property
    def total(self) -> float:
        return sum(self.parts)

    @property
    def failed(self) -> bool:
        """Whether the row was not measured, so that only what it asked for is drawn."""
        return not self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class StackChart(Chart):
    """Horizontal stacked bars from zero."""

    categories: tuple[str, ...]
    stacks: tuple[Stack, ...]
    capacity: float | None = None
    """Drawn as a line; None if not known or without meaning."""
    capacity_label: str = ""
    value_heading: str = ""
    """What ``Stack.value`` is, as a heading of the table of numbers; empty if it is no column of its own."""

    @property
    def largest(self) -> float:
        """The largest number drawn, apart from the capacity and from what failed rows asked for."""
        return max(max(stack.total, stack.measured or 0.0, stack.predicted or 0.0) for stack in self.stacks)

    @property
    def capacity_is_drawn(self) -> bool:
        """Whether the axis reaches the capacity: bars stay readable, or a row asked for more than it."""
        asked = any(stack.requested is not None for stack in self.stacks)
        return self.capacity is not None and (asked or self.largest >= 0.25 * self.capacity)

    @property
    def end(self) -> float:
        """The highest value of the axis. What failed rows asked for reaches at most twice as far as the rest."""
        end = max(self.largest, self.capacity or 0.0) if self.capacity_is_drawn else self.largest
        asked = max((stack.requested for stack in self.stacks if stack.requested is not None), default=0.0)
        return max(end, min(asked, 2 * end or asked))

    @property
    def _extra_columns(self) -> list[tuple[str, Callable[[Stack], str]]]:
        """Headings and cells after the categories: those of which some row has a value."""
        columns: list[tuple[str, Callable[[Stack], str]]] = [
            (f"measured peak, {self.axis}", lambda stack: format_value(stack.measured)),
            (f"predicted, {self.axis}", lambda stack: format_value(stack.predicted)),
            ("out of memory", lambda stack: stack.value if stack.failed else MISSING),
        ]
        columns = [column for column in columns if any(column[1](stack) != MISSING for stack in self.stacks)]
        return [*columns, *([(self.value_heading, lambda stack: stack.value)] if self.value_heading else [])]

    @property
    def headings(self) -> tuple[str, ...]:
        return ("Strategy", *self.categories, *(heading for heading, _ in self._extra_columns))

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (
                stack.label,
                *(map(format_value, stack.parts) if stack.parts else [MISSING] * len(self.categories)),
                *(cell(stack) for _, cell in self._extra_columns),
            )
            for stack in self.stacks
        )


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
        # Above zero also where all values are equal, so that the axis has a length.
        span = max(high - low, self.min_span * high, 1e-9 * abs(high), 1e-12)
        if min(values) >= low - 2 * span and max(values) <= high + 2 * span:
            low, high = min(values), max(values)
        extra = (max(high - low, span) - (high - low)) / 2 + 0.05 * span
        # An axis of values that are not negative does not go below zero.
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
    """0 for a row that ran out of memory, whose ``x`` is what it asked for."""
    on_front: bool = False
    style: int | None = None
    """As in ``Line``; None for further rows, which are grey."""
    excluded: bool = False
    """Disqualified or not comparable: shown, but not compared with others."""
    recommended: bool = False
    failed: str = ""
    """How a row failed and what it asked for, ``OOM, ≥ 127``; empty for a row that was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterChart(Chart):
    """Throughput against memory; a line joins the front."""

    horizontal: str
    """Quantity and unit of the horizontal axis."""
    dots: tuple[Dot, ...]
    """Those whose label matters most first."""
    capacity: float | None = None
    capacity_label: str = ""

    @property
    def front(self) -> tuple[Dot, ...]:
        """Sorted by memory."""
        return tuple(sorted((dot for dot in self.dots if dot.on_front), key=lambda dot: (dot.x, dot.y)))

    @property
    def end(self) -> float:
        """The highest value of the horizontal axis. Failed rows that asked for far more stand at its end."""
        largest = max(dot.x for dot in self.dots if not dot.failed)
        asked = max((dot.x for dot in self.dots if dot.failed), default=0.0)
        near = self.capacity is not None and (asked or largest >= 0.5 * self.capacity)
        end = max(largest, self.capacity or 0.0) if near else largest
        return max(end, min(asked, 1.5 * end))

    @property
    def headings(self) -> tuple[str, ...]:
        return ("Strategy", self.horizontal, self.axis, "on the front")

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (
                dot.label,
                dot.failed or format_value(dot.x),
                MISSING if dot.failed else format_value(dot.y),
                "yes" if dot.on_front else "no",
            )
            for dot in self.dots
        )


def format_value(value: float | None) -> str:
    """A value with three significant digits, those of small models too: ``45,000``, ``12.3``, ``0.000413``."""
    small = value is not None and 0 < abs(value) < 0.01
    return f"{value:.3g}" if small else format_significant(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """What can be drawn, and a sentence for each chart that cannot."""

    charts: tuple[Chart, ...]
    missing: tuple[str, ...]


def charts_of(comparison: Comparison, recommended: str | None = None) -> Charts:
    """Every chart that a comparison has numbers for, in reading order.

    Rows that failed are only in charts of memory, at what they asked for. ``recommended``: key of the row to mark.
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
        sentence = "only what rows asked for is drawn" if charts else "there is nothing to draw"
        return Charts(charts=charts, missing=(f"No row succeeded, so {sentence}.",))
    names = {chart.name for chart in charts}
    has_ledger = any(chart is not None and "by category" in chart.title for chart in ledgers)
    sentences = {
        "No throughput: no row has one.": "throughput" in names,
        "No memory by category: these results hold no ledger.": has_ledger,
        "No step times: these results hold no series of steps.": "steps" in names,
        "No phases: these results hold none.": "phases" in names,
        "No losses per step: these results hold none.": "losses" in names,
    }
    return Charts(charts=charts, missing=tuple(sentence for sentence, drawn in sentences.items() if not drawn))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of a comparison, with their labels, their styles and the choice of those to draw."""

    comparison: Comparison
    recommended: str | None

    @cached_property
    def measured(self) -> tuple[ComparisonRow, ...]:
        return tuple(row for row in self.comparison.rows if row.succeeded)

    @cached_property
    def failed(self) -> tuple[ComparisonRow, ...]:
        """The first rows that failed, as many as can be told apart."""
        return tuple(row for row in self.comparison.rows if not row.succeeded)[:MAX_OVERLAID_ROWS]

    @cached_property
    def styles(self) -> Mapping[str, int]:
        """Numbers of colour, dash and marker, by the row's key, of the rows that overlays draw."""
        return {row.key: style for style, row in enumerate(self.to_draw(self.measured, MAX_OVERLAID_ROWS))}

    def to_draw(self, rows: Sequence[ComparisonRow], limit: int = MAX_BARS) -> list[ComparisonRow]:
        """The baseline, the recommended row and the fastest rows, ``limit`` in all, in order of appearance."""
        keys = {row.key for row in sorted(rows, key=self.importance)[:limit]}
        return [row for row in rows if row.key in keys]

    def importance(self, row: ComparisonRow) -> tuple[bool, bool, float]:
        """A key to sort rows by: the recommended row, the baseline, then the fastest."""
        return row.key != self.recommended, not self.is_baseline(row), -(row.tokens_per_second or 0)

    def is_baseline(self, row: ComparisonRow) -> bool:
        return self.comparison.baseline is not None and row.key == self.comparison.baseline.key

    def label(self, row: ComparisonRow) -> str:
        """The row's label, with a star if it is recommended."""
        return f"★ {row.label}" if row.key == self.recommended else row.label

    def label_with_status(self, row: ComparisonRow) -> str:
        """The label, and why the row's numbers must not be compared with those of others."""
        if row.differences:
            return f"{self.label(row)} (not comparable)"
        return self.label(row) if row.invalid_reason is None else f"{self.label(row)} (disqualified)"

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
            label=rows.label_with_status(row),
            value=row.tokens_per_second or 0.0,
            interval=row.interval,
            runs=tuple(run.tokens_per_second for run in row.successes if run.tokens_per_second is not None),
            baseline=rows.is_baseline(row),
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
        name="throughput", title="Throughput", axis="tokens/s", bars=bars, note=rows.note(note, measured, drawn)
    )


def _ledger_chart(rows: _Rows, tier: Tier) -> Chart | None:
    """Memory of one tier by category, beside the measured peak; the peak alone for rows without a ledger.

    None if no row took any of it, and none ran out of it.
    """
    comparison = rows.comparison
    drawn = rows.to_draw(rows.measured)
    keys = {row.key for row in (*drawn, *rows.failed)}
    candidates = (_memory_stack(row, tier, rows) for row in comparison.rows if row.key in keys)
    stacks = [stack for stack in candidates if stack is not None]
    if all(stack.failed and stack.requested is None for stack in stacks):
        return None
    heading, scope = _TIERS[tier]
    categories = tuple(category.replace("_", " ").replace("deepspeed", "DeepSpeed") for category in CATEGORIES)
    # Without a ledger only the last part, the rest of the peak, has bytes: it is then the peak itself.
    by_category = any(any(stack.parts[:-1]) for stack in stacks)
    if not by_category:
        stacks = [replace(stack, parts=stack.parts[-1:], measured=None) for stack in stacks]
        note = f"Measured peak, {scope}."
    elif any(stack.measured is not None for stack in stacks):
        note = (
            f"Bytes by category, {scope}, each category at its own largest, so a stack may be longer than the measured "
            "peak; the rest of the peak is in no tensor that was found."
        )
    else:
        note = f"Bytes by category, {scope}, each category at its own largest."
    if any(stack.failed for stack in stacks):
        note += " Hatched: at least what a row that ran out of memory would have needed."
    capacity, label = _capacity_gb(comparison, tier)
    return StackChart(
        name=f"ledger-{tier}",
        title=f"{heading} by category" if by_category else heading,
        axis="GB",
        categories=(*categories, "rest of the peak") if by_category else ("measured peak",),
        stacks=tuple(stacks),
        capacity=capacity,
        capacity_label=label,
        note=rows.note(note, rows.measured, drawn),
    )


def _capacity_bytes(comparison: Comparison, tier: Tier) -> int | None:
    return {"gpu": comparison.device_capacity_bytes, "cpu": comparison.host_capacity_bytes}.get(tier)


def _capacity_gb(comparison: Comparison, tier: Tier) -> tuple[float | None, str]:
    """How much of a tier there is, and the label of the line at it; None for NVMe and if it is not known."""
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
    stored = max((run.nvme_stored_bytes or 0 for run in row.successes), default=0) or None
    peak = {"gpu": row.gpu_peak_bytes, "cpu": row.host_peak_bytes, "nvme": stored}[tier]
    total = sum(bytes_by_category[category] for category in CATEGORIES)
    if not total and not peak:
        return None
    # Categories, each at its own largest, may exceed the peak; the rest is then nothing.
    parts = (*(bytes_by_category[category] for category in CATEGORIES), max(0, (peak or 0) - total))
    return Stack(
        label=label,
        parts=tuple(size / BYTES_PER_GB for size in parts),
        measured=to_gb(peak),
        predicted=to_gb(_predicted_bytes(row.successes[0].record, tier)),
        value=format_value(to_gb(peak or total)),
    )


def _predicted_bytes(record: TrialRecord, tier: Tier) -> int | None:
    """The prediction that the measured bytes of a tier can be held against; None if there is none.

    On a GPU without what is assumed outside torch's allocator. On the CPU accelerator there is none: pages that nobody
    touched are not resident (``prediction.trial_predictions``).
    """
    prediction = stored_prediction(record.trial)
    if prediction is None or prediction.unknown is not None:
        return None
    if tier == "cpu" and record.trial.placement.accelerator == "cpu":
        return None
    size = predicted_bytes(record, tier)
    return size - prediction.gpu.get("overhead", 0) if size is not None and tier == "gpu" else size


def _request(row: ComparisonRow, tier: Tier, comparison: Comparison) -> tuple[float | None, str] | None:
    """GB that a failed row would have needed at least, with a text; None if it did not run out of this tier's memory.

    What was in use when an allocation failed and that allocation, else the prediction; None GB if neither is known.
    """
    record, capacity = row.summaries[0].record, _capacity_bytes(comparison, tier)
    outcome, predicted = record.outcome, predicted_bytes(record, tier)
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
    """``memory``: ``device`` or ``host``, that of the horizontal axis."""
    on_device, comparison = memory == "device", rows.comparison
    front = comparison.pareto_device if on_device else comparison.pareto_host
    measured = []
    # The front first, then by importance: the last labels to be placed may find no room.
    for row in sorted(rows.measured, key=lambda row: (row.key not in front, rows.importance(row))):
        peak_gb = to_gb(row.gpu_peak_bytes if on_device else row.host_peak_bytes)
        if peak_gb is not None and row.tokens_per_second is not None:
            measured.append(
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
    # One point has nothing to be held against.
    if not front or len(measured) < 2:
        return None
    failed = []
    for row in rows.failed:
        needed_gb, text = _request(row, "gpu" if on_device else "cpu", comparison) or (None, "")
        if needed_gb is not None:
            failed.append(Dot(label=row.label, x=needed_gb, y=0.0, failed=text))
    note = "Up and left is better; no row beats those on the line (filled) in both."
    if any(dot.excluded for dot in measured):
        note += " Crossed-out rows are disqualified or not comparable and take no part."
    if any(dot.style is None for dot in measured):
        note += " Rows without a label are in the table of numbers."
    if failed:
        note += " Hatched: rows that ran out of memory, at what they would have needed at least."
    capacity, label = _capacity_gb(comparison, "gpu" if on_device else "cpu")
    return ScatterChart(
        name=f"pareto-{memory}",
        title=f"Throughput against {memory} memory",
        axis="tokens/s",
        horizontal=f"peak {memory} memory, GB",
        dots=(*sorted(measured, key=lambda dot: not dot.recommended), *failed),
        capacity=capacity,
        capacity_label=label,
        note=note,
    )


def _phase_chart(rows: _Rows) -> Chart | None:
    """The parts of a step as shares of their sum."""
    parts_of_row = ((row, _parts_of_step(row)) for row in rows.measured)
    measured = [(row, parts) for row, parts in parts_of_row if sum(parts.values())]
    if not measured:
        return None
    names = [name for name in PARTS if any(name in parts for _, parts in measured)]
    drawn = {row.key for row in rows.to_draw([row for row, _ in measured])}
    stacks = tuple(
        Stack(
            label=rows.label(row),
            parts=tuple(100 * parts.get(name, 0.0) / sum(parts.values()) for name in names),
            value=format_value(to_ms(sum(parts.values()))),
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
        note += " Of several runs the one nearest to the row's mean is shown."
    return StackChart(
        name="phases",
        title="Phases of a step",
        axis="% of the sum; at the right, the sum in ms",
        categories=tuple(names),
        stacks=stacks,
        value_heading="sum, ms",
        note=rows.note(note, measured, stacks),
    )


def _parts_of_step(row: ComparisonRow) -> dict[str, float]:
    """Seconds of each part of a step, of the run nearest to the row's mean that has any; empty if none has."""
    return next(filter(None, (step_parts(run.record) for run in row.nearest_to_mean)), {})


def _step_time_chart(rows: _Rows) -> Chart | None:
    def step_ms(run: TrialSummary) -> list[float | None]:
        if not run.record.ranks:
            return []
        slowest = run.record.slowest_rank
        return [to_ms(seconds) for seconds in (*slowest.warmup_step_seconds, *slowest.step_seconds)]

    note = "The slowest rank of the run nearest to the row's mean; warm-up steps are in no statistic."
    return _line_chart("steps", "Step times", "ms per optimizer step", note, rows, step_ms, min_span=0.2)


def _loss_chart(rows: _Rows) -> Chart | None:
    note = "Same seed and data in every row, so the lines should lie on each other."
    return _line_chart("losses", "Losses", "loss", note, rows, lambda run: run.losses)


def _line_chart(
    name: str,
    title: str,
    axis: str,
    note: str,
    rows: _Rows,
    values_of: Callable[[TrialSummary], Sequence[float | None]],
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
    ranks = (rank for row in rows.measured for run in row.successes for rank in run.record.ranks)
    return LineChart(
        name=name,
        title=title,
        axis=axis,
        lines=tuple(lines),
        warmup=min((len(rank.warmup_step_seconds) for rank in ranks), default=0),
        min_span=min_span,
        note=rows.note(note, rows.measured, lines),
    )
