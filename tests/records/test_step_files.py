"""The steps that a rank reports while it trains, and the lines that are kept of them."""

from __future__ import annotations

from pathlib import Path

from ds_bench.records import step_files
from ds_bench.records.step_files import StepFileReader, StepFileWriter, StepSample, TrialStep, read_steps


def sample(number: int, loss: float | None = 2.5, **memory: int) -> StepSample:
    return StepSample(measured=number >= 2, time=100.0 + number, seconds=0.25, loss=loss, **memory)


def test_a_reader_gets_every_step_once_with_what_is_not_known_as_none(tmp_path: Path) -> None:
    reader = StepFileReader(tmp_path, 0)
    assert list(reader.new_samples()) == []  # the rank has not begun
    writer = StepFileWriter(tmp_path, 0, tokens_per_step=512)
    first, second = sample(0, gpu_allocated_bytes=2**40, gpu_peak_bytes=0), sample(1, None, host_resident_bytes=7)
    writer.add(first)
    assert list(reader.new_samples()) == [(0, first)]
    assert reader.tokens_per_step == 512
    writer.add(second)
    assert list(reader.new_samples()) == [(1, second)]
    assert list(reader.new_samples()) == []


def test_a_reader_that_comes_late_gets_the_last_steps_under_their_numbers(tmp_path: Path) -> None:
    writer, reader = StepFileWriter(tmp_path, 0, 1), StepFileReader(tmp_path, 0)
    count = step_files._CAPACITY + 5
    for number in range(count):
        writer.add(sample(number))
    seen = list(reader.new_samples())
    assert [number for number, _ in seen] == list(range(6, count))
    assert all(value.time == 100.0 + number for number, value in seen)


def test_lines_that_are_no_steps_are_left_out(tmp_path: Path) -> None:
    assert read_steps(tmp_path) == []
    line = b'{"step": 0, "phase": "warmup", "time": 1.0, "seconds": 0.5, "tokens_per_second": 256.0, "loss": null}'
    (tmp_path / step_files.STEPS_FILE).write_bytes(line + b'\n{"step": 1}\nnonsense\n' + line[:40])
    assert read_steps(tmp_path) == [
        TrialStep(step=0, phase="warmup", time=1.0, seconds=0.5, tokens_per_second=256.0, loss=None)
    ]
