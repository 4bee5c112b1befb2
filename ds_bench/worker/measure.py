"""The work of a rank between its first heartbeat and its file: build, initialize, warm up, measure, inspect."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed

from ..config.caveat_texts import Caveat, CaveatKind
from ..config.deepspeed_config import is_deepcompiled
from ..config.spec import PassType
from ..records.rank_files import Assignment, HeartbeatWriter
from ..records.schema import largest_by_category
from . import ledger, library_versions, measured_memory, training_loop
from . import model as build
from .batches import has_token_per_position, prepare_batches
from .checkpoint import measure_checkpoint
from .cpu_load import CpuReading, load_between
from .engine import create_engine, engine_facts, select_device
from .flop_count import FlopCount
from .profiles import take_profiles
from .rank_layout import RankLayout, connect_ranks, register_sequence_attention
from .reference_engines import ReferenceEngine, total_grad_norm
from .step_clock import StepRecorder
from .training_loop import measure_communication, measure_phases
from .weight_change import FrozenWeights, WeightChange, early_window, gather_tensor_parallel

SavePartial = Callable[[dict[str, Any]], None]
_PHASES_LEFT_OUT: dict[PassType, tuple[str, ...]] = {
    "forward": ("backward", "step"),
    "forward_backward": ("step",),
    "train": (),
}


def measure(
    assignment: Assignment,
    config: dict[str, Any],
    heartbeat: HeartbeatWriter,
    save_partial: SavePartial,
    folder: Path,
) -> dict[str, Any]:
    """Return the fields of a RankMeasurement as JSON values; ``notes`` may hold Caveats.

    Raises whatever torch or DeepSpeed raises.

    ``save_partial`` gets them before the inspection that follows the measured window, so that a failure there does not
    lose them. ``folder``: the trial's.
    """
    trial = assignment.trial
    accelerator, workload = trial.placement.accelerator, trial.workload
    # First: what follows allocates on the current device, and under the memory limit of an emulated GPU.
    device = select_device(trial.placement)
    if accelerator == "cuda" and (settings := trial.configuration.variables.get("PYTORCH_CUDA_ALLOC_CONF")):
        # torch may have read the variable before this rank was forked.
        library_versions.set_allocator_settings(settings)
    heartbeat.beat("build")
    connect_ranks(assignment, accelerator)
    meter = measured_memory.PhaseMeter(accelerator)
    meter.end("import")
    layout = RankLayout.from_config(config)
    engine_name = trial.configuration.engine
    built = build.build_model(workload, config, device, lambda: heartbeat.beat("build"), engine_name)
    model = built.module
    sizes, trained = build.parameter_sizes(model), build.parameter_sizes(model, trained=True)
    if not trained:
        raise ValueError("every parameter of the model is frozen (requires_grad is False): nothing would train")
    meter.end("build")
    heartbeat.beat("init")
    micro_batch_size = int(config["train_micro_batch_size_per_gpu"])
    mpu = register_sequence_attention(model, layout, micro_batch_size, workload.seq_length)
    engine = create_engine(engine_name, model, config, device, mpu, workload, lambda: heartbeat.beat("init"))
    if workload.compile != "none" or is_deepcompiled(config):
        engine.compile()
    count = (workload.warmup_steps + workload.num_steps) * int(engine.gradient_accumulation_steps())
    own_batch_size = int(engine.train_micro_batch_size_per_gpu())
    held, loaded = prepare_batches(built, workload, config, layout, device, batch_size=own_batch_size, count=count)
    trainer = training_loop.Trainer(
        engine,
        held,
        accelerator,
        heartbeat,
        loaded=loaded,
        loss_share=layout.loss_share(workload.seq_length),
        loss_parts=layout.sequence_size,
        synchronized=workload.synchronized,
    )
    if trial.inspection.monitor is not None:
        samples_per_step = micro_batch_size * trainer.grad_accum * layout.data_parallel_size
        tokens = samples_per_step * workload.seq_length
        trainer.recorder = StepRecorder(folder, torch.distributed.get_rank(), accelerator, trainer.grad_accum, tokens)
    meter.end("initialize")
    measured_memory.empty_device_cache(accelerator)
    change, frozen = WeightChange(engine, heartbeat), FrozenWeights(engine, heartbeat)
    # The phase starts again, so that no phase includes reading the weights.
    meter.begin()

    # Seeded again: while the model is built, stages draw different random numbers, and dropout must drop the same
    # elements in every row.
    torch.manual_seed(workload.seed + layout.dropout_rank)
    heartbeat.beat("warmup", 0)
    cpu_before = CpuReading.read()
    notes: list[str | Caveat] = list(built.notes)
    if built.make_batch and not has_token_per_position(trainer.first_batch, micro_batch_size, workload.seq_length):
        notes.append(Caveat(CaveatKind.OWN_BATCHES, {"seq_length": workload.seq_length}))
    early = early_window(config, workload.warmup_steps if workload.pass_type == "train" else 0)
    between = [(1, lambda: meter.end("first_step")), *change.watch(early, lambda: trainer.skipped)]
    warmup_seconds = training_loop.warm_up(trainer, workload.warmup_steps, between)
    min_warmup = training_loop.DEEPCOMPILE_WARMUP if is_deepcompiled(config) else 0
    further = training_loop.warm_up_compiled(trainer, len(warmup_seconds), min_warmup)
    if further:
        warmup_seconds += further
        notes.append(f"warm-up steps added to let compilation settle: {len(further)}")
    graphs = training_loop.compiled_graphs()
    retries, io_before = measured_memory.alloc_retries(accelerator), measured_memory.io_bytes()
    # The phase would be empty if no step followed the one that ended first_step.
    if len(warmup_seconds) > min(workload.warmup_steps, 1):
        meter.end("warm_up")
    window = training_loop.measure_window(trainer, workload.num_steps, torch.distributed.barrier)
    compiled_within = training_loop.compiled_graphs() - graphs
    if compiled_within:
        graphs_text = "a graph was" if compiled_within == 1 else f"{compiled_within} graphs were"
        notes.append(f"{graphs_text} compiled during the measured steps, which slowed them down")
    cpu_after = CpuReading.read()
    io_after = measured_memory.io_bytes()
    # Before the phase ends, which resets the peaks.
    device_facts = measured_memory.device_facts(accelerator, retries, trial.placement.gpu_memory_limit_bytes)
    meter.end("steady")
    if not meter.can_reset:
        notes.append("peaks of host memory by phase are not known: the kernel did not reset its high-water mark")

    measured = {
        "rank": torch.distributed.get_rank(),
        "world_size": torch.distributed.get_world_size(),
        "hostname": socket.gethostname(),
        "device_name": torch.cuda.get_device_name() if accelerator == "cuda" else "cpu",
        "torch_version": str(torch.__version__),
        "deepspeed_version": str(deepspeed.__version__),
        **engine_facts(engine),
        "data_parallel_size": layout.data_parallel_size,
        "parameter_count": sum(sizes),
        "trainable_parameter_count": sum(trained),
        "dropout": build.greatest_dropout(model),
        # None for a model that does not come from Transformers.
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "tf32": _uses_tf32() if accelerator == "cuda" else None,
        "vocabulary_size": None if built.make_batch else build.vocabulary_size(model),
        "compiled_graphs": graphs + compiled_within if trainer.is_compiled else None,
        "early_window": change.early_window or None,
        "notes": notes,
        "warmup_step_seconds": warmup_seconds,
        **window,
        "gpu_init_peak_bytes": meter.highest("gpu_peak_bytes", "build", "initialize"),
        "cpus_allowed": None if workload.cpu_binding == "none" else sorted(os.sched_getaffinity(0)),
        **load_between(cpu_before, cpu_after),
        **device_facts,
        **measured_memory.host_facts(meter),
    }
    if assignment.swap_folder is not None and io_before is not None and io_after is not None:
        measured["nvme_read_bytes"] = io_after[0] - io_before[0]
        measured["nvme_written_bytes"] = io_after[1] - io_before[1]
    save_partial(measured)
    heartbeat.beat("inspect")
    measured |= _measure_phases_and_ledger(trainer, assignment)
    save_partial(measured)
    measured = _measure_training(trainer, (change, frozen), assignment, measured, save_partial, folder)
    del built  # alive until here: it tells Transformers that the weights are partitioned
    return measured


def _measure_training(
    trainer: training_loop.Trainer,
    weights: tuple[WeightChange, FrozenWeights],
    assignment: Assignment,
    measured: dict[str, Any],
    save_partial: SavePartial,
    folder: Path,
) -> dict[str, Any]:
    """``measured`` plus the changes that training made to the weights, and profiles and a checkpoint if requested."""
    trial, (change, frozen), has_checkpoint = assignment.trial, weights, assignment.checkpoint_folder is not None
    if not has_checkpoint:
        measured |= take_profiles(trainer, trial, folder, measured["notes"])
        save_partial(measured)
    measured["frozen_weights_changed"] = frozen.have_changed()
    measured["weight_change"] = change.since_start() if trial.workload.pass_type == "train" else None
    if change.note is not None:
        measured["notes"] = [*measured["notes"], change.note]
    # With parameters on a disk, DeepSpeed fails in a step after a forward pass that no backward pass followed.
    # In that case the loss is computed last, after the step that checks the checkpoint.
    loss_last = trial.configuration.offload_param == "nvme"
    if not loss_last:
        measured["repeated_loss"] = training_loop.repeated_loss(trainer)
    if assignment.checkpoint_folder is not None:
        save_partial(measured)
        measured |= measure_checkpoint(trainer, change, Path(assignment.checkpoint_folder), measured, save_partial)
    if loss_last and has_checkpoint and trial.inspection.profiles:
        # Not after the profiles either: their steps would make the model differ from that of other rows.
        text = "profiles follow, and with parameters on a disk, computing it makes DeepSpeed's next step fail"
        measured["notes"] = [*measured["notes"], f"the loss on the first batch was not computed: {text}"]
    elif loss_last:
        measured["repeated_loss"] = training_loop.repeated_loss(trainer)
    if has_checkpoint:
        # Only now: memory that profilers leave behind would count towards a checkpoint's peaks of host memory.
        save_partial(measured)
        measured |= take_profiles(trainer, trial, folder, measured["notes"])
    # Last, so that everything else follows the same steps in all rows, even those of engines that are not timed here.
    by_deepspeed = not isinstance(trainer.engine, ReferenceEngine) and not trainer.is_compiled
    communicates = torch.distributed.get_world_size() > 1 or trainer.accelerator == "cuda"
    if communicates and by_deepspeed and not loss_last:
        save_partial(measured)
        measured |= measure_communication(trainer)
    return measured


def _uses_tf32() -> bool:
    """Whether fp32 matrix products run in TF32: torch's switch is on, and NVIDIA_TF32_OVERRIDE is not 0."""
    matmul = torch.backends.cuda.matmul
    # Before torch 2.9 only the older switch exists; since then it may not be read alongside the newer one.
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)
    return allowed and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def _backward_with_ledger(engine: Any, loss: torch.Tensor) -> ledger.Ledger:
    """Run backward. Return a ledger from inside it: stages 1 and 2 hold their gradient buckets only there.

    At stage 2, which frees gradients along the way, it is taken in the middle of backward; at stages 0 and 1, at the
    last gradient. Empty at stage 3, where the bucket always exists and hooks on partitioned parameters are never
    called; and for reference engines, which hold just as much when backward has ended.
    """
    if engine.zero_optimization_stage() == 3 or isinstance(engine, ReferenceEngine):
        engine.backward(loss)
        return {}
    trained_count = sum(parameter.requires_grad for parameter in engine.module.parameters())
    moment = trained_count if engine.zero_optimization_stage() < 2 else max(2, trained_count // 2)
    seen: set[int] = set()
    inside: ledger.Ledger = {}

    def count(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        seen.add(id(parameter))
        if len(seen) == moment and not inside:
            counter = ledger.count_storages(engine, others=False)
            if ledger.stays_after_reduction(engine, parameter):  # the tensor is not yet its parameter's ``grad``
                counter.claim("gradients", [gradient])
            inside.update(counter.ledger)

    with ledger.gradient_hooks(engine.module.parameters(), count):
        engine.backward(loss)
    return inside


def _compute_grad_norm(engine: Any) -> Any:
    """Return the gradient norm before a step, if the engine reports none; None in fp16 or without whole gradients."""
    split = engine.zero_optimization_stage() > 0 and not isinstance(engine, ReferenceEngine)
    if split or engine.fp16_enabled() or not any(each.grad is not None for each in engine.module.parameters()):
        return None
    if isinstance(engine, ReferenceEngine) or engine.autotp_size() <= 1:
        return total_grad_norm(engine.module.parameters())
    norms = [each.float().norm() for _, each in gather_tensor_parallel(engine.module, lambda _name, own: own.grad)]
    return torch.stack(norms).norm() if norms else None


def _measure_phases_and_ledger(trainer: training_loop.Trainer, assignment: Assignment) -> dict[str, Any]:
    """Phases, ledger and swapped bytes, from extra steps after the measured window, which they do not slow down."""
    phases = measure_phases(trainer)
    for phase in _PHASES_LEFT_OUT[assignment.trial.workload.pass_type]:
        del phases["phase_seconds"][phase]
        phases["step_parts"].pop(phase, None)
    engine = trainer.engine
    batch = next(trainer.batches)
    reference = isinstance(engine, ReferenceEngine)
    parameters = list(engine.parameter_tensors() if reference else engine.module.parameters())
    counted = None if trainer.is_compiled else FlopCount()  # a compiled model would be compiled again under it
    with counted or contextlib.nullcontext():
        loss, activations = ledger.count_activations(lambda: trainer.compute_loss(batch), parameters)
        inside_backward = _backward_with_ledger(engine, loss)
    del loss
    # All gradients are still held here; a step that updates the weights frees them.
    before_step = ledger.count_storages(engine)
    for _ in range(trainer.grad_accum - 1):  # completes the optimizer step
        engine.step()
        trainer.heartbeat.beat("inspect")
        engine.backward(trainer.compute_loss(next(trainer.batches)))
    reports_norm = training_loop.reported_grad_norm(engine) is not None
    grad_norm = None if reports_norm else _compute_grad_norm(engine)
    engine.step()
    grad_norm = training_loop.reported_grad_norm(engine) if reports_norm else grad_norm
    after_step = ledger.count_storages(engine)
    peak = largest_by_category(inside_backward, before_step.ledger, after_step.ledger)
    for tier, size in activations.items():
        peak.setdefault(tier, {})["activations"] = size
    stored = ledger.swapped_bytes(assignment.swap_folder, torch.distributed.get_rank())
    if stored:
        peak["nvme"] = stored
    return {
        **phases,
        "grad_norm": training_loop.finite_values([grad_norm])[0],
        "ledger": peak,
        "ledger_after_step": after_step.ledger,
        "nvme_stored_bytes": sum(stored.values()) if assignment.swap_folder else None,
        **({} if counted is None else counted.facts()),
    }
