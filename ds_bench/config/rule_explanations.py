"""What ``check --explain`` says about a rule: what it finds, why it matters, an example, the remedy and the source.

``rule_examples.json`` holds an example of every rule, and a description of each rule that ``rules`` does not describe.
Level, reason, remedy and source come from the finding that ``check`` reports for the example.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from . import deepspeed_keys, lint
from .configuration_files import parse_hjson, position_of
from .deepspeed_config import overlay
from .lint import Finding
from .rules import RULES, WRONG_TRAINING, ModelSize

BASE: Mapping[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
"""The clean configuration that every example modifies."""
_WHY = {
    "error": "DeepSpeed stops when {}.",
    "warning": "DeepSpeed accepts the file, but ignores the setting, behaves differently, or fails later.",
    "hint": "DeepSpeed accepts the file, but may not do what you expect.",
}


@cache
def rule_table() -> Mapping[str, Mapping[str, Any]]:
    """Return a mapping from each rule's name to its entry in ``rule_examples.json``.

    An entry has an example, and may have ``what``, ``why`` and ``given``. The example is a ``config`` laid over
    :data:`BASE`, where null removes a key, or, for a rule about a whole file, the file's ``text``. An entry with
    ``text`` has ``what``, ``level``, ``remedy`` and ``source`` too.
    """
    table: dict[str, Any] = json.loads(Path(__file__).with_name("rule_examples.json").read_text(encoding="utf-8"))
    return table


def file_finding(rule: str, reason: str, path: str = "", line: int | None = None, column: int | None = None) -> Finding:
    """Make the finding of a rule about a whole file."""
    entry = rule_table()[rule]
    return Finding(rule, entry["level"], path, reason, entry["remedy"], entry["source"], line, column=column)


def explain(rule: str) -> tuple[Finding, dict[str, str]]:
    """Return ``check``'s finding for the example of a rule in :func:`rule_table`, and the explanation, by JSON key.

    ``versions``: DeepSpeed versions that the rule applies to; empty: all. ``given``: flags or GPU without which
    ``check`` does not apply the rule; empty if none. ``example``: text of a file that breaks the rule and no other.
    """
    entry = rule_table()[rule]
    known: dict[str, Any] = dict(entry.get("given", {}))
    given = [f"--{name.replace('_', '-')} {known[name]}" for name in ("deepspeed_version", "num_gpus") if name in known]
    version = known.pop("deepspeed_version", None)
    if "model" in known:
        known["model"] = ModelSize(**known["model"])
        given.append(f"--model {known['model'].name}")
    if "compute_capability" in known:
        known["compute_capability"] = tuple(known["compute_capability"])
        given.append(f"a GPU of compute capability {'.'.join(map(str, known['compute_capability']))}")
    if "text" in entry:
        finding, text = file_finding(rule, entry["what"]), entry["text"]
    else:
        config = overlay(BASE, entry["config"])
        with deepspeed_keys.use_version(version):
            finding = next(each for each in lint.check_config(config, **known) if each.rule == rule)
        text = json.dumps(config, indent=2, ensure_ascii=False)
        finding = finding.at(position_of(text, parse_hjson(text), finding.path))
    why = _WHY[finding.level].format(finding.stops_when or "it reads the file")
    if rule in {each.name for each in WRONG_TRAINING}:
        why = "Training runs, but in these versions it differs from what the file says."
    return finding, {
        "rule": rule,
        "level": finding.level,
        "what": entry.get("what") or f"{finding.path}: {finding.reason}",
        "why": entry.get("why", why),
        "versions": next((each.versions for each in RULES if each.name == rule), ""),
        "given": " ".join(given),
        "example": text,
        "remedy": finding.remedy,
        "source": finding.source,
    }
