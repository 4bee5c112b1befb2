"""The verdict on a result compared with its baseline: the edges of the tolerance, noise, and what is not comparable."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.analysis.row import Run, make_run
from ds_bench.baselines import gate
from ds_bench.baselines.gate import BaselineEntry, compare_to_baseline, load_baseline, save_baseline
from ds_bench.baselines.result import BenchmarkResult, baseline_name, benchmark_result
from ds_bench.config.training_script import Script
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
        (650.0, 1350.0, 0.35, ()),  # rounding of the limit itself is not a regression
    ):
        with subtests.test(tokens=tokens, peak=peak):
            verdict = compare_to_baseline(result(tokens, peak), entry(tolerance=tolerance))
            assert verdict.regressions == regressions
            assert (verdict.passed, verdict.failed) == (not regressions, bool(regressions))
            assert (verdict.throughput_ratio, verdict.memory_ratio) == (tokens / 1000, peak / 1000)
            # A figure that only one side has is not judged.
            assert compare_to_baseline(result(tokens, None), entry(tolerance=tolerance)).memory_ratio is None
            one_sided = compare_to_baseline(result(tokens, None), entry(tokens=None))
            assert (one_sided.passed, one_sided.comparable) == (None, False)


# ------------------------------------------------------------------ noise

WIDE, QUIET = (800.0, 1000.0, 1200.0), (999.0, 1000.0, 1001.0)


def test_three_runs_are_tested_against_noise(subtests: pytest.Subtests) -> None:
    """1000 ± 20 % against 900 ± 20 %: three runs each, standard error of the log ratio about 0.16, t at about 4 degrees
    of freedom 2.78: ± 0.45 around ln 0.9 = -0.105, so 1 is inside. Runs that vary by 0.1 % give ± 0.3 % around -10 %.
    """
    for tokens, runs, before, regressions, text in (
        (900, (720.0, 900.0, 1080.0), WIDE, (), "beyond the tolerance of 5.0 % but within the noise (95 % interval"),
        (900, (899.0, 900.0, 901.0), QUIET, ("throughput",),
         "tokens/s 900 against 1,000 (-10.0 %), beyond the tolerance of 5.0 % (95 % interval -10.2 % to -9.8 %)"),
        (970, (969.0, 970.0, 971.0), QUIET, (), "within the tolerance of 5.0 % (95 % interval"),
        # Below three runs only the tolerance decides.
        (900, (700.0, 1100.0), WIDE, ("throughput",),
         "not tested against noise: fewer than three runs on at least one side (steps vary by 21"),
    ):  # fmt: skip
        with subtests.test(text):
            noisy = result(tokens, peak=None, tokens_per_sec_runs=runs, step_variation=0.21)
            verdict = compare_to_baseline(noisy, entry(tokens_per_sec_runs=before))
            assert verdict.regressions == regressions
            assert text in verdict.message


def test_memory_is_tested_against_noise_too(subtests: pytest.Subtests) -> None:
    for peaks, before, passed in ((WIDE, (700.0, 850.0, 1000.0), True), ((1100.0,) * 3, (1000.0,) * 3, False)):
        with subtests.test(passed=passed):
            found = result(peak=max(peaks), peak_memory_mb_runs=peaks)
            assert compare_to_baseline(found, entry(peak_memory_mb_runs=before)).passed is passed


def test_interval_beyond_a_factor_of_two_decides_nothing_on_the_cpu_accelerator(subtests: pytest.Subtests) -> None:
    """300 against 1,000, from 0.11 to 0.82 of it."""
    for memory, passed in (("host", True), ("gpu", False)):
        with subtests.test(passed=passed):
            busy = result(300, tokens_per_sec_runs=(200.0, 300.0, 450.0), memory=memory)
            assert compare_to_baseline(busy, entry(tokens_per_sec_runs=QUIET)).passed is passed


def test_noise_that_hides_a_regression_is_reported_with_its_size(subtests: pytest.Subtests) -> None:
    """Logs of 800, 1000, 1200 are 0.223 and 0.182 apart: variance 0.0412; 1000 three times does not vary. Standard
    error √(0.0412 / 3) = 0.1172, t(0.975; 2) = 4.303: ± 0.504 on the logs, and e^0.504 = 1.656.

    Logs 1 % apart: standard error 0.0058, so ± 2.5 %: a fall of 3 % is not 5 % for sure, so nothing to warn about.
    """
    for found, text in (
        (result(peak_memory_mb_runs=WIDE, tokens_per_sec_runs=QUIET), "too noisy to detect changes below 65."),
        (result(tokens_per_sec_runs=(1e-300, 1000.0, 1e300)), "too noisy to detect any change"),
        (result(970, tokens_per_sec_runs=(960.3, 970.0, 979.7)), None),
    ):
        with subtests.test(text=text):
            same = (1000.0,) * 3
            verdict = compare_to_baseline(found, entry(peak_memory_mb_runs=same, tokens_per_sec_runs=same))
            assert (verdict.passed, verdict.noisy) == (True, text is not None)
            assert (text or "") in verdict.message


DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "quiet": lambda chance: 1000 * chance.lognormvariate(0, 0.02),
    "runs that vary by 40 %": lambda chance: 1000 * chance.lognormvariate(0, 0.4),
    "every fifth run disturbed": lambda chance: 1000 * chance.lognormvariate(0, 0.03) / chance.choice([1] * 4 + [2.5]),
}


@pytest.mark.parametrize("noise", DISTRIBUTIONS)
def test_the_same_code_is_hardly_ever_a_regression_and_slower_code_is(noise: str) -> None:
    """Each of two figures is allowed 2.5 %: an interval of 95 % excludes 1 on the bad side that often."""
    chance = random.Random(1)

    def draw(speed: float = 1.0) -> BenchmarkResult:
        rates = tuple(speed * DISTRIBUTIONS[noise](chance) for _ in range(3))
        peaks = tuple(chance.lognormvariate(0, 0.01) * 900 for _ in range(3))
        runs: dict[str, Any] = {"tokens_per_sec_runs": rates, "peak_memory_mb_runs": peaks, "memory": "host"}
        return result(sum(rates) / 3, max(peaks), **runs, environment=fakes.environment(gpus=()))

    pairs = [(BaselineEntry.of(draw()), draw(), draw(0.8)) for _ in range(400)]
    assert sum(compare_to_baseline(again, before).failed for before, again, _ in pairs) <= 20
    assert noise != "quiet" or sum(compare_to_baseline(slow, before).failed for before, _, slow in pairs) > 380


def test_slowdown_by_other_programs_to_half_is_not_a_regression_but_memory_is(subtests: pytest.Subtests) -> None:
    """The check then found nothing out, and says so."""
    for tokens, peak, busy, passed, noisy in (
        (500, 1000, True, True, True),
        (499, 1000, True, False, False),
        (1000, 1000, True, True, False),
        (500, 1000, False, False, False),
        (500, 2000, True, False, False),
    ):
        with subtests.test(tokens=tokens, peak=peak):
            facts = {"cpu_cores": 2.0, "cpu_threads": 2, "cpu_own_cores": 2.0, "cpu_other_cores": 1.5 if busy else 0.0}
            seen = benchmark_result([make_run(fakes.success(**facts), None, None)])
            assert bool(seen.disturbances) == busy
            verdict = compare_to_baseline(result(tokens, peak, disturbances=seen.disturbances), entry())
            assert (verdict.passed, verdict.noisy) == (passed, noisy)


SCRIPT = Script(command=("train.py", "{config}"), digest="abc", python="python", config_source="command")


def of_script(seconds: Sequence[float], **changes: Any) -> BenchmarkResult:
    """Runs of a script without token ids: 6 samples in each step."""
    trial = fakes.trial(of=fakes.workload(model="train.py", model_source="script", script=SCRIPT), on=ON_GPU)
    script = fakes.script_of_samples(trial, 6)
    runs = [fakes.success(trial, step_seconds=(each,) * 10, script=script, micro_batch_size=6) for each in seconds]
    return replace(measured(*map(make_run, runs or [fakes.failure(trial)])), **changes)


def test_a_script_without_token_ids_is_held_to_its_samples(subtests: pytest.Subtests) -> None:
    """Even if it fails: its row keeps its name, though its own batch of 6 is not known then."""
    for seconds, passed, text in (
        ((0.1,), True, "samples/s 60.0 against 60.0 (+0.0 %), no worse; peak GPU memory"),
        ((0.2,), False, "samples/s 30.0 against 60.0 (-50.0 %), beyond the tolerance of 5.0 %; peak GPU memory"),
        ((0.2,) * 3, False, "beyond the tolerance of 5.0 % (95 % interval -50.0 % to -50.0 %)"),
        ((), False, "it ended with OOM"),
    ):
        with subtests.test(text):
            before = of_script([0.1] * max(1, len(seconds)))
            found = of_script(seconds)
            assert before.throughput_tokens_per_sec is None
            assert (found.name, before.name) == ("train.py/zero0",) * 2
            verdict = compare_to_baseline(found, BaselineEntry.of(before))
            assert (verdict.passed, verdict.throughput_ratio) == (
                passed,
                pytest.approx(0.1 / seconds[0]) if seconds else None,
            )
            assert text in verdict.message


# ------------------------------------------------------------------ what is not comparable


@pytest.mark.parametrize(
    ("found", "unmatched"),
    [(result(), True), (result(status=schema.OOM), False), (result(doubts=("loss is not finite",)), False)],
)
def test_without_a_baseline_a_result_passes_with_a_notice(
    found: BenchmarkResult, unmatched: bool, tmp_path: Path
) -> None:
    verdict = compare_to_baseline(found, path=tmp_path / "baselines.json")
    assert (verdict.passed, verdict.baseline, verdict.unmatched) == (True, None, unmatched)
    assert verdict.message.startswith("no baseline of this name")


OURS = measured(throughput_tokens_per_sec=1.0)
OTHERS = [
    ("CPU AMD EPYC 9654 vs another", measured(environment=fakes.environment(cpu_model="another"))),
    ("GPUs 2 x NVIDIA H100", measured(environment=fakes.environment(gpus=fakes.inventory(cards=1).gpus))),
    ("GPU driver none vs 999", measured(environment=fakes.environment(gpu_driver_version="999"))),
    ("deepspeed 0.19.8 vs 0.19.9", measured(environment=fakes.environment(packages={"deepspeed": "0.19.9"}))),
    ("does not name its hardware", measured(environment=None)),
    *(
        (f"{fact} {OURS.workload[fact]} vs other", measured(workload={**OURS.workload, fact: "other"}))
        for fact in (
            "model", "batch_size", "seq_length", "grad_accum", "precision", "strategy", "stage", "num_gpus",
            "data_parallel_size", "optimizer", "activation_checkpointing", "accelerator", "device", "launch",
            "parameter_count", "method_version",
        )
    ),
]  # fmt: skip


def test_different_hardware_versions_or_workload_are_neither_pass_nor_regression(subtests: pytest.Subtests) -> None:
    for named, other in OTHERS:
        with subtests.test(named):
            verdict = compare_to_baseline(OURS, BaselineEntry.of(other))
            assert (verdict.passed, verdict.comparable, verdict.failed) == (None, False, False)
            assert named in verdict.message


def test_more_steps_or_a_different_configuration_compare_and_a_limit_holds_on_any_machine() -> None:
    work = fakes.workload(num_steps=40, warmup_steps=9)
    longer = measured(make_run(fakes.success(fakes.trial(on=ON_GPU, of=work)), None, None))
    assert compare_to_baseline(longer, BaselineEntry.of(measured())).passed is True
    other = measured(workload={**measured().workload, "ds_config": "0123"})
    verdict = compare_to_baseline(other, BaselineEntry.of(measured()))
    assert verdict.passed is True
    assert "the DeepSpeed configuration is not the baseline's" in verdict.message
    assert compare_to_baseline(measured(), entry(tokens=1e9, peak=None)).regressions == ("throughput",)
    assert compare_to_baseline(result(memory="host"), entry(memory="gpu")).passed is None
    assert compare_to_baseline(replace(OURS, environment=None), BaselineEntry.of(OURS)).passed is None


def test_result_that_no_longer_trains_is_a_regression_unless_it_was_stopped(subtests: pytest.Subtests) -> None:
    for record, passed, text in (
        (fakes.failure(fakes.trial(on=ON_GPU)), False, "it ended with OOM: OOM in backward: asked 2.00 GB"),
        (fakes.success(fakes.trial(on=ON_GPU), losses=(None,) * 12), False, "must not be used: loss is not finite"),
        (fakes.failure(fakes.trial(on=ON_GPU), schema.INTERRUPTED), None, "it ended with Interrupted"),
        (fakes.failure(fakes.trial(on=ON_GPU), schema.SKIPPED), None, "it ended with Skipped"),
    ):
        with subtests.test(text):
            verdict = compare_to_baseline(measured(make_run(record)), BaselineEntry.of(measured()))
            assert (verdict.passed, verdict.regressions) == (passed, () if passed is None else ("status",))
            assert verdict.throughput_ratio is None
            assert text in verdict.message


# ------------------------------------------------------------------ entries and results


def test_saved_baseline_is_read_back_and_holds_no_host_name_and_no_variable(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    environment = fakes.environment(hostname="secret-node", variables={"HF_HOME": "/home/someone"})
    saved = BaselineEntry.of(measured(environment=environment), tolerance=0.1)
    save_baseline(saved, path)
    loaded = load_baseline(saved.name, path)
    assert loaded is not None
    assert loaded.to_dict() == saved.to_dict()
    assert compare_to_baseline(measured(), path=path).passed is True
    assert not [secret for secret in ("secret-node", "someone") if secret in path.read_text()]
    with pytest.raises(ValueError, match="ended with OOM"):
        BaselineEntry.of(result(status=schema.OOM))


def test_saving_again_replaces_our_keys_and_keeps_others(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(json.dumps({"gpt2": {"name": "gpt2", "peak_memory_mb": 5, "note": "agreed"}, "opt": {"x": 1}}))
    save_baseline(entry(tokens=7, peak=None, tolerance=0.2), path)
    data = json.loads(path.read_text())
    ours = {key: value for key, value in data["gpt2"].items() if key not in ("version", "timestamp")}
    known = {"name": "gpt2", "throughput_tokens_per_sec": 7, "peak_memory_mb": None, "tolerance": 0.2}
    assert (data["opt"], ours) == ({"x": 1}, {**known, "note": "agreed"})
    # The tolerance stays unless one is given.
    (kept,) = gate.save_results([result(5)], path)
    (given_one,) = gate.save_results([result(5)], path, tolerance=0.01)
    (fresh,) = gate.save_results([replace(result(5), name="new")], path)
    assert [each.tolerance for each in (kept, given_one, fresh)] == [0.2, 0.01, 0.05]


@pytest.mark.parametrize(
    "change",
    [
        {"tolerance": "5%"}, {"tolerance": 1}, {"tolerance": True}, {"throughput_tokens_per_sec": 0},
        {"peak_memory_mb": -1}, {"step_variation": -1}, {"memory": "tape"}, {"environment": {"gpus": [5]}},
    ],
)  # fmt: skip
def test_invalid_entry_is_one_line_that_names_it(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(json.dumps({"bad": {**entry().to_dict(), **change}, "gpt2": entry().to_dict()}))
    with pytest.raises(UsageError, match=rf"(?s)baseline 'bad'.*{next(iter(change))}") as caught:
        load_baseline("bad", path)
    assert "\n" not in str(caught.value)
    assert load_baseline("gpt2", path) is not None


def test_figures_of_a_result_by_hand() -> None:
    """4 sequences of 128 tokens in 0.1, 0.2 and 0.4 s: 5120, 2560 and 1280 tokens/s; 40, 20 and 10 samples/s."""
    runs = [
        run(step_seconds=[seconds] * 10, gpu_peak_bytes=peak * GB, gpu_allocated_bytes=held * GB)
        for seconds, peak, held in ((0.1, 8, 2), (0.2, 9, 3), (0.4, 7, 4))
    ]
    found = benchmark_result([make_run(fakes.failure(fakes.trial(on=ON_GPU))), *runs])
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
        ({"seq_length": 512}, fakes.offload("cpu_optimizer", 2), 1, "tiny/cpu_optimizer/stage2"),
        ({"batch_size": 8, "seq_length": 1024, "grad_accum": 2}, fakes.zero(3), 4,
         "tiny/zero3/batch8-seq1024-accum2-4ranks"),
        ({"precision": "fp32", "activation_checkpointing": True, "pass_type": "forward", "synchronized": False},
         fakes.zero(0), 1, "tiny/zero0/seq128-fp32-checkpointing-forward-not_synchronized"),
    ):  # fmt: skip
        with subtests.test(name):
            trial = fakes.trial(strategy, of=fakes.workload(**work), on=fakes.placement(num_gpus=ranks))
            assert (
                baseline_name(make_run(fakes.success(trial))) == baseline_name(make_run(fakes.failure(trial))) == name
            )
