"""The file ``baselines.json`` and its entries: figures that later results are compared with, and their environment.

The file is a JSON object keyed by baseline name. One writer at a time reads and replaces the whole file. It is meant to
be committed: of the environment it holds only what decides whether two results compare, no host names or variables.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from .. import __version__
from ..errors import UsageError
from ..records import json_files
from ..records.json_files import InvalidJsonError, write_json
from ..system import files
from ..system.environment import Environment
from .result import BenchmarkResult, Memory

DEFAULT_TOLERANCE = 0.05
_HOST = (
    "cpu_model", "logical_cores", "physical_cores", "cpu_quota_cores", "torch_cuda_version", "gpu_driver_version",
)  # fmt: skip
_PACKAGES = ("torch", "deepspeed", "transformers")
_GPU = ("name", "memory_total_bytes", "mig")
_FIGURES = ("throughput_tokens_per_sec", "peak_memory_mb", "samples_per_sec", "average_memory_mb")
_SHARED = (
    *_FIGURES, "memory", "tokens_per_sec_runs", "peak_memory_mb_runs", "step_variation", "workload", "environment",
    "run_id",
)  # fmt: skip
"""Fields that a result has too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineEntry:
    """One baseline. An entry of the first six fields alone is a limit set by hand."""

    KEYS: ClassVar[frozenset[str]]
    """Keys of an entry that this version writes; other keys in the file are kept as they are."""

    name: str
    throughput_tokens_per_sec: float | None = None
    """Tokens per second of the whole job; None: not guarded."""
    peak_memory_mb: float | None = None
    """Peak memory of the kind ``memory``, in MB (2**20 bytes); None: not guarded."""
    tolerance: float = DEFAULT_TOLERANCE
    """Fraction by which throughput may fall or memory rise."""
    version: str = __version__
    """Version of ds_bench that wrote the entry."""
    timestamp: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """ISO 8601, UTC."""
    samples_per_sec: float | None = None
    average_memory_mb: float | None = None
    """See ``BenchmarkResult``."""
    memory: Memory | None = None
    """``gpu`` or ``host``."""
    tokens_per_sec_runs: tuple[float, ...] = ()
    """Mean of every run: the samples of the test against noise."""
    peak_memory_mb_runs: tuple[float, ...] = ()
    step_variation: float | None = None
    """Coefficient of variation of step times inside a run."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Facts that must be equal in a result that is compared (``result.workload_facts``)."""
    environment: Environment | None = None
    """Hardware and versions, which must be equal."""
    run_id: str | None = None
    """Name of the run that was saved: a result that is checked is expected to have all rows of a run."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty")
        if not _is_number(self.tolerance) or not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance!r}: must be a number from 0 to below 1")
        for key in _FIGURES:
            value = getattr(self, key)
            if value is not None and not (_is_number(value) and value > 0):
                raise ValueError(f"{key} is {value!r}: must be a number above 0, or null")
        if self.step_variation is not None and not (_is_number(self.step_variation) and self.step_variation >= 0):
            raise ValueError(f"step_variation is {self.step_variation!r}: must be a number of 0 or more, or null")

    @property
    def set_by_hand(self) -> bool:
        """True if the entry is a limit that a user chose, not a measurement; such a limit applies on any machine."""
        return self.environment is None and not self.workload

    @classmethod
    def of(cls, result: BenchmarkResult, tolerance: float = DEFAULT_TOLERANCE) -> BaselineEntry:
        """The baseline with the name and figures of ``result``. Raises ValueError if the result did not succeed."""
        if not result.succeeded:
            raise ValueError(f"{result.name} ended with {result.status}: not a baseline")
        return cls(name=result.name, tolerance=tolerance, **{key: getattr(result, key) for key in _SHARED})

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the six keys that every entry has, then the others that are known."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        # Not asdict(), which would write the host name and all variables into a file that is committed.
        values["environment"] = None if self.environment is None else _environment_to_dict(self.environment)
        more = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return {key: value for key, value in more.items() if key in _ALWAYS or value not in (None, [], {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BaselineEntry:
        """The inverse of :meth:`to_dict`; unknown keys are ignored. Raises ValueError for other shapes."""
        environment = data.get("environment")
        if isinstance(environment, dict):
            data = {**data, "environment": _with_fields_left_out(environment)}
        return json_files.build(cls, data, unknown_keys="ignore")


BaselineEntry.KEYS = frozenset(each.name for each in fields(BaselineEntry))
_ALWAYS = ("name", "throughput_tokens_per_sec", "peak_memory_mb", "tolerance", "version", "timestamp")


def _is_number(value: object) -> bool:
    # A bool is an int in Python.
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _environment_to_dict(environment: Environment) -> dict[str, Any]:
    """Only the facts that decide whether two results compare."""
    versions = {name: environment.packages[name] for name in _PACKAGES if name in environment.packages}
    gpus = [{name: getattr(gpu, name) for name in _GPU} for gpu in environment.gpus]
    return {**{name: getattr(environment, name) for name in _HOST}, "packages": versions, "gpus": gpus}


def _with_fields_left_out(environment: dict[str, Any]) -> dict[str, Any]:
    """An environment of ``_environment_to_dict`` with the fields that every Environment has; none is compared."""
    gpus = environment.get("gpus", [])
    if isinstance(gpus, list):
        gpus = [{"index": index, **gpu} if isinstance(gpu, dict) else gpu for index, gpu in enumerate(gpus)]
    return {"hostname": "", **environment, "gpus": gpus}


# ------------------------------------------------------------------ the file

Entries = dict[str, dict[str, Any]]
"""Name → entry, as it stands in the file."""

_LARGEST_BYTES = 2**26
_REMEDY = "restore it from version control, or remove it and save anew"


def read(path: Path) -> Entries | None:
    """All entries, not validated; None if the file does not exist. Raises UsageError for any other form."""
    try:
        data = files.read_bytes(path, _LARGEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        remedy = "give the file that baseline save wrote"
        raise json_files.unreadable(path, error, "file of baselines", remedy) from None
    try:
        value = json_files.parse_json(data)
        # pydantic's parser takes the last of two equal keys and does not tell.
        json.loads(data, object_pairs_hook=_refuse_repeated_keys)
    except InvalidJsonError as error:
        raise UsageError(f"{path} {error}", remedy=_REMEDY) from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}", remedy="correct it by hand") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object keyed by name", remedy=_REMEDY)
    for name, entry in value.items():
        if not isinstance(entry, dict):
            raise UsageError(f"{path}: {name!r} is not a JSON object", remedy=_REMEDY)
    return value


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> None:
    """Refuses a key that is given twice, as a merge of two branches may leave it: which one counts is not known."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name!r} is given more than once")


def edit(path: Path, change: Callable[[Entries], Entries]) -> None:
    """Replaces the entries of the file by ``change(entries)``, atomically.

    A lock serialises writers, so that none overwrites what another wrote. Raises UsageError if the file is invalid or
    cannot be written; the file is then unchanged.
    """
    try:
        path = path.resolve()  # a link stays one
        # A file beside it is locked: write_json replaces the file itself, and a lock would stay with the old one.
        with _locked(path.with_name(f".{path.name}.lock")):
            # Sorted by name, so that version control shows the entries that changed and no others.
            write_json(path, dict(sorted(change(read(path) or {}).items())))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{path} cannot be written: {reason}", remedy="give a file in a folder you may write"
        ) from None


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file ``lock``; removes the file afterwards. The lock ends with the process."""
    while True:
        handle = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _names_open_file(lock, handle):  # else the previous holder has removed it: open it again
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return
        finally:
            os.close(handle)


def _names_open_file(path: Path, handle: int) -> bool:
    """True if ``path`` still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
