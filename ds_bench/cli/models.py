"""The command ``models``: the built-in models and their sizes."""

from __future__ import annotations

from ..models.presets import find_preset, preset_names, short_names
from ..system import terminal
from ..units import format_count, format_with_suffix


def list_models() -> int:
    """Print every preset with the parameters counted from its architecture. Return 0."""
    shorter = short_names()
    terminal.print_text(
        f"{'model':<30} {'architecture':<12} {'parameters':>16} {'':>9} "
        f"{'layers':>6} {'hidden':>6} {'vocab':>8} {'positions':>9}  short name"
    )
    for facts in filter(None, map(find_preset, preset_names())):
        terminal.print_text(
            f"{facts.name:<30} {facts.model_type:<12} {format_count(facts.parameters):>16} "
            f"{format_with_suffix(facts.parameters):>9} {facts.layers:>6} {facts.hidden_size:>6} "
            f"{facts.vocabulary_size:>8} {facts.max_positions or '':>9}  {shorter.get(facts.name, '')}".rstrip()
        )
    return 0
