"""Prepares what every rank needs: environment variables, forwarded to other hosts too, and DeepSpeed's compiled ops."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ..config import validation
from ..config.spec import Configuration, Placement
from ..system import gpu_state, host_resources
from ..system.environment import Interpreter
from ..system.processes import import_variables
from ..system.redaction import looks_secret
from . import ops

_WAIT_VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
"""How threads wait, in OpenMP 5, GNU's runtime (in torch's wheels), and Intel's and LLVM's. All read the first."""
_FORWARDED = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TP_", "UCX_", "FI_", "HF_", "OMP_", "GOMP_", "KMP_", "MKL_")
"""Prefixes of the variables forwarded to every host: for networks, the Hugging Face libraries and threads."""

DERIVED_FROM_USER = {
    "PATH", "PYTHONPATH", "PYTHONSAFEPATH", "CUDA_VISIBLE_DEVICES", "LIBRARY_PATH", "CPATH", "TORCH_EXTENSIONS_DIR",
    "DS_ACCELERATOR",
}  # fmt: skip
"""Variables that :func:`rank_environment` derives from the user's values, which alone would lack what runs need."""


def ops_of(placement: Placement, configurations: Sequence[Configuration]) -> list[str]:
    """Return the ops that these configurations need here."""
    runnable = [each for each in configurations if validation.unsupported_reason(each, placement) is None]
    return ops.loaded_ops(placement.accelerator, runnable)


def build_ops(
    placement: Placement,
    configurations: Sequence[Configuration],
    base_environment: Mapping[str, str],
    say: Callable[[str], None],
    show_elapsed: Callable[[str], None],
    python: str | None = None,
) -> dict[str, ops.OpState]:
    """Build every op that these configurations need. Return op → state. Raises what ``ops.prepare_ops`` does.

    ``python``: the interpreter of a user's script; None for this one.
    """
    folder = Path(base_environment["TORCH_EXTENSIONS_DIR"])
    names = ops_of(placement, configurations)
    return ops.prepare_ops(names, folder, base_environment, say=say, show_elapsed=show_elapsed, python=python)


def rank_environment(
    placement: Placement,
    environ: Mapping[str, str],
    root: Path = host_resources.ROOT,
    inventory: gpu_state.GpuInventory | None = None,
    interpreter: Interpreter | None = None,
) -> dict[str, str]:
    """Variables of every process of every trial, the same for warm and cold launch.

    ``interpreter``: of a user's script, None without one.
    """
    variables = {
        "DS_ACCELERATOR": placement.accelerator,
        **import_variables(environ.get("PYTHONPATH", "")),
        # For ninja, which is next to the interpreter; the virtual environment need not be activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)]),
        # NVML's order, which this program uses; CUDA's own order starts with the fastest GPU.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # torch.cuda.is_available() would otherwise start CUDA, which processes forked later could not use.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # The library's threads do not survive a fork, and it warns if they were in use.
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # a container's --user; libraries read the user's name and home on import
        unknown = {"USER": f"uid{os.getuid()}", "HOME": str(ops.cache_root())}
        variables |= {name: value for name, value in unknown.items() if not environ.get(name)}
    if placement.accelerator == "cuda":
        variables |= cuda_environment(environ, inventory or gpu_state.read_gpus())
    architectures = variables.get("TORCH_CUDA_ARCH_LIST") or environ.get("TORCH_CUDA_ARCH_LIST")
    # Ops for the CPU do not depend on the architectures, and share one folder.
    cuda_only = architectures if placement.accelerator == "cuda" else None
    variables["TORCH_EXTENSIONS_DIR"] = str(ops.cache_folder(placement.accelerator, cuda_only, interpreter))
    if not placement.hosts:  # no other host connects
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    if interpreter is not None:  # a script's ranks are not forked
        del variables["TOKENIZERS_PARALLELISM"]
    variables |= thread_variables(placement, environ, root)
    if placement.accelerator == "cpu" and not _WAIT_VARIABLES & environ.keys():
        # Threads that spin between parallel regions take the cores from other ranks and from other programs.
        variables["OMP_WAIT_POLICY"] = "passive"
    return variables


def preload_variables(architectures: Iterable[str]) -> dict[str, str]:
    """Variables that make the preloaded server load these architectures, named as in Transformers."""
    modules = [f"transformers.models.{name}.modeling_{name}" for name in architectures]
    return {"DS_BENCH_PRELOAD": ",".join(modules)} if modules else {}


def thread_variables(
    placement: Placement, environ: Mapping[str, str], root: Path = host_resources.ROOT
) -> dict[str, str]:
    """The variable for the number of threads of each rank; empty if the user has set it."""
    if "OMP_NUM_THREADS" in environ:
        return {}
    # Without the variable each rank would use as many threads as the machine has cores.
    return {"OMP_NUM_THREADS": str(max(1, int(host_resources.usable_cores(root) / placement.ranks_per_node)))}


def forwarded_variables(environ: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """The user's variables for the ranks: those in ``names``, and those with a forwarded prefix but no credentials."""
    return {
        name: value
        for name, value in environ.items()
        if name in names or (name.startswith(_FORWARDED) and not looks_secret(name, value))
    }


def cuda_environment(environ: Mapping[str, str], inventory: gpu_state.GpuInventory) -> dict[str, str]:
    """Variables for builds of CUDA ops and for DeepSpeed's NVML calls.

    The user's values stay, except that selected GPUs become numbers and that folders are added to the paths of the
    compiler and the linker.
    """
    visible = gpu_state.select_visible(environ, inventory.gpus)
    variables = {}
    if "CUDA_VISIBLE_DEVICES" in environ and inventory.gpus:  # DeepSpeed reads only integers: even "0," fails
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in visible)
    capabilities = sorted({gpu.compute_capability for gpu in visible if gpu.compute_capability is not None})
    if capabilities and "TORCH_CUDA_ARCH_LIST" not in environ:  # one build for all these GPUs
        variables["TORCH_CUDA_ARCH_LIST"] = ";".join(f"{major}.{minor}" for major, minor in capabilities)
    toolkit = Path(environ.get("CUDA_HOME", "/usr/local/cuda"))
    stubs = toolkit / "lib64" / "stubs"
    if stubs.is_dir():  # a libcuda.so for the linker, in case it does not find the driver's
        variables["LIBRARY_PATH"] = os.pathsep.join(filter(None, [environ.get("LIBRARY_PATH"), str(stubs)]))
    # The toolkit may lack the headers of the math libraries; the wheels that torch depends on have them.
    packages = [folder for folder in map(Path, sys.path) if folder.name == "site-packages"]
    headers = [str(path) for folder in packages for path in sorted(folder.glob("nvidia/cu1*/include"))]
    if headers and not (toolkit / "include" / "cusparse.h").exists():
        variables["CPATH"] = os.pathsep.join(filter(None, [environ.get("CPATH"), headers[0]]))
    return variables
