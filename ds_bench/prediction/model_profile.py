"""What is known of a model's tensors and activations: sizes in order, and saved bytes for any batch and sequence.

For the presets it ships with the package (``activations.json``, made by ``bench/activation_table.py``); any other model
is measured by a child process, since this one never loads torch, and what its config or folder decides is kept in the
user's cache.
Nothing here knows of DeepSpeed: see ``memory`` for what a strategy makes of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..config.spec import Accelerator, Precision
from ..errors import UsageError
from ..models.presets import ModelFacts
from ..records.rank_files import write_json
from ..system.processes import run_worker_tool

_FORMATS: dict[Precision, str] = {"bf16": "bf16", "fp16": "bf16", "fp32": "fp32"}
"""fp16 is measured as bf16: the same sizes and the same kernels."""
_LEFT_OUT = ("n_layer", "num_hidden_layers", "layer_types", "model_type", "transformers_version", "architectures")
"""Of a config: the depth, which the child chooses, and what is no argument of an architecture."""
_STEP = 16
"""Distance of the sequence lengths that the child measures."""
COUNTING_SECONDS = 240
"""After which a child that counts a model is ended; what it has told by then is used."""
_MOST_CODE_BYTES = 2**26
"""Of a folder's JSON and Python files together; what is larger is not kept in the cache."""
_SOME_DROPOUT = 0.1
"""Stands for every probability above 0: masks have one size."""
_OWN_DROPOUTS = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "opt": ("dropout",)}
"""Dropouts that are above 0 where a config does not say otherwise (Transformers' configurations); others' are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """Bytes as a polynomial in micro-batch b and sequence length s, linear in the layers."""

    fixed: Mapping[str, float]
    """Coefficients of the monomials ``1``, ``s``, ``ss``, ``b``, ``bs`` and ``bss``, whatever the depth."""
    per_layer: Mapping[str, float]
    """Likewise, for each layer."""

    def bytes(self, layers: int, batch_size: int, seq_length: int) -> int:
        """The whole model's bytes on one rank, for one micro-batch."""
        return self.fixed_bytes(batch_size, seq_length) + layers * self.layer_bytes(batch_size, seq_length)

    def fixed_bytes(self, batch_size: int, seq_length: int) -> int:
        """What does not grow with the depth: embedding, logits, loss."""
        return _evaluate(self.fixed, batch_size, seq_length)

    def layer_bytes(self, batch_size: int, seq_length: int) -> int:
        """One layer's share."""
        return _evaluate(self.per_layer, batch_size, seq_length)


def _evaluate(terms: Mapping[str, float], batch: int, sequence: int) -> int:
    total: float = sum(value * batch ** term.count("b") * sequence ** term.count("s") for term, value in terms.items())
    return round(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Saved bytes of one number format on one kind of accelerator.

    CUDA keeps one byte per element as mask of a dropout, the CPU an element of the number format. Fused attention
    keeps no scores, but on the CPU with attention dropout.
    """

    plain: Polynomial
    """Saved for backward at the end of the forward pass, logits' log-softmax included."""
    loss: Polynomial
    """Peak without checkpointing until backward leaves the loss: ``plain`` and the logits' temporaries."""
    checkpointed: Polynomial | None = None
    """``plain`` under activation checkpointing of every layer; None for a model that cannot."""
    largest_layer: Polynomial | None = None
    """Of the layer that keeps most, where layers differ; None where they are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model as its memory needs it: every tensor's elements, and its activations."""

    name: str
    """What the user calls it."""
    layers: int
    before: tuple[int, ...]
    """Elements of the tensors ahead of the first layer, in the order in which DeepSpeed flattens them."""
    layer: tuple[int, ...]
    """Elements of the tensors of one layer."""
    after: tuple[int, ...]
    """Elements of the tensors behind the last layer; a tied LM head is in ``before`` alone."""
    tied_embeddings: bool
    """Whether input embedding and LM head are one tensor."""
    activations: Mapping[str, Activations] = field(hash=False)
    """By number format, as measured; empty where they could not be."""
    unknown: str | None = None
    """Why the activations could not be measured; None where they were."""
    frozen_parameters: int = 0
    """Elements that are not trained; in none of the three tuples above."""

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of every tensor that is trained, shared ones once, in order."""
        return self.before + self.layer * self.layers + self.after

    @property
    def parameters(self) -> int:
        """Elements that are trained."""
        return sum(self.before) + sum(self.layer) * self.layers + sum(self.after)

    def activations_in(self, precision: Precision) -> Activations | None:
        """The activations in this number format; None where they could not be measured."""
        return self.activations.get(_FORMATS[precision])

    @classmethod
    def from_answer(cls, name: str, layers: int, tied: bool, answer: Mapping[str, Any]) -> ModelProfile:
        """From what ``worker.measure_activations`` answered, whose own ``layers`` and ``tied`` count where it has them.

        Raises KeyError or TypeError on any other shape.
        """
        formats = {
            precision: Activations(**{kind: Polynomial(**terms) for kind, terms in kinds.items()})
            for precision, kinds in answer["formats"].items()
        }
        return cls(
            name=name,
            layers=answer.get("layers", layers),
            tied_embeddings=answer.get("tied", tied),
            activations=formats,
            unknown=answer.get("error"),
            frozen_parameters=answer.get("frozen", 0),
            **{place: tuple(elements) for place, elements in answer["tensors"].items()},
        )


def profile_of(
    facts: ModelFacts, seq_length: int, *, accelerator: Accelerator = "cuda", dropout: float | None = None
) -> ModelProfile:
    """The profile of a model whose tensors are known by arithmetic; at once for a preset.

    Else measured by a child process, at one layer and at two, and kept in the user's cache. ``dropout``: None for the
    model's own. Raises UsageError where it cannot be measured so.
    """
    request = request_for(facts, seq_length, accelerator=accelerator, dropout=dropout)
    key = request_key(request)
    answer = _built_in().get(key)
    if answer is None:
        answer = _cached(key) or _measure(facts.name, request, key)
    profile = ModelProfile.from_answer(facts.name, facts.layers, facts.tied_embeddings, answer)
    if profile.parameters != facts.parameters:
        raise UsageError(f"{facts.name} was counted as {facts.parameters} parameters and built as {profile.parameters}")
    return profile


def profile_of_any(
    name: str,
    source: Literal["path", "factory"],
    seq_length: int,
    *,
    accelerator: Accelerator = "cuda",
    dropout: float | None = None,
    trust_remote_code: bool = False,
    environment: Mapping[str, str] | None = None,
) -> ModelProfile:
    """The profile of a model that only Transformers (``path``: a folder, or a name on the Hub) or a ``factory`` can
    build.

    Measured whole by a child process. A folder's is kept in the user's cache. Where the forward pass does not run on
    fake tensors, or takes too long, the profile has no activations and says why. Raises UsageError where not even the
    tensors could be counted. ``environment``: variables that the child gets beside this process's.
    """
    request = {
        source: name,
        "trust_remote_code": trust_remote_code,
        "accelerator": accelerator,
        "dropout": dropout,
        "sequences": _sequences(seq_length),
        "precisions": sorted(set(_FORMATS.values())),
    }
    code = _code_of(name) if source == "path" else None
    key = None if code is None else request_key({**request, "code": code})
    answer = (_cached(key) if key else None) or _measure(name, request, key, environment)
    return ModelProfile.from_answer(name, 1, False, answer)


def _sequences(seq_length: int) -> list[int]:
    """Up to the length in question, where a model's attention may change its form with the length."""
    last = max(3 * _STEP, seq_length)
    return [last - 2 * _STEP, last - _STEP, last]


def _code_of(path: str) -> str | None:
    """Hash of what a folder's model is built from; None for what is no folder."""
    files = [file for file in sorted(Path(path).glob("*")) if file.suffix in (".json", ".py") and file.is_file()]
    if not files or sum(file.stat().st_size for file in files) > _MOST_CODE_BYTES:
        return None
    return hashlib.sha256(b"\0".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)).hexdigest()


def request_for(
    facts: ModelFacts, seq_length: int, *, accelerator: Accelerator = "cuda", dropout: float | None = None
) -> dict[str, Any]:
    """What the child is asked. Architectures that differ in depth alone, or in a dropout above 0,
    have the same request."""
    window = sliding_window(facts)
    start = window if window is not None and seq_length >= window else _STEP
    config = {key: value for key, value in facts.config.items() if key not in _LEFT_OUT}
    drops = _drops(facts)
    request = {
        "model_type": facts.model_type,
        "config": config,
        "sequences": [start, start + _STEP, start + 2 * _STEP],
        "precisions": sorted(set(_FORMATS.values())),
        "dropout": None if dropout is None or (dropout == 0 and not drops) else _SOME_DROPOUT if dropout else 0.0,
    }
    if drops if dropout is None else dropout > 0:  # without dropout the accelerators keep the same
        request["accelerator"] = accelerator
    return request


def _drops(facts: ModelFacts) -> bool:
    """Whether the model has dropout of its own accord."""
    config, own = facts.config, _OWN_DROPOUTS.get(facts.model_type, ())
    stated = (value for name, value in config.items() if "dropout" in name or "pdrop" in name)
    return any(config.get(name, _SOME_DROPOUT) for name in own) or any(stated)


def sliding_window(facts: ModelFacts) -> int | None:
    """Sequences from this length on carry an explicit attention mask, whose bytes grow with their square."""
    window = facts.config.get("sliding_window")
    used = facts.config.get("use_sliding_window", facts.model_type in ("mistral", "mixtral"))
    return int(window) if used and isinstance(window, int) else None


def request_key(request: Mapping[str, Any]) -> str:
    """Hash of a request."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def _built_in() -> dict[str, Any]:
    from importlib.resources import files

    table: dict[str, Any] = json.loads((files(__package__) / "activations.json").read_text(encoding="utf-8"))
    return dict(table["architectures"])


def _cache_file(key: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = "_".join(f"{name}{importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    return root / "ds_bench" / "activations" / versions / f"{key}.json"


def _cached(key: str) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, RuntimeError, importlib.metadata.PackageNotFoundError):
        return dict(json.loads(_cache_file(key).read_text(encoding="utf-8")))
    return None


def _measure(
    name: str, request: Mapping[str, Any], key: str | None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The child's answer, kept in the cache where it is complete and has a key."""
    (answer,) = measure_profiles([request], environment=environment)
    if "tensors" not in answer:
        raise UsageError(
            f"the activations of {name} cannot be measured: {answer['error']}",
            remedy="run it: the ledger of a run measures them",
        )
    if key is not None and "error" not in answer:
        with contextlib.suppress(
            OSError, RuntimeError
        ):  # without a home that can be written to it costs the time again
            path = _cache_file(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, answer)
    return answer


def measure_profiles(
    requests: Sequence[Mapping[str, Any]],
    timeout_seconds: float = COUNTING_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The replies of ``worker.measure_activations``, in order; ``error`` says what could not be measured."""
    reply = run_worker_tool(
        "measure_activations",
        environment={**(environment or {}), "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"},
        requests=requests,
        timeout_seconds=timeout_seconds,
    )
    answers = [each for each in reply.objects if not each.get("partial")]
    if len(answers) < len(requests):
        # What was measured of the model on which the program ended or ran out of time.
        last = reply.objects[-1] if reply.objects else {}
        error = f"the measuring process {reply.ending}"
        answers.append({**(last.get("partial") or {}), "error": error})
        answers += [{"error": error}] * (len(requests) - len(answers))
    return answers
