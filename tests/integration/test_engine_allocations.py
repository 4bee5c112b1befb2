"""The replay of a prediction against DeepSpeed itself: what real engines allocate on simulated cards, in order.

A small Llama trains for two steps at each stage, with and without offload, whole or in part, and in DDP, on two cards.
Left out on both sides are tensors below 64 KiB, which traces of models leave out too (``allocation_trace``).
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ds_bench.config import deepspeed_config, trained_parameters
from ds_bench.config.spec import Configuration, LossName, Trial
from ds_bench.config.strategies import make_configuration, named_strategy
from ds_bench.launch.ops import OpState
from ds_bench.models.architectures import read_architecture
from ds_bench.models.presets import ModelFacts
from ds_bench.prediction import allocation_replay, allocation_trace
from ds_bench.prediction.allocation_trace import TraceVariant
from ds_bench.prediction.formula_profile import formula_profile
from ds_bench.prediction.predicted_memory import inputs_of
from ds_bench.prediction.torch_allocators import Block, CachingAllocator
from tests.support.fakes import offload, placement, workload, zero
from tests.support.real_trials import ROOT
from tests.support.simulated_card import CardPlan, write_plans

MIN_BYTES = 2**16
LORA, FREEZE = "128", "embed_tokens,mlp"
BATCH, LENGTH, HIDDEN, VOCABULARY = 2, 128, 512, 4096
LOGITS = 2 * BATCH * LENGTH * VOCABULARY
"""Bytes of the logits in 16 bit."""
BUFFERS = 2 * 4 * 32
"""Bytes of the model's rotary frequencies, which DDP sends with its weights."""
CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 256, "use_cache": False,
    "tie_word_embeddings": False,
}  # fmt: skip
FACTS = ModelFacts(
    name="small", model_type="llama", config=CONFIG, parameters=0, matmul_parameters=0, layers=4, hidden_size=HIDDEN,
    attention_heads=8, head_dim=64, vocabulary_size=VOCABULARY, max_positions=256,
    largest_parameter=HIDDEN * VOCABULARY, tied_embeddings=False,
)  # fmt: skip
ARCHITECTURE = read_architecture("small", {**CONFIG, "model_type": "llama"})
SIZES = {
    # Embedding and LM head are larger than the bucket, and a layer is not a whole number of buckets.
    "reduce_bucket_size": 1_500_000, "stage3_prefetch_bucket_size": 1_000_000,
    "stage3_param_persistence_threshold": 1000, "stage3_max_live_parameters": 6_000_000,
    "stage3_max_reuse_distance": 3_000_000, "sub_group_size": 4_000_000,
}  # fmt: skip


DDP = make_configuration(named_strategy("ddp"))


def make_trial(
    row: Configuration,
    grad_accum: int = 1,
    *,
    torch_adam: bool = False,
    lora: str | None = None,
    freeze: str | None = None,
    loss: LossName = "model",
    **changes: Any,
) -> Trial:
    work = workload(
        model="small", model_type="llama", model_config=CONFIG, batch_size=BATCH, seq_length=LENGTH,
        grad_accum=grad_accum, lora=lora, freeze=freeze, loss=loss,
    )  # fmt: skip
    on = placement(accelerator="cuda", num_gpus=2)
    sizes = {"zero_optimization": {**SIZES, **changes}} if row.stage and row.engine == "deepspeed" else {}
    base = deepspeed_config.overlay(deepspeed_config.base_config(row, BATCH, grad_accum), sizes)
    config = deepspeed_config.complete_config(
        base, work, on, torch_adam=torch_adam, largest_parameter=FACTS.largest_parameter
    )
    row = replace(row, deepspeed_config=base)
    return Trial(trial_id=row.name, repeat=0, configuration=row, workload=work, placement=on, ds_config=config)


TRIALS = {
    "zero0": make_trial(zero(0)),
    "zero1, two micro-batches": make_trial(zero(1), grad_accum=2),
    "zero2": make_trial(zero(2)),
    "zero2, overlapping, torch's Adam, two micro-batches": make_trial(
        zero(2), grad_accum=2, torch_adam=True, overlap_comm=True
    ),
    "zero2, CPU optimizer": make_trial(offload("cpu_optimizer", 2)),
    "zero2, CPU optimizer, two micro-batches": make_trial(offload("cpu_optimizer", 2), grad_accum=2),
    "zero3": make_trial(zero(3)),
    "zero3, two micro-batches": make_trial(zero(3), grad_accum=2),
    # Attention stays gathered; without prefetching, only a use that is near keeps another tensor.
    "zero3, CPU optimizer, two micro-batches, no prefetch": make_trial(
        offload("cpu_optimizer"),
        grad_accum=2,
        stage3_prefetch_bucket_size=0,
        stage3_param_persistence_threshold=300_000,
    ),
    "zero3, CPU optimizer and parameters": make_trial(offload("cpu_full")),
    "ddp, two micro-batches": make_trial(DDP, grad_accum=2),
    "zero3, tiled loss": make_trial(zero(3), loss="tiled"),
    "zero0, LoRA": make_trial(zero(0), lora=LORA),
    "zero1, LoRA, two micro-batches": make_trial(zero(1), grad_accum=2, lora=LORA),
    "zero2, LoRA": make_trial(zero(2), lora=LORA),
    "zero2, frozen, CPU optimizer": make_trial(offload("cpu_optimizer", 2), freeze=FREEZE),
    "zero3, LoRA": make_trial(zero(3), lora=LORA),
    "zero3, frozen": make_trial(zero(3), freeze=FREEZE),
    "zero3, LoRA, CPU optimizer and parameters": make_trial(offload("cpu_full"), lora=LORA),
}


@dataclass(frozen=True)
class Allocation:
    size: int
    is_beside: bool
    """On another stream than the default one."""
    live: int
    """Bytes in use afterwards."""


@dataclass
class Phase:
    name: str
    allocations: list[Allocation] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    """How many allocations there were before each time that the whole cache was released."""

    @property
    def peak(self) -> int:
        return max(each.live for each in self.allocations)


def phases_of(events: Sequence[Sequence[Any]]) -> list[Phase]:
    """Phases that allocate something; building the model belongs to initialization, as in the replay."""
    live: dict[int, int] = {}
    found: list[Phase] = []
    for event in events:
        if not event:
            found[-1].releases.append(len(found[-1].allocations))
        elif isinstance(event[0], str):
            name = {"build": "initialize"}.get(event[0], event[0])
            if not found or found[-1].name != name:
                found.append(Phase(name))
        elif len(event) == 1:
            live.pop(event[0], None)
        elif event[1] >= MIN_BYTES:
            live[event[0]] = event[1]
            found[-1].allocations.append(Allocation(event[1], event[2] > 0, sum(live.values())))
    return [phase for phase in found if phase.allocations and phase.name != "between"]


@pytest.fixture(scope="module")
def trained(built_ops: dict[str, OpState], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Phase]]:
    """What rank 1 of each trial allocated, the one that the replay takes of two."""
    folder = tmp_path_factory.mktemp("engines")
    (folder / "trials.pickle").write_bytes(pickle.dumps(list(TRIALS.values())))
    variables = write_plans(folder / "machine", CardPlan(), CardPlan())
    variables["PYTHONPATH"] += os.pathsep + str(ROOT)
    variables["DS_BENCH_PRELOAD"] = "transformers.models.llama.modeling_llama,peft"
    command = [sys.executable, "tests/support/engine_events.py", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: phases_of(json.loads((folder / f"{number}.1.json").read_text())) for number, name in enumerate(TRIALS)
    }


Traces = dict[TraceVariant, dict[str, Any]]


def variant_of(trial: Trial) -> TraceVariant:
    work, engine = trial.workload, trial.configuration.engine
    is_frozen = (work.lora or work.freeze) is not None
    return TraceVariant(
        lora=work.lora,
        freeze=work.freeze,
        efficient_linear=is_frozen and trial.configuration.stage == 3,
        autocast=engine == "ddp",
        loss=None if work.loss == "model" else work.loss,
    )


@pytest.fixture(scope="module")
def traces() -> Traces:
    variants = list(dict.fromkeys(map(variant_of, TRIALS.values())))
    requests = [
        allocation_trace.trace_request(FACTS, LENGTH, checkpointing=False, variant=variant) for variant in variants
    ]
    answers = allocation_trace.make_traces([{**request, "precisions": ["bf16"]} for request in requests])
    return {
        variant: answer["bf16"] if variant.lora is None else allocation_trace.at_rank(answer["bf16"], int(variant.lora))
        for variant, answer in zip(variants, answers, strict=True)
    }


def replayed(trial: Trial, traces: Traces, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Phase], set[int]]:
    """The phases of a replay, and the sizes of what the model itself allocates."""
    log: list[tuple[Any, ...]] = [("initialize",)]
    begin = allocation_replay.Rank.begin
    blocks: list[Block] = []
    """All of them, so that no address is used again."""

    class Recorder(CachingAllocator):
        def allocate(self, size_bytes: int, stream: int = 0) -> Block:
            block = super().allocate(size_bytes, stream)
            log.append((id(block), size_bytes, stream))
            blocks.append(block)
            return block

        def free(self, block: Block, *, is_pending: bool = False) -> None:
            log.append((id(block),))
            super().free(block, is_pending=is_pending)

        def empty_cache(self) -> None:
            log.append(())
            super().empty_cache()

    def begin_and_note(rank: allocation_replay.Rank, phase: Any) -> None:
        begin(rank, phase)
        log.append((phase,))

    monkeypatch.setattr(allocation_replay, "CachingAllocator", Recorder)
    monkeypatch.setattr(allocation_replay.Rank, "begin", begin_and_note)
    trace = traces[variant_of(trial)]
    profile = formula_profile(ARCHITECTURE, trained_parameters.of_workload(trial.workload))
    assert allocation_trace.can_extend(trace)
    assert allocation_trace.is_of(trace, profile)
    inputs = inputs_of(profile, trial.workload, trial.placement, trial.ds_config, trial.configuration.engine)
    assert allocation_replay.unknown_to_replay(inputs) is None
    events = allocation_trace.full_events(trace, profile, BATCH, LENGTH)
    allocation_replay.replay(inputs, events, workspace_bytes=0)
    return phases_of(log), {event[2] for event in events if event[0] == allocation_trace.ALLOCATE}


@pytest.mark.parametrize("name", TRIALS)
def test_deepspeed_allocates_what_the_replay_says(
    name: str,
    trained: dict[str, list[Phase]],
    traces: dict[TraceVariant, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every allocation: bytes, phase, whether on the default stream, their order, and what is live then.

    There are two artifacts. In backward the trace's hooks on modules keep the gradients of a module's output until it
    ends, and free the logits' gradient later. Torch's own operators are in another order than DeepSpeed's linear layers
    of stage 3, so in backward the model's allocations are compared without their order. With offloaded parameters
    Gloo's threads may keep what gathers read, parts of tensors, for a moment.
    """
    expected, of_model = replayed(TRIALS[name], traces, monkeypatch)
    row = TRIALS[name].configuration
    known = 2 * FACTS.largest_parameter if row.layout[2] != "none" else 0 if row.stage else BUFFERS
    assert [phase.name for phase in trained[name]] == [phase.name for phase in expected]
    for number, (real, said) in enumerate(zip(trained[name], expected, strict=True)):
        where, kept = f"{number} {real.name}", 0
        assert real.releases == said.releases, where
        compared = [real.allocations, said.allocations]
        if real.name == "backward":
            assert sorted(_sizes(real.allocations)) == sorted(_sizes(said.allocations)), where
            assert -LOGITS <= real.peak - said.peak <= known, where
            compared = [[each for each in both if each.is_beside or each.size not in of_model] for both in compared]
            kept = LOGITS
        assert _sizes(compared[0]) == _sizes(compared[1]), where
        more = [one.live - other.live for one, other in zip(*compared, strict=True)]
        assert not more or -kept <= min(more) <= max(more) <= known, (where, more)


def _sizes(allocations: Sequence[Allocation]) -> list[tuple[int, bool]]:
    """In KiB, as the replay does not know ``BUFFERS``."""
    return [(each.size // 1024, each.is_beside) for each in allocations]
