"""The rule of docs/reading.md: worked examples, its edges, its laws by search, and that noise never decides."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.config.options import GOALS
from ds_bench.errors import UsageError
from ds_bench.recommend.decision import Candidate, Speeds, decide
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.recommendations import CARD, GB, answer, compared, repeated, row

NONE, CPU_OPTIMIZER, CPU_FULL, NVME = ("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "nvme")


def candidate(label: str, gigabytes: float, speed: float, level: tuple[str, str] = NONE, **more: Any) -> Candidate:
    size, share = int(gigabytes * GB), gigabytes / CARD
    values: dict[str, Any] = {"memory_bytes": size, "fraction": share, "offload_level": level, "key": label, **more}
    return Candidate(label=label, tokens_per_second=speed, **values)


def choose(rows: Sequence[Candidate], goal: str = "balanced") -> Candidate | None:
    decision = decide(rows, goal)
    return None if decision is None else decision.choice


EXAMPLES: list[tuple[str, str, list[Any]]] = [
    ("z0", "balanced", [("z0", 8.2, 45_000), ("z1", 8.2, 44_500), ("z2", 6.8, 42_500), ("z3", 4.5, 33_000)]),
    # 65 % of the card; 90 % of 11,400 are 10,260, which stage 2 reaches and stage 3 does not.
    ("z2", "balanced", [("z0", 52, 11_400), ("z1", 38, 11_000), ("z2", 28, 10_500), ("z3", 18, 8_700)]),
    # The rule stays at the offload level of the fastest, and does not offload to save memory that is not short.
    ("one", "balanced", [("one", 68, 4_900, CPU_OPTIMIZER), ("full", 42, 3_500, CPU_FULL), ("nvme", 25, 2_400, NVME)]),
    ("z3", "balanced", [("z3", 72, 3_000), ("one", 58, 2_850, CPU_OPTIMIZER), ("nvme", 35, 1_700, NVME)]),
    ("fast", "memory", [("slow", 10, 100), ("fast", 10, 200), ("big", 12, 200)]),
    # Anything on the disk is less simple than everything in host memory.
    ("full", "speed", [("disk", 10, 1000, ("nvme", "none")), ("full", 10, 1000, CPU_FULL)]),
    # Memories within 3 % are left to speed.
    ("fast", "memory", [("fast", 8.0, 1000), ("lean", 7.9, 500), ("big", 12, 2000)]),
    ("fast", "speed", [("slow", 10, 100), ("fast", 10, 200), ("big", 12, 200)]),
    # At 60 % sharp less memory begins to count; 90 % of the speed sharp is fast enough.
    ("fast", "balanced", [("fast", 47.9, 1000), ("lean", 20, 950)]),
    ("lean", "balanced", [("fast", 48.0, 1000), ("lean", 20, 950)]),
    ("lean", "balanced", [("fast", 60, 1000), ("lean", 20, 900)]),
    ("fast", "balanced", [("fast", 60, 1000), ("lean", 20, 899)]),
    # 95 % of the card are 76 GB.
    ("full", "speed", [("full", 76.0, 1000)]),
    ("other", "speed", [("full", 76.1, 1000), ("other", 10, 10)]),
]


def test_worked_examples_on_80_gb(subtests: pytest.Subtests) -> None:
    for label, goal, rows in EXAMPLES:
        with subtests.test(label):
            found = choose([candidate(*each) for each in rows], goal)
            assert found is not None
            assert found.label == label


def test_of_equally_simple_tied_rows_the_leaner_one_is_chosen_after_three_runs(subtests: pytest.Subtests) -> None:
    for runs, label in ((3, "lean"), (2, "fast")):
        with subtests.test(label):
            found = choose([candidate("lean", 10, 990, runs=runs), candidate("fast", 20, 1000, runs=runs)], "speed")
            assert found is not None
            assert found.label == label


def test_unknown_capacity_memory_or_goal() -> None:
    fast = candidate("fast", 70, 1000, fraction=None)
    assert choose([candidate("lean", 10, 960), fast]) == fast
    known = candidate("known", 40, 100)
    assert choose([candidate("unknown", 1, 500, memory_bytes=None), known], "memory") == known
    with pytest.raises(UsageError, match="goal 'cheap' is not known"):
        choose([known], "cheap")


def test_lead_of_equal_rows_by_chance(subtests: pytest.Subtests) -> None:
    """The 95 % quantile of the range of 2, 4, 12 normal values is 2.772, 3.633, 4.622: × 5 % / √runs, as a ratio."""
    for rows, runs, lead in ((2, 1, 0.1487), (4, 1, 0.1992), (4, 2, 0.1371), (12, 1, 0.2600)):
        with subtests.test(rows=rows, runs=runs):
            one = candidate("one", 8, 1000, runs=runs)
            speeds = Speeds(candidates=[one] * rows)
            assert speeds.chance_lead(one, one) == pytest.approx(lead, abs=5e-5)
            for ahead, differ in ((0.999, False), (1.001, True)):
                assert speeds.differ(one, replace(one, tokens_per_second=1000 * (1 + lead * ahead))) == differ
            # Steps that vary more say less: √(0.3² + 0.4²).
            assert speeds.chance_lead(replace(one, step_spread=0.3), replace(one, step_spread=0.4)) == pytest.approx(
                0.5
            )


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        label=st.text("abc", min_size=1, max_size=3),
        tokens_per_second=st.floats(1, 1e6),
        memory_bytes=st.integers(1, 80 * GB),
        fraction=st.none() | st.floats(0.001, 1),
        offload_level=st.sampled_from([NONE, CPU_OPTIMIZER, CPU_FULL, NVME]),
    ),
    max_size=8,
)
TIE = 1.03 * (1 + 1e-12)
"""Memories that differ by less are equal."""


@settings(deadline=None)
@given(CANDIDATES, st.randoms(use_true_random=False))
def test_laws_of_the_choice_for_every_goal(rows: list[Candidate], chance: Any) -> None:
    able = [each for each in rows if each.fraction is None or each.fraction <= 0.95]
    speed, middle, memory = found = [choose(rows, goal) for goal in GOALS]
    assert all(each in able for each in found) if able else set(found) == {None}
    shuffled = [choose(chance.sample(rows, len(rows)), goal) for goal in GOALS]
    if speed is None or middle is None or memory is None:
        assert shuffled == found
        return
    # The order of the rows decides exact ties only.
    for one, other in zip(found, shuffled, strict=True):
        assert one is not None
        assert other is not None
        assert (one.tokens_per_second, one.memory_bytes) == (other.tokens_per_second, other.memory_bytes)
    by_chance = 1 + Speeds(candidates=rows).chance_lead(speed, middle) + 1e-12
    assert speed.tokens_per_second * by_chance >= max(middle.tokens_per_second, memory.tokens_per_second)
    assert (memory.memory_bytes or 0) <= TIE * min(middle.memory_bytes or 0, speed.memory_bytes or 0)
    # Balanced gives up a tenth of the speed at most, for less memory at the same offload.
    assert middle.tokens_per_second >= 0.9 * speed.tokens_per_second * (1 - 1e-12)
    assert (middle.memory_bytes or 0) <= TIE * (speed.memory_bytes or 0)
    assert middle.offload_level == speed.offload_level


# ------------------------------------------------------------------ from records


def again(like: TrialRecord, mean: float, chance: random.Random, step_noise: float) -> TrialRecord:
    """The record with other times: ``mean`` seconds per step, with relative noise from step to step."""
    steps = tuple(mean * math.exp(chance.gauss(0, step_noise)) for _ in range(10))
    return replace(like, ranks=(replace(like.ranks[0], step_seconds=steps, window_seconds=sum(steps)),))


def test_the_same_of_equal_rows_is_chosen_in_95_percent_of_repetitions(subtests: pytest.Subtests) -> None:
    """Relative noise between runs and within one; below three runs equal rows are not called decided either."""
    for runs, between, within in ((1, 0.05, 0), (2, 0.05, 0), (3, 0.02, 0.2), (5, 0.02, 0.2)):
        with subtests.test(runs=runs, between=between):
            chance = random.Random(20261121)
            strategies = [
                *(fakes.zero(stage) for stage in (0, 1, 2)),
                *map(fakes.offload, ("cpu_optimizer", "cpu_full")),
            ]
            made = [[row(strategy, 8, 5120, repeat=repeat) for repeat in range(runs)] for strategy in strategies]
            chosen: Counter[str | None] = Counter()
            decided = 0
            for _ in range(100):
                like = [each for runs_of_row in made[: chance.choice((2, 3, 5))] for each in runs_of_row]
                records = [again(each, 0.1 * math.exp(chance.gauss(0, between)), chance, within) for each in like]
                found = answer(*records, goal=chance.choice(GOALS))
                chosen[found.choice] += 1
                decided += found.decided
            assert chosen["ZeRO-0"] >= 95, chosen
            assert runs >= 3 or decided <= 10


def runs_of(offload: str, speeds: Sequence[float], gigabytes: float = 8) -> list[TrialRecord]:
    return [row(fakes.offload(offload), gigabytes, speed, repeat=number) for number, speed in enumerate(speeds)]


def test_offload_ties_with_none_if_the_interval_holds_1_or_the_lead_is_below_3_percent(
    subtests: pytest.Subtests,
) -> None:
    for none, offloaded, choice, decided, tied in (
        (([900, 1000, 1100],), ([800, 1050, 1300],), "ZeRO-3", False, 2),
        (([1000, 1002, 1001],), ([1001, 1001, 1003],), "ZeRO-3", True, 2),
        (([1000, 1000.1, 1000.2],), ([1020, 1020.1, 1020.2],), "ZeRO-3", True, 2),
        # The faster row, where device memory is short.
        (([1000, 1000.1, 1000.2], 70), ([1020, 1020.1, 1020.2], 30), "ZeRO-3 + CPU optimizer", True, 0),
        (([1000, 1001, 1002],), ([1101, 1102, 1103],), "ZeRO-3 + CPU optimizer", True, 0),
    ):
        with subtests.test(choice):
            found = answer(*runs_of("none", *none), *runs_of("cpu_optimizer", *offloaded))
            assert (found.choice, found.decided, len(found.tied)) == (choice, decided, tied)


def test_stages_that_may_differ_by_more_than_memory_is_worth_are_undecided() -> None:
    """Three runs with a spread of 10 %: a difference of a tenth is not ruled out."""
    found = answer(*repeated(0, 8, [900, 1000, 1100]), *repeated(1, 8, [1120, 920, 1010]))
    assert found.undecided == ("ZeRO-0", "ZeRO-1")


def test_fewer_changed_keys_break_a_tie_at_one_stage() -> None:
    plain = row(fakes.zero(1), 8, 1000)
    zero = {**plain.trial.ds_config["zero_optimization"], "overlap_comm": True}
    edited = replace(plain, trial=replace(plain.trial, ds_config={**plain.trial.ds_config, "zero_optimization": zero}))
    for records in ((edited, plain), (plain, edited)):
        found = compared(*records).row(answer(*records).key or "")
        assert found.runs[0].trial == plain.trial
