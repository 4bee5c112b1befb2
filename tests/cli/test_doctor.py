"""The command ``doctor``: what it prints, as text and as JSON, and its exit code."""

from __future__ import annotations

import io
import json

import pytest

from ds_bench.cli import commands
from ds_bench.cli.doctor import exit_code, lines, show_findings
from ds_bench.doctor.findings import ok, problem, warning
from ds_bench.errors import UsageError

SAMPLE = {
    "First": [ok("a", "fine"), problem("longer name", "broken", "mend it")],
    "Second": [warning("b", "so so")],
}


def test_each_finding_is_one_line_with_its_remedy_and_the_last_line_is_the_sum() -> None:
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


def test_no_name_of_a_process_or_a_disk_can_steer_the_terminal() -> None:
    printed = "".join(lines({"A": [warning("a", "process\x1b[2J\nok  fake line", "\x07")]}))
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "\n" not in printed


def run(monkeypatch: pytest.MonkeyPatch, *, as_json: bool) -> int:
    monkeypatch.setattr("ds_bench.doctor.checks.run_all_checks", lambda _machine, **_: SAMPLE)
    return show_findings(None, False, as_json)


def test_json_is_a_list_of_objects_and_the_exit_code_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, as_json=True) == run(monkeypatch, as_json=False) == 2
    text = capsys.readouterr().out
    listed, _ = json.JSONDecoder().raw_decode(text)
    assert listed[1] == {
        "group": "First",
        "name": "longer name",
        "level": "problem",
        "text": "broken",
        "remedy": "mend it",
    }
    assert listed[0]["remedy"] is None


def test_a_terminal_of_ascii_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    run(monkeypatch, as_json=False)
    assert b"broken -> mend it" in raw.getvalue()


@pytest.mark.parametrize("path", ["", "  "])
def test_an_empty_path_is_refused_as_in_every_other_flag(path: str) -> None:
    with pytest.raises(UsageError, match="--nvme-path: an empty text is not a path"):
        commands.build_parser().parse_args(["doctor", "--nvme-path", path])


def test_warnings_alone_are_no_failure() -> None:
    assert exit_code({"A": [warning("a", "b")]}) == 0
    assert exit_code({"A": [warning("a", "b")], "B": [problem("a", "b")]}) == 2
    assert exit_code({}) == 0
