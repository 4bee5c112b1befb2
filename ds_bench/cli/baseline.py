"""The commands ``baseline save`` and ``baseline check``: results read back, one line for each row, one exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import units
from ..analysis import comparison, intervals, load_results, merge_results
from ..analysis.trial_caveats import UNSTABLE_CV
from ..baselines import check, store
from ..baselines.check import BaselineComparison
from ..baselines.result import BenchmarkResult, benchmark_result
from ..config.options import FAIL_ON_DEFAULT
from ..errors import UsageError
from ..system import terminal

OK, REGRESSION = 0, 3


def save_command(paths: Sequence[Path], file: Path, tolerance: float | None) -> int:
    """Keeps every row that succeeded as the baseline of its name. Raises UsageError where there is none; returns 0.

    ``tolerance``: None keeps that of an earlier entry, else 0.05. A row whose figures are disqualified, such as one
    whose loss is not finite, is left out, and a line says so.
    """
    benchmark_results = results(paths)
    _require_distinct(benchmark_results)
    fit = [result for result in benchmark_results if _unfit(result) is None]
    saved = check.save_results(fit, file, tolerance) if fit else []
    with terminal.ignoring_broken_pipe():
        for entry in saved:
            terminal.print_text(f"saved {terminal.escape_controls(entry.name)}: {_figures(entry)}")
        for result in benchmark_results:
            if (reason := _unfit(result)) is not None:
                terminal.print_text(
                    f"not saved {terminal.escape_controls(result.name)}: {terminal.escape_controls(reason)}"
                )
    if not saved:
        raise UsageError("nothing was saved: no row is fit to be a baseline", remedy="the lines above say why")
    for entry in saved:
        for text in _variation(entry):
            terminal.print_text(f"warning: {entry.name}: {text}", sys.stderr)
    terminal.print_text(f"baselines {file}", sys.stderr)
    return OK


def _variation(entry: store.BaselineEntry) -> Iterator[str]:
    """Why changes will be hard to see against this baseline."""
    for what, runs in (("tokens/s", entry.tokens_per_sec_runs), ("peak memory", entry.peak_memory_mb_runs)):
        deviation = intervals.sample_std(runs)
        if deviation is not None and (variation := deviation * len(runs) / sum(runs)) > UNSTABLE_CV:
            text = f"{what} of its {len(runs)} runs varies by {units.format_percent(variation)}"
            yield f"{text}, which hides smaller changes; measure again on a quieter machine, or with more --repeats"


def check_command(paths: Sequence[Path], file: Path, as_json: bool, fail_on: Collection[str] = FAIL_ON_DEFAULT) -> int:
    """Every row against its baseline. Returns 3 where one of ``fail_on`` holds for any of them, else 0.

    Raises UsageError, which is exit code 2, where the file of baselines is missing or bad, and, after the lines are
    printed, where no row could be judged: a gate that checked nothing is not passed.
    """
    benchmark_results = results(paths)
    if store.read(file) is None:
        raise UsageError(f"--baselines {file}: no such file", remedy="make it with: baseline save RESULT")
    verdicts = [check.compare_to_baseline(result, path=file) for result in benchmark_results]
    verdicts += [_missing_verdict(entry) for entry in check.missing_baselines(benchmark_results, file)]
    failed = [verdict for verdict in verdicts if _reasons(verdict) & set(fail_on)]
    with terminal.ignoring_broken_pipe():
        if as_json:
            terminal.print_json(json.dumps(as_data(verdicts, fail_on), indent=1, ensure_ascii=True, allow_nan=False))
        else:
            _print(verdicts)
    if failed:
        return REGRESSION
    _require_one_judged(verdicts)
    return OK


def _missing_verdict(entry: store.BaselineEntry) -> BaselineComparison:
    text = "missing: the result has no such row, which the saved run had"
    return BaselineComparison(name=entry.name, passed=False, message=text, baseline=entry, regressions=("missing",))


def _reasons(verdict: BaselineComparison) -> set[str]:
    """Those of ``FAIL_ON`` that hold for a row."""
    holds_by_reason = {
        "missing": "missing" in verdict.regressions,
        "regression": verdict.failed and "missing" not in verdict.regressions,
        "unmatched": verdict.unmatched,
        "noisy": verdict.noisy,
    }
    return {reason for reason, holds in holds_by_reason.items() if holds}


def results(paths: Sequence[Path]) -> list[BenchmarkResult]:
    """One result per row of the files, repeats taken together. Raises UsageError."""
    benchmark_results = []
    for group in merge_results.merge([load_results.load(path) for path in paths]):
        environment = group.environments[0] if group.environments else None  # those of one group are alike
        rows = comparison.compare(group.summaries, environments=group.environments).results
        benchmark_results += [benchmark_result(row.summaries, environment) for row in rows]
    return benchmark_results


def _require_distinct(benchmark_results: Sequence[BenchmarkResult]) -> None:
    """Two rows of one name, such as one strategy with two DeepSpeed configurations, cannot both be the baseline."""
    for number, result in enumerate(benchmark_results):
        if any(other.name == result.name for other in benchmark_results[:number]):
            problem = f"two rows are called {result.name}: they differ in steps, machine or DeepSpeed configuration"
            raise UsageError(problem, remedy="save one result at a time, to a file each (--baselines)")


def _unfit(result: BenchmarkResult) -> str | None:
    """Why a result is no baseline; None where it is one."""
    if not result.succeeded:
        return f"{result.status}{f': {result.error}' if result.error else ''}"
    if result.environment is None:
        return "its hardware and versions are not known; give its run folder"
    return result.doubts[0] if result.doubts else None


def _figures(entry: store.BaselineEntry) -> str:
    rate = f"{units.format_count(entry.throughput_tokens_per_sec)} tokens/s"
    memory = None if entry.peak_memory_mb is None else entry.peak_memory_mb * units.BYTES_PER_MB
    kind = "CPU" if entry.memory == "host" else "GPU"
    tolerance = units.format_percent(entry.tolerance)
    return f"{rate}, peak {kind} memory {units.format_bytes(memory)}, tolerance {tolerance}"


def _print(verdicts: Sequence[BaselineComparison]) -> None:
    for verdict in verdicts:
        terminal.print_text(
            f"{_sign(verdict)} {terminal.escape_controls(verdict.name)}: {terminal.escape_controls(verdict.message)}"
        )
    terminal.print_text(_summary(verdicts))


def _sign(verdict: BaselineComparison) -> str:
    if verdict.failed or verdict.noisy:
        return "❌" if verdict.failed else "noisy:"
    return "✅" if verdict.comparable and verdict.baseline else "—"


def _summary(verdicts: Sequence[BaselineComparison]) -> str:
    """``3 compared, 1 regressed; 1 too noisy to judge; 1 not comparable; 1 without a baseline``."""
    compared = [verdict for verdict in verdicts if verdict.comparable and verdict.baseline is not None]
    apart = sum(not verdict.comparable for verdict in verdicts)
    new = sum(verdict.comparable and verdict.baseline is None for verdict in verdicts)
    missing = sum("missing" in verdict.regressions for verdict in compared)
    regressions = sum(verdict.failed for verdict in compared) - missing
    counts = [f"{len(compared) - missing} compared, {regressions} regressed"]
    counts += [f"{missing} missing"] if missing else []
    noisy = sum(verdict.noisy for verdict in compared)
    counts += [f"{noisy} too noisy to judge"] if noisy else []
    counts += [f"{apart} not comparable"] if apart else []
    return "; ".join([*counts, *([f"{new} without a baseline"] if new else [])])


def as_data(verdicts: Sequence[BaselineComparison], fail_on: Collection[str] = FAIL_ON_DEFAULT) -> dict[str, Any]:
    """For JSON: names of rows that fail the check, then every verdict. ``fail_on``: of ``FAIL_ON``."""
    return {
        "failed": [verdict.name for verdict in verdicts if _reasons(verdict) & set(fail_on)],
        "not_comparable": [verdict.name for verdict in verdicts if not verdict.comparable],
        "entries": [_entry(verdict, fail_on) for verdict in verdicts],
    }


def _entry(verdict: BaselineComparison, fail_on: Collection[str]) -> dict[str, Any]:
    return {
        "name": verdict.name,
        "failed": bool(_reasons(verdict) & set(fail_on)),
        "passed": verdict.passed,
        "comparable": verdict.comparable,
        "has_baseline": verdict.baseline is not None,
        "regressions": list(verdict.regressions),
        "noisy": verdict.noisy,
        "throughput_ratio": verdict.throughput_ratio,
        "memory_ratio": verdict.memory_ratio,
        "message": verdict.message,
    }


def _require_one_judged(verdicts: Sequence[BaselineComparison]) -> None:
    """Raises UsageError where rows have baselines and not one of them could be judged."""
    apart = [verdict for verdict in verdicts if not verdict.comparable]
    noisy = [verdict for verdict in verdicts if verdict.noisy]
    judged = [each for each in verdicts if each.comparable and each.baseline is not None and not each.noisy]
    if judged or not (apart or noisy):
        return
    if apart:
        raise UsageError(
            terminal.escape_controls(f"nothing was checked: {apart[0].name} is {apart[0].message}"),
            remedy="measure both on one machine with the same versions, or save new baselines",
        )
    raise UsageError(
        terminal.escape_controls(
            f"nothing was checked: noise hides a regression in every row, {noisy[0].name} among them"
        ),
        remedy="measure both again with more --repeats, or on a quieter machine",
    )
