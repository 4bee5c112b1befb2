#!/usr/bin/env python3
"""Writes docs/axes.md: every axis of ``--axis``, taken from the table in ``ds_bench/config/axes.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ds_bench.cli.axes import axis_description  # noqa: E402
from ds_bench.config.axes import AXES, Axis  # noqa: E402
from ds_bench.config.axis_rows import MAX_ROWS  # noqa: E402

PAGE = ROOT / "docs" / "axes.md"

INTRODUCTION = f"""# Axes

Made by `scripts/make_axes_page.py`. `ds-compare axes` prints this list, and `ds-compare axes overlap_comm` one axis.

An axis is one dimension along which rows differ. `--axis NAME=V1,V2,…` makes a row for each value, wherever the axis
applies. Several axes give every combination, up to {MAX_ROWS} rows in the scripts and `plan`:

```sh
python zero_stage_comparison.py --model gpt2 --stages 2 3 --axis overlap_comm=true,false  # trains
python offload_comparison.py --axis pin_memory=true,false --axis sub_group_size=1e7,1e9  # trains
```

A row is named `zero2+overlap_comm=false` in flags such as `--relative-to`, and `ZeRO-2, overlap_comm off` in tables.

- An axis replaces what the strategy, `create_deepspeed_config` or a file in `--configs` says. `--ds-config`, `--set`
  and the flags of the workload apply to every row, so it is an error if one of them sets the same thing as an axis.
- A row to which an axis does not apply (`prefetch` at stage 2) appears once, without it, and a note says so. Rows with
  equal configurations are run once.
- Nothing runs if two axes set the same key to different values.
- "changes" is what to expect from the axis. The categories of memory are in [metrics](metrics.md#memory). "Peak
  memory within a step" is about tensors that live only during a phase, which the ledger does not see. "Losses" means
  that the arithmetic changes: the losses of such rows are compared only among rows with the same value. Rows with
  different `precision` are compared with the tolerance of the coarser format.
- Sources are files of DeepSpeed 0.19.8, unless they name another project. #1234 is an issue or pull request of
  DeepSpeed.
"""


def axes_page() -> str:
    """The text of the page."""
    parts = [INTRODUCTION]
    for group, axes in groupby(AXES.values(), key=lambda axis: axis.group):
        parts.append(f"## {group}\n")
        parts += ["\n".join(_section(axis)) + "\n" for axis in axes]
    return "\n".join(parts)


def _section(axis: Axis) -> Iterator[str]:
    yield f"### `{axis.name}`\n"
    yield f"{axis.meaning[0].upper()}{axis.meaning[1:]}.\n"
    for title, text in axis_description(axis).items():
        yield f"- {title}: {text.replace('*', chr(92) + '*').replace('__', chr(92) + '_' + chr(92) + '_')}"


if __name__ == "__main__":
    PAGE.write_text(axes_page(), encoding="utf-8")
