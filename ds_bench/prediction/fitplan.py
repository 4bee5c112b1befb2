"""Before a run: does it fit, how many GPUs does it need, how large may the batch be, and what change would help most.

Asks ``memory.predict`` again and again with other questions; knows no formula of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from .. import dsconfig
from ..spec import Placement, Strategy, Workload
from .activations import ModelProfile
from .memory import DOES_NOT_FIT, FITS, Prediction, predict

_LARGEST_BATCH = 65536
_NODE = 8
"""GPUs of a usual node: larger jobs are counted in whole ones."""
_SMALL_BUCKET = 50_000_000
"""Elements: a tenth of DeepSpeed's default; smaller ones cost speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One planned trial."""

    profile: ModelProfile
    workload: Workload
    placement: Placement
    strategy: Strategy
    ranks_per_node: int | None = None
    """GPUs of one node; all of them on one where None."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Laid over the strategy's DeepSpeed configuration."""
    torch_adam: bool = False
    """Whether torch's AdamW steps where the optimizer is not offloaded (``dsconfig.complete``)."""

    def config(self) -> dsconfig.Config:
        """The DeepSpeed configuration that the trial would run with."""
        base = dsconfig.base_config(self.strategy, self.workload.batch_size, self.workload.grad_accum)
        return dsconfig.complete(
            dsconfig.overlay(base, self.changes),
            self.workload,
            self.placement,
            torch_adam=self.torch_adam,
            largest_parameter=max(self.profile.tensors),
        )

    def answer(self) -> Prediction:
        """What it takes."""
        return predict(self.profile, self.workload, self.placement, self.config(), ranks_per_node=self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing to do differently, and what comes of it."""

    text: str
    """In the user's words: ``activation checkpointing``, ``batch size 2``, ``16 GPUs``."""
    prediction: Prediction


def fits(question: Question, gpu_bytes: int, host_bytes: int | None = None) -> bool:
    """Whether the verdict is anything but ``does not fit``."""
    return question.answer().verdict(gpu_bytes, host_bytes) != DOES_NOT_FIT


def min_gpus(question: Question, gpu_bytes: int, host_bytes: int | None = None) -> int | None:
    """The fewest GPUs with which it fits, whole nodes of 8 above that; None where no number of them helps."""
    before = 0
    for count in (2**doubling for doubling in range(14)):
        if fits(_on(question, count), gpu_bytes, host_bytes):
            unit = 1 if count <= _NODE else _NODE
            good = partial(_fits_on, question, unit, gpu_bytes, host_bytes)
            return _first(before // unit, count // unit, good) * unit
        if question.strategy.stage == 0:
            return None  # every GPU holds everything
        before = count
    return None


def _fits_on(question: Question, unit: int, gpu_bytes: int, host_bytes: int | None, units: int) -> bool:
    return fits(_on(question, unit * units), gpu_bytes, host_bytes)


def _on(question: Question, count: int) -> Question:
    return replace(question, placement=replace(question.placement, num_gpus=count))


def _first(too_small: int, enough: int, good: Callable[[int], bool]) -> int:
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        too_small, enough = (too_small, middle) if good(middle) else (middle, enough)
    return enough


def max_batch(question: Question, gpu_bytes: int, host_bytes: int | None = None) -> int | None:
    """The largest micro-batch that fits; None where one sequence does not."""

    def too_large(size: int) -> bool:
        return not fits(_with_batch(question, size), gpu_bytes, host_bytes)

    if too_large(1):
        return None
    size = 1
    while size < _LARGEST_BATCH and not too_large(2 * size):
        size *= 2
    return size if size >= _LARGEST_BATCH else _first(size, 2 * size, too_large) - 1


def _with_batch(question: Question, size: int) -> Question:
    return replace(question, workload=replace(question.workload, batch_size=size))


def smallest_change(question: Question, gpu_bytes: int, host_bytes: int | None = None) -> Change | None:
    """The first of the usual remedies, gentlest first, with which it fits; None where it fits already or none helps.

    In order: smaller buckets, activation checkpointing, a smaller micro-batch, the next ZeRO stages, offload of the
    optimizer, of the parameters, both to NVMe, more GPUs; then the same on top of checkpointing, and of checkpointing
    with a batch of one. One that makes it ``fits`` goes before one that leaves it ``tight``.
    """
    if fits(question, gpu_bytes, host_bytes):
        return None
    tight: Change | None = None
    for text, changed in _combined(question, gpu_bytes, host_bytes):
        prediction = changed.answer()
        verdict = prediction.verdict(gpu_bytes, host_bytes)
        if verdict == FITS:
            return Change(text=text, prediction=prediction)
        if verdict != DOES_NOT_FIT and tight is None:
            tight = Change(text=text, prediction=prediction)
    return tight


def _combined(question: Question, gpu_bytes: int, host_bytes: int | None) -> Iterator[tuple[str, Question]]:
    """Every remedy alone, then on top of the two that cost no more hardware."""
    yield from _remedies(question, gpu_bytes, host_bytes)
    text = ""
    if not question.workload.activation_checkpointing:
        text, question = "activation checkpointing", _checkpointed(question)
        yield from ((f"{text}, {other}", changed) for other, changed in _remedies(question, gpu_bytes, host_bytes))
    if question.workload.batch_size > 1:
        text = f"{text}, batch size 1" if text else "batch size 1"
        question = _with_batch(question, 1)
        yield from ((f"{text}, {other}", changed) for other, changed in _remedies(question, gpu_bytes, host_bytes))


def _remedies(question: Question, gpu_bytes: int, host_bytes: int | None) -> Iterator[tuple[str, Question]]:
    strategy, workload = question.strategy, question.workload
    if strategy.stage:
        yield "reduce_bucket_size 5e7", replace(question, changes=_smaller_bucket(question.changes))
    if not workload.activation_checkpointing:
        yield "activation checkpointing", _checkpointed(question)
    if workload.batch_size > 1 and (size := max_batch(question, gpu_bytes, host_bytes)):
        yield f"batch size {size}", _with_batch(question, size)
    for other in _stronger(strategy):
        yield other.label, replace(question, strategy=other)
    count = min_gpus(question, gpu_bytes, host_bytes)
    if count is not None and count > question.placement.num_gpus:
        yield f"{count} GPUs", _on(question, count)


def _checkpointed(question: Question) -> Question:
    return replace(question, workload=replace(question.workload, activation_checkpointing=True))


def _smaller_bucket(changes: Mapping[str, Any]) -> dict[str, Any]:
    return dsconfig.overlay(changes, {"zero_optimization": {"reduce_bucket_size": _SMALL_BUCKET}})


def _stronger(strategy: Strategy) -> Iterator[Strategy]:
    """Strategies that keep less on the GPU, in the order of what they cost."""
    from ..strategies import ZERO_STAGES, offload_strategy

    if not strategy.offloads_optimizer:
        yield from (ZERO_STAGES[stage] for stage in range(strategy.stage + 1, 4))
    for name in ("cpu_optimizer", "cpu_full", "nvme"):
        other = offload_strategy(name)
        if (other.offload_optimizer, other.offload_param, other.stage) != (
            strategy.offload_optimizer,
            strategy.offload_param,
            strategy.stage,
        ):
            yield other
