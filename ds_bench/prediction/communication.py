"""How often an optimizer step sends the parameters and the gradients between GPUs.

Volumes follow the ZeRO paper (Rajbhandari et al., 2020, section 7), with what DeepSpeed 0.19.8 does differently.
"""

from __future__ import annotations

from ..config.spec import Configuration, block_of
from .inputs import ZeroSettings


def times_sent(configuration: Configuration, parameters: int, grad_accum: int) -> tuple[int, int]:
    """How often an optimizer step sends all parameters, and those that are trained or their gradients.

    Together, without accumulation 2, 2, 2, 3 at stages 0 to 3 in the paper (Rajbhandari et al., ZeRO, section 7).
    DeepSpeed 0.19.8 differs, as measured: at stages 1 and 2 it all-reduces whole buckets, twice the
    volume of a reduce-scatter, unless ``use_multi_rank_bucket_allreduce`` is off (zero/stage_1_and_2.py,
    average_tensor); at stage 3 it keeps gathered parameters for the backward pass up to
    ``stage3_max_live_parameters``.

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
