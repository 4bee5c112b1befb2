"""Answers drawn from predictions: how many GPUs, which micro-batch, which change."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.config.deepspeed_config import overlay
from ds_bench.config.spec import Configuration
from ds_bench.prediction.fit_verdict import DOES_NOT_FIT, FITS, TIGHT
from ds_bench.prediction.model_profile import Activations, Polynomial, find_profile
from ds_bench.prediction.what_if import (
    PlannedTrial,
    alternatives,
    fits,
    max_batch,
    min_gpus,
    smallest_change,
    with_settings,
)
from tests.support.fakes import offload, preset, zero
from tests.support.predictions import EVERY, GB, TOY, ask, llama


def test_min_gpus_is_enough_and_one_less_is_not() -> None:
    question, card = llama(zero(3), 1), 40 * GB
    count = min_gpus(question, card)
    assert count is not None
    assert 1 < count <= 8
    assert [fits(llama(zero(3), ranks), card) for ranks in (count - 1, count)] == [False, True]
    # No number helps a strategy that splits nothing; above a node, whole nodes count.
    assert min_gpus(llama(zero(0)), 80 * GB) is None
    assert min_gpus(replace(question, ranks_per_node=6), 22 * GB) == 24  # 23 are enough
    ten = replace(llama(zero(3), 10), ranks_per_node=8)
    assert min_gpus(ten, 29 * GB) == 10  # its own number fits, though whole nodes would be 16


@pytest.mark.parametrize("more", [{"fp16": {"enabled": False}}, {"bf16": {"immediate_grad_update": True}}])
def test_another_strategy_trains_in_the_precision_of_the_file(more: dict[str, Any]) -> None:
    blocks = overlay({"bf16": {"enabled": True}}, more)
    from_file = replace(zero(3), deepspeed_config={**zero(3).deepspeed_config, **blocks})
    changed, usual = (with_settings(llama(each), {"strategy": "zero2"}) for each in (from_file, zero(3)))
    assert changed.predict().ledger["gpu"]["parameters"] == usual.predict().ledger["gpu"]["parameters"]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(EVERY), st.integers(1, 40), st.integers(8, 80), st.sampled_from([1, 4, 6, 8]))
def test_min_gpus_never_contradict_the_verdict(strategy: Configuration, ranks: int, card_gb: int, node: int) -> None:
    question, card, host = replace(llama(strategy, ranks), ranks_per_node=node), card_gb * GB, 300 * GB
    if fits(question, card, host):
        count = min_gpus(question, card, host)
        assert count is not None
        assert count <= ranks


def test_max_batch_fits_and_one_more_does_not() -> None:
    card = 80 * GB
    size = max_batch(llama(zero(3)), card)
    assert size is not None
    assert [fits(llama(zero(3), batch_size=batch), card) for batch in (size, size + 1)] == [True, False]
    assert max_batch(llama(zero(0)), 24 * GB) is None


def heavy_toy() -> PlannedTrial:
    """Layers that take 100 MB each of a sequence, but 1 MB with checkpointing."""
    activations = Activations(
        plain=Polynomial(fixed={}, per_layer={"bs": 100 * 2**20}),
        checkpointed=Polynomial(fixed={}, per_layer={"bs": 2**20}),
        loss=Polynomial(fixed={"bs": 150 * 2**20}, per_layer={"bs": 100 * 2**20}),
    )
    return ask(zero(1), model=replace(TOY, activations={"bf16": activations}), batch_size=64)


def test_smallest_change(subtests: pytest.Subtests) -> None:
    eight = replace(llama(zero(3), 8), ranks_per_node=8)
    host_of_six = eight.predict().host_bytes * 3 // 4
    toy = heavy_toy()
    one = replace(toy, workload=replace(toy.workload, activation_checkpointing=True, batch_size=1))
    three = ["activation_checkpointing", "strategy", "num_gpus"]
    room_for_one = int(one.predict().gpu_bytes * 1.12)
    for name, question, card, host, settings_, fit in (
        ("fits already", llama(zero(3)), 80 * GB, None, None, None),
        ("too small for anything", llama(zero(0)), GB // 4, None, None, None),
        ("the gentlest first", llama(zero(3), 8, batch_size=6), 80 * GB, None, ["activation_checkpointing"], FITS),
        ("two changes", llama(zero(1), 2, batch_size=8), 24 * GB, None,
         ["activation_checkpointing", "strategy"], None),
        ("two before three", toy, room_for_one, None, ["activation_checkpointing", "batch_size"], None),
        ("too many ranks for the host", eight, 192 * GB, host_of_six, ["num_gpus"], None),
        # 64 processes take 96 GB of host memory, so a later stage on fewer GPUs.
        ("host is short", replace(llama(zero(0), 64), ranks_per_node=64), 22 * GB, 32 * GB, three, None),
        # The host has no room for any offload, so a later stage on more GPUs.
        ("no room to offload", llama(zero(0), 1), 23 * GB, 16 * GB, three[1:], None),
    ):  # fmt: skip
        with subtests.test(name):
            change = smallest_change(question, card, host)
            assert (change and list(change.settings)) == settings_
            if change is not None:
                verdict = change.prediction.verdict(card, host)
                assert verdict == fit if fit else verdict != DOES_NOT_FIT
                assert change.prediction == change.trial.judge(card)
    four = smallest_change(eight, 192 * GB, host_of_six)
    assert four is not None
    assert four.text == "4 GPUs"


def test_smaller_batch_that_fits_is_preferred_to_a_tight_one() -> None:
    profile = find_profile(preset("gpt2"), 1024)
    question = replace(ask(zero(0), 1, model=profile, seq_length=1024, batch_size=32), changes={})
    card = 18 * GB
    tight, roomy = max_batch(question, card), max_batch(question, card, tight=False)
    change = smallest_change(question, card)
    assert tight is not None
    assert roomy is not None
    assert roomy < tight
    assert change is not None
    assert (change.text, change.prediction.verdict(card)) == (f"batch size {roomy}", FITS)


@pytest.mark.parametrize(("model", "batch_size"), [("gpt2", 16), ("meta-llama/Llama-2-7b-hf", 2)])
def test_what_is_proposed_fits_and_the_next_larger_batch_or_smaller_number_of_gpus_does_not(
    model: str, batch_size: int, subtests: pytest.Subtests
) -> None:
    profile, host = replace(find_profile(preset(model), 1024), layers=3), 16 * GB  # fewer are replayed sooner
    for strategy, card_gb in itertools.product([*map(zero, range(4)), offload("cpu_optimizer", 2)], (9, 16)):
        with subtests.test(f"{strategy.name}, {card_gb} GB"):
            card = card_gb * GB
            asked = replace(ask(strategy, 2, model=profile, seq_length=1024, batch_size=batch_size), changes={})
            asked = replace(asked, ranks_per_node=6)

            def verdict(trial: PlannedTrial, card: int = card, **settings: int) -> str:
                return with_settings(trial, settings).verdict(card, host)

            for tight, fitting in ((True, (FITS, TIGHT)), (False, (FITS,))):
                if (size := max_batch(asked, card, host, tight=tight)) is not None:
                    assert verdict(asked, batch_size=size) in fitting
                    assert verdict(asked, batch_size=size + 1) not in fitting
            if (count := min_gpus(asked, card, host)) is not None:
                assert verdict(asked, num_gpus=count) != DOES_NOT_FIT
                assert count == 1 or verdict(asked, num_gpus=count - (1 if count <= 6 else 6)) == DOES_NOT_FIT, count
            if (change := smallest_change(asked, card, host)) is not None:
                best = verdict(change.trial)
                assert best == change.prediction.verdict(card, host) != DOES_NOT_FIT
                if (size := change.settings.get("batch_size", 1)) > 1:
                    assert verdict(change.trial, batch_size=size + 1) != FITS, change.text
                if (count := change.settings.get("num_gpus", 1)) > 1:
                    fewer = count - (1 if count <= 6 else 6)
                    assert verdict(change.trial, num_gpus=fewer) == DOES_NOT_FIT, change.text
            for each in alternatives(asked, card) if change is not None else ():
                assert each.need is not None
                changed = with_settings(asked, each.settings)
                assert each.need.verdict(card) == changed.verdict(card), each.settings
