"""The program in an environment with older DeepSpeed and Transformers, and with the torch that is here.

``OLDER_STACK`` names other versions: DeepSpeed's, Transformers' and, if need be, torch's (``make test-lowest``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_trials import ROOT
from tests.support.simulated_card import CardPlan, write_plans

pytestmark = pytest.mark.timeout(1800)  # ops are built for the new environment
DEEPSPEED, TRANSFORMERS, *TORCH = os.environ.get("OLDER_STACK", "0.18.9 4.57.6").split()
OF_TRANSFORMERS_4 = (
    "tokenizers<=0.23.0" if TRANSFORMERS >= "4.56" else "tokenizers<0.22",
    "huggingface_hub<1",
    "requests",
)
PACKAGES = (
    *(OF_TRANSFORMERS_4 if TRANSFORMERS < "5" else ()),
    *("setuptools>=77.0.3", "wheel"),  # a new environment's are older, and come first on its path
)
"""What these versions of Transformers need in versions of their own, and what builds DeepSpeed."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the older pair before the packages that are here."""
    folder = tmp_path_factory.mktemp("older")
    venv.create(folder, with_pip=True)
    made = folder / "bin" / "python"
    site = subprocess.check_output([made, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    Path(site, "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for version in TORCH:  # with their dependencies, such as CUDA's libraries
        wanted = [f"torch=={version}", f"transformers=={TRANSFORMERS}"]
        subprocess.run([made, "-m", "pip", "install", "--quiet", "--upgrade", *wanted], check=True)
        # Triton needs a card's driver as soon as it is imported; a simulated card has none, and CPU builds no Triton.
        subprocess.run([made, "-m", "pip", "uninstall", "--quiet", "--yes", "triton"], check=True)
    pip = [made, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*pip, *PACKAGES, f"transformers=={TRANSFORMERS}"], check=True, env=environment)
    subprocess.run([*pip, "--no-build-isolation", f"deepspeed=={DEEPSPEED}"], check=True, env=environment)
    return made


def records(python: Path, folder: Path, flags: str, **variables: str) -> list[dict[str, Any]]:
    """Trains rows; all must succeed."""
    command = [python, ROOT / "zero_stage_comparison.py", "--model", "tiny", "--seq-length", "64", "--num-steps", "3"]
    command += [*flags.split(), "--output-dir", folder]
    path = f"{ROOT / 'tests/support/compiler'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "DS_BENCH_OPS_CACHE": str(python.parents[1]), "PATH": path, **variables}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("runs/*/records.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["outcome"]["status"] for each in found] == ["Success"] * len(found)
    return found


def kinds_of_caveats(folder: Path) -> dict[str, set[str]]:
    (flat,) = folder.glob("zero_comparison_*.json")
    return {row["strategy"]: {each["kind"] for each in row["caveat_list"]} for row in json.loads(flat.read_text())}


def test_every_stage_and_offload_train_and_hold_what_was_predicted(python: Path, tmp_path: Path) -> None:
    flags = "--num-gpus 2 --batch-size 2 --strategies zero0 zero1 zero2 zero3 zero3_offload"
    for record in records(python, tmp_path, flags):
        name, ranks = record["trial"]["configuration"]["name"], record["ranks"]
        predicted = record["trial"]["prediction"]["ledger"]["cpu"]
        if name != "zero0" or DEEPSPEED >= "0.18.6":  # before, stage 0 in bf16 had other wrappers
            for category in ("parameters", "gradients", "optimizer_states"):
                counted = max(rank["ledger"]["cpu"][category] for rank in ranks)
                assert counted == pytest.approx(predicted[category], abs=200), (name, category)
        assert ranks[0]["deepspeed_version"] == DEEPSPEED
        assert ranks[0]["weight_change"], name
    doubtful = {name for name, kinds in kinds_of_caveats(tmp_path).items() if "may_train_wrongly" in kinds}
    assert doubtful == ({"zero2"} if DEEPSPEED == "0.18.9" else set())


@pytest.mark.skipif(DEEPSPEED != "0.17.6", reason="this version trains incorrectly with accumulation")
def test_wrong_training_is_a_caveat_of_the_row_and_shows_in_its_loss(python: Path, tmp_path: Path) -> None:
    records(python, tmp_path, "--num-gpus 2 --batch-size 2 --stages 1 2 3 --grad-accum 4 --precision fp32")
    both = {"trained_wrongly", "loss_differs"}
    found = {name: kinds & both for name, kinds in kinds_of_caveats(tmp_path).items()}
    assert found == {"zero1": set(), "zero2": both, "zero3": set()}


def test_check_refuses_what_this_version_refuses(python: Path) -> None:
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "key_by_key"]
    command += [ROOT / "tests" / "integration" / "test_check_against_deepspeed.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grouped_query_attention_trains_on_simulated_cards(python: Path, tmp_path: Path) -> None:
    """With a ledger, step parts and counted FLOPs: each of them reads internals of torch, DeepSpeed or Transformers."""
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    (model / "config.json").write_text(json.dumps(config))
    variables = write_plans(tmp_path / "machine", CardPlan(), CardPlan())
    flags = f"--model {model} --accelerator cuda --num-gpus 2 --batch-size 2 --stages 0 3"
    for record in records(python, tmp_path, flags, **variables):
        assert "failed" not in str(record["caveats"]), record["caveats"]
        for rank in record["ranks"]:
            assert rank["device_name"] == "NVIDIA H100 80GB HBM3"
            assert rank["ledger"]["gpu"]["parameters"] > 0
            assert rank["gpu_peak_bytes"] > 0
            assert rank["phase_seconds"].keys() == {"forward", "backward", "step"}
            assert rank["forward_backward_flops"] > 0
