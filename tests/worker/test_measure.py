"""What a rank records of how it computed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")


def test_tf32_is_recorded_however_it_was_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_bench.worker.measure import _uses_tf32

    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        assert _uses_tf32() is False
        matmul.fp32_precision = "tf32"
        assert _uses_tf32() is True
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        assert _uses_tf32() is False
    finally:
        matmul.fp32_precision = before
