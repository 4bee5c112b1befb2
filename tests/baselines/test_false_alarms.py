"""Two measurements of the same code: noise does not raise an alarm, and a real change on a quiet machine does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_bench.baselines import BaselineEntry, compare_to_baseline
from ds_bench.baselines.result import BenchmarkResult
from ds_bench.cli import commands
from ds_bench.system.environment import Environment
from tests.support import fakes

PAIRS = 400
Run = Callable[[random.Random], float]
NOISE: dict[str, Run] = {
    "quiet": lambda chance: 1000 * chance.lognormvariate(0, 0.02),
    "runs that vary by 15 %": lambda chance: 1000 * chance.lognormvariate(0, 0.15),
    "runs that vary by 40 %": lambda chance: 1000 * chance.lognormvariate(0, 0.4),
    "every fifth run disturbed": lambda chance: 1000 * chance.lognormvariate(0, 0.03) / chance.choice([1] * 4 + [2.5]),
}


def measured(draw: Run, chance: random.Random, repeats: int, speed: float = 1.0) -> BenchmarkResult:
    rates = tuple(speed * draw(chance) for _ in range(repeats))
    peaks = tuple(chance.lognormvariate(0, 0.01) * 900 for _ in range(repeats))
    return BenchmarkResult(
        name="row",
        throughput_tokens_per_sec=sum(rates) / repeats,
        tokens_per_sec_runs=rates,
        peak_memory_mb=max(peaks),
        peak_memory_mb_runs=peaks,
        memory="host",
        environment=fakes.environment(gpus=()),
    )


def alarms(draw: Run, repeats: int, speed: float = 1.0) -> float:
    """Share of pairs whose second measurement is called a regression of the first."""
    chance = random.Random(1)
    verdicts = []
    for _ in range(PAIRS):
        before = BaselineEntry.of(measured(draw, chance, repeats))
        verdicts.append(compare_to_baseline(measured(draw, chance, repeats, speed), before))
    return sum(verdict.failed for verdict in verdicts) / PAIRS


@pytest.mark.parametrize("repeats", [3, 5])
@pytest.mark.parametrize("noise", NOISE)
def test_the_same_code_is_hardly_ever_a_regression(noise: str, repeats: int) -> None:
    """Of two figures each is allowed 2.5 %: an interval of 95 % excludes 1 on the bad side that often."""
    assert alarms(NOISE[noise], repeats) <= 0.05


def test_slower_code_is_a_regression_if_the_noise_lets_it_be_seen() -> None:
    assert alarms(NOISE["quiet"], 3, speed=0.8) > 0.95
    assert alarms(NOISE["runs that vary by 15 %"], 5, speed=0.5) > 0.8


def on_cpu(seconds: float, other_cores: float = 0.0, peak: int = 2**30) -> list[object]:
    trials = [fakes.trial(fakes.zero(1), repeat=number, trial_id=f"{number}_zero1") for number in range(3)]
    facts = {"cpu_cores": 2.0, "cpu_threads": 2, "cpu_own_cores": 2.0, "cpu_other_cores": other_cores}
    return [
        fakes.success(trial, step_seconds=[seconds * (1 + 0.001 * number)] * 10, host_peak_bytes=peak, **facts)
        for number, trial in enumerate(trials)
    ]


def test_slowdown_by_other_programs_is_not_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host: Environment = fakes.environment(gpus=())

    def run(name: str, *records: object) -> str:
        return str(fakes.write_run(tmp_path / name, records, on=host).folder)  # type: ignore[arg-type]

    file = ["--baselines", str(tmp_path / "baselines.json")]
    assert commands.main(["baseline", "save", run("before", *on_cpu(0.1)), *file]) == 0
    # Slower while other programs run: nothing was found out, and the check says so.
    assert commands.main(["baseline", "check", run("busy", *on_cpu(0.2, 1.5)), *file]) == 2
    assert "noise hides a regression in every row" in capsys.readouterr().err
    # As fast in spite of them: it passed. Without them it is a regression, and so is memory, which they do not change.
    assert commands.main(["baseline", "check", run("as_fast", *on_cpu(0.1, 1.5)), *file]) == 0
    assert commands.main(["baseline", "check", run("slow", *on_cpu(0.2)), *file]) == 3
    assert commands.main(["baseline", "check", run("large", *on_cpu(0.2, 1.5, peak=2**31)), *file]) == 3
    # A baseline is not measured on a busy machine.
    assert commands.main(["baseline", "save", run("again", *on_cpu(0.2, 1.5)), *file]) == 2
