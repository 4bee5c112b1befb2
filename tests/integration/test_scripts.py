"""Both scripts as a user runs them, with real DeepSpeed on the CPU accelerator."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_bench.launch.scratch import remove_abandoned
from ds_bench.system import processes
from tests.support.real_trials import ROOT, Script, gone_within, rows_of

pytestmark = [pytest.mark.deepspeed, pytest.mark.usefixtures("built_ops")]

Start = Callable[..., Script]
SMALL = ("--model", "tiny", "--batch-size", "2", "--seq-length", "32", "--num-steps", "6", "--warmup-steps", "2")
FAULT = ("--batch-size", "2", "--seq-length", "8", "--num-steps", "3", "--warmup-steps", "1", "--num-gpus", "2")


def run(script: str, folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """A script's exit code, output and errors; results go to ``folder``."""
    command = [sys.executable, str(ROOT / script), *SMALL, "--accelerator", "cpu", "--output-dir", str(folder)]
    variables = {**os.environ, "COLUMNS": "160", **environment}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=300, check=False, env=variables
    )
    return done.returncode, done.stdout, done.stderr


def rows_shown(out: str) -> list[str]:
    """Stages of the rows of the table that trained."""
    return re.findall(r"^[★! ] (ZeRO-\d)[^:\n]*?  +[\d,]+  ", out, re.MULTILINE)


def test_four_stages_in_fp32_agree_and_their_numbers_follow_from_the_samples(tmp_path: Path) -> None:
    code, out, err = run("zero_stage_comparison.py", tmp_path, "--num-gpus", "2", "--precision", "fp32")
    assert code == 0, err
    assert rows_shown(out) == ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    rows = rows_of(tmp_path)
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    for key in ("first_loss", "final_loss"):
        values = [row[key] for row in rows]
        assert max(values) - min(values) < 1e-3, values
    assert not any("loss differs" in (row["caveats"] or "") for row in rows)
    (path,) = tmp_path.glob("runs/*/records.jsonl")
    for row, record in zip(rows, map(json.loads, path.read_text().splitlines()), strict=True):
        window = max(rank["window_seconds"] for rank in record["ranks"])
        assert row["avg_step_time_ms"] == pytest.approx(window / 6 * 1000)
        assert row["throughput_tokens_per_sec"] == pytest.approx(2 * 32 * 2 / (window / 6))
        assert window == pytest.approx(sum(record["ranks"][0]["step_seconds"]), rel=0.2)
    assert sorted(path.suffix for path in tmp_path.glob("zero_comparison_*")) == [".csv", ".json"]
    (trial,) = tmp_path.glob("runs/zero_*/trials/00_zero0")
    of_ranks = [f"rank{rank}.{end}" for rank in (0, 1) for end in ("beat", "json", "log", "measured.json", "stacks")]
    written = ["ds_config.json", "exits.jsonl", "leader.log", *of_ranks, "trial.json"]
    assert sorted(path.name for path in trial.iterdir() if not path.name.startswith(".")) == written


@pytest.mark.slow
@pytest.mark.nvme
def test_offload_strategies_succeed_with_the_cpu_optimizer_and_leave_nothing_on_the_disk(tmp_path: Path) -> None:
    code, _, err = run("offload_comparison.py", tmp_path, "--num-gpus", "1", "--nvme-path", str(tmp_path))
    rows = rows_of(tmp_path)
    assert code == 0, err
    assert "nvme strategy is added" in err
    assert [row["strategy"] for row in rows] == ["none", "cpu_optimizer", "cpu_full", "nvme"]
    assert all(row["success"] for row in rows)
    assert [row["optimizer"] for row in rows] == ["AdamW", *["DeepSpeedCPUAdam"] * 3]
    assert rows[3]["nvme_stored_gb"] > 0
    assert list(tmp_path.glob("ds_bench_swap*")) == []


HANGS = ("--model-factory", "faults:hangs_at_stage_2")


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_rows_is_resumed_and_nothing_runs_twice(start_script: Start) -> None:
    """Ctrl-C while the second of three rows hangs; Slurm sends SIGTERM in tests/integration/test_slurm.py."""
    script = start_script("zero_stage_comparison.py", *FAULT, *HANGS, "--stages", "1", "2", "3")
    script.wait_for(lambda: any(path.stat().st_size for path in script.beats("01_zero2")))
    time.sleep(1)
    tree = processes.descendants(script.process.pid)
    script.process.send_signal(signal.SIGINT)
    code, out, err = script.wait(60)
    assert code == 130, err
    assert [row["status"] for row in script.rows()] == ["✅ Success", "⏹️ Interrupted"]
    assert "ZeRO-1" in out
    assert "Interrupted" in out
    assert gone_within(tree, 30) == set()
    (folder,) = script.output_dir.glob("runs/*")
    # A run folder starts no code by itself: the factory is given again.
    resumed = start_script("zero_stage_comparison.py", "--resume", str(folder), *HANGS, FAULTS_FIXED="1")
    code, out, err = resumed.wait()
    assert code == 0, err
    assert [row["status"] for row in script.rows()] == ["✅ Success"] * 3
    assert "[2/2]" in err
    assert rows_shown(out) == ["ZeRO-1", "ZeRO-2", "ZeRO-3"]


@pytest.mark.nvme
@pytest.mark.slow
def test_a_killed_parent_takes_every_process_and_the_swap_folder_with_it(start_script: Start, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = ("--num-gpus", "2", "--nvme-path", str(disk), "--strategies", "nvme", "--num-steps", "5000")
    script = start_script("offload_comparison.py", *SMALL, *flags)
    script.wait_for(lambda: any(disk.glob("ds_bench_swap*/zero_stage_3/optimizer/rank0/*")))
    tree = processes.descendants(script.process.pid)
    assert len(tree) >= 4, "server, leader and two ranks"
    script.process.kill()
    script.wait()
    assert gone_within(tree, 60) == set()
    assert list(disk.iterdir()) == []


@pytest.mark.slow
def test_a_cold_trial_ends_when_its_parent_and_its_leader_are_killed_together(start_script: Start) -> None:
    """Nothing above the deepspeed launcher is left then to end it."""
    fault = ("--model-factory", "faults:hangs_at_stage_2", "--stages", "2", "--launcher", "deepspeed")
    script = start_script("zero_stage_comparison.py", *FAULT, *fault)
    script.wait_for(lambda: len([beat for beat in script.beats("00_zero2") if beat.stat().st_size]) == 2)
    number = json.loads((script.beats("00_zero2")[0].parent / "trial.json").read_text())["scratch_id"]
    script.wait_for(lambda: any(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{number}_*")))
    tree = processes.descendants(script.process.pid)
    (leader,) = [pid for pid in tree if b"ds_bench.launch.leader" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(tree) >= 5, "leader, runner, launcher and two ranks"
    script.process.kill()
    os.kill(leader, signal.SIGKILL)
    script.wait()
    assert gone_within(tree, 60) == set()
    remove_abandoned()  # another run that starts meanwhile may have removed some of it
    assert not list(Path("/dev/shm").glob(f"*_{number}_*"))


@pytest.mark.slow
def test_the_terminal_shows_row_step_and_last_step_while_a_trial_runs(tmp_path: Path, built_ops: object) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, str(ROOT / "zero_stage_comparison.py"), *SMALL, "--accelerator", "cpu", "--stages", "1"]
    with subprocess.Popen(
        [*command, "--num-steps", "100", "--output-dir", str(tmp_path)], stderr=slave, stdout=slave, stdin=slave
    ) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:
                break
            if not data:
                break
            shown += data
    os.close(master)
    text = shown.decode(errors="replace")
    assert process.returncode == 0, text
    assert "[1/1] ZeRO-1" in text
    assert "/100" in text
    assert "last step" in text
    assert "left" in text
