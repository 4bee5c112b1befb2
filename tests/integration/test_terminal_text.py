"""A downloaded result that would steer the terminal of whoever reads it: every verb spells it out."""

from __future__ import annotations

import copy
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis.load_results import load
from ds_bench.cli import commands
from ds_bench.errors import DsBenchError
from tests.support import fakes

EVIL = "\x1b]52;c;ZWNobw==\x07\x1b[31m\u202edne\u2066\u0000\x9b2J\r\u2028\x85\ud800\U000e0041"
"""A clipboard write, a color, two changes of direction, NUL, C1, line ends of other kinds, half a surrogate, a tag."""
IN_FILES = EVIL.replace("\ud800", "")
"""Without the half surrogate, which the reader rejects as JSON."""
OUR_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def steering(text: str) -> list[str]:
    """Signs that a terminal would act on, our own colors and line ends left out."""
    plain = OUR_COLORS.sub("", text)
    return [hex(ord(sign)) for sign in plain if unicodedata.category(sign) in ("Cc", "Cf", "Cs") and sign != "\n"]


def leaves(data: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every text in a JSON value."""
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        if isinstance(value, str):
            yield data, key
        elif isinstance(value, (dict, list)):
            yield from leaves(value)


def poisoned(data: Any) -> Any:
    changed = copy.deepcopy(data)
    for container, key in leaves(changed):
        container[key] += IN_FILES
    return changed


def documents(folder: Path) -> list[Path]:
    return [folder / "run.json", folder / "records.jsonl"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trial = fakes.trial(fakes.zero(1), on=fakes.placement(num_gpus=2))
    records = [fakes.success(), replace(fakes.failure(trial), caveats=("a caveat",))]
    return fakes.write_run(tmp_path / "results", records, arguments=["--model", "tiny"]).folder


def poison_what_is_accepted(folder: Path) -> int:
    """Puts IN_FILES behind every text that the reader takes it in, all together; returns how many there are."""
    count = 0
    for path in documents(folder):
        text = path.read_text()
        whole = [json.loads(part) for part in ([text] if path.suffix == ".json" else text.splitlines())]
        for entry in whole:
            for container, key in leaves(entry):
                kept = container[key]
                container[key] = kept + IN_FILES
                path.write_text("\n".join(map(json.dumps, whole)))
                try:
                    load(folder)
                    count += 1
                except DsBenchError:
                    container[key] = kept
        path.write_text("\n".join(map(json.dumps, whole)))
    return count


def said(capfd: pytest.CaptureFixture[str]) -> str:
    out, err = capfd.readouterr()
    return out + err


def test_no_verb_passes_on_what_steers_a_terminal(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = fakes.write_run(tmp_path / "other", [fakes.success()]).folder
    assert poison_what_is_accepted(run) > 60
    monkeypatch.chdir(tmp_path)
    named = tmp_path / f"file{EVIL.replace(chr(0), '').replace(chr(0xD800), '')}"
    named.mkdir()
    lines = [
        ["report", str(run)],
        ["report", str(run), "--verbose"],
        ["report", str(run), str(other), "--markdown", "--html", str(tmp_path / "page.html")],
        ["report", str(run), "--export", "zero1"],
        ["compare", str(run), str(other)],
        ["baseline", "save", str(run), "--baselines", str(named / "b.json")],
        ["baseline", "check", str(run), "--baselines", str(named / "b.json"), "--json"],
    ]
    for line in lines:
        commands.main(line)
        text = said(capfd)
        assert text.strip(), line
        assert steering(text) == [], (line, text)
    rows = next((tmp_path / "results").glob("*.json"), None)
    assert rows is not None
    rows.write_text(json.dumps(poisoned(json.loads(rows.read_text()))))
    (run / "records.jsonl").unlink()
    commands.main(["report", str(rows)])
    assert steering(said(capfd)) == []
