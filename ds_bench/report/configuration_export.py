"""A row as files that train with it: for DeepSpeed itself, the Hugging Face Trainer and Accelerate.

Values come from what ran, never from what would be better: choosing the row is ``recommend``'s. The Trainer's file
says "auto" only where the Trainer would otherwise refuse a value that differs from its arguments; buckets and
thresholds stay numbers: the Trainer derives its own from the hidden size, and they were not measured. What was
"auto" in a file of the user's own stays "auto".

Sources: DeepSpeed 0.19.8 ``runtime/config.py``; Transformers 5 ``integrations/deepspeed.py``
(``trainer_config_process``); Accelerate 1 ``utils/dataclasses.py`` (``DeepSpeedPlugin``), ``utils/launch.py``.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import deepspeed_config
from ..config.deepspeed_config import Config
from ..config.options import Options
from ..config.placement import read_hostfile
from ..config.spec import BATCH_KEYS, OFFLOAD_BLOCKS, Configuration, Placement, block_of, offload_device
from ..errors import UsageError
from ..records.json_files import write_json
from ..records.schema import TrialRecord
from ..system.environment import Environment
from ..system.files import write_text
from . import export_readme
from .comparison_report import ComparisonReport

RAW_FILE = "ds_config.json"
TRAINER_FILE = "ds_config_trainer.json"
ACCELERATE_FILE = "ds_config_accelerate.json"
YAML_FILE = "accelerate.yaml"
README_FILE = "README.md"

_SCHEDULER_AUTO = ("warmup_max_lr", "warmup_num_steps", "total_num_steps")


def folder_name(strategy: str) -> str:
    """``ds_config_zero2``; a name read from a file may hold anything, and leads out of no folder."""
    return f"ds_config_{re.sub(r'[^A-Za-z0-9_.-]+', '_', strategy)}"


def require_deepspeed(configuration: Configuration) -> None:
    """Raises UsageError for a row of a reference engine, which has no DeepSpeed configuration."""
    if configuration.is_reference:
        problem = f"{configuration.label} is torch's own engine: there is no DeepSpeed configuration"
        raise UsageError(problem, remedy="export a row that DeepSpeed trained")


def write_exports(
    record: TrialRecord, folder: Path, environment: Environment | None = None, doubt: str | None = None
) -> list[Path]:
    """Writes the five files, replacing older ones whole; returns their paths.

    ``doubt``: a line for the head of its README, where it is not decided that this is the row to use. A row that failed
    is written too, and its README says so. Raises UsageError for a row of a reference engine, where the folder cannot
    be written, or where the configuration holds NaN or an infinity.
    """
    require_deepspeed(record.trial.configuration)
    # Everything that can be refused is made before the folder is.
    raw, trainer, accelerate = raw_config(record), trainer_config(record), accelerate_config(record)
    readme = export_readme.readme(record, raw, trainer, accelerate, trainer_arguments(record), environment, doubt)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Absolute, so that the YAML finds the JSON from whatever folder it is used in.
        yaml = accelerate_yaml(record, folder.resolve() / ACCELERATE_FILE)
        write_json(folder / RAW_FILE, raw)
        write_json(folder / TRAINER_FILE, trainer)
        write_json(folder / ACCELERATE_FILE, accelerate)
        write_text(folder / YAML_FILE, yaml)
        write_text(folder / README_FILE, readme)
    except OSError as error:
        problem = f"cannot write the configurations to {folder}: {error.strerror or error}"
        raise UsageError(problem, remedy="give a folder that you may write to") from None
    except ValueError as error:  # json's for NaN and infinities; mkdir's for a NUL in the name
        raise UsageError(f"cannot export this row: {error}", remedy="mend the value or the folder's name") from None
    return [folder / name for name in (RAW_FILE, TRAINER_FILE, ACCELERATE_FILE, YAML_FILE, README_FILE)]


def write_configuration(
    options: Options, report: ComparisonReport, run_folder: Path, environment: Environment
) -> Path | None:
    """Write the configuration of the recommended row, or of the row of ``--export``. Return its folder, or None."""
    row = report.recommended_row
    if options.export:
        row = next((row for row in report.comparison.rows if row.configuration.name == options.export), None)
    if row is None:  # no row is recommended, or the run was interrupted before the row of --export
        return None
    folder = run_folder / (f"export_{row.configuration.name}" if options.export else "recommended")
    folder.mkdir(parents=True, exist_ok=True)
    doubt = None
    if not options.export and not report.recommendation.decided:
        doubt = report.recommendation.lines[0]
    assert row.last_run.record is not None, "rows of a run have records"
    write_exports(row.last_run.record, folder, environment, doubt)
    if not options.export:
        write_json(folder / "recommendation.json", report.recommendation.to_dict())
    return folder


def raw_config(record: TrialRecord) -> Config:
    """What ran, for ``deepspeed.initialize``: the user's NVMe folder; defaults that differ by version written out."""
    trial = record.trial
    config: Config = copy.deepcopy(dict(trial.ds_config))
    # The trial swapped to a private folder; the export names the one that the user gave.
    if trial.placement.nvme_path is not None:
        config = deepspeed_config.with_swap_folder(config, trial.placement.nvme_path)
    _spell_out_defaults(config, record.ranks[0].resolved_config if record.ranks else {})
    return config


def _spell_out_defaults(config: Config, resolved: Mapping[str, Any]) -> None:
    """Keys whose default DeepSpeed has changed between versions, where the row left them to it."""
    # gradient_clipping was 0 before 0.19.3 and is 1.0 since, pin_memory false before 0.19.5 and true since.
    _take(config, resolved, "gradient_clipping")
    zero, resolved_zero = block_of(config, "zero_optimization"), block_of(resolved, "zero_config")
    if zero.get("stage", 0) != 0:
        _take(zero, resolved_zero, "overlap_comm")
    for key in OFFLOAD_BLOCKS:
        if offload_device(config, key):
            _take(zero[key], block_of(resolved_zero, key), "pin_memory")


def _take(into: Any, resolved: Mapping[str, Any], key: str) -> None:
    if key not in into and resolved.get(key) is not None:
        into[key] = resolved[key]


def trainer_config(record: TrialRecord) -> Config:
    """For ``TrainingArguments(deepspeed=…)``: "auto" where that fills in, literals for everything measured."""
    config = raw_config(record)
    # The Trainer works these out of its arguments and refuses other values (fill_match).
    config.update(dict.fromkeys(BATCH_KEYS, "auto"))
    config["gradient_clipping"] = "auto"
    # Accelerate, which the Trainer uses too, refuses a file without this block (DeepSpeedPlugin).
    config.setdefault("zero_optimization", {"stage": 0})
    # The Trainer holds both against its own flags --bf16 and --fp16.
    for precision in ("bf16", "fp16"):
        config[precision] = {**block_of(config, precision), "enabled": "auto"}
    params = block_of(block_of(config, "optimizer"), "params")
    params.update(dict.fromkeys(_fillable(params), "auto"))
    warmup = block_of(block_of(config, "scheduler"), "params")
    warmup.update({key: "auto" for key in _SCHEDULER_AUTO if key in warmup})
    for path, value in record.trial.configuration.resolved_values.items():
        *names, key = path.split(".")
        block = functools.reduce(block_of, names, config)
        if value is not None and key in block:  # "auto" in the user's own file: the Trainer makes the same of it again
            block[key] = "auto"
    return config


def _fillable(params: Mapping[str, Any]) -> list[str]:
    """Of the optimizer's parameters, those that are of the Trainer's form; another form it refuses, and rightly."""
    betas = params.get("betas")
    found = [key for key in ("lr", "eps", "weight_decay") if _is_number(params.get(key))]
    if isinstance(betas, list | tuple) and len(betas) == 2 and all(map(_is_number, betas)):
        found.append("betas")
    return found


def trainer_arguments(record: TrialRecord) -> dict[str, str]:
    """TrainingArguments that make the "auto" values what ran: name → value as on a command line."""
    config, work = raw_config(record), record.trial.workload
    params = block_of(block_of(config, "optimizer"), "params")
    warmup = block_of(block_of(config, "scheduler"), "params")
    fillable = _fillable(params)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": config.get("train_micro_batch_size_per_gpu", work.batch_size),
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps", work.grad_accum),
        # A scheduler's maximum is the rate that is trained with, whatever the optimizer was made with.
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
    return {name: _argument(value) for name, value in arguments.items() if value is not None}


def _argument(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)


def accelerate_config(record: TrialRecord) -> Config:
    """For ``accelerate.yaml``: the user's code makes optimizer and scheduler; the total follows the world size."""
    config = raw_config(record)
    kind = deepspeed_config.optimizer_kind(config)
    # With these blocks Accelerate wants DummyOptim and DummyScheduler in the user's code (accelerator.py).
    config.pop("optimizer", None)
    config.pop("scheduler", None)
    # The total holds the number of ranks, which num_processes of the YAML may change.
    config["train_batch_size"] = "auto"
    config.setdefault("zero_optimization", {"stage": 0})
    if offload_device(config, "offload_optimizer") and kind not in ("adam", "adamw"):
        # Accelerate would put DeepSpeedCPUAdam in the place of any other optimizer (utils/deepspeed.py).
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def accelerate_yaml(record: TrialRecord, config_file: Path) -> str:
    """For ``accelerate launch --config_file``: processes and files only; Accelerate refuses what the JSON sets too."""
    import yaml

    placement = record.trial.placement
    deepspeed: dict[str, str | bool] = {
        "deepspeed_config_file": str(config_file),
        "zero3_init_flag": record.trial.configuration.stage == 3 and record.trial.workload.zero_init,
    }
    if placement.hostfile is not None:
        deepspeed |= {
            "deepspeed_hostfile": placement.hostfile,
            "deepspeed_multinode_launcher": "pdsh",
        }
        deepspeed |= {"deepspeed_inclusion_filter": placement.include} if placement.include else {}
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": _node_count(record, placement),
        "num_processes": placement.num_gpus,
        "use_cpu": False,
        "deepspeed_config": deepspeed,
    }
    text: str = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=10_000)  # a path stays on its line
    if yaml.safe_load(text) != settings:  # PyYAML writes a next-line character (U+0085) as a line break
        text = yaml.safe_dump(settings, sort_keys=False, width=10_000)
    return text


def _node_count(record: TrialRecord, placement: Placement) -> int:
    if placement.hosts or placement.hostfile is None:
        return placement.num_nodes
    # A hostfile may hold more hosts than took part.
    seen = {rank.hostname for rank in record.ranks}
    if seen:
        return len(seen)
    try:
        return len(read_hostfile(Path(placement.hostfile)))
    except UsageError:  # a row from another machine; the README says to check the count
        return 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
