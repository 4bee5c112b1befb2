"""The flags of both scripts: the parser, and ``Options`` made from parsed flags.

Each flag is checked alone, then the flags that must agree. An error names the flag, the value and the remedy.
``docs/flags.md`` is made from this parser by ``scripts/make_flags_page.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.option_declaration import Value
from ..config.options import OPTIONS, Family, Options
from ..config.spec import DEFAULT_PREFETCH, NO_INSPECTION, ProfileName
from ..config.strategies import STRATEGY_NAMES
from ..errors import UsageError
from .argument_types import (
    Parser,
    absolute_path,
    factory,
    fraction,
    integer,
    integer_or_auto,
    path,
    positive_float,
    shard,
    split_names,
)

DEFAULT_ROWS: dict[Family, dict[str, Any]] = {
    "zero": {"stages": (0, 1, 2, 3)},
    "offload": {"strategies": ("none", "cpu_optimizer", "cpu_full")},
}
"""What is compared where no flag names a row."""
_USAGE = "%(prog)s [--model NAME] [--batch-size N] [{rows} ...] [options]"
_ZERO_TEXT = """Compares ZeRO stages on one model: trains it for a few steps under each stage,
every stage in a process tree of its own, and writes a table, JSON and CSV."""
_OFFLOAD_TEXT = """Compares offload strategies on one model: trains it for a few steps under each
strategy, every one in a process tree of its own, and writes a table, JSON and CSV."""
_ZERO_EXAMPLES = """examples:
  %(prog)s --model tiny --seq-length 128
  %(prog)s --model gpt2 --batch-size 4
  %(prog)s --model facebook/opt-1.3b --batch-size 8 --seq-length 512 --num-steps 50 --stages 0 1 2 3
  %(prog)s --model gpt2 --repeats 3 --set zero_optimization.overlap_comm=false
  %(prog)s --resume results/runs/zero_20261121_093000 --retry Timeout

exit codes: 0 a row succeeded, 1 none did, 2 usage or preflight, 130 interrupted"""
_OFFLOAD_EXAMPLES = """examples:
  %(prog)s --model gpt2 --batch-size 4 --strategies none cpu_optimizer cpu_full
  %(prog)s --model meta-llama/Llama-2-7b-hf --batch-size 2 --nvme-path /mnt/nvme
  %(prog)s --model gpt2 --stage 2 --strategies none cpu_optimizer

exit codes: 0 a row succeeded, 1 none did, 2 usage or preflight, 130 interrupted"""


def build_parser(family: Family, prog: str) -> argparse.ArgumentParser:
    """The parser of one script."""
    zero = family == "zero"
    parser = Parser(
        prog=prog,
        usage=_USAGE.format(rows="--stages N" if zero else "--strategies NAME"),
        description=_ZERO_TEXT if zero else _OFFLOAD_TEXT,
        epilog=_ZERO_EXAMPLES if zero else _OFFLOAD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_flags(parser, family)
    # DeepSpeed's launcher adds --local_rank=N (launcher/launch.py), torch.distributed.launch --local-rank=N.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def add_flags_over_recipe(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the scripts without defaults: one that is given replaces a value of the recipe."""
    before = len(parser._actions)
    _add_flags(parser, "recipe")
    # Without a default, the attribute tells that the flag was typed; a default would replace the recipe's value.
    for action in parser._actions[before:]:
        action.default = argparse.SUPPRESS


# fmt: off
_GROUPS = {
    "workload": (
        "model", "batch_size", "common_batch", "seq_length", "grad_accum", "num_steps", "warmup_steps", "precision",
        "activation_checkpointing", "optimizer", "seed", "dropout", "model_factory", "trust_remote_code",
    ),
    "data": ("vocab_size", "data", "data_dtype", "data_workers", "data_pin_memory", "data_prefetch"),
    "comparison": (
        "stages", "strategies", "stage", "configs", "keep_batch", "nvme_path", "repeats", "axes", "relative_to", "goal",
        "export",
    ),
    "hardware": (
        "num_gpus", "accelerator", "launcher", "hostfile", "include", "exclude", "host_command", "env", "master_addr",
        "master_port", "cpu_memory_limit", "gpu_memory_limit", "peak_tflops",
    ),
    "DeepSpeed configuration": ("ds_config", "set"),
    "profiles, of further steps after the measured ones (docs/profiles.md)": (
        "profiles", "profile_steps", "profile_ranks", "nsys_start", "nsys_end",
    ),
    "checkpoints, after the measured steps (docs/checkpoints.md)": ("checkpoint", "checkpoint_path"),
    "run": (
        "output_dir", "timeout", "stall_timeout", "resume", "retry", "shard", "skip_predicted_oom", "force", "dry_run",
        "print_recipe", "format", "quiet", "verbose", "strict", "monitor",
    ),
}
# fmt: on
"""Groups of ``--help``, with the flags of each in order."""
_LACKING: dict[Family, tuple[str, ...]] = {"zero": ("stage",), "offload": ("stages",), "recipe": ("ds_config", "set")}
"""Options for which a script, or the command ``run``, has no flag."""
_OWN_ARGUMENTS: dict[tuple[Family, str], dict[str, Any]] = {
    ("zero", "strategies"): {"choices": STRATEGY_NAMES, "help": "strategies, after the stages"},
    ("offload", "strategies"): {
        "choices": STRATEGY_NAMES,
        "help": "strategies, in this order (default: none cpu_optimizer cpu_full)",
    },
    ("offload", "nvme_path"): {"help": "folder on the NVMe disk; adds the nvme strategy when it is not named"},
}
"""What a script's flag has in place of what ``Options`` declares."""


def _add_flags(parser: argparse.ArgumentParser, family: Family) -> None:
    for title, names in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            if name not in _LACKING[family]:
                flag, arguments = _flag(name)
                group.add_argument(flag, dest=name, **{**arguments, **_OWN_ARGUMENTS.get((family, name), {})})


def _flag(name: str) -> tuple[str, dict[str, Any]]:
    """The flag of an option, and the arguments of ``add_argument`` for it."""
    value, flag = OPTIONS[name].value, OPTIONS[name].flag
    assert flag is not None, f"{name} is an option of recipes alone"
    arguments: dict[str, Any] = {"help": flag.text, "default": value.default}
    if value.kind is bool:
        arguments |= {"action": "store_true"}
    elif value.choices:
        arguments |= {"choices": value.choices, "type": value.kind}
    else:
        arguments |= {"type": _converter(name, value), "metavar": flag.metavar or ("N" if value.kind is int else None)}
    if value.many:
        arguments |= {"nargs": "+"}
    return flag.name, {**arguments, **flag.arguments}


_CONVERTERS = {"model_factory": factory, "checkpoint_path": absolute_path, "shard": shard}
"""What reads the texts of options that have a form of their own."""


def _converter(name: str, value: Value) -> Callable[[str], Any] | None:
    """The function that reads the text of a flag; None where any text will do."""
    if name in _CONVERTERS:
        return _CONVERTERS[name]
    if value.kind is int:
        number = integer_or_auto if value.auto else integer
        return number(value.limits["ge"], value.limits["le"])
    if value.kind is float:
        return fraction if "lt" in value.limits else positive_float
    return path if value.kind is Path else None


def to_options(family: Family, values: argparse.Namespace) -> Options:
    """The parsed flags as Options.

    Raises UsageError if two of them contradict each other, and for a value of an axis or of a file that cannot be used.
    """
    from ..config import axis_rows, deepspeed_config

    given: dict[str, Any] = vars(values).copy()
    given.pop("local_rank")
    given["retry"] = split_names(given["retry"])
    # Of --stages and --stage each script has one.
    for name in ("stages", "strategies", "configs", "profiles", "profile_ranks", "env"):
        given[name] = tuple(given.get(name) or ())
    if not given["stages"] and not given["strategies"] and not given["configs"]:
        given |= DEFAULT_ROWS[family]
    # Each once: rows are told apart by their names, and --resume types --env again.
    for name in ("stages", "strategies", "env"):
        given[name] = tuple(dict.fromkeys(given[name]))
    given["ds_config"] = deepspeed_config.read_changes(given["ds_config"])
    given["set"] = tuple(
        map(deepspeed_config.parse_set, given["set"])
    )  # in order, since the last value of a key decides
    given["axes"] = axis_rows.read_axes(given["axes"])
    return check_options(Options.of(family=family, **given))


def check_options(options: Options) -> Options:
    """The options with the names of the rows that texts of the user mean. Raises UsageError where flags contradict."""
    if options.common_batch and not options.auto_batch:
        raise UsageError("--common-batch without --batch-size auto", remedy="add --batch-size auto")
    if options.auto_batch and options.auto_seq:
        raise UsageError("--batch-size auto with --seq-length auto", remedy="give one of them a number")
    if options.keep_batch and options.auto_batch:
        raise UsageError("--keep-batch with --batch-size auto", remedy="leave one of them out")
    if options.keep_batch and not options.configs:
        raise UsageError("--keep-batch without --configs", remedy="add --configs FILE")
    if options.quiet and options.verbose:
        raise UsageError("--quiet and --verbose together", remedy="give one of them")
    if options.shard is not None and options.csv is not None:
        problem = "output.csv with --shard: each shard would replace the file"
        raise UsageError(problem, remedy="leave it out; report --format csv --output FILE reads all shards")
    if options.retry and options.resume is None:
        raise UsageError("--retry without --resume", remedy="add --resume RUN_DIR")
    _require_data_loader(options)
    if options.launcher == "warm" and options.hostfile is not None:
        raise UsageError("--launcher warm works on one node", remedy="leave --launcher out, or drop --hostfile")
    return replace(
        _with_row_names(options),
        profiles=_profiles(options),
        profile_ranks=tuple(dict.fromkeys(options.profile_ranks)),
        checkpoint=options.checkpoint or options.checkpoint_path is not None,
    )


def _profiles(options: Options) -> tuple[ProfileName, ...]:
    """The profilers, each once, with nsys where it has a window.

    Raises UsageError for a window that holds other steps than those after the measured ones.
    """
    has_window = options.nsys_start >= 0 or options.nsys_end >= 0
    names = dict.fromkeys((*options.profiles, *(("nsys",) if has_window else ())))
    usual = (NO_INSPECTION.profile_steps, NO_INSPECTION.profile_ranks)
    if not names and (options.profile_steps, options.profile_ranks) != usual:
        raise UsageError("--profile-steps or --profile-ranks without --profile", remedy="add --profile torch")
    # Profilers observe steps after the measured ones, so that they disturb none of these.
    steps_before = options.warmup_steps + options.num_steps
    inspection = options.inspection
    observed, window = inspection.profiled_steps(steps_before), inspection.nsys_window(steps_before)
    if not window or window.start < observed.start or window.stop > observed.stop:
        asked_for = f"nsys is to record steps {window.start} to {window.stop - 1}, but"
        if inspection.nsys_end < 0 and window.start >= observed.stop:  # the window has no end of its own
            asked_for = f"--nsys-start {window.start} is beyond the last step, {observed.stop - 1}:"
        raise UsageError(
            f"{asked_for} steps 0 to {observed.start - 1} are warm-up and measured, and profilers observe "
            f"{observed.start} to {observed.stop - 1}",
            remedy="give --nsys-start and --nsys-end among these, or more --profile-steps",
        )
    return tuple(names)


def _require_data_loader(options: Options) -> None:
    """Raises UsageError for settings of a file or of a data loader that there is not."""
    if options.data_dtype is not None and options.data is None:
        raise UsageError("--data-dtype without --data", remedy="add --data FILE")
    # An axis may give rows a data loader, of which the options know nothing.
    varied = "data_workers" in options.axis_names
    if options.data_pin_memory and options.data is None and options.data_workers is None and not varied:
        raise UsageError("--data-pin-memory without a data loader", remedy="add --data-workers N")
    if options.data_prefetch != DEFAULT_PREFETCH and not options.data_workers and not varied:
        problem = f"--data-prefetch {options.data_prefetch} without worker processes"
        raise UsageError(problem, remedy="add --data-workers 1 or more")


def _with_row_names(options: Options) -> Options:
    """The options with the names of the rows that texts of the user mean, such as a stage's number. Raises UsageError.

    Only where there is such a text are the files of ``--configs`` read here: a process that runs nothing may lack them.
    """
    if options.relative_to is None and options.export is None:
        return options
    # Imported here, since --help does without the planner.
    from ..planner import RequestedRow, requested_rows, with_files

    options = with_files(options)
    rows = requested_rows(options)

    def find_row(flag: str, text: str) -> RequestedRow:
        if (row := next((row for row in rows if row.matches(text)), None)) is None:
            raise UsageError(f"{flag} {text}: no such row", remedy=f"one of {', '.join(row.name for row in rows)}")
        return row

    if options.relative_to is not None:
        options = replace(options, relative_to=find_row("--relative-to", options.relative_to).name)
    if options.export is not None:
        row = find_row("--export", options.export)
        if row.engine != "deepspeed":
            problem = (
                f"--export {options.export}: {row.label} is torch's own engine, there is no DeepSpeed configuration"
            )
            raise UsageError(problem, remedy="export a row that DeepSpeed trains")
        options = replace(options, export=row.name)
    return options


def parse(family: Family, prog: str, arguments: Sequence[str]) -> Options:
    """The flags as Options. Raises UsageError; exits with 0 on --help."""
    return to_options(family, build_parser(family, prog).parse_args(list(arguments)))
