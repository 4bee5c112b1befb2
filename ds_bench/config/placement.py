"""Determines the placement of a comparison without torch: accelerator, number of ranks, number formats."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from ..errors import UsageError
from ..system import environment, files, gpus, job, launched_nodes, redaction
from ..units import format_names
from .options import SEVERAL_NODES, Options
from .spec import Accelerator, Placement, Precision, gpu_precisions

SSH = "ssh {host}"
SRUN = "srun --nodes=1 --ntasks=1 --overlap --nodelist={host} --cpu-bind=none --mpi=none --quiet"
"""Runs a program on a node beside the steps of this job: ``--overlap`` does not wait for what they hold,
``--cpu-bind=none`` leaves all cores of the job to it, ``--mpi=none`` makes it no MPI task (srun(1))."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
_SLOTS = re.compile(r"[1-9][0-9]{0,3}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_HOSTFILE_BYTES = 2**20


def resolve_placement(options: Options, environ: Mapping[str, str], inventory: gpus.GpuInventory) -> Placement:
    """Returns the placement that the flags ask for on this machine. Raises UsageError if the machine lacks it."""
    if options.accelerator != "cpu" and (rocm := environment.torch_rocm_version()) is not None:
        raise UsageError(
            f"the installed torch is for ROCm {rocm}, which is not supported",
            remedy=f"install torch for CUDA and run on NVIDIA GPUs, or {options.say('accelerator')} cpu",
        )
    visible = gpus.select_visible(environ, inventory.gpus)
    accelerator = _accelerator(options.accelerator, len(visible))
    if accelerator == "cuda" and environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        raise UsageError("CUDA_VISIBLE_DEVICES names a MIG instance", remedy="give whole GPUs; MIG is not supported")
    if accelerator == "cpu" and options.gpu_memory_limit is not None:
        problem = f"{options.say('gpu_memory_limit')}, but no GPU is used"
        raise UsageError(problem, remedy=f"use {options.say('cpu_memory_limit')} on a CPU")
    hosts = _used_slots(options, environ, len(visible) if accelerator == "cuda" else None)
    return Placement(
        accelerator=accelerator,
        num_gpus=_ranks(options, environ, accelerator, len(visible), hosts),
        # The warm launcher forks ranks on this machine alone.
        launcher="deepspeed" if options.launcher == "deepspeed" or hosts else "warm",
        hostfile=None if options.hostfile is None else str(options.hostfile.resolve()),
        nvme_path=None if options.nvme_path is None else str(options.nvme_path.resolve()),
        cpu_memory_limit_bytes=options.cpu_memory_limit_bytes,
        gpu_memory_limit_bytes=options.gpu_memory_limit_bytes,
        supported_precisions=_precisions(accelerator, visible),
        compute_capability=_oldest_capability(accelerator, visible),
        hosts=tuple((name, len(slots)) for name, slots in hosts.items()),
        include=_include_text(options, hosts),
        host_command=_host_command(options, hosts),
        forwarded_variables=_forwarded_variables(options),
        master_addr=_master_address(options) or launched_nodes.master_address(),
        master_port=options.master_port,
    )


def default_placement(environ: Mapping[str, str], inventory: gpus.GpuInventory) -> Placement:
    """Returns the placement of this machine without any flag: every visible GPU, or one CPU rank."""
    visible = gpus.select_visible(environ, inventory.gpus)
    accelerator = _accelerator("auto", len(visible))
    return Placement(
        accelerator=accelerator,
        num_gpus=len(visible) if accelerator == "cuda" else 1,
        supported_precisions=_precisions(accelerator, visible),
        compute_capability=_oldest_capability(accelerator, visible),
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


def _ranks(options: Options, environ: Mapping[str, str], accelerator: Accelerator, visible: int, hosts: Slots) -> int:
    flag = options.say("num_gpus")
    if hosts:
        slots = sum(map(len, hosts.values()))
        if options.num_gpus not in (None, slots):
            selected = "the hostfile has" if not (options.include or options.exclude) else "the hosts selected have"
            raise UsageError(
                f"{flag} {options.num_gpus}, but {selected} {slots} slots",
                remedy=f"leave {flag} out; {options.say('include')} selects slots",
            )
        return slots
    requested = options.num_gpus or _world_size(environ)
    if accelerator == "cpu":
        return requested or 1
    if options.num_gpus is None and requested is not None and requested > visible:
        raise UsageError(
            f"{requested} processes were started for this comparison, but {visible} are visible to the first",
            remedy="let the first see every GPU (Slurm: srun --gpus-per-node=N --gpu-bind=none), or give "
            f"{flag} {visible}",
        )
    if requested is not None and requested > visible:
        raise UsageError(f"{flag} {requested}, but {visible} are visible", remedy=f"give {visible} or less")
    return requested or visible


def _world_size(environ: Mapping[str, str]) -> int | None:
    """How many ranks a launcher that started this program has started it for; None without one."""
    text = environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _precisions(accelerator: Accelerator, visible: tuple[gpus.GpuFacts, ...]) -> tuple[Precision, ...]:
    if accelerator == "cpu":
        return ("bf16", "fp16", "fp32") if _cpu_has_fp16() else ("bf16", "fp32")
    return gpu_precisions(_oldest_capability(accelerator, visible))


def _oldest_capability(accelerator: Accelerator, visible: tuple[gpus.GpuFacts, ...]) -> tuple[int, int] | None:
    known = [gpu.compute_capability for gpu in visible if gpu.compute_capability is not None]
    return min(known, default=None) if accelerator == "cuda" else None


def _cpu_has_fp16() -> bool:
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    # The instructions that oneDNN needs for it, by which DeepSpeed decides
    # (accelerator/cpu_accelerator.py, is_fp16_supported), read here without torch.
    return "avx512_fp16" in words or "amx_fp16" in words


def choose_precision(requested: Precision | Literal["auto"], placement: Placement) -> Precision:
    """Returns the requested number format; for ``auto`` the first of bf16, fp16, fp32 that the device trains in.

    One that the device does not train in is returned too: every row then is Unsupported, with the remedy.
    """
    return placement.supported_precisions[0] if requested == "auto" else requested


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


# ------------------------------------------------------------------ the slots of a hostfile that are used

Slots = Mapping[str, Sequence[int]]
"""Host → numbers of its slots, counted from 0."""


def _used_slots(options: Options, environ: Mapping[str, str], visible: int | None) -> Slots:
    """The slots that are used of each host, in the order of the hostfile or of the job; empty without both."""
    if options.hostfile is None:
        nodes = _slots_of_job(options, environ, visible)
        for name in SEVERAL_NODES:
            of_jobs = name == "env" or (nodes and name in ("host_command", "master_addr", "master_port"))
            if getattr(options, name) is not None and not of_jobs:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} without --hostfile", remedy="add --hostfile FILE, or leave it out")
        return nodes
    slots = {name: range(number) for name, number in read_hostfile(options.hostfile).items()}
    return select_slots(slots, options.include, options.exclude)


def _slots_of_job(options: Options, environ: Mapping[str, str], visible: int | None) -> Slots:
    """The slots of the nodes of a job of several, of Slurm or of torchrun or DeepSpeed's launcher; empty elsewhere.

    Ranks are as many as asked for, else one on every GPU that is visible here (``visible``; None on a CPU: one for each
    task of Slurm). Raises UsageError for a number that leaves nodes with unequal numbers of ranks.
    """
    launched = launched_nodes.ranks_of_hosts()
    tasks = launched or job.tasks_of_nodes(environ)
    requested = options.num_gpus or _world_size(environ)
    if not tasks or requested == sum(tasks.values()) or (requested is None and visible is None):
        return {node: range(count) for node, count in tasks.items()}
    ranks, left = divmod(requested or len(tasks) * (visible or 1), len(tasks))
    if left or not ranks:
        raise UsageError(
            f"{requested} ranks cannot be shared out equally among the {len(tasks)} nodes of this "
            f"{'' if launched else 'Slurm '}job",
            remedy=f"--num-gpus with a multiple of {len(tasks)}, or use one node"
            + ("" if launched else ": srun --nodes=1 --ntasks=1"),
        )
    return {node: range(ranks) for node in tasks}


def select_slots(slots: Slots, include: str | None, exclude: str | None) -> Slots:
    """The slots that DeepSpeed's ``--include`` or ``--exclude`` leaves, hosts in their order.

    The syntax is that of launcher/runner.py: ``host@host:0,2``, a host without slots stands for all of its slots.
    Raises UsageError for a text of another form, a host or slot that there is not, and for no slot left.
    """
    if include is not None and exclude is not None:
        raise UsageError("--include and --exclude together", remedy="give one of them, as DeepSpeed takes one")
    if include is None and exclude is None:
        return slots
    flag, text = ("--include", include) if include is not None else ("--exclude", exclude)
    named = _named_slots(f"{flag} {text!r}", str(text), slots)
    kept = {
        host: [slot for slot in numbers if (slot in named.get(host, ())) == (include is not None)]
        for host, numbers in slots.items()
    }
    if not (kept := {host: numbers for host, numbers in kept.items() if numbers}):
        raise UsageError(f"{flag} {text!r} leaves no slot", remedy="leave one host or slot")
    return kept


def _named_slots(flag: str, text: str, slots: Slots) -> dict[str, set[int]]:
    """Host → its slots that a text names; a host that is named with slots and without means these slots."""
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in slots:
            raise UsageError(f"{flag}: no host {host!r} in the hostfile", remedy=f"one of {format_names(slots)}")
        words = numbers.split(",") if colon else []
        if not all(re.fullmatch("[0-9]{1,4}", word) for word in words):
            raise UsageError(f"{flag}: {part!r} is no host with slots", remedy="write: HOST@HOST:SLOT,SLOT")
        for slot in map(int, words):
            if slot not in slots[host]:
                last = len(slots[host]) - 1
                remedy = f"{host} has slots 0 to {last}" if last else f"{host} has slot 0 alone"
                raise UsageError(f"{flag}: no slot {slot} on {host}", remedy=remedy)
        named.setdefault(host, set()).update(map(int, words))
    return {host: numbers or set(slots[host]) for host, numbers in named.items()}


def _include_text(options: Options, hosts: Slots) -> str | None:
    """The selected slots as DeepSpeed's ``--include``; None if it is every slot of the hostfile."""
    if options.include is None and options.exclude is None:
        return None
    return "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in hosts.items())


def _host_command(options: Options, hosts: Slots) -> str | None:
    """The command that reaches a host. Raises UsageError for one that does not name the host."""
    if (command := options.host_command) is not None:
        try:
            names_host = any("{host}" in word for word in shlex.split(command)[1:])
        except ValueError as error:
            raise UsageError(f"--host-command {command!r}: {error}", remedy="close the quotation mark") from None
        if not names_host or not command.isprintable():
            raise UsageError(
                f"--host-command {command!r} does not say where the host's name goes",
                remedy="write {host} for it, as in 'ssh -p 2222 {host}'",
            )
    if launched_nodes.ranks_of_hosts():
        if command is not None:
            raise UsageError(
                "--host-command, but a launcher has started a process on every node", remedy="leave it out"
            )
        return None
    return (command or (SRUN if options.hostfile is None else SSH)) if hosts else None


def _forwarded_variables(options: Options) -> tuple[str, ...]:
    """The names of ``--env``. Raises UsageError for a value that may be a credential, as it would be stored."""
    for text in options.env:
        name, _, value = text.partition("=")
        if not _VARIABLE.fullmatch(name) or not value.isprintable():
            raise UsageError(f"--env {name[:80]!r} is no variable", remedy="write NAME or NAME=VALUE")
        if value and redaction.looks_secret(name, value):
            problem = f"--env {name}=… looks like a credential, which results would hold"
            raise UsageError(problem, remedy=f"export {name} and give --env {name}")
    return tuple(dict.fromkeys(text.partition("=")[0] for text in options.env))


def _master_address(options: Options) -> str | None:
    address = options.master_addr
    if address is not None and not (_HOST.fullmatch(address) or _IPV6.fullmatch(address)):
        raise UsageError(f"--master-addr {address!r} is no host or address", remedy="give a name or an IP address")
    return address
