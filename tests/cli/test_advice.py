"""The command ``advice`` for models and files outside the presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_bench.cli import commands
from tests.support.model_families import FAMILIES

GPT2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "tie_word_embeddings": True}


def folder_of(path: Path, model_type: str, config: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    return str(path)


def test_a_model_in_a_folder_is_counted_where_its_architecture_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {**GPT2, "n_embd": 512, "vocab_size": 4000}
    assert commands.main(["advice", "--model", folder_of(tmp_path / "known", "gpt2", wide)]) == 0
    # 3 layers of 12 × 512² and 13 × 512, 4000 and 64 rows of 512, the last norm.
    assert f"{(3 * (12 * 512**2 + 13 * 512) + 4064 * 512 + 1024) / 1e6:.1f}" in capsys.readouterr().out
    assert commands.main(["advice", "--model", folder_of(tmp_path / "other", "gpt_neox", FAMILIES["gpt_neox"])]) == 2
    assert "its parameters cannot be counted without building it" in capsys.readouterr().err


def test_files_are_explained_in_place_of_strategies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    assert commands.main(["advice", "--model", "gpt2", "--num-gpus", "4", "--configs", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "mine (stage 3)\n  use when: the partitioned parameters" in captured.out
    assert "ZeRO-1" not in captured.out
    assert "note: mine: its file has no optimizer" in captured.err
