"""The name of a row's baseline, and the facts that a baseline and a result must share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.provenance import unnamed_values
from ..config.spec import point_text

if TYPE_CHECKING:
    from ..analysis.row import Run


def workload_facts(run: Run) -> dict[str, Any]:
    """Return the facts that two rows must share to measure the same quantity; None for those a failed row lacks.

    The number of steps is not one of them: more steps measure the same quantity with less noise. ``ds_config`` is a
    hash that shows whether the DeepSpeed configuration changed.
    """
    script = {} if run.row.script is None else {"script": run.row.script}
    return {name: getattr(run.row, name) for name in _WORKLOAD_FACTS} | script | {"ds_config": run.row.config_hash}


_WORKLOAD_FACTS = (
    "model", "parameter_count", "strategy", "stage", "batch_size", "seq_length", "grad_accum", "precision",
    "activation_checkpointing", "dropout", "optimizer", "accelerator", "device", "num_gpus", "data_parallel_size",
    "launch", "method_version",
)  # fmt: skip


def baseline_name(run: Run) -> str:
    """Return ``<model>/<strategy>``, then the values that are not the scripts' defaults: ``/batch8-seq1024-4ranks``.

    It does not depend on other rows. Hardware, versions and the DeepSpeed configuration are left out, so that a row
    keeps its name, and its baseline, when these change. So are batch and precision of a script, which decides them
    itself: a row that failed does not know them.
    """
    facts, workload = workload_facts(run), run.trial.workload
    # The file of token ids, and values of a sweep's point that no other part shows.
    texts = [] if workload.data_path is None else [f"data {Path(workload.data_path).name}"]
    texts += [point_text({path: value}) for path, value in unnamed_values(run.trial)]
    by_stage, built_in = facts["strategy"] == f"zero{facts['stage']}", workload.script is None
    parts = (
        # Written out, so that a new default of a flag does not rename stored baselines.
        (f"batch{facts['batch_size']}", built_in and facts["batch_size"] != 4),
        (f"seq{facts['seq_length']}", facts["seq_length"] not in (None, 512)),
        (f"accum{facts['grad_accum']}", built_in and facts["grad_accum"] != 1),
        (facts["precision"], built_in and facts["precision"] != "bf16"),
        ("checkpointing", facts["activation_checkpointing"]),
        (f"stage{facts['stage']}", not by_stage and facts["stage"] != 3),
        (f"{facts['num_gpus']}ranks", facts["num_gpus"] != 1),
        (workload.pass_type, workload.pass_type != "train"),
        ("not_synchronized", not workload.synchronized),
        *((re.sub(r"[^A-Za-z0-9._+]+", "_", text).strip("_"), True) for text in texts),
    )
    suffix = "-".join(text for text, differs in parts if differs)
    return "/".join([facts["model"], facts["strategy"], *([suffix] if suffix else [])])
