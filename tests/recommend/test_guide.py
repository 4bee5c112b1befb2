"""Advice for a user's own model and number of GPUs, with numbers by hand, and rules of thumb."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from ds_bench.config.spec import Configuration
from ds_bench.recommend.guide import Observed, advice_lines, rule_of_thumb
from tests.support import fakes
from tests.support.recommendations import answer, out_of_memory, row

ZERO, OFFLOAD = fakes.zero, fakes.offload


EVERY_STRATEGY = [
    *map(ZERO, range(4)),
    *map(OFFLOAD, ("cpu_optimizer", "cpu_full", "nvme")),
    OFFLOAD("cpu_optimizer", stage=2),
    *map(fakes.reference, ("ddp", "fsdp2")),
    # No strategy keeps only the parameters on the disk; a configuration file may.
    Configuration(
        name="mine",
        label="mine",
        deepspeed_config={"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
    ),
]


@pytest.mark.parametrize(("num_gpus", "grad_accum"), [(4, 1), (4, 3), (1, 1)])
def test_savings_and_costs_by_hand(num_gpus: int, grad_accum: int, snapshot: SnapshotAssertion) -> None:
    """For 2^30 elements. 12 bytes each are 12 GB of optimizer states; a quarter stays on each of 4 GPUs: 9 GB saved.

    At stage 0 each GPU sends 2 × 2 GB × 3/4 = 3 GB, above three times, 4.5 GB; with 3 micro-batches stage 2 sends 6 + 1
    model sizes, 10.5 GB, and stage 3 nine, 13.5 GB. A rank's share is 0.5 GB: down and up 1 GB, with parameters on the
    host 1.5 GB. FSDP2 gathers 2 GB of bf16 weights twice per micro-batch and reduces once; DDP reduces 4 GB of fp32.
    """
    options: Any = {"parameters": 2**30, "num_gpus": num_gpus, "grad_accum": grad_accum, "precision": "bf16"}
    lines = [line for strategy in EVERY_STRATEGY for line in advice_lines(strategy, **options)]
    assert "\n".join(line for line in lines if "when: " not in line) == snapshot


# ------------------------------------------------------------------ rules of thumb


def rule(fraction: float | None = None, fastest: int | None = 0, *avoided: int, **more: Any) -> str | None:
    more["failed_offloads"] = frozenset(more.get("failed_offloads", ()))
    seen = Observed(fraction=fraction, fastest=fastest, row=f"ZeRO-{fastest}", avoided=frozenset(avoided), **more)
    return rule_of_thumb(seen)


EVERY = ["cpu_optimizer", "cpu_full", "nvme"]
ONE_GPU = " (on one GPU stages 1 to 3 partition nothing)"


def test_rules_of_thumb(subtests: pytest.Subtests) -> None:
    for found, expected in (
        (rule(0.1), "ZeRO-0 fits comfortably (10.0 % of the card): stage 0 or 1 is enough"),
        (rule(0.599), "ZeRO-0 fits comfortably (59.9 % of the card): stage 0 or 1 is enough"),
        (rule(0.599, 0, 1), "ZeRO-0 fits comfortably (59.9 % of the card): stage 0 is enough"),
        (rule(0.5, 2, 0, 1), "ZeRO-2 fits comfortably (50.0 % of the card): stage 2 is enough"),
        (rule(0.5, 2, one_gpu=True), f"ZeRO-2 fits comfortably (50.0 % of the card): stage 0 is enough{ONE_GPU}"),
        (rule(0.6), None),
        (rule(0.799), None),
        (rule(None, 0), None),
        (rule(fastest=None), None),
        (rule(0.8), "ZeRO-0 barely fits (80.0 % of the card): stage 2"),
        (rule(0.96, 0, 2), "ZeRO-0 barely fits (96.0 % of the card): stage 3"),
        (rule(0.9, 2), "ZeRO-2 barely fits (90.0 % of the card): stage 3"),
        (rule(0.9, 2, 3), "ZeRO-2 barely fits (90.0 % of the card): offload, cpu_optimizer first"),
        (rule(0.9, 3, failed_offloads=EVERY), None),
        (rule(None, None, 2), "stage 2 ran out of memory: stage 3"),
        (rule(None, None, 3), "stage 3 ran out of memory: offload, cpu_optimizer first"),
        (rule(0.9, None, goal="speed"), "speed is critical: the lowest stage that fits"),
        (rule(0.9, 2, 0, goal="speed"), "speed is critical: stage 2, the lowest that is tied with the fastest"),
        (rule(0.1, goal="memory"), "memory is critical: stage 3 with cpu_optimizer, then cpu_full, then nvme"),
        (rule(0.1, goal="memory", failed_offloads=EVERY[:2]), "memory is critical: stage 3 with nvme"),
        (rule(0.1, goal="memory", failed_offloads=EVERY), None),
        (
            rule(0.9, one_gpu=True, failed_offloads=EVERY[:1]),
            "ZeRO-0 barely fits (90.0 % of the card): "
            f"a smaller micro-batch, --activation-checkpointing or cpu_full{ONE_GPU}",
        ),
    ):
        with subtests.test(found=found, expected=expected):
            assert found == expected


@given(st.none() | st.integers(0, 3), st.frozensets(st.integers(0, 3)), st.floats(0, 1), st.sampled_from([1, 4]))
def test_stage_that_ran_out_of_memory_is_never_suggested(
    fastest: int | None, short: frozenset[int], fraction: float, cards: int
) -> None:
    short -= {fastest}
    used = None if fastest is None else fraction
    for goal in ("speed", "balanced"):
        _, _, advice = (rule(used, fastest, *short, one_gpu=cards == 1, goal=goal) or "").partition(": ")
        assert not set(map(int, re.findall(r"\b[0-3]\b", advice.removesuffix(ONE_GPU)))) & short


def test_rule_is_about_the_fastest_sound_row_without_offload(subtests: pytest.Subtests) -> None:
    for records, goal, start in (
        # Not the row that is not sound, nor the higher stage that leads by 1 %, which is no difference.
        ([(0, 70, 1000), (2, 30, 990), (1, 8, 9000, (None,) * 12)], "balanced", "ZeRO-0 barely fits (8"),
        ([(0, 30, 800), (2, 30, 1000), (3, 30, 1010)], "speed", "speed is critical: stage 2"),
        # Nor the fastest if it is too full to use.
        ([(1, 30, 900), (2, 30, 1200), (3, 78, 1500)], "speed", "speed is critical: stage 2"),
        ([(0, None), (1, None), (2, 44, 1000)], "balanced", "ZeRO-2 fits comfortably (55.0 %"),
        ([(1, None), (0, 78, 1000)], "balanced", "ZeRO-0 barely fits (97"),
        ([(2, 78, 900), (0, 70, 1000)], "balanced", "ZeRO-0 barely fits (87.5 % of the card): stage 3"),
        ([(2, None), (0, 70, 1000)], "balanced", "ZeRO-0 barely fits (87.5 % of the card): stage 3"),
    ):
        with subtests.test(goal):
            made = [row(OFFLOAD("cpu_full"), 10, 5000, cards=2)]
            for stage, gigabytes, *rest in records:
                if gigabytes is None:
                    made.append(out_of_memory(ZERO(stage), 2))
                else:
                    losses = {"losses": rest[1]} if len(rest) > 1 else {}
                    made.append(row(ZERO(stage), gigabytes, rest[0], cards=2, **losses))
            (step,) = [step for step in answer(*made, goal=goal).next_steps if step.kind == "rule"]
            assert str(step).startswith(start)
