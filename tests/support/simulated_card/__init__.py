"""GPUs that do not exist: DeepSpeed and torch train on the CPU, and each tensor names the card that it is on.

For any command of this project, two H100 cards unless FOLDER/cards.json says otherwise::

    SIMULATED_CARDS=FOLDER PYTHONPATH=tests/support/simulated_card/site python zero_stage_comparison.py …

Without the variable nothing happens. With it an import hook (``import_hook``) changes torch, DeepSpeed and pynvml as
they are imported: nothing is imported earlier, and ranks can still be forked from the preloaded server.

Simulated: the device of each tensor, and errors about mixed devices (``tensors``); bytes on each card, the segments of
torch's caching allocator, the card's capacity and torch's out-of-memory error (``memory``); torch.cuda, and gloo in
place of NCCL (``cuda``); NVML from recorded answers and the bytes in use (``nvml``). Not simulated: kernels, their
speed and their temporary memory within one operation; operations that run later than they are called; the memory of
NCCL.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "SIMULATED_CARDS"
SITE = Path(__file__).with_name("site")
"""Belongs on PYTHONPATH: Python imports its ``sitecustomize`` at start-up."""


@dataclass(frozen=True, kw_only=True)
class CardPlan:
    """One card and what happens to it."""

    machine: str = "h100"
    """The recording (``nvml_replay``) of NVML's answers from a card of this kind."""
    total_bytes: int | None = None
    """Capacity as CUDA reports it; None: the recorded card's."""
    context_bytes: int = 0
    """Memory that each process takes outside torch's allocator."""
    held_bytes: int = 0
    """Memory of another program."""
    freed_after_seconds: float = 0.0
    """How long the driver still shows the memory of a process after its end."""
    answers: dict[str, Any] = field(default_factory=dict)
    """Calls of NVML whose answer differs from the recording, e.g. ``{"nvmlDeviceGetTemperature(GPU 0, 0)": 91}``."""
    lost_when_used: bool = False
    """NVML answers nothing about the card once a process uses it."""
    error: str | None = None
    """Text of the error that every operation on the card raises, after the first ``error_after``."""
    error_after: int = 0


def write_plans(folder: Path, *plans: CardPlan) -> dict[str, str]:
    """Write the cards of a simulated machine. Return the variables of a program that runs on it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cards.json").write_text(json.dumps([asdict(plan) for plan in plans]))
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {VARIABLE: str(folder), "PYTHONPATH": path}


def read_plans(folder: Path) -> list[CardPlan]:
    with contextlib.suppress(FileNotFoundError):
        return [CardPlan(**plan) for plan in json.loads((folder / "cards.json").read_text())]
    return [CardPlan(), CardPlan()]


def simulated_folder() -> Path:
    return Path(os.environ[VARIABLE])


def visible_cards() -> list[int]:
    """Numbers of the cards that CUDA shows to this process."""
    cards = range(len(read_plans(simulated_folder())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(cards) if visible is None else [int(each) for each in visible.split(",") if each]


def usage_file(card: int) -> Path:
    """This process publishes its bytes on a card here, as eight bytes."""
    return simulated_folder() / f"card{card}.{os.getpid()}"


def used_bytes(card: int, freed_after_seconds: float) -> Iterator[tuple[int, int]]:
    """Process and bytes on a card, including ended ones whose memory is not freed yet."""
    for path in simulated_folder().glob(f"card{card}.*"):
        with contextlib.suppress(FileNotFoundError):  # another reader has removed it
            process, ended = path.name.split(".")[1], path.name.endswith(".ended")
            if not ended and not _is_alive(process):
                path.touch()
                path = path.rename(f"{path}.ended")
                ended = True
            if ended and time.time() >= path.stat().st_mtime + freed_after_seconds:
                path.unlink()
                continue
            yield int(process), int.from_bytes(path.read_bytes(), sys.byteorder)


def _is_alive(process: str) -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
