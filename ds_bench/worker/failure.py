"""What an exception in a rank means: the kind of failure, and the bytes asked and free.

Texts are those of torch 2.11-2.13 and DeepSpeed 0.19.8; each pattern has a test that raises the
real thing, or its text where no card is at hand.
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
"""Free bytes below which a cuBLAS handle that cannot be made means that memory ran out: handle, workspace and the
kernels that CUDA loads on first use take some hundred MB."""
_SIZE = re.compile(r"([\d.]+) (GiB|MiB|KiB|bytes|B)\b")
_SCALE = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1, "B": 1}


def kind_of(error: BaseException, *, limited: bool = False, device_free_bytes: int | None = None) -> str:
    """``device_oom``, ``host_oom``, ``disk_full``, ``peer_lost`` or ``other``.

    ``limited``: host memory is limited, so a thread that cannot start means that it ran out.
    ``device_free_bytes``: free on the card when the error was caught; None where unknown.
    """
    name, text = type(error).__name__, str(error)
    if name != "OutOfMemoryError" and "error: out of memory" in text and _was_pinning(error):
        return "host_oom"
    if name == "OutOfMemoryError" or _DEVICE_OOM.search(text):
        return "device_oom"
    if "CUBLAS_STATUS_NOT_INITIALIZED" in text and device_free_bytes is not None:
        return "device_oom" if device_free_bytes < _CUBLAS_WITHOUT_MEMORY_BYTES else "other"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    if "No space left on device" in text:
        return "disk_full"
    if isinstance(error, MemoryError) or _HOST_OOM.search(text):
        return "host_oom"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host_oom"
    if limited and re.search(r"Resource temporarily unavailable|can't start new thread", text):
        return "host_oom"
    if name in ("DistBackendError", "DistNetworkError", "DistStoreError") or _PEER_LOST.search(text):
        return "peer_lost"
    return "other"


def _was_pinning(error: BaseException) -> bool:
    """Page-locked host memory ran out: CUDA words it like its own."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("pin_memory" in f"{frame.name} {frame.line}" for frame in frames)


def _size_after(text: str, words: str) -> int | None:
    found = re.search(words + r"\s+" + _SIZE.pattern, text)
    return int(float(found.group(1)) * _SCALE[found.group(2)]) if found else None


def _message(error: BaseException) -> str:
    """One line that tells the cause: of pydantic's report the field too, and where nothing is said, the source line."""
    lines = str(error).strip().splitlines()
    if not lines:
        frames = traceback.extract_tb(error.__traceback__)
        return f"{frames[-1].line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if type(error).__name__ == "ValidationError" and len(lines) > 2:
        return f"{lines[0]}: {lines[1]}: {lines[2].strip()}"
    return lines[0]


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

    ``emulated``: the card is made smaller than it is, so its free bytes are not those of the emulated one.
    ``device_free_bytes``: free on the card when the error was caught; what the text says was earlier, and goes before.
    """
    text = str(error)
    said_free = _size_after(text, "of which")
    return RankFailure(
        rank=rank,
        error_class=type(error).__name__,
        message=_message(error)[:500],
        phase=phase,
        time=time.time(),
        kind=kind_of(error, limited=limited, device_free_bytes=device_free_bytes),
        requested_bytes=_size_after(
            text, "(?:Tried to allocate|you tried to allocate|Failed to CUDA (?:calloc|malloc|host alloc)(?: async)?)"
        ),
        free_bytes=None if emulated else device_free_bytes if said_free is None else said_free,
        traceback="".join(traceback.format_exception(error))[-20000:],
        step=step,
    )
