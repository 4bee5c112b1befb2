"""One comparison from Options to exit code: the way through the house, read aloud."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from . import (
    __version__,
    analysis,
    dsconfig,
    environment,
    flops,
    gpus,
    interrupts,
    placement,
    plan,
    preflight,
    runner,
    showing,
)
from .errors import DsBenchError, UsageError
from .flags import Options
from .launch import Launcher, Limits
from .launch.deepspeed import DeepSpeedLauncher, launch_command
from .launch.warm import WarmLauncher
from .modelsource import ModelChoice, find_model
from .progress import Reporter
from .record import TrialRecord
from .rows import flat_rows, with_comparison
from .spec import Placement, Trial
from .store import RunStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known before trials are made: model, machine, and the strategies' configurations."""

    options: Options
    choice: ModelChoice
    place: Placement
    drafts: Sequence[plan.Draft]
    variables: dict[str, str]
    """Of every process of every trial."""
    caveats: dict[str, str]
    """By strategy, known before it runs."""


def run_comparison(options: Options, make_config: plan.MakeConfig, arguments: Sequence[str]) -> int:
    """Plans, readies, runs, saves and shows. Returns the exit code; raises DsBenchError before any work."""
    with interrupts.interruptible():
        try:
            with interrupts.acting():
                situation = look_around(options, make_config)
            if options.dry_run:
                return dry_run(situation)
            store = (
                RunStore.open(options.resume) if options.resume else RunStore.create(options.output_dir, options.family)
            )
            with store.held():
                return _compare(situation, store, arguments)
        except KeyboardInterrupt:  # before the first trial
            print("interrupted", file=sys.stderr)
            return showing.INTERRUPTED_CODE


def look_around(options: Options, make_config: plan.MakeConfig) -> Situation:
    """Everything that can be wrong with the request, found before any work."""
    if options.output_dir.exists() and not options.output_dir.is_dir():
        raise UsageError(f"--output-dir {options.output_dir} is not a folder", remedy="give a folder")
    drafts = _usable(lambda: plan.drafts(options, make_config))
    place = placement.decide(options, os.environ, gpus.NvmlQuery())
    variables = preflight.rank_environment(place, os.environ, None)
    choice = find_model(
        options.model,
        factory=options.model_factory is not None,
        trust_remote_code=options.trust_remote_code,
        environment=variables,
    )
    plan.seq_length(options, choice)
    variables = preflight.rank_environment(place, os.environ, choice.model_type)
    if choice.source == "hub":  # looked up and cached just now: ranks need not ask again
        variables["HF_HUB_OFFLINE"] = "1"
    _usable(lambda: plan.make_trials(options, choice, place, drafts, {}, {}))
    caveats = _check_nvme(options, drafts, choice)
    return Situation(options=options, choice=choice, place=place, drafts=drafts, variables=variables, caveats=caveats)


Made = TypeVar("Made")


def _usable(make: Callable[[], Made]) -> Made:
    """Whatever a configuration of an odd shape, or the user's own function, raises becomes one line."""
    try:
        return make()
    except DsBenchError:
        raise
    except Exception as error:
        problem = f"the DeepSpeed configuration cannot be used: {type(error).__name__}: {error}"
        raise UsageError(problem, remedy="check --ds-config, --set and create_deepspeed_config") from None


def dry_run(situation: Situation) -> int:
    """Prints each trial's configuration and command."""
    trials = plan.make_trials(
        situation.options, situation.choice, situation.place, situation.drafts, {}, situation.caveats
    )
    with showing.pipe_may_close():
        for trial in trials:
            command = launch_command(trial.placement, Path("TRIAL_FOLDER"))
            showing.print_text(f"# {trial.trial_id}: {trial.strategy.label}")
            if trial.unsupported:
                showing.print_text(f"# Unsupported: {trial.unsupported}")
            print(json.dumps(trial.ds_config, indent=2))
            showing.print_text("# the same ranks, started cold:")
            print(" ".join(["python", *command[1:]]) + "\n")
    return showing.OK


def _compare(situation: Situation, store: RunStore, arguments: Sequence[str]) -> int:
    options, place = situation.options, situation.place
    facts = environment.capture()
    if options.resume is not None:
        _require_same_machine(store, facts)
    say = _quiet if options.quiet else lambda text: print(text, file=sys.stderr, flush=True)
    with interrupts.acting():
        states = preflight.build_ops(place, situation.drafts, situation.variables, say)
    trials = plan.make_trials(options, situation.choice, place, situation.drafts, states, situation.caveats)
    ready = ",".join(op for op, state in states.items() if state.ready)
    situation = replace(situation, variables={**situation.variables, "DS_BENCH_PRELOAD_OPS": ready})
    if options.resume is not None:
        _require_same_workload(store, trials)
    with interrupts.acting():
        launcher, why_cold = choose_launcher(situation, trials, say)
    notes = preflight.run_notes(place, facts) + ([why_cold] if why_cold else [])
    _save_run(store, options, arguments, facts, trials, notes)
    level = 0 if options.quiet else 2 if options.verbose else 1
    todo = runner.missing(trials, store.records(), options.retry)
    reporter = Reporter(sys.stderr, todo, level)
    view = _View(situation, trials, facts)
    try:
        for finished in runner.run(todo, launcher, store, reporter.begin):
            store.write_rows(flat_rows(view.summaries(store.records())))
            reporter.end(finished)
    finally:
        reporter.close()
    return _finish(options, store, view, notes)


def _require_same_machine(store: RunStore, facts: environment.Environment) -> None:
    """Rows of other hardware or versions do not belong in one result."""
    try:
        earlier = environment.Environment.from_dict(store.load_run()["environment"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UsageError(f"{store.folder} has no readable environment", remedy="start a new run") from None
    differences = environment.comparable(earlier, facts)
    if differences:
        raise UsageError(
            f"--resume {store.folder}: not the same machine: {'; '.join(differences)}", remedy="start a new run"
        )


def _require_same_workload(store: RunStore, trials: Sequence[Trial]) -> None:
    """One result holds one workload on one placement; more stages, strategies or repeats may be added."""
    for stored in store.load_run().get("trials", []):
        for name, value in trials[0].to_dict().items():
            if name in ("workload", "placement") and json.loads(json.dumps(value)) != stored.get(name):
                raise UsageError(
                    f"--resume {store.folder}: another {name} than it began with", remedy="start a new run"
                )


def _quiet(_text: str) -> None:
    return None


def _check_nvme(options: Options, drafts: Sequence[plan.Draft], choice: ModelChoice) -> dict[str, str]:
    """Caveats by strategy; raises where the path cannot be used."""
    users = [draft.strategy.name for draft in drafts if dsconfig.uses_nvme(draft.config)]
    if options.nvme_path is None or not users:
        return {}
    caveat = preflight.check_nvme_path(options.nvme_path, choice)
    if options.family == "offload" and "nvme" not in options.strategies:
        print("note: --nvme-path is given, so the nvme strategy is added", file=sys.stderr)
    return {} if caveat is None else dict.fromkeys(users, caveat)


def choose_launcher(
    situation: Situation, trials: Sequence[Trial], say: Callable[[str], None]
) -> tuple[Launcher, str | None]:
    """The launcher asked for; cold with a note where ranks may not be forked warm."""
    options, place = situation.options, situation.place
    limits = Limits(timeout_seconds=options.timeout, stall_timeout_seconds=options.stall_timeout)
    devices = gpus.visible_indices(os.environ, gpus.NvmlQuery()) if place.accelerator == "cuda" else None
    cold = DeepSpeedLauncher(situation.variables, limits, device_indices=devices)
    if place.launcher == "deepspeed" or all(trial.unsupported for trial in trials):
        return cold, None
    warm = WarmLauncher(situation.variables, limits)
    say("loading torch, DeepSpeed and Transformers once, for every trial …")
    reason = warm.prepare()
    if reason is None:
        return warm, None
    if options.launcher == "warm":
        raise UsageError(f"--launcher warm is not safe here: {reason}", remedy="use --launcher deepspeed")
    return cold, f"cold launch: the preloaded server may not be forked, {reason}"


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
    """Records seen as summaries, with what only the run knows: model facts and the device's peak."""

    def __init__(self, situation: Situation, trials: Sequence[Trial], facts: environment.Environment) -> None:
        self._situation, self._trials = situation, trials
        name = facts.gpus[0].name if facts.gpus and situation.place.accelerator == "cuda" else None
        self._device = name
        known = situation.options.peak_tflops or (name and flops.peak_flops(name, trials[0].workload.precision))
        self.unknown_peak = None if known else name

    def summaries(self, records: Sequence[TrialRecord]) -> list[analysis.Summary]:
        latest = runner.latest(self._trials, records)
        return [analysis.summarise(entry, self._situation.choice.facts, self._peak_of(entry)) for entry in latest]

    def _peak_of(self, entry: TrialRecord) -> float | None:
        """FLOP/s of one device in the precision that the row trained in."""
        asked, name = self._situation.options.peak_tflops, self._device
        if asked:
            return asked * 1e12
        return flops.peak_flops(name, entry.trial.workload.precision) if name else None


def _finish(options: Options, store: RunStore, view: _View, notes: Sequence[str]) -> int:
    measured = view.summaries(store.records())
    rows, summaries = flat_rows(measured), with_comparison(measured)
    store.write_rows(rows)
    if view.unknown_peak:
        notes = [*notes, f"no peak rate known for {view.unknown_peak}: MFU left out; --peak-tflops gives it"]
    showing.show(options, summaries, rows, notes)
    if not options.quiet:
        print(f"\nJSON {store.json_path}\nCSV  {store.csv_path}\nrun  {store.folder}", file=sys.stderr)
    return showing.exit_code(options, summaries)
