"""``python -m ds_bench.model_size``: the command ``model-size`` under a name of its own (``cli/run.py``)."""

import sys

from .cli.commands import main

if __name__ == "__main__":
    sys.exit(main(["model-size", *sys.argv[1:]]))
