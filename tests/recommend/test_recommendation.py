"""A recommendation: who may be chosen, the facts about the choice, and the next steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_bench.analysis.comparison import compare
from ds_bench.analysis.load_results import flat_run, make_runs
from ds_bench.config.options import GOALS
from ds_bench.config.spec import Configuration
from ds_bench.recommend.recommendation import Recommendation, recommend
from ds_bench.recommend.words import Fact
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from tests.support import fakes
from tests.support.recommendations import GB, answer, compared, out_of_memory, repeated, row

ZERO, OFFLOAD = fakes.zero, fakes.offload
NO_LOSS = {"losses": (None,) * 12}


def values(found: Recommendation, kind: str) -> list[Any]:
    return [fact.values for fact in found.facts if fact.kind == kind]


def on_cpu(strategy: Configuration, host_gb: float, tokens_per_second: float, repeat: int = 0) -> TrialRecord:
    """A success on the CPU accelerator, with the optimizer that DeepSpeed takes there."""
    return fakes.success(
        fakes.trial(strategy, repeat=repeat),
        step_seconds=[512 / tokens_per_second] * 10,
        host_peak_bytes=int(host_gb * GB),
        optimizer_class="AdamW" if strategy.offload_optimizer == "none" else "DeepSpeedCPUAdam",
    )


# ------------------------------------------------------------------ too few runs


def test_provisional_answer_names_the_command_that_decides_it() -> None:
    records = row(ZERO(0), 8, 1000), row(ZERO(1), 8, 1006)
    found = answer(*records, resume="python zero_stage_comparison.py --resume RUN")
    assert str(found.headline) == "Too close to call after one run each. Start with ZeRO-0, the simplest."
    assert str(found.provisional) == (
        "Provisional: after one run each, a lead below 15 % may be chance. "
        "To decide: python zero_stage_comparison.py --resume RUN --repeats 3"
    )
    assert str(answer(*records).try_next) == "the same command with --repeats 3"
    # A run that failed is made up for by one more round.
    on = fakes.placement(accelerator="cuda", num_gpus=1)
    failed = [fakes.failure(fakes.trial(ZERO(1), on=on, repeat=each), schema.TIMEOUT) for each in (1, 2)]
    again = answer(*repeated(0, 8, [1000, 1001, 1002]), row(ZERO(1), 8, 1006), *failed).provisional
    assert again is not None
    assert again.settings == {"repeats": 5}


def test_lead_within_the_spread_of_steps_is_not_decided() -> None:
    """172.6 ± 134.5 ms against 250 ms, one run each: 45 % faster, but the steps vary by 82 %."""
    disk = replace(row(OFFLOAD("nvme"), 8, 1000), trial=row(ZERO(3), 8, 1).trial)
    disk = replace(disk, ranks=(replace(disk.ranks[0], step_seconds=(0.0381, 0.3071) * 5, window_seconds=1.726),))
    found = answer(row(ZERO(1), 8, 512 / 0.25), disk)
    assert found.undecided == found.tied == ("ZeRO-1", "ZeRO-3")
    assert found.provisional is not None
    assert found.provisional.values["lead"] == "82 %"


# ------------------------------------------------------------------ facts about the choice

PAIR = [*repeated(0, 52, [11_400] * 3), *repeated(2, 28, [10_500] * 3)]
COST = "7.9 % slower than ZeRO-0, saves 24.00 GB of device memory"


@pytest.mark.parametrize(
    ("records", "goal", "headline", "cost"),
    [
        (PAIR, "balanced", "Use ZeRO-2: 92 % of ZeRO-0's speed with 24.0 GB less of device memory.", COST),
        (PAIR, "speed", "Use ZeRO-0: fastest of 2 rows.", "None"),
        (PAIR, "memory", "Use ZeRO-2: least device memory of 2 rows.", COST),
        ([*repeated(0, 8, [1000] * 2), *repeated(1, 8, [700] * 2)], "balanced",
         "Use ZeRO-0: fastest of 2 rows, by 2 runs each.", "None"),
        (PAIR[:1], "balanced", "Use ZeRO-0: the only row that can be recommended.", "None"),
        ([*repeated(0, 70, [1000]), *repeated(3, 40, [950])], "balanced",
         "Too close to call after one run each. Start with ZeRO-3, which needs less memory.",
         "saves 30.00 GB of device memory against ZeRO-0, which is tied with it"),
    ],
)  # fmt: skip
def test_headline_and_cost_hold_the_numbers_of_the_rule(records: Any, goal: str, headline: str, cost: str) -> None:
    """10,500 of 11,400 are 92.1 %, so 7.9 % slower; 52 − 28 = 24 GB saved."""
    found = answer(*records, goal=goal)
    assert (str(found.headline), str(found.cost)) == (headline, cost)


@pytest.mark.parametrize(
    ("rows", "kind", "percent"),
    [
        (([1000], [990]), "lead_untested", 1.0),
        (([999, 1000, 1001], [899, 900, 901]), "lead", 11.1),
        (([1000, 1125, 900], [1000, 990, 1001]), "lead_in_noise", 0.7),
    ],
)
def test_lead_is_compared_with_the_noise(rows: Any, kind: str, percent: float) -> None:
    """Geometric means 1004.1 and 997.0 give 0.7 %; medians would say 0.0 %, means 1.1 %."""
    (found,) = values(answer(*repeated(0, 8, rows[0]), *repeated(2, 8, rows[1])), kind)
    assert round(100 * found["difference"], 1) == percent


SOUND, NOISY = repeated(0, 8, [980, 1020, 1000]), repeated(0, 8, [985, 1005, 1020])
FOUR = [row(ZERO(2), 28, 10_500, cards=4), row(ZERO(3), 18, 8_700, cards=4)]


@pytest.mark.parametrize(
    ("records", "choice", "expected"),
    [
        # Means 1003.3 and 1000 with spreads of 20: the interval includes 1. 8.0 − 6.5 GB = 1.5 GB.
        ([*NOISY, *repeated(2, 6.5, [980, 1000, 1020])], "ZeRO-0", ("leaner", 3 * GB // 2)),
        ([*repeated(0, 8, [999, 1000, 1001]), *repeated(2, 6.5, [899, 900, 901])], "ZeRO-0", None),
        # 3 % less memory is too little to name, and 1 % more speed in noise of 2 % no lead.
        ([*NOISY, *repeated(2, 7.8, [980, 1000, 1020])], "ZeRO-0", None),
        ([*SOUND, *repeated(1, 8, [1030, 990, 1010], **NO_LOSS)], "ZeRO-0", None),
        ([*SOUND, *repeated(1, 8, [1520, 1480, 1500], **NO_LOSS)], "ZeRO-0", ("faster_left_out", "50 %")),
        # 78 of 80 GB are too full.
        ([row(ZERO(0), 78, 1250), row(ZERO(2), 40, 1000)], "ZeRO-2", ("faster_too_full", "25 %")),
        ([row(ZERO(0), 78, 1010), row(ZERO(2), 40, 1000)], "ZeRO-2", None),
        ([*FOUR, row(fakes.reference("fsdp2"), 20, 15_000, cards=4)], "ZeRO-2", ("faster_reference", "43 %")),
        ([*repeated(3, 10, [1000] * 3), *(row(OFFLOAD("cpu_optimizer"), 20, 1020, repeat=each) for each in range(3))],
         "ZeRO-3", ("faster_takes_more", "2 %")),
    ],
)  # fmt: skip
def test_what_speaks_for_another_row_is_the_alternative(records: Any, choice: str, expected: Any) -> None:
    found = answer(*records)
    fact = found.alternative
    assert found.choice == choice
    assert (fact and (fact.kind, fact.values.get("lead") or fact.values["saved"])) == expected
    # It is named once.
    assert fact is None or fact.values["row"] not in [each["row"] for each in values(found, "left_out")]


def test_every_text_is_one_line() -> None:
    broken = fakes.failure(fakes.trial(ZERO(3)), "ValueError", error="one\ntwo\n\tthree")
    found = answer(on_cpu(ZERO(0), 1, 100), broken)
    assert all("\n" not in line for line in found.lines)
    assert any("one two three" in str(step) for step in found.next_steps)
    assert found.lines[0] == "Recommendation (balanced): ZeRO-0"
    # The notes of a report have the remedies of caveats.
    remedies = {f"Next: {step}" for step in found.next_steps if step.kind == "caveat"}
    assert remedies
    assert not remedies & {*found.lines}
    assert answer().lines == ["Recommendation (balanced): none", "No row to use: nothing was run."]


# ------------------------------------------------------------------ who may be chosen


def test_rows_that_may_not_be_chosen_have_a_reason(subtests: pytest.Subtests) -> None:
    zero0, zero1 = row(ZERO(0), 8, 45_000), row(ZERO(1), 8, 44_000)
    other_torch = row(ZERO(2), 6, 99_000, torch_version="2.12.0")
    wrong, full = row(ZERO(2), 6, 9_000, **NO_LOSS), row(ZERO(2), 78, 1_000)
    once = replace(out_of_memory(ZERO(2)), trial=replace(row(ZERO(2), 7, 1).trial, repeat=2, trial_id="x"))
    for records, choice, reason in (
        ((zero0, other_torch), None, "not_comparable"),
        ((zero0, zero1, other_torch), "ZeRO-0", "not_comparable"),
        ((zero0, wrong), "ZeRO-0", "invalid"),
        ((wrong,), None, "invalid"),
        ((zero0, *repeated(2, 7, [9_000, 9_000]), once), "ZeRO-0", "ran_out"),
        ((zero0, full), "ZeRO-0", "too_full"),
        ((full,), None, "too_full"),
        ((row(fakes.reference("fsdp2"), 7, 1_000),), None, "reference"),
    ):
        with subtests.test(reason=reason, choice=choice, rows=len(records)):
            found = answer(*records)
            assert found.choice == choice
            assert [each["reason"].kind for each in values(found, "left_out")] == [reason]
    assert "--precision fp32" in str(answer(wrong).try_next)
    # 78 of 80 GB are 97.5 %; 95 % are 76, so 2 GB over.
    assert str(answer(full).next_steps[0]).startswith("ZeRO-2 is 2.00 GB over 95 % of the card")
    timeout = fakes.failure(out_of_memory(ZERO(1)).trial, schema.TIMEOUT)
    assert str(answer(out_of_memory(ZERO(0)), timeout).headline) == "No row trained: 1 OOM and 1 Timeout."


def test_many_rows_are_counted_instead_of_named() -> None:
    others = [row(ZERO(1), 8, 900, torch_version=f"2.{number}.0") for number in range(9)]
    found = answer(row(ZERO(0), 8, 1000), row(ZERO(2), 8, 1100), *others)
    assert (len(values(found, "left_out")), values(found, "more_left_out")) == (6, [{"count": 3}])
    base = out_of_memory(ZERO(2)).trial
    trials = [replace(base, ds_config={**base.ds_config, "number": number}) for number in range(12)]
    steps = answer(row(ZERO(0), 8, 1000), *(fakes.failure(each, schema.KILLED) for each in trials)).next_steps
    assert [len(step.values["rows"]) for step in steps if "rows" in step.values] == [6]
    assert Fact("more_failures", {"count": 6}) in steps


def test_cpu_accelerator_weighs_host_memory_and_does_not_mention_gpus() -> None:
    """3 of 4 GB are 75 %; the slower row keeps 95 % of the speed with 1 GB less."""
    comparison = compared(on_cpu(ZERO(0), 3, 1000), on_cpu(ZERO(2), 2, 950))
    unknown = recommend(comparison)
    assert (unknown.choice, unknown.facts[-1].kind) == ("ZeRO-0", "on_host")
    assert "the card" not in " ".join(unknown.lines)
    found = recommend(replace(comparison, host_capacity_bytes=4 * GB))
    assert found.choice == "ZeRO-2"
    assert "1.00 GB of host memory" in str(found.cost)
    assert recommend(replace(comparison, host_capacity_bytes=100 * GB)).choice == "ZeRO-0"


def test_cpu_rows_with_different_optimizers_are_not_compared_by_speed() -> None:
    """Three quiet runs each: offload four times as fast, as its optimizer is another program."""
    speeds = [(ZERO(0), 900.0), (ZERO(3), 1000.0), (OFFLOAD("cpu_optimizer"), 4000.0)]
    runs = [on_cpu(each, 2, speed * (1 + 0.001 * repeat), repeat) for each, speed in speeds for repeat in range(3)]
    for goal in GOALS:
        found = answer(*runs, goal=goal)
        assert (found.choice, found.decided, found.tied, found.cost) == ("ZeRO-3", True, (), None)
        assert values(found, "other_optimizers") == [{"choice": "ZeRO-3", "rows": ["ZeRO-3 + CPU optimizer"]}]
        assert found.alternative is not None
        assert found.alternative.kind == "faster_optimizer"
        assert answer(*runs[6:], goal=goal).choice == "ZeRO-3 + CPU optimizer"  # nothing else to choose from
    # On a GPU the optimizer of an offloaded row is part of its speed.
    fast = row(OFFLOAD("cpu_optimizer"), 8, 4000, optimizer_class="DeepSpeedCPUAdam")
    on_gpu = answer(row(ZERO(3), 8, 1000, optimizer_class="FusedAdam"), fast, goal="speed")
    assert on_gpu.choice == "ZeRO-3 + CPU optimizer"


# ------------------------------------------------------------------ what to try next


def test_room_on_the_card_is_offered_as_a_micro_batch() -> None:
    """20 of 80 GB with 8 GB of activations at micro-batch 4: ×4 adds 24 GB (44 GB, 55 %), ×8 adds 56 (76 > 72)."""
    records = [row(ZERO(0), 20, 1000, ledger={"gpu": {"activations": 8 * GB}})]
    step = Fact("larger_batch", {"size": 16, "share": 0.55})
    assert step in answer(*records).next_steps
    assert step in recommend(compare([flat_run(run.row) for run in make_runs(records)])).next_steps
    assert "larger_batch" not in [step.kind for step in answer(row(ZERO(0), 20, 1000)).next_steps]


ONE = row(ZERO(0), 20, 1000)


@pytest.mark.parametrize(
    ("records", "settings"),
    [
        ([ONE], {"batch_size": "auto"}),
        ([row(ZERO(0), 20, 10_000)], {"num_steps": 50}),
        ([ONE, row(ZERO(3), 10, 500)], {"repeats": 3}),
        ([*(row(ZERO(0), 8, 1000 * (1 + 0.2 * each), repeat=each) for each in range(3)),
          *repeated(3, 4, [300, 301, 302])], {"repeats": 6}),
        ([ONE, out_of_memory(ZERO(1))], {"batch_size": 2, "stages": [1]}),
        ([out_of_memory(ZERO(0)), out_of_memory(ZERO(1))], {"batch_size": 2}),
    ],
)  # fmt: skip
def test_the_first_thing_to_try(records: Any, settings: Any) -> None:
    assert answer(*records).try_next == Fact("try", settings=settings)
    # Before all else: rows that are missing may change the choice.
    if "batch_size" not in settings:
        missing = fakes.failure(row(ZERO(2), 20, 1000).trial, schema.INTERRUPTED)
        assert answer(*records, missing).try_next == Fact("interrupted")


def at_largest(stage: int, batch: int, gigabytes: float, speed: float, **more: Any) -> TrialRecord:
    """A success whose micro-batch was searched for: ``speed`` tokens/s at that batch on two cards."""
    made = row(ZERO(stage), gigabytes, speed, cards=2, **more)
    work = fakes.workload(batch_size=batch, batch_policy="largest")
    steps = (batch * 128 * 2 / speed,) * 10
    rank = replace(made.ranks[0], step_seconds=steps, window_seconds=sum(steps), micro_batch_size=batch)
    trial = fakes.trial(ZERO(stage), on=made.trial.placement, of=work)
    return replace(made, trial=trial, ranks=(rank, replace(rank, rank=1)))


def test_rows_at_their_own_largest_batch_may_fill_the_card() -> None:
    """79 and 78 of 80 GB are more than 95 %, on purpose: the faster row is chosen, not the leaner."""
    found = answer(at_largest(0, 4, 78, 800), at_largest(2, 16, 79, 1000))
    assert (found.choice, values(found, "left_out")) == ("ZeRO-2", [])
    assert answer(at_largest(0, 4, 78, 800)).try_next is None
    roomy = {"ledger": {"gpu": {"activations": GB}}}
    steps = answer(at_largest(0, 4, 20, 1000, **roomy), at_largest(2, 16, 70, 990)).next_steps
    assert not {"larger_batch", "rule"} & {step.kind for step in steps}
    # A row that ran out at its largest size is in the table at a smaller one: it needs no remedy.
    larger = fakes.failure(at_largest(0, 8, 78, 800).trial, schema.OOM)
    assert answer(larger).try_next == Fact("try", settings={"activation_checkpointing": True})
    assert answer(at_largest(0, 4, 78, 10_000), larger).try_next == Fact("try", settings={"num_steps": 50})
