"""Memory of a rank: storages counted once by category, peaks of each phase, and what the allocator of a GPU reports."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from ds_bench.records.schema import largest_by_category
from ds_bench.worker import ledger, measured_memory


def test_a_storage_is_counted_once_however_many_tensors_show_it() -> None:
    count = ledger.StorageCounter()
    base = torch.zeros(1000)
    count.claim("parameters", [base, base[10:20], base.view(10, 100)])
    count.claim("other", [base[5:]])
    assert count.ledger == {"cpu": {"parameters": 4000}}


def test_activations_are_what_autograd_saves_without_the_parameters() -> None:
    layer = torch.nn.Linear(10, 10, bias=False)
    data = torch.randn(7, 10)
    result, tiers = ledger.count_activations(lambda: (layer(data).exp() * 2).sum(), layer.parameters())
    assert result.requires_grad
    assert tiers == {"cpu": data.nbytes + 7 * 10 * 4}  # the input of the product and the result of exp
    gathered = layer.weight.detach().requires_grad_()  # as at stage 3, where passes see other tensors
    _, tiers = ledger.count_activations(lambda: data.requires_grad_() @ gathered, layer.parameters())
    assert tiers == {"cpu": data.nbytes}

    def gathers() -> torch.Tensor:
        layer.weight.data = torch.ones(10, 10)
        return layer.weight.t() @ data.t()

    assert ledger.count_activations(gathers, layer.parameters())[1] == {"cpu": data.nbytes}


def test_the_peak_of_two_ledgers_is_taken_cell_by_cell() -> None:
    first, second = {"cpu": {"a": 1, "b": 5}}, {"cpu": {"a": 3}, "gpu": {"c": 2}}
    assert largest_by_category(first, second) == {"cpu": {"a": 3, "b": 5}, "gpu": {"c": 2}}


def engine_of(module: torch.nn.Module, stage: int, optimizer: object) -> SimpleNamespace:
    return SimpleNamespace(
        module=module,
        optimizer=optimizer,
        zero_optimization_stage=lambda: stage,
        gradient_accumulation_steps=lambda: 1,
    )


def test_master_weights_left_in_a_swap_buffer_count_as_buffers() -> None:
    buffer, module = torch.zeros(1000), torch.nn.Linear(2, 2, bias=False)
    wrapper = SimpleNamespace(optimizer_swapper=SimpleNamespace(swap_buffer_manager=[buffer]))
    wrapper.fp32_partitioned_groups_flat = [buffer[:4]]
    count = ledger.count_storages(engine_of(module, 3, wrapper), others=False)
    assert count.ledger == {"cpu": {"parameters": 16, "deepspeed_buffers": 4000}}


def test_stage_1_with_overlap_keeps_gradients_of_others_that_no_bucket_holds() -> None:
    """Of an own one that waits, the copy is counted."""
    module = torch.nn.Sequential(*(torch.nn.Linear(10, width, bias=False) for width in (1, 2, 3)))
    small, own, others = module.parameters()
    own.grad = torch.zeros_like(own)
    wrapper = SimpleNamespace(
        overlap_comm=True,
        contiguous_gradients=True,
        use_grad_accum_attribute=False,
        reduce_bucket_size=10,
        get_param_id=id,
        is_param_in_current_partition={id(small): False, id(own): True, id(others): False},
        extra_large_param_to_reduce={torch.bfloat16: own},
        all_grad_tensors=[torch.zeros(20)],
    )
    engine = engine_of(module, 1, wrapper)
    assert [ledger.stays_after_reduction(engine, each) for each in (small, own, others)] == [False, False, True]
    count = ledger.count_storages(engine, others=False)
    assert count.ledger == {"cpu": {"parameters": 240, "other": 80, "gradients": 80}}
    wrapper.contiguous_gradients = False
    assert ledger.stays_after_reduction(engine, small)


def test_a_tensor_that_a_thread_is_about_to_drop_is_not_counted() -> None:
    """gloo's threads drop a collective's tensors only once they get the interpreter's lock."""
    held, may_drop = threading.Event(), threading.Event()

    def hold() -> None:
        tensor = torch.zeros(25_000_000)
        held.set()
        may_drop.wait()
        del tensor

    module = torch.nn.Linear(2, 2)
    engine = SimpleNamespace(module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # no other thread runs unless this one waits
    try:
        may_drop.set()
        count = ledger.count_storages(engine)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert count.ledger["cpu"]["parameters"] == 24
    assert count.ledger["cpu"].get("other", 0) < 100_000_000


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


def test_gpu_peak_of_a_phase_begins_at_what_the_phase_before_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = peak = 0

    def reset() -> None:
        nonlocal peak
        peak = now

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    meter = measured_memory.PhaseMeter("cuda")
    for phase, most, left in (("build", 50, 20), ("initialize", 15, 10), ("steady", 10, 10)):
        peak, now = max(peak, most), left
        meter.end(phase)
    peaks = {phase: each["gpu_peak_bytes"] for phase, each in meter.phases.items()}
    assert peaks == {"build": 50, "initialize": 20, "steady": 10}


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
