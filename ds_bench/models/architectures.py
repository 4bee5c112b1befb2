"""Counts of a model from its config: the tensors of each architecture family, and which of them multiply a token.

A family is a list of tensors as Transformers 5 builds them; the counts are sums over that list, and a maximum. Torch is
not needed: the tests build every family on torch's meta device and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureCounts:
    """Sizes of one architecture. All counts are elements (not bytes) of the whole model, before any partitioning."""

    parameters: int
    """Trainable elements; a tensor shared by input embedding and LM head counts once, inactive experts count."""
    matmul_parameters: int
    """Weight elements that one token is multiplied with. The LM head counts once, tied or not.

    Not counted: input embedding (a look-up), position embeddings, biases, norms, and the experts that a token skips.
    """
    layers: int
    """Transformer blocks."""
    hidden_size: int
    """Width of the residual stream, in elements per token."""
    attention_heads: int
    """Query heads per layer (H of the PaLM formula); key-value heads may be fewer."""
    head_dim: int
    """Elements per query head (Q of the PaLM formula); heads x head_dim need not equal the hidden size. Where keys and
    values differ in width, their mean."""
    vocabulary_size: int
    """Rows of the embedding, padding rows included; token ids are below it."""
    max_positions: int | None
    """Longest sequence, in tokens, that the config allows; None if the architecture has no limit."""
    largest_parameter: int
    """Elements of the largest single tensor: the most that ZeRO-3 must gather at once, unless it splits modules."""
    tied_embeddings: bool
    """Whether input embedding and LM head are one tensor."""


class _Tensor(NamedTuple):
    """Equal tensors of a model: elements of one, number of tensors, elements of one that multiply each token."""

    elements: int
    copies: int
    multiplied: int


def count_architecture(name: str, model_type: str, config: Mapping[str, Any]) -> ArchitectureCounts:
    """Counts the model ``name`` from its config.

    Raises UsageError for an unknown family, and for a config that lacks a size or has an impossible one.
    """
    family = _FAMILIES.get(model_type)
    if family is None:
        raise UsageError(
            f"{name} is of type {model_type!r}, whose parameters cannot be counted by arithmetic",
            remedy=f"known types: {', '.join(_FAMILIES)}",
        )
    return family(_ConfigReader(name, config))


class _ConfigReader:
    """Reads sizes from a config. Each method raises UsageError, naming the key, if the value is missing or no size."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self._name, self._values = name, values

    def error(self, problem: str) -> UsageError:
        return UsageError(f"the config of {self._name} {problem}", remedy="correct its config.json")

    def has(self, key: str) -> bool:
        """Whether the key has a value; null means that it is derived from others."""
        return self._values.get(key) is not None

    def is_empty(self, key: str) -> bool:
        """Whether the key has no value, or an empty list."""
        return self._values.get(key) in (None, [])

    def number(self, key: str) -> int:
        if key not in self._values:
            raise self.error(f"lacks {key}")
        value = self._values[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"needs a whole number above 0 as {key}, not {value!r}")
        return value

    def number_or(self, key: str, default: int) -> int:
        return self.number(key) if self.has(key) else default

    def number_or_zero(self, key: str) -> int:
        return 0 if self._values.get(key) in (None, 0) else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"needs true or false as {key}, not {value!r}")
        return value

    def head_dim(self, hidden_key: str, heads_key: str) -> int:
        """Elements per head, if the heads divide the hidden size."""
        hidden, heads = self.number(hidden_key), self.number(heads_key)
        if hidden % heads:
            raise self.error(f"has {hidden_key} {hidden}, which {heads_key} {heads} does not divide")
        return hidden // heads


def _linear(copies: int, inputs: int, outputs: int, *, bias: bool) -> list[_Tensor]:
    weight = _Tensor(inputs * outputs, copies, inputs * outputs)
    return [weight, _Tensor(outputs, copies, 0)] if bias else [weight]


def _embedding_and_head(vocabulary: int, width: int, *, tied: bool) -> list[_Tensor]:
    """The embedding multiplies nothing, the LM head does. If tied, one tensor is both."""
    head = _Tensor(vocabulary * width, 1, vocabulary * width)
    return [head] if tied else [_Tensor(vocabulary * width, 1, 0), head]


def _total(tensors: list[_Tensor]) -> dict[str, int]:
    return {
        "parameters": sum(each.elements * each.copies for each in tensors),
        "matmul_parameters": sum(each.multiplied * each.copies for each in tensors),
        "largest_parameter": max(each.elements for each in tensors),
    }


def _gpt2(config: _ConfigReader) -> ArchitectureCounts:
    if config.flag("add_cross_attention", False):
        raise config.error("asks for cross-attention, which a causal language model has no use for")
    layers, hidden = config.number("n_layer"), config.number("n_embd")
    vocabulary, positions = config.number("vocab_size"), config.number("n_positions")
    inner, tied = config.number_or("n_inner", 4 * hidden), config.flag("tie_word_embeddings", True)
    tensors = [
        *_embedding_and_head(vocabulary, hidden, tied=tied),
        _Tensor(positions * hidden, 1, 0),
        *_linear(layers, hidden, 3 * hidden, bias=True),  # query, key and value in one tensor
        *_linear(layers, hidden, hidden, bias=True),
        *_linear(layers, hidden, inner, bias=True),
        *_linear(layers, inner, hidden, bias=True),
        _Tensor(hidden, 2 * (2 * layers + 1), 0),  # layer norms: scale and shift
    ]
    return ArchitectureCounts(
        **_total(tensors),
        layers=layers,
        hidden_size=hidden,
        attention_heads=config.number("n_head"),
        head_dim=config.head_dim("n_embd", "n_head"),
        vocabulary_size=vocabulary,
        max_positions=positions,
        tied_embeddings=tied,
    )


_OPT_POSITION_OFFSET = 2
"""OPT's position table has two rows more than positions: numbering starts after the padding index."""


def _opt(config: _ConfigReader) -> ArchitectureCounts:
    layers, hidden, inner = config.number("num_hidden_layers"), config.number("hidden_size"), config.number("ffn_dim")
    vocabulary, positions = config.number("vocab_size"), config.number("max_position_embeddings")
    narrow = config.number_or("word_embed_proj_dim", hidden)
    bias, tied = config.flag("enable_bias", True), config.flag("tie_word_embeddings", True)
    final_norm = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False)
    tensors = [
        *_embedding_and_head(vocabulary, narrow, tied=tied),
        _Tensor((positions + _OPT_POSITION_OFFSET) * hidden, 1, 0),
        *_linear(4 * layers, hidden, hidden, bias=bias),  # query, key, value, output
        *_linear(layers, hidden, inner, bias=bias),
        *_linear(layers, inner, hidden, bias=bias),
    ]
    if narrow != hidden:  # a projection behind the embedding, another before the head
        tensors += _linear(2, narrow, hidden, bias=False)
    if config.flag("layer_norm_elementwise_affine", True):
        tensors.append(_Tensor(hidden, 2 * (2 * layers + final_norm), 0))  # scale and shift
    return ArchitectureCounts(
        **_total(tensors),
        layers=layers,
        hidden_size=hidden,
        attention_heads=config.number("num_attention_heads"),
        head_dim=config.head_dim("hidden_size", "num_attention_heads"),
        vocabulary_size=vocabulary,
        max_positions=positions,
        tied_embeddings=tied,
    )


def _gate_up_and_down(layers: int, hidden: int, inner: int, *, bias: bool, fused: bool = False) -> list[_Tensor]:
    """The MLP of so many layers. ``fused``: gate and up are one tensor."""
    copies, width = (layers, 2 * inner) if fused else (2 * layers, inner)
    return [*_linear(copies, hidden, width, bias=bias), *_linear(layers, inner, hidden, bias=bias)]


def _gated_mlp(config: _ConfigReader, *, bias: bool = False, fused: bool = False) -> list[_Tensor]:
    """The MLP of every layer."""
    layers, hidden = config.number("num_hidden_layers"), config.number("hidden_size")
    return _gate_up_and_down(layers, hidden, config.number("intermediate_size"), bias=bias, fused=fused)


def _experts(
    config: _ConfigReader, inner_name: str, count_name: str, *, layers: int | None = None, bias: bool = False
) -> list[_Tensor]:
    """Router and experts of every layer. A layer's experts are two fused tensors; a token is multiplied with a part.

    ``inner_name``, ``count_name``: keys of an expert's inner size and of the number of experts. ``layers``: number of
    layers with experts; None for all.
    """
    layers, hidden = layers or config.number("num_hidden_layers"), config.number("hidden_size")
    inner = config.number(inner_name)
    experts, active = config.number(count_name), config.number("num_experts_per_tok")
    if active > experts:
        raise config.error(f"has num_experts_per_tok {active} of only {experts} experts")
    gate_and_up, down = 2 * inner * hidden, inner * hidden
    biases = [_Tensor(experts * 2 * inner, layers, 0), _Tensor(experts * hidden, layers, 0)]
    return [
        *_linear(layers, hidden, experts, bias=bias),
        _Tensor(experts * gate_and_up, layers, active * gate_and_up),
        _Tensor(experts * down, layers, active * down),
        *(biases if bias else []),
    ]


def _head_dim(config: _ConfigReader) -> int:
    return (
        config.number("head_dim") if config.has("head_dim") else config.head_dim("hidden_size", "num_attention_heads")
    )


def _attention(
    config: _ConfigReader,
    *,
    key_value_heads: int | None = None,
    input_bias: bool = False,
    output_bias: bool = False,
    head_norms: bool = False,
    fused: bool = False,
) -> list[_Tensor]:
    """Query, key, value and output of every layer, with shared key-value heads. ``fused``: the first three are one
    tensor. ``head_norms``: one norm for queries and one for keys, shared by the heads of a layer.
    """
    layers, hidden = config.number("num_hidden_layers"), config.number("hidden_size")
    heads, head_dim = config.number("num_attention_heads"), _head_dim(config)
    groups = config.number("num_key_value_heads") if key_value_heads is None else key_value_heads
    inputs = [
        *_linear(layers, hidden, heads * head_dim, bias=input_bias),
        *_linear(2 * layers, hidden, groups * head_dim, bias=input_bias),
    ]
    if fused:
        inputs = _linear(layers, hidden, (heads + 2 * groups) * head_dim, bias=input_bias)
    norms = [_Tensor(head_dim, 2 * layers, 0)] if head_norms else []
    return [*inputs, *_linear(layers, heads * head_dim, hidden, bias=output_bias), *norms]


def _decoder(
    config: _ConfigReader,
    layer_tensors: list[_Tensor],
    *,
    layer_norms: int = 2,
    tied: bool = False,
    head_dim: int | None = None,
) -> ArchitectureCounts:
    """A model like Llama: rotary positions (no table), RMS norms, any attention and MLP in its layers.

    ``layer_norms``: norms of the residual stream in a layer. ``tied``: whether embedding and LM head are one tensor
    where the config does not say. ``head_dim``: None for the one of the config.
    """
    layers, hidden = config.number("num_hidden_layers"), config.number("hidden_size")
    vocabulary, tied = config.number("vocab_size"), config.flag("tie_word_embeddings", tied)
    tensors = [
        *_embedding_and_head(vocabulary, hidden, tied=tied),
        *layer_tensors,
        _Tensor(hidden, layer_norms * layers + 1, 0),
    ]
    return ArchitectureCounts(
        **_total(tensors),
        layers=layers,
        hidden_size=hidden,
        attention_heads=config.number("num_attention_heads"),
        head_dim=_head_dim(config) if head_dim is None else head_dim,
        vocabulary_size=vocabulary,
        max_positions=config.number("max_position_embeddings") if config.has("max_position_embeddings") else None,
        tied_embeddings=tied,
    )


def _llama(config: _ConfigReader) -> ArchitectureCounts:
    bias = config.flag("attention_bias", False)
    mlp = _gated_mlp(config, bias=config.flag("mlp_bias", False))
    # The first Llama configs have no key-value heads; those of the other families always do.
    groups = config.number_or("num_key_value_heads", config.number("num_attention_heads"))
    return _decoder(config, _attention(config, key_value_heads=groups, input_bias=bias, output_bias=bias) + mlp)


def _qwen3(config: _ConfigReader, mlp: list[_Tensor]) -> ArchitectureCounts:
    config.number("head_dim")  # every Qwen3 has it, seldom equal to hidden_size / heads
    bias = config.flag("attention_bias", False)
    return _decoder(config, _attention(config, input_bias=bias, output_bias=bias, head_norms=True) + mlp)


def _qwen3_moe(config: _ConfigReader) -> ArchitectureCounts:
    if not config.is_empty("mlp_only_layers") or config.number_or("decoder_sparse_step", 1) != 1:
        raise config.error("has layers without experts (mlp_only_layers, decoder_sparse_step), which are not counted")
    count_name = "num_experts" if config.has("num_experts") else "num_local_experts"  # as published, as it is written
    return _qwen3(config, _experts(config, "moe_intermediate_size", count_name))


def _gemma(config: _ConfigReader, *, head_norms: bool) -> ArchitectureCounts:
    """Gemma 2 and the language model of Gemma 3: norms before and behind attention and MLP."""
    config.number("head_dim")  # every Gemma has it, seldom equal to hidden_size / heads
    bias = config.flag("attention_bias", False)
    attention = _attention(config, input_bias=bias, output_bias=bias, head_norms=head_norms)
    return _decoder(config, attention + _gated_mlp(config), layer_norms=4, tied=True)


def _phi3(config: _ConfigReader) -> ArchitectureCounts:
    groups = config.number_or("num_key_value_heads", config.number("num_attention_heads"))
    return _decoder(config, _attention(config, key_value_heads=groups, fused=True) + _gated_mlp(config, fused=True))


def _gpt_oss(config: _ConfigReader) -> ArchitectureCounts:
    """An attention sink for each head; experts and router with biases."""
    config.number("head_dim")
    layers, heads = config.number("num_hidden_layers"), config.number("num_attention_heads")
    bias = config.flag("attention_bias", True)
    attention = _attention(config, input_bias=bias, output_bias=bias)
    experts = _experts(config, "intermediate_size", "num_local_experts", bias=True)
    return _decoder(config, [*attention, _Tensor(heads, layers, 0), *experts])


def _deepseek_v2(config: _ConfigReader) -> ArchitectureCounts:
    """Latent attention: keys and values are projected from a narrow latent, queries too in the larger models.

    The first layers have a dense MLP, the others experts of which some are shared by all tokens. A query is multiplied
    with keys of another width than the values; ``head_dim`` is their mean, which gives the same FLOPs.
    """
    layers, hidden = config.number("num_hidden_layers"), config.number("hidden_size")
    heads, latent = config.number("num_attention_heads"), config.number("kv_lora_rank")
    rotary, value = config.number("qk_rope_head_dim"), config.number("v_head_dim")
    key = config.number("qk_nope_head_dim") + rotary
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    queries = _linear(layers, hidden, heads * key, bias=False)
    if config.has("q_lora_rank"):
        rank = config.number("q_lora_rank")
        down, up = _linear(layers, hidden, rank, bias=bias), _linear(layers, rank, heads * key, bias=False)
        queries = [*down, _Tensor(rank, layers, 0), *up]
    attention = [
        *queries,
        # The rotary part of the keys is projected beside the latent, once for all heads.
        *_linear(layers, hidden, latent + rotary, bias=bias),
        _Tensor(latent, layers, 0),
        *_linear(layers, latent, heads * (key - rotary + value), bias=False),
        *_linear(layers, heads * value, hidden, bias=bias),
    ]
    dense = min(layers, config.number_or_zero("first_k_dense_replace"))
    mlp = _gate_up_and_down(dense, hidden, config.number("intermediate_size"), bias=mlp_bias) if dense else []
    if dense < layers:
        shared = config.number("moe_intermediate_size") * config.number("n_shared_experts")
        mlp += _experts(config, "moe_intermediate_size", "n_routed_experts", layers=layers - dense)
        mlp += _gate_up_and_down(layers - dense, hidden, shared, bias=mlp_bias)
    return _decoder(config, attention + mlp, head_dim=(key + value) // 2)


_FAMILIES: dict[str, Callable[[_ConfigReader], ArchitectureCounts]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "llama": _llama,
    "mistral": lambda config: _decoder(config, _attention(config) + _gated_mlp(config)),
    "qwen2": lambda config: _decoder(config, _attention(config, input_bias=True) + _gated_mlp(config)),
    "qwen3": lambda config: _qwen3(config, _gated_mlp(config)),
    "qwen3_moe": _qwen3_moe,
    "mixtral": lambda config: _decoder(
        config, _attention(config) + _experts(config, "intermediate_size", "num_local_experts")
    ),
    "gemma2": lambda config: _gemma(config, head_norms=False),
    "gemma3_text": lambda config: _gemma(config, head_norms=True),
    "phi3": _phi3,
    "deepseek_v2": _deepseek_v2,
    "gpt_oss": _gpt_oss,
}
