"""Measures the bytes that a model keeps for its backward pass: ``python -m ds_bench.worker.measure_activations``.

Reads one JSON request per line from standard input. The model is built under ``FakeTensorMode`` (shapes and storages,
no bytes) on the CPU device, in the number format it trains in; a saved-tensor hook counts the storages that autograd
keeps, as the ledger of a real run does. Six pairs of batch size and sequence length give the coefficients of a
polynomial.

A request with a ``config`` names an architecture whose tensor sizes can be computed: the model is built with two
layers, unless the request is for the ``whole`` model, because its layers are of several kinds. Any other request names
a folder, a model on the Hub or a factory. A whole model's tensor sizes are printed immediately (a line with
``partial``); then all but two blocks of each kind are removed. In both cases the second block of a kind represents all
later ones. Each request ends with one line: the answer, or ``error``.

In three cases CUDA keeps tensors that differ from the CPU's; ``imitate_cuda`` makes up for it. A real run is measured
by ``ledger``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import sympy
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from . import ledger, replaced_layers, training_loop
from . import model as build
from .batches import make_batches
from .failure import describe_error
from .library_versions import adapt_transformers, dtype_argument, no_init_weights

TERMS = ("1", "s", "ss", "b", "bs", "bss")
"""Monomials in micro-batch b and sequence length s, as ``prediction.model_profile.Polynomial`` reads them."""
BATCHES = (2, 3)
"""Not 1: slices of a single sequence stay contiguous and are not copied, which makes a difference of 8 bytes."""
LOSS_BATCHES = (512, 1024)
"""Batch sizes whose logits outweigh the gradient of the LM head, which is not a temporary of the loss."""
LIMIT_BATCHES = (1024, 2048)
"""Batch sizes large enough for a loss in parts of a fixed size."""
_UNLIMITED = 2**62
SEQUENCES = (16, 32, 48)
LAYERS = 2
"""Layers of a known architecture that are built: the first keeps what all share, the second what each one adds."""
_ZERO = sympy.ImmutableMatrix.zeros(len(TERMS), 1)
"""The polynomial without terms."""
_MIN_PARAMETER_FRACTION = 0.1
"""Smallest share of a model's parameters that a list of modules must hold to count as its blocks."""
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_POSITION_ATTRIBUTES = ("layer_idx", "layer_id", "layer_number", "idx")
"""Attributes that differ between blocks of one kind: each block's position in the model."""

_IN_FP32_UNDER_AUTOCAST = (
    torch.pow,
    torch.Tensor.pow,
    torch.Tensor.__pow__,
    torch.softmax,
    torch.nn.functional.softmax,
    torch.nn.functional.layer_norm,
)
# Not looked up on each call: trace_allocations replaces them in torch.
_DROPOUT, _ATTENTION = torch.nn.functional.dropout, torch.nn.functional.scaled_dot_product_attention
IMITATED: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("pow", "softmax")),
    *((torch.Tensor, name) for name in ("pow", "__pow__")),
    *((torch.nn.functional, name) for name in ("softmax", "layer_norm", "dropout", "scaled_dot_product_attention")),
)
"""Where to find the functions that :func:`imitate_cuda` calls differently."""

Answer = dict[str, Any]


def measure(request: Mapping[str, Any], report_partial: Callable[[Answer], None]) -> Answer:
    """Tensor sizes and, per number format, the polynomials that ``prediction.model_profile.Activations`` holds.

    ``report_partial`` gets the facts that are known about a whole model before its forward passes begin. Raises
    whatever the model's code raises.
    """
    is_whole = request.get("config") is None or bool(request.get("whole"))
    kernels = _CudaKernelMode() if request.get("accelerator", "cuda") == "cuda" else contextlib.nullcontext()
    answer: Answer = {}
    autocast = bool(request.get("autocast"))
    for precision in request["precisions"]:
        if autocast and answer:  # under autocast the weights are fp32, so all formats give the same
            answer["formats"][precision] = next(iter(answer["formats"].values()))
            continue
        # If weights are frozen, stage 3 keeps more than other stages (linear_of_stage_3). The model is built again,
        # since fitting changes it.
        for key, linear in (("formats", contextlib.nullcontext()), ("stage_3_formats", linear_of_stage_3())):
            if key == "stage_3_formats" and (autocast or not answer.get("frozen")):
                continue
            model, make_batch = build_fake_model(request, torch.float32 if autocast else FORMATS[precision])
            blocks = build.find_blocks(model, _MIN_PARAMETER_FRACTION if is_whole else 0.0)
            if not answer:
                answer = _count_tensors(model, len(blocks)) if is_whole else {"tensors": split_by_layer(model, blocks)}
                answer["formats"] = {}
                if is_whole:
                    report_partial(answer)
            with kernels, linear:
                fits = _fit_activations(model, make_batch, blocks, request)
            if not is_whole:  # its layers are alike
                del fits["largest_layer"]
            answer.setdefault(key, {})[precision] = fits
    return answer


def _fit_activations(
    whole: torch.nn.Module,
    make_batch: build.MakeBatch | None,
    blocks: list[torch.nn.Module],
    request: Mapping[str, Any],
) -> dict[str, Any]:
    """The polynomials of a model in its number format. Changes the model."""
    name, on_cuda = request.get("loss", "model"), request.get("accelerator", "cuda") == "cuda"
    replaced_layers.install_loss(whole, name)
    if request.get("tiled_mlp"):
        replaced_layers.install_tiled_mlp(whole)
    if name == "tiled":
        adapt_tiled_loss()
    model = _ShortenedModel(whole, make_batch, blocks, autocast=bool(request.get("autocast")))
    sequences = tuple(request.get("sequences") or SEQUENCES)
    sizes = [(batch_size, sequence) for batch_size in BATCHES for sequence in sequences]
    plain = _SavedBytes.measure(model, sizes)

    def fit_peak(batches: tuple[int, int]) -> dict[str, Any]:
        large = [(batch_size, sequence) for batch_size in batches for sequence in sequences]
        peak = fit_polynomial(large, [model.loss_peak_bytes(*size, of_loss_alone=name != "model") for size in large])
        # The part of the peak that is not kept for the backward pass anyway.
        return plain.by_layer(model.layers, peak - plain.measured)

    with _loss_in_parts(name, of_fixed_size=name == "chunked" and on_cuda):
        fits: dict[str, Any] = {
            "plain": plain.by_layer(model.layers),
            "loss": fit_peak(LOSS_BATCHES),
            "largest_layer": {"fixed": name_terms(plain.largest_block), "per_layer": {}},
        }
    if name == "tiled" or (name == "chunked" and not on_cuda):
        with _loss_in_parts(name, of_fixed_size=True):
            fits["loss_limit"] = fit_peak(LIMIT_BATCHES)
    if name == "chunked" and not on_cuda:
        from deepspeed.runtime import chunked_cross_entropy

        # Measured as on CUDA, where parts take no memory; on the CPU one part takes two fp32 temporaries, added here.
        fixed = fits["loss_limit"]["fixed"]
        fixed["1"] = fixed.get("1", 0) + 2 * 4 * int(chunked_cross_entropy._BLOCK_ELEMENTS)
    # Last, since it changes the model.
    with contextlib.suppress(Exception):  # not every model supports it; a run that requests it says so
        build.enable_checkpointing(whole)
        fits["checkpointed"] = _SavedBytes.measure(model, sizes).by_layer(model.layers)
    return fits


def adapt_tiled_loss() -> None:
    """Let DeepSpeed's tiled loss run on fake tensors. It reads the incoming gradient, which has no value: use 1."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    def backward(ctx: Any, *_gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, ctx.saved_tensors[0], None, None, None, None, None

    TiledFusedLogitsLoss.backward = staticmethod(backward)


@contextlib.contextmanager
def linear_of_stage_3() -> Iterator[None]:
    """Replace linear layers as zero.Init does (runtime/zero/linear.py): they keep their input even if the weight is
    frozen; torch's own do so only if it is trained."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    with mock.patch.object(torch.nn.functional, "linear", zero3_linear_wrap):
        yield


def imitate_cuda(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch so that it saves on the CPU what CUDA's kernels save.

    Dropout: a mask of one byte per element (native_dropout), where the CPU keeps one in the number format. Fused
    attention with dropout: no scores, where the CPU keeps them. Under autocast: powers, softmax and norms of 16-bit
    tensors are computed in fp32 (aten/src/ATen/autocast_mode.h), where the CPU keeps the number format.
    """
    if function in _IN_FP32_UNDER_AUTOCAST and args and torch.is_autocast_enabled("cpu"):
        return function(args[0].float(), *args[1:], **kwargs)
    if function is _DROPOUT:
        given = _name_arguments(("input", "p", "training", "inplace"), args, {"p": 0.5, "training": True, **kwargs})
        if given["training"] and 0 < given["p"] < 1:
            return torch.native_dropout(given["input"], given["p"], True)[0]
    if function is _ATTENTION:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return function(**{**_name_arguments(names, args, kwargs), "dropout_p": 0.0})
    return function(*args, **kwargs)


class _CudaKernelMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return imitate_cuda(function, args, kwargs or {})


def _name_arguments(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**kwargs, **dict(zip(names, args, strict=False))}


def build_fake_model(
    request: Mapping[str, Any], dtype: torch.dtype, layers: int = LAYERS
) -> tuple[torch.nn.Module, build.MakeBatch | None]:
    """The requested model, on fake tensors and in training mode, and a factory's own batch function.

    ``layers``: depth of a known architecture; any other model has its own.
    """
    make_batch = None
    with FakeTensorMode():
        if request.get("factory"):
            from transformers import PreTrainedModel

            with no_init_weights(), converting_fake_parameters():
                model, make_batch = build.call_factory(request["factory"])
                for module in model.modules():
                    if isinstance(module, PreTrainedModel):
                        module.tie_weights()  # skipped by its constructor, which counts it as initialization
                model = model.to(dtype=dtype)
        else:
            model = _build_from_config(request, dtype, layers)
    if request.get("dropout") is not None:
        build.set_dropouts(model, request["dropout"])
    return model.train(), make_batch


@contextlib.contextmanager
def converting_fake_parameters() -> Iterator[None]:
    """Make ``Module.to`` replace parameters instead of swapping contents in place, which fake tensors do not allow."""
    converted: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}  # tied parameters stay tied

    def apply(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(function)  # type: ignore[no-untyped-call]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in converted:
                    replacement = torch.nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                    converted[id(parameter)] = parameter, replacement  # kept alive, so that its id stays its own
                module._parameters[name] = converted[id(parameter)][1]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else function(buffer)
        return module

    with mock.patch.object(torch.nn.Module, "_apply", apply):
        yield


def _build_from_config(request: Mapping[str, Any], dtype: torch.dtype, layers: int) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    trusted = bool(request.get("trust_remote_code", False))
    if request.get("path"):
        config = AutoConfig.from_pretrained(request["path"], trust_remote_code=trusted)
    else:
        config = AutoConfig.for_model(request["model_type"], **request["config"])
        if not request.get("whole"):
            config.num_hidden_layers = layers
            if isinstance(layer_types := getattr(config, "layer_types", None), list):
                # Transformers refuses a list whose length is not the depth (configuration_utils.py).
                config.layer_types = layer_types[:layers]
    # As in real runs: a cache of keys and values is for generating text.
    config.use_cache = False
    with no_init_weights():
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config,
            trust_remote_code=trusted,
            attn_implementation=request.get("attention"),
            **dtype_argument(dtype),
        )
        # The constructor skips this under no_init_weights.
        model.tie_weights()  # type: ignore[operator]
    return model


def split_by_layer(model: torch.nn.Module, layers: list[torch.nn.Module]) -> dict[str, list[int]]:
    """Elements of the tensors before the layers, in one layer, and after the layers, in DeepSpeed's order."""
    parameters = list(model.parameters())
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    numbers = [number for number, parameter in enumerate(parameters) if id(parameter) in in_layers]
    first, end = numbers[0], numbers[-1] + 1
    if end - first != len(numbers):
        raise ValueError("the tensors of this architecture's layers are not contiguous")
    sizes = [parameter.numel() for parameter in parameters]
    return {"before": sizes[:first], "layer": sizes[first:end][-len(numbers) // len(layers) :], "after": sizes[end:]}


def _count_tensors(model: torch.nn.Module, block_count: int) -> Answer:
    """Facts about a whole model that need no forward pass."""
    parameters = list(model.parameters())
    is_tied = False
    with contextlib.suppress(Exception):  # a model from another library may lack the function or have no parameters
        head = model.get_output_embeddings()  # type: ignore[operator]
        is_tied = head is not None and head.weight is parameters[0]
    trained = [parameter.numel() for parameter in parameters if parameter.requires_grad]
    return {
        "tensors": {"before": trained, "layer": [], "after": []},
        "frozen": [(n, each.numel()) for n, each in enumerate(parameters) if not each.requires_grad],
        "rows": [each.shape[0] if each.dim() else 1 for each in parameters],
        "tied": is_tied,
        "layers": max(1, block_count),
    }


class _ShortenedModel:
    """A model, shortened to at most two blocks of each kind if possible, and the bytes that its passes keep."""

    def __init__(
        self,
        model: torch.nn.Module,
        make_batch: build.MakeBatch | None,
        blocks: list[torch.nn.Module],
        *,
        autocast: bool,
    ) -> None:
        self.model, self._make_batch, self._autocast = model, make_batch, autocast
        self.layers = max(1, len(blocks))
        """Blocks of the whole model."""
        self._mode: FakeTensorMode = next(model.parameters()).fake_mode  # type: ignore[attr-defined]
        self.blocks, self.weights = _remove_similar_blocks(model, blocks)
        """Blocks that are left, and how many blocks of the whole model each one represents. The first of a kind keeps
        what all share: it represents none if there is a second."""
        self._current = 0
        for number, block in enumerate(self.blocks):
            # After each block, saved tensors belong to the next share.
            block.register_forward_hook(lambda *_, number=number: setattr(self, "_current", number + 1))

    def _forward(self, batch: dict[str, torch.Tensor]) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            return self.model(**batch)

    def saved_bytes(self, batch_size: int, sequence: int) -> list[int]:
        """Bytes of the storages that autograd saves in a forward pass, except parameters (see ``ledger``).

        One number for each block, counted from the end of the block before it, and one for everything after the last.
        """
        self._current = 0
        shares = [0] * (len(self.blocks) + 1)
        saved: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no other storage gets its address

        def note(_tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
            if storage._cdata not in saved:
                saved[storage._cdata] = storage
                shares[self._current] += int(storage.nbytes())

        with self._mode, ledger.saved_storages(self.model.parameters(), note):
            self._forward(self._make_fake_batch(batch_size, sequence))
        return shares

    def loss_peak_bytes(self, batch_size: int, sequence: int, *, of_loss_alone: bool) -> int:
        """Peak of live activations and temporaries from the first operation to the first gradient of a parameter.

        ``of_loss_alone``: from the output layer on, because the layers before it may briefly take more memory than a
        loss in parts.
        """

        def stop(_parameter: torch.nn.Parameter, _gradient: torch.Tensor) -> None:
            raise _LossDoneError

        with self._mode, LiveBytes() as live, contextlib.ExitStack() as hooks:
            if of_loss_alone:
                head = self.model.get_output_embeddings()  # type: ignore[operator]
                hooks.callback(head.register_forward_pre_hook(lambda *_: live.forget_peak()).remove)
            inputs = self._make_fake_batch(batch_size, sequence)
            with ledger.gradient_hooks(self.model.parameters(), stop), contextlib.suppress(_LossDoneError):
                training_loop.loss_of(self._forward(inputs)).backward()  # type: ignore[no-untyped-call]
        return int(live.peak)

    def _make_fake_batch(self, batch_size: int, sequence: int) -> dict[str, torch.Tensor]:
        """Token ids, or a batch from the model's factory."""
        if self._make_batch is None:
            return make_fake_tokens(batch_size, sequence)
        dtype = next(self.model.parameters()).dtype
        sizes, of_rank = {"batch_size": batch_size, "seq_length": sequence}, {"seed": 0, "rank": 0, "count": 1}
        return make_batches(self._make_batch, **sizes, **of_rank, device=torch.device("cpu"), dtype=dtype)[0]


def make_fake_tokens(batch_size: int, sequence: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros((batch_size, sequence), dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


class _LossDoneError(Exception):
    """Backward has reached the first parameter: the loss and its temporaries are behind it."""


def _remove_similar_blocks(
    model: torch.nn.Module, blocks: list[torch.nn.Module]
) -> tuple[list[torch.nn.Module], list[int]]:
    """Remove all but two blocks of each kind. Return those left, and how many blocks each represents.

    Only from a Transformers model with a single list of blocks, whose forward pass loops over that list up to the depth
    in its config; any other model stays whole.
    """
    config = getattr(model, "config", None)
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and blocks and list(m) == blocks]
    names = ("num_hidden_layers", "n_layer")
    depth = next((name for name in names if getattr(config, name, None) == len(blocks)), None)
    if config is None or len(lists) != 1 or depth is None:
        return blocks, [1] * len(blocks)
    layer_types = getattr(config, "layer_types", None)
    numbers_by_kind: dict[Any, list[int]] = {}
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    first_trained = min((numbers[id(each)] for each in model.parameters() if each.requires_grad), default=len(numbers))
    for number, block in enumerate(blocks):
        # Without trained parameters before it, no gradient of its input is computed.
        trained_before = any(numbers[id(parameter)] > first_trained for parameter in block.parameters())
        kind = layer_types[number] if layer_types else None, trained_before, _describe_kind(block)
        numbers_by_kind.setdefault(kind, []).append(number)
    left = sorted(number for same in numbers_by_kind.values() for number in same[:2])
    weights = {same[:2][-1]: len(same) for same in numbers_by_kind.values()}
    # From the end, so that the numbers of earlier blocks stay valid.
    for number in sorted(set(range(len(blocks))) - set(left), reverse=True):
        del lists[0][number]
    setattr(config, depth, len(left))
    with contextlib.suppress(AttributeError):  # some configs derive it from the depth
        config.layer_types = [layer_types[number] for number in left] if layer_types else layer_types
    return [blocks[number] for number in left], [weights.get(number, 0) for number in left]


def _describe_kind(block: torch.nn.Module) -> Any:
    """Equal for blocks that save the same bytes: same classes inside, settings, tensor shapes and trained tensors."""
    modules = []
    for module in block.modules():
        settings = frozenset(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and name not in _POSITION_ATTRIBUTES
        )
        modules.append((type(module).__name__, settings))
    tensors = tuple((name, tuple(each.shape), each.requires_grad) for name, each in block.named_parameters())
    return tuple(modules), tensors


@contextlib.contextmanager
def _loss_in_parts(name: str, *, of_fixed_size: bool) -> Iterator[None]:
    """Compute a loss in parts: growing with the micro-batch, as if that were small, or of fixed size, as if it were
    large.

    For ``chunked``, a fixed size stands for its kernel on CUDA, whose parts take no memory.
    """
    if name == "tiled":
        with mock.patch.object(
            replaced_layers, "MAX_TILE_TOKENS", replaced_layers.MAX_TILE_TOKENS if of_fixed_size else _UNLIMITED
        ):
            yield
    elif name == "chunked":
        from deepspeed.runtime import chunked_cross_entropy

        backend = "triton" if of_fixed_size else "torch"
        with (
            mock.patch.object(chunked_cross_entropy, "_resolve_backend", return_value=backend),
            mock.patch.object(chunked_cross_entropy, "_BLOCK_ELEMENTS", _UNLIMITED),
            mock.patch.object(chunked_cross_entropy, "_log_sum_exp_forward_kernel", _NoKernel(), create=True),
            mock.patch.object(chunked_cross_entropy, "_cross_entropy_backward_kernel", _NoKernel(), create=True),
        ):
            yield
    else:
        yield


class _NoKernel:
    """Takes the place of a Triton kernel, which cannot run here; the tensors that it would fill already exist."""

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedBytes:
    """Bytes saved in a forward pass: exact coefficients of ``TERMS``, as sympy column vectors."""

    measured: Any
    """Of the shortened model."""
    total: Any
    """Of the whole model."""
    in_blocks: Any
    """The part of ``total`` that the blocks keep."""
    largest_block: Any

    @classmethod
    def measure(cls, model: _ShortenedModel, sizes: list[tuple[int, int]]) -> _SavedBytes:
        shares_by_size = [model.saved_bytes(*size) for size in sizes]
        measured = fit_polynomial(sizes, [sum(shares) for shares in shares_by_size])
        by_block = [fit_polynomial(sizes, [shares[n] for shares in shares_by_size]) for n in range(len(model.blocks))]
        weighted = list(zip(model.weights, by_block, strict=True))
        largest_size = sympy.Matrix(_monomials(*sizes[-1]))
        return cls(
            measured=measured,
            # Up to two blocks of each kind are already in ``measured``.
            total=sum((max(0, weight - 2) * share for weight, share in weighted), measured),
            in_blocks=sum((weight * share for weight, share in weighted), _ZERO) if weighted else measured,
            largest_block=max(
                [share for weight, share in weighted if weight] or [measured], key=lambda share: share.dot(largest_size)
            ),
        )

    def by_layer(self, layers: int, extra: Any = _ZERO) -> dict[str, Any]:
        """``fixed`` + layers × ``per_layer``, the mean of the blocks. ``extra``: further bytes, outside the blocks."""
        return {
            "fixed": name_terms(self.total - self.in_blocks + extra),
            "per_layer": name_terms(self.in_blocks / layers),
        }


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the live storages that operations have made, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Views and in-place operations return a storage that already exists.
        inputs = {identity for identity, _ in storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for identity, storage in storages(result):
            if identity not in inputs and identity not in self._known:
                size = storage.nbytes()
                self._known.add(identity)
                self.now += size
                # No allocator counts fake tensors: a storage is freed when its Python object is.
                weakref.finalize(storage, self._remove, identity, size)
        self.peak = max(self.peak, self.now)
        return result

    def forget_peak(self) -> None:
        """Restart the peak from the bytes that are live now."""
        self.peak = self.now

    def _remove(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now -= size


def storages(values: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for item in tree_flatten(values)[0]:
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            yield int(storage._cdata), storage


def fit_polynomial(sizes: list[tuple[int, int]], values: list[int]) -> Any:
    """Coefficients of ``TERMS`` that give exactly these values at these sizes (batch, sequence): a column vector."""
    return _inverse(tuple(sizes)) * sympy.Matrix(values)


@cache
def _inverse(sizes: tuple[tuple[int, int], ...]) -> Any:
    return sympy.Matrix([_monomials(*size) for size in sizes]).inv()


def _monomials(batch_size: int, sequence: int) -> tuple[int, ...]:
    return (1, sequence, sequence**2, batch_size, batch_size * sequence, batch_size * sequence**2)


def name_terms(coefficients: Any) -> dict[str, float | int]:
    """The coefficients by name, without zeros."""
    return {t: int(v) if v.is_integer else float(v) for t, v in zip(TERMS, coefficients, strict=True) if v}


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr  # libraries print; only the answers go to stdout

    def write(answer: Answer) -> None:
        print(json.dumps(answer), file=out, flush=True)

    adapt_transformers()
    for line in sys.stdin:
        known: Answer = {}

        def report_partial(partial: Answer, known: Answer = known) -> None:
            known.update(partial)
            write({"partial": partial})

        try:
            answer = measure(json.loads(line), report_partial)
        except (Exception, SystemExit) as error:
            answer = {**known, "error": describe_error(error)}
        write(answer)
    # Do not wait for threads and processes that the user's code has started.
    os._exit(0)


if __name__ == "__main__":
    main()
