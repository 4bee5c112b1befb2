"""Rows against their baseline: means by hand, ratios only where they mean something, fronts that nobody beats."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.analysis.comparison import Comparison, ComparisonRow, compare, ratio_between
from ds_bench.analysis.load_results import flat_run
from ds_bench.analysis.loss_parity import with_loss_caveats
from ds_bench.analysis.row import Run, make_run
from ds_bench.config.caveat_texts import Caveat, CaveatKind, note
from ds_bench.config.spec import Trial
from ds_bench.errors import UsageError
from ds_bench.records.schema import TrialRecord
from ds_bench.system.environment import Environment
from ds_bench.system.gpu_state import GpuFacts
from tests.support import fakes

CUDA = fakes.placement(accelerator="cuda", num_gpus=2)
GB = 2**30


def gpu(stage: int = 1, repeat: int = 0, **changes: Any) -> Trial:
    return fakes.trial(fakes.zero(stage), on=changes.pop("on", CUDA), repeat=repeat, **changes)


def ran(stage: int, seconds: float = 0.1, repeat: int = 0, **changes: Any) -> TrialRecord:
    """A run whose steps all take ``seconds``: 1024 tokens a step on two cards."""
    return fakes.success(gpu(stage, repeat), step_seconds=[seconds] * 10, **changes)


def runs(stage: int, *seconds: float) -> list[TrialRecord]:
    return [ran(stage, each, repeat) for repeat, each in enumerate(seconds)]


def compared(*records: TrialRecord, relative_to: str | None = None, on: tuple[Environment, ...] = ()) -> Comparison:
    return compare([make_run(each) for each in records], relative_to, environments=on)


def rows(*records: TrialRecord, **changes: Any) -> tuple[ComparisonRow, ...]:
    return compared(*records, **changes).rows


# ------------------------------------------------------------------ one row


def test_a_row_by_hand() -> None:
    """1024 tokens in 0.1, 0.2 and 0.4 s are 10 240, 5120 and 2560 tokens/s: geometric mean 5120, 640 for each of 8 GB.

    Deviation of the step times: mean 0.2333, squares 0.01778, 0.00111, 0.02778 by 2: 0.02333, root 0.15275.
    """
    (row,) = rows(*runs(2, 0.1, 0.2, 0.4))
    assert row.tokens_per_second == pytest.approx(5120)
    assert row.mean_step_seconds == pytest.approx(0.2)
    assert row.step_seconds_std == pytest.approx(0.15275, abs=1e-5)
    assert row.tokens_per_second_per_gb == pytest.approx(640)
    assert (row.label, row.ratio) == ("ZeRO-2", 1)
    assert row.interval is not None
    assert row.interval[0] < 5120 < row.interval[1]
    (one,) = rows(fakes.success(gpu(), step_seconds=[0.1, 0.2, 0.3]))
    assert (one.step_seconds_std, one.interval) == (pytest.approx(0.1), None)  # the spread of its steps


def test_memory_is_the_worst_runs_and_not_the_medians() -> None:
    """Whoever runs out once has run out."""
    peaks = [
        ran(1, repeat=n, gpu_peak_bytes=p * GB, gpu_peak_reserved_bytes=p * GB, host_peak_bytes=p)
        for n, p in enumerate((8, 40, 9))
    ]
    (row,) = rows(*peaks)
    assert (row.gpu_peak_bytes, row.gpu_fraction, row.host_peak_bytes) == (40 * GB, 42 / 80, 80)


def test_a_run_that_failed_takes_no_part_in_the_numbers_and_is_counted() -> None:
    partly, never = rows(ran(1, 0.1), fakes.failure(gpu(1, 1)), ran(1, 0.3, 2), fakes.failure(gpu(2)))
    assert partly.tokens_per_second == pytest.approx(1024 / math.sqrt(0.1 * 0.3))
    assert note("1 of 3 runs failed") in partly.caveats
    numbers = ("tokens_per_second", "mean_step_seconds", "step_seconds_std", "interval", "ratio", "ratio_interval",
               "tokens_per_second_per_gb", "gpu_peak_bytes", "gpu_fraction", "host_peak_bytes")  # fmt: skip
    assert {getattr(never, name) for name in numbers} == {None}
    assert (never.caveats, never.succeeded) == ((), False)


def test_each_caveat_of_several_runs_is_said_once() -> None:
    wobbly = [fakes.success(gpu(1, n), step_seconds=[0.1] * 20 + [0.5] * (1 + n)) for n in (0, 2, 1)]
    (row,) = rows(*wobbly)
    kinds = [caveat.kind for caveat in row.caveats]
    assert len(kinds) == len(set(kinds))
    assert row.caveats[kinds.index(CaveatKind.OUTLIERS)].values["count"] == 3, "of the run with most of them"
    throttled = [
        make_run(fakes.success(gpu(1, n), step_seconds=[0.1] * 10)).with_row(
            caveats=(Caveat(CaveatKind.CPU_QUOTA, {"fraction": fraction}),), cpu_other_cores=other
        )
        for n, (fraction, other) in enumerate(((0.12, 0.3), (0.6, 0.1)))
    ]
    (row,) = compare(throttled).rows
    assert [each.values["fraction"] for each in row.caveats if each.kind is CaveatKind.CPU_QUOTA] == [0.6]
    plain = [make_run(each) for each in (ran(1), ran(3, losses=(85.0,) * 12))]
    for given_runs in (plain, with_loss_caveats(plain)):
        assert [caveat.kind for caveat in compare(given_runs).rows[1].caveats] == [CaveatKind.LOSS_DIFFERS]


def test_runs_whose_means_vary_by_more_than_5_percent_are_called_unstable(subtests: pytest.Subtests) -> None:
    """For two values, the deviation over the mean is √2 × (a − b) / (a + b), and the same for 1/a and 1/b.

    0.1 and 0.1073 s: √2 × 0.0073 / 0.2073 = 4.980 %. 0.1 and 0.1074 s: √2 × 0.0074 / 0.2074 = 5.046 %.
    """
    for other, said in ((0.1073, False), (0.1074, True)):
        with subtests.test(other=other, said=said):
            (row,) = rows(*runs(1, 0.1, other))
            assert [caveat.kind for caveat in row.caveats] == [CaveatKind.UNSTABLE_RUNS] * said


def test_one_configuration_under_two_names_is_one_row_that_says_so() -> None:
    """ZeRO-3 of one script is "none" of the other; a change to one value makes it a different row."""
    first = ran(3, 0.1)
    trial = replace(first.trial, configuration=fakes.offload("none"), repeat=1)
    other = replace(trial, ds_config={**trial.ds_config, "gradient_clipping": 0.5})
    found = rows(first, fakes.success(trial, step_seconds=[0.1] * 10), fakes.success(other, step_seconds=[0.1] * 10))
    assert [(row.label, len(row.runs)) for row in found] == [("ZeRO-3 (name zero3)", 2), ("ZeRO-3 (name none)", 1)]
    assert "the same configuration also ran as none; all of them form one row" in [
        each.text for each in found[0].caveats
    ]


# ------------------------------------------------------------------ against the baseline


def test_ratios_by_hand() -> None:
    """Geometric means of 0.2, 0.2, 0.2 s and 0.1, 0.1, 0.4 s: 0.2 / (0.1 × 4^(1/3)) = 1.2599; medians would say 2."""
    _, row = rows(ran(0, 0.1), ran(3, 0.125))
    assert (row.ratio, row.ratio_interval) == (pytest.approx(0.8), None)
    slow, fast = rows(*runs(0, 0.2, 0.2, 0.2), *runs(1, 0.1, 0.1, 0.4))
    assert fast.ratio_interval is not None
    assert fast.ratio == fast.ratio_interval.ratio == pytest.approx(1.2599, abs=1e-4)
    assert (slow.ratio, slow.ratio_interval) == (1, None)
    few = [*runs(1, 0.1, 0.1), fakes.failure(gpu(1, 2))]
    assert rows(*runs(0, 0.2, 0.2, 0.2), *few)[1].ratio_interval is None


def test_the_interval_between_two_rows_is_the_tables_and_uses_the_runs_of_all() -> None:
    """a, b and c vary alike: the noise is estimated from all nine runs, and one level covers all three pairs."""
    seconds = {0: (0.100, 0.103, 0.101), 1: (0.111, 0.110, 0.113), 2: (0.122, 0.120, 0.121)}
    a, b, c = rows(*(record for stage, own in seconds.items() for record in runs(stage, *own)))
    assert ratio_between(b, a) == b.ratio_interval
    between, inverse = ratio_between(c, b), ratio_between(a, b)
    assert between is not None
    assert between.degrees_of_freedom == 9 - 3 - 1
    assert between.confidence == pytest.approx(1 - 0.028 / 3)  # the level that keeps autocorrelated noise below 5 %
    assert between.distinguishable
    assert inverse == (b.ratio_interval and b.ratio_interval.inverse)
    assert ratio_between(a, a) is None
    # Rows of two comparisons: by their own runs.
    (after,) = rows(*runs(1, 0.110, 0.111, 0.112))
    found = ratio_between(after, a)
    assert found is not None
    assert (found.degrees_of_freedom, found.confidence) == (pytest.approx(3, abs=1), pytest.approx(0.95))


def test_the_trend_is_that_of_the_order_in_which_runs_really_ran() -> None:
    """Each run 5 % slower than the one before, in the order a b, b a, a b: noise has no part in it."""
    moments = {(0, 0): 0, (1, 0): 1, (1, 1): 2, (0, 1): 3, (0, 2): 4, (1, 2): 5}
    records = [
        replace(ran(stage, (1 + stage) * 0.1 * 1.05**moment, repeat), started_at=f"2026-11-21T09:00:{moment:02}+00:00")
        for (stage, repeat), moment in sorted(moments.items())
    ]
    _, b = rows(*records)
    assert b.ratio_interval is not None
    assert b.ratio_interval.low <= 0.5 <= b.ratio_interval.high
    assert b.ratio_interval.high - b.ratio_interval.low < 0.01


def test_on_the_cpu_accelerator_an_interval_beyond_a_factor_of_two_decides_nothing(subtests: pytest.Subtests) -> None:
    """As measured on a busy machine: 521, 1326 and 217 ms against 24, 19 and 16."""
    for on, decides in ((fakes.placement(), False), (CUDA, True)):
        with subtests.test(decides=decides):
            records = [
                fakes.success(gpu(stage, repeat, on=on), step_seconds=[each] * 10)
                for stage, own in {0: (0.521, 1.326, 0.217), 3: (0.024, 0.016, 0.019)}.items()
                for repeat, each in enumerate(own)
            ]
            interval = rows(*records)[1].ratio_interval
            assert interval is not None
            assert interval.low > 1
            assert interval.distinguishable is decides


def test_any_row_can_be_the_baseline_by_any_of_its_names() -> None:
    large = fakes.success(gpu(2, of=fakes.workload(batch_size=8)), step_seconds=[0.1] * 10)
    for name, place in (("zero2", 2), ("ZeRO-1", 1), ("stage 2", 2), ("ZeRO-2 (micro-batch 8)", 3)):
        comparison = compared(*(ran(stage, 0.1 * (stage + 1)) for stage in (0, 1, 2)), large, relative_to=name)
        assert comparison.baseline == comparison.rows[place] == comparison.row(comparison.rows[place].key), name
    with pytest.raises(UsageError, match=r"--relative-to zero7.*Choose from zero0, zero3"):
        compared(ran(0), ran(3), relative_to="zero7")


WRONG: dict[str, Any] = {"losses": (None,) * 12}
FAILED = fakes.failure(gpu(0))


@pytest.mark.parametrize(
    ("records", "relative_to", "baseline", "ratios", "said"),
    [
        # The usual case of a large model: ZeRO-0 does not fit, and the rows behind it are still compared.
        ((FAILED, ran(1, 0.05, **WRONG), ran(2, 0.1), ran(3, 0.2)), None, 2, [None, 2, 1, 0.5], "ZeRO-2, because"),
        ((FAILED, ran(1), ran(2)), "zero0", None, [None] * 3, "ZeRO-0 has no numbers"),
        ((FAILED, fakes.failure(gpu(1))), None, None, [None] * 2, None),
        ((ran(0, 0.05, **WRONG), ran(1, 0.1), ran(2, 0.2)), None, 1, [2, 1, 0.5], "ZeRO-1, because ZeRO-0 has"),
        ((ran(1, 0.1), ran(0, 0.05, **WRONG)), "zero0", 1, [0.5, 1], "ZeRO-0, whose own"),
        ((ran(0, **WRONG), ran(1, **WRONG), fakes.failure(gpu(2))), None, 0, [1, 1, None], "result is in doubt"),
    ],
    ids=["failed first", "failed requested", "all failed", "disqualified first", "disqualified asked", "none sound"],
)
def test_ratios_refer_to_the_requested_or_the_first_sound_row_and_that_is_said(
    records: tuple[TrialRecord, ...],
    relative_to: str | None,
    baseline: int | None,
    ratios: list[float | None],
    said: str | None,
) -> None:
    comparison = compared(*records, relative_to=relative_to)
    assert comparison.baseline == (None if baseline is None else comparison.rows[baseline])
    assert [row.ratio for row in comparison.rows] == [each if each is None else pytest.approx(each) for each in ratios]
    notes = [caveat.text for caveat in comparison.caveats if caveat.kind is CaveatKind.NOTE]
    assert len(notes) == (said is not None)
    assert all((said or "") in text for text in notes)


def test_where_the_baseline_failed_the_first_sound_row_decides_which_rows_compare() -> None:
    odd = ran(1, torch_version="2.11.0", **WRONG)
    assert [row.differences for row in rows(FAILED, odd, ran(2))][1:] == [("torch 2.13.0 vs 2.11.0",), ()]
    _, row = rows(ran(0), odd)
    assert row.tokens_per_second is not None
    assert (row.ratio, row.ratio_interval) == (None, None)


# ------------------------------------------------------------------ the fronts


def bare(index: int, tokens: float | None, device: int | None) -> Run:
    """A row of its own with this throughput and this memory, in GB."""
    trial = gpu(of=fakes.workload(seed=0))
    trial = replace(trial, configuration=replace(trial.configuration, name=f"row{index}"))
    trial = replace(trial, ds_config={**trial.ds_config, "row": index})
    return make_run(fakes.success(trial)).with_row(throughput_tokens_per_sec=tokens, gpu_peak_gb=device)


def front(*points: tuple[float | None, int | None]) -> list[int]:
    """Positions of the points on the device front."""
    comparison = compare([bare(index, *point) for index, point in enumerate(points)])
    keys = [row.key for row in comparison.rows]
    return [keys.index(key) for key in comparison.pareto_device]


def test_fronts_by_hand() -> None:
    """Slower and larger than another: off. Slower and smaller: on. Equal in both: both on."""
    assert front((100, 80), (90, 60), (80, 70), (70, 50), (90, 60), (90, 61), (100, 81)) == [0, 1, 3, 4]
    assert front((100, 80), (200, None), (None, 1)) == [0]
    # Rows that failed, are disqualified or have a different workload are on no front.
    large = fakes.success(gpu(2, of=fakes.workload(batch_size=64)), step_seconds=[0.001] * 10)
    wrong = ran(0, 0.05, gpu_peak_bytes=GB, **WRONG)
    comparison = compared(ran(1, 0.1), large, wrong, ran(3, 0.2, gpu_peak_bytes=4 * GB), fakes.failure(gpu(3)))
    assert comparison.pareto_device == (comparison.rows[0].key, comparison.rows[3].key)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6).map(float), st.integers(1, 6)), min_size=1, max_size=12))
def test_exactly_what_nothing_beats_is_on_the_front(points: list[tuple[float, int]]) -> None:
    def beaten(by: tuple[float, int], it: tuple[float, int]) -> bool:
        return by[0] >= it[0] and by[1] <= it[1] and by != it

    on = {index for index, it in enumerate(points) if not any(beaten(by, it) for by in points)}
    assert set(front(*points)) == on


def test_host_memory_has_a_front_where_something_lives_there() -> None:
    def offloaded(name: str, seconds: float, host: int) -> TrialRecord:
        trial = fakes.trial(fakes.offload(name), on=CUDA)
        return fakes.success(trial, step_seconds=[seconds] * 10, host_peak_bytes=host)

    comparison = compared(offloaded("none", 0.1, 5), offloaded("cpu_optimizer", 0.2, 9), offloaded("cpu_full", 0.3, 4))
    first, _, third = (row.key for row in comparison.rows)
    assert comparison.pareto_host == (first, third)
    for on, device, host in ((CUDA, 2, 0), (fakes.placement(), 0, 2)):
        comparison = compared(fakes.success(gpu(0, on=on)), fakes.success(gpu(1, on=on)))
        assert (len(comparison.pareto_device), len(comparison.pareto_host)) == (device, host)


# ------------------------------------------------------------------ of the comparison as a whole


def kinds(comparison: Comparison) -> dict[CaveatKind, Caveat]:
    return {caveat.kind: caveat for caveat in comparison.caveats}


def test_a_tested_comparison_on_quiet_cards_has_no_caveat_and_one_with_too_few_runs_says_so() -> None:
    quiet = fakes.environment()
    assert compared(*runs(0, 0.3, 0.3, 0.3), *runs(1, 0.25, 0.25, 0.25), on=(quiet, quiet)).caveats == ()
    few = kinds(compared(*runs(0, 0.3, 0.3, 0.3), *runs(1, 0.3, 0.3), fakes.failure(gpu(1, 2))))
    assert few[CaveatKind.TOO_FEW_REPEATS].values == {"few": 1, "rows": 2, "needed": 3}


def test_the_shortest_window_on_a_gpu_below_two_seconds_is_reported() -> None:
    for seconds, on, told in ((0.19, CUDA, True), (0.21, CUDA, False), (0.1, fakes.placement(num_gpus=2), False)):
        records = [fakes.success(gpu(1, on=on), step_seconds=[each] * 10) for each in (0.3, seconds)]
        caveat = kinds(compared(*records)).get(CaveatKind.SHORT_WINDOW)
        assert (caveat and caveat.values) == ({"seconds": pytest.approx(10 * seconds)} if told else None)
        # A flat row has the mean step and the number of steps.
        flat = compare([flat_run(make_run(each).row) for each in records])
        assert kinds(flat).get(CaveatKind.SHORT_WINDOW) == caveat


def test_stages_that_have_nobody_to_partition_with_are_reported(subtests: pytest.Subtests) -> None:
    for record, said in (
        (fakes.failure(gpu(3, on=replace(CUDA, num_gpus=1))), True),
        (fakes.success(gpu(1), data_parallel_size=1), True),
        (fakes.success(gpu(0, on=replace(CUDA, num_gpus=1))), False),
        (fakes.success(gpu(3)), False),
    ):
        with subtests.test(said=said):
            assert (CaveatKind.ONE_GPU in kinds(compared(record))) is said


def card(index: int = 0, **changes: Any) -> GpuFacts:
    return GpuFacts(index=index, name="NVIDIA H100 80GB HBM3", memory_total_bytes=80 * GB, **changes)


def test_disturbances_of_the_machine_are_reported_for_the_cards_that_were_used(subtests: pytest.Subtests) -> None:
    for changes, expected in (
        ({"gpus": (card(other_processes=((7, None), (8, GB))),)}, {CaveatKind.OTHER_PROCESS}),
        ({"gpus": (card(other_processes=(), throttle_reasons=("gpu_idle",)),)}, set()),
        ({"gpus": (card(), card(1), card(2, other_processes=((7, 1),)))}, set()),  # not used by the job
        ({"gpus": (card(throttle_reasons=("gpu_idle", "hw_thermal_slowdown")),)}, {CaveatKind.THROTTLED_BEFORE}),
        ({"gpus": (card(throttle_reasons=("applications_clocks_setting",)),)}, set()),
        ({"swap_used_bytes": 3 * GB}, {CaveatKind.SWAP_USED}),
        ({"swap_used_bytes": 0}, set()),
        ({"kernel": "5.15.167.4-microsoft-standard-WSL2"}, {CaveatKind.WSL}),
        ({"kernel": "6.8.0-1015-azure"}, set()),
    ):
        with subtests.test(changes=changes):
            disturbances = {CaveatKind.OTHER_PROCESS, CaveatKind.THROTTLED_BEFORE, CaveatKind.SWAP_USED, CaveatKind.WSL}
            found = kinds(compared(ran(0), on=(fakes.environment(**changes),)))
            assert found.keys() & disturbances == expected


def test_environments_that_do_not_compare_are_named() -> None:
    here = fakes.environment()
    there = replace(here, packages={**here.packages, "torch": "2.11.0"})
    found = kinds(compared(fakes.success(), on=(here, here, there)))
    assert "torch 2.13.0 vs 2.11.0" in found[CaveatKind.ENVIRONMENT_DIFFERS].text


# ------------------------------------------------------------------ capacities


def test_the_capacity_is_the_smallest_cards_real_or_emulated() -> None:
    small = fakes.success(gpu(1), gpu_total_bytes=40 * GB)
    emulated = fakes.success(gpu(2, on=replace(CUDA, gpu_memory_limit_bytes=20 * GB)))
    assert compared(ran(0)).device_capacity_bytes == 80 * GB
    assert compared(ran(0), small).device_capacity_bytes == 40 * GB
    assert compared(ran(0), small, emulated).device_capacity_bytes == 20 * GB
    # Where no rank got far enough, the environment knows the card.
    assert compared(FAILED, on=(fakes.environment(),)).device_capacity_bytes == 80 * GB
    assert compared(fakes.success(), on=(fakes.environment(),)).device_capacity_bytes is None


def test_the_hosts_capacity_is_the_tighter_of_machine_and_cgroup(subtests: pytest.Subtests) -> None:
    for host, cgroup, capacity in ((256, None, 256), (256, 64, 64), (64, 256, 64), (None, None, None), (None, 1, 1)):
        with subtests.test(host=host, cgroup=cgroup):
            facts = fakes.environment(host_memory_bytes=host, cgroup_memory_limit_bytes=cgroup)
            assert compared(ran(0), on=(facts,)).host_capacity_bytes == capacity
    # On several hosts it is the smallest of these: the launching host need not be among them.
    hosts = tuple(fakes.environment(host_memory_bytes=size) for size in (256, 128))
    several = fakes.environment(host_memory_bytes=64, hosts=hosts)
    assert compared(ran(0), on=(several,)).host_capacity_bytes == 128
