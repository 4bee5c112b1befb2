"""How a trial ended: from the evidence of its files to one status (docs/metrics.md, "How a trial ends").

Success is one thing: every rank's file is present, complete and valid. The root cause of anything
else is picked by class, then by time, never by rank: survivors of a dead rank die of broken
collectives, and must not hide it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..records import json_files, schema
from ..records.rank_files import PHASES, RankExit, log_file, partial_rank_file, rank_file, read_beat, read_exits
from ..records.schema import Outcome, RankFailure, RankMeasurement
from ..system import files
from ..units import format_bytes, format_duration
from .monitor import Ending, Limits

_MOST_RANK_BYTES = 2**26
"""A million steps."""
_NOT_VALID = (ValueError, TypeError, KeyError, OSError, RecursionError)
_STATUS_OF_KIND = {"device_oom": schema.OOM, "host_oom": schema.OOM_HOST, "disk_full": schema.OOM_DISK}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of a trial once it has ended."""

    folder: Path
    world_size: int
    ending: Ending | None
    """None: interrupted by the user."""
    limits: Limits
    host_ran_out: bool = False
    """The kernel's count of processes killed for memory rose while the trial ran."""
    disk_full: bool = False
    """The file system of the swap folder had no room left when the trial ended."""
    server_died: bool = False
    """The preloaded server, with which its ranks die, was gone when the trial ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """The outcome and what the ranks reported."""

    outcome: Outcome
    measurements: tuple[RankMeasurement, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    caveats: tuple[str, ...] = ()


def determine_outcome(evidence: Evidence) -> TrialOutcome:
    """Reads the trial's files and decides."""
    measurements, failures, broken = _read_ranks(evidence)
    if len(measurements) == evidence.world_size:
        return TrialOutcome(
            outcome=Outcome(status=schema.SUCCESS), measurements=measurements, caveats=_exit_caveats(evidence)
        )
    if evidence.ending is not None and not broken and (rescued := _measured_before_inspection(evidence)):
        text = "what follows the measured window (ledger, phases) failed; the measured steps had finished"
        success = Outcome(status=schema.SUCCESS)
        return TrialOutcome(outcome=success, measurements=rescued, failures=failures, caveats=(text,))
    outcome = (
        _oom_outcome(failures, evidence)
        or _interrupted_outcome(evidence)
        or _server_died_outcome(evidence)
        or _disk_full_outcome(evidence)
        or _signal_outcome(failures, evidence)
        or _timeout_outcome(evidence)
        or _exception_outcome(failures, broken, evidence)
        or _missing_file_outcome(evidence, broken)
    )
    return TrialOutcome(outcome=outcome, failures=failures)


def _read_ranks(
    evidence: Evidence,
) -> tuple[tuple[RankMeasurement, ...], tuple[RankFailure, ...], dict[int, str]]:
    """Valid measurements, reported failures by time, and what is wrong with other files by rank."""
    measurements, failures, broken = [], [], {}
    for rank in range(evidence.world_size):
        path = rank_file(evidence.folder, rank)
        if not path.exists():
            continue
        try:
            data = _load(path)
            if "failure" in data:
                failures.append(json_files.build(RankFailure, data["failure"]))
            else:
                measurements.append(_measurement(data, rank, evidence))
        except _NOT_VALID as error:
            reason = error.strerror if isinstance(error, OSError) else error
            broken[rank] = f"{path.name} is not a valid rank file: {reason}"
    return tuple(measurements), tuple(sorted(failures, key=lambda failure: failure.time)), broken


def _measured_before_inspection(evidence: Evidence) -> tuple[RankMeasurement, ...]:
    """Every rank's measurement from before the inspection; empty unless all are there and valid."""
    found = []
    for rank in range(evidence.world_size):
        try:
            found.append(_measurement(_load(partial_rank_file(evidence.folder, rank)), rank, evidence))
        except _NOT_VALID:
            return ()
    return tuple(found)


def _measurement(data: Mapping[str, Any], rank: int, evidence: Evidence) -> RankMeasurement:
    measurement = json_files.build(RankMeasurement, data["measurement"])
    if measurement.rank != rank or measurement.world_size != evidence.world_size:
        raise ValueError(f"is of rank {measurement.rank} of {measurement.world_size}")
    return measurement


def _load(path: Path) -> Mapping[str, Any]:
    data = json_files.parse_json(files.read_bytes(path, _MOST_RANK_BYTES))
    if not isinstance(data, dict):
        raise TypeError("not an object")
    return data


def _exit_caveats(evidence: Evidence) -> tuple[str, ...]:
    if evidence.ending == "hung_at_exit":
        return (f"hung at exit: ended {evidence.limits.exit_grace_seconds:.0f} s after its results were written",)
    bad = [entry for entry in read_exits(evidence.folder) if entry.signal is not None or entry.code]
    if bad:
        how = f"signal {_signal_name(bad[0].signal)}" if bad[0].signal else f"code {bad[0].code}"
        return (f"ended with {how} after its results were written",)
    return ()


def _finish(evidence: Evidence, status: str, rank: int | None, phase: str | None, error: str, **more: Any) -> Outcome:
    log = log_file(evidence.folder, rank) if rank is not None else None
    where = [f"phase {phase}" if phase else "", f"rank {rank}" if rank is not None else "", f"log {log}" if log else ""]
    details = "; ".join([error, *filter(None, where)])
    return Outcome(status=status, error=error, phase=phase, rank=rank, details=details, **more)


def _oom_outcome(failures: tuple[RankFailure, ...], evidence: Evidence) -> Outcome | None:
    """A rank itself says that memory or disk ran out: the first to say so is the cause."""
    for failure in failures:
        if failure.kind in _STATUS_OF_KIND:
            asked = f", asked {format_bytes(failure.requested_bytes)}" if failure.requested_bytes else ""
            free = f", free {format_bytes(failure.free_bytes)}" if failure.free_bytes is not None else ""
            return _finish(
                evidence,
                _STATUS_OF_KIND[failure.kind],
                failure.rank,
                failure.phase,
                f"{failure.error_class} in {failure.phase}{asked}{free}: {failure.message}",
                requested_bytes=failure.requested_bytes,
                free_bytes=failure.free_bytes,
            )
    return None


def _interrupted_outcome(evidence: Evidence) -> Outcome | None:
    if evidence.ending is not None:
        return None
    return _finish(evidence, schema.INTERRUPTED, None, _last_phase(evidence, 0), "interrupted while it ran")


def _server_died_outcome(evidence: Evidence) -> Outcome | None:
    """The ranks' end follows from the server's, and tells nothing."""
    if not evidence.server_died:
        return None
    phase = _last_phase(evidence, 0)
    if evidence.host_ran_out:
        text = "the kernel killed the preloaded server or a rank for memory (its oom_kill count rose)"
        return _finish(evidence, schema.OOM_HOST, None, phase, text)
    text = "the preloaded server, from which its ranks are forked, was ended from outside while it ran"
    return _finish(evidence, schema.KILLED, None, phase, text)


def _disk_full_outcome(evidence: Evidence) -> Outcome | None:
    """A full disk ends a rank by an assertion of DeepSpeed's I/O library, which names no cause."""
    if not evidence.disk_full:
        return None
    ended = min(read_exits(evidence.folder), key=lambda entry: entry.time, default=None)
    rank = ended.rank if ended is not None else None
    return _finish(evidence, schema.OOM_DISK, rank, _last_phase(evidence, rank), "no space left in the swap folder")


def _signal_outcome(failures: tuple[RankFailure, ...], evidence: Evidence) -> Outcome | None:
    """The first rank that a signal ended: not one we sent to end the trial, nor one that followed an exception."""
    exits = _without_file(evidence)
    signs = [failure.time for failure in failures] + [entry.time for entry in exits]
    # After the first sign of failure the other ranks are given this long; only then do we send signals.
    ours = min(signs, default=0.0) + evidence.limits.failure_grace_seconds
    raised = min((failure.time for failure in failures if failure.kind != "peer_lost"), default=ours)
    # A launcher ends a while after the rank whose signal it passes on.
    ended = [e for e in exits if _signal_of(e) and e.time < (ours if e.rank is None else min(ours, raised))]
    if evidence.ending in ("timeout", "stalled") or not ended:
        return None
    first = min(ended, key=lambda entry: entry.time)
    number = _signal_of(first)
    phase = _last_phase(evidence, first.rank)
    name = _signal_name(number)
    if number == signal.SIGKILL and evidence.host_ran_out:
        text = "the kernel killed it for memory (its oom_kill count rose)"
        return _finish(evidence, schema.OOM_HOST, first.rank, phase, text)
    if number == signal.SIGKILL:
        return _finish(evidence, schema.KILLED, first.rank, phase, f"killed by {name}, with no sign of lack of memory")
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        return _finish(evidence, schema.CRASHED, first.rank, phase, f"crashed with {name}")
    return _finish(evidence, schema.KILLED, first.rank, phase, f"killed by {name}")


def _without_file(evidence: Evidence) -> list[RankExit]:
    """Processes that ended and left no rank file; a launcher, which hides its ranks, is always among them."""
    exits = read_exits(evidence.folder)
    return [entry for entry in exits if entry.rank is None or not rank_file(evidence.folder, entry.rank).exists()]


def _some_rank_is_missing(evidence: Evidence) -> bool:
    """A launcher hides which rank died: then only the missing file tells."""
    return not all(rank_file(evidence.folder, rank).exists() for rank in range(evidence.world_size))


def _signal_of(entry: RankExit) -> int | None:
    """The signal behind an exit, also where the deepspeed launcher passes it on as 256 - number."""
    if entry.signal is not None:
        return entry.signal
    if entry.rank is None and entry.code is not None and 256 - 64 < entry.code < 256:
        return 256 - entry.code
    return None


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _timeout_outcome(evidence: Evidence) -> Outcome | None:
    if evidence.ending not in ("timeout", "stalled"):
        return None
    limits = evidence.limits
    rank = _slowest_rank(evidence)
    text = (
        f"still running after {format_duration(limits.timeout_seconds)} (--timeout)"
        if evidence.ending == "timeout"
        else f"no sign of life for {format_duration(limits.stall_timeout_seconds)} (--stall-timeout)"
    )
    stacks = f"stacks of every rank in {evidence.folder}/rank*.stacks"
    return _finish(evidence, schema.TIMEOUT, rank, _last_phase(evidence, rank), f"{text}; {stacks}")


def _exception_outcome(
    failures: tuple[RankFailure, ...], broken: Mapping[int, str], evidence: Evidence
) -> Outcome | None:
    """The first exception; one that says a peer was lost only where nothing else is known."""
    silent = any(entry.rank is not None or _some_rank_is_missing(evidence) for entry in _without_file(evidence))
    causes = [failure for failure in failures if failure.kind != "peer_lost"]
    if not causes and (silent or broken):
        return None
    for failure in causes or failures:
        text = f"{failure.error_class} in {failure.phase}: {failure.message}"
        own = failure.error_class.isidentifier() and failure.error_class not in schema.STATUSES
        status = failure.error_class if own else schema.CRASHED
        return _finish(evidence, status, failure.rank, failure.phase, text)
    return None


def _missing_file_outcome(evidence: Evidence, broken: Mapping[int, str]) -> Outcome:
    for rank, problem in sorted(broken.items()):
        return _finish(evidence, schema.CRASHED, rank, _last_phase(evidence, rank), problem)
    missing = [rank for rank in range(evidence.world_size) if not rank_file(evidence.folder, rank).exists()]
    exits = {entry.rank: entry for entry in read_exits(evidence.folder)}
    rank = next((rank for rank in missing if rank in exits), missing[0])
    phase, entry = _last_phase(evidence, rank), exits.get(rank) or exits.get(None)
    code = f"exit code {entry.code}" if entry is not None and entry.code is not None else "no exit code seen"
    said = "before saying hello" if phase is None else "without writing its file"
    return _finish(evidence, schema.CRASHED, rank, phase, f"rank {rank} ended {said} ({code})")


def _last_phase(evidence: Evidence, rank: int | None) -> str | None:
    beat = read_beat(evidence.folder, rank) if rank is not None else None
    return beat.phase if beat is not None else None


def _slowest_rank(evidence: Evidence) -> int | None:
    """The unfinished rank that came least far, then the one silent for longest; one without a sign comes first."""

    def progress(rank: int) -> tuple[int, int, float]:
        beat = read_beat(evidence.folder, rank)
        return (beat.step, PHASES.index(beat.phase), beat.time) if beat is not None else (-2, 0, 0.0)

    unfinished = [r for r in range(evidence.world_size) if not rank_file(evidence.folder, r).exists()]
    return min(unfinished, key=progress, default=None)
