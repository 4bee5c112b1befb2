"""What changes how a step is computed or fed: shown by real CPU ranks to do what it says, and to train the same."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy
import pytest

from ds_bench.analysis.comparability import incomparable_facts
from ds_bench.analysis.loss_parity import compare_losses
from ds_bench.analysis.row import make_run
from ds_bench.config.spec import Configuration, Trial
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.real_trials import Train, make_trial

pytestmark = [pytest.mark.slow, pytest.mark.deepspeed]

WORKLOAD = fakes.workload(batch_size=2, seq_length=64, grad_accum=2, num_steps=3, warmup_steps=1, dropout=0.0)
"""Accumulation shows a loss whose gradients are not scaled; with dropout, sdpa keeps scores on the CPU too."""


def of(changes: Mapping[str, Any], stage: int = 2, name: str = "row") -> Trial:
    """A trial of the workload with these changes, as a row of an axis has them."""
    row: Configuration = replace(fakes.zero(stage), name=name, label=name, workload_changes=changes)
    return make_trial(row, workload=replace(WORKLOAD, **changes))


@pytest.fixture(scope="module")
def usual(train: Train) -> TrialRecord:
    return train(of({}, name="usual"))


def activations(record: TrialRecord) -> int:
    return record.ranks[0].ledger["cpu"]["activations"]


def assert_trains_the_same(usual: TrialRecord, record: TrialRecord) -> None:
    assert compare_losses([make_run(each) for each in (usual, record)]) == {}
    assert incomparable_facts(make_run(usual), make_run(record)) == []


@pytest.mark.parametrize(
    ("changes", "stage"),
    [({"loss": "chunked", "attention": "eager"}, 1), ({"loss": "tiled", "tiled_mlp": True}, 3)],
)
def test_loss_attention_and_mlps_keep_what_they_say_and_train_the_same(
    changes: dict[str, Any], stage: int, usual: TrialRecord, train: Train
) -> None:
    """Of GPT-2, whose output layer is the embedding, so that its gradient comes from both."""
    record = train(of(changes, stage, "parts"))
    assert_trains_the_same(usual, record)
    assert record.ranks[0].attention == changes.get("attention", "sdpa")
    logits = 2 * 2 * 64 * WORKLOAD.model_config["vocab_size"]  # bytes, of the 4 of an fp32 logit
    layers, heads = WORKLOAD.model_config["n_layer"], WORKLOAD.model_config["n_head"]
    scores = 2 * 2 * heads * 64 * 64 * layers if "attention" in changes else 0
    mlps = 0.2 * activations(usual) if "tiled_mlp" in changes else 0
    assert activations(usual) - activations(record) > 0.75 * logits + mlps - 3 * scores


def test_a_compiled_model_is_compiled_before_it_is_measured_and_trains_the_same(
    usual: TrialRecord, train: Train
) -> None:
    record = train(of({"compile": "torch"}, 3, "compiled"))
    assert_trains_the_same(usual, record)
    for rank in record.ranks:
        assert (rank.compiled_graphs or 0) > 0
        assert len(rank.warmup_step_seconds) > WORKLOAD.warmup_steps
        assert rank.warmup_step_seconds[0] > 10 * max(rank.step_seconds)
        assert [note for note in rank.notes if "compil" in note] == [
            f"warm-up steps added to let compilation settle: {len(rank.warmup_step_seconds) - 1}"
        ]
    assert usual.ranks[0].compiled_graphs is None


LLAMA = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
FAMILIES = {"gpt2": WORKLOAD, "llama": replace(WORKLOAD, model="llama", model_type="llama", model_config=LLAMA)}


@pytest.mark.parametrize(("family", "key", "stage"), [("llama", "autotp", 2), ("gpt2", "ulysses", 1)])
def test_two_ranks_of_one_group_train_what_one_rank_trains(family: str, key: str, stage: int, train: Train) -> None:
    """Of the same batches; tokens are counted once for the group."""
    changes = {"tensor_parallel": {"autotp_size": 2}} if key == "autotp" else {"sequence_parallel_size": 2}
    single = train(make_trial(fakes.zero(1), workload=FAMILIES[family], num_gpus=1))
    together = train(
        make_trial(replace(fakes.zero(stage), name=key, label=key), workload=FAMILIES[family], changes=changes)
    )
    runs = [make_run(record) for record in (single, together)]
    assert compare_losses(runs) == {}
    tokens = WORKLOAD.batch_size * WORKLOAD.grad_accum * WORKLOAD.seq_length
    for row in (run.row for run in runs):
        assert row.data_parallel_size == 1
        assert (row.throughput_tokens_per_sec or 0) * (row.avg_step_time_ms or 0) / 1000 == pytest.approx(tokens)
    assert runs[1].row.grad_norm == pytest.approx(runs[0].row.grad_norm, rel=0.03)
    # The whole model's weights changed alike, put together from the parts of both ranks.
    distance = math.dist(runs[0].weight_change or (), runs[1].weight_change or ())
    assert distance < 0.05 * (runs[0].row.weight_change_norm or 0.0)
    # Each rank holds a half of the layers, or of the activations.
    category = "parameters" if key == "autotp" else "activations"
    assert together.ranks[0].ledger["cpu"][category] < 0.75 * single.ranks[0].ledger["cpu"][category]


def test_a_data_loader_brings_the_same_batches_to_ranks_that_are_bound_to_their_processors(
    usual: TrialRecord, train: Train
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor cannot be divided")
    record = train(of({"data_workers": 2, "cpu_binding": "cores"}, name="loader"))
    assert_trains_the_same(usual, record)
    assert [rank.losses for rank in record.ranks] == [rank.losses for rank in usual.ranks]
    first, second = (set(rank.cpus_allowed or ()) for rank in record.ranks)
    assert first
    assert len(first) == len(second)
    assert not first & second
    for rank in record.ranks:
        assert rank.cpu_threads == len(first)
        assert 0 < (rank.data_wait_seconds or 0) < max(rank.step_seconds)
        assert rank.step_parts["data_wait"] > 0
    assert usual.ranks[0].cpus_allowed is None
    assert usual.ranks[0].data_wait_seconds is None


def test_a_file_of_token_ids_trains_the_same_however_it_is_read(
    usual: TrialRecord, train: Train, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("my data") / "ids.bin"
    (numpy.arange(40 * 64, dtype="<u4") * 7 % 100).tofile(path)
    file = {"data_path": str(path), "data_dtype": "uint32", "data_tokens": 40 * 64, "data_digest": "a"}
    held, loaded = (
        train(of({**file, "data_workers": workers}, stage, f"workers {workers}"))
        for workers, stage in ((None, 1), (2, 3))
    )
    assert compare_losses([make_run(each) for each in (held, loaded)]) == {}
    assert held.ranks[0].losses != usual.ranks[0].losses
    assert held.ranks[0].losses != held.ranks[1].losses  # every rank has its own share


WIDE = {"n_embd": 1024, "n_head": 8, "n_layer": 1, "vocab_size": 512, "n_positions": 16384}
"""A model of 30 million parameters: 60 MB in 16 bits, which a process's libraries do not hide. Most of them are
positions, which are looked up and not multiplied."""


def test_without_zero_init_every_rank_builds_the_whole_model_and_trains_the_same(train: Train) -> None:
    config = {**WORKLOAD.model_config, **WIDE}
    wide = replace(WORKLOAD, model="wide", model_config=config, seq_length=32, grad_accum=1, num_steps=1)
    changes: list[dict[str, Any]] = [{}, {"zero_init": False}]
    split, whole = (
        train(make_trial(replace(fakes.zero(3), workload_changes=each), workload=replace(wide, **each)))
        for each in changes
    )
    assert_trains_the_same(split, whole)
    assert [rank.losses for rank in split.ranks] == [rank.losses for rank in whole.ranks]
    model_bytes = 2 * whole.ranks[0].parameter_count
    for rank in whole.ranks:
        before, after = (rank.phase_memory[phase].host_end_bytes or 0 for phase in ("import", "build"))
        assert after - before > 0.9 * model_bytes
    for record in (split, whole):
        phases = make_run(record).phase_memory
        assert list(phases) == ["import", "build", "initialize", "first_step", "steady"]
        for phase in phases.values():
            assert (phase.host_peak_bytes or 0) >= (phase.host_end_bytes or 0) > 0
