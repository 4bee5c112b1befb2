"""From the name a user gives to a model: preset, local path, Hub, or a factory of their own.

Presets need nothing. Anything else is looked up with Transformers in a child process, since this
one never loads torch; a factory is imported there. A folder or Hub name is trained only as the very
class that its ``architectures`` names: without a head (``GPT2Model``) or with another one
(``BartForConditionalGeneration``) it is another model, of other parameters or without a loss. One
that names none is trained as the causal language model of its type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.spec import ModelSource
from ..errors import UsageError
from ..system.processes import run_worker_tool
from . import presets


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that exists, as far as can be told before it is built."""

    name: str
    source: ModelSource
    model_type: str | None = None
    config: Mapping[str, Any]
    """A preset's arguments for ``AutoConfig.for_model``; a local model's ``path``; else empty."""
    facts: presets.ModelFacts | None = None
    """Counted sizes; None for a factory and for architectures without arithmetic."""
    largest_parameter: int | None = None
    max_positions: int | None = None


def resolve_model(
    name: str,
    *,
    factory: bool,
    trust_remote_code: bool,
    environment: Mapping[str, str],
    offline_reason: str | None = None,
) -> ResolvedModel:
    """The model of that name. Raises UsageError with one line where there is none.

    ``offline_reason``: why ``environment`` keeps Transformers from asking the Hub, part of that line; None if it may.
    """
    if factory:
        _check_factory(name, environment)
        return ResolvedModel(name=name, source="factory", config={})
    preset = presets.find_preset(name)
    if preset is not None:
        return ResolvedModel(
            name=preset.name,
            source="preset",
            model_type=preset.model_type,
            config=preset.config,
            facts=preset,
            largest_parameter=preset.largest_parameter,
            max_positions=preset.max_positions,
        )
    return _look_up(name, trust_remote_code, environment, offline_reason)


def _check_factory(name: str, environment: Mapping[str, str]) -> None:
    """Imports the factory in a child process, which every rank would do. Raises UsageError where that fails."""
    answer = _ask_child(name, "--factory", environment)
    if "error" in answer:
        raise UsageError(
            f"--model-factory {name} cannot be imported: {answer['error']}",
            remedy="give package.module:function as Python imports it from the current folder",
        )


def _look_up(
    name: str, trust_remote_code: bool, environment: Mapping[str, str], offline_reason: str | None
) -> ResolvedModel:
    local = Path(name).is_dir()
    answer = _ask_child(name, "--trust-remote-code" if trust_remote_code else None, environment)
    if "error" in answer:
        similar = presets.similar_presets(name)
        hint = f"nearest presets: {', '.join(similar)}" if similar else "python -m ds_bench models lists the presets"
        if (
            offline_reason is not None and not local and answer["error"].startswith("OSError")
        ):  # not in the cache either
            raise UsageError(f"--model {name} is no preset and no local folder, and {offline_reason}", remedy=hint)
        where = "cannot be read" if local else "is no preset, no local folder, and the Hub did not give it"
        raise UsageError(f"--model {name} {where}: {answer['error']}", remedy=hint)
    declared, built = answer["architectures"], answer["built_architecture"]
    if declared and built not in declared:
        raise UsageError(
            f"--model {name} is a {', '.join(declared)}, and what would train is a {built}, another model",
            remedy="let a function of your own build it, with --model-factory package.module:function",
        )
    return ResolvedModel(
        name=name,
        source="local" if local else "hub",
        model_type=answer["model_type"],
        config={"path": str(Path(name).resolve())} if local else {},
        facts=_facts(name, answer),
        largest_parameter=answer["largest_parameter"],
        max_positions=answer["max_positions"],
    )


def _ask_child(name: str, flag: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """The reply of ``worker.lookup_model``; its ``error`` says why there is nothing else."""
    reply = run_worker_tool("lookup_model", name, *([flag] if flag else []), environment=environment)
    return reply.last_object("the process that looks it up")


def _facts(name: str, answer: Mapping[str, Any]) -> presets.ModelFacts | None:
    with contextlib.suppress(UsageError, ValueError):
        return presets.facts_from_config(name, answer["model_type"], answer["config"])
    return None
