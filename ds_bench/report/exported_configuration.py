"""Exports a row as files to train with: for DeepSpeed itself, the Hugging Face Trainer and Accelerate, with a README.

Values are those that ran, never better ones: choosing the row is the job of ``recommend``. The Trainer's file says
"auto" only where the user's file did, or where the Trainer would refuse a value that differs from its arguments.
Buckets and thresholds stay numbers, because those that the Trainer derives from the hidden size were not measured. The
README's text is ``templates/export_readme.md``; names from users or models are shown as code or escaped, so
that none can end a line or open markup.

Sources: DeepSpeed 0.19.8 ``runtime/config.py``; Transformers 5 ``integrations/deepspeed.py``
(``trainer_config_process``); Accelerate 1 ``utils/dataclasses.py`` (``DeepSpeedPlugin``), ``utils/launch.py``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import units
from ..analysis import provenance
from ..analysis.comparison import ComparisonRow
from ..config import deepspeed_config
from ..config.caveat_texts import as_caveat
from ..config.deepspeed_config import MEASURING_KEYS, Config
from ..config.options import Options
from ..config.spec import BATCH_KEYS, OFFLOAD_BLOCKS, Configuration, Placement, Trial, block_of, offload_device
from ..errors import UsageError
from ..launch.script_ranks import script_words
from ..prediction.fit_verdict import FITS, TIGHT
from ..records.json_files import write_json
from ..records.schema import Outcome, TrialRecord
from ..system.environment import Environment
from ..system.files import write_text
from ..system.redaction import REDACTED, redacted_keys
from .comparison_report import ComparisonReport
from .memory_plan import PlanRow, gpu_range
from .table_layout import code_block, escape, inline_code

RAW_FILE = "ds_config.json"
TRAINER_FILE = "ds_config_trainer.json"
ACCELERATE_FILE = "ds_config_accelerate.json"
YAML_FILE = "accelerate.yaml"
README_FILE = "README.md"
_SCHEDULER_AUTO = ("warmup_max_lr", "warmup_num_steps", "total_num_steps")
_ON_CPU = {"adagrad": "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad", "lion": "deepspeed.ops.lion.DeepSpeedCPULion"}
_ON_DEVICE = {
    "adam": "deepspeed.ops.adam.FusedAdam",
    "adamw": "deepspeed.ops.adam.FusedAdam",
    "adagrad": "torch.optim.Adagrad",
    "lion": "deepspeed.ops.lion.FusedLion",
    "lamb": "deepspeed.ops.lamb.FusedLamb",
}
"""Optimizer name → the class that DeepSpeed 0.19.8 uses (``runtime/engine.py``); others use ``torch.optim``'s."""


def folder_name(strategy: str) -> str:
    """Return ``ds_config_zero2`` or similar; a name read from a file cannot lead out of the folder."""
    return f"ds_config_{re.sub(r'[^A-Za-z0-9_.-]+', '_', strategy)}"


def require_deepspeed(configuration: Configuration) -> None:
    """Raise UsageError for a row of a reference engine, which has no DeepSpeed configuration."""
    if configuration.is_reference:
        problem = f"{configuration.label} is torch's own engine: there is no DeepSpeed configuration"
        raise UsageError(problem, remedy="export a row that DeepSpeed trained")


def write_exports(
    record: TrialRecord, folder: Path, environment: Environment | None = None, doubt: str | None = None
) -> list[Path]:
    """Write the five files, or two for a script's row, replacing older ones. Return their paths.

    ``doubt``: a line for the top of the README if it is undecided whether this is the row to use. A failed row is
    written too, and its README says so. Raises UsageError for a row of a reference engine, a folder that cannot be
    written, and a configuration with NaN or an infinity.
    """
    require_deepspeed(record.trial.configuration)
    if record.trial.workload.script is not None:
        return _write_script_export(record, folder, doubt)
    # Before the folder is made, so that an error here leaves no empty folder.
    raw, trainer, accelerate = raw_config(record), trainer_config(record), accelerate_config(record)
    readme = _readme(record, raw, accelerate, environment, doubt)
    with _writing_to(folder):
        # Absolute, so that the YAML finds the JSON from any folder.
        yaml = accelerate_yaml(record, folder.resolve() / ACCELERATE_FILE)
        write_json(folder / RAW_FILE, raw)
        write_json(folder / TRAINER_FILE, trainer)
        write_json(folder / ACCELERATE_FILE, accelerate)
        write_text(folder / YAML_FILE, yaml)
        write_text(folder / README_FILE, readme)
    return [folder / name for name in (RAW_FILE, TRAINER_FILE, ACCELERATE_FILE, YAML_FILE, README_FILE)]


def write_planned_rows(rows: Sequence[PlanRow], folder: Path) -> list[str]:
    """Write the files of every planned row that fits or is tight, each below ``folder``. Return their folders.

    Raises UsageError for a folder that cannot be written.
    """
    written = []
    for row in rows:
        if row.verdict not in (FITS, TIGHT) or row.configuration.is_reference:
            continue
        trial, placement = row.trial, row.trial.placement
        nodes = -(-placement.num_gpus // trial.ranks_per_node)
        need = row.prediction.gpu_need
        doubt = f"Planned, not run: it is predicted to {'fit' if row.verdict == FITS else 'be tight'}"
        doubt += f", needing {gpu_range(need)} GB per GPU"
        if need.method == "rule":
            doubt += ", by formula, without replaying its allocations"
            doubt += f" (because of {need.not_replayed})" if need.not_replayed else ""
        if row.verdict == TIGHT:
            risk = "retry allocations or run out of memory" if "gpu" in row.decisive_tiers else "fill the host's memory"
            doubt += f", and may {risk}"
        doubt += "."
        if trial.configuration.uses_nvme:
            doubt += f" Replace {placement.nvme_path} with your NVMe folder."
        if nodes > 1:
            doubt += f" For {nodes} nodes, give the deepspeed launcher --hostfile in place of --num_gpus, or run the"
            doubt += f" command of Accelerate on each node with --num_machines {nodes} --machine_rank I"
            doubt += " --main_process_ip FIRST_NODE --deepspeed_multinode_launcher standard."
        name = folder_name(row.configuration.name)
        planned = Trial(
            trial_id=row.configuration.name,
            repeat=0,
            configuration=trial.configuration,
            workload=trial.workload,
            placement=placement,
            ds_config=trial.config(),
        )
        outcome = Outcome(status="Planned", error="predicted only")
        write_exports(TrialRecord(trial=planned, outcome=outcome), folder / name, doubt=doubt)
        written.append(name)
    return written


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Make the folder of an export, and raise UsageError if a file cannot be written within this context."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        problem = f"cannot write the configurations to {folder}: {error.strerror or error}"
        raise UsageError(problem, remedy="give a folder that you can write to") from None
    except ValueError as error:  # json's for NaN and infinities; mkdir's for a NUL in the name
        raise UsageError(f"cannot export this row: {error}", remedy="correct the value or the folder's name") from None


def _write_script_export(record: TrialRecord, folder: Path, doubt: str | None) -> list[Path]:
    """Write a README and the configuration that a script trained with: the user's own file with this row's changes."""
    config = raw_config(record) if record.trial.configuration.uses_nvme else dict(record.trial.ds_config)
    name = inline_code(record.trial.configuration.label)
    command = code_block(training_command(record.trial, folder.resolve() / RAW_FILE), "bash")
    lines = [
        f"# {name} for {inline_code(record.trial.workload.model)}",
        "",
        *([f"**{escape(doubt)}**", ""] if doubt else []),
    ]
    if not record.outcome.success:
        lines += [f"**This row did not train here** ({escape(record.outcome.status)}).", ""]
    where = ", on every host" if record.trial.placement.num_nodes > 1 else ""
    script, how = record.trial.workload.script, f"To train with it, run{where}:"
    if script is not None and script.config_source == "override":
        how = f"Put its values in place of the script's own DeepSpeed values, then run{where}:"
    lines += [f"`{RAW_FILE}` is your own file with this row's changes. {how}", "", command]
    with _writing_to(folder):
        write_json(folder / RAW_FILE, config)
        write_text(folder / README_FILE, "\n".join([*lines, ""]))
    return [folder / RAW_FILE, folder / README_FILE]


def training_command(trial: Trial, config: Path) -> str:
    """Return the torchrun command that trains a row's script with a configuration.

    On several hosts, run it on each, with the file at the same path; ``srun`` does that for you.
    """
    script = trial.workload.script
    assert script is not None
    python, *words = script_words(trial, config, "OUTPUT_DIR")
    variables = [f"{name}={value}" for name, value in script.accelerate_variables(config).items()]
    if trial.placement.accelerator == "cpu":
        variables.append("DS_ACCELERATOR=cpu")
    torchrun = _torchrun(trial.placement, python, "-m", "torch.distributed.run")
    return shlex.join([*(["env", *variables] if variables else []), *torchrun, *words])


def exported_row(options: Options, report: ComparisonReport) -> ComparisonRow | None:
    """Return the recommended row, or the row of ``--export``; None without either."""
    if options.export:
        return next((row for row in report.comparison.rows if row.configuration.name == options.export), None)
    return report.recommended_row


def write_configuration(
    options: Options, report: ComparisonReport, row: ComparisonRow, run_folder: Path, environment: Environment
) -> Path:
    """Write the configuration of the row that :func:`exported_row` returns. Return its folder."""
    folder = run_folder / (f"export_{row.configuration.name}" if options.export else "recommended")
    doubt = None
    if not options.export and not report.recommendation.decided:
        doubt = report.recommendation.lines[0]
    assert row.last_run.record is not None, "rows of a run have records"
    write_exports(row.last_run.record, folder, environment, doubt)
    if not options.export:
        write_json(folder / "recommendation.json", report.recommendation.to_dict())
    return folder


def raw_config(record: TrialRecord) -> Config:
    """Return what ran, for ``deepspeed.initialize``, with the user's NVMe folder and version-dependent defaults."""
    trial = record.trial
    config: Config = copy.deepcopy(dict(trial.ds_config))
    # The trial swapped to a private folder; the export names the user's.
    if trial.placement.nvme_path is not None:
        config = deepspeed_config.with_swap_folder(config, trial.placement.nvme_path)
    # Written out because defaults differ between versions of DeepSpeed: gradient_clipping has been 1.0 since 0.19.3 and
    # was 0 before; pin_memory has been true since 0.19.5 and was false before.
    resolved = record.ranks[0].resolved_config if record.ranks else {}
    zero, resolved_zero = block_of(config, "zero_optimization"), block_of(resolved, "zero_config")
    defaults: list[tuple[Any, str, Any]] = [(config, "gradient_clipping", resolved)]
    defaults += [(zero, "overlap_comm", resolved_zero)] if zero.get("stage", 0) != 0 else []
    defaults += [
        (zero[key], "pin_memory", block_of(resolved_zero, key)) for key in OFFLOAD_BLOCKS if offload_device(config, key)
    ]
    for block, key, source in defaults:
        if key not in block and source.get(key) is not None:
            block[key] = source[key]
    return config


def trainer_config(record: TrialRecord) -> Config:
    """Return a file for ``TrainingArguments(deepspeed=…)``: "auto" where the Trainer needs it, else what ran."""
    config = raw_config(record)
    # The Trainer derives these from its arguments and refuses different values (fill_match).
    config.update(dict.fromkeys(BATCH_KEYS, "auto"))
    config["gradient_clipping"] = "auto"
    # Accelerate, which the Trainer uses too, refuses a file without this block (DeepSpeedPlugin).
    config.setdefault("zero_optimization", {"stage": 0})
    # The Trainer checks both against its own flags --bf16 and --fp16.
    for precision in ("bf16", "fp16"):
        config[precision] = {**block_of(config, precision), "enabled": "auto"}
    params = block_of(block_of(config, "optimizer"), "params")
    params.update(dict.fromkeys(_fillable(params), "auto"))
    warmup = block_of(block_of(config, "scheduler"), "params")
    warmup.update({key: "auto" for key in _SCHEDULER_AUTO if key in warmup})
    for path, value in record.trial.configuration.resolved_values.items():
        *names, key = path.split(".")
        block = functools.reduce(block_of, names, config)
        if value is not None and key in block:  # "auto" in the user's file: the Trainer resolves it again
            block[key] = "auto"
    return config


def _fillable(params: Mapping[str, Any]) -> list[str]:
    """Return which of lr, betas, eps and weight_decay TrainingArguments can express; the Trainer refuses the rest."""
    betas = params.get("betas")
    found = [key for key in ("lr", "eps", "weight_decay") if _is_number(params.get(key))]
    if isinstance(betas, list | tuple) and len(betas) == 2 and all(map(_is_number, betas)):
        found.append("betas")
    return found


def trainer_arguments(record: TrialRecord) -> dict[str, str]:
    """Return the TrainingArguments that resolve "auto" to what ran: name → value as on a command line."""
    config, work = raw_config(record), record.trial.workload
    params = block_of(block_of(config, "optimizer"), "params")
    warmup = block_of(block_of(config, "scheduler"), "params")
    fillable = _fillable(params)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": config.get("train_micro_batch_size_per_gpu", work.batch_size),
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps", work.grad_accum),
        # Training uses the scheduler's maximum, whatever rate the optimizer was made with.
        "learning_rate": warmup.get("warmup_max_lr", params["lr"] if "lr" in fillable else None),
        "weight_decay": params["weight_decay"] if "weight_decay" in fillable else None,
        "adam_beta1": params["betas"][0] if "betas" in fillable else None,
        "adam_beta2": params["betas"][1] if "betas" in fillable else None,
        "adam_epsilon": params["eps"] if "eps" in fillable else None,
        "max_grad_norm": config.get("gradient_clipping"),
        "warmup_steps": warmup.get("warmup_num_steps"),
        "bf16": block_of(config, "bf16").get("enabled") or None,
        "fp16": block_of(config, "fp16").get("enabled") or None,
        "use_cpu": True if record.trial.placement.accelerator == "cpu" else None,
        "gradient_checkpointing": work.activation_checkpointing or None,
        "torch_compile": work.compile == "torch" or None,
        "dataloader_num_workers": work.data_workers,
        "dataloader_pin_memory": None if work.data_workers is None else work.data_pin_memory,
        "dataloader_prefetch_factor": work.data_prefetch if work.data_workers else None,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if work.activation_checkpointing else None,
    }
    return {
        name: json.dumps(value) if isinstance(value, bool | dict | list) else str(value)
        for name, value in arguments.items()
        if value is not None
    }


def accelerate_config(record: TrialRecord) -> Config:
    """Return the JSON that ``accelerate.yaml`` names, without optimizer and scheduler, which the user's code makes."""
    config = raw_config(record)
    kind = deepspeed_config.optimizer_kind(config)
    # With these blocks Accelerate requires DummyOptim and DummyScheduler in the user's code (accelerator.py).
    config.pop("optimizer", None)
    config.pop("scheduler", None)
    # The total depends on the number of ranks, which the YAML's num_processes may change.
    config["train_batch_size"] = "auto"
    config.setdefault("zero_optimization", {"stage": 0})
    if offload_device(config, "offload_optimizer") and kind not in ("adam", "adamw"):
        # Otherwise Accelerate replaces other optimizers too, most of them with DeepSpeedCPUAdam (utils/deepspeed.py).
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def accelerate_yaml(record: TrialRecord, config_file: Path) -> str:
    """Return a file for ``accelerate launch``: only processes and files, as it refuses keys that the JSON sets too."""
    import yaml

    placement = record.trial.placement
    deepspeed: dict[str, str | bool] = {
        "deepspeed_config_file": str(config_file),
        "zero3_init_flag": record.trial.configuration.stage == 3 and record.trial.workload.zero_init,
    }
    if placement.hostfile is not None:
        deepspeed |= {"deepspeed_hostfile": placement.hostfile, "deepspeed_multinode_launcher": "pdsh"}
        deepspeed |= {"deepspeed_inclusion_filter": placement.include} if placement.include else {}
    elif placement.num_nodes > 1:
        # Started on each node; Accelerate's default, pdsh, needs a hostfile.
        deepspeed |= {"deepspeed_multinode_launcher": "standard"}
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": placement.num_nodes,
        "num_processes": placement.num_gpus,
        "use_cpu": False,  # with True, accelerate launch would leave DeepSpeed out; DS_ACCELERATOR chooses the CPU
        "deepspeed_config": deepspeed,
    }
    # allow_unicode is left off: with it, PyYAML would write a next-line character (U+0085) as a line break.
    text: str = yaml.safe_dump(settings, sort_keys=False, width=10_000)  # paths are not wrapped
    return text


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ------------------------------------------------------------------ the README


def _readme(
    record: TrialRecord, raw: Config, accelerate: Config, environment: Environment | None, doubt: str | None
) -> str:
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
    device = ["DS_ACCELERATOR=cpu"] if placement.accelerator == "cpu" else []
    launcher = ["deepspeed", "--num_gpus", str(placement.num_gpus)]
    if placement.hostfile is not None:
        launcher = ["deepspeed", "--hostfile", placement.hostfile]
        launcher += ["--include", placement.include] if placement.include else []
        launcher += ["--master_addr", placement.master_addr] if placement.master_addr else []
        launcher += ["--master_port", str(placement.master_port)] if placement.master_port else []
    elif placement.hosts:  # in a Slurm or torchrun job
        launcher = _torchrun(placement, "torchrun")
    launcher = [*device, *launcher]
    flags = [word for name, value in trainer_arguments(record).items() for word in (f"--{name}", value)]
    params = block_of(block_of(raw, "optimizer"), "params")
    forms = {"eps": int | float, "betas": list | tuple}
    text = engine.get_template("export_readme.md").render(
        label=configuration.label,
        doubt=doubt,
        trained=outcome.success,
        status=outcome.status,
        reason=trial.unsupported or trial.skipped or outcome.error or "no reason was recorded",
        raw_command=[*launcher, "train.py", "--deepspeed", "--deepspeed_config", RAW_FILE],
        trainer_command=[*launcher, "train.py", "--deepspeed", TRAINER_FILE, *flags],
        accelerate_command=[*device, "accelerate", "launch", "--config_file", YAML_FILE, "train.py"],
        refused_by_trainer=[key for key, form in forms.items() if key in params and not isinstance(params[key], form)],
        optimizer=_optimizer(raw, accelerate),
        placement=placement,
        work=trial.workload,
        facts=dict(_facts(record, environment)),
        axes=[f"{name}={value}" for name, value in configuration.axis_values.items()],
        variables=[f"{name}={value}" for name, value in configuration.variables.items()],
        compiled=trial.workload.compile != "none" or deepspeed_config.is_deepcompiled(trial.ds_config),
        sequence_parallel=deepspeed_config.sequence_parallel_size(trial.ds_config) > 1,
        tensor_parallel=deepspeed_config.tensor_parallel_size(trial.ds_config) > 1,
        # A user may have set these two independently of the flags.
        micro=trial.ds_config.get("train_micro_batch_size_per_gpu", trial.workload.batch_size),
        accumulated=trial.ds_config.get("gradient_accumulation_steps", trial.workload.grad_accum),
        stage=block_of(raw, "zero_optimization").get("stage", 0),
        redacted=redacted_keys(raw),
        placeholder=REDACTED,
        measuring=[key for key, value in MEASURING_KEYS.items() if raw.get(key) == value],
        torch_adam=params.get("torch_adam"),
        untested_optimizer=raw.get("zero_allow_untested_optimizer"),
        keeps_optimizer="zero_force_ds_cpu_optimizer" in accelerate and "zero_force_ds_cpu_optimizer" not in raw,
        on_nvme="nvme" in (offload_device(raw, "offload_optimizer"), offload_device(raw, "offload_param")),
        caveats=[as_caveat(caveat).text for caveat in record.caveats],
    )
    # Empty lists leave blank lines.
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _torchrun(placement: Placement, *program: str) -> list[str]:
    """Return torchrun's command line for a placement; in Slurm, srun starts it. ``program``: how to call torchrun."""
    ranks = f"--nproc-per-node={placement.ranks_per_node}"
    if not placement.hosts:
        return [*program, ranks]
    nodes, first = placement.num_nodes, placement.master_addr or placement.hosts[0][0]
    by_slurm = (placement.host_command or "").startswith("srun ")
    launch = [*(["srun", f"--nodes={nodes}", "--ntasks-per-node=1"] if by_slurm else []), *program]
    return [
        *launch,
        f"--nnodes={nodes}",
        ranks,
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first}:{placement.master_port or 29500}",
    ]


def _command(words: Sequence[str]) -> str:
    """Return a shell code block, indented for a list item."""
    return "\n".join(f"  {line}" for line in code_block(shlex.join(words), "sh").splitlines())


def _optimizer(raw: Config, accelerate: Config) -> str:
    """Return text that says how code for Accelerate makes the optimizer."""
    kind, offloaded = deepspeed_config.optimizer_kind(raw), bool(offload_device(raw, "offload_optimizer"))
    if kind == "muon":
        return f"copy `optimizer` from `{RAW_FILE}` into `{ACCELERATE_FILE}` and use `accelerate.utils.DummyOptim`."
    params = dict(block_of(block_of(raw, "optimizer"), "params"))
    # DeepSpeed picks the class by this key; no class takes it as an argument.
    on_torch = bool(params.pop("torch_adam", False))
    # Also with offload, where Accelerate replaces torch's with DeepSpeedCPUAdam (utils/deepspeed.py).
    if kind in ("adam", "adamw") and (offloaded or on_torch):
        decoupled = params.pop("adam_w_mode", True) or kind == "adamw"
        maker = "torch.optim.AdamW" if decoupled else "torch.optim.Adam"
    else:
        name = block_of(raw, "optimizer").get("type", "")
        maker = (_ON_CPU if offloaded else _ON_DEVICE).get(kind, f"torch.optim.{name}")
    given = "".join(f", {key}={value!r}" for key, value in params.items())
    swapped = offloaded and accelerate.get("zero_force_ds_cpu_optimizer", True)
    return f"{inline_code(f'{maker}(model.parameters(){given})')}" + (
        ", which Accelerate replaces with DeepSpeed's CPU version." if swapped else "."
    )


def _facts(record: TrialRecord, environment: Environment | None) -> Iterator[tuple[str, str]]:
    """Yield measurements, versions and facts about the machine: label and escaped text."""
    if record.outcome.success and record.ranks:
        from ..analysis.row import make_run  # here, so that pydantic does not delay the first trial

        seen, steps = make_run(record).row, len(record.ranks[0].step_seconds)
        sizes = (seen.gpu_peak_gb, seen.gpu_peak_reserved_gb, seen.cpu_used_gb, seen.nvme_stored_gb)
        peak, reserved, host, stored = (units.format_bytes(units.in_bytes(size)) for size in sizes)
        mean = units.format_ms(units.in_seconds(seen.avg_step_time_ms))
        yield "Throughput", f"{units.format_rate(seen.throughput_tokens_per_sec)} tokens/s (all ranks together)"
        yield "Step time", f"{mean} ms, mean of {steps} steps on the slowest rank"
        if seen.gpu_peak_gb is not None:
            yield "GPU memory, worst rank", f"peak allocated {peak}, reserved {reserved}"
        if seen.cpu_used_gb is not None:
            yield "Host memory, peak resident size of a node's ranks", host
        if seen.nvme_stored_gb is not None:
            yield "On NVMe", stored
    if record.started_at is not None:
        yield "Started at", escape(record.started_at)
    devices = sorted({rank.device_name for rank in record.ranks if record.trial.placement.accelerator == "cuda"})
    known = {} if environment is None else provenance.machine(environment)
    known |= {"GPUs": ", ".join(devices)} if devices else {}
    if record.ranks:
        known |= {"torch": record.ranks[0].torch_version, "deepspeed": record.ranks[0].deepspeed_version}
    yield from ((name, escape(text)) for name, text in known.items())
