"""The model for the name a user gives: a preset, a local folder, a model on the Hub, or a factory of the user's own.

Anything but a preset is looked up with Transformers in a child process, because this one never loads torch; a factory
is imported there. A folder or Hub name is trained only as the class that its ``architectures`` names: without a head
(``GPT2Model``) or with another one (``BartForConditionalGeneration``) it is another model, with other parameters or
without a loss. One that names no class is trained as the causal language model of its type.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.spec import ModelSource
from ..errors import UsageError
from ..system import hub, invocation
from ..system.environment import MODEL_PACKAGES, install_command, missing_packages, require_packages
from ..system.tools import run_tool
from . import presets


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that was found, and what is known of it before it is built."""

    name: str
    source: ModelSource
    model_type: str | None = None
    config: Mapping[str, Any]
    """Arguments of ``AutoConfig.for_model`` for a preset, ``path`` for a local model, else empty."""
    facts: presets.ModelFacts | None = None
    """Counted sizes; None for a factory and for architectures that ``worker.model_counts`` does not know."""
    largest_parameter: int | None = None
    """Elements of the largest tensor; None for a factory."""
    max_positions: int | None = None
    """Longest sequence in tokens; None without a limit, and for a factory."""
    vocabulary_size: int | None = None
    """Number of token ids; None for a factory, and where its config has none."""
    hidden_size: int | None = None
    """Width from which the Trainer computes "auto" values; None for a factory, and where its config has none."""


def resolve_model(
    name: str,
    *,
    factory: bool,
    trust_remote_code: bool,
    environment: Mapping[str, str],
    offline_reason: str | None = None,
) -> ResolvedModel:
    """Finds the model with this name. Raises UsageError if there is none.

    ``environment``: variables of the child process. ``offline_reason``: why the Hub is not asked, for
    the error; None if it is.
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
            vocabulary_size=preset.vocabulary_size,
            hidden_size=preset.hidden_size,
        )
    return _look_up(name, trust_remote_code, environment, offline_reason)


def _check_factory(name: str, environment: Mapping[str, str]) -> None:
    """Imports the factory in a child process, as every rank will. Raises UsageError if that fails."""
    require_packages("a model factory", MODEL_PACKAGES)
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
    if missing := missing_packages(MODEL_PACKAGES):
        similar = presets.similar_presets(name)
        nearest = f"the nearest presets are {', '.join(similar)}; " if similar else ""
        problem = f"--model {name} is no preset, and reading another model needs {' and '.join(missing)}"
        raise UsageError(problem, remedy=f"{nearest}{install_command()}")
    if not is_folder and offline_reason is None and (offline_reason := _hub_failure(environment)) is not None:
        environment = {**environment, "HF_HUB_OFFLINE": "1"}  # the cache may have the model
    facts = _ask_child(name, "--trust-remote-code" if trust_remote_code else None, environment)
    if "error" in facts:
        similar = presets.similar_presets(name)
        all_presets = f"{invocation.command('models')} lists the presets"
        remedy = f"nearest presets: {', '.join(similar)}" if similar else all_presets
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
        facts=None
        if facts["counts"] is None
        else presets.ModelFacts(name=name, model_type=facts["model_type"], config=facts["config"], **facts["counts"]),
        largest_parameter=facts["largest_parameter"],
        max_positions=facts["max_positions"],
        vocabulary_size=facts["vocabulary_size"],
        hidden_size=facts["hidden_size"],
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
    """The reply of ``worker.lookup_model``; only ``error`` if it failed."""
    reply = run_tool("worker.lookup_model", name, *([flag] if flag else []), environment=environment)
    return reply.last_object("the process that looks it up")
