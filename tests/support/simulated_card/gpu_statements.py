"""Lists the statements that run only with a GPU, and which of them no process has recorded as executed.

``SIMULATED_CARDS_LINES=FOLDER PYTHONPATH=tests/support/simulated_card/site pytest …`` records them in files in FOLDER;
``python -m tests.support.simulated_card.gpu_statements FOLDER`` prints the list.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FILES = ("worker/**/*.py", "system/gpu*.py", "launch/**/*.py", "doctor/**/*.py")
_GPU = re.compile(r"cuda|nvml|gpu(?!s_per_node)|\bmig\b", re.IGNORECASE)
_CONFIGURED = re.compile(
    r"num_gpus|watch_rank|gpu_memory_limit_bytes|every_gpu|_CudaKernelMode|CUDA_VISIBLE_DEVICES|OWN_KEYS[^=]*=.*",
    re.DOTALL,
)
"""Names of settings, which trials without a GPU have too."""
_ON_CPU = re.compile(r"\bnot \S*cuda|!= \"cuda\"|== \"cpu\"|torch_cuda is None")


def gpu_statements(path: Path) -> Iterator[tuple[int, int]]:
    """First and last line of each statement that names a GPU, or is within a function or condition that does.

    Left out are docstrings, imports and what runs only without a GPU.
    """
    lines = [re.sub("#.*", "", line) for line in path.read_text().splitlines()]

    def within(block: Sequence[ast.stmt], on_gpu: bool) -> Iterator[tuple[int, int]]:
        for node in block:
            inner = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
            last = min((child.lineno for child in inner), default=(node.end_lineno or 0) + 1) - 1
            text = _CONFIGURED.sub("", "\n".join(lines[node.lineno - 1 : max(node.lineno, last)]))
            is_function = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            named = bool(_GPU.search(node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else text))
            ignored = isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass, ast.Nonlocal)) or (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            )
            if (on_gpu or named) and not ignored and not is_function:
                yield node.lineno, max(node.lineno, last)
            on_cpu = isinstance(node, ast.If) and bool(_ON_CPU.search(text))
            is_condition = isinstance(node, ast.If) and named
            for name in ("body", "orelse", "handlers", "finalbody"):
                children: Any = getattr(node, name, [])
                part = [each for child in children for each in (child.body if name == "handlers" else [child])]
                if on_cpu and name == "body":
                    continue
                without = is_condition and name == "orelse" and not on_cpu
                yield from within(part, not without and (on_gpu or is_condition or (is_function and named)))
            if on_cpu and isinstance(node, ast.If) and isinstance(node.body[-1], (ast.Return, ast.Raise)):
                on_gpu = True

    yield from within(ast.parse(path.read_text()).body, False)


def executed(folder: Path) -> dict[str, set[int]]:
    """Lines that ran in any process, by file relative to the root."""
    lines: dict[str, set[int]] = {}
    for entry in {entry for path in folder.glob("*.lines") for entry in path.read_text().split()}:
        name, _, number = entry.rpartition(":")
        lines.setdefault(name, set()).add(int(number))
    return lines


def report(folder: Path) -> tuple[int, dict[str, str]]:
    """Number of GPU statements, and ``FILE:LINE`` → text of each one that did not run."""
    ran, count, missing = executed(folder), 0, {}
    for path in sorted({path for pattern in FILES for path in (ROOT / "ds_bench").glob(pattern)}):
        name, texts = str(path.relative_to(ROOT)), path.read_text().splitlines()
        for first, last in gpu_statements(path):
            count += 1
            if not ran.get(name, set()) & set(range(first, last + 1)):
                missing[f"{name}:{first}"] = texts[first - 1].strip()
    return count, missing


if __name__ == "__main__":
    number, left = report(Path(sys.argv[1]))
    print(f"{number} statements run only with a GPU; {len(left)} of them did not run")
    print("\n".join(f"{place}  {text}" for place, text in left.items()))
