"""Attacks: a run folder or a current folder that somebody else prepared, and credentials in stored files."""

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
from tests.support.real_trials import ROOT, SUPPORT
from tests.support.scripted_run import ScriptedRun

KEY = "Zx9wQ2vT7mK4pL8rB3nC6yD1"
CONFIG = {
    "comet": {"enabled": False, "api_key": KEY, "project": "mine"},
    "tensorboard": {"enabled": False, "output_path": f"s3://user:{KEY}@bucket/logs", "job_name": "mine"},
    "wandb": {"enabled": False, "team": f"https://host/?sig={KEY}"},
}


def change_run(folder: Path, **changes: object) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_resuming_a_folder_starts_no_code_and_reaches_no_host_that_the_user_does_not_name_again(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scripted.run("--stages", "0") == 0
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "code.C"}, "model_type": "own"}))
    (model / "code.py").write_text("open('hit', 'w')\nclass C: pass\n")
    (tmp_path / "attack.py").write_text("open('hit', 'w')\ndef model(): pass\n")
    (tmp_path / "hosts").write_text("one slots=1\n")
    values = {"--hostfile": tmp_path / "hosts", "--master-port": 1}
    code = {"--model-factory": "attack:model", "--model": model, "--trust-remote-code": None}
    for flag in (*code, *(f"--{name.replace('_', '-')}" for name in options.SEVERAL_NODES)):
        value = {**code, **values}.get(flag, "one")
        stored = [flag] if value is None else [flag, str(value)]
        change_run(scripted.folder, arguments=["--model", "tiny", "--seq-length", "16", *stored])
        capsys.readouterr()
        assert scripted.resume() == 2, flag
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"these flags again: {' '.join(stored)}" in said
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize("name", [".lock", "records.jsonl", "run.json", "flat JSON", "recommended", "trials"])
def test_no_link_in_a_run_folder_is_followed(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert scripted.run("--stages", "0") == 0
    target = tmp_path / "target"
    path = next(scripted.output.glob("*_comparison_*.json")) if name == "flat JSON" else scripted.folder / name
    if path.exists():
        shutil.move(path, target)
    else:
        target.write_text("precious")
    before = {each: each.read_bytes() for each in [target, *target.rglob("*")] if each.is_file()}
    path.symlink_to(target)
    assert scripted.resume("--stages", "0", "1") == 2
    assert "is a link" in capsys.readouterr().err
    assert {each: each.read_bytes() for each in [target, *target.rglob("*")] if each.is_file()} == before


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with modules of usual names; each leaves a mark when it is imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in ("random", "ds_bench", "json", "torch", "typing", "deepspeed", "transformers", "tempfile", "logging"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'hit')!r}, 'a').write('{name}\\n')\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
def test_modules_of_the_current_folder_do_not_run_in_children(hostile: Path, tmp_path: Path) -> None:
    for path in ("", ":", f"{tmp_path}::"):
        command, environment = [sys.executable, "-m", "ds_bench", "--help"], child_environment({"PYTHONPATH": path})
        subprocess.run(command, env=environment, capture_output=True, check=True)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}))
    found = lookup.resolve_model(str(model), factory=False, trust_remote_code=False, environment={})
    assert found.model_type == "gpt2"
    assert not (hostile / "hit").exists()


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_ranks_import_a_factory_but_no_shadow_of_a_library_and_store_no_credential(
    hostile: Path, tmp_path: Path
) -> None:
    (hostile / "own.py").write_text("import torch\ndef make():\n    import faults\n    return faults.fine()\n")
    command = [
        sys.executable,
        str(ROOT / "zero_stage_comparison.py"),
        "--accelerator",
        "cpu",
        "--launcher",
        "deepspeed",
    ]
    command += ["--model-factory", "own:make", "--stages", "0", "--batch-size", "2", "--seq-length", "8"]
    command += ["--num-steps", "2", "--warmup-steps", "1", "--output-dir", str(tmp_path / "out"), "--quiet"]
    command += ["--set", f"comet.api_key={KEY}", "--set", "comet.enabled=false"]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not (hostile / "hit").exists(), (hostile / "hit").read_text()
    assert KEY not in done.stdout + done.stderr
    holders = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert [path.name for path in holders] == ["ds_config.json"]


def test_credentials_are_redacted_by_path_and_by_value_and_nothing_else_is() -> None:
    redacted = redacted_config(CONFIG)
    assert KEY not in json.dumps(redacted)
    assert redacted["tensorboard"]["job_name"] == "mine"
    assert redacted_keys(redacted) == ["comet.api_key", "tensorboard.output_path", "wandb.team"]
    assert redacted_config(redacted) == redacted
    assert (len(secrets_of(CONFIG)), secrets_of(redacted)) == (3, [])
    ours = fakes.trial(fakes.offload("nvme"), on=fakes.placement(nvme_path="/mnt/nvme0/jobs-2026/user_7")).ds_config
    assert redacted_config(ours) == ours
    typed = ["--set", f"comet.api_key={KEY}", f"--set=comet={json.dumps(CONFIG['comet'])}", "--set", "bf16.enabled=on"]
    told = redacted_arguments([*typed, "--model", "gpt2"])
    assert KEY not in " ".join(told)
    assert (told[1], told[3:]) == (f"comet.api_key={REDACTED}", [*typed[3:], "--model", "gpt2"])


def test_a_credential_reaches_no_file_of_the_run_and_is_asked_for_again(
    scripted: ScriptedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = tmp_path / "ds.json"
    overlay.write_text(json.dumps({name: CONFIG[name] for name in ("tensorboard", "wandb")}))
    flags = ["--ds-config", str(overlay), "--set", f"comet.api_key={KEY}", "--stages", "0", "1"]
    assert scripted.run(*flags, "--export", "0") == 0
    assert scripted.run(*flags, "--dry-run") == 0
    said = capsys.readouterr()
    assert KEY not in said.out + said.err
    assert "comet.api_key" in (scripted.folder / "export_zero0" / "README.md").read_text()
    assert scripted.resume() == 2
    assert "--set comet.api_key=VALUE" in capsys.readouterr().err
    assert scripted.resume("--set", f"comet.api_key={KEY}", "--stages", "0", "1", "2") == 0
    assert [row["strategy"] for row in scripted.rows()] == ["zero0", "zero1", "zero2"]
    files = [path for path in scripted.output.rglob("*") if path.is_file()]
    assert len(files) > 6
    assert [path for path in files if KEY in path.read_text(errors="replace")] == []


def test_only_the_user_can_read_the_ranks_file_with_the_credential(tmp_path: Path) -> None:
    trial = fakes.trial()
    config = {**trial.ds_config, **CONFIG}
    object.__setattr__(trial, "ds_config", config)
    Assignment(trial=trial, rendezvous=None, scratch_id="1").save(tmp_path, config)
    assert json.loads((tmp_path / "ds_config.json").read_text())["comet"]["api_key"] == KEY
    assert (tmp_path / "ds_config.json").stat().st_mode & 0o777 == 0o600
    assert KEY not in (tmp_path / "trial.json").read_text()
