"""The command ``plan``: memory that every strategy needs per GPU, of the host and of NVMe, predicted and not measured.

Runs nothing, and downloads nothing without ``--online``. The figures come from ``prediction/``; here they become rows
and text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import plan, units
from ..config import strategies
from ..config.spec import Configuration, Placement, Precision, Workload
from ..errors import UsageError
from ..models.lookup import ResolvedModel, resolve_model
from ..prediction import deepspeed_estimator, trial_predictions, what_if
from ..prediction.memory import CONTEXT_BYTES, DOES_NOT_FIT, NCCL_BYTES, NCCL_RANGE_BYTES, PROCESS_BYTES, Prediction
from ..prediction.model_profile import ModelProfile
from ..prediction.what_if import PlannedTrial
from ..system import devices, terminal

_MAX_TOKENS = 2**40
"""Tokens of one micro-batch; more is taken for a typing error."""
_MAX_GPUS = 100_000
"""GPUs of one job; more is taken for a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Flags of ``plan``; the fields have the flags' names."""

    model: str
    num_gpus: int
    gpu: str
    gpus_per_node: int | None
    host_memory: float | None
    """GB (2**30) of one node."""
    batch_size: int
    seq_length: int | None
    grad_accum: int
    precision: Precision
    activation_checkpointing: bool
    strategies: tuple[str, ...]
    min_gpus: bool
    max_batch: bool
    online: bool
    trust_remote_code: bool
    json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Prediction for one strategy."""

    configuration: Configuration
    prediction: Prediction
    verdict: str
    change: str | None
    """The smallest change that would make it fit; None if it fits already, or if no change makes it fit."""
    change_host_bytes: int | None = None
    """Host memory per node with that change, in bytes; None if the changed strategy does not offload."""
    decisive_tiers: tuple[str, ...] = ()
    """The memories that decide the verdict, ``gpu`` and ``host``; empty if it fits."""
    min_gpus: int | None = None
    """None without ``--min-gpus``, or if no number of GPUs is enough."""
    max_batch: int | None = None
    """None without ``--max-batch``, or if one sequence does not fit."""
    deepspeed: deepspeed_estimator.Estimate | None = None
    """Figures of DeepSpeed's own estimator; None for a case that it does not cover."""


def plan_command(options: PlanOptions) -> int:
    """Prints the table. Returns 0; raises UsageError."""
    capacity = devices.memory_bytes(options.gpu)
    question = _planned_trial(options)
    rows = [
        _row(options, replace(question, configuration=_configuration(name)), capacity) for name in options.strategies
    ]
    if options.json:
        terminal.print_json(json.dumps([_json_entry(row) for row in rows], indent=1, allow_nan=False))
        return 0
    for line in lines(options, question, capacity, rows):
        terminal.print_text(line)
    return 0


def _configuration(name: str) -> Configuration:
    return strategies.make_configuration(strategies.CATALOGUE[name])


def _planned_trial(options: PlanOptions) -> PlannedTrial:
    if options.batch_size * (options.seq_length or 1) > _MAX_TOKENS:
        raise UsageError(f"--batch-size {options.batch_size} is beyond any memory", remedy="give a smaller one")
    if options.num_gpus > _MAX_GPUS:
        raise UsageError(f"--num-gpus {options.num_gpus} is beyond any job", remedy=f"give {_MAX_GPUS} or fewer")
    choice = resolve_model(
        options.model,
        factory=False,
        trust_remote_code=options.trust_remote_code,
        environment={} if options.online else {"HF_HUB_OFFLINE": "1"},
        offline_reason=None if options.online else "plan asks the Hub only with --online",
    )
    profile = _profile(choice, options)
    workload = Workload(
        model=choice.name,
        model_source=choice.source,
        model_type=choice.model_type,
        model_config=choice.config,
        batch_size=options.batch_size,
        seq_length=plan.seq_length(options.seq_length, choice),
        grad_accum=options.grad_accum,
        precision=options.precision,
        activation_checkpointing=options.activation_checkpointing,
    )
    return PlannedTrial(
        profile=profile,
        workload=workload,
        placement=Placement(accelerator="cuda", num_gpus=options.num_gpus, nvme_path="/nvme"),
        configuration=_configuration("zero0"),
        ranks_per_node=options.gpus_per_node or 8,
    )


def _profile(choice: ResolvedModel, options: PlanOptions) -> ModelProfile:
    length = plan.seq_length(options.seq_length, choice)
    profile = trial_predictions.profile(choice, length, "cuda", trust_remote_code=options.trust_remote_code)
    if isinstance(profile, trial_predictions.Unpredicted):
        raise UsageError(f"--model {choice.name}: {profile.reason}", remedy="measure it: zero_stage_comparison.py")
    return profile


def _host_capacity(options: PlanOptions) -> int | None:
    return None if options.host_memory is None else units.from_gb(options.host_memory)


def _row(options: PlanOptions, question: PlannedTrial, capacity: int) -> PlanRow:
    host = _host_capacity(options)
    prediction = question.predict()
    change = what_if.smallest_change(question, capacity, host)
    return PlanRow(
        configuration=question.configuration,
        prediction=prediction,
        verdict=prediction.verdict(capacity, host),
        change=None if change is None else change.text,
        change_host_bytes=change.prediction.host_bytes if change and _offloads(change.configuration) else None,
        decisive_tiers=prediction.decisive_tiers(capacity, host),
        min_gpus=what_if.min_gpus(question, capacity, host) if options.min_gpus else None,
        max_batch=what_if.max_batch(question, capacity, host) if options.max_batch else None,
        deepspeed=deepspeed_estimator.deepspeed_estimates(
            question.profile.parameters,
            max(question.profile.tensors),
            options.num_gpus,
            min(options.num_gpus, question.ranks_per_node or options.num_gpus),
            question.configuration,
            question.workload.precision,
        ),
    )


def _offloads(configuration: Configuration) -> bool:
    return configuration.layout[1:] != ("none", "none")


def _json_entry(row: PlanRow) -> dict[str, Any]:
    """The row for ``--json``: bytes, not rounded."""
    return {
        "strategy": row.configuration.name,
        "stage": row.configuration.stage,
        "verdict": row.verdict,
        "gpu_bytes": dict(row.prediction.gpu),
        "host_bytes_per_node": dict(row.prediction.host),
        "nvme_bytes_per_node": dict(row.prediction.nvme),
        "gpu_total_bytes": row.prediction.gpu_bytes,
        "fullest_moment": row.prediction.phase,
        "exceeded": [f"{tier}_memory" for tier in row.decisive_tiers if row.verdict == DOES_NOT_FIT],
        "smallest_change": row.change,
        "smallest_change_host_bytes_per_node": row.change_host_bytes,
        "min_gpus": row.min_gpus,
        "max_batch": row.max_batch,
        "deepspeed_estimator_gpu_bytes": row.deepspeed.gpu_bytes if row.deepspeed else None,
    }


_CATEGORIES = (
    ("Params", ("parameters", "gathered_parameters")),
    ("Grads", ("gradients",)),
    ("Optim", ("optimizer_states",)),
    ("Buffers", ("deepspeed_buffers",)),
    ("Activ", ("activations",)),
    ("Loss", ("logits_and_loss",)),
    ("Temp", ("temporaries", "pinned_rounding")),
    ("Other", ("overhead",)),
)
"""Heading → categories of the prediction, per GPU at its fullest moment, GB."""


def lines(options: PlanOptions, question: PlannedTrial, capacity: int, rows: Sequence[PlanRow]) -> Iterator[str]:
    """The table and what must be known to read it."""
    work, profile, host = question.workload, question.profile, _host_capacity(options)
    yield (
        f"{profile.name} · {units.format_millions(profile.parameters)} parameters · {work.precision} · micro-batch "
        f"{work.batch_size} × {work.seq_length} tokens"
        f"{' · activation checkpointing' if work.activation_checkpointing else ''} · {options.num_gpus} GPU"
        f"{'s' if options.num_gpus > 1 else ''} of {units.format_bytes(capacity)}"
        f"{'' if host is None else f' · nodes with {units.format_bytes(host)} of host memory'}"
        " · predicted, nothing was run"
    )
    yield ""
    yield from _aligned([_headings(options), *(_cells(options, row) for row in rows)])
    yield ""
    for row in rows:
        yield f"{row.configuration.label}: {_verdict_text(row, host)}"
    yield ""
    yield from _notes(options, question)


def _headings(options: PlanOptions) -> list[str]:
    optional = [("GPUs needed", options.min_gpus), ("largest batch", options.max_batch)]
    extra = [heading for heading, wanted in optional if wanted]
    names = [heading for heading, _ in _CATEGORIES]
    return ["Strategy", "Verdict", "GPU GB", *names, "Host GB", "NVMe GB", "DeepSpeed est.", *extra]


def _cells(options: PlanOptions, row: PlanRow) -> list[str]:
    optional = [
        (units.format_count(row.min_gpus), options.min_gpus),
        (_max_batch_text(row.max_batch), options.max_batch),
    ]
    return [
        row.configuration.label,
        row.verdict,
        units.format_gb(row.prediction.gpu_bytes),
        *(_cell(row.prediction, names) for _, names in _CATEGORIES),
        units.format_gb(row.prediction.host_bytes),
        units.format_gb(row.prediction.nvme_bytes or None),
        units.format_gb(row.deepspeed.gpu_bytes if row.deepspeed else None),
        *(text for text, wanted in optional if wanted),
    ]


def _cell(prediction: Prediction, names: Sequence[str]) -> str:
    unknown = prediction.unknown is not None and names[0] in ("activations", "logits_and_loss")
    return units.MISSING if unknown else units.format_gb(sum(prediction.gpu.get(name, 0) for name in names))


def _max_batch_text(batch: int | None) -> str:
    """A batch at the limit of the search is shown with ``≥``: larger ones were not tried."""
    return f"{'≥ ' if batch == what_if.LARGEST_BATCH else ''}{units.format_count(batch)}"


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Text left, numbers right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _verdict_text(row: PlanRow, host: int | None) -> str:
    if row.prediction.unknown is not None:
        return f"{row.verdict}, activations not counted in the figures: {row.prediction.unknown}"
    text = row.verdict + "; and".join(
        _largest_category_text(row, tier, host) for tier in row.decisive_tiers or ("gpu",)
    )
    if row.verdict != DOES_NOT_FIT:
        return text
    needs = f" ({units.format_bytes(row.change_host_bytes)} of host memory per node)" if row.change_host_bytes else ""
    return (
        f"{text}; {f'it would fit with {row.change}{needs}' if row.change else 'no change that was tried makes it fit'}"
    )


def _largest_category_text(row: PlanRow, tier: str, host: int | None) -> str:
    name, size = row.prediction.biggest_in(tier)
    largest = f"most is {name.replace('_', ' ')} ({units.format_bytes(size)})"
    if tier == "gpu":
        return f"; {largest}"
    return f" in host memory: {units.format_bytes(row.prediction.host_bytes)} of {units.format_bytes(host)}, {largest}"


def _notes(options: PlanOptions, question: PlannedTrial) -> Iterator[str]:
    other = units.format_bytes(CONTEXT_BYTES + (NCCL_BYTES if options.num_gpus > 1 else 0))
    yield (
        f"GB is 2^30 bytes, per GPU at its fullest moment; host and NVMe per node. Other ({other}) and "
        f"{units.format_bytes(PROCESS_BYTES)} of host memory per rank are assumed, the rest is computed; above 90 % is "
        "tight."
    )
    if options.num_gpus > 1:
        low, high = (units.format_bytes(size) for size in NCCL_RANGE_BYTES)
        yield (
            f"Of Other {units.format_bytes(NCCL_BYTES)} are NCCL's: {low} to {high} per communicator are reported, so "
            f"measure where a card is nearly full (gpu_outside_allocator_gb of a run)."
        )
    if options.min_gpus:
        yield f"GPUs needed: above one node whole nodes of {question.ranks_per_node}, or those given where they do."
    yield f"DeepSpeed est.: {deepspeed_estimator.WHY_THEY_DIFFER}"
