"""The command ``plan``: predicts the GPU, host and NVMe memory that each strategy needs.

It runs nothing and downloads only ``config.json`` of a model on the Hub. The figures come from ``prediction/``, their
text from ``report/memory_plan.py``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import units
from ..config import axis_rows, strategies
from ..config.automatic_values import TrainingFacts
from ..config.axis_rows import AxisValues
from ..config.configuration_file_rows import FileRowMaker
from ..config.configuration_files import ConfigurationFile, check_remedy, read_configuration_files
from ..config.deepspeed_config import tensor_parallel_size
from ..config.options import OPTIONS
from ..config.spec import Configuration, Placement, Precision, Workload, block_of, gpu_precisions
from ..config.trained_parameters import read_choice
from ..errors import UsageError
from ..models.lookup import ResolvedModel, resolve_model
from ..planning import requested_rows, trial_planner
from ..prediction import trial_predictions, what_if
from ..prediction.fit_verdict import DOES_NOT_FIT
from ..prediction.model_profile import Variant, measured_attention
from ..prediction.what_if import PlannedTrial
from ..report import exported_configuration
from ..report.memory_plan import MemoryPlan, PlanRow, plan_lines
from ..system import device_specifications, terminal
from ..units import format_names
from .advice import usable_configurations
from .commands import ALL_STRATEGIES, PREDICTED_STRATEGIES

_MAX_TOKENS = 2**40
"""Tokens in one micro-batch; more must be a typo."""
_MAX_GPUS = 100_000
"""GPUs in one job; more must be a typo."""
WIDTH_OF_FILES = 100
"""Line width in characters for a file or a pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Flags of ``plan``; the fields have the flags' names."""

    model: str
    model_factory: str | None
    """``package.module:function``; replaces ``model``."""
    num_gpus: int
    gpu: str
    gpus_per_node: int | None
    host_memory: float | None
    """GB (2**30) of one node."""
    batch_size: int
    seq_length: int | None
    varying_lengths: bool
    """Whether ``seq_length`` is only the maximum length."""
    grad_accum: int
    precision: Precision
    activation_checkpointing: bool
    strategies: tuple[str, ...]
    configs: tuple[Path, ...]
    keep_batch: bool
    image_tokens: int | None
    """Per sequence; they count toward its length."""
    image_size: tuple[int, int] | None
    """Width and height in pixels of a sequence's only image."""
    axes: tuple[AxisValues, ...]
    lora: str | None
    freeze: str | None
    min_gpus: bool
    max_batch: bool
    quick: bool
    exact: bool
    export: Path | None
    """Folder for the configurations of the rows that fit or are tight."""
    online: bool
    trust_remote_code: bool
    verbose: bool
    json: bool


def plan_options(
    *, name: str | None, strategies: Sequence[str], configs: Sequence[Path], axes: Sequence[str], **flags: Any
) -> PlanOptions:
    """Return the parsed flags of ``plan``; no strategies if only ``--configs`` is given. ``name``: positional model."""
    if name is not None:
        if flags["model"] not in (name, OPTIONS["model"].default):
            raise UsageError(f"two models: {name} and --model {flags['model']}", remedy="give one of them")
        flags["model"] = name
    names = [] if configs and strategies is ALL_STRATEGIES else strategies
    names = PREDICTED_STRATEGIES if "all" in names else tuple(dict.fromkeys(names))
    return PlanOptions(strategies=names, configs=tuple(configs), axes=axis_rows.read_axes(axes), **flags)


def plan_command(**flags: Any) -> int:
    """Print the answer and the table. Return 0, or 1 if nothing fits; raises UsageError."""
    options = plan_options(**flags)
    predicted, lines = predict_plan(options)
    for line in lines:
        terminal.print_text(f"note: {terminal.escape_controls(line)}", sys.stderr)
    if options.json:
        terminal.print_json(json.dumps([_json_entry(row) for row in predicted.rows], indent=1, allow_nan=False))
    elif predicted.rows:  # empty if the only file uses AutoTP, which is not predicted
        width = shutil.get_terminal_size(fallback=(WIDTH_OF_FILES, 0)).columns
        for line in plan_lines(predicted, width, verbose=options.verbose):
            terminal.print_text(line)
    return 1 if predicted.rows and all(row.verdict == DOES_NOT_FIT for row in predicted.rows) else 0


def predict_plan(options: PlanOptions) -> tuple[MemoryPlan, list[str]]:
    """Return the predictions that the flags request, and notes for the user: on files, axes, precision and the export.

    Raises UsageError.
    """
    # Card and files first, so that an error in them does not wait for the model.
    capacity = device_specifications.memory_bytes(options.gpu)
    files, lines = read_configuration_files(options.configs)
    question, model, notes = _planned_trial(options)
    host = None if options.host_memory is None else units.from_gb(options.host_memory)
    configurations = [strategies.make_configuration(strategies.named_strategy(name)) for name in options.strategies]
    configurations += _configurations_of_files(options, question, files, model.hidden_size, lines)
    rows = []
    configurations = _with_axes(configurations, options, model, question.placement, lines)
    with terminal.StatusLine(sys.stderr, quiet=not sys.stderr.isatty()) as line:
        for number, configuration in enumerate(configurations):
            line.show(f"predicting {configuration.label} ({number + 1} of {len(configurations)})")
            workload = configuration.applied_to(question.workload)
            planned = replace(question, configuration=configuration, workload=workload)
            prediction = planned.judge(capacity)
            verdict = prediction.verdict(capacity, host)
            # A search judges many trials, so replay only those that come close to filling the GPU.
            near = replace(planned, replays="near") if options.exact else planned
            rows.append(
                PlanRow(
                    trial=near,
                    prediction=prediction,
                    verdict=verdict,
                    change=what_if.smallest_change(near, capacity, host) if verdict == DOES_NOT_FIT else None,
                    decisive_tiers=prediction.decisive_tiers(capacity, host),
                    min_gpus=what_if.min_gpus(near, capacity, host) if options.min_gpus else None,
                    max_batch=what_if.max_batch(near, capacity, host) if options.max_batch else None,
                )
            )
    if "bf16" not in gpu_precisions(question.placement.compute_capability):
        in_bf16 = [row.label for row in rows if block_of(row.trial.config(), "bf16").get("enabled")]
        if in_bf16:
            remedy = "use --precision fp16, or fp16 in the file"
            verb = f"{format_names(in_bf16, 4)} would be Unsupported"
            lines.append(f"{options.gpu} has no bf16 units, and {verb} in a run ({remedy})")
    predicted = MemoryPlan(
        requested=question,
        gpu_bytes=capacity,
        host_bytes=host,
        rows=rows,
        shows_min_gpus=options.min_gpus,
        shows_max_batch=options.max_batch,
        notes=notes,
    )
    if options.export is not None:
        written = exported_configuration.write_planned_rows(rows, options.export)
        lines.append(
            f"wrote to {options.export} the configurations of the rows that fit or are tight: {', '.join(written)}"
            if written
            else f"nothing was written to {options.export}: no DeepSpeed row is predicted to fit"
        )
    return predicted, lines


def _with_axes(
    configurations: Sequence[Configuration],
    options: PlanOptions,
    model: ResolvedModel,
    placement: Placement,
    lines: list[str],
) -> list[Configuration]:
    """Return each configuration with every combination of its axes; add notes on idle axes to ``lines``."""
    if not options.axes:
        return list(configurations)
    facts = {
        each.label: requested_rows.row_facts(each, model, placement, options.grad_accum) for each in configurations
    }
    lines += axis_rows.idle_axis_notes(options.axes, facts)
    rows = []
    for each in configurations:
        for values in axis_rows.combinations(options.axes, facts[each.label]):
            name, label = axis_rows.row_name(each.name, values), axis_rows.row_label(each.label, values)
            rows.append(requested_rows.with_axes(replace(each, name=name, label=label), values, facts[each.label]))
    axis_rows.require_few(len(rows))
    return rows


def _configurations_of_files(
    options: PlanOptions,
    question: PlannedTrial,
    files: Sequence[ConfigurationFile],
    hidden_size: int | None,
    lines: list[str],
) -> list[Configuration]:
    """Return the files' configurations that can be predicted; add their caveats, and why others cannot, to ``lines``.

    Raises UsageError if every file is refused and no strategy is named.
    """
    facts = TrainingFacts(
        num_gpus=options.num_gpus,
        batch_size=options.batch_size,
        grad_accum=options.grad_accum,
        precision=options.precision,
        hidden_size=hidden_size,
    )
    maker = FileRowMaker(facts=facts, keep_batch=options.keep_batch)
    usable, refusals = usable_configurations(files, maker, question.placement)
    if refusals and not usable and not options.strategies:
        raise UsageError(f"--configs {'; '.join(refusals)}", remedy=check_remedy(options.configs))
    predicted = []
    for configuration in usable:
        if tensor_parallel_size(configuration.deepspeed_config) > 1:
            reason = "the formulas do not cover AutoTP, which splits layers; run it"
            lines.append(f"not predicted: {configuration.name}: {reason}")
        else:
            predicted.append(configuration)
            lines += [f"{configuration.name}: {caveat}" for caveat in configuration.caveats]
    lines += [f"not predicted: {refusal}" for refusal in refusals]
    return predicted


def _planned_trial(options: PlanOptions) -> tuple[PlannedTrial, ResolvedModel, list[str]]:
    """Return the planned trial (its configuration is a stand-in), the model, and notes on both."""
    if options.batch_size * (options.seq_length or 1) > _MAX_TOKENS:
        problem = f"--batch-size {options.batch_size}"
        if options.seq_length is not None:
            problem += f" with --seq-length {options.seq_length}"
        raise UsageError(f"{problem} is too large for any GPU", remedy="give fewer tokens per micro-batch")
    if options.quick and options.exact:
        raise UsageError("--quick and --exact cannot be combined", remedy="give one of them")
    if options.num_gpus > _MAX_GPUS:
        raise UsageError(
            f"--num-gpus {options.num_gpus} is more than any job uses", remedy=f"give {_MAX_GPUS} or fewer"
        )
    online = options.online or "/" in options.model  # a mistyped short name makes no request
    model = resolve_model(
        options.model_factory or options.model,
        factory=options.model_factory is not None,
        trust_remote_code=options.trust_remote_code,
        # With HF_HUB_OFFLINE, huggingface_hub makes no request, so that no typo starts a download.
        environment={} if online else {"HF_HUB_OFFLINE": "1"},
        offline_reason=None if online else "",
        by_config=True,
    )
    images, length = _image_tokens(options, model)
    notes = []
    choice = read_choice(options.lora, options.freeze)
    profile = trial_predictions.profile_model(
        model,
        length,
        "cuda",
        variants=_variants(options),
        losses_by_formula=True,
        trust_remote_code=options.trust_remote_code,
        choice=choice,
        image_tokens=images,
    )
    if choice is not None or model.architecture is not None:
        notes.append("parameters are exact; activations are computed from config.json, not measured on the model")
    if model.source == "preset" and not model.name.lower().endswith(options.model.lower()):
        notes.append(f"{options.model} has the same shapes as {model.name}")
    with contextlib.suppress(UsageError):
        architecture = trial_predictions.architecture_of(model)
        if architecture.active_parameters < architecture.facts.parameters:
            notes.append(f"{units.format_parameters(architecture.active_parameters)} are active per token")
    if device_specifications.is_size(options.gpu):
        shared = "if vLLM or another process shares the card, give what is left"
        notes.append(f"--gpu {options.gpu} is the memory that this job may use on each card; {shared}")
    if images:
        sizes = (
            "--image-tokens" if options.image_size is None else f"--image-size {'x'.join(map(str, options.image_size))}"
        )
        notes.append(f"each sequence has {images:,} image tokens ({sizes})")
    if isinstance(profile, trial_predictions.Unpredicted):
        raise UsageError(f"--model {model.name}: {profile.reason}", remedy="measure it with the command run")
    if profile.frozen:
        frozen = units.format_parameters(profile.frozen_parameters)
        notes.append(
            f"{frozen} are frozen; below ZeRO-3 every GPU holds all of them, because ZeRO-1 and 2 shard only the "
            "states of trained parameters"
        )
    workload = Workload(
        model=model.name,
        model_source=model.source,
        model_type=model.model_type,
        model_config=model.config,
        batch_size=options.batch_size,
        seq_length=length,
        grad_accum=options.grad_accum,
        precision=options.precision,
        activation_checkpointing=options.activation_checkpointing,
        lora=options.lora,
        freeze=options.freeze,
    )
    planned = PlannedTrial(
        profile=profile,
        workload=workload,
        # Nothing is written there, but a row on NVMe needs a configured folder.
        placement=Placement(
            accelerator="cuda",
            num_gpus=options.num_gpus,
            nvme_path="/nvme",
            compute_capability=device_specifications.compute_capability(options.gpu),
        ),
        configuration=strategies.make_configuration(strategies.named_strategy("zero0")),
        loads_weights=True,
        may_replace_loss=Variant(loss="tiled") in profile.variants,
        ranks_per_node=options.gpus_per_node or 8,
        replays="always" if options.exact else "never" if options.quick else "near",
        child_traces="all" if options.exact else "usual",
        varying_lengths=options.varying_lengths,
    )
    return planned, model, notes


def _variants(options: PlanOptions) -> list[Variant]:
    """Return the variants of the model's activations that the rows need, and the tiled loss, which may be proposed."""
    values = {each[0].axis_name: [one.value for one in each] for each in options.axes}
    # DDP in 16-bit precision runs under torch.autocast, which keeps different activations: count that variant too.
    autocast = "torch_autocast" in values or ("ddp" in options.strategies and options.precision != "fp32")
    own = Variant()
    losses, attentions = values.get("loss", ["model"]), values.get("attention", [own.attention])
    chosen = [
        Variant(
            attention=measured_attention(None if attention is None else str(attention)),
            loss=loss,  # type: ignore[arg-type]
            autocast=cast,
            tiled_mlp=bool(tiled_mlp),
        )
        for attention in attentions
        for loss in losses
        for tiled_mlp in values.get("tiled_mlp", [False])
        for cast in ((False, True) if autocast else (False,))
    ]
    return list(dict.fromkeys(each for each in (Variant(loss="tiled"), *chosen) if each != own))


def _image_tokens(options: PlanOptions, model: ResolvedModel) -> tuple[int, int]:
    """Return the image tokens of one sequence, and the sequence's length, which includes them.

    Raises UsageError for flags that do not fit the model.
    """
    given = [flag for flag in ("image_tokens", "image_size") if getattr(options, flag) is not None]
    if len(given) == 2:
        raise UsageError("--image-tokens and --image-size cannot be combined", remedy="give one of them")
    reader = model.architecture if model.architecture is not None and model.architecture.image else None
    if reader is None:
        if given:
            flag = given[0].replace("_", "-")
            raise UsageError(f"--{flag}: {model.name} reads no images", remedy="leave it out")
        return 0, trial_planner.resolve_seq_length(options.seq_length, model)
    tokens = options.image_tokens
    if tokens is None:
        tokens = reader.image_tokens(*(options.image_size or (None, None)))
    if options.seq_length is None:
        return tokens, tokens + trial_planner.resolve_seq_length(None, model)
    if tokens >= options.seq_length:
        raise UsageError(
            f"--seq-length {options.seq_length} has no room for {tokens} image tokens and text",
            remedy="give a longer sequence; image tokens count toward its length",
        )
    return tokens, trial_planner.resolve_seq_length(options.seq_length, model)


def _json_entry(row: PlanRow) -> dict[str, Any]:
    """Return the row for ``--json``, in unrounded bytes."""
    change, need = row.change, row.prediction.gpu_need
    return {
        "strategy": row.configuration.name,
        "stage": row.configuration.stage,
        "verdict": row.verdict,
        "gpu_bytes": dict(row.prediction.gpu),
        "host_bytes_per_node": dict(row.prediction.host),
        "nvme_bytes_per_node": dict(row.prediction.nvme),
        "gpu_total_bytes": row.prediction.gpu_bytes,
        "fullest_moment": row.prediction.phase,
        "exceeded": [f"{tier}_memory" for tier in row.decisive_tiers if row.verdict == DOES_NOT_FIT],
        "smallest_change": change.text if change else None,
        "smallest_change_host_bytes_per_node": (
            change.prediction.host_bytes if change and change.trial.configuration.offloads else None
        ),
        "min_gpus": row.min_gpus,
        "max_batch": row.max_batch,
        "gpu_least_bytes": need.least_bytes,
        "gpu_reserved_bytes": need.known_reserved_bytes,
        "decided_in": need.phase,
        "method": need.method,
        "not_predicted": list(need.unknowns),
        "gpu_terms_bytes": dict(row.prediction.terms),
        "host_bytes_per_node_by_phase": dict(row.prediction.host_phases),
        "not_replayed": need.not_replayed,
        "varying_lengths": row.trial.varying_lengths,
    }
