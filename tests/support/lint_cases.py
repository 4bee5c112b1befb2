"""For every rule of ``check``, a configuration that breaks it: the examples of ``--explain``, and more."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from ds_bench.config.rule_explanations import BASE, rule_table

CLEAN: dict[str, Any] = dict(BASE)


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/nvme", "pin_memory": True}
ZENFLOW = {"select_strategy": "step", "select_interval": 4, "update_interval": 2}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {}}}

_GIVEN = {rule: entry.get("given", {}) for rule, entry in rule_table().items()}
RANKS = {rule: given["num_gpus"] for rule, given in _GIVEN.items() if given.keys() == {"num_gpus"}}
"""Rules that need the number of ranks → a number that breaks them."""

CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        (rule, deepcopy(entry["config"]))
        for rule, entry in rule_table().items()
        if "config" in entry and not _GIVEN[rule].keys() - {"num_gpus"}
    ),
    ("unknown-key", {"flops_profiler": {"enabeld": True}}),
    ("removed-key", zero(3, mics_shard_size=8)),
    ("old-name", {**zero(2, cpu_offload=True, offload_optimizer=CPU)}),
    ("type", {"fp16": True}),
    ("batch-size", {"train_micro_batch_size_per_gpu": 0}),
    ("batch-size", {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}),
    ("text-argument", {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "1e-4"}}}),
    ("dead-key", zero(2, allgather_partitions=True)),
    ("dead-key", zero(3, allgather_bucket_size=100)),
]
"""Name of a rule, and the keys that make it apply when they are merged into CLEAN; null removes a key."""
