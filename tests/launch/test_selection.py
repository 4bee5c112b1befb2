"""Which launcher a run gets."""

from __future__ import annotations

from ds_bench.launch.gpu_monitor import GpuMonitoringLauncher
from ds_bench.launch.monitor import Limits
from ds_bench.launch.selection import choose_launcher
from tests.support import fakes


def test_every_visible_gpu_is_watched_though_the_first_plan_of_a_sweep_uses_one() -> None:
    on = fakes.placement(accelerator="cuda", num_gpus=1, launcher="deepspeed")
    launcher, _ = choose_launcher("deepspeed", on, {}, Limits(), [], (2, 5), print)
    assert isinstance(launcher, GpuMonitoringLauncher)
    assert launcher._indices == (2, 5)
