"""The hosts of a comparison, from a hostfile or as ``system.job`` found them: their slots and how they are reached."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UsageError
from ..system import files, job, redaction
from ..units import format_items, format_names
from .options import SEVERAL_NODES, Options

SSH = "ssh {host}"
SRUN = "srun --nodes=1 --ntasks=1 --overlap --nodelist={host} --cpu-bind=none --mpi=none --quiet"
"""Runs a program on a node alongside the steps of this job (srun(1)): ``--overlap`` does not wait for their resources,
``--cpu-bind=none`` allows all cores of the job, and ``--mpi=none`` avoids an MPI task."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
_SLOTS = re.compile(r"[1-9][0-9]{0,3}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_HOSTFILE_BYTES = 2**20

Slots = Mapping[str, Sequence[int]]
"""Host → numbers of its slots, counted from 0."""


def read_hostfile(path: Path) -> dict[str, int]:
    """Read a hostfile as DeepSpeed does (launcher/runner.py): host → slots. Raises UsageError naming the line.

    A name must not begin with a dash: ssh would take it for an option, which might run a command.
    """
    try:
        lines = files.read_bytes(path, _MAX_HOSTFILE_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise UsageError(f"hostfile {path}: {error.strerror}", remedy="give a readable file") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # DeepSpeed ignores what follows the slots, such as Open MPI's max_slots.
        name, (key, _, slots) = words[0], (words[1] if len(words) > 1 else "").partition("=")
        if not _HOST.fullmatch(name) or key != "slots" or not _SLOTS.fullmatch(slots) or name in hosts:
            raise UsageError(
                f"hostfile {path}, line {number}: {line.strip()[:80]!r}",
                remedy="write one line per host: NAME slots=N, with N from 1 to 9999 and a name of letters, digits, "
                "dots, dashes and underscores",
            )
        hosts[name] = int(slots)
    if not hosts:
        raise UsageError(f"hostfile {path} names no host", remedy="write: host slots=N")
    return hosts


def used_slots(options: Options, environ: Mapping[str, str], visible: int | None) -> Slots:
    """Return the slots used on each host, in the order of the hostfile or the job; empty without either.

    ``visible``: GPUs of this host; None on a CPU. Raises UsageError if the ranks do not divide equally among a job's
    nodes.
    """
    if options.hostfile is not None:
        slots = {name: range(number) for name, number in read_hostfile(options.hostfile).items()}
        return select_slots(slots, options.include, options.exclude)
    # Only a job of Slurm, torchrun or DeepSpeed's launcher has nodes.
    launched = job.ranks_of_hosts()
    nodes = launched or job.tasks_of_nodes(environ)
    requested = options.num_gpus or world_size(environ)
    if nodes and requested != sum(nodes.values()) and (requested, visible) != (None, None):
        # Divide the requested ranks among the nodes, or give each node as many as there are GPUs visible here.
        ranks, left = divmod(requested or len(nodes) * (visible or 1), len(nodes))
        if left or not ranks:
            raise UsageError(
                f"{format_items(requested or 0, 'rank')} cannot be divided equally among the {len(nodes)} nodes of "
                f"this {'' if launched else 'Slurm '}job",
                remedy=f"give {options.spelling_of('num_gpus')} a multiple of {len(nodes)}, or use one node"
                + ("" if launched else ": srun --nodes=1 --ntasks=1"),
            )
        nodes = dict.fromkeys(nodes, ranks)
    for name in SEVERAL_NODES:
        of_jobs = name == "env" or (nodes and name in ("host_command", "master_addr", "master_port"))
        if getattr(options, name) is not None and not of_jobs:
            hostfile = options.spelling_of("hostfile")
            problem = f"{options.spelling_of(name)} without {hostfile}"
            raise UsageError(problem, remedy=f"add {hostfile} FILE, or leave {options.spelling_of(name)} out")
    return {node: range(count) for node, count in nodes.items()}


def world_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks of the launcher that started this program; None without a launcher."""
    text = environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def select_slots(slots: Slots, include: str | None, exclude: str | None) -> Slots:
    """Return the slots that DeepSpeed's ``--include`` or ``--exclude`` leaves, in the order of the hosts.

    DeepSpeed's syntax (launcher/runner.py): ``host@host:0,2``; a host without slots means all of its slots. Raises
    UsageError for any other syntax, for an unknown host or slot, and if no slot is left.
    """
    if include is not None and exclude is not None:
        raise UsageError(
            "include and exclude cannot be combined", remedy="give only one of them; DeepSpeed accepts only one"
        )
    text = exclude if include is None else include
    if text is None:
        return slots
    said = f"{'exclude' if include is None else 'include'} {text!r}"
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in slots:
            raise UsageError(f"{said}: no host {host!r} in the hostfile", remedy=f"choose from {format_names(slots)}")
        words = numbers.split(",") if colon else []
        if not all(re.fullmatch("[0-9]{1,4}", word) for word in words):
            raise UsageError(f"{said}: {part!r} is not a host with slots", remedy="write: HOST@HOST:SLOT,SLOT")
        for slot in map(int, words):
            if slot not in slots[host]:
                last = len(slots[host]) - 1
                remedy = f"its slots are 0 to {last}" if last else "its only slot is 0"
                raise UsageError(f"{said}: no slot {slot} on {host}", remedy=remedy)
        named.setdefault(host, set()).update(map(int, words))
    kept = {}
    for host, all_slots in slots.items():
        # An empty set: the host is named without slots, which means all of them.
        chosen = (named[host] or set(all_slots)) if host in named else set()
        if left := [slot for slot in all_slots if (slot in chosen) == (include is not None)]:
            kept[host] = left
    if not kept:
        raise UsageError(f"{said} leaves no slot", remedy="keep at least one slot")
    return kept


def host_command(options: Options, hosts: Slots) -> str | None:
    """Return the command that reaches a host. Raises UsageError for one that does not name the host."""
    name = options.spelling_of("host_command")
    if (command := options.host_command) is not None:
        try:
            names_host = any("{host}" in word for word in shlex.split(command)[1:])
        except ValueError as error:
            raise UsageError(f"{name} {command!r}: {error}", remedy="close the quotation mark") from None
        if not command.isprintable():
            raise UsageError(f"{name} {command!r} has a control character", remedy="write spaces between its words")
        if not names_host:
            problem = f"{name} {command!r} does not say where the host's name goes"
            raise UsageError(problem, remedy="write {host} for it, as in 'ssh -p 2222 {host}'")
    if job.ranks_of_hosts():
        if command is not None:
            problem = f"{name} has no effect: a launcher has already started a process on every node"
            raise UsageError(problem, remedy="leave it out")
        return None
    return (command or (SRUN if options.hostfile is None else SSH)) if hosts else None


def master_address(options: Options) -> str | None:
    """Return ``--master-addr``. Raises UsageError if it is neither a name nor an IP address."""
    address = options.master_addr
    if address is not None and not (_HOST.fullmatch(address) or _IPV6.fullmatch(address)):
        raise UsageError(
            f"{options.spelling_of('master_addr')} {address!r} is not a host or address",
            remedy="give a name or an IP address",
        )
    return address


def forwarded_names(options: Options, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables of ``--env``. Raises UsageError for one that has no value, and for a likely
    credential, because its value would be stored."""
    names, flag = [], options.spelling_of("env")
    for text in options.env:
        name, has_value, value = text.partition("=")
        if not value.isprintable():
            raise UsageError(f"{flag} {name[:80]}: its value has a control character", remedy="write it on one line")
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"{flag} {name[:80]!r} is not a variable", remedy="write NAME or NAME=VALUE")
        if value and redaction.looks_secret(name, value):
            problem = f"{flag} {name}=… looks like a credential, which the results would store"
            raise UsageError(problem, remedy=f"export {name} and give only its name")
        if not has_value and name not in environ:
            problem = f"{flag} {name}: this variable is not set"
            raise UsageError(problem, remedy=f"export {name}, or give {name}=VALUE")
        names.append(name)
    return tuple(dict.fromkeys(names))
