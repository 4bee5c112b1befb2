"""Ctrl-C, SIGTERM and SIGHUP: they act where we wait, and are remembered where we clear up.

A signal that raised anywhere could leave processes, scratch files or an unwritten row behind. So it
raises KeyboardInterrupt only inside :func:`acting`; elsewhere it is noted, and asked for at the next
safe place.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_state = {"asked": False, "acting": 0}


def asked() -> bool:
    """Whether the user or the system has asked the run to end."""
    return _state["asked"] is True


@contextmanager
def interruptible() -> Iterator[None]:
    """Handles the signals as described, for the length of the block.

    A signal that is ignored stays ignored: nohup and background jobs of a shell mean it so.
    """

    def handle(_number: int, _frame: object) -> None:
        _state["asked"] = True
        if _state["acting"]:
            raise KeyboardInterrupt

    _state.update(asked=False, acting=0)
    heeded = [number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def acting() -> Iterator[None]:
    """Here a signal raises KeyboardInterrupt, one noted before at once."""
    _state["acting"] += 1
    try:
        if _state["asked"]:
            raise KeyboardInterrupt
        yield
    finally:
        _state["acting"] -= 1
