"""Build, initialise, warm up, measure, inspect: what a rank does between hello and its file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed

from ..config.spec import Placement
from ..records.rank_files import Assignment, HeartbeatWriter
from . import ledger, memory, training_loop
from . import model as build
from .cpu_load import CpuReading, load_between
from .resolved_config import resolved_config
from .weight_change import WeightChange

Keep = Callable[[dict[str, Any]], None]


def measure(assignment: Assignment, config: dict[str, Any], beat: HeartbeatWriter, keep: Keep) -> dict[str, Any]:
    """The fields of a RankMeasurement, as plain JSON values. Raises whatever torch or DeepSpeed raises.

    ``keep`` gets them before the inspection that follows the window, which must not lose what was measured.
    """
    trial = assignment.trial
    accelerator, workload = trial.placement.accelerator, trial.workload
    device = _take_device(trial.placement)
    beat.beat("build")
    _meet(assignment, accelerator)
    with _stopwatch() as building:
        built = build.build_model(workload, config, device, lambda: beat.beat("build"))
        model = built.module
        sizes = build.parameter_sizes(model)
    beat.beat("init")
    with _stopwatch() as initialising:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
        training_loop.synchronize(accelerator)
    trainer = _trainer(engine, built, config, assignment, device, beat)
    init_peak = memory.device_init_peak(accelerator)
    life_peak = memory.status_bytes("VmHWM")
    change = WeightChange(engine, beat)
    can_reset = memory.reset_host_peak()

    # Here and not before: stages draw differently while they build, and every row must drop the same elements.
    torch.manual_seed(workload.seed + torch.distributed.get_rank())
    beat.beat("warmup", 0)
    cpu_before = CpuReading.read()
    samples = training_loop.Samples(warmup_step_seconds=training_loop.warm_up(trainer, workload.warmup_steps))
    retries, io_before = memory.alloc_retries(accelerator), memory.io_bytes()
    if accelerator == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training_loop.measure(trainer, workload.num_steps, torch.distributed.barrier, samples)
    cpu_after = CpuReading.read()
    io_after = memory.io_bytes()
    device_facts = memory.device_facts(accelerator, retries, trial.placement.gpu_memory_limit_bytes)
    host_facts = dict(memory.host_facts(life_peak))
    if not can_reset:
        host_facts["host_peak_steps_bytes"] = None

    measured = {
        "rank": torch.distributed.get_rank(),
        "world_size": torch.distributed.get_world_size(),
        "device_name": torch.cuda.get_device_name() if accelerator == "cuda" else "cpu",
        "torch_version": str(torch.__version__),
        "deepspeed_version": str(deepspeed.__version__),
        **_engine_facts(engine),
        "parameter_count": sum(sizes),
        "largest_parameter": max(sizes),
        "dropout": build.greatest_dropout(model),
        "optimizer_settings": training_loop.optimizer_settings(engine.optimizer),
        "vocabulary_size": None if built.make_batch else build.vocabulary_size(model),
        "notes": _notes(built, workload.seq_length),
        "step_seconds": samples.step_seconds,
        "warmup_step_seconds": samples.warmup_step_seconds,
        "window_seconds": samples.window_seconds,
        "losses": samples.losses,
        "skipped_steps": samples.skipped_steps,
        "build_seconds": building(),
        "init_seconds": initialising(),
        "first_step_seconds": (samples.warmup_step_seconds or samples.step_seconds)[0],
        "gpu_init_peak_bytes": init_peak,
        **load_between(cpu_before, cpu_after),
        **device_facts,
        **host_facts,
        **_io_facts(assignment, io_before, io_after),
    }
    keep(measured)
    beat.beat("inspect")
    measured |= _inspect(trainer, assignment)
    keep(measured)
    # Last of all: where parameters lie on a disk, DeepSpeed fails in the next step after a forward pass that no
    # backward pass followed.
    measured |= {"weight_change": change.since_start(), "repeated_loss": training_loop.repeated_loss(trainer)}
    if change.note is not None:
        measured["notes"] = [*measured["notes"], change.note]
    del built
    return measured


def _notes(built: build.BuiltModel, seq_length: int) -> list[str]:
    if built.make_batch is None:
        return []
    return [f"the factory makes its own batches: a sample counts as {seq_length} tokens, whatever it holds"]


@contextlib.contextmanager
def _stopwatch() -> Iterator[Any]:
    start = time.perf_counter()
    end: list[float] = []
    yield lambda: end[0] - start
    end.append(time.perf_counter())


def _take_device(placement: Placement) -> torch.device:
    """This rank's device; on CUDA the current one from here on, with the emulated card size set."""
    if placement.accelerator == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    _reopen_nvml()
    if placement.gpu_memory_limit_bytes is not None:
        total = torch.cuda.get_device_properties(local_rank).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, placement.gpu_memory_limit_bytes / total))
        _tell_deepspeed_of_the_limit(placement.gpu_memory_limit_bytes)
    return torch.device("cuda", local_rank)


def _tell_deepspeed_of_the_limit(limit_bytes: int) -> None:
    """DeepSpeed flattens parameters on the card where it sees room there; it must see the emulated card's."""
    device = deepspeed.accelerator.get_accelerator()
    real = device.available_memory

    def available_memory(device_index: int | None = None) -> int:
        return min(int(real(device_index)), max(0, limit_bytes - torch.cuda.memory_allocated(device_index)))

    device.available_memory = available_memory


def _reopen_nvml() -> None:
    """DeepSpeed asks NVML for free memory at stages 1 and 2; the preloaded server has closed it before the fork."""
    from deepspeed.accelerator import cuda_accelerator

    if cuda_accelerator.pynvml is not None:
        cuda_accelerator.pynvml.nvmlInit()


def _meet(assignment: Assignment, accelerator: str) -> None:
    backend = "nccl" if accelerator == "cuda" else None
    limit = timedelta(seconds=assignment.collective_timeout_seconds or 3600.0)
    # DeepSpeed passes no timeout to new_group (comm/torch.py), and its data-parallel group is one (utils/groups.py):
    # torch would end every rank after its own default, 10 minutes with NCCL.
    groups: Any = torch.distributed.distributed_c10d  # which exports neither name
    groups.default_pg_timeout = groups.default_pg_nccl_timeout = limit
    if assignment.rendezvous is None:
        deepspeed.init_distributed(dist_backend=backend, timeout=limit)
        return
    deepspeed.init_distributed(
        dist_backend=backend,
        timeout=limit,
        init_method=assignment.rendezvous,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def _trainer(
    engine: Any,
    built: build.BuiltModel,
    config: dict[str, Any],
    assignment: Assignment,
    device: torch.device,
    beat: HeartbeatWriter,
) -> training_loop.Trainer:
    workload = assignment.trial.workload
    batches = training_loop.make_batches(
        built.make_batch or training_loop.random_tokens(build.vocabulary_size(built.module)),
        batch_size=int(engine.train_micro_batch_size_per_gpu()),
        seq_length=workload.seq_length,
        seed=workload.seed,
        rank=torch.distributed.get_rank(),
        count=(workload.warmup_steps + workload.num_steps) * int(engine.gradient_accumulation_steps()),
        device=device,
        dtype=build.training_dtype(config),
    )
    return training_loop.Trainer(engine, batches, assignment.trial.placement.accelerator, beat)


def _engine_facts(engine: Any) -> dict[str, Any]:
    wrapper = engine.optimizer
    return {
        "micro_batch_size": int(engine.train_micro_batch_size_per_gpu()),
        "grad_accum": int(engine.gradient_accumulation_steps()),
        "data_parallel_size": int(getattr(engine, "dp_world_size", torch.distributed.get_world_size())),
        "optimizer_class": type(getattr(wrapper, "optimizer", wrapper)).__name__,
        "engine_optimizer_class": type(wrapper).__name__,
        "resolved_config": resolved_config(engine),
    }


def _io_facts(
    assignment: Assignment, before: tuple[int, int] | None, after: tuple[int, int] | None
) -> dict[str, int | None]:
    if assignment.swap_folder is None or before is None or after is None:
        return {}
    return {"nvme_read_bytes": after[0] - before[0], "nvme_written_bytes": after[1] - before[1]}


@contextlib.contextmanager
def _halfway_through_backward(engine: Any) -> Iterator[list[ledger.Ledger]]:
    """A ledger from inside backward: stages 1 and 2 hold their gradient buckets only there (setup_buckets).

    Taken halfway at stage 2, and at the last gradient below, where every gradient is kept until then.
    """
    taken: list[ledger.Ledger] = []
    if engine.zero_optimization_stage() == 3:  # its bucket lives on, and hooks on partitioned parameters do not
        yield taken
        return
    trainable = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    moment = len(trainable) if engine.zero_optimization_stage() < 2 else max(2, len(trainable) // 2)
    seen: list[None] = []

    def count(gradient: torch.Tensor) -> None:
        seen.append(None)
        if len(seen) == moment:
            inside = ledger.count_storages(engine, others=False)
            inside.claim("gradients", [gradient])  # not in its parameter yet
            taken.append(inside.ledger)

    handles = [parameter.register_hook(count) for parameter in trainable]
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def _inspect(trainer: training_loop.Trainer, assignment: Assignment) -> dict[str, Any]:
    """Phases and ledger from extra steps after the window; they never touch the headline numbers."""
    phases = training_loop.phase_seconds(trainer)
    engine = trainer.engine
    batch = next(trainer._batches)
    loss, activations = ledger.with_activations(
        lambda: training_loop.loss_of(engine(**batch)), list(engine.module.parameters())
    )
    with _halfway_through_backward(engine) as inside:
        engine.backward(loss)
    del loss
    before_step = ledger.count_storages(engine)
    engine.step()
    for _ in range(trainer.grad_accum - 1):
        training_loop.micro_step(trainer, lambda _name, _seconds: None)
    after_step = ledger.count_storages(engine)
    peak = ledger.peak_of(*inside, before_step.ledger, after_step.ledger)
    for tier, size in activations.items():
        peak.setdefault(tier, {})["activations"] = size
    rank = torch.distributed.get_rank()
    stored = ledger.swapped_bytes(assignment.swap_folder, rank)
    if stored:
        peak["nvme"] = stored
    return {
        "phase_seconds": phases,
        "ledger": peak,
        "pinned_bytes": after_step.pinned_bytes,
        "nvme_stored_bytes": sum(stored.values()) if assignment.swap_folder else None,
    }
