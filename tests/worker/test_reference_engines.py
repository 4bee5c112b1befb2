"""torch's own engines; tests/integration trains with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ds_bench.worker.reference_engines import _create_optimizer


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_the_optimizer_of_a_gpu_updates_split_parameters(name: str, tmp_path: Path) -> None:
    """Fused implementations exist for the CPU too, and torch splits only some of them."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
        block = {"type": name, "params": {"lr": 0.1}}
        optimizer = _create_optimizer(list(model.parameters()), block, torch.device("cuda"))
        before = model.weight.to_local().clone()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight.to_local(), before)
    finally:
        torch.distributed.destroy_process_group()
