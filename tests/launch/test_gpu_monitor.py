"""The GPUs' clocks are read while a trial's steps are measured, their memory before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from ds_bench.analysis.row import make_run
from ds_bench.config.caveat_texts import Caveat, CaveatKind
from ds_bench.config.spec import Trial
from ds_bench.launch import Progress, ProgressCallback, gpu_monitor
from ds_bench.launch.gpu_monitor import GpuMonitoringLauncher
from ds_bench.launch.host_connections import HostLostError, Hosts
from ds_bench.launch.trial_watcher import Limits
from ds_bench.launch.warm_launcher import choose_launcher
from ds_bench.records.schema import GpuWindow, TrialRecord
from ds_bench.system import processes
from ds_bench.system.gpu_state import GpuFacts, GpuInventory
from tests.support import fakes

GB = fakes.GB


class Steps:
    """A launcher that reports every step, and two after the window."""

    step: int | None = None

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:  # noqa: ARG002
        for self.step in range(-1, trial.workload.warmup_steps + trial.workload.num_steps + 2):
            listen(Progress(phase="forward", step=self.step, last_step_seconds=0.1, elapsed_seconds=1.0))
        return fakes.success(trial)


def caveats(*reasons: str, indices: tuple[int, ...] = (0, 1), **facts: float) -> tuple[object, ...]:
    """Caveats of a trial on two cards if the second is throttled for these reasons."""
    steps, read_at = Steps(), list[int | None]()

    def read() -> GpuInventory:
        read_at.append(steps.step)
        first, second = fakes.inventory(cards=2).gpus
        return GpuInventory(gpus=(first, replace(second, throttle_reasons=reasons, **facts)))

    trial = fakes.trial(on=fakes.placement(accelerator="cuda", num_gpus=2))
    record = GpuMonitoringLauncher(steps, read, indices).launch(trial, Path("unused"), lambda _progress: None)
    first = trial.workload.warmup_steps
    assert read_at == [None, first, first + trial.workload.num_steps // 2], "its steps take less than a second"
    return record.caveats


def test_clock_power_and_temperature_are_those_of_the_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    trial = fakes.trial(on=fakes.placement(accelerator="cuda", num_gpus=2))
    seconds = [0.5 * step for step in range(14)]
    monkeypatch.setattr(gpu_monitor.time, "monotonic", lambda: seconds[steps.step or 0])

    def read() -> GpuInventory:
        """Hot and slow outside the window of 2 to 11 steps; in it the first card draws 300 W."""
        step = steps.step or 0
        inside = trial.workload.warmup_steps <= step < len(seconds) - 2
        facts = {"temperature_celsius": 50 + step if inside else 99, "sm_clock_mhz": 1900 + step if inside else 100}
        first, second = (replace(gpu, **facts) for gpu in fakes.inventory(cards=2).gpus)
        return GpuInventory(gpus=(replace(first, energy_joules=300 * seconds[step]), second))

    record = GpuMonitoringLauncher(steps, read, (0, 1)).launch(trial, Path("unused"), lambda _progress: None)
    first, second = record.gpu_windows
    # Of steps of half a second those numbered 2, 4, 6, 7 (the middle), 9 and 11.
    assert first == GpuWindow(
        index=0, samples=6, mean_sm_clock_mhz=1906.5, max_temperature_celsius=61, mean_power_watts=300.0
    )
    assert second == replace(first, index=1, mean_power_watts=None)
    measured = make_run(replace(record, gpu_windows=(first, replace(first, index=1, mean_power_watts=100.0)))).row
    assert measured.gpu_power_watts == 400.0
    assert measured.throughput_tokens_per_sec is not None
    assert measured.gpu_joules_per_token == pytest.approx(400 / measured.throughput_tokens_per_sec)
    assert make_run(record).row.gpu_power_watts is None, "of one card it is not known"
    slow = replace(second, index=1, host="b", mean_sm_clock_mhz=1410.0)
    (caveat,) = make_run(replace(record, gpu_windows=(first, slow))).row.caveat_list
    assert (caveat.kind, caveat.values["gpu"]) == (CaveatKind.SLOW_GPU, "1 of b")


def test_a_throttled_card_that_the_job_uses_is_a_caveat() -> None:
    told = (Caveat(CaveatKind.CLOCKS_THROTTLED, {"gpu": 1, "reasons": "hw_slowdown"}),)
    assert caveats("hw_slowdown", "gpu_idle") == told
    assert caveats("hw_slowdown", indices=(0,)) == ()
    for limit, count in ((700.0, 0), (500.0, 1)):  # at the default limit a loaded card runs so
        assert len(caveats("sw_power_cap", power_limit_watts=limit, default_power_limit_watts=700.0)) == count
    assert caveats("gpu_idle") == caveats("applications_clocks_setting") == caveats() == ()


@pytest.mark.parametrize(
    ("used_gb", "wait_seconds", "free_gb", "caveats_each", "interrupted"),
    [
        ([1, 60, 30, 1], 10, [79, 79], [0, 0], False),
        # Another program keeps the memory: it is waited for once.
        ([1, 21], 0.3, [79, 59, 59], [0, 1, 0], False),
        ([1, 60], 60, [79, 20], [0, 0], True),
    ],
    ids=["given back", "kept", "Ctrl-C"],
)
def test_next_trial_waits_until_the_card_is_given_back(
    used_gb: list[float], wait_seconds: float, free_gb: list[int], caveats_each: list[int], interrupted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(processes, "interrupt_requested", lambda: interrupted)
    left = list(used_gb)  # the last entry without end

    def read() -> GpuInventory:
        used = left.pop(0) if len(left) > 1 else left[0]
        return GpuInventory(gpus=(replace(fakes.inventory(cards=1).gpus[0], memory_used_bytes=int(used * GB)),))

    launcher = GpuMonitoringLauncher(fakes.FakeLauncher("Success"), read, (0,), wait_seconds=wait_seconds)
    trial = fakes.trial(on=fakes.placement(accelerator="cuda"))
    records = [launcher.launch(trial, Path("unused"), lambda _progress: None) for _ in free_gb]
    assert [record.gpu_free_start_bytes for record in records] == [size * GB for size in free_gb]
    assert [len(record.caveats) for record in records] == caveats_each


def test_the_row_after_an_offload_row_waits_until_host_memory_is_given_back() -> None:
    asked = iter([100, 100, 40, 70, 99, 50, 7])
    launcher = GpuMonitoringLauncher(
        fakes.FakeLauncher("Success"), GpuInventory, (0,), wait_seconds=10, read_host_bytes=lambda: next(asked) * GB
    )
    on = fakes.placement(accelerator="cuda")
    plain, offload = fakes.trial(on=on), fakes.trial(fakes.offload("cpu_full"), on=on)
    for trial in (plain, offload, plain, plain):
        launcher.launch(trial, Path("unused"), lambda _progress: None)
    assert next(asked) == 7, "the third row began too early or waited for more, or the fourth waited"


def test_the_agents_of_several_hosts_read_the_cards_which_are_named_with_their_host(tmp_path: Path) -> None:
    cards = tuple(
        replace(card, memory_used_bytes=GB * (1 + card.index), throttle_reasons=("hw_slowdown",) * card.index)
        for card in fakes.inventory(cards=2).gpus
    )

    class TwoHosts:
        lost = False

        def request_all(self, what: str, **_: Any) -> dict[str, tuple[GpuFacts, ...]]:
            if self.lost:
                raise HostLostError("b", "the connection ended")
            assert what == "gpus"
            return {"a": cards[:1], "b": cards}

    hosts = TwoHosts()
    place = fakes.placement(accelerator="cuda", num_gpus=2, hosts=(("a", 1), ("b", 1)), include="a:0@b:1")
    launcher = GpuMonitoringLauncher(Steps(), pytest.fail, (), hosts=cast(Hosts, hosts))
    record = launcher.launch(fakes.trial(on=place), tmp_path, lambda _progress: None)
    assert record.caveats == (Caveat(CaveatKind.CLOCKS_THROTTLED, {"gpu": "1 of b", "reasons": "hw_slowdown"}),)
    assert record.gpu_free_start_bytes == 78 * GB
    hosts.lost = True  # the launcher below makes the row of it
    assert launcher.launch(fakes.trial(on=place), tmp_path, lambda _progress: None).gpu_free_start_bytes is None


def test_every_visible_gpu_is_watched_though_the_first_plan_of_a_sweep_uses_one() -> None:
    on = fakes.placement(accelerator="cuda", num_gpus=1, launcher="deepspeed")
    launcher, _ = choose_launcher("deepspeed", on, {}, Limits(), [], (2, 5), print)
    assert isinstance(launcher, GpuMonitoringLauncher)
    assert launcher._indices == (2, 5)
