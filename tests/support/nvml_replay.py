"""Recorded answers of NVML, replayed as the ``pynvml`` module: real machines for tests without a GPU.

A recording (``nvml/*.json``) holds ``calls``: the text of each call → its answer. ``scripts/gpu_probe.py`` makes them
on a real machine. Those here were written from published output of ``nvidia-smi -q``, which ``source`` names; calls
whose answer it does not contain are listed in ``unknown`` and fail when they are replayed. A structure is an object
with its fields, a handle is the text ``GPU 0`` or ``GPU 0 MIG 1``, and ``{"error": NAME}`` is an NVML error.

Only the standard library is used, since simulated ranks import this module in place of ``pynvml``.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).with_name("nvml")
MACHINES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


class NVMLError(Exception):
    """An error that a call of NVML returned on the recorded machine."""


class NvmlReplay:
    """The module ``pynvml`` of a recorded machine: the name of a file in ``nvml``, or the path of a recording."""

    NVMLError = NVMLError

    def __init__(self, machine: str | Path) -> None:
        path = machine if isinstance(machine, Path) else FOLDER / f"{machine}.json"
        recording = json.loads(path.read_text())
        self.calls: dict[str, Any] = recording["calls"]
        """Tests may replace an answer, e.g. the bytes in use."""
        self.unknown: list[str] = recording["unknown"]
        """Functions whose answer the source does not contain, and fields of structures as ``FUNCTION (FIELD)``."""

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            text = f"{name}({', '.join(map(str, arguments))})"
            if text not in self.calls:
                raise NVMLError(f"not recorded: {text}")
            answer = self.calls[text]
            if isinstance(answer, dict) and "error" in answer:
                raise type(answer["error"], (NVMLError,), {})(text)
            return _with_fields(answer)

        return call


def _with_fields(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_with_fields(each) for each in answer]
    return SimpleNamespace(**answer) if isinstance(answer, dict) else answer
