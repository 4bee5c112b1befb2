"""Computes the memory of one rank that runs the passes of a model alone, without optimizer (``worker.pass_engine``)."""

from __future__ import annotations

from .inputs import MemoryInputs, Phases
from .model_states import LedgerBuilder


def ledger_by_phase(inputs: MemoryInputs) -> Phases:
    """Computes one rank's ledgers: parameters in the number format of training, and gradients where they are made."""
    size = inputs.element * inputs.profile.parameters
    builder = LedgerBuilder()
    builder.add("gpu", "parameters", size)
    after = builder.plus(gradients=size if inputs.pass_type == "forward_backward" else 0)
    return {"forward": builder.ledger, "backward": after, "reduced": after, "flatten": after, "update": after}
