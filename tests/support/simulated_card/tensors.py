"""Gives each tensor the device that it would have. Nothing is a subclass, and all bytes are in the host's memory.

``CARD.live`` has the storages on the card. One dispatch mode per rank adds the results of every operation that requests
a card or reads a tensor on it; ``Tensor.device`` and its relatives look there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .memory import CARD

_MAY_MIX_DEVICES = (
    *("copy_", "_to_copy", "_foreach_copy", "index", "index_put", "set_", "resize_", "is_same_size", "equal"),
    *("_pin_memory", "is_pinned", "record_stream", "_has_compatible", "lift_fresh"),
)
"""How the names of operations begin that CUDA allows on tensors of different devices."""
_SIZED_AHEAD_BYTES = 16 * 2**20
"""If an operation reads more, or makes a tensor from nothing, its result is sized before it runs."""


def install(torch: Any) -> None:  # noqa: C901 - one function for each method of a tensor that is replaced
    from torch.utils._python_dispatch import TorchDispatchMode

    base, plain_device, real_device = torch._C.TensorBase, torch.device, torch._C.TensorBase.device.__get__
    host, card_devices = plain_device("cpu"), [plain_device("cuda", index) for index in range(16)]
    tensor_type = torch.Tensor
    newborn: set[int] = set()
    """Storages that C++ requested on "cpu" within the running operation, with the options of a tensor on the card: the
    attention mask, zeros for a missing gradient. They belong to the card once they meet a tensor there."""
    copying_to_host, making_ddp = False, 0

    def storage_of(tensor: Any) -> Any:
        """None for subclasses that wrap other tensors (DTensor, FakeTensor) and have a device of their own."""
        if type(tensor) is not tensor_type and hasattr(type(tensor), "__tensor_flatten__"):
            return None
        try:
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, functorch
            return None

    def is_on_card(tensor: Any) -> bool:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if CARD.live and (storage := storage_of(tensor)) is not None:
            return storage._cdata in CARD.live
        return bool(real_device(tensor).type == "cuda")

    def device(tensor: Any) -> Any:
        real = real_device(tensor)
        return card_devices[CARD.index] if real.type == "cpu" and is_on_card(tensor) else real

    def place_of(wanted: Any) -> Any:
        """The device of an argument; None if it names none."""
        if isinstance(wanted, bool) or not isinstance(wanted, (str, int, plain_device)):
            return None
        place = card_devices[wanted] if isinstance(wanted, int) else plain_device(wanted)
        return card_devices[CARD.index] if place.type == "cuda" and place.index is None else place

    def tensors_in(values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            if isinstance(value, tensor_type):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from tensors_in(value)

    # ------------------------------------------------------------------ every operation

    class CardMode(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._call: Any = None

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented  # the subclass comes first, and what it calls comes here
            given, kwargs = kwargs or {}, dict(kwargs or {})
            wanted = given.get("device")
            if wanted is not None and wanted.type == "cuda":
                kwargs["device"] = host
            if given.get("pin_memory"):
                kwargs["pin_memory"] = False
            if (call := _python_call()) != self._call:
                self._call = call
                newborn.clear()
            inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
            reads_card, only_newborn = self._check_devices(function, inputs)
            on_card = self._is_result_on_card(function._opname, wanted, reads_card)
            if reads_card or on_card:
                CARD.run_into_errors()
            if on_card and (not inputs or sum(each.nbytes for each in inputs) > _SIZED_AHEAD_BYTES):
                _size_ahead(torch, function, args, kwargs)
            is_sent = function.namespace == "c10d" and not function._opname.startswith(("send", "recv"))
            kernel = _flash_temporaries(function, inputs) if reads_card else []
            result = _run_collective(torch, function, args, kwargs) if is_sent else function(*args, **kwargs)
            in_place = function._opname.startswith("resize_")
            for tensor in tensors_in((result,)):
                if real_device(tensor).type != "cpu" or (any(tensor is each for each in inputs) and not in_place):
                    continue
                storage = tensor.untyped_storage()
                if given.get("pin_memory"):
                    CARD.pin(storage)
                elif on_card:
                    CARD.add(storage)
                elif only_newborn:
                    newborn.add(storage._cdata)
            CARD.release(*kernel)
            return result

        def _check_devices(self, function: Any, inputs: list[Any]) -> tuple[bool, bool]:
            """Whether an operation reads the card, and whether all it reads may turn out to be there."""
            held = [(each, each.untyped_storage()) for each in inputs if real_device(each).type == "cpu"]
            reads_card = any(storage._cdata in CARD.live for _, storage in held)
            young = [storage for _, storage in held if storage._cdata in newborn]
            on_host = [
                tensor
                for tensor, storage in held
                if storage._cdata not in CARD.live
                and storage._cdata not in newborn
                and tensor.numel()
                and (tensor.dim() or function.namespace == "c10d")  # a number may be on the host
            ]
            if on_host and function.namespace == "c10d" and "barrier" not in function._opname:
                raise RuntimeError("No backend type associated with device type cpu")
            if on_host and reads_card and not function._opname.startswith(_MAY_MIX_DEVICES):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:{CARD.index} and cpu! ({function})"
                )
            if reads_card:
                for storage in young:
                    CARD.add(storage)
            return reads_card, len(young) == len(held)

        def _is_result_on_card(self, name: str, wanted: Any, reads_card: bool) -> bool:
            if wanted is not None and wanted.type == "cuda":
                return True
            if making_ddp:
                return True
            if copying_to_host and name in ("clone", "_to_copy"):
                return False
            # If only the type changes, C++ passes on the device of the tensor, which is "cpu" to it.
            return reads_card and (wanted is None or name == "_to_copy")

    mode: list[Any] = []

    def enter() -> None:
        """See every operation of this process from now on; called when it first uses a card."""
        if not mode:
            mode.append(CardMode())
            mode[0].__enter__()

    torch.cuda._enter_simulation = enter

    # ------------------------------------------------------------------ methods of tensors

    real_to, real_clone, real_numpy, real_type = base.to, base.clone, base.numpy, base.type

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal copying_to_host
        if type(self) not in (tensor_type, torch.nn.Parameter) or storage_of(self) is None:
            return real_to(self, *args, **kwargs)
        rest, wanted, names = list(args), dict(kwargs), ["dtype", "non_blocking", "copy"]
        if rest and isinstance(rest[0], tensor_type):
            wanted["other"] = rest.pop(0)
            names = names[1:]
        elif rest and (rest[0] is None or place_of(rest[0]) is not None):
            wanted["device"] = rest.pop(0)
        wanted |= zip(names, rest, strict=False)
        if (other := wanted.pop("other", None)) is not None:
            wanted["device"], wanted["dtype"] = device(other), other.dtype
        place = place_of(wanted.pop("device", None))
        wanted = {name: value for name, value in wanted.items() if value is not None}
        if place is None or place == device(self):
            return real_to(self, **{"dtype": self.dtype, **wanted})
        if place.type != "cpu":
            return real_to(self, place, **wanted)
        copying_to_host = True  # C++ would see the same device, and copy nothing
        try:
            same = wanted.get("dtype", self.dtype) == self.dtype
            return real_clone(self) if same else real_to(self, wanted["dtype"])
        finally:
            copying_to_host = False

    def to_type(self: Any, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:
        if dtype is None:
            name = real_type(self)
            return name.replace("torch.", "torch.cuda.", 1) if is_on_card(self) else name
        if not isinstance(dtype, str) or not dtype.startswith("torch.cuda."):
            return real_type(self, dtype)
        return to(real_type(self, dtype.replace("cuda.", "")), "cuda")

    def pin_memory(self: Any, *_: Any) -> Any:
        if is_on_card(self):
            raise RuntimeError(f"cannot pin '{to_type(self)}' only dense CPU tensors can be pinned")
        copy = real_clone(self)
        CARD.pin(copy.untyped_storage())
        return copy

    def numpy(self: Any, **kwargs: Any) -> Any:
        if is_on_card(self):
            raise TypeError(
                f"can't convert {device(self)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return real_numpy(self, **kwargs)

    for name, value in {
        "device": property(device),
        "is_cuda": property(lambda self: device(self).type == "cuda"),
        "is_cpu": property(lambda self: device(self).type == "cpu"),
        "get_device": lambda self: CARD.index if is_on_card(self) else -1,
        "to": to,
        "type": to_type,
        "cuda": lambda self, device=None, **_: to(self, "cuda" if device is None else device),
        "cpu": lambda self, **_: to(self, "cpu"),
        "numpy": numpy,
        "pin_memory": pin_memory,
        "is_pinned": lambda self, *_: self.untyped_storage()._cdata in CARD.pinned,
        "record_stream": lambda *_: None,
    }.items():
        setattr(tensor_type, name, value)

    # ------------------------------------------------------------------ what C++ makes without an operation

    def made_on_host_first(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            place = place_of(kwargs.pop("device", None)) or torch.get_default_device()
            with host:
                made = original(*args, **kwargs)
            return to(made, place)

        return make

    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, made_on_host_first(getattr(torch, name)))

    class Generator(torch._C.Generator):  # type: ignore[misc]
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return super().__new__(cls, "cpu")

    torch.Generator = Generator
    real_resize = torch.UntypedStorage.resize_

    def resize(self: Any, size: int) -> Any:
        if self._cdata in CARD.live:
            CARD.add(self, int(size))
        return real_resize(self, size)

    torch.UntypedStorage.resize_ = resize

    def with_buckets_on_card(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            nonlocal making_ddp
            making_ddp += 1
            try:
                return original(*args, **kwargs)
            finally:
                making_ddp -= 1

        return make

    ddp = torch.nn.parallel.DistributedDataParallel
    for name in ("_ddp_init_helper", "_pre_forward"):
        setattr(ddp, name, with_buckets_on_card(getattr(ddp, name)))


def _python_call() -> tuple[int, int]:
    """The instruction of Python that called into torch: one operation in C++ may dispatch many."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(
        ("torch/_compile.py", "_dynamo/eval_frame.py")
    ):
        frame = frame.f_back
    return id(frame), frame.f_lasti


def _run_collective(torch: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective to its end, on copies, because gloo's threads keep what they sent for a moment afterwards.

    The input of a gather lives as long as its copy, which the handle holds: NCCL keeps it too until it is waited for.
    """
    from torch.utils._pytree import tree_leaves, tree_map_only

    copies: dict[int, tuple[Any, Any]] = {}

    def copy_of(tensor: Any) -> Any:
        return copies.setdefault(id(tensor), (tensor, tensor.detach().clone()))[1]

    result = function(*tree_map_only(torch.Tensor, copy_of, args), **tree_map_only(torch.Tensor, copy_of, kwargs))
    made = tree_leaves(result)
    for work in made:
        if isinstance(work, torch.ScriptObject):
            torch._C._distributed_c10d.Work.unbox(work).wait()
    # What is returned comes last, as it may be a part of what was only read.
    for given, copy in sorted(copies.values(), key=lambda pair: any(pair[1] is each for each in made)):
        torch.ops.aten.copy_.default(given.detach(), copy)  # not Tensor.copy_, which the ranks time as a transfer
        if "allgather" in function._opname and not any(copy is each for each in made):
            kept, storage = given.untyped_storage(), copy.untyped_storage()
            weakref.finalize(storage, lambda _: None, kept)
    originals = {id(copy): given for given, copy in copies.values()}
    return tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), tensor), result)


def _flash_temporaries(function: Any, inputs: list[Any]) -> list[int]:
    """Temporary memory of CUDA's kernel for the backward pass of flash attention: the query's gradient in fp32, and the
    softmax's, for a sequence padded to a multiple of 128 (csrc/flash_attn/flash_api.cpp, ``dq_accum``,
    ``softmax_d``)."""
    if "flash_attention_for_cpu_backward" not in function._opname:
        return []
    batch, heads, length, width = inputs[1].shape
    rows = 4 * batch * heads * -(-length // 128) * 128
    return [CARD.take(rows * width), CARD.take(rows)]


def _size_ahead(torch: Any, function: Any, args: Any, kwargs: Any) -> None:
    """Raise torch.OutOfMemoryError before the host's memory is touched for a result that the card has no room for."""
    from torch.utils._pytree import tree_map

    if all(each.alias_info is not None for each in function._schema.returns):  # a view, or in place
        return

    def shape_of(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    try:
        result = function(*tree_map(shape_of, args), **tree_map(shape_of, kwargs))
    except (NotImplementedError, RuntimeError):  # an operation without a formula for shapes
        return
    made = result if isinstance(result, (list, tuple)) else [result]
    CARD.check_room(sum(each.untyped_storage().nbytes() for each in made if isinstance(each, torch.Tensor)))
