"""The scripts' first second: bad input gets one line with the remedy and exit 2, before any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_bench.cli import script as cli
from tests.support import fakes
from tests.support.real_trials import ROOT
from tests.support.scripted_run import ScriptedRun

ZERO, OFFLOAD = "zero_stage_comparison.py", "offload_comparison.py"


def run(script: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, script if script == "-m" else str(ROOT / script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env={**clean, **environment},
    )


BAD_INPUT = [
    (ZERO, ("--batch-size", "0"), ("--batch-size", "'0'", "1 or more")),
    (ZERO, ("--batch-size", "many"), ("--batch-size", "'many'")),
    (ZERO, ("--num-steps", "-3"), ("--num-steps", "'-3'")),
    (ZERO, ("--model", "tiny", "--seq-length", "257"), ("--seq-length 257", "256 positions", "256 or less")),
    (ZERO, ("--stages", "4"), ("--stages", "4")),
    (ZERO, ("--model-factory", "nocolon"), ("--model-factory", "package.module:function")),
    (ZERO, ("--model-factory", "nowhere:build"), ("--model-factory nowhere:build", "No module named 'nowhere'")),
    (ZERO, ("--set", "zero_optimization"), ("--set", "key.path=value")),
    (ZERO, ("--set", "gradient_cliping=1"), ("gradient_cliping", "gradient_clipping")),
    (ZERO, ("--ds-config", "absent.json"), ("--ds-config absent.json", "No such file")),
    (ZERO, ("--resume", "absent"), ("--resume absent", "run.json")),
    (ZERO, ("--retry", "OOM"), ("--retry", "--resume")),
    (ZERO, ("--accelerator", "cpu", "--gpu-memory-limit", "8"), ("--gpu-memory-limit", "--cpu-memory-limit")),
    (ZERO, ("--timeout", "0"), ("--timeout", "above 0")),
    (ZERO, ("--hostfile", "absent"), ("--hostfile absent",)),
    (ZERO, ("--output-dir", "/proc/nowhere", "--model", "tiny"), ("--output-dir /proc/nowhere", "may write")),
    (OFFLOAD, ("--strategies", "nvme"), ("nvme", "--nvme-path")),
    (OFFLOAD, ("--model", "tiny", "--nvme-path", "absent"), ("--nvme-path", "not a folder")),
    (OFFLOAD, ("--model", "tiny", "--nvme-path", "/proc"), ("--nvme-path /proc", "cannot be written")),
    (OFFLOAD, ("--strategies", "gpu_full"), ("--strategies", "gpu_full")),
]


def test_bad_input_is_one_line_with_flag_value_and_remedy_and_exit_2(
    scripted: ScriptedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    monkeypatch.chdir(tmp_path)
    for script, arguments, words in BAD_INPUT:
        with subtests.test(" ".join(arguments)):
            assert cli.main("zero" if script == ZERO else "offload", fakes.make_config, arguments) == 2
            said = capsys.readouterr().err
            # What the doctor has to say of this machine, such as a limit on locked memory, is not about the input.
            lines = [line for line in said.strip().splitlines() if not line.strip().startswith("warning")]
            assert len(lines) == 1, said
            assert all(word in lines[0] for word in words), said
            assert scripted.launcher.launched == []


def test_a_model_that_exists_nowhere_is_one_line_that_names_the_nearest_presets(tmp_path: Path) -> None:
    done = run(ZERO, "--model", "meta-llama/Llama-2-7b", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "meta-llama/Llama-2-7b-hf" in done.stderr
    assert not (tmp_path / "results").exists()


def test_an_output_dir_that_cannot_be_written_is_refused_before_the_model_and_the_machine_are_looked_at(
    tmp_path: Path,
) -> None:
    done = run(ZERO, "--model", "nowhere/none", "--output-dir", "/proc/nowhere/results", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "--output-dir /proc/nowhere/results cannot be written" in line


def test_dry_run_prints_every_configuration_and_command_and_writes_nothing(tmp_path: Path) -> None:
    done = run(OFFLOAD, "--model", "tiny", "--accelerator", "cpu", "--num-gpus", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("deepspeed.launcher.runner") == 3
    blocks = [text[: text.rindex("}") + 1] for text in done.stdout.split("# 0") if "{" in text]
    configs = [json.loads(block[block.index("{") :]) for block in blocks]
    assert [config["train_batch_size"] for config in configs] == [8, 8, 8]
    assert configs[2]["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert list(tmp_path.iterdir()) == []


def test_models_lists_every_preset_with_counted_parameters(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds_bench", "models"], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert "124,439,808" in done.stdout
    assert "meta-llama/Llama-2-70b-hf" in done.stdout


def test_ops_says_of_each_op_whether_it_can_be_used(tmp_path: Path) -> None:
    """With a compiler that fails: the reason and the remedy of each, and exit 1."""
    environment = {**os.environ, "DS_BENCH_OPS_CACHE": str(tmp_path), "CXX": "/bin/false", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "ds_bench", "ops"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=200,
        env=environment,
    )
    assert done.returncode == 1, done.stdout
    lines = done.stdout.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["ShareMemComm", "CPUAdam", "AsyncIO"]
    assert all("log " in line and "; " in line for line in lines), lines


@pytest.mark.parametrize("moment", ["argparse", "csv"])
@pytest.mark.parametrize("command", [(ZERO, "--model", "tiny", "--accelerator", "cpu"), ("-m", "ds_bench", "models")])
def test_ctrl_c_while_modules_are_loaded_is_one_line_and_exit_130(
    moment: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    """A module of that name, found first, presses it: argparse is loaded at once, csv by what the flags lead to."""
    (tmp_path / f"{moment}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n")
    if command[0] == "-m" and moment == "csv":
        command = ("-m", "ds_bench", "report", str(tmp_path))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run(command[0], *command[1:], cwd=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_closed_streams_are_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT / ZERO} --model tiny --accelerator cpu --dry-run <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, timeout=60, check=False, cwd=tmp_path).returncode == 0


def test_a_run_that_had_settled_nothing_cannot_be_resumed_nor_reported_and_is_told_so_in_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "runs" / "zero_20261121_093000"
    folder.mkdir(parents=True)
    resumed = run(ZERO, "--resume", str(folder), cwd=tmp_path)
    reported = run("-m", "ds_bench", "report", str(folder), cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (resumed.returncode, reported.returncode) == (2, 2)
    assert "nothing to resume" in resumed.stderr
    assert "start it again" in resumed.stderr
    assert len(resumed.stderr.splitlines()) == len(reported.stderr.splitlines()) == 1


def test_shared_memory_that_cannot_be_written_is_told_before_any_work(tmp_path: Path) -> None:
    """Ranks on CPUs would wait for each other for ever."""
    read_only = "mount -o remount,ro,bind /dev/shm || exit 77"
    asked = f"{sys.executable} {ROOT / ZERO} --model tiny --accelerator cpu --num-gpus 2"
    command = ["unshare", "--mount", "sh", "-c", f"mount --bind /dev/shm /dev/shm; {read_only}; {asked}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    if done.returncode in (1, 77):
        pytest.skip(f"no mounts of its own for this user: {done.stderr}")
    assert done.returncode == 2, done.stderr
    finding, end = done.stderr.splitlines()
    assert "/dev/shm is not writable" in finding
    assert "--tmpfs /dev/shm" in finding
    assert "not ready: 1 problem" in end
