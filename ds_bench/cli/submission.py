"""Submits the shards of a recipe to Slurm, as one array of jobs."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from ..analysis.provenance import arguments_without
from ..config.options import Options
from ..config.shard import Shard, require_enough_rows
from ..errors import PreflightError, UsageError
from ..system import files, invocation, terminal
from ..system.redaction import redacted_arguments
from .arguments import check_options

_OWN_FLAGS = ("--submit", "--shards", "--sbatch-args", "--output-dir")
_SCRIPT_NAME = "submit.sbatch"
_SBATCH_SECONDS = 120
_SIGNAL = "--signal=B:TERM@120"
"""Two minutes before the time limit, to the batch script itself: without B it is sent to steps of srun alone."""


def require_submission(values: argparse.Namespace) -> None:
    """Raises UsageError for flags of a submission without one, and for those that a submission cannot have."""
    if not hasattr(values, "submit"):
        for flag, name in (("--shards", "shards"), ("--sbatch-args", "sbatch_args")):
            if hasattr(values, name):
                raise UsageError(f"{flag} without --submit", remedy="add --submit slurm, or run one part: --shard I/N")
        return
    for name in ("shard", "resume"):
        if hasattr(values, name):
            problem = f"--submit slurm with --{name}"
            raise UsageError(problem, remedy="leave one of them out: a submission begins every shard anew")
    if not hasattr(values, "shards"):
        raise UsageError("--submit slurm without --shards", remedy="add --shards N: as many as the sweep has points")


def submit_shards(points: Sequence[Options], rows: int, values: argparse.Namespace) -> int:
    """Writes the script of an array of jobs, one for each shard, submits it and prints its number. Returns 0.

    ``rows``: of all points together. Raises UsageError and PreflightError, and then leaves nothing behind, unless Slurm
    may have taken the job.
    """
    options = points[0]
    # Checked here with a shard that stands for all, so that no job waits in the queue only to be refused.
    check_options(replace(options, shard=Shard(number=1, count=values.shards)))
    require_enough_rows(rows, values.shards)
    # The script repeats the words that were typed; with --dry-run its jobs would run nothing.
    words = [word for word in arguments_without(values.typed, _OWN_FLAGS) if word != "--dry-run"]
    if redacted_arguments(words) != words:
        problem = "--submit slurm writes the command into a script, and a value in it may be a credential"
        raise UsageError(problem, remedy="put the value into the recipe")
    # A value of --set is taken before --output-dir: results would not lie where the lines below say.
    if any(word.removeprefix("--set=").startswith("output.dir=") for word in words):
        raise UsageError("--submit slurm with --set output.dir", remedy="use --output-dir")
    sbatch_words = _sbatch_words(getattr(values, "sbatch_args", ""))
    folder = (options.output_dir / f"slurm_{datetime.now():%Y%m%d_%H%M%S}").absolute()
    _require_one_line("--output-dir", str(folder))
    # Before sbatch is looked for, so that the script can be read on a machine without Slurm.
    if options.dry_run:
        terminal.print_text(submission_script(words, values.shards, folder, sbatch_words).rstrip())
        return 0
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        remedy = f"submit where the cluster's sbatch is, or run the shards yourself: --shard 1/{values.shards}"
        raise PreflightError("--submit slurm: there is no sbatch on this machine", remedy=remedy)
    folder = _make_folder(folder)
    script = folder / _SCRIPT_NAME
    try:
        script.write_text(submission_script(words, values.shards, folder, sbatch_words), encoding="utf-8")
        script.chmod(0o700)
    # BaseException: Ctrl-C too must not leave the folder of a job that was not submitted.
    except BaseException:
        shutil.rmtree(folder)
        raise
    job = _submit(sbatch, script)
    one = shlex.join(["sbatch", "--array=1", str(script)])
    lines = (
        f"submitted job {job}: an array of {values.shards} shards",
        f"  Script: {script}",
        f"  Logs:   {folder / 'shard'}*.log",
        f"  Report: {invocation.program()} report {shlex.quote(str(folder / 'runs'))}/*of{values.shards}",
        f"  One shard again: {one}",
    )
    for line in lines:
        terminal.print_text(terminal.escape_controls(line))
    return 0


def _make_folder(folder: Path) -> Path:
    """Makes the folder of a submission; waits for the next second where another submission has its name."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
            except FileExistsError:
                time.sleep(0.1)
                folder = folder.with_name(f"slurm_{datetime.now():%Y%m%d_%H%M%S}")
            else:
                return folder
    except OSError as error:
        raise files.not_writable(folder.parent, "--output-dir", error) from None


def submission_script(words: Sequence[str], count: int, folder: Path, sbatch_words: Sequence[str]) -> str:
    """The text of the script. ``words``: the arguments of ``run``; ``folder``: for its results and logs.

    Everything that a user typed is quoted for the shell, or for Slurm, which reads quotes as a shell does.
    """
    program = shlex.join([sys.executable, "-m", "ds_bench", "run"])
    more = shlex.join(["--output-dir", str(folder), *words])  # after a -- among the words flags are not read
    log = str(folder).replace("%", "%%") + "/shard%a_%A.log"  # Slurm's: number of the task, of the job
    # append: Slurm empties the log of a task that it requeues, unless JobFileAppend is set (slurm.conf(5)).
    settings = ["--job-name=ds_bench", f"--array=1-{count}", f"--output={log}", "--open-mode=append", _SIGNAL]
    lines = [
        "#!/bin/bash",
        "# Each task of the array runs one shard. One alone, here the first: sbatch --array=1 THIS_FILE",
        *(f"#SBATCH {shlex.quote(each)}" for each in settings),
        *([f"#SBATCH {shlex.join(sbatch_words)}"] if sbatch_words else []),
        "",
        # Relative paths among the words are those of the folder in which the command was typed.
        f"cd -- {shlex.quote(str(Path.cwd()))} || exit 2",
        # In the place of the shell, to which Slurm sends the signal.
        f'exec {program} --shard "$SLURM_ARRAY_TASK_ID/{count}" {more}',
    ]
    return "\n".join(lines) + "\n"


def _sbatch_words(text: str) -> list[str]:
    """The arguments in the text of ``--sbatch-args``. Raises UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        problem = f"--sbatch-args {text!r}: {error}"
        raise UsageError(problem, remedy="write it as on a command line") from None
    may_be_value = False
    for word in words:
        _require_one_line("--sbatch-args", word)
        if word.startswith("--ar"):  # any abbreviation of --array
            raise UsageError(f"--sbatch-args {word}: the array is that of the shards", remedy="use --shards N")
        is_option = re.match("--[a-z]", word) is not None
        if not is_option and (word.startswith("-") or not may_be_value):  # short ones can hide an -a: -Ha1-9
            problem = f"--sbatch-args {word}: is no long option of sbatch, nor the value of one"
            raise UsageError(problem, remedy="write each as --name=value or --name")
        may_be_value = is_option and "=" not in word
    return words


def _require_one_line(flag: str, text: str) -> None:
    """Raises UsageError for a text that cannot stand in a line of Slurm's options."""
    if not text.isprintable() or "\\" in text:
        problem = f"{flag} {text!r} has a backslash or a control character, which cannot be given to sbatch"
        raise UsageError(problem, remedy="leave it out")


def _submit(sbatch: str, script: Path) -> str:
    """Submits a script and returns the number of its job. Raises PreflightError with what sbatch says.

    The folder of the script is removed where there is no job, and kept where there may be one, which needs it.
    """
    folder = script.parent
    kept = f"Slurm may have the job, so {folder} stays"
    try:
        done = subprocess.run(
            [sbatch, "--parsable", str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SBATCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"sbatch gave no answer in {_SBATCH_SECONDS} seconds: {kept}"
        raise PreflightError(problem, remedy="see squeue --me; remove the folder if the job is not there") from None
    except KeyboardInterrupt:
        terminal.print_text(f"sbatch was interrupted: {kept}; see squeue --me", sys.stderr)
        raise
    except OSError as error:
        shutil.rmtree(folder)
        raise PreflightError(f"sbatch: {error}", remedy="see whether sinfo answers") from None
    number = done.stdout.strip().partition(";")[0]  # JOB or JOB;CLUSTER
    if done.returncode or not number.isdigit():
        shutil.rmtree(folder)
        said = " ".join((done.stderr or done.stdout).split())[:400]
        raise PreflightError(f"sbatch refused the job: {said}", remedy="see --sbatch-args, and sinfo")
    return number
