"""The checks of one host of several, as a program that its agent starts: ``python -m ds_bench.doctor.on_host``.

Reads one JSON object from standard input: ``placement`` and ``configurations``; ``slots``, the numbers of the GPUs that
have ranks; ``need_host_bytes``, the predicted memory of this host or null. Prints one with the ``findings``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from ..config.spec import Configuration, Placement
from ..records import json_files
from ..system import terminal
from .checks import run_plan_checks


def main() -> None:
    """Runs the checks and prints their findings."""
    asked = json.loads(sys.stdin.read())
    findings = run_plan_checks(
        json_files.build(Placement, asked["placement"]),
        json_files.build(list[Configuration], asked["configurations"]),
        need_host_bytes=asked["need_host_bytes"],
        slots=asked["slots"],
    )
    terminal.print_json(json.dumps({"findings": [asdict(each) for each in findings]}))


if __name__ == "__main__":
    main()
