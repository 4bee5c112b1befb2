"""How much memory a failed run was short of, and which changes were predicted to make it fit.

No formula of memory is here: ``prediction.what_if`` predicted every change when the trial was planned, and the record
has the predictions (``Prediction.alternatives``). They are predictions, not promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..analysis.comparison import Comparison, ComparisonRow
from ..config.spec import Trial, Workload, block_of
from ..prediction.memory import TIGHT_FRACTION, Alternative, Prediction
from ..prediction.trial_predictions import stored_prediction
from ..prediction.what_if import BUCKET_KEY, DEFAULT_BUCKET, SMALL_BUCKET
from ..records import schema
from ..records.schema import Tier, measured_values
from ..units import BYTES_PER_GB, format_bytes

if TYPE_CHECKING:
    from ..analysis.row import Run

Pool = Literal["device", "host", "both"]
"""The memory that ran out. ``both``: on the CPU accelerator the host's memory is the device's too."""

LAST_RESORTS = "more GPUs, a shorter --seq-length or a smaller model"
_PHASES_BEFORE_BUILD = ("hello", "import")
_PHASES_WITHOUT_ACTIVATIONS = (*_PHASES_BEFORE_BUILD, "build", "init", "step")
_NEVER_TRIED = (schema.SKIPPED, schema.INTERRUPTED)


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
    def text(self) -> str:
        """How much was missing, or that it is not known."""
        if self.fragmented:
            requested, free = format_bytes(self.requested_bytes), format_bytes(self.free_bytes)
            return f"{requested} asked with {free} free, but not in one piece"
        if self.missing_bytes is not None:
            return f"at least {format_bytes(self.missing_bytes)} short"
        if self.requested_bytes is not None:
            return f"{format_bytes(self.requested_bytes)} asked, free bytes not known"
        return "how much was missing is not known"


def shortage_of(run: Run) -> Shortage:
    """The shortage that the outcome of a run reports."""
    outcome = run.outcome
    # Free bytes are those of the GPU.
    free_bytes = outcome.free_bytes if out_of_pool(run) == "device" else None
    return Shortage(requested_bytes=outcome.requested_bytes, free_bytes=free_bytes)


def asked_for_bucket(run: Run) -> bool:
    """Return whether the bytes requested are those of a reduce bucket that can be smaller; no workload changes it."""
    asked = run.outcome.requested_bytes
    elements = block_of(run.trial.ds_config, "zero_optimization").get("reduce_bucket_size", DEFAULT_BUCKET)
    if asked is None or not isinstance(elements, int | float) or not run.trial.configuration.stage:
        return False
    if elements <= SMALL_BUCKET:
        return False
    # Of 2 or 4 bytes each; messages round what was requested to three digits.
    return any(abs(asked - width * elements) <= 0.01 * asked for width in (2, 4))


def depends_on_workload(run: Run) -> bool:
    """Return whether less work (micro-batch, sequence, checkpointing) may free what the run lacked."""
    return run.outcome.phase not in _PHASES_WITHOUT_ACTIVATIONS and not asked_for_bucket(run)


def last_resorts(run: Run) -> str:
    """What is left to try if no change is predicted to fit."""
    limited = run.trial.placement.cpu_memory_limit_bytes is not None and out_of_pool(run) != "device"
    shorter = ", a shorter --seq-length" if depends_on_workload(run) else ""
    return f"{'a larger --cpu-memory-limit' if limited else 'more GPUs'}{shorter} or a smaller model"


def _acts_on(change: Alternative, run: Run) -> bool:
    """Return whether a change frees memory in the phase in which the run failed, and of the kind that it requested."""
    phase, own = run.outcome.phase, run.trial.configuration
    if asked_for_bucket(run):
        return BUCKET_KEY in change.changes
    if not depends_on_workload(run) and {"batch_size", "activation_checkpointing"} & change.changes.keys():
        return False
    # Only stage 3 partitions the model while it is built.
    other_build = change.stage == 3 and (change.layout != own.layout or "num_gpus" in change.changes)
    return phase not in _PHASES_BEFORE_BUILD and (phase != "build" or other_build)


def predicted_bytes(run: Run, tier: Tier) -> int | None:
    """Predicted peak of ``gpu``, per rank, or of ``cpu`` or ``nvme``, per node; None without a prediction."""
    prediction = stored_prediction(run.trial)
    sizes = {} if prediction is None else prediction.in_tier(tier)
    return sum(sizes.values()) if sizes else None


def predicted_shortage(run: Run, comparison: Comparison) -> Shortage | None:
    """The predicted shortage per GPU of a trial that was skipped; None if there is none or it is not known."""
    needed, capacity = predicted_bytes(run, "gpu"), comparison.device_capacity_bytes
    if run.outcome.status != schema.SKIPPED or capacity is None or needed is None or needed <= capacity:
        return None
    return Shortage(requested_bytes=needed, free_bytes=capacity)


def out_of_pool(run: Run) -> Pool:
    """The memory that a run was out of."""
    if run.trial.placement.accelerator == "cpu":
        return "both"
    return "host" if run.outcome.status == schema.OOM_HOST else "device"


def measured_activations(comparison: Comparison, run: Run, batch: int) -> int | None:
    """Activation bytes of the fullest rank, from a row that trained the same model, scaled linearly to ``batch``."""
    tier = "cpu" if run.trial.placement.accelerator == "cpu" else "gpu"
    names = ("model", "seq_length", "precision", "activation_checkpointing")
    for other in (each for row in comparison.rows for each in row.successes):
        sizes = [
            size * batch // rank.micro_batch_size
            for rank in other.ranks
            if (size := rank.ledger.get(tier, {}).get("activations"))
        ]
        if sizes and all(getattr(other.trial.workload, name) == getattr(run.trial.workload, name) for name in names):
            return max(sizes)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSetup:
    """A configuration that did not fit: its prediction, the predicted changes and the memory there is."""

    prediction: Prediction
    micro_batch_size: int
    checkpointed: bool
    """It ran with activation checkpointing."""
    alternatives: tuple[Alternative, ...]
    """Least intrusive first; without strategies whose layout failed here or left the GPU too full."""
    gpu_limit_bytes: int | None
    """Bytes that a change must be predicted to stay under; None if neither the GPU nor the shortage is known."""
    host_limit_bytes: int | None
    trained: frozenset[tuple[int, str, str]]
    """Layouts that trained here with room to spare, with equal workload and placement."""
    run: Run
    """The run that failed."""

    def fits(self, change: Alternative, share: float = 1.0) -> bool:
        """Whether the change is predicted to take at most that share of the memory there is."""
        pairs = ((change.gpu_bytes, self.gpu_limit_bytes), (change.host_bytes, self.host_limit_bytes))
        return all(limit is None or size <= share * limit for size, limit in pairs)


def failed_setup(run: Run, comparison: Comparison, shortage: Shortage) -> FailedSetup | None:
    """The setup of a run that did not fit; None if its record has no complete prediction of the known format."""
    prediction = stored_prediction(run.trial)
    # Without the activations it is not known what would fit.
    if prediction is None or prediction.unknown is not None:
        return None
    trial, config = run.trial, run.trial.ds_config
    rows = _rows_of_same_work(comparison, trial)
    of_deepspeed = [row for row in rows if not row.configuration.is_reference]
    trained = {row.configuration.layout for row in of_deepspeed if row.valid and row.leaves_room}
    # Rows that trained without room left count as failed: such a layout is no remedy.
    failed = {row.configuration.layout for row in of_deepspeed} - trained
    # On the CPU accelerator ("both") the memory of the host is all there is, and predictions have none of a GPU.
    of_device, of_host = (shortage, Shortage()) if out_of_pool(run) == "device" else (Shortage(), shortage)
    rank_limit = trial.placement.cpu_memory_limit_bytes
    sizes = [comparison.host_capacity_bytes, rank_limit and rank_limit * trial.placement.ranks_per_node]
    batch = config.get("train_micro_batch_size_per_gpu")  # an override may have changed it
    return FailedSetup(
        prediction=prediction,
        micro_batch_size=batch if isinstance(batch, int) and batch > 0 else trial.workload.batch_size,
        checkpointed=trial.workload.activation_checkpointing,
        alternatives=tuple(
            each
            for each in prediction.alternatives
            if _acts_on(each, run) and not (each.strategy_alone and each.layout in failed)
        ),
        gpu_limit_bytes=_limit(prediction.gpu_bytes, _gpu_capacity(prediction, comparison), of_device),
        host_limit_bytes=_limit(prediction.host_bytes, min(filter(None, sizes), default=None), of_host),
        trained=frozenset(trained),
        run=run,
    )


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
    # Of fragmented memory enough was free: it tells no limit.
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


def suggest_change(setup: FailedSetup | None) -> str:
    """The least change predicted to fit with the memory it would take, and what the simplest changes save.

    ``setup``: None if the record has no prediction, which leaves general changes.
    """
    if setup is None:
        return (
            f"try a smaller micro-batch, --activation-checkpointing, a higher stage, offload, {LAST_RESORTS} "
            "(what each would free is not known: the record carries no prediction)"
        )
    if fit := smallest_fit(setup):
        text = f"try {describe_change(fit, setup)}"
    elif setup.alternatives and (setup.gpu_limit_bytes or setup.host_limit_bytes):
        # gpu_bytes is 0 on the CPU accelerator.
        least = describe_change(min(setup.alternatives, key=lambda each: each.gpu_bytes or each.host_bytes), setup)
        text = f"no change is predicted to be enough, the most is {least}; try it with {last_resorts(setup.run)}"
    else:
        smaller = "a smaller micro-batch, " if depends_on_workload(setup.run) else ""
        text = f"try {smaller}{last_resorts(setup.run)}"
    return "; ".join(filter(None, [text, _activation_savings(setup)]))


def describe_change(change: Alternative, setup: FailedSetup) -> str:
    """``batch size 2 (predicted 60.00 GB per GPU instead of 90.00 GB)``."""
    sizes: Mapping[str, tuple[int, int]] = {
        "per GPU": (change.gpu_bytes, setup.prediction.gpu_bytes),
        "of host memory per node": (change.host_bytes, setup.prediction.host_bytes),
    }
    differences = [
        f"{format_bytes(new)} {where} instead of {format_bytes(old)}"
        for where, (new, old) in sizes.items()
        if new != old
    ]
    trained = "; it trained here" if change.strategy_alone and change.layout in setup.trained else ""
    return f"{change.text} (predicted {' and '.join(differences) or 'to take the same'}{trained})"


def _activation_savings(setup: FailedSetup) -> str | None:
    """Size of the activations now, with half the micro-batch and with checkpointing; None if not known."""
    now, batch = setup.prediction.activation_bytes, setup.micro_batch_size
    checkpointed = setup.prediction.checkpointed_activation_bytes
    if not now or setup.checkpointed or not setup.prediction.gpu or not depends_on_workload(setup.run):
        return None
    savings = [f"{format_bytes(now * (batch // 2) // batch)} with batch size {batch // 2}"] if batch > 1 else []
    savings += [f"{format_bytes(checkpointed)} with activation checkpointing"] if checkpointed else []
    return f"its activations are {format_bytes(now)}, {' and '.join(savings)}" if savings else None
