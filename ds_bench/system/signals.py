"""Ctrl-C, SIGTERM and SIGHUP: they interrupt the run while it waits, and are remembered while it cleans up.

If a signal raised at any moment, processes, scratch files or an unwritten row could be left behind. So it raises
KeyboardInterrupt only inside :func:`raising_on_interrupt`. Elsewhere it is remembered: the next such block raises on
entry, and :func:`interrupt_requested` is true.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_state = {"requested": False, "raising_blocks": 0}


def interrupt_requested() -> bool:
    """Whether a signal has asked the run to end."""
    return bool(_state["requested"])


@contextmanager
def handling_signals() -> Iterator[None]:
    """Within this context the three signals are handled as the module describes.

    A signal that is ignored stays ignored: nohup and background jobs of a shell rely on it.
    """

    def handle(_number: int, _frame: object) -> None:
        _state["requested"] = True
        if _state["raising_blocks"]:
            raise KeyboardInterrupt

    _state.update(requested=False, raising_blocks=0)
    handled = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers_before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


@contextmanager
def raising_on_interrupt() -> Iterator[None]:
    """Within this context a signal raises KeyboardInterrupt. A signal received earlier raises it on entry."""
    _state["raising_blocks"] += 1
    try:
        if _state["requested"]:
            raise KeyboardInterrupt
        yield
    finally:
        _state["raising_blocks"] -= 1
