"""The run directory: the only module that knows where results lie.

::

    <output-dir>/
      zero_comparison_<YYYYmmdd_HHMMSS>.json   flat rows, rewritten whole after every trial
      zero_comparison_<YYYYmmdd_HHMMSS>.csv    the same rows and columns
      runs/zero_<YYYYmmdd_HHMMSS>/
        run.json                               what was asked, where, with what versions
        records.jsonl                          one record per trial, appended and synced
        probes.jsonl                           likewise, of trials that looked for the largest micro-batch
        trials/<trial id>/                     trial.json, ds_config.json, rank files, logs
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import PreflightError, UsageError
from ..system import files
from . import json_files, reader
from .rank_files import append_line, json_text, remove_temporaries, write_json, write_texts
from .schema import SCHEMA_VERSION, TrialRecord

RUN_FILE = "run.json"
RECORDS_FILE = "records.jsonl"
PROBES_FILE = "probes.jsonl"
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """One run on disk."""

    folder: Path
    """``<output-dir>/runs/<id>``."""
    json_path: Path
    csv_path: Path

    @classmethod
    def create(cls, output_dir: Path, family: str) -> RunFolder:
        """Claims a name that no other run has, waiting for the next second where it must.

        ``family``: ``zero`` or ``offload``. Raises PreflightError where the folder cannot be written.
        """
        runs = output_dir / "runs"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=output_dir):
                pass
            while True:
                store = cls._named(output_dir, family, datetime.now().strftime("%Y%m%d_%H%M%S"))
                if store._create_folder():
                    return store
                time.sleep(0.1)
        except OSError as error:
            raise PreflightError(
                f"--output-dir {output_dir} cannot be written: {error.strerror or error}",
                remedy="give a folder that you may write to",
            ) from None

    @classmethod
    def _named(cls, output_dir: Path, family: str, stamp: str) -> RunFolder:
        stem = output_dir / f"{family}_comparison_{stamp}"
        return cls(
            folder=output_dir / "runs" / f"{family}_{stamp}",
            json_path=stem.with_name(stem.name + ".json"),
            csv_path=stem.with_name(stem.name + ".csv"),
        )

    def _create_folder(self) -> bool:
        if self.json_path.exists() or self.csv_path.exists():
            return False
        try:
            self.folder.mkdir()  # atomic: two runs in one second get different seconds
        except FileExistsError:
            return False
        return True

    @classmethod
    def open(cls, folder: Path) -> RunFolder:
        """An earlier run, for ``--resume``. Raises UsageError where there is none."""
        if not (folder / RUN_FILE).is_file():
            if folder.is_dir() and folder.resolve().parent.name == "runs":
                problem = "nothing to resume, the run ended before it had settled what to run"
                raise UsageError(f"--resume {folder}: {problem}", remedy="start it again")
            raise UsageError(f"--resume {folder}: no {RUN_FILE} there", remedy="give a folder below <output-dir>/runs")
        family, _, stamp = folder.resolve().name.partition("_")
        store = cls._named(folder.resolve().parent.parent, family, stamp)
        store._refuse_links()
        return store

    def _refuse_links(self) -> None:
        """A run folder that was downloaded may lead writers elsewhere: every file in it must be one of its own."""
        written = ("recommended", "recommended/*", "export_*", "export_*/*", "trials")
        names = {*self.folder.iterdir(), self.json_path, self.csv_path}
        for path in sorted(names.union(*(self.folder.glob(pattern) for pattern in written))):
            if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
                raise UsageError(
                    f"--resume {self.folder}: {path.name} is a link or no regular file, and would be written to",
                    remedy="remove it, or start a new run",
                )

    @contextmanager
    def locked(self) -> Iterator[str | None]:
        """One writer at a time; the kernel lets go however it ends. Raises UsageError where another runs.

        Gives None, or a note where this file system has no locks and another run would not be noticed.
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
            remove_temporaries(self.json_path.parent, f"{self.json_path.stem}.*")
            for folder in self.folder.glob("**/"):
                remove_temporaries(folder, "*")
            yield None

    def save_run(self, facts: Mapping[str, Any]) -> None:
        """What was asked and where: run.json."""
        write_json(self.folder / RUN_FILE, {"schema_version": SCHEMA_VERSION, **facts})

    def load_run(self) -> dict[str, Any]:
        """run.json. Raises UsageError where it is damaged or of a newer version."""
        try:
            data = json_files.parse_json(files.read_bytes(self.folder / RUN_FILE, json_files.LARGEST_FILE_BYTES))
            version = data["schema_version"]
            lists = data.get("arguments", []), data.get("trials", [])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{self.folder / RUN_FILE} is damaged", remedy="start a new run") from None
        if not isinstance(version, int) or not all(
            isinstance(values, list) and all(isinstance(value, kind) for value in values)
            for values, kind in zip(lists, (str, dict), strict=True)
        ):
            raise UsageError(f"{self.folder / RUN_FILE} is damaged", remedy="start a new run")
        if version > SCHEMA_VERSION:
            raise UsageError(f"{self.folder} was written by a newer version", remedy="upgrade ds_bench")
        return dict(data)

    def trial_folder(self, trial_id: str) -> Path:
        """A fresh folder for a trial's files; an earlier attempt is kept under another name."""
        folder = self.folder / "trials" / trial_id
        attempt = 1
        while folder.exists():
            attempt += 1
            folder = self.folder / "trials" / f"{trial_id}_attempt{attempt}"
        folder.mkdir(parents=True)
        return folder

    def append(self, record: TrialRecord) -> None:
        """Adds a finished trial, on disk when this returns."""
        path = self.folder / RECORDS_FILE
        _close_torn_line(path)
        append_line(path, record.to_dict())

    def append_probe(self, probe: TrialRecord) -> None:
        """Adds a trial that only looked for a micro-batch that fits: no row of the result."""
        path = self.folder / PROBES_FILE
        _close_torn_line(path)
        append_line(path, probe.to_dict())

    def probes(self) -> list[TrialRecord]:
        """All probes in order."""
        return self._read(PROBES_FILE)

    def records(self) -> list[TrialRecord]:
        """All finished trials in order; a line torn by a crash is left out."""
        return self._read(RECORDS_FILE)

    def _read(self, name: str) -> list[TrialRecord]:
        try:
            lines = files.read_bytes(self.folder / name, json_files.LARGEST_FILE_BYTES).split(b"\n")
        except FileNotFoundError:
            return []
        records = []
        for line in lines:
            try:
                records.append(reader.parse_record(line, name, {}))
            except (ValueError, UsageError):
                continue
        return records

    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rewrites the flat JSON and CSV, each whole or not at all, and both at once."""
        finite = [{name: _finite(value) for name, value in row.items()} for row in rows]
        write_texts({self.json_path: json_text(finite), self.csv_path: csv_text(finite)})


def _close_torn_line(path: Path) -> None:
    """Ends a last line that a crash tore, so that the next record does not share its fate."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """CSV with a header; None is an empty cell, and text that a spreadsheet would run as a formula is quoted."""
    rows = list(rows)
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        value = value.replace("\r\n", "\n").replace("\r", "\n")  # which Python before 3.13 leaves unquoted
        return "'" + value if value.startswith(_FORMULA_STARTS) else value
    return "" if value is None else value
