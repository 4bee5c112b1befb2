"""The verbs ``models``, ``ops`` and ``advice``: what is built in, what is compiled, what is known without measuring."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..analysis.trial_caveats import NEAR_CAPACITY
from ..config import placement, strategies
from ..config.spec import Precision
from ..errors import UsageError
from ..launch import ops, rank_environment
from ..models import lookup
from ..models.presets import ModelFacts, find_preset, preset_names
from ..recommend import strategy_guide
from ..recommend.rule import COMFORTABLE
from ..system import gpus, terminal
from ..units import format_count, format_millions, format_percent


def build_ops() -> int:
    """Builds what is not built yet, and says of each op whether it can be used. Returns 0 when one at least can."""
    place = placement.here(os.environ, gpus.NvmlQuery())
    names = [ops.SHARED_MEMORY] if place.accelerator == "cpu" else [ops.FUSED_ADAM]
    variables = rank_environment.rank_environment(place, os.environ, None)
    folder = Path(variables["TORCH_EXTENSIONS_DIR"])
    states = ops.prepare_ops([*names, ops.CPU_ADAM, ops.ASYNC_IO], folder, variables, say=terminal.print_text)
    for name, state in states.items():
        told = "ready" if state.ready else f"{state.reason}; {ops.remedy_of(state.reason)}"
        terminal.print_text(f"{name.removesuffix('Builder'):<14} {told}")
    return 0 if any(state.ready for state in states.values()) else 1


def list_models() -> int:
    """Prints every preset with parameters counted from its architecture."""
    terminal.print_text(
        f"{'preset':<30} {'architecture':<12} {'parameters':>16} {'':>9} "
        f"{'layers':>6} {'hidden':>6} {'vocab':>8} {'positions':>9}"
    )
    for name in preset_names():
        facts = find_preset(name)
        if facts is not None:
            terminal.print_text(
                f"{facts.name:<30} {facts.model_type:<12} {format_count(facts.parameters):>16} "
                f"{format_millions(facts.parameters):>9} {facts.layers:>6} {facts.hidden_size:>6} "
                f"{facts.vocabulary_size:>8} {facts.max_positions or '':>9}"
            )
    return 0


def show_advice(model: str, num_gpus: int, precision: Precision, grad_accum: int) -> int:
    """Prints for each strategy when to use it, what it saves and costs this model. Raises UsageError; returns 0."""
    facts = _facts(model)
    catalogue = [*strategies.ZERO_STAGES.values(), *map(strategies.offload_strategy, strategies.OFFLOAD_NAMES[1:])]
    name = terminal.plain(facts.name)
    terminal.print_text(
        f"{name}, {format_millions(facts.parameters)} parameters, {precision}, {num_gpus} GPU(s); by formula\n"
    )
    for strategy in catalogue:
        found = strategy_guide.advise(
            strategy, parameters=facts.parameters, num_gpus=num_gpus, precision=precision, grad_accum=grad_accum
        )
        terminal.print_text("\n".join(strategy_guide.lines(found)))
    terminal.print_text("\n" + "\n".join(_patterns(num_gpus)))
    return 0


def _patterns(num_gpus: int) -> Iterator[str]:
    """The rules of thumb for any model."""
    comfortable, barely, near = (
        format_percent(share, digits=0) for share in (COMFORTABLE, strategy_guide.BARELY, NEAR_CAPACITY)
    )
    yield "Rules of thumb, by what a measured run shows:"
    yield f"  fits comfortably (under {comfortable} of the card): stage 0 or 1"
    yield f"  barely fits ({barely} to {near}): stage 2"
    yield "  out of memory at stage 2: stage 3, or offload"
    yield "  speed is critical: the lowest stage that fits"
    yield "  memory is critical: stage 3 with offload"
    if num_gpus == 1:
        yield "On one GPU stages 1 to 3 partition nothing: activation checkpointing, a smaller micro-batch or offload"
        yield "take the place of a higher stage there."


def _facts(model: str) -> ModelFacts:
    """Of a preset, a local folder, or what the Hub gave before: advice asks the network for nothing."""
    offline = {"HF_HUB_OFFLINE": "1"}
    try:
        found = lookup.find_model(model, factory=False, trust_remote_code=False, environment=offline).facts
    except UsageError as error:
        if Path(model).is_dir():
            raise
        more = "the folder of a model works too, and python -m ds_bench plan --online can ask the Hub"
        raise UsageError(error.problem, remedy="; ".join(filter(None, [error.remedy, more]))) from None
    if found is None:
        raise UsageError(
            f"--model {model}: its parameters cannot be counted without building it",
            remedy="python -m ds_bench models lists the architectures that can",
        )
    return found
