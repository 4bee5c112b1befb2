"""Every axis that acts on the CPU accelerator is shown by two real ranks to change what it says, and to train the same.

The records show it: the configuration that DeepSpeed resolved, the ledger, which must agree with the predicted one
cell by cell, the class of the optimizer, and the losses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench import planner
from ds_bench.analysis.loss_parity import compare_losses
from ds_bench.analysis.row import make_run
from ds_bench.config.axes import AXES, other_arithmetic
from ds_bench.config.deepspeed_config import paths_of
from ds_bench.config.identity import work_key
from ds_bench.config.spec import Placement, Trial
from ds_bench.launch import Limits
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.models.lookup import ResolvedModel
from ds_bench.prediction.model_profile import find_profile
from ds_bench.prediction.predicted_memory import predict
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.built_models import facts_from_config
from tests.support.real_trials import SHORT

pytestmark = [pytest.mark.slow, pytest.mark.deepspeed]

SIZES = ["--seq-length", "32", "--num-steps", "3", "--warmup-steps", "1", "--dropout", "0"]
OFFLOADED = ["--stage", "2", "--strategies", "cpu_optimizer"]
CASES: Mapping[str, list[list[str]]] = {
    "activation_checkpointing": [["--stages", "2", "--axis", "activation_checkpointing=true,false"]],
    "micro_batch": [["--stages", "2", "--axis", "micro_batch=1,2"]],
    "grad_accum": [["--stages", "1", "--axis", "grad_accum=1,2"]],
    "precision": [["--stages", "2", "--axis", "precision=bf16,fp32"]],
    "torch_autocast": [["--stages", "1", "3", "--axis", "torch_autocast=off,bf16"]],
    "bf16_states": [
        ["--stages", "1", "3", "--axis", "bf16_states=off,all"],
        [*OFFLOADED, "--axis", "bf16_states=off,master,all"],
    ],
    "overlap_comm": [["--stages", "1", "2", "3", "--axis", "overlap_comm=true,false"]],
    "buffers": [["--stages", "2", "3", "--axis", "buffers=default,trainer_auto,small_buffers"]],
    "reduce_bucket_size": [["--stages", "2", "3", "--axis", "reduce_bucket_size=auto,1e6"]],
    "allgather_bucket_size": [["--stages", "2", "--axis", "allgather_bucket_size=1e5,5e8"]],
    "reduce_scatter": [["--stages", "2", "3", "--axis", "reduce_scatter=true,false"]],
    "contiguous_gradients": [["--stages", "2", "3", "--axis", "contiguous_gradients=true,false"]],
    "round_robin_gradients": [["--stages", "1", "2", "--axis", "round_robin_gradients=true,false"]],
    "communication_data_type": [["--stages", "2", "3", "--axis", "communication_data_type=bf16,fp32"]],
    "prefetch": [["--stages", "3", "--axis", "prefetch=0,auto"]],
    "persistence": [["--stages", "3", "--axis", "persistence=0,auto,1e5"]],
    "live_parameters": [["--stages", "3", "--axis", "live_parameters=0,1e9"]],
    "reuse_distance": [["--stages", "3", "--axis", "reuse_distance=0,1e9"]],
    "allgather_sequential": [["--stages", "3", "--axis", "allgather_sequential=true,false"]],
    "sub_group_size": [["--stages", "3", "--axis", "sub_group_size=1e5,1e9"]],
    "leaf_modules": [["--stages", "3", "--axis", "leaf_modules=default,off"]],
    "hpz": [["--stages", "3", "--axis", "hpz=1,2"]],
    "offload_ratio": [["--strategies", "cpu_optimizer", "--axis", "offload_ratio=0.5,1"]],
    "optimizer": [["--stages", "2", "--axis", "optimizer=adamw,torch_fused_adamw,adam,adagrad"]],
    "nvme_pipeline": [["--strategies", "nvme", "--axis", "nvme_pipeline=off,both"]],
    "aio_block_size": [["--strategies", "nvme", "--axis", "aio_block_size=65536,1048576"]],
    "aio_queue_depth": [["--strategies", "nvme", "--axis", "aio_queue_depth=4,8"]],
}
"""Axis → rows that it is shown in, each as the flags of a script."""
LEDGER = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations")
NOT_PREDICTED = {"torch_autocast": "activations"}
"""Axes whose memory is predicted in part, with what is not."""
SAME_ON_CPU = {"offload_ratio"}
"""Axes that move bytes between the GPU and the host, which are one on the CPU accelerator."""


def placement(folder: Path) -> Placement:
    return Placement(accelerator="cpu", num_gpus=2, nvme_path=str(folder))


def swapped_model() -> ResolvedModel:
    """Large enough for its tensors to be swapped, which those below 1 MiB are not."""
    sizes = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    facts = facts_from_config("swapped", "llama", {**sizes, **heads, "tie_word_embeddings": True, "use_cache": False})
    same = ("config", "largest_parameter", "max_positions", "hidden_size")
    model = replace(fakes.resolved_model(), name="swapped", model_type="llama", facts=facts)
    return replace(model, **{name: getattr(facts, name) for name in same})


def trials_of(flags: list[str], folder: Path) -> list[Trial]:
    family = "offload" if "--strategies" in flags else "zero"
    batch = [] if any("micro_batch" in flag for flag in flags) else ["--batch-size", "2"]
    nvme = ["--nvme-path", str(folder)] if "nvme" in flags else []
    options = fakes.options(family, *flags, *SIZES, *batch, *nvme)
    model, place = swapped_model() if nvme else fakes.resolved_model(), placement(folder)
    builder = planner.ConfigurationBuilder(options=options, make_config=fakes.make_config, model=model, placement=place)
    rows = [builder.build(row, options.batch_size) for row in planner.requested_rows(options)]
    return planner.make_trials(options, model, place, rows)


@pytest.fixture(scope="module")
def train(server: Callable[[Limits], WarmLauncher], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains a trial; once where trials of several axes differ in nothing but their name."""
    records: dict[str, TrialRecord] = {}

    def go(trial: Trial) -> TrialRecord:
        assert trial.unsupported is None
        key = work_key(trial, leave_out=("name",))
        if key not in records:
            records[key] = server(SHORT).launch(trial, tmp_path_factory.mktemp("trial"), lambda _progress: None)
        record = replace(records[key], trial=trial)
        assert record.outcome.success, record.outcome
        return record

    return go


def resolved_differences(a: TrialRecord, b: TrialRecord) -> set[str]:
    """Return the paths where the resolved configurations differ."""
    first, second = (dict(paths_of(record.ranks[0].resolved_config)) for record in (a, b))
    return {path for path in first.keys() | second.keys() if first.get(path) != second.get(path)}


def ledger(record: TrialRecord) -> Mapping[str, int]:
    """Bytes by category, each of the rank with the most."""
    rows = [rank.ledger.get("cpu", {}) for rank in record.ranks]
    return {name: max(row.get(name, 0) for row in rows) for name in LEDGER}


def assert_predicted(trial: Trial, record: TrialRecord, axis: str) -> None:
    """The predicted categories agree within 2 %, activations within 5 %; gradients of stage 1 are counted half-way."""
    facts = fakes.resolved_model().facts
    if trial.workload.model != "tiny" or facts is None or axis in NOT_PREDICTED:
        return
    profile = find_profile(facts, trial.workload.seq_length, accelerator="cpu", dropout=0.0)
    predicted = predict(profile, trial.workload, trial.placement, trial.ds_config).ledger["cpu"]
    measured = ledger(record)
    if trial.configuration.stage == 1:
        assert measured["gradients"] <= 1.02 * predicted["gradients"] <= 2.1 * measured["gradients"]
        measured = {**measured, "gradients": predicted["gradients"]}
    for name in LEDGER:
        close = pytest.approx(measured[name], rel=0.05 if name == "activations" else 0.02, abs=64)
        assert predicted.get(name, 0) == close, (trial.configuration.name, name)


@pytest.mark.parametrize(
    "axis", [pytest.param(name, marks=[pytest.mark.nvme] if AXES[name].offload == "nvme" else []) for name in CASES]
)
def test_an_axis_changes_what_it_says_and_trains_the_same(
    axis: str, train: Callable[[Trial], TrialRecord], tmp_path: Path
) -> None:
    changed: set[str] = set()
    for flags in CASES[axis]:
        rows = [(trial, train(trial)) for trial in trials_of(flags, tmp_path)]
        for trial, record in rows:
            assert_predicted(trial, record, axis)
        for (_, first), (_, second) in itertools.pairwise(rows):
            if first.trial.configuration.stage == second.trial.configuration.stage:
                assert resolved_differences(first, second) or first.trial.workload != second.trial.workload
                changed |= {name for name in LEDGER if ledger(first).get(name) != ledger(second).get(name)}
                same_class = first.ranks[0].optimizer_class == second.ranks[0].optimizer_class
                changed |= set() if same_class else {"optimizer"}
        # Rows of the same arithmetic train the same; others start at the same loss and stay finite.
        assert compare_losses([make_run(record) for _, record in rows]) == {}
        for trial, record in rows:
            losses = record.ranks[0].losses
            assert None not in losses
            if other_arithmetic(trial.configuration.axis_values):
                assert math.isclose(losses[0] or 0.0, math.log(1000), rel_tol=0.05)
    shown = {change for change in AXES[axis].changes if change in (*LEDGER, "optimizer")}
    assert axis in SAME_ON_CPU or changed & shown or not shown, f"of {shown} nothing changed, but {changed}"


def test_every_axis_is_shown_here_or_unsupported_on_the_cpu_with_a_reason() -> None:
    # tests/integration/test_worker_axes.py
    elsewhere = {name for name in AXES if AXES[name].group in ("Computation", "Data", "Host", "Parallel ranks")}
    assert {name for name, axis in AXES.items() if not axis.cuda_only} - elsewhere == CASES.keys()
