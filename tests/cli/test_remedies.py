"""Flags that remedies name exist, where the reader of the remedy can type them."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ds_bench.cli import arguments
from ds_bench.cli.commands import build_parser
from ds_bench.config.rules import RULES

PACKAGE = Path(arguments.__file__).parents[1]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]*[a-z]")
OF_OTHER_PROGRAMS = {
    "--rdzv-id",
    *("--gpus", "--ipc", "--read-only", "--shm-size", "--tmpfs", "--ulimit"),  # docker run
    *("--gpu-bind", "--me", "--nodes", "--ntasks"),  # Slurm
    "--local-addr",  # torchrun
    "--name",  # in "write each as --name=value"
}


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of both scripts and of every command, by their names."""
    program = build_parser("ds-compare")
    (commands,) = (action for action in program._actions if isinstance(action, argparse._SubParsersAction))
    return {"zero": arguments.build_parser("zero", "x"), "offload": arguments.build_parser("offload", "x")} | dict(
        commands.choices
    )


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    own = {flag for action in parser._actions for flag in action.option_strings}
    return own.union(*(flags_of(each) for action in inner for each in action.choices.values()))


def remedies_of(module: Path) -> Iterator[str]:
    """The texts that a module gives as a remedy."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        names = [node.arg] if isinstance(node, ast.keyword) else []
        names += [name.id for name in getattr(node, "targets", []) if isinstance(name, ast.Name)]
        if any(name and ("remedy" in name.lower() or name == "next_step") for name in names):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_the_flags_in_remedies_exist() -> None:
    known = OF_OTHER_PROGRAMS.union(*map(flags_of, parsers().values()))
    texts = [(module.name, text) for module in sorted(PACKAGE.rglob("*.py")) for text in remedies_of(module)]
    assert len(texts) > 300
    assert [(name, flag) for name, text in texts for flag in FLAG.findall(text) if flag not in known] == []


def test_the_flags_in_rules_are_those_of_both_scripts_and_of_run() -> None:
    """The scripts differ: one has --stages, the other --stage."""
    for name in ("zero", "offload", "run"):
        known = flags_of(parsers()[name])
        texts = [(rule.name, f"{rule.reason} {rule.remedy} {rule.row_remedy}") for rule in RULES]
        assert [(rule, flag) for rule, text in texts for flag in FLAG.findall(text) if flag not in known] == []
