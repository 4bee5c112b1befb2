"""Predicted memory of each planned trial, and after the trial the ratio of predicted to measured memory.

Trials that are predicted not to fit are marked as skipped where the user asked for that, and those that need far more
host memory than the node has always, unless forced. The prediction is stored in the record, so that every run checks
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config.spec import Accelerator, Placement, Trial
from ..errors import DsBenchError, PreflightError, UsageError
from ..models.lookup import ResolvedModel
from ..models.presets import ModelFacts
from ..records.schema import TrialRecord
from ..system import host_memory
from ..system.environment import Environment
from ..units import format_bytes
from . import what_if
from .memory import Prediction, predict
from .model_profile import ModelProfile, profile_of, profile_of_any

_NOT_RESIDENT = ("deepspeed_buffers", "overhead")
"""On the CPU accelerator DeepSpeed's buffers are resident only where they were touched."""
_FAR_BEYOND = 1.5
"""Times a node's memory above which a predicted need is refused: far more than predictions are off by."""
_MISS_FRACTION = 0.10
"""A prediction further off than this deserves a caveat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCapacity:
    """The memory there is."""

    gpu_bytes: int | None
    """Of the smallest card used, real or emulated; None on the CPU accelerator."""
    host_bytes: int | None
    """Of this node, or of the tightest limit on this process."""
    node_bytes: int | None = None
    """Host memory of this node, or what the cgroup allows of it, whatever ``--cpu-memory-limit`` says: beyond that
    limit a rank ends, beyond this the whole machine suffers. None: nothing is held against it."""

    @classmethod
    def of(cls, facts: Environment, place: Placement) -> MemoryCapacity:
        """As the environment and the flags tell."""
        cards = [gpu.memory_total_bytes for gpu in facts.gpus[: place.num_gpus]] if place.accelerator == "cuda" else []
        sizes = [size for size in (*cards, place.gpu_memory_limit_bytes) if size]
        limit = place.cpu_memory_limit_bytes
        hosts = (
            facts.host_memory_bytes,
            facts.cgroup_memory_limit_bytes,
            None if limit is None else limit * place.num_gpus,
        )
        known = [size for size in hosts if size]
        return cls(
            gpu_bytes=min(sizes) if cards and sizes else None,
            host_bytes=min(known, default=None),
            node_bytes=None if place.hostfile else min(filter(None, hosts[:2]), default=None),
        )


def node_memory_bytes() -> int | None:
    """Memory of this machine, or of its cgroup where that is less; None where the kernel does not tell."""
    known = [size for size in (host_memory.host_memory_bytes(), host_memory.cgroup_limit_bytes()) if size]
    return min(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpredicted:
    """A model whose memory nothing is known of."""

    reason: str


def profile(
    choice: ResolvedModel,
    seq_length: int,
    accelerator: Accelerator,
    *,
    dropout: float | None = None,
    trust_remote_code: bool = False,
    environment: Mapping[str, str] | None = None,
) -> ModelProfile | Unpredicted:
    """What prediction needs of a model: at once for a preset, else measured by a child process.

    ``dropout``: None for the model's own. ``environment``: variables of the trials' processes, for a model that is
    built as they build it. Never raises: a run must not end for want of a prediction.
    """
    try:
        if choice.facts is not None and _has_one_kind_of_layer(choice.facts):
            with contextlib.suppress(UsageError):  # then perhaps as it is
                return profile_of(choice.facts, seq_length, accelerator=accelerator, dropout=dropout)
        return profile_of_any(
            str(choice.config.get("path", choice.name)),
            "factory" if choice.source == "factory" else "path",
            seq_length,
            accelerator=accelerator,
            dropout=dropout,
            trust_remote_code=trust_remote_code,
            environment=environment,
        )
    except UsageError as error:
        return Unpredicted(reason=error.problem)
    except (DsBenchError, OSError, ValueError, KeyError, TypeError) as error:
        return Unpredicted(reason=f"{type(error).__name__}: {error}")


def _has_one_kind_of_layer(facts: ModelFacts) -> bool:
    kinds = facts.config.get("layer_types")
    return not isinstance(kinds, list) or len(set(map(str, kinds))) < 2


def attach_predictions(
    trials: Sequence[Trial], known: ModelProfile | Unpredicted, room: MemoryCapacity, *, skip: bool, force: bool = False
) -> list[Trial]:
    """The trials with their predictions, or with why they have none.

    With ``skip`` those that cannot fit are marked, never one that is tight. Those that need far more host memory than
    the node has are marked in any case, unless ``force``.
    """
    if isinstance(known, Unpredicted):
        return [_with_caveat(trial, f"memory is not predicted: {known.reason}") for trial in trials]
    others: dict[str, list[dict[str, Any]]] = {}  # repeats of a row share theirs
    found = []
    for trial in trials:
        key = replace(trial, repeat=0).key
        if key not in others:
            others[key] = _alternatives(trial, known)
        found.append(_foreseen(trial, known, room, others[key], skip=skip, force=force))
    return found


def _alternatives(trial: Trial, known: ModelProfile) -> list[dict[str, Any]]:
    """What other configurations of the same work would take, plain, for advice after the run."""
    work, config = trial.workload, trial.ds_config
    try:
        question = what_if.PlannedTrial(
            profile=known,
            workload=replace(work, batch_size=int(config.get("train_micro_batch_size_per_gpu", work.batch_size))),
            placement=replace(trial.placement, nvme_path=trial.placement.nvme_path or "/nvme"),
            configuration=trial.configuration,
            torch_adam=bool(config["optimizer"]["params"].get("torch_adam")),
        )
        return [asdict(each) for each in what_if.alternatives(question)]
    except (DsBenchError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return []  # a configuration of a shape the arithmetic lacks


def require_host_memory(trials: Sequence[Trial], node_bytes: int | None) -> None:
    """Raises PreflightError where every trial is predicted to need far more host memory than the node has."""
    able = [trial for trial in trials if trial.unsupported is None]
    needs = [peak_host_bytes([trial]) for trial in able]
    if node_bytes is None or not needs or not all(_far_beyond(need, node_bytes) for need in needs):
        return
    least = min(need for need in needs if need is not None)
    fewer = "fewer ranks (--num-gpus) " if able[0].placement.num_gpus > 1 else ""
    raise PreflightError(
        f"{able[0].workload.model} is predicted to need {format_bytes(least)} of host memory"
        f"{' in the leanest row' if len({trial.configuration.name for trial in able}) > 1 else ''}, "
        f"where this node has {format_bytes(node_bytes)}",
        remedy=f"take a smaller --model, {fewer}or another machine, or try it with --force",
    )


def _far_beyond(need: int | None, node_bytes: int | None) -> bool:
    return need is not None and node_bytes is not None and need > _FAR_BEYOND * node_bytes


def _with_caveat(trial: Trial, why: str) -> Trial:
    return trial if trial.unsupported else replace(trial, caveats=(*trial.caveats, why))


def _foreseen(
    trial: Trial, known: ModelProfile, room: MemoryCapacity, others: list[dict[str, Any]], *, skip: bool, force: bool
) -> Trial:
    if trial.unsupported:
        return trial
    try:
        prediction = predict(known, trial.workload, trial.placement, trial.ds_config)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        return _with_caveat(trial, f"memory is not predicted: the configuration's {type(error).__name__} ({error})")
    if prediction.unknown is not None:
        trial = _with_caveat(trial, f"activations are not predicted, the rest is: {prediction.unknown}")
    reason = _reason_it_cannot_fit(prediction, room) if skip else None
    host = _resident_host_bytes(prediction)
    if reason is None and not force and room.node_bytes is not None and _far_beyond(host, room.node_bytes):
        reason = _needs(host, room.node_bytes, "of host memory") + "; --force tries it"
    return replace(trial, prediction=prediction.to_dict() | {"alternatives": others}, skipped=reason)


def _reason_it_cannot_fit(prediction: Prediction, room: MemoryCapacity) -> str | None:
    """Why it cannot fit; None where it may."""
    gpu = prediction.gpu_bytes
    if room.gpu_bytes is not None and gpu > room.gpu_bytes:
        return _reason(gpu, room.gpu_bytes, "per GPU")
    host = _resident_host_bytes(prediction)
    if room.host_bytes is not None and host > room.host_bytes:
        return _reason(host, room.host_bytes, "of host memory")
    return None


def _resident_host_bytes(prediction: Prediction) -> int:
    """Host memory of a node that will really be taken."""
    return sum(size for name, size in prediction.host.items() if prediction.gpu or name not in _NOT_RESIDENT)


def peak_host_bytes(trials: Sequence[Trial]) -> int | None:
    """The most host memory of one node that any of them is predicted to take; None where none has a prediction."""
    known = [Prediction.from_dict(trial.prediction) for trial in trials if trial.prediction is not None]
    return max((_resident_host_bytes(prediction) for prediction in known), default=None)


def _reason(need: int, room: int, where: str) -> str:
    return _needs(need, room, where) + "; leave out --skip-predicted-oom to try it"


def _needs(need: int, room: int, where: str) -> str:
    return f"predicted to need {format_bytes(need)} {where}, where there is {format_bytes(room)}"


def predicted_over_measured(record: TrialRecord) -> float | None:
    """Ratio of the predicted GPU memory to the allocator's peak in the training steps, on the rank with the highest.

    Uses the prediction stored in ``record``, without the overhead that is assumed outside the allocator. None without
    a prediction or its activations, for a prediction of an unknown format, and without a measured GPU peak. On the CPU
    accelerator there is none: resident memory is not comparable with a prediction of tensor bytes (untouched buffers
    are not resident, forked ranks share libraries); see ``predicted_over_ledger``.
    """
    peak = max((rank.gpu_peak_bytes for rank in record.ranks if rank.gpu_peak_bytes), default=None)
    with contextlib.suppress(TypeError, AttributeError):
        prediction = _stored_prediction(record)
        if prediction is not None and prediction.unknown is None and peak:
            return (prediction.gpu_bytes - prediction.gpu.get("overhead", 0)) / peak
    return None


def predicted_over_ledger(record: TrialRecord) -> float | None:
    """Ratio of the predicted ledger to the measured one of the rank with the largest: bytes of tensors on all tiers.

    The category ``other`` is left out, and the activations too where they are not predicted. None without a prediction,
    for one of an unknown format, and without a measured ledger.
    """
    with contextlib.suppress(TypeError, AttributeError):
        prediction = _stored_prediction(record)
        if prediction is not None:
            left_out = ("other",) if prediction.unknown is None else ("other", "activations")
            measured = max((_ledger_bytes(rank.ledger, left_out) for rank in record.ranks), default=0)
            return _ledger_bytes(prediction.ledger, left_out) / measured if measured else None
    return None


def _stored_prediction(record: TrialRecord) -> Prediction | None:
    return None if record.trial.prediction is None else Prediction.from_dict(record.trial.prediction)


def _ledger_bytes(ledger: Mapping[str, Mapping[str, int]], left_out: Sequence[str]) -> int:
    return sum(size for row in ledger.values() for name, size in row.items() if name not in left_out)


def is_miss(ratio: float) -> bool:
    """Whether a ratio of predicted to measured memory is more than 10 % off."""
    return abs(ratio - 1) > _MISS_FRACTION


def outside_allocator_bytes(record: TrialRecord) -> int | None:
    """GPU memory in use beyond what torch's allocator had reserved, after the last measured step, in bytes.

    CUDA's context, NCCL, and any other process on the GPU: what the ``overhead`` of a prediction assumes, if there is
    no other process. Of the rank with the most; None without a GPU.
    """
    sizes = [
        max(0, rank.gpu_device_used_bytes - rank.gpu_reserved_bytes)
        for rank in record.ranks
        if rank.gpu_device_used_bytes is not None and rank.gpu_reserved_bytes is not None
    ]
    return max(sizes, default=None)
