"""What was missing, what each change would free, and one proper line for every way a trial can end (A22, A24)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench import record
from ds_bench.advising import remedies
from ds_bench.advising.changes import Change, changes, largest_saving, smallest_fit
from ds_bench.advising.fitting import Setting, Shortage, setting_of, shortage_of
from ds_bench.analysis import summarise
from ds_bench.compare import Comparison, build
from ds_bench.models import ModelFacts, find_preset
from ds_bench.recommend import recommend
from ds_bench.record import TrialRecord
from ds_bench.spec import Strategy

GB = 2**30
BILLION = 2**30
"""Elements, so that bytes per element are GB."""


def compared(*records: TrialRecord, facts: ModelFacts | None = None) -> Comparison:
    return build([summarise(each, facts, None) for each in records])


def failed(strategy: Strategy | None = None, status: str = record.OOM, cards: int = 4, **more: Any) -> TrialRecord:
    trial = fakes.trial(strategy or fakes.zero(2), on=fakes.placement(accelerator="cuda", num_gpus=cards))
    return fakes.failure(trial, status, **more)


def trained(strategy: Strategy, cards: int = 4, **more: Any) -> TrialRecord:
    trial = fakes.trial(strategy, on=fakes.placement(accelerator="cuda", num_gpus=cards))
    return fakes.success(trial, **{"parameter_count": BILLION, **more})


def setting(strategy: Strategy | None = None, **more: Any) -> Setting:
    values: dict[str, Any] = {
        "workload": fakes.workload(),
        "strategy": strategy or fakes.zero(2),
        "data_parallel_size": 4,
        "ranks_per_node": 4,
        "micro_batch_size": 4,
        "parameters": BILLION,
    }
    return Setting(**{**values, **more})


def short(gigabytes: float, phase: str | None = "backward") -> Shortage:
    return Shortage(phase=phase, requested_bytes=int((gigabytes + 0.5) * GB), free_bytes=GB // 2)


def texts(found: list[Change]) -> list[str]:
    return [change.text for change in found]


def frees(found: list[Change], text: str) -> int | None:
    return next(change.frees_bytes for change in found if change.text == text)


def line(*records: TrialRecord) -> str:
    """What is said of the first record's row."""
    comparison = compared(*records)
    return remedies.remedy(comparison.results[0], comparison) or "nothing"


# ------------------------------------------------------------------ shortage


def test_what_was_missing_is_requested_less_free() -> None:
    """3.5 GB asked, 0.4 GB free: 3.1 GB."""
    found = Shortage(phase="step", requested_bytes=int(3.5 * GB), free_bytes=int(0.4 * GB))
    assert found.text == "at least 3.10 GB short"
    assert found.where == "in the optimizer step"


def test_without_the_free_bytes_all_that_was_asked_must_be_freed() -> None:
    found = Shortage(requested_bytes=2 * GB)
    assert found.missing_bytes is None
    assert found.target_bytes == 2 * GB
    assert "free bytes not known" in found.text


def test_enough_free_but_not_in_one_piece_is_fragmentation_and_no_shortage() -> None:
    found = Shortage(requested_bytes=GB, free_bytes=2 * GB)
    assert found.fragmented
    assert smallest_fit(changes(setting(), found), found) is None


def test_nothing_known_is_said_to_be_unknown() -> None:
    assert Shortage().text == "how much was missing is not known"
    assert smallest_fit(changes(setting(), Shortage()), Shortage()) is None


# ------------------------------------------------------------------ what changes free


def test_a_halved_micro_batch_frees_half_the_activations() -> None:
    """8 GB at micro-batch 4: 4 GB at 2, 6 GB at 1."""
    found = changes(setting(activation_bytes=8 * GB), short(1))
    assert frees(found, "micro-batch 2") == 4 * GB
    assert frees(found, "micro-batch 1") == 6 * GB


def test_the_next_stage_frees_what_it_partitions() -> None:
    """2^30 parameters in bf16 on 4 GPUs: stage 3 keeps 0.5 of the 2 GB of parameters, 1.5 GB freed."""
    assert frees(changes(setting(), short(1)), "ZeRO-3") == int(1.5 * GB)


def test_one_gpu_is_offered_no_stage_that_would_partition_with_nobody() -> None:
    """Also with an odd number of parameters, where padding differs between the stages."""
    found = texts(changes(setting(data_parallel_size=1, ranks_per_node=1, parameters=BILLION + 1), short(1)))
    assert not any(text.startswith("ZeRO-") for text in found)
    assert "cpu_optimizer at ZeRO-2" in found


def test_offloading_the_optimizer_frees_its_share_on_the_device() -> None:
    """Optimizer states of 12 GB, a quarter each: 3 GB, and 0.5 GB of gradients that are kept beside them."""
    found = changes(setting(), short(1, "step"))
    assert frees(found, "cpu_optimizer at ZeRO-2") == int(3.5 * GB)


def test_a_stage_that_cannot_offload_is_raised_to_one_that_can() -> None:
    assert "cpu_optimizer at ZeRO-1" in texts(changes(setting(fakes.zero(0)), short(1)))


def test_while_the_model_is_built_only_what_holds_less_of_the_parameters_helps() -> None:
    found = changes(setting(activation_bytes=8 * GB), short(1, "build"))
    assert texts(found) == [
        "ZeRO-3",
        "cpu_full at ZeRO-3",
        "nvme at ZeRO-3 with --nvme-path",
    ]


def test_in_the_optimizer_step_no_freed_activations_are_promised() -> None:
    found = changes(setting(activation_bytes=8 * GB), short(1, "step"))
    assert frees(found, "micro-batch 2") is None
    fit = smallest_fit(found, short(1, "step"))
    assert fit is not None
    assert fit.text == "ZeRO-3"


def test_checkpointing_is_offered_only_where_it_is_off() -> None:
    on = setting(workload=fakes.workload(activation_checkpointing=True))
    assert "--activation-checkpointing" in texts(changes(setting(), short(1)))
    assert "--activation-checkpointing" not in texts(changes(on, short(1)))


def test_checkpointing_by_hand() -> None:
    """gpt2: 12 blocks of width 768 and 50,257 words; 4 × 128 tokens.

    Block inputs 512 · 12 · 768 · 2 B = 9,437,184; one block of 12 GB is 1 GB; logits and loss 3 · 512 · 50,257 · 4 B =
    308,779,008. What is left of 12 GB goes.
    """
    gpt2 = find_preset("gpt2")
    assert gpt2 is not None
    found = changes(setting(facts=gpt2, activation_bytes=12 * GB), short(1))
    assert frees(found, "--activation-checkpointing") == 12 * GB - GB - 9_437_184 - 308_779_008


def test_without_a_ledger_activations_are_at_least_what_the_formula_knows() -> None:
    """Block inputs 9,437,184 and log-probabilities 512 · 50,257 · 4 B = 102,926,336: half of 112,363,520."""
    gpt2 = find_preset("gpt2")
    assert gpt2 is not None
    found = changes(setting(facts=gpt2), short(1))
    assert frees(found, "micro-batch 2") == 56_181_760
    assert found[0].line == "micro-batch 2 (frees ≥ 53.58 MB by formula)"
    assert found[0].may_free(GB)


def test_what_is_not_known_is_said_and_never_predicted_to_fit() -> None:
    found = changes(setting(parameters=None), short(1))
    assert [change.frees_bytes for change in found] == [None] * len(found)
    assert "not known" in found[0].line
    assert smallest_fit(found, short(1)) is None
    assert largest_saving(found) is None


def test_a_host_too_small_for_it_is_not_offered_the_offload() -> None:
    """cpu_full keeps 20 GB on the host: 12 of states, 2 of parameters, 6 of gradients (bf16 and fp32)."""
    small = texts(changes(setting(host_capacity_bytes=19 * GB), short(1)))
    large = texts(changes(setting(host_capacity_bytes=20 * GB), short(1)))
    assert "cpu_full at ZeRO-3" not in small
    assert "nvme at ZeRO-3 with --nvme-path" in small
    assert "cpu_full at ZeRO-3" in large


def test_what_failed_already_is_not_suggested() -> None:
    found = changes(setting(failed=frozenset({(3, "none", "none")})), short(1))
    assert "ZeRO-3" not in texts(found)


def test_what_trained_already_is_said_to_have() -> None:
    run = failed(fakes.zero(2), requested_bytes=2 * GB, free_bytes=GB)
    assert "try ZeRO-3 (frees ≈ 1.50 GB by formula; it trained here)" in line(run, trained(fakes.zero(3)))


def test_a_row_of_other_work_proves_nothing_about_this_one() -> None:
    run = failed(fakes.zero(2))
    other = fakes.trial(fakes.zero(3), on=run.trial.placement, of=fakes.workload(batch_size=1))
    found = setting_of(run, compared(run, fakes.success(other), failed(fakes.zero(1), cards=2)))
    assert found.trained == frozenset()
    assert found.failed == {(2, "none", "none")}


def test_on_the_cpu_accelerator_moving_to_the_host_frees_nothing() -> None:
    found = texts(changes(setting(pool="both"), short(1)))
    assert not any(text.startswith("cpu_") for text in found)
    assert "nvme at ZeRO-3 with --nvme-path" in found


def test_a_full_host_is_helped_by_less_on_it_and_not_by_a_smaller_batch() -> None:
    found = texts(changes(setting(fakes.offload("cpu_full"), pool="host", activation_bytes=8 * GB), short(1)))
    assert found == ["cpu_optimizer at ZeRO-3", "nvme at ZeRO-3 with --nvme-path"]


def test_the_least_intrusive_change_that_frees_enough_is_taken_and_the_largest_batch_of_those() -> None:
    """8 GB of activations: micro-batch 2 frees 4 GB, 1 frees 6; optimizer to the host 3.5 GB."""
    options = changes(setting(activation_bytes=8 * GB), short(3))
    fits = {gb: smallest_fit(options, short(gb)) for gb in (3, 5, 7)}
    assert fits[3] is not None
    assert fits[3].text == "micro-batch 2"
    assert fits[5] is not None
    assert fits[5].text == "micro-batch 1"
    assert fits[7] is None
    most = largest_saving(options)
    assert most is not None
    assert most.text == "micro-batch 1"


settings_drawn = st.builds(
    setting,
    strategy=st.sampled_from([*map(fakes.zero, range(4)), *map(fakes.offload, ("cpu_optimizer", "cpu_full", "nvme"))]),
    data_parallel_size=st.integers(1, 64),
    micro_batch_size=st.integers(1, 64),
    parameters=st.none() | st.integers(1, 10**12),
    pool=st.sampled_from(["device", "host", "both"]),
    activation_bytes=st.none() | st.integers(1, 10**12),
    facts=st.sampled_from([None, find_preset("gpt2")]),
)
shortages = st.builds(
    Shortage,
    phase=st.sampled_from([None, "build", "init", "warmup", "forward", "backward", "step"]),
    requested_bytes=st.none() | st.integers(0, 10**12),
    free_bytes=st.none() | st.integers(0, 10**12),
)


@settings(deadline=None)
@given(settings_drawn, shortages)
def test_every_change_frees_something_or_says_why_not_and_a_fit_frees_enough(where: Setting, what: Shortage) -> None:
    found = changes(where, what)
    assert all(change.frees_bytes is None or change.frees_bytes >= 0 for change in found)
    assert all(change.text and change.basis for change in found)
    assert [change.intrusion for change in found] == sorted(change.intrusion for change in found)
    fit = smallest_fit(found, what)
    if fit is not None:
        assert fit.frees_bytes is not None
        assert what.target_bytes is not None
        assert fit.frees_bytes >= what.target_bytes


@settings(deadline=None)
@given(st.integers(2, 512), st.integers(1, 10**12))
def test_smaller_micro_batches_free_more_and_never_all_of_it(batch: int, size: int) -> None:
    found = changes(setting(micro_batch_size=batch, activation_bytes=size, parameters=None), short(1))
    freed = [change.frees_bytes or 0 for change in found if change.text.startswith("micro-batch")]
    assert freed == sorted(freed)
    assert all(0 <= each < size for each in freed)


# ------------------------------------------------------------------ what the records tell


def test_activations_come_from_another_row_scaled_to_this_batch() -> None:
    """A row at micro-batch 2 saw 3 GB; at 4 it would be 6."""
    other = trained(fakes.zero(3), micro_batch_size=2, ledger={"gpu": {"activations": 3 * GB}})
    run = failed()
    assert setting_of(run, compared(run, other)).activation_bytes == 6 * GB


def test_activations_of_another_sequence_length_or_with_recomputation_do_not_count() -> None:
    run = failed()
    ledger = {"gpu": {"activations": 3 * GB}}
    for change in ({"seq_length": 64}, {"activation_checkpointing": True}, {"precision": "fp16"}):
        trial = fakes.trial(fakes.zero(3), on=run.trial.placement, of=fakes.workload(**change))
        comparison = compared(run, fakes.success(trial, ledger=ledger))
        assert setting_of(run, comparison).activation_bytes is None


def test_the_size_of_the_model_comes_from_another_row_where_no_arithmetic_has_it() -> None:
    run = failed()
    assert setting_of(run, compared(run, trained(fakes.zero(3)))).parameters == BILLION
    assert setting_of(run, compared(run)).parameters is None


def test_the_batch_is_the_one_deepspeed_was_told() -> None:
    run = failed()
    edited = replace(run, trial=replace(run.trial, ds_config={"train_micro_batch_size_per_gpu": 16}))
    assert setting_of(edited, compared(edited)).micro_batch_size == 16


def test_several_nodes_leave_the_ranks_of_one_unknown() -> None:
    run = failed()
    spread = replace(run, trial=replace(run.trial, placement=replace(run.trial.placement, hostfile="hosts")))
    assert setting_of(spread, compared(spread)).ranks_per_node is None


# ------------------------------------------------------------------ a line for every ending


def test_a_device_that_ran_out_is_told_with_phase_shortage_and_two_ways() -> None:
    """3.5 GB asked, 0.4 free, in the step; parameters from the row that trained. ZeRO-3 frees 1.5 GB: too little."""
    said = line(failed(phase="step", requested_bytes=int(3.5 * GB), free_bytes=int(0.4 * GB)), trained(fakes.zero(3)))
    assert said.startswith("ZeRO-2 ran out of device memory in the optimizer step, at least 3.10 GB short: try ")
    assert "cpu_optimizer at ZeRO-2 (frees ≈ 3.50 GB by formula)" in said
    assert "micro-batch 2" in said


def test_activations_that_another_row_counted_are_used() -> None:
    other = trained(fakes.zero(3), ledger={"gpu": {"activations": 8 * GB}})
    said = line(failed(requested_bytes=2 * GB, free_bytes=GB), other)
    assert "try micro-batch 2 (frees ≈ 4.00 GB by another row's ledger)" in said


def test_where_nothing_frees_enough_the_most_is_named() -> None:
    """Everything of ZeRO-2 on 4 GPUs is 5.5 GB: 2 + 0.5 + 3."""
    said = line(failed(requested_bytes=90 * GB, free_bytes=GB), trained(fakes.zero(3)))
    assert (
        "no single change is predicted to be enough, the most is cpu_full at ZeRO-3 (frees ≈ 5.50 GB by formula)"
        in said
    )
    assert "a smaller model" in said


def test_fragmentation_is_answered_by_the_allocator_and_not_by_a_strategy() -> None:
    said = line(failed(requested_bytes=GB, free_bytes=2 * GB))
    assert "expandable_segments:True" in said
    assert "cpu_optimizer" not in said


def test_with_nothing_known_at_all_there_is_still_something_to_try() -> None:
    said = line(failed(phase=None, rank=None, error=None, details=None))
    assert "how much was missing is not known" in said
    assert "micro-batch 2" in said


def test_a_full_host_is_told_what_the_states_take_and_what_there_is() -> None:
    """cpu_full keeps 20 GB of 2^30 parameters on the host: 12 + 2 + 6."""
    run = failed(fakes.offload("cpu_full"), record.OOM_HOST, requested_bytes=GB)
    comparison = replace(compared(run, trained(fakes.zero(3))), host_capacity_bytes=12 * GB)
    said = remedies.remedy(comparison.results[0], comparison) or ""
    assert "ran out of host memory" in said
    assert "its model states take 20.00 GB of it by formula; the host has 12.00 GB" in said
    assert "nvme" in said


def test_a_limit_of_the_users_own_is_named() -> None:
    run = failed(fakes.offload("cpu_full"), record.OOM_HOST)
    limited = replace(run.trial, placement=replace(run.trial.placement, cpu_memory_limit_bytes=3 * GB))
    assert "--cpu-memory-limit allows each rank 3.00 GB" in line(replace(run, trial=limited))


def test_a_full_disk_is_told_how_much_the_swap_files_take() -> None:
    said = line(failed(fakes.offload("nvme"), record.OOM_DISK), trained(fakes.zero(3)))
    assert "filled the disk (its swap files take " in said
    assert "GB by formula" in said
    assert "--nvme-path" in said


def test_a_timeout_in_training_is_helped_by_fewer_steps() -> None:
    said = line(failed(status=record.TIMEOUT, phase="forward", error="still running after 1 h 0 min (--timeout)"))
    assert "timed out after 3.0 s in phase forward" in said
    assert "fewer than its 12 steps" in said


def test_a_timeout_before_training_is_not_helped_by_fewer_steps() -> None:
    said = line(failed(status=record.TIMEOUT, phase="init"))
    assert "--timeout" in said
    assert "--num-steps" not in said


@pytest.mark.parametrize(
    ("status", "needed"),
    [
        (record.KILLED, "--retry Killed"),
        (record.CRASHED, "python -m ds_bench ops"),
        (record.UNSUPPORTED, "use --stage 3"),
        (record.SKIPPED, "was skipped"),
        (record.INTERRUPTED, "--resume"),
        ("RuntimeError", "failed with RuntimeError in phase backward"),
        ("ValueError", "read the traceback"),
    ],
)
def test_every_other_ending_has_a_next_step_and_its_cause(status: str, needed: str) -> None:
    said = line(failed(status=status, error="cause of it; use --stage 3"))
    assert needed in said
    assert said.startswith("ZeRO-2 ")
    assert status == record.INTERRUPTED or "cause of it" in said


@pytest.mark.parametrize("status", [status for status in record.STATUSES if status != record.SUCCESS])
def test_no_ending_is_left_without_a_line_even_where_its_record_is_bare(status: str) -> None:
    said = line(failed(status=status, error=None, phase=None, rank=None, details=None))
    assert said.startswith("ZeRO-2 ")
    assert "None" not in said


def test_an_exception_with_nvme_points_at_the_disk_and_what_it_must_hold() -> None:
    said = line(failed(fakes.offload("nvme"), "RuntimeError"), trained(fakes.zero(3)))
    assert "check that --nvme-path is a writable folder" in said
    assert "GB free" in said


def test_a_long_cause_is_cut() -> None:
    assert len(line(failed(status="ValueError", error="x" * 5000))) < 400


def test_a_row_that_trained_needs_no_remedy() -> None:
    comparison = compared(trained(fakes.zero(3)))
    assert remedies.remedy(comparison.results[0], comparison) is None


def test_memory_is_the_cause_that_counts_where_runs_ended_differently() -> None:
    killed = failed(status=record.KILLED)
    short_of_memory = failed(requested_bytes=2 * GB, free_bytes=GB)
    later = replace(short_of_memory, trial=replace(killed.trial, repeat=1))
    assert "ran out of device memory" in line(killed, later)


# ------------------------------------------------------------------ nothing trained


def test_with_nothing_successful_the_smallest_change_of_all_rows_is_named_first() -> None:
    """gpt2-xl, 1,557,611,200 parameters on 4 GPUs: both rows lack 1 GB; ZeRO-3 is less than offloading."""
    facts = find_preset("gpt2-xl")
    assert facts is not None
    rows = [failed(fakes.zero(stage), requested_bytes=2 * GB, free_bytes=GB) for stage in (1, 2)]
    found = recommend(compared(*rows), "balanced", facts)
    assert found.choice is None
    assert found.next_steps[0].startswith("smallest change predicted to fit: ")
    assert "ZeRO-3 (frees ≈ 2." in found.next_steps[0]
    assert len(found.next_steps) >= 3


def test_with_nothing_successful_and_nothing_enough_the_largest_saving_is_named() -> None:
    facts = find_preset("gpt2")
    found = recommend(compared(failed(requested_bytes=500 * GB, free_bytes=0)), "balanced", facts)
    assert found.next_steps[0].startswith("no single change is predicted to be enough: the largest saving is cpu_full")
    assert "at least 500 GB short" in found.next_steps[0]


def test_with_nothing_successful_and_nothing_known_no_number_is_made_up() -> None:
    found = recommend(compared(failed()), "balanced", None)
    assert found.next_steps[0].startswith("no change can be predicted to fit from these records")


def test_failures_that_are_not_of_memory_get_no_prediction() -> None:
    found = recommend(compared(failed(status=record.CRASHED)), "balanced", find_preset("gpt2"))
    assert not any("predicted" in step for step in found.next_steps)
    assert shortage_of(failed(status=record.CRASHED)).target_bytes is None
