"""What to do about a row that failed, is too full, or leaves memory unused.

No formula of memory is here: ``prediction.what_if`` predicted every change when the trial was planned, and the record
has the predictions (``Prediction.alternatives``). They are predictions, not promises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config.spec import Trial, Workload, block_of
from ..config.strategies import OFFLOAD_NAMES, STRATEGY_NAMES
from ..prediction.memory import TIGHT_FRACTION, Alternative, Prediction
from ..prediction.trial_predictions import stored_prediction
from ..prediction.what_if import BUCKET_KEY, DEFAULT_BUCKET, SMALL_BUCKET, settings_text
from ..records import schema
from ..records.schema import Tier, measured_values
from ..units import BYTES_PER_GB, format_bytes, format_duration, format_items
from .decision import COMFORTABLE_FRACTION, RAN_OUT
from .words import Fact

if TYPE_CHECKING:
    from ..analysis.row import Run

MEMORY_STATUSES = (schema.OOM, schema.OOM_HOST)
_OWN_ACTIONS = (
    "shared_memory", "bus_error", "pinned_memory", "memlock", "peer_access", "fabric_manager", "collective_timeout",
)  # fmt: skip
"""Values of ``Outcome.kind`` whose cause no other strategy and no smaller workload helps."""
_HOW: Mapping[str, tuple[str, str]] = {
    schema.KILLED: ("killed", "{was} killed"),
    schema.CRASHED: ("crashed", "crashed"),
    schema.UNSUPPORTED: ("unsupported", "cannot run here"),
    schema.SKIPPED: ("skipped", "{was} skipped"),
    schema.INTERRUPTED: ("interrupted", "{was} interrupted"),
}
"""Status → kind of what to do, and how the row ended."""
_PHASES_BEFORE_BUILD = ("hello", "import")
_PHASES_WITHOUT_ACTIVATIONS = (*_PHASES_BEFORE_BUILD, "build", "init", "step")
_NEVER_TRIED = (schema.SKIPPED, schema.INTERRUPTED)
_MAX_CAUSE_LENGTH = 200
_MAX_ROWS = 20
"""Rows among which the smallest change is looked for: a sweep may have thousands."""
_LEAVE_FREE = 0.10
"""Fraction of the GPU that a suggested micro-batch leaves free, for memory that is not linear in it."""


def failed_run(row: ComparisonRow) -> Run | None:
    """The first run that ran out of memory or disk, else the first that failed; None if every run succeeded."""
    runs = [run for run in row.runs if not run.outcome.success]
    short = (run for run in runs if run.outcome.status in RAN_OUT)
    # Memory first: its remedies have numbers.
    return next(short, None) or next(iter(runs), None)


def short_of_memory(row: ComparisonRow) -> bool:
    """Whether a run of the row failed for lack of memory that less work or another strategy would free."""
    run = failed_run(row)
    return run is not None and _lacks_memory(run)


def _lacks_memory(run: Run) -> bool:
    return run.outcome.status in MEMORY_STATUSES and run.outcome.kind not in _OWN_ACTIONS


# ------------------------------------------------------------------ how a row failed


def remedies_of(rows: Sequence[ComparisonRow], comparison: Comparison) -> list[tuple[list[str], Fact]]:
    """How rows failed and what to try, with the labels of the rows that share it."""
    found: list[tuple[list[str], Fact]] = []
    for row in rows:
        if (fact := _remedy(row, comparison)) is not None:
            labels = next((labels for labels, known in found if known == fact), None)
            if labels is None:
                found.append(([row.label], fact))
            else:
                labels.append(row.label)
    return found


def _remedy(row: ComparisonRow, comparison: Comparison) -> Fact | None:
    """How the row failed and what to try, without its label; None if no run of it failed."""
    run = failed_run(row)
    if run is None:
        return None
    outcome, setup = run.outcome, setup_of(row, comparison)
    if _lacks_memory(run):
        shortage, pool = shortage_of(run), "device" if out_of_pool(run) == "device" else "host"
        in_pieces = shortage.fragmented and pool == "device"
        action = Fact("fragmented") if in_pieces else suggestion(setup)
        host = "" if pool == "device" else "".join(f"; {each}" for each in _host_numbers(run, comparison))
        values = {"pool": pool, "where": outcome.where, "short": shortage.fact, "host": host, "action": action}
        return Fact("oom", values)
    if outcome.status == schema.TIMEOUT:
        how = "timed out" + (
            f" after {format_duration(run.row.wall_seconds)}" if run.row.wall_seconds is not None else ""
        )
    elif outcome.status == schema.OOM_DISK:
        how = "filled a disk"
    else:
        how = _HOW.get(outcome.status, ("", f"failed with {outcome.status}"))[1]
    todo = suggestion(setup) if outcome.status == schema.SKIPPED and setup is not None else action_of(run)
    return Fact("failed", {"how": how, "where": outcome.where, "cause": _cause(run), "action": todo})


def action_of(run: Run) -> Fact:
    """What to do about a run that failed for another reason than memory."""
    outcome, trial = run.outcome, run.trial
    if outcome.kind in _OWN_ACTIONS:
        return Fact(str(outcome.kind))
    if outcome.status == schema.TIMEOUT and outcome.phase in ("hello", "import", "build", "init"):
        # NCCL may have taken a bridge of containers or of virtual machines.
        return Fact("timeout_at_start_of_hosts" if trial.placement.num_nodes > 1 else "timeout_at_start")
    if outcome.status == schema.TIMEOUT:
        return Fact("timeout", {"steps": trial.workload.num_steps + trial.workload.warmup_steps})
    size = predicted_bytes(run, "nvme")
    need = format_bytes(size) if size else "enough space"
    if outcome.status == schema.OOM_DISK:
        return Fact("swap_disk_full", {"need": need}) if trial.configuration.uses_nvme else Fact("disk_full")
    if outcome.status in _HOW:
        return Fact(_HOW[outcome.status][0])
    return Fact("nvme_exception", {"need": need}) if trial.configuration.uses_nvme else Fact("exception")


def _host_numbers(run: Run, comparison: Comparison) -> list[str]:
    """Host memory that the run was predicted to take, and that there is."""
    size = predicted_bytes(run, "cpu")
    numbers = [f"it is predicted to take {format_bytes(size)}"] if size else []
    limit, ranks = run.trial.placement.cpu_memory_limit_bytes, run.trial.placement.ranks_per_node
    if limit is not None:
        numbers.append(f"--cpu-memory-limit allows {format_items(ranks, 'rank')} {format_bytes(limit * ranks)}")
    elif comparison.host_capacity_bytes is not None:
        numbers.append(f"the host has {format_bytes(comparison.host_capacity_bytes)}")
    return numbers


def _cause(run: Run) -> str:
    """The error line of the outcome, shortened to 200 characters."""
    text = " ".join((run.outcome.error or run.outcome.status).split())
    return text if len(text) <= _MAX_CAUSE_LENGTH else f"{text[: _MAX_CAUSE_LENGTH - 1]}…"


# ------------------------------------------------------------------ how much memory was missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The allocation of one rank that failed."""

    requested_bytes: int | None = None
    """Size of the allocation that failed; later ones might have failed too."""
    free_bytes: int | None = None

    @property
    def missing_bytes(self) -> int | None:
        """Requested less free bytes, the least that was missing. None unless both are known."""
        if self.requested_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.requested_bytes - self.free_bytes)

    @property
    def target_bytes(self) -> int | None:
        """Bytes that a change must free for the allocation to succeed: all requested ones if the free are not known."""
        return self.requested_bytes if self.missing_bytes is None else self.missing_bytes

    @property
    def fragmented(self) -> bool:
        """Enough bytes were free, but not in one block."""
        return self.missing_bytes == 0

    @property
    def fact(self) -> Fact:
        """How much was missing, or that it is not known."""
        values = {"missing": self.missing_bytes, "requested": self.requested_bytes, "free": self.free_bytes}
        if self.fragmented:
            return Fact("short_in_pieces", values)
        if self.missing_bytes is not None:
            return Fact("short", values)
        return Fact("short_unknown" if self.requested_bytes is None else "short_of_unknown", values)


def shortage_of(run: Run) -> Shortage:
    """The shortage that the outcome of a run reports."""
    # Free bytes are those of the GPU.
    free_bytes = run.outcome.free_bytes if out_of_pool(run) == "device" else None
    return Shortage(requested_bytes=run.outcome.requested_bytes, free_bytes=free_bytes)


def predicted_shortage(run: Run, comparison: Comparison) -> Shortage | None:
    """Return the predicted shortage per GPU of a skipped trial; None if it is unknown or the trial was not skipped."""
    needed, capacity = predicted_bytes(run, "gpu"), comparison.device_capacity_bytes
    if run.outcome.status != schema.SKIPPED or capacity is None or needed is None or needed <= capacity:
        return None
    return Shortage(requested_bytes=needed, free_bytes=capacity)


def predicted_bytes(run: Run, tier: Tier) -> int | None:
    """Predicted peak of ``gpu``, per rank, or of ``cpu`` or ``nvme``, per node; None without a prediction."""
    prediction = stored_prediction(run.trial)
    sizes = {} if prediction is None else prediction.in_tier(tier)
    return sum(sizes.values()) if sizes else None


def out_of_pool(run: Run) -> Literal["device", "host", "both"]:
    """The memory that a run was out of. ``both``: on the CPU accelerator the host's memory is the device's too."""
    if run.trial.placement.accelerator == "cpu":
        return "both"
    return "host" if run.outcome.status == schema.OOM_HOST else "device"


def asked_for_bucket(run: Run) -> bool:
    """Return whether the request was for a whole reduce bucket that could be smaller, whatever the workload."""
    asked = run.outcome.requested_bytes
    elements = block_of(run.trial.ds_config, "zero_optimization").get("reduce_bucket_size", DEFAULT_BUCKET)
    if asked is None or not isinstance(elements, int | float) or not run.trial.configuration.stage:
        return False
    # Of 2 or 4 bytes each; messages round what was requested to three digits.
    return elements > SMALL_BUCKET and any(abs(asked - width * elements) <= 0.01 * asked for width in (2, 4))


def depends_on_workload(run: Run) -> bool:
    """Return whether less work (micro-batch, sequence, checkpointing) may free what the run lacked."""
    return run.outcome.phase not in _PHASES_WITHOUT_ACTIVATIONS and not asked_for_bucket(run)


# ------------------------------------------------------------------ changes that are predicted to fit


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSetup:
    """A configuration that did not fit: its prediction, the predicted changes and the memory there is."""

    run: Run
    """The run that failed."""
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    """Least intrusive first; without strategies whose layout failed here or left the GPU too full."""
    gpu_limit_bytes: int | None
    """Bytes that a change must be predicted to stay under; None if neither the GPU nor the shortage is known."""
    host_limit_bytes: int | None
    trained: frozenset[tuple[int, str, str]]
    """Layouts that trained here with room to spare, with equal workload and placement."""

    @property
    def limits_known(self) -> bool:
        return bool(self.gpu_limit_bytes or self.host_limit_bytes)

    def fits(self, change: Alternative, share: float = 1.0) -> bool:
        """Whether the change is predicted to take at most that share of the memory there is."""
        pairs = ((change.gpu_bytes, self.gpu_limit_bytes), (change.host_bytes, self.host_limit_bytes))
        return all(limit is None or size <= share * limit for size, limit in pairs)


def setup_of(row: ComparisonRow, comparison: Comparison) -> FailedSetup | None:
    """How a row that is short of memory was set up; None if it is not, or if its record has no prediction."""
    run = failed_run(row)
    if run is None:
        return None
    shortage = shortage_of(run) if _lacks_memory(run) else predicted_shortage(run, comparison)
    return None if shortage is None else failed_setup(run, comparison, shortage)


def failed_setup(run: Run, comparison: Comparison, shortage: Shortage) -> FailedSetup | None:
    """The setup of a run that did not fit; None if its record has no complete prediction of the known format."""
    prediction = stored_prediction(run.trial)
    # Without the activations it is not known what would fit.
    if prediction is None or prediction.unknown is not None:
        return None
    trial = run.trial
    rows = [row for row in _rows_of_same_work(comparison, trial) if not row.configuration.is_reference]
    trained = {row.configuration.layout for row in rows if row.valid and row.leaves_room}
    # Rows that trained without room left count as failed: such a layout does not help.
    failed = {row.configuration.layout for row in rows} - trained
    # On the CPU accelerator ("both") the memory of the host is all there is, and predictions have none of a GPU.
    of_device, of_host = (shortage, Shortage()) if out_of_pool(run) == "device" else (Shortage(), shortage)
    rank_limit = trial.placement.cpu_memory_limit_bytes
    sizes = [comparison.host_capacity_bytes, rank_limit and rank_limit * trial.placement.ranks_per_node]
    return FailedSetup(
        run=run,
        prediction=prediction,
        alternatives=tuple(
            each
            for each in prediction.alternatives
            if _acts_on(each, run) and not (each.settings.keys() == {"strategy"} and each.layout in failed)
        ),
        gpu_limit_bytes=_limit(prediction.gpu_bytes, _gpu_capacity(prediction, comparison), of_device),
        host_limit_bytes=_limit(prediction.host_bytes, min(filter(None, sizes), default=None), of_host),
        trained=frozenset(trained),
    )


def _acts_on(change: Alternative, run: Run) -> bool:
    """Return whether a change frees the requested kind of memory in the phase that failed."""
    phase, settings = run.outcome.phase, change.settings
    if asked_for_bucket(run):
        return BUCKET_KEY in settings
    if not depends_on_workload(run) and {"batch_size", "activation_checkpointing"} & settings.keys():
        return False
    # Only stage 3 partitions the model while it is built.
    other_build = change.layout[0] == 3 and bool({"strategy", "num_gpus"} & settings.keys())
    return phase not in _PHASES_BEFORE_BUILD and (phase != "build" or other_build)


def _gpu_capacity(prediction: Prediction, comparison: Comparison) -> int | None:
    """The GPU's memory; where rows trained, as if what they had outside torch's allocator were the assumed overhead."""
    capacity = comparison.device_capacity_bytes
    rows = [run.row for row in comparison.rows for run in row.successes]
    outside: float | None = max(measured_values(rows, "gpu_outside_allocator_gb"), default=None)
    if capacity is None or outside is None:
        return capacity
    measured = round(outside * BYTES_PER_GB)
    return capacity + prediction.gpu.get("overhead", measured) - measured


def _rows_of_same_work(comparison: Comparison, trial: Trial) -> list[ComparisonRow]:
    """Rows that were tried with the workload and placement of ``trial``, whatever the outcome.

    The micro-batch is ignored for rows that are each at their own largest one.
    """

    def work(trial: Trial) -> Workload:
        return replace(trial.workload, batch_size=1) if trial.workload.batch_policy == "largest" else trial.workload

    rows = []
    for row in comparison.rows:
        tried = next((run.trial for run in row.runs if run.outcome.status not in _NEVER_TRIED), None)
        if tried is not None and (work(tried), tried.placement) == (work(trial), trial.placement):
            rows.append(row)
    return rows


def _limit(predicted: int, capacity: int | None, shortage: Shortage) -> int | None:
    """The capacity, or less if the run was short of memory although it was predicted to fit."""
    # Fragmented memory had enough bytes free, which says nothing about the limit.
    target = None if shortage.fragmented else shortage.target_bytes
    # It lacked target bytes of what it was predicted to take, so that by the same formulas no more than this is there.
    limits = [capacity, None if target is None else predicted - target]
    return min((size for size in limits if size is not None), default=None)


def smallest_fit(setup: FailedSetup) -> Alternative | None:
    """The least intrusive change predicted to fit, one with room to spare before a tight one; None without any."""
    if setup.gpu_limit_bytes is None and setup.host_limit_bytes is None:
        return None
    shares = (TIGHT_FRACTION, 1.0)
    return next((each for share in shares for each in setup.alternatives if setup.fits(each, share)), None)


def find_smallest_change(comparison: Comparison) -> tuple[Alternative, ComparisonRow, FailedSetup] | None:
    """The least change predicted to fit of all rows short of memory, its row, and how that row was set up."""
    changes = [(fit, row, setup) for row, setup in _setups(comparison) if (fit := smallest_fit(setup)) is not None]
    return min(changes, key=lambda entry: (len(entry[0].settings), entry[0].rank), default=None)


def _setups(comparison: Comparison) -> list[tuple[ComparisonRow, FailedSetup]]:
    """The first rows that ran, or were predicted to run, out of memory and whose prediction is known."""
    pairs = ((row, setup) for row in comparison.rows if (setup := setup_of(row, comparison)) is not None)
    return list(islice(pairs, _MAX_ROWS))


def smallest_change(comparison: Comparison) -> Fact | None:
    """The least change that lets one of the rows train, or that none is known; None without rows short of memory."""
    if (smallest := find_smallest_change(comparison)) is not None:
        change, row, setup = smallest
        return Fact("smallest_change", {"change": change_fact(change, setup), "row": row.label})
    known = [setup for _, setup in _setups(comparison) if setup.prediction.alternatives]
    short = any(short_of_memory(row) for row in comparison.rows)
    return suggestion(known[0] if known else None) if known or short else None


def suggestion(setup: FailedSetup | None) -> Fact:
    """The least change predicted to fit with the memory it would take, else what else there is to try.

    ``setup``: None if the record has no prediction, which leaves general changes.
    """
    if setup is None:
        return Fact("no_prediction")
    if (fit := smallest_fit(setup)) is not None:
        return Fact("try_change", {"change": change_fact(fit, setup)})
    resorts = last_resorts(setup.run)
    if setup.alternatives and setup.limits_known:
        # gpu_bytes is 0 on the CPU accelerator.
        least = min(setup.alternatives, key=lambda each: each.gpu_bytes or each.host_bytes)
        return Fact("not_enough", {"change": change_fact(least, setup), "resorts": resorts})
    smaller = "a smaller micro-batch, " if depends_on_workload(setup.run) else ""
    return Fact("try_resorts", {"resorts": f"{smaller}{resorts}"})


def last_resorts(run: Run) -> str:
    """Last resorts if no change is predicted to fit."""
    limited = run.trial.placement.cpu_memory_limit_bytes is not None and out_of_pool(run) != "device"
    shorter = ", a shorter --seq-length" if depends_on_workload(run) else ""
    return f"{'a larger --cpu-memory-limit' if limited else 'more GPUs'}{shorter} or a smaller model"


def change_fact(change: Alternative, setup: FailedSetup) -> Fact:
    """``batch size 2 (predicted 60.00 GB per GPU instead of 90.00 GB)``."""
    sizes = [
        f"{format_bytes(new)} {where} instead of {format_bytes(old)}"
        for where, new, old in (
            ("per GPU", change.gpu_bytes, setup.prediction.gpu_bytes),
            ("of host memory per node", change.host_bytes, setup.prediction.host_bytes),
        )
        if new != old
    ]
    trained = change.settings.keys() == {"strategy"} and change.layout in setup.trained
    values = {"what": settings_text(change.settings), "sizes": " and ".join(sizes) or "to take the same"}
    return Fact("change_that_trained" if trained else "change", values)


# ------------------------------------------------------------------ the next run


def settings_of_change(change: Alternative, row: ComparisonRow, comparison: Comparison) -> dict[str, Any]:
    """A predicted change of a row as the options of a run."""
    values = {name: value for name, value in change.settings.items() if name != "strategy"}
    strategy = change.settings.get("strategy")
    if strategy is None:
        return {**values, **settings_of_rows([row])}
    if strategy in OFFLOAD_NAMES:
        return {"strategies": [strategy], **({"nvme_path": "DIR"} if strategy == "nvme" else {}), **values}
    if any(each.configuration.name in OFFLOAD_NAMES for each in comparison.rows):
        return {**values, "strategies": ["none"], "stage": change.layout[0]}
    return {**values, "stages": [change.layout[0]]}


def settings_of_rows(rows: Sequence[ComparisonRow]) -> dict[str, Any]:
    """Return options that select only these rows; empty unless flags name all of them."""
    configurations = [row.configuration for row in rows]
    if all(each.name == f"zero{each.stage}" for each in configurations):
        return {"stages": sorted({each.stage for each in configurations})}
    if all(each.name in STRATEGY_NAMES and each.source == "catalogue" for each in configurations):
        return {"strategies": list(dict.fromkeys(each.name for each in configurations))}
    return {}


def settings_for_less_memory(short: Sequence[ComparisonRow], comparison: Comparison) -> dict[str, Any] | None:
    """Return options that may let rows short of memory train in their own layout; None if there are no such options."""
    found = {row.key: less_memory(row, comparison) for row in short}
    first = next(filter(None, found.values()), None)
    return first and {**first, **settings_of_rows([row for row in short if found[row.key] == first])}


def less_memory(row: ComparisonRow, comparison: Comparison) -> dict[str, Any] | None:
    """Return options that free what the row ran out of, in its own layout; None if nothing is predicted to suffice."""
    run, setup, workload = failed_run(row), setup_of(row, comparison), row.trial.workload
    if setup is not None and setup.limits_known:
        own = tuple(each for each in setup.alternatives if "strategy" not in each.settings)
        change = smallest_fit(replace(setup, alternatives=own))
        return None if change is None else dict(change.settings)
    if run is not None and asked_for_bucket(run):
        return {BUCKET_KEY: SMALL_BUCKET}
    if run is not None and not depends_on_workload(run):
        return None
    # A row at its own largest micro-batch was given none that could be halved.
    if workload.batch_size > 1 and workload.batch_policy != "largest":
        return {"batch_size": workload.batch_size // 2}
    if not workload.activation_checkpointing:
        return {"activation_checkpointing": True}
    return {"seq_length": max(1, workload.seq_length // 2)}


def larger_batch(row: ComparisonRow, comparison: Comparison) -> tuple[int, float] | None:
    """The largest micro-batch, by doubling, predicted to leave memory free, and the share of the card it would take.

    None if not known or if none does. Activations are taken to grow linearly and everything else not at all; they must
    have been measured for this row. A row at its own largest micro-batch is not extended: the search has tried more.
    """
    capacity, fraction = comparison.device_capacity_bytes, row.gpu_fraction
    if capacity is None or fraction is None or fraction >= COMFORTABLE_FRACTION or row.fills_memory:
        return None
    run = row.successes[0]
    batch = run.row.batch_size
    activation_bytes = max((rank.ledger.get("gpu", {}).get("activations", 0) for rank in run.ranks), default=0)
    if not activation_bytes:
        return None
    factor = 1
    # One batch of activations is in the fraction already: twice the factor adds 2 * factor - 1 of them.
    while fraction * capacity + activation_bytes * (2 * factor - 1) <= (1 - _LEAVE_FREE) * capacity:
        factor *= 2
    if factor == 1:
        return None
    return batch * factor, fraction + activation_bytes * (factor - 1) / capacity


def remedy_of_full_row(row: ComparisonRow, comparison: Comparison) -> Fact | None:
    """The change predicted to bring a row that used more than ``NEAR_CAPACITY`` of the GPU back under that.

    None if its share or the GPU's size is not known, as on the CPU accelerator.
    """
    capacity = comparison.device_capacity_bytes
    if row.gpu_fraction is None or capacity is None:
        return None
    excess = int((row.gpu_fraction - NEAR_CAPACITY) * capacity)
    # Nothing failed: the excess stands for what a change must free.
    setup = failed_setup(row.successes[0], comparison, Shortage(requested_bytes=excess, free_bytes=0))
    return Fact("over_limit", {"row": row.label, "excess": excess, "change": suggestion(setup)})
