"""``compare``: ratios only between rows that compare, every difference named. ``explain``: which rows are meant."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis.before_after import BeforeAfter, compare_before_after
from ds_bench.analysis.load_results import Result, load
from ds_bench.cli.commands import main
from ds_bench.config.spec import Trial
from ds_bench.config.training_script import Script
from ds_bench.records.schema import METHOD_VERSION, TrialRecord
from ds_bench.report.before_after_report import changes_table
from ds_bench.system.environment import Environment
from tests.support import fakes

GPUS = fakes.placement(accelerator="cuda", num_gpus=2)
STORED_RUN = Path(__file__).resolve().parents[1] / "data/zero_run/runs/zero_20261121_093000"
NEWER = fakes.environment(packages={"torch": "2.14.0", "deepspeed": "0.19.8", "transformers": "5.23.0"})


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


def of(folder: Path, before: list[TrialRecord], after: list[TrialRecord], on: Environment | None = None) -> BeforeAfter:
    a, b = (fakes.write_run(folder / name, rows, on=env).folder for name, rows, env in
            (("a", before, None), ("b", after, on)))  # fmt: skip
    return compare_before_after(load(a), load(b))


def notes(found: BeforeAfter) -> list[str]:
    return list(changes_table(found).notes)


def with_bucket(size: int) -> dict[str, Any]:
    config = dict(trial().ds_config)
    return {**config, "zero_optimization": {**config["zero_optimization"], "reduce_bucket_size": size}}


LONGER = [fakes.success(trial(of=fakes.workload(num_steps=20)), step_seconds=(0.1,) * 20)]
CHANGES: dict[str, tuple[list[TrialRecord], Environment | None, bool, str]] = {
    # the second result, its machine, whether there is a ratio, a difference that is named
    "an upgrade": (runs(2, 0.1), NEWER, True, "torch 2.13.0 vs 2.14.0"),
    "other hardware": (runs(2, 0.1), fakes.environment(logical_cores=8), False, "logical cores 16 vs 8"),
    "sequence": (runs(2, 0.1, of=fakes.workload(seq_length=64)), None, False, "seq_length 128 vs 64"),
    "method": (
        [replace(entry, method_version=99) for entry in runs(2, 0.1)],
        None,
        False,
        f"method_version {METHOD_VERSION} vs 99",
    ),
    "a key": (runs(2, 0.1, ds_config=with_bucket(7_000_000)), None, True, "zero_optimization.reduce_bucket_size "),
    "more steps": (LONGER, None, True, "num_steps 10 vs 20"),
    "a failure": ([fakes.failure(trial())], None, False, "OOM"),
    # 7.0 against 6.0 at the first step is 14.29 %; bf16 explains 0.5 %.
    "losses": (
        [fakes.success(trial(), losses=tuple(6.0 - 0.01 * step for step in range(12)))],
        None,
        False,
        "after against before: loss differs by 14.",
    ),
    "losses of a longer run": (
        [fakes.success(LONGER[0].trial, step_seconds=(0.1,) * 20, losses=(6.0,) * 22)],
        None,
        False,
        "loss differs by",
    ),
    "a caveat": (
        [fakes.success(trial(), gpu_peak_reserved_bytes=77 * fakes.GB)],
        None,
        True,
        "after: near capacity: 98.8 %",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_difference_is_named_and_decides_whether_there_is_a_ratio(case: str, tmp_path: Path) -> None:
    after, on, compares, named = CHANGES[case]
    found = of(tmp_path, runs(2, 0.2), after, on)
    assert (found.rows[0].ratio is not None) == compares
    assert named in f"{changes_table(found).rows} {notes(found)}"
    assert not any(": before: " in note for note in notes(found))


def test_losses_of_one_oddity_on_both_sides_are_still_compared(tmp_path: Path) -> None:
    """Stage 0 in 16-bit precision: a wrapper's extra step excuses each row, but no difference between the two."""
    odd: dict[str, Any] = {"engine_optimizer_class": "FP16_Optimizer"}
    after = [fakes.success(trial(0), losses=(6.0,) * 12, **odd)]
    (pair,) = of(tmp_path, [fakes.success(trial(0), **odd)], after).rows
    assert pair.ratio is None
    assert any("more than rounding explains" in text for text in pair.incomparable_reasons)


def test_markdown_and_json_have_the_rows_of_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1,024 tokens in 0.2 s, then in 0.1 s, three steady runs of each; one row is only in the first result."""
    before = [*runs(1, 0.2, 0.2, 0.2), *runs(2, 0.2)]
    sides = (("a", before), ("b", runs(1, 0.1, 0.1, 0.1)))
    folders = [str(fakes.write_run(tmp_path / name, rows).folder) for name, rows in sides]
    assert main(["compare", *folders, "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["rows"]
    assert (one["before"]["tokens_per_second"], one["ratio"]) == (pytest.approx(5120), pytest.approx(2))
    assert one["interval"]["distinguishable"]
    assert (one["after"]["gpu_peak_bytes"], one["after"]["runs"]) == (8 * fakes.GB, 3)
    assert (two["after"], two["ratio"], two["incomparable_reasons"]) == (None, None, ["only in BEFORE"])
    assert main(["compare", *folders, "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "| ZeRO-1 | 5,120 tokens/s | 10,240 tokens/s | 2.00x | 2.00 to 2.00 | GPU 8.00 GB" in out
    assert "- ZeRO-2: no ratio: only in BEFORE" in out
    assert main(["compare", *folders, "--markdown", "--json"]) == 2


def test_a_row_is_a_line_and_a_shared_remark_is_printed_once(tmp_path: Path) -> None:
    """Ten steps of 512 tokens on two cards in 0.2 s; three steady runs that are 25 % faster have an interval."""
    work = fakes.workload(warmup_steps=3)
    before = [*runs(1, 0.2), *runs(2, 0.2), *runs(0, 0.100, 0.102, 0.101)]
    after = [*runs(1, 0.2, of=work), *runs(3, 0.1, of=work), *runs(0, 0.080, 0.081, 0.079, of=work)]
    table = changes_table(of(tmp_path, before, after))
    memory = "GPU 8.00 GB (+0 B), CPU 4.00 GB (+0 B)"
    assert table.rows == [
        ("ZeRO-1", "5,120 tokens/s", "5,120 tokens/s", "1.00x", "not tested: fewer than three runs", memory),
        ("ZeRO-2", "5,120 tokens/s", "absent", "—", "—", "—"),
        ("ZeRO-0", "10,139 tokens/s", "12,801 tokens/s", "1.26x", "1.23 to 1.30", memory),
        ("ZeRO-3", "absent", "10,240 tokens/s", "—", "—", "—"),
    ]
    assert table.notes == [
        "ZeRO-1; ZeRO-0: changed: warmup_steps 2 vs 3",
        "ZeRO-2: no ratio: only in BEFORE",
        "ZeRO-3: no ratio: only in AFTER",
        "same hardware and versions",
        "intervals cover differences within a session; to see those between sessions, measure the same code twice",
    ]


def flat(folder: Path, entries: list[TrialRecord], on: Environment | None = None, *, old: bool = False) -> Result:
    """A flat JSON that was copied away from its run folder; ``old``: without the columns of its machine."""
    copy = folder / f"{folder.name}_copy.json"
    folder.mkdir()
    rows = json.loads(fakes.write_run(folder / "out", entries, on=on).json_path.read_text())
    kept = list(rows[0])[: list(rows[0]).index("num_nodes")] if old else list(rows[0])
    copy.write_text(json.dumps([{name: row[name] for name in kept} for row in rows]))
    return load(copy)


def test_results_without_their_machine_have_no_ratio_and_one_line_says_why(tmp_path: Path) -> None:
    found = compare_before_after(flat(tmp_path / "a", runs(2, 0.2), old=True), flat(tmp_path / "b", runs(2, 0.1)))
    assert found.environment_unknown
    assert found.rows[0].ratio is None
    (said,) = [line for line in notes(found) if "no ratio" in line]
    assert "hardware and versions of" in said
    assert not any("same hardware" in line for line in notes(found))


def test_flat_results_are_compared_by_their_columns(tmp_path: Path) -> None:
    before = flat(tmp_path / "a", runs(2, 0.2))
    same = compare_before_after(before, flat(tmp_path / "b", runs(2, 0.1)))
    assert (same.rows[0].ratio, same.rows[0].changes) == (pytest.approx(2), ())
    assert notes(same)[-1] == "same hardware, versions and settings"
    moved = compare_before_after(before, flat(tmp_path / "c", runs(2, 0.1), fakes.environment(cpu_model="Intel Xeon")))
    assert (moved.rows[0].ratio, moved.hardware) == (None, ("CPU AMD EPYC 9654 vs Intel Xeon",))
    changed = [replace(r, trial=replace(r.trial, ds_config={**r.trial.ds_config, "x": 1})) for r in runs(2, 0.1)]
    other = compare_before_after(before, flat(tmp_path / "d", changed))
    assert other.rows[0].changes == ("the DeepSpeed configuration (only its hash is known)",)
    assert notes(other)[-1] == "same hardware and versions"


def test_facts_that_a_flat_row_lacks_are_not_differences(tmp_path: Path) -> None:
    on = fakes.placement(accelerator="cuda", num_gpus=2, nvme_path="/mnt/disk", hostfile="/etc/hosts")
    model = {"model": "pkg.mod:make", "model_source": "factory", "model_type": None, "model_config": {}}
    entry = fakes.success(fakes.trial(fakes.zero(2), on=on, of=fakes.workload(**model)))
    run = load(fakes.write_run(tmp_path / "a", [entry]).folder)
    (pair,) = compare_before_after(run, flat(tmp_path / "b", [entry])).rows
    assert (pair.incomparable_reasons, pair.changes, pair.ratio) == ((), (), pytest.approx(1))


def test_versions_of_the_environments_are_not_repeated_in_each_row(tmp_path: Path) -> None:
    later = [fakes.success(trial(), step_seconds=(0.1,) * 10, torch_version="2.14.0")]
    assert of(tmp_path, runs(2, 0.2), later, NEWER).rows[0].changes == ()
    before, after = (load(next((tmp_path / name / "runs").iterdir())) for name in ("a", "b"))
    (pair,) = compare_before_after(replace(before, environment=None), after).rows
    assert (pair.changes, pair.ratio) == (("torch 2.13.0 vs 2.14.0",), None)


def test_rows_of_one_strategy_are_paired_by_their_work(tmp_path: Path) -> None:
    small, large = runs(2, 0.2), runs(2, 0.3, of=fakes.workload(batch_size=8))
    found = of(tmp_path, [*small, *large], [*large, *small])
    assert [pair.ratio for pair in found.rows] == [pytest.approx(1), pytest.approx(1)]
    # The row with an equal partner gets it, whichever comes first.
    found = of(tmp_path / "fewer", [*small, *large], large)
    assert [pair.ratio for pair in found.rows] == [None, pytest.approx(1)]


# ------------------------------------------------------------------ explain


def test_explain_finds_rows_by_name_label_or_stage(capsys: pytest.CaptureFixture[str]) -> None:
    for a, b in (("0", "zero2"), ("ZeRO-0", "stage 2")):
        assert main(["explain", a, b, str(STORED_RUN)]) == 0
        assert capsys.readouterr().out.startswith("ZeRO-2 compared with ZeRO-0 · tiny"), (a, b)
    assert main(["explain", "0", "2", str(STORED_RUN), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["a"]["name"], found["b"]["name"]) == ("zero0", "zero2")
    assert "zero_optimization.stage" in [key["path"] for key in found["keys"]]
    for a, b, named in (("zero0", "zero7", "zero7"), ("zero2", "2", "zero2")):
        assert main(["explain", a, b, str(STORED_RUN)]) == 2
        error = capsys.readouterr().err
        assert named in error
        assert error.count("\n") == 1


def test_explain_compares_rows_of_two_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, bucket = (
        str(fakes.write_run(tmp_path / name, rows).folder)
        for name, rows in (
            ("a", [*runs(0, 0.1), *runs(2, 0.1)]),
            ("b", runs(3, 0.2)),
            ("c", runs(2, 0.2, ds_config=with_bucket(5_000_000))),
        )
    )
    assert main(["explain", "zero3", "zero0", one, other]) == 0
    assert capsys.readouterr().out.startswith("ZeRO-0 compared with ZeRO-3")
    assert main(["explain", "zero2", "zero2", one, bucket]) == 0
    text = capsys.readouterr().out
    assert text.count("compared with") == 1
    (line,) = [line for line in text.splitlines() if line.startswith("reduce_bucket_size")]
    assert line.split()[1:3] == ["5e8", "5e6"]
    first = " ".join(text.split()).partition("compared with ")[2].partition(" · ")[0]
    for a, b in ((first, "zero2"), ("zero2", first)):  # a name takes whichever of its rows the other does not
        assert main(["explain", a, b, one, bucket]) == 0, capsys.readouterr().err


def test_a_script_in_two_environments_has_a_ratio_and_another_script_has_none(tmp_path: Path) -> None:
    own = Script(command=("train.py", "{config}"), digest="abc", python="/old/bin/python", config_source="command")
    work = {"model": "train.py", "model_source": "script", "num_steps": 10, "warmup_steps": 2}

    def measured(script: Script) -> list[TrialRecord]:
        return [fakes.success(trial(of=fakes.workload(script=script, **work)), step_seconds=(0.1,) * 10)]

    upgraded = of(tmp_path / "1", measured(own), measured(replace(own, python="/new/bin/python")), NEWER)
    assert upgraded.rows[0].ratio is not None
    assert "script.python /old/bin/python vs /new/bin/python" in "\n".join(notes(upgraded))
    edited = of(tmp_path / "2", measured(own), measured(replace(own, digest="def")))
    assert edited.rows[0].ratio is None
