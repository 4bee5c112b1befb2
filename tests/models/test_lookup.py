"""Models that are refused before any work: unknown names, factories and folders that cannot be used."""

from __future__ import annotations

import json
import os
import socketserver
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ds_bench.config.spec import Placement
from ds_bench.errors import UsageError
from ds_bench.launch.rank_environment import rank_environment
from ds_bench.models import lookup
from ds_bench.models.lookup import ResolvedModel, connection_failure, resolve_model


def find(name: str, *, factory: bool = False) -> ResolvedModel:
    variables = {**rank_environment(Placement(accelerator="cpu"), os.environ), "HF_HUB_OFFLINE": "1"}
    return resolve_model(name, factory=factory, trust_remote_code=False, environment=variables)


def test_factory_is_imported_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("print('built')\ndef build(): raise AssertionError('called')\nnumber = 3\n")
    Path("broken.py").write_text("raise RuntimeError('no such card')\n")
    Path("script.py").write_text("import sys; sys.exit('usage: script')\n")
    assert find("mine:build", factory=True).source == "factory"
    for name, text in {
        "nowhere:build": "No module named 'nowhere'",
        "mine:make": "has no attribute 'make'",
        "mine:number": "number is not a function",
        "broken:build": "RuntimeError: no such card",
        "script:build": "SystemExit: usage: script",
    }.items():
        with pytest.raises(UsageError, match=f"^--model-factory {name} cannot be imported: .*{text}"):
            find(name, factory=True)


class BrokenHub(socketserver.BaseRequestHandler):
    """A Hub that cannot be used: each request gets the next of these answers."""

    answers: ClassVar[list[bytes]] = []

    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(self.answers.pop(0))


def test_hub_that_does_not_answer_or_may_not_be_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        find("nowhere/none")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    busy, no_head = (f"HTTP/1.0 {status}\r\n\r\n".encode() for status in ("503 Busy", "501 Not Implemented"))
    monkeypatch.setattr(BrokenHub, "answers", [b"", busy, busy, no_head])
    with socketserver.TCPServer(("127.0.0.1", 0), BrokenHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(UsageError, match=r"and 127\.0\.0\.1 cannot be reached \(HTTP 503") as caught:
            resolve_model(
                "gpt2-huge\udcff", factory=False, trust_remote_code=False, environment={"HF_ENDPOINT": address}
            )
        assert "gpt2" in caught.value.remedy
        assert len(BrokenHub.answers) == 2  # Transformers itself would try six times, with pauses
        assert connection_failure(address) is None  # at the second try
        server.shutdown()


def test_hub_is_not_waited_for_and_no_file_or_password_is_shown() -> None:
    failures = {address: connection_failure(address, pytest.fail) for address in ("file://me/etc/passwd", "http://[x")}
    assert set(failures.values()) == {"HF_ENDPOINT is not a web address"}
    waited = connection_failure("https://me:pw@hub", lambda _: threading.Event().wait(5), 0.05)
    assert waited == "hub cannot be reached (no answer within 0.05 s)"
    assert connection_failure("https://hub", lambda _: None) is None


BART = {
    "model_type": "bart",
    "vocab_size": 100,
    "d_model": 16,
    **{f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")},
}
GPT2 = {"model_type": "gpt2", "vocab_size": 100, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}


@pytest.mark.parametrize(
    ("config", "named", "built"),
    [
        (GPT2, "GPT2Model", "GPT2LMHeadModel"),
        (GPT2, "GPT2LMHeadModel", None),
        pytest.param(GPT2, None, None, marks=pytest.mark.slow),
        pytest.param(BART, "BartForConditionalGeneration", "BartForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_folder_is_trained_only_as_the_class_that_it_names(
    config: dict[str, Any], named: str | None, built: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [named] if named else []}))
    if built is None:
        assert find(str(tmp_path)).model_type == "gpt2"
        return
    with pytest.raises(UsageError, match=f"{named}.*{built}") as caught:
        find(str(tmp_path))
    assert "--model-factory" in caught.value.remedy


def test_mixture_that_the_child_does_not_count_is_known_by_formula_for_plan_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen2-57B-A14B has 57,408,658,944 parameters (built with Transformers 5.23)."""
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 64, "num_experts_per_tok": 8}
    sizes |= {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "decoder_sparse_step": 1}
    answer: dict[str, Any] = dict.fromkeys(
        ("counts", "largest_parameter", "max_positions", "vocabulary_size", "hidden_size")
    )
    answer |= {"architectures": None, "built_architecture": None, "model_type": "qwen2_moe", "config": {}}
    monkeypatch.setattr(lookup, "_ask_child", lambda *_arguments: answer)
    counted = {}
    for family in ("qwen2_moe", "unheard_of"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **sizes}))
        for by_config in (False, True):
            found = resolve_model(
                str(tmp_path), factory=False, trust_remote_code=False, environment={}, by_config=by_config
            )
            counted[family, by_config] = found.facts and found.facts.parameters
    assert counted.pop(("qwen2_moe", True)) == 57_408_658_944
    assert set(counted.values()) == {None}
