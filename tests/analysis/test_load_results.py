"""Results read back: every way of naming one, flat JSON without its run, one line for any other file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis import load_results, provenance
from ds_bench.analysis.comparability import group_repeats
from ds_bench.analysis.comparison import rows_of
from ds_bench.analysis.load_results import Result
from ds_bench.errors import UsageError
from ds_bench.records.run_folder import RunFolder
from ds_bench.records.schema import TrialRecord
from ds_bench.system.environment import Environment
from tests.support import fakes
from tests.support.real_trials import ROOT

REFERENCE = ROOT / "results/reference/cpu_2cores_2026-11-21/zero_comparison_20261121_154122.json"
HOST = Environment(hostname="node-0", logical_cores=8, packages={"torch": "2.13.0"})


def save(folder: Path, *entries: TrialRecord, arguments: tuple[str, ...] = ("--model", "tiny")) -> RunFolder:
    """A finished run with these records, as a comparison leaves it."""
    return fakes.write_run(folder, entries, on=HOST, arguments=arguments, notes=["a note of the run"])


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """ZeRO-0 and ZeRO-2 that trained, and ZeRO-3 that ran out of memory."""
    return save(
        tmp_path,
        fakes.success(fakes.trial(fakes.zero(0))),
        fakes.success(fakes.trial(fakes.zero(2)), step_seconds=[0.2] * 10),
        fakes.failure(fakes.trial(fakes.zero(3))),
    )


def lines(stored: RunFolder) -> list[str]:
    return (stored.folder / "records.jsonl").read_text().splitlines()


def put_lines(stored: RunFolder, *entries: str) -> None:
    (stored.folder / "records.jsonl").write_text("".join(text + "\n" for text in entries))


def labels(result: Result) -> list[str]:
    return [run.trial.configuration.label for run in result.runs]


def refusal(path: Path) -> str:
    """The one line that a bad result gets."""
    with pytest.raises(UsageError) as caught:
        load_results.load(path)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.remedy
    return text


# ------------------------------------------------------------------ ways of naming a result


@pytest.mark.parametrize(
    "name",
    [
        lambda stored: stored.folder,
        lambda stored: stored.folder / "records.jsonl",
        lambda stored: stored.folder / "run.json",
        lambda stored: stored.json_path,
    ],
    ids=["run folder", "records.jsonl", "run.json", "flat JSON"],
)
def test_every_name_of_a_run_gives_its_records_environment_and_arguments(
    run: RunFolder, name: Callable[[RunFolder], Path]
) -> None:
    result = load_results.load(name(run))
    assert [each.record for each in result.runs] == run.records()
    assert result.source == name(run)
    assert (result.environment, result.family, result.arguments) == (HOST, "zero", ("--model", "tiny"))
    assert result.notes == ("a note of the run",)
    assert labels(result) == ["ZeRO-0", "ZeRO-2", "ZeRO-3"]
    assert rows_of(result.runs) == json.loads(run.json_path.read_text())


def test_a_report_reads_rows_and_only_the_records_that_it_needs(tmp_path: Path) -> None:
    """For repeats, the first record gives the trial of all; a failed row still has its whole outcome."""
    positions = [(repeat, stage, stage) for repeat in (0, 1) for stage in (0, 2)]
    trials = [fakes.trial(fakes.zero(stage), repeat=n, round_position=place) for n, stage, place in positions]
    trials[-1] = replace(trials[-1], point={"training.seed": 7})  # the only difference in its text
    failed = fakes.failure(fakes.trial(fakes.zero(3)), requested_bytes=5)
    # Attempts at one trial: the last one counts.
    again = [replace(fakes.success(trials[0]), started_at=f"2026-01-01T00:00:0{n}+00:00") for n in (1, 2)]
    stored = save(tmp_path, again[1], *map(fakes.success, trials[1:]), failed)
    put_lines(stored, json.dumps(again[0].to_dict()), *lines(stored))
    whole, rows = load_results.load(stored.folder), load_results.load(stored.folder, whole=False)
    assert [each.row for each in rows.runs] == [each.row for each in whole.runs]
    assert [each.trial for each in rows.runs] == [*trials, failed.trial]
    assert not any("record" in vars(each.stored) for each in rows.runs)
    assert rows.runs[-1].outcome.requested_bytes == 5
    assert [each.record for each in rows.runs] == [each.record for each in whole.runs]
    assert rows.runs[0].losses == again[1].ranks[0].losses


def test_every_record_is_read_if_the_cards_are_of_two_kinds(tmp_path: Path) -> None:
    """A row has the name of one card, and rows on other cards are not comparable."""
    first, second = fakes.environment().gpus
    for cards, read in (((first, second), False), ((first, replace(second, name="NVIDIA A100")), True)):
        stored = fakes.write_run(tmp_path / str(read), [fakes.success()], on=fakes.environment(gpus=cards))
        (run,) = load_results.load(stored.folder, whole=False).runs
        assert isinstance(run.stored, TrialRecord) is read


@pytest.mark.parametrize(
    "first_row",
    [
        None,
        {"started_at": "2020-01-01T00:00:00+00:00"},
        {"avg_step_time_ms": 50.0},
        {"throughput_tokens_per_sec": 1e6},
    ],
    ids=["one row fewer", "different start", "different step time", "different rate"],
)
def test_rows_that_are_not_those_of_the_records_are_not_used(run: RunFolder, first_row: dict[str, Any] | None) -> None:
    first, *others = json.loads(run.json_path.read_text())
    expected = [each.row for each in load_results.load(run.folder).runs]
    run.json_path.write_text(json.dumps(others if first_row is None else [first | first_row, *others]))
    for whole in (True, False):
        assert [each.row for each in load_results.load(run.folder, whole=whole).runs] == expected
    # Asked for by its name, the file is used.
    by_name = load_results.load(run.json_path)
    assert (by_name.has_records, len(by_name.runs)) == (False, 2 if first_row is None else 3)
    assert any("hold different rows" in note for note in by_name.notes)


def test_a_flat_json_without_its_run_folder_gives_its_rows(run: RunFolder, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere.json"
    alone.write_bytes(run.json_path.read_bytes())
    result = load_results.load(alone)
    assert not result.has_records
    assert result.environment == replace(HOST, hostname="")
    assert rows_of(result.runs) == json.loads(alone.read_text())
    assert [each.outcome.status for each in result.runs] == ["Success", "Success", "OOM"]
    assert any("flat JSON" in note for note in result.notes)


@pytest.mark.parametrize(
    "values",
    [("zero_init=true", "zero_init=false"), ("data_workers=0+zero_init=true", "data_workers=0+zero_init=false")],
)
def test_rows_of_a_flat_json_that_differ_in_an_axis_alone_are_two_rows(values: tuple[str, str], tmp_path: Path) -> None:
    """Only their names differ: no column and not the hash of the DeepSpeed configuration."""
    row = json.loads(REFERENCE.read_text())[-1]
    alone = tmp_path / "elsewhere.json"
    alone.write_text(json.dumps([{**row, "strategy": f"zero3+{value}", "config_hash": "0" * 16} for value in values]))
    assert len(group_repeats(load_results.load(alone).runs)) == 2


def test_the_last_of_two_attempts_at_a_trial_counts_in_the_order_of_the_plan(run: RunFolder) -> None:
    first, *others = lines(run)
    put_lines(run, others[1], first, *others, json.dumps({**json.loads(first), "wall_seconds": 99.0}))
    result = load_results.load(run.folder)
    assert labels(result) == ["ZeRO-0", "ZeRO-2", "ZeRO-3"]
    assert result.runs[0].row.wall_seconds == 99.0


@pytest.mark.parametrize("counted", [True, False])
def test_a_run_that_did_not_end_says_how_many_trials_are_missing(run: RunFolder, counted: bool) -> None:
    """Whether run.json counts its trials or not, as in older results."""
    put_lines(run, lines(run)[0])
    run.json_path.write_text(json.dumps(json.loads(run.json_path.read_text())[:1]))
    facts = json.loads((run.folder / "run.json").read_text())
    if not counted:
        del facts["trial_count"]
        (run.folder / "run.json").write_text(json.dumps(facts, indent=1))
    assert any("2 of the 3 planned trials" in note for note in load_results.load(run.folder).notes)


def test_a_peak_rate_that_the_user_gave_is_used_again(tmp_path: Path) -> None:
    stored = save(tmp_path, fakes.success(), arguments=("--peak-tflops", "2"))
    stored.json_path.unlink()
    (row,) = (run.row for run in load_results.load(stored.folder).runs)
    assert row.model_tflops_per_gpu
    assert row.mfu == pytest.approx(row.model_tflops_per_gpu / 2)


def test_a_model_that_is_no_preset_keeps_the_flops_that_its_run_wrote(tmp_path: Path) -> None:
    of = fakes.workload(model="someone/model", model_source="hub", model_type=None, model_config={})
    stored = save(tmp_path, fakes.success(fakes.trial(of=of)))
    (row,) = json.loads(stored.json_path.read_text())
    known = {"model_flops_per_token": 600, "hardware_flops_per_token": 800, "flops_convention": "theirs", "mfu": 0.25}
    stored.json_path.write_text(json.dumps([{**row, **known}]))
    (read,) = load_results.load(stored.folder).runs
    assert {name: getattr(read.row, name) for name in known} == known


def test_a_folder_without_a_run_and_a_csv_get_one_line(run: RunFolder) -> None:
    """Only an empty folder below ``runs`` is a run without trials, which a report of several results leaves out."""
    empty = run.folder.with_name("zero_20261122_093000")
    empty.mkdir()
    for folder, kind in ((run.folder.parent, UsageError), (empty, load_results.NoTrialsError)):
        with pytest.raises(UsageError, match=r"holds neither run\.json") as raised:
            load_results.load(folder)
        assert raised.type is kind
    assert "Give a run folder, or a result's .json" in refusal(run.csv_path)


# ------------------------------------------------------------------ flat rows


def test_the_reference_result_is_read_from_its_flat_json_alone() -> None:
    rows, result = json.loads(REFERENCE.read_text()), load_results.load(REFERENCE)
    assert len(result.runs) == 12
    assert provenance.title(result.runs).startswith("tiny · 2 CPU ranks · bf16 · micro-batch 4 × 128 tokens")
    for row, again in zip(rows, rows_of(result.runs), strict=True):
        assert {name: again[name] for name in row if name in again} == {n: v for n, v in row.items() if n in again}


@pytest.mark.parametrize("limit_bytes", [None, 20 * fakes.GB])
def test_an_emulated_card_and_nodes_come_back_from_a_flat_row(tmp_path: Path, limit_bytes: int | None) -> None:
    place = fakes.placement(
        accelerator="cuda", num_gpus=3, hosts=(("a", 2), ("b", 1)), hostfile="/h", gpu_memory_limit_bytes=limit_bytes
    )
    outside = {"gpu_device_used_bytes": 12 * fakes.GB, "gpu_reserved_bytes": 10 * fakes.GB}
    used = {"gpu_peak_reserved_bytes": 10 * fakes.GB + 12_345_678}
    stored = save(tmp_path, fakes.success(fakes.trial(on=place), data_parallel_size=3, **outside, **used))
    alone = tmp_path / "elsewhere.json"
    alone.write_bytes(stored.json_path.read_bytes())
    (run,) = load_results.load(alone).runs
    assert run.trial.placement.gpu_memory_limit_bytes == limit_bytes
    assert (run.trial.placement.num_nodes, run.trial.placement.ranks_text) == (1, "3")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stage": None}, "row 1: stage"),
        ({"batch_size": "4"}, "row 1: batch_size"),
        ({"avg_step_time_ms": -1.0}, "row 1: avg_step_time_ms"),
        ({"avg_step_time_ms": 1e300}, "row 1: avg_step_time_ms"),  # its square is infinite
        ({"num_gpus": 10**15}, "num_gpus"),
        ({"pass_type": ""}, "pass_type"),
        ({"success": False}, "success is false"),
        ({"num_nodes": 7}, "num_nodes is 7"),
        ({"status": "✅ Success", "avg_step_time_ms": None}, "a step time"),
    ],
)
def test_a_flat_row_with_an_impossible_cell_is_named(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    row = {**json.loads(REFERENCE.read_text())[0], **changes}
    path = tmp_path / "elsewhere.json"
    path.write_text(json.dumps([row]))
    assert expected in refusal(path)


def test_a_flat_row_may_lack_columns_and_have_more(tmp_path: Path) -> None:
    row = json.loads(REFERENCE.read_text())[0]
    path = tmp_path / "elsewhere.json"
    path.write_text(json.dumps([{name: row[name] for name in row if name != "weight_change_cosine"} | {"later": 1}]))
    (run,) = load_results.load(path).runs
    assert run.row.weight_change_cosine is None
    unknown = {**row, "strategy": "mine", "stage": 1}
    path.write_text(json.dumps([unknown]))
    assert labels(load_results.load(path)) == ["mine"]


# ------------------------------------------------------------------ files that are not results


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"[1]", b"\x00\xff", b"[" * 100_000, b"[NaN]", REFERENCE.read_bytes()[:-3]]
)
def test_a_file_that_is_no_result_gets_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "zero_comparison_x.json"
    path.write_bytes(content)
    assert str(path) in refusal(path)
    assert "no such file" in refusal(tmp_path / "gone.json")


def test_a_run_without_records_says_that_nothing_had_finished(run: RunFolder) -> None:
    (run.folder / "records.jsonl").unlink()
    with pytest.raises(load_results.NoTrialsError, match="no trial had finished"):
        load_results.load(run.folder)
