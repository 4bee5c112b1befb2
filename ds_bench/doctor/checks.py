"""Runs the checks of this machine in order: all of them, or those that a plan needs before its first trial.

The other modules of this package hold the checks, one module per subject; ``cli/doctor.py`` prints them. Other hosts
are checked only with ``hostfile`` (:mod:`.cluster`): their agents start ``python -m ds_bench.doctor.checks``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from ..config import validation
from ..config.automatic_values import TrainingFacts
from ..config.caveat_texts import as_caveat
from ..config.configuration_file_rows import FileRowMaker
from ..config.configuration_files import ConfigurationFile
from ..config.hosts import SSH, read_hostfile
from ..config.placement import default_placement
from ..config.spec import Configuration, Placement
from ..errors import PreflightError
from ..launch import ops, rank_environment
from ..records import json_files
from ..system import environment, invocation, terminal
from ..system.environment import read_interpreter
from . import cluster, disk, host, software
from .findings import Finding, Groups, SystemAccess, format_count, format_finding, ok, problem, run_check, warning

_ANY_HIDDEN_SIZE = 1024
"""Stands in for the model's, which the doctor does not know; only bucket sizes depend on it."""


def run_all_checks(
    system: SystemAccess,
    *,
    nvme_path: Path | None = None,
    build: bool = False,
    files: Sequence[ConfigurationFile] = (),
    file_lines: Sequence[str] = (),
    hostfile: Path | None = None,
    interpreter: environment.Interpreter | None = None,
) -> Groups:
    """Return the findings of every check. Never raises because of the machine's state.

    ``build``: build missing ops first. ``files``: configurations to check; ``file_lines``: notes from reading them.
    ``hostfile``: lists further hosts to check. ``interpreter``: a user script's, checked instead of this one.
    Raises UsageError for a bad hostfile.
    """
    torch_cuda = environment.cuda_version_of(interpreter)
    inventory = system.read_gpus()
    placement = default_placement(system.environ, inventory, interpreter)
    placement = dataclasses.replace(placement, nvme_path=None if nvme_path is None else str(nvme_path))
    slots = {} if hostfile is None else read_hostfile(hostfile)
    facts = TrainingFacts(
        num_gpus=placement.num_gpus, precision=placement.supported_precisions[0], hidden_size=_ANY_HIDDEN_SIZE
    )
    own = [FileRowMaker(facts=facts).make(file) for file in files]
    variables: dict[str, str] = {}
    python = None if interpreter is None else interpreter.python

    def check_ops() -> Iterator[Finding]:
        variables.update(
            rank_environment.rank_environment(placement, system.environ, inventory=inventory, interpreter=interpreter)
        )
        folder = Path(variables["TORCH_EXTENSIONS_DIR"])
        states = None
        if build:
            names = software.strategies_by_op(placement.accelerator, own)
            with terminal.StatusLine(sys.stderr) as line:
                states = ops.prepare_ops(names, folder, variables, say=line.say, show_elapsed=line.show, python=python)
        yield from software.check_ops(
            system,
            placement.accelerator,
            folder,
            check_nvme=nvme_path is not None,
            own=own,
            states=states,
            python=python,
        )

    groups = {
        "Packages": [
            *run_check("packages", lambda: software.check_packages_of(interpreter)),
            *run_check("GPU driver", lambda: software.check_driver(inventory.driver_version, torch_cuda)),
        ],
        "Tools": run_check("tools", lambda: software.check_programs(system, placement.accelerator, torch_cuda)),
        "GPUs": run_check("GPUs", lambda: host.check_gpus(system, inventory, torch_cuda)),
        "Host": run_check("host", lambda: host.check(system, placement)),
        # Before the disk, whose speed is measured with an op.
        "DeepSpeed ops": run_check("ops", check_ops),
    }
    if nvme_path is None:
        unchecked = "--nvme-path DIR checks a folder for NVMe offload and its speed"
        groups["NVMe"] = [ok("NVMe path", "needed only for NVMe offload", unchecked)]
    else:
        nvme = run_check("NVMe path", lambda: disk.check_nvme(system, nvme_path), failed_level="problem")
        folder = variables.get("TORCH_EXTENSIONS_DIR")  # missing if the check of the ops failed
        if all(finding.level != "problem" for finding in nvme):
            if folder is not None and ops.is_built(ops.ASYNC_IO, Path(folder)):
                nvme += run_check("NVMe speed", lambda: disk.check_speed(nvme_path, variables))
            else:
                text = "not measured: DeepSpeed's AsyncIO op is not built"
                nvme.append(warning("NVMe speed", text, software.build_command(python)))
        groups["NVMe"] = nvme
    # What the user named must be usable, so a check of it that fails is a problem, not a warning.
    if files:
        groups["Your configurations"] = run_check("files", lambda: _check_files(own, placement), failed_level="problem")
        groups["Your configurations"] += [warning("files", line) for line in file_lines]
    if hostfile is not None:
        several = dataclasses.replace(
            placement,
            num_gpus=sum(slots.values()),
            hosts=tuple(slots.items()),
            hostfile=str(hostfile.absolute()),
            host_command=SSH,
        )
        local = environment.read_environment(system.environ, inventory, interpreter=interpreter)
        groups["Hosts"] = run_check(
            "hosts", lambda: cluster.check_all(several, own, local, python), failed_level="problem"
        )
    return groups


def _check_files(configurations: Sequence[Configuration], placement: Placement) -> Iterator[Finding]:
    for configuration in configurations:
        if (reason := validation.unsupported_reason(configuration, placement)) is not None:
            yield problem(configuration.name, f"cannot run here: {reason}")
            continue
        loaded = ops.loaded_ops(placement.accelerator, [configuration])
        names = ", ".join(op.removesuffix("Builder") for op in loaded) or "none"
        yield ok(configuration.name, f"stage {configuration.stage}, can run here; DeepSpeed ops: {names}")
        for caveat in configuration.caveats:
            yield ok(configuration.name, as_caveat(caveat).text)


def run_plan_checks(
    placement: Placement,
    configurations: Sequence[Configuration],
    *,
    lacks_space: str | None = None,
    nvme_folder: disk.NvmeFolder | None = None,
    need_host_bytes: int | None = None,
    slots: Collection[int] | None = None,
    system: SystemAccess | None = None,
    interpreter: environment.Interpreter | None = None,
) -> list[Finding]:
    """Return what could stop these configurations on this machine. Takes 0.2 s: nothing is built or timed.

    ``configurations``: one for each row to be tried. A problem that stops only some rows is a warning: those rows
    become Unsupported, and the others run. ``need_host_bytes``: predicted for this node. ``lacks_space``:
    :func:`.disk.lack_of_space` of the plan. ``slots``: the visible GPUs that are used; None for all. ``interpreter``:
    a user script's.
    """
    system = SystemAccess() if system is None else system
    torch_cuda = environment.cuda_version_of(interpreter)
    inventory = system.read_gpus()
    findings = run_check("packages", lambda: software.check_packages_of(interpreter))
    if placement.accelerator == "cuda":
        findings += run_check("GPU driver", lambda: software.check_driver(inventory.driver_version, torch_cuda))
        findings += run_check("GPUs", lambda: host.check_gpus(system, inventory, torch_cuda, slots))
    elif not inventory.gpus and host.has_amd_gpu(system.root):
        text = f"{host.NO_ROCM}: this runs on the CPU"
        findings.append(warning("GPUs", text, "run where there is an NVIDIA GPU"))
    need_ops = [bool(ops.needed_ops(placement.accelerator, [row])) for row in configurations]
    if any(need_ops) or placement.accelerator == "cuda":
        tools = run_check("tools", lambda: software.check_programs(system, placement.accelerator, torch_cuda))
        # Without compilers the rows that need no op still run.
        findings += tools if need_ops and all(need_ops) else map(_as_warning, tools)
    findings += run_check("host", lambda: host.check(system, placement, need_host_bytes))
    path = placement.nvme_path
    if path is not None and any(row.uses_nvme for row in configurations):
        own = run_check("NVMe path", lambda: disk.check_nvme(system, Path(path), nvme_folder), failed_level="problem")
        # A full disk stops only the rows that swap to it, which the plan marks.
        findings += own if lacks_space is None else map(_as_warning, own)
    return findings


def _as_warning(finding: Finding) -> Finding:
    return dataclasses.replace(finding, level="warning") if finding.level == "problem" else finding


def require_ready(
    findings: Iterable[Finding], stream: IO[str], *, quiet: bool = False, hostfile: str | None = None
) -> None:
    """Print warnings and problems, or only problems if ``quiet``. Raises PreflightError if there is a problem.

    ``hostfile``: lists the hosts that were checked; None if only this machine was.
    """
    shown = [each for each in findings if each.level == "problem" or (each.level == "warning" and not quiet)]
    width = max((len(each.name) for each in shown), default=0)
    for finding in shown:
        terminal.print_text(format_finding(finding, width), stream)
    if any(finding.level == "problem" for finding in shown):
        what, words = ("this machine is", []) if hostfile is None else ("the hosts are", ["--hostfile", hostfile])
        remedy = f"run {invocation.command('doctor', *words)}"
        error = PreflightError(f"{what} not ready: {format_count(shown, 'problem')}", remedy=remedy)
        for finding in shown:
            error.add_note(format_finding(finding, width).strip())
        raise error


def main() -> None:
    """Check this host as one of several.

    Reads one JSON object from standard input: ``placement`` and ``configurations``; ``slots``, the numbers of the GPUs
    that have ranks; ``need_host_bytes``, the predicted memory of this host or null; ``python``, the interpreter of a
    user's script or null. Prints another with the ``findings``.
    """
    request = json.loads(sys.stdin.read())
    python = request.get("python")
    findings = run_plan_checks(
        json_files.build(Placement, request["placement"]),
        json_files.build(list[Configuration], request["configurations"]),
        need_host_bytes=request["need_host_bytes"],
        slots=request["slots"],
        interpreter=None if python is None else read_interpreter(python),
    )
    terminal.print_json(json.dumps({"findings": [dataclasses.asdict(each) for each in findings]}))


if __name__ == "__main__":
    main()
