"""FLOPs by hand; device names as they are reported, and as they try to deceive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ds_bench
from ds_bench.analysis import load_results
from ds_bench.analysis.flops import (
    causal_flops_per_token,
    hardware_flops_per_token,
    mean_peak_flops,
    model_flops_per_token,
)
from ds_bench.system.device_specifications import peak_tflops
from tests.support import fakes
from tests.support.fakes import preset

DEVICES = Path(ds_bench.__path__[0], "system", "device_specifications.json")
TABLE: list[dict[str, Any]] = json.loads(DEVICES.read_text(encoding="utf-8"))
PRECISIONS = ("bf16", "fp16", "fp32", "tf32")


def test_flops_by_hand() -> None:
    """For tiny, N_matmul is 521,216; 2 layers, 4 heads of 32, 256 tokens: 3,127,296 + 786,432."""
    tiny = preset("tiny")
    assert model_flops_per_token(tiny, 256) == 6 * 521_216 + 12 * 2 * 4 * 32 * 256 == 3_913_728
    assert causal_flops_per_token(tiny, 256) == 3_127_296 + 393_216
    assert hardware_flops_per_token(tiny, 256, True) == 3_913_728 + 2 * 521_216 + 4 * 2 * 4 * 32 * 256
    assert hardware_flops_per_token(tiny, 256, False) == 3_913_728
    wide = preset("Qwen/Qwen3-0.6B")  # 16 heads of 128 in a model 1024 wide
    assert model_flops_per_token(wide, 1000) - 6 * wide.matmul_parameters == 12 * 28 * 16 * 128 * 1000
    experts = preset("mistralai/Mixtral-8x7B-v0.1")  # works like a model of 13 billion and holds 47
    assert 12.5e9 < model_flops_per_token(experts, 1) / 6 < 13e9 < experts.parameters


def test_devices_of_similar_names_have_their_own_dense_rates() -> None:
    bf16 = {
        "A100-SXM4-40GB": 312.0,
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA GH200 144G HBM3e": 989.4,
        "NVIDIA L4": 121.0,
        "NVIDIA L40": 181.05,
        "NVIDIA L40S": 362.05,
        "NVIDIA A10G": 70.0,
        "AMD Instinct MI300X": 1307.4,
        "Tesla V100-SXM2-16GB": None,
    }
    assert {device: peak_tflops(device, "bf16") for device in bf16} == bf16
    fp16 = {"Tesla V100-SXM2-16GB": 125.0, "Tesla V100-PCIE-32GB": 112.0, "Tesla V100S-PCIE-32GB": 130.0}
    assert {device: peak_tflops(device, "fp16") for device in fp16} == fp16


def test_a_device_that_only_resembles_a_known_one_has_no_peak() -> None:
    devices = [
        "",
        "NVIDIA",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice has a slice's rate
        "GRID A100-10C",  # virtual GPUs
        "NVIDIA L40S-48Q",
        "NVIDIA GeForce RTX 4090 Laptop GPU",  # another chip under the same number
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM-64GB",  # Leonardo's
        "NVIDIA H100 PCIe Something",  # must not fall back to the faster H100
        "NVIDIA B2000",
        "AMD Instinct MI250X / MI250",
    ]
    assert [(each, name) for each in devices for name in PRECISIONS if peak_tflops(each, name)] == []


def test_mfu_on_different_devices_is_relative_to_their_mean_rate() -> None:
    mixed = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    rates = [(peak_tflops(name, "bf16") or 0) * 1e12 for name in mixed]
    assert rates[0] > rates[1] > 0
    assert mean_peak_flops(mixed, "bf16") == sum(rates) / 2
    assert mean_peak_flops((*mixed, "a card of tomorrow"), "bf16") is None
    assert mean_peak_flops((), "bf16") is None


def test_each_row_of_the_table_is_reached_by_its_name_and_mixes_no_dense_with_sparse_rates() -> None:
    """Every device that has both does bf16 at twice the rate of tf32; a sparse number among them would show."""
    for row in TABLE:
        rates = {each: row[f"{each}_tflops"] for each in PRECISIONS}
        assert {each: peak_tflops(row["name"], each) for each in PRECISIONS} == rates, row["name"]
        if row["tf32_tflops"]:
            twice = pytest.approx(2 * row["tf32_tflops"], rel=0.05)
            assert row["bf16_tflops"] == row["fp16_tflops"] == twice, row["name"]


def test_mfu_of_an_fp32_row_under_tf32_is_relative_to_the_rate_of_tf32() -> None:
    on = fakes.placement(accelerator="cuda")
    for precision, tf32, tflops in (("fp32", True, 494.7), ("fp32", False, 66.9), ("bf16", True, 989.4)):
        trial = fakes.trial(on=on, of=fakes.workload(model="gpt2", precision=precision))
        (run,) = load_results.make_runs([fakes.success(trial, tf32=tf32)])
        assert (run.row.model_tflops_per_gpu or 0) / (run.row.mfu or 1) == pytest.approx(tflops), (precision, tf32)
