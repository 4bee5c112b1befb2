"""Asks the installed DeepSpeed in a process of its own whether training starts with a configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_bench.config.spec import Placement
from ds_bench.launch import rank_environment

_INITIALIZE = """
import json, sys
out = sys.stdout; sys.stdout = sys.stderr
import deepspeed, torch
deepspeed.init_distributed(dist_backend="gloo", init_method=f"file://{sys.argv[1]}/meet", rank=0, world_size=1)
def error_of(config):
    model = torch.nn.Linear(4, 4)
    try:
        deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    except Exception as error:
        return str(error) or type(error).__name__
    return None
print(json.dumps([error_of(config) for config in json.load(sys.stdin)]), file=out)
"""


def errors_at_start(configs: Sequence[dict[str, Any]], folder: Path) -> list[str | None]:
    """What ``deepspeed.initialize`` raises for each configuration on one CPU rank; None where it raises nothing."""
    done = subprocess.run(
        [sys.executable, "-c", _INITIALIZE, str(folder)],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            **rank_environment.rank_environment(Placement(accelerator="cpu"), os.environ),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return errors
