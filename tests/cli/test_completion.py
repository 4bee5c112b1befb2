"""The command ``completion``, its script in a real bash."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ds_bench.cli import commands

ASKED = {
    ("bas",): {"baseline"},
    ("baseline", "ch"): {"check"},
    ("plan", "--num-g"): {"--num-gpus"},
    ("report", "--format", "p"): {"parquet"},
    ("run", "--stages", "2", "--accel"): {"--accelerator"},
    ("run", "mine"): {"mine.yaml"},
    ("report", "--html", "mine"): {"mine.yaml"},
}
"""Words after ``ds-compare`` → what completes the last of them, in a folder that holds mine.yaml."""


def test_bash_completes_commands_flags_choices_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "mine.yaml").touch()
    for words, wanted in ASKED.items():
        program = (
            'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE};'
            'spec=($(complete -p ds-compare)); "${spec[-2]}"; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        command = ["bash", "-c", program, "bash", str(script), "ds-compare", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert set(done.stdout.split()) == wanted, words


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [name for name in commands.COMMANDS if name not in script] == []
