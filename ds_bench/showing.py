"""The end of a comparison: the summary on standard output, and the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from . import analysis, interrupts, tables
from .options import Options
from .record import INTERRUPTED

OK, NONE_SUCCEEDED, INTERRUPTED_CODE = 0, 1, 130


def show(
    options: Options, summaries: Sequence[analysis.Summary], rows: Sequence[dict[str, Any]], notes: Sequence[str]
) -> None:
    """The summary on standard output, in the format asked for."""
    with pipe_may_close():
        _show(options, summaries, rows, notes)


@contextmanager
def pipe_may_close() -> Iterator[None]:
    """A reader that has seen enough (``| head``) is no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(
    options: Options, summaries: Sequence[analysis.Summary], rows: Sequence[dict[str, Any]], notes: Sequence[str]
) -> None:
    if options.format == "json":
        print(tables.as_json(rows, ascii_only=not tables.prints("é", sys.stdout)))
    elif options.format == "markdown":
        print_text(tables.markdown(title(summaries), summaries, notes))
    else:
        tables.print_table(title(summaries), summaries, notes, sys.stdout)


def print_text(text: str) -> None:
    print(text if tables.prints(text, sys.stdout) else tables.ascii_only(text))


def title(summaries: Sequence[analysis.Summary]) -> str:
    """What was trained on what, in one line."""
    if not summaries:
        return "nothing was run"
    work, place = summaries[0].record.trial.workload, summaries[0].record.trial.placement
    device = next((rank.device_name for s in summaries for rank in s.record.ranks), place.accelerator)
    unit = "GPU" if place.accelerator == "cuda" else "CPU rank"
    return (
        f"{work.model} · {work.precision} · micro-batch {work.batch_size} × {work.seq_length} tokens"
        f"{f' × {work.grad_accum} accumulated' if work.grad_accum > 1 else ''} · "
        f"{place.num_gpus} {unit}{'s' if place.num_gpus > 1 else ''} ({device}) · {work.num_steps} steps"
    )


def exit_code(options: Options, summaries: Sequence[analysis.Summary]) -> int:
    """0 a row succeeded, 1 none did, 130 interrupted; with --strict 1 when any failed."""
    outcomes = [summary.record.outcome for summary in summaries]
    if interrupts.asked() or any(outcome.status == INTERRUPTED for outcome in outcomes):
        return INTERRUPTED_CODE
    if options.strict and not all(outcome.success for outcome in outcomes):
        return NONE_SUCCEEDED
    return OK if any(outcome.success for outcome in outcomes) else NONE_SUCCEEDED
