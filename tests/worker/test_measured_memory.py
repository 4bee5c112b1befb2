"""Memory of a rank: peaks of each phase, and what the allocator of a GPU reports."""

from __future__ import annotations

import pytest
import torch

from ds_bench.worker import measured_memory


def test_gpu_fields_come_from_the_allocator_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 5})
    sizes = {"max_memory_allocated": 40, "max_memory_reserved": 50, "memory_allocated": 20, "memory_reserved": 45}
    for name, value in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert measured_memory.device_facts("cuda", retries_before=3, limit_bytes=60) == {
        "gpu_total_bytes": 60,
        "gpu_peak_bytes": 40,
        "gpu_peak_reserved_bytes": 50,
        "gpu_allocated_bytes": 20,
        "gpu_reserved_bytes": 45,
        "gpu_device_used_bytes": 70,
        "gpu_alloc_retries": 2,
    }


def measured_phases() -> measured_memory.PhaseMeter:
    """200 MB are taken in ``build`` and freed in ``initialize``; 100 MB come and go within ``first_step``."""
    meter = measured_memory.PhaseMeter("cpu")
    meter.end("import")
    block = torch.ones(200 * 2**20, dtype=torch.uint8)
    meter.end("build")
    del block
    meter.end("initialize")
    torch.ones(100 * 2**20, dtype=torch.uint8)
    meter.end("first_step")
    meter.end("steady")
    return meter


def test_the_high_water_mark_of_each_phase_sees_what_came_and_went_within_it() -> None:
    meter = measured_phases()
    assert meter.can_reset
    peak, end, pss = (
        {phase: (sizes[name] or 0) // 2**20 for phase, sizes in meter.phases.items()}
        for name in ("host_peak_bytes", "host_end_bytes", "host_end_pss_bytes")
    )
    assert end["build"] - end["import"] > 150
    assert peak["initialize"] - end["initialize"] > 150
    assert peak["first_step"] - end["first_step"] > 75
    assert peak["steady"] - end["steady"] < 50
    assert (meter.highest("host_peak_bytes", *meter.phases) or 0) // 2**20 == max(peak.values())
    assert all(0 < pss[phase] <= end[phase] + 1 for phase in end)


def test_without_a_reset_only_a_peak_above_all_before_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_memory.reset_host_peak()
    monkeypatch.setattr(measured_memory, "reset_host_peak", lambda: False)
    meter = measured_phases()
    known = [phase for phase, sizes in meter.phases.items() if sizes["host_peak_bytes"] is not None]
    assert (meter.can_reset, known) == (False, ["import", "build"])
