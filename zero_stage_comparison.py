#!/usr/bin/env python3
"""Compares ZeRO stages 0 to 3 on one model: ``python zero_stage_comparison.py --help``."""

from __future__ import annotations  # a pasted function may name types that are not imported

import sys

try:
    from typing import Any

    from ds_bench.cli import script
    from ds_bench.config import deepspeed_config, strategies
    from ds_bench.config.spec import Strategy
except KeyboardInterrupt:  # Ctrl-C during these imports
    print("interrupted", file=sys.stderr)
    sys.exit(130)


def create_deepspeed_config(stage: int, batch_size: int, grad_accum: int = 1) -> dict[str, Any]:
    """The DeepSpeed configuration of one stage, for one GPU. Edit it here: every trial uses what it returns.

    World size and precision are filled in afterwards where this leaves them open.
    """
    config = deepspeed_config.base_config(strategies.ZERO_STAGES[stage], batch_size, grad_accum)
    # For example: config["zero_optimization"]["reduce_bucket_size"] = 50_000_000
    return config  # noqa: RET504


def _by_strategy(strategy: Strategy, batch_size: int, grad_accum: int) -> dict[str, Any]:
    return deepspeed_config.with_offload(create_deepspeed_config(strategy.stage, batch_size, grad_accum), strategy)


if __name__ == "__main__":
    sys.exit(script.main("zero", _by_strategy))
