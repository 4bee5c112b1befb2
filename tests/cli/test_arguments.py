"""The command lines people type: what parses, what it means, and the one line for what makes no sense."""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_bench.cli import commands
from ds_bench.cli.arguments import ALIASES, build_parser, parse
from ds_bench.config.caveat_texts import CaveatKind
from ds_bench.config.options import Options
from ds_bench.config.rules import RULES
from ds_bench.errors import UsageError
from ds_bench.planning.requested_rows import with_row_names


def zero(line: str) -> Options:
    return parse("zero", "zero_stage_comparison.py", shlex.split(line))


def offload(line: str) -> Options:
    return parse("offload", "offload_comparison.py", shlex.split(line))


MODEL = "meta-llama/Llama-2-7b-hf"
MEANINGS: list[tuple[Options, dict[str, object]]] = [
    (zero(""), {"stages": (0, 1, 2, 3), "strategies": (), "cpu_memory_limit_bytes": None}),
    (offload(""), {"stages": (), "strategies": ("none", "cpu_optimizer", "cpu_full"), "stage": 3}),
    (zero("--strategies zero3_offload"), {"stages": (), "strategies": ("zero3_offload",)}),
    (zero("--stages 2 0 2 0 1"), {"stages": (2, 0, 1), "strategies": ()}),  # each once
    (zero("--stages 1,2 3"), {"stages": (1, 2, 3)}),
    (zero(f"--model {MODEL} --batch-size 8 --seq-length 512 --num-steps 50 --warmup-steps 10 --stages 0 3"),
     {"model": MODEL, "batch_size": 8, "seq_length": 512, "num_steps": 50, "warmup_steps": 10, "stages": (0, 3)}),
    (offload("--batch-size 2 --nvme-path DIR --strategies none,cpu_full nvme cpu_full"),
     {"batch_size": 2, "nvme_path": Path("DIR"), "strategies": ("none", "cpu_full", "nvme")}),
    (zero("--set a=1 --set a=2 --set a=1"), {"set": ({"a": 1}, {"a": 2}, {"a": 1})}),  # the last one decides
    (zero("--resume r --retry 'Timeout, OOM (host),,'"), {"retry": ("Timeout", "OOM (host)")}),
    (zero("--cpu-memory-limit 1.5 --gpu-memory-limit 40"),
     {"cpu_memory_limit_bytes": 1.5 * 2**30, "gpu_memory_limit_bytes": 40 * 2**30}),
    (zero("--model-factory my.models:build"), {"model": "my.models:build", "model_factory": "my.models:build"}),
    (zero("--local_rank=3"), {"num_gpus": None}),  # which launchers add
    (zero("--local-rank 3"), {"num_gpus": None}),
]  # fmt: skip


def test_flags_become_options() -> None:
    for options, facts in MEANINGS:
        assert {name: getattr(options, name) for name in facts} == facts


# ------------------------------------------------------------------ refused


def test_a_bad_value_is_one_line_with_flag_value_and_remedy(subtests: pytest.Subtests) -> None:
    for line, flag, value in (
        ("--batch-size -4", "--batch-size", "'-4'"),
        ("--batch-size 2.5", "--batch-size", "'2.5'"),
        ("--warmup-steps -1", "--warmup-steps", "'-1'"),
        ("--repeats 0", "--repeats", "'0'"),
        ("--dropout 1", "--dropout", "'1'"),
        ("--stages 1,7", "--stages", "7"),
        ("--stages", "--stages", ""),
        ("--optimizer adamw", "--optimizer", "Did you mean 'AdamW'?"),
        ("--timeout 0", "--timeout", "'0'"),
        ("--timeout nan", "--timeout", "'nan'"),
        ("--timeout inf", "--timeout", "'inf'"),
        ("--profile-steps 51", "--profile-steps", "'51'"),
        ("--model-factory :build", "--model-factory", "':build'"),
        ("--configs a.json ''", "--configs", "a path must not be empty"),
        ("--bach-size 2", "--bach-size", "Did you mean --batch-size?"),
        ("--stage 2", "--stage", "Did you mean --stages?"),
        ("gpt2", "gpt2", "Did you mean --model gpt2?"),
        ("train.py", "train.py", "run --configs FILE -- train.py?"),
    ):
        with subtests.test(line):
            with pytest.raises(UsageError) as caught:
                zero(line)
            text = str(caught.value)
            assert flag in text
            assert value in text
            assert (
                text.endswith("See zero_stage_comparison.py --help") or "Did you mean" in text or "Choose from" in text
            )
            assert "\n" not in text


def test_two_flags_that_contradict_each_other_are_refused_with_the_way_out(subtests: pytest.Subtests) -> None:
    for line, said, remedy in (
        ("--quiet --verbose", "--quiet and --verbose cannot be combined", "give one of them"),
        ("--retry OOM", "--retry without --resume", "add --resume RUN_DIR"),
        ("--launcher warm --hostfile h", "--launcher warm works only on one node", "drop --hostfile"),
        ("--profile-steps 3", "--profile-steps or --profile-ranks without --profile", "add --profile torch"),
        ("--nsys-start 24", "steps 0 to 24 are warm-up and measured", "raise --profile-steps"),
        ("--nsys-start 99", "--nsys-start 99 is beyond the last step, 26", "raise --profile-steps"),
        ("--nsys-end 27", "profilers observe 25 to 26", "raise --profile-steps"),
        ("--nsys-start 26 --nsys-end 25", "record steps 26 to 25", "among these"),
        ("--common-batch", "--common-batch", "--batch-size auto"),
        ("--batch-size auto --seq-length auto", "--batch-size auto", "give one of them a number"),
    ):
        with subtests.test(line):
            with pytest.raises(UsageError) as caught:
                zero(line)
            assert said in str(caught.value)
            assert remedy in caught.value.remedy


def test_a_row_is_named_by_its_strategy_or_stage_and_must_be_compared(subtests: pytest.Subtests) -> None:
    for text in ("2", "zero2", "ZeRO-2", "stage 2"):
        options = with_row_names(zero(f"--relative-to '{text}' --export '{text}'"))
        assert (options.relative_to, options.export) == ("zero2", "zero2")
    for options, rows in (
        (zero("--stages 1 2 --relative-to 0"), "Choose from zero1, zero2"),
        (zero("--export fastest"), "Choose from zero0, zero1, zero2, zero3"),
        (offload("--export nvme"), "Choose from none, cpu_optimizer, cpu_full"),
        (zero("--strategies ddp --stages 1 --export ddp"), "torch's own engine"),
    ):
        with subtests.test(rows=rows), pytest.raises(UsageError, match=rows):
            with_row_names(options)


def test_a_window_for_nsys_adds_its_profiler_and_may_be_among_the_steps_after_the_measured_ones() -> None:
    asked = zero("--profile torch,torch --profile-steps 4 --nsys-start 26 --nsys-end 27").inspection
    assert (asked.profiles, list(asked.nsys_window(25))) == (("torch", "nsys"), [26, 27])
    assert list(zero("--profile nsys").inspection.nsys_window(25)) == [25, 26]


# ------------------------------------------------------------------ every flag of every parser


def leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser and every parser below it, by the words that select them."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from leaves(f"{name} {word}", below)


def required_words(parser: argparse.ArgumentParser) -> list[str]:
    """Words that the parser requires."""
    actions = [action for action in parser._actions if action.required]
    word_of = {"command": "models", "action": "save RUN"}
    return " ".join(word_of.get(action.dest, next(iter(action.choices or ["word"]))) for action in actions).split()


PARSERS = {
    "zero": build_parser("zero", "z"),
    "offload": build_parser("offload", "o"),
    **dict(leaves("ds_bench", commands.build_parser())),
}


def test_no_flag_takes_two_dashes_or_is_abbreviated_or_lacks_a_help_text() -> None:
    """argparse drops ``--``; ``plan --gpus 8`` was taken for ``--gpus-per-node 8`` and planned one GPU."""
    for parser in PARSERS.values():
        known = {flag for action in parser._actions for flag in action.option_strings}
        shown = [each for each in parser._actions if not isinstance(each, argparse._SubParsersAction)]
        assert all(action.help for action in shown)
        assert parser.format_help()
        for flag in filter(lambda each: each.startswith("--"), known):
            with pytest.raises(UsageError, match=f"(^|[ /]){re.escape(flag)}[ /:]"):
                parser.parse_args([f"{flag}=--"])
            short = flag[:-1]
            if short not in known and len(short) > 2 and short not in ("--gpu",):
                with pytest.raises(UsageError, match=f"Unknown argument {short}=1"):
                    parser.parse_args([*required_words(parser), f"{short}=1"])


def test_names_of_other_programs_mean_the_flag_wherever_it_is_and_are_in_the_help(subtests: pytest.Subtests) -> None:
    having = [parser for parser in PARSERS.values() if "--num-gpus" in parser._option_string_actions]
    assert len(having) == 6
    for parser, flag in itertools.product(having, ("--gpus", "--num_gpus")):
        assert parser.parse_args([*required_words(parser), flag, "8"]).num_gpus == 8
    for line, own in (
        ("--per_device_train_batch_size 8 --gradient_accumulation_steps=4", "--batch-size 8 --grad-accum 4"),
        (
            "--max_seq_length 64 --deepspeed a.json b.json --bf16",
            "--seq-length 64 --configs a.json b.json --precision bf16",
        ),
        ("--gradient_checkpointing True --fp16=true --bf16 False", "--activation-checkpointing --precision fp16"),
        ("--gradient_checkpointing false --max-seq-length 8", "--seq-length 8"),
        ("--strategies 2,3", "--strategies zero2 zero3"),
    ):
        for name in ("zero", "offload", "ds_bench run", "ds_bench plan"):
            parser = PARSERS[name]
            with subtests.test(line, of=name):
                found, meant = (vars(parser.parse_args(words.split())) for words in (line, own))
                assert {**found, "typed": None} == {**meant, "typed": None}
                assert all(alias in parser.format_help() for alias in ALIASES)
    for words in (["--bf16", "--fp16"], ["--max_seq_length", "8", "--seq-length", "9"]):
        with pytest.raises(UsageError, match=f"{words[0]} and .* set the same flag"):
            PARSERS["zero"].parse_args(words)
    with pytest.raises(UsageError, match="neither True nor False"):
        PARSERS["zero"].parse_args(["--bf16=0"])
    # The arguments of the user's script follow --.
    script = commands.parse(["run", "--configs", "a", "--", "train.py", "--bf16", "True"])[1]["script"]
    assert script == ("train.py", "--bf16", "True")


# ------------------------------------------------------------------ flags that remedies name

PACKAGE = Path(commands.__file__).parents[1]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]*[a-z]")
OF_OTHER_PROGRAMS = {
    "--rdzv-id",
    *("--gpus", "--ipc", "--read-only", "--shm-size", "--tmpfs", "--ulimit"),  # docker run
    *("--gpu-bind", "--me", "--nodes", "--ntasks"),  # Slurm
    "--local-addr",  # torchrun
    "--name",  # in "write each as --name=value"
}


def flags_of(*names: str) -> set[str]:
    """The flags of these parsers, or of all of them."""
    parsers = [PARSERS[name] for name in names or PARSERS]
    return {flag for parser in parsers for action in parser._actions for flag in action.option_strings}


def remedies_of(module: Path) -> Iterator[str]:
    """The texts that a module gives as a remedy."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        names = [node.arg] if isinstance(node, ast.keyword) else []
        names += [name.id for name in getattr(node, "targets", []) if isinstance(name, ast.Name)]
        if any(name and "remedy" in name.lower() for name in names):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def printed_commands() -> Iterator[list[str]]:
    """The fixed words of every command that the program prints."""
    for module in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "invocation.command":
                yield [str(word.value) for word in node.args if isinstance(word, ast.Constant)]


def test_printed_commands_exist_with_their_flags() -> None:
    found = [words for words in printed_commands() if words]
    assert {"ops", "doctor"} <= {verb for verb, *_ in found}
    for verb, *words in found:
        assert {word for word in words if word.startswith("--") and word != "--"} <= flags_of(f"ds_bench {verb}")


def test_the_flags_in_remedies_exist_and_those_of_rules_and_caveats_in_both_scripts_and_in_run() -> None:
    """The scripts differ: one has --stages, the other --stage."""
    known = OF_OTHER_PROGRAMS | flags_of()
    texts = [(module.name, text) for module in sorted(PACKAGE.rglob("*.py")) for text in remedies_of(module)]
    assert len(texts) > 300
    assert [(name, flag) for name, text in texts for flag in FLAG.findall(text) if flag not in known] == []
    rules = [(rule.name, f"{rule.reason} {rule.remedy} {rule.row_remedy}") for rule in RULES]
    rules += [(kind.value, kind.remedy or "") for kind in CaveatKind if kind is not CaveatKind.NOT_SYNCHRONIZED]
    for parser in ("zero", "offload", "ds_bench run"):
        known = flags_of(parser)
        assert [(rule, flag) for rule, text in rules for flag in FLAG.findall(text) if flag not in known] == []
