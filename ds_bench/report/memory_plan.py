"""The predictions of ``plan`` as text: one sentence with the answer, and one table, or three with ``--verbose``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.spec import Configuration
from ..config.strategies import simplicity
from ..prediction import what_if
from ..prediction.fit_verdict import DOES_NOT_FIT, FITS, TIGHT, UNKNOWN, VARYING_PERCENT, GpuNeed
from ..prediction.predicted_memory import NCCL_RANGE_BYTES, PROCESS_BYTES, Prediction
from ..prediction.replayed_need import AUTOCAST, TILED_LOSS
from ..prediction.what_if import Change, PlannedTrial
from ..recommend.message_templates import format_list
from ..units import format_gigabytes, format_items, format_parameters, format_significant, to_gb
from .table_layout import Column, Table, make_table, wrap

_MAX_SENTENCE_WIDTH = 100
_FITS_CELLS = {FITS: "yes", TIGHT: "tight", DOES_NOT_FIT: "no", UNKNOWN: "?"}
_VERDICT_VERBS = {
    FITS: ("fits", "fit"),
    TIGHT: ("is tight", "are tight"),
    UNKNOWN: ("is not known", "are not known"),
    DOES_NOT_FIT: ("does not fit", "do not fit"),
}
"""Verdict → its verb for one row, and for several."""
_CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "Params": ("parameters", "gathered_parameters"),
    "Grads": ("gradients",),
    "Optim": ("optimizer_states",),
    "Buffers": ("deepspeed_buffers",),
    "Activ": ("activations",),
    "Loss": ("logits_and_loss",),
    "Temp": ("temporaries", "square_roots", "attention_gradient", "workspaces", "pinned_rounding"),
    "Other": ("overhead",),
}
"""Heading → categories of the prediction, in GB per GPU at its fullest moment."""
_TERMS: Mapping[str, str] = {
    "initialize_clone": "initialize clones the rank's part of the parameters",
    "kept_logits": "16-bit logits that a training loop may keep during backward",
    "attention_gradient": "flash attention's fp32 gradient of the query, one layer",
    "square_roots": "square roots of torch's multi-tensor Adam",
    "workspaces": "cuBLAS's workspaces, inside the allocator",
    "context": "CUDA context, outside the allocator",
    "nccl": "NCCL's communicators, outside the allocator",
}
"""Term of ``Prediction.terms`` → its description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Prediction for one strategy."""

    trial: PlannedTrial
    prediction: Prediction
    verdict: str
    change: Change | None
    """The smallest change that would make the row fit; None if no change does, or if the row may fit already."""
    decisive_tiers: tuple[str, ...] = ()
    """The memory tiers that decide the verdict, ``gpu`` and ``host``; empty if the row fits."""
    min_gpus: int | None = None
    """None if not requested, or if no number of GPUs is enough."""
    max_batch: int | None = None
    """None if not requested, or if not even one sequence fits."""

    @property
    def configuration(self) -> Configuration:
        return self.trial.configuration

    @property
    def label(self) -> str:
        return self.trial.configuration.label


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The question, and the prediction for every strategy."""

    requested: PlannedTrial
    """The workload and the GPUs; the configuration is irrelevant."""
    gpu_bytes: int
    """Memory of one GPU."""
    host_bytes: int | None
    """Host memory of one node; None if not given."""
    rows: Sequence[PlanRow]
    shows_min_gpus: bool
    shows_max_batch: bool
    notes: Sequence[str] = ()
    """On the model and its trained parameters."""

    @property
    def num_gpus(self) -> int:
        return self.requested.placement.num_gpus

    @property
    def unknown(self) -> str | None:
        """Why no row's figures include activations; None if any row's do."""
        reasons = [row.prediction.unknown for row in self.rows]
        return reasons[0] if reasons and all(reasons) else None


def answer_text(plan: MemoryPlan) -> str:
    """Return the sentence that answers the question."""
    fitting = [row for row in plan.rows if row.verdict in (FITS, TIGHT)]
    if fitting:
        best = min(fitting, key=lambda row: (row.verdict == TIGHT, simplicity(row.configuration.layout)))
        trial, total = best.trial, len(plan.rows)
        tightly = ""
        if best.verdict == TIGHT:
            on_gpu = "gpu" in best.decisive_tiers
            tightly = "is tight (may retry allocations or run out)" if on_gpu else "nearly fills the host's memory"
        needs = _needs(trial, best.prediction)
        if total == 1:
            text = f"{best.label} {tightly or 'fits'}: {needs}"
        else:
            verdicts = [row.verdict for row in plan.rows]
            counts = (
                f"{verdicts.count(each)} {singular if verdicts.count(each) == 1 else plural}"
                for each, (singular, plural) in _VERDICT_VERBS.items()
                if each in verdicts
            )
            place = "the simplest"
            if verdicts.count(best.verdict) == 1:
                place = "the only one known to fit" if UNKNOWN in verdicts else "the only one that fits"
            text = f"{', '.join(counts)}; {best.label} is {place}{f', but {tightly}' if tightly else ''}: {needs}"
        text += _without_offload(plan, trial)
    elif unknown := next((row for row in plan.rows if row.verdict == UNKNOWN), None):
        prediction = unknown.prediction
        why = f"activations are not counted: {prediction.unknown}"
        if prediction.unknown is None:
            why = f"the prediction leaves out {format_list(prediction.gpu_need.unknowns)}"
        text = f"not known, because {why}; apart from that {unknown.label} needs {_needs(unknown.trial, prediction)}"
    else:
        text = f"{plan.rows[0].label} does not fit" if len(plan.rows) == 1 else "nothing fits"
        if plan.unknown:
            text += f" even without activations, which are not counted ({plan.unknown})"
        if changes := [row.change for row in plan.rows if row.change]:
            change = what_if.cheapest_change(changes, plan.num_gpus, plan.gpu_bytes, plan.host_bytes)
            verdict = change.prediction.verdict(plan.gpu_bytes, plan.host_bytes)
            verb = {FITS: "would fit", TIGHT: "would fit tightly", UNKNOWN: "may fit"}[verdict]
            others = {name: value for name, value in change.settings.items() if name not in ("strategy", "num_gpus")}
            settings = f" with {what_if.settings_text(others)}" if others else ""
            gpus = f" on {format_items(change.settings['num_gpus'], 'GPU')}" if "num_gpus" in change.settings else ""
            text += f"; {change.trial.configuration.label}{settings} {verb}{gpus}"
            text += f": {_needs(change.trial, change.prediction)}"
            text += _without_offload(plan, change.trial)
        else:
            # The smallest need in the tier that is too small for all rows.
            on_host = all("host" in row.decisive_tiers for row in plan.rows)
            sizes = [
                (row.prediction.host_bytes if on_host else row.prediction.least_gpu_bytes, row.label)
                for row in plan.rows
            ]
            size, label = min(sizes)
            least = f"{format_gigabytes(size)} per {'node' if on_host else 'GPU'}"
            text += f" ({label} needs the least: {least}), and none of the changes that were tried helps"
    return f"{plan.num_gpus:,} × {_capacity(plan.gpu_bytes)}: {text}."


def _without_offload(plan: MemoryPlan, trial: PlannedTrial) -> str:
    """Return a clause with the GPUs, or the change to a row, needed without offload.

    Empty if ``trial`` does not offload, or there are enough GPUs.
    """
    if not trial.configuration.offloads:
        return ""
    count = what_if.min_gpus_without_offload(trial, plan.gpu_bytes, plan.host_bytes)
    if count is not None and count <= plan.num_gpus:
        return ""
    needs = [] if count is None else [f"at least {format_items(count, 'GPU')}"]
    changes = [row.change for row in plan.rows if row.change and not row.change.trial.configuration.offloads]
    needs += [
        f"{each.trial.configuration.label} with {what_if.settings_text(each.settings)}"
        for each in changes
        if each.settings.keys().isdisjoint(("strategy", "num_gpus"))
        and each.prediction.verdict(plan.gpu_bytes, plan.host_bytes) == FITS
    ][:1]
    return f"; without offload {('you need ' + ' or '.join(needs)) if needs else 'no number of GPUs is enough'}"


def _needs(trial: PlannedTrial, prediction: Prediction) -> str:
    """Return ``18.2–24.9 GB per GPU (peak in initialize)``, with host memory and NVMe if ``trial`` offloads."""
    where = " per node" if trial.placement.num_gpus > trial.ranks_per_node else ""
    need = prediction.gpu_need
    parts = [f"{gpu_range(need)} GB per GPU (peak in {need.phase})"]
    if trial.configuration.offloads:
        parts.append(f"{format_gigabytes(prediction.host_bytes)} of host memory{where}")
    if prediction.nvme_bytes:
        parts.append(f"{format_gigabytes(prediction.nvme_bytes)} of NVMe{where}")
    return format_list(parts)


def gpu_range(need: GpuNeed) -> str:
    """Return the two figures in GB, the second ``?`` if something is not counted; one if they are the same."""
    least, reserved = _gb(need.least_bytes), "?" if need.is_lower_bound else _gb(need.reserved_bytes)
    return least if reserved == least else f"{least}–{reserved}"


def plan_lines(plan: MemoryPlan, width: int, *, verbose: bool) -> Iterator[str]:
    """Yield the whole text, in lines of at most ``width`` characters unless a word is longer."""
    yield from wrap(answer_text(plan), min(width, _MAX_SENTENCE_WIDTH))
    notes = () if verbose else ("categories and assumptions: --verbose",)
    tables = [plan_table(plan), *([_category_table(plan), _host_table(plan)] if verbose else [])]
    for table in tables:
        yield ""
        yield from (line.text for line in replace(table, notes=[*table.notes, *notes]).to_terminal(width))


def plan_table(plan: MemoryPlan) -> Table:
    """Return a row per strategy, with columns for NVMe, GPUs, batch and changes only if there is something to show."""

    def fits(row: PlanRow) -> str:
        """Name the tier that is too small, if the capacities of both are known."""
        named = row.verdict == DOES_NOT_FIT and plan.host_bytes is not None
        tiers = " and ".join("GPU" if tier == "gpu" else tier for tier in row.decisive_tiers)
        return f"no ({tiers})" if named else _FITS_CELLS[row.verdict]

    def gpus_needed(row: PlanRow) -> str:
        """Mark a figure without activations as a lower bound."""
        is_open = row.prediction.gpu_need.is_lower_bound
        return "no fit" if row.min_gpus is None else f"{'≥ ' if is_open else ''}{row.min_gpus:,}"

    def largest_batch(row: PlanRow) -> str:
        """Mark a batch at the limit of the search with ``≥``: larger ones were not tried."""
        if row.max_batch is None:
            return "?" if row.verdict == UNKNOWN else "no fit"
        return f"{'≥ ' if row.max_batch == what_if.LARGEST_BATCH else ''}{row.max_batch:,}"

    def mostly(row: PlanRow) -> str:
        """Name the largest part of the host's memory if only that memory is too small, otherwise of the GPU's."""
        tier = "host" if row.decisive_tiers == ("host",) else "gpu"
        name, size = row.prediction.biggest_in(tier)
        return f"{'host: ' if tier == 'host' else ''}{category_text(name, tier)} {_gb(size)}"

    columns: list[Column[PlanRow]] = [
        Column("Strategy", lambda row: row.label),
        Column("Fits", fits, left=True),
        Column("GPU GB", lambda row: gpu_range(row.prediction.gpu_need)),
        Column("Peak in", lambda row: row.prediction.gpu_need.phase, left=True),
        Column("Host GB", lambda row: _gb(row.prediction.host_bytes)),
        Column("NVMe GB", lambda row: _gb(row.prediction.nvme_bytes or None)),
        *([Column("GPUs needed", gpus_needed)] if plan.shows_min_gpus else []),
        *([Column("Largest batch", largest_batch)] if plan.shows_max_batch else []),
        Column("Largest part, GB", mostly, left=True, priority=1),
        Column(
            "To fit, use",
            lambda row: "" if row.change is None else row.change.text,
            left=True,
            priority=2,
            noted=True,
        ),
    ]
    work, profile = plan.requested.workload, plan.requested.profile
    limit = "up to " if plan.requested.varying_lengths else ""
    own_sizes = any(row.trial.workload.batch_size != work.batch_size for row in plan.rows)
    title = [
        profile.name,
        format_parameters(profile.all_parameters, profile.parameters),
        work.precision,
        f"micro-batch {work.batch_size:,} × {limit}{work.seq_length:,} tokens"
        f"{' unless the row says otherwise' if own_sizes else ''}",
        *(["activation checkpointing"] if work.activation_checkpointing else []),
        *([] if plan.host_bytes is None else [f"nodes with {_capacity(plan.host_bytes)} of host memory"]),
    ]
    constant = "" if plan.requested.varying_lengths else " for sequences of constant length"
    notes = [
        f"predicted{constant}; nothing was run. GB is 2^30 bytes",
        "GPU GB, per GPU: the minimum needed to train, and what is reserved if there is room to spare; host and NVMe "
        "GB are per node",
    ]
    notes += plan.notes
    if loading := [row.label for row in plan.rows if row.prediction.host_phase == "load"]:
        which = "" if len(loading) == len(plan.rows) else f" ({format_list(loading, most=4)})"
        when = f"while from_pretrained loads the weights{which}; except at ZeRO-3, every rank loads all of them"
        notes.append(f"host memory peaks {when}")
    notes += _method_notes(plan)
    tight = {tier for row in plan.rows if row.verdict == TIGHT for tier in row.decisive_tiers}
    if "gpu" in tight:
        notes.append(
            "tight: the lower figure of GPU GB fits, the upper does not; it may retry allocations or run out of memory"
        )
    if "host" in tight:
        notes.append("host memory is tight above 90 %")
    for why in dict.fromkeys(why for row in plan.rows for why in row.prediction.gpu_need.unknowns):
        notes.append(f"not predicted: {why}")
    if plan.shows_min_gpus and plan.requested.ranks_per_node != 1:
        node = plan.requested.ranks_per_node
        notes.append(
            f"GPUs needed: above {node}, rounded up to whole nodes of {node}, unless the row fits on --num-gpus"
        )
    if plan.shows_min_gpus:
        notes.append("with that many GPUs, a row may still be tight")
    if plan.shows_max_batch:
        notes.append("at that micro-batch, a row may still be tight")
    for reason in dict.fromkeys(filter(None, (row.prediction.unknown for row in plan.rows))):
        if plan.unknown is None:
            labels = [row.label for row in plan.rows if row.prediction.unknown == reason]
            notes.append(f"activations of {format_list(labels)} are not counted: {reason}")
    return replace(make_table(columns, plan.rows), title=tuple(title), notes=notes)


def _method_notes(plan: MemoryPlan) -> Iterator[str]:
    """Yield notes on the upper figure of the rows, and on why some rows are not replayed."""
    needs = {row.label: row.prediction.gpu_need for row in plan.rows}
    by_rule = [label for label, need in needs.items() if need.method == "rule" and not need.is_lower_bound]
    varies = plan.requested.varying_lengths
    if varies:
        yield (
            "lengths vary: the upper figure assumes that they grow, so that no cached block is large enough for the "
            "next sequence; a first step with the longest sequences avoids most of this"
        )
    if by_rule:
        whose = "" if len(by_rule) == len(needs) else f" for {format_list(by_rule, most=4)}"
        more = f", and {VARYING_PERCENT} % for varying lengths" if varies else ""
        yield f"the upper figure of GPU GB is an estimate{whose}: what is allocated plus 5 % and 6.5 GB{more}"
    for obstacle in dict.fromkeys(filter(None, (need.not_replayed for need in needs.values()))):
        labels = [label for label, need in needs.items() if need.not_replayed == obstacle]
        demand = "; --exact replays them" if obstacle in (AUTOCAST, TILED_LOSS) else ""
        yield f"allocations of {format_list(labels)} were not replayed, because of {obstacle}{demand}"


def _category_table(plan: MemoryPlan) -> Table:
    """Return the parts of the GPU's memory, with notes on what is assumed."""

    def cell(names: tuple[str, ...]) -> Callable[[PlanRow], str]:
        def size(row: PlanRow) -> str:
            unknown = row.prediction.unknown is not None and names[0] in ("activations", "logits_and_loss")
            return _gb(None if unknown else sum(row.prediction.gpu.get(name, 0) for name in names))

        return size

    columns: list[Column[PlanRow]] = [
        Column("GPU GB by category", lambda row: row.label),
        *(Column(heading, cell(names)) for heading, names in _CATEGORIES.items()),
    ]
    # A note per term that is part of a category: its size, or its size in each strategy that has it.
    notes = []
    for name, text in _TERMS.items():
        sizes = {row.label: row.prediction.terms.get(name, 0) for row in plan.rows}
        named = [f"{label} {_gb(size)}" for label, size in sizes.items() if size]
        if len(set(sizes.values())) == 1 and named:
            named = [format_gigabytes(next(iter(sizes.values())))]
        if named:
            notes.append(f"{text}: {', '.join(named)}")
    process = format_gigabytes(PROCESS_BYTES)
    notes.append(f"the Other column, and {process} of host memory per rank, are assumptions; the rest is computed")
    if plan.num_gpus > 1:
        low, high = map(format_gigabytes, NCCL_RANGE_BYTES)
        notes.append(
            f"{low} to {high} per NCCL communicator has been reported: if a card is nearly full, measure it: "
            "gpu_outside_allocator_gb in a run's results"
        )
    return replace(make_table(columns, plan.rows, always=len(columns)), notes=notes)


def _host_table(plan: MemoryPlan) -> Table:
    """Return a node's host memory by phase, with notes on what is assumed about loading."""

    def cell(phase: str) -> Callable[[PlanRow], str]:
        return lambda row: _gb(row.prediction.host_phases.get(phase))

    columns: list[Column[PlanRow]] = [
        Column("Host GB by phase", lambda row: row.label),
        *(Column(phase, cell(phase)) for phase in ("load", "initialize", "forward", "backward", "step")),
    ]
    notes = [
        "load: from_pretrained keeps a full copy of the weights in every rank; at stage 3 with zero.Init in rank 0 "
        "only (Transformers 5.23; earlier versions reportedly in every rank)",
        "pinned buffers of at most pinned_max_round_threshold_mb (PYTORCH_ALLOC_CONF) are rounded up to a power of two",
    ]
    return replace(make_table(columns, plan.rows, always=len(columns)), notes=notes)


def _capacity(count_bytes: int) -> str:
    """Return ``80 GB``, ``79.1 GB``."""
    return f"{_gb(count_bytes).removesuffix('.00').removesuffix('.0')} GB"


def _gb(count_bytes: float | None) -> str:
    return format_significant(to_gb(count_bytes))


def category_text(name: str, tier: str = "gpu") -> str:
    """Return a category of memory in words. ``tier``: ``gpu`` or ``host``."""
    if name == "overhead":
        return "CUDA context and NCCL" if tier == "gpu" else "the processes themselves"
    texts = {
        "deepspeed_buffers": "DeepSpeed's buffers",
        "gathered_parameters": "gathered and prefetched parameters",
        "workspaces": "cuBLAS's workspaces",
    }
    return texts.get(name, name.replace("_", " "))
