"""Predicted memory against measured, on whatever machine this runs on: a check of ``ds_bench.prediction``.

    python bench/prediction.py                                  every strategy but NVMe, tiny preset
    python bench/prediction.py --model meta-llama/Llama-3.1-8B --num-gpus 8 --batch-size 1 --nvme-path /mnt/nvme

Trains each strategy once with the product, then prints for each what a rank's ledger holds, cell by cell, and on GPUs
the allocator's peak and the whole card's use next to the prediction. A strategy that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import harness
from harness import BenchError

from ds_bench.models import presets
from ds_bench.prediction import predicted_memory, trial_predictions
from ds_bench.prediction.model_profile import find_profile
from ds_bench.records import json_files
from ds_bench.records.json_files import write_json
from ds_bench.records.schema import SUCCESS, TrialRecord
from ds_bench.units import format_bytes, format_ratio

_OFFLOADS = ("cpu_optimizer", "cpu_full", "nvme")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One number twice."""

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
    return parser.parse_args(arguments)


def commands(args: argparse.Namespace, setting: harness.Setting, scratch: Path) -> Iterator[tuple[Path, list[str]]]:
    """Both scripts, each with a folder of its own."""
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
    lines = [line for path in folder.glob("runs/*/records.jsonl") for line in path.read_text().splitlines()]
    return [json_files.parse(TrialRecord, line.encode()) for line in lines if line.strip()]


def pairs(record: TrialRecord) -> list[Pair]:
    """Every cell of the fullest rank's ledger, and on GPUs the peaks."""
    trial = record.trial
    facts = presets.find_preset(trial.workload.model)
    if facts is None:
        raise BenchError(f"{trial.workload.model} is not a preset")
    work = trial.workload
    profile = find_profile(facts, work.seq_length, accelerator=trial.placement.accelerator, dropout=work.dropout)
    found = predicted_memory.predict(profile, trial.workload, trial.placement, trial.ds_config)
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
    label, inside = record.trial.configuration.label, found.gpu_bytes - found.gpu.get("overhead", 0)
    seen = {
        "gpu peak allocated": (inside, [rank.gpu_peak_bytes for rank in record.ranks]),
        "gpu outside the allocator": (
            found.gpu.get("overhead", 0),
            [trial_predictions.outside_allocator_bytes(record.ranks)],
        ),
        "gpu used on the card": (found.gpu_bytes, [rank.gpu_device_used_bytes for rank in record.ranks]),
    }
    result = [
        Pair(strategy=label, what=what, predicted_bytes=size, measured_bytes=max(n for n in sizes if n is not None))
        for what, (size, sizes) in seen.items()
        if any(n is not None for n in sizes)
    ]
    host = [rank.host_peak_steps_bytes for rank in record.ranks if rank.host_peak_steps_bytes is not None]
    if host:
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
    asked = harness.setting_of(args)
    setting, place, _ = harness.decide(
        asked if asked.accelerator != "cpu" else replace(asked, num_gpus=args.num_gpus or 2)
    )
    facts = harness.machine_facts(setting)
    shape = f"micro-batch {setting.batch_size} × {setting.seq_length}"
    print(f"prediction: {setting.model}, {shape}, {setting.device_word}\n{harness.facts_line(facts)}", flush=True)
    found: list[Pair] = []
    complete = True
    with tempfile.TemporaryDirectory(prefix="ds_bench_prediction_") as scratch:
        for folder, command in commands(args, setting, Path(scratch)):
            try:
                harness.timed(command, {}, folder / "stderr.log", Path(command[1]).name, args.timeout)
            except BenchError as error:  # also where a single row fails: what the others measured is kept
                if not records(folder):
                    raise
                print(str(error).partition("\n")[0], file=sys.stderr)
                complete = False
            for record in records(folder):
                if record.outcome.status == SUCCESS:
                    found += pairs(record)
                else:
                    print(f"{record.trial.configuration.label}: {record.outcome.status}, {record.outcome.error}")
    show(found)
    if args.output is not None:
        write_json(args.output, {"machine": facts, "accelerator": place.accelerator, "pairs": list(map(asdict, found))})
    return 0 if complete else 1


if __name__ == "__main__":
    harness.run("prediction", main)
