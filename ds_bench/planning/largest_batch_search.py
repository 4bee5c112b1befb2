"""Searches for each row's largest micro-batch or longest sequence that trains, starting at the predicted size.

Probes are stored in the run folder next to the rows, so that a resumed run does not repeat them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..config.caveat_texts import Caveat, CaveatKind, as_caveat
from ..config.identity import work_key
from ..config.spec import NO_INSPECTION, SEARCH_ACCURACY, Configuration, Trial, Workload
from ..launch import Launcher
from ..prediction.fit_verdict import DOES_NOT_FIT
from ..prediction.model_profile import ModelProfile
from ..prediction.replayed_need import UNPREDICTABLE, predict_trial
from ..records import schema
from ..records.rank_files import PHASES
from ..records.run_folder import PROBES_FILE, RECORDS_FILE, RunFolder
from ..records.schema import Outcome, TrialRecord
from ..system import processes
from ..units import format_count
from .requested_rows import RequestedRow
from .trial_planner import SHORTEST_SEQ_LENGTH, Plan

MAX_BATCH_SIZE = 4096
MAX_SEQ_LENGTH = 2**20
"""The longest sequence that is tried, in tokens, for a model whose positions are not limited."""
_PROBE_STEPS = 2
"""Measured steps of a probe, after one warm-up step, which allocates the optimizer's states."""
_DID_NOT_FIT = (schema.OOM, schema.OOM_HOST, schema.OOM_DISK, schema.KILLED)
"""Statuses of a probe whose size is too large; any other failure has another cause, which a row must show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSearch:
    """Searches for the largest micro-batch, or the longest sequence, of each row of a plan."""

    plan: Plan
    launcher: Launcher
    store: RunFolder
    say: Callable[[str], None]
    dimension: Literal["batch_size", "seq_length"] = "batch_size"
    """The field of the workload that is searched for."""

    @property
    def unit(self) -> int:
        """Step between the sizes that are tried: one sequence, or 64 tokens (16 if fewer than 4096 are possible)."""
        if self.dimension == "batch_size":
            return 1
        return 64 if self._max_tokens >= 4096 else SHORTEST_SEQ_LENGTH

    @property
    def limit(self) -> int:
        """The largest size that is tried, in units."""
        return MAX_BATCH_SIZE if self.dimension == "batch_size" else max(1, self._max_tokens // self.unit)

    @property
    def _max_tokens(self) -> int:
        file = self.plan.options.token_file
        lengths = (self.plan.model.max_positions, None if file is None else file.tokens, MAX_SEQ_LENGTH)
        return min(length for length in lengths if length is not None)

    def find_largest(self, row: RequestedRow) -> tuple[int, tuple[Caveat, ...]]:
        """Find the largest micro-batch, or the longest sequence in tokens, that trains, with caveats about it.

        A timeout says nothing about memory, so after one, no larger size is tried: sizes are halved until one trains,
        or down to the largest that has trained. If none trains, or a probe fails for another reason, such as a hang
        before its first step, returns the failing size, so that the comparison shows the error. Raises
        KeyboardInterrupt if the user interrupts it; finished probes are kept for ``--resume``.
        """
        trained, timed_out = self._previous_trials(row)
        start = self.predict_largest(row)
        while True:
            units = next_size(trained, start, self.limit)
            if timed_out is not None:
                units = half if (half := timed_out // 2) > (largest_trained(trained) or 0) else None
            if units is None:
                break
            trial = self._trial(row, units, predicted=True)
            kind = "batch" if self.dimension == "batch_size" else "seq"
            trial_id = f"probe_{row.name}_{kind}{units * self.unit}"
            trial = replace(trial, trial_id=trial_id, workload=_of_probe(trial.workload), inspection=NO_INSPECTION)
            record = self.launcher.launch(trial, self.store.trial_folder(trial_id), lambda _progress: None)
            self.store.append(record, PROBES_FILE)
            outcome, status = record.outcome, record.outcome.status
            # A signal may also come just after the probe has ended with a status of its own.
            if status == schema.INTERRUPTED or processes.interrupt_requested():
                self.say(f"interrupted at {row.label}")
                raise KeyboardInterrupt
            self.say(f"{row.label}: {self._size_text(units)}{' trains' if outcome.success else f': {status}'}")
            if _was_too_slow(outcome):
                timed_out = units
            elif not outcome.success and status not in _DID_NOT_FIT:
                return units * self.unit, ()
            else:
                trained[units] = outcome.success
                timed_out = timed_out if outcome.success else None
        largest = largest_trained(trained)
        if timed_out is None or largest is None:
            return (largest or timed_out or 1) * self.unit, ()
        return largest * self.unit, (Caveat(CaveatKind.SEARCH_TIMED_OUT, {"size": self._size_text(timed_out)}),)

    def predict_largest(self, row: RequestedRow) -> int:
        """Return the largest size that is predicted to fit, in units.

        Without a prediction: a micro-batch of 1, or the sequence length that would be trained without a search.
        """
        profile, memory = self.plan.facts.profile, self.plan.facts.memory
        if not isinstance(profile, ModelProfile):
            return max(1, self.plan.trials[0].workload.seq_length // self.unit) if self.dimension != "batch_size" else 1

        def too_large(units: int) -> bool:
            trial = self._trial(row, units, predicted=False)
            if trial.unsupported:
                return True
            try:
                prediction = predict_trial(profile, trial, memory.gpu_bytes, verdict_only=True)
            except UNPREDICTABLE:
                return True
            return prediction.verdict(memory.gpu_bytes, memory.host_bytes) == DOES_NOT_FIT

        # At least 1, even if that is predicted not to fit. Sizes above one that does not fit are assumed not to fit.
        return 1 + bisect_left(range(2, self.limit + 1), True, key=too_large)

    def configuration(self, row: RequestedRow, size: int, caveats: tuple[Caveat, ...] = ()) -> Configuration:
        """The row at that micro-batch or sequence length, as its largest."""
        if self.dimension == "batch_size":
            configuration = self.plan.builder.build(row, size, "largest")
        else:
            configuration = self.plan.builder.build_at_length(row, size)
            if size >= self.limit * self.unit:
                limit = "the token file has no more"
                if self._max_tokens == self.plan.model.max_positions:
                    limit = "the model has no more positions"
                elif self._max_tokens == MAX_SEQ_LENGTH:
                    limit = "the search stops there"
                caveats = (Caveat(CaveatKind.LONGEST_POSSIBLE, {"tokens": size, "limit": limit}),)
        return replace(configuration, caveats=(*configuration.caveats, *caveats))

    def renew_caveats(self, row: RequestedRow, size: int, caveats: tuple[Caveat, ...]) -> None:
        """Store the row's records again if their caveat on the search is out of date. ``size``: the row's largest."""
        for record, units in self._sizes_of(row):
            kept = [each for each in record.caveats if as_caveat(each).kind is not CaveatKind.SEARCH_TIMED_OUT]
            renewed = (*kept, *(caveats if units * self.unit == size else ()))
            if set(renewed) != set(record.caveats):
                self.store.append(replace(record, caveats=renewed))

    def _size_text(self, units: int) -> str:
        size = format_count(units * self.unit)
        return f"micro-batch {size}" if self.dimension == "batch_size" else f"a sequence of {size} tokens"

    def _trial(self, row: RequestedRow, units: int, *, predicted: bool) -> Trial:
        """The row's first trial at that size."""
        size = units * self.unit
        build = self.plan.builder.build if self.dimension == "batch_size" else self.plan.builder.build_at_length
        return self.plan.trials_of([build(row, size)], predicted=predicted)[0]

    def _previous_trials(self, row: RequestedRow) -> tuple[dict[int, bool], int | None]:
        """Size in units → whether it trained, from earlier probes of this run; then the size that hit a time limit.

        A row of this run that did not fit or was too slow counts too, so that the search goes on below it.
        """
        probes, rows = self._sizes_of(row, PROBES_FILE), self._sizes_of(row)
        late = [units for record, units in rows if _was_too_slow(record.outcome)]
        known = {
            units: record.outcome.success
            for record, units in probes
            # A probe that failed for another reason says nothing about sizes, and is run again.
            if record.outcome.success or record.outcome.status in _DID_NOT_FIT
        }
        if late:
            half = min(late) // 2
            known = {units: trained for units, trained in known.items() if units <= half or not trained}
            if half:  # it fits, as twice its size did
                known.setdefault(half, True)
        # A row that failed outweighs a probe of its size that trained. After the first, each step back doubles.
        failed = sorted({units for record, units in rows if record.outcome.status in _DID_NOT_FIT})
        if failed:
            known[max(1, failed[0] - resolution(failed[0]) * (2 ** (len(failed) - 1) - 1))] = False
        late += [units for record, units in probes if _was_too_slow(record.outcome)]
        # A timeout above a size that does not fit is ignored: memory already ends the search there.
        largest, failure = largest_trained(known) or 0, smallest_failure(known) or MAX_SEQ_LENGTH
        return known, min((units for units in late if largest < units < failure), default=None)

    def _sizes_of(self, row: RequestedRow, file: str = RECORDS_FILE) -> list[tuple[TrialRecord, int]]:
        """The last record of each trial of this row, and its size; other points of a sweep differ in work or ranks."""
        last = {}
        for record in self.store.counted_records(file):
            stored = record.trial
            if stored.configuration.name != row.name:
                continue
            units = max(1, getattr(stored.workload, self.dimension) // self.unit)
            if file == PROBES_FILE:
                own = self._trial(row, units, predicted=False)
                own = replace(own, workload=_of_probe(own.workload))
            else:
                own = self.plan.trials_of([self.configuration(row, units * self.unit)], predicted=False)[0]
            keys = {work_key(each, leave_out=("repeat", "inspection")) for each in (stored, own)}
            if len(keys) == 1:
                last[units, stored.repeat] = record, units
        return list(last.values())


def _was_too_slow(outcome: Outcome) -> bool:
    """Whether a trial hit a time limit in its steps; a hang before them has nothing to do with the size."""
    in_steps = outcome.phase in PHASES[PHASES.index("warmup") :]
    return outcome.status == schema.TIMEOUT and in_steps and outcome.kind != "collective_timeout"


def _of_probe(workload: Workload) -> Workload:
    return replace(workload, num_steps=_PROBE_STEPS, warmup_steps=1)


def at_largest_size(plan: Plan, launcher: Launcher, store: RunFolder, say: Callable[[str], None]) -> Plan:
    """Return the plan with every row at its own largest micro-batch or longest sequence, as its options request.

    With ``--common-batch`` every row also runs at the smallest of those micro-batches, at which all of them train.
    """
    dimension: Literal["batch_size", "seq_length"] = "seq_length" if plan.options.auto_seq else "batch_size"
    search = SizeSearch(plan=plan, launcher=launcher, store=store, say=say, dimension=dimension)
    rows = plan.rows
    found = {row.name: search.find_largest(row) for row in rows}
    for row in rows:
        search.renew_caveats(row, *found[row.name])
    configurations = [search.configuration(row, *found[row.name]) for row in rows]
    if plan.options.common_batch:
        common = min(size for size, _ in found.values())
        configurations += [plan.builder.build(row, common) for row in rows]
    return replace(plan, configurations=configurations, trials=plan.trials_of(configurations))


def is_too_large(record: TrialRecord) -> bool:
    """Return whether a row did not fit or was too slow at its largest size, which had trained in probes."""
    failed = record.outcome.status in _DID_NOT_FIT or _was_too_slow(record.outcome)
    return record.trial.workload.fills_memory and failed


def next_size(trained: Mapping[int, bool], start: int, limit: int) -> int | None:
    """Return the size to try next; None once the largest is known.

    ``trained``: size → whether it trained. ``start``: the predicted largest, 1 or more. ``limit``: the largest
    that is tried. Exponential search from ``start``: the step doubles upwards after a success and downwards after
    a failure. Once one size trains and a larger one fails, bisects until the gap is at most 1/32 of the size (1 below
    64). If the prediction is exact, two probes are enough.
    """
    largest, failed = largest_trained(trained), smallest_failure(trained)
    start = min(max(start, 1), limit)
    if not trained:
        return start
    # Nothing has trained yet: go down.
    if largest is None:
        return None if failed in (None, 1) else max(failed - _step_size(abs(failed - start), failed), 1)
    # Nothing has failed yet: go up.
    if failed is None:
        return None if largest >= limit else min(largest + _step_size(abs(largest - start), start), limit)
    # A size between the two decides, until they are close enough.
    if failed - largest <= resolution(largest):
        return None
    power_of_two = 1 << (failed - 1).bit_length() - 1  # a size that users choose, if the gap holds one
    return power_of_two if largest < power_of_two < failed else (largest + failed) // 2


def resolution(size: int) -> int:
    """Return the gap at which the search ends: speeds at two sizes this close together differ by less than noise."""
    return max(1, int(size * SEARCH_ACCURACY))


def largest_trained(trained: Mapping[int, bool]) -> int | None:
    """Return the largest size that trained below every failure; one that trained above a failure was luck."""
    failed = smallest_failure(trained)
    return max(
        (size for size, success in trained.items() if success and (failed is None or size < failed)), default=None
    )


def smallest_failure(trained: Mapping[int, bool]) -> int | None:
    """Return the smallest size that did not train; None if all did."""
    return min((size for size, success in trained.items() if not success), default=None)


def _step_size(distance: int, size: int) -> int:
    """The first step is the resolution; each further one is the distance so far, but at least an eighth of ``size``."""
    return resolution(size) if distance == 0 else max(distance, size // 8, 1)
