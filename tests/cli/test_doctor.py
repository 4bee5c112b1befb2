"""The command ``doctor``: text, JSON and exit code of its findings."""

from __future__ import annotations

import io
import json

import pytest

from ds_bench.cli.doctor import exit_code, lines, show_findings
from ds_bench.doctor.findings import ok, problem, warning

SAMPLE = {
    "First": [ok("a", "fine"), problem("longer name", "broken", "mend it")],
    "Second": [warning("b", "so so")],
}


def test_each_finding_is_a_line_that_cannot_steer_the_terminal() -> None:
    assert list(lines(SAMPLE)) == [
        "First",
        "  ok       a            fine",
        "  problem  longer name  broken → mend it",
        "",
        "Second",
        "  warning  b            so so",
        "",
        "not ready: 1 problem, 1 warning",
    ]
    printed = "".join(lines({"A": [warning("a", "process\x1b[2J\nok  fake line", "\x07")]}))
    assert not set("\x1b\x07\n") & set(printed)


def test_only_problems_fail_and_json_lists_all_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [exit_code(groups) for groups in ({}, {"A": [warning("a", "b")]}, SAMPLE)] == [0, 0, 2]
    monkeypatch.setattr("ds_bench.doctor.checks.run_all_checks", lambda _machine, **_: SAMPLE)
    assert show_findings(None, False, as_json=True) == show_findings(None, False, as_json=False) == 2
    listed, _ = json.JSONDecoder().raw_decode(capsys.readouterr().out)
    finding = {"group": "First", "name": "longer name", "level": "problem", "text": "broken", "remedy": "mend it"}
    assert listed[1] == finding
    assert listed[0]["remedy"] is None
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    show_findings(None, False, as_json=False)
    assert b"broken -> mend it" in raw.getvalue()
