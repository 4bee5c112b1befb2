"""The search for the largest micro-batch that trains: always right, and cheap where the prediction is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.batchsearch import grain, largest, next_probe


def search(answer: int, start: int, limit: int = 4096) -> tuple[int | None, list[int]]:
    """What is found where exactly the sizes up to ``answer`` train, and the probes it took."""
    known: dict[int, bool] = {}
    while (size := next_probe(known, start, limit)) is not None:
        assert size not in known, f"{size} tried twice"
        known[size] = size <= answer
        assert len(known) <= 64
    return largest(known), list(known)


@given(st.integers(0, 2000), st.integers(1, 3000))
def test_the_largest_that_trains_is_found_to_a_grain_wherever_the_search_starts(answer: int, start: int) -> None:
    best = search(answer, start)[0]
    if answer == 0:
        assert best is None
    else:
        assert best is not None
        assert 0 <= answer - best < grain(best)


@given(st.integers(1, 63), st.integers(1, 3000))
def test_a_small_answer_is_exact(answer: int, start: int) -> None:
    assert search(answer, start)[0] == answer


@given(st.integers(1, 2000))
def test_a_right_prediction_costs_two_probes(answer: int) -> None:
    assert search(answer, answer)[1] == [answer, answer + grain(answer)]


@given(st.integers(1, 2000), st.floats(0.85, 1.15))
def test_a_prediction_that_is_a_little_off_costs_few(answer: int, factor: float) -> None:
    assert len(search(answer, max(1, round(answer * factor)))[1]) <= 9


@given(st.integers(1, 2000), st.integers(1, 3000))
def test_the_cost_grows_with_the_logarithm_of_the_error(answer: int, start: int) -> None:
    assert len(search(answer, start)[1]) <= 2 * abs(answer - start).bit_length() + 4


@pytest.mark.parametrize("start", [1, 7, 64])
def test_the_limit_is_tried_and_never_exceeded(start: int) -> None:
    best, probes = search(10**6, start, limit=64)
    assert best == 64
    assert max(probes) == 64


def test_nothing_trains_is_an_answer() -> None:
    assert search(0, 8)[0] is None
    assert search(0, 1) == (None, [1])


def test_a_success_above_a_failure_does_not_count() -> None:
    assert largest({4: True, 8: False, 16: True}) == 4
    assert next_probe({4: True, 8: False, 16: True}, 4, 64) == 6
