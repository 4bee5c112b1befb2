"""Predicts the memory of each planned trial, and compares the prediction with the measurement afterwards.

Trials predicted not to fit are marked as skipped if the user asked for that; those that need far more host memory than
the node has are always skipped, unless forced. Records store the prediction, so that every run checks it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ..config.deepspeed_config import tensor_parallel_size
from ..config.spec import Accelerator, Placement, Trial
from ..config.trained_parameters import TrainedParameters
from ..errors import DsBenchError, PreflightError, UsageError
from ..models.architectures import Architecture, read_architecture
from ..models.lookup import ResolvedModel
from ..models.presets import ModelFacts
from ..records import json_files
from ..records.json_files import InvalidValueError
from ..records.schema import RankMeasurement, TrialRecord, measured_values
from ..system.environment import Environment
from ..units import format_bytes
from . import what_if
from .formula_profile import formula_profile, with_loss
from .inputs import unpredicted_settings
from .model_profile import USUAL, ModelProfile, NothingTrainedError, Variant, find_profile, measure_profile
from .predicted_memory import Prediction
from .replayed_need import UNPREDICTABLE, ReplayMode, predict_trial

_NOT_RESIDENT = ("deepspeed_buffers", "overhead")
"""Categories of host memory that do not count as resident on the CPU accelerator: only those pages of
DeepSpeed's buffers that were written become resident, and the overhead is an assumption."""
_FAR_BEYOND = 1.5
"""Multiple of a node's memory above which a trial's predicted need rules it out: predictions are never that far off."""
_MISS_FRACTION = 0.10
"""Relative error of a prediction above which it gets a caveat."""
_MIN_MISS_BYTES = 256 * 10**6
"""Absolute error of a GPU's predicted peak below which it gets no caveat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCapacity:
    """The memory that predictions are compared with; None for a tier that is not compared."""

    gpu_bytes: int | None
    """The smallest GPU used, real or emulated; None on the CPU accelerator."""
    host_bytes: int | None
    """Host memory of the smallest node, or what its processes may use under a smaller limit."""
    node_bytes: int | None = None
    """Host memory of a node or its cgroup's limit, whatever ``--cpu-memory-limit`` is: a rank that exceeds the flag's
    limit ends only itself, but one that exceeds this takes memory from the whole machine."""

    @classmethod
    def from_environment(cls, environment: Environment, placement: Placement) -> MemoryCapacity:
        """Return the capacity of a placement on this machine, within the limits that its flags set.

        With several hosts, the smallest counts; host memory is unknown until the hosts' environments are known.
        """
        ranks = placement.ranks_per_node
        environments = environment.hosts_of_ranks
        used = [
            gpu
            for number, each in enumerate(environments)
            for slot, gpu in enumerate(each.gpus)
            if slot in placement.slots_of_node(number)
        ]
        gpu_sizes = [*(gpu.memory_total_bytes for gpu in used), placement.gpu_memory_limit_bytes]
        limit = placement.cpu_memory_limit_bytes
        node_bytes = None
        if environment.hosts or not placement.hosts:
            sizes = ((each.host_memory_bytes, each.cgroup_memory_limit_bytes) for each in environments)
            node_bytes = _smallest(*(size for both in sizes for size in both))
        return cls(
            gpu_bytes=_smallest(*gpu_sizes) if used else None,
            host_bytes=_smallest(node_bytes, None if limit is None else limit * ranks),
            node_bytes=node_bytes,
        )


def _smallest(*sizes: int | None) -> int | None:
    return min(filter(None, sizes), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpredicted:
    """Takes the place of a ModelProfile for a model whose memory cannot be predicted."""

    reason: str


def profile_model(
    model: ResolvedModel,
    seq_length: int,
    accelerator: Accelerator,
    *,
    dropout: float | None = None,
    variants: Sequence[Variant] = (),
    trust_remote_code: bool = False,
    environment: Mapping[str, str] | None = None,
    choice: TrainedParameters | None = None,
    image_tokens: int = 0,
    losses_by_formula: bool = False,
) -> ModelProfile | Unpredicted:
    """Find the sizes of a model's tensors and activations.

    They are computed by formula if there is a ``choice`` or the model is not built, read from the package for a
    preset, and otherwise measured in a child process.

    ``dropout``: None for the model's own. ``variants``: those needed in addition to the usual one. ``environment``:
    variables of the trials' processes, so that a model is built as they build it. ``choice``: which parameters are
    trained. ``image_tokens``: per sequence. ``losses_by_formula``: compute other losses by formula; a child process
    takes some seconds to measure each.

    A missing prediction must not fail a run, so this raises only NothingTrainedError, and UsageError for a ``choice``
    that names something the model does not have.
    """
    architecture = model.architecture
    if choice is not None:
        try:
            architecture = architecture_of(model)
        except UsageError as error:
            return Unpredicted(reason=error.problem)
    if architecture is not None:
        traced = model.facts if len(architecture.stacks) == 1 else None  # no image tower and no encoder
        by_formula = replace(formula_profile(architecture, choice, image_tokens=image_tokens), facts=traced)
        return _with_losses(by_formula, model.facts, variants)
    # A preset's profile has one kind of layer: if the model has several, measure it.
    kinds = None if model.facts is None else model.facts.config.get("layer_types")
    are_alike = not isinstance(kinds, list) or len(set(map(str, kinds))) < 2

    def profile(variant: Variant) -> ModelProfile | Unpredicted:
        try:
            if model.facts is not None and are_alike:
                with contextlib.suppress(UsageError):  # Transformers may still build the whole model
                    return find_profile(
                        model.facts, seq_length, accelerator=accelerator, dropout=dropout, variant=variant
                    )
            return measure_profile(
                str(model.config.get("path", model.name)),
                "factory" if model.source == "factory" else "path",
                seq_length,
                accelerator=accelerator,
                dropout=dropout,
                variant=variant,
                trust_remote_code=trust_remote_code,
                environment=environment,
            )
        except NothingTrainedError:
            raise
        except UsageError as error:
            return Unpredicted(reason=error.problem)
        # Formulas and the child process may fail in any of these ways on an unusual model; the run then has no
        # prediction.
        except (DsBenchError, OSError, ValueError, KeyError, TypeError) as error:
            return Unpredicted(reason=f"{type(error).__name__}: {error}")

    usual = profile(USUAL)
    if isinstance(usual, Unpredicted):
        return usual
    profiles = {}
    # By formula: Liger's kernels need a GPU, and ``losses_by_formula`` saves time.
    losses = [
        each
        for each in variants
        if each.loss == "liger" or (losses_by_formula and each._replace(loss="model") == USUAL)
    ]
    for variant in {each for each in variants if each != USUAL and each not in losses}:
        other = profile(variant)
        profiles[variant] = (
            replace(usual, activations={}, stage_3_activations={}, unknown=other.reason)
            if isinstance(other, Unpredicted)
            else other
        )
    return _with_losses(replace(usual, variants=profiles), model.facts, losses)


def architecture_of(model: ResolvedModel) -> Architecture:
    """Return the architecture of a model, from which its tensors are computed.

    Raises UsageError for an unknown family and for a factory's model.
    """
    if model.architecture is not None:
        return model.architecture
    if model.facts is None:
        raise UsageError(
            f"ds_bench has no formulas for the tensors of {model.name}", remedy="use a model of a known family"
        )
    return read_architecture(model.name, {**model.facts.config, "model_type": model.facts.model_type})


def _with_losses(profile: ModelProfile, facts: ModelFacts | None, variants: Iterable[Variant]) -> ModelProfile:
    """Return the profile plus, by formula, the variants that differ from the usual one only in the loss."""
    known = {each: each.loss for each in variants if each != USUAL and each._replace(loss="model") == USUAL}
    if facts is None or facts.config.get("final_logit_softcapping"):  # other losses do not compute it
        return profile
    losses = {each: with_loss(profile, facts, name) for each, name in known.items()}
    return replace(profile, variants={**profile.variants, **losses})


def attach_predictions(
    trials: Sequence[Trial],
    profile: ModelProfile | Unpredicted,
    capacity: MemoryCapacity,
    *,
    skip: bool,
    force: bool = False,
) -> list[Trial]:
    """Return the trials with their predictions, or with a caveat that says why they have none.

    ``skip`` marks trials that cannot fit as skipped, but not those that fit tightly. Trials that need far more host
    memory than the node has are always marked, unless ``force``.
    """

    def with_prediction(trial: Trial) -> Trial:
        if trial.unsupported:
            return trial
        if isinstance(profile, Unpredicted):
            return _with_caveat(trial, f"memory is not predicted: {profile.reason}")
        if tensor_parallel_size(trial.ds_config) > 1:
            return _with_caveat(trial, "memory is not predicted: AutoTP splits layers, which the formulas do not cover")
        try:
            prediction = predict_trial(profile, trial, capacity.gpu_bytes)
        except UNPREDICTABLE as error:
            why = f"predicting this configuration raises {type(error).__name__} ({error})"
            return _with_caveat(trial, f"memory is not predicted: {why}")
        if prediction.unknown is not None:
            trial = _with_caveat(trial, f"only activations are not predicted: {prediction.unknown}")
        if left_out := unpredicted_settings(trial.ds_config):
            trial = _with_caveat(trial, f"memory is predicted without {' and '.join(left_out)}")
        skipped = _reason_to_skip(prediction, capacity, skip=skip, force=force)
        return replace(trial, prediction=prediction.to_dict(), skipped=skipped)

    return [with_prediction(trial) for trial in trials]


def _with_caveat(trial: Trial, why: str) -> Trial:
    return replace(trial, caveats=(*trial.caveats, why))


def _reason_to_skip(prediction: Prediction, capacity: MemoryCapacity, *, skip: bool, force: bool) -> str | None:
    need, host_need = prediction.least_gpu_bytes, _resident_host_bytes(prediction)
    available, remedy = None, "leave out --skip-predicted-oom to try it"
    unit = "of host memory"
    # The user asked for the first two; the last protects the machine, and only --force turns it off.
    if skip and capacity.gpu_bytes is not None and need > capacity.gpu_bytes:
        available, unit = capacity.gpu_bytes, "per GPU"
    elif skip and capacity.host_bytes is not None and host_need > capacity.host_bytes:
        need, available = host_need, capacity.host_bytes
    elif not force and _far_beyond(host_need, capacity.node_bytes):
        need, available, remedy = host_need, capacity.node_bytes, "use --force to try it"
    if available is None:
        return None
    return f"predicted to need {format_bytes(need)} {unit}, but only {format_bytes(available)} is available; {remedy}"


def with_savings(
    trial: Trial,
    profile: ModelProfile | Unpredicted | None,
    hidden_size: int | None = None,
    gpu_bytes: int | None = None,
    *,
    lacked_memory: bool,
    replays: ReplayMode = "near",
) -> Trial:
    """Return a predicted trial with the savings of possible changes, for its record; unchanged without a prediction.

    ``hidden_size``: the model's, which sizes small buffers; None if unknown. ``lacked_memory``: whether the trial
    failed, was skipped or nearly failed for lack of memory; if so, other configurations for its workload are predicted
    too, and judged as ``plan`` would for GPUs of ``gpu_bytes``. That takes seconds if many need about that much. No
    child process is started.
    """
    workload, config, num_gpus = trial.workload, trial.ds_config, trial.placement.num_gpus
    if trial.prediction is None or not isinstance(profile, ModelProfile) or workload.pass_type != "train":
        return trial
    batch_size = int(config.get("train_micro_batch_size_per_gpu", workload.batch_size))
    try:
        planned = what_if.PlannedTrial(
            profile=profile,
            workload=replace(workload, batch_size=batch_size),
            # Alternatives may offload to NVMe, whose configuration names a folder; no formula reads it.
            placement=replace(trial.placement, nvme_path=trial.placement.nvme_path or "/nvme"),
            configuration=trial.configuration,
            hidden_size=hidden_size,
            torch_adam=bool(config["optimizer"]["params"].get("torch_adam")),
            # GPUs per node: with several nodes, the ranks of the fullest; with one, assumed to be at least eight.
            ranks_per_node=trial.placement.ranks_per_node if trial.placement.num_nodes > 1 else max(8, num_gpus),
            replays=replays,
            child_traces="none",
        )
        found = {"savings": [asdict(each) for each in what_if.savings(planned)]}
        if lacked_memory:
            found["alternatives"] = [asdict(each) for each in what_if.alternatives(planned, gpu_bytes)]
    except (DsBenchError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return trial  # a configuration that the formulas cannot read
    return replace(trial, prediction={**trial.prediction, **found})


def require_host_memory(trials: Sequence[Trial], node_bytes: int | None) -> None:
    """Raise PreflightError if every trial is predicted to need far more host memory than the node has."""
    supported = [trial for trial in trials if trial.unsupported is None]
    needs = [peak_host_bytes([trial]) for trial in supported]
    if node_bytes is None or not needs or not all(_far_beyond(need, node_bytes) for need in needs):
        return
    least = min(need for need in needs if need is not None)
    fewer = "fewer ranks (--num-gpus) " if supported[0].placement.num_gpus > 1 else ""
    here = "the smallest host" if supported[0].placement.num_nodes > 1 else "this node"
    several_rows = len({trial.configuration.name for trial in supported}) > 1
    raise PreflightError(
        f"{supported[0].workload.model} is predicted to need {format_bytes(least)} of host memory"
        f"{' even in the row that needs the least' if several_rows else ''}, but {here} has {format_bytes(node_bytes)}",
        remedy=f"use a smaller --model, {fewer}or a different machine, or try it with --force",
    )


def _far_beyond(need: int | None, node_bytes: int | None) -> bool:
    return need is not None and node_bytes is not None and need > _FAR_BEYOND * node_bytes


def _resident_host_bytes(prediction: Prediction) -> int:
    """Return the predicted resident host memory of a node."""
    return sum(size for name, size in prediction.host.items() if prediction.gpu or name not in _NOT_RESIDENT)


def peak_host_bytes(trials: Sequence[Trial]) -> int | None:
    """Return the most host memory that any of the trials is predicted to need per node; None without predictions."""
    predictions = filter(None, map(stored_prediction, trials))
    return max(map(_resident_host_bytes, predictions), default=None)


def predicted_over_measured(record: TrialRecord) -> float | None:
    """Return the ratio of predicted GPU memory to the allocator's highest peak on any rank: that of the training
    steps or, if the prediction peaks before the first step, that of the time before.

    The overhead assumed outside the allocator is left out. None without a readable prediction, its activations or a
    measured GPU peak. On the CPU accelerator there is no ratio, because resident memory is not comparable with
    predicted tensor bytes (untouched buffers are not resident, forked ranks share libraries); see
    ``predicted_over_ledger``.
    """
    prediction = stored_prediction(record.trial)
    if prediction is None or prediction.unknown is not None:
        return None
    # A prediction that peaks before the first step is compared with the measured peak of that time.
    name = "gpu_init_peak_bytes" if prediction.phase in ("build", "initialize") else "gpu_peak_bytes"
    peak = max(measured_values(record.ranks, name), default=0)
    return (prediction.gpu_bytes - prediction.gpu.get("overhead", 0)) / peak if peak else None


def predicted_over_ledger(record: TrialRecord) -> float | None:
    """Return the ratio of the predicted ledger to the largest measured one: bytes of tensors on all tiers.

    The category ``other`` is left out, and so are activations that are not predicted. None without a readable
    prediction or a measured ledger.
    """
    prediction = stored_prediction(record.trial)
    if prediction is None:
        return None
    left_out = ("other",) if prediction.unknown is None else ("other", "activations")
    predicted, *of_ranks = (
        sum(size for row in ledger.values() for name, size in row.items() if name not in left_out)
        for ledger in (prediction.ledger, *(rank.ledger for rank in record.ranks))
    )
    measured = max(of_ranks, default=0)
    return predicted / measured if measured else None


def stored_prediction(trial: Trial) -> Prediction | None:
    """Return the prediction that a trial was planned with; None without one, or if its format is unknown."""
    try:
        return None if trial.prediction is None else json_files.build(Prediction, trial.prediction, "ignore")
    except InvalidValueError:
        return None


def is_miss(ratio: float) -> bool:
    """Return whether a ratio of predicted to measured memory is more than 10 % off."""
    return abs(ratio - 1) > _MISS_FRACTION


def is_gpu_miss(ratio: float, record: TrialRecord) -> bool:
    """Like :func:`is_miss`, for a GPU's peak, but tolerate the allocator's rounding and small buffers of libraries."""
    peak = max(measured_values(record.ranks, "gpu_peak_bytes"), default=0)
    return is_miss(ratio) and abs(ratio - 1) * peak >= _MIN_MISS_BYTES


def outside_allocator_bytes(ranks: Sequence[RankMeasurement]) -> int | None:
    """Return the GPU memory in use beyond what torch's allocator had reserved after the last measured step.

    This is CUDA's context, NCCL, and any other process on the GPU; without other processes, it is what a prediction
    assumes as ``overhead``. The result is for the rank with the most; None without a GPU.
    """
    sizes = [
        max(0, rank.gpu_device_used_bytes - rank.gpu_reserved_bytes)
        for rank in ranks
        if rank.gpu_device_used_bytes is not None and rank.gpu_reserved_bytes is not None
    ]
    return max(sizes, default=None)
