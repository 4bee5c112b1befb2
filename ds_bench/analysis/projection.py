"""Projects the rows of a measured comparison to other numbers of GPUs (docs/projection.md).

The mathematics are in ``prediction.scaling``, memory is predicted as ``plan`` predicts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..config.deepspeed_config import is_full_config, tensor_parallel_size
from ..config.spec import Placement, Trial
from ..errors import DsBenchError, UsageError
from ..models import lookup
from ..models.presets import find_preset
from ..prediction import scaling, trial_predictions
from ..prediction.communication import Traffic
from ..prediction.links import Links
from ..prediction.memory import Prediction
from ..prediction.model_profile import ModelProfile, variant_of
from ..prediction.scaling import MeasuredStep, Projection, Scaling
from ..prediction.trial_predictions import Unpredicted
from ..prediction.what_if import PlannedTrial
from .comparison import ComparisonRow
from .step_costs import step_parts

FROM_CPU = (
    "measured on CPU ranks: what computing takes is the time of these processors, which says nothing about GPUs; "
    "only communication is of the links given"
)
"""Note of every projection of a row that was measured on the CPU accelerator."""
COMMUNICATION_NOT_MEASURED = (
    "what its own communication took is not known and counts as computing; --profile comms times it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedRow:
    """One measured row at one other size, or why it cannot be projected there."""

    row: ComparisonRow
    num_gpus: int
    measured: MeasuredStep | None = None
    """None for a row that was not measured so that it could be projected."""
    links: Links | None = None
    projection: Projection | None = None
    prediction: Prediction | None = None
    """Its memory; None where it cannot be predicted."""
    notes: tuple[str, ...] = ()
    """What must be known about it; where ``projection`` is None, why."""


def project_rows(
    rows: Sequence[ComparisonRow],
    sizes: Sequence[int],
    links_of: Callable[[MeasuredStep, Sequence[MeasuredStep]], Links],
    how: Scaling,
) -> list[ProjectedRow]:
    """Projects every row of one comparison to every size. ``links_of``: gives the links of a row, knowing all of them.

    Raises UsageError if nothing can be projected.
    """
    reasons = {row.key: reason for row in rows if (reason := _not_measured(row)) is not None}
    able = [row for row in rows if row.key not in reasons]
    if not able:
        labels = "; ".join(f"{row.label}: {reasons[row.key]}" for row in rows)
        raise UsageError(f"there is nothing to project: {labels}", remedy="give a result with a row that trained")
    profile = _profile([row.trial for row in able])
    layers = profile.layers if isinstance(profile, ModelProfile) else None
    measured = {row.key: _measured_step(row, layers) for row in able}
    links = {key: links_of(each, list(measured.values())) for key, each in measured.items()}
    found = []
    for row in rows:
        for num_gpus in sizes:
            if row.key in reasons:
                found.append(ProjectedRow(row=row, num_gpus=num_gpus, notes=(reasons[row.key],)))
            else:
                found.append(_project(row, measured[row.key], num_gpus, links[row.key], how, profile))
    if not any(each.projection for each in found):
        first = next(each for each in found if each.measured is not None)
        # The refusal of the first row is the error of the whole.
        scaling.project(measured[first.row.key], first.num_gpus, links[first.row.key], how)  # raises
    return found


def _project(
    row: ComparisonRow,
    measured: MeasuredStep,
    num_gpus: int,
    links: Links,
    how: Scaling,
    profile: ModelProfile | Unpredicted,
) -> ProjectedRow:
    unable = ProjectedRow(row=row, num_gpus=num_gpus, measured=measured, links=links)
    try:
        projection = scaling.project(measured, num_gpus, links, how)
    except UsageError as error:
        return replace(unable, notes=(f"{error.problem} ({error.remedy})",))
    notes = list(projection.notes)
    if row.invalid_reason is not None:
        notes.append(f"the measured row is disqualified: {row.invalid_reason}")
    if row.trial.placement.accelerator == "cpu":
        notes.append(FROM_CPU)
        if measured.communication_seconds is None and measured.num_gpus > 1:
            notes.append(COMMUNICATION_NOT_MEASURED)
    prediction = _predict(row.trial, projection, links.gpus_per_node, profile)
    if isinstance(prediction, str):
        notes.append(f"memory is not predicted: {prediction}")
        return replace(unable, projection=projection, notes=tuple(notes))
    if prediction.unknown is not None:
        notes.append(f"memory is predicted without activations: {prediction.unknown}")
    return replace(unable, projection=projection, prediction=prediction, notes=tuple(notes))


def _not_measured(row: ComparisonRow) -> str | None:
    """Why a row cannot be projected; None if it can."""
    if not row.succeeded:
        return f"{row.summaries[-1].record.outcome.status}, not measured"
    run = row.representative
    if run.record.trial.workload.pass_type != "train":
        return "no training steps were measured"
    if not run.record.trial.workload.synchronized:
        return "its times are those of launching the work (--no-sync)"
    if len(set(Counter(rank.hostname for rank in run.record.ranks).values())) > 1:
        return "its hosts have unequal numbers of ranks, which the formulas do not know"
    if not run.record.ranks[0].parameter_count:
        return "the file does not hold the number of parameters: give the run folder"
    return None


def _measured_step(row: ComparisonRow, layers: int | None) -> MeasuredStep:
    runs = row.nearest_to_mean
    # One run for all parts of a step, so that they belong together.
    run = next((run for run in runs if run.costs.communication_seconds is not None), runs[0])
    trial, rank, costs = run.record.trial, run.record.ranks[0], run.costs
    assert row.mean_step_seconds is not None
    assert row.tokens_per_second is not None
    communication = None
    if costs.communication_seconds is not None and costs.communication_bytes and rank.world_size > 1:
        most = max((each.communication or () for each in run.record.ranks), key=lambda all_: sum(c.bytes for c in all_))
        # An all-reduce counts as a reduce-scatter and an all-gather, as it does in the bytes.
        calls = sum(each.count * (2 if "all_reduce" in each.name else 1) for each in most)
        communication = Traffic(name="all", bytes=costs.communication_bytes, calls=calls)
    parts = step_parts(run.record)
    return MeasuredStep(
        configuration=trial.configuration,
        parameters=rank.parameter_count,
        trained=rank.trainable_parameter_count or rank.parameter_count,
        layers=layers,
        precision=trial.workload.precision,
        num_gpus=rank.world_size,
        gpus_per_node=rank.world_size // (run.num_nodes or 1),
        micro_batch_size=run.micro_batch_size or trial.workload.batch_size,
        grad_accum=run.grad_accum or trial.workload.grad_accum,
        step_seconds=row.mean_step_seconds,
        tokens_per_second=row.tokens_per_second,
        update_seconds=parts.get("step"),
        communication_seconds=None
        if communication is None or costs.communication_seconds is None
        # Waiting is for slower ranks and says nothing about the links.
        else costs.communication_seconds - (costs.communication_wait_seconds or 0.0),
        communication=communication,
        computing_seconds=None
        if communication is None
        else sum(seconds for name, seconds in parts.items() if name != "communication") or None,
    )


def _profile(trials: Sequence[Trial]) -> ModelProfile | Unpredicted:
    """What predictions need of the model; nothing is downloaded and no code of the user's runs."""
    workload = trials[0].workload
    if workload.model_source == "factory":
        return Unpredicted(reason="its factory would have to run")
    try:
        known = find_preset(workload.model) is not None
        name = workload.model if known else str(workload.model_config.get("path", workload.model))
        offline = {"HF_HUB_OFFLINE": "1"}
        model = lookup.resolve_model(name, factory=False, trust_remote_code=False, environment=offline)
        return trial_predictions.profile_model(
            model,
            workload.seq_length,
            trials[0].placement.accelerator,
            dropout=workload.dropout,
            variants={variant_of(each.workload, each.ds_config, each.configuration.engine) for each in trials},
        )
    except UsageError as error:
        return Unpredicted(reason=error.problem)


def _predict(
    trial: Trial, projection: Projection, gpus_per_node: int, profile: ModelProfile | Unpredicted
) -> Prediction | str:
    """The memory at another size; why it cannot be predicted, where it cannot."""
    if isinstance(profile, Unpredicted):
        return profile.reason
    if not is_full_config(trial):
        return "a flat JSON does not hold the configuration; give the run folder"
    if tensor_parallel_size(trial.ds_config) > 1:
        return "AutoTP splits layers, which the formulas do not know"
    try:
        return PlannedTrial(
            profile=profile,
            workload=replace(trial.workload, batch_size=projection.micro_batch_size, grad_accum=projection.grad_accum),
            placement=Placement(
                accelerator=trial.placement.accelerator,
                num_gpus=projection.num_gpus,
                nvme_path=trial.placement.nvme_path or "/nvme",
            ),
            configuration=trial.configuration,
            ranks_per_node=gpus_per_node,
            torch_adam=bool(trial.ds_config["optimizer"]["params"].get("torch_adam")),
        ).predict()
    except (DsBenchError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        # A stored configuration may lack what the formulas read: the row is then projected without its memory.
        return f"{type(error).__name__}: {error}"
