"""Looks a model up with Transformers: ``python -m ds_bench.worker.resolve NAME [--trust-remote-code]``.

Prints one JSON line: the model's type, config and counted sizes, or ``{"error": …}``. The model is
built on the meta device, so nothing but its configuration is read or downloaded.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def resolve(name: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """Facts of a local path or Hub name. Raises what Transformers raises."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    sizes = [parameter.numel() for parameter in model.parameters()]
    text = config.get_text_config()
    return {
        "model_type": config.model_type,
        "config": json.loads(config.to_json_string(use_diff=False)),
        "parameters": sum(sizes),
        "largest_parameter": max(sizes),
        "max_positions": getattr(text, "max_position_embeddings", None),
        "vocabulary_size": getattr(text, "vocab_size", None),
    }


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr
    try:
        answer = resolve(sys.argv[1], trust_remote_code="--trust-remote-code" in sys.argv)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        answer = {"error": f"{type(error).__name__}: {lines[0][:300] if lines else ''}"}
    print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
