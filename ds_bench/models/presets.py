"""Built-in models: architectures without weights, and their counts.

Weights do not affect speed, so a preset is only the arguments of ``AutoConfig.for_model(model_type, **config)``, in
``preset_configs/``, one file per family. They differ from the published configs only in ``use_cache``, which is off
because training reads no key-value cache. Dropout is the family's own (0.1 for GPT-2 and OPT), since that is what
users train with; ``--dropout`` changes it. The presets ``size-…`` belong to the model-size benchmark and were never
published: they are like GPT-2 but without dropout. A name ending in ``-text`` is the language model of a model that
also reads images.

``preset_counts.json`` has counts from models that Transformers 5 built (``worker.lookup_model``), so that no command
has to build one. ``scripts/make_model_counts.py`` writes that file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..system import invocation
from ..units import format_series

_PRESET_FILES = (
    "gpt2", "gpt2_five_sizes", "opt", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3",
    "phi3", "deepseek_v2", "gpt_oss",
)  # fmt: skip
"""Names of the JSON files, in the order of the list of presets; each file is sorted by release and size."""
_SUFFIXES = re.compile(r"-(hf|pt|v[0-9.]+)$")
"""Endings of Hub names that a short name leaves out."""
_TUNING = re.compile(r"-(base|chat|instruct|it)(?=-|$)")
"""Parts of Hub names that say how the weights were trained; they do not affect the shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's config, and its counts in elements (not bytes) of the whole, unpartitioned model."""

    name: str
    """The user's name for the model: a preset's name, a path, or any other."""
    model_type: str
    """Transformers' name of the architecture, such as ``gpt2`` or ``mixtral``."""
    config: Mapping[str, Any] = field(hash=False)
    """Keyword arguments of ``AutoConfig.for_model(model_type, **config)``. Read-only."""
    parameters: int
    """Trainable elements; a tensor shared by input embedding and LM head counts once, and inactive experts count."""
    matmul_parameters: int
    """Weight elements that one token is multiplied by, including the LM head, tied or not.

    Not counted: input embedding (a look-up), position embeddings, biases, norms, and the experts that a token skips.
    """
    layers: int
    """Transformer blocks."""
    hidden_size: int
    """Width of the residual stream, in elements per token."""
    attention_heads: int
    """Query heads per layer (H of the PaLM formula); key-value heads may be fewer."""
    head_dim: int
    """Elements per query head (Q of the PaLM formula); heads x head_dim need not equal the hidden size. If keys and
    values differ in width, their mean."""
    vocabulary_size: int
    """Rows of the embedding, padding rows included; token ids are below it."""
    max_positions: int | None
    """Longest sequence, in tokens, that the config allows; None if the architecture has no limit."""
    largest_parameter: int
    """Elements of the largest tensor: the most that ZeRO-3 must gather at once, unless it splits modules."""
    tied_embeddings: bool
    """Whether input embedding and LM head are one tensor."""


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets: ``tiny`` first, then by family, release and size."""
    return tuple(preset_entries())


def find_preset(name: str) -> ModelFacts | None:
    """Return the preset with this name or short name, ignoring case; None if there is none.

    The name of a chat model or of Llama 3 (``Qwen2.5-7B-Instruct``, ``Meta-Llama-3-8B``) finds the preset with the same
    shapes. A folder of that name in the current folder takes precedence, except over a preset's full name.
    """
    full, short = _names()
    folded = name.casefold()
    known = full.get(folded)
    if known is None:
        organization, slash, model = folded.rpartition("/")
        model = model if model in short and not slash else _TUNING.sub("", model.removeprefix("meta-"))
        # Llama 3 has the shapes of 3.1, with fewer positions.
        model = re.sub(r"^llama-3-(?=\d)", "llama-3.1-", model)
        known = full.get(f"{organization}/{model}") or short.get(model)
        if known is None or not known.casefold().startswith(organization + slash) or Path(name).is_dir():
            return None
    entry = preset_entries()[known]
    counts = read_json("preset_counts")[known]
    # A copy, because presets are read once and shared.
    return ModelFacts(name=known, model_type=entry["model_type"], config=deepcopy(entry["config"]), **counts)


def short_names() -> Mapping[str, str]:
    """Return preset name → shortest unique name: without organization and, if still unique, without ``-hf`` or version.

    Presets without an organization have none.
    """
    return {known: short for short, known in _names()[1].items()}


def preset_remedy(name: str, other: str = "") -> str:
    """Return what to do about an unknown model: try a similar preset, or list them. ``other``: a further option."""
    if similar := similar_presets(name):
        return f"did you mean {format_series(similar)}?{f' Or {other}' if other else ''}"
    return f"{f'{other}, or ' if other else ''}list the built-in models with {invocation.command('models')}"


def similar_presets(name: str) -> list[str]:
    """Return up to three presets whose names contain ``name`` or are similar to it, best first."""
    from difflib import get_close_matches

    typed, (full, _) = name.casefold(), _names()
    # Users leave the organization out ("Llama-3.1-9B"), and then the full name is not similar enough.
    spellings = full | {spelling.rpartition("/")[2]: known for spelling, known in full.items()}
    containing = [spelling for spelling in spellings if typed and typed in spelling]
    matches = containing + get_close_matches(typed, spellings, n=6)
    return list(dict.fromkeys(spellings[match] for match in matches))[:3]


@cache
def _names() -> tuple[dict[str, str], dict[str, str]]:
    """Return lower-case full name → preset name, and the same for unique short names, longer ones first."""
    full = {known.casefold(): known for known in preset_entries()}
    names: dict[str, list[str]] = {}
    for spelling, known in full.items():
        organization, _, model = spelling.rpartition("/")
        if organization:
            for short in {model, _SUFFIXES.sub("", model)}:
                names.setdefault(short, []).append(known)
    # A short name that fits two presets denotes neither.
    unique = {short: known for short, (known, *others) in names.items() if not others and short not in full}
    return full, dict(sorted(unique.items(), key=lambda item: -len(item[0])))


@cache
def preset_entries() -> Mapping[str, dict[str, Any]]:
    """Return preset name → its ``model_type`` and ``config``, read on first use to keep imports fast. Read-only."""
    presets: dict[str, dict[str, Any]] = {}
    for family in _PRESET_FILES:
        presets |= read_json(f"preset_configs/{family}")
    return presets


@cache
def read_json(name: str) -> dict[str, dict[str, Any]]:
    """Return the contents of a JSON file of this package; ``name`` has no extension. Read once: do not change them."""
    import json
    from importlib.resources import files

    contents: dict[str, dict[str, Any]] = json.loads((files(__package__) / f"{name}.json").read_text(encoding="utf-8"))
    return contents
