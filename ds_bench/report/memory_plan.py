"""The predictions of ``plan`` as text: the answer in a sentence, a table, and why some strategies do not fit.

With ``verbose`` also the GPU's bytes by category, DeepSpeed's own estimates and what is assumed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from .. import units
from ..config import strategies
from ..config.spec import Configuration
from ..prediction import deepspeed_estimator, what_if
from ..prediction.memory import (
    CONTEXT_BYTES,
    DOES_NOT_FIT,
    FITS,
    NCCL_BYTES,
    NCCL_RANGE_BYTES,
    PROCESS_BYTES,
    TIGHT,
    UNKNOWN,
    Prediction,
)
from ..prediction.what_if import Change, PlannedTrial

_VERDICTS = {FITS: "yes", TIGHT: "tight", DOES_NOT_FIT: "no", UNKNOWN: "?"}
"""Cells of the column Fits."""
_WIDEST_SENTENCE = 100
"""Characters of a line of prose, however wide the terminal is."""
_NOTICEABLE_SHARE = 0.01
"""A stage that needs less than this more than a lower one is not explained."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
"""A space at which no line is broken; printed as an ordinary one."""
_CELL_INDENT = "  "
"""Before the second and later lines of a cell of the first column."""
_CATEGORY_SHARE = 0.1
"""A category with less than this part of a difference is not named as its cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Prediction for one strategy."""

    trial: PlannedTrial
    prediction: Prediction
    verdict: str
    change: Change | None
    """The smallest change that would make it fit; None if it fits already, or if no change makes it fit."""
    decisive_tiers: tuple[str, ...] = ()
    """The memories that decide the verdict, ``gpu`` and ``host``; empty if it fits."""
    min_gpus: int | None = None
    """None unless it was asked for, or if no number of GPUs is enough."""
    max_batch: int | None = None
    """None unless it was asked for, or if one sequence does not fit."""
    deepspeed: deepspeed_estimator.Estimate | None = None
    """Figures of DeepSpeed's own estimator; None for a case that it does not cover."""

    @property
    def configuration(self) -> Configuration:
        return self.trial.configuration

    @property
    def label(self) -> str:
        return self.trial.configuration.label


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What was asked, and the prediction for every strategy."""

    asked: PlannedTrial
    """The workload and the GPUs; its configuration does not count."""
    gpu_bytes: int
    """Memory of one GPU."""
    host_bytes: int | None
    """Memory of one node's host; None where it was not given."""
    rows: Sequence[PlanRow]
    shows_min_gpus: bool
    shows_max_batch: bool

    @property
    def num_gpus(self) -> int:
        return self.asked.placement.num_gpus

    @property
    def unknown(self) -> str | None:
        """Why no figure includes activations; None where they do."""
        return self.rows[0].prediction.unknown


def lines(plan: MemoryPlan, width: int, *, verbose: bool) -> Iterator[str]:
    """The whole text, in lines of at most ``width`` characters if its longest words leave that room."""
    prose = min(width, _WIDEST_SENTENCE)
    answer, offered = _answer(plan)
    yield from _wrapped(answer, prose)
    yield ""
    yield from _wrapped(_question_text(plan), prose)
    yield ""
    yield from _aligned(_table(plan), width)
    for heading, items in (
        ("Too large for a GPU:", _causes(plan, "gpu")),
        ("Too large for a host:", _causes(plan, "host")),
        ("May fit:" if plan.unknown else "Would fit:", _other_changes(plan, offered)),
        ("Needs more than a lower stage:", _larger_than_a_lower_stage(plan)),
        ("No number of GPUs is enough:", _reasons_against_any_number(plan)),
    ):
        texts = [line for item in items for line in _wrapped(item, prose, indent=2)]
        if texts:
            yield from ["", heading, *texts]
    yield ""
    yield from _wrapped(_reading_text(plan, verbose=verbose), prose)
    if verbose:
        yield ""
        yield from _aligned(_ledger(plan), width)
        for note in _notes(plan):
            yield ""
            yield from _wrapped(note, prose)


# ------------------------------------------------------------------ the answer


def _answer(plan: MemoryPlan) -> tuple[str, tuple[str, ...] | None]:
    """The sentence that answers the question, and the change that it offers (``_change_key``) or None."""
    fitting = [row for row in plan.rows if row.verdict in (FITS, TIGHT)]
    offered = None
    if fitting:
        text = _answer_if_some_fit(plan, fitting)
    elif unknown := next((row for row in plan.rows if row.verdict == UNKNOWN), None):
        text = (
            f"not known, because activations are not counted ({plan.unknown}); without them {unknown.label} takes "
            f"{_needs(unknown.trial, unknown.prediction)}"
        )
    else:
        text, offered = _answer_if_none_fits(plan)
    return f"{plan.num_gpus:,} × {_capacity(plan.gpu_bytes)}: {text}.", offered


def _answer_if_some_fit(plan: MemoryPlan, fitting: Sequence[PlanRow]) -> str:
    best = min(fitting, key=lambda row: (row.verdict == TIGHT, _simplicity(row.configuration)))
    total = len(plan.rows)
    tightly = ""
    if best.verdict == TIGHT:
        tightly = ", but tightly" if "gpu" in best.decisive_tiers else ", but nearly fills the host's memory"
    if len(fitting) == 1:
        text = f"{'only ' if total > 1 else ''}{best.label} fits{tightly}: {_needs(best.trial, best.prediction)}"
    else:
        every = "both" if total == 2 else f"all {total}"
        count = every if len(fitting) == total else f"{len(fitting)} of {total}"
        text = f"{count} strategies fit; {best.label} is the simplest{tightly}: {_needs(best.trial, best.prediction)}"
    return text + _without_offload(plan, best.trial)


def _answer_if_none_fits(plan: MemoryPlan) -> tuple[str, tuple[str, ...] | None]:
    failed = f"{plan.rows[0].label} does not fit" if len(plan.rows) == 1 else "nothing fits as asked"
    if plan.unknown:
        failed += f" even without activations, which are not counted ({plan.unknown})"
    failed += _shortage_of_host_memory(plan)
    changes = [row.change for row in plan.rows if row.change]
    if not changes:
        tier = "host" if all("host" in row.decisive_tiers for row in plan.rows) else "gpu"
        sizes = {
            row.label: row.prediction.gpu_bytes if tier == "gpu" else row.prediction.host_bytes for row in plan.rows
        }
        label, size = min(sizes.items(), key=lambda item: item[1])
        least = f"{_gb(size)} per {'GPU' if tier == 'gpu' else 'node'}"
        also = "" if len(sizes) == 1 else f" (the least: {label}, {least})"
        return f"{failed}{also}, and no change that was tried helps", None
    change = min(changes, key=lambda change: _cost_of(plan, change))
    verb = {FITS: "does", TIGHT: "does, but tightly", UNKNOWN: "may"}[_verdict(plan, change)]
    text = f"{failed}; {_change_text(plan, change)} {verb}, {_needs(change.trial, change.prediction)}"
    return text + _without_offload(plan, change.trial), _change_key(plan, change)


def _verdict(plan: MemoryPlan, change: Change) -> str:
    return change.prediction.verdict(plan.gpu_bytes, plan.host_bytes)


def _cost_of(plan: MemoryPlan, change: Change) -> tuple[object, ...]:
    """What is cheaper comes first: the GPUs that there are, room to spare, no offload, few settings."""
    trial = change.trial
    return (
        trial.placement.num_gpus != plan.num_gpus,
        _verdict(plan, change) == TIGHT,
        trial.configuration.offloads,
        len(_settings(plan, trial)),
        _simplicity(trial.configuration),
    )


def _simplicity(configuration: Configuration) -> int:
    """Position in the catalogue, which begins with what costs the least speed."""
    return list(strategies.CATALOGUE).index(configuration.name)


def _shortage_of_host_memory(plan: MemoryPlan) -> str:
    """That host memory is why nothing fits; empty where it is the GPUs' alone."""
    short_of_host = [row for row in plan.rows if "host" in row.decisive_tiers]
    if len(short_of_host) == len(plan.rows):
        gpus_too = all("gpu" in row.decisive_tiers for row in plan.rows)
        return f": {'GPUs and host memory are' if gpus_too else 'host memory is'} too small"
    if short_of_host and all(row.configuration.offloads == (row in short_of_host) for row in plan.rows):
        return ": GPUs are too small without offload, host memory with it"
    return ""


def _without_offload(plan: MemoryPlan, trial: PlannedTrial) -> str:
    """How many GPUs it takes without the offload of ``trial``; empty where it has none or they are there already."""
    if not trial.configuration.offloads:
        return ""
    count = what_if.min_gpus_without_offload(trial, plan.gpu_bytes, plan.host_bytes)
    if count is not None and count <= plan.num_gpus:
        return ""
    at_least = "at least " if plan.unknown else ""
    text = "no number of GPUs is enough" if count is None else f"you need {at_least}{_gpus(count)}"
    lean = replace(trial, workload=replace(trial.workload, activation_checkpointing=True))
    fewer = what_if.min_gpus_without_offload(lean, plan.gpu_bytes, plan.host_bytes)
    if fewer is not None and (count is None or fewer < count):
        text += f", or {fewer:,} with activation checkpointing"
    return f"; without offload {text}"


def _settings(plan: MemoryPlan, trial: PlannedTrial) -> list[str]:
    """What else than strategy and GPUs differs from what was asked."""
    asked, work = plan.asked.workload, trial.workload
    changes = [
        ("activation checkpointing", work.activation_checkpointing != asked.activation_checkpointing),
        (f"batch size {work.batch_size}", work.batch_size != asked.batch_size),
        ("reduce_bucket_size 5e7", trial.changes != plan.asked.changes),
    ]
    return [text for text, differs in changes if differs]


def _change_text(plan: MemoryPlan, change: Change) -> str:
    """``with activation checkpointing on 16 GPUs ZeRO-3``."""
    trial, settings = change.trial, _settings(plan, change.trial)
    parts = [f"with {_joined(settings)}"] if settings else []
    if trial.placement.num_gpus != plan.num_gpus:
        parts.append(f"on {_gpus(trial.placement.num_gpus)}")
    return " ".join([*parts, trial.configuration.label])


def _change_key(plan: MemoryPlan, change: Change) -> tuple[str, ...]:
    """Equal for changes that lead to the same configuration on the same GPUs."""
    trial = change.trial
    return trial.configuration.label, str(trial.placement.num_gpus), *_settings(plan, trial)


def _needs(trial: PlannedTrial, prediction: Prediction) -> str:
    """``61.2 GB per GPU``, and of host memory and NVMe where the configuration offloads."""
    where = " per node" if trial.placement.num_gpus > (trial.ranks_per_node or trial.placement.num_gpus) else ""
    parts = [f"{_gb(prediction.gpu_bytes)} per GPU"]
    if trial.configuration.offloads:
        parts.append(f"{_gb(prediction.host_bytes)} of host memory{where}")
    if prediction.nvme_bytes:
        parts.append(f"{_gb(prediction.nvme_bytes)} of NVMe{where}")
    return _joined(parts)


def _question_text(plan: MemoryPlan) -> str:
    work, profile = plan.asked.workload, plan.asked.profile
    parts = [
        profile.name,
        f"{units.format_millions(profile.parameters)} parameters",
        work.precision,
        f"micro-batch {work.batch_size:,} × {work.seq_length:,} tokens",
        *(["activation checkpointing"] if work.activation_checkpointing else []),
        *([] if plan.host_bytes is None else [f"nodes with {_capacity(plan.host_bytes)} of host memory"]),
    ]
    return f"{_NO_BREAK}· ".join(parts)


# ------------------------------------------------------------------ reasons


def _causes(plan: MemoryPlan, tier: str) -> Iterator[str]:
    """What takes most of the ``gpu`` or ``host`` of the rows that do not fit in it; rows with the same in one line."""
    sizes_by_category: dict[str, dict[str, int]] = {}
    for row in plan.rows:
        if row.verdict == DOES_NOT_FIT and tier in row.decisive_tiers:
            name, size = row.prediction.biggest_in(tier)
            sizes_by_category.setdefault(name, {})[row.label] = size
    for name, sizes in sizes_by_category.items():
        low, high = _gb_cell(min(sizes.values())), _gb(max(sizes.values()))
        size_range = high if high.startswith(low) else f"{low} to {high}"
        yield f"{_labels(plan, sizes)}: mostly {_category_text(name, tier)}, {size_range}"


def _other_changes(plan: MemoryPlan, offered: tuple[str, ...] | None) -> Iterator[str]:
    """The smallest changes of the rows, each once; not the one of the answer, nor one that leads to a row that fits."""
    told = {(row.label, str(plan.num_gpus)) for row in plan.rows if row.verdict != DOES_NOT_FIT} | {offered}
    for change in (row.change for row in plan.rows if row.change):
        if (key := _change_key(plan, change)) not in told:
            told.add(key)
            tightly = " tightly" if _verdict(plan, change) == TIGHT else ""
            yield f"{_change_text(plan, change)}{tightly}: {_needs(change.trial, change.prediction)}"


def _larger_than_a_lower_stage(plan: MemoryPlan) -> Iterator[str]:
    """For stages that need more of a GPU than a lower one, what they hold more of at their fullest moment."""
    rows = [row for row in plan.rows if not row.configuration.offloads]
    entries = []
    for row in rows:
        lower = [other for other in rows if other.configuration.stage < row.configuration.stage]
        least = min(lower, key=lambda other: other.prediction.gpu_bytes, default=row)
        if row.prediction.gpu_bytes > (1 + _NOTICEABLE_SHARE) * least.prediction.gpu_bytes:
            moment = row.prediction.phase
            own, others = (each.trial.gpu_bytes_by_moment()[moment] for each in (row, least))
            entries.append((row.label, f"{_surplus_text(own, others)} more than {least.label} at its fullest moment"))
    yield from _grouped(plan, entries)


def _surplus_text(own: Mapping[str, int], others: Mapping[str, int]) -> str:
    more = {name: size - others.get(name, 0) for name, size in own.items() if size > others.get(name, 0)}
    return _joined(
        f"{_gb(more[name])} of {_category_text(name, 'gpu')}"
        for name in sorted(more, key=more.__getitem__, reverse=True)
        if more[name] >= _CATEGORY_SHARE * sum(more.values())
    )


def _reasons_against_any_number(plan: MemoryPlan) -> Iterator[str]:
    if plan.shows_min_gpus:
        yield from _grouped(
            plan, ((row.label, _reason_against_any_number(plan, row)) for row in plan.rows if not row.min_gpus)
        )


def _reason_against_any_number(plan: MemoryPlan, row: PlanRow) -> str:
    trial = what_if.with_most_gpus(row.trial)
    prediction, gpus = trial.predict(), _gpus(trial.placement.num_gpus)
    if "host" in prediction.decisive_tiers(plan.gpu_bytes, plan.host_bytes):
        return f"with {gpus} a node still needs {_gb(prediction.host_bytes)} of host memory"
    if trial.configuration.stage == 0:
        return "every GPU holds everything"
    name, size = prediction.biggest_in("gpu")
    return f"with {gpus}, the most that are tried, {_category_text(name, 'gpu')} still take {_gb(size)}"


def _reading_text(plan: MemoryPlan, *, verbose: bool) -> str:
    """What must be known to read the table."""
    sentences = [
        "Predicted, nothing was run. GB is 2^30 bytes: of one GPU at its fullest moment, of one node's host and NVMe."
    ]
    if any(row.verdict == TIGHT for row in plan.rows):
        sentences.append("Tight is above 90 %.")
    if plan.shows_min_gpus and plan.asked.ranks_per_node != 1:
        sentences.append(
            f"Above one node GPUs are counted in whole nodes of {plan.asked.ranks_per_node}, or as given if those fit."
        )
    if not verbose:
        sentences.append("Categories and assumptions: --verbose.")
    return " ".join(sentences)


# ------------------------------------------------------------------ tables


def _table(plan: MemoryPlan) -> list[list[str]]:
    """Headings and rows; NVMe, GPUs needed and largest batch only where there is something to show."""
    columns = [
        ("Strategy", [row.label for row in plan.rows]),
        ("Fits", [_VERDICTS[row.verdict] for row in plan.rows]),
        ("GPU GB, share", _gpu_cells(plan)),
        ("Host GB", [_gb_cell(row.prediction.host_bytes) for row in plan.rows]),
    ]
    if any(row.prediction.nvme_bytes for row in plan.rows):
        columns.append(("NVMe GB", [_gb_cell(row.prediction.nvme_bytes or None) for row in plan.rows]))
    if plan.shows_min_gpus:
        columns.append(("GPUs needed", [_at_least(row, row.min_gpus) for row in plan.rows]))
    if plan.shows_max_batch:
        columns.append(("Largest batch", [_largest_batch(row) for row in plan.rows]))
    return [[heading for heading, _ in columns], *map(list, zip(*(cells for _, cells in columns), strict=True))]


def _gpu_cells(plan: MemoryPlan) -> list[str]:
    sizes = [_gb_cell(row.prediction.gpu_bytes) for row in plan.rows]
    shares = [_percent(row.prediction.gpu_bytes / plan.gpu_bytes) for row in plan.rows]
    share_width = max(map(len, shares))
    return [f"{size}  {share.rjust(share_width)}" for size, share in zip(sizes, shares, strict=True)]


def _at_least(row: PlanRow, count: int | None) -> str:
    """GPUs needed; without activations in the figures the true number may be larger."""
    if count is None:
        return "none"
    return f"{'≥ ' if row.prediction.unknown else ''}{count:,}"


def _largest_batch(row: PlanRow) -> str:
    """A batch at the limit of the search is shown with ``≥``: larger ones were not tried."""
    if row.max_batch is None:
        return "?" if row.verdict == UNKNOWN else "none"
    return f"{'≥ ' if row.max_batch == what_if.LARGEST_BATCH else ''}{row.max_batch:,}"


_CATEGORIES = (
    ("Params", ("parameters", "gathered_parameters")),
    ("Grads", ("gradients",)),
    ("Optim", ("optimizer_states",)),
    ("Buffers", ("deepspeed_buffers",)),
    ("Activ", ("activations",)),
    ("Loss", ("logits_and_loss",)),
    ("Temp", ("temporaries", "pinned_rounding")),
    ("Other", ("overhead",)),
)
"""Heading → categories of the prediction, per GPU at its fullest moment, GB."""


def _ledger(plan: MemoryPlan) -> list[list[str]]:
    table = [["GPU GB by category", *(heading for heading, _ in _CATEGORIES), "DeepSpeed est."]]
    for row in plan.rows:
        cells = [_ledger_cell(row.prediction, names) for _, names in _CATEGORIES]
        table.append([row.label, *cells, _gb_cell(row.deepspeed.gpu_bytes if row.deepspeed else None)])
    return table


def _ledger_cell(prediction: Prediction, names: Sequence[str]) -> str:
    unknown = prediction.unknown is not None and names[0] in ("activations", "logits_and_loss")
    return _gb_cell(None if unknown else sum(prediction.gpu.get(name, 0) for name in names))


def _notes(plan: MemoryPlan) -> Iterator[str]:
    nccl = NCCL_BYTES if plan.num_gpus > 1 else 0
    yield (
        f"Other ({_gb(CONTEXT_BYTES + nccl)}) and {_gb(PROCESS_BYTES)} of host memory per rank are assumed, the rest "
        "is computed."
    )
    if nccl:
        low, high = NCCL_RANGE_BYTES
        yield (
            f"Of Other {_gb(nccl)} are NCCL's: {_gb(low)} to {_gb(high)} per communicator are reported, so measure "
            "where a card is nearly full (gpu_outside_allocator_gb of a run)."
        )
    yield f"DeepSpeed est.: {deepspeed_estimator.WHY_THEY_DIFFER}"


# ------------------------------------------------------------------ words and lines


def _gb(count_bytes: float | None) -> str:
    return f"{_gb_cell(count_bytes)}{_NO_BREAK}GB"


def _percent(share: float) -> str:
    """``9 %``, ``98 %``, ``1,930 %``: whole, and three significant digits."""
    return f"{float(f'{100 * share:.3g}'):,.0f} %"


def _capacity(count_bytes: int) -> str:
    """``80 GB``, ``79.1 GB``."""
    return f"{_gb_cell(count_bytes).removesuffix('.00').removesuffix('.0')}{_NO_BREAK}GB"


def _gb_cell(count_bytes: float | None) -> str:
    return units.format_significant(units.to_gb(count_bytes))


def _category_text(name: str, tier: str) -> str:
    if name == "overhead":
        return "CUDA context and NCCL" if tier == "gpu" else "the processes themselves"
    texts = {"deepspeed_buffers": "DeepSpeed's buffers", "gathered_parameters": "gathered and prefetched parameters"}
    return texts.get(name, name.replace("_", " "))


def _gpus(count: int) -> str:
    return f"{count:,}{_NO_BREAK}GPU{'' if count == 1 else 's'}"


def _joined(parts: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _labels(plan: MemoryPlan, labels: Collection[str]) -> str:
    """``ZeRO-0, ZeRO-1``; with most of the rows ``all``, or where it is shorter ``all but ZeRO-2``."""
    listed = ", ".join(labels)
    others = [row.label for row in plan.rows if row.label not in labels]
    if len(labels) <= len(others) + 1:
        return listed
    return min(listed, f"all but {_joined(others)}", key=len) if others else "all"


def _grouped(plan: MemoryPlan, entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """``label: text`` for pairs of the two; labels with the same text in one line."""
    labels_by_text: dict[str, list[str]] = {}
    for label, text in entries:
        labels_by_text.setdefault(text, []).append(label)
    for text, labels in labels_by_text.items():
        yield f"{_labels(plan, labels)}: {text}"


def _wrapped(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Lines broken between words, indented; the second and later ones by two more where ``indent`` is given."""
    broken = textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=" " * indent,
        subsequent_indent=" " * 2 * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_NO_BREAK, " ") for line in broken]


def _aligned(table: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """The first column left, the others right, two spaces apart.

    A narrow terminal breaks headings, then the first column's cells, and last takes one of the two spaces. Numbers are
    never broken: a terminal that is narrower still wraps the lines itself.
    """
    columns = list(zip(*table, strict=True))
    widths = [max(map(len, column)) for column in columns]
    gaps = len(widths) - 1
    space = 2
    if sum(widths) + space * gaps > width:
        widths = [widths[0], *(max(map(len, [*column[0].split(), *column[1:]])) for column in columns[1:])]
        longest_word = max(len(word) for cell in columns[0] for word in cell.split())
        smallest = min(widths[0], longest_word + len(_CELL_INDENT))
        space = 2 if smallest + sum(widths[1:]) + 2 * gaps <= width else 1
        widths[0] = max(smallest, min(widths[0], width - sum(widths[1:]) - space * gaps))
    for row in table:
        cells = [
            textwrap.wrap(cell, size, subsequent_indent="" if i else _CELL_INDENT, break_on_hyphens=False)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        for first, *numbers in zip_longest(*cells, fillvalue=""):
            padded = [text.rjust(size) for text, size in zip(numbers, widths[1:], strict=True)]
            yield (" " * space).join([first.ljust(widths[0]), *padded]).rstrip()
