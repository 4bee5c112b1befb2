"""The scripts' first second: bad input is one line with the remedy and exit 2, before any work."""

from __future__ import annotations

import os
import runpy
import shlex
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
        timeout=200,
        check=False,
        cwd=cwd,
        env={**clean, **environment},
    )


def test_a_function_pasted_into_a_script_may_name_types_that_it_does_not_import(tmp_path: Path) -> None:
    pasted = "\n\ndef create_deepspeed_config(stage: int) -> Dict[str, List[int]]: ...\n"
    for script in (ZERO, OFFLOAD):
        (tmp_path / script).write_text((ROOT / script).read_text(encoding="utf-8") + pasted, encoding="utf-8")
        runpy.run_path(str(tmp_path / script))


BAD_INPUT = [
    (ZERO, "--model-factory nowhere:build", ("--model-factory nowhere:build", "No module named 'nowhere'")),
    (ZERO, "--resume absent", ("--resume absent", "run.json")),
    (ZERO, "--resume unsettled/runs/zero_20261121_093000", ("nothing to resume", "Start it again")),
    # Before the model and the machine are looked at.
    (ZERO, "--output-dir /proc/nowhere --model nowhere/none", ("--output-dir /proc/nowhere", "can write")),
    (OFFLOAD, "--model tiny --nvme-path absent", ("--nvme-path", "does not exist")),
    (OFFLOAD, "--model tiny --num-gpus 2 --accelerator cuda", ("--accelerator cuda",)),
    (OFFLOAD, "--model tiny --nvme-path /tmp/\udcff", ("not valid UTF-8",)),  # its record could not be read back
]


def test_bad_input_is_one_line_with_flag_value_and_remedy_and_exit_2(
    scripted: ScriptedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("unsettled/runs/zero_20261121_093000").mkdir(parents=True)
    for script, line, words in BAD_INPUT:
        with subtests.test(ascii(line)):
            assert cli.main("zero" if script == ZERO else "offload", fakes.make_config, line.split()) == 2
            said = capsys.readouterr().err
            # What the doctor says about this machine, such as a limit on locked memory, is not about the input.
            lines = [each for each in said.strip().splitlines() if not each.strip().startswith("warning")]
            assert len(lines) == 1, said
            assert all(word in lines[0] for word in words), said
            assert scripted.launcher.launched == []
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("unsettled", "results")] == []


def test_models_and_ops_in_an_ascii_terminal(tmp_path: Path) -> None:
    """The ops with a compiler that fails: the reason and the remedy of each, and exit 1."""
    words, ascii_only = ("-m", "ds_bench"), {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = run(*words, "models", cwd=tmp_path, **ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "124,439,808" in done.stdout
    broken = {"DS_BENCH_OPS_CACHE": str(tmp_path), "CXX": "/bin/false", "CUDA_VISIBLE_DEVICES": ""}
    done = run(*words, "ops", cwd=tmp_path, **ascii_only, **broken)
    lines = done.stdout.splitlines()[-3:]
    assert (done.returncode, [line.split()[0] for line in lines]) == (1, ["ShareMemComm", "CPUAdam", "AsyncIO"])
    assert all("log " in line and "; " in line for line in lines), lines


@pytest.mark.parametrize("moment", ["argparse", "csv"])
@pytest.mark.parametrize("command", [(ZERO, "--model", "tiny", "--accelerator", "cpu"), ("-m", "ds_bench", "models")])
def test_ctrl_c_while_modules_are_loaded_is_one_line_and_exit_130(
    moment: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    """A module of that name, found first, presses it: argparse is loaded first, csv only by what the flags lead to."""
    (tmp_path / f"{moment}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n")
    if command[0] == "-m" and moment == "csv":
        command = ("-m", "ds_bench", "report", str(tmp_path))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run(command[0], *command[1:], cwd=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_closed_streams_are_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT / ZERO} --model tiny --accelerator cpu --dry-run <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, timeout=60, check=False, cwd=tmp_path).returncode == 0


def test_read_only_shared_memory_is_reported_before_any_work(tmp_path: Path) -> None:
    """Ranks on CPUs would wait for each other forever."""
    asked = shlex.join([sys.executable, str(ROOT / ZERO), "--model", "tiny", "--accelerator", "cpu", "--num-gpus", "2"])
    mounts = "mount --bind /dev/shm /dev/shm; mount -o remount,ro,bind /dev/shm || exit 77"
    command = ["unshare", "--mount", "sh", "-c", f"{mounts}; {asked}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    if done.returncode in (1, 77):
        pytest.skip(f"this user cannot mount: {done.stderr}")
    assert done.returncode == 2, done.stderr
    finding, end = done.stderr.splitlines()
    assert "/dev/shm is not writable" in finding
    assert "--tmpfs /dev/shm" in finding
    assert "not ready: 1 problem" in end


def test_variables_of_env_hold_for_the_ranks_and_are_given_again_on_resume(
    scripted: ScriptedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINE", "old")
    monkeypatch.setenv("ONLY_NAMED", "own")
    given = ("--env", "MINE=a=b", "--env", "ONLY_NAMED")
    assert scripted.run("--stages", "0", *given) == 0
    assert os.environ["MINE"] == "a=b"
    assert os.environ["ONLY_NAMED"] == "own"
    (trial,) = scripted.launcher.launched
    assert trial.placement.forwarded_variables == ("MINE", "ONLY_NAMED")
    assert scripted.resume() == 2
    assert "these flags again: --env MINE=a=b --env ONLY_NAMED" in capsys.readouterr().err
    assert scripted.resume(*given) == 0
