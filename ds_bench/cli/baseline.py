"""The commands ``baseline save`` and ``baseline check``, which keep rows as baselines and compare rows with them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from .. import units
from ..analysis import comparison, intervals, load_results, merge_results
from ..analysis.trial_caveats import UNSTABLE_CV
from ..baselines import gate, store
from ..baselines.gate import BaselineComparison
from ..baselines.result import BenchmarkResult, benchmark_result
from ..config.options import FAIL_ON_DEFAULT
from ..errors import UsageError
from ..report.junit import TestCase, junit_text
from ..system import invocation, terminal
from .report import check_output, write_output

OK, REGRESSION = 0, 3


def save_command(results: Sequence[Path], file: Path, tolerance: float | None) -> int:
    """Save every valid row as a baseline under its name. Return 0. Raises UsageError if no row is valid.

    ``tolerance``: None keeps an existing entry's and gives a new one 0.05. An invalid row, for example one whose
    loss is not finite, is not saved, and a line says why.
    """
    benchmark_results = _read_results(results)
    for name, count in Counter(result.name for result in benchmark_results).items():
        if count > 1:  # such as a strategy with two DeepSpeed configurations
            problem = f"{count} rows are called {name}: they differ in steps, machine or DeepSpeed configuration"
            raise UsageError(problem, remedy="save each result to its own file (--baselines)")
    valid = [result for result in benchmark_results if _invalid_reason(result) is None]
    # Without a valid row, the file of baselines is not written at all.
    saved = gate.save_results(valid, file, tolerance) if valid else []
    with terminal.ignoring_broken_pipe():
        for entry in saved:
            memory = None if entry.peak_memory_mb is None else entry.peak_memory_mb * units.BYTES_PER_MB
            speed = f"{units.format_rate(entry.throughput_tokens_per_sec)} tokens/s"
            if entry.throughput_tokens_per_sec is None:
                speed = f"{units.format_significant(entry.samples_per_sec)} samples/s"
            text = (
                f"saved {entry.name}: {speed}, "
                f"peak {'CPU' if entry.memory == 'host' else 'GPU'} memory {units.format_bytes(memory)}, "
                f"tolerance {units.format_percent(entry.tolerance)}"
            )
            terminal.print_text(terminal.escape_controls(text))
        for result in benchmark_results:
            if (reason := _invalid_reason(result)) is not None:
                terminal.print_text(terminal.escape_controls(f"not saved {result.name}: {reason}"))
    # After the lines above, because the remedy points to them.
    if not saved:
        raise UsageError("nothing was saved: no row can be a baseline", remedy="the lines above say why")
    for entry in saved:
        unit = "tokens/s" if entry.tokens_per_sec_runs else "samples/s"
        rates = entry.tokens_per_sec_runs or entry.samples_per_sec_runs
        for what, runs in ((unit, rates), ("peak memory", entry.peak_memory_mb_runs)):
            deviation = intervals.sample_std(runs)
            if deviation is not None and (variation := deviation * len(runs) / sum(runs)) > UNSTABLE_CV:
                text = f"{what} of its {len(runs)} runs varies by {units.format_percent(variation)}"
                remedy = "measure again on a quieter machine, or with more --repeats"
                terminal.print_text(f"warning: {entry.name}: {text}, which hides smaller changes; {remedy}", sys.stderr)
    terminal.print_text(f"baselines written to {file}", sys.stderr)
    return OK


def check_command(
    results: Sequence[Path],
    file: Path,
    as_json: bool,
    fail_on: Collection[str] = FAIL_ON_DEFAULT,
    junit: Path | None = None,
) -> int:
    """Compare every row with its baseline. Return 3 if a reason in ``fail_on`` applies to any row, else 0.

    ``junit``: file to write, with one test per row. A test fails if its row causes exit code 3, and is skipped if the
    row was not judged.

    Raises UsageError (exit code 2) if the file of baselines is missing or invalid or, after printing the lines, if no
    row could be judged, because such a check must not pass.
    """
    if junit is not None:
        check_output("--junit", junit)
    benchmark_results = _read_results(results)
    # Without this, a mistyped file name would look like rows without baselines.
    if store.read(file) is None:
        raise UsageError(f"--baselines {file}: no such file", remedy=f"create it with {_save_command(file)}")
    verdicts = [gate.compare_to_baseline(result, path=file) for result in benchmark_results]
    for entry in gate.missing_baselines(benchmark_results, file):
        text = "missing: the saved run had this row, but the result does not"
        verdicts.append(
            BaselineComparison(name=entry.name, passed=False, message=text, baseline=entry, regressions=("missing",))
        )
    failed = [verdict for verdict in verdicts if _reasons(verdict) & set(fail_on)]
    with terminal.ignoring_broken_pipe():
        if as_json:
            terminal.print_json(json.dumps(as_data(verdicts, fail_on), indent=1, ensure_ascii=True, allow_nan=False))
        else:
            _print_verdicts(verdicts)
    # Written before the exit code is decided, so that CI can show the tests of a failed check.
    if junit is not None:
        cases = [
            TestCase(
                name=verdict.name,
                outcome="failure" if verdict in failed else "passed" if _was_judged(verdict) else "skipped",
                message=verdict.message,
            )
            for verdict in verdicts
        ]
        write_output("--junit", junit, junit_text("ds_bench baseline", cases))
    # A regression takes precedence over the error below.
    if failed:
        return REGRESSION
    if any(map(_was_judged, verdicts)):
        return OK
    incomparable = [verdict for verdict in verdicts if not verdict.comparable]
    noisy = [verdict for verdict in verdicts if verdict.noisy]
    problem = f"no row has a baseline in {file}"
    remedy = f"save the result with {_save_command(file)}, or give another file"
    if noisy:
        problem = f"noise could hide a regression in every row, for example {noisy[0].name}"
        remedy = "measure both again with more --repeats, or on a quieter machine"
    if incomparable:
        problem = f"{incomparable[0].name} is {incomparable[0].message}"
        remedy = "measure both on one machine with the same versions, or save new baselines"
    raise UsageError(terminal.escape_controls(f"nothing was checked: {problem}"), remedy=remedy)


def _was_judged(verdict: BaselineComparison) -> bool:
    """Return whether a row was compared with its baseline and noise did not hide the answer."""
    has_figures = verdict.baseline is not None and "missing" not in verdict.regressions
    return verdict.comparable and has_figures and not verdict.noisy


def _reasons(verdict: BaselineComparison) -> set[str]:
    """Return the reasons of ``FAIL_ON`` that apply to a row."""
    # A missing row has failed too, but counts only as missing.
    failed = {"missing" if "missing" in verdict.regressions else "regression"} if verdict.failed else set()
    return failed | ({"unmatched"} if verdict.unmatched else set()) | ({"noisy"} if verdict.noisy else set())


def _read_results(paths: Sequence[Path]) -> list[BenchmarkResult]:
    """Return one result per row of the files, with repeats pooled. Raises UsageError."""
    benchmark_results = []
    for group in merge_results.merge([load_results.load(path) for path in paths]):
        environment = group.environments[0] if group.environments else None  # all environments of a group are alike
        rows = comparison.compare(group.runs, environments=group.environments).rows
        benchmark_results += [benchmark_result(row.runs, environment) for row in rows]
    return benchmark_results


def _invalid_reason(result: BenchmarkResult) -> str | None:
    """Return why a result cannot be a baseline; None if it can."""
    if not result.succeeded:
        return f"{result.status}{f': {result.error}' if result.error else ''}"
    if result.environment is None:
        return "its hardware and versions are not known; give its run folder"
    return next(iter([*result.doubts, *result.disturbances]), None)


def _save_command(file: Path) -> str:
    given = [] if file == gate.DEFAULT_PATH else ["--baselines", str(file)]
    return str(invocation.command("baseline", "save", "RUN", *given))


def _print_verdicts(verdicts: Sequence[BaselineComparison]) -> None:
    """Print a line per row, then ``3 compared, 1 regressed; 1 too noisy to judge; 1 without a baseline``."""
    for verdict in verdicts:
        sign = "✅" if verdict.comparable and verdict.baseline else "—"
        if verdict.failed or verdict.noisy:
            sign = "❌" if verdict.failed else "noisy:"
        terminal.print_text(terminal.escape_controls(f"{sign} {verdict.name}: {verdict.message}"))
    # Missing rows count as comparable and failed, although no figure was compared.
    missing = sum("missing" in verdict.regressions for verdict in verdicts)
    compared = sum(verdict.comparable and verdict.baseline is not None for verdict in verdicts) - missing
    regressed = sum(verdict.failed for verdict in verdicts) - missing
    optional = {
        "missing": missing,
        "too noisy to judge": sum(verdict.noisy for verdict in verdicts),
        "not comparable": sum(not verdict.comparable for verdict in verdicts),
        "without a baseline": sum(verdict.unmatched for verdict in verdicts),
        "failed without a baseline": sum(
            verdict.comparable and verdict.baseline is None and not verdict.unmatched for verdict in verdicts
        ),
    }
    counts = [f"{count} {text}" for text, count in optional.items() if count]
    terminal.print_text("; ".join([f"{compared} compared, {regressed} regressed", *counts]))


def as_data(verdicts: Sequence[BaselineComparison], fail_on: Collection[str] = FAIL_ON_DEFAULT) -> dict[str, Any]:
    """Return the verdicts for JSON. ``failed``: names of the rows that fail for a reason in ``fail_on``."""
    entries = [
        {
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
        for verdict in verdicts
    ]
    return {
        "failed": [each["name"] for each in entries if each["failed"]],
        "not_comparable": [each["name"] for each in entries if not each["comparable"]],
        "entries": entries,
    }
