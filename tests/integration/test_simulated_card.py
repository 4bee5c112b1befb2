"""Whole runs on simulated cards (tests/support/simulated_card): what a rank and its parent do only with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_bench.launch.ops import OpState
from tests.support.real_trials import ROOT, SUPPORT, rows_of
from tests.support.simulated_card import CardPlan, write_plans

MIB = 2**20
TINY = ("--model", "tiny", "--batch-size", "2", "--seq-length", "64", "--num-steps", "4", "--warmup-steps", "2")


@dataclass(frozen=True)
class Run:
    """A script's run that has ended."""

    code: int
    output: str
    rows: list[dict[str, Any]]
    folder: Path


RunOnCards = Callable[..., Run]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the lines that ran in any process of this module's runs."""
    return tmp_path_factory.mktemp("lines")


@pytest.fixture(scope="module")
def run(built_ops: dict[str, OpState], tmp_path_factory: pytest.TempPathFactory, lines: Path) -> RunOnCards:
    """Runs a script on these cards, as many ranks as there are."""

    def go(script: str, *arguments: str, cards: tuple[CardPlan, ...] = (CardPlan(), CardPlan())) -> Run:
        folder = tmp_path_factory.mktemp("run")
        variables = write_plans(folder / "machine", *cards)
        variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(SUPPORT)])
        common = ["--accelerator", "cuda", "--num-gpus", str(len(cards)), "--output-dir", str(folder)]
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *common, *arguments],
            env={**os.environ, **variables, "SIMULATED_CARDS_LINES": str(lines), "COLUMNS": "160"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        return Run(done.returncode, done.stdout + done.stderr, rows_of(folder), folder)

    return go


STRATEGIES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "ddp", "fsdp2")
EMPTY = {
    "cpu_quota_cores": "the container's limit",
    "slowest_rank_host cpu_used_gb_of_nodes": "several hosts",
    "error error_details": "failed rows",
    "nvme_stored_gb nvme_read_gb_per_step nvme_written_gb_per_step nvme_needed_gb_per_sec nvme_measured_gb_per_sec "
    "ledger_nvme_parameters_gb ledger_nvme_optimizer_states_gb disk_bound": "offload to a disk",
    "profiled_flops_per_token": "compiled models",
    "phase_data_ms data_wait_ms vocab_size data_file": "data files",
    "checkpoint_save_seconds checkpoint_save_gb checkpoint_save_cpu_peak_gb checkpoint_load_seconds "
    "checkpoint_load_cpu_peak_gb checkpoint_model_16bit_seconds checkpoint_model_16bit_gb "
    "checkpoint_model_16bit_cpu_peak_gb checkpoint_restored": "--checkpoint",
    "point": "sweeps",
    "script script_hash python config_source tokens_unpadded_per_sec gap_ms main_engine other_engines": "scripts",
}
"""Columns of a row on GPUs that stay empty, and what fills them."""
BY_DEEPSPEED = {"phase_communication_ms", "communication_wait_ms", "communication_gb_per_step"}
BY_OFFLOAD = {"phase_transfer_ms", "cpu_adam_gb_per_sec"}


@pytest.fixture(scope="module")
def every_strategy(run: RunOnCards) -> Run:
    small_bucket = ("--set", "zero_optimization.reduce_bucket_size=100000")
    return run("zero_stage_comparison.py", *TINY, "--strategies", *STRATEGIES, *small_bucket)


def test_every_strategy_fills_every_column_of_a_gpu(every_strategy: Run, subtests: pytest.Subtests) -> None:
    assert every_strategy.code == 0, every_strategy.output
    assert [row["strategy"] for row in every_strategy.rows] == list(STRATEGIES)
    always = {name for names in EMPTY for name in names.split()}
    for row in every_strategy.rows:
        expected = always | (BY_OFFLOAD if "offload" not in row["strategy"] else set())
        expected |= BY_DEEPSPEED if row["engine"] != "deepspeed" else set()
        with subtests.test(row["strategy"]):
            empty = {name for name, value in row.items() if value is None}
            # Power needs a window of a second, which depends on the machine.
            assert empty - {"caveats", "gpu_power_watts", "gpu_joules_per_token"} == expected
            assert row["launch"] == "warm"


def test_memory_lies_where_the_strategy_puts_it_and_within_the_card(
    every_strategy: Run, subtests: pytest.Subtests
) -> None:
    for row in every_strategy.rows:
        names = ("parameters", "optimizer_states", "deepspeed_buffers", "other")
        held = sum(row[f"ledger_gpu_{name}_gb"] for name in names)
        with subtests.test(row["strategy"]):
            assert (
                0 < row["gpu_allocated_gb"] <= row["gpu_peak_gb"] <= row["gpu_peak_reserved_gb"] < row["gpu_total_gb"]
            )
            assert row["gpu_percent"] == pytest.approx(100 * row["gpu_peak_reserved_gb"] / row["gpu_total_gb"])
            assert 0.8 * row["gpu_allocated_gb"] < held + row["ledger_gpu_gradients_gb"] < 1.1 * row["gpu_peak_gb"]
            offloaded = "offload" in row["strategy"]
            assert (row["ledger_cpu_optimizer_states_gb"] > 0, row["ledger_gpu_optimizer_states_gb"] == 0) == (
                (offloaded, offloaded)
            )
            assert (row["ledger_cpu_parameters_gb"] > 0) == (row["strategy"] == "zero3_offload")
            assert min(row[f"phase_{name}_ms"] for name in ("forward", "backward", "step")) > 0
            assert "loss differs" not in (row["caveats"] or "") or "a known quirk" in row["caveats"]


def test_the_page_shows_memory_of_the_device_and_its_share_of_the_card(every_strategy: Run) -> None:
    (folder,) = every_strategy.folder.glob("runs/*")
    page = every_strategy.folder / "page.html"
    command = [sys.executable, "-m", "ds_bench", "report", str(folder), "--html", str(page)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    text = page.read_text()
    assert "<figcaption>Device memory by category" in text
    assert "<figcaption>Throughput against device memory" in text
    assert ">of card<" in text
