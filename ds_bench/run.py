"""One comparison from Options to exit code: plan, check, launch, save, report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import __version__, batch_search, plan
from .analysis import flops, provenance
from .analysis import summary as analysis
from .analysis.flat_rows import flat_rows
from .analysis.loss_parity import with_loss_caveats
from .config import deepspeed_config
from .config.options import Options
from .config.spec import Trial
from .doctor import nvme
from .doctor import run as doctor
from .launch import Launcher, Limits, ProgressCallback, rank_environment
from .launch.deepspeed import launch_command
from .launch.scratch import remove_abandoned
from .launch.selection import choose_launcher
from .plan import Planned, Situation, look_around
from .prediction import trial_predictions
from .prediction.model_profile import ModelProfile
from .records import schema
from .records.resume import latest_records, remaining_trials, require_same_machine, require_same_workload
from .records.run_folder import RunStore
from .records.schema import Outcome, TrialRecord
from .report import comparison_report, export, table
from .report.progress import Reporter
from .system import environment, signals, terminal

OK, NONE_SUCCEEDED, INTERRUPTED_CODE = 0, 1, 130
_FIELDS_SET_BY_SEARCH = ("batch_size", "batch_policy")
"""Fields of a workload that ``--batch-size auto`` decides."""

Observe = Callable[[Trial], ProgressCallback]
"""Called as a trial begins; what it returns is called with the trial's progress."""


def run_comparison(options: Options, make_config: plan.MakeConfig, arguments: Sequence[str]) -> int:
    """Plans, readies, runs, saves and shows. Returns the exit code; raises DsBenchError before any work."""
    with signals.handling_signals():
        try:
            if options.resume is not None:  # before anything that the folder names is looked at
                require_same_machine(RunStore.open(options.resume), environment.capture())
            with signals.raising_on_interrupt():
                situation = with_nvme_checked(look_around(options, make_config))
            if options.dry_run:
                return dry_run(situation)
            remove_abandoned()
            with signals.raising_on_interrupt():
                length = plan.seq_length(options.seq_length, situation.choice)
                profile = trial_predictions.profile(
                    situation.choice,
                    length,
                    situation.place.accelerator,
                    dropout=options.dropout,
                    trust_remote_code=options.trust_remote_code,
                    environment=situation.variables,
                )
                _require_ready(situation, profile)
            store = (
                RunStore.open(options.resume) if options.resume else RunStore.create(options.output_dir, options.family)
            )
            with store.held() as note:
                return _compare(situation, profile, store, arguments, [note] if note else [])
        except KeyboardInterrupt:  # before the first trial
            terminal.print_text("interrupted", sys.stderr)
            return INTERRUPTED_CODE


def with_nvme_checked(situation: Situation) -> Situation:
    """The same with what the NVMe folder shows: caveats of the rows that swap to it, or why they cannot run.

    Raises PreflightError where the folder cannot be used.
    """
    options = situation.options
    users = [draft.strategy.name for draft in situation.drafts if deepspeed_config.uses_nvme(draft.config)]
    if options.nvme_path is None or not users:
        return situation
    caveat = nvme.check_nvme_path(options.nvme_path)
    if options.family == "offload" and "nvme" not in options.strategies:
        terminal.print_text("note: --nvme-path is given, so the nvme strategy is added", sys.stderr)
    return replace(
        situation,
        caveats={} if caveat is None else dict.fromkeys(users, caveat),
        lacks_space=nvme.lack_of_space(options.nvme_path, situation.choice),
    )


def _require_ready(situation: Situation, profile: ModelProfile | trial_predictions.Unpredicted) -> None:
    """The part of the doctor that this plan needs. Raises PreflightError in second 0."""
    configs = [draft.config for draft in situation.drafts]
    trials = Planned(situation, {}, trial_predictions.MemoryCapacity(gpu_bytes=None, host_bytes=None), profile).trials(
        situation.drafts
    )
    need = None
    if situation.place.hostfile is None:
        need = trial_predictions.peak_host_bytes(trials)
        if not situation.options.force:
            trial_predictions.require_host_memory(trials, trial_predictions.node_memory_bytes())
    findings = doctor.for_plan(situation.place, configs, lacks_space=situation.lacks_space, need_host_bytes=need)
    doctor.require_ready(findings, sys.stderr, quiet=situation.options.quiet)


def dry_run(situation: Situation) -> int:
    """Prints each trial's configuration and command."""
    trials = plan.make_trials(
        situation.options,
        situation.choice,
        situation.place,
        situation.drafts,
        {},
        situation.caveats,
        lacks_space=situation.lacks_space,
    )
    with terminal.pipe_may_close():
        if situation.options.auto_batch:
            terminal.print_text(
                "# --batch-size auto: each micro-batch is found by probes when this is run; 1 stands for it here\n"
            )
        for trial in trials:
            command = launch_command(trial.placement, Path("TRIAL_FOLDER"))
            terminal.print_text(f"# {trial.trial_id}: {trial.strategy.label}")
            if trial.unsupported:
                terminal.print_text(f"# Unsupported: {trial.unsupported}")
            terminal.print_json(json.dumps(trial.to_dict()["ds_config"], indent=2))
            terminal.print_text("# the same ranks, started cold:")
            terminal.print_text(" ".join(["python", *command[1:]]) + "\n")
    return OK


def _compare(
    situation: Situation,
    profile: ModelProfile | trial_predictions.Unpredicted,
    store: RunStore,
    arguments: Sequence[str],
    notes: Sequence[str],
) -> int:
    options, place = situation.options, situation.place
    facts = environment.capture()
    say = _quiet if options.quiet else lambda text: terminal.print_text(text, sys.stderr)
    with signals.raising_on_interrupt():
        states = rank_environment.build_ops(
            place, [draft.config for draft in situation.drafts], situation.variables, say
        )
    ready = ",".join(op for op, state in states.items() if state.ready)
    situation = replace(situation, variables={**situation.variables, "DS_BENCH_PRELOAD_OPS": ready})
    planned = Planned(situation, states, trial_predictions.MemoryCapacity.of(facts, place), profile)
    trials = planned.trials(situation.drafts)
    if options.resume is not None:
        require_same_workload(store, trials, _FIELDS_SET_BY_SEARCH if options.auto_batch else ())
    with signals.raising_on_interrupt():
        limits = Limits(timeout_seconds=options.timeout, stall_timeout_seconds=options.stall_timeout)
        launcher, why_cold = choose_launcher(options.launcher, place, situation.variables, limits, trials, say)
    notes = [*notes, *([why_cold] if why_cold else [])]
    _save_run(store, options, arguments, facts, [] if options.auto_batch else trials, notes)
    if options.auto_batch:
        trials = planned.trials(_largest_drafts(planned, launcher, store, say))
        _save_run(store, options, arguments, facts, trials, notes)
    level = 0 if options.quiet else 2 if options.verbose else 1
    todo = remaining_trials(trials, store.records(), options.retry)
    reporter = Reporter(sys.stderr, todo, level)
    view = _View(situation, trials, facts, store.folder.name)
    try:
        for finished in run_trials(todo, launcher, store, reporter.begin):
            store.write_rows(flat_rows(view.summaries(store.records())))
            reporter.end(finished)
    finally:
        reporter.close()
    return _finish(options, store, view, notes, arguments)


def run_trials(trials: Sequence[Trial], launcher: Launcher, store: RunStore, observe: Observe) -> Iterator[TrialRecord]:
    """Runs the trials in order, each saved before it is yielded. Ends early after an interruption."""
    for trial in trials:
        listen = observe(trial)
        if trial.not_launched:
            finished = _record_without_launch(trial)
        else:
            finished = launcher.launch(trial, store.trial_folder(trial.trial_id), listen)
        store.append(finished)
        yield finished
        if finished.outcome.status == schema.INTERRUPTED or signals.interrupt_requested():
            return


def _record_without_launch(trial: Trial) -> TrialRecord:
    status, reason = (
        (schema.UNSUPPORTED, trial.unsupported) if trial.unsupported is not None else (schema.SKIPPED, trial.skipped)
    )
    outcome = Outcome(status=status, error=reason, details=reason)
    return TrialRecord(trial=trial, outcome=outcome, caveats=trial.caveats)


def _largest_drafts(
    planned: Planned, launcher: Launcher, store: RunStore, say: Callable[[str], None]
) -> list[plan.Draft]:
    """Every strategy at the largest micro-batch that trains, found by probes."""
    situation = planned.situation
    search = batch_search.Search(
        options=situation.options,
        make_config=situation.make_config,
        make_trials=planned.trials,
        launcher=launcher,
        store=store,
        profile=planned.profile,
        room=planned.room,
        say=say,
    )
    return batch_search.drafts(search, [draft.strategy for draft in situation.drafts])


def _quiet(_text: str) -> None:
    return None


def _save_run(
    store: RunStore,
    options: Options,
    arguments: Sequence[str],
    facts: environment.Environment,
    trials: Sequence[Trial],
    notes: Sequence[str],
) -> None:
    store.save_run(
        {
            "ds_bench_version": __version__,
            "family": options.family,
            "arguments": list(arguments),
            "environment": facts.to_dict(),
            "notes": list(notes),
            "trials": [{"key": trial.key, **trial.to_dict()} for trial in trials],
        }
    )


class _View:
    """Records seen as summaries and as an answer, with what only the run knows: model facts, the device's peak."""

    def __init__(
        self, situation: Situation, trials: Sequence[Trial], facts: environment.Environment, run_id: str
    ) -> None:
        self._situation, self._trials, self.facts, self._run_id = situation, trials, facts, run_id
        name = facts.gpus[0].name if facts.gpus and situation.place.accelerator == "cuda" else None
        self._device = name
        known = situation.options.peak_tflops or (name and flops.peak_flops(name, trials[0].workload.precision))
        self.unknown_peak = None if known else name

    def summaries(self, records: Sequence[TrialRecord]) -> list[analysis.Summary]:
        latest = latest_records(self._trials, records)
        made = [analysis.summarise(entry, self._situation.choice.facts, self._peak_of(entry)) for entry in latest]
        return [replace(summary, environment=self.facts, run_id=self._run_id) for summary in made]

    def conclude(
        self, summaries: Sequence[analysis.Summary], notes: Sequence[str], command: str
    ) -> comparison_report.Answer:
        asked = self._situation.options.relative_to
        reached = asked if any(entry.record.trial.strategy.name == asked for entry in summaries) else None
        return comparison_report.of(
            summaries,
            goal=self._situation.options.goal,
            relative_to=reached,  # an interruption may have come before that row
            notes=notes,
            commands=[command],
            environments=[self.facts],
        )

    def _peak_of(self, entry: TrialRecord) -> float | None:
        """FLOP/s of one device in the precision that the row trained in."""
        asked, name = self._situation.options.peak_tflops, self._device
        if asked:
            return asked * 1e12
        return flops.peak_flops(name, entry.trial.workload.precision) if name else None


def _finish(options: Options, store: RunStore, view: _View, notes: Sequence[str], arguments: Sequence[str]) -> int:
    measured = view.summaries(store.records())
    rows, summaries = flat_rows(measured), with_loss_caveats(measured)
    store.write_rows(rows)
    if view.unknown_peak:
        notes = [*notes, f"no peak rate known for {view.unknown_peak}: MFU left out; --peak-tflops gives it"]
    found = view.conclude(summaries, notes, provenance.command(options.family, arguments))
    store.save_run({**store.load_run(), "recommendation": found.recommendation_facts()})
    folder = export.write_configuration(options, found, store.folder, view.facts)
    show(options, found, rows)  # last: standard output may be gone
    if not options.quiet:
        terminal.print_text(f"\nJSON {store.json_path}\nCSV  {store.csv_path}\nrun  {store.folder}", sys.stderr)
        if folder is not None:
            terminal.print_text(f"configuration {folder}", sys.stderr)
    return exit_code(options, summaries)


def show(options: Options, answer: comparison_report.Answer, rows: Sequence[dict[str, Any]]) -> None:
    """The answer on standard output, in the format asked for."""
    with terminal.pipe_may_close():
        if options.format == "json":
            terminal.print_json(table.as_json(rows))
        elif options.format == "markdown":
            terminal.print_text(comparison_report.markdown(answer))
        else:
            comparison_report.print_answer(answer, sys.stdout)


def exit_code(options: Options, summaries: Sequence[analysis.Summary]) -> int:
    """0 a row succeeded, 1 none did, 130 interrupted; with --strict 1 when any failed."""
    outcomes = [summary.record.outcome for summary in summaries]
    if signals.interrupt_requested() or any(outcome.status == schema.INTERRUPTED for outcome in outcomes):
        return INTERRUPTED_CODE
    if options.strict and not all(outcome.success for outcome in outcomes):
        return NONE_SUCCEEDED
    return OK if any(outcome.success for outcome in outcomes) else NONE_SUCCEEDED
