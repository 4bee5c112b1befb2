"""Answers questions before a run: does it fit, how many GPUs are needed, how large can the batch be, what would help.

Every answer compares predictions (``predicted_memory.predict``) of changed trials; this module has no formulas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from ..config import axes, deepspeed_config, strategies
from ..config.deepspeed_config import overlay
from ..config.spec import Configuration, Placement, Workload
from ..config.strategies import simplicity
from ..units import format_items, format_series
from .fit_verdict import DOES_NOT_FIT, FITS, TIGHT
from .model_profile import ModelProfile
from .predicted_memory import Alternative, Prediction, Saving
from .replayed_need import ChildTraces, ReplayMode, predict_near

LARGEST_BATCH = 65536
"""Largest micro-batch that is tried: if it fits, the largest that fits may be larger."""
_MAX_GPUS = 8192
"""Largest number of GPUs that is tried."""
BUCKET_KEY = "zero_optimization.reduce_bucket_size"
DEFAULT_BUCKET, SMALL_BUCKET = 500_000_000, 50_000_000
"""Elements: DeepSpeed's default, and a tenth of it; smaller ones cost speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrial:
    """A trial whose memory is predicted, before its DeepSpeed configuration is completed."""

    profile: ModelProfile
    workload: Workload
    placement: Placement
    configuration: Configuration
    ranks_per_node: int
    """GPUs of a node; a trial with fewer is on one node."""
    hidden_size: int | None = None
    """The model's, which decides the size of small buffers; None if unknown."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the DeepSpeed configuration, merged into it by ``deepspeed_config.overlay``."""
    loads_weights: bool = False
    """Whether every run begins with ``from_pretrained`` (``predicted_memory.predict``)."""
    may_replace_loss: bool = False
    """Whether a different loss may be proposed: the profile has the variant ``tiled``."""
    torch_adam: bool = False
    """Whether torch's AdamW is used if the optimizer is not offloaded (``deepspeed_config.complete_config``)."""
    replays: ReplayMode = "near"
    """Which rows are replayed when they are judged."""
    child_traces: ChildTraces = "usual"
    varying_lengths: bool = False
    """Whether sequences vary in length, up to the workload's."""

    def config(self) -> deepspeed_config.Config:
        """Return the completed DeepSpeed configuration that the trial would run with."""
        # The three batch keys are replaced: a train_batch_size for the unchanged trial would contradict a changed one.
        batch = {
            "train_batch_size": None,
            "train_micro_batch_size_per_gpu": self.workload.batch_size,
            "gradient_accumulation_steps": self.workload.grad_accum,
        }
        return deepspeed_config.complete_config(
            overlay(overlay(self.configuration.deepspeed_config, self.changes), batch),
            self.workload,
            self.placement,
            torch_adam=self.torch_adam,
            largest_parameter=max(self.profile.all_tensors),
        )

    def predict(self) -> Prediction:
        """Predict without a replay."""
        return replace(self, replays="never").judge(None)

    def verdict(self, gpu_bytes: int, host_bytes: int | None = None) -> str:
        """Return the verdict, in a quarter of the time that ``judge`` takes."""
        return self.judge(gpu_bytes, verdict_only=True).verdict(gpu_bytes, host_bytes)

    def judge(self, gpu_bytes: int | None, *, verdict_only: bool = False) -> Prediction:
        """Predict, and replay the trial if the verdict for a GPU of this size is open, unless ``replays`` differs.

        ``verdict_only``: see ``predict_near``.
        """
        return predict_near(
            self.profile,
            self.workload,
            self.placement,
            self.config(),
            gpu_bytes,
            engine=self.configuration.engine,
            ranks_per_node=self.ranks_per_node,
            mode=self.replays,
            loads_weights=self.loads_weights,
            varying_lengths=self.varying_lengths,
            verdict_only=verdict_only,
            variables=self.configuration.variables,
            child_traces=self.child_traces,
        )


Settings = Mapping[str, Any]
"""A change: ``strategy``, ``loss``, ``batch_size``, ``activation_checkpointing``, ``num_gpus`` or ``BUCKET_KEY`` → its
new value, in the order in which :func:`settings_text` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change to a planned trial, with the memory that the changed trial takes."""

    settings: Settings
    prediction: Prediction
    trial: PlannedTrial
    """The trial after the change."""

    @property
    def text(self) -> str:
        """The settings in words."""
        return settings_text(self.settings)


def alternatives(planned: PlannedTrial, gpu_bytes: int | None = None) -> list[Alternative]:
    """Return the changes that could help, with their memory, in the order of their cost; for advice after the run.

    ``gpu_bytes``: memory of the GPU that ``PlannedTrial.judge`` judges them for; None if unknown.

    A change is left out if part of its memory is unknown, or if by the rule it needs at least as much as the trial
    itself or a cheaper change. A change to only the strategy is compared just with the trial, because the run may show
    that cheaper ones fail or do not act on what ran out. Micro-batches are halved; numbers of GPUs are 1.5 to 8
    times as large, in whole nodes above one.
    """
    node, own = planned.ranks_per_node, planned.placement.num_gpus

    def halves(trial: PlannedTrial) -> Iterator[int]:
        size = trial.workload.batch_size
        while size := size // 2:
            yield size

    def more_gpus(trial: PlannedTrial) -> Iterator[int]:
        if trial.configuration.stage:
            counts = (ceil(factor * own) for factor in (1.5, 2, 4, 8))
            yield from dict.fromkeys(count if count < node else ceil(count / node) * node for count in counts)

    unchanged = planned.predict()
    needs = [(unchanged.least_gpu_bytes, unchanged.host_bytes)]
    found = []
    for rank, settings in enumerate(_combined(planned, halves, more_gpus)):
        changed = with_settings(planned, settings)
        prediction = changed.predict()
        strategy_alone = settings.keys() == {"strategy"}
        compared = needs[:1] if strategy_alone else needs
        if any(gpu <= prediction.least_gpu_bytes and host <= prediction.host_bytes for gpu, host in compared):
            continue
        if not strategy_alone:
            needs.append((prediction.least_gpu_bytes, prediction.host_bytes))
        if prediction.unknown is not None or prediction.gpu_need.is_lower_bound:
            continue
        found.append(
            Alternative(
                settings=settings,
                rank=rank,
                gpu_bytes=prediction.gpu_bytes,
                host_bytes=prediction.host_bytes,
                layout=changed.configuration.layout,
                need=changed.judge(gpu_bytes).need,
            )
        )
    return found


def with_settings(planned: PlannedTrial, settings: Settings) -> PlannedTrial:
    """Return the trial with a change."""
    for name, value in settings.items():
        if name == "strategy":
            now, workload, strategy = planned.configuration, planned.workload, strategies.named_strategy(value)
            own = deepspeed_config.changes_of(now.deepspeed_config, now, workload, planned.placement)
            # Copied whole: a block without ``enabled``, or only one that is off, would mean fp32.
            blocks = deepspeed_config.PRECISION_BLOCKS
            own |= {name: block for name in blocks if (block := now.deepspeed_config.get(name)) is not None}
            base = deepspeed_config.base_config(strategy, workload.batch_size, workload.grad_accum)
            configuration = strategies.make_configuration(strategy, overlay(base, own), now.workload_changes)
            planned = replace(planned, configuration=replace(configuration, variables=now.variables))
        elif name == "num_gpus":
            planned = replace(planned, placement=replace(planned.placement, num_gpus=value))
        elif name == BUCKET_KEY:
            block = {"zero_optimization": {"reduce_bucket_size": value}}
            planned = replace(planned, changes=overlay(planned.changes, block))
        else:
            planned = replace(planned, workload=replace(planned.workload, **{name: value}))
    return planned


def settings_text(settings: Settings) -> str:
    """``activation checkpointing, batch size 1 and ZeRO-3``."""
    texts: Mapping[str, Callable[[Any], str]] = {
        "strategy": lambda name: strategies.named_strategy(name).label,
        "num_gpus": lambda count: format_items(count, "GPU"),
        "batch_size": lambda size: f"batch size {size}",
        "activation_checkpointing": lambda _: "activation checkpointing",
        BUCKET_KEY: lambda _: "reduce_bucket_size 5e7",
        "loss": lambda name: f"{name} loss (--axis loss={name})",
    }
    return format_series((texts[name](value) for name, value in settings.items()), "and")


def savings(planned: PlannedTrial) -> list[Saving]:
    """Return what named changes would save: smaller buffers, activation checkpointing, offload at the same stage.

    Changes that save nothing on the accelerator are left out.
    """
    now, configuration, may_offload = planned.predict(), planned.configuration, planned.placement.accelerator == "cuda"
    blocks: list[tuple[str, dict[str, Any]]] = []
    if configuration.is_reference:
        may_offload = False  # torch's own engines have neither offload nor ZeRO's buckets
    elif configuration.stage and planned.hidden_size is not None:
        sizes = axes.small_sizes(planned.hidden_size)
        acting = deepspeed_config.sizes_for(sizes, configuration.stage, configuration.offload_param)
        blocks.append(("small_buffers", acting))
    elif configuration.stage:
        blocks.append(("a smaller bucket", {"reduce_bucket_size": SMALL_BUCKET}))
    if may_offload and configuration.stage and not configuration.offloads_optimizer:
        blocks.append(("optimizer offload", {"offload_optimizer": {"device": "cpu", "pin_memory": True}}))
    if may_offload and configuration.stage == 3 and configuration.layout[1:] == ("cpu", "none"):
        blocks.append(("parameter offload", {"offload_param": {"device": "cpu", "pin_memory": True}}))
    named: list[tuple[str, Settings, PlannedTrial]] = []
    for name, block in blocks:
        changes: Settings = {f"zero_optimization.{key}": value for key, value in block.items()}
        named.append((name, changes, replace(planned, changes=overlay(planned.changes, {"zero_optimization": block}))))
    if not planned.workload.activation_checkpointing:
        named.append(("activation checkpointing", _CHECKPOINTING, with_settings(planned, _CHECKPOINTING)))
    found = []
    for name, settings, changed in named:
        then = changed.predict()
        gpu_bytes, host_bytes = now.gpu_bytes - then.gpu_bytes, now.host_bytes - then.host_bytes
        if (gpu_bytes if now.gpu else host_bytes) > 0:
            found.append(Saving(name=name, changes=settings, gpu_bytes=gpu_bytes, host_bytes=host_bytes))
    return found


def fits(planned: PlannedTrial, gpu_bytes: int, host_bytes: int | None = None) -> bool:
    """Whether the trial can fit: any verdict other than ``does not fit``."""
    return planned.verdict(gpu_bytes, host_bytes) != DOES_NOT_FIT


def min_gpus(planned: PlannedTrial, gpu_bytes: int, host_bytes: int | None = None) -> int | None:
    """Return the fewest GPUs that make the trial fit, in whole nodes above one; None if no number is enough.

    If it fits with its own number of GPUs, which need not be whole nodes, the result is not larger than that.
    """

    def enough(count: int) -> bool:
        return fits(with_settings(planned, {"num_gpus": count}), gpu_bytes, host_bytes)

    node, own = planned.ranks_per_node, planned.placement.num_gpus
    fewest, too_few = None, 0
    # 1, 2, 4 … below a node, then 1, 2, 4 … nodes: at least one, even if a node exceeds the largest number tried.
    counts = [count for power in range(node.bit_length()) if (count := 2**power) < node]
    counts += [node * 2**power for power in range(max(1, (_MAX_GPUS // node).bit_length()))]
    # At stage 0 every GPU holds everything, however many there are.
    for count in counts if planned.configuration.stage else counts[:1]:
        if enough(count):
            # Bisect between the last count that does not fit and the first that does, by single GPUs or whole nodes.
            unit = 1 if count <= node else node
            index = bisect_left(range(too_few + unit, count, unit), True, key=enough)
            fewest = too_few + (index + 1) * unit
            break
        too_few = count
    if (fewest is None or fewest > own) and fits(planned, gpu_bytes, host_bytes):
        return own
    return fewest


def min_gpus_without_offload(planned: PlannedTrial, gpu_bytes: int, host_bytes: int | None = None) -> int | None:
    """Return ``min_gpus`` of the ZeRO stage that needs the fewest GPUs without offloading anything."""
    stages = (with_settings(planned, {"strategy": name}) for name in ("zero1", "zero2", "zero3"))
    counts = (min_gpus(staged, gpu_bytes, host_bytes) for staged in stages)
    return min((count for count in counts if count is not None), default=None)


def max_batch(
    planned: PlannedTrial, gpu_bytes: int, host_bytes: int | None = None, *, tight: bool = True
) -> int | None:
    """Return the largest micro-batch that fits, up to LARGEST_BATCH; None if not even one sequence does.

    ``tight``: whether a micro-batch whose verdict is ``tight`` counts as fitting.
    """
    accepted = (FITS, TIGHT) if tight else (FITS,)

    def too_large(size: int) -> bool:
        return with_settings(planned, {"batch_size": size}).verdict(gpu_bytes, host_bytes) not in accepted

    if too_large(1):
        return None
    size = 1
    while size < LARGEST_BATCH and not too_large(2 * size):
        size *= 2
    # Memory grows with the micro-batch: bisect between the last that fits and the first that does not.
    return size if size >= LARGEST_BATCH else size + bisect_left(range(size + 1, 2 * size), True, key=too_large)


def smallest_change(planned: PlannedTrial, gpu_bytes: int, host_bytes: int | None = None) -> Change | None:
    """Return the cheapest change that makes the trial fit; None if it fits already or no change is enough.

    In order of cost: a tiled loss, smaller buckets, activation checkpointing, a smaller micro-batch, the next ZeRO
    stages, offload of the optimizer, of the parameters, both to NVMe, half the GPUs if the host lacks memory, more
    GPUs; then the same combined with a tiled loss, then with checkpointing as well, then with a micro-batch of 1 as
    well; last, more or fewer GPUs with a later stage or offload. A change with the verdict ``fits`` is preferred to all
    with the verdict ``tight``.
    """
    if fits(planned, gpu_bytes, host_bytes):
        return None

    def largest_batch(trial: PlannedTrial) -> Iterator[int]:
        if trial.workload.batch_size > 1:
            size = max_batch(trial, gpu_bytes, host_bytes, tight=False) or max_batch(trial, gpu_bytes, host_bytes)
            yield from filter(None, [size])

    def other_gpus(trial: PlannedTrial) -> Iterator[int]:
        # Fewer if the node lacks memory, because every rank takes some of it; then more.
        if host_bytes is not None and trial.predict().host_bytes > host_bytes:
            count = min(trial.placement.num_gpus, trial.ranks_per_node)
            while count := count // 2:
                yield count
        needed = min_gpus(trial, gpu_bytes, host_bytes)
        if needed is not None and needed > trial.placement.num_gpus:
            yield needed

    best: Settings | None = None
    for settings in _combined(planned, largest_batch, other_gpus):
        verdict = with_settings(planned, settings).verdict(gpu_bytes, host_bytes)
        if verdict == FITS or (verdict != DOES_NOT_FIT and best is None):
            best = settings
        if verdict == FITS:
            break
    if best is None:
        return None
    changed = with_settings(planned, best)
    return Change(settings=best, prediction=changed.judge(gpu_bytes), trial=changed)


def cheapest_change(changes: Iterable[Change], num_gpus: int, gpu_bytes: int, host_bytes: int | None = None) -> Change:
    """Return the cheapest of the changes to several rows: no more GPUs, room to spare, no offload, few settings."""
    return min(
        changes,
        key=lambda change: (
            change.trial.placement.num_gpus > num_gpus,
            change.prediction.verdict(gpu_bytes, host_bytes) == TIGHT,
            change.trial.configuration.offloads,
            len(change.settings.keys() - {"strategy"}),
            simplicity(change.trial.configuration.layout),
        ),
    )


_Numbers = Callable[[PlannedTrial], Iterator[int]]
_CHECKPOINTING: Settings = {"activation_checkpointing": True}
_TILED_LOSS: Settings = {"loss": "tiled"}


def _logits_dominate(planned: PlannedTrial) -> bool:
    """Whether logits and loss take more of the GPU than any other category, in a trial whose loss may be replaced."""
    if not planned.may_replace_loss or planned.workload.loss != "model":
        return False
    sizes = dict(planned.predict().gpu)
    # A third of them, the log-probabilities, is kept for the backward pass and counts as activations.
    kept = sizes.get("logits_and_loss", 0) // 2
    logits = sizes.pop("logits_and_loss", 0) + kept
    sizes["activations"] = sizes.get("activations", 0) - kept
    return logits > max(sizes.values())


def _combined(planned: PlannedTrial, smaller: _Numbers, others: _Numbers) -> Iterator[Settings]:
    """Yield single changes, then these on top of cheap changes, then later stages and offload with more or fewer GPUs.

    ``smaller``: yields the micro-batches to try. ``others``: yields the numbers of GPUs.
    """
    cheap: list[Settings] = [_TILED_LOSS] if _logits_dominate(planned) else []
    if not planned.workload.activation_checkpointing:
        cheap.append({**(cheap[0] if cheap else {}), **_CHECKPOINTING})
    if planned.workload.batch_size > 1:
        cheap.append({**(cheap[-1] if cheap else {}), "batch_size": 1})
    yield from _remedies(planned, smaller, others)
    for settings in cheap:
        yield settings
        yield from ({**settings, **each} for each in _remedies(with_settings(planned, settings), smaller, others))
    for settings in ({}, *cheap):
        for strategy in _strategies_with_less_memory(planned):
            both = {**settings, "strategy": strategy}
            yield from ({**both, "num_gpus": count} for count in others(with_settings(planned, both)))


def _remedies(planned: PlannedTrial, smaller: _Numbers, others: _Numbers) -> Iterator[Settings]:
    """Yield single changes, in the order of their cost."""
    if _logits_dominate(planned):
        yield _TILED_LOSS
    if planned.configuration.stage and not planned.configuration.is_reference:
        yield {BUCKET_KEY: SMALL_BUCKET}
    if not planned.workload.activation_checkpointing:
        yield _CHECKPOINTING
    yield from ({"batch_size": size} for size in smaller(planned))
    yield from ({"strategy": strategy} for strategy in _strategies_with_less_memory(planned))
    yield from ({"num_gpus": count} for count in others(planned))


def _strategies_with_less_memory(planned: PlannedTrial) -> Iterator[str]:
    """Yield the names of other strategies that may take less memory, in the order of their cost."""
    now = planned.configuration
    # A later stage without offload would move the optimizer states of a row that offloads back to the GPU.
    later = [] if now.offloads_optimizer else [f"zero{stage}" for stage in range(now.stage + 1, 4)]
    for name in (*later, "cpu_optimizer", "cpu_full", "nvme"):
        strategy = strategies.named_strategy(name)
        if (strategy.stage, strategy.offload_optimizer, strategy.offload_param) != now.layout:
            yield name
