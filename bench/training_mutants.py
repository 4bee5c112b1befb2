"""Does the comparison find rows that train a different model, at any number of steps? Real training runs on CPU ranks.

    python bench/training_mutants.py                               18, 100 and 700 steps, fp32 and bf16; an hour
    python bench/training_mutants.py --steps 18 --precision fp32   two minutes on two cores

The honest strategies and every mutant train on the same batches from the same weights. Honest rows are compared with
each other. Each mutant is compared with all honest rows twice: as it is, and again by its losses, gradient norms and
weights only, without the settings that its optimizer and configuration report.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout, installed or not

from ds_bench.analysis.loss_parity import compare_losses
from ds_bench.analysis.row import make_run
from ds_bench.config.spec import Configuration, Placement, Trial
from ds_bench.launch import Limits, ops, rank_environment
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.real_trials import make_trial

HONEST: Mapping[str, Configuration] = {
    **{f"zero{stage}": fakes.zero(stage) for stage in range(4)},
    "zero1_cpu_optimizer": fakes.offload("cpu_optimizer", 1),
    "zero2_cpu_optimizer": fakes.offload("cpu_optimizer", 2),
    "zero3_cpu_optimizer": fakes.offload("cpu_optimizer", 3),
    "zero3_cpu_full": fakes.offload("cpu_full", 3),
    "ddp": fakes.reference("ddp"),
    "fsdp2": fakes.reference("fsdp2"),
}
MUTANTS: Mapping[str, dict[str, Any]] = {
    "SGD for AdamW": {"optimizer": {"type": "SGD", "params": {"lr": 1e-4, "weight_decay": 0.01}}},
    "learning rate 0": {"optimizer": {"params": {"lr": 0.0}}},
    "learning rate doubled": {"optimizer": {"params": {"lr": 2e-4}}},
    "different betas": {"optimizer": {"params": {"betas": [0.8, 0.99]}}},
    "different weight decay": {"optimizer": {"params": {"weight_decay": 0.1}}},
    "no clipping": {"gradient_clipping": 0.0},
}
LIMITS = Limits(
    timeout_seconds=600,
    stall_timeout_seconds=120,
    failure_grace_seconds=3,
    exit_grace_seconds=5,
    kill_grace_seconds=2,
)


def trials(steps: int, precision: str, ranks: int = 2) -> Iterator[tuple[str, Trial]]:
    """Name and trial of each honest row, then of each mutant, made from ZeRO-2."""
    work = fakes.workload(batch_size=2, seq_length=32, num_steps=steps, warmup_steps=5, precision=precision)
    for name, row in HONEST.items():
        row = replace(row, name=name, label=name)
        yield name, make_trial(row, workload=work, largest_parameter=2_000_000, num_gpus=ranks)
    for name, changes in MUTANTS.items():
        trial = make_trial(replace(fakes.zero(2), name=name, label=name), workload=work, num_gpus=ranks)
        config = {**trial.ds_config, **changes, "zero_allow_untested_optimizer": True}
        wrong = changes.get("optimizer", {})
        if "type" not in wrong:
            asked = trial.ds_config["optimizer"]
            config["optimizer"] = {**asked, "params": {**asked["params"], **wrong.get("params", {})}}
        yield name, replace(trial, ds_config=config)


def launcher(ranks: int) -> WarmLauncher:
    """Return a launcher whose server has loaded the ops."""
    alone = rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ)
    states = ops.prepare_ops((ops.SHARED_MEMORY, ops.CPU_ADAM), ops.cache_folder("cpu"), alone, say=print)
    variables = rank_environment.rank_environment(Placement(accelerator="cpu", num_gpus=ranks), os.environ)
    variables |= rank_environment.preload_variables(["gpt2"])
    variables["DS_BENCH_PRELOAD_OPS"] = ",".join(op for op, state in states.items() if state.ready)
    made = WarmLauncher(variables, LIMITS)
    if problem := made.prepare():
        raise SystemExit(f"the ranks cannot start: {problem}")
    return made


def train(steps: int, precision: str, ranks: int) -> dict[str, TrialRecord]:
    """Train every row. Raises SystemExit for one that fails."""
    server, records = launcher(ranks), {}
    for name, trial in trials(steps, precision, ranks):
        with tempfile.TemporaryDirectory() as folder:
            records[name] = server.launch(trial, Path(folder), lambda _progress: None)
        if not records[name].outcome.success:
            raise SystemExit(f"{name}: {records[name].outcome.details}")
    return records


def without_settings(record: TrialRecord) -> TrialRecord:
    """Return the record without the settings that were read back."""
    said = {"optimizer_settings": None, "optimizer_class": "AdamW", "resolved_config": {}}
    return replace(record, ranks=tuple(replace(rank, **said) for rank in record.ranks))


def verdicts(records: Mapping[str, TrialRecord]) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each row, its caveat, and its caveat without the settings read back; empty without a caveat."""
    honest = {name: make_run(records[name], None, None) for name in HONEST}
    found = compare_losses([*honest.values()])
    for place, name in enumerate(honest):
        yield name, *[found[place].text if place in found else ""] * 2
    for name in MUTANTS:
        texts = []
        for record in (records[name], without_settings(records[name])):
            caveat = compare_losses([*honest.values(), make_run(record, None, None)]).get(len(honest))
            texts.append("" if caveat is None else caveat.text)
        yield name, *texts


def main() -> int:
    """Print the verdict on every row. Exit code 1 if a mutant passes or an honest row is reported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[18, 100, 700])
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    wrong = 0
    for steps in args.steps:
        for precision in args.precision:
            for name, text, behavior in verdicts(train(steps, precision, args.ranks)):
                expected = bool(text) == (name in MUTANTS) or "a known quirk" in text
                wrong += not expected
                mark = "ok   " if expected else "WRONG"
                print(f"{mark} {steps:4} {precision} {name:22} | {text or '-'} | {behavior or '-'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
