"""A recommendation at a glance: which row to use and why, what a faster row would give, and one thing to try next.

The sentences of ``reasons`` and the steps of ``remedies`` say more. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..analysis.comparison import Comparison, ComparisonRow, ratio_between
from ..analysis.intervals import FEWEST_RUNS
from ..config.caveats import UNSTABLE_KINDS, CaveatKind, has_kind
from ..config.strategies import OFFLOAD_NAMES, STRATEGY_NAMES
from ..prediction.memory import Alternative
from ..prediction.what_if import BUCKET_KEY, SMALL_BUCKET
from ..records import schema
from ..units import format_count, format_gigabytes, format_percent
from . import remedies
from .decision import Decision
from .eligibility import EligibleRows
from .reasons import runs_of_each, smaller_equally_fast
from .shortage import asked_for_bucket, depends_on_workload, last_resorts, smallest_fit


def format_list(labels: Sequence[str], most: int | None = None) -> str:
    """``A, B and C``; of more than ``most`` the first ones and how many more there are."""
    if most is not None and len(labels) > most:
        labels = [*labels[: most - 1], f"{len(labels) - most + 1} more"]
    return " and ".join([", ".join(labels[:-1]), labels[-1]]) if len(labels) > 1 else labels[0]


def say_choice(decision: Decision, comparison: Comparison, why: str) -> str:
    """``Use ZeRO-3: the fastest of 3 rows.``, or that it is too close to call. ``why``: in a few words."""
    choice, fewest = decision.choice, decision.fewest_runs
    if decision.undecided:
        spread = _two_digits(max(row.step_spread for row in (choice, *decision.undecided)))
        reason = f" after {runs_of_each(fewest)}" if fewest < FEWEST_RUNS else f": runs vary by up to {spread}"
        start = "the simplest" if choice == decision.simplest_tied else "which needs less memory"
        return f"Too close to call{reason}. Start with {choice.label}, {start}."
    length = comparison.row(choice.key).longest_seq_length
    longest = "" if length is None else f"trains sequences of {format_count(length)} tokens, the longest; "
    return f"Use {choice.label}: {longest}{why}."


def say_provisional(decision: Decision, command: str | None) -> str | None:
    """Why too few runs leave the choice open, and the command that decides it; None if that is not why."""
    if command is None or decision.fewest_runs >= FEWEST_RUNS:
        return None
    lead = _two_digits(max(decision.speeds.chance_lead(decision.choice, row) for row in decision.undecided))
    runs = runs_of_each(decision.fewest_runs)
    return f"Provisional: after {runs}, a lead below {lead} may be chance. To decide: {command}"


def command_to_decide(decision: Decision, comparison: Comparison, resume: str | None) -> str | None:
    """The command that adds runs to an open choice; None for a decided one. ``resume``: it goes on with the run."""
    if not decision.undecided:
        return None
    attempts = max(len(comparison.row(row.key).runs) for row in (decision.choice, *decision.undecided))
    # Runs that failed are not repeated, so each run that is missing is one more.
    missing = FEWEST_RUNS - decision.fewest_runs
    return (
        f"{resume or 'the same command with'} --repeats {attempts + missing if missing > 0 else max(5, 2 * attempts)}"
    )


def say_alternative(decision: Decision, eligible: EligibleRows, comparison: Comparison) -> str | None:
    """What the fastest row that was not chosen would give, and why it was not; None if nothing speaks for another."""
    choice, speeds = decision.choice, decision.speeds
    if decision.undecided:
        return None
    by_key = {candidate.key: candidate for candidate in (*eligible.candidates, *eligible.references)}
    rows = [row for row in comparison.rows if row.key != choice.key and not row.differences]
    chosen = comparison.row(choice.key)
    faster = [row for row in rows if _may_be_called_faster(row, chosen)]
    for row in sorted(faster, key=lambda row: -(row.tokens_per_second or 0.0)):
        lead = f"{row.label} is {_two_digits((row.tokens_per_second or 0.0) / choice.tokens_per_second - 1)} faster"
        candidate = by_key.get(row.key)
        if candidate is None:
            left_out = "is no result" if row.invalid_reason is not None else "is left out"
            return f"{lead} but {left_out}: {eligible.left_out[row.key].reason}."
        if candidate.optimizer != choice.optimizer:
            return f"{lead}, with another optimizer ({candidate.optimizer}): not compared by speed."
        if not speeds.differ(candidate, choice) or candidate.key == decision.simplest_tied.key:
            continue  # no faster, or weighed against the choice in the headline
        if candidate in eligible.references:
            return f"{lead}, but is torch's own engine, not a DeepSpeed configuration."
        if not candidate.fits:
            return f"{lead} but reserves {format_percent(candidate.fraction)}: a longer sequence may end it."
        if candidate.memory_bytes is not None and choice.memory_bytes is not None:
            more = candidate.memory_bytes - choice.memory_bytes
            return f"{lead} but takes {format_gigabytes(more)} more." if more > 0 else f"{lead} and offloads more."
    smaller = smaller_equally_fast(choice, speeds)
    if smaller is None:
        return None
    saved = (choice.memory_bytes or 0) - (smaller.memory_bytes or 0)
    return f"{smaller.label} needs {format_gigabytes(saved)} less and is as fast within the noise."


def _may_be_called_faster(row: ComparisonRow, chosen: ComparisonRow) -> bool:
    """Whether it was measured faster, and the table does not say that this is within noise."""
    interval = ratio_between(row, chosen)
    ahead = (row.tokens_per_second or 0.0) > (chosen.tokens_per_second or 0.0)
    return ahead and (interval is None or interval.distinguishable)


# ------------------------------------------------------------------ what to try


def try_after_choice(
    decision: Decision, eligible: EligibleRows, comparison: Comparison, command: str | None
) -> str | None:
    """Flags of the next run, or what else to do; None if nothing is left to try. ``command``: it decides the choice."""
    row = comparison.row(decision.choice.key)
    # Before all else: the rows that are missing may change the choice.
    if any(run.outcome.status == schema.INTERRUPTED for each in comparison.rows for run in each.runs):
        return remedies.ACTIONS[schema.INTERRUPTED]
    if command is not None:
        return command
    too_full = {key for key, left_out in eligible.left_out.items() if left_out.too_full is not None}
    # A row that ran out at its largest size may stand in the table at a smaller one too.
    trained = {each.configuration.name for each in comparison.rows if each.fills_memory and each.successes}
    failed = [each for each in comparison.rows if _ran_out_of_memory(each)]
    without_result = [each.key for each in failed if each.configuration.name not in trained]
    short = [each for each in comparison.rows if each.key in {*too_full, *without_result}]
    return next(filter(None, _tries(row, short, comparison)), None)


def _tries(row: ComparisonRow, short: Sequence[ComparisonRow], comparison: Comparison) -> Iterator[str | None]:
    """The reasons for another run, most useful first. ``row``: the chosen one; ``short``: those short of memory."""
    caveats = [*row.caveats, *comparison.caveats]
    workload = row.trial.workload
    if short:
        yield _less_memory_for(short, comparison)
    if any(has_kind(each.caveats, CaveatKind.OTHER_ADAM) for each in comparison.rows):
        yield "--set optimizer.params.torch_adam=true"
    if has_kind(caveats, CaveatKind.TOO_FEW_REPEATS):
        yield f"--repeats {FEWEST_RUNS}"
    if has_kind(caveats, CaveatKind.UNSTABLE_RUNS):
        yield f"--repeats {remedies.more_repeats(row)}"
    if has_kind(caveats, CaveatKind.NOT_STEADY):
        yield f"--warmup-steps {max(10, 2 * workload.warmup_steps)}"
    if has_kind(caveats, *UNSTABLE_KINDS, CaveatKind.SHORT_WINDOW):
        yield f"--num-steps {max(remedies.MORE_STEPS, 2 * workload.num_steps)}"
    if has_kind(caveats, CaveatKind.CPU_ACCELERATOR):
        yield "the same command where there is a GPU"
    larger = remedies.larger_batch(row, comparison)
    if larger is not None:
        yield f"--batch-size {larger[0]}"
    if not row.fills_memory:
        yield "--batch-size auto"


def try_without_choice(comparison: Comparison) -> str | None:
    """Flags that are predicted to let a row train, or what to do about the cause; None without rows."""
    change = remedies.find_smallest_change(comparison)
    if change is not None:
        return flags_of_change(*change[:2], comparison)
    caveats = [caveat for row in comparison.rows for caveat in row.caveats if caveat.disqualifying]
    if step := next((caveat.next_step for caveat in caveats if caveat.next_step), None):
        return step
    short = [row for row in comparison.rows if _ran_out_of_memory(row) or not row.leaves_room]
    if short:
        run, known = remedies.failed_run(short[0]), remedies.setup_of(short[0], comparison) is not None
        resorts = "" if run is None else last_resorts(run)
        nothing = f"{resorts}: no other change is predicted to fit" if known else f"offload, {resorts}"
        return _less_memory(short[0], comparison) or nothing
    run = next(filter(None, map(remedies.failed_run, comparison.rows)), None)
    return None if run is None else remedies.action(run)


def flags_of_change(change: Alternative, row: ComparisonRow, comparison: Comparison) -> str:
    """A predicted change of a row as flags: ``--batch-size 2 --stages 3``."""
    flags = _flags_of_values(change)
    if change.layout == row.configuration.layout:
        return " ".join([*flags, *_flags_of_rows([row])])
    if change.offload_optimizer == "none":
        stage_flag = "--strategies none --stage" if _is_offload_run(comparison) else "--stages"
        return " ".join([*flags, f"{stage_flag} {change.stage}"])
    name = {("cpu", "none"): "cpu_optimizer", ("cpu", "cpu"): "cpu_full"}.get(
        (change.offload_optimizer, change.offload_param), "nvme"
    )
    folder = " --nvme-path DIR" if name == "nvme" else ""
    return " ".join([f"--strategies {name}{folder}", *flags])


def _flags_of_values(change: Alternative) -> list[str]:
    """The values that a change sets besides the strategy, as flags."""
    flags = {key: f"--set {key}=" if "." in key else f"--{key.replace('_', '-')} " for key in change.changes}
    return [flag.strip() if (value := change.changes[key]) is True else f"{flag}{value}" for key, flag in flags.items()]


def _less_memory_for(short: Sequence[ComparisonRow], comparison: Comparison) -> str | None:
    """Flags with which rows that are short of memory may train as they are laid out; None if none may."""
    flags = {row.key: _less_memory(row, comparison) for row in short}
    first = next(filter(None, flags.values()), None)
    return first and " ".join([first, *_flags_of_rows([row for row in short if flags[row.key] == first])])


def _less_memory(row: ComparisonRow, comparison: Comparison) -> str | None:
    """Flags that act on what the row ran out of, in its own layout; None if none is predicted to be enough."""
    run, setup = remedies.failed_run(row), remedies.setup_of(row, comparison)
    if setup is not None and (setup.gpu_limit_bytes or setup.host_limit_bytes):
        own = [each for each in setup.alternatives if each.layout == row.configuration.layout]
        change = smallest_fit(replace(setup, alternatives=tuple(own)))
        return None if change is None else " ".join(_flags_of_values(change))
    if run is not None and asked_for_bucket(run):
        return f"--set {BUCKET_KEY}={SMALL_BUCKET}"
    return _smaller_work(row) if run is None or depends_on_workload(run) else None


def _smaller_work(row: ComparisonRow) -> str:
    """The simplest change that needs less memory: half the micro-batch, else checkpointing, else half the sequence."""
    workload = row.trial.workload
    # A row at its own largest micro-batch was given none that could be halved.
    if workload.batch_size > 1 and workload.batch_policy != "largest":
        return f"--batch-size {workload.batch_size // 2}"
    if not workload.activation_checkpointing:
        return "--activation-checkpointing"
    return f"--seq-length {max(1, workload.seq_length // 2)}"


def _flags_of_rows(rows: Sequence[ComparisonRow]) -> list[str]:
    """Flags that compare these rows alone; none if a row is not one that a flag names."""
    configurations = [row.configuration for row in rows]
    if all(each.name == f"zero{each.stage}" for each in configurations):
        return ["--stages", *(str(stage) for stage in sorted({each.stage for each in configurations}))]
    if all(each.name in STRATEGY_NAMES and each.source == "catalogue" for each in configurations):
        return ["--strategies", *dict.fromkeys(each.name for each in configurations)]
    return []


def _is_offload_run(comparison: Comparison) -> bool:
    return any(row.configuration.name in OFFLOAD_NAMES for row in comparison.rows)


def _ran_out_of_memory(row: ComparisonRow) -> bool:
    run = remedies.failed_run(row)
    return run is not None and remedies.short_of_memory(run)


def _two_digits(fraction: float) -> str:
    """``0.4 %``, ``13 %``, ``340 %``."""
    percent = float(f"{100 * fraction:.2g}")
    return f"{percent:,.0f} %" if percent >= 10 else f"{percent:g} %"
