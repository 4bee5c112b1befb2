"""What was missing, which change would free it, and what to do about every way a trial can end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_bench.analysis.comparison import Comparison, compare
from ds_bench.analysis.row import make_run
from ds_bench.cli.arguments import parse
from ds_bench.config.spec import Configuration, Trial
from ds_bench.prediction import trial_predictions
from ds_bench.prediction.trial_predictions import MemoryCapacity
from ds_bench.recommend.recommendation import Recommendation, recommend
from ds_bench.recommend.remedies import (
    FailedSetup,
    Shortage,
    action_of,
    failed_run,
    failed_setup,
    find_smallest_change,
    remedies_of,
    shortage_of,
    smallest_fit,
)  # fmt: skip
from ds_bench.recommend.words import Fact, flags
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from ds_bench.system.environment import Environment
from tests.support import fakes
from tests.support.recommendations import out_of_memory

GB = 2**30
LLAMA = "meta-llama/Llama-2-7b-hf"
PROFILE = trial_predictions.profile_model(fakes.resolved_model(LLAMA), 2048, "cuda")
HOST = fakes.environment(host_memory_bytes=256 * GB)


def compared(*records: TrialRecord, host: Environment = HOST) -> Comparison:
    return compare([make_run(each) for each in records], environments=(host,))


def predicted(trial: Trial, profile: Any) -> Trial:
    capacity = MemoryCapacity(gpu_bytes=None, host_bytes=None)
    (found,) = trial_predictions.attach_predictions([trial], profile, capacity, skip=False)
    return trial_predictions.ChangePredictor().complete(found, profile)


def planned(strategy: Configuration, cards: int = 1, **work: Any) -> Trial:
    """Llama-2-7B at batch 4 × 2048 on cards of 80 GB, with what was predicted when it was planned."""
    asked = fakes.workload(**{"model": LLAMA, "batch_size": 4, "seq_length": 2048, **work})
    return predicted(fakes.trial(strategy, on=fakes.placement(accelerator="cuda", num_gpus=cards), of=asked), PROFILE)


def ended(trial: Trial, gigabytes: float | None = None) -> TrialRecord:
    """Out of memory by 1.5 GB, or trained with that peak."""
    if gigabytes is None:
        return fakes.failure(trial, schema.OOM, requested_bytes=2 * GB, free_bytes=GB // 2)
    peak = int(gigabytes * GB)
    return fakes.success(trial, gpu_peak_bytes=peak, gpu_peak_reserved_bytes=peak, gpu_total_bytes=80 * GB)


def failed(status: str, strategy: Configuration | None = None, **more: Any) -> TrialRecord:
    return fakes.failure(out_of_memory(strategy or fakes.zero(2), 4).trial, status, **more)


def advice(*records: TrialRecord, host: Environment = HOST) -> Recommendation:
    return recommend(compared(*records, host=host))


def setup(run: TrialRecord, *others: TrialRecord) -> FailedSetup:
    found = failed_setup(run, compare([make_run(each) for each in (run, *others)]), shortage_of(run))
    assert found is not None
    return found


def smallest(*records: TrialRecord, host: Environment = HOST) -> dict[str, Any]:
    found = find_smallest_change(compared(*records, host=host))
    assert found is not None
    return dict(found[0].settings)


# ------------------------------------------------------------------ how much was missing


def test_what_was_missing_is_requested_less_free(subtests: pytest.Subtests) -> None:
    for requested, free, missing, target, kind in (
        (35 * GB, 4 * GB, 31 * GB, 31 * GB, "short"),
        (2 * GB, None, None, 2 * GB, "short_of_unknown"),
        (GB, 2 * GB, 0, 0, "short_in_pieces"),
        (None, None, None, None, "short_unknown"),
    ):
        with subtests.test(kind):
            found = Shortage(requested_bytes=requested, free_bytes=free)
            assert (found.missing_bytes, found.target_bytes, found.fact.kind) == (missing, target, kind)


def test_free_bytes_of_the_gpu_say_nothing_about_host_memory() -> None:
    run = failed(schema.OOM_HOST, fakes.offload("cpu_full"), requested_bytes=GB, free_bytes=40 * GB)
    assert shortage_of(run) == Shortage(requested_bytes=GB)


# ------------------------------------------------------------------ changes that are predicted to fit


def test_where_every_row_ran_out_the_remedy_is_what_plan_says() -> None:
    """The figures of ``plan --model meta-llama/Llama-2-7b-hf --num-gpus 1 --batch-size 4 --seq-length 2048``."""
    found = advice(*(ended(planned(fakes.zero(stage))) for stage in (0, 1, 2, 3)))
    assert found.next_steps[0].startswith(
        "smallest change predicted to fit: ZeRO-3 + CPU optimizer (predicted 62.96 GB per GPU instead of"
    )
    assert "121 GB of host memory per node" in found.next_steps[0]
    assert found.try_next == "--strategies cpu_optimizer"


def test_a_host_without_room_is_not_offered_the_offload() -> None:
    """121 GB are needed on the host for the optimizer: with 64 GB only the disk is left, and that takes 36."""
    small = fakes.environment(host_memory_bytes=64 * GB)
    assert smallest(ended(planned(fakes.zero(0))), host=small) == {"strategy": "nvme"}
    assert advice(ended(planned(fakes.zero(0))), host=small).try_next == "--strategies nvme --nvme-path DIR"


def test_of_several_rows_the_fewest_settings_are_changed() -> None:
    rows = [ended(planned(fakes.zero(stage), 4)) for stage in (0, 3)]
    assert smallest(*rows) == {"activation_checkpointing": True}


@pytest.mark.parametrize(("peak", "remedy"), [(60, "zero1"), (78, "zero2"), (None, "zero2")])
def test_a_stage_that_is_itself_left_out_or_failed_is_never_the_remedy(peak: float | None, remedy: str) -> None:
    """Four cards: of ZeRO-1 it is known that it trains, with room, only just, or not at all."""
    rows = ended(planned(fakes.zero(0), 4, batch_size=2)), ended(planned(fakes.zero(1), 4, batch_size=2), peak)
    (change,) = (fact.values["action"] for labels, fact in advice(*rows).steps if labels[:1] == ("ZeRO-0",))
    assert f"try ZeRO-{remedy[-1]} (" in str(change)
    assert ("it trained here" in str(change)) == (peak == 60)


def test_a_run_that_fell_short_although_it_was_predicted_to_fit_needs_a_change_that_frees_what_was_missing() -> None:
    """78.1 GB are predicted at ZeRO-3 on four cards and 20 GB were missing: a change must come under 58.1 GB."""
    trial = planned(fakes.zero(3), 4)
    case = setup(fakes.failure(trial, schema.OOM, requested_bytes=21 * GB, free_bytes=GB))
    assert case.gpu_limit_bytes == sum((trial.prediction or {})["gpu"].values()) - 20 * GB
    found = smallest_fit(case)
    assert found is not None
    assert found.gpu_bytes <= case.gpu_limit_bytes


def test_assumed_overhead_gives_way_to_what_rows_that_trained_have_outside_the_allocator() -> None:
    """The prediction assumes 2 GB of CUDA and NCCL; a card of 32 GB on which they take 0.5 GB has 1.5 GB more."""
    failing, trial = ended(planned(fakes.zero(1), 2)), planned(fakes.zero(3), 2)
    used = {"gpu_device_used_bytes": 3 * GB, "gpu_reserved_bytes": int(2.5 * GB), "gpu_total_bytes": 32 * GB}
    comparison = compare([make_run(each) for each in (failing, fakes.success(trial, **used))])
    found = failed_setup(failing, comparison, Shortage())
    assert found is not None
    assert found.gpu_limit_bytes == 32 * GB + (trial.prediction or {})["gpu"]["overhead"] - GB // 2


def test_where_no_change_is_enough_the_most_is_named() -> None:
    run = fakes.failure(planned(fakes.zero(3)), schema.OOM, requested_bytes=5000 * GB, free_bytes=0)
    assert advice(run).steps[0][1].kind == "not_enough"
    assert advice(run).try_next == (
        "more GPUs, a shorter --seq-length or a smaller model: no other change is predicted to fit"
    )


def test_a_skipped_row_is_told_its_reason_once_and_what_is_predicted_to_fit() -> None:
    reason = "predicted to need much; leave out --skip-predicted-oom to try it"
    trial = replace(planned(fakes.zero(0)), skipped=reason)
    found = advice(fakes.failure(trial, schema.SKIPPED, error=reason, details=reason, phase=None))
    assert [fact.kind for _, fact in found.steps[:2]] == ["smallest_change", "failed"]
    assert found.next_steps[1].startswith(f"ZeRO-0 was skipped ({reason}): try ZeRO-3 + CPU optimizer (predicted")
    bare = failed(schema.SKIPPED, error="by hand", details=None, phase=None)
    assert advice(bare).next_steps[0].startswith("ZeRO-2 was skipped (by hand): try a smaller micro-batch")


def test_a_record_without_a_usable_prediction_gets_no_numbers(subtests: pytest.Subtests) -> None:
    whole = dict(planned(fakes.zero(0)).prediction or {})
    odd = {**whole, "alternatives": [{**whole["alternatives"][0], "gpu_bytes": "much"}]}
    for prediction in (None, {"gpu": {"all": 3}}, {"gpu": None, "alternatives": 7}, odd):
        with subtests.test(prediction=prediction and list(prediction)):
            run = failed(schema.OOM)
            found = advice(replace(run, trial=replace(run.trial, prediction=prediction)))
            assert found.steps[0][1] == Fact("no_prediction")
            assert found.try_next == "--batch-size 2"


def test_every_remedy_under_a_cpu_memory_limit_fits_that_limit(subtests: pytest.Subtests) -> None:
    """Not the 256 GB of the host: two ranks of 3 GB each have 6 GB."""
    profile = trial_predictions.profile_model(fakes.resolved_model("gpt2"), 256, "cpu")
    for limit_gb, fitting in ((4.0, True), (3.0, True), (1.0, False)):
        with subtests.test(limit_gb=limit_gb):
            on = replace(fakes.placement(num_gpus=2), cpu_memory_limit_bytes=int(limit_gb * GB))
            work = fakes.workload(model="gpt2", batch_size=4, seq_length=256)
            trial = predicted(fakes.trial(fakes.zero(2), on=on, of=work), profile)
            run = fakes.failure(trial, schema.OOM_HOST, requested_bytes=2**20)
            change = smallest_fit(setup(run))
            assert (change is not None) == fitting
            assert change is None or change.host_bytes <= 2 * limit_gb * GB
            found = advice(run)
            assert fitting or found.action == Fact(
                "resorts", {"resorts": "a larger --cpu-memory-limit, a shorter --seq-length or a smaller model"}
            )
            assert not any("the host has" in step for step in found.next_steps)
            assert any("--cpu-memory-limit allows 2 ranks" in step for step in found.next_steps)


LESS_WORK = ("--batch-size", "--activation-checkpointing", "--seq-length", "batch size", "micro-batch")


def test_remedy_acts_in_the_phase_that_ran_out(subtests: pytest.Subtests) -> None:
    for phase, stage in (("import", 2), ("build", 0), ("build", 3), ("init", 0), ("init", 3), ("step", 2)):
        for cards in (1, 4):
            with subtests.test(phase=phase, stage=stage, cards=cards):
                run = ended(planned(fakes.zero(stage), cards))
                found = advice(replace(run, outcome=replace(run.outcome, phase=phase)))
                said = " ".join([found.try_next or "nothing", *found.next_steps])
                assert not [words for words in LESS_WORK if words in said]


def test_only_stage_3_is_a_remedy_for_a_model_that_does_not_fit_while_it_is_built() -> None:
    run = ended(planned(fakes.zero(0), 4))
    found = setup(replace(run, outcome=replace(run.outcome, phase="build")))
    assert {change.layout[0] for change in found.alternatives} == {3}


@pytest.mark.parametrize("has_prediction", [True, False])
def test_request_of_a_whole_bucket_is_answered_by_a_smaller_bucket(has_prediction: bool) -> None:
    """A bucket of 5e8 elements takes 0.93 GB in bf16, whatever the micro-batch."""
    trial = planned(fakes.zero(2), 4, batch_size=2)
    trial = trial if has_prediction else replace(trial, prediction=None)
    size = {"requested_bytes": int(953.67 * 2**20), "free_bytes": GB // 2}
    run = fakes.failure(trial, schema.OOM, phase="backward", **size)
    found = advice(run, ended(planned(fakes.zero(3), 4, batch_size=2), 40.0))
    assert found.try_next == "--set zero_optimization.reduce_bucket_size=50000000 --stages 2"


def test_settings_are_flags_of_the_command_line() -> None:
    settings = {"batch_size": 2, "activation_checkpointing": True, "stages": [0, 3], "zero_optimization.stage": 1}
    line = flags(settings)
    assert line == "--batch-size 2 --activation-checkpointing --stages 0 3 --set zero_optimization.stage=1"
    assert parse("zero", "zero_stage_comparison.py", line.split()).batch_size == 2


# ------------------------------------------------------------------ what to do about every ending


def test_every_ending_has_its_action(subtests: pytest.Subtests) -> None:
    nvme, hosts = fakes.offload("nvme"), (("a", 1), ("b", 1))
    for kind, run in (
        ("timeout", failed(schema.TIMEOUT, phase="forward")),
        ("timeout_at_start", failed(schema.TIMEOUT, phase="init")),
        ("disk_full", failed(schema.OOM_DISK, kind="disk_full")),
        ("swap_disk_full", failed(schema.OOM_DISK, nvme)),
        ("killed", failed(schema.KILLED)),
        ("crashed", failed(schema.CRASHED)),
        ("unsupported", failed(schema.UNSUPPORTED)),
        ("skipped", failed(schema.SKIPPED)),
        ("interrupted", failed(schema.INTERRUPTED)),
        ("exception", failed("RuntimeError")),
        ("nvme_exception", failed("RuntimeError", nvme)),
        ("shared_memory", failed("RuntimeError", kind="shared_memory")),
        ("bus_error", failed(schema.CRASHED, kind="bus_error")),
        ("pinned_memory", failed(schema.OOM_HOST, fakes.offload("cpu_full"), kind="pinned_memory")),
        ("memlock", failed("DistBackendError", kind="memlock")),
        ("peer_access", failed("DistBackendError", kind="peer_access")),
        ("fabric_manager", failed("AcceleratorError", kind="fabric_manager")),
        ("collective_timeout", failed(schema.TIMEOUT, kind="collective_timeout")),
    ):
        with subtests.test(kind):
            assert action_of(run).kind == kind
            ((labels, fact),) = remedies_of(compared(run).rows, compared(run))
            assert fact.values["action"] == action_of(run)
            assert labels == [compared(run).rows[0].label]
            assert advice(run).action == action_of(run)
            assert all("None" not in line for line in advice(run).lines)
    run = failed(schema.TIMEOUT, phase="init")
    several = replace(run.trial, placement=replace(run.trial.placement, num_gpus=2, hosts=hosts))
    assert action_of(replace(run, trial=several)).kind == "timeout_at_start_of_hosts"
    assert "113 GB" in str(action_of(fakes.failure(planned(nvme), schema.OOM_DISK)))


def test_no_ending_is_left_without_a_line_even_where_its_record_is_bare(subtests: pytest.Subtests) -> None:
    for status in [status for status in schema.STATUSES if status != schema.SUCCESS]:
        with subtests.test(status):
            said = advice(failed(status, error=None, phase=None, rank=None, details=None)).lines
            assert any("ZeRO-2 " in line for line in said)
            assert not any("None" in line for line in said)
    assert all(len(line) < 400 for line in advice(failed("ValueError", error="x" * 5000)).lines)


def test_rows_of_which_the_same_is_to_be_said_share_a_step() -> None:
    short = advice(out_of_memory(fakes.zero(0)), out_of_memory(fakes.zero(1)))
    assert [labels for labels, _ in short.steps if labels] == [("ZeRO-0", "ZeRO-1")]
    ended_by_hand = advice(failed(schema.KILLED, fakes.zero(0)), failed(schema.KILLED, fakes.zero(1)))
    assert ended_by_hand.next_steps[0].startswith("ZeRO-0 and ZeRO-1 were killed in backward")


def test_a_full_host_is_told_what_it_was_predicted_to_take_and_what_there_is() -> None:
    run = fakes.failure(planned(fakes.offload("cpu_full")), schema.OOM_HOST, requested_bytes=GB)
    found = advice(run, host=fakes.environment(host_memory_bytes=100 * GB))
    (step,) = [str(fact.values["host"]) for labels, fact in found.steps if labels]
    assert step == "; it is predicted to take 137 GB; the host has 100.00 GB" or "100 GB" in step
    assert found.try_next == "--strategies nvme --nvme-path DIR"


def test_fragmentation_is_answered_by_the_allocator_and_not_by_a_strategy() -> None:
    comparison = compared(failed(schema.OOM, requested_bytes=GB, free_bytes=2 * GB))
    ((_, fact),) = remedies_of(comparison.rows, comparison)
    assert fact.values["action"] == Fact("fragmented")


def test_memory_is_the_cause_that_counts_where_runs_ended_differently() -> None:
    killed, short = failed(schema.KILLED), failed(schema.OOM, requested_bytes=2 * GB, free_bytes=GB)
    later = replace(short, trial=replace(killed.trial, repeat=1))
    found = failed_run(compared(killed, later).rows[0])
    assert found is not None
    assert found.outcome == later.outcome
    trained = fakes.success(killed.trial)
    assert failed_run(compared(trained).rows[0]) is None
    assert remedies_of(compared(trained).rows, compared(trained)) == []
