"""The folder of a run: where its files are, and what writes them.

::

    <output-dir>/
      zero_comparison_<YYYYmmdd_HHMMSS>.json   flat rows, rewritten whole after every trial
      zero_comparison_<YYYYmmdd_HHMMSS>.csv    the same rows and columns
      comparison_<YYYYmmdd_HHMMSS>.json        the same for a recipe; its run is runs/comparison_<YYYYmmdd_HHMMSS>
      runs/zero_<YYYYmmdd_HHMMSS>/
        run.json                               what was requested, the machine, the versions
        records.jsonl                          records of trials, appended and synced; a trial's last one counts
        probes.jsonl                           the same for trials that searched for the largest batch or sequence
        trials/<trial id>/                     trial.json, ds_config.json, rank files, logs
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..system import files
from ..system.files import remove_temporaries
from . import json_files, reader
from .json_files import append_line, json_line, json_text, write_json
from .result_files import csv_text, flat_json_path
from .schema import SCHEMA_VERSION, TrialRecord

RUN_FILE = "run.json"
RECORDS_FILE = "records.jsonl"
PROBES_FILE = "probes.jsonl"
"""Trials that search for the largest micro-batch or sequence, which are not rows of the result."""
_ATTEMPT = "_attempt"
"""Separates the trial's id from the attempt's number in the folder names of second and later attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """One run on disk."""

    folder: Path
    """``<output-dir>/runs/<id>``."""
    retried: frozenset[tuple[str, int]] = frozenset()
    """File and position of the earlier records whose trials ``--retry`` runs again."""

    @property
    def json_path(self) -> Path:
        return flat_json_path(self.folder)

    @property
    def csv_path(self) -> Path:
        return self.json_path.with_suffix(".csv")

    @property
    def recommendation_path(self) -> Path:
        """``zero_recommendation_STAMP.json``, next to ``zero_comparison_STAMP.json``."""
        return self.json_path.with_name(self.json_path.name.replace("comparison_", "recommendation_", 1))

    @classmethod
    def create(cls, output_dir: Path, family: str, suffix: str = "") -> RunFolder:
        """Create the folder of a new run; wait for the next second if another run already has its name.

        ``family``: ``zero``, ``offload`` or ``recipe``. ``suffix``: the end of its name, for a shard.

        Raises PreflightError if the folder cannot be written.
        """
        runs, prefix = output_dir / "runs", "comparison" if family == "recipe" else family
        try:
            runs.mkdir(parents=True, exist_ok=True)
            # runs/ may already exist, so mkdir does not show whether files can be created.
            with tempfile.TemporaryFile(dir=output_dir):
                pass
            while True:
                store = cls(folder=runs / f"{prefix}_{datetime.now():%Y%m%d_%H%M%S}{suffix}")
                # The run folder may have been deleted and its flat files kept: they are not overwritten.
                if not (store.json_path.exists() or store.csv_path.exists()):
                    with contextlib.suppress(FileExistsError):
                        store.folder.mkdir()  # atomic: two runs that start in one second get different names
                        return store
                time.sleep(0.1)
        except OSError as error:
            raise files.not_writable(output_dir, "--output-dir", error) from None

    @classmethod
    def open(cls, folder: Path) -> RunFolder:
        """Open an earlier run for ``--resume``. Raises UsageError if it is missing, or if writes could go elsewhere."""
        if not (folder / RUN_FILE).is_file():
            if folder.is_dir() and folder.resolve().parent.name == "runs":
                problem = "nothing to resume, because the run ended before it had settled what to run"
                raise cannot_resume(folder, problem, remedy="start it again")
            raise cannot_resume(folder, f"no {RUN_FILE} there", remedy="give a folder below <output-dir>/runs")
        store = cls(folder=folder.resolve())
        # Links and special files in a downloaded run could redirect what is written.
        written = ("recommended", "recommended/*", "export_*", "export_*/*", "trials", "points", "points/**/*")
        names = {*store.folder.iterdir(), store.json_path, store.csv_path, store.recommendation_path}
        for path in sorted(names.union(*(store.folder.glob(pattern) for pattern in written))):
            if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
                problem = f"{path.name} is a link or not a regular file, and would be written to"
                raise cannot_resume(store.folder, problem, remedy="remove it, or start a new run")
        return store

    @contextmanager
    def locked(self) -> Iterator[str | None]:
        """Lock the folder for one writer; the kernel releases it however this process ends.

        Raises UsageError if another run holds the lock. Yields None, or a note if the file system has no locks.
        """
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(lock, "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{self.folder} is being written by another run", remedy="wait for it to end"
                ) from None
            except OSError as error:
                yield f"the run folder cannot be locked ({error.strerror}): a second run in it would not be noticed"
                return
            # Under the lock nobody else writes these files, so a temporary one was left by a writer that was killed.
            # The output folder also has files of other runs: only files with this stem are removed.
            for path in (self.json_path, self.recommendation_path):
                remove_temporaries(path.parent, f"{path.stem}.*")
            for folder in self.folder.glob("**/"):
                remove_temporaries(folder, "*")
            yield None

    def save_run(self, facts: Mapping[str, Any]) -> None:
        """Write run.json. ``trials`` should come late in the facts, because readers stop there."""
        counted = {"schema_version": SCHEMA_VERSION, "trial_count": len(facts.get("trials", ())), **facts}
        write_json(self.folder / RUN_FILE, counted)

    def load_run(self) -> reader.RunInfo:
        """Read run.json to resume the run. Raises UsageError if it is invalid or of a different version."""
        return reader.read_run(self.folder / RUN_FILE, [])

    def trial_folder(self, trial_id: str) -> Path:
        """Create a new folder for a trial's files; each later attempt gets its own name."""
        folder = self.folder / "trials" / trial_id
        attempt = 1
        while folder.exists():
            attempt += 1
            folder = self.folder / "trials" / f"{trial_id}{_ATTEMPT}{attempt}"
        # The run's folder is not made again if it has been removed: a new one would lack what had finished.
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir()
        return folder

    def append(self, record: TrialRecord, name: str = RECORDS_FILE) -> None:
        """Append the record of a finished trial to a file; it is on disk when this returns."""
        path = self.folder / name
        # A crash may have cut off the last line: end it, or the new record would become part of it.
        with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read(1) not in (b"", b"\n"):
                file.write(b"\n")
        append_line(path, record.to_dict())

    @staticmethod
    def as_read(record: TrialRecord) -> TrialRecord | None:
        """A record as :meth:`records` reads it, credentials redacted; None for one that it would leave out."""
        return _record_of(json_line(record.to_dict()), RECORDS_FILE)

    def records(self, name: str = RECORDS_FILE) -> list[TrialRecord]:
        """Read the records of all finished trials in order, skipping invalid lines, which a crash may leave."""
        try:
            lines = files.read_bytes(self.folder / name, json_files.LARGEST_FILE_BYTES).split(b"\n")
        except FileNotFoundError:
            return []
        return [record for line in lines if (record := _record_of(line, name)) is not None]

    def counted_records(self, name: str = RECORDS_FILE) -> list[TrialRecord]:
        """Read the records except the ``retried`` ones; those that this command adds count."""
        return [record for index, record in enumerate(self.records(name)) if (name, index) not in self.retried]

    def write_rows(self, rows: Sequence[Mapping[str, Any]], other_csv: Path | None = None) -> None:
        """Replace the flat JSON and CSV; if one cannot be written, none changes. ``other_csv``: a further CSV."""
        # JSON has neither NaN nor infinities, and json_text refuses them.
        finite = [
            {name: None if isinstance(cell, float) and not math.isfinite(cell) else cell for name, cell in row.items()}
            for row in rows
        ]
        csv = csv_text(finite)
        texts = {self.json_path: json_text(finite), self.csv_path: csv}
        files.write_texts(texts if other_csv is None else {**texts, other_csv: csv})


def cannot_resume(folder: Path, problem: str, remedy: str = "start a new run") -> UsageError:
    """The error for a run that cannot be resumed."""
    return UsageError(f"--resume {folder}: {problem}", remedy=remedy)


def _record_of(line: bytes, file: str) -> TrialRecord | None:
    """The record that a line of ``file`` holds; None if it holds none."""
    try:
        return reader.parse_record(line, file)
    except (ValueError, UsageError):
        return None


def last_trial_folder(run: Path, trial_id: str) -> Path:
    """Return the folder of a trial's last attempt, inside its run's folder."""
    trials = run / "trials"
    numbered = {path.name.rpartition(_ATTEMPT)[2]: path for path in trials.glob(f"{trial_id}{_ATTEMPT}*")}
    attempts = {int(number): path for number, path in numbered.items() if number.isascii() and number.isdecimal()}
    return attempts[max(attempts)] if attempts else trials / trial_id


def latest_run(output_dir: Path = Path("results")) -> Path:
    """Return the folder of the run whose last trial began latest. Raises UsageError if there is none.

    The times are read from the records. The files' own times decide only if no trial was launched: copying changes
    them.
    """
    runs = []
    for file in (output_dir / "runs").glob(f"*/{RECORDS_FILE}"):
        with contextlib.suppress(OSError):  # another user's
            written, size = file.stat().st_mtime, file.stat().st_size
            # Usually in the last few bytes; the files of long sweeps are large.
            known, last, end = b"", b"", 0
            while not known and end < size:
                end = 16 * end or 2**16
                with file.open("rb") as handle:
                    handle.seek(max(0, size - end))
                    lines, _, _torn = handle.read().rpartition(b"\n")
                _, known, last = lines.rpartition(b'"started_at": "')
            began = last.partition(b'"')[0].decode(errors="replace")
            runs.append((began if known else datetime.fromtimestamp(written, UTC).isoformat(), written, file.parent))
    if not runs:
        raise UsageError(f"no run in {output_dir / 'runs'}", remedy="give a run folder, or measure something first")
    return max(runs)[-1]
