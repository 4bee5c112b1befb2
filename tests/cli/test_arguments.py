"""The command lines people type: what parses, what it means, and the one line for what cannot be meant."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_bench.cli import commands
from ds_bench.cli.arguments import build_parser, parse
from ds_bench.config.options import Options
from ds_bench.errors import UsageError
from ds_bench.planner import with_row_names


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


def test_help_exits_0_and_shows_defaults_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        zero("--help")
    text = capsys.readouterr().out
    assert (caught.value.code, "local_rank" in text) == (0, False)
    assert all(words in text for words in ("default: 20", "130 interrupted"))


# ------------------------------------------------------------------ refused


def test_a_bad_value_is_one_line_with_flag_value_and_remedy(subtests: pytest.Subtests) -> None:
    for line, flag, value in (
        ("--batch-size -4", "--batch-size", "'-4'"),
        ("--batch-size 2.5", "--batch-size", "'2.5'"),
        ("--batch-size ''", "--batch-size", "''"),
        ("--warmup-steps -1", "--warmup-steps", "'-1'"),
        ("--repeats 0", "--repeats", "'0'"),
        ("--seed -1", "--seed", "'-1'"),
        ("--dropout 1", "--dropout", "'1'"),
        ("--stages 1,7", "--stages", "7"),
        ("--stages", "--stages", ""),
        ("--precision bf61", "--precision", "did you mean bf16?"),
        ("--optimizer adamw", "--optimizer", "did you mean AdamW?"),
        ("--timeout 0", "--timeout", "'0'"),
        ("--timeout nan", "--timeout", "'nan'"),
        ("--timeout inf", "--timeout", "'inf'"),
        ("--profile-steps 51", "--profile-steps", "'51'"),
        ("--model-factory models.build", "--model-factory", "'models.build'"),
        ("--model-factory :build", "--model-factory", "':build'"),
        ("--output-dir ''", "--output-dir", "an empty text is not a path"),
        ("--configs a.json ''", "--configs", "an empty text is not a path"),
        ("--model", "--model", ""),
        ("--bach-size 2", "--bach-size", "did you mean --batch-size?"),
        ("--stage 2", "--stage", "did you mean --stages?"),
        ("gpt2", "gpt2", ""),
    ):
        with subtests.test(line):
            with pytest.raises(UsageError) as caught:
                zero(line)
            text = str(caught.value)
            assert flag in text
            assert value in text
            assert "see zero_stage_comparison.py --help" in text
            assert "\n" not in text
            assert caught.value.exit_code == 2


def test_two_flags_that_contradict_each_other_are_refused_with_the_way_out(subtests: pytest.Subtests) -> None:
    for line, said, remedy in (
        ("--quiet --verbose", "--quiet and --verbose together", "give one of them"),
        ("--retry OOM", "--retry without --resume", "add --resume RUN_DIR"),
        ("--launcher warm --hostfile h", "--launcher warm works on one node", "drop --hostfile"),
        ("--profile-steps 3", "--profile-steps or --profile-ranks without --profile", "add --profile torch"),
        (
            "--nsys-start 24",
            "record steps 24 to 26, but steps 0 to 24 are warm-up and measured",
            "more --profile-steps",
        ),
        ("--nsys-start 99", "--nsys-start 99 is beyond the last step, 26: steps 0 to 24 are", "more --profile-steps"),
        ("--nsys-end 27", "profilers observe 25 to 26", "more --profile-steps"),
        ("--nsys-start 26 --nsys-end 25", "record steps 26 to 25", "among these"),
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
        (zero("--stages 1 2 --relative-to 0"), "one of zero1, zero2"),
        (zero("--export fastest"), "one of zero0, zero1, zero2, zero3"),
        (offload("--export nvme"), "one of none, cpu_optimizer, cpu_full"),
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
        for flag in filter(lambda each: each.startswith("--"), known):
            with pytest.raises(UsageError, match=f"(^|[ /]){re.escape(flag)}[ /:]"):
                parser.parse_args([f"{flag}=--"])
            short = flag[:-1]
            if short not in known and len(short) > 2 and short not in ("--gpu",):
                with pytest.raises(UsageError, match=f"unrecognized arguments: {short}=1"):
                    parser.parse_args([*required_words(parser), f"{short}=1"])


def test_other_names_of_num_gpus_work_wherever_it_does() -> None:
    having = [parser for parser in PARSERS.values() if "--num-gpus" in parser._option_string_actions]
    assert len(having) == 6
    for parser, flag in itertools.product(having, ("--gpus", "--num_gpus")):
        assert parser.parse_args([*required_words(parser), flag, "8"]).num_gpus == 8
