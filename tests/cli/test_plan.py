"""``plan`` as a user types it: a table without a GPU, a network or a run, and one line for what cannot be answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.cli.commands import main
from ds_bench.prediction import trial_predictions

LLAMA = ["plan", "--model", "meta-llama/Llama-2-70b-hf", "--num-gpus", "8", "--batch-size", "1", "--seq-length", "4096"]


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    code = main([*arguments, "--json"])
    found = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}
    assert code == int({row["verdict"] for row in found.values()} == {"does not fit"})
    return found


def text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) in (0, 1)
    return capsys.readouterr().out


def test_json_holds_bytes_by_category_and_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt2 has 124,439,808 parameters: in bf16 2 bytes each, and 12 of optimizer states (ZeRO, section 3.1)."""
    found = rows(capsys, "plan", "--model", "gpt2", "--strategies", "zero0")["zero0"]["gpu_bytes"]
    assert (found["parameters"], found["optimizer_states"]) == (2 * 124_439_808, 12 * 124_439_808)
    # 16 bytes per parameter of torch's engines, which FSDP2 splits among the GPUs.
    torchs = rows(capsys, *LLAMA, "--precision", "fp32", "--strategies", "ddp", "fsdp2")
    ddp, fsdp2 = (sum(torchs[name]["gpu_bytes"].values()) for name in ("ddp", "fsdp2"))
    assert ddp > 16 * 68_976_648_192
    assert 16 * 68_976_648_192 / 8 < fsdp2 < ddp / 3
    asked = ["--model", "meta-llama/Llama-2-7b-hf", "--gpu", "24GB", "--batch-size", "1", "--strategies", "zero3"]
    offered = rows(capsys, "plan", *asked)["zero3"]
    assert "CPU" in offered["smallest_change"]
    assert offered["smallest_change_host_bytes_per_node"] > 12 * 6_738_415_616  # fp32 master and two moments


def test_min_gpus_and_max_batch_are_found_by_the_same_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--gpu", "H200", "--activation-checkpointing"]
    found = rows(capsys, *LLAMA, *asked, "--min-gpus", "--max-batch")
    assert (found["zero0"]["min_gpus"], found["zero0"]["max_batch"]) == (None, None)  # every GPU holds everything
    needed = found["zero3"]["min_gpus"]
    assert needed % 8 == 0  # above one node it is whole nodes of 8
    fewer = rows(capsys, *LLAMA, *asked, "--strategies", "zero3", "--num-gpus", str(needed - 8))
    assert fewer["zero3"]["verdict"] == "does not fit"
    tight = rows(capsys, *LLAMA, *asked, "--strategies", "cpu_full", "--host-memory", "512")
    assert tight["cpu_full"]["verdict"] == "does not fit" != found["cpu_full"]["verdict"]
    assert "whole nodes of 4" in text(capsys, "--min-gpus", "--gpus-per-node", "4")
    assert "whole nodes" not in text(capsys, "--gpus-per-node", "4")


def test_a_stream_of_ascii_gets_ascii() -> None:
    program = [sys.executable, "-m", "ds_bench", "plan", "--max-batch", "--seq-length", "1"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    done = subprocess.run([*program, "--gpu", "9000GB"], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("1 x 9,000 GB: all 7 strategies fit")
    assert ">= 65,536" in done.stdout  # where the search ends
    assert "?" not in done.stdout


def answer(out: str) -> str:
    """The first paragraph, on one line."""
    return " ".join(out.split("\n\n")[0].split())


def table_row(out: str, label: str) -> list[str]:
    return next(line for line in out.splitlines() if line.startswith(f"{label}  ")).removeprefix(label).split()


SEVEN_B = ["--model", "meta-llama/Llama-2-7b-hf"]
SEVENTY_B = ["--model", "meta-llama/Llama-2-70b-hf", "--num-gpus", "8", "--gpu", "80GB"]
CHECKPOINTED = [*SEVENTY_B, "--seq-length", "4096", "--activation-checkpointing"]
CPU_OPTIMIZER, NVME = "ZeRO-3 + CPU optimizer", "ZeRO-3 + NVMe optimizer"
CPU_FULL = f"{CPU_OPTIMIZER} and parameters"
ANSWERS: dict[str, tuple[list[str], str]] = {
    "all": (["--gpu", "24GB"], "1 × 24 GB: all 7 strategies fit; ZeRO-0 is the simplest: 4.57 GB per GPU."),
    "some": (
        [*SEVEN_B, "--num-gpus", "2", "--host-memory", "512"],
        "2 × 80 GB: 6 of 7 strategies fit; ZeRO-3 is the simplest: ",  # ZeRO-1 and ZeRO-2 are tight
    ),
    "some, all tightly": (
        [*SEVEN_B, "--num-gpus", "2", "--strategies", "zero2", "zero1"],
        "2 × 80 GB: both strategies fit; ZeRO-1 is the simplest, but tightly: 77.3 GB per GPU.",
    ),
    "one, and the host is nearly full": (
        [*SEVEN_B, "--num-gpus", "2", "--gpu", "24GB", "--host-memory", "64"],
        f"2 × 24 GB: only {NVME} and parameters fits, but nearly fills the host's memory: 16.3 GB per GPU, 58.8 GB of "
        "host memory and 113 GB of NVMe; without offload you need 16 GPUs.",
    ),
    "nothing": (
        [*SEVENTY_B, "--seq-length", "4096"],
        f"8 × 80 GB: nothing fits as asked; {CPU_OPTIMIZER} with activation checkpointing does, 49.0 GB per GPU and "
        "1,310 GB of host memory; without offload you need 24 GPUs.",
    ),
    "nothing, one strategy": (
        [*SEVEN_B, "--strategies", "zero0"],
        f"1 × 80 GB: ZeRO-0 does not fit; {CPU_OPTIMIZER} does, 27.1 GB per GPU and 121 GB of host memory; "
        "without offload you need 2 GPUs.",
    ),
    "nothing, and nothing helps": (
        ["--gpu", "1GB"],
        f"1 × 1 GB: nothing fits as asked (the least: {NVME} and parameters, 3.95 GB per GPU), and no change "
        "that was tried helps.",
    ),
    "host too small": (
        [*SEVEN_B, "--num-gpus", "8", "--host-memory", "10"],
        "8 × 80 GB: nothing fits as asked; ZeRO-1 with 4 GPUs does, 50.0 GB per GPU.",
    ),
    "host too small, and nothing helps": (
        [*SEVEN_B, "--num-gpus", "8", "--host-memory", "1"],
        "8 × 80 GB: nothing fits as asked (the least: ZeRO-0, 12.0 GB per node), and no change that was tried helps.",
    ),
    "GPUs too small without offload, host with it": (
        [*SEVEN_B, "--num-gpus", "2", "--gpu", "24GB", "--host-memory", "40"],
        f"2 × 24 GB: nothing fits as asked; {CPU_FULL} with 56 GPUs does, 17.6 GB per GPU and 30.8 GB of host memory "
        "per node; without offload you need 16 GPUs.",
    ),
    # What "nothing" offers fits as it says.
    "with checkpointing": (
        CHECKPOINTED,
        f"8 × 80 GB: 3 of 7 strategies fit; {CPU_OPTIMIZER} is the simplest: 49.0 GB per GPU and 1,310 GB of host ",
    ),
    "on 24 GPUs": (
        [*CHECKPOINTED, "--strategies", "zero2", "zero3", "--num-gpus", "24"],
        "24 × 80 GB: only ZeRO-3 fits",
    ),
    "on 16 GPUs": (
        [*CHECKPOINTED, "--strategies", "zero2", "zero3", "--num-gpus", "16"],
        "16 × 80 GB: nothing fits",
    ),
    "many GPUs": (["--num-gpus", "100000", "--gpu", "16GB"], "100,000 × 16 GB: all 7 strategies fit; ZeRO-0 is "),
}


def test_the_first_sentence_answers_the_question(capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests) -> None:
    for case, (arguments, expected) in ANSWERS.items():
        with subtests.test(case):
            assert answer(text(capsys, *arguments)).startswith(expected)


def test_activations_that_could_not_be_counted_leave_the_answer_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_profile = trial_predictions.profile_model

    def without_activations(*arguments: Any, **keywords: Any) -> Any:
        return replace(find_profile(*arguments, **keywords), activations={}, unknown="its forward pass failed")

    monkeypatch.setattr(trial_predictions, "profile_model", without_activations)
    out = text(capsys, *SEVEN_B, "--num-gpus", "2", "--min-gpus", "--max-batch")
    assert answer(out).startswith(
        "2 × 80 GB: not known, because activations are not counted (its forward pass failed); without them ZeRO-1 "
    )
    assert table_row(out, "ZeRO-0")[0] == "no"
    assert table_row(out, "ZeRO-3")[0] == "?"
    assert table_row(out, "ZeRO-3")[-3:] == ["≥", "2", "?"]
    larger = text(capsys, *SEVEN_B, "--num-gpus", "2", "--gpu", "16GB", "--strategies", "zero2", "zero3")
    assert answer(larger).startswith(
        "2 × 16 GB: nothing fits as asked even without activations, which are not counted (its forward pass failed); "
        f"{CPU_OPTIMIZER} may, "
    )
    assert "without offload you need at least " in answer(larger)


EVERY_CASE = [*(arguments for arguments, _ in ANSWERS.values()), [*SEVENTY_B, "--host-memory", "900"]]


def test_no_line_is_wider_than_the_terminal_and_no_word_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for arguments in EVERY_CASE:
        monkeypatch.setenv("COLUMNS", "10000")
        whole = text(capsys, *arguments, "--min-gpus", "--verbose")
        for width in (1, 80, 200):
            with subtests.test(" ".join(arguments), width=width):
                monkeypatch.setenv("COLUMNS", str(width))
                out = text(capsys, *arguments, "--min-gpus", "--verbose")
                assert max(map(len, out.splitlines())) <= max(width, 80)  # the table of categories takes nearly 80
                of_notes = set("fits with a wider terminal also shows Mostly".split())
                shown, known = ({word.rstrip(",:;") for word in each.split()} for each in (out, whole))
                assert shown - of_notes <= known


def test_the_table_names_what_takes_most_of_the_memory_that_is_too_small(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """6.74 B parameters: 12 bytes of optimizer states each are 75.3 GB; eight processes of 1.5 GB on the host."""
    monkeypatch.setenv("COLUMNS", "200")
    out = text(capsys, *SEVEN_B, "--num-gpus", "8", "--gpu", "80GB", "--host-memory", "10", "--min-gpus")
    rows = {label: " ".join(table_row(out, label)) for label in ("ZeRO-0", "ZeRO-1", "ZeRO-3 + CPU optimizer")}
    assert rows == {
        "ZeRO-0": "no (GPU and host) 153 191 % 12.0 — none optimizer states 75.3 ZeRO-1, 4 GPUs",
        "ZeRO-1": "no (host) 39.1 49 % 12.0 — 2 host: the processes themselves 12.0 4 GPUs",
        "ZeRO-3 + CPU optimizer": "no (host) 19.3 24 % 135 — none host: optimizer states 75.3",
    }


def test_planning_a_preset_loads_no_torch_and_starts_no_process(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "def refuse(*_a, **_k): raise AssertionError('a process was started')\n"
        "subprocess.run = subprocess.Popen = refuse\n"
        "from ds_bench.cli.commands import main\n"
        f"assert main({[*LLAMA, '--min-gpus', '--max-batch']!r}) == 1\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_is_predicted_like_a_strategy_and_what_it_ignores_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = {"stage": 2, "reduce_bucket_size": "auto", "cpu_offload": True}
    fine, refused = tmp_path / "mine.json", tmp_path / "old.json"
    fine.write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": zero, "log": 1}))
    refused.write_text(json.dumps({"zero_optimization": {"mics_shard_size": 2}}))
    assert main([*LLAMA, "--configs", str(fine), str(refused), "--strategies", "zero2_offload", "--json"]) == 1
    captured = capsys.readouterr()
    found = {row["strategy"]: row for row in json.loads(captured.out)}
    assert list(found) == ["zero2_offload", "mine"]
    assert found["mine"]["gpu_total_bytes"] < found["zero2_offload"]["gpu_total_bytes"]  # its bucket is smaller
    assert sum(found["mine"]["host_bytes_per_node"].values()) > 80e9  # the optimizer is offloaded
    assert "note: mine: left out of the copy that runs: log, which DeepSpeed does not know" in captured.err
    assert "note: not predicted: old: zero_optimization.mics_shard_size: the feature was removed" in captured.err
    assert main([*LLAMA, "--configs", str(refused)]) == 2
    assert "mics_shard_size" in capsys.readouterr().err


def test_a_file_whose_memory_the_formulas_do_not_know_is_named_and_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """AutoTP splits layers: predicted as plain ZeRO-1 it would be called the simplest row that fits."""
    for name, keys in {"tp": {"tensor_parallel": {"autotp_size": 2}}, "sp": {"sequence_parallel_size": 2}}.items():
        zero = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, **keys}
        (tmp_path / f"{name}.json").write_text(json.dumps(zero))
    assert main(["plan", "--model", "meta-llama/Llama-2-7b-hf", "--num-gpus", "4", "--configs", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "not predicted: tp: AutoTP splits layers" in shown.err
    assert "what sequence parallelism exchanges is not counted" in " ".join(shown.out.split())
    assert "None" not in shown.out


@pytest.mark.slow
def test_a_factory_is_planned_with_what_it_trains_and_one_that_trains_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_parts.py").write_text(
        "import torch\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self, trained):\n"
        "        super().__init__()\n"
        "        self.base = torch.nn.Linear(2048, 2048, bias=False).requires_grad_(False)\n"
        "        self.head = torch.nn.Linear(2048, 8, bias=False).requires_grad_(trained)\n"
        "    def forward(self, pixels):\n"
        "        return self.head(self.base(pixels)).pow(2).mean()\n"
        "def batch(samples, _length, generator):\n"
        "    return {'pixels': torch.rand(samples, 2048, generator=generator)}\n"
        "def some(): return Own(True), batch\n"
        "def none(): return Own(False), batch\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["--model-factory", "own_parts:some", "--num-gpus", "4", "--strategies", "zero0", "zero3"]
    assert "own_parts:some · 4.21 M parameters, 0.39 % trained" in text(capsys, *arguments)
    held = rows(capsys, "plan", *arguments)["zero0"]["gpu_bytes"]
    trained = 2048 * 8
    assert held["parameters"] == 2 * (2048 * 2048 + trained)
    assert held["optimizer_states"] == 12 * trained
    assert main(["plan", "--model-factory", "own_parts:none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "own_parts:none: every parameter is frozen" in line


def test_bf16_on_a_card_without_it_and_questions_without_an_answer(
    capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for flags, code, words in (
        (["--gpu", "V100-32GB", "--strategies", "zero1"], 0, ["V100-32GB has no bf16 units and will not train ZeRO-1"]),
        (["--gpu", "V100-32GB", "--strategies", "zero1", "--precision", "fp16"], 0, []),
        (["--gpu", "A100-40GB", "--strategies", "zero1"], 0, []),
        (["--gpu", "H1000"], 2, ["H1000", "H100"]),
        (["--num-gpus", "1000000000"], 2, ["1000000000", "100000"]),
        (["--seq-length", "2000"], 2, ["2000", "1024"]),
        (["--batch-size", "99999999999999"], 2, ["99999999999999"]),
        (["--host-memory", "-1"], 2, ["-1"]),
        (["--model", "meta-llama/Llama-9-1B"], 2, ["only with --online"]),
    ):
        with subtests.test(" ".join(flags)):
            assert main(["plan", *flags]) == code
            error = capsys.readouterr().err
            assert len(error.splitlines()) == bool(words), error
            assert all(word in error for word in words), error
