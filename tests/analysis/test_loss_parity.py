"""Rows whose losses differ by more than rounding are named, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_bench.analysis import flat_reader
from ds_bench.analysis.caveats import CaveatKind
from ds_bench.analysis.flat_rows import flat_rows
from ds_bench.analysis.loss_parity import compare_losses, with_loss_caveats
from ds_bench.analysis.summary import TrialSummary, summarise
from ds_bench.config.spec import Inspection, ProfileName
from tests.support import fakes
from tests.support.summaries import CUDA


def losing(stage: int, *losses: float | None, precision: str = "bf16", **changes: Any) -> TrialSummary:
    """A row of a stage with these losses."""
    of = changes.pop("of", fakes.workload(precision=precision))
    trial = fakes.trial(fakes.zero(stage), on=CUDA, of=of)
    return summarise(fakes.success(trial, losses=losses, **changes), None, None)


QUIRK = {"engine_optimizer_class": "FP16_UnfusedOptimizer"}


def test_equal_losses_raise_no_caveat() -> None:
    assert compare_losses([losing(stage, 7.0, 6.9) for stage in (0, 1, 2, 3)]) == {}


def test_a_wrong_configuration_is_found_by_its_loss() -> None:
    """Seen: a stage-3 model built without the Transformers integration starts at 85 instead of 6.9."""
    found = compare_losses([losing(1, 6.9, 6.8), losing(3, 85.0, 80.0)])
    assert list(found) == [1]
    assert "from ZeRO-1's" in found[1].text
    assert "do not use this row" in found[1].text


def test_points_of_a_sweep_that_train_otherwise_on_purpose_are_not_compared() -> None:
    def at(rate: float, stage: int, loss: float) -> TrialSummary:
        row = losing(stage, 7.0, loss)
        trial = replace(row.record.trial, point={"optimizer.params.lr": rate, "launch.num_gpus": 2})
        return replace(row, record=replace(row.record, trial=trial))

    rows = [at(rate, stage, loss) for rate, loss in ((1e-4, 6.9), (1e-2, 5.0)) for stage in (0, 1)]
    assert compare_losses(rows) == {}
    assert list(compare_losses([*rows, at(1e-2, 3, 6.9)])) == [4]


def test_rounding_is_allowed_as_far_as_the_precision_goes(subtests: pytest.Subtests) -> None:
    for precision, factor, said in (
        ("fp32", 1.0001, False),
        ("fp32", 1.001, True),
        ("bf16", 1.004, False),
        ("bf16", 1.01, True),
        ("fp16", 1.01, True),
    ):
        with subtests.test(precision=precision, factor=factor):
            found = compare_losses([losing(1, 7.0, precision=precision), losing(2, 7.0 * factor, precision=precision)])
            assert (1 in found) is said


def test_what_training_came_to_is_compared_among_rows_that_took_the_same_further_steps() -> None:
    """Profiles train on after the measured steps, so that the loss on the first batch falls further."""

    def row(stage: int, repeated_loss: float, *profiles: ProfileName) -> TrialSummary:
        trial = fakes.trial(fakes.zero(stage), on=CUDA, inspection=Inspection(profiles=profiles))
        return summarise(fakes.success(trial, losses=(7.0, 6.9), repeated_loss=repeated_loss), None, None)

    assert list(compare_losses([row(1, 6.8, "torch"), row(2, 5.8, "torch")])) == [1]
    assert compare_losses([row(1, 6.8), row(2, 5.8, "torch")]) == {}


def test_rows_that_compute_a_step_in_other_ways_are_held_against_each_other() -> None:
    """In another precision too, by the larger of both tolerances."""
    usual = losing(1, 7.0, 6.9, precision="fp32")
    for changes in ({"precision": "bf16"}, {"precision": "fp32", "loss": "tiled", "activation_checkpointing": True}):
        for factor, said in ((1.0001, False), (1.01, True)):
            row = losing(2, 7.0 * factor, 6.9 * factor, of=fakes.workload(**changes))
            assert (compare_losses([usual, row]) != {}) is said


def test_rows_that_an_axis_lets_compute_otherwise_are_held_against_rows_of_the_same_value() -> None:
    def row(loss: float, **axis_values: str) -> TrialSummary:
        configuration = replace(fakes.zero(2), name=f"zero2{axis_values}", axis_values=axis_values)
        return summarise(fakes.success(fakes.trial(configuration, on=CUDA), losses=(7.0, loss)), None, None)

    usual, lion = row(6.9), row(6.0, optimizer="lion")
    assert compare_losses([usual, lion, row(5.9, bf16_states="all")]) == {}
    assert list(compare_losses([usual, lion, row(6.8, optimizer="torch_adamw", bf16_states="off")])) == [2]
    assert list(compare_losses([usual, lion, row(5.0, optimizer="lion", overlap_comm="true")])) == [2]


def test_the_quirk_of_stage_0_in_16_bit_is_known_and_named_and_is_no_reference() -> None:
    found = compare_losses([losing(0, 7.08, 7.0, **QUIRK), losing(1, 7.0, 6.9), losing(2, 7.0, 6.9)])
    assert list(found) == [0]
    assert "known quirk" in found[0].text
    assert "do not use" not in found[0].text


def test_a_difference_the_quirk_cannot_explain_is_judged_like_any_other() -> None:
    found = compare_losses([losing(0, 10.5, **QUIRK), losing(1, 7.0)])
    assert "do not use this row" in found[0].text


def test_a_loss_that_differs_rules_a_row_out_unless_the_quirk_explains_it() -> None:
    found = compare_losses([losing(0, 7.08, **QUIRK), losing(1, 7.0), losing(3, 85.0)])
    assert {place: (caveat.kind, caveat.disqualifying) for place, caveat in found.items()} == {
        0: (CaveatKind.LOSS_DIFFERS, False),
        2: (CaveatKind.LOSS_DIFFERS, True),
    }
    assert found[0].next_step is None
    assert "fp32" in (found[2].next_step or "")


def test_stage_0_without_the_quirks_wrapper_is_judged_like_any_other() -> None:
    found = compare_losses([losing(1, 7.0), losing(0, 7.2)])
    assert "do not use this row" in found[1].text


def test_stage_0_with_the_wrapper_but_the_same_losses_is_quiet() -> None:
    assert compare_losses([losing(0, 7.0, **QUIRK), losing(1, 7.0)]) == {}


def test_stage_0_alone_has_nothing_to_be_compared_with() -> None:
    assert compare_losses([losing(0, 7.2, **QUIRK)]) == {}
    assert compare_losses([]) == {}


def test_a_loss_that_drifts_off_late_is_rounding_that_grew() -> None:
    """Two right configurations part ways after many steps; only the first ten are judged."""
    early, late = [7.0] * 10, [7.0] * 10
    assert compare_losses([losing(1, *early, 7.0), losing(2, *late, 9.0)]) == {}


def test_rows_of_other_batches_or_workloads_are_not_compared_by_loss() -> None:
    reference = losing(1, 7.0)
    assert compare_losses([reference, losing(2, 9.0, micro_batch_size=8)]) == {}
    assert compare_losses([reference, losing(2, 9.0, of=fakes.workload(seq_length=256))]) == {}


def test_a_row_that_lost_its_loss_is_neither_reference_nor_judged_here() -> None:
    found = compare_losses([losing(1, None, 7.0), losing(2, 7.0, 6.9), losing(3, 7.0, 6.9)])
    assert found == {}


def test_failed_rows_do_not_disturb_the_comparison_or_shift_its_caveats() -> None:
    failed = summarise(fakes.failure(fakes.trial(fakes.zero(1))), None, None)
    found = compare_losses([failed, losing(2, 7.0), losing(3, 85.0)])
    assert list(found) == [2]


def test_caveats_of_comparison_are_added_to_the_right_row_and_the_others_stay() -> None:
    before = [losing(1, 7.0), losing(3, 85.0)]
    after = with_loss_caveats(before)
    assert after[0] == before[0]
    assert "do not use this row" in after[1].caveats[-1].text
    assert with_loss_caveats(after) == after


def test_rows_on_the_cpu_that_step_with_another_adam_say_so_and_how_to_compare_with_one() -> None:
    def rows(accelerator: str) -> list[TrialSummary]:
        on = fakes.placement(accelerator=accelerator)
        classes = {"none": "AdamW", "cpu_optimizer": "DeepSpeedCPUAdam"}
        made = (
            fakes.success(fakes.trial(fakes.offload(name), on=on), optimizer_class=used)
            for name, used in classes.items()
        )
        return with_loss_caveats([summarise(record, None, None) for record in made])

    plain, offloaded = rows("cpu")
    (told,) = (each for each in offloaded.caveats if each not in plain.caveats)
    assert told.line == (
        "DeepSpeedCPUAdam steps here, AdamW in ZeRO-3: a difference in speed is partly theirs; "
        "--set optimizer.params.torch_adam=true compares all rows with torch's AdamW"
    )
    assert not told.disqualifying
    assert with_loss_caveats([plain, offloaded]) == [plain, offloaded]
    (flat,) = flat_rows([offloaded])
    assert told.text in [each.text for each in flat_reader.read_summary(flat_reader.check_rows([flat])[0]).caveats]
    assert not any("steps here" in each.text for row in rows("cuda") for each in row.caveats)


def test_a_loss_of_zero_is_compared_without_dividing_by_it() -> None:
    assert compare_losses([losing(1, 0.0), losing(2, 0.0)]) == {}
    assert list(compare_losses([losing(1, 0.0), losing(2, 1.0)])) == [1]


def of_file(name: str, rate: float, *losses: float) -> TrialSummary:
    """A row of a file that asks for this learning rate."""
    trial = fakes.trial(fakes.zero(2), on=CUDA, of=fakes.workload())
    optimizer = {"type": "AdamW", "params": {**trial.ds_config["optimizer"]["params"], "lr": rate}}
    configuration = replace(trial.configuration, name=name, label=name, source="file")
    trial = replace(trial, configuration=configuration, ds_config={**trial.ds_config, "optimizer": optimizer})
    return summarise(fakes.success(trial, losses=losses), None, None)


def test_a_file_that_asks_for_other_training_is_compared_with_files_that_ask_for_the_same() -> None:
    rows = [losing(1, 7.0, 6.9), of_file("same", 1e-4, 7.5, 7.4), of_file("slow", 1e-5, 8.0, 8.0)]
    assert list(compare_losses(rows)) == [1]
    told = [[caveat.text for caveat in row.caveats if "no other row" in caveat.text] for row in with_loss_caveats(rows)]
    assert list(map(len, told)) == [0, 0, 1]
    assert 3 in compare_losses([*rows, of_file("wrong", 1e-5, 9.0, 9.0)])
