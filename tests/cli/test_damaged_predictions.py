"""A stored prediction that is none: every command does as with a record that has no prediction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.cli.commands import main
from ds_bench.config.spec import Trial
from ds_bench.prediction import trial_predictions
from ds_bench.prediction.model_profile import find_profile
from ds_bench.prediction.trial_predictions import MemoryCapacity, stored_prediction
from ds_bench.records import schema
from ds_bench.records.json_files import append_line
from ds_bench.records.schema import TrialRecord
from tests.support import fakes

GB = fakes.GB
CARDS = fakes.placement(accelerator="cuda", num_gpus=2)
MODEL = "gpt2-xl"
SIZES = (None, "much", 7, [1], {"a": "b"}, {"a": None}, {"a": 1.5}, {"a": True}, {"a": {"b": 1}})
COUNT = ("much", 1.5, [1])
DAMAGES: Mapping[str, tuple[Any, ...]] = {
    "gpu": SIZES,
    "host": SIZES[:5],
    "nvme": SIZES[:5],
    "phase": (None, 7, ["loss"]),
    "ledger": (None, "much", [1], {"gpu": None}, {"gpu": 7}, {"gpu": {"a": "b"}}, {"gpu": {"a": None}}),
    "activation_bytes": COUNT,
    "checkpointed_activation_bytes": COUNT,
    "logits_and_loss_bytes": COUNT,
    "unknown": (7, ["much"]),
    "alternatives": (None, "much", 7, {"a": 1}, [None], ["much"], [{}]),
    "savings": (None, "much", 7, {"a": 1}, [None], ["much"], [{}]),
    "of a later version": (1,),
}
"""Key → values that no version has written there."""


def damaged(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {}
    yield from ({**whole, name: value} for name, values in DAMAGES.items() for value in values)
    # Keys that the first version already wrote.
    for name in ("gpu", "host", "nvme", "phase", "ledger", *(name for name in whole if name.endswith("_bytes"))):
        yield {key: value for key, value in whole.items() if key != name}
    for name in ("alternatives", "savings"):
        first, *others = whole[name]
        yield from ({**whole, name: [{**first, key: None}, *others]} for key in first)
        yield {**whole, name: [{**first, "of a later version": 1}, *others]}
        yield {**whole, name: [dict(list(first.items())[1:]), *others]}


def predicted_trials() -> list[Trial]:
    """Trials of stages 0 to 3 with their predictions, as a run plans them."""
    facts = fakes.preset(MODEL)
    work = fakes.workload(model=MODEL, model_type=facts.model_type, model_config=facts.config, batch_size=1)
    profile = find_profile(facts, work.seq_length)
    trials = [fakes.trial(fakes.zero(stage), on=CARDS, of=work) for stage in range(4)]
    nothing_known = MemoryCapacity(gpu_bytes=None, host_bytes=None)
    trials = trial_predictions.attach_predictions(trials, profile, nothing_known, skip=False)
    predictor = trial_predictions.ChangePredictor()
    return [predictor.complete(trial, profile, facts.hidden_size) for trial in trials]


def records(trials: list[Trial]) -> list[TrialRecord]:
    """The first ran out of memory, the second was not tried, the others trained; one missed its prediction."""
    peak, ledger = 20 * GB, {"gpu": {"parameters": 9 * GB, "optimizer_states": 9 * GB}}
    return [
        fakes.failure(trials[0], schema.OOM),
        fakes.failure(replace(trials[1], skipped="by hand"), schema.SKIPPED, error="by hand", phase=None),
        *(fakes.success(trial, gpu_total_bytes=24 * GB, gpu_peak_bytes=peak, ledger=ledger) for trial in trials[2:]),
    ]


def test_a_damaged_prediction_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = predicted_trials()
    folder = fakes.write_run(tmp_path, records(planned), on=fakes.environment()).folder
    page = tmp_path / "page.html"

    def outputs(trials: list[Trial], *commands: list[str]) -> list[str]:
        (folder / "records.jsonl").unlink()
        for record in records(trials):
            append_line(folder / "records.jsonl", record)
        texts = []
        for command in commands:
            assert main(command) == 0, capsys.readouterr().err
            texts.append(capsys.readouterr().out)
        texts += [page.read_text(encoding="utf-8")] if page.exists() else []
        page.unlink(missing_ok=True)
        return [re.sub(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", "", text) for text in texts]

    quick = [
        ["report", str(folder), "--verbose"],
        ["report", str(folder), "--format", "json"],
        ["explain", "zero3", "zero2", str(folder), "--json"],
    ]
    every = [*quick, ["report", str(folder), "--html", str(page)]]
    without = outputs([replace(trial, prediction=None) for trial in planned], *every)
    assert all(one != other for one, other in zip(outputs(planned, *every), without, strict=True))
    for number, shape in enumerate(damaged(dict(planned[2].prediction or {}))):
        trials = [replace(trial, prediction=shape) for trial in planned]
        assert not any(map(stored_prediction, trials)), shape
        if number % 10:
            assert outputs(trials, *quick) == without[: len(quick)], shape
        else:  # the page takes five times as long as all others
            assert outputs(trials, *every) == without, shape
