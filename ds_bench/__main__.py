"""``python -m ds_bench VERB``, also installed as ``ds-compare``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import DsBenchError
from .units import format_count, format_millions


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code."""
    parser = argparse.ArgumentParser(prog="ds_bench", description="Which DeepSpeed configuration should I train with?")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("models", help="list the built-in models with their counted parameters")
    verbs.add_parser("ops", help="build the DeepSpeed ops that comparisons on this machine use, ahead of time")
    verb = parser.parse_args(arguments).verb
    try:
        return {"models": list_models, "ops": build_ops}[verb]()
    except DsBenchError as error:
        print(f"ds_bench: {error}", file=sys.stderr)
        return error.exit_code


def build_ops() -> int:
    """Builds what is not built yet, and says of each op whether it can be used. Returns 0 when one at least can."""
    from . import gpus, ops, placement, preflight

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
    from .models import find_preset, preset_names

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


if __name__ == "__main__":
    sys.exit(main())
