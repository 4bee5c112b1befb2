"""Simulate how often equal rows are reported as different, and how often a true difference is found.

    python bench/false_differences.py                     10,000 tables of each case, about half an hour
    python bench/false_differences.py --tables 500

The simulation draws the throughput of each run; ``NOISES`` defines how it varies from run to run. With "sessions", all
runs of one result share another normal deviate. The order of the runs and all judgments on their throughputs come from
the package's own code: the recommendation, the intervals of a comparison and of ``compare``, and ``baseline check``.
Not simulated: warm-up, lost runs, memory, rows of unequal noise. The noise of a real machine is not exactly any of
these.
"""

from __future__ import annotations

import argparse
import math
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.random import Generator

from ds_bench.analysis.comparison import compare
from ds_bench.analysis.intervals import RowRatios, RunMean, geometric_mean, ratio_interval
from ds_bench.analysis.row import make_run
from ds_bench.baselines import BaselineEntry, compare_to_baseline
from ds_bench.baselines.result import BenchmarkResult, benchmark_result
from ds_bench.config.spec import Configuration
from ds_bench.planning.trial_planner import ordered_for_round
from ds_bench.recommend.recommendation import recommend
from ds_bench.records.json_files import write_json
from ds_bench.records.schema import TrialRecord
from tests.support import fakes

_RUN_SPREAD = 0.01
"""Standard deviation of the logarithm of a run's throughput: the unit of ``NOISES``."""
_STEPS, _STEP_SECONDS, _STEP_SPREAD = 20, 0.25, 0.01
_TOLERANCE = 0.05
_SEED = 20261123


def autocorrelated(numbers: Generator, runs: int, _rows: int) -> Any:
    """AR(1) noise of unit variance that passes 80 % of itself on to the next run."""
    noise = numbers.standard_normal(runs)
    for place in range(1, runs):
        noise[place] = 0.8 * noise[place - 1] + 0.6 * noise[place]
    return noise


def periodic(numbers: Generator, runs: int, rows: int) -> Any:
    """A sine of amplitude 3 over unit noise; its period is 2 runs to 3 rounds, its phase arbitrary."""
    period, phase = numbers.uniform(2, 3 * rows), numbers.uniform(0, 2 * math.pi)
    return 3 * np.sin(2 * math.pi * np.arange(runs) / period + phase) + numbers.standard_normal(runs)


NOISES: dict[str, Callable[[Generator, int, int], Any]] = {
    "independent": lambda numbers, runs, _: numbers.standard_normal(runs),
    "AR(1), 0.8": autocorrelated,
    "linear drift": lambda numbers, runs, _: numbers.standard_normal(runs) + np.arange(runs),
    "random walk": lambda numbers, runs, _: np.cumsum(numbers.standard_normal(runs)),
    "periodic": periodic,
    "heavy tails": lambda numbers, runs, _: numbers.standard_t(3, runs) / math.sqrt(3),
}
"""Logarithms of throughputs in the order of the runs, in units of ``_RUN_SPREAD``. Arguments: total runs, rows."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of table."""

    claims: tuple[str, ...]
    """Claims about the rows. All are false, except those that begin with "true"."""
    rows: int
    runs: int
    """Runs of each row, or of each of two results."""
    noise: str
    said: Callable[[Generator], Sequence[bool]]
    """Draws one more table from these numbers. Returns which of the claims it makes."""


def cases() -> Iterator[Case]:
    for rows, runs in product((2, 4, 8), (1, 2)):
        said = partial(decides, count=rows, runs=runs, spread=0.05)
        yield Case(("answer is decided",), rows, runs, "independent, runs 5%", said)
    for noise, rows, runs in product(NOISES, (3, 4, 6, 8, 12), (3, 5)):
        said = partial(tells_rows_apart, count=rows, runs=runs, noise=noise)
        claims = ("fastest row differs from another", "a row differs from the reference", "either of the two")
        yield Case(claims, rows, runs, noise, said)
    for gain, rows, runs in product((0.03, 0.05), (4, 8, 12), (3, 5)):
        said = partial(finds_faster_row, count=rows, runs=runs, gain=gain)
        yield Case((f"true: a row {gain:.0%} faster than the reference",), rows, runs, "independent", said)
    for runs in (3, 5):
        said = partial(compare_differs, runs=runs, session=0.01)
        yield Case(("compare finds a difference",), 1, runs, "runs 1%, sessions 1%", said)
    for session, runs in product((0.03, 0.05), (3, 5)):
        said = partial(check_fails, runs=runs, session=session)
        claim = f"baseline check, tolerance {_TOLERANCE:.0%}: regression"
        yield Case((claim,), 1, runs, f"runs 1%, sessions {session:.0%}", said)


# ------------------------------------------------------------------ rows of one comparison


def decides(numbers: Generator, *, count: int, runs: int, spread: float) -> list[bool]:
    """Equal ZeRO rows with fewer than three runs each, as the end of a comparison judges them."""
    summaries = []
    for position, record in enumerate(_records(count, runs)):
        mean = _STEP_SECONDS * math.exp(numbers.normal(0, spread))
        seconds = tuple((mean * np.exp(numbers.normal(0, _STEP_SPREAD, _STEPS))).tolist())
        ranks = tuple(replace(rank, step_seconds=seconds, window_seconds=sum(seconds)) for rank in record.ranks)
        begun = f"2026-11-23T09:{position:02d}:00+00:00"
        summaries.append(make_run(replace(record, ranks=ranks, started_at=begun), None, None))
    return [recommend(compare(summaries, environments=[fakes.environment()])).decided]


@cache
def _records(count: int, runs: int) -> tuple[TrialRecord, ...]:
    on, of = fakes.placement(accelerator="cuda", num_gpus=2), fakes.workload(num_steps=_STEPS)
    records = []
    for number, (place, row) in product(range(runs), enumerate(_configurations(count))):
        trial = fakes.trial(row, on=on, of=of, repeat=number, round_position=place)
        # Trials with the same DeepSpeed configuration would be runs of one row.
        records.append(fakes.success(replace(trial, ds_config={**trial.ds_config, "steps_per_print": place + 1})))
    return tuple(records)


@cache
def _configurations(count: int) -> tuple[Configuration, ...]:
    if count <= 4:
        return tuple(fakes.zero(stage) for stage in range(count))
    return tuple(replace(fakes.zero(index % 4), name=f"row{index}") for index in range(count))


def row_ratios(
    numbers: Generator, count: int, runs: int, noise: str, gain: float = 0.0, lost: int = 0
) -> tuple[RowRatios, list[str], str]:
    """One comparison of rows, their names with the reference first, and the fastest of them.

    All are equally fast except the last one, which is faster by ``gain``. ``lost``: runs of the second row that fail.
    """
    names = [row.name for row in _configurations(count)]
    seed = int(numbers.integers(2**31))
    order = [
        (row.name, number) for number in range(runs) for row in ordered_for_round(_configurations(count), seed, number)
    ]
    means = np.exp(_RUN_SPREAD * NOISES[noise](numbers, len(order), count)).tolist()
    rows: dict[str, list[RunMean]] = {name: [] for name in names}
    for position, ((name, number), mean) in enumerate(zip(order, means, strict=True)):
        factor = 1 + gain if name == names[-1] else 1.0
        rows[name].append(RunMean(mean=mean * factor, round=number, position=position))
    del rows[names[1]][runs - lost :]
    fastest = max(names, key=lambda name: geometric_mean([run.mean for run in rows[name]]) or 0.0)
    return RowRatios(rows, names[0]), names, fastest


def tells_rows_apart(numbers: Generator, *, count: int, runs: int, noise: str) -> list[bool]:
    ratios, names, fastest = row_ratios(numbers, count, runs, noise)
    said = [differs_from_any(ratios, row, names) for row in (fastest, names[0])]
    return [*said, any(said)]


def finds_faster_row(numbers: Generator, *, count: int, runs: int, gain: float) -> list[bool]:
    ratios, names, _ = row_ratios(numbers, count, runs, "independent", gain)
    return [differs_from_any(ratios, names[0], names[-1:])]


def differs_from_any(ratios: RowRatios, row: str, names: Sequence[str]) -> bool:
    intervals = (ratios.between(row, name) for name in names)
    return any(interval is not None and interval.distinguishable for interval in intervals)


# ------------------------------------------------------------------ two results of the same code


def session_means(numbers: Generator, runs: int, session: float) -> list[float]:
    """Throughputs of one result's runs, in tokens/s."""
    logs = numbers.normal(0, session) + numbers.normal(0, _RUN_SPREAD, runs)
    means: list[float] = (10_000 * np.exp(logs)).tolist()
    return means


def compare_differs(numbers: Generator, *, runs: int, session: float) -> list[bool]:
    before, after = (session_means(numbers, runs, session) for _ in range(2))
    interval = ratio_interval(after, before)
    return [interval is not None and interval.distinguishable]


def check_fails(numbers: Generator, *, runs: int, session: float) -> list[bool]:
    before, after = (_result(session_means(numbers, runs, session)) for _ in range(2))
    return [compare_to_baseline(after, BaselineEntry.of(before, _TOLERANCE)).failed]


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
    return benchmark_result([make_run(_records(1, 1)[0], None, None)], fakes.environment())


# ------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--tables", type=int, default=10_000, metavar="N", help="tables of each case (default: 10000)")
    add("--output", type=Path, default=None, metavar="FILE.json", help="also write the figures there")
    args = parser.parse_args(arguments)
    if args.tables < 1:
        parser.error("--tables must be at least 1")
    return args


def count_claims(index: int, *, tables: int) -> list[int]:
    """Number of tables of a case that make each of its claims."""
    case = list(cases())[index]
    numbers = np.random.default_rng([_SEED, index])  # so that no case depends on those before it
    counts: list[int] = np.sum([case.said(numbers) for _ in range(tables)], axis=0).tolist()
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    print(f"a simulation, {args.tables} tables of each case; no hardware is measured")
    print(f"{'claim':46}{'rows':>5}{'runs':>5}  {'noise':22}{'share':>8}{'±':>6}")
    figures = []
    with ProcessPoolExecutor() as pool:
        counted = pool.map(partial(count_claims, tables=args.tables), range(len(list(cases()))))
        for case, counts in zip(cases(), counted, strict=True):
            for claim, count in zip(case.claims, counts, strict=True):
                share = count / args.tables
                error = math.sqrt(share * (1 - share) / args.tables)
                facts = {"claim": claim, "rows": case.rows, "runs": case.runs, "noise": case.noise}
                figures.append({**facts, "tables": args.tables, "said": count, "share": share, "standard_error": error})
                print(f"{claim:46}{case.rows:5}{case.runs:5}  {case.noise:22}{share:8.1%}{error:6.1%}", flush=True)
    if args.output is not None:
        versions = {"python": platform.python_version(), **{name: version(name) for name in ("numpy", "scipy")}}
        written = {
            "what": "a simulation; no measurement of hardware",
            "command": shlex.join(["python", "bench/false_differences.py", *(arguments or sys.argv[1:])]),
            "date": datetime.now(UTC).date().isoformat(),
            "versions": versions,
            "seed": _SEED,
        }
        write_json(args.output, {**written, "figures": figures})
    return 0


if __name__ == "__main__":
    harness.run("false_differences", main)
