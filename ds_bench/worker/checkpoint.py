"""Saves a trained engine's checkpoint, loads it and checks what came back, and saves its 16-bit model; times each.

Each action writes to a private folder of the trial, and its files are removed once no later action needs them. Between
saving and loading, an optimizer step changes the states, and the weights that passes compute with are halved: the loss,
the weights and the optimizer's states are what they were only if loading restores all of them.
"""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from ..records.rank_files import HeartbeatWriter
from ..system.files import disk_is_full
from ..system.host_resources import read_table
from . import ledger, measured_memory, training_loop
from .reference_engines import ReferenceEngine
from .weight_change import WeightChange

_TAG = "step"
_PIECE_ELEMENTS = 2**22
"""Number of elements of an optimizer state summed at a time: their copy in float64 takes 32 MiB."""
_UNSUPPORTED = (NotImplementedError, AssertionError, ValueError, TypeError, KeyError, AttributeError, IndexError)
"""Exceptions that DeepSpeed raises on every rank if it cannot do something. Any other, such as one caused by a full
disk, may hit a single rank: it ends the trial, whose measured steps are stored."""
_NOT_DONE = {
    "save": "no checkpoint was saved",
    "load": "the checkpoint was not loaded",
    "model_16bit": "the 16-bit model was not saved",
}
_SMALL_STATES = (
    ": with the optimizer on NVMe DeepSpeed loads only the swap files, and tensors too small to be swapped keep the "
    "values of later steps"
)
"""True of DeepSpeed 0.19.8 (runtime/engine.py, load_checkpoint)."""
_BEAT_SECONDS = 2.0
_MAX_REASON_LENGTH = 200


def measure_checkpoint(
    trainer: training_loop.Trainer,
    change: WeightChange,
    folder: Path,
    measured: dict[str, Any],
    save_partial: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Save and load a checkpoint in ``folder``. Return further fields of a RankMeasurement.

    ``measured``: the fields so far, with the loss and the change in the weights as they are now. ``save_partial`` is
    called after each action with everything that is known. Raises OSError or RuntimeError, for example if the disk is
    full.
    """
    engine, first = trainer.engine, torch.distributed.get_rank() == 0
    checkpoint, model = folder / "checkpoint", folder / "model"
    meter = measured_memory.PhaseMeter(trainer.accelerator)
    result: dict[str, Any] = {"checkpoint": {}, "notes": list(measured["notes"])}

    def run(name: str, action: Callable[[], str | None], files: Path | None) -> bool:
        """Run an action on all ranks and record it. ``files``: the folder it writes to. Return whether it was done.

        ``action`` returns why it could not be done; None if it was.
        """
        # Otherwise the first rank would wait for the others inside the action, and the wait would count as its time.
        torch.distributed.barrier()
        meter.begin()
        start = time.perf_counter()
        with _heartbeat_during_io(trainer.heartbeat):
            try:
                not_done = action()
            except _UNSUPPORTED as error:
                not_done = f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON_LENGTH]}"
            except (OSError, RuntimeError) as error:
                if disk_is_full(str(folder)):  # torch's own message does not say so
                    text = f"no space left in --checkpoint-path or the folder of the results: {_NOT_DONE[name]}"
                    raise OSError(errno.ENOSPC, text) from error
                raise
            training_loop.synchronize(trainer.accelerator)
        seconds = time.perf_counter() - start
        meter.end(name)
        torch.distributed.barrier()  # now every rank has written its files
        facts: dict[str, Any] = {"seconds": None, "memory": {}, "written_bytes": None, "not_done": not_done}
        if not_done is None:
            facts |= {"seconds": seconds, "memory": meter.phases[name]}
            if files is not None and first:
                facts["written_bytes"] = sum(path.stat().st_size for path in files.rglob("*") if path.is_file())
        elif first:
            result["notes"].append(f"{_NOT_DONE[name]}: {not_done}")
        result["checkpoint"][name] = facts
        save_partial({**measured, **result})
        return not_done is None

    def save() -> None:
        engine.save_checkpoint(str(checkpoint), tag=_TAG)

    def load() -> str | None:
        path, _ = engine.load_checkpoint(str(checkpoint), tag=_TAG)
        return None if path is not None else "no checkpoint was found"

    # Before _change_weights takes an optimizer step, which changes them.
    states = _state_norms(engine)
    if run("save", save, checkpoint):
        _change_weights(trainer)
        # Weights that did not change cannot show whether loading restores them, so nothing is claimed then.
        changed = change.since_start() != measured["weight_change"]
        if run("load", load, None):
            restored = _is_restored(trainer, change, measured, states)
            result["checkpoint_restored"] = restored if changed else None
            if changed and not restored:
                text = "a loaded checkpoint did not restore the weights and optimizer states that were saved"
                result["notes"].append(f"{text}{_SMALL_STATES if _swaps_optimizer(engine) else ''}")
        _remove(checkpoint)
    run("model_16bit", lambda: _save_model(engine, model), model)
    _remove(model)
    return result


def _change_weights(trainer: training_loop.Trainer) -> None:
    """Take another optimizer step, and halve the weights: a step may leave most of the 16-bit ones unchanged."""
    trainer.step()
    trainer.heartbeat.beat("inspect")  # the step has left its own phase behind
    with torch.no_grad():
        for parameter in trainer.engine.module.parameters():
            values = getattr(parameter, "ds_tensor", parameter.detach())  # at stage 3 this rank's part
            if values.is_floating_point():  # quantized weights are not
                values.mul_(0.5)


def _is_restored(
    trainer: training_loop.Trainer, change: WeightChange, measured: dict[str, Any], states: list[float]
) -> bool:
    """Whether this rank's weights, optimizer states and loss on its first batch are what they were before saving."""
    same = measured["weight_change"] in (None, change.since_start()) and _close(states, _state_norms(trainer.engine))
    if "repeated_loss" not in measured or trainer.is_compiled:  # the same on all ranks
        return same
    before, after = (
        [] if each is None else [each] for each in (measured["repeated_loss"], training_loop.repeated_loss(trainer))
    )
    return same and _close(before, after)


def _close(before: list[float], after: list[float]) -> bool:
    return len(before) == len(after) and all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-30) for a, b in zip(before, after, strict=True)
    )


def _swaps_optimizer(engine: Any) -> bool:
    return bool(getattr(engine.optimizer, "swap_optimizer", False))


def _state_norms(engine: Any) -> list[float]:
    """The sorted norms of the tensors of optimizer states on this rank; empty if they are on a disk."""
    return [] if _swaps_optimizer(engine) else sorted(map(_norm, ledger.optimizer_states(engine)))


def _norm(values: torch.Tensor) -> float:
    """In float64, piece by piece: torch would make a float64 copy of the whole tensor."""
    pieces = torch.split(values.detach().flatten(), _PIECE_ELEMENTS)
    return math.hypot(*(float(torch.linalg.vector_norm(piece, dtype=torch.float64)) for piece in pieces))


def _remove(folder: Path) -> None:
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _save_model(engine: Any, folder: Path) -> str | None:
    """Save only the weights, gathered on the first rank at stage 3.

    At stage 3 DeepSpeed does so only if ``stage3_gather_16bit_weights_on_model_save`` is set. It is set here for the
    save, and affects nothing else.
    """
    if isinstance(engine, ReferenceEngine):
        engine.save_16bit_model(str(folder))
        return None
    zero = engine._config.zero_config
    as_trained = zero.gather_16bit_weights_on_model_save
    zero.gather_16bit_weights_on_model_save = True
    try:
        return None if engine.save_16bit_model(str(folder)) else "DeepSpeed saved no model"
    finally:
        zero.gather_16bit_weights_on_model_save = as_trained


@contextlib.contextmanager
def _heartbeat_during_io(heartbeat: HeartbeatWriter) -> Iterator[None]:
    """Report a sign of life as long as this process reads or writes: a large checkpoint takes minutes."""
    ended = threading.Event()

    def watch() -> None:
        before = None
        while not ended.wait(_BEAT_SECONDS):
            counters = read_table(Path("/proc/self/io"))
            # Bytes that this process has read and written through system calls, cached ones too.
            now = [counters.get(name) for name in ("rchar", "wchar")]
            if before not in (None, now):
                heartbeat.beat(heartbeat.phase)
            before = now

    # A thread, because the calls that save and load return only when they are done.
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
