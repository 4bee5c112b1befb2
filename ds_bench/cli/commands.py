"""``python -m ds_bench COMMAND``, also installed as ``ds-compare``: the flags of every command in one table.

The function of a command takes its flags by their names. Its module is imported when the command runs, so that
``--help`` stays fast.
"""

from __future__ import annotations

import sys

try:
    import argparse
    from collections.abc import Callable, Mapping, Sequence
    from dataclasses import dataclass, field
    from importlib import import_module
    from pathlib import Path
    from typing import Any

    from .. import __version__
    from ..config.options import COUNT, FAIL_ON, FAIL_ON_DEFAULT, GOALS, ROW_FORMATS, TRACKERS
    from ..config.spec import PASS_TYPES, PRECISIONS
    from ..config.strategies import ALIASES, OFFLOAD_NAMES, REFERENCES, ZERO_STAGES
    from ..system import files, invocation, terminal
    from .arguments import (
        ALIASES_TEXT,
        Parser,
        add_flags_over_recipe,
        deepspeed_version,
        flag_of,
        image_size,
        names_from,
        number,
        path,
        split_names,
    )
    from .script import REPORTED_ERRORS, report_error
except KeyboardInterrupt:  # Ctrl-C while these modules are loaded
    print("interrupted", file=sys.stderr)
    sys.exit(130)

Flags = Mapping[str, Mapping[str, Any]]
"""Flag, with any other name after a space, or positional argument → its arguments for ``add_argument``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Purpose and flags of a command, and the function that runs it."""

    purpose: str
    examples: Sequence[str]
    """Arguments after the program's name."""
    function: str = ""
    """``module:function`` below ``ds_bench.cli``; empty for a command with actions."""
    flags: Flags = field(default_factory=dict)
    usage: str | None = None
    actions: Mapping[str, Command] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    terminal.ensure_streams()
    try:
        files.require_working_folder()
        command, values = parse(arguments)
        with terminal.ignoring_broken_pipe():
            return function_of(command)(**values)
    except REPORTED_ERRORS as error:
        return report_error(error)


def parse(arguments: Sequence[str] | None = None) -> tuple[Command, dict[str, Any]]:
    """Return the command and its flags by name, lists as tuples. Raises UsageError; exits with 0 on --help."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    words, script = typed, None
    if typed[:1] == ["run"] and "--" in typed:  # a script and its arguments, which may look like flags
        words, script = typed[: (end := typed.index("--"))], typed[end + 1 :]
    values = vars(build_parser().parse_args(words))
    command: Command = values.pop("run")
    if values.pop("command") == "run":  # run.json keeps its arguments
        values["typed"] = typed[typed.index("run") + 1 :]
    if script is not None:
        values["script"] = script
    values.pop("action", None)
    return command, {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def function_of(command: Command) -> Callable[..., int]:
    """Return the function that runs a command; import its module."""
    module, _, name = command.function.partition(":")
    function: Callable[..., int] = getattr(import_module(f".{module}", __package__), name)
    return function


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of all commands. ``prog``: name of the program in its help; None for the typed name."""
    parser = Parser(prog=prog or invocation.program(), description="Which DeepSpeed configuration should I train with?")
    parser.add_argument("--version", action="version", version=__version__)
    _add_commands(parser, "command", COMMANDS)
    return parser


def _add_commands(parser: argparse.ArgumentParser, kind: str, commands: Mapping[str, Command]) -> None:
    """``kind``: ``command``, or ``action`` for the second word of a command."""
    subparsers = parser.add_subparsers(dest=kind, metavar=kind.upper(), parser_class=Parser)
    for name, command in commands.items():
        lines = [f"  %(prog)s {example}".rstrip() for example in command.examples]
        lines += ["", ALIASES_TEXT] if name in ("plan", "run") else []
        added = subparsers.add_parser(
            name,
            help=command.purpose,
            usage=command.usage,
            description=f"{command.purpose[0].upper()}{command.purpose[1:]}.",
            epilog="\n".join(["examples:" if len(command.examples) > 1 else "example:", *lines]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command.actions:
            _add_commands(added, "action", command.actions)
            continue
        sizes = added.add_mutually_exclusive_group() if "--model-sizes" in command.flags else added
        for flag, facts in command.flags.items():
            (sizes if flag.startswith("--model-size") else added).add_argument(*flag.split(), **facts)
        added.set_defaults(run=command)
        if name == "run":
            add_flags_over_recipe(added)


ALL_STRATEGIES = ("all",)
"""Default of ``plan --strategies``; compared by identity, so that a typed ``all`` is not the default."""
SIZES = ("small", "medium", "large", "xl", "2.7B")
"""Values of ``model-size --model-sizes``; the presets are ``size-small`` to ``size-2.7b``."""
PREDICTED_STRATEGIES = (*(strategy.name for strategy in ZERO_STAGES.values()), *OFFLOAD_NAMES[1:])
"""Values of ``plan --strategies``, in the order of the table, without ``none``, which is the same as ``zero3``."""
_RESULT = "a run folder, its records.jsonl, or its flat JSON, such as zero_comparison_*.json or comparison_*.json"
_RUN = "results/runs/zero_20261121_093000"
_LATER_RUN = "results/runs/zero_20261122_093000"

# fmt: off
_ON: dict[str, Any] = {"action": "store_true"}
_INTEGER: dict[str, Any] = {"type": number(int), "metavar": "N"}
_FILE: dict[str, Any] = {"type": path, "metavar": "FILE"}
_FOLDER: dict[str, Any] = {"type": path, "metavar": "DIR"}
_POSITIVE = number(float, {"gt": 0})
_RESULTS: Flags = {"results": {"nargs": "+", "type": path, "metavar": "RUN_OR_JSON", "help": _RESULT}}
_RESULTS_OR_LATEST: Flags = {"results": {**_RESULTS["results"], "nargs": "*", "default": (),
                                         "help": f"{_RESULT} (default: the latest run in results/)"}}
_JSON: Flags = {"--json": {**_ON, "dest": "as_json", "help": "print JSON"}}
_JUNIT: Flags = {"--junit": {**_FILE, "help": "also write JUnit XML with a test for each row"}}
_RULES: dict[str, Any] = {"type": split_names, "action": "extend", "default": [], "metavar": "RULE,..."}
_CONFIGS: Flags = {
    "--configs": flag_of("configs", default=[], help="your own configurations: DeepSpeed JSON, Accelerate YAML, "
                                                     "Trainer arguments"),
}
_NUM_GPUS: Flags = {"--num-gpus": {**_INTEGER, "default": 1, "help": "GPUs in the whole job (default: 1)"}}
_PRECISION: Flags = {"--precision": {"choices": PRECISIONS, "default": "bf16", "help": "number format (default: bf16)"}}
_GRAD_ACCUM: Flags = {"--grad-accum": flag_of("grad_accum")}
_BASELINES: Flags = {
    "--baselines": {**_FILE, "dest": "file", "default": Path("baselines.json"),
                    "help": "file of baselines (default: baselines.json)"},
}

COMMANDS: Mapping[str, Command] = {
    "plan": Command(
        purpose="predict each strategy's memory, without a GPU or a run",
        examples=("meta-llama/Llama-3.1-8B --num-gpus 8 --gpu 80GB --host-memory 512",
                  "gpt2-xl --gpu 24GB --min-gpus"),
        usage="%(prog)s [MODEL] [--num-gpus N] [--gpu CARD] [options]",
        function="plan:plan_command",
        flags={
            "name": {"nargs": "?", "metavar": "MODEL", "help": "the same as --model"},
            "--model": flag_of("model", help="built-in model, Hub name, folder or config.json (default: gpt2)"),
            "--model-factory": flag_of("model_factory"),
            **_NUM_GPUS,
            "--gpus-per-node": {**_INTEGER, "help": "GPUs in one node (default: all, at most 8)"},
            "--gpu": {"default": "80GB", "metavar": "CARD",
                      "help": "memory that the job may use on each GPU, or a card's name (default: 80GB)"},
            "--host-memory": {"type": _POSITIVE, "metavar": "GB",
                              "help": "host memory of one node; strategies must fit in it too"},
            "--batch-size": {**_INTEGER, "default": 4, "help": "micro-batch per GPU (default: 4)"},
            "--seq-length": {**_INTEGER, "help": "tokens per sequence (default: 512, or the model's limit if lower)"},
            "--varying-lengths": {**_ON, "help": "sequence lengths vary, up to --seq-length; more memory is predicted"},
            "--axis": flag_of("axes", dest="axes"),
            "--lora": flag_of("lora"),
            "--freeze": flag_of("freeze"),
            "--image-tokens": {**_INTEGER, "help": "image tokens in each sequence of a vision-language model"},
            "--image-size": {"type": image_size, "metavar": "WxH",
                             "help": "size in pixels of each sequence's image (default: 448x448, or the model's own)"},
            **_GRAD_ACCUM,
            **_PRECISION,
            "--activation-checkpointing": flag_of("activation_checkpointing"),
            "--strategies": {"nargs": "+", "choices": ("all", *PREDICTED_STRATEGIES, *ALIASES, *REFERENCES),
                             "default": ALL_STRATEGIES,
                             "help": f"strategies to predict; all: {', '.join(PREDICTED_STRATEGIES)} "
                                     "(default: all, or none with --configs)"},
            **_CONFIGS,
            "--keep-batch": {**_ON, "help": "use the batch keys of each file in --configs"},
            "--min-gpus": {**_ON, "help": "also show how many GPUs each strategy needs"},
            "--max-batch": {**_ON, "help": "also show the largest micro-batch of each strategy"},
            "--quick": {**_ON, "help": "judge rows near the GPU's limit by a simple rule; replay no allocations"},
            "--exact": {**_ON, "help": "replay the allocations of every row where this is possible (takes seconds)"},
            "--export": {**_FOLDER, "help": "write to this folder the configuration of each row that fits or is tight"},
            "--online": {**_ON, "help": "also look up names without an organization on the Hub, such as distilgpt2"},
            "--trust-remote-code": flag_of("trust_remote_code"),
            "--verbose": {**_ON, "help": "also print memory by category, and assumptions"},
            "--json": {**_ON, "help": "print JSON with sizes in bytes"},
        },
    ),
    "doctor": Command(
        purpose="check whether this machine is ready, with a remedy for each problem",
        examples=("", "--nvme-path /mnt/nvme --build"),
        function="doctor:run_doctor",
        flags={
            "--nvme-path": {**_FOLDER, "help": "also check the disk of this folder"},
            **_CONFIGS,
            "--hostfile": {**_FILE, "help": "also check these hosts, and whether they can reach each other"},
            "--build": {**_ON, "help": "build the ops that are not built yet (minutes)"},
            "--python": flag_of("python", help="check the packages and ops of this interpreter, for your script"),
            **_JSON,
        },
    ),
    "report": Command(
        purpose="show one or more results again, as text, HTML or plots",
        examples=("--html report.html", "results/runs/* --markdown"),
        function="report:report",
        flags={
            **_RESULTS_OR_LATEST,
            "--html": {**_FILE, "help": "write one self-contained page"},
            "--markdown": {**_ON, "help": "print a Markdown block instead of the table"},
            "--format": {"choices": ("table", "markdown", *ROW_FORMATS), "default": "table", "dest": "output_format",
                         "help": "what to print: the table, or one row per trial with every column (default: table)"},
            "--output": {**_FILE, "help": "write the rows of --format json, csv or parquet to this file"},
            "--plots": {**_FOLDER, "help": "write the charts as PNG and SVG"},
            "--relative-to": {"metavar": "STRATEGY",
                              "help": "row that the Relative column (--verbose, --markdown, --html) compares with "
                                      "(default: the run's own)"},
            "--goal": {"choices": GOALS, "help": "goal of the recommendation (default: the run's own)"},
            "--export": {"metavar": "STRATEGY", "help": "write that row's configuration to ds_config_STRATEGY/"},
            "--verbose": {**_ON, "help": "print more columns, all notes, and next steps for more rows"},
            "--to": {"choices": TRACKERS,
                     "help": "write every trial as a TensorBoard run below tensorboard/: its settings, steps and "
                             "figures (docs/reading.md)"},
        },
    ),
    "compare": Command(
        purpose="compare two results row by row, before and after a change",
        examples=(f"{_RUN} {_LATER_RUN}",),
        function="compare:show_changes",
        flags={
            "before": {"type": path, "metavar": "BEFORE", "help": _RESULT},
            "after": {"type": path, "metavar": "AFTER", "help": _RESULT},
            "--markdown": {**_ON, "help": "print a Markdown table"},
            **_JSON, **_JUNIT,
        },
    ),
    "baseline": Command(
        purpose="save results as baselines; check later ones against them",
        examples=(f"save {_RUN}", f"check {_LATER_RUN}"),
        actions={
            "save": Command(
                purpose="save each row as a baseline under its name",
                examples=(_RUN, "RUN --tolerance 0.1 --baselines ci/baselines.json"),
                function="baseline:save_command",
                flags={
                    **_RESULTS, **_BASELINES,
                    "--tolerance": {"type": number(float, {"ge": 0, "lt": 1}), "metavar": "F",
                                    "help": "how far throughput may fall or memory rise, stored with these entries "
                                            "(default: an existing entry keeps its own, a new one gets 0.05)"},
                },
            ),
            "check": Command(
                purpose="compare results with their baselines; exit 3 if a row is worse, missing or without a baseline",
                examples=(_LATER_RUN, "RUN --fail-on regression,noisy --json"),
                function="baseline:check_command",
                flags={
                    **_RESULTS, **_BASELINES,
                    "--fail-on": {"type": names_from(*FAIL_ON), "default": FAIL_ON_DEFAULT, "metavar": "REASON,...",
                                  "help": "reasons to exit 3: regression, missing (a row of the saved run that the "
                                          "result lacks), unmatched (a row that trained but has no baseline), noisy "
                                          "(default: all but noisy)"},
                    **_JSON, **_JUNIT,
                },
            ),
        },
    ),
    "advice": Command(
        purpose="explain when to use each strategy, and compute by formula how much it saves",
        examples=("--model meta-llama/Llama-2-7b-hf --num-gpus 8",),
        function="advice:show_advice",
        flags={
            "--model": flag_of("model", help="built-in model, local folder or downloaded model (default: gpt2)"),
            **_NUM_GPUS, **_PRECISION, **_GRAD_ACCUM, **_CONFIGS,
        },
    ),
    "run": Command(
        purpose="run the comparison that a recipe describes, for one workload or a sweep of many",
        examples=("recipes/llama2_7b.yaml --set training.seq_len=2048", "recipes/tiny_cpu.yaml --dry-run",
                  "--model gpt2 --strategies all",
                  "--configs a.json b.json --num-gpus 2 -- train.py --deepspeed {config}"),
        usage="%(prog)s [RECIPE] [--set KEY.PATH=VALUE ...] [options] [-- SCRIPT.py ...]",
        function="run:run_command",
        flags={
            "recipe": {"nargs": "?", "type": path, "metavar": "RECIPE",
                       "help": "YAML file (docs/recipes.md); optional: flags alone are enough"},
            "--config": {"type": path, "metavar": "RECIPE", "help": "the same as RECIPE"},
            "--set": {"action": "append", "default": [], "metavar": "KEY.PATH=VALUE", "dest": "settings",
                      "help": "set a key of the recipe, e.g. training.seq_len=2048, or of DeepSpeed, e.g. "
                              "zero_optimization.overlap_comm=false; a list [1024,2048] makes a sweep"},
            "--budget": {"type": _POSITIVE, "metavar": "MINUTES",
                         "help": "start no trial after this many minutes, and list what --resume would run"},
            "--yes": {**_ON, "help": "allow a sweep of more than 10,000 trials"},
        },
    ),
    "model-size": Command(
        purpose="time forward passes, backward passes and training steps of models in five sizes",
        examples=("--model-size small",
                  "--model-sizes small medium large xl 2.7B --pass-type forward train --output sizes.csv"),
        usage="%(prog)s [--model-sizes SIZE ...] [--pass-type PASS ...] [options]",
        function="run:time_sizes",
        flags={
            "--model-size": {"nargs": 1, "choices": SIZES, "help": "one size (default: small)"},
            "--model-sizes": {"nargs": "+", "choices": SIZES, "metavar": "SIZE",
                              "help": "sizes of a GPT-2-like model with a vocabulary of 10,000, one row each: "
                                      f"{', '.join(SIZES)}"},
            "--pass-type": {"nargs": "+", "choices": PASS_TYPES, "default": ["train"], "metavar": "PASS",
                            "help": f"what is timed, one or more of {', '.join(PASS_TYPES)} (default: train)"},
            "--context-length": {**_INTEGER, "type": number(int, {"ge": 2}),
                                 "help": "tokens per sequence (default: 512)"},
            "--batch-size": {**_INTEGER, "default": 4, "help": "sequences per pass (default: 4)"},
            "--measure-steps --num-steps": {**_INTEGER, "default": 10, "help": "measured steps (default: 10)"},
            "--warmup-steps": {**_INTEGER, "type": number(int, {**COUNT, "ge": 0}), "default": 5,
                               "help": "steps run first and left out of all statistics; 0 shows what happens "
                                       "without them (default: 5)"},
            "--device": {"choices": ("auto", "cuda", "cpu"), "default": "auto",
                         "help": "one GPU, or the CPU (default: auto)"},
            "--precision": flag_of("precision"),
            "--no-sync": {**_ON, "help": "wrong on purpose, for teaching: read the clock without waiting for the "
                                         "device, which times only the launch of the work; every row says so"},
            "--output": {"type": path, "metavar": "FILE.csv",
                         "help": "also write the rows to this file, replacing it"},
            "--output-dir": {**_FOLDER, "help": "folder for the results (default: results)"},
            "--timeout": {"type": _POSITIVE, "metavar": "SECONDS",
                          "help": "stop measuring a size after this long (default: 3600)"},
            "--force": flag_of("force"),
            "--dry-run": {**_ON, "help": "print the plan; run nothing"},
        },
    ),
    "models": Command(
        purpose="list the built-in models and their sizes", examples=("",), function="models:list_models"
    ),
    "ops": Command(
        purpose="build the DeepSpeed ops of the built-in strategies ahead of time",
        examples=("",),
        function="ops:build_ops",
    ),
    "explain": Command(
        purpose="explain why one row needs more memory or time than another",
        examples=("zero2 zero3", "none cpu_optimizer results/runs/offload_20261122_093000 --json"),
        function="compare:show_explanation",
        flags={
            "a": {"metavar": "A", "help": "a row: its name, label or stage, such as zero2 or cpu_optimizer"},
            "b": {"metavar": "B", "help": "the row to compare it with"},
            **_RESULTS_OR_LATEST, **_JSON,
        },
    ),
    "axes": Command(
        purpose="list the axes of --axis: the values of each, what it sets and changes, and its source",
        examples=("", "overlap_comm", "--json"),
        function="axes:list_axes",
        flags={"names": {"nargs": "*", "metavar": "NAME", "help": "only these axes (default: all)"}, **_JSON},
    ),
    "check": Command(
        purpose="find wrong, ineffective and unset settings in DeepSpeed configurations, without a GPU",
        examples=("ds_config.json", "configs/*.json --num-gpus 8 --model meta-llama/Llama-2-7b-hf",
                  "ds_config.json --ignore hint,unread-key", "--explain removed-key"),
        function="check:show_findings",
        flags={
            "paths": {"nargs": "*", "type": path, "metavar": "FILE",
                      "help": "DeepSpeed JSON, Accelerate YAML, a folder, or - for stdin"},
            "--num-gpus": {**_INTEGER, "help": "also check the batch sizes for this many GPUs"},
            "--model": {"metavar": "NAME", "help": "also compare buffer sizes with this built-in model"},
            "--deepspeed-version": {"type": deepspeed_version, "metavar": "0.16-0.19",
                                    "help": "the version that will read the files, such as 0.18 or 0.18.2 (default: "
                                            "the installed one)"},
            "--select": {**_RULES, "help": "report only these rules or levels (error, warning, hint)"},
            "--ignore": {**_RULES, "help": "leave out these rules or levels"},
            "--explain": {"metavar": "RULE", "dest": "rule",
                          "help": "explain a rule, with an example, the remedy and the source; all lists the rules"},
            "--format": {"choices": ("text", "github"), "default": "text", "dest": "output_format",
                         "help": "text, or annotations for a GitHub workflow (default: text)"},
            **_JSON,
        },
    ),
}
# fmt: on
