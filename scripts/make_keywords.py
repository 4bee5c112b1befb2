#!/usr/bin/env python3
"""Writes ds_bench/keywords.pyi: types of the keywords of ``ds_bench.run`` and ``ds_bench.plan`` for type checkers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ds_bench.api import RUN_ONLY, keyword_of  # noqa: E402
from ds_bench.cli import commands  # noqa: E402
from ds_bench.config.options import OPTIONS, Option  # noqa: E402
from ds_bench.config.recipe import PATHS, Recipe, can_be_swept  # noqa: E402

HEADER = '''"""Types of the keywords of ``ds_bench.run`` and ``ds_bench.plan``. Made by scripts/make_keywords.py."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

PathText = str | os.PathLike[str]
'''


def keywords_stub() -> str:
    """The whole stub."""
    run = {keyword_of(name): types_of(OPTIONS[name], swept=can_be_swept(path)) for name, path in PATHS.items()}
    run |= {name: types_of(OPTIONS[name]) for name in RUN_ONLY if name in OPTIONS}
    run |= {"budget": ["float"], "yes": ["bool"]}
    for section in (*(name for name in Recipe.model_fields if name != "script"), "sweep"):
        run[section] = ["Mapping[str, Any]", *run.get(section, [])]
    return HEADER + "".join(
        f"\nclass {name}(TypedDict, total=False):\n"
        + "".join(f"    {key}: {' | '.join(types)}\n" for key, types in keys.items())
        for name, keys in (("RunKeywords", run), ("PlanKeywords", dict(plan_types())))
    )


def types_of(option: Option, *, swept: bool = False) -> list[str]:
    """The types of an option's value. ``swept``: several values make a sweep."""
    own = {bool: "bool", int: "int", float: "float", Path: "PathText"}.get(option.kind, "str")
    if option.metavar in ("DIR", "STRATEGY"):  # checkpoint_path; a row may be named by its stage
        own = "PathText" if option.metavar == "DIR" else "str | int"
    types = [own, *(['Literal["auto"]'] if option.auto else [])]
    if option.kind is str and option.arguments.get("nargs") == "?":
        types.append("bool")  # a flag that may have no value
    if swept or option.many or option.metavar == "CLASS,...":
        types.append(f"Sequence[{own}]")
    return [*types, *(["None"] if option.default is None else [])]


def plan_types() -> Iterator[tuple[str, list[str]]]:
    """The keywords of ``plan``, from the flags of its command."""
    options = {option.flag: option for option in OPTIONS.values()}
    for flag, facts in commands.COMMANDS["plan"].flags.items():
        name = flag.removeprefix("--").replace("-", "_")
        if name in ("name", "verbose", "json"):
            continue
        if facts.get("action") == "store_true":
            types = ["bool"]
        elif flag in options and name not in ("num_gpus", "grad_accum"):
            types = [each for each in types_of(options[flag]) if "auto" not in each]
        else:
            types = {"gpu": ["str"], "host_memory": ["float", "None"], "gpus_per_node": ["int", "None"]}.get(
                name, ["int"]
            )
        yield name, types


if __name__ == "__main__":
    (ROOT / "ds_bench" / "keywords.pyi").write_text(keywords_stub(), encoding="utf-8")
