"""Models that are refused in second 0: factories that cannot be imported, folders that hold another architecture."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config.spec import Placement
from ds_bench.errors import UsageError
from ds_bench.launch.rank_environment import rank_environment
from ds_bench.models.lookup import ResolvedModel, resolve_model


def find(name: str, *, factory: bool = False) -> ResolvedModel:
    variables = {**rank_environment(Placement(accelerator="cpu"), os.environ, None), "HF_HUB_OFFLINE": "1"}
    return resolve_model(name, factory=factory, trust_remote_code=False, environment=variables)


def test_a_factory_is_imported_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("print('built')\ndef build(): raise AssertionError('called')\nnumber = 3\n")
    Path("broken.py").write_text("raise RuntimeError('no such card')\n")
    Path("script.py").write_text("import sys; sys.exit('usage: script')\n")
    assert find("mine:build", factory=True).source == "factory"
    for name, said in {
        "nowhere:build": "No module named 'nowhere'",
        "mine:make": "has no attribute 'make'",
        "mine:number": "number is no function",
        "broken:build": "RuntimeError: no such card",
        "script:build": "SystemExit: usage: script",
    }.items():
        with pytest.raises(UsageError) as caught:
            find(name, factory=True)
        assert f"--model-factory {name} cannot be imported: " in str(caught.value)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


BART = {
    "model_type": "bart",
    "vocab_size": 100,
    "d_model": 16,
    **{f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")},
}
GPT2 = {"model_type": "gpt2", "vocab_size": 100, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}


def folder(path: Path, config: dict[str, Any], *architectures: str) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, "architectures": list(architectures)}))
    return str(path)


@pytest.mark.parametrize(
    ("config", "named", "built"),
    [
        (GPT2, "GPT2Model", "GPT2LMHeadModel"),
        pytest.param(BART, "BartForConditionalGeneration", "BartForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_a_folder_that_names_another_class_than_would_be_built_is_refused(
    config: dict[str, Any], named: str, built: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        find(folder(tmp_path / "model", config, named))
    assert named in str(caught.value)
    assert built in str(caught.value)
    assert "--model-factory" in caught.value.remedy


@pytest.mark.parametrize("named", ["GPT2LMHeadModel", pytest.param(None, marks=pytest.mark.slow)])
def test_a_folder_that_names_the_class_that_is_built_or_none_is_trained(named: str | None, tmp_path: Path) -> None:
    assert find(folder(tmp_path / "model", GPT2, *filter(None, [named]))).model_type == "gpt2"
