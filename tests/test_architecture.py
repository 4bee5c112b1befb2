"""The rules of the code, read off the sources: which package imports which, what is never called."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from itertools import chain
from pathlib import Path

import ds_bench

PACKAGE = Path(ds_bench.__path__[0])

# Top to bottom, by the first part of a module's name. A module imports from rows below and from its own package.
LAYERS = (
    "benchmarks api model_size",
    "cli",
    "runner",
    "report",
    "recommend doctor baselines planning",
    "analysis",
    "prediction launch worker",
    "records",
    "models",
    "config",
    "system",
    "errors units",
)
LEVEL = {name: number for number, row in enumerate(LAYERS) for name in row.split()}

WORKER_MAY_IMPORT = {"records", "system", "config"}
HEAVY = {"torch", "deepspeed", "transformers", "accelerate"}
FOR_ONE_COMMAND = {"pandas", "numpy", "rich", "matplotlib", "jinja2", "pydantic", "scipy", "yaml"}


@cache
def sources() -> dict[str, Path]:
    """Module name below ``ds_bench`` → file; the package itself is the empty name."""
    paths = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        paths[".".join(part for part in parts if part != "__init__")] = path
    return paths


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


@cache
def imported(module: str) -> frozenset[str]:
    """Absolute dotted names that a module imports anywhere in it, including lazy imports and imports for types."""
    names: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            names |= {_module_of(f"{base}.{alias.name}", base) for alias in node.names}
    return frozenset(names)


def _base(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = ["ds_bench", *filter(None, module.split("."))]
    package = parts if sources()[module].name == "__init__.py" else parts[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def _module_of(dotted: str, base: str) -> str:
    """``from X import y`` is an import of X.y where that is a module, else of X."""
    return dotted if dotted.startswith("ds_bench.") and dotted.removeprefix("ds_bench.") in sources() else base


def ours(module: str) -> set[str]:
    """Modules of this package that a module imports, by their short names."""
    names = {name.removeprefix("ds_bench.") for name in imported(module) if name.startswith("ds_bench.")}
    return (names & sources().keys()) - {module, ""}


def first_part(module: str) -> str:
    return module.partition(".")[0]


def calls(module: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]


def test_the_first_level_is_the_packages_and_modules_of_the_layers() -> None:
    assert {first_part(module) for module in sources()} - {"", "__main__"} == set(LEVEL)


def test_imports_go_to_lower_layers_only() -> None:
    upward = {
        (module, target)
        for module in sources()
        if module not in ("", "__main__")
        for target in ours(module)
        if first_part(target) != first_part(module) and LEVEL[first_part(target)] <= LEVEL[first_part(module)]
    }
    assert upward == set()


def test_there_is_no_cycle_among_modules() -> None:
    settled: set[str] = set()
    while ready := {module for module in sources().keys() - settled if ours(module) <= settled}:
        settled |= ready
    assert sources().keys() - settled == set()


def test_only_the_worker_imports_torch_and_nothing_imports_the_worker() -> None:
    parent = [module for module in sources() if first_part(module) != "worker"]
    worker = [module for module in sources() if first_part(module) == "worker"]
    heavy = {module for module in parent if {first_part(name) for name in imported(module)} & HEAVY}
    users = {module for module in parent if any(first_part(target) == "worker" for target in ours(module))}
    others = {first_part(target) for module in worker for target in ours(module)} - {"worker"}
    assert (heavy, users) == (set(), set())
    assert others <= WORKER_MAY_IMPORT
    # Guards the reader above, which would pass everything if it saw no lazy and no relative import.
    assert "torch" in {first_part(name) for name in chain(*map(imported, worker))}
    assert "runner" in ours("cli.script")


def test_starting_the_parent_loads_neither_torch_nor_what_one_command_needs() -> None:
    program = (
        "import json, sys, ds_bench.cli.commands, ds_bench.runner;"
        "import ds_bench.launch.warm_launcher, ds_bench.launch.trial;"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "ds_bench" in loaded
    assert loaded & (HEAVY | FOR_ONE_COMMAND) == set()


def test_nothing_is_evaluated_unpickled_or_given_to_a_shell() -> None:
    banned = {"eval", "exec", "compile", "pickle.load", "pickle.loads", "marshal.loads", "torch.load", "os.system"}
    serializers = {"pickle", "dill", "marshal", "shelve"}
    evaluated = {module for module in sources() if {ast.unparse(call.func) for call in calls(module)} & banned}
    unpickled = {module for module in sources() if {first_part(name) for name in imported(module)} & serializers}
    shells = {
        module for module in sources() for call in calls(module) if "shell" in {word.arg for word in call.keywords}
    }
    assert (evaluated, unpickled, shells) == (set(), set(), set())


def test_every_module_begins_with_a_docstring() -> None:
    silent = {
        module for module, path in sources().items() if path.stat().st_size and not ast.get_docstring(tree(module))
    }
    assert silent == set()


def test_text_reaches_the_terminal_through_one_module_that_escapes_it() -> None:
    """Text from files would steer the terminal."""
    ways = {"print", "sys.stdout.write", "sys.stderr.write", "stream.write", "self._stream.write", "os.write"}
    files = {("records.json_files", "os.write"), ("doctor.disk", "os.write"), ("launch.message_stream", "os.write")}
    unescaped = {
        (module, ast.unparse(call.func))
        for module in sources()
        if first_part(module) != "worker" and module != "system.terminal"
        for call in calls(module)
        if ast.unparse(call.func) in ways and not all(isinstance(argument, ast.Constant) for argument in call.args)
    }
    assert unescaped == files


def test_programs_beside_the_package_import_what_it_has() -> None:
    """No type checker reads them."""

    def bound(module: str) -> set[str]:
        nodes = list(ast.walk(tree(module))) if module in sources() else []
        names = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        names |= {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        return names | {each.asname or each.name for each in nodes if isinstance(each, ast.alias)}

    missing = []
    for path in (*PACKAGE.parent.glob("bench/*.py"), *PACKAGE.parent.glob("scripts/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            package, _, module = (
                (node.module or "").partition(".") if isinstance(node, ast.ImportFrom) else ("", "", "")
            )
            if isinstance(node, ast.ImportFrom) and package == "ds_bench":
                names = {each.name for each in node.names} - bound(module)
                missing += [(path.name, name) for name in names if f"{module}.{name}".strip(".") not in sources()]
    assert missing == []
