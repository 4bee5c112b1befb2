"""The file ``baselines.json`` and its entries: figures that later results are compared with, and their environment.

The file is a JSON object keyed by baseline name. One writer at a time reads and replaces the whole file. It is meant to
be committed, so it keeps only those facts of the environment that decide whether two results are comparable, and no
host names or variables.
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
from typing import Any

from .. import __version__
from ..errors import UsageError
from ..records import json_files
from ..records.json_files import InvalidJsonError, write_json
from ..system import files
from .result import BenchmarkResult, Figures

DEFAULT_TOLERANCE = 0.05
_HOST = (
    "cpu_model", "logical_cores", "physical_cores", "cpu_quota_cores", "torch_cuda_version", "gpu_driver_version",
)  # fmt: skip
_PACKAGES = ("torch", "deepspeed", "transformers")
_GPU = ("name", "memory_total_bytes", "mig")
_FIGURES = ("throughput_tokens_per_sec", "peak_memory_mb", "samples_per_sec", "average_memory_mb")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineEntry(Figures):
    """One baseline. An entry with only the fields of ``_ALWAYS`` is a limit set by hand."""

    tolerance: float = DEFAULT_TOLERANCE
    """Allowed drop in throughput or rise in memory, as a fraction."""
    version: str = __version__
    """Version of ds_bench that wrote the entry."""
    timestamp: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """ISO 8601, UTC."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty")
        if not _is_number(self.tolerance) or not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance!r}: must be at least 0 and below 1")
        for key in _FIGURES:
            value = getattr(self, key)
            if value is not None and not (_is_number(value) and value > 0):
                raise ValueError(f"{key} is {value!r}: must be a number above 0, or null")
        if self.step_variation is not None and not (_is_number(self.step_variation) and self.step_variation >= 0):
            raise ValueError(f"step_variation is {self.step_variation!r}: must be a number of 0 or more, or null")

    @property
    def set_by_hand(self) -> bool:
        """Whether the entry is a limit that a user chose, not a measurement; it applies on any machine."""
        return self.environment is None and not self.workload

    @classmethod
    def of(cls, result: BenchmarkResult, tolerance: float = DEFAULT_TOLERANCE) -> BaselineEntry:
        """Return the baseline with the name and figures of ``result``. Raises ValueError if it did not succeed."""
        if not result.succeeded:
            raise ValueError(f"{result.name} ended with {result.status}, so it cannot be a baseline")
        return cls(tolerance=tolerance, **{each.name: getattr(result, each.name) for each in fields(Figures)})

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the six keys that every entry has, then the others that are known."""
        values = {name: getattr(self, name) for name in (*_ALWAYS, *(each.name for each in fields(self)))}
        if self.environment is not None:
            # Not asdict(), which would write the host name and all variables into a file that is committed.
            known = {name: getattr(self.environment, name) for name in _HOST}
            packages = self.environment.packages
            known["packages"] = {name: packages[name] for name in _PACKAGES if name in packages}
            known["gpus"] = [{name: getattr(gpu, name) for name in _GPU} for gpu in self.environment.gpus]
            values["environment"] = known
        more = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return {key: value for key, value in more.items() if key in _ALWAYS or value not in (None, [], {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BaselineEntry:
        """Invert :meth:`to_dict`; unknown keys are ignored. Raises ValueError for data of a different shape."""
        environment = data.get("environment")
        if isinstance(environment, dict):
            # Add the fields that every Environment needs; they are not compared.
            gpus = environment.get("gpus", [])
            if isinstance(gpus, list):
                gpus = [{"index": index, **gpu} if isinstance(gpu, dict) else gpu for index, gpu in enumerate(gpus)]
            data = {**data, "environment": {"hostname": "", **environment, "gpus": gpus}}
        return json_files.build(cls, data, unknown_keys="ignore")


_ALWAYS = ("name", "throughput_tokens_per_sec", "peak_memory_mb", "tolerance", "version", "timestamp")


def _is_number(value: object) -> bool:
    # A bool is an int in Python.
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ------------------------------------------------------------------ the file

Entries = dict[str, dict[str, Any]]
"""Name → entry as written in the file."""

_LARGEST_BYTES = 2**26
_REMEDY = "restore it from version control, or remove it and save again"


def read(path: Path) -> Entries | None:
    """Return all entries, not validated; None if the file does not exist. Raises UsageError for a malformed file."""
    try:
        data = files.read_bytes(path, _LARGEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        remedy = "give the file that baseline save wrote"
        raise json_files.unreadable(path, error, "file of baselines", remedy) from None
    try:
        value = json_files.parse_json(data)
        # pydantic's parser silently keeps the last of two equal keys.
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
    """Refuse a repeated key, which a merge of two branches may leave: nobody knows which one counts."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name!r} is given more than once")


def edit(path: Path, change: Callable[[Entries], Entries]) -> None:
    """Atomically replace the file's entries with ``change(entries)``.

    A lock serializes writers, so that none overwrites another's entries. Raises UsageError if the file is invalid or
    cannot be written, and whatever ``change`` raises; the file is then unchanged.
    """
    with contextlib.ExitStack() as stack:
        with _write_errors_reported(path):
            path = path.resolve()  # so that a symbolic link is not replaced
            # Lock a separate file: write_json replaces the file itself, and its lock would stay with the old one.
            stack.enter_context(_locked(path.with_name(f".{path.name}.lock")))
        # Sorted by name, so that version control shows only the entries that changed.
        entries = dict(sorted(change(read(path) or {}).items()))
        with _write_errors_reported(path):
            write_json(path, entries)


@contextlib.contextmanager
def _write_errors_reported(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "give a file in a folder that you can write to"
        raise UsageError(f"{path} cannot be written: {reason}", remedy=remedy) from None


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file ``lock``; remove the file afterwards. The lock ends with the process."""
    while True:
        handle = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(lock.stat(), os.fstat(handle)):
                    break
            os.close(handle)  # the previous holder has removed the file: open it again
        except BaseException:
            os.close(handle)
            raise
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)
