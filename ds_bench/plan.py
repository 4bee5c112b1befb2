"""From Options to the ordered list of trials: model, placement and strategies found, configurations completed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from .config import deepspeed_config, overrides, strategies, validation
from .config.options import Options
from .config.placement import choose_precision
from .config.placement import decide as decide_placement
from .config.spec import (
    BatchPolicy,
    Configuration,
    Placement,
    Precision,
    Strategy,
    Trial,
    Workload,
    offload_device,
)
from .errors import DsBenchError, UsageError
from .launch import ops, rank_environment, scratch
from .models.lookup import ResolvedModel, resolve_model
from .prediction import trial_predictions
from .prediction.model_profile import ModelProfile
from .prediction.trial_predictions import MemoryCapacity, Unpredicted
from .system.machine import Machine

MakeConfig = Callable[[Strategy, int, int], dict[str, Any]]
"""(strategy, micro-batch, accumulation) → what the user's ``create_deepspeed_config`` returns."""

DEFAULT_SEQ_LENGTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run compares: model, placement and configurations, and the trials made of them, in order.

    Made once by :func:`make_plan`. What is learned later of the machine completes its trials: the NVMe folder, the
    memory predicted, the state of DeepSpeed's ops.
    """

    options: Options
    choice: ResolvedModel
    placement: Placement
    configurations: Sequence[Configuration]
    """The rows, in order."""
    make_config: MakeConfig
    """The script's own ``create_deepspeed_config``."""
    variables: Mapping[str, str]
    """Environment variables of every process of every trial."""
    trials: Sequence[Trial]
    nvme_caveat: str | None = None
    """Why the folder for NVMe offload is not a local NVMe disk."""
    lack_of_space: str | None = None
    """Why rows that swap to the folder for NVMe offload cannot run."""
    profile: ModelProfile | Unpredicted | None = None
    """What predictions need of the model; None before :meth:`with_predictions`."""
    memory: MemoryCapacity = field(default_factory=lambda: MemoryCapacity(gpu_bytes=None, host_bytes=None))
    """The memory that predictions are compared with."""
    op_states: Mapping[str, ops.OpState] = field(default_factory=dict)
    """State of DeepSpeed's ops that the configurations need; empty before :meth:`with_ops`."""

    def with_nvme_folder(self, caveat: str | None, lack_of_space: str | None) -> Plan:
        """The plan with what the folder for NVMe offload shows: a caveat of the rows that use it, or why they cannot.

        ``caveat``: why it is not a local NVMe disk. ``lack_of_space``: why it is too full.
        """
        plan = replace(self, nvme_caveat=caveat, lack_of_space=lack_of_space)
        return replace(plan, trials=[plan._on_nvme(trial) for trial in self.trials])

    def with_predictions(self, profile: ModelProfile | Unpredicted, memory: MemoryCapacity) -> Plan:
        """The plan with each trial's predicted memory; trials that cannot fit are marked as the options say."""
        plan = replace(self, profile=profile, memory=memory)
        return replace(plan, trials=plan._predicted(self.trials))

    def with_ops(self, states: Mapping[str, ops.OpState]) -> Plan:
        """The plan completed by the builds of DeepSpeed's ops: rows that cannot run, and rows with torch's AdamW.

        Only the trials that this changes are predicted anew.
        """
        ready = ",".join(op for op, state in states.items() if state.ready)
        plan = replace(self, op_states=states, variables={**self.variables, "DS_BENCH_PRELOAD_OPS": ready})
        trials = []
        for trial in self.trials:
            completed = plan._with_op_states(trial)
            if completed.unsupported:
                completed = replace(completed, prediction=None, skipped=None)
            elif completed.ds_config != trial.ds_config:
                (completed,) = plan._predicted([completed])
                completed = replace(completed, caveats=tuple(dict.fromkeys(completed.caveats)))  # none written twice
            trials.append(completed)
        return replace(plan, trials=trials)

    def trials_of(self, configurations: Sequence[Configuration], *, predicted: bool = True) -> list[Trial]:
        """The trials of other configurations than the plan's own, completed by all that the plan knows."""
        trials = make_trials(self.options, self.choice, self.placement, configurations)
        trials = [self._with_op_states(self._on_nvme(trial)) for trial in trials]
        return self._predicted(trials) if predicted else trials

    def with_configurations(self, configurations: Sequence[Configuration]) -> Plan:
        """The plan with these configurations, and their trials, in place of its own."""
        return replace(self, configurations=configurations, trials=self.trials_of(configurations))

    def _on_nvme(self, trial: Trial) -> Trial:
        if not trial.configuration.uses_nvme:
            return trial
        caveats = trial.caveats if self.nvme_caveat is None else (self.nvme_caveat, *trial.caveats)
        return replace(trial, caveats=caveats, unsupported=trial.unsupported or self.lack_of_space)

    def _with_op_states(self, trial: Trial) -> Trial:
        return with_op_states(trial, self.op_states, self.choice.largest_parameter)

    def _predicted(self, trials: Sequence[Trial]) -> list[Trial]:
        if self.profile is None:
            return list(trials)
        options = self.options
        return trial_predictions.attach_predictions(
            trials, self.profile, self.memory, skip=options.skip_predicted_oom, force=options.force
        )


def make_plan(options: Options, make_config: MakeConfig, machine: Machine) -> Plan:
    """The plan for these options on this machine.

    Raises UsageError for everything that can be wrong with the request, before any work.
    """
    if options.output_dir.exists() and not options.output_dir.is_dir():
        raise UsageError(f"--output-dir {options.output_dir} is not a folder", remedy="give a folder")
    configurations = _usable(lambda: make_configurations(options, make_config))
    placement = decide_placement(options, machine.variables, machine.gpus)
    variables = rank_environment.rank_environment(placement, machine.variables, None, query=machine.gpus)
    choice = resolve_model(
        options.model,
        factory=options.model_factory is not None,
        trust_remote_code=options.trust_remote_code,
        environment=variables,
    )
    variables = rank_environment.rank_environment(placement, machine.variables, choice.model_type, query=machine.gpus)
    if choice.source == "hub":  # looked up and cached just now: ranks need not ask again
        variables["HF_HUB_OFFLINE"] = "1"
    if placement.hostfile is None:  # other nodes do not have the folder
        variables |= scratch.temporary_folder_variables(machine.variables)
    return Plan(
        options=options,
        choice=choice,
        placement=placement,
        configurations=configurations,
        make_config=make_config,
        variables=variables,
        trials=_usable(lambda: make_trials(options, choice, placement, configurations)),
    )


Made = TypeVar("Made")


def _usable(make: Callable[[], Made]) -> Made:
    """Whatever a configuration of an odd shape, or the user's own function, raises becomes one line."""
    try:
        return make()
    except DsBenchError:
        raise
    except Exception as error:
        problem = f"the DeepSpeed configuration cannot be used: {type(error).__name__}: {error}"
        raise UsageError(problem, remedy="check --ds-config, --set and create_deepspeed_config") from None


def seq_length(asked: int | None, choice: ResolvedModel) -> int:
    """The sequence length to train at; ``asked``: by the flag. Raises UsageError beyond the model's positions."""
    positions = choice.max_positions
    if asked is None:
        return min(DEFAULT_SEQ_LENGTH, positions or DEFAULT_SEQ_LENGTH)
    if positions is not None and asked > positions:
        raise UsageError(
            f"--seq-length {asked} is beyond the {positions} positions of {choice.name}",
            remedy=f"give {positions} or less",
        )
    return asked


def workload(options: Options, choice: ResolvedModel, placement: Placement) -> Workload:
    """What every trial trains."""
    return Workload(
        model=choice.name,
        model_source=choice.source,
        model_type=choice.model_type,
        model_config=choice.config,
        batch_size=options.batch_size,
        seq_length=seq_length(options.seq_length, choice),
        grad_accum=options.grad_accum,
        num_steps=options.num_steps,
        warmup_steps=options.warmup_steps,
        precision=choose_precision(options.precision, placement),
        activation_checkpointing=options.activation_checkpointing,
        seed=options.seed,
        trust_remote_code=options.trust_remote_code,
        dropout=options.dropout,
    )


def requested_strategies(options: Options) -> list[Strategy]:
    """The strategies to compare, in order. Raises UsageError for nvme without a path."""
    if options.family == "zero":
        return [strategies.ZERO_STAGES[stage] for stage in options.stages]
    names = list(options.strategies)
    if "nvme" in names and options.nvme_path is None:
        raise UsageError("--strategies nvme needs a disk", remedy="add --nvme-path DIR, or leave nvme out")
    if options.nvme_path is not None and "nvme" not in names:
        names.append("nvme")
    return [strategies.offload_strategy(name, options.stage) for name in names]


def make_configurations(options: Options, make_config: MakeConfig) -> list[Configuration]:
    """The rows to compare, in order: every strategy with what the user's function and the flags make of it."""
    asked = requested_strategies(options)
    return [make_configuration(strategy, options.batch_size, options, make_config) for strategy in asked]


def make_configuration(
    strategy: Strategy, batch_size: int, options: Options, make_config: MakeConfig, policy: BatchPolicy = "given"
) -> Configuration:
    """One strategy's row at this micro-batch: its configuration as the user's function and the flags make it."""
    config = make_config(strategy, batch_size, options.grad_accum)
    if not isinstance(config, dict):
        raise UsageError(f"create_deepspeed_config returned {type(config).__name__}", remedy="return a dict")
    if options.optimizer is not None:
        config = deepspeed_config.with_optimizer(config, options.optimizer)
    config = overrides.json_values(overrides.apply(config, overrides.read_file(options.ds_config), options.set))
    if "train_micro_batch_size_per_gpu" not in config:
        flags = {"gradient_accumulation_steps": options.grad_accum}
        config = {**flags, **config, "train_micro_batch_size_per_gpu": batch_size}
    zero = config.get("zero_optimization", {})
    if isinstance(zero, dict):
        config["zero_optimization"] = zero = {"stage": strategy.stage, **zero}
    validation.check_keys(config)
    if zero["stage"] != strategy.stage:  # the row is named by its stage
        raise UsageError(
            f"the DeepSpeed config of {strategy.label} sets zero_optimization.stage to {zero['stage']!r}",
            remedy="choose stages with --stages or --stage",
        )
    changes: dict[str, Any] = {} if batch_size == options.batch_size else {"batch_size": batch_size}
    if policy != "given":
        changes["batch_policy"] = policy
    return strategies.make_configuration(strategy, config, changes)


def make_trials(
    options: Options, choice: ResolvedModel, placement: Placement, configurations: Sequence[Configuration]
) -> list[Trial]:
    """The trials in the order in which they run, before anything is known of ops, disks and predictions."""
    common = workload(options, choice, placement)
    trials: list[Trial] = []
    for repeat in range(options.repeats):
        for position, configuration in enumerate(ordered_for_round(configurations, options.seed, repeat)):
            work = configuration.applied_to(common)
            config = deepspeed_config.complete_config(
                configuration.deepspeed_config,
                work,
                placement,
                torch_adam=placement.accelerator == "cpu",
                largest_parameter=choice.largest_parameter,
            )
            name = f"{len(trials):02d}_{configuration.name}" + (f"_r{repeat}" if options.repeats > 1 else "")
            trials.append(
                Trial(
                    trial_id=name,
                    repeat=repeat,
                    round_position=position,
                    configuration=configuration,
                    workload=replace(work, precision=_precision(config, work)),
                    placement=placement,
                    ds_config=config,
                    unsupported=validation.unsupported_reason(
                        replace(configuration, deepspeed_config=config), placement
                    ),
                    caveats=(
                        *_differences_from_name(configuration, work, config),
                        *validation.ineffective_settings(config, work, placement),
                    ),
                )
            )
    return trials


def with_op_states(trial: Trial, states: Mapping[str, ops.OpState], largest_parameter: int | None) -> Trial:
    """The trial, unsupported where an op that it needs is missing, with torch's AdamW where FusedAdam is."""
    config, caveats = trial.ds_config, trial.caveats
    fused = states.get(ops.FUSED_ADAM)
    if fused is not None and not fused.ready:
        config = deepspeed_config.complete_config(
            config, trial.workload, trial.placement, torch_adam=True, largest_parameter=largest_parameter
        )
        if not offload_device(config, "offload_optimizer"):
            text = (
                "torch's AdamW instead of DeepSpeed's FusedAdam, which does not build here (stage 0 in 16 bit then "
                f"also has another wrapper): {fused.reason}"
            )
            caveats = (*caveats, text)
    unsupported = trial.unsupported or _missing_op(trial, states)
    return replace(trial, ds_config=config, caveats=caveats, unsupported=unsupported)


def ordered_for_round(configurations: Sequence[Configuration], seed: int, number: int) -> list[Configuration]:
    """The configurations in the order of round ``number``, from 0 on: rotated and reversed, so that drift favours none.

    Rounds go in pairs, the second of which is the first reversed: no row is early or late on the whole. The first pair
    begins as written, each further one at another row; the seed and the rows' names say at which. The order of a round
    does not depend on how many there are, so that a resumed run goes on with the plan that it began with.
    """
    names = [f"{row.name} {row.deepspeed_config['train_micro_batch_size_per_gpu']}" for row in configurations]
    shuffled = sorted(
        range(1, len(names)), key=lambda place: hashlib.sha256(f"{seed} {names[place]}".encode()).digest()
    )
    start = [0, *shuffled][number // 2 % max(len(names), 1)]
    order = [*configurations[start:], *configurations[:start]]
    return order[::-1] if number % 2 else order


def _missing_op(trial: Trial, states: Mapping[str, ops.OpState]) -> str | None:
    for op in ops.needed_ops(trial.placement.accelerator, [trial.configuration]):
        state = states.get(op)
        if state is not None and not state.ready:
            name = op.removesuffix("Builder")
            return f"DeepSpeed's {name} op is not to be had here: {state.reason}; {ops.remedy_of(state.reason)}"
    return None


def _precision(config: Mapping[str, Any], asked: Workload) -> Precision:
    """The number format that the configuration gives the row."""
    if "torch_autocast" in config:
        return asked.precision
    return "bf16" if _enabled(config, "bf16") else "fp16" if _enabled(config, "fp16") else "fp32"


def _enabled(config: Mapping[str, Any], name: str) -> bool:
    return bool(config.get(name, {}).get("enabled"))


def _differences_from_name(configuration: Configuration, asked: Workload, config: Mapping[str, Any]) -> list[str]:
    """Where an edit of the DeepSpeed configuration made something else of a strategy's row than its name says."""
    strategy = strategies.find_strategy(configuration.name, configuration.stage)
    pairs: list[tuple[str, str, str]] = [("precision", _precision(config, asked), asked.precision)]
    if strategy is not None and configuration.source == "catalogue":
        pairs = [
            ("optimizer offload", configuration.offload_optimizer, strategy.offload_optimizer),
            ("parameter offload", configuration.offload_param, strategy.offload_param),
            *pairs,
        ]
    return [
        f"ran {what} {used}, as the DeepSpeed config says, not this row's {named}"
        for what, used, named in pairs
        if used != named
    ]
