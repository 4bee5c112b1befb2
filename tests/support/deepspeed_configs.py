"""Completed DeepSpeed configurations, and every one of the catalogue."""

from __future__ import annotations

from typing import Any

from ds_bench.config import deepspeed_config, strategies
from ds_bench.config.spec import Placement, Workload
from tests.support import fakes

EVERY_CONFIGURATION = [strategies.make_configuration(strategy) for strategy in strategies.CATALOGUE.values()]


def complete(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """``config`` completed for one CPU rank; ``changes``: to the arguments of ``complete_config``."""
    of: Workload = changes.pop("of", fakes.workload())
    on: Placement = changes.pop("on", fakes.placement(nvme_path="/mnt/nvme"))
    return deepspeed_config.complete_config(
        config, of, on, **{"torch_adam": True, "largest_parameter": 1000, **changes}
    )
