"""Checks the hosts of a multi-host job: each can be reached, has what the others have, and is ready for the plan.

Each host is checked by its agent (``launch.host_connections``), which starts :mod:`.checks` there.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter

from ..config.spec import Configuration, Placement
from ..config.training_script import Script
from ..errors import PreflightError
from ..launch.host_connections import HostConnection, HostError, Hosts, agent_words, command_on_host
from ..launch.ops import OpState
from ..system import job
from ..system.environment import LIBRARIES, Environment, Facts
from ..units import format_bytes, format_names
from .findings import Finding, find_program, ok, warning

_CHECK_SECONDS = 120.0
_BUILD_SECONDS = 7200.0
"""For several ops; each may take half an hour."""

_MUST_AGREE: Facts = (
    ("Python", attrgetter("python_version")),
    *LIBRARIES,
    ("NCCL", lambda each: " ".join(version for name, version in each.packages.items() if "nccl" in name)),
)
"""Versions that all ranks of a job must share."""
_SHOULD_AGREE: Facts = (
    ("CPU", attrgetter("cpu_model")),
    ("cores", attrgetter("logical_cores")),
    ("host memory", lambda environment: format_bytes(environment.host_memory_bytes)),
    ("GPU driver", attrgetter("gpu_driver_version")),
)
"""Facts that can make one host slower than the others, which then wait for it."""


@contextmanager
def connected_hosts(placement: Placement, python: str | None = None) -> Iterator[Hosts]:
    """Stay connected to all hosts of a placement until the context ends.

    ``python``: the interpreter of a user's script, at the same path on every host; None for this program's. Raises
    PreflightError for a host that cannot be reached or used, in one line with the reason.
    """
    template = placement.host_command
    if template is not None and find_program(program := shlex.split(template)[0]) is None:
        raise PreflightError(
            f"the hosts cannot be reached: {program} is not installed on this host",
            remedy="put it on PATH, or give another command with --host-command",
        )

    def start_agent(host: str) -> list[str]:
        # Hostfile slots number all GPUs of a host; DeepSpeed sets CUDA_VISIBLE_DEVICES to them (launcher/launch.py).
        words = agent_words(every_gpu=placement.hostfile is not None)
        return words if template is None else command_on_host(template, host, words)

    connected = job.accept_nodes() if template is None else {}
    with Hosts([name for name, _ in placement.hosts], start_agent, connected=connected, python=python) as hosts:
        if problems := hosts.connect():
            how = "see what the launcher's processes have printed there"
            if template is not None:
                command = template.replace("{host}", problems[0].name)
                how = f"make `{command} true` work without a prompt, with Python and ds_bench at the same paths there"
            raise PreflightError(
                f"cannot use {format_names(problems, 5, '; ')}",
                remedy=f"{how}, or {_way_to_leave_out('the host', placement)}",
            )
        yield hosts


def _way_to_leave_out(what: str, placement: Placement) -> str:
    """``leave WHAT out with …``, for a remedy."""
    if placement.hostfile is not None:
        return f"leave {what} out with --exclude"
    if placement.host_command is not None:
        return f"leave {what} out with sbatch --exclude"
    return f"leave {what} out of the command that started these processes"


@contextmanager
def naming_lost_host() -> Iterator[None]:
    """Raise PreflightError for a host that is lost within this context."""
    try:
        yield
    except HostError as error:
        raise PreflightError(f"cannot use {error}", remedy="see what is wrong there, or run without it") from None


def environment_with_hosts(hosts: Hosts, placement: Placement, local: Environment) -> Environment:
    """Return the environment of this host, with the environments of all hosts in the order of their ranks.

    Raises PreflightError, in one line, if versions or GPUs differ, a host lacks a slot's GPU, or two names mean one
    machine.
    """
    with naming_lost_host():
        environments: dict[str, Environment] = hosts.request_all("environment", kind=Environment, python=hosts.python)
    names: dict[str, str] = {}
    for name, environment in environments.items():
        if (other := names.setdefault(environment.hostname, name)) != name:
            raise PreflightError(
                f"{other} and {name} both call themselves {environment.hostname}: they are one machine, or look "
                "like one",
                remedy="list each machine only once, and give each its own host name",
            )
    known = dict(environments)
    if local.hostname not in {each.hostname for each in environments.values()}:
        known["this host"] = local
    differences = _differences(_MUST_AGREE, known)
    if placement.accelerator == "cuda":
        for name, ranks in placement.hosts:
            slots, count = placement.slots_of(name), len(environments[name].gpus)
            # Slots number all GPUs of the host: the highest must exist.
            if count <= max(slots):
                chosen = "" if placement.include is None else f" in slots {', '.join(map(str, slots))}"
                differences.append(f"{name} has {count} GPUs for {ranks} ranks{chosen}")
        kinds: Facts = (
            ("GPU", lambda each: " and ".join(sorted({gpu.name or "unnamed" for gpu in each.gpus})) or None),
        )
        differences += _differences(kinds, environments)
    if differences:
        raise PreflightError(
            f"the hosts differ: {'; '.join(differences)}",
            remedy=f"give every host the same versions and GPUs, or {_way_to_leave_out('hosts', placement)}",
        )
    return replace(local, hosts=tuple(environments.values()))


def require_script(hosts: Hosts, script: Script) -> None:
    """Raise PreflightError if a host lacks the script's file, or has a different one at its path."""
    if script.file is None:  # a module, found by each interpreter
        return
    path = script.file.absolute()
    with naming_lost_host():
        digests = hosts.request_all("file_digest", kind=str | None, path=str(path))
    if others := [name for name, digest in digests.items() if digest != script.digest]:
        problem = f"{path} is missing or different on {format_names(others, 5)}"
        raise PreflightError(problem, remedy="copy the script to this path on every host")


def _differences(facts: Facts, environments: Mapping[str, Environment]) -> list[str]:
    """``torch 2.13.0 on a, c, 2.11.0 on b`` for each fact that is not the same on all hosts."""
    texts = []
    for label, read in facts:
        hosts_of: dict[object, list[str]] = {}
        for name, environment in environments.items():
            hosts_of.setdefault(read(environment), []).append(name)
        if len(hosts_of) > 1:
            values = (f"{value or 'none'} on {format_names(names, 5)}" for value, names in hosts_of.items())
            texts.append(f"{label} {', '.join(values)}")
    return texts


def require_connections(hosts: Hosts, placement: Placement) -> None:
    """Raise PreflightError if a firewall or a wrong address keeps ranks from meeting, instead of waiting forever.

    Every host connects to the first at the ranks' meeting point, and to every other host: ranks also exchange data
    directly.
    """
    first, *others = hosts.connections
    if not others:
        return
    with naming_lost_host():
        address, port = hosts.master_of(placement)
        # The address of each host on the network that leads to the first.
        addresses = [each.request("address", kind=str, towards=address) for each in others]
        _try_connections(first, others, address, port)
        for other, own in zip(others, addresses, strict=True):
            # On any free port: the ranks choose their own.
            _try_connections(other, [each for each in hosts.connections if each is not other], own, 0)


def _try_connections(listener: HostConnection, others: Sequence[HostConnection], address: str, port: int) -> None:
    try:
        port = listener.request("listen", kind=int, address=address, port=port)
    except HostError as error:
        raise PreflightError(
            f"{listener.name} cannot listen on {address}{f' port {port}' if port else ''}: {error.reason}",
            remedy="give --master-addr an address of the first host that others can reach, or another --master-port",
        ) from None
    try:
        # All requests are sent before any is awaited, so that a firewall that drops packets costs five seconds once.
        futures = [each.send_request("connect", address=address, port=port, timeout_seconds=5.0) for each in others]
        for each, future in zip(others, futures, strict=True):
            try:
                each.result_of(future, _CHECK_SECONDS)
            except HostError as error:
                raise PreflightError(
                    f"{each.name} cannot connect to {listener.name} at {address} port {port}: {error.reason}",
                    remedy="open all TCP ports between the hosts, or choose their network with --master-addr",
                ) from None
    finally:
        listener.request("stop_listening")


def check_all(
    placement: Placement, configurations: Sequence[Configuration], local: Environment, python: str | None
) -> Iterator[Finding]:
    """Run every check of the hosts of a hostfile, for the doctor. Raises PreflightError if they cannot be used."""
    with connected_hosts(placement, python) as hosts:
        environment = environment_with_hosts(hosts, placement, local)
        yield ok("hosts", f"{format_names(hosts.names, 5)}: reached, same versions")
        yield from check_hosts(hosts, placement, configurations, environment)
        require_connections(hosts, placement)
        yield ok("network", "ranks can connect to each other")


def check_hosts(
    hosts: Hosts,
    placement: Placement,
    configurations: Sequence[Configuration],
    environment: Environment,
    need_host_bytes: int | None = None,
) -> list[Finding]:
    """Return the findings of the checks on every host; equal findings of several hosts become one.

    ``environment``: with ``hosts`` filled in. ``need_host_bytes``: predicted for the host with the most ranks.
    """
    environments = dict(zip(hosts.names, environment.hosts, strict=True))
    unlike = _differences(_SHOULD_AGREE, environments)
    findings: dict[Finding, list[str]] = {}
    with naming_lost_host():
        answers = hosts.request_all(
            "doctor",
            [
                {
                    # Each host checks itself as a single machine with only its own ranks.
                    "placement": replace(placement, num_gpus=ranks, hosts=(), hostfile=None),
                    "slots": placement.slots_of(name),
                    "need_host_bytes": need_host_bytes and need_host_bytes * ranks // placement.ranks_per_node,
                }
                for name, ranks in placement.hosts
            ],
            timeout_seconds=_CHECK_SECONDS,
            kind=list[Finding],
            configurations=configurations,
            python=hosts.python,
        )
    for name, own in answers.items():
        for finding in own:
            findings.setdefault(finding, []).append(name)
    found = [replace(finding, name=f"{format_names(names, 5)}: {finding.name}") for finding, names in findings.items()]
    if unlike:
        text = f"{'; '.join(unlike)}: all wait for the slowest"
        remedy = f"compare on hosts of one kind, or {_way_to_leave_out('hosts', placement)}"
        found.append(warning("hosts", text, remedy))
    return found


def build_ops(
    hosts: Hosts, placement: Placement, configurations: Sequence[Configuration], say: Callable[[str], None]
) -> dict[str, OpState]:
    """Build every op that these configurations need, on every host. An op is ready if it is ready on all of them."""
    with naming_lost_host():
        states_of = hosts.request_all(
            "build_ops",
            timeout_seconds=_BUILD_SECONDS,
            say=say,
            kind=dict[str, OpState],
            placement=placement,
            configurations=configurations,
            python=hosts.python,
        )
    merged: dict[str, OpState] = {}
    for name, states in states_of.items():
        for op, state in states.items():
            if not state.ready:
                state = replace(state, reason=f"on {name}: {state.reason}")
            before = merged.get(op, state)
            # If several hosts lack the op, the first one's reason stays.
            merged[op] = before if not before.ready or state.ready else state
    return merged
