"""Finds the model that a user names (preset, folder, Hub name or factory), or says why it is unknown.

Anything but a preset is looked up with Transformers in a child process, because this one never loads torch; a factory
is imported there. Without these packages, and for models that read images or have an encoder, ``plan`` reads the
``config.json`` instead (``architectures``). A folder or Hub name is trained only as the class that its
``architectures`` names. A model without a head (``GPT2Model``) or with a different one
(``BartForConditionalGeneration``) is not trained: it has no loss, or its parameters differ from those of the causal
language model of its type. If ``architectures`` names no class, that causal language model is trained.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ..config.spec import ModelSource
from ..errors import UsageError
from ..system.environment import MODEL_PACKAGES, install_command, missing_packages, require_packages
from ..system.helper_programs import run_tool
from . import architectures, presets

ANSWER_SECONDS = 3.0
"""Time that the Hub has to answer, including the look-up of its host name."""
_RETRY_SECONDS = 0.5
"""Pause before the request to the Hub is repeated, because a few requests fail."""
_SIZES = ("largest_parameter", "max_positions", "vocabulary_size", "hidden_size")
_OWN_FACTORY = "build it with a function of your own: --model-factory package.module:function"
_TRUE = {"1", "ON", "YES", "TRUE"}  # as huggingface_hub reads a switch (constants.py, ENV_VARS_TRUE_VALUES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that was found, and the facts known before it is built."""

    name: str
    source: ModelSource
    model_type: str | None = None
    config: Mapping[str, Any]
    """Arguments of ``AutoConfig.for_model`` for a preset, ``path`` for a local model, otherwise empty."""
    facts: presets.ModelFacts | None = None
    """Counted sizes; None for a factory and for architectures that neither ``worker.lookup_model`` nor, for ``plan``,
    ``architectures`` knows."""
    largest_parameter: int | None = None
    """Elements of the largest tensor; None for a factory."""
    max_positions: int | None = None
    """Longest sequence in tokens; None without a limit, and for a factory."""
    vocabulary_size: int | None = None
    """Number of token ids; None for a factory, and if its config has none."""
    architecture: architectures.Architecture | None = None
    """Every tensor, if the model was read from its ``config.json`` and was not built."""
    hidden_size: int | None = None
    """Width that the Trainer computes "auto" values from; None for a factory, or if the config does not state it."""


def resolve_model(
    name: str,
    *,
    factory: bool | None,
    trust_remote_code: bool,
    environment: Mapping[str, str],
    offline_reason: str | None = None,
    option: str = "--model",
    by_config: bool = False,
) -> ResolvedModel:
    """Find the model with this name. Raise UsageError if it does not exist.

    ``factory``: whether the name is a factory's; None for a command without ``--model-factory``.
    ``environment``: variables of the child process. ``offline_reason``: why the Hub is not contacted; None if it is,
    empty if ``plan`` was not told to contact it. ``option``: the flag or the key of a recipe that gave the name.
    ``by_config``: models that cannot be built here are read from their ``config.json``; they can be planned, not run.
    """
    if factory:
        # Imported in a child process, as every rank will.
        require_packages("a model factory", MODEL_PACKAGES)
        reply = _ask_child(name, "--factory", environment)
        if "error" in reply:
            raise UsageError(
                f"--model-factory {name} cannot be imported: {reply['error']}",
                remedy="give package.module:function as Python imports it from the current folder",
            )
        return ResolvedModel(name=name, source="factory", config={})
    preset = presets.find_preset(name)
    if preset is not None:
        return ResolvedModel(
            name=preset.name,
            source="preset",
            model_type=preset.model_type,
            config=preset.config,
            facts=preset,
            **{size: getattr(preset, size) for size in _SIZES},
        )
    own_factory = None if factory is None else _OWN_FACTORY
    return _look_up(name, trust_remote_code, environment, offline_reason, option, by_config, own_factory)


def _look_up(
    name: str,
    trust_remote_code: bool,
    environment: Mapping[str, str],
    offline_reason: str | None,
    option: str,
    by_config: bool,
    own_factory: str | None,
) -> ResolvedModel:
    is_folder = Path(name).exists()
    missing = missing_packages(MODEL_PACKAGES)
    if missing and not by_config:
        problem = f"{option} {name} is not a built-in model, and other models need {' and '.join(missing)}"
        raise UsageError(problem, remedy=presets.preset_remedy(name, f"install with {install_command()}"))
    if not is_folder and (name.endswith(".json") or name.startswith((".", "/", "~"))):
        raise UsageError(f"{option} {name}: no such file or folder", remedy="give a model's folder or its config.json")
    if not is_folder and offline_reason is None:
        # Transformers itself would try six times, with pauses in between: half a minute without a network, and longer
        # if packets are dropped.
        variables = {**os.environ, **environment}
        switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        switch = next((name for name in switches if variables.get(name, "").upper() in _TRUE), None)
        endpoint = variables.get("HF_ENDPOINT") or "https://huggingface.co"
        address = f"{endpoint.rstrip('/')}/{quote(os.fsencode(name))}/resolve/main/config.json"
        offline_reason = f"{switch} is set" if switch else connection_failure(address)
        if offline_reason is not None:
            environment = {**environment, "HF_HUB_OFFLINE": "1"}  # the cache may have the model
    config = None
    if by_config:
        config = _read_config(name, option, offline_reason, required=bool(missing))
        if config is not None and (missing or config.get("model_type") in architectures.not_causal_families()):
            return _by_config(name, config, is_folder)
    facts = _ask_child(name, "--trust-remote-code" if trust_remote_code else None, environment)
    remedy = "give a causal language model's folder"
    if "error" in facts:
        if is_folder:
            raise UsageError(
                f"{option} {name} cannot be read: {facts['error'].rstrip('.')}",
                remedy=", or ".join(filter(None, (remedy, own_factory))),
            )
        if offline_reason is not None and facts["error"].startswith("OSError"):  # not in the cache either
            raise _unknown_model(name, option, offline_reason)
        raise _unknown_model(name, option, f"it cannot be read from the Hub: {facts['error'].rstrip('.')}")
    declared, built = facts["architectures"], facts["built_architecture"]
    if declared and built not in declared:
        raise UsageError(
            f"{option} {name} is a {', '.join(declared)}, but a {built} would be trained, which is a different model",
            remedy=own_factory or remedy,
        )
    counted: presets.ModelFacts | None = None
    if facts["counts"] is not None:
        counted = presets.ModelFacts(
            name=name, model_type=facts["model_type"], config=facts["config"], **facts["counts"]
        )
    elif config is not None:
        with contextlib.suppress(UsageError):  # not a family whose tensors are known by formula
            counted = architectures.read_architecture(name, config).facts
    return ResolvedModel(
        name=name,
        source="local" if is_folder else "hub",
        model_type=facts["model_type"],
        config={"path": str(Path(name).resolve())} if is_folder else {},
        facts=counted,
        **{size: facts[size] for size in _SIZES},
    )


def _by_config(name: str, config: Mapping[str, Any], is_local: bool) -> ResolvedModel:
    architecture = architectures.read_architecture(name, config)
    facts = architecture.facts
    return ResolvedModel(
        name=name,
        source="local" if is_local else "hub",
        model_type=facts.model_type,
        config={"path": str(Path(name).resolve())} if is_local else {},
        facts=facts,
        architecture=architecture,
        **{size: getattr(facts, size) for size in _SIZES},
    )


def _read_config(name: str, option: str, offline_reason: str | None, *, required: bool) -> dict[str, Any] | None:
    """The ``config.json`` of a folder, of a model on the Hub or in its cache, or the file with that name.

    None if missing. Raises UsageError for a file that is not a configuration, and if a ``required`` one is missing.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    try:
        if not path.exists():
            import huggingface_hub

            path = Path(
                huggingface_hub.hf_hub_download(name, "config.json", local_files_only=offline_reason is not None)
            )
        config = json.loads(path.read_text(encoding="utf-8"))
    # The Hub's client raises its own errors, those of its transport, OSError and ValueError.
    except Exception as error:
        if not required:
            return None
        why = (
            offline_reason
            if offline_reason is not None and not path.exists()
            else str(error).strip().partition("\n")[0]
        )
        raise _unknown_model(name, option, why) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UsageError(f"{option} {name} has no model_type in its config.json", remedy="give a complete config.json")
    return config


def _unknown_model(name: str, option: str, why: str) -> UsageError:
    """``why``: why it was not found on the Hub; empty if the Hub was not contacted."""
    place = f" ({option})" if option != "--model" else ""
    problem = f"Unknown model {name!r}{place}: neither a built-in model nor a folder{why and ', and '}{why}"
    other = "give a model's folder or its config.json"
    return UsageError(problem, remedy=presets.preset_remedy(name, other if why else f"{other}, or add --online"))


def send_request(address: str) -> None:
    """Request the headers of an address; even a refusal is an answer. Raises OSError or ValueError if there is none, or
    if the server is temporarily overloaded or broken."""
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (429, 500, 502, 503, 504):
            raise OSError(error.code, f"HTTP {error.code}, which may be temporary: try again") from None


def connection_failure(
    address: str, request: Callable[[str], None] = send_request, seconds: float = ANSWER_SECONDS
) -> str | None:
    """Return why the Hub cannot be reached, after at most two tries and ``seconds`` seconds; None if it answers."""
    try:
        parts = urlsplit(address)
        host = parts.hostname if parts.scheme in ("http", "https") else None  # a file must not be opened
    except ValueError:  # unmatched brackets
        host = None
    if host is None:
        return "HF_ENDPOINT is not a web address"
    failures: list[str] = []

    def run() -> None:
        try:
            with contextlib.suppress(Exception):
                request(address)
                return
            time.sleep(_RETRY_SECONDS)
            request(address)
        except Exception as error:
            # Only the reason of urllib's errors: their text may contain the address, and with it a password.
            reason = getattr(error, "reason", error)
            failures.append(getattr(reason, "strerror", None) or type(reason).__name__)

    thread = threading.Thread(target=run, daemon=True)  # the look-up of a host's name has no timeout
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        failures.append(f"no answer within {seconds:g} s")
    return f"{host} cannot be reached ({failures[0]})" if failures else None


def _ask_child(name: str, flag: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """The reply of ``worker.lookup_model``; only ``error`` if it failed."""
    reply = run_tool("worker.lookup_model", name, *([flag] if flag else []), environment=environment)
    return reply.last_object("the process that looks it up")
