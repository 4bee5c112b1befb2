"""Runs in every Python process that has this folder on PYTHONPATH. Does nothing unless a variable below is set."""

import os
import sys
from pathlib import Path

if os.environ.get("SIMULATED_CARDS") or os.environ.get("SIMULATED_CARDS_LINES"):
    # The second folder is for the allocator in ds_bench, which a user's interpreter does not have.
    sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[4])]
    from simulated_card import executed_lines, import_hook

    if folder := os.environ.get("SIMULATED_CARDS_LINES"):
        executed_lines.record(Path(folder))
    if os.environ.get("SIMULATED_CARDS"):
        import_hook.install()
