"""The functions of ``import ds_bench``: run a comparison, load a result, predict memory (docs/python.md).

They take what the commands ``run``, ``report`` and ``plan`` take, by the same names, and print nothing. What those
commands say in one line and exit with 2 is an exception here: UsageError or PreflightError.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from .analysis.comparison import Comparison
from .cli import commands
from .cli.plan import WIDTH_OF_FILES, plan_options, predict_plan
from .cli.report import build_reports, flat_rows_of
from .config.options import FLAGS
from .config.recipe import PATHS, Recipe, can_be_swept, nearest_path
from .errors import DsBenchError, PreflightError, UsageError
from .prediction.memory import FITS, TIGHT
from .recommend.recommendation import Recommendation
from .records.run_folder import RUN_FILE, is_finished
from .report import html_report, memory_plan
from .report.comparison_report import ComparisonReport
from .report.data_frame import data_frame
from .report.memory_plan import MemoryPlan, PlanRow
from .report.terminal_report import print_reports
from .system import job, launched_nodes, processes, terminal
from .units import to_gb

if TYPE_CHECKING:
    import pandas

PathText = str | os.PathLike[str]
# What a shell reports of a program that SIGINT ended: 128 + 2.
_INTERRUPTED = 130
# Children may hold the pipe of a process that has ended, so its end is also asked for at this interval.
_ENDED_POLL_SECONDS = 0.2
_MOST_ANSWER_BYTES = 2**20
"""More than an exit code, a folder and the text of an error."""
_ERRORS: Mapping[str, type[DsBenchError]] = {"UsageError": UsageError, "PreflightError": PreflightError}


class RunKeywords(TypedDict, total=False):
    """Keywords of :func:`run`: flags of the command ``run`` (docs/flags.md), and sections of a recipe as dicts."""

    model: str | Sequence[str] | Mapping[str, Any]
    model_factory: str
    trust_remote_code: bool
    seq_length: int | Literal["auto"] | Sequence[int] | None
    batch_size: int | Literal["auto"] | Sequence[int]
    global_batch_size: int | Sequence[int] | None
    grad_accum: int | Sequence[int] | None
    num_steps: int | Sequence[int]
    warmup_steps: int | Sequence[int]
    pass_type: str | Sequence[str]
    synchronized: bool | Sequence[bool]
    precision: str | Sequence[str]
    activation_checkpointing: bool | Sequence[bool]
    seed: int | Sequence[int]
    dropout: float | Sequence[float] | None
    vocab_size: int | Sequence[int] | None
    data: PathText | Sequence[PathText] | None
    data_dtype: str | None
    data_workers: int | Sequence[int] | None
    data_pin_memory: bool | Sequence[bool]
    data_prefetch: int | Sequence[int]
    stages: int | Sequence[int]
    strategies: str | Sequence[str]
    stage: int
    configs: PathText | Sequence[PathText]
    keep_batch: bool
    common_batch: bool
    relative_to: str | int | None
    optimizer: str | Mapping[str, Any] | None
    profile: str | Sequence[str]
    profile_steps: int
    profile_ranks: int | Sequence[int]
    nsys_start: int
    nsys_end: int
    monitor: str | bool | None
    checkpoint: bool
    checkpoint_path: PathText | None
    num_gpus: int | Sequence[int] | None
    accelerator: str
    launcher: str
    hostfile: PathText | None
    include: str | None
    exclude: str | None
    host_command: str | None
    env: str | Sequence[str]
    master_addr: str | None
    master_port: int | None
    nvme_path: PathText | None
    cpu_memory_limit: float | Sequence[float] | None
    gpu_memory_limit: float | Sequence[float] | None
    peak_tflops: float | None
    timeout: float
    stall_timeout: float
    skip_predicted_oom: bool
    force: bool
    output_dir: PathText
    csv: PathText | None
    repeats: int
    goal: str
    export: str | None
    resume: PathText
    shard: str
    retry: str | Sequence[str]
    budget: float
    yes: bool
    training: Mapping[str, Any]
    configurations: Mapping[str, Any]
    axes: Mapping[str, Any]
    dataset: Mapping[str, Any]
    dataloader: Mapping[str, Any]
    profiling: Mapping[str, Any]
    launch: Mapping[str, Any]
    output: Mapping[str, Any]
    sweep: Mapping[str, Any]


RUN_ONLY = ("resume", "shard", "retry", "budget", "yes")
"""Keywords of :func:`run` that are flags of its command and no values of a recipe."""


class PlanKeywords(TypedDict, total=False):
    """Keywords of :func:`plan`: flags of the command ``plan`` (docs/flags.md)."""

    model: str
    model_factory: str | None
    num_gpus: int
    gpus_per_node: int | None
    gpu: str
    host_memory: float | None
    batch_size: int
    seq_length: int | None
    grad_accum: int
    precision: str
    activation_checkpointing: bool
    strategies: str | Sequence[str]
    configs: PathText | Sequence[PathText]
    keep_batch: bool
    min_gpus: bool
    max_batch: bool
    online: bool
    trust_remote_code: bool


# ------------------------------------------------------------------ results


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measurements of a run, or of several results together. ``print`` shows the report."""

    reports: tuple[ComparisonReport, ...]
    """One for each workload on one machine: one, or those of a sweep."""
    folder: Path | None
    """The run's folder; None for a flat JSON and for several results together."""

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
            problem = f"this result has {len(self.reports)} comparisons, one for each workload"
            raise UsageError(problem, remedy="take one of result.reports, which have .comparison and .recommendation")
        return self.reports[0]

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per trial with the columns of the CSV (docs/metrics.md), each of one type; failed trials too."""
        return data_frame(flat_rows_of(self.reports))

    def __str__(self) -> str:
        """The report as text."""
        # The report asks the stream for its encoding, which an io.StringIO lacks: its signs would become ASCII.
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
        """The table for notebooks; text of users and models is escaped, and nothing in it is a script."""
        return html_report.render_tables(self.reports)


def load(path: PathText, *more: PathText) -> Result:
    """Reads a result: a run folder, its ``records.jsonl`` or ``run.json``, or a flat JSON.

    ``more``: further results; repeats of one row are pooled, as ``report`` pools them. Raises UsageError.
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
    """Compares what a recipe asks for, as the command ``run`` does, and returns what was measured.

    ``recipe``: a YAML file, a dict of its sections, or None to use only keywords. ``keywords``: flags of the command,
    whose values replace the recipe's; a list for a value of ``model`` or ``training`` makes a sweep; sections of a
    recipe as dicts. ``progress``: whether progress goes to standard error.

    A trial that fails is a row of the result. Raises UsageError and PreflightError before anything runs. Ctrl-C ends
    the run, keeps its rows and raises KeyboardInterrupt, whose text says how to go on.
    """
    answer = _run_in_process(_run_arguments(recipe, keywords), progress)
    folder = answer.get("folder")
    # An error crosses from the other process by the name of its class; of an unknown one the base class is made.
    if (error := answer.get("error")) is not None:
        made = _ERRORS.get(error["kind"], DsBenchError)(error["problem"], remedy=error["remedy"])
        for line in error["notes"]:
            made.add_note(line)
        raise made
    # Without an error and a folder: Ctrl-C came before the run had made its folder.
    if answer["code"] == _INTERRUPTED or folder is None:
        raise KeyboardInterrupt(_how_to_go_on(folder))
    return load(folder)


def _how_to_go_on(folder: str | None) -> str:
    if folder is None:
        return "nothing was measured"
    if is_finished(Path(folder)):  # the signal came after the last trial
        return f"every trial had finished: ds_bench.load({folder!r})"
    return f"go on with ds_bench.run(resume={folder!r})"


def _run_arguments(recipe: PathText | Mapping[str, Any] | None, keywords: Mapping[str, Any]) -> list[str]:
    """The arguments of the command ``run``. Raises UsageError for a keyword that there is not."""
    if isinstance(recipe, Mapping):
        arguments = [each for name, section in recipe.items() for each in _section_arguments(name, section)]
    else:
        arguments = [] if recipe is None else [_path_text(recipe)]
    for name, value in keywords.items():
        arguments += _keyword_arguments(name, value)
    return arguments


def _path_text(path: PathText) -> str:
    text = os.fspath(path)
    # argparse would take a file name that begins with a dash for a flag.
    return os.path.join(".", text) if text.startswith("-") else text  # noqa: PTH118 - Path drops the dot


def _section_arguments(name: str, section: object) -> Iterator[str]:
    if not isinstance(section, Mapping):
        yield from _setting(name, section)
        return
    for key, value in section.items():
        yield from _setting(f"{name}.{key}", value)


def _setting(path: str, value: object) -> list[str]:
    try:
        # JSON is YAML, which --set reads, and keeps the type of each value: 1 is a number, "1" a text.
        return ["--set", f"{path}={json.dumps(value, default=_json_value, ensure_ascii=False)}"]
    except (TypeError, ValueError):
        # TypeError: JSON has no such type; ValueError: a list that holds itself.
        raise UsageError(
            f"{path} is {value!r:.60}", remedy="give a number, a text, True, False, None or a list"
        ) from None


def _json_value(value: object) -> object:
    """Paths as texts, and the numbers of numpy and pandas as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError


def _keyword_arguments(name: str, value: object) -> Iterator[str]:
    # model and optimizer are names of a flag and of a section: a dict means the section.
    if isinstance(value, Mapping) and name in (*Recipe.model_fields, "sweep"):
        yield from _section_arguments(name, value)
        return
    path = _path_of(name)
    if path is None and name not in RUN_ONLY:
        raise _unknown_keyword(name)
    swept = isinstance(value, (list, tuple)) and path is not None and can_be_swept(path)
    if path is not None and (_flag_name(name) not in FLAGS or value is None or value is False or swept):
        yield from _setting(path, value)  # no flag can say it
    # --retry takes one text; other flags with a list take several words.
    elif name == "retry" and isinstance(value, (list, tuple)):
        yield from _flag(name, ",".join(map(str, value)))
    else:
        yield from _flag(name, value)


def _flag(name: str, value: object) -> list[str]:
    """A keyword as a flag; none for one that is off. A list becomes several values of one flag."""
    flag = _flag_name(name)
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple)):
        return [flag, *map(_flag_text, value)]
    # With = a value that begins with a dash is not taken for a flag.
    return [f"{flag}={_flag_text(value)}"]


def _flag_name(keyword: str) -> str:
    return f"--{keyword.replace('_', '-')}"


def _flag_text(value: object) -> str:
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _path_of(keyword: str) -> str | None:
    """The key path of a recipe that a keyword gives; None for one that gives none."""
    return PATHS.get(FLAGS.get(_flag_name(keyword), keyword))


def _unknown_keyword(name: str) -> UsageError:
    near = nearest_path((name,))
    same = next((keyword for keyword in RunKeywords.__annotations__ if near and _path_of(keyword) == near), None)
    hint = f"did you mean {same}?" if same else "a flag of the command run, or a section of a recipe as a dict"
    return UsageError(f"ds_bench.run has no keyword {name}", remedy=hint)


def _run_in_process(arguments: Sequence[str], progress: bool) -> dict[str, Any]:
    """Runs :func:`main` in a process of its own and returns its answer.

    Raises KeyboardInterrupt after that process has saved its rows and ended, and DsBenchError if it was killed.
    """
    # A process of its own, so that threads, signal handlers, children and GPU memory of this one stay untouched.
    process = subprocess.Popen(
        [sys.executable, "-m", "ds_bench.api"],
        env=processes.child_environment({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
    )
    # The parent's id: this process may end before the other one has asked the kernel to signal it.
    request = {"arguments": list(arguments), "parent": os.getpid(), "progress": progress}
    watched = _WatchedProcess(process, progress)
    try:
        try:
            watched.send(json.dumps(request).encode())
            watched.wait()
        except KeyboardInterrupt:
            # As Ctrl-C on a terminal would: the run ends its trial, saves its rows and then answers.
            process.send_signal(signal.SIGINT)
            watched.wait()
            raise KeyboardInterrupt(_how_to_go_on(watched.answer().get("folder"))) from None
        answer = watched.answer()
    finally:
        if process.poll() is None:  # a second Ctrl-C, or an error of this process
            # SIGTERM ends a run as Ctrl-C does: it ends its ranks and saves its rows first.
            process.terminate()
            process.wait()
        watched.close()
    # Errors of the user and of the system are answers: only a process that was killed or that crashed gives none.
    if not answer:
        raise DsBenchError(
            f"the process of the run ended with code {process.returncode}: {watched.last_line}",
            remedy="its folder below output_dir has what was measured: ds_bench.run(resume=FOLDER)",
        )
    return answer


class _WatchedProcess:
    """A process whose standard error is passed on and whose answer is kept while it runs."""

    def __init__(self, process: subprocess.Popen[bytes], progress: bool) -> None:
        self._process, self._progress = process, progress
        self._started_line = b""
        self._output = b""
        self.last_line = ""

    def send(self, request: bytes) -> None:
        assert self._process.stdin is not None
        # A process that ended before it read the request has said why on standard error.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(request)

    def wait(self) -> None:
        """Returns when the process has ended; its children may still hold its pipes."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with selectors.DefaultSelector() as selector:
            # Both are read while it runs: it would block forever on a full pipe.
            selector.register(self._process.stdout, selectors.EVENT_READ, self._keep)
            selector.register(self._process.stderr, selectors.EVENT_READ, self._show)
            while selector.get_map():
                # Asked before the pipes are read, so that what was written before the end is in them by then.
                ended = self._process.poll() is not None
                ready = selector.select(0 if ended else _ENDED_POLL_SECONDS)
                for key, _ in ready:
                    if chunk := os.read(key.fd, 65536):
                        key.data(chunk)
                    else:
                        selector.unregister(key.fileobj)
                if ended and not ready:
                    return
        # End of both files: nobody holds the pipes, but the process itself may not have ended yet.
        self._process.wait()

    def _keep(self, chunk: bytes) -> None:
        # One byte more than is taken shows that there was more.
        self._output += chunk[: _MOST_ANSWER_BYTES + 1 - len(self._output)]

    def _show(self, chunk: bytes) -> None:
        # A chunk may end within a line, whose beginning waits for the rest.
        *lines, self._started_line = (self._started_line + chunk).split(b"\n")
        for line in lines:
            self.last_line = line.decode(errors="replace")
            if self._progress:
                terminal.print_text(self.last_line, sys.stderr)

    def answer(self) -> dict[str, Any]:
        """The answer of a process that has ended; empty if it gave none, or one that is too long."""
        # ValueError: nothing or half a line, from a process that was killed.
        with contextlib.suppress(ValueError):
            return dict(json.loads(self._output)) if len(self._output) <= _MOST_ANSWER_BYTES else {}
        return {}

    def close(self) -> None:
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def main() -> None:
    """The other side of :func:`run`: reads the request, runs it and writes the answer.

    The request on standard input has the arguments of the command ``run``, the process id of the program that asks, and
    whether to say on standard error what happens. The answer is one line of JSON on standard output.
    """
    # The request ends with the end of file, so the other program closes its side after it.
    request = json.load(sys.stdin)
    # SIGTERM rather than SIGKILL: on it a run ends its ranks and saves its rows.
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != request["parent"]:  # it ended before this line
        return
    answer = run_arguments(request["arguments"], quiet=not request["progress"])
    # The program that asked may be gone by now; the rows are in the run's folder.
    with contextlib.suppress(BrokenPipeError):
        terminal.print_json(json.dumps(answer))
        sys.stdout.flush()


def run_arguments(arguments: Sequence[str], *, quiet: bool) -> dict[str, Any]:
    """Runs the command ``run`` without its report.

    Returns its exit ``code`` and the run's ``folder``, or the ``error`` that it raised.
    """
    folders: list[Path] = []
    try:
        # Each process of a launcher would call ds_bench.run, and each would start a comparison of its own.
        if job.rank_of_process(os.environ) != 0 or launched_nodes.find_nodes(os.environ) is not None:
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
    except OSError as error:  # such as a full disk; what was written before stays
        answer = {"error": {"kind": "DsBenchError", "problem": str(error), "remedy": "", "notes": []}}
    except KeyboardInterrupt:
        answer = {"code": 130}
    return {**answer, "folder": str(folders[0].absolute()) if folders else None}


# ------------------------------------------------------------------ plans


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """The memory that is predicted for one strategy or configuration."""

    strategy: str
    """Name, as ``strategies`` of :func:`run` takes it."""
    label: str
    """Text for tables."""
    stage: int
    """ZeRO stage."""
    verdict: str
    """``fits``, ``tight`` (above 90 %), ``does not fit``, or ``not known`` without the activations."""
    gpu_bytes: int
    """Of the fullest GPU at its fullest moment."""
    host_bytes: int
    """Of a node's host."""
    nvme_bytes: int
    """Of a node's NVMe disk."""
    smallest_change: str | None
    """What would make it fit; None if it fits, or nothing helps."""
    min_gpus: int | None
    """GPUs needed; None unless it was asked for, or if no number is enough."""
    max_batch: int | None
    """Largest micro-batch; None unless it was asked for, or if one sequence does not fit."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The predictions for all rows. ``print`` shows what the command ``plan`` prints."""

    answer: str
    """One sentence: what fits, or the smallest change with which something does."""
    rows: tuple[PlannedRow, ...]
    notes: tuple[str, ...]
    """What must be known about the files of ``configs``."""
    memory_plan: MemoryPlan
    """The predictions at length: by category and moment."""

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per strategy, in GB of 2**30 bytes."""
        import pandas as pd

        names = {"gpu_bytes": "gpu_gb", "host_bytes": "host_gb", "nvme_bytes": "nvme_gb"}
        rows = [
            {names.get(name, name): to_gb(value) if name in names else value for name, value in asdict(row).items()}
            for row in self.rows
        ]
        # Types of pandas that have a missing value: None would make columns of floats or of objects.
        types = {"stage": "Int64", "min_gpus": "Int64", "max_batch": "Int64"}
        types |= dict.fromkeys(("strategy", "label", "verdict", "smallest_change"), "string")
        return pd.DataFrame(rows).astype(types)

    def __str__(self) -> str:
        """The plan as text."""
        return _plain("\n".join(memory_plan.plan_lines(self.memory_plan, WIDTH_OF_FILES, verbose=False)))

    def __repr__(self) -> str:
        fitting = sum(row.verdict in (FITS, TIGHT) for row in self.rows)
        return f"<ds_bench.Plan: {fitting} of {len(self.rows)} rows fit>"

    def _repr_html_(self) -> str:
        """The answer and the table for notebooks, with escaped text and without scripts."""
        return html_report.render_plan(self.memory_plan)


def plan(**keywords: Unpack[PlanKeywords]) -> Plan:
    """Predicts the memory of each strategy as the command ``plan`` does; runs nothing and needs no GPU.

    ``keywords``: flags of the command. Raises UsageError.
    """
    # Through the parser, so that values are checked and defaults taken as on the command line.
    arguments = [each for name, value in keywords.items() for each in _flag(name, value)]
    _, flags = commands.parse(["plan", *arguments])
    predicted, notes = predict_plan(plan_options(**flags))
    return Plan(
        answer=_plain(memory_plan.answer_text(predicted)[0]),
        rows=tuple(map(_planned_row, predicted.rows)),
        notes=tuple(notes),
        memory_plan=predicted,
    )


def _plain(text: str) -> str:
    return text.replace(terminal.NO_BREAK, " ")


def _planned_row(row: PlanRow) -> PlannedRow:
    return PlannedRow(
        strategy=row.configuration.name,
        label=row.label,
        stage=row.configuration.stage,
        verdict=row.verdict,
        gpu_bytes=row.prediction.gpu_bytes,
        host_bytes=row.prediction.host_bytes,
        nvme_bytes=row.prediction.nvme_bytes,
        smallest_change=row.change.text if row.change else None,
        min_gpus=row.min_gpus,
        max_batch=row.max_batch,
    )


if __name__ == "__main__":
    main()
