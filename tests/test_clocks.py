"""Clocks are looked at while a trial runs, once, and only what is a fault is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fakes
import pytest

from ds_bench.gpus import GpuInventory
from ds_bench.launch import Listener, Progress
from ds_bench.launch.clocks import ClockWatcher
from ds_bench.record import TrialRecord
from ds_bench.spec import Trial


class Steps:
    """A launcher that tells of every step."""

    def launch(self, trial: Trial, folder: Path, listen: Listener) -> TrialRecord:  # noqa: ARG002
        for step in range(-1, trial.workload.warmup_steps + trial.workload.num_steps):
            listen(Progress(phase="forward", step=step, last_step_seconds=0.1, elapsed_seconds=1.0))
        return fakes.success(trial)


class Cards:
    """Two cards, the second held back; counts how often it is asked."""

    def __init__(self, *reasons: str) -> None:
        self.asked = 0
        cool = fakes.FakeQuery(cards=2).inventory.gpus
        self.inventory = GpuInventory(
            driver_version="580.65", gpus=(cool[0], replace(cool[1], throttle_reasons=reasons))
        )

    def read(self) -> GpuInventory:
        self.asked += 1
        return self.inventory


def launch(cards: Cards, indices: tuple[int, ...] = (0, 1)) -> TrialRecord:
    trial = fakes.trial(on=fakes.placement(accelerator="cuda", num_gpus=2))
    return ClockWatcher(Steps(), cards, indices).launch(trial, Path("unused"), lambda _progress: None)


def test_a_card_that_is_held_back_is_told_and_asked_for_once() -> None:
    cards = Cards("sw_power_cap", "gpu_idle")
    assert launch(cards).caveats == ("GPU 1 was held back while this ran: sw_power_cap",)
    assert cards.asked == 1


@pytest.mark.parametrize("reasons", [(), ("gpu_idle",), ("applications_clocks_setting",)])
def test_a_clock_that_somebody_set_or_an_idle_card_is_no_fault(reasons: tuple[str, ...]) -> None:
    assert launch(Cards(*reasons)).caveats == ()


def test_a_card_that_the_job_does_not_use_is_left_out() -> None:
    assert launch(Cards("hw_slowdown"), indices=(0,)).caveats == ()
