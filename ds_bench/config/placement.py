"""Determines the placement of a comparison, without torch: accelerator, ranks, hosts and number formats."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import UsageError
from ..system import environment, files, gpu_state, job, redaction
from ..units import format_names
from .options import SEVERAL_NODES, Options
from .spec import Accelerator, Placement, Precision, gpu_precisions

SSH = "ssh {host}"
SRUN = "srun --nodes=1 --ntasks=1 --overlap --nodelist={host} --cpu-bind=none --mpi=none --quiet"
"""Runs a program on a node next to the steps of this job (srun(1)): ``--overlap`` does not wait for their resources,
``--cpu-bind=none`` allows all cores of the job, and ``--mpi=none`` avoids an MPI task."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
_SLOTS = re.compile(r"[1-9][0-9]{0,3}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_HOSTFILE_BYTES = 2**20

Slots = Mapping[str, Sequence[int]]
"""Host → numbers of its slots, counted from 0."""


def resolve_placement(options: Options, environ: Mapping[str, str], inventory: gpu_state.GpuInventory) -> Placement:
    """Return the placement that the flags ask for on this machine. Raises UsageError if the machine lacks it."""
    if options.accelerator != "cpu" and (rocm := environment.torch_rocm_version()) is not None:
        raise UsageError(
            f"the installed torch is for ROCm {rocm}, which is not supported",
            remedy=f"install torch for CUDA and run on NVIDIA GPUs, or {options.say('accelerator')} cpu",
        )
    visible = gpu_state.select_visible(environ, inventory.gpus)
    accelerator = _accelerator(options.accelerator, len(visible), options.say("accelerator"))
    if accelerator == "cuda" and environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        raise UsageError("CUDA_VISIBLE_DEVICES names a MIG instance", remedy="give whole GPUs; MIG is not supported")
    if accelerator == "cpu" and options.gpu_memory_limit is not None:
        problem = f"{options.say('gpu_memory_limit')}, but no GPU is used"
        raise UsageError(problem, remedy=f"use {options.say('cpu_memory_limit')} on a CPU")
    address = options.master_addr
    if address is not None and not (_HOST.fullmatch(address) or _IPV6.fullmatch(address)):
        raise UsageError(
            f"{options.say('master_addr')} {address!r} is not a host or address", remedy="give a name or an IP address"
        )
    hosts = _used_slots(options, environ, len(visible) if accelerator == "cuda" else None)
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
        host_command=_host_command(options, hosts),
        forwarded_variables=_forwarded_variables(options),
        master_addr=address or job.master_address(),
        master_port=options.master_port,
    )


def default_placement(environ: Mapping[str, str], inventory: gpu_state.GpuInventory) -> Placement:
    """Return the placement of this machine without any flag: every visible GPU, or one CPU rank."""
    visible = gpu_state.select_visible(environ, inventory.gpus)
    accelerator = _accelerator("auto", len(visible))
    return Placement(**_device_facts(accelerator, visible), num_gpus=len(visible) if accelerator == "cuda" else 1)


def choose_precision(requested: Precision | Literal["auto"], placement: Placement) -> Precision:
    """Return the requested number format; for ``auto`` the first of bf16, fp16, fp32 that the device trains in.

    A requested format is never replaced: on a device without it every row is Unsupported.
    """
    return placement.supported_precisions[0] if requested == "auto" else requested


def _accelerator(requested: str, visible: int, name: str = "--accelerator") -> Accelerator:
    torch_cuda = environment.torch_cuda_version()
    if requested == "cpu" or (requested == "auto" and (visible == 0 or torch_cuda is None)):
        return "cpu"
    if torch_cuda is None:
        raise UsageError(f"{name} cuda, but the installed torch is a CPU build", remedy="install torch for CUDA")
    if visible == 0:
        remedy = f"check nvidia-smi and CUDA_VISIBLE_DEVICES, or {name} cpu"
        raise UsageError(f"{name} cuda, but no GPU is visible", remedy=remedy)
    return "cuda"


def _device_facts(accelerator: Accelerator, visible: Sequence[gpu_state.GpuFacts]) -> dict[str, Any]:
    if accelerator == "cpu":
        formats = ("bf16", "fp16", "fp32") if _cpu_has_fp16() else ("bf16", "fp32")
        return {"accelerator": accelerator, "supported_precisions": formats}
    known = [gpu.compute_capability for gpu in visible if gpu.compute_capability is not None]
    oldest = min(known, default=None)
    facts = {"supported_precisions": gpu_precisions(oldest), "compute_capability": oldest}
    return {"accelerator": accelerator, **facts}


def _cpu_has_fp16() -> bool:
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    # DeepSpeed checks for the instructions that oneDNN needs (accelerator/cpu_accelerator.py, is_fp16_supported).
    return "avx512_fp16" in words or "amx_fp16" in words


def _ranks(options: Options, environ: Mapping[str, str], accelerator: Accelerator, visible: int, hosts: Slots) -> int:
    flag = options.say("num_gpus")
    if hosts:
        slots = sum(map(len, hosts.values()))
        if options.num_gpus not in (None, slots):
            selected = "the hostfile has" if not (options.include or options.exclude) else "the hosts selected have"
            problem = f"{flag} {options.num_gpus}, but {selected} {slots} slots"
            raise UsageError(problem, remedy=f"leave {flag} out; {options.say('include')} selects slots")
        return slots
    requested = options.num_gpus or _world_size(environ)
    if accelerator == "cpu" or requested is None:
        return requested or (1 if accelerator == "cpu" else visible)
    if options.num_gpus is None and requested > visible:
        raise UsageError(
            f"{requested} processes were started for this comparison, but {visible} are visible to the first",
            remedy="let the first see every GPU (Slurm: srun --gpus-per-node=N --gpu-bind=none), or give "
            f"{flag} {visible}",
        )
    if requested > visible:
        raise UsageError(f"{flag} {requested}, but {visible} are visible", remedy=f"give {visible} or less")
    return requested


def _world_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks of the launcher that started this program; None without a launcher."""
    text = environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


# Hosts


def read_hostfile(path: Path) -> dict[str, int]:
    """Read a hostfile as DeepSpeed does: host → slots (launcher/runner.py). Raises UsageError naming the line.

    ssh gets the names, and would take one that begins with a dash for an option, which might run a command.
    """
    try:
        lines = files.read_bytes(path, _MOST_HOSTFILE_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise UsageError(f"hostfile {path}: {error.strerror}", remedy="give a readable file") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, (key, _, slots) = words[0], (words[1] if len(words) == 2 else "").partition("=")
        if not _HOST.fullmatch(name) or key != "slots" or not _SLOTS.fullmatch(slots) or name in hosts:
            raise UsageError(
                f"hostfile {path}, line {number}: {line.strip()[:80]!r}",
                remedy="write: host slots=N, each host once, a name of letters, digits, dots, dashes and underscores, "
                "N from 1 to 9999",
            )
        hosts[name] = int(slots)
    if not hosts:
        raise UsageError(f"hostfile {path} names no host", remedy="write: host slots=N")
    return hosts


def _used_slots(options: Options, environ: Mapping[str, str], visible: int | None) -> Slots:
    """Return the slots of each host that are used, in the order of the hostfile or of the job; empty without both."""
    if options.hostfile is not None:
        slots = {name: range(number) for name, number in read_hostfile(options.hostfile).items()}
        return select_slots(slots, options.include, options.exclude)
    nodes = _slots_of_job(options, environ, visible)
    for name in SEVERAL_NODES:
        of_jobs = name == "env" or (nodes and name in ("host_command", "master_addr", "master_port"))
        if getattr(options, name) is not None and not of_jobs:
            hostfile = options.say("hostfile")
            problem = f"{options.say(name)} without {hostfile}"
            raise UsageError(problem, remedy=f"add {hostfile} FILE, or leave it out")
    return nodes


def _slots_of_job(options: Options, environ: Mapping[str, str], visible: int | None) -> Slots:
    """Return the slots of the nodes of a job of Slurm, torchrun or DeepSpeed's launcher; empty elsewhere.

    The number of ranks is the requested one, or one for each GPU that is visible here (``visible``; None on a CPU: one
    for each task of Slurm). Raises UsageError if it does not divide equally among the nodes.
    """
    launched = job.ranks_of_hosts()
    tasks = launched or job.tasks_of_nodes(environ)
    requested = options.num_gpus or _world_size(environ)
    if not tasks or requested == sum(tasks.values()) or (requested is None and visible is None):
        return {node: range(count) for node, count in tasks.items()}
    ranks, left = divmod(requested or len(tasks) * (visible or 1), len(tasks))
    if left or not ranks:
        raise UsageError(
            f"{requested} ranks cannot be shared out equally among the {len(tasks)} nodes of this "
            f"{'' if launched else 'Slurm '}job",
            remedy=f"{options.say('num_gpus')} with a multiple of {len(tasks)}, or use one node"
            + ("" if launched else ": srun --nodes=1 --ntasks=1"),
        )
    return {node: range(ranks) for node in tasks}


def select_slots(slots: Slots, include: str | None, exclude: str | None) -> Slots:
    """Return the slots that DeepSpeed's ``--include`` or ``--exclude`` leaves, hosts in their order.

    The syntax is that of launcher/runner.py: ``host@host:0,2``; a host without slots means all of its slots.
    Raises UsageError for other syntax, an unknown host or slot, and if no slot is left.
    """
    if include is not None and exclude is not None:
        raise UsageError("include and exclude together", remedy="give one of them, as DeepSpeed takes one")
    text = exclude if include is None else include
    if text is None:
        return slots
    said = f"{'exclude' if include is None else 'include'} {text!r}"
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in slots:
            raise UsageError(f"{said}: no host {host!r} in the hostfile", remedy=f"one of {format_names(slots)}")
        words = numbers.split(",") if colon else []
        if not all(re.fullmatch("[0-9]{1,4}", word) for word in words):
            raise UsageError(f"{said}: {part!r} is not a host with slots", remedy="write: HOST@HOST:SLOT,SLOT")
        for slot in map(int, words):
            if slot not in slots[host]:
                last = len(slots[host]) - 1
                remedy = f"{host} has slots 0 to {last}" if last else f"{host} has only slot 0"
                raise UsageError(f"{said}: no slot {slot} on {host}", remedy=remedy)
        named.setdefault(host, set()).update(map(int, words))
    kept = {}
    for host, all_slots in slots.items():
        # An empty set is a host without slots, which means all of them.
        chosen = (named[host] or set(all_slots)) if host in named else set()
        if left := [slot for slot in all_slots if (slot in chosen) == (include is not None)]:
            kept[host] = left
    if not kept:
        raise UsageError(f"{said} leaves no slot", remedy="leave one host or slot")
    return kept


def _host_command(options: Options, hosts: Slots) -> str | None:
    """Return the command that reaches a host. Raises UsageError for one that does not name the host."""
    name = options.say("host_command")
    if (command := options.host_command) is not None:
        try:
            names_host = any("{host}" in word for word in shlex.split(command)[1:])
        except ValueError as error:
            raise UsageError(f"{name} {command!r}: {error}", remedy="close the quotation mark") from None
        if not names_host or not command.isprintable():
            problem = f"{name} {command!r} does not say where the host's name goes"
            raise UsageError(problem, remedy="write {host} for it, as in 'ssh -p 2222 {host}'")
    if job.ranks_of_hosts():
        if command is not None:
            problem = f"{name}, but a launcher has started a process on every node"
            raise UsageError(problem, remedy="leave it out")
        return None
    return (command or (SRUN if options.hostfile is None else SSH)) if hosts else None


def _forwarded_variables(options: Options) -> tuple[str, ...]:
    """Return the names of ``--env``. Raises UsageError for a possible credential, because the value would be stored."""
    names = []
    for text in options.env:
        name, _, value = text.partition("=")
        if not _VARIABLE.fullmatch(name) or not value.isprintable():
            raise UsageError(f"{options.say('env')} {name[:80]!r} is not a variable", remedy="write NAME or NAME=VALUE")
        if value and redaction.looks_secret(name, value):
            problem = f"{options.say('env')} {name}=… looks like a credential, which results would hold"
            raise UsageError(problem, remedy=f"export {name} and give only its name")
        names.append(name)
    return tuple(dict.fromkeys(names))
