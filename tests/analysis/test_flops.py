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

DEVICES = Path(ds_bench.__path__[0], "system", "devices.json")
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


# Hand-worked


def test_model_flops_of_tiny_are_those_counted_by_hand() -> None:
    # N_matmul 521,216; 2 layers, 4 heads of 32, 256 tokens: 3,127,296 + 786,432.
    assert model_flops_per_token(preset("tiny"), 256) == 6 * 521_216 + 12 * 2 * 4 * 32 * 256 == 3_913_728


def test_causal_flops_of_tiny_are_those_counted_by_hand() -> None:
    assert causal_flops_per_token(preset("tiny"), 256) == 3_127_296 + 393_216


def test_checkpointing_makes_tiny_do_one_more_forward_pass() -> None:
    forward = 2 * 521_216 + 4 * 2 * 4 * 32 * 256
    assert hardware_flops_per_token(preset("tiny"), 256, True) == 3_913_728 + forward


def test_heads_wider_than_the_model_count_with_their_own_width() -> None:
    facts = preset("Qwen/Qwen3-0.6B")  # 16 heads of 128 in a model 1024 wide
    assert model_flops_per_token(facts, 1000) - 6 * facts.matmul_parameters == 12 * 28 * 16 * 128 * 1000


def test_mixtral_works_like_a_thirteen_billion_model_though_it_holds_forty_seven() -> None:
    facts = preset("mistralai/Mixtral-8x7B-v0.1")
    assert 12.5e9 < model_flops_per_token(facts, 1) / 6 < 13e9 < facts.parameters


# Laws


@given(models(), sequences)
def test_the_causal_count_lacks_exactly_half_of_the_attention(facts: ModelFacts, length: int) -> None:
    weights = 6 * facts.matmul_parameters
    attention = model_flops_per_token(facts, length) - weights
    assert 2 * (causal_flops_per_token(facts, length) - weights) == attention > 0


@given(models(), sequences)
def test_full_checkpointing_costs_exactly_a_third_more(facts: ModelFacts, length: int) -> None:
    assert 3 * hardware_flops_per_token(facts, length, True) == 4 * model_flops_per_token(facts, length)


@given(models(), sequences, st.integers(2, 10))
def test_attention_work_grows_linearly_with_layers_heads_and_length(facts: ModelFacts, length: int, times: int) -> None:
    def attention(model: ModelFacts, tokens: int) -> int:
        return model_flops_per_token(model, tokens) - 6 * model.matmul_parameters

    grown = [
        attention(replace(facts, layers=times * facts.layers), length),
        attention(replace(facts, attention_heads=times * facts.attention_heads), length),
        attention(replace(facts, head_dim=times * facts.head_dim), length),
        attention(facts, times * length),
    ]
    assert grown == [times * attention(facts, length)] * 4


# Utilisation


def test_half_of_the_peak_is_an_mfu_of_one_half() -> None:
    assert mfu(6e9, 26_000, 312e12) == pytest.approx(0.5)


def test_an_mfu_over_one_is_returned_for_the_caller_to_flag() -> None:
    assert mfu(6e9, 104_000, 312e12) == pytest.approx(2.0)


# Devices


BF16_TFLOPS = {
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "A100-SXM4-40GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H20": 148.0,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GH200 144G HBM3e": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA A30": 165.0,
    "NVIDIA A40": 149.7,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 3090": 71.2,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI325X": 1307.4,
}


def test_every_device_has_its_own_dense_bf16_rate() -> None:
    expected = {device: tflops * 1e12 for device, tflops in BF16_TFLOPS.items()}
    assert {device: peak_flops(device, "bf16") for device in BF16_TFLOPS} == expected


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


def test_volta_boards_differ_in_fp16_and_have_no_bf16() -> None:
    rates = {"Tesla V100-SXM2-16GB": 125e12, "Tesla V100-PCIE-32GB": 112e12, "Tesla V100S-PCIE-32GB": 130e12}
    assert {device: peak_flops(device, "fp16") for device in rates} == rates
    assert [peak_flops(device, "bf16") for device in (*rates, "Tesla T4")] == [None] * 4


def test_fp32_is_counted_without_tensor_cores_and_tf32_with() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12


def test_each_row_of_the_table_is_reached_by_its_own_name() -> None:
    for row in TABLE:
        rates = {each: row[f"{each}_tflops"] for each in PEAK_PRECISIONS}
        expected = {each: None if rate is None else rate * 1e12 for each, rate in rates.items()}
        assert {each: peak_flops(row["name"], each) for each in PEAK_PRECISIONS} == expected, row["name"]


def test_no_row_mixes_dense_with_sparse_rates() -> None:
    """Every device that has both does bf16 at twice the rate of tf32; a sparse number among them would show."""
    for row in TABLE:
        if row["tf32_tflops"]:
            twice = pytest.approx(2 * row["tf32_tflops"], rel=0.05)
            assert row["bf16_tflops"] == row["fp16_tflops"] == twice, row["name"]


def test_no_device_is_listed_twice() -> None:
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
