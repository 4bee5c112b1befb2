"""Two results beside each other: a ratio only where it means something, and every difference by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis.before_after import BeforeAfter, compare_before_after
from ds_bench.analysis.load_results import Result, load
from ds_bench.cli.compare import lines, show_changes
from ds_bench.config.spec import Trial, Workload
from ds_bench.records.schema import METHOD_VERSION, TrialRecord
from ds_bench.system.environment import Environment
from tests.support import fakes

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


def of(folder: Path, before: list[TrialRecord], after: list[TrialRecord], on: Environment | None = None) -> BeforeAfter:
    a, b = put(folder, before, after, on)
    return compare_before_after(load(a), load(b))


def test_half_the_step_time_is_twice_the_throughput(tmp_path: Path) -> None:
    (pair,) = of(tmp_path, runs(2, 0.2), runs(2, 0.1)).rows
    assert pair.ratio == pytest.approx(2)
    assert pair.interval is None  # one run each


def test_three_runs_each_give_an_interval(tmp_path: Path) -> None:
    (pair,) = of(tmp_path, runs(2, 0.100, 0.101, 0.099), runs(2, 0.080, 0.081, 0.079)).rows
    assert pair.interval is not None
    assert pair.interval.distinguishable
    assert pair.interval.low < 1.25 < pair.interval.high


def test_an_upgrade_is_named_and_still_compared(tmp_path: Path) -> None:
    newer = fakes.environment(packages={"torch": "2.14.0", "deepspeed": "0.19.8", "transformers": "5.23.0"})
    found = of(tmp_path, runs(2, 0.2), runs(2, 0.1), newer)
    assert found.software == ("torch 2.13.0 against 2.14.0",)
    assert found.rows[0].ratio == pytest.approx(2)


def test_other_hardware_is_named_and_not_compared(tmp_path: Path) -> None:
    found = of(tmp_path, runs(2, 0.2), runs(2, 0.1), fakes.environment(logical_cores=8))
    assert found.hardware == ("logical cores 16 against 8",)
    assert found.rows[0].ratio is None
    assert "logical cores 16 against 8" in found.rows[0].incomparable_reasons


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"of": fakes.workload(batch_size=8)}, "batch_size 4 against 8"),
        ({"of": fakes.workload(seq_length=64)}, "seq_length 128 against 64"),
        ({"of": fakes.workload(precision="fp32")}, "precision bf16 against fp32"),
    ],
)
def test_another_workload_is_named_and_not_compared(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (pair,) = of(tmp_path, runs(2, 0.2), runs(2, 0.1, **change)).rows
    assert pair.ratio is None
    assert words in pair.incomparable_reasons


def test_another_method_of_measurement_is_not_compared(tmp_path: Path) -> None:
    after = [replace(entry, method_version=99) for entry in runs(2, 0.1)]
    (pair,) = of(tmp_path, runs(2, 0.2), after).rows
    assert pair.ratio is None
    assert f"method_version {METHOD_VERSION} against 99" in pair.incomparable_reasons


def test_a_changed_key_of_the_configuration_is_named_with_its_path(tmp_path: Path) -> None:
    config = dict(trial().ds_config)
    config["zero_optimization"] = {**config["zero_optimization"], "reduce_bucket_size": 7_000_000}
    (pair,) = of(tmp_path, runs(2, 0.2), runs(2, 0.1, ds_config=config)).rows
    assert any(change.startswith("zero_optimization.reduce_bucket_size ") for change in pair.changes)
    assert pair.ratio == pytest.approx(2)  # a change of configuration is what may be compared


def test_more_steps_are_a_change_and_no_obstacle(tmp_path: Path) -> None:
    longer = [fakes.success(trial(of=fakes.workload(num_steps=20)), step_seconds=(0.1,) * 20)]
    (pair,) = of(tmp_path, runs(2, 0.2), longer).rows
    assert pair.ratio == pytest.approx(2)
    assert "num_steps 10 against 20" in pair.changes


def test_rows_that_only_one_result_has_are_shown(tmp_path: Path) -> None:
    found = of(tmp_path, runs(1, 0.2), runs(3, 0.1))
    assert [(pair.label, pair.before is None, pair.after is None) for pair in found.rows] == [
        ("ZeRO-1", False, True),
        ("ZeRO-3", True, False),
    ]


def test_a_failed_row_has_its_status_and_no_ratio(tmp_path: Path) -> None:
    found = of(tmp_path, runs(2, 0.2), [fakes.failure(trial())])
    assert found.rows[0].ratio is None
    assert any("OOM" in line for line in lines(found))


def test_the_text_reads_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = put(tmp_path, runs(2, 0.2), runs(2, 0.1))
    assert show_changes(a, b) == 0
    first, *_rest, last = capsys.readouterr().out.strip().splitlines()
    assert first == (
        "ZeRO-2  5,120 tokens/s → 10,240 tokens/s; 2.00x (not tested: fewer than three runs); "
        "GPU memory 8.00 GB (+0 B); CPU memory 4.00 GB (+0 B)"
    )
    assert last == "same hardware, versions and settings"


def test_a_difference_between_two_results_says_what_its_interval_does_not_hold(tmp_path: Path) -> None:
    """Both ran in a session of their own, and what these differ by is in no run."""
    equal, slower, faster = (0.100, 0.102, 0.101), (0.101, 0.100, 0.102), (0.080, 0.081, 0.079)

    def says_so(name: str, after: tuple[float, ...]) -> bool:
        return any(
            "not how sessions do" in line for line in lines(of(tmp_path / name, runs(2, *equal), runs(2, *after)))
        )

    assert says_so("beyond", faster)
    assert not says_so("inside", slower)
    assert not says_so("untested", faster[:1])


def flat(folder: Path, entries: list[TrialRecord], on: Environment | None = None, *, old: bool = False) -> Result:
    """What a flat JSON tells that was copied away from its run folder; ``old``: written before it told its machine."""
    copy = folder / f"{folder.name}_copy.json"
    folder.mkdir()
    rows = json.loads(fakes.write_run(folder / "out", entries, on=on).json_path.read_text())
    kept = list(rows[0])[: list(rows[0]).index("num_nodes")] if old else list(rows[0])
    copy.write_text(json.dumps([{name: row[name] for name in kept} for row in rows]))
    return load(copy)


def test_results_that_do_not_tell_their_machine_have_no_ratio_and_one_line_says_why(tmp_path: Path) -> None:
    found = compare_before_after(flat(tmp_path / "a", runs(2, 0.2), old=True), flat(tmp_path / "b", runs(2, 0.1)))
    assert found.environment_unknown
    assert found.rows[0].ratio is None
    (said,) = [line for line in lines(found) if "no ratio" in line]
    assert "hardware and versions of" in said
    assert not any("same hardware" in line for line in lines(found))


def test_a_row_of_one_side_alone_is_told_where_a_machine_is_not_known_too(tmp_path: Path) -> None:
    found = compare_before_after(flat(tmp_path / "a", runs(2, 0.2), old=True), flat(tmp_path / "b", runs(3, 0.1)))
    said = "\n".join(lines(found))
    assert "no ratio: after: no such row" in said
    assert "no ratio: before: no such row" in said


def test_flat_results_of_two_cpu_models_have_no_ratio(tmp_path: Path) -> None:
    other = fakes.environment(cpu_model="Intel Xeon")
    found = compare_before_after(flat(tmp_path / "a", runs(2, 0.2)), flat(tmp_path / "b", runs(2, 0.1), other))
    assert found.rows[0].ratio is None
    assert found.hardware == ("CPU AMD EPYC 9654 against Intel Xeon",)


def test_flat_results_of_one_kind_of_card_have_a_ratio_and_no_changes_made_up(tmp_path: Path) -> None:
    found = compare_before_after(flat(tmp_path / "a", runs(2, 0.2)), flat(tmp_path / "b", runs(2, 0.1)))
    assert found.rows[0].ratio == pytest.approx(2)
    assert found.rows[0].changes == ()
    assert list(lines(found))[-1] == "same hardware, versions and settings"


def test_flat_results_of_two_configurations_say_that_they_differ(tmp_path: Path) -> None:
    changed = [replace(r, trial=replace(r.trial, ds_config={**r.trial.ds_config, "x": 1})) for r in runs(2, 0.1)]
    found = compare_before_after(flat(tmp_path / "a", runs(2, 0.2)), flat(tmp_path / "b", changed))
    assert found.rows[0].changes == ("the DeepSpeed configuration (only its hash is known)",)
    assert list(lines(found))[-1] == "same hardware and versions"


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"model": "/models/mine", "model_source": "local", "model_type": "gpt2", "model_config": {"path": "/models"}},
        {"model": "pkg.mod:make", "model_source": "factory", "model_type": None, "model_config": {}},
    ],
)
def test_what_a_flat_row_cannot_tell_of_model_ranks_and_configuration_is_no_difference(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    on = fakes.placement(accelerator="cuda", num_gpus=2, nvme_path="/mnt/disk", hostfile="/etc/hosts")
    entry = fakes.success(fakes.trial(fakes.zero(2), on=on, of=fakes.workload(**model)))
    (pair,) = compare_before_after(
        load(fakes.write_run(tmp_path / "a", [entry]).folder), flat(tmp_path / "b", [entry])
    ).rows
    assert (pair.incomparable_reasons, pair.changes) == ((), ())
    assert pair.ratio == pytest.approx(1)


@pytest.mark.parametrize("spoiled", ["before", "after"])
def test_a_row_whose_loss_is_not_finite_has_no_ratio_and_says_so(tmp_path: Path, spoiled: str) -> None:
    bad = [fakes.success(trial(), step_seconds=(0.1,) * 10, losses=(None,) * 12)]
    good = runs(2, 0.2)
    found = of(tmp_path, *((bad, good) if spoiled == "before" else (good, bad)))
    assert found.rows[0].ratio is None
    assert any(line.strip().startswith(f"no ratio: {spoiled}: loss is not finite") for line in lines(found))


def test_a_caveat_of_either_row_is_shown_with_what_to_do_about_it(tmp_path: Path) -> None:
    full = [fakes.success(trial(), gpu_peak_reserved_bytes=77 * fakes.GB)]
    shown = [line.strip() for line in lines(of(tmp_path, runs(2, 0.1), full))]
    assert any(line.startswith("after: near capacity: 98.8 %") and "smaller --batch-size" in line for line in shown)
    assert not any(line.startswith("before:") for line in shown)


def test_losses_of_before_and_after_are_held_against_each_other(tmp_path: Path) -> None:
    """7.0 against 6.0 at the first step is 14.29 %; bf16 explains 0.5 %."""
    other = [fakes.success(trial(), losses=tuple(6.0 - 0.01 * step for step in range(12)))]
    (pair,) = of(tmp_path, runs(2, 0.1), other).rows
    assert pair.ratio is None
    assert any(text.startswith("after against before: loss differs by 14.") for text in pair.incomparable_reasons)


def test_losses_are_held_against_each_other_though_one_trained_longer(tmp_path: Path) -> None:
    longer = trial(of=fakes.workload(num_steps=20))
    other = [fakes.success(longer, step_seconds=(0.1,) * 20, losses=(6.0,) * 22)]
    (pair,) = of(tmp_path, runs(2, 0.1), other).rows
    assert any("loss differs by" in text for text in pair.incomparable_reasons)


def test_losses_of_one_oddity_on_both_sides_are_still_compared(tmp_path: Path) -> None:
    """Stage 0 in 16 bit: each alone is excused for its wrapper's extra step, beside each other they are not."""
    odd: dict[str, Any] = {"engine_optimizer_class": "FP16_Optimizer"}
    before = [fakes.success(trial(0), **odd)]
    after = [fakes.success(trial(0), losses=(6.0,) * 12, **odd)]
    (pair,) = of(tmp_path, before, after).rows
    assert pair.ratio is None
    assert any("more than rounding explains" in text for text in pair.incomparable_reasons)


def test_versions_that_the_environments_tell_are_not_told_again_in_each_row(tmp_path: Path) -> None:
    newer = fakes.environment(packages={"torch": "2.14.0", "deepspeed": "0.19.8", "transformers": "5.23.0"})
    later = [fakes.success(trial(), step_seconds=(0.1,) * 10, torch_version="2.14.0")]
    told = of(tmp_path, runs(2, 0.2), later, newer)
    assert told.rows[0].changes == ()
    silent = replace(load(tmp_path / "a" / "runs" / _only(tmp_path / "a" / "runs")), environment=None)
    (pair,) = compare_before_after(silent, load(tmp_path / "b" / "runs" / _only(tmp_path / "b" / "runs"))).rows
    assert pair.changes == ("torch 2.13.0 against 2.14.0",)
    assert pair.ratio is None


def _only(folder: Path) -> str:
    (found,) = folder.iterdir()
    return found.name


def test_of_two_rows_of_one_strategy_each_is_held_against_the_one_that_compares(tmp_path: Path) -> None:
    small, large = runs(2, 0.2), runs(2, 0.3, of=fakes.workload(batch_size=8))
    found = of(tmp_path, [*small, *large], [*large, *small])
    assert [pair.ratio for pair in found.rows] == [pytest.approx(1), pytest.approx(1)]


def test_what_holds_for_several_rows_or_before_and_after_is_said_once(tmp_path: Path) -> None:
    work = fakes.workload(num_steps=4)
    unsteady = [0.1, 0.2] * 2

    def unstable(steps: list[float], workload: Workload) -> list[TrialRecord]:
        rows = [fakes.trial(fakes.zero(stage), of=workload, repeat=n) for stage in (1, 2) for n in range(3)]
        return [fakes.success(row, step_seconds=steps) for row in rows]

    text = "\n".join(lines(of(tmp_path, unstable(unsteady, work), unstable(unsteady, replace(work, seed=7)))))
    assert text.count("unstable: step times vary") == 1
    assert "all rows: before and after: unstable" in text
    assert text.count("seed 42 against 7") == 1
