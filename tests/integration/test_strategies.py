"""Every strategy trained once by two real CPU ranks; whatever the product says about one is read from its record."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis.loss_parity import compare_losses, with_loss_caveats
from ds_bench.analysis.row import make_run
from ds_bench.analysis.step_costs import step_costs
from ds_bench.config.caveat_texts import LOSS_KINDS, Caveat, CaveatKind
from ds_bench.config.spec import PASS_TYPES, Configuration, Inspection, Trial
from ds_bench.launch import Limits
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.prediction.model_profile import USUAL, ModelProfile, Variant, find_profile
from ds_bench.records.schema import RankMeasurement, TrialRecord
from tests.support import fakes
from tests.support.built_models import facts_from_config
from tests.support.ledger_checks import check
from tests.support.real_trials import SHORT, Launch, Train, make_trial

pytestmark = pytest.mark.deepspeed

MODEL = {**fakes.preset("tiny").config, "n_embd": 512}
"""Its MLPs are large enough to be swapped: parts under 1 MiB stay in memory. They are also much larger than the
embedding: DeepSpeed's own prefetch from the disk would ask for one of them twice at once, and assert in step 2."""
EMBEDDING, LARGEST = 1000 * 512, 4 * 512 * 512
WORK = fakes.workload(
    model="wide", model_config=MODEL, batch_size=2, seq_length=32, num_steps=3, warmup_steps=5, dropout=0.0
)
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "stage3_param_persistence_threshold": 1000}
"""Elements: so that the buckets are seen and do not drown the rest."""
SUB_GROUPS = {"sub_group_size": 600_000}
ROWS: dict[str, Configuration] = {
    **{f"zero{stage}": fakes.zero(stage) for stage in range(4)},
    "cpu_optimizer": fakes.offload("cpu_optimizer", 2),
    "ddp": fakes.reference("ddp"),
    "fsdp2": fakes.reference("fsdp2"),
    "cpu_full": fakes.offload("cpu_full"),
    "nvme": fakes.offload("nvme"),
}
PROFILED = "zero3"


def make_row(name: str, zero: Mapping[str, Any] | None = None, **placement: Any) -> Trial:
    row = ROWS[name]
    changes = {**BUCKETS, **(SUB_GROUPS if name in ("cpu_full", "nvme") else {}), **(zero or {})}
    partitioned = row.stage and not row.is_reference
    return make_trial(
        replace(row, name=name, label=name),
        workload=WORK,
        changes={"zero_optimization": changes} if partitioned else {},
        largest_parameter=LARGEST,
        **placement,
    )


Folders = Mapping[str, Path]
Trained = Mapping[str, TrialRecord]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return {name: tmp_path_factory.mktemp(name) for name in ROWS}


@pytest.fixture(scope="module")
def trained(
    server: Callable[[Limits], WarmLauncher], folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """The record of each row; all but that on NVMe have saved and loaded a checkpoint too."""
    records = {}
    disk = tmp_path_factory.mktemp("disk")
    for name, row in ROWS.items():
        profiles = (
            {"profiles": ("torch", "memory", "nsys"), "profile_ranks": (1,), "profile_steps": 1}
            if name == PROFILED
            else {}
        )
        # On NVMe the tensors that are not swapped keep the values of the step that proves the checkpoint.
        asked = Inspection(checkpoint=not row.uses_nvme, checkpoint_path=str(disk), **profiles)  # type: ignore[arg-type]
        trial = replace(make_row(name, **({"nvme_path": str(disk)} if row.uses_nvme else {})), inspection=asked)
        records[name] = server(SHORT).launch(trial, folders[name], lambda _progress: None)
        assert records[name].outcome.success, (name, records[name].outcome)
        assert list(disk.iterdir()) == []
    return records


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    """With the activations of torch's engines, whose model computes under autocast."""
    facts = facts_from_config("wide", "gpt2", MODEL)
    usual, torchs = (
        find_profile(facts, WORK.seq_length, accelerator="cpu", dropout=0.0, variant=variant)
        for variant in (USUAL, Variant(autocast=True))
    )
    return replace(usual, variants={Variant(autocast=True): torchs})


@pytest.mark.nvme
@pytest.mark.parametrize("name", ROWS)
def test_a_rank_holds_what_was_predicted(name: str, trained: Trained, profile: ModelProfile) -> None:
    check(trained[name].trial, profile, trained[name])


def judged(records: Mapping[str, TrialRecord]) -> dict[str, list[Caveat]]:
    """Caveats of each row about its training compared with the others."""
    rows = with_loss_caveats([make_run(record) for record in records.values()])
    kinds = (*LOSS_KINDS, CaveatKind.DOES_NOT_TRAIN)
    return {
        name: [each for each in row.caveats if each.kind in kinds or "parity" in each.text or "weights" in each.text]
        for name, row in zip(records, rows, strict=True)
    }


@pytest.mark.nvme
def test_honest_strategies_raise_nothing_but_the_quirk_of_stage_0(trained: Trained) -> None:
    found = judged({name: trained[name] for name in ROWS})
    assert [(each.kind, each.kind.disqualifies) for each in found.pop("zero0")] == [(CaveatKind.LOSS_QUIRK, False)]
    assert found == {key: [] for key in list(ROWS)[1:]}
    for record in trained.values():
        run = make_run(record)
        assert (run.row.repeated_loss or math.inf) < (run.row.first_loss or 0.0)
        for rank in record.ranks:
            assert rank.early_window is not None
            assert (rank.early_window.first_step, rank.early_window.steps) == (0, 5)
            assert None not in (rank.weight_change, rank.early_window.weight_change, rank.grad_norm, *rank.grad_norms)


def test_a_doubled_learning_rate_is_found_by_the_weights_alone(trained: Trained, train: Train) -> None:
    trial = make_row("zero2")
    asked = trial.ds_config["optimizer"]
    wrong = {**asked, "params": {**asked["params"], "lr": 2e-4}}
    record = train(replace(trial, ds_config={**trial.ds_config, "optimizer": wrong}))
    silent = {"optimizer_settings": None, "resolved_config": {}, "optimizer_class": "AdamW"}
    ranks = tuple(replace(rank, **silent) for rank in record.ranks)  # type: ignore[arg-type]
    found = judged({"zero1": trained["zero1"], "zero3": trained["zero3"], "wrong": replace(record, ranks=ranks)})
    (caveat,) = found.pop("wrong")
    assert caveat.kind in LOSS_KINDS
    assert caveat.kind.disqualifies
    assert found == {"zero1": [], "zero3": []}


def test_gradients_that_were_divided_once_too_often_are_found_by_their_norm(launch: Launch) -> None:
    """Adam hides them: weights and losses equal an honest row's."""
    honest, other = make_trial(fakes.zero(1)), make_trial(fakes.zero(2))
    records = [launch(honest), launch(make_trial(fakes.zero(2), fault="gradients_divided_twice"))]
    runs = [make_run(record) for record in (records[0], replace(records[1], trial=other))]
    assert runs[1].row.weight_change_norm == pytest.approx(runs[0].row.weight_change_norm, rel=1e-2)
    ((place, caveat),) = compare_losses(runs).items()
    assert (place, caveat.kind) == (1, CaveatKind.TRAINED_DIFFERENTLY)
    assert "the norm of its gradients differs by 50" in caveat.text


def test_torchs_engines_train_what_deepspeed_trains(train: Train) -> None:
    """In fp32, where nothing but the order of sums differs; accumulated, with recomputed activations and dropout."""
    work = fakes.workload(
        batch_size=2,
        seq_length=32,
        num_steps=4,
        precision="fp32",
        grad_accum=2,
        activation_checkpointing=True,
        dropout=0.1,
    )
    records = [train(make_trial(ROWS[name], workload=work)) for name in ("zero2", "ddp", "fsdp2")]
    zero, *others = with_loss_caveats([make_run(record) for record in records])
    for run in others:
        assert [each.text for each in run.caveats if each.kind in LOSS_KINDS] == []
        assert run.losses == pytest.approx(zero.losses, rel=1e-6)
        assert run.row.repeated_loss == pytest.approx(zero.row.repeated_loss, rel=1e-5)
        distance = math.dist(run.weight_change or (), zero.weight_change or ())
        assert distance < 1e-3 * (zero.row.weight_change_norm or 0.0)
        assert run.ranks[0].optimizer_settings == zero.ranks[0].optimizer_settings
        assert (run.row.batch_size, run.row.grad_accum, run.row.data_parallel_size) == (2, 2, 2)


@pytest.mark.nvme
def test_what_lies_on_nvme_trains_exactly_like_what_is_offloaded_to_memory(trained: Trained) -> None:
    """The weights are read before the first step, in the warm-up and at the end: none disturbs what DeepSpeed swaps."""
    for rank, other in zip(trained["nvme"].ranks, trained["cpu_full"].ranks, strict=True):
        assert rank.ledger["nvme"].keys() == {"optimizer_states", "parameters"}
        assert rank.losses == other.losses
        assert rank.repeated_loss == pytest.approx(other.repeated_loss, rel=1e-6)
        assert rank.weight_change == pytest.approx(other.weight_change, rel=1e-6, abs=1e-9)
        assert rank.grad_norms == pytest.approx(other.grad_norms, rel=1e-6)


CHECKPOINT_BYTES = {"zero0": 14, "zero3": 12, "cpu_optimizer": 14, "cpu_full": 12, "fsdp2": 12}
"""Per parameter; at stage 3 the 16-bit weights are not saved, as they follow from the fp32 ones."""


def test_a_checkpoint_has_all_states_and_restores_them(trained: Trained) -> None:
    for name, record in trained.items():
        if name == "nvme":
            continue
        first = record.ranks[0]
        assert [(key, action.not_done) for key, action in first.checkpoint.items()] == [
            (key, None) for key in ("save", "load", "model_16bit")
        ]
        close = 0.1 if record.trial.configuration.is_reference else 0.05  # torch's functions save tied weights twice
        for key, each in (("save", CHECKPOINT_BYTES.get(name)), ("model_16bit", 2)):
            if each is not None:
                written = first.checkpoint[key].written_bytes
                assert written == pytest.approx(each * first.parameter_count, rel=close), (name, key)
        # Where every rank holds all weights, only the first answers for them.
        alone = name in ("zero0", "ddp")
        assert [rank.checkpoint_restored for rank in record.ranks] == [True, None if alone else True], name
        for rank in record.ranks:
            steady = rank.phase_memory["steady"].host_peak_bytes or 0
            assert (rank.checkpoint["save"].seconds or 0) > 0
            for action in rank.checkpoint.values():  # profilers run afterwards: what they keep is not a checkpoint's
                assert 0 < (action.memory.host_peak_bytes or 0) < steady + 150 * 2**20, name


@pytest.mark.nvme
def test_states_too_small_for_the_disk_are_not_restored_and_the_note_says_why(launch: Launch, tmp_path: Path) -> None:
    trial = make_trial(fakes.offload("nvme"), nvme_path=str(tmp_path))
    asked = Inspection(checkpoint=True, checkpoint_path=str(tmp_path))
    first = launch(replace(trial, inspection=asked)).ranks[0]
    assert first.checkpoint_restored is False
    assert any("too small to be swapped" in note for note in first.notes)


def test_a_profile_is_of_the_rank_that_was_asked_for_and_can_be_opened(trained: Trained, folders: Folders) -> None:
    record, folder = trained[PROFILED], folders[PROFILED]
    assert [len(rank.profiles) for rank in record.ranks] == [0, 2]
    assert [note for rank in record.ranks for note in rank.notes if "profile" in note] == []
    files = [folder.parents[1] / name for each in record.ranks[1].profiles for name in each.files]
    assert files[0].parent == folder / "profiles"
    names = {event.get("name") for event in json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]}
    assert "optimizer step" in names
    assert any(str(name).startswith("aten::") for name in names)
    assert all(path.stat().st_size > 100 for path in files)


@pytest.mark.nvme
def test_cpu_adam_moves_28_bytes_for_each_parameter_in_fp32_and_the_kernel_counts_the_bytes_of_the_disk(
    trained: Trained,
) -> None:
    record = trained["cpu_optimizer"]
    moved = sum(rank.offload.cpu_adam_bytes or 0 for rank in record.ranks if rank.offload is not None)
    assert moved == pytest.approx(28 * record.ranks[0].parameter_count, rel=0.01)  # partitions are padded
    for rank in record.ranks:
        assert rank.offload is not None
        assert 0 < (rank.offload.cpu_adam_seconds or 0) < rank.phase_seconds["step"]
        assert rank.offload.disk_wait_seconds is None
    assert 1e8 < (step_costs(record)["cpu_adam_bytes_per_second"] or 0) < 1e12
    costs = step_costs(trained["nvme"])
    speeds = costs["disk_needed_bytes_per_second"], costs["disk_measured_bytes_per_second"]
    assert None not in (*speeds, costs["disk_bound"])
    for rank in trained["nvme"].ranks:
        times = rank.offload
        assert times is not None
        assert times.disk_read_bytes == pytest.approx((rank.nvme_read_bytes or 0) / WORK.num_steps, rel=0.02)
        assert times.disk_written_bytes == pytest.approx((rank.nvme_written_bytes or 0) / WORK.num_steps, rel=0.02)
        assert 0 < (times.disk_wait_seconds or 0) <= (times.disk_busy_seconds or 0) * 1.05
        assert rank.step_parts["transfer"] == times.disk_wait_seconds


REDUCED_TO_OWNERS = {"use_multi_rank_bucket_allreduce": False}
NOTHING_KEPT = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
VOLUMES = (("zero1", {}, 3, 0), ("zero2", REDUCED_TO_OWNERS, 2, 0), ("zero3", {}, 2, 0), ("zero3", NOTHING_KEPT, 3, 2))
"""Row, changes of its configuration, bytes of all collectives of a step in multiples of the parameters' and of the
shared embedding's.

Rajbhandari et al., "ZeRO" (2020), section 7, say 2 for stages 0 to 2 and 3 for stage 3. DeepSpeed 0.19.8 by default
all-reduces each bucket at stages 1 and 2, which the paper reduces to its owner, before it gathers parameters; and at
stage 3 it keeps up to a billion gathered parameters for the backward pass, which a small model does not exceed. Where
it keeps none, the embedding that is the output layer too is gathered for each use."""


def test_communication_has_the_volume_of_the_stages_formula(trained: Trained, train: Train) -> None:
    for name, changes, of_all, of_embedding in VOLUMES:
        record = train(make_row(name, changes)) if changes else trained[name]
        volume = of_all * record.ranks[0].parameter_count + of_embedding * EMBEDDING
        for rank in record.ranks:
            assert rank.communication
            assert rank.step_parts.keys() == {*rank.phase_seconds, "communication"}
            assert rank.step_parts["communication"] == pytest.approx(sum(each.seconds for each in rank.communication))
            assert all(0 <= (each.wait_seconds or 0) < each.seconds for each in rank.communication)
        assert step_costs(record)["communication_bytes"] == pytest.approx(2 * volume, rel=0.02), (name, changes)


def test_each_pass_holds_what_it_needs_and_only_training_changes_weights(train: Train, profile: ModelProfile) -> None:
    ranks: dict[str, RankMeasurement] = {}
    for pass_type in PASS_TYPES:
        work = replace(WORK, num_steps=2, warmup_steps=1, grad_accum=2, pass_type=pass_type)
        trial = make_trial(fakes.zero(0), workload=work, num_gpus=1, largest_parameter=LARGEST)
        record = train(trial)
        check(trial, profile, record)
        (ranks[pass_type],) = record.ranks
    forward, both, trains = (ranks[each] for each in PASS_TYPES)
    assert set(forward.ledger["cpu"]) - {"other"} == {"parameters", "activations"}
    assert set(both.ledger["cpu"]) - {"other"} == {"parameters", "activations", "gradients"}
    assert "optimizer_states" in trains.ledger["cpu"]
    assert (set(forward.phase_seconds), set(both.phase_seconds)) == ({"forward"}, {"forward", "backward"})
    assert (forward.weight_change, both.weight_change) == (None, None)
    assert (forward.optimizer_class, both.optimizer_class) == ("none", "none")
    assert forward.losses[0] == both.losses[0] == trains.losses[0]  # the same model on the same batch
