"""Looks a model up: ``python -m ds_bench.worker.lookup_model NAME [--trust-remote-code | --factory]``.

Prints one JSON line: the model's type, config and counted sizes as Transformers gives them, or
``{"error": …}``. The model is built on the meta device, so that only its configuration is read or downloaded.
A factory is imported and not called; for it an empty object is printed.
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


def look_up(name: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """Facts of a model in a local folder or on the Hub. Raises whatever Transformers raises."""
    from transformers import AutoConfig

    from .model_counts import build_without_memory, count_model

    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    declared = [str(each) for each in config.architectures or ()]  # read first: building the model writes it
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
        "hidden_size": hidden_size(config),
        "max_positions": getattr(text, "max_position_embeddings", None),
        "vocabulary_size": getattr(text, "vocab_size", None),
    }


def hidden_size(config: Any) -> int | None:
    """The hidden size that the Trainer computes "auto" values from; None where it finds none.

    Source: Transformers 5.23, ``integrations/deepspeed.py`` (``trainer_config_finalize``).
    """
    holder: Any
    for holder in (config, getattr(config, "text_config", None)):
        if hasattr(holder, "hidden_size"):
            return int(holder.hidden_size)
        if hasattr(holder, "hidden_sizes"):
            return max(map(int, holder.hidden_sizes))
    return None


def import_factory(name: str) -> Callable[[], Any]:
    """The function ``package.module:function``. Raises whatever the import raises, AttributeError, or TypeError.

    The current folder is searched for the module last, so that it hides no installed one.
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
