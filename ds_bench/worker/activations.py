"""Measures what a model keeps for its backward pass, without memory: ``python -m ds_bench.worker.activations``.

One JSON request per line on standard input, one JSON answer per line on standard output. A model of one and of two
layers is built under ``FakeTensorMode`` (shapes and storages, no bytes) on the CPU device, in its final number format;
a saved-tensor hook counts the storages that autograd keeps, as the ledger of a real run does. From six sizes of batch
and sequence follow the coefficients of a polynomial in both, and from two depths those per layer. Not for measuring a
real run: that is ``ledger``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

TERMS = ("1", "s", "ss", "b", "bs", "bss")
"""Monomials in micro-batch b and sequence length s, as ``activations.Polynomial`` reads them."""
BATCHES = (2, 3)
"""Not 1: slices of a single sequence stay contiguous and are not copied, which makes 8 bytes of difference."""
LOSS_BATCHES = (512, 1024)
"""Many tokens, so that the logits outweigh the LM head's own gradient, which is no temporary of the loss."""
SEQUENCES = (16, 32, 48)
_ATTENTION_DROPOUTS = ("attn_pdrop", "attention_dropout")
"""With it the CPU's attention keeps every score, which CUDA's does not: left out."""
_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one request: tensor sizes and, per number format, the three polynomials. See ``activations``."""
    sequences = tuple(request.get("sequences") or SEQUENCES)
    shallow, deep = (_names_and_sizes(_build(request, depth, torch.bfloat16)) for depth in (1, 2))
    answer: dict[str, Any] = {"tensors": _split(shallow, deep), "formats": {}}
    for precision in request["precisions"]:
        dtype = _FORMATS[precision]
        depths = [_fits(_build(request, depth, dtype), sequences) for depth in (1, 2)]
        answer["formats"][precision] = {name: _by_layer(*(fit[name] for fit in depths)) for name in depths[0]}
    return answer


def _config(request: Mapping[str, Any], layers: int) -> Any:
    from transformers import AutoConfig

    if request.get("path"):
        config = AutoConfig.from_pretrained(request["path"], trust_remote_code=request.get("trust_remote_code", False))
    else:
        config = AutoConfig.for_model(request["model_type"], **request["config"])
    config.num_hidden_layers = layers
    if isinstance(kinds := getattr(config, "layer_types", None), list):
        config.layer_types = kinds[:layers]
    config.use_cache = False
    for name in _ATTENTION_DROPOUTS:
        if getattr(config, name, 0.0):
            setattr(config, name, 0.0)
    return config


def _build(request: Mapping[str, Any], layers: int, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, masking_utils
    from transformers.initialization import no_init_weights
    from transformers.integrations import moe

    # Real runs find no packed sequences in the position ids and so need no mask; fake ids cannot be looked into.
    masking_utils.find_packed_sequence_indices = lambda *_args, **_kwargs: None
    if dtype is torch.float32:  # the shape rule of grouped_mm knows 16-bit only; the fallback saves the same tensors
        moe._can_use_grouped_mm = lambda *_args, **_kwargs: False
    trusted = bool(request.get("trust_remote_code", False))
    with FakeTensorMode(), no_init_weights():
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            _config(request, layers), dtype=dtype, trust_remote_code=trusted
        )
        model.tie_weights()  # type: ignore[operator]
    return model.train()


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


def _fits(model: torch.nn.Module, sequences: tuple[int, ...]) -> dict[str, list[Fraction]]:
    sizes = [(batch, sequence) for batch in BATCHES for sequence in sequences]
    large = [(batch, sequence) for batch in LOSS_BATCHES for sequence in sequences]
    fits = {"plain": _fit(sizes, [_saved_bytes(model, *size) for size in sizes])}
    fits["loss"] = _fit(large, [_loss_peak_bytes(model, *size) for size in large])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    fits["checkpointed"] = _fit(sizes, [_saved_bytes(model, *size) for size in sizes])
    return fits


def _fake_batch(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros((batch, sequence), dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _mode_of(model: torch.nn.Module) -> FakeTensorMode:
    mode: FakeTensorMode = next(model.parameters()).fake_mode  # type: ignore[attr-defined]
    return mode


def _saved_bytes(model: torch.nn.Module, batch: int, sequence: int) -> int:
    """Bytes of the storages autograd saves in one forward pass that are not parameters, as ``ledger`` counts them."""
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor._base if tensor._base is not None else tensor
        storage = tensor.untyped_storage()
        if not isinstance(base, torch.nn.Parameter) and storage._cdata not in known:
            saved[storage._cdata] = storage
        return tensor

    with _mode_of(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**_fake_batch(batch, sequence))
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


def _loss_peak_bytes(model: torch.nn.Module, batch: int, sequence: int) -> int:
    """Peak of live activations and temporaries from the first operation to the first parameter's gradient."""

    def stop(_gradient: torch.Tensor) -> None:
        raise _FirstGradientError

    with _mode_of(model), _Live() as live:
        inputs = _fake_batch(batch, sequence)
        with _hooks(model, stop), contextlib.suppress(_FirstGradientError):
            loss = model(**inputs).loss
            loss.backward()
    return int(live.peak)


@contextlib.contextmanager
def _hooks(model: torch.nn.Module, call: Callable[[torch.Tensor], None]) -> Iterator[None]:
    handles = [
        parameter.register_hook(call)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _fit(sizes: list[tuple[int, int]], values: list[int]) -> list[Fraction]:
    """Coefficients of ``TERMS`` that give exactly these values (Gauss and Jordan, in fractions)."""
    rows = [
        [Fraction(term) for term in _monomials(*size)] + [Fraction(v)] for size, v in zip(sizes, values, strict=True)
    ]
    for column in range(len(TERMS)):
        pivot = next(number for number in range(column, len(rows)) if rows[number][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for number, row in enumerate(rows):
            if number != column:
                rows[number] = [a - row[column] * b for a, b in zip(row, rows[column], strict=True)]
    return [row[-1] for row in rows]


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
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line))
        except Exception as error:
            lines = [text.strip() for text in str(error).splitlines() if text.strip()]
            answer = {"error": f"{type(error).__name__}: {lines[0][:300] if lines else ''}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
