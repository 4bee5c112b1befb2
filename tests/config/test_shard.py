"""How a plan is split: each row in exactly one shard, rows of a point together where they can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.config.options import Shard
from ds_bench.errors import UsageError


def split(rows_per_point: list[int], count: int) -> list[list[tuple[int, int]]]:
    """The rows of each shard as pairs of a point and a row of it."""
    shards = [Shard(number=number, count=count).rows_of(rows_per_point) for number in range(1, count + 1)]
    return [[(point, row) for point, rows in enumerate(selected) for row in rows] for selected in shards]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30).flatmap(
        lambda r: st.tuples(st.just(r), st.integers(1, sum(r)))
    )
)
def test_every_row_is_in_one_shard_and_no_shard_is_empty(case: tuple[list[int], int]) -> None:
    rows_per_point, count = case
    shards = split(rows_per_point, count)
    assert sorted(row for shard in shards for row in shard) == [
        (point, row) for point, rows in enumerate(rows_per_point) for row in range(rows)
    ]
    assert all(shards)
    if count <= len(rows_per_point):
        assert len({(point, number) for number, shard in enumerate(shards) for point, _ in shard}) == len(
            rows_per_point
        )
        sizes = [len({point for point, _ in shard}) for shard in shards]
    else:
        sizes = list(map(len, shards))
    assert max(sizes) - min(sizes) <= 1


def test_points_are_assigned_backwards_in_every_other_turn_so_that_no_shard_has_all_the_long_ones() -> None:
    assert [[point for point, _ in shard] for shard in split([1] * 8, 4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_with_fewer_points_than_shards_a_shard_has_rows_that_follow_each_other() -> None:
    assert split([3, 3], 3) == [[(0, 0), (0, 1)], [(0, 2), (1, 0)], [(1, 1), (1, 2)]]


def test_more_shards_than_rows_are_refused() -> None:
    with pytest.raises(UsageError, match=r"7 shards of a plan with 6 rows in all \(give 6 or fewer\)"):
        split([3, 3], 7)


def test_a_text_that_is_no_shard_is_refused(subtests: pytest.Subtests) -> None:
    for text in ("", "3", "0/4", "5/4", "1/0", "-1/4", "1/4/4", "a/b", "²/4", "1/99999999999", "1 /2"):
        with subtests.test(text), pytest.raises(ValueError, match=r"I/N|I must be"):
            Shard.parse(text)
