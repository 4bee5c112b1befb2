"""Measures what a model keeps for its backward pass, without memory: ``python -m ds_bench.worker.measure_activations``.

One JSON request per line on standard input. The model is built under ``FakeTensorMode`` (shapes and storages, no bytes)
on the CPU device, in its final number format; a saved-tensor hook counts the storages that autograd keeps, as the
ledger of a real run does. From six sizes of batch and sequence follow the coefficients of a polynomial in both.

A request with a ``config`` is of a family whose tensors are known by arithmetic: one and two layers are built, from
which follow the polynomials per layer. Any other names a folder, a model on the Hub or a factory: it is built whole,
its tensors are answered at once (a line with ``partial``), then all but two blocks of each kind are taken out, and
what the second of each kind keeps stands for the others. Every request ends with one line: the answer, or ``error``.

What CUDA keeps differs from the CPU in two ways, which ``_AsOnCuda`` imitates. Not for measuring a real run: that is
``ledger``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from . import model as build
from . import training_loop

TERMS = ("1", "s", "ss", "b", "bs", "bss")
"""Monomials in micro-batch b and sequence length s, as ``activations.Polynomial`` reads them."""
BATCHES = (2, 3)
"""Not 1: slices of a single sequence stay contiguous and are not copied, which makes 8 bytes of difference."""
LOSS_BATCHES = (512, 1024)
"""Many tokens, so that the logits outweigh the LM head's own gradient, which is no temporary of the loss."""
SEQUENCES = (16, 32, 48)
_LARGE_PART = 0.1
"""Of a model's parameters, from which on a list of modules is taken for its blocks."""
_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


Answer = dict[str, Any]


def measure(request: Mapping[str, Any], tell: Callable[[Answer], None]) -> Answer:
    """The answer to one request: tensor sizes and, per number format, the polynomials. See ``activations``.

    ``tell``: gets what is known before the forward passes begin.
    """
    as_there = _AsOnCuda() if request.get("accelerator", "cuda") == "cuda" else contextlib.nullcontext()
    sequences = tuple(request.get("sequences") or SEQUENCES)
    if request.get("config") is None:
        return _measure_whole(request, sequences, as_there, tell)
    shallow, deep = (_names_and_sizes(_build_layers(request, depth, torch.bfloat16)) for depth in (1, 2))
    answer: Answer = {"tensors": _split(shallow, deep), "formats": {}}
    for precision in request["precisions"]:
        dtype = _FORMATS[precision]
        with as_there:
            depths = [_fits(_build_layers(request, depth, dtype), sequences) for depth in (1, 2)]
        answer["formats"][precision] = {name: _by_layer(*(fit[name] for fit in depths)) for name in depths[0]}
    return answer


class _AsOnCuda(TorchFunctionMode):
    """Keeps what CUDA's kernels keep: of dropout a mask of one byte per element (native_dropout), where the CPU keeps
    one of the number format; of fused attention no scores, which the CPU keeps where attention has dropout."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.nn.functional.dropout:
            given = _arguments(("input", "p", "training", "inplace"), args, {"p": 0.5, "training": True, **kwargs})
            if given["training"] and 0 < given["p"] < 1:
                return torch.native_dropout(given["input"], given["p"], True)[0]
        if function is torch.nn.functional.scaled_dot_product_attention:
            given = _arguments(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, kwargs)
            return function(**{**given, "dropout_p": 0.0})
        return function(*args, **kwargs)


def _arguments(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**kwargs, **dict(zip(names, args, strict=False))}


def _config_of_depth(request: Mapping[str, Any], layers: int) -> Any:
    from transformers import AutoConfig

    if request.get("path"):
        config = AutoConfig.from_pretrained(request["path"], trust_remote_code=request.get("trust_remote_code", False))
    else:
        config = AutoConfig.for_model(request["model_type"], **request["config"])
    config.num_hidden_layers = layers
    if isinstance(kinds := getattr(config, "layer_types", None), list):
        config.layer_types = kinds[:layers]
    config.use_cache = False
    return config


def _build_layers(request: Mapping[str, Any], layers: int, dtype: torch.dtype) -> torch.nn.Module:
    return _build(request, dtype, lambda: _config_of_depth(request, layers))[0]


def _build(
    request: Mapping[str, Any], dtype: torch.dtype, make_config: Callable[[], Any]
) -> tuple[torch.nn.Module, build.MakeBatch | None]:
    """The model on fake tensors in training mode, and a factory's own function for batches.

    ``make_config``: not called for a factory.
    """
    make_batch = None
    with FakeTensorMode():
        if request.get("factory"):
            model, make_batch = _from_factory(request["factory"], dtype)
        else:
            model = _from_config(make_config(), dtype, trusted=bool(request.get("trust_remote_code", False)))
    if request.get("dropout") is not None:
        build.set_dropouts(model, request["dropout"])
    return model.train(), make_batch


def _from_factory(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, build.MakeBatch | None]:
    """What a factory returns, in this number format, without the values that initialisation draws."""
    from transformers import PreTrainedModel
    from transformers.initialization import no_init_weights

    with no_init_weights(), _conversion_of_fakes():
        model, make_batch = build.call_factory(name)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.tie_weights()  # which its constructor leaves to the initialisation
        return model.to(dtype=dtype), make_batch


@contextlib.contextmanager
def _conversion_of_fakes() -> Iterator[None]:
    """``Module.to`` swaps tensors in place and cannot with fake ones: here it puts new parameters in their places."""
    converted: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}  # by the first of each: ties stay
    original = torch.nn.Module._apply

    def apply(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(function)  # type: ignore[no-untyped-call]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in converted:
                    made = torch.nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                    converted[id(parameter)] = parameter, made
                module._parameters[name] = converted[id(parameter)][1]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else function(buffer)
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = original  # type: ignore[method-assign]


def _from_config(config: Any, dtype: torch.dtype, *, trusted: bool) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config.use_cache = False
    with no_init_weights():
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trusted)
        model.tie_weights()  # type: ignore[operator]
    return model


def _adapt_transformers() -> None:
    """Takes out what looks into values, which fake tensors have not."""
    from transformers import masking_utils
    from transformers.integrations import moe

    # Real runs find no packed sequences in the position ids and so need no mask; fake ids cannot be looked into.
    masking_utils.find_packed_sequence_indices = lambda *_args, **_kwargs: None
    known = moe._can_use_grouped_mm

    def can_use_grouped_mm(given: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        # The shape rule of grouped_mm knows 16-bit only; the fallback saves the same tensors.
        return given.dtype is not torch.float32 and bool(known(given, *args, **kwargs))

    moe._can_use_grouped_mm = can_use_grouped_mm


def _names_and_sizes(model: torch.nn.Module) -> list[tuple[str, int]]:
    return [(name, parameter.numel()) for name, parameter in model.named_parameters()]


def _split(shallow: list[tuple[str, int]], deep: list[tuple[str, int]]) -> dict[str, list[int]]:
    """Elements of the tensors before, in one of, and after the layers, in DeepSpeed's order."""
    known = {name for name, _ in shallow}
    added = [number for number, (name, _) in enumerate(deep) if name not in known]
    first, last = added[0], added[-1] + 1
    if added != list(range(first, last)) or len(deep) - len(shallow) != last - first:
        raise ValueError("the layers of this architecture do not lie together")
    sizes = [size for _, size in deep]
    per_layer = last - first
    return {"before": sizes[: first - per_layer], "layer": sizes[first:last], "after": sizes[last:]}


def _measure_whole(
    request: Mapping[str, Any],
    sequences: tuple[int, ...],
    as_there: contextlib.AbstractContextManager[Any],
    tell: Callable[[Answer], None],
) -> Answer:
    """Of a model that is built as a run builds it."""

    def make_config() -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(request["path"], trust_remote_code=request.get("trust_remote_code", False))

    model, make_batch = _build(request, torch.bfloat16, make_config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    answer: Answer = {
        "tensors": {"before": [parameter.numel() for parameter in trained], "layer": [], "after": []},
        "frozen": sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        "tied": _is_tied(model),
        "layers": max(1, len(_blocks(model))),
        "formats": {},
    }
    tell(answer)
    for precision in request["precisions"]:
        dtype = _FORMATS[precision]
        if dtype is not torch.bfloat16:
            model, make_batch = _build(request, dtype, make_config)
        blocks = _Blocks(model, make_batch)
        with as_there:
            answer["formats"][precision] = _whole_fits(blocks, sequences)
    return answer


def _is_tied(model: torch.nn.Module) -> bool:
    """Whether the first tensor is input embedding and LM head at once."""
    with contextlib.suppress(Exception):  # a model of another library need not have either
        first, head = next(model.parameters()), model.get_output_embeddings()  # type: ignore[operator]
        return head is not None and head.weight is first
    return False


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that a model repeats: members of its large lists of modules that lie in no other."""
    whole = sum(parameter.numel() for parameter in model.parameters())
    found: list[torch.nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, torch.nn.ModuleList) or id(module) in inside:
            continue
        if sum(parameter.numel() for parameter in module.parameters()) >= _LARGE_PART * whole:
            inside.update(map(id, module.modules()))
            found.extend(module)
    return found


class _Blocks:
    """A model with at most two blocks of each kind left, and what each of them keeps."""

    def __init__(self, model: torch.nn.Module, make_batch: build.MakeBatch | None) -> None:
        self.model, self.make_batch = model, make_batch
        every = _blocks(model)
        self.count = max(1, len(every))
        self.left, self.stands_for = _shorten(model, every)
        """Blocks that are left; of how many each is the measure: the first of a kind, which keeps what all share, of
        none where there is a second."""
        self._current = 0
        for number, block in enumerate(self.left):
            block.register_forward_hook(lambda *_given, number=number: setattr(self, "_current", number + 1))

    def saved_bytes(self, batch: int, sequence: int) -> list[int]:
        """Bytes saved up to the end of each block, from the end of the one before it on; last, behind all of them."""
        self._current = 0
        shares = [0] * (len(self.left) + 1)

        def claim(size: int) -> None:
            shares[self._current] += size

        _saved_bytes(self.model, batch, sequence, claim, self.make_batch)
        return shares


def _shorten(model: torch.nn.Module, every: list[torch.nn.Module]) -> tuple[list[torch.nn.Module], list[int]]:
    """Takes blocks out, where the model is one of Transformers with a single list of them, whose loop bears it."""
    config = getattr(model, "config", None)
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and every and list(m) == every]
    depth = next((name for name in ("num_hidden_layers", "n_layer") if getattr(config, name, None) == len(every)), None)
    if config is None or len(lists) != 1 or depth is None:
        return every, [1] * len(every)
    types = getattr(config, "layer_types", None)
    kinds = [_kind(block, types[number] if types else None) for number, block in enumerate(every)]
    seen: dict[Any, list[int]] = {}
    for number, kind in enumerate(kinds):
        seen.setdefault(kind, []).append(number)
    left = sorted(number for numbers in seen.values() for number in numbers[:2])
    stands_for = {numbers[:2][-1]: len(numbers) for numbers in seen.values()}
    blocks = lists[0]
    for number in sorted(set(range(len(every))) - set(left), reverse=True):
        del blocks[number]
    setattr(config, depth, len(left))
    with contextlib.suppress(AttributeError):  # where it follows from the depth
        config.layer_types = [types[number] for number in left] if types else types
    return [every[number] for number in left], [stands_for.get(number, 0) for number in left]


def _kind(block: torch.nn.Module, named: str | None) -> Any:
    """Blocks of one kind keep the same: equal classes inside, equal tensors, equal numbers but the block's own."""
    modules = tuple(
        (type(module).__name__, tuple(sorted((k, v) for k, v in vars(module).items() if _tells(k, v))))
        for module in block.modules()
    )
    return named, modules, tuple((name, tuple(tensor.shape)) for name, tensor in block.named_parameters())


def _tells(name: str, value: object) -> bool:
    return isinstance(value, bool | int | float | str) and name not in ("layer_idx", "layer_id", "layer_number", "idx")


def _whole_fits(blocks: _Blocks, sequences: tuple[int, ...]) -> dict[str, Any]:
    sizes = [(batch, sequence) for batch in BATCHES for sequence in sequences]
    large = [(batch, sequence) for batch in LOSS_BATCHES for sequence in sequences]
    plain = _Saved.of(blocks, sizes)
    peak = _fit(large, [_loss_peak_bytes(blocks.model, *size, blocks.make_batch) for size in large])
    fits: dict[str, Any] = {
        "plain": plain.by_layer(blocks.count),
        "loss": plain.by_layer(blocks.count, _sum([(1, peak), (-1, plain.measured)])),
        "largest_layer": {"fixed": _named(plain.largest_block), "per_layer": {}},
    }
    with contextlib.suppress(Exception):  # not every model can; a run that asks for it says so
        blocks.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        fits["checkpointed"] = _Saved.of(blocks, sizes).by_layer(blocks.count)
    return fits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """Coefficients of bytes saved."""

    measured: list[Fraction]
    """Of the shortened model."""
    total: list[Fraction]
    """Of the whole model."""
    in_blocks: list[Fraction]
    """Of ``total``, what the blocks keep."""
    largest_block: list[Fraction]

    @classmethod
    def of(cls, blocks: _Blocks, sizes: list[tuple[int, int]]) -> _Saved:
        counted = [blocks.saved_bytes(*size) for size in sizes]
        shares = [_fit(sizes, [each[number] for each in counted]) for number in range(len(blocks.left))]
        measured = _fit(sizes, [sum(each) for each in counted])
        weighed = list(zip(blocks.stands_for, shares, strict=True))
        last = [share for weight, share in weighed if weight] or [measured]
        return cls(
            measured=measured,
            total=_sum([(1, measured), *((max(0, weight - 2), share) for weight, share in weighed)]),
            in_blocks=_sum(weighed) if weighed else measured,
            largest_block=max(last, key=lambda share: _evaluate(share, *sizes[-1])),
        )

    def by_layer(self, layers: int, extra: list[Fraction] | None = None) -> dict[str, Any]:
        """``fixed`` + layers × ``per_layer``, the blocks' mean. ``extra``: further bytes that are no block's."""
        fixed = _sum([(1, self.total), (-1, self.in_blocks), *([(1, extra)] if extra else [])])
        return {"fixed": _named(fixed), "per_layer": _named([value / layers for value in self.in_blocks])}


def _sum(weighed: Iterable[tuple[int, list[Fraction]]]) -> list[Fraction]:
    total = [Fraction(0)] * len(TERMS)
    for weight, values in weighed:
        total = [a + weight * b for a, b in zip(total, values, strict=True)]
    return total


def _evaluate(coefficients: list[Fraction], batch: int, sequence: int) -> Fraction:
    return sum((a * b for a, b in zip(coefficients, _monomials(batch, sequence), strict=True)), Fraction(0))


def _fits(model: torch.nn.Module, sequences: tuple[int, ...]) -> dict[str, list[Fraction]]:
    sizes = [(batch, sequence) for batch in BATCHES for sequence in sequences]
    large = [(batch, sequence) for batch in LOSS_BATCHES for sequence in sequences]
    fits = {"plain": _fit(sizes, [_saved_bytes(model, *size) for size in sizes])}
    fits["loss"] = _fit(large, [_loss_peak_bytes(model, *size) for size in large])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    fits["checkpointed"] = _fit(sizes, [_saved_bytes(model, *size) for size in sizes])
    return fits


def _fake_batch(
    batch: int, sequence: int, model: torch.nn.Module | None = None, make_batch: build.MakeBatch | None = None
) -> dict[str, torch.Tensor]:
    """Token ids, or what a factory makes for its ``model``."""
    if model is not None and make_batch is not None:
        dtype, device = next(model.parameters()).dtype, torch.device("cpu")
        return training_loop.make_batches(
            make_batch, batch_size=batch, seq_length=sequence, seed=0, rank=0, count=1, device=device, dtype=dtype
        )[0]
    ids = torch.zeros((batch, sequence), dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _mode_of(model: torch.nn.Module) -> FakeTensorMode:
    mode: FakeTensorMode = next(model.parameters()).fake_mode  # type: ignore[attr-defined]
    return mode


def _saved_bytes(
    model: torch.nn.Module,
    batch: int,
    sequence: int,
    claim: Callable[[int], None] = lambda _size: None,
    make_batch: build.MakeBatch | None = None,
) -> int:
    """Bytes of the storages autograd saves in one forward pass that are not parameters, as ``ledger`` counts them.

    ``claim``: gets the bytes of each as it is saved.
    """
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor._base if tensor._base is not None else tensor
        storage = tensor.untyped_storage()
        if not isinstance(base, torch.nn.Parameter) and storage._cdata not in known | saved.keys():
            saved[storage._cdata] = storage
            claim(int(storage.nbytes()))
        return tensor

    with _mode_of(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**_fake_batch(batch, sequence, model, make_batch))
    del output
    return sum(int(storage.nbytes()) for storage in saved.values())


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that operations made and that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_ for id_ in map(_storage_id, tree_flatten((args, kwargs))[0]) if id_ is not None}
        result = function(*args, **(kwargs or {}))
        for item in tree_flatten(result)[0]:
            if isinstance(item, torch.Tensor) and _storage_id(item) not in given:
                self._add(item.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        identity, size = storage._cdata, storage.nbytes()
        if identity in self._known:
            return
        self._known.add(identity)
        self.now += size
        weakref.finalize(storage, self._remove, identity, size)

    def _remove(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now -= size


def _storage_id(item: object) -> int | None:
    return item.untyped_storage()._cdata if isinstance(item, torch.Tensor) else None


class _FirstGradientError(Exception):
    """Backward has come to the first parameter: the loss and its temporaries are behind it."""


def _loss_peak_bytes(
    model: torch.nn.Module, batch: int, sequence: int, make_batch: build.MakeBatch | None = None
) -> int:
    """Peak of live activations and temporaries from the first operation to the first parameter's gradient."""

    def stop(_gradient: torch.Tensor) -> None:
        raise _FirstGradientError

    with _mode_of(model), _Live() as live:
        inputs = _fake_batch(batch, sequence, model, make_batch)
        with _hooks(model, stop), contextlib.suppress(_FirstGradientError):
            training_loop.loss_of(model(**inputs)).backward()  # type: ignore[no-untyped-call]
    return int(live.peak)


@contextlib.contextmanager
def _hooks(model: torch.nn.Module, call: Callable[[torch.Tensor], None]) -> Iterator[None]:
    handles = [
        parameter.register_hook(call)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _fit(sizes: list[tuple[int, int]], values: list[int]) -> list[Fraction]:
    """Coefficients of ``TERMS`` that give exactly these values at as many sizes (batch, sequence)."""
    import sympy

    solution = sympy.Matrix([_monomials(*size) for size in sizes]).LUsolve(sympy.Matrix(values))
    return [Fraction(int(value.p), int(value.q)) for value in solution]


def _monomials(batch: int, sequence: int) -> tuple[int, ...]:
    return (1, sequence, sequence**2, batch, batch * sequence, batch * sequence**2)


def _by_layer(one: list[Fraction], two: list[Fraction]) -> dict[str, dict[str, float | int]]:
    """``fixed`` + layers × ``per_layer``."""
    per_layer = [b - a for a, b in zip(one, two, strict=True)]
    fixed = [a - each for a, each in zip(one, per_layer, strict=True)]
    return {"fixed": _named(fixed), "per_layer": _named(per_layer)}


def _named(values: list[Fraction]) -> dict[str, float | int]:
    return {t: int(v) if v.denominator == 1 else float(v) for t, v in zip(TERMS, values, strict=True) if v}


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr

    def write(answer: Answer) -> None:
        print(json.dumps(answer), file=out, flush=True)

    _adapt_transformers()
    for line in sys.stdin:
        known: Answer = {}

        def tell(partial: Answer, known: Answer = known) -> None:
            known.update(partial)
            write({"partial": partial})

        try:
            answer = measure(json.loads(line), tell)
        except Exception as error:
            lines = [text.strip() for text in str(error).splitlines() if text.strip()]
            answer = {**known, "error": f"{type(error).__name__}: {lines[0][:300] if lines else ''}"}
        write(answer)


if __name__ == "__main__":
    main()
