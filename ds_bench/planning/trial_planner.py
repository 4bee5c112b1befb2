"""Makes the plan of a run: turns Options into a model, a placement, configurations, and trials in running order."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any

from ..config import deepspeed_config, strategies, trained_parameters, validation
from ..config.caveat_texts import Caveat, CaveatKind
from ..config.configuration_file_rows import has_different_batch
from ..config.configuration_files import ConfigurationFile, check_remedy
from ..config.deepspeed_config import MakeConfig
from ..config.options import Options
from ..config.placement import choose_precision, resolve_placement
from ..config.shard import Shard
from ..config.spec import Configuration, Placement, Trial, Workload
from ..config.token_file import read_token_file
from ..config.training_script import placeholder_values
from ..errors import DsBenchError, UsageError
from ..launch import ops, rank_environment, scratch
from ..models.lookup import ResolvedModel, resolve_model
from ..prediction import trial_predictions
from ..prediction.model_profile import ModelProfile
from ..prediction.trial_predictions import MemoryCapacity, Unpredicted
from ..records.schema import TrialRecord
from ..system.environment import Machine
from ..units import format_items, format_names
from .requested_rows import (
    ConfigurationBuilder,
    RequestedRow,
    axis_notes,
    equal_rows,
    requested_rows,
    with_files,
    with_row_names,
    with_script,
)

DEFAULT_SEQ_LENGTH = 512
SHORTEST_SEQ_LENGTH = 16
"""In tokens; ``--seq-length auto`` tries nothing shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about the model and the machine that complete trials, and how predictions are used."""

    largest_parameter: int | None = None
    skip_predicted_oom: bool = False
    force: bool = False
    nvme_caveat: str | Caveat | None = None
    """Why the folder for NVMe offload is not a local NVMe disk."""
    lack_of_space: str | None = None
    """Why rows that swap to the folder for NVMe offload cannot run."""
    profile: ModelProfile | Unpredicted | None = None
    """Sizes of the model's tensors and activations; None before predictions."""
    memory: MemoryCapacity = field(default_factory=lambda: MemoryCapacity(gpu_bytes=None, host_bytes=None))
    """The memory that predictions are compared with."""
    op_states: Mapping[str, ops.OpState] = field(default_factory=dict)
    """States of the DeepSpeed ops that the configurations need; empty before they are built."""


def complete(trials: Sequence[Trial], facts: RunFacts) -> list[Trial]:
    """Return the trials completed by the facts; a trial that is already complete stays as it is."""
    fused, completed = facts.op_states.get(ops.FUSED_ADAM), []
    for trial in trials:
        config, caveats, unsupported = trial.ds_config, trial.caveats, trial.unsupported
        if trial.configuration.uses_nvme:
            caveats = caveats if facts.nvme_caveat is None else (facts.nvme_caveat, *caveats)
            unsupported = unsupported or facts.lack_of_space
        is_ours = trial.workload.script is None and not trial.configuration.is_reference
        if fused is not None and not fused.ready and is_ours:
            config = deepspeed_config.complete_config(
                config, trial.workload, trial.placement, torch_adam=True, largest_parameter=facts.largest_parameter
            )
            # Unchanged with offload (DeepSpeedCPUAdam), for optimizers other than Adam, and for torch's Adam.
            if config["optimizer"] != trial.ds_config["optimizer"]:
                caveats = (*caveats, Caveat(CaveatKind.TORCH_ADAM, {"reason": str(fused.reason)}))
        for op in ops.needed_ops(trial.placement.accelerator, [trial.configuration]):
            state = facts.op_states.get(op)
            if state is not None and not state.ready:
                name, remedy = op.removesuffix("Builder"), ops.remedy_of(state.reason)
                unsupported = unsupported or f"DeepSpeed's {name} op is not available here: {state.reason}; {remedy}"
        done = replace(trial, ds_config=config, caveats=tuple(dict.fromkeys(caveats)), unsupported=unsupported)
        if unsupported:
            done = replace(done, prediction=None, skipped=None)
        # Last, because predictions read the completed configuration: once, and again if the optimizer changed.
        elif facts.profile is not None and (trial.prediction is None or config != trial.ds_config):
            (done,) = trial_predictions.attach_predictions(
                [done], facts.profile, facts.memory, skip=facts.skip_predicted_oom, force=facts.force
            )
            done = replace(done, caveats=tuple(dict.fromkeys(done.caveats)))
        completed.append(done)
    return completed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One point of a run: model, placement, configurations, and their trials in order.

    :func:`make_run_plan` makes it once; later facts complete its trials.
    """

    options: Options
    model: ResolvedModel
    placement: Placement
    rows: Sequence[RequestedRow]
    configurations: Sequence[Configuration]
    """The rows at their micro-batches, in order."""
    builder: ConfigurationBuilder
    """Builds rows at other micro-batches."""
    trials: Sequence[Trial]
    lines: Sequence[str] = ()
    """Notes on the rows for the user, one line each."""
    facts: RunFacts

    def with_facts(self, **found: Any) -> Plan:
        """Return the plan with further facts, which complete its trials."""
        facts = replace(self.facts, **found)
        return replace(self, facts=facts, trials=complete(self.trials, facts))

    def trials_of(self, configurations: Sequence[Configuration], *, predicted: bool = True) -> list[Trial]:
        """Make the trials of other configurations, completed like the plan's own."""
        facts = self.facts if predicted else replace(self.facts, profile=None)
        return complete(make_trials(self.options, self.model, self.placement, configurations), facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan of each point of a run's sweep, all on one kind of accelerator; without a sweep, one plan.

    :meth:`of` makes it. The trials of all points are numbered in one sequence.
    """

    plans: Sequence[Plan]
    variables: Mapping[str, str]
    """Environment variables of all processes of all trials; launchers set the number of threads for each trial."""
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, plans: Sequence[Plan], variables: Mapping[str, str]) -> RunPlan:
        """Join plans, and number their trials in running order."""
        if len(plans) == 1:
            return cls(plans=plans, variables=variables)
        digits = len(str(sum(len(plan.trials) for plan in plans)))
        # A trial's own number is unique only within its plan.
        numbers = {(index, trial.trial_id): number for number, (index, trial) in enumerate(_in_rounds(plans))}

        def numbered(index: int, trial: Trial) -> Trial:
            name = trial.trial_id.partition("_")[2]
            return replace(trial, trial_id=f"{numbers[index, trial.trial_id]:0{digits}d}_{name}")

        plans = [
            replace(plan, trials=[numbered(index, trial) for trial in plan.trials]) for index, plan in enumerate(plans)
        ]
        return cls(plans=plans, variables=variables)

    def part(self, shard: Shard) -> RunPlan:
        """Return the points or rows of one shard (``Shard.rows_of``); trials keep their numbers.

        Raises UsageError if there are fewer rows than shards, or if the shard would split a point whose rows must share
        their largest micro-batch.
        """
        plans, notes = [], []
        for plan, own in zip(self.plans, shard.rows_of([len(plan.rows) for plan in self.plans]), strict=True):
            if not own:
                continue
            if len(own) < len(plan.rows):
                if plan.options.common_batch:
                    name = plan.options.spelling_of("common_batch")
                    remedy = f"give {len(self.plans)} shards or fewer" if len(self.plans) > 1 else "leave --shard out"
                    raise UsageError(
                        f"{name} with more shards ({shard.count}) than points ({len(self.plans)})",
                        remedy=f"{remedy}: rows of one point must be probed together",
                    )
                where = f" of {plan.options.point_text}" if plan.options.point_text else ""
                notes.append(
                    f"shard {shard} has {len(own)} of the {len(plan.rows)} rows{where}: it recommends only among "
                    "these, and report reads all shards together"
                )
            configurations = plan.configurations[own.start : own.stop]
            names = {each.name for each in configurations}
            trials = [trial for trial in plan.trials if trial.configuration.name in names]
            rows = plan.rows[own.start : own.stop]
            plans.append(replace(plan, rows=rows, configurations=configurations, trials=trials))
        return replace(self, plans=plans, notes=notes)

    def map(self, change: Callable[[Plan], Plan]) -> RunPlan:
        """Return the run with every plan changed."""
        return replace(self, plans=[change(plan) for plan in self.plans])

    @property
    def options(self) -> Options:
        """Options of the first point; all points have the same rows and output."""
        return self.plans[0].options

    @property
    def placement(self) -> Placement:
        """The placement with the most ranks; points differ only in ranks and memory limits."""
        return max((plan.placement for plan in self.plans), key=lambda placement: placement.num_gpus)

    @property
    def configurations(self) -> list[Configuration]:
        """The rows of all points."""
        return [row for plan in self.plans for row in plan.configurations]

    @property
    def trials(self) -> list[Trial]:
        """The trials of all points in running order: round by round, the points in reverse in every other round."""
        return [trial for _, trial in _in_rounds(self.plans)]

    @property
    def trials_by_row(self) -> list[Trial]:
        """The same trials point by point, with the rows in the requested order: the order of the results."""
        return [trial for plan in self.plans for trial in plan.trials]


def _in_rounds(plans: Sequence[Plan]) -> Iterator[tuple[int, Trial]]:
    """Yield plan index and trial for all plans. In a round, the rows of a point stay together."""
    # make_trials orders a plan's trials by repeat, as groupby needs.
    rounds = [[list(trials) for _, trials in groupby(plan.trials, lambda trial: trial.repeat)] for plan in plans]
    for number in range(max(map(len, rounds))):
        # Points run backward in every other round, so that drift favors none.
        indices = range(len(plans))
        for index in reversed(indices) if number % 2 else indices:
            trials = rounds[index][number] if number < len(rounds[index]) else []
            for trial in sorted(trials, key=lambda trial: trial.round_position or 0):
                yield index, trial


def make_run_plan(points: Sequence[Options], make_config: MakeConfig, machine: Machine) -> RunPlan:
    """Make the plan of each point of a run on this machine, without running anything.

    ``points`` may differ in model, workload, number of ranks, memory limits, and values set in all DeepSpeed
    configurations. Raises UsageError for anything wrong with the request.
    """
    first = points[0]
    if first.output_dir.exists() and not first.output_dir.is_dir():
        problem = f"{first.spelling_of('output_dir')} {first.output_dir} is not a folder"
        raise UsageError(problem, remedy="give a folder")
    first = with_script(with_files(first))
    read = {name: getattr(first, name) for name in ("files", "file_lines", "base_file", "own_script")}
    points = [with_row_names(replace(each, **read)) for each in points]
    first = points[0]
    # Before anything is looked up, since this may refuse the request. A point's values may decide which axes act in
    # a row.
    rows = [requested_rows(each) for each in points]
    lines = [*first.file_lines, *axis_notes(first)]
    for options in points[1:] if first.axes else ():
        axis_notes(options)  # which may refuse the request; the notes would only repeat the first point's

    @cache
    def find_placement(num_gpus: int | None, cpu_limit: float | None, gpu_limit: float | None) -> Placement:
        options = replace(first, num_gpus=num_gpus, cpu_memory_limit=cpu_limit, gpu_memory_limit=gpu_limit)
        return resolve_placement(options, machine.variables, machine.gpus, machine.interpreter)

    placements = [find_placement(each.num_gpus, each.cpu_memory_limit, each.gpu_memory_limit) for each in points]
    placement = placements[0]
    if first.profiles:
        # The profiled ranks must exist at the point with the fewest ranks.
        ranks, greatest = min(each.num_gpus for each in placements), max(first.profile_ranks)
        if greatest >= ranks:
            problem = f"{first.spelling_of('profile_ranks')} {greatest}: the job has {format_items(ranks, 'rank')}"
            raise UsageError(problem, remedy=f"give ranks from 0 to {ranks - 1}" if ranks > 1 else "leave it out")
        if "nsys" in first.profiles and placement.accelerator == "cpu":
            name = first.spelling_of("profiles")
            lines.append(f"{name} nsys records GPUs: on the CPU accelerator its steps run without a window")
    variables = rank_environment.rank_environment(
        placement, machine.variables, inventory=machine.gpus, interpreter=machine.interpreter
    )
    # The user's variables override ours, such as NCCL's interface on one host.
    built = rank_environment.DERIVED_FROM_USER
    variables |= {name: value for name, value in first.variables.items() if name not in built}

    @cache
    def find_model(name: str, factory: bool, trust_remote_code: bool) -> ResolvedModel:
        if first.own_script is not None:
            return ResolvedModel(name=first.own_script.name, source="script", config={})
        return resolve_model(
            name,
            factory=factory,
            trust_remote_code=trust_remote_code,
            environment=variables,
            option=first.spelling_of("model"),
        )

    models = [find_model(each.model, each.model_factory is not None, each.trust_remote_code) for each in points]
    # Modeling code is imported once, before the ranks are forked.
    types = dict.fromkeys(model.model_type for model in models if model.model_type is not None)
    variables |= rank_environment.preload_variables(types)
    sources = {model.source for model in models}
    if "hub" in sources and "factory" not in sources:  # resolve_model has filled the cache, so ranks need no connection
        variables["HF_HUB_OFFLINE"] = "1"
    if placement.is_on_this_host:  # other nodes do not have the folder
        folders, notes = scratch.temporary_folder_variables(machine.variables, variables["TORCH_EXTENSIONS_DIR"])
        variables |= folders
        lines += notes
    # Cached, because points may share a file, and up to 1 GB of it is read.
    find_tokens = cache(read_token_file)
    plans = []
    for options, own_rows, model, on in zip(points, rows, models, placements, strict=True):
        if options.data is not None:
            options = replace(options, token_file=find_tokens(options.data, options.data_dtype))
        plans.append(_plan_of_point(options, own_rows, lines, model, on, make_config))
    # A shard is part of the whole plan, so that trials have the same numbers in all shards.
    whole = RunPlan.of(plans, variables)
    return whole if first.shard is None else whole.part(first.shard)


def _plan_of_point(
    options: Options,
    rows: Sequence[RequestedRow],
    lines: Sequence[str],
    model: ResolvedModel,
    placement: Placement,
    make_config: MakeConfig,
) -> Plan:
    if (total := options.global_batch_size) is not None:
        if "grad_accum" in options.axis_names:
            problem = "training.global_batch_size with the axis grad_accum: accumulation follows from the global batch"
            raise UsageError(problem, remedy="leave one of them out; the axis micro_batch changes accumulation too")
        # As if every rank had its own data; the builder computes each row's value, and refuses a fraction.
        options = replace(options, grad_accum=max(1, total // (options.batch_size * placement.num_gpus)))
    require_known_ids(options, model)
    builder = ConfigurationBuilder(options=options, make_config=make_config, model=model, placement=placement)
    try:
        configurations = [builder.build(row, options.batch_size) for row in rows]
        trials = make_trials(options, model, placement, configurations)
    except DsBenchError:
        raise
    except Exception as error:  # a user's file or function may give any values
        problem = f"the DeepSpeed configuration cannot be used: {type(error).__name__}: {error}"
        raise UsageError(problem, remedy="check --ds-config, --set and create_deepspeed_config") from None
    if equal := equal_rows(trials):
        rows = [row for row in rows if row.name not in equal]
        configurations = [each for each in configurations if each.name not in equal]
        texts = (f"{name} trains exactly as {earlier.label} does and is left out" for name, earlier in equal.items())
        lines = [*lines, *texts]
        standing: dict[str, Any] = {
            name: equal[row].name for name in ("relative_to", "export") if (row := getattr(options, name)) in equal
        }
        options = replace(options, **standing)
        # Made again, because the numbers and order of trials depend on the rows.
        trials = make_trials(options, model, placement, configurations)
    # A file that DeepSpeed refuses is a row like any other, and an error only if no row is left to run.
    flag = options.spelling_of("configs")
    refusals = [f"{flag} {each.name}: {each.refusal}" for each in configurations if each.refusal is not None]
    if refusals and len(refusals) == len(configurations):
        raise UsageError("; ".join(refusals[:3]), remedy=check_remedy(options.configs))
    size, accumulation = options.batch_size, options.grad_accum
    files = {row.origin.name: row.origin for row in rows if isinstance(row.origin, ConfigurationFile)}
    others = [name for name, file in files.items() if has_different_batch(file, placement.num_gpus, size, accumulation)]
    if others and not options.keep_batch and options.own_script is None:
        micro = f"{options.spelling_of('batch_size')} {'auto' if options.auto_batch else size}"
        lines = [
            *lines,
            f"{micro} and {options.spelling_of('grad_accum')} {accumulation} replace the batch keys of "
            f"{format_names(others, 3)}; {options.spelling_of('keep_batch')} keeps them",
        ]
    if options.token_file is not None and options.token_file.note:
        lines = [*lines, options.token_file.note]
    return Plan(
        options=options,
        model=model,
        placement=placement,
        rows=rows,
        configurations=configurations,
        builder=builder,
        trials=trials,
        lines=lines,
        facts=RunFacts(
            largest_parameter=model.largest_parameter,
            skip_predicted_oom=options.skip_predicted_oom,
            force=options.force,
        ),
    )


def require_known_ids(options: Options, model: ResolvedModel) -> None:
    """Raise UsageError for ids that the model does not know, or a file shorter than one sequence."""
    limit, own = options.vocab_size, model.vocabulary_size
    if limit is not None and own is not None and limit > own:
        problem = f"{options.spelling_of('vocab_size')} {limit} is beyond the {own} ids of {model.name}"
        raise UsageError(problem, remedy=f"give {own} or less")
    if options.token_file is not None:
        owner = f"the model {model.name}" if limit is None else options.spelling_of("vocab_size")
        requested = SHORTEST_SEQ_LENGTH if options.auto_seq else options.seq_length
        length = resolve_seq_length(requested, model, options.spelling_of("seq_length"))
        options.token_file.require_usable(limit or own, owner, length)


def resolve_seq_length(requested: int | None, model: ResolvedModel, name: str = "--seq-length") -> int:
    """Return the requested sequence length, or the default for the model. ``name``: the user's name for it.

    Raises UsageError if it is too long for the model.
    """
    positions = model.max_positions
    if requested is None:
        return min(DEFAULT_SEQ_LENGTH, positions or DEFAULT_SEQ_LENGTH)
    if positions is not None and requested > positions:
        problem = f"{name} {requested} is beyond the {positions} positions of {model.name}"
        raise UsageError(problem, remedy=f"give {positions} or less")
    return requested


_WORKLOAD_OPTIONS = (
    "batch_size", "grad_accum", "num_steps", "warmup_steps", "activation_checkpointing", "seed", "trust_remote_code",
    "dropout", "lora", "freeze", "vocab_size", "data_pin_memory", "data_prefetch", "pass_type", "synchronized",
)  # fmt: skip
"""Fields that Options and Workload share."""


def make_trials(
    options: Options, model: ResolvedModel, placement: Placement, configurations: Sequence[Configuration]
) -> list[Trial]:
    """Make the trials round by round, in the order of the rows. :func:`complete` adds ops, disks and predictions.

    Their numbers and ``round_position`` give the running order. A single round runs as written.
    """
    # Refused before anything starts.
    trained_parameters.read_choice(options.lora, options.freeze, options.spelling_of("lora"))
    file = options.token_file
    common = Workload(
        model=model.name,
        model_source=model.source,
        model_type=model.model_type,
        model_config=model.config,
        seq_length=resolve_seq_length(options.seq_length, model, options.spelling_of("seq_length")),
        precision=choose_precision(options.precision, placement),
        data_workers=0 if options.data is not None and options.data_workers is None else options.data_workers,
        data_path=None if file is None else str(file.path.absolute()),
        data_dtype=None if file is None else file.dtype,
        data_tokens=None if file is None else file.tokens,
        data_digest=None if file is None else file.digest,
        script=options.own_script,
        **{name: getattr(options, name) for name in _WORKLOAD_OPTIONS},
    )
    inspection = options.inspection
    # A resumed run writes its checkpoints to its old folder.
    if inspection.checkpoint and inspection.checkpoint_path is None:
        inspection = replace(inspection, checkpoint_path=str((options.resume or options.output_dir).absolute()))
    trials: list[Trial] = []
    for repeat in range(options.repeats):
        order = list(configurations)
        if options.repeats > 1:
            order = ordered_for_round(configurations, options.seed, repeat)
        positions = {id(each): position for position, each in enumerate(order)}
        for configuration in configurations:
            position = positions[id(configuration)]
            workload, config, unsupported, caveats = _completed_row(
                configuration, configuration.applied_to(common), placement, model
            )
            trials.append(
                Trial(
                    trial_id=f"{repeat * len(order) + position:02d}_{configuration.name}"
                    + (f"_r{repeat}" if options.repeats > 1 else ""),
                    repeat=repeat,
                    round_position=position,
                    configuration=configuration,
                    workload=workload,
                    placement=placement,
                    ds_config=config,
                    unsupported=unsupported,
                    caveats=(*configuration.caveats, *caveats),
                    inspection=inspection,
                    point=dict(options.point),
                )
            )
    return trials


def _completed_row(
    configuration: Configuration, workload: Workload, placement: Placement, model: ResolvedModel
) -> tuple[Workload, dict[str, Any], str | None, list[str | Caveat]]:
    """Return the workload with the precision it trains in, the completed configuration, why it cannot run, and caveats.

    Raises UsageError.
    """
    if workload.script is not None:  # the script and its libraries complete the configuration
        config = dict(configuration.deepspeed_config)
        placeholder_values(workload.script, configuration.name, config, placement.num_gpus)
        trained = replace(workload, precision=deepspeed_config.trained_precision(config, workload.precision))
        return trained, config, validation.missing_requirement(configuration, placement), []
    config = deepspeed_config.complete_config(
        configuration.deepspeed_config,
        workload,
        placement,
        torch_adam=placement.accelerator == "cpu",  # there is no FusedAdam
        largest_parameter=model.largest_parameter,
    )
    # The checks need what will run; the row keeps what the user wrote (Configuration.deepspeed_config).
    completed = replace(configuration, deepspeed_config=config)
    trained = replace(workload, precision=deepspeed_config.trained_precision(config, workload.precision))
    unsupported = validation.unsupported_reason(completed, placement)
    unsupported = unsupported or validation.unsupported_workload_reason(completed, trained, placement)
    # The user's changes may contradict the row's name or the flags.
    caveats: list[str | Caveat] = []
    strategy = strategies.find_strategy(configuration.name, configuration.stage)
    if strategy is not None and configuration.source == "catalogue":
        for part, used, named in (
            ("optimizer", configuration.offload_optimizer, strategy.offload_optimizer),
            ("parameter", configuration.offload_param, strategy.offload_param),
        ):
            if used != named:
                caveats.append(Caveat(CaveatKind.OTHER_OFFLOAD, {"part": part, "used": used, "named": named}))
    if trained.precision != workload.precision:
        asked = f"as the DeepSpeed config says, not in this row's {workload.precision}"
        caveats.append(f"ran in {trained.precision}, {asked}")
    return trained, config, unsupported, [*caveats, *validation.ineffective_settings(completed, workload, placement)]


def refuse_unresolved(record: TrialRecord, waiting: Sequence[Trial]) -> list[Trial]:
    """Return the waiting trials; once DeepSpeed has refused a script's "auto", those that have it are Unsupported."""
    if record.outcome.kind != "auto_refused":
        return list(waiting)
    label = record.trial.configuration.label
    reason = f'its file says "auto", which the script hands to DeepSpeed, as in {label}; give numbers'
    return [
        replace(each, unsupported=reason) if any(deepspeed_config.paths_of_auto(each.ds_config)) else each
        for each in waiting
    ]


def ordered_for_round(configurations: Sequence[Configuration], seed: int, number: int) -> list[Configuration]:
    """Return the configurations in the order of a round (``number``, from 0).

    Each round uses the one of six seeded shuffles that puts the fewest rows where an earlier round had them, so that
    neither the cold machine at the start nor noise that outlasts a run, such as heat, favors a row
    (``bench/false_differences.py``). The order does not depend on the number of rounds, so a resumed run keeps it.
    Among equally good shuffles, later rounds use the one least like the written order, since a run of one round, which
    --resume may continue, has used that order.
    """
    # With --common-batch a row may appear at two micro-batches.
    names = [f"{row.name} {row.deepspeed_config.get('train_micro_batch_size_per_gpu')}" for row in configurations]

    def shuffled(text: str) -> list[int]:
        return sorted(range(len(names)), key=lambda row: hashlib.sha256(f"{text} {names[row]}".encode()).digest())

    written, rounds = range(len(names)), list[list[int]]()

    def in_places_of(order: Sequence[int], earlier: Sequence[int]) -> int:
        return sum(map(operator.eq, order, earlier))

    for each in range(number + 1):
        shuffles = [shuffled(f"{seed} round {each} {attempt}") for attempt in range(6)]
        costs = [
            (sum(in_places_of(order, earlier) for earlier in rounds), in_places_of(order, written) if each else 0)
            for order in shuffles
        ]
        rounds.append(shuffles[costs.index(min(costs))])
    return [configurations[index] for index in rounds[number]]
