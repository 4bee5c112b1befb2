"""Comparisons and reports for the tests of their rendering, made by hand so that they depend on no analysis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds_bench.analysis.comparison import Comparison, ComparisonRow
from ds_bench.analysis.intervals import RatioInterval
from ds_bench.analysis.row import Run, make_run
from ds_bench.config.caveat_texts import Caveat, CaveatKind
from ds_bench.config.spec import Configuration, Placement, Workload
from ds_bench.recommend.message_templates import Fact
from ds_bench.recommend.recommendation import Recommendation
from ds_bench.report.comparison_report import ComparisonReport
from ds_bench.report.html_report import render_page
from tests.support import fakes

GB = fakes.GB
CARD = Placement(accelerator="cuda", num_gpus=1)
NVME = {"parameters": 2 * GB, "optimizer_states": 12 * GB}


def ledger(parameters: float, gradients: float, states: float, buffers: float, activations: float) -> dict[str, int]:
    """One tier, in GB."""
    return {
        "parameters": int(parameters * GB),
        "gradients": int(gradients * GB),
        "optimizer_states": int(states * GB),
        "deepspeed_buffers": int(buffers * GB),
        "activations": int(activations * GB),
        "other": int(0.2 * GB),
    }


def run(strategy: Configuration, seconds: float, *, peak: float = 8, repeat: int = 0, **changes: Any) -> Run:
    """A run on one card with steps around ``seconds`` and a peak of ``peak`` GB."""
    work = changes.pop("of", None) or fakes.workload(num_steps=30, warmup_steps=5)
    trial = fakes.trial(strategy, on=changes.pop("on", CARD), of=work, repeat=repeat)
    steps = [seconds * (1 + 0.02 * math.sin(7 * step + repeat + seconds)) for step in range(work.num_steps)]
    values = {
        "warmup_step_seconds": tuple(seconds * factor for factor in (9, 2, 1.3, 1.1, 1.05))[: work.warmup_steps],
        "losses": tuple(10.9 - 2.5 * (1 - math.exp(-step / 12)) for step in range(work.num_steps + work.warmup_steps)),
        "ledger": {"gpu": ledger(0.2 * peak, 0.2 * peak, 0.3 * peak, 0.1 * peak, 0.15 * peak)},
        "gpu_peak_bytes": int(peak * GB),
        "gpu_peak_reserved_bytes": int(peak * 1.1 * GB),
        "phase_seconds": {"forward": seconds * 0.3, "backward": seconds * 0.55, "step": seconds * 0.25},
    }
    return make_run(fakes.success(trial, step_seconds=steps, **{**values, **changes}), None, None)


def failed(strategy: Configuration, **changes: Any) -> Run:
    trial = fakes.trial(strategy, on=CARD)
    return make_run(fakes.failure(trial, **changes), None, None)


def row(label: str, *runs: Run, **changes: Any) -> ComparisonRow:
    """A row of these runs, computed with plain means; the key is the label."""
    good = [one for one in runs if one.outcome.success]
    tokens = [one.row.throughput_tokens_per_sec or 0.0 for one in good]
    middle = sorted(tokens)[len(tokens) // 2] if tokens else None
    values: dict[str, Any] = {
        "key": label,
        "label": label,
        "configuration": runs[0].trial.configuration,
        "runs": runs,
        "tokens_per_second": middle,
        "mean_step_seconds": (good[0].row.avg_step_time_ms or 0) / 1000 if good else None,
        "step_seconds_std": (good[0].row.std_step_time_ms or 0) / 1000 if good else None,
        "interval": (min(tokens) * 0.98, max(tokens) * 1.02) if len(tokens) >= 3 else None,
        "gpu_peak_bytes": int(GB * max((one.row.gpu_peak_gb or 0 for one in good), default=0)) or None,
        "gpu_fraction": max((one.row.gpu_percent or 0 for one in good), default=0) / 100 or None,
        "host_peak_bytes": int(GB * max((one.row.cpu_used_gb or 0 for one in good), default=0)) or None,
    }
    values["tokens_per_second_per_gb"] = (
        middle / (values["gpu_peak_bytes"] / GB) if middle and values["gpu_peak_bytes"] else None
    )
    return ComparisonRow(**{**values, **changes})


def comparison(*rows: ComparisonRow, **changes: Any) -> Comparison:
    """Compared with the first row. The device front has every measured row that is not beaten."""
    good = [one for one in rows if one.tokens_per_second and one.gpu_peak_bytes]
    front = tuple(
        one.key
        for one in good
        if not any(
            other.tokens_per_second >= one.tokens_per_second and other.gpu_peak_bytes < one.gpu_peak_bytes
            for other in good
            if other is not one
        )
    )
    base = rows[0] if rows and rows[0].succeeded else None
    related = [
        replace(
            one,
            is_baseline=one is base,
            ratio=one.tokens_per_second / base.tokens_per_second,
            ratio_interval=None
            if len(one.successes) < 3 or one is base
            else RatioInterval(
                ratio=one.tokens_per_second / base.tokens_per_second,
                low=one.tokens_per_second / base.tokens_per_second * 0.985,
                high=one.tokens_per_second / base.tokens_per_second * 1.015,
                degrees_of_freedom=3.4,
            ),
        )
        if base and base.tokens_per_second and one.tokens_per_second
        else one
        for one in rows
    ]
    values: dict[str, Any] = {
        "rows": tuple(related),
        "baseline": related[0] if base else None,
        "pareto_device": front,
        "device_capacity_bytes": 80 * GB,
    }
    return Comparison(**{**values, **changes})


def zero_comparison(**changes: Any) -> Comparison:
    """Four stages, three runs each, and one that ran out of memory."""
    seconds = (0.212, 0.2131, 0.2264, 0.291)
    peaks = (58.2, 41.0, 28.4, 17.9)
    rows = [
        row(
            strategy.label,
            *(run(strategy, time * (1 + 0.012 * (n - 1)), peak=peak, repeat=n) for n in range(3)),
        )
        for strategy, time, peak in zip(map(fakes.zero, range(4)), seconds, peaks, strict=True)
    ]
    doubt = Caveat(CaveatKind.UNSTABLE_STEPS)
    rows[3] = replace(rows[3], caveats=(doubt,))
    rows.append(row("ZeRO-2, micro-batch 16", failed(fakes.zero(2))))
    general = Caveat(CaveatKind.ONE_GPU)
    return comparison(*rows, **{"caveats": (general,), **changes})


def offload_comparison(**changes: Any) -> Comparison:
    """Four strategies, one run each, with memory on host and disk."""
    tier = ledger(1.8, 3.1, 11.8, 0.9, 0.0)
    plan = (("none", 0.31, 31.0), ("cpu_optimizer", 0.88, 13.2), ("cpu_full", 1.24, 9.0), ("nvme", 2.9, 7.6))
    rows = []
    for name, seconds, peak in plan:
        book: dict[str, dict[str, int]] = {"gpu": ledger(0.2 * peak, 0.2 * peak, 0.2 * peak, 0.2 * peak, 0.15 * peak)}
        if name != "none":
            book["cpu"] = tier
        if name == "nvme":
            book["nvme"] = NVME
        host = (3 if name == "none" else 25) * GB
        strategy = fakes.offload(name)
        rows.append(row(strategy.label, run(strategy, seconds, peak=peak, ledger=book, host_peak_bytes=host)))
    values = {"pareto_host": tuple(one.key for one in rows[:2]), "host_capacity_bytes": 64 * GB}
    return comparison(*rows, **{**values, **changes})


def cpu_comparison() -> Comparison:
    """Two stages on the CPU accelerator: no GPU tier anywhere."""
    on = fakes.placement()
    none = dict.fromkeys(("gpu_peak_bytes", "gpu_peak_reserved_bytes"))
    book = {"cpu": ledger(0.1, 0.1, 0.3, 1.0, 0.4)}
    rows = [
        row(f"ZeRO-{stage}", run(fakes.zero(stage), 0.4 + 0.1 * stage, on=on, ledger=book, **none)) for stage in (0, 1)
    ]
    doubt = Caveat(CaveatKind.CPU_ACCELERATOR)
    return comparison(*rows, device_capacity_bytes=None, caveats=(doubt,))


def flat_comparison() -> Comparison:
    """Records read back from flat rows: numbers, but no series."""
    rows = []
    for stage, seconds in ((0, 0.2), (1, 0.3)):
        full = run(fakes.zero(stage), seconds)
        rank = full.ranks[0]
        step = (rank.window_seconds / len(rank.step_seconds),)
        without = {"warmup_step_seconds": (), "losses": (), "ledger": {}, "phase_seconds": {}}
        known = replace(rank, step_seconds=step, window_seconds=step[0], **without)
        bare = replace(full, stored=replace(full.stored, ranks=(known,)))
        rows.append(row(f"ZeRO-{stage}", bare))
    return comparison(*rows)


def recommendation(**changes: Any) -> Recommendation:
    values: dict[str, Any] = {
        "goal": "balanced",
        "choice": "ZeRO-2",
        "headline": Fact("use", {"choice": "ZeRO-2", "why": "92 % of the fastest row's throughput in 28.4 GB"}),
        "next_steps": (Fact("try", settings={"repeats": 5}),),
    }
    return Recommendation(**{**values, **changes})


def report(of: Comparison, title: str = "gpt2 · bf16 · 1 GPU", **changes: Any) -> ComparisonReport:
    values: dict[str, Any] = {
        "facts": (title,),
        "comparison": of,
        "recommendation": recommendation(),
        "notes": ("launched warm",),
        "commands": ("python zero_stage_comparison.py --model gpt2 --repeats 3",),
        "environments": (fakes.environment(),),
        "sources": ("zero_comparison_20261121_093000.json",),
    }
    return ComparisonReport(**{**values, **changes})


def page(*reports: ComparisonReport, generated: str = "2026-11-21 09:31 UTC, ds_bench 0.1.0") -> str:
    return render_page(reports, generated)


def many_rows(count: int, num_steps: int = 50) -> Comparison:
    """A sweep of ``count`` rows with series of ``num_steps``."""
    work: Workload = fakes.workload(num_steps=num_steps, warmup_steps=5)
    rows: Sequence[ComparisonRow] = [
        row(f"ZeRO-{index % 4} micro-batch {index}", run(fakes.zero(index % 4), 0.1 + index / 500, of=work))
        for index in range(count)
    ]
    return comparison(*rows)
