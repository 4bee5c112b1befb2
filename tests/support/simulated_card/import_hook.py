"""Changes modules right after their import, so that nothing is imported earlier than on a real machine."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from . import read_plans, simulated_folder


def _change_torch(torch: Any) -> None:
    from . import cuda, tensors

    cuda.install(torch)
    tensors.install(torch)
    if "--multiprocessing-fork" in sys.orig_argv:  # SuperOffload's worker pins memory and uses no card
        torch.cuda._enter_simulation()


def _change_accelerator(module: Any) -> None:
    from . import ops

    ops.install(module.CUDA_Accelerator)


def _change_environment(module: Any) -> None:
    module.torch_built_for = {"cuda": "13.0"}.get
    read = module.read_interpreter
    module.read_interpreter = lambda *args: replace(read(*args), torch_cuda_version="13.0")


_CHANGES: dict[str, Callable[[Any], None]] = {
    "torch": _change_torch,
    "deepspeed.accelerator.cuda_accelerator": _change_accelerator,
    "ds_bench.system.environment": _change_environment,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:  # type: ignore[override]
        if fullname == "pynvml":
            return importlib.util.spec_from_file_location(fullname, Path(__file__).with_name("nvml.py"))
        if (change := _CHANGES.pop(fullname, None)) is None:
            return None
        spec = importlib.util.find_spec(fullname)  # found by the other finders: this name is no longer in the table
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def install() -> None:
    if any("measure_activations" in word for word in sys.orig_argv):  # shapes only, on no card in reality either
        del _CHANGES["torch"]
    sys.meta_path.insert(0, _Finder())
    if any(plan.machine == "wsl2" for plan in read_plans(simulated_folder())):
        facts = os.uname()
        os.uname = lambda: os.uname_result((*facts[:2], "6.6.87.2-microsoft-standard-WSL2", *facts[3:]))
