"""Whole runs on simulated cards (tests/support/simulated_card): what a rank and its parent do only with a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.launch.ops import OpState
from ds_bench.prediction.torch_allocators import LARGE_SEGMENT_BYTES
from tests.support.real_trials import ROOT, gone_within, rows_of
from tests.support.simulated_card import CardPlan, gpu_statements, write_plans
from tests.support.simulated_card.nvml import WATTS

MIB = 2**20
H100 = CardPlan()
TINY = ("--model", "tiny", "--batch-size", "2", "--seq-length", "64", "--num-steps", "4", "--warmup-steps", "2")
SMALL_BUCKET = ("--set", "zero_optimization.reduce_bucket_size=100000")


@dataclass(frozen=True)
class Run:
    """A command that has ended."""

    code: int
    output: str
    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.folder)

    def records(self, name: str = "records.jsonl") -> list[dict[str, Any]]:
        """The last one of each trial: a trial that ran out is stored again with the changes that may help it."""
        (path,) = self.folder.glob(f"runs/*/{name}")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return [*{json.dumps({**each["trial"], "prediction": None}): each for each in records}.values()]

    @property
    def processes(self) -> set[int]:
        """Processes that have used a card and were not seen to end by the command."""
        return {int(path.name.split(".")[1]) for path in (self.folder / "machine").glob("card[0-9]*")}


RunOnCards = Callable[..., Run]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the lines of the package that ran in any process of this module's runs."""
    return tmp_path_factory.mktemp("lines")


@pytest.fixture(scope="module")
def run(built_ops: dict[str, OpState], tmp_path_factory: pytest.TempPathFactory, lines: Path) -> RunOnCards:
    """Runs ``python -m ds_bench run`` on these cards, with a rank on each of them."""

    def go(
        *arguments: str,
        cards: tuple[CardPlan, ...] = (H100, H100),
        ranks: int | None = None,
        script: str = "",
        **variables: str,
    ) -> Run:
        folder = tmp_path_factory.mktemp("run")
        variables = {**write_plans(folder / "machine", *cards), **variables, "SIMULATED_CARDS_LINES": str(lines)}
        common = ("--accelerator", "cuda", "--num-gpus", str(ranks or len(cards)), "--output-dir", str(folder))
        done = subprocess.run(
            [sys.executable, *(("-m", "ds_bench", "run") if script else ("zero_stage_comparison.py",)), *common,
             *arguments, *script.split()],
            cwd=ROOT,
            env={**os.environ, **variables, "COLUMNS": "160"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )  # fmt: skip
        return Run(done.returncode, done.stdout + done.stderr, folder)

    return go


ON_A_CARD = """
import torch
torch.cuda.set_device(1)
card, host = torch.ones(2**24, 1, device="cuda", dtype=torch.bfloat16), torch.ones(2**24, 1, dtype=torch.bfloat16)
def error(call):
    try:
        return call()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"[:70]
print(*[
    error(lambda: card + host), (card + 1).device, (card * torch.tensor(2.0)).device, card.to("cpu").device,
    card.float().type(), card.cpu().type(), host.type("torch.cuda.HalfTensor").dtype, error(card.numpy),
    error(card.pin_memory), host.pin_memory().is_pinned(), torch.zeros_like(card, device="cpu").device,
    error(lambda: card @ torch.ones(1, 2**16, device="cuda", dtype=torch.bfloat16)),
    torch.cuda.memory_allocated() // 2**20, torch.cuda.max_memory_allocated() // 2**20,
], sep="\\n")
"""


def test_tensors_and_their_errors_are_as_on_a_card(tmp_path: Path) -> None:
    environment = {**os.environ, **write_plans(tmp_path, H100, H100)}
    done = subprocess.run(
        [sys.executable, "-c", ON_A_CARD], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "RuntimeError: Expected all tensors to be on the same device, but found",
        *("cuda:1", "cuda:1", "cpu", "torch.cuda.FloatTensor", "torch.BFloat16Tensor", "torch.float16"),
        "TypeError: can't convert cuda:1 device type tensor to numpy. Use Tenso",
        "RuntimeError: cannot pin 'torch.cuda.BFloat16Tensor' only dense CPU te",
        *("True", "cpu"),
        # 2 TiB, which this host does not have either.
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2048.00 GiB. G",
        *("32", "96"),
    ]


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
    "lora freeze": "models trained in part",
    "script script_hash python config_source tokens_unpadded_per_sec gap_ms main_engine other_engines": "scripts",
}
"""Columns of a row on GPUs that stay empty, and what fills them."""
MAYBE_EMPTY = {"caveats", "gpu_power_watts", "gpu_joules_per_token"}
"""Power is read once a second, and a row may take less."""
BY_DEEPSPEED = {"phase_communication_ms", "communication_wait_ms", "communication_gb_per_step"}
BY_OFFLOAD = {"phase_transfer_ms", "cpu_adam_gb_per_sec"}


@pytest.fixture(scope="module")
def every_strategy(run: RunOnCards) -> Run:
    return run(*TINY, *SMALL_BUCKET, "--strategies", *STRATEGIES)


def test_every_strategy_fills_every_column_of_a_gpu(every_strategy: Run, subtests: pytest.Subtests) -> None:
    assert every_strategy.code == 0, every_strategy.output
    assert [row["strategy"] for row in every_strategy.rows] == list(STRATEGIES)
    always = {name for names in EMPTY for name in names.split()}
    for row in every_strategy.rows:
        expected = always | (BY_OFFLOAD if "offload" not in row["strategy"] else set())
        expected |= BY_DEEPSPEED if row["engine"] != "deepspeed" else set()
        with subtests.test(row["strategy"]):
            assert {name for name, value in row.items() if value is None} - MAYBE_EMPTY == expected
            assert row["launch"] == "warm"


def test_memory_is_where_the_strategy_puts_it_and_fits_the_card(every_strategy: Run, subtests: pytest.Subtests) -> None:
    for row, record in zip(every_strategy.rows, every_strategy.records(), strict=True):
        names = ("parameters", "optimizer_states", "deepspeed_buffers", "other")
        held = sum(row[f"ledger_gpu_{name}_gb"] for name in names)
        with subtests.test(row["strategy"]):
            assert 0 < row["gpu_allocated_gb"] < row["gpu_peak_gb"] <= row["gpu_peak_reserved_gb"] < row["gpu_total_gb"]
            assert row["gpu_percent"] == pytest.approx(100 * row["gpu_peak_reserved_gb"] / row["gpu_total_gb"])
            assert 0.8 * row["gpu_allocated_gb"] < held + row["ledger_gpu_gradients_gb"] < 1.1 * row["gpu_peak_gb"]
            offloaded = "offload" in row["strategy"]
            assert (row["ledger_cpu_optimizer_states_gb"] > 0, row["ledger_gpu_optimizer_states_gb"] == 0) == (
                (offloaded, offloaded)
            )
            assert (row["ledger_cpu_parameters_gb"] > 0) == (row["strategy"] == "zero3_offload")
            assert min(row[f"phase_{name}_ms"] for name in ("forward", "backward", "step")) > 0
            for rank in record["ranks"]:
                assert sum(rank["step_seconds"]) == pytest.approx(rank["window_seconds"], rel=0.05)
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


# ------------------------------------------------------------------ out of memory


@pytest.mark.parametrize(
    ("capacity", "arguments", "phases"),
    [
        # Gradients of zero2 are reduced in a bucket of 0.93 GiB, which backward allocates first; zero3 does so before.
        (512 * MIB, (*TINY, "--stages", "3", "2", "0"), ["init", "backward", None]),
        (64 * MIB, (*TINY, *SMALL_BUCKET, "--batch-size", "64", "--seq-length", "256", "--stages", "1"), ["forward"]),
        # torch's AdamW makes its states in the first step. DDP's bucket alone has a segment of 20 MiB.
        (
            26 * MIB,
            (*TINY, *SMALL_BUCKET, "--batch-size", "1", "--seq-length", "16", "--strategies", "ddp", "fsdp2"),
            ["step", None],
        ),
        (MIB // 2, (*TINY, *SMALL_BUCKET, "--stages", "0"), ["build"]),
    ],
    ids=["init and backward", "forward", "step", "build"],
)
def test_memory_that_runs_out_on_one_rank_ends_its_row_only(
    run: RunOnCards, capacity: int, arguments: tuple[str, ...], phases: list[str | None]
) -> None:
    done = run(*arguments, cards=(H100, CardPlan(total_bytes=capacity)))
    records = done.records()
    assert [record["outcome"]["phase"] for record in records] == phases, done.output
    assert done.code == (0 if None in phases else 1)
    for record, row in zip(records, done.rows, strict=True):
        if (outcome := record["outcome"])["status"] != "Success":
            assert (row["status"], outcome["rank"], outcome["kind"]) == ("❌ OOM", 1, "device_oom")
            # The allocator asks for a whole segment.
            assert 0 <= outcome["free_bytes"] < max(outcome["requested_bytes"], LARGE_SEGMENT_BYTES)
            assert outcome["free_bytes"] <= capacity
    assert gone_within(done.processes, 0) == set()


def test_the_largest_batch_is_the_last_that_the_card_holds(run: RunOnCards) -> None:
    small = CardPlan(total_bytes=64 * MIB)
    size = ("--batch-size", "auto", "--seq-length", "128", "--num-steps", "2", "--warmup-steps", "1")
    done = run("--model", "tiny", *size, *SMALL_BUCKET, "--stages", "1", cards=(H100, small))
    (row,) = done.rows
    trains = {
        record["trial"]["workload"]["batch_size"]: record["outcome"]["status"]
        for record in done.records("probes.jsonl")
    }
    assert row["success"], done.output
    assert (trains[row["batch_size"]], trains[row["batch_size"] + 1]) == ("Success", "OOM")
    assert row["gpu_percent"] > 75


def test_a_row_that_nearly_fills_the_card_is_not_recommended(run: RunOnCards) -> None:
    small = CardPlan(total_bytes=96 * MIB)
    done = run(
        *TINY, "--batch-size", "11", "--seq-length", "128", *SMALL_BUCKET, "--stages", "0", "1", cards=(small,) * 2
    )
    full, other = done.rows
    assert full["gpu_percent"] > 95 > other["gpu_percent"]
    (path,) = done.folder.glob("runs/*/recommendation.json")
    assert json.loads(path.read_text())["choice"] == "ZeRO-1", done.output


# ------------------------------------------------------------------ what happens to cards


def test_other_programs_low_clocks_and_different_cards_are_noticed(run: RunOnCards) -> None:
    """And the second trial waits for memory that the driver shows for some seconds after the first."""
    slowed = {"nvmlDeviceGetCurrentClocksEventReasons(GPU 0)": 0x44}  # thermal, and at the power limit that was not set
    late = CardPlan(context_bytes=600 * MIB, freed_after_seconds=4)
    other = replace(late, machine="h200", held_bytes=2**30, answers=slowed)
    done = run(*TINY, "--num-steps", "24", *SMALL_BUCKET, "--stages", "1", "2", cards=(late, other))
    assert done.code == 0, done.output
    assert len(done.rows) == 2
    for row in done.rows:
        assert row["device"] == "NVIDIA H100 80GB HBM3 + NVIDIA H200"
        # Outside the allocator: both the contexts and what the other program holds.
        assert row["gpu_outside_allocator_gb"] == pytest.approx(1 + 600 / 1024, abs=1e-3)
        assert row["gpu_power_watts"] == pytest.approx(2 * WATTS, rel=0.02)
        assert "GPU 1 was throttled while this ran: hw_thermal_slowdown" in row["caveats"]
        assert "sw_power_cap" not in row["caveats"]
        assert "less GPU memory was free" not in row["caveats"]
    first, second = (record["gpu_free_start_bytes"] for record in done.records())
    assert first == second
    assert {"GPUs", "GPU 1 memory", "GPU 1 clocks"} <= _findings(done.output)


def test_a_card_in_mig_mode_is_refused(run: RunOnCards) -> None:
    done = run(*TINY, "--stages", "1", cards=(CardPlan(machine="a100_mig"),))
    assert (done.code, "GPU 0 MIG" in _findings(done.output)) == (2, True)


def _findings(output: str) -> set[str]:
    """Names in the lines ``  warning  NAME  TEXT`` of the preflight checks."""
    found = [line.split("  ") for line in output.splitlines() if line.startswith(("  warning  ", "  problem  "))]
    return {parts[2].strip() for parts in found}


def test_a_card_lost_to_nvml_loses_only_what_nvml_says(run: RunOnCards) -> None:
    """Stage 0 trains on; at stage 1 DeepSpeed itself asks NVML for free memory (cuda_accelerator.py)."""
    done = run(*TINY, *SMALL_BUCKET, "--stages", "0", "1", cards=(H100, CardPlan(lost_when_used=True)))
    trained, failed = done.rows
    assert trained["success"], done.output
    assert trained["gpu_percent"] > 0
    assert failed["status"] == "❌ NVMLError_GpuIsLost"


def test_a_card_that_fails_ends_every_row_that_uses_it(run: RunOnCards) -> None:
    text = "CUDA error: uncorrectable ECC error encountered"
    cards = (H100, CardPlan(error=f"{text}\nCUDA kernel errors might be asynchronously reported", error_after=3000))
    done = run(*TINY, *SMALL_BUCKET, "--stages", "1", "2", cards=cards)
    outcomes = [record["outcome"] for record in done.records()]
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert (outcome["status"], outcome["rank"], outcome["kind"]) == ("AcceleratorError", 1, "other")
        assert text in outcome["error"]
    assert gone_within(done.processes, 0) == set()


def test_the_visible_card_is_used_by_ranks_of_deepspeeds_launcher(run: RunOnCards) -> None:
    cards = (H100, CardPlan(machine="h200"))
    done = run(*TINY, *SMALL_BUCKET, "--stages", "2", "--launcher", "deepspeed", cards=cards, ranks=1,
               CUDA_VISIBLE_DEVICES="1")  # fmt: skip
    (row,) = done.rows
    assert (row["success"], row["launch"], row["device"]) == (True, "deepspeed", "NVIDIA H200"), done.output


def test_under_wsl_a_rank_may_use_what_is_free_at_its_start(run: RunOnCards) -> None:
    card = CardPlan(machine="wsl2", held_bytes=7000 * MIB)
    done = run(*TINY, "--stages", "0", "2", cards=(card,))
    assert [row["status"] for row in done.rows] == ["✅ Success", "❌ OOM"], done.output
    (failure,) = done.records()[1]["failures"]
    assert "allowed; " in failure["message"]


# ------------------------------------------------------------------ what is asked for besides


def test_profiles_a_checkpoint_and_the_monitor_see_the_card(run: RunOnCards, tmp_path: Path) -> None:
    (tmp_path / "ids.uint16").write_bytes(bytes(4096))
    further = ("--profile", "torch", "memory", "nsys", "--checkpoint", "--monitor", "--gpu-memory-limit", "4")
    data = ("--data", str(tmp_path / "ids.uint16"), "--data-pin-memory")
    done = run(*TINY, *SMALL_BUCKET, "--stages", "2", "--axis", "allocator=expandable_segments", *further, *data)
    (row,) = done.rows
    assert row["success"], done.output
    assert row["checkpoint_restored"]
    assert "the profile" not in (row["caveats"] or "")
    (folder,) = done.folder.glob("runs/*/trials/*")
    assert {"memory_rank0.snapshot.pickle", "memory_rank0.txt"} <= {path.name for path in folder.glob("profiles/*")}
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 6
    for step in steps:
        assert 0 < step["gpu_allocated_bytes"] <= step["gpu_reserved_bytes"] < 4 * 2**30
        assert step["seconds"] > 0
        assert step["loss"] > 0


SCRIPT = """
import deepspeed, sys, torch
model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
engine, *_ = deepspeed.initialize(model=model, config=sys.argv[1])
for step in range(12):
    tokens = torch.randint(50, (2, 8), device=engine.device)
    engine.backward(torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten()))
    engine.step()
"""


def test_a_users_script_trains_on_the_card(run: RunOnCards, tmp_path: Path) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    (tmp_path / "config.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 2, "optimizer": adam, "zero_optimization": {"stage": 1}})
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    configs = ("--configs", str(tmp_path / "config.json"), "--warmup-steps", "2", "--num-steps", "4")
    done = run(*configs, script=f"-- {tmp_path / 'train.py'} {{config}}")
    (row,) = done.rows
    assert row["success"], done.output
    assert (row["device"], row["num_gpus"]) == ("NVIDIA H100 80GB HBM3", 2)
    assert 0 < row["gpu_peak_gb"] < row["gpu_total_gb"]


# ------------------------------------------------------------------ coverage


NOT_RUN = {
    "ds_bench/worker/measure_activations.py": "counts shapes on the CPU, as for any trial",
    "ds_bench/worker/trace_allocations.py": "traces shapes on the CPU, as for any trial",
    "ds_bench/worker/build_op.py": "an op that does not build: the simulated card has none to build",
    "ds_bench/worker/library_versions.py": "torch before 2.8",
}
"""Files of ``worker`` whose statements for a GPU do not all run here, and why."""


def test_every_statement_for_a_gpu_in_the_ranks_has_run(lines: Path) -> None:
    """Reads what the other tests of this file ran. ``python -m tests.support.simulated_card.gpu_statements`` lists the
    statements of other packages.
    """
    count, missing = gpu_statements.report(lines)
    assert count > 400
    in_ranks = [place for place in missing if place.startswith("ds_bench/worker/")]
    assert not [place for place in in_ranks if place.rpartition(":")[0] not in NOT_RUN], missing
