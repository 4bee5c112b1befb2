"""The row of a trial: every column by hand once, null where nothing was measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from ds_bench.analysis.comparison import rows_of
from ds_bench.analysis.loss_parity import with_loss_caveats
from ds_bench.analysis.row import (
    COLUMNS,
    NodePhaseMemory,
    Row,
    Run,
    is_restored,
    make_run,
    node_phase_memory,
)
from ds_bench.config.caveat_texts import CaveatKind
from ds_bench.models.presets import find_preset
from ds_bench.records import schema
from ds_bench.records.schema import CheckpointAction, PhaseMemory, RankMeasurement, TrialRecord
from tests.support import fakes
from tests.support.fakes import preset
from tests.support.runs import CUDA, record_of, run_of, seen

PAIR = fakes.placement(accelerator="cuda", num_gpus=2)
GB, MB = 2**30, 2**20


CATEGORIES = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations", "other")


def distinct_run() -> Run:
    """A run of two ranks that gives every column a value of its own; rank 1 is the slower and the fuller one."""
    names = ("gpu_init_peak_bytes", "gpu_peak_bytes", "gpu_peak_reserved_bytes", "gpu_allocated_bytes",
             "gpu_reserved_bytes", "gpu_device_used_bytes")  # fmt: skip
    trial = fakes.trial(
        fakes.offload("nvme"),
        on=fakes.placement(accelerator="cuda", num_gpus=2, nvme_path="/d"),
        of=fakes.workload(batch_size=3, grad_accum=5, num_steps=7, warmup_steps=4, seq_length=96),
        repeat=11,
        round_position=13,
    )
    found = fakes.success(trial, data_parallel_size=2)

    def of_rank(number: int) -> dict[str, Any]:
        sizes = {name: (20 + 2 * place + number) * GB for place, name in enumerate(names)}
        offload = schema.OffloadTimes(
            cpu_adam_seconds=0.5, cpu_adam_bytes=(130 + number) * GB, disk_read_bytes=8 * GB, disk_written_bytes=4 * GB,
            disk_wait_seconds=0.25, disk_busy_seconds=3.0 + number,
        )  # fmt: skip
        memory = {
            phase: schema.PhaseMemory(
                host_peak_bytes=(300 + 10 * place) * GB,
                host_end_bytes=(200 + 10 * place + number) * GB,
                host_end_pss_bytes=(200 + 10 * place + number) * GB,
            )
            for place, phase in enumerate(schema.MEMORY_PHASES)
        }
        checkpoint = {
            action: schema.CheckpointAction(
                seconds=500.0 + 10 * place + number,
                written_bytes=(600 + 10 * place) * GB,
                memory=schema.PhaseMemory(host_peak_bytes=(700 + place) * GB, host_end_bytes=GB, host_end_pss_bytes=GB),
            )
            for place, action in enumerate(schema.CHECKPOINT_ACTIONS)
        }
        ledger = {
            tier: {name: (1000 + 100 * row + 10 * place + number) * GB for place, name in enumerate(CATEGORIES)}
            for row, tier in enumerate(("gpu", "cpu", "nvme"))
        }
        parts = {name: 0.1 * (place + 1) + 0.01 * number for place, name in enumerate(("forward", "backward", "step"))}
        return {
            **sizes, "gpu_total_bytes": 90 * GB, "gpu_alloc_retries": 17 + number, "host_peak_bytes": 41 * GB + number,
            "host_pss_bytes": 37 * GB, "nvme_stored_bytes": 43 * GB, "nvme_read_bytes": 47 * 7 * GB,
            "nvme_written_bytes": 53 * 7 * GB, "phase_seconds": parts, "ledger": ledger, "phase_memory": memory,
            "step_parts": {**parts, "communication": 0.51 + number, "transfer": 0.61 + number, "data_wait": 0.71},
            "communication": (schema.CommunicationOperation(
                name="all_reduce", count=1, bytes=(59 + number) * GB, seconds=0.5, wait_seconds=0.13 + number),),
            "data_wait_seconds": 0.81 + number, "checkpoint": checkpoint, "checkpoint_restored": True,
            "offload": offload, "skipped_steps": 3, "window_seconds": 7.7 + number,
            "step_seconds": tuple(1.1 + 0.01 * step + number for step in range(7)), "cpu_threads": 19, "dropout": 0.3,
            "cpu_other_cores": 0.07 + number, "repeated_loss": 6.5, "weight_change": (3.0, 4.0), "micro_batch_size": 3,
            "grad_accum": 5, "parameter_count": 1234, "trainable_parameter_count": None,
            "losses": tuple(9.0 - 0.5 * step for step in range(11)),
            "grad_norms": (2.25 + number, *(2.0,) * 10), "grad_norm": 1.75 + number,
        }  # fmt: skip

    ranks = tuple(replace(rank, **of_rank(number)) for number, rank in enumerate(found.ranks))
    environment = fakes.environment(
        physical_cores=8, cpu_quota_cores=4.5, torch_cuda_version="13.0", gpu_driver_version="580.95"
    )
    windows = tuple(
        schema.GpuWindow(index=index, samples=9, mean_sm_clock_mhz=clock, max_temperature_celsius=celsius,
                         mean_power_watts=watts)
        for index, (clock, celsius, watts) in enumerate(((1990.5, 71, 612.5), (1985.25, 67, 620.0)))
    )  # fmt: skip
    record = replace(found, ranks=ranks, gpu_windows=windows)
    return make_run(record, find_preset("tiny"), 1e15, environment, "run-7")


def test_every_column_has_its_own_value_and_that_of_the_right_rank(snapshot: SnapshotAssertion) -> None:
    run = distinct_run()
    (row,) = rows_of([run])
    assert {name: row[name] for name in row if name not in ("caveats", "config_hash", "caveat_list")} == snapshot
    # Written and read back, it is the same row.
    assert Row.model_validate_json(json.dumps(row)) == with_loss_caveats([run])[0].row


# ------------------------------------------------------------------ time


def test_throughput_and_spread_by_hand() -> None:
    """2 sequences × 100 tokens × 3 micro-batches × 4 ranks = 2400 tokens in a step of 0.5 s: 4800 tokens/s."""
    of = fakes.workload(batch_size=2, seq_length=100, grad_accum=3, num_steps=2)
    trial = fakes.trial(of=of, on=replace(CUDA, num_gpus=4))
    row = make_run(fakes.success(trial, step_seconds=[0.4, 0.6])).row
    assert row.avg_step_time_ms == pytest.approx(500)
    assert row.std_step_time_ms == pytest.approx(200 / math.sqrt(2))
    assert row.throughput_samples_per_sec == pytest.approx(48)
    assert row.throughput_tokens_per_sec == pytest.approx(4800)
    assert row.throughput_tokens_per_sec_per_gpu == pytest.approx(1200)
    assert run_of(seen(step_seconds=[0.1])).row.std_step_time_ms is None


def test_warm_up_steps_are_in_no_statistic() -> None:
    slow = seen(warmup_step_seconds=(9.0, 99.0))
    assert run_of(slow).row == run_of(seen()).row


def test_the_slowest_rank_decides_and_only_ranks_with_data_of_their_own_multiply_the_batch() -> None:
    """The window counts: device events may add up to less than it."""
    for slow, parallel in ((0, 3), (1, 1), (2, 3)):
        windows = [3.0 if rank == slow else 1.0 for rank in range(3)]
        row = run_of(*[seen(window_seconds=window, data_parallel_size=parallel) for window in windows]).row
        assert row.avg_step_time_ms == pytest.approx(300), slow
        assert row.throughput_tokens_per_sec == pytest.approx(4 * 128 * parallel / 0.3), slow
        assert row.throughput_tokens_per_sec_per_gpu == pytest.approx(4 * 128 * parallel / 0.3 / 3), slow


def on_two_nodes(**changes: Any) -> TrialRecord:
    place = fakes.placement(num_gpus=3, hosts=(("a", 2), ("b", 1)), hostfile="/hosts", launcher="deepspeed")
    found = fakes.success(fakes.trial(fakes.zero(1), on=place))
    return replace(
        found,
        ranks=tuple(
            replace(rank, hostname="ab"[number // 2], **{name: values[number] for name, values in changes.items()})
            for number, rank in enumerate(found.ranks)
        ),
    )


def test_the_fullest_of_several_nodes_counts_and_the_rank_that_others_waited_for_is_named() -> None:
    def waiting(seconds: float) -> tuple[schema.CommunicationOperation, ...]:
        return (schema.CommunicationOperation(name="all_reduce", count=1, bytes=8, seconds=9, wait_seconds=seconds),)

    windows = {"window_seconds": [1.0, 3.0, 2.0]}
    row = make_run(on_two_nodes(host_peak_bytes=[GB, GB, 3 * GB], **windows)).row
    assert (row.num_nodes, row.cpu_used_gb, row.slowest_rank_host) == (2, 3.0, "a")
    assert json.loads(row.cpu_used_gb_of_nodes or "") == {"a": 2.0, "b": 3.0}
    waits = [waiting(0.5), waiting(0.4), waiting(0.1)]  # the slowest rank waits least, where waits are known
    assert make_run(on_two_nodes(communication=waits, **windows)).row.slowest_rank_host == "b"
    one_node = make_run(fakes.success(fakes.trial(fakes.zero(1), on=PAIR))).row
    assert (one_node.num_nodes, one_node.slowest_rank_host, one_node.cpu_used_gb_of_nodes) == (1, None, None)
    assert make_run(fakes.failure(on_two_nodes().trial)).row.num_nodes == 2


def test_a_failed_trial_keeps_its_cause_and_its_request_and_has_no_number(subtests: pytest.Subtests) -> None:
    for status in (*schema.STATUSES[1:], "ValueError"):
        with subtests.test(status):
            of = fakes.workload(batch_size=7, grad_accum=2)
            failed = fakes.failure(fakes.trial(fakes.zero(1), on=PAIR, of=of), status)
            row = make_run(replace(failed, caveats=("known before",)), preset("gpt2"), 1e15).row.values()
            assert list(row) == [*COLUMNS, "caveat_list"]
            asked = {
                "stage",
                "batch_size",
                "seq_length",
                "grad_accum",
                "num_steps",
                "warmup_steps",
                "repeat",
                "num_gpus",
            }
            numbers = {name for name, value in row.items() if type(value) in (int, float)}
            assert numbers - asked == {"wall_seconds", "method_version", "num_nodes"}
            assert (row["success"], row["batch_size"], row["grad_accum"], row["caveats"]) == (
                False,
                7,
                2,
                "known before",
            )
            assert (row["error"], row["error_details"]) == (failed.outcome.error, failed.outcome.details)


# ------------------------------------------------------------------ FLOPs and MFU


def test_mfu_by_hand() -> None:
    """GPT-2: 6 × 123 532 032 matmul weights + 12 × 12 × 12 × 64 × 128 = 755 347 968 FLOPs a token.

    1000 tokens/s on one device are 0.7553 TFLOP/s; of a peak of 10 TFLOP/s, 7.55 %.
    """
    facts = preset("gpt2")
    entry = record_of(seen(step_seconds=[4 * 128 / 1000] * 10))
    row = make_run(entry, facts, 10e12).row
    assert (row.model_tflops_per_gpu, row.mfu) == (pytest.approx(0.755347968), pytest.approx(0.0755347968))
    eight = make_run(record_of(*[replace(entry.ranks[0], data_parallel_size=8)] * 8), facts, 10e12).row
    assert eight.mfu == pytest.approx(row.mfu)
    # It needs a peak and a model, and must not exceed 1.
    without_peak, without_model = make_run(entry, facts).row, make_run(entry, None, 1e15).row
    assert (without_peak.mfu, without_model.mfu, without_model.model_tflops_per_gpu) == (None, None, None)
    assert without_peak.model_tflops_per_gpu is not None
    impossible = make_run(entry, facts, 1e9)
    assert impossible.row.mfu is None
    assert [each.kind for each in impossible.caveats] == [CaveatKind.MFU_ABOVE_1]


def test_a_forward_pass_is_a_third_of_the_flops_and_recomputes_nothing() -> None:
    trials = (
        fakes.trial(of=fakes.workload(pass_type=each, activation_checkpointing=True)) for each in ("train", "forward")
    )
    both, forward = (make_run(fakes.success(trial), preset("gpt2"), 1e15).row for trial in trials)
    assert both.model_flops_per_token == 3 * (forward.model_flops_per_token or 0)
    assert both.hardware_flops_per_token == 4 * (forward.hardware_flops_per_token or 0)
    assert forward.hardware_flops_per_token == forward.model_flops_per_token
    assert both.mfu == pytest.approx(3 * (forward.mfu or 0)), "MFU does not count recomputation"
    assert both.flops_convention != forward.flops_convention


# ------------------------------------------------------------------ memory


def test_device_memory_is_the_worst_ranks_and_host_memory_the_fullest_nodes() -> None:
    row = run_of(*(seen(gpu_peak_bytes=size * GB, host_peak_bytes=GB) for size in (3, 9, 5))).row
    assert (row.gpu_peak_gb, row.cpu_used_gb) == (9, 3)
    a, b = seen(host_peak_bytes=2 * GB, hostname="a"), seen(host_peak_bytes=GB, hostname="b")
    assert run_of(a, b).row.cpu_used_gb == 2
    assert run_of(a, b, replace(b, host_peak_bytes=None)).row.cpu_used_gb is None, "a silent rank may hold the most"


def test_the_share_of_the_card_is_that_of_the_fullest(subtests: pytest.Subtests) -> None:
    for ranks, percent in (
        # 20 of 80 GB were reserved at the peak; context and NCCL have 2 more. Only both together can run out.
        ([{"gpu_peak_reserved_bytes": 20 * GB, "gpu_reserved_bytes": 9 * GB, "gpu_device_used_bytes": 11 * GB}], 27.5),
        ([{"gpu_peak_reserved_bytes": 40 * GB}, {"gpu_peak_reserved_bytes": 36 * GB, "gpu_total_bytes": 40 * GB}], 95),
        ([{"gpu_total_bytes": None}], None),
    ):
        with subtests.test(percent=percent, ranks=ranks):
            assert run_of(*(seen(**rank) for rank in ranks)).row.gpu_percent == pytest.approx(percent)


def test_the_share_of_an_emulated_card_is_relative_to_its_limit() -> None:
    emulated = fakes.trial(on=replace(CUDA, gpu_memory_limit_bytes=20 * GB))
    assert make_run(fakes.success(emulated, gpu_peak_reserved_bytes=19 * GB)).row.gpu_percent == pytest.approx(95)


def test_the_ledger_has_cells_of_the_tiers_that_a_trial_uses() -> None:
    swapping = fakes.trial(fakes.offload("nvme"), on=fakes.placement(nvme_path="/d"))
    renamed = replace(swapping, configuration=replace(swapping.configuration, name="mine", label="mine"))
    on_gpu = fakes.trial(fakes.zero(1), on=CUDA)
    records = (
        fakes.success(on_gpu, ledger={"gpu": {"parameters": GB}}),
        fakes.success(on_gpu, ledger={}),
        fakes.success(renamed, ledger={"nvme": {"parameters": GB}}),
    )
    cells = [
        (row.ledger_gpu_parameters_gb, row.ledger_gpu_gradients_gb, row.ledger_nvme_parameters_gb)
        for row in (make_run(record).row for record in records)
    ]
    assert cells == [(1.0, 0.0, None), (None, None, None), (None, None, 1.0)]
    on_cpu = make_run(fakes.success(ledger={"cpu": {"parameters": 5 * GB}})).row
    assert {value for name, value in on_cpu.values().items() if name.startswith(("gpu_", "ledger_gpu_"))} == {None}


def test_the_memory_of_cards_is_null_if_one_does_not_report_it() -> None:
    known, silent = fakes.environment().gpus
    for cards, size in (((known, silent), 80.0), ((known, replace(silent, memory_total_bytes=None)), None)):
        run = make_run(fakes.success(), environment=fakes.environment(gpus=cards))
        assert run.row.gpu_memory_gb == size


def phase(host: str, peak: int | None, end: int | None, pss: int | None, gpu: int | None = None) -> RankMeasurement:
    sizes = [None if size is None else size * MB for size in (peak, end, pss, gpu)]
    memory = PhaseMemory(
        host_peak_bytes=sizes[0], host_end_bytes=sizes[1], host_end_pss_bytes=sizes[2], gpu_peak_bytes=sizes[3]
    )
    return replace(fakes.measurement(), hostname=host, phase_memory={"build": memory})


def test_phases_count_shared_pages_once_on_the_fullest_node() -> None:
    """Of 300 MB at the end, 100 are shared by the two ranks of a node: 250 each."""
    build = node_phase_memory(
        [phase("a", 400, 300, 250, 7), phase("a", 350, 300, 250, 9), phase("b", 500, 300, 300, 8)]
    )
    assert build["build"] == NodePhaseMemory(host_peak_bytes=650 * MB, host_end_bytes=500 * MB, gpu_peak_bytes=9 * MB)
    silent = node_phase_memory([phase("a", 400, 300, 250), phase("a", None, 300, 250)])
    assert silent["build"] == NodePhaseMemory(host_end_bytes=500 * MB)
    assert node_phase_memory([fakes.measurement()]) == {}


def test_a_checkpoint_costs_what_the_slowest_rank_and_the_fullest_node_take() -> None:
    def saved(seconds: float, peak: int, written: int | None) -> CheckpointAction:
        memory = PhaseMemory(host_peak_bytes=peak * MB, host_end_bytes=300 * MB, host_end_pss_bytes=200 * MB)
        return CheckpointAction(seconds=seconds, memory=memory, written_bytes=written)

    first = {"save": saved(2.0, 500, 7 * MB), "load": CheckpointAction(not_done="no such files")}
    second = {"save": saved(3.0, 400, None), "load": CheckpointAction(seconds=0.1)}
    row = run_of(seen(checkpoint=first, checkpoint_restored=True), seen(checkpoint=second)).row
    assert (row.checkpoint_save_seconds, row.checkpoint_save_gb) == (3.0, 7 / 1024)
    assert row.checkpoint_save_cpu_peak_gb == pytest.approx(700 / 1024)
    assert (row.checkpoint_load_seconds, row.checkpoint_restored) == (None, True)
    assert is_restored([seen(checkpoint_restored=True), seen(checkpoint_restored=False)]) is False


def test_losses_are_means_over_ranks_and_a_loss_of_zero_is_a_loss() -> None:
    run = run_of(seen(losses=(0.0, 3.0, 0.0)), seen(losses=(1.0, None, 0.0)))
    assert run.losses == (0.5, None, 0.0)
    assert (run.row.first_loss, run.row.final_loss) == (0.5, 0.0)
