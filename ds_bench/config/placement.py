"""Determines the placement of a comparison without torch: accelerator, number of ranks, number formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import UsageError
from ..system import environment, files, gpus
from .options import Options
from .spec import PRECISIONS, Accelerator, Placement, Precision

_AMPERE = (8, 0)
"""First compute capability with bf16 arithmetic."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SLOTS = re.compile(r"[1-9][0-9]{0,3}")
_MOST_HOSTFILE_BYTES = 2**20


def resolve_placement(options: Options, environ: Mapping[str, str], query: gpus.GpuQuery) -> Placement:
    """Returns the placement that the flags ask for on this machine. Raises UsageError if the machine lacks it."""
    if options.accelerator != "cpu" and (rocm := environment.torch_rocm_version()) is not None:
        raise UsageError(
            f"the installed torch is for ROCm {rocm}, which is not supported",
            remedy="install torch for CUDA and run on NVIDIA GPUs, or --accelerator cpu",
        )
    visible = gpus.select_visible(environ, query.read().gpus)
    accelerator = _accelerator(options.accelerator, len(visible))
    if accelerator == "cuda" and environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        raise UsageError("CUDA_VISIBLE_DEVICES names a MIG instance", remedy="give whole GPUs; MIG is not supported")
    if accelerator == "cpu" and options.gpu_memory_limit is not None:
        raise UsageError("--gpu-memory-limit, but no GPU is used", remedy="use --cpu-memory-limit on a CPU")
    return Placement(
        accelerator=accelerator,
        num_gpus=_ranks(options, environ, accelerator, len(visible)),
        launcher="deepspeed" if options.launcher == "deepspeed" or options.hostfile is not None else "warm",
        hostfile=None if options.hostfile is None else str(options.hostfile.resolve()),
        nvme_path=None if options.nvme_path is None else str(options.nvme_path.resolve()),
        cpu_memory_limit_bytes=options.cpu_memory_limit_bytes,
        gpu_memory_limit_bytes=options.gpu_memory_limit_bytes,
        supported_precisions=_precisions(accelerator, visible),
    )


def default_placement(environ: Mapping[str, str], query: gpus.GpuQuery) -> Placement:
    """Returns the placement of this machine without any flag: every visible GPU, or one CPU rank."""
    visible = gpus.select_visible(environ, query.read().gpus)
    accelerator = _accelerator("auto", len(visible))
    return Placement(
        accelerator=accelerator,
        num_gpus=len(visible) if accelerator == "cuda" else 1,
        supported_precisions=_precisions(accelerator, visible),
    )


def _accelerator(requested: str, visible: int) -> Accelerator:
    torch_cuda = environment.torch_cuda_version()
    if requested == "cpu" or (requested == "auto" and (visible == 0 or torch_cuda is None)):
        return "cpu"
    if torch_cuda is None:
        raise UsageError("--accelerator cuda, but the installed torch is a CPU build", remedy="install torch for CUDA")
    if visible == 0:
        raise UsageError(
            "--accelerator cuda, but no GPU is visible",
            remedy="check nvidia-smi and CUDA_VISIBLE_DEVICES, or --accelerator cpu",
        )
    return "cuda"


def _ranks(options: Options, environ: Mapping[str, str], accelerator: Accelerator, visible: int) -> int:
    if options.hostfile is not None:
        slots = sum(read_hostfile(options.hostfile).values())
        if options.num_gpus not in (None, slots):
            raise UsageError(
                f"--num-gpus {options.num_gpus}, but the hostfile has {slots} slots", remedy="leave --num-gpus out"
            )
        return slots
    world_size = environ.get("WORLD_SIZE", "")  # a launcher that started this program says how many ranks it is for
    requested = options.num_gpus or (int(world_size) if world_size.isdecimal() and int(world_size) > 0 else None)
    if accelerator == "cpu":
        return requested or 1
    if requested is not None and requested > visible:
        raise UsageError(f"--num-gpus {requested}, but {visible} are visible", remedy=f"give {visible} or less")
    return requested or visible


def _precisions(accelerator: Accelerator, visible: tuple[gpus.GpuFacts, ...]) -> tuple[Precision, ...]:
    if accelerator == "cpu":
        return ("bf16", "fp16", "fp32") if _cpu_has_fp16() else ("bf16", "fp32")
    capabilities = [gpu.compute_capability for gpu in visible if gpu.compute_capability is not None]
    if capabilities and min(capabilities) < _AMPERE:
        return ("fp16", "fp32")
    return ("bf16", "fp16", "fp32")


def _cpu_has_fp16() -> bool:
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx512_fp16" in words or "amx_fp16" in words


def choose_precision(requested: str, placement: Placement) -> Precision:
    """Returns the requested number format; for ``auto`` the first of bf16, fp16, fp32 that the device trains in.

    One that the device does not train in is returned too: every row then is Unsupported, with the remedy.
    """
    if requested == "auto":
        return placement.supported_precisions[0]
    return next(precision for precision in PRECISIONS if precision == requested)


def read_hostfile(path: Path) -> dict[str, int]:
    """Reads a hostfile as DeepSpeed does: host → slots (launcher/runner.py). Raises UsageError naming the line.

    Names are passed to ssh, which would read one that begins with a dash as an option and might run a command in it.
    """
    try:
        lines = files.read_bytes(path, _MOST_HOSTFILE_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror}", remedy="give a readable file") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, (key, _, slots) = words[0], (words[1] if len(words) == 2 else "").partition("=")
        if not _HOST.fullmatch(name) or key != "slots" or not _SLOTS.fullmatch(slots) or name in hosts:
            raise UsageError(
                f"--hostfile {path}, line {number}: {line.strip()[:80]!r}",
                remedy="write: host slots=N, each host once, a name of letters, digits, dots, dashes and underscores, "
                "N from 1 to 9999",
            )
        hosts[name] = int(slots)
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host", remedy="write: host slots=N")
    return hosts
