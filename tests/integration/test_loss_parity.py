"""Rows that train another model than the others: each mistake with real ranks, next to every honest strategy."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis.loss_parity import compare_losses, with_loss_caveats
from ds_bench.analysis.row import Run, make_run
from ds_bench.config.caveats import LOSS_KINDS, Caveat, CaveatKind
from ds_bench.config.spec import Configuration, Trial
from ds_bench.launch import Limits
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.records.schema import EarlyWindow, TrialRecord
from tests.support import fakes
from tests.support.real_trials import SHORT, Launch, make_trial

WORKLOAD = fakes.workload(batch_size=2, seq_length=32, warmup_steps=5)
HONEST = {
    **{f"zero{stage}": fakes.zero(stage) for stage in range(4)},
    "zero2_cpu_optimizer": fakes.offload("cpu_optimizer", 2),
    "cpu_full": fakes.offload("cpu_full", 3),
}
MISTAKES: Mapping[str, dict[str, Any]] = {
    "learning rate 0": {"params": {"lr": 0.0}},
    "learning rate doubled": {"params": {"lr": 2e-4}},
    "SGD for AdamW": {"type": "SGD", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    "no clipping": {"params": {}},
}

FIRST_LOSS = (CaveatKind.FIRST_LOSS, CaveatKind.FIRST_LOSS_FAR)


def of_mistake(changes: dict[str, Any], strategy: Configuration) -> Trial:
    trial = make_trial(strategy, workload=WORKLOAD)
    asked = trial.ds_config["optimizer"]
    params = {**asked["params"], **changes["params"]} if "type" not in changes else changes["params"]
    wrong = {"type": changes.get("type", asked["type"]), "params": params}
    config = {**trial.ds_config, "optimizer": wrong, "zero_allow_untested_optimizer": True}
    if not changes["params"]:
        config["gradient_clipping"] = 0.0
    return replace(trial, ds_config=config)


Trained = dict[str, TrialRecord]


@pytest.fixture(scope="module")
def trained(
    server: Callable[[Limits], WarmLauncher],
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    """The record of every honest strategy, and of every mistake made at stage 2."""
    trials = {
        name: make_trial(replace(strategy, name=name, label=name), workload=WORKLOAD, largest_parameter=2_000_000)
        for name, strategy in HONEST.items()
    }
    trials |= {name: of_mistake(wrong, fakes.zero(2)) for name, wrong in MISTAKES.items()}
    records = {}
    for name, trial in trials.items():
        folder = tmp_path_factory.mktemp("trial")
        records[name] = server(SHORT).launch(trial, folder, lambda _progress: None)
        assert records[name].outcome.success, (name, records[name].outcome)
        shutil.rmtree(folder)
    return records


def judged(records: Mapping[str, TrialRecord]) -> dict[str, list[Caveat]]:
    """Caveats of each row about its training compared with the others."""
    rows = with_loss_caveats([make_run(record) for record in records.values()])
    kinds = (*LOSS_KINDS, *FIRST_LOSS, CaveatKind.DOES_NOT_TRAIN)
    return {
        name: [each for each in row.caveats if each.kind in kinds or "parity" in each.text or "weights" in each.text]
        for name, row in zip(records, rows, strict=True)
    }


@pytest.mark.slow
@pytest.mark.deepspeed
def test_honest_strategies_raise_nothing_but_the_quirk_of_stage_0(trained: Trained) -> None:
    found = judged({name: record for name, record in trained.items() if name in HONEST})
    assert len(found) >= 6
    (quirk,) = found.pop("zero0")
    assert "a known quirk" in quirk.text
    assert not quirk.disqualifying
    assert {name: caveats for name, caveats in found.items() if caveats} == {}
    for run in with_loss_caveats([make_run(trained[name]) for name in ("zero1", "zero2", "zero3")]):
        assert (run.row.weight_change_cosine or 0.0) > 0.98
        assert (run.row.repeated_loss or math.inf) < (run.row.first_loss or 0.0)
    for record in trained.values():
        for rank in record.ranks:
            assert rank.weight_change is not None
            assert rank.early_window is not None
            assert (rank.early_window.first_step, rank.early_window.steps) == (0, 5)
            assert rank.early_window.weight_change is not None
            assert None not in rank.grad_norms
            assert rank.grad_norm is not None


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_row_with_another_optimizer_setting_is_disqualified(trained: Trained, mistake: str) -> None:
    """By its weights, whatever the optimizer reports about itself; except for clipping, which Adam hides."""
    honest = {name: trained[name] for name in ("zero1", "zero3")}
    found = judged({**honest, "wrong": trained[mistake]})
    assert [each.kind for each in found["wrong"] if each.disqualifying][-1] in LOSS_KINDS
    assert found["zero1"] == found["zero3"] == []
    if mistake != "no clipping":
        silent = {"optimizer_settings": None, "resolved_config": {}, "optimizer_class": "AdamW"}
        ranks = tuple(replace(rank, **silent) for rank in trained[mistake].ranks)
        *still, caveat = judged({**honest, "wrong": replace(trained[mistake], ranks=ranks)})["wrong"]
        assert [each.kind for each in still] == [CaveatKind.DOES_NOT_TRAIN] * (mistake == "learning rate 0")
        assert "its weights moved" in caveat.text or "norm of its gradients" in caveat.text
        assert caveat.disqualifying


@pytest.mark.deepspeed
def test_gradients_that_were_divided_once_too_often_are_found_by_their_norm(launch: Launch) -> None:
    """Adam hides them: weights and losses equal an honest row's."""
    honest = make_trial(fakes.zero(1), num_steps=3)
    trials = [honest, make_trial(fakes.zero(2)), make_trial(fakes.zero(2), fault="gradients_divided_twice")]
    records = [launch(trial) for trial in trials]
    records[2] = replace(records[2], trial=records[1].trial)
    runs = [make_run(record) for record in records]
    assert runs[2].row.weight_change_norm == pytest.approx(runs[1].row.weight_change_norm, rel=1e-2)
    ((place, caveat),) = compare_losses(runs).items()
    assert (place, caveat.kind) == (2, CaveatKind.TRAINED_DIFFERENTLY)
    assert "the norm of its gradients differs by 50" in caveat.text


@pytest.mark.slow
@pytest.mark.nvme
def test_what_lies_on_nvme_trains_exactly_like_what_is_offloaded_to_memory(
    server: Callable[[Limits], WarmLauncher], tmp_path: Path
) -> None:
    """The weights are read before the first step, in the warm-up and at the end: none disturbs what DeepSpeed swaps."""
    large = {**WORKLOAD.model_config, "vocab_size": 8192, "n_embd": 256}  # partitions under 1 MB stay in memory
    work = replace(WORKLOAD, model="large", model_config=large)
    sub_groups = {"sub_group_size": 600_000}
    pipelined = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
    records = {}
    for name, offload, changes in (
        ("memory", "cpu_full", sub_groups),
        ("nvme", "nvme", sub_groups),
        ("pipelined", "nvme", {**sub_groups, "offload_optimizer": pipelined}),
    ):
        disk, folder = tmp_path / f"{name}_disk", tmp_path / name
        disk.mkdir()
        folder.mkdir()
        trial = make_trial(
            fakes.offload(offload, 3),
            workload=work,
            changes={"zero_optimization": changes},
            largest_parameter=8192 * 256,
            nvme_path=str(disk),
        )
        records[name] = server(SHORT).launch(trial, folder, lambda _progress: None)
        assert records[name].outcome.success, records[name].outcome
    memory = records.pop("memory")
    for record in records.values():
        for rank, other in zip(record.ranks, memory.ranks, strict=True):
            assert rank.ledger["nvme"].keys() == {"optimizer_states", "parameters"}
            assert rank.losses == other.losses
            assert rank.repeated_loss == pytest.approx(other.repeated_loss, rel=1e-6)
            assert rank.weight_change == pytest.approx(other.weight_change, rel=1e-6, abs=1e-9)
            assert rank.early_window is not None
            assert other.early_window is not None
            early = rank.early_window.weight_change
            assert early == pytest.approx(other.early_window.weight_change, rel=1e-6, abs=1e-9)
            assert rank.grad_norms == pytest.approx(other.grad_norms, rel=1e-6)


def row(
    stage: int,
    change: tuple[float, ...] | None,
    losses: tuple[float, ...] = (7.0, 6.9),
    *,
    name: str | None = None,
    **seen: Any,
) -> Run:
    strategy = fakes.zero(stage)
    strategy = replace(strategy, name=name or strategy.name)
    window = EarlyWindow(first_step=0, steps=5, weight_change=change)
    record = fakes.success(fakes.trial(strategy, of=WORKLOAD), losses=losses, early_window=window, **seen)
    return make_run(record)


def disqualified(*rows: Run) -> list[int]:
    return [place for place, each in enumerate(with_loss_caveats(rows)) if any(c.disqualifying for c in each.caveats)]


def test_the_reference_is_what_most_rows_agree_on_and_never_a_lone_stage_3() -> None:
    right, wrong = (1.0, 2.0, 3.0), (2.0, 4.0, 6.0)
    assert disqualified(row(3, wrong), row(1, right)) == [0]
    assert disqualified(row(1, right), row(3, wrong)) == [1]
    assert disqualified(row(1, wrong), row(2, right), row(3, right)) == [0]
    again = [row(1, wrong), row(1, wrong), row(2, right), row(3, right)]
    assert disqualified(*again) == [0, 1], "repeats of one row are one voice"


def test_the_quirk_of_stage_0_explains_weights_that_moved_somewhat_less_and_no_more() -> None:
    wrapper = {"engine_optimizer_class": "FP16_UnfusedOptimizer"}
    right = row(1, (1.0, 2.0))
    (caveat,) = with_loss_caveats([row(0, (0.9, 1.8), **wrapper), right])[0].caveats
    assert "0.90x as far" in caveat.text
    assert "a known quirk" in caveat.text
    assert not caveat.disqualifying
    assert disqualified(row(0, (2.0, 4.0), **wrapper), right) == [0]
    assert disqualified(right, row(0, (0.9, 1.8))) == [1]


def test_rows_of_stage_3_alone_say_that_no_other_stage_was_beside_them() -> None:
    rows = with_loss_caveats([row(3, (1.0, 2.0)), row(3, (1.0, 2.0), name="cpu_optimizer")])
    assert [[caveat.kind for caveat in each.caveats] for each in rows] == [[CaveatKind.STAGE_3_ALONE], []]
    assert with_loss_caveats(rows) == rows
    assert with_loss_caveats([row(3, (1.0, 2.0))])[0].caveats == ()
    assert with_loss_caveats([row(2, (1.0, 2.0)), row(3, (1.0, 2.0))])[0].caveats == ()


@pytest.mark.parametrize(("first", "said"), [(7.5, None), (11.0, False), (44.06, True), (85.0, True)])
def test_a_first_loss_far_above_that_of_a_model_that_knows_nothing_is_named(first: float, said: bool | None) -> None:
    record = fakes.success(fakes.trial(of=WORKLOAD), losses=(first, first), vocabulary_size=1000)
    caveats = [each for each in make_run(record).caveats if each.kind in FIRST_LOSS]
    assert [each.disqualifying for each in caveats] == ([] if said is None else [said])
    unknown = fakes.success(fakes.trial(of=WORKLOAD), losses=(first, first))
    assert not any(each.kind in FIRST_LOSS for each in make_run(unknown).caveats)
