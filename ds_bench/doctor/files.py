"""Configurations of the user's own: whether each can be run on this machine, and what it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..config import validation
from ..config.automatic_values import TrainingFacts
from ..config.caveats import as_caveat
from ..config.configuration_file_rows import FileRowMaker
from ..config.configuration_files import ConfigurationFile
from ..config.spec import Configuration, Placement
from ..launch import ops
from .findings import Finding, ok, problem, warning

_ANY_HIDDEN_SIZE = 1024
"""Stands for the model, which the doctor does not know; only bucket sizes depend on it."""


def configurations_of(files: Sequence[ConfigurationFile], placement: Placement) -> list[Configuration]:
    """The configurations of files on this machine, refused ones included."""
    facts = TrainingFacts(
        num_gpus=placement.num_gpus, precision=placement.supported_precisions[0], hidden_size=_ANY_HIDDEN_SIZE
    )
    return [FileRowMaker(facts=facts).make(file) for file in files]


def check(configurations: Sequence[Configuration], placement: Placement, lines: Sequence[str]) -> Iterator[Finding]:
    """One finding for each file, and one for each line that reading the files gave."""
    for configuration in configurations:
        if (reason := validation.unsupported_reason(configuration, placement)) is not None:
            yield problem(configuration.name, f"cannot run here: {reason}")
            continue
        loaded = ops.loaded_ops(placement.accelerator, [configuration])
        names = ", ".join(op.removesuffix("Builder") for op in loaded) or "none"
        yield ok(configuration.name, f"stage {configuration.stage}, can run here; DeepSpeed ops: {names}")
        for caveat in configuration.caveats:
            yield ok(configuration.name, as_caveat(caveat).text)
    for line in lines:
        yield warning("files", line)
