"""Keeps a test marked ``alone`` from running beside another of these tests, where pytest-xdist has several workers."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def locked(path: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile may have it open
        os.close(descriptor)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    if not hasattr(item.config, "workerinput"):  # there is one worker alone
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    of_all_workers = Path(item.config.option.basetemp).parent
    with contextlib.ExitStack() as stack:
        # Whoever waits to be alone holds this one, so that no further test begins.
        with locked(of_all_workers / "next_test", fcntl.LOCK_EX):
            stack.enter_context(locked(of_all_workers / "running_tests", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)
