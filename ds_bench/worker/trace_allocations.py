"""Traces the tensors that a model's passes allocate and free: ``python -m ds_bench.worker.trace_allocations``.

Reads one JSON request per line, like ``measure_activations``. A request also has ``checkpointing``, and may have
``lora``, ``freeze``, ``efficient_linear`` (DeepSpeed's linear layers for stage 3), ``autocast`` and ``loss``. Prints
each answer when it is ready, on one line with the ``number`` of its request: the events of a three-layer model in each
number format, with sizes as polynomials in micro-batch and sequence, and in ``t``, the tokens of all tiles of a tiled
loss. ``prediction.allocation_trace`` reads them and repeats the middle layer. The model runs on fake tensors; its
passes are traced at six sizes, which must produce the same events.

Events are lists of whole numbers, segment by segment (``SEGMENTS``):

======================= ===============================================================
``[ALLOCATE, size]``    a storage; ``size``: index in the answer's ``sizes``. Storages are numbered in this order
``[FREE, storage]``     a storage is freed
``[GRADIENT, p, s]``    the gradient of parameter ``p`` is complete in storage ``s``, and is then dropped
``[ENTER, *p]``         a module with these parameters, or none, begins; ``[LEAVE, *p]``: one with parameters ends;
                        ``~p``: a parameter of another module, which this one reads
``[BACKWARD]``          ``backward`` is called
======================= ===============================================================
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ..config import trained_parameters
from . import measure_activations, replaced_layers, training_loop
from . import model as build
from .failure import describe_error
from .library_versions import adapt_transformers

ALLOCATE, FREE, GRADIENT, ENTER, LEAVE, BACKWARD = range(6)
SEGMENTS = ("P", "F0", "F1", "F2", "H", "B2", "B1", "B0", "T")
"""Before the layers, forward through each layer, the head and the loss, backward through the layers, and the rest."""
LAYERS = 3
_DQ_ROWS = 128
"""FlashAttention's backward pass pads the sequence to a multiple of this (csrc/flash_attn/flash_api.cpp,
``seqlen_q_rounded``)."""

Event = list[int]


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Events of the storages that operations make; parameters make none."""

    def __init__(self, parameters: list[torch.nn.Parameter], tile_tokens: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments: list[tuple[str, list[Event]]] = [("P", [])]
        self.sizes: list[int] = []
        self.of_tiles: list[bool] = []
        """Whether each storage belongs to one tile of a tiled loss."""
        self._tile_tokens = tile_tokens
        self._in_backward = False
        self._known: dict[int, int] = {}
        self._parameters = {storage for storage, _ in measure_activations.storages(parameters)}

    def note(self, *event: int) -> None:
        self.segments[-1][1].append(list(event))

    def begin(self, name: str, *, backward: bool) -> None:
        self._in_backward = self._in_backward or backward
        if backward == self._in_backward:  # not a layer that is computed again
            self.segments.append((name, []))

    def allocate(self, size: int, *, is_of_tile: bool = False) -> int:
        self.sizes.append(size)
        self.of_tiles.append(is_of_tile)
        self.note(ALLOCATE, len(self.sizes) - 1)
        return len(self.sizes) - 1

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage; -1 for one that was not traced."""
        return self._known.get(int(tensor.untyped_storage()._cdata), -1)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:  # most calls, and none of them allocates
            return function(*args)
        inputs = {identity for identity, _ in measure_activations.storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        temporaries = []
        if "flash_attention_for_cpu_backward" in function._schema.name:
            # CUDA's kernel also allocates the query's gradient in fp32, and the softmax's.
            batch, heads, length, width = args[1].shape
            rows = 4 * batch * heads * -(-length // _DQ_ROWS) * _DQ_ROWS
            temporaries = [self.allocate(rows * width), self.allocate(rows)]
        tensors = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]
        is_of_tile = self.segments[-1][0] == "H" and any(self._tile_tokens in each.shape for each in tensors)
        for identity, storage in measure_activations.storages(result):
            if identity not in inputs and identity not in self._known and identity not in self._parameters:
                self._known[identity] = self.allocate(storage.nbytes(), is_of_tile=is_of_tile)
                weakref.finalize(storage, self._free, identity)
        for number in temporaries:
            self.note(FREE, number)
        return result

    def _free(self, identity: int) -> None:
        self.note(FREE, self._known.pop(identity))


def trace(request: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return ``segments``, ``sizes`` and ``tensors``: the elements of the parameters before, in and after the layers.

    Raises ValueError if the events depend on the input size or the layers are not contiguous, and the model's errors.
    """
    autocast = bool(request.get("autocast"))
    dtype = torch.float32 if autocast else measure_activations.FORMATS[precision]
    model, _ = measure_activations.build_fake_model(request, dtype, LAYERS)
    choice = trained_parameters.read_choice(request.get("lora"), request.get("freeze"))
    if choice is not None:
        fake_mode = next(model.parameters()).fake_mode  # type: ignore[attr-defined]
        with fake_mode, measure_activations.converting_fake_parameters():
            build.choose_trained(model, choice, seed=0)
    blocks = build.find_blocks(model, 0.0)
    tensors = measure_activations.split_by_layer(model, blocks)
    if request["checkpointing"]:
        build.enable_checkpointing(model)
    replaced_layers.install_loss(model, request.get("loss", "model"))
    if request.get("loss") == "tiled":
        measure_activations.adapt_tiled_loss()
    current = _install(model, blocks)
    sizes = [(batch, length) for batch in measure_activations.BATCHES for length in request["sequences"]]
    with measure_activations.linear_of_stage_3() if request.get("efficient_linear") else contextlib.nullcontext():
        how = {"autocast": autocast, "loss_name": request.get("loss", "model")}
        runs = [_run(model, current, *size, **how) for size in sizes]
    segments = runs[0][0]
    if any(each != segments for each, _ in runs) or tuple(name for name, _ in segments) != SEGMENTS:
        raise ValueError("the allocations of this model depend on the input size")
    table: dict[str, int] = {}
    polynomials, of_tiles = [], current[0].of_tiles
    for values, is_of_tile in zip(zip(*(bytes_ for _, bytes_ in runs), strict=True), of_tiles, strict=True):
        terms = measure_activations.name_terms(measure_activations.fit_polynomial(sizes, list(values)))
        if is_of_tile:
            terms = {"t": terms.pop("bs"), **terms}
        polynomials.append(table.setdefault(json.dumps(terms), len(table)))
    for _, events in segments:
        for event in events:
            if event[0] == ALLOCATE:
                event[1] = polynomials[event[1]]
    sizes = [json.loads(terms) for terms in table]
    return {"segments": [events for _, events in segments], "sizes": sizes, "tensors": tensors}


def _install(model: torch.nn.Module, blocks: list[torch.nn.Module]) -> list[_Tracer]:
    """Install hooks that report to the tracer in the returned list, which is empty: each run puts its own there."""
    current: list[_Tracer] = []
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}

    def gradient(parameter: torch.nn.Parameter) -> None:
        assert parameter.grad is not None
        current[0].note(GRADIENT, numbers[parameter], current[0].number_of(parameter.grad))
        parameter.grad = None

    for parameter in numbers:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gradient)  # type: ignore[no-untyped-call]

    def enter_backward(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """A module whose output is a mapping, for which torch calls no hook, begins with each gradient of its tensors.

        Such modules are the outermost ones, without parameters of their own.
        """
        for tensor in output.values() if isinstance(output, Mapping) else ():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: current[0].note(ENTER))  # type: ignore[no-untyped-call]

    for module in model.modules():
        owned = [numbers[parameter] for parameter in module.parameters(recurse=False)]
        # peft's layer reads the number format of its first adapter.
        owned += [~numbers[each.weight] for each in getattr(module, "lora_A", {}).values()]
        for register in (module.register_forward_pre_hook, module.register_full_backward_pre_hook):
            register(lambda *_, owned=owned: current[0].note(ENTER, *owned))
        module.register_forward_hook(enter_backward)
        if owned:
            for register_end in (module.register_forward_hook, module.register_full_backward_hook):
                register_end(lambda *_, owned=owned: current[0].note(LEAVE, *owned))

    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, n=number: current[0].begin(f"F{n}", backward=False))
        block.register_full_backward_pre_hook(lambda *_, n=number: current[0].begin(f"B{n}", backward=True))
    blocks[-1].register_forward_hook(lambda *_: current[0].begin("H", backward=False))

    def end_first() -> None:
        # Called right away if nothing before the layers is trained, because the layer's input then needs no gradient.
        if current[0].segments[-1] != ("B0", []):
            current[0].begin("T", backward=True)

    blocks[0].register_full_backward_hook(lambda *_: end_first())
    return current


def _run(
    model: torch.nn.Module,
    current: list[_Tracer],
    batch_size: int,
    sequence: int,
    *,
    autocast: bool,
    loss_name: str,
) -> tuple[list[tuple[str, list[Event]]], list[int]]:
    """One forward and backward pass: the segments, and the bytes of each storage."""
    tokens = batch_size * sequence
    tile_tokens = tokens // replaced_layers.MIN_TILES if loss_name == "tiled" else None
    parameters = list(model.parameters())
    tracer = _Tracer(parameters, tile_tokens)
    current[:] = [tracer]
    with parameters[0].fake_mode, _cuda_kernels(), tracer:  # type: ignore[attr-defined]
        batch = measure_activations.make_fake_tokens(batch_size, sequence)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = training_loop.loss_of(model(**batch))
        tracer.note(BACKWARD)
        with warnings.catch_warnings():  # the embedding's inputs have no gradient
            warnings.simplefilter("ignore")
            loss.backward()  # type: ignore[no-untyped-call]
        for name in SEGMENTS[len(tracer.segments) :]:  # missing without gradients in or before the first layers
            tracer.begin(name, backward=True)
        del loss, batch
    return tracer.segments, tracer.sizes


@contextlib.contextmanager
def _cuda_kernels() -> Iterator[None]:
    """Imitate CUDA as ``measure_activations`` does, but with patches: a function mode is not active while backward
    recomputes a layer."""

    def imitation(function: Any) -> Any:
        return lambda *args, **kwargs: measure_activations.imitate_cuda(function, args, kwargs)

    with contextlib.ExitStack() as patches:
        for owner, name in measure_activations.IMITATED:
            patches.enter_context(mock.patch.object(owner, name, imitation(getattr(owner, name))))
        yield


def _answer(line: str) -> str:
    request = json.loads(line)
    try:
        answer: dict[str, Any] = {name: trace(request, name) for name in request["precisions"]}
    except (Exception, SystemExit) as error:
        answer = {"error": describe_error(error)}
    return json.dumps({"number": request["number"], **answer})


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print; only the answers go to stdout
    adapt_transformers()
    lines = sys.stdin.readlines()
    cores = min(len(lines), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("fork")) as pool:
        for answer in as_completed([pool.submit(_answer, line) for line in lines]):
            print(answer.result(), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
