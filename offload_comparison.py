#!/usr/bin/env python3
"""Compares offload strategies on one model: ``python offload_comparison.py --help``."""

from __future__ import annotations  # a pasted function may name types that are not imported

import sys

try:
    from typing import Any

    from ds_bench.cli import script
    from ds_bench.config import deepspeed_config
    from ds_bench.config.spec import Strategy
except KeyboardInterrupt:  # Ctrl-C during these imports
    print("interrupted", file=sys.stderr)
    sys.exit(130)


def create_deepspeed_config(strategy: Strategy, batch_size: int, grad_accum: int = 1) -> dict[str, Any]:
    """The DeepSpeed configuration of one offload strategy, for one GPU. Edit it here: every trial uses what it returns.

    ``strategy.name`` is none, cpu_optimizer, cpu_full or nvme; ``strategy.stage`` its ZeRO stage.
    World size, precision, the NVMe folder and its buffers are filled in afterwards where left open.
    """
    config = deepspeed_config.base_config(strategy, batch_size, grad_accum)
    # For example: config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    return config  # noqa: RET504


if __name__ == "__main__":
    sys.exit(script.main("offload", create_deepspeed_config))
