"""The verdict on a result compared with its baseline: the edges of the tolerance, noise, and what does not compare."""

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
from ds_bench.baselines import gate
from ds_bench.baselines.gate import BaselineEntry, compare_to_baseline, load_baseline, save_baseline
from ds_bench.baselines.result import BenchmarkResult, baseline_name, benchmark_result
from ds_bench.errors import UsageError
from ds_bench.records import schema
from tests.support import fakes

GB = fakes.GB
ON_GPU = fakes.placement(accelerator="cuda")


def result(tokens: float = 1000.0, peak: float | None = 1000.0, **changes: Any) -> BenchmarkResult:
    """A result that names neither its machine nor its workload."""
    return BenchmarkResult(name="gpt2", throughput_tokens_per_sec=tokens, peak_memory_mb=peak, **changes)


def entry(tokens: float | None = 1000.0, peak: float | None = 1000.0, **changes: Any) -> BaselineEntry:
    """A limit set by hand."""
    return BaselineEntry(name="gpt2", throughput_tokens_per_sec=tokens, peak_memory_mb=peak, **changes)


def run(**changes: Any) -> Run:
    """A successful run of the tiny preset on an emulated card of the fakes."""
    return make_run(fakes.success(fakes.trial(on=ON_GPU), **changes), None, None)


def measured(*runs: Run, **changes: Any) -> BenchmarkResult:
    """A result that names its machine and workload."""
    return replace(benchmark_result(runs or [run()], fakes.environment()), **changes)


# ------------------------------------------------------------------ the formulas


def test_tolerance_decides_and_its_limit_still_passes(subtests: pytest.Subtests) -> None:
    """Throughput may fall and memory may rise by the entry's own tolerance."""
    for tokens, peak, tolerance, regressions in (
        (950.0, 1050.0, 0.05, ()),
        (2000.0, 10.0, 0.05, ()),
        (949.99, 1000.0, 0.05, ("throughput",)),
        (1000.0, 1050.01, 0.05, ("memory",)),
        (900.0, 1100.0, 0.05, ("throughput", "memory")),
        (900.0, 1100.0, 0.1, ()),
        (999.0, 1000.0, 0.0, ("throughput",)),
    ):
        with subtests.test(tokens=tokens, peak=peak, tolerance=tolerance):
            verdict = compare_to_baseline(result(tokens, peak), entry(tolerance=tolerance))
            assert verdict.regressions == regressions
            assert (verdict.passed, verdict.failed) == (not regressions, bool(regressions))
            assert (verdict.throughput_ratio, verdict.memory_ratio) == (tokens / 1000, peak / 1000)
    message = compare_to_baseline(result(900, 1100), entry()).message
    assert "tokens/s 900 against 1,000 (-10.0 %), beyond the tolerance of 5.0 %" in message
    assert "(+10.0 %), beyond the tolerance" in message
    # Rounding of the limit itself is not a regression.
    for tolerance, base in product((0.0, 0.01, 0.07, 0.1, 0.3, 0.35, 0.9), (3.0, 300.0, 41_234.567)):
        at_limit = result(base * (1 - tolerance), base * (1 + tolerance))
        assert compare_to_baseline(at_limit, entry(base, base, tolerance=tolerance)).passed is True


@given(
    base=st.floats(1e-3, 1e9),
    ratio=st.floats(0.1, 3.0),
    tolerance=st.floats(0.0, 0.99),
    scale=st.floats(1e-3, 1e3),
)
def test_verdict_does_not_depend_on_the_unit(base: float, ratio: float, tolerance: float, scale: float) -> None:
    if abs(ratio - (1 - tolerance)) < 1e-6 or abs(ratio - (1 + tolerance)) < 1e-6:
        return  # at the limit rounding may decide
    small = compare_to_baseline(result(base * ratio, base * ratio), entry(base, base, tolerance=tolerance))
    large = compare_to_baseline(
        result(base * ratio * scale, base * ratio * scale), entry(base * scale, base * scale, tolerance=tolerance)
    )
    assert small.regressions == large.regressions
    assert small.passed is (1 - tolerance <= ratio <= 1 + tolerance)


def test_figure_that_only_one_side_has_is_not_judged() -> None:
    assert compare_to_baseline(result(1000, peak=None), entry()).memory_ratio is None
    assert compare_to_baseline(result(1000, 9999), entry(peak=None)).passed is True
    verdict = compare_to_baseline(result(1000, peak=None), entry(tokens=None))
    assert verdict.passed is None
    assert "no figure is known on both sides" in verdict.message


# ------------------------------------------------------------------ noise


def test_three_runs_are_tested_against_noise(subtests: pytest.Subtests) -> None:
    """Runs of the result and of the baseline, each with the expected regressions and a part of the message.

    1000 ± 20 % against 900 ± 20 %: three runs each, standard error of the log ratio about 0.16, t at about 4 degrees of
    freedom 2.78: ± 0.45 around ln 0.9 = -0.105, so 1 is inside. Runs that vary by 0.1 % give ± 0.3 % around -10 %.
    """
    wide, quiet = (800.0, 1000.0, 1200.0), (999.0, 1000.0, 1001.0)
    for tokens, runs, before, regressions, text in (
        (900, (720.0, 900.0, 1080.0), wide, (), "beyond the tolerance of 5.0 % but inside the noise (95 % interval"),
        (900, (899.0, 900.0, 901.0), quiet, ("throughput",), "(95 % interval -10.2 % to -9.8 %)"),
        (970, (969.0, 970.0, 971.0), quiet, (), "within the tolerance of 5.0 % (95 % interval"),
        # Below three runs only the tolerance decides.
        (900, (), wide, ("throughput",), "not tested against noise: fewer than three runs on a side (steps vary by 21"),
        (900, (700.0, 1100.0), wide, ("throughput",), "not tested against noise"),
    ):
        with subtests.test(runs=runs):
            noisy = result(tokens, peak=None, tokens_per_sec_runs=runs, step_variation=0.21)
            verdict = compare_to_baseline(noisy, entry(tokens_per_sec_runs=before))
            assert verdict.regressions == regressions
            assert text in verdict.message
    shaky = result(peak=1200, peak_memory_mb_runs=wide)
    assert compare_to_baseline(shaky, entry(peak_memory_mb_runs=(700.0, 850.0, 1000.0))).passed is True
    grown = result(peak=1100, peak_memory_mb_runs=(1100.0,) * 3)  # equal runs are a test too
    assert compare_to_baseline(grown, entry(peak_memory_mb_runs=(1000.0,) * 3)).regressions == ("memory",)


@pytest.mark.parametrize(("memory", "passed"), [("host", True), ("gpu", False)])
def test_interval_beyond_a_factor_of_two_decides_nothing_on_the_cpu_accelerator(memory: Any, passed: bool) -> None:
    """300 against 1,000, from 0.11 to 0.82 of it."""
    busy = result(300, tokens_per_sec_runs=(200.0, 300.0, 450.0), memory=memory)
    verdict = compare_to_baseline(busy, entry(tokens_per_sec_runs=(999.0, 1000.0, 1001.0)))
    assert verdict.passed is passed
    assert ("inside the noise" in verdict.message) is passed


def test_noise_that_hides_a_regression_is_reported_with_its_size() -> None:
    """Logs of 800, 1000, 1200 are 0.223 and 0.182 apart: variance 0.0412; 1000 thrice does not vary. Standard
    error √(0.0412 / 3) = 0.1172, t(0.975; 2) = 4.303: ± 0.504 on the logs, and e^0.504 = 1.656.

    Logs 1 % apart: standard error 0.0058, so ± 2.5 %: a fall of 3 % is not 5 % for sure, so nothing to warn about.
    """
    shaky = result(peak=1000, peak_memory_mb_runs=(800.0, 1000.0, 1200.0))
    verdict = compare_to_baseline(shaky, entry(peak_memory_mb_runs=(1000.0,) * 3))
    assert verdict.noisy
    assert "cannot see changes below 65." in verdict.message
    wild = result(1000, tokens_per_sec_runs=(1e-300, 1000.0, 1e300))
    verdict = compare_to_baseline(wild, entry(tokens_per_sec_runs=(1000.0,) * 3))
    assert verdict.noisy
    assert "cannot see any change" in verdict.message
    quiet = result(970, tokens_per_sec_runs=(960.3, 970.0, 979.7))
    assert not compare_to_baseline(quiet, entry(tokens_per_sec_runs=(1000.0,) * 3)).noisy


@given(runs=st.lists(st.floats(1.0, 1e6), min_size=3, max_size=6), tolerance=st.floats(0.0, 0.9))
def test_regression_is_never_noisy(runs: list[float], tolerance: float) -> None:
    shaky = result(sorted(runs)[1], tokens_per_sec_runs=tuple(runs))
    verdict = compare_to_baseline(shaky, entry(tolerance=tolerance, tokens_per_sec_runs=(900.0, 1000.0, 1100.0)))
    assert verdict.passed is not False or not verdict.noisy


# ------------------------------------------------------------------ what does not compare


def test_without_a_baseline_a_result_passes_with_a_notice(tmp_path: Path) -> None:
    for found, unmatched in (
        (result(), True),
        (result(status=schema.OOM), False),
        (result(doubts=("loss is not finite",)), False),
    ):
        verdict = compare_to_baseline(found, path=tmp_path / "baselines.json")
        assert (verdict.passed, verdict.baseline, verdict.unmatched) == (True, None, unmatched)
        assert verdict.message.startswith("no baseline of this name; " if not unmatched else "no baseline of this name")


def test_other_hardware_versions_or_workload_are_neither_pass_nor_regression(subtests: pytest.Subtests) -> None:
    ours = measured(throughput_tokens_per_sec=1.0)
    packages = {"torch": "2.13.0", "deepspeed": "0.19.9", "transformers": "5.23.0"}
    machines: tuple[tuple[dict[str, Any], str], ...] = (
        ({"cpu_model": "another"}, "CPU AMD EPYC 9654 against another"),
        ({"gpus": fakes.inventory(cards=1).gpus}, "GPUs 2 x NVIDIA H100 80GB HBM3"),
        ({"gpu_driver_version": "999"}, "GPU driver none against 999"),
        ({"packages": packages}, "deepspeed 0.19.8 against"),
    )
    others = [(named, measured(environment=fakes.environment(**changes))) for changes, named in machines]
    facts = (
        ("model", "other"), ("batch_size", 8), ("seq_length", 256), ("grad_accum", 2), ("precision", "fp32"),
        ("strategy", "zero1"), ("stage", 1), ("num_gpus", 2), ("data_parallel_size", 2), ("optimizer", "SGD"),
        ("activation_checkpointing", True), ("accelerator", "cpu"), ("device", "NVIDIA H200"), ("launch", "deepspeed"),
        ("parameter_count", 7), ("method_version", 99),
    )  # fmt: skip
    for fact, value in facts:
        other = measured(workload={**ours.workload, fact: value})
        others.append((f"{fact} {ours.workload[fact]} against {value}", other))
    others.append(("does not name its hardware", measured(environment=None)))
    for named, other in others:
        with subtests.test(named):
            verdict = compare_to_baseline(ours, BaselineEntry.of(other))
            assert (verdict.passed, verdict.comparable, verdict.failed) == (None, False, False)
            assert verdict.message.startswith("not comparable with the baseline: ")
            assert named in verdict.message
    assert compare_to_baseline(replace(ours, environment=None), BaselineEntry.of(measured())).passed is None
    assert compare_to_baseline(result(memory="host"), entry(memory="gpu")).passed is None


def test_more_steps_or_another_configuration_compare_and_a_limit_holds_on_any_machine() -> None:
    work = fakes.workload(num_steps=40, warmup_steps=9)
    longer = measured(make_run(fakes.success(fakes.trial(on=ON_GPU, of=work)), None, None))
    assert compare_to_baseline(longer, BaselineEntry.of(measured())).passed is True
    other = measured(workload={**measured().workload, "ds_config": "0123"})
    verdict = compare_to_baseline(other, BaselineEntry.of(measured()))
    assert verdict.passed is True
    assert "the DeepSpeed configuration is not the baseline's" in verdict.message
    assert compare_to_baseline(measured(), entry(tokens=1e9, peak=None)).regressions == ("throughput",)


def test_result_that_no_longer_trains_is_a_regression_unless_it_was_stopped(subtests: pytest.Subtests) -> None:
    trial = fakes.trial(on=ON_GPU)
    spoiled = fakes.success(trial, step_seconds=[0.001] * 10, losses=(None,) * 12)
    for record, passed, text in (
        (fakes.failure(trial, schema.OOM), False, "it ended with OOM: OOM in backward: asked 2.00 GB"),
        (spoiled, False, "regression: its figures must not be used: loss is not finite"),
        (fakes.failure(trial, schema.INTERRUPTED), None, "it ended with Interrupted"),
        (fakes.failure(trial, schema.SKIPPED), None, "it ended with Skipped"),
    ):
        with subtests.test(text):
            verdict = compare_to_baseline(measured(make_run(record)), BaselineEntry.of(measured()))
            assert verdict.passed is passed
            assert verdict.regressions == (() if passed is None else ("status",))
            assert verdict.throughput_ratio is None
            assert text in verdict.message


# ------------------------------------------------------------------ entries


def test_saved_baseline_is_read_back_and_holds_no_host_name_and_no_variable(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    environment = fakes.environment(hostname="secret-node", variables={"HF_HOME": "/home/someone"})
    saved = BaselineEntry.of(measured(environment=environment), tolerance=0.1)
    save_baseline(saved, path)
    loaded = load_baseline(saved.name, path)
    assert loaded is not None
    assert loaded.to_dict() == saved.to_dict()
    assert compare_to_baseline(measured(), path=path).passed is True
    assert "secret-node" not in path.read_text()
    assert "someone" not in path.read_text()
    with pytest.raises(ValueError, match="ended with OOM"):
        BaselineEntry.of(result(status=schema.OOM))


def test_saving_again_replaces_our_keys_and_keeps_others(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(json.dumps({"gpt2": {"name": "gpt2", "peak_memory_mb": 5, "note": "agreed"}, "opt": {"x": 1}}))
    save_baseline(entry(tokens=7, peak=None, tolerance=0.2), path)
    data = json.loads(path.read_text())
    assert data["opt"] == {"x": 1}
    assert data["gpt2"].pop("note") == "agreed"
    assert {**data["gpt2"], "version": None, "timestamp": None} == {
        "name": "gpt2", "throughput_tokens_per_sec": 7, "peak_memory_mb": None, "tolerance": 0.2, "version": None,
        "timestamp": None,
    }  # fmt: skip
    # The tolerance stays unless one is given.
    (kept,) = gate.save_results([result(5)], path)
    (given_one,) = gate.save_results([result(5)], path, tolerance=0.01)
    (fresh,) = gate.save_results([replace(result(5), name="new")], path)
    assert [each.tolerance for each in (kept, given_one, fresh)] == [0.2, 0.01, 0.05]


def test_invalid_entry_is_one_line_that_names_it(tmp_path: Path, subtests: pytest.Subtests) -> None:
    path = tmp_path / "baselines.json"
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        *(({"tolerance": value}, "tolerance") for value in ("5%", 1, True, None)),
        *(({"throughput_tokens_per_sec": value}, "throughput_tokens_per_sec") for value in (0, "fast")),
        *(({"peak_memory_mb": value}, "peak_memory_mb") for value in (-1, [1])),
        ({"tokens_per_sec_runs": ["a"]}, "tokens_per_sec_runs"),
        ({"tokens_per_sec_runs": 5}, ""),
        ({"step_variation": -1}, "step_variation"),
        ({"memory": "tape"}, "memory"),
        ({"workload": []}, "workload"),
        *(({"environment": value}, "environment") for value in ({"logical_cores": "many"}, {"gpus": [5]}, [])),
    )
    for change, named in changes:
        with subtests.test(change=change):
            path.write_text(json.dumps({"bad": {**entry().to_dict(), **change}, "gpt2": entry().to_dict()}))
            with pytest.raises(UsageError, match="baseline 'bad'") as caught:
                load_baseline("bad", path)
            assert named in str(caught.value)
            assert "\n" not in str(caught.value)
            assert load_baseline("gpt2", path) is not None


# ------------------------------------------------------------------ results


def test_figures_of_a_result_by_hand() -> None:
    """4 sequences of 128 tokens in 0.1, 0.2 and 0.4 s: 5120, 2560 and 1280 tokens/s; 40, 20 and 10 samples/s."""
    runs = [
        run(step_seconds=[seconds] * 10, gpu_peak_bytes=peak * GB, gpu_allocated_bytes=held * GB)
        for seconds, peak, held in ((0.1, 8, 2), (0.2, 9, 3), (0.4, 7, 4))
    ]
    failed = make_run(fakes.failure(fakes.trial(on=ON_GPU)))
    found = benchmark_result([failed, *runs])
    assert found.throughput_tokens_per_sec == pytest.approx(2560)  # the geometric mean
    assert found.samples_per_sec == pytest.approx(20)
    assert found.tokens_per_sec_runs == pytest.approx((5120, 2560, 1280))
    assert (found.peak_memory_mb, found.average_memory_mb, found.memory) == (9 * 1024, 3 * 1024, "gpu")
    assert len(found.step_seconds) == 30
    assert (found.succeeded, found.failed_runs, found.device) == (True, 1, "NVIDIA H100 80GB HBM3")
    on_cpu = benchmark_result([make_run(fakes.success(host_peak_bytes=2 * GB, host_pss_bytes=GB), None, None)])
    assert (on_cpu.memory, on_cpu.peak_memory_mb, on_cpu.average_memory_mb) == ("host", 2048, 1024)


def test_name_is_model_strategy_and_what_departs_from_the_defaults(subtests: pytest.Subtests) -> None:
    for work, strategy, ranks, name in (
        ({"model": "gpt2", "seq_length": 512}, fakes.zero(2), 1, "gpt2/zero2"),
        ({"model": "org/m", "seq_length": 512}, fakes.offload("cpu_full"), 1, "org/m/cpu_full"),
        ({"seq_length": 512}, fakes.offload("cpu_optimizer", 2), 1, "tiny/cpu_optimizer/stage2"),
        ({"batch_size": 8, "seq_length": 1024, "grad_accum": 2}, fakes.zero(3), 4,
         "tiny/zero3/batch8-seq1024-accum2-4ranks"),
        ({"seq_length": 512, "precision": "fp32", "activation_checkpointing": True}, fakes.zero(0), 1,
         "tiny/zero0/fp32-checkpointing"),
        ({"pass_type": "forward_backward", "synchronized": False}, fakes.zero(0), 1,
         "tiny/zero0/seq128-forward_backward-not_synchronized"),
    ):  # fmt: skip
        with subtests.test(name):
            trial = fakes.trial(strategy, of=fakes.workload(**work), on=fakes.placement(num_gpus=ranks))
            assert baseline_name(make_run(fakes.success(trial))) == name
            assert baseline_name(make_run(fakes.failure(trial))) == name
