"""Loads on import everything that a rank needs, so that ranks forked from this process find it in memory.

Written for the preload list of the forkserver, which can only import. Besides torch, DeepSpeed and Transformers it
loads the modules that these load on first use (some 670 inside ``deepspeed.initialize``) and, on the CPU accelerator,
the compiled ops. No GPU is used: ``GPU_FILES`` and ``CUDA_INITIALIZED`` prove it to the parent.

Garbage collection is off meanwhile, and afterwards never visits the objects loaded here: a collection in a rank would
copy every page of the server's objects, 80 MB of them at stage 3.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

from ..records import json_files
from ..records.rank_files import Assignment
from ..system.processes import cuda_is_initialized, die_with_parent, open_gpu_files

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


gc.disable()
die_with_parent()
if os.environ.get("DS_BENCH_PARENT") not in (None, str(os.getppid())):  # the parent died before this line
    os._exit(1)
MISSING: list[str] = []
"""Modules that could not be imported, including optional ones; a rank imports them again and shows the error."""
for name in filter(None, (*MODULES, *os.environ.get("DS_BENCH_PRELOAD", "").split(","))):
    try:
        importlib.import_module(name)
    except BaseException:
        MISSING.append(name)
if os.environ.get("DS_ACCELERATOR") == "cpu":
    with contextlib.suppress(Exception):
        # DeepSpeed reads this, which compiles and links a program, as each rank connects (comm/torch.py, build_shm_op).
        importlib.import_module("deepspeed.ops").__compatible_ops__  # noqa: B018
    for name in filter(None, os.environ.get("DS_BENCH_PRELOAD_OPS", "").split(",")):
        # An op that fails here fails again in the rank that needs it, which reports it.
        with contextlib.suppress(Exception):
            accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
            accelerator.create_op_builder(name).load(verbose=False)
else:
    # CUDA's ops are left out: a process that has used CUDA cannot be forked into ranks. NVML, which DeepSpeed and torch
    # open on import, is closed; ranks open it again themselves.
    with contextlib.suppress(Exception):
        nvml = importlib.import_module("pynvml")
        for _ in range(256):  # NVML counts how often it was opened; an extra call does no harm
            nvml.nvmlShutdown()
# pydantic builds its reader for assignments once here instead of in every rank.
json_files.adapter(Assignment)
GPU_FILES = open_gpu_files()
"""Device files for computing on a GPU that are open here after preloading; ranks are forked only if there are none."""
CUDA_INITIALIZED = cuda_is_initialized()
"""Whether preloading has initialized the CUDA driver; ranks are forked only if not."""
# Text that is still buffered would be written again by every rank that is forked.
with contextlib.suppress(OSError):  # the reader of the pipe has ended
    sys.stdout.flush()
gc.enable()
gc.freeze()
