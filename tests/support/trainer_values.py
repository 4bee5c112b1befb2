"""Run as a child process: what the Trainer makes of DeepSpeed configurations with "auto".

Reads a JSON list of cases from standard input and prints the list of finalized configurations, or of the errors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from types import SimpleNamespace
from typing import Any


def finalize(case: dict[str, Any]) -> dict[str, Any]:
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = TrainingArguments(output_dir=tempfile.gettempdir(), use_cpu=True, **case["arguments"])
    config = HfTrainerDeepSpeedConfig(case["config"])
    # On the CPU the arguments refuse fp16, and "auto" depends on nothing else.
    facts = SimpleNamespace(**{**vars(arguments), **case["facts"], "get_warmup_steps": arguments.get_warmup_steps})
    config.trainer_config_process(facts)
    model = SimpleNamespace(config=SimpleNamespace(**case["model_config"]))
    try:
        config.trainer_config_finalize(facts, model, case["training_steps"])
    except ValueError as error:
        if "mismatch" not in str(error):  # a literal value that differs from the arguments; all are filled in by then
            return {"error": str(error)}
    return dict(config.config)


if __name__ == "__main__":
    out = sys.stdout
    sys.stdout = sys.stderr
    print(json.dumps([finalize(case) for case in json.load(sys.stdin)]), file=out)
