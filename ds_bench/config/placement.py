"""Determines the placement of a comparison without loading torch: accelerator, ranks, hosts and number formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import UsageError
from ..system import environment, gpu_state, job
from ..units import format_items
from .hosts import Slots, forwarded_names, host_command, master_address, used_slots, world_size
from .options import Options
from .spec import Accelerator, Placement, Precision, gpu_precisions


def resolve_placement(
    options: Options,
    environ: Mapping[str, str],
    inventory: gpu_state.GpuInventory,
    interpreter: environment.Interpreter | None = None,
) -> Placement:
    """Return the requested placement on this machine. Raises UsageError if the machine cannot provide it.

    ``interpreter``: the one for a user's script, whose torch is used; None for this one.
    """
    rocm = environment.torch_built_for("hip") if interpreter is None else None
    if options.accelerator != "cpu" and rocm is not None:
        raise UsageError(
            f"the installed torch is for ROCm {rocm}, which is not supported",
            remedy=f"install torch for CUDA and run on NVIDIA GPUs, or use {options.spelling_of('accelerator')} cpu",
        )
    visible = gpu_state.select_visible(environ, inventory.gpus)
    accelerator = _accelerator(options.accelerator, len(visible), interpreter, options.spelling_of("accelerator"))
    if accelerator == "cuda" and environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        raise UsageError("CUDA_VISIBLE_DEVICES names a MIG instance", remedy="give whole GPUs; MIG is not supported")
    if accelerator == "cpu" and options.gpu_memory_limit is not None:
        problem = f"{options.spelling_of('gpu_memory_limit')}, but no GPU is used"
        raise UsageError(problem, remedy=f"use {options.spelling_of('cpu_memory_limit')} on a CPU")
    address = master_address(options)
    hosts = used_slots(options, environ, len(visible) if accelerator == "cuda" else None)
    selected = options.include is not None or options.exclude is not None
    slots = "@".join(f"{host}:{','.join(map(str, numbers))}" for host, numbers in hosts.items())
    return Placement(
        **_device_facts(accelerator, visible),
        num_gpus=_ranks(options, environ, accelerator, len(visible), hosts),
        # The warm launcher forks ranks on this machine only.
        launcher="deepspeed" if options.launcher == "deepspeed" or hosts else "warm",
        hostfile=None if options.hostfile is None else str(options.hostfile.resolve()),
        nvme_path=None if options.nvme_path is None else str(options.nvme_path.resolve()),
        cpu_memory_limit_bytes=options.cpu_memory_limit_bytes,
        gpu_memory_limit_bytes=options.gpu_memory_limit_bytes,
        hosts=tuple((name, len(numbers)) for name, numbers in hosts.items()),
        include=slots if selected else None,
        host_command=host_command(options, hosts),
        forwarded_variables=forwarded_names(options, environ),
        master_addr=address or job.master_address(),
        master_port=options.master_port,
    )


def default_placement(
    environ: Mapping[str, str], inventory: gpu_state.GpuInventory, interpreter: environment.Interpreter | None = None
) -> Placement:
    """Return this machine's placement without any flags: every visible GPU, or one CPU rank."""
    visible = gpu_state.select_visible(environ, inventory.gpus)
    accelerator = _accelerator("auto", len(visible), interpreter)
    return Placement(**_device_facts(accelerator, visible), num_gpus=len(visible) if accelerator == "cuda" else 1)


def choose_precision(requested: Precision | Literal["auto"], placement: Placement) -> Precision:
    """Return the requested number format; for ``auto``, the first of bf16, fp16, fp32 that the device supports.

    A requested format is never replaced: on a device without it, every row is Unsupported.
    """
    return placement.supported_precisions[0] if requested == "auto" else requested


def _accelerator(
    requested: str, visible: int, interpreter: environment.Interpreter | None, name: str = "--accelerator"
) -> Accelerator:
    torch_cuda = environment.cuda_version_of(interpreter)
    if requested == "cpu" or (requested == "auto" and (visible == 0 or torch_cuda is None)):
        return "cpu"
    if torch_cuda is None:
        raise UsageError(f"{name} cuda, but no torch for CUDA is installed", remedy="install torch for CUDA")
    if visible == 0:
        remedy = f"check nvidia-smi and CUDA_VISIBLE_DEVICES, or use {name} cpu"
        raise UsageError(f"{name} cuda, but no GPU is visible", remedy=remedy)
    return "cuda"


def _device_facts(accelerator: Accelerator, visible: Sequence[gpu_state.GpuFacts]) -> dict[str, Any]:
    if accelerator == "cpu":
        formats = ("bf16", "fp16", "fp32") if _cpu_has_fp16() else ("bf16", "fp32")
        return {"accelerator": accelerator, "supported_precisions": formats}
    known = [gpu.compute_capability for gpu in visible if gpu.compute_capability is not None]
    oldest = min(known, default=None)
    return {"accelerator": accelerator, "supported_precisions": gpu_precisions(oldest), "compute_capability": oldest}


def _cpu_has_fp16() -> bool:
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    # DeepSpeed checks for the instructions that oneDNN needs (accelerator/cpu_accelerator.py, is_fp16_supported).
    return "avx512_fp16" in words or "amx_fp16" in words


def _ranks(options: Options, environ: Mapping[str, str], accelerator: Accelerator, visible: int, hosts: Slots) -> int:
    flag = options.spelling_of("num_gpus")
    if hosts:
        slots = sum(map(len, hosts.values()))
        if options.num_gpus not in (None, slots):
            selected = "the hostfile has" if not (options.include or options.exclude) else "the selection has"
            problem = f"{flag} {options.num_gpus}, but {selected} {format_items(slots, 'slot')}"
            raise UsageError(problem, remedy=f"leave {flag} out; {options.spelling_of('include')} selects slots")
        return slots
    requested = options.num_gpus or world_size(environ)
    if accelerator == "cpu" or requested is None:
        return requested or (1 if accelerator == "cpu" else visible)
    if options.num_gpus is None and requested > visible:
        raise UsageError(
            f"{requested} processes were started, but the first sees {format_items(visible, 'GPU')}",
            remedy="let the first see every GPU (Slurm: srun --gpus-per-node=N --gpu-bind=none), or give "
            f"{flag} {visible}",
        )
    if requested > visible:
        problem = f"{flag} {requested}, but the machine has {format_items(visible, 'visible GPU')}"
        raise UsageError(problem, remedy=f"give {visible} or fewer")
    return requested
