"""One comparison from Options to exit code: plan, check, launch, save, report."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__, size_search
from .analysis import flops, provenance
from .analysis.comparison import rows_of
from .config.deepspeed_config import MakeConfig
from .config.identity import work_key
from .config.options import Options
from .config.spec import Trial, point_text
from .doctor import checks as doctor
from .doctor import disk
from .doctor import hosts as host_checks
from .doctor.findings import SystemAccess
from .errors import PreflightError, ResultsNotWrittenError, UsageError
from .launch import Launcher, Limits, ProgressCallback, rank_environment
from .launch.deepspeed import launch_command
from .launch.hosts import Hosts
from .launch.scratch import remove_abandoned
from .launch.warm import choose_launcher
from .planner import Plan, RunPlan, make_run_plan
from .prediction import trial_predictions
from .prediction.model_profile import ModelProfile, variant_of
from .records import schema
from .records.json_files import json_text, write_json
from .records.run_folder import (
    RUN_FILE,
    RunFolder,
    is_finished,
    remaining_trials,
    require_same_machine,
    require_same_workload,
)
from .records.schema import Outcome, TrialRecord
from .report import configuration_export, profile_text, run_plan
from .report.comparison_report import ComparisonReport, build_report
from .report.progress import ProgressReporter
from .report.terminal_report import print_reports
from .system import device_locks, files, invocation, signals, terminal
from .system.environment import Environment, Machine, read_machine, require_installed, require_packages
from .units import format_items, format_names

if TYPE_CHECKING:
    from .analysis.row import Run

OK, NONE_SUCCEEDED, INTERRUPTED_CODE = 0, 1, 130
_FIELDS_SET_BY_SEARCH = ("batch_size", "batch_policy", "seq_length", "seq_policy")
"""Fields of a workload that ``--batch-size auto`` and ``--seq-length auto`` decide."""

Observe = Callable[[Trial], ProgressCallback]
"""Called as a trial begins; what it returns is called with the trial's progress."""


def run_comparison(
    points: Sequence[Options],
    make_config: MakeConfig,
    arguments: Sequence[str],
    recipe: Mapping[str, Any] | None = None,
    begun: Callable[[Path], None] = lambda _folder: None,
) -> int:
    """Plans, checks, runs, saves and reports one comparison of each point. Returns the exit code.

    ``points``: one, or the points of a sweep. ``recipe``: what run.json keeps of the recipe; None for a script.
    ``begun``: called with the run's folder as soon as there is one. Raises DsBenchError for whatever the user can mend,
    before any work.
    """
    options = points[0]
    require_packages_of(options)
    with signals.handling_signals():
        try:
            with signals.raising_on_interrupt():
                # A file that cannot be written is reported before hours of trials, not after them.
                if not (options.dry_run or options.resume):
                    files.require_writable(options.output_dir, "--output-dir", files.FIRST_FILES_BYTES)
                    require_writable_csv(options.csv)
                machine = read_machine()
                if options.resume is not None:  # before anything that the folder names is looked at
                    require_same_machine(RunFolder.open(options.resume), machine.environment)
                plan, nvme_folder = with_nvme_folder(make_run_plan(points, make_config, machine))
                _require_resumable(plan)
                print_file_lines(plan)
                if options.dry_run and options.inspection.checkpoint:
                    disk.require_checkpoint_folder(options.inspection.checkpoint_path, plan.trials)
            print_nsys_command(plan, arguments)
            # A recipe's dry run goes on: its table shows predicted memory.
            if options.dry_run and recipe is None:
                return print_dry_run(plan)
            # Shared memory that killed runs left is freed before the checks look at the memory that is free.
            remove_abandoned()
            with contextlib.ExitStack() as stack:
                with signals.raising_on_interrupt():
                    hosts, machine = stack.enter_context(connected_hosts(plan, machine))
                    plan = with_predictions(plan, machine)
                    if recipe is not None:
                        print_plan(plan)
                    if options.dry_run:
                        _check_room_for_checkpoints(plan)
                        return print_dry_run(plan) if options.verbose else OK
                # Locks come before the checks, which would find a card in use by the run that is waited for.
                machine, notes = stack.enter_context(_devices_of_run(plan, machine, hosts))
                with signals.raising_on_interrupt():
                    require_ready(plan, machine, nvme_folder, hosts)
                # Only after the checks: a run that is refused leaves no empty folder.
                store = _open_folder(options)
                begun(store.folder)
                notes += [note] if (note := stack.enter_context(store.locked())) else []
                try:
                    return _run_plan(plan, machine, store, _Request(arguments=arguments, recipe=recipe), notes, hosts)
                except KeyboardInterrupt:
                    # Without this file --resume has nothing to go on with.
                    if (store.folder / RUN_FILE).exists():
                        terminal.print_text(
                            f"go on with: {provenance.resume_command(options, store.folder)}", sys.stderr
                        )
                    raise
        except KeyboardInterrupt:  # before the first trial
            terminal.print_text("interrupted", sys.stderr)
            return INTERRUPTED_CODE


@contextlib.contextmanager
def connected_hosts(plan: RunPlan, machine: Machine) -> Iterator[tuple[Hosts | None, Machine]]:
    """Connections to the hosts of a job on several, and the machine with their environments; None without a hostfile,
    and on ``--dry-run``, which reaches no host.

    Raises PreflightError for a host that cannot be used or differs, UsageError if ``--resume`` began on others.
    """
    if plan.options.dry_run or not plan.placement.hosts:
        yield None, machine
        return
    with host_checks.connected_hosts(plan.placement) as hosts:
        environment = host_checks.environment_with_hosts(hosts, plan.placement, machine.environment)
        if plan.options.resume is not None:
            require_same_machine(RunFolder.open(plan.options.resume), environment)
        yield hosts, replace(machine, environment=environment)


@contextlib.contextmanager
def _devices_of_run(plan: RunPlan, machine: Machine, hosts: Hosts | None) -> Iterator[tuple[Machine, list[str]]]:
    """Holds the locks of the devices that the trials use, so that no other run disturbs them; waits for its end.

    Yields the machine, read again after a wait, and notes for the reader of the result.
    """
    line, placement = terminal.StatusLine(sys.stderr, quiet=plan.options.quiet), plan.placement
    with contextlib.ExitStack() as held:
        with signals.raising_on_interrupt():
            if hosts is not None:  # this one has an agent too, if it is among them
                with host_checks.naming_lost_host():
                    locks = hosts.lock_devices(placement, line.say)
            else:
                gpus = machine.environment.gpus
                names = device_locks.device_names(placement.accelerator, gpus, range(placement.num_gpus))
                locks = held.enter_context(device_locks.locked_devices(names, line.say))
            # The first reading shows the memory and the clocks that the other run caused.
            if locks.waited:
                machine = read_machine()
                if hosts is not None:
                    environment = host_checks.environment_with_hosts(hosts, placement, machine.environment)
                    machine = replace(machine, environment=environment)
        yield machine, [*plan.notes, *locks.notes]


def _open_folder(options: Options) -> RunFolder:
    """The folder of the run that is resumed, or a new one."""
    if options.resume is not None:
        return RunFolder.open(options.resume)
    suffix = "" if options.shard is None else options.shard.file_suffix
    return RunFolder.create(options.output_dir, options.family, suffix)


def require_packages_of(options: Options) -> None:
    """Raises PreflightError or UsageError for a package that is not installed and that these options need."""
    if not options.dry_run:
        require_packages("a run")
    if options.inspection.monitor == "tensorboard":
        require_installed("tensorboard", "--monitor tensorboard")


def _require_resumable(plan: RunPlan) -> None:
    """Raises UsageError if ``--resume`` names a run of another workload, or another shard of it."""
    if (folder := plan.options.resume) is not None:
        shards = RunFolder.open(folder).load_run().shard, plan.options.shard
        names = [f"shard {shard}" if shard else "no shard" for shard in shards]
        if names[0] != names[1]:
            raise UsageError(f"--resume {folder} is {names[0]}, not {names[1]}", remedy="leave --shard out")
        # The stored trials have the sizes that a search found, this plan still has stand-ins for them.
        left_out = _FIELDS_SET_BY_SEARCH if any(each.options.searches_size for each in plan.plans) else ()
        require_same_workload(RunFolder.open(folder), plan.trials, left_out)


def require_writable_csv(path: Path | None) -> None:
    """Raises PreflightError if the file for the rows, where one is asked for, cannot be written."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # The folder is tried, since the file is replaced by renaming one next to it (system.files.write_text).
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        problem = f"the rows cannot be written to {path}: {error.strerror or error}"
        raise PreflightError(problem, remedy="give a file in a folder that exists and that you may write to") from None


def with_nvme_folder(plan: RunPlan) -> tuple[RunPlan, disk.NvmeFolder | None]:
    """The run with what its folder for NVMe offload shows, and the folder; None where no row swaps to it.

    Raises PreflightError where the folder cannot be used.
    """
    options, path = plan.options, plan.options.nvme_path
    if path is None or not any(row.uses_nvme for row in plan.configurations):
        return plan, None
    folder = disk.check_nvme_folder(path)
    if options.family == "offload" and options.strategies and "nvme" not in options.strategies:
        terminal.print_text("note: --nvme-path is given, so the nvme strategy is added", sys.stderr)
    return plan.map(
        lambda each: each.with_facts(nvme_caveat=folder.caveat, lack_of_space=disk.lack_of_space(path, each.model))
    ), folder


def print_file_lines(plan: RunPlan) -> None:
    """Prints what the user must know about the files of ``--configs``; with ``--verbose`` every "auto" resolved."""
    if plan.options.quiet:
        return
    for line in dict.fromkeys([*plan.notes, *(line for each in plan.plans for line in each.lines)]):
        terminal.print_text(f"note: {terminal.escape_controls(line)}", sys.stderr)
    texts = []
    for configuration in plan.configurations if plan.options.verbose else ():
        for path, value in configuration.resolved_values.items():
            shown = "DeepSpeed's default" if value is None else json.dumps(value)
            texts.append(f'{configuration.name}: {path} "auto" is {shown}')
    for text in dict.fromkeys(texts):  # points of a sweep may resolve alike
        terminal.print_text(terminal.escape_controls(text), sys.stderr)


def print_nsys_command(plan: RunPlan, arguments: Sequence[str]) -> None:
    """Prints the command that makes Nsight Systems record the windows of a run that opens some."""
    inspection, cuda = plan.options.inspection, plan.placement.accelerator == "cuda"
    if "nsys" not in inspection.profiles or not (cuda or plan.options.dry_run):
        return
    command = profile_text.nsys_command(plan.options.family, arguments, os.environ)
    if command is not None:
        terminal.print_text(f"note: to record the steps of --profile nsys:\n  {command}", sys.stderr)


def print_dry_run(plan: RunPlan) -> int:
    """Prints each trial's configuration and command. Returns exit code 0."""
    with terminal.ignoring_broken_pipe():
        if plan.options.searches_size:
            what, stand_in = "--batch-size auto: each micro-batch", 1
            if plan.options.auto_seq:
                what, stand_in = "--seq-length auto: each sequence length", plan.trials[0].workload.seq_length
            terminal.print_text(f"# {what} is found by probes when this is run; {stand_in} stands for it here\n")
        if plan.options.inspection.checkpoint and not any(each.facts.profile for each in plan.plans):
            terminal.print_text("# whether there is room for a checkpoint is checked when this is run\n")
        for trial in plan.trials:
            command = launch_command(trial.placement, Path("TRIAL_FOLDER"))
            terminal.print_text(f"# {trial.trial_id}: {trial.configuration.label}")
            own = {**trial.configuration.workload_changes, **trial.configuration.variables}
            if own:
                terminal.print_text(f"# sets {', '.join(f'{name}={value}' for name, value in own.items())}")
            if trial.unsupported:
                terminal.print_text(f"# Unsupported: {trial.unsupported}")
            terminal.print_json(json.dumps(trial.to_dict()["ds_config"], indent=2))
            terminal.print_text("# the same ranks, started cold:")
            terminal.print_text(f"{invocation.python(with_package=True)} {shlex.join(command[1:])}\n")
    return OK


def with_predictions(plan: RunPlan, machine: Machine) -> RunPlan:
    """The run with the predicted memory of every trial; each model is profiled once for each sequence length."""
    memory = trial_predictions.MemoryCapacity.from_environment(machine.environment, plan.placement)
    profiles: dict[tuple[object, ...], ModelProfile | trial_predictions.Unpredicted] = {}

    def predict(each: Plan) -> Plan:
        key = each.model.name, each.options.trust_remote_code, each.trials[0].workload.seq_length, each.options.dropout
        if key not in profiles:
            profiles[key] = model_profile(each)
        return each.with_facts(profile=profiles[key], memory=memory)

    return plan.map(predict)


def print_plan(plan: RunPlan) -> None:
    """Prints the plan of a sweep, on ``--dry-run`` that of any recipe."""
    if plan.options.dry_run:
        terminal.print_text("\n".join(run_plan.plan_lines(plan, most=1000)))
    elif len(plan.plans) > 1 and not plan.options.quiet:
        terminal.print_text("\n".join(run_plan.plan_lines(plan, most=20)), sys.stderr)


def model_profile(plan: Plan) -> ModelProfile | trial_predictions.Unpredicted:
    """What predictions need of the plan's model: at once for a preset, else measured by a child process."""
    return trial_predictions.profile_model(
        plan.model,
        plan.trials[0].workload.seq_length,
        plan.placement.accelerator,
        dropout=plan.options.dropout,
        variants=[
            variant_of(trial.workload, trial.ds_config, trial.configuration.engine)
            for trial in plan.trials
            if not trial.unsupported
        ],
        trust_remote_code=plan.options.trust_remote_code,
        environment=plan.variables,
    )


def require_ready(
    plan: RunPlan, machine: Machine, nvme_folder: disk.NvmeFolder | None, hosts: Hosts | None = None
) -> None:
    """Checks what could stop the run on this machine, or on every host of several, and prints warnings.

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
    )
    doctor.require_ready(findings, sys.stderr, quiet=plan.options.quiet)


def _check_room_for_checkpoints(plan: RunPlan) -> None:
    """Raises PreflightError if the folder for checkpoints, where any are asked for, has no room for them."""
    if plan.options.inspection.checkpoint:
        profiles = [each.facts.profile for each in plan.plans if isinstance(each.facts.profile, ModelProfile)]
        disk.check_checkpoint_folder(plan.options.inspection.checkpoint_path, profiles, plan.trials)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The typed arguments, as run.json keeps them."""

    arguments: Sequence[str]
    recipe: Mapping[str, Any] | None


def _run_plan(
    plan: RunPlan, machine: Machine, store: RunFolder, request: _Request, notes: Sequence[str], hosts: Hosts | None
) -> int:
    """Builds ops, chooses the launcher, runs the trials that are left, and reports. Returns the exit code."""
    options = plan.options
    searches = any(each.options.searches_size for each in plan.plans)
    line = terminal.StatusLine(sys.stderr, quiet=options.quiet)
    with signals.raising_on_interrupt(), line:
        variables = plan.variables
        if hosts is None:
            # Before the first trial: a build takes minutes, which would count as part of what is measured.
            states = rank_environment.build_ops(plan.placement, plan.configurations, variables, line.say, line.show)
        else:
            states = host_checks.build_ops(hosts, plan.placement, plan.configurations, line.say)
        # Only the ops that are built: loading another one in the preloaded process would build it.
        ready = ",".join(op for op, state in states.items() if state.ready)
        plan = plan.map(lambda each: each.with_facts(op_states=states))
        plan = plan.map(lambda each: replace(each, variables={**each.variables, "DS_BENCH_PRELOAD_OPS": ready}))
    with signals.raising_on_interrupt():
        limits = Limits(timeout_seconds=options.timeout, stall_timeout_seconds=options.stall_timeout)
        launcher, why_cold = choose_launcher(
            options.launcher,
            plan.placement,
            plan.variables,
            limits,
            plan.trials,
            machine.visible_gpu_indices,
            line.say,
            hosts,
        )
    notes = [*notes, *([why_cold] if why_cold else [])]
    # A search takes long and may be interrupted: --resume needs the file before it too.
    saved = _save_run(store, plan, [] if searches else plan.trials, machine, request, notes)
    if searches:
        plan = _at_largest_size(plan, launcher, store, line.say)
        saved = _save_run(store, plan, plan.trials, machine, request, notes)
    records = store.records()
    remaining = remaining_trials(plan.trials, records, options.retry)
    results = ResultBuilder(plan, machine.environment, store.folder.name)
    for record in records:
        results.add(record)
    progress = ProgressReporter(line, remaining, options.repeats, verbose=options.verbose, point_of=results.point_text)
    within_budget = _until_budget_is_used(remaining, options.budget, line.say)
    failure: OSError | None = None
    stopped = False
    with line:
        try:
            # Signals do not raise here: a launcher lets them while it waits, and makes a record that is then saved.
            for record in run_trials(map(results.with_changes, within_budget), launcher, store, progress.begin):
                # As it is read from the folder, so that this report and a later one of the same files agree.
                if (read := store.as_read(record)) is not None:
                    results.add(read)
                # After every trial, since a killed run gets no chance to write them at the end.
                store.write_rows(rows_of(results.runs), options.csv)
                progress.end(record)
                if size_search.is_too_large(record) and not signals.interrupt_requested():
                    row, status = record.trial.configuration.label, record.outcome.status
                    line.say(f"{row} ended with {status} at its largest size: trying the next smaller")
                    # Without trials in the file, --resume goes on with the search if the run is killed during it.
                    saved = _save_run(store, plan, [], machine, request, notes)
                    try:
                        plan = _at_largest_size(plan, launcher, store, line.say)
                    except KeyboardInterrupt:
                        stopped = True  # the rows that have finished are shown all the same
                        break
                    saved = _save_run(store, plan, plan.trials, machine, request, notes)
                    waiting = [*remaining, *remaining_trials(plan.trials, store.records(), retry=())]
                    keys = {work_key(trial) for trial in waiting}
                    remaining[:] = [trial for trial in plan.trials if work_key(trial) in keys]
                    results.replan(plan)
                    progress.replan(len(remaining))
        except OSError as error:  # such as a full disk: no trial can be kept from here on, but those before are shown
            failure = error
    code = _finish(options, store, saved, results, notes, request, failure)
    if stopped and code != INTERRUPTED_CODE:
        raise KeyboardInterrupt
    return code


def _until_budget_is_used(remaining: list[Trial], minutes: float | None, say: Callable[[str], None]) -> Iterator[Trial]:
    """Take the trials off the list in order until they have taken that many minutes; list the rest."""
    begun = time.monotonic()
    while remaining:
        if minutes is not None and time.monotonic() - begun > minutes * 60:
            rows = dict.fromkeys(
                " at ".join(filter(None, [each.configuration.label, point_text(each.point)])) for each in remaining
            )
            left = format_items(len(remaining), "trial")
            say(f"--budget {minutes:g} is used up; --resume RUN_DIR runs the {left} left:")
            say(f"  {format_names(rows, 10, '; ')}")
            return
        yield remaining.pop(0)


def _at_largest_size(plan: RunPlan, launcher: Launcher, store: RunFolder, say: Callable[[str], None]) -> RunPlan:
    """The run with every point that asks for it at the largest micro-batch or longest sequence of each row."""
    plans = []
    for each in plan.plans:
        if each.options.searches_size and each.options.point_text:
            say(f"{each.options.point_text}:")
        search = each.options.searches_size
        plans.append(size_search.at_largest_size(each, launcher, store, say) if search else each)
    return replace(plan, plans=RunPlan.of(plans).plans)


def run_trials(
    trials: Iterable[Trial], launcher: Launcher, store: RunFolder, observe: Observe
) -> Iterator[TrialRecord]:
    """Runs the trials in order, each saved before it is yielded. Ends early after an interruption."""
    for trial in trials:
        listen = observe(trial)
        if trial.not_launched:
            finished = _record_without_launch(trial)
        else:
            finished = launcher.launch(trial, store.trial_folder(trial.trial_id), listen)
        store.append(finished)
        yield finished
        # A signal that came after the end of the trial is in no record.
        if finished.outcome.status == schema.INTERRUPTED or signals.interrupt_requested():
            return


def _record_without_launch(trial: Trial) -> TrialRecord:
    reason = trial.unsupported or trial.skipped
    status = schema.UNSUPPORTED if trial.unsupported else schema.SKIPPED
    outcome = Outcome(status=status, error=reason, details=reason)
    return TrialRecord(trial=trial, outcome=outcome, caveats=trial.caveats)


def _save_run(
    store: RunFolder,
    plan: RunPlan,
    trials: Sequence[Trial],
    machine: Machine,
    request: _Request,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Writes ``run.json``; ``trials`` are none while their micro-batches are being searched for. Returns its values."""
    values = {
        "ds_bench_version": __version__,
        "family": plan.options.family,
        "arguments": list(request.arguments),
        "folder": str(Path.cwd()) if plan.options.resume is None else store.load_run().folder,
        **({} if request.recipe is None else {"recipe": request.recipe}),
        **({} if (shard := plan.options.shard) is None else {"shard": asdict(shard)}),
        "environment": machine.environment.to_dict(),
        "notes": list(notes),
        "trials": [{"key": work_key(trial), **trial.to_dict()} for trial in trials],
    }
    store.save_run(values)
    return values


class ResultBuilder:
    """Makes the runs and the reports of a run's records, with what only the run knows: models, device, environment.

    A record that is added takes the place of an earlier one of its trial.
    """

    def __init__(self, plan: RunPlan, environment: Environment, run_id: str) -> None:
        self._plan, self.environment, self._run_id = plan, environment, run_id
        gpus = environment.gpus if plan.placement.accelerator == "cuda" else ()
        self._gpu_name = gpus[0].name if gpus else None
        self._predictor = trial_predictions.ChangePredictor()
        self._plan_of_key = {work_key(trial): each for each in plan.plans for trial in each.trials}
        self._run_of_key: dict[str, Run] = {}

    def add(self, record: TrialRecord) -> None:
        """Adds the record of a trial, as it is read from the run's folder."""
        from .analysis.row import make_run  # here, as pydantic takes longer to import than all else

        facts = self._plan_of(record.trial).model.facts
        peak_flops = self._peak_flops(flops.peak_precision(record))
        self._run_of_key[work_key(record.trial)] = make_run(record, facts, peak_flops, self.environment, self._run_id)

    def replan(self, plan: RunPlan) -> None:
        """Take a plan of the same points with other trials; earlier records stay with their points."""
        index = {id(each): number for number, each in enumerate(self._plan.plans)}
        self._plan_of_key = {key: plan.plans[index[id(each)]] for key, each in self._plan_of_key.items()}
        self._plan_of_key |= {work_key(trial): each for each in plan.plans for trial in each.trials}
        self._plan = plan

    @property
    def gpu_without_peak(self) -> str | None:
        """Name of a GPU whose peak rate is unknown, so that MFU is left out; None where it is known, and on a CPU."""
        precision = self._plan.plans[0].trials[0].workload.precision
        return None if self._peak_flops(precision) else self._gpu_name

    def point_text(self, trial: Trial) -> str:
        """The values of the point that a trial belongs to; empty without a sweep."""
        return self._plan_of(trial).options.point_text

    def with_changes(self, trial: Trial) -> Trial:
        """A trial that is about to run, with what other configurations of its work would need."""
        plan = self._plan_of(trial)
        return self._predictor.complete(trial, plan.facts.profile, plan.model.hidden_size)

    def _plan_of(self, trial: Trial) -> Plan:
        """The plan of a trial; of one that an earlier run of the folder made and this one does not ask for, the plan
        of its workload, or the first."""
        planned = self._plan_of_key.get(work_key(trial))
        if planned is not None:
            return planned
        same = (each for each in self._plan.plans if each.trials[0].workload == trial.workload)
        return next(same, self._plan.plans[0])

    @property
    def runs(self) -> list[Run]:
        """Numbers of each trial that has a record, point by point, in the order of the plan; then those of trials that
        an earlier run of the folder made and this one does not ask for."""
        return [run for _, runs in self.points for run in runs]

    @property
    def points(self) -> list[tuple[Plan, list[Run]]]:
        """The plan of each point that has records, and their numbers."""
        left = dict(self._run_of_key)
        of_plan = {
            id(plan): [left.pop(work_key(trial)) for trial in plan.trials if work_key(trial) in left]
            for plan in self._plan.plans
        }
        for run in left.values():
            of_plan[id(self._plan_of(run.trial))].append(run)
        found = [(plan, of_plan[id(plan)]) for plan in self._plan.plans if of_plan[id(plan)]]
        # An interruption may come before the first record; a report is made nevertheless.
        return found or [(self._plan.plans[0], [])]

    def build_report(
        self, plan: Plan, runs: Sequence[Run], notes: Sequence[str], command: str, resume: str
    ) -> ComparisonReport:
        """Comparison and recommendation of the runs of one point. ``resume``: the command that adds runs."""
        baseline = plan.options.relative_to
        if not any(run.trial.configuration.name == baseline for run in runs):
            baseline = None  # an interruption came before that row
        return build_report(
            runs,
            goal=plan.options.goal,
            relative_to=baseline,
            notes=notes,
            commands=[command],
            environments=[self.environment],
            resume=resume,
        )

    def _peak_flops(self, precision: str) -> float | None:
        """Peak FLOP/s of one device in that precision; None where it is unknown."""
        if self._plan.options.peak_tflops:
            return self._plan.options.peak_tflops * 1e12
        return flops.peak_flops(self._gpu_name, precision) if self._gpu_name else None


def _finish(
    options: Options,
    store: RunFolder,
    saved: Mapping[str, Any],
    results: ResultBuilder,
    notes: Sequence[str],
    request: _Request,
    failure: OSError | UsageError | None,
) -> int:
    """Writes and prints the results. Returns the exit code.

    ``saved``: the values of run.json. ``failure``: what kept a trial's files from being written. Raises DsBenchError
    for it, and for a failure to write the results or to export a configuration, after what there is has been printed.
    """
    points, runs = results.points, results.runs
    rows = rows_of(runs)
    removed = not (store.folder / RUN_FILE).is_file()
    try:
        store.write_rows(rows, options.csv)
    except OSError as error:
        failure = failure or error
    if (gpu := results.gpu_without_peak) is not None:
        notes = [*notes, f"no peak rate known for {gpu}: MFU left out; --peak-tflops gives it"]
    command = provenance.command(options.family, request.arguments)
    resume = provenance.resume_command(options, store.folder)
    reports = [(plan, results.build_report(plan, own, notes, command, resume)) for plan, own in points]
    folders: list[Path] = []
    try:
        folders = [] if removed else _write_recommendations(reports, store, saved, results.environment)
    except (OSError, UsageError) as error:
        failure = failure or error
    shown = [report for _, report in reports]
    with terminal.ignoring_broken_pipe():  # last: standard output may be gone
        if options.format == "json":
            of_rows = [
                report.recommendation.to_dict() for report, (_, own) in zip(shown, points, strict=True) for _ in own
            ]
            with_advice = [{**row, "recommendation": of_row} for row, of_row in zip(rows, of_rows, strict=True)]
            terminal.print_json(json_text(with_advice).rstrip())
        else:
            as_markdown = options.format == "markdown"
            print_reports(shown, sys.stdout, as_markdown=as_markdown, verbose=options.verbose, in_short=True)
    if isinstance(failure, OSError):
        remedy = f"what had finished is kept; make room, then: {resume}"
        if removed:
            remedy = files.remedy_of(failure)
        raise ResultsNotWrittenError(f"not every file could be written: {failure}", remedy=remedy)
    if failure is not None:
        raise failure
    if not options.quiet:
        _print_places(options, store, folders, runs)
    code = exit_code(options, runs)
    if code == INTERRUPTED_CODE and not options.quiet:
        # A signal that came after the last trial left nothing undone.
        then = "every trial had finished" if is_finished(store.folder) else f"go on with: {resume}"
        terminal.print_text(f"interrupted; {then}", sys.stderr)
    return code


def _write_recommendations(
    reports: Sequence[tuple[Plan, ComparisonReport]],
    store: RunFolder,
    saved: Mapping[str, Any],
    environment: Environment,
) -> list[Path]:
    """Writes the recommendation of the run and the recommended configurations. Returns the folders of these.

    ``saved``: the values of run.json, which gets the recommendation too.
    """
    folders = [folder for plan, report in reports if (folder := _write_point(plan, report, store, environment))]
    recommendation = _recommendation_values(reports)
    store.save_run({**saved, "recommendation": recommendation})
    for path in (store.folder / "recommendation.json", store.recommendation_path):
        write_json(path, recommendation)
    return folders


def _print_places(options: Options, store: RunFolder, folders: Sequence[Path], runs: Sequence[Run]) -> None:
    """Prints where the recommended configurations and the files of the results are."""
    for folder in dict.fromkeys(store.folder / "points" if options.point else folder for folder in folders):
        terminal.print_text(f"  Config: {folder}", sys.stderr)
    shown = shlex.quote(str(store.folder))
    if options.shard is not None:
        shown = f"{shlex.quote(str(store.folder.parent))}/*of{options.shard.count}"
    report_command = f"{invocation.program()} report {shown} --html r.html"
    also = "" if options.csv is None else f", {options.csv}"
    terminal.print_text(f"  Report: {report_command}\n  Files:  {store.json_path} and .csv{also}", sys.stderr)
    if line := profile_text.files_line(runs, store.folder):
        terminal.print_text(f"  {line}", sys.stderr)


def _write_point(plan: Plan, report: ComparisonReport, store: RunFolder, environment: Environment) -> Path | None:
    """Writes the recommended configuration of a point, in a sweep in the point's own folder."""
    name = "_".join(str(value) for _, value in plan.options.point)
    # At most 100 characters, since file systems take 255 bytes; no dot in front, which would hide it or name a parent.
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:100].lstrip(".")
    if plain != name:  # two names must not become one
        plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    folder = store.folder / "points" / plain if plan.options.point else store.folder
    return configuration_export.write_configuration(plan.options, report, folder, environment)


def _recommendation_values(reports: Sequence[tuple[Plan, ComparisonReport]]) -> dict[str, Any]:
    """The recommendation of a run as JSON values, in a sweep with the values of each point."""
    if len(reports) == 1 and not reports[0][0].options.point:
        return reports[0][1].recommendation.to_dict()
    return {
        "points": [{"point": dict(plan.options.point), **report.recommendation.to_dict()} for plan, report in reports]
    }


def exit_code(options: Options, runs: Sequence[Run]) -> int:
    """0 a row succeeded, 1 none did, 130 interrupted; with --strict 1 when any failed."""
    outcomes = [run.outcome for run in runs]
    if signals.interrupt_requested() or any(outcome.status == schema.INTERRUPTED for outcome in outcomes):
        return INTERRUPTED_CODE
    if options.strict and not all(outcome.success for outcome in outcomes):
        return NONE_SUCCEEDED
    return OK if any(outcome.success for outcome in outcomes) else NONE_SUCCEEDED
