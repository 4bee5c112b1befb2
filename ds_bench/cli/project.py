"""The command ``project``: a measured result at other numbers of GPUs, by formula and labelled so."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.projection import ProjectedRow, project_rows
from ..errors import UsageError
from ..prediction.links import BETWEEN, REACHED_BETWEEN, REACHED_WITHIN, WITHIN, LinkRate, Links, parse_link
from ..prediction.scaling import MeasuredStep, Range, Scaling, measured_rates
from ..records.run_folder import csv_text
from ..report.comparison_report import ComparisonReport
from ..system import terminal
from ..units import MISSING, format_count, format_gb, format_ms, format_percent, to_gb, to_ms
from .report import build_reports

_NODE = 8
"""GPUs of a node where the result ran on one node alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectOptions:
    """Flags of ``project``; the fields have the flags' names."""

    num_gpus: tuple[int, ...]
    results: tuple[Path, ...] = ()
    link: str | None = None
    inter: str | None = None
    gpus_per_node: int | None = None
    scaling: Scaling = "weak"
    format: str = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedReport:
    """One comparison at other sizes. Nothing of it was measured but what it starts from."""

    title: str
    rows: tuple[ProjectedRow, ...]
    scaling: Scaling
    assumptions: tuple[str, ...]


def show_projection(options: ProjectOptions) -> int:
    """Prints the projection. Returns 0; raises UsageError."""
    projected = project_reports(build_reports(options.results), options)
    if options.format == "json":
        text = json.dumps([_as_dict(each) for each in projected], indent=1, allow_nan=False, ensure_ascii=False)
        terminal.print_json(text)
    elif options.format == "csv":
        rows = [values for each in projected for values in _flat_rows(each)]
        terminal.print_text(csv_text(rows).removesuffix("\n"))
    else:
        for number, each in enumerate(projected):
            for line in ([""] if number else []) + list(lines(each)):
                terminal.print_text(line)
    return 0


def project_reports(reports: Sequence[ComparisonReport], options: ProjectOptions) -> list[ProjectedReport]:
    """Projects every comparison. Raises UsageError."""
    link = None if options.link is None else parse_link("--link", options.link, WITHIN)
    inter = None if options.inter is None else parse_link("--inter", options.inter, BETWEEN)
    return [_project(report, link, inter, options) for report in reports]


def _project(
    report: ComparisonReport, link: LinkRate | None, inter: LinkRate | None, options: ProjectOptions
) -> ProjectedReport:
    def links_of(step: MeasuredStep, steps: Sequence[MeasuredStep]) -> Links:
        return _links(step, steps, link, inter, options)

    rows = project_rows(report.comparison.rows, sorted(set(options.num_gpus)), links_of, options.scaling)
    if options.scaling == "weak":
        batch = "weak scaling: every GPU keeps the micro-batch and accumulation that were measured"
    else:
        batch = "strong scaling: the batch of the whole job stays as measured; accumulation changes first"
    return ProjectedReport(
        title=report.title,
        rows=tuple(rows),
        scaling=options.scaling,
        assumptions=(
            batch,
            *_links_texts([each.links for each in rows if each.links], link, inter),
            "ranges are between no overlap of communication with computing and full overlap; efficiency is tokens/s of "
            "a GPU against the measured row; memory is predicted (docs/projection.md)",
        ),
    )


def _links(
    step: MeasuredStep,
    steps: Sequence[MeasuredStep],
    link: LinkRate | None,
    inter: LinkRate | None,
    options: ProjectOptions,
) -> Links:
    """The links as given, else as measured. Raises UsageError."""
    # A result of one node does not tell how large the nodes of a larger job are: 8 GPUs, or all that it had.
    on_one_node = step.num_gpus <= step.gpus_per_node
    node = options.gpus_per_node or (max(_NODE, step.num_gpus) if on_one_node else step.gpus_per_node)
    within, between = measured_rates(step, steps)
    within = link.bytes_per_second if link else within
    # With one GPU on each node, measured and projected, nothing is sent within a node and no rate is needed.
    if within is None and max(node, step.gpus_per_node) > 1:
        raise UsageError(
            "the rate of the links within a node is not known",
            remedy="give --link, such as nvlink:900, or a result of several ranks with --profile comms",
        )
    return Links(
        gpus_per_node=node,
        gpu_bytes_per_second=math.inf if within is None else within,
        # A measured rate is taken as it is, without a latency of its own (docs/projection.md).
        gpu_latency_seconds=link.latency_seconds if link else 0.0,
        node_bytes_per_second=inter.bytes_per_second if inter else between,
        node_latency_seconds=inter.latency_seconds if inter else 0.0,
    )


def _links_texts(links: Sequence[Links], link: LinkRate | None, inter: LinkRate | None) -> Iterator[str]:
    """What is to be said of the links of all rows."""
    node = links[0].gpus_per_node
    within = [each.gpu_bytes_per_second for each in links if each.gpu_bytes_per_second != math.inf]
    between = [each.node_bytes_per_second for each in links if each.node_bytes_per_second is not None]
    for rates, given, fraction, where in (
        (within, link, REACHED_WITHIN, f"per GPU, within a node of {node}"),
        (between, inter, REACHED_BETWEEN, f"per node of {node}, between nodes"),
    ):
        if rates and given:
            share = format_percent(fraction, digits=0)
            yield f"{given.text}, of which {share} is taken to be reached: {_rates(rates)} each way {where}"
        elif rates:
            yield f"{_rates(rates)} each way {where}, as each row measured it (--profile comms)"


def _rates(rates: Sequence[float]) -> str:
    return f"{_range_text(f'{min(rates) / 1e9:.3g}', f'{max(rates) / 1e9:.3g}')} GB/s (10^9)"


# ------------------------------------------------------------------ text

_HEADINGS = ("Strategy", "GPUs", "Nodes", "Batch", "Step ms", "Tokens/s", "Efficiency", "Comm. ms", "GPU GB")


def lines(report: ProjectedReport) -> Iterator[str]:
    """The table with what must be known to read it."""
    yield f"PROJECTION, not measured: {terminal.escape_controls(report.title)}"
    on_cpu = not any(each.prediction.gpu for each in report.rows if each.prediction)
    # On CPU ranks no GPU memory was measured, so the last column is the host's.
    headings = (*_HEADINGS[:-1], "Host GB") if on_cpu else _HEADINGS
    notes = list(dict.fromkeys(note for each in report.rows for note in each.notes))
    table: list[tuple[str, ...]] = [(*headings, "Notes")]
    seen = set()
    for each in report.rows:
        if each.measured is not None and each.row.key not in seen:
            seen.add(each.row.key)
            table.append(_measured_cells(each, on_cpu))
        numbers = " ".join(str(notes.index(note) + 1) for note in each.notes)
        table.append((*_projected_cells(each, on_cpu), numbers))
    yield from terminal.aligned_lines(table, left=(0, len(headings)))
    for number, note in enumerate(notes, 1):
        yield f"  {number}. {terminal.escape_controls(note)}"
    for assumption in report.assumptions:
        yield f"  * {terminal.escape_controls(assumption)}"


def _measured_cells(each: ProjectedRow, on_cpu: bool) -> tuple[str, ...]:
    measured = each.measured
    assert measured is not None
    size = each.row.host_peak_bytes if on_cpu else each.row.gpu_peak_bytes
    return (
        f"{each.row.label} (measured)",
        str(measured.num_gpus),
        str(-(-measured.num_gpus // measured.gpus_per_node)),
        _batch_text(measured.micro_batch_size, measured.grad_accum),
        format_ms(measured.step_seconds),
        format_count(measured.tokens_per_second),
        "100 %",
        format_ms(measured.communication_seconds),
        format_gb(size),
        "",
    )


def _batch_text(micro_batch_size: int, grad_accum: int) -> str:
    return f"{micro_batch_size}x{grad_accum}"


def _projected_cells(each: ProjectedRow, on_cpu: bool) -> tuple[str, ...]:
    found = each.projection
    if found is None:
        return (each.row.label, str(each.num_gpus), *[MISSING] * (len(_HEADINGS) - 2))
    memory = each.prediction
    return (
        each.row.label,
        str(found.num_gpus),
        str(found.num_nodes),
        _batch_text(found.micro_batch_size, found.grad_accum),
        _range_text(*(format_ms(value) for value in found.step_seconds.bounds)),
        _range_text(*(format_count(value) for value in found.tokens_per_second.bounds)),
        _range_text(*(f"{value * 100:.0f}" for value in found.efficiency.bounds)) + " %",
        format_ms(found.communication_seconds),
        MISSING if memory is None else format_gb(memory.host_bytes if on_cpu else memory.gpu_bytes),
    )


def _range_text(low: str, high: str) -> str:
    return low if low == high else f"{low}-{high}"


# ------------------------------------------------------------------ values


def _as_dict(report: ProjectedReport) -> dict[str, Any]:
    return {
        "projection": True,
        "title": report.title,
        "scaling": report.scaling,
        "assumptions": list(report.assumptions),
        "rows": list(_flat_rows(report)),
    }


def _flat_rows(report: ProjectedReport) -> Iterator[dict[str, Any]]:
    """One row per configuration and size, of numbers that were not rounded; all are projected but ``measured_*``."""
    for each in report.rows:
        found, measured, memory = each.projection, each.measured, each.prediction
        # Infinite where nodes have one GPU, which JSON cannot hold.
        within = _get(each.links, "gpu_bytes_per_second")
        yield {
            "projection": True,
            "strategy": each.row.configuration.name,
            "label": each.row.label,
            "stage": each.row.configuration.stage,
            "scaling": report.scaling,
            "num_gpus": each.num_gpus,
            "num_nodes": _get(found, "num_nodes"),
            "batch_size": _get(found, "micro_batch_size"),
            "grad_accum": _get(found, "grad_accum"),
            "global_batch_size": _get(found, "global_batch_size"),
            **_range_values("step_time_ms", _get(found, "step_seconds"), 1000.0),
            **_range_values("tokens_per_sec", _get(found, "tokens_per_second")),
            **_range_values("efficiency_percent", _get(found, "efficiency"), 100.0),
            "communication_ms": to_ms(_get(found, "communication_seconds")),
            "sent_gb_per_gpu": to_gb(_get(found, "sent_bytes")),
            "gpu_memory_gb": to_gb(memory.gpu_bytes) if memory and memory.gpu else None,
            "host_memory_gb_per_node": to_gb(_get(memory, "host_bytes")),
            "measured_num_gpus": _get(measured, "num_gpus"),
            "measured_step_time_ms": to_ms(_get(measured, "step_seconds")),
            "measured_tokens_per_sec": _get(measured, "tokens_per_second"),
            "measured_communication_ms": to_ms(_get(measured, "communication_seconds")),
            "accelerator": each.row.trial.placement.accelerator,
            "gpus_per_node": _get(each.links, "gpus_per_node"),
            "link_bytes_per_sec": None if within == math.inf else within,
            "inter_bytes_per_sec": _get(each.links, "node_bytes_per_second"),
            "notes": "; ".join(each.notes),
        }


def _get(owner: object, name: str) -> Any:
    return None if owner is None else getattr(owner, name)


def _range_values(name: str, value: Range | None, factor: float = 1.0) -> dict[str, float | None]:
    return {
        f"{name}_no_overlap": None if value is None else value.no_overlap * factor,
        f"{name}_full_overlap": None if value is None else value.full_overlap * factor,
    }
