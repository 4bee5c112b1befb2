"""Reports as one self-contained HTML file: no network, no fonts, no scripts but its own.

Text from users, models and machines is escaped by the template engine or the XML writer, and never put inside a script
or a style.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..analysis import provenance
from ..analysis.comparison import ComparisonRow
from ..recommend.message_templates import Fact
from ..records.schema import SUCCESS
from ..system.environment import require_installed
from . import chart_drawing, combined_table
from .comparison_charts import charts_of
from .comparison_columns import detail_tables, measured_columns, row_status
from .comparison_report import ComparisonReport
from .memory_plan import MemoryPlan, answer_text, plan_table
from .table_layout import Column, make_table
from .terminal_report import notes_that_matter

if TYPE_CHECKING:
    from jinja2 import Environment

# Control characters have no place in HTML, lone surrogates none in UTF-8, and bidirectional overrides reorder text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def render_page(reports: Sequence[ComparisonReport], generated: str) -> str:
    """Return the whole page, to be written as UTF-8. ``generated``: time and version."""
    engine = _template_engine()
    from markupsafe import Markup

    assert engine.loader is not None
    # Markup is not escaped: both are files of this package.
    styles, script = (Markup(engine.loader.get_source(engine, name)[0]) for name in ("report.css", "report.js"))
    # For each report, every machine that its rows were measured on: label → text.
    machines = [[*{str(m): m for m in map(provenance.machine, each.environments)}.values()] for each in reports]
    # A common machine is shown once; otherwise each comparison shows its own.
    one_machine = len(set(map(str, machines))) == 1 and len(machines[0]) < 2
    common = combined_table.common_facts(reports) if reports else ()
    with_rows = [report for report in reports if report.comparison.rows]
    passes = combined_table.has_passes(with_rows)
    # Points of a sweep are grouped by model if there are several models, some with several points.
    models = [report.facts[0] for report in reports]
    grouped = 1 < len(set(models)) < len(models)
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, (report, own) in enumerate(zip(reports, machines, strict=True), 1):
        facts = [fact for fact in report.facts[grouped:] if fact not in common]
        part = _section(report, f"s{number}")
        part |= {"point": " · ".join(facts) or report.title, "environments": None if one_machine else own}
        groups.setdefault(report.facts[0] if grouped else "", []).append(part)
    page = engine.get_template("report.html").render(
        title=reports[0].title if len(reports) == 1 else " · ".join([f"{len(reports)} comparisons", *common]),
        generated=generated,
        command="\n".join(dict.fromkeys(command for report in reports for command in report.commands)),
        environment=next(iter(machines[0]), {}) if one_machine else {},
        groups=groups,
        overview=(combined_table.pass_tables if passes else combined_table.model_tables)(with_rows),
        styles=styles,
        script=script,
    )
    return _UNPRINTABLE.sub("\ufffd", page)


def render_tables(reports: Sequence[ComparisonReport]) -> str:
    """Return the answer and the rows of each report as a fragment for a notebook."""

    def part(report: ComparisonReport) -> dict[str, Any]:
        answer, rows = report.recommendation, report.comparison.rows
        columns: list[Column[ComparisonRow]] = [
            Column("Configuration", lambda row: f"{'★ ' if row.key == answer.key else ''}{row.label}"),
            Column("Status", _status),
            *measured_columns(report.comparison),
        ]
        next_step = f"Next: {answer.try_next}" if answer.provisional else None
        lines = [*map(str, filter(None, (answer.headline, next_step, answer.provisional))), *notes_that_matter(report)]
        return {"title": report.title, "table": make_table(columns, rows, always=len(columns)), "lines": lines}

    return _render_tables([*map(part, reports)])


def render_plan(plan: MemoryPlan) -> str:
    """Return the answer and the table of a plan as a fragment for a notebook."""
    return _render_tables([{"title": answer_text(plan), "table": plan_table(plan), "lines": []}])


def _render_tables(parts: Sequence[Mapping[str, Any]]) -> str:
    """Render the parts, each a title, a table and the lines below it."""
    return _UNPRINTABLE.sub("\ufffd", _template_engine().get_template("tables.html").render(parts=parts))


def _template_engine() -> Environment:
    for package in ("jinja2", "matplotlib"):
        require_installed(package, "an HTML page")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("ds_bench.report"),
        autoescape=True,
        # A misspelled name in a template is an error, not an empty string.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _status(row: ComparisonRow) -> str:
    return row_status(row, lambda status: f"{'✓' if status == SUCCESS else '✗'} {status}")


def _answer(report: ComparisonReport) -> dict[str, Any]:
    """The recommendation, without the facts that the notes below it state."""
    answer = report.recommendation
    facts = (answer.provisional, *answer.facts, answer.alternative)
    why = answer.headline.values.get("why")

    def is_stated(fact: Fact) -> bool:
        # A caveat that disqualifies a row already appears as a note on that row.
        reason = fact.values.get("reason")
        return isinstance(reason, Fact) and reason.kind == "invalid"

    return {
        "decided": answer.decided,
        "goal": answer.goal,
        "headline": answer.headline,
        "facts": [fact for fact in filter(None, facts) if not is_stated(fact)],
        # Without the cost if the headline states it.
        "cost": None if isinstance(why, Fact) and why.kind == "less_memory" else answer.cost,
        "steps": [step for step in answer.next_steps if step.kind not in ("caveat", "run_idle")],
    }


def _section(report: ComparisonReport, uid: str) -> dict[str, Any]:
    """Return the template's variables for one report. ``uid``: prefix of all its ids."""
    answer = report.recommendation
    chosen = answer.key if answer.decided else None
    open_tag = "provisional" if answer.disturbed else "start here"
    drawable, left_out = charts_of(report.comparison, chosen)
    numbers = {note: number for number, note in enumerate(report.labels_by_note, 1)}
    columns = measured_columns(report.comparison)
    sections: dict[str, list[dict[str, Any]]] = {"Speed": [], "Memory": [], "Steps": []}
    for chart in drawable:
        heading = {"throughput": "Speed", "pareto": "Speed", "ledger": "Memory"}.get(
            chart.name.partition("-")[0], "Steps"
        )
        sections[heading].append({"chart": chart, "source": chart_drawing.image_source(chart)})
    rows = []
    for row in report.comparison.rows:
        last = row.runs[-1]
        notes = [note for note in report.row_notes[row.key] if report.labels_by_note[note]]
        # A flat JSON lacks the whole configuration.
        config = (
            json.dumps(last.trial.ds_config, indent=2, ensure_ascii=False, default=str) if last.has_record else None
        )
        rows.append(
            {
                "label": row.label,
                "recommended": row.key == chosen,
                "tag": open_tag if row.key == answer.key != chosen else None,
                "baseline": row.is_baseline,
                "status": _status(row),
                "succeeded": row.succeeded,
                # an empty key sorts last
                "cells": [(each.cell(row), "" if (key := each.value(row)) is None else repr(key)) for each in columns],
                "runs": len(row.runs),
                "footnotes": sorted(numbers[note] for note in notes),
                "config": config,
            }
        )
    return {
        "uid": uid,
        "report": report,
        "answer": _answer(report),
        "columns": columns,
        "rows": rows,
        "profiles": report.profiles,
        "details": detail_tables(report.comparison),
        "footnotes": list(report.labels_by_note.items()),
        "chart_sections": [(heading, drawn) for heading, drawn in sections.items() if drawn],
        "left_out": left_out,
    }
