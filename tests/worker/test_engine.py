"""Facts that a rank records about its engine and its arithmetic."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ds_bench.worker import measure
from ds_bench.worker.engine import _to_json_value as to_json_value


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
