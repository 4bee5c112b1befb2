"""Selects the trained parameters by name, given ``--lora`` and ``--freeze``.

Both the worker, which builds the model, and the formulas, which only list its tensors, use these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..errors import UsageError
from .spec import Workload

VISION = ("*visual.*", "*vision_tower.*", "*vision_model.*")
"""Patterns that ``--freeze vision`` stands for: the vision tower, with Qwen's merger, as Transformers names it."""
_NOT_LINEAR = ("gate", "router", "lm_head", "relative_attention_bias", "shared", "embed")
"""Last parts of the names of matrices that get no adapter: routers, the output head and embedding tables. A matrix
with ``embed`` anywhere in that part gets none either."""


class Lora(NamedTuple):
    """The adapters of ``--lora``."""

    rank: int
    modules: tuple[str, ...] = ()
    """Last parts of the names of the linear modules that get one; empty: all. Routers and the output head never do."""

    def adapts(self, module: str) -> bool:
        """Whether a linear module of this name gets an adapter; peft compares names in the same way."""
        return not self.modules or any(module == each or module.endswith(f".{each}") for each in self.modules)


def parse_lora(text: str) -> Lora:
    """Read ``16`` or ``16:q_proj,v_proj``. Raises ValueError."""
    rank, _, modules = text.partition(":")
    if not rank.isdecimal() or not 1 <= int(rank) <= 65536 or text.endswith(":"):
        raise ValueError(f"{text[:40]!r} is not a rank, or a rank and modules such as 16:q_proj,v_proj")
    names = tuple(each.strip() for each in modules.split(",")) if modules else ()
    if not all(names):
        raise ValueError(f"{text[:40]!r} has a module without a name")
    return Lora(int(rank), names)


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter's name matches a ``--freeze`` pattern: ``vision``, or part of it, with wildcards * and ?."""
    for each in patterns:
        globs = VISION if each == "vision" else (f"*{each}*",)
        if any(fnmatchcase(name, glob) for glob in globs):
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParameters:
    """The trained part of a model: everything, unless it has adapters or frozen modules."""

    lora: Lora | None = None
    freeze: tuple[str, ...] = ()

    def trains(self, name: str) -> bool:
        """Whether the model's own parameter of this name is trained."""
        return self.lora is None and not is_frozen(name, self.freeze)

    def adapts(self, module: str) -> bool:
        """Whether the linear module of this name gets an adapter; a frozen one does not."""
        last = module.rpartition(".")[2]
        if self.lora is None or last in _NOT_LINEAR or "embed" in last:
            return False
        return self.lora.adapts(module) and not is_frozen(f"{module}.weight", self.freeze)


def read_choice(lora: str | None, freeze: str | None, option: str = "--lora") -> TrainedParameters | None:
    """Return the part that the flags select; None if everything is trained. Raises UsageError about ``option``."""
    if lora is None and freeze is None:
        return None
    patterns = tuple(filter(None, (each.strip() for each in (freeze or "").split(","))))
    try:
        return TrainedParameters(lora=None if lora is None else parse_lora(lora), freeze=patterns)
    except ValueError as error:
        raise UsageError(f"{option} {error}", remedy="give a rank from 1 to 65536, such as 16") from None


def of_workload(workload: Workload) -> TrainedParameters | None:
    """Return the trained part of a workload; None if everything is trained."""
    return read_choice(workload.lora, workload.freeze)
