"""Numbers as text: a missing one is a dash, GB is 2**30, and no figure is lost or invented on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench import units

GB = 2**30
FORMATS: list[Callable[[Any], str]] = [
    units.format_bytes,
    units.format_gb,
    units.format_ms,
    units.format_duration,
    units.format_count,
    units.format_millions,
    units.format_ratio,
    units.format_significant,
    units.format_percent,
]
quick = settings(deadline=None)


def test_a_missing_value_is_a_dash_and_zero_is_not_missing(subtests: pytest.Subtests) -> None:
    for render in FORMATS:
        with subtests.test(render=render):
            assert render(None) == "—"
            assert render(0) != "—"
            assert "0" in render(0)


@pytest.mark.parametrize("convert", [units.to_gb, units.to_ms])
def test_a_missing_value_stays_missing_when_converted(convert: Callable[[Any], Any]) -> None:
    assert convert(None) is None
    assert convert(0) == 0


def test_a_gb_is_2_to_the_30_and_an_80_gb_card_shows_about_79() -> None:
    assert units.to_gb(GB) == 1
    assert units.format_gb(85_010_000_000) == "79.17"


@quick
@given(st.integers(0, 2**60))
def test_gb_and_back_loses_no_byte(count: int) -> None:
    gb = units.to_gb(count)
    assert gb is not None
    assert units.from_gb(gb) == pytest.approx(count, rel=1e-15, abs=1)


@quick
@given(st.floats(0, 1e6))
def test_conversions_do_not_round(seconds: float) -> None:
    assert units.to_ms(seconds) == seconds * 1000


def test_bytes_are_told_in_powers_of_1024(subtests: pytest.Subtests) -> None:
    for count, text in (
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1024, "1.00 KB"),
        (12 * 1024, "12.00 KB"),
        (310 * 2**20, "310 MB"),
        (int(1.25 * GB), "1.25 GB"),
        (2048 * GB, "2048 GB"),
        (-GB, "-1.00 GB"),
    ):
        with subtests.test(count=count, text=text):
            assert units.format_bytes(count) == text


@quick
@given(st.integers(1, 2**50))
def test_bytes_as_text_are_within_half_a_percent_of_the_bytes(count: int) -> None:
    number, unit = units.format_bytes(count).split()
    size = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}[unit]
    assert float(number) * size == pytest.approx(count, rel=0.006)


def test_milliseconds_have_more_digits_where_they_are_small() -> None:
    text = {
        0.0001234: "0.12",
        0.0099: "9.90",
        0.01: "10.0",
        0.1234: "123.4",
        12.3456: "12,345.6",
        0: "0.00",
    }
    assert {seconds: units.format_ms(seconds) for seconds in text} == text


def test_a_duration_is_told_as_people_tell_it() -> None:
    text = {
        0.04: "0.0 s",
        0.4: "0.4 s",
        9.94: "9.9 s",
        12: "12 s",
        59.4: "59 s",
        59.6: "1 min 0 s",
        200: "3 min 20 s",
        3599.4: "59 min 59 s",
        3599.6: "1 h 0 min",
        7500: "2 h 5 min",
        90_000: "25 h 0 min",
    }
    assert {seconds: units.format_duration(seconds) for seconds in text} == text


@quick
@given(st.floats(0, 1e6))
def test_a_duration_never_shows_60_of_anything(seconds: float) -> None:
    words = units.format_duration(seconds).split()
    pairs = dict(zip(words[1::2], words[::2], strict=True))
    assert float(pairs.get("s", 0)) < 60
    assert float(pairs.get("min", 0)) < 60


def test_counts_have_their_thousands_apart() -> None:
    text = {
        124_439_808: "124,439,808",
        1234.5: "1,234",
        999: "999",
        0: "0",
    }
    assert {count: units.format_count(count) for count in text} == text


def test_large_counts_can_be_told_in_short() -> None:
    text = {
        124_439_808: "124 M",
        6_738_415_616: "6.74 B",
        950_000: "950 K",
        999: "999",
        1_500: "1.50 K",
    }
    assert {count: units.format_millions(count) for count in text} == text


def test_three_significant_digits_are_enough() -> None:
    text = {
        19_062.9: "19,100",
        999.6: "1,000",
        70.62: "70.6",
        9.996: "10.0",
        4: "4.00",
        0.0519: "0.052",
        1e-4: "0",
    }
    assert {value: units.format_significant(value) for value in text} == text


def test_a_ratio_is_told_in_times() -> None:
    text = {
        1: "1.00x",
        0.333: "0.33x",
        12.5: "12.50x",
    }
    assert {ratio: units.format_ratio(ratio) for ratio in text} == text


def test_a_fraction_is_told_in_percent_with_the_digits_asked_for() -> None:
    assert units.format_percent(0.1234) == "12.3 %"
    assert units.format_percent(0.95, digits=0) == "95 %"
    assert units.format_percent(1.5) == "150.0 %"
