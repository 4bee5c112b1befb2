"""Pure: from records to one Summary per trial, and what a reader must know before comparing them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from ..config.deepspeed_config import hash_config, is_full_config
from ..models.presets import ModelFacts
from ..prediction import trial_predictions
from ..records.schema import RankMeasurement, TrialRecord
from ..system.environment import Environment
from ..units import format_ratio
from . import flops, trial_caveats
from .caveats import Caveat, CaveatKind, typed
from .intervals import spread
from .trial_caveats import known

_LOSS_STEPS = 10
_LOSS_TOLERANCE = {"fp32": 2e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Relative difference of losses that rounding explains within the first ten steps."""
_QUIRK_TOLERANCE = 2e-5
_QUIRK_LIMIT = 0.02
"""Beyond this the one Adam step too many does not explain a difference."""
_QUIRK = (
    "a known quirk: at stage 0 in 16 bit DeepSpeed takes an Adam step on zero gradients at initialisation "
    "(fp16/fused_optimizer.py)"
)
_WEIGHT_TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Distance of two rows' changes of the weights, relative to the reference's, that rounding explains in 25 steps.

Seen on the CPU (``tiny``, 12 steps, stages 0 to 3 and offload): at most 6.5e-5 in fp32, 0.015 in bf16. Beta 1 of 0.8
for 0.9 gives 0.105, a doubled learning rate 1.0. Smaller mistakes (beta 2, weight decay) are lost in the rounding of
bf16 and show in the optimizer's settings alone.
"""
_WEIGHT_STEPS = 25
"""Beyond so many steps the tolerances grow with their number, as rounding goes on to part right rows."""
_QUIRK_WEIGHTS_APART = 0.3
"""The same for the quirk of stage 0: its first update is 0.74 of the right one, the next 0.86, 0.91 (0.26 apart after
one step, 0.10 after twelve)."""
_ONE_OPTIMIZER = "--set optimizer.params.torch_adam=true compares all rows with torch's AdamW"
_ONLY_STAGE_3 = "loss parity was checked among rows of stage 3 alone, not against another stage"
_STAGE0_WRAPPERS = ("FP16_UnfusedOptimizer", "FP16_Optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of one trial, whole job unless said otherwise; None where not measured."""

    record: TrialRecord
    step_seconds: float | None = None
    """Window divided by steps, on the slowest rank."""
    step_seconds_std: float | None = None
    """Sample standard deviation of the slowest rank's step times."""
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    samples_per_second: float | None = None
    model_flops_per_token: int | None = None
    """PaLM appendix B: 6·N_matmul + 12·L·H·Q·T, full attention; forward and backward."""
    causal_flops_per_token: int | None = None
    """The same with the attention term halved."""
    hardware_flops_per_token: int | None = None
    """With what recomputation adds."""
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None
    """Fraction of the device's dense peak, PaLM convention."""
    gpu_total_bytes: int | None = None
    gpu_init_peak_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    gpu_peak_reserved_bytes: int | None = None
    gpu_allocated_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    gpu_device_used_bytes: int | None = None
    gpu_alloc_retries: int | None = None
    """All ``gpu_*``: the worst rank."""
    gpu_outside_allocator_bytes: int | None = None
    """In use on the card beyond torch's allocator after the last measured step (``prediction.trial_predictions``)."""
    host_peak_bytes: int | None = None
    """Sum over the ranks of one node of their peak resident size."""
    host_pss_bytes: int | None = None
    nvme_stored_bytes: int | None = None
    nvme_read_bytes_per_step: float | None = None
    nvme_written_bytes_per_step: float | None = None
    losses: tuple[float | None, ...] = ()
    """Mean over ranks, warm-up steps first."""
    micro_batch_size: int | None = None
    grad_accum: int | None = None
    data_parallel_size: int | None = None
    repeated_loss: float | None = None
    """Mean over ranks of the loss on each one's first batch after the last measured step."""
    weight_change: tuple[float, ...] | None = None
    """Count sketch of what training changed of the weights (worker/weightchange.py)."""
    weight_change_norm: float | None = None
    """Norm of that change over all weights, estimated from the sketch within some 10 %."""
    weight_change_cosine: float | None = None
    """Its cosine to the change of the row that this one is held against (``compare_losses``)."""
    predicted_over_measured: float | None = None
    """Predicted GPU memory to measured (``prediction.trial_predictions``); None without a prediction or a GPU."""
    predicted_over_ledger: float | None = None
    """Predicted ledger to the counted one; None without a prediction or a ledger."""
    caveats: tuple[Caveat, ...] = ()
    """What was known before it ran, then what its numbers say."""
    environment: Environment | None = None
    """Hardware and versions of the host it ran on; None where the result does not tell."""
    num_nodes: int | None = None
    """Hosts that the ranks ran on; None for a trial over a hostfile that measured nothing."""
    run_id: str | None = None
    """Name of the run's folder; None where the result does not tell."""
    flat_config_hash: str | None = None
    """``config_hash`` as a flat row tells it; None for a summary of a record."""
    round: int | None = None
    """Number of the round in which it ran, where several results are taken together; None: its trial's ``repeat``."""

    @property
    def config_hash(self) -> str | None:
        """The first 12 hexadecimal digits of the SHA-256 of the DeepSpeed configuration that ran, without its folders.

        Equal for equal configurations on any machine. None where the result does not tell the configuration.
        """
        trial = self.record.trial
        return hash_config(trial.ds_config) if is_full_config(trial) else self.flat_config_hash

    @property
    def gpu_fraction(self) -> float | None:
        """Peak reserved memory as a fraction of the card, real or emulated, on the rank nearest to running out."""
        return trial_caveats.gpu_fraction(self.record)


def summarise(record: TrialRecord, facts: ModelFacts | None, peak_flops: float | None) -> Summary:
    """The numbers of one trial. ``peak_flops``: FLOP/s of one device in the trial's precision."""
    written = trial_caveats.written_caveats(record.caveats)
    if not record.ranks:
        alone = record.trial.placement.hostfile is None
        return Summary(record=record, caveats=tuple(written), num_nodes=1 if alone else None)
    slowest = max(record.ranks, key=lambda rank: rank.window_seconds)
    step = slowest.window_seconds / len(slowest.step_seconds)
    deviation = spread(slowest.step_seconds)
    of_measured = trial_predictions.predicted_over_measured(record)
    of_ledger = trial_predictions.predicted_over_ledger(record)
    samples = slowest.micro_batch_size * slowest.grad_accum * slowest.data_parallel_size / step
    tokens = samples * record.trial.workload.seq_length
    per_gpu = tokens / slowest.world_size
    work = record.trial.workload
    change = _sum_of_sketches(record.ranks)
    tflops, mfu = _efficiency(facts, work.seq_length, per_gpu, peak_flops)
    return Summary(
        record=record,
        step_seconds=step,
        step_seconds_std=deviation,
        tokens_per_second=tokens,
        tokens_per_second_per_gpu=per_gpu,
        samples_per_second=samples,
        **_flops_per_token(facts, work.seq_length, work.activation_checkpointing),
        model_tflops_per_gpu=tflops,
        mfu=mfu,
        **_worst(record.ranks),
        gpu_outside_allocator_bytes=trial_predictions.outside_allocator_bytes(record),
        host_peak_bytes=_total_per_node(record.ranks, "host_peak_bytes"),
        host_pss_bytes=_total_per_node(record.ranks, "host_pss_bytes"),
        nvme_stored_bytes=_total(record.ranks, "nvme_stored_bytes"),
        nvme_read_bytes_per_step=_per_step(record.ranks, "nvme_read_bytes"),
        nvme_written_bytes_per_step=_per_step(record.ranks, "nvme_written_bytes"),
        losses=_mean_losses(record.ranks),
        repeated_loss=_mean_repeated_loss(record.ranks),
        weight_change=change,
        weight_change_norm=None if change is None else math.hypot(*change),
        micro_batch_size=slowest.micro_batch_size,
        grad_accum=slowest.grad_accum,
        data_parallel_size=slowest.data_parallel_size,
        num_nodes=len({rank.hostname for rank in record.ranks}),
        predicted_over_measured=of_measured,
        predicted_over_ledger=of_ledger,
        caveats=tuple(
            dict.fromkeys(
                [*written, *trial_caveats.own_caveats(record, slowest, deviation, mfu, of_measured, of_ledger)]
            )
        ),
    )


_GPU_FIELDS = (
    "gpu_total_bytes",
    "gpu_init_peak_bytes",
    "gpu_peak_bytes",
    "gpu_peak_reserved_bytes",
    "gpu_allocated_bytes",
    "gpu_reserved_bytes",
    "gpu_device_used_bytes",
    "gpu_alloc_retries",
)
_gpu_values = attrgetter(*_GPU_FIELDS)


def _flops_per_token(facts: ModelFacts | None, seq_length: int, checkpointing: bool) -> dict[str, Any]:
    if facts is None:
        return {}
    return {
        "model_flops_per_token": flops.model_flops_per_token(facts, seq_length),
        "causal_flops_per_token": flops.causal_flops_per_token(facts, seq_length),
        "hardware_flops_per_token": flops.hardware_flops_per_token(facts, seq_length, checkpointing),
    }


def _efficiency(
    facts: ModelFacts | None, seq_length: int, tokens_per_second_per_gpu: float, peak: float | None
) -> tuple[float | None, float | None]:
    if facts is None:
        return None, None
    per_token = flops.model_flops_per_token(facts, seq_length)
    return per_token * tokens_per_second_per_gpu / 1e12, flops.mfu(per_token, tokens_per_second_per_gpu, peak)


def _worst(ranks: Sequence[RankMeasurement]) -> dict[str, Any]:
    """The largest of each of ``_GPU_FIELDS``, where any rank measured it."""
    columns = zip(_GPU_FIELDS, zip(*map(_gpu_values, ranks), strict=True), strict=True)
    return {name: max(found) for name, values in columns if (found := [each for each in values if each is not None])}


def _total(ranks: Sequence[RankMeasurement], name: str) -> int | None:
    values = known(ranks, name)
    return sum(values) if len(values) == len(ranks) else None


def _total_per_node(ranks: Sequence[RankMeasurement], name: str) -> int | None:
    """The fullest node's sum over its ranks; None where a rank did not report, as its node may be the fullest."""
    nodes: dict[str, list[RankMeasurement]] = {}
    for rank in ranks:
        nodes.setdefault(rank.hostname, []).append(rank)
    totals = [total for members in nodes.values() if (total := _total(members, name)) is not None]
    return max(totals) if len(totals) == len(nodes) else None


def _per_step(ranks: Sequence[RankMeasurement], name: str) -> float | None:
    total = _total(ranks, name)
    return None if total is None else total / len(ranks[0].step_seconds)


def _mean_losses(ranks: Sequence[RankMeasurement]) -> tuple[float | None, ...]:
    """Per step the mean over ranks; None where any rank's is not finite."""
    if len(ranks) == 1:
        return ranks[0].losses
    count, steps = len(ranks), zip(*(rank.losses for rank in ranks), strict=False)
    if all(None not in rank.losses for rank in ranks):  # nearly always, and twice as fast
        return tuple([total / count for total in map(math.fsum, steps)])
    return tuple(None if None in step else math.fsum(step) / count for step in steps)


def _mean_repeated_loss(ranks: Sequence[RankMeasurement]) -> float | None:
    values = known(ranks, "repeated_loss")
    return math.fsum(values) / len(values) if len(values) == len(ranks) else None


def _sum_of_sketches(ranks: Sequence[RankMeasurement]) -> tuple[float, ...] | None:
    """The whole model's: each rank's is of its own share of the weights. None where a rank has none."""
    sketches = known(ranks, "weight_change")
    if len(sketches) < len(ranks) or len({len(each) for each in sketches}) != 1:
        return None
    return tuple(map(math.fsum, zip(*sketches, strict=True)))


def with_comparison(summaries: Sequence[Summary]) -> list[Summary]:
    """The summaries with what only shows beside each other; a row with a caveat about its loss gets no second."""
    compared = list(summaries)
    for group in _alike(summaries):
        reference = _reference(group)
        if reference is None:
            continue
        for index, summary in group:
            compared[index] = replace(summary, weight_change_cosine=_cosine(reference, summary))
        if len({each.record.trial.strategy.name for _, each in group}) > 1 and all(
            each.record.trial.strategy.stage == 3 for _, each in group
        ):
            first = group[0][0]
            only = typed(CaveatKind.NOTE, _ONLY_STAGE_3)
            if only not in compared[first].caveats:
                compared[first] = replace(compared[first], caveats=(*compared[first].caveats, only))
        for index, caveat in _other_optimizers(group):
            if caveat not in compared[index].caveats:
                compared[index] = replace(compared[index], caveats=(*compared[index].caveats, caveat))
    for index, caveat in compare_losses(summaries).items():
        if not any(each.kind is CaveatKind.LOSS_DIFFERS for each in compared[index].caveats):
            compared[index] = replace(compared[index], caveats=(*compared[index].caveats, caveat))
    return compared


def _other_optimizers(group: Sequence[tuple[int, Summary]]) -> Iterator[tuple[int, Caveat]]:
    """Of rows on the CPU accelerator that step with another implementation of Adam than the first does.

    There offload moves nothing, and the implementations alone can make such a row the faster.
    """
    first = group[0][1].record
    theirs = first.ranks[0].optimizer_class
    if first.trial.placement.accelerator != "cpu" or trial_caveats.optimizer_family(theirs) != "adam":
        return
    for index, summary in group:
        own = summary.record.ranks[0].optimizer_class
        if own != theirs and trial_caveats.optimizer_family(own) == "adam":
            text = f"{own} steps here, {theirs} in {first.trial.strategy.label}: a difference in speed is partly theirs"
            yield index, Caveat(kind=CaveatKind.NOTE, text=f"{text}; {_ONE_OPTIMIZER}", next_step=_ONE_OPTIMIZER)


def compare_losses(summaries: Sequence[Summary]) -> dict[int, Caveat]:
    """Caveats by position for rows that did not train as the reference of their workload did.

    The reference is the row that most other strategies agree with; among equals one that is not stage 3, then the
    first. A row with a known quirk is none where there is another.
    """
    found = {}
    for group in _alike(summaries):
        reference = _reference(group)
        for index, summary in group:
            caveat = None if reference is None or summary is reference else _disagreement(reference, summary)
            if caveat is not None:
                found[index] = caveat
    return found


def _alike(summaries: Sequence[Summary]) -> list[list[tuple[int, Summary]]]:
    """The rows that trained on the same batches, with their positions; rows without finite losses are in none."""
    groups: list[list[tuple[int, Summary]]] = []
    for index, summary in enumerate(summaries):
        if not summary.losses or None in summary.losses:
            continue
        same = next((group for group in groups if _trained_alike(group[0][1], summary)), None)
        if same is None:
            groups.append(same := [])
        same.append((index, summary))
    return groups


def _trained_alike(a: Summary, b: Summary) -> bool:
    return (a.micro_batch_size, a.grad_accum, a.data_parallel_size, a.record.trial.workload) == (
        b.micro_batch_size,
        b.grad_accum,
        b.data_parallel_size,
        b.record.trial.workload,
    )


def _reference(group: Sequence[tuple[int, Summary]]) -> Summary | None:
    """See compare_losses. One run speaks for each strategy; None where every row has the quirk."""
    first_of: dict[str, Summary] = {}
    for _, summary in group:
        if not _has_stage0_quirk(summary):
            first_of.setdefault(summary.record.trial.strategy.name, summary)
    rows = list(first_of.values())
    if len(rows) < 2:
        return rows[0] if rows else None
    agreeing = [sum(_disagreement(a, b) is None for b in rows) for a in rows]
    return max(
        zip(rows, agreeing, strict=True),
        key=lambda pair: (pair[1], pair[0].record.trial.strategy.stage != 3),
    )[0]


def _disagreement(reference: Summary, summary: Summary) -> Caveat | None:
    """What shows that a row did not train as the reference did; None where rounding explains all."""
    quirk = _has_stage0_quirk(summary)
    precision = summary.record.trial.workload.precision
    label = reference.record.trial.strategy.label
    difference = _loss_difference(reference, summary)
    if difference > (_QUIRK_LIMIT if quirk else _LOSS_TOLERANCE[precision]):
        text = f"loss differs by {difference:.2%} from {label}'s: more than rounding explains"
        return _did_not_train_alike(text)
    settings = _other_settings(reference, summary)
    if settings is not None:
        return _did_not_train_alike(f"trained differently from {label}: {settings}")
    apart = _weights_apart(reference, summary) or 0.0
    growth = max(1.0, len(summary.losses) / _WEIGHT_STEPS)
    explained = _WEIGHT_TOLERANCE[precision] * growth
    moved = f"trained differently from {label}: its weights moved {_times_as_far(reference, summary)} as far"
    if apart > (_QUIRK_WEIGHTS_APART if quirk else explained):
        cosine = _cosine(reference, summary)
        direction = "" if cosine is None else f" (the cosine of the two changes is {cosine:.4f})"
        return _did_not_train_alike(f"{moved}{direction}; rounding does not explain it")
    if quirk:
        if difference > _QUIRK_TOLERANCE:
            return Caveat(kind=CaveatKind.LOSS_DIFFERS, text=f"loss differs by {difference:.3%}, {_QUIRK}")
        return Caveat(kind=CaveatKind.LOSS_DIFFERS, text=f"{moved}, {_QUIRK}") if apart > explained else None
    again = _repeated_loss_difference(reference, summary) or 0.0
    if again > _LOSS_TOLERANCE[precision] * growth:
        text = f"its loss on the first batch after training differs by {again:.2%}, more than rounding explains"
        return _did_not_train_alike(f"trained differently from {label}: {text}")
    return None


def _did_not_train_alike(text: str) -> Caveat:
    return typed(CaveatKind.LOSS_DIFFERS, f"{text}; do not use this row before you know why", disqualifying=True)


def _has_stage0_quirk(summary: Summary) -> bool:
    stage = summary.record.trial.strategy.stage
    rank = summary.record.ranks[0]
    adam = "adam" in rank.optimizer_class.lower()
    return stage == 0 and adam and rank.engine_optimizer_class in _STAGE0_WRAPPERS


def _loss_difference(a: Summary, b: Summary) -> float:
    """Largest relative difference in the first steps."""
    pairs = list(zip(a.losses, b.losses, strict=False))[:_LOSS_STEPS]
    return max((abs(x - y) / max(abs(x), 1e-12) for x, y in pairs if x is not None and y is not None), default=0.0)


def _repeated_loss_difference(a: Summary, b: Summary) -> float | None:
    """Difference of the losses on the first batch after equally many steps, relative to the loss that it began with."""
    if a.repeated_loss is None or b.repeated_loss is None or len(a.losses) != len(b.losses):
        return None
    return abs(a.repeated_loss - b.repeated_loss) / max(abs(a.losses[0] or 0.0), 1e-12)


def _other_settings(reference: Summary, summary: Summary) -> str | None:
    """The optimizer's settings that are not the reference's, as far as both were read back; None without any."""
    classes = [each.record.ranks[0].optimizer_class for each in (reference, summary)]
    families = [trial_caveats.optimizer_family(name) for name in classes]
    if None not in families and families[0] != families[1]:
        return f"{classes[1]} stepped, not {classes[0]}"
    theirs, own = (each.record.ranks[0].optimizer_settings or () for each in (reference, summary))
    if len(theirs) != len(own) or len(reference.losses) != len(summary.losses):
        return None
    for before, now in zip(theirs, own, strict=True):
        for name in before.keys() & now.keys():
            if not _same_setting(before[name], now[name]):
                return f"its optimizer has {name} {now[name]}, not {before[name]}"
    return None


def _same_setting(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same_setting, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _weights_apart(a: Summary, b: Summary) -> float | None:
    """The norm of the difference of two rows' changes of the weights, relative to the first one's norm.

    0 for equal changes; 1 where the second row's weights did not move; None where either was not measured, or where
    they took another number of steps.
    """
    if a.weight_change is None or b.weight_change is None or len(a.losses) != len(b.losses):
        return None
    if len(a.weight_change) != len(b.weight_change):
        return None
    distance = math.dist(a.weight_change, b.weight_change)
    norm = math.hypot(*a.weight_change)
    if norm == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / norm


def _times_as_far(reference: Summary, summary: Summary) -> str:
    norms = [each.weight_change_norm or 0.0 for each in (reference, summary)]
    return format_ratio(norms[1] / norms[0]) if norms[0] > 0 else "infinitely"


def _cosine(reference: Summary, summary: Summary) -> float | None:
    """The cosine between two rows' changes of the weights; None where either is unknown or nothing moved."""
    if _weights_apart(reference, summary) is None:
        return summary.weight_change_cosine
    a, b = reference.weight_change or (), summary.weight_change or ()
    product = math.hypot(*a) * math.hypot(*b)
    if product == 0.0:
        return None
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / product
