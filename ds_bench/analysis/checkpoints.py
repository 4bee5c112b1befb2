"""What a checkpoint of a trial costs, of the whole job: from what each rank measured of its part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..records.schema import CHECKPOINT_ACTIONS, CheckpointAction, RankMeasurement, measured_values
from .phase_memory import fullest_node


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """One of ``CHECKPOINT_ACTIONS`` on the whole job; None where it was not measured."""

    seconds: float | None = None
    """On the slowest rank."""
    written_bytes: int | None = None
    host_peak_bytes: int | None = None
    """Host memory of the node whose ranks take most, pages that they share counted once."""


def checkpoint_costs(ranks: Sequence[RankMeasurement]) -> dict[str, CheckpointCost]:
    """Action → its cost; empty if none was tried."""
    names = [name for name in CHECKPOINT_ACTIONS if any(name in rank.checkpoint for rank in ranks)]
    return {name: _cost(ranks, name) for name in names}


def _cost(ranks: Sequence[RankMeasurement], name: str) -> CheckpointCost:
    actions = [rank.checkpoint.get(name, CheckpointAction()) for rank in ranks]
    # The job has done it only if every rank has: the costs of some ranks alone are those of no checkpoint.
    if any(action.not_done is not None or action.seconds is None for action in actions):
        return CheckpointCost()
    memory = fullest_node((rank.hostname, action.memory) for rank, action in zip(ranks, actions, strict=True))
    return CheckpointCost(
        seconds=max(action.seconds or 0.0 for action in actions),
        written_bytes=next((action.written_bytes for action in actions if action.written_bytes is not None), None),
        host_peak_bytes=memory.host_peak_bytes,
    )


def is_restored(parts: Sequence[object]) -> bool | None:
    """Whether loading restored what was saved on every rank of a trial, or in every run of a row, that can tell.

    None if none can.
    """
    known = measured_values(parts, "checkpoint_restored")
    return all(known) if known else None
