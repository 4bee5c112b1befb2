"""Predictions beside trials: stored, held against what was measured, and used to skip only what is hopeless."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_bench.analysis.row import make_run
from ds_bench.config.caveats import CaveatKind, has_kind
from ds_bench.config.identity import work_key
from ds_bench.config.spec import Trial
from ds_bench.errors import PreflightError
from ds_bench.models.lookup import ResolvedModel
from ds_bench.prediction import memory, trial_predictions
from ds_bench.prediction.model_profile import ModelProfile
from ds_bench.prediction.trial_predictions import MemoryCapacity, Unpredicted, stored_prediction
from ds_bench.records import json_files
from tests.support import fakes

GB = fakes.GB
ON_GPUS = fakes.placement(accelerator="cuda", num_gpus=2)
PROFILE = trial_predictions.profile_model(fakes.resolved_model("tiny"), 128, "cuda", dropout=0.0)


def foreseen(trial: Trial, room: MemoryCapacity, *, skip: bool = True) -> Trial:
    (found,) = trial_predictions.attach_predictions([trial], PROFILE, room, skip=skip)
    return found


def need(trial: Trial) -> int:
    prediction = stored_prediction(foreseen(trial, MemoryCapacity(gpu_bytes=None, host_bytes=None)))
    assert prediction is not None
    return prediction.gpu_bytes


def test_a_row_without_a_prediction_says_why() -> None:
    choice = ResolvedModel(name="no_such_module:make", source="factory", config={})
    known = trial_predictions.profile_model(choice, 128, "cpu")
    assert isinstance(known, Unpredicted)
    (trial,) = trial_predictions.attach_predictions(
        [fakes.trial()], known, MemoryCapacity(gpu_bytes=None, host_bytes=None), skip=True
    )
    assert trial.prediction is None
    assert trial.caveats[-1].startswith("memory is not predicted: ")
    assert "No module named 'no_such_module'" in trial.caveats[-1]
    summary = make_run(fakes.success(trial))
    assert any("no_such_module" in caveat.text for caveat in summary.caveats)


def test_unknown_activations_leave_the_rest_predicted_and_never_fit() -> None:
    assert isinstance(PROFILE, ModelProfile)
    without = replace(PROFILE, activations={}, unknown="no fake kernel")
    room = MemoryCapacity(gpu_bytes=80 * GB, host_bytes=None)
    (trial,) = trial_predictions.attach_predictions([fakes.trial(fakes.zero(2), on=ON_GPUS)], without, room, skip=True)
    assert trial.caveats == ("activations are not predicted, the rest is: no fake kernel",)
    found = stored_prediction(trial)
    assert found is not None
    assert (found.activation_bytes, found.verdict(80 * GB)) == (None, memory.UNKNOWN)
    assert found.verdict(1) == memory.DOES_NOT_FIT
    assert found.ledger["gpu"]["optimizer_states"] == 12 * 557_568 // 2
    summary = make_run(fakes.success(trial, gpu_peak_bytes=GB)).row
    assert summary.predicted_over_measured is None


def test_what_the_formulas_do_not_know_is_named_beside_the_prediction() -> None:
    room = MemoryCapacity(gpu_bytes=None, host_bytes=None)
    plain = fakes.trial(fakes.offload("cpu_optimizer", 2), on=ON_GPUS)
    zenflow = {**plain.ds_config, "zero_optimization": {**plain.ds_config["zero_optimization"], "zenflow": {}}}
    assert not foreseen(plain, room).caveats
    assert foreseen(replace(plain, ds_config=zenflow), room).caveats == (
        "memory is predicted without ZenFlow's buffers",
    )


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    assert isinstance(PROFILE, ModelProfile)
    adapter = replace(PROFILE, frozen=((0, 1_000_000),))
    for stage, part in ((0, 1_000_000), (2, 1_000_000), (3, 500_000)):
        trial = fakes.trial(fakes.zero(stage), on=ON_GPUS)
        plain, more = (memory.predict(known, trial.workload, ON_GPUS, trial.ds_config) for known in (PROFILE, adapter))
        grown = {name: more.ledger["gpu"][name] - size for name, size in plain.ledger["gpu"].items()}
        assert {name: size for name, size in grown.items() if size} == {"parameters": 2 * part}


def test_a_trial_carries_its_prediction_and_its_key_stays() -> None:
    trial = fakes.trial(fakes.zero(2), on=ON_GPUS)
    found = foreseen(trial, MemoryCapacity(gpu_bytes=80 * GB, host_bytes=None))
    assert found.prediction is not None
    assert found.skipped is None
    assert work_key(found) == work_key(trial)
    again = json_files.build(Trial, found.to_dict())
    assert replace(again, prediction=None) == replace(found, prediction=None)
    assert stored_prediction(again) == stored_prediction(found) is not None


def test_only_what_cannot_fit_is_skipped_and_only_where_asked() -> None:
    trial = fakes.trial(fakes.zero(0), on=ON_GPUS)
    size = need(trial)
    assert foreseen(trial, MemoryCapacity(gpu_bytes=size - 1, host_bytes=None), skip=False).skipped is None
    assert foreseen(trial, MemoryCapacity(gpu_bytes=size, host_bytes=None)).skipped is None  # tight
    reason = foreseen(trial, MemoryCapacity(gpu_bytes=size - 1, host_bytes=None)).skipped
    assert reason is not None
    assert "--skip-predicted-oom" in reason


LLAMA = trial_predictions.profile_model(fakes.resolved_model("meta-llama/Llama-2-7b-hf"), 128, "cpu")
ON_CPU = fakes.workload(model="meta-llama/Llama-2-7b-hf")


def test_a_model_far_beyond_the_hosts_memory_is_refused_in_one_line() -> None:
    """Llama-2-7B on a CPU rank takes more than 100 GB at every stage: 24 GB are refused, 100 GB may be tried."""
    none = MemoryCapacity(gpu_bytes=None, host_bytes=None)
    trials = trial_predictions.attach_predictions(
        [fakes.trial(fakes.zero(s), of=ON_CPU) for s in (0, 3)], LLAMA, none, skip=False
    )
    with pytest.raises(PreflightError, match=r"predicted to need 1\d\d GB .* least, .*24.00 GB") as refused:
        trial_predictions.require_host_memory(trials, 24 * GB)
    assert "--force" in str(refused.value)
    trial_predictions.require_host_memory(trials, 100 * GB)
    trial_predictions.require_host_memory(trials, None)


def test_a_tiny_model_is_never_refused_whatever_limit_its_ranks_have() -> None:
    on = fakes.placement(num_gpus=2, cpu_memory_limit_bytes=2**20)
    facts = fakes.environment(host_memory_bytes=2 * GB, cgroup_memory_limit_bytes=None)
    trials = trial_predictions.attach_predictions(
        [fakes.trial(fakes.zero(3), on=on)], PROFILE, MemoryCapacity.from_environment(facts, on), skip=False
    )
    assert trials[0].skipped is None
    trial_predictions.require_host_memory(trials, 2 * GB)


def test_a_row_far_beyond_the_hosts_memory_is_left_out_where_others_fit() -> None:
    """On cards of 80 GB: without offload little host memory is needed, with both offloaded more than 130 GB."""
    work = fakes.workload(model="meta-llama/Llama-2-7b-hf")
    trials = [fakes.trial(fakes.offload(name), on=ON_GPUS, of=work) for name in ("none", "cpu_full")]
    room = MemoryCapacity(gpu_bytes=80 * GB, host_bytes=64 * GB, node_bytes=64 * GB)
    first, second = trial_predictions.attach_predictions(trials, LLAMA, room, skip=False)
    assert first.skipped is None
    assert second.skipped is not None
    assert "of host memory, where there is 64.00 GB; --force tries it" in second.skipped
    trial_predictions.require_host_memory([first, second], 64 * GB)
    assert all(
        trial.skipped is None
        for trial in trial_predictions.attach_predictions(trials, LLAMA, room, skip=False, force=True)
    )


def test_on_the_cpu_buffers_that_nobody_touches_are_no_reason_to_skip() -> None:
    """At stage 1 the 1 GB bucket is most of the prediction, and hardly any of it becomes resident."""
    trial = fakes.trial(fakes.zero(1))
    assert foreseen(trial, MemoryCapacity(gpu_bytes=None, host_bytes=GB // 2)).skipped is None
    assert foreseen(trial, MemoryCapacity(gpu_bytes=None, host_bytes=2**20)).skipped is not None


def test_what_cannot_run_anyway_is_left_as_it_is() -> None:
    trial = fakes.trial(unsupported="no libaio")
    assert foreseen(trial, MemoryCapacity(gpu_bytes=1, host_bytes=1)) == trial


def test_room_is_the_smallest_card_and_the_tightest_limit() -> None:
    facts = fakes.environment(cgroup_memory_limit_bytes=64 * GB)
    assert MemoryCapacity.from_environment(facts, ON_GPUS) == MemoryCapacity(
        gpu_bytes=80 * GB, host_bytes=64 * GB, node_bytes=64 * GB
    )
    small = replace(ON_GPUS, gpu_memory_limit_bytes=8 * GB)
    assert MemoryCapacity.from_environment(facts, small).gpu_bytes == 8 * GB
    limited = fakes.placement(num_gpus=2, cpu_memory_limit_bytes=3 * GB)
    assert MemoryCapacity.from_environment(facts, limited) == MemoryCapacity(
        gpu_bytes=None, host_bytes=6 * GB, node_bytes=64 * GB
    )


def test_a_miss_above_ten_percent_is_a_caveat(subtests: pytest.Subtests) -> None:
    for factor, missed in ((1.0, False), (1.08, False), (1.5, True), (0.6, True)):
        with subtests.test(factor=factor):
            trial = foreseen(fakes.trial(fakes.zero(2), on=ON_GPUS), MemoryCapacity(gpu_bytes=None, host_bytes=None))
            prediction = stored_prediction(trial)
            assert prediction is not None
            predicted = prediction.gpu_bytes - prediction.gpu["overhead"]
            summary = make_run(fakes.success(trial, gpu_peak_bytes=round(predicted / factor)))
            assert summary.row.predicted_over_measured == pytest.approx(factor, rel=1e-6)
            assert (
                has_kind(summary.caveats, CaveatKind.MEMORY_PREDICTION_MISSED, CaveatKind.TENSOR_PREDICTION_MISSED)
                is missed
            )


def test_a_record_without_a_prediction_or_with_a_strange_one_has_no_ratio() -> None:
    plain = fakes.success(fakes.trial(on=ON_GPUS))
    assert make_run(plain).row.predicted_over_measured is None
    strange = fakes.success(fakes.trial(on=ON_GPUS, prediction={"gpu": "much"}))
    assert make_run(strange).row.predicted_over_measured is None


def test_the_host_memory_a_plan_needs_is_that_of_its_hungriest_row() -> None:
    trials = [fakes.trial(fakes.offload(name), on=ON_GPUS) for name in ("none", "cpu_full")]
    found = trial_predictions.attach_predictions(
        trials, PROFILE, MemoryCapacity(gpu_bytes=None, host_bytes=None), skip=False
    )
    needs = [trial_predictions.peak_host_bytes([trial]) for trial in found]
    assert needs[0] is not None
    assert needs[1] is not None
    assert needs[0] < needs[1]
    assert trial_predictions.peak_host_bytes(found) == needs[1]
    assert trial_predictions.peak_host_bytes(trials) is None
