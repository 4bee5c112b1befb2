"""JSON messages between a run and the agent on a host, one per line, and how long either may stay silent.

A thread reads and writes, so that each side always knows whether the other still answers. Neither side blocks on the
other: what the network does not accept yet is queued.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..records.json_files import json_line

SILENCE_SECONDS = 15.0
"""A side that sends no message for this long counts as lost."""
PING_SECONDS = 1.0
_POLL_SECONDS = 0.25
_READ_BYTES = 2**18
_MAX_QUEUED_BYTES = 2**22
_MAX_LINE_BYTES = 2**24
"""Longest accepted line; larger than any request or file part."""

Message = dict[str, Any]


@cache
def code_digest() -> str:
    """Return a hash of the package's files: both sides must run the same code, not only the same version."""
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(path for kind in ("py", "json") for path in package.rglob(f"*.{kind}")):
        digest.update(b"%s\0%s\0" % (path.relative_to(package).as_posix().encode(), path.read_bytes()))
    return digest.hexdigest()[:16]


class MessageStream:
    """Sends and receives messages until :meth:`close`, the end of the input, or :data:`SILENCE_SECONDS` of silence."""

    def __init__(
        self,
        reader: int,
        writer: int,
        *,
        receive: Callable[[Message], None],
        ended: Callable[[str], None],
    ) -> None:
        """``receive`` is called with each message, ``ended`` at the end with the reason, both in the stream's thread.

        The caller closes the descriptors.
        """
        self._reader, self._writer = reader, writer
        self._receive, self._ended = receive, ended
        self.silence_seconds = SILENCE_SECONDS
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._lock = threading.Lock()
        # A byte in this pipe ends the wait in poll() when another thread has queued a message.
        self._wake_reader, self._wake_writer = os.pipe()
        self.closed = False
        """Whether the stream has ended."""
        self._thread = threading.Thread(target=self._run, name="messages of a host", daemon=True)

    def start(self) -> None:
        for descriptor in {self._reader, self._writer, self._wake_reader, self._wake_writer}:
            os.set_blocking(descriptor, False)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message. Does nothing after the end of the stream."""
        if self.closed:
            return
        with self._lock:
            # Under the lock, so that the lines of two threads do not mix.
            self._outgoing += json_line(message) + b"\n"
        if threading.current_thread() is not self._thread:
            self._wake()

    def wait_for_room(self) -> None:
        """Wait while too much is queued, so that large files do not fill memory. Returns at the end of the stream."""
        while len(self._outgoing) > _MAX_QUEUED_BYTES and not self.closed:
            time.sleep(0.01)

    def close(self) -> None:
        """End the thread; ``ended`` is called with "closed"."""
        self.closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            # A full pipe wakes the thread as well; once it is closed, there is no thread to wake.
            os.write(self._wake_writer, b"\0")

    def _run(self) -> None:
        reason = "closed"
        try:
            self._exchange()
        except EOFError:
            reason = "the connection ended"
        except TimeoutError:
            reason = f"no answer for {self.silence_seconds:.0f} s"
        except OSError as error:
            reason = str(error)
        except Exception:  # such as a message that lacks a required field
            reason = "it sent a message that cannot be read"
        self.closed = True
        # No thread may write to the closed pipe: its descriptor may already belong to another file.
        with self._lock:
            wakers, self._wake_writer = (self._wake_reader, self._wake_writer), -1
        for descriptor in wakers:
            os.close(descriptor)
        self._ended(reason)

    def _exchange(self) -> None:
        heard = pinged = time.monotonic()
        while not self.closed:
            poll = select.poll()
            poll.register(self._reader, select.POLLIN)
            poll.register(self._wake_reader, select.POLLIN)
            if self._outgoing:
                # If both are one socket, this call replaces the events registered above, so they are repeated.
                poll.register(self._writer, select.POLLOUT | (select.POLLIN if self._writer == self._reader else 0))
            events = dict(poll.poll(_POLL_SECONDS * 1000))
            if self._wake_reader in events:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reader, _READ_BYTES)
            # An error or a hang-up counts as input: reading then reports it.
            if events.get(self._reader, 0) & ~select.POLLOUT and self._read_messages():
                heard = time.monotonic()
            now = time.monotonic()
            if now - heard > self.silence_seconds:
                raise TimeoutError
            if now - pinged > PING_SECONDS:
                pinged = now
                self.send({"ping": True})
            with self._lock, contextlib.suppress(BlockingIOError):
                while self._outgoing:
                    # Only a part, because the slice is a copy.
                    written = os.write(self._writer, self._outgoing[:_READ_BYTES])
                    del self._outgoing[:written]

    def _read_messages(self) -> bool:
        """Receive what has arrived; return whether anything has. Raises EOFError, OSError and errors of ``receive``."""
        try:
            data = os.read(self._reader, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            raise EOFError
        self._incoming += data
        lines: list[bytearray] = []
        # Only the new part is searched: what arrived before has no line break.
        if b"\n" in data:
            *lines, self._incoming = self._incoming.split(b"\n")
        if len(self._incoming) > _MAX_LINE_BYTES:
            raise OSError("a message is too long")
        for line in lines:
            message = None
            with contextlib.suppress(ValueError, RecursionError):  # other text, such as a greeting of the login shell
                message = json.loads(line.decode())
            if isinstance(message, dict) and "ping" not in message:
                self._receive(message)
        return True
