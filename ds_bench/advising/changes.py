"""What would make a configuration fit that ran out of memory: each change, and what it would free.

Pure arithmetic on formulas and on what other rows measured. It predicts, it does not promise: fragmentation, and what
a step needs on top of the model states, are not here. Which row to use is ``recommend``'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..models import ModelFacts
from ..prediction.modelstates import element_bytes, model_states
from ..spec import Strategy
from ..strategies import OFFLOAD_NAMES, offload_strategy
from ..units import format_bytes
from .fitting import Pool, Setting, Shortage, arrangement

_TIERS: Mapping[Pool, tuple[str, ...]] = {"device": ("gpu",), "host": ("cpu",), "both": ("gpu", "cpu")}
_HELD_IN: Mapping[str, tuple[str, ...]] = {
    "build": ("parameters",),
    "init": ("parameters", "optimizer_states"),
    "forward": ("parameters", "optimizer_states"),
}
"""Model states that are there in a phase; all three in any other."""
_WITHOUT_ACTIVATIONS = ("build", "init", "step")
"""Phases in which none are held: before the first forward pass, and after backward has freed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing to do differently."""

    intrusion: int
    """0 least: order of the kinds, from a smaller micro-batch to a disk."""
    text: str
    """``micro-batch 2``, ``cpu_optimizer at ZeRO-2``."""
    frees_bytes: int | None
    """Per rank in the pool that ran out; None where it cannot be predicted."""
    basis: str
    """Where the number comes from, or why there is none."""
    at_least: bool = False
    """The number is a lower bound."""

    @property
    def line(self) -> str:
        """The change with what it frees."""
        if self.frees_bytes is None:
            return f"{self.text} ({self.basis})"
        return f"{self.text} (frees {'≥' if self.at_least else '≈'} {format_bytes(self.frees_bytes)} {self.basis})"

    def may_free(self, target_bytes: int) -> bool:
        """Is predicted to free so much, or cannot be ruled out."""
        return self.frees_bytes is None or self.at_least or self.frees_bytes >= target_bytes


def changes(setting: Setting, shortage: Shortage) -> list[Change]:
    """What could be done, least intrusive first; the largest micro-batches first among themselves."""
    found = [*_activation_changes(setting, shortage), *_strategy_changes(setting, shortage)]
    return sorted(found, key=lambda change: change.intrusion)


def smallest_fit(options: Sequence[Change], shortage: Shortage) -> Change | None:
    """The least intrusive change predicted to free what was missing; None where none is, or the need is unknown."""
    target = shortage.target_bytes
    if target is None or shortage.fragmented:
        return None
    return next((change for change in options if change.frees_bytes is not None and change.frees_bytes >= target), None)


def largest_saving(options: Sequence[Change]) -> Change | None:
    """The change that frees most, of those where a number is known; the less intrusive of equals."""
    known = [change for change in options if change.frees_bytes is not None]
    return max(known, key=lambda change: change.frees_bytes or 0, default=None)


def _activation_changes(setting: Setting, shortage: Shortage) -> Iterator[Change]:
    if setting.pool == "host" or shortage.phase in ("build", "init"):
        return
    size, basis = _activations(setting, shortage)
    at_least = size is not None and setting.activation_bytes is None
    for batch in _smaller_batches(setting.micro_batch_size, alone=size is None):
        freed = None if size is None else size - -(-size * batch // setting.micro_batch_size)
        yield Change(intrusion=0, text=f"micro-batch {batch}", frees_bytes=freed, basis=basis, at_least=at_least)
    if not setting.workload.activation_checkpointing:
        measured = None if shortage.phase in _WITHOUT_ACTIVATIONS else setting.activation_bytes
        freed = _checkpointing_frees(setting, measured)
        why = "by another row's ledger" if freed is not None else basis if size is None else "how much is not known"
        yield Change(intrusion=1, text="--activation-checkpointing", frees_bytes=freed, basis=why)


def _smaller_batches(batch: int, *, alone: bool) -> Iterator[int]:
    """Half, a quarter, … down to 1; the half alone where nothing is known that would tell them apart."""
    while batch > 1:
        batch //= 2
        yield batch
        if alone:
            return


def _activations(setting: Setting, shortage: Shortage) -> tuple[int | None, str]:
    """Bytes that scale with the micro-batch, and where they come from."""
    if shortage.phase in _WITHOUT_ACTIVATIONS:
        return None, "activations are freed by then, so it may not help"
    if setting.activation_bytes is not None:
        return setting.activation_bytes, "by another row's ledger"
    if setting.facts is None:
        return None, "how much it frees is not known: no row measured its activations"
    return sum(_least_activations(setting, setting.facts)), "by formula"


def _least_activations(setting: Setting, facts: ModelFacts) -> tuple[int, int]:
    """What every forward pass saves: each block's input, and the log-probabilities in fp32 (cross-entropy's)."""
    tokens = setting.micro_batch_size * setting.workload.seq_length
    inputs = facts.layers * facts.hidden_size * element_bytes(setting.workload.precision)
    return tokens * inputs, tokens * facts.vocabulary_size * 4


def _checkpointing_frees(setting: Setting, measured: int | None) -> int | None:
    """Activations less what stays: every block's input, one block being recomputed, logits and loss (thrice)."""
    if measured is None or setting.facts is None:
        return None
    inputs, log_probabilities = _least_activations(setting, setting.facts)
    stays = inputs + measured // setting.facts.layers + 3 * log_probabilities
    return max(0, measured - stays)


def _strategy_changes(setting: Setting, shortage: Shortage) -> Iterator[Change]:
    if setting.parameters is None:
        return
    now = _held(setting, setting.strategy, shortage.phase)
    for intrusion, text, target in _neighbours(setting):
        freed = now - _held(setting, target, shortage.phase)
        if freed > 0 and arrangement(target) not in setting.failed and _host_has_room(setting, target):
            basis = "by formula; it trained here" if arrangement(target) in setting.trained else "by formula"
            yield Change(intrusion=intrusion, text=text, frees_bytes=freed, basis=basis)


def _neighbours(setting: Setting) -> Iterator[tuple[int, str, Strategy]]:
    """Higher stages with the same offload, where there is somebody to partition with; then more and more offload."""
    strategy = setting.strategy
    for stage in range(strategy.stage + 1, 4 if setting.data_parallel_size > 1 else 0):
        where = "" if not strategy.offloads_optimizer else f"{strategy.name} at "
        yield 2 + stage, f"{where}ZeRO-{stage}", replace(strategy, stage=stage)
    for position, name in enumerate(OFFLOAD_NAMES[1:]):
        if setting.pool == "both" and name != "nvme":
            continue
        stage = max(strategy.stage, 1) if name == "cpu_optimizer" else 3
        path = " with --nvme-path" if name == "nvme" else ""
        yield 10 + position, f"{name} at ZeRO-{stage}{path}", offload_strategy(name, stage)


def _held(setting: Setting, strategy: Strategy, phase: str | None) -> int:
    """Bytes of model states per rank in the pool that ran out, of the categories that are there in that phase."""
    ledger = _states(setting, strategy)
    wanted = _HELD_IN.get(phase or "")
    return sum(
        size
        for tier in _TIERS[setting.pool]
        for category, size in ledger.get(tier, {}).items()
        if wanted is None or category in wanted
    )


def _states(setting: Setting, strategy: Strategy) -> Mapping[str, Mapping[str, int]]:
    return model_states(setting.parameters or 0, setting.data_parallel_size, strategy, setting.workload.precision)


def _host_has_room(setting: Setting, strategy: Strategy) -> bool:
    """Whether the host holds what would be offloaded to it; yes where its size is not known."""
    if setting.host_capacity_bytes is None or setting.ranks_per_node is None:
        return True
    return (
        sum(_states(setting, strategy).get("cpu", {}).values()) * setting.ranks_per_node <= setting.host_capacity_bytes
    )
