"""The inputs of a prediction: model, ranks, DeepSpeed settings with their defaults, and how often data is sent.

``stages_0_to_2`` and ``stage_3`` compute ledgers from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.deepspeed_config import optimizer_kind
from ..config.spec import Accelerator, Configuration, Engine, PassType, Precision, block_of, offload_device
from .model_profile import ModelProfile
from .model_states import FP32_BYTES, MOMENTS, Ledger, element_bytes

NORM_BYTES = 8
"""Per element: norms of gradients are taken in fp64 (zero/utils.py, get_norm_dtype)."""
_COMMUNICATION_BYTES = {"fp16": 2, "bfp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """The settings of a DeepSpeed configuration that affect memory, with DeepSpeed's defaults (zero/config.py)."""

    stage: int
    offload_optimizer: str | None
    """``cpu``, ``nvme`` or None; stages 1 and 2 treat NVMe as CPU."""
    offload_param: str | None
    """``cpu``, ``nvme`` or None; stage 3 only."""
    moments: int
    """Tensors per parameter that the optimizer keeps besides the weights."""
    master_bytes: int
    """Bytes of an element of the master copy and of the gradient it is updated with: 2 with
    ``bf16_master_weights_and_grads``, else 4 (base_optimizer.py, _configure_master_weights)."""
    moment_bytes: int
    """Bytes of an element of a moment: 2 with ``bf16_optimizer_states``, else 4."""
    communication_bytes: int | None
    """Bytes of an element that is sent; None: the same as for the parameters (engine.py, communication_data_type)."""
    autocast: bool
    """``torch_autocast``: parameters in fp32; gradients of linear layers sent in 16-bit precision, others in fp32."""
    efficient_linear: bool
    """At stage 3, DeepSpeed's own linear layers (``memory_efficient_linear``)."""
    secondary_ranks: int
    """At stage 3, ranks among which a second copy of the parameters is split (hpZ); 1 for none."""
    torch_optimizer: bool
    """Whether torch's optimizer steps on the accelerator, which needs temporaries; if false, DeepSpeed's fused one."""
    fp32_accumulation: bool
    """``data_types.grad_accum_dtype`` is fp32."""
    contiguous_gradients: bool
    overlap_comm: bool
    sends_ranges: bool
    """At stages 1 and 2, whether parts of several ranks are reduced together (stage_1_and_2.py, average_tensor)."""
    round_robin: bool
    """At stages 1 and 2, whether parameters are reordered before they are split among the ranks."""
    reduce_bucket_elements: int
    prefetch_elements: int
    persistence_elements: int
    """At stage 3, tensors of up to this many elements stay gathered."""
    max_live_elements: int
    max_reuse_elements: int
    sub_group_elements: int
    """At stage 3, elements of the rank's part that are updated together; 0 for no limit."""
    pin_optimizer: bool
    pin_param: bool
    offload_ratio: float
    """Fraction of the sub-groups that ``offload_optimizer`` moves."""
    optimizer_buffers: int
    """Number of swap buffers, each as large as the largest sub-group."""
    param_buffers: int
    param_buffer_elements: int
    max_in_cpu_elements: int
    """Elements of parameters kept in host memory although offloaded to NVMe."""
    swap_threshold_bytes: int
    """Smaller tensors are not swapped: the larger of 1 MiB and ``aio.block_size`` (swap_tensor/optimizer_utils.py)."""
    swap_alignment_bytes: int
    """Swapped tensors are padded to multiples of it: 1024 bytes per I/O thread."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ZeroSettings:
        """Read the settings of a completed DeepSpeed configuration."""
        zero, aio, bf16 = (block_of(config, name) for name in ("zero_optimization", "aio", "bf16"))
        optimizer, param = (block_of(zero, name) for name in ("offload_optimizer", "offload_param"))
        stage = _number(zero, "stage", 0)
        kind = str(block_of(config, "optimizer").get("type", "adamw")).lower()
        torch_adam = bool(block_of(block_of(config, "optimizer"), "params").get("torch_adam"))
        return cls(
            stage=stage,
            offload_optimizer=offload_device(config, "offload_optimizer"),
            offload_param=offload_device(config, "offload_param") if stage == 3 else None,
            moments=MOMENTS.get(kind, MOMENTS["adamw"]),
            master_bytes=2 if bf16.get("bf16_master_weights_and_grads") else FP32_BYTES,
            moment_bytes=2 if bf16.get("bf16_optimizer_states") else FP32_BYTES,
            communication_bytes=_COMMUNICATION_BYTES.get(str(config.get("communication_data_type"))),
            autocast=bool(block_of(config, "torch_autocast").get("enabled")),
            efficient_linear=stage == 3 and bool(zero.get("memory_efficient_linear", True)),
            secondary_ranks=_number(zero, "zero_hpz_partition_size", 1) if stage == 3 else 1,
            torch_optimizer=torch_adam or kind not in ("adam", "adamw", "lion"),
            fp32_accumulation=block_of(config, "data_types").get("grad_accum_dtype") == "fp32",
            contiguous_gradients=bool(zero.get("contiguous_gradients", True)),
            # Null, DeepSpeed's default, means on at stage 3 and off below (zero/config.py).
            overlap_comm=bool(stage == 3 if zero.get("overlap_comm") is None else zero["overlap_comm"]),
            sends_ranges=bool(zero.get("reduce_scatter", True) and zero.get("use_multi_rank_bucket_allreduce", True)),
            round_robin=bool(zero.get("round_robin_gradients")),
            reduce_bucket_elements=_number(zero, "reduce_bucket_size", 5e8),
            prefetch_elements=1  # engine.py, _configure_zero_optimizer
            if zero.get("stage3_allgather_sequential")
            else _number(zero, "stage3_prefetch_bucket_size", 5e7),
            persistence_elements=_number(zero, "stage3_param_persistence_threshold", 1e5),
            max_live_elements=_number(zero, "stage3_max_live_parameters", 1e9),
            max_reuse_elements=_number(zero, "stage3_max_reuse_distance", 1e9),
            sub_group_elements=_number(zero, "sub_group_size", 1e9),
            pin_optimizer=bool(optimizer.get("pin_memory", True)),
            pin_param=bool(param.get("pin_memory", True)),
            offload_ratio=float(optimizer.get("ratio", 1.0)),
            optimizer_buffers=_number(optimizer, "buffer_count", 4),
            param_buffers=_number(param, "buffer_count", 5),
            param_buffer_elements=_number(param, "buffer_size", 1e8),
            max_in_cpu_elements=_number(param, "max_in_cpu", 1e9),
            swap_threshold_bytes=max(2**20, _number(aio, "block_size", 2**20)),
            swap_alignment_bytes=1024 * _number(aio, "intra_op_parallelism", 1),
        )


def unpredicted_settings(config: Mapping[str, Any], *, only_more: bool = False) -> list[str]:
    """Name the features in a DeepSpeed configuration whose memory the formulas do not cover; in most cases none.

    ``only_more``: leave out those that take less memory than predicted.
    """
    zero = block_of(config, "zero_optimization")
    features = {
        "ZenFlow's buffers": zero.get("zenflow") is not None,
        "SuperOffload's buffers": bool(block_of(zero, "offload_optimizer").get("super_offload")),
        "the buffers of quantized communication": bool(
            zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients")
        ),
        "Muon's memory savings over Adam": optimizer_kind(config) == "muon" and not only_more,
    }
    return [name for name, is_used in features.items() if is_used]


def _number(block: Mapping[str, Any], key: str, default: float) -> int:
    """The value of a key as a whole number; the default, as in DeepSpeed (config_utils.py), if it is not a number."""
    value = block.get(key)
    return int(value if isinstance(value, (int, float)) else default)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInputs:
    """Inputs that decide the memory of one rank."""

    profile: ModelProfile
    precision: Precision
    data_parallel_size: int
    grad_accum: int
    """Micro-batches per optimizer step."""
    accelerator: Accelerator
    settings: ZeroSettings
    engine: Engine = "deepspeed"
    pass_type: PassType = "train"

    @property
    def element(self) -> int:
        """Bytes of a parameter."""
        return element_bytes(self.precision)

    @property
    def accumulated(self) -> int:
        """Bytes of one element of an accumulated gradient."""
        return 4 if self.settings.fp32_accumulation else self.element

    @property
    def accumulates_apart(self) -> bool:
        """Whether gradients are accumulated in fp32 in separate tensors, while parameters are 16-bit
        (stage_1_and_2.py, use_separate_grad_accum)."""
        return self.settings.fp32_accumulation and self.element != FP32_BYTES

    @property
    def sent(self) -> int:
        """Bytes of one element of a gradient that is sent."""
        return self.settings.communication_bytes or self.element

    @property
    def bucket_bytes(self) -> int:
        """At stage 3, bytes of one element, summed over the buckets of all formats that are sent."""
        return FP32_BYTES + 2 if self.settings.autocast else self.sent

    @property
    def state(self) -> int:
        """Bytes per element that the rank updates: the master copy, if there is one, and the moments."""
        has_master = self.settings.stage > 0 or self.precision != "fp32"
        return self.settings.moment_bytes * self.settings.moments + self.settings.master_bytes * has_master

    @property
    def torch_step(self) -> int:
        """Bytes per updated element of the square root in torch's multi-tensor Adam (torch/optim/adam.py)."""
        on_gpu = self.accelerator == "cuda" and not self.settings.offload_optimizer
        return self.settings.moment_bytes if on_gpu and self.settings.torch_optimizer else 0


Phases = dict[str, Ledger]
"""``forward``, ``backward``, ``reduced`` (after backward), ``flatten`` and ``update`` (in the step) → one rank's ledger
without activations; and ``initialize`` if ``deepspeed.initialize`` may need more than a step."""


def times_sent(configuration: Configuration, parameters: int, grad_accum: int) -> tuple[int, int]:
    """How often an optimizer step sends all parameters, and how often the trained ones or their gradients.

    In the paper, the sum without accumulation is 2, 2, 2, 3 at stages 0 to 3 (Rajbhandari et al., ZeRO, section 7).
    DeepSpeed 0.19.8 was measured to differ: at stages 1 and 2 it all-reduces whole buckets, twice the volume of a
    reduce-scatter, unless ``use_multi_rank_bucket_allreduce`` is off (zero/stage_1_and_2.py, average_tensor); at
    stage 3 it keeps gathered parameters for the backward pass up to ``stage3_max_live_parameters``.

    DeepSpeed reduces gradients once per optimizer step at stages 0 and 1, and after every micro-batch at 2 and 3; DDP
    and FSDP2 once.
    """
    if configuration.engine == "fsdp2":
        return 2 * grad_accum, 1
    stage, zero = configuration.stage, block_of(configuration.deepspeed_config, "zero_optimization")
    if stage == 0:
        # An all-reduce counts twice: as a reduce-scatter and an all-gather.
        return 0, 2
    if stage == 3:
        settings = ZeroSettings.from_config(configuration.deepspeed_config)
        stay = parameters <= min(settings.max_live_elements, settings.max_reuse_elements)
        return grad_accum * (1 if stay else 2), grad_accum
    is_scattered = zero.get("reduce_scatter", True) and not zero.get("use_multi_rank_bucket_allreduce", True)
    return 0, (1 if is_scattered else 2) * (1 if stage == 1 else grad_accum) + 1
