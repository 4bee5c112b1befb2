"""check and rows of files agree with the installed DeepSpeed: on public configurations, and key by key.

``test_older_versions`` runs the second in environments with older versions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ds_bench.config import deepspeed_config, deepspeed_keys, lint, validation
from ds_bench.config.automatic_values import TrainingFacts, fill_in
from ds_bench.config.configuration_file_rows import FileRowMaker
from ds_bench.config.configuration_files import (
    ConfigurationFile,
    MissingFileError,
    parse_hjson,
    read_configuration_file,
)
from ds_bench.config.deepspeed_config import nested, overlay
from ds_bench.config.rules import TRAINING_STARTS, WRONG_TRAINING
from ds_bench.config.spec import Configuration, Placement
from ds_bench.launch import rank_environment
from tests.support import fakes
from tests.support.lint_cases import CASES, CLEAN
from tests.support.shared_files import shared_files

_ASK = """
import json, logging, sys
out = sys.stdout; sys.stdout = sys.stderr
logging.disable(logging.CRITICAL)
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig
if "one-rank" in sys.argv:
    comm.get_rank, comm.get_world_size = lambda *_: 0, lambda *_: 1
def read(config):
    try:
        read = DeepSpeedConfig(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    models = ("zero_config", "bfloat16_config", "float16_config")
    blocks = {name: getattr(read, name).model_dump() for name in models if hasattr(read, name)}  # two since 0.17
    for old in ("cpu_offload", "cpu_offload_param"):  # replaced by what it stands for
        blocks["zero_config"].pop(old, None)
    names = ["optimizer_name", "optimizer_params", "scheduler_name", "scheduler_params", "gradient_clipping"]
    names += ["torch_autocast_enabled", "grad_accum_dtype"]
    return {**blocks, **{name: getattr(read, name, None) for name in names}}
print(json.dumps([read(config) for config in json.load(sys.stdin)], default=str), file=out)
"""
_INITIALIZE = """
import json, sys
out = sys.stdout; sys.stdout = sys.stderr
import deepspeed, torch
deepspeed.init_distributed(dist_backend="gloo", init_method=f"file://{sys.argv[1]}/meet", rank=0, world_size=1)
def error_of(config):
    model = torch.nn.Linear(4, 4, bias=False)  # of a bias Muon would have Adam, and compile it
    try:
        deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    except Exception as error:
        return str(error) or type(error).__name__
    return None
print(json.dumps([error_of(config) for config in json.load(sys.stdin)]), file=out)
"""
_SAMPLES = (None, True, 1, -1, 1.5, 5e8, "text", "5", ["text"], {})
_WHOLE_NUMBERS = (
    *("wall_clock_breakdown", "flops_profiler.enabled", "checkpoint.parallel_write.pipeline_stage"),
    "sequence_parallel_size",
)
"""Switches that DeepSpeed reads as the numbers 0 and 1, where check accepts any number, and what 0.16 divides by."""
_FACTS = TrainingFacts(num_gpus=1, batch_size=2, precision="bf16", hidden_size=128, training_steps=4)
_CUDA = Placement(accelerator="cuda", nvme_path="/nvme")


def ask_deepspeed(configs: Sequence[dict[str, Any] | str], *arguments: str) -> list[Any]:
    """What DeepSpeed reads in each configuration or file, or its error as text.

    With the argument ``one-rank`` it checks the batch for a job of one rank.
    """
    for config in configs:
        if isinstance(config, dict) and isinstance(config.get("aio"), dict):
            config["aio"].pop("use_gds", None)  # refused on the CPU accelerator only
    return answers_of(_ASK, configs, *arguments, DS_ACCELERATOR="cpu")


def answers_of(program: str, configs: Sequence[Any], *arguments: str, **variables: str) -> list[Any]:
    """The answers of a program to configurations, as JSON in its last line."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def disagreements(configs: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """What DeepSpeed refuses and check does not, or the other way round."""
    differing, answers = [], ask_deepspeed([config for _, config in configs], "one-rank")
    for (name, config), answer in zip(configs, answers, strict=True):
        found = lint.check_config(config, num_gpus=1)
        wrong = {rule.name for rule in WRONG_TRAINING}  # which DeepSpeed does not see
        errors = [
            each.reason for each in found if each.level == "error" and each.rule not in wrong and not each.stops_when
        ]
        if isinstance(answer, str) != bool(errors):
            differing.append(f"{name}: DeepSpeed says {answer}, check says {errors}")
    return differing


def test_key_by_key_on_values_of_every_type() -> None:
    paths, configs = set(), []
    for version in deepspeed_keys.MINOR_VERSIONS:  # a key of another version is unknown to this one
        with deepspeed_keys.use_version(version):
            blocks, removed = deepspeed_keys.blocks(), deepspeed_keys.removed_keys()
            paths |= {f"{block}.{key}".lstrip(".") for block, facts in blocks.items() for key in facts["keys"]}
    # How older versions refused values of what is gone today nobody needs to know.
    gone = removed if deepspeed_keys.is_before("0.19") else set()
    for path in sorted(paths):
        if path == "aio.use_gds" or path.partition(".")[0] in gone:
            continue
        stage = {"zero_optimization": {"stage": 2}} if path.startswith("zero_optimization.") else {}
        for value in _SAMPLES:
            if path not in _WHOLE_NUMBERS or value not in (-1, 1.5, 5e8):
                config = deepspeed_config.merge({"train_batch_size": 1, **stage}, nested(path, value))
                configs.append((f"{path} = {value!r}", config))
    assert len(configs) > 3000
    assert disagreements(configs) == []


def test_on_public_configurations_once_auto_is_filled_in() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in shared_files("real_configs", "*.json")}
    filled = [(name, fill_in(parse_hjson(text), _FACTS)[0]) for name, text in texts.items()]
    assert disagreements(filled) == []


def published() -> tuple[list[ConfigurationFile], list[str]]:
    """Every published file, and the names of the JSON files that some name and that are not there."""
    files, absent = [], []
    for path in shared_files("real_configs", "*"):
        if path.suffix != ".csv":
            try:
                files.append(read_configuration_file(path))
            except MissingFileError as error:
                absent.append(error.reason.split()[1])
    assert len(files) + len(absent) == 96
    return files, absent


def as_the_trainer_gives_it(file: ConfigurationFile) -> dict[str, Any]:
    batch = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    return {**fill_in(file.config, _FACTS)[0], **batch}


def as_it_is_run(row: Configuration) -> dict[str, Any]:
    work = row.applied_to(fakes.workload(batch_size=2))
    return deepspeed_config.complete_config(row.deepspeed_config, work, _CUDA, torch_adam=False, largest_parameter=None)


def test_only_what_deepspeed_refuses_is_refused_and_a_row_trains_what_deepspeed_reads_in_its_file() -> None:
    files, absent = published()
    rows = [FileRowMaker(facts=_FACTS).make(file) for file in files]
    answers = ask_deepspeed([*map(as_the_trainer_gives_it, files), *map(as_it_is_run, rows), *absent])
    assert all(isinstance(answer, str) for answer in answers[2 * len(files) :])
    trained = 0
    for file, row, theirs, ours in zip(files, rows, answers, answers[len(files) : 2 * len(files)], strict=False):
        if validation.unsupported_reason(row, _CUDA) is not None:
            assert isinstance(theirs, str) or TRAINING_STARTS in (row.refusal or ""), (file.name, theirs)
            continue
        assert isinstance(theirs, dict), (file.name, theirs)
        if theirs["zero_config"]["stage"] != 3:
            theirs["zero_config"]["offload_param"] = None  # read at stage 3 only
        # What the file leaves open and a row fills in: optimizer, precision, the buffers of NVMe offload.
        left_open = [] if theirs["optimizer_name"] is not None else ["optimizer_name", "optimizer_params"]
        if not any(theirs[block]["enabled"] for block in ("bfloat16_config", "float16_config")):
            written = [file.config.get(name, {}).get("enabled", "auto") for name in ("bf16", "fp16")]
            left_open += ["bfloat16_config", "float16_config"] if "auto" in written else []
        left_open += ["zero_config"] if "nvme" in json.dumps(theirs["zero_config"]) else []
        decided = theirs.keys() - left_open
        assert {name: ours[name] for name in decided} == {name: theirs[name] for name in decided}, file.name
        trained += 1
    assert trained == 76


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_deepspeed_stops_where_an_error_says_that_it_does_when_training_starts(tmp_path: Path) -> None:
    # torch's Adam refuses the same arguments as DeepSpeed's, which would be compiled for minutes.
    adam = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    cases = [(rule, overlay(CLEAN, change)) for rule, change in CASES]
    stopping = {
        rule: overlay(config, adam) if config.get("optimizer", adam["optimizer"])["type"] == "AdamW" else config
        for rule, config in cases
        if any(finding.stops_when == TRAINING_STARTS for finding in lint.check_config(config))
    }
    # fp16 is refused on this accelerator, which would hide what stops them elsewhere.
    files = {
        file.name: {**as_the_trainer_gives_it(file), "fp16": {"enabled": False}}
        for file in published()[0]
        if TRAINING_STARTS in (FileRowMaker(facts=_FACTS).make(file).refusal or "")
    }
    assert len(stopping) > 14
    assert len(files) == 4
    variables = rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ)
    variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    configs = [adam | CLEAN, *stopping.values(), *files.values()]
    clean, *errors = answers_of(_INITIALIZE, configs, str(tmp_path), **variables)
    assert clean is None
    assert [rule for rule, error in zip(stopping, errors, strict=False) if error is None] == []
    known = ("'max_grad_norm' is not supported", "ZeroOneAdam is not a supported DeepSpeed Optimizer")
    assert [error for error in errors[len(stopping) :] if not (error or "").startswith(known)] == []
