"""Projects a measured step to another number of GPUs: its time, throughput and efficiency (docs/projection.md).

The measured step is split into communication, the optimizer's update and the rest. Each part is scaled by itself and
added up again. How much of communication runs beside computing is not known, so that every time is an interval between
two assumptions: nothing overlaps, and everything does. Both agree with the measurement at its own size and links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from ..config.deepspeed_config import sequence_parallel_size, tensor_parallel_size
from ..config.spec import Configuration, Precision, block_of
from ..errors import UsageError
from .communication import Traffic, sent_bytes, step_traffic, traffic_seconds
from .links import Links

Scaling = Literal["weak", "strong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What a projection starts from: an optimizer step as it was measured."""

    configuration: Configuration
    parameters: int
    """Elements of the whole model."""
    trained: int
    """Elements of the parameters that are trained."""
    layers: int | None
    """None where not known."""
    precision: Precision
    num_gpus: int
    gpus_per_node: int
    """Of the nodes that it ran on."""
    micro_batch_size: int
    grad_accum: int
    step_seconds: float
    tokens_per_second: float
    update_seconds: float | None = None
    """Of the optimizer's update, in synchronised steps and with the communication in it; None where not measured."""
    communication_seconds: float | None = None
    """Of all collective operations, each waited for, without waiting for other ranks; None where not measured."""
    communication: Traffic | None = None
    """What was sent in these seconds; None where not measured."""
    computing_seconds: float | None = None
    """Of everything but communication in synchronised steps; None where the two were not timed apart."""

    @property
    def model_parts(self) -> int:
        """Ranks that a layer is split among by tensor parallelism."""
        return tensor_parallel_size(self.configuration.deepspeed_config)

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that work on the same sequences."""
        return self.model_parts * sequence_parallel_size(self.configuration.deepspeed_config)

    @property
    def measured_rate(self) -> float | None:
        """Bytes per second through each rank, of all collective operations together; None where not measured."""
        if self.communication is None or not self.communication_seconds or self.num_gpus == 1:
            return None
        return sent_bytes([self.communication], self.num_gpus) / self.communication_seconds

    def traffic(self, grad_accum: int, num_gpus: int, gpus_per_node: int) -> list[Traffic]:
        """What a step sends: as measured, else by formula."""

        def by_formula(accumulation: int, gpus: int, node: int) -> list[Traffic]:
            return step_traffic(
                self.configuration,
                parameters=self.parameters // self.model_parts,
                trained=self.trained // self.model_parts,
                precision=self.precision,
                grad_accum=accumulation,
                layers=self.layers,
                several_nodes=gpus > node,
            )

        wanted = by_formula(grad_accum, num_gpus, gpus_per_node)
        if self.communication is None:
            return wanted
        as_measured = by_formula(self.grad_accum, self.num_gpus, self.gpus_per_node)
        # Formulas do not know every tensor that a small model sends: they give how it changes, the profile how much.
        factor = self.communication.bytes / (sum(each.bytes for each in as_measured) or 1.0)
        calls = self.communication.calls / (sum(each.calls for each in as_measured) or 1.0)
        return [replace(each, bytes=each.bytes * factor, calls=each.calls * calls) for each in wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A projected value under both assumptions."""

    no_overlap: float
    """All communication is waited for, and an update of fewer elements takes no less time."""
    full_overlap: float
    """All communication runs beside computing as far as that lasts and the measurement allows it, and every updated
    element takes the same time."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the higher one."""
        return min(self.no_overlap, self.full_overlap), max(self.no_overlap, self.full_overlap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A step at another number of GPUs. Nothing of it was measured."""

    num_gpus: int
    num_nodes: int
    micro_batch_size: int
    grad_accum: int
    global_batch_size: int
    """Sequences per optimizer step."""
    sent_bytes: float
    """Through the links of each GPU per step."""
    communication_seconds: float
    """Of all collective operations, if each is waited for."""
    step_seconds: Range
    tokens_per_second: Range
    """Of the whole job."""
    efficiency: Range
    """Tokens per second of a GPU, as a fraction of the measured ones."""
    notes: tuple[str, ...] = field(default=())


def project(measured: MeasuredStep, num_gpus: int, links: Links, scaling: Scaling) -> Projection:
    """Projects a measured step to a number of GPUs on given links, which are those of the measurement too.

    Where the communication of the measurement was timed, its links may be others. ``scaling``: ``weak`` keeps the batch
    of every GPU, ``strong`` that of the whole job. Raises UsageError for a size that cannot be.
    """
    _check_size(measured, num_gpus, links)
    micro_batch_size, grad_accum = _batch(measured, num_gpus, scaling)
    notes = []
    # The measured nodes may have another number of GPUs than those that are projected to.
    its_nodes = replace(links, gpus_per_node=measured.gpus_per_node)
    own_seconds = measured.communication_seconds
    if own_seconds is None:
        own_seconds = _communication_seconds(measured, measured.grad_accum, measured.num_gpus, its_nodes)
    scale = _scale_to_step(measured, own_seconds)
    if scale < 1:
        notes.append(
            "timed by itself, its communication takes longer than the whole step: both were scaled to the step"
        )
    if micro_batch_size < measured.micro_batch_size:
        notes.append("a smaller micro-batch is taken to need the same time per sequence; GPUs compute it less well")
    # The projected step: its communication, then the factors of what computing consists of.
    seconds = _communication_seconds(measured, grad_accum, num_gpus, links)
    update = measured.update_seconds or 0.0
    if measured.communication_seconds is None:  # it is in the update, and not known which part of it
        update = max(0.0, update - own_seconds)
    of_samples = micro_batch_size * grad_accum / (measured.micro_batch_size * measured.grad_accum)
    of_update = _updated_elements_ratio(measured, num_gpus, links.gpus_per_node)

    def computing(measured_computing: float, of_update: float) -> float:
        """Passes take as long for every sequence."""
        part = min(update, measured_computing)
        return (measured_computing - part) * of_samples + part * of_update

    # With full overlap the step is the longer of computing and communication, plus what was longer than both.
    overlapped = min(scale * (measured.computing_seconds or measured.step_seconds), measured.step_seconds)
    rest = measured.step_seconds - max(overlapped, scale * own_seconds)
    steps = Range(
        no_overlap=computing(measured.step_seconds - scale * own_seconds, max(1.0, of_update)) + scale * seconds,
        full_overlap=max(computing(overlapped, of_update), scale * seconds) + rest,
    )
    # Throughput: the tokens of a step grow with its sequences.
    replicas = num_gpus // measured.ranks_per_sample
    measured_batch = measured.micro_batch_size * measured.grad_accum * (measured.num_gpus // measured.ranks_per_sample)
    batch = micro_batch_size * grad_accum * replicas
    tokens = measured.tokens_per_second * measured.step_seconds * batch / measured_batch
    rates = Range(no_overlap=tokens / steps.no_overlap, full_overlap=tokens / steps.full_overlap)
    ideal_rate = measured.tokens_per_second / measured.num_gpus * num_gpus
    return Projection(
        num_gpus=num_gpus,
        num_nodes=ceil(num_gpus / links.gpus_per_node),
        micro_batch_size=micro_batch_size,
        grad_accum=grad_accum,
        global_batch_size=batch,
        sent_bytes=sent_bytes(
            measured.traffic(grad_accum, num_gpus, links.gpus_per_node), num_gpus // measured.model_parts
        ),
        communication_seconds=seconds,
        step_seconds=steps,
        tokens_per_second=rates,
        efficiency=Range(no_overlap=rates.no_overlap / ideal_rate, full_overlap=rates.full_overlap / ideal_rate),
        notes=tuple(notes),
    )


def _scale_to_step(measured: MeasuredStep, communication_seconds: float) -> float:
    """Factor with which communication and computing fit into the measured step; 1 where communication does.

    Operations that are timed one by one may take longer than a step in which they overlap. Raises UsageError where the
    communication was not timed: then the links are not those of the measurement.
    """
    if communication_seconds <= measured.step_seconds:
        return 1.0
    if measured.computing_seconds is None:
        raise UsageError(
            f"on the links given communication alone takes {communication_seconds * 1000:.1f} ms of the measured step "
            f"of {measured.step_seconds * 1000:.1f} ms, which had faster ones",
            remedy="give its own links, or a result with --profile comms",
        )
    return measured.step_seconds / (communication_seconds + measured.computing_seconds)


def _check_size(measured: MeasuredStep, num_gpus: int, links: Links) -> None:
    """Raises UsageError for a number of GPUs that the configuration or the nodes cannot have."""
    node, parts = links.gpus_per_node, measured.ranks_per_sample
    if num_gpus % parts:
        raise UsageError(
            f"{num_gpus} GPUs are no multiple of the {parts} that work on the same sequences",
            remedy=f"give --num-gpus {_multiples(parts, num_gpus)}",
        )
    # Tensor-parallel groups must not cross nodes: ``Links.among`` divides each node among them.
    if num_gpus > node and (num_gpus % node or node % measured.model_parts):
        raise UsageError(
            f"{num_gpus} GPUs do not fill nodes of {node}",
            remedy=f"give --num-gpus {_multiples(node, num_gpus)}, or --gpus-per-node",
        )
    nodes = {num_gpus: num_gpus // node}
    # Communication that was not timed is computed on these links for the measured size too.
    if measured.communication_seconds is None:
        nodes[measured.num_gpus] = measured.num_gpus // measured.gpus_per_node
    gpus = max(nodes, key=lambda each: nodes[each])
    if nodes[gpus] > 1 and links.node_bytes_per_second is None:
        raise UsageError(
            f"{gpus} GPUs are {nodes[gpus]} nodes of {gpus // nodes[gpus]}, and the rate between nodes is not known",
            remedy="give --inter, such as ib:400 or eth:100",
        )
    zero = block_of(measured.configuration.deepspeed_config, "zero_optimization")
    second = zero.get("zero_hpz_partition_size") or 1
    if num_gpus % second:
        raise UsageError(
            f"{num_gpus} GPUs are no multiple of zero_hpz_partition_size {second}",
            remedy=f"give --num-gpus {_multiples(second, num_gpus)}",
        )


def _multiples(unit: int, near: int) -> str:
    below = near // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _batch(measured: MeasuredStep, num_gpus: int, scaling: Scaling) -> tuple[int, int]:
    """Micro-batch and accumulation at another size. Raises UsageError where the global batch cannot be kept.

    Accumulation changes first. The micro-batch becomes smaller only where there is nothing left to accumulate.
    """
    micro_batch_size, grad_accum = measured.micro_batch_size, measured.grad_accum
    if scaling == "weak":
        return micro_batch_size, grad_accum
    total = micro_batch_size * grad_accum * (measured.num_gpus // measured.ranks_per_sample)
    replicas = num_gpus // measured.ranks_per_sample
    if total % (replicas * micro_batch_size) == 0:
        return micro_batch_size, total // (replicas * micro_batch_size)
    if total % replicas == 0 and total // replicas < micro_batch_size:
        return total // replicas, 1
    raise UsageError(
        f"the measured batch of {total} sequences cannot be split among {num_gpus} GPUs "
        f"in micro-batches of {micro_batch_size}",
        remedy="take sizes that divide it, or --scaling weak",
    )


def _communication_seconds(measured: MeasuredStep, grad_accum: int, num_gpus: int, links: Links) -> float:
    parts = measured.model_parts
    traffic = measured.traffic(grad_accum, num_gpus, links.gpus_per_node)
    return traffic_seconds(traffic, num_gpus // parts, links.among(parts))


def _updated_elements_ratio(measured: MeasuredStep, num_gpus: int, gpus_per_node: int) -> float:
    """Elements that are updated at once at another size, as a multiple of the measured ones.

    Of each GPU, or of a node where its processors and disks update them.
    """
    configuration = measured.configuration
    if configuration.stage == 0:
        return 1.0
    if configuration.offloads_optimizer:
        return ceil(measured.num_gpus / measured.gpus_per_node) / ceil(num_gpus / gpus_per_node)
    return measured.num_gpus / num_gpus


def measured_rates(step: MeasuredStep, all_steps: Sequence[MeasuredStep]) -> tuple[float | None, float | None]:
    """Rates that were measured within a node and between nodes: of the row itself, else the median of all; None for
    one that no row measured."""

    def rate(*, on_one_node: bool) -> float | None:
        own, *others = (
            each.measured_rate if (each.num_gpus <= each.gpus_per_node) == on_one_node else None
            for each in (step, *all_steps)
        )
        known = sorted(filter(None, others))
        return own or (known[len(known) // 2] if known else None)

    return rate(on_one_node=True), rate(on_one_node=False)
