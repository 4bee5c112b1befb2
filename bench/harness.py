"""Shared by the benches: a setting, the product and the bare loop run with it, and the facts next to a figure.

The product is started as a user starts it, as a command of its own; so is the bare loop, through
DeepSpeed's launcher, with the variables that the product gives its ranks. Nothing here looks
inside a run: commands are timed from outside, and the files that they wrote are read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

from ds_bench.cli import arguments as flags  # noqa: E402
from ds_bench.config import placement  # noqa: E402
from ds_bench.config.spec import Placement  # noqa: E402
from ds_bench.errors import DsBenchError  # noqa: E402
from ds_bench.launch import rank_environment  # noqa: E402
from ds_bench.models import presets  # noqa: E402
from ds_bench.system import environment, gpu_state  # noqa: E402
from ds_bench.system.processes import die_with_parent  # noqa: E402

PRODUCT = ROOT / "zero_stage_comparison.py"
BARE_LOOP = ROOT / "bench" / "bare_loop.py"
_VERSIONS = ("torch", "deepspeed", "transformers")


class BenchError(Exception):
    """A run that a figure needs has failed; the text says which, and how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The workload and the devices, the same for the product and the bare loop."""

    model: str
    """A preset of ``ds_bench.models``."""
    batch_size: int
    """Micro-batch per rank, in sequences."""
    seq_length: int
    """Tokens per sequence."""
    num_steps: int
    """Measured optimizer steps."""
    warmup_steps: int
    """Optimizer steps before them."""
    accelerator: str
    """``cuda`` or ``cpu``; ``auto`` only before :func:`decide`."""
    num_gpus: int | None
    """GPUs or CPU ranks; None only before :func:`decide`."""

    def flags(self) -> list[str]:
        """The product's flags."""
        pairs = {
            "--model": self.model,
            "--batch-size": self.batch_size,
            "--seq-length": self.seq_length,
            "--num-steps": self.num_steps,
            "--warmup-steps": self.warmup_steps,
            "--accelerator": self.accelerator,
            "--num-gpus": self.num_gpus,
        }
        return [str(part) for name, value in pairs.items() if value is not None for part in (name, value)]

    @property
    def device_word(self) -> str:
        """Number and kind: ``1 GPU``, ``2 CPU ranks``, …"""
        word = "CPU rank" if self.accelerator == "cpu" else "GPU"
        return f"{self.num_gpus} {word}{'' if self.num_gpus == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One command from start to end."""

    wall_seconds: float
    """From its start until it had ended."""
    rows: tuple[Mapping[str, Any], ...] = ()
    """The product's flat rows."""


def add_setting_flags(parser: argparse.ArgumentParser, *, num_steps: int) -> None:
    """Adds the flags that define a Setting."""
    add = parser.add_argument
    add("--model", default="tiny", metavar="MODEL", help="built-in model (default: tiny)")
    add("--batch-size", type=int, default=4, metavar="N", help="micro-batch per rank (default: 4)")
    add("--seq-length", type=int, default=128, metavar="N", help="tokens per sequence (default: 128)")
    add("--num-steps", type=int, default=num_steps, metavar="N", help=f"measured steps (default: {num_steps})")
    add("--warmup-steps", type=int, default=5, metavar="N", help="steps before them (default: 5)")
    add("--accelerator", choices=("auto", "cuda", "cpu"), default="auto", help="device type (default: auto)")
    add("--output", type=Path, default=None, metavar="FILE.json", help="also write the figures there")


def add_runs_flag(parser: argparse.ArgumentParser) -> None:
    text = "keep the runs and their logs there (default: a temporary folder)"
    parser.add_argument("--runs", type=Path, default=None, metavar="DIR", help=text)


@contextmanager
def folder_of_runs(kept: Path | None) -> Iterator[Path]:
    """The folder given, or a temporary one."""
    with tempfile.TemporaryDirectory(prefix="ds_bench_runs_") as scratch:
        folder = kept or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def setting_of(values: argparse.Namespace) -> Setting:
    """The Setting that the flags define."""
    return Setting(
        model=values.model,
        batch_size=values.batch_size,
        seq_length=values.seq_length,
        num_steps=values.num_steps,
        warmup_steps=values.warmup_steps,
        accelerator=values.accelerator,
        num_gpus=values.num_gpus,
    )


def decide(setting: Setting) -> tuple[Setting, Placement, dict[str, str]]:
    """The setting with its devices settled as the product settles them, and the variables of its ranks.

    Raises BenchError for a model outside the presets, UsageError if flags and machine disagree.
    """
    facts = presets.find_preset(setting.model)
    if facts is None:
        raise BenchError(f"--model {setting.model} is not a preset; the bare loop builds presets only")
    options = flags.parse("zero", PRODUCT.name, setting.flags())
    place = placement.resolve_placement(options, os.environ, gpu_state.read_gpus())
    settled = replace(setting, accelerator=place.accelerator, num_gpus=place.num_gpus)
    variables = rank_environment.rank_environment(place, os.environ)
    return settled, place, variables | rank_environment.preload_variables([facts.model_type])


def product_command(setting: Setting, stages: Sequence[int], launcher: str, output_dir: Path) -> list[str]:
    """One comparison of these stages, one trial each."""
    command = [sys.executable, str(PRODUCT), *setting.flags(), "--launcher", launcher]
    return [*command, "--output-dir", str(output_dir), "--stages", *map(str, stages)]


def run_product(
    setting: Setting, stages: Sequence[int], launcher: str, output_dir: Path, *, timeout_seconds: float
) -> Run:
    """Runs the product in ``output_dir``, which must be new. Raises BenchError unless every row succeeded."""
    output_dir.mkdir(parents=True)
    command = product_command(setting, stages, launcher, output_dir)
    wall = timed(command, {}, output_dir / "stderr.log", f"the product ({launcher})", timeout_seconds)
    return Run(wall_seconds=wall, rows=tuple(read_rows(output_dir)))


def read_rows(output_dir: Path) -> list[dict[str, Any]]:
    """The flat rows of the one run in ``output_dir``. Raises BenchError if one failed."""
    rows: list[dict[str, Any]] = json.loads(next(output_dir.glob("zero_comparison_*.json")).read_text())
    for row in rows:
        if not row["success"]:
            raise BenchError(f"the product's {row['strategy']} ended as {row['status']}: {row['error']}")
    return rows


def ds_config_path(output_dir: Path, stage: int) -> Path:
    """The configuration that the product gave DeepSpeed for ``stage``, in the run in ``output_dir``."""
    for path in sorted(output_dir.glob("runs/*/trials/*/ds_config.json")):
        if json.loads(path.read_text())["zero_optimization"]["stage"] == stage:
            return path
    raise BenchError(f"the product's run left no ds_config.json of stage {stage}")


def bare_command(setting: Setting, ds_config: Path, port: int, result: Path) -> list[str]:
    """The bare loop under DeepSpeed's launcher."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *_devices(setting)]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(port), str(BARE_LOOP)]
    command += ["--ds-config", str(ds_config), "--model", setting.model, "--seq-length", str(setting.seq_length)]
    command += ["--num-steps", str(setting.num_steps), "--warmup-steps", str(setting.warmup_steps)]
    return [*command, "--output", str(result)]


def _devices(setting: Setting) -> list[str]:
    """With --num_gpus the launcher drops CUDA_VISIBLE_DEVICES (launcher/runner.py), so give indices if it is set."""
    if setting.accelerator == "cuda" and "CUDA_VISIBLE_DEVICES" in os.environ:
        indices = [gpu.index for gpu in gpu_state.select_visible(os.environ, gpu_state.read_gpus().gpus)][
            : setting.num_gpus
        ]
        return ["--include", "localhost:" + ",".join(map(str, indices))]
    return ["--num_gpus", str(setting.num_gpus)]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def timed(
    command: Sequence[str], variables: Mapping[str, str], log: Path, what: str, timeout_seconds: float = 60.0
) -> float:
    """Runs a command with its output in ``log``; seconds from start to end. Raises BenchError unless it ends with 0."""
    start = time.perf_counter()
    with log.open("wb") as output, started(command, variables, stdout=output, stderr=output) as process:
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise BenchError(f"{what} took longer than {timeout_seconds:.0f} s\n{tail(log)}") from None
    wall = time.perf_counter() - start
    if code != 0:
        raise BenchError(f"{what} ended with code {code}\n{tail(log)}")
    return wall


@contextmanager
def started(command: Sequence[str], variables: Mapping[str, str], **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own, whose process group is ended when the block is left."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,
        **streams,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the session's group, twenty seconds to clean up, SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def run(name: str, main: Callable[[], int]) -> NoReturn:
    """Runs a bench as a program: exits with its code, or with 1 and one line that says what it could not do."""
    end_on_sigterm()
    try:
        sys.exit(main())
    except (BenchError, DsBenchError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)


def remove_shared_memory(port: int) -> None:
    """DeepSpeed never unlinks its segments (ops/csrc/cpu/comm/shm.cpp); ours are named after our port."""
    for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
        segment.unlink(missing_ok=True)


def busy_fraction(seconds: float = 0.5) -> float:
    """Share of all cores in use just now (proc(5), stat): between runs, the load that is not ours."""
    before = _idle_and_total()
    time.sleep(seconds)
    idle, total = (after - start for after, start in zip(_idle_and_total(), before, strict=True))
    return 1 - idle / total if total else 0.0


def _idle_and_total() -> tuple[int, int]:
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def machine_facts(setting: Setting) -> dict[str, Any]:
    """Hardware and versions next to the figures; nothing that identifies the machine."""
    here = environment.read_environment()
    cuda = setting.accelerator == "cuda"
    return {
        "accelerator": setting.accelerator,
        "gpus": [gpu.name for gpu in here.gpus] if cuda else [],
        "gpu_driver_version": here.gpu_driver_version if cuda else None,
        "torch_cuda_version": here.torch_cuda_version if cuda else None,
        "cpu_model": here.cpu_model,
        "logical_cores": here.logical_cores,
        "python_version": here.python_version,
        "packages": {name: here.packages.get(name) for name in _VERSIONS},
    }


def facts_line(facts: Mapping[str, Any]) -> str:
    """Hardware and versions in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    device = f"CPU only: {facts['cpu_model']}"
    if facts["accelerator"] == "cuda":
        names = ", ".join(map(str, facts["gpus"]))
        device = f"{names}, driver {facts['gpu_driver_version']}, CUDA {facts['torch_cuda_version']}"
    label = "" if facts["accelerator"] == "cuda" else "; these figures say nothing about GPUs"
    return f"{device}, {facts['logical_cores']} cores, Python {facts['python_version']}, {versions}{label}"


def end_on_sigterm() -> None:
    """SIGTERM ends this process through its ``finally`` blocks, so that no child is left."""

    def leave(_number: int, _frame: object) -> NoReturn:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, leave)
