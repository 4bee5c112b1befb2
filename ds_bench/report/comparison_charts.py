"""The charts of a comparison: speed against memory, throughput, memory by category, step times, losses."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.row_difference import ledger_of_row
from ..config.caveat_texts import CPU_KINDS
from ..prediction.trial_predictions import stored_prediction
from ..recommend.remedies import predicted_bytes
from ..records.schema import OOM, OOM_DISK, OOM_HOST, SKIPPED, Tier
from ..units import BYTES_PER_GB, MISSING, format_series, to_gb, to_ms
from .chart_drawing import (
    BAR_HEIGHT,
    COLORS,
    FAINT,
    INK,
    RULE,
    WARNING,
    Chart,
    DotLabel,
    Drawing,
    format_value,
    label_bars,
    label_plane,
    printable,
)
from .table_layout import Column, make_table

if TYPE_CHECKING:
    from ..analysis.row import Run

MAX_OVERLAID_ROWS = 8
"""More lines in one chart cannot be distinguished."""
MAX_BARS, MAX_DOTS = 16, 20
CATEGORIES = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations", "other")
HATCHES = ("", "///", "||", "--", "\\\\\\", "++", "")
"""By category, so that categories differ even without color."""
MARKERS = "os^Dv*Xh"
DASHES = ("-", "--", ":", "-.")
_REST = "rest of the peak"
_TIERS: Mapping[Tier, tuple[str, str, str]] = {
    "gpu": ("Device memory", "on the fullest rank", "card"),
    "cpu": ("Host memory", "sum over the ranks of the fullest node", "host"),
    "nvme": ("NVMe", "sum over the ranks of the fullest node", "disk"),
}
"""Title, scope, and what has the capacity."""


def charts_of(comparison: Comparison, recommended: str | None = None) -> tuple[list[Chart], list[str]]:
    """Every chart that a comparison has numbers for, in reading order, and a sentence about what is missing.

    Rows that failed appear only in charts of memory, at the size they needed. ``recommended``: key of the row to mark.
    """
    rows = _Rows(comparison=comparison, recommended=recommended)
    candidates = (
        _pareto_chart(rows),
        _throughput_chart(rows),
        *(_memory_chart(rows, tier) for tier in _TIERS),
        _line_chart(
            rows,
            lambda run: list(map(to_ms, run.record.slowest_rank.all_step_seconds)) if run.record and run.ranks else [],
            name="steps",
            title="Step times",
            axis="ms per optimizer step",
            note="The slowest rank of the run nearest to the row's mean; no statistic includes warm-up steps.",
        ),
        _line_chart(
            rows,
            lambda run: run.losses,
            name="losses",
            title="Losses",
            axis="loss",
            note="Seed and data are the same in every row, so the lines should coincide.",
        ),
    )
    charts = [chart for chart in candidates if chart is not None]
    if not rows.measured:
        sentence = "only the memory that rows needed is drawn" if charts else "there is nothing to draw"
        return charts, [f"No row succeeded, so {sentence}."]
    names = {chart.name for chart in charts}
    shown = {
        "throughput": "throughput" in names,
        "memory by category": any(_has_ledger(row, tier) for row in rows.measured for tier in _TIERS),
        "individual step times": "steps" in names,
        "losses per step": "losses" in names,
    }
    missing = [what for what, is_shown in shown.items() if not is_shown]
    return charts, [f"These results do not contain {format_series(missing)}."] if missing else []


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of a comparison with their labels and styles, and which of them to draw."""

    comparison: Comparison
    recommended: str | None

    @cached_property
    def measured(self) -> list[ComparisonRow]:
        return [row for row in self.comparison.rows if row.succeeded]

    @cached_property
    def failed(self) -> list[ComparisonRow]:
        """The first rows that failed, as many as a reader can distinguish."""
        return [row for row in self.comparison.rows if not row.succeeded][:MAX_OVERLAID_ROWS]

    @cached_property
    def styles(self) -> Mapping[str, int]:
        """Row's key → number of its color and marker, for the rows that overlays draw; the same in every chart."""
        return {row.key: style for style, row in enumerate(self.to_draw(self.measured, MAX_OVERLAID_ROWS))}

    def to_draw(self, rows: Sequence[ComparisonRow], limit: int = MAX_BARS) -> list[ComparisonRow]:
        """The recommended row, the baseline and the fastest rows, ``limit`` in all, in order of appearance."""
        keys = {row.key for row in sorted(rows, key=self.importance)[:limit]}
        return [row for row in rows if row.key in keys]

    def importance(self, row: ComparisonRow) -> tuple[bool, bool, float]:
        """Sort key: the recommended row, the baseline, then the fastest."""
        return row.key != self.recommended, not row.is_baseline, -(row.tokens_per_second or 0)

    def label(self, row: ComparisonRow) -> str:
        """The row's label with a star if it is recommended, and why its numbers must not be compared with others.

        A busy CPU puts the figures in doubt; other reasons disqualify them.
        """
        star = "★ " if row.key == self.recommended else ""
        if row.differences:
            return f"{star}{row.label} (not comparable)"
        if row.succeeded and row.invalid_reason is not None:
            only_busy = all(caveat.kind in CPU_KINDS for caveat in row.caveats if caveat.kind.disqualifies)
            return f"{star}{row.label} ({'in doubt' if only_busy else 'disqualified'})"
        return f"{star}{row.label}"

    def note(self, text: str, rows: Sequence[object], drawn: Sequence[object]) -> str:
        """The text, and how many of the rows are drawn if not all are."""
        if len(drawn) >= len(rows):
            return text
        chosen = "the baseline and the fastest" if self.recommended is None else "★, the baseline and the fastest"
        return f"{text} {len(drawn)} of {len(rows)} rows are drawn: {chosen}."


# ------------------------------------------------------------------ bars


def _throughput_chart(rows: _Rows) -> Chart | None:
    measured = [row for row in rows.measured if row.tokens_per_second is not None]
    if not measured:
        return None
    drawn, unit = rows.to_draw(measured), measured[0].rate_unit
    speeds = [row.tokens_per_second or 0.0 for row in drawn]
    runs = [row.measured("rate") for row in drawn]
    labels = [(rows.label(row), format_value(speed)) for row, speed in zip(drawn, speeds, strict=True)]

    def draw(axes: Any, columns: int) -> Drawing:
        axes.barh(range(len(drawn)), speeds, height=BAR_HEIGHT, color=COLORS[0])
        for place, (row, values) in enumerate(zip(drawn, runs, strict=True)):
            if row.interval:
                low, high = row.interval
                axes.errorbar([(low + high) / 2], [place], xerr=(high - low) / 2, color=INK, capsize=4, linewidth=1.5)
            if len(values) > 1:
                shown = values[:MAX_DOTS]
                axes.plot(shown, [place] * len(shown), "o", mfc="white", mec=INK, markersize=4, zorder=4)
        end = max([*speeds, *(row.interval[1] for row in drawn if row.interval), *(max(own) for own in runs if own)])
        return Drawing(label_bars(axes, unit, [(*label, False) for label in labels], end, columns))

    note = "Bars are geometric means of runs, dots are runs, whiskers are 95 % confidence intervals (3 or more runs)."
    if any(len(values) > MAX_DOTS for values in runs):
        note += f" Only the first {MAX_DOTS} runs are drawn."
    note = rows.note(note, measured, drawn)
    return Chart(name="throughput", title="Throughput", axis=unit, values=labels, draw=draw, note=note)


class _Bar(NamedTuple):
    """A bar of one or more parts."""

    label: str
    text: str
    """The value at the right end of the row."""
    parts: Sequence[float] = ()
    """In the order of the chart's categories; empty if the row failed."""
    predicted: float | None = None
    """The total predicted before the run."""
    requested: float | None = None
    """The minimum that a row that lacked memory needed, or its predicted need."""


def _stacked_chart(
    name: str,
    title: str,
    categories: Sequence[str],
    bars: Sequence[_Bar],
    *,
    note: str,
    capacity: tuple[float, str] | None,
) -> Chart:
    """Memory in GB by category. ``capacity``: a line to draw, and its label."""

    def part(index: int) -> Callable[[_Bar], str]:
        return lambda bar: format_value(bar.parts[index]) if bar.parts else MISSING

    columns: list[Column[_Bar]] = [
        Column("Strategy", lambda bar: bar.label),
        *(Column(category, part(index)) for index, category in enumerate(categories)),
        Column("predicted", lambda bar: format_value(bar.predicted)),
        Column("peak", lambda bar: bar.text),
    ]

    def draw(axes: Any, width: int) -> Drawing:
        legend: list[tuple[Any, str]] = []
        for part, category in enumerate(categories):
            places = [place for place, bar in enumerate(bars) if bar.parts and bar.parts[part]]
            if places:
                rest = category == _REST
                drawn = axes.barh(
                    places,
                    [bars[place].parts[part] for place in places],
                    left=[sum(bars[place].parts[:part]) for place in places],
                    height=BAR_HEIGHT,
                    color="none" if rest else COLORS[part % len(COLORS)],
                    hatch=HATCHES[part % len(HATCHES)],
                    edgecolor=FAINT if rest else INK,
                    linewidth=0.6,
                )
                legend.append((drawn, category))
        requests = [(place, bar.requested) for place, bar in enumerate(bars) if bar.requested is not None]
        if requests:
            style: Any = {"color": "none", "hatch": "xxx", "edgecolor": WARNING, "linestyle": ":"}
            drawn = axes.barh(*zip(*requests, strict=True), height=BAR_HEIGHT, **style)
            legend.append((drawn, "did not fit"))
        predictions = [(bar.predicted, place) for place, bar in enumerate(bars) if bar.predicted is not None]
        if predictions:
            style = {"color": INK, "markersize": 14, "mew": 2.5, "linestyle": "none", "clip_on": False, "zorder": 4}
            (drawn,) = axes.plot(*zip(*predictions, strict=True), marker="|", **style)
            legend.append((drawn, "predicted"))
        sums = [sum(bar.parts) for bar in bars]
        end = _axis_end([*sums, *(size for size, _ in predictions)], [size for _, size in requests], capacity)
        if capacity is not None:
            inside = capacity[0] <= end
            places = list(range(len(bars))) if inside else []
            ends = [[place + side * 0.65 * BAR_HEIGHT for place in places] for side in (-1, 1)]
            line = axes.vlines([capacity[0]] * len(places), *ends, color=WARNING, linestyle="--")
            legend.append((line, capacity[1] + ("" if inside else " (beyond the axis →)")))
        labels = [(bar.label, bar.text, not bar.parts) for bar in bars]
        return Drawing(label_bars(axes, "GB", labels, end, width), legend)

    return Chart(
        name=name,
        title=title,
        axis="GB",
        values=[(bar.label, bar.text) for bar in bars],
        draw=draw,
        note=note,
        table=make_table(columns, bars),
    )


def _axis_end(drawn: Iterable[float], requests: Sequence[float], capacity: tuple[float, str] | None) -> float:
    """The axis reaches the capacity if the drawn values stay readable or a row did not fit.

    Requests extend it to at most twice the rest.
    """
    end = max(drawn, default=0.0)
    if capacity is not None and (requests or end >= 0.4 * capacity[0]):
        end = max(end, capacity[0])
    return max(end, min(max(requests, default=0.0), 2 * end or float("inf")))


def _memory_chart(rows: _Rows, tier: Tier) -> Chart | None:
    """Memory of one tier by category, with the measured peak; only the peak for rows without a ledger.

    None if no row used the tier and none ran out of it.
    """
    drawn = rows.to_draw(rows.measured)
    keys = {row.key for row in (*drawn, *rows.failed)}
    by_category = any(_has_ledger(row, tier) for row in drawn)
    candidates = (_memory_bar(row, tier, rows, by_category) for row in rows.comparison.rows if row.key in keys)
    bars = [bar for bar in candidates if bar is not None]
    if not any(bar.parts or bar.requested is not None for bar in bars):
        return None
    title, scope, _ = _TIERS[tier]
    categories, note = ["measured peak"], f"Measured peak, {scope}"
    if by_category:
        title = f"{title} by category"
        categories = [*(name.replace("_", " ").replace("deepspeed", "DeepSpeed") for name in CATEGORIES), _REST]
        note = f"Bytes by category, {scope}. Each category is at its own maximum, so a bar may exceed the measured peak"
        note += ". The rest of the peak is outside the tensors that were found" if tier != "nvme" else ""
    if by_category and tier != "nvme":
        note += ". The figure on the right is the measured peak"
    if any(not bar.parts for bar in bars):
        note += ". Hatched: rows that ran out of memory or were skipped for lack of it, at the minimum that they "
        note += "needed or were predicted to need"
    return _stacked_chart(
        f"ledger-{tier}",
        title,
        categories,
        bars,
        note=rows.note(f"{note}.", rows.measured, drawn),
        capacity=_capacity_line(rows.comparison, tier),
    )


def _has_ledger(row: ComparisonRow, tier: Tier) -> bool:
    return bool((ledger_of_row(row, tier) or Counter[str]()).total())


def _memory_bar(row: ComparisonRow, tier: Tier, rows: _Rows, by_category: bool) -> _Bar | None:
    """The bytes of the run with the most; None if the row has none in this tier, or failed for another reason."""
    label = rows.label(row)
    if not row.succeeded:
        request = _request(row, tier, rows.comparison)
        return None if request is None else _Bar(label, request[1], requested=request[0])
    ledger = ledger_of_row(row, tier) or Counter[str]()
    stored = max(row.measured("nvme_stored_gb"), default=0) * BYTES_PER_GB or None
    peak = {"gpu": row.gpu_peak_bytes, "cpu": row.host_peak_bytes, "nvme": stored}[tier]
    total = sum(ledger[category] for category in CATEGORIES)
    if not total and not peak:
        return None
    # Categories, each at its own maximum, may exceed the peak; the rest is then zero.
    parts = [*(ledger[category] for category in CATEGORIES), max(0, (peak or 0) - total)]
    run, predicted = row.successes[0], None
    prediction = stored_prediction(run.trial)
    # On the CPU accelerator untouched pages are not resident (``prediction.trial_predictions``): nothing is comparable.
    if prediction is not None and prediction.unknown is None and (tier, run.row.accelerator) != ("cpu", "cpu"):
        predicted = predicted_bytes(run.trial, tier)
        if predicted is not None and tier == "gpu":
            # The measured peak is torch's allocator's; what is assumed outside it does not count.
            predicted -= prediction.gpu.get("overhead", 0)
    shown = [size / BYTES_PER_GB for size in (parts if by_category else parts[-1:])]
    return _Bar(label, format_value(to_gb(peak or total)), shown, predicted=to_gb(predicted))


def _capacity_bytes(comparison: Comparison, tier: Tier) -> int | None:
    return {"gpu": comparison.device_capacity_bytes, "cpu": comparison.host_capacity_bytes}.get(tier)


def _capacity_line(comparison: Comparison, tier: Tier) -> tuple[float, str] | None:
    """Capacity of a tier in GB and the label of its line; None for NVMe and if unknown."""
    capacity = to_gb(_capacity_bytes(comparison, tier))
    return None if capacity is None else (capacity, f"{_TIERS[tier][2]} {format_value(capacity)} GB")


def _request(row: ComparisonRow, tier: Tier, comparison: Comparison) -> tuple[float | None, str] | None:
    """The minimum GB that a failed or skipped row needed or was predicted to need, with a label; None if it had room.

    The bytes in use when an allocation failed plus that allocation, else the prediction; None GB if neither is known.
    """
    run, capacity = row.runs[0], _capacity_bytes(comparison, tier)
    outcome, predicted = run.outcome, predicted_bytes(run.trial, tier)
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


# ------------------------------------------------------------------ speed against memory


def _pareto_chart(rows: _Rows) -> Chart | None:
    """Throughput against peak GPU memory, or host memory on CPU ranks; a line joins the front.

    None without a front or a second row.
    """
    comparison = rows.comparison
    tier: Tier = "gpu" if any(row.gpu_peak_bytes is not None for row in comparison.rows) else "cpu"
    memory, front = ("device", comparison.pareto_device) if tier == "gpu" else ("host", comparison.pareto_host)
    dots: list[tuple[ComparisonRow, float, float]] = []
    for row in sorted(rows.measured, key=rows.importance):
        peak_gb = to_gb(row.gpu_peak_bytes if tier == "gpu" else row.host_peak_bytes)
        if peak_gb is not None and row.tokens_per_second is not None:
            dots.append((row, peak_gb, row.tokens_per_second))
    if not front or len(dots) < 2:
        return None
    unit = dots[0][0].rate_unit
    requests = [(row, *(_request(row, tier, comparison) or (None, ""))) for row in rows.failed]
    failed = [(row, size, text) for row, size, text in requests if size is not None]
    capacity = _capacity_line(comparison, tier)
    note = "Up and left is better; no row beats those on the line (filled) in both."
    if any(row.differences or row.invalid_reason is not None for row, *_ in dots):
        note += " Crossed-out rows are in doubt, disqualified or not comparable and take no part."
    if any(row.key not in rows.styles for row, *_ in dots):
        note += " Rows without a label are in the table."
    if failed:
        note += (
            " Crosses on the axis: rows that ran out of memory or were skipped for lack of it, at the minimum that "
            "they needed or were predicted to need."
        )

    def draw(axes: Any, _columns: int) -> Drawing:
        end = _axis_end((x for _, x, _ in dots), [size for _, size, _ in failed], capacity)
        axes.set_xlim(0, end * 1.06 or 1)
        axes.set_ylim(0, max(y for *_, y in dots) * 1.2 or 1)
        legend, labels = [], []
        if capacity is not None and capacity[0] <= end:
            legend.append((axes.axvline(capacity[0], color=WARNING, linestyle="--"), capacity[1]))
        ends = sorted((x, y) for row, x, y in dots if row.key in front)
        axes.plot(*zip(*ends, strict=True), "--", color=FAINT, linewidth=1)
        for row, x, y in dots:
            if row.differences or row.invalid_reason is not None:
                axes.plot(x, y, "x", color=INK, markersize=12, zorder=4)
            style = rows.styles.get(row.key)
            if style is None:
                axes.plot(x, y, ".", color=FAINT, alpha=0.6)
                continue
            marker, size = ("*", 14) if row.key == rows.recommended else (MARKERS[style], 9)
            fill = COLORS[style] if row.key in front else "none"
            axes.plot(x, y, marker, mec=COLORS[style], mfc=fill, markersize=size, zorder=3)
            labels.append(DotLabel(x, y, _two_lines(rows.label(row)), INK))
        for row, needed_gb, text in failed:
            # A request beyond the axis is drawn at its end.
            place = min(needed_gb, end)
            axes.plot(place, 0, "X", color=WARNING, markersize=9, clip_on=False, zorder=4)
            labels.append(DotLabel(place, 0, f"{_two_lines(row.label)}\n{text} GB{' →' * (needed_gb > end)}", WARNING))
        label_plane(axes, f"peak {memory} memory, GB", unit)
        return Drawing(21, legend, labels)

    return Chart(
        name=f"pareto-{memory}",
        title=f"Throughput against {memory} memory",
        axis=unit,
        values=[
            *((rows.label(row), f"{format_value(y)} at {format_value(x)} GB") for row, x, y in dots),
            *((row.label, text) for row, _, text in failed),
        ],
        draw=draw,
        note=note,
    )


def _two_lines(label: str) -> str:
    return "\n".join(textwrap.wrap(printable(label), 24, max_lines=2, placeholder=" …"))


# ------------------------------------------------------------------ lines over steps


def _line_chart(
    rows: _Rows,
    values_of: Callable[[Run], Sequence[float | None]],
    *,
    name: Literal["steps", "losses"],
    title: str,
    axis: str,
    note: str,
) -> Chart | None:
    """One line for each row that has a style and a value at two steps or more; None without lines."""
    lines = []
    for row in rows.measured:
        values = values_of(row.nearest_to_mean[0])
        points = [(float(step), value) for step, value in enumerate(values, 1) if value is not None]
        if row.key in rows.styles and len(points) > 1:
            lines.append((row, points))
    if not lines:
        return None
    # Warm-up lasts until a real step is taken, so only the steps of the shortest are warm-up in every run.
    ranks = (rank for row in rows.measured for run in row.successes for rank in run.ranks)
    warmup = min((len(rank.warmup_step_seconds) for rank in ranks), default=0)

    def draw(axes: Any, _columns: int) -> Drawing:
        legend: list[tuple[Any, str]] = []
        for row, points in lines:
            style = rows.styles[row.key]
            (drawn,) = axes.plot(
                *zip(*points, strict=True),
                color=COLORS[style],
                linestyle=DASHES[style % len(DASHES)],
                linewidth=2.4 - 0.19 * style,  # later lines are thinner, so that lines that coincide are all visible
                marker=MARKERS[style],
                markevery=(style, max(1, len(points) // 7)),  # and their markers begin at different steps
                markersize=5,
            )
            legend.append((drawn, rows.label(row)))
        axes.margins(x=0.01)
        label = "warm-up"
        if name == "steps":
            # Slow warm-up steps may be beyond the axis, which shows small variations as small.
            everything = [value for _, points in lines for _, value in points]
            measured = [value for _, points in lines for step, value in points if step > warmup] or everything
            top = 1.1 * max(measured)
            axes.set_ylim(0, top or 1)
            label += f", up to {format_value(max(everything))}" if max(everything) > top else ""
        if warmup:
            first = min(points[0][0] for _, points in lines)
            shade = axes.axvspan(first, warmup + 0.5, facecolor=RULE, edgecolor="none", alpha=0.25)
            legend.append((shade, label))
        label_plane(axes, "optimizer step", axis)
        axes.xaxis.get_major_locator().set_params(integer=True)
        return Drawing(18, legend)

    ends = [(rows.label(row), f"{format_value(p[0][1])} to {format_value(p[-1][1])}") for row, p in lines]
    note = rows.note(note, rows.measured, lines)
    return Chart(name=name, title=title, axis=axis, values=ends, draw=draw, note=note)
