"""Narrows down a trial's need for GPU memory by replaying its allocations, where the rule leaves a verdict open.

The rule (``GpuNeed.by_rule``) settles the verdict on rows whose need is far from the GPU's memory. Others are replayed,
which takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from ..config.spec import Engine, Placement, Trial, Workload
from . import allocation_replay, allocation_trace, model_profile
from .allocation_trace import Event, TraceVariant
from .fit_verdict import VARYING_PERCENT, GpuNeed
from .inputs import MemoryInputs
from .model_profile import ModelProfile, Variant, variant_of
from .predicted_memory import WORKSPACES, Prediction, inputs_of, predict
from .torch_allocators import allocator_options

ReplayMode = Literal["near", "never", "always"]
"""Which rows are replayed: those near the GPU's memory, none, or all."""
ChildTraces = Literal["none", "usual", "all"]
"""Which traces a child process may make if neither the package nor the user's cache has them: none, those that rows
usually need, or also those that only references and remedies need."""
_NEAR_FROM_LEAST, _NEAR_TO_RESERVED = 0.8, 1.3
"""A GPU is near a trial's need from 0.8 times the rule's least memory up to 1.3 times what the rule reserves. Replays
of eight strategies of Llama-3.1-8B and GPT-2 (2 and 8 GPUs, 512 and 4,096 tokens, with and without checkpointing) need
0.81 to 1.21 times the rule's least memory and reserve up to 1.26 times its estimate."""
_LENGTHS = 8
"""Number of steps that stand for varying lengths. They grow evenly up to the longest: no cached block is
large enough for a longer sequence, so this order reserves a lot."""

AUTOCAST, TILED_LOSS = "DDP under autocast", "the tiled loss"
"""Traced only on demand: just references and remedies use them, and a trace takes a child process a few seconds."""

UNPREDICTABLE = (ValueError, KeyError, TypeError, ZeroDivisionError)
"""Errors that a prediction raises for a configuration that the formulas do not cover."""


def predict_trial(
    profile: ModelProfile, trial: Trial, gpu_capacity_bytes: int | None, *, verdict_only: bool = False
) -> Prediction:
    """Predict a planned trial as ``predict_near`` does. Raises one of ``UNPREDICTABLE``."""
    return predict_near(
        profile,
        trial.workload,
        trial.placement,
        trial.ds_config,
        gpu_capacity_bytes,
        engine=trial.configuration.engine,
        ranks_per_node=trial.placement.ranks_per_node,
        verdict_only=verdict_only,
        variables=trial.configuration.variables,
    )


def predict_near(
    profile: ModelProfile,
    workload: Workload,
    placement: Placement,
    ds_config: Mapping[str, Any],
    gpu_capacity_bytes: int | None,
    *,
    engine: Engine,
    ranks_per_node: int,
    mode: ReplayMode = "near",
    loads_weights: bool = False,
    varying_lengths: bool = False,
    verdict_only: bool = False,
    variables: Mapping[str, str] | None = None,
    child_traces: ChildTraces = "usual",
) -> Prediction:
    """Predict as ``predict`` does, and replay the trial if ``mode`` asks for it and a trace exists or can be made.

    ``gpu_capacity_bytes``: memory of the GPU that the verdict is about; if None, it is unknown, and nothing is replayed
    unless ``mode`` is ``always``. ``varying_lengths``: whether the workload's sequence length is only the maximum.
    ``verdict_only``: do not search for the least memory of a replayed trial, but only find out whether the GPU has it,
    in two replays instead of about eight. ``variables``: environment variables of the row's ranks.
    """
    found = predict(
        profile,
        workload,
        placement,
        ds_config,
        engine=engine,
        ranks_per_node=ranks_per_node,
        loads_weights=loads_weights,
    )
    rule = found.need
    if rule is None:
        return found
    if varying_lengths:
        rule = replace(rule, reserved_bytes=round((1 + VARYING_PERCENT / 100) * rule.reserved_bytes))
        found = replace(found, need=rule)
    is_near = (
        gpu_capacity_bytes is not None
        and _NEAR_FROM_LEAST * rule.least_bytes <= gpu_capacity_bytes < _NEAR_TO_RESERVED * rule.reserved_bytes
    )
    if mode == "never" or (mode == "near" and not is_near) or found.unknown is not None or rule.unknowns:
        return found
    inputs = inputs_of(profile, workload, placement, ds_config, engine)
    variant = variant_of(workload, ds_config, engine)
    untraced = _untraced(variant, engine, on_demand=child_traces == "all")
    obstacle = allocation_replay.unknown_to_replay(inputs) or untraced
    if obstacle is None:
        batch_size = int(ds_config.get("train_micro_batch_size_per_gpu", workload.batch_size))
        need = _replayed_need(
            inputs,
            (batch_size, workload.seq_length, workload.activation_checkpointing, workload.dropout, workload.zero_init),
            TraceVariant(
                lora=workload.lora,
                freeze=workload.freeze,
                efficient_linear=inputs.settings.efficient_linear and bool(inputs.profile.frozen),
                autocast=variant.autocast,
                loss=None if variant.loss == "model" else variant.loss,
            ),
            found.terms["workspaces"] // WORKSPACES,
            rule.least_bytes,
            found.gpu["overhead"],
            varying_lengths,
            allocator_options(variables).get("expandable_segments", "").lower() == "true",
            gpu_capacity_bytes,
            verdict_only,
            child_traces != "none",
        )
        if need is not None:
            return replace(found, need=need)
    return replace(found, need=replace(rule, not_replayed=obstacle or "the lack of a trace of this model"))


def _untraced(variant: Variant, engine: Engine, *, on_demand: bool) -> str | None:
    """Name the part of a variant that no trace covers; None if all of it is covered."""
    reasons = (
        (AUTOCAST, variant.autocast and engine == "ddp" and not on_demand),
        (TILED_LOSS, variant.loss == "tiled" and not on_demand),
        (f"the {variant.loss} loss", variant.loss not in ("model", "tiled")),
        ("eager attention", variant.attention == "eager"),
        ("torch_autocast", variant.autocast and engine != "ddp"),
        ("a tiled MLP", variant.tiled_mlp),
    )
    return next((name for name, is_there in reasons if is_there), None)


@lru_cache(maxsize=256)
def _replayed_need(
    inputs: MemoryInputs,
    sizes: tuple[int, int, bool, float | None, bool],
    variant: TraceVariant,
    workspace_bytes: int,
    least_by_rule: int,
    outside_bytes: int,
    varying_lengths: bool,
    expandable_segments: bool,
    card_bytes: int | None,
    verdict_only: bool,
    starts_child: bool,
) -> GpuNeed | None:
    """The need according to a replay; None without a trace of the model. ``sizes``: micro-batch, sequence length,
    checkpointing, dropout, zero.Init. ``varying_lengths`` and ``verdict_only``: see ``predict_near``."""
    batch_size, seq_length, checkpointing, dropout, zero_init = sizes
    asked = (*sizes, variant, workspace_bytes, varying_lengths, expandable_segments, card_bytes, verdict_only)
    key = model_profile.request_key({"inputs": repr(inputs), "sizes": asked})
    kept = model_profile.cached_answer(f"{key}_need")
    if kept is None:
        parts = range(1 if varying_lengths else _LENGTHS, _LENGTHS + 1)
        lengths = tuple(seq_length * part // _LENGTHS or 1 for part in parts)
        steps = _events_of_steps(
            inputs.profile,
            batch_size,
            lengths,
            checkpointing=checkpointing,
            element_bytes=inputs.element,
            dropout=dropout,
            variant=variant,
            starts_child=starts_child,
        )
        if steps is None:
            return None
        *shorter, events = steps
        kept = {"least": 0, "reserved": 0, "phase": "step"}
        for before in ([], shorter)[: 1 + varying_lengths]:
            how: dict[str, Any] = {
                "workspace_bytes": workspace_bytes,
                "zero_init": zero_init,
                "shorter": before,
                "expandable_segments": expandable_segments,
            }
            roomy = allocation_replay.replay(inputs, events, **how)
            # On a smaller GPU, less may be allocated: stages 1 and 2 then flatten parameters in host memory.
            low = min(roomy.allocated_bytes, least_by_rule - outside_bytes)
            least, phase = allocation_replay.least_capacity(
                inputs,
                events,
                low_bytes=low,
                high_bytes=roomy.reserved_bytes,
                card_bytes=None if card_bytes is None else card_bytes - outside_bytes,
                verdict_only=verdict_only,
                **how,
            )
            if least > kept["least"]:
                kept |= {"least": least, "phase": phase or roomy.phase}
            kept["reserved"] = max(kept["reserved"], roomy.reserved_bytes)
        model_profile.cache_answer(f"{key}_need", kept)
    return GpuNeed(
        least_bytes=kept["least"] + outside_bytes,
        reserved_bytes=kept["reserved"] + outside_bytes,
        phase=kept["phase"],
        method="replay",
    )


@lru_cache(maxsize=8)
def _events_of_steps(
    profile: ModelProfile, batch_size: int, lengths: tuple[int, ...], **how: Any
) -> list[list[Event]] | None:
    """The model's events in a step of each of these sequence lengths, the longest last; None without a trace.
    ``how``: further arguments of ``find_trace``."""
    trace = profile.facts and allocation_trace.find_trace(profile.facts, lengths[-1], **how)
    if not trace or not allocation_trace.is_of(trace, profile):
        return None
    return [allocation_trace.full_events(trace, profile, batch_size, each) for each in lengths]
