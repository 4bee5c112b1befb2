"""``python -m ds_bench``: see ``cli/commands.py``."""

import sys

from .cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
