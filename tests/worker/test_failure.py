"""Failures of a rank: their kind, the bytes they name and how they are told."""

from __future__ import annotations

import errno
import importlib
from pathlib import Path

import pytest
import torch

from ds_bench.worker.failure import classify, rank_failure


def real_host_refusal() -> BaseException:
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("an exabyte was allocated")


NCCL_CALLOC = torch.distributed.DistBackendError(
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2049, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nFailed to CUDA calloc async 608 bytes"
)
KINDS = [
    (NCCL_CALLOC, "device_oom"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "device_oom"),
    (RuntimeError("ncclUnhandledCudaError\nLast error:\nFailed to CUDA host alloc 1048576 bytes"), "host_oom"),
    (RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed."), "peer_lost"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), "device_oom"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device_oom"),
    (RuntimeError("CUDA error: out of memory"), "device_oom"),
    (MemoryError(), "host_oom"),
    (real_host_refusal(), "host_oom"),
    (RuntimeError("std::bad_alloc"), "host_oom"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_oom"),
    (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
    (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"), "peer_lost"),
    (torch.distributed.DistBackendError("NCCL error in: x.cpp:1, remote process exited"), "peer_lost"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "other"),
    (KeyError("out of order"), "other"),
]


def nccl_error(reason: str) -> BaseException:
    """What torch raises where NCCL fails: the reason is in the last line."""
    return torch.distributed.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled error, NCCL version 2.27.3\n"
        f"ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n{reason}"
    )


def real_full_disk() -> BaseException:
    try:
        torch.save(torch.zeros(2**18), "/dev/full")
    except RuntimeError as error:
        return error
    raise AssertionError("wrote to a full disk")


class RayOutOfMemoryError(Exception):
    """ray.exceptions.OutOfMemoryError: of the host, with the name of torch's error of the GPU."""


RayOutOfMemoryError.__name__, RayOutOfMemoryError.__module__ = "OutOfMemoryError", "ray.exceptions"
# Each with the issue where it was seen, if there is one.
SEEN = [
    ("EasyR1#579", nccl_error("Cuda failure 217 'peer access is not supported between these devices'"), "peer_access"),
    ("open-gpu-kernel-modules#38", nccl_error("Cuda failure 205 'mapping of buffer object failed'"), "peer_lost"),
    ("number of CUDA, 201", nccl_error("Cuda failure 201 'invalid device context'"), "peer_lost"),
    ("number of CUDA, 209", nccl_error("Cuda failure 209 'no kernel image is available'"), "peer_lost"),
    ("number of CUDA, 1", nccl_error("Cuda failure 1 'invalid argument'"), "peer_lost"),
    ("nccl#1235", nccl_error("Cuda failure 2 'out of memory'"), "device_oom"),
    ("nccl#1235, older", nccl_error("Cuda failure 'out of memory'"), "device_oom"),
    (
        "torchtitan#853",
        nccl_error("Error while creating shared memory segment /dev/shm/nccl-a1 (size 9), error: No space left (28)"),
        "shared_memory",
    ),
    ("nccl#290", nccl_error("Error while creating shared memory segment nccl-shm-recv-0 (size 9)"), "shared_memory"),
    ("ESLAM#20", RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)"), "shared_memory"),
    (
        "nnUNet#2162",
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: Resource temporarily unavailable"),
        "shared_memory",
    ),
    (
        "pytorch#5040",
        RuntimeError("DataLoader worker (pid 7) is killed. It is possible that workers are out of shared memory."),
        "shared_memory",
    ),
    ("Megatron-LM#878", OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"), "shared_memory"),
    ("nccl-tests#206", nccl_error("Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"), "memlock"),
    ("nccl#342", nccl_error("Call to ibv_create_cq failed with error Cannot allocate memory"), "memlock"),
    ("nccl#563", nccl_error("NET/OFI Unable to register memory. RC: 12, Error: Cannot allocate memory"), "memlock"),
    (
        "sglang#1693",
        RuntimeError("[Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)"),
        "collective_timeout",
    ),
    ("pytorch#35710", RuntimeError("CUDA error: system not yet initialized"), "fabric_manager"),
    ("DeepSpeed#7150", RuntimeError("in pin_memory thread: CUDA error: invalid argument"), "pinned_memory"),
    (
        "OpenRLHF#911",
        RayOutOfMemoryError("Task was killed due to the node running low on memory.\nMemory was 9GB / 10GB (0.95)"),
        "host_oom",
    ),
    ("verl#3346", real_full_disk(), "disk_full"),
    ("a quota", OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
    ("pytorch#14768", RuntimeError("unable to open shared memory object </torch_1>: Too many open files"), "other"),
    ("an argument of any kernel", RuntimeError("CUDA error: invalid argument"), "other"),
]


def test_every_text_seen_in_the_field_has_its_cause(subtests: pytest.Subtests) -> None:
    for issue, error, kind in (*SEEN, *(("", error, kind) for error, kind in KINDS)):
        with subtests.test(issue or repr(error)):
            assert classify(error) == kind


def test_semaphore_that_cannot_be_created_means_a_full_shared_memory() -> None:
    class Context:
        @staticmethod
        def SemLock() -> None:  # noqa: N802
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as caught:
        Context.SemLock()
    assert classify(caught.value) == "shared_memory"


def test_host_memory_that_cannot_be_pinned_is_not_the_gpus(subtests: pytest.Subtests) -> None:
    def pin_memory(text: str) -> None:
        raise RuntimeError(text)

    for text in ("CUDA error: out of memory", "CUDA error: invalid argument"):
        with subtests.test(text):
            with pytest.raises(RuntimeError) as caught:
                pin_memory(text)
            assert classify(caught.value) == "pinned_memory"


def test_the_last_error_of_nccl_is_in_the_message() -> None:
    message = rank_failure(SEEN[0][1], rank=0, phase="init", step=None).message
    assert message.startswith("NCCL error in: ProcessGroupNCCL.cpp:3699")
    assert message.endswith("Cuda failure 217 'peer access is not supported between these devices'")


def test_a_failure_of_pydantic_names_the_field_and_the_reason() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    with pytest.raises(ValueError, match="overlap_com") as caught:
        DeepSpeedZeroConfig(stage=1, overlap_com=True)
    message = rank_failure(caught.value, rank=0, phase="init", step=None).message
    assert message.startswith("1 validation error for DeepSpeedZeroConfig: overlap_com: Extra inputs are not permitted")


def test_a_bare_assert_is_told_by_its_source_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_check.py").write_text("def check(size):\n    assert size % 2 == 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AssertionError) as caught:
        importlib.import_module("own_check").check(3)
    message = rank_failure(caught.value, rank=0, phase="init", step=None).message
    assert message == f"assert size % 2 == 0 ({tmp_path}/own_check.py:2)"


def test_bytes_asked_and_free_are_read_from_an_out_of_memory_error() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.65 GiB of which 512.00 MiB "
        "is free. Including non-PyTorch memory, this process has 22.00 GiB memory in use."
    )
    failure = rank_failure(torch.OutOfMemoryError(text), rank=1, phase="backward", step=7)
    assert (failure.requested_bytes, failure.free_bytes) == (int(1.5 * 2**30), 512 * 2**20)
    assert (failure.rank, failure.phase, failure.step) == (1, "backward", 7)
    later = rank_failure(torch.OutOfMemoryError(text), rank=0, phase="step", step=1, device_free_bytes=2**40)
    assert later.free_bytes == 512 * 2**20, "what was free when it failed, not when it was caught"
    assert rank_failure(NCCL_CALLOC, rank=0, phase="init", step=None).requested_bytes == 608
    unnamed = rank_failure(RuntimeError("CUDA error: out of memory"), rank=0, phase="step", step=None)
    assert (unnamed.requested_bytes, unnamed.free_bytes) == (None, None)


NO_HANDLE = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")


def test_a_cublas_handle_that_cannot_be_made_is_a_lack_of_memory_where_little_is_free(
    subtests: pytest.Subtests,
) -> None:
    for free, kind in ((100 * 2**20, "device_oom"), (40 * 2**30, "other"), (None, "other")):
        with subtests.test(free=free, kind=kind):
            failure = rank_failure(NO_HANDLE, rank=0, phase="forward", step=0, device_free_bytes=free)
            assert (failure.kind, failure.free_bytes) == (kind, free)
