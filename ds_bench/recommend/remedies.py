"""What to do about a row that failed or is too full.

There are no memory formulas here: ``prediction.what_if`` predicted every change after the trial ended, and the
record holds the predictions (``Prediction.alternatives``). They are predictions, not promises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..analysis.comparison import Comparison, ComparisonRow
from ..analysis.trial_caveats import NEAR_CAPACITY, gpu_fraction
from ..config.spec import Trial, Workload, block_of
from ..config.strategies import OFFLOAD_NAMES, STRATEGY_NAMES
from ..prediction.predicted_memory import TIGHT_FRACTION, Alternative, Prediction
from ..prediction.trial_predictions import stored_prediction
from ..prediction.what_if import BUCKET_KEY, DEFAULT_BUCKET, SMALL_BUCKET, settings_text
from ..records import schema
from ..records.schema import Tier, TrialRecord
from ..units import BYTES_PER_GB, format_bytes, format_duration, format_items, format_series
from .decision import RAN_OUT
from .message_templates import Fact

if TYPE_CHECKING:
    from ..analysis.row import Run


class Ending(NamedTuple):
    """How a row ended, and the kind of its remedy (``message_templates.TEMPLATES``)."""

    how: str
    remedy: str | Callable[[Run], str]


def _timeout_remedy(run: Run) -> str:
    if run.outcome.phase not in ("hello", "import", "build", "init"):
        return "timeout"
    # NCCL may have chosen the network bridge of a container or virtual machine.
    return "timeout_at_start_of_hosts" if run.trial.placement.num_nodes > 1 else "timeout_at_start"


def _no_engine_remedy(run: Run) -> str:
    script = run.trial.workload.script
    return "no_engine" if script is None or script.engine is None else "other_engine"


_ENDINGS: Mapping[str, Ending] = {
    schema.KILLED: Ending("killed", "killed"),
    schema.CRASHED: Ending("crashed", lambda run: "crashed_script" if run.trial.workload.script else "crashed"),
    schema.UNSUPPORTED: Ending("cannot run here", "unsupported"),
    schema.SKIPPED: Ending("skipped", "skipped"),
    schema.INTERRUPTED: Ending("interrupted", "interrupted"),
    schema.TIMEOUT: Ending("timed out", _timeout_remedy),
    schema.NO_ENGINE: Ending("did not train with DeepSpeed", _no_engine_remedy),
    schema.ENDED_EARLY: Ending("ended early", "ended_early"),
    "SystemExit": Ending("exited by itself", "exited"),
    schema.OOM_DISK: Ending("filled a disk", lambda run: "swap_disk_full" if _swaps(run) else "disk_full"),
}
"""By status; any other is an exception's class."""
_KINDS = (
    "shared_memory", "bus_error", "pinned_memory", "memlock", "peer_access", "fabric_manager", "collective_timeout",
    "gathered_views",
)  # fmt: skip
"""Values of ``Outcome.kind`` with a remedy of their own, whatever the status; no smaller workload helps."""
_PHASES_BEFORE_BUILD = ("hello", "import")
_PHASES_WITHOUT_ACTIVATIONS = (*_PHASES_BEFORE_BUILD, "build", "init", "step")
_MAX_CAUSE_LENGTH = 200
MAX_ROWS = 20
"""Rows among which the smallest change is searched for, and whose changes are replayed: a sweep may have thousands."""


def failed_run(row: ComparisonRow) -> Run | None:
    """Return the first run that ran out of memory or disk, else the first that failed; None if every run succeeded."""
    runs = [run for run in row.runs if not run.outcome.success]
    short = (run for run in runs if run.outcome.status in RAN_OUT)
    # Memory first: its remedies have numbers.
    return next(short, None) or next(iter(runs), None)


def short_of_memory(row: ComparisonRow) -> bool:
    """Whether a run failed for lack of memory that less work or another strategy would free."""
    run = failed_run(row)
    return run is not None and _lacks_memory(run)


def _lacks_memory(run: Run) -> bool:
    return run.outcome.status in (schema.OOM, schema.OOM_HOST) and run.outcome.kind not in _KINDS


def lacks_room(record: TrialRecord) -> bool:
    """Whether a trial ended for lack of memory, was skipped, or left the GPU too full and was not asked to fill it."""
    if record.outcome.success:
        return not record.trial.workload.fills_memory and (gpu_fraction(record) or 0.0) > NEAR_CAPACITY
    return record.outcome.status in (schema.OOM, schema.OOM_HOST, schema.SKIPPED)


def _gpu_run_lacks_host_memory(run: Run) -> bool:
    """Whether a run on GPUs lacks host memory."""
    return run.trial.placement.accelerator == "cuda" and run.outcome.status == schema.OOM_HOST


def _is_host_memory(run: Run) -> bool:
    """Whether the memory that a run lacks is host memory; on the CPU accelerator all memory is."""
    return run.trial.placement.accelerator == "cpu" or run.outcome.status == schema.OOM_HOST


# ------------------------------------------------------------------ how a row failed


def remedies_of(rows: Sequence[ComparisonRow], comparison: Comparison) -> list[Fact]:
    """Return how rows failed and what to try; rows that share a remedy are named together."""
    found: list[tuple[Fact, list[str]]] = []
    for row in rows:
        run = failed_run(row)
        if run is None:
            continue
        fact = _remedy(row, run, comparison)
        labels = next((labels for known, labels in found if known == fact), None)
        if labels is None:
            found.append((fact, [row.label]))
        else:
            labels.append(row.label)
    return [Fact(fact.kind, {**fact.values, "rows": labels}) for fact, labels in found]


def _remedy(row: ComparisonRow, run: Run, comparison: Comparison) -> Fact:
    outcome, setup = run.outcome, setup_of(row, comparison)
    if _lacks_memory(run):
        on_host, shortage = _is_host_memory(run), shortage_of(run)
        action = Fact("fragmented") if shortage.fragmented and not on_host else suggestion(setup, run, comparison)
        numbers = []
        if on_host and (size := predicted_bytes(run.trial, "cpu")):
            numbers.append(f"it is predicted to take {format_bytes(size)}")
        placement = run.trial.placement
        if on_host and (limit := placement.cpu_memory_limit_bytes) is not None:
            ranks = placement.ranks_per_node
            numbers.append(f"--cpu-memory-limit allows {format_items(ranks, 'rank')} {format_bytes(limit * ranks)}")
        elif on_host and comparison.host_capacity_bytes is not None:
            numbers.append(f"the host has {format_bytes(comparison.host_capacity_bytes)}")
        return Fact(
            "oom",
            {
                "pool": "host" if on_host else "device",
                "where": outcome.where,
                "short": shortage.fact,
                "host": "".join(f"; {each}" for each in numbers),
                "action": action,
            },
        )
    how = _ending(run).how
    if outcome.status == schema.TIMEOUT and run.row.wall_seconds is not None:
        how += f" after {format_duration(run.row.wall_seconds)}"
    planned = outcome.status == schema.SKIPPED and setup is not None
    action = suggestion(setup, run, comparison) if planned else action_of(run)
    # An exception's class and phase are in ``how`` and ``where``; only its message is left to say.
    failures = run.record.failures if run.record else ()
    root = (each for each in failures if (each.rank, each.error_class) == (outcome.rank, outcome.status))
    error = next((each.message for each in root), outcome.error)
    cause = " ".join((error or outcome.status).split())
    if len(cause) > _MAX_CAUSE_LENGTH:
        cause = f"{cause[: _MAX_CAUSE_LENGTH - 1]}…"
    return Fact("failed", {"how": how, "where": outcome.where, "cause": cause, "action": action})


def action_of(run: Run) -> Fact:
    """Return what to do about a run that failed for a reason other than memory."""
    work, size = run.trial.workload, predicted_bytes(run.trial, "nvme")
    values = {"steps": work.num_steps + work.warmup_steps, "need": format_bytes(size) if size else "enough space"}
    kind = _ending(run).remedy if run.outcome.kind not in _KINDS else str(run.outcome.kind)
    return Fact(kind if isinstance(kind, str) else kind(run), values)


def _ending(run: Run) -> Ending:
    status = run.outcome.status
    return _ENDINGS.get(status) or Ending(f"failed with {status}", "nvme_exception" if _swaps(run) else "exception")


def _swaps(run: Run) -> bool:
    return run.trial.configuration.uses_nvme


# ------------------------------------------------------------------ how much memory was missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """One rank's failed allocation; later ones might have failed too."""

    requested_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def missing_bytes(self) -> int | None:
        """Lower bound on the missing memory: requested minus free bytes. None unless both are known."""
        if self.requested_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.requested_bytes - self.free_bytes)

    @property
    def fragmented(self) -> bool:
        """Whether enough bytes were free, but not in one block."""
        return self.missing_bytes == 0

    @property
    def fact(self) -> Fact:
        values = {"missing": self.missing_bytes, "requested": self.requested_bytes, "free": self.free_bytes}
        if self.missing_bytes is not None:
            return Fact("short_in_pieces" if self.fragmented else "short", values)
        return Fact("short_unknown" if self.requested_bytes is None else "short_of_unknown", values)

    def lower(self, capacity: int | None, predicted: int) -> int | None:
        """Return the capacity, or less if the run was short of memory although it was predicted to fit."""
        target = self.requested_bytes if self.missing_bytes is None else self.missing_bytes
        if target is None or self.fragmented:  # fragmented memory had enough bytes, which says nothing about the limit
            return capacity
        # The run lacked ``target`` bytes of its prediction, so by the same formulas only this much is available.
        return predicted - target if capacity is None else min(capacity, predicted - target)


def shortage_of(run: Run) -> Shortage:
    """Return the shortage that the outcome of a run reports."""
    free_bytes = None if _is_host_memory(run) else run.outcome.free_bytes  # they are the GPU's
    return Shortage(requested_bytes=run.outcome.requested_bytes, free_bytes=free_bytes)


def predicted_bytes(trial: Trial, tier: Tier) -> int | None:
    """Return the predicted peak of a tier, per rank for ``gpu``, otherwise per node; None without a prediction."""
    prediction = stored_prediction(trial)
    sizes = {} if prediction is None else prediction.in_tier(tier)
    return sum(sizes.values()) if sizes else None


def _requested_a_bucket(run: Run) -> bool:
    """Whether the request was for a whole reduce bucket that could be smaller, whatever the workload."""
    requested = run.outcome.requested_bytes
    elements = block_of(run.trial.ds_config, "zero_optimization").get("reduce_bucket_size", DEFAULT_BUCKET)
    if requested is None or not isinstance(elements, int | float) or not run.trial.configuration.stage:
        return False
    # Elements take 2 or 4 bytes; messages round the request to three digits.
    return elements > SMALL_BUCKET and any(abs(requested - width * elements) <= 0.01 * requested for width in (2, 4))


def _depends_on_workload(run: Run) -> bool:
    """Whether less work (micro-batch, sequence, checkpointing) may free what the run lacked."""
    if _gpu_run_lacks_host_memory(run):
        return False  # activations are on the GPU
    return run.outcome.phase not in _PHASES_WITHOUT_ACTIVATIONS and not _requested_a_bucket(run)


# ------------------------------------------------------------------ changes that are predicted to fit


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSetup:
    """A configuration that did not fit, with the predicted changes and the memory that they must stay under."""

    run: Run
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    """Least intrusive first, without strategies whose layout failed here or left the GPU too full."""
    gpu_bytes: int | None
    """The GPU's memory less what rows held outside torch's allocator beyond the prediction; None if it is not known."""
    gpu_limit_bytes: int | None
    """The same, or less if the shortage implies less. None if neither the GPU nor the shortage is known."""
    host_limit_bytes: int | None
    trained: frozenset[tuple[int, str, str]]
    """Layouts that trained here with room to spare, with the same workload and placement."""

    @property
    def limits_known(self) -> bool:
        return bool(self.gpu_limit_bytes or self.host_limit_bytes)

    def fits(self, change: Alternative, *, tightly: bool = False) -> bool:
        """Whether a change is predicted to fit with room to spare; ``tightly``: or without."""
        pairs: list[tuple[float, int | None]] = [(change.least_gpu_bytes, self.gpu_bytes)]
        if self.gpu_limit_bytes != self.gpu_bytes:
            # The memory that a change frees is a difference of formulas, since two replays differ by about 1 % by
            # chance; but a change that needs more by the same method frees nothing, unless it shrinks the very request
            # that failed.
            pairs.append((change.gpu_bytes, self.gpu_limit_bytes))
            same_method = change.need is not None and change.need.method == self.prediction.gpu_need.method
            if same_method and not _requested_a_bucket(self.run):
                pairs.append((change.least_gpu_bytes, self.prediction.least_gpu_bytes - 1))
        if not tightly and change.need is not None:
            pairs.append((change.need.reserved_bytes, self.gpu_limit_bytes))
        pairs.append((change.host_bytes / (1 if tightly else TIGHT_FRACTION), self.host_limit_bytes))
        return self.limits_known and all(limit is None or size <= limit for size, limit in pairs)

    def smallest_fit(self) -> Alternative | None:
        """Return the least intrusive change predicted to fit, preferably with room to spare; None without any.

        One without room to spare is no help to a row that trained.
        """
        roomy = (each for each in self.alternatives if self.fits(each))
        tight = (each for each in self.alternatives if self.fits(each, tightly=not self.run.outcome.success))
        return next(roomy, None) or next(tight, None)


def setup_of(row: ComparisonRow, comparison: Comparison) -> FailedSetup | None:
    """Return the setup of a row that ran, or was predicted to run, out of memory, or that is too full; None without
    a prediction."""
    run, capacity = failed_run(row), comparison.device_capacity_bytes
    if run is None and (excess := excess_bytes(row, comparison)) > 0:
        # Nothing failed: the excess stands in for the memory that a change must free.
        fullest = max(row.successes, key=lambda run: run.row.gpu_percent or 0.0)
        return failed_setup(fullest, comparison, Shortage(requested_bytes=excess, free_bytes=0))
    if run is None:
        return None
    if _lacks_memory(run):
        return failed_setup(run, comparison, shortage_of(run))
    prediction = stored_prediction(run.trial)
    needed = prediction.least_gpu_bytes if prediction is not None and prediction.gpu else None
    if run.outcome.status != schema.SKIPPED or capacity is None or needed is None or needed <= capacity:
        return None
    return failed_setup(run, comparison, Shortage(requested_bytes=needed, free_bytes=capacity))


def excess_bytes(row: ComparisonRow, comparison: Comparison) -> int:
    """Return the bytes used above ``NEAR_CAPACITY`` of the GPU, negative if it is not reached.

    0 if the row's share or the GPU's size is unknown, or if the row fills the GPU on purpose.
    """
    if row.gpu_fraction is None or comparison.device_capacity_bytes is None or row.fills_memory:
        return 0
    return int((row.gpu_fraction - NEAR_CAPACITY) * comparison.device_capacity_bytes)


def failed_setup(run: Run, comparison: Comparison, shortage: Shortage) -> FailedSetup | None:
    """Return the setup of a run that did not fit.

    None if its record has no complete prediction of a known format, or was written by a run that was killed before the
    changes were predicted.
    """
    prediction, trial = stored_prediction(run.trial), run.trial
    # Without the activations it is not known what would fit.
    if prediction is None or prediction.unknown is not None or prediction.alternatives is None:
        return None

    def work(trial: Trial) -> Workload:
        return replace(trial.workload, batch_size=1) if trial.workload.batch_policy == "largest" else trial.workload

    rows = []
    for row in comparison.rows:
        never_tried = (schema.SKIPPED, schema.INTERRUPTED)
        tried = next((each.trial for each in row.runs if each.outcome.status not in never_tried), None)
        same = tried is not None and (work(tried), tried.placement) == (work(trial), trial.placement)
        if same and not row.configuration.is_reference:
            rows.append(row)
    trained = {row.configuration.layout for row in rows if row.valid and row.leaves_room}
    # A layout that trained without room left does not help either.
    failed = {row.configuration.layout for row in rows} - trained
    # On the CPU accelerator host memory is all there is, and predictions include no GPU memory.
    of_device, of_host = (Shortage(), shortage) if _is_host_memory(run) else (shortage, Shortage())
    # Lowered by the memory that trained rows hold outside torch's allocator. Never raised, because a run with the
    # change is planned for the whole GPU.
    gpu_bytes = comparison.device_capacity_bytes
    measured = [size for row in comparison.rows for size in row.measured("gpu_outside_allocator_gb")]
    outside: float | None = max(measured, default=None)
    if gpu_bytes is not None and outside is not None:
        outside_bytes = round(outside * BYTES_PER_GB)
        gpu_bytes -= max(0, outside_bytes - prediction.gpu.get("overhead", outside_bytes))
    predicted = prediction.gpu_bytes
    if run.outcome.success:  # it left the GPU too full, so it has to reserve less
        predicted = prediction.gpu_need.reserved_bytes
    elif run.outcome.status == schema.SKIPPED:
        predicted = prediction.least_gpu_bytes
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
        gpu_bytes=gpu_bytes,
        gpu_limit_bytes=of_device.lower(gpu_bytes, predicted),
        host_limit_bytes=of_host.lower(min(filter(None, sizes), default=None), prediction.host_bytes),
        trained=frozenset(trained),
    )


def _acts_on(change: Alternative, run: Run) -> bool:
    """Whether a change frees the requested kind of memory in the phase that failed."""
    phase, settings = run.outcome.phase, change.settings
    if _requested_a_bucket(run):
        return BUCKET_KEY in settings
    if not _depends_on_workload(run) and {"batch_size", "activation_checkpointing"} & settings.keys():
        return False
    # Only stage 3 partitions the model while it is built.
    other_build = change.layout[0] == 3 and bool({"strategy", "num_gpus"} & settings.keys())
    return phase not in _PHASES_BEFORE_BUILD and (phase != "build" or other_build)


def smallest_change(comparison: Comparison) -> Fact | None:
    """Return the smallest change that lets one of the rows train, with its settings; None without rows short of memory.

    If there is no such change, return what else to try.
    """
    pairs = ((row, setup) for row in comparison.rows if (setup := setup_of(row, comparison)) is not None)
    setups = list(islice(pairs, MAX_ROWS))
    changes = [(fit, row, setup) for row, setup in setups if (fit := setup.smallest_fit()) is not None]
    if changes:
        change, row, setup = min(
            changes, key=lambda entry: (not entry[2].fits(entry[0]), len(entry[0].settings), entry[0].rank)
        )
        values = {"change": _change_fact(change, setup), "row": row.label}
        kind = "smallest_change" if setup.fits(change) else "smallest_tight_change"
        return Fact(kind, values, _settings_of_change(change, row, comparison))
    if setups:
        return suggestion(setups[0][1], setups[0][1].run, comparison)
    short = [run for row in comparison.rows if (run := failed_run(row)) is not None and _lacks_memory(run)]
    return suggestion(None, short[0], comparison) if short else None


def suggestion(setup: FailedSetup | None, run: Run, comparison: Comparison) -> Fact:
    """Return the smallest change to a run that is predicted to fit; if there is none, return what else to try.

    ``setup``: of the run; None without a prediction.
    """
    if setup is not None and (fit := setup.smallest_fit()) is not None:
        return Fact("try_change", {"change": _change_fact(fit, setup)})
    if setup is not None and setup.alternatives and setup.limits_known:
        # gpu_bytes is 0 on the CPU accelerator.
        least = min(setup.alternatives, key=lambda each: each.gpu_bytes or each.host_bytes)
        return Fact("not_enough", {"change": _change_fact(least, setup), "resorts": last_resorts(run)})
    return Fact("try_unknown" if setup is None else "try_resorts", {"resorts": ways_to_less_memory(run, comparison)})


def last_resorts(run: Run) -> str:
    """Return what is left to try if no change is predicted to fit."""
    more = "more GPUs"
    if _is_host_memory(run):
        more = "more hosts" if run.trial.placement.cpu_memory_limit_bytes is None else "a larger --cpu-memory-limit"
    shorter = "a shorter sequence" if run.trial.workload.script is not None else "a shorter --seq-length"
    resorts = [more, shorter, "a smaller model"]
    return format_series(resorts if _depends_on_workload(run) else resorts[::2])


def ways_to_less_memory(run: Run, comparison: Comparison) -> str:
    """Return ways to use less memory that were not tried in vain; how much less is unknown."""
    stage, *offload = run.trial.configuration.layout
    failures = ((row.configuration.layout, failed_run(row)) for row in comparison.rows)
    failed = {layout for layout, failure in failures if failure and failure.outcome.status in RAN_OUT}
    ways = less_work(run.trial.workload) if _depends_on_workload(run) else []
    if run.trial.placement.num_gpus > 1 and any((each, *offload) not in failed for each in range(stage + 1, 4)):
        ways.append("a higher stage")
    if not _is_host_memory(run) and offload[1] == "none" and all(params == "none" for _, _, params in failed):
        ways.append("offload" if offload[0] == "none" else "offload of the parameters too")
    if _gpu_run_lacks_host_memory(run) and "cpu" in offload and not any("nvme" in layout for layout in failed):
        ways.append("offload to NVMe")
    return ", ".join([*ways, last_resorts(run)])


def less_work(workload: Workload) -> list[str]:
    """Return ways to reduce activation memory that a row has not used yet."""
    if workload.script is not None:  # whose batch is not known, and which takes no flags
        return ["a smaller micro-batch", "activation checkpointing"]
    smaller = ["a smaller micro-batch"] if workload.batch_size > 1 else []
    return smaller if workload.activation_checkpointing else [*smaller, "--activation-checkpointing"]


def _change_fact(change: Alternative, setup: FailedSetup) -> Fact:
    """``batch size 2 (predicted 60.00 GB per GPU instead of 90.00 GB)``; ``≈`` marks a figure from the rule."""
    gpu = change.least_gpu_bytes, setup.prediction.least_gpu_bytes
    by_rule = change.need is not None and change.need.method == "rule"
    if _requested_a_bucket(setup.run):  # judged by the formulas
        gpu, by_rule = (change.gpu_bytes, setup.prediction.gpu_bytes), True
    sizes = [
        f"{sign}{format_bytes(new)} {where} instead of {format_bytes(old)}"
        for where, new, old, sign in (
            ("per GPU", *gpu, "≈ " * by_rule),
            ("of host memory per node", change.host_bytes, setup.prediction.host_bytes, ""),
        )
        if new != old
    ]
    trained = change.settings.keys() == {"strategy"} and change.layout in setup.trained
    values = {"what": settings_text(change.settings), "sizes": sizes or "to take the same amount of memory"}
    return Fact("change_that_trained" if trained else "change", values)


# ------------------------------------------------------------------ the next run


def _settings_of_change(change: Alternative, row: ComparisonRow, comparison: Comparison) -> dict[str, Any]:
    """Return a predicted change to a row as options of a run."""
    values = {name: value for name, value in change.settings.items() if name != "strategy"}
    strategy = change.settings.get("strategy")
    if strategy is None:
        return {**values, **_settings_of_rows([row])}
    if strategy in OFFLOAD_NAMES:
        return {"strategies": [strategy], **({"nvme_path": "DIR"} if strategy == "nvme" else {}), **values}
    if any(each.configuration.name in OFFLOAD_NAMES for each in comparison.rows):
        return {**values, "strategies": ["none"], "stage": change.layout[0]}
    return {**values, "stages": [change.layout[0]]}


def _settings_of_rows(rows: Sequence[ComparisonRow]) -> dict[str, Any]:
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
    return first and {**first, **_settings_of_rows([row for row in short if found[row.key] == first])}


def less_memory(row: ComparisonRow, comparison: Comparison) -> dict[str, Any] | None:
    """Return options that free what the row ran out of, in its own layout; None if nothing is predicted to suffice."""
    run, setup, workload = failed_run(row), setup_of(row, comparison), row.trial.workload
    if setup is not None and setup.limits_known:
        own = tuple(each for each in setup.alternatives if "strategy" not in each.settings)
        change = replace(setup, alternatives=own).smallest_fit()
        return None if change is None else dict(change.settings)
    if run is not None and _requested_a_bucket(run):
        return {BUCKET_KEY: SMALL_BUCKET}
    if run is not None and not _depends_on_workload(run):
        return None
    if workload.script is not None:  # whose sizes only the user can change
        return None
    # A row at its own largest micro-batch was given none that could be halved.
    if workload.batch_size > 1 and workload.batch_policy != "largest":
        return {"batch_size": workload.batch_size // 2}
    if not workload.activation_checkpointing:
        return {"activation_checkpointing": True}
    return {"seq_length": max(1, workload.seq_length // 2)}
