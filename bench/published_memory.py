"""Compares predicted GPU memory with published figures: every memory point and verdict of one table.

    python bench/published_memory.py POINTS.csv                    prints the comparison
    python bench/published_memory.py POINTS.csv --output FILE      also writes it as JSON

A point is a row of the CSV file: model, GPUs, stage, offload, micro-batch, sequence, and a figure with its source.
Predicted reserved memory (B) is compared with reserved memory, and with nvidia-smi's less the context and NCCL;
allocated memory with allocated and resident figures; a verdict with "ran" and "ran out". A point that cannot be
predicted has a reason. Errors have a sign: negative is too low. No constant of the package was fitted to the figures;
the constants of the rule (prediction/fit_verdict.py) were checked against the verdicts.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_bench.config import strategies
from ds_bench.config.spec import Placement, Workload
from ds_bench.models.lookup import ResolvedModel, resolve_model
from ds_bench.prediction import allocation_replay, allocation_trace, trial_predictions
from ds_bench.prediction.fit_verdict import DOES_NOT_FIT, FITS, TIGHT, GpuNeed
from ds_bench.prediction.model_profile import ModelProfile, Variant
from ds_bench.prediction.predicted_memory import inputs_of
from ds_bench.prediction.what_if import PlannedTrial
from ds_bench.records.json_files import write_json
from ds_bench.units import from_gb

Quantity = Literal["reserved", "nvidia-smi", "allocated", "resident", "verdict"]
_GIB = 2**30


class NotComputableError(Exception):
    """A point that the prediction does not cover; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A published figure and the prediction for it; memory in GiB per GPU."""

    number: int
    """Row of the CSV file, from 0."""
    source: str
    model: str
    gpus: str
    stage: str
    offload: str
    batch: str
    sequence: str
    fused_loss: bool
    quantity: str
    published: float | str
    reason: str | None = None
    """Why it is not predicted; None if it is."""
    least: float | None = None
    """A: memory of the smallest GPU that it runs on, without what is outside the allocator."""
    reserved: float | None = None
    """B, in the same unit."""
    outside: float | None = None
    predicted: float | str | None = None
    """The compared quantity: B, allocated or resident memory, or a verdict."""
    card_verdict: str | None = None
    """The verdict for the card that the row ran on; None if the card or its kernels are not known."""
    method: str | None = None
    phase: str | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None for a verdict."""
        if not (isinstance(self.published, float) and isinstance(self.predicted, float)):
            return None
        return self.predicted / self.published - 1


# ------------------------------------------------------------------ models without a preset


def _qwen_1(hidden: int, layers: int, heads: int, mlp: int) -> dict[str, Any]:
    """The first Qwen has Qwen2's tensors with as many key heads as query heads (modeling_qwen.py of its repository)."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp, "vocab_size": 151_936}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": heads}
    return {"model_type": "qwen2", **sizes, **heads_of, "max_position_embeddings": 32_768}


def _gpt2(
    hidden: int, layers: int, vocabulary: int = 50_257, positions: int = 1024, heads: int | None = None
) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads or hidden // 128,
        "vocab_size": vocabulary,
        "n_positions": positions,
    }


_CONFIGS: Mapping[str, dict[str, Any]] = {
    "Qwen-1.8B": _qwen_1(2048, 24, 16, 5504),
    "Qwen-7B": _qwen_1(4096, 32, 32, 11_008),
    "GPT-2 10B": _gpt2(4096, 50),
    "GPT-2 shape 25B": _gpt2(7168, 40, heads=32),
    "GPT-2 shape 52B": _gpt2(8192, 64, heads=32),
    "ibm/PowerLM-3b": {
        "model_type": "granite",
        "hidden_size": 2304,
        "num_hidden_layers": 40,
        "num_attention_heads": 36,
        "num_key_value_heads": 36,
        "intermediate_size": 9216,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    },
}
"""Start of a model's name in the table → its config."""
_PRESETS: Mapping[str, str] = {
    "gpt2-xl": "gpt2-xl",
    "GPT-2 1.5B": "gpt2-xl",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "meta-llama/Meta-Llama-3-8B": "meta-llama/Llama-3.1-8B",
    "mistralai/Mistral-7B-v0.1": "mistralai/Mistral-7B-v0.1",
    "meta-llama/Llama-3.2-3B": "meta-llama/Llama-3.2-3B",
    "mistralai/Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1",
}
_MPT_LAYERS = {
    "MPT-30b": (7168, 48),
    "MPT-13b": (5120, 40),
    "MPT-7b": (4096, 32),
    "MPT-3b": (2560, 32),
    "MPT-1b": (2048, 24),
}


@cache
def _model(name: str) -> ResolvedModel:
    for start, preset in _PRESETS.items():
        if name.startswith(start) and "LoRA" not in name:
            return resolve_model(preset, factory=False, trust_remote_code=False, environment={})
    config = next((config for start, config in _CONFIGS.items() if name.startswith(start)), None)
    for start, (hidden, layers) in _MPT_LAYERS.items():
        if name.startswith(start):  # GPT-2's shape; the original has no biases and no dropout
            config = _gpt2(hidden, layers, vocabulary=50_368, positions=8192)
            config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            config["activation_function"] = "gelu"
    if config is None:
        raise NotComputableError("the model's shape is not given, or it is not a language model")
    with tempfile.TemporaryDirectory() as folder:
        architectures = {"gpt2": "GPT2LMHeadModel", "qwen2": "Qwen2ForCausalLM", "granite": "GraniteForCausalLM"}
        text = {**config, "architectures": [architectures[config["model_type"]]]}
        Path(folder, "config.json").write_text(json.dumps(text), encoding="utf-8")
        found = resolve_model(folder, factory=False, trust_remote_code=False, environment={})
    if found.facts is None:
        raise NotComputableError("a family whose layers are not counted")
    return replace(found, name=name)


@cache
def _profile(name: str, sequence: int, variants: tuple[Variant, ...]) -> ModelProfile:
    found = trial_predictions.profile_model(_model(name), sequence, "cuda", variants=variants)
    if isinstance(found, trial_predictions.Unpredicted):
        raise NotComputableError(found.reason)
    return found


# ------------------------------------------------------------------ 16-bit training without a master copy


class _SquareRoots(allocation_replay.Rank):
    """torch's multi-tensor AdamW, whose square roots take as much memory as one moment (torch/optim/adam.py)."""

    state_bytes = 2
    takes_square_roots = True

    def make_moments(self, elements: int) -> None:
        for _ in range(0 if self.has_moments else 2):
            self.allocate(self.state_bytes * elements)

    def update(self) -> None:
        sizes = [self.state_bytes * part for part in self.parts]
        for part in self.parts:
            self.make_moments(part)
        self.pulse(*(sizes if self.takes_square_roots else ()))
        self.free(*self.shards)
        self.shards.clear()


class _Plain(_SquareRoots):
    """One GPU without an engine: parameters, gradients and moments in 16-bit precision."""

    def initialize(self, *, zero_init: bool) -> None:  # noqa: ARG002
        self.parts, self.shards = list(self.tensors), list[Any]()
        for part in self.parts:
            self.allocate(self.state_bytes * part)

    def take_gradient(self, parameter: int, storage: int) -> None:  # noqa: ARG002
        if storage in self.storages:
            self.shards.append(self.storages.pop(storage))

    def end_backward(self) -> None:
        """Gradients stay until the step."""


class _PlainFused(_Plain):
    takes_square_roots = False


class _PureFsdp(_SquareRoots, allocation_replay.Fsdp2):
    """FSDP with everything in 16-bit precision."""


def _replay_pure(planned: PlannedTrial, row: Mapping[str, str]) -> tuple[int, GpuNeed]:
    """Return the allocated bytes, and the need without memory outside the allocator."""
    work, facts = planned.workload, planned.profile.facts
    sharded = row["stage"].startswith("FSDP")
    inputs = inputs_of(planned.profile, work, planned.placement, planned.config(), "fsdp2" if sharded else "deepspeed")
    checkpoints = work.activation_checkpointing
    trace = facts and allocation_trace.find_trace(
        facts, work.seq_length, checkpointing=checkpoints, element_bytes=2, dropout=work.dropout
    )
    if not trace:
        raise NotComputableError("the model's allocations cannot be traced")
    events = allocation_trace.full_events(trace, planned.profile, work.batch_size, work.seq_length)
    plain = _PlainFused if "(torch)" not in row["optimizer"] else _Plain
    how: dict[str, Any] = {"workspace_bytes": 8_519_680, "rank_type": _PureFsdp if sharded else plain}
    roomy = allocation_replay.replay(inputs, events, **how)
    low, high = roomy.allocated_bytes, roomy.reserved_bytes
    least, _ = allocation_replay.least_capacity(inputs, events, low_bytes=low, high_bytes=high, zero_init=True, **how)
    return low, GpuNeed(least_bytes=least, reserved_bytes=high, phase=roomy.phase, method="replay")


# ------------------------------------------------------------------ one point


def _number(row: Mapping[str, str], name: str) -> int:
    digits = row[name].split(" ")[0]
    if name == "seq" and row[name].startswith("alpaca 4096"):
        digits = "4096"  # padded to the longest of a batch: an upper bound
    if not digits.isdecimal():
        raise NotComputableError(f"{name} is not given ({row[name] or 'empty'})")
    return int(digits)


def question_of(row: Mapping[str, str]) -> PlannedTrial:
    """The trial that a point describes. Raise NotComputableError."""
    stage, offload, precision = row["stage"], row["offload"], row["precision"]
    _refuse(row)
    gpus, batch, sequence = (_number(row, name) for name in ("gpus", "micro_batch", "seq"))
    fused = "Liger" in row["notes"] and "no Liger" not in row["notes"]
    offloads = {"none": "none", "cpu_optimizer": "cpu_optimizer", "cpu_full": "cpu_full"}
    name = next((value for key, value in offloads.items() if offload == key or offload.startswith(f"{key} zero")), None)
    if name is None:
        raise NotComputableError(f"offload {offload} has no formula")
    if stage.startswith("FSDP"):
        strategy = strategies.named_strategy("fsdp2")
    elif stage == "none" and row["precision"].startswith("bf16 pure"):
        strategy = strategies.ZERO_STAGES[0]  # replaced by a replay of plain torch
    elif stage in "0123":
        strategy = (
            strategies.offload_strategy(name, int(stage)) if name != "none" else strategies.ZERO_STAGES[int(stage)]
        )
    else:
        raise NotComputableError(f"stage {stage} is not an engine of this package")
    checkpoints = {"full": True, "no": False, "Megatron default": False, "yes": True}
    if row["activation_ckpt"] not in checkpoints:
        raise NotComputableError(f"activation checkpointing: {row['activation_ckpt'] or 'not given'}")
    variants = (Variant(loss="tiled"),) if fused else ()
    model, profile = _model(row["model"]), _profile(row["model"], sequence, variants)
    notes = row["notes"].lower()
    return PlannedTrial(
        profile=profile,
        workload=Workload(
            model=model.name,
            model_source=model.source,
            model_type=model.model_type,
            model_config=model.config,
            batch_size=batch,
            seq_length=sequence,
            grad_accum=8 if "grad accumulation 8" in notes else 4 if "micro_num 4" in notes else 1,
            precision="fp16" if precision.startswith("fp16") else "bf16",
            activation_checkpointing=checkpoints[row["activation_ckpt"]],
            # Liger's kernels need a GPU to be measured; a tiled loss takes as much or more.
            loss="tiled" if fused else "model",
        ),
        placement=Placement(
            accelerator="cuda",
            num_gpus=gpus,
            nvme_path="/nvme",
            compute_capability=(9, 0) if any(card in notes for card in ("h100", "h200")) else (8, 0),
        ),
        configuration=strategies.make_configuration(strategy),
        ranks_per_node=8,
        changes={"zero_optimization": _zero_settings(row)},
        replays="always",
    )


def _zero_settings(row: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a point's configuration besides the stage, if they are published."""
    if not row["source"].startswith("bigscience-workshop/bigscience experiments/gpt2"):
        return {"overlap_comm": True} if "overlap_comm" in row["notes"].lower() else {}
    # experiments/gpt2-hf-ds/*.slurm: "auto" as Transformers resolves it (trainer_config_finalize).
    hidden = int(row["model"].rpartition("hidden ")[2])
    sizes = {"reduce_bucket_size": hidden**2, "stage3_prefetch_bucket_size": int(0.9 * hidden**2)}
    sizes["stage3_param_persistence_threshold"] = 10 * hidden
    return {"overlap_comm": True, "sub_group_size": 10**14, **sizes}


def _refuse(row: Mapping[str, str]) -> None:
    """Raise for a point whose settings have no formula, with the first reason."""
    text = " ".join(row.values()).lower()
    reasons: list[tuple[str, str]] = [
        ("selective", "selective activation checkpointing"),
        ("compile", "a compiled model"),
        ("float8", "float8"),
        ("fp8", "float8"),
        ("activations to cpu", "activations that are offloaded"),
        ("ulysses sp 8", "sequence parallelism"),
        ("ulysses sp 16", "sequence parallelism"),
        ("ulysses sp 32", "sequence parallelism"),
        ("ulysses sp 64", "sequence parallelism"),
        ("chunked cross-entropy", "a chunked loss of another library"),
        ("activation offloading", "activations that are offloaded"),
        ("+ activation checkpointing", "a chunked loss of another library"),  # cumulative rows
        ("fused into backward", "an optimizer step within backward"),
        ("not packed", "the lengths of the sequences are not given"),
        ("lora", "LoRA"),
        ("model parallel", "a limit of parameters, not of one model"),
        ("zenflow", "ZenFlow"),
    ]
    for word, reason in reasons:
        if word in text:
            raise NotComputableError(reason)


def _quantity(row: Mapping[str, str]) -> tuple[Quantity, float | str]:
    """Return the published figure of a point, in GiB or as a verdict. Raise NotComputableError."""
    kind, value, notes = row["quantity"], row["value"], row["notes"].lower()
    if kind == "fits":
        return "verdict", value
    if kind == "resident_bytes":
        return "resident", float(value) / _GIB
    if kind == "peak_bytes":
        return "allocated", float(value) / _GIB
    if kind == "nvidia_smi_gb":
        return "nvidia-smi", float(value)
    if kind == "gpu_percent":
        return "nvidia-smi", float(value) / 100 * 31.75  # of a 32 GB V100
    if kind == "init_allocated_gib":
        return "resident", float(value)
    if kind == "peak_gb":
        if "peak active" in notes:
            return "allocated", float(value)
        total = float(value) / (_number(row, "gpus") if "sum over" in notes else 1)
        return ("reserved" if "reserved" in notes else "nvidia-smi"), total
    raise NotComputableError(f"{kind} is not the peak of one GPU")


def compare(number: int, row: Mapping[str, str]) -> list[Point]:
    """Predict one point, and nvidia-smi's figure if its notes have one."""
    points = [_compare(number, row)]
    if smi := re.search(r"nvidia-smi ([0-9.]+) MiB", row["notes"]):
        gib = {**row, "quantity": "nvidia_smi_gb", "value": str(float(smi[1]) / 1024)}
        points.append(_compare(number, gib))
    return points


def _compare(number: int, row: Mapping[str, str]) -> Point:
    base = Point(
        number=number,
        source=row["source"].split(" http")[0],
        model=row["model"],
        gpus=row["gpus"],
        stage=row["stage"],
        offload=row["offload"],
        batch=row["micro_batch"],
        sequence=row["seq"],
        fused_loss="Liger" in row["notes"] and "no Liger" not in row["notes"],
        quantity=row["quantity"],
        published=row["value"],
    )
    try:
        quantity, published = _quantity(row)
        if "foak" in row["notes"] and quantity != "resident":
            raise NotComputableError("fused kernels of another library")
        planned = question_of(row)
        pure = _replay_pure(planned, row) if row["precision"].startswith("bf16 pure") else None
    except NotComputableError as error:
        return replace(base, reason=str(error))
    found = planned.judge(None)
    need, outside = found.gpu_need, found.gpu["overhead"]
    allocated = found.gpu_bytes - outside
    names = ("parameters", "gradients", "optimizer_states", "deepspeed_buffers")
    resident = sum(found.ledger["gpu"].get(name, 0) for name in names)
    if pure is not None:
        allocated, bare = pure
        least, reserved = bare.least_bytes + outside, bare.reserved_bytes + outside
        need = replace(bare, least_bytes=least, reserved_bytes=reserved)
        # Between steps: parameters and moments, and FSDP's gradients.
        resident = (8 if row["stage"].startswith("FSDP") else 6) * sum(
            -(-each // planned.placement.num_gpus) for each in planned.profile.tensors
        )
    size = row["gpu_mem_gb"]
    nominal = size if size in _CARDS or size.isdecimal() else None
    verdict = None if nominal is None else need.verdict(from_gb(_CARDS.get(nominal, float(nominal))))
    predicted: float | str | None
    if quantity == "verdict":
        predicted = verdict
    elif quantity in ("reserved", "nvidia-smi"):
        predicted = (need.reserved_bytes - outside) / _GIB
        if quantity == "nvidia-smi":
            assert isinstance(published, float)
            published -= outside / _GIB
    elif quantity == "allocated":
        predicted = allocated / _GIB
    else:
        predicted = resident / _GIB
    return replace(
        base,
        quantity=quantity,
        published=published,
        predicted=predicted,
        least=(need.least_bytes - outside) / _GIB,
        reserved=(need.reserved_bytes - outside) / _GIB,
        outside=outside / _GIB,
        card_verdict=None if "foak" in row["notes"] else verdict,
        method=need.method,
        phase=need.phase,
    )


_CARDS: Mapping[str, float] = {"80": 79.1, "141": 139.8, "40": 39.4, "32": 31.7, "24": 23.5}
"""Nominal GB of a card → what CUDA reports (system/device_specifications.json)."""


# ------------------------------------------------------------------ summary


def summarize(points: Sequence[Point]) -> dict[str, Any]:
    """Medians of the absolute error by group, and counts of verdicts."""
    of_b = [point for point in points if point.error is not None and point.quantity in ("reserved", "nvidia-smi")]

    def tokens(point: Point) -> int:
        digits = "".join(sign for sign in point.sequence.split(" ")[0] if sign.isdecimal())
        return int(point.batch or 1) * int(digits or 4096)

    groups: dict[str, Callable[[Point], bool]] = {
        "all": lambda _: True,
        "replayed": lambda point: point.method == "replay",
        "by the rule": lambda point: point.method == "rule",
        "8k tokens and more": lambda point: tokens(point) >= 8192,
        "below 8k tokens": lambda point: tokens(point) < 8192,
        "DeepSpeed": lambda point: point.stage.isdecimal(),
        "FSDP": lambda point: point.stage.startswith("FSDP"),
        "torch, one GPU": lambda point: point.stage == "none",
        "with offload": lambda point: point.offload != "none",
        "without offload": lambda point: point.offload == "none",
        "fused loss": lambda point: point.fused_loss,
    }
    kinds = {
        **{name: [point for point in of_b if belongs(point)] for name, belongs in groups.items()},
        **{name: [point for point in points if point.quantity == name] for name in ("allocated", "resident")},
    }
    verdicts = [point for point in points if point.quantity == "verdict" and point.predicted is not None]
    # A row with a figure ran on its card; each row counts once.
    ran = {point.number: point.card_verdict for point in points if point.published != "no" and point.card_verdict}
    return {
        "errors": {name: _medians(of_kind) for name, of_kind in kinds.items()},
        "ran": {name: list(ran.values()).count(name) for name in (FITS, TIGHT, DOES_NOT_FIT)},
        "ran_out": sum(point.published == "no" for point in verdicts),
        "ran_out_but_fits": sum(point.published == "no" and point.predicted == FITS for point in verdicts),
        "not_predicted": sum(point.reason is not None for point in points),
    }


def _medians(points: Sequence[Point]) -> dict[str, float | int | None]:
    errors = [point.error for point in points if point.error is not None]
    if not errors:
        return {"points": 0, "median_absolute_error": None, "median_error": None}
    absolute = statistics.median(map(abs, errors))
    return {"points": len(errors), "median_absolute_error": absolute, "median_error": statistics.median(errors)}


_KINDS = ("peak_gb", "peak_bytes", "resident_bytes", "nvidia_smi_gb", "gpu_percent", "init_allocated_gib", "fits")


def compare_all(path: Path) -> list[Point]:
    """Every memory figure and verdict of a table of points."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in enumerate(csv.DictReader(file)) if row[1]["quantity"] in _KINDS]
    return [point for row in rows for point in compare(*row)]


def show(points: Sequence[Point]) -> None:
    computed = [point for point in points if point.error is not None]
    print(
        f"{'':4}{'model':27}{'GPUs':>5} {'stage':9}{'offload':14}{'batch × tokens':15}{'what':11}{'published':>9}",
        end="",
    )
    print(f"{'A':>7}{'B':>7}{'compared':>9}{'error':>8}  by")
    for point in sorted(computed, key=lambda each: -abs(each.error or 0)):
        assert isinstance(point.published, float)
        assert isinstance(point.predicted, float)
        print(
            f"{point.number:3} {point.model[:26]:27}{point.gpus:>5} {point.stage[:8]:9}{point.offload[:13]:14}"
            f"{point.batch + ' × ' + point.sequence[:9]:15}{point.quantity:11}{point.published:9.2f}{point.least:7.2f}"
            f"{point.reserved:7.2f}{point.predicted:9.2f}{100 * (point.error or 0):+7.1f} %  "
            f"{point.method}, {point.phase}"
        )
    for point in points:
        if point.quantity == "verdict" and point.predicted is not None:
            print(
                f"{point.number:3} {point.model[:26]:27}{point.gpus:>5} {point.stage[:8]:9}{point.offload[:13]:14}"
                f"{point.batch + ' × ' + point.sequence[:9]:15}ran: {point.published:4} A {point.least:.1f} B "
                f"{point.reserved:.1f} + {point.outside:.1f}: {point.predicted} ({point.method})"
            )
    for point in points:
        if point.reason is not None:
            figure = f"{point.quantity} {point.published}"
            print(f"{point.number:3} {point.model[:26]:27} {figure}: not predicted, {point.reason}")


def markdown(points: Sequence[Point]) -> str:
    """The figures of reserved memory as a Markdown table, largest error first."""
    lines = [
        "| model | GPUs | stage, offload | batch × tokens | published | A | B | error of B | by |",
        "|---|--:|---|---|--:|--:|--:|--:|---|",
    ]
    of_b = [point for point in points if point.error is not None and point.quantity in ("reserved", "nvidia-smi")]
    for point in sorted(of_b, key=lambda each: -abs(each.error or 0)):
        layout = point.stage if point.offload == "none" else f"{point.stage}, {point.offload}"
        work = f"{point.batch} × {point.sequence.removeprefix('alpaca ')}"
        figures = (
            f"{point.published:.1f} | {point.least:.1f} | {point.reserved:.1f} | {100 * (point.error or 0):+.1f} %"
        )
        lines.append(f"| {point.model} | {point.gpus} | {layout} | {work} | {figures} | {point.method} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("points", type=Path, metavar="POINTS.csv", help="published figures")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the comparison as JSON")
    parser.add_argument("--markdown", action="store_true", help="print only the table of reserved memory, as Markdown")
    args = parser.parse_args(arguments)
    points = compare_all(args.points)
    summary = summarize(points)
    if args.markdown:
        print(markdown(points))
    else:
        show(points)
        print(json.dumps(summary, indent=1))
    if args.output is not None:
        versions = {name: importlib.metadata.version(name) for name in ("deepspeed", "torch", "transformers")}
        rows = [{**asdict(point), "error": point.error} for point in points]
        write_json(args.output, {"versions": versions, "summary": summary, "points": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
