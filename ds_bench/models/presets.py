"""What a model is, in numbers: architecture presets and parameter counts, by arithmetic alone.

Weights do not matter for speed, so a preset is only the arguments for
``AutoConfig.for_model(model_type, **config)``; the JSON files beside this module hold them, one file per family.
One thing differs from the published configs: ``use_cache`` is off, because training reads no key-value cache.
Dropout is the family's own (0.1 for GPT-2 and OPT), as that is what a user trains with; ``--dropout`` changes it.

Counts are those of Transformers 5 (``AutoModelForCausalLM.from_config``). Nothing here loads torch, and nothing
here knows how many bytes an element takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

from ..errors import UsageError
from . import architectures

_PRESET_FILES = ("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "mixtral")
"""Names of the JSON files, in the order in which presets are listed; inside a file they go by release and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One architecture, counted. All counts are elements (not bytes) of the whole model, before any partitioning."""

    name: str
    """What the user calls it: a preset's name, a path, or a name of the user's own."""
    model_type: str
    """The architecture family in Transformers' words, such as ``gpt2`` or ``mixtral``."""
    config: Mapping[str, Any] = field(hash=False)
    """Keyword arguments for ``AutoConfig.for_model(model_type, **config)``. Copy before handing to code that writes."""
    parameters: int
    """Trainable elements; a tensor shared by input embedding and LM head counts once, inactive experts count."""
    matmul_parameters: int
    """Weight elements that one token is multiplied with. The LM head counts once, tied or not.

    Left out: input embedding (a look-up), position embeddings, biases, norms, and the experts a token does not visit.
    """
    layers: int
    """Transformer blocks."""
    hidden_size: int
    """Width of the residual stream, in elements per token."""
    attention_heads: int
    """Query heads per layer (H of the PaLM formula); key-value heads may be fewer."""
    head_dim: int
    """Elements per query head (Q of the PaLM formula); heads x head_dim need not equal the hidden size."""
    vocabulary_size: int
    """Rows of the embedding, padding rows included; token ids run below it."""
    max_positions: int | None
    """Longest sequence, in tokens, that the config allows; None where the architecture states none."""
    largest_parameter: int
    """Elements of the largest single tensor: the most that ZeRO-3 must gather at once, unless it splits modules."""
    tied_embeddings: bool
    """Whether input embedding and LM head are one tensor."""

    def __post_init__(self) -> None:
        for name in ("name", "model_type"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"ModelFacts.{name} must be a non-empty string, not {getattr(self, name)!r}")
        for name in _COUNTS:
            _require_positive(name, getattr(self, name))
        if self.max_positions is not None:
            _require_positive("max_positions", self.max_positions)
        if not isinstance(self.config, Mapping):
            raise ValueError(f"ModelFacts.config must be a mapping, not {type(self.config).__name__}")
        if not isinstance(self.tied_embeddings, bool):
            raise ValueError(f"ModelFacts.tied_embeddings must be true or false, not {self.tied_embeddings!r}")
        for name in ("matmul_parameters", "largest_parameter"):
            if getattr(self, name) > self.parameters:
                raise ValueError(f"ModelFacts.{name} {getattr(self, name)} exceeds parameters {self.parameters}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, sharing nothing with this object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelFacts:
        """The inverse of ``to_dict``; ValueError names a missing, unknown or invalid field."""
        known = {each.name for each in fields(cls)}
        if missing := sorted(known - data.keys()):
            raise ValueError(f"ModelFacts lacks {', '.join(missing)}")
        if unknown := sorted(data.keys() - known):
            raise ValueError(f"ModelFacts does not know {', '.join(unknown)}")
        return cls(**deepcopy(dict(data)))


_COUNTS = (
    "parameters",
    "matmul_parameters",
    "layers",
    "hidden_size",
    "attention_heads",
    "head_dim",
    "vocabulary_size",
    "largest_parameter",
)


def _require_positive(name: str, value: object) -> None:
    # bool is an int to Python, and never a count to us.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"ModelFacts.{name} must be a whole number above 0, not {value!r}")


def preset_names() -> tuple[str, ...]:
    """Every preset: ``tiny`` first, then by family, and within a family by release and size."""
    return tuple(_presets())


def find_preset(name: str) -> ModelFacts | None:
    """The preset of that exact name, upper and lower case alike; None where there is none."""
    folded = name.casefold()
    for known, entry in _presets().items():
        if known.casefold() == folded:
            return facts_from_config(known, entry["model_type"], entry["config"])
    return None


def similar_presets(name: str) -> list[str]:
    """Up to three preset names that contain ``name`` or look like it, likeliest first: for the remedy of an error."""
    from difflib import get_close_matches

    typed = name.casefold()
    spellings = {known.casefold(): known for known in preset_names()}
    # People leave the organisation out ("Llama-3.1-9B"), which drowns the likeness of the rest.
    spellings |= {spelling.rpartition("/")[2]: known for spelling, known in spellings.items()}
    containing = [spelling for spelling in spellings if typed and typed in spelling]
    matches = containing + get_close_matches(typed, spellings, n=6)
    return list(dict.fromkeys(spellings[match] for match in matches))[:3]


def facts_from_config(name: str, model_type: str, config: Mapping[str, Any]) -> ModelFacts:
    """Count a model from its config, as ``PreTrainedConfig.to_dict()`` or a preset gives it.

    UsageError: the family is not one whose arithmetic is known, or the config lacks a size or holds an impossible one.
    """
    anatomy = architectures.count_architecture(name, model_type, config)
    try:
        return ModelFacts(name=name, model_type=model_type, config=deepcopy(dict(config)), **asdict(anatomy))
    except ValueError as error:
        raise UsageError(f"the config of {name} is not usable: {error}", remedy="correct its config.json") from error


@cache
def _presets() -> dict[str, dict[str, Any]]:
    """Preset name → its ``model_type`` and ``config``, read on first use, so that importing this module stays cheap."""
    import json
    from importlib.resources import files

    folder = files(__package__)
    presets: dict[str, dict[str, Any]] = {}
    for family in _PRESET_FILES:
        presets |= json.loads((folder / f"{family}.json").read_text(encoding="utf-8"))
    return presets
