"""What changes how a step is computed: each is shown by two CPU ranks to change what it says, and to train the same."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy
import pytest

from ds_bench.analysis.comparability import incomparable_facts
from ds_bench.analysis.loss_parity import compare_losses
from ds_bench.analysis.row import make_run
from ds_bench.config.spec import Configuration, Trial
from ds_bench.launch import Limits
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.real_trials import SHORT, make_trial

pytestmark = [pytest.mark.slow, pytest.mark.deepspeed]

WORKLOAD = fakes.workload(batch_size=2, seq_length=64, grad_accum=2, num_steps=3, warmup_steps=1, dropout=0.0)
"""Accumulation shows a loss whose gradients are not scaled; with dropout, sdpa keeps scores on the CPU too."""


def of(changes: Mapping[str, Any], stage: int = 2, name: str = "row") -> Trial:
    """A trial of the workload with these changes, as a row of an axis has them."""
    row: Configuration = replace(fakes.zero(stage), name=name, label=name, workload_changes=changes)
    return make_trial(row, workload=replace(WORKLOAD, **changes))


Launch = Callable[[Trial], TrialRecord]


@pytest.fixture(scope="module")
def train(
    server: Callable[[Limits], WarmLauncher], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Trial], TrialRecord]:
    def go(trial: Trial) -> TrialRecord:
        record = server(SHORT).launch(trial, tmp_path_factory.mktemp("trial"), lambda _progress: None)
        assert record.outcome.success, record.outcome
        return record

    return go


@pytest.fixture(scope="module")
def usual(train: Launch) -> TrialRecord:
    return train(of({}, name="usual"))


def activations(record: TrialRecord) -> int:
    return record.ranks[0].ledger["cpu"]["activations"]


def assert_trains_the_same(usual: TrialRecord, record: TrialRecord) -> None:
    assert compare_losses([make_run(each) for each in (usual, record)]) == {}
    assert incomparable_facts(make_run(usual), make_run(record)) == []


@pytest.mark.parametrize(("changes", "stage"), [({"loss": "chunked"}, 1), ({"loss": "tiled", "tiled_mlp": True}, 3)])
def test_a_loss_and_mlps_in_parts_keep_less_and_train_the_same(
    changes: dict[str, Any], stage: int, usual: TrialRecord, train: Launch
) -> None:
    """Of GPT-2, whose output layer is the embedding, so that its gradient comes from both."""
    record = train(of(changes, stage, "parts"))
    assert_trains_the_same(usual, record)
    kept = 1.5 * 2 * 64 * WORKLOAD.model_config["vocab_size"]  # bytes, of the 4 of an fp32 logit
    kept += 0.2 * activations(usual) if "tiled_mlp" in changes else 0
    assert activations(usual) - activations(record) > kept


def test_eager_attention_keeps_more_and_trains_the_same(usual: TrialRecord, train: Launch) -> None:
    eager = train(of({"attention": "eager"}))
    assert_trains_the_same(usual, eager)
    assert (usual.ranks[0].attention, eager.ranks[0].attention) == ("sdpa", "eager")
    assert activations(usual) < activations(eager)


def test_a_compiled_model_is_compiled_before_it_is_measured_and_trains_the_same(
    usual: TrialRecord, train: Launch
) -> None:
    record = train(of({"compile": "torch"}, 3, "compiled"))
    assert_trains_the_same(usual, record)
    for rank in record.ranks:
        assert (rank.compiled_graphs or 0) > 0
        assert len(rank.warmup_step_seconds) > WORKLOAD.warmup_steps
        assert (rank.first_step_seconds or 0) > 10 * max(rank.step_seconds)
        assert [note for note in rank.notes if "compil" in note] == [
            f"{len(rank.warmup_step_seconds) - 1} further warm-up steps, until compiling was over"
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
FAMILIES = {
    "gpt2": WORKLOAD,
    "llama": replace(WORKLOAD, model="llama", model_type="llama", model_config=LLAMA),
    "llama in fp32": replace(WORKLOAD, model="llama", model_type="llama", model_config=LLAMA, precision="fp32"),
}


@pytest.fixture(scope="module")
def on_one_rank(train: Launch) -> dict[str, TrialRecord]:
    return {name: train(make_trial(fakes.zero(1), workload=work, num_gpus=1)) for name, work in FAMILIES.items()}


@pytest.mark.parametrize(
    ("family", "key", "stage"),
    [
        ("llama", "autotp", 2),
        ("llama in fp32", "autotp", 0),
        ("llama", "ulysses", 3),
        ("gpt2", "ulysses", 1),
    ],
)
def test_two_ranks_of_one_group_train_what_one_rank_trains(
    family: str, key: str, stage: int, on_one_rank: dict[str, TrialRecord], train: Launch
) -> None:
    """Of the same batches; tokens are counted once for the group."""
    changes = {"tensor_parallel": {"autotp_size": 2}} if key == "autotp" else {"sequence_parallel_size": 2}
    trial = make_trial(replace(fakes.zero(stage), name=key, label=key), workload=FAMILIES[family], changes=changes)
    single, together = on_one_rank[family], train(trial)
    runs = [make_run(record) for record in (single, together)]
    rows = [run.row for run in runs]
    assert [row.data_parallel_size for row in rows] == [1, 1]
    for row in rows:
        tokens = WORKLOAD.batch_size * WORKLOAD.grad_accum * WORKLOAD.seq_length
        assert (row.throughput_tokens_per_sec or 0) * (row.avg_step_time_ms or 0) / 1000 == pytest.approx(tokens)
    caveats = compare_losses(runs)
    unexpected = [caveat.text for caveat in caveats.values() if "quirk" not in caveat.text]
    if (key, stage) == ("ulysses", 3):
        # DeepSpeed 0.19.8 divides by all ranks of the group (runtime/comm/coalesced_collectives.py) and multiplies
        # by those of a sequence at stages 1 and 2 only: the norm is half of the right one, which Adam hides.
        (text,) = unexpected
        assert "the norm of its gradients differs by 50.0" in text
    else:
        assert unexpected == []
        assert rows[1].grad_norm == pytest.approx(rows[0].grad_norm, rel=0.03)
    # The whole model's weights changed alike, put together from the parts of both ranks.
    distance = math.dist(runs[0].weight_change or (), runs[1].weight_change or ())
    assert distance < (0.3 if stage == 0 else 0.05) * (rows[0].weight_change_norm or 0.0)
    assert runs[1].early_window is not None
    assert runs[1].early_window.weight_change is not None
    # Each rank holds a half of the layers, or of the activations.
    category = "parameters" if key == "autotp" else "activations"
    assert together.ranks[0].ledger["cpu"][category] < 0.75 * single.ranks[0].ledger["cpu"][category]


def test_a_data_loader_brings_the_same_batches_and_its_time_is_measured(usual: TrialRecord, train: Launch) -> None:
    record = train(of({"data_workers": 2}, name="loader"))
    assert_trains_the_same(usual, record)
    assert [rank.losses for rank in record.ranks] == [rank.losses for rank in usual.ranks]
    for rank in record.ranks:
        assert 0 < (rank.data_wait_seconds or 0) < max(rank.step_seconds)
    assert usual.ranks[0].data_wait_seconds is None


@pytest.mark.parametrize(("workers", "stage"), [(None, 1), (2, 3)])
def test_a_file_of_token_ids_trains_the_same_however_it_is_read(
    workers: int | None, stage: int, from_file: TrialRecord, token_file: Mapping[str, Any], train: Launch
) -> None:
    changes = {**token_file, "data_workers": workers}
    record = train(of(changes, stage, f"workers {workers}"))
    assert compare_losses([make_run(each) for each in (from_file, record)]) == {}
    if workers is not None:
        assert all((rank.data_wait_seconds or 0) > 0 and rank.step_parts["data_wait"] > 0 for rank in record.ranks)
    else:
        assert record.ranks[0].data_wait_seconds is None


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Fields of a workload that trains on a file, in a folder with a space, whose ids are the first hundred."""
    path = tmp_path_factory.mktemp("my data") / "ids.bin"
    (numpy.arange(40 * 64, dtype="<u4") * 7 % 100).tofile(path)
    return {"data_path": str(path), "data_dtype": "uint32", "data_tokens": 40 * 64, "data_digest": "a"}


@pytest.fixture(scope="module")
def from_file(token_file: Mapping[str, Any], usual: TrialRecord, train: Launch) -> TrialRecord:
    record = train(of({**token_file, "data_workers": 1}, name="file"))
    assert record.ranks[0].losses != usual.ranks[0].losses
    assert record.ranks[0].losses != record.ranks[1].losses  # every rank has its own share
    return record


def test_bound_ranks_run_on_processors_of_their_own(usual: TrialRecord, train: Launch) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor cannot be divided")
    record = train(of({"cpu_binding": "cores"}, name="bound"))
    assert_trains_the_same(usual, record)
    first, second = (set(rank.cpus_allowed or ()) for rank in record.ranks)
    assert first
    assert len(first) == len(second)
    assert not first & second
    assert [rank.cpu_threads for rank in record.ranks] == [len(first)] * 2
    assert usual.ranks[0].cpus_allowed is None


WIDE = {"n_embd": 1024, "n_head": 8, "n_layer": 1, "vocab_size": 512, "n_positions": 40960}
"""A model of 55 million parameters: 105 MB in 16 bits, which a process's libraries do not hide. Most of them are
positions, which are looked up and not multiplied."""


def test_without_zero_init_every_rank_builds_the_whole_model_and_trains_the_same(train: Launch) -> None:
    config = {**WORKLOAD.model_config, **WIDE}
    wide = replace(WORKLOAD, model="wide", model_config=config, seq_length=32, grad_accum=1, num_steps=2)
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
