"""Numbers as text: a missing one is a dash, GB is 2**30, and no figure is lost or invented on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_bench import units

GB = 2**30
TEXTS: dict[Callable[[Any], str], dict[float, str]] = {
    units.format_bytes: {
        0: "0 B", 1023: "1023 B", 1024: "1.00 KB", 310 * 2**20: "310 MB", 1.25 * GB: "1.25 GB", -GB: "-1.00 GB",
    },
    units.format_gb: {85_010_000_000: "79.17", 0: "0.00"},  # an "80 GB" card
    units.format_ms: {
        0: "0.00", 0.0001234: "0.12", 0.0099: "9.90", 0.01: "10.0", 0.1234: "123.4", 12.3456: "12,345.6",
    },
    units.format_duration: {
        0.04: "0.0 s", 0.4: "0.4 s", 9.94: "9.9 s", 12: "12 s", 59.4: "59 s", 59.6: "1 min 0 s", 200: "3 min 20 s",
        3599.4: "59 min 59 s", 3599.6: "1 h 0 min", 7500: "2 h 5 min", 90_000: "25 h 0 min",
    },
    units.format_count: {124_439_808: "124,439,808", 1234.5: "1,234", 999: "999", 0: "0"},
    units.format_with_suffix: {
        124_439_808: "124 M", 6_738_415_616: "6.74 B", 950_000: "950 K", 999: "999", 1_500: "1.50 K", 0: "0",
        999_885_952: "1.00 B", 999_600: "1.00 M", 999.6: "1.00 K",
    },
    units.format_significant: {
        19_062.9: "19,100", 999.6: "1,000", 70.62: "70.6", 9.996: "10.0", 4: "4.00", 0.0519: "0.052", 1e-4: "0",
    },
    units.format_ratio: {1: "1.00x", 0.333: "0.33x", 12.5: "12.50x"},
    units.format_percent: {0.1234: "12.3 %", 1.5: "150.0 %"},
}  # fmt: skip


def test_each_format_has_its_digits_and_unit_and_a_dash_for_none() -> None:
    for render, texts in TEXTS.items():
        assert {value: render(value) for value in texts} == texts
        assert render(None) == "—"
    assert units.format_percent(0.95, digits=0) == "95 %"


def test_names_places_and_shares() -> None:
    assert units.format_names("abc") == "a, b, c"
    assert units.format_names("abcdef", 2, "; ") == "a; b and 4 more"
    assert [units.format_series(names, "and") for names in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]
    assert units.format_place(["ranks", 0, "losses", 4]) == "ranks[0].losses[4]"
    assert [units.format_items(count, "row") for count in (0, 1, 3)] == ["0 rows", "1 row", "3 rows"]
    assert units.format_parameters(1_100_000_000, 8_800_000) == "1.10 B parameters, 0.8 % trained"
    assert units.format_parameters(6_738_415_616) == "6.74 B parameters"
    assert units.format_trained(0.000617) == "0.062 %"


def test_conversions_keep_a_missing_value_and_lose_nothing() -> None:
    assert (units.to_gb(None), units.to_ms(None)) == (None, None)
    assert (units.to_gb(0), units.to_gb(3 * GB), units.from_gb(1.5), units.to_ms(0.25)) == (0, 3, 3 * GB // 2, 250)
