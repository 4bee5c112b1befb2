"""Records each line of chosen files when it first runs: ranks end by os._exit, which skips handlers at exit."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

PARTS = ("ds_bench/worker/", "ds_bench/system/gpu", "ds_bench/launch/", "ds_bench/doctor/")


def record(folder: Path) -> None:
    """Append ``FILE:LINE`` to a file of this process in ``folder`` for each line of ``PARTS`` that runs."""
    seen: set[tuple[str, int]] = set()
    wanted: dict[Any, bool] = {}

    def trace_line(frame: Any, event: str, _: Any) -> Any:
        key = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and key not in seen:
            seen.add(key)
            with (folder / f"{os.getpid()}.lines").open("a") as file:
                file.write(f"ds_bench/{key[0].rpartition('/ds_bench/')[2]}:{key[1]}\n")
        return trace_line

    def trace_call(frame: Any, _event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in wanted:
            wanted[code] = any(part in code.co_filename for part in PARTS)
        return trace_line if wanted[code] else None

    sys.settrace(trace_call)
    threading.settrace(trace_call)
