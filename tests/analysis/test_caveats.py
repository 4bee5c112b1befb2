"""A closed set of doubts, each with what to do next, said once."""

from __future__ import annotations

import pytest

from ds_bench.analysis.caveats import NEXT_STEPS, Caveat, CaveatKind, caveat_of_kind, note
from ds_bench.cli.arguments import parse

FREE = {CaveatKind.NOTE}
"""Kinds whose next step depends on the text."""


def test_every_kind_has_a_next_step() -> None:
    assert set(NEXT_STEPS) == set(CaveatKind)
    assert {kind for kind, step in NEXT_STEPS.items() if not step} == FREE


@pytest.mark.parametrize("kind", sorted(set(CaveatKind) - FREE))
def test_a_caveat_carries_the_next_step_of_its_kind(kind: CaveatKind) -> None:
    caveat = caveat_of_kind(kind, "seen: 3 %")
    assert caveat.next_step == NEXT_STEPS[kind]
    assert caveat.line == f"seen: 3 %; {NEXT_STEPS[kind]}"


def test_a_remedy_that_the_text_ends_with_is_not_said_twice() -> None:
    caveat = caveat_of_kind(CaveatKind.NOT_STEADY, f"not steady: …; {NEXT_STEPS[CaveatKind.NOT_STEADY]}")
    assert caveat.next_step_if_not_in_text is None
    assert caveat.line == caveat.text


def test_a_free_text_is_a_note_without_a_next_step() -> None:
    assert note("hung at exit") == Caveat(kind=CaveatKind.NOTE, text="hung at exit")


def test_nothing_can_be_taken_out_of_the_table_or_written_into_it() -> None:
    with pytest.raises(TypeError):
        NEXT_STEPS[CaveatKind.NOTE] = "guess"  # type: ignore[index]


def test_flags_that_next_steps_name_exist() -> None:
    """A remedy that the command line refuses is none."""
    named = {word.strip(",;:") for step in NEXT_STEPS.values() for word in (step or "").split() if word[:2] == "--"}
    assert named >= {"--num-steps", "--repeats", "--batch-size"}
    with_values = {"--precision": "fp32", "--set": "zero_optimization.reduce_bucket_size=50000000"}
    for flag in named:
        arguments = [flag] if flag == "--activation-checkpointing" else [flag, with_values.get(flag, "3")]
        assert parse("zero", "zero_stage_comparison.py", arguments) is not None
