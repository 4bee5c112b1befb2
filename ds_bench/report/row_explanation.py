"""Why two rows differ, in sentences: at length for ``explain``, in one paragraph for a report.

``analysis.row_difference`` finds what is said here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..analysis.comparison import ComparisonRow
from ..analysis.intervals import FEWEST_RUNS
from ..analysis.row_difference import (
    PHASES,
    REST,
    TOTAL,
    CategoryDifference,
    KeyDifference,
    Pair,
    RowDifference,
    TierDifference,
    TimeDifference,
    explain,
)
from ..prediction.memory import Saving
from ..recommend.remedies import failed_run
from ..recommend.short_answer import format_list
from ..recommend.strategy_guide import traffic_text
from ..system.terminal import wrapped_lines
from ..units import format_bytes, format_count, format_items, format_names, format_significant, to_ms
from .comparison_report import ComparisonReport
from .memory_plan import category_text
from .table_columns import failure_text

HEADING = "What changes between rows"
_NAMED_SHARE = 0.05
"""A category with less than this part of all changes of a tier is summed up with the others."""
_SAME_SHARE = 0.01
"""A total that differs by less than this part is called the same, and smaller changes are not named."""
_MOST_PARAGRAPHS = 8
_MOST_KEYS = 3
"""Keys that a paragraph names."""
_LAYOUT_PATHS = (
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
)


def explanation_lines(difference: RowDifference, title: str, width: int) -> Iterator[str]:
    """The whole explanation in lines of at most ``width`` characters, if no word is longer."""
    a, b = difference.a.label, difference.b.label
    yield from wrapped_lines(f"{b} against {a} · {title}", width)
    sections = (
        ("Failed", list(_failures(difference))),
        ("Memory", list(_memory(difference))),
        ("Time", list(_time(difference))),
        ("Settings", list(_settings(difference))),
        ("What would change it", list(_savings(difference))),
        ("Not known", [f"The result does not hold {format_list(difference.unknown)}."] if difference.unknown else []),
    )
    for heading, sentences in sections:
        if sentences:
            yield from ["", heading]
            for sentence in sentences:
                yield from wrapped_lines(sentence, width, indent="  ")


def paragraph(difference: RowDifference, *, savings: Sequence[Saving] | None = None) -> str:
    """The explanation in one paragraph, without its beginning ``ZeRO-3 against ZeRO-2:``.

    ``savings``: those to name; None for the greatest.
    """
    sentences = list(_failures(difference))
    main = difference.main
    if main is not None:
        sentences.append(_tier_sentence(main))
        sentences += _uncounted_sentences(main)
        after = next((each for each in difference.memory if each.moment == "after_step"), None)
        if after is not None and after.tier == "gpu":
            sentences.append(_tier_sentence(after))
    if (time := difference.time) is not None:
        sentences.append(_speed_sentence(time, brief=True))
        # Only the phase that changes most, and only where the step times themselves differ beyond the noise.
        if time.phase_seconds and time.interval is not None and time.interval.distinguishable:
            phases = [(phase, pair) for phase, pair in time.phase_seconds.items() if phase in PHASES]
            phase, pair = max(phases, key=lambda entry: abs(entry[1].difference or 0.0))
            if abs(pair.difference or 0.0) > _NAMED_SHARE * max(pair.a or 0.0, pair.b or 0.0):
                sentences.append(f"Of its phases, timed apart, {phase} changes most: {_milliseconds(pair)}.")
    own = [key for key in difference.keys if not (key.from_layout or key.path in _LAYOUT_PATHS or _is_off(key))]
    if own:
        sentences.append(f"Set differently: {format_names(map(_key_text, own), _MOST_KEYS, '; ')}.")
    named = difference.savings[:1] if savings is None else savings
    sentences += [_saving_sentence(saving, difference) for saving in named]
    return " ".join(sentences)


def report_paragraphs(report: ComparisonReport) -> list[tuple[str, str]]:
    """Heading and paragraph of the pairs of rows that matter; at most eight, and one that counts the others.

    The recommended row against the baseline and against the fastest other row, then each other row against the
    baseline. Of rows that did not train nothing is said unless both were predicted.
    """
    paragraphs, told = [], set[tuple[str, str]]()
    differences = [(a, b, explain(a, b)) for a, b in _pairs(report)]
    # Of the others there is nothing but failures, which the table says.
    differences = [each for each in differences if each[2].main is not None or each[2].time is not None]
    for a, b, difference in differences[:_MOST_PARAGRAPHS]:
        # A saving of the same row is named once.
        new = [each for each in difference.savings[:1] if (difference.larger.key, each.name) not in told]
        told |= {(difference.larger.key, each.name) for each in new}
        paragraphs.append((f"{b.label} against {a.label}", paragraph(difference, savings=new)))
    more = len(differences) - _MOST_PARAGRAPHS
    if more > 0:
        paragraphs.append((format_items(more, "more pair"), "The command explain A B RESULT compares any two rows."))
    return paragraphs


def _pairs(report: ComparisonReport) -> list[tuple[ComparisonRow, ComparisonRow]]:
    rows, chosen = report.comparison.rows, report.recommended_row
    baseline = report.comparison.baseline or next(iter(rows), None)
    pairs = []
    if chosen is not None and baseline is not None and chosen.key != baseline.key:
        others = [row for row in rows if row.valid and row.key != chosen.key]
        runner_up = max(others, key=lambda row: row.tokens_per_second or 0.0, default=None)
        pairs = [(baseline, chosen), *([] if runner_up is None else [(runner_up, chosen)])]
    pairs += [(baseline, row) for row in rows if baseline is not None]
    # A pair may be chosen twice, in either order: it stands where it was chosen first.
    unique: dict[frozenset[str], tuple[ComparisonRow, ComparisonRow]] = {}
    for a, b in pairs:
        if a.key != b.key:
            unique.setdefault(frozenset((a.key, b.key)), (a, b))
    return list(unique.values())


# ------------------------------------------------------------------ memory


def _failures(difference: RowDifference) -> Iterator[str]:
    for row in (difference.a, difference.b):
        run = failed_run(row)
        if run is not None:
            count = sum(not each.record.outcome.success for each in row.summaries)
            some = f" in {count} of {len(row.summaries)} runs" if row.succeeded else ""
            yield f"{row.label} did not train{some}: {failure_text(run)}."


def _memory(difference: RowDifference) -> Iterator[str]:
    for tier in difference.memory:
        yield _tier_sentence(tier)
        yield from _uncounted_sentences(tier)
    resident = difference.resident_bytes
    if resident.a is not None and resident.b is not None:
        yield (
            f"Peak resident size of the ranks of a node: {size_text(resident.a)} → {size_text(resident.b)}. It counts "
            "Python and its libraries, and of a buffer only the pages that were written."
        )
    phases = {
        phase.replace("_", " "): f"{size_text(int(pair.a or 0))} → {size_text(int(pair.b or 0))}"
        for phase, pair in difference.phase_peaks.items()
        if abs(pair.difference or 0) > _NAMED_SHARE * max(pair.a or 0, pair.b or 0)
    }
    if phases:
        texts = ", ".join(f"{phase} {text}" for phase, text in phases.items())
        yield f"Peak of a node's host memory by phase, where it differs by more than 5 %: {texts}."


def _tier_sentence(tier: TierDifference) -> str:
    """``GPU memory at the peak, fullest rank: 45.5 GB → 49.2 GB, +3.70 GB: DeepSpeed's buffers +1.86 GB, …``."""
    head = f"{_where(tier)}: {size_text(tier.a_bytes)} → {size_text(tier.b_bytes)}, {_change_text(tier)}"
    named = named_categories(tier)
    parts = [f"{_category(each.category, tier)} {signed_size(each.difference_bytes)}" for each in named]
    others = tier.difference_bytes - sum(each.difference_bytes for each in named)
    if parts and abs(others) >= _SAME_SHARE * _larger_total(tier):
        parts.append(f"others {signed_size(others)}")
    if not parts or named[0].category == TOTAL:
        return f"{head}."
    return f"{head}: {', '.join(parts)}."


def _change_text(tier: TierDifference) -> str:
    if abs(tier.difference_bytes) <= _SAME_SHARE * _larger_total(tier):
        return "the same within 1 %"
    return signed_size(tier.difference_bytes)


def _where(tier: TierDifference) -> str:
    what = {"gpu": "GPU memory", "cpu": "Host memory", "nvme": "Swap files on NVMe"}[tier.tier]
    if tier.predicted:
        return f"Predicted: {what} at the fullest moment, {tier.scope}"
    if tier.moment == "after_step":
        return f"{what} between steps, {tier.scope}"
    counted = tier.tier == "cpu" and all(each.category not in (REST, TOTAL) for each in tier.categories)
    return f"{what}{' in tensors' if counted else ''}{'' if tier.tier == 'nvme' else ' at the peak'}, {tier.scope}"


def _category(name: str, tier: TierDifference) -> str:
    if name == REST:
        if tier.tier == "gpu":
            return "rest of the peak" if tier.moment == "peak" else "rest"
        return "rest (Python, libraries and others)"
    return category_text(name, "gpu" if tier.tier == "gpu" else "host")


def named_categories(tier: TierDifference) -> list[CategoryDifference]:
    """The categories that changed enough to be named, the largest change first."""
    return [each for each in tier.categories if _is_named(each, tier)]


def _is_named(category: CategoryDifference, tier: TierDifference) -> bool:
    all_changes = sum(abs(each.difference_bytes) for each in tier.categories)
    # One byte at least, since a category that did not change is never named.
    least = max(_NAMED_SHARE * all_changes, _SAME_SHARE * _larger_total(tier), 1)
    return abs(category.difference_bytes) >= least


def _larger_total(tier: TierDifference) -> int:
    return max(tier.a_bytes, tier.b_bytes)


def _uncounted_sentences(tier: TierDifference) -> Iterator[str]:
    """What the prediction has where no ledger counts, if it is no small part of what changed."""
    named = [each for each in tier.uncounted if _is_named(each, tier)]
    if named:
        parts = [f"{_category(each.category, tier)} {signed_size(each.difference_bytes)}" for each in named]
        where = "The rest is in no tensor that was counted" if tier.tier == "gpu" else "Beside these tensors"
        yield f"{where}; predicted at the fullest moment: {', '.join(parts)}."


# ------------------------------------------------------------------ time


def _time(difference: RowDifference) -> Iterator[str]:
    time = difference.time
    if time is None:
        return
    yield _speed_sentence(time)
    yield from _phase_sentences(difference, time)
    traffic = [_traffic_text(row) for row in (difference.a, difference.b)]
    if None not in traffic and traffic[0] != traffic[1]:
        yield f"By formula, {difference.a.label}: {traffic[0]}. {difference.b.label}: {traffic[1]}."
    for name, pair in (("Read from NVMe", time.nvme_read_bytes), ("Written to NVMe", time.nvme_written_bytes)):
        if pair.a or pair.b:
            yield f"{name} per step: {size_text(pair.a or 0)} → {size_text(pair.b or 0)}."
    if time.skipped_steps.a or time.skipped_steps.b:
        yield f"Measured steps that the optimizer skipped: {_counts(time.skipped_steps)}."
    if time.allocator_retries.a or time.allocator_retries.b:
        yield (
            f"Times the allocator flushed its cache and tried again: {_counts(time.allocator_retries)}; each one stops "
            "the GPU."
        )


def _traffic_text(row: ComparisonRow) -> str | None:
    """What a step moves between GPUs and over the link to the host; None on the CPU accelerator or another engine."""
    record = row.representative.record
    trial = record.trial
    if trial.placement.accelerator == "cpu" or trial.configuration.engine != "deepspeed":
        return None
    rank = record.ranks[0]
    if not rank.parameter_count:  # of a flat file without it
        return None
    return traffic_text(
        trial.configuration,
        rank.parameter_count,
        rank.data_parallel_size,
        trial.workload.precision,
        rank.grad_accum,
        rank.trainable_parameter_count,
    )


def _counts(pair: Pair) -> str:
    return f"{format_count(pair.a)} → {format_count(pair.b)}"


def _speed_sentence(time: TimeDifference, *, brief: bool = False) -> str:
    """The step times, or the throughputs of rows whose steps have other tokens, with the ratio and its interval.

    ``brief``: without the reasons why there is no ratio, which the notes of a report give.
    """
    interval = time.interval
    if time.same_tokens:
        head = f"Step {_milliseconds(time.step_seconds)}"
        ratio = _ratio(time.step_seconds)
        ends = None if interval is None else (interval.inverse.low, interval.inverse.high)
        meaning = "times as long"
    else:
        head = f"Throughput {_counts(time.tokens_per_second)} tokens/s, as steps have different numbers of tokens"
        ratio = _ratio(time.tokens_per_second)
        ends = None if interval is None else (interval.low, interval.high)
        meaning = "times as many"
    if time.incomparable_reasons and brief:
        return f"{head}; no ratio, as the notes say."
    if time.incomparable_reasons:
        return f"{head}; no ratio: {'; '.join(time.incomparable_reasons)}."
    if interval is None or ends is None:
        return f"{head}: not tested, which takes {FEWEST_RUNS} runs of both rows."
    bounds = f"95 % interval {format_significant(ends[0])} to {format_significant(ends[1])}"
    if not interval.distinguishable:
        return f"{head}: not distinguishable ({bounds} times)."
    return f"{head}, {format_significant(ratio)} {meaning} ({bounds})."


def _ratio(pair: Pair) -> float | None:
    return pair.b / pair.a if pair.a and pair.b is not None else None


def _milliseconds(pair: Pair) -> str:
    return f"{format_significant(to_ms(pair.a))} → {format_significant(to_ms(pair.b))} ms"


def _phase_sentences(difference: RowDifference, time: TimeDifference) -> Iterator[str]:
    if time.phase_seconds:
        texts = {phase: f"{phase} {_milliseconds(pair)}" for phase, pair in time.phase_seconds.items()}
        phases = ", ".join(texts.pop(phase) for phase in PHASES if phase in texts)
        of_one_run = any(len(row.successes) > 1 for row in (difference.a, difference.b))
        which = " of the run nearest to each row's mean" if of_one_run else ""
        yield f"Phases{which}, timed apart from these steps: {phases}."
        if texts:
            yield f"Within them, in steps in which each operation is waited for: {', '.join(texts.values())}."


# ------------------------------------------------------------------ settings


def _settings(difference: RowDifference) -> Iterator[str]:
    """The keys that the rows set differently; of those that follow from the layout, what acts on changed memory."""
    keys = [key for key in difference.keys if not _is_off(key)]
    own = [key for key in keys if not key.from_layout or key.path in _LAYOUT_PATHS]
    yield from (f"{_key_text(key)}." for key in own)
    others = [key for key in keys if key not in own]
    changed = [each.category for tier in difference.memory for each in named_categories(tier)]
    changed += [each.category for tier in difference.memory for each in tier.uncounted if _is_named(each, tier)]
    acting = {name: [key for key in others if name in key.acts_on] for name in dict.fromkeys(changed)}
    for name, keys in acting.items():
        if keys:
            texts = [f"{_short_path(key)} {_value(key.a)} → {_value(key.b)}" for key in keys]
            yield f"Following from stage, offload and engine, on {category_text(name, 'gpu')}: {', '.join(texts)}."
    rest = len(others) - len({key.path for keys in acting.values() for key in keys})
    if rest:
        yield f"{format_items(rest, 'more key')} that follow{'s' if rest == 1 else ''} from these: --json."
    yield from (f"The machines differ: {text}." for text in difference.environment_differences)


def _is_off(key: KeyDifference) -> bool:
    """Whether the key is off in one row and not read in the other."""
    return (key.a is None and key.b is False) or (key.a is False and key.b is None)


def _key_text(key: KeyDifference) -> str:
    acts_on = f" ({format_list([_effect(name) for name in key.acts_on])})" if key.acts_on else ""
    return f"{_short_path(key)} {_value(key.a)} → {_value(key.b)}{acts_on}"


def _short_path(key: KeyDifference) -> str:
    return key.path.removeprefix("zero_optimization.")


def _effect(name: str) -> str:
    """A category of memory, or a phase of a step."""
    if name == "build":
        return "memory while the model is built and initialised"
    return f"time of {name}" if name in ("forward", "backward", "step") else category_text(name, "gpu")


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        digits = str(value)
        # Buckets as DeepSpeed's documentation writes them: 5e8.
        round_number = len(digits) > 5 and not digits[1:].strip("0")
        return f"{digits[0]}e{len(digits) - 1}" if round_number else f"{value:,}"
    return str(value)


# ------------------------------------------------------------------ what would change it


def _savings(difference: RowDifference) -> Iterator[str]:
    for saving in difference.savings:
        yield f"{_saving_sentence(saving, difference).removesuffix('.')} ({_changes(saving)})."


_SAVING_TEXTS = {"small_buffers": "smaller buffers"}
"""Names of savings that are keys of records → what a reader is told."""


def _saving_sentence(saving: Saving, difference: RowDifference) -> str:
    on_gpu = saving.gpu_bytes > 0
    saved = (
        f"{size_text(saving.gpu_bytes)} per GPU" if on_gpu else f"{size_text(saving.host_bytes)} of tensors per node"
    )
    cost = ""
    if on_gpu and saving.host_bytes < 0:
        cost = f", and take {size_text(-saving.host_bytes)} more host memory per node"
    what = _SAVING_TEXTS.get(saving.name, saving.name)
    return f"On {difference.larger.label}, predicted: {what} would save {saved}{cost}."


def _changes(saving: Saving) -> str:
    """The keys and their values, with the flag that sets them all where there is one."""
    parts = []
    for path, value in saving.changes.items():
        shown = value.get("device") if isinstance(value, dict) else value
        parts.append(f"{path.removeprefix('zero_optimization.')} {_value(shown)}")
    flag = "--axis buffers=small_buffers: " if saving.name == "small_buffers" else ""
    return f"{flag}{', '.join(parts)}"


# ------------------------------------------------------------------ sizes


def size_text(count_bytes: float | None) -> str:
    """Bytes with three significant digits: ``45.5 GB``, ``0.931 GB``, ``6.40 MB``; powers of 1024."""
    if count_bytes is None:
        return format_bytes(None)
    for unit, name in ((2**30, "GB"), (2**20, "MB"), (2**10, "KB")):
        if abs(count_bytes) >= 0.1 * unit:
            return f"{format_significant(count_bytes / unit)} {name}"
    return f"{count_bytes:.0f} B"


def signed_size(count_bytes: float) -> str:
    """``+1.86 GB``, ``−2.24 GB``."""
    return f"{'+' if count_bytes > 0 else '−'}{size_text(abs(count_bytes))}" if count_bytes else "0"
