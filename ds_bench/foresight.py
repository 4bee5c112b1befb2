"""Each planned trial with its predicted memory, and a refusal where it cannot fit and the user does not want to see it.

The prediction is stored beside the measurement, so that every run checks it (``prediction.hindsight``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .environment import Environment
from .errors import DsBenchError
from .modelsource import ModelChoice
from .prediction.activations import ModelProfile, profile_of
from .prediction.memory import Prediction, predict
from .spec import Placement, Trial
from .units import format_bytes

_NOT_RESIDENT = ("deepspeed_buffers", "overhead")
"""On the CPU accelerator DeepSpeed's buffers are resident only where they were touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory there is."""

    gpu_bytes: int | None
    """Of the smallest card used, real or emulated; None on the CPU accelerator."""
    host_bytes: int | None
    """Of this node, or of the tightest limit on this process."""

    @classmethod
    def of(cls, facts: Environment, place: Placement) -> Room:
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
        return cls(gpu_bytes=min(sizes) if cards and sizes else None, host_bytes=min(known, default=None))


def profile(choice: ModelChoice, seq_length: int) -> ModelProfile | None:
    """What prediction needs of a model: at once for a preset, else measured once by a child process.

    None for a model factory, and for what cannot be counted or measured: a run must not end for want of a prediction.
    """
    if choice.facts is None:
        return None
    try:
        return profile_of(choice.facts, seq_length, path=choice.config.get("path"))
    except (DsBenchError, OSError, ValueError, KeyError, TypeError):
        return None


def foresee(trials: Sequence[Trial], known: ModelProfile | None, room: Room, *, skip: bool) -> list[Trial]:
    """The trials with their predictions; with ``skip`` those that cannot fit are marked, never one that is tight."""
    if known is None:
        return list(trials)
    return [_foreseen(trial, known, room, skip=skip) for trial in trials]


def _foreseen(trial: Trial, known: ModelProfile, room: Room, *, skip: bool) -> Trial:
    if trial.unsupported:
        return trial
    try:
        prediction = predict(known, trial.workload, trial.placement, trial.ds_config)
    except (ValueError, KeyError, TypeError, ZeroDivisionError):  # a configuration of a shape the arithmetic lacks
        return trial
    reason = _hopeless(prediction, room) if skip else None
    return replace(trial, prediction=prediction.to_dict(), skipped=reason)


def _hopeless(prediction: Prediction, room: Room) -> str | None:
    """Why it cannot fit; None where it may."""
    gpu = prediction.gpu_bytes
    if room.gpu_bytes is not None and gpu > room.gpu_bytes:
        return _reason(gpu, room.gpu_bytes, "per GPU")
    host = _resident(prediction)
    if room.host_bytes is not None and host > room.host_bytes:
        return _reason(host, room.host_bytes, "of host memory")
    return None


def _resident(prediction: Prediction) -> int:
    """Host memory of a node that will really be taken."""
    return sum(size for name, size in prediction.host.items() if prediction.gpu or name not in _NOT_RESIDENT)


def host_need(trials: Sequence[Trial]) -> int | None:
    """The most host memory of one node that any of them is predicted to take; None where none has a prediction."""
    known = [Prediction.from_dict(trial.prediction) for trial in trials if trial.prediction is not None]
    return max((_resident(prediction) for prediction in known), default=None)


def _reason(need: int, room: int, where: str) -> str:
    return (
        f"predicted to need {format_bytes(need)} {where}, where there is {format_bytes(room)}; "
        "leave out --skip-predicted-oom to try it"
    )
