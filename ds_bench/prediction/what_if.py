"""Before a run: does it fit, how many GPUs does it need, how large may the batch be, and what change would help most.

Asks ``memory.predict`` again and again with other questions; knows no formula of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..config import deepspeed_config, overrides, strategies
from ..config.spec import Configuration, Placement, Strategy, Workload
from .memory import DOES_NOT_FIT, FITS, TIGHT, Prediction, gpu_bytes_by_moment, predict
from .model_profile import ModelProfile

LARGEST_BATCH = 65536
"""Where the search for a micro-batch ends: one that still fits is at least this large."""
_NODE = 8
"""GPUs of a node where none is told."""
_MOST_GPUS = 8192
"""Beyond it no number of GPUs is tried."""
_SMALL_BUCKET = 50_000_000
"""Elements: a tenth of DeepSpeed's default; smaller ones cost speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrial:
    """One planned trial."""

    profile: ModelProfile
    workload: Workload
    placement: Placement
    configuration: Configuration
    ranks_per_node: int | None = None
    """GPUs of one node; all of them on one where None."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Laid over the DeepSpeed configuration."""
    torch_adam: bool = False
    """Whether torch's AdamW steps where the optimizer is not offloaded (``deepspeed_config.complete_config``)."""

    def config(self) -> deepspeed_config.Config:
        """The DeepSpeed configuration that the trial would run with."""
        batch = {
            "train_batch_size": None,
            "train_micro_batch_size_per_gpu": self.workload.batch_size,
            "gradient_accumulation_steps": self.workload.grad_accum,
        }
        return deepspeed_config.complete_config(
            overrides.overlay(overrides.overlay(self.configuration.deepspeed_config, self.changes), batch),
            self.workload,
            self.placement,
            torch_adam=self.torch_adam,
            largest_parameter=max(self.profile.tensors),
        )

    def predict(self) -> Prediction:
        """What it takes."""
        return predict(self.profile, self.workload, self.placement, self.config(), ranks_per_node=self.ranks_per_node)

    def gpu_bytes_by_moment(self) -> dict[str, Mapping[str, int]]:
        """What it takes per GPU at every moment of a step, by category (``memory.gpu_bytes_by_moment``)."""
        return gpu_bytes_by_moment(self.profile, self.workload, self.placement, self.config())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing to do differently, and what comes of it."""

    text: str
    """In the user's words: ``activation checkpointing``, ``batch size 2``, ``16 GPUs``."""
    prediction: Prediction
    trial: PlannedTrial
    """The one that it leads to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A change as a record carries it: what it would take, whatever there is. Plain values only."""

    text: str
    rank: int
    """0 for the gentlest."""
    gpu_bytes: int
    host_bytes: int
    """Per node."""
    stage: int
    offload_optimizer: str
    offload_param: str
    strategy_alone: bool
    """Nothing but the strategy differs."""

    @property
    def layout(self) -> tuple[int, str, str]:
        """As ``Configuration.layout``: what decides where model states live."""
        return self.stage, self.offload_optimizer, self.offload_param


def alternatives(question: PlannedTrial) -> list[Alternative]:
    """The changes that may help with what each would take, gentlest first, for advice that is given after the run.

    Left out is what takes no less than the configuration as it is, or than a gentler change that is not a mere change
    of strategy (which the run may have shown to fail). Halves of the micro-batch stand for any smaller one, and
    doublings of the GPUs for any larger number.
    """
    now = question.predict()
    weighed = [(now.gpu_bytes, now.host_bytes)]
    kept = []
    for rank, (text, changed) in enumerate(_combined(question, _halves, _more_gpus)):
        answer = changed.predict()
        if any(gpu <= answer.gpu_bytes and host <= answer.host_bytes for gpu, host in weighed):
            continue
        alone = changed == replace(question, configuration=changed.configuration)
        if not alone:
            weighed.append((answer.gpu_bytes, answer.host_bytes))
        kept.append(
            Alternative(
                text=text,
                rank=rank,
                gpu_bytes=answer.gpu_bytes,
                host_bytes=answer.host_bytes,
                stage=changed.configuration.stage,
                offload_optimizer=changed.configuration.offload_optimizer,
                offload_param=changed.configuration.offload_param,
                strategy_alone=alone,
            )
        )
    return kept


def _halves(question: PlannedTrial) -> Iterator[int]:
    size = question.workload.batch_size
    while size := size // 2:
        yield size


def _more_gpus(question: PlannedTrial) -> Iterator[tuple[str, PlannedTrial]]:
    if question.configuration.stage:
        for factor in (2, 4, 8):
            count = factor * question.placement.num_gpus
            yield _gpus(count), _with_gpus(question, count)


def fits(question: PlannedTrial, gpu_bytes: int, host_bytes: int | None = None) -> bool:
    """Whether the verdict is anything but ``does not fit``."""
    return question.predict().verdict(gpu_bytes, host_bytes) != DOES_NOT_FIT


def min_gpus(question: PlannedTrial, gpu_bytes: int, host_bytes: int | None = None) -> int | None:
    """The fewest GPUs with which it fits, in whole nodes above one; None where no number of them helps.

    Never more than were asked about where it fits with those.
    """
    found, asked = _fewest(question, gpu_bytes, host_bytes), question.placement.num_gpus
    if (found is None or found > asked) and fits(question, gpu_bytes, host_bytes):
        return asked
    return found


def min_gpus_without_offload(question: PlannedTrial, gpu_bytes: int, host_bytes: int | None = None) -> int | None:
    """As ``min_gpus`` for the ZeRO stage, with nothing offloaded, that needs the fewest; the workload stays."""
    stages = (_with_strategy(question, strategies.ZERO_STAGES[stage]) for stage in (1, 2, 3))
    counts = (min_gpus(staged, gpu_bytes, host_bytes) for staged in stages)
    return min((count for count in counts if count is not None), default=None)


def with_most_gpus(question: PlannedTrial) -> PlannedTrial:
    """The question with the largest number of GPUs that ``min_gpus`` tries: one where nothing is split."""
    if question.configuration.stage == 0:
        return _with_gpus(question, 1)
    return _with_gpus(question, max(_doubling(question.ranks_per_node or _NODE)))


def _fewest(question: PlannedTrial, gpu_bytes: int, host_bytes: int | None) -> int | None:
    before, node = 0, question.ranks_per_node or _NODE
    for count in _doubling(node):
        if fits(_with_gpus(question, count), gpu_bytes, host_bytes):
            unit = 1 if count <= node else node
            good = partial(_fits_on, question, unit, gpu_bytes, host_bytes)
            return _first(before // unit, count // unit, good) * unit
        if question.configuration.stage == 0:
            return None  # every GPU holds everything
        before = count
    return None


def _doubling(node: int) -> Iterator[int]:
    """1, 2, 4 … below a node, then a node, two, four …"""
    count = 1
    while count < node:
        yield count
        count *= 2
    count = node
    while count <= max(node, _MOST_GPUS):
        yield count
        count *= 2


def _fits_on(question: PlannedTrial, unit: int, gpu_bytes: int, host_bytes: int | None, units: int) -> bool:
    return fits(_with_gpus(question, unit * units), gpu_bytes, host_bytes)


def _with_gpus(question: PlannedTrial, count: int) -> PlannedTrial:
    return replace(question, placement=replace(question.placement, num_gpus=count))


def _first(too_small: int, enough: int, good: Callable[[int], bool]) -> int:
    """The smallest number above ``too_small`` that is ``good``, as ``enough`` and all above it are."""
    between = range(too_small + 1, enough)
    return too_small + 1 + bisect_left(between, True, key=good)


def max_batch(
    question: PlannedTrial, gpu_bytes: int, host_bytes: int | None = None, *, tight: bool = True
) -> int | None:
    """The largest micro-batch that fits, up to LARGEST_BATCH; None where one sequence does not.

    ``tight``: whether one that leaves it ``tight`` counts.
    """
    enough = (FITS, TIGHT) if tight else (FITS,)

    def too_large(size: int) -> bool:
        return _with_batch(question, size).predict().verdict(gpu_bytes, host_bytes) not in enough

    if too_large(1):
        return None
    size = 1
    while size < LARGEST_BATCH and not too_large(2 * size):
        size *= 2
    return size if size >= LARGEST_BATCH else _first(size, 2 * size, too_large) - 1


def _with_batch(question: PlannedTrial, size: int) -> PlannedTrial:
    return replace(question, workload=replace(question.workload, batch_size=size))


def smallest_change(question: PlannedTrial, gpu_bytes: int, host_bytes: int | None = None) -> Change | None:
    """The first of the usual remedies, gentlest first, with which it fits; None where it fits already or none helps.

    In order: smaller buckets, activation checkpointing, a smaller micro-batch, the next ZeRO stages, offload of the
    optimizer, of the parameters, both to NVMe, half the GPUs where the host is short of memory, more GPUs; then the
    same on top of checkpointing, and of checkpointing with a batch of one; last, other GPUs at a later stage. One
    that makes it ``fits`` goes before one that leaves it ``tight``.
    """
    if fits(question, gpu_bytes, host_bytes):
        return None
    tight: Change | None = None
    smaller = partial(_smaller_batch, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    others = partial(_on_others, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    for text, changed in _combined(question, smaller, others):
        prediction = changed.predict()
        verdict = prediction.verdict(gpu_bytes, host_bytes)
        change = Change(text=text, prediction=prediction, trial=changed)
        if verdict == FITS:
            return change
        if verdict != DOES_NOT_FIT and tight is None:
            tight = change
    return tight


_Changed = Iterator[tuple[str, PlannedTrial]]


def _combined(
    question: PlannedTrial, smaller: Callable[[PlannedTrial], Iterator[int]], others: Callable[[PlannedTrial], _Changed]
) -> _Changed:
    """Every remedy alone, then on top of the two that cost no more hardware; last, other GPUs at a later stage.

    ``smaller``: micro-batches to try. ``others``: the same on other numbers of GPUs.
    """
    yield from _remedies(question, smaller, others)
    for text, base in _cheap_changes(question):
        yield text, base
        yield from _on_top(text, _remedies(base, smaller, others))
    for text, changed in _strategies_with_less_memory(question):
        yield from _on_top(text, others(changed))
    for text, base in _cheap_changes(question):
        for other, changed in _strategies_with_less_memory(base):
            yield from _on_top(f"{text}, {other}", others(changed))


def _on_top(text: str, remedies: Iterator[tuple[str, PlannedTrial]]) -> Iterator[tuple[str, PlannedTrial]]:
    return ((f"{text}, {other}", changed) for other, changed in remedies)


def _cheap_changes(question: PlannedTrial) -> Iterator[tuple[str, PlannedTrial]]:
    text = ""
    if not question.workload.activation_checkpointing:
        text, question = "activation checkpointing", _checkpointed(question)
        yield text, question
    if question.workload.batch_size > 1:
        yield f"{text}, batch size 1" if text else "batch size 1", _with_batch(question, 1)


def _remedies(
    question: PlannedTrial, smaller: Callable[[PlannedTrial], Iterator[int]], others: Callable[[PlannedTrial], _Changed]
) -> _Changed:
    workload = question.workload
    if question.configuration.stage:
        yield "reduce_bucket_size 5e7", replace(question, changes=_smaller_bucket(question.changes))
    if not workload.activation_checkpointing:
        yield "activation checkpointing", _checkpointed(question)
    for size in smaller(question):
        yield f"batch size {size}", _with_batch(question, size)
    yield from _strategies_with_less_memory(question)
    yield from others(question)


def _smaller_batch(question: PlannedTrial, gpu_bytes: int, host_bytes: int | None) -> Iterator[int]:
    """The largest that fits with room to spare; where there is none, the largest that is tight; at most one."""
    if question.workload.batch_size > 1:
        size = max_batch(question, gpu_bytes, host_bytes, tight=False) or max_batch(question, gpu_bytes, host_bytes)
        yield from filter(None, [size])


def _on_others(question: PlannedTrial, gpu_bytes: int, host_bytes: int | None) -> Iterator[tuple[str, PlannedTrial]]:
    """Other numbers of GPUs: fewer on a node short of memory, as each rank takes some of its own; else more."""
    if host_bytes is not None and question.predict().host_bytes > host_bytes:
        count = min(question.placement.num_gpus, question.ranks_per_node or question.placement.num_gpus)
        while count := count // 2:
            yield _gpus(count), _with_gpus(question, count)
    needed = min_gpus(question, gpu_bytes, host_bytes)
    if needed is not None and needed > question.placement.num_gpus:
        yield _gpus(needed), _with_gpus(question, needed)


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _checkpointed(question: PlannedTrial) -> PlannedTrial:
    return replace(question, workload=replace(question.workload, activation_checkpointing=True))


def _smaller_bucket(changes: Mapping[str, Any]) -> dict[str, Any]:
    return overrides.overlay(changes, {"zero_optimization": {"reduce_bucket_size": _SMALL_BUCKET}})


def _strategies_with_less_memory(question: PlannedTrial) -> Iterator[tuple[str, PlannedTrial]]:
    """Strategies that keep less on the GPU, in the order of what they cost, with the row's own settings."""
    now = question.configuration
    later = [] if now.offloads_optimizer else [strategies.ZERO_STAGES[stage] for stage in range(now.stage + 1, 4)]
    offloads = map(strategies.offload_strategy, ("cpu_optimizer", "cpu_full", "nvme"))
    for strategy in (*later, *offloads):
        if (strategy.stage, strategy.offload_optimizer, strategy.offload_param) != now.layout:
            yield strategy.label, _with_strategy(question, strategy)


def _with_strategy(question: PlannedTrial, strategy: Strategy) -> PlannedTrial:
    now, workload = question.configuration, question.workload
    changes = deepspeed_config.changes_of(now.deepspeed_config, now, workload, question.placement)
    base = deepspeed_config.base_config(strategy, workload.batch_size, workload.grad_accum)
    configuration = strategies.make_configuration(strategy, overrides.overlay(base, changes), now.workload_changes)
    return replace(question, configuration=configuration)
