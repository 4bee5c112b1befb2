"""The catalogue of strategies, their configurations, which of them is simpler, and which row a text names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .deepspeed_config import base_config
from .spec import DEVICES, Configuration, Device, Strategy

ZERO_STAGES: dict[int, Strategy] = {
    stage: Strategy(name=f"zero{stage}", label=f"ZeRO-{stage}", stage=stage) for stage in (0, 1, 2, 3)
}
"""The strategies of ``zero_stage_comparison.py`` by stage."""

_OFFLOADS: dict[str, tuple[str, Device, Device]] = {
    "none": ("", "none", "none"),
    "cpu_optimizer": (" + CPU optimizer", "cpu", "none"),
    "cpu_full": (" + CPU optimizer and parameters", "cpu", "cpu"),
    "nvme": (" + NVMe optimizer and parameters", "nvme", "nvme"),
}

OFFLOAD_NAMES: tuple[str, ...] = tuple(_OFFLOADS)
"""Offload strategies; ``--stage`` sets their ZeRO stage."""


def offload_strategy(name: str, stage: int = 3) -> Strategy:
    """Return the offload strategy of that name at a ZeRO stage. Raises KeyError for an unknown name."""
    offloaded, optimizer, param = _OFFLOADS[name]
    label = f"ZeRO-{stage}{offloaded}"
    return Strategy(name=name, label=label, stage=stage, offload_optimizer=optimizer, offload_param=param)


CATALOGUE: dict[str, Strategy] = {
    **{strategy.name: strategy for strategy in ZERO_STAGES.values()},
    **{name: offload_strategy(name) for name in OFFLOAD_NAMES},
}
"""Every DeepSpeed strategy by name, the offload strategies at stage 3."""

ALIASES: dict[str, Strategy] = {
    "zero2_offload": replace(offload_strategy("cpu_optimizer", 2), name="zero2_offload"),
    "zero3_offload": replace(offload_strategy("cpu_full", 3), name="zero3_offload"),
}
"""Names from other tools' example files (``ds_z3_offload_config.json``), each with one stage."""

REFERENCES: dict[str, Strategy] = {
    "ddp": Strategy(name="ddp", label="DDP (torch)", stage=0, engine="ddp"),
    "fsdp2": Strategy(name="fsdp2", label="FSDP2 (torch)", stage=3, engine="fsdp2"),
}
"""torch's own engines: DistributedDataParallel and ``fully_shard``.

A reference row has the DeepSpeed configuration of the ZeRO stage that shards the same states. The engine reads batch,
optimizer, clipping and number format from it, so these are the same as in every row.
"""
DDP_BUCKET_MB = 25
"""Size of DDP's gradient buckets in MiB: torch's default (nn/parallel/distributed.py)."""

STRATEGY_NAMES: tuple[str, ...] = (
    *OFFLOAD_NAMES,
    *(name for name in CATALOGUE if name not in _OFFLOADS),
    *ALIASES,
    *REFERENCES,
)
"""Values of ``--strategies``."""


def named_strategy(name: str, stage: int = 3) -> Strategy:
    """Return the strategy of that name, an offload strategy at that stage. Raises KeyError."""
    return offload_strategy(name, stage) if name in _OFFLOADS else (CATALOGUE | ALIASES | REFERENCES)[name]


def find_strategy(name: str, stage: int) -> Strategy | None:
    """Return the strategy of that name at that stage; None if there is none."""
    strategy = named_strategy(name, stage) if name in STRATEGY_NAMES else None
    return strategy if strategy is not None and strategy.stage == stage else None


def simplicity(layout: tuple[int, str, str]) -> tuple[int, int, int]:
    """Sort key that puts the simplest configuration first: no offload before offload, then lower stages."""
    stage, *devices = layout
    optimizer, params = (DEVICES.index(device) for device in devices)
    return max(optimizer, params), optimizer + params, stage


def make_configuration(
    strategy: Strategy,
    deepspeed_config: Mapping[str, Any] | None = None,
    workload_changes: Mapping[str, Any] | None = None,
) -> Configuration:
    """Make a strategy's configuration. ``deepspeed_config``: None for the catalogue's, with one sequence per GPU."""
    return Configuration(
        name=strategy.name,
        label=strategy.label,
        deepspeed_config=base_config(strategy, 1) if deepspeed_config is None else deepspeed_config,
        workload_changes=workload_changes or {},
        engine=strategy.engine,
    )


def matches(row: Strategy | Configuration, text: str) -> bool:
    """Return whether a user's text (``zero2``, ``ZeRO-2``, ``stage 2``, ``2``, ``cpu_optimizer``) names this row.

    Case, spaces, hyphens and underscores are ignored. A stage number matches only catalogue rows without optimizer
    offload.
    """
    names = [row.name, row.label]
    other = isinstance(row, Configuration) and (row.source != "catalogue" or row.axis_values)
    if row.offload_optimizer == "none" and row.engine == "deepspeed" and not other:
        names += [f"zero{row.stage}", f"stage{row.stage}", str(row.stage)]
    text, *names = (re.sub("[ _-]", "", name.casefold()) for name in (text, *names))
    return text in names
