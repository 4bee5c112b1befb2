"""Measures the DeepSpeed training of an unmodified script, and ends the script after the measured steps.

It runs in the script's own interpreter, whatever packages that has. It therefore imports only the standard library
until the script imports DeepSpeed, works from Python 3.9 and DeepSpeed 0.14 on, and uses only public names of
DeepSpeed. Modules are patched when the script imports them. The modules of this package that it loads (:func:`load`)
follow the same rules; they measure memory and CPU load, classify errors and remove credentials. The request is
``trial.json`` in the trial's folder; the rank's file has the form of any other (``records.schema.RankMeasurement``). A
test checks the names that are repeated here.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import dis
import faulthandler
import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "DS_BENCH_SCRIPT"
PHASES = (
    *("hello", "import", "build", "init", "warmup", "loop", "forward", "backward", "step"),
    *("inspect", "write", "exit"),
)
BEAT = struct.Struct("<qdqqdq")
OVERRIDDEN = "ds_bench_overridden"
"""Marks a configuration that replaced the script's, until ``deepspeed.initialize`` takes it."""
OWN_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"),
    *("bf16", "bfloat16", "fp16", "torch_autocast"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
"""Keys that keep the script's values when the row's file replaces its configuration."""


def load(name: str) -> Any:
    """Import a module of this package under another name: the package itself may need a newer Python than this one."""
    if "_ds_bench" not in sys.modules:
        sys.modules["_ds_bench"] = types.ModuleType("_ds_bench")
        sys.modules["_ds_bench"].__path__ = [str(Path(__file__).resolve().parents[2])]
    return importlib.import_module(f"_ds_bench.{name}")


def find_root(error: BaseException) -> BaseException:
    """Return the exception that began the chain: a mishap in a ``finally:`` would hide the script's own error.

    The search ends at an exception that a ``raise`` statement put in place of another, because that was intended.
    """
    seen = {id(error)}
    while error.__context__ is not None and not error.__suppress_context__ and id(error.__context__) not in seen:
        handler = error.__context__.__traceback__
        step = error.__traceback__
        while step is not None and handler is not None and step.tb_frame is not handler.tb_frame:
            step = step.tb_next
        if step is None or dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]] == "RAISE_VARARGS":
            return error
        error = error.__context__
        seen.add(id(error))
    return error


def tensors_in(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of an argument with their names, in order."""
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < 4 and isinstance(value, Mapping):  # also Transformers' BatchEncoding
        for key, item in value.items():
            yield from tensors_in(item, str(key), depth + 1)
    elif depth < 4 and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, name, depth + 1)


def count_tokens(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Count the tokens of a micro-batch: all, unpadded, and the sum of their ids. Does not wait for the device.

    The tokens are ``input_ids``, else ``labels``, else the first integer tensor. A batch without any, such as images
    with one class each, is counted in samples: the first dimension of its first tensor.
    """
    found = [each for each in (*tensors_in(arguments, ""), *tensors_in(keywords, "")) if each[1].dim() > 0]
    named = dict(reversed(found))
    ids = named.get("input_ids", named.get("labels"))
    if ids is None or not holds_ids(ids):
        ids = next((tensor for _, tensor in found if holds_ids(tensor)), None)
    has_classes = ids is not None and ids.dim() == 1 and "input_ids" not in named
    if ids is None or (has_classes and any(each.is_floating_point() and len(each) == len(ids) for _, each in found)):
        empty = {"tokens": 0, "unpadded_tokens": 0, "id_sums": None if ids is None else ids.sum()}
        return {**empty, "samples": len(found[0][1]) if found else 0}
    mask: Any = named.get("attention_mask")
    has_mask = mask is not None and mask.shape == ids.shape
    return {
        "tokens": ids.numel(),
        "unpadded_tokens": mask.count_nonzero() if has_mask else ids.numel(),
        "id_sums": ids.sum(),
        "samples": 0,
    }


def holds_ids(tensor: Any) -> bool:
    """Return whether a tensor holds integers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is sys.modules["torch"].bool)


class Hook:
    """The progress of one rank. Only the process that made it measures: children of a rank report nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        trial = json.loads((folder / "trial.json").read_text(encoding="utf-8"))["trial"]
        workload = trial["workload"]
        self.warmup_steps, self.num_steps = workload["warmup_steps"], workload["num_steps"]
        self.requested_engine = workload["script"]["engine"]
        self.overrides = workload["script"]["config_source"] == "override"
        self.config = json.loads((folder / "ds_config.json").read_text(encoding="utf-8"))
        self.emulated_bytes = trial["placement"]["gpu_memory_limit_bytes"]
        self.meter: Any = None
        self.names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.all_names: list[str] = []
        self.main: Any = None
        self.seen = new_step()
        self.call_ended: float | None = None
        """Time when the last backward or step ended; None while a micro-batch is in progress."""
        self.in_train_batch = False
        self.steps: list[dict[str, Any]] = []
        self.marks: list[Any] = []
        self.window: dict[str, Any] = {}
        self.written = False
        self.failure_of_thread: dict[str, Any] | None = None
        self.refusal_of_auto: Exception | None = None
        self.beat_file = os.open(folder / f"rank{self.rank}.beat", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.beats, self.phase, self.last_step_seconds, self.last_step_at = 0, "hello", 0.0, 0.0
        self.beat("hello")

    @property
    def active(self) -> bool:
        return not self.written and os.getpid() == self.pid

    def beat(self, phase: str) -> None:
        """Report progress, in the form of ``records.rank_files.HeartbeatWriter``."""
        self.phase, self.beats = phase, self.beats + 1
        done = len(self.steps) if self.steps or phase not in PHASES[:4] else -1
        values = (self.pid, time.time(), PHASES.index(phase), done, self.last_step_seconds, self.beats)
        os.pwrite(self.beat_file, BEAT.pack(*values), 0)

    def end_phase(self, name: str) -> None:
        """Store the memory of the current phase, and begin the next."""
        if name not in self.meter.phases:  # a second engine is initialized like the first
            self.meter.end(name)

    @property
    def is_cuda(self) -> bool:
        return bool(self.meter.accelerator == "cuda")

    def note_device(self) -> None:
        """Note whether the script uses a GPU: once its engine is made, it does so now or never."""
        torch: Any = sys.modules["torch"]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.meter.accelerator = "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            sys.modules["torch"].cuda.synchronize()

    # ---------------------------------------------------------------- engines

    def name_of(self, engine: Any) -> str:
        """Return an engine's name: its module's class, numbered from the second of its kind on."""
        if engine not in self.names:
            base = type(engine.module).__name__
            same = sum(name.partition("#")[0] == base for name in self.all_names)
            self.names[engine] = f"{base}#{same + 1}" if same else base
            self.all_names.append(self.names[engine])

            def count_evaluation(module: Any, _inputs: Any) -> None:
                if not (module.training and sys.modules["torch"].is_grad_enabled()) and self.active:
                    self.seen["evaluations"] += 1
                    self.beat(self.phase)

            engine.module.register_forward_pre_hook(untraced(count_evaluation))
        return self.names[engine]

    def measures(self, engine: Any) -> bool:
        """Return whether this engine is measured: the first to step or, before that, any with a matching name."""
        if not self.active:
            return False
        if self.main is not None:
            return engine is self.main
        return self.requested_engine in (None, self.name_of(engine))

    def before_forward(self, engine: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self.measures(engine) or not sys.modules["torch"].is_grad_enabled():
            return
        self.begin_call()
        self.seen["micro_batches"].append((engine, (engine.module.training, count_tokens(arguments, keywords))))
        self.beat("forward")

    def begin_call(self) -> None:
        """Note that a training forward begins; the time since the last backward or step is the gap."""
        if not self.marks and self.warmup_steps > 0:
            self.note_device()
            self.marks.append(self.mark())
        elif not self.window and self.warmup_steps == 0:
            self.begin_window()
        if self.call_ended is not None and not self.in_train_batch:
            self.seen["gap"] += time.perf_counter() - self.call_ended
            self.call_ended = None

    def after_backward(self, engine: Any, loss: Any, divided: bool) -> None:
        if getattr(loss, "numel", lambda: 0)() == 1:
            self.seen["losses"].append((engine, (loss, engine.gradient_accumulation_steps() if divided else 1)))
        self.call_ended = time.perf_counter()

    def end_step(self, engine: Any) -> None:
        """Record that an optimizer step has ended, and begin or end the measured window."""
        self.main = engine
        step, self.seen = self.seen, new_step()
        for name in ("micro_batches", "losses"):  # which engine is measured is unknown until the first step
            step[name] = [each for other, each in step[name] if other is engine]
        trained = [counts for is_training, counts in step["micro_batches"] if is_training]
        if not trained:  # a script may train with its model in evaluation mode
            trained = [counts for _, counts in step["micro_batches"]]
            step["evaluations"] = max(0, step["evaluations"] - len(trained))
        norm = getattr(engine, "get_global_grad_norm", lambda: None)()
        self.steps.append({**step, "micro_batches": trained, "grad_norm": norm})
        now = time.time()
        self.last_step_seconds, self.last_step_at = now - (self.last_step_at or now), now
        done = len(self.steps)
        self.marks.append(self.mark())
        self.beat("loop")
        if done == 1:
            self.end_phase("first_step")
        if done == self.warmup_steps:
            self.begin_window()
        if done == self.warmup_steps + self.num_steps:
            self.finish()

    def mark(self) -> Any:
        """Return a mark between steps: a device event, so that nothing waits for it, or the time."""
        if not self.is_cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    # ---------------------------------------------------------------- the measured window

    def begin_window(self) -> None:
        self.note_device()
        self.synchronize()
        if len(self.steps) > 1:
            self.end_phase("warm_up")
        self.window = {
            "skipped": getattr(self.main, "skipped_steps", 0),
            "retries": load("worker.measured_memory").alloc_retries(self.meter.accelerator),
            "cpu": load("worker.cpu_load").CpuReading.read(),
        }
        wait_for_ranks()
        self.window["began"] = time.perf_counter()
        self.marks = [*self.marks, None, self.mark()]  # None: between warm-up and the window

    def finish(self) -> None:
        """Write the rank's file once the window is full, and end the process before the script does anything else."""
        try:
            self.synchronize()
            seconds = time.perf_counter() - self.window["began"]
            measured = {"measurement": self.measurement(seconds)}
        except Exception as error:  # a measurement that cannot be made is a failure with its cause
            measured = {"failure": self.failure(error)}
        else:
            wait_for_ranks()
        self.beat("write")
        self.write(measured)
        self.beat("exit")
        flush_output()
        os._exit(0)

    def measurement(self, window_seconds: float) -> dict[str, Any]:
        """Return the fields of a RankMeasurement."""
        import torch

        cpu_load, memory = load("worker.cpu_load"), load("worker.measured_memory")
        device_facts = memory.device_facts(self.meter.accelerator, self.window["retries"], self.emulated_bytes)
        load_facts = cpu_load.load_between(self.window["cpu"], cpu_load.CpuReading.read())
        self.end_phase("steady")
        engine, optimizer, boundary = self.main, self.main.optimizer, self.marks.index(None)
        parameters = list(engine.module.parameters())
        sizes = {id(each): int(getattr(each, "ds_numel", each.numel())) for each in parameters}
        micro, accumulation = int(engine.train_micro_batch_size_per_gpu()), int(engine.gradient_accumulation_steps())
        warmup = seconds_between(self.marks[:boundary])
        measured = seconds_between(self.marks[boundary + 1 :])
        shares = [[float(loss) / share for loss, share in step["losses"]] for step in self.steps]
        losses = [sum(each) for each in shares if each]
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "hostname": socket.gethostname(),
            "device_name": torch.cuda.get_device_name() if self.is_cuda else "cpu",
            "torch_version": str(torch.__version__),
            "deepspeed_version": str(sys.modules["deepspeed"].__version__),
            "micro_batch_size": micro,
            "grad_accum": accumulation,
            "data_parallel_size": max(1, int(engine.train_batch_size()) // (micro * accumulation)),
            "optimizer_class": type(getattr(optimizer, "optimizer", optimizer)).__name__,
            "engine_optimizer_class": type(optimizer).__name__,
            "parameter_count": sum(sizes.values()),
            "trainable_parameter_count": sum(sizes[id(each)] for each in parameters if each.requires_grad),
            "resolved_config": load("system.redaction").redacted_config(plain(engine.config)),
            "step_seconds": measured,
            "warmup_step_seconds": warmup,
            "window_seconds": window_seconds,
            # No losses if the script calls loss.backward() itself.
            "losses": list(map(finite_number, losses)) if len(losses) == len(self.steps) else [],
            "grad_norms": (norms := [finite_number(step["grad_norm"]) for step in self.steps]),
            "grad_norm": norms[-1],
            "skipped_steps": int(engine.skipped_steps) - int(self.window["skipped"]),
            "gpu_init_peak_bytes": self.meter.highest("gpu_peak_bytes", "build", "initialize"),
            **device_facts,
            **load_facts,
            **memory.host_facts(self.meter),
            "script": self.script_facts(),
        }

    def script_facts(self) -> dict[str, Any]:
        """Return the fields of a ScriptMeasurement."""
        engine, main = self.main, self.name_of(self.main)

        def per_step(name: str) -> list[int | None]:
            counts = [[micro[name] for micro in step["micro_batches"]] for step in self.steps]
            return [None if None in each else sum(int(count) for count in each) for each in counts]

        def offload(name: str) -> str:
            block = getattr(engine, f"zero_offload_{name}", lambda: None)()
            device = getattr(block, "device", None)
            return str(getattr(device, "value", device) or "none")

        dtypes = {str(each.dtype).rpartition(".")[2] for each in engine.module.parameters() if each.requires_grad}
        known = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        return {
            **{name: per_step(name) for name in COUNTS},
            "micro_steps": [len(step["micro_batches"]) for step in self.steps],
            "gap_seconds": [step["gap"] for step in self.steps],
            "evaluation_forwards": [step["evaluations"] for step in self.steps],
            "saves": [step["saves"] for step in self.steps],
            "stage": int(engine.zero_optimization_stage()),
            "offload_optimizer": offload("optimizer"),
            "offload_param": offload("param"),
            "precision": "+".join(sorted(known.get(name, name) for name in dtypes)),
            "main_engine": main,
            "other_engines": [name for name in self.all_names if name != main],
        }

    # ---------------------------------------------------------------- the end without a full window

    def failure(self, error: BaseException) -> dict[str, Any]:
        """Return the fields of a RankFailure for an exception of the script."""
        root = find_root(error)
        failure, redaction = load("worker.failure"), load("system.redaction")
        facts = failure.failure_facts(
            root,
            rank=self.rank,
            phase=self.phase,
            step=len(self.steps) if self.steps or self.phase in ("forward", "backward", "step") else None,
            emulated=self.emulated_bytes is not None,
            device_free_bytes=failure.device_free_bytes(),
        )
        facts["traceback"] = failure.full_traceback(error)
        if root is self.refusal_of_auto:
            facts["kind"] = "auto_refused"
        secrets = redaction.secrets_of(self.config)
        return {**facts, **{name: redaction.without(facts[name], secrets) for name in ("message", "traceback")}}

    def on_exception(self, error: BaseException) -> None:
        # For Ctrl-C no file is written, so that the signal counts as the cause: Python then ends itself with SIGINT.
        if self.active and not isinstance(error, KeyboardInterrupt):
            self.write({"failure": self.failure(error)})

    def at_exit(self) -> None:
        """Report that the interpreter is ending before the window is full."""
        if not self.active:
            return
        # Python sets this for an uncaught exception, even if the script has its own sys.excepthook.
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.on_exception(error)
            return
        if self.failure_of_thread is not None:
            self.write({"failure": self.failure_of_thread})
            return
        done, kind, name = len(self.steps), "ended_early", "EndedEarly"
        text = f"the script ended after {done} of {self.warmup_steps + self.num_steps} steps"
        if len(self.all_names) > 1 and done:
            text += f" of {self.name_of(self.main)}, one of {len(self.all_names)} engines"
        if not done:
            kind, name = "no_engine", "NoEngine"
            made = f"; it made {', '.join(self.all_names)}" if self.all_names else ""
            text = f"the script ended before {self.requested_engine or 'a DeepSpeed engine'} took a step{made}"
        facts = {"error_class": name, "message": text, "phase": self.phase, "time": time.time(), "kind": kind}
        # If the script exits with a code, the last line of its output says why.
        self.write({"failure": {"rank": self.rank, "step": done or None, "traceback": self.last_line(), **facts}})

    def last_line(self) -> str:
        """Return the last non-empty line of the rank's output, without credentials."""
        flush_output()
        redaction = load("system.redaction")
        try:
            with (self.folder / f"rank{self.rank}.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return str(redaction.without(lines[-1], redaction.secrets_of(self.config))) if lines else ""

    def write(self, result: dict[str, Any]) -> None:
        """Write the rank's file, under a temporary name first because the parent reads it as soon as it exists."""
        self.written = True
        path = self.folder / f"rank{self.rank}.json"
        part = path.with_name(f".{path.name}.part")
        with part.open("w", encoding="utf-8") as file:
            json.dump(result, file, default=str)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    # ---------------------------------------------------------------- patches

    def patch_engine(self, module: Any) -> None:
        before_forward, after_backward = untraced(self.before_forward), untraced(self.after_backward)

        def forward(original: Any, engine: Any, *arguments: Any, **keywords: Any) -> Any:
            before_forward(engine, arguments, keywords)
            return original(engine, *arguments, **keywords)

        def backward(original: Any, engine: Any, loss: Any, *arguments: Any, **keywords: Any) -> Any:
            measured = self.measures(engine)
            if measured:
                self.beat("backward")
            # Before backward, which may scale or free the tensor.
            kept = loss.detach().clone() if measured and hasattr(loss, "detach") else None
            returned = original(engine, loss, *arguments, **keywords)
            if measured:
                after_backward(engine, kept, keywords.get("scale_wrt_gas", True))
            return returned

        def step(original: Any, engine: Any, *arguments: Any, **keywords: Any) -> Any:
            measured, steps_before = self.measures(engine), engine.global_steps
            if measured:  # without a heartbeat, which follows at the end of the step
                self.phase = "step"
            returned = original(engine, *arguments, **keywords)
            if measured:
                if engine.global_steps > steps_before:
                    self.end_step(engine)
                self.call_ended = time.perf_counter()
            return returned

        def save_checkpoint(original: Any, engine: Any, *arguments: Any, **keywords: Any) -> Any:
            self.seen["saves"] += 1
            return original(engine, *arguments, **keywords)

        for function in (forward, backward, step, save_checkpoint):
            replace(module.DeepSpeedEngine, function)

    def patch_pipeline(self, module: Any) -> None:
        def train_batch(original: Any, engine: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self.measures(engine):
                return original(engine, *arguments, **keywords)
            self.begin_call()
            self.in_train_batch = True
            loss = original(engine, *arguments, **keywords)
            self.in_train_batch = False
            self.seen["losses"] = [(engine, (loss.detach(), 1))] if hasattr(loss, "detach") else []
            self.end_step(engine)
            self.call_ended = time.perf_counter()
            return loss

        replace(module.PipelineEngine, train_batch)

    def patch_deepspeed(self, module: Any) -> None:
        # Not earlier: the meter needs torch, and the script decides when to load it.
        self.meter = load("worker.measured_memory").PhaseMeter("cpu")
        self.end_phase("import")
        self.beat("build")

        def initialize(original: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self.active:
                return original(*arguments, **keywords)
            call = inspect.signature(original).bind_partial(*arguments, **keywords)
            given = self.config_of_call(call.arguments)
            self.end_phase("build")
            self.beat("init")
            try:
                made = original(*call.args, **call.kwargs)
            except (TypeError, ValueError) as error:
                paths = list(paths_of_auto(read_config(given)))
                if not paths:
                    raise
                # The cause comes first, because a table may cut off the end.
                text = f'only the Trainer, Accelerate and TRL replace "auto", here at {", ".join(paths[:3])}: {error}'
                self.refusal_of_auto = (TypeError if isinstance(error, TypeError) else ValueError)(text)
                raise self.refusal_of_auto from error
            self.name_of(made[0])
            self.note_device()
            self.end_phase("initialize")
            self.beat("build")
            return made

        replace(module, initialize)
        if self.overrides:
            self.patch_constructor(module.zero.Init, "config_dict_or_path", marked=False)

    def config_of_call(self, given: dict[str, Any]) -> Any:
        """Return the configuration in a call of ``initialize``; if the row's file replaces it, change the call."""
        args: Any = given.get("args")
        name = next((name for name in ("config", "config_params") if given.get(name) is not None), None)
        config = getattr(args, "deepspeed_config", None) if name is None else given[name]
        if self.overrides and config is not None:
            config = given[name or "config"] = self.replaced(config, marked=False)
            if name is None:
                args.deepspeed_config = None
        return config

    def patch_constructor(self, owner: Any, name: str, *, marked: bool, always: bool = False) -> None:
        """Make a class take the row's configuration as its argument ``name``. ``always``: even if none is passed."""

        def __init__(original: Any, instance: Any, *arguments: Any, **keywords: Any) -> None:  # noqa: N807
            call = inspect.signature(original).bind_partial(instance, *arguments, **keywords)
            given = call.arguments.get(name)
            if given is not None or always:
                call.arguments[name] = self.replaced(given, marked=marked)
            original(*call.args, **call.kwargs)

        if self.overrides:
            replace(owner, __init__)

    def replaced(self, given: Any, *, marked: bool) -> dict[str, Any]:
        """Return the row's configuration with the script's own batch, optimizer and precision.

        ``marked``: other libraries fill in its "auto" values before DeepSpeed gets it.
        """
        config = read_config(given)
        if not config.pop(OVERRIDDEN, False):
            own = {key: config[key] for key in OWN_KEYS if key in config}
            config = {key: value for key, value in copy.deepcopy(self.config).items() if key not in OWN_KEYS}
            config.update(own)
        return {**config, OVERRIDDEN: True} if marked else config

    @property
    def patches(self) -> dict[str, Callable[[Any], None]]:
        """Module → the function that patches it once it is loaded."""

        def patch_accelerate(module: Any) -> None:
            self.patch_constructor(module.HfDeepSpeedConfig, "config_file_or_dict", marked=True)

        def patch_lightning(module: Any) -> None:
            self.patch_constructor(module.DeepSpeedStrategy, "config", marked=True, always=True)

        return {
            "deepspeed.runtime.engine": self.patch_engine,
            "deepspeed.runtime.pipe.engine": self.patch_pipeline,
            "deepspeed": self.patch_deepspeed,
            "accelerate.utils.deepspeed": patch_accelerate,
            "lightning.pytorch.strategies.deepspeed": patch_lightning,
            "pytorch_lightning.strategies.deepspeed": patch_lightning,
        }


def replace(owner: Any, function: Callable[..., Any]) -> None:
    """Replace an attribute with the function of the same name, which gets the original as its first argument."""
    original = getattr(owner, function.__name__)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        return function(original, *arguments, **keywords)

    setattr(owner, function.__name__, wrapped)


COUNTS = ("tokens", "unpadded_tokens", "id_sums", "samples")
"""Fields of a ScriptMeasurement that :func:`count_tokens` counts in each micro-batch."""


def new_step() -> dict[str, Any]:
    """Return what is counted during a step; micro-batches and losses are paired with their engine."""
    return {"micro_batches": [], "losses": [], "evaluations": 0, "saves": 0, "gap": 0.0}


class Finder(importlib.abc.MetaPathFinder):
    """Patches modules as they are loaded; imports nothing itself."""

    def __init__(self, patches: Mapping[str, Callable[[Any], None]]) -> None:
        self.patches = patches

    def find_spec(self, fullname: str, path: Any, _target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in self.patches else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            self.patches[fullname](module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Start watching this process, but not its children, such as the workers of a data loader."""
    hook = Hook(Path(os.environ[FOLDER_VARIABLE]))
    stacks = (hook.folder / f"rank{hook.rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    sys.meta_path.insert(0, Finder(hook.patches))
    shown = sys.excepthook

    def note_exception(kind: Any, error: BaseException, traceback: Any) -> None:
        shown(kind, error, traceback)
        hook.on_exception(error)

    shown_of_thread = threading.excepthook

    def note_exception_of_thread(seen: Any) -> None:
        shown_of_thread(seen)
        if hook.active and hook.failure_of_thread is None and isinstance(seen.exc_value, Exception):
            hook.failure_of_thread = hook.failure(seen.exc_value)  # reported if the script ends early; it may go on

    sys.excepthook, threading.excepthook = note_exception, note_exception_of_thread
    # Registered first, so that it runs after what the script registers.
    atexit.register(hook.at_exit)
    hook.beat("import")


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile does not trace, because it would recompile whenever a count changes."""
    import torch

    wrapped: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return wrapped


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it is None or closed, or the disk is full
            stream.flush()


def wait_for_ranks() -> None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.barrier()


def seconds_between(marks: list[Any]) -> list[float]:
    """Return the seconds from each mark to the next; the device must have reached the last."""
    if marks and not isinstance(marks[0], float):
        return [marks[i - 1].elapsed_time(marks[i]) / 1000 for i in range(1, len(marks))]
    return [marks[i] - marks[i - 1] for i in range(1, len(marks))]


def finite_number(value: Any) -> float | None:
    """Return a number, or a tensor of one element, as a float; None if it is neither, or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def plain(value: Any) -> Any:
    """Return a configuration as JSON holds it, with text for infinity, which Accelerate sets as ``steps_per_print``."""
    config = value if isinstance(value, dict) else read_config(value)
    return json.loads(json.dumps(config, default=str), parse_constant=str)


def read_config(given: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration as a new dict. ``given``: a mapping, or the path of a file."""
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    try:
        return dict(json.loads(Path(given).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return {}


def paths_of_auto(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the values "auto" in a configuration."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from paths_of_auto(item, f"{path}.{key}" if path else str(key))
    elif value == "auto":
        yield path
