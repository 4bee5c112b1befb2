"""Finds processes by a variable in their environment, in whatever session and below whatever parent they are."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from ds_bench.system.processes import is_alive

MARK = "DS_BENCH_TEST_MARK"

STARTS_PROCESSES = """
import multiprocessing, subprocess, threading, time
def start():
    for kind in (threading.Thread, multiprocessing.get_context("fork").Process):
        kind(target=time.sleep, args=(600,)).start()
    multiprocessing.get_context("fork").Pool(2)
    subprocess.Popen(["setsid", "sleep", "600"])
"""
"""The code of a function that starts what Python waits for when it exits: a thread and a process; and others."""


def find_marked(mark: str) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in variables and is_alive(int(entry.name)):
                found.add(int(entry.name))
    return found


def left_after(mark: str, seconds: float = 15) -> set[int]:
    """The marked processes that do not end within that time."""
    deadline = time.monotonic() + seconds
    while (left := find_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
