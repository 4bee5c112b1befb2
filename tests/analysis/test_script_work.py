"""Rows of a user's script: their figures, and whether they did the same work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_bench.analysis.load_results import flat_run
from ds_bench.analysis.loss_parity import with_loss_caveats
from ds_bench.analysis.row import Run, make_run
from ds_bench.config.caveat_texts import CaveatKind
from ds_bench.config.training_script import Script
from ds_bench.report.comparison_columns import short_columns
from ds_bench.report.comparison_report import build_report
from tests.support import fakes

SCRIPT = Script(
    command=("train.py", "--deepspeed", "{config}"), digest="abc", python="/venv/bin/python", config_source="command"
)
OF = fakes.workload(model="train.py", model_source="script", script=SCRIPT, num_steps=4, warmup_steps=2)


def row(of_stage: int, *, seconds: tuple[float, ...] = (), losses: Any = None, **seen: Any) -> Run:
    """A row of a stage; ``seen``: fields of its ScriptMeasurement, and of its RankMeasurement."""
    trial = fakes.trial(fakes.zero(of_stage), of=OF, on=fakes.placement(num_gpus=2))
    ranks = {name: seen.pop(name) for name in ("parameter_count", "micro_batch_size") if name in seen}
    ranks |= {} if losses is None else {"losses": losses}
    measured = fakes.script_measurement(trial, **seen)
    return make_run(fakes.success(trial, step_seconds=seconds, script=measured, **ranks), None, None)


def test_figures_are_of_the_tokens_seen_and_what_does_not_exist_is_empty() -> None:
    seen = {
        "tokens": (1, 1, 10, 20, 30, 40),
        "unpadded_tokens": (1, 1, 10, 10, 10, 10),
        "gap_seconds": (9, 9, 1, 2, 3, 4),
    }
    found = row(2, seconds=(1.0, 1.0, 1.0, 2.0), **seen, other_engines=("Critic", "Reward")).row
    assert (found.throughput_tokens_per_sec, found.tokens_unpadded_per_sec) == (100 / 5 * 2, 40 / 5 * 2)
    assert (found.gap_ms, found.main_engine, found.other_engines) == (2500.0, "GPT2LMHeadModel", "Critic, Reward")
    assert (found.script, found.script_hash, found.python) == (
        "train.py --deepspeed '{config}'",
        "abc",
        "/venv/bin/python",
    )
    empty = (found.seq_length, found.throughput_samples_per_sec, found.mfu, found.activation_checkpointing)
    assert (empty, found.precision) == ((None,) * 4, "bf16")
    assert flat_run(found).trial.workload.script == SCRIPT


def test_without_token_ids_rows_compare_by_samples_and_without_samples_by_steps() -> None:
    none, seconds = {"tokens": (0,) * 6, "unpadded_tokens": (0,) * 6}, (0.5,) * 4
    for samples, rate, unit in (((8,) * 6, 8 * 2 / 0.5, "samples/s"), ((), 1 / 0.5, "steps/s")):
        seen = {"samples": samples, "micro_steps": (len(samples),) * 6}
        runs = [row(stage, seconds=seconds, **seen, **none) for stage in (1, 2)]
        report = build_report(runs)
        rows = report.comparison.rows
        assert [(each.tokens_per_second, each.rate_unit, each.ratio) for each in rows] == [(rate, unit, 1)] * 2
        found = runs[0].row
        expected = None if unit == "steps/s" else rate
        assert (found.throughput_tokens_per_sec, found.throughput_samples_per_sec) == (None, expected)
        assert f"{unit[:-2]} per second" in str(found.caveats)
        assert ("no forward pass" in str(found.caveats)) == (found.gap_ms is None) == (unit == "steps/s")
        assert report.recommendation.facts[0].values["unit"] == unit
        assert unit in [column.heading for column in short_columns(report)]


def test_work_is_compared_in_order_with_what_most_rows_did(subtests: pytest.Subtests) -> None:
    for changes, kind in (
        ({}, None),
        ({"parameter_count": 5, "tokens": (9,) * 6}, CaveatKind.OTHER_PARAMETERS),
        ({"tokens": (64, 64, 64, 63, 64, 64), "id_sums": (9,) * 6}, CaveatKind.OTHER_TOKENS),
        ({"micro_steps": (2,) * 6}, CaveatKind.OTHER_TOKENS),
        ({"samples": (0, 0, 0, 0, 0, 9)}, CaveatKind.OTHER_TOKENS),
        ({"id_sums": (0, 1, 2, 3, 4, 9)}, CaveatKind.OTHER_DATA),
        ({"losses": (7.1, *(7.0,) * 5)}, CaveatKind.OTHER_FIRST_LOSS),
        ({"losses": (7.0, *(8.0,) * 5)}, CaveatKind.OTHER_LOSSES),
        ({"losses": ()}, None),
        # Different sizes on purpose: such rows are compared by their tokens per second.
        ({"micro_batch_size": 8, "tokens": (128,) * 6}, None),
    ):
        with subtests.test(changes=changes):
            odd = row(3, **changes)
            compared = with_loss_caveats([odd, row(1), row(2)])
            assert [[each.kind for each in run.caveats] for run in compared] == [[kind] if kind else [], [], []]
            again = with_loss_caveats(compared)
            assert [run.caveats for run in again] == [run.caveats for run in compared]


def test_an_engine_that_did_not_run_the_rows_file_disqualifies_it() -> None:
    for changes in ({"stage": 0}, {"offload_optimizer": "cpu"}, {"offload_param": "cpu"}):
        (caveat,) = row(3, **changes).caveats
        assert (caveat.kind, caveat.kind.disqualifies) == (CaveatKind.OTHER_ENGINE, True)


def test_a_value_of_the_rows_file_that_the_engine_does_not_have_disqualifies_it(subtests: pytest.Subtests) -> None:
    for ran, source, unlike in (
        ({}, "command", {"ran": "zero_optimization.overlap_comm not set, bf16.enabled not set", "asked": "true, true"}),
        ({"overlap_comm": False}, "override", {"ran": "zero_optimization.overlap_comm false", "asked": "true"}),
        # "auto" is anyone's to replace, Accelerate sets steps_per_print, and an overridden script keeps its precision.
        ({"overlap_comm": True}, "override", None),
    ):
        with subtests.test(ran=ran, unlike=unlike):
            zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"}
            file = {"steps_per_print": 10, "zero_optimization": zero, "bf16": {"enabled": True}}
            file["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}  # before 0.19 DeepSpeed takes it out
            of = replace(OF, script=replace(SCRIPT, config_source=source))
            trial = replace(fakes.trial(fakes.zero(2), of=of), ds_config=file)
            engine = {
                "steps_per_print": "Infinity",
                "zero_optimization": {"stage": 2, "reduce_bucket_size": 16384, **ran},
            }
            engine["optimizer"] = {"type": "AdamW", "params": {}}
            caveats = make_run(fakes.success(trial, resolved_config=engine), None, None).caveats
            assert [(each.kind, each.values) for each in caveats] == (
                [(CaveatKind.OTHER_ENGINE, unlike)] if unlike else []
            )


def test_known_bugs_of_the_scripts_deepspeed_are_caveats() -> None:
    file = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto", "disable_python_gc": True}
    trial = replace(fakes.trial(fakes.zero(2), of=OF), ds_config=file)

    def texts(version: str, *kinds: CaveatKind) -> str:
        measured = {"deepspeed_version": version, "grad_accum": 4, "resolved_config": file}
        return str(
            [each.text for each in make_run(fakes.success(trial, **measured), None, None).caveats if each.kind in kinds]
        )

    assert "issue 7718" in texts("0.18.1", CaveatKind.TRAINED_WRONGLY)
    assert "issue 7718" not in texts("0.18.4", *CaveatKind)
    assert "divides gradients" in texts("0.18.4", CaveatKind.MAY_TRAIN_WRONGLY), "if the model is of a certain kind"
    assert "0.17.6 does not read disable_python_gc" in texts("0.17.6", CaveatKind.NOTE)


def test_steps_with_an_evaluation_or_a_save_are_named_and_do_not_make_a_row_unstable() -> None:
    seconds, apart = (1.0, 5.0, 1.0, 3.0), {"evaluation_forwards": (0, 0, 0, 2, 0, 0), "saves": (1, 0, 0, 0, 0, 1)}
    (caveat,) = row(1, seconds=seconds, **apart).caveats
    assert caveat.values == {"count": 2, "steps": 4, "apart": 4.0, "usual": 1.0}
    # A reference model is evaluated in every step: then none is unusual.
    kinds = [CaveatKind.UNSTABLE_STEPS, CaveatKind.NOT_STEADY]
    assert [each.kind for each in row(1, seconds=seconds, saves=(1,) * 6).caveats] == kinds
