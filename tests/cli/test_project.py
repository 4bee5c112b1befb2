"""``project RESULT --num-gpus …``: labelled as a projection everywhere, and refused where it would be a guess."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench import load
from ds_bench.cli.commands import main
from ds_bench.prediction.trial_predictions import (
    MemoryCapacity,
    attach_predictions,
    profile_model,
    stored_prediction,
)
from ds_bench.records.schema import CommunicationOperation, TrialRecord
from tests.support import fakes

LINKS = ("--link", "nvlink:900", "--inter", "ib:400x8")


def records(*stages: int, num_gpus: int = 4, accelerator: str = "cuda", **changes: Any) -> list[TrialRecord]:
    """One run of each stage, by default on four GPUs."""
    on = fakes.placement(accelerator=accelerator, num_gpus=num_gpus)
    return [
        fakes.success(fakes.trial(fakes.zero(stage), on=on, trial_id=f"{stage:02d}"), **changes) for stage in stages
    ]


def project(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    assert main(["project", str(folder), *arguments]) == 0
    return capsys.readouterr().out


def test_every_form_says_that_it_is_a_projection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fakes.write_run(tmp_path, records(0, 3)).folder
    sizes = ("--num-gpus", "8", "64", *LINKS)
    table = project(capsys, folder, *sizes)
    assert table.startswith("PROJECTION, not measured: tiny · 4 × H100")
    lines = [line.split() for line in table.splitlines()]
    assert [line[:4] for line in lines if line[:1] in (["ZeRO-0"], ["ZeRO-3"])] == [
        ["ZeRO-0", "(measured)", "4", "1"],
        ["ZeRO-0", "8", "1", "4x1"],
        ["ZeRO-0", "64", "8", "4x1"],
        ["ZeRO-3", "(measured)", "4", "1"],
        ["ZeRO-3", "8", "1", "4x1"],
        ["ZeRO-3", "64", "8", "4x1"],
    ]
    assert "360 GB/s (10^9) each way per GPU" in table
    (report,) = json.loads(project(capsys, folder, *sizes, "--format", "json"))
    assert report["projection"] is True
    assert all(row["projection"] is True for row in report["rows"])
    (same,) = load(folder).project([8, 64], link="nvlink:900", inter="ib:400x8")
    assert [row.projection and row.projection.step_seconds.no_overlap * 1000 for row in same.rows] == [
        row["step_time_ms_no_overlap"] for row in report["rows"]
    ]
    of_csv = list(csv.DictReader(io.StringIO(project(capsys, folder, *sizes, "--format", "csv"))))
    assert [row["projection"] for row in of_csv] == ["True"] * 4
    for row, cells in zip(report["rows"], of_csv, strict=True):
        assert float(cells["step_time_ms_no_overlap"]) == pytest.approx(row["step_time_ms_no_overlap"])
        assert row["tokens_per_sec_full_overlap"] * row["step_time_ms_full_overlap"] / 1000 == pytest.approx(
            row["global_batch_size"] * 128
        )


def test_memory_is_that_which_the_run_would_be_predicted_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fakes.write_run(tmp_path, records(1, 3)).folder
    (report,) = json.loads(project(capsys, folder, "--num-gpus", "8", "64", *LINKS, "--format", "json"))
    model = fakes.resolved_model()
    profile = profile_model(model, 128, "cuda")
    for row in report["rows"]:
        trial = fakes.trial(fakes.zero(row["stage"]), on=fakes.placement(accelerator="cuda", num_gpus=row["num_gpus"]))
        (planned,) = attach_predictions([trial], profile, MemoryCapacity(gpu_bytes=None, host_bytes=None), skip=False)
        prediction = stored_prediction(planned)
        assert prediction is not None
        assert row["gpu_memory_gb"] == prediction.gpu_bytes / 2**30


def test_a_measurement_on_the_cpu_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fakes.write_run(tmp_path, records(2, num_gpus=2, accelerator="cpu")).folder
    table = project(capsys, folder, "--num-gpus", "8", *LINKS)
    assert "measured on CPU ranks" in table
    assert "says nothing about GPUs" in table
    assert "Host GB" in table
    (report,) = json.loads(project(capsys, folder, "--num-gpus", "8", *LINKS, "--format", "json"))
    assert (report["rows"][0]["accelerator"], report["rows"][0]["gpu_memory_gb"]) == ("cpu", None)
    assert "measured on CPU ranks" in report["rows"][0]["notes"]


def test_rates_that_a_profile_measured_take_the_place_of_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes of one rank: 8 MB in 40 ms, of which 10 ms were waiting, are half of it through each rank in 30 ms."""
    operations = (
        CommunicationOperation(name="all_reduce", count=1, bytes=6e6, seconds=0.03, wait_seconds=0.01),
        CommunicationOperation(name="all_gather_into_tensor", count=1, bytes=2e6, seconds=0.01, wait_seconds=0.0),
    )
    (measured,) = records(1, num_gpus=2, communication=operations, step_parts={"step": 0.01, "communication": 0.04})
    ranks = tuple(replace(rank, hostname=f"node-{rank.rank}") for rank in measured.ranks)
    folder = fakes.write_run(tmp_path, [replace(measured, ranks=ranks)]).folder
    (report,) = json.loads(project(capsys, folder, "--num-gpus", "2", "4", "--format", "json"))
    own, four = report["rows"]
    assert (own["gpus_per_node"], own["link_bytes_per_sec"]) == (1, None)
    assert own["inter_bytes_per_sec"] == pytest.approx(4e6 / 0.03)
    assert own["communication_ms"] == pytest.approx(30.0)
    assert own["step_time_ms_no_overlap"] == own["step_time_ms_full_overlap"] == pytest.approx(100.0)
    assert four["communication_ms"] == pytest.approx(45.0)  # 3/4 of the tensors in place of 1/2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--num-gpus", "8"), "the rate of the links within a node is not known"),
        (("--num-gpus", "64", *LINKS[:2]), "64 GPUs are 8 nodes of 8, and the rate between nodes is not known"),
        (("--num-gpus", "12", *LINKS), "12 GPUs do not fill nodes of 8"),
        (("--num-gpus", "64", *LINKS, "--scaling", "strong"), "batch of 16 sequences cannot be split among 64 GPUs"),
        (("--num-gpus", "8", "--link", "ib:400"), "--link 'ib:400' is no link"),
        (("--num-gpus", "8", "--link", "$(reboot):1"), "is no link"),
        (("--num-gpus", "0", *LINKS), "is not a whole number of 1 or more"),
        ((), "--num-gpus"),
    ],
)
def test_what_cannot_be_projected_is_refused_in_one_line(
    arguments: tuple[str, ...], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fakes.write_run(tmp_path, records(2)).folder
    assert main(["project", str(folder), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert problem in printed.err
    assert printed.err.count("\n") == 1


def test_a_result_without_a_row_that_trained_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fakes.write_run(tmp_path, [fakes.failure(fakes.trial(fakes.zero(2)))]).folder
    assert main(["project", str(folder), "--num-gpus", "8", *LINKS]) == 2
    assert "nothing to project: ZeRO-2: OOM, not measured" in capsys.readouterr().err


def test_hosts_of_unequal_numbers_of_ranks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three and one: a node of neither number would come out."""
    (measured,) = records(2)
    ranks = tuple(replace(rank, hostname=f"node-{rank.rank // 3}") for rank in measured.ranks)
    folder = fakes.write_run(tmp_path, [replace(measured, ranks=ranks)]).folder
    assert main(["project", str(folder), "--num-gpus", "8", *LINKS]) == 2
    error = capsys.readouterr().err
    assert "nothing to project: ZeRO-2: its hosts have unequal numbers of ranks" in error
    assert error.count("\n") == 1


def test_rows_that_cannot_be_projected_stay_beside_those_that_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (good,) = records(2)
    bad = fakes.failure(fakes.trial(fakes.zero(0), on=good.trial.placement, trial_id="00"))
    folder = fakes.write_run(tmp_path, [bad, good]).folder
    (report,) = json.loads(project(capsys, folder, "--num-gpus", "4", "12", *LINKS, "--format", "json"))
    found = [(row["strategy"], row["num_gpus"], row["step_time_ms_no_overlap"], row["notes"]) for row in report["rows"]]
    assert [name for name, *_ in found] == ["zero0", "zero0", "zero2", "zero2"]
    assert [time is not None for _, _, time, _ in found] == [False, False, True, False]
    assert found[0][3] == "OOM, not measured"
    assert "12 GPUs do not fill nodes of 8" in found[3][3]
