"""Predicted memory against measured, on whatever machine this runs on: a check of ``ds_bench.prediction``.

    python bench/prediction.py                                  every strategy but NVMe, tiny preset
    python bench/prediction.py --model meta-llama/Llama-3.1-8B --num-gpus 8 --batch-size 1 --nvme-path /mnt/nvme

    python bench/prediction.py --records DIR                    compares the records below DIR, without training

Trains each strategy once with the product, then prints what its run had predicted next to what it measured: a rank's
ledger, cell by cell; on GPUs also the minimum and the reserved memory that a row needs, the allocator's peak, and the
memory in use outside it. A strategy that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import harness
from harness import BenchError

from ds_bench.errors import UsageError
from ds_bench.prediction import predicted_memory, trial_predictions
from ds_bench.records.json_files import write_json
from ds_bench.records.reader import read_records
from ds_bench.records.schema import SUCCESS, TrialRecord, measured_values
from ds_bench.units import format_bytes, format_ratio

_OFFLOADS = ("cpu_optimizer", "cpu_full", "nvme")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One number, predicted and measured."""

    strategy: str
    what: str
    """``gpu parameters``, ``gpu peak``, …"""
    predicted_bytes: int
    measured_bytes: int

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return self.predicted_bytes / self.measured_bytes if self.measured_bytes else None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    harness.add_setting_flags(parser, num_steps=3)
    add = parser.add_argument
    add("--num-gpus", type=int, default=None, metavar="N", help="GPUs or CPU ranks (default: all; 2 on CPU)")
    add("--nvme-path", default=None, metavar="DIR", help="also offload to NVMe there")
    add("--activation-checkpointing", action="store_true", help="recompute activations")
    add("--timeout", type=float, default=1800.0, metavar="SECONDS", help="per comparison (default: 1800)")
    add(
        "--records",
        type=Path,
        default=None,
        metavar="DIR",
        help="instead of training, compare the runs below this folder",
    )
    harness.add_runs_flag(parser)
    return parser.parse_args(arguments)


def commands(args: argparse.Namespace, setting: harness.Setting, scratch: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folder and the command of both scripts."""
    extra = ["--activation-checkpointing"] if args.activation_checkpointing else []
    offloads = [name for name in _OFFLOADS if name != "nvme" or args.nvme_path]
    nvme = ["--nvme-path", args.nvme_path] if args.nvme_path else []
    for script, chosen in (
        ("zero_stage_comparison.py", ["--stages", "0", "1", "2", "3"]),
        ("offload_comparison.py", ["--strategies", *offloads, *nvme]),
    ):
        folder = scratch / Path(script).stem
        folder.mkdir()
        command = [sys.executable, str(harness.ROOT / script), *setting.flags(), *extra, *chosen]
        yield folder, [*command, "--output-dir", str(folder)]


def records(folder: Path) -> list[TrialRecord]:
    """The last record of each trial of the runs below a folder; reports lines and files that cannot be read."""
    found: list[TrialRecord] = []
    notes: list[str] = []
    for path in sorted(folder.rglob("records.jsonl")):
        try:
            found += read_records(path, (), notes)
        except UsageError as error:
            notes.append(error.problem)
    for note in notes:
        print(note, file=sys.stderr)
    return found


def pairs(record: TrialRecord) -> list[Pair]:
    """Every cell of the ledger, each from its fullest rank, and on GPUs the peaks."""
    trial, found = record.trial, trial_predictions.stored_prediction(record.trial)
    if found is None:
        return []
    cells: dict[tuple[str, str], int] = {}
    for rank in record.ranks:
        for tier, row in rank.ledger.items():
            for name, size in row.items():
                cells[tier, name] = max(size, cells.get((tier, name), 0))
    both = [(tier, name) for tier, row in found.ledger.items() for name in row] + [c for c in cells if c[1] != "other"]
    result = [
        Pair(
            strategy=trial.configuration.label,
            what=" ".join(cell),
            predicted_bytes=found.ledger.get(cell[0], {}).get(cell[1], 0),
            measured_bytes=cells.get(cell, 0),
        )
        for cell in dict.fromkeys(both)
    ]
    return result + _peaks(record, found)


def _peaks(record: TrialRecord, found: predicted_memory.Prediction) -> list[Pair]:
    label, outside = record.trial.configuration.label, trial_predictions.outside_allocator_bytes(record.ranks)
    peaks = {
        name: max(sizes)
        for name in ("gpu_init_peak_bytes", "gpu_peak_bytes", "gpu_peak_reserved_bytes")
        if (sizes := measured_values(record.ranks, name))
    }
    allocated = max(peaks.get("gpu_init_peak_bytes", 0), peaks.get("gpu_peak_bytes", 0))
    overhead = found.gpu.get("overhead", 0)
    seen = {
        "gpu peak allocated": (
            found.gpu_bytes - overhead,
            peaks.get("gpu_init_peak_bytes" if found.phase in ("build", "initialize") else "gpu_peak_bytes"),
        ),
        "gpu outside the allocator": (overhead, outside),
        # The smallest sufficient GPU, if the allocator frees its whole cache.
        "gpu least": (found.gpu_need.least_bytes, allocated + outside if allocated and outside is not None else None),
        "gpu reserved": (
            found.gpu_need.reserved_bytes,
            peaks["gpu_peak_reserved_bytes"] + outside
            if "gpu_peak_reserved_bytes" in peaks and outside is not None
            else None,
        ),
    }
    result = [
        Pair(strategy=label, what=what, predicted_bytes=size, measured_bytes=measured)
        for what, (size, measured) in seen.items()
        if measured is not None
    ]
    if host := measured_values(record.ranks, "host_peak_steps_bytes"):
        result.append(
            Pair(strategy=label, what="host peak", predicted_bytes=found.host_bytes, measured_bytes=sum(host))
        )
    return result


def show(found: Sequence[Pair]) -> None:
    print(f"{'strategy':34}{'cell':26}{'predicted':>12}{'measured':>12}{'ratio':>8}")
    for pair in found:
        sizes = f"{format_bytes(pair.predicted_bytes):>12}{format_bytes(pair.measured_bytes):>12}"
        print(f"{pair.strategy:34}{pair.what:26}{sizes}{format_ratio(pair.ratio):>8}")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.records is not None:
        return compare([args.records], args.output, {})
    asked = harness.setting_of(args)
    setting, _, _ = harness.decide(asked if asked.accelerator != "cpu" else replace(asked, num_gpus=args.num_gpus or 2))
    facts = harness.machine_facts(setting)
    shape = f"micro-batch {setting.batch_size} × {setting.seq_length}"
    print(f"prediction: {setting.model}, {shape}, {setting.device_word}\n{harness.facts_line(facts)}", flush=True)
    folders: list[Path] = []
    with harness.folder_of_runs(args.runs) as scratch:
        for folder, command in commands(args, setting, scratch):
            folders.append(folder)
            try:
                harness.timed(command, {}, folder / "stderr.log", Path(command[1]).name, args.timeout)
            except BenchError as error:  # even if a single row fails: what the others measured is kept
                if not records(folder):
                    raise
                print(str(error).partition("\n")[0], file=sys.stderr)
            code = compare(folders, args.output, facts)  # written after each comparison
    return code


def compare(folders: Sequence[Path], output: Path | None, machine: Mapping[str, Any]) -> int:
    """Print and write what the runs below the folders predicted and measured. Return 1 if a row of them failed."""
    found: list[Pair] = []
    failed = 0
    for record in (record for folder in folders for record in records(folder)):
        if record.outcome.status == SUCCESS:
            found += pairs(record)
        else:
            failed += 1
            print(f"{record.trial.configuration.label}: {record.outcome.status}, {record.outcome.error}")
    show(found)
    if output is not None:
        write_json(output, {"machine": machine, "pairs": list(map(asdict, found))})
    return 1 if failed else 0


if __name__ == "__main__":
    harness.run("prediction", main)
