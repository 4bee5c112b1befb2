"""Prints what an interpreter has installed, as JSON: ``PYTHON interpreter_facts.py PACKAGE…``.

It runs in the interpreter of a user's script: only the standard library is imported, and Python 3.9 is enough.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def read_facts(names: list[str]) -> dict[str, Any]:
    """Return this interpreter's version, prefix and packages, and the CUDA version that torch was built for."""
    packages = {}
    for name in names:
        try:
            packages[name] = metadata.version(name)
        except (metadata.PackageNotFoundError, KeyError, ValueError):  # absent, or a broken installation
            continue
    torch = find_spec("torch")
    cuda = None
    if torch is not None and torch.origin is not None:
        text = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
        cuda = re.search(r"""^cuda\b[^=\n]*=\s*['"]([^'"\n]+)['"]""", text, re.MULTILINE)
    facts = {"python_version": sys.version.split()[0], "prefix": sys.prefix, "packages": packages}
    return {**facts, "torch_cuda_version": None if cuda is None else cuda[1]}


if __name__ == "__main__":
    print(json.dumps(read_facts(sys.argv[1:])))
