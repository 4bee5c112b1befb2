"""Failures of a rank: their kind, the bytes they name and their message."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_bench.records.schema import RankFailure
from ds_bench.worker.failure import classify, failure_facts


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
# Kind, where the text was seen (an issue, or the source that has it), and the error; a string is a RuntimeError.
SEEN: list[tuple[str, str, BaseException | str]] = [
    ("device_oom", "nccl src/include/alloc.h", nccl("Failed to CUDA calloc async 608 bytes")),
    ("device_oom", "nccl#1235", nccl("Cuda failure 2 'out of memory'")),
    ("device_oom", "Open-Sora-Plan#386", nccl("Cuda failure 'out of memory'")),  # NCCL before 2.19 names no number
    ("device_oom", "triton driver.c", "Triton Error [CUDA]: out of memory"),
    ("device_oom", "FramePack#382", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 31.25 GiB.")),
    ("device_oom", "DeepSpeedExamples#323", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
    ("device_oom", "cufft.h 12", "cuFFT error: CUFFT_ALLOC_FAILED"),
    ("device_oom", "cusparse.h 12", "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
    ("device_oom", "cusolver_common.h 12", "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `syevd`"),
    ("device_oom", "pytorch#20123", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("device_oom", "cudnn_graph.h 9", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("device_oom", "DenseFusion#104", "CUDA error: out of memory"),
    ("device_oom", "c10/cuda/driver_api.h", "CUDA driver error: out of memory"),
    ("host_oom", "nccl alloc.h", "ncclUnhandledCudaError\nLast error:\nFailed to CUDA host alloc 1048576 bytes"),
    ("host_oom", "cudnn_graph.h 9", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    ("host_oom", "here", MemoryError()),
    ("host_oom", "here", raised_by(lambda: torch.empty(2**60, dtype=torch.uint8))),
    ("host_oom", "here", "std::bad_alloc"),
    ("host_oom", "here", OSError(errno.ENOMEM, "Cannot allocate memory")),
    ("host_oom", "OpenRLHF#911",
     RayOutOfMemoryError("killed due to the node running low on memory.\nMemory was 9GB / 10GB")),
    ("disk_full", "here", OSError(errno.ENOSPC, NO_SPACE)),
    ("disk_full", "here", OSError(errno.EDQUOT, "Disk quota exceeded")),
    ("disk_full", "verl#3346", raised_by(lambda: torch.save(torch.zeros(2**18), "/dev/full"))),
    ("shared_memory", "torchtitan#853", nccl(
        f"Error while creating shared memory segment /dev/shm/nccl-a1 (size 33030528), error: {NO_SPACE} (28)")),
    ("shared_memory", "kserve#3791",
     nccl("Error while creating shared memory segment /dev/shm/nccl-b2 (size 9637888)")),
    ("shared_memory", "nccl-tests#166", nccl("Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes")),
    ("shared_memory", "ESLAM#20", f"unable to write to file </torch_1_2_3>: {NO_SPACE} (28)"),
    ("shared_memory", "MapAllocator.cpp",
     "unable to allocate shared memory(shm) for file </t>: Resource temporarily unavailable"),
    ("shared_memory", "pytorch#5040",
     "DataLoader worker (pid 7) is killed. It is possible that workers are out of shared memory."),
    ("shared_memory", "nnUNet#2162", OSError(errno.ENOSPC, NO_SPACE, "/dev/shm/x")),
    ("memlock", "nccl-tests#206", nccl("Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory")),
    ("memlock", "nccl#1191", nccl("Call to ibv_create_cq failed with error Cannot allocate memory")),
    ("memlock", "libfabric#8256", nccl("ibv_create_qp: Cannot allocate memory(12)")),
    ("memlock", "nccl#563", nccl("NET/OFI Unable to register memory. RC: 12, Error: Cannot allocate memory")),
    ("peer_access", "EasyR1#579", PEER_ACCESS),
    ("fabric_manager", "pytorch#35710", "CUDA error: system not yet initialized"),
    ("fabric_manager", "cudaErrorSystemNotReady", nccl("Cuda failure 802 'system not yet initialized'")),
    ("gathered_views", "DeepSpeed 0.18.9 on two CPU ranks, torch 2.13",
     "Output 0 of Split is a view and is being modified inplace. This view is the output of a function that returns "
     "multiple views. Such functions do not allow the output views to be modified inplace."),
    ("pinned_memory", "DeepSpeed#7150", "in pin_memory thread: CUDA error: invalid argument"),
    ("collective_timeout", "sglang#1693", "[Rank 5] Watchdog caught collective operation timeout"),
    ("peer_lost", "nccl#1410", "ncclUnhandledCudaError: Call to CUDA function failed."),
    ("peer_lost", "gloo pair.cc", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"),
    ("peer_lost", "nccl#2013", nccl("Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1")),
    ("peer_lost", "sglang#5594", nccl("socketStartConnect: Connect to 10.0.0.82<38455> failed : Software caused "
                                      "connection abort")),
    ("peer_lost", "ms-swift#8043",
     nccl("socketPollConnect: connect to 169.254.20.10<52597> returned Connection refused")),
    ("peer_lost", "vllm#18831", nccl("Error while attaching to shared memory segment /dev/shm/nccl-c3 (size 9), "
                                     "error: No such file or directory (2)")),
    # The rank's own failure: other ranks only lose their connection to it.
    ("other", "nccl#1410", nccl("Cuda failure 1 'invalid argument'")),
    ("other", "nccl#1029", nccl("Cuda failure 'initialization error'")),
    ("other", "pytorch#170045", nccl("Cuda failure 999 'unknown error'")),
    ("other", "open-gpu-kernel-modules#38", nccl("Cuda failure 205 'mapping of buffer object failed'")),
    ("other", "cudaErrorNoKernelImageForDevice", nccl("Cuda failure 209 'no kernel image is available'")),
    ("other", "trl#4149", "CUDA error: uncorrectable ECC error encountered"),
    ("other", "DeepSpeed#1852", "CUDA error: an illegal memory access was encountered"),
    ("other", "triton#8182", "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block "
                             "sizes or `num_stages` may help."),
    ("other", "triton#1302", "Triton Error [CUDA]: an illegal memory access was encountered"),
    ("other", "pytorch#14768", "unable to open shared memory object </torch_1>: Too many open files"),
    ("other", "here", "CUDA error: invalid argument"),
    ("other", "here", KeyError("out of order")),
]  # fmt: skip


def test_every_text_seen_in_the_field_has_its_cause(subtests: pytest.Subtests) -> None:
    for kind, source, error in SEEN:
        with subtests.test(f"{source}: {error!r}"):
            assert classify(RuntimeError(error) if isinstance(error, str) else error) == kind


def test_the_failing_line_decides_where_the_text_does_not() -> None:
    def pin_memory() -> None:
        raise RuntimeError("CUDA error: out of memory")

    def SemLock() -> None:  # noqa: N802
        raise OSError(errno.ENOSPC, NO_SPACE)

    assert classify(raised_by(pin_memory)) == "pinned_memory"
    assert classify(raised_by(SemLock)) == "shared_memory", "semaphores are files in /dev/shm"


def failure_of(error: BaseException, free_bytes: int | None = None) -> RankFailure:
    return RankFailure(**failure_facts(error, rank=1, phase="backward", step=7, device_free_bytes=free_bytes))


def test_the_message_is_the_cause_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    message = failure_of(PEER_ACCESS).message
    assert message.startswith("NCCL error in: ProcessGroupNCCL.cpp:3699")
    assert message.endswith("Cuda failure 217 'peer access is not supported between these devices'")
    refused = raised_by(lambda: DeepSpeedZeroConfig(stage=1, overlap_com=True))
    expected = "1 validation error for DeepSpeedZeroConfig: overlap_com: Extra inputs are not permitted"
    assert failure_of(refused).message.startswith(expected)
    loader = torch.utils.data.DataLoader([1, "x"], batch_size=2, num_workers=1)
    of_worker = "Caught TypeError in DataLoader worker process 0. TypeError: new(): invalid data type 'str'"
    assert failure_of(raised_by(lambda: next(iter(loader)))).message == of_worker
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
