"""The first questions about a GPU machine: versions, whether ranks may be forked, op builds with their times.

    python scripts/gpu_probe.py --output FILE.json [--accelerator cpu]

Never fails for what it finds: the file is rewritten after each answer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_bench.config.spec import Placement
from ds_bench.launch import Limits, ops, rank_environment
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.records.json_files import write_json
from ds_bench.system import environment, gpu_state


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    found: dict[str, Any] = {"environment": environment.read_environment().to_dict()}
    cards = [gpu.index for gpu in gpu_state.read_gpus().gpus]
    place = Placement(accelerator=args.accelerator, num_gpus=1)
    variables = rank_environment.rank_environment(place, os.environ) | rank_environment.preload_variables(["gpt2"])

    def keep(name: str, answer: object) -> None:
        found[name] = answer
        print(f"{name}: {answer}", flush=True)
        write_json(args.output, found)

    keep("cards", cards)
    device_op = ops.FUSED_ADAM if args.accelerator == "cuda" else ops.SHARED_MEMORY
    folder = Path(variables["TORCH_EXTENSIONS_DIR"])
    for name in (device_op, ops.CPU_ADAM, ops.ASYNC_IO):
        (state,) = ops.prepare_ops([name], folder, variables, timeout_seconds=240, say=print).values()
        keep(name, {"ready": state.ready, "seconds": state.seconds, "reason": state.reason})
    start = time.monotonic()
    refused = WarmLauncher(variables, Limits()).prepare()
    keep("fork", {"refused": refused, "seconds": time.monotonic() - start})
    return 0


if __name__ == "__main__":
    sys.exit(main())
