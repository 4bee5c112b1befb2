"""``python -m ds_bench COMMAND``, also installed as ``ds-compare``: the flags of every command.

Each command has one function that adds its flags and one that calls the module of its name. That module is imported
only when its command runs, so that ``--help`` stays fast.
"""

from __future__ import annotations

import sys

try:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import TYPE_CHECKING, Any

    from .. import __version__
    from ..config.options import FAIL_ON, FAIL_ON_DEFAULT, GOALS, ROW_FORMATS, SEQ_LENGTH_HELP, TRACKERS
    from ..config.spec import PASS_TYPES, PRECISIONS
    from ..config.strategies import ALIASES, OFFLOAD_NAMES, REFERENCES, ZERO_STAGES
    from ..errors import UsageError
    from ..system import invocation, terminal
    from .argument_types import Parser, factory, fraction, integer, names_from, path, positive_float
    from .arguments import add_flags_over_recipe
    from .model_size import SIZES
    from .script import run_program
except KeyboardInterrupt:  # Ctrl-C while these modules are loaded
    print("interrupted", file=sys.stderr)
    sys.exit(130)

if TYPE_CHECKING:
    from .plan import PlanOptions

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""

    def run_command() -> int:
        # Parsed within run_program, which turns the error of a wrong flag into one line and exit code 2.
        values = build_parser().parse_args(arguments)
        command: Command = values.run
        with terminal.ignoring_broken_pipe():
            return command(values)

    terminal.ensure_streams()
    return run_program("ds_bench", run_command)


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands. ``run`` of the parsed arguments is the command's function.

    ``prog``: name of the program in its help; None for the name that was typed.
    """
    parser = Parser(prog=prog or invocation.program(), description="Which DeepSpeed configuration should I train with?")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (add_flags, purpose, examples) in COMMANDS.items():
        add_flags(_add_command(commands, name, purpose, examples))
    return parser


def _add_command(
    commands: argparse._SubParsersAction[Parser], name: str, purpose: str, examples: Sequence[str]
) -> Parser:
    """A command whose help says what it is for and how it is called."""
    lines = [f"  %(prog)s {example}".rstrip() for example in examples]
    return commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog="\n".join(["examples:" if len(lines) > 1 else "example:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


_ALL_STRATEGIES = ["all"]
"""Value of ``--strategies`` of ``plan`` where the flag is not typed."""
PREDICTED_STRATEGIES = (*(strategy.name for strategy in ZERO_STAGES.values()), *OFFLOAD_NAMES[1:])
"""Values of ``plan --strategies``, in the order of the table, without ``none``, which is the same as ``zero3``."""
_RESULT = "a run folder, its records.jsonl, or its flat JSON, such as zero_comparison_*.json or comparison_*.json"


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=path, metavar="RUN_OR_JSON", help=_RESULT)


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_results(parser)
    parser.add_argument("--html", type=path, metavar="FILE", help="write one self-contained page")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown block instead of the table")
    parser.add_argument(
        "--format",
        choices=("table", "markdown", *ROW_FORMATS),
        default="table",
        help="what to print: the table, or one row per trial with every column (default: table)",
    )
    parser.add_argument(
        "--output", type=path, metavar="FILE", help="write the rows of --format json, csv or parquet to this file"
    )
    parser.add_argument("--plots", type=path, metavar="DIR", help="write the charts as PNG and SVG")
    parser.add_argument("--relative-to", metavar="STRATEGY", help="row that ratios refer to (default: the run's own)")
    parser.add_argument("--goal", choices=GOALS, help="goal of the recommendation (default: the run's own)")
    parser.add_argument("--export", metavar="STRATEGY", help="write that row's configuration to ds_config_STRATEGY/")
    parser.add_argument("--verbose", action="store_true", help="print every column, all notes and all next steps")
    parser.add_argument(
        "--to",
        choices=TRACKERS,
        help="write every trial as a TensorBoard run with its settings, steps and figures (docs/monitor.md)",
    )
    parser.set_defaults(run=_report)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=path, help=_RESULT)
    parser.add_argument("after", type=path, help=_RESULT)
    _add_junit(parser)
    parser.set_defaults(run=_compare)


def _add_junit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--junit", type=path, metavar="FILE", help="also write JUnit XML with a test for each row")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a row: its name, label or stage, such as zero2 or cpu_optimizer")
    parser.add_argument("b", metavar="B", help="the row that is held against it")
    _add_results(parser)
    parser.add_argument("--json", action="store_true", help="print JSON with sizes in bytes and times in seconds")
    parser.set_defaults(run=_explain)


def _add_baseline(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=Parser)
    save = _add_command(
        actions,
        "save",
        "keep these results as the baselines of their names",
        ["results/runs/zero_20261121_093000", "RUN --tolerance 0.1 --baselines ci/baselines.json"],
    )
    check = _add_command(
        actions,
        "check",
        "exit 3 when a result is worse than its baseline",
        ["results/runs/zero_20261122_093000", "RUN --fail-on regression,noisy --json"],
    )
    for action in (save, check):
        _add_results(action)
        action.add_argument(
            "--baselines",
            type=path,
            default=Path("baselines.json"),
            metavar="FILE",
            help="file of baselines (default: baselines.json)",
        )
    save.add_argument(
        "--tolerance",
        type=fraction,
        metavar="F",
        help="loss that still passes, stored with these entries (default: 0.05)",
    )
    check.add_argument(
        "--fail-on",
        type=names_from(*FAIL_ON),
        default=FAIL_ON_DEFAULT,
        metavar="REASON,...",
        help="what exits 3: regression, missing (a row of the saved run that the result lacks), unmatched (a row "
        "without a baseline), noisy (default: all but noisy)",
    )
    check.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    _add_junit(check)
    save.set_defaults(run=_baseline_save)
    check.set_defaults(run=_baseline_check)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [--model NAME] [--num-gpus N] [--gpu CARD] [options]"
    add = parser.add_argument
    add("--model", default="gpt2", metavar="NAME", help="preset, local path, or with --online a Hub name")
    add("--model-factory", type=factory, metavar="PKG.MOD:FN", help="function that returns your own model")
    add("--num-gpus", type=integer(1), default=1, metavar="N", help="GPUs of the whole job (default: 1)")
    add("--gpus-per-node", type=integer(1), metavar="N", help="GPUs of one node (default: all, 8 at most)")
    add("--gpu", default="80GB", metavar="CARD", help="a card's name or its memory (default: 80GB)")
    add(
        "--host-memory",
        type=positive_float,
        metavar="GB",
        help="memory of one node, which the strategies must fit in too",
    )
    add("--batch-size", type=integer(1), default=4, metavar="N", help="micro-batch per GPU (default: 4)")
    add("--seq-length", type=integer(1), metavar="N", help=SEQ_LENGTH_HELP)
    add("--grad-accum", type=integer(1), default=1, metavar="N", help="micro-batches per optimizer step (default: 1)")
    add("--precision", choices=PRECISIONS, default="bf16", help="number format (default: bf16)")
    add("--activation-checkpointing", action="store_true", help="recompute activations in the backward pass")
    add(
        "--strategies",
        nargs="+",
        choices=("all", *PREDICTED_STRATEGIES, *ALIASES, *REFERENCES),
        default=_ALL_STRATEGIES,
        help="strategies to predict (default: all, or none with --configs)",
    )
    _add_configs(parser)
    add("--keep-batch", action="store_true", help="the batch keys of each file of --configs rule")
    add("--min-gpus", action="store_true", help="also show how many GPUs each strategy needs")
    add("--max-batch", action="store_true", help="also show the largest micro-batch of each strategy")
    add("--online", action="store_true", help="ask the Hub for a model that is neither a preset nor a folder")
    add("--trust-remote-code", action="store_true", help="run modelling code that comes with the model")
    add("--verbose", action="store_true", help="also print memory by category, DeepSpeed's estimates and assumptions")
    add("--json", action="store_true", help="print JSON with sizes in bytes")
    parser.set_defaults(run=_plan)


def _add_configs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--configs",
        nargs="+",
        type=path,
        default=[],
        metavar="FILE_OR_DIR",
        help="configurations of your own: DeepSpeed JSON, Accelerate YAML, a Trainer's arguments",
    )


def _plan(values: argparse.Namespace) -> int:
    from .plan import plan_command

    return plan_command(plan_options(values))


def plan_options(values: argparse.Namespace) -> PlanOptions:
    """The parsed flags of ``plan``."""
    from .plan import PlanOptions

    # By identity, which tells that the flag was not typed: --configs alone means these files alone.
    names = [] if values.configs and values.strategies is _ALL_STRATEGIES else values.strategies
    names = PREDICTED_STRATEGIES if "all" in names else tuple(dict.fromkeys(names))
    return PlanOptions(**{**_flags(values), "strategies": names})


def _flags(values: argparse.Namespace) -> dict[str, Any]:
    """The flags of a command by their names, lists as tuples."""
    flags = {name: value for name, value in vars(values).items() if name not in ("command", "run")}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nvme-path", type=path, metavar="DIR", help="also check this disk's folder")
    _add_configs(parser)
    parser.add_argument(
        "--hostfile", type=path, metavar="FILE", help="also check its hosts, and how they reach each other"
    )
    parser.add_argument("--build", action="store_true", help="build the ops that are not built yet (minutes)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(values: argparse.Namespace) -> int:
    from .doctor import show_findings

    return show_findings(values.nvme_path, values.build, values.json, values.configs, values.hostfile)


def _add_advice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt2", metavar="NAME", help="preset or local folder (default: gpt2)")
    parser.add_argument(
        "--num-gpus", type=integer(1), default=1, metavar="N", help="GPUs of the whole job (default: 1)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="number format (default: bf16)")
    parser.add_argument(
        "--grad-accum", type=integer(1), default=1, metavar="N", help="micro-batches per optimizer step (default: 1)"
    )
    _add_configs(parser)
    parser.set_defaults(run=_advice)


def _advice(values: argparse.Namespace) -> int:
    from .advice import show_advice

    return show_advice(values.model, values.num_gpus, values.precision, values.grad_accum, values.configs)


def _report(values: argparse.Namespace) -> int:
    from .report import ReportOptions, report

    flags = _flags(values)
    if flags.pop("markdown"):
        if values.format not in ("table", "markdown"):
            raise UsageError(f"--markdown and --format {values.format} together", remedy="give one of them")
        flags["format"] = "markdown"
    return report(ReportOptions(**flags))


def _compare(values: argparse.Namespace) -> int:
    from .compare import show_changes

    return show_changes(values.before, values.after, values.junit)


def _explain(values: argparse.Namespace) -> int:
    from .explain import show_explanation

    return show_explanation(values.a, values.b, values.results, values.json)


def _baseline_save(values: argparse.Namespace) -> int:
    from .baseline import save_command

    return save_command(values.results, values.baselines, values.tolerance)


def _baseline_check(values: argparse.Namespace) -> int:
    from .baseline import check_command

    return check_command(values.results, values.baselines, values.json, values.fail_on, values.junit)


def _add_recipe_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [RECIPE] [--set KEY.PATH=VALUE ...] [options]"
    add = parser.add_argument
    add("recipe", nargs="?", type=path, metavar="RECIPE", help="YAML file (docs/recipes.md); without it flags alone")
    add("--config", type=path, metavar="RECIPE", help="the same file, as other programs spell it")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="a value that replaces the recipe's, e.g. training.seq_len=2048, or DeepSpeed's, e.g. "
        "zero_optimization.overlap_comm=false; a list [1024,2048] makes a sweep",
    )
    add(
        "--budget",
        type=positive_float,
        metavar="MINUTES",
        help="begin no further trial after so many minutes, and list what --resume runs",
    )
    add("--yes", action="store_true", help="plan a sweep of more than 10,000 trials")
    add_flags_over_recipe(parser)
    # With this default the parser keeps the words that were typed, which run.json stores.
    parser.set_defaults(run=_recipe_run, typed=())


def _recipe_run(values: argparse.Namespace) -> int:
    from .run import run_command

    if None not in (values.recipe, values.config):
        raise UsageError(f"{values.recipe} and --config {values.config}", remedy="give one recipe")
    values.recipe = values.recipe or values.config
    return run_command(values)


def _add_model_size(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [--model-sizes SIZE ...] [--pass-type PASS ...] [options]"
    sizes = parser.add_mutually_exclusive_group()
    meaning = "sizes, each a row: a model like GPT-2 with a vocabulary of 10,000"
    # One word as a list, so that both flags hold the same type.
    sizes.add_argument("--model-size", nargs=1, choices=SIZES, help="one size (default: small)")
    sizes.add_argument("--model-sizes", nargs="+", choices=SIZES, metavar="SIZE", help=f"{meaning}: {', '.join(SIZES)}")
    add = parser.add_argument
    add(
        "--pass-type",
        nargs="+",
        choices=PASS_TYPES,
        default=["train"],
        metavar="PASS",
        help=f"what is timed, one or more of {', '.join(PASS_TYPES)} (default: train)",
    )
    add("--context-length", type=integer(2), metavar="N", help="tokens per sequence (default: 512)")
    add("--batch-size", type=integer(1), default=4, metavar="N", help="sequences per pass (default: 4)")
    add("--measure-steps", type=integer(1), default=10, metavar="N", help="measured steps (default: 10)")
    add(
        "--warmup-steps",
        type=integer(0),
        default=5,
        metavar="N",
        help="steps run first and left out of every statistic; 0 shows what they are for (default: 5)",
    )
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="one GPU, or the CPU (default: auto)")
    add(
        "--precision",
        choices=("auto", *PRECISIONS),
        default="auto",
        help="number format (default: auto = bf16 where the device has it)",
    )
    add(
        "--no-sync",
        action="store_true",
        help="wrong on purpose, for teaching: read the clock without waiting for the device, which then shows how long "
        "it takes to launch the work; all its rows say so",
    )
    add("--output", type=path, metavar="FILE.csv", help="also write the rows to this file, which is replaced")
    add("--output-dir", type=path, metavar="DIR", help="folder of the results (default: results)")
    add("--timeout", type=positive_float, metavar="SECONDS", help="end a size that takes longer (default: 3600)")
    add("--force", action="store_true", help="run also what is predicted to need more than 1.5 times the host memory")
    add("--dry-run", action="store_true", help="print the plan, run nothing")
    parser.set_defaults(run=_model_size)


def _model_size(values: argparse.Namespace) -> int:
    from .model_size import time_sizes

    return time_sizes(values)


def _models(_values: argparse.Namespace) -> int:
    from .models import list_models

    return list_models()


def _ops(_values: argparse.Namespace) -> int:
    from .ops import build_ops

    return build_ops()


def _add_axes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="these axes alone (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_axes)


def _axes(values: argparse.Namespace) -> int:
    from .axes import list_axes

    return list_axes(values.names, values.json)


def _add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", type=path, metavar="FILE", help="DeepSpeed JSON, Accelerate YAML, a folder, or - for stdin")
    add("--num-gpus", type=integer(1), metavar="N", help="also check the batch sizes for this number of GPUs")
    add("--model", metavar="NAME", help="also compare buffer sizes with this built-in model")
    add(
        "--format", choices=("text", "github"), default="text", help="github: annotations of a workflow (default: text)"
    )
    add("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_check)


def _check(values: argparse.Namespace) -> int:
    from .check import show_findings

    return show_findings(
        values.files,
        num_gpus=values.num_gpus,
        model=values.model,
        output_format=values.format,
        as_json=values.json,
    )


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str, list[str]]] = {
    "plan": (
        _add_plan,
        "predict each strategy's memory, without a GPU and without running",
        [
            "--model meta-llama/Llama-2-7b-hf --num-gpus 8 --gpu 80GB --host-memory 512",
            "--model gpt2-xl --gpu 24GB --min-gpus",
        ],
    ),
    "doctor": (_add_doctor, "is this machine ready? each check with its remedy", ["", "--nvme-path /mnt/nvme --build"]),
    "report": (
        _add_report,
        "show results again, several together, as text, HTML or plots",
        ["results/runs/zero_20261121_093000 --html report.html", "results/runs/* --markdown"],
    ),
    "compare": (
        _add_compare,
        "two results row by row, before and after a change",
        ["results/runs/zero_20261121_093000 results/runs/zero_20261122_093000"],
    ),
    "baseline": (
        _add_baseline,
        "keep results as baselines; check others against them",
        ["save results/runs/zero_20261121_093000", "check results/runs/zero_20261122_093000"],
    ),
    "advice": (
        _add_advice,
        "when to use each strategy, and what it saves this model, by formula",
        ["--model meta-llama/Llama-2-7b-hf --num-gpus 8"],
    ),
    "run": (
        _add_recipe_run,
        "compare what a recipe asks for, one workload or a sweep of many",
        [
            "recipes/llama2_7b.yaml --set training.seq_len=2048",
            "recipes/tiny_cpu.yaml --dry-run",
            "--model gpt2 --strategies all",
        ],
    ),
    "model-size": (
        _add_model_size,
        "time forward, backward and training steps of models of five sizes",
        ["--model-size small", "--model-sizes small medium large xl 2.7B --pass-type forward train --output sizes.csv"],
    ),
    "models": (
        lambda parser: parser.set_defaults(run=_models),
        "list the built-in models with their counted parameters",
        [""],
    ),
    "ops": (
        lambda parser: parser.set_defaults(run=_ops),
        "build the DeepSpeed ops that comparisons use, ahead of time",
        [""],
    ),
    "explain": (
        _add_explain,
        "why one row needs more memory or time than another",
        ["zero2 zero3 results/runs/zero_20261121_093000", "none cpu_optimizer RUN --json"],
    ),
    "axes": (
        _add_axes,
        "list the axes of --axis: values, what each sets and changes, and its source",
        ["", "overlap_comm", "--json"],
    ),
    "check": (
        _add_check,
        "what is wrong, ineffective or left open in DeepSpeed configurations, without a GPU",
        ["ds_config.json", "configs/*.json --num-gpus 8 --model meta-llama/Llama-2-7b-hf"],
    ),
}
"""Name → function that adds its flags, what it is for, and arguments of examples; in the order of the help."""
