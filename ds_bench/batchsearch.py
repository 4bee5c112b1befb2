"""The largest micro-batch that trains, found with few trials: a walk outwards from a prediction, then bisection.

Pure: from what is known to the next probe, so that a search can be resumed and tested without processes.
"""

from __future__ import annotations

from collections.abc import Mapping


def next_probe(known: Mapping[int, bool], start: int, limit: int) -> int | None:
    """The micro-batch to try next; None when the answer is settled.

    ``known``: micro-batch → whether it trained. ``start``: the predicted largest, 1 or more. ``limit``: the largest
    that is ever tried. From a success the walk goes up, from a failure down, each step as far again as it has come;
    once both are known the gap is bisected, down to a grain of 1/32 (to one below 64). A right prediction costs two
    probes: it, and the next.
    """
    best, worst = largest(known), smallest_failure(known)
    start = min(max(start, 1), limit)
    if not known:
        return start
    if best is None:
        return _below(worst or 1, start)
    if worst is None:
        return None if best >= limit else min(best + _stride(best, start), limit)
    return None if worst - best <= grain(best) else _between(best, worst)


def grain(size: int) -> int:
    """How exactly the answer is wanted: the next finer micro-batch is within run-to-run noise of this one."""
    return max(1, size // 32)


def largest(known: Mapping[int, bool]) -> int | None:
    """The largest micro-batch that trained, below every failure: one that trained above a failure was luck."""
    worst = smallest_failure(known)
    return max((size for size, trained in known.items() if trained and (worst is None or size < worst)), default=None)


def smallest_failure(known: Mapping[int, bool]) -> int | None:
    """The smallest micro-batch that did not train."""
    return min((size for size, trained in known.items() if not trained), default=None)


def _below(worst: int, start: int) -> int | None:
    """Downwards from the prediction; at last 1; None when even 1 failed."""
    if worst == 1:
        return None
    return max(worst - _stride(start, worst), 1)


def _stride(reached: int, start: int) -> int:
    """A grain upwards or downwards at first, then as far again as the walk has come, and from there in eighths."""
    gone = abs(reached - start)
    return grain(start) if gone == 0 else max(gone, start // 8, 1)


def _between(best: int, worst: int) -> int:
    """The largest power of two in the gap, then the middle."""
    power = 1 << (worst - 1).bit_length() - 1
    return power if best < power < worst else (best + worst) // 2
