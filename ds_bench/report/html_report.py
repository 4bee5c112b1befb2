"""The report as one HTML file that needs nothing else: no network, no fonts, no scripts but its own.

It lays out what ``sections`` and ``charts`` give. Everything from users, models and machines is escaped by the template
engine or by the XML writer; nothing of theirs ever stands inside a script or a style.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..analysis.comparison import ComparisonRow
from . import charts, sections
from .chart_data import Chart, charts_of
from .columns import Column, measured_columns
from .sections import ReportSection

__all__ = ["Report", "ReportSection", "render"]

# Control characters have no place in HTML, lone surrogates none in UTF-8, and bidirectional overrides reorder text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page."""

    title: str
    sections: tuple[ReportSection, ...]
    command: str
    """The lines that were typed; empty where nobody knows."""
    environment: Mapping[str, str]
    """Label → text, in reading order; of all sections that do not tell their own."""
    generated: str
    """When and by which version."""


def render(report: Report) -> str:
    """The whole page as text, to be written as UTF-8."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    engine = Environment(
        loader=PackageLoader("ds_bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    styles, script = (Markup(_source(engine, name)) for name in ("report.css", "report.js"))
    parts = [_section(section, f"s{number}") for number, section in enumerate(report.sections, 1)]
    page = engine.get_template("report.html").render(report=report, parts=parts, styles=styles, script=script)
    return _UNPRINTABLE.sub("\ufffd", page)


def _source(engine: Any, name: str) -> str:
    """A file of ours, word for word."""
    return str(engine.loader.get_source(engine, name)[0])


def _section(section: ReportSection, uid: str) -> dict[str, Any]:
    """What the template asks of one section."""
    drawable = charts_of(section.comparison)
    footnotes = sections.footnotes(section.comparison)
    said = {footnote.text for footnote in footnotes}
    return {
        "uid": uid,
        "title": section.title,
        "recommendation": section.recommendation,
        "columns": measured_columns(section.comparison),
        "rows": [_row(row, section, footnotes) for row in section.comparison.results],
        "footnotes": footnotes,
        "notes": [note for note in section.notes if note not in said],
        "sources": section.sources,
        "environments": section.environments,
        "charts": [_chart(chart, f"{uid}-{chart.name}") for chart in drawable.charts],
        "left_out": drawable.missing,
    }


def _row(row: ComparisonRow, section: ReportSection, footnotes: tuple[sections.Footnote, ...]) -> dict[str, Any]:
    baseline = section.comparison.baseline
    shown = measured_columns(section.comparison)
    return {
        "label": row.label,
        "baseline": baseline is not None and row.key == baseline.key,
        "status": sections.status(row),
        "succeeded": row.succeeded,
        "cells": [_cell(column, row, section) for column in shown],
        "runs": len(row.summaries),
        "footnotes": [number for number, footnote in enumerate(footnotes, 1) if row.label in footnote.rows],
        "config": sections.config(row),
    }


def _cell(column: Column, row: ComparisonRow, section: ReportSection) -> tuple[str, str]:
    """Text and sort key; an empty key sorts last both ways."""
    text, key = column.cell(row, section.comparison)
    return text, "" if key is None else repr(key)


def _chart(chart: Chart, uid: str) -> dict[str, Any]:
    from markupsafe import Markup

    return {"uid": uid, "chart": chart, "svg": Markup(charts.inline_svg(chart, uid))}
