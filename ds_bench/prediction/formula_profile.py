"""Computes a model's profile from its ``config.json``: tensors exactly, activations by formula, without torch.

The formulas count what autograd saves for each kind of module, as ``worker.measure_activations`` does on the model
itself. Per token, with e bytes per element:

=============== =======================================================================================================
RMSNorm         its input in fp32 and a reciprocal root; e more per element for a trained weight (Transformers,
                ``LlamaRMSNorm``)
LayerNorm       its input, mean and reciprocal deviation (aten, ``native_layer_norm``)
linear layers   their input, which some of them share, if one of their weights is trained or has an adapter
attention       queries, keys, values, output, and fp32 log-sum-exps of each head (FlashAttention 2, section 3.1);
                in latent attention, the scores twice, as keys and values differ in width
MLP             gated: both halves and the activation of one; then the input of the last layer
experts         for each one that a token uses: permuted input, both halves, activation, product and output
loss            fp32 log-probabilities; at its peak two more tensors of their size
=============== =======================================================================================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..config.spec import LossName
from ..config.trained_parameters import TrainedParameters, is_frozen
from ..errors import UsageError
from ..models.architectures import Architecture, Stack, Tensor
from ..models.presets import ModelFacts
from .model_profile import Activations, ModelProfile, NothingTrainedError, Polynomial
from .model_states import FP32_BYTES

_MLP_INPUTS = {"gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "wi", "wi_0", "wi_1"}
_MLP_INPUTS |= {"linear_fc1", "fc_in", "gate", "router", "shared_expert_gate"}
_MLP_OUTPUTS = {"down_proj", "fc2", "dense_4h_to_h", "wo", "linear_fc2", "fc_out"}
_GATES = {"gate_proj", "gate_up_proj", "wi_0"}
_ATTENTION_OUTPUTS = {"o_proj", "out_proj", "dense", "proj", "o", "c_proj"}
"""Their input is attention's output, which is saved anyway."""
MIN_TILES, MAX_TILE_TOKENS = 8, 2048
"""For the tiled loss: minimum number of parts, and maximum number of tokens in one (``worker.replaced_layers``)."""
_USUAL_TOKENS = 1024
"""Sequence length at which the layer that saves the most is chosen."""
_SORTING_BYTES = 38
"""Indices and weights that Transformers' grouped experts use to sort a token, for each expert that it uses."""


def formula_profile(
    architecture: Architecture, choice: TrainedParameters | None = None, *, image_tokens: int = 0
) -> ModelProfile:
    """Return the profile of a model.

    ``choice``: which parameters are trained; None for all. ``image_tokens``: per sequence. Raises UsageError if the
    choice names something that the model does not have, or leaves nothing to train.
    """
    tensors, trained = _choose(architecture, choice)
    facts, frozen = architecture.facts, not all(trained)

    def by_format(*, all_inputs: bool) -> dict[str, Activations]:
        return {
            name: _activations(architecture, tensors, trained, size, image_tokens, all_inputs=all_inputs)
            for name, size in (("bf16", 2), ("fp32", FP32_BYTES))
        }

    sizes = [each.elements for each, is_trained in zip(tensors, trained, strict=True) if is_trained]
    before, layer, after = sizes, sizes[:0], sizes[:0]
    numbers = [number for number, each in enumerate(tensors) if each.part == "layers"]
    first, end, step = numbers[0], numbers[-1] + 1, len(numbers) // facts.layers
    if not frozen and sizes[first : first + step] * facts.layers == sizes[first:end]:
        before, layer, after = sizes[:first], sizes[first : first + step], sizes[end:]
    return ModelProfile(
        name=facts.name,
        layers=facts.layers,
        before=tuple(before),
        layer=tuple(layer),
        after=tuple(after),
        # A tied head is assumed to be the first tensor, which in a vision-language model belongs to the tower.
        tied_embeddings=facts.tied_embeddings and architecture.image is None,
        activations=by_format(all_inputs=False),
        stage_3_activations=by_format(all_inputs=True) if frozen else {},
        frozen=tuple((number, each.elements) for number, each in enumerate(tensors) if not trained[number]),
        has_adapters=choice is not None and choice.lora is not None,
        rows=tuple(each.shape[0] for each in tensors),
        attention_width=facts.attention_heads * facts.head_dim,
        vocabulary_size=facts.vocabulary_size,
    )


def with_loss(profile: ModelProfile, facts: ModelFacts, name: LossName) -> ModelProfile:
    """Return a profile with this loss instead of the model's own: its terms replace the usual ones.

    ``tiled`` and ``liger`` keep the gradients of the output layer and of its input, and compute logits for part of the
    tokens at a time (``worker.replaced_layers``; liger_kernel/ops/fused_linear_cross_entropy.py, whose parts have at
    most 2 x tokens x hidden / vocabulary tokens, and which adds up the gradient in fp32). ``chunked`` keeps logits in
    the number format of training (deepspeed/runtime/chunked_cross_entropy.py).
    """
    vocabulary, hidden = facts.vocabulary_size, facts.hidden_size

    def changed(activations: Activations, size: int) -> Activations:
        weight, log_probabilities = size * vocabulary * hidden, FP32_BYTES * vocabulary
        if name == "chunked":
            kept: dict[str, float] = {"bs": size * vocabulary + 5 - log_probabilities}
            peak: dict[str, float]
            limit: dict[str, float] | None
            peak, limit = {"bs": size * (vocabulary + hidden), "1": weight}, None
        else:
            kept = {"1": weight, "bs": -log_probabilities - 8}
            in_parts, limit = 3 * FP32_BYTES * vocabulary, None
            if name == "tiled":
                peak = {"bs": in_parts / MIN_TILES + size * hidden}
                limit = {"1": in_parts * MAX_TILE_TOKENS, "bs": size * hidden}
            else:
                peak = {"bs": 3 * size * hidden, "1": (size + FP32_BYTES) * vocabulary * hidden}

        def add(polynomial: Polynomial, terms: Mapping[str, float]) -> Polynomial:
            sums = {term: polynomial.fixed.get(term, 0) + value for term, value in terms.items()}
            return replace(polynomial, fixed={**polynomial.fixed, **sums})

        plain = add(activations.plain, kept)
        checkpointed = activations.checkpointed
        return replace(
            activations,
            plain=plain,
            loss=add(plain, peak),
            loss_limit=None if limit is None else add(plain, limit),
            checkpointed=None if checkpointed is None else add(checkpointed, kept),
        )

    by_format, by_stage_3 = (
        {name: changed(each, 2 if name == "bf16" else FP32_BYTES) for name, each in formats.items()}
        for formats in (profile.activations, profile.stage_3_activations)
    )
    return replace(profile, activations=by_format, stage_3_activations=by_stage_3)


def _choose(architecture: Architecture, choice: TrainedParameters | None) -> tuple[list[Tensor], list[bool]]:
    """All tensors, each adapter after the module that it adapts, and which of them are trained."""
    tensors = list(architecture.tensors)
    if choice is None:
        return tensors, [True] * len(tensors)
    name = architecture.facts.name
    for pattern in choice.freeze:
        if not any(is_frozen(tensor.name, [pattern]) for tensor in tensors):
            example = next((each.name for each in tensors if each.layer is not None), tensors[0].name)
            raise UsageError(f"--freeze {pattern}: {name} has no such parameter", remedy=f"a typical name is {example}")
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    chosen: list[tuple[Tensor, bool]] = []
    for tensor in tensors:
        chosen.append((tensor, choice.trains(tensor.name)))
        module, _, kind = tensor.name.rpartition(".")
        if kind == "bias" or (kind == "weight" and f"{module}.bias" not in shapes):
            shape = shapes[f"{module}.weight"]
            if choice.lora is not None and len(shape) == 2 and choice.adapts(module):
                # GPT-2's Conv1D holds its weight transposed.
                wide, high = shape if architecture.model_type == "gpt2" else (shape[1], shape[0])
                rank, where = choice.lora.rank, (tensor.part, tensor.layer)
                chosen.append((Tensor(f"{module}.lora_A.weight", (rank, wide), *where), True))
                chosen.append((Tensor(f"{module}.lora_B.weight", (high, rank), *where), True))
    if choice.lora is not None and len(chosen) == len(tensors):
        modules = sorted(
            {each.name.split(".")[-2] for each in tensors if len(each.shape) == 2 and each.layer is not None}
        )
        raise UsageError(f"--lora: {name} has no such module", remedy=f"its modules are {', '.join(modules)}")
    if not any(is_trained for _, is_trained in chosen):
        raise NothingTrainedError(f"--freeze leaves no parameters of {name} to train", remedy="freeze less of it")
    return [tensor for tensor, _ in chosen], [is_trained for _, is_trained in chosen]


def _activations(
    architecture: Architecture,
    tensors: Sequence[Tensor],
    trained: Sequence[bool],
    size: int,
    image_tokens: int,
    *,
    all_inputs: bool,
) -> Activations:
    """``all_inputs``: linear layers save their input whether their weight is trained or not, as DeepSpeed's own do at
    stage 3 (zero/linear.py)."""
    facts = architecture.facts
    first = list(trained).index(True)
    of_layers: dict[tuple[str, int], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.layer is not None:
            of_layers.setdefault((tensor.part, tensor.layer), []).append(number)
    around, others, layers, checkpoints, one_layer = (Counter[str]() for _ in range(5))
    for stack in architecture.stacks:
        is_vision = stack.part == "vision"
        count = architecture.patches(image_tokens) if is_vision and image_tokens else 0 if is_vision else 1
        for (part, _), numbers in of_layers.items():
            # Nothing is saved before the first tensor that is trained.
            if part == stack.part and numbers[-1] >= first:
                one = _layer_bytes(stack, [(tensors[n], trained[n]) for n in numbers], size, all_inputs)
                if is_vision:
                    one = Counter({"b": one["bs"] * count})
                inputs = Counter({"b" if is_vision else "bs": size * stack.hidden * count})
                (layers if part == "layers" else others).update(one)
                checkpoints.update(inputs)
                one_layer = max(one_layer, one, key=lambda each: each["bs"] + each["b"] / _USUAL_TOKENS)
    for number, tensor in enumerate(tensors):
        if number < first or tensor.layer is not None:
            continue
        if len(tensor.shape) == 1 and "norm" in tensor.name and tensor.part == "" and tensor.name.endswith("weight"):
            around["bs"] += _norm_bytes(tensor.elements, 1, architecture.stacks[-1], size, trained[number])
        if tensor.part in ("projector", "vision") and "pos" not in tensor.name and image_tokens:
            if len(tensor.shape) == 2 and (trained[number] or all_inputs):
                around["b"] += 2 * size * tensor.shape[1] * image_tokens
            elif len(tensor.shape) > 3 and trained[number]:
                around["b"] += size * math.prod(tensor.shape[1:]) * architecture.patches(image_tokens)
    head = -1 if tensors[-1].name.startswith("lm_head") else 0
    around["bs"] += size * facts.hidden_size * (trained[head] or all_inputs)
    if architecture.config.get("final_logit_softcapping"):
        around["bs"] += size * facts.vocabulary_size
    around += Counter({"1": FP32_BYTES, "bs": FP32_BYTES * facts.vocabulary_size + 20})
    at_peak = Counter({"1": FP32_BYTES, "bs": 2 * FP32_BYTES * facts.vocabulary_size})

    def polynomial(fixed: Mapping[str, float], per_layer: Mapping[str, float]) -> Polynomial:
        by_layer = {term: value / facts.layers for term, value in per_layer.items()}
        return Polynomial(fixed=dict(fixed), per_layer=by_layer)

    return Activations(
        plain=polynomial(around + others, layers),
        loss=polynomial(around + others + at_peak, layers),
        checkpointed=polynomial(around, checkpoints),
        largest_layer=polynomial(one_layer, {}),
    )


def _norm_bytes(width: int, rows: int, stack: Stack, size: int, is_trained: bool) -> int:
    """Bytes saved for one token, whose ``width`` elements are normalized in this many ``rows``."""
    if stack.layer_norm:
        return size * width + 8 * rows
    return FP32_BYTES * (width + rows) + (FP32_BYTES if stack.norm_in_fp32 else size) * width * is_trained


def _layer_bytes(stack: Stack, tensors: Iterable[tuple[Tensor, bool]], size: int, all_inputs: bool) -> Counter[str]:
    """Bytes that a layer saves per token (``bs``) and per pair of tokens (``bss``)."""
    per_token = 0.0
    inputs: set[str] = set()
    mlps: dict[str, int] = {}
    attentions: set[str] = set()
    gated: set[str] = set()
    fused = False
    for tensor, is_trained in tensors:
        module, _, adapter = tensor.name.removesuffix(".weight").partition(".lora_")
        parent, _, name = module.rpartition(".")
        shape = tensor.shape
        if adapter.startswith("A"):
            per_token += size * shape[0]  # the input of lora_B
        if module.endswith("bias") or adapter.startswith("B") or name in ("sinks", "relative_attention_bias"):
            continue
        saves = is_trained or (all_inputs and len(shape) == 2)
        if len(shape) == 1:
            rows = 1
            if shape[0] == stack.head_dim != stack.hidden:  # one per head
                rows = stack.kv_heads if name.startswith("k") else stack.heads
            per_token += _norm_bytes(rows * shape[0], rows, stack, size, is_trained)
        elif len(shape) == 3:
            per_token += _expert_bytes(name, shape, stack, size, is_trained)
        elif name in _MLP_OUTPUTS or (name == "c_proj" and parent.endswith("mlp")):
            mlps[parent] = shape[1] if shape[0] == stack.hidden else shape[0]
            if adapter:
                mlps[parent] = shape[1]
            inputs |= {f"{parent}.inner"} if saves else set()
        elif name in ("q_b_proj", "kv_b_proj"):
            per_token += size * shape[1] * saves
        elif name in _ATTENTION_OUTPUTS:
            attentions.add(parent)
        else:
            if name in _GATES:
                gated.add(parent)
            if name == "shared_expert_gate":
                per_token += size * stack.hidden  # what it is multiplied by
            # Values are a view of the fused projection's output, which then stays as a whole.
            fused = fused or name in ("qkv_proj", "query_key_value", "qkv")
            inputs |= {"mlp" if name in _MLP_INPUTS else parent} if saves else set()
    per_token += size * stack.hidden * sum(not each.endswith(".inner") for each in inputs)
    for parent, inner in mlps.items():
        # With a gate, also the other half and the product's factor; the output of a ReLU is the last layer's input.
        count = stack.inner + 2 * (parent in gated)
        per_token += size * inner * ((count or 1) + (f"{parent}.inner" in inputs) * bool(count))
    queries, scores = stack.heads * stack.head_dim, stack.score_bytes[size == FP32_BYTES]
    keys = queries if scores else stack.kv_heads * stack.head_dim
    saved = 2 * queries + 2 * keys + queries * stack.copies_output + (queries + keys) * fused
    per_token += len(attentions) * (size * saved + FP32_BYTES * stack.heads)
    if stack.dropout:
        per_token += stack.hidden * (len(attentions) + len(mlps))  # masks of one byte
    per_pair = len(attentions) * stack.heads * (2 * size if stack.is_latent else scores)
    return Counter({"bs": per_token, "bss": per_pair})


def _expert_bytes(name: str, shape: tuple[int, ...], stack: Stack, size: int, is_trained: bool) -> float:
    """Bytes saved for one token that uses some of the experts, whose weights are one tensor."""
    first = shape[2] == stack.hidden or shape[1] == stack.hidden
    width = (shape[1] if shape[2] == stack.hidden else shape[2]) if first else 0
    if name == "down_proj":
        return stack.experts_per_token * size * (stack.hidden + width * is_trained)
    each = max(3, stack.inner) * size * width / 2 + size * stack.hidden * is_trained + _SORTING_BYTES
    return stack.experts_per_token * each + FP32_BYTES * shape[0] + FP32_BYTES
