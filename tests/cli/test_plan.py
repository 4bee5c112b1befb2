"""``plan`` as a user types it: a table without a GPU, a network or a run, and one line for what cannot be answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from ds_bench.cli.commands import main, parse
from ds_bench.cli.plan import plan_options, predict_plan
from ds_bench.prediction import trial_predictions
from ds_bench.report.memory_plan import plan_lines

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
    """68,976,648,192 parameters of 16 bytes each in torch's engines, which FSDP2 splits among the GPUs."""
    torchs = rows(capsys, *LLAMA, "--precision", "fp32", "--strategies", "ddp", "fsdp2", "--min-gpus", "--max-batch")
    ddp, fsdp2 = (sum(torchs[name]["gpu_bytes"].values()) for name in ("ddp", "fsdp2"))
    assert ddp > 16 * 68_976_648_192
    assert 16 * 68_976_648_192 / 8 < fsdp2 < ddp / 3
    assert (torchs["ddp"]["min_gpus"], torchs["ddp"]["max_batch"]) == (None, None)  # every GPU holds everything
    asked = ["--model", "meta-llama/Llama-2-7b-hf", "--gpu", "24GB", "--batch-size", "1", "--strategies", "zero3"]
    offered = rows(capsys, "plan", *asked)["zero3"]
    assert "CPU" in offered["smallest_change"]
    assert offered["smallest_change_host_bytes_per_node"] > 12 * 6_738_415_616  # fp32 master and two moments


# ------------------------------------------------------------------ whole screens

SEVEN_B = ["--model", "meta-llama/Llama-2-7b-hf"]
SEVENTY_B = ["--model", "meta-llama/Llama-2-70b-hf", "--num-gpus", "8", "--gpu", "80GB", "--seq-length", "4096"]
SCREENS = {
    "all, in nodes of four GPUs": ["--gpu", "24GB", "--min-gpus", "--gpus-per-node", "4"],
    "some, others tightly": [*SEVEN_B, "--num-gpus", "2", "--host-memory", "512", "--max-batch"],
    "all tightly": [*SEVEN_B, "--num-gpus", "2", "--strategies", "zero2", "zero1"],
    "one, and the host is nearly full": [*SEVEN_B, "--num-gpus", "2", "--gpu", "24GB", "--host-memory", "64"],
    "nothing, with what each row needs": [*SEVENTY_B, "--min-gpus", "--verbose"],
    "nothing, and nothing helps": ["--gpu", "1GB", "--strategies", "zero3", "nvme"],
    "a host that is too small": [*SEVEN_B, "--num-gpus", "8", "--host-memory", "20", "--min-gpus"],
    "a host that is far too small": [*SEVEN_B, "--num-gpus", "8", "--host-memory", "1"],
    "GPUs too small without offload, the host with it": [*SEVEN_B, "--num-gpus", "2", "--gpu", "24GB",
                                                         "--host-memory", "32"],
    "what was offered does fit": [*SEVENTY_B, "--activation-checkpointing"],
}  # fmt: skip


@pytest.mark.parametrize("case", SCREENS)
def test_the_answer_and_the_table(case: str, snapshot: SnapshotAssertion) -> None:
    """Read them when they change: the sentence answers the question, and each number follows from the formulas.

    No line is wider than the terminal, and no word is lost there.
    """
    arguments = ["plan", *SCREENS[case]]
    plan, _ = predict_plan(plan_options(**parse(arguments)[1]))
    shown = plan_lines(plan, 140, verbose="--verbose" in arguments)
    assert "".join(f"{line}\n" for line in shown) == snapshot

    def words(lines: Sequence[str]) -> set[str]:
        return {word.rstrip(",:;") for line in lines for word in line.split()}

    for width in (1, 80):
        narrow = [*plan_lines(plan, width, verbose=True)]
        assert max(map(len, narrow)) <= max(width, 80)  # the table of categories takes nearly 80
        of_notes = set("to fit use a wider terminal also shows Largest part, GB".split())
        assert words(narrow) - of_notes <= words([*plan_lines(plan, 10_000, verbose=True)])


def test_activations_that_could_not_be_counted_leave_the_answer_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    find_profile = trial_predictions.profile_model

    def without_activations(*arguments: Any, **keywords: Any) -> Any:
        return replace(find_profile(*arguments, **keywords), activations={}, unknown="its forward pass failed")

    monkeypatch.setattr(trial_predictions, "profile_model", without_activations)
    asked = [*SEVEN_B, "--num-gpus", "2", "--strategies", "zero0", "zero3"]
    assert text(capsys, *asked, "--min-gpus", "--max-batch") == snapshot
    assert text(capsys, *asked, "--gpu", "16GB") == snapshot


def test_a_stream_of_ascii_gets_ascii_and_a_preset_needs_no_torch_and_no_process() -> None:
    program = (
        "import subprocess, sys\n"
        "def refuse(*_a, **_k): raise AssertionError('a process was started')\n"
        "subprocess.run = subprocess.Popen = refuse\n"
        "from ds_bench.cli.commands import main\n"
        "assert main(['plan', '--max-batch', '--min-gpus', '--seq-length', '1', '--gpu', '9000GB']) == 0\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & sys.modules.keys()\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 x 9,000 GB: 7 fit;")
    assert ">= 65,536" in done.stdout  # where the search ends
    assert "?" not in done.stdout


# ------------------------------------------------------------------ files, models, refusals


def test_a_file_is_predicted_like_a_strategy_and_what_it_ignores_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The formulas do not cover AutoTP: predicted as plain ZeRO-1, it would be called the simplest row that fits."""
    zero = {"stage": 2, "reduce_bucket_size": "auto", "cpu_offload": True}
    fine, refused, unknown = (tmp_path / f"{name}.json" for name in ("mine", "old", "tp"))
    fine.write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": zero, "log": 1}))
    refused.write_text(json.dumps({"zero_optimization": {"mics_shard_size": 2}}))
    unknown.write_text(json.dumps({"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}))
    files = [str(fine), str(refused), str(unknown)]
    assert main([*LLAMA, "--configs", *files, "--strategies", "zero2_offload", "--json"]) == 1
    captured = capsys.readouterr()
    found = {row["strategy"]: row for row in json.loads(captured.out)}
    assert list(found) == ["zero2_offload", "mine"]
    assert found["mine"]["gpu_total_bytes"] < found["zero2_offload"]["gpu_total_bytes"]  # its bucket is smaller
    assert sum(found["mine"]["host_bytes_per_node"].values()) > 80e9  # the optimizer is offloaded
    assert "note: mine: left out of the copy that runs: log, which DeepSpeed 0.19.8 does not read" in captured.err
    assert "note: not predicted: old: zero_optimization.mics_shard_size: the feature was removed" in captured.err
    assert "note: not predicted: tp: the formulas do not cover AutoTP" in captured.err
    assert main([*LLAMA, "--configs", str(refused)]) == 2


def test_what_is_not_counted_leaves_the_range_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ZenFlow's buffers come on top; Muon's states are counted as Adam's and take less."""
    offloaded = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    blocks: dict[str, dict[str, Any]] = {
        "zenflow": {"zero_optimization": {**offloaded, "zenflow": {"topk_ratio": 0.1, "update_interval": 4}}},
        "muon": {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
    }
    files = [tmp_path / f"{name}.json" for name in blocks]
    for file, block in zip(files, blocks.values(), strict=True):
        file.write_text(json.dumps({"bf16": {"enabled": True}, **block}))
    asked = ["--model", "gpt2-xl", "--num-gpus", "2", "--configs", *map(str, files)]
    found = rows(capsys, "plan", *asked)
    assert {name: row["verdict"] for name, row in found.items()} == {"zenflow": "not known", "muon": "fits"}
    assert found["zenflow"]["gpu_reserved_bytes"] is None
    assert found["muon"]["gpu_reserved_bytes"] > found["muon"]["gpu_least_bytes"]
    assert rows(capsys, "plan", *asked, "--gpu", "1GB")["zenflow"]["verdict"] == "does not fit"
    shown = text(capsys, *asked[:4], "--configs", str(files[0]))
    assert "the prediction leaves out ZenFlow's buffers" in shown
    assert "–? GB per GPU" in shown


def test_varying_lengths_widen_the_range_and_are_stated(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "gpt2-xl", "--num-gpus", "2", "--seq-length", "1024", "--strategies", "zero2", "--quick"]
    constant, varying = (rows(capsys, "plan", *asked, *more)["zero2"] for more in ((), ("--varying-lengths",)))
    assert (constant["varying_lengths"], varying["varying_lengths"]) == (False, True)
    assert varying["gpu_least_bytes"] == constant["gpu_least_bytes"]
    assert varying["gpu_reserved_bytes"] == 2 * constant["gpu_reserved_bytes"]
    assert "4 × up to 1,024 tokens" in text(capsys, *asked, "--varying-lengths")


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
    assert (held["parameters"], held["optimizer_states"]) == (2 * (2048 * 2048 + trained), 12 * trained)
    assert main(["plan", "--model-factory", "own_parts:none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "own_parts:none: every parameter is frozen" in line


def test_bf16_on_a_card_without_it_and_questions_without_an_answer(
    capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for flags, code, words in (
        (
            ["--gpu", "V100-32GB", "--strategies", "zero1"],
            0,
            ["V100-32GB has no bf16 units, and ZeRO-1 would be Unsupported"],
        ),
        (["--gpu", "V100-32GB", "--strategies", "zero1", "--precision", "fp16"], 0, []),
        (["--gpu", "H1000"], 2, ["H1000", "H100"]),
        (["--num-gpus", "1000000000"], 2, ["1000000000", "100000"]),
        (["--seq-length", "2000"], 2, ["2000", "1024"]),
        (["--batch-size", "99999999999999"], 2, ["99999999999999"]),
        (
            ["--model", "Llama-9-1B"],
            2,
            ["Unknown model 'Llama-9-1B'", "Did you mean meta-llama/Llama-3.2-1B", "--online"],
        ),
    ):
        with subtests.test(" ".join(flags)):
            assert main(["plan", *flags]) == code
            error = capsys.readouterr().err
            assert len(error.splitlines()) == bool(words), error
            assert all(word in error for word in words), error


# ------------------------------------------------------------------ axes, adapters, the host, files


def test_an_axis_makes_rows_and_its_loss_is_proposed_first_where_logits_dominate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", "--model", "Llama-3.1-8B", "--num-gpus", "8", "--seq-length", "32768", "--batch-size", "1",
             "--activation-checkpointing", "--strategies", "zero2", "zero0"]  # fmt: skip
    found = rows(capsys, *asked, "--axis", "loss=model,tiled,liger", "--axis", "overlap_comm=true")
    assert list(found) == [
        *(f"zero2+loss={name}+overlap_comm=true" for name in ("model", "tiled", "liger")),
        *(f"zero0+loss={name}" for name in ("model", "tiled", "liger")),
    ]
    model, tiled, liger = list(found.values())[:3]
    logits = 32768 * 128_256  # a log-probability of 4 bytes is kept and two more tensors of that size at the peak
    saved = sum(model["gpu_bytes"].values()) - sum(tiled["gpu_bytes"].values())
    assert 8 * logits < saved <= 12 * logits
    assert liger["verdict"] == tiled["verdict"] == "fits"
    assert rows(capsys, *asked)["zero2"]["smallest_change"] == "tiled loss (--axis loss=tiled)"
    short = rows(capsys, *asked, "--seq-length", "512", "--gpu", "20GB")["zero2"]
    assert "loss" not in (short["smallest_change"] or "")
    assert main([*asked, "--axis", "loss=best"]) == 2


def test_host_memory_is_fullest_while_every_rank_loads_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """16 GPUs in nodes of 8: below stage 3, eight copies of 13.5 GB per node; with zero.Init, one."""
    asked = ["plan", "--model", "meta-llama/Llama-2-7b-hf", "--num-gpus", "16", "--gpus-per-node", "8"]
    found = rows(capsys, *asked, "--strategies", "zero2", "zero3", "cpu_full", "--host-memory", "100")
    weights, process = 2 * 6_738_415_616, round(1.5 * 2**30)
    loads = {name: row["host_bytes_per_node_by_phase"]["load"] for name, row in found.items()}
    once = weights + 8 * process
    assert loads == {"zero2": 8 * (weights + process), "zero3": once, "cpu_full": once}
    assert (found["zero2"]["verdict"], found["zero2"]["exceeded"]) == ("does not fit", ["host_memory"])
    assert max(found["cpu_full"]["host_bytes_per_node_by_phase"].values()) > once


def test_pinned_buffers_are_rounded_as_torch_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["plan", "--model", "meta-llama/Llama-2-7b-hf", "--num-gpus", "8", "--strategies", "cpu_full"]
    rounding = {}
    for conf in ("", "expandable_segments:True,pinned_max_round_threshold_mb:1"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
        rounding[conf] = rows(capsys, *asked)["cpu_full"]["host_bytes_per_node"].get("pinned_rounding", 0)
    without, limited = rounding.values()
    assert without > 2**30 > 1000 > limited


def test_expandable_segments_reserve_less(capsys: pytest.CaptureFixture[str]) -> None:
    """The axis of the allocator sets a variable of the row's ranks, and the replay follows it."""
    asked = ["plan", "--model", "meta-llama/Llama-2-7b-hf", "--num-gpus", "8", "--strategies", "zero2", "--exact"]
    found = rows(capsys, *asked, "--axis", "allocator=default,expandable_segments")
    reserved = {name: row["gpu_reserved_bytes"] for name, row in found.items()}
    assert {row["method"] for row in found.values()} == {"replay"}
    assert reserved["zero2+allocator=expandable_segments"] < 0.95 * reserved["zero2+allocator=default"]


def test_every_row_that_fits_is_exported_and_a_tight_one_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["plan", "--model", "gpt2-xl", "--num-gpus", "16", "--gpu", "10GB", "--batch-size", "1"]
    asked += ["--strategies", "zero0", "zero3", "nvme", "fsdp2", "--export", str(tmp_path / "out")]
    found = rows(capsys, *asked, "--axis", "overlap_comm=false")
    verdicts, methods = (
        {name.replace("+", "_").replace("=", "_"): row[field] for name, row in found.items()}
        for field in ("verdict", "method")
    )
    assert verdicts.pop("fsdp2") == "fits"
    assert sorted(verdicts.values()) == ["does not fit", "fits", "tight"]
    folders = {folder.name.removeprefix("ds_config_"): folder for folder in (tmp_path / "out").iterdir()}
    assert folders.keys() == {name for name, verdict in verdicts.items() if verdict != "does not fit"}
    for name, folder in folders.items():
        words = (folder / "README.md").read_text().split()
        assert ("tight," in words) == (verdicts[name] == "tight")
        assert ("formula," in words) == (methods[name] == "rule")
        names = {"ds_config.json", "ds_config_trainer.json", "ds_config_accelerate.json", "accelerate.yaml"}
        assert {file.name for file in folder.iterdir()} == {*names, "README.md"}
        config = json.loads((folder / "ds_config.json").read_text())
        assert config["train_batch_size"] == 16
        assert "2 nodes" in (folder / "README.md").read_text()
        monkeypatch.chdir(folder)
        assert main(["check", "ds_config.json", "--num-gpus", "16"]) == 0
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert main([*asked[:-1], str(tmp_path / "file")]) == 2
    assert "can write to" in capsys.readouterr().err
