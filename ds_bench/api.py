"""The functions of ``import ds_bench``: run a comparison and follow it, load a result, predict memory.

``run`` and ``plan`` take the flags of the commands of the same name as keywords, and ``load`` takes results only. They
print nothing by default. Where a command prints one line and exits with 2, they raise UsageError or PreflightError.
``keywords.pyi`` types their keywords for type checkers; ``scripts/make_keywords.py`` makes it from the flags.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Unpack

from .analysis.comparison import Comparison
from .cli import commands
from .cli.plan import WIDTH_OF_FILES, plan_options, predict_plan
from .cli.report import build_reports, flat_rows_of
from .config.options import FLAGS, OPTIONS
from .config.recipe import PATHS, Recipe, can_be_swept, nearest_path
from .errors import DsBenchError, PreflightError, UsageError
from .prediction.fit_verdict import FITS, TIGHT
from .recommend.recommendation import Recommendation
from .records.resume import is_finished
from .records.run_folder import RUN_FILE, RunFolder
from .report import html_report, memory_plan
from .report.comparison_report import ComparisonReport
from .report.data_frames import data_frame
from .report.memory_plan import MemoryPlan
from .report.terminal_report import print_reports
from .system import invocation, job, processes, terminal
from .units import to_gb

if TYPE_CHECKING:
    import pandas

    from .keywords import PlanKeywords, RunKeywords

PathText = str | os.PathLike[str]
_INTERRUPTED = 130
"""Exit code of a run that Ctrl-C ended: 128 + SIGINT, as a shell reports it."""
_POLL_SECONDS = 0.1
_ERRORS: Mapping[str, type[DsBenchError]] = {"UsageError": UsageError, "PreflightError": PreflightError}
RUN_ONLY = ("resume", "shard", "retry", "budget", "yes")
"""Keywords of :func:`run` that a recipe cannot set."""


# ------------------------------------------------------------------ results


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measurements of a run, or of several results pooled. ``print`` shows the report."""

    reports: tuple[ComparisonReport, ...]
    """One report per workload and machine; a sweep has several."""
    folder: Path | None
    """The run's folder; None for a flat JSON or several results."""

    @property
    def comparison(self) -> Comparison:
        """The rows compared with a baseline row. Raises UsageError if there are several comparisons."""
        return self._only_report().comparison

    @property
    def recommendation(self) -> Recommendation:
        """The row to use and why. Raises UsageError if there are several comparisons."""
        return self._only_report().recommendation

    def _only_report(self) -> ComparisonReport:
        if len(self.reports) != 1:
            problem = f"this result has {len(self.reports)} comparisons, one for each workload and machine"
            raise UsageError(problem, remedy="use .comparison or .recommendation of one of result.reports")
        return self.reports[0]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return one row per trial, failed ones too; each column of the CSV (docs/metrics.md) has one dtype."""
        return data_frame(flat_rows_of(self.reports))

    def __str__(self) -> str:
        """The report as text."""
        # The report looks up the stream's encoding. An io.StringIO has none, so symbols would become ASCII.
        stream = io.TextIOWrapper(buffer := io.BytesIO(), encoding="utf-8")
        print_reports(self.reports, stream)
        stream.flush()
        return buffer.getvalue().decode().rstrip()

    def __repr__(self) -> str:
        rows = sum(len(report.comparison.rows) for report in self.reports)
        choices = ", ".join(str(report.recommendation.choice) for report in self.reports[:3])
        more = ", …" if len(self.reports) > 3 else ""
        return f"<ds_bench.Result: {rows} row{'s'[: rows != 1]}, recommended: {choices}{more}>"

    def _repr_html_(self) -> str:
        """The table for notebooks, with escaped text and without scripts."""
        return html_report.render_tables(self.reports)


def load(path: PathText, *more: PathText) -> Result:
    """Read a result: a run folder, its ``records.jsonl`` or ``run.json``, or a flat JSON.

    ``more``: further results; repeats of a row are pooled, as in ``report``. Raises UsageError.
    """
    paths = [Path(each) for each in (path, *more)]
    reports = build_reports(paths)
    # A flat JSON is in a folder too: only run.json shows that the folder belongs to a run.
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    is_run = not more and (folder / RUN_FILE).is_file()
    return Result(reports=tuple(reports), folder=folder if is_run else None)


# ------------------------------------------------------------------ runs


def run(
    recipe: PathText | Mapping[str, Any] | None = None, *, progress: bool = False, **keywords: Unpack[RunKeywords]
) -> Result:
    """Run a recipe's comparison, as the command ``run`` does, and return the measurements.

    ``recipe``: a YAML file, a dict of its sections, or None to use only keywords. ``keywords``: flags of the command,
    which override the recipe, or its sections as dicts; a list for a value of ``model`` or ``training`` makes a sweep.
    ``progress``: print progress to standard error.

    A failed trial is a row of the result. Raises UsageError and PreflightError before anything runs. Ctrl-C ends the
    run, keeps its rows and raises KeyboardInterrupt with a message that says how to continue.
    """
    if isinstance(recipe, Mapping):
        arguments = [each for name, section in recipe.items() for each in _section_arguments(name, section)]
    else:
        # argparse would take a file name that begins with a dash for a flag.
        path = "" if recipe is None else os.fspath(recipe)
        arguments = [os.path.join(".", path) if path.startswith("-") else path] if path else []  # noqa: PTH118
    for keyword, value in keywords.items():
        arguments += _keyword_arguments(keyword, value)
    answer = _run_in_process(arguments, progress)
    folder = answer.get("folder")
    if (error := answer.get("error")) is not None:
        made = _ERRORS.get(error["kind"], DsBenchError)(error["problem"], remedy=error["remedy"])
        for line in error["notes"]:
            made.add_note(line)
        raise made
    # Neither error nor folder: Ctrl-C came before the run made its folder.
    if answer["code"] == _INTERRUPTED or folder is None:
        raise KeyboardInterrupt(_how_to_continue(folder))
    return load(folder)


def _how_to_continue(folder: str | None) -> str:
    if folder is None:
        return "nothing was measured"
    if is_finished(Path(folder)):  # the signal came after the last trial
        return f"every trial had finished: ds_bench.load({folder!r})"
    # A run folder never starts a script by itself: the user names it again.
    script = None
    with contextlib.suppress(DsBenchError, AttributeError):  # removed, or edited by hand
        script = RunFolder.open(Path(folder)).load_run().recipe.get("values", {}).get("script")
    return f"continue with ds_bench.run(resume={folder!r}{f', script={script}' if script else ''})"


def _section_arguments(name: str, section: object) -> Iterator[str]:
    if not isinstance(section, Mapping):
        yield from _setting(name, section)
        return
    for key, value in section.items():
        yield from _setting(f"{name}.{key}", value)


def _setting(path: str, value: object) -> list[str]:
    try:
        # JSON is YAML, which --set reads, and keeps the type of each value: 1 is a number, "1" a string.
        return ["--set", f"{path}={json.dumps(value, default=_json_value, ensure_ascii=False)}"]
    except (TypeError, ValueError):  # not a JSON type, or a list that contains itself
        raise UsageError(
            f"{path} is {value!r:.60}", remedy="give a number, a string, True, False, None or a list"
        ) from None


def _json_value(value: object) -> object:
    """Convert a path to text, and a numpy or pandas number to Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError


def keyword_of(name: str) -> str:
    """Return the keyword for a field of Options: its flag's name, or the field's if it has no flag."""
    return (OPTIONS[name].flag or name).removeprefix("--").replace("-", "_")


def _keyword_arguments(keyword: str, value: object) -> Iterator[str]:
    # model and optimizer name both a flag and a section: a dict means the section.
    if isinstance(value, Mapping) and keyword in (*Recipe.model_fields, "sweep"):
        yield from _section_arguments(keyword, value)
        return
    flag = f"--{keyword.replace('_', '-')}"
    path = PATHS.get(FLAGS.get(flag, keyword))
    if path is None and keyword not in RUN_ONLY:
        near = nearest_path((keyword,))
        same = next((keyword_of(name) for name, other in PATHS.items() if other == near), None)
        hint = f"did you mean {same}?" if same else "give a flag of the command run, or a section of a recipe as a dict"
        raise UsageError(f"ds_bench.run has no keyword {keyword}", remedy=hint)
    swept = isinstance(value, (list, tuple)) and path is not None and can_be_swept(path)
    if path is not None and (flag not in FLAGS or value is None or value is False or swept):
        yield from _setting(path, value)  # no flag can express it
    elif keyword == "retry" and isinstance(value, (list, tuple)):  # one word, where other flags take several
        yield from _flag(flag, ",".join(map(str, value)))
    else:
        yield from _flag(flag, value)


def _flag(flag: str, value: object) -> list[str]:
    """Return a flag's words, none if it is off. A list becomes several values of one flag."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    # With =, a value that begins with a dash is not taken for a flag.
    return [flag, *map(_text, value)] if isinstance(value, (list, tuple)) else [f"{flag}={_text(value)}"]


def _text(value: object) -> str:
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _run_in_process(arguments: Sequence[str], progress: bool) -> dict[str, Any]:
    """Run :func:`main` in a separate process and return its answer.

    Threads, signal handlers, children and GPU memory of this process stay untouched. Raises KeyboardInterrupt once the
    other process has saved its rows and ended, and DsBenchError if it was killed or crashed.
    """
    # Files, not pipes: a pipe can fill up, and children may keep it open after the process has ended.
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as log:
        # The parent's id shows the other process whether this one has already ended.
        asked = {"arguments": list(arguments), "parent": os.getpid(), "progress": progress}
        request.write(json.dumps(asked).encode())
        request.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "ds_bench.api"],
            env=processes.child_environment({}),
            stdin=request,
            stdout=answer,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
        )
        try:
            interrupted, last_line = _follow(process, log, progress)
        finally:
            if process.poll() is None:  # a second Ctrl-C, or an error of this process
                # SIGTERM ends a run as Ctrl-C does: it ends its ranks and saves its rows first.
                process.terminate()
                process.wait()
        answer.seek(0)
        answered: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # nothing or half a line, from a process that was killed
            answered = json.loads(answer.read())
    if interrupted:
        raise KeyboardInterrupt(_how_to_continue(answered.get("folder")))
    # User and system errors are answers too: only a killed or crashed process gives none.
    if not answered:
        raise DsBenchError(
            f"the run's process ended with code {process.returncode}: {last_line}",
            remedy="its folder in output_dir keeps the finished trials: continue with ds_bench.run(resume=FOLDER)",
        )
    return answered


def _follow(process: subprocess.Popen[bytes], log: IO[bytes], progress: bool) -> tuple[bool, str]:
    """Wait for a process to end; pass on Ctrl-C and, with ``progress``, the lines of its log.

    Return whether Ctrl-C was pressed, and the last line. Raises KeyboardInterrupt on a second Ctrl-C.
    """
    position, unfinished, last_line, interrupted = 0, b"", "", False
    while True:
        try:
            # Polled before the read: if it has ended, all its output is in the file.
            ended = process.poll() is not None
            # pread, since both processes share the file's position.
            chunk = os.pread(log.fileno(), 65536, position)
            position += len(chunk)
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            for line in lines:
                last_line = line.decode(errors="replace")
                if progress:
                    terminal.print_text(last_line, sys.stderr)
            if ended and not chunk:
                return interrupted, last_line
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            # As Ctrl-C on a terminal would: the run ends its trial, saves its rows and then answers.
            process.send_signal(signal.SIGINT)


def main() -> None:
    """Serve :func:`run` in the separate process: read the request, run it, write the answer.

    The request on standard input has the arguments of the command ``run``, the caller's process id, and whether to
    report progress on standard error. The answer is one line of JSON on standard output.
    """
    request = json.load(sys.stdin)
    # SIGTERM rather than SIGKILL, so that the run ends its ranks and saves its rows.
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != request["parent"]:  # the caller has ended already
        return
    terminal.print_json(json.dumps(run_arguments(request["arguments"], quiet=not request["progress"])))
    sys.stdout.flush()


def run_arguments(arguments: Sequence[str], *, quiet: bool) -> dict[str, Any]:
    """Run the command ``run`` without its report.

    Return its exit ``code`` and the run's ``folder``, or the ``error`` that it raised.
    """
    folders: list[Path] = []
    try:
        # Each of a launcher's processes would call ds_bench.run and start its own comparison.
        if job.rank_of_process(os.environ) != 0 or job.find_nodes(os.environ) is not None:
            raise UsageError(
                "ds_bench.run was called by a launcher's rank other than the first, or on several nodes",
                remedy="start this program without a launcher: a run starts its ranks itself",
            )
        command, values = commands.parse(["run", *arguments])
        values |= {"quiet": quiet, "begun": folders.append}
        # Standard output is only for the answer.
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            answer: dict[str, Any] = {"code": commands.function_of(command)(**values)}
    except DsBenchError as error:
        lines = getattr(error, "__notes__", [])
        kind = type(error).__name__
        answer = {"error": {"kind": kind, "problem": error.problem, "remedy": error.remedy, "notes": lines}}
    except OSError as error:  # such as a full disk; earlier rows are kept
        answer = {"error": {"kind": "DsBenchError", "problem": str(error), "remedy": "", "notes": []}}
    except KeyboardInterrupt:
        answer = {"code": _INTERRUPTED}
    return {**answer, "folder": str(folders[0].absolute()) if folders else None}


# ------------------------------------------------------------------ plans


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """The predicted memory of one strategy or configuration."""

    strategy: str
    """Name, as ``strategies`` of :func:`run` takes it."""
    label: str
    """Text for tables."""
    stage: int
    """ZeRO stage."""
    verdict: str
    """``fits``, ``tight`` (may retry allocations or run out), ``does not fit``, or ``not known`` if the activations
    are not known."""
    gpu_bytes: int
    """The smallest GPU memory that it runs in."""
    host_bytes: int
    """Host memory per node."""
    nvme_bytes: int
    """NVMe space per node."""
    smallest_change: str | None
    """The smallest change that makes it fit; None if it fits or no change helps."""
    min_gpus: int | None
    """GPUs needed; None if not requested or no number is enough."""
    max_batch: int | None
    """Largest micro-batch; None if not requested or if not even one sequence fits."""
    gpu_reserved_bytes: int | None
    """GPU memory it reserves when there is room to spare: with this much it ``fits``. None if a part is not counted."""
    decided_in: str
    """The phase that needs the most GPU memory: ``initialize``, ``forward``, ``backward`` or ``step``."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The predictions for all rows. ``print`` shows what the command ``plan`` prints."""

    answer: str
    """One sentence: what fits, or the smallest change that makes something fit."""
    rows: tuple[PlannedRow, ...]
    notes: tuple[str, ...]
    """Notes on files, axes, the precision and the export."""
    memory_plan: MemoryPlan
    """The predictions in full, by category and moment."""

    def to_dataframe(self) -> pandas.DataFrame:
        """Return one row per strategy, with sizes in GB (2**30 bytes)."""
        import pandas as pd

        names = {"gpu_bytes": "gpu_gb", "host_bytes": "host_gb", "nvme_bytes": "nvme_gb"}
        names["gpu_reserved_bytes"] = "gpu_reserved_gb"
        rows = [
            {names.get(name, name): to_gb(value) if name in names else value for name, value in asdict(row).items()}
            for row in self.rows
        ]
        # Nullable types: None would turn a column into floats or objects.
        types = {"stage": "Int64", "min_gpus": "Int64", "max_batch": "Int64"}
        types |= dict.fromkeys(("strategy", "label", "verdict", "smallest_change", "decided_in"), "string")
        return pd.DataFrame(rows).astype(types)

    def __str__(self) -> str:
        """The plan as text."""
        return "\n".join(memory_plan.plan_lines(self.memory_plan, WIDTH_OF_FILES, verbose=False))

    def __repr__(self) -> str:
        fitting, tight = (sum(row.verdict == verdict for row in self.rows) for verdict in (FITS, TIGHT))
        return f"<ds_bench.Plan: {fitting} of {len(self.rows)} rows fit, {tight} tight>"

    def _repr_html_(self) -> str:
        """The answer and the table for notebooks, with escaped text and without scripts."""
        return html_report.render_plan(self.memory_plan)


def plan(**keywords: Unpack[PlanKeywords]) -> Plan:
    """Predict the memory of each strategy, as the command ``plan`` does, without a run or a GPU.

    ``keywords``: flags of the command. Raises UsageError.
    """
    flags_of_keywords = {f"--{name.replace('_', '-')}": value for name, value in keywords.items()}
    if unknown := flags_of_keywords.keys() - commands.COMMANDS["plan"].flags.keys():
        problem = f"ds_bench.plan has no keyword {min(unknown)[2:].replace('-', '_')}"
        raise UsageError(problem, remedy=f"give flags of {invocation.command('plan')}")
    # The parser checks values and fills in defaults as on the command line.
    arguments = [word for flag, value in flags_of_keywords.items() for word in _flag(flag, value)]
    _, flags = commands.parse(["plan", *arguments])
    predicted, notes = predict_plan(plan_options(**flags))
    if not predicted.rows:
        raise UsageError("; ".join(notes), remedy="measure it with ds_bench.run")
    rows = (
        PlannedRow(
            strategy=row.configuration.name,
            label=row.label,
            stage=row.configuration.stage,
            verdict=row.verdict,
            gpu_bytes=row.prediction.least_gpu_bytes,
            host_bytes=row.prediction.host_bytes,
            nvme_bytes=row.prediction.nvme_bytes,
            smallest_change=row.change.text if row.change else None,
            min_gpus=row.min_gpus,
            max_batch=row.max_batch,
            gpu_reserved_bytes=row.prediction.gpu_need.known_reserved_bytes,
            decided_in=row.prediction.gpu_need.phase,
        )
        for row in predicted.rows
    )
    return Plan(
        answer=memory_plan.answer_text(predicted),
        rows=tuple(rows),
        notes=tuple(notes),
        memory_plan=predicted,
    )


if __name__ == "__main__":
    main()
