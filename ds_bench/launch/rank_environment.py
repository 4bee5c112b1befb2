"""What every rank needs before the first trial: its environment variables, and DeepSpeed's ops built."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import validation
from ..config.spec import Placement
from ..system import gpus, host_memory
from ..system.processes import import_variables
from . import ops

_WAIT_VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
"""Of OpenMP 5, GNU's runtime (in torch's wheels) and Intel's and LLVM's; all three obey the first."""


def build_ops(
    placement: Placement,
    configs: Sequence[Mapping[str, Any]],
    base_environment: Mapping[str, str],
    say: Callable[[str], None],
) -> dict[str, ops.OpState]:
    """The state of every op that these DeepSpeed configurations need, built ahead where it can be."""
    runnable = [config for config in configs if validation.unsupported_reason(config, placement) is None]
    names = ops.needed_ops(placement.accelerator, runnable)
    if placement.accelerator == "cuda":
        names += ops.fused_ops(runnable)
    return ops.prepare_ops(names, Path(base_environment["TORCH_EXTENSIONS_DIR"]), base_environment, say=say)


def rank_environment(
    placement: Placement,
    environ: Mapping[str, str],
    preload_model: str | None,
    root: Path = host_memory.ROOT,
    query: gpus.GpuQuery | None = None,
) -> dict[str, str]:
    """Variables every process of every trial gets, the same for warm and cold launch."""
    variables = {
        "DS_ACCELERATOR": placement.accelerator,
        **import_variables(environ.get("PYTHONPATH", "")),
        # ninja lies beside the interpreter of a virtual environment, which need not be activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)]),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    variables |= _identity(environ)
    if preload_model is not None:
        variables["DS_BENCH_PRELOAD"] = f"transformers.models.{preload_model}.modeling_{preload_model}"
    if placement.accelerator == "cuda":
        variables |= cuda_environment(environ, query or gpus.NvmlQuery())
    architectures = variables.get("TORCH_CUDA_ARCH_LIST") or environ.get("TORCH_CUDA_ARCH_LIST")
    cuda_only = architectures if placement.accelerator == "cuda" else None
    variables["TORCH_EXTENSIONS_DIR"] = str(ops.cache_folder(placement.accelerator, cuda_only))
    if placement.hostfile is None:  # one node: nothing listens to the outside
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    if "OMP_NUM_THREADS" not in environ:
        variables["OMP_NUM_THREADS"] = str(max(1, int(host_memory.usable_cores(root) / _local_ranks(placement))))
    if placement.accelerator == "cpu" and not _WAIT_VARIABLES & environ.keys():
        # Threads that spin between parallel regions take the cores from other ranks and from other programs.
        variables["OMP_WAIT_POLICY"] = "passive"
    return variables


def _identity(environ: Mapping[str, str]) -> dict[str, str]:
    """A name and a home for a user without an entry (a container's ``--user``): libraries ask for them on import."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        home = {} if environ.get("HOME") else {"HOME": str(ops.cache_roots()[-1])}
        name = {} if environ.get("USER") else {"USER": f"uid{os.getuid()}"}
        return {**name, **home}
    return {}


def cuda_environment(environ: Mapping[str, str], query: gpus.GpuQuery) -> dict[str, str]:
    """What builds of CUDA ops and DeepSpeed's NVML calls need, where the user has not said it."""
    visible = gpus.select_visible(environ, query.read().gpus)
    variables = {}
    if environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-"):  # DeepSpeed reads integers only
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in visible)
    capabilities = sorted({gpu.compute_capability for gpu in visible if gpu.compute_capability is not None})
    if capabilities and "TORCH_CUDA_ARCH_LIST" not in environ:  # one cache for these cards, no rebuild in a trial
        variables["TORCH_CUDA_ARCH_LIST"] = ";".join(f"{major}.{minor}" for major, minor in capabilities)
    stubs = Path(environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64" / "stubs"
    if stubs.is_dir():  # libcuda.so to link against, where the driver's own is not on the linker's path
        variables["LIBRARY_PATH"] = os.pathsep.join(filter(None, [environ.get("LIBRARY_PATH"), str(stubs)]))
    headers = _wheel_headers()
    toolkit = Path(environ.get("CUDA_HOME", "/usr/local/cuda")) / "include" / "cusparse.h"
    if headers is not None and not toolkit.exists():
        variables["CPATH"] = os.pathsep.join(filter(None, [environ.get("CPATH"), str(headers)]))
    return variables


def _wheel_headers() -> Path | None:
    """CUDA's headers as torch's own wheels bring them, for toolkits that come without the math libraries."""
    for folder in map(Path, sys.path):
        found = next(iter(sorted(folder.glob("nvidia/cu1*/include"))), None) if folder.name == "site-packages" else None
        if found is not None:
            return found
    return None


def _local_ranks(placement: Placement) -> int:
    from ..config.placement import read_hostfile

    if placement.hostfile is None:
        return placement.num_gpus
    return max(read_hostfile(Path(placement.hostfile)).values())
