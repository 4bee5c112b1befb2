"""The profile of a model: the sizes of its tensors in order, and the bytes of its activations for any micro-batch.

Profiles of presets are part of the package (``activations.json``). Any other model is measured by a child process,
because this process never loads torch; results that depend only on a config or a folder are kept in the user's cache.
DeepSpeed's own memory is not part of a profile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..config.spec import Accelerator, Engine, LossName, Precision, Workload, block_of
from ..errors import UsageError
from ..models.presets import ModelFacts
from ..records.json_files import write_json
from ..system.environment import MODEL_PACKAGES, install_command, installed_version, missing_packages
from ..system.helper_programs import run_tool

_FORMATS: dict[Precision, str] = {"bf16": "bf16", "fp16": "bf16", "fp32": "fp32"}
"""Number format → the one that is measured instead: fp16 has the same sizes and kernels as bf16."""
_DEPTH = ("n_layer", "num_hidden_layers", "layer_types")
"""Config keys for the depth, which the child process chooses if all layers are alike."""
_LEFT_OUT = ("model_type", "transformers_version", "architectures")
"""Config keys that are never sent, because they do not change the layers."""
_STEP = 16
"""Distance between the sequence lengths that the child measures."""
COUNTING_SECONDS = 240
"""Time after which the child process is terminated; its answers so far are used."""
_MAX_CODE_BYTES = 2**26
"""Largest total size of a folder's JSON and Python files; results of a larger folder are not cached."""
_SOME_DROPOUT = 0.1
"""Measured for every probability above 0, because the size of a mask does not depend on it."""
_WINDOWED = ("mistral", "mixtral", "gemma2", "gemma3_text", "phi3", "gpt_oss")
"""Architectures that have a sliding window if their config gives its length."""
_OF_SEVERAL_KINDS = ("gemma2", "gemma3_text", "deepseek_v2", "gpt_oss")
"""Architectures with several kinds of layer: alternating windowed and full attention, or a dense MLP before experts."""
_OWN_DROPOUTS = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "opt": ("dropout",)}
"""Architecture → dropouts whose default is above 0 in Transformers; all other defaults are 0."""


class NothingTrainedError(UsageError):
    """No parameter of a model is trained."""


class Variant(NamedTuple):
    """Settings other than size and number format that decide a model's activations."""

    attention: str | None = None
    """``Workload.attention``."""
    loss: LossName = "model"
    """``Workload.loss``."""
    autocast: bool = False
    """fp32 weights under ``torch.autocast`` to 16-bit precision."""
    tiled_mlp: bool = False
    """``Workload.tiled_mlp``."""


USUAL = Variant()


def measured_attention(name: str | None) -> str | None:
    """Return the attention to measure: flash attention runs only on a GPU, and keeps what torch's fused one does."""
    return "sdpa" if name is not None and name.startswith("flash") else name


def variant_of(workload: Workload, ds_config: Mapping[str, Any], engine: Engine = "deepspeed") -> Variant:
    """Return the variant that a workload trains with a DeepSpeed configuration.

    DDP in 16-bit precision runs under autocast, and so does DeepSpeed with ``torch_autocast``.
    """
    blocks = ("bf16", "fp16") if engine == "ddp" else ("torch_autocast",)
    return Variant(
        attention=measured_attention(workload.attention),
        loss=workload.loss,
        autocast=engine != "fsdp2" and any(block_of(ds_config, name).get("enabled") for name in blocks),
        tiled_mlp=workload.tiled_mlp,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """Bytes as a polynomial in micro-batch b and sequence length s, linear in the number of layers."""

    fixed: Mapping[str, float]
    """Coefficients of the monomials ``1``, ``s``, ``ss``, ``b``, ``bs`` and ``bss`` that do not depend on the depth."""
    per_layer: Mapping[str, float]
    """Coefficients of the same monomials for each layer."""

    def bytes(self, layers: int, batch_size: int, seq_length: int) -> int:
        """Return the bytes of the whole model on one rank, for one micro-batch."""
        return self.fixed_bytes(batch_size, seq_length) + layers * self.layer_bytes(batch_size, seq_length)

    def fixed_bytes(self, batch_size: int, seq_length: int) -> int:
        """Return the bytes that do not grow with the depth: embedding, logits, loss."""
        return round(evaluate_polynomial(self.fixed, batch_size, seq_length))

    def layer_bytes(self, batch_size: int, seq_length: int) -> int:
        """Return the bytes of one layer."""
        return round(evaluate_polynomial(self.per_layer, batch_size, seq_length))


def evaluate_polynomial(terms: Mapping[str, float], batch_size: int, seq_length: int) -> float:
    """Return the sum of monomials named like those of ``Polynomial``."""
    total: float = sum(v * batch_size ** term.count("b") * seq_length ** term.count("s") for term, v in terms.items())
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes saved for backward in one number format on one kind of accelerator.

    A dropout mask takes one byte per element on CUDA, and a full element of the number format on the CPU. Fused
    attention saves no scores, except on the CPU with attention dropout.
    """

    plain: Polynomial
    """Saved for backward at the end of the forward pass, logits' log-softmax included."""
    loss: Polynomial
    """Peak without checkpointing until backward leaves the loss: ``plain`` and the logits' temporaries."""
    loss_limit: Polynomial | None = None
    """Upper bound on that peak for a loss that is computed in parts of limited size."""
    checkpointed: Polynomial | None = None
    """``plain`` with activation checkpointing of every layer; None for a model without it."""
    largest_layer: Polynomial | None = None
    """Bytes of the layer that saves the most; None if all layers are alike."""

    def loss_bytes(self, layers: int, batch_size: int, seq_length: int) -> int:
        """Return the peak until backward leaves the loss."""
        peak = self.loss.bytes(layers, batch_size, seq_length)
        return peak if self.loss_limit is None else min(peak, self.loss_limit.bytes(layers, batch_size, seq_length))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What decides a model's memory: the elements of every tensor, and the activations."""

    name: str
    """The name that the user gave."""
    layers: int
    before: tuple[int, ...]
    """Elements of the tensors before the first layer, in the order that DeepSpeed flattens them."""
    layer: tuple[int, ...]
    """Elements of the tensors of one layer."""
    after: tuple[int, ...]
    """Elements of the tensors after the last layer; a tied LM head is only in ``before``."""
    tied_embeddings: bool
    """Whether input embedding and LM head are one tensor."""
    # Mappings have no hash. Equality still compares them, so a cache keyed by profiles
    # (``predicted_memory._phases``) is correct.
    activations: Mapping[str, Activations] = field(hash=False)
    """By measured number format; empty if they could not be measured."""
    unknown: str | None = None
    """Why the activations could not be measured; None if they were."""
    frozen: tuple[tuple[int, int], ...] = ()
    """Position among all tensors and number of elements of each untrained tensor, by position; none of them is in the
    three tuples above."""
    has_adapters: bool = False
    """Whether only adapters are trained, which are added to the model once it exists."""
    rows: tuple[int, ...] = ()
    """First dimension of every tensor of the model, which FSDP2 splits; empty if unknown."""
    attention_width: int = 0
    """Query heads × elements per head; 0 if unknown."""
    vocabulary_size: int = 0
    """Logits per token; 0 if unknown."""
    facts: ModelFacts | None = field(default=None, compare=False)
    """The architecture, whose allocations can be traced; None if only its sizes are known."""
    stage_3_activations: Mapping[str, Activations] = field(default_factory=dict, hash=False)
    """Activations with DeepSpeed's memory-efficient linear layers, if these keep more: only with frozen parameters."""
    variants: Mapping[Variant, ModelProfile] = field(default_factory=dict, hash=False)
    """The same model with different activations, such as those of a different attention implementation or loss."""

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of every tensor that is trained, in order; shared tensors once."""
        return self.before + self.layer * self.layers + self.after

    @property
    def all_tensors(self) -> tuple[int, ...]:
        """Elements of every tensor, trained or not, in the model's order; shared tensors once."""
        sizes = list(self.tensors)
        # In ascending order, as each position counts the tensors inserted before it.
        for position, elements in self.frozen:
            sizes.insert(position, elements)
        return tuple(sizes)

    @property
    def trained_numbers(self) -> tuple[int, ...]:
        """Positions of the trained tensors among all."""
        frozen = {position for position, _ in self.frozen}
        return tuple(each for each in range(len(self.tensors) + len(frozen)) if each not in frozen)

    @property
    def parameters(self) -> int:
        """Number of elements that are trained."""
        return sum(self.before) + sum(self.layer) * self.layers + sum(self.after)

    @property
    def frozen_parameters(self) -> int:
        """Number of elements that are not trained."""
        return sum(elements for _, elements in self.frozen)

    @property
    def all_parameters(self) -> int:
        """Number of elements, trained or not."""
        return self.parameters + self.frozen_parameters

    @property
    def trains_tied_embeddings(self) -> bool:
        """Whether input embedding and LM head are one tensor, and it is trained."""
        return self.tied_embeddings and not any(position == 0 for position, _ in self.frozen)

    def for_variant(self, variant: Variant) -> ModelProfile:
        """Return the profile with the activations of a variant, which are unknown if they were not measured."""
        if variant == USUAL:
            return self
        # Only the first two fields have values to name; the others are flags.
        parts = zip(("attention", "loss"), variant, USUAL, strict=False)
        texts = [f"{name} {value}" for name, value, usual in parts if value != usual]
        texts += ["torch's autocast"] * variant.autocast + ["a tiled MLP"] * variant.tiled_mlp
        unknown = f"not measured with {' and '.join(texts)}"
        return self.variants.get(variant) or replace(self, activations={}, stage_3_activations={}, unknown=unknown)

    def activations_in(self, precision: Precision, *, efficient_linear: bool = False) -> Activations | None:
        """Return the activations in a number format; None if they could not be measured.

        ``efficient_linear``: with DeepSpeed's linear layers of stage 3.
        """
        measured = self.stage_3_activations if efficient_linear and self.stage_3_activations else self.activations
        return measured.get(_FORMATS[precision])

    @classmethod
    def from_answer(cls, name: str, layers: int, tied: bool, answer: Mapping[str, Any]) -> ModelProfile:
        """Make a profile from an answer of ``worker.measure_activations``, which may override ``layers`` and ``tied``.

        Raises KeyError or TypeError for an answer in a different form.
        """
        formats, stage_3_formats = (
            {
                precision: Activations(**{kind: Polynomial(**terms) for kind, terms in kinds.items()})
                for precision, kinds in each.items()
            }
            for each in (answer["formats"], answer.get("stage_3_formats", {}))
        )
        tensors = answer["tensors"]
        return cls(
            name=name,
            layers=answer.get("layers", layers),
            tied_embeddings=answer.get("tied", tied),
            activations=formats,
            stage_3_activations=stage_3_formats,
            unknown=answer.get("error"),
            frozen=tuple((position, elements) for position, elements in answer.get("frozen") or ()),
            rows=tuple(answer.get("rows") or ()),
            before=tuple(tensors["before"]),
            layer=tuple(tensors["layer"]),
            after=tuple(tensors["after"]),
        )


def find_profile(
    facts: ModelFacts,
    seq_length: int,
    *,
    accelerator: Accelerator = "cuda",
    dropout: float | None = None,
    variant: Variant = USUAL,
) -> ModelProfile:
    """Return the profile of a model whose parameter count is known; a preset's is part of the package.

    Any other is measured by a child process, with two layers unless they are of several kinds, and cached.
    ``dropout``: None for the model's own. Raises UsageError if the model cannot be measured, or if its parameter count
    differs.
    """
    request = request_for(facts, seq_length, accelerator=accelerator, dropout=dropout, variant=variant)
    key = request_key(request)
    answer = _built_in().get(key) or cached_answer(key) or _measure(facts.name, request, key)
    profile = ModelProfile.from_answer(facts.name, facts.layers, facts.tied_embeddings, answer)
    # One number is computed, the other is the built model's: if they differ, the profile is of a different model.
    if profile.parameters != facts.parameters:
        problem = f"{facts.name} should have {facts.parameters} parameters, but was built with {profile.parameters}"
        raise UsageError(problem)
    width = facts.attention_heads * facts.head_dim
    return replace(profile, attention_width=width, vocabulary_size=facts.vocabulary_size, facts=facts)


def measure_profile(
    name: str,
    source: Literal["path", "factory"],
    seq_length: int,
    *,
    accelerator: Accelerator = "cuda",
    dropout: float | None = None,
    variant: Variant = USUAL,
    trust_remote_code: bool = False,
    environment: Mapping[str, str] | None = None,
) -> ModelProfile:
    """Measure the profile of a whole model, which Transformers (``path``: folder or Hub name) or a ``factory`` builds.

    A child process measures it; the result of a folder is cached. If the forward pass does not run on fake tensors, or
    takes too long, the profile has no activations and says why. Raises UsageError if not even the tensors could be
    counted, NothingTrainedError for a model whose parameters are all frozen. ``environment``: further variables for the
    child.
    """
    # Up to the length in question, because a model's attention may change with the length.
    longest = max(3 * _STEP, seq_length)
    request = {
        source: name,
        "trust_remote_code": trust_remote_code,
        "accelerator": accelerator,
        "dropout": dropout,
        "sequences": [longest - 2 * _STEP, longest - _STEP, longest],
        "precisions": sorted(set(_FORMATS.values())),
        **_variant_request(variant, accelerator),
    }
    # Only answers about a folder are kept: a factory and a Hub model may change under the same name.
    key = None
    files = sorted(Path(name).glob("*")) if source == "path" else []
    files = [file for file in files if file.suffix in (".json", ".py") and file.is_file()]
    if files and sum(file.stat().st_size for file in files) <= _MAX_CODE_BYTES:
        key = request_key({**request, "code": _hash_files(files)})
    answer = (cached_answer(key) if key else None) or _measure(name, request, key, environment)
    profile = ModelProfile.from_answer(name, 1, False, answer)
    if profile.frozen and not profile.parameters:
        raise NothingTrainedError(
            f"{name}: every parameter is frozen (requires_grad is False), so nothing would train",
            remedy="leave some parameters of the model trainable",
        )
    return profile


def _hash_files(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)).hexdigest()


def _variant_request(variant: Variant, accelerator: Accelerator) -> dict[str, Any]:
    """Return the part of a request that describes a variant; empty for the usual one."""
    usual = USUAL._asdict()
    named = {name: value for name, value in variant._asdict().items() if value != usual[name]}
    # On CUDA, DeepSpeed's chunked loss uses a different kernel, and autocast follows different rules.
    return named if variant.loss == "model" and not variant.autocast else {**named, "accelerator": accelerator}


def request_for(
    facts: ModelFacts,
    seq_length: int,
    *,
    accelerator: Accelerator = "cuda",
    dropout: float | None = None,
    variant: Variant = USUAL,
) -> dict[str, Any]:
    """Make the request to the child; it is the same for models that differ only in depth or in a dropout above 0."""
    window = sliding_window(facts)
    # From the window's length on, attention has a mask: all lengths must be on the run's side of that length.
    start = window if window is not None and seq_length >= window else _STEP
    whole = {"whole": True} if facts.model_type in _OF_SEVERAL_KINDS else {}
    left_out = _LEFT_OUT if whole else (*_LEFT_OUT, *_DEPTH)
    config = {key: value for key, value in facts.config.items() if key not in left_out}
    defaults = _OWN_DROPOUTS.get(facts.model_type, ())
    stated = (value for name, value in facts.config.items() if "dropout" in name or "pdrop" in name)
    drops = any(facts.config.get(name, _SOME_DROPOUT) for name in defaults) or any(stated)
    request = {
        "model_type": facts.model_type,
        "config": config,
        # Three lengths determine a polynomial of second degree.
        "sequences": [start, start + _STEP, start + 2 * _STEP],
        "precisions": sorted(set(_FORMATS.values())),
        "dropout": None if dropout is None or (dropout == 0 and not drops) else _SOME_DROPOUT if dropout else 0.0,
        **whole,
    }
    if drops if dropout is None else dropout > 0:  # without dropout all accelerators save the same
        request["accelerator"] = accelerator
    return request | _variant_request(variant, accelerator)


def stored_lengths(facts: ModelFacts) -> tuple[int, ...]:
    """Return a length for each answer that the package's tables need: one below the sliding window, and the window
    itself if the model allows sequences that long."""
    window = sliding_window(facts)
    return (1, window) if window and window < (facts.max_positions or 0) else (1,)


def sliding_window(facts: ModelFacts) -> int | None:
    """Return the shortest length with an explicit attention mask, which grows with its square; None without one."""
    window = facts.config.get("sliding_window")
    used = facts.config.get("use_sliding_window", facts.model_type in _WINDOWED)
    return int(window) if used and isinstance(window, int) else None


def request_key(request: Mapping[str, Any]) -> str:
    """Return the hash that names the stored answer to a request."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def _built_in() -> dict[str, Any]:
    from importlib.resources import files

    table: dict[str, Any] = json.loads((files(__package__) / "activations.json").read_text(encoding="utf-8"))
    return dict(table["architectures"])


def _cache_file(key: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "ds_bench" / "activations" / _code_version() / f"{key}.json"


@cache
def _code_version() -> str:
    """Name everything that an answer depends on: the versions of the libraries, which may build different layers or
    save different tensors for backward, and a hash of our own code and traces."""
    versions = [f"{name}{installed_version(name) or ''}" for name in ("torch", "transformers", "deepspeed", "peft")]
    folders = (Path(__file__).parents[1] / name for name in ("config", "prediction", "worker"))
    files = [file for folder in folders for file in sorted(folder.glob("*")) if file.suffix in (".py", ".xz")]
    return "_".join([*versions, _hash_files(files)[:16]])


def cached_answer(key: str) -> dict[str, Any] | None:
    """Return the answer of an earlier child from the user's cache."""
    # RuntimeError: from Path.home() for a user without a home folder.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        return dict(json.loads(_cache_file(key).read_text(encoding="utf-8")))
    return None


def _measure(
    name: str, request: Mapping[str, Any], key: str | None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the child's answer, and cache it under ``key`` if it is complete."""
    if missing := missing_packages(MODEL_PACKAGES):
        problem = f"counting the activations of {name} needs {' and '.join(missing)}: {install_command()}"
        raise UsageError(problem, remedy="use an unmodified preset: its activations are part of ds_bench")
    (answer,) = measure_profiles([request], environment=environment)
    if "tensors" not in answer:
        raise UsageError(
            f"the activations of {name} cannot be measured: {answer['error']}",
            remedy="run it: the ledger of a run measures them",
        )
    if key is not None and "error" not in answer:
        cache_answer(key, answer)
    return answer


def cache_answer(key: str, answer: Mapping[str, Any]) -> None:
    """Keep an answer in the user's cache. Without a writable home folder it will be measured again."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _cache_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, answer)


def measure_profiles(
    requests: Sequence[Mapping[str, Any]],
    timeout_seconds: float = COUNTING_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Return the answers of ``worker.measure_activations`` in order; an ``error`` says what could not be measured."""
    reply = run_tool(
        "worker.measure_activations",
        environment={**(environment or {}), "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"},
        requests=requests,
        timeout_seconds=timeout_seconds,
    )
    answers = [each for each in reply.objects if not each.get("partial")]
    if len(answers) < len(requests):
        # A partial answer, about the model that the process was measuring when it ended or timed out.
        last = reply.objects[-1] if reply.objects else {}
        error = f"the measuring process {reply.ending}"
        answers.append({**(last.get("partial") or {}), "error": error})
        answers += [{"error": error}] * (len(requests) - len(answers))
    return answers
