"""Classifies an exception in a rank: the kind of failure, and the bytes requested and free.

Texts are those of torch 2.11-2.13 and DeepSpeed 0.19.8; each pattern has a test that raises the real exception, or its
text where that needs a GPU.
"""

from __future__ import annotations

import errno
import re
import time
import traceback

from ..records.schema import RankFailure

_DEVICE_OOM = re.compile(
    r"CUDA out of memory|HIP out of memory|CUDA (?:driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|cudaMalloc failed: out of memory|"
    r"Triton Error \[CUDA\]: out of memory|Failed to CUDA (?:calloc|malloc)|"
    r"NCCL.*(?:Cuda failure 2|out of memory)",
    re.IGNORECASE | re.DOTALL,
)
_HOST_OOM = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory|std::bad_alloc|unable to mmap|"
    r"cudaHostAlloc.*(?:failed|out of memory)|Failed to CUDA host alloc|Unable to allocate .* for an array",
    re.IGNORECASE | re.DOTALL,
)
_PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|"
    r"\[.*gloo.*\].*(?:Timed out|Read error|Connection)|"
    r"NCCL (?:error|communicator was aborted)|ncclRemoteError|ncclSystemError|ncclUnhandledCudaError|"
    r"Socket Timeout|wait timeout|ProcessGroup.*(?:timed? ?out|abort)",
    re.IGNORECASE | re.DOTALL,
)
_CUBLAS_WITHOUT_MEMORY_BYTES = 2**30
"""With fewer bytes free, a cuBLAS handle that cannot be created means that memory ran out: handle, workspace and the
kernels that CUDA loads on first use take some hundred MB."""
_SIZE = re.compile(r"([\d.]+) (GiB|MiB|KiB|bytes|B)\b")
_SCALE = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1, "B": 1}


def classify(error: BaseException, *, limited: bool = False, device_free_bytes: int | None = None) -> str:
    """The kind of failure: ``device_oom``, ``host_oom``, ``disk_full``, ``peer_lost`` or ``other``.

    ``limited``: host memory is limited, so a thread that cannot start means that it ran out.
    ``device_free_bytes``: free on the GPU when the error was caught; None where unknown.
    """
    name, text = type(error).__name__, str(error)
    if name != "OutOfMemoryError" and "error: out of memory" in text:
        # CUDA has one text for its own memory and for page-locked host memory; the failing line tells them apart.
        frames = traceback.extract_tb(error.__traceback__)
        if any("pin_memory" in f"{frame.name} {frame.line}" for frame in frames):
            return "host_oom"
    if name == "OutOfMemoryError" or _DEVICE_OOM.search(text):
        return "device_oom"
    if "CUBLAS_STATUS_NOT_INITIALIZED" in text and device_free_bytes is not None:
        return "device_oom" if device_free_bytes < _CUBLAS_WITHOUT_MEMORY_BYTES else "other"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in text:
        return "disk_full"
    if isinstance(error, MemoryError) or number == errno.ENOMEM or _HOST_OOM.search(text):
        return "host_oom"
    if limited and re.search(r"Resource temporarily unavailable|can't start new thread", text):
        return "host_oom"
    # Last: an error of NCCL that tells of lacking memory is one of memory.
    if name in ("DistBackendError", "DistNetworkError", "DistStoreError") or _PEER_LOST.search(text):
        return "peer_lost"
    return "other"


def _find_size(text: str, words: str) -> int | None:
    """The bytes that follow ``words``, a pattern; None without any."""
    match = re.search(words + r"\s+" + _SIZE.pattern, text)
    return int(float(match.group(1)) * _SCALE[match.group(2)]) if match else None


def _summarise(error: BaseException) -> str:
    """The cause in one line: of pydantic's report with the field, and the source line where the error has no text."""
    lines = str(error).strip().splitlines()
    if not lines:
        frames = traceback.extract_tb(error.__traceback__)
        return f"{frames[-1].line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if type(error).__name__ == "ValidationError" and len(lines) > 2:
        return f"{lines[0]}: {lines[1]}: {lines[2].strip()}"
    return lines[0]


def describe_error(error: BaseException) -> str:
    """Class and cause of an error in one line, for a reply of a worker program."""
    return f"{type(error).__name__}: {_summarise(error)[:300]}"


def rank_failure(
    error: BaseException,
    *,
    rank: int,
    phase: str,
    step: int | None,
    emulated: bool = False,
    limited: bool = False,
    device_free_bytes: int | None = None,
) -> RankFailure:
    """The failure as the rank reports it. ``phase`` is what the rank was doing.

    ``emulated``: a smaller GPU is emulated, to which the free bytes of the real one do not apply.
    ``device_free_bytes``: free on the GPU when the error was caught; free bytes in its text are used first, since they
    were read earlier.
    """
    text = str(error)
    free_bytes = _find_size(text, "of which")
    return RankFailure(
        rank=rank,
        error_class=type(error).__name__,
        message=_summarise(error)[:500],
        phase=phase,
        time=time.time(),
        kind=classify(error, limited=limited, device_free_bytes=device_free_bytes),
        requested_bytes=_find_size(
            text, "(?:Tried to allocate|you tried to allocate|Failed to CUDA (?:calloc|malloc|host alloc)(?: async)?)"
        ),
        free_bytes=None if emulated else device_free_bytes if free_bytes is None else free_bytes,
        # Of a long one the end, where the exception was raised.
        traceback="".join(traceback.format_exception(error))[-20000:],
        step=step,
    )
