"""Facts that a rank records about its engine and its arithmetic; tests/integration trains with torch's own engines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ds_bench.worker import measure
from ds_bench.worker.engine import _to_json_value as to_json_value
from ds_bench.worker.engine import select_device
from ds_bench.worker.reference_engines import _create_optimizer
from tests.support import fakes


class Config:
    """Like the objects of DeepSpeed's configuration, whose text is their address in memory."""

    def __init__(self) -> None:
        self.enabled = False
        self.inner: object = self


def test_a_resolved_configuration_is_plain_json_without_addresses_whatever_is_in_it() -> None:
    config = Config()
    config.inner = object()
    values = {"a": math.inf, "b": {1: torch.bfloat16}, "c": (1, None, True), "d": {3.5}, "e": config}
    assert json.loads(json.dumps(to_json_value(values), allow_nan=False)) == {
        "a": "inf",
        "b": {"1": "torch.bfloat16"},
        "c": [1, None, True],
        "d": [3.5],
        "e": {"enabled": False, "inner": "<object object>"},
    }
    assert " at 0x" not in str(to_json_value({"x": [Config(), object(), len, lambda: 1]}))


@pytest.mark.parametrize(("kernel", "fractions"), [("5.15.167.4-microsoft-standard-WSL2", [0.75]), ("6.8.0", [])])
def test_under_wsl_a_rank_is_limited_to_free_memory(
    kernel: str, fractions: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_fractions: list[float] = []
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(release=kernel))
    monkeypatch.setattr("deepspeed.accelerator.cuda_accelerator.pynvml", None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (18 * fakes.GB, 24 * fakes.GB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fractions.append)
    assert select_device(fakes.placement(accelerator="cuda")) == torch.device("cuda", 0)
    assert set_fractions == fractions


def test_tf32_is_recorded_however_it_was_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        assert measure._uses_tf32() is False
        matmul.fp32_precision = "tf32"
        assert measure._uses_tf32() is True
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        assert measure._uses_tf32() is False
    finally:
        matmul.fp32_precision = before
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))  # before torch 2.9
    assert measure._uses_tf32() is True


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_the_optimizer_of_a_gpu_updates_split_parameters(name: str, tmp_path: Path) -> None:
    """Fused implementations exist for the CPU too, and torch splits only some of them."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
        block = {"type": name, "params": {"lr": 0.1}}
        optimizer = _create_optimizer(list(model.parameters()), block, torch.device("cuda"))
        before = model.weight.to_local().clone()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight.to_local(), before)
    finally:
        torch.distributed.destroy_process_group()


def test_sdpa_gets_a_mask_only_when_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caveat ``compiled_mask`` says so; a version of Transformers that builds none makes it wrong."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(num_hidden_layers=1, vocab_size=32, attn_implementation="sdpa", **sizes)
    model = transformers.LlamaForCausalLM(config)
    ids, masks = torch.zeros(1, 8, dtype=torch.long), list[object]()
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def record(*arguments: Any, **named: Any) -> torch.Tensor:
        masks.append(named.get("attn_mask"))
        return sdpa(*arguments, **named)

    def record_compiled(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        calls = [node for node in graph.graph.nodes if node.target is sdpa]
        masks.extend(str(call.kwargs["attn_mask"]) for call in calls)
        return graph.forward

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
        model(ids, position_ids=torch.arange(8)[None], use_cache=False)
    assert masks == [None]
    torch.compile(model, backend=record_compiled)(ids, position_ids=torch.arange(8)[None], use_cache=False)
    assert masks == [None, "attention_mask"]
