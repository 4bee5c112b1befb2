"""What a configuration sends between GPUs in an optimizer step, and how long given links take for it.

Volumes are those of the ZeRO paper (Rajbhandari et al., 2020, section 7) and the ZeRO++ paper (Wang et al., 2023,
sections 3 and 4) with what DeepSpeed 0.19.8 does otherwise. A ring of n ranks passes (n−1)/n of a tensor through each
rank in an all-gather or a reduce-scatter, and twice that in an all-reduce (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from ..config.spec import Configuration, Precision, block_of
from .inputs import ZeroSettings
from .links import Links
from .model_states import FP32_BYTES, element_bytes

_INT8_BYTES, _INT4_BYTES = 1.0, 0.5
_ALLGATHER_BUCKET = 500_000_000
"""Elements; DeepSpeed's default of ``allgather_bucket_size``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collective operations of one kind in an optimizer step."""

    name: str
    """``gather parameters``, ``reduce gradients`` or ``all``."""
    bytes: float
    """Of the whole tensors; an all-reduce counts twice, as a reduce-scatter and an all-gather."""
    calls: float
    """Number of operations; an all-reduce counts twice."""
    ranks: int | None = None
    """Ranks of one group, which are neighbours; None for all ranks of the job."""
    is_all_to_all: bool = False
    """Whether it is exchanged within the nodes and then between them, as gradients that are quantised are."""


def times_sent(configuration: Configuration, parameters: int, grad_accum: int) -> tuple[int, int]:
    """How often an optimizer step sends all parameters, and those that are trained or their gradients.

    Together, without accumulation 2, 2, 2, 3 at stages 0 to 3 in the paper (Rajbhandari et al., ZeRO, section 7).
    DeepSpeed 0.19.8 differs, as measured (docs/profiles.md): at stages 1 and 2 it all-reduces whole buckets, twice the
    volume of a reduce-scatter, unless ``use_multi_rank_bucket_allreduce`` is off (zero/stage_1_and_2.py,
    average_tensor); at stage 3 it keeps gathered parameters for the backward pass up to
    ``stage3_max_live_parameters``.

    DeepSpeed reduces gradients once per optimizer step at stages 0 and 1, and after every micro-batch at 2 and 3; DDP
    and FSDP2 once.
    """
    if configuration.engine == "fsdp2":
        return 2 * grad_accum, 1
    stage, zero = configuration.stage, block_of(configuration.deepspeed_config, "zero_optimization")
    if stage == 0:
        # One all-reduce, which counts twice (``Traffic``).
        return 0, 2
    if stage == 3:
        settings = ZeroSettings.from_config(configuration.deepspeed_config)
        stay = parameters <= min(settings.max_live_elements, settings.max_reuse_elements)
        return grad_accum * (1 if stay else 2), grad_accum
    is_scattered = zero.get("reduce_scatter", True) and not zero.get("use_multi_rank_bucket_allreduce", True)
    return 0, (1 if is_scattered else 2) * (1 if stage == 1 else grad_accum) + 1


def step_traffic(
    configuration: Configuration,
    *,
    parameters: int,
    trained: int,
    precision: Precision,
    grad_accum: int,
    layers: int | None = None,
    several_nodes: bool = True,
) -> list[Traffic]:
    """What a configuration sends in an optimizer step, by formula.

    ``parameters``, ``trained``: elements of the whole model. ``layers``: None where they are not known, and then
    operations are counted by bucket sizes alone. ``several_nodes``: DeepSpeed quantises gradients only between nodes.
    """
    settings = ZeroSettings.from_config(configuration.deepspeed_config)
    zero = block_of(configuration.deepspeed_config, "zero_optimization")
    # Gradients of DDP are fp32.
    element = FP32_BYTES if configuration.engine == "ddp" else element_bytes(precision)
    sent = settings.communication_bytes or element
    gathered, reduced_and_updated = times_sent(configuration, parameters, grad_accum)
    # The second number counts gradients, and below stage 3 the updated parameters, gathered once at a step's end.
    last_gather = 1 if configuration.stage in (1, 2) else 0
    reductions = reduced_and_updated - last_gather
    traffic = [
        Traffic(
            name="gather parameters",
            bytes=element * trained * last_gather,
            calls=last_gather * ceil(trained / (zero.get("allgather_bucket_size") or _ALLGATHER_BUCKET)),
        ),
        *_gathers(settings, gathered, element * parameters, parameters, layers),
    ]
    is_quantized = bool(configuration.stage == 3 and zero.get("zero_quantized_gradients") and several_nodes)
    buckets = ceil(trained / max(1, settings.reduce_bucket_elements))
    traffic.append(
        Traffic(
            name="reduce gradients",
            bytes=(_INT4_BYTES if is_quantized else sent) * trained * reductions,
            calls=reductions * buckets,
            is_all_to_all=is_quantized,
        )
    )
    return [each for each in traffic if each.bytes]


def _gathers(
    settings: ZeroSettings, gathered: int, whole_bytes: float, parameters: int, layers: int | None
) -> Iterable[Traffic]:
    """Gathers of stage 3. With a second copy of the parameters (hpZ) all but the first of a step are within its group.

    With quantised weights (qwZ) DeepSpeed sends 8 bits in all of them (partitioned_param_coordinator.py,
    __all_gather_params); the paper in the forward pass alone.
    """
    if settings.quantized_weights:
        whole_bytes = _INT8_BYTES * parameters
    calls = max(layers or 1, ceil(parameters / max(1, settings.prefetch_elements)))
    is_split_twice = settings.secondary_ranks > 1
    within = gathered - 1 if is_split_twice else 0
    for times, ranks in ((gathered - within, None), (within, settings.secondary_ranks)):
        yield Traffic(name="gather parameters", bytes=times * whole_bytes, calls=times * calls, ranks=ranks)


def sent_bytes(traffic: Iterable[Traffic], num_gpus: int) -> float:
    """Bytes that one of so many GPUs sends, to its node or another."""
    return sum(each.bytes * _share(min(each.ranks or num_gpus, num_gpus)) for each in traffic)


def traffic_seconds(traffic: Iterable[Traffic], num_gpus: int, links: Links) -> float:
    """Seconds that the links take for all of it, one operation after the other.

    Of a ring over all ranks and of two steps, between nodes and within them, the faster one counts, as communication
    libraries choose it (NCCL, src/graph/tuning.cc). Raises ValueError where the rate between nodes is not known.
    """
    return sum(_seconds(each, min(each.ranks or num_gpus, num_gpus), links) for each in traffic)


def _seconds(traffic: Traffic, ranks: int, links: Links) -> float:
    nodes = ceil(ranks / links.gpus_per_node)
    if nodes == 1:
        # A ring takes one step less than it has ranks, each with its latency.
        return traffic.calls * (ranks - 1) * links.gpu_latency_seconds + (
            traffic.bytes * _share(ranks) / links.gpu_bytes_per_second
        )
    if links.node_bytes_per_second is None:
        raise ValueError("the rate between nodes is not known")
    # First within every node, then between the nodes: each ring passes on its own share of the bytes.
    local = ranks // nodes
    two_steps = traffic.calls * (
        (local - 1) * links.gpu_latency_seconds + (nodes - 1) * links.node_latency_seconds
    ) + traffic.bytes * (_share(local) / links.gpu_bytes_per_second + _share(nodes) / links.node_bytes_per_second)
    if traffic.is_all_to_all:
        # DeepSpeed exchanges quantised gradients in these two steps only (all_to_all_quant_reduce).
        return two_steps
    # In a ring every byte leaves each node once, whatever its number of GPUs.
    rate = min(links.node_bytes_per_second, links.gpu_bytes_per_second if local > 1 else float("inf"))
    ring = traffic.calls * ((ranks - nodes) * links.gpu_latency_seconds + (nodes - 1) * links.node_latency_seconds) + (
        traffic.bytes * _share(ranks) / rate
    )
    return min(ring, two_steps)


def _share(ranks: int) -> float:
    """Part of a tensor that passes through each rank: all but the rank's own."""
    return (ranks - 1) / ranks
