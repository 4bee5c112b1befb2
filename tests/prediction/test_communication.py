"""What a step sends and how long links take for it, against the papers' volumes and sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_bench.config.spec import Configuration
from ds_bench.errors import UsageError
from ds_bench.prediction import links
from ds_bench.prediction.communication import Traffic, sent_bytes, step_traffic, traffic_seconds
from ds_bench.prediction.links import BETWEEN, WITHIN, Links, parse_link
from tests.support import fakes

PSI = 2e9
"""Elements: more than stage 3 keeps gathered (1e9)."""


def with_zero(stage: int, **keys: Any) -> Configuration:
    made = fakes.zero(stage)
    config = dict(made.deepspeed_config)
    return replace(made, deepspeed_config={**config, "zero_optimization": {**config["zero_optimization"], **keys}})


def volumes(configuration: Configuration, *, grad_accum: int = 1, parameters: float = PSI) -> tuple[float, float]:
    """Bytes sent among all ranks and within the groups of hpZ, in units of the 16-bit parameters."""
    sent = step_traffic(
        configuration,
        parameters=int(parameters),
        trained=int(parameters),
        precision="bf16",
        grad_accum=grad_accum,
    )
    whole = sum(each.bytes for each in sent if each.ranks is None) / (2 * parameters)
    return whole, sum(each.bytes for each in sent if each.ranks is not None) / (2 * parameters)


# ZeRO, section 7; ZeRO++, table 1 (M, 0.5 M and 0 + M, 0.25 M), with what DeepSpeed 0.19.8 does otherwise.
VOLUMES = [
    (fakes.zero(0), 1, (2, 0)),
    (with_zero(1, use_multi_rank_bucket_allreduce=False), 1, (2, 0)),
    (with_zero(2, use_multi_rank_bucket_allreduce=False), 1, (2, 0)),
    (fakes.zero(1), 1, (3, 0)),  # buckets are all-reduced
    (fakes.zero(2), 1, (3, 0)),
    (fakes.zero(3), 1, (3, 0)),
    (fakes.zero(1), 4, (3, 0)),
    (fakes.zero(2), 4, (9, 0)),  # gradients of every micro-batch
    (fakes.zero(3), 4, (12, 0)),
    (with_zero(3, stage3_max_live_parameters=10**10, stage3_max_reuse_distance=10**10), 1, (2, 0)),
    (with_zero(3, zero_hpz_partition_size=8), 1, (2, 1)),
    (with_zero(3, zero_hpz_partition_size=8), 4, (5, 7)),  # the second copy lasts for the whole step
    (with_zero(3, zero_quantized_weights=True), 1, (2, 0)),  # 8 bits forward and backward
    (with_zero(3, zero_quantized_gradients=True), 1, (2.25, 0)),
    (
        with_zero(3, zero_quantized_weights=True, zero_hpz_partition_size=8, zero_quantized_gradients=True),
        1,
        (0.75, 0.5),
    ),
    (fakes.reference("ddp"), 1, (4, 0)),  # twice, in fp32
    (fakes.reference("fsdp2"), 1, (3, 0)),
]


def test_volumes_are_those_of_the_papers_and_of_deepspeed(subtests: pytest.Subtests) -> None:
    for configuration, grad_accum, expected in VOLUMES:
        with subtests.test(configuration=configuration, grad_accum=grad_accum):
            assert volumes(configuration, grad_accum=grad_accum) == pytest.approx(expected)


def test_gradients_are_quantised_between_nodes_alone_and_sent_in_their_own_format() -> None:
    def gradient_bytes(configuration: Configuration, several_nodes: bool) -> float:
        sent = step_traffic(
            configuration,
            parameters=1000,
            trained=1000,
            precision="bf16",
            grad_accum=1,
            several_nodes=several_nodes,
        )
        return sum(each.bytes for each in sent if each.name == "reduce gradients")

    assert gradient_bytes(with_zero(3, zero_quantized_gradients=True), True) == 500
    assert gradient_bytes(with_zero(3, zero_quantized_gradients=True), False) == 2000
    in_fp32 = replace(fakes.zero(0), deepspeed_config={"communication_data_type": "fp32"})
    assert gradient_bytes(in_fp32, False) == 8000


LINKS = Links(
    gpus_per_node=8,
    gpu_bytes_per_second=100e9,
    gpu_latency_seconds=1e-6,
    node_bytes_per_second=10e9,
    node_latency_seconds=10e-6,
)
ONE = Traffic(name="x", bytes=16e9, calls=2)


def test_time_on_links_by_hand(subtests: pytest.Subtests) -> None:
    for traffic, ranks, seconds in (
        (ONE, 1, 0.0),
        (ONE, 8, 2 * 7e-6 + 16 * 7 / 8 / 100),
        # Two nodes: half of it crosses once between them, and 7/8 within each: faster than a ring over 16 ranks.
        (ONE, 16, 2 * (7e-6 + 10e-6) + 16 * (7 / 8 / 100 + 1 / 2 / 10)),
        (replace(ONE, is_all_to_all=True), 16, 2 * (7e-6 + 10e-6) + 16 * (7 / 8 / 100 + 1 / 2 / 10)),
        (replace(ONE, ranks=8), 16, 2 * 7e-6 + 16 * 7 / 8 / 100),
    ):
        with subtests.test(traffic=traffic, ranks=ranks, seconds=seconds):
            assert traffic_seconds([traffic], ranks, LINKS) == pytest.approx(seconds)


def test_a_ring_is_taken_where_it_is_faster() -> None:
    """With 64 nodes as fast as their GPUs, a ring sends 511/512 once, two steps 63/64 and 7/8."""
    even = replace(LINKS, node_bytes_per_second=100e9)
    ring = 2 * (448e-6 + 630e-6) + 16 * 511 / 512 / 100
    assert traffic_seconds([ONE], 512, even) == pytest.approx(ring)
    assert sent_bytes([ONE], 512) == pytest.approx(16e9 * 511 / 512)


def test_without_a_rate_between_nodes_no_time_is_made_up() -> None:
    alone = replace(LINKS, node_bytes_per_second=None)
    assert traffic_seconds([ONE], 8, alone) > 0
    with pytest.raises(ValueError, match="between nodes"):
        traffic_seconds([ONE], 16, alone)


def test_units_of_links_are_those_of_vendors() -> None:
    reached = links.REACHED_WITHIN, links.REACHED_BETWEEN
    assert parse_link("--link", "nvlink:900", WITHIN).bytes_per_second == pytest.approx(450e9 * reached[0])
    assert parse_link("--link", "pcie:32", WITHIN).bytes_per_second == pytest.approx(32e9 * reached[0])
    assert parse_link("--inter", "ib:400", BETWEEN).bytes_per_second == pytest.approx(50e9 * reached[1])
    assert parse_link("--inter", "IB:400x8", BETWEEN).bytes_per_second == pytest.approx(400e9 * reached[1])
    assert parse_link("--inter", "eth:0.1", BETWEEN).bytes_per_second == pytest.approx(12.5e6 * reached[1])


def test_a_text_that_is_no_network_is_refused_in_one_line(subtests: pytest.Subtests) -> None:
    for text in ("", "ib", "ib:", ":400", "ib:-1", "ib:0", "ib:nan", "ib:4e9", "nvlink:900", "ib:1x0"):
        with subtests.test(text):
            with pytest.raises(UsageError, match="--inter") as refused:
                parse_link("--inter", text, BETWEEN)
            assert "ib:400" in str(refused.value)
