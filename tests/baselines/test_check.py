"""The verdict on a result held against its baseline: the edges of the tolerance, noise, and what does not compare."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.analysis.row import Run, make_run
from ds_bench.baselines import check
from ds_bench.baselines.check import BaselineEntry, compare_to_baseline, load_baseline, save_baseline
from ds_bench.baselines.result import BenchmarkResult, baseline_name, benchmark_result
from ds_bench.errors import UsageError
from ds_bench.records import schema
from tests.support import fakes

GB = fakes.GB


def result(tokens: float = 1000.0, peak: float | None = 1000.0, **changes: Any) -> BenchmarkResult:
    """A result that tells neither its machine nor its workload."""
    return BenchmarkResult(name="gpt2", throughput_tokens_per_sec=tokens, peak_memory_mb=peak, **changes)


def entry(tokens: float | None = 1000.0, peak: float | None = 1000.0, **changes: Any) -> BaselineEntry:
    """A limit set by hand."""
    return BaselineEntry(name="gpt2", throughput_tokens_per_sec=tokens, peak_memory_mb=peak, **changes)


def summary(**changes: Any) -> Run:
    """A successful run of the tiny preset on an emulated card of the fakes."""
    on = fakes.placement(accelerator="cuda")
    return make_run(fakes.success(fakes.trial(on=on), **changes), None, None)


def measured(**changes: Any) -> BenchmarkResult:
    """A result that tells everything."""
    return replace(benchmark_result([summary()], fakes.environment()), **changes)


# ------------------------------------------------------------------ the formulas


def test_throughput_regresses_below_the_baseline_less_its_tolerance_and_not_at_that_limit(
    subtests: pytest.Subtests,
) -> None:
    for tokens, passed in ((1000.0, True), (950.0, True), (949.99, False), (951.0, True), (2000.0, True), (1.0, False)):
        with subtests.test(tokens=tokens):
            verdict = compare_to_baseline(result(tokens), entry())
            assert verdict.passed is passed
            assert verdict.regressions == (() if passed else ("throughput",))


def test_memory_regresses_above_the_baseline_plus_its_tolerance_and_not_at_that_limit(
    subtests: pytest.Subtests,
) -> None:
    for peak, passed in ((1000.0, True), (1050.0, True), (1050.01, False), (10.0, True), (2000.0, False)):
        with subtests.test(peak=peak):
            verdict = compare_to_baseline(result(peak=peak), entry())
            assert verdict.passed is passed
            assert verdict.regressions == (() if passed else ("memory",))


def test_rounding_of_the_limit_itself_makes_no_regression(subtests: pytest.Subtests) -> None:
    for tolerance, base in product((0.0, 0.01, 0.07, 0.1, 0.3, 0.35, 0.9), (3.0, 300.0, 41_234.567)):
        with subtests.test(base=base, tolerance=tolerance):
            at_limit = result(base * (1 - tolerance), base * (1 + tolerance))
            assert compare_to_baseline(at_limit, entry(base, base, tolerance=tolerance)).passed is True


def test_both_figures_may_regress_at_once() -> None:
    verdict = compare_to_baseline(result(900, 1100), entry())
    assert verdict.regressions == ("throughput", "memory")
    assert verdict.failed
    assert (verdict.throughput_ratio, verdict.memory_ratio) == (0.9, 1.1)
    assert "tokens/s 900 against 1,000 (-10.0 %), beyond the tolerance of 5.0 %" in verdict.message
    assert "(+10.0 %), beyond the tolerance" in verdict.message


def test_the_tolerance_is_the_entrys_own() -> None:
    assert compare_to_baseline(result(900), entry(tolerance=0.1)).passed is True
    assert compare_to_baseline(result(999), entry(tolerance=0.0)).passed is False


@given(
    base=st.floats(1e-3, 1e9),
    ratio=st.floats(0.1, 3.0),
    tolerance=st.floats(0.0, 0.99),
    scale=st.floats(1e-3, 1e3),
)
def test_the_verdict_does_not_depend_on_the_unit(base: float, ratio: float, tolerance: float, scale: float) -> None:
    if abs(ratio - (1 - tolerance)) < 1e-6 or abs(ratio - (1 + tolerance)) < 1e-6:
        return  # at the limit rounding may decide
    small = compare_to_baseline(result(base * ratio, base * ratio), entry(base, base, tolerance=tolerance))
    large = compare_to_baseline(
        result(base * ratio * scale, base * ratio * scale), entry(base * scale, base * scale, tolerance=tolerance)
    )
    assert small.regressions == large.regressions
    assert small.passed is (1 - tolerance <= ratio <= 1 + tolerance)


def test_a_figure_that_only_one_side_knows_is_not_judged() -> None:
    assert compare_to_baseline(result(1000, peak=None), entry()).memory_ratio is None
    assert compare_to_baseline(result(1000, 9999), entry(peak=None)).passed is True
    verdict = compare_to_baseline(result(1000, peak=None), entry(tokens=None))
    assert verdict.passed is None
    assert "no figure is known on both sides" in verdict.message


# ------------------------------------------------------------------ noise


@pytest.mark.parametrize(("memory", "passed"), [("host", True), ("gpu", False)])
def test_on_the_cpu_accelerator_an_interval_beyond_a_factor_of_two_fails_no_gate(memory: Any, passed: bool) -> None:
    """300 against 1,000, from 0.11 to 0.82 of it."""
    busy = result(300, tokens_per_sec_runs=(200.0, 300.0, 450.0), memory=memory)
    verdict = compare_to_baseline(busy, entry(tokens_per_sec_runs=(999.0, 1000.0, 1001.0)))
    assert verdict.passed is passed
    assert ("inside the noise" in verdict.message) is passed


def test_runs_of_a_row_have_the_geometric_mean_that_its_table_prints() -> None:
    """0.1, 0.1 and 0.8 s: the geometric mean is 0.2 s, the median 0.1 s."""
    slow = [summary(step_seconds=[seconds] * 10) for seconds in (0.1, 0.1, 0.8)]
    assert benchmark_result(slow).throughput_tokens_per_sec == pytest.approx(
        0.5 * (slow[0].row.throughput_tokens_per_sec or 0)
    )


def test_a_fall_beyond_the_tolerance_but_inside_the_noise_is_no_regression_and_said_to_be_so() -> None:
    # means of logs: 1000 ± 20 % against 900 ± 20 %: three runs each, standard error of the log ratio about 0.16,
    # t at about 4 degrees of freedom 2.78: ± 0.45 around ln 0.9 = -0.105, so 1 is inside
    noisy = result(900, tokens_per_sec_runs=(720.0, 900.0, 1080.0))
    verdict = compare_to_baseline(noisy, entry(tokens_per_sec_runs=(800.0, 1000.0, 1200.0)))
    assert verdict.passed is True
    assert "beyond the tolerance of 5.0 % but inside the noise (95 % interval" in verdict.message


def test_a_fall_beyond_the_tolerance_and_the_noise_is_a_regression() -> None:
    # runs vary by 0.1 %: standard error 0.0008, so ± 0.3 % around -10 %
    steady = result(900, tokens_per_sec_runs=(899.0, 900.0, 901.0))
    verdict = compare_to_baseline(steady, entry(tokens_per_sec_runs=(999.0, 1000.0, 1001.0)))
    assert verdict.regressions == ("throughput",)
    assert "(95 % interval -10.2 % to -9.8 %)" in verdict.message


def test_a_real_fall_within_the_tolerance_is_no_regression() -> None:
    steady = result(970, tokens_per_sec_runs=(969.0, 970.0, 971.0))
    verdict = compare_to_baseline(steady, entry(tokens_per_sec_runs=(999.0, 1000.0, 1001.0)))
    assert verdict.passed is True
    assert "within the tolerance of 5.0 % (95 % interval" in verdict.message


def test_memory_beyond_the_tolerance_but_inside_the_noise_is_no_regression() -> None:
    noisy = result(peak=1200, peak_memory_mb_runs=(800.0, 1000.0, 1200.0))
    verdict = compare_to_baseline(noisy, entry(peak_memory_mb_runs=(700.0, 850.0, 1000.0)))
    assert verdict.passed is True
    assert "inside the noise" in verdict.message


def test_what_noise_hides_of_memory_is_told_as_a_rise() -> None:
    # Logs of 800, 1000, 1200 lie 0.223 and 0.182 apart: variance 0.0412; those of 1000 thrice do not vary. Standard
    # error √(0.0412 / 3) = 0.1172, t(0.975; 2) = 4.303: ± 0.504 on the logs, and e^0.504 = 1.656.
    shaky = result(peak=1000, peak_memory_mb_runs=(800.0, 1000.0, 1200.0))
    verdict = compare_to_baseline(shaky, entry(peak_memory_mb_runs=(1000.0,) * 3))
    assert verdict.noisy
    assert "cannot see changes below 65." in verdict.message


def test_noise_beyond_every_measure_is_said_without_a_number() -> None:
    wild = result(1000, tokens_per_sec_runs=(1e-300, 1000.0, 1e300))
    verdict = compare_to_baseline(wild, entry(tokens_per_sec_runs=(1000.0,) * 3))
    assert verdict.noisy
    assert "cannot see any change" in verdict.message


def test_noise_smaller_than_the_tolerance_is_none_to_warn_of() -> None:
    # Logs 1 % apart: standard error 0.0058, t 4.303: ± 2.5 %, of which a fall of 3 % does not leave 5 % out for sure.
    quiet = result(970, tokens_per_sec_runs=(960.3, 970.0, 979.7))
    assert not compare_to_baseline(quiet, entry(tokens_per_sec_runs=(1000.0,) * 3)).noisy


@given(runs=st.lists(st.floats(1.0, 1e6), min_size=3, max_size=6), tolerance=st.floats(0.0, 0.9))
def test_a_noisy_verdict_has_passed_and_a_regression_is_never_noisy(runs: list[float], tolerance: float) -> None:
    shaky = result(sorted(runs)[1], tokens_per_sec_runs=tuple(runs))
    verdict = compare_to_baseline(shaky, entry(tolerance=tolerance, tokens_per_sec_runs=(900.0, 1000.0, 1100.0)))
    assert verdict.passed is not False or not verdict.noisy


def test_memory_that_does_not_vary_is_tested_too() -> None:
    grown = result(peak=1100, peak_memory_mb_runs=(1100.0,) * 3)
    verdict = compare_to_baseline(grown, entry(peak_memory_mb_runs=(1000.0,) * 3))
    assert verdict.regressions == ("memory",)


def test_below_three_runs_the_tolerance_alone_decides_and_the_message_says_not_tested(
    subtests: pytest.Subtests,
) -> None:
    for runs in ((), (900.0,), (700.0, 1100.0)):
        with subtests.test(runs=runs):
            shaky = result(900, tokens_per_sec_runs=runs, step_variation=0.21)
            verdict = compare_to_baseline(shaky, entry(tokens_per_sec_runs=(800.0, 1000.0, 1200.0)))
            assert verdict.failed
            assert "not tested against noise: fewer than three runs on a side (steps vary by 21.0 %" in verdict.message


# ------------------------------------------------------------------ what does not compare


def test_no_baseline_passes_with_a_notice(tmp_path: Path) -> None:
    verdict = compare_to_baseline(result(), path=tmp_path / "baselines.json")
    assert verdict.passed is True
    assert verdict.comparable
    assert verdict.baseline is None
    assert verdict.message == "no baseline of this name"


def test_other_hardware_or_versions_are_neither_pass_nor_regression(subtests: pytest.Subtests) -> None:
    for changes, named in (
        ({"cpu_model": "another"}, "CPU AMD EPYC 9654 against another"),
        ({"gpus": fakes.inventory(cards=1).gpus}, "GPUs 2 x NVIDIA H100 80GB HBM3"),
        ({"gpu_driver_version": "999"}, "GPU driver none against 999"),
        (
            {"packages": {"torch": "2.13.0", "deepspeed": "0.19.9", "transformers": "5.23.0"}},
            "deepspeed 0.19.8 against",
        ),
    ):
        with subtests.test(changes=changes, named=named):
            baseline = BaselineEntry.of(measured(environment=fakes.environment(**changes)))
            verdict = compare_to_baseline(measured(throughput_tokens_per_sec=1.0), baseline)
            assert verdict.passed is None
            assert not verdict.comparable
            assert not verdict.failed
            assert verdict.message.startswith("not comparable with the baseline: ")
            assert named in verdict.message


def test_another_workload_is_not_comparable_and_the_difference_named(subtests: pytest.Subtests) -> None:
    for fact, value in (
        ("model", "other"), ("batch_size", 8), ("seq_length", 256), ("grad_accum", 2), ("precision", "fp32"),
        ("strategy", "zero1"), ("stage", 1), ("num_gpus", 2), ("data_parallel_size", 2), ("optimizer", "SGD"),
        ("activation_checkpointing", True), ("accelerator", "cpu"), ("device", "NVIDIA H200"), ("launch", "deepspeed"),
        ("parameter_count", 7), ("method_version", 99),
    ):  # fmt: skip
        with subtests.test(fact):
            ours = measured()
            baseline = BaselineEntry.of(measured(workload={**ours.workload, fact: value}))
            verdict = compare_to_baseline(ours, baseline)
            assert verdict.passed is None
            assert f"{fact} {ours.workload[fact]} against {value}" in verdict.message


def test_more_steps_of_the_same_workload_compare() -> None:
    longer = benchmark_result(
        [make_run(fakes.success(fakes.trial(on=fakes.placement(accelerator="cuda"), of=work)), None, None)
         for work in [fakes.workload(num_steps=40, warmup_steps=9)]],
        fakes.environment(),
    )  # fmt: skip
    verdict = compare_to_baseline(longer, BaselineEntry.of(measured()))
    assert verdict.passed is True


def test_another_configuration_is_compared_and_said() -> None:
    other = measured(workload={**measured().workload, "ds_config": "0123"})
    verdict = compare_to_baseline(other, BaselineEntry.of(measured()))
    assert verdict.passed is True
    assert "the DeepSpeed configuration is not the baseline's" in verdict.message


def test_gpu_memory_is_never_held_against_host_memory() -> None:
    verdict = compare_to_baseline(result(memory="host"), entry(memory="gpu"))
    assert verdict.passed is None


def test_a_result_that_does_not_tell_its_machine_does_not_compare_with_a_measured_baseline() -> None:
    assert compare_to_baseline(measured(environment=None), BaselineEntry.of(measured())).passed is None
    assert compare_to_baseline(measured(), BaselineEntry.of(measured(environment=None))).passed is None


def test_a_limit_set_by_hand_holds_on_any_machine() -> None:
    baseline = entry(tokens=1e9, peak=None)
    assert compare_to_baseline(measured(), baseline).regressions == ("throughput",)


def test_a_benchmark_that_no_longer_runs_is_a_regression() -> None:
    trial = fakes.trial(on=fakes.placement(accelerator="cuda"))
    failed = benchmark_result([make_run(fakes.failure(trial, schema.OOM), None, None)], fakes.environment())
    verdict = compare_to_baseline(failed, BaselineEntry.of(measured()))
    assert verdict.regressions == ("status",)
    assert "it ended with OOM: OOM in backward: asked 2.00 GB" in verdict.message


def test_figures_with_a_disqualifying_caveat_are_a_regression_however_fast_they_are() -> None:
    trial = fakes.trial(on=fakes.placement(accelerator="cuda"))
    spoiled = fakes.success(trial, step_seconds=[0.001] * 10, losses=(None,) * 12)
    verdict = compare_to_baseline(
        benchmark_result([make_run(spoiled)], fakes.environment()), BaselineEntry.of(measured())
    )
    assert (verdict.passed, verdict.regressions) == (False, ("status",))
    assert verdict.throughput_ratio is None
    assert verdict.message.startswith("regression: its figures are not to be used: loss is not finite")


@pytest.mark.parametrize("status", [schema.INTERRUPTED, schema.SKIPPED])
def test_a_benchmark_that_was_not_let_run_is_not_a_regression(status: str) -> None:
    trial = fakes.trial(on=fakes.placement(accelerator="cuda"))
    unrun = benchmark_result([make_run(fakes.failure(trial, status), None, None)], fakes.environment())
    assert compare_to_baseline(unrun, BaselineEntry.of(measured())).passed is None


def test_a_failure_without_a_baseline_passes_with_both_facts_told(tmp_path: Path) -> None:
    failed = result(status=schema.OOM)
    verdict = compare_to_baseline(failed, path=tmp_path / "b.json")
    assert verdict.passed is True
    assert verdict.message == "no baseline of this name; it ended with OOM"


def test_a_disqualifying_caveat_without_a_baseline_passes_with_both_facts_told(tmp_path: Path) -> None:
    verdict = compare_to_baseline(result(doubts=("loss is not finite",)), path=tmp_path / "b.json")
    assert verdict.passed is True
    assert verdict.message == "no baseline of this name; its figures are not to be used: loss is not finite"


# ------------------------------------------------------------------ entries


def test_a_saved_baseline_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    saved = BaselineEntry.of(measured(), tolerance=0.1)
    save_baseline(saved, path)
    loaded = load_baseline(saved.name, path)
    assert loaded is not None
    assert loaded.to_dict() == saved.to_dict()
    assert compare_to_baseline(measured(), path=path).passed is True


def test_the_file_is_keyed_by_name_and_every_entry_has_the_six_keys(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    save_baseline(entry(), path)
    data = json.loads(path.read_text())
    assert list(data) == ["gpt2"]
    assert {"name", "throughput_tokens_per_sec", "peak_memory_mb", "tolerance", "version", "timestamp"} == set(
        data["gpt2"]
    )
    assert data["gpt2"]["tolerance"] == 0.05


def test_a_saved_baseline_tells_no_host_name_and_no_variable(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    told = fakes.environment(hostname="secret-node", variables={"HF_HOME": "/home/someone"})
    save_baseline(BaselineEntry.of(measured(environment=told)), path)
    text = path.read_text()
    assert "secret-node" not in text
    assert "someone" not in text


def test_saving_again_replaces_our_keys_and_keeps_others_and_other_entries(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(json.dumps({"gpt2": {"name": "gpt2", "peak_memory_mb": 5, "note": "agreed"}, "opt": {"x": 1}}))
    save_baseline(entry(tokens=7, peak=None), path)
    data = json.loads(path.read_text())
    assert data["opt"] == {"x": 1}
    assert data["gpt2"]["note"] == "agreed"
    assert data["gpt2"]["peak_memory_mb"] is None
    assert data["gpt2"]["throughput_tokens_per_sec"] == 7


def test_saving_results_keeps_each_entrys_tolerance_unless_one_is_given(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    save_baseline(entry(tolerance=0.2), path)
    (kept,) = check.save_results([result(5)], path)
    assert kept.tolerance == 0.2
    (given_one,) = check.save_results([result(5)], path, tolerance=0.01)
    assert given_one.tolerance == 0.01
    (fresh,) = check.save_results([replace(result(5), name="new")], path)
    assert fresh.tolerance == 0.05


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tolerance": "5%"}, "tolerance"),
        ({"tolerance": 1}, "tolerance"),
        ({"tolerance": True}, "tolerance"),
        ({"tolerance": None}, "tolerance"),
        ({"throughput_tokens_per_sec": 0}, "throughput_tokens_per_sec"),
        ({"throughput_tokens_per_sec": "fast"}, "throughput_tokens_per_sec"),
        ({"peak_memory_mb": -1}, "peak_memory_mb"),
        ({"peak_memory_mb": [1]}, "peak_memory_mb"),
        ({"tokens_per_sec_runs": ["a"]}, "tokens_per_sec_runs"),
        ({"tokens_per_sec_runs": 5}, ""),
        ({"step_variation": -1}, "step_variation"),
        ({"memory": "tape"}, "memory"),
        ({"workload": []}, "workload"),
        ({"environment": {"logical_cores": "many"}}, "environment"),
        ({"environment": {"gpus": [5]}}, "environment"),
        ({"environment": []}, "environment"),
    ],
)
def test_an_entry_that_makes_no_sense_is_one_line_that_names_it(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(json.dumps({"gpt2": {**entry().to_dict(), **change}}))
    with pytest.raises(UsageError, match="baseline 'gpt2'") as caught:
        load_baseline("gpt2", path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_entry_does_not_stand_in_the_way_of_another(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(json.dumps({"bad": {"tolerance": "x"}, "gpt2": entry().to_dict()}))
    assert load_baseline("gpt2", path) is not None


def test_a_result_that_failed_is_no_baseline() -> None:
    with pytest.raises(ValueError, match="ended with OOM"):
        BaselineEntry.of(result(status=schema.OOM))


# ------------------------------------------------------------------ results


def test_the_figures_of_a_result_are_those_of_its_runs_worked_by_hand() -> None:
    # 4 sequences of 128 tokens in 0.1, 0.2 and 0.4 s: 5120, 2560 and 1280 tokens/s; 40, 20 and 10 samples/s
    runs = [
        summary(step_seconds=[0.1] * 10, gpu_peak_bytes=8 * GB, gpu_allocated_bytes=2 * GB),
        summary(step_seconds=[0.2] * 10, gpu_peak_bytes=9 * GB, gpu_allocated_bytes=3 * GB),
        summary(step_seconds=[0.4] * 10, gpu_peak_bytes=7 * GB, gpu_allocated_bytes=4 * GB),
    ]
    found = benchmark_result(runs)
    assert found.throughput_tokens_per_sec == pytest.approx(2560)
    assert found.samples_per_sec == pytest.approx(20)
    assert found.tokens_per_sec_runs == pytest.approx((5120, 2560, 1280))
    assert found.peak_memory_mb == 9 * 1024
    assert found.average_memory_mb == 3 * 1024
    assert found.memory == "gpu"
    assert len(found.step_seconds) == 30
    assert found.device == "NVIDIA H100 80GB HBM3"


def test_on_the_cpu_accelerator_memory_is_the_hosts_and_said_to_be() -> None:
    run = make_run(fakes.success(host_peak_bytes=2 * GB, host_pss_bytes=GB), None, None)
    found = benchmark_result([run])
    assert (found.memory, found.peak_memory_mb, found.average_memory_mb) == ("host", 2048, 1024)


def test_failed_runs_are_counted_and_left_out_of_the_figures() -> None:
    trial = fakes.trial(on=fakes.placement(accelerator="cuda"))
    found = benchmark_result([summary(), make_run(fakes.failure(trial))])
    assert found.succeeded
    assert found.failed_runs == 1
    assert found.tokens_per_sec_runs == pytest.approx((5120,))


def test_a_row_is_named_by_model_strategy_and_what_departs_from_the_defaults(subtests: pytest.Subtests) -> None:
    for work, strategy, ranks, name in (
        ({"model": "gpt2", "seq_length": 512}, fakes.zero(2), 1, "gpt2/zero2"),
        ({"model": "org/m", "seq_length": 512}, fakes.offload("cpu_full"), 1, "org/m/cpu_full"),
        ({"seq_length": 512}, fakes.offload("cpu_optimizer", 2), 1, "tiny/cpu_optimizer/stage2"),
        ({"batch_size": 8, "seq_length": 1024, "grad_accum": 2}, fakes.zero(3), 4,
         "tiny/zero3/batch8-seq1024-accum2-4ranks"),
        ({"seq_length": 512, "precision": "fp32", "activation_checkpointing": True}, fakes.zero(0), 1,
         "tiny/zero0/fp32-checkpointing"),
        ({"seq_length": 512, "pass_type": "forward"}, fakes.zero(0), 1, "tiny/zero0/forward"),
        ({"pass_type": "forward_backward", "synchronized": False}, fakes.zero(0), 1,
         "tiny/zero0/seq128-forward_backward-not_synchronized"),
    ):  # fmt: skip
        with subtests.test(name):
            trial = fakes.trial(strategy, of=fakes.workload(**work), on=fakes.placement(num_gpus=ranks))
            ran = make_run(fakes.success(trial))
            failed = make_run(fakes.failure(trial))
            assert baseline_name(ran) == baseline_name(failed) == name
