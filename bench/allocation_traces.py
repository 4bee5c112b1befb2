"""Traces the allocations of every preset, so that predicting one needs no torch and no child process.

    python bench/allocation_traces.py           writes the table (a few minutes on two cores)

In 16-bit precision, with and without activation checkpointing: everything trained, with the model's own dropout and
without dropout, and adapters on all linear modules. Run it again when a preset is added, or when torch, Transformers,
peft or DeepSpeed change what a layer allocates.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import lzma
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_bench.models import presets
from ds_bench.prediction import allocation_trace, model_profile
from ds_bench.prediction.allocation_trace import TRACED_RANK, USUAL_TRACE, TraceVariant

TABLE = Path(allocation_trace.__file__).with_name(allocation_trace.TABLE_NAME)
ADAPTERS = TraceVariant(lora=str(TRACED_RANK))
CHOICES = ((USUAL_TRACE, None), (USUAL_TRACE, 0.0), (ADAPTERS, None), (ADAPTERS._replace(efficient_linear=True), None))
"""What is trained, and with which dropout."""


def main() -> int:
    requests = {}
    for name in presets.preset_names():
        facts = presets.find_preset(name)
        assert facts is not None
        lengths = model_profile.stored_lengths(facts)
        for length, (variant, dropout), checkpointing in itertools.product(lengths, CHOICES, (False, True)):
            request = allocation_trace.trace_request(
                facts, length, checkpointing=checkpointing, dropout=dropout, variant=variant
            )
            if not request.get("whole"):  # its layers are of different kinds
                requests[model_profile.request_key(request)] = {**request, "precisions": ["bf16"]}
    answers = allocation_trace.make_traces(list(requests.values()), timeout_seconds=3600)
    traces = {}
    for key, request, answer in zip(requests, requests.values(), answers, strict=True):
        if "error" in answer or not allocation_trace.can_extend(answer["bf16"]):
            problem = answer.get("error", "its layers allocate differently")
            print(f"{request['model_type']}, checkpointing {request['checkpointing']}: {problem}", file=sys.stderr)
        else:
            traces[key] = answer
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "deepspeed")}
    text = json.dumps({"versions": versions, "traces": traces}, separators=(",", ":"))
    TABLE.write_bytes(lzma.compress(text.encode()))
    print(f"{len(traces)} of {len(requests)} traces in {TABLE.name}, {TABLE.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
