"""What holds for every flag of every parser: no abbreviations, no ``--`` as a value, other names of ``--num-gpus``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from ds_bench.cli import arguments, commands
from ds_bench.errors import UsageError


def leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser and every parser below it, by the words that select them."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from leaves(f"{name} {word}", below)


def required_words(parser: argparse.ArgumentParser) -> list[str]:
    """What the parser cannot do without."""
    actions = [action for action in parser._actions if action.required]
    word_of = {"command": "models", "action": "save RUN", "num_gpus": "--num-gpus=1"}
    words = [word_of.get(action.dest, next(iter(action.choices or ["word"]))) for action in actions]
    return " ".join(words).split()


PARSERS = dict(
    [
        ("zero", arguments.build_parser("zero", "zero.py")),
        ("offload", arguments.build_parser("offload", "offload.py")),
        *leaves("ds_bench", commands.build_parser()),
    ]
)


@pytest.mark.parametrize("name", PARSERS)
def test_two_dashes_are_no_value_of_any_flag(name: str) -> None:
    """argparse drops them and passes an empty list on, unconverted."""
    parser = PARSERS[name]
    for flag in [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]:
        with pytest.raises(UsageError, match=f"(^|[ /]){re.escape(flag)}[ /:]"):
            parser.parse_args([f"{flag}=--"])


@pytest.mark.parametrize("name", PARSERS)
def test_no_flag_can_be_abbreviated(name: str) -> None:
    """``plan --gpus 8`` was taken for ``--gpus-per-node 8`` and planned one GPU."""
    parser = PARSERS[name]
    known = {flag for action in parser._actions for flag in action.option_strings}
    for flag in known:
        for short in {flag[:length] for length in range(3, len(flag))} - known - {"--gpus", "--num_gpus"}:
            with pytest.raises(UsageError, match=f"unrecognized arguments: {short}=1"):
                parser.parse_args([*required_words(parser), f"{short}=1"])


@pytest.mark.parametrize("flag", ["--gpus", "--num_gpus"])
def test_other_names_of_num_gpus_work_wherever_it_does(flag: str) -> None:
    tried = 0
    for name, parser in PARSERS.items():
        if any("--num-gpus" in action.option_strings for action in parser._actions):
            num_gpus = parser.parse_args([*required_words(parser), flag, "8"]).num_gpus
            assert num_gpus == ([8] if name == "ds_bench project" else 8), name
            tried += 1
    assert tried == 6
