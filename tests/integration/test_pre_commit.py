"""The hook of .pre-commit-hooks.yaml, installed and run by pre-commit itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.support.real_trials import ROOT

pytestmark = pytest.mark.slow
GOOD = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
BAD = {**GOOD, "zero_optimization": {"stage": 2, "mics_shard_size": 8}}


def test_pre_commit_installs_the_hook_and_it_refuses_a_wrong_configuration(tmp_path: Path) -> None:
    package, repository = tmp_path / "package", tmp_path / "repository"
    shutil.copytree(ROOT / "ds_bench", package / "ds_bench", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".pre-commit-hooks.yaml"):
        shutil.copy(ROOT / name, package)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTHON", "PIP_"))}
    variables |= {
        **{f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        "PRE_COMMIT_HOME": str(tmp_path / "cache"),
        # pip finds every requirement in this environment: installing them would take minutes.
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads the value of a negative option as that of the positive one
    }

    def run(*command: str, folder: Path = repository, code: int = 0) -> str:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def write(name: str, content: object) -> None:
        (repository / name).write_text(json.dumps(content, indent=1))
        run("git", "add", ".")

    for folder in (package, repository):
        folder.mkdir(exist_ok=True)
        run("git", "init", "--quiet", folder=folder)
    run("git", "add", ".", folder=package)
    run("git", "commit", "--quiet", "--message", "package", folder=package)
    revision = run("git", "rev-parse", "HEAD", folder=package).strip()
    hook = {"id": "check-deepspeed-config", "args": ["--ignore", "hint"]}
    config = {"repos": [{"repo": str(package), "rev": revision, "hooks": [hook]}]}
    (repository / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    run(sys.executable, "-m", "pre_commit", "install")
    write("ds_config.json", GOOD)
    write("package.json", BAD)  # no name of a configuration
    run("git", "commit", "--quiet", "--message", "good")
    write("zero2.json", BAD)
    refused = run("git", "commit", "--quiet", "--message", "bad", code=1)
    assert "zero2.json:6:3: error: zero_optimization.mics_shard_size" in refused
    assert "package.json" not in refused
    write("zero2.json", GOOD)
    run("git", "commit", "--quiet", "--message", "mended")
