"""Runs written for TensorBoard, read back by its own reader."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ds_bench.analysis import load_results
from ds_bench.cli import commands
from ds_bench.config.options import TRACKERS
from ds_bench.records.step_series import STEPS_FILE
from ds_bench.report.trackers import tracked_runs
from ds_bench.system import environment
from tests.support import fakes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two trials that trained, one of which was monitored, and one that ran out of memory."""
    zero = [fakes.trial(fakes.zero(stage)) for stage in (0, 1, 2)]
    records = [fakes.success(zero[0]), fakes.success(zero[1]), fakes.failure(zero[2])]
    store = fakes.write_run(tmp_path_factory.mktemp("out"), records)
    line = {"step": 0, "phase": "measured", "time": 1e9, "seconds": 0.5, "tokens_per_second": 99.0, "loss": 3.5}
    for name in ("00_zero1", "00_zero1_attempt2"):  # it was run again
        folder = store.folder / "trials" / name
        folder.mkdir(parents=True)
        (folder / STEPS_FILE).write_text(json.dumps(line | {"host_resident_bytes": 2**30}) + "\n")
        line["loss"] = 2.5
    return store.folder


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """A folder and the variables of a machine whose only way out is a proxy that nobody may have asked."""
    folder = tmp_path_factory.mktemp("machine")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        variables = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
        variables |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), address)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_"))}
        yield folder, {**kept, **variables, "HF_TOKEN": "hf_nobody", "WANDB_API_KEY": "0" * 40}
        proxy.setblocking(False)
        with contextlib.suppress(BlockingIOError), proxy.accept()[0] as asked:
            pytest.fail(f"something was sent: {asked.recv(1000)!r}")


def python(machine: tuple[Path, Mapping[str, str]], *words: object) -> str:
    folder, variables = machine
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_tensorboard_shows_every_trial(run: Path, machine: tuple[Path, Mapping[str, str]]) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # copied again, a trial has its steps once
        out = python(machine, "-m", "ds_bench", "report", run, "--to", "tensorboard")
        assert "tensorboard: 3 runs in tensorboard; look at them: tensorboard --logdir tensorboard" in out
    folders = machine[0] / "tensorboard" / run.name
    events = event_accumulator.EventAccumulator(str(folders / "00_zero0")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(12))
    assert events.Scalars("loss")[11].value == pytest.approx(6.89)
    assert events.Scalars("throughput_tokens_per_sec")[11].value == pytest.approx(4 * 128 / 0.1)
    (summary,) = events.Scalars("summary/throughput_tokens_per_sec")
    assert summary.value == pytest.approx(5120)
    assert b"zero0" in events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    monitored = event_accumulator.EventAccumulator(str(folders / "00_zero1")).Reload()
    assert [(event.step, event.value) for event in monitored.Scalars("cpu_used_gb")] == [(0, 1.0)]
    assert [event.value for event in monitored.Scalars("loss")] == [2.5]
    failed = event_accumulator.EventAccumulator(str(folders / "00_zero2")).Reload()
    assert "loss" not in failed.Tags()["scalars"]


def test_flat_files_that_do_not_tell_their_run_are_groups_of_their_own(tmp_path: Path) -> None:
    """Their trials have the same names, so that those of one would take the place of the other's."""
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for number, file in enumerate(files):
        trial = fakes.trial(fakes.zero(1))
        store = fakes.write_run(tmp_path / file.stem, [fakes.success(trial, step_seconds=[0.1 + number] * 10)])
        rows = [{**row, "run_id": None} for row in json.loads(store.json_path.read_text())]
        file.write_text(json.dumps(rows))
    found = tracked_runs([load_results.load(file) for file in files])
    assert [(each.group, each.name) for each in found] == [("before", "00_zero1"), ("after", "00_zero1")]


def test_a_trial_of_two_results_is_sent_once_and_with_its_steps(run: Path) -> None:
    flat = run.parent.parent / "copied.json"
    flat.write_bytes(next(run.parent.parent.glob("*comparison_*.json")).read_bytes())
    for paths in ([run, flat], [flat, run]):
        found = tracked_runs([load_results.load(path) for path in paths])
        assert [(each.group, each.name) for each in found] == [(run.name, f"00_zero{stage}") for stage in (0, 1, 2)]
        assert found[0].steps


def test_a_tracker_that_is_not_installed_is_told_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name in TRACKERS else name)
    for tracker in TRACKERS:
        assert commands.main(["report", str(tmp_path / "missing"), "--to", tracker]) == 2
        message = f"ds_bench: --to {tracker}: the package {tracker} is not installed (pip install {tracker})\n"
        assert capsys.readouterr() == ("", message)
    # As is --monitor, before a run begins.
    flags = ["run", "--model", "tiny", "--monitor", "tensorboard", "--output-dir", str(tmp_path / "out")]
    assert commands.main(flags) == 2
    assert "--monitor tensorboard: the package tensorboard is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
