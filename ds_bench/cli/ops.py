"""The command ``ops``: builds DeepSpeed's ops in advance."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..config import placement
from ..doctor import software
from ..launch import ops, rank_environment
from ..system import gpu_state, terminal
from ..system.environment import require_packages


def build_ops() -> int:
    """Build the missing ops and print the state of every op.

    Return 0 if at least one op is usable, else 1. Raises PreflightError without torch or DeepSpeed.
    """
    require_packages("building DeepSpeed's ops", ("torch", "deepspeed"))
    here = placement.default_placement(os.environ, gpu_state.read_gpus())
    variables = rank_environment.rank_environment(here, os.environ)
    names = software.strategies_by_op(here.accelerator)
    with terminal.StatusLine(sys.stdout) as line:
        folder = Path(variables["TORCH_EXTENSIONS_DIR"])
        states = ops.prepare_ops(names, folder, variables, say=line.say, show_elapsed=line.show)
    for name, state in states.items():
        text = "ready" if state.ready else f"{state.reason}; {ops.remedy_of(state.reason)}"
        terminal.print_text(f"{name.removesuffix('Builder'):<14} {text}")
    return 0 if any(state.ready for state in states.values()) else 1
