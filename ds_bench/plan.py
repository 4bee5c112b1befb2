"""From Options to the ordered list of trials: model, placement and strategies found, configurations completed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from .config import deepspeed_config, overrides, strategies, validation
from .config.options import Options
from .config.placement import choose_precision
from .config.placement import decide as decide_placement
from .config.spec import BatchPolicy, Placement, Precision, Strategy, Trial, Workload
from .errors import DsBenchError, UsageError
from .launch import ops, rank_environment, scratch
from .models.lookup import ResolvedModel, resolve_model
from .prediction import trial_predictions
from .prediction.model_profile import ModelProfile
from .prediction.trial_predictions import MemoryCapacity, Unpredicted
from .system import files
from .system.machine import Machine

MakeConfig = Callable[[Strategy, int, int], dict[str, Any]]
"""(strategy, micro-batch, accumulation) → what the user's ``create_deepspeed_config`` returns."""

DEFAULT_SEQ_LENGTH = 512
_MOST_CONFIG_BYTES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A strategy with the configuration the user wants for it, not yet completed for this machine."""

    strategy: Strategy
    config: Mapping[str, Any]
    batch_size: int
    """Micro-batch that the configuration was made for."""
    batch_policy: BatchPolicy = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run compares: model, placement and DeepSpeed configurations, and the trials made of them, in order.

    Made once by :func:`make_plan`. What is learned later of the machine completes its trials: the NVMe folder, the
    memory predicted, the state of DeepSpeed's ops.
    """

    options: Options
    choice: ResolvedModel
    placement: Placement
    drafts: Sequence[Draft]
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

    @property
    def configs(self) -> list[Mapping[str, Any]]:
        """The DeepSpeed configuration of each row, as the user wants it, not yet completed."""
        return [draft.config for draft in self.drafts]

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

    def trials_of(self, drafts: Sequence[Draft], *, predicted: bool = True) -> list[Trial]:
        """The trials of other drafts than the plan's own, completed by all that the plan knows."""
        trials = make_trials(self.options, self.choice, self.placement, drafts)
        trials = [self._with_op_states(self._on_nvme(trial)) for trial in trials]
        return self._predicted(trials) if predicted else trials

    def with_drafts(self, drafts: Sequence[Draft]) -> Plan:
        """The plan with these drafts, and their trials, in place of its own."""
        return replace(self, drafts=drafts, trials=self.trials_of(drafts))

    def _on_nvme(self, trial: Trial) -> Trial:
        if not deepspeed_config.uses_nvme(trial.ds_config):
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
    wanted = _usable(lambda: drafts(options, make_config))
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
        drafts=wanted,
        make_config=make_config,
        variables=variables,
        trials=_usable(lambda: make_trials(options, choice, placement, wanted)),
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


def asked_strategies(options: Options) -> list[Strategy]:
    """The strategies to compare, in order. Raises UsageError for nvme without a path."""
    if options.family == "zero":
        return [strategies.ZERO_STAGES[stage] for stage in options.stages]
    names = list(options.strategies)
    if "nvme" in names and options.nvme_path is None:
        raise UsageError("--strategies nvme needs a disk", remedy="add --nvme-path DIR, or leave nvme out")
    if options.nvme_path is not None and "nvme" not in names:
        names.append("nvme")
    return [strategies.offload_strategy(name, options.stage) for name in names]


def drafts(options: Options, make_config: MakeConfig) -> list[Draft]:
    """Every strategy with its configuration: made by the user's function, then overlaid by flags."""
    return [draft_of(strategy, options.batch_size, options, make_config) for strategy in asked_strategies(options)]


def draft_of(
    strategy: Strategy, batch_size: int, options: Options, make_config: MakeConfig, policy: BatchPolicy = "given"
) -> Draft:
    """One strategy's, at this micro-batch."""
    layers = [_overlay_file(options.ds_config), *map(overrides.parse_set, options.set)]
    config = make_config(strategy, batch_size, options.grad_accum)
    if not isinstance(config, dict):
        raise UsageError(f"create_deepspeed_config returned {type(config).__name__}", remedy="return a dict")
    if options.optimizer is not None:
        config = deepspeed_config.with_optimizer(config, options.optimizer)
    config = _filled_in(_plain(_overlaid(config, layers)), strategy, batch_size, options.grad_accum)
    validation.check_keys(config)
    _check_stage(strategy, config)
    return Draft(strategy=strategy, config=config, batch_size=batch_size, batch_policy=policy)


def _filled_in(config: dict[str, Any], strategy: Strategy, batch_size: int, grad_accum: int) -> dict[str, Any]:
    """The same with the batch keys and the stage that it leaves out, as the flags and the row have them."""
    if "train_micro_batch_size_per_gpu" not in config:
        config = {"gradient_accumulation_steps": grad_accum, **config, "train_micro_batch_size_per_gpu": batch_size}
    zero = config.get("zero_optimization", {})
    return {**config, "zero_optimization": {"stage": strategy.stage, **zero}} if isinstance(zero, dict) else config


def _check_stage(strategy: Strategy, config: Mapping[str, Any]) -> None:
    """The stage is what a row is named by: a configuration that changes it would mislabel the row."""
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage != strategy.stage:
        raise UsageError(
            f"the DeepSpeed config of {strategy.label} sets zero_optimization.stage to {stage!r}",
            remedy="choose stages with --stages or --stage",
        )


def _overlaid(config: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``config`` with each layer over it; a change of the batch drops the generated total, which is then made anew."""
    result = dict(config)
    changed = {key for layer in layers for key in layer}
    if changed & {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} and (
        "train_batch_size" not in changed
    ):
        result.pop("train_batch_size", None)
    for layer in layers:
        result = overrides.overlay(result, layer)
    return result


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same in JSON's own types. Raises UsageError where it holds anything else (NaN, a torch.dtype)."""
    try:
        return dict(json.loads(json.dumps(config, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the DeepSpeed config cannot be written as JSON: {error}",
            remedy="keep to text, finite numbers, true, false, lists and objects",
        ) from None


def _overlay_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        data = json.loads(files.read_text(path, _MOST_CONFIG_BYTES))
    except OSError as error:
        raise UsageError(f"--ds-config {path}: {error.strerror}", remedy="give a readable JSON file") from None
    except ValueError as error:
        raise UsageError(
            f"--ds-config {path} is not JSON: {error}", remedy="remove comments and trailing commas"
        ) from None
    except RecursionError:
        raise UsageError(f"--ds-config {path} is nested too deeply", remedy="give a DeepSpeed configuration") from None
    if not isinstance(data, dict):
        raise UsageError(f"--ds-config {path} is not a JSON object", remedy="write {…}")
    found = next(_autos(data), None)
    if found is not None:
        raise UsageError(
            f'--ds-config {path}: {found} is "auto"', remedy="only the Trainer fills that in; give a value"
        )
    return data


def _autos(data: Mapping[str, Any], prefix: str = "") -> Any:
    for key, value in data.items():
        if value == "auto":
            yield prefix + key
        elif isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")


def make_trials(options: Options, choice: ResolvedModel, placement: Placement, wanted: Sequence[Draft]) -> list[Trial]:
    """The trials in the order in which they run, before anything is known of ops, disks and predictions."""
    asked = workload(options, choice, placement)
    trials: list[Trial] = []
    for repeat in range(options.repeats):
        for position, draft in enumerate(ordered_for_round(wanted, options.seed, repeat)):
            work = replace(asked, batch_size=draft.batch_size, batch_policy=draft.batch_policy)
            config = deepspeed_config.complete_config(
                draft.config,
                work,
                placement,
                torch_adam=placement.accelerator == "cpu",
                largest_parameter=choice.largest_parameter,
            )
            name = f"{len(trials):02d}_{draft.strategy.name}" + (f"_r{repeat}" if options.repeats > 1 else "")
            trials.append(
                Trial(
                    trial_id=name,
                    repeat=repeat,
                    round_position=position,
                    strategy=draft.strategy,
                    workload=replace(work, precision=_precision(config, work)),
                    placement=placement,
                    ds_config=config,
                    unsupported=validation.unsupported_reason(config, placement),
                    caveats=(
                        *_departures(draft.strategy, work, config),
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
        if not deepspeed_config.offload_device(config, "offload_optimizer"):
            text = (
                "torch's AdamW instead of DeepSpeed's FusedAdam, which does not build here (stage 0 in 16 bit then "
                f"also has another wrapper): {fused.reason}"
            )
            caveats = (*caveats, text)
    unsupported = trial.unsupported or _missing_op(config, trial.placement, states)
    return replace(trial, ds_config=config, caveats=caveats, unsupported=unsupported)


def ordered_for_round(wanted: Sequence[Draft], seed: int, number: int) -> list[Draft]:
    """The drafts in the order of round ``number``, from 0 on: rotated and reversed, so that drift favours none.

    Rounds go in pairs, the second of which is the first reversed: no row is early or late on the whole. The first pair
    begins as written, each further one at another row; the seed and the rows' names say at which. The order of a round
    does not depend on how many there are, so that a resumed run goes on with the plan that it began with.
    """
    names = [f"{draft.strategy.name} {draft.batch_size}" for draft in wanted]
    shuffled = sorted(
        range(1, len(names)), key=lambda place: hashlib.sha256(f"{seed} {names[place]}".encode()).digest()
    )
    start = [0, *shuffled][number // 2 % max(len(names), 1)]
    order = [*wanted[start:], *wanted[:start]]
    return order[::-1] if number % 2 else order


def _missing_op(config: Mapping[str, Any], placement: Placement, states: Mapping[str, ops.OpState]) -> str | None:
    for op in ops.needed_ops(placement.accelerator, [config]):
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


def _departures(strategy: Strategy, asked: Workload, config: Mapping[str, Any]) -> list[str]:
    """Where an edit of the configuration made something else of the row than its columns say."""
    device = deepspeed_config.offload_device
    pairs = [
        ("optimizer offload", device(config, "offload_optimizer") or "none", strategy.offload_optimizer),
        ("parameter offload", device(config, "offload_param") or "none", strategy.offload_param),
        ("precision", _precision(config, asked), asked.precision),
    ]
    return [
        f"ran {what} {used}, as the DeepSpeed config says, not this row's {named}"
        for what, used, named in pairs
        if used != named
    ]
