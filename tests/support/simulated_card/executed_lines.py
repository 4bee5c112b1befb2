"""Records each statement of chosen files when it first runs: ranks end with os._exit, which skips exit handlers.

These files are changed as they are compiled, because a trace function would nearly double the time of importing torch.
Only what Python runs before or outside its import system is traced: a script's hook, and a file that is a program.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

PARTS = ("ds_bench/worker/", "ds_bench/system/gpu", "ds_bench/launch/", "ds_bench/doctor/")


class _Marks(ast.NodeTransformer):
    """Puts a call with its line in front of each statement."""

    def __init__(self, name: str) -> None:
        self.name = name

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, block, None), list):
                setattr(node, block, [each for statement in statements for each in self._marked(statement)])
        return node

    def _marked(self, statement: ast.stmt) -> list[ast.stmt]:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            return [statement]
        (mark,) = ast.parse(f"_statement_ran({f'{self.name}:{statement.lineno}'!r})").body
        for node in ast.walk(mark):
            ast.copy_location(node, statement)
        return [mark, statement]


def record(folder: Path) -> None:
    """Append ``FILE:LINE`` to a file of this process in ``folder`` for each statement of ``PARTS`` that runs."""
    seen: set[str] = set()
    usual = SourceFileLoader.get_code

    def statement_ran(place: str) -> None:
        if place not in seen:
            seen.add(place)
            with (folder / f"{os.getpid()}.lines").open("a") as file:
                file.write(f"{place}\n")

    def get_code(loader: SourceFileLoader, module: str) -> Any:
        if not any(part in loader.path for part in PARTS):
            return usual(loader, module)
        name = f"ds_bench/{loader.path.rpartition('/ds_bench/')[2]}"
        tree = _Marks(name).visit(ast.parse(Path(loader.path).read_bytes()))
        return compile(tree, loader.path, "exec", dont_inherit=True)

    def trace(frame: Any, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if event == "line":
            statement_ran(f"ds_bench/{path.rpartition('/ds_bench/')[2]}:{frame.f_lineno}")
        return trace if any(part in path for part in PARTS) else None

    is_program = any(part in argument for argument in sys.orig_argv for part in PARTS)
    if is_program or "ds_bench_script_hook" in sys.modules:
        sys.settrace(trace)
        threading.settrace(trace)
    builtins._statement_ran = statement_ran  # type: ignore[attr-defined]
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
