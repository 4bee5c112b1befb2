"""The command ``doctor``: text, JSON and exit code of its findings."""

from __future__ import annotations

import io
import json

import pytest

from ds_bench.cli.doctor import exit_code, lines, run_doctor
from ds_bench.doctor.findings import ok, problem, warning

SAMPLE = {
    "First": [ok("a", "fine"), problem("longer name", "broken", "mend it")],
    "Second": [warning("b", "so \x1b[2J\nso")],
}


def test_only_problems_fail_and_every_finding_is_a_line_and_a_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(lines(SAMPLE)) == [
        "First",
        "  ok       a            fine",
        "  problem  longer name  broken → mend it",
        "",
        "Second",
        "  warning  b            so \\x1b[2J so",
        "",
        "not ready: 1 problem, 1 warning",
    ]
    assert [exit_code(groups) for groups in ({}, {"A": [warning("a", "b")]}, SAMPLE)] == [0, 0, 2]
    monkeypatch.setattr("ds_bench.doctor.checks.run_all_checks", lambda _machine, **_: SAMPLE)
    assert run_doctor(None, False, as_json=True) == 2
    first, listed, _ = json.loads(capsys.readouterr().out)
    finding = {"group": "First", "name": "longer name", "level": "problem", "text": "broken", "remedy": "mend it"}
    assert (listed, first["remedy"]) == (finding, None)
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    assert run_doctor(None, False, as_json=False) == 2
    assert b"broken -> mend it" in raw.getvalue()
