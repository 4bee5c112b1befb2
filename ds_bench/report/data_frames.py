"""A result as a pandas data frame or a Parquet file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..analysis.row import COLUMNS, column_type
from ..system.environment import require_installed, require_packages

if TYPE_CHECKING:
    import pandas

_DTYPES: Mapping[Any, str] = {str: "string", bool: "boolean", int: "Int64", float: "float64"}
"""Type of a column → pandas' type for it, which allows missing values: the type of a column never depends on them."""


def data_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """One row per trial with all flat columns (docs/metrics.md), in their order.

    Missing values are pandas' own; ``started_at`` is a time in UTC, and missing if its text is not a time.
    """
    require_installed("pandas", "a data frame")
    import pandas as pd

    columns = {}
    for name in COLUMNS:
        values = [row.get(name) for row in rows]
        if name == "started_at":
            times = pd.Series(pd.to_datetime(values, utc=True, errors="coerce", format="ISO8601"))
            columns[name] = times.astype("datetime64[us, UTC]")
        else:
            columns[name] = pd.Series(values, dtype=_DTYPES[column_type(name)])
    return pd.DataFrame(columns)


def parquet_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The rows as a Parquet file. Raises PreflightError if pyarrow is not installed."""
    require_packages("Parquet", ("pyarrow",), "parquet")
    buffer = io.BytesIO()
    data_frame(rows).to_parquet(buffer, engine="pyarrow", index=False)
    return buffer.getvalue()
