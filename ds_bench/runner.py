"""One comparison from Options to exit code: plan, check, launch trials within the budget, save, report."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .analysis import flops, provenance
from .analysis.comparison import ComparisonRow, rows_of
from .config import trained_parameters
from .config.deepspeed_config import MakeConfig
from .config.deepspeed_keys import use_version
from .config.identity import row_key, work_key
from .config.options import Options
from .config.spec import Trial, point_text
from .config.training_script import find_python
from .doctor import checks as doctor
from .doctor import cluster as host_checks
from .doctor import disk
from .doctor.findings import SystemAccess
from .errors import PreflightError, ResultsNotWrittenError, UsageError
from .launch import Launcher, Limits, rank_environment
from .launch.host_connections import Hosts
from .launch.ops import is_built
from .launch.scratch import remove_abandoned
from .launch.script_ranks import script_words
from .launch.trial import launch_command
from .launch.warm_launcher import choose_launcher, forks_ranks, start_server
from .planning import largest_batch_search
from .planning.trial_planner import Plan, RunPlan, make_run_plan, refuse_unresolved
from .prediction import trial_predictions
from .prediction.model_profile import ModelProfile, Variant, variant_of
from .recommend import remedies
from .records import schema
from .records.json_files import json_text, write_json
from .records.rank_files import CONFIG_FILE
from .records.resume import is_finished, remaining_trials, require_same_machine, require_same_workload, with_retries
from .records.run_folder import RUN_FILE, RunFolder
from .records.schema import Outcome, TrialRecord
from .report import exported_configuration
from .report.combined_table import has_passes
from .report.comparison_report import ComparisonReport, build_report
from .report.progress import ProgressReporter, nsys_command, profile_files_line, run_plan_lines, stand_in_line
from .report.terminal_report import print_reports
from .system import device_locks, files, invocation, processes, terminal
from .system.environment import (
    Environment,
    Machine,
    read_interpreter,
    read_machine,
    require_installed,
    require_packages,
)
from .units import format_items, format_names

if TYPE_CHECKING:
    from .analysis.row import Run

OK, NONE_SUCCEEDED, INTERRUPTED_CODE = 0, 1, 130
_MODULES_FOR_RESULTS = (f"{__package__}.analysis.row", "scipy.special", "jinja2", "yaml", "rich.text")
"""Loaded while the preloaded server loads: needed between trials, or after the last one."""
_FIELDS_SET_BY_SEARCH = ("batch_size", "batch_policy", "seq_length", "seq_policy")
"""Fields of a workload that ``--batch-size auto`` and ``--seq-length auto`` decide."""


def run_comparison(
    points: Sequence[Options],
    make_config: MakeConfig,
    arguments: Sequence[str],
    recipe: Mapping[str, Any] | None = None,
    begun: Callable[[Path], None] = lambda _folder: None,
) -> int:
    """Plan, check, run, save and report one comparison. Return the exit code.

    ``points``: the points of a sweep, or one. ``arguments`` and ``recipe``: what run.json keeps of the request; the
    families ``zero`` and ``offload`` have no recipe. ``begun``: called with the run's folder once it exists. Raises
    DsBenchError for anything the user can fix, before any work, and at the end for a file that could not be written.
    """
    options = points[0]
    for name in (*arguments, str(Path.cwd())):
        if any("\ud800" <= sign <= "\udfff" for sign in name):  # how Python keeps bytes that are not UTF-8
            raise UsageError(f"{name} is not valid UTF-8, which results must be", remedy="rename the file or folder")
    if not (options.dry_run or options.script):
        require_packages("a run")
    asked = [("tensorboard", "--monitor tensorboard")] * (options.inspection.monitor == "tensorboard")
    asked += [("peft", "--lora")] * (options.lora is not None and not options.dry_run)
    for package, flag in asked:
        require_installed(package, flag)
    store: RunFolder | None = None
    with processes.handling_signals(), contextlib.ExitStack() as versions:
        try:
            with processes.raising_on_interrupt():
                # A file that cannot be written is reported before hours of trials, not after them.
                if not (options.dry_run or options.resume):
                    files.require_writable(options.output_dir, "--output-dir", files.FIRST_FILES_BYTES)
                    require_writable_csv(options.csv)
                machine = _read_machine(options)
                script_packages = {} if machine.interpreter is None else machine.interpreter.packages
                versions.enter_context(use_version(script_packages.get("deepspeed")))
                if options.resume is not None:  # before anything that the folder refers to is checked
                    require_same_machine(RunFolder.open(options.resume), machine.environment)
                plan, nvme_folder = with_nvme_folder(make_run_plan(points, make_config, machine))
                _require_resumable(plan)
                print_notes(plan, arguments)
                if options.dry_run and options.inspection.checkpoint:
                    disk.require_checkpoint_folder(options.inspection.checkpoint_path, plan.trials)
            # A recipe's dry run goes on: its table shows predicted memory.
            if options.dry_run and recipe is None:
                return print_dry_run(plan, stand_in_line(plan))
            # Shared memory left behind by killed runs is freed before the checks look at the free memory.
            remove_abandoned()
            with contextlib.ExitStack() as stack:
                with processes.raising_on_interrupt():
                    hosts, machine = stack.enter_context(connected_hosts(plan, machine))
                    plan = with_predictions(plan, machine)
                    if recipe is not None and options.dry_run:
                        lines = [*run_plan_lines(plan, max_lines=1000), *([""] if options.verbose else [])]
                        terminal.print_text("\n".join(lines))
                    elif recipe is not None and len(plan.plans) > 1 and not options.quiet:
                        terminal.print_text("\n".join(run_plan_lines(plan, max_lines=20)), sys.stderr)
                    if options.dry_run:
                        _check_room_for_checkpoints(plan)
                        return print_dry_run(plan) if options.verbose else OK
                # Locks come before the checks, which would report a card in use by the run that is being waited for.
                machine, notes = stack.enter_context(_devices_of_run(plan, machine, hosts))
                with processes.raising_on_interrupt():
                    _start_loading(plan)
                    require_ready(plan, machine, nvme_folder, hosts)
                # Only after the checks: a run that is refused leaves no empty folder.
                if options.resume is not None:
                    store = with_retries(RunFolder.open(options.resume), options.retry)
                else:
                    suffix = "" if options.shard is None else options.shard.file_suffix
                    store = RunFolder.create(options.output_dir, options.family, suffix)
                begun(store.folder)
                notes += [note] if (note := stack.enter_context(store.locked())) else []
                return ComparisonRun(plan, machine, store, arguments, recipe, hosts, notes).run()
        except KeyboardInterrupt:  # not during the trials, which end with a report
            # Without this file, --resume has nothing to continue.
            then = ""
            if store is not None and (store.folder / RUN_FILE).exists():
                then = f"; continue with: {provenance.resume_command(options, store.folder)}"
            terminal.print_text(f"interrupted{then}", sys.stderr)
            return INTERRUPTED_CODE


# ------------------------------------------------------------------ before the first trial


def _read_machine(options: Options) -> Machine:
    """Read this machine, with the versions of the script's interpreter if there is a script."""
    return read_machine(read_interpreter(find_python(options.python)) if options.script else None)


@contextlib.contextmanager
def connected_hosts(plan: RunPlan, machine: Machine) -> Iterator[tuple[Hosts | None, Machine]]:
    """Connect to the hosts of a multi-host job, and yield them and the machine with their environments.

    Yields None if the job is on one host, and on ``--dry-run``, which reaches no host. Raises PreflightError for a host
    that cannot be used or differs, UsageError if the run to resume began on different hosts.
    """
    if plan.options.dry_run or not plan.placement.hosts:
        yield None, machine
        return
    python = None if machine.interpreter is None else machine.interpreter.python
    with host_checks.connected_hosts(plan.placement, python) as hosts:
        environment = host_checks.environment_with_hosts(hosts, plan.placement, machine.environment)
        if plan.options.own_script is not None:
            host_checks.require_script(hosts, plan.options.own_script)
        if plan.options.resume is not None:
            require_same_machine(RunFolder.open(plan.options.resume), environment)
        yield hosts, replace(machine, environment=environment)


@contextlib.contextmanager
def _devices_of_run(plan: RunPlan, machine: Machine, hosts: Hosts | None) -> Iterator[tuple[Machine, list[str]]]:
    """Hold the locks of the devices that the trials use, so that no other run uses them; wait for one that does.

    Yields the machine, read again after a wait, and notes for the reader of the result.
    """
    line, placement = terminal.StatusLine(sys.stderr, quiet=plan.options.quiet), plan.placement
    with contextlib.ExitStack() as held:
        with processes.raising_on_interrupt():
            if hosts is not None:  # this host has an agent too, if it is among them
                with host_checks.naming_lost_host():
                    locks = hosts.lock_devices(placement, line.say)
            else:
                gpus = machine.environment.gpus
                names = device_locks.device_names(placement.accelerator, gpus, range(placement.num_gpus))
                locks = held.enter_context(device_locks.locked_devices(names, line.say))
            # The first reading shows the memory and the clocks that the other run caused.
            if locks.waited:
                machine = _read_machine(plan.options)
                if hosts is not None:
                    environment = host_checks.environment_with_hosts(hosts, placement, machine.environment)
                    machine = replace(machine, environment=environment)
        yield machine, [*plan.notes, *locks.notes]


def _start_loading(plan: RunPlan) -> None:
    """Start the preloaded server before the checks if no op has to be built for it; loading takes seconds."""
    if not forks_ranks(plan.placement, plan.trials):
        return
    names = rank_environment.ops_of(plan.placement, plan.configurations)
    if all(is_built(name, Path(plan.variables["TORCH_EXTENSIONS_DIR"])) for name in names):
        with contextlib.suppress(OSError):  # the launcher tries again, and says why or launches without it
            start_server({**plan.variables, "DS_BENCH_PRELOAD_OPS": ",".join(names)}, plan.placement)


def _require_resumable(plan: RunPlan) -> None:
    """Raise UsageError if ``--resume`` names a run of a different workload, or a different shard."""
    if (folder := plan.options.resume) is not None:
        shards = RunFolder.open(folder).load_run().shard, plan.options.shard
        names = [f"shard {shard}" if shard else "the whole plan" for shard in shards]
        if names[0] != names[1]:
            raise UsageError(f"--resume {folder} is {names[0]}, not {names[1]}", remedy="leave --shard out")
        # The stored trials have the sizes that a search found; this plan still has stand-ins for them.
        left_out = _FIELDS_SET_BY_SEARCH if any(each.options.searches_size for each in plan.plans) else ()
        require_same_workload(RunFolder.open(folder), plan.trials, left_out)


def require_writable_csv(path: Path | None) -> None:
    """Raise PreflightError if the file requested for the rows cannot be written."""
    if path is None:
        return
    try:
        target = path.resolve()
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # A device or pipe is written to. A file is replaced by renaming one next to it (system.files.write_text).
        if target.is_file() or not target.exists():
            with tempfile.TemporaryFile(dir=target.parent):
                pass
    except OSError as error:
        problem = f"the rows cannot be written to {path}: {error.strerror or error}"
        raise PreflightError(problem, remedy="give a file in a folder that exists and that you can write to") from None


def with_nvme_folder(plan: RunPlan) -> tuple[RunPlan, disk.NvmeFolder | None]:
    """Return the run with what is known of its folder for NVMe offload, and the folder; None if no row swaps to it.

    Raises PreflightError if the folder cannot be used.
    """
    options, path = plan.options, plan.options.nvme_path
    if path is None:
        return plan, None
    if not any(row.uses_nvme for row in plan.configurations):
        if not options.quiet:
            name = options.spelling_of("nvme_path")
            terminal.print_text(f"note: {name} has no effect: no row offloads to NVMe", sys.stderr)
        return plan, None
    folder = disk.check_nvme_folder(path)
    if options.family == "offload" and options.strategies and "nvme" not in options.strategies:
        terminal.print_text("note: --nvme-path is given, so the nvme strategy is added", sys.stderr)
    return plan.map(
        lambda each: each.with_facts(nvme_caveat=folder.caveat, lack_of_space=disk.lack_of_space(path, each.model))
    ), folder


def print_notes(plan: RunPlan, arguments: Sequence[str]) -> None:
    """Print what the user must know before the run: notes on rows and files, resolved "auto" values, Nsight's command.

    The values are printed with ``--verbose``. Nsight's command is printed with ``--profile nsys``, which opens the
    windows that it records.
    """
    options = plan.options
    if not options.quiet:
        for line in dict.fromkeys([*plan.notes, *(line for each in plan.plans for line in each.lines)]):
            terminal.print_text(f"note: {terminal.escape_controls(line)}", sys.stderr)
        texts = []
        for configuration in plan.configurations if options.verbose else ():
            for path, value in configuration.resolved_values.items():
                shown = "DeepSpeed's default" if value is None else json.dumps(value)
                texts.append(f'{configuration.name}: {path} "auto" is {shown}')
        for text in dict.fromkeys(texts):  # points of a sweep may resolve to the same values
            terminal.print_text(terminal.escape_controls(text), sys.stderr)
    if "nsys" in options.inspection.profiles and (plan.placement.accelerator == "cuda" or options.dry_run):
        command = nsys_command(options.family, arguments, os.environ)
        if command is not None:
            terminal.print_text(f"note: to record the steps of --profile nsys:\n  {command}", sys.stderr)


def print_dry_run(plan: RunPlan, note: str | None = None) -> int:
    """Print a note, then each trial's configuration and command. Return exit code 0."""
    with terminal.ignoring_broken_pipe():
        if note is not None:
            terminal.print_text(f"# {note}\n")
        if plan.options.inspection.checkpoint and not any(each.facts.profile for each in plan.plans):
            terminal.print_text("# whether there is room for a checkpoint is checked when this is run\n")
        for trial in plan.trials:
            if trial.workload.script is None:
                heading = "# the command that --launcher deepspeed runs (TRIAL_FOLDER is made by the run):"
                command = launch_command(trial.placement, Path("TRIAL_FOLDER"))
                program = invocation.python(with_package=True)
            else:
                command = script_words(trial, Path("TRIAL_FOLDER", CONFIG_FILE), "TRIAL_FOLDER/output")
                heading, program = "# every rank:", shlex.quote(command[0])
            terminal.print_text(f"# {trial.trial_id}: {trial.workload.model}, {trial.configuration.label}")
            own = {**trial.configuration.workload_changes, **trial.configuration.variables}
            if own:
                terminal.print_text(f"# sets {', '.join(f'{name}={value}' for name, value in own.items())}")
            if trial.unsupported:
                terminal.print_text(f"# Unsupported: {trial.unsupported}")
            terminal.print_json(json.dumps(trial.to_dict()["ds_config"], indent=2))
            terminal.print_text(heading)
            terminal.print_text(f"{program} {shlex.join(command[1:])}\n")
    return OK


def with_predictions(plan: RunPlan, machine: Machine) -> RunPlan:
    """Return the run with the predicted memory of every trial; points with the same model share its profile."""
    memory = trial_predictions.MemoryCapacity.from_environment(machine.environment, plan.placement)
    profiles: dict[tuple[object, ...], ModelProfile | trial_predictions.Unpredicted] = {}
    variants: dict[tuple[object, ...], list[Variant]] = {}

    def key_of(each: Plan) -> tuple[object, ...]:
        options, length = each.options, each.trials[0].workload.seq_length
        return each.model.name, options.trust_remote_code, length, options.dropout, options.lora, options.freeze

    for each in plan.plans if plan.options.own_script is None else ():
        variants.setdefault(key_of(each), []).extend(
            variant_of(trial.workload, trial.ds_config, trial.configuration.engine)
            for trial in each.trials
            if not trial.unsupported
        )

    def predict(each: Plan) -> Plan:
        if each.options.own_script is not None:  # nobody knows its model before it runs
            return each.with_facts(memory=memory)
        options, length, key = each.options, each.trials[0].workload.seq_length, key_of(each)
        if key not in profiles:  # immediate for a preset, otherwise measured by a child process
            profiles[key] = trial_predictions.profile_model(
                each.model,
                length,
                each.placement.accelerator,
                dropout=options.dropout,
                variants=variants[key],
                trust_remote_code=options.trust_remote_code,
                environment=plan.variables,
                choice=trained_parameters.of_workload(each.trials[0].workload),
            )
        return each.with_facts(profile=profiles[key], memory=memory)

    return plan.map(predict)


def require_ready(plan: RunPlan, machine: Machine, nvme_folder: disk.NvmeFolder | None, hosts: Hosts | None) -> None:
    """Check what could stop the run on this machine, or on every host of a multi-host job, and print warnings.

    Raises PreflightError for a problem.
    """
    predicted_host_bytes = trial_predictions.peak_host_bytes(plan.trials)
    if not plan.options.force:
        trial_predictions.require_host_memory(plan.trials, plan.plans[0].facts.memory.node_bytes)
    _check_room_for_checkpoints(plan)
    if hosts is not None:
        # This machine is not checked itself: it need not be among the hosts.
        findings = host_checks.check_hosts(
            hosts, plan.placement, plan.configurations, machine.environment, predicted_host_bytes
        )
        doctor.require_ready(findings, sys.stderr, quiet=plan.options.quiet, hostfile=plan.placement.hostfile)
        host_checks.require_connections(hosts, plan.placement)
        return
    findings = doctor.run_plan_checks(
        plan.placement,
        plan.configurations,
        lacks_space=next((each.facts.lack_of_space for each in plan.plans if each.facts.lack_of_space), None),
        nvme_folder=nvme_folder,
        need_host_bytes=predicted_host_bytes,
        system=SystemAccess(environ=machine.variables, read_gpus=lambda: machine.gpus),
        interpreter=machine.interpreter,
    )
    doctor.require_ready(findings, sys.stderr, quiet=plan.options.quiet)


def _check_room_for_checkpoints(plan: RunPlan) -> None:
    """Raise PreflightError if the folder for requested checkpoints has no room for them."""
    if plan.options.inspection.checkpoint:
        profiles = [each.facts.profile for each in plan.plans if isinstance(each.facts.profile, ModelProfile)]
        disk.check_checkpoint_folder(plan.options.inspection.checkpoint_path, profiles, plan.trials)


# ------------------------------------------------------------------ the run


@dataclass(slots=True)
class ComparisonRun:
    """A run that passed its checks: launches the trials, saves each as it ends, and reports."""

    plan: RunPlan
    machine: Machine
    store: RunFolder
    arguments: Sequence[str]
    recipe: Mapping[str, Any] | None
    hosts: Hosts | None
    notes: list[str]
    saved: dict[str, Any] = field(default_factory=dict)
    """The values of run.json."""

    def run(self) -> int:
        """Launch the trials that are left, and report all. Return the exit code."""
        options, store = self.plan.options, self.store
        line = terminal.StatusLine(sys.stderr, quiet=options.quiet)
        launcher = self._prepare_launcher(line)
        searches = any(each.options.searches_size for each in self.plan.plans)
        # A search takes a long time and may be interrupted: --resume needs the file even before it.
        self._save_run([] if searches else self.plan.trials_by_row)
        if searches:
            self._search_sizes(launcher, line.say)
        remaining = remaining_trials(self.plan.trials, store.counted_records())
        results = ResultBuilder(self.plan, self.machine.environment, store.folder.name)
        for record in store.records():
            results.add(record)
        progress = ProgressReporter(line, remaining, options.repeats, verbose=options.verbose)
        failure: OSError | None = None
        interrupted = False
        begun = time.monotonic()
        with line:
            try:
                while remaining:
                    if options.budget is not None and time.monotonic() - begun > options.budget * 60:
                        rows = dict.fromkeys(
                            " at ".join(filter(None, [each.configuration.label, point_text(each.point)]))
                            for each in remaining
                        )
                        left = f"{format_items(len(remaining), 'trial')} left"
                        line.say(f"--budget {options.budget:g} is used up; --resume RUN_DIR runs the {left}:")
                        line.say(f"  {format_names(rows, 10, '; ')}")
                        break
                    # Signals do not raise here: a launcher lets them raise while it waits, and records that.
                    trial = remaining.pop(0)
                    listen = progress.begin(trial)
                    if reason := trial.unsupported or trial.skipped:
                        status = schema.UNSUPPORTED if trial.unsupported else schema.SKIPPED
                        outcome = Outcome(status=status, error=reason, details=reason)
                        record = TrialRecord(trial=trial, outcome=outcome, caveats=trial.caveats)
                    else:
                        record = launcher.launch(trial, store.trial_folder(trial.trial_id), listen)
                    self._keep(results.with_savings(record, lacked_memory=False), results)
                    # After every trial, since a killed run gets no chance to write them at the end.
                    store.write_rows(rows_of(results.runs), options.csv)
                    progress.end(record)
                    if record.trial.prediction and remedies.lacks_room(record):
                        # A second record, as judging the changes that may help takes seconds.
                        self._keep(results.with_savings(record, lacked_memory=True), results)
                    remaining = refuse_unresolved(record, remaining)
                    # A signal that came after the end of the trial is in no record.
                    if record.outcome.status == schema.INTERRUPTED or processes.interrupt_requested():
                        break
                    if largest_batch_search.is_too_large(record):
                        row, status = record.trial.configuration.label, record.outcome.status
                        line.say(f"{row} ended with {status} at its largest size: trying a smaller one")
                        # Without trials in the file, --resume goes on with the search if the run is killed during it.
                        self._save_run([])
                        try:
                            self._search_sizes(launcher, line.say)
                        except KeyboardInterrupt:
                            interrupted = True  # the rows that have finished are shown all the same
                            break
                        remaining = remaining_trials(self.plan.trials, store.counted_records())
                        results.plan = self.plan
                        for record in store.records():  # the search may have renewed their caveats
                            results.add(record)
                        progress.replan(len(remaining))
            except OSError as error:  # such as a full disk: no further trial can be kept
                failure = error
        code = self._finish(results, failure)
        if interrupted and code != INTERRUPTED_CODE:
            raise KeyboardInterrupt
        return code

    def _keep(self, record: TrialRecord, results: ResultBuilder) -> None:
        """Append a record to the run's file, and make it a result."""
        self.store.append(record)
        # As it is read from the folder, so that this report and a later one of the same files agree.
        if (read := self.store.as_read(record)) is not None:
            results.add(read)

    def _prepare_launcher(self, line: terminal.StatusLine) -> Launcher:
        """Build DeepSpeed's ops, complete the plan with their states, and choose the launcher."""
        plan, options = self.plan, self.plan.options
        with processes.raising_on_interrupt(), line:
            # Before the first trial: a build takes minutes, which would count as part of what is measured.
            if self.hosts is None:
                python = None if self.machine.interpreter is None else self.machine.interpreter.python
                states = rank_environment.build_ops(
                    plan.placement, plan.configurations, plan.variables, line.say, line.show, python
                )
            else:
                states = host_checks.build_ops(self.hosts, plan.placement, plan.configurations, line.say)
        # Only the ops that are built: loading another one in the preloaded process would build it.
        ready = {"DS_BENCH_PRELOAD_OPS": ",".join(op for op, state in states.items() if state.ready)}
        plan = replace(plan.map(lambda each: each.with_facts(op_states=states)), variables={**plan.variables, **ready})
        with processes.raising_on_interrupt():
            if forks_ranks(plan.placement, plan.trials):
                for module in _MODULES_FOR_RESULTS:
                    importlib.import_module(module)
            launcher, why_cold = choose_launcher(
                options.launcher,
                plan.placement,
                plan.variables,
                Limits(timeout_seconds=options.timeout, stall_timeout_seconds=options.stall_timeout),
                plan.trials,
                tuple(gpu.index for gpu in self.machine.environment.gpus),
                line.say,
                self.hosts,
            )
        self.plan = plan
        self.notes += [why_cold] if why_cold else []
        return launcher

    def _search_sizes(self, launcher: Launcher, say: Callable[[str], None]) -> None:
        """Plan points with a search, every row at its largest micro-batch or longest sequence, and save the plan."""
        plans = []
        for each in self.plan.plans:
            if each.options.searches_size and each.options.point_text:
                say(f"{each.options.point_text}:")
            search = each.options.searches_size
            plans.append(largest_batch_search.at_largest_size(each, launcher, self.store, say) if search else each)
        self.plan = replace(self.plan, plans=RunPlan.of(plans, self.plan.variables).plans)
        self._save_run(self.plan.trials_by_row)

    def _save_run(self, trials: Sequence[Trial]) -> None:
        """Write ``run.json``; without trials while their sizes are being searched for."""
        options = self.plan.options
        folder = self.saved.get("folder") or (
            str(Path.cwd()) if options.resume is None else self.store.load_run().folder
        )
        self.saved = {
            "ds_bench_version": __version__,
            "family": options.family,
            "arguments": list(self.arguments),
            "folder": folder,
            **({} if self.recipe is None else {"recipe": self.recipe}),
            **({} if options.shard is None else {"shard": asdict(options.shard)}),
            "environment": self.machine.environment.to_dict(),
            "notes": list(self.notes),
            "trials": [{"key": work_key(trial), **trial.to_dict()} for trial in trials],
        }
        self.store.save_run(self.saved)

    def _finish(self, results: ResultBuilder, failure: OSError | UsageError | None) -> int:
        """Write and print the results. Return the exit code.

        ``failure``: what kept a trial's files from being written. Raises DsBenchError for it, and for a failure to
        write the results or to export a configuration, after the available results have been printed.
        """
        options, store, notes = self.plan.options, self.store, self.notes
        points, runs = results.points, results.runs
        rows = rows_of(runs)
        removed = not (store.folder / RUN_FILE).is_file()
        try:
            store.write_rows(rows, options.csv)
        except OSError as error:
            failure = failure or error
        if (gpu := results.gpu_without_peak) is not None:
            notes = [*notes, f"no peak rate known for {gpu}: MFU left out; --peak-tflops gives it"]
        resume = provenance.resume_command(options, store.folder)
        reports: list[tuple[Plan, ComparisonReport]] = []
        for plan, own in points:
            # An interruption may have come before the baseline row.
            has_baseline = any(run.trial.configuration.name == plan.options.relative_to for run in own)
            report = build_report(
                own,
                goal=plan.options.goal,
                relative_to=plan.options.relative_to if has_baseline else None,
                notes=notes,
                commands=[provenance.command(options.family, self.arguments)],
                environments=[self.machine.environment],
                resume=resume,
            )
            reports.append((plan, report))
        exported: list[tuple[ComparisonRow, Path]] = []
        try:
            exported = [] if removed else self._write_recommendations(reports)
        except (OSError, UsageError) as error:
            failure = failure or error
        shown = [report for _, report in reports]
        # A short answer names the files; after any other output, they get lines of their own.
        is_short = options.format == "table" and not options.verbose and len(shown) == 1 and not has_passes(shown)
        in_answer = is_short and not removed
        if in_answer and not options.quiet:
            page_command = f"{self._report_command()} --html report.html"
            shown = [replace(shown[0], files=self._files_text(exported), page_command=page_command)]
        with terminal.ignoring_broken_pipe():  # last: standard output may be gone
            if options.format == "json":
                recommendations = (
                    report.recommendation.to_dict() for report, (_, own) in zip(shown, points, strict=True) for _ in own
                )
                advised = [{**row, "recommendation": each} for row, each in zip(rows, recommendations, strict=True)]
                terminal.print_json(json_text(advised).rstrip())
            else:
                as_markdown = options.format == "markdown"
                print_reports(shown, sys.stdout, as_markdown=as_markdown, verbose=options.verbose, in_short=True)
        if isinstance(failure, OSError):
            remedy = files.remedy_of(failure) if removed else f"finished trials are kept; make room, then: {resume}"
            raise ResultsNotWrittenError(f"not every file could be written: {failure}", remedy=remedy)
        if failure is not None:
            raise failure
        code = exit_code(options, runs)
        if not options.quiet:
            if not in_answer:
                terminal.print_text(f"  Files:  {self._files_text(exported)}", sys.stderr)
                terminal.print_text(f"  Report: {self._report_command()}", sys.stderr)
                terminal.print_text(f"  Page:   {self._report_command()} --html report.html", sys.stderr)
            if line := profile_files_line(runs, store.folder):
                terminal.print_text(f"  {line}", sys.stderr)
            for row, path in exported:
                if row.trial.workload.script is not None:
                    command = exported_configuration.training_command(row.trial, path / exported_configuration.RAW_FILE)
                    terminal.print_text(f"  Train:  {command}", sys.stderr)
            if code == INTERRUPTED_CODE:
                # A signal that came after the last trial left nothing undone.
                then = "every trial had finished" if is_finished(store.folder) else f"continue with: {resume}"
                terminal.print_text(f"interrupted; {then}", sys.stderr)
        return code

    def _write_recommendations(
        self, reports: Sequence[tuple[Plan, ComparisonReport]]
    ) -> list[tuple[ComparisonRow, Path]]:
        """Write the run's recommendation and the configurations to use. Return the rows and folders of these."""
        exported = []
        for plan, report in reports:
            folder = self.store.folder
            if plan.options.point:  # in a sweep, a folder for each point
                name = "_".join(str(value) for _, value in plan.options.point)
                # At most 100 characters, since file systems allow 255 bytes. A dot in front would hide the folder or
                # name a parent.
                plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:100].lstrip(".")
                if plain != name:  # two names must not become one
                    plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
                folder = folder / "points" / plain
            # None: no row is recommended, or the run was interrupted before the row of --export.
            if (row := exported_configuration.exported_row(plan.options, report)) is not None:
                environment = self.machine.environment
                path = exported_configuration.write_configuration(plan.options, report, row, folder, environment)
                exported.append((row, path))
        values = [{"point": dict(plan.options.point), **report.recommendation.to_dict()} for plan, report in reports]
        if len(reports) == 1 and not reports[0][0].options.point:
            recommendation = reports[0][1].recommendation.to_dict()
        else:
            recommendation = {"points": values}
        self.store.save_run({**self.saved, "recommendation": recommendation})
        for path in (self.store.folder / "recommendation.json", self.store.recommendation_path):
            write_json(path, recommendation)
        return exported

    def _files_text(self, exported: Sequence[tuple[ComparisonRow, Path]]) -> str:
        """Where the files of the results are. ``exported``: from :meth:`_write_recommendations`."""
        options, store = self.plan.options, self.store
        inside = dict.fromkeys(folder.relative_to(store.folder).parts[0] for _, folder in exported)
        configurations = f" (to train: its {', '.join(inside)}/README.md)" if inside and not options.point else ""
        also = "" if options.csv is None else f", {options.csv}"
        return f"{store.folder}{configurations}, {store.json_path} and .csv{also}"

    def _report_command(self) -> str:
        """The command that shows the run again."""
        shard, folder = self.plan.options.shard, self.store.folder
        runs = shlex.quote(str(folder)) if shard is None else f"{shlex.quote(str(folder.parent))}/*of{shard.count}"
        return f"{invocation.program()} report {runs}"


def exit_code(options: Options, runs: Sequence[Run]) -> int:
    """0 if a row succeeded, 1 if none did, 130 if interrupted; with --strict, 1 if any failed."""
    outcomes = [run.outcome for run in runs]
    if processes.interrupt_requested() or any(outcome.status == schema.INTERRUPTED for outcome in outcomes):
        return INTERRUPTED_CODE
    if options.strict and not all(outcome.success for outcome in outcomes):
        return NONE_SUCCEEDED
    return OK if any(outcome.success for outcome in outcomes) else NONE_SUCCEEDED


class ResultBuilder:
    """Computes the numbers from a run's records, with what only the run knows: models, device, environment.

    A record replaces an earlier one of its trial.
    """

    def __init__(self, plan: RunPlan, environment: Environment, run_id: str) -> None:
        self.plan, self._environment, self._run_id = plan, environment, run_id
        gpus = environment.gpus[: plan.placement.num_gpus] if plan.placement.accelerator == "cuda" else ()
        self._gpu_names = tuple(gpu.name or "unnamed" for gpu in gpus)
        self._short_rows: set[str] = set()
        self._run_of_key: dict[str, Run] = {}

    def add(self, record: TrialRecord) -> None:
        """Add the record of a trial, as it is read from the run's folder."""
        from .analysis.row import make_run  # here, as pydantic takes longer to import than everything else

        facts = self._plan_of(record.trial).model.facts
        peak_flops = self._peak_flops(flops.peak_precision(record))
        self._run_of_key[work_key(record.trial)] = make_run(record, facts, peak_flops, self._environment, self._run_id)

    @property
    def gpu_without_peak(self) -> str | None:
        """Name of a GPU whose peak rate is unknown, so that MFU is left out; None if it is known, and on a CPU."""
        precision = self.plan.plans[0].trials[0].workload.precision
        return None if self._peak_flops(precision) else " + ".join(sorted(set(self._gpu_names))) or None

    def with_savings(self, record: TrialRecord, *, lacked_memory: bool) -> TrialRecord:
        """Return a record with the memory that changes to its trial would save.

        ``lacked_memory``: whether the trial lacked memory; if so, the record also says which configurations would fit.
        """
        trial, plan = record.trial, self._plan_of(record.trial)
        if lacked_memory:
            self._short_rows.add(row_key(trial))
        changed = trial_predictions.with_savings(
            trial,
            plan.facts.profile,
            plan.model.hidden_size,
            plan.facts.memory.gpu_bytes,
            lacked_memory=lacked_memory,
            replays="near" if len(self._short_rows) <= remedies.MAX_ROWS else "never",
        )
        return replace(record, trial=changed)

    def _plan_of(self, trial: Trial) -> Plan:
        """Return the plan of the trial's point; the first one for a point that an earlier run of the folder had."""
        of_point = (each for each in self.plan.plans if dict(each.options.point) == trial.point)
        return next(of_point, self.plan.plans[0])

    @property
    def runs(self) -> list[Run]:
        """Figures of each trial that has a record, point by point, in the order of the plan.

        Trials that an earlier run of the folder made, and this one does not request, come last in their point.
        """
        return [run for _, runs in self.points for run in runs]

    @property
    def points(self) -> list[tuple[Plan, list[Run]]]:
        """The plan of each point that has records, and the figures of its trials."""
        left = dict(self._run_of_key)
        of_plan = {
            id(plan): [left.pop(work_key(trial)) for trial in plan.trials if work_key(trial) in left]
            for plan in self.plan.plans
        }
        for run in left.values():
            of_plan[id(self._plan_of(run.trial))].append(run)
        found = [(plan, of_plan[id(plan)]) for plan in self.plan.plans if of_plan[id(plan)]]
        # An interruption may come before the first record; a report is made nevertheless.
        return found or [(self.plan.plans[0], [])]

    def _peak_flops(self, precision: str) -> float | None:
        """Return peak FLOP/s of one device in that precision; None if it is unknown."""
        if self.plan.options.peak_tflops:
            return self.plan.options.peak_tflops * 1e12
        return flops.mean_peak_flops(self._gpu_names, precision)
