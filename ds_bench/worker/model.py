"""Builds the model of a workload, with random weights that are the same at every ZeRO stage.

No weights are downloaded. At stage 3 a preset, local or Hub model is built inside ``deepspeed.zero.Init`` (Transformers
enters it while an ``HfDeepSpeedConfig`` is alive), so that no rank ever holds all of it; at other stages it is built on
the device in the training precision. The two draw random numbers in different orders, so every matrix is drawn again
from a generator seeded by its name; otherwise losses at different stages would not be comparable. For FSDP2, matrices
are built on the meta device and drawn when the engine splits them (``reference_engines``).

Without zero.Init (``Workload.zero_init``) a model for stage 3 is built whole in every rank's host memory, as in a
program that does not know the configuration yet; ``deepspeed.initialize`` moves it to the device and splits it.

A factory's model keeps the weights that its own code draws. At every stage it is built whole in every rank's host
memory, converted, and moved to the device or, at stage 3, partitioned tensor by tensor: code that was not written for
``zero.Init`` reads and copies weights while it builds, and a partitioned tensor has none.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from ..config import trained_parameters
from ..config.spec import Engine, Workload, block_of
from ..config.trained_parameters import TrainedParameters
from .library_versions import dtype_argument
from .lookup_model import import_factory
from .replaced_layers import install_loss, install_tiled_mlp

_INIT_STD = 0.02
"""Standard deviation of every matrix, as in GPT-2; speed does not depend on it."""


def training_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the parameters' number format according to the DeepSpeed configuration."""
    if block_of(config, "bf16").get("enabled"):
        return torch.bfloat16
    if block_of(config, "fp16").get("enabled"):
        return torch.float16
    return torch.float32


MakeBatch = Callable[[int, int, torch.Generator], Mapping[str, torch.Tensor]]
"""(samples, sequence length, CPU generator) → the keyword arguments of one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A model in training mode, where the engine expects it: at stage 3 partitioned, or in host memory without
    ``zero_init``; for FSDP2 on the meta device or in host memory; otherwise on the device."""

    module: torch.nn.Module
    make_batch: MakeBatch | None
    """A factory's own batch function; None for random tokens from the model's vocabulary."""
    stage3: object | None
    """Transformers treats weights as partitioned while this object exists, and has only a weak reference to it: keep it
    as long as the model is used."""
    notes: tuple[str, ...] = ()
    """Changes made to a factory's model."""


def build_model(
    workload: Workload,
    config: Mapping[str, Any],
    device: torch.device,
    report_progress: Callable[[], None],
    engine: Engine = "deepspeed",
) -> BuiltModel:
    """Build the model of a workload. ``report_progress`` is called now and then.

    Raises whatever the model's own code raises, and TypeError if a factory does not return a model.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    # The same in all ranks, because a factory's model keeps the weights that its code draws.
    torch.manual_seed(workload.seed)
    dtype = training_dtype(config)
    at_stage3 = engine == "deepspeed" and block_of(config, "zero_optimization").get("stage") == 3
    split = at_stage3 and workload.zero_init
    make_batch, stage3 = None, None
    notes: tuple[str, ...] = ()
    if workload.model_source == "factory":
        module, make_batch = call_factory(workload.model)
        formats = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        if len(formats) > 1:
            names = " and ".join(sorted(map(str, formats)))
            text = f"the factory's parameters are in {names}, but all of them were trained in {dtype}"
            notes = (text.replace("torch.", ""),)
        module.to(dtype=dtype)
        if split:
            import deepspeed

            # Parameters are split among the ranks on the device one by one; buffers are moved there whole.
            deepspeed.zero.Init(module=module, config_dict_or_path=dict(config), dtype=dtype)
            for owner in module.modules():
                held = {name: buffer for name, buffer in owner._buffers.items() if buffer is not None}
                owner._buffers.update({name: buffer.to(device) for name, buffer in held.items()})
        elif not at_stage3 and engine != "fsdp2":  # stage 3 and FSDP2 move it part by part
            module.to(device=device)
    elif engine == "fsdp2":
        with matrices_on_meta():
            module = _build_from_config(workload, dtype, device, stage3=False)
    else:
        stage3 = HfDeepSpeedConfig(dict(config)) if split else None
        host = torch.device("cpu")
        module = _build_from_config(workload, dtype, host if at_stage3 and not split else device, split)
        reinitialize_weights(module, workload.seed, report_progress, device)
    if at_stage3 and stage3 is None:
        stage3 = HfDeepSpeedConfig(dict(config))  # only now: the model must not be built inside zero.Init
    if workload.dropout is not None:
        set_dropouts(module, workload.dropout)
    choice = trained_parameters.of_workload(workload)
    if choice is not None:
        choose_trained(module, choice, workload.seed)
    module.train()
    install_loss(module, workload.loss)
    if workload.tiled_mlp:
        install_tiled_mlp(module)
    if workload.activation_checkpointing:
        enable_checkpointing(module)
    return BuiltModel(module=module, make_batch=make_batch, stage3=stage3, notes=notes)


def choose_trained(module: torch.nn.Module, choice: TrainedParameters, seed: int) -> None:
    """Freeze parameters of a model, and add adapters to it in place (peft).

    Raises ValueError if a name matches no parameter, or no linear module.
    """
    names = [name for name, _ in module.named_parameters()]
    for pattern in choice.freeze:
        if not any(trained_parameters.is_frozen(name, [pattern]) for name in names):
            raise ValueError(f"--freeze {pattern}: no parameter's name contains it; the first name is {names[0]}")
    for name, parameter in module.named_parameters():
        if not choice.trains(name):
            parameter.requires_grad_(False)
    if choice.lora is None:
        return
    import peft
    from transformers.pytorch_utils import Conv1D

    linear = [name for name, each in module.named_modules() if isinstance(each, (torch.nn.Linear, Conv1D))]
    targets = [name for name in linear if choice.adapts(name)]
    if not targets:
        raise ValueError(f"--lora: no linear module is called {', '.join(choice.lora.modules)}")
    config = peft.LoraConfig(r=choice.lora.rank, target_modules=targets)
    peft.inject_adapter_in_model(config, module)
    dtype = next(module.parameters()).dtype
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(dtype)
            if ".lora_A." in name:  # the same at every stage; lora_B stays zero, as in peft
                parameter.data.copy_(draw_matrix(name, parameter.shape, seed, dtype, parameter.device))


def _build_from_config(workload: Workload, dtype: torch.dtype, device: torch.device, stage3: bool) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    if workload.model_source == "preset":
        model_config = AutoConfig.for_model(workload.model_type, **workload.model_config)
    else:
        source = workload.model_config.get("path", workload.model)
        model_config = AutoConfig.from_pretrained(source, trust_remote_code=workload.trust_remote_code)
    # A cache of keys and values is for generating text.
    model_config.use_cache = False
    if workload.dropout is not None:
        _set_config_dropouts(model_config, workload.dropout)
    # zero.Init patches constructors: importing the model's module for the first time inside it fails with a torch
    # signature error. Suppressed: other code may name its modules differently, and building shows a real error.
    with contextlib.suppress(Exception):
        importlib.import_module(type(model_config).__module__.replace("configuration_", "modeling_"))
    with contextlib.nullcontext() if stage3 else device:
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            model_config,
            **dtype_argument(dtype),
            trust_remote_code=workload.trust_remote_code,
            attn_implementation=workload.attention,
        )
    if stage3:
        # Rotary frequencies are built again outside zero.Init, which before Transformers 5.18 made them 16-bit.
        for name, module in list(model.named_modules()):
            frequencies, config = getattr(module, "inv_freq", None), getattr(module, "config", None)
            if isinstance(frequencies, torch.Tensor) and config is not None and not list(module.parameters()):
                model.set_submodule(name, type(module)(config).to(device))
    return model


def call_factory(name: str) -> tuple[torch.nn.Module, MakeBatch | None]:
    """Return the model that ``package.module:function`` makes, and its batch function if it has one."""
    returned = import_factory(name)()
    model, make_batch = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the model factory returned {type(model).__name__}, not a torch.nn.Module")
    if make_batch is not None and not callable(make_batch):
        raise TypeError(f"the model factory returned a module and {type(make_batch).__name__}, not a function")
    return model, make_batch


def _set_config_dropouts(config: Any, probability: float) -> None:
    """Set every dropout probability of a Transformers configuration and of the configurations inside it."""
    for name, value in list(vars(config).items()):
        if _is_dropout(name, value):
            setattr(config, name, probability)
        elif hasattr(value, "model_type"):
            _set_config_dropouts(value, probability)


def set_dropouts(model: torch.nn.Module, probability: float) -> None:
    """Set every dropout of a built model: modules, and the probabilities that a forward pass hands to functions."""
    for module, name, _ in find_dropouts(model):
        setattr(module, name, probability)


def greatest_dropout(model: torch.nn.Module) -> float:
    """Return the highest probability of any dropout in the model; 0 if it has none."""
    return max((float(value) for _, _, value in find_dropouts(model)), default=0.0)


def find_dropouts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, float]]:
    """Yield (module, attribute, probability) of every dropout.

    The attribute is ``p`` in torch's modules; in any other, each number with a dropout's name.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            yield module, "p", module.p
        else:
            yield from ((module, name, value) for name, value in vars(module).items() if _is_dropout(name, value))


def _is_dropout(name: str, value: object) -> bool:
    """True for ``attn_pdrop``, ``hidden_dropout_prob``, ``dropout``; not for ``layerdrop``, which drops layers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and ("dropout" in name or "pdrop" in name)


def reinitialize_weights(
    model: torch.nn.Module,
    seed: int,
    report_progress: Callable[[], None] = lambda: None,
    device: torch.device | None = None,
) -> None:
    """Draw every parameter of two or more dimensions from N(0, 0.02²), seeded by ``seed`` and its name.

    ``report_progress`` is called before each parameter, because gathering a large model at stage 3 takes minutes.
    ``device``: where to draw the values, which differ by device; None for the parameter's own.
    """
    import deepspeed

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            report_progress()
            # Biases and norms keep what the model's own code writes into them. The shape of a partitioned parameter is
            # empty, so ds_shape counts.
            if len(getattr(parameter, "ds_shape", parameter.shape)) < 2:
                continue
            if device is not None and parameter.device.type != device.type:
                parameter.copy_(draw_matrix(name, parameter.shape, seed, parameter.dtype, device))
                continue
            # At stage 3 this gathers the whole tensor, and sends rank 0's values to all ranks when the context ends.
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):  # does nothing below stage 3
                parameter.normal_(0.0, _INIT_STD, generator=_generator_of(name, seed, parameter.device))


def draw_matrix(name: str, shape: torch.Size, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the values that ``reinitialize_weights`` gives to the parameter of that name."""
    return torch.empty(shape, dtype=dtype, device=device).normal_(
        0.0, _INIT_STD, generator=_generator_of(name, seed, device)
    )


def _generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    # Not hash(), which differs between processes.
    generator.manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    return generator


@contextlib.contextmanager
def matrices_on_meta() -> Iterator[None]:
    """Put parameters of two or more dimensions on the meta device as they are assigned to modules within this context.

    Biases, norms and buffers keep what the model's own code writes into them.
    """
    original = torch.nn.Module.register_parameter

    def register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and param.dim() > 1 and not param.is_meta:  # a tied one is already on meta
            param = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    # A module calls this for every parameter that is assigned to it (nn/modules/module.py, __setattr__).
    with mock.patch.object(torch.nn.Module, "register_parameter", register):
        yield


def find_blocks(model: torch.nn.Module, min_parameter_fraction: float = 0.0) -> list[torch.nn.Module]:
    """Return the blocks that a model repeats: the members of its module lists that are not nested in another such list.

    ``min_parameter_fraction``: share of the model's parameters that a list must hold.
    """
    min_parameters = min_parameter_fraction * sum(parameter.numel() for parameter in model.parameters())
    blocks: list[torch.nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, torch.nn.ModuleList) or id(module) in inside:
            continue
        if sum(parameter.numel() for parameter in module.parameters()) >= min_parameters:
            inside.update(map(id, module.modules()))
            blocks.extend(module)
    return blocks


def enable_checkpointing(model: torch.nn.Module) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise TypeError(f"{type(model).__name__} has no activation checkpointing (gradient_checkpointing_enable)")
    # DeepSpeed's own activation_checkpointing block does nothing for Transformers models.
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def parameter_sizes(model: torch.nn.Module, *, trained: bool = False) -> list[int]:
    """Return the elements of each parameter of the whole model, tied ones once. ``trained``: only of trained ones."""
    parameters = (each for each in model.parameters() if each.requires_grad or not trained)
    return [int(getattr(each, "ds_numel", each.numel())) for each in parameters]


def vocabulary_size(model: torch.nn.Module) -> int:
    """Return the number of token ids: ``vocab_size`` of the model's config or its own. Raises TypeError without one."""
    for holder in (getattr(model, "config", None), model):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    raise TypeError(
        "the model has neither config.vocab_size nor vocab_size, so no tokens can be drawn for it: "
        "make its factory return (model, make_batch)"
    )


_POSITIONS_OF_EACH_SAMPLE = ("opt",)
"""Architectures that count the positions of each sample separately, from its attention mask."""


def position_ids(model: torch.nn.Module, batch_size: int, seq_length: int) -> torch.Tensor | None:
    """Return the position of each token, in host memory, as the model itself would count it.

    None unless it is a Transformers model that takes ``position_ids``. Nearly all use one row of positions for the
    whole batch; one per sample would cost memory and round the gradients of learned positions differently.
    """
    from transformers import PreTrainedModel

    # The class's method, because a replaced loss also replaces the model's own.
    if (
        not isinstance(model, PreTrainedModel)
        or "position_ids" not in inspect.signature(type(model).forward).parameters
    ):
        return None
    of_each_sample = getattr(model.config, "model_type", None) in _POSITIONS_OF_EACH_SAMPLE
    return torch.arange(seq_length).repeat(batch_size if of_each_sample else 1, 1)
