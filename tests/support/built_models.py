"""Models as Transformers builds them on the meta device, and the facts counted from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_bench.models.presets import ModelFacts


def build(model_type: str, config: Mapping[str, Any]) -> Any:
    """The model: shapes without memory."""
    from transformers import AutoConfig

    from ds_bench.worker.lookup_model import build_without_memory

    return build_without_memory(AutoConfig.for_model(model_type, **config))


def facts_from_config(name: str, model_type: str, config: Mapping[str, Any]) -> ModelFacts:
    """The facts of a model outside the presets."""
    from ds_bench.worker.lookup_model import count_model

    counts = count_model(build(model_type, config))
    assert counts is not None
    return ModelFacts(name=name, model_type=model_type, config=config, **counts)
