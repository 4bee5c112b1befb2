#!/usr/bin/env python3
"""Writes docs/axes.md: every axis of ``--axis``, taken from the table in ``ds_bench/config/axes.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ds_bench.cli.axes import described  # noqa: E402
from ds_bench.config.axes import AXES, Axis  # noqa: E402
from ds_bench.config.axis_rows import MAX_ROWS  # noqa: E402

PAGE = ROOT / "docs" / "axes.md"

INTRODUCTION = f"""# Axes

Made by `scripts/make_axes_page.py` from `ds_bench/config/axes.py`; a test holds both equal. The same list in a
terminal: `python -m ds_bench axes`, of one axis `python -m ds_bench axes overlap_comm`, for programs `--json`.

An axis is one dimension along which rows differ. `--axis NAME=V1,V2,…` makes a row of every value, in every row where
the axis acts; several `--axis` make every combination, up to {MAX_ROWS} rows:

```sh
python zero_stage_comparison.py --model gpt2 --stages 2 3 --axis overlap_comm=true,false  # trains
python offload_comparison.py --axis pin_memory=true,false --axis sub_group_size=1e7,1e9  # trains
```

Rows are named `zero2+overlap_comm=false` (for `--relative-to` and `--export`) and shown as `ZeRO-2, overlap_comm off`.

- An axis replaces what the strategy, `create_deepspeed_config` or a file of `--configs` says. `--ds-config`, `--set`
  and the flags of the workload hold for every row: one that sets the same thing as an axis is an error.
- A row where an axis does not act (`prefetch` at stage 2) appears once, without it, and a note says so. Two rows
  that come to the same configuration are one.
- Two axes that set the same key to different values contradict each other, and nothing is run.
- "changes" is what to expect besides the configuration. Categories of the ledger are those of
  [metrics.md](metrics.md). Peak memory within a step is of tensors that the ledger does not see, since it counts
  between the phases. With "losses" the arithmetic changes, and a row is compared with rows of the same value alone.
- Rows of other micro-batches and accumulations are compared by tokens per second.
- Sources are files of DeepSpeed 0.19.8 unless another project is named; #1234 is a pull request or issue of DeepSpeed.
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
    for title, text in described(axis).items():
        yield f"- {title}: {text.replace('*', chr(92) + '*').replace('__', chr(92) + '_' + chr(92) + '_')}"


if __name__ == "__main__":
    PAGE.write_text(axes_page(), encoding="utf-8")
