"""Why two rows differ: tables of what changed, and one sentence on the largest change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..analysis.comparison import ComparisonRow
from ..analysis.intervals import FEWEST_RUNS
from ..analysis.row_difference import (
    PHASES,
    REST,
    TOTAL,
    KeyDifference,
    Pair,
    RowDifference,
    TierDifference,
    TimeDifference,
    explain,
)
from ..recommend.guide import traffic_text
from ..recommend.remedies import failed_run
from ..system.terminal import wrapped_lines
from ..units import MISSING, format_bytes, format_count, format_items, format_significant, to_ms
from .comparison_report import ComparisonReport
from .memory_plan import category_text
from .table_columns import failure_text

HEADING = "What changes between rows"
_SAME_FRACTION = 0.01
"""Changes of a total below this fraction count as none; categories that change less are not listed."""
_MOST_PAIRS = 8
_TIERS = {"gpu": "GPU memory", "cpu": "Host memory", "nvme": "NVMe swap files"}
_SAVING_TEXTS = {"small_buffers": "smaller buffers (--axis buffers=small_buffers)"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: what changed, its value in both rows, and the change or what it acts on."""

    what: str
    a: str
    b: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A table under a heading, with sentences below it."""

    heading: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()


def sections(difference: RowDifference) -> list[Section]:
    """Return the tables of the whole explanation; sections without content are left out."""
    failures = tuple(_failures(difference))
    unknown = (f"The result does not contain {', '.join(difference.unknown)}.",) if difference.unknown else ()
    environment = tuple(f"The machines differ: {text}." for text in difference.environment_differences)
    everything = [
        Section("Memory", tuple(_memory_lines(difference)), failures),
        Section("Time", *_time(difference)),
        Section("Settings", tuple(map(_key_line, _shown_keys(difference))), environment),
        Section("Predicted savings", tuple(_saving_lines(difference)), unknown),
    ]
    return [section for section in everything if section.lines or section.notes]


def explanation_lines(difference: RowDifference, title: str, width: int) -> Iterator[str]:
    """Format the whole explanation as text. Only settings may be wider than ``width`` characters."""
    a, b = difference.a.label, difference.b.label
    yield from wrapped_lines(f"{b} compared with {a} · {title}", width)
    if sentence := largest_change(difference):
        yield from wrapped_lines(sentence, width)
    everything = sections(difference)
    head = Line("", a, b)
    widths = [
        max(len(getattr(line, name)) for section in everything for line in (head, *section.lines))
        for name in ("what", "a", "b")
    ]
    for section in everything:
        yield ""
        for line in (Line(section.heading, a, b, "acts on" if section.heading == "Settings" else "change"),) * bool(
            section.lines
        ) + section.lines:
            cells = f"{line.what:<{widths[0]}}  {line.a:>{widths[1]}}  {line.b:>{widths[2]}}  {line.change}"
            yield cells.rstrip()
        for note in section.notes:
            yield from wrapped_lines(note, width)


def largest_change(difference: RowDifference) -> str:
    """Return one sentence on memory and step time: the total, and the category or phase behind most of the change.

    Empty if neither row was measured or predicted.
    """
    parts = list(_failures(difference))
    tier = difference.main
    if tier is not None:
        where = f"{'Predicted ' if tier.predicted else ''}{_TIERS[tier.tier]} per {tier.scope.split()[-1]}"
        text = f"{where}: {size_text(tier.a_bytes)} → {size_text(tier.b_bytes)}"
        largest = tier.categories[0] if tier.categories else None
        if abs(tier.difference_bytes) <= _SAME_FRACTION * max(tier.a_bytes, tier.b_bytes):
            text += ", no change"
        elif largest is not None and largest.category != TOTAL:
            text += f", mostly {_category(largest.category, tier)} ({signed_size(largest.difference_bytes)})"
        parts.append(f"{text}.")
    time = difference.time
    if time is not None:
        text = _speed_text(time)
        # A phase is named only where the step times differ beyond the noise.
        if time.interval is not None and time.interval.distinguishable and time.phase_seconds:
            changes = {phase: pair.difference or 0.0 for phase, pair in time.phase_seconds.items() if phase in PHASES}
            phase = max(changes, key=lambda name: abs(changes[name]))
            text += f"; of its phases, {phase} changes most ({to_ms(changes[phase]):+.3g} ms)"
        parts.append(f"{text}.")
    return " ".join(parts)


def report_paragraphs(report: ComparisonReport) -> list[tuple[str, str]]:
    """Return a heading and a sentence for each pair of rows that matters, at most eight.

    The recommended row is compared with the baseline and with the fastest other row; then each row with the baseline.
    Pairs that were neither measured nor predicted are left out.
    """
    rows, chosen = report.comparison.rows, report.recommended_row
    baseline = report.comparison.baseline or next(iter(rows), None)
    pairs: list[tuple[ComparisonRow, ComparisonRow]] = []
    if chosen is not None and baseline is not None:
        others = [row for row in rows if row.valid and row.key != chosen.key]
        runner_up = max(others, key=lambda row: row.tokens_per_second or 0.0, default=None)
        pairs = [(baseline, chosen), *([] if runner_up is None else [(runner_up, chosen)])]
    pairs += [(baseline, row) for row in rows if baseline is not None]
    # A pair may occur twice, in either order: keep the first.
    unique: dict[frozenset[str], tuple[ComparisonRow, ComparisonRow]] = {}
    for a, b in pairs:
        if a.key != b.key:
            unique.setdefault(frozenset((a.key, b.key)), (a, b))
    differences = [explain(a, b) for a, b in unique.values()]
    known = [each for each in differences if each.main is not None or each.time is not None]
    paragraphs = [
        (f"{each.b.label} compared with {each.a.label}", largest_change(each)) for each in known[:_MOST_PAIRS]
    ]
    if len(known) > _MOST_PAIRS:
        more = format_items(len(known) - _MOST_PAIRS, "more pair")
        paragraphs.append((more, "Run `explain A B RESULT` to compare any two rows."))
    return paragraphs


# ------------------------------------------------------------------ memory


def _failures(difference: RowDifference) -> Iterator[str]:
    for row in (difference.a, difference.b):
        run = failed_run(row)
        if run is not None:
            count = sum(not each.outcome.success for each in row.runs)
            some = f" in {count} of {len(row.runs)} runs" if row.succeeded else ""
            yield f"{row.label} did not train{some}: {failure_text(run.outcome)}."


def _memory_lines(difference: RowDifference) -> Iterator[Line]:
    for tier in difference.memory:
        moment = "predicted peak" if tier.predicted else "between steps" if tier.moment == "after_step" else "peak"
        yield _size_line(f"{_TIERS[tier.tier]}, {moment}, {tier.scope}", tier.a_bytes, tier.b_bytes)
        least = max(_SAME_FRACTION * max(tier.a_bytes, tier.b_bytes), 1)
        if tier.categories and tier.categories[0].category != TOTAL:
            for each in tier.categories:
                if abs(each.difference_bytes) >= least:
                    yield _size_line(f"  {_category(each.category, tier)}", each.a_bytes, each.b_bytes)
        for each in tier.uncounted:
            if abs(each.difference_bytes) >= least:
                yield _size_line(f"    {_category(each.category, tier)}, predicted", each.a_bytes, each.b_bytes)
    resident = difference.resident_bytes
    if resident.a is not None and resident.b is not None:
        yield _size_line("Resident memory, peak, fullest node", resident.a, resident.b)
    for phase, pair in difference.phase_peaks.items():
        if abs(pair.difference or 0) > 0.05 * max(pair.a or 0, pair.b or 0):
            yield _size_line(f"  {phase.replace('_', ' ')}", pair.a or 0, pair.b or 0)


def _size_line(what: str, a: float, b: float) -> Line:
    same = abs(b - a) <= _SAME_FRACTION * max(a, b)
    return Line(what, size_text(a), size_text(b), "same" if same else signed_size(b - a))


def _category(name: str, tier: TierDifference) -> str:
    if name == REST:
        return "rest of the peak" if tier.tier == "gpu" else "Python, libraries and the rest"
    return category_text(name, "gpu" if tier.tier == "gpu" else "host")


# ------------------------------------------------------------------ time


def _time(difference: RowDifference) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    time = difference.time
    if time is None:
        return (), ()
    lines = [_milliseconds("Step", time.step_seconds)]
    if not time.same_tokens:
        lines.append(_counts("Tokens/s", time.tokens_per_second))
    lines += [_milliseconds(f"  {phase}, timed apart", pair) for phase, pair in time.phase_seconds.items()]
    for what, pair in (
        ("NVMe read per step", time.nvme_read_bytes),
        ("NVMe written per step", time.nvme_written_bytes),
    ):
        if pair.a or pair.b:
            lines.append(_size_line(what, pair.a or 0, pair.b or 0))
    for what, pair in (("Skipped steps", time.skipped_steps), ("Allocator retries", time.allocator_retries)):
        if pair.a or pair.b:
            lines.append(_counts(what, pair))
    notes = []
    traffic = [_traffic(row) for row in (difference.a, difference.b)]
    if None not in traffic and traffic[0] != traffic[1]:
        notes.append(f"By formula, {difference.a.label}: {traffic[0]}. {difference.b.label}: {traffic[1]}.")
    return tuple(lines), tuple(notes)


def _milliseconds(what: str, pair: Pair) -> Line:
    a, b = (f"{format_significant(to_ms(each))} ms" for each in (pair.a, pair.b))
    return Line(what, a, b, "" if pair.difference is None else f"{to_ms(pair.difference):+.3g} ms")


def _counts(what: str, pair: Pair) -> Line:
    return Line(what, format_count(pair.a), format_count(pair.b))


def _speed_text(time: TimeDifference) -> str:
    """Return the ratio of the step times, or of the throughputs where steps train different numbers of tokens."""
    pair, what, meaning = time.step_seconds, "Step time", "times as long"
    interval = None if time.interval is None else time.interval.inverse
    if not time.same_tokens:
        pair, what, meaning, interval = time.tokens_per_second, "Throughput", "times as high", time.interval
    ratio = pair.b / pair.a if pair.a and pair.b is not None else None
    if time.incomparable_reasons:
        return f"{what}: not comparable ({'; '.join(time.incomparable_reasons)})"
    if interval is None:
        return f"{what}: {format_significant(ratio)} {meaning}, not tested ({FEWEST_RUNS} runs of both rows are needed)"
    bounds = f"95 % interval {format_significant(interval.low)} to {format_significant(interval.high)}"
    if not interval.distinguishable:
        return f"{what}: statistically indistinguishable ({bounds})"
    return f"{what}: {format_significant(ratio)} {meaning} ({bounds})"


def _traffic(row: ComparisonRow) -> str | None:
    """Return what a step sends between GPUs and over the link to the host; None on CPU ranks and other engines."""
    run, trial = row.representative.row, row.trial
    if trial.placement.accelerator == "cpu" or trial.configuration.engine != "deepspeed":
        return None
    if not (run.parameter_count and run.data_parallel_size):
        return None
    return traffic_text(
        trial.configuration,
        run.parameter_count,
        run.data_parallel_size,
        trial.workload.precision,
        run.grad_accum,
        run.trainable_parameter_count,
    )


# ------------------------------------------------------------------ settings and savings


def _shown_keys(difference: RowDifference) -> list[KeyDifference]:
    """Return the keys that were set differently, and those that follow from them and act on memory that changed."""
    changed = {
        each.category
        for tier in difference.memory
        for each in (*tier.categories, *tier.uncounted)
        if abs(each.difference_bytes) > _SAME_FRACTION * max(tier.a_bytes, tier.b_bytes)
    }
    # A key that one row switches off and the other does not read changes nothing.
    keys = [key for key in difference.keys if {key.a, key.b} != {None, False}]
    return [
        key
        for key in keys
        if not key.from_layout or key.path.endswith((".stage", ".device")) or changed.intersection(key.acts_on)
    ]


def _key_line(key: KeyDifference) -> Line:
    acts_on = [
        f"{name} time" if name in PHASES else "memory of model build" if name == "build" else category_text(name, "gpu")
        for name in key.acts_on
    ]
    return Line(key.path.removeprefix("zero_optimization."), _value(key.a), _value(key.b), ", ".join(acts_on))


def _value(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return str(value).lower()
    # Large round numbers as DeepSpeed's documentation writes them: 5e8.
    if isinstance(value, int) and value >= 100_000 and not str(value)[1:].strip("0"):
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,}" if isinstance(value, int) else str(value)


def _saving_lines(difference: RowDifference) -> Iterator[Line]:
    for saving in difference.savings:
        on_gpu = saving.gpu_bytes > 0
        saved = f"{signed_size(-(saving.gpu_bytes if on_gpu else saving.host_bytes))} per {'GPU' if on_gpu else 'node'}"
        if on_gpu and saving.host_bytes < 0:
            saved += f", {signed_size(-saving.host_bytes)} of host memory per node"
        what = f"{_SAVING_TEXTS.get(saving.name, saving.name)} on {difference.larger.label}"
        yield Line(what, "", "", saved)


def size_text(count_bytes: float | None) -> str:
    """Format bytes with three significant digits in powers of 1024: ``45.5 GB``, ``6.40 MB``."""
    if count_bytes is None:
        return format_bytes(None)
    for unit, name in ((2**30, "GB"), (2**20, "MB"), (2**10, "KB")):
        if abs(count_bytes) >= 0.1 * unit:
            return f"{format_significant(count_bytes / unit)} {name}"
    return f"{count_bytes:.0f} B"


def signed_size(count_bytes: float) -> str:
    """``+1.86 GB``, ``−2.24 GB``."""
    return f"{'+' if count_bytes > 0 else '−'}{size_text(abs(count_bytes))}" if count_bytes else "0"
