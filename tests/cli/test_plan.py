"""``plan`` as a user types it: a table without a GPU, a network or a run, and one line for what cannot be answered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_bench.cli.commands import main

LLAMA = ["plan", "--model", "meta-llama/Llama-2-70b-hf", "--num-gpus", "8", "--batch-size", "1", "--seq-length", "4096"]


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0
    return {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}


def test_the_line_of_the_readme_gives_a_row_for_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--gpu", "80GB", "--strategies", "all"]) == 0
    out = capsys.readouterr().out
    for label in ("ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 + CPU optimizer", "ZeRO-3 + NVMe optimizer"):
        assert f"\n{label}" in out
    assert "does not fit" in out
    assert "activation checkpointing" in out  # the change that would make it fit
    assert "DeepSpeed est." in out


def test_totals_are_the_sums_of_their_categories(capsys: pytest.CaptureFixture[str]) -> None:
    for row in rows(capsys, *LLAMA).values():
        assert row["gpu_total_bytes"] == sum(row["gpu_bytes"].values())


def test_model_states_of_stage_0_are_16_bytes_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt2 has 124,439,808 parameters; in bf16 2 bytes each, and 12 of optimizer states (ZeRO, section 3.1)."""
    found = rows(capsys, "plan", "--model", "gpt2", "--strategies", "zero0")["zero0"]["gpu_bytes"]
    assert found["parameters"] == 2 * 124_439_808
    assert found["optimizer_states"] == 12 * 124_439_808


def test_more_gpus_and_smaller_batches_are_answered_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, *LLAMA, "--gpu", "H200", "--activation-checkpointing", "--min-gpus", "--max-batch")
    assert found["zero0"]["min_gpus"] is None  # every GPU holds everything
    assert found["zero0"]["max_batch"] is None
    needed = found["zero3"]["min_gpus"]
    assert needed % 8 == 0  # above one node it is whole nodes of 8
    fewer = rows(
        capsys, "plan", "--model", "meta-llama/Llama-2-70b-hf", "--batch-size", "1", "--seq-length", "4096",
        "--gpu", "H200", "--activation-checkpointing", "--strategies", "zero3", "--num-gpus", str(needed - 8),
    )  # fmt: skip
    assert fewer["zero3"]["verdict"] == "does not fit"
    assert found["zero3"]["verdict"] == ("fits" if needed <= 8 else "does not fit")


def test_host_memory_is_kept_to_when_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    roomy = rows(capsys, *LLAMA, "--activation-checkpointing", "--strategies", "cpu_full")
    tight = rows(capsys, *LLAMA, "--activation-checkpointing", "--strategies", "cpu_full", "--host-memory", "512")
    assert roomy["cpu_full"]["verdict"] != "does not fit"
    assert tight["cpu_full"]["verdict"] == "does not fit"


def text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


OFFLOADED = ["--model", "meta-llama/Llama-2-7b-hf", "--num-gpus", "8", "--gpu", "H200", "--strategies", "cpu_full"]


def test_too_little_host_memory_is_named_as_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    out = text(capsys, *OFFLOADED, "--host-memory", "100")
    assert "nodes with 100 GB of host memory" in out.splitlines()[0]
    assert "does not fit in host memory: " in out
    assert " of 100 GB, most is optimizer states" in out
    both = text(capsys, *OFFLOADED, "--gpu", "4GB", "--host-memory", "100")
    assert "does not fit; most is " in both
    assert "; and in host memory: " in both
    assert rows(capsys, "plan", *OFFLOADED, "--host-memory", "100")["cpu_full"]["exceeded"] == ["host_memory"]
    assert rows(capsys, "plan", *OFFLOADED)["cpu_full"]["exceeded"] == []


def test_an_offload_that_is_offered_tells_what_it_takes_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "meta-llama/Llama-2-7b-hf", "--gpu", "24GB", "--batch-size", "1", "--strategies", "zero3"]
    offered = rows(capsys, "plan", *asked)["zero3"]
    assert "CPU" in offered["smallest_change"]
    assert offered["smallest_change_host_bytes_per_node"] > 12 * 6_738_415_616  # fp32 master and two moments
    assert "of host memory per node)" in text(capsys, *asked)


def test_whole_nodes_are_told_of_where_gpus_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert "whole nodes of 4" in text(capsys, "--min-gpus", "--gpus-per-node", "4")
    assert "whole nodes" not in text(capsys, "--gpus-per-node", "4")


def test_deepspeeds_figures_are_left_out_where_its_estimators_know_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    key = "deepspeed_estimator_gpu_bytes"
    bf16, fp32 = rows(capsys, "plan"), rows(capsys, "plan", "--precision", "fp32")
    assert bf16["nvme"][key] is None
    assert bf16["zero3"][key] is not None
    assert {row[key] for row in fp32.values()} == {None}


def test_a_batch_at_the_end_of_the_search_is_at_least_that(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seq-length", "1", "--strategies", "zero0", "--max-batch"]
    assert "≥ 65,536" in text(capsys, *small, "--gpu", "9000GB")
    assert "≥" not in text(capsys, *small, "--gpu", "16GB")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "H1000"], ["H1000", "H100"]),
        (["--num-gpus", "0"], ["--num-gpus", "'0'"]),
        (["--model", "gpt2", "--seq-length", "2000"], ["2000", "1024"]),
        (["--batch-size", "99999999999999"], ["99999999999999"]),
        (["--model", "nobody/knows-this"], ["nobody/knows-this"]),
        (["--strategies", "zero7"], ["zero7"]),
        (["--precision", "fp8"], ["fp8"]),
        (["--host-memory", "-1"], ["-1"]),
        (["--num-gpus", "1000000000"], ["1000000000", "100000"]),
        (["--model", "meta-llama/Llama-3.2-1B"], ["no preset and no local folder", "only with --online"]),
    ],
)
def test_what_cannot_be_answered_is_one_line_and_exit_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1, error
    assert all(word in error for word in words), error


def test_planning_a_preset_loads_no_torch_and_starts_no_process(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "def refuse(*_a, **_k): raise AssertionError('a process was started')\n"
        "subprocess.run = subprocess.Popen = refuse\n"
        "from ds_bench.cli.commands import main\n"
        f"assert main({[*LLAMA, '--min-gpus', '--max-batch']!r}) == 0\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
