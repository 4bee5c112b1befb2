"""From the name a user gives to a model: preset, local path, Hub, or a factory of their own.

Presets need nothing. Anything else is looked up with Transformers in a child process, since this
one never loads torch; a factory is imported there. A folder or Hub name is trained only as the very
class that its ``architectures`` names: without a head (``GPT2Model``) or with another one
(``BartForConditionalGeneration``) it is another model, of other parameters or without a loss. One
that names none is trained as the causal language model of its type.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.spec import ModelSource
from ..errors import UsageError
from ..system import hub
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
    reply = _ask_child(name, "--factory", environment)
    if "error" in reply:
        raise UsageError(
            f"--model-factory {name} cannot be imported: {reply['error']}",
            remedy="give package.module:function as Python imports it from the current folder",
        )


def _look_up(
    name: str, trust_remote_code: bool, environment: Mapping[str, str], offline_reason: str | None
) -> ResolvedModel:
    is_folder = Path(name).is_dir()
    if not is_folder and offline_reason is None and (offline_reason := _hub_failure(environment)) is not None:
        environment = {**environment, "HF_HUB_OFFLINE": "1"}  # the cache may have the model
    facts = _ask_child(name, "--trust-remote-code" if trust_remote_code else None, environment)
    if "error" in facts:
        similar = presets.similar_presets(name)
        remedy = f"nearest presets: {', '.join(similar)}" if similar else "python -m ds_bench models lists the presets"
        if is_folder:
            problem = f"cannot be read: {facts['error']}"
        elif offline_reason is not None and facts["error"].startswith("OSError"):  # not in the cache either
            problem = f"is no preset and no local folder, and {offline_reason}"
        else:
            problem = f"is no preset, no local folder, and the Hub did not give it: {facts['error']}"
        raise UsageError(f"--model {name} {problem}", remedy=remedy)
    declared, built = facts["architectures"], facts["built_architecture"]
    if declared and built not in declared:
        raise UsageError(
            f"--model {name} is a {', '.join(declared)}, and what would train is a {built}, another model",
            remedy="let a function of your own build it, with --model-factory package.module:function",
        )
    return ResolvedModel(
        name=name,
        source="local" if is_folder else "hub",
        model_type=facts["model_type"],
        config={"path": str(Path(name).resolve())} if is_folder else {},
        facts=_model_facts(name, facts),
        largest_parameter=facts["largest_parameter"],
        max_positions=facts["max_positions"],
    )


def _hub_failure(environment: Mapping[str, str]) -> str | None:
    """Why the Hub cannot be asked; None if it answers.

    Transformers itself would ask six times, with pauses between: half a minute without a network, and longer where
    packets are dropped.
    """
    variables = {**os.environ, **environment}
    name = hub.offline_variable(variables)
    return hub.connection_failure(variables) if name is None else f"{name} is set"


def _ask_child(name: str, flag: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """The reply of ``worker.lookup_model``; its ``error`` says why there is nothing else."""
    reply = run_worker_tool("lookup_model", name, *([flag] if flag else []), environment=environment)
    return reply.last_object("the process that looks it up")


def _model_facts(name: str, facts: Mapping[str, Any]) -> presets.ModelFacts | None:
    with contextlib.suppress(UsageError, ValueError):
        return presets.facts_from_config(name, facts["model_type"], facts["config"])
    return None
