"""Imported by every Python process that has this folder on PYTHONPATH. Does nothing unless SIMULATED_CARDS is set."""

import os
import sys
from pathlib import Path

if os.environ.get("SIMULATED_CARDS"):
    sys.path.append(str(Path(__file__).parents[2]))
    from simulated_card import import_hook

    import_hook.install()
