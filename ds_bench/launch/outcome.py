"""Determines from a trial's files how it ended (docs/metrics.md, "How a trial ends").

Success means that every rank's file is present, complete and valid. For any other ending the cause is chosen by its
class, then by its time, never by the number of the rank: ranks that outlive a dead one fail in a collective, and their
exceptions must not hide how it ended. The rank itself classifies an exception (``worker/failure.py``).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..records import json_files, schema
from ..records.rank_files import PHASES, RankExit, log_file, partial_rank_file, rank_file, read_beat, read_exits
from ..records.schema import Outcome, RankFailure, RankMeasurement
from ..system import files
from ..units import format_bytes, format_duration
from .host_connections import HostError, HostLostError
from .trial_watcher import Ending, Limits

_MAX_RANK_FILE_BYTES = 2**26
"""Enough for a million steps."""
_MAX_CAVEAT_LENGTH = 160
_INVALID_FILE_ERRORS = (ValueError, TypeError, KeyError, OSError, RecursionError)
_STATUS_BY_KIND = {
    "device_oom": schema.OOM,
    "host_oom": schema.OOM_HOST,
    "pinned_memory": schema.OOM_HOST,
    "disk_full": schema.OOM_DISK,
    "shared_memory": "RuntimeError",
}
_ENDING_OF_SCRIPT = {"no_engine": schema.NO_ENGINE, "ended_early": schema.ENDED_EARLY}
_COLLECTIVE_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: \w+\(SeqNum=(\d+), (.+?), Timeout\(ms\)=\d+\) ran for (\d+)"
)
_MAX_LOG_BYTES = 2**20
"""Read from the end of a rank's log, because the stacks of its threads follow the watchdog's message."""
_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts about an ended trial that are not in its files."""

    folder: Path
    world_size: int
    ending: Ending | None
    """None if the user interrupted the trial."""
    limits: Limits
    host_ran_out: bool = False
    """Whether the kernel's count of OOM kills rose while the trial ran."""
    disk_full: bool = False
    """Whether the file system of the swap folder had no room left when the trial ended."""
    host_error: HostError | None = None
    """Set if a host failed to answer, or to start or end the trial."""
    script_steps: int | None = None
    """Warm-up and measured steps of a user's script; None for any other workload."""
    server_died: bool = False
    """Whether the preloaded server was gone when the trial ended. Ranks die with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """The outcome, and what the ranks reported."""

    outcome: Outcome
    measurements: tuple[RankMeasurement, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    caveats: tuple[str, ...] = ()


def determine_outcome(evidence: Evidence) -> TrialOutcome:
    """Read the trial's files and determine its outcome."""
    measurements, failures, problems = _read_rank_files(evidence, rank_file)
    success = Outcome(status=schema.SUCCESS)
    if len(measurements) == evidence.world_size:
        return TrialOutcome(outcome=success, measurements=measurements, caveats=_exit_caveats(evidence))
    # The window had ended on every rank, so its numbers hold, whatever failed in the inspection that followed.
    if evidence.ending is not None and not problems:
        measurements, _, _ = _read_rank_files(evidence, partial_rank_file)
        if len(measurements) == evidence.world_size:
            cause = ""
            for failure in [each for each in failures if each.kind != "peer_lost"][:1]:
                message = " ".join(failure.message.split())[:_MAX_CAVEAT_LENGTH]
                cause = f" ({failure.error_class} on rank {failure.rank}: {message})"
            what = "the inspection after the measured window (ledger, phases, profiles, checkpoint)"
            caveats = (f"{what} failed{cause}; the measured steps had finished",)
            return TrialOutcome(outcome=success, measurements=measurements, failures=failures, caveats=caveats)
    outcome = (
        # The first that applies, because each may cause those below it: a rank's own report about memory says the most;
        # a lost host, a dead server or a full disk makes ranks raise or die by a signal; a missing file says the least.
        _oom_outcome(failures, evidence)
        or _outside_outcome(evidence)
        or _collective_timeout_outcome(failures, evidence)
        or _signal_outcome(failures, evidence)
        or _timeout_outcome(evidence)
        or _exception_outcome(failures, problems, evidence)
        or _missing_file_outcome(problems, evidence)
    )
    return TrialOutcome(outcome=outcome, failures=failures)


def _read_rank_files(
    evidence: Evidence, file_of: Callable[[Path, int], Path]
) -> tuple[tuple[RankMeasurement, ...], tuple[RankFailure, ...], dict[int, str]]:
    """Return the valid measurements, the reported failures by time, and rank → what is wrong with its file."""
    measurements: list[RankMeasurement] = []
    failures: list[RankFailure] = []
    problems: dict[int, str] = {}
    for rank in range(evidence.world_size):
        path = file_of(evidence.folder, rank)
        if not path.exists():
            continue
        try:
            data = json_files.parse_json(files.read_bytes(path, _MAX_RANK_FILE_BYTES))
            if not isinstance(data, dict):
                raise TypeError("not an object")
            if "failure" in data:
                failures.append(json_files.build(RankFailure, data["failure"]))
                continue
            seen = json_files.build(RankMeasurement, data["measurement"])
            # A file of a different rank, or of a different number of ranks, does not belong to this trial.
            if seen.rank != rank or seen.world_size != evidence.world_size:
                raise ValueError(f"it is from rank {seen.rank} of {seen.world_size}")
            measurements.append(seen)
        except _INVALID_FILE_ERRORS as error:
            reason = error.strerror if isinstance(error, OSError) else error
            problems[rank] = f"{path.name} is not a valid rank file: {reason}"
    return tuple(measurements), tuple(sorted(failures, key=lambda failure: failure.time)), problems


def _exit_caveats(evidence: Evidence) -> tuple[str, ...]:
    """Describe a fault after the results were written."""
    if evidence.ending == "hung_at_exit":
        return (f"hung at exit: still there {evidence.limits.exit_grace_seconds:.0f} s after its results were written",)
    for entry in read_exits(evidence.folder):
        if entry.signal is not None or entry.code:
            how = f"signal {_name_signal(entry.signal)}" if entry.signal else f"code {entry.code}"
            return (f"ended with {how} after its results were written",)
    return ()


def _fail(
    evidence: Evidence, status: str, rank: int | None, error: str, *, phase: str | None = None, **more: Any
) -> Outcome:
    """Return the outcome of a failed trial. ``phase``: by default from the rank's last heartbeat."""
    if phase is None and rank is not None:
        phase = _read_phase(evidence, rank)
    details = [error, f"phase {phase}" if phase else None]
    details += [f"rank {rank}", f"log {log_file(evidence.folder, rank)}"] if rank is not None else []
    return Outcome(status=status, error=error, phase=phase, rank=rank, details="; ".join(filter(None, details)), **more)


def _read_phase(evidence: Evidence, rank: int) -> str | None:
    beat = read_beat(evidence.folder, rank)
    return beat.phase if beat is not None else None


def _oom_outcome(failures: tuple[RankFailure, ...], evidence: Evidence) -> Outcome | None:
    """Return the outcome from the first rank that reported running out of memory or disk space."""
    for failure in failures:
        if failure.kind in _STATUS_BY_KIND:
            requested = f", requested {format_bytes(failure.requested_bytes)}" if failure.requested_bytes else ""
            free = f", free {format_bytes(failure.free_bytes)}" if failure.free_bytes is not None else ""
            return _fail(
                evidence,
                _STATUS_BY_KIND[failure.kind],
                failure.rank,
                f"{failure.error_class} {schema.phase_text(failure.phase)}{requested}{free}: {failure.message}",
                phase=failure.phase,
                requested_bytes=failure.requested_bytes,
                free_bytes=failure.free_bytes,
                kind=failure.kind,
            )
    return None


def _outside_outcome(evidence: Evidence) -> Outcome | None:
    """Return the outcome of an ending with a cause outside the ranks, which also explains how they ended."""
    if evidence.ending is None:
        return _fail(evidence, schema.INTERRUPTED, None, "interrupted while it ran", phase=_read_phase(evidence, 0))
    if evidence.host_error is not None:
        # Ranks on other hosts wait for the lost ones.
        status = schema.TIMEOUT if isinstance(evidence.host_error, HostLostError) else schema.CRASHED
        return _fail(evidence, status, None, f"host {evidence.host_error}")
    if evidence.server_died:
        status = schema.OOM_HOST if evidence.host_ran_out else schema.KILLED
        text = "the preloaded server, the parent of the ranks, was killed from outside while the trial ran"
        if evidence.host_ran_out:
            text = "the kernel killed the preloaded server or a rank because memory ran out (its oom_kill count rose)"
        return _fail(evidence, status, None, text, phase=_read_phase(evidence, 0))
    if evidence.disk_full:
        # DeepSpeed's I/O library then aborts the rank with an assertion that does not name the cause.
        first = min(read_exits(evidence.folder), key=lambda entry: entry.time, default=None)
        return _fail(evidence, schema.OOM_DISK, first.rank if first else None, "no space left in the swap folder")
    return None


def _collective_timeout_outcome(failures: tuple[RankFailure, ...], evidence: Evidence) -> Outcome | None:
    """Return a collective's timeout, which NCCL's watchdog writes to the logs of the ranks that it aborts."""
    if any(failure.kind not in ("peer_lost", "collective_timeout") for failure in failures):
        return None
    texts = dict.fromkeys(range(evidence.world_size), "")
    for rank in texts:
        with contextlib.suppress(OSError), log_file(evidence.folder, rank).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_LOG_BYTES))
            texts[rank] = file.read().decode(errors="replace")
    texts |= {failure.rank: texts[failure.rank] + failure.traceback for failure in failures}
    found = {rank: match for rank, text in texts.items() if (match := _COLLECTIVE_TIMEOUT.search(text))}
    if not found:
        return None
    ranks_in: dict[tuple[int, str], list[int]] = {}
    for rank, match in found.items():
        ranks_in.setdefault((int(match[1]), match[2]), []).append(rank)
    last, _ = max(ranks_in)
    late = [rank for rank in texts if rank not in found or int(found[rank][1]) < last]
    # Different collectives count only at the same number: ranks at different numbers are early or late.
    differ = len({number for number, _ in ranks_in}) < len(ranks_in)
    head = "ranks ran different collectives" if differ else f"late: {_name_ranks(late)}" if late else "no rank was late"
    waits = [f"{_name_ranks(ranks)} in {what} (SeqNum {number})" for (number, what), ranks in ranks_in.items()]
    after = format_duration(max(int(match[3]) for match in found.values()) / 1000)
    text = f"collective timed out after {after}, {head}; waiting: {'; '.join(waits)}"
    return _fail(evidence, schema.TIMEOUT, min(late or found), text, kind="collective_timeout")


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _signal_outcome(failures: tuple[RankFailure, ...], evidence: Evidence) -> Outcome | None:
    """Return the outcome of the first exit by a signal, unless we sent the signal or an exception came before it."""
    if evidence.ending in ("timeout", "stalled"):
        return None
    exits = _read_exits_without_file(evidence)
    # We send signals only after the other ranks have had time to report, from the first sign of failure on.
    first_sign = min([failure.time for failure in failures] + [entry.time for entry in exits], default=0.0)
    first_of_ours = first_sign + evidence.limits.failure_grace_seconds
    first_exception = min((failure.time for failure in failures if failure.kind != "peer_lost"), default=first_of_ours)
    # A launcher passes on a rank's signal some time later, so another rank's exception may come in between.
    by_signal = [
        entry
        for entry in exits
        if _find_signal(entry) is not None
        and entry.time < (first_of_ours if entry.rank is None else min(first_of_ours, first_exception))
    ]
    if not by_signal:
        return None
    first = min(by_signal, key=lambda entry: entry.time)
    number = _find_signal(first)
    status, text = schema.KILLED, f"killed by {_name_signal(number)}"
    if number in _CRASH_SIGNALS:
        status, text = schema.CRASHED, f"ended by {_name_signal(number)}"
    elif number == signal.SIGKILL and evidence.host_ran_out:
        status, text = schema.OOM_HOST, "the kernel killed it because memory ran out (its oom_kill count rose)"
    elif number == signal.SIGKILL:
        text += ", with no sign that memory ran out"
    return _fail(evidence, status, first.rank, text, kind="bus_error" if number == signal.SIGBUS else None)


def _missing_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks without a file."""
    return [rank for rank in range(evidence.world_size) if not rank_file(evidence.folder, rank).exists()]


def _read_exits_without_file(evidence: Evidence) -> list[RankExit]:
    """Return the exits of ranks without a file, and of the launcher, which may hide how its ranks ended."""
    missing = {None, *_missing_ranks(evidence)}
    return [entry for entry in read_exits(evidence.folder) if entry.rank in missing]


def _find_signal(entry: RankExit) -> int | None:
    """Return the signal behind an exit. The deepspeed launcher turns a rank's signal into exit code 256 - number."""
    if entry.signal is not None:
        return entry.signal
    # Linux has 64 signals. Smaller codes are exit codes that a rank chose itself.
    if entry.rank is None and entry.code is not None and 256 - 64 < entry.code < 256:
        return 256 - entry.code
    return None


def _name_signal(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _timeout_outcome(evidence: Evidence) -> Outcome | None:
    if evidence.ending not in ("timeout", "stalled"):
        return None
    if evidence.ending == "timeout":
        text = f"still running after {format_duration(evidence.limits.timeout_seconds)} (--timeout)"
    else:
        text = f"no sign of life for {format_duration(evidence.limits.stall_timeout_seconds)} (--stall-timeout)"

    def progress(rank: int) -> tuple[int, int, float]:
        beat = read_beat(evidence.folder, rank)
        # A rank without a heartbeat is behind those before their first step (-1).
        return (beat.step, PHASES.index(beat.phase), beat.time) if beat is not None else (-2, 0, 0.0)

    # The rank that made the least progress, then the one silent the longest: the others wait for it.
    rank = min(_missing_ranks(evidence), key=progress, default=None)
    return _fail(evidence, schema.TIMEOUT, rank, f"{text}; stacks of every rank in {evidence.folder}/rank*.stacks")


def _exception_outcome(
    failures: tuple[RankFailure, ...], problems: Mapping[int, str], evidence: Evidence
) -> Outcome | None:
    """Return the first exception. One about a lost peer counts only if nothing shows what happened to the peer."""
    causes = [failure for failure in failures if failure.kind != "peer_lost"]
    # A launcher never has a file, so its exit points to a lost peer only if a rank's file is missing.
    is_missing = bool(_missing_ranks(evidence))
    ended_silently = any(entry.rank is not None or is_missing for entry in _read_exits_without_file(evidence))
    if not causes and (ended_silently or problems):
        return None
    for failure in causes or failures:
        if failure.kind in _ENDING_OF_SCRIPT:
            status, text = _ENDING_OF_SCRIPT[failure.kind], failure.message
            code = next((each.code for each in read_exits(evidence.folder) if each.rank == failure.rank), None)
            if code:
                # No exception hook sees ``sys.exit``, which argparse calls too.
                last_line = failure.traceback[:_MAX_CAVEAT_LENGTH]
                status, text = "SystemExit", f"{text}, with exit code {code}" + (f": {last_line}" if last_line else "")
            return _fail(evidence, status, failure.rank, text, phase="")
        text = f"{failure.error_class} {schema.phase_text(failure.phase)}: {failure.message}"
        # An exception class may have the name of one of our statuses.
        is_status = failure.error_class.isidentifier() and failure.error_class not in schema.STATUSES
        status = failure.error_class if is_status else schema.CRASHED
        return _fail(evidence, status, failure.rank, text, phase=failure.phase, kind=failure.kind)
    return None


def _missing_file_outcome(problems: Mapping[int, str], evidence: Evidence) -> Outcome:
    for rank, problem in sorted(problems.items()):
        return _fail(evidence, schema.CRASHED, rank, problem)
    missing = _missing_ranks(evidence)
    exits = {entry.rank: entry for entry in read_exits(evidence.folder)}
    # A rank whose end was seen says more than one that may never have started.
    rank = next((rank for rank in missing if rank in exits), missing[0])
    entry = exits.get(rank) or exits.get(None)
    code = f"exit code {entry.code}" if entry is not None and entry.code is not None else "no exit code seen"
    beat = read_beat(evidence.folder, rank)
    if evidence.script_steps is not None and beat is not None:
        text = f"the script ended ({code}) after {max(beat.step, 0)} of {evidence.script_steps} steps"
        if entry is not None and entry.code == 0:  # os._exit(0), which runs no exit handlers
            return _fail(evidence, schema.ENDED_EARLY if beat.step > 0 else schema.NO_ENGINE, rank, text, phase="")
        return _fail(evidence, schema.CRASHED, rank, text)
    when = "before its first heartbeat" if beat is None else "without writing its file"
    return _fail(evidence, schema.CRASHED, rank, f"rank {rank} ended {when} ({code})")
