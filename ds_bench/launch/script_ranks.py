"""Starts the ranks of a user's script on one host: ``python -m ds_bench.launch.script_ranks HOST_NUMBER FOLDER``.

Each rank is the script's command in the script's own interpreter, with torchrun's variables and the hook on its path
(``worker/script_hook``). How each ends is appended to ``exits.jsonl``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ..config.spec import Trial
from ..config.training_script import placeholder_values
from ..records.rank_files import CONFIG_FILE, Assignment, log_file
from ..system import processes
from .leader import wait_for_children

_PACKAGE = Path(__file__).resolve().parents[1]
_HOOK = _PACKAGE / "worker" / "script_hook"
_MAX_TMPDIR_LENGTH = 70


def command(number: int) -> list[str]:
    """Return the command that starts the ranks of a host; the caller appends the trial's folder."""
    return [sys.executable, "-m", "ds_bench.launch.script_ranks", str(number)]


def script_words(trial: Trial, config: Path, output_folder: str | None) -> list[str]:
    """Return the script's command with its placeholders filled in. ``config``: the row's file."""
    script = trial.workload.script
    assert script is not None
    values = placeholder_values(script, trial.configuration.name, trial.ds_config, trial.placement.num_gpus)
    return [script.python, *script.words({**values, "config": config, "output_dir": output_folder})]


def script_variables(trial: Trial, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of every rank: ``environ`` with the hook, but without the paths of this program.

    The script must find its own packages: ours may be different versions.
    """
    script = trial.workload.script
    assert script is not None
    own, paths = str(_PACKAGE.parent), environ.get("PYTHONPATH", "").split(os.pathsep)
    programs = environ.get("PATH", os.defpath).split(os.pathsep)
    ours, theirs = (str(Path(python).parent) for python in (sys.executable, script.python))
    variables = {name: value for name, value in environ.items() if name != "PYTHONSAFEPATH"}
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(_HOOK), *(path for path in paths if path not in ("", own))]),
        "PATH": os.pathsep.join([theirs, *(programs[1:] if programs[0] == ours else programs)]),
        "DS_BENCH_SCRIPT": str(folder),
    }
    # A data loader's workers open sockets in TMPDIR, and a socket's path is limited to 107 bytes (unix(7)).
    if len(os.fsencode(temporary := variables.get("TMPDIR", ""))) > _MAX_TMPDIR_LENGTH:
        variables["TMPDIR"] = str(Path(temporary).parent)
    return variables | script.accelerate_variables(folder / CONFIG_FILE)


def main() -> None:
    processes.die_with_parent()
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    assignment = Assignment.load(folder)
    trial, placement = assignment.trial, assignment.trial.placement
    counts = [ranks for _, ranks in placement.hosts] or [placement.num_gpus]
    address, port = "127.0.0.1", assignment.scratch_id
    if placement.hosts:  # the agent has set the rendezvous address
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    words = script_words(trial, folder / CONFIG_FILE, assignment.checkpoint_folder)
    variables = script_variables(trial, folder, {**os.environ, **assignment.environment})
    if placement.hostfile is not None and (slots := placement.slots_of_node(number)):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    variables |= {"WORLD_SIZE": str(placement.num_gpus), "LOCAL_WORLD_SIZE": str(counts[number])}
    variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    at = assignment.working_folder
    ranks = {}
    for local_rank in range(counts[number]):
        rank = sum(counts[:number]) + local_rank
        with log_file(folder, rank).open("ab") as log:
            child = subprocess.Popen(
                words,
                env={**variables, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                cwd=at if at is not None and Path(at).is_dir() else None,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=processes.die_with_parent,
            )
        ranks[child.pid] = rank
    wait_for_children(folder, ranks)


if __name__ == "__main__":
    main()
