"""Attacks: a folder, a hostfile or a current folder that somebody else prepared, and credentials in what is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds_bench.config import options
from ds_bench.models import lookup
from ds_bench.records.rank_files import Assignment
from ds_bench.system.processes import child_environment
from ds_bench.system.redaction import REDACTED, redacted_arguments, redacted_config, redacted_keys, secrets_of
from tests.support import fakes
from tests.support.real_trials import ROOT, SUPPORT, Script
from tests.support.scripted_run import ScriptedRun


def change_run(folder: Path, **changes: object) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ------------------------------------------------------------------ a run folder of somebody else


REACHES_HOSTS = ["--hostfile", *(f"--{name.replace('_', '-')}" for name in options.SEVERAL_NODES if name != "hostfile")]


@pytest.mark.parametrize("flag", ["--model-factory", "--model", "--trust-remote-code", *REACHES_HOSTS])
def test_a_run_folder_alone_starts_no_code_and_reaches_no_host(
    scripted: ScriptedRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
) -> None:
    assert scripted.run("--stages", "0") == 0
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "code.C"}, "model_type": "own"}))
    (model / "code.py").write_text("open('hit', 'w')\nclass C: pass\n")
    (tmp_path / "attack.py").write_text("open('hit', 'w')\ndef model(): pass\n")
    (tmp_path / "hosts").write_text("one slots=1\n")
    others = {"--hostfile": str(tmp_path / "hosts"), "--master-port": "1"}
    value = {"--model-factory": "attack:model", "--model": str(model), "--trust-remote-code": None, **others}.get(
        flag, "one"
    )
    stored = [flag] if value is None else [flag, value]
    change_run(scripted.folder, arguments=["--model", "tiny", "--seq-length", "16", *stored])
    capsys.readouterr()
    assert scripted.resume() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"say again: {' '.join(stored)}" in said
    assert not (tmp_path / "hit").exists()


def test_another_machine_is_told_before_the_model_is_looked_at(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripted.run("--stages", "0") == 0
    facts = json.loads((scripted.folder / "run.json").read_text())["environment"]
    change_run(scripted.folder, environment={**facts, "cpu_model": "another"})
    model = tmp_path / "no-model"
    model.mkdir()  # to look at it would fail
    capsys.readouterr()
    assert scripted.resume("--model", str(model)) == 2
    assert "not the same machine" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".lock", "records.jsonl", "run.json", "flat JSON", "recommended", "trials"])
def test_no_link_in_a_run_folder_is_followed(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert scripted.run("--stages", "0") == 0
    folder = scripted.folder
    target = tmp_path / "target"
    path = next(scripted.output.glob("*_comparison_*.json")) if name == "flat JSON" else folder / name
    if path.is_dir():
        shutil.move(path, target)
    elif path.exists():
        target.write_bytes(path.read_bytes())
        path.unlink()
    else:
        target.write_text("precious")
    before = {each: each.read_bytes() for each in [target, *target.rglob("*")] if each.is_file()}
    path.symlink_to(target)
    capsys.readouterr()
    assert scripted.resume("--stages", "0", "1") == 2
    assert "is a link" in capsys.readouterr().err
    assert {each: each.read_bytes() for each in [target, *target.rglob("*")] if each.is_file()} == before


# ------------------------------------------------------------------ the current folder

SHADOWS = ("random", "ds_bench", "json", "torch", "typing", "deepspeed", "transformers", "tempfile", "logging")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with modules of usual names; each leaves a mark when it is imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'hit')!r}, 'a').write('{name}\\n')\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
def test_modules_of_the_current_folder_do_not_run_in_children(hostile: Path, tmp_path: Path) -> None:
    for name in ("", ":", f"{tmp_path}::"):
        environment = child_environment({"PYTHONPATH": name})
        done = subprocess.run(
            [sys.executable, "-m", "ds_bench", "--help"], env=environment, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert not (hostile / "hit").exists(), done.stderr
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}))
    found = lookup.resolve_model(str(model), factory=False, trust_remote_code=False, environment={})
    assert found.model_type == "gpt2"
    assert not (hostile / "hit").exists()


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize("launcher", ["warm", "deepspeed"])
def test_modules_of_the_current_folder_do_not_run_in_ranks_and_a_factory_there_does(
    hostile: Path, tmp_path: Path, launcher: str
) -> None:
    (hostile / "own.py").write_text("import torch\ndef make():\n    import faults\n    return faults.fine()\n")
    command = [sys.executable, str(ROOT / "zero_stage_comparison.py"), "--accelerator", "cpu", "--launcher", launcher]
    command += ["--model-factory", "own:make", "--stages", "0", "--batch-size", "2", "--seq-length", "8"]
    command += ["--num-steps", "2", "--warmup-steps", "1", "--output-dir", str(tmp_path / "out"), "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not (hostile / "hit").exists(), (hostile / "hit").read_text()


# ------------------------------------------------------------------ credentials

KEY = "Zx9wQ2vT7mK4pL8rB3nC6yD1"
CONFIG = {
    "comet": {"enabled": False, "api_key": KEY, "project": "mine"},
    "tensorboard": {"enabled": False, "output_path": f"s3://user:{KEY}@bucket/logs", "job_name": "mine"},
    "wandb": {"enabled": False, "team": f"https://host/?sig={KEY}"},
}


def test_credentials_of_a_configuration_are_redacted_by_path_and_by_value() -> None:
    redacted = redacted_config(CONFIG)
    assert KEY not in json.dumps(redacted)
    assert redacted["tensorboard"]["job_name"] == "mine"
    assert redacted_keys(redacted) == ["comet.api_key", "tensorboard.output_path", "wandb.team"]
    assert redacted_config(redacted) == redacted
    assert len(secrets_of(CONFIG)) == 3
    assert secrets_of(redacted) == []


def test_class_names_of_leaf_modules_are_kept_and_a_key_among_them_is_not() -> None:
    """The first are DeepSpeed's own, in every resolved configuration."""
    names = [
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "Qwen3VLMoeTextSparseMoeBlock",
    ]
    for section in ("zero_config", "zero_optimization"):
        kept = redacted_config({section: {"leaf_module": {"classes": [*names, KEY, f"mine.{KEY}", f"{KEY}.Block"]}}})
        assert kept[section]["leaf_module"]["classes"] == [*names, REDACTED, REDACTED, REDACTED]


@pytest.mark.parametrize("strategy", [fakes.zero(0), fakes.zero(3), fakes.offload("cpu_full"), fakes.offload("nvme")])
def test_nothing_of_a_configuration_of_ours_is_taken_for_a_credential(strategy: object) -> None:
    config = fakes.trial(strategy, on=fakes.placement(nvme_path="/mnt/nvme0/jobs-2026/user_7")).ds_config  # type: ignore[arg-type]
    assert redacted_config(config) == config


def test_settings_of_a_typed_command_are_redacted_and_the_rest_is_not() -> None:
    typed = [
        "--set",
        f"comet.api_key={KEY}",
        f"--set=comet={json.dumps(CONFIG['comet'])}",
        "--set",
        "bf16.enabled=true",
    ]
    typed += ["--model", "gpt2", "--output-dir", "/data/runs/2026-11-21/a_long_name_of_a_folder"]
    told = redacted_arguments(typed)
    assert KEY not in " ".join(told)
    assert told[1] == f"comet.api_key={REDACTED}"
    assert told[3:] == typed[3:]


def test_a_credential_reaches_the_trials_own_private_file_alone(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = tmp_path / "ds.json"
    overlay.write_text(json.dumps({name: CONFIG[name] for name in ("tensorboard", "wandb")}))
    flags = ["--ds-config", str(overlay), "--set", f"comet.api_key={KEY}", "--stages", "0", "1"]
    assert scripted.run(*flags, "--export", "0") == 0
    assert scripted.run(*flags, "--dry-run") == 0
    run = scripted.folder
    said = capsys.readouterr()
    assert KEY not in said.out + said.err
    files = [path for path in scripted.output.rglob("*") if path.is_file()]
    assert len(files) > 6
    assert [path for path in files if KEY in path.read_text(errors="replace")] == []
    readme = (run / "export_zero0" / "README.md").read_text()
    assert "`comet.api_key`: may be a credential and was not kept" in readme
    assert scripted.resume() == 2
    assert "say it again: --set comet.api_key=VALUE" in capsys.readouterr().err
    assert scripted.resume("--set", f"comet.api_key={KEY}", "--stages", "0", "1", "2") == 0
    assert [row["strategy"] for row in scripted.rows()] == ["zero0", "zero1", "zero2"]
    assert len((run / "records.jsonl").read_text().splitlines()) == 3
    assert [path for path in scripted.output.rglob("*.json*") if KEY in path.read_text()] == []


def test_the_file_of_the_rank_holds_the_credential_for_the_user_alone(tmp_path: Path) -> None:
    trial = fakes.trial()
    config = {**trial.ds_config, **CONFIG}
    object.__setattr__(trial, "ds_config", config)
    Assignment(trial=trial, rendezvous=None, scratch_id="1").save(tmp_path, config)
    assert json.loads((tmp_path / "ds_config.json").read_text())["comet"]["api_key"] == KEY
    assert (tmp_path / "ds_config.json").stat().st_mode & 0o777 == 0o600
    assert KEY not in (tmp_path / "trial.json").read_text()


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_no_file_of_a_real_run_holds_a_credential_but_the_configuration_of_its_trials(start_script: object) -> None:
    script: Script = start_script(  # type: ignore[operator]
        "zero_stage_comparison.py",
        *("--model", "tiny", "--batch-size", "2", "--seq-length", "16", "--num-steps", "2", "--warmup-steps", "1"),
        *("--stages", "1", "--set", f"comet.api_key={KEY}", "--set", "comet.enabled=false"),
        *("--set", f"tensorboard.job_name=s3://user:{KEY}@bucket"),
    )
    code, out, err = script.wait()
    assert code == 0, err
    assert KEY not in out + err
    holders = [path for path in script.output_dir.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert [path.name for path in holders] == ["ds_config.json"]
