"""Two results beside each other: a ratio only where it means something, and every difference by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest

from ds_bench.environment import Environment
from ds_bench.load import load
from ds_bench.record import TrialRecord
from ds_bench.spec import Trial
from ds_bench.versus import Versus, lines, show_versus, versus

GPUS = fakes.placement(accelerator="cuda", num_gpus=2)


def trial(stage: int = 2, **changes: Any) -> Trial:
    return fakes.trial(fakes.zero(stage), on=GPUS, **changes)


def runs(stage: int, *seconds: float, **changes: Any) -> list[TrialRecord]:
    """One record per run of ten equal steps."""
    return [
        fakes.success(
            trial(stage, repeat=number, trial_id=f"{number:02d}_zero{stage}", **changes), step_seconds=(s,) * 10
        )
        for number, s in enumerate(seconds)
    ]


def put(
    folder: Path, before: list[TrialRecord], after: list[TrialRecord], on: Environment | None = None
) -> tuple[Path, Path]:
    return (
        fakes.write_run(folder / "a", before).folder,
        fakes.write_run(folder / "b", after, on=on).folder,
    )


def of(folder: Path, before: list[TrialRecord], after: list[TrialRecord], on: Environment | None = None) -> Versus:
    a, b = put(folder, before, after, on)
    return versus(load(a), load(b))


def test_half_the_step_time_is_twice_the_throughput(tmp_path: Path) -> None:
    (pair,) = of(tmp_path, runs(2, 0.2), runs(2, 0.1)).pairs
    assert pair.ratio == pytest.approx(2)
    assert pair.interval is None  # one run each


def test_three_runs_each_give_an_interval(tmp_path: Path) -> None:
    (pair,) = of(tmp_path, runs(2, 0.100, 0.101, 0.099), runs(2, 0.080, 0.081, 0.079)).pairs
    assert pair.interval is not None
    assert pair.interval.distinguishable
    assert pair.interval.low < 1.25 < pair.interval.high


def test_an_upgrade_is_named_and_still_compared(tmp_path: Path) -> None:
    newer = fakes.environment(packages={"torch": "2.14.0", "deepspeed": "0.19.8", "transformers": "5.23.0"})
    found = of(tmp_path, runs(2, 0.2), runs(2, 0.1), newer)
    assert found.software == ("torch 2.13.0 against 2.14.0",)
    assert found.pairs[0].ratio == pytest.approx(2)


def test_other_hardware_is_named_and_not_compared(tmp_path: Path) -> None:
    found = of(tmp_path, runs(2, 0.2), runs(2, 0.1), fakes.environment(logical_cores=8))
    assert found.hardware == ("logical cores 16 against 8",)
    assert found.pairs[0].ratio is None
    assert "logical cores 16 against 8" in found.pairs[0].obstacles


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"of": fakes.workload(batch_size=8)}, "batch_size 4 against 8"),
        ({"of": fakes.workload(seq_length=64)}, "seq_length 128 against 64"),
        ({"of": fakes.workload(precision="fp32")}, "precision bf16 against fp32"),
    ],
)
def test_another_workload_is_named_and_not_compared(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (pair,) = of(tmp_path, runs(2, 0.2), runs(2, 0.1, **change)).pairs
    assert pair.ratio is None
    assert words in pair.obstacles


def test_another_method_of_measurement_is_not_compared(tmp_path: Path) -> None:
    after = [replace(entry, method_version=2) for entry in runs(2, 0.1)]
    (pair,) = of(tmp_path, runs(2, 0.2), after).pairs
    assert pair.ratio is None
    assert "method of measurement 1 against 2" in pair.obstacles


def test_a_changed_key_of_the_configuration_is_named_with_its_path(tmp_path: Path) -> None:
    config = dict(trial().ds_config)
    config["zero_optimization"] = {**config["zero_optimization"], "reduce_bucket_size": 7_000_000}
    (pair,) = of(tmp_path, runs(2, 0.2), runs(2, 0.1, ds_config=config)).pairs
    assert any(change.startswith("zero_optimization.reduce_bucket_size ") for change in pair.changes)
    assert pair.ratio == pytest.approx(2)  # a change of configuration is what may be compared


def test_more_steps_are_a_change_and_no_obstacle(tmp_path: Path) -> None:
    longer = [fakes.success(trial(of=fakes.workload(num_steps=20)), step_seconds=(0.1,) * 20)]
    (pair,) = of(tmp_path, runs(2, 0.2), longer).pairs
    assert pair.ratio == pytest.approx(2)
    assert "num_steps 10 against 20" in pair.changes


def test_rows_that_only_one_result_has_are_shown(tmp_path: Path) -> None:
    found = of(tmp_path, runs(1, 0.2), runs(3, 0.1))
    assert [(pair.label, pair.before is None, pair.after is None) for pair in found.pairs] == [
        ("ZeRO-1", False, True),
        ("ZeRO-3", True, False),
    ]


def test_a_failed_row_has_its_status_and_no_ratio(tmp_path: Path) -> None:
    found = of(tmp_path, runs(2, 0.2), [fakes.failure(trial())])
    assert found.pairs[0].ratio is None
    assert any("OOM" in line for line in lines(found))


def test_the_text_reads_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = put(tmp_path, runs(2, 0.2), runs(2, 0.1))
    assert show_versus(a, b) == 0
    first, *_rest, last = capsys.readouterr().out.strip().splitlines()
    assert first == (
        "ZeRO-2  5,120 tokens/s → 10,240 tokens/s; 2.00x (not tested: fewer than three runs); "
        "GPU memory 8.00 GB (+0 B); CPU memory 4.00 GB (+0 B)"
    )
    assert last == "same hardware, versions and settings"
