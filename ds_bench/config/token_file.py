"""Files of token ids: unsigned 16- or 32-bit integers, little-endian, without a header.

``numpy.ndarray.tofile`` writes this format; nanoGPT and Megatron use it. Ranks memory-map the files
(``worker.batches``), so a file may be larger than memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from ..errors import UsageError
from ..system import files
from ..units import format_bytes

TokenType = Literal["uint16", "uint32"]
TOKEN_TYPES: tuple[TokenType, ...] = get_args(TokenType)
NUMPY_TYPES: dict[TokenType, str] = {"uint16": "<u2", "uint32": "<u4"}
_SUFFIXES: dict[str, TokenType] = {".uint16": "uint16", ".u16": "uint16", ".uint32": "uint32", ".u32": "uint32"}
_LARGEST_READ_WHOLE = 2**30
"""Bytes. Only this much of a larger file is read, in parts, which takes a second or two."""
_PART_BYTES = 2**22
_LARGEST_FILE_BYTES = 2**60
_NUMPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of token ids."""

    path: Path
    """As the user gave it."""
    dtype: TokenType
    tokens: int
    digest: str
    """Hash of the size and the content that was read; if that is not the whole file, also of its modification time."""
    largest_id: int
    largest_at: int
    """Position of that id in the file, from 0."""
    read_tokens: int
    """Number of tokens that were read."""

    @property
    def note(self) -> str | None:
        """The limits of the check; None if all ids were read."""
        if self.read_tokens == self.tokens:
            return None
        whole, read = (format_bytes(count * item_bytes(self.dtype)) for count in (self.tokens, self.read_tokens))
        return (
            f"only {read} of {self.path} ({whole}), in evenly spaced parts, was read to check its ids; every rank "
            "checks those that it trains on"
        )

    def require_usable(self, vocabulary: int | None, owner: str, seq_length: int) -> None:
        """Raise UsageError for an id outside the vocabulary, or a file shorter than one sequence.

        ``vocabulary``: number of ids; None if unknown. ``owner``: whose vocabulary it is, for the message.
        """
        if vocabulary is not None and self.largest_id >= vocabulary:
            raise UsageError(
                f"{self.path} has the id {self.largest_id} at position {self.largest_at:,}, but {owner} has only "
                f"{vocabulary} ids",
                remedy="tokenize it with the model's tokenizer, or correct the type of its ids",
            )
        if self.tokens < seq_length:
            raise UsageError(
                f"{self.path} has {self.tokens} tokens, fewer than one sequence of {seq_length}",
                remedy=f"give a longer file, or a sequence of {self.tokens} tokens or fewer",
            )


def item_bytes(dtype: TokenType) -> int:
    return int(NUMPY_TYPES[dtype][-1])  # "<u2" has two bytes


def read_token_file(path: Path, requested: TokenType | None) -> TokenFile:
    """Read a file: all of it up to 1 GiB, otherwise evenly spaced parts. Raises UsageError.

    ``requested``: type of the ids; None to take it from the suffix.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder", remedy="give a file of token ids")
    dtype = requested or _SUFFIXES.get(path.suffix.lower())
    if dtype is None:
        problem = f"the suffix of {path} does not show the type of its ids"
        raise UsageError(problem, remedy="give --data-dtype uint16 or uint32")
    try:
        with files.opened(path, _LARGEST_FILE_BYTES) as file:
            status = path.stat()
            if file.read(len(_NUMPY_MAGIC)) == _NUMPY_MAGIC:
                problem = f"{path} is a NumPy file, whose header would be read as ids"
                raise UsageError(problem, remedy="write only the ids: array.tofile(FILE)")
            tokens, rest = divmod(status.st_size, item_bytes(dtype))
            if rest:
                problem = f"{path} has {status.st_size:,} bytes, which is not a whole number of {dtype} ids"
                raise UsageError(problem, remedy="it is cut off, or its ids have a different type")
            if not tokens:
                raise UsageError(f"{path} is empty", remedy="give a file of token ids")
            return _read_ids(path, dtype, tokens, file, status.st_mtime_ns)
    except OSError as error:
        problem = f"{path}: {error.strerror or error}"
        raise UsageError(problem, remedy="give a readable file of token ids") from None


def _read_ids(path: Path, dtype: TokenType, tokens: int, file: BinaryIO, changed_ns: int) -> TokenFile:
    import numpy

    size, part_tokens = tokens * item_bytes(dtype), _PART_BYTES // item_bytes(dtype)
    is_whole = size <= _LARGEST_READ_WHOLE
    parts = -(-size // _PART_BYTES) if is_whole else _LARGEST_READ_WHOLE // _PART_BYTES
    # The last of the evenly spaced parts ends with the file.
    starts = [part * (part_tokens if is_whole else (tokens - part_tokens) / (parts - 1)) for part in range(parts)]
    digest = hashlib.blake2b(f"{tokens}{'' if is_whole else f' {changed_ns}'}".encode(), digest_size=8)
    largest_id, largest_at, read_tokens = -1, 0, 0
    for start in map(round, starts):
        file.seek(start * item_bytes(dtype))
        content = file.read(_PART_BYTES)
        digest.update(content)
        ids = numpy.frombuffer(content, NUMPY_TYPES[dtype])
        place = int(ids.argmax())
        if int(ids[place]) > largest_id:
            largest_id, largest_at = int(ids[place]), start + place
        read_tokens += len(ids)
    return TokenFile(
        path=path,
        dtype=dtype,
        tokens=tokens,
        digest=digest.hexdigest(),
        largest_id=largest_id,
        largest_at=largest_at,
        read_tokens=read_tokens,
    )
