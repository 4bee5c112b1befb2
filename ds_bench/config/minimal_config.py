"""The DeepSpeed configuration of a row that a flat JSON tells: its stage and what it offloads, for lack of more.

It stands in ``Trial.ds_config`` so that a row read back gives the same row again. It is not what ran, and must not be
shown, exported or compared as such: :func:`knows_config` tells.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .spec import Strategy, Trial


def least_config(strategy: Strategy) -> dict[str, Any]:
    """What the strategy's name says of its configuration, and no more."""
    devices = {"offload_optimizer": strategy.offload_optimizer, "offload_param": strategy.offload_param}
    offloads = {name: {"device": device} for name, device in devices.items() if device != "none"}
    return {"zero_optimization": {"stage": strategy.stage, **offloads}}


def hash_config(ds_config: Mapping[str, Any]) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of a DeepSpeed configuration without its ``nvme_path`` folders."""
    text = json.dumps(_without_folders(ds_config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(inner) for key, inner in value.items() if key != "nvme_path"}
    return value


def knows_config(trial: Trial) -> bool:
    """Whether ``ds_config`` is what ran: one that ran has at least its batch and its optimizer besides."""
    return bool(trial.ds_config) and trial.ds_config != least_config(trial.strategy)
