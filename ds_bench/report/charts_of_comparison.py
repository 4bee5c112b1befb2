"""From a comparison to its charts: what has numbers is drawn, what has none is said.

Pure; how a chart looks is ``svgcharts`` (in a page) and ``plots`` (in files).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..analysis.comparison import Comparison, StrategyResult
from ..analysis.summary import Summary
from ..records.schema import RankMeasurement
from ..units import BYTES_PER_GB, format_bytes, to_gb, to_ms
from .chart_data import Bar, BarChart, Chart, Dot, ScatterChart, Stack, StackChart
from .row_styles import MOST_BARS, cut, foremost, losses, marked, overlaid, steps, typical, words

CATEGORIES = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers", "activations", "other")
PHASES = ("forward", "backward", "step")

_TIERS = {
    "gpu": ("Device memory", "on the fullest rank"),
    "cpu": ("Host memory", "sum over the ranks of the fullest node"),
    "nvme": ("NVMe", "sum over the ranks of the fullest node"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What can be drawn, and a sentence for each picture that cannot."""

    charts: tuple[Chart, ...]
    left_out: tuple[str, ...]


def pictures(comparison: Comparison) -> Pictures:
    """Every chart of a comparison, in reading order."""
    rows = tuple(row for row in comparison.results if row.succeeded)
    if not rows:
        return Pictures(charts=(), left_out=("No row succeeded, so there is nothing to draw.",))
    shown = overlaid(rows, comparison.baseline)
    charts = (
        _throughput(rows, comparison.baseline),
        *(_ledger(rows, tier, comparison) for tier in _TIERS),
        _pareto(comparison, shown, "device"),
        _pareto(comparison, shown, "host"),
        steps(rows, shown),
        _phases(rows),
        losses(rows, shown),
    )
    drawn = tuple(chart for chart in charts if chart is not None)
    return Pictures(charts=drawn, left_out=_missing({chart.name for chart in drawn}))


def _missing(names: set[str]) -> tuple[str, ...]:
    sentences = {
        "throughput": "No throughput: no row has one.",
        "ledger-gpu ledger-cpu ledger-nvme": "No memory by category: these results hold no ledger.",
        "steps": "No step times: these results hold no series of steps.",
        "phases": "No phases: these results hold none.",
        "losses": "No losses per step: these results hold none.",
    }
    return tuple(sentence for wanted, sentence in sentences.items() if not names & set(wanted.split()))


def _throughput(rows: Sequence[StrategyResult], baseline: StrategyResult | None) -> Chart | None:
    measured = [row for row in rows if row.tokens_per_second is not None]
    if not measured:
        return None
    kept = foremost(measured, baseline)
    bars = tuple(
        Bar(
            label=marked(row),
            value=row.tokens_per_second or 0.0,
            interval=row.interval,
            runs=tuple(run.tokens_per_second for run in row.successes if run.tokens_per_second is not None),
            baseline=baseline is not None and row.key == baseline.key,
        )
        for row in kept
    )
    note = words(_interval_note(bars), cut(measured, kept))
    return BarChart(name="throughput", title="Throughput", axis="tokens/s", bars=bars, note=note)


def _interval_note(bars: Sequence[Bar]) -> str:
    if any(bar.interval for bar in bars):
        return "Bars are geometric means of the runs' means, whiskers their 95 % confidence intervals, dots the runs."
    if any(len(bar.runs) > 1 for bar in bars):
        return "Bars are geometric means of the runs' means, dots the runs; an interval needs three runs (--repeats 3)."
    return "One run each, so there is no interval; --repeats 3 gives one."


def _ledger(rows: Sequence[StrategyResult], tier: str, comparison: Comparison) -> Chart | None:
    kept = foremost(rows, comparison.baseline)
    stacks = [stack for row in kept if (stack := _memory_stack(row, tier)) is not None]
    if not any(stack.total for stack in stacks):
        return None
    heading, scope = _TIERS[tier]
    capacity = {"gpu": comparison.device_capacity_bytes, "cpu": comparison.host_capacity_bytes}.get(tier)
    marked = any(stack.marker is not None for stack in stacks)
    owner = "card" if tier == "gpu" else "host"
    note = f"Bytes by category, {scope}, each category at its own largest"
    note += ", so a stack may be longer than the measured peak, or shorter by what no tensor holds." if marked else "."
    return StackChart(
        name=f"ledger-{tier}",
        title=f"{heading} by category",
        axis="GB",
        categories=tuple(category.replace("_", " ").replace("deepspeed", "DeepSpeed") for category in CATEGORIES),
        stacks=tuple(stacks),
        capacity=to_gb(capacity),
        capacity_label=f"{owner} {format_bytes(capacity)}" if capacity else "",
        marker_label="measured peak, GB" if marked else "",
        note=words(note, cut(rows, kept)),
    )


def _memory_stack(row: StrategyResult, tier: str) -> Stack | None:
    """The fullest run's; None where it counted nothing at all."""
    ledgers = [_tier_bytes(run.record.ranks, tier) for run in row.successes if _has_ledger(run)]
    if not ledgers:
        return None
    fullest = max(ledgers, key=lambda cells: sum(cells.values()))
    peak = {"gpu": row.gpu_peak_bytes, "cpu": row.host_peak_bytes}.get(tier)
    return Stack(
        label=row.label,
        parts=tuple(fullest.get(category, 0) / BYTES_PER_GB for category in CATEGORIES),
        marker=to_gb(peak),
    )


def _has_ledger(run: Summary) -> bool:
    return any(rank.ledger for rank in run.record.ranks)


def _tier_bytes(ranks: Sequence[RankMeasurement], tier: str) -> Mapping[str, int]:
    """On a GPU the fullest rank's cells; elsewhere those of all ranks of the fullest node, which share the memory."""
    if tier == "gpu":
        return max((rank.ledger.get(tier, {}) for rank in ranks), key=lambda cells: sum(cells.values()))
    nodes: dict[str, dict[str, int]] = {}
    for rank in ranks:
        node = nodes.setdefault(rank.hostname, {})
        for category, size in rank.ledger.get(tier, {}).items():
            node[category] = node.get(category, 0) + size
    return max(nodes.values(), key=lambda cells: sum(cells.values()))


def _pareto(comparison: Comparison, shown: Mapping[str, int], kind: str) -> Chart | None:
    on_device = kind == "device"
    front = comparison.pareto_device if on_device else comparison.pareto_host
    capacity = comparison.device_capacity_bytes if on_device else comparison.host_capacity_bytes
    dots = [_dot(row, on_device, row.key in front, shown.get(row.key)) for row in comparison.results]
    kept = tuple(dot for dot in dots if dot is not None)
    if not front or len(kept) < 2:
        return None
    place = "device" if on_device else "host"
    others = "" if len(kept) <= len(shown) else "Grey dots are rows that the legend has no room for."
    aside = (
        "Crossed-out rows are disqualified or not comparable and take no part." if any(d.aside for d in kept) else ""
    )
    return ScatterChart(
        name=f"pareto-{place}",
        title=f"Throughput against {place} memory",
        axis="tokens/s",
        horizontal=f"peak {place} memory, GB",
        dots=kept,
        capacity=to_gb(capacity),
        capacity_label="card" if on_device else "host",
        note=words("Up and left is better; no row beats those on the line (filled) in both.", aside, others),
    )


def _dot(row: StrategyResult, on_device: bool, on_front: bool, style: int | None) -> Dot | None:
    held = to_gb(row.gpu_peak_bytes if on_device else row.host_peak_bytes)
    if not row.succeeded or held is None or row.tokens_per_second is None:
        return None
    label, aside = marked(row), bool(row.differences) or row.disqualification is not None
    return Dot(label=label, x=held, y=row.tokens_per_second, on_front=on_front, style=style, aside=aside)


def _phases(rows: Sequence[StrategyResult]) -> Chart | None:
    kept = [row for row in rows if any(rank.phase_seconds for rank in typical(row).record.ranks)]
    if not kept:
        return None
    kept = kept[:MOST_BARS]
    stacks = tuple(Stack(label=row.label, parts=_phase_ms(typical(row).record.ranks)) for row in kept)
    note = "From a separate pass with synchronisation around each phase, so the sum may exceed a step of the table."
    return StackChart(name="phases", title="Phases of a step", axis="ms", categories=PHASES, stacks=stacks, note=note)


def _phase_ms(ranks: Sequence[RankMeasurement]) -> tuple[float, ...]:
    """Per phase the slowest rank's."""
    return tuple(max(to_ms(rank.phase_seconds.get(phase, 0.0)) or 0.0 for rank in ranks) for phase in PHASES)
