"""The flat JSON and CSV of a run: one row per trial, with the columns of ``Row`` (docs/metrics.md)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# From OWASP, "CSV Injection"; _cell has already replaced carriage returns with line feeds.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\n")


def flat_json_path(folder: Path) -> Path:
    """Return the flat JSON of a run's folder: ``zero_comparison_STAMP.json`` for ``runs/zero_STAMP``."""
    prefix, _, stamp = folder.name.partition("_")
    stem = f"comparison_{stamp}" if prefix == "comparison" else f"{prefix}_comparison_{stamp}"
    return folder.parent.parent / f"{stem}.json"


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format rows as CSV with a header. None is an empty cell; text that a spreadsheet would run as a formula gets an
    apostrophe before it."""
    rows = list(rows)
    buffer = io.StringIO()
    if rows:
        columns = [name for name in rows[0] if name != "caveat_list"]  # a list has no place in a cell
        writer = csv.DictWriter(buffer, fieldnames=columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        value = value.replace("\r\n", "\n").replace("\r", "\n")  # a lone \r is not quoted before Python 3.13
        return "'" + value if value.startswith(_FORMULA_STARTS) else value
    return "" if value is None else value
