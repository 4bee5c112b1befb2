"""How often rows that are equal are said to differ: a simulation of noise, no measurement of any hardware.

    python bench/false_differences.py                     10,000 tables of each case, some minutes
    python bench/false_differences.py --tables 500

Simulated are the throughputs of runs whose true speed is the same. Their logarithms vary from run to run by a normal
deviate each ("independent"), by a random walk over the order of the runs ("wandering"), and with "sessions" by another
deviate that all runs of one result share. Real are the order of the rounds and all that judges the throughputs: the
recommendation with its headline, the intervals of a comparison and of ``compare``, and ``baseline check``. Not
simulated: warm-up, lost runs, memory, rows of unequal noise. A real machine's noise is none of these exactly.
"""

from __future__ import annotations

import argparse
import math
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

import harness
import numpy as np
from numpy.random import Generator

from ds_bench.analysis.comparison import compare
from ds_bench.analysis.intervals import RowRatios, Run, geometric_mean, ratio_interval
from ds_bench.analysis.summary import summarise
from ds_bench.baselines import BaselineEntry, compare_to_baseline
from ds_bench.baselines.result import BenchmarkResult, benchmark_result
from ds_bench.config.spec import Configuration
from ds_bench.planner import ordered_for_round
from ds_bench.recommend.recommendation import recommend
from ds_bench.records.json_files import write_json
from ds_bench.records.schema import TrialRecord
from tests.support import fakes

_RUN_SPREAD = 0.01
"""Standard deviation of the logarithm of a run's throughput; of a step of the random walk."""
_STEPS, _STEP_SECONDS, _STEP_SPREAD = 20, 0.25, 0.01
_TOLERANCE = 0.05
_SEED = 20261123


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of table of equal rows."""

    claim: str
    """What is said of them, which is false."""
    rows: int
    runs: int
    """Of each row, or of each of two results."""
    noise: str
    is_false: Callable[[Generator], bool]
    """Whether one more table, drawn from these numbers, shows the claim."""


def cases() -> Iterator[Case]:
    for spread in (0.03, 0.05):
        is_false = partial(names_a_fastest, spread=spread)
        yield Case("headline names a fastest row", 4, 1, f"independent, runs {spread:.0%}", is_false)
    for rows, runs in product((4, 8, 12), (3, 5)):
        is_false = partial(tells_fastest_from_another, count=rows, runs=runs)
        yield Case("fastest row told from another one", rows, runs, "independent, runs 1%", is_false)
    for rows, runs in product((8, 12), (3, 5)):
        is_false = partial(tells_a_row_from_the_reference, count=rows, runs=runs)
        yield Case("a row told from the reference", rows, runs, "wandering, 1% a run", is_false)
    for runs in (3, 5):
        is_false = partial(compare_differs, runs=runs, session=0.01)
        yield Case("compare finds a difference", 1, runs, "runs 1%, sessions 1%", is_false)
    for session, runs in product((0.03, 0.05), (3, 5)):
        is_false = partial(check_fails, runs=runs, session=session)
        claim = f"baseline check, tolerance {_TOLERANCE:.0%}: regression"
        yield Case(claim, 1, runs, f"runs 1%, sessions {session:.0%}", is_false)


# ------------------------------------------------------------------ rows of one comparison


def names_a_fastest(numbers: Generator, *, spread: float) -> bool:
    """One run each of the four ZeRO stages, as the end of a comparison judges it."""
    summaries = []
    for position, record in enumerate(_records()):
        mean = _STEP_SECONDS * math.exp(numbers.normal(0, spread))
        seconds = tuple((mean * np.exp(numbers.normal(0, _STEP_SPREAD, _STEPS))).tolist())
        ranks = tuple(replace(rank, step_seconds=seconds, window_seconds=sum(seconds)) for rank in record.ranks)
        begun = f"2026-11-23T09:{position:02d}:00+00:00"
        summaries.append(summarise(replace(record, ranks=ranks, started_at=begun), None, None))
    return "fastest of" in recommend(compare(summaries, environments=[fakes.environment()])).headline


@cache
def _records() -> tuple[TrialRecord, ...]:
    on, of = fakes.placement(accelerator="cuda", num_gpus=2), fakes.workload(num_steps=_STEPS)
    rows = enumerate(_configurations(4))
    return tuple(fakes.success(fakes.trial(row, on=on, of=of, round_position=place)) for place, row in rows)


@cache
def _configurations(count: int) -> tuple[Configuration, ...]:
    if count <= 4:
        return tuple(fakes.zero(stage) for stage in range(count))
    return tuple(replace(fakes.zero(index % 4), name=f"row{index}") for index in range(count))


def row_ratios(numbers: Generator, count: int, runs: int, *, wandering: bool) -> tuple[RowRatios, list[str], str]:
    """One comparison of equal rows, its rows, the first of which is the reference, and the fastest of them."""
    names = [row.name for row in _configurations(count)]
    seed = int(numbers.integers(2**31))
    order = [
        (row.name, number) for number in range(runs) for row in ordered_for_round(_configurations(count), seed, number)
    ]
    noise = numbers.normal(0, _RUN_SPREAD, len(order))
    means = np.exp(np.cumsum(noise) if wandering else noise).tolist()
    rows: dict[str, list[Run]] = {name: [] for name in names}
    for position, ((name, number), mean) in enumerate(zip(order, means, strict=True)):
        rows[name].append(Run(mean=mean, round=number, position=position))
    fastest = max(names, key=lambda name: geometric_mean([run.mean for run in rows[name]]) or 0.0)
    return RowRatios(rows, names[0]), names, fastest


def tells_fastest_from_another(numbers: Generator, *, count: int, runs: int) -> bool:
    ratios, names, fastest = row_ratios(numbers, count, runs, wandering=False)
    return _differs_from_any(ratios, fastest, names)


def tells_a_row_from_the_reference(numbers: Generator, *, count: int, runs: int) -> bool:
    ratios, names, _ = row_ratios(numbers, count, runs, wandering=True)
    return _differs_from_any(ratios, names[0], names)


def _differs_from_any(ratios: RowRatios, row: str, names: Sequence[str]) -> bool:
    intervals = (ratios.between(row, name) for name in names)
    return any(interval is not None and interval.distinguishable for interval in intervals)


# ------------------------------------------------------------------ two results of the same code


def session_means(numbers: Generator, runs: int, session: float) -> list[float]:
    """Throughputs of one result's runs, in tokens/s."""
    logs = numbers.normal(0, session) + numbers.normal(0, _RUN_SPREAD, runs)
    means: list[float] = (10_000 * np.exp(logs)).tolist()
    return means


def compare_differs(numbers: Generator, *, runs: int, session: float) -> bool:
    before, after = (session_means(numbers, runs, session) for _ in range(2))
    interval = ratio_interval(after, before)
    return interval is not None and interval.distinguishable


def check_fails(numbers: Generator, *, runs: int, session: float) -> bool:
    before, after = (_result(session_means(numbers, runs, session)) for _ in range(2))
    return compare_to_baseline(after, BaselineEntry.of(before, _TOLERANCE)).failed


def _result(means: Sequence[float]) -> BenchmarkResult:
    peaks = (_row().peak_memory_mb or 0.0,) * len(means)
    return replace(
        _row(),
        throughput_tokens_per_sec=geometric_mean(means),
        tokens_per_sec_runs=tuple(means),
        peak_memory_mb_runs=peaks,
    )


@cache
def _row() -> BenchmarkResult:
    return benchmark_result([summarise(_records()[0], None, None)], fakes.environment())


# ------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--tables", type=int, default=10_000, metavar="N", help="of each case (default: 10000)")
    add("--output", type=Path, default=None, metavar="FILE.json", help="also write the figures there")
    args = parser.parse_args(arguments)
    if args.tables < 1:
        parser.error("--tables takes 1 or more")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    print(f"simulation of equal rows, {args.tables} tables of each case; no hardware is measured")
    print(f"{'what is said of them':46}{'rows':>5}{'runs':>5}  {'noise':22}{'false':>8}")
    figures = []
    for index, case in enumerate(cases()):
        numbers = np.random.default_rng([_SEED, index])  # of its own, so that no case depends on those before it
        false = sum(case.is_false(numbers) for _ in range(args.tables))
        facts = {"claim": case.claim, "rows": case.rows, "runs": case.runs, "noise": case.noise}
        figures.append({**facts, "tables": args.tables, "false": false, "share": false / args.tables})
        print(f"{case.claim:46}{case.rows:5}{case.runs:5}  {case.noise:22}{false / args.tables:8.1%}", flush=True)
    if args.output is not None:
        versions = {"python": platform.python_version(), **{name: version(name) for name in ("numpy", "scipy")}}
        written = {
            "what": "a simulation of rows that are equal; no measurement of hardware",
            "command": shlex.join(["python", "bench/false_differences.py", *(arguments or sys.argv[1:])]),
            "date": datetime.now(UTC).date().isoformat(),
            "versions": versions,
            "seed": _SEED,
        }
        write_json(args.output, {**written, "figures": figures})
    return 0


if __name__ == "__main__":
    harness.run("false_differences", main)
