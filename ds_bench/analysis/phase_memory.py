"""Memory by phase of a trial, of a whole node: from what each rank measured of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

from ..records.schema import MEMORY_PHASES, PhaseMemory, RankMeasurement, measured_values

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Measured = TypeVar("Measured", bound="DataclassInstance")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePhaseMemory:
    """Memory of one phase: host memory of the node whose ranks take most, GPU memory of the fullest GPU.

    None where it was not measured.
    """

    host_peak_bytes: int | None = None
    """Sum of the ranks' peaks, the pages that they share counted once."""
    host_end_bytes: int | None = None
    """The same at the end of the phase."""
    gpu_peak_bytes: int | None = None


def node_phase_memory(ranks: Sequence[RankMeasurement]) -> dict[str, NodePhaseMemory]:
    """Phase → memory of the fullest node; empty if the ranks measured none."""
    phases = [phase for phase in MEMORY_PHASES if any(phase in rank.phase_memory for rank in ranks)]
    return {
        phase: fullest_node((rank.hostname, rank.phase_memory.get(phase, PhaseMemory())) for rank in ranks)
        for phase in phases
    }


def fullest_node(ranks: Iterable[tuple[str, PhaseMemory]]) -> NodePhaseMemory:
    """The memory of one phase. ``ranks``: host and memory of each rank."""
    nodes: dict[str, list[PhaseMemory]] = {}
    for host, memory in ranks:
        nodes.setdefault(host, []).append(memory)
    return NodePhaseMemory(
        host_peak_bytes=largest(total(map(host_peak_share, node)) for node in nodes.values()),
        host_end_bytes=largest(total(each.host_end_pss_bytes for each in node) for node in nodes.values()),
        gpu_peak_bytes=largest(each.gpu_peak_bytes for node in nodes.values() for each in node),
    )


def host_peak_share(memory: PhaseMemory) -> int | None:
    """A rank's part of its node's peak: its own peak without what it has only a share in.

    The kernel keeps no peak of the proportional size. What shared pages count too much, and what the processes of a
    data loader add, is taken from the end of the phase: it hardly changes within one.
    """
    if memory.host_peak_bytes is None or memory.host_end_bytes is None or memory.host_end_pss_bytes is None:
        return None
    return memory.host_peak_bytes - memory.host_end_bytes + memory.host_end_pss_bytes


def total(sizes: Iterable[int | None]) -> int | None:
    """The sum; None if one is not known."""
    known = list(sizes)
    return None if None in known else sum(filter(None, known))


def largest(sizes: Iterable[int | None]) -> int | None:
    """None if one is not known, as it may be the largest."""
    known = list(sizes)
    return None if None in known else max((size for size in known if size is not None), default=None)


def largest_of_runs(runs: Sequence[Mapping[str, Measured]]) -> dict[str, Measured]:
    """Name of a phase or action → each of its values, the largest of several runs of a row that measured it."""
    largest = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        measured = [run[name] for run in runs if name in run]
        values = {each.name: max(measured_values(measured, each.name), default=None) for each in fields(measured[0])}
        largest[name] = replace(measured[0], **values)
    return largest
