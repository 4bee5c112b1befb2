"""A check of the doctor that breaks off keeps what it had found, and a check has one form of result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ds_bench.doctor.findings import Finding, ok, run_check
from ds_bench.errors import PreflightError


def test_a_check_that_breaks_off_keeps_what_it_had_found() -> None:
    def check() -> Iterator[Finding]:
        yield ok("first", "fine")
        raise ValueError("garbage")

    assert [(each.name, each.level, each.text) for each in run_check("second", check)] == [
        ("first", "ok", "fine"),
        ("second", "warning", "could not be read: garbage"),
    ]


def test_a_preflight_error_is_a_problem_with_its_remedy() -> None:
    def check() -> Iterator[Finding]:
        raise PreflightError("no disk", remedy="buy one")
        yield

    (found,) = run_check("disk", check)
    assert (found.level, found.text, found.remedy) == ("problem", "no disk", "buy one")


def test_ctrl_c_is_not_swallowed_by_a_check() -> None:
    def check() -> Iterator[Finding]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        run_check("any", check)
