"""The command lines: both scripts and ``python -m ds_bench``."""

from .script import main

__all__ = ["main"]
