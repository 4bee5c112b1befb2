"""The flags of both scripts: the parser, and ``Options`` made from parsed flags.

Each flag is checked alone, then the flags that must agree. An error names the flag, the value and the remedy.
``docs/flags.md`` is made from this parser by ``scripts/make_flags_page.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.deepspeed_config import OPTIMIZERS
from ..config.options import (
    DEFAULT_BATCH_SIZE,
    GOALS,
    MAX_PORT,
    MAX_RANKS,
    MAX_REPEATS,
    Family,
    Options,
)
from ..config.spec import (
    DEFAULT_PREFETCH,
    MAX_DATA_WORKERS,
    MAX_PREFETCH,
    MONITORS,
    MOST_PROFILE_STEPS,
    MULTI_NODE_LAUNCHERS,
    NO_INSPECTION,
    PROFILES,
    Inspection,
)
from ..config.strategies import STRATEGY_NAMES
from ..config.token_file import TOKEN_TYPES
from ..errors import UsageError
from .argument_types import (
    Parser,
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
_STRATEGIES_HELP: dict[Family, str] = {
    "zero": "strategies, after the stages",
    "offload": "strategies, in this order (default: none cpu_optimizer cpu_full)",
    "recipe": "strategies, after the stages; all: every stage and offload strategy in one table",
}
_USAGE = "%(prog)s [--model NAME] [--batch-size N] [{rows} ...] [options]"
SEQ_LENGTH_HELP = "tokens per sequence (default: 512, or the model's positions where it has fewer)"
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
        allow_abbrev=False,
    )
    _add_workload(parser)
    _add_data(parser)
    _add_comparison(parser, family)
    _add_hardware(parser)
    _add_config(parser)
    _add_profiling(parser)
    _add_checkpoint(parser)
    _add_run(parser)
    # DeepSpeed's launcher adds --local_rank=N (launcher/launch.py), torch.distributed.launch --local-rank=N.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def add_flags_over_recipe(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the scripts without defaults: one that is given replaces a value of the recipe."""
    before = len(parser._actions)
    _add_workload(parser)
    _add_data(parser)
    _add_comparison(parser, "recipe")
    _add_hardware(parser)
    _add_profiling(parser)
    _add_checkpoint(parser)
    _add_run(parser)
    # Without a default, the attribute tells that the flag was typed; a default would replace the recipe's value.
    for action in parser._actions[before:]:
        action.default = argparse.SUPPRESS


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--model", default="gpt2", metavar="NAME", help="preset, local path or Hub name (default: gpt2)")
    add(
        "--batch-size",
        type=integer_or_auto(1),
        default=DEFAULT_BATCH_SIZE,
        metavar="N",
        help="micro-batch per GPU, in sequences; auto: the largest that trains, for each row by itself (default: 4)",
    )
    add(
        "--common-batch",
        action="store_true",
        help="with --batch-size auto: also rows at the largest that all of them train",
    )
    add(
        "--seq-length",
        type=integer_or_auto(1),
        metavar="N",
        help=f"{SEQ_LENGTH_HELP}; auto: the longest that trains, for each row by itself",
    )
    add("--grad-accum", type=integer(1), default=1, metavar="N", help="micro-batches per optimizer step (default: 1)")
    add("--num-steps", type=integer(1), default=20, metavar="N", help="measured optimizer steps (default: 20)")
    add(
        "--warmup-steps",
        type=integer(0),
        default=5,
        metavar="N",
        help="steps run first and left out of every statistic (default: 5)",
    )
    add(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="number format (default: auto = bf16 where the device has it)",
    )
    add("--activation-checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--optimizer", choices=OPTIMIZERS, help="optimizer of every row (default: AdamW)")
    add("--seed", type=integer(0, 2**32 - 1), default=42, metavar="N", help="seed of weights and data (default: 42)")
    add(
        "--dropout",
        type=fraction,
        metavar="P",
        help="probability of every dropout in the model, from 0 to below 1 (default: the model's own)",
    )
    add("--model-factory", type=factory, metavar="PKG.MOD:FN", help="function that returns your own model")
    add("--trust-remote-code", action="store_true", help="run modelling code that comes with the model")


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add(
        "--vocab-size",
        type=integer(1),
        metavar="N",
        help="draw random ids below N, and refuse a file that has others (default: the model's number of ids)",
    )
    add(
        "--data",
        type=path,
        metavar="FILE",
        help="train on the token ids of this file, through a data loader (default: random ids)",
    )
    add(
        "--data-dtype",
        choices=TOKEN_TYPES,
        help="type of the file's ids (default: as its suffix says, .uint16 or .uint32)",
    )
    add(
        "--data-workers",
        type=integer(0, MAX_DATA_WORKERS),
        metavar="N",
        help="worker processes of the data loader, 0: the rank itself (default: 0 with --data, else no data loader)",
    )
    add("--data-pin-memory", action="store_true", help="the data loader copies micro-batches to page-locked memory")
    add(
        "--data-prefetch",
        type=integer(1, MAX_PREFETCH),
        default=DEFAULT_PREFETCH,
        metavar="N",
        help="micro-batches that each worker process loads ahead (default: 2)",
    )


def _add_comparison(parser: argparse.ArgumentParser, family: Family) -> None:
    add = parser.add_argument_group("comparison").add_argument
    if family != "offload":
        add(
            "--stages",
            type=int,
            nargs="+",
            choices=(0, 1, 2, 3),
            help="ZeRO stages, in this order (default: 0 1 2 3, without --strategies)",
        )
    add(
        "--strategies",
        nargs="+",
        choices=("all", *STRATEGY_NAMES) if family == "recipe" else STRATEGY_NAMES,
        help=_STRATEGIES_HELP[family],
    )
    if family != "zero":
        add("--stage", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage of the offload strategies (default: 3)")
    add(
        "--configs",
        nargs="+",
        type=path,
        metavar="FILE_OR_DIR",
        help="configurations of your own, each file one row: DeepSpeed JSON, Accelerate YAML, a Trainer's arguments",
    )
    add(
        "--keep-batch",
        action="store_true",
        help="the batch keys of each file of --configs rule, not --batch-size and --grad-accum",
    )
    add(
        "--nvme-path",
        type=path,
        metavar="DIR",
        help="folder on the NVMe disk"
        + ("" if family != "offload" else "; adds the nvme strategy when it is not named"),
    )
    add(
        "--repeats",
        type=integer(1, MAX_REPEATS),
        default=1,
        metavar="R",
        help="runs of every row, in rounds whose order is rotated and reversed; 3 or more give intervals (default: 1)",
    )
    add(
        "--axis",
        action="append",
        default=[],
        metavar="NAME=V1,V2,...",
        help="make a row of each value, in every row where it acts, e.g. overlap_comm=true,false; several make every "
        "combination (python -m ds_bench axes lists them)",
    )
    add("--relative-to", metavar="STRATEGY", help="row that ratios refer to (default: the first good one)")
    add(
        "--goal",
        choices=GOALS,
        default="balanced",
        help="what the recommendation is for: the fastest row, the least memory, or both (default: balanced)",
    )
    add(
        "--export",
        metavar="STRATEGY",
        help="write this row's configuration for DeepSpeed, Trainer and Accelerate (default: the recommended row's)",
    )


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("hardware").add_argument
    add("--num-gpus", type=integer(1, MAX_RANKS), metavar="N", help="GPUs, or CPU ranks (default: all GPUs, or 1 rank)")
    add("--accelerator", choices=("auto", "cuda", "cpu"), default="auto", help="device type (default: auto)")
    add(
        "--launcher",
        choices=("auto", "warm", "deepspeed"),
        default="auto",
        help="warm: ranks forked from one preloaded process; deepspeed: its launcher for every trial (default: auto)",
    )
    add(
        "--hostfile",
        type=path,
        metavar="FILE",
        help="DeepSpeed hostfile: the hosts of every trial, which ssh must reach (docs/many_nodes.md)",
    )
    add("--include", metavar="HOST[:SLOTS]@...", help="hosts and slots of the hostfile to use, e.g. a@b:0,1")
    add("--exclude", metavar="HOST[:SLOTS]@...", help="hosts and slots of the hostfile to leave out, e.g. a@b:0,1")
    add(
        "--multi-node-launcher",
        choices=MULTI_NODE_LAUNCHERS,
        help="program with which DeepSpeed starts ranks on several nodes (default: pdsh)",
    )
    add("--master-addr", metavar="ADDR", help="address of the first host that all others reach (default: its first)")
    add("--master-port", type=integer(1, MAX_PORT), metavar="PORT", help="port of it (default: a free one)")
    add(
        "--launcher-args",
        metavar="ARGS",
        help="further arguments of that program as one text, e.g. --launcher-args='--mca btl_tcp_if_include ib0'",
    )
    add(
        "--cpu-memory-limit",
        type=positive_float,
        metavar="GB",
        help="limit of each rank's data, enforced by the kernel, in GB (2^30)",
    )
    add("--gpu-memory-limit", type=positive_float, metavar="GB", help="emulate a GPU of this memory, in GB (2^30)")
    add(
        "--peak-tflops",
        type=positive_float,
        metavar="T",
        help="dense peak of one GPU in TFLOP/s, for MFU (default: known GPUs)",
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("DeepSpeed configuration").add_argument
    add("--ds-config", type=path, metavar="FILE", help="JSON file whose values replace those of every configuration")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="a value that replaces every configuration's, e.g. zero_optimization.overlap_comm=false; may be repeated",
    )


def _add_profiling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "profiles, of further steps after the measured ones (docs/profiles.md)"
    ).add_argument
    add(
        "--profile",
        dest="profiles",
        nargs="+",
        choices=PROFILES,
        default=(),
        help="torch: trace and table of operators; memory: what allocates it; nsys: a window for Nsight Systems; "
        "flops, comms: DeepSpeed's profilers of operations and of communication",
    )
    add(
        "--profile-steps",
        type=integer(1, MOST_PROFILE_STEPS),
        default=NO_INSPECTION.profile_steps,
        metavar="N",
        help="steps that each profiler observes (default: 2)",
    )
    add(
        "--profile-ranks",
        type=integer(0, MAX_RANKS),
        nargs="+",
        default=NO_INSPECTION.profile_ranks,
        metavar="RANK",
        help="ranks that write a profile (default: 0)",
    )
    add(
        "--nsys-start",
        type=integer(-1),
        default=-1,
        metavar="STEP",
        help="first step that nsys records, numbered from 0, the first warm-up step; adds --profile nsys (default: -1, "
        "the first after the measured ones)",
    )
    add(
        "--nsys-end",
        type=integer(-1),
        default=-1,
        metavar="STEP",
        help="last step that nsys records (default: -1, the last that --profile-steps gives)",
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints, after the measured steps (docs/checkpoints.md)").add_argument
    add(
        "--checkpoint",
        action="store_true",
        help="save, convert and load a checkpoint of every row, and time it; its files are removed afterwards",
    )
    add(
        "--checkpoint-path",
        type=_absolute,
        metavar="DIR",
        help="folder on the disk to save to; adds --checkpoint (default: the folder of the results)",
    )


def _absolute(text: str) -> str:
    return str(path(text).absolute())


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add(
        "--output-dir",
        type=path,
        default=Path("results"),
        metavar="DIR",
        help="folder of the results, created when missing (default: results)",
    )
    add(
        "--timeout",
        type=positive_float,
        default=3600.0,
        metavar="SECONDS",
        help="end a trial that takes longer (default: 3600)",
    )
    add(
        "--stall-timeout",
        type=positive_float,
        default=600.0,
        metavar="SECONDS",
        help="end a trial without a sign of life for so long; until the first step, growth of memory and disk I/O are "
        "signs too (default: 600)",
    )
    add(
        "--resume",
        type=path,
        metavar="RUN_DIR",
        help="run what is missing of an earlier run on the same machine, with its flags; flags that run code or reach "
        "other machines, and values that may be credentials, must be given again",
    )
    add("--retry", default="", metavar="CLASS,...", help="with --resume: also rows with this outcome, e.g. Timeout,OOM")
    add(
        "--shard",
        type=shard,
        metavar="I/N",
        help="run the I-th of N parts of the plan's trials; report reads the results of all parts together "
        "(docs/recipes.md)",
    )
    add(
        "--skip-predicted-oom",
        action="store_true",
        help="leave out rows that are predicted not to fit; never one that may",
    )
    add(
        "--force",
        action="store_true",
        help="run also what is predicted to need more than 1.5 times the host memory there is",
    )
    add("--dry-run", action="store_true", help="print each trial's configuration and command, run nothing")
    add("--print-recipe", action="store_true", help="print the recipe that makes the same comparison, run nothing")
    add("--format", choices=("table", "markdown", "json"), default="table", help="form of the summary (default: table)")
    add("--quiet", action="store_true", help="print the summary only")
    add("--verbose", action="store_true", help="also print every trial's caveats and files as they come")
    add("--strict", action="store_true", help="exit 1 when any row failed")
    add(
        "--monitor",
        nargs="?",
        const="steps",
        choices=MONITORS,
        help="write loss, memory and throughput of each step to steps.jsonl in the trial's folder while it runs; "
        "tensorboard: to TensorBoard's files too (default with no value: steps)",
    )


def to_options(family: Family, values: argparse.Namespace) -> Options:
    """The parsed flags as Options.

    Raises UsageError if two of them contradict each other, and for a value of an axis or of a file that cannot be used.
    """
    from ..config import axis_rows, overrides

    given: dict[str, Any] = vars(values).copy()
    given.pop("local_rank")
    given["retry"] = split_names(given["retry"])
    # Each script lacks a flag of the other: --stages of one, --stage (below) of the other.
    given.setdefault("stages", None)
    given["configs"] = tuple(given["configs"] or ())
    if given["stages"] is None and given["strategies"] is None and not given["configs"]:
        given |= DEFAULT_ROWS[family]
    # Each once, since rows are told apart by their names.
    for name in ("stages", "strategies"):
        given[name] = tuple(dict.fromkeys(given[name] or ()))
    given["ds_config"] = overrides.read_file(given["ds_config"])
    given["set"] = tuple(map(overrides.parse_set, given["set"]))  # in order, since the last value of a key decides
    given["axes"] = axis_rows.read_axes(given.pop("axis"))
    given.setdefault("stage", 3)
    for name in ("profiles", "profile_ranks"):
        given[name] = tuple(given[name])
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
        options,
        relative_to=_row_name(options, "relative_to"),
        export=_row_name(options, "export"),
        inspection=_check_inspection(options),
    )


def _check_inspection(options: Options) -> Inspection:
    """The inspection with a checkpoint where a folder is given for one, with nsys where it has a window, and with each
    profiler and rank once.

    Raises UsageError for a window that holds other steps than those after the measured ones.
    """
    asked = options.inspection
    has_window = asked.nsys_start >= 0 or asked.nsys_end >= 0
    names = (*asked.profiles, *(("nsys",) if has_window else ()))
    inspection = replace(
        asked,
        profiles=tuple(dict.fromkeys(names)),
        profile_ranks=tuple(dict.fromkeys(asked.profile_ranks)),
        checkpoint=asked.checkpoint or asked.checkpoint_path is not None,
    )
    usual = (NO_INSPECTION.profile_steps, NO_INSPECTION.profile_ranks)
    if not names and (asked.profile_steps, asked.profile_ranks) != usual:
        raise UsageError("--profile-steps or --profile-ranks without --profile", remedy="add --profile torch")
    # Profilers observe steps after the measured ones, so that they disturb none of these.
    steps_before = options.warmup_steps + options.num_steps
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
    return inspection


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


def _row_name(options: Options, field: str) -> str | None:
    """The name of the row that the text of a flag means, such as a stage's number. Raises UsageError."""
    text = getattr(options, field)
    if text is None:
        return None
    # Imported here, since --help does without the planner.
    from ..planner import read_files, requested_rows

    rows = requested_rows(options, read_files(options)[0])
    if (row := next((row for row in rows if row.matches(text)), None)) is None:
        names = ", ".join(row.name for row in rows)
        raise UsageError(f"--{field.replace('_', '-')} {text}: no such row", remedy=f"one of {names}")
    if field == "export" and row.engine != "deepspeed":
        problem = f"--export {text}: {row.label} is torch's own engine, there is no DeepSpeed configuration"
        raise UsageError(problem, remedy="export a row that DeepSpeed trains")
    return row.name


def parse(family: Family, prog: str, arguments: Sequence[str]) -> Options:
    """The flags as Options. Raises UsageError; exits with 0 on --help."""
    return to_options(family, build_parser(family, prog).parse_args(list(arguments)))
