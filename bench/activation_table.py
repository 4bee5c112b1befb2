"""Makes the table of activations that ships with the package, so that predicting a preset needs no child process.

    python bench/activation_table.py            writes the table (a few minutes on two cores)

Presets with dropout are measured with it, as each accelerator keeps it, and without it. Run it again when a preset is
added, or when torch or Transformers change what a layer saves.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_bench.models import presets
from ds_bench.prediction import model_profile
from ds_bench.records.json_files import write_json

TABLE = Path(model_profile.__file__).with_name("activations.json")


def main() -> int:
    requests = {}
    for name in presets.preset_names():
        facts = presets.find_preset(name)
        assert facts is not None
        lengths = model_profile.stored_lengths(facts)
        for length, accelerator, dropout in itertools.product(lengths, ("cuda", "cpu"), (None, 0.0)):
            request = model_profile.request_for(facts, length, accelerator=accelerator, dropout=dropout)
            requests[model_profile.request_key(request)] = request
    answers = model_profile.measure_profiles(list(requests.values()), timeout_seconds=3600)
    failed = [answer["error"] for answer in answers if "error" in answer]
    for text in failed:
        print(text, file=sys.stderr)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    write_json(TABLE, {"versions": versions, "architectures": dict(zip(requests, answers, strict=True))})
    print(f"{len(answers)} architectures in {TABLE.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
