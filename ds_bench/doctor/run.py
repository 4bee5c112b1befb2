"""Which checks of this machine run, and in which order: all of them, or those that a plan needs before its first trial.

The other modules of this package hold the checks, one module per subject; ``cli/doctor.py`` prints them. Only this
node is checked, even if a hostfile names others.

What ``nvme`` and ``launch.ops`` check is called, not repeated: the folder for NVMe offload with its space and file
system (``nvme.check_folder``), builds and stale locks (``ops.prepare_ops``, ``ops.stale_locks``).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..config import deepspeed_config, placement
from ..config.spec import Placement
from ..errors import PreflightError
from ..launch import ops, rank_environment
from ..system import environment, gpus, terminal
from . import compilers, host, hub, nvme, packages
from . import gpus as cards
from . import ops as compiled
from .findings import Finding, Groups, SystemAccess, attempt, count_of, format_finding, ok, warning


def gather(machine: SystemAccess, *, nvme_path: Path | None = None, build: bool = False) -> Groups:
    """Every check. Never raises for the state of the machine."""
    torch_cuda, inventory = environment.torch_cuda_version(), machine.query.read()
    place = placement.here(machine.environ, gpus.KnownGpus(inventory))
    groups = {
        "Packages": [
            *attempt("packages", packages.check),
            *attempt("GPU driver", lambda: packages.check_driver(inventory.driver_version, torch_cuda)),
        ],
        "Tools": attempt("tools", lambda: compilers.check(machine, place.accelerator, torch_cuda)),
        "GPUs": attempt("GPUs", lambda: cards.check(machine, inventory, torch_cuda)),
        "Host": attempt("host", lambda: host.check(machine, place)),
    }
    variables: dict[str, str] = {}
    groups["DeepSpeed ops"] = attempt("ops", lambda: _ops(machine, place, nvme_path is not None, build, variables))
    groups["NVMe"] = _nvme(machine, nvme_path, variables)
    groups["Hugging Face Hub"] = attempt("Hub", lambda: hub.check(machine))
    return groups


def _ops(
    machine: SystemAccess, place: Placement, nvme_asked: bool, build: bool, variables: dict[str, str]
) -> Iterator[Finding]:
    """Also fills in the ``variables`` that any process needs which uses the ops."""
    variables.update(rank_environment.rank_environment(place, machine.environ, None))
    folder = Path(variables["TORCH_EXTENSIONS_DIR"])
    yield from compiled.check_locks(machine, folder)
    states = None
    if build:
        names = list(compiled.users(place.accelerator))
        states = ops.prepare_ops(names, folder, variables, say=lambda text: terminal.print_text(text, sys.stderr))
    yield from compiled.check(
        machine,
        place.accelerator,
        folder,
        torch_cuda=environment.torch_cuda_version(),
        nvme_asked=nvme_asked,
        states=states,
    )


def _nvme(machine: SystemAccess, path: Path | None, variables: Mapping[str, str]) -> list[Finding]:
    if path is None:
        return [ok("NVMe path", "not looked at", "--nvme-path DIR checks a folder for NVMe offload and its speed")]
    found = attempt("NVMe path", lambda: nvme.check(machine, path), failed="problem")
    if any(finding.level == "problem" for finding in found):
        return found
    folder = variables.get("TORCH_EXTENSIONS_DIR")
    if folder is None or not ops.is_built(ops.ASYNC_IO, Path(folder)):
        return [*found, warning("NVMe speed", "not measured: DeepSpeed's AsyncIO op is not built", compiled.BUILD)]
    return [*found, *attempt("NVMe speed", lambda: nvme.check_speed(path, variables))]


def for_plan(
    place: Placement,
    configs: Sequence[Mapping[str, Any]],
    *,
    lacks_space: str | None = None,
    nvme_folder: nvme.NvmeFolder | None = None,
    need_host_bytes: int | None = None,
    machine: SystemAccess | None = None,
) -> list[Finding]:
    """What could stop these configurations here: the doctor's findings without builds, speed or the Hub; 0.2 s.

    ``configs``: DeepSpeed's, one per row, of the rows that will be tried. ``need_host_bytes``: predicted for this
    node. ``lacks_space``: ``nvme.lack_of_space`` of the plan. What only some rows need is a warning: those rows
    then say Unsupported, and the others run.
    """
    machine = SystemAccess() if machine is None else machine
    torch_cuda, inventory = environment.torch_cuda_version(), machine.query.read()
    found = attempt("packages", packages.check)
    if place.accelerator == "cuda":
        found += attempt("GPU driver", lambda: packages.check_driver(inventory.driver_version, torch_cuda))
        found += attempt("GPUs", lambda: cards.check(machine, inventory, torch_cuda))
    elif not inventory.gpus and cards.has_amd_gpu(machine.root):
        found.append(warning("GPUs", f"{cards.NO_ROCM}: this runs on the CPU", "run where there is an NVIDIA GPU"))
    needing = [bool(ops.needed_ops(place.accelerator, [config])) for config in configs]
    if any(needing) or place.accelerator == "cuda":
        built_with = attempt("tools", lambda: compilers.check(machine, place.accelerator, torch_cuda))
        found += built_with if needing and all(needing) else [_as_warning(finding) for finding in built_with]
    found += attempt("host", lambda: host.check(machine, place, need_host_bytes))
    path = place.nvme_path
    if path is not None and any(map(deepspeed_config.uses_nvme, configs)):
        looked = attempt("NVMe path", lambda: nvme.check(machine, Path(path), nvme_folder), failed="problem")
        # A full disk stops the rows that swap to it, which the plan marks so, and no other.
        found += looked if lacks_space is None else [_as_warning(finding) for finding in looked]
    return found


def _as_warning(finding: Finding) -> Finding:
    return dataclasses.replace(finding, level="warning") if finding.level == "problem" else finding


def require_ready(findings: Iterable[Finding], stream: IO[str], *, quiet: bool = False) -> None:
    """Prints warnings and problems, problems alone where ``quiet``. Raises PreflightError where there is a problem."""
    shown = [each for each in findings if each.level == "problem" or (each.level == "warning" and not quiet)]
    width = max((len(each.name) for each in shown), default=0)
    for finding in shown:
        terminal.print_text(format_finding(finding, width), stream)
    count = sum(finding.level == "problem" for finding in shown)
    if count:
        raise PreflightError(
            f"this machine is not ready: {count_of(count, 'problem')}", remedy="python -m ds_bench doctor tells more"
        )
