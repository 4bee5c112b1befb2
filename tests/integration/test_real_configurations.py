"""Published configurations, held against DeepSpeed itself: it refuses what is refused, a row trains what it reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config import deepspeed_config, validation
from ds_bench.config.automatic_values import TrainingFacts, fill_in
from ds_bench.config.configuration_file_rows import FileRowMaker
from ds_bench.config.configuration_files import ConfigurationFile, MissingFileError, read_configuration_file
from ds_bench.config.spec import Configuration, Placement
from tests.support import fakes
from tests.support.deepspeed_starts import errors_at_start
from tests.support.shared_files import shared_files

_ASK = """
import json, sys
out, sys.stdout = sys.stdout, sys.stderr
from deepspeed.runtime.config import DeepSpeedConfig
def read(config):
    if isinstance(config, dict) and "aio" in config:
        config["aio"]["use_gds"] = False  # which DeepSpeed refuses without CUDA
    try:
        read = DeepSpeedConfig(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    blocks = {name: getattr(read, name).model_dump() for name in ("zero_config", "bfloat16_config", "float16_config")}
    for old in ("cpu_offload", "cpu_offload_param"):  # replaced by what it stands for
        blocks["zero_config"].pop(old, None)
    names = ("optimizer_name", "optimizer_params", "scheduler_name", "scheduler_params", "gradient_clipping")
    return {**blocks, **{name: getattr(read, name) for name in (*names, "torch_autocast_enabled", "grad_accum_dtype")}}
print(json.dumps([read(config) for config in json.load(sys.stdin)], default=str), file=out)
"""
BATCH = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}


def ask_deepspeed(configs: Sequence[dict[str, Any] | str]) -> list[Any]:
    """What DeepSpeed reads in each configuration or file, or its error as text."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK], input=json.dumps(configs), capture_output=True, text=True, timeout=300, check=True
    )
    answers: list[Any] = json.loads(done.stdout)
    return answers


def as_the_trainer_gives_it(file: ConfigurationFile) -> dict[str, Any]:
    facts = TrainingFacts(batch_size=2, grad_accum=1, num_gpus=1, precision="bf16", hidden_size=128, training_steps=4)
    return {**fill_in(file.config, facts).config, **BATCH}


def as_it_is_run(row: Configuration) -> dict[str, Any]:
    workload = row.applied_to(fakes.workload(batch_size=2))
    return deepspeed_config.complete_config(
        row.deepspeed_config,
        workload,
        Placement(accelerator="cuda", nvme_path="/nvme"),
        torch_adam=False,
        largest_parameter=None,
    )


FACTS = TrainingFacts(num_gpus=1, batch_size=2, precision="bf16", hidden_size=128, training_steps=4)


def published() -> tuple[list[ConfigurationFile], list[str]]:
    """Every published file, and the names of the JSON files that some name and that are not there."""
    files, absent = [], []
    for path in shared_files("real_configs", "*"):
        if path.suffix != ".csv":
            try:
                files.append(read_configuration_file(path))
            except MissingFileError as error:
                absent.append(str(error).split()[3])
    assert len(files) + len(absent) == 96
    return files, absent


def refusal(row: Configuration) -> str | None:
    return validation.unsupported_reason(row, Placement(accelerator="cuda", nvme_path="/nvme"))


def test_only_what_deepspeed_refuses_is_refused_and_a_row_trains_what_deepspeed_reads_in_its_file() -> None:
    files, absent = published()
    rows = [FileRowMaker(facts=FACTS).make(file) for file in files]
    answers = ask_deepspeed([*map(as_the_trainer_gives_it, files), *map(as_it_is_run, rows), *absent])
    assert all(isinstance(answer, str) for answer in answers[2 * len(files) :])
    pairs = zip(answers[: len(files)], answers[len(files) : 2 * len(files)], strict=True)
    trained = 0
    for file, row, (theirs, ours) in zip(files, rows, pairs, strict=True):
        reason = refusal(row)
        if reason is not None:
            assert isinstance(theirs, str) or "DeepSpeed stops when training starts" in reason, (file.name, theirs)
            continue
        assert isinstance(theirs, dict), (file.name, theirs)
        if theirs["zero_config"]["stage"] != 3:
            theirs["zero_config"]["offload_param"] = None  # read at stage 3 alone
        left_open = _left_open(file, theirs)
        assert {**ours, **left_open} == {**theirs, **left_open}, file.name
        trained += 1
    assert trained == 76


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_deepspeed_stops_where_a_refusal_says_that_it_does_when_training_starts(tmp_path: Path) -> None:
    files = published()[0]
    reasons = {file.name: refusal(FileRowMaker(facts=FACTS).make(file)) or "" for file in files}
    stopped = [file for file in files if "DeepSpeed stops when training starts" in reasons[file.name]]
    # fp16 is refused on this accelerator, which would hide what stops them elsewhere.
    configs = [{**as_the_trainer_gives_it(file), "fp16": {"enabled": False}} for file in stopped]
    errors = errors_at_start(configs, tmp_path)
    assert len(errors) == 4
    for file, error in zip(stopped, errors, strict=True):
        known = ("'max_grad_norm' is not supported", "ZeroOneAdam is not a supported DeepSpeed Optimizer")
        assert (error or "").startswith(known), (file.name, error)


def _left_open(file: ConfigurationFile, read: dict[str, Any]) -> dict[str, Any]:
    """What the file leaves open and a row fills in: optimizer, precision, the buffers of NVMe offload."""
    names = [] if read["optimizer_name"] is not None else ["optimizer_name", "optimizer_params"]
    if not any(block["enabled"] for block in (read["bfloat16_config"], read["float16_config"])):
        written = [file.config.get(name, {}).get("enabled", "auto") for name in ("bf16", "fp16")]
        names += ["bfloat16_config", "float16_config"] if "auto" in written else []
    if "nvme" in json.dumps(read["zero_config"]):
        names.append("zero_config")
    return dict.fromkeys(names)
