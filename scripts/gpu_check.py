"""The steps of ``scripts/gpu_check.sh`` (usage: see there), their archive and their report."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

try:
    import harness
    import prediction

    from ds_bench.doctor import host, software
    from ds_bench.doctor.findings import Finding, SystemAccess
    from ds_bench.prediction.predicted_memory import CONTEXT_BYTES
    from ds_bench.prediction.trial_predictions import stored_prediction
    from ds_bench.records.json_files import write_json
    from ds_bench.system import environment, gpu_state
    from ds_bench.units import BYTES_PER_GB
except ModuleNotFoundError as error:
    print(
        f"gpu_check: {sys.executable} lacks {error.name}: set WHEELS to a folder of wheels (scripts/make_wheels.sh)",
        file=sys.stderr,
    )
    sys.exit(2)

PYTHON = os.environ.get("PYTHON") or sys.executable
CUDA = os.environ.get("GPU_CHECK_ACCELERATOR", "cuda") == "cuda"
SIMULATED = CUDA and "SIMULATED_CARDS" in os.environ
"""On tests/support/simulated_card."""
REAL = CUDA and not SIMULATED
BUDGET_SECONDS = float(os.environ.get("BUDGET_SECONDS", "540"))
STARTED = time.monotonic()
_RESERVE_SECONDS = 15
"""Part of the budget that is kept for the last archive and the report."""
_MIN_SECONDS, _MIN_WHOLE_SECONDS = 60, 240
"""Minimum time left to begin a step that the next call can continue, and one that it must start over; a third of the
budget is always enough."""
_LOG_BYTES = 100_000
"""How much of the end of each log is kept."""
_NEGLIGIBLE_GB = 0.25
"""Covers the allocator's rounding and small buffers of libraries."""
_OUTSIDE = "gpu outside the allocator"
_PREDICTED = ("gpu least", "gpu reserved", "gpu peak allocated")
"""The pairs of ``bench/prediction.py`` that the report shows and checks."""

# Enough for a window of several seconds on an H100 or H200; start-up takes most of a row's time anyway.
SIZES = {
    "gpt2": "--batch-size 16 --seq-length 1024 --num-steps 100 --warmup-steps 10",
    "llama-3.2-1b": "--batch-size 4 --seq-length 2048 --num-steps 40 --warmup-steps 5",
    "llama-3.2-3b": "--batch-size 1 --seq-length 2048 --num-steps 30 --warmup-steps 3",
    "llama-2-7b": "--batch-size 1 --seq-length 2048 --num-steps 30 --warmup-steps 3",
}
SMALL = "--batch-size 2 --seq-length 64 --num-steps 5 --warmup-steps 2"
# Axes that the CPU accelerator cannot show, or shows differently (docs/axes.md).
ZERO, OFFLOAD = "zero_stage_comparison.py", "offload_comparison.py"
AXES = {
    "attention": f"{ZERO} --stages 2 --axis attention=eager,sdpa,flash_attention_2",
    "loss": f"{ZERO} --stages 2 --axis loss=model,chunked,tiled,liger",
    "compile": f"{ZERO} --stages 1 3 --axis compile=none,torch,deepcompile",
    "data": f"{ZERO} --stages 2 --axis data_workers=2 --axis data_pin_memory=false,true",
    "allocator": f"{ZERO} --stages 3 --axis allocator=default,expandable_segments",
    "cores": f"{OFFLOAD} --strategies cpu_optimizer --axis cpu_binding=none,cores",
    "pin-memory": f"{OFFLOAD} --strategies cpu_optimizer --axis pin_memory=true,false",
    "pin-backend": f"{OFFLOAD} --strategies cpu_optimizer --axis pin_memory_backend=torch,native",
    "ratio": f"{OFFLOAD} --strategies cpu_optimizer --axis offload_ratio=0.5,1",
    "superoffload": f"{OFFLOAD} --strategies cpu_optimizer --axis superoffload=false,true",
    "zenflow": f"{OFFLOAD} --stage 2 --strategies cpu_optimizer --grad-accum 2 --axis zenflow=off,on,overlap",
    "qwz": f"{ZERO} --stages 3 --axis qwz=false,true",
    "states": f"{ZERO} --stages 2 3 --axis bf16_states=off,all",
    "buffers": f"{ZERO} --stages 2 3 --axis buffers=default,trainer_auto,small_buffers",
    "overlap": f"{ZERO} --stages 2 3 --axis overlap_comm=true,false",
    "optimizer": f"{ZERO} --stages 2 --axis optimizer=adamw,torch_adamw,torch_fused_adamw,muon",
    "lion": f"{ZERO} --stages 2 --axis optimizer=lion",
}
_SMALL_CARD = "--gpu-memory-limit 0.25 --set zero_optimization.reduce_bucket_size=100000"
_ONLY_ON_GPUS = {
    **dict.fromkeys(("tests-quick", "tests"), "they test the driver and the kernels of a GPU"),
    "axes-lion": "DeepSpeed's Lion is a CUDA kernel",
}
"""Step → why it is left out on simulated cards."""
_QUICK_TESTS = "nccl_waits or preloading or driver_in_use or monitor or power_cap or really_full"


@dataclass(frozen=True, kw_only=True)
class Step:
    name: str
    command: list[str]
    limit_seconds: int
    min_seconds: int = _MIN_WHOLE_SECONDS
    left_out: str | None = None
    """Why it is left out here; None if it is not."""


def short_name(model: str) -> str:
    """``meta-llama/Llama-2-7b-hf`` to ``llama-2-7b``."""
    return model.rpartition("/")[2].lower().removesuffix("-hf")


def list_steps(models: list[str], out: Path) -> Iterator[Step]:
    """Yield every step, the most telling first."""
    devices = ["--accelerator", "cuda" if CUDA else "cpu"]
    if count := os.environ.get("NUM_GPUS"):
        devices += ["--num-gpus", count]

    def only_on_gpus(name: str) -> str | None:
        return _ONLY_ON_GPUS.get(name) if SIMULATED else None

    def sizes(model: str) -> list[str]:
        return shlex.split(SIZES.get(short_name(model), SMALL) if REAL else SMALL)

    def compare(name: str, model: str, words: str, *more: str, limit: int = 500) -> Step:
        script, *flags = shlex.split(words)
        command = [PYTHON, str(ROOT / script), "--model", model, *sizes(model), *devices, *flags, *more]
        # So that a call that begins with this step finishes at least one row.
        command += ["--output-dir", str(out / name), "--timeout", str(limit - 60)]
        reason = only_on_gpus(name)
        return Step(name=name, command=command, limit_seconds=limit, min_seconds=_MIN_SECONDS, left_out=reason)

    def program(name: str, script: str, *words: str) -> Step:
        figures = str(out / name / "figures.json")
        return Step(name=name, command=[PYTHON, str(ROOT / script), *words, "--output", figures], limit_seconds=500)

    def tests(name: str, *words: str) -> Step:
        # -v names each test in the log, since pytest writes junit.xml only at its end. pyproject.toml's settings need
        # plugins and make every warning an error, even one from a different version of a package; conftest.py needs
        # Hypothesis.
        command = [PYTHON, "-m", "pytest", str(ROOT / "tests/integration/test_gpu.py"), "-m", "gpu", "-v"]
        command += ["--noconftest", "-p", "no:cacheprovider", *words, "--junit-xml", str(out / name / "junit.xml")]
        command += ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default"]
        lacks = None if importlib.util.find_spec("pytest") else "pytest is not installed"
        return Step(name=name, command=command, limit_seconds=500, left_out=only_on_gpus(name) or lacks)

    def offload(model: str) -> Step:
        disk = os.environ.get("NVME_PATH")
        words = f"{OFFLOAD} --strategies none cpu_optimizer cpu_full" + (" nvme --nvme-path " + disk if disk else "")
        return compare(f"{short_name(model)}-offload", model, words)

    first, second, large = models
    yield program("probe", "scripts/gpu_probe.py", *devices[:2])
    yield compare("probe-stages", "tiny", f"{ZERO} --stages 0 1 2 3", limit=240)
    yield tests("tests-quick", "-k", _QUICK_TESTS)
    yield compare(f"{short_name(first)}-zero", first, f"{ZERO} --stages 0 1 2 3 --repeats 3")
    yield offload(first)
    yield compare("references-bf16", first, f"{ZERO} --stages 0 3 --strategies ddp fsdp2 --precision bf16")
    if second != first:
        yield compare(f"{short_name(second)}-zero", second, f"{ZERO} --stages 0 1 2 3")
        yield offload(second)
    # If the probe found that ranks cannot be forked, only the cold launcher is left.
    refused = (read_json(out / "probe/figures.json") or {}).get("fork", {}).get("refused")
    launcher = "deepspeed" if refused else "both"
    runs = ["--runs", str(out / "fidelity/bench")]
    rounds = ["--rounds", "3" if REAL else "1", "--launcher", launcher]
    yield program("fidelity", "bench/fidelity.py", "--model", first, *sizes(first), *devices, *rounds, *runs)
    small = "" if REAL else _SMALL_CARD if SIMULATED else "--cpu-memory-limit 2"  # ends the search
    yield compare("auto", second, f"{ZERO} --batch-size auto --stages 0 3 --num-steps 10 {small}")
    yield compare("short", second, f"{ZERO} --stages 3 --batch-size 1 --seq-length {128 if REAL else 64}")
    if large != second:
        # With 7 B parameters on one GPU, stage 3 needs the least memory.
        yield compare(f"{short_name(large)}-zero", large, f"{ZERO} --stages 3 2")
    yield compare("launch-cold", first, f"{ZERO} --stages 0 1 2 3 --launcher deepspeed")
    yield tests("tests")
    yield compare("references-fp32", first, f"{ZERO} --stages 0 3 --strategies ddp fsdp2 --precision fp32")
    for axis, words in AXES.items():
        yield compare(f"axes-{axis}", first, words, "--num-steps", "20" if REAL else "5", limit=400)


def is_named(step: str, word: str) -> bool:
    """Whether a word of ``STEPS`` names a step: by its whole name, or by the part before a dash."""
    return step == word or step.startswith(f"{word}-")


def read_json(path: Path) -> Any:
    """Return a file's contents; None if it is missing or was cut short."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def require_ready(devices: tuple[gpu_state.GpuFacts, ...], inventory: gpu_state.GpuInventory) -> None:
    """Print every problem and warning that a run would meet here. Raise SystemExit(2) if it would be refused."""
    system, torch_cuda = SystemAccess(), environment.torch_built_for("cuda")
    found: list[Finding] = list(software.check_packages())
    if CUDA:
        found += [*software.check_driver(inventory.driver_version, torch_cuda)]
        found += [*host.check_gpus(system, inventory, torch_cuda)]
    for finding in found:
        if finding.level != "ok":
            print(f"gpu_check: {finding.level}: {finding.name}: {finding.text}", file=sys.stderr)
    if any(finding.level == "problem" for finding in found) or (CUDA and not devices):
        remedy = "set WHEELS to a folder of wheels (scripts/make_wheels.sh; MORE=scipy adds SciPy) or PYTHONPATH"
        remedy += " to a folder of packages; nvidia-smi shows whether the driver finds a GPU"
        print(f"gpu_check: {sys.executable} cannot run this: {remedy}", file=sys.stderr)
        sys.exit(2)


class Check:
    """The results in one folder, the call in progress, and their archive."""

    def __init__(self, out: Path, archive: Path) -> None:
        self.out, self.archive_path = out, archive
        self.steps: dict[str, dict[str, Any]] = {each["name"]: each for each in read_json(out / "steps.json") or []}
        """Name → how it ended, over all calls."""

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.out / "summary.txt").open("a") as file:
            file.write(text + "\n")

    def is_due(self, step: Step, words: list[str]) -> bool:
        """Whether this call runs a step: one that ``STEPS`` names or, without ``STEPS``, one that is left to finish."""
        if words:
            return any(is_named(step.name, word) for word in words)
        ended = self.steps.get(step.name)
        if ended is None or ended["exit_code"] is None:
            return True
        return bool(ended["timed_out"] and (ended["limit_seconds"] < step.limit_seconds or self._cut_run(step)))

    def _cut_run(self, step: Step) -> Path | None:
        """The run folder of a comparison that was cut short."""
        folders = sorted((self.out / step.name).glob("runs/*/run.json"))
        return folders[-1].parent if folders and self.steps.get(step.name, {}).get("timed_out") else None

    def run(self, step: Step) -> int:
        """Run a step within its limit and the budget. Return its exit code; 124 if its time was up."""
        limit = min(step.limit_seconds, math.floor(seconds_left()))
        print(f"== {step.name} (at most {limit} s)", flush=True)
        folder, cut = self.out / step.name, self._cut_run(step)
        if cut is None:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        command = [*step.command, *([] if cut is None else ["--resume", str(cut)])]
        begin, code = time.monotonic(), 124
        entry = {"name": step.name, "accelerator": "cuda" if CUDA else "cpu", "limit_seconds": limit}
        entry["started_at"] = datetime.now(UTC).isoformat(timespec="seconds")
        self._note(entry | {"exit_code": None, "seconds": 0, "timed_out": True})  # as it stands if this call is killed
        with (folder / "log").open("ab") as log, harness.started(command, {}, stdout=log, stderr=log) as process:
            while (left := begin + limit - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(60.0, left))
                    break
                self.archive()
        sys.stdout.write((folder / "log").read_bytes()[-2000:].decode(errors="replace"))
        seconds = round(time.monotonic() - begin)
        self._note(entry | {"exit_code": code, "seconds": seconds, "timed_out": code == 124})
        self.say(f"{step.name}: exit code {code} after {seconds} s" + (" (timed out)" if code == 124 else ""))
        self.archive()
        if cut is not None and code == 2:  # such as on a different machine
            before = folder.with_name(f"{step.name}-before")
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
            self.say(f"{step.name}: cannot continue from {before.name}, so it starts over")
            return self.run(step)
        return code

    def _note(self, entry: dict[str, Any]) -> None:
        self.steps[entry["name"]] = entry
        write_json(self.out / "steps.json", list(self.steps.values()))

    def archive(self) -> None:
        """Write everything worth keeping to one file, atomically."""
        partial = self.archive_path.with_name(self.archive_path.name + ".tmp")
        with tarfile.open(partial, "w:gz") as file:
            for path in self._kept():
                content = self._scrub(
                    path.read_bytes()[-_LOG_BYTES if path.suffix in _LOGS or path.name == "log" else 0 :]
                )
                member = tarfile.TarInfo(str(Path(self.out.name) / path.relative_to(self.out)))
                member.size, member.mtime = len(content), int(path.stat().st_mtime)
                file.addfile(member, io.BytesIO(content))
        partial.replace(self.archive_path)

    def _kept(self) -> Iterator[Path]:
        """Rows, records, figures and configurations; logs of ranks only if a row did not succeed."""
        succeeded = {
            path.parent / "trials" / record.trial.trial_id
            for path in self.out.rglob("records.jsonl")
            for record in prediction.records(path.parent)
            if record.outcome.success
        }
        for path in sorted(self.out.rglob("*")):
            is_log, is_of_trial = path.suffix in _LOGS, "trials" in path.parts
            is_wanted = path.name == "ds_config.json" or (is_log and path.parent not in succeeded)
            is_text = is_log or path.suffix in (".json", ".jsonl", ".csv", ".txt", ".xml") or path.name == "log"
            if path.is_file() and (is_wanted if is_of_trial else is_text):
                yield path

    def _scrub(self, content: bytes) -> bytes:
        """Remove what names this machine or its user: host name, folders, UUIDs."""
        text = content.decode(errors="replace")
        for folder, word in ((self.out, "OUT"), (ROOT, "."), (Path.home(), "~")):
            text = re.sub(rf"{re.escape(str(folder))}(?![\w-])", word, text) if len(str(folder)) > 1 else text
        if len(name := platform.node()) > 3:  # a shorter one would match other words
            text = re.sub(rf"\b{re.escape(name)}\b", "HOST", text)
        text = re.sub(r'"hostname": ?"[^"]*"', '"hostname": "HOST"', text)
        return re.sub(r"\b(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", r"\1-UUID", text).encode()


_LOGS = (".log", ".stacks")


def save_nvidia_smi(out: Path) -> None:
    """Save the output of ``nvidia-smi -q`` without anything that identifies a GPU or its users."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=60, check=True).stdout
        text = re.sub(r"^ *Processes.*?(?=^GPU |\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"^GPU [0-9A-Fa-f:.]+$", "GPU", text, flags=re.MULTILINE)
        secret = r"Serial|UUID|GUID|PDI|Board ID|Bus Id|Host ID|Chassis|Slot Number|Tray Index|MAC"
        kept = [line for line in text.splitlines() if not re.search(secret, line)]
        (out / "nvidia_smi.txt").write_text("\n".join(kept) + "\n")


def seconds_left() -> float:
    return BUDGET_SECONDS - _RESERVE_SECONDS - (time.monotonic() - STARTED)


# ------------------------------------------------------------------ report


def rows_by_step(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Step → the flat rows of its comparison, in the order in which the steps ran."""
    paths = sorted(out.glob("*/*_comparison_*.json"), key=lambda path: path.stat().st_mtime)
    return {path.parent.name: rows for path in paths if (rows := read_json(path))}


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def report(check: Check) -> Iterator[str]:
    """Yield the lines of the report on all calls together; the last ones say what to check now."""
    out, wrong = check.out, list[str]()
    probe = read_json(out / "probe/figures.json") or {}
    if fork := probe.get("fork"):
        yield f"ranks can be forked: {'yes' if fork['refused'] is None else 'no, ' + fork['refused']}"
        wrong += [f"ranks cannot be forked: {fork['refused']}"] if fork["refused"] else []
    if error := probe.get("cuda", {}).get("error"):
        wrong.append(f"the probe's CUDA program failed: {error.splitlines()[-1][:200]}")
    for name, state in probe.items():
        if name.endswith("Builder"):
            built = "built" if state["ready"] else "not built"
            yield f"  {name:<20} {built} in {state['seconds']:.0f} s {state['reason']}"
            wrong += [] if state["ready"] else [f"{name} does not build: {state['reason']}"]
    tables = rows_by_step(out)
    yield "\nstep                 strategy           status         ms/step  peak GB  GPU %   SM MHz  W      caveats"
    for name, rows in tables.items():
        for row in rows:
            yield (
                f"{name:<20} {row['strategy']:<18} {row['status']:<13} {number(row.get('avg_step_time_ms')):>8} "
                f"{number(row.get('gpu_peak_gb')):>8} {number(row.get('gpu_percent'), '.0f'):>6} "
                f"{number(row.get('gpu_sm_clock_mhz'), '.0f'):>8} {number(row.get('gpu_power_watts'), '.0f'):>5}  "
                f"{(row.get('caveats') or '')[:90]}"
            )
            if not row["success"] and "Unsupported" not in row["status"]:
                wrong.append(f"{name}: {row['strategy']} {row['status']} {row.get('error') or ''}"[:200])
    yield from memory_lines(out, tables, wrong)
    yield from time_lines(out, tables, wrong)
    yield "\nwhat to check now"
    wrong += [
        f"step {each['name']} " + ("was cut short" if each["exit_code"] is None else f"ended with {each['exit_code']}")
        for each in check.steps.values()
        if each["exit_code"] != 0
    ]
    yield ("\n".join(f"  {line}" for line in dict.fromkeys(wrong)) or "  nothing failed, nothing is off")


def memory_lines(out: Path, tables: dict[str, list[dict[str, Any]]], wrong: list[str]) -> Iterator[str]:
    """Predicted against measured memory, and the phase of the peak; what the constants should be."""
    lines = dict[tuple[str, str], str]()
    for folder in sorted(out.iterdir()):
        for record in prediction.records(folder / "runs"):
            row, predicted = (folder.name, record.trial.configuration.label), stored_prediction(record.trial)
            pairs = {pair.what: pair for pair in (prediction.pairs(record) if record.outcome.success else ())}
            if row in lines or predicted is None or "gpu peak allocated" not in pairs:  # repeats: only the first
                continue
            cells, off, need = "", list[str](), predicted.gpu_need
            outside = pairs.get(_OUTSIDE)  # equally wrong in every row: said once
            assumed = (outside.predicted_bytes - outside.measured_bytes) / BYTES_PER_GB if outside else 0.0
            for what in _PREDICTED:
                if (pair := pairs.get(what)) is None:
                    cells += f"{'-':>24}"
                    continue
                sizes = [size / BYTES_PER_GB for size in (pair.predicted_bytes, pair.measured_bytes)]
                cells += f"{sizes[0]:9.2f}{sizes[1]:8.2f}{number(pair.ratio):>7}"
                # Without a replay of every allocation, the prediction of reserved memory is only an upper bound.
                allowed = math.inf if what == "gpu reserved" and need.method == "rule" else 0.1
                excess = sizes[0] - sizes[1] - (0.0 if what == "gpu peak allocated" else assumed)
                if not -0.1 * sizes[1] < excess < allowed * sizes[1] and abs(excess) > _NEGLIGIBLE_GB:
                    off.append(f"{what.removeprefix('gpu ')} {sizes[0]:.2f} GB, measured {sizes[1]:.2f}")
            peaks = [
                max(getattr(rank, name) or 0 for rank in record.ranks) / BYTES_PER_GB
                for name in ("gpu_init_peak_bytes", "gpu_peak_bytes")
            ]
            ends = f"{peaks[0]:.2f}, {peaks[1]:.2f}; {need.phase} ({need.method})"
            lines[row] = f"{row[0]:<18}{row[1]:<43}{cells}   {ends}"
            if peaks[need.phase != "initialize"] < max(peaks) - _NEGLIGIBLE_GB:
                off.append(f"the peak is not in {need.phase}")
            wrong += [f"prediction off: {' '.join(row)}: {'; '.join(off)}"] if off else []
    if lines:
        heads = "".join(f"{head:>24}" for head in ("A least", "B reserved", "allocated"))
        yield f"\n{'GPU memory, GB: predicted, measured, ratio':<61}{heads}   in initialize, in steps; predicted peak"
        yield from lines.values()
    outside = [
        row["gpu_outside_allocator_gb"]
        for rows in tables.values()
        for row in rows
        if row.get("num_gpus") == 1 and row.get("gpu_outside_allocator_gb") is not None
    ]
    if outside:
        constant = CONTEXT_BYTES / BYTES_PER_GB
        text = f"outside the allocator on one GPU: {min(outside):.2f} to {max(outside):.2f} GB, {constant:.2f} assumed"
        yield f"\n{text}"
        yield "  (CONTEXT_BYTES in ds_bench/prediction/predicted_memory.py; NCCL's constants need several GPUs)"
        wrong += [text] if max(abs(size - constant) for size in outside) > _NEGLIGIBLE_GB / 2 else []
    for row in tables.get("short", []):
        if row["success"] and row.get("predicted_over_measured"):
            missing = row["gpu_peak_gb"] * (1 - row["predicted_over_measured"])
            text = f"{abs(missing):.3f} GB {'more' if missing > 0 else 'less'} than predicted"
            yield f"short sequences at stage 3: {row['gpu_peak_gb']:.3f} GB allocated, {text}"


def time_lines(out: Path, tables: dict[str, list[dict[str, Any]]], wrong: list[str]) -> Iterator[str]:
    """Warm against cold launch, and the product against a bare loop."""
    cold = {row["strategy"]: row for row in tables.get("launch-cold", []) if row["success"]}
    warm: dict[str, list[dict[str, Any]]] = {}
    for name, rows in tables.items():
        for row in rows if name.endswith("-zero") else ():
            other = cold.get(row["strategy"], {})
            same = all(row[each] == other.get(each) for each in ("model", "batch_size", "seq_length", "num_steps"))
            if row["success"] and row["launch"] == "warm" and same:
                warm.setdefault(row["strategy"], []).append(row)
    if warm:
        yield "\nlaunch               warm ms    cold ms  warm/cold   start warm s   start cold s"
    for strategy, rows in warm.items():
        other, of_warm = cold[strategy], median(row["avg_step_time_ms"] for row in rows)
        ratio, start = of_warm / other["avg_step_time_ms"], median(row["start_seconds"] for row in rows)
        yield (
            f"{strategy:<18} {of_warm:9.2f}  {other['avg_step_time_ms']:9.2f}  {ratio:9.3f}   "
            f"{start:12.1f}   {other['start_seconds']:12.1f}"
        )
        if REAL and not 0.95 < ratio < 1.05:
            wrong.append(f"warm and cold launch differ: {strategy}, ratio {ratio:.3f}")
    figures = read_json(out / "fidelity/figures.json") or {}
    for name, ratio in figures.get("ratio_to_bare", {}).items():
        spread = f"{ratio['min']:.3f} to {ratio['max']:.3f}"
        busy = max(figures.get("busy_before", [0]))
        noise = f", while others used up to {busy:.0%} of all cores" if busy > 0.1 else ""
        yield f"fidelity: product ({name}) / bare loop {ratio['median']:.3f} ({spread}){noise}"
        if REAL and not 0.97 < ratio["median"] < 1.03:
            wrong.append(f"the product's step takes {ratio['median']:.3f} times the bare loop's ({name} launch)")


# ------------------------------------------------------------------


def main() -> int:
    inventory = gpu_state.read_gpus()
    devices = gpu_state.select_visible(os.environ, inventory.gpus)
    require_ready(devices, inventory)
    large = "meta-llama/Llama-2-7b-hf"
    if devices and (devices[0].memory_total_bytes or 0) < 100 * BYTES_PER_GB:
        large = "meta-llama/Llama-3.2-3B"
    models = os.environ.get("GPU_CHECK_MODELS", f"gpt2 meta-llama/Llama-3.2-1B {large}").split()
    if not 1 <= len(models) <= 3:
        print("gpu_check: GPU_CHECK_MODELS names one to three models", file=sys.stderr)
        return 2
    models += models[-1:] * (3 - len(models))
    device = re.sub(r"[^a-z0-9]+", "-", (devices[0].name or "gpu").lower().removeprefix("nvidia ")) if CUDA else "cpu"
    default = ROOT / f"results/gpu_check_{device}_{datetime.now(UTC):%Y%m%d}"
    out = Path(sys.argv[1] if len(sys.argv) > 1 else default).resolve()
    words = os.environ.get("STEPS", "").split()
    names = [step.name for step in list_steps(models, out)]
    if unknown := [word for word in words if not any(is_named(name, word) for name in names)]:
        print(f"gpu_check: STEPS names {unknown[0]!r}, but the steps are: {' '.join(names)}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    check = Check(out, Path(os.environ.get("ARCHIVE") or f"{out}.tar.gz").resolve())
    harness.end_on_sigterm()
    check.say(f"gpu_check on {device}, {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}, models: {' '.join(models)}")
    if not REAL:
        where = "simulated cards" if SIMULATED else "the CPU accelerator"
        check.say(f"{where}, to try the plumbing: these figures say nothing about GPUs")
    due = sum(check.is_due(step, words) and not step.left_out for step in list_steps(models, out))
    check.say(f"{due} steps to do, at most {BUDGET_SECONDS:.0f} s in this call (BUDGET_SECONDS), results in {out}")
    save_nvidia_smi(out)
    codes, waiting = list[int](), list[str]()
    try:
        for step in list_steps(models, out):  # lazily: the probe's findings change later steps
            if not check.is_due(step, words):
                continue
            if step.left_out:
                check.say(f"{step.name}: left out, {step.left_out}")
            elif seconds_left() >= min(step.min_seconds, BUDGET_SECONDS / 3):
                codes.append(check.run(step))
            else:
                waiting.append(step.name)
        if waiting:
            check.say(f"not begun, the budget is spent: {' '.join(waiting)}")
    except KeyboardInterrupt:
        codes.append(130)
    finally:
        text = "\n".join(report(check)) + "\n"
        (out / "report.txt").write_text(text)
        check.archive()
        print(text)
        left = [step.name for step in list_steps(models, out) if check.is_due(step, []) and not step.left_out]
        check.say(f"left for the next call: {' '.join(left)}" if left else "nothing is left")
        if left:
            check.say(
                f"continue with: scripts/gpu_check.sh {shlex.quote(str(out))}   (and the same variables, without STEPS)"
            )
        check.say(f"archive: {check.archive_path} (docs/reference_results.md: how to send it)")
        check.archive()
    return 130 if 130 in codes else int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
