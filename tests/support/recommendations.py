"""Records of rows on 80 GB cards, and the recommendations made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_bench.analysis.comparison import Comparison, compare
from ds_bench.analysis.row import make_run
from ds_bench.config.spec import Configuration
from ds_bench.models.presets import find_preset
from ds_bench.recommend import recommendation
from ds_bench.recommend.recommendation import Recommendation
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from ds_bench.system.invocation import OpenCommand
from tests.support import fakes

GB = 2**30
CARD = 80


def row(
    strategy: Configuration, gigabytes: float, tokens_per_second: float, *, cards: int = 1, repeat: int = 0, **more: Any
) -> TrialRecord:
    """A success with that peak and that throughput: 4 × 128 tokens per rank and step."""
    trial = fakes.trial(strategy, on=fakes.placement(accelerator="cuda", num_gpus=cards), repeat=repeat)
    peak = int(gigabytes * GB)
    memory = {"gpu_peak_bytes": peak, "gpu_peak_reserved_bytes": peak, "gpu_total_bytes": CARD * GB}
    values = {**memory, "gpu_device_used_bytes": 0, **more}
    return fakes.success(trial, step_seconds=[4 * 128 * cards / tokens_per_second] * 10, **values)


def repeated(stage: int, gigabytes: float, speeds: Sequence[float], **more: Any) -> list[TrialRecord]:
    return [row(fakes.zero(stage), gigabytes, speed, repeat=number, **more) for number, speed in enumerate(speeds)]


def out_of_memory(strategy: Configuration, cards: int = 1, **more: Any) -> TrialRecord:
    trial = fakes.trial(strategy, on=fakes.placement(accelerator="cuda", num_gpus=cards))
    return fakes.failure(trial, schema.OOM, **more)


def compared(*records: TrialRecord) -> Comparison:
    return compare([make_run(each, find_preset("tiny"), None) for each in records])


def answer(*records: TrialRecord, goal: str = "balanced", resume: OpenCommand | None = None) -> Recommendation:
    return recommendation.recommend(compared(*records), goal, resume)


def text_of(found: Recommendation) -> str:
    """Everything that an answer says."""
    state = f"decided: {found.decided}, tied: {', '.join(found.tied) or 'none'}, try: {found.try_next}"
    return "\n".join([*found.lines, *(f"Note: {step}" for step in found.next_steps if step.kind == "caveat"), state])
