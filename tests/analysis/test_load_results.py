"""Results read back: every way of naming one, and every way in which its files can be wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.analysis import flat_reader, load_results, provenance
from ds_bench.analysis.comparability import group_repeats
from ds_bench.analysis.flat_rows import FLAT_COLUMNS, flat_row, flat_rows
from ds_bench.analysis.load_results import Result
from ds_bench.config.deepspeed_config import is_full_config
from ds_bench.errors import UsageError
from ds_bench.records import json_files, reader, schema
from ds_bench.records.run_folder import RunFolder
from ds_bench.records.schema import CommunicationOperation, OffloadTimes, Outcome, TrialRecord
from ds_bench.system import environment
from ds_bench.system.environment import Environment
from tests.support import fakes
from tests.support.deepspeed_configs import EVERY_CONFIGURATION
from tests.support.real_trials import ROOT

HERE = ROOT / "tests"
SCHEMA1 = HERE / "data" / "schema1"
SCHEMA1_RUN = SCHEMA1 / "runs" / "zero_20261121_093000"
REFERENCE = HERE.parent / "results/reference/cpu_2cores_2026-11-21/zero_comparison_20261121_154122.json"
RANK = asdict(fakes.measurement())
HOST = Environment(hostname="node-0", logical_cores=8, packages={"torch": "2.13.0"})


def save(folder: Path, *entries: TrialRecord, arguments: tuple[str, ...] = ("--model", "tiny")) -> RunFolder:
    """A finished run with these records, as a comparison leaves it."""
    stored = RunFolder.create(folder, "zero")
    stored.save_run(
        {
            "family": "zero",
            "arguments": list(arguments),
            "environment": HOST.to_dict(),
            "notes": ["a note of the run"],
            "trials": [{"key": entry.trial.key, **entry.trial.to_dict()} for entry in entries],
        }
    )
    for entry in entries:
        stored.append(entry)
    made = load_results.summarise_all(entries) if entries else ()
    run_id = stored.folder.name
    stored.write_rows(flat_rows([replace(summary, environment=HOST, run_id=run_id) for summary in made]))
    return stored


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """ZeRO-0 and ZeRO-2 that trained, and ZeRO-3 that ran out of memory."""
    return save(
        tmp_path,
        fakes.success(fakes.trial(fakes.zero(0))),
        fakes.success(fakes.trial(fakes.zero(2)), step_seconds=[0.2] * 10),
        fakes.failure(fakes.trial(fakes.zero(3))),
    )


def lines(stored: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stored.folder / "records.jsonl").read_text().splitlines()]


def put_lines(stored: RunFolder, *entries: Any) -> None:
    texts = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    (stored.folder / "records.jsonl").write_text("".join(text + "\n" for text in texts))


def labels(result: Result) -> list[str]:
    return [entry.record.trial.configuration.label for entry in result.summaries]


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
    assert result.records == tuple(run.records())
    assert result.source == name(run)
    assert (result.environment, result.family, result.arguments) == (HOST, "zero", ("--model", "tiny"))
    assert result.notes == ("a note of the run",)
    assert labels(result) == ["ZeRO-0", "ZeRO-2", "ZeRO-3"]


def test_the_summaries_are_those_that_the_run_itself_showed(run: RunFolder) -> None:
    shown = json.loads(run.json_path.read_text())
    assert flat_rows(load_results.load(run.folder).summaries) == shown


def test_a_flat_json_without_its_run_folder_gives_its_rows(run: RunFolder, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere.json"
    alone.write_bytes(run.json_path.read_bytes())
    result = load_results.load(alone)
    assert result.records is None
    assert result.environment == replace(HOST, hostname="")
    assert flat_rows(result.summaries) == json.loads(alone.read_text())
    assert [entry.tokens_per_second for entry in result.summaries[:2]] == [pytest.approx(5120), pytest.approx(2560)]
    assert any("flat rows only" in note for note in result.notes)


@pytest.mark.parametrize(
    "values",
    [
        ("zero_init=true", "zero_init=false"), ("compile=none", "compile=torch"), ("loss=model", "loss=tiled"),
        ("data_workers=off", "data_workers=2"), ("data_prefetch=2", "data_prefetch=4"),
        ("cpu_binding=none", "cpu_binding=numa"),
        ("attention=sdpa", "attention=eager"), ("allocator=default", "allocator=expandable_segments"),
        ("data_workers=0+zero_init=true", "data_workers=0+zero_init=false"),
    ],
)  # fmt: skip
def test_rows_of_a_flat_json_that_differ_in_an_axis_alone_are_two_rows(values: tuple[str, str], tmp_path: Path) -> None:
    """Neither a column nor the hash of the DeepSpeed configuration tells them apart, only their names."""
    row = json.loads(REFERENCE.read_text())[-1]
    alone = tmp_path / "elsewhere.json"
    alone.write_text(json.dumps([{**row, "strategy": f"zero3+{value}", "config_hash": "0" * 16} for value in values]))
    assert len(group_repeats(load_results.load(alone).summaries)) == 2


def test_a_flat_json_whose_run_folder_holds_other_rows_is_read_by_itself(run: RunFolder) -> None:
    put_lines(run, *lines(run)[:2])
    result = load_results.load(run.json_path)
    assert result.records is None
    assert labels(result) == ["ZeRO-0", "ZeRO-2", "ZeRO-3"]
    assert any("other rows" in note for note in result.notes)


def test_a_flat_json_whose_run_folder_is_damaged_is_read_by_itself(run: RunFolder) -> None:
    put_lines(run, "garbage")
    result = load_results.load(run.json_path)
    assert len(result.summaries) == 3
    assert any("cannot be used" in note for note in result.notes)


def test_records_alone_do_without_run_json_and_say_so(run: RunFolder) -> None:
    (run.folder / "run.json").unlink()
    result = load_results.load(run.folder)
    assert result.environment is None
    assert len(result.summaries) == 3
    assert any("run.json" in note for note in result.notes)


def test_another_jsonl_does_not_borrow_the_run_json_beside_it(run: RunFolder) -> None:
    copy = run.folder / "other.jsonl"
    copy.write_bytes((run.folder / "records.jsonl").read_bytes())
    assert load_results.load(copy).environment is None


def test_of_two_attempts_at_a_trial_the_last_counts(run: RunFolder) -> None:
    retried = fakes.success(fakes.trial(fakes.zero(3)))
    run.append(retried)
    result = load_results.load(run.folder)
    assert labels(result) == ["ZeRO-0", "ZeRO-2", "ZeRO-3"]
    assert result.records is not None
    assert result.records[2] == retried


def test_rows_stand_in_the_order_of_the_plan_whatever_order_they_ended_in(run: RunFolder) -> None:
    put_lines(run, *reversed(lines(run)))
    assert labels(load_results.load(run.folder)) == ["ZeRO-0", "ZeRO-2", "ZeRO-3"]


def test_a_run_that_did_not_end_says_how_many_trials_are_missing(run: RunFolder) -> None:
    put_lines(run, lines(run)[0])
    assert "2 of the 3 planned trials have no record: the run did not end" in load_results.load(run.folder).notes


def test_a_trial_that_was_resumed_with_another_folder_for_checkpoints_is_the_one_that_was_planned(
    run: RunFolder,
) -> None:
    planned = json.loads((run.folder / "run.json").read_text())
    for trial in planned["trials"]:
        trial["inspection"] = {**trial["inspection"], "checkpoint": True, "checkpoint_path": "/planned"}
    (run.folder / "run.json").write_text(json.dumps(planned))
    other = {"checkpoint": True, "checkpoint_path": "/resumed"}
    put_lines(run, *({**each, "trial": {**each["trial"], "inspection": {**each["trial"]["inspection"], **other}}}
                     for each in lines(run)))  # fmt: skip
    result = load_results.load(run.folder)
    assert result.records is not None
    assert len(result.records) == 3
    assert not any("planned trials" in note for note in result.notes)


def test_a_peak_rate_that_the_user_gave_is_used_again(tmp_path: Path) -> None:
    on = fakes.placement(accelerator="cuda")
    entry = fakes.success(fakes.trial(fakes.zero(1), on=on), device_name="Card of tomorrow")
    for number, (arguments, peak) in enumerate(
        [(("--peak-tflops", "100", "--model", "tiny"), 100), (("--peak-tflops=250",), 250), (("--model", "tiny"), None)]
    ):
        summary = load_results.load(save(tmp_path / str(number), entry, arguments=arguments).folder).summaries[0]
        assert summary.model_tflops_per_gpu is not None
        assert summary.mfu == (peak and pytest.approx(summary.model_tflops_per_gpu / peak))


def test_a_model_that_is_no_preset_keeps_the_flops_that_its_run_wrote(tmp_path: Path) -> None:
    of = fakes.workload(model="pkg.mod:make", model_source="factory", model_type=None, model_config={})
    stored = save(tmp_path, fakes.success(fakes.trial(of=of)))
    rows = json.loads(stored.json_path.read_text())
    rows[0] |= {"model_flops_per_token": 600, "model_tflops_per_gpu": 3.0}
    stored.write_rows(rows)
    summary = load_results.load(stored.folder).summaries[0]
    assert (summary.model_flops_per_token, summary.model_tflops_per_gpu) == (600, 3.0)


def test_a_preset_s_name_does_not_make_a_preset_of_a_local_model(tmp_path: Path) -> None:
    local = fakes.workload(model_source="local", model_config={"path": "tiny"})
    stored = save(tmp_path, fakes.success(fakes.trial()), fakes.success(fakes.trial(of=local)))
    stored.json_path.unlink()
    preset, other = load_results.load(stored.folder).summaries
    assert preset.model_flops_per_token is not None
    assert other.model_flops_per_token is None


def test_a_thousand_records_are_read_in_little_time_and_their_configurations_kept_once(tmp_path: Path) -> None:
    """About 0.25 s on one core of 2024; the limit is for a busy machine."""
    of = fakes.workload(num_steps=20)
    made = [fakes.trial(fakes.zero(number % 4), on=fakes.placement(num_gpus=2), of=of) for number in range(4)]
    config = {f"section_{number}": {"enabled": False, "size": number} for number in range(100)}
    entries = [fakes.success(each, resolved_config=config) for each in made]
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for number in range(1000):
            data = entries[number % 4].to_dict()
            data["trial"]["repeat"] = number
            data["wall_seconds"] = number / 7
            file.write(json.dumps(data) + "\n")
    begun = time.process_time()
    result = load_results.load(path)
    assert time.process_time() - begun < 2
    assert result.records is not None
    assert len({id(rank.resolved_config) for entry in result.records for rank in entry.ranks}) == 1
    assert len({id(entry.trial.ds_config) for entry in result.records}) == 4


# ------------------------------------------------------------------ the kept fixture


def test_the_kept_result_of_schema_1_is_still_read() -> None:
    """Never rewritten: when the schema moves on, this is the older file."""
    result = load_results.load(SCHEMA1_RUN)
    assert result.records is not None
    assert [entry.outcome.status for entry in result.records] == [
        "Success",
        "Success",
        "Success",
        "OOM (host)",
        "Unsupported",
    ]
    # 2 ranks x 2 sequences x 32 tokens a step
    assert [
        entry.tokens_per_second and entry.tokens_per_second * entry.mean_step_seconds for entry in result.summaries
    ] == [pytest.approx(128)] * 3 + [None] * 2
    assert result.summaries[0].losses[0] == pytest.approx(6.9395, abs=0.05)
    assert result.environment is not None
    assert result.environment.packages["deepspeed"] == "0.19.8"
    assert result.notes == ("CPU accelerator: these figures say nothing about GPUs",)


def test_the_kept_flat_json_of_schema_1_agrees_with_its_run() -> None:
    assert (
        load_results.load(SCHEMA1 / "zero_comparison_20261121_093000.json").records
        == load_results.load(SCHEMA1_RUN).records
    )


def test_the_kept_result_of_schema_2_is_still_read() -> None:
    """Of a real run with ``--set zero_optimization.overlap_comm=false``. Never rewritten either."""
    result = load_results.load(HERE / "data/schema2/runs/offload_20261122_093000")
    assert result.records is not None
    rows = [entry.trial.configuration for entry in result.records]
    assert [(row.name, row.layout) for row in rows] == [
        ("none", (3, "none", "none")),
        ("cpu_optimizer", (3, "cpu", "none")),
        ("nvme", (3, "nvme", "nvme")),
    ]
    assert [row.deepspeed_config["zero_optimization"]["overlap_comm"] for row in rows] == [False] * 3
    assert all(entry.tokens_per_second for entry in result.summaries)


def test_the_kept_result_of_schema_3_is_still_read() -> None:
    """Of a real run with an axis, a file of "auto" and an engine of torch's. Never rewritten either."""
    folder = HERE / "data/schema3"
    result = load_results.load(folder / "runs/zero_20261122_093000")
    assert result.records is not None
    rows = [entry.trial.configuration for entry in result.records]
    assert [(row.engine, row.source, row.stage) for row in rows] == [
        ("deepspeed", "axis", 2),
        ("fsdp2", "axis", 3),
        ("deepspeed", "file", 3),
    ]
    assert [row.axis_values["activation_checkpointing"] for row in rows] == ["false", "true", "true"]
    assert '"reduce_bucket_size": "auto"' in (rows[2].file_text or "")
    assert rows[2].resolved_values["zero_optimization.reduce_bucket_size"] == 128 * 128
    assert all(entry.tokens_per_second for entry in result.summaries)
    flat = load_results.load(folder / "zero_comparison_20261122_093000.json")
    assert flat.records == result.records


def test_the_kept_result_of_schema_4_is_still_read() -> None:
    """Of a real run with a file of tokens, profiles, checkpoints and the monitor. Never rewritten either."""
    folder = HERE / "data/schema4"
    result = load_results.load(folder / "runs/zero_20261122_142057")
    assert result.records is not None
    trials = [entry.trial for entry in result.records]
    assert [trial.configuration.name for trial in trials] == ["zero1", "zero3+zero_init=true", "zero3+zero_init=false"]
    assert {(trial.inspection.profiles, trial.inspection.checkpoint) for trial in trials} == {
        (("comms", "flops"), True)
    }
    assert {(trial.workload.data_tokens, trial.workload.data_workers) for trial in trials} == {(4000, 1)}
    for entry in result.records:
        (rank,) = entry.ranks
        assert rank.checkpoint_restored
        assert rank.checkpoint.keys() == {"save", "universal", "load", "model_16bit"}
        assert rank.trainable_parameter_count == rank.parameter_count
    assert load_results.load(folder / "zero_comparison_20261122_142057.json").records == result.records


# ------------------------------------------------------------------ versions


def test_a_newer_schema_is_refused_with_what_to_do(run: RunFolder) -> None:
    put_lines(run, *({**entry, "schema_version": schema.SCHEMA_VERSION + 1} for entry in lines(run)))
    assert "written by a newer version" in (text := refusal(run.folder))
    assert "upgrade" in text


def test_a_newer_run_json_is_refused_with_what_to_do(run: RunFolder) -> None:
    data = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps({**data, "schema_version": 99}))
    assert "written by a newer version" in refusal(run.folder)


@pytest.mark.parametrize("version", [None, "1", True, 0, -1, 1.0])
def test_a_schema_that_is_no_version_is_refused(run: RunFolder, version: object) -> None:
    put_lines(run, {**lines(run)[0], "schema_version": version})
    assert "schema_version" in refusal(run.folder)


def test_a_record_of_schema_1_is_the_trial_that_is_planned_today() -> None:
    """So that a run begun with an earlier version is resumed and not run again."""
    for configuration in EVERY_CONFIGURATION:
        entry = fakes.success(fakes.trial(configuration))
        data = {**entry.to_dict(), "schema_version": 1}
        del data["trial"]["configuration"]
        data["trial"]["strategy"] = {
            "name": configuration.name,
            "label": configuration.label,
            "stage": configuration.stage,
            "offload_optimizer": configuration.offload_optimizer,
            "offload_param": configuration.offload_param,
        }
        trial = reader.parse_record(json.dumps(data).encode(), "line 1", {}).trial
        assert trial.key == entry.trial.key
        assert (trial.configuration.label, trial.configuration.layout) == (configuration.label, configuration.layout)


def test_an_older_schema_is_migrated_step_by_step(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two schemas later, where the present one called the wall time ``seconds`` and the next counted milliseconds."""
    present = reader.SCHEMA_VERSION

    def to_next(kind: reader.Kind, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "record":
            data["wall_milliseconds"] = data.pop("seconds") * 1000
        return data

    def to_last(kind: reader.Kind, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "record":
            data["wall_seconds"] = data.pop("wall_milliseconds") / 1000
        return data

    old = []
    for entry in lines(run):
        del entry["wall_seconds"]
        old.append({**entry, "seconds": 7.5})
    put_lines(run, *old)
    monkeypatch.setattr(reader, "SCHEMA_VERSION", present + 2)
    monkeypatch.setattr(reader, "MIGRATIONS", {present: to_next, present + 1: to_last})
    result = load_results.load(run.folder)
    assert result.records is not None
    assert [entry.wall_seconds for entry in result.records] == [7.5] * 3
    assert {entry.schema_version for entry in result.records} == {present + 2}


def test_a_schema_that_no_migration_takes_on_is_refused(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SCHEMA_VERSION", reader.SCHEMA_VERSION + 1)
    assert "too old" in refusal(run.folder)


# ------------------------------------------------------------------ damaged records


def test_a_torn_last_line_is_left_out_with_a_note(run: RunFolder) -> None:
    path = run.folder / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    result = load_results.load(run.folder)
    assert labels(result) == ["ZeRO-0", "ZeRO-2"]
    assert "records.jsonl line 3 ends in the middle: it was cut off: left out" in result.notes


def test_a_line_that_a_crash_filled_with_zeros_is_left_out_with_a_note(run: RunFolder) -> None:
    first, *rest = lines(run)
    put_lines(run, first, "\0" * 512, *rest)
    result = load_results.load(run.folder)
    assert len(result.summaries) == 3
    assert any("line 2" in note for note in result.notes)


def test_records_of_which_no_line_can_be_read_are_refused(run: RunFolder) -> None:
    put_lines(run, "stage,strategy,model", "0,zero0,tiny")
    assert "no line of" in refusal(run.folder)


@pytest.mark.parametrize("content", ["", "\n\n", "   \n"])
def test_records_without_a_line_have_no_rows(run: RunFolder, content: str) -> None:
    (run.folder / "records.jsonl").write_text(content)
    assert "no rows" in refusal(run.folder)


def test_a_run_without_records_says_that_nothing_had_finished(run: RunFolder) -> None:
    (run.folder / "records.jsonl").unlink()
    assert "no trial had finished" in refusal(run.folder)


def test_a_missing_key_is_named_with_its_record(run: RunFolder) -> None:
    first, second, third = lines(run)
    del second["ranks"][0]["step_seconds"]
    put_lines(run, first, second, third)
    text = refusal(run.folder)
    assert "line 2 (00_zero2): ranks[0].step_seconds is missing" in text


def test_unknown_keys_are_left_out_with_a_note(run: RunFolder) -> None:
    first, *rest = lines(run)
    first["mood"] = "good"
    first["trial"]["configuration"]["colour"] = "blue"
    put_lines(run, first, *rest)
    result = load_results.load(run.folder)
    assert result.records is not None
    assert fakes.success(fakes.trial(fakes.zero(0))) in result.records
    assert "records.jsonl: unknown keys left out: trial.configuration.colour, mood" in result.notes


WRONG: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("ranks", 0, "world_size"), True, "ranks[0].world_size is true: input should be a valid integer"),
    (("ranks", 0, "world_size"), 1.5, "ranks[0].world_size is 1.5: input should be a valid integer"),
    (("ranks", 0, "world_size"), 0, "ranks[0] is not usable: world_size must be 1 or more"),
    (("ranks", 0, "hostname"), None, "ranks[0].hostname is null: input should be a valid string"),
    (("ranks", 0, "step_seconds", 3), "0.1", 'ranks[0].step_seconds[3] is "0.1": input should be a valid number'),
    (("ranks", 0, "step_seconds"), [], "step_seconds must be positive"),
    (("ranks", 0, "losses", 1), [], "ranks[0].losses[1] is a list: input should be a valid number"),
    (("ranks", 0, "losses", 4), float("nan"), "ranks[0].losses[4] is not a finite number"),
    (("ranks", 0, "ledger"), {"cpu": 3}, "ranks[0].ledger.cpu is 3: input should be"),
    (("ranks", 0, "gpu_peak_bytes"), 10**400, "ranks[0].gpu_peak_bytes is not a finite number, or above 1e60"),
    (("ranks", 0, "window_seconds"), 1e61, "ranks[0].window_seconds is not a finite number, or above 1e60"),
    (("ranks", 0, "resolved_config"), {"zero": [0, 10**60 + 1]}, "ranks[0].resolved_config.zero[1] is not a finite"),
    (("ranks",), {}, "ranks is an object: input should be"),
    (("outcome",), None, "outcome is null: input should be an object"),
    (
        ("trial", "configuration", "deepspeed_config", "zero_optimization", "stage"),
        7,
        "trial.configuration is not usable: stage is 7",
    ),
    (("trial", "placement", "accelerator"), "abacus", """trial.placement.accelerator is "abacus": input should"""),
    (("trial", "ds_config"), [], "trial.ds_config is a list: input should be"),
]


@pytest.mark.parametrize(("path", "value", "expected"), WRONG, ids=[str(index) for index in range(len(WRONG))])
def test_a_value_of_the_wrong_type_is_named_with_its_place(
    run: RunFolder, path: tuple[str | int, ...], value: Any, expected: str
) -> None:
    first, *rest = lines(run)
    target: Any = first
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    put_lines(run, first, *rest)
    assert expected in (text := refusal(run.folder))
    assert "line 1" in text


def test_a_configuration_that_makes_no_sense_is_named_with_its_trial(run: RunFolder) -> None:
    first, *rest = lines(run)
    first["trial"]["ds_config"]["optimizer"] = "AdamW"
    put_lines(run, first, *rest)
    assert "00_zero0" in refusal(run.folder)


def test_a_configuration_nested_without_end_is_left_out_with_a_note(run: RunFolder) -> None:
    first, *rest = lines(run)
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    first["trial"]["ds_config"] = deep
    put_lines(run, first, *rest)
    result = load_results.load(run.folder)
    assert len(result.summaries) == 2
    assert any("records.jsonl line 1 is nested too deeply" in note for note in result.notes)


def test_a_number_too_large_for_a_float_is_refused(run: RunFolder) -> None:
    put_lines(run, re.sub(r'"window_seconds": [\d.]+', '"window_seconds": 1e999', json.dumps(lines(run)[0])))
    assert "ranks[0].window_seconds is not a finite number" in refusal(run.folder)


def test_of_a_key_given_twice_the_last_counts(run: RunFolder) -> None:
    text = json.dumps(lines(run)[0]).replace('"launch": "warm"', '"launch": "warm", "launch": "deepspeed"')
    put_lines(run, text)
    result = load_results.load(run.folder)
    assert result.records is not None
    assert result.records[0].launch == "deepspeed"


def test_half_a_surrogate_pair_can_be_printed_afterwards(run: RunFolder) -> None:
    first, *rest = lines(run)
    first["outcome"]["error"] = "odd \ud83d name, whole \U0001f600"
    put_lines(run, first, *rest)
    result = load_results.load(run.folder)
    assert result.records is not None
    assert result.records[0].outcome.error == "odd \ufffd name, whole \U0001f600"


def test_a_run_json_with_odd_extras_costs_only_those(run: RunFolder) -> None:
    data = json.loads((run.folder / "run.json").read_text())
    data |= {"arguments": [1, 2], "notes": "none", "environment": {"hostname": "node-0"}, "trials": {"a": 1}}
    (run.folder / "run.json").write_text(json.dumps(data))
    result = load_results.load(run.folder)
    assert (result.arguments, result.environment, len(result.summaries)) == ((), None, 3)
    assert any("logical_cores is missing" in note for note in result.notes)


def test_cards_of_a_stored_environment_come_back_whole(run: RunFolder) -> None:
    cards = fakes.inventory(cards=2).gpus
    busy = replace(HOST, gpus=(replace(cards[0], other_processes=((7, None), (8, 2**30))), cards[1]))
    data = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps({**data, "environment": busy.to_dict()}))
    assert load_results.load(run.folder).environment == busy


def test_all_rows_failed_is_a_result(tmp_path: Path) -> None:
    stored = save(tmp_path, *(fakes.failure(fakes.trial(fakes.zero(stage))) for stage in (0, 1)))
    for path in (stored.folder, stored.json_path):
        assert [entry.record.outcome.status for entry in load_results.load(path).summaries] == ["OOM", "OOM"]


def test_one_row_is_a_result(tmp_path: Path) -> None:
    stored = save(tmp_path, fakes.success())
    assert len(load_results.load(stored.folder).summaries) == len(load_results.load(stored.json_path).summaries) == 1


# ------------------------------------------------------------------ things that are no result


def test_what_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    for name in ("nothing", "nothing.json", "nothing.csv", "run.json", "records.jsonl", "x.jsonl"):
        assert "no such file" in refusal(tmp_path / name)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    assert "cannot be read" in refusal(Path("a" * 5000))
    assert "cannot be read" in refusal(Path("nul\0byte"))


def test_a_folder_without_a_run_is_its_only_result_or_points_to_one(run: RunFolder, tmp_path: Path) -> None:
    for folder, result in ((tmp_path, run.json_path), (run.folder.parent, run.folder)):
        loaded = load_results.load(folder)  # the only one
        assert loaded.source == result
        assert loaded.records == load_results.load(run.folder).records
    shutil.copytree(run.folder, run.folder.with_name("zz"))
    assert str(run.folder.with_name("zz")) in refusal(run.folder.parent)
    (tmp_path / "empty").mkdir()
    assert "holds no run.json" in refusal(tmp_path / "empty")


def test_a_csv_is_told_apart_and_its_json_is_named(run: RunFolder, tmp_path: Path) -> None:
    assert str(run.json_path) in refusal(run.csv_path)
    lonely = tmp_path / "lonely.csv"
    lonely.write_bytes(run.csv_path.read_bytes())
    assert "give the .json beside it" in refusal(lonely)
    renamed = tmp_path / "renamed.json"
    renamed.write_bytes(run.csv_path.read_bytes())
    assert "is the CSV of a result" in refusal(renamed)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"[]", "has no rows"),
        (b"{}", "no list of rows"),
        (b"[1]", "row 1 is 1: input should be an object"),
        (b'[{"stage": 0', "ends in the middle: it was cut off"),
        (b"# Title\n", "is not JSON: expected value (line 1 column 1)"),
        (b"[]\n[]\n", "is not JSON: trailing characters (line 2 column 1)"),
        (b"\xff\xfe[\x00]\x00", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" + b"9" * 5000 + b"]", "is not JSON: number out of range"),
        (b'[{"stage": NaN}]', "row 1: stage is not a finite number"),
    ],
)
def test_a_file_that_is_no_result_gets_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    assert expected in refusal(path)


@pytest.mark.parametrize("cut", [1, 2, 3, 10, 100, 700])
def test_a_flat_json_cut_anywhere_says_so(cut: int, tmp_path: Path) -> None:
    text = json.dumps(json.loads(REFERENCE.read_text())[:1])[:-1]
    path = tmp_path / "cut.json"
    path.write_text(text[: len(text) - cut])
    assert "cut off" in refusal(path)


def test_a_byte_order_mark_does_no_harm(run: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "edited.json"
    path.write_bytes(b"\xef\xbb\xbf" + run.json_path.read_bytes())
    assert len(load_results.load(path).summaries) == 3
    records_file = run.folder / "records.jsonl"
    records_file.write_bytes(b"\xef\xbb\xbf" + records_file.read_bytes())
    assert len(load_results.load(run.folder).summaries) == 3


def test_a_pipe_a_socket_and_a_device_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.json"))
        begun = time.monotonic()
        for path in (tmp_path / "pipe.json", tmp_path / "s.json", Path("/dev/zero")):
            assert "not a regular file" in refusal(path)
    assert time.monotonic() - begun < 5


def test_a_pipe_in_the_place_of_records_is_refused_without_waiting(run: RunFolder) -> None:
    (run.folder / "records.jsonl").unlink()
    os.mkfifo(run.folder / "records.jsonl")
    assert "not a regular file" in refusal(run.folder)


def test_a_file_larger_than_any_result_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(json_files.LARGEST_FILE_BYTES + 1)
    assert "larger than any result" in refusal(path)


# ------------------------------------------------------------------ flat rows


def flat(tmp_path: Path, **changes: Any) -> Path:
    """A flat JSON of one row with some cells changed; ``...`` takes a cell away."""
    row = json.loads(REFERENCE.read_text())[0] | changes
    path = tmp_path / "row.json"
    path.write_text(json.dumps([{name: value for name, value in row.items() if value is not ...}]))
    return path


def test_a_flat_text_that_tells_nothing_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    known = load_results.load(flat(tmp_path)).summaries[0].record
    changes = {"batch_policy": "x", "seq_policy": "", "trial_id": "", "device": ""}
    read = load_results.load(flat(tmp_path, **changes)).summaries[0].record
    assert read.trial.workload == known.trial.workload
    assert read.trial.trial_id
    assert read.ranks[0].device_name


def test_the_reference_result_is_read_from_its_flat_json_alone() -> None:
    result = load_results.load(REFERENCE)
    rows = json.loads(REFERENCE.read_text())
    assert result.family == "zero"
    assert [entry.tokens_per_second for entry in result.summaries] == [row["throughput_tokens_per_sec"] for row in rows]
    first = result.summaries[0]
    assert first.mean_step_seconds == pytest.approx(rows[0]["avg_step_time_ms"] / 1000)
    assert first.host_peak_bytes == round(rows[0]["cpu_used_gb"] * 2**30)
    assert (first.losses[0], first.losses[-1]) == (rows[0]["first_loss"], rows[0]["final_loss"])
    assert len(first.losses) == 60  # 10 warm-up steps and 50 measured
    assert first.record.ranks[0].ledger["cpu"]["parameters"] == 1115136


def test_a_flat_row_gives_the_same_row_again() -> None:
    """Every column that the file holds, to nine digits where milliseconds became seconds."""
    for row in json.loads(REFERENCE.read_text()):
        summary = flat_reader.read_summary(flat_reader.check_rows([row])[0])
        assert summary.predicted_over_ledger == row["predicted_over_measured"]  # where it stood before
        row["predicted_over_measured"] = None
        again = {name: value for name, value in flat_row(summary).items() if name in row}
        assert again == {name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
                         for name, value in row.items()}  # fmt: skip


def test_a_row_written_and_read_back_gives_the_same_row(subtests: pytest.Subtests) -> None:
    for case, entry in {
        "cuda": fakes.success(fakes.trial(fakes.zero(3), on=fakes.placement(accelerator="cuda", num_gpus=2))),
        "emulated card": fakes.success(
            fakes.trial(on=fakes.placement(accelerator="cuda", gpu_memory_limit_bytes=12 * fakes.GB)),
            ledger={"gpu": {"parameters": 2**20, "other": 3}, "cpu": {}},
        ),
        "nvme": fakes.success(
            fakes.trial(fakes.offload("nvme"), on=fakes.placement(accelerator="cuda", nvme_path="/mnt/disk")),
            nvme_stored_bytes=3 * fakes.GB,
            nvme_read_bytes=7 * fakes.GB,
            nvme_written_bytes=5,
            ledger={"nvme": {"optimizer_states": 2**30}},
            offload=OffloadTimes(
                cpu_adam_seconds=0.01,
                cpu_adam_bytes=28,
                disk_read_bytes=7,
                disk_written_bytes=5,
                disk_wait_seconds=0.09,
                disk_busy_seconds=0.09,
            ),
            communication=(CommunicationOperation(name="reduce", count=1, bytes=2, seconds=0.1, wait_seconds=0.0),),
            step_parts={"communication": 0.1, "transfer": 0.09},
            profiled_forward_flops=1e9,
        ),
        "reference": fakes.success(
            fakes.trial(fakes.reference("fsdp2"), on=fakes.placement(accelerator="cuda", num_gpus=2))
        ),
        "one step": fakes.success(fakes.trial(of=fakes.workload(num_steps=1, warmup_steps=0)), gpu_alloc_retries=3),
        "nan": fakes.success(losses=(None,) * 12),
        "host memory": fakes.failure(status=schema.OOM_HOST),
        "odd error": fakes.failure(
            fakes.trial(fakes.offload("cpu_full", 2)), status="RuntimeError", error="it; broke; twice"
        ),
        "refused": TrialRecord(
            trial=fakes.trial(fakes.zero(1)), outcome=Outcome(status=schema.UNSUPPORTED, error="no")
        ),
    }.items():
        with subtests.test(case):
            (row,) = flat_rows(load_results.summarise_all([entry]))
            stored = json.loads(json.dumps(row))
            again = flat_row(flat_reader.read_summary(flat_reader.check_rows([stored])[0]))
            assert again == {
                name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
                for name, value in stored.items()
            }


def test_how_far_a_prediction_was_off_comes_back_from_a_flat_row() -> None:
    (summary,) = load_results.summarise_all([fakes.success()])
    row = flat_row(replace(summary, predicted_over_measured=0.93))
    changed = [{**row, "accelerator": "cuda"}, {**row, "predicted_over_ledger": None}]
    on_a_gpu, before_the_ledgers_column = map(flat_reader.read_summary, flat_reader.check_rows(changed))
    assert on_a_gpu.predicted_over_measured == 0.93
    assert before_the_ledgers_column.predicted_over_measured is None
    assert before_the_ledgers_column.predicted_over_ledger == 0.93


def test_a_configuration_is_known_of_a_record_and_not_of_its_flat_row(subtests: pytest.Subtests) -> None:
    for strategy in (fakes.zero(0), fakes.zero(3), fakes.offload("nvme"), fakes.offload("cpu_full", 2)):
        with subtests.test(strategy.name):
            entry = fakes.success(fakes.trial(strategy))
            (row,) = flat_rows(load_results.summarise_all([entry]))
            assert is_full_config(entry.trial)
            assert not is_full_config(flat_reader.read_summary(flat_reader.check_rows([row])[0]).record.trial)
            assert not is_full_config(replace(entry.trial, ds_config={}))


def test_a_flat_json_keeps_caveats_as_values(tmp_path: Path) -> None:
    summary = load_results.summarise_all([fakes.success(losses=(None,) * 12, notes=("odd; very odd",))])[0]
    file = tmp_path / "zero_comparison_1.json"
    file.write_text(json_files.json_text([flat_row(summary)]))
    assert load_results.load(file).summaries[0].caveats == summary.caveats


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stage": ...}, "row 1: stage is missing"),
        ({"stage": True}, "row 1: stage is true: input should be a valid integer"),
        ({"stage": "2"}, 'row 1: stage is "2": input should be a valid integer'),
        ({"stage": 9}, "row 1 is not usable: stage is 9"),
        ({"success": 1}, "row 1: success is 1: input should be a valid boolean"),
        ({"success": False}, "says success false and status ✅ Success"),
        ({"status": ""}, "says success true and status"),
        ({"throughput_tokens_per_sec": -1.0}, "throughput_tokens_per_sec is -1.0: input should be greater"),
        ({"throughput_tokens_per_sec": 0}, "no throughput_tokens_per_sec"),
        ({"throughput_tokens_per_sec": 10**400}, "throughput_tokens_per_sec is not a finite number, or above"),
        ({"avg_step_time_ms": "fast"}, 'avg_step_time_ms is "fast": input should be a valid number'),
        ({"avg_step_time_ms": 0}, "must be positive and finite"),
        ({"model": 7}, "model is 7: input should be a valid string"),
        ({"model": ""}, "model is ''"),
        ({"precision": "int2"}, "precision is 'int2'"),
        ({"accelerator": "abacus"}, "neither cuda nor cpu"),
        ({"num_gpus": 0}, "num_gpus is 0: must be 1 or more"),
        ({"num_nodes": 99}, "row 1 is not usable: has 99 nodes and "),
    ],
)
def test_a_flat_row_with_an_impossible_cell_is_named(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal(flat(tmp_path, **changes))


def test_only_the_first_wrong_value_of_another_json_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    told = flat_reader.invalid_value
    monkeypatch.setattr(flat_reader, "invalid_value", lambda error: errors.extend(error.errors()) or told(error))
    path = tmp_path / "numbers.json"
    path.write_text(json.dumps([1] * 1000))
    assert "row 1 is 1: input should be an object" in refusal(path)
    assert len(errors) == 1  # those of a large file fill the memory


def test_the_trained_share_of_an_unknown_number_of_parameters_is_left_out(tmp_path: Path) -> None:
    result = load_results.load(flat(tmp_path, parameter_count=0, trainable_parameter_count=7))
    assert "trained" not in provenance.title(result.summaries)


def test_a_flat_row_may_lack_columns_that_are_not_needed_and_have_more(tmp_path: Path) -> None:
    result = load_results.load(flat(tmp_path, cpu_pss_gb=..., ledger_cpu_other_gb=..., device=None, horoscope="fine"))
    assert result.summaries[0].host_pss_bytes is None
    assert "row.json: unknown columns left out: horoscope" in result.notes


def test_a_flat_row_that_claims_endless_steps_costs_no_endless_memory(tmp_path: Path) -> None:
    assert len(load_results.load(flat(tmp_path, num_steps=10**30)).summaries[0].losses) == 100_000


def test_a_strategy_that_this_version_does_not_know_keeps_its_name(tmp_path: Path) -> None:
    strategy = load_results.load(flat(tmp_path, strategy="zero4", stage=3)).summaries[0].record.trial.configuration
    assert (strategy.name, strategy.label, strategy.stage) == ("zero4", "zero4", 3)


def test_every_column_of_a_flat_row_has_a_type() -> None:
    for row in json.loads(REFERENCE.read_text()):
        del row["caveat_list"]
        assert flat_reader.check_rows([row]) == [row]
        assert list(row) == [
            column.name for column in FLAT_COLUMNS if column.name in row
        ]  # it was written before some of them
    (row,) = flat_rows(load_results.summarise_all([fakes.success()]))
    del row["caveat_list"]
    assert flat_reader.check_rows([row]) == [row]
    assert list(row) == [column.name for column in FLAT_COLUMNS]


# ------------------------------------------------------------------ parsing and building


@given(st.builds(lambda seconds: fakes.success(step_seconds=seconds), st.lists(st.floats(1e-6, 1e6), min_size=1)))
def test_a_record_written_and_read_again_is_the_same(entry: TrialRecord) -> None:
    assert json_files.parse(TrialRecord, json.dumps(entry.to_dict()).encode()) == entry


def test_one_and_true_are_told_apart_in_what_records_share(run: RunFolder) -> None:
    """``==`` does not; a configuration read from one record must not stand in for the other's."""
    entries = lines(run)
    for entry, value in zip(entries, (1, True, 1.0), strict=True):
        entry["trial"] |= {"configuration": entries[0]["trial"]["configuration"], "ds_config": {"k": value}}
    put_lines(run, *entries)
    records = reader.read_records(run.folder / "records.jsonl", (), [])
    assert [type(entry.trial.ds_config["k"]) for entry in records] == [int, bool, float]


NUMBERS = st.integers(-(10**70), 10**70) | st.floats() | st.sampled_from([1e59, 1e60, 1.1e60, -1e61, 10**60 + 1])


@given(st.dictionaries(st.text(), NUMBERS | st.lists(NUMBERS) | st.text()))
def test_the_quick_look_for_large_numbers_misses_none(config: dict[str, Any]) -> None:
    data = {**RANK, "resolved_config": config}
    try:
        json_files.check_numbers(data)
    except json_files.InvalidValueError:
        assert json_files.validate(schema.RankMeasurement, json.dumps(data).encode()) is None


def test_environments_stay_comparable_after_a_round_trip(run: RunFolder) -> None:
    loaded = load_results.load(run.folder).environment
    assert loaded is not None
    assert environment.comparability_differences(loaded, HOST) == []
