"""Why two rows differ, in sentences. ``data/explanations`` holds a whole text; ``DS_BENCH_UPDATE=1`` writes it anew."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis.row_difference import RowDifference, explain
from ds_bench.analysis.summary import summarise
from ds_bench.config.spec import Configuration
from ds_bench.prediction import trial_predictions
from ds_bench.prediction.model_profile import find_profile
from ds_bench.prediction.trial_predictions import MemoryCapacity
from ds_bench.records.schema import TrialRecord
from ds_bench.report import row_explanation
from ds_bench.report.comparison_report import ComparisonReport, build_report
from ds_bench.report.html_report import render_page
from ds_bench.report.markdown import render_markdown
from ds_bench.report.row_explanation import explanation_lines, paragraph, report_paragraphs, signed_size, size_text
from ds_bench.report.table import print_report
from tests.support import fakes
from tests.support.fakes import preset

GB = fakes.GB
EXPECTED = Path(__file__).resolve().parents[1] / "data" / "explanations" / "higher_stage.txt"
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
    changes = trial_predictions.predict_changes(trials[0], profile, facts.hidden_size)
    trials = [replace(trial, prediction={**(trial.prediction or {}), **changes}) for trial in trials]
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
    return build_report([summarise(record, None, None) for record in records], environments=[fakes.environment()])


@pytest.fixture(scope="module")
def stages() -> ComparisonReport:
    return report(*runs(fakes.zero(2), 0.31), *runs(fakes.zero(3), 0.43))


def higher_stage(stages: ComparisonReport) -> RowDifference:
    return explain(*stages.comparison.rows)


def test_the_whole_text_says_why_a_higher_stage_takes_more_at_the_peak(stages: ComparisonReport) -> None:
    text = "\n".join(explanation_lines(higher_stage(stages), stages.title, 80)) + "\n"
    if os.environ.get("DS_BENCH_UPDATE"):
        EXPECTED.parent.mkdir(exist_ok=True)
        EXPECTED.write_text(text, encoding="utf-8")
    assert text == EXPECTED.read_text(encoding="utf-8")


def test_lines_keep_to_the_width_and_numbers_to_their_units(stages: ComparisonReport) -> None:
    for width in (40, 60, 80):
        lines = list(explanation_lines(higher_stage(stages), stages.title, width))
        assert all(len(line) <= width or " " not in line.strip() for line in lines)
        assert not [line for line in lines if re.match(r"\s*(GB|MB|ms|%)\b", line)]


def test_figures_have_three_significant_digits(stages: ComparisonReport) -> None:
    text = paragraph(higher_stage(stages))
    numbers = [number.replace(",", "").replace(".", "").lstrip("0") for number in re.findall(r"\d[\d,.]*\d", text)]
    assert numbers
    assert all(len(number) <= 3 for number in numbers if number != "95")


def test_sizes_have_a_sign_and_a_fitting_unit() -> None:
    assert [size_text(size) for size in (45.5 * GB, 0.1 * GB, 6.4 * 2**20, 17, 0, None)] == [
        "45.5 GB", "0.100 GB", "6.40 MB", "17 B", "0 B", "—",
    ]  # fmt: skip
    assert [signed_size(size) for size in (GB, -GB, 0)] == ["+1.00 GB", "−1.00 GB", "0"]


def test_a_failed_row_says_what_it_asked_for() -> None:
    failed = fakes.failure(runs(fakes.zero(0), 0.3)[0].trial, requested_bytes=2 * GB, free_bytes=GB)
    both = report(failed, *runs(fakes.zero(3), 0.43))
    text = paragraph(explain(*both.comparison.rows))
    assert text.startswith("ZeRO-0 did not train: OOM in backward, asked 2.00 GB, 1.00 GB free.")
    assert "Predicted: GPU memory at the fullest moment" in text


def test_reports_hold_the_pairs_that_matter_each_once(stages: ComparisonReport) -> None:
    records = [record for stage, seconds in ((0, 0.30), (1, 0.31), (2, 0.27), (3, 0.4)) for record in runs(
        fakes.zero(stage), seconds
    )]  # fmt: skip
    whole = report(*records)
    headings = [heading for heading, _ in report_paragraphs(whole)]
    chosen = whole.recommended_row
    assert chosen is not None
    assert headings[0] == f"{chosen.label} against ZeRO-0"
    assert len(headings) == len(set(headings)) == 3  # the runner-up is the baseline
    page, block = render_page([whole], "now"), render_markdown(whole)
    assert all(heading in page and heading in block for heading in headings)


def test_pairs_beyond_the_most_that_are_explained_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_explanation, "_MOST_PARAGRAPHS", 2)
    whole = report(*(record for stage in range(4) for record in runs(fakes.zero(stage), 0.3 + stage / 100)))
    *explained, (heading, text) = report_paragraphs(whole)
    assert (len(explained), heading) == (2, "1 more pair")
    assert "explain A B" in text


def test_one_row_has_nothing_to_explain() -> None:
    alone = report(*runs(fakes.zero(2), 0.3))
    assert report_paragraphs(alone) == []
    assert "What changes between rows" not in render_page([alone], "now")


def test_verbose_prints_the_paragraphs(stages: ComparisonReport, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(stages, sys.stdout)
    assert "ZeRO-3 against ZeRO-2: GPU memory at the peak" in " ".join(capsys.readouterr().out.split())


def test_noise_is_no_difference() -> None:
    noisy = report(*runs(fakes.zero(1), 0.3), *runs(fakes.zero(2), 0.3, (1.01, 0.99, 1.0)))
    text = paragraph(explain(*noisy.comparison.rows))
    assert "not distinguishable" in text
    assert "changes most" not in text


def test_rows_that_only_failed_are_left_to_the_table() -> None:
    trials = [fakes.trial(fakes.zero(stage), on=CARDS) for stage in (0, 1)]
    assert report_paragraphs(report(*map(fakes.failure, trials))) == []
