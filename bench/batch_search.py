"""How many trials the search for the largest micro-batch takes, against doubling from 1 and bisecting.

    python bench/batch_search.py --model gpt2 --seq-length 512            on GPUs
    python bench/batch_search.py --cpu-memory-limit 3 --stages 1          on the CPU accelerator

Runs the product with ``--batch-size auto`` and reads its probes. The number of trials that plain doubling would have
taken follows from the answer alone: the same search, started at 1. Measures no speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

from ds_bench.planning.largest_batch_search import MAX_BATCH_SIZE, largest_trained, next_size


def plain_doubling(answer: int) -> int:
    """Number of probes in a search from 1 if everything up to ``answer`` trains."""
    known: dict[int, bool] = {}
    while (size := next_size(known, 1, MAX_BATCH_SIZE)) is not None:
        known[size] = size <= answer
    return len(known)


def probes(run_folder: Path) -> dict[str, dict[int, bool]]:
    """Strategy → micro-batch → whether it trained."""
    found: dict[str, dict[int, bool]] = {}
    for line in (run_folder / "probes.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        trial = entry["trial"]
        trained = entry["outcome"]["status"] == "Success"
        found.setdefault(trial["configuration"]["label"], {})[trial["workload"]["batch_size"]] = trained
    return found


def main() -> int:
    """Prints one line per strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seq-length", default="256")
    _, more = parser.parse_known_args()
    flags = parser.parse_known_args()[0]
    given = ["--model", flags.model, "--seq-length", flags.seq_length, *more]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(harness.PRODUCT), *given, "--batch-size", "auto", "--output-dir", folder]
        done = subprocess.run([*command, "--num-steps", "2", "--warmup-steps", "1"], check=False)
        runs = list(Path(folder).glob("runs/*"))
        if done.returncode not in (0, 1) or not runs:
            print("the product did not finish", file=sys.stderr)
            return 1
        found = probes(runs[0])
    print(f"\n{'strategy':<32} {'largest':>8} {'probes':>8} {'from 1':>8}")
    for label, known in found.items():
        answer = largest_trained(known) or 0
        print(f"{label:<32} {answer:>8} {len(known):>8} {plain_doubling(answer):>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
