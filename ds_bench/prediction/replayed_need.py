"""Narrows the need of a GPU by a replay of the trial's allocations, where the rule leaves a verdict open.

The rule (``GpuNeed.by_rule``) decides clear rows: what it calls ``fits`` or ``does not fit`` stays so. A row in between
is replayed, which takes a fraction of a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from ..config.spec import Engine, Placement, Workload
from . import allocation_replay, allocation_trace, model_profile
from .gpu_need import TIGHT, GpuNeed
from .inputs import MemoryInputs
from .model_profile import USUAL, ModelProfile, variant_of
from .predicted_memory import Prediction, inputs_of, predict

ReplayMode = Literal["near", "never", "always"]
"""Which rows are replayed: those that the rule calls ``tight``, none, or all."""


def predict_near(
    profile: ModelProfile,
    workload: Workload,
    placement: Placement,
    ds_config: Mapping[str, Any],
    gpu_capacity_bytes: int | None,
    *,
    engine: Engine = "deepspeed",
    ranks_per_node: int | None = None,
    mode: ReplayMode = "near",
    loads_weights: bool = False,
) -> Prediction:
    """Predict as ``predict`` does, and replay the trial if ``mode`` asks for it and its trace is known.

    ``gpu_capacity_bytes``: the GPU that the rule's verdict is about; None if it is not known, which replays nothing
    unless ``mode`` is ``always``.
    """
    how: dict[str, Any] = {"engine": engine, "ranks_per_node": ranks_per_node, "loads_weights": loads_weights}
    found = predict(profile, workload, placement, ds_config, **how)
    if found.need is None or found.unknown is not None or found.need.unknowns or mode == "never":
        return found
    is_near = gpu_capacity_bytes is not None and found.need.verdict(gpu_capacity_bytes) == TIGHT
    if mode == "near" and not is_near:
        return found
    usual = variant_of(workload, ds_config, engine)._replace(attention=None) == USUAL
    if not usual or workload.attention == "eager" or workload.compile != "none":
        return found
    inputs = inputs_of(profile, workload, placement, ds_config, engine)
    batch_size = int(ds_config.get("train_micro_batch_size_per_gpu", workload.batch_size))
    sizes = (batch_size, workload.seq_length, workload.activation_checkpointing, workload.dropout, workload.zero_init)
    need = _replayed_need(inputs, *sizes, found.terms["workspaces"] // 2, found.need.least_bytes, found.gpu["overhead"])
    return found if need is None else replace(found, need=need)


@lru_cache(maxsize=256)
def _replayed_need(
    inputs: MemoryInputs,
    batch_size: int,
    seq_length: int,
    checkpointing: bool,
    dropout: float | None,
    zero_init: bool,
    workspace_bytes: int,
    least_by_rule: int,
    outside_bytes: int,
) -> GpuNeed | None:
    """The need by a replay; None without a trace of the model, and for settings that the replay does not know."""
    sizes = (batch_size, seq_length, checkpointing, dropout, zero_init, workspace_bytes)
    facts = inputs.profile.facts
    if facts is None or not allocation_replay.is_replayable(inputs):
        return None
    key = model_profile.request_key({"inputs": repr(inputs), "sizes": sizes, "code": _code_hash()})
    kept = model_profile.cached_answer(f"{key}_need")
    if kept is None:
        trace = allocation_trace.find_trace(
            facts, seq_length, checkpointing=checkpointing, element_bytes=inputs.element, dropout=dropout
        )
        if trace is None:
            return None
        events = allocation_trace.full_events(trace, inputs.profile, batch_size, seq_length)
        how: dict[str, Any] = {"workspace_bytes": workspace_bytes, "zero_init": zero_init}
        roomy = allocation_replay.replay(inputs, events, **how)
        # On a smaller GPU less may be allocated: stages 1 and 2 then flatten parameters in host memory.
        low = min(roomy.allocated_bytes, least_by_rule - outside_bytes)
        least, phase = allocation_replay.least_capacity(
            inputs, events, low_bytes=low, high_bytes=roomy.reserved_bytes, **how
        )
        kept = {"least": least, "reserved": roomy.reserved_bytes, "phase": phase or roomy.phase}
        model_profile.cache_answer(f"{key}_need", kept)
    return GpuNeed(
        least_bytes=kept["least"] + outside_bytes,
        reserved_bytes=kept["reserved"] + outside_bytes,
        phase=kept["phase"],
        method="replay",
    )


@cache
def _code_hash() -> str:
    """Hash of the code and of the traces in the package, which decide the result of a replay."""
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), folder / allocation_trace.TABLE_NAME]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
