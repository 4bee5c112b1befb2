"""Reads a result: turns the files that the user names into runs and the environment of the measurement.

A run folder holds everything, a flat JSON only its rows (:func:`flat_run`). An unusable file raises a one-line
UsageError. :mod:`merge_results` combines several results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from ..config import axis_rows, strategies
from ..config.deepspeed_config import minimal_config
from ..config.identity import work_key
from ..config.spec import Configuration, PassType, Placement, Strategy, Trial, Workload
from ..config.training_script import Script
from ..errors import UsageError
from ..models.presets import find_preset
from ..records import json_files, reader
from ..records.reader import RunInfo, StoredRecord
from ..records.result_files import flat_json_path
from ..records.run_folder import RECORDS_FILE, RUN_FILE
from ..records.schema import SUCCESS, TrialRecord
from ..system.environment import Environment
from ..system.gpu_state import GpuFacts
from ..units import BYTES_PER_GB, format_place
from . import flops
from .loss_parity import with_loss_caveats
from .row import MIG_SUFFIX, Row, Run, make_run

_FLAT_NAME = re.compile(r"(?:(zero|offload)_)?comparison_(\w+)")
_MAX_PEAK_TFLOPS = 1e9
_VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors from computing with a file's values that have the right type but are impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The content of one result; fields that its files do not hold are None or empty."""

    source: Path
    """The path that the user named."""
    runs: tuple[Run, ...]
    """The last run of each trial, in the order of the plan."""
    environment: Environment | None
    family: str | None
    """``zero``, ``offload`` or ``recipe``."""
    arguments: tuple[str, ...]
    """As typed, without the program's name."""
    notes: tuple[str, ...]
    """Notes of the run, then notes from reading it."""
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_records(self) -> bool:
        """Whether it was read from a run folder rather than from flat rows."""
        return all(run.has_record for run in self.runs)


class NoTrialsError(UsageError):
    """A run folder without records: no trial had finished."""


def load(path: Path, *, whole: bool = True) -> Result:
    """Read a run folder, its run.json or records.jsonl, or a flat JSON.

    ``whole``: read every record, which a comparison with another result needs; if false, read a record only when its
    flat row does not suffice. Raises UsageError.
    """
    path = Path(path)
    try:
        if path.is_dir():
            if not _holds_run(path):
                # A run that was killed immediately leaves an empty folder; any other folder was named by mistake.
                kind = NoTrialsError if path.resolve().parent.name == "runs" else UsageError
                remedy = "give <output-dir>/runs/<run> or a result's .json"
                raise kind(f"{path} holds neither {RUN_FILE} nor {RECORDS_FILE}", remedy=remedy)
            return _load_run(path, path, whole)
        if path.name in (RUN_FILE, RECORDS_FILE):
            with json_files.opened(path):  # raises UsageError unless it exists and is a file
                return _load_run(path.parent, path, whole)
        return _load_flat_json(path, json_files.read_bytes(path), whole)
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply", remedy="use the result as ds_bench wrote it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="give a result that you can read") from None


def make_runs(
    records: Sequence[TrialRecord],
    peak_tflops: float | None = None,
    environment: Environment | None = None,
    run_id: str | None = None,
) -> tuple[Run, ...]:
    """Make the runs of one table. ``peak_tflops``: of one device, if the user gave it."""
    find_model, find_peak = cache(find_preset), cache(flops.mean_peak_flops)
    runs = []
    for record in records:
        workload = record.trial.workload
        facts = find_model(workload.model) if workload.model_source == "preset" else None
        # The user's rate applies to any device; the built-in table has only GPUs.
        peak_flops = peak_tflops * 1e12 if peak_tflops else None
        if peak_flops is None and record.ranks and record.trial.placement.accelerator == "cuda":
            names = tuple(rank.device_name for rank in record.ranks)
            peak_flops = find_peak(names, flops.peak_precision(record))
        runs.append(make_run(record, facts, peak_flops, environment, run_id))
    return tuple(with_loss_caveats(runs))


def run_folder_of(path: Path) -> Path | None:
    """Return the run folder that holds a result or that its name refers to; None for a flat JSON without one."""
    if path.is_dir() or path.name in (RUN_FILE, RECORDS_FILE):
        return (path if path.is_dir() else path.parent).resolve()
    if (name := _FLAT_NAME.match(path.stem)) is None:
        return None
    folder = path.parent / "runs" / f"{name[1] or 'comparison'}_{name[2]}"
    return folder if _holds_run(folder) else None


def _holds_run(folder: Path) -> bool:
    return (folder / RUN_FILE).is_file() or (folder / RECORDS_FILE).is_file()


# ------------------------------------------------------------------ a run folder


def _load_run(folder: Path, source: Path, whole: bool, rows: Sequence[Row] | None = None) -> Result:
    """``rows``: those of the folder's flat JSON, if already read."""
    notes: list[str] = []
    run_info, file = reader.read_run(folder / RUN_FILE, notes), folder / RECORDS_FILE
    if not file.exists():
        raise NoTrialsError(f"{folder} has no {RECORDS_FILE}: no trial had finished", remedy="give another result")
    if rows is None:
        flat_path = flat_json_path(folder.resolve())
        with contextlib.suppress(UsageError):
            rows = read_rows(flat_path, json_files.read_bytes(flat_path))
    runs = _runs_of_rows(rows or (), file, run_info.environment, whole)
    if len(runs) < (run_info.trial_count or 1):
        planned = reader.read_trials(folder / RUN_FILE)
        if not runs:
            records = reader.read_records(file, planned, notes)
            # Without run.json this may not be a run folder.
            run_id = file.resolve().parent.name if planned else None
            try:
                runs = make_runs(records, _peak_tflops(run_info), run_info.environment, run_id)
            except _VALUE_ERRORS as error:
                problem = f"{source} holds impossible figures or settings: {type(error).__name__}: {error}"
                raise UsageError(" ".join(problem.split()), remedy="use the result as ds_bench wrote it") from error
        keys = set(map(work_key, planned))
        if missing := len(keys - {work_key(run.trial) for run in runs}):
            lacking = f"{missing} of the {len(planned)} planned trials {'has' if missing == 1 else 'have'} no record"
            notes.append(f"{lacking}: the run is incomplete")
    return Result(
        source=source,
        runs=runs,
        environment=run_info.environment,
        family=run_info.family,
        arguments=run_info.arguments,
        notes=(*run_info.notes, *notes),
        recipe=run_info.recipe,
    )


def _runs_of_rows(rows: Sequence[Row], file: Path, environment: Environment | None, whole: bool) -> tuple[Run, ...]:
    """Return a run for each row, with its record; empty if rows and records do not match one to one."""
    if not rows:
        return ()
    stored = reader.index_records(file)
    keys = [(row.trial_id, row.repeat, row.started_at, row.wall_seconds) for row in rows]
    if len(set(keys)) < len(keys) or stored.keys() != set(keys):
        return ()
    hosts = () if environment is None else environment.hosts_of_ranks
    # A row has the memory of the smallest card only.
    whole = whole or len({(gpu.name, gpu.memory_total_bytes) for host in hosts for gpu in host.gpus}) > 1
    runs = []
    for row, key in zip(rows, keys, strict=True):
        entry: StoredRecord | TrialRecord = stored[key]
        try:
            _check(row)
            if not _is_row_of(row, stored[key]):
                return ()
            if whole and (record := stored[key].record) is not None:
                entry = replace(record, trial=entry.trial)  # repeats share its parts
        except (ValueError, UsageError):
            return ()  # read_records will report the error
        runs.append(Run(row=row, stored=entry, environment=environment))
    return tuple(runs)


def _is_row_of(row: Row, entry: StoredRecord) -> bool:
    """Return whether a row has its record's step time and throughput: somebody may have edited the file."""
    window_seconds = (row.avg_step_time_ms or 0.0) / 1000 * row.num_steps
    if not math.isclose(window_seconds, entry.window_seconds, rel_tol=1e-6):
        return False
    if row.script is not None:  # a script's sequence lengths vary, so only the record knows its tokens
        return True
    sizes = (row.batch_size, row.grad_accum, row.data_parallel_size, row.seq_length, row.num_steps)
    tokens = math.prod(size or 0 for size in sizes)
    return math.isclose((row.throughput_tokens_per_sec or 0.0) * window_seconds, tokens, rel_tol=1e-6)


def recipe_value(recipe: Mapping[str, Any], section: str, key: str) -> Any:
    """Return a value of a run's recipe as written, unchecked; None if it has none."""
    sections = recipe.get("values")
    block = sections.get(section) if isinstance(sections, dict) else None
    return block.get(key) if isinstance(block, dict) else None


def _peak_tflops(run_info: RunInfo) -> float | None:
    """Return the peak rate from a run's flags or recipe; None if not given or impossible."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--peak-tflops", type=float)
    value = recipe_value(run_info.recipe, "launch", "peak_tflops")
    # A recipe holds the rate itself; without a recipe, it is among the typed flags.
    if not run_info.recipe:
        with contextlib.suppress(argparse.ArgumentError):
            value = parser.parse_known_args(run_info.arguments)[0].peak_tflops
    possible = isinstance(value, (int, float)) and 0 < value < _MAX_PEAK_TFLOPS
    return float(value) if possible else None


# ------------------------------------------------------------------ a flat JSON


def _load_flat_json(path: Path, data: bytes, whole: bool) -> Result:
    """Load the run folder of a flat JSON if it exists and holds the same rows, else only the rows of the JSON."""
    notes: list[str] = []
    rows = read_rows(path, data)
    if (folder := run_folder_of(path)) is not None:
        try:
            run = _load_run(folder, path, whole, rows)
        except UsageError as error:
            notes.append(f"its run folder cannot be used: {error}")
        else:
            # The file may have been edited, or be next to another run's folder.
            if [each.row for each in run.runs] == rows:
                return run
            notes.append(f"{folder} and {path.name} hold different rows: the file is used")
    runs = []
    for number, row in enumerate(rows, 1):
        try:
            runs.append(flat_run(row))
        except ValueError as error:
            raise UsageError(f"{path}: row {number} is not usable: {error}", remedy="correct or remove it") from None
    notes.append("read from a flat JSON, which has mean step times only and no DeepSpeed configurations")
    environment, name = runs[0].environment, _FLAT_NAME.match(path.stem)
    return Result(
        source=path,
        runs=tuple(runs),
        environment=environment if all(run.environment == environment for run in runs) else None,
        family=(name[1] or "recipe") if name else None,
        arguments=(),
        notes=tuple(notes),
    )


def read_rows(path: Path, data: bytes) -> list[Row]:
    """Read the rows of a flat JSON. Raises UsageError."""
    from pydantic import ValidationError

    remedy = "give a run folder, or a result's .json"
    try:
        rows = json_files.adapter(list[Row]).validate_json(data.removeprefix(b"\xef\xbb\xbf"))
    except ValidationError as error:
        found = json_files.invalid_value(error)
        if not found.place:
            is_json = error.errors()[0]["type"] != "json_invalid"
            reason = "is not a result: it does not hold a list of rows" if is_json else found.reason
            raise UsageError(f"{path} {reason}", remedy=remedy) from None
        index, *cell = found.place
        place = ": ".join(filter(None, [f"row {int(index) + 1}", format_place(cell)]))
        raise UsageError(f"{path}: {place} {found.reason}", remedy="use the result as ds_bench wrote it") from None
    if not rows:
        raise UsageError(f"{path} has no rows", remedy="no trial had finished; run it again")
    return rows


_MAX_GPUS = 1024
"""Maximum number of GPUs per host, so that a damaged row cannot create millions of objects."""
_MAX_RANKS = 2**20
"""The same for a job."""
_WORKLOAD_COLUMNS = (
    "batch_policy", "seq_policy", "pass_type", "synchronized", "vocab_size", "dropout", "lora", "freeze",
    "batch_size", "seq_length", "grad_accum", "activation_checkpointing",
)  # fmt: skip
"""Columns with the same name as a field of the workload."""
_preset = cache(find_preset)


def flat_run(row: Row) -> Run:
    """Make a run from a row without its record. Raises ValueError if the values contradict each other."""
    _check(row)
    configuration = _configuration(row.strategy, row.stage, row.engine)
    facts, ranks, nodes = _preset(row.model), row.num_gpus, row.num_nodes or 1
    if not 1 <= nodes <= ranks <= _MAX_RANKS:
        raise ValueError(f"num_nodes is {nodes} and num_gpus {ranks}")
    if row.pass_type not in (None, *get_args(PassType)):
        raise ValueError(f"pass_type is {row.pass_type!r}")
    columns = {name: getattr(row, name) for name in _WORKLOAD_COLUMNS}
    workload: dict[str, Any] = {name: value for name, value in columns.items() if value is not None}
    point = json.loads(row.point or "{}")
    if not isinstance(point, dict):
        raise ValueError("point is not a JSON object")
    trial = Trial(
        trial_id=row.trial_id or f"{row.strategy}_r{row.repeat}",
        repeat=row.repeat,
        configuration=configuration,
        workload=Workload(
            model=row.model,
            model_source="script" if row.script else "preset" if facts else "factory" if ":" in row.model else "hub",
            script=_script(row),
            model_type=facts.model_type if facts else None,
            model_config=facts.config if facts else {},
            num_steps=row.num_steps,
            warmup_steps=row.warmup_steps,
            precision="bf16" if row.script else row.precision,  # type: ignore[arg-type]
            data_path=row.data_file,
            **workload,
        ),
        placement=Placement(
            accelerator=row.accelerator,  # type: ignore[arg-type]
            num_gpus=ranks,
            launcher="deepspeed" if row.launch == "deepspeed" else "warm",
            gpu_memory_limit_bytes=_emulated_bytes(row),
            hosts=tuple((f"node{node}", ranks // nodes + (node < ranks % nodes)) for node in range(nodes))
            if nodes > 1
            else (),
        ),
        ds_config=configuration.deepspeed_config,
        round_position=row.round_position,
        point=point,
    )
    return Run(row=row, stored=StoredRecord(trial=trial), environment=_environment(row))


def _check(row: Row) -> None:
    """Raise ValueError if status, success and figures contradict each other."""
    if (row.status.removeprefix("✅ ") == SUCCESS) != row.success:
        raise ValueError(f"success is {str(row.success).lower()} and status is {row.status}")
    if row.success and not (row.avg_step_time_ms and (row.throughput_tokens_per_sec or row.script)):
        raise ValueError("a successful row must have a step time and a throughput")


def _script(row: Row) -> Script | None:
    if row.script is None:
        return None
    return Script(
        command=tuple(shlex.split(row.script)),
        digest=row.script_hash,
        python=row.python or "",
        config_source=row.config_source,  # type: ignore[arg-type]
    )


@cache
def _configuration(name: str, stage: int, engine: Any) -> Configuration:
    """Return the strategy from the catalogue, else a configuration of that name without offload."""
    base, values = axis_rows.split_name(name)
    strategy = strategies.find_strategy(base, stage) or Strategy(name=base, label=base, stage=stage)
    strategy = replace(strategy, engine=engine or strategy.engine)
    made = strategies.make_configuration(strategy, minimal_config(strategy))
    if not values:
        return made
    label = axis_rows.row_label(made.label, values)
    axis_values = {value.axis_name: value.text for value in values}
    return replace(made, name=name, label=label, source="axis", axis_values=axis_values)


def _emulated_bytes(row: Row) -> int | None:
    """Return the memory of an emulated GPU, computed from ``gpu_percent``; None if the GPU is real."""
    used = row.gpu_peak_reserved_gb or row.gpu_peak_gb
    if not (row.gpu_total_gb and row.gpu_percent and used):
        return None
    size_gb = used / (row.gpu_percent / 100)
    # On a real GPU, the percentage also counts memory outside the allocator, so this size is below the GPU's total and
    # has at most three decimals only by chance. A limit is assumed to have been typed with at most three.
    is_limit = abs(1000 * size_gb - round(1000 * size_gb)) < 1e-6
    return round(size_gb * BYTES_PER_GB) if is_limit and size_gb < row.gpu_total_gb * (1 - 1e-6) else None


def _environment(row: Row) -> Environment | None:
    """Return the facts that make results comparable; None if the row lacks them.

    GPUs of several kinds become one kind with all their names, so that such a row is comparable only with rows of
    the same kinds.
    """
    if not row.cpu_logical_cores:
        return None
    gpu = GpuFacts(
        index=0,
        name=row.gpu_name and row.gpu_name.removesuffix(MIG_SUFFIX),
        memory_total_bytes=None if row.gpu_memory_gb is None else round(row.gpu_memory_gb * BYTES_PER_GB),
        mig=bool(row.gpu_name and row.gpu_name.endswith(MIG_SUFFIX)),
    )
    versions = {
        "torch": row.torch_version,
        "deepspeed": row.deepspeed_version,
        "transformers": row.transformers_version,
    }
    return Environment(
        hostname="",
        packages={name: version for name, version in versions.items() if version},
        gpus=tuple(replace(gpu, index=index) for index in range(min(row.gpu_count or 0, _MAX_GPUS))),
        cpu_model=row.cpu_model,
        logical_cores=row.cpu_logical_cores,
        physical_cores=row.cpu_physical_cores,
        cpu_quota_cores=row.cpu_quota_cores,
        torch_cuda_version=row.cuda_version,
        gpu_driver_version=row.gpu_driver_version,
    )
