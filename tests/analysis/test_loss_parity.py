"""Rows that trained differently by more than rounding explains are named, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ds_bench.analysis.comparison import compare
from ds_bench.analysis.load_results import flat_run
from ds_bench.analysis.loss_parity import compare_losses, with_loss_caveats
from ds_bench.analysis.row import Run, make_run
from ds_bench.config.caveat_texts import Caveat, CaveatKind, has_kind
from ds_bench.config.spec import Inspection, ProfileName
from ds_bench.recommend.recommendation import recommend
from ds_bench.records.schema import EarlyWindow
from tests.support import fakes
from tests.support.runs import CUDA

DIFFERS, OTHER_TRAINING = CaveatKind.LOSS_DIFFERS, CaveatKind.OTHER_TRAINING
QUIRK = {"engine_optimizer_class": "FP16_UnfusedOptimizer"}
CHANGE = (1.0, 2.0, 3.0)
ASKED = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def losing(stage: int, *losses: float | None, precision: str = "bf16", **changes: Any) -> Run:
    """A row of a stage with these losses."""
    of = changes.pop("of", fakes.workload(precision=precision))
    trial = fakes.trial(fakes.zero(stage), on=CUDA, of=of, inspection=changes.pop("inspection", Inspection()))
    return make_run(fakes.success(trial, losses=losses, **changes))


def changed(stage: int, change: tuple[float, ...] | None, *, steps: int = 18, **seen: Any) -> Run:
    """A row of ``steps`` measured steps, with its weights' change in the first five warm-up steps."""
    window = EarlyWindow(**{"first_step": 0, "steps": 5, "weight_change": change, **seen.pop("window", {})})
    return losing(stage, *[7.0] * (5 + steps), early_window=window, **seen)


def short(stage: int, change: tuple[float, ...]) -> Run:
    return losing(stage, *[7.0] * 10, weight_change=change)


def on_axis(loss: float, **axis_values: str) -> Run:
    configuration = replace(fakes.zero(2), name=f"zero2{axis_values}", axis_values=axis_values)
    return make_run(fakes.success(fakes.trial(configuration, on=CUDA), losses=(7.0, loss)))


def at_point(rate: float, stage: int, loss: float) -> Run:
    row = losing(stage, 7.0, loss)
    trial = replace(row.trial, point={"optimizer.params.lr": rate, "launch.num_gpus": 2})
    return replace(row, stored=replace(row.stored, trial=trial))


def profiled(stage: int, repeated_loss: float, *profiles: ProfileName) -> Run:
    return losing(stage, 7.0, 6.9, repeated_loss=repeated_loss, inspection=Inspection(profiles=profiles))


def clipped(stage: int, clipping: float, norm: float) -> Run:
    return losing(stage, 7.0, 6.9, grad_norms=(norm, norm), resolved_config={"gradient_clipping": clipping})


def late(steps: int, *losses: float, repeats: int = 1) -> list[Run]:
    """A row for each loss, which it has in all steps after the first ten."""
    rows = [(place % 3 + 1, loss) for _ in range(repeats) for place, loss in enumerate(losses)]
    return [losing(stage, *[7.0] * 10, *[loss] * steps) for stage, loss in rows]


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [
        ([losing(stage, 7.0, 6.9) for stage in (0, 1, 2, 3)], {}),
        # Seen: a stage-3 model built without the Transformers integration starts at 85 instead of 6.9.
        ([losing(1, 6.9, 6.8), losing(3, 85.0, 80.0)], {1: DIFFERS}),
        # The quirk of stage 0 is named, is never the reference, and explains a limited difference.
        ([losing(0, 7.08, 7.0, **QUIRK), losing(1, 7.0, 6.9), losing(2, 7.0, 6.9)], {0: CaveatKind.LOSS_QUIRK}),
        ([losing(0, 7.08, **QUIRK), losing(1, 7.0), losing(3, 85.0)], {0: CaveatKind.LOSS_QUIRK, 2: DIFFERS}),
        ([losing(0, 10.5, **QUIRK), losing(1, 7.0)], {0: DIFFERS}),
        ([losing(1, 7.0), losing(0, 7.08)], {1: DIFFERS}),  # in another wrapper, or at another stage
        ([losing(1, 7.0), losing(2, 7.08, **QUIRK)], {1: DIFFERS}),
        ([changed(0, (0.9, 1.8, 2.7), **QUIRK), changed(1, CHANGE)], {0: CaveatKind.WEIGHTS_QUIRK}),
        ([losing(0, 7.0, **QUIRK), losing(1, 7.0)], {}),
        ([losing(0, 7.2, **QUIRK)], {}),
        # In a tie, a row of stage 3 is not believed. The majority of rows decides, however often each was run.
        ([losing(3, 8.0), losing(1, 7.0)], {0: DIFFERS}),
        ([losing(1, 8.0), losing(2, 7.0), losing(1, 7.0), losing(2, 7.0)], {0: DIFFERS}),
        # Rows with different batches and workloads are not compared, nor are rows that lost their loss or failed.
        ([losing(1, 7.0), losing(2, 9.0, micro_batch_size=8)], {}),
        ([losing(1, 7.0), losing(2, 9.0, of=fakes.workload(seq_length=256))], {}),
        ([losing(1, None, 7.0), losing(2, 7.0, 6.9), losing(3, 7.0, 6.9)], {}),
        ([make_run(fakes.failure(fakes.trial(fakes.zero(1)))), losing(2, 7.0), losing(3, 85.0)], {2: DIFFERS}),
        ([losing(1, 0.0), losing(2, 0.0)], {}),
        ([losing(1, 0.0), losing(2, 1.0)], {1: DIFFERS}),
        # Rounding is allowed as far as the precision goes; between two precisions, as far as the coarser one.
        ([losing(stage, 7.0 * (1.0001 if stage > 1 else 1), precision="fp32") for stage in (1, 2)], {}),
        ([losing(stage, 7.0 * (1.001 if stage > 1 else 1), precision="fp32") for stage in (1, 2)], {1: DIFFERS}),
        ([losing(1, 7.0), losing(2, 7.0 * 1.004)], {}),
        ([losing(1, 7.0), losing(2, 7.0 * 1.01)], {1: DIFFERS}),
        ([losing(1, 7.0, precision="fp32"), losing(2, 7.0 * 1.004)], {}),
        ([losing(1, 7.0, precision="fp32"), losing(2, 7.0 * 1.01)], {1: DIFFERS}),
        # Rows that compute a step differently are compared too.
        (
            [losing(1, 7.0), losing(2, 7.1, of=fakes.workload(loss="tiled", activation_checkpointing=True))],
            {1: DIFFERS},
        ),
    ],
)
def test_rows_whose_losses_differ_are_named(rows: list[Run], kinds: dict[int, CaveatKind]) -> None:
    found = compare_losses(rows)
    assert {place: caveat.kind for place, caveat in found.items()} == kinds
    assert all(caveat.kind.disqualifies is (caveat.kind is DIFFERS) for caveat in found.values())


USUAL_NORMS = losing(1, 7.0, 6.9, grad_norms=(2.5, 2.4), grad_norm=2.1)
SEEN_NORMS = (5.323, 5.153, 4.811)
LION = [on_axis(6.9), on_axis(6.0, optimizer="lion")]
POINTS = [at_point(rate, stage, loss) for rate, loss in ((1e-4, 6.9), (1e-2, 5.0)) for stage in (0, 1)]
RIGHT = changed(2, CHANGE, optimizer_settings=(ASKED,), weight_change=CHANGE)
WRONG_RATE = ({**ASKED, "lr": 2e-4},)


def test_rows_that_trained_differently_are_named(subtests: pytest.Subtests) -> None:
    for rows, named in (
        # Points of a sweep, and values of an axis, that train differently on purpose are compared among themselves.
        (POINTS, []),
        ([*POINTS, at_point(1e-2, 3, 6.9)], [4]),
        ([*LION, on_axis(5.9, bf16_states="all")], []),
        ([*LION, on_axis(6.8, optimizer="torch_adamw", bf16_states="off")], [2]),
        ([*LION, on_axis(5.0, optimizer="lion", overlap_comm="true")], [2]),
        # Profiles train on after the measured steps, so that the loss on the first batch falls further.
        ([profiled(1, 6.8, "torch"), profiled(2, 5.8, "torch")], [1]),
        ([profiled(1, 6.8), profiled(2, 5.8, "torch")], []),
        # Late losses are judged by how far honest rows drift apart, however long the run is.
        *((late(steps, 6.0, 6.0, 6.9), [2]) for steps in (8, 90, 690)),
        *((late(steps, 6.0, 6.0, 6.1), []) for steps in (8, 690)),
        (late(90, 6.0, 6.5, 6.9), []),
        # Whichever comes first, and however often it was run.
        (late(90, 6.0, 6.9), [1]),
        (late(90, 6.9, 6.0, 6.0), [0]),
        (late(90, 6.0, 6.0, 6.9, repeats=2), [2, 5]),
        (late(90, 6.9, 6.0, 6.0, repeats=5), [0, 3, 6, 9, 12]),
        # A row that did not train, or not as asked, is never the reference.
        ([changed(1, (0.0, 0.0, 0.0), weight_change=(0.0, 0.0, 0.0)), RIGHT], [0]),
        ([changed(1, (2.0, 4.0, 6.0), weight_change=CHANGE, optimizer_settings=WRONG_RATE), RIGHT], [0]),
        # Without warm-up the whole change of a short trial is compared.
        ([short(1, CHANGE), short(2, (3.0, -2.0, 1.0))], [1]),
        ([short(1, CHANGE), short(2, (1.01, 2.0, 3.0))], []),
        # Changes of the weights are found however long the run is.
        *(
            ([changed(1, CHANGE, steps=steps), changed(2, wrong, steps=steps)], [1])
            for steps in (18, 700)
            for wrong in ((0.0, 0.0, 0.0), (2.0, 4.0, 6.0), (-1.0, -2.0, -3.0), (1.1, 2.0, 2.8))
        ),
        ([changed(1, CHANGE, steps=700), changed(2, (1.01, 2.01, 3.0), steps=700)], []),
        ([changed(0, (0.6, 1.2, 1.8), **QUIRK), changed(1, CHANGE)], [0]),  # less than the quirk of stage 0 explains
        # A shorter window allows more: Adam's first step is the sign of the gradient, which rounding may decide.
        ([changed(1, CHANGE, window={"steps": 1}), changed(2, (1.3, 2.0, 2.8), window={"steps": 1})], []),
        ([changed(1, CHANGE), changed(2, (1.3, 2.0, 2.8))], [1]),
        ([changed(1, CHANGE, window={"steps": 1}), changed(2, (0.0, 0.0, 0.0), window={"steps": 1})], [1]),
        # Changes over other windows are not compared.
        *(
            ([changed(1, CHANGE), changed(2, (9.0, 9.0, 9.0), window=other)], [])
            for other in ({"first_step": 10}, {"steps": 3}, {"skipped_steps": 1})
        ),
        ([changed(1, CHANGE), changed(2, None)], []),
        # A gradient norm that differs is found in the first step or after the window; Adam hides the gradients.
        ([USUAL_NORMS, losing(2, 7.0, 6.9, grad_norms=(1.25, 1.2))], [1]),
        ([USUAL_NORMS, losing(2, 7.0, 6.9, grad_norms=(None, None), grad_norm=1.05)], [1]),
        ([USUAL_NORMS, losing(2, 7.0, 6.9, grad_norms=(2.51, 2.41), grad_norm=2.12)], []),
        ([USUAL_NORMS, losing(2, 7.0, 6.9, grad_norms=(None, 2.4))], []),
        # Seen with the quirk of stage 0: the first norm is the same, later ones differ by less than those of the
        # reference change from one step to the next.
        *(
            ([losing(1, 7.0, 6.9, grad_norms=SEEN_NORMS), losing(0, 7.0, 6.9, grad_norms=norms, **QUIRK)], found)
            for norms, found in (
                ((5.323, 5.217, 4.975), []),
                ((5.5, 5.217, 4.975), [1]),
                ((2.661, 2.577, 2.406), [1]),
                ((None, 2.577, 2.406), [1]),
                ((5.323, 5.6, 4.975), [1]),
                ((5.323, 5.217, 5.4), [1]),
            )
        ),
        ([losing(1, 7.0, 6.9, grad_norms=SEEN_NORMS), losing(2, 7.0, 6.9, grad_norms=(5.323, 5.217, 4.975))], [1]),
        (
            [
                losing(0, 7.0, 6.9, grad_norms=(None, None)),  # it agrees with any norm, so its vote counts less
                USUAL_NORMS,
                losing(3, 7.0, 6.9, grad_norms=(2.5, 2.4)),
                losing(2, 7.0, 6.9, grad_norms=(1.25, 1.2)),
            ],
            [3],
        ),
        # A different clipping is found where it acts.
        ([clipped(1, 1.0, 2.5), clipped(2, 0.0, 2.5)], [1]),
        ([clipped(1, 1.0, 0.5), clipped(2, 0.0, 0.5)], []),
    ):  # fmt: skip
        with subtests.test(named=named):
            found = compare_losses(rows)
            assert sorted(found) == named
            assert all(caveat.kind.disqualifies for caveat in found.values())


def test_rows_of_stage_3_alone_say_that_no_other_stage_was_beside_them() -> None:
    offloaded = make_run(fakes.success(fakes.trial(fakes.offload("cpu_optimizer"), on=CUDA), losses=(7.0,)))
    for others, first in (([offloaded], [CaveatKind.STAGE_3_ALONE]), ([], []), ([offloaded, losing(2, 7.0)], [])):
        rows = with_loss_caveats([losing(3, 7.0), *others])
        assert [[each.kind for each in row.caveats] for row in rows] == [first, *[[]] * len(others)]
        assert with_loss_caveats(rows) == rows


def test_rows_on_the_cpu_that_step_with_a_different_adam_say_so() -> None:
    def rows(accelerator: str) -> list[Run]:
        on, classes = fakes.placement(accelerator=accelerator), {"none": "AdamW", "cpu_optimizer": "DeepSpeedCPUAdam"}
        trials = {name: fakes.trial(fakes.offload(name), on=on) for name in classes}
        return with_loss_caveats(
            [make_run(fakes.success(trials[name], optimizer_class=classes[name])) for name in classes]
        )

    plain, offloaded = rows("cpu")
    told = Caveat(CaveatKind.OTHER_ADAM, {"used": "DeepSpeedCPUAdam", "other": "AdamW", "row": "ZeRO-3"})
    assert [each for each in offloaded.caveats if each not in plain.caveats] == [told]
    assert with_loss_caveats([plain, offloaded]) == [plain, offloaded]
    assert not any(each.kind is CaveatKind.OTHER_ADAM for row in rows("cuda") for each in row.caveats)


# ------------------------------------------------------------------ different training on purpose


def of_file(name: str, rate: float, *losses: float, optimizer: str = "AdamW", **seen: Any) -> Run:
    """A row of a file that sets this learning rate, and whose optimizer was read back."""
    trial = fakes.trial(fakes.zero(2), on=CUDA, of=fakes.workload())
    block = {"type": optimizer, "params": {"lr": rate}}
    configuration = replace(trial.configuration, name=name, label=name, source="file")
    trial = replace(trial, configuration=configuration, ds_config={**trial.ds_config, "optimizer": block})
    settings = ({"lr": rate, "weight_decay": 0.01},)
    return make_run(fakes.success(trial, losses=losses, optimizer_class=optimizer, optimizer_settings=settings, **seen))


def usual_row(stage: int, *losses: float, **seen: Any) -> Run:
    return losing(stage, *losses, optimizer_settings=({"lr": 1e-4, "weight_decay": 0.01},), **seen)


def named(rows: Sequence[Run]) -> list[int]:
    """Rows that are named as training differently on purpose."""
    return [place for place, row in enumerate(with_loss_caveats(rows)) if has_kind(row.caveats, OTHER_TRAINING)]


def test_a_file_that_sets_different_training_is_compared_with_files_that_set_the_same() -> None:
    rows = [usual_row(1, 7.0, 6.9), of_file("same", 1e-4, 7.5, 7.4), of_file("slow", 1e-5, 8.0, 8.0)]
    assert (list(compare_losses(rows)), named(rows)) == ([1], [2])
    assert 3 in compare_losses([*rows, of_file("wrong", 1e-5, 9.0, 9.0)])
    # DeepSpeed makes AdamW of ``Adam``, and a default may be left out.
    assert named([usual_row(1, 7.0, 6.9), of_file("adam", 1e-4, 7.0, 6.9, optimizer="Adam")]) == []
    sgd = with_loss_caveats([usual_row(1, 7.0, 6.9), of_file("sgd", 1e-4, 7.0, 7.0, optimizer="SGD")])
    assert "it used SGD, not AdamW" in str(sgd[1].caveats)
    flat = [flat_run(run.row) for run in sgd]
    assert named(sgd) == named(flat) == [1]
    assert [each.kind for each in flat[1].caveats].count(OTHER_TRAINING) == 1


def test_files_alone_are_compared_with_the_majority_and_with_none_if_each_trains_differently() -> None:
    files = [of_file(name, rate, 7.0, 6.9) for name, rate in (("a", 1e-5), ("b", 1e-4), ("c", 1e-4))]
    assert named(files) == [0]
    assert named(files[:2]) == [0, 1]
    still = of_file("still", 0.0, 7.0, 7.0, weight_change=(0.0, 0.0))
    assert named([still, files[1]]) == [], "a row that does not train is not compared with"
    assert recommend(compare([still, files[1]])).choice == "b"


QUICK: dict[str, Any] = {"weight_change": (1.0, 2.0), "window_seconds": 1.0}


@pytest.mark.parametrize(
    "row",
    [
        of_file("sgd", 1e-4, 7.0, 7.0, optimizer="SGD", **QUICK),
        of_file("faster", 3e-4, 7.0, 6.5, **QUICK),
        of_file("lr 0", 0.0, 7.0, 7.0, **{**QUICK, "weight_change": (0.0, 0.0)}),
        usual_row(2, 7.0, 6.9, **{**QUICK, "weight_change": (0.0, 0.0)}),
    ],
    ids=lambda row: row.trial.configuration.name,
)
def test_a_row_that_trains_differently_or_not_at_all_is_never_recommended_for_being_faster(row: Run) -> None:
    usual = usual_row(1, 7.0, 6.9, weight_change=(1.0, 2.0), window_seconds=9.0)
    comparison = compare([usual, row])
    found = recommend(comparison)
    assert found.choice == usual.trial.configuration.label
    assert comparison.rows[1].label in str(found.alternative)


def test_the_cosine_of_the_weights_changes_is_known_for_rows_that_took_equal_steps() -> None:
    """(3, 4) and (4, 3): 24 / 25."""
    rows = [
        losing(stage, *[7.0] * steps, weight_change=change)
        for stage, steps, change in ((1, 30, (3.0, 4.0)), (2, 30, (4.0, 3.0)), (3, 31, (4.0, 3.0)))
    ]
    assert [run.row.weight_change_cosine for run in with_loss_caveats(rows)] == [1.0, 0.96, None]
