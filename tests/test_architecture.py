"""The rules of the code, read off the sources: who imports whom, what is never called."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import ds_bench

PACKAGE = Path(ds_bench.__path__[0])

# Top to bottom. A module imports from layers below its own, and never from its own.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(layer.split())
    for layer in (
        "benchmarks cli",
        "__main__ comparison",
        "reporting showing",
        "answer",
        "recommend",
        "advising.headroom baseline_verbs",
        "advising.remedies merging render.html_report render.plots versus",
        "advising.changes baselines load overview render.pictures rowpairs",
        "advising.fitting advising.reasons export reading.flatrow regression.baselinemeasures render.overlays "
        "render.sections tables",
        "compare export_readme listing progress reading.flatcells regression.baselineentry regression.stepclock",
        "advice circumstances likeness provenance regression.benchresult rows",
        "advising.rule analysis",
        "doubts forecast largest situation",
        "foresight",
        "prediction.fitplan prediction.hindsight",
        "doctor prediction.memory",
        "checks.disk prediction.sharded",
        "launch.deepspeed launch.warm prediction.gathering prediction.replicated preflight",
        "launch.cardwatch launch.trial plan prediction.memorycase runner",
        "checks.compiled flops launch launch.leader launch.outcome modelsource prediction.activations",
        "checks.cards checks.host checks.hub checks.packages checks.tools flags launch.scratch launch.watch "
        "models ops placement reading.records regression.baselinefile render.svgcharts store",
        "argtypes checks contract dsconfig dskeys environment models.families noops options prediction.cards "
        "prediction.estimators prediction.modelstates reading.leastconfig reading.strictjson record "
        "render.figures strategies",
        "advising batchsearch caveats console errors files gpus hostmemory inference interrupts launch.processes "
        "prediction reading reading.sameness reading.shapes regression render render.svg spec units",
        "redaction",
    )
)
WORKER_MAY_IMPORT = {"contract", "hostmemory", "record", "redaction", "spec", "launch.processes"}
HEAVY = {"torch", "deepspeed", "transformers", "accelerate"}


def sources() -> dict[str, Path]:
    """Module name below ``ds_bench`` → file; the package itself is the empty name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = sources()
PARENT = [name for name in MODULES if name.partition(".")[0] != "worker"]
WORKER = [name for name in MODULES if name.partition(".")[0] == "worker"]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def imported(name: str) -> frozenset[str]:
    """Absolute dotted names that a module imports anywhere in it, lazily or for types alone too."""
    names: set[str] = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _base(name, node)
            names |= {_module_of(f"{base}.{alias.name}", base) for alias in node.names}
    return frozenset(names)


def _base(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    here = ["ds_bench", *filter(None, name.split("."))]
    package = here if MODULES[name].name == "__init__.py" else here[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def _module_of(dotted: str, base: str) -> str:
    """``from X import y`` is an import of X.y where that is a module, else of X."""
    return dotted if dotted.removeprefix("ds_bench.") in MODULES and dotted.startswith("ds_bench.") else base


def ours(name: str) -> set[str]:
    """Modules of ours that a module imports, by their short names; the package's version is no module."""
    found = {target.removeprefix("ds_bench.") for target in imported(name) if target.startswith("ds_bench.")}
    return (found & MODULES.keys()) - {name}


def test_every_module_of_the_parent_has_a_place_in_the_layers() -> None:
    placed = set(chain(*LAYERS))
    assert set(PARENT) - {""} == placed


@pytest.mark.parametrize("name", PARENT)
def test_imports_go_downhill_only(name: str) -> None:
    if name == "":
        assert ours(name) == set()
        return
    level = next(number for number, layer in enumerate(LAYERS) if name in layer)
    below = set(chain(*LAYERS[level + 1 :]))
    assert ours(name) <= below, f"{name} imports sideways or uphill: {sorted(ours(name) - below)}"


def test_there_is_no_cycle_among_modules() -> None:
    settled: set[str] = set()
    while ready := {name for name in MODULES.keys() - settled if ours(name) <= settled}:
        settled |= ready
    assert MODULES.keys() - settled == set()


@pytest.mark.parametrize("name", PARENT)
def test_nothing_imports_the_worker(name: str) -> None:
    assert {target for target in ours(name) if target.partition(".")[0] == "worker"} == set()


@pytest.mark.parametrize("name", WORKER)
def test_the_worker_imports_only_the_contract_and_what_it_is_made_of(name: str) -> None:
    others = {target for target in ours(name) if target.partition(".")[0] != "worker"}
    assert others <= WORKER_MAY_IMPORT


@pytest.mark.parametrize("name", PARENT)
def test_no_module_of_the_parent_imports_torch_even_lazily(name: str) -> None:
    assert {target.partition(".")[0] for target in imported(name)} & HEAVY == set()


def test_the_import_reader_sees_lazy_and_relative_imports() -> None:
    """Guards the guards above: a reader that saw nothing would pass them all."""
    assert "comparison" in ours("cli")  # inside a function
    assert "launch.processes" in ours("launch.watch")  # from . import
    assert "torch" in {target.partition(".")[0] for target in chain(*map(imported, WORKER))}


def test_importing_the_whole_parent_loads_neither_torch_nor_what_a_verb_needs() -> None:
    program = (
        "import json, sys, ds_bench.cli, ds_bench.comparison, ds_bench.launch.warm, ds_bench.launch.deepspeed;"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "ds_bench" in loaded
    assert loaded & {*HEAVY, "pandas", "numpy", "rich", "matplotlib", "jinja2", "pydantic"} == set()


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_evaluated_or_unpickled(name: str) -> None:
    calls = {ast.unparse(node.func) for node in ast.walk(tree(name)) if isinstance(node, ast.Call)}
    banned = {"eval", "exec", "compile", "pickle.load", "pickle.loads", "marshal.loads", "torch.load", "os.system"}
    assert calls & banned == set()
    assert {target.partition(".")[0] for target in imported(name)} & {"pickle", "dill", "marshal", "shelve"} == set()


@pytest.mark.parametrize("name", MODULES)
def test_no_shell_stands_between_us_and_a_command(name: str) -> None:
    shells = [
        keyword
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "shell"
    ]
    assert shells == []


@pytest.mark.parametrize("name", [name for name in MODULES if MODULES[name].stat().st_size])
def test_a_module_opens_with_what_it_is_for(name: str) -> None:
    assert ast.get_docstring(tree(name))


@pytest.mark.parametrize("name", [name for name in PARENT if name != "console"])
def test_nothing_reaches_the_terminal_but_through_the_console(name: str) -> None:
    """Text from files would steer the terminal; only ``console`` escapes it."""
    calls = [node for node in ast.walk(tree(name)) if isinstance(node, ast.Call)]
    told = {ast.unparse(call.func) for call in calls if not all(isinstance(given, ast.Constant) for given in call.args)}
    ways = {"print", "sys.stdout.write", "sys.stderr.write", "stream.write", "self._stream.write", "os.write"}
    allowed = {"contract": {"os.write"}, "checks.disk": {"os.write"}}.get(name, set())  # files
    assert ways & told - allowed == set()
