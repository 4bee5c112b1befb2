"""Commands of this program as the user can type them: in the current folder, with this Python.

Every command that is printed is built here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "ds-compare"
_ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {"zero": "zero_stage_comparison.py", "offload": "offload_comparison.py"}


@dataclass(frozen=True, slots=True)
class OpenCommand:
    """A command that may get more flags. ``str()`` returns it without them."""

    start: str
    """The program and its flags, quoted for a shell."""
    script: tuple[str, ...] = ()
    """The user's script and its arguments, which come last, after ``--``."""

    def with_flags(self, flags: str) -> str:
        return " ".join(filter(None, [self.start, flags, shlex.join(["--", *self.script]) if self.script else ""]))

    def __str__(self) -> str:
        return self.with_flags("")


def python(*, with_package: bool = False) -> str:
    """``python``, or the path of this Python if that name is missing or refers to another Python.

    ``with_package``: with the variable that makes it find this package from the current folder, if it needs one.
    """
    found = shutil.which("python")
    is_this = found is not None and Path(found).parent == Path(sys.executable).parent
    name = "python" if is_this else shlex.quote(sys.executable)
    # The first entry is the folder of the script that runs.
    if not with_package or _ROOT.samefile(".") or str(_ROOT) in sys.path[1:]:
        return name
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return f"env PYTHONPATH={shlex.quote(path)} {name}"


def program() -> str:
    """What precedes the name of a command: ``python -m ds_bench``, or ``ds-compare`` if the user typed that."""
    typed = sys.argv[0]
    if Path(typed).name == PROGRAM:
        return PROGRAM if shutil.which(PROGRAM) == typed else shlex.quote(typed)
    return f"{python(with_package=True)} -m ds_bench"


def command(*words: str) -> str:
    """A command with its arguments."""
    return f"{program()} {shlex.join(words)}"


def comparison(family: str | None, words: Sequence[str]) -> str:
    """The command ``run``, or the script of a family, with its flags."""
    if family not in SCRIPTS:
        return command("run", *words)
    script = _ROOT / SCRIPTS[family]
    # The running script may be the user's own copy.
    if hasattr(sys.modules["__main__"], "create_deepspeed_config"):
        script = Path(sys.argv[0])
    elif _ROOT.samefile("."):
        script = Path(script.name)
    return f"{python()} {shlex.join([str(script), *words])}"
