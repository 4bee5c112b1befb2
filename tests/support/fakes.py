"""Stand-ins for tests: valid instances of every stage boundary, a launcher without processes, cards without a driver.

Every builder returns something valid; a test names only what it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ds_bench.analysis.comparison import rows_of
from ds_bench.analysis.load_results import make_runs
from ds_bench.cli.arguments import parse
from ds_bench.config import deepspeed_config, strategies
from ds_bench.config.identity import work_key
from ds_bench.config.options import Options
from ds_bench.config.spec import Configuration, Placement, Strategy, Trial, Workload
from ds_bench.config.training_script import Script
from ds_bench.launch import Progress, ProgressCallback
from ds_bench.models.lookup import ResolvedModel
from ds_bench.models.presets import ModelFacts, find_preset
from ds_bench.prediction.predicted_memory import Prediction
from ds_bench.records import schema
from ds_bench.records.run_folder import RunFolder
from ds_bench.records.schema import Outcome, RankFailure, RankMeasurement, ScriptMeasurement, TrialRecord
from ds_bench.system.environment import Environment, Machine
from ds_bench.system.gpu_state import GpuFacts, GpuInventory
from ds_bench.system.redaction import redacted_config

GB = 2**30


def workload(**changes: Any) -> Workload:
    """Ten steps of batch 4 × 128 tokens on the tiny preset."""
    facts = find_preset("tiny")
    assert facts is not None
    values: dict[str, Any] = {
        "model": "tiny",
        "model_source": "preset",
        "model_type": facts.model_type,
        "model_config": facts.config,
        "batch_size": 4,
        "seq_length": 128,
        "num_steps": 10,
        "warmup_steps": 2,
        "precision": "bf16",
    }
    return Workload(**{**values, **changes})


def placement(**changes: Any) -> Placement:
    """One CPU rank."""
    return Placement(**{"accelerator": "cpu", "num_gpus": 1, **changes})


def with_another(part: Any, name: str) -> Any:
    """The workload or placement with a different value in one field."""
    value = getattr(part, name)
    script = Script(command=("train.py",), digest=None, python="python", config_source="override")
    others: dict[str, Any] = {
        "dropout": 0.5,
        "vocab_size": 9,
        "attention": "eager",
        "hosts": (("a", 3), ("b", 1)),
        "script": script,
    }
    if isinstance(value, int):
        other: Any = not value if isinstance(value, bool) else value + 1
    else:
        other = {"n_layer": 1} if isinstance(value, Mapping) else "another"
    return replace(part, **{name: others.get(name, other)})


def zero(stage: int) -> Configuration:
    return strategies.make_configuration(strategies.ZERO_STAGES[stage])


def offload(name: str, stage: int = 3) -> Configuration:
    return strategies.make_configuration(strategies.offload_strategy(name, stage))


def reference(name: str) -> Configuration:
    """``ddp`` or ``fsdp2``."""
    return strategies.make_configuration(strategies.named_strategy(name))


def trial(
    configuration: Configuration | None = None,
    *,
    on: Placement | None = None,
    of: Workload | None = None,
    **changes: Any,
) -> Trial:
    """One trial of ``configuration`` (ZeRO-0 by default), completed as a real run would complete it."""
    configuration, on, of = configuration or zero(0), on or placement(), of or workload()
    base = deepspeed_config.base_config(configuration, of.batch_size, of.grad_accum)
    config = deepspeed_config.complete_config(
        base,
        of,
        on,
        torch_adam=True,
        largest_parameter=1000,
    )
    values: dict[str, Any] = {
        "trial_id": f"00_{configuration.name}",
        "repeat": 0,
        "configuration": replace(configuration, deepspeed_config=base),
        "workload": of,
        "placement": on,
        "ds_config": config,
    }
    return Trial(**{**values, **changes})


def prediction(**changes: Any) -> dict[str, Any]:
    """The predicted memory as a trial holds it, empty except for ``changes``."""
    values: dict[str, Any] = {
        "gpu": {},
        "host": {},
        "nvme": {},
        "phase": "loss",
        "ledger": {},
    }
    return Prediction(**{**values, **changes}).to_dict()


def measurement(of: Trial | None = None, *, step_seconds: Sequence[float] = (), **changes: Any) -> RankMeasurement:
    """What rank 0 of a trial measured: steps of 0.1 s, losses that fall from 7."""
    of = of or trial()
    if of.workload.script is not None:
        changes = {"script": script_measurement(of), "trainable_parameter_count": 1_000_000, **changes}
    steps = tuple(step_seconds) or (0.1,) * of.workload.num_steps
    warmup = (0.5,) * of.workload.warmup_steps
    on_gpu = of.placement.accelerator == "cuda"
    values: dict[str, Any] = {
        "rank": 0,
        "world_size": of.placement.num_gpus,
        "hostname": "node-0",
        "device_name": "NVIDIA H100 80GB HBM3" if on_gpu else "cpu",
        "torch_version": "2.13.0",
        "deepspeed_version": "0.19.8",
        "micro_batch_size": of.workload.batch_size,
        "grad_accum": of.workload.grad_accum,
        "data_parallel_size": of.placement.num_gpus,
        "optimizer_class": "AdamW",
        "engine_optimizer_class": "DeepSpeedZeroOptimizer",
        "parameter_count": 1_000_000,
        "resolved_config": redacted_config({"train_batch_size": 4, **of.ds_config}),
        "step_seconds": steps,
        "warmup_step_seconds": warmup,
        "window_seconds": sum(steps),
        "losses": tuple(7.0 - 0.01 * step for step in range(len(warmup) + len(steps))),
        "skipped_steps": 0,
        "host_peak_bytes": 2 * GB,
        "phase_seconds": {"forward": 0.03, "backward": 0.05, "step": 0.02},
    }
    if on_gpu:
        values |= {
            "gpu_total_bytes": 80 * GB,
            "gpu_init_peak_bytes": 3 * GB,
            "gpu_peak_bytes": 8 * GB,
            "gpu_peak_reserved_bytes": 10 * GB,
            "gpu_allocated_bytes": 5 * GB,
            "gpu_reserved_bytes": 9 * GB,
            "gpu_device_used_bytes": 11 * GB,
            "gpu_alloc_retries": 0,
        }
    return RankMeasurement(**{**values, **changes})


def script_measurement(of: Trial, **changes: Any) -> ScriptMeasurement:
    """What a rank of a user's script saw: 64 tokens in each step, which ran the row's configuration."""
    steps = of.workload.warmup_steps + of.workload.num_steps
    row = of.configuration
    values: dict[str, Any] = {
        **dict.fromkeys(("tokens", "unpadded_tokens"), (64,) * steps),
        **dict.fromkeys(("evaluation_forwards", "saves"), (0,) * steps),
        "id_sums": tuple(range(steps)),
        "micro_steps": (1,) * steps,
        "gap_seconds": (0.01,) * steps,
        **{name: getattr(row, name) for name in ("stage", "offload_optimizer", "offload_param")},
        "precision": "bf16",
        "main_engine": "GPT2LMHeadModel",
        "other_engines": (),
    }
    return ScriptMeasurement(**{**values, **changes})


def script_of_samples(of: Trial, samples: int) -> ScriptMeasurement:
    """The same for a script without token ids, with that many samples in each step."""
    steps = of.workload.warmup_steps + of.workload.num_steps
    none = dict.fromkeys(("tokens", "unpadded_tokens"), (0,) * steps)
    return script_measurement(of, **none, samples=(samples,) * steps)


def success(of: Trial | None = None, *, step_seconds: Sequence[float] = (), **changes: Any) -> TrialRecord:
    """A trial that ended well, with one measurement per rank; ``changes`` apply to every rank."""
    of = of or trial()
    first = measurement(of, step_seconds=step_seconds, **changes)
    ranks = tuple(replace(first, rank=rank) for rank in range(of.placement.num_gpus))
    return TrialRecord(
        trial=of,
        outcome=Outcome(status=schema.SUCCESS),
        ranks=ranks,
        launch="warm",
        started_at="2026-11-21T09:30:00+00:00",
        wall_seconds=12.5,
        start_seconds=4.5,
        caveats=of.caveats,
    )


def failure(of: Trial | None = None, status: str = schema.OOM, **changes: Any) -> TrialRecord:
    """A trial that did not end well."""
    of = of or trial()
    values: dict[str, Any] = {
        "error": f"{status} in backward: asked 2.00 GB",
        "details": f"{status} in backward: asked 2.00 GB; phase backward; rank 0; log /run/rank0.log",
        "phase": "backward",
        "rank": 0,
    }
    outcome = Outcome(status=status, **{**values, **changes})
    return TrialRecord(trial=of, outcome=outcome, launch="warm", wall_seconds=3.0, caveats=of.caveats)


def rank_failure(**changes: Any) -> RankFailure:
    """An exception on rank 0 in the backward pass of step 3, at time 100."""
    values: dict[str, Any] = {
        "rank": 0,
        "error_class": "RuntimeError",
        "message": "shapes do not match",
        "phase": "backward",
        "time": 100.0,
        "step": 3,
    }
    return RankFailure(**{**values, **changes})


def measured_file(seen: RankMeasurement) -> dict[str, Any]:
    """The contents of a rank file after success."""
    return {"measurement": asdict(seen)}


def failed_file(seen: RankFailure) -> dict[str, Any]:
    """The contents of a rank file after an exception."""
    return {"failure": asdict(seen)}


def options(family: str = "zero", *arguments: str) -> Options:
    """The Options that these flags define."""
    return parse(family, f"{family}.py", arguments)  # type: ignore[arg-type]


def resolved_model(name: str = "tiny", **changes: Any) -> ResolvedModel:
    """A preset as ``resolve_model`` would return it."""
    facts = find_preset(name)
    assert facts is not None
    found = ResolvedModel(
        name=facts.name,
        source="preset",
        model_type=facts.model_type,
        config=facts.config,
        facts=facts,
        largest_parameter=facts.largest_parameter,
        max_positions=facts.max_positions,
        vocabulary_size=facts.vocabulary_size,
        hidden_size=facts.hidden_size,
    )
    return replace(found, **changes)


def make_config(strategy: Strategy, batch_size: int, grad_accum: int = 1) -> dict[str, Any]:
    """The unedited function of the scripts."""
    return deepspeed_config.base_config(strategy, batch_size, grad_accum)


Scripted = str | BaseException | Callable[[Trial], TrialRecord]


class FakeLauncher:
    """A Launcher without processes: plays a script, one entry per trial, and succeeds if there is none left.

    An entry is a status, a function that makes the record, or an exception to raise. ``Interrupted``
    is what a real launcher raises on Ctrl-C.
    """

    def __init__(self, *script: Scripted, by_strategy: Mapping[str, Scripted] | None = None) -> None:
        self._script = list(script)
        self._by_strategy = dict(by_strategy or {})
        self.launched: list[Trial] = []
        self.folders: list[Path] = []

    def launch(self, trial: Trial, folder: Path, listen: ProgressCallback) -> TrialRecord:
        """See ``ds_bench.launch.Launcher``."""
        self.launched.append(trial)
        self.folders.append(folder)
        listen(Progress(phase="forward", step=1, last_step_seconds=0.1, elapsed_seconds=1.0))
        entry: Scripted = (
            self._script.pop(0) if self._script else self._by_strategy.get(trial.configuration.name, "Success")
        )
        if isinstance(entry, BaseException):
            raise entry
        if callable(entry):
            return entry(trial)
        return success(trial) if entry == schema.SUCCESS else failure(trial, entry)


def inventory(cards: int = 0, capability: tuple[int, int] = (9, 0)) -> GpuInventory:
    """The GPUs of a host with ``cards`` identical cards."""
    made = (
        GpuFacts(
            index=index,
            name="NVIDIA H100 80GB HBM3",
            uuid=f"GPU-{index}{index}{index}",
            compute_capability=capability,
            memory_total_bytes=80 * GB,
        )
        for index in range(cards)
    )
    return GpuInventory(driver_version="580.65", gpus=tuple(made))


def preset(name: str) -> ModelFacts:
    facts = find_preset(name)
    assert facts is not None
    return facts


def environment(**changes: Any) -> Environment:
    """A host with two H100s."""
    values: dict[str, Any] = {
        "hostname": "node-0",
        "cpu_model": "AMD EPYC 9654",
        "logical_cores": 16,
        "host_memory_bytes": 256 * GB,
        "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0"},
        "gpus": inventory(cards=2).gpus,
    }
    return Environment(**{**values, **changes})


def machine(cards: int = 0) -> Machine:
    """The host of :func:`environment` with that many H100s, and no variables."""
    return Machine(
        environment=environment(gpus=inventory(cards).gpus),
        gpus=inventory(cards),
        variables={},
    )


def write_run(
    folder: Path,
    records: Sequence[TrialRecord],
    *,
    on: Environment | None = None,
    family: str = "zero",
    arguments: Sequence[str] = ("--model", "tiny"),
    notes: Sequence[str] = (),
) -> RunFolder:
    """A finished run on disk, as a comparison script leaves it."""
    store = RunFolder.create(folder, family)
    facts = {
        "ds_bench_version": "0.0.0",
        "family": family,
        "arguments": list(arguments),
        "environment": (on or environment()).to_dict(),
        "notes": list(notes),
        "trials": [{"key": work_key(entry.trial), **entry.trial.to_dict()} for entry in records],
    }
    store.save_run(facts)
    for entry in records:
        store.append(entry)
    host, run_id = on or environment(), store.folder.name
    store.write_rows(rows_of(make_runs(records, None, host, run_id)))
    return store
