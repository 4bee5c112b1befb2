"""The command lines: both scripts and ``python -m ds_bench``."""

import sys

try:
    from .script import main
except KeyboardInterrupt:  # Ctrl-C while modules are being loaded, including those that ``commands`` needs
    print("interrupted", file=sys.stderr)
    sys.exit(130)

__all__ = ["main"]
