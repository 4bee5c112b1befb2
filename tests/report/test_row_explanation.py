"""Why two rows differ: the tables of ``explain``, and its sentence."""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from ds_bench.analysis.comparison import ComparisonRow
from ds_bench.analysis.row import make_run
from ds_bench.analysis.row_difference import RowDifference, explain
from ds_bench.config.spec import Configuration
from ds_bench.prediction import trial_predictions
from ds_bench.prediction.model_profile import find_profile
from ds_bench.prediction.trial_predictions import MemoryCapacity
from ds_bench.records.schema import TrialRecord
from ds_bench.report.comparison_report import ComparisonReport, build_report
from ds_bench.report.row_explanation import explanation_lines, explanation_tables, largest_change
from tests.support import fakes
from tests.support import sample_reports as samples
from tests.support.fakes import preset

GB = fakes.GB
CARDS = fakes.placement(accelerator="cuda", num_gpus=8)
MODEL = "gpt2-xl"


def runs(
    configuration: Configuration, seconds: float, factors: tuple[float, ...] = (0.998, 1.0, 1.002), **values: Any
) -> list[TrialRecord]:
    """Three runs on eight cards that took what was predicted: the gathered parameters are the rest of the peak."""
    facts = preset(MODEL)
    work = fakes.workload(
        model=MODEL, model_type=facts.model_type, model_config=facts.config, batch_size=1, seq_length=512
    )
    profile = find_profile(facts, 512)
    trials = trial_predictions.attach_predictions(
        [fakes.trial(configuration, on=CARDS, of=work, repeat=repeat) for repeat in range(3)],
        profile,
        MemoryCapacity(gpu_bytes=None, host_bytes=None),
        skip=False,
    )
    trials = [trial_predictions.with_savings(each, profile, facts.hidden_size, lacked_memory=False) for each in trials]
    prediction = trial_predictions.stored_prediction(trials[0])
    assert prediction is not None
    kept = {name: size for name, size in prediction.ledger["gpu"].items() if name in ("parameters", "optimizer_states")}
    if configuration.stage == 3:
        kept["deepspeed_buffers"] = prediction.ledger["gpu"]["deepspeed_buffers"]
    measured = {
        "ledger": prediction.ledger,
        "ledger_after_step": {"gpu": kept},
        "gpu_peak_bytes": prediction.gpu_bytes - prediction.gpu["overhead"],
        "gpu_allocated_bytes": sum(kept.values()),
        "host_peak_bytes": 2 * GB,
        "parameter_count": facts.parameters,
        "phase_seconds": {"forward": 0.3 * seconds, "backward": 0.6 * seconds, "step": 0.02},
    }
    return [
        fakes.success(trial, step_seconds=(seconds * factor,) * 10, **{**measured, **values})
        for trial, factor in zip(trials, factors, strict=True)
    ]


def report(*records: TrialRecord) -> ComparisonReport:
    return build_report([make_run(record) for record in records], environments=[fakes.environment()])


@pytest.fixture(scope="module")
def stages() -> ComparisonReport:
    return report(*runs(fakes.zero(2), 0.31), *runs(fakes.zero(3), 0.43))


def test_a_higher_stage_that_takes_more_at_the_peak(stages: ComparisonReport, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(explanation_lines(explain(*stages.comparison.rows), stages.title, 80)) == snapshot


def test_a_failed_row_is_explained_by_the_predictions_of_both(snapshot: SnapshotAssertion) -> None:
    failed = fakes.failure(runs(fakes.zero(0), 0.3)[0].trial, requested_bytes=2 * GB, free_bytes=GB)
    both = report(failed, *runs(fakes.zero(3), 0.43))
    assert largest_change(explain(*both.comparison.rows)) == snapshot


def test_a_difference_within_the_noise_names_no_phase() -> None:
    noisy = report(*runs(fakes.zero(1), 0.3), *runs(fakes.zero(2), 0.3, (1.01, 0.99, 1.0)))
    sentence = largest_change(explain(*noisy.comparison.rows))
    assert "statistically indistinguishable" in sentence
    assert "phases" not in sentence


def timed(difference: RowDifference) -> dict[str, tuple[str, str]]:
    """Part of a step → what ``explain`` shows of both rows."""
    (time,) = [table for table in explanation_tables(difference) if table.headings[0] == "Time"]
    return {row[0].split(",")[0].strip(): (row[1], row[2]) for row in time.rows if "timed separately" in row[0]}


def test_parts_are_those_of_the_run_nearest_to_the_mean_and_communication_is_named_if_both_rows_have_it() -> None:
    def row(label: str, communication: float) -> ComparisonRow:
        """Of three runs the second is nearest to the mean."""
        parts = {"forward": 0.02, "backward": 0.03, "step": 0.05}
        runs = (
            samples.run(fakes.zero(1), seconds, repeat=repeat, step_parts={**parts, "communication": in_run})
            for repeat, (seconds, in_run) in enumerate(((0.3, 9.0), (0.2, communication), (0.1, 8.0)))
        )
        return samples.row(label, *runs)

    assert timed(explain(row("a", 0.005), row("b", 0.02)))["communication"] == ("5.00 ms", "20.0 ms")
    without = samples.row("c", samples.run(fakes.zero(2), 0.1))
    assert "communication" not in timed(explain(row("a", 0.005), without))
