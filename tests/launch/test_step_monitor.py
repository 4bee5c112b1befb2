"""The lines that the parent writes for each step of a running trial, and TensorBoard's files."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.spec import Inspection, Trial
from ds_bench.launch.trial_watcher import StepMonitor
from ds_bench.records.step_series import STEPS_FILE, StepFileWriter, StepSample
from tests.support import fakes


def two_ranks(monitor: Any = "steps") -> Trial:
    return fakes.trial(on=fakes.placement(num_gpus=2), inspection=Inspection(monitor=monitor))


def sample(seconds: float, loss: float | None, **values: Any) -> StepSample:
    return StepSample(**{"measured": True, "time": 10.0, "seconds": seconds, "loss": loss, **values})


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / STEPS_FILE).read_text().splitlines()]


def test_a_step_is_written_while_the_trial_runs_once_every_rank_has_finished_it(tmp_path: Path) -> None:
    monitor = StepMonitor(two_ranks(), tmp_path)
    monitor.update()
    ranks = [StepFileWriter(tmp_path, rank, tokens_per_step=100) for rank in (0, 1)]
    ranks[0].add(sample(0.5, 2.0, measured=False, gpu_peak_bytes=5, host_resident_bytes=30))
    monitor.update()
    assert lines(tmp_path) == []
    ranks[1].add(sample(0.25, 4.0, time=11.0, measured=False, gpu_peak_bytes=7, host_resident_bytes=40))
    ranks[1].add(sample(0.25, None))
    monitor.update()  # not closed: whoever follows the file sees the line
    first = {"step": 0, "phase": "warmup", "time": 11.0, "seconds": 0.5, "tokens_per_second": 200.0, "loss": 3.0}
    (line,) = lines(tmp_path)
    assert line == first | {
        "gpu_allocated_bytes": None, "gpu_reserved_bytes": None, "gpu_peak_bytes": 7, "host_resident_bytes": 70
    }  # fmt: skip
    ranks[0].add(sample(0.25, 3.0))
    monitor.close()
    second = lines(tmp_path)[1]
    assert (second["step"], second["phase"], second["loss"]) == (1, "measured", None)  # of one rank it was not finite
    assert second["host_resident_bytes"] is None


def test_a_full_disk_ends_the_monitor_and_not_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = StepMonitor(two_ranks(), tmp_path)
    for rank in (0, 1):
        StepFileWriter(tmp_path, rank, 1).add(sample(0.5, 2.0))

    class FullDisk:
        def write(self, _data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None: ...

    monitor._file.close()
    monkeypatch.setattr(monitor, "_file", FullDisk())
    monitor.update()
    monitor.close()
    assert monitor.problem == "--monitor could not write all steps: No space left on device"


def test_tensorboard_reads_the_same_steps_from_its_files(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = StepMonitor(two_ranks("tensorboard"), tmp_path)
    ranks = [StepFileWriter(tmp_path, rank, tokens_per_step=100) for rank in (0, 1)]
    for number in range(3):
        for rank in ranks:
            rank.add(sample(0.5, 4.0 - number, gpu_allocated_bytes=2**30))
    monitor.update()  # TensorBoard shows them while the trial runs
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 4.0), (1, 3.0), (2, 2.0)]
    assert [event.wall_time for event in events.Scalars("throughput_tokens_per_sec")] == [10.0] * 3
    assert sorted(events.Tags()["scalars"]) == [
        "gpu_allocated_gb", "loss", "step_time_ms", "throughput_tokens_per_sec"
    ]  # fmt: skip
    monitor.close()
