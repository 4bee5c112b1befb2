"""Failures of a rank: their kind, the bytes they name and their message."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_bench.records.schema import RankFailure
from ds_bench.worker.failure import classify, rank_failure


def raised_by(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def nccl(reason: str) -> BaseException:
    """What torch raises where NCCL fails: the reason is in the last line."""
    return torch.distributed.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled error, NCCL version 2.27.3\n"
        f"ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n{reason}"
    )


class RayOutOfMemoryError(Exception):
    """ray.exceptions.OutOfMemoryError: of the host, with the name of torch's error of the GPU."""


RayOutOfMemoryError.__name__, RayOutOfMemoryError.__module__ = "OutOfMemoryError", "ray.exceptions"
PEER_ACCESS = nccl("Cuda failure 217 'peer access is not supported between these devices'")
NO_SPACE = "No space left on device"
# Kind, and the errors that are of it, a text alone standing for a RuntimeError; with the issue where each was seen.
SEEN: dict[str, list[BaseException | str]] = {
    "device_oom": [
        nccl("Failed to CUDA calloc async 608 bytes"),
        nccl("Cuda failure 2 'out of memory'"),  # nccl#1235
        nccl("Cuda failure 'out of memory'"),  # an older version
        "Triton Error [CUDA]: out of memory",
        torch.OutOfMemoryError("Tried to allocate 20.00 MiB."),
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory",
    ],
    "host_oom": [
        "ncclUnhandledCudaError\nLast error:\nFailed to CUDA host alloc 1048576 bytes",
        MemoryError(),
        raised_by(lambda: torch.empty(2**60, dtype=torch.uint8)),
        "std::bad_alloc",
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RayOutOfMemoryError("killed due to the node running low on memory.\nMemory was 9GB / 10GB"),  # OpenRLHF#911
    ],
    "disk_full": [
        OSError(errno.ENOSPC, NO_SPACE),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        raised_by(lambda: torch.save(torch.zeros(2**18), "/dev/full")),  # verl#3346
    ],
    "shared_memory": [
        nccl("Error while creating shared memory segment /dev/shm/nccl-a1 (size 9), error: No space left (28)"),
        f"unable to write to file </torch_1_2_3>: {NO_SPACE} (28)",  # ESLAM#20
        "unable to allocate shared memory(shm) for file </t>: Resource temporarily unavailable",
        "DataLoader worker (pid 7) is killed. It is possible that workers are out of shared memory.",
        OSError(errno.ENOSPC, NO_SPACE, "/dev/shm/x"),  # nnUNet#2162, pytorch#5040, Megatron-LM#878
    ],
    "memlock": [
        nccl("Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"),  # nccl-tests#206
        nccl("NET/OFI Unable to register memory. RC: 12, Error: Cannot allocate memory"),  # nccl#563
    ],
    "peer_access": [PEER_ACCESS],  # EasyR1#579
    "peer_lost": [
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3",
        nccl("Cuda failure 209 'no kernel image is available'"),  # begins with 2, the number of "out of memory"
    ],
    "collective_timeout": ["[Rank 5] Watchdog caught collective operation timeout"],  # sglang#1693
    "fabric_manager": ["CUDA error: system not yet initialized"],  # pytorch#35710
    "pinned_memory": ["in pin_memory thread: CUDA error: invalid argument"],  # DeepSpeed#7150
    "other": [
        "unable to open shared memory object </torch_1>: Too many open files",  # pytorch#14768
        "CUDA error: invalid argument",
        KeyError("out of order"),
    ],
}


def test_every_text_seen_in_the_field_has_its_cause(subtests: pytest.Subtests) -> None:
    for kind, errors in SEEN.items():
        for error in errors:
            with subtests.test(repr(error)):
                assert classify(RuntimeError(error) if isinstance(error, str) else error) == kind


def test_the_failing_line_decides_where_the_text_does_not() -> None:
    def pin_memory() -> None:
        raise RuntimeError("CUDA error: out of memory")

    def SemLock() -> None:  # noqa: N802
        raise OSError(errno.ENOSPC, NO_SPACE)

    assert classify(raised_by(pin_memory)) == "pinned_memory"
    assert classify(raised_by(SemLock)) == "shared_memory", "semaphores are files in /dev/shm"


def failure_of(error: BaseException, free_bytes: int | None = None) -> RankFailure:
    return rank_failure(error, rank=1, phase="backward", step=7, device_free_bytes=free_bytes)


def test_the_message_is_the_cause_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    message = failure_of(PEER_ACCESS).message
    assert message.startswith("NCCL error in: ProcessGroupNCCL.cpp:3699")
    assert message.endswith("Cuda failure 217 'peer access is not supported between these devices'")
    refused = raised_by(lambda: DeepSpeedZeroConfig(stage=1, overlap_com=True))
    expected = "1 validation error for DeepSpeedZeroConfig: overlap_com: Extra inputs are not permitted"
    assert failure_of(refused).message.startswith(expected)
    (tmp_path / "own_check.py").write_text("def check(size):\n    assert size % 2 == 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    bare = raised_by(lambda: importlib.import_module("own_check").check(3))
    assert failure_of(bare).message == f"assert size % 2 == 0 ({tmp_path}/own_check.py:2)"


def test_bytes_asked_and_free_are_read_from_an_out_of_memory_error() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.65 GiB of which 512.00 MiB "
        "is free. Including non-PyTorch memory, this process has 22.00 GiB memory in use."
    )
    failure = failure_of(torch.OutOfMemoryError(text), free_bytes=2**40)
    assert (failure.rank, failure.phase, failure.step) == (1, "backward", 7)
    # Free when it failed, not when it was caught.
    assert (failure.requested_bytes, failure.free_bytes) == (int(1.5 * 2**30), 512 * 2**20)
    assert failure_of(nccl("Failed to CUDA calloc async 608 bytes")).requested_bytes == 608
    unnamed = failure_of(RuntimeError("CUDA error: out of memory"))
    assert (unnamed.requested_bytes, unnamed.free_bytes) == (None, None)


@pytest.mark.parametrize(("free", "kind"), [(100 * 2**20, "device_oom"), (40 * 2**30, "other"), (None, "other")])
def test_a_cublas_handle_fails_for_lack_of_memory_only_if_little_is_free(free: int | None, kind: str) -> None:
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    failure = failure_of(error, free_bytes=free)
    assert (failure.kind, failure.free_bytes) == (kind, free)
