"""What is known of a model's tensors and activations: sizes in order, and saved bytes for any batch and sequence.

For the presets it ships with the package (``activations.json``, made by ``bench/activation_table.py``); any other
architecture is measured once by a child process, since this one never loads torch, and kept in the user's cache.
Nothing here knows of DeepSpeed: see ``memory`` for what a strategy makes of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..contract import write_json
from ..errors import UsageError
from ..launch.processes import child_environment, die_with_parent
from ..models import ModelFacts
from ..spec import Precision

_FORMATS: dict[Precision, str] = {"bf16": "bf16", "fp16": "bf16", "fp32": "fp32"}
"""fp16 is measured as bf16: the same sizes and the same kernels."""
_LEFT_OUT = ("n_layer", "num_hidden_layers", "layer_types", "model_type", "transformers_version", "architectures")
"""Of a config: the depth, which the child chooses, and what is no argument of an architecture."""
_STEP = 16
"""Distance of the sequence lengths that the child measures."""


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
    """Saved bytes of one number format, with an attention kernel that keeps no scores, as the usual ones on CUDA and
    the CPU's without attention dropout."""

    plain: Polynomial
    """Saved for backward at the end of the forward pass, logits' log-softmax included."""
    checkpointed: Polynomial
    """Likewise under activation checkpointing of every layer."""
    loss: Polynomial
    """Peak without checkpointing until backward leaves the loss: ``plain`` and the logits' temporaries."""


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
    """By number format, as measured."""

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of every tensor of the model, shared ones once, in order."""
        return self.before + self.layer * self.layers + self.after

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return sum(self.before) + sum(self.layer) * self.layers + sum(self.after)

    def of(self, precision: Precision) -> Activations:
        """The activations in this number format."""
        return self.activations[_FORMATS[precision]]

    @classmethod
    def from_answer(cls, name: str, layers: int, tied: bool, answer: Mapping[str, Any]) -> ModelProfile:
        """From what ``worker.activations`` answered. Raises KeyError or TypeError on any other shape."""
        formats = {
            precision: Activations(**{kind: Polynomial(**terms) for kind, terms in kinds.items()})
            for precision, kinds in answer["formats"].items()
        }
        sizes = {place: tuple(elements) for place, elements in answer["tensors"].items()}
        return cls(name=name, layers=layers, tied_embeddings=tied, activations=formats, **sizes)


def profile_of(facts: ModelFacts, seq_length: int, *, path: str | None = None) -> ModelProfile:
    """The profile of a model; at once for a preset, else measured by a child process and kept in the user's cache.

    ``path``: a local folder with code or a config of its own, read by Transformers instead of ``facts.config``.
    Raises UsageError where the architecture cannot be measured.
    """
    request = request_for(facts, seq_length, path)
    key = request_key(request)
    answer = _shipped().get(key)
    if answer is None:
        answer = _kept(key) or _measured(facts.name, key, request)
    profile = ModelProfile.from_answer(facts.name, facts.layers, facts.tied_embeddings, answer)
    if profile.parameters != facts.parameters:
        raise UsageError(f"{facts.name} was counted as {facts.parameters} parameters and built as {profile.parameters}")
    return profile


def request_for(facts: ModelFacts, seq_length: int, path: str | None = None) -> dict[str, Any]:
    """What the child is asked. Architectures that differ in depth alone ask the same."""
    window = sliding_window(facts)
    start = window if window is not None and seq_length >= window else _STEP
    config = {key: value for key, value in facts.config.items() if key not in _LEFT_OUT}
    return {
        "model_type": facts.model_type,
        "config": config,
        "path": path,
        "sequences": [start, start + _STEP, start + 2 * _STEP],
        "precisions": sorted(set(_FORMATS.values())),
    }


def sliding_window(facts: ModelFacts) -> int | None:
    """Sequences from this length on carry an explicit attention mask, whose bytes grow with their square."""
    window = facts.config.get("sliding_window")
    used = facts.config.get("use_sliding_window", facts.model_type in ("mistral", "mixtral"))
    return int(window) if used and isinstance(window, int) else None


def request_key(request: Mapping[str, Any]) -> str:
    """Hash of a request."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def _shipped() -> dict[str, Any]:
    from importlib.resources import files

    table: dict[str, Any] = json.loads((files(__package__) / "activations.json").read_text(encoding="utf-8"))
    return dict(table["architectures"])


def _kept_file(key: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = "_".join(f"{name}{importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    return root / "ds_bench" / "activations" / versions / f"{key}.json"


def _kept(key: str) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, RuntimeError, importlib.metadata.PackageNotFoundError):
        return dict(json.loads(_kept_file(key).read_text(encoding="utf-8")))
    return None


def _measured(name: str, key: str, request: Mapping[str, Any]) -> dict[str, Any]:
    (answer,) = ask([request])
    if "error" in answer:
        raise UsageError(
            f"the activations of {name} cannot be measured: {answer['error']}",
            remedy="run it: the ledger of a run measures them",
        )
    with contextlib.suppress(
        OSError, RuntimeError
    ):  # a home that is not or cannot be written to costs the time again, no more
        path = _kept_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, answer)
    return answer


def ask(requests: Sequence[Mapping[str, Any]], timeout_seconds: float = 600) -> list[dict[str, Any]]:
    """The child's answers, in order; ``{"error": …}`` for what it could not do."""
    done = subprocess.run(
        [sys.executable, "-m", "ds_bench.worker.activations"],
        input="".join(json.dumps(request) + "\n" for request in requests).encode(),
        env=child_environment({"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}),
        preexec_fn=die_with_parent,
        capture_output=True,
        timeout=timeout_seconds,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    missing = len(requests) - len(answers)
    said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no word"]
    return answers + [{"error": f"the measuring process ended: {said[0][:200]}"}] * missing
