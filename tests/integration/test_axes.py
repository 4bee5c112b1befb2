"""Every axis that acts on the CPU accelerator, trained by two real ranks at another value than its default.

A pairwise cover: a row sets several axes at once. DeepSpeed must have read each of them, the memory must be what is
predicted for all together, and rows of the same arithmetic must train the same. What one axis alone changes is in the
predictions, which unit tests check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.analysis.loss_parity import compare_losses
from ds_bench.analysis.row import make_run
from ds_bench.config.axes import AXES, changed_arithmetic
from ds_bench.config.deepspeed_config import paths_of
from ds_bench.config.spec import Placement, Trial
from ds_bench.models.lookup import ResolvedModel
from ds_bench.planning import requested_rows, trial_planner
from ds_bench.prediction.model_profile import find_profile, variant_of
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.built_models import facts_from_config
from tests.support.ledger_checks import check
from tests.support.real_trials import Train

pytestmark = [pytest.mark.slow, pytest.mark.deepspeed]

ROWS: Mapping[str, str] = {
    "stage 1": "zero1 overlap_comm=true round_robin_gradients=true buffers=small_buffers",
    "stage 1, no bucket": "zero1 overlap_comm=true contiguous_gradients=false",
    "stage 1 in fp32": "zero1 precision=fp32 grad_accum=2",
    "stage 1 under autocast": "zero1 torch_autocast=bf16",
    "stage 2": "zero2 overlap_comm=true reduce_bucket_size=1e6 allgather_bucket_size=1e5 reduce_scatter=false "
    "communication_data_type=fp32 activation_checkpointing=true",
    "stage 2, buffers": "zero2 buffers=trainer_auto contiguous_gradients=false round_robin_gradients=true",
    "stage 2, batch": "zero2 micro_batch=1 grad_accum=2",
    "stage 2, Adagrad": "zero2 optimizer=adagrad",
    "stage 2, fused AdamW": "zero2 optimizer=torch_fused_adamw overlap_comm=true",
    "stage 2, offloaded": "cpu_optimizer bf16_states=all overlap_comm=true",
    "stage 3": "zero3 overlap_comm=false reduce_bucket_size=auto prefetch=0 persistence=0 live_parameters=0 "
    "reuse_distance=0 sub_group_size=1e5 reduce_scatter=false",
    "stage 3, gathering": "zero3 allgather_sequential=true hpz=2 contiguous_gradients=false leaf_modules=off "
    "communication_data_type=fp32 activation_checkpointing=true buffers=trainer_auto",
    "stage 3, bf16 states": "zero3 bf16_states=all reduce_bucket_size=1e6",
    "stage 3, ratio": "cpu_optimizer3 offload_ratio=0.5",
    "NVMe": "nvme nvme_pipeline=both aio_block_size=65536 aio_queue_depth=4",
}
"""Row and values of axes."""
SIZES = ["--seq-length", "32", "--num-steps", "3", "--warmup-steps", "1", "--dropout", "0"]
PLAIN = {
    **{f"zero{stage}": ("zero", ["--stages", str(stage)]) for stage in (1, 2, 3)},
    "cpu_optimizer": ("offload", ["--stage", "2", "--strategies", "cpu_optimizer"]),
    "cpu_optimizer3": ("offload", ["--strategies", "cpu_optimizer"]),
    "nvme": ("offload", ["--strategies", "nvme"]),
}


def swapped_model() -> ResolvedModel:
    """Large enough for its tensors to be swapped, which those below 1 MiB are not."""
    sizes = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    facts = facts_from_config("swapped", "llama", {**sizes, **heads, "tie_word_embeddings": True, "use_cache": False})
    same = ("config", "largest_parameter", "max_positions", "hidden_size")
    model = replace(fakes.resolved_model(), name="swapped", model_type="llama", facts=facts)
    return replace(model, **{name: getattr(facts, name) for name in same})


def make_trial(row: str, axes: list[str], folder: Path) -> tuple[Trial, ResolvedModel]:
    family, flags = PLAIN[row]
    flags = [*flags, *(["--nvme-path", str(folder)] if row == "nvme" else []), *SIZES]
    batch = [] if any("micro_batch" in text for text in axes) else ["--batch-size", "2"]
    options = fakes.options(family, *flags, *batch, *(word for text in axes for word in ("--axis", text)))
    model = swapped_model() if row == "nvme" else fakes.resolved_model()
    place = Placement(accelerator="cpu", num_gpus=2, nvme_path=str(folder))
    builder = requested_rows.ConfigurationBuilder(
        options=options, make_config=fakes.make_config, model=model, placement=place
    )
    rows = [builder.build(each, options.batch_size) for each in requested_rows.requested_rows(options)]
    (trial,) = trial_planner.make_trials(options, model, place, rows)
    return trial, model


def assert_predicted(trial: Trial, model: ResolvedModel, record: TrialRecord) -> None:
    assert model.facts is not None
    variant = variant_of(trial.workload, trial.ds_config)
    length = trial.workload.seq_length
    profile = find_profile(model.facts, length, accelerator="cpu", dropout=0.0, variant=variant)
    check(trial, replace(profile, variants={variant: profile}), record)


@pytest.mark.nvme
@pytest.mark.parametrize("name", ROWS)
def test_axes_change_what_they_say_and_train_the_same(name: str, train: Train, tmp_path: Path) -> None:
    row, *axes = ROWS[name].split()
    (plain, model), (changed, _) = (make_trial(row, values, tmp_path) for values in ([], axes))
    records = [train(plain), train(changed)]
    first, second = (dict(paths_of(record.ranks[0].resolved_config)) for record in records)
    differing = {path for path in first.keys() | second.keys() if first.get(path) != second.get(path)}
    for text in axes:
        axis = AXES[text.partition("=")[0]]
        keys = {key.rpartition(".")[2].removeprefix("stage3_") for key in axis.keys}
        read = any(key in path for path in differing for key in keys)
        assert read or any(
            getattr(plain.workload, field) != getattr(changed.workload, field) for field in axis.fields
        ), (
            text,
            differing,
        )
    assert_predicted(changed, model, records[1])
    assert compare_losses([make_run(record) for record in records]) == {}
    losses = records[1].ranks[0].losses
    assert None not in losses
    if changed_arithmetic(changed.configuration.axis_values):  # starts at the same loss and stays finite
        assert math.isclose(losses[0] or 0.0, math.log(1000), rel_tol=0.05)


def test_every_axis_is_shown_here_or_unsupported_on_the_cpu_with_a_reason() -> None:
    # tests/integration/test_computation.py
    elsewhere = {name for name in AXES if AXES[name].group in ("Computation", "Data", "Host", "Parallel ranks")}
    shown = {text.partition("=")[0] for row in ROWS.values() for text in row.split()[1:]}
    assert {name for name, axis in AXES.items() if not axis.cuda_only} - elsewhere == shown
