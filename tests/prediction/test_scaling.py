"""Projections of a measured step: what must hold exactly, what is refused, and published runs at several sizes."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ds_bench.config.spec import Configuration
from ds_bench.errors import UsageError
from ds_bench.prediction.communication import Traffic
from ds_bench.prediction.links import BETWEEN, WITHIN, Links, parse_link
from ds_bench.prediction.scaling import MeasuredStep, measured_rates, project
from tests.prediction.test_communication import with_zero
from tests.support import fakes
from tests.support.shared_files import shared_files

INFINITE = float("inf")
INSTANT = Links(gpus_per_node=8, gpu_bytes_per_second=INFINITE, node_bytes_per_second=INFINITE)


def links(link: str, inter: str) -> Links:
    within, between = parse_link("--link", link, WITHIN), parse_link("--inter", inter, BETWEEN)
    return Links(
        gpus_per_node=8,
        gpu_bytes_per_second=within.bytes_per_second,
        gpu_latency_seconds=within.latency_seconds,
        node_bytes_per_second=between.bytes_per_second,
        node_latency_seconds=between.latency_seconds,
    )


H100 = links("nvlink:900", "ib:400x8")
A100 = links("nvlink:600", "roce:1600")


def step(configuration: Configuration, num_gpus: int = 8, **changes: Any) -> MeasuredStep:
    """A second, of a model of 7 billion parameters with 4 × 2 sequences on each GPU."""
    values: dict[str, Any] = {
        "configuration": configuration,
        "parameters": 7 * 10**9,
        "trained": 7 * 10**9,
        "layers": 32,
        "precision": "bf16",
        "num_gpus": num_gpus,
        "gpus_per_node": min(8, num_gpus),
        "micro_batch_size": 4,
        "grad_accum": 2,
        "step_seconds": 1.0,
        "tokens_per_second": 8000.0 * num_gpus,
    }
    return MeasuredStep(**{**values, **changes})


def test_at_its_own_size_a_projection_is_the_measurement(subtests: pytest.Subtests) -> None:
    for stage, scaling, num_gpus in product((0, 1, 2, 3), ("weak", "strong"), (1, 8, 32)):
        with subtests.test(stage=stage, scaling=scaling, num_gpus=num_gpus):
            measured = step(fakes.zero(stage), num_gpus, step_seconds=20.0, update_seconds=0.5)
            found = project(measured, num_gpus, H100, scaling)
            assert found.step_seconds.bounds == pytest.approx((20.0, 20.0))
            assert found.tokens_per_second.bounds == pytest.approx((measured.tokens_per_second,) * 2)
            assert (found.micro_batch_size, found.grad_accum) == (4, 2)
            assert found.efficiency.bounds == pytest.approx((1.0, 1.0))
            for communication, computing in (
                (3.0, 15.0),
                (12.0, 18.0),
                (15.0, 2.0),
                (19.0, 30.0),
                (25.0, 15.0),
            ):  # seconds of 20
                timed = replace(
                    measured,
                    communication_seconds=communication,
                    communication=Traffic(name="all", bytes=1e9, calls=10),
                    computing_seconds=computing,
                )
                rate = timed.measured_rate or INFINITE
                own = replace(INSTANT, gpu_bytes_per_second=rate, node_bytes_per_second=rate)
                if num_gpus == 8:  # of several nodes the formula may find a faster way than one ring
                    assert project(timed, num_gpus, own, scaling).step_seconds.bounds == pytest.approx((20.0, 20.0))
                    assert project(timed, 1, own, "weak").step_seconds.bounds[0] > 0


def test_links_without_resistance_scale_perfectly_and_slow_ones_only_slow_down() -> None:
    for stage in range(4):
        measured = step(fakes.zero(stage), step_seconds=20.0)
        assert project(measured, 64, INSTANT, "weak").efficiency.bounds == pytest.approx((1.0, 1.0))
        assert project(measured, 32, INSTANT, "strong").step_seconds.bounds == pytest.approx((5.0, 5.0))
    slow = [
        project(step(fakes.zero(3), step_seconds=20.0), 64, links("nvlink:900", inter), "weak").efficiency.bounds
        for inter in ("ib:400x8", "ib:400", "eth:100", "eth:25")
    ]
    assert slow == sorted(slow, reverse=True)
    assert slow[-1][1] < slow[0][1] <= 1.0


def test_the_update_shrinks_with_its_share_in_the_better_case_alone() -> None:
    measured = step(fakes.zero(1), update_seconds=0.4)
    assert project(measured, 16, INSTANT, "weak").step_seconds.bounds == pytest.approx((0.8, 1.0))
    whole = step(fakes.zero(0), update_seconds=0.4)
    assert project(whole, 16, INSTANT, "weak").step_seconds.bounds == pytest.approx((1.0, 1.0))
    # On the host, a node's share counts: two ranks of one node update as much as four of it.
    host = step(fakes.offload("cpu_optimizer", 2), 4, update_seconds=0.4)
    assert project(host, 8, INSTANT, "weak").step_seconds.bounds == pytest.approx((1.0, 1.0))
    assert project(host, 16, INSTANT, "weak").step_seconds.bounds == pytest.approx((0.8, 1.0))


def test_strong_scaling_keeps_the_global_batch(subtests: pytest.Subtests) -> None:
    for num_gpus, expected in ((4, (4, 4)), (8, (4, 2)), (16, (4, 1)), (32, (2, 1)), (64, (1, 1)), (2, (4, 8))):
        with subtests.test(num_gpus=num_gpus):
            found = project(step(fakes.zero(2), step_seconds=20.0), num_gpus, H100, "strong")
            assert (found.micro_batch_size, found.grad_accum) == expected
            assert found.global_batch_size == 64
            assert bool(found.notes) == (expected[0] < 4)  # a smaller micro-batch is computed less well


def test_a_timed_communication_is_replaced_by_that_of_other_links() -> None:
    """Two nodes of one rank, as measured between network namespaces: the rate falls to a quarter."""
    sent = Traffic(name="all", bytes=4e6, calls=3)
    measured = step(fakes.zero(1), 2, gpus_per_node=1, step_seconds=0.5, communication_seconds=0.4, communication=sent)
    assert measured_rates(measured, [measured]) == (None, pytest.approx(2e6 / 0.4))
    slower = Links(gpus_per_node=1, gpu_bytes_per_second=INFINITE, node_bytes_per_second=2e6 / 1.6)
    found = project(measured, 2, slower, "weak")
    assert found.communication_seconds == pytest.approx(1.6)
    assert found.step_seconds.bounds == pytest.approx((1.6, 1.7))
    # Computing that was timed by itself tells that next to nothing overlapped: the range becomes narrow.
    timed = replace(measured, computing_seconds=0.09)
    assert project(timed, 2, slower, "weak").step_seconds.bounds == pytest.approx((1.7, 1.7))
    faster = replace(slower, node_bytes_per_second=2e6 / 0.1)
    assert project(timed, 2, faster, "weak").step_seconds.bounds == pytest.approx((0.2, 0.2))
    assert found.sent_bytes == pytest.approx(2e6)


TENSOR_PARALLEL = replace(
    fakes.zero(1), deepspeed_config={**fakes.zero(1).deepspeed_config, "tensor_parallel": {"autotp_size": 4}}
)
SEQUENCE_PARALLEL = replace(fakes.zero(3), deepspeed_config={"sequence_parallel_size": 4})


def test_sizes_that_cannot_be_are_refused(subtests: pytest.Subtests) -> None:
    for measured, num_gpus, on, scaling, problem in (
        (step(TENSOR_PARALLEL), 6, H100, "weak", "no multiple of the 4 that work on the same sequences"),
        (step(SEQUENCE_PARALLEL), 6, H100, "weak", "no multiple of the 4"),
        (step(fakes.zero(2)), 12, H100, "weak", "do not fill nodes of 8"),
        (step(fakes.zero(2)), 16, replace(H100, node_bytes_per_second=None), "weak", "between nodes is not known"),
        (step(fakes.zero(2), 16), 8, replace(H100, node_bytes_per_second=None), "weak", "16 GPUs are 2 nodes of 8"),
        (step(with_zero(3, zero_hpz_partition_size=8)), 4, H100, "weak", "zero_hpz_partition_size 8"),
        (step(fakes.zero(3)), 1, links("pcie:8", "eth:10"), "weak", "which had faster ones"),
        (step(fakes.zero(2)), 128, H100, "strong", "batch of 64 sequences cannot be split"),
        (step(fakes.zero(2)), 3, H100, "strong", "batch of 64 sequences cannot be split"),
    ):
        with (
            subtests.test(measured=measured, num_gpus=num_gpus, on=on, scaling=scaling, problem=problem),
            pytest.raises(UsageError, match=problem),
        ):
            project(measured, num_gpus, on, scaling)


def test_tensor_parallel_ranks_send_their_part_of_the_model_over_their_part_of_the_network() -> None:
    between = replace(H100, gpu_bytes_per_second=INFINITE)
    whole = project(step(fakes.zero(1), step_seconds=20.0), 64, between, "weak")
    parts = project(step(TENSOR_PARALLEL, step_seconds=20.0), 64, between, "weak")
    assert parts.sent_bytes == pytest.approx(whole.sent_bytes / 4, rel=0.06)
    assert parts.communication_seconds == pytest.approx(whole.communication_seconds, rel=0.05)
    assert parts.global_batch_size == whole.global_batch_size / 4


# ------------------------------------------------------------------ published runs at several sizes

Published = tuple[str, MeasuredStep, int, float, Links]
_ALIKE = ("source", "model", "seq", "gpu", "precision", "mp_mode", "sharding", "stage", "activation_ckpt")
_LAYERS_OF_8B = 32


def published_steps() -> list[Published]:
    """Name, smallest size, another size, its measured tokens/s and links: models that were run alike at several sizes.

    A run at another micro-batch or accumulation is another workload and is left out. The clusters' networks are those
    that the tables name (A100), and for H100 the usual eight adapters of 400 Gbit/s, which they do not.
    """
    alike: defaultdict[Any, dict[int, tuple[float, dict[str, str]]]] = defaultdict(dict)
    for table in shared_files("published", "*.csv"):
        for row in csv.DictReader(table.read_text(encoding="utf-8").splitlines()):
            rate = row.get("tokens_per_s") or (row["value"] if row.get("quantity") == "tokens_per_s" else "")
            if rate and row["params"] and row["seq"].isdecimal() and row["micro_batch"].isdecimal():
                per_gpu = row.get("notes", "").startswith("per GPU")
                key = tuple(row.get(name) for name in (*_ALIKE, "notes", "params", "micro_batch", "grad_accum"))
                alike[key].setdefault(int(row["gpus"]), (float(rate) * (int(row["gpus"]) if per_gpu else 1), row))
    found = []
    for sizes in alike.values():
        num_gpus = min(sizes)
        rate, row = sizes[num_gpus]
        on = A100 if "a100" in row.get("gpu", "") else H100
        name = " ".join(filter(None, (row["model"], row.get("gpu"), row.get("sharding"), row.get("notes"))))
        smallest = _published_step(row, num_gpus, rate)
        found += [(name, smallest, size, sizes[size][0], on) for size in sorted(sizes) if size > num_gpus]
    return found


def _published_step(row: dict[str, str], num_gpus: int, rate: float) -> MeasuredStep:
    micro_batch_size, grad_accum = int(row["micro_batch"]), int(row.get("grad_accum") or 1)
    return step(
        # FSDP's SHARD_GRAD_OP gathers once and reduces once, as stage 2 does in the paper.
        with_zero(2, use_multi_rank_bucket_allreduce=False)
        if row.get("sharding") == "SHARD_GRAD_OP"
        else fakes.reference("fsdp2"),
        num_gpus,
        parameters=int(row["params"]),
        trained=int(row["params"]),
        layers=int(row.get("layers") or _LAYERS_OF_8B),
        micro_batch_size=micro_batch_size,
        grad_accum=grad_accum,
        step_seconds=int(row["seq"]) * micro_batch_size * grad_accum * num_gpus / rate,
        tokens_per_second=rate,
    )


def test_published_runs_at_other_sizes_lie_in_the_range_or_near_it() -> None:
    """Errors of throughput. The 1-billion model was published a fifth slower on 32 A100s than on 16 and on 64."""
    outside, nearest = {}, {}
    for name, smallest, num_gpus, rate, on in published_steps():
        found = project(smallest, num_gpus, on, "weak").tokens_per_second
        low, high = (value / rate - 1 for value in found.bounds)
        distance = max(low, -high, 0.0)
        key = f"{name}, {smallest.num_gpus} → {num_gpus} GPUs"
        outside[key], nearest[key] = distance, (low, high)
        print(f"{key:58} {low:+7.1%} … {high:+7.1%}  outside {distance:5.1%}")
    assert len(outside) == 38
    outlier = [key for key in outside if "MPT-1b a100_40gb" in key]
    others = [distance for key, distance in outside.items() if key not in outlier]
    ends = {end: [abs(nearest[key][end]) for key in outside] for end in (0, 1)}
    print(f"outside the range: median {statistics.median(outside.values()):.1%}, largest {max(outside.values()):.1%}")
    for end, name in ((0, "slower end"), (1, "faster end")):
        print(f"{name}: median error {statistics.median(ends[end]):.1%}, largest {max(ends[end]):.1%}")
    assert statistics.median(outside.values()) <= 0.01
    assert max(others) <= 0.10
    assert all(outside[key] <= 0.20 for key in outlier)
    assert all(statistics.median(errors) <= 0.03 for errors in ends.values())
