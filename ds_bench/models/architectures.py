"""Lists a model's tensors from its ``config.json``, without torch or Transformers.

``architectures.json`` describes each family as Transformers 5 builds it: the tensors of every part in order, with
sizes in symbols, and the defaults of the family's configuration class for keys that a file leaves out. A line has the
form ``name rows,columns``, optionally followed by ``+`` (a bias; with a name after it, only if that flag is set; with a
size, of that size) and by ``?flag`` or ``?!flag``, the condition for the tensor to exist. A name after ``=`` is the
parameter itself; any other is a module that holds a ``weight``; ``@group`` includes the lines of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .presets import ModelFacts, read_json

_KEYS: Mapping[str, tuple[str, ...]] = {
    "h": ("embed_dim", "hidden_size", "n_embd", "d_model"),
    "L": ("num_hidden_layers", "n_layer", "num_layers", "depth", "encoder_layers"),
    "H": ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"),
    "K": ("num_key_value_heads",),
    "d": ("head_dim", "d_kv"),
    "i": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim"),
    "v": ("vocab_size",),
    "p": ("max_position_embeddings", "n_positions", "num_position_embeddings"),
    "E": ("num_experts", "num_local_experts", "n_routed_experts"),
    "k": ("num_experts_per_tok",),
    "m": ("moe_intermediate_size",),
    "out": ("out_hidden_size",),
    "in_channels": ("in_channels", "num_channels"),
    "decoder_layers": ("decoder_layers", "num_decoder_layers"),
    "use_head": ("vision_use_head",),
    "activation": ("hidden_act", "activation_function", "hidden_activation", "feed_forward_proj"),
    "dropout": ("dropout", "dropout_rate", "resid_pdrop", "residual_dropout", "hidden_dropout"),
}
"""Symbol → the config keys that families use for it."""
_INNER = {"relu": 0.0, "quick_gelu": 2.0, "gelu_new": 4.0, "gelu_fast": 4.0, "gated-gelu": 4.0}
"""Activation function → number of tensors that it saves besides its output, unless it saves just its input."""
_MODEL_TYPES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter of a model, by the name that Transformers gives it."""

    name: str
    shape: tuple[int, ...]
    part: str
    """``vision``, ``projector``, ``encoder``, ``layers`` (decoder layers), or empty for what surrounds them."""
    layer: int | None = None
    """Number of the layer within its part."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Sizes of the layers of one part, from which their activations are computed."""

    part: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    experts_per_token: int = 0
    layer_norm: bool = False
    """LayerNorm instead of RMSNorm, which saves its input in fp32."""
    norm_in_fp32: bool = False
    """RMSNorm multiplies by its weight in fp32, as in Gemma."""
    score_bytes: tuple[int, int] = (0, 0)
    """Bytes that attention keeps for each head and pair of tokens, in 16-bit precision and in fp32, if no fused
    kernel supports its softcapping, sinks or relative positions."""
    copies_output: bool = False
    """Attention's output is copied, since rotary embeddings on part of a head change the order of its elements."""
    inner: float = 0.0
    """Number of tensors of the MLP's inner width that its activation saves."""
    dropout: float = 0.0
    is_latent: bool = False
    """Multi-head latent attention, with keys and values of different widths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Everything that is known about a model from its ``config.json``."""

    model_type: str
    config: Mapping[str, Any]
    """With the defaults of the family's configuration class."""
    tensors: tuple[Tensor, ...]
    """In the order of ``model.parameters()``; a tensor shared by embedding and LM head appears once."""
    stacks: tuple[Stack, ...]
    """Vision tower, encoder and decoder, if they exist."""
    facts: ModelFacts
    active_parameters: int
    """Parameters that one token uses: in a mixture of experts, without the experts that it skips."""
    image: str | None
    """``fixed``: every image has the same number of tokens; ``grid``: it depends on the size; None: no images."""

    def image_tokens(self, width: int | None = None, height: int | None = None) -> int:
        """Tokens that one image takes up in the language model; pixels default to the tower's size, or to 448.

        Raises UsageError for a size below one token.
        """
        vision = self.config["vision_config"]
        patch = _pair(vision["patch_size"])
        if self.image == "fixed":
            if "mm_tokens_per_image" in self.config:
                return int(self.config["mm_tokens_per_image"])
            tokens = math.prod(size // each for size, each in zip(_pair(vision["image_size"]), patch, strict=True))
            default = self.config.get("vision_feature_select_strategy", "default") == "default"
            return tokens if default or vision.get("model_type") != "clip_vision_model" else tokens + 1
        unit = patch[0] * int(vision["spatial_merge_size"])
        # As the image processor rounds (qwen2_vl/image_processing_qwen2_vl.py, smart_resize).
        tokens = round((width or 448) / unit) * round((height or 448) / unit)
        if tokens < 1:
            raise UsageError(f"--image-size {width}x{height} is smaller than one token of {unit} × {unit} pixels")
        return tokens

    def patches(self, image_tokens: int) -> int:
        """Patches that the vision tower reads for this many tokens of the language model."""
        vision = self.config["vision_config"]
        if self.image == "grid":
            return image_tokens * int(vision["spatial_merge_size"]) ** 2
        sizes = zip(_pair(vision["image_size"]), _pair(vision["patch_size"]), strict=True)
        per_image = math.prod(size // each for size, each in sizes)
        return -(-image_tokens // self.image_tokens()) * per_image


def families() -> tuple[str, ...]:
    """Names of the families that are whole models, as in ``model_type``."""
    return tuple(name for name in read_json("architectures")["families"] if not name.endswith("_vision_model"))


def not_causal_families() -> set[str]:
    """Families that read images or have an encoder, which the built-in workload does not train."""
    described = read_json("architectures")["families"]
    return {
        name
        for name in families()
        if "image" in described[name] or any(each.get("part") == "encoder" for each in described[name]["sections"])
    }


def read_architecture(name: str, config: Mapping[str, Any]) -> Architecture:
    """List the tensors of the model with this configuration. ``name``: the user's name for it.

    Raises UsageError if the family is unknown, is configured in a way that the lists do not cover, or lacks a size.
    """
    model_type = str(config.get("model_type"))
    if model_type not in families():
        raise UsageError(
            f"{name} has the model type {model_type!r}, for which ds_bench has no formulas",
            remedy="to count its parameters with torch and Transformers instead, install ds-compare[run]",
        )
    builder = _Builder(name)
    try:
        builder.add_family(model_type, config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        problem = f"lacks {error}" if isinstance(error, KeyError) else f"has a value that cannot be used ({error})"
        raise UsageError(f"{name}: its config.json {problem}", remedy="compare it with the original file") from error
    return builder.finish(model_type)


class _Builder:
    """Collects the tensors of one model, part by part."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.families = read_json("architectures")["families"]
        self.tensors: list[Tensor] = []
        self.stacks: list[Stack] = []
        self.config: Mapping[str, Any] = {}
        self.tied = False
        self.active = self.multiplied = 0
        self.text: Mapping[str, Any] = {}

    def add_family(self, model_type: str, config: Mapping[str, Any], *, prefix: str = "") -> None:
        """Add the sections of a family, and of those that it contains."""
        family = self.families[model_type]
        config = {**family["defaults"], **config}
        differing = [key for key, value in family.get("requires", {}).items() if config.get(key, value) != value]
        differing += [key for key, other in family.get("equal", ()) if config.get(key, config[other]) != config[other]]
        if differing:
            raise UsageError(
                f"{self.name}: its config sets {differing[0]} to {config[differing[0]]}, which no formula covers",
                remedy="to count its parameters with torch and Transformers instead, install ds-compare[run]",
            )
        if not prefix:
            self.config = config
            nested = (config.get("text_config") or {}) if family.get("tied_by_text") else {}
            tied = config.get("tie_word_embeddings") or nested.get("tie_word_embeddings") or family.get("always_tied")
            self.tied = bool(tied)
        for section in family["sections"]:
            if "text" in section:
                text = self._part("text_config", config, section["text"])
                self.add_family(text["model_type"], text, prefix="model.language_model.")
            elif section.get("vision") is True:
                vision = self._part("vision_config", config, True)
                self.config = {**self.config, "vision_config": vision}
                self.add_family(vision["model_type"], vision, prefix="model.vision_tower.")
            else:
                own = config
                if "config" in section and "image" in family:
                    own = self._part("vision_config", config, model_type)
                    self.config = {**self.config, "vision_config": own}
                self._add_section(section, family, own, prefix)

    def _part(self, key: str, config: Mapping[str, Any], family: str | bool) -> dict[str, Any]:
        """The nested configuration of a part, with the model type that describes it and that part's defaults."""
        own = config.get(key)
        defaults = self.families[str(config["model_type"])]["defaults"].get(key, {})
        if family is not True:
            # Older files have the text model's keys at the top level.
            given = own if own is not None and own is not defaults else (config if key == "text_config" else {})
            kept = {name: value for name, value in given.items() if not isinstance(value, dict)}
            return {**defaults, **kept, "model_type": family}
        part = dict(own or defaults)
        part["model_type"] = _MODEL_TYPES.get(str(part.get("model_type")), part.get("model_type"))
        if part["model_type"] not in self.families:
            raise UsageError(
                f"{self.name}: its {key} has the model type {part['model_type']!r}, for which ds_bench has no formulas",
                remedy="use a model of a different family, or measure it with a factory: --model-factory",
            )
        return {**self.families[part["model_type"]]["defaults"], **part}

    def _add_section(
        self, section: Mapping[str, Any], family: Mapping[str, Any], config: Mapping[str, Any], prefix: str
    ) -> None:
        part = section.get("part", "")
        if part == "projector":
            symbols = {**config, "vision_h": _find(self.config["vision_config"], "h")}
            symbols["h"] = _find(self._part("text_config", config, True), "h")
        else:
            symbols = _symbols(config, family)
        symbols["tied"] = self.tied
        count = int(symbols[section["repeat"]]) if "repeat" in section else 1
        experts = 0
        for number in range(count):
            sparse = "sparse" in section and _is_sparse(number, config)
            if sparse or ("sparse" not in section and symbols.get("E")):
                experts = int(symbols["k"] or 0)
            lines = section["sparse"] if sparse else section["tensors"]
            symbols["first"] = number == 0
            for name, shape in _expand(lines, symbols):
                full = section.get("prefix", "").format(number) + name
                if prefix and full.startswith("model.") and not full.startswith(prefix):
                    full = prefix + full.removeprefix("model.")
                tensor = Tensor(full, shape, part, number if "repeat" in section else None)
                self.tensors.append(tensor)
                share = int(symbols["k"]) / int(symbols["E"]) if ".experts." in name else 1
                self.active += round(tensor.elements * share)
                is_table = name.split(".")[-2:-1] in (["wte"], ["wpe"])
                is_table |= part == "" and number == 0 and "embed" in name
                is_matrix = len(shape) > 1 and name.endswith(("weight", "proj")) and not is_table
                if is_matrix and part not in ("vision", "projector"):
                    self.multiplied += round(tensor.elements * share)
        if "repeat" in section and section["repeat"] != "deepstack":
            is_vision = part == "vision"
            self.stacks.append(
                Stack(
                    part=part,
                    hidden=int(symbols["h"]),
                    heads=int(symbols["H"]),
                    kv_heads=int(symbols["K"]),
                    head_dim=int(symbols.get("qk") or symbols["d"]),
                    is_latent="qk" in symbols,
                    norm_in_fp32=bool(family.get("norm_in_fp32")),
                    score_bytes=tuple(family.get("eager", (0, 0))),
                    copies_output=bool(family.get("partial_rotary")),
                    inner=family.get("inner") or _INNER.get(str(_find(config, "activation")), 1.0),
                    dropout=float(_find(config, "dropout") or 0),
                    layers=count,
                    experts_per_token=experts,
                    layer_norm=bool(family.get("layer_norm", is_vision and "norm1 h" not in section["tensors"])),
                )
            )
            if not is_vision:
                self.text = symbols

    def finish(self, model_type: str) -> Architecture:
        """Return the model that was collected."""
        symbols, stack = self.text, self.stacks[-1]
        head = int(symbols["v"]) * stack.hidden if self.tied else 0
        head_dim = stack.head_dim
        if "qk" in symbols:  # keys and values of different widths: the mean has the FLOPs of both
            head_dim = (int(symbols["qk"]) + int(symbols["v_head_dim"])) // 2
        return Architecture(
            model_type=model_type,
            config=self.config,
            tensors=tuple(self.tensors),
            stacks=tuple(self.stacks),
            active_parameters=self.active,
            image=self.families[model_type].get("image"),
            facts=ModelFacts(
                name=self.name,
                model_type=model_type,
                config={**self.config, "use_cache": False},
                parameters=sum(tensor.elements for tensor in self.tensors),
                matmul_parameters=self.multiplied + head,
                layers=stack.layers,
                hidden_size=stack.hidden,
                attention_heads=stack.heads,
                head_dim=head_dim,
                vocabulary_size=int(symbols["v"]),
                max_positions=symbols.get("p"),
                largest_parameter=max(tensor.elements for tensor in self.tensors),
                tied_embeddings=self.tied,
            ),
        )


def _find(config: Mapping[str, Any], symbol: str) -> Any:
    """The value of a symbol in a configuration; None without one."""
    return next((config[key] for key in _KEYS[symbol] if config.get(key) is not None), None)


def _pair(value: Any) -> tuple[int, int]:
    return (int(value[0]), int(value[1])) if isinstance(value, (list, tuple)) else (int(value), int(value))


def _symbols(config: Mapping[str, Any], family: Mapping[str, Any]) -> dict[str, Any]:
    """Symbol → its value: numbers from the configuration, values derived from them, and flags."""
    symbols = {**config, **{symbol: _find(config, symbol) for symbol in _KEYS}}
    flags = {
        name: flag if isinstance(flag, bool) else config.get(flag) for name, flag in family.get("flags", {}).items()
    }
    for name in ("qkv_bias", "o_bias", "mlp_bias"):
        symbols[name] = bool(flags.pop(name, False))
    symbols |= flags
    symbols["K"] = symbols["K"] or symbols["H"]
    if symbols["d"] is None:
        symbols["d"] = symbols["h"] // symbols["H"]
    symbols |= {"q": symbols["H"] * symbols["d"], "kv": symbols["K"] * symbols["d"]}
    if symbols["i"] is None:
        symbols["i"] = int(symbols["h"] * config.get("mlp_ratio", 4))
    if symbols["decoder_layers"] is None:
        symbols["decoder_layers"] = symbols["L"]
    if family.get("moe_width"):
        symbols["m"] = config[family["moe_width"]]
    symbols["S"] = config.get("shared_expert_intermediate_size") or (
        (symbols["m"] or 0) * (config.get("n_shared_experts") or 0)
    )
    if config.get("kv_lora_rank"):
        symbols["qk"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        symbols["nv"] = config["qk_nope_head_dim"] + config["v_head_dim"]
    if "patch_size" in config:
        patch = _pair(config["patch_size"])
        symbols["patch_size"] = patch[0]
        if config.get("image_size"):
            sizes = _pair(config["image_size"])
            symbols["patches"] = (sizes[0] // patch[0]) * (sizes[1] // patch[1])
    symbols["out"] = symbols["out"] or config.get("hidden_size")
    symbols["deepstack"] = len(config.get("deepstack_visual_indexes", ()))
    symbols["gated"] = str(config.get("feed_forward_proj", "")).startswith("gated")
    return symbols


def _is_sparse(number: int, config: Mapping[str, Any]) -> bool:
    """Whether a layer has experts: DeepSeek's and GLM's from ``first_k_dense_replace`` on, Qwen's every
    ``decoder_sparse_step``-th that ``mlp_only_layers`` does not name."""
    if "first_k_dense_replace" in config:
        return number >= int(config["first_k_dense_replace"])
    return number not in (config.get("mlp_only_layers") or ()) and (number + 1) % config["decoder_sparse_step"] == 0


def _expand(lines: list[str], symbols: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters that the lines describe: name and shape."""
    for line in lines:
        if line.startswith("@"):
            yield from _expand(read_json("architectures")["groups"][line[1:]], symbols)
            continue
        name, sizes, *rest = line.split()
        conditions = [each[1:] for each in rest if each.startswith("?")]
        if not all(bool(symbols.get(each.lstrip("!"))) != each.startswith("!") for each in conditions):
            continue
        shape = tuple(_size(each, symbols) for each in sizes.split(","))
        if name.startswith("="):
            yield name[1:], shape
            continue
        yield f"{name}.weight", shape
        for each in rest:
            if each == "+" or (each.startswith("+") and symbols.get(each[1:]) is True):
                yield f"{name}.bias", shape[:1]
            elif each.startswith("+") and not isinstance(symbols.get(each[1:], 0), bool):
                yield f"{name}.bias", (_size(each[1:], symbols),)


def _size(text: str, symbols: Mapping[str, Any]) -> int:
    """A sum of products of numbers and symbols."""

    def value(name: str) -> int:
        return int(name) if name.isdigit() else int(symbols[name])

    return sum(math.prod(map(value, term.split("*"))) for term in text.split("+"))
