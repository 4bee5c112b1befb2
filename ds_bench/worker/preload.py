"""Importing this loads what every rank needs, so that forked ranks find it in memory.

For the forkserver's preload list, which can only import. Besides torch, DeepSpeed and
Transformers come the modules they load on first use (some 670 were seen to load inside
``deepspeed.initialize``), and on the CPU accelerator the compiled ops. No GPU is touched: the
proof is left in ``GPU_FILES`` and ``CUDA_INITIALISED``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path

from ..system.files import remove_abandoned_lock
from ..system.processes import cuda_is_initialised, die_with_parent, open_gpu_files

MODULES = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.utils",
    "torch.utils.cpp_extension",
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.muon.original_muon",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.fp16.fused_optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.auto_ep_presets",
    "deepspeed.moe.ep_repack",
    "deepspeed.ops.adam",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.utils.pin_memory",
    "deepspeed.comm.mori",
    "transformers",
    "transformers.modeling_utils",
    "transformers.integrations.deepspeed",
    "transformers.models.auto.modeling_auto",
    "accelerate",
    "networkx",
    "cpuinfo",
    "setuptools",
    "distutils.ccompiler",
    "ds_bench.worker.measure",
)


_LOCK_SECONDS = 60.0
"""An op that is built loads in about a second; a lock on it that stays this long was left by a killed process."""


def _load(names: tuple[str, ...]) -> list[str]:
    """Imports each module; returns the names that could not be."""
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException:  # an optional part that does not import here is loaded, or fails, in the rank
            missing.append(name)
    return missing


def _load_ops(names: tuple[str, ...]) -> None:
    from deepspeed.accelerator import get_accelerator

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    for name in names:
        with contextlib.suppress(Exception):
            builder = get_accelerator().create_op_builder(name)
            remove_abandoned_lock(folder / builder.name / "lock", _LOCK_SECONDS)
            builder.load(verbose=False)


def _close_nvml() -> None:
    """DeepSpeed and torch open NVML on import. Ranks open it again themselves."""
    with contextlib.suppress(Exception):
        import pynvml

        for _ in range(256):  # reference-counted, several libraries open it; one call too many does no harm
            pynvml.nvmlShutdown()


die_with_parent()
if os.environ.get("DS_BENCH_PARENT") not in (None, str(os.getppid())):  # it died before this line
    os._exit(1)
MISSING = _load(MODULES + tuple(filter(None, os.environ.get("DS_BENCH_PRELOAD", "").split(","))))
if os.environ.get("DS_ACCELERATOR") == "cpu":
    _load_ops(tuple(filter(None, os.environ.get("DS_BENCH_PRELOAD_OPS", "").split(","))))
else:
    _close_nvml()
GPU_FILES = open_gpu_files()
"""Device files of computing on a GPU that this server holds open after preloading; ranks are forked only when empty."""
CUDA_INITIALISED = cuda_is_initialised()
"""Whether preloading has initialised the CUDA driver; ranks are forked only when not."""
with contextlib.suppress(OSError):  # a pipe whose reader has gone
    sys.stdout.flush()
