"""The parsers of both scripts' flags and of ``run``, built from the declarations in ``config.options``.

``scripts/make_flags_page.py`` writes ``docs/flags.md`` from these parsers.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..config.deepspeed_keys import MINOR_VERSIONS
from ..config.options import COUNT, EMPTY_PATH, MAX_NUMBER, OPTIONS, SCRIPT_OPTIONS, Family, Options
from ..config.shard import Shard
from ..config.strategies import STRATEGY_NAMES
from ..errors import UsageError
from ..system import invocation

DEFAULT_ROWS: dict[Family, dict[str, Any]] = {
    "zero": {"stages": (0, 1, 2, 3)},
    "offload": {"strategies": ("none", "cpu_optimizer", "cpu_full")},
}
_USAGE = "%(prog)s [--model NAME] [--batch-size N] [{rows} ...] [options]"
_ZERO_TEXT = """Compares ZeRO stages on one model: trains it for a few steps under each stage,
each in its own process tree, and writes a table, JSON and CSV."""
_OFFLOAD_TEXT = """Compares offload strategies on one model: trains it for a few steps under each
strategy, each in its own process tree, and writes a table, JSON and CSV."""
_ZERO_EXAMPLES = """examples:
  %(prog)s --model tiny --seq-length 128
  %(prog)s --model gpt2 --batch-size 4
  %(prog)s --model facebook/opt-1.3b --batch-size 8 --seq-length 512 --num-steps 50 --stages 0 1 2 3
  %(prog)s --model gpt2 --repeats 3 --set zero_optimization.overlap_comm=false
  %(prog)s --resume results/runs/zero_20261121_093000 --retry Timeout

exit codes: 0 a row succeeded, 1 none did, 2 usage or preflight, 130 interrupted

{aliases}"""
_OFFLOAD_EXAMPLES = """examples:
  %(prog)s --model gpt2 --batch-size 4 --strategies none cpu_optimizer cpu_full
  %(prog)s --model meta-llama/Llama-2-7b-hf --batch-size 2 --nvme-path /mnt/nvme
  %(prog)s --model gpt2 --stage 2 --strategies none cpu_optimizer

exit codes: 0 a row succeeded, 1 none did, 2 usage or preflight, 130 interrupted

{aliases}"""
ALIASES: Mapping[str, tuple[str, ...]] = {
    "--per_device_train_batch_size": ("--batch-size",),
    "--gradient_accumulation_steps": ("--grad-accum",),
    "--gradient_checkpointing": ("--activation-checkpointing",),
    "--max_seq_length": ("--seq-length",),
    "--bf16": ("--precision", "bf16"),
    "--fp16": ("--precision", "fp16"),
    "--deepspeed": ("--configs",),
    "--gpus": ("--num-gpus",),
}
"""Flag of another program (TrainingArguments and SFTConfig, launchers) → the flag here that does the same."""
_SWITCHES = ("--gradient_checkpointing", "--bf16", "--fp16")
"""Aliases that may be followed by ``True`` or ``False``, as other programs allow."""
ALIASES_TEXT = "names from other tools:\n" + "\n".join(
    f"  {alias:<30} = {' '.join(words)}" for alias, words in ALIASES.items()
)


def build_parser(family: Family, prog: str) -> Parser:
    """Build the parser of one script."""
    zero = family == "zero"
    parser = Parser(
        prog=prog,
        usage=_USAGE.format(rows="--stages N" if zero else "--strategies NAME"),
        description=_ZERO_TEXT if zero else _OFFLOAD_TEXT,
        epilog=(_ZERO_EXAMPLES if zero else _OFFLOAD_EXAMPLES).format(aliases=ALIASES_TEXT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_flags(parser, family)
    # DeepSpeed's launcher adds --local_rank=N (launcher/launch.py), torch.distributed.launch --local-rank=N.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def add_flags_over_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the scripts' flags without defaults: a given flag replaces a value of the recipe."""
    before = len(parser._actions)
    _add_flags(parser, "recipe")
    # Without a default, only typed flags have an attribute; a default would replace the recipe's value.
    for action in parser._actions[before:]:
        action.default = argparse.SUPPRESS


# fmt: off
_GROUPS = {
    "workload": (
        "model", "batch_size", "common_batch", "seq_length", "grad_accum", "num_steps", "warmup_steps", "precision",
        "activation_checkpointing", "optimizer", "seed", "dropout", "lora", "freeze", "model_factory",
        "trust_remote_code",
    ),
    "data": ("vocab_size", "data", "data_dtype", "data_workers", "data_pin_memory", "data_prefetch"),
    "comparison": (
        "stages", "strategies", "stage", "configs", "base_config", "keep_batch", "nvme_path", "repeats", "axes",
        "relative_to", "goal", "export",
    ),
    "hardware": (
        "num_gpus", "accelerator", "launcher", "hostfile", "include", "exclude", "host_command", "env", "master_addr",
        "master_port", "cpu_memory_limit", "gpu_memory_limit", "peak_tflops",
    ),
    "your own training script, after -- (docs/own_work.md)": (
        "python", "override_config", "accelerate_env", "engine",
    ),
    "DeepSpeed configuration": ("ds_config", "set"),
    "profiling, in extra steps after the measured ones (docs/reading.md)": (
        "profiles", "profile_steps", "profile_ranks", "nsys_start", "nsys_end",
    ),
    "checkpoints, after the measured steps (docs/metrics.md)": ("checkpoint", "checkpoint_path"),
    "run": (
        "output_dir", "timeout", "stall_timeout", "resume", "retry", "shard", "skip_predicted_oom", "force", "dry_run",
        "print_recipe", "format", "quiet", "verbose", "strict", "monitor",
    ),
}
# fmt: on
"""Groups of ``--help``, with the flags of each in order."""
_OPTIONS_WITHOUT_FLAG: dict[Family, tuple[str, ...]] = {
    "zero": ("stage", *SCRIPT_OPTIONS),
    "offload": ("stages", *SCRIPT_OPTIONS),
    "recipe": ("ds_config", "set"),
}
"""Options without a flag in a script or in the command ``run``."""
_OWN_ARGUMENTS: dict[tuple[Family, str], dict[str, Any]] = {
    ("zero", "strategies"): {
        "choices": STRATEGY_NAMES,
        "help": "strategies, listed after the stages; none: no offload",
    },
    ("offload", "strategies"): {
        "choices": STRATEGY_NAMES,
        "help": "strategies, in the order given; none: no offload (default: none cpu_optimizer cpu_full)",
    },
    ("offload", "nvme_path"): {"help": "folder on the NVMe disk; adds the strategy nvme"},
}
"""Per-script overrides of flag choices and help."""


def _add_flags(parser: argparse.ArgumentParser, family: Family) -> None:
    for title, names in _GROUPS.items():
        if own := [name for name in names if name not in _OPTIONS_WITHOUT_FLAG[family]]:
            group = parser.add_argument_group(title)
            for name in own:
                arguments = {**flag_of(name), **_OWN_ARGUMENTS.get((family, name), {})}
                group.add_argument(str(OPTIONS[name].flag), dest=name, **arguments)


def flag_of(name: str, **overrides: Any) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for an option's flag. ``overrides``: the command's own
    arguments, which take precedence."""
    option = OPTIONS[name]
    arguments: dict[str, Any] = {"help": option.help, "default": option.default}
    if option.kind is bool:
        arguments |= {"action": "store_true"}
    elif option.choices:
        arguments |= {"choices": option.choices, "type": option.kind}
    else:
        types = {Path: path, int: number(int, option.limits, option.auto), float: number(float, option.limits)}
        metavar = option.metavar or ("N" if option.kind is int else None)
        arguments |= {"type": _TYPES.get(name, types.get(option.kind)), "metavar": metavar}
    if option.many:
        arguments |= {"nargs": "+"}
    return {**arguments, **option.arguments, **overrides}


def to_options(family: Family, values: argparse.Namespace) -> Options:
    """Convert the parsed flags to Options.

    Raises UsageError if two of them contradict each other, or if a value of an axis or in a file is unusable.
    """
    from ..config import axis_rows, deepspeed_config

    given: dict[str, Any] = vars(values).copy()
    given.pop("local_rank")
    given["retry"] = split_names(given["retry"])
    # Each script has only one of --stages and --stage.
    for name in ("stages", "strategies", "configs", "profiles", "profile_ranks", "env"):
        given[name] = tuple(given.get(name) or ())
    if not given["stages"] and not given["strategies"] and not given["configs"]:
        given |= DEFAULT_ROWS[family]
    # Remove duplicates: rows are identified by their names, and --resume repeats --env.
    for name in ("stages", "strategies", "env"):
        given[name] = tuple(dict.fromkeys(given[name]))
    given["ds_config"] = deepspeed_config.read_changes(given["ds_config"])
    given["set"] = tuple(map(deepspeed_config.parse_set, given["set"]))
    given["axes"] = axis_rows.read_axes(given["axes"])
    return Options.of(family=family, **given).checked()


def parse(family: Family, prog: str, arguments: Sequence[str]) -> Options:
    """Parse the flags into Options. Raises UsageError; exits with 0 on --help."""
    return to_options(family, build_parser(family, prog).parse_args(list(arguments)))


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, which is printed on one line like every other error.

    The line suggests a flag or value with a similar name. Flags cannot be abbreviated, but may be written with
    underscores or as one of their ``ALIASES``. Commas may separate values chosen from a list.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **arguments})

    def error(self, message: str, near: str | None = None) -> NoReturn:
        """Raise UsageError. ``near``: what was probably meant."""
        # argparse's own words.
        problem = message.removeprefix("argument ").replace("the following arguments are required:", "Missing")
        raise UsageError(problem, remedy=f"did you mean {near}?" if near else f"see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here; argparse would leave them to the parent of a subcommand's parser."""
        values, unknown = super().parse_known_args(self.with_own_flags(args), namespace)
        commands = next((action for action in self._actions if isinstance(action, argparse._SubParsersAction)), None)
        if unknown:
            shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
            flags = [flag for action in shown for flag in action.option_strings]
            name = unknown[0].partition("=")[0]
            # --steps means --num-steps, although the spelling of --stages is closer.
            ending = next((flag for flag in flags if flag.endswith(name.replace("--", "-", 1))), None)
            near = _nearest(name, flags, 0.9) or (ending if name.startswith("--") else None) or _nearest(name, flags)
            scripts = [word for word in unknown if word.endswith(".py")]
            if scripts and "--configs" in flags:
                near = invocation.command("run", "--configs", "FILE", "--", *scripts)
            elif not unknown[0].startswith("-") and "--model" in flags:
                near = None if getattr(values, "name", None) else f"--model {unknown[0]}"
            kind = "Unknown" if unknown[0].startswith("-") else "Unexpected"
            self.error(f"{kind} argument {unknown[0]}", near)
        # The subcommand is not marked as required: argparse would report it before an unknown flag.
        if commands is not None and getattr(values, commands.dest) is None:
            self.error(f"Missing {commands.metavar}")
        return values, unknown

    def with_own_flags(self, words: Sequence[str]) -> list[str]:
        """Return the words with other programs' flag names replaced by this parser's.

        Raises UsageError if one flag is given under two names.
        """
        own, waiting, names = list[str](), list(words), dict[str, str]()
        while waiting:
            name, equals, value = (word := waiting.pop(0)).partition("=")
            alias = name.replace("-", "_").replace("__", "--", 1)
            flag, *values = ALIASES.get(alias, (name.replace("_", "-"),))
            is_own = name in self._option_string_actions or flag not in self._option_string_actions
            if not is_own and alias in _SWITCHES and (equals or (waiting and waiting[0].lower() in ("true", "false"))):
                if (given := (value if equals else waiting.pop(0)).lower()) not in ("true", "false"):
                    raise UsageError(
                        f"{name} {value!r} is neither True nor False", remedy=f"give {name} True, or leave it out"
                    )
                if given == "false":
                    continue
                equals = ""
            if (other := names.setdefault(name if is_own else flag, name)) != name:
                raise UsageError(f"{other} and {name} set the same flag", remedy="give only one of them")
            own += [word] if is_own else [f"{flag}={value}" if equals else flag, *values]
        return own

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse drops the value of --flag=-- and checks neither its type nor how many values are left.
        if action.option_strings and "--" in arg_strings:
            self.error(f"{'/'.join(action.option_strings)}: -- is not a value")
        # Split before argparse checks each word against the choices. It refuses a string of nothing but commas.
        if action.nargs == "+" and action.choices is not None:
            arg_strings = [part for text in arg_strings for part in text.split(",") if part] or arg_strings
            # A strategy may be given by its stage.
            arg_strings = [f"zero{text}" if f"zero{text}" in action.choices else text for text in arg_strings]
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices, name = [*map(str, action.choices)], " or ".join(action.option_strings)
            near = _nearest(str(value), choices)
            remedy = f"did you mean {near!r}?" if near else f"choose from {', '.join(choices)}"
            problem = f"Invalid value for {name}: {value!r}" if name else f"Unknown {action.dest} {value!r}"
            raise UsageError(problem, remedy=remedy)


def _nearest(text: str, known: Iterable[str], similarity: float = 0.7) -> str | None:
    """Return the name in ``known`` that ``text`` most likely misspells, or None."""
    by_lower_case = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(text.casefold(), by_lower_case, n=1, cutoff=similarity)
    return by_lower_case[near[0]] if near else None


# ------------------------------------------------------------------ values of flags

AUTO = "auto"


def number(kind: type, limits: Mapping[str, Any] = COUNT, auto: bool = False) -> Callable[[str], Any]:
    """Return a parser for a number within ``limits``, named as pydantic names them. ``auto``: accept "auto" too."""
    least, above = limits.get("ge", -math.inf), limits.get("gt", -math.inf)
    upper = f" and below {limits['lt']}" if "lt" in limits else ""
    range_text = f"above {above}" if "gt" in limits else f"of at least {least}{upper}"
    what = f"a whole number of at least {least}" if kind is int else f"a number {range_text}"

    def convert(text: str) -> Any:
        if auto and text == AUTO:
            return AUTO
        try:
            value = kind(text)
        except ValueError:
            value = math.nan  # outside every range
        if not (least <= value < limits.get("lt", math.inf) and value > above):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}")
        if value > limits.get("le", MAX_NUMBER):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than {limits.get('le', MAX_NUMBER)}")
        return value

    return convert


def image_size(text: str) -> tuple[int, int]:
    """Parse width and height in pixels: ``1024x768``, or one number for a square."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and 0 < int(part) <= MAX_NUMBER for part in parts):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size in pixels, for example 1024x768")
    return int(parts[0]), int(parts[-1])


def path(text: str) -> Path:
    """Parse a path. Refuse an empty string, as left by an unset shell variable: it would mean the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(EMPTY_PATH)
    return Path(text)


def deepspeed_version(text: str) -> str:
    """Parse a supported version: ``0.18``, ``0.18.2``."""
    minor = re.fullmatch(r"(\d+\.\d+)(\.\d+)?", text)
    if minor is None or minor[1] not in MINOR_VERSIONS:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not {', '.join(MINOR_VERSIONS)} or a release of one of these, such as 0.18.2"
        )
    return text


def factory(text: str) -> str:
    """Parse ``package.module:function``."""
    module, _, function = text.partition(":")
    if not module or not function:
        raise argparse.ArgumentTypeError(f"{text!r} is not package.module:function")
    return text


def shard(text: str) -> Shard:
    """Parse a part of a plan: ``3/8``."""
    try:
        return Shard.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_TYPES: dict[str, Callable[[str], Any]] = {
    "model_factory": factory,
    "checkpoint_path": lambda text: str(path(text).absolute()),
    "shard": shard,
}
"""Parsers of options whose values have their own format."""


def split_names(text: str) -> tuple[str, ...]:
    """Return the comma-separated names in a string."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def names_from(*choices: str) -> Callable[[str], tuple[str, ...]]:
    """Return a parser for one or more of ``choices``, separated by commas."""

    def convert(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(split_names(text)))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(choices)}")
        if not names:
            raise argparse.ArgumentTypeError(f"{text!r} names none of {', '.join(choices)}")
        return names

    return convert
