"""The predictions of ``plan`` as text: one sentence that answers, one table, and what would make more rows fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.spec import Configuration
from ..prediction import what_if
from ..prediction.memory import (
    CONTEXT_BYTES,
    DOES_NOT_FIT,
    FITS,
    NCCL_BYTES,
    NCCL_RANGE_BYTES,
    PROCESS_BYTES,
    TIGHT,
    UNKNOWN,
    Prediction,
)
from ..prediction.what_if import Change, PlannedTrial
from ..recommend.decision import simplicity
from ..recommend.words import format_list
from ..system.terminal import NO_BREAK, wrapped_lines
from ..units import format_gigabytes, format_parameters, format_significant, to_gb
from .table import Column, Table, make_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Prediction for one strategy."""

    trial: PlannedTrial
    prediction: Prediction
    verdict: str
    change: Change | None
    """The smallest change that would make it fit; None if it fits already, or if no change makes it fit."""
    decisive_tiers: tuple[str, ...] = ()
    """The memories that decide the verdict, ``gpu`` and ``host``; empty if it fits."""
    min_gpus: int | None = None
    """None unless it was asked for, or if no number of GPUs is enough."""
    max_batch: int | None = None
    """None unless it was asked for, or if one sequence does not fit."""

    @property
    def configuration(self) -> Configuration:
        return self.trial.configuration

    @property
    def label(self) -> str:
        return self.trial.configuration.label


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The question, and the prediction for every strategy."""

    asked: PlannedTrial
    """The workload and the GPUs; its configuration does not count."""
    gpu_bytes: int
    """Memory of one GPU."""
    host_bytes: int | None
    """Memory of one node's host; None where it was not given."""
    rows: Sequence[PlanRow]
    shows_min_gpus: bool
    shows_max_batch: bool

    @property
    def num_gpus(self) -> int:
        return self.asked.placement.num_gpus

    @property
    def unknown(self) -> str | None:
        """Why no figure includes activations; None where one does."""
        reasons = [row.prediction.unknown for row in self.rows]
        return reasons[0] if all(reasons) else None


# ------------------------------------------------------------------ the answer


def answer_text(plan: MemoryPlan) -> tuple[str, tuple[str, ...] | None]:
    """The sentence that answers the question, and the change that it offers (``_change_key``) or None."""
    fitting = [row for row in plan.rows if row.verdict in (FITS, TIGHT)]
    offered = None
    if fitting:
        text = _answer_if_some_fit(plan, fitting)
    elif unknown := next((row for row in plan.rows if row.verdict == UNKNOWN), None):
        text = (
            f"not known, because activations are not counted ({unknown.prediction.unknown}); "
            f"without them {unknown.label} takes {_needs(unknown.trial, unknown.prediction)}"
        )
    else:
        text, offered = _answer_if_none_fits(plan)
    return f"{plan.num_gpus:,} × {_capacity(plan.gpu_bytes)}: {text}.", offered


def _answer_if_some_fit(plan: MemoryPlan, fitting: Sequence[PlanRow]) -> str:
    best = min(fitting, key=lambda row: (row.verdict == TIGHT, simplicity(row.configuration.layout)))
    total = len(plan.rows)
    tightly = ""
    if best.verdict == TIGHT:
        tightly = ", but tightly" if "gpu" in best.decisive_tiers else ", but nearly fills the host's memory"
    if len(fitting) == 1:
        text = f"{'only ' if total > 1 else ''}{best.label} fits{tightly}: {_needs(best.trial, best.prediction)}"
    else:
        every = "both" if total == 2 else f"all {total}"
        count = every if len(fitting) == total else f"{len(fitting)} of {total}"
        text = f"{count} strategies fit; {best.label} is the simplest{tightly}: {_needs(best.trial, best.prediction)}"
    return text + _without_offload(plan, best.trial)


def _answer_if_none_fits(plan: MemoryPlan) -> tuple[str, tuple[str, ...] | None]:
    failed = f"{plan.rows[0].label} does not fit" if len(plan.rows) == 1 else "nothing fits as asked"
    if plan.unknown:
        failed += f" even without activations, which are not counted ({plan.unknown})"
    failed += _shortage_of_host_memory(plan)
    changes = [row.change for row in plan.rows if row.change]
    if not changes:
        # Report the smallest need of the memory that is too small in all rows.
        tier = "host" if all("host" in row.decisive_tiers for row in plan.rows) else "gpu"
        sizes = {
            row.label: row.prediction.gpu_bytes if tier == "gpu" else row.prediction.host_bytes for row in plan.rows
        }
        label, size = min(sizes.items(), key=lambda item: item[1])
        least = f"{format_gigabytes(size)} per {'GPU' if tier == 'gpu' else 'node'}"
        also = "" if len(sizes) == 1 else f" (the least: {label}, {least})"
        return f"{failed}{also}, and no change that was tried helps", None
    change = min(changes, key=lambda change: _cost_of(plan, change))
    verb = {FITS: "does", TIGHT: "does, but tightly", UNKNOWN: "may"}[_verdict(plan, change)]
    text = f"{failed}; {_change_text(plan, change)} {verb}, {_needs(change.trial, change.prediction)}"
    return text + _without_offload(plan, change.trial), _change_key(plan, change)


def _verdict(plan: MemoryPlan, change: Change) -> str:
    return change.prediction.verdict(plan.gpu_bytes, plan.host_bytes)


def _cost_of(plan: MemoryPlan, change: Change) -> tuple[object, ...]:
    """Sort key, cheaper changes first: the same GPUs, room to spare, no offload, few settings."""
    trial = change.trial
    return (
        trial.placement.num_gpus != plan.num_gpus,
        _verdict(plan, change) == TIGHT,
        trial.configuration.offloads,
        len(_settings(plan, trial)),
        simplicity(trial.configuration.layout),
    )


def _shortage_of_host_memory(plan: MemoryPlan) -> str:
    """A clause that blames host memory if nothing fits; empty if only the GPUs are too small."""
    short_of_host = [row for row in plan.rows if "host" in row.decisive_tiers]
    if len(short_of_host) == len(plan.rows):
        gpus_too = all("gpu" in row.decisive_tiers for row in plan.rows)
        return f": {'GPUs and host memory are' if gpus_too else 'host memory is'} too small"
    if short_of_host and all(row.configuration.offloads == (row in short_of_host) for row in plan.rows):
        return ": GPUs are too small without offload, host memory with it"
    return ""


def _without_offload(plan: MemoryPlan, trial: PlannedTrial) -> str:
    """How many GPUs it takes without the offload of ``trial``; empty where it has none or they are there already."""
    if not trial.configuration.offloads:
        return ""
    count = what_if.min_gpus_without_offload(trial, plan.gpu_bytes, plan.host_bytes)
    if count is not None and count <= plan.num_gpus:
        return ""
    at_least = "at least " if plan.unknown else ""
    text = "no number of GPUs is enough" if count is None else f"you need {at_least}{_gpus(count)}"
    # Checkpointing takes no other hardware, so report the number of GPUs with it too.
    lean = replace(trial, workload=replace(trial.workload, activation_checkpointing=True))
    fewer = what_if.min_gpus_without_offload(lean, plan.gpu_bytes, plan.host_bytes)
    if fewer is not None and (count is None or fewer < count):
        text += f", or {fewer:,} with activation checkpointing"
    return f"; without offload {text}"


def _settings(plan: MemoryPlan, trial: PlannedTrial) -> list[str]:
    """What else than strategy and GPUs differs from what was asked."""
    asked, work = plan.asked.workload, trial.workload
    changes = [
        ("activation checkpointing", work.activation_checkpointing != asked.activation_checkpointing),
        (f"batch size {work.batch_size}", work.batch_size != asked.batch_size),
        ("reduce_bucket_size 5e7", trial.changes != plan.asked.changes),
    ]
    return [text for text, differs in changes if differs]


def _change_text(plan: MemoryPlan, change: Change) -> str:
    """``with activation checkpointing on 16 GPUs ZeRO-3``."""
    trial, settings = change.trial, _settings(plan, change.trial)
    parts = [f"with {format_list(settings)}"] if settings else []
    if trial.placement.num_gpus != plan.num_gpus:
        parts.append(f"on {_gpus(trial.placement.num_gpus)}")
    return " ".join([*parts, trial.configuration.label])


def _change_key(plan: MemoryPlan, change: Change) -> tuple[str, ...]:
    """Equal for changes that lead to the same configuration on the same GPUs."""
    trial = change.trial
    return trial.configuration.label, str(trial.placement.num_gpus), *_settings(plan, trial)


def _needs(trial: PlannedTrial, prediction: Prediction) -> str:
    """``61.2 GB per GPU``, and of host memory and NVMe where the configuration offloads."""
    where = " per node" if trial.placement.num_gpus > (trial.ranks_per_node or trial.placement.num_gpus) else ""
    parts = [f"{format_gigabytes(prediction.gpu_bytes)} per GPU"]
    if trial.configuration.offloads:
        parts.append(f"{format_gigabytes(prediction.host_bytes)} of host memory{where}")
    if prediction.nvme_bytes:
        parts.append(f"{format_gigabytes(prediction.nvme_bytes)} of NVMe{where}")
    return format_list(parts)


def question_text(plan: MemoryPlan) -> str:
    work, profile = plan.asked.workload, plan.asked.profile
    sizes = {row.trial.workload.batch_size for row in plan.rows} or {work.batch_size}
    own_sizes = "" if sizes == {work.batch_size} else " where no other is named"
    parts = [
        profile.name,
        format_parameters(profile.parameters + profile.frozen_parameters, profile.parameters),
        work.precision,
        f"micro-batch {work.batch_size:,} × {work.seq_length:,} tokens{own_sizes}",
        *(["activation checkpointing"] if work.activation_checkpointing else []),
        *([] if plan.host_bytes is None else [f"nodes with {_capacity(plan.host_bytes)} of host memory"]),
    ]
    return f"{NO_BREAK}· ".join(parts)


# ------------------------------------------------------------------ the table


_VERDICTS = {FITS: "yes", TIGHT: "tight", DOES_NOT_FIT: "no", UNKNOWN: "?"}
"""Cells of the column Fits."""
_MAX_SENTENCE_WIDTH = 100


def plan_lines(plan: MemoryPlan, width: int, *, verbose: bool) -> Iterator[str]:
    """The whole text, in lines of at most ``width`` characters if its longest words leave that room."""
    prose = min(width, _MAX_SENTENCE_WIDTH)
    answer, offered = answer_text(plan)
    notes = [*_other_changes(plan, offered), *_reasons_not_known(plan)]
    yield from wrapped_lines(answer, prose)
    yield ""
    yield from wrapped_lines(question_text(plan), prose)
    yield ""
    yield from (line.text for line in replace(plan_table(plan), notes=notes).to_terminal(width))
    yield ""
    yield from wrapped_lines(_reading_text(plan, verbose=verbose), prose)
    if verbose:
        yield ""
        yield from (line.text for line in _category_table(plan).to_terminal(width))
        yield ""
        yield from wrapped_lines(_assumptions_text(plan), prose)


def plan_table(plan: MemoryPlan) -> Table:
    """One line per strategy; NVMe, GPUs needed and largest batch only where there is something to show."""
    columns: list[tuple[Column, Callable[[PlanRow], str]]] = [
        (Column(heading="Strategy"), lambda row: row.label),
        (Column(heading="Fits", left=True), lambda row: _VERDICTS[row.verdict]),
        (Column(heading="GPU GB"), lambda row: format_size_number(row.prediction.gpu_bytes)),
        (Column(heading="share"), lambda row: _percent(row.prediction.gpu_bytes / plan.gpu_bytes)),
        (Column(heading="Host GB"), lambda row: format_size_number(row.prediction.host_bytes)),
        (Column(heading="NVMe GB"), lambda row: format_size_number(row.prediction.nvme_bytes or None)),
    ]
    if plan.shows_min_gpus:
        columns.append((Column(heading="GPUs needed"), _gpus_needed))
    if plan.shows_max_batch:
        columns.append((Column(heading="Largest batch"), _largest_batch))
    return make_table([*columns, (Column(heading="Mostly, GB", left=True, priority=1), _mostly)], plan.rows)


def _gpus_needed(row: PlanRow) -> str:
    """Without activations in the figures the true number may be larger."""
    return "none" if row.min_gpus is None else f"{'≥ ' if row.prediction.unknown else ''}{row.min_gpus:,}"


def _largest_batch(row: PlanRow) -> str:
    """A batch at the limit of the search is shown with ``≥``: larger ones were not tried."""
    if row.max_batch is None:
        return "?" if row.verdict == UNKNOWN else "none"
    return f"{'≥ ' if row.max_batch == what_if.LARGEST_BATCH else ''}{row.max_batch:,}"


def _mostly(row: PlanRow) -> str:
    """What takes most of the memory that decides: the host's if only that is too small, else the GPU's."""
    tier = "host" if row.decisive_tiers == ("host",) else "gpu"
    name, size = row.prediction.biggest_in(tier)
    where = "host: " if tier == "host" else ""
    return f"{where}{category_text(name, tier)} {format_size_number(size)}"


def _percent(share: float) -> str:
    """``9 %``, ``98 %``, ``1,930 %``: whole, and three significant digits."""
    return f"{float(f'{100 * share:.3g}'):,.0f} %"


def _other_changes(plan: MemoryPlan, offered: tuple[str, ...] | None) -> Iterator[str]:
    """The smallest changes of the rows, each once; not the one of the answer, nor one that leads to a row that fits."""
    told = {(row.label, str(plan.num_gpus)) for row in plan.rows if row.verdict != DOES_NOT_FIT} | {offered}
    for change in (row.change for row in plan.rows if row.change):
        if (key := _change_key(plan, change)) not in told:
            told.add(key)
            verb = {FITS: "fits", TIGHT: "fits tightly", UNKNOWN: "may fit"}[_verdict(plan, change)]
            yield f"{_change_text(plan, change)} {verb}: {_needs(change.trial, change.prediction)}"


def _reasons_not_known(plan: MemoryPlan) -> Iterator[str]:
    """Why the activations of some rows are not counted; nothing if the answer gives the reason for all rows."""
    labels: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.prediction.unknown and plan.unknown is None:
            labels.setdefault(row.prediction.unknown, []).append(row.label)
    for reason, own in labels.items():
        yield f"activations of {format_list(own)} are not counted: {reason}"


def _reading_text(plan: MemoryPlan, *, verbose: bool) -> str:
    """What must be known to read the table."""
    sentences = [
        "Predicted, nothing was run. GB is 2^30 bytes: of one GPU at its fullest moment, of one node's host and NVMe."
    ]
    if any(row.verdict == TIGHT for row in plan.rows):
        sentences.append("Tight is above 90 %.")
    if plan.shows_min_gpus and plan.asked.ranks_per_node != 1:
        sentences.append(
            f"Above one node GPUs are counted in whole nodes of {plan.asked.ranks_per_node}, or as given if those fit."
        )
    if not verbose:
        sentences.append("Categories and assumptions: --verbose.")
    return " ".join(sentences)


_CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "Params": ("parameters", "gathered_parameters"),
    "Grads": ("gradients",),
    "Optim": ("optimizer_states",),
    "Buffers": ("deepspeed_buffers",),
    "Activ": ("activations",),
    "Loss": ("logits_and_loss",),
    "Temp": ("temporaries", "workspaces", "pinned_rounding"),
    "Other": ("overhead",),
}
"""Heading → categories of the prediction, per GPU at its fullest moment, GB."""


def _category_table(plan: MemoryPlan) -> Table:
    def cell(names: tuple[str, ...]) -> Callable[[PlanRow], str]:
        def size(row: PlanRow) -> str:
            unknown = row.prediction.unknown is not None and names[0] in ("activations", "logits_and_loss")
            return format_size_number(None if unknown else sum(row.prediction.gpu.get(name, 0) for name in names))

        return size

    label: tuple[Column, Callable[[PlanRow], str]] = (Column(heading="GPU GB by category"), lambda row: row.label)
    columns = [label, *((Column(heading=heading), cell(names)) for heading, names in _CATEGORIES.items())]
    return make_table(columns, plan.rows, always=len(columns))


def _assumptions_text(plan: MemoryPlan) -> str:
    nccl = NCCL_BYTES if plan.num_gpus > 1 else 0
    text = (
        f"Other ({format_gigabytes(CONTEXT_BYTES + nccl)}) and {format_gigabytes(PROCESS_BYTES)} of host memory per "
        "rank are assumed, the rest is computed."
    )
    if nccl:
        low, high = map(format_gigabytes, NCCL_RANGE_BYTES)
        text += (
            f" NCCL takes {format_gigabytes(nccl)} of Other; {low} to {high} per communicator are reported, so measure "
            "where a card is nearly full (gpu_outside_allocator_gb of a run)."
        )
    return text


# ------------------------------------------------------------------ words


def _capacity(count_bytes: int) -> str:
    """``80 GB``, ``79.1 GB``."""
    return f"{format_size_number(count_bytes).removesuffix('.00').removesuffix('.0')} GB"


def format_size_number(count_bytes: float | None) -> str:
    """``39.1``, of GB; an em dash for None."""
    return format_significant(to_gb(count_bytes))


def category_text(name: str, tier: str) -> str:
    if name == "overhead":
        return "CUDA context and NCCL" if tier == "gpu" else "the processes themselves"
    texts = {
        "deepspeed_buffers": "DeepSpeed's buffers",
        "gathered_parameters": "gathered and prefetched parameters",
        "workspaces": "cuBLAS's workspaces",
    }
    return texts.get(name, name.replace("_", " "))


def _gpus(count: int) -> str:
    return f"{count:,}{NO_BREAK}GPU{'' if count == 1 else 's'}"
