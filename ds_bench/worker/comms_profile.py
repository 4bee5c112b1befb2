"""The profile ``comms``: time, bytes and number of each kind of collective operation, and a step's time by parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..config.deepspeed_config import is_deepcompiled
from .profiled_steps import MOST_ROWS, Findings, ProfiledSteps
from .reference_engines import ReferenceEngine
from .step_parts import measure_communication

_NOT_SEEN = "communication was not measured: {} does not communicate through deepspeed.comm"


def observe(steps: ProfiledSteps) -> Findings:
    """Takes the steps with each operation made synchronous, on every rank."""
    if isinstance(steps.trainer.engine, ReferenceEngine):
        return Findings(notes=(_NOT_SEEN.format("torch's own engine"),))
    if is_deepcompiled(steps.trial.ds_config):
        return Findings(notes=(_NOT_SEEN.format("a model compiled by DeepCompile"),))
    steps.is_training = True
    measured = measure_communication(steps.trainer, steps.count)
    steps.is_training = False
    # measure_communication takes micro-batches itself, which ProfiledSteps does not count.
    steps.left -= steps.count
    # Every rank has timed its operations, since the ranks compare their times; only some write files.
    if steps.rank not in steps.trial.inspection.profile_ranks:
        return Findings(measured=measured)
    operations = measured["communication"]
    steps.file("csv").write_text("\n".join(_csv_lines(operations)) + "\n", encoding="utf-8")
    return Findings(measured=measured, lines=tuple(_text_lines(operations)))


def _gb_per_second(operation: Mapping[str, Any]) -> float:
    return float(operation["bytes"] / operation["seconds"] / 2**30) if operation["seconds"] else 0.0


def _csv_lines(operations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "operation,count_per_step,bytes_per_step,ms_per_step,wait_ms_per_step,gb_per_sec"
    for each in operations:
        waiting = "" if each["wait_seconds"] is None else f"{each['wait_seconds'] * 1000:.3f}"
        yield (
            f"{each['name']},{each['count']:g},{each['bytes']:.0f},{each['seconds'] * 1000:.3f},{waiting},"
            f"{_gb_per_second(each):.3f}"
        )


def _text_lines(operations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "ms/step  waiting  calls/step     MB/step    GB/s  operation"
    for each in operations[:MOST_ROWS]:
        waiting = "—" if each["wait_seconds"] is None else f"{each['wait_seconds'] * 1000:,.2f}"
        yield (
            f"{each['seconds'] * 1000:7,.2f}  {waiting:>7}  {each['count']:10,.0f}  {each['bytes'] / 2**20:10,.2f}  "
            f"{_gb_per_second(each):6,.2f}  {each['name']}"
        )
