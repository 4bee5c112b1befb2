"""The command ``advice`` for models and files outside the presets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_bench.cli import commands


def test_a_model_in_a_folder_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 layers of 12 × 512² and 13 × 512, 4000 and 64 rows of 512, the last norm."""
    config = {"model_type": "gpt2", "vocab_size": 4000, "n_positions": 64, "n_embd": 512, "n_layer": 3, "n_head": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert commands.main(["advice", "--model", str(tmp_path)]) == 0
    assert f"{(3 * (12 * 512**2 + 13 * 512) + 4064 * 512 + 1024) / 1e6:.1f}" in capsys.readouterr().out


def test_files_are_explained_in_place_of_strategies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    assert commands.main(["advice", "--model", "gpt2", "--num-gpus", "4", "--configs", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "mine (stage 3)\n  use when: the partitioned parameters" in captured.out
    assert "ZeRO-1" not in captured.out
    assert "note: mine: its file has no optimizer" in captured.err
