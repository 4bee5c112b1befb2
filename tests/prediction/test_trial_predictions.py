"""Predictions of trials: stored, compared with what was measured, and used to skip only what cannot fit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds_bench.analysis.row import make_run
from ds_bench.config.caveat_texts import CaveatKind, has_kind
from ds_bench.config.identity import work_key
from ds_bench.config.spec import Trial
from ds_bench.errors import PreflightError
from ds_bench.models.lookup import ResolvedModel
from ds_bench.prediction import predicted_memory, trial_predictions
from ds_bench.prediction.model_profile import ModelProfile
from ds_bench.prediction.predicted_memory import Prediction
from ds_bench.prediction.trial_predictions import MemoryCapacity, Unpredicted, stored_prediction
from ds_bench.prediction.what_if import alternatives, savings
from ds_bench.records import json_files
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.predictions import llama

GB = fakes.GB
ON_GPUS = fakes.placement(accelerator="cuda", num_gpus=2)
PROFILE = trial_predictions.profile_model(fakes.resolved_model("tiny"), 128, "cuda", dropout=0.0)
LLAMA = trial_predictions.profile_model(fakes.resolved_model("meta-llama/Llama-2-7b-hf"), 128, "cpu")
LLAMA_WORK = fakes.workload(model="meta-llama/Llama-2-7b-hf")


def foreseen(
    trial: Trial, capacity: MemoryCapacity | None = None, *, skip: bool = True, profile: Any = PROFILE
) -> Trial:
    (found,) = trial_predictions.attach_predictions([trial], profile, capacity or room(), skip=skip)
    return found


def prediction_of(trial: Trial) -> Prediction:
    found = stored_prediction(foreseen(trial))
    assert found is not None
    return found


def test_model_that_cannot_be_predicted_leaves_a_caveat() -> None:
    choice = ResolvedModel(name="no_such_module:make", source="factory", config={})
    unknown = trial_predictions.profile_model(choice, 128, "cpu")
    assert isinstance(unknown, Unpredicted)
    trial = foreseen(fakes.trial(), profile=unknown)
    assert (trial.prediction, len(trial.caveats)) == (None, 1)
    assert "No module named 'no_such_module'" in trial.caveats[-1]


def test_unknown_activations_leave_the_rest_predicted_and_never_fit() -> None:
    assert isinstance(PROFILE, ModelProfile)
    without = replace(PROFILE, activations={}, unknown="no fake kernel")
    trial = foreseen(fakes.trial(fakes.zero(2), on=ON_GPUS), profile=without)
    assert trial.caveats == ("only activations are not predicted: no fake kernel",)
    found = stored_prediction(trial)
    assert found is not None
    assert found.verdict(80 * GB) == predicted_memory.UNKNOWN
    assert found.verdict(1) == predicted_memory.DOES_NOT_FIT
    assert found.ledger["gpu"]["optimizer_states"] == 12 * 557_568 // 2
    assert make_run(fakes.success(trial, gpu_peak_bytes=GB)).row.predicted_over_measured is None


def test_settings_that_the_formulas_do_not_know_are_named() -> None:
    plain = fakes.trial(fakes.offload("cpu_optimizer", 2), on=ON_GPUS)
    zenflow = {**plain.ds_config, "zero_optimization": {**plain.ds_config["zero_optimization"], "zenflow": {}}}
    assert not foreseen(plain).caveats
    assert foreseen(replace(plain, ds_config=zenflow)).caveats == ("memory is predicted without ZenFlow's buffers",)


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    assert isinstance(PROFILE, ModelProfile)
    adapter = replace(PROFILE, frozen=((0, 1_000_000),))
    for stage, part in ((0, 1_000_000), (2, 1_000_000), (3, 500_000)):
        trial = fakes.trial(fakes.zero(stage), on=ON_GPUS)
        plain, more = (
            predicted_memory.predict(known, trial.workload, ON_GPUS, trial.ds_config) for known in (PROFILE, adapter)
        )
        grown = {name: more.ledger["gpu"][name] - size for name, size in plain.ledger["gpu"].items()}
        assert {name: size for name, size in grown.items() if size} == {"parameters": 2 * part}


def room(gpu: int | None = None, host: int | None = None, node: int | None = None) -> MemoryCapacity:
    return MemoryCapacity(gpu_bytes=gpu, host_bytes=host, node_bytes=node)


def test_only_what_cannot_fit_is_skipped_and_only_on_request() -> None:
    """At stage 1 on the CPU the 1 GB bucket is most of the prediction, and hardly any of it becomes resident."""
    on_gpu, on_cpu = fakes.trial(fakes.zero(0), on=ON_GPUS), fakes.trial(fakes.zero(1))
    size = prediction_of(on_gpu).gpu_bytes
    for trial, capacity, skip, skipped in (
        (on_gpu, room(gpu=size - 1), False, False),
        (on_gpu, room(gpu=int(1.05 * size)), True, False),  # tight
        (on_gpu, room(gpu=size - 1), True, True),
        (on_cpu, room(host=GB // 2), True, False),
        (on_cpu, room(host=2**20), True, True),
    ):
        assert bool(foreseen(trial, capacity, skip=skip).skipped) is skipped, (capacity, skip)
    unsupported = fakes.trial(unsupported="no libaio")
    assert foreseen(unsupported, room(gpu=1, host=1)) == unsupported


def test_plan_far_beyond_the_hosts_memory_is_refused() -> None:
    """Llama-2-7B on a CPU rank takes more than 100 GB at every stage: 24 GB are refused, 100 GB may be tried."""
    trials = [foreseen(fakes.trial(fakes.zero(stage), of=LLAMA_WORK), profile=LLAMA) for stage in (0, 3)]
    with pytest.raises(PreflightError, match=r"predicted to need 1\d\d GB .* least, .*24.00 GB") as refused:
        trial_predictions.require_host_memory(trials, 24 * GB)
    assert "--force" in str(refused.value)
    trial_predictions.require_host_memory(trials, 100 * GB)
    trial_predictions.require_host_memory(trials, None)
    # A limit on the ranks is the user's own and refuses nothing.
    on = fakes.placement(num_gpus=2, cpu_memory_limit_bytes=2**20)
    facts = fakes.environment(host_memory_bytes=2 * GB, cgroup_memory_limit_bytes=None)
    limited = foreseen(fakes.trial(fakes.zero(3), on=on), MemoryCapacity.from_environment(facts, on), skip=False)
    assert limited.skipped is None
    trial_predictions.require_host_memory([limited], 2 * GB)


def test_row_far_beyond_the_hosts_memory_is_skipped_if_others_fit() -> None:
    """On cards of 80 GB: without offload little host memory is needed, with both offloaded more than 130 GB."""
    trials = [fakes.trial(fakes.offload(name), on=ON_GPUS, of=LLAMA_WORK) for name in ("none", "cpu_full")]
    capacity = room(80 * GB, 64 * GB, 64 * GB)
    first, second = trial_predictions.attach_predictions(trials, LLAMA, capacity, skip=False)
    assert first.skipped is None
    assert "use --force to try it" in str(second.skipped)
    trial_predictions.require_host_memory([first, second], 64 * GB)
    forced = trial_predictions.attach_predictions(trials, LLAMA, capacity, skip=False, force=True)
    assert [trial.skipped for trial in forced] == [None, None]
    # The most demanding row decides how much host memory a plan needs.
    less, more = (trial_predictions.peak_host_bytes([trial]) or 0 for trial in forced)
    assert 0 < less < more == trial_predictions.peak_host_bytes(forced)
    assert trial_predictions.peak_host_bytes(trials) is None


def test_capacity_is_the_smallest_card_and_the_tightest_limit() -> None:
    facts = fakes.environment(cgroup_memory_limit_bytes=64 * GB)
    for on, capacity in (
        (ON_GPUS, room(80 * GB, 64 * GB, 64 * GB)),
        (replace(ON_GPUS, gpu_memory_limit_bytes=8 * GB), room(8 * GB, 64 * GB, 64 * GB)),
        (fakes.placement(num_gpus=2, cpu_memory_limit_bytes=3 * GB), room(None, 6 * GB, 64 * GB)),
    ):
        assert MemoryCapacity.from_environment(facts, on) == capacity


def test_stored_prediction_is_read_back_and_is_not_part_of_the_work() -> None:
    trial = fakes.trial(fakes.zero(2), on=ON_GPUS)
    assert work_key(foreseen(trial)) == work_key(trial)
    asked = llama(fakes.offload("nvme"))
    whole = replace(asked.predict(), alternatives=tuple(alternatives(asked)), savings=tuple(savings(asked)))
    assert whole.alternatives
    assert whole.savings
    saved = json.loads(json.dumps(replace(trial, prediction=whole.to_dict()).to_dict()))
    assert stored_prediction(json_files.build(Trial, saved)) == whole
    assert stored_prediction(replace(trial, prediction={"gpu": "much"})) is None


def test_more_gpus_are_whole_nodes_as_large_as_the_one_of_the_trial() -> None:
    on = fakes.placement(accelerator="cuda", num_gpus=16)
    trial = foreseen(fakes.trial(fakes.zero(3), on=on, of=LLAMA_WORK), profile=LLAMA)
    found = stored_prediction(trial_predictions.with_savings(trial, LLAMA, lacked_memory=True))
    assert found is not None
    assert {each.settings.get("num_gpus", 16) for each in found.alternatives or ()} == {16, 32, 64, 128}


def recorded(gpu: dict[str, int], predicted_ledger: dict[str, dict[str, int]], **measured: Any) -> TrialRecord:
    found = replace(prediction_of(fakes.trial()), gpu=gpu, phase="loss", ledger=predicted_ledger)
    on = ON_GPUS if gpu else fakes.placement()
    return fakes.success(fakes.trial(on=on, prediction=found.to_dict()), **measured)


def test_prediction_is_compared_with_the_allocators_peak_on_gpus_and_with_the_ledger_without() -> None:
    record = recorded({"parameters": 900, "overhead": 5000}, {}, gpu_peak_bytes=1000)
    record = replace(record, ranks=(record.ranks[0], replace(record.ranks[1], gpu_peak_bytes=800)))
    assert trial_predictions.predicted_over_measured(record) == pytest.approx(0.9)
    # If the fullest moment is before the steps, the peak before them is compared.
    for phase in ("build", "initialize"):
        built = replace(record.trial, prediction={**(record.trial.prediction or {}), "phase": phase})
        built_record = fakes.success(built, gpu_peak_bytes=1000, gpu_init_peak_bytes=1800)
        assert trial_predictions.predicted_over_measured(built_record) == pytest.approx(0.5)
    failed = fakes.failure(record.trial)
    assert trial_predictions.predicted_over_measured(failed) is None
    assert trial_predictions.predicted_over_ledger(failed) is None
    assert trial_predictions.predicted_over_measured(fakes.success(fakes.trial(on=ON_GPUS))) is None
    predicted = {"cpu": {"parameters": 300, "gradients": 100}, "nvme": {"parameters": 100}}
    measured = {"cpu": {"parameters": 380, "other": 999}, "nvme": {"parameters": 20}}
    row = make_run(recorded({}, predicted, ledger=measured)).row
    assert (row.predicted_over_measured, row.predicted_over_ledger) == (None, pytest.approx(1.25))


def test_miss_is_more_than_a_tenth_and_256_mb_of_a_gpus_peak() -> None:
    for ratio, missed in ((1.09, False), (1.11, True), (0.91, False), (0.89, True)):
        assert trial_predictions.is_miss(ratio) is missed
    for peak, missed in ((1_000_000_000, False), (3_000_000_000, True)):
        record = fakes.success(fakes.trial(), gpu_peak_bytes=peak)
        assert trial_predictions.is_gpu_miss(1.12, record) is missed
        assert trial_predictions.is_gpu_miss(1.09, record) is False
    for peak, missed in ((10 * GB, False), (8 * GB, True)):
        run = make_run(recorded({"parameters": 10 * GB}, {}, gpu_peak_bytes=peak))
        assert has_kind(run.caveats, CaveatKind.MEMORY_PREDICTION_MISSED) is missed


def test_memory_outside_the_allocator_is_measured_on_the_fullest_rank() -> None:
    """In use 11 GB with 9 GB reserved at that moment, and a peak of 10; on the other rank half a GB more."""
    pair = fakes.success(fakes.trial(on=ON_GPUS))
    other = replace(pair.ranks[1], gpu_device_used_bytes=int(11.5 * 2**30))
    assert trial_predictions.outside_allocator_bytes((pair.ranks[0], other)) == 2.5 * GB
    assert trial_predictions.outside_allocator_bytes(fakes.success(fakes.trial()).ranks) is None
