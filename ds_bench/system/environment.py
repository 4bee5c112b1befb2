"""Facts about host, GPUs, packages and interpreter, and which of them make results of two machines incomparable.

Every run stores them, so that results can be compared. Reading them imports neither torch nor DeepSpeed. A fact that
cannot be read is ``None``. Environment variables that affect training are stored as well, without credentials: see
:mod:`redaction`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from .. import units
from ..errors import PreflightError, UsageError
from . import gpu_state, host_resources
from .gpu_state import GpuFacts, GpuInventory
from .helper_programs import run_tool
from .host_resources import ROOT, read_text
from .redaction import REDACTED, looks_secret

RUN_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")
"""Packages that trials need but reading results does not: the extra ``run``."""
MODEL_PACKAGES = ("torch", "transformers")
"""Packages that building a model needs."""

PACKAGES = (
    "torch", "deepspeed", "transformers", "accelerate", "psutil", "pandas", "numpy", "nvidia-ml-py", "triton",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip

_PREFIXES = (
    "DS_", "DEEPSPEED_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "CUDA_", "HF_",
    "TRANSFORMERS_", "NVIDIA_TF32_",
)  # fmt: skip
# Of Slurm's hundred or so variables, those that say what the job may use.
_SLURM = (
    "SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE",
    "SLURM_MEM_PER_NODE",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One host before the first trial of a run."""

    hostname: str
    """The node's name; empty if only hardware and versions are known, from a flat row or a baseline."""
    operating_system: str | None = None
    """Name and version of the distribution."""
    kernel: str | None = None
    python_version: str | None = None
    cpu_model: str | None = None
    """The processor's name, from the kernel."""
    logical_cores: int
    """Hardware threads that this process may use (its affinity)."""
    physical_cores: int | None = None
    """Cores with those threads."""
    cpu_quota_cores: float | None = None
    """CPU quota of the cgroup, in cores; ``None`` without one."""
    numa_nodes: int | None = None
    host_memory_bytes: int | None = None
    """Memory of the machine."""
    swap_used_bytes: int | None = None
    """Swap space in use by all processes; above zero, the machine may have been short of memory."""
    cgroup_memory_limit_bytes: int | None = None
    """The tightest memory limit on this process; ``None`` without one."""
    cgroup_memory_peak_bytes: int | None = None
    """The most memory that the cgroup had held by then, page cache included: not this run's use."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Version of each installed package among :data:`PACKAGES`; one that is not installed is absent."""
    torch_cuda_version: str | None = None
    """CUDA version that torch was built for; ``None`` for a CPU build."""
    gpu_driver_version: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    """GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible, in its order."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that affect training, secrets redacted."""
    hosts: tuple[Environment, ...] = ()
    """For a job on several hosts, the environment of each in rank order; the outer one is the launching host's."""

    @property
    def hosts_of_ranks(self) -> tuple[Environment, ...]:
        """The environment of each host that has ranks: this one, unless the job is on several hosts."""
        return self.hosts or (self,)

    @property
    def complete(self) -> bool:
        """Whether all facts were read from the host, not only hardware and versions."""
        return bool(self.hostname)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, as ``json.loads`` would."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The interpreter of a user's script and its packages."""

    python: str
    python_version: str
    prefix: str
    """``sys.prefix``: the virtual environment."""
    packages: Mapping[str, str]
    """Version of each installed package among :data:`PACKAGES`, and ninja's."""
    torch_cuda_version: str | None
    """CUDA version that torch was built for; None for a CPU build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Host, GPUs, versions and variables, read once at the start of a run."""

    environment: Environment
    """The facts that are stored with the results."""
    gpus: GpuInventory
    """Every GPU of the host, visible to CUDA or not."""
    variables: Mapping[str, str]
    """Environment variables of this process."""
    interpreter: Interpreter | None = None
    """Interpreter of a user's script; None without a script."""


def read_machine(interpreter: Interpreter | None = None) -> Machine:
    """Read this machine. Never raises: a fact that cannot be read is None. ``interpreter``: of a user's script."""
    variables, inventory = dict(os.environ), gpu_state.read_gpus()
    environment = read_environment(variables, inventory, interpreter=interpreter)
    return Machine(environment=environment, gpus=inventory, variables=variables, interpreter=interpreter)


def read_environment(
    environ: Mapping[str, str] | None = None,
    inventory: GpuInventory | None = None,
    root: Path = ROOT,
    interpreter: Interpreter | None = None,
) -> Environment:
    """Read this host, with the versions of ``interpreter`` (a user's script's), or of this one if it is None."""
    import platform

    environ = os.environ if environ is None else environ
    inventory = gpu_state.read_gpus() if inventory is None else inventory
    system, allowed_cpus, nodes = os.uname(), os.sched_getaffinity(0), root / "sys/devices/system/node"
    # Threads of one core list the same siblings.
    topology = root / "sys/devices/system/cpu"
    cores = {read_text(topology / f"cpu{cpu}/topology/thread_siblings_list") for cpu in allowed_cpus}
    operating_system = None
    with contextlib.suppress(OSError):
        operating_system = platform.freedesktop_os_release().get("PRETTY_NAME")
    version_of: Callable[[str], str | None] = installed_version if interpreter is None else interpreter.packages.get
    return Environment(
        hostname=system.nodename,
        operating_system=operating_system,
        kernel=system.release,
        python_version=sys.version.split()[0] if interpreter is None else interpreter.python_version,
        cpu_model=cpu_model(root),
        logical_cores=len(allowed_cpus),
        physical_cores=None if None in cores else len(cores),
        cpu_quota_cores=host_resources.cgroup_cpu_cores(root),
        numa_nodes=sum(path.name[4:].isdecimal() for path in nodes.glob("node*")) or None,
        host_memory_bytes=host_resources.host_memory_bytes(root),
        swap_used_bytes=host_resources.swap_bytes(root)[1],
        cgroup_memory_limit_bytes=host_resources.cgroup_limit_bytes(root),
        cgroup_memory_peak_bytes=host_resources.cgroup_peak_bytes(root),
        packages={name: version for name in PACKAGES if (version := version_of(name)) is not None},
        torch_cuda_version=cuda_version_of(interpreter),
        gpu_driver_version=inventory.driver_version,
        gpus=gpu_state.select_visible(environ, inventory.gpus),
        variables=recorded_variables(environ),
    )


def comparability_differences(a: Environment, b: Environment) -> list[str]:
    """Return differences that make two results incomparable, such as ``torch 2.13.0 vs 2.11.0``.

    A fact that is known on only one side counts as a difference.
    """
    return [*hardware_differences(a, b), *software_differences(a, b)]


def hardware_differences(a: Environment, b: Environment) -> list[str]:
    """Return differences in GPUs, processor and cores; they make a ratio of throughputs meaningless.

    For jobs on several hosts, those hosts are compared, because the launching host need not be among them.
    """
    if a.hosts and b.hosts:
        kinds = [
            Counter(
                ", ".join(f"{label} {value}" for label, read in _HARDWARE if (value := read(host)))
                for host in each.hosts
            )
            for each in (a, b)
        ]
        texts = ["; ".join(f"{count} x ({kind})" for kind, count in sorted(each.items())) for each in kinds]
        return [] if kinds[0] == kinds[1] else [f"hosts {texts[0]} vs {texts[1]}"]
    return _differences(_HARDWARE, a, b)


def software_differences(a: Environment, b: Environment) -> list[str]:
    """Return differences in versions."""
    return _differences(_SOFTWARE, a, b)


def setting_differences(a: Environment, b: Environment) -> list[str]:
    """Return other differences that may explain a change: Python, kernel, other packages, variables.

    Empty unless both environments are complete.
    """
    if not (a.complete and b.complete):
        return []
    # These three are compared by software_differences.
    names = sorted({*a.packages, *b.packages} - {"torch", "deepspeed", "transformers"})
    variables = sorted({*a.variables, *b.variables} - {"SLURM_JOB_ID"})
    facts = (
        *_SETTINGS,
        *((name, _package(name)) for name in names),
        *((name, lambda each, name=name: each.variables.get(name)) for name in variables),
    )
    return _differences(facts, a, b)


Facts = tuple[tuple[str, Callable[[Environment], object]], ...]


def _differences(facts: Facts, a: Environment, b: Environment) -> list[str]:
    pairs = [(label, read(a), read(b)) for label, read in facts]
    return [f"{label} {left or 'none'} vs {right or 'none'}" for label, left, right in pairs if left != right]


def _package(name: str) -> Callable[[Environment], object]:
    return lambda environment: environment.packages.get(name)


def _describe_gpus(environment: Environment) -> str:
    kinds = Counter(
        f"{gpu.name or 'unnamed'} ({units.format_bytes(gpu.memory_total_bytes)}{', MIG' if gpu.mig else ''})"
        for gpu in environment.gpus
    )
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))


_HARDWARE: Facts = (
    ("GPUs", _describe_gpus),
    ("CPU", attrgetter("cpu_model")),
    ("logical cores", attrgetter("logical_cores")),
    ("physical cores", attrgetter("physical_cores")),
    ("CPU quota", attrgetter("cpu_quota_cores")),
)
LIBRARIES: Facts = (
    ("torch", _package("torch")),
    ("deepspeed", _package("deepspeed")),
    ("transformers", _package("transformers")),
    ("CUDA", attrgetter("torch_cuda_version")),
)
_SOFTWARE: Facts = (*LIBRARIES, ("GPU driver", attrgetter("gpu_driver_version")))
_SETTINGS: Facts = (
    ("host", attrgetter("hostname")),
    ("operating system", attrgetter("operating_system")),
    ("kernel", attrgetter("kernel")),
    ("Python", attrgetter("python_version")),
    ("host memory", lambda environment: units.format_bytes(environment.host_memory_bytes)),
    ("memory limit", lambda environment: units.format_bytes(environment.cgroup_memory_limit_bytes)),
    ("NUMA nodes", attrgetter("numa_nodes")),
)


def installed_version(name: str) -> str | None:
    """Return the version in a package's metadata; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name) or None
    except (metadata.PackageNotFoundError, KeyError, ValueError):  # absent, or the remains of a broken installation
        return None


def missing_packages(names: Sequence[str]) -> list[str]:
    """Return the packages that cannot be imported, without importing them."""
    return [name for name in names if find_spec(name) is None]


def install_command(extra: str = "run") -> str:
    """Return the command that installs an extra."""
    return f'pip install "ds-compare[{extra}]"'


def require_packages(purpose: str, names: Sequence[str] = RUN_PACKAGES, extra: str = "run") -> None:
    """Raise PreflightError, with the extra to install, if a package is missing. ``purpose`` begins the message."""
    if missing := missing_packages(names):
        are = "is" if len(missing) == 1 else "are"
        problem = f"{purpose} needs {', '.join(missing)}, which {are} not installed"
        raise PreflightError(problem, remedy=f"install with {install_command(extra)}")


def require_installed(package: str, needed_by: str) -> None:
    """Raise UsageError if a package is missing. ``needed_by``: the flag and value that need it."""
    if missing_packages([package]):
        raise UsageError(
            f"{needed_by}: the package {package} is not installed", remedy=f"install it with pip install {package}"
        )


def cuda_version_of(interpreter: Interpreter | None) -> str | None:
    """Return the CUDA version that an interpreter's torch was built for. ``interpreter``: None for this one."""
    return torch_built_for("cuda") if interpreter is None else interpreter.torch_cuda_version


def torch_built_for(platform: Literal["cuda", "hip"]) -> str | None:
    """Return the version of CUDA or HIP (ROCm) that torch was built for; None for other builds."""
    # torch/version.py is read as text because importing torch takes seconds.
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return None
    text = read_text(Path(spec.origin).with_name("version.py")) if spec and spec.origin else None
    found = re.search(rf"""^{platform}\b[^=\n]*=\s*['"]([^'"\n]+)['"]""", text or "", re.MULTILINE)
    return found[1] if found else None


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect training, with secrets redacted and non-UTF-8 bytes escaped."""
    names = sorted(name for name in environ if name.startswith(_PREFIXES) or name in _SLURM)
    # Python keeps bytes that are not UTF-8 as lone surrogates, which UTF-8 files cannot hold.
    values = {name: environ[name].encode("utf-8", "backslashreplace").decode("utf-8") for name in names}
    return {name: REDACTED if looks_secret(name, environ[name]) else value for name, value in values.items()}


def cpu_model(root: Path) -> str | None:
    """Return the processor's ``model name``; on ARM, which has none, the implementer and part numbers."""
    lines = (line.partition(":") for line in (read_text(root / "proc/cpuinfo") or "").splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    if "CPU part" in facts and "model name" not in facts:
        return f"ARM implementer {facts.get('CPU implementer', '?')} part {facts['CPU part']}"
    return facts.get("model name") or None


_OLDEST = (3, 9)


def read_interpreter(python: str) -> Interpreter:
    """Read the versions of an interpreter. Raises PreflightError for one that cannot train with DeepSpeed."""
    names = (*PACKAGES, "ninja")
    facts = run_tool("worker.interpreter_facts", *names, environment={}, timeout_seconds=60.0, python=python)
    answer = facts.last_object("it")
    if "error" in answer:
        raise PreflightError(f"--python {python} does not run: {answer['error']}", remedy="give another interpreter")
    found = Interpreter(python=python, **answer)
    version = found.python_version.split(".")
    if tuple(map(int, version[:2])) < _OLDEST:
        problem = f"--python {python} is Python {found.python_version}"
        raise PreflightError(problem, remedy="give Python 3.9 or newer")
    if missing := [name for name in ("torch", "deepspeed") if name not in found.packages]:
        problem = f"the script's interpreter {python} has no {' and no '.join(missing)}"
        raise PreflightError(problem, remedy="install it there, or give --python VENV/bin/python")
    return found
