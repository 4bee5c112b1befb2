"""From a config to counts: what tensors each architecture family is made of, and which of them multiply a token.

A family is a list of tensors, written down as Transformers 5 builds them; the counts of ``ModelFacts`` are sums and a
maximum over that list. No torch: the tests build every family on torch's meta device and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureCounts:
    """The countable part of ``ModelFacts``, field for field (see there for units and scope)."""

    parameters: int
    matmul_parameters: int
    layers: int
    hidden_size: int
    attention_heads: int
    head_dim: int
    vocabulary_size: int
    max_positions: int | None
    largest_parameter: int
    tied_embeddings: bool


class _Tensor(NamedTuple):
    """Some equal tensors of a model: elements of one, how many there are, elements of one that multiply each token."""

    elements: int
    copies: int
    multiplied: int


def count_architecture(name: str, model_type: str, config: Mapping[str, Any]) -> ArchitectureCounts:
    """Count the model ``name``; UsageError for a family without arithmetic here, or for a config without its sizes."""
    family = _FAMILIES.get(model_type)
    if family is None:
        raise UsageError(
            f"{name} is of type {model_type!r}, whose parameters cannot be counted by arithmetic",
            remedy=f"known types: {', '.join(_FAMILIES)}",
        )
    return family(_Sizes(name, config))


class _Sizes:
    """Reads sizes out of a config; what is missing or is no size becomes one line for the user."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._name = name
        self._config = config

    def refuse(self, what: str) -> UsageError:
        return UsageError(f"the config of {self._name} {what}", remedy="correct its config.json")

    def states(self, key: str) -> bool:
        """Null is no statement: configs write it for "derive this"."""
        return self._config.get(key) is not None

    def number(self, key: str) -> int:
        if key not in self._config:
            raise self.refuse(f"lacks {key}")
        value = self._config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(f"needs a whole number above 0 as {key}, not {value!r}")
        return value

    def number_or(self, key: str, default: int) -> int:
        return self.number(key) if self.states(key) else default

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(f"needs true or false as {key}, not {value!r}")
        return value

    def per_head(self, hidden_key: str, heads_key: str) -> int:
        hidden, heads = self.number(hidden_key), self.number(heads_key)
        if hidden % heads:
            raise self.refuse(f"has {hidden_key} {hidden}, which {heads_key} {heads} does not divide")
        return hidden // heads


def _linear(copies: int, inputs: int, outputs: int, *, bias: bool) -> list[_Tensor]:
    weight = _Tensor(inputs * outputs, copies, inputs * outputs)
    return [weight, _Tensor(outputs, copies, 0)] if bias else [weight]


def _layer_norm(copies: int, width: int) -> list[_Tensor]:
    """Scale and shift; an RMS norm has the scale only."""
    return [_Tensor(width, 2 * copies, 0)]


def _embedding_and_head(vocabulary: int, width: int, *, tied: bool) -> list[_Tensor]:
    """Looking a row up is no multiplication, the LM head is one: tied, the same tensor serves for both."""
    head = _Tensor(vocabulary * width, 1, vocabulary * width)
    return [head] if tied else [_Tensor(vocabulary * width, 1, 0), head]


def _total(tensors: list[_Tensor]) -> dict[str, int]:
    return {
        "parameters": sum(each.elements * each.copies for each in tensors),
        "matmul_parameters": sum(each.multiplied * each.copies for each in tensors),
        "largest_parameter": max(each.elements for each in tensors),
    }


def _gpt2(sizes: _Sizes) -> ArchitectureCounts:
    if sizes.flag("add_cross_attention", False):
        raise sizes.refuse("asks for cross-attention, which a causal language model has no use for")
    layers, hidden = sizes.number("n_layer"), sizes.number("n_embd")
    vocabulary, positions = sizes.number("vocab_size"), sizes.number("n_positions")
    inner, tied = sizes.number_or("n_inner", 4 * hidden), sizes.flag("tie_word_embeddings", True)
    tensors = [
        *_embedding_and_head(vocabulary, hidden, tied=tied),
        _Tensor(positions * hidden, 1, 0),
        *_linear(layers, hidden, 3 * hidden, bias=True),  # query, key and value in one tensor
        *_linear(layers, hidden, hidden, bias=True),
        *_linear(layers, hidden, inner, bias=True),
        *_linear(layers, inner, hidden, bias=True),
        *_layer_norm(2 * layers + 1, hidden),
    ]
    return ArchitectureCounts(
        **_total(tensors),
        layers=layers,
        hidden_size=hidden,
        attention_heads=sizes.number("n_head"),
        head_dim=sizes.per_head("n_embd", "n_head"),
        vocabulary_size=vocabulary,
        max_positions=positions,
        tied_embeddings=tied,
    )


_OPT_POSITION_OFFSET = 2
"""OPT's position table has two rows more than positions: numbering starts behind the padding index."""


def _opt(sizes: _Sizes) -> ArchitectureCounts:
    layers, hidden, inner = sizes.number("num_hidden_layers"), sizes.number("hidden_size"), sizes.number("ffn_dim")
    vocabulary, positions = sizes.number("vocab_size"), sizes.number("max_position_embeddings")
    narrow = sizes.number_or("word_embed_proj_dim", hidden)
    bias, tied = sizes.flag("enable_bias", True), sizes.flag("tie_word_embeddings", True)
    final_norm = sizes.flag("do_layer_norm_before", True) and not sizes.flag("_remove_final_layer_norm", False)
    tensors = [
        *_embedding_and_head(vocabulary, narrow, tied=tied),
        _Tensor((positions + _OPT_POSITION_OFFSET) * hidden, 1, 0),
        *_linear(4 * layers, hidden, hidden, bias=bias),  # query, key, value, output
        *_linear(layers, hidden, inner, bias=bias),
        *_linear(layers, inner, hidden, bias=bias),
    ]
    if narrow != hidden:  # a projection behind the embedding, another before the head
        tensors += _linear(2, narrow, hidden, bias=False)
    if sizes.flag("layer_norm_elementwise_affine", True):
        tensors += _layer_norm(2 * layers + final_norm, hidden)
    return ArchitectureCounts(
        **_total(tensors),
        layers=layers,
        hidden_size=hidden,
        attention_heads=sizes.number("num_attention_heads"),
        head_dim=sizes.per_head("hidden_size", "num_attention_heads"),
        vocabulary_size=vocabulary,
        max_positions=positions,
        tied_embeddings=tied,
    )


def _gated_mlp(sizes: _Sizes, *, bias: bool = False) -> list[_Tensor]:
    """Gate, up and down of every layer."""
    layers, hidden = sizes.number("num_hidden_layers"), sizes.number("hidden_size")
    inner = sizes.number("intermediate_size")
    return [*_linear(2 * layers, hidden, inner, bias=bias), *_linear(layers, inner, hidden, bias=bias)]


def _experts(sizes: _Sizes) -> list[_Tensor]:
    """Router and experts of every layer; a layer's experts lie in two fused tensors, of which a token meets a share."""
    layers, hidden = sizes.number("num_hidden_layers"), sizes.number("hidden_size")
    inner = sizes.number("intermediate_size")
    experts, active = sizes.number("num_local_experts"), sizes.number("num_experts_per_tok")
    if active > experts:
        raise sizes.refuse(f"has num_experts_per_tok {active} of only {experts} experts")
    gate_and_up, down = 2 * inner * hidden, inner * hidden
    return [
        *_linear(layers, hidden, experts, bias=False),
        _Tensor(experts * gate_and_up, layers, active * gate_and_up),
        _Tensor(experts * down, layers, active * down),
    ]


def _decoder(
    sizes: _Sizes,
    mlp: list[_Tensor],
    *,
    key_value_heads: int | None = None,
    input_bias: bool = False,
    output_bias: bool = False,
    head_norms: bool = False,
) -> ArchitectureCounts:
    """The Llama shape: rotary positions (no table), RMS norms, key-value heads shared by query heads, some ``mlp``."""
    layers, hidden = sizes.number("num_hidden_layers"), sizes.number("hidden_size")
    vocabulary, tied = sizes.number("vocab_size"), sizes.flag("tie_word_embeddings", False)
    heads, head_dim = sizes.number("num_attention_heads"), _head_dim(sizes)
    groups = sizes.number("num_key_value_heads") if key_value_heads is None else key_value_heads
    tensors = [
        *_embedding_and_head(vocabulary, hidden, tied=tied),
        *_linear(layers, hidden, heads * head_dim, bias=input_bias),
        *_linear(2 * layers, hidden, groups * head_dim, bias=input_bias),
        *_linear(layers, heads * head_dim, hidden, bias=output_bias),
        *mlp,
        _Tensor(hidden, 2 * layers + 1, 0),
    ]
    if head_norms:  # one for queries, one for keys, shared by the heads of a layer
        tensors.append(_Tensor(head_dim, 2 * layers, 0))
    return ArchitectureCounts(
        **_total(tensors),
        layers=layers,
        hidden_size=hidden,
        attention_heads=heads,
        head_dim=head_dim,
        vocabulary_size=vocabulary,
        max_positions=sizes.number("max_position_embeddings") if sizes.states("max_position_embeddings") else None,
        tied_embeddings=tied,
    )


def _head_dim(sizes: _Sizes) -> int:
    if sizes.states("head_dim"):
        return sizes.number("head_dim")
    return sizes.per_head("hidden_size", "num_attention_heads")


def _llama(sizes: _Sizes) -> ArchitectureCounts:
    bias = sizes.flag("attention_bias", False)
    mlp = _gated_mlp(sizes, bias=sizes.flag("mlp_bias", False))
    # The first Llama configs know no key-value heads; the other families always state theirs.
    groups = sizes.number_or("num_key_value_heads", sizes.number("num_attention_heads"))
    return _decoder(sizes, mlp, key_value_heads=groups, input_bias=bias, output_bias=bias)


def _mistral(sizes: _Sizes) -> ArchitectureCounts:
    return _decoder(sizes, _gated_mlp(sizes))


def _qwen2(sizes: _Sizes) -> ArchitectureCounts:
    return _decoder(sizes, _gated_mlp(sizes), input_bias=True)


def _qwen3(sizes: _Sizes) -> ArchitectureCounts:
    sizes.number("head_dim")  # stated by every Qwen3, and seldom hidden_size / heads
    bias = sizes.flag("attention_bias", False)
    return _decoder(sizes, _gated_mlp(sizes), input_bias=bias, output_bias=bias, head_norms=True)


def _mixtral(sizes: _Sizes) -> ArchitectureCounts:
    return _decoder(sizes, _experts(sizes))


_FAMILIES: dict[str, Callable[[_Sizes], ArchitectureCounts]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
}
