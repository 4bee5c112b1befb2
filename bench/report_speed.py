"""How long ``report`` takes on a large result, on whatever machine this runs on.

    python bench/report_speed.py                       ten thousand records, five times
    python bench/report_speed.py --records 1000

Writes a run folder and its flat JSON as a comparison leaves them. The records are grown from those kept in
``tests/data/zero_run``: four strategies, two ranks, different numbers in each. The command runs as a
user runs it. CPU seconds (user and system) say what it costs; a bare ``json.loads`` of the same lines is shown next to
them, which takes the machine's own speed out of the figure.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import BenchError

from ds_bench.analysis import load_results
from ds_bench.analysis.comparison import rows_of
from ds_bench.config.identity import work_key
from ds_bench.config.spec import Trial
from ds_bench.models import presets
from ds_bench.prediction import predicted_memory
from ds_bench.prediction.model_profile import find_profile
from ds_bench.records import json_files
from ds_bench.records.json_files import write_json
from ds_bench.records.reader import parse_record
from ds_bench.records.result_files import flat_json_path
from ds_bench.records.run_folder import RECORDS_FILE, RUN_FILE
from ds_bench.records.schema import SCHEMA_VERSION

Json = dict[str, Any]

_KEPT = harness.ROOT / "tests" / "data" / "zero_run" / "runs" / "zero_20261121_093000"
_STAGES = (0, 1, 2, 3)
_STEPS, _WARMUP_STEPS = 20, 5
_WHOLE_BYTES = ("host_peak_bytes", "host_peak_steps_bytes", "host_pss_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One run of the command, from outside."""

    cpu_seconds: float
    """User and system, its start-up included."""
    wall_seconds: float
    peak_bytes: int
    """Peak of its resident memory."""


def grown(count: int) -> Iterator[Json]:
    """Records in the order of a plan: every strategy, then every strategy again. The same ones in every call."""
    numbers = random.Random(1)
    templates = [_template(stage) for stage in _STAGES]
    for index in range(count):
        entry = copy.deepcopy(templates[index % len(templates)])
        repeat = index // len(templates)
        entry["trial"]["repeat"] = repeat
        entry["trial"]["trial_id"] = f"{index:02d}_{entry['trial']['configuration']['name']}_r{repeat}"
        entry["wall_seconds"] *= numbers.uniform(0.9, 1.1)
        for rank in entry["ranks"]:
            _vary(rank, numbers)
        yield entry


def _template(stage: int) -> Json:
    """The kept record of stage 0 or 2, turned into one of ``stage``, with its prediction added as a run does."""
    lines = (_KEPT / RECORDS_FILE).read_text(encoding="utf-8").splitlines()
    entry: Json = parse_record(lines[0 if stage == 0 else 1].encode(), str(_KEPT)).to_dict()
    trial = entry["trial"] = json.loads(json.dumps(entry["trial"]))  # nothing shared with another part of it
    trial["configuration"] |= {"name": f"zero{stage}", "label": f"ZeRO-{stage}"}
    trial["configuration"]["deepspeed_config"]["zero_optimization"]["stage"] = stage
    trial["workload"] |= {"num_steps": _STEPS, "warmup_steps": _WARMUP_STEPS}
    trial["ds_config"]["zero_optimization"]["stage"] = stage
    for rank in entry["ranks"]:
        rank["resolved_config"]["zero_config"]["stage"] = stage
    trial |= {"skipped": None, "prediction": _prediction(json_files.build(Trial, trial))}
    return entry


def _prediction(trial: Trial) -> Json:
    facts = presets.find_preset(trial.workload.model)
    if facts is None:
        raise BenchError(f"{trial.workload.model} is not a preset")
    work = trial.workload
    profile = find_profile(facts, work.seq_length, accelerator=trial.placement.accelerator, dropout=work.dropout)
    return predicted_memory.predict(profile, trial.workload, trial.placement, trial.ds_config).to_dict()


def _vary(rank: Json, numbers: random.Random) -> None:
    rank["step_seconds"] = [numbers.gauss(0.1, 0.002) for _ in range(_STEPS)]
    rank["warmup_step_seconds"] = [numbers.uniform(0.1, 0.5) for _ in range(_WARMUP_STEPS)]
    rank["window_seconds"] = sum(rank["step_seconds"]) * numbers.uniform(1.0, 1.01)
    rank["losses"] = [numbers.gauss(6.9, 0.0001) for _ in range(_STEPS + _WARMUP_STEPS)]
    rank |= {name: int(rank[name] * numbers.uniform(0.9, 1.1)) for name in _WHOLE_BYTES}
    rank["phase_seconds"] = {name: value * numbers.uniform(0.9, 1.1) for name, value in rank["phase_seconds"].items()}
    rank["ledger"]["cpu"]["other"] = numbers.randrange(2000, 4000)


def write_result(folder: Path, count: int) -> None:
    """A run folder with that many records, their trials in run.json, and the flat JSON next to ``runs``."""
    folder.mkdir(parents=True)
    run = json.loads((_KEPT / RUN_FILE).read_text(encoding="utf-8"))
    run |= {"schema_version": SCHEMA_VERSION, "trial_count": count, "trials": []}
    with (folder / RECORDS_FILE).open("w", encoding="utf-8") as file:
        for entry in grown(count):
            file.write(json.dumps(entry) + "\n")
            run["trials"].append({"key": work_key(json_files.build(Trial, entry["trial"])), **entry["trial"]})
    write_json(folder / RUN_FILE, run)
    write_json(flat_json_path(folder), rows_of(load_results.load(folder).runs))


def report(folder: Path) -> Cost:
    """Runs the command on that result. Raises BenchError if it fails."""
    log = folder / "report.log"
    command = [sys.executable, "-m", "ds_bench", "report", str(folder)]
    begun = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=harness.ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise BenchError(f"report ended with code {process.returncode}\n{harness.tail(log)}")
    return Cost(cpu_seconds=used.ru_utime + used.ru_stime, wall_seconds=wall, peak_bytes=used.ru_maxrss * 1024)


def bare_parse_seconds(folder: Path) -> float:
    """CPU seconds of the standard parser on every line, each value dropped immediately."""
    lines = (folder / RECORDS_FILE).read_bytes().splitlines()
    begun = time.process_time()
    for line in lines:
        json.loads(line)
    return time.process_time() - begun


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--records", type=int, default=10_000, metavar="N", help="records in the result (default: 10000)")
    add("--times", type=int, default=5, metavar="N", help="runs of the command (default: 5)")
    add("--output", type=Path, default=None, metavar="FILE.json", help="also write the figures there")
    args = parser.parse_args(arguments)
    if args.records < 1 or args.times < 1:
        parser.error("--records and --times must be at least 1")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="ds_bench_report_") as scratch:
        folder = Path(scratch) / "runs" / "zero_20261121_093000"
        write_result(folder, args.records)
        sizes = {name: (folder / name).stat().st_size for name in (RECORDS_FILE, RUN_FILE)}
        held = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.items())
        print(f"report on {args.records} records of {len(_STAGES)} strategies, 2 ranks × {_STEPS} steps: {held}")
        bare, costs = [], []
        for number in range(args.times):  # in turn, so that a busy moment affects both
            bare.append(bare_parse_seconds(folder))
            costs.append(report(folder))
            print(f"  {number + 1}: report {_text(costs[-1])}; bare json.loads {bare[-1]:.2f} s CPU", flush=True)
    cpu, parsing = (statistics.median(values) for values in ([each.cpu_seconds for each in costs], bare))
    wall = statistics.median(each.wall_seconds for each in costs)
    peak = max(each.peak_bytes for each in costs)
    print(
        f"median: {cpu:.2f} s CPU, {wall:.2f} s wall; {cpu / parsing:.2f} of bare json.loads ({parsing:.2f} s); "
        f"{peak / 2**20:.0f} MiB"
    )
    if args.output is not None:
        figures = {
            "cpu_seconds": cpu,
            "wall_seconds": wall,
            "bare_json_seconds": parsing,
            "ratio": cpu / parsing,
            "peak_bytes": peak,
        }
        write_json(args.output, {"records": args.records, "bytes": sizes, **figures})
    return 0


def _text(cost: Cost) -> str:
    return f"{cost.cpu_seconds:.2f} s CPU, {cost.wall_seconds:.2f} s wall, {cost.peak_bytes / 2**20:.0f} MiB"


if __name__ == "__main__":
    harness.end_on_sigterm()
    try:
        sys.exit(main())
    except BenchError as error:
        print(f"report_speed: {error}", file=sys.stderr)
        sys.exit(1)
