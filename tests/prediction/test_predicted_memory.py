"""Predicted memory: small cases by hand and its laws; tests/integration trains real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_bench.config import axis_rows, deepspeed_keys
from ds_bench.config.axes import RowFacts
from ds_bench.config.deepspeed_config import overlay
from ds_bench.config.spec import Configuration
from ds_bench.config.strategies import make_configuration, named_strategy
from ds_bench.prediction import predicted_memory
from ds_bench.prediction.fit_verdict import DOES_NOT_FIT, FITS, TIGHT, GpuNeed
from ds_bench.prediction.inputs import MemoryInputs, ZeroSettings
from ds_bench.prediction.model_profile import Activations, ModelProfile, Polynomial, find_profile
from ds_bench.prediction.predicted_memory import Prediction
from ds_bench.prediction.stage_3 import GatheredElements, gathered_elements
from ds_bench.prediction.stages_0_to_2 import owned_elements
from tests.support.fakes import offload, preset, zero
from tests.support.predictions import EVERY, GB, TOY, ask, llama


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
    assert found.gpu_bytes - predicted_memory.CONTEXT_BYTES - found.gpu["workspaces"] == 24 * 6_738_415_616
    assert found.gpu_bytes == sum(found.gpu.values())
    # cuBLAS has a workspace for each of two threads, outside the ledger.
    for capability, mib in (((9, 0), 64), ((8, 0), 16.25), (None, 16.25)):
        question = llama(zero(3))
        asked = replace(question, placement=replace(question.placement, compute_capability=capability)).predict()
        assert asked.gpu["workspaces"] == mib * 2**20
        assert "workspaces" not in asked.ledger["gpu"]


def test_stage_2_is_worked_by_hand() -> None:
    """On 2 ranks 140 needs no padding: 70 each. Rank 0 touches 40, 24 and 6 and ends there, rank 1 has the rest."""
    assert ask(zero(2)).predict().ledger["gpu"] == {
        "parameters": 280,
        "optimizer_states": 12 * 70,
        "gradients": 2 * 70,
        "deepspeed_buffers": 2,  # a bucket of one element
        "activations": 2100,
    }


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 40))
@example(list(TOY.tensors), 4)  # 144 with padding, 36 each: [36,72) touches 40, 24, 6 and 24 (begins at 70): 94
def test_fullest_rank_is_found_without_looking_at_every_one(tensors: list[int], ranks: int) -> None:
    """A tensor on the border of two ranks has its gradient on both."""
    part = -(-sum(tensors) // (2 * ranks)) * 2
    most = 0
    for start in range(0, part * ranks, part):
        begins = [sum(tensors[:index]) for index in range(len(tensors))]
        touched = [n for n, begin in zip(tensors, begins, strict=True) if begin < start + part and begin + n > start]
        most = max(most, sum(touched) + max(0, start + part - max(start, sum(tensors))))
    assert owned_elements(tensors, ranks) == most


def test_tied_embedding_sums_two_gradients_into_a_third() -> None:
    """Two tensors of 10,000 bf16 elements until backward has left the first layer."""
    tied = replace(TOY, tied_embeddings=True, before=(10_000,), after=())
    plain, found = (ask(zero(3), model=each).predict() for each in (replace(tied, tied_embeddings=False), tied))
    assert (plain.phase, found.phase) == ("enter", "leave")
    assert found.gpu["temporaries"] - plain.gpu["temporaries"] == 2 * 2 * 10_000
    # At stage 0 the LM head's gradient is the only one as backward enters the last layer.
    heavy = Polynomial(fixed={}, per_layer={"bs": 10**6})
    alone = {"bf16": Activations(plain=heavy, loss=heavy)}
    for model, head in ((replace(tied, activations=alone), 10_000), (replace(TOY, activations=alone), 40)):
        entered = ask(zero(0), model=model).predict()
        assert (entered.phase, entered.gpu["gradients"]) == ("enter", 2 * head)
        # Of a later micro-batch it is a second one, until it is added to the first.
        later = ask(zero(0), model=model, grad_accum=2).predict()
        assert (later.phase, later.gpu["temporaries"]) == ("enter", 2 * head)


def test_model_built_whole_on_every_rank_is_the_fullest_moment() -> None:
    """Without zero.Init at stage 3, before the first matrix product; 8 ranks of a node have it in host memory too."""
    found = replace(llama(zero(3), 64, seq_length=1, zero_init=False), ranks_per_node=8).predict()
    assert (found.phase, found.gpu["parameters"]) == ("build", 2 * 6_738_415_616)
    assert "workspaces" not in found.gpu
    assert found.host["parameters"] == 8 * 2 * 6_738_415_616
    assert llama(zero(3), 64, seq_length=1).predict().phase != "build"


def test_peak_of_activations_is_the_loss_or_with_checkpointing_one_recomputed_layer() -> None:
    found = ask(zero(3), 2, seq_length=1000).predict()
    assert found.phase == "loss"
    assert found.gpu["activations"] == 1000 * 2100
    assert found.gpu["logits_and_loss"] == 1000 * 200
    found = ask(zero(3), 2, seq_length=1000, activation_checkpointing=True).predict()
    assert found.ledger["gpu"]["activations"] == 1000 * 120
    assert found.phase == "enter"
    assert found.gpu["activations"] == 1000 * (2 * 10 + 1000)


@pytest.mark.parametrize(("stage", "copy_bytes"), [(2, 8 * 525_336_576), (3, 2 * 525_336_576 + 8 * 250_000_000)])
def test_offloaded_gradient_is_copied_to_fp64_for_its_norm(stage: int, copy_bytes: int) -> None:
    """Llama-3.1-8B's LM head of 128,256 × 4,096, on one GPU; stage 3 takes 250 million elements at a time."""
    facts = preset("meta-llama/Llama-3.1-8B")
    question = ask(offload("cpu_optimizer", stage), 1, model=find_profile(facts, 2048), seq_length=2048)
    found = question.predict()
    assert found.phase == "enter"
    assert found.gpu["temporaries"] == 2 * 525_336_576 + copy_bytes


def test_overlapping_communication_doubles_the_bucket_however_small_the_model_is() -> None:
    zero_block = {"overlap_comm": True, "reduce_bucket_size": 1000}
    for changes, elements in (({"zero_optimization": zero_block}, 2 * 1000), ({}, 500_000_000)):
        found = replace(ask(zero(2)), changes=changes).predict()
        assert found.ledger["gpu"]["deepspeed_buffers"] == 2 * elements


@pytest.mark.parametrize(
    ("row", "changes", "gradients"),
    [
        (zero(1), {}, 2 * 70),
        (zero(1), {"overlap_comm": False}, 2 * 140),
        # Of the other rank's, the tensor of 40 that does not fit into the bucket stays.
        (zero(1), {"reduce_bucket_size": 30}, 2 * (70 + 40)),
        (zero(1), {"contiguous_gradients": False}, 2 * 140),
        # Round robin: 40, 6, 6, 24, 24, 40. Rank 1 begins within the first of 24.
        (zero(1), {"reduce_bucket_size": 30, "round_robin_gradients": True}, 2 * (88 + 40)),
        # One buffer of the largest tensor.
        (offload("cpu_optimizer", 1), {}, 2 * 40),
        (offload("cpu_optimizer", 1), {"reduce_bucket_size": 30, "contiguous_gradients": False}, 2 * (40 + 40)),
    ],
)
def test_stage_1_with_overlap_keeps_what_is_not_in_a_bucket(
    row: Configuration, changes: dict[str, Any], gradients: int
) -> None:
    zero_block = {"overlap_comm": True, "reduce_bucket_size": 1000, **changes}
    found = replace(ask(row), changes={"zero_optimization": zero_block}).predict()
    assert found.ledger["gpu"]["gradients"] == gradients


def of_axis(strategy: Configuration, text: str, **work: Any) -> Prediction:
    """The prediction of a row of an axis, for 6.9 billion parameters on four GPUs."""
    model = replace(TOY, layers=100, layer=(34_500_000, 34_500_000), tied_embeddings=False)
    question = ask(strategy, 4, model=model, **work)
    (value,) = axis_rows.read_axes([text])[0]
    facts = RowFacts(
        stage=strategy.stage,
        offload_optimizer=None if strategy.offload_optimizer == "none" else strategy.offload_optimizer,
        offload_param=None,
        grad_accum=1,
        ranks=4,
        parameters=6_900_000_080,
    )
    setting = axis_rows.setting_of((value,), facts)
    config = overlay(question.config(), setting.config)
    return predicted_memory.predict(model, replace(question.workload, **setting.workload), question.placement, config)


def test_settings_of_axes_change_the_ledger_by_hand() -> None:
    def of(strategy: Configuration, tier: str, category: str, axis: str, *values: str, **work: Any) -> list[int]:
        return [of_axis(strategy, f"{axis}={value}", **work).ledger[tier][category] for value in values]

    # DeepSpeed's example: 25.74 GiB resident with fp32 states, 16.17 in bf16.
    at_rest = ("parameters", "gradients", "optimizer_states")
    by_category = [of(zero(3), "gpu", category, "bf16_states", "off", "all") for category in at_rest]
    full, less = (sum(sizes) / GB for sizes in zip(*by_category, strict=True))
    assert (full, less) == (pytest.approx(25.74, rel=0.01), pytest.approx(16.17, rel=0.01))
    part, cpu = 6_900_000_080 // 4, offload("cpu_optimizer", 3)
    off, master, every = of(cpu, "cpu", "optimizer_states", "bf16_states", "off", "master", "all")
    assert off - master == pytest.approx(2 * part, rel=1e-6)  # the moments stay in fp32
    assert master - every == pytest.approx(4 * part, rel=1e-6)
    # A second copy of the parameters is split among two ranks; small tensors stay gathered.
    one, two = of(zero(3), "gpu", "parameters", "hpz", "1", "2")
    assert two - one == pytest.approx(2 * 6_900_000_000 / 2, rel=1e-6)
    # Stage 3's bucket has the format that is sent.
    bf16, fp32 = of(zero(3), "gpu", "deepspeed_buffers", "communication_data_type", "bf16", "fp32")
    assert fp32 == 2 * bf16
    # Under autocast parameters are fp32, and the activations are unknown.
    plain, autocast = of(zero(3), "gpu", "parameters", "torch_autocast", "off", "bf16")
    assert autocast == 2 * plain
    assert of_axis(zero(3), "torch_autocast=bf16").unknown is not None
    # At stage 1, gradients that accumulate stay.
    within, after = of(zero(1), "gpu", "gradients", "overlap_comm", "true", "false", grad_accum=2)
    assert within == after


def test_tensors_below_the_threshold_stay_gathered_with_their_padding() -> None:
    # 3 ranks, threshold 24: 24 + 6 per layer stay, no padding; the two of 40 become 42 each when they are gathered.
    found = gathered_elements(case(3, persistence_elements=24, prefetch_elements=0, max_reuse_elements=0))
    assert found == GatheredElements(persistent=60, peak=60 + 42)
    # One GPU gathers nothing unless its parameters are elsewhere; a large reuse distance keeps a small model whole.
    assert gathered_elements(case(1)) == GatheredElements(persistent=0, peak=0)
    assert gathered_elements(case(1, offload_param="cpu")).peak == 140
    assert gathered_elements(case(2, persistence_elements=0)).peak == 140
    # Before DeepSpeed 0.19.3 what comes before the layers stays too, tied to the LM head or not.
    asked = case(2, persistence_elements=20, prefetch_elements=0)
    for version, more in (("0.19.2", TOY.before[0]), ("0.19.3", 0)):
        with deepspeed_keys.use_version(version):
            assert gathered_elements(asked).persistent == 2 * 6 + more
    # Without known layers only the embedding is known to come before them.
    unlayered = replace(asked, profile=replace(TOY, before=(*TOY.tensors,), layer=(), after=()))
    with deepspeed_keys.use_version("0.19.2"):
        assert gathered_elements(unlayered).persistent == gathered_elements(asked).persistent


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


def test_the_verdict_turns_at_the_least_and_at_the_reserved_memory_of_a_card() -> None:
    need = GpuNeed(least_bytes=900, reserved_bytes=1000, phase="step")

    def verdict(gpu: int, host: int | None = None) -> str:
        return replace(llama(zero(3)).predict(), need=need, host={"parameters": 2000}).verdict(gpu, host)

    by_card = {899: DOES_NOT_FIT, 900: TIGHT, 999: TIGHT, 1000: FITS}
    assert {card: verdict(card) for card in by_card} == by_card
    assert [verdict(1000, host) for host in (1999, 2000, 2223)] == [DOES_NOT_FIT, TIGHT, FITS]
    assert verdict(899, 4000) == DOES_NOT_FIT, "the worse of both decides"


def test_cpu_optimizer_below_stage_3_needs_most_where_initialize_clones_the_part() -> None:
    """Llama-2-7B on one GPU: 2 bytes of each parameter in the flat buffer, and 2 in its clone."""
    found = llama(offload("cpu_optimizer", 2), 1, seq_length=1).predict()
    allocated, outside = 4 * 6_738_415_616, predicted_memory.CONTEXT_BYTES
    assert (found.phase, found.gpu_need.phase, found.gpu_bytes) == ("initialize", "initialize", allocated + outside)
    assert found.gpu_need == GpuNeed.by_rule(allocated, outside, "initialize")
    assert found.verdict(24 * GB) == DOES_NOT_FIT
    assert llama(offload("cpu_optimizer", 2), 8, seq_length=1).predict().gpu_need.phase == "backward"


def test_terms_outside_and_inside_the_allocator_are_worked_by_hand() -> None:
    # DeepSpeed has the world's communicator and its clone, and one more for hpZ; torch has one.
    by_ranks = {1: 0, 2: 2 * 544 * 2**20, 8: 2 * 688 * 2**20}
    assert {ranks: llama(zero(2), ranks).predict().terms["nccl"] for ranks in by_ranks} == by_ranks
    assert of_axis(zero(3), "hpz=2").terms["nccl"] == 3 * 688 * 2**20
    fsdp2 = make_configuration(named_strategy("fsdp2"))
    assert llama(fsdp2).predict().terms["nccl"] == 688 * 2**20
    found = llama(zero(3), batch_size=3, seq_length=1000).predict()
    # Llama-2-7B: 32 heads of 128 elements, and 32,000 logits.
    assert found.terms["attention_gradient"] == 4 * 3 * 1000 * 4096
    assert found.terms["kept_logits"] == 2 * 3 * 1000 * 32_000
    assert llama(zero(3), loss="liger").predict().terms["kept_logits"] == 0
    assert llama(zero(3), attention="eager").predict().terms["attention_gradient"] == 0


def test_settings_without_a_formula_are_named_in_the_need() -> None:
    row = replace(llama(zero(2)), changes={"zero_optimization": {"zenflow": {}}})
    assert (row.predict().gpu_need.unknowns, llama(zero(2)).predict().gpu_need.unknowns) == (("ZenFlow's buffers",), ())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(EVERY), st.integers(1, 16), st.integers(1, 16))
def test_a_larger_batch_never_takes_less(strategy: Configuration, batch: int, ranks: int) -> None:
    small, large = (llama(strategy, ranks, batch_size=size).predict() for size in (batch, batch + 1))
    assert small.gpu_bytes <= large.gpu_bytes


def test_more_gpus_never_take_more_each() -> None:
    for strategy in EVERY[1:]:
        found = [llama(strategy, ranks).predict().gpu_bytes for ranks in (2, 4, 8, 16, 64)]
        assert found == sorted(found, reverse=True), strategy.name


def test_decisive_tiers_are_those_that_are_short() -> None:
    found = llama(offload("cpu_full")).predict()
    room, none = 2 * max(found.gpu_bytes, found.host_bytes), 1
    tight = int(found.gpu_bytes * 1.05)  # which is not why it does not fit
    for gpu, host, tiers in (
        (room, room, ()),
        (room, none, ("host",)),
        (none, None, ("gpu",)),
        (none, none, ("gpu", "host")),
        (tight, none, ("host",)),
    ):
        assert found.decisive_tiers(gpu, host) == tiers


def test_configuration_overrides_the_workload_and_auto_is_deepspeeds_default() -> None:
    plain = replace(ask(zero(2)), changes={})
    for value in ("auto", None):
        config = plain.config()
        config["zero_optimization"]["reduce_bucket_size"] = value
        assert ZeroSettings.from_config(config) == ZeroSettings.from_config(plain.config())
    question = llama(zero(3))
    config = {**question.config(), "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": False}}
    found = predicted_memory.predict(question.profile, question.workload, question.placement, config)
    twice = llama(zero(3), batch_size=2, precision="fp32").predict()
    assert found.gpu == twice.gpu


@pytest.mark.parametrize("stage", [1, 2])
def test_fp32_accumulation_changes_nothing_if_parameters_are_fp32(stage: int) -> None:
    """DeepSpeed keeps a gradient of its own only where the number formats differ (use_separate_grad_accum)."""
    plain = ask(zero(stage), 3, precision="fp32", grad_accum=2)
    config = overlay(plain.config(), {"data_types": {"grad_accum_dtype": "fp32"}})
    same = predicted_memory.predict(TOY, plain.workload, plain.placement, config)
    assert same.ledger == plain.predict().ledger
