"""torch's own data-parallel engines, the references for DeepSpeed's rows: DistributedDataParallel and FSDP2.

A reference engine trains the same weights on the same batches in the same loop, and is measured by the same code: it
has the methods and attributes of a DeepSpeed engine that ``training_loop`` and ``measure`` use, and itself reports
which tensors it holds (``tensors_by_category``) and where its fp32 weights are (``weight_fragments``).

Number formats. In bf16 DeepSpeed trains bf16 parameters, reduces their gradients in bf16, and updates an fp32 copy.
FSDP2 does the same arithmetic: it keeps fp32 parts of the parameters, gathers them and reduces gradients in bf16. DDP
runs as most people run it, with fp32 weights under ``torch.autocast``: products are computed in bf16, while norms, the
residual stream and gradients stay in fp32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from ..config.strategies import DDP_BUCKET_MB
from .model import draw_matrix, find_blocks, training_dtype

_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


class ReferenceEngine:
    """One rank's model, optimizer and gradient synchronization, with the interface of a DeepSpeed engine.

    ``config``: the row's DeepSpeed configuration, for batch, optimizer, clipping and number format.
    """

    stage: int
    """The ZeRO stage that shards the same tensors."""
    updates = True
    """Whether it has an optimizer."""
    skipped_steps = 0
    is_compiled = False
    engine_params: Mapping[str, Any]
    """Arguments of torch's engine that differ from its defaults or determine its memory."""

    def __init__(self, model: torch.nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
        self.module = model
        self._device = device
        self._dtype = training_dtype(config)
        self._micro_batch_size = int(config["train_micro_batch_size_per_gpu"])
        self._grad_accum = int(config.get("gradient_accumulation_steps", 1))
        # 1.0 is DeepSpeed's default too (runtime/constants.py).
        self._clipping = float(config.get("gradient_clipping", 1.0))
        self._micro_steps = 0
        self._grad_norm: Any = None
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer: Any = _create_optimizer(self._trained, config["optimizer"], device) if self.updates else None

    def __call__(self, **batch: torch.Tensor) -> Any:
        """Run the forward pass."""
        return self.module(**batch)

    def weight_fragments(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield the name, the index of the first value and the flat values of this rank's part of each trained tensor;
        the parts of all ranks make up the model, each weight once."""
        yield from ()

    @property
    def settings(self) -> dict[str, Any]:
        """How the engine was set up, for the record; the counterpart of DeepSpeed's resolved configuration."""
        group = self.optimizer.param_groups[0] if self.optimizer else {}
        return {
            "engine": type(self).__name__,
            "train_micro_batch_size_per_gpu": self._micro_batch_size,
            "gradient_accumulation_steps": self._grad_accum,
            "gradient_clipping": self._clipping,
            "optimizer": type(self.optimizer).__name__ if self.optimizer else "none",
            "optimizer_params": {name: value for name, value in group.items() if name != "params"},
            "engine_params": self.engine_params,
        }

    @property
    def at_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its optimizer step."""
        return (self._micro_steps + 1) % self._grad_accum == 0

    def backward(self, loss: torch.Tensor) -> None:
        # As DeepSpeed's engine does: gradients are the mean over the micro-batches.
        (loss / self._grad_accum).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """End a micro-batch; after the last of a step, clip gradients, update weights, free gradients."""
        if self.at_accumulation_boundary:
            if self._clipping > 0:
                self._grad_norm = total_grad_norm(self._trained)
                torch.nn.utils.clip_grads_with_norm_(self._trained, self._clipping, self._grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._micro_steps += 1

    def tensors_by_category(self) -> Iterator[tuple[str, Iterable[torch.Tensor | None]]]:
        """The ledger's categories with the tensors of each."""
        yield "parameters", self.parameter_tensors()
        states = self.optimizer.state.values() if self.optimizer else ()
        held = (value for state in states for value in state.values())
        yield "optimizer_states", (value for value in held if isinstance(value, torch.Tensor))
        yield "gradients", (parameter.grad for parameter in self.module.parameters())

    def parameter_tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that holds parameters, for the optimizer or for a pass."""
        yield from self.module.parameters()

    def save_checkpoint(self, save_dir: str, tag: str) -> None:
        """Save weights and optimizer states with ``torch.distributed.checkpoint``. Must be called on all ranks."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), checkpoint_id=Path(save_dir) / tag)

    def load_checkpoint(self, load_dir: str, tag: str) -> tuple[str, None]:
        """The inverse of ``save_checkpoint``. Returns the path first, as DeepSpeed's engine does."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        path, state = Path(load_dir) / tag, self._state()
        # Fills the tensors of the state in place.
        load(state, checkpoint_id=path)
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return str(path), None

    def _state(self) -> dict[str, Any]:
        """Weights and optimizer states by name; for a split tensor, this rank's part."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, states = get_state_dict(self.module, self.optimizer)
        return {"model": weights, "optimizer": states}

    def save_16bit_model(self, save_dir: str) -> None:
        """Save only the weights in the row's number format, on the first rank; to be called on all ranks."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: Mapping[str, Any] = get_model_state_dict(self.module, options=whole)
        if torch.distributed.get_rank() == 0:
            Path(save_dir).mkdir(parents=True)
            reduced = {name: value.to(self._dtype) for name, value in weights.items()}
            torch.save(reduced, Path(save_dir) / "pytorch_model.bin")

    def get_global_grad_norm(self) -> Any:
        return self._grad_norm

    def zero_optimization_stage(self) -> int:
        return self.stage

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self._grad_accum

    def fp16_enabled(self) -> bool:
        return False

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()


class DdpEngine(ReferenceEngine):
    """DistributedDataParallel over fp32 weights; in bf16 the forward pass runs under ``torch.autocast``."""

    stage = 0

    def __init__(self, model: torch.nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
        for parameter in model.parameters():  # with the values of the training number format, as in the other rows
            parameter.data = parameter.data.float()
        super().__init__(model, config, device)
        self._parallel = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=DDP_BUCKET_MB,
            gradient_as_bucket_view=True,
        )
        self._buckets: list[torch.Tensor] = []
        autocast = None if self._dtype is torch.float32 else str(self._dtype)
        self.engine_params = {
            "bucket_cap_mb": DDP_BUCKET_MB,
            "gradient_as_bucket_view": True,
            "autocast_dtype": autocast,
        }

    def __call__(self, **batch: torch.Tensor) -> Any:
        # Only around the forward pass: there DDP decides whether the backward pass reduces gradients.
        accumulate = contextlib.nullcontext() if self.at_accumulation_boundary else self._parallel.no_sync()
        reduced = self._dtype is not torch.float32
        with accumulate, torch.autocast(self._device.type, dtype=self._dtype if reduced else None, enabled=reduced):
            return self._parallel(**batch)

    def step(self) -> None:
        if self.at_accumulation_boundary and self._micro_steps // self._grad_accum == 1:
            # DDP rebuilds its buckets once, before the second step, in the order of the first gradients.
            self._buckets = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        super().step()

    def tensors_by_category(self) -> Iterator[tuple[str, Iterable[torch.Tensor | None]]]:
        yield from super().tensors_by_category()
        # Kept between steps too; while micro-batches are accumulated, gradients are not views into them.
        yield "gradients", self._buckets

    def weight_fragments(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        if torch.distributed.get_rank() == 0:  # every rank holds all of them
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad:
                    yield name, 0, parameter.detach().flatten()


class Fsdp2Engine(ReferenceEngine):
    """``fully_shard`` of every block and of the rest of the model, each tensor split by rows among the ranks.

    ``model``: with matrices on the meta device (``model.matrices_on_meta``), which are drawn here group by group, so
    that no rank holds more than one whole group. ``model.find_blocks`` finds the blocks.
    """

    stage = 3

    def __init__(
        self,
        model: torch.nn.Module,
        config: Mapping[str, Any],
        device: torch.device,
        *,
        seed: int,
        report_progress: Callable[[], None],
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtype = training_dtype(config)
        # Names within the whole model, since values are drawn by name; a block knows only the last parts of them.
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        # FSDP2 gathers a block before its forward pass, so a block needs a forward pass and parameters.
        without_forward = (torch.nn.ModuleList, torch.nn.ModuleDict)
        self._blocks = [
            block
            for block in find_blocks(model)
            if not isinstance(block, without_forward) and next(block.parameters(), None) is not None
        ]
        # Blocks first: for the model itself, fully_shard then takes only the parameters that are in no block.
        for group in (*self._blocks, model):
            report_progress()
            _materialize(group, names, dtype, device, seed)
            fully_shard(group, mesh=mesh, mp_policy=policy)
        # Last: the optimizer gets the split parameters, which fully_shard puts in place of the whole ones.
        super().__init__(model, config, device)
        self.engine_params = {
            "param_dtype": str(dtype),
            "reduce_dtype": str(dtype),
            "sharded_blocks": len(self._blocks),
            "reshard_after_forward": "blocks",
        }

    def backward(self, loss: torch.Tensor) -> None:
        root: Any = self.module
        root.set_requires_gradient_sync(self.at_accumulation_boundary)
        super().backward(loss)

    def tensors_by_category(self) -> Iterator[tuple[str, Iterable[torch.Tensor | None]]]:
        yield from super().tensors_by_category()
        # Gradients of whole tensors are kept until the last micro-batch of a step.
        yield "gradients", (parameter.grad for parameter in self._gathered())

    def parameter_tensors(self) -> Iterator[torch.Tensor]:
        yield from super().parameter_tensors()
        yield from self._gathered()

    def _gathered(self) -> Iterator[torch.Tensor]:
        """The whole tensors that passes compute with; FSDP2 frees their memory between uses."""
        for group in (*self._blocks, self.module):
            state: Any = group
            for parameter in state._get_fsdp_state()._fsdp_param_group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):  # after the first pass
                    yield parameter._unsharded_param

    def weight_fragments(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                part: Any = parameter
                shape, mesh, placements = part.shape, part.device_mesh, part.placements
                _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
                # Split by rows: a rank's part is one stretch of the flat tensor.
                yield name, offset[0] * math.prod(shape[1:]), part.to_local().detach().flatten()


def _materialize(
    group: torch.nn.Module, names: Mapping[int, str], dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Give a group's parameters their values on the device, in fp32, rounded to ``dtype`` as in the other rows."""
    from torch.distributed.tensor import DTensor

    made: dict[int, torch.nn.Parameter] = {}  # tied parameters stay tied
    for module in group.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):  # of a block that is split already
                continue
            if id(parameter) not in made:
                full_name = names[id(parameter)]
                values = parameter.detach()
                if parameter.is_meta:
                    values = draw_matrix(full_name, parameter.shape, seed, dtype, device)
                values = values.to(device=device, dtype=torch.float32)
                made[id(parameter)] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def _create_optimizer(
    parameters: list[torch.nn.Parameter], block: Mapping[str, Any], device: torch.device
) -> torch.optim.Optimizer:
    """torch's optimizer for the ``optimizer`` block of a DeepSpeed configuration: fused on CUDA, else multi-tensor.

    For split parameters torch fuses only Adam and AdamW (distributed/tensor/_ops/_pointwise_ops.py).
    """
    params = dict(block.get("params", {}))
    params.pop("torch_adam", None)
    decoupled = params.pop("adam_w_mode", True)  # DeepSpeed turns Adam into AdamW unless this is off
    name = str(block.get("type", "")).lower()
    create: Any = _OPTIMIZERS["adamw" if name == "adam" and decoupled else name]
    implementation = {"fused": True} if device.type == "cuda" and name != "sgd" else {"foreach": True}
    return create(parameters, **params, **implementation)  # type: ignore[no-any-return]


def total_grad_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return the norm of all gradients, over the parts of every rank."""
    norm: Any = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    if hasattr(norm, "full_tensor"):  # of parts: sums over the ranks
        norm = norm.full_tensor()
    return norm  # type: ignore[no-any-return]


class PassEngine(ReferenceEngine):
    """Runs the passes of a ``pass_type`` other than ``train``, with the interface of a DeepSpeed engine.

    A forward pass runs as in training: it keeps what a backward pass would need until the pass is over. Gradients of a
    backward pass are freed where training would update the weights. Parameters have the number format of training.
    """

    stage = 0
    updates = False

    def __init__(
        self, model: torch.nn.Module, config: Mapping[str, Any], device: torch.device, *, with_backward: bool
    ) -> None:
        super().__init__(model, config, device)
        self._with_backward = with_backward
        self.engine_params = {"with_backward": with_backward}

    def backward(self, loss: torch.Tensor) -> None:
        if self._with_backward:
            super().backward(loss)

    def step(self) -> None:
        """End a micro-batch; after the last of a step, free the gradients."""
        if self._with_backward and self.at_accumulation_boundary:
            self.module.zero_grad(set_to_none=True)
        self._micro_steps += 1
