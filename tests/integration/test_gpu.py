"""What only a GPU can show; run with ``pytest -m gpu`` (scripts/gpu_check.sh does)."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.spec import Placement
from ds_bench.launch import rank_environment
from ds_bench.system import environment, gpu_state
from tests.support.real_trials import ROOT

_USABLE = (
    bool(gpu_state.select_visible(os.environ, gpu_state.read_gpus().gpus))
    and environment.torch_built_for("cuda") is not None
)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _USABLE, reason="no GPU, or torch is a CPU build")]

Run = Callable[..., tuple[int, str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a script once per set of arguments on one GPU: exit code, standard error, rows."""
    done: dict[tuple[str, ...], tuple[int, str, list[dict[str, Any]]]] = {}

    def go(script: str, *arguments: str) -> tuple[int, str, list[dict[str, Any]]]:
        key = (script, *arguments)
        if key not in done:
            folder = tmp_path_factory.mktemp("gpu")
            common = ["--accelerator", "cuda", "--num-gpus", "1", "--output-dir", str(folder)]
            result = subprocess.run(
                [sys.executable, str(ROOT / script), *common, *arguments],
                capture_output=True,
                text=True,
                timeout=550,
                check=False,
            )
            rows = [row for path in sorted(folder.glob("*_comparison_*.json")) for row in json.loads(path.read_text())]
            done[key] = (result.returncode, result.stderr, rows)
        return done[key]

    return go


GPT2 = ("--model", "gpt2", "--batch-size", "4", "--seq-length", "256", "--num-steps", "10", "--warmup-steps", "3")


def test_every_stage_trains_within_the_card_and_leaves_no_process_on_it(run: Run) -> None:
    code, err, rows = run("zero_stage_comparison.py", *GPT2)
    assert code == 0, err
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert 0 < row["gpu_allocated_gb"] <= row["gpu_peak_gb"] <= row["gpu_peak_reserved_gb"] < row["gpu_total_gb"]
    finals = [row["final_loss"] for row in rows[1:]]
    assert max(finals) - min(finals) < 5e-2, finals
    cards = gpu_state.select_visible(os.environ, gpu_state.read_gpus().gpus)
    lowered = [gpu for gpu in cards if (gpu.power_limit_watts or 0) < (gpu.default_power_limit_watts or 0)]
    assert lowered or not any("sw_power_cap" in (row["caveats"] or "") for row in rows)
    commands = [Path(f"/proc/{pid}/cmdline") for gpu in cards for pid, _ in gpu.other_processes or ()]
    assert not any(b"ds_bench" in path.read_bytes() for path in commands if path.exists())


def test_ledger_and_allocator_agree_on_what_is_held(run: Run) -> None:
    """The counted storages without activations are most of what the allocator holds after a step, and no more."""
    for row in run("zero_stage_comparison.py", *GPT2)[2]:
        names = ("parameters", "optimizer_states", "deepspeed_buffers", "other")
        counted = sum(row[f"ledger_gpu_{name}_gb"] for name in names)
        assert 0.8 * row["gpu_allocated_gb"] < counted < 1.1 * row["gpu_peak_gb"], row["strategy"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torchs_engines_train_what_deepspeed_trains(run: Run, precision: str) -> None:
    flags = ("--stages", "1", "3", "--strategies", "ddp", "fsdp2", "--precision", precision, "--dropout", "0")
    code, err, rows = run("zero_stage_comparison.py", *GPT2, *flags)
    assert code == 0, err
    assert [row["engine"] for row in rows] == ["deepspeed", "deepspeed", "ddp", "fsdp2"]
    assert not [row["caveats"] for row in rows if "differ" in (row["caveats"] or "")]
    finals = [row["final_loss"] for row in rows]
    assert max(finals) - min(finals) < (5e-2 if precision == "bf16" else 1e-3), finals


def test_a_card_too_small_is_oom_with_phase_and_bytes_asked(run: Run) -> None:
    code, _, rows = run("zero_stage_comparison.py", *GPT2, "--stages", "1", "--gpu-memory-limit", "1")
    assert code == 1
    assert rows[0]["status"] == "❌ OOM"
    assert "asked" in rows[0]["error_details"]
    assert "phase" in rows[0]["error_details"]


def test_optimizer_offload_moves_its_states_to_host_memory(run: Run) -> None:
    code, err, rows = run("offload_comparison.py", *GPT2, "--strategies", "none", "cpu_optimizer", "cpu_full")
    assert code == 0, err
    none, optimizer, full = rows
    assert optimizer["ledger_gpu_optimizer_states_gb"] < 0.05 * none["ledger_gpu_optimizer_states_gb"]
    assert optimizer["ledger_cpu_optimizer_states_gb"] > 0.9 * none["ledger_gpu_optimizer_states_gb"]
    assert optimizer["optimizer"] == "DeepSpeedCPUAdam"
    assert full["ledger_gpu_parameters_gb"] < none["ledger_gpu_parameters_gb"]


def test_warm_and_cold_launch_agree_on_step_time(run: Run) -> None:
    arguments = (*GPT2, "--num-steps", "30", "--stages", "2")
    warm = run("zero_stage_comparison.py", *arguments, "--launcher", "auto")[2][0]
    cold = run("zero_stage_comparison.py", *arguments, "--launcher", "deepspeed")[2][0]
    assert (warm["success"], warm["launch"]) == (True, "warm")
    assert (cold["success"], cold["launch"]) == (True, "deepspeed")
    assert warm["avg_step_time_ms"] == pytest.approx(cold["avg_step_time_ms"], rel=0.1)


def test_a_card_that_is_really_full_is_oom_and_says_what_was_free(run: Run) -> None:
    many = ("--model", "gpt2", "--batch-size", "16384", "--seq-length", "1024", "--num-steps", "1", "--stages", "1")
    _, _, rows = run("zero_stage_comparison.py", *many)
    assert rows[0]["status"] == "❌ OOM"
    assert "free" in rows[0]["error_details"]


def test_preloading_leaves_the_driver_uninitialized() -> None:
    """Why ranks may be forked warm; NVML's own device files may be open."""
    program = "from ds_bench.worker import preload; print(preload.GPU_FILES, preload.CUDA_INITIALIZED)"
    of_ranks = rank_environment.rank_environment(Placement(accelerator="cuda", num_gpus=1), os.environ)
    variables = {**os.environ, **of_ranks, "DS_BENCH_PARENT": str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=False)
    assert done.stdout.splitlines()[-1] == "[] False", done.stderr


def test_a_driver_in_use_is_seen() -> None:
    program = (
        "import torch; torch.zeros(1, device='cuda'); from ds_bench.system import processes as p; "
        "print(p.cuda_is_initialized(), any('uvm' in name for name in p.open_gpu_files()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_the_card_is_free_again_when_the_next_trial_begins(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "zero_stage_comparison.py"), "--accelerator", "cuda", "--num-gpus", "1"]
    subprocess.run([*command, *GPT2, "--output-dir", str(tmp_path)], check=True, timeout=550, capture_output=True)
    (path,) = tmp_path.glob("runs/*/records.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    free = [record["gpu_free_start_bytes"] for record in records]
    assert max(free) - min(free) < 2**29
    assert not any("less GPU memory was free" in text for record in records for text in record["caveats"])


def test_profiles_of_a_gpu_have_its_kernels_and_its_allocations(tmp_path: Path) -> None:
    flags = ("--stages", "3", "--profile", "torch", "memory", "nsys", "--output-dir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(ROOT / "zero_stage_comparison.py"), "--num-gpus", "1", *GPT2, *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "nsys profile --trace=cuda" in done.stderr
    (row,) = json.loads(next(tmp_path.glob("*_comparison_*.json")).read_text())
    assert "the profile" not in (row["caveats"] or "")
    (folder,) = tmp_path.glob("runs/*/trials/*/profiles")
    assert {path.name for path in folder.iterdir()} == {
        *("torch_rank0.trace.json.gz", "torch_rank0.txt", "torch_rank0.memory_timeline.json.gz"),
        *("memory_rank0.snapshot.pickle", "memory_rank0.txt"),
    }
    events = json.loads(gzip.decompress((folder / "torch_rank0.trace.json.gz").read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert (folder / "memory_rank0.snapshot.pickle").stat().st_size > 10_000


def test_copies_between_host_and_device_are_timed_and_cpu_adam_with_them(tmp_path: Path) -> None:
    flags = ("--strategies", "none", "cpu_optimizer", "--output-dir", str(tmp_path))
    subprocess.run(
        [sys.executable, str(ROOT / "offload_comparison.py"), "--num-gpus", "1", *GPT2, *flags],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    kept, offloaded = json.loads(next(tmp_path.glob("*_comparison_*.json")).read_text())
    assert kept["cpu_adam_gb_per_sec"] is None
    assert offloaded["cpu_adam_gb_per_sec"] > 0.1
    assert offloaded["phase_transfer_ms"] > 3 * (kept["phase_transfer_ms"] or 0)
    assert offloaded["phase_transfer_ms"] > 0
    for row in (kept, offloaded):
        assert row["phase_communication_ms"] >= 0


def test_the_monitor_does_not_wait_for_the_device_between_steps(tmp_path: Path) -> None:
    import torch

    from ds_bench.records.step_files import StepFileReader
    from ds_bench.worker.step_clock import StepClock, StepRecorder

    recorder, reader, clock = StepRecorder(tmp_path, 0, "cuda", 2, 64), StepFileReader(tmp_path, 0), StepClock("cuda")
    losses = [torch.full((), value, device="cuda", dtype=torch.bfloat16) for value in (1.0, 2.0)]
    clock.mark()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            torch.cuda._sleep(10**8)  # the device is busy for a while
            recorder.take_losses(losses)
            clock.mark()
            recorder.end_step(clock, measured=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    recorder.report()
    steps = [step for _, step in reader.new_samples()]
    assert [step.loss for step in steps] == [1.5] * 5
    assert all(step.seconds > 0 and (step.gpu_reserved_bytes or 0) > 0 for step in steps)
