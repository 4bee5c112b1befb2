"""The first questions about a GPU machine: can ranks be forked, what do NVML and CUDA say, which ops build, how fast?

    python scripts/gpu_probe.py --output FILE.json [--accelerator cpu]

Never fails because of a finding: the file is rewritten after each answer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_bench.config.spec import Placement
from ds_bench.doctor import checks
from ds_bench.doctor.findings import SystemAccess
from ds_bench.launch import Limits, ops, rank_environment
from ds_bench.launch.warm_launcher import WarmLauncher
from ds_bench.records.json_files import write_json
from ds_bench.system import environment, gpu_state


class NvmlRecorder:
    """Passes calls on to ``pynvml`` and keeps each with its answer, for ``tests/support/nvml_replay.py`` to replay.

    UUIDs are replaced with the number of the GPU, so that a recording identifies no machine.
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
    """Return every call that the product makes to NVML, and the first version of the call about memory."""
    recorder = NvmlRecorder(library)
    for gpu in gpu_state.read_gpus(recorder).gpus:
        with contextlib.suppress(Exception):
            recorder.nvmlInit()
            recorder.nvmlDeviceGetMemoryInfo(recorder.nvmlDeviceGetHandleByIndex(gpu.index))
    return {"source": "scripts/gpu_probe.py", "unknown": [], "calls": recorder.calls}


_CUDA_FACTS = """
import json, time, torch
found = {}
torch.cuda.set_device(0)
free, total = torch.cuda.mem_get_info()
found["total_bytes"], found["free_after_context_bytes"] = total, free
a = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
(a @ a).sum().item()
found["free_after_cublas_bytes"] = torch.cuda.mem_get_info()[0]
found["allocated_after_cublas_bytes"] = torch.cuda.memory_allocated()
backends = torch.backends.cuda
names = ("flash", "mem_efficient", "math", "cudnn")
found["sdp_enabled"] = {name: getattr(backends, name + "_sdp_enabled")() for name in names}
found["cudnn_version"], found["nccl_version"] = torch.backends.cudnn.version(), list(torch.cuda.nccl.version())
found["float32_matmul_precision"] = torch.get_float32_matmul_precision()
pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
device = torch.empty(2**28, dtype=torch.uint8, device="cuda")
for name, source, target in (("to_gpu", pinned, device), ("to_host", device, pinned)):
    target.copy_(source); torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(8):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    found[name + "_bytes_per_second"] = 8 * 2**28 / (time.perf_counter() - start)
print(json.dumps(found))
"""


def read_cuda_facts(variables: dict[str, str]) -> dict[str, Any]:
    """Memory before and after cuBLAS, attention backends, copy speed: in a child process, which uses the GPU."""
    command, environ = [sys.executable, "-c", _CUDA_FACTS], {**os.environ, **variables}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired as error:
        return {"error": str(error)[-200:]}
    if done.returncode != 0:
        return {"error": "\n".join(done.stderr.splitlines()[-3:])}
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    found: dict[str, Any] = {"environment": environment.read_environment().to_dict()}
    place = Placement(accelerator=args.accelerator, num_gpus=1)
    variables = rank_environment.rank_environment(place, os.environ) | rank_environment.preload_variables(["gpt2"])

    def keep(name: str, answer: object) -> None:
        found[name] = answer
        print(f"{name}: {answer}"[:500], flush=True)
        write_json(args.output, found)

    # First comes the question that decides how every trial starts, since op builds take minutes.
    start = time.monotonic()
    refused = WarmLauncher(variables, Limits()).prepare()
    keep("fork", {"refused": refused, "seconds": time.monotonic() - start})
    with contextlib.suppress(ImportError):
        keep("nvml", record_nvml(importlib.import_module("pynvml")))
    findings = checks.run_all_checks(SystemAccess())
    keep("doctor", {group: [dataclasses.asdict(each) for each in own] for group, own in findings.items()})
    if args.accelerator == "cuda":
        keep("cuda", read_cuda_facts(variables))
    device_op = ops.FUSED_ADAM if args.accelerator == "cuda" else ops.SHARED_MEMORY
    folder = Path(variables["TORCH_EXTENSIONS_DIR"])
    for name in (device_op, ops.CPU_ADAM, *([ops.ASYNC_IO] if os.environ.get("NVME_PATH") else [])):
        (state,) = ops.prepare_ops([name], folder, variables, timeout_seconds=240, say=print).values()
        keep(name, {"ready": state.ready, "seconds": state.seconds, "reason": state.reason})
    return 0


if __name__ == "__main__":
    sys.exit(main())
