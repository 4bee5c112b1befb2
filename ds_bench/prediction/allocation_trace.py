"""The allocations of a model's forward and backward pass, as ``worker.trace_allocations`` traced them on three layers.

Traces of presets are part of the package (``allocation_traces.json.xz``, written by ``bench/allocation_traces.py``).
A trace of another model is made once by a child process and kept in the user's cache.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ..config.spec import Precision
from ..config.trained_parameters import parse_lora
from ..models.presets import ModelFacts
from ..system.environment import MODEL_PACKAGES, missing_packages
from ..system.helper_programs import run_tool
from . import model_profile
from .formula_profile import MAX_TILE_TOKENS, MIN_TILES
from .model_profile import COUNTING_SECONDS, ModelProfile, evaluate_polynomial

ALLOCATE, FREE, GRADIENT, ENTER, LEAVE, BACKWARD = range(6)
"""Events, as in ``worker.trace_allocations``."""
LAYERS = 3
"""Layers of a traced model."""
_SEGMENTS = (("P", 0), ("F", 0), ("F", 1), ("F", 2), ("H", 0), ("B", 2), ("B", 1), ("B", 0), ("T", 0))
"""Kind and layer of each part of a trace."""
_MIN_BYTES = 2**16
"""Smaller storages are left out: together they take far less than one segment of torch's allocator."""
TABLE_NAME = "allocation_traces.json.xz"
TRACED_RANK = 8191
"""Rank of adapters in a trace. It is prime, and no size of a model is a multiple of it: any rank can take its place."""
_known: dict[str, dict[str, Any]] = {}
"""Answers by key that this process has read or its children made: the user's cache may not be writable."""

Event = tuple[Any, ...]
"""``(ALLOCATE, storage, bytes)``, ``(FREE, storage)``, ``(GRADIENT, parameter, storage)``, ``(ENTER, parameters)``,
``(LEAVE, parameters)`` or ``(BACKWARD,)``. ``~parameter`` belongs to another module and is only read."""
Trace = Mapping[str, Any]
"""An answer of ``worker.trace_allocations`` in one number format."""


class TraceVariant(NamedTuple):
    """The settings, besides sizes, checkpointing and dropout, that decide what a model allocates."""

    lora: str | None = None
    freeze: str | None = None
    """As in ``Workload``."""
    efficient_linear: bool = False
    """DeepSpeed's linear layers for stage 3, which also keep the input of a frozen weight."""
    autocast: bool = False
    """fp32 weights under torch's autocast to 16-bit precision."""
    loss: str | None = None
    """A loss other than the model's own."""


USUAL_TRACE = TraceVariant()


def trace_request(
    facts: ModelFacts,
    seq_length: int,
    *,
    checkpointing: bool,
    dropout: float | None = None,
    variant: TraceVariant = USUAL_TRACE,
) -> dict[str, Any]:
    """Make the request to the child; ``model_profile.request_key`` computes the key of the answer from it."""
    request = model_profile.request_for(facts, seq_length, dropout=dropout)
    chosen = {name: value for name, value in variant._asdict().items() if value}
    if variant.lora is not None:
        chosen["lora"] = ":".join(filter(None, (str(TRACED_RANK), ",".join(parse_lora(variant.lora).modules))))
    return {**request, "checkpointing": checkpointing, **chosen}


def find_trace(
    facts: ModelFacts,
    seq_length: int,
    *,
    checkpointing: bool,
    element_bytes: int,
    dropout: float | None = None,
    variant: TraceVariant = USUAL_TRACE,
    starts_child: bool = True,
) -> Trace | None:
    """Return the trace of a model; None if its layers differ, or if it is not in the package and torch is missing.

    The package has traces of unmodified presets in 16-bit precision, without adapters and with adapters on all linear
    modules. A child process traces everything else, which takes seconds the first time; without ``starts_child``, only
    earlier traces in the user's cache are found.
    """
    request = trace_request(facts, seq_length, checkpointing=checkpointing, dropout=dropout, variant=variant)
    if request.get("whole"):
        return None
    precision: Precision = "bf16" if element_bytes == 2 else "fp32"
    found = _answer(request, precision, starts_child).get(precision)
    if not found or not can_extend(found):
        return None
    return found if variant.lora is None else at_rank(found, parse_lora(variant.lora).rank)


def _answer(request: Mapping[str, Any], precision: Precision, starts_child: bool) -> Mapping[str, Any]:
    """The trace for a request, by number format: from the package, the user's cache or a child, once per process."""
    key = model_profile.request_key(request)
    built_in: Mapping[str, Any] = _built_in().get(key, {})
    if precision in built_in:
        return built_in
    key = f"{key}_{precision}_trace"
    answer = _known.get(key) or model_profile.cached_answer(key)
    if answer is None and starts_child and not missing_packages(MODEL_PACKAGES):
        # Also traced: what other rows with the same model need, at a different stage or with checkpointing.
        shared = {name: value for name, value in request.items() if name != "efficient_linear"}
        is_frozen = any(name in request for name in ("lora", "freeze", "efficient_linear"))
        requests = [
            {**shared, "checkpointing": checkpointing, **linear}
            for checkpointing in sorted({request["checkpointing"], True})
            for linear in [{}, {"efficient_linear": True}][: 1 + is_frozen]
        ]
        answers = make_traces([{**each, "precisions": [precision]} for each in requests])
        for each, made in zip(requests, answers, strict=True):
            made_key = f"{model_profile.request_key(each)}_{precision}_trace"
            _known[made_key] = made
            # A model that cannot be traced never can be; a child that was terminated may succeed next time.
            if not made.get("ended"):
                model_profile.cache_answer(made_key, made)
        answer = _known[key]
    if answer is not None:
        _known[key] = answer
    return answer or {}


def make_traces(
    requests: Sequence[Mapping[str, Any]], timeout_seconds: float = COUNTING_SECONDS
) -> list[dict[str, Any]]:
    """Trace models in a child process; an answer with ``error`` says what could not be traced."""
    reply = run_tool(
        "worker.trace_allocations",
        environment={"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"},
        requests=[{**each, "number": number} for number, each in enumerate(requests)],
        timeout_seconds=timeout_seconds,
    )
    answers = {each.pop("number"): each for each in reply.objects}
    ended = {"error": f"the tracing process {reply.ending}", "ended": True}
    return [answers.get(number, ended) for number in range(len(requests))]


@cache
def _built_in() -> dict[str, Any]:
    data = (files(__package__) / TABLE_NAME).read_bytes()
    return dict(json.loads(lzma.decompress(data))["traces"])


def at_rank(trace: Trace, rank: int) -> Trace:
    """Convert a trace of adapters of rank ``TRACED_RANK`` to a different rank."""

    def scaled(size: float) -> float:
        return size if size % TRACED_RANK else size / TRACED_RANK * rank

    sizes = [{term: scaled(value) for term, value in terms.items()} for terms in trace["sizes"]]
    tensors = {part: [round(scaled(each)) for each in elements] for part, elements in trace["tensors"].items()}
    return {**trace, "sizes": sizes, "tensors": tensors}


def can_extend(trace: Trace) -> bool:
    """Whether the middle layer can represent any number of layers: its neighbors allocate as it does.

    Backward through the first layer allocates less if nothing before it is trained.
    """
    counts = [sum(event[0] == ALLOCATE for event in events) for events in trace["segments"]]
    first_trained = min(
        (event[1] for events in trace["segments"] for event in events if event[0] == GRADIENT), default=0
    )
    like_last = counts[5:7] if first_trained else counts[5:8]
    return len({*counts[1:4]}) == len({*like_last}) == 1


def is_of(trace: Trace, profile: ModelProfile) -> bool:
    """Whether a trace is of a model that has these tensors and trains the same ones."""
    tensors = trace["tensors"]
    if tuple(tensors["before"] + tensors["layer"] * profile.layers + tensors["after"]) != profile.all_tensors:
        return False
    events = _Extension(trace, profile.layers, [0] * len(trace["sizes"])).events()
    return {event[1] for event in events if event[0] == GRADIENT} == set(profile.trained_numbers)


def full_events(trace: Trace, profile: ModelProfile, batch_size: int, seq_length: int) -> list[Event]:
    """Return the events of the whole model, whose parameters are numbered as in ``profile.all_tensors``.

    The middle layer is repeated, the first and the last one are not. Storages are renumbered.
    """
    # A trace has a loss's minimum number of tiles; more tiles, each of the largest size, allocate in the same places.
    tiled = min(batch_size * seq_length, MIN_TILES * MAX_TILE_TOKENS)
    sizes = [
        round(evaluate_polynomial({**terms, "t": 0}, batch_size, seq_length) + terms.get("t", 0) * tiled)
        for terms in trace["sizes"]
    ]
    return list(_Extension(trace, profile.layers, sizes).events())


class _Extension:
    def __init__(self, trace: Trace, layers: int, sizes: Sequence[int]) -> None:
        self.segments, self.sizes, self.layers = trace["segments"], sizes, layers
        self.before, self.per_layer = len(trace["tensors"]["before"]), len(trace["tensors"]["layer"])
        self.owners: list[tuple[int, int]] = []
        """Segment of each traced storage, and its position there."""
        counts: list[int] = []
        for number, events in enumerate(self.segments):
            allocated = sum(event[0] == ALLOCATE for event in events)
            self.owners += [(number, position) for position in range(allocated)]
            counts.append(allocated)
        self.stride = max(counts)
        self.small: set[int] = set()

    def events(self) -> Iterator[Event]:
        last = self.layers - 1
        order = [(0, 0), (1, 0), *((2, depth) for depth in range(1, last)), (3, last), (4, last)]
        order += [(5, last), *((6, depth) for depth in range(last - 1, 0, -1)), (7, 0), (8, 0)]
        for segment, depth in order:
            yield from self._segment(segment, depth)

    def _segment(self, segment: int, depth: int) -> Iterator[Event]:
        position = 0
        for kind, *values in self.segments[segment]:
            if kind == ALLOCATE:
                storage, size = self._number(segment, depth, position), self.sizes[values[0]]
                position += 1
                if size < _MIN_BYTES:
                    self.small.add(storage)
                else:
                    yield ALLOCATE, storage, size
            elif kind == FREE:
                for storage in self._storages(values[0], segment, depth):
                    if storage not in self.small:
                        yield FREE, storage
            elif kind == GRADIENT:
                traced = values[1]
                storages = self._storages(traced, segment, depth) if traced >= 0 else [-1]
                yield GRADIENT, self._parameter(values[0], segment, depth), storages[0]
            elif kind == BACKWARD:
                yield (BACKWARD,)
            else:
                own = tuple(self._parameter(each, segment, depth) for each in values if each >= 0)
                yield kind, own + tuple(~self._parameter(~each, segment, depth) for each in values if each < 0)

    def _number(self, segment: int, depth: int, position: int) -> int:
        kind = _SEGMENTS[segment][0]
        group: int = {"P": 0, "H": 1, "T": 2, "F": 3 + depth, "B": 3 + self.layers + depth}[kind]
        return group * self.stride + position

    def _storages(self, traced: int, segment: int, depth: int) -> list[int]:
        """Storages of the whole model that a traced one represents, seen from a segment at a depth."""
        owner, position = self.owners[traced]
        kind, layer = _SEGMENTS[owner]
        if kind not in "FB":
            return [self._number(owner, 0, position)]
        if _SEGMENTS[segment][0] not in "FB" and layer == 1:  # the head and the end free what each layer left behind
            return [self._number(owner, each, position) for each in range(1, max(2, self.layers - 1))]
        return [self._number(owner, self._depth(layer, segment, depth), position)]

    def _depth(self, layer: int, segment: int, depth: int) -> int:
        """Depth in the whole model of a traced layer, seen from a segment at a depth."""
        kind, own = _SEGMENTS[segment]
        if kind in "FB" and own == 1:
            return depth + layer - 1
        if kind in "FB" and own == 2:
            return (0, self.layers - 2, self.layers - 1)[layer]
        return (0, min(1, self.layers - 1), self.layers - 1)[layer]

    def _parameter(self, traced: int, segment: int, depth: int) -> int:
        if traced < self.before:
            return traced
        layer, place = divmod(traced - self.before, self.per_layer)
        if layer >= LAYERS:
            return traced + (self.layers - LAYERS) * self.per_layer
        return self.before + self._depth(layer, segment, depth) * self.per_layer + place
