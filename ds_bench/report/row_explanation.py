"""Why two rows differ: tables of what changed, and a summary of the largest changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..analysis.intervals import FEWEST_RUNS
from ..analysis.row_difference import (
    PHASES,
    REST,
    TOTAL,
    Pair,
    RowDifference,
    TierDifference,
    TimeDifference,
)
from ..prediction.trial_predictions import stored_prediction
from ..units import MISSING, format_bytes, format_rate, format_series, format_significant, to_ms
from .comparison_columns import PHASE_HEADINGS, failure_sentence, signed
from .memory_plan import category_text, gpu_range
from .table_layout import Column, Table, wrap

_SAME_FRACTION = 0.01
"""A total that changes by less than this fraction counts as unchanged; categories that change by less than this
fraction of the total are not listed."""
_WIDEST = 200
"""Maximum width of a table in characters; the list of what a setting acts on may be long."""
_WIDEST_TEXT = 80
_PHASES = {**PHASE_HEADINGS, "warm_up": "Warm-up"}
_TIERS = {"gpu": "GPU memory", "cpu": "Host memory", "nvme": "NVMe swap files"}

Cells = tuple[str, str, str, str]
"""One line of a table: what changed, its value in both rows, and the change or what it acts on."""


def explanation_tables(difference: RowDifference) -> list[Table]:
    """Return the tables of the whole explanation; those without content are left out."""
    a, b = difference.a.label, difference.b.label
    savings = []
    for saving in difference.savings:
        on_gpu = saving.gpu_bytes > 0
        saved = f"{signed(-(saving.gpu_bytes if on_gpu else saving.host_bytes))} per {'GPU' if on_gpu else 'node'}"
        if on_gpu and saving.host_bytes < 0:
            saved += f", {signed(-saving.host_bytes)} of host memory per node"
        name = "smaller buffers (--axis buffers=small_buffers)" if saving.name == "small_buffers" else saving.name
        savings.append((f"{name} on {difference.larger.label}", saved))
    notes = [f"The result does not contain {format_series(difference.unknown)}."] if difference.unknown else []
    if difference.larger.on_cpu and any(saving.name == "small_buffers" for saving in difference.savings):
        notes.append(
            "On CPU ranks DeepSpeed's buffers are barely touched: smaller ones hardly change resident memory, "
            "but a GPU would hold all of them."
        )
    sections = {
        "Memory": (_memory_rows(difference), []),
        "Time": (_time_rows(difference), []),
        "Settings": (
            _key_rows(difference),
            [f"The machines differ: {text}." for text in difference.environment_differences],
        ),
        "Predicted savings": (savings, notes),
    }
    tables = []
    for heading, (rows, notes) in sections.items():
        last = Column[Any]("acts on" if heading == "Settings" else "change", left=True)
        values = [] if heading == "Predicted savings" else [Column[Any](a), Column[Any](b)]
        columns = [Column[Any](heading), *values, last]
        tables.append(Table(columns=columns, rows=list(rows), notes=list(notes)))
    return [table for table in tables if table.rows or table.notes]


def explanation_lines(difference: RowDifference, title: str, width: int) -> Iterator[str]:
    """Format the whole explanation as text. Outside tables, lines have at most ``width`` characters, never over 80."""
    width = min(width, _WIDEST_TEXT)
    yield from wrap(f"{difference.b.label} compared with {difference.a.label} · {title}", width)
    if sentence := largest_change(difference):
        yield from wrap(sentence, width)
    for table in explanation_tables(difference):
        yield ""
        yield from (line.text for line in replace(table, notes=()).to_terminal(_WIDEST))
        for note in table.notes:
            yield from wrap(f"  * {note}", width, "     ")


def largest_change(difference: RowDifference) -> str:
    """Return sentences on failures, memory and step time, with the category or phase that changes most.

    Empty if no run failed and nothing was measured or predicted.
    """
    parts = [*filter(None, map(failure_sentence, (difference.a, difference.b)))]
    tier = difference.main
    if tier is not None:
        where = f"{'Predicted ' if tier.predicted else ''}{_tier_text(tier)} per {tier.scope.split()[-1]}"
        text = f"{where}: {format_bytes(tier.a_bytes)} → {format_bytes(tier.b_bytes)}"
        largest = tier.categories[0] if tier.categories else None
        if _is_same(tier.a_bytes, tier.b_bytes):
            text += ", about the same"
        elif largest is not None and largest.category != TOTAL:
            text += f"; largest change: {_category(largest.category, tier)} ({signed(largest.difference_bytes)})"
        parts.append(f"{text}.")
    time = difference.time
    if time is not None:
        text = _speed_text(time)
        # A phase is named only if the rows' speeds differ by more than the noise.
        if time.interval is not None and time.interval.distinguishable and time.phase_seconds:
            changes = {phase: pair.difference or 0.0 for phase, pair in time.phase_seconds.items() if phase in PHASES}
            phase = max(changes, key=lambda name: abs(changes[name]))
            if changes[phase]:
                name = "the optimizer step" if phase == "step" else phase
                text += f"; of the phases of a step, {name} changes most ({signed(changes[phase], _ms)})"
        parts.append(f"{text}.")
    return " ".join(parts)


# ------------------------------------------------------------------ memory


def _tier_text(tier: TierDifference) -> str:
    """Name a tier's memory. On CPU ranks its bytes count tensors only, unlike the resident size in the comparison."""
    counts_tensors = tier.tier == "cpu" and not tier.predicted
    counts_tensors &= {TOTAL, REST}.isdisjoint(each.category for each in tier.categories)
    return "Tensors in host memory" if counts_tensors else _TIERS[tier.tier]


def _memory_rows(difference: RowDifference) -> Iterator[Cells]:
    for tier in difference.memory:
        moment = "predicted peak" if tier.predicted else "between steps" if tier.moment == "after_step" else "peak"
        yield _size_row(f"{_tier_text(tier)}, {moment}, {tier.scope}", tier.a_bytes, tier.b_bytes)
        least = max(_SAME_FRACTION * max(tier.a_bytes, tier.b_bytes), 1)
        counted = [each for each in tier.categories if each.category != TOTAL]
        for indent, what, categories in (("  ", "", counted), ("    ", ", predicted", tier.uncounted)):
            for each in categories:
                if abs(each.difference_bytes) >= least:
                    yield _size_row(f"{indent}{_category(each.category, tier)}{what}", each.a_bytes, each.b_bytes)
    predictions = [stored_prediction(row.representative.trial) for row in (difference.a, difference.b)]
    needs = [each.gpu_need for each in predictions if each is not None and each.gpu]
    if len(needs) == 2:
        a, b = (f"{'≈ ' * (need.method == 'rule')}{gpu_range(need)} GB" for need in needs)
        yield "GPU memory needed, predicted", a, b, " → ".join(dict.fromkeys(f"peak in {need.phase}" for need in needs))
    resident = difference.resident_bytes
    if resident.a is not None and resident.b is not None:
        what = "Resident memory, peak, fullest node (shared pages count in each rank)"
        yield _size_row(what, resident.a, resident.b)
    phases = [
        _size_row(f"  {_PHASES[phase]}", pair.a or 0, pair.b or 0)
        for phase, pair in difference.phase_peaks.items()
        if abs(pair.difference or 0) > 0.05 * max(pair.a or 0, pair.b or 0)
    ]
    if phases:
        yield "Host memory by phase, fullest node (shared pages count once)", "", "", ""
        yield from phases


def _size_row(what: str, a: float, b: float) -> Cells:
    return what, format_bytes(a), format_bytes(b), "same" if _is_same(a, b) else signed(b - a)


def _is_same(a: float, b: float) -> bool:
    return abs(b - a) <= _SAME_FRACTION * max(a, b)


def _category(name: str, tier: TierDifference) -> str:
    if name == REST:
        return "rest of the peak" if tier.tier == "gpu" else "Python, libraries and the rest"
    return category_text(name, "gpu" if tier.tier == "gpu" else "host")


# ------------------------------------------------------------------ time


def _time_rows(difference: RowDifference) -> Iterator[Cells]:
    time = difference.time
    if time is None:
        return

    def milliseconds(what: str, pair: Pair) -> Cells:
        return what, _ms(pair.a), _ms(pair.b), "" if pair.difference is None else signed(pair.difference, _ms)

    def counts(what: str, pair: Pair) -> Cells:
        return what, format_rate(pair.a), format_rate(pair.b), ""

    yield milliseconds("Step", time.step_seconds)
    if time.gap_seconds.difference is not None:
        yield milliseconds("  data, logging, evaluation, saving", time.gap_seconds)
    if not time.same_tokens:
        yield counts("Tokens/s", time.tokens_per_second)
    for phase, pair in time.phase_seconds.items():
        name = "optimizer step" if phase == "step" else phase
        yield milliseconds(f"  {name}, timed separately", pair)
    for what, pair in (("read", time.nvme_read_bytes), ("written", time.nvme_written_bytes)):
        if pair.a or pair.b:
            yield _size_row(f"NVMe {what} per step", pair.a or 0, pair.b or 0)
    for what, pair in (("Skipped steps", time.skipped_steps), ("Allocator retries", time.allocator_retries)):
        if pair.a or pair.b:
            yield counts(what, pair)


def _ms(seconds: float | None) -> str:
    return f"{format_significant(to_ms(seconds))} ms"


def _speed_text(time: TimeDifference) -> str:
    """Return the ratio of the step times, or of the throughputs if steps train different numbers of tokens."""
    pair, what, meaning = time.step_seconds, "Step time", "times as long"
    interval = None if time.interval is None else time.interval.inverse
    if not time.same_tokens:
        pair, what, meaning, interval = time.tokens_per_second, "Throughput", "times as high", time.interval
    ratio = pair.b / pair.a if pair.a and pair.b is not None else None
    if time.incomparable_reasons:
        return f"{what}: not comparable ({'; '.join(time.incomparable_reasons)})"
    if interval is None:
        return f"{what}: {format_significant(ratio)} {meaning}, not tested (each row needs {FEWEST_RUNS} runs)"
    bounds = f"95 % interval {format_significant(interval.low)} to {format_significant(interval.high)}"
    if not interval.distinguishable:
        return f"{what}: statistically indistinguishable ({bounds})"
    return f"{what}: {format_significant(ratio)} {meaning} ({bounds})"


# ------------------------------------------------------------------ settings and savings


def _key_rows(difference: RowDifference) -> Iterator[Cells]:
    """The keys that are set differently, including stage and devices.

    Keys that follow from these are left out unless they act on memory that changed.
    """
    changed = {
        each.category
        for tier in difference.memory
        for each in (*tier.categories, *tier.uncounted)
        if abs(each.difference_bytes) > _SAME_FRACTION * max(tier.a_bytes, tier.b_bytes)
    }
    for key in difference.keys:
        # A key that one row switches off makes no difference if the other does not set or read it.
        if {key.a, key.b} != {None, False} and (
            not key.from_layout or key.path.endswith((".stage", ".device")) or changed.intersection(key.acts_on)
        ):
            acts_on = [
                f"{name} time"
                if name in PHASES
                else "memory while the model is built"
                if name == "build"
                else category_text(name)
                for name in key.acts_on
            ]
            path = key.path.removeprefix("zero_optimization.")
            yield path, _value(key.a), _value(key.b), ", ".join(acts_on)


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return MISSING if value is None else str(value).lower()
    # Large round numbers as DeepSpeed's documentation writes them: 5e8.
    if isinstance(value, int) and value >= 100_000 and not str(value)[1:].strip("0"):
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,}" if isinstance(value, int) else str(value)
