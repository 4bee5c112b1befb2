"""Prediction: small cases by hand, its laws, and the answers drawn from it; tests/integration trains real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.analysis.comparison import rows_of
from ds_bench.analysis.row import make_run
from ds_bench.config import axis_rows
from ds_bench.config.axes import RowFacts
from ds_bench.config.deepspeed_config import overlay
from ds_bench.config.spec import Configuration
from ds_bench.prediction import memory, trial_predictions
from ds_bench.prediction.inputs import MemoryInputs, ZeroSettings
from ds_bench.prediction.memory import DOES_NOT_FIT, FITS, TIGHT, Prediction
from ds_bench.prediction.model_profile import Activations, ModelProfile, Polynomial, find_profile
from ds_bench.prediction.stage_3 import GatheredElements, gathered_elements
from ds_bench.prediction.stages_0_to_2 import owned_elements
from ds_bench.prediction.what_if import (
    Change,
    PlannedTrial,
    alternatives,
    fits,
    max_batch,
    min_gpus,
    savings,
    smallest_change,
)
from tests.support.fakes import failure, offload, placement, preset, success, trial, workload, zero

GB = 2**30
NO_BUCKETS = {"zero_optimization": {"reduce_bucket_size": 1, "stage3_prefetch_bucket_size": 0}}
EVERY = [*map(zero, range(4)), *map(offload, ("cpu_optimizer", "cpu_full", "nvme"))]

TOY = ModelProfile(
    name="toy",
    layers=2,
    before=(40,),
    layer=(24, 6),
    after=(40,),
    tied_embeddings=False,
    activations={
        "bf16": Activations(
            plain=Polynomial(fixed={"bs": 100}, per_layer={"bs": 1000}),
            checkpointed=Polynomial(fixed={"bs": 100}, per_layer={"bs": 10}),
            loss=Polynomial(fixed={"bs": 300}, per_layer={"bs": 1000}),
        )
    },
)
"""140 parameters: 40, (24, 6), (24, 6), 40."""


def ask(strategy: Configuration, ranks: int = 2, *, model: ModelProfile = TOY, **work: Any) -> PlannedTrial:
    changes = NO_BUCKETS if strategy.stage else {}
    return PlannedTrial(
        profile=model,
        workload=workload(**{"batch_size": 1, "seq_length": 1, **work}),
        placement=placement(accelerator="cuda", num_gpus=ranks, nvme_path="/nvme"),
        configuration=strategy,
        changes=changes,
    )


def llama(strategy: Configuration, ranks: int = 8, **work: Any) -> PlannedTrial:
    facts = preset("meta-llama/Llama-2-7b-hf")
    question = ask(strategy, ranks, model=find_profile(facts, 2048), **{"seq_length": 2048, **work})
    return replace(question, changes={})


def case(ranks: int, *, model: ModelProfile = TOY, **settings_: Any) -> MemoryInputs:
    config = ask(zero(3), ranks, model=model).config()
    found = replace(ZeroSettings.from_config(config), **settings_)
    return MemoryInputs(
        profile=model, precision="bf16", data_parallel_size=ranks, grad_accum=1, accelerator="cuda", settings=found
    )


def test_stage_0_steps_with_24_bytes_per_parameter_when_fused() -> None:
    # 2 + 12 + 2, and while the 16-bit gradients become one flat fp32 tensor a list and the copy of it: 8 more.
    found = llama(zero(0), 1, seq_length=1).predict()
    assert found.phase == "flatten"
    assert found.gpu_bytes - memory.CONTEXT_BYTES - found.gpu["workspaces"] == 24 * 6_738_415_616
    assert found.gpu_bytes == sum(found.gpu.values())
    # cuBLAS has a workspace for each of two threads, outside the ledger.
    for capability, mib in (((9, 0), 64), ((8, 0), 16.25), (None, 16.25)):
        question = llama(zero(3))
        asked = replace(question, placement=replace(question.placement, compute_capability=capability)).predict()
        assert asked.gpu["workspaces"] == mib * 2**20
        assert "workspaces" not in asked.ledger["gpu"]


def test_stage_2_is_worked_by_hand() -> None:
    """On 2 ranks 140 needs no padding: 70 each. Rank 0 touches 40, 24 and 6 and ends there, rank 1 has the rest."""
    ledger = ask(zero(2)).predict().ledger["gpu"]
    assert ledger["parameters"] == 280
    assert ledger["optimizer_states"] == 12 * 70
    assert ledger["gradients"] == 2 * 70
    assert ledger["deepspeed_buffers"] == 2  # a bucket of one element
    assert ledger["activations"] == 2100


def test_a_tensor_on_the_border_of_two_ranks_has_its_gradient_on_both() -> None:
    # 4 ranks: 144 with padding, 36 each. [0,36) touches 40; [36,72) 40, 24, 6 and 24 (begins at 70): 94;
    # [72,108) 24, 6 and 40: 70; [108,144) 40 and 4 of padding.
    assert owned_elements(TOY.tensors, 4) == 94
    assert owned_elements(TOY.tensors, 1) == 140


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 40))
def test_the_fullest_rank_is_found_without_looking_at_every_one(tensors: list[int], ranks: int) -> None:
    part = -(-sum(tensors) // (2 * ranks)) * 2
    most = 0
    for start in range(0, part * ranks, part):
        begins = [sum(tensors[:index]) for index in range(len(tensors))]
        touched = [n for n, begin in zip(tensors, begins, strict=True) if begin < start + part and begin + n > start]
        most = max(most, sum(touched) + max(0, start + part - max(start, sum(tensors))))
    assert owned_elements(tensors, ranks) == most


def test_the_loss_is_the_peak_where_activations_are_all() -> None:
    found = ask(zero(3), 2, seq_length=1000).predict()
    assert found.phase == "loss"
    assert found.gpu["activations"] == 1000 * 2100
    assert found.gpu["logits_and_loss"] == 1000 * 200


def test_with_checkpointing_one_layer_is_recomputed_at_a_time() -> None:
    found = ask(zero(3), 2, seq_length=1000, activation_checkpointing=True).predict()
    assert found.ledger["gpu"]["activations"] == 1000 * 120
    assert found.phase == "enter"
    assert found.gpu["activations"] == 1000 * (2 * 10 + 1000)
    assert found.activation_bytes == 1000 * 2100
    assert found.checkpointed_activation_bytes == 1000 * 120


@pytest.mark.parametrize(("stage", "copy_bytes"), [(2, 8 * 525_336_576), (3, 2 * 525_336_576 + 8 * 250_000_000)])
def test_an_offloaded_gradient_is_copied_to_fp64_for_its_norm(stage: int, copy_bytes: int) -> None:
    """Llama-3.1-8B's LM head of 128,256 × 4,096, on one GPU; stage 3 takes 250 million elements at a time."""
    facts = preset("meta-llama/Llama-3.1-8B")
    question = ask(offload("cpu_optimizer", stage), 1, model=find_profile(facts, 2048), seq_length=2048)
    found = question.predict()
    assert found.phase == "enter"
    assert found.gpu["temporaries"] == 2 * 525_336_576 + copy_bytes


def test_overlapping_communication_doubles_the_bucket() -> None:
    changes = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 1000}}
    assert replace(ask(zero(2)), changes=changes).predict().ledger["gpu"]["deepspeed_buffers"] == 2 * 2 * 1000
    full = replace(ask(zero(2)), changes={}).predict().ledger["gpu"]["deepspeed_buffers"]
    assert full == 2 * 500_000_000, "however small the model is"


def of_axis(strategy: Configuration, text: str, ranks: int = 4, **work: Any) -> Prediction:
    """The prediction of a row of an axis, for 6.9 billion parameters."""
    model = replace(TOY, layers=100, layer=(34_500_000, 34_500_000), tied_embeddings=False)
    question = ask(strategy, ranks, model=model, **work)
    (value,) = axis_rows.read_axes([text])[0]
    facts = RowFacts(
        stage=strategy.stage,
        offload_optimizer=None if strategy.offload_optimizer == "none" else strategy.offload_optimizer,
        offload_param=None,
        grad_accum=1,
        ranks=ranks,
        parameters=6_900_000_080,
    )
    setting = axis_rows.setting_of((value,), facts)
    config = overlay(question.config(), setting.config)
    return memory.predict(model, replace(question.workload, **setting.workload), question.placement, config)


def at_rest(prediction: Prediction) -> int:
    row = prediction.ledger["gpu"]
    return row["parameters"] + row["gradients"] + row["optimizer_states"]


def test_states_in_bf16_take_what_was_published() -> None:
    """DeepSpeed's example, 6.9 billion parameters on four GPUs: 25.74 GiB resident with fp32 states, 16.17 in bf16."""
    full, less = (at_rest(of_axis(zero(3), f"bf16_states={value}")) / GB for value in ("off", "all"))
    assert full == pytest.approx(25.74, rel=0.01)
    assert less == pytest.approx(16.17, rel=0.01)


def test_a_16_bit_master_alone_keeps_the_moments_in_fp32() -> None:
    def host(value: str) -> Mapping[str, int]:
        return of_axis(offload("cpu_optimizer", 3), f"bf16_states={value}").ledger["cpu"]

    part = 6_900_000_080 // 4
    assert host("off")["optimizer_states"] - host("master")["optimizer_states"] == pytest.approx(2 * part, rel=1e-6)
    assert host("master")["optimizer_states"] - host("all")["optimizer_states"] == pytest.approx(4 * part, rel=1e-6)


def test_a_second_copy_of_the_parameters_is_split_among_the_ranks_of_hpz() -> None:
    one, two = (of_axis(zero(3), f"hpz={ranks}").ledger["gpu"]["parameters"] for ranks in (1, 2))
    assert two - one == pytest.approx(2 * 6_900_000_000 / 2, rel=1e-6)  # bytes; small tensors stay gathered


def test_the_bucket_of_stage_3_has_the_format_that_is_sent() -> None:
    sent = {
        value: of_axis(zero(3), f"communication_data_type={value}").ledger["gpu"]["deepspeed_buffers"]
        for value in ("bf16", "fp32")
    }
    assert sent["fp32"] == 2 * sent["bf16"]


def test_under_autocast_parameters_are_fp32_and_activations_are_not_predicted() -> None:
    found = of_axis(zero(3), "torch_autocast=bf16")
    assert found.ledger["gpu"]["parameters"] == 2 * of_axis(zero(3), "torch_autocast=off").ledger["gpu"]["parameters"]
    assert found.unknown is not None


def test_reducing_within_backward_frees_gradients_at_stage_1_unless_they_accumulate() -> None:
    def gradients(value: str, **work: Any) -> int:
        return of_axis(zero(1), f"overlap_comm={value}", **work).ledger["gpu"]["gradients"]

    assert gradients("true") < gradients("false") / 3
    assert gradients("true", grad_accum=2) == gradients("false", grad_accum=2)


def test_tensors_below_the_threshold_stay_gathered_with_their_padding() -> None:
    # 3 ranks, threshold 24: 24 + 6 per layer stay, no padding; the two of 40 become 42 each when they are gathered.
    found = gathered_elements(case(3, persistence_elements=24, prefetch_elements=0, max_reuse_elements=0))
    assert found == GatheredElements(persistent=60, peak=60 + 42)
    # One GPU gathers nothing unless its parameters are elsewhere; a large reuse distance keeps a small model whole.
    assert gathered_elements(case(1)) == GatheredElements(persistent=0, peak=0)
    assert gathered_elements(case(1, offload_param="cpu")).peak == 140
    assert gathered_elements(case(2, persistence_elements=0)).peak == 140


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 50))
def test_gathered_lies_between_the_largest_tensor_and_the_model(reuse: int, prefetch: int, threshold: int) -> None:
    found = gathered_elements(
        case(2, persistence_elements=threshold, prefetch_elements=prefetch, max_reuse_elements=reuse)
    )
    assert max(40, found.persistent) <= found.peak <= 140


def test_host_memory_counts_every_rank_of_a_node_but_not_of_the_job() -> None:
    one_node = replace(llama(offload("cpu_optimizer"), 16), ranks_per_node=16).predict()
    two_nodes = replace(llama(offload("cpu_optimizer"), 16), ranks_per_node=8).predict()
    assert one_node.host_bytes == 2 * two_nodes.host_bytes
    question = llama(offload("cpu_full"), 2)
    assert question.predict().host["pinned_rounding"] > 0, "pinned memory comes in powers of two"
    on_cpu = replace(question, placement=replace(question.placement, accelerator="cpu")).predict()
    assert on_cpu.gpu_bytes == 0
    assert set(on_cpu.ledger) == {"cpu"}
    assert "pinned_rounding" not in on_cpu.host


def test_nothing_of_a_swapped_state_stays_in_host_memory() -> None:
    found = llama(offload("nvme")).predict()
    assert "optimizer_states" not in found.host
    # 8 ranks: master, two moments and the fp32 gradient of 6.74 B parameters, and the 16-bit parameters.
    assert found.nvme_bytes == pytest.approx(18 * 6_738_415_616, rel=0.01)


def test_the_verdict_turns_at_nine_tenths_and_at_all_of_the_card() -> None:
    verdict = {
        899: FITS,
        900: FITS,
        901: TIGHT,
        1000: TIGHT,
        1001: DOES_NOT_FIT,
    }
    assert {used: prediction(gpu=used).verdict(1000) for used in verdict} == verdict
    assert prediction(gpu=1, host=2000).verdict(1000, 1000) == DOES_NOT_FIT, "the worse of both decides"
    assert prediction(gpu=1, host=2000).verdict(1000) == FITS


def prediction(gpu: int = 0, host: int = 0) -> Prediction:
    return Prediction(
        gpu={"parameters": gpu},
        host={"parameters": host},
        nvme={},
        phase="loss",
        ledger={},
        activation_bytes=0,
        checkpointed_activation_bytes=0,
        logits_and_loss_bytes=0,
    )


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(EVERY), st.integers(1, 16), st.integers(1, 16))
def test_a_larger_batch_never_takes_less(strategy: Configuration, batch: int, ranks: int) -> None:
    small, large = (llama(strategy, ranks, batch_size=size).predict() for size in (batch, batch + 1))
    assert small.gpu_bytes <= large.gpu_bytes


def test_more_gpus_never_take_more_each(subtests: pytest.Subtests) -> None:
    for strategy in EVERY[1:]:
        with subtests.test(strategy.name):
            found = [llama(strategy, ranks).predict().gpu_bytes for ranks in (2, 4, 8, 16, 64)]
            assert found == sorted(found, reverse=True)


def test_the_prediction_is_the_fullest_of_the_moments(subtests: pytest.Subtests) -> None:
    for strategy in EVERY:
        with subtests.test(strategy.name):
            question = llama(strategy)
            prediction, moments = question.predict(), question.gpu_bytes_by_moment()
            totals = {moment: sum(sizes.values()) for moment, sizes in moments.items()}
            always = prediction.gpu["overhead"] + prediction.gpu["workspaces"]
            assert max(totals.values()) == totals[prediction.phase] == prediction.gpu_bytes - always
            assert moments[prediction.phase].items() <= prediction.gpu.items()


def test_a_moment_in_which_nothing_is_on_the_gpu_has_no_bytes() -> None:
    """In the step with all states on the disk, and without a bucket, a rank holds nothing on its GPU."""
    block = {"contiguous_gradients": False, "stage3_param_persistence_threshold": 0}
    question = replace(llama(offload("nvme")), changes={"zero_optimization": block})
    moments = question.gpu_bytes_by_moment()
    assert moments["update"] == {}
    assert moments["loss"]["activations"] > 0


def test_min_gpus_is_enough_and_one_less_is_not() -> None:
    question, card = llama(zero(3), 1), 40 * GB
    count = min_gpus(question, card)
    assert count is not None
    assert 1 < count <= 8
    for ranks, enough in ((count, True), (count - 1, False)):
        there = replace(question, placement=replace(question.placement, num_gpus=ranks))
        assert fits(there, card) is enough


def test_no_number_of_gpus_helps_a_strategy_that_splits_nothing() -> None:
    assert min_gpus(llama(zero(0)), 80 * GB) is None


def test_max_batch_fits_and_one_more_does_not() -> None:
    question, card = llama(zero(3)), 80 * GB
    size = max_batch(question, card)
    assert size is not None
    for batch, enough in ((size, True), (size + 1, False)):
        assert fits(replace(question, workload=replace(question.workload, batch_size=batch)), card) is enough


def test_no_batch_fits_where_the_model_does_not() -> None:
    assert max_batch(llama(zero(0)), 24 * GB) is None


def test_a_plan_that_fits_needs_no_change() -> None:
    assert smallest_change(llama(zero(3)), 80 * GB) is None


def test_the_gentlest_change_comes_first() -> None:
    change = smallest_change(llama(zero(3), 8, batch_size=6), 80 * GB)
    assert isinstance(change, Change)
    assert change.text == "activation checkpointing"
    assert change.prediction.verdict(80 * GB) == FITS


def test_where_one_change_is_not_enough_two_are_named() -> None:
    change = smallest_change(llama(zero(1), 2, batch_size=8), 24 * GB)
    assert change is not None
    assert change.text.startswith("activation checkpointing, ")
    assert change.prediction.verdict(24 * GB) != DOES_NOT_FIT


def gpt2(strategy: Configuration, ranks: int = 1, **work: Any) -> PlannedTrial:
    facts = preset("gpt2")
    question = ask(strategy, ranks, model=find_profile(facts, 1024), **{"seq_length": 1024, **work})
    return replace(question, changes={})


def test_a_smaller_batch_that_fits_is_offered_though_one_more_would_be_tight() -> None:
    question, card = gpt2(zero(0), batch_size=32), 14 * GB + GB * 6 // 10
    tight, roomy = max_batch(question, card), max_batch(question, card, tight=False)
    change = smallest_change(question, card)
    assert tight is not None
    assert roomy is not None
    assert roomy < tight
    assert change is not None
    assert change.text == f"batch size {roomy}"
    assert change.prediction.verdict(card) == FITS


def test_a_change_of_two_is_named_before_one_of_three() -> None:
    # A toy whose layers take 100 MB each of a sequence, but 1 MB with checkpointing.
    heavy = Activations(
        plain=Polynomial(fixed={}, per_layer={"bs": 100 * 2**20}),
        checkpointed=Polynomial(fixed={}, per_layer={"bs": 2**20}),
        loss=Polynomial(fixed={"bs": 150 * 2**20}, per_layer={"bs": 100 * 2**20}),
    )
    question = ask(zero(1), model=replace(TOY, activations={"bf16": heavy}), batch_size=64)
    one = replace(question, workload=replace(question.workload, activation_checkpointing=True, batch_size=1))
    change = smallest_change(question, int(one.predict().gpu_bytes * 1.12))
    assert change is not None
    assert change.text == "activation checkpointing, batch size 1"


def test_gpus_needed_are_counted_in_nodes_of_the_size_there_is() -> None:
    question = replace(llama(zero(3), 1), ranks_per_node=6)
    count = min_gpus(question, 20 * GB)
    assert count is not None
    assert count > 6
    assert count % 6 == 0


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(EVERY), st.integers(1, 40), st.integers(8, 80), st.sampled_from([1, 4, 6, 8]))
def test_gpus_needed_never_contradict_the_verdict(strategy: Configuration, ranks: int, card_gb: int, node: int) -> None:
    question, card, host = replace(llama(strategy, ranks), ranks_per_node=node), card_gb * GB, 300 * GB
    if fits(question, card, host):
        count = min_gpus(question, card, host)
        assert count is not None
        assert count <= ranks


def test_where_too_many_ranks_fill_the_host_fewer_are_offered() -> None:
    question, card = replace(llama(zero(3), 8), ranks_per_node=8), 192 * GB
    host = question.predict().host_bytes * 3 // 4
    change = smallest_change(question, card, host)
    assert change is not None
    assert change.text == "4 GPUs"
    assert change.prediction.host_bytes <= host


def test_a_later_stage_on_fewer_gpus_is_tried_where_the_host_is_short() -> None:
    question, card = replace(llama(zero(0), 64), ranks_per_node=64), 22 * GB
    change = smallest_change(question, card, 32 * GB)  # 64 processes take 96 GB
    assert change is not None
    assert "ZeRO-" in change.text
    assert change.text.endswith("16 GPUs")


def test_a_later_stage_together_with_more_gpus_is_tried() -> None:
    question, card = llama(zero(0), 1), 22 * GB
    change = smallest_change(question, card, 16 * GB)  # the host has no room for any offload
    assert change is not None
    assert "ZeRO-" in change.text
    assert change.text.endswith("GPUs")
    assert change.prediction.verdict(card, 16 * GB) != DOES_NOT_FIT


def test_a_card_too_small_for_anything_gets_no_advice() -> None:
    assert smallest_change(llama(zero(0)), 1 * GB // 4) is None


def test_the_tier_that_is_short_is_named_and_no_other() -> None:
    found = llama(offload("cpu_full")).predict()
    room, none = 2 * max(found.gpu_bytes, found.host_bytes), 1
    assert found.decisive_tiers(room, room) == ()
    assert found.decisive_tiers(room, none) == ("host",)
    assert found.decisive_tiers(none, None) == ("gpu",)
    assert found.decisive_tiers(none, none) == ("gpu", "host")
    assert found.decisive_tiers(int(found.gpu_bytes * 1.05), none) == ("host",)  # tight is not why it does not fit


@pytest.mark.parametrize("value", ["auto", None])
def test_what_deepspeed_reads_as_its_default_is_the_default(value: object) -> None:
    question = replace(ask(zero(2)), changes={})
    config = question.config()
    config["zero_optimization"]["reduce_bucket_size"] = value
    assert ZeroSettings.from_config(config) == ZeroSettings.from_config(question.config())


def test_the_batch_and_precision_of_the_configuration_count() -> None:
    question = llama(zero(3))
    config = {**question.config(), "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": False}}
    found = memory.predict(question.profile, question.workload, question.placement, config)
    twice = llama(zero(3), batch_size=2, precision="fp32").predict()
    assert found.gpu == twice.gpu


def test_a_prediction_survives_its_json() -> None:
    asked = llama(offload("nvme"))
    found = asked.predict()
    stored = replace(found, alternatives=tuple(alternatives(asked)), savings=tuple(savings(asked)))
    assert stored.alternatives
    assert stored.savings
    trial_of_file = trial(prediction=json.loads(json.dumps(stored.to_dict())))
    assert trial_predictions.stored_prediction(trial_of_file) == stored


def test_a_miss_is_more_than_a_tenth_and_of_a_gpus_peak_256_mb() -> None:
    for ratio, missed in ((1.09, False), (1.11, True), (0.91, False), (0.89, True)):
        assert trial_predictions.is_miss(ratio) is missed
    for peak, missed in ((1_000_000_000, False), (3_000_000_000, True)):
        record = success(trial(), gpu_peak_bytes=peak)
        assert trial_predictions.is_gpu_miss(1.12, record) is missed
        assert trial_predictions.is_gpu_miss(1.09, record) is False


def test_on_gpus_the_allocators_peak_is_what_was_predicted() -> None:
    found = replace(prediction(gpu=900), gpu={"parameters": 900, "overhead": 5000})
    record = success(trial(prediction=found.to_dict()), gpu_peak_bytes=1000)
    lighter = replace(record.ranks[0], rank=1, gpu_peak_bytes=800)
    record = replace(record, ranks=(*record.ranks, lighter))
    assert trial_predictions.predicted_over_measured(record) == pytest.approx(0.9)
    failed = failure(trial(prediction=found.to_dict()))
    assert trial_predictions.predicted_over_measured(failed) is None
    assert trial_predictions.predicted_over_ledger(failed) is None


def test_what_is_assumed_outside_the_allocator_is_measured_on_the_fullest_rank() -> None:
    """In use 11 GB with 9 GB reserved at that moment, and a peak of 10; on the other rank half a GB more."""
    pair = success(trial(on=placement(accelerator="cuda", num_gpus=2)))
    other = replace(pair.ranks[1], gpu_device_used_bytes=int(11.5 * 2**30))
    (row,) = rows_of([make_run(replace(pair, ranks=(pair.ranks[0], other)), None, None)])
    assert row["gpu_outside_allocator_gb"] == 2.5
    assert trial_predictions.outside_allocator_bytes(success(trial()).ranks) is None
    low, high = memory.NCCL_RANGE_BYTES
    assert low < memory.NCCL_BYTES < high


def test_without_a_gpu_only_the_ledger_is_compared() -> None:
    """What stands beside it in the table is the processes' resident memory, which was not what is predicted."""
    found = replace(prediction(), ledger={"cpu": {"parameters": 300, "gradients": 100}, "nvme": {"parameters": 100}})
    measured = {"cpu": {"parameters": 380, "other": 999}, "nvme": {"parameters": 20}}
    record = success(trial(prediction=found.to_dict()), ledger=measured)
    (row,) = rows_of([make_run(record)])
    assert (row["predicted_over_measured"], row["predicted_over_ledger"]) == (None, pytest.approx(1.25))


@pytest.mark.parametrize("stage", [1, 2])
def test_fp32_accumulation_changes_nothing_where_parameters_are_fp32(stage: int) -> None:
    """DeepSpeed keeps a gradient of its own only where the number formats differ (use_separate_grad_accum)."""
    plain = ask(zero(stage), 3, precision="fp32", grad_accum=2)
    config = overlay(plain.config(), {"data_types": {"grad_accum_dtype": "fp32"}})
    same = memory.predict(TOY, plain.workload, plain.placement, config)
    assert same.ledger == plain.predict().ledger
