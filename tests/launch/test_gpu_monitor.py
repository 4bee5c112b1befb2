"""Clocks are looked at while a trial runs, once, and only what is a fault is told; memory before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from ds_bench.config.caveats import Caveat, CaveatKind
from ds_bench.config.spec import Trial
from ds_bench.launch import Progress, ProgressCallback
from ds_bench.launch.gpu_monitor import GpuMonitoringLauncher
from ds_bench.launch.hosts import HostLostError, Hosts
from ds_bench.launch.monitor import Limits
from ds_bench.launch.warm import choose_launcher
from ds_bench.records.schema import TrialRecord
from ds_bench.system import signals
from ds_bench.system.gpus import GpuFacts, GpuInventory
from tests.support import fakes


class Steps:
    """A launcher that tells of every step."""

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:  # noqa: ARG002
        for step in range(-1, trial.workload.warmup_steps + trial.workload.num_steps):
            listen(Progress(phase="forward", step=step, last_step_seconds=0.1, elapsed_seconds=1.0))
        return fakes.success(trial)


class Cards:
    """Two cards, the second held back; counts how often it is asked."""

    def __init__(self, *reasons: str, **facts: float) -> None:
        self.asked = 0
        cool = fakes.inventory(cards=2).gpus
        self.inventory = GpuInventory(
            driver_version="580.65", gpus=(cool[0], replace(cool[1], throttle_reasons=reasons, **facts))
        )

    def read(self) -> GpuInventory:
        self.asked += 1
        return self.inventory


def launch(cards: Cards, indices: tuple[int, ...] = (0, 1)) -> TrialRecord:
    trial = fakes.trial(on=fakes.placement(accelerator="cuda", num_gpus=2))
    return GpuMonitoringLauncher(Steps(), cards.read, indices).launch(trial, Path("unused"), lambda _progress: None)


def test_a_card_that_is_held_back_is_told_and_asked_for_once() -> None:
    cards = Cards("hw_slowdown", "gpu_idle")
    assert launch(cards).caveats == (Caveat(CaveatKind.CLOCKS_THROTTLED, {"gpu": 1, "reasons": "hw_slowdown"}),)
    assert cards.asked == 2  # before it, and in the middle


@pytest.mark.parametrize(("limit", "told"), [(700.0, False), (500.0, True)])
def test_the_power_cap_of_a_loaded_card_is_told_only_below_the_default_limit(limit: float, told: bool) -> None:
    cards = Cards("sw_power_cap", power_limit_watts=limit, default_power_limit_watts=700.0)
    assert bool(launch(cards).caveats) is told


class Memory:
    """A card whose used memory is answered from a list, the last entry for ever."""

    def __init__(self, *used_gb: float) -> None:
        self.used_gb = list(used_gb)

    def read(self) -> GpuInventory:
        used = self.used_gb.pop(0) if len(self.used_gb) > 1 else self.used_gb[0]
        card = fakes.inventory(cards=1).gpus[0]
        return GpuInventory(gpus=(replace(card, memory_used_bytes=int(used * fakes.GB)),))


def free_at_start(memory: Memory, trials: int, wait_seconds: float) -> list[TrialRecord]:
    watcher = GpuMonitoringLauncher(Quiet(), memory.read, (0,), wait_seconds=wait_seconds)
    trial = fakes.trial(on=fakes.placement(accelerator="cuda"))
    return [watcher.launch(trial, Path("unused"), lambda _progress: None) for _ in range(trials)]


class Quiet:
    """A launcher that tells of nothing."""

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:  # noqa: ARG002
        return fakes.success(trial)


def test_the_next_trial_waits_until_the_card_is_given_back_and_its_free_memory_is_kept() -> None:
    first, second = free_at_start(Memory(1, 60, 30, 1), trials=2, wait_seconds=10)
    assert (first.gpu_free_start_bytes, second.gpu_free_start_bytes) == (79 * fakes.GB, 79 * fakes.GB)
    assert second.caveats == ()


def test_memory_that_somebody_else_keeps_is_waited_for_once_and_told() -> None:
    records = free_at_start(Memory(1, 21), trials=3, wait_seconds=0.3)
    assert [record.gpu_free_start_bytes for record in records] == [size * fakes.GB for size in (79, 59, 59)]
    assert [len(record.caveats) for record in records] == [0, 1, 0]
    assert "20.00 GB less of the card was free" in records[1].caveats[0]


def test_the_row_after_an_offload_row_waits_until_host_memory_is_given_back() -> None:
    left = [100, 100, 40, 70, 99, 50]
    asked = iter(left)
    watcher = GpuMonitoringLauncher(
        Quiet(), Memory(1).read, (0,), wait_seconds=10, read_host_bytes=lambda: next(asked) * fakes.GB
    )
    plain = fakes.trial(on=fakes.placement(accelerator="cuda"))
    offload = fakes.trial(fakes.offload("cpu_full"), on=fakes.placement(accelerator="cuda"))
    for trial in (plain, offload, plain):
        watcher.launch(trial, Path("unused"), lambda _progress: None)
    assert next(asked) == 50, "the third row began before the memory was there, or waited for more"


def test_ctrl_c_ends_the_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "interrupt_requested", lambda: True)
    first, second = free_at_start(Memory(1, 60), trials=2, wait_seconds=60)
    assert (first.gpu_free_start_bytes, second.gpu_free_start_bytes) == (79 * fakes.GB, 20 * fakes.GB)
    assert second.caveats == ()


def test_a_clock_that_somebody_set_or_an_idle_card_is_no_fault(subtests: pytest.Subtests) -> None:
    for reasons in ((), ("gpu_idle",), ("applications_clocks_setting",)):
        with subtests.test(reasons=reasons):
            assert launch(Cards(*reasons)).caveats == ()


def test_a_card_that_the_job_does_not_use_is_left_out() -> None:
    assert launch(Cards("hw_slowdown"), indices=(0,)).caveats == ()


def test_the_cards_of_every_host_are_read_by_its_agent_and_named_with_it(tmp_path: Path) -> None:
    cards = tuple(
        replace(card, memory_used_bytes=fakes.GB * (1 + card.index), throttle_reasons=("hw_slowdown",) * card.index)
        for card in fakes.inventory(cards=2).gpus
    )

    class TwoHosts:
        lost = False

        def request_all(self, what: str, **_: object) -> dict[str, tuple[GpuFacts, ...]]:
            if self.lost:
                raise HostLostError("b", "the connection ended")
            assert what == "gpus"
            return {"a": cards[:1], "b": cards}

    hosts = TwoHosts()
    place = fakes.placement(accelerator="cuda", num_gpus=2, hosts=(("a", 1), ("b", 1)), include="a:0@b:1")
    watcher = GpuMonitoringLauncher(Steps(), pytest.fail, (), hosts=cast(Hosts, hosts))
    record = watcher.launch(fakes.trial(on=place), tmp_path, lambda _progress: None)
    assert record.caveats == (Caveat(CaveatKind.CLOCKS_THROTTLED, {"gpu": "1 of b", "reasons": "hw_slowdown"}),)
    assert record.gpu_free_start_bytes == 78 * fakes.GB
    hosts.lost = True  # the launcher below makes the row of it
    assert watcher.launch(fakes.trial(on=place), tmp_path, lambda _progress: None).gpu_free_start_bytes is None


def test_every_visible_gpu_is_watched_though_the_first_plan_of_a_sweep_uses_one() -> None:
    on = fakes.placement(accelerator="cuda", num_gpus=1, launcher="deepspeed")
    launcher, _ = choose_launcher("deepspeed", on, {}, Limits(), [], (2, 5), print)
    assert isinstance(launcher, GpuMonitoringLauncher)
    assert launcher._indices == (2, 5)
