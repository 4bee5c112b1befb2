"""The predictions of ``plan`` in words: what fits, why the others do not, what would make them fit.

``plan_table`` has the table and puts all of it on the screen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.spec import DEVICES, Configuration
from ..prediction import what_if
from ..prediction.memory import DOES_NOT_FIT, FITS, TIGHT, UNKNOWN, Prediction
from ..prediction.what_if import Change, PlannedTrial
from ..recommend.short_answer import format_list
from ..system.terminal import NO_BREAK
from ..units import format_gigabytes, format_parameters, format_significant, to_gb

_NOTICEABLE_SHARE = 0.01
"""A stage that needs more than a lower one is explained from this difference on."""
_CATEGORY_SHARE = 0.1
"""A category with less than this part of a difference is not named as its cause."""


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
    """What was asked, and the prediction for every strategy."""

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
    best = min(fitting, key=lambda row: (row.verdict == TIGHT, _simplicity(row.configuration)))
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
        # The memory that is too small in all rows is the one of which the least need is told.
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
    """What is cheaper comes first: the GPUs that there are, room to spare, no offload, few settings."""
    trial = change.trial
    return (
        trial.placement.num_gpus != plan.num_gpus,
        _verdict(plan, change) == TIGHT,
        trial.configuration.offloads,
        len(_settings(plan, trial)),
        _simplicity(trial.configuration),
    )


def _simplicity(configuration: Configuration) -> tuple[int, int, int]:
    """What costs the least speed first: less offload, then a lower stage."""
    param, optimizer = DEVICES.index(configuration.offload_param), DEVICES.index(configuration.offload_optimizer)
    return param, optimizer, configuration.stage


def _shortage_of_host_memory(plan: MemoryPlan) -> str:
    """That host memory is why nothing fits; empty where it is the GPUs' alone."""
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
    # Checkpointing takes no other hardware, so the number of GPUs with it is told too.
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


# ------------------------------------------------------------------ reasons


def causes(plan: MemoryPlan, tier: str) -> Iterator[str]:
    """What takes most of the ``gpu`` or ``host`` of the rows that do not fit in it; rows with the same in one line."""
    sizes_by_category: dict[str, dict[str, int]] = {}
    for row in plan.rows:
        if row.verdict == DOES_NOT_FIT and tier in row.decisive_tiers:
            name, size = row.prediction.biggest_in(tier)
            sizes_by_category.setdefault(name, {})[row.label] = size
    for name, sizes in sizes_by_category.items():
        low, high = format_size_number(min(sizes.values())), format_gigabytes(max(sizes.values()))
        # One size in place of a range where both ends are written alike.
        size_range = high if high.startswith(low) else f"{low} to {high}"
        yield f"{_labels(plan, sizes)}: mostly {category_text(name, tier)}, {size_range}"


def other_changes(plan: MemoryPlan, offered: tuple[str, ...] | None) -> Iterator[str]:
    """The smallest changes of the rows, each once; not the one of the answer, nor one that leads to a row that fits."""
    told = {(row.label, str(plan.num_gpus)) for row in plan.rows if row.verdict != DOES_NOT_FIT} | {offered}
    for change in (row.change for row in plan.rows if row.change):
        if (key := _change_key(plan, change)) not in told:
            told.add(key)
            tightly = " tightly" if _verdict(plan, change) == TIGHT else ""
            yield f"{_change_text(plan, change)}{tightly}: {_needs(change.trial, change.prediction)}"


def larger_than_a_lower_stage(plan: MemoryPlan) -> Iterator[str]:
    """For stages that need more of a GPU than a lower one, what they hold more of at their fullest moment."""
    rows = [row for row in plan.rows if not row.configuration.offloads and not row.prediction.unknown]
    entries = []
    for row in rows:
        lower = [other for other in rows if other.configuration.stage < row.configuration.stage]
        least = min(lower, key=lambda other: other.prediction.gpu_bytes, default=row)
        if row.prediction.gpu_bytes > (1 + _NOTICEABLE_SHARE) * least.prediction.gpu_bytes:
            moment = row.prediction.phase
            # Both at the same moment: the lower stage may be fullest at another one.
            own, others = (each.trial.gpu_bytes_by_moment()[moment] for each in (row, least))
            entries.append((row.label, f"{_surplus_text(own, others)} more than {least.label} at its fullest moment"))
    yield from _grouped(plan, entries)


def _surplus_text(own: Mapping[str, int], others: Mapping[str, int]) -> str:
    more = {name: size - others.get(name, 0) for name, size in own.items() if size > others.get(name, 0)}
    largest = [
        f"{format_gigabytes(more[name])} of {category_text(name, 'gpu')}"
        for name in sorted(more, key=more.__getitem__, reverse=True)
        if more[name] >= _CATEGORY_SHARE * sum(more.values())
    ]
    return format_list(largest)


def reasons_not_known(plan: MemoryPlan) -> Iterator[str]:
    """Why the activations of some rows are not counted; nothing where the answer says it of all rows."""
    if plan.unknown is None:
        reasons = ((row.label, row.prediction.unknown) for row in plan.rows)
        yield from _grouped(plan, ((label, f"activations: {reason}") for label, reason in reasons if reason))


def reasons_against_any_number(plan: MemoryPlan) -> Iterator[str]:
    """Where GPUs needed were asked for, why no number of them is enough for the rows without one."""
    if plan.shows_min_gpus:
        yield from _grouped(
            plan, ((row.label, _reason_against_any_number(plan, row)) for row in plan.rows if not row.min_gpus)
        )


def _reason_against_any_number(plan: MemoryPlan, row: PlanRow) -> str:
    trial = what_if.with_most_gpus(row.trial)
    prediction, gpus = trial.predict(), _gpus(trial.placement.num_gpus)
    if "host" in prediction.decisive_tiers(plan.gpu_bytes, plan.host_bytes):
        return f"with {gpus} a node still needs {format_gigabytes(prediction.host_bytes)} of host memory"
    if trial.configuration.stage == 0:
        return "every GPU holds everything"
    name, size = prediction.biggest_in("gpu")
    return f"with {gpus}, the most that are tried, {category_text(name, 'gpu')} still take {format_gigabytes(size)}"


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


def _labels(plan: MemoryPlan, labels: Collection[str]) -> str:
    """``ZeRO-0, ZeRO-1``; with most of the rows ``all``, or where it is shorter ``all but ZeRO-2``."""
    listed = ", ".join(labels)
    others = [row.label for row in plan.rows if row.label not in labels]
    if len(labels) <= len(others) + 1:
        return listed
    return min(listed, f"all but {format_list(others)}", key=len) if others else "all"


def _grouped(plan: MemoryPlan, entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """``label: text`` for pairs of the two; labels with the same text in one line."""
    labels_by_text: dict[str, list[str]] = {}
    for label, text in entries:
        labels_by_text.setdefault(text, []).append(label)
    for text, labels in labels_by_text.items():
        yield f"{_labels(plan, labels)}: {text}"
