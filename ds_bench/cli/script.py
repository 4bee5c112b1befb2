"""The entry point of both scripts: turns errors into one line and an exit code; gives launched processes roles."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config.deepspeed_config import MakeConfig
from ..config.options import Family, Options
from ..config.spec import Strategy
from ..errors import DsBenchError, ResultsNotWrittenError, UsageError
from ..system import files, invocation, terminal
from ..system.redaction import REDACTED, redacted_arguments
from .arguments import build_parser, parse, to_options

REPORTED_ERRORS = (DsBenchError, OSError, KeyboardInterrupt)
"""Exceptions that a command reports on one line: a user's error, a system error, and Ctrl-C."""


def report_error(error: BaseException) -> int:
    """Print one of ``REPORTED_ERRORS`` on one line, and return the exit code."""
    if isinstance(error, OSError):  # such as a full disk; what was written before stays
        error = ResultsNotWrittenError(str(error), remedy=files.remedy_of(error))
    if isinstance(error, DsBenchError):
        terminal.print_text(f"{invocation.PROGRAM}: {error}", sys.stderr)
        return error.exit_code
    terminal.print_text("interrupted", sys.stderr)  # before a run handles signals, or after
    return 130


def main(family: Family, make_config: MakeConfig, arguments: Sequence[str] | None = None) -> int:
    """Run a comparison script and return its exit code. ``make_config``: the script's ``create_deepspeed_config``."""
    # Escaped, because error messages contain "PROG --help" and a file name may hold control characters.
    prog = terminal.escape_controls(Path(sys.argv[0]).name)
    typed_flags = list(sys.argv[1:] if arguments is None else arguments)
    # Before anything is opened: with a closed stream (>&-) the next file would get that stream's number.
    terminal.ensure_streams()
    with terminal.ignoring_broken_stderr():
        try:
            files.require_working_folder()
            options, kept = _with_resumed_flags(family, prog, typed_flags)
            if options.print_recipe:
                from ..config.recipe import recipe_of
                from ..config.recipe_file import yaml_text
                from ..planning.requested_rows import requested_rows

                rows = [row.origin for row in requested_rows(options) if isinstance(row.origin, Strategy)]
                terminal.print_text(yaml_text(recipe_of(options, make_config, rows)).rstrip())
                return 0
            if not runs_comparison(options):
                return 0
            from ..runner import run_comparison

            return run_comparison([options], make_config, redacted_arguments(kept))
        except REPORTED_ERRORS as error:
            return report_error(error)


def _with_resumed_flags(family: Family, prog: str, typed_flags: list[str]) -> tuple[Options, list[str]]:
    """The options, and the flags to store with the run.

    On ``--resume`` the run keeps the flags it began with, and the typed flags override them this time only.
    """
    # The typed flags come first: an error in them is reported before the folder of the run is read.
    options = parse(family, prog, typed_flags)
    if options.resume is None:
        return options, typed_flags
    from ..records.run_folder import RunFolder

    earlier = RunFolder.open(options.resume).load_run()
    if earlier.family != family:
        starters = {**invocation.SCRIPTS, "recipe": f"{invocation.PROGRAM} run"}
        problem = f"--resume {options.resume} was started by {starters.get(earlier.family or '', 'another command')}"
        raise UsageError(problem, remedy="use the command that started it")
    flags = list(earlier.arguments)
    parser = build_parser(family, prog)
    # Parsed again as a namespace, where None means that a flag was not typed.
    typed = parser.parse_args(typed_flags)
    # The typed flags come last: the last of several values wins, whichever name each was typed under.
    origins = (_kept_flags(flags, typed), typed_flags)
    values = parser.parse_args([word for words in origins for word in parser.with_own_flags(words)])
    for name in ("configs", "ds_config", "data", "nvme_path"):  # the run's own are relative to where it began
        kept = getattr(values, name)
        if kept and getattr(typed, name) is None:
            folder = Path(earlier.folder or "")
            setattr(values, name, [folder / path for path in kept] if isinstance(kept, list) else folder / kept)
    resumed = to_options(family, values)
    from ..analysis.provenance import flags_to_repeat

    # The folder may come from somebody else: flags that run code or reach other machines must be typed again.
    needed = flags_to_repeat(resumed)
    missing = [words for name, words in needed.items() if getattr(resumed, name) != getattr(options, name)]
    if missing:
        raise UsageError(
            f"--resume {resumed.resume}: a run folder may not run code or reach other machines on its own",
            remedy=f"if you trust it, give these flags again: {' '.join(map(shlex.join, missing))}",
        )
    return resumed, flags


def _kept_flags(flags: list[str], typed: argparse.Namespace) -> list[str]:
    """The flags that the run began with, without redacted settings.

    Raises UsageError if a redacted one is not given again.
    """
    again = {text.partition("=")[0] for text in typed.set}
    kept: list[str] = []
    for flag in flags:
        if REDACTED not in flag:
            kept.append(flag)
            continue
        key = flag.removeprefix("--set=").partition("=")[0]
        if key not in again:
            raise UsageError(
                f"--resume {typed.resume}: the value of {key} may be a credential and was not kept",
                remedy=f"give it again: --set {key}=VALUE",
            )
        # Written as two words: drop --set along with its value, since a lone --set would be an error.
        if kept[-1:] == ["--set"]:
            kept.pop()
    return kept


def runs_comparison(options: Options) -> bool:
    """Return whether this process runs the comparison; if so, it takes over the ranks of the others.

    On the other nodes of a job (``job.find_nodes``), the first process becomes the agent of its node, and returns only
    if the comparison ends before it needs ranks. Raises UsageError or PreflightError if the nodes cannot be used.
    """
    from ..launch.host_connections import agent_words  # here, so that --help stays fast
    from ..system import job

    os.environ.update(options.variables)
    is_first = job.rank_of_process(os.environ) == 0
    # Before take_over_job, which removes the variables that describe the nodes.
    nodes = job.find_nodes(os.environ) if options.hostfile is None else None
    # A dry run waits for no other node: the launcher's variables give the number of ranks.
    if nodes is not None and options.dry_run and is_first:
        job.assume_nodes(nodes)
    elif nodes is not None and is_first:
        job.connect_nodes(nodes)
    elif nodes is not None and nodes.is_first_of_node and not options.dry_run:
        # The agent starts ranks, which must not inherit the variables of this process's own rank.
        job.take_over_job(os.environ, has_hosts=True)
        job.join_first_node(nodes, agent_words(), os.environ)
    if is_first:
        job.take_over_job(os.environ, has_hosts=options.hostfile is not None or nodes is not None)
    return is_first
