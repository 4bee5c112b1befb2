"""Time and bytes of collective operations, of a stand-in for DeepSpeed's backend."""

from __future__ import annotations

import time
from typing import Any

import deepspeed.comm.comm
import pytest
import torch
from deepspeed.utils.comms_logging import CommsLogger
from deepspeed.utils.timer import SynchronizedWallClockTimer

from ds_bench.worker import communication
from ds_bench.worker.communication import CommunicationTimer, operation_bytes, summarise_calls


class Work:
    waited = 0

    def wait(self) -> None:
        self.waited += 1


class Backend:
    def __init__(self) -> None:
        self.work = Work()

    def all_gather_into_tensor(self, _output: torch.Tensor, _input: torch.Tensor, **_: Any) -> Work:
        return self.work

    def all_gather_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], **_: Any) -> None:
        for output, part in zip(outputs, inputs, strict=True):
            self.all_gather_into_tensor(output, part)

    def barrier(self) -> None:
        raise RuntimeError("a rank was lost")


def test_every_operation_is_waited_for_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that DeepSpeed starts beside the training, and those that its own logger does not see."""
    backend = Backend()
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", backend)
    part, whole = torch.zeros(4), torch.zeros(8)
    with CommunicationTimer(lambda: None) as timer:
        assert deepspeed.comm.comm.cdb.all_gather_into_tensor(whole, part, async_op=True) is backend.work
        assert backend.work.waited == 1
        backend.all_gather_coalesced([whole, whole], [part, part])
        with pytest.raises(RuntimeError):
            backend.barrier()
    assert vars(backend) == {"work": backend.work}
    monkeypatch.setattr(communication, "_fastest_of_ranks", lambda seconds, _device: [each / 2 for each in seconds])
    largest, other = timer.operations(2, torch.device("cpu"))
    assert (largest.name, largest.count, largest.bytes) == ("all_gather_coalesced", 0.5, 32)
    assert (other.name, other.count, other.bytes) == ("all_gather_into_tensor", 0.5, 16)
    assert largest.seconds + other.seconds == pytest.approx(timer.seconds / 2)
    assert largest.wait_seconds == pytest.approx(largest.seconds / 2)


def test_deepspeeds_own_logger_still_adds_up_the_times_of_earlier_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why its times are not used, and what it does not see. If this fails, it is mended: look again."""

    class Slow(Backend):
        using_mpi = False

        def is_initialized(self) -> bool:
            return True

        def get_world_size(self, _group: object = None) -> int:
            return 2

        def all_reduce(self, *_: Any) -> None:
            time.sleep(0.01)

    logger = CommsLogger()
    logger.enabled = logger.prof_all = True
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", Slow())
    monkeypatch.setattr(deepspeed.comm.comm, "comms_logger", logger)
    monkeypatch.setattr(deepspeed.comm.comm, "timers", SynchronizedWallClockTimer())
    for _ in range(3):
        deepspeed.comm.all_reduce(torch.zeros(2))
    deepspeed.comm.all_gather_coalesced([torch.zeros(2)], [torch.zeros(1)])
    assert list(logger.comms_dict) == ["all_reduce"]
    count, milliseconds, *_ = logger.comms_dict["all_reduce"][8]
    assert count == 3
    assert milliseconds[2] >= 29  # three times what one took


def test_the_bytes_of_an_operation_are_those_of_the_whole_tensor() -> None:
    part, whole = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)
    assert operation_bytes("reduce_scatter_tensor", [part, whole, None]) == 12
    assert operation_bytes("all_gather", [[part, part], part]) == 12
    assert operation_bytes("all_reduce", [whole]) == 24  # a reduce-scatter and an all-gather
    assert operation_bytes("broadcast_object_list", [["text"], 0]) == 0


def test_waiting_is_not_known_where_ranks_made_different_calls() -> None:
    calls = [communication._Call("all_reduce", 8, 0.5)]
    (operation,) = summarise_calls(calls, None, 1)
    assert operation.wait_seconds is None
    assert operation.seconds == 0.5
