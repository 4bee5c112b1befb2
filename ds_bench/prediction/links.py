"""The links that GPUs communicate over: their rates and latencies, and how a user gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import UsageError

REACHED_WITHIN, REACHED_BETWEEN = 0.8, 0.9
"""Fractions of the nominal rates that are assumed to be reached: 0.8 is that of NCCL's own table for NVLink (20.6 of 25
GB/s per link, src/graph/topo.h)."""
_LATENCIES = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "ib": 14e-6, "roce": 14e-6, "eth": 50e-6}
"""Seconds per message: those of NCCL's table for rings (src/graph/tuning.cc, hwLat); of TCP assumed."""
_BYTES = {"nvlink": 1e9 / 2, "pcie": 1e9, "ib": 1e9 / 8, "roce": 1e9 / 8, "eth": 1e9 / 8}
"""Bytes per second and direction of a rate of 1."""
WITHIN, BETWEEN = ("nvlink", "pcie"), ("ib", "roce", "eth")
"""Kinds of links within a node, and between nodes."""

LINK_HELP = (
    "link of a GPU within its node: nvlink:900 is 900 GB/s (10^9 bytes) in both directions together, as vendors say; "
    "pcie:32 is 32 GB/s in each direction"
)
INTER_HELP = (
    "network of a node: ib:400, roce:400 or eth:100 is one adapter of so many Gbit/s in each direction; ib:400x8 eight "
    "of them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What GPUs communicate over. Rates are those that are reached, in bytes per second and one direction."""

    gpus_per_node: int
    gpu_bytes_per_second: float
    """Of one GPU within its node; infinite where a node has one GPU."""
    gpu_latency_seconds: float = 0.0
    """Of passing a message from one GPU to the next within a node."""
    node_bytes_per_second: float | None = None
    """Of one node, all its network adapters together; None where it is not known."""
    node_latency_seconds: float = 0.0
    """Of passing a message from one node to the next."""

    def among(self, parts: int) -> Links:
        """The links that each of so many equal parts of a node has if all parts communicate at the same time."""
        node = self.node_bytes_per_second
        # The rate of a GPU's own link stays: the parts do not share GPUs, but they share the node's adapters.
        return replace(
            self,
            gpus_per_node=max(1, self.gpus_per_node // parts),
            node_bytes_per_second=None if node is None else node / parts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """A link as the user gave it."""

    text: str
    bytes_per_second: float
    """Reached, one direction."""
    latency_seconds: float


def parse_link(flag: str, text: str, kinds: Sequence[str]) -> LinkRate:
    """Reads ``KIND:RATE`` or, of a network, ``KIND:RATExADAPTERS``. Raises UsageError."""
    found = re.fullmatch(r"([a-z]+):([0-9]*\.?[0-9]+)(?:x([1-9][0-9]{0,2}))?", text.strip().lower())
    kind, rate, adapters = found.groups() if found else ("", "0", None)
    nominal = float(rate)
    if kind not in kinds or not 0 < nominal < 1e6 or (adapters and kinds is WITHIN):
        example = "nvlink:900 or pcie:32" if kinds is WITHIN else "ib:400, ib:400x8, roce:200 or eth:100"
        raise UsageError(f"{flag} {text!r} is no link", remedy=f"give one such as {example}")
    reached = REACHED_WITHIN if kinds is WITHIN else REACHED_BETWEEN
    return LinkRate(
        text=text,
        bytes_per_second=nominal * int(adapters or 1) * _BYTES[kind] * reached,
        latency_seconds=_LATENCIES[kind],
    )
