"""JSON read as DeepSpeed reads it, with the lines of its keys."""

from __future__ import annotations

import pytest

from ds_bench.config import located_json
from ds_bench.config.located_json import ConfigSyntaxError

TEXT = """// comment {
{
  "a": 1, # another
  /* "b": 1 */
  "zero": {
    "stage": 3,
    quoteless:
      { device: cpu
      }
    "list": [ {"x": 1},
      {"y": 2}],
  },
  "text": "{ \\" : ,",
}
"""


def test_the_line_is_that_of_the_key_or_of_the_block_where_it_is_missing() -> None:
    line = {
        "a": 3,
        "zero": 5,
        "zero.stage": 6,
        "zero.quoteless.device": 8,
        "zero.list": 10,
        "text": 13,
        "zero.absent": 5,
        "absent": None,
    }
    assert {path: located_json.line_of(TEXT, located_json.parse(TEXT), path) for path in line} == line


def test_the_values_are_hjsons() -> None:
    assert located_json.parse(TEXT)["zero"] == {
        "stage": 3,
        "quoteless": {"device": "cpu"},
        "list": [{"x": 1}, {"y": 2}],
    }


def test_what_deepspeed_cannot_read_is_told_with_its_line(subtests: pytest.Subtests) -> None:
    for text, line, said in (
        ('{\n"a": 1,\n"a": 2}', 3, "'a' stands twice"),
        ('{\n"b": {"c": 1,\n"c": 2}}', 3, "'c' stands twice"),
        ('{\n"a" 1}', 2, "Expecting ':'"),
        ('{"a": [1, 2', 1, "Expecting value"),
        ('{"a": 1e999}', 1, "infinity"),
        ('{"a": /* ', 1, "cannot be read"),
        ('{"a": ' + "9" * 5000 + "}", 1, "4300 digits"),
    ):
        with subtests.test(text):
            with pytest.raises(ConfigSyntaxError, match=said) as caught:
                located_json.parse(text)
            assert caught.value.line == line
