"""Looks a model up: ``python -m ds_bench.worker.lookup_model NAME [--trust-remote-code | --factory]``.

Prints one JSON line: the model's type, config and counted sizes according to Transformers, or ``{"error": …}``. The
model is built on the meta device, so that only its configuration is read or downloaded. A factory is imported but not
called, and the line is an empty object.

``models/preset_counts.json``, written by ``scripts/make_model_counts.py``, has the counts of built-in models, so that
no command needs torch for them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .failure import describe_error

ARCHITECTURES = (
    "gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "phi3",
    "deepseek_v2", "gpt_oss",
)  # fmt: skip
"""Architectures, by their names in Transformers, for which it is known which modules multiply a token."""

_NUMBER_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys for the number of routed experts."""


def look_up(name: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the facts of a model in a local folder or on the Hub. Raises whatever Transformers raises."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    declared = [str(each) for each in config.architectures or ()]  # first, because building the model changes it
    model = build_without_memory(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    return {
        "model_type": config.model_type,
        "architectures": declared,
        "built_architecture": type(model).__name__,
        # use_diff would leave out values that equal the defaults.
        "config": json.loads(config.to_json_string(use_diff=False)),
        "counts": count_model(model),
        "largest_parameter": max(parameter.numel() for parameter in model.parameters()),
        # In the order in which the Trainer looks for it, to replace "auto" (transformers/integrations/deepspeed.py).
        "hidden_size": getattr(config, "hidden_size", None) or getattr(text, "hidden_size", None),
        "max_positions": getattr(text, "max_position_embeddings", None),
        "vocabulary_size": getattr(text, "vocab_size", None),
    }


def build_without_memory(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Build the causal language model of a Transformers config on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def count_model(model: Any) -> dict[str, Any] | None:
    """Return the counted fields of ``models.presets.ModelFacts`` for a causal language model of Transformers.

    None for code that came with the model, for an architecture that is not in :data:`ARCHITECTURES`, and with
    cross-attention, which a causal language model does not use: their modules may differ from the known ones.
    """
    config = model.config
    if not type(model).__module__.startswith("transformers.models."):
        return None
    if config.model_type not in ARCHITECTURES or getattr(config, "add_cross_attention", False):
        return None
    import torch
    from transformers.pytorch_utils import Conv1D

    # Weight elements that multiply one token, found by the type of module.
    multiplied = 0
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.nn.Linear) and ".experts." in name:  # before Transformers 5: one module per expert
            experts = next(getattr(config, key) for key in _NUMBER_OF_EXPERTS if hasattr(config, key))
            multiplied += module.weight.numel() * config.num_experts_per_tok // experts
        elif isinstance(module, (torch.nn.Linear, Conv1D)) or kind.endswith(("TopKRouter", "TopkRouter")):
            multiplied += module.weight.numel()
        elif kind.endswith("Experts"):
            # The experts of a layer are two fused tensors; only some of the experts multiply a token.
            weights = module.gate_up_proj.numel() + module.down_proj.numel()
            multiplied += weights * config.num_experts_per_tok // module.num_experts
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if hasattr(config, "v_head_dim"):
        # Keys and values differ in width: the mean gives the FLOPs of both products.
        head_dim = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
    sizes = [parameter.numel() for parameter in model.parameters()]  # parameters() yields a shared tensor once
    return {
        "parameters": sum(sizes),
        "matmul_parameters": multiplied,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "attention_heads": config.num_attention_heads,
        "head_dim": head_dim,
        "vocabulary_size": config.vocab_size,
        "max_positions": getattr(config, "max_position_embeddings", None),
        "largest_parameter": max(sizes),
        "tied_embeddings": config.tie_word_embeddings,
    }


def import_factory(name: str) -> Callable[[], Any]:
    """Import the function ``package.module:function``. Raises AttributeError, TypeError, or whatever the import raises.

    The current folder is searched last, so that it hides no installed module.
    """
    if (current := str(Path.cwd())) not in sys.path:
        sys.path.append(current)
    module_name, _, function_name = name.partition(":")
    factory: Callable[[], Any] = getattr(importlib.import_module(module_name), function_name)
    if not callable(factory):
        raise TypeError(f"{function_name} is not a function")
    return factory


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr  # libraries print; only the answer goes to stdout
    answer: dict[str, Any] = {}
    try:
        if "--factory" in sys.argv:
            import_factory(sys.argv[1])
        else:
            answer = look_up(sys.argv[1], trust_remote_code="--trust-remote-code" in sys.argv)
    except (Exception, SystemExit) as error:  # SystemExit: a factory's module may be a script
        answer = {"error": describe_error(error)}
    print(json.dumps(answer), file=out, flush=True)
    # Do not wait for threads and processes that the user's code has started.
    os._exit(0)


if __name__ == "__main__":
    main()
