"""The flat records: every key in every row, null where nothing was measured, and the analysis people paste."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ds_bench.analysis import flops
from ds_bench.analysis.flat_reader import read_summary
from ds_bench.analysis.flat_rows import FLAT_COLUMNS, flat_rows, status_text
from ds_bench.analysis.summary import TrialSummary, summarise
from ds_bench.models.presets import find_preset
from ds_bench.records import schema
from ds_bench.records.run_folder import RunFolder
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.real_trials import ROOT

# Columns that other programs read: neither a name nor an order may change.
KEYS = [
    "stage", "strategy", "model", "batch_size", "seq_length", "grad_accum", "num_steps", "warmup_steps",
    "avg_step_time_ms", "std_step_time_ms", "throughput_tokens_per_sec", "gpu_peak_gb", "gpu_allocated_gb",
    "gpu_reserved_gb", "cpu_used_gb", "success", "status", "error", "error_details",
]  # fmt: skip
MEASURED = [name for name in KEYS if name.endswith(("_ms", "_per_sec", "_gb"))]
CUDA = fakes.placement(accelerator="cuda", num_gpus=2)
GB = 2**30


def rows(*records: TrialRecord) -> list[dict[str, Any]]:
    return flat_rows([summarise(each, None, None) for each in records])


def gpu_run() -> list[TrialRecord]:
    """Four stages on two cards: faster the lower, smaller the higher; stage 0 ran out of memory."""
    records = [fakes.failure(fakes.trial(fakes.zero(0), on=CUDA))]
    for stage, seconds, peak in ((1, 0.10, 9), (2, 0.11, 6), (3, 0.15, 5)):
        trial = fakes.trial(fakes.zero(stage), on=CUDA)
        records.append(fakes.success(trial, step_seconds=[seconds] * 10, gpu_peak_bytes=peak * GB))
    return records


EVERY_ENDING = [
    fakes.success(fakes.trial(fakes.zero(2))),
    fakes.success(fakes.trial(fakes.zero(3), on=CUDA)),
    fakes.success(fakes.trial(fakes.offload("nvme"), on=fakes.placement(nvme_path="/d"))),
    *(fakes.failure(fakes.trial(fakes.zero(1)), status) for status in (*schema.STATUSES[1:], "RuntimeError")),
]


def test_every_row_has_every_key_whatever_came_of_the_trial(subtests: pytest.Subtests) -> None:
    for entry in EVERY_ENDING:
        with subtests.test(entry.outcome.status):
            (row,) = rows(entry)
            assert list(row)[: len(KEYS)] == KEYS
            assert list(row) == [*(column.name for column in FLAT_COLUMNS), "caveat_list"]


def test_the_stage_is_a_whole_number_in_every_row(subtests: pytest.Subtests) -> None:
    for entry in EVERY_ENDING:
        with subtests.test(entry.outcome.status):
            (row,) = rows(entry)
            assert type(row["stage"]) is int
            assert row["stage"] == entry.trial.configuration.stage


def test_no_two_columns_share_a_name() -> None:
    names = [column.name for column in FLAT_COLUMNS]
    assert len(set(names)) == len(names)


def test_every_value_is_flat_and_json() -> None:
    for row in rows(*EVERY_ENDING):
        assert all(
            isinstance(value, str | int | float | bool | None) or name == "caveat_list" for name, value in row.items()
        )
    assert json.loads(json.dumps(rows(*EVERY_ENDING), allow_nan=False)) == rows(*EVERY_ENDING)


@pytest.mark.parametrize("status", [*schema.STATUSES[1:], "ValueError"])
def test_what_was_not_measured_is_null_and_never_a_number(status: str) -> None:
    (row,) = rows(fakes.failure(fakes.trial(fakes.zero(1), on=CUDA), status))
    assert {row[name] for name in MEASURED} == {None}
    asked = {"stage", "batch_size", "seq_length", "grad_accum", "num_steps", "warmup_steps", "repeat", "num_gpus"}
    asked |= {"num_nodes"}
    numbers = {name for name, value in row.items() if type(value) in (int, float)}
    assert numbers - asked == {"wall_seconds", "method_version"}


def test_a_trial_that_was_never_launched_took_no_time() -> None:
    entry = TrialRecord(trial=fakes.trial(), outcome=schema.Outcome(status=schema.UNSUPPORTED, error="no libaio"))
    (row,) = rows(entry)
    assert (row["wall_seconds"], row["start_seconds"], row["launch"]) == (None, None, None)
    assert row["error"] == "no libaio"


def test_a_failed_row_keeps_its_cause_with_phase_rank_and_log() -> None:
    (row,) = rows(fakes.failure())
    assert row["success"] is False
    assert row["status"] == "❌ OOM"
    assert row["error"] == "OOM in backward: asked 2.00 GB"
    assert all(part in row["error_details"] for part in ("phase backward", "rank 0", "log /run/rank0.log"))


def test_a_good_row_has_no_error() -> None:
    (row,) = rows(fakes.success())
    assert (row["success"], row["status"], row["error"], row["error_details"]) == (True, "✅ Success", None, None)


def test_a_status_is_a_sign_and_a_word() -> None:
    text = {
        "Success": "✅ Success",
        "OOM": "❌ OOM",
        "RuntimeError": "❌ RuntimeError",
        "OOM (host)": "❌ OOM (host)",
        "Skipped": "⏭️ Skipped",
        "Interrupted": "⏹️ Interrupted",
    }
    assert {status: status_text(status) for status in text} == text


# ------------------------------------------------------------------ every column

CATEGORIES = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations", "other")
# Of the run below: a new column needs a value of its own here.
EXPECTED: dict[str, Any] = {
    "stage": 3,
    "strategy": "nvme",
    "model": "tiny",
    "batch_size": 3,
    "seq_length": 96,
    "grad_accum": 5,
    "num_steps": 7,
    "warmup_steps": 4,
    "avg_step_time_ms": 1242.8571428571427,
    "std_step_time_ms": 21.602468994692888,
    "throughput_tokens_per_sec": 2317.241379310345,
    "gpu_peak_gb": 23.0,
    "gpu_allocated_gb": 27.0,
    "gpu_reserved_gb": 29.0,
    "cpu_used_gb": 82.00000000093132,
    "success": True,
    "status": "✅ Success",
    "error": None,
    "error_details": None,
    "repeat": 11,
    "trial_id": "00_nvme",
    "num_gpus": 2,
    "accelerator": "cuda",
    "device": "NVIDIA H100 80GB HBM3",
    "precision": "bf16",
    "batch_policy": "given",
    "activation_checkpointing": False,
    "optimizer": "AdamW",
    "launch": "warm",
    "data_parallel_size": 2,
    "parameter_count": 1234,
    "throughput_tokens_per_sec_per_gpu": 1158.6206896551726,
    "throughput_samples_per_sec": 24.13793103448276,
    "model_tflops_per_gpu": 0.003965040993103449,
    "model_flops_per_token": 3422208,
    "causal_flops_per_token": 3274752,
    "hardware_flops_per_token": 3422208,
    "flops_convention": flops.MODEL_CONVENTION,
    "mfu": 3.965040993103449e-06,
    "first_loss": 9.0,
    "final_loss": 4.0,
    "gpu_peak_reserved_gb": 25.0,
    "gpu_init_peak_gb": 21.0,
    "gpu_device_used_gb": 31.0,
    "gpu_total_gb": 90.0,
    "gpu_percent": 30.0,
    "gpu_alloc_retries": 18,
    "predicted_over_measured": None,
    "cpu_pss_gb": 74.0,
    "nvme_stored_gb": 86.0,
    "nvme_read_gb_per_step": 94.0,
    "nvme_written_gb_per_step": 106.0,
    "ledger_gpu_parameters_gb": 1001.0,
    "ledger_gpu_gradients_gb": 1011.0,
    "ledger_gpu_optimizer_states_gb": 1021.0,
    "ledger_gpu_deepspeed_buffers_gb": 1031.0,
    "ledger_gpu_activations_gb": 1041.0,
    "ledger_gpu_other_gb": 1051.0,
    "ledger_cpu_parameters_gb": 1101.0,
    "ledger_cpu_gradients_gb": 1111.0,
    "ledger_cpu_optimizer_states_gb": 1121.0,
    "ledger_cpu_deepspeed_buffers_gb": 1131.0,
    "ledger_cpu_activations_gb": 1141.0,
    "ledger_cpu_other_gb": 1151.0,
    "ledger_nvme_parameters_gb": 1201.0,
    "ledger_nvme_optimizer_states_gb": 1221.0,
    "phase_forward_ms": 110.0,
    "phase_backward_ms": 210.00000000000003,
    "phase_step_ms": 310.00000000000006,
    "skipped_steps": 3,
    "start_seconds": 4.5,
    "wall_seconds": 12.5,
    "started_at": "2026-11-21T09:30:00+00:00",
    "method_version": 2,
    "predicted_over_ledger": None,
    "dropout": 0.3,
    "repeated_loss": 6.5,
    "weight_change_norm": 10.0,
    "weight_change_cosine": 1.0,
    "cpu_threads": 19,
    "cpu_other_cores": 1.07,
    "num_nodes": 1,
    "run_id": "run-7",
    "gpu_name": "NVIDIA H100 80GB HBM3",
    "gpu_count": 2,
    "gpu_memory_gb": 80.0,
    "cpu_model": "AMD EPYC 9654",
    "cpu_logical_cores": 16,
    "cpu_physical_cores": 8,
    "cpu_quota_cores": 4.5,
    "torch_version": "2.13.0",
    "deepspeed_version": "0.19.8",
    "transformers_version": "5.23.0",
    "cuda_version": "13.0",
    "gpu_driver_version": "580.95",
    "round_position": 13,
    "gpu_outside_allocator_gb": 2.0,
    "engine": "deepspeed",
    "pass_type": "train",
    "step_time_cv_percent": 1.7381296892281635,
    "synchronized": True,
    "phase_communication_ms": 1510.0,
    "phase_transfer_ms": 1609.9999999999998,
    "communication_wait_ms": 1130.0,
    "communication_gb_per_step": 60.0,
    "cpu_adam_gb_per_sec": 522.0,
    "nvme_needed_gb_per_sec": 63.15789473684209,
    "nvme_measured_gb_per_sec": 6.0,
    "disk_bound": False,
    "profiled_flops_per_token": 10416666.666666666,
    "cpu_import_peak_gb": 600.0,
    "cpu_import_end_gb": 401.0,
    "cpu_build_peak_gb": 620.0,
    "cpu_build_end_gb": 421.0,
    "cpu_initialize_peak_gb": 640.0,
    "cpu_initialize_end_gb": 441.0,
    "cpu_first_step_peak_gb": 660.0,
    "cpu_first_step_end_gb": 461.0,
    "cpu_steady_peak_gb": 700.0,
    "cpu_steady_end_gb": 501.0,
    "seq_policy": "given",
    "phase_data_ms": 710.0,
    "data_wait_ms": 1810.0,
    "vocab_size": None,
    "data_file": None,
    "point": None,
    "trainable_parameter_count": None,
    "checkpoint_save_seconds": 501.0,
    "checkpoint_save_gb": 600.0,
    "checkpoint_save_cpu_peak_gb": 1400.0,
    "checkpoint_universal_seconds": 511.0,
    "checkpoint_universal_gb": 610.0,
    "checkpoint_universal_cpu_peak_gb": 1402.0,
    "checkpoint_load_seconds": 521.0,
    "checkpoint_load_cpu_peak_gb": 1404.0,
    "checkpoint_model_16bit_seconds": 531.0,
    "checkpoint_model_16bit_gb": 630.0,
    "checkpoint_model_16bit_cpu_peak_gb": 1406.0,
    "checkpoint_restored": True,
    "slowest_rank_host": None,
    "cpu_used_gb_of_nodes": None,
    "first_grad_norm": 2.25,
    "grad_norm": 1.75,
}  # fmt: skip


def distinct_run() -> TrialSummary:
    """A run of two ranks on which no two columns have the same value; rank 1 is the slower and the fuller one."""
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
            "offload": offload, "profiled_forward_flops": 1e9, "skipped_steps": 3, "window_seconds": 7.7 + number,
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
    return summarise(replace(found, ranks=ranks), find_preset("tiny"), 1e15, environment, "run-7")


def test_every_column_has_its_own_value_and_that_of_the_right_rank() -> None:
    (row,) = flat_rows([distinct_run()])
    known_elsewhere = {"caveats", "caveat_list", "config_hash"}
    assert set(row) - known_elsewhere == set(EXPECTED)
    for name, value in EXPECTED.items():
        assert row[name] == (pytest.approx(value) if isinstance(value, float) else value), name


# ------------------------------------------------------------------ units


def test_times_are_milliseconds_and_memory_is_powers_of_two() -> None:
    trial = fakes.trial(fakes.zero(1), on=CUDA)
    (row,) = rows(fakes.success(trial, step_seconds=[0.2] * 10, gpu_peak_bytes=3 * GB // 2, host_peak_bytes=GB))
    assert row["avg_step_time_ms"] == pytest.approx(200)
    assert row["std_step_time_ms"] == 0
    assert row["gpu_peak_gb"] == 1.5
    assert row["cpu_used_gb"] == 2.0  # two ranks of one node


def test_numbers_are_not_rounded_in_the_record() -> None:
    (row,) = rows(fakes.success(step_seconds=[1 / 7] * 10))
    assert row["avg_step_time_ms"] == sum([1 / 7] * 10) / 10 * 1000


def test_the_phases_are_the_slowest_ranks() -> None:
    (row,) = rows(fakes.success(phase_seconds={"forward": 0.25}))
    assert (row["phase_forward_ms"], row["phase_backward_ms"]) == (250, None)


# ------------------------------------------------------------------ several nodes


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


def waiting(seconds: float) -> tuple[schema.CommunicationOperation, ...]:
    return (schema.CommunicationOperation(name="all_reduce", count=1, bytes=8, seconds=9, wait_seconds=seconds),)


def test_of_several_nodes_the_fullest_counts_and_each_is_told() -> None:
    (row,) = rows(on_two_nodes(host_peak_bytes=[GB, GB, 3 * GB], window_seconds=[1.0, 3.0, 2.0]))
    assert (row["num_nodes"], row["cpu_used_gb"], row["slowest_rank_host"]) == (2, 3.0, "a")
    assert json.loads(row["cpu_used_gb_of_nodes"]) == {"a": 2.0, "b": 3.0}
    (again,) = flat_rows([read_summary(row)])
    assert {name: again[name] for name in row if name.endswith(("nodes", "_host"))} == {
        name: row[name] for name in row if name.endswith(("nodes", "_host"))
    }


def test_the_slowest_rank_is_the_one_that_waits_least_where_waits_are_known() -> None:
    waits = [waiting(0.5), waiting(0.4), waiting(0.1)]
    (row,) = rows(on_two_nodes(communication=waits, window_seconds=[1.0, 3.0, 2.0]))
    assert row["slowest_rank_host"] == "b"


def test_one_node_has_no_slowest_host_and_a_failed_row_has_the_nodes_that_were_asked_for() -> None:
    (row,) = rows(fakes.success(fakes.trial(fakes.zero(1), on=CUDA)))
    assert (row["num_nodes"], row["slowest_rank_host"], row["cpu_used_gb_of_nodes"]) == (1, None, None)
    (failed,) = rows(fakes.failure(on_two_nodes().trial))
    assert failed["num_nodes"] == 2


# ------------------------------------------------------------------ no GPU, no GPU numbers


def test_on_a_cpu_run_every_gpu_column_is_null_and_memory_is_not_passed_off() -> None:
    cpu = fakes.success(ledger={"cpu": {"parameters": 5 * GB}})
    (row,) = rows(cpu)
    gpu = {name: value for name, value in row.items() if name.startswith(("gpu_", "ledger_gpu_"))}
    assert len(gpu) > 6
    assert set(gpu.values()) == {None}
    assert row["cpu_used_gb"] == 2.0
    assert row["ledger_cpu_parameters_gb"] == 5.0


def test_the_ledger_of_the_fullest_rank_is_shown_and_empty_cells_are_zero() -> None:
    (row,) = rows(fakes.success(fakes.trial(fakes.zero(1), on=CUDA), ledger={"gpu": {"parameters": GB}}))
    assert (row["ledger_gpu_parameters_gb"], row["ledger_gpu_gradients_gb"]) == (1.0, 0.0)
    assert row["ledger_nvme_parameters_gb"] is None


def test_without_a_ledger_its_cells_are_null_and_not_zero() -> None:
    (row,) = rows(fakes.success(fakes.trial(fakes.zero(1), on=CUDA), ledger={}))
    assert {value for name, value in row.items() if name.startswith("ledger_")} == {None}


def test_the_nvme_columns_belong_to_rows_that_swap_whatever_their_strategy_is_called() -> None:
    on = fakes.placement(nvme_path="/d")
    swapping = fakes.trial(fakes.offload("nvme"), on=on)
    renamed = replace(swapping, configuration=replace(swapping.configuration, name="mine", label="mine"))
    ledger = {"nvme": {"parameters": GB}}
    cells = [
        row["ledger_nvme_parameters_gb"]
        for row in rows(*(fakes.success(t, ledger=ledger) for t in (swapping, renamed)))
    ]
    assert cells == [1.0, 1.0]


# ------------------------------------------------------------------ what the engine really ran


def test_batch_and_accumulation_are_the_engines_and_not_the_flags() -> None:
    (row,) = rows(fakes.success(micro_batch_size=6, grad_accum=3))
    assert (row["batch_size"], row["grad_accum"]) == (6, 3)
    assert "ran micro-batch 6 × accumulation 3" in row["caveats"]


def test_a_failed_row_shows_the_batch_that_was_asked_for() -> None:
    (row,) = rows(fakes.failure(fakes.trial(of=fakes.workload(batch_size=7, grad_accum=2))))
    assert (row["batch_size"], row["grad_accum"]) == (7, 2)


def test_an_mfu_above_100_percent_is_no_result(subtests: pytest.Subtests) -> None:
    for mfu, shown in ((0.4, 0.4), (1.0, 1.0), (5.63, None), (None, None)):
        with subtests.test(mfu=mfu):
            (row,) = flat_rows([TrialSummary(record=fakes.success(), mfu=mfu)])
            assert row["mfu"] == shown


def test_losses_are_the_first_and_the_last_of_the_whole_training() -> None:
    (row,) = rows(fakes.success(losses=(7.0, 6.0, 5.0)))
    assert (row["first_loss"], row["final_loss"]) == (7.0, 5.0)


# ------------------------------------------------------------------ A16: what people paste


def result_file(tmp_path: Path, records: list[TrialRecord]) -> Path:
    store = RunFolder.create(tmp_path, "zero")
    store.write_rows(rows(*records))
    return store.json_path


def test_the_common_analysis_runs_unmodified_on_a_gpu_result(tmp_path: Path) -> None:
    with result_file(tmp_path, gpu_run()).open() as f:
        results = json.load(f)
    df = pd.DataFrame(results)
    df["efficiency"] = df["throughput_tokens_per_sec"] / df["gpu_peak_gb"]
    best = df.loc[df["efficiency"].idxmax()]["stage"]
    # Per GB: stage 1 gives 10240/9, stage 2 9309/6, stage 3 6827/5 tokens per second.
    assert f"{best}" == "2"


def test_the_common_analysis_runs_when_every_stage_worked(tmp_path: Path) -> None:
    df = pd.DataFrame(json.loads(result_file(tmp_path, gpu_run()[1:]).read_text()))
    assert df["stage"].dtype.kind == "i"
    assert df["gpu_peak_gb"].dtype.kind == "f"
    assert list(df["success"]) == [True, True, True]


def test_a_failed_row_is_never_the_best_one(tmp_path: Path) -> None:
    df = pd.DataFrame(json.loads(result_file(tmp_path, gpu_run()).read_text()))
    assert df["throughput_tokens_per_sec"].idxmax() == 1
    assert df["throughput_tokens_per_sec"].isna().tolist() == [True, False, False, False]


def test_on_a_cpu_run_the_line_that_copes_finds_the_fastest(tmp_path: Path) -> None:
    """Word for word what docs/reading.md says."""
    line = 'df["gpu_peak_gb"].astype(float).fillna(df["cpu_used_gb"])'
    assert line in (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    records = [fakes.success(fakes.trial(fakes.zero(s)), step_seconds=[0.1 + 0.01 * s] * 10) for s in (0, 1)]
    df = pd.DataFrame(json.loads(result_file(tmp_path, records).read_text()))
    assert df["gpu_peak_gb"].isna().all()
    memory = df["gpu_peak_gb"].astype(float).fillna(df["cpu_used_gb"])
    df["efficiency"] = df["throughput_tokens_per_sec"] / memory
    assert df.loc[df["efficiency"].idxmax()]["stage"] == 0


def test_the_csv_reads_back_as_the_same_table(tmp_path: Path) -> None:
    store = RunFolder.create(tmp_path, "zero")
    store.write_rows(rows(*gpu_run()))
    from_json, from_csv = pd.DataFrame(json.loads(store.json_path.read_text())), pd.read_csv(store.csv_path)
    assert [*from_csv.columns, "caveat_list"] == list(from_json.columns)
    assert from_csv["stage"].tolist() == [0, 1, 2, 3]
    assert from_csv["throughput_tokens_per_sec"].tolist()[1:] == from_json["throughput_tokens_per_sec"].tolist()[1:]


def test_the_memory_of_cards_is_null_where_one_does_not_tell_it() -> None:
    known, silent = fakes.environment().gpus
    for cards, gigabytes in (((known, silent), 80.0), ((known, replace(silent, memory_total_bytes=None)), None)):
        summary = replace(summarise(fakes.success(), None, None), environment=fakes.environment(gpus=cards))
        assert flat_rows([summary])[0]["gpu_memory_gb"] == gigabytes
