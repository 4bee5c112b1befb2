"""The facts of host, cards and packages stored with every run, so that two results can be compared, or refused.

Read without importing torch or DeepSpeed. A fact that cannot be had is ``None``. Environment variables that steer
the training are kept too, with whatever looks like a secret taken out *before* it is stored: see :mod:`redaction`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import units
from . import host_memory
from .gpus import GpuFacts, GpuQuery, NvmlQuery, select_visible
from .host_memory import ROOT, read_text
from .redaction import REDACTED, looks_secret

PACKAGES = (
    "torch", "deepspeed", "transformers", "accelerate", "psutil", "pandas", "numpy", "nvidia-ml-py", "triton",
)  # fmt: skip

_PREFIXES = (
    "DS_", "DEEPSPEED_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "CUDA_", "HF_",
    "TRANSFORMERS_",
)  # fmt: skip
# Of Slurm's hundred variables, those that say what was granted.
_SLURM = (
    "SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE",
    "SLURM_MEM_PER_NODE",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One host as a run found it, before the first trial."""

    hostname: str
    """The node's name; empty where a flat row or a baseline tells no more than hardware and versions."""
    operating_system: str | None = None
    """Name and version of the distribution."""
    kernel: str | None = None
    """Release of the kernel."""
    machine: str | None = None
    """Instruction set, e.g. ``x86_64``."""
    python_version: str | None = None
    """Version of the interpreter."""
    cpu_model: str | None = None
    """The processor, as the kernel names it."""
    logical_cores: int
    """Hardware threads this process may run on (its affinity), not the machine's."""
    physical_cores: int | None = None
    """Cores those threads belong to."""
    cpu_quota_cores: float | None = None
    """Cores' worth of time the cgroup grants; ``None`` without a quota."""
    numa_nodes: int | None = None
    """NUMA nodes of the machine."""
    host_memory_bytes: int | None = None
    """Memory of the machine."""
    swap_total_bytes: int | None = None
    """Swap space of the machine."""
    swap_used_bytes: int | None = None
    """Swap space in use by everybody: above zero, the machine had been short of memory."""
    cgroup_memory_limit_bytes: int | None = None
    """The tightest memory limit on this process; ``None`` without one."""
    cgroup_memory_peak_bytes: int | None = None
    """The most that cgroup ever held, page cache included; not the use of this run."""
    shm_bytes: int | None = None
    """Size of ``/dev/shm``, through which ranks of one node talk."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Version of each installed package among :data:`PACKAGES`; one that is not installed is absent."""
    torch_cuda_version: str | None = None
    """CUDA version torch was built for; ``None`` for a CPU build."""
    gpu_driver_version: str | None = None
    """Version of the NVIDIA driver."""
    gpus: tuple[GpuFacts, ...] = ()
    """Cards that ``CUDA_VISIBLE_DEVICES`` leaves, in its order."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that steer training, secrets redacted."""

    def __post_init__(self) -> None:
        if self.logical_cores < 1:
            raise ValueError(f"logical_cores must be at least 1, not {self.logical_cores}")
        for name in ("host_memory_bytes", "swap_total_bytes", "swap_used_bytes", "cgroup_memory_limit_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")

    @property
    def complete(self) -> bool:
        """Whether all facts were read from the host; else only those that decide whether results compare are known."""
        return bool(self.hostname)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as ``json.loads`` would give them back."""
        plain: dict[str, Any] = _as_lists(dataclasses.asdict(self))
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Environment:
        """The inverse of :meth:`to_dict`. Raises TypeError, AttributeError or ValueError on other shapes."""
        fields = {name: _as_tuples(value) for name, value in plain.items()}
        return cls(**{**fields, "gpus": tuple(GpuFacts(**gpu) for gpu in fields.get("gpus", ()))})


def capture(environ: Mapping[str, str] | None = None, query: GpuQuery | None = None, root: Path = ROOT) -> Environment:
    """The environment now: of this process, or as tests inject it."""
    environ = os.environ if environ is None else environ
    inventory = (NvmlQuery() if query is None else query).read()
    system = os.uname()
    return Environment(
        hostname=system.nodename,
        operating_system=_operating_system(),
        kernel=system.release,
        machine=system.machine,
        python_version=sys.version.split()[0],
        **_processor(root),
        host_memory_bytes=host_memory.host_memory_bytes(root),
        swap_total_bytes=host_memory.swap_total_bytes(root),
        swap_used_bytes=host_memory.swap_used_bytes(root),
        cgroup_memory_limit_bytes=host_memory.cgroup_limit_bytes(root),
        cgroup_memory_peak_bytes=host_memory.cgroup_peak_bytes(root),
        shm_bytes=_file_system_bytes(root / "dev/shm"),
        packages=package_versions(),
        torch_cuda_version=torch_cuda_version(),
        gpu_driver_version=inventory.driver_version,
        gpus=select_visible(environ, inventory.gpus),
        variables=steering_variables(environ),
    )


def comparable(a: Environment, b: Environment) -> list[str]:
    """What forbids comparing results of two environments, e.g. ``torch 2.13.0 against 2.11.0``; empty if nothing.

    A fact known on one side only is a difference: what was not seen cannot be vouched for.
    """
    return [*hardware_differences(a, b), *software_differences(a, b)]


def hardware_differences(a: Environment, b: Environment) -> list[str]:
    """Cards, processor and cores that differ: no ratio of throughputs means anything across them."""
    return _differences(_HARDWARE, a, b)


def software_differences(a: Environment, b: Environment) -> list[str]:
    """Versions that differ: what a comparison before and after an upgrade is about."""
    return _differences(_SOFTWARE, a, b)


def setting_differences(a: Environment, b: Environment) -> list[str]:
    """What does not forbid a comparison, yet may explain a change: Python, kernel, other packages, variables.

    Empty where one of the two is not complete: what was not kept is no difference.
    """
    if not (a.complete and b.complete):
        return []
    settings = _differences(_SETTINGS, a, b)
    names = sorted({*a.packages, *b.packages} - {"torch", "deepspeed", "transformers"})
    packages = _differences(tuple((name, _package(name)) for name in names), a, b)
    variables = sorted({*a.variables, *b.variables})
    return settings + packages + _differences(tuple((name, _variable(name)) for name in variables), a, b)


_Facts = tuple[tuple[str, Callable[[Environment], object]], ...]


def _differences(facts: _Facts, a: Environment, b: Environment) -> list[str]:
    pairs = [(label, read(a), read(b)) for label, read in facts]
    return [f"{label} {left or 'none'} against {right or 'none'}" for label, left, right in pairs if left != right]


def _package(name: str) -> Callable[[Environment], object]:
    return lambda environment: environment.packages.get(name)


def _variable(name: str) -> Callable[[Environment], object]:
    return lambda environment: environment.variables.get(name)


def _cards(environment: Environment) -> str:
    kinds = Counter(
        f"{gpu.name or 'unnamed'} ({units.format_bytes(gpu.memory_total_bytes)}{', MIG' if gpu.mig else ''})"
        for gpu in environment.gpus
    )
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))


_HARDWARE: _Facts = (
    ("GPUs", _cards),
    ("CPU", lambda environment: environment.cpu_model),
    ("logical cores", lambda environment: environment.logical_cores),
    ("physical cores", lambda environment: environment.physical_cores),
    ("CPU quota", lambda environment: environment.cpu_quota_cores),
)
_SOFTWARE: _Facts = (
    ("torch", lambda environment: environment.packages.get("torch")),
    ("deepspeed", lambda environment: environment.packages.get("deepspeed")),
    ("transformers", lambda environment: environment.packages.get("transformers")),
    ("CUDA", lambda environment: environment.torch_cuda_version),
    ("GPU driver", lambda environment: environment.gpu_driver_version),
)
_SETTINGS: _Facts = (
    ("host", lambda environment: environment.hostname),
    ("operating system", lambda environment: environment.operating_system),
    ("kernel", lambda environment: environment.kernel),
    ("Python", lambda environment: environment.python_version),
    ("host memory", lambda environment: units.format_bytes(environment.host_memory_bytes)),
    ("memory limit", lambda environment: units.format_bytes(environment.cgroup_memory_limit_bytes)),
    ("NUMA nodes", lambda environment: environment.numa_nodes),
)


def package_versions() -> dict[str, str]:
    """Versions from the installed metadata; nothing is imported."""
    from importlib import metadata

    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except (metadata.PackageNotFoundError, KeyError):  # absent, or the remains of a broken installation
            continue
    return {name: version for name, version in versions.items() if version}


def torch_cuda_version() -> str | None:
    """The CUDA version torch was built for; None for another build. Read as text: importing torch takes seconds."""
    return _torch_built_for("cuda")


def torch_rocm_version() -> str | None:
    """The ROCm (HIP) version torch was built for; None for another build."""
    return _torch_built_for("hip")


def _torch_built_for(platform: str) -> str | None:
    """A name's value in ``torch/version.py``."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return None
    text = read_text(Path(spec.origin).with_name("version.py")) if spec and spec.origin else None
    found = re.search(rf"""^{platform}\b[^=\n]*=\s*['"]([^'"\n]+)['"]""", text or "", re.MULTILINE)
    return found[1] if found else None


def steering_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer training, by name; secrets redacted, bytes that are no UTF-8 spelled out."""
    names = sorted(name for name in environ if name.startswith(_PREFIXES) or name in _SLURM)
    return {name: REDACTED if looks_secret(name, environ[name]) else _printable(environ[name]) for name in names}


def _printable(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _operating_system() -> str | None:
    import platform

    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _processor(root: Path) -> dict[str, Any]:
    """The fields of :class:`Environment` that tell of the processor."""
    allowed = sorted(os.sched_getaffinity(0))
    nodes = [path for path in (root / "sys/devices/system/node").glob("node*") if path.name[4:].isdecimal()]
    return {
        "cpu_model": cpu_model(root),
        "logical_cores": len(allowed),
        "physical_cores": _physical_cores(allowed, root),
        "cpu_quota_cores": host_memory.cgroup_cpu_cores(root),
        "numa_nodes": len(nodes) or None,
    }


def cpu_model(root: Path = ROOT) -> str | None:
    """``model name`` of the first processor; on ARM, which has none, the maker's and the part's number."""
    lines = (line.partition(":") for line in (read_text(root / "proc/cpuinfo") or "").splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    if "CPU part" in facts and "model name" not in facts:
        return f"ARM implementer {facts.get('CPU implementer', '?')} part {facts['CPU part']}"
    return facts.get("model name") or None


def _physical_cores(allowed: list[int], root: Path) -> int | None:
    """Threads of one core list the same siblings."""
    cores = {read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in allowed}
    return None if None in cores else len(cores)


def _file_system_bytes(path: Path) -> int | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_blocks * facts.f_frsize


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_lists(inner) for name, inner in value.items()}
    return [_as_lists(inner) for inner in value] if isinstance(value, tuple | list) else value


def _as_tuples(value: Any) -> Any:
    """Lists as tuples, also inside the list of cards; a mapping stays one."""
    if isinstance(value, dict):
        return {name: _as_tuples(inner) for name, inner in value.items()}
    return tuple(_as_tuples(inner) for inner in value) if isinstance(value, list) else value
