"""What a step's time is spent on, in one text for each row: its parts, communication, transfers, CPU Adam, the disk."""

from __future__ import annotations

from collections.abc import Iterator

from ..analysis.comparison import ComparisonRow
from ..analysis.step_costs import NO_COSTS, PARTS, has_frozen_parameters, step_parts
from ..analysis.summary import TrialSummary
from ..units import format_bytes, format_ms, format_percent, format_ratio
from .comparison_report import ComparisonReport

HEADING = "Where the time of a step goes"
_PART_TEXTS = {"step": "optimizer step", "data_wait": "waiting for data"}


def step_time_texts(report: ComparisonReport) -> list[tuple[str, str]]:
    """Label and text of each row of which more than the phases is known."""
    rows = ((row, representative) for row in report.comparison.rows if (representative := _measured_run(row)))
    return [(row.label, f"{'; '.join(_texts(run))}.") for row, run in rows]


def _measured_run(row: ComparisonRow) -> TrialSummary | None:
    return next((run for run in row.nearest_to_mean if run.costs != NO_COSTS or _is_profiled_in_part(run)), None)


def _is_profiled_in_part(run: TrialSummary) -> bool:
    """Whether FLOPs of the forward pass are known that say nothing of a whole step."""
    return any(rank.profiled_forward_flops is not None and has_frozen_parameters(rank) for rank in run.record.ranks)


def _texts(run: TrialSummary) -> Iterator[str]:
    costs, parts = run.costs, step_parts(run.record)
    total = sum(parts.values())
    # Three parts are the phases alone, which a chart shows.
    if total and len(parts) > 3:
        shares = [
            f"{_PART_TEXTS.get(part, part)} {format_percent(parts[part] / total, digits=0)}"
            for part in PARTS
            if part in parts
        ]
        yield f"{', '.join(shares)} of a synchronised step of {format_ms(total)} ms"
    if costs.communication_seconds is not None:
        waiting = (
            f", {format_ms(costs.communication_wait_seconds)} ms of it waiting for other ranks"
            if costs.communication_wait_seconds is not None
            else ""
        )
        moved = f" for {format_bytes(costs.communication_bytes)}" if costs.communication_bytes else ""
        yield f"communication takes {format_ms(costs.communication_seconds)} ms{moved}{waiting}"
    if costs.transfer_seconds is not None:
        yield f"transfers take {format_ms(costs.transfer_seconds)} ms"
    if costs.cpu_adam_bytes_per_second is not None:
        yield f"CPU Adam moves {format_bytes(costs.cpu_adam_bytes_per_second)}/s"
    if costs.disk_bound is not None:
        given, needed = costs.disk_measured_bytes_per_second, costs.disk_needed_bytes_per_second
        verdict = "disk-bound" if costs.disk_bound else "not disk-bound"
        yield f"the disk moves {format_bytes(given)}/s where {format_bytes(needed)}/s are needed: {verdict}"
    if costs.profiled_flops_per_token is not None and run.model_flops_per_token:
        ratio = format_ratio(costs.profiled_flops_per_token / run.model_flops_per_token)
        yield f"DeepSpeed's profiler counts {ratio} the FLOPs of the formula"
    elif _is_profiled_in_part(run):
        yield (
            "DeepSpeed's profiler sees the forward pass alone, whose FLOPs are not compared with those of a step: "
            "frozen parameters have no gradients"
        )
