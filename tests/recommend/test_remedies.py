"""The bytes that were missing, the change that would free them, and an action for every way a trial can end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from ds_bench.analysis.comparison import Comparison, compare
from ds_bench.analysis.row import make_run
from ds_bench.cli.arguments import parse
from ds_bench.config import trained_parameters
from ds_bench.config.spec import Configuration, Trial
from ds_bench.config.strategies import make_configuration, named_strategy
from ds_bench.config.training_script import Script
from ds_bench.prediction import allocation_trace, model_profile, trial_predictions
from ds_bench.prediction.fit_verdict import GpuNeed
from ds_bench.prediction.predicted_memory import Prediction
from ds_bench.prediction.trial_predictions import MemoryCapacity
from ds_bench.prediction.what_if import BUCKET_KEY
from ds_bench.recommend.message_templates import Fact, flags
from ds_bench.recommend.recommendation import Recommendation, recommend
from ds_bench.recommend.remedies import FailedSetup, Shortage, action_of, failed_run, failed_setup, shortage_of
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.recommendations import out_of_memory, text_of

GB = 2**30
ZERO, OFFLOAD = fakes.zero, fakes.offload
LLAMA = "meta-llama/Llama-2-7b-hf"
CARDS = fakes.placement(accelerator="cuda", num_gpus=4)
PROFILE = trial_predictions.profile_model(fakes.resolved_model(LLAMA), 2048, "cuda")


def compared(*records: TrialRecord, host_gb: int = 256) -> Comparison:
    host = fakes.environment(host_memory_bytes=host_gb * GB)
    return compare([make_run(each) for each in records], environments=(host,))


def predicted(trial: Trial, profile: Any) -> Trial:
    card = 80 * GB if trial.placement.accelerator == "cuda" else None
    capacity = MemoryCapacity(gpu_bytes=card, host_bytes=None)
    (found,) = trial_predictions.attach_predictions([trial], profile, capacity, skip=False)
    return trial_predictions.with_savings(found, profile, gpu_bytes=card, lacked_memory=True)


def planned(strategy: Configuration, cards: int = 1, **work: Any) -> Trial:
    """Llama-2-7B at batch 4 × 2048 on cards of 80 GB, with what was predicted when it was planned."""
    asked = fakes.workload(**{"model": LLAMA, "batch_size": 4, "seq_length": 2048, **work})
    return predicted(fakes.trial(strategy, on=fakes.placement(accelerator="cuda", num_gpus=cards), of=asked), PROFILE)


def stored(trial: Trial) -> Prediction:
    found = trial_predictions.stored_prediction(trial)
    assert found is not None
    return found


def ended(trial: Trial, gigabytes: float | None = None) -> TrialRecord:
    """Out of memory by 1.5 GB, or trained with that peak."""
    if gigabytes is None:
        return fakes.failure(trial, schema.OOM, requested_bytes=2 * GB, free_bytes=GB // 2)
    peak = int(gigabytes * GB)
    return fakes.success(trial, gpu_peak_bytes=peak, gpu_peak_reserved_bytes=peak, gpu_total_bytes=80 * GB)


def failed(status: str, strategy: Configuration | None = None, **more: Any) -> TrialRecord:
    return fakes.failure(out_of_memory(strategy or ZERO(2), 4).trial, status, **more)


def of_script(record: TrialRecord) -> TrialRecord:
    script = Script(command=("train.py",), digest=None, python="python", config_source="override", engine="Nope")
    return replace(record, trial=replace(record.trial, workload=replace(record.trial.workload, script=script)))


def advice(*records: TrialRecord, host_gb: int = 256) -> Recommendation:
    return recommend(compared(*records, host_gb=host_gb))


def setup(run: TrialRecord, *others: TrialRecord, shortage: Shortage | None = None) -> FailedSetup:
    first, *rest = [make_run(each) for each in (run, *others)]
    found = failed_setup(first, compare([first, *rest]), shortage or shortage_of(first))
    assert found is not None
    return found


def about(found: Recommendation, label: str) -> Fact:
    """The step about the failure of the row with that label."""
    (step,) = (each for each in found.next_steps if label in each.values.get("rows", ()))
    return step


def test_missing_bytes_are_requested_less_free(subtests: pytest.Subtests) -> None:
    """For a run that was predicted to take 70 GB, the limit of 80 GB is lowered to what there was."""
    for requested, free, missing, limit, kind in (
        (35, 4, 31, 39, "short"),
        (12, None, None, 58, "short_of_unknown"),
        (1, 2, 0, 80, "short_in_pieces"),
        (None, None, None, 80, "short_unknown"),
    ):
        with subtests.test(kind):
            found = Shortage(requested_bytes=requested and requested * GB, free_bytes=free and free * GB)
            assert (found.missing_bytes, found.fact.kind) == (missing and missing * GB, kind)
            assert found.lower(80 * GB, 70 * GB) == limit * GB
            assert found.lower(80 * GB, 200 * GB) == 80 * GB  # never raised
            # On the CPU accelerator and where host memory ran out, the free bytes are the GPU's.
            host = failed(schema.OOM_HOST, OFFLOAD("cpu_full"), requested_bytes=GB, free_bytes=40 * GB)
            assert shortage_of(make_run(host)) == Shortage(requested_bytes=GB)


# ------------------------------------------------------------------ changes that are predicted to fit


def bucket(trial: Trial, size: int = 500_000_000) -> TrialRecord:
    """A failed request of a whole reduce bucket, of two bytes per element."""
    config = {**trial.ds_config, "zero_optimization": {"stage": 2, "reduce_bucket_size": size}}
    asked = {"phase": "backward", "requested_bytes": 2 * size, "free_bytes": size}
    return fakes.failure(replace(trial, ds_config=config), schema.OOM, **asked)


def on_ranks_of(limit_gb: int) -> TrialRecord:
    """gpt2 out of memory on two CPU ranks under that limit each."""
    profile = trial_predictions.profile_model(fakes.resolved_model("gpt2"), 256, "cpu")
    on = replace(fakes.placement(num_gpus=2), cpu_memory_limit_bytes=limit_gb * GB)
    trial = fakes.trial(ZERO(2), on=on, of=fakes.workload(model="gpt2", batch_size=4, seq_length=256))
    return fakes.failure(predicted(trial, profile), schema.OOM_HOST, requested_bytes=2**20)


def unusable() -> TrialRecord:
    """With a prediction that another version wrote."""
    trial = planned(ZERO(0))
    whole = dict(trial.prediction or {})
    odd = {**whole, "alternatives": [{**whole["alternatives"][0], "gpu_bytes": "much"}]}
    return ended(replace(trial, prediction=odd))


def with_alternatives(alternatives: list[Any] | None) -> TrialRecord:
    """None: of a run that was killed before changes to the trial were judged. Empty: no change would save memory."""
    trial = planned(ZERO(0), 4)
    return ended(replace(trial, prediction={**(trial.prediction or {}), "alternatives": alternatives}))


SITUATIONS: dict[str, Callable[[], list[TrialRecord]]] = {
    # As ``plan --model meta-llama/Llama-2-7b-hf --num-gpus 1 --batch-size 4 --seq-length 2048``.
    "every stage on one card": lambda: [ended(planned(ZERO(stage))) for stage in (0, 1, 2, 3)],
    # Of several rows the fewest settings are changed.
    "two stages on four cards": lambda: [ended(planned(ZERO(stage), 4)) for stage in (0, 3)],
    # A stage that is left out, or ran out itself, is never the remedy.
    **{
        f"ZeRO-1 at {peak} GB": lambda peak=peak: [  # type: ignore[misc]
            ended(planned(ZERO(0), 4, batch_size=2)),
            ended(planned(ZERO(1), 4, batch_size=2), peak),
        ]
        for peak in (60, 78, None)
    },
    # On four cards ZeRO-0 of 108 GB fits with no change but a higher stage, which is another row; ZeRO-2 keeps its own.
    "ZeRO-0 and a row that trained": lambda: [ended(planned(ZERO(0), 4)), ended(planned(ZERO(3), 4), 40)],
    "ZeRO-2 and a row that trained": lambda: [ended(planned(ZERO(2), 4)), ended(planned(ZERO(3), 4), 40)],
    "no change is enough": lambda: [
        fakes.failure(planned(ZERO(3)), schema.OOM, requested_bytes=5000 * GB, free_bytes=0)
    ],
    "skipped": lambda: [
        fakes.failure(replace(planned(ZERO(0)), skipped="too much"), schema.SKIPPED, error="too much", phase=None)
    ],
    "without a prediction": lambda: [failed(schema.OOM)],
    # Nothing is left but shorter sequences.
    "one sequence with checkpointing, without a prediction": lambda: [
        fakes.failure(fakes.trial(ZERO(3), on=CARDS, of=fakes.workload(batch_size=1, activation_checkpointing=True)))
    ],
    "with an unusable prediction": lambda: [unusable()],
    "killed before changes were judged": lambda: [with_alternatives(None)],
    "no change would save memory": lambda: [with_alternatives([])],
    # Two ranks of 4 GB each have 8 GB, not the 256 GB of the host.
    "a limit of 4 GB": lambda: [on_ranks_of(4)],
    "a limit of 1 GB": lambda: [on_ranks_of(1)],
    # A bucket of 5e8 elements takes 0.93 GB in bf16, whatever the micro-batch; a small one does not get smaller.
    "bucket": lambda: [bucket(planned(ZERO(2), 4, batch_size=2)), ended(planned(ZERO(3), 4, batch_size=2), 40.0)],
    "bucket without a prediction": lambda: [bucket(out_of_memory(ZERO(2), 4).trial)],
    "small bucket": lambda: [bucket(planned(ZERO(2), 4, batch_size=2), 50_000_000)],
    "full host": lambda: [fakes.failure(planned(OFFLOAD("cpu_full")), schema.OOM_HOST, requested_bytes=GB)],
    "full disk": lambda: [fakes.failure(planned(OFFLOAD("nvme")), schema.OOM_DISK)],
    "fragmented": lambda: [failed(schema.OOM, requested_bytes=GB, free_bytes=2 * GB)],
    "two rows with one cause of 5,000 letters": lambda: [
        failed(schema.KILLED, ZERO(stage), error="x" * 5000) for stage in (0, 1)
    ],
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_would_let_a_row_train(name: str, snapshot: SnapshotAssertion) -> None:
    records = SITUATIONS[name]()
    assert text_of(advice(*records)) == snapshot
    if name == "every stage on one card":  # without room for 121 GB on the host only the disk is left
        assert str(advice(*records, host_gb=64).try_next) == "--strategies nvme --nvme-path DIR"


def test_limit_is_what_the_run_had_less_what_others_hold() -> None:
    """20 GB were missing of what was predicted; and 3 GB were measured outside the allocator, more than was assumed."""
    trial = planned(ZERO(3), 4)
    case = setup(fakes.failure(trial, schema.OOM, requested_bytes=21 * GB, free_bytes=GB))
    assert case.gpu_limit_bytes == sum((trial.prediction or {})["gpu"].values()) - 20 * GB
    pair = planned(ZERO(1), 2)
    assumed = (pair.prediction or {})["gpu"]["overhead"]
    for outside, limit in ((GB // 2, 32 * GB), (3 * GB, 29 * GB + assumed)):
        used = {"gpu_device_used_bytes": 3 * GB, "gpu_reserved_bytes": 3 * GB - outside, "gpu_total_bytes": 32 * GB}
        seen = fakes.success(planned(ZERO(3), 2), **used)
        assert setup(ended(pair), seen, shortage=Shortage()).gpu_limit_bytes == limit


def test_change_with_room_to_spare_is_preferred_to_a_tight_one() -> None:
    case = setup(ended(planned(ZERO(3), 4)))
    sizes = ((90, 101), (90, 100), (101, 120))
    tight, roomy, large = (
        replace(
            case.alternatives[0],
            need=GpuNeed(least_bytes=least, reserved_bytes=reserved, phase="step", method="replay"),
            host_bytes=0,
        )
        for least, reserved in sizes
    )
    for alternatives, expected in (((tight, roomy), roomy), ((large, tight), tight), ((large,), None)):
        changed = replace(case, alternatives=alternatives, gpu_bytes=100, gpu_limit_bytes=100, host_limit_bytes=None)
        assert changed.smallest_fit() == expected
        assert expected is None or changed.fits(expected) == (expected is roomy)


@pytest.mark.parametrize("row", [ZERO(0), ZERO(2)])
def test_change_is_judged_as_a_run_with_it_would_be(row: Configuration) -> None:
    """Near the card by the same replay, far from it by the same rule."""
    changes = stored(planned(row, 4, batch_size=2)).alternatives
    methods = set()
    for each in changes:
        settings = {"batch_size": 2, **each.settings}
        name, cards = settings.pop("strategy", row.name), settings.pop("num_gpus", 4)
        if BUCKET_KEY in settings:
            continue
        asked = fakes.workload(model=LLAMA, seq_length=2048, **settings)
        on = fakes.placement(accelerator="cuda", num_gpus=cards, nvme_path="/nvme")
        run = stored(predicted(fakes.trial(make_configuration(named_strategy(name)), on=on, of=asked), PROFILE))
        assert run.need == each.need, each.settings
        methods.add(each.need and each.need.method)
    assert methods == {"rule", "replay"}


def test_record_has_changes_only_if_memory_was_short_and_no_process_traces_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With adapters that the package has no trace of, they are judged by the rule, which the finding shows."""
    monkeypatch.setattr(allocation_trace, "make_traces", pytest.fail)
    monkeypatch.setattr(model_profile, "cached_answer", lambda _key: None)
    work = fakes.workload(model=LLAMA, batch_size=8, seq_length=2048, lora="16:q_proj,v_proj")
    model = replace(fakes.resolved_model(LLAMA), architecture=None)
    profile = trial_predictions.profile_model(model, 2048, "cuda", choice=trained_parameters.of_workload(work))
    trial = fakes.trial(ZERO(2), on=CARDS, of=work)
    none = MemoryCapacity(gpu_bytes=None, host_bytes=None)
    (trial,) = trial_predictions.attach_predictions([trial], profile, none, skip=False)
    found, fine = (
        stored(trial_predictions.with_savings(trial, profile, gpu_bytes=24 * GB, lacked_memory=short))
        for short in (True, False)
    )
    assert fine.alternatives is None
    assert fine.savings == found.savings != ()
    reasons = {each.need.not_replayed for each in found.alternatives if each.need is not None}
    assert reasons == {None, "the lack of a trace of this model"}


@pytest.mark.parametrize("cards", [1, 4])
@pytest.mark.parametrize(("phase", "stage"), [("import", 2), ("build", 0), ("build", 3), ("init", 3), ("step", 2)])
def test_remedy_acts_in_the_phase_that_ran_out(phase: str, stage: int, cards: int) -> None:
    run = ended(planned(ZERO(stage), cards))
    run = replace(run, outcome=replace(run.outcome, phase=phase))
    changes = setup(run).alternatives
    assert not [each for each in changes if {"batch_size", "activation_checkpointing"} & each.settings.keys()]
    # Only stage 3 partitions a model while it is built.
    assert phase != "build" or {each.layout[0] for each in changes} <= {3}
    texts = " ".join(map(str, [advice(run).try_next, *advice(run).next_steps]))
    assert not [word for word in ("--batch-size", "micro-batch", "--seq-length") if word in texts]


def test_settings_are_flags_of_the_command_line() -> None:
    settings = {"batch_size": 2, "activation_checkpointing": True, "stages": [0, 3], "zero_optimization.stage": 1}
    line = flags(settings)
    assert line == "--batch-size 2 --activation-checkpointing --stages 0 3 --set zero_optimization.stage=1"
    assert parse("zero", "zero_stage_comparison.py", line.split()).batch_size == 2


# ------------------------------------------------------------------ what to do about every ending

HOSTS = replace(out_of_memory(ZERO(2)).trial.placement, num_gpus=2, hosts=(("a", 1), ("b", 1)))
STARTED = failed(schema.TIMEOUT, phase="init")


def test_every_ending_has_its_action(subtests: pytest.Subtests) -> None:
    for kind, record in (
        ("timeout", failed(schema.TIMEOUT, phase="forward")),
        ("timeout_at_start", STARTED),
        ("timeout_at_start_of_hosts", replace(STARTED, trial=replace(STARTED.trial, placement=HOSTS))),
        ("disk_full", failed(schema.OOM_DISK, kind="disk_full")),
        ("swap_disk_full", failed(schema.OOM_DISK, OFFLOAD("nvme"))),
        ("killed", failed(schema.KILLED)),
        ("crashed", failed(schema.CRASHED)),
        ("crashed_script", of_script(failed(schema.CRASHED))),
        ("other_engine", of_script(failed(schema.NO_ENGINE))),
        ("unsupported", failed(schema.UNSUPPORTED)),
        ("skipped", failed(schema.SKIPPED)),
        ("interrupted", failed(schema.INTERRUPTED)),
        ("no_engine", failed(schema.NO_ENGINE)),
        ("ended_early", failed(schema.ENDED_EARLY)),
        ("exited", failed("SystemExit")),
        ("exception", failed("RuntimeError")),
        ("nvme_exception", failed("RuntimeError", OFFLOAD("nvme"))),
        ("shared_memory", failed("RuntimeError", kind="shared_memory")),
        ("bus_error", failed(schema.CRASHED, kind="bus_error")),
        ("pinned_memory", failed(schema.OOM_HOST, OFFLOAD("cpu_full"), kind="pinned_memory")),
        ("memlock", failed("DistBackendError", kind="memlock")),
        ("peer_access", failed("DistBackendError", kind="peer_access")),
        ("fabric_manager", failed("AcceleratorError", kind="fabric_manager")),
        ("gathered_views", failed("RuntimeError", kind="gathered_views")),
        ("collective_timeout", failed(schema.TIMEOUT, kind="collective_timeout")),
    ):
        with subtests.test(kind):
            (row,) = compared(record).rows
            found = advice(record)
            assert found.try_next == about(found, row.label).values["action"] == action_of(row.runs[0])
            assert found.try_next.kind == kind
            # Nor does a record without its details leave a hole.
            bare = replace(record, outcome=replace(record.outcome, error=None, phase=None, rank=None, details=None))
            assert "None" not in " ".join([*found.lines, *advice(bare).lines])


def test_run_out_of_memory_outweighs_an_earlier_failure() -> None:
    killed, short = failed(schema.KILLED), failed(schema.OOM, requested_bytes=2 * GB, free_bytes=GB)
    found = failed_run(compared(killed, replace(short, trial=replace(killed.trial, repeat=1))).rows[0])
    assert found is not None
    assert found.outcome == short.outcome


def test_an_exception_and_its_phase_are_named_once() -> None:
    error = "RuntimeError in backward: shapes do not match"
    record = replace(fakes.failure(status="RuntimeError", error=error), failures=(fakes.rank_failure(),))
    assert "failed with RuntimeError in backward (shapes do not match); " in text_of(advice(record))
