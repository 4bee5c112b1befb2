"""The rows that the user asked for, by stage, strategy, file and axis, their configurations, and which are equal.

The rows of a user's script have the user's own DeepSpeed configuration with only the requested changes. Nothing is
filled in, and ``"auto"`` stays: the script's libraries (Trainer, Accelerate, TRL) replace it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import axis_rows, deepspeed_config, lint, strategies, validation
from ..config.automatic_values import TrainingFacts
from ..config.axes import AXES, RowFacts, changed_arithmetic
from ..config.axis_rows import AxisValues
from ..config.configuration_file_rows import FileRowMaker, gives_accumulation
from ..config.configuration_files import (
    ConfigurationFile,
    ConfigurationFileError,
    read_configuration_file,
    read_configuration_files,
)
from ..config.deepspeed_config import MakeConfig, apply_changes, json_values
from ..config.options import DEFAULT_BATCH_SIZE, Options
from ..config.placement import choose_precision
from ..config.spec import (
    DEFAULT_PREFETCH,
    OFFLOAD_BLOCKS,
    BatchPolicy,
    Configuration,
    Engine,
    Placement,
    Strategy,
    Trial,
    offload_device,
)
from ..config.training_script import read_script
from ..errors import UsageError
from ..models.lookup import ResolvedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedRow:
    """A row that the user asked for, by strategy or file, before its micro-batch is known."""

    origin: Strategy | ConfigurationFile
    axis_values: AxisValues = ()
    """What this row adds to its strategy or file."""

    @property
    def name(self) -> str:
        return axis_rows.row_name(self.origin.name, self.axis_values)

    @property
    def label(self) -> str:
        own = self.origin.label if isinstance(self.origin, Strategy) else self.origin.name
        return axis_rows.row_label(own, self.axis_values)

    @property
    def engine(self) -> Engine:
        return self.origin.engine if isinstance(self.origin, Strategy) else "deepspeed"

    def matches(self, text: str) -> bool:
        """Return whether ``text`` means this row: its name or label or, without axes, another name of its strategy."""
        if text in (self.name, self.label):
            return True
        return isinstance(self.origin, Strategy) and not self.axis_values and strategies.matches(self.origin, text)


def with_files(options: Options) -> Options:
    """Return the options with the configurations of ``--configs`` and of the recipe, read once. Raises UsageError."""
    if options.files is not None:
        return options
    files, lines = read_configuration_files(options.configs)
    if options.base_config is not None:
        try:
            options = replace(options, base_file=read_configuration_file(options.base_config))
        except ConfigurationFileError as error:
            problem = f"{options.spelling_of('base_config')} {error.path}: {error.reason}"
            raise UsageError(problem, remedy=error.remedy) from None
        if not options.stages and not options.strategies and options.base_file is not None:
            files = [options.base_file]
    for file in options.inline:
        if any(other.name == file.name for other in files):
            problem = f"configurations.inline and a file of configs are both called {file.name}"
            raise UsageError(problem, remedy="rename one of them")
    return replace(options, files=(*files, *options.inline), file_lines=tuple(lines))


_FIELDS_IN_FILE = {"batch_size", "grad_accum", "precision"}
"""Workload fields that a DeepSpeed configuration also sets."""


def with_script(options: Options) -> Options:
    """Return the options with the user's script, if any.

    Raises UsageError for one that cannot be started, and for an axis that changes the built-in training loop, which a
    script does not use.
    """
    if not options.script:
        return options
    for name in options.axis_names:
        if not set(AXES[name].fields) <= _FIELDS_IN_FILE:
            problem = f"--axis {name} changes the built-in training, not a DeepSpeed configuration"
            raise UsageError(problem, remedy="leave it out, or compare the script's own arguments in two runs")
    script = read_script(
        options.script,
        python=options.python,
        override=options.override_config,
        accelerate_env=options.accelerate_env,
        engine=options.engine,
    )
    return replace(options, own_script=script)


def requested_rows(options: Options) -> list[RequestedRow]:
    """Return the rows to compare, in order: stages, strategies, then files (:func:`with_files`).

    Each comes with every combination of axis values. Raises UsageError for ``nvme`` without a path, for two names of
    one configuration, and for axes that make too many rows.
    """
    rows = [
        replace(row, axis_values=values)
        for row in _rows_without_axes(options)
        for values in axis_rows.combinations(options.axes, _layout(row, options))
    ]
    # For a recipe, the trials of all points are limited instead (sweep.MAX_TRIALS).
    if options.axes and options.family != "recipe":
        axis_rows.require_few(len(rows))
    return rows


def _rows_without_axes(options: Options) -> list[RequestedRow]:
    names = list(options.strategies)
    if "nvme" in names and options.nvme_path is None:
        problem = f"{options.spelling_of('strategies')} nvme needs a disk"
        raise UsageError(problem, remedy=f"add {options.spelling_of('nvme_path')} DIR, or leave nvme out")
    # In the offload script, --nvme-path is enough to request the row nvme.
    if options.family == "offload" and names and options.nvme_path is not None and "nvme" not in names:
        names.append("nvme")
    found = [strategies.ZERO_STAGES[stage] for stage in options.stages]
    found += [strategies.named_strategy(name, options.stage) for name in names]
    found = list(dict.fromkeys(found))  # --stages 2 --strategies zero2
    by_label: dict[str, Strategy] = {}
    for strategy in found:
        other = by_label.setdefault(strategy.label, strategy)
        if other is not strategy:
            problem = f"{other.name} and {strategy.name} are the same configuration, {strategy.label}"
            raise UsageError(problem, remedy="leave one of them out")
    origins: list[Strategy | ConfigurationFile] = [*found, *(options.files or ())]
    return [RequestedRow(origin=each) for each in origins]


def _layout(row: RequestedRow, options: Options) -> RowFacts:
    """Return the facts that decide which axes act in a row: its stage and offload devices after the flags' changes."""
    own = deepspeed_config.minimal_config(row.origin) if isinstance(row.origin, Strategy) else row.origin.config
    config = deepspeed_config.apply_changes(own, *options.config_changes)
    zero = config.get("zero_optimization")
    # true is the old form of stage 1, which DeepSpeed still reads (runtime/zero/config.py).
    stage = zero.get("stage", 0) if isinstance(zero, dict) else int(zero is True)
    return RowFacts(
        stage=stage if isinstance(stage, int) else 0,
        offload_optimizer=offload_device(config, "offload_optimizer"),
        offload_param=offload_device(config, "offload_param"),
        engine=row.engine,
    )


def with_row_names(options: Options) -> Options:
    """Return the options with the names of rows in place of the user's words for them, such as a stage's number.

    Raises UsageError for words that mean no row.
    """
    names: dict[str, Any] = {}
    rows = requested_rows(options)
    for name in ("relative_to", "export"):
        text = getattr(options, name)
        if text is None:
            continue
        said = f"{options.spelling_of(name)} {text}"
        if (row := next((row for row in rows if row.matches(text)), None)) is None:
            raise UsageError(f"{said}: no such row", remedy=f"choose from {', '.join(row.name for row in rows)}")
        if name == "export" and row.engine != "deepspeed":
            problem = f"{said}: {row.label} is torch's own engine, which has no DeepSpeed configuration"
            raise UsageError(problem, remedy="export a row that DeepSpeed trains")
        names[name] = row.name
    return replace(options, **names)


_FLAG_OF_AXIS = {"micro_batch": "batch_size", "torch_autocast": "precision", "bf16_states": "precision"}
"""Axis → the option that sets the same thing, if their names differ."""


def axis_notes(options: Options) -> list[str]:
    """Return a note for each axis that is not varied in some rows.

    Raises UsageError for an axis that acts in no row, or that sets what a flag sets.
    """
    axis_rows.require_no_override(options.axes, options.spelling_of("ds_config"), options.ds_config)
    for changes in options.set:
        axis_rows.require_no_override(options.axes, options.spelling_of("set"), changes)
    # A flag given with its default value looks like one that was not given.
    given = {
        "batch_size": options.auto_batch or options.batch_size != DEFAULT_BATCH_SIZE,
        "grad_accum": options.grad_accum != 1,
        "precision": options.precision != "auto",
        "activation_checkpointing": options.activation_checkpointing,
        "optimizer": options.optimizer is not None,
        "data_workers": options.data_workers is not None,
        "data_pin_memory": options.data_pin_memory,
        "data_prefetch": options.data_prefetch != DEFAULT_PREFETCH,
    }
    for axis in options.axis_names:
        name = _FLAG_OF_AXIS.get(axis, axis)
        if given.get(name) and not (axis == "bf16_states" and options.precision == "bf16"):
            problem = f"axis {axis} and {options.spelling_of(name)} set the same thing"
            raise UsageError(problem, remedy="leave one of them out")
    rows = _rows_without_axes(options)
    return axis_rows.idle_axis_notes(options.axes, {row.label: _layout(row, options) for row in rows})


def row_facts(configuration: Configuration, model: ResolvedModel, placement: Placement, grad_accum: int) -> RowFacts:
    """Return the facts that decide which axes act in a configuration and what their values set there."""
    return RowFacts(
        stage=configuration.stage,
        offload_optimizer=offload_device(configuration.deepspeed_config, "offload_optimizer"),
        offload_param=offload_device(configuration.deepspeed_config, "offload_param"),
        engine=configuration.engine,
        grad_accum=configuration.workload_changes.get("grad_accum", grad_accum),
        ranks=placement.num_gpus,
        hidden_size=model.hidden_size,
        parameters=None if model.facts is None else model.facts.parameters,
    )


def with_axes(configuration: Configuration, values: AxisValues, facts: RowFacts) -> Configuration:
    """Return a configuration with axis values set. Raises UsageError for a value that cannot be set in it."""
    setting = axis_rows.setting_of(values, facts)
    axis_values = {value.axis_name: value.text for value in values}
    caveats = list(configuration.caveats)
    if other := ", ".join(f"{name}={value}" for name, value in changed_arithmetic(axis_values).items()):
        caveats.append(f"{other} changes the arithmetic: losses are compared only among rows with this value")
    return replace(
        configuration,
        deepspeed_config=deepspeed_config.apply_changes(configuration.deepspeed_config, setting.config),
        workload_changes={**configuration.workload_changes, **setting.workload},
        variables=setting.variables,
        requires=setting.requires,
        source="axis" if configuration.source == "catalogue" else configuration.source,
        axis_values=axis_values,
        caveats=tuple(caveats),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationBuilder:
    """Builds the configuration of a requested row: the user's function or file first, then the flags."""

    options: Options
    make_config: MakeConfig
    model: ResolvedModel
    placement: Placement

    def build(self, row: RequestedRow, batch_size: int, policy: BatchPolicy = "given") -> Configuration:
        """Build the configuration of a row at a micro-batch. Raises UsageError."""
        configuration = self._build_without_axes(row, batch_size, policy)
        if row.axis_values:
            configuration = replace(configuration, name=row.name, label=row.label)
            # A refused row has a stand-in configuration, where axes mean nothing.
            if configuration.refusal is not None:
                return configuration
            facts = row_facts(configuration, self.model, self.placement, self.options.grad_accum)
            configuration = with_axes(configuration, row.axis_values, facts)  # no flag sets the same (axis_notes)
            if self.options.own_script is not None:
                # A script reads batch and precision only from its configuration.
                refusal = validation.unread_key(axis_rows.setting_of(row.axis_values, facts).config)
                configuration = replace(configuration, workload_changes={}, refusal=refusal)
            return self._with_global_batch(configuration)
        file = row.origin if isinstance(row.origin, ConfigurationFile) and configuration.refusal is None else None
        if self.options.keep_batch and file is not None and gives_accumulation(file, self.placement.num_gpus):
            return configuration
        return self._with_global_batch(configuration)

    def build_at_length(self, row: RequestedRow, seq_length: int) -> Configuration:
        """Build the configuration of a row at its longest sequence. Raises UsageError."""
        configuration = self.build(row, self.options.batch_size)
        changes = {"seq_length": seq_length, "seq_policy": "longest"}
        return replace(configuration, workload_changes={**configuration.workload_changes, **changes})

    def _with_global_batch(self, configuration: Configuration) -> Configuration:
        """Return the configuration with the accumulation that the global batch implies.

        Raises UsageError if it is not a whole number, or contradicts a given one.
        """
        total, config = self.options.global_batch_size, configuration.deepspeed_config
        if total is None or configuration.refusal is not None:
            return configuration
        sharing = deepspeed_config.tensor_parallel_size(config) * deepspeed_config.sequence_parallel_size(config)
        micro, given = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps", 1)
        # Such rows are refused later, for these reasons.
        if not isinstance(micro, int) or self.placement.num_gpus % sharing:
            return configuration
        ranks = self.placement.num_gpus // sharing
        per_pass, said = micro * ranks, f"training.global_batch_size {total}"
        if total % per_pass:
            below, above = total // per_pass * per_pass, (total // per_pass + 1) * per_pass
            raise UsageError(
                f"{said} is not a multiple of {micro} sequences × {ranks} data-parallel ranks in "
                f"{configuration.label}, so accumulation is not a whole number",
                remedy=f"give {f'{below} or {above}' if below else above}, or another local_batch_size",
            )
        accumulation = total // per_pass
        if accumulation == given:
            return configuration
        # Without a value of its own, a row has the accumulation of the options.
        if configuration.source == "catalogue" and given != self.options.grad_accum:
            raise UsageError(
                f"{said} with gradient_accumulation_steps {given} in {configuration.label}",
                remedy=f"leave one of them out; this global batch needs {accumulation}",
            )
        return replace(
            configuration,
            deepspeed_config=deepspeed_config.apply_changes(config, {"gradient_accumulation_steps": accumulation}),
            workload_changes={**configuration.workload_changes, "grad_accum": accumulation},
        )

    def _build_without_axes(self, row: RequestedRow, batch_size: int, policy: BatchPolicy) -> Configuration:
        options, strategy = self.options, row.origin
        if options.own_script is not None:
            return make_script_row(row.origin, options.base_file, options.config_changes)
        if isinstance(strategy, ConfigurationFile):
            facts = TrainingFacts(
                num_gpus=self.placement.num_gpus,
                batch_size=options.batch_size,
                grad_accum=options.grad_accum,
                precision=choose_precision(options.precision, self.placement),
                hidden_size=self.model.hidden_size,
                training_steps=options.warmup_steps + options.num_steps,
            )
            maker = FileRowMaker(facts=facts, keep_batch=options.keep_batch, change=self._with_flags)
            return maker.make(strategy, batch_size, policy)
        # The user's function configures DeepSpeed; its changes do not apply to torch's engines.
        make_config = self.make_config if strategy.engine == "deepspeed" else deepspeed_config.base_config
        config = make_config(strategy, batch_size, options.grad_accum)
        if not isinstance(config, dict):
            raise UsageError(f"create_deepspeed_config returned {type(config).__name__}", remedy="return a dict")
        config = self._with_flags(config)
        # The user's function may omit the micro-batch; its accumulation is kept.
        if "train_micro_batch_size_per_gpu" not in config:
            flags = {"gradient_accumulation_steps": options.grad_accum}
            config = {**flags, **config, "train_micro_batch_size_per_gpu": batch_size}
        zero = config.get("zero_optimization", {})
        if isinstance(zero, dict):
            # A stage set by the user stays, so that one that contradicts the row is refused below.
            config["zero_optimization"] = zero = {"stage": strategy.stage, **zero}
        validation.check_keys(config)
        if zero["stage"] != strategy.stage:  # which would make the row's name wrong
            raise UsageError(
                f"the DeepSpeed config of {strategy.label} sets zero_optimization.stage to {zero['stage']!r}",
                remedy=f"choose stages with {options.spelling_of('stages')} or {options.spelling_of('stage')}",
            )
        if options.set or options.ds_config:
            lint.refuse(config, lambda finding: finding.rule in ("type", "unknown-argument", "text-argument"))
        changes: dict[str, Any] = {} if batch_size == options.batch_size else {"batch_size": batch_size}
        if policy != "given":
            changes["batch_policy"] = policy
        return strategies.make_configuration(strategy, config, changes)

    def _with_flags(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration with the changes of ``--optimizer``, ``--ds-config`` and ``--set``."""
        options = self.options
        if options.optimizer is not None:
            config = deepspeed_config.with_optimizer(config, options.optimizer)
        return deepspeed_config.json_values(deepspeed_config.apply_changes(config, *options.config_changes))


def equal_rows(trials: Sequence[Trial]) -> dict[str, Configuration]:
    """Return the rows of files or axes that would train exactly like an earlier one: name → the earlier one."""
    equal: dict[str, Configuration] = {}
    different: list[tuple[Configuration, object]] = []
    """Configuration and work of each row that differs from all before it."""
    for trial in trials:
        row = trial.configuration
        # Refused rows share a stand-in configuration.
        if trial.repeat or row.refusal is not None:
            continue
        work = (trial.ds_config, trial.workload, row.engine, row.variables)
        same = next((earlier for earlier, other in different if other == work), None)
        if same is None:
            different.append((row, work))
        elif row.source == "file" or row.axis_values:
            equal[row.name] = same
    return equal


def make_script_row(
    origin: Strategy | ConfigurationFile, base: ConfigurationFile | None, changes: Sequence[Mapping[str, Any]]
) -> Configuration:
    """Make the configuration of a row. ``base``: the file that strategies edit. ``changes``: from ``--set``.

    Raises UsageError if the file's ``zero_optimization`` is not a block, or if ``--set`` contradicts the row's stage.
    """
    file = origin if isinstance(origin, ConfigurationFile) else base
    assert file is not None, "Options refuse strategies without a file"
    config = apply_changes(file.config, *changes)
    if not isinstance(zero := config.get("zero_optimization", {}), dict):
        problem = f"zero_optimization of {file.path} is {zero!r}, not a block"
        raise UsageError(problem, remedy='write {"stage": N}')
    if isinstance(origin, Strategy):
        # The stage and offload devices come from the strategy; anything else that the file sets in the block stays.
        zero = {**zero, "stage": origin.stage}
        for name, device in zip(OFFLOAD_BLOCKS, (origin.offload_optimizer, origin.offload_param), strict=True):
            own = zero.pop(name, None)
            if device != "none":
                zero[name] = {**(own if isinstance(own, dict) else {}), "device": device}
        config["zero_optimization"] = zero
        config = apply_changes(config, *changes)
        if (stage := config["zero_optimization"]["stage"]) != origin.stage:
            problem = f"--set gives zero_optimization.stage {stage!r} to the row {origin.label}"
            raise UsageError(problem, remedy="choose stages with --stages")
    return Configuration(
        name=origin.name,
        label=origin.name if isinstance(origin, ConfigurationFile) else origin.label,
        deepspeed_config=json_values(config),
        source="file",
        file_text=file.text,
    )
