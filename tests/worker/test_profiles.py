"""Profiles of further steps: the same steps on every rank whatever a profiler does, the window of nsys, real files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from ds_bench.config.spec import Inspection, ProfileName
from ds_bench.records.rank_files import HeartbeatWriter
from ds_bench.worker import profiles, training_loop
from ds_bench.worker.profiles import ProfiledSteps
from tests.support import fakes
from tests.support.batches import batches


class Engine:
    """Trains one layer; counts its steps, and runs out of memory in one of them."""

    def __init__(self, fails_in: int | None = None) -> None:
        self.layer = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.layer.parameters())
        self.steps, self._fails_in = 0, fails_in
        self.gradient_accumulation_steps = lambda: 1
        self.get_global_grad_norm = lambda: None
        self.backward = torch.Tensor.backward

    def __call__(self, **_batch: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.ones(128, 64)).square().mean()  # type: ignore[no-any-return]

    def step(self) -> None:
        self.steps += 1
        if self.steps == self._fails_in:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    path = tmp_path / "trials" / "00_zero1"
    path.mkdir(parents=True)
    return path


def take(folder: Path, name: ProfileName, engine: Engine, accelerator: str = "cpu", **asked: Any) -> dict[str, Any]:
    trainer = training_loop.Trainer(engine, batches(), accelerator, HeartbeatWriter(folder, 0))
    trial = fakes.trial(inspection=Inspection(profiles=(name,), **asked))
    return profiles.take_profiles(trainer, trial, folder, ["a note"])


def use(monkeypatch: pytest.MonkeyPatch, observe: Any, further_steps: int = 0) -> None:
    monkeypatch.setitem(profiles.PROFILERS, "memory", (observe, further_steps))  # type: ignore[arg-type]


def test_every_rank_takes_the_same_steps_whatever_a_profiler_does(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """One that fails leaves a note and no files; a step of training that fails ends the rank."""

    def observe(steps: ProfiledSteps) -> tuple[str, ...]:
        steps.step()
        steps.file("txt").write_text("half of it")
        raise OSError("no space\nleft")

    use(monkeypatch, observe)
    engine = Engine()
    measured = take(folder, "memory", engine, profile_steps=3)
    assert (engine.steps, measured["profiles"], [*(folder / "profiles").iterdir()]) == (3, [], [])
    assert measured["notes"] == ["a note", "the memory profile failed on rank 0: OSError: no space left"]
    use(monkeypatch, lambda _steps: pytest.fail("called"), further_steps=2)
    engine = Engine()
    assert take(folder, "memory", engine, profile_ranks=(1,), profile_steps=3)["profiles"] == []
    assert engine.steps == 5
    with pytest.raises(torch.OutOfMemoryError):
        take(folder, "torch", Engine(fails_in=2))


def test_a_file_that_is_too_large_is_removed_with_a_note(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def observe(steps: ProfiledSteps) -> tuple[str, ...]:
        for ending, size in (("small", 10), ("large", 11), ("empty", 0)):
            steps.file(ending).write_bytes(b"x" * size)
        steps.file("not_written")
        return ()

    use(monkeypatch, observe)
    monkeypatch.setattr(profiles, "MAX_FILE_BYTES", 10)
    measured = take(folder, "memory", Engine())
    assert [profile["files"] for profile in measured["profiles"]] == [("trials/00_zero1/profiles/memory_rank0.small",)]
    assert [note.split(":")[1].split()[0] for note in measured["notes"][1:]] == ["memory_rank0.large"]
    assert [path.name for path in (folder / "profiles").iterdir()] == ["memory_rank0.small"]


def files_of(measured: dict[str, Any], folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The files of the only profile, and its lines."""
    assert measured["notes"] == ["a note"]
    (profile,) = measured["profiles"]
    return [folder.parents[1] / name for name in profile["files"]], profile["lines"]


def test_the_profile_torch_leaves_a_trace_a_table_and_a_memory_timeline(folder: Path) -> None:
    engine = Engine()
    (trace, table, timeline), lines = files_of(take(folder, "torch", engine, profile_steps=3), folder)
    assert engine.steps == 4
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("optimizer step") == 3
    assert "aten::addmm" in names
    assert "Self CPU" in table.read_text()
    times, sizes = json.loads(gzip.decompress(timeline.read_bytes()))
    assert len(times) == len(sizes)
    assert max(map(sum, sizes)) >= 4 * 64 * 64 * 4  # parameters, gradients and two moments
    assert lines[0].startswith("CPU ms/step")
    assert any(line.endswith("aten::addmm") for line in lines)
    assert lines[-1].startswith("peak of tensors ")


def test_where_torch_cannot_tell_categories_apart_the_bytes_are_kept(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """As at stage 3, where operators write to one tensor twice: torch refuses by an assertion."""
    monkeypatch.setattr(torch.profiler.profile, "export_memory_timeline", Mock(side_effect=AssertionError))
    (table, timeline), lines = files_of(take(folder, "memory", Engine()), folder)
    times, sizes = json.loads(gzip.decompress(timeline.read_bytes()))
    assert len(times) == len(sizes) > 10
    assert times == sorted(times)
    assert max(size for _, size in sizes) >= 2 * 64 * 64 * 4  # the two moments, and the gradients for a while
    assert "CPU Mem" in table.read_text()
    assert ".py(" not in table.read_text()
    assert any("aten::" in line for line in lines)


def test_the_time_of_a_kernel_counts_once_and_is_its_operators() -> None:
    """torch lists a kernel by itself too, and a mark with all kernels within it."""

    def event(name: str, where: DeviceType, begin: int, end: int, **kernels: int) -> FunctionEvent:
        kind = {"device_type": where, "use_device": "cuda", "is_user_annotation": name == "optimizer step"}
        made = FunctionEvent(begin + 1, name, 1, begin, end, stack=(), **kind)
        for kernel, duration in kernels.items():
            made.append_kernel(kernel, 0, duration)
        return made

    cpu, cuda = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("optimizer step", cpu, 0, 10_000),
        event("aten::mm", cpu, 1_000, 2_000, gemm=6_000),
        event("aten::copy_", cpu, 3_000, 4_000, memcpy=2_000),
        event("gemm", cuda, 5_000, 11_000),
        event("memcpy", cuda, 11_000, 13_000),
        event("multi_tensor_adam", cuda, 13_000, 15_000),
        event("optimizer step", cuda, 5_000, 15_000),
    ]
    found: Any = EventList(events, use_device="cuda")
    found._build_tree()
    averages = found.key_averages()
    lines = [line.split(maxsplit=3) for line in profiles.lines_by_time(averages, "device", 2)[1:]]
    assert lines[:2] == [["3.00", "60.0%", "0", "aten::mm"], ["1.00", "20.0%", "0", "aten::copy_"]]
    assert [line[:2] for line in lines[2:]] == [["1.00", "20.0%"]], "kernels that no operator launched"
    assert not any("gemm" in line or "kernels" in line for line in profiles.lines_by_time(averages, "CPU", 2))


@pytest.mark.parametrize(
    ("asked", "calls"),
    [
        ({}, [("start", 0), ("stop", 4)]),
        ({"nsys_start": 13, "nsys_end": 14}, [("start", 1), ("stop", 3)]),
        ({"nsys_end": 12}, [("start", 0), ("stop", 1)]),
    ],
)
def test_the_window_of_nsys_opens_before_its_first_step_and_closes_after_its_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, int], calls: list[tuple[str, int]]
) -> None:
    """The trial has 2 warm-up and 10 measured steps, so that the first step after them has number 12."""
    engine, seen = Engine(), list[tuple[str, int]]()
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: seen.append((name, engine.steps)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for accelerator, expected in (("cpu", []), ("cuda", calls)):
        engine.steps = 0
        measured = take(folder, "nsys", engine, accelerator, profile_steps=4, **asked)
        assert (seen, engine.steps, measured["notes"]) == (expected, 4, ["a note"])
        assert bool(measured["profiles"]) is (accelerator == "cuda")
