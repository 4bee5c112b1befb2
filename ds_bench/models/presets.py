"""Built-in models, as architectures without weights, and their counts.

Weights do not matter for speed, so a preset is only the arguments of ``AutoConfig.for_model(model_type, **config)``;
the JSON files beside this module have them, one file per family. They differ from the published configs in one thing:
``use_cache`` is off, because training reads no key-value cache. Dropout is the family's own (0.1 for GPT-2 and OPT),
since that is what a user trains with; ``--dropout`` changes it. The presets ``size-…`` are the sizes of the model-size
benchmark, which no maker published: models like GPT-2, without dropout. Those that end in ``-text`` are the language
model of a published model that also reads images.

Counts are those of Transformers 5 (``AutoModelForCausalLM.from_config``), without loading torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from . import architectures
from .architectures import ArchitectureCounts

_PRESET_FILES = (
    "gpt2", "model_sizes", "opt", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3",
    "phi3", "deepseek_v2", "gpt_oss",
)  # fmt: skip
"""Names of the JSON files, in the order in which presets are listed; inside a file they go by release and size."""
_SUFFIXES = re.compile(r"-(hf|pt|v[0-9.]+)$")
"""Ends of names on the Hub that a short name leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(ArchitectureCounts):
    """A model's config and its counts."""

    name: str
    """What the user calls it: a preset's name, a path, or a name of the user's own."""
    model_type: str
    """The architecture family as Transformers calls it, such as ``gpt2`` or ``mixtral``."""
    config: Mapping[str, Any] = field(hash=False)
    """Keyword arguments of ``AutoConfig.for_model(model_type, **config)``. Not to be changed."""


def preset_names() -> tuple[str, ...]:
    """All presets: ``tiny`` first, then by family, and within a family by release and size."""
    return tuple(_presets())


def find_preset(name: str) -> ModelFacts | None:
    """The preset with this name or short name, in upper or lower case; None if there is none.

    A short name does not stand for a preset where a folder of that name is in the current folder.
    """
    folded = name.casefold()
    known = _spellings().get(folded)
    if known is None:
        known = _long_names().get(folded)
        if known is None or Path(name).is_dir():
            return None
    entry = _presets()[known]
    return facts_from_config(known, entry["model_type"], entry["config"])


def short_names() -> Mapping[str, str]:
    """Preset name → its shortest other name: without organisation, and without ``-hf`` or a version where that is
    enough. Presets without an organisation have none.
    """
    return {known: short for short, known in _long_names().items()}


def similar_presets(name: str) -> list[str]:
    """Up to three preset names that contain ``name`` or are similar to it, best first, for the remedy of an error."""
    from difflib import get_close_matches

    typed = name.casefold()
    spellings = dict(_spellings())
    # Users leave the organisation out ("Llama-3.1-9B"), and then the full name is not similar enough.
    spellings |= {spelling.rpartition("/")[2]: known for spelling, known in spellings.items()}
    containing = [spelling for spelling in spellings if typed and typed in spelling]
    matches = containing + get_close_matches(typed, spellings, n=6)
    return list(dict.fromkeys(spellings[match] for match in matches))[:3]


def facts_from_config(name: str, model_type: str, config: Mapping[str, Any]) -> ModelFacts:
    """The counts of a model from its config, as ``PreTrainedConfig.to_dict()`` or a preset gives it.

    Raises UsageError for an unknown family, and for a config that lacks a size or has an impossible one.
    """
    counts = architectures.count_architecture(name, model_type, config)
    # Copied, since presets are read once and shared.
    return ModelFacts(name=name, model_type=model_type, config=deepcopy(dict(config)), **asdict(counts))


@cache
def _spellings() -> dict[str, str]:
    """Preset name in lower case → preset name."""
    return {known.casefold(): known for known in _presets()}


@cache
def _long_names() -> dict[str, str]:
    """Short name in lower case → preset name; of each preset the longer short name first."""
    names: dict[str, list[str]] = {}
    for spelling, known in _spellings().items():
        organisation, _, model = spelling.rpartition("/")
        if organisation:
            for short in {model, _SUFFIXES.sub("", model)}:
                names.setdefault(short, []).append(known)
    # A short name that would stand for two presets stands for neither.
    unique = {short: known for short, (known, *others) in names.items() if not others and short not in _spellings()}
    return dict(sorted(unique.items(), key=lambda item: -len(item[0])))


@cache
def _presets() -> dict[str, dict[str, Any]]:
    """Preset name → its ``model_type`` and ``config``, read on first use to keep imports fast."""
    import json
    from importlib.resources import files

    folder = files(__package__)
    presets: dict[str, dict[str, Any]] = {}
    for family in _PRESET_FILES:
        presets |= json.loads((folder / f"{family}.json").read_text(encoding="utf-8"))
    return presets
