"""Files of a run read back: equal parts once, one error line for another version or a wrong value, damage refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.analysis import load_results, merge_results
from ds_bench.analysis.comparison import rows_of
from ds_bench.errors import UsageError
from ds_bench.records import reader
from ds_bench.records.schema import SCHEMA_VERSION, TrialRecord
from tests.support import fakes

CONFIG = {"zero_config": {"stage": 1, "ratio": 0.5}, "name": "Ä"}
GPU = fakes.placement(accelerator="cuda", num_gpus=2, nvme_path="/mnt/disk")
ENTRIES = (
    fakes.success(fakes.trial(fakes.zero(0))),
    fakes.success(fakes.trial(fakes.offload("nvme"), on=GPU), nvme_stored_bytes=2**30),
    fakes.failure(fakes.trial(fakes.zero(3), repeat=1)),
)
RECORDS: list[Any] = [json.loads(json.dumps(entry.to_dict())) for entry in ENTRIES]


def line_of(repeat: int, **changes: Any) -> dict[str, Any]:
    record = fakes.success(fakes.trial(fakes.zero(1), repeat=repeat), resolved_config=CONFIG)
    return {**record.to_dict(), **changes}


def read(tmp_path: Path, *lines: dict[str, Any] | str) -> tuple[TrialRecord, ...]:
    path = tmp_path / "records.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return reader.read_records(path, [], [])


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "1", None])
def test_another_version_is_one_line(tmp_path: Path, version: object) -> None:
    with pytest.raises(UsageError, match="line 2: schema_version is") as caught:
        read(tmp_path, line_of(0), line_of(1, schema_version=version, later="?"))
    assert "\n" not in str(caught.value)
    without = line_of(1)
    del without["schema_version"]
    with pytest.raises(UsageError, match="line 1: schema_version is None"):
        read(tmp_path, without)


def test_a_torn_line_is_left_out_with_a_note_and_a_wrong_value_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes((json.dumps(line_of(0)) + "\n" + json.dumps(line_of(1))[:200]).encode())
    notes: list[str] = []
    assert len(reader.read_records(path, [], notes)) == 1
    assert notes[0].startswith("records.jsonl line 2 is not JSON")
    wrong = line_of(1)
    wrong["ranks"][0]["losses"] = [7.0, "many"]
    with pytest.raises(UsageError, match=r"line 1: ranks\[0\]\.losses\[1\] is"):
        read(tmp_path, wrong)
    with pytest.raises(UsageError, match="no line is a record"):
        read(tmp_path, "torn {")


# ------------------------------------------------------------------ any damage

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to everything in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in ((*path, key), *places(item, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """The document with one thing in it replaced or taken away."""
    made = json.loads(json.dumps(document))
    *way, last = draw(st.sampled_from(places(made)))
    target = made
    for step in way:
        target = target[step]
    if draw(st.booleans()):
        target[last] = draw(VALUES)
    else:
        del target[last]
    return made


def check(path: Path) -> None:
    """Load a result: one line says what is wrong, or what it gives can be shown and merged with itself."""
    try:
        result = load_results.load(path)
    except UsageError as error:
        refusals = str(error).splitlines()
        assert len(refusals) == 1
        return
    rows = rows_of(result.runs)
    assert len(rows) == len(result.runs) > 0
    json.dumps(rows, allow_nan=False)
    groups = merge_results.merge([result, result])
    assert sum(len(group.runs) for group in groups) == len(result.runs)


@settings(deadline=None, max_examples=60)
@given(
    entries=changed(RECORDS),
    rows=changed(json.loads(json.dumps(rows_of(load_results.make_runs(ENTRIES))))),
    content=st.binary(max_size=60),
)
def test_no_damage_brings_the_loader_down(
    tmp_path_factory: pytest.TempPathFactory, entries: Any, rows: Any, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    (folder / "run.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION, "family": "zero"}))
    check(folder)
    (folder / "rows.json").write_text(json.dumps(rows))
    check(folder / "rows.json")
    (folder / "bytes.json").write_bytes(content)
    check(folder / "bytes.json")
