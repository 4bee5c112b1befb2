"""Model factories that end a trial in every way a trial can end; each runs inside real rank processes.

Given to the scripts as ``--model-factory faults:NAME``. The model is small and plain: what matters
is what goes wrong, and on which rank and step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import torch

RANK = int(os.environ.get("RANK", "0"))


class Tiny(torch.nn.Module):
    """A token classifier; ``act(step)`` is called in every forward pass."""

    vocab_size = 50

    def __init__(self, act: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(self.vocab_size, 16)
        self.head = torch.nn.Linear(16, self.vocab_size)
        self._act = act
        self._calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self._act is not None:
            self._act(self._calls)
        self._calls += 1
        logits = self.head(self.embedding(input_ids))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _rank() -> int:
    return int(os.environ["RANK"])


def fine() -> Tiny:
    return Tiny()


def gradients_divided_twice() -> Tiny:
    """Divides gradients by the number of ranks, although the reduction that follows does so too."""
    model, ranks = Tiny(), int(os.environ["WORLD_SIZE"])
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / ranks)
    return model


def changes_a_frozen_weight() -> Tiny:
    """One row of the frozen embedding changes in the last step."""
    model = Tiny(lambda step: model.embedding.weight.data[0].add_(float(step == 3)))
    model.embedding.requires_grad_(False)
    return model


def keeps_frozen_weights() -> Tiny:
    model = Tiny()
    model.embedding.requires_grad_(False)
    return model


def device_oom_on_rank_0_after_lost_peer() -> Tiny:
    """Rank 0 reports first that its peer is gone, rank 1 a little later that memory ran out."""

    def act(step: int) -> None:
        if _rank() == 0 and step == 2:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        if _rank() == 1 and step == 2:
            time.sleep(0.5)
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
                "of which 1.50 GiB is free."
            )

    return Tiny(act)


def host_allocation_beyond_limit() -> Tiny:
    """Requests more from torch's CPU allocator than any limit used here allows; the kernel refuses it."""

    def act(step: int) -> None:
        if step == 1:
            torch.empty(64 * 2**30, dtype=torch.uint8).fill_(1)

    return Tiny(act)


def killed() -> Tiny:
    def act(step: int) -> None:
        if _rank() == 0 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    return Tiny(act)


def segfault() -> Tiny:
    def act(step: int) -> None:
        if _rank() == 0 and step == 2:
            ctypes.string_at(0)

    return Tiny(act)


def raises_value_error() -> Tiny:
    def act(step: int) -> None:
        if step == 2:
            raise ValueError("the model does not like this batch")

    return Tiny(act)


def hangs() -> Tiny:
    def act(step: int) -> None:
        if _rank() == 0 and step == 2:
            time.sleep(10_000)

    return Tiny(act)


def hangs_ignoring_sigterm() -> Tiny:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return hangs()


def hangs_at_exit() -> Tiny:
    """Writes its result, then never ends."""
    os._exit = lambda _code: time.sleep(10_000)  # type: ignore[assignment]
    return Tiny()


def leaves_a_stubborn_grandchild() -> Tiny:
    """Starts a process in a session of its own that ignores SIGTERM and would live for hours."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(10000)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    return Tiny()


def loses_its_loss() -> Tiny:
    """The loss becomes NaN."""

    class Lost(Tiny):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids, labels) * float("nan")

    return Lost()


def fails_after_the_window() -> Tiny:
    """One warm-up step and three measured ones work; the inspection that follows does not."""

    def act(step: int) -> None:
        if _rank() == 0 and step == 4:
            raise RuntimeError("no room for an inspection")

    return Tiny(act)


def _stage() -> int:
    import gc

    from ds_bench.records.rank_files import Assignment

    (stage,) = {o.trial.configuration.stage for o in gc.get_objects() if type(o) is Assignment}
    return stage


def hangs_at_stage_2() -> Tiny:
    """Works at stage 1; hangs at stages 2 and 3, unless FAULTS_FIXED is set."""
    return fine() if _stage() == 1 or os.environ.get("FAULTS_FIXED") else hangs()


def trains_long_at_stage_2() -> Tiny:
    """Needs half a second for each forward pass at stage 2, unless FAULTS_FIXED is set; works at other stages."""
    return fine() if _stage() != 2 or os.environ.get("FAULTS_FIXED") else Tiny(lambda _step: time.sleep(0.5))


def becomes_another_program() -> Tiny:
    """Rank 0 and a child in a session of its own become other programs, without our handlers and variables."""

    def act(step: int) -> None:
        if _rank() == 0 and step == 2:
            if os.fork() == 0:
                os.setsid()
            os.execve("/bin/sleep", ["sleep", "10000"], {})

    return Tiny(act)


def stops_the_whole_trial() -> Tiny:
    """Stops every process of the session, the leader first."""

    def act(step: int) -> None:
        if _rank() == 0 and step == 2:
            os.kill(os.getppid(), signal.SIGSTOP)
            os.killpg(0, signal.SIGSTOP)

    return Tiny(act)
