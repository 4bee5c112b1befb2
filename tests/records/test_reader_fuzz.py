"""Whatever a file holds, reading it gives a result or one line: nothing but a UsageError may come out.

As many examples of each property as elsewhere; ``HYPOTHESIS_PROFILE=nightly`` makes it ten thousand.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ds_bench.analysis import load_results, merge_results
from ds_bench.analysis.comparison import rows_of
from ds_bench.cli.commands import main
from ds_bench.errors import UsageError
from tests.support import fakes

settings.register_profile("nightly", settings.get_profile("any_machine"), max_examples=10_000)
PROFILE = settings.get_profile("nightly" if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else "any_machine")

TWICE = "\u0001twice"
"""At the end of a key: the key once more, which no dict can hold."""
RAW = "\u0001raw:"
"""At the start of a text: what follows stands in the file as it is."""

GPU = fakes.placement(accelerator="cuda", num_gpus=2, nvme_path="/mnt/disk")
LEDGER = {"gpu": {"parameters": 2**20, "deepspeed_buffers": 2**22}, "nvme": {"optimizer_states": 2**30}}
ENTRIES = (
    fakes.success(fakes.trial(fakes.zero(0))),
    fakes.success(fakes.trial(fakes.offload("nvme"), on=GPU), ledger=LEDGER, nvme_stored_bytes=2**30),
    fakes.failure(fakes.trial(fakes.zero(3), repeat=1)),
)
RECORDS: list[Any] = [json.loads(json.dumps(entry.to_dict())) for entry in ENTRIES]
ROWS: list[Any] = json.loads(json.dumps(rows_of(load_results.make_runs(ENTRIES))))
RUN: dict[str, Any] = {
    "schema_version": 1,
    "family": "zero",
    "arguments": ["--model", "tiny", "--peak-tflops", "100"],
    "environment": json.loads(json.dumps(fakes.environment().to_dict())),
    "notes": ["a note"],
    "trials": [entry["trial"] for entry in RECORDS],
}

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 10**30, 10**400, -(10**400), 1e308, 5e-324, "", "\ud800", "nvme", "Success"])
    | st.sampled_from(["1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "[" * 3000 + "]" * 3000]).map(RAW.__add__)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def dumps(value: Any) -> str:
    """JSON text, with keys twice and raw tokens where they are marked."""
    text = json.dumps(value).replace(json.dumps(TWICE)[1:-1], "")
    mark = json.dumps(RAW)[1:-1]
    while (at := text.find(f'"{mark}')) >= 0:
        end = text.index('"', at + 1)
        text = text[:at] + text[at + 1 + len(mark) : end] + text[end + 1 :]
    return text


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to everything in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in ((*path, key), *places(item, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """The document with one thing in it replaced, taken away or given twice; sometimes two."""
    made = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 2))):
        *way, last = draw(st.sampled_from(places(made) or [(0,)]))
        target = made
        for step in way:
            target = target[step]
        act = draw(st.sampled_from(("replace", "delete", "twice")))
        if act == "delete":
            del target[last]
        elif act == "twice" and isinstance(target, dict):
            target[f"{last}{TWICE}"] = draw(VALUES)
        else:
            target[last] = draw(VALUES)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fuzz") / "runs" / "zero_20261121_093000"
    made.mkdir(parents=True)
    return made


def survives(path: Path) -> bool:
    """Whether the file is a result; what it gives can be shown, and merged with itself."""
    try:
        result = load_results.load(path)
    except UsageError as error:
        text = str(error)
        assert text
        assert "\n" not in text
        return False
    rows = rows_of(result.runs)
    assert len(rows) == len(result.runs) > 0
    json.dumps(rows, allow_nan=False)
    "\n".join(result.notes).encode()
    groups = merge_results.merge([result, result])
    assert sum(len(group.runs) for group in groups) == len(result.runs)
    return True


def tried(path: Path) -> None:
    """One example; ``--hypothesis-show-statistics`` tells how many were still results."""
    event("a result" if survives(path) else "refused")


def put(folder: Path, records: str | bytes | None = None, run: str | bytes | None = None) -> Path:
    """A run folder with these files; those left out are good."""
    good = "".join(f"{json.dumps(entry)}\n" for entry in RECORDS)
    for name, content in (("records.jsonl", good if records is None else records), ("run.json", run)):
        content = json.dumps(RUN) if content is None else content
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def flat(folder: Path, content: str | bytes) -> Path:
    path = folder / "rows.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_what_is_changed_here_is_good_before(folder: Path) -> None:
    assert survives(put(folder))
    assert survives(flat(folder, dumps(ROWS)))


@PROFILE
@given(st.binary(max_size=200))
def test_no_bytes_bring_the_loader_down(folder: Path, content: bytes) -> None:
    assert not survives(flat(folder, content))
    assert not survives(put(folder, records=content))
    tried(put(folder, run=content))


@PROFILE
@given(VALUES)
def test_no_json_value_brings_the_loader_down(folder: Path, value: Any) -> None:
    text = dumps(value)
    for path in (flat(folder, text), flat(folder, f"[{text}]"), put(folder, records=text), put(folder, run=text)):
        tried(path)


@PROFILE
@given(changed(RECORDS))
def test_no_change_of_a_record_brings_the_loader_down(folder: Path, entries: Any) -> None:
    tried(put(folder, records="".join(f"{dumps(entry)}\n" for entry in entries)))


@PROFILE
@given(changed(ROWS))
def test_no_change_of_a_flat_row_brings_the_loader_down(folder: Path, rows: Any) -> None:
    tried(flat(folder, dumps(rows)))


@PROFILE
@given(changed(RUN))
def test_no_change_of_run_json_brings_the_loader_down(folder: Path, run: Any) -> None:
    tried(put(folder, run=dumps(run)))


def _cut(text: bytes, at: int, length: int, _new: bytes) -> bytes:
    return text[:at] + text[at + length :]


def _overwrite(text: bytes, at: int, length: int, new: bytes) -> bytes:
    return text[:at] + new + text[at + length :]


def _end(text: bytes, at: int, _length: int, _new: bytes) -> bytes:
    return text[:at]


@PROFILE
@given(
    st.sampled_from(("records", "run", "rows")),
    st.sampled_from((_cut, _overwrite, _end)),
    st.integers(0, 2**16),
    st.integers(0, 40),
    st.binary(max_size=6) | st.sampled_from([b'"', b"{", b"]", b"\n", b"NaN", b"\\ud800", b"\0", b"\xff", b"1e999"]),
)
def test_no_damage_to_the_text_brings_the_loader_down(
    folder: Path, kind: str, damage: Callable[[bytes, int, int, bytes], bytes], at: int, length: int, new: bytes
) -> None:
    documents = {
        "records": "".join(f"{json.dumps(entry)}\n" for entry in RECORDS),
        "run": json.dumps(RUN),
        "rows": json.dumps(ROWS),
    }
    text = documents[kind].encode()
    text = damage(text, at % len(text), length, new)
    tried(flat(folder, text) if kind == "rows" else put(folder, **{kind: text}))


def verbs(result: Path, good: Path, folder: Path) -> list[list[str]]:
    """Every verb that reads results, as it is typed."""
    this, other, baselines = str(result), str(good), str(folder / "baselines.json")
    return [
        ["report", this, other, "--markdown", "--export", "zero0"],
        ["report", this, "--html", str(folder / "page.html"), "--goal", "memory"],
        ["compare", this, other],
        ["compare", other, this],
        ["baseline", "save", this, "--baselines", str(folder / "new.json")],
        ["baseline", "check", this, "--baselines", baselines],
    ]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody damaged, and its baselines."""
    made = tmp_path_factory.mktemp("good")
    result = fakes.write_run(made / "results", ENTRIES).folder
    assert main(["baseline", "save", str(result), "--baselines", str(made / "baselines.json")]) == 0
    return result


def exit_codes(result: Path, good: Path) -> set[int]:
    """Of every verb; what they print goes nowhere."""
    folder = good.parents[2]
    (folder / "new.json").unlink(missing_ok=True)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        codes = set()
        for arguments in verbs(result, good, folder):
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                codes.add(code := main(arguments))
            assert code != 2 or said.getvalue().strip().splitlines()[-1].startswith("ds_bench: ")
    return codes


def test_every_verb_takes_the_result_that_is_changed_here(folder: Path, good: Path) -> None:
    assert exit_codes(good, good) == {0}
    assert exit_codes(put(folder), good) == {0}


@PROFILE
@given(st.sampled_from(("records", "run", "rows")), st.data())
def test_no_change_of_a_file_brings_a_verb_down(folder: Path, good: Path, kind: str, data: st.DataObject) -> None:
    document = data.draw(changed({"records": RECORDS, "run": RUN, "rows": ROWS}[kind]))
    if kind == "rows":
        result = flat(folder, dumps(document))
    elif kind == "run":
        result = put(folder, run=dumps(document))
    else:
        result = put(folder, records="".join(f"{dumps(entry)}\n" for entry in document))
    codes = exit_codes(result, good)
    event(f"{kind}: {sorted(codes)}")
    assert codes <= {0, 2, 3}
