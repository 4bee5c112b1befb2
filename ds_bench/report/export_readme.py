"""The README of exported configurations: how to use each, what was measured with them, what to change.

Only text is made here, from ``templates/export_readme.md``. Names that users or models chose are shown as code or
escaped, so that none of them can end a line or open markup.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from .. import units
from ..analysis import provenance
from ..config.caveats import as_caveat
from ..config.deepspeed_config import (
    MEASURING_KEYS,
    is_deepcompiled,
    optimizer_kind,
    sequence_parallel_size,
    tensor_parallel_size,
)
from ..config.spec import Placement, Trial, block_of, offload_device
from ..records.schema import TrialRecord
from ..system.environment import Environment
from ..system.redaction import REDACTED, redacted_keys
from .table import code_block, escape, escape_unprintable, inline_code

Config = Mapping[str, Any]

_SCRIPT = "train.py"

_ON_CPU = {"adagrad": "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad", "lion": "deepspeed.ops.lion.DeepSpeedCPULion"}
_ON_DEVICE = {
    "adam": "deepspeed.ops.adam.FusedAdam",
    "adamw": "deepspeed.ops.adam.FusedAdam",
    "adagrad": "torch.optim.Adagrad",
    "lion": "deepspeed.ops.lion.FusedLion",
    "lamb": "deepspeed.ops.lamb.FusedLamb",
}
"""The class that DeepSpeed 0.19.8 makes of an optimizer's name (``runtime/engine.py``); else ``torch.optim``'s."""


def readme(
    record: TrialRecord,
    raw: Config,
    trainer: Config,
    accelerate: Config,
    arguments: Mapping[str, str],
    environment: Environment | None,
    doubt: str | None = None,
) -> str:
    """The whole file. ``arguments``: TrainingArguments by name, as on a command line. ``doubt``: for the head."""
    from jinja2 import Environment as TemplateEnvironment
    from jinja2 import PackageLoader, StrictUndefined

    engine = TemplateEnvironment(
        loader=PackageLoader("ds_bench.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters |= {"code": inline_code, "escaped": escape, "shell": _command}
    trial, outcome = record.trial, record.outcome
    placement, configuration = trial.placement, trial.configuration
    launcher = _launcher(placement)
    flags = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    params = block_of(block_of(raw, "optimizer"), "params")
    forms = {"eps": int | float, "betas": list | tuple}
    micro, accumulated = _batch(trial)
    text = engine.get_template("export_readme.md").render(
        label=configuration.label,
        model=trial.workload.model,
        doubt=doubt,
        trained=outcome.success,
        status=outcome.status,
        reason=trial.unsupported or trial.skipped or outcome.error or "no reason was recorded",
        raw_command=[*launcher, _SCRIPT, "--deepspeed", "--deepspeed_config", "ds_config.json"],
        trainer_command=[*launcher, _SCRIPT, "--deepspeed", "ds_config_trainer.json", *flags],
        accelerate_command=[*_device(placement), "accelerate", "launch", "--config_file", "accelerate.yaml", _SCRIPT],
        refused_by_trainer=[key for key, form in forms.items() if key in params and not isinstance(params[key], form)],
        optimizer=_optimizer(raw, accelerate),
        placement=placement,
        facts=dict(_facts(record, environment)),
        axes=[f"{name}={value}" for name, value in configuration.axis_values.items()],
        variables=[f"{name}={value}" for name, value in configuration.variables.items()],
        code=list(_code(trial)),
        micro=micro,
        accumulated=accumulated,
        stage=block_of(trainer, "zero_optimization").get("stage", 0),
        keys=list(_keys(raw, accelerate, placement)),
        caveats=[as_caveat(caveat).text for caveat in record.caveats],
    )
    return text.rstrip() + "\n"


def _device(placement: Placement) -> list[str]:
    return ["DS_ACCELERATOR=cpu"] if placement.accelerator == "cpu" else []


def _launcher(placement: Placement) -> list[str]:
    device = _device(placement)
    if placement.hostfile is not None:
        own = ["--include", placement.include] if placement.include else []
        own += ["--master_addr", placement.master_addr] if placement.master_addr else []
        return [*device, "deepspeed", "--hostfile", placement.hostfile, *own]
    if placement.hosts:  # of a job of Slurm or torchrun
        nodes, first = placement.num_nodes, placement.hosts[0][0]
        own = [f"--nnodes={nodes}", f"--nproc-per-node={placement.ranks_per_node}", "--rdzv-backend=c10d"]
        by_slurm = (placement.host_command or "").startswith("srun ")
        launch = [*(["srun", f"--nodes={nodes}", "--ntasks-per-node=1"] if by_slurm else []), "torchrun", *own]
        return [*device, *launch, f"--rdzv-endpoint={first}:29500"]
    return [*device, "deepspeed", "--num_gpus", str(placement.num_gpus)]


def _command(words: list[str]) -> str:
    """A shell block inside a list."""
    text = " ".join(word if word.startswith("DS_ACCELERATOR=") else _shell(word) for word in words)
    return "\n".join(f"  {line}" for line in code_block(text, "sh").splitlines())


def _shell(word: str) -> str:
    """One word of a bash command on one line, whatever is in it."""
    return shlex.quote(word) if word.isprintable() else "$'" + escape_unprintable(word).replace("'", "\\'") + "'"


def _optimizer(raw: Config, accelerate: Config) -> str:
    kind, offloaded = optimizer_kind(raw), bool(offload_device(raw, "offload_optimizer"))
    name = str(block_of(raw, "optimizer").get("type", ""))
    if kind == "muon":
        return "copy the `optimizer` block of `ds_config.json` into it and use `accelerate.utils.DummyOptim`."
    params = dict(block_of(block_of(raw, "optimizer"), "params"))
    # A key of DeepSpeed's that picks the class, and no argument of one.
    on_torch = bool(params.pop("torch_adam", False))
    decoupled = kind == "adamw" or params.get("adam_w_mode", True)
    # With offload too, as Accelerate puts DeepSpeedCPUAdam in the place of torch's own (utils/deepspeed.py).
    if kind in ("adam", "adamw") and (offloaded or on_torch):
        maker = "torch.optim.AdamW" if decoupled else "torch.optim.Adam"
        params.pop("adam_w_mode", None)
    else:
        maker = (_ON_CPU if offloaded else _ON_DEVICE).get(kind, f"torch.optim.{name}")
    given = "".join(f", {key}={value!r}" for key, value in params.items())
    swapped = offloaded and accelerate.get("zero_force_ds_cpu_optimizer", True)
    return f"{inline_code(f'{maker}(model.parameters(){given})')}" + (
        ", which Accelerate replaces by DeepSpeed's CPU version." if swapped else "."
    )


def _facts(record: TrialRecord, environment: Environment | None) -> Iterator[tuple[str, str]]:
    """Measurements and their conditions: label → text, escaped."""
    work, placement = record.trial.workload, record.trial.placement
    unit = "GPU" if placement.accelerator == "cuda" else "CPU rank"
    names = sorted({rank.device_name for rank in record.ranks if placement.accelerator == "cuda"})
    devices = f" ({escape(', '.join(names))})" if names else ""
    yield "Hardware", f"{placement.num_gpus} {unit}{'s' if placement.num_gpus > 1 else ''}{devices}"
    yield "World size", str(placement.num_gpus)
    micro, accumulated = _batch(record.trial)
    batches = "micro-batch" if accumulated == 1 else "micro-batches"
    yield (
        "Work",
        f"micro-batch {micro} × {work.seq_length} tokens per rank, {accumulated} {batches} per optimizer step, "
        f"{work.precision}",
    )
    yield "Activation checkpointing", "on" if work.activation_checkpointing else "off"
    if record.outcome.success and record.ranks:
        from ..analysis.row import make_run  # here, so that pydantic is not loaded before the first trial

        seen, steps = make_run(record).row, len(record.ranks[0].step_seconds)
        sizes = (seen.gpu_peak_gb, seen.gpu_peak_reserved_gb, seen.cpu_used_gb, seen.nvme_stored_gb)
        peak, reserved, host, stored = (units.format_bytes(units.in_bytes(size)) for size in sizes)
        mean = units.format_ms(units.in_seconds(seen.avg_step_time_ms))
        yield "Throughput", f"{units.format_count(seen.throughput_tokens_per_sec)} tokens/s (all ranks together)"
        yield "Step time", f"{mean} ms, mean of {steps} steps on the slowest rank"
        if seen.gpu_peak_gb is not None:
            yield "GPU memory, worst rank", f"peak allocated {peak}, reserved {reserved}"
        if seen.cpu_used_gb is not None:
            yield "Host memory, peak resident size of a node's ranks", host
        if seen.nvme_stored_gb is not None:
            yield "On NVMe", stored
    packages = dict(environment.packages) if environment is not None else {}
    if record.ranks:
        packages |= {"torch": record.ranks[0].torch_version, "deepspeed": record.ranks[0].deepspeed_version}
    versions = ", ".join(f"{name} {escape(version)}" for name, version in sorted(packages.items()))
    yield "Versions", versions or "not recorded"
    if record.started_at is not None:
        yield "Started at", escape(record.started_at)
    if environment is not None:
        known = provenance.machine(environment)
        yield from ((name, escape(text)) for name, text in known.items() if name not in environment.packages)


_LOSS_CODE = {
    "chunked": "`deepspeed.runtime.chunked_cross_entropy.install_chunked_causal_lm_loss(model)`",
    "tiled": "`TiledFusedLogitsLoss` of `deepspeed.runtime.sequence_parallel.ulysses_sp`; with accumulation or a loss "
    "scale, scale the gradient of the output layer yourself, as it computes that in the forward pass",
    "liger": "`liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss`",
}


def _code(trial: Trial) -> Iterator[str]:
    """Settings of the row that no configuration file contains."""
    work, config = trial.workload, trial.ds_config
    ulysses = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    if work.attention is not None:
        yield f"Attention: build the model with `attn_implementation={work.attention!r}`."
    if work.loss != "model":
        yield f"Loss: {_LOSS_CODE[work.loss]}."
    if work.tiled_mlp:
        yield f"MLP: `TiledMLP` of `{ulysses}` in each layer."
    if work.compile != "none" or is_deepcompiled(config):
        yield "Compiled: call `engine.compile()` after `deepspeed.initialize`."
    if sequence_parallel_size(config) > 1:
        yield (
            f"Ulysses: `UlyssesSPAttentionHF.register_with_transformers` of `{ulysses}`, whose `mpu` goes to "
            "`deepspeed.initialize`; `UlyssesSPDataLoaderAdapter` splits the batches."
        )
    if tensor_parallel_size(config) > 1:
        yield "AutoTP: give all ranks of a group the same batches."
    if work.data_workers is not None:
        yield f"Data: a `DataLoader` with `num_workers={work.data_workers}`, `pin_memory={work.data_pin_memory}`."
    if work.cpu_binding != "none":
        yield "Processors: start it with the launcher's `--bind_cores_to_rank`, or bind each rank yourself."
    if not work.zero_init:
        yield (
            "Without zero.Init: build the model before the Trainer's arguments or Accelerate's plugin exist. After "
            "them it is split while it is built, which takes less memory."
        )


def _batch(trial: Trial) -> tuple[object, object]:
    """Micro-batch and accumulation as configured, which a user may have set apart from the flags."""
    config, work = trial.ds_config, trial.workload
    return (
        config.get("train_micro_batch_size_per_gpu", work.batch_size),
        config.get("gradient_accumulation_steps", work.grad_accum),
    )


def _keys(raw: Config, accelerate: Config, placement: Placement) -> Iterator[str]:
    for key in redacted_keys(raw):
        placeholder = inline_code(REDACTED)
        yield f"{inline_code(key)}: may be a credential and was not kept; put your own in place of {placeholder}."
    own = [key for key, value in MEASURING_KEYS.items() if raw.get(key) == value]
    if own:
        yield f"{', '.join(map(inline_code, own))}: added for measuring (no printing, no timers); remove at will."
    if block_of(block_of(raw, "optimizer"), "params").get("torch_adam"):
        yield "`optimizer.params.torch_adam`: torch's AdamW stepped; remove it where DeepSpeed's FusedAdam builds."
    if raw.get("zero_allow_untested_optimizer"):
        yield "`zero_allow_untested_optimizer`: DeepSpeed wants it for this optimizer."
    if "zero_force_ds_cpu_optimizer" in accelerate and "zero_force_ds_cpu_optimizer" not in raw:
        yield "`zero_force_ds_cpu_optimizer`: keeps Accelerate from putting CPU Adam in your optimizer's place."
    if "nvme" in (offload_device(raw, "offload_optimizer"), offload_device(raw, "offload_param")):
        path = inline_code(placement.nvme_path or "not given")
        yield f"`nvme_path`: {path}; two jobs must not share it, and swap files stay there."
        yield "`buffer_size` holds the largest parameter of this model: another model needs its own."
