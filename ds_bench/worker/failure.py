"""Classifies an exception in a rank: the kind of failure, and the bytes requested and free.

Texts come from torch, DeepSpeed, NCCL, CUDA's libraries and Ray; each kind of failure has a test, with the real
exception where a test can raise it, else with its text. The hook of a user's script imports this module in the script's
interpreter (``script_hook``): keep it to the standard library and Python 3.9.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
from typing import Any

_CAUSES = tuple(
    (kind, re.compile(pattern, re.IGNORECASE | re.DOTALL))
    for kind, pattern in (
        # Each names one cause, which the wider patterns below would miss or mistake for another.
        ("collective_timeout", r"Watchdog caught collective operation timeout"),
        (
            "shared_memory",
            r"creating shared memory segment|failed to extend /dev/shm/|workers are out of shared memory|"
            r"unable to write to file </torch_|"
            r"(?:shared memory|/dev/shm/).*(?:No space left|Resource temporarily)|No space left.*/dev/shm/",
        ),
        ("memlock", r"(?:ibv_|NET/OFI Unable to register memory).*Cannot allocate memory"),
        ("peer_access", r"peer access is not supported"),
        ("fabric_manager", r"system not yet initialized"),
        # DeepSpeed before 0.19, stages 1 and 2, several CPU ranks (``library_versions.adapt_engine``).
        ("gathered_views", r"Output 0 of Split\w* is a view and is being modified inplace"),
        ("host_oom", r"node running low on memory|GB \([\d.]+%?\).{0,30}(?:exceeds the memory|OOM)"),  # Ray
        (
            "device_oom",
            r"CUDA out of memory|HIP out of memory|CUDA (?:driver )?error: out of memory|"
            r"CU(?:FFT|(?:BLAS|DNN|SOLVER|SPARSE)_STATUS)_ALLOC_FAILED|CUDNN_STATUS_\w+_DEVICE_ALLOCATION_FAILED|"
            r"cudaErrorMemoryAllocation|"
            r"cudaMalloc failed: out of memory|Triton Error \[CUDA\]: out of memory|Failed to CUDA (?:calloc|malloc)|"
            r"NCCL.*(?:Cuda failure 2\b|out of memory)",
        ),
        (
            "disk_full",
            r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed|container.*unexpected pos",
        ),
        (
            "host_oom",
            r"DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory|std::bad_alloc|unable to mmap|"
            r"CUDNN_STATUS_\w+_HOST_ALLOCATION_FAILED|cudaHostAlloc.*(?:failed|out of memory)|"
            r"Failed to CUDA host alloc|Unable to allocate .* for an array",
        ),
        # NCCL reports a CUDA error in this rank; its peers only lose their connections.
        ("other", r"Cuda failure(?: \d+)? '"),
        # Last: an NCCL error that mentions a lack of memory is a memory error.
        (
            "peer_lost",
            r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|"
            r"\[.*gloo.*\].*(?:Timed out|Read error|Connection)|"
            r"NCCL (?:error|communicator was aborted)|ncclRemoteError|ncclSystemError|ncclUnhandledCudaError|"
            r"Socket Timeout|wait timeout|ProcessGroup.*(?:timed? ?out|abort)",
        ),
    )
)
"""Kind of failure and the pattern that shows it; the first that matches counts."""
_NO_THREAD = re.compile(r"Resource temporarily unavailable|can't start new thread")
_PINNING_FAILED = re.compile(r"CUDA (?:driver )?error: (?:out of memory|invalid argument)")
_CUBLAS_WITHOUT_MEMORY_BYTES = 2**30
"""With fewer bytes free, a cuBLAS handle that cannot be created means that memory ran out: the handle, its workspace
and the kernels that CUDA loads on first use take several hundred MB."""
_SIZE = re.compile(r"([\d.]+) (GiB|MiB|KiB|bytes|B)\b")
_SCALE = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1, "B": 1}


def classify(error: BaseException, *, limited: bool = False, device_free_bytes: int | None = None) -> str:
    """Return the kind of failure (``RankFailure.kind``).

    ``limited``: host memory is limited, so a thread that cannot start means that memory ran out.
    ``device_free_bytes``: free on the GPU when the error was caught; None if unknown.
    """
    text, (package, *_), name = str(error), type(error).__module__.split("."), type(error).__name__
    # CUDA uses one text for both its own memory and page-locked host memory; the failing line decides.
    frames = "".join(f"{frame.name} {frame.line}\n" for frame in traceback.extract_tb(error.__traceback__))
    if _PINNING_FAILED.search(text) and "pin_memory" in frames + text:
        return "pinned_memory"
    if (package, name) == ("torch", "OutOfMemoryError"):
        return "device_oom"
    if "CUBLAS_STATUS_NOT_INITIALIZED" in text and device_free_bytes is not None:
        return "device_oom" if device_free_bytes < _CUBLAS_WITHOUT_MEMORY_BYTES else "other"
    if kind := next((kind for kind, pattern in _CAUSES if pattern.search(text)), None):
        # Semaphores are files in /dev/shm too, and the error for one that cannot be created names no path.
        return "shared_memory" if kind == "disk_full" and "SemLock" in frames else kind
    if isinstance(error, MemoryError) or (limited and _NO_THREAD.search(text)):
        return "host_oom"
    return "peer_lost" if name in ("DistBackendError", "DistNetworkError", "DistStoreError") else "other"


def _find_size(text: str, words: str) -> int | None:
    """The bytes that follow ``words``, a pattern; None without any."""
    match = re.search(words + r"\s+" + _SIZE.pattern, text)
    return int(float(match.group(1)) * _SCALE[match.group(2)]) if match else None


def _summarize(error: BaseException) -> str:
    """The cause in one line, with the field for pydantic's report; the source line if the error has no text."""
    lines = str(error).strip().splitlines()
    if not lines:
        frames = traceback.extract_tb(error.__traceback__)
        return f"{frames[-1].line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if type(error).__name__ == "ValidationError" and len(lines) > 2:
        return f"{lines[0]}: {lines[1]}: {lines[2].strip()}"
    if lines[0].endswith(":"):  # the message follows, as in the Trainer's list of mismatched values
        return " ".join(line.strip() for line in lines)
    if re.match(r"Caught \w+ in ", lines[0]):  # from a worker of a data loader (torch/_utils.py, ExceptionWrapper)
        return f"{lines[0]} {lines[-1].strip()}"
    # NCCL's first line names the call that failed; only the line after "Last error:" says why.
    last_error = lines.index("Last error:") + 1 if "Last error:" in lines else len(lines)
    return " ".join([lines[0], *lines[last_error : last_error + 1]])


def describe_error(error: BaseException) -> str:
    """Class and cause of an error in one line, for a worker program's reply."""
    return f"{type(error).__name__}: {_summarize(error)[:300]}"


def device_free_bytes() -> int | None:
    """Free memory of this rank's GPU as the driver reports it; None before CUDA is used, or if CUDA calls fail."""
    torch: Any = sys.modules.get("torch")  # a rank that failed before torch was imported uses no GPU
    try:
        return int(torch.cuda.mem_get_info()[0]) if torch is not None and torch.cuda.is_initialized() else None
    except Exception:  # after some errors every call into CUDA fails
        return None


def full_traceback(error: BaseException) -> str:
    """The traceback, including its causes; a long one is cut to its end, where the exception was raised."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))[-20000:]


def failure_facts(
    error: BaseException,
    *,
    rank: int,
    phase: str,
    step: int | None,
    emulated: bool = False,
    limited: bool = False,
    device_free_bytes: int | None = None,
) -> dict[str, Any]:
    """The fields of a RankFailure. ``phase`` is what the rank was doing.

    ``emulated``: a smaller GPU is emulated, so the real one's free bytes do not apply.
    ``device_free_bytes``: free on the GPU when the error was caught; free bytes in its text take precedence, since
    they were read earlier.
    """
    text = str(error)
    free_bytes = _find_size(text, "of which")
    requested = "(?:Tried to allocate|you tried to allocate|Failed to CUDA (?:calloc|malloc|host alloc)(?: async)?)"
    return {
        "rank": rank,
        "error_class": type(error).__name__,
        "message": _summarize(error)[:500],
        "phase": phase,
        "time": time.time(),
        "kind": classify(error, limited=limited, device_free_bytes=device_free_bytes),
        "requested_bytes": _find_size(text, requested),
        "free_bytes": None if emulated else device_free_bytes if free_bytes is None else free_bytes,
        "traceback": full_traceback(error),
        "step": step,
    }
