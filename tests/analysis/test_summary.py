"""Every number by hand once, its laws by search, and every caveat a reader must see or must not see."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench import plan
from ds_bench.analysis import flat_reader
from ds_bench.analysis.caveats import Caveat, CaveatKind, note, parse_caveats
from ds_bench.analysis.flat_rows import flat_rows
from ds_bench.analysis.loss_parity import compare_losses, with_loss_caveats
from ds_bench.analysis.summary import TrialSummary, summarise
from ds_bench.doctor import nvme
from ds_bench.models.presets import find_preset
from ds_bench.records.schema import RankMeasurement, TrialRecord
from tests.support import fakes

CUDA = fakes.placement(accelerator="cuda", num_gpus=1)
PAIR = fakes.placement(accelerator="cuda", num_gpus=2)
GB = 2**30

seconds = st.lists(st.floats(1e-4, 100), min_size=1, max_size=30)
quick = settings(deadline=None)


def record_of(*ranks: RankMeasurement, **changes: Any) -> TrialRecord:
    """A success of these ranks, whatever the trial says."""
    trial = fakes.trial(on=replace(CUDA, num_gpus=len(ranks)), **changes)
    numbered = tuple(replace(rank, rank=number, world_size=len(ranks)) for number, rank in enumerate(ranks))
    return replace(fakes.success(trial), ranks=numbered)


def summary(*ranks: RankMeasurement, **changes: Any) -> TrialSummary:
    return summarise(record_of(*ranks, **changes), None, None)


def seen(**changes: Any) -> RankMeasurement:
    return fakes.measurement(fakes.trial(on=CUDA), **changes)


def texts(of: TrialSummary) -> list[str]:
    return [caveat.text for caveat in of.caveats]


def caveats(**changes: Any) -> str:
    return " | ".join(texts(summary(seen(**changes))))


# ------------------------------------------------------------------ throughput


def test_throughput_by_hand() -> None:
    """2 sequences × 100 tokens × 3 micro-batches × 4 ranks = 2400 tokens in a step of 0.5 s: 4800 tokens/s."""
    of = fakes.workload(batch_size=2, seq_length=100, grad_accum=3, num_steps=2)
    trial = fakes.trial(of=of, on=replace(CUDA, num_gpus=4))
    found = summarise(fakes.success(trial, step_seconds=[0.4, 0.6]), None, None)
    assert found.mean_step_seconds == pytest.approx(0.5)
    assert found.samples_per_second == pytest.approx(48)
    assert found.tokens_per_second == pytest.approx(4800)
    assert found.tokens_per_second_per_gpu == pytest.approx(1200)


def test_on_one_gpu_without_accumulation_it_is_batch_times_sequence_by_time() -> None:
    found = summary(seen(step_seconds=[0.25] * 10))
    assert found.tokens_per_second == pytest.approx(4 * 128 / 0.25)


def test_the_step_time_is_the_window_by_the_steps_and_not_the_mean_of_the_samples() -> None:
    """Device events may add up to less than the synchronised window; the window is what passed."""
    found = summary(seen(step_seconds=[0.1] * 10, window_seconds=1.5))
    assert found.mean_step_seconds == pytest.approx(0.15)


def test_the_spread_is_the_sample_standard_deviation() -> None:
    found = summary(seen(step_seconds=[0.1, 0.2, 0.3]))
    assert found.step_seconds_std == pytest.approx(0.1)
    assert summary(seen(step_seconds=[0.1])).step_seconds_std is None


@quick
@given(steps=seconds, ranks=st.integers(1, 64))
def test_throughput_scales_with_the_world_size_and_per_gpu_stays(steps: list[float], ranks: int) -> None:
    one = summarise(fakes.success(fakes.trial(on=CUDA), step_seconds=steps), None, None)
    trial = fakes.trial(on=replace(CUDA, num_gpus=ranks))
    many = summarise(fakes.success(trial, step_seconds=steps), None, None)
    assert one.tokens_per_second is not None
    assert many.tokens_per_second == pytest.approx(ranks * one.tokens_per_second)
    assert many.tokens_per_second_per_gpu == pytest.approx(one.tokens_per_second_per_gpu)


@quick
@given(steps=seconds, factor=st.floats(0.01, 100))
def test_steps_that_take_longer_lower_the_throughput_by_the_same_factor(steps: list[float], factor: float) -> None:
    slow, fast = summary(seen(step_seconds=[s * factor for s in steps])), summary(seen(step_seconds=steps))
    assert slow.tokens_per_second is not None
    assert slow.tokens_per_second * factor == pytest.approx(fast.tokens_per_second)


@quick
@given(
    warmup=st.lists(st.floats(1e-4, 1e4), max_size=20),
    first=st.floats(0, 1e4),
    start=st.floats(0, 1e4),
)
def test_warm_up_steps_are_in_no_statistic(warmup: list[float], first: float, start: float) -> None:
    plain = summary(seen())
    other = summary(seen(warmup_step_seconds=tuple(warmup), first_step_seconds=first, init_seconds=start))
    assert replace(other, record=plain.record) == plain


@quick
@given(steps=seconds, order=st.randoms())
def test_the_order_of_steps_changes_neither_time_nor_spread(steps: list[float], order: Any) -> None:
    shuffled = steps.copy()
    order.shuffle(shuffled)
    a, b = summary(seen(step_seconds=steps)), summary(seen(step_seconds=shuffled))
    assert a.mean_step_seconds == pytest.approx(b.mean_step_seconds)
    assert a.step_seconds_std == pytest.approx(b.step_seconds_std, abs=1e-12)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_slowest_rank_decides_wherever_it_sits(slow: int) -> None:
    ranks = [seen(step_seconds=[0.3 if rank == slow else 0.1] * 10, data_parallel_size=3) for rank in range(3)]
    found = summary(*ranks)
    assert found.mean_step_seconds == pytest.approx(0.3)
    assert found.tokens_per_second == pytest.approx(4 * 128 * 3 / 0.3)


def test_model_parallel_ranks_do_not_multiply_the_batch() -> None:
    found = summary(*[seen(data_parallel_size=1)] * 2)
    assert found.tokens_per_second == pytest.approx(4 * 128 / 0.1)
    assert found.tokens_per_second_per_gpu == pytest.approx(4 * 128 / 0.1 / 2)


def test_batch_and_accumulation_are_those_the_engine_ran() -> None:
    found = summary(seen(micro_batch_size=8, grad_accum=2))
    assert found.tokens_per_second == pytest.approx(8 * 2 * 128 / 0.1)
    assert (found.micro_batch_size, found.grad_accum) == (8, 2)
    assert "ran micro-batch 8 × accumulation 2, as the DeepSpeed config says, not the flags' 4 × 1" in texts(found)


def test_a_trial_that_measured_nothing_has_no_number_but_keeps_its_caveats() -> None:
    failed = replace(fakes.failure(), caveats=("known before",))
    found = summarise(failed, find_preset("gpt2"), 1e15)
    assert found == TrialSummary(record=failed, caveats=(note("known before"),), num_nodes=1)
    assert found.gpu_fraction is None


# ------------------------------------------------------------------ FLOPs and MFU


def test_mfu_by_hand() -> None:
    """GPT-2: 6 × 123 532 032 matmul weights + 12 × 12 × 12 × 64 × 128 = 755 347 968 FLOPs a token.

    1000 tokens/s on one device are 0.7553 TFLOP/s; of a peak of 10 TFLOP/s, 7.55 %.
    """
    facts = find_preset("gpt2")
    assert facts is not None
    assert facts.matmul_parameters == 123_532_032
    entry = record_of(seen(step_seconds=[4 * 128 / 1000] * 10))
    found = summarise(entry, facts, 10e12)
    assert found.tokens_per_second_per_gpu == pytest.approx(1000)
    assert found.model_tflops_per_gpu == pytest.approx(0.755347968)
    assert found.mfu == pytest.approx(0.0755347968)


def test_mfu_is_per_gpu_and_does_not_grow_with_their_number() -> None:
    facts = find_preset("gpt2")
    one = summarise(fakes.success(fakes.trial(on=CUDA)), facts, 1e15)
    eight = summarise(fakes.success(fakes.trial(on=replace(CUDA, num_gpus=8))), facts, 1e15)
    assert eight.mfu == pytest.approx(one.mfu)


def test_without_a_peak_there_is_no_mfu_but_tflops() -> None:
    found = summarise(fakes.success(), find_preset("gpt2"), None)
    assert found.mfu is None
    assert found.model_tflops_per_gpu is not None


def test_without_a_known_architecture_there_is_neither() -> None:
    found = summarise(fakes.success(), None, 1e15)
    assert (found.mfu, found.model_tflops_per_gpu) == (None, None)


def test_an_mfu_above_100_percent_is_called_an_error_of_accounting() -> None:
    facts = find_preset("gpt2")
    assert any("error of accounting" in each for each in texts(summarise(fakes.success(), facts, 1e9)))
    assert not any("accounting" in each for each in texts(summarise(fakes.success(), facts, 1e15)))


# ------------------------------------------------------------------ memory


def test_device_memory_is_the_worst_ranks() -> None:
    found = summary(seen(gpu_peak_bytes=3 * GB), seen(gpu_peak_bytes=9 * GB), seen(gpu_peak_bytes=5 * GB))
    assert found.gpu_peak_bytes == 9 * GB


def test_where_a_rank_did_not_report_the_fullest_node_is_not_known() -> None:
    """Node b may hold more than a's 2 GB: one of its ranks says nothing."""
    a, b = seen(host_peak_bytes=2 * GB, hostname="a"), seen(host_peak_bytes=GB, hostname="b")
    assert summary(a, b, replace(b, host_peak_bytes=None)).host_peak_bytes is None


def test_host_memory_is_the_sum_over_the_ranks_of_the_fullest_node() -> None:
    ranks = [
        seen(hostname="a", host_peak_bytes=1),
        seen(hostname="a", host_peak_bytes=2),
        seen(hostname="b", host_peak_bytes=10),
    ]
    assert summary(*ranks).host_peak_bytes == 10
    assert summary(*ranks[:2]).host_peak_bytes == 3


def test_a_sum_over_ranks_one_of_which_is_silent_is_not_guessed() -> None:
    assert summary(seen(host_peak_bytes=1), seen(host_peak_bytes=None)).host_peak_bytes is None


def test_the_share_of_the_card_is_of_reserved_memory_since_that_is_nearest_to_running_out() -> None:
    found = summary(seen(gpu_peak_bytes=8 * GB, gpu_peak_reserved_bytes=20 * GB, gpu_total_bytes=80 * GB))
    assert found.gpu_fraction == 0.25


def test_the_share_of_the_card_is_the_fullest_cards_and_not_of_the_largest_one() -> None:
    small = seen(gpu_peak_reserved_bytes=38 * GB, gpu_total_bytes=40 * GB)
    large = seen(gpu_peak_reserved_bytes=40 * GB, gpu_total_bytes=80 * GB)
    assert summary(large, small).gpu_fraction == 0.95


def test_the_share_of_an_emulated_card_is_of_its_emulated_size() -> None:
    trial = fakes.trial(on=replace(CUDA, gpu_memory_limit_bytes=20 * GB))
    found = summarise(fakes.success(trial, gpu_peak_reserved_bytes=19 * GB, gpu_total_bytes=80 * GB), None, None)
    assert found.gpu_fraction == 0.95


@pytest.mark.parametrize("missing", ["gpu_total_bytes", "both"])
def test_without_a_card_there_is_no_share_of_it(missing: str) -> None:
    gone: dict[str, Any] = {"gpu_total_bytes": None}
    if missing == "both":
        gone = {"gpu_peak_reserved_bytes": None, "gpu_peak_bytes": None}
    assert summary(seen(**gone)).gpu_fraction is None


def test_disk_traffic_is_per_step_and_of_the_whole_job() -> None:
    found = summary(*[seen(nvme_read_bytes=100, nvme_written_bytes=0, nvme_stored_bytes=7)] * 2)
    assert (found.nvme_read_bytes_per_step, found.nvme_written_bytes_per_step) == (20, 0)
    assert found.nvme_stored_bytes == 14


# ------------------------------------------------------------------ caveats of one row


def test_a_quiet_row_has_no_caveat() -> None:
    assert caveats() == ""


@pytest.mark.parametrize(("last", "said"), [(0.10, False), (0.105, False), (0.13, True)])
def test_a_spread_above_5_percent_is_called_unstable_with_the_remedy(last: float, said: bool) -> None:
    text = caveats(step_seconds=[0.1, last] * 5)
    assert ("unstable" in text) is said
    assert ("--num-steps" in text) is said


@pytest.mark.parametrize(("second", "said"), [(0.104, False), (0.096, False), (0.106, True), (0.094, True)])
def test_halves_more_than_5_percent_apart_are_called_not_steady(second: float, said: bool) -> None:
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


@pytest.mark.parametrize(
    "steps", [[0.1] * 6 + [0.9], [0.1] * 19 + [0.124], [0.1, 0.2] * 10, [0.1] * 10 + [0.2] * 10, [0.1] * 19 + [0.01]]
)
def test_few_steps_small_blips_two_modes_and_fast_steps_are_no_outliers(steps: list[float]) -> None:
    assert outliers(*steps) == "none"


def test_outliers_neither_disqualify_nor_vanish_in_a_flat_row() -> None:
    found = summary(seen(step_seconds=[0.1] * 9 + [0.5]))
    (named,) = [caveat for caveat in found.caveats if caveat.text.startswith("outliers")]
    assert (named.kind, named.disqualifying) == (CaveatKind.NOTE, False)
    cell = "; ".join(["unstable: x", named.text, "not steady: y"])
    assert parse_caveats(cell, 10)[1] == named


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_too_few_steps_are_not_judged_by_halves(steps: int) -> None:
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


def test_a_loss_of_zero_is_a_loss() -> None:
    found = summary(seen(losses=(0.0, 0.0)), seen(losses=(1.0, 0.0)))
    assert found.losses == (0.5, 0.0)
    assert not any("finite" in each for each in texts(found))


@quick
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), min_size=1, max_size=5))
def test_the_loss_of_a_step_is_the_mean_over_ranks(losses: list[list[float]]) -> None:
    found = summary(*(seen(losses=tuple(each)) for each in losses))
    means = [math.fsum(step) / len(losses) for step in zip(*losses, strict=True)]
    assert list(found.losses) == pytest.approx(means, abs=1e-9)


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


@pytest.mark.parametrize(
    ("ledger", "said"),
    [({"gpu": SOUND, "cpu": BUFFERS}, False), ({"gpu": BUFFERS, "cpu": SOUND}, True), ({"nvme": BUFFERS}, False)],
)
def test_on_a_gpu_only_buffers_on_the_device_are_weighed(ledger: dict[str, Any], said: bool) -> None:
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


@pytest.mark.parametrize(("size", "said"), [(1_000_000, False), (50_000_000, False), (50_000_001, True), (5e8, True)])
def test_a_bucket_that_is_small_already_is_not_told_to_be_raised(size: float, said: bool) -> None:
    plain = fakes.trial(fakes.zero(2), on=CUDA)
    config = {**plain.ds_config, "zero_optimization": {"stage": 2, "reduce_bucket_size": size}}
    found = summarise(fakes.success(replace(plain, ds_config=config), ledger={"gpu": BUFFERS}), None, None)
    assert bool(of_kind(found, CaveatKind.BUCKET_DOMINATES)) is said


# ------------------------------------------------------------------ the kinds of caveats and what they rule out


def of_kind(found: TrialSummary, kind: CaveatKind) -> list[Caveat]:
    return [caveat for caveat in found.caveats if caveat.kind is kind]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
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
    ],
)
def test_every_doubt_has_its_kind(changes: dict[str, Any], kind: CaveatKind) -> None:
    assert kind in {caveat.kind for caveat in summary(seen(**changes)).caveats}
    assert kind not in {caveat.kind for caveat in summary(seen()).caveats}


@pytest.mark.parametrize(("reserved", "said"), [(76.0, False), (76.1, True), (80.0, True)])
def test_above_95_percent_of_the_card_is_near_capacity(reserved: float, said: bool) -> None:
    """95 % of 80 GB are 76 GB, which is allowed itself."""
    found = summary(seen(gpu_peak_reserved_bytes=int(reserved * GB)))
    assert bool(of_kind(found, CaveatKind.NEAR_CAPACITY)) is said


def test_near_capacity_names_the_share_and_what_to_do() -> None:
    (caveat,) = of_kind(summary(seen(gpu_peak_reserved_bytes=78 * GB)), CaveatKind.NEAR_CAPACITY)
    assert "97.5 %" in caveat.text
    assert "--batch-size" in (caveat.next_step or "")
    assert not caveat.disqualifying


@pytest.mark.parametrize("used", ["AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam"])
def test_who_implements_adam_is_no_other_optimizer(used: str) -> None:
    assert not of_kind(summary(seen(optimizer_class=used)), CaveatKind.OTHER_OPTIMIZER)


@pytest.mark.parametrize(
    ("asked", "used", "said"),
    [
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
    ],
)
def test_an_optimizer_of_another_kind_than_asked_for_is_said_and_rules_the_row_out(
    asked: str, used: str, said: bool
) -> None:
    plain = fakes.trial(on=CUDA)
    config = {**plain.ds_config, "optimizer": {"type": asked, "params": {}}}
    found = summarise(fakes.success(replace(plain, ds_config=config), optimizer_class=used), None, None)
    assert [caveat.disqualifying for caveat in of_kind(found, CaveatKind.OTHER_OPTIMIZER)] == [True] * said


def test_a_configuration_without_an_optimizer_is_asked_nothing() -> None:
    plain = fakes.trial(on=CUDA)
    config = {name: value for name, value in plain.ds_config.items() if name != "optimizer"}
    found = summarise(fakes.success(replace(plain, ds_config=config), optimizer_class="SGD"), None, None)
    assert not of_kind(found, CaveatKind.OTHER_OPTIMIZER)


@pytest.mark.parametrize(
    ("text", "kind", "ruled_out"),
    [
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
        ("hung at exit: ended 10 s after its results were written", CaveatKind.NOTE, False),
    ],
)
def test_what_was_written_beside_a_record_is_typed(text: str, kind: CaveatKind, ruled_out: bool) -> None:
    entry = replace(fakes.success(fakes.trial(on=CUDA)), caveats=(text,))
    (caveat,) = summarise(entry, None, None).caveats
    assert (caveat.kind, caveat.text, caveat.disqualifying) == (kind, text, ruled_out)


def test_the_texts_of_plan_that_are_recognised_are_those_that_plan_writes() -> None:
    """Guards the test above: the words are those of plan and doctor.nvme, and may change there."""
    sources = "".join(Path(module.__file__ or "").read_text(encoding="utf-8") for module in (plan, nvme))
    for words in ("torch's AdamW instead of", '"optimizer offload"', '"parameter offload"', "ran {what}"):
        assert words in sources
    assert nvme._NOT_A_DISK["tmpfs"] == "memory"


@pytest.mark.parametrize(
    ("changes", "ruled_out"),
    [
        ({"losses": (7.0, None)}, True),
        ({"skipped_steps": 10}, True),
        ({"skipped_steps": 9}, False),
        ({"step_seconds": [0.1, 0.2] * 5}, False),
        ({"gpu_alloc_retries": 7}, False),
        ({"micro_batch_size": 8}, False),
    ],
)
def test_only_a_row_that_did_not_train_what_was_asked_is_ruled_out(changes: dict[str, Any], ruled_out: bool) -> None:
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


@pytest.mark.parametrize(
    ("stored", "moved", "parameters", "ruled_out"), [(0, 0, 0, True), (GB, 0, 1, True), (GB, 1, 0, False)]
)
def test_an_nvme_row_that_never_used_the_disk_is_ruled_out(
    stored: int, moved: int, parameters: int, ruled_out: bool
) -> None:
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
    config = fakes.trial(fakes.offload("nvme"), on=replace(CUDA, nvme_path="/d")).ds_config
    trial = fakes.trial(fakes.zero(3), on=replace(CUDA, nvme_path="/d"), ds_config=config)
    assert any("nothing was swapped" in each for each in texts(summarise(fakes.success(trial), None, None)))


# ------------------------------------------------------------------ losses beside each other


def losing(stage: int, *losses: float | None, precision: str = "bf16", **changes: Any) -> TrialSummary:
    """A row of a stage with these losses."""
    of = changes.pop("of", fakes.workload(precision=precision))
    trial = fakes.trial(fakes.zero(stage), on=CUDA, of=of)
    return summarise(fakes.success(trial, losses=losses, **changes), None, None)


QUIRK = {"engine_optimizer_class": "FP16_UnfusedOptimizer"}


def test_equal_losses_raise_no_caveat() -> None:
    assert compare_losses([losing(stage, 7.0, 6.9) for stage in (0, 1, 2, 3)]) == {}


def test_a_wrong_configuration_is_found_by_its_loss() -> None:
    """Seen: a stage-3 model built without the Transformers integration starts at 85 instead of 6.9."""
    found = compare_losses([losing(1, 6.9, 6.8), losing(3, 85.0, 80.0)])
    assert list(found) == [1]
    assert "from ZeRO-1's" in found[1].text
    assert "do not use this row" in found[1].text


@pytest.mark.parametrize(
    ("precision", "factor", "said"),
    [
        ("fp32", 1.0001, False),
        ("fp32", 1.001, True),
        ("bf16", 1.004, False),
        ("bf16", 1.01, True),
        ("fp16", 1.01, True),
    ],
)
def test_rounding_is_allowed_as_far_as_the_precision_goes(precision: str, factor: float, said: bool) -> None:
    found = compare_losses([losing(1, 7.0, precision=precision), losing(2, 7.0 * factor, precision=precision)])
    assert (1 in found) is said


def test_the_quirk_of_stage_0_in_16_bit_is_known_and_named_and_is_no_reference() -> None:
    found = compare_losses([losing(0, 7.08, 7.0, **QUIRK), losing(1, 7.0, 6.9), losing(2, 7.0, 6.9)])
    assert list(found) == [0]
    assert "known quirk" in found[0].text
    assert "do not use" not in found[0].text


def test_a_difference_the_quirk_cannot_explain_is_judged_like_any_other() -> None:
    found = compare_losses([losing(0, 10.5, **QUIRK), losing(1, 7.0)])
    assert "do not use this row" in found[0].text


def test_a_loss_that_differs_rules_a_row_out_unless_the_quirk_explains_it() -> None:
    found = compare_losses([losing(0, 7.08, **QUIRK), losing(1, 7.0), losing(3, 85.0)])
    assert {place: (caveat.kind, caveat.disqualifying) for place, caveat in found.items()} == {
        0: (CaveatKind.LOSS_DIFFERS, False),
        2: (CaveatKind.LOSS_DIFFERS, True),
    }
    assert found[0].next_step is None
    assert "fp32" in (found[2].next_step or "")


def test_stage_0_without_the_quirks_wrapper_is_judged_like_any_other() -> None:
    found = compare_losses([losing(1, 7.0), losing(0, 7.2)])
    assert "do not use this row" in found[1].text


def test_stage_0_with_the_wrapper_but_the_same_losses_is_quiet() -> None:
    assert compare_losses([losing(0, 7.0, **QUIRK), losing(1, 7.0)]) == {}


def test_stage_0_alone_has_nothing_to_be_compared_with() -> None:
    assert compare_losses([losing(0, 7.2, **QUIRK)]) == {}
    assert compare_losses([]) == {}


def test_a_loss_that_drifts_off_late_is_rounding_that_grew() -> None:
    """Two right configurations part ways after many steps; only the first ten are judged."""
    early, late = [7.0] * 10, [7.0] * 10
    assert compare_losses([losing(1, *early, 7.0), losing(2, *late, 9.0)]) == {}


def test_rows_of_other_batches_or_workloads_are_not_compared_by_loss() -> None:
    reference = losing(1, 7.0)
    assert compare_losses([reference, losing(2, 9.0, micro_batch_size=8)]) == {}
    assert compare_losses([reference, losing(2, 9.0, of=fakes.workload(seq_length=256))]) == {}


def test_a_row_that_lost_its_loss_is_neither_reference_nor_judged_here() -> None:
    found = compare_losses([losing(1, None, 7.0), losing(2, 7.0, 6.9), losing(3, 7.0, 6.9)])
    assert found == {}


def test_failed_rows_do_not_disturb_the_comparison_or_shift_its_caveats() -> None:
    failed = summarise(fakes.failure(fakes.trial(fakes.zero(1))), None, None)
    found = compare_losses([failed, losing(2, 7.0), losing(3, 85.0)])
    assert list(found) == [2]


def test_caveats_of_comparison_are_added_to_the_right_row_and_the_others_stay() -> None:
    before = [losing(1, 7.0), losing(3, 85.0)]
    after = with_loss_caveats(before)
    assert after[0] == before[0]
    assert "do not use this row" in after[1].caveats[-1].text
    assert with_loss_caveats(after) == after


def test_rows_on_the_cpu_that_step_with_another_adam_say_so_and_how_to_compare_with_one() -> None:
    def rows(accelerator: str) -> list[TrialSummary]:
        on = fakes.placement(accelerator=accelerator)
        classes = {"none": "AdamW", "cpu_optimizer": "DeepSpeedCPUAdam"}
        made = (
            fakes.success(fakes.trial(fakes.offload(name), on=on), optimizer_class=used)
            for name, used in classes.items()
        )
        return with_loss_caveats([summarise(record, None, None) for record in made])

    plain, offloaded = rows("cpu")
    (told,) = (each for each in offloaded.caveats if each not in plain.caveats)
    assert told.line == (
        "DeepSpeedCPUAdam steps here, AdamW in ZeRO-3: a difference in speed is partly theirs; "
        "--set optimizer.params.torch_adam=true compares all rows with torch's AdamW"
    )
    assert not told.disqualifying
    assert with_loss_caveats([plain, offloaded]) == [plain, offloaded]
    (flat,) = flat_rows([offloaded])
    assert told.text in [each.text for each in flat_reader.summary(flat_reader.check_rows([flat])[0]).caveats]
    assert not any("steps here" in each.text for row in rows("cuda") for each in row.caveats)


def test_a_loss_of_zero_is_compared_without_dividing_by_it() -> None:
    assert compare_losses([losing(1, 0.0), losing(2, 0.0)]) == {}
    assert list(compare_losses([losing(1, 0.0), losing(2, 1.0)])) == [1]
