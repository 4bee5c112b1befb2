"""The whole text of ``plan``: the answer, a table, the reasons, what must be known to read it; with ``verbose`` more.

What is said comes from ``memory_plan``; here it becomes lines of the terminal's width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ..prediction import what_if
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
from ..system.terminal import aligned_lines, wrapped_lines
from ..units import format_gigabytes
from . import memory_plan
from .memory_plan import MemoryPlan, PlanRow, format_size_number

_VERDICTS = {FITS: "yes", TIGHT: "tight", DOES_NOT_FIT: "no", UNKNOWN: "?"}
"""Cells of the column Fits."""
_WIDEST_SENTENCE = 100
"""Characters of a line of prose, however wide the terminal is."""
_CELL_INDENT = "  "
"""Before the second and later lines of a cell of the first column."""


def lines(plan: MemoryPlan, width: int, *, verbose: bool) -> Iterator[str]:
    """The whole text, in lines of at most ``width`` characters if its longest words leave that room."""
    prose = min(width, _WIDEST_SENTENCE)
    answer, offered = memory_plan.answer_text(plan)
    yield from wrapped_lines(answer, prose)
    yield ""
    yield from wrapped_lines(memory_plan.question_text(plan), prose)
    yield ""
    yield from _aligned(table_cells(plan), width)
    for heading, items in (
        ("Too large for a GPU:", memory_plan.causes(plan, "gpu")),
        ("Too large for a host:", memory_plan.causes(plan, "host")),
        ("May fit:" if plan.unknown else "Would fit:", memory_plan.other_changes(plan, offered)),
        ("Not known:", memory_plan.reasons_not_known(plan)),
        ("Needs more than a lower stage:", memory_plan.larger_than_a_lower_stage(plan)),
        ("No number of GPUs is enough:", memory_plan.reasons_against_any_number(plan)),
    ):
        texts = [line for item in items for line in wrapped_lines(item, prose, indent="  ")]
        if texts:
            yield from ["", heading, *texts]
    yield ""
    yield from wrapped_lines(_reading_text(plan, verbose=verbose), prose)
    if verbose:
        yield ""
        yield from _aligned(_ledger(plan), width)
        for note in _notes(plan):
            yield ""
            yield from wrapped_lines(note, prose)


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


def table_cells(plan: MemoryPlan) -> list[list[str]]:
    """Headings and rows; NVMe, GPUs needed and largest batch only where there is something to show."""
    columns = [
        ("Strategy", [row.label for row in plan.rows]),
        ("Fits", [_VERDICTS[row.verdict] for row in plan.rows]),
        ("GPU GB, share", _gpu_cells(plan)),
        ("Host GB", [format_size_number(row.prediction.host_bytes) for row in plan.rows]),
    ]
    if any(row.prediction.nvme_bytes for row in plan.rows):
        columns.append(("NVMe GB", [format_size_number(row.prediction.nvme_bytes or None) for row in plan.rows]))
    if plan.shows_min_gpus:
        columns.append(("GPUs needed", [_at_least(row, row.min_gpus) for row in plan.rows]))
    if plan.shows_max_batch:
        columns.append(("Largest batch", [_largest_batch(row) for row in plan.rows]))
    return [[heading for heading, _ in columns], *map(list, zip(*(cells for _, cells in columns), strict=True))]


def _gpu_cells(plan: MemoryPlan) -> list[str]:
    sizes = [format_size_number(row.prediction.gpu_bytes) for row in plan.rows]
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
    ("Temp", ("temporaries", "workspaces", "pinned_rounding")),
    ("Other", ("overhead",)),
)
"""Heading → categories of the prediction, per GPU at its fullest moment, GB."""


def _ledger(plan: MemoryPlan) -> list[list[str]]:
    table = [["GPU GB by category", *(heading for heading, _ in _CATEGORIES)]]
    for row in plan.rows:
        table.append([row.label, *(_ledger_cell(row.prediction, names) for _, names in _CATEGORIES)])
    return table


def _ledger_cell(prediction: Prediction, names: Sequence[str]) -> str:
    unknown = prediction.unknown is not None and names[0] in ("activations", "logits_and_loss")
    return format_size_number(None if unknown else sum(prediction.gpu.get(name, 0) for name in names))


def _notes(plan: MemoryPlan) -> Iterator[str]:
    nccl = NCCL_BYTES if plan.num_gpus > 1 else 0
    yield (
        f"Other ({format_gigabytes(CONTEXT_BYTES + nccl)}) and {format_gigabytes(PROCESS_BYTES)} of host memory per "
        "rank are assumed, the rest is computed."
    )
    if nccl:
        low, high = map(format_gigabytes, NCCL_RANGE_BYTES)
        yield (
            f"Of Other {format_gigabytes(nccl)} are NCCL's: {low} to {high} per communicator are reported, so measure "
            "where a card is nearly full (gpu_outside_allocator_gb of a run)."
        )


def _percent(share: float) -> str:
    """``9 %``, ``98 %``, ``1,930 %``: whole, and three significant digits."""
    return f"{float(f'{100 * share:.3g}'):,.0f} %"


def _aligned(table: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """The first column left, the others right, two spaces apart.

    A narrow terminal breaks headings, then the first column's cells, and last takes one of the two spaces. Numbers are
    never broken: a terminal that is narrower still wraps the lines itself.
    """
    from rich.cells import cell_len

    columns = list(zip(*table, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    gaps = len(widths) - 1
    space = 2
    if sum(widths) + space * gaps > width:
        widths = [widths[0], *(max(map(len, [*column[0].split(), *column[1:]])) for column in columns[1:])]
        longest_word = max(len(word) for cell in columns[0] for word in cell.split())
        smallest = min(widths[0], longest_word + len(_CELL_INDENT))
        space = 2 if smallest + sum(widths[1:]) + 2 * gaps <= width else 1
        widths[0] = max(smallest, min(widths[0], width - sum(widths[1:]) - space * gaps))
    lines: list[Sequence[str]] = []
    for row in table:
        cells = [
            textwrap.wrap(cell, size, subsequent_indent="" if i else _CELL_INDENT, break_on_hyphens=False)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines += zip_longest(*cells, fillvalue="")
    yield from aligned_lines(lines, space=space)
