"""A user's own training script as the workload: its command, its placeholders, and the options that it excludes."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import UsageError

ConfigSource = Literal["command", "accelerate_env", "override"]
"""How a row's configuration reaches the script: as ``{config}`` in its command, in Accelerate's variables, or in place
of the one that the script gives to DeepSpeed."""
OWN_KEYS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler",
    "bf16", "bfloat16", "fp16", "torch_autocast", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
)  # fmt: skip
"""Keys that keep the script's values when its configuration is replaced; ``ds_bench_script_hook`` has a copy."""
PLACEHOLDERS = ("config", "row", "stage", "num_gpus", "output_dir", "micro_batch", "grad_accum")
_NAMES = "|".join(PLACEHOLDERS)
_PLACEHOLDER = re.compile(rf"\{{\{{({_NAMES})\}}\}}|\{{({_NAMES})\}}")
_LAUNCHERS = re.compile(r"python[\d.]*|torchrun|deepspeed|accelerate")
_LAUNCHING_MODULES = ("torch.distributed.", "accelerate", "deepspeed")
"""Prefixes of the names of modules that start ranks."""
_REFUSED = (
    "model.name", "model.factory", "model.trust_remote_code",
    "training.local_batch_size", "training.global_batch_size", "training.seq_len", "training.grad_accum",
    "training.precision", "training.activation_checkpointing", "training.dropout", "training.lora", "training.freeze",
    "training.seed", "training.pass_type", "training.synchronized",
    "configurations.keep_batch", "configurations.common_batch",
    "dataset", "dataloader", "optimizer", "profiling",
    "launch.cpu_memory_limit", "launch.gpu_memory_limit", "launch.skip_predicted_oom",
    "output.monitor", "output.checkpoint", "output.checkpoint_path",
)  # fmt: skip
"""Keys of recipes, and sections, that describe the built-in training loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script and how it is started."""

    command: tuple[str, ...]
    """``train.py`` or ``-m`` and a module, and its arguments, with placeholders."""
    digest: str | None
    """Hash of the file; None for a module that is not below the current folder."""
    python: str
    """The interpreter that runs it."""
    config_source: ConfigSource
    engine: str | None = None
    """Name of the measured engine (its model's class); None: the one that steps first."""

    @property
    def file(self) -> Path | None:
        """The script's file; None for a module that is not below the current folder."""
        if self.command[0] != "-m":
            return Path(self.command[0])
        path = Path(*self.command[1].split("."))
        return next(filter(Path.is_file, [path.with_suffix(".py"), path / "__main__.py"]), None)

    @property
    def name(self) -> str:
        """The file's name, or the module's."""
        return self.command[1] if self.command[0] == "-m" else Path(self.command[0]).name

    def uses(self, placeholder: str) -> bool:
        return any(match[2] == placeholder for word in self.command for match in _PLACEHOLDER.finditer(word))

    def accelerate_variables(self, config: Path) -> dict[str, str]:
        """Variables that give Accelerate a configuration; none if it reaches the script another way."""
        if self.config_source != "accelerate_env":
            return {}
        return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}

    def words(self, values: Mapping[str, object]) -> list[str]:
        """Return the command with ``values`` in place of the placeholders; ``{{config}}`` becomes ``{config}``."""

        def value(match: re.Match[str]) -> str:
            return f"{{{match[1]}}}" if match[1] else str(values[match[2]])

        return [_PLACEHOLDER.sub(value, word) for word in self.command]


def read_script(
    command: Sequence[str], *, python: str | None, override: bool, accelerate_env: bool, engine: str | None
) -> Script:
    """Return the script of a command line. Raises UsageError for one that cannot be started as it is."""
    first = command[0]
    launches = first == "-m" and "".join(command[1:2]).startswith(_LAUNCHING_MODULES)
    if launches or _LAUNCHERS.fullmatch(Path(first).name):
        launcher = " ".join(command[: 2 if launches else 1])
        raise UsageError(
            f"{launcher} after --: ds_bench starts the ranks itself, with torchrun's variables",
            remedy=f"give only the script: -- {shlex.join(_without_launcher(command))}",
        )
    if first == "-m":
        if len(command) < 2:
            raise UsageError("-m names no module", remedy="give -- -m PACKAGE.MODULE and its arguments")
    else:
        file = Path(first)
        if file.suffix != ".py":
            raise UsageError(f"{first} is not a Python file", remedy="give -- SCRIPT.py or -- -m MODULE")
        if file.is_dir():
            raise UsageError(f"{first} is a folder", remedy="give the file in it, or -m and its module")
        if not file.is_file():
            raise UsageError(f"the script {first} does not exist", remedy="give its path from the current folder")
    for word in command:
        if (name := re.fullmatch(r"\{(\w+)\}", word)) is None or name[1] in PLACEHOLDERS:
            continue
        if near := difflib.get_close_matches(name[1], PLACEHOLDERS, n=1):
            problem = f"{word} in the script's arguments is not a placeholder"
            raise UsageError(problem, remedy=f"write {{{near[0]}}}")
    if override and accelerate_env:
        problem = "--override-config and --accelerate-env cannot be combined"
        raise UsageError(problem, remedy="give the one by which the script gets its configuration")
    script = Script(
        command=tuple(command),
        digest=None,
        python=find_python(python),
        config_source="override" if override else "accelerate_env" if accelerate_env else "command",
        engine=engine,
    )
    if not (override or accelerate_env or script.uses("config")):
        ways = "{config} among the script's arguments, --accelerate-env, or --override-config"
        raise UsageError("the script would not receive the row's configuration", remedy=f"give one of: {ways}")
    return script if script.file is None else replace(script, digest=file_digest(script.file))


def find_python(python: str | None) -> str:
    """Return the path of the script's interpreter. Raises UsageError."""
    if python is None:
        return sys.executable
    # Not resolved: a virtual environment is found through the link to its interpreter.
    found = shutil.which(os.path.abspath(python) if "/" in python else python)  # noqa: PTH100
    if found is None:
        raise UsageError(f"--python {python} is not a program", remedy="give the interpreter, e.g. VENV/bin/python")
    return found


def _without_launcher(command: Sequence[str]) -> Sequence[str]:
    for number, word in enumerate(command):
        module = word == "-m" and not "".join(command[number + 1 : number + 2]).startswith(_LAUNCHING_MODULES)
        if (module and command[number + 1 :]) or word.endswith(".py"):
            return command[number:]
    return ("train.py",)


def file_digest(path: str | Path) -> str | None:
    """Return the hash of a file; None for one that cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def reject_workload_keys(paths: Collection[str], spell: Mapping[str, str]) -> None:
    """Raise UsageError for a key of a recipe that describes the built-in training loop. ``spell``: key → its flag."""
    for path in paths:
        if any(path == refused or path.startswith(f"{refused}.") for refused in _REFUSED):
            problem = f"{spell.get(path, path)} and a script cannot be combined: the script decides it"
            raise UsageError(problem, remedy="leave it out, or give it among the script's own arguments")


def placeholder_values(script: Script, name: str, config: Mapping[str, Any], num_gpus: int) -> dict[str, object]:
    """Return the values of the placeholders that the row decides. Raises UsageError for one that its file lacks."""
    values: dict[str, object] = {"row": name, "num_gpus": num_gpus}
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else int(bool(zero))
    for placeholder, value, key in (
        ("stage", stage, "zero_optimization.stage"),
        ("micro_batch", config.get("train_micro_batch_size_per_gpu"), "train_micro_batch_size_per_gpu"),
        ("grad_accum", config.get("gradient_accumulation_steps"), "gradient_accumulation_steps"),
    ):
        if script.uses(placeholder):
            if type(value) is not int:
                problem = f"{{{placeholder}}} in the script's arguments: {key} of {name} is {value!r}"
                raise UsageError(problem, remedy=f"give {key} a number in that file")
            values[placeholder] = value
    return values
