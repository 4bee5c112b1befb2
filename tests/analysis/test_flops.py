"""FLOPs by hand and by law; device names as they are reported, and as they try to deceive."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds_bench
from ds_bench.analysis import load_results
from ds_bench.analysis.flops import (
    PEAK_PRECISIONS,
    causal_flops_per_token,
    hardware_flops_per_token,
    mfu,
    model_flops_per_token,
    peak_flops,
)
from ds_bench.models.presets import ModelFacts
from tests.support import fakes
from tests.support.fakes import preset

DEVICES = Path(ds_bench.__path__[0], "system", "device_specifications.json")
TABLE: list[dict[str, Any]] = json.loads(DEVICES.read_text(encoding="utf-8"))

sequences = st.integers(1, 2**20)


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    count = draw(st.integers(1, 10**12))
    return replace(
        preset("tiny"),
        parameters=count,
        matmul_parameters=draw(st.integers(1, count)),
        largest_parameter=1,
        layers=draw(st.integers(1, 200)),
        attention_heads=draw(st.integers(1, 256)),
        head_dim=draw(st.integers(1, 512)),
    )


def test_flops_by_hand() -> None:
    """Of tiny N_matmul is 521,216; 2 layers, 4 heads of 32, 256 tokens: 3,127,296 + 786,432."""
    tiny = preset("tiny")
    assert model_flops_per_token(tiny, 256) == 6 * 521_216 + 12 * 2 * 4 * 32 * 256 == 3_913_728
    assert causal_flops_per_token(tiny, 256) == 3_127_296 + 393_216
    assert hardware_flops_per_token(tiny, 256, True) == 3_913_728 + 2 * 521_216 + 4 * 2 * 4 * 32 * 256
    wide = preset("Qwen/Qwen3-0.6B")  # 16 heads of 128 in a model 1024 wide
    assert model_flops_per_token(wide, 1000) - 6 * wide.matmul_parameters == 12 * 28 * 16 * 128 * 1000
    experts = preset("mistralai/Mixtral-8x7B-v0.1")  # works like a model of 13 billion and holds 47
    assert 12.5e9 < model_flops_per_token(experts, 1) / 6 < 13e9 < experts.parameters
    assert mfu(6e9, 26_000, 312e12) == pytest.approx(0.5)
    assert mfu(6e9, 104_000, 312e12) == pytest.approx(2.0)  # returned for the caller to flag


@given(models(), sequences, st.integers(2, 10))
def test_laws_of_the_counts(facts: ModelFacts, length: int, times: int) -> None:
    """The causal count lacks half of the attention, full checkpointing costs a third more, and attention is linear in
    layers, heads and length."""

    def attention(model: ModelFacts, tokens: int) -> int:
        return model_flops_per_token(model, tokens) - 6 * model.matmul_parameters

    assert 2 * (causal_flops_per_token(facts, length) - 6 * facts.matmul_parameters) == attention(facts, length) > 0
    assert 3 * hardware_flops_per_token(facts, length, True) == 4 * model_flops_per_token(facts, length)
    grown = [
        attention(replace(facts, layers=times * facts.layers), length),
        attention(replace(facts, attention_heads=times * facts.attention_heads), length),
        attention(replace(facts, head_dim=times * facts.head_dim), length),
        attention(facts, times * length),
    ]
    assert grown == [times * attention(facts, length)] * 4


BF16_TFLOPS = {
    "NVIDIA A100-SXM4-80GB": 312.0,
    "A100-SXM4-40GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H20": 148.0,
    "NVIDIA GH200 144G HBM3e": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X": 1307.4,
}


def test_devices_of_similar_names_have_their_own_dense_rates() -> None:
    expected = {device: tflops * 1e12 for device, tflops in BF16_TFLOPS.items()}
    assert {device: peak_flops(device, "bf16") for device in BF16_TFLOPS} == expected
    rates = {"Tesla V100-SXM2-16GB": 125e12, "Tesla V100-PCIE-32GB": 112e12, "Tesla V100S-PCIE-32GB": 130e12}
    assert {device: peak_flops(device, "fp16") for device in rates} == rates
    assert [peak_flops(device, "bf16") for device in (*rates, "Tesla T4")] == [None] * 4
    assert [peak_flops("NVIDIA A100-SXM4-80GB", each) for each in ("fp32", "tf32")] == [19.5e12, 156e12]


def test_a_device_that_only_resembles_a_known_one_has_no_peak() -> None:
    devices = [
        "",
        "cpu",
        "NVIDIA",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice has a slice's rate
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "GRID A100-10C",  # virtual GPUs
        "NVIDIA A10-4Q",
        "NVIDIA L40S-48Q",
        "NVIDIA GeForce RTX 4090 Laptop GPU",  # another chip under the same number
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM-64GB",  # Leonardo's
        "NVIDIA A100X",
        "NVIDIA A10M",
        "NVIDIA A16",
        "NVIDIA L40G",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA H100 PCIe Something",  # must not fall back to the faster H100
        "Tesla V100-SXM3-32GB",
        "Quadro RTX 6000",
        "NVIDIA RTX 6000",
        "NVIDIA GeForce RTX 4080",
        "NVIDIA GB10",
        "NVIDIA B2000",
        "AMD Instinct MI300A",
        "AMD Instinct MI250X / MI250",
        "Intel(R) Data Center GPU Max 1550",
    ]
    known = [(each, precision) for each in devices for precision in PEAK_PRECISIONS if peak_flops(each, precision)]
    assert known == []


def test_each_row_of_the_table_is_reached_by_its_name_and_mixes_no_dense_with_sparse_rates() -> None:
    """Every device that has both does bf16 at twice the rate of tf32; a sparse number among them would show."""
    for row in TABLE:
        rates = {each: row[f"{each}_tflops"] for each in PEAK_PRECISIONS}
        expected = {each: None if rate is None else rate * 1e12 for each, rate in rates.items()}
        assert {each: peak_flops(row["name"], each) for each in PEAK_PRECISIONS} == expected, row["name"]
        if row["tf32_tflops"]:
            twice = pytest.approx(2 * row["tf32_tflops"], rel=0.05)
            assert row["bf16_tflops"] == row["fp16_tflops"] == twice, row["name"]
    names = [row["name"].casefold() for row in TABLE]
    assert len(set(names)) == len(names)


def test_mfu_of_an_fp32_row_under_tf32_is_of_the_rate_of_tf32(subtests: pytest.Subtests) -> None:
    on = fakes.placement(accelerator="cuda")
    for precision, tf32, tflops in (("fp32", True, 494.7), ("fp32", False, 66.9), ("bf16", True, 989.4)):
        with subtests.test(precision=precision, tf32=tf32):
            trial = fakes.trial(on=on, of=fakes.workload(model="gpt2", precision=precision))
            record = fakes.success(trial, tf32=tf32, device_name="NVIDIA H100 80GB HBM3")
            (row,) = load_results.make_runs([record])
            assert (row.row.model_tflops_per_gpu or 0) / (row.row.mfu or 1) == pytest.approx(tflops)
