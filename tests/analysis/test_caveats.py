"""A closed set of caveats, each with its next step, and how stored texts are recognised."""

from __future__ import annotations

import pytest

from ds_bench.analysis.caveats import (
    Caveat,
    CaveatKind,
    CaveatText,
    caveat_of_kind,
    note,
    parse_caveat,
    parse_caveats,
)
from ds_bench.cli.arguments import parse

FREE = {CaveatKind.NOTE}
"""Kinds whose next step depends on the text."""


def test_every_kind_has_a_next_step() -> None:
    assert {kind for kind in CaveatKind if not kind.next_step} == FREE


def test_a_caveat_carries_the_next_step_of_its_kind(subtests: pytest.Subtests) -> None:
    for kind in sorted(set(CaveatKind) - FREE):
        with subtests.test(kind=kind):
            caveat = caveat_of_kind(kind, "seen: 3 %")
            assert caveat.next_step == kind.next_step
            assert caveat.line == f"seen: 3 %; {kind.next_step}"


def test_a_remedy_that_the_text_ends_with_is_not_said_twice() -> None:
    caveat = caveat_of_kind(CaveatKind.NOT_STEADY, f"not steady: …; {CaveatKind.NOT_STEADY.next_step}")
    assert caveat.next_step_if_not_in_text is None
    assert caveat.line == caveat.text


def test_a_free_text_is_a_note_without_a_next_step() -> None:
    assert note("hung at exit") == Caveat(kind=CaveatKind.NOTE, text="hung at exit")


def test_a_text_of_the_closed_set_is_read_back_as_the_caveat_that_was_written() -> None:
    """Alone, and joined with all others in one cell; a member whose text another one takes would be lost."""
    written = [text.caveat(f"1 {text.contains} 2; 3") for text in CaveatText]
    assert [parse_caveat(caveat.text) for caveat in written] == written
    assert parse_caveats("; ".join(caveat.text for caveat in written), 10) == written


def test_flags_that_next_steps_name_exist() -> None:
    """A remedy that the command line refuses is none."""
    named = {word.strip(",;:") for kind in CaveatKind for word in (kind.next_step or "").split() if word[:2] == "--"}
    assert named >= {"--num-steps", "--repeats", "--batch-size"}
    with_values = {"--precision": "fp32", "--set": "zero_optimization.reduce_bucket_size=50000000"}
    for flag in named:
        arguments = [flag] if flag == "--activation-checkpointing" else [flag, with_values.get(flag, "3")]
        assert parse("zero", "zero_stage_comparison.py", arguments) is not None
