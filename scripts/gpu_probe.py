"""The first questions about a GPU machine: versions, whether ranks may be forked, op builds with their times.

    python scripts/gpu_probe.py --output FILE.json [--accelerator cpu]

Never fails for what it finds: the file is rewritten after each answer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
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


class NvmlRecorder:
    """Passes calls on to ``pynvml`` and keeps each with its answer, as ``tests/support/nvml_replay.py`` replays them.

    UUIDs are replaced by the number of the GPU. What a machine's file says beyond that names nobody.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.calls: dict[str, Any] = {}
        """Text of a call → its answer."""
        self._handles: dict[int, tuple[Any, str]] = {}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            words = [self._handles.get(id(each), (None, str(each)))[1] for each in arguments]
            text = f"{name}({', '.join(words)})"
            try:
                answer = function(*arguments)
            except Exception as error:
                self.calls[text] = {"error": type(error).__name__}
                raise
            if name == "nvmlDeviceGetUUID":
                self.calls[text] = (
                    words[0].replace("GPU ", "MIG-" if "MIG" in words[0] else "GPU-").replace(" MIG ", "-")
                )
            elif name.endswith("HandleByIndex"):
                self.calls[text] = f"GPU {words[0]}" if len(words) == 1 else f"{words[0]} MIG {words[1]}"
                self._handles[id(answer)] = answer, self.calls[text]
            elif answer is not None:
                self.calls[text] = _plain(answer)
            return answer

        return call


def _plain(answer: Any) -> Any:
    if isinstance(answer, list | tuple):
        return [_plain(each) for each in answer]
    names = [name for name, *_ in getattr(answer, "_fields_", ())] or list(getattr(answer, "__dict__", ()))
    return {name: getattr(answer, name) for name in names} if names else answer


def record_nvml(library: Any) -> dict[str, Any]:
    """Return every call that the product makes to NVML, and the memory that its first version shows."""
    recorder = NvmlRecorder(library)
    for gpu in gpu_state.read_gpus(recorder).gpus:
        with contextlib.suppress(Exception):
            recorder.nvmlInit()
            recorder.nvmlDeviceGetMemoryInfo(recorder.nvmlDeviceGetHandleByIndex(gpu.index))
    return {"source": "scripts/gpu_probe.py", "unknown": [], "calls": recorder.calls}


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
    with contextlib.suppress(ImportError):
        keep("nvml", record_nvml(importlib.import_module("pynvml")))
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
