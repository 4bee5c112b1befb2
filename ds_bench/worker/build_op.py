"""Builds DeepSpeed's compiled ops in its own process: ``python -m ds_bench.worker.build_op NAME…``.

Prints one JSON line per op: ``{"op", "state": "ready" | "unsupported" | "failed", "seconds", "reason"}``; for a ready
op also ``"libraries"``, the files that this process has loaded from the folder of built ops, relative to that folder.
The names are DeepSpeed's builder classes (``CPUAdamBuilder``).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any


def build(name: str) -> dict[str, Any]:
    """Compile and load one op. Return what the module's docstring describes."""
    import torch.utils.cpp_extension
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    start = time.monotonic()
    builder = get_accelerator().create_op_builder(name)
    # By name, because each kind of accelerator has its own class of that name (op_builder/*/no_impl.py).
    if builder is None or type(builder).__name__ == "NotImplementedBuilder":
        return {"op": name, "state": "unsupported", "seconds": 0.0, "reason": "does not exist for this accelerator"}
    try:
        # First, because an op whose library is missing compiles for minutes and fails only when it is linked.
        if not builder.is_compatible(verbose=True):
            reason = str(getattr(builder, "error_log", "") or "not compatible with this system")
            return {"op": name, "state": "unsupported", "seconds": time.monotonic() - start, "reason": reason}
        builder.load(verbose=False)
    except BaseException as error:  # compilers fail in many ways, SystemExit among them
        text = str(error)
        print(text, file=sys.stderr, flush=True)
        # The text is everything that ninja and the compiler printed; the reason is the line with the cause.
        causes = [line for line in text.splitlines() if re.search(r"error:|cannot find -l|CUDA_HOME", line)]
        reason = f"{type(error).__name__}: {(causes or text.splitlines() or [''])[0].strip()[:300]}"
        against_cuda = isinstance(builder, CUDAOpBuilder) and not builder.build_for_cpu
        # Without CUDA_HOME DeepSpeed raises TypeError, because it joins paths to it (op_builder/builder.py).
        if against_cuda and torch.utils.cpp_extension.CUDA_HOME is None:
            reason = "there is no CUDA toolkit: CUDA_HOME is not set, and no nvcc is found"
        return {"op": name, "state": "failed", "seconds": time.monotonic() - start, "reason": reason}
    seconds = time.monotonic() - start
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]).resolve()
    # The path is the sixth field and may contain spaces; anonymous memory has none (proc_pid_maps(5)).
    mapped = (line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines())
    loaded = {Path(path[0]) for path in mapped if path and path[0].endswith(".so")}
    libraries = sorted(str(each.relative_to(folder)) for each in loaded if each.is_relative_to(folder))
    return {"op": name, "state": "ready", "seconds": seconds, "reason": "", "libraries": libraries}


if __name__ == "__main__":
    out = sys.stdout
    sys.stdout = sys.stderr  # builders print; only the answer goes to stdout
    for op in sys.argv[1:]:
        print(json.dumps(build(op)), file=out, flush=True)
