"""Every number by hand once, and its laws by search."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.analysis.summary import TrialSummary, summarise
from ds_bench.config.caveats import note
from ds_bench.models.presets import find_preset
from tests.support import fakes
from tests.support.fakes import preset
from tests.support.summaries import CUDA, record_of, seen, summary, texts

PAIR = fakes.placement(accelerator="cuda", num_gpus=2)
GB = 2**30

seconds = st.lists(st.floats(1e-4, 100), min_size=1, max_size=30)
quick = settings(deadline=None)


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


def test_the_slowest_rank_decides_wherever_it_sits(subtests: pytest.Subtests) -> None:
    for slow in (0, 1, 2):
        with subtests.test(slow=slow):
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
    facts = preset("gpt2")
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
    assert any("accounting" in each for each in texts(summarise(fakes.success(), facts, 1e9)))
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


def test_the_share_of_the_card_is_of_reserved_memory_and_of_what_is_outside_the_allocator() -> None:
    """Of 80 GB 20 were reserved at the peak; context and NCCL have 2 more. Only both together can run out."""
    used = {"gpu_reserved_bytes": 9 * GB, "gpu_device_used_bytes": 11 * GB}
    found = summary(seen(gpu_peak_bytes=8 * GB, gpu_peak_reserved_bytes=20 * GB, gpu_total_bytes=80 * GB, **used))
    assert found.gpu_fraction == 22 / 80


def test_the_share_of_the_card_is_the_fullest_cards_and_not_of_the_largest_one() -> None:
    small = seen(gpu_peak_reserved_bytes=36 * GB, gpu_total_bytes=40 * GB)
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
