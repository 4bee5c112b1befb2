"""Every caveat that one trial shows by itself, where it must be seen and where it must not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench import planner
from ds_bench.analysis.caveats import Caveat, CaveatKind, parse_caveats
from ds_bench.analysis.summary import TrialSummary, summarise
from ds_bench.doctor import nvme
from tests.support import fakes
from tests.support.summaries import CUDA, seen, summary, texts

GB = 2**30


def caveats(**changes: Any) -> str:
    return " | ".join(texts(summary(seen(**changes))))


# ------------------------------------------------------------------ caveats of one row


def test_a_quiet_row_has_no_caveat() -> None:
    assert caveats() == ""


def test_a_spread_above_5_percent_is_called_unstable_with_the_remedy(subtests: pytest.Subtests) -> None:
    for last, said in ((0.10, False), (0.105, False), (0.13, True)):
        with subtests.test(last=last):
            text = caveats(step_seconds=[0.1, last] * 5)
            assert ("unstable" in text) is said
            assert ("--num-steps" in text) is said


def test_halves_more_than_5_percent_apart_are_called_not_steady(subtests: pytest.Subtests) -> None:
    for second, said in ((0.104, False), (0.096, False), (0.106, True), (0.094, True)):
        with subtests.test(second=second):
            text = caveats(step_seconds=[0.1] * 5 + [second] * 5)
            assert ("not steady" in text) is said


def test_one_outlier_does_not_make_the_halves_differ() -> None:
    """Medians: a single hiccup is a matter of spread, not of warm-up."""
    text = caveats(step_seconds=[0.1] * 9 + [0.5])
    assert "unstable" in text
    assert "not steady" not in text


def outliers(*seconds: float) -> str:
    found = [text for text in texts(summary(seen(step_seconds=seconds))) if text.startswith("outliers")]
    return " | ".join(found) or "none"


def test_outliers_are_counted_and_the_slowest_three_are_named() -> None:
    """More than three quarters take 0.10 s, so both quartiles do, and the fence is 1.25 × 0.10."""
    steps = [0.1] * 24
    for place, slow in ((2, 0.31), (5, 0.2), (8, 0.5), (11, 0.15), (19, 0.13)):
        steps[place] = slow
    assert outliers(*steps) == (
        "outliers: 5 of 24 measured steps took far longer: step 9 (5.00x the median), step 3 (3.10x the median), "
        "step 6 (2.00x the median), 2 more, all counted"
    )


@pytest.mark.parametrize(("last", "said"), [(0.27, False), (0.29, True)])
def test_an_outlier_lies_beyond_three_interquartile_ranges_above_the_third_quartile(last: float, said: bool) -> None:
    """Of nine values in order the quartiles are the third and the seventh: 0.12 and 0.16, so 0.16 + 3 × 0.04 = 0.28."""
    steps = [0.10, 0.14, 0.12, 0.16, 0.10, 0.14, 0.12, 0.16, last]
    assert (outliers(*steps) != "none") is said


def test_few_steps_small_blips_two_modes_and_fast_steps_are_no_outliers(subtests: pytest.Subtests) -> None:
    for steps in (
        [0.1] * 6 + [0.9],
        [0.1] * 19 + [0.124],
        [0.1, 0.2] * 10,
        [0.1] * 10 + [0.2] * 10,
        [0.1] * 19 + [0.01],
    ):
        with subtests.test(steps=steps):
            assert outliers(*steps) == "none"


def test_outliers_neither_disqualify_nor_vanish_in_a_flat_row() -> None:
    found = summary(seen(step_seconds=[0.1] * 9 + [0.5]))
    (named,) = [caveat for caveat in found.caveats if caveat.text.startswith("outliers")]
    assert (named.kind, named.disqualifying) == (CaveatKind.NOTE, False)
    cell = "; ".join(["unstable: x", named.text, "not steady: y"])
    assert parse_caveats(cell, 10)[1] == named


def test_too_few_steps_are_not_judged_by_halves(subtests: pytest.Subtests) -> None:
    for steps in (1, 2, 3):
        with subtests.test(steps=steps):
            assert "not steady" not in caveats(step_seconds=[0.1 * (n + 1) for n in range(steps)])


def test_a_single_step_is_not_judged_at_all() -> None:
    assert caveats(step_seconds=[0.1]) == ""


def test_skipped_steps_are_counted_and_said() -> None:
    assert "3 measured steps were skipped" in caveats(skipped_steps=3)


def test_allocator_retries_on_any_rank_are_said() -> None:
    found = summary(seen(gpu_alloc_retries=0), seen(gpu_alloc_retries=2))
    assert any("allocator retried" in each for each in texts(found))


def test_a_loss_that_is_no_number_is_said_and_its_mean_is_null() -> None:
    found = summary(seen(losses=(7.0, None)), seen(losses=(5.0, 5.0)))
    assert found.losses == (6.0, None)
    assert any("loss is not finite" in each for each in texts(found))


def test_what_a_rank_says_of_itself_is_said_once() -> None:
    found = summary(seen(notes=("no smaps",)), seen(notes=("no smaps",)))
    assert texts(found).count("no smaps") == 1


def test_what_was_known_before_the_trial_comes_first() -> None:
    entry = replace(fakes.success(fakes.trial(on=CUDA), skipped_steps=1), caveats=("known before",))
    assert texts(summarise(entry, None, None))[0] == "known before"


@pytest.mark.parametrize(("held", "said"), [(49, False), (51, True)])
def test_buffers_that_are_most_of_the_memory_are_said(held: int, said: bool) -> None:
    ledger = {"gpu": {"parameters": 100 - held, "deepspeed_buffers": held}}
    assert ("reduce_bucket_size" in caveats(ledger=ledger)) is said


BUFFERS = {"parameters": 1, "deepspeed_buffers": 9}
SOUND = {"parameters": 900, "deepspeed_buffers": 1}


def test_on_a_gpu_only_buffers_on_the_device_are_weighed(subtests: pytest.Subtests) -> None:
    for ledger, said in (
        ({"gpu": SOUND, "cpu": BUFFERS}, False),
        ({"gpu": BUFFERS, "cpu": SOUND}, True),
        ({"nvme": BUFFERS}, False),
    ):
        with subtests.test(ledger=ledger):
            assert ("reduce_bucket_size" in caveats(ledger=ledger)) is said


def test_on_the_cpu_accelerator_buffers_in_host_memory_are_weighed() -> None:
    found = summarise(fakes.success(ledger={"cpu": BUFFERS}), None, None)
    assert any("reduce_bucket_size" in text for text in texts(found))


def test_the_fullest_rank_decides_whether_buffers_dominate() -> None:
    small, full = ({"gpu": {name: 1000 * size for name, size in BUFFERS.items()}}, {"gpu": {"parameters": 10**6}})
    for order in ((small, full), (full, small)):
        assert not of_kind(summary(*(seen(ledger=each) for each in order)), CaveatKind.BUCKET_DOMINATES)
    large = {"gpu": {name: 10**6 * size for name, size in BUFFERS.items()}}
    for order in ((large, full), (full, large)):
        assert of_kind(summary(*(seen(ledger=each) for each in order)), CaveatKind.BUCKET_DOMINATES)


def test_a_bucket_that_is_small_already_is_not_told_to_be_raised(subtests: pytest.Subtests) -> None:
    for size, said in ((1_000_000, False), (50_000_000, False), (50_000_001, True), (5e8, True)):
        with subtests.test(size=size):
            plain = fakes.trial(fakes.zero(2), on=CUDA)
            config = {**plain.ds_config, "zero_optimization": {"stage": 2, "reduce_bucket_size": size}}
            found = summarise(fakes.success(replace(plain, ds_config=config), ledger={"gpu": BUFFERS}), None, None)
            assert bool(of_kind(found, CaveatKind.BUCKET_DOMINATES)) is said


# ------------------------------------------------------------------ the kinds of caveats and what they rule out


def of_kind(found: TrialSummary, kind: CaveatKind) -> list[Caveat]:
    return [caveat for caveat in found.caveats if caveat.kind is kind]


def test_every_doubt_has_its_kind(subtests: pytest.Subtests) -> None:
    for changes, kind in (
        ({"step_seconds": [0.1, 0.2] * 5}, CaveatKind.UNSTABLE),
        ({"step_seconds": [0.1] * 5 + [0.2] * 5}, CaveatKind.NOT_STEADY),
        ({"gpu_alloc_retries": 1}, CaveatKind.ALLOCATOR_RETRIED),
        ({"gpu_peak_reserved_bytes": 79 * GB}, CaveatKind.NEAR_CAPACITY),
        ({"losses": (7.0, None)}, CaveatKind.LOSS_DIFFERS),
        ({"optimizer_class": "SGD"}, CaveatKind.OTHER_OPTIMIZER),
        ({"ledger": {"gpu": {"deepspeed_buffers": 9, "parameters": 1}}}, CaveatKind.BUCKET_DOMINATES),
        ({"skipped_steps": 3}, CaveatKind.NOTE),
        ({"micro_batch_size": 8}, CaveatKind.NOTE),
        ({"notes": ("no smaps",)}, CaveatKind.NOTE),
    ):
        with subtests.test(changes=changes, kind=kind):
            assert kind in {caveat.kind for caveat in summary(seen(**changes)).caveats}
            assert kind not in {caveat.kind for caveat in summary(seen()).caveats}


def test_above_95_percent_of_the_card_is_near_capacity(subtests: pytest.Subtests) -> None:
    """95 % of 80 GB are 76 GB, which is allowed itself: 74 reserved and 2 outside the allocator."""
    for reserved, said in ((74.0, False), (74.1, True), (78.0, True)):
        with subtests.test(reserved=reserved):
            found = summary(seen(gpu_peak_reserved_bytes=int(reserved * GB)))
            assert bool(of_kind(found, CaveatKind.NEAR_CAPACITY)) is said


def test_near_capacity_names_the_share_and_what_to_do() -> None:
    (caveat,) = of_kind(summary(seen(gpu_peak_reserved_bytes=76 * GB)), CaveatKind.NEAR_CAPACITY)
    assert "97.5 %" in caveat.text
    assert "--batch-size" in (caveat.next_step or "")
    assert not caveat.disqualifying


def test_who_implements_adam_is_no_other_optimizer(subtests: pytest.Subtests) -> None:
    for used in ("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam"):
        with subtests.test(used):
            assert not of_kind(summary(seen(optimizer_class=used)), CaveatKind.OTHER_OPTIMIZER)


def test_an_optimizer_of_another_kind_than_asked_for_is_said_and_rules_the_row_out(subtests: pytest.Subtests) -> None:
    for asked, used, said in (
        ("Lion", "DeepSpeedCPULion", False),
        ("Lion", "AdamW", True),
        ("Adagrad", "DeepSpeedCPUAdagrad", False),
        ("Adagrad", "Adam", True),
        ("Adam", "Adagrad", True),
        ("Muon", "MuonWithAuxAdam", False),
        ("AdamW", "MuonWithAuxAdam", True),
        ("OneBitAdam", "OnebitAdam", False),
        ("somebody.Own", "Own", False),
        ("AdamW", "Own", False),
    ):
        with subtests.test(asked=asked, used=used):
            plain = fakes.trial(on=CUDA)
            config = {**plain.ds_config, "optimizer": {"type": asked, "params": {}}}
            found = summarise(fakes.success(replace(plain, ds_config=config), optimizer_class=used), None, None)
            assert [caveat.disqualifying for caveat in of_kind(found, CaveatKind.OTHER_OPTIMIZER)] == [True] * said


def test_a_configuration_without_an_optimizer_is_asked_nothing() -> None:
    plain = fakes.trial(on=CUDA)
    config = {name: value for name, value in plain.ds_config.items() if name != "optimizer"}
    found = summarise(fakes.success(replace(plain, ds_config=config), optimizer_class="SGD"), None, None)
    assert not of_kind(found, CaveatKind.OTHER_OPTIMIZER)


def test_what_was_written_beside_a_record_is_typed(subtests: pytest.Subtests) -> None:
    for text, kind, ruled_out in (
        (
            "torch's AdamW instead of DeepSpeed's FusedAdam, which does not build here",
            CaveatKind.OTHER_OPTIMIZER,
            False,
        ),
        ("ran optimizer offload none, as the DeepSpeed config says, not this row's cpu", CaveatKind.NOTE, True),
        ("ran parameter offload none, as the DeepSpeed config says, not this row's nvme", CaveatKind.NOTE, True),
        ("--nvme-path is memory (tmpfs), not an NVMe disk", CaveatKind.NOTE, True),
        ("--nvme-path is a container's overlay (overlay), not an NVMe disk", CaveatKind.NOTE, False),
        ("ran precision fp16, as the DeepSpeed config says, not this row's bf16", CaveatKind.NOTE, False),
        ("hung at exit: still there 10 s after its results were written", CaveatKind.NOTE, False),
    ):
        with subtests.test(text):
            entry = replace(fakes.success(fakes.trial(on=CUDA)), caveats=(text,))
            (caveat,) = summarise(entry, None, None).caveats
            assert (caveat.kind, caveat.text, caveat.disqualifying) == (kind, text, ruled_out)


def test_the_texts_of_plan_that_are_recognised_are_those_that_plan_writes() -> None:
    """Guards the test above: the words are those of planner and doctor.nvme, and may change there."""
    sources = "".join(Path(module.__file__ or "").read_text(encoding="utf-8") for module in (planner, nvme))
    for words in ("torch's AdamW instead of", '"optimizer offload"', '"parameter offload"', "ran {what}"):
        assert words in sources
    assert nvme._NOT_A_DISK["tmpfs"] == "memory"


def test_only_a_row_that_did_not_train_what_was_asked_is_ruled_out(subtests: pytest.Subtests) -> None:
    for changes, ruled_out in (
        ({"losses": (7.0, None)}, True),
        ({"skipped_steps": 10}, True),
        ({"skipped_steps": 9}, False),
        ({"step_seconds": [0.1, 0.2] * 5}, False),
        ({"gpu_alloc_retries": 7}, False),
        ({"micro_batch_size": 8}, False),
    ):
        with subtests.test(changes=changes, ruled_out=ruled_out):
            assert any(caveat.disqualifying for caveat in summary(seen(**changes)).caveats) is ruled_out


# ------------------------------------------------------------------ NVMe that is none


def swapping(**changes: Any) -> str:
    trial = fakes.trial(fakes.offload("nvme"), on=replace(CUDA, nvme_path="/d"))
    changes.setdefault("ledger", {"nvme": {"parameters": 1, "optimizer_states": 1}})
    return " | ".join(texts(summarise(fakes.success(trial, **changes), None, None)))


@pytest.mark.parametrize("stored", [0, None])
def test_an_nvme_row_that_swapped_nothing_is_called_no_nvme_offload(stored: int | None) -> None:
    text = swapping(nvme_stored_bytes=stored, nvme_read_bytes=0, nvme_written_bytes=0)
    assert "nothing was swapped" in text
    assert "1048576 bytes" in text


def test_an_nvme_row_whose_bytes_never_reached_a_disk_is_said() -> None:
    assert "no bytes reached the disk" in swapping(nvme_stored_bytes=GB, nvme_read_bytes=0, nvme_written_bytes=0)


def test_an_nvme_row_whose_parameters_stayed_in_memory_says_so() -> None:
    text = swapping(
        nvme_stored_bytes=GB, nvme_read_bytes=1, nvme_written_bytes=1, ledger={"nvme": {"optimizer_states": 1}}
    )
    assert "parameters stayed in memory" in text


def test_an_nvme_row_that_never_used_the_disk_is_ruled_out(subtests: pytest.Subtests) -> None:
    for stored, moved, parameters, ruled_out in ((0, 0, 0, True), (GB, 0, 1, True), (GB, 1, 0, False)):
        with subtests.test(stored=stored, moved=moved, parameters=parameters, ruled_out=ruled_out):
            trial = fakes.trial(fakes.offload("nvme"), on=replace(CUDA, nvme_path="/d"))
            ledger = {"nvme": {"parameters": parameters, "optimizer_states": 1}}
            entry = fakes.success(
                trial, nvme_stored_bytes=stored, nvme_read_bytes=moved, nvme_written_bytes=moved, ledger=ledger
            )
            (caveat,) = summarise(entry, None, None).caveats
            assert caveat.disqualifying is ruled_out


def test_an_nvme_row_that_swapped_is_quiet() -> None:
    assert swapping(nvme_stored_bytes=GB, nvme_read_bytes=1, nvme_written_bytes=1) == ""


def test_a_row_without_nvme_is_not_asked_about_it() -> None:
    assert "swapped" not in caveats(nvme_stored_bytes=None)


def test_a_row_edited_to_use_nvme_is_asked_about_it() -> None:
    trial = fakes.trial(replace(fakes.offload("nvme"), name="mine"), on=replace(CUDA, nvme_path="/d"))
    assert any("nothing was swapped" in each for each in texts(summarise(fakes.success(trial), None, None)))
