"""The replay of a training step: hand-worked trades, agreement with the ledgers, and its laws."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from ds_bench.config.spec import Configuration
from ds_bench.config.strategies import make_configuration, named_strategy
from ds_bench.models.presets import preset_names
from ds_bench.prediction import allocation_replay, allocation_trace, formula_profile, replayed_need
from ds_bench.prediction.allocation_trace import ALLOCATE, FREE, TraceVariant, full_events
from ds_bench.prediction.fit_verdict import DOES_NOT_FIT, FITS, TIGHT
from ds_bench.prediction.model_profile import Variant
from ds_bench.prediction.predicted_memory import inputs_of
from ds_bench.prediction.what_if import PlannedTrial
from tests.support.fakes import offload, preset, zero
from tests.support.predictions import GB, TOY, llama

WORKSPACE = 8_519_680


@pytest.fixture(autouse=True)
def _no_cached_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed_need.model_profile, "cached_answer", lambda _key: None)


def replayed(planned: PlannedTrial, **how: Any) -> allocation_replay.ReplayResult:
    work, config = planned.workload, planned.config()
    facts = planned.profile.facts
    assert facts is not None
    checkpointing = work.activation_checkpointing
    trace = allocation_trace.find_trace(facts, work.seq_length, checkpointing=checkpointing, element_bytes=2)
    assert trace is not None
    events = full_events(trace, planned.profile, work.batch_size, work.seq_length)
    inputs = inputs_of(planned.profile, work, planned.placement, config, "deepspeed")
    return allocation_replay.replay(inputs, events, workspace_bytes=WORKSPACE, **how)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "strategy", [*map(zero, range(4)), offload("cpu_optimizer", 2), offload("cpu_optimizer"), offload("cpu_full")]
)
def test_what_is_allocated_agrees_with_the_ledgers(strategy: Configuration, checkpointing: bool) -> None:
    """Two independent ways to the peak: formulas of each moment, and every allocation in turn."""
    planned = llama(strategy, 8, seq_length=8192, activation_checkpointing=checkpointing)
    by_formula = planned.predict()
    allocated = by_formula.gpu_bytes - by_formula.gpu["overhead"]
    found = replayed(planned)
    if strategy.stage == 2 and strategy.offloads and checkpointing:
        # With room the parameters are flattened next to themselves: 4 bytes of each.
        assert (found.phase, found.allocated_bytes) == ("initialize", pytest.approx(4 * 6_738_415_616, rel=0.001))
    else:
        assert found.allocated_bytes == pytest.approx(allocated, rel=0.05)
    assert found.allocated_bytes <= found.reserved_bytes


def test_least_capacity_runs_and_a_little_less_does_not() -> None:
    planned = llama(zero(3), 8, seq_length=4096)
    need = replace(planned, replays="always").judge(None).gpu_need
    outside = planned.predict().gpu["overhead"]
    least, reserved = need.least_bytes - outside, need.reserved_bytes - outside
    assert (need.method, replayed(planned).reserved_bytes) == ("replay", reserved)
    assert not replayed(planned, capacity_bytes=least).ran_out
    assert replayed(planned, capacity_bytes=int(0.99 * least)).ran_out
    assert replayed(planned, expandable_segments=True).reserved_bytes < reserved


class Fragmenting(allocation_replay.Rank):
    """Reserves 64 MiB with room to spare. Below 46 MiB the segment of 20 must be freed before the one of 24, and 44 are
    enough; from 46 on both stay, each is split, and 18 MiB find room in neither."""

    def initialize(self, *, zero_init: bool) -> None:  # noqa: ARG002
        self.allocate(512)  # a segment of 2 MiB for small blocks, workspaces included
        for size in (20, 24):
            self.pulse(size * 2**20)
        for size in (12, 10, 18):
            self.allocate(size * 2**20)

    def end_backward(self) -> None: ...

    def update(self) -> None: ...


def test_verdict_is_the_one_of_a_replay_on_the_card_where_more_memory_runs_out() -> None:
    planned = llama(zero(3))
    inputs = inputs_of(planned.profile, planned.workload, planned.placement, planned.config(), "deepspeed")
    how: dict[str, Any] = {"workspace_bytes": 0, "rank_type": Fragmenting}
    runs = {44, 45, *range(64, 67)}
    for card in range(36, 67):
        is_enough = not allocation_replay.replay(inputs, (), capacity_bytes=card * 2**20, **how).ran_out
        assert is_enough == (card in runs), card
        for verdict_only in (False, True):
            least, _ = allocation_replay.least_capacity(
                inputs,
                (),
                low_bytes=42 * 2**20,
                high_bytes=64 * 2**20,
                card_bytes=card * 2**20,
                verdict_only=verdict_only,
                **how,
            )
            assert (least <= card * 2**20) == is_enough, (card, verdict_only)


def test_cpu_optimizer_on_a_small_card_runs_out_in_initialize() -> None:
    planned = llama(offload("cpu_optimizer", 2), 1, seq_length=512, activation_checkpointing=True)
    found = replayed(planned, capacity_bytes=25 * GB)  # 25.1 are needed
    assert (found.ran_out, found.phase) == (True, "initialize")
    assert not replayed(planned, capacity_bytes=26 * GB).ran_out
    # Among 8 ranks the clone is small, and without room for a second copy parameters are flattened on the host.
    among_8 = llama(offload("cpu_optimizer", 2), 8, seq_length=512, activation_checkpointing=True)
    assert not replayed(among_8, capacity_bytes=20 * GB).ran_out
    assert replayed(among_8).reserved_bytes > 25 * GB


def test_only_rows_near_the_card_are_replayed() -> None:
    planned = llama(zero(2), 8, seq_length=4096)
    rule = planned.predict().gpu_need
    middle = (rule.least_bytes + rule.reserved_bytes) // 2
    far = int(0.79 * rule.least_bytes), int(1.31 * rule.reserved_bytes)
    by_card = {far[0]: "rule", rule.least_bytes - 1: "replay", rule.reserved_bytes: "replay", far[1]: "rule"}
    assert {card: planned.judge(card).gpu_need.method for card in by_card} == by_card
    assert replace(planned, replays="never").judge(middle).gpu_need == rule
    assert planned.judge(None).gpu_need == rule
    narrowed = planned.judge(middle).gpu_need
    # The rule adds up what need not exist together.
    assert 0.97 * rule.least_bytes <= narrowed.least_bytes <= narrowed.reserved_bytes < rule.reserved_bytes
    verdicts = {narrowed.least_bytes - 1: DOES_NOT_FIT, narrowed.least_bytes: TIGHT, narrowed.reserved_bytes: FITS}
    assert {card: narrowed.verdict(card) for card in verdicts} == verdicts
    # With the search for the least memory and without it.
    outside = planned.predict().gpu["overhead"]
    for card in (int(share * narrowed.least_bytes) for share in (0.98, 0.995, 1.01)):
        ran_out = replayed(planned, capacity_bytes=card - outside).ran_out
        verdict = DOES_NOT_FIT if ran_out else TIGHT
        assert (planned.verdict(card), planned.judge(card).verdict(card)) == (verdict, verdict)
    assert planned.verdict(narrowed.reserved_bytes) == FITS
    # Where initialization leaves pieces, more is reserved than the rule estimates.
    in_pieces = llama(offload("cpu_optimizer", 2), 2, seq_length=512)
    card = in_pieces.predict().gpu_need.reserved_bytes
    assert (replace(in_pieces, replays="never").verdict(card), in_pieces.verdict(card)) == (FITS, TIGHT)


def test_settings_that_the_replay_does_not_know_are_left_to_the_rule() -> None:
    asked: list[tuple[PlannedTrial, str | None]] = [
        (replace(llama(zero(3)), changes={"zero_optimization": {"zero_hpz_partition_size": 2}}), "hpZ"),
        (replace(llama(zero(3)), changes={"zero_optimization": {"zenflow": {}}}), None),  # listed as unknown
        (replace(llama(zero(2)), changes={"zero_optimization": {"contiguous_gradients": False}}),
         "contiguous_gradients off"),
        (replace(llama(zero(1)), changes={"data_types": {"grad_accum_dtype": "fp32"}}),
         "gradients in a different number format"),
        (with_liger_loss(llama(zero(3), loss="liger")), "the liger loss"),
        (with_frozen_embedding(llama(make_configuration(named_strategy("fsdp2")))), "frozen parameters in FSDP2"),
        (llama(zero(3), compile="torch"), None),  # whose activations are not known
        (
            replace(llama(zero(3)), profile=replace(llama(zero(3)).profile, facts=None)),
            "the lack of a trace of this model",
        ),
    ]  # fmt: skip
    for planned, obstacle in asked:
        need = replace(planned, replays="always").judge(None).gpu_need
        assert (need.method, need.not_replayed) == ("rule", obstacle)


def with_liger_loss(planned: PlannedTrial) -> PlannedTrial:
    profile, facts = planned.profile, planned.profile.facts
    assert facts is not None
    liger = formula_profile.with_loss(profile, facts, "liger")
    return replace(planned, profile=replace(profile, variants={Variant(loss="liger"): liger}))


def with_frozen_embedding(planned: PlannedTrial) -> PlannedTrial:
    first, *others = planned.profile.before
    return replace(planned, profile=replace(planned.profile, before=tuple(others), frozen=((0, first),)))


@pytest.mark.parametrize("strategy", [zero(3), offload("cpu_full")])
def test_varying_lengths_reserve_more_within_the_rule_and_the_longest_first_does_not(strategy: Configuration) -> None:
    planned = llama(strategy, 8, seq_length=4096)
    constant, varying = (
        replace(planned, replays="always", varying_lengths=varies).judge(None).gpu_need for varies in (False, True)
    )
    assert varying.method == "replay"
    assert constant.reserved_bytes * 1.02 < varying.reserved_bytes
    assert constant.least_bytes * 0.995 <= varying.least_bytes
    rule = replace(planned, replays="never", varying_lengths=True).judge(None).gpu_need
    assert varying.reserved_bytes < rule.reserved_bytes
    assert rule.least_bytes == planned.predict().gpu_need.least_bytes


def test_middle_layer_is_repeated_and_frees_what_its_neighbors_left() -> None:
    """Worked by hand: each layer keeps one storage, which the next layer frees in forward or its own backward does."""
    trace = {
        "sizes": [{"bs": 1e6}],
        "tensors": {"before": [40], "layer": [24, 6], "after": [40]},
        "segments": [
            [],
            [[ALLOCATE, 0]],  # storage 0
            [[ALLOCATE, 0], [FREE, 0]],  # 1; the one of the layer before ends
            [[ALLOCATE, 0], [FREE, 1]],  # 2
            [],
            [[FREE, 2], [2, 5, -1]],  # a gradient of the last layer's second tensor
            [[2, 3, -1]],
            [[2, 1, -1], [3, 1, 2]],
            [[2, 0, -1], [2, 7, -1]],
        ],
    }
    profile = replace(TOY, layers=5, before=(40,), layer=(24, 6), after=(40,))
    events = full_events(trace, profile, 1, 1)
    live: set[int] = set()
    counts = []
    for event in events:
        if event[0] == ALLOCATE:
            live.add(event[1])
        elif event[0] == FREE:
            live.remove(event[1])
        counts.append(len(live))
    assert (max(counts), counts[-1]) == (2, 0)
    assert [event[1] for event in events if event[0] == 2] == [9, 7, 5, 3, 1, 0, 11]
    assert (3, (1, 2)) in events
    # Only the first tensor of each layer has a gradient.
    others = tuple((number, 6) for number in range(2, 12, 2))
    partly = replace(profile, before=(40, *[24] * 5, 40), layer=(), after=(), frozen=others)
    assert allocation_trace.is_of(trace, partly)
    assert not allocation_trace.is_of(trace, profile)
    assert not allocation_trace.is_of(trace, replace(partly, frozen=(*others[:-1], (10, 8))))


def test_traces_of_presets_are_part_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything trained and with adapters, so that no torch is needed; layers of several kinds have none."""
    monkeypatch.setattr(allocation_trace, "make_traces", lambda _requests: pytest.fail("a preset started a process"))
    variants = (TraceVariant(), TraceVariant(lora="4"), TraceVariant(lora="4", efficient_linear=True))
    missing = []
    for name in preset_names():
        for variant, checkpointing in itertools.product(variants, (False, True)):
            how: dict[str, Any] = {"checkpointing": checkpointing, "element_bytes": 2, "variant": variant}
            if allocation_trace.find_trace(preset(name), 128, **how) is None:
                missing.append(name)
    several_kinds = ("gemma2", "gemma3_text", "deepseek_v2", "gpt_oss")
    assert missing == [name for name in preset_names() for _ in range(6) if preset(name).model_type in several_kinds]


def test_traces_in_the_package_are_those_that_are_made_today() -> None:
    facts = preset("gpt2"), preset("meta-llama/Llama-2-70b-hf")
    variants = TraceVariant(), TraceVariant(lora="16", efficient_linear=True)
    requests = [
        allocation_trace.trace_request(each, 1, checkpointing=True, variant=variant)
        for each, variant in zip(facts, variants, strict=True)
    ]
    made = allocation_trace.make_traces([{**each, "precisions": ["bf16"]} for each in requests])
    shipped = allocation_trace._built_in()
    assert made == [shipped[replayed_need.model_profile.request_key(each)] for each in requests]


def test_one_process_traces_what_all_rows_of_a_model_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nothing can be kept in the user's cache."""
    processes = []

    def make_traces(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        processes.append([(each["checkpointing"], "efficient_linear" in each) for each in requests])
        return [{"bf16": {"number": number}} for number, _ in enumerate(requests)]

    monkeypatch.setattr(allocation_trace, "make_traces", make_traces)
    monkeypatch.setattr(allocation_trace, "missing_packages", lambda _names: [])
    monkeypatch.setattr(allocation_trace, "can_extend", lambda _trace: True)
    monkeypatch.setattr(replayed_need.model_profile, "cache_answer", lambda *_: None)
    rows = list(itertools.product((False, True), (False, True)))
    found = [
        allocation_trace.find_trace(
            preset("gpt2"),
            128,
            checkpointing=checkpointing,
            element_bytes=2,
            variant=TraceVariant(freeze="only this test", efficient_linear=of_stage_3),
        )
        for checkpointing, of_stage_3 in rows
    ]
    assert found == [{"number": number} for number in range(4)]
    assert processes == [rows]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fsdp2_allocates_what_its_ledger_has(checkpointing: bool) -> None:
    planned = llama(
        make_configuration(named_strategy("fsdp2")), 8, seq_length=8192, activation_checkpointing=checkpointing
    )
    by_formula = planned.predict()
    need = replace(planned, replays="always").judge(None).gpu_need
    assert need.method == "replay"
    assert by_formula.gpu_bytes * 0.97 < need.least_bytes < 1.08 * by_formula.gpu_bytes
    assert need.least_bytes <= need.reserved_bytes
