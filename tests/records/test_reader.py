"""Parts that records have word for word in common are parsed once, and change nothing in what is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_bench.errors import UsageError
from ds_bench.records import json_files, reader
from ds_bench.records.schema import TrialRecord
from tests.support import fakes

CONFIG = {"zero_config": {"stage": 1, "ratio": 0.5}, "name": "Ä"}


def line_of(repeat: int, **changes: Any) -> dict[str, Any]:
    record = fakes.success(fakes.trial(fakes.zero(1), repeat=repeat), resolved_config=CONFIG)
    data: dict[str, Any] = {**record.to_dict(), **changes}
    return data


def read(tmp_path: Path, *lines: dict[str, Any]) -> tuple[TrialRecord, ...]:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return reader.read_records(path, [], [])


def read_each_alone(tmp_path: Path, *lines: dict[str, Any]) -> tuple[TrialRecord, ...]:
    return tuple(record for line in lines for record in read(tmp_path, line))


def test_repeated_parts_are_one_object_and_records_are_as_if_read_alone(tmp_path: Path) -> None:
    lines = [line_of(repeat) for repeat in range(3)]
    records = read(tmp_path, *lines)
    assert records == read_each_alone(tmp_path, *lines)
    assert len({id(rank.resolved_config) for record in records for rank in record.ranks}) == 1
    assert len({id(record.trial.ds_config) for record in records}) == 1


def test_a_known_part_elsewhere_than_in_its_field_stays_there(tmp_path: Path) -> None:
    lines = [line_of(repeat) for repeat in range(2)]
    lines[1]["trial"]["prediction"] = {"gpu": {"resolved_config": CONFIG, "bytes": 1}}
    records = read(tmp_path, *lines)
    assert records == read_each_alone(tmp_path, *lines)
    assert records[1].trial.prediction == {"gpu": {"resolved_config": CONFIG, "bytes": 1}}


def test_what_looks_like_the_mark_of_a_part_is_read_as_it_is_written(tmp_path: Path) -> None:
    lines = [line_of(repeat) for repeat in range(2)]
    lines[1]["trial"]["prediction"] = {"": 0}
    assert read(tmp_path, *lines)[1].trial.prediction == {"": 0}


def test_equal_parts_of_other_types_are_not_taken_for_each_other(tmp_path: Path) -> None:
    lines = [line_of(repeat) for repeat in range(2)]
    lines[1]["ranks"] = [{**rank, "resolved_config": {**CONFIG, "flag": True}} for rank in lines[1]["ranks"]]
    lines[0]["ranks"] = [{**rank, "resolved_config": {**CONFIG, "flag": 1}} for rank in lines[0]["ranks"]]
    flags = [record.ranks[0].resolved_config["flag"] for record in read(tmp_path, *lines)]
    assert flags == [1, True]
    assert isinstance(flags[1], bool)
    assert not isinstance(flags[0], bool)


def test_texts_with_exponents_below_ten_are_read_in_one_pass_and_larger_numbers_named(tmp_path: Path) -> None:
    """DeepSpeed's own settings hold such a text, so that every real record does."""
    line = line_of(0)
    line["ranks"] = [{**rank, "resolved_config": {"text": "{'size': 1.024000e+03, }"}} for rank in line["ranks"]]
    text = json.dumps(line).encode()
    assert json_files.validate(TrialRecord, text) is not None
    wall = f'"wall_seconds": {json.dumps(line["wall_seconds"])}'.encode()
    for number in (b"1E+99", b"1e0099", b"1e400"):
        assert json_files.validate(TrialRecord, text.replace(wall, b'"wall_seconds": ' + number)) is None


def test_a_part_of_another_kind_with_the_same_text_stays_what_it_is(tmp_path: Path) -> None:
    lines = [line_of(0)]
    lines[0]["ranks"] = [{**rank, "resolved_config": lines[0]["trial"]["configuration"]} for rank in lines[0]["ranks"]]
    (record,) = read(tmp_path, *lines)
    assert isinstance(record.ranks[0].resolved_config, dict)


def test_a_known_part_is_checked_again_where_more_is_asked_of_it(tmp_path: Path) -> None:
    """What the engine resolved may be anything; a row's configuration must have a ZeRO stage."""
    lines = [line_of(repeat) for repeat in range(2)]
    seventh = {"zero_optimization": {"stage": 7}}
    lines[0]["ranks"] = [{**rank, "resolved_config": seventh} for rank in lines[0]["ranks"]]
    lines[1]["trial"]["configuration"]["deepspeed_config"] = seventh
    with pytest.raises(UsageError, match="stage is 7"):
        read(tmp_path, *lines)
