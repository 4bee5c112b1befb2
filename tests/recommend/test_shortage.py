"""What was missing, what each change would free, and one proper line for every way a trial can end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_bench.analysis.comparison import Comparison, compare
from ds_bench.analysis.row import make_run
from ds_bench.config import deepspeed_config
from ds_bench.config.spec import Configuration, Trial
from ds_bench.prediction import trial_predictions
from ds_bench.prediction.trial_predictions import MemoryCapacity
from ds_bench.recommend import remedies, short_answer
from ds_bench.recommend.recommendation import recommend
from ds_bench.recommend.shortage import Shortage, failed_setup, measured_activations, shortage_of, smallest_fit
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from ds_bench.report.table_columns import failure_text
from ds_bench.system.environment import Environment
from tests.support import fakes

GB = 2**30
BILLION = 2**30
"""Elements, so that bytes per element are GB."""


def compared(*records: TrialRecord) -> Comparison:
    return compare([make_run(each) for each in records])


def failed(strategy: Configuration | None = None, status: str = schema.OOM, cards: int = 4, **more: Any) -> TrialRecord:
    trial = fakes.trial(strategy or fakes.zero(2), on=fakes.placement(accelerator="cuda", num_gpus=cards))
    return fakes.failure(trial, status, **more)


def trained(strategy: Configuration, cards: int = 4, **more: Any) -> TrialRecord:
    trial = fakes.trial(strategy, on=fakes.placement(accelerator="cuda", num_gpus=cards))
    return fakes.success(trial, **{"parameter_count": BILLION, **more})


def line(*records: TrialRecord) -> str:
    """What is said of the first record's row."""
    comparison = compared(*records)
    return remedies.remedy(comparison.rows[0], comparison) or "nothing"


# ------------------------------------------------------------------ shortage


def test_what_was_missing_is_requested_less_free() -> None:
    """3.5 GB asked, 0.4 GB free: 3.1 GB."""
    found = Shortage(requested_bytes=int(3.5 * GB), free_bytes=int(0.4 * GB))
    assert found.text == "at least 3.10 GB short"


def test_without_the_free_bytes_all_that_was_asked_must_be_freed() -> None:
    found = Shortage(requested_bytes=2 * GB)
    assert found.missing_bytes is None
    assert found.target_bytes == 2 * GB
    assert "free bytes not known" in found.text


def test_enough_free_but_not_in_one_piece_is_fragmentation_and_no_shortage() -> None:
    assert Shortage(requested_bytes=GB, free_bytes=2 * GB).fragmented


def test_nothing_known_is_said_to_be_unknown() -> None:
    assert Shortage().text == "how much was missing is not known"


# ------------------------------------------------------------------ what the record's own prediction says

LLAMA = "meta-llama/Llama-2-7b-hf"
PROFILE = trial_predictions.profile_model(fakes.resolved_model(LLAMA), 2048, "cuda")
HOST = fakes.environment(host_memory_bytes=256 * GB)


def planned(strategy: Configuration, cards: int = 1, **work: Any) -> Trial:
    """Llama-2-7B at batch 4 × 2048 on cards of 80 GB, with what was predicted when it was planned."""
    asked = fakes.workload(**{"model": LLAMA, "batch_size": 4, "seq_length": 2048, **work})
    trial = fakes.trial(strategy, on=fakes.placement(accelerator="cuda", num_gpus=cards), of=asked)
    (found,) = trial_predictions.attach_predictions(
        [trial], PROFILE, MemoryCapacity(gpu_bytes=None, host_bytes=None), skip=False
    )
    return trial_predictions.ChangePredictor().complete(found, PROFILE)


def ended(trial: Trial, gigabytes: float | None = None) -> TrialRecord:
    """Out of memory by 1.5 GB, or trained with that peak."""
    if gigabytes is None:
        return fakes.failure(trial, schema.OOM, requested_bytes=2 * GB, free_bytes=GB // 2)
    peak = int(gigabytes * GB)
    return fakes.success(trial, gpu_peak_bytes=peak, gpu_peak_reserved_bytes=peak, gpu_total_bytes=80 * GB)


def advised(*records: TrialRecord, host: Environment = HOST) -> tuple[str, ...]:
    summaries = [make_run(each) for each in records]
    return recommend(compare(summaries, environments=(host,))).next_steps


def test_where_every_row_ran_out_the_remedy_is_what_plan_says() -> None:
    """The figures of ``plan --model meta-llama/Llama-2-7b-hf --num-gpus 1 --batch-size 4 --seq-length 2048``."""
    steps = advised(*(ended(planned(fakes.zero(stage))) for stage in (0, 1, 2, 3)))
    assert steps[0].startswith(
        "smallest change predicted to fit: ZeRO-3 + CPU optimizer (predicted 62.96 GB per GPU instead of"
    )
    assert "121 GB of host memory per node" in steps[0]
    assert "its activations are 46.76 GB, 23.38 GB with batch size 2 and 3.23 GB with activation checkp" in steps[1]
    assert not any("not known" in step or "ZeRO-1 (" in step for step in steps)


def test_a_host_without_room_is_not_offered_the_offload() -> None:
    """121 GB are needed on the host for the optimizer: with 64 GB only the disk is left, and that takes 36."""
    steps = advised(ended(planned(fakes.zero(0))), host=fakes.environment(host_memory_bytes=64 * GB))
    assert steps[0].startswith("smallest change predicted to fit: ZeRO-3 + NVMe optimizer and parameters")


def test_a_stage_that_is_itself_left_out_or_failed_is_never_the_remedy() -> None:
    """Four cards: of ZeRO-1 it is known that it trains, with room, only just, or not at all."""

    def said(peak: float | None) -> str:
        rows = ended(planned(fakes.zero(0), 4, batch_size=2)), ended(planned(fakes.zero(1), 4, batch_size=2), peak)
        (found,) = [step for step in advised(*rows) if step.startswith("ZeRO-0 ran out")]
        return found

    assert "try ZeRO-1 (" in said(60)
    assert "it trained here" in said(60)
    assert "try ZeRO-2 (" in said(78)
    assert "try ZeRO-2 (" in said(None)


def test_a_run_that_fell_short_although_it_was_predicted_to_fit_needs_a_change_that_frees_what_was_missing() -> None:
    """78.1 GB are predicted at ZeRO-3 on four cards and 20 GB were missing: a change must come under 58.1 GB."""
    trial = planned(fakes.zero(3), 4)
    run = fakes.failure(trial, schema.OOM, requested_bytes=21 * GB, free_bytes=GB)
    case = failed_setup(run, compared(run), shortage_of(run))
    assert case is not None
    assert case.gpu_limit_bytes == sum((trial.prediction or {})["gpu"].values()) - 20 * GB
    found = smallest_fit(case)
    assert found is not None
    assert found.gpu_bytes <= case.gpu_limit_bytes


def test_where_no_change_is_enough_the_most_is_named() -> None:
    trial = planned(fakes.zero(3), 1)
    run = fakes.failure(trial, schema.OOM, requested_bytes=5000 * GB, free_bytes=0)
    (first, *_) = advised(run)
    assert "no change is predicted to be enough, the most is " in first
    assert "a smaller model" in first


def test_rows_that_were_skipped_by_prediction_are_told_how_to_try_them_and_what_is_predicted_to_fit() -> None:
    reason = "predicted to need much; leave out --skip-predicted-oom to try it"
    trial = replace(planned(fakes.zero(0)), skipped=reason)
    first, second, *_ = advised(fakes.failure(trial, schema.SKIPPED, error=reason, details=reason, phase=None))
    assert first.startswith("smallest change predicted to fit: ZeRO-3 + CPU optimizer (predicted 62.96 GB per GPU")
    assert second.count("--skip-predicted-oom") == 1
    assert "; or try ZeRO-3 + CPU optimizer (predicted 62.96 GB per GPU" in second


def test_changes_of_the_users_own_are_kept_in_what_is_predicted_of_other_strategies() -> None:
    """A bucket of 1e9 elements takes 2 GB wherever it is kept."""
    plain = fakes.trial(fakes.zero(2), on=fakes.placement(accelerator="cuda", num_gpus=4))
    zero = {**plain.ds_config["zero_optimization"], "reduce_bucket_size": 10**9}
    edited = replace(plain, ds_config={**plain.ds_config, "zero_optimization": zero})
    changes = deepspeed_config.changes_of(edited.ds_config, edited.configuration, edited.workload, edited.placement)
    assert changes == {"zero_optimization": {"reduce_bucket_size": 10**9}}
    assert deepspeed_config.changes_of(plain.ds_config, plain.configuration, plain.workload, plain.placement) == {}


def test_a_record_without_a_prediction_is_told_what_to_try_without_numbers() -> None:
    whole = dict(planned(fakes.zero(0)).prediction or {})
    odd = {**whole, "alternatives": [{**whole["alternatives"][0], "gpu_bytes": "much"}]}
    for prediction in (
        None,
        {"gpu": {"all": 3}},
        {"gpu": None, "alternatives": 7},
        odd,
        {**whole, "activation_bytes": "x"},
    ):
        run = failed()
        said = line(replace(run, trial=replace(run.trial, prediction=prediction)))
        assert "--activation-checkpointing" in said
        assert "the record carries no prediction" in said


# ------------------------------------------------------------------ what the records tell


def test_activations_come_from_another_row_scaled_to_this_batch() -> None:
    """A row at micro-batch 2 saw 3 GB; at 4 it would be 6."""
    other = trained(fakes.zero(3), micro_batch_size=2, ledger={"gpu": {"activations": 3 * GB}})
    run = failed()
    assert measured_activations(compared(run, other), run, 4) == 6 * GB


def test_activations_of_another_sequence_length_or_with_recomputation_do_not_count() -> None:
    run = failed()
    ledger = {"gpu": {"activations": 3 * GB}}
    for change in ({"seq_length": 64}, {"activation_checkpointing": True}, {"precision": "fp16"}):
        trial = fakes.trial(fakes.zero(3), on=run.trial.placement, of=fakes.workload(**change))
        assert measured_activations(compared(run, fakes.success(trial, ledger=ledger)), run, 4) is None


# ------------------------------------------------------------------ a line for every ending


def test_fragmentation_is_answered_by_the_allocator_and_not_by_a_strategy() -> None:
    said = line(failed(requested_bytes=GB, free_bytes=2 * GB))
    assert "expandable_segments:True" in said
    assert "cpu_optimizer" not in said


def test_with_nothing_known_at_all_there_is_still_something_to_try() -> None:
    said = line(failed(phase=None, rank=None, error=None, details=None))
    assert "how much was missing is not known" in said
    assert "a smaller micro-batch" in said


def test_a_full_host_is_told_what_it_was_predicted_to_take_and_what_there_is() -> None:
    run = fakes.failure(planned(fakes.offload("cpu_full")), schema.OOM_HOST, requested_bytes=GB)
    comparison = replace(compared(run), host_capacity_bytes=100 * GB)
    said = remedies.remedy(comparison.rows[0], comparison) or ""
    assert "ran out of host memory" in said
    assert "it is predicted to take 137 GB of it; the host has 100 GB" in said
    assert "try ZeRO-3 + NVMe optimizer and parameters" in said


def test_a_limit_of_the_users_own_is_named() -> None:
    run = failed(fakes.offload("cpu_full"), schema.OOM_HOST)
    limited = replace(run.trial, placement=replace(run.trial.placement, cpu_memory_limit_bytes=3 * GB))
    assert "--cpu-memory-limit allows 4 ranks 12.00 GB" in line(replace(run, trial=limited))


def planned_on_cpu(strategy: Configuration, limit_gb: float, ranks: int = 2) -> Trial:
    """GPT-2 at micro-batch 4 × 256 on CPU ranks with a memory limit, and what was predicted when it was planned."""
    on = replace(fakes.placement(num_gpus=ranks), cpu_memory_limit_bytes=int(limit_gb * GB))
    trial = fakes.trial(strategy, on=on, of=fakes.workload(model="gpt2", batch_size=4, seq_length=256))
    profile = trial_predictions.profile_model(fakes.resolved_model("gpt2"), 256, "cpu")
    capacity = MemoryCapacity(gpu_bytes=None, host_bytes=None)
    (found,) = trial_predictions.attach_predictions([trial], profile, capacity, skip=False)
    return trial_predictions.ChangePredictor().complete(found, profile)


def test_every_remedy_under_a_cpu_memory_limit_fits_that_limit(subtests: pytest.Subtests) -> None:
    """Not the 256 GB of the host: two ranks of 3 GB each have 6 GB."""
    for limit_gb, fitting in ((4.0, True), (3.0, True), (1.0, False)):
        with subtests.test(limit_gb=limit_gb):
            trial = planned_on_cpu(fakes.zero(2), limit_gb)
            run = fakes.failure(trial, schema.OOM_HOST, requested_bytes=2**20)
            comparison = compare([make_run(run)], environments=(HOST,))
            setup = failed_setup(run, comparison, shortage_of(run))
            assert setup is not None
            change = smallest_fit(setup)
            assert (change is not None) == fitting
            assert change is None or change.host_bytes <= 2 * limit_gb * GB
            advice = recommend(comparison)
            assert fitting or "no other change is predicted to fit" in (advice.try_next or "")
            assert fitting or "a larger --cpu-memory-limit" in (advice.try_next or "")
            assert not any("the host has" in step for step in advice.next_steps)


LESS_WORK = ("--batch-size", "--activation-checkpointing", "--seq-length", "batch size", "micro-batch")


def test_remedy_acts_in_the_phase_that_ran_out(subtests: pytest.Subtests) -> None:
    for phase, stage in (("import", 2), ("build", 0), ("build", 3), ("init", 0), ("init", 3), ("step", 2)):
        for cards in (1, 4):
            with subtests.test(phase=phase, stage=stage, cards=cards):
                run = ended(planned(fakes.zero(stage), cards))
                run = replace(run, outcome=replace(run.outcome, phase=phase))
                advice = recommend(compare([make_run(run)], environments=(HOST,)))
                said = " ".join([advice.try_next or "nothing", *advice.next_steps])
                assert not [words for words in LESS_WORK if words in said]


def test_only_stage_3_is_a_remedy_for_a_model_that_does_not_fit_while_it_is_built() -> None:
    trial = planned(fakes.zero(0), 4)
    run = fakes.failure(trial, schema.OOM, requested_bytes=2 * GB, free_bytes=GB // 2, phase="build")
    setup = failed_setup(run, compared(run), shortage_of(run))
    assert setup is not None
    assert {change.stage for change in setup.alternatives} == {3}


def test_request_of_a_whole_bucket_is_answered_by_a_smaller_bucket(subtests: pytest.Subtests) -> None:
    """A bucket of 5e8 elements takes 0.93 GB in bf16, whatever the micro-batch."""
    trial = planned(fakes.zero(2), 4, batch_size=2)
    for prediction in (trial.prediction, None):
        with subtests.test(predicted=prediction is not None):
            run = fakes.failure(
                replace(trial, prediction=prediction),
                schema.OOM,
                requested_bytes=int(953.67 * 2**20),
                free_bytes=GB // 2,
                phase="backward",
            )
            other = ended(planned(fakes.zero(3), 4, batch_size=2), 40.0)
            advice = recommend(compare([make_run(each) for each in (run, other)], environments=(HOST,)))
            flag = "--set zero_optimization.reduce_bucket_size=50000000 --stages 2"
            assert advice.try_next == flag


def test_assumed_overhead_gives_way_to_what_rows_that_trained_have_outside_the_allocator() -> None:
    """The prediction assumes 2 GB of CUDA and NCCL; a card of 32 GB on which they take 0.5 GB has 1.5 GB more."""
    failing, trial = ended(planned(fakes.zero(1), 2)), planned(fakes.zero(3), 2)
    used = {"gpu_device_used_bytes": 3 * GB, "gpu_reserved_bytes": int(2.5 * GB), "gpu_total_bytes": 32 * GB}
    setup = failed_setup(failing, compared(failing, fakes.success(trial, **used)), Shortage())
    assert setup is not None
    assert setup.gpu_limit_bytes == 32 * GB + (trial.prediction or {})["gpu"]["overhead"] - GB // 2


def test_free_bytes_of_the_gpu_say_nothing_about_host_memory() -> None:
    run = failed(fakes.offload("cpu_full"), schema.OOM_HOST, requested_bytes=GB, free_bytes=40 * GB)
    assert shortage_of(run).text == "1.00 GB asked, free bytes not known"


def test_a_full_disk_is_told_how_much_the_swap_files_take() -> None:
    said = line(fakes.failure(planned(fakes.offload("nvme")), schema.OOM_DISK))
    assert "filled the disk (its swap files are predicted to take 113 GB)" in said
    assert "--nvme-path" in said


def test_a_disk_without_swap_files_is_not_helped_by_another_nvme_path() -> None:
    said = line(failed(fakes.zero(2), schema.OOM_DISK, kind="disk_full", error="writing /ckpt/model.pt failed"))
    assert "writing /ckpt/model.pt failed" in said
    assert "--nvme-path" not in said


def test_causes_that_no_smaller_workload_helps_have_remedies_of_their_own(subtests: pytest.Subtests) -> None:
    for kind, status, remedy in (
        ("shared_memory", "RuntimeError", "--shm-size=8g or --ipc=host"),
        ("bus_error", schema.CRASHED, "--shm-size=8g or --ipc=host"),
        ("pinned_memory", schema.OOM_HOST, "--axis pin_memory=false"),
        ("memlock", "DistBackendError", "ulimit -l unlimited"),
        ("peer_access", "DistBackendError", "NCCL_P2P_DISABLE=1"),
        ("fabric_manager", "AcceleratorError", "nvidia-fabricmanager"),
        ("collective_timeout", schema.TIMEOUT, "zero_optimization.leaf_module.classes"),
    ):
        with subtests.test(kind):
            run = failed(fakes.offload("cpu_optimizer", 2), status, kind=kind, error="its cause")
            comparison = compared(run)
            said = remedies.remedy(comparison.rows[0], comparison) or ""
            assert "(its cause)" in said
            assert remedy in said
            assert remedy in (short_answer.try_without_choice(comparison) or "")
            for wrong in ("--batch-size", "--nvme-path", "--num-steps"):
                assert wrong not in said


def test_a_timeout_in_training_is_helped_by_fewer_steps() -> None:
    said = line(failed(status=schema.TIMEOUT, phase="forward", error="still running after 1 h 0 min (--timeout)"))
    assert "timed out after 3.0 s in forward" in said
    assert "fewer than its 12 steps" in said


def test_a_phase_before_the_first_is_told_in_words() -> None:
    run = failed(status=schema.TIMEOUT, phase="hello", error="still running after 1 h 0 min (--timeout)")
    assert "timed out after 3.0 s while its ranks started (" in line(run)
    assert failure_text(run.outcome).startswith("Timeout while its ranks started: ")


def test_a_timeout_before_training_is_not_helped_by_fewer_steps() -> None:
    said = line(failed(status=schema.TIMEOUT, phase="init"))
    assert "--timeout" in said
    assert "--num-steps" not in said
    assert "NCCL_SOCKET_IFNAME" not in said


def test_a_timeout_on_several_hosts_before_training_names_the_interface_that_nccl_takes() -> None:
    run = failed(status=schema.TIMEOUT, phase="init")
    several = replace(run.trial, placement=replace(run.trial.placement, num_gpus=2, hosts=(("a", 1), ("b", 1))))
    assert "export NCCL_SOCKET_IFNAME" in line(replace(run, trial=several))


def test_every_other_ending_has_a_next_step_and_its_cause(subtests: pytest.Subtests) -> None:
    for status, needed in (
        (schema.KILLED, "--retry Killed"),
        (schema.CRASHED, "python -m ds_bench ops"),
        (schema.UNSUPPORTED, "use --stage 3"),
        (schema.SKIPPED, "was skipped"),
        (schema.INTERRUPTED, "--resume"),
        ("RuntimeError", "failed with RuntimeError in backward"),
        ("ValueError", "read the traceback"),
    ):
        with subtests.test(status):
            said = line(failed(status=status, error="cause of it; use --stage 3"))
            assert needed in said
            assert said.startswith("ZeRO-2 ")
            assert status == schema.INTERRUPTED or "cause of it" in said


def test_no_ending_is_left_without_a_line_even_where_its_record_is_bare(subtests: pytest.Subtests) -> None:
    for status in [status for status in schema.STATUSES if status != schema.SUCCESS]:
        with subtests.test(status):
            said = line(failed(status=status, error=None, phase=None, rank=None, details=None))
            assert said.startswith("ZeRO-2 ")
            assert "None" not in said


def test_an_exception_with_nvme_points_at_the_disk_and_what_it_must_hold() -> None:
    said = line(fakes.failure(planned(fakes.offload("nvme")), "RuntimeError"))
    assert "check that --nvme-path is a writable folder" in said
    assert "113 GB free" in said


def test_a_long_cause_is_cut() -> None:
    assert len(line(failed(status="ValueError", error="x" * 5000))) < 400


def test_a_row_that_trained_needs_no_remedy() -> None:
    comparison = compared(trained(fakes.zero(3)))
    assert remedies.remedy(comparison.rows[0], comparison) is None


def test_memory_is_the_cause_that_counts_where_runs_ended_differently() -> None:
    killed = failed(status=schema.KILLED)
    short_of_memory = failed(requested_bytes=2 * GB, free_bytes=GB)
    later = replace(short_of_memory, trial=replace(killed.trial, repeat=1))
    assert "ran out of device memory" in line(killed, later)


# ------------------------------------------------------------------ nothing trained


def test_with_nothing_successful_and_nothing_known_no_number_is_made_up() -> None:
    found = recommend(compared(failed()))
    assert found.next_steps[0].startswith("no change can be predicted to fit from these records")


def test_failures_that_are_not_of_memory_get_no_prediction() -> None:
    found = recommend(compared(failed(status=schema.CRASHED)))
    assert not any("predicted" in step for step in found.next_steps)
    assert shortage_of(failed(status=schema.CRASHED)).target_bytes is None
