#!/usr/bin/env python3
"""Writes docs/modules.md: the tree of the package, with the first line of each module's docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ds_bench"

DATA = {
    "config/deepspeed_keys_by_version": "Keys of DeepSpeed's configuration, by version; made by a script",
    "config/rule_examples.json": "An example of every rule of `check`, for `--explain` and the tests",
    "keywords.pyi": "The types of the keywords of `ds_bench.run` and `ds_bench.plan`; made by a script",
    "models/architectures.json": "How the tensors of each model family follow from `config.json`",
    "models/preset_configs": "The built-in models, a file for each family; five sizes of GPT-2 are for `model-size`",
    "models/preset_counts.json": "Parameter counts of the built-in models; made by a script",
    "prediction/activations.json": "Measured activations of the built-in models; made by a script",
    "prediction/allocation_traces.json.xz": "Traced allocations of the built-in models; made by a script",
    "report/templates/export_readme.md": "The README beside an exported configuration",
    "report/templates/report.css": "Styles of the HTML page",
    "report/templates/report.html": "The HTML page: the recommendation, the table of results with its notes, charts",
    "report/templates/report.js": "Sorting and other behavior of the HTML page",
    "report/templates/tables.html": "The tables that a notebook shows",
    "system/device_specifications.json": "Memory and peak rates of accelerators, by name",
}
"""File or folder without a docstring → what it holds."""

INTRODUCTION = """# Modules

Made by `scripts/make_modules_page.py` from the first line of each module. The order of the layers, and where to add
what, is in [CONTRIBUTING](../CONTRIBUTING.md#architecture).
"""


def modules_page() -> str:
    """Return the page; raises KeyError for a file that has neither a docstring nor an entry in DATA."""
    return "\n".join([INTRODUCTION, *_section(PACKAGE)]) + "\n"


def _section(folder: Path) -> Iterator[str]:
    """The table of a folder, then those of its subpackages."""
    title, files, packages = f"`{folder.relative_to(ROOT)}/`", [], []
    for path in sorted(folder.iterdir()):
        name = str(path.relative_to(PACKAGE))
        if path.name in ("__pycache__", "py.typed") or path.name.startswith("."):
            continue
        if path.name == "__init__.py":
            docstring = _first_line(path)
            title += f": {docstring}" if docstring else ""
        elif path.suffix == ".py":
            files.append(f"| `{path.name}` | {_first_line(path)} |")
        elif name in DATA:
            files.append(f"| `{path.name}{'/' if path.is_dir() else ''}` | {DATA[name]} |")
        elif path.is_dir():
            packages.append(path)
        else:
            raise KeyError(name)
    yield from (f"## {title}", "", "| file | holds |", "|---|---|", *files, "")
    for package in packages:
        yield from _section(package)


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = docstring.partition("\n")[0].replace("``", "`").replace("|", r"\|")
    return line.replace(":mod:", "").replace(":class:", "").replace(":func:", "")


if __name__ == "__main__":
    (ROOT / "docs" / "modules.md").write_text(modules_page(), encoding="utf-8")
