"""Starts the hook in a rank of a user's script, then runs the ``sitecustomize`` that this one hides.

At startup Python imports the first ``sitecustomize`` on its path, and this folder comes first on PYTHONPATH.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_pid = str(os.getpid())
# Even if the script replaces its process (exec), but not in a child, whose process id differs.
if "DS_BENCH_SCRIPT" in os.environ and os.environ.setdefault("DS_BENCH_SCRIPT_PID", _pid) == _pid:
    import ds_bench_script_hook  # type: ignore[import-not-found]

    ds_bench_script_hook.install()

_here = Path(__file__).resolve().parent
_hidden = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != _here])
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
