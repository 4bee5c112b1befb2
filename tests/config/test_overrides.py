"""Changes laid over a configuration: merged once and for all, and parsed from --set."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.config import deepspeed_config, recipe_file
from ds_bench.errors import UsageError

scalars = st.one_of(st.integers(), st.booleans(), st.text(max_size=3))
configs = st.recursive(scalars, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8)
objects = st.dictionaries(st.sampled_from("abc"), configs, max_size=3)


@given(config=objects, changes=objects)
def test_an_overlay_is_laid_once_and_for_all(config: dict[str, Any], changes: dict[str, Any]) -> None:
    once = deepspeed_config.overlay(config, changes)
    assert deepspeed_config.overlay(once, changes) == once


@given(config=objects)
def test_an_empty_overlay_changes_nothing(config: dict[str, Any]) -> None:
    assert deepspeed_config.overlay(config, {}) == config


@given(config=objects, changes=objects)
def test_an_overlay_leaves_both_of_its_inputs_alone(config: dict[str, Any], changes: dict[str, Any]) -> None:
    before = copy.deepcopy((config, changes))
    merged = deepspeed_config.overlay(config, changes)
    merged["a"] = {"written": "later"}
    assert (config, changes) == before


def test_a_null_removes_a_key_at_any_depth() -> None:
    config = {"a": {"b": 1, "c": 2}, "d": 3}
    assert deepspeed_config.overlay(config, {"a": {"b": None}, "d": None}) == {"a": {"c": 2}}


def test_a_null_never_enters_a_block_that_was_not_there() -> None:
    assert deepspeed_config.overlay({"a": 1}, {"aio": {"block_size": None}, "a": {"x": None}}) == {"aio": {}, "a": {}}


def test_a_setting_is_json_and_else_text(subtests: pytest.Subtests) -> None:
    for text, value in (
        ("a.b=false", {"a": {"b": False}}),
        ("a=1e6", {"a": 1e6}),
        ("a=12", {"a": 12}),
        ("a=null", {"a": None}),
        ('a={"b": [1, 2]}', {"a": {"b": [1, 2]}}),
        ("a=AdamW", {"a": "AdamW"}),
        ('a="12"', {"a": "12"}),
        ("a=", {"a": ""}),
        ("a=b=c", {"a": "b=c"}),
        ("a.b.c=x.y", {"a": {"b": {"c": "x.y"}}}),
    ):
        with subtests.test(text):
            parsed = deepspeed_config.parse_set(text)
            assert parsed == value
            assert json.dumps(parsed) == json.dumps(value)  # 1 and True are equal to Python


def test_a_setting_of_thousands_of_levels_is_refused_in_one_line() -> None:
    for text in (f"{'a.' * 3000}a=1", f"a={'[' * 3000}"):
        with pytest.raises(UsageError, match="levels") as caught:
            deepspeed_config.parse_set(text)
        assert len(str(caught.value)) < 200
    with pytest.raises(UsageError, match=r"is not key\.path=value"):
        recipe_file.parse_setting(f"{'a.' * 3000}a=1")


def test_a_setting_without_a_name_or_a_value_is_refused_by_its_text(subtests: pytest.Subtests) -> None:
    for text in ("", "a", "=1", ".a=1", "a.=1", "a..b=1", "."):
        with subtests.test(text):
            with pytest.raises(UsageError, match=r"--set .* is not key\.path=value \(e\.g\. --set") as caught:
                deepspeed_config.parse_set(text)
            assert repr(text) in str(caught.value)
