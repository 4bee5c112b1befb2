"""Questions about memory: a toy model that is worked out by hand, and Llama-2-7B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ds_bench.config.spec import Configuration
from ds_bench.prediction.model_profile import Activations, ModelProfile, Polynomial, find_profile
from ds_bench.prediction.what_if import PlannedTrial
from tests.support.fakes import offload, placement, preset, workload, zero

GB = 2**30
NO_BUCKETS = {"zero_optimization": {"reduce_bucket_size": 1, "stage3_prefetch_bucket_size": 0}}
EVERY = [*map(zero, range(4)), *map(offload, ("cpu_optimizer", "cpu_full", "nvme"))]

TOY = ModelProfile(
    name="toy",
    layers=2,
    before=(40,),
    layer=(24, 6),
    after=(40,),
    tied_embeddings=False,
    activations={
        "bf16": Activations(
            plain=Polynomial(fixed={"bs": 100}, per_layer={"bs": 1000}),
            checkpointed=Polynomial(fixed={"bs": 100}, per_layer={"bs": 10}),
            loss=Polynomial(fixed={"bs": 300}, per_layer={"bs": 1000}),
        )
    },
)
"""140 parameters: 40, (24, 6), (24, 6), 40."""


def ask(strategy: Configuration, ranks: int = 2, *, model: ModelProfile = TOY, **work: Any) -> PlannedTrial:
    changes = NO_BUCKETS if strategy.stage else {}
    return PlannedTrial(
        profile=model,
        workload=workload(**{"batch_size": 1, "seq_length": 1, **work}),
        placement=placement(accelerator="cuda", num_gpus=ranks, nvme_path="/nvme"),
        configuration=strategy,
        changes=changes,
        ranks_per_node=max(8, ranks),
    )


def llama(strategy: Configuration, ranks: int = 8, **work: Any) -> PlannedTrial:
    facts = preset("meta-llama/Llama-2-7b-hf")
    question = ask(strategy, ranks, model=find_profile(facts, 2048), **{"seq_length": 2048, **work})
    return replace(question, changes={})
