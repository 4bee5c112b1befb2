"""The lines of the steps of a running trial."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ds_bench.config.spec import Inspection
from ds_bench.launch.step_monitor import StepMonitor
from ds_bench.records.step_files import STEPS_FILE, StepFileWriter, StepSample
from tests.support import fakes


class Steps:
    """The monitor of a trial of two ranks, and the files of their steps."""

    def __init__(self, folder: Path, monitor: Any = "steps") -> None:
        asked = fakes.trial(on=fakes.placement(num_gpus=2), inspection=Inspection(monitor=monitor))
        self.folder, self.monitor = folder, StepMonitor(asked, folder)
        self.monitor.update()  # before any rank has made its file
        self.ranks = [StepFileWriter(folder, rank, tokens_per_step=100) for rank in (0, 1)]

    def add(self, rank: int, seconds: float, loss: float | None, **values: Any) -> None:
        given = {"measured": True, "time": 10.0, "seconds": seconds, "loss": loss, **values}
        self.ranks[rank].add(StepSample(**given))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / STEPS_FILE).read_text().splitlines()]


def test_step_is_written_while_the_trial_runs_once_every_rank_has_finished_it(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.add(0, 0.5, 2.0, measured=False, gpu_peak_bytes=5, host_resident_bytes=30)
    steps.monitor.update()
    assert steps.lines() == []
    steps.add(1, 0.25, 4.0, time=11.0, measured=False, gpu_peak_bytes=7, host_resident_bytes=40)
    steps.add(1, 0.25, None)
    steps.monitor.update()  # not closed: whoever follows the file sees the line
    assert steps.lines() == [{
        "step": 0, "phase": "warmup", "time": 11.0, "seconds": 0.5, "tokens_per_second": 200.0, "loss": 3.0,
        "gpu_allocated_bytes": None, "gpu_reserved_bytes": None, "gpu_peak_bytes": 7, "host_resident_bytes": 70,
    }]  # fmt: skip
    steps.add(0, 0.25, 3.0)
    steps.monitor.close()
    second = steps.lines()[1]
    assert (second["step"], second["phase"], second["loss"]) == (1, "measured", None)  # of one rank it was not finite
    assert second["host_resident_bytes"] is None


def test_full_disk_ends_the_monitor_and_not_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(tmp_path)
    for rank in (0, 1):
        steps.add(rank, 0.5, 2.0)

    class FullDisk:
        def write(self, _data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    events = Mock()
    monkeypatch.setattr(steps.monitor, "_event_file", events)
    steps.monitor._file.close()
    monkeypatch.setattr(steps.monitor, "_file", FullDisk())
    steps.monitor.update()
    steps.monitor.close()
    events.close.assert_called_once()
    assert steps.monitor.problem == "--monitor could not write all steps: No space left on device"


def test_tensorboard_reads_the_same_steps_from_its_files(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    steps = Steps(tmp_path, "tensorboard")
    for number in range(3):
        for rank in (0, 1):
            steps.add(rank, 0.5, 4.0 - number, gpu_allocated_bytes=2**30)
    steps.monitor.update()  # TensorBoard shows them while the trial runs
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 4.0), (1, 3.0), (2, 2.0)]
    assert [event.wall_time for event in events.Scalars("throughput_tokens_per_sec")] == [10.0] * 3
    assert sorted(events.Tags()["scalars"]) == [
        "gpu_allocated_gb", "loss", "step_time_ms", "throughput_tokens_per_sec",
    ]  # fmt: skip
    steps.monitor.close()
