"""How a plan is split: each row in exactly one shard, rows of a point together if possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.config.shard import Shard
from ds_bench.errors import UsageError


def split(rows_per_point: list[int], count: int) -> list[list[tuple[int, int]]]:
    """Each shard as pairs of a point and a row of it."""
    shards = [Shard(number=number, count=count).rows_of(rows_per_point) for number in range(1, count + 1)]
    return [[(point, row) for point, rows in enumerate(selected) for row in rows] for selected in shards]


@given(rows_per_point=st.lists(st.integers(1, 9), min_size=1, max_size=30), data=st.data())
def test_every_row_is_in_one_shard_and_the_shards_are_even(rows_per_point: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, sum(rows_per_point)))
    shards = split(rows_per_point, count)
    every = [(point, row) for point, rows in enumerate(rows_per_point) for row in range(rows)]
    assert sorted(row for shard in shards for row in shard) == every
    whole_points = count <= len(rows_per_point)
    sizes = [len({point for point, _ in shard} if whole_points else shard) for shard in shards]
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1
    assert not whole_points or sum(sizes) == len(rows_per_point)


def test_points_are_assigned_backwards_in_every_other_turn() -> None:
    assert [[point for point, _ in shard] for shard in split([1] * 8, 4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    with pytest.raises(UsageError, match=r"a plan with 6 rows cannot be split into 7 shards\. Give 6 or fewer"):
        split([3, 3], 7)


def test_only_i_of_n_is_a_shard() -> None:
    assert Shard.parse("3/12").file_suffix == "_shard03of12"
    for text in ("3", "0/4", "5/4", "²/4", "1/99999999999"):
        with pytest.raises(ValueError, match=r"I/N|I must be"):
            Shard.parse(text)
