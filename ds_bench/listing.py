"""The verbs ``models``, ``ops`` and ``advice``: what is built in, what is compiled, what is known without measuring."""

from __future__ import annotations

import os
from pathlib import Path

from . import advice, gpus, ops, placement, preflight, strategies
from .errors import UsageError
from .models import find_preset, preset_names, similar_presets
from .spec import Precision
from .units import format_count, format_millions


def build_ops() -> int:
    """Builds what is not built yet, and says of each op whether it can be used. Returns 0 when one at least can."""
    place = placement.here(os.environ, gpus.NvmlQuery())
    names = [ops.SHARED_MEMORY] if place.accelerator == "cpu" else [ops.FUSED_ADAM]
    variables = preflight.rank_environment(place, os.environ, None)
    folder = Path(variables["TORCH_EXTENSIONS_DIR"])
    states = ops.prepare_ops([*names, ops.CPU_ADAM, ops.ASYNC_IO], folder, variables, say=print)
    for name, state in states.items():
        remedy = ops.REMEDIES.get(name, "see the build log")
        print(f"{name.removesuffix('Builder'):<14} {'ready' if state.ready else f'{state.reason}; {remedy}'}")
    return 0 if any(state.ready for state in states.values()) else 1


def list_models() -> int:
    """Prints every preset with parameters counted from its architecture."""
    print(
        f"{'preset':<30} {'architecture':<12} {'parameters':>16} {'':>9} "
        f"{'layers':>6} {'hidden':>6} {'vocab':>8} {'positions':>9}"
    )
    for name in preset_names():
        facts = find_preset(name)
        if facts is not None:
            print(
                f"{facts.name:<30} {facts.model_type:<12} {format_count(facts.parameters):>16} "
                f"{format_millions(facts.parameters):>9} {facts.layers:>6} {facts.hidden_size:>6} "
                f"{facts.vocabulary_size:>8} {facts.max_positions or '':>9}"
            )
    return 0


def show_advice(model: str, num_gpus: int, precision: Precision, grad_accum: int) -> int:
    """Prints for each strategy when to use it, what it saves and costs this model. Raises UsageError; returns 0."""
    facts = find_preset(model)
    if facts is None:
        near = similar_presets(model)
        remedy = f"did you mean {', '.join(near)}?" if near else "python -m ds_bench models lists them"
        raise UsageError(f"--model {model} is not a built-in model", remedy=remedy)
    catalogue = [*strategies.ZERO_STAGES.values(), *map(strategies.offload_strategy, strategies.OFFLOAD_NAMES[1:])]
    print(f"{facts.name}, {format_millions(facts.parameters)} parameters, {precision}, {num_gpus} GPU(s); by formula\n")
    for strategy in catalogue:
        found = advice.advise(
            strategy, parameters=facts.parameters, num_gpus=num_gpus, precision=precision, grad_accum=grad_accum
        )
        print("\n".join(advice.lines(found)))
    return 0
