"""The plan of a run before it starts: how many trials, and the memory that is predicted for them."""

from __future__ import annotations

from ..config.spec import Trial
from ..planner import Plan, RunPlan
from ..prediction.memory import DOES_NOT_FIT, UNKNOWN
from ..prediction.trial_predictions import stored_prediction
from ..system.terminal import aligned_lines
from ..units import format_bytes


def count_line(plan: RunPlan) -> str:
    """``4 points × 3 rows × 2 runs = 24 trials``."""
    trials, runs, points = plan.trials, plan.options.repeats, len(plan.plans)
    rows = {len(each.configurations) for each in plan.plans}
    count, most = f"{len(trials):,} trial{'s' if len(trials) != 1 else ''}", max(rows)
    if len(rows) == 1 and len(trials) == points * most * runs:
        factors = ((points, "point"), (most, "row"), (runs, "run"))
        named = [f"{number:,} {name}{'s' if number > 1 else ''}" for number, name in factors if number > 1]
        count = " × ".join(named) + f" = {count}" if len(named) > 1 else count
    idle = sum(trial.not_launched for trial in trials)
    idle_text = f", {idle:,} of them predicted not to fit or unsupported" if idle else ""
    return f"{count}{idle_text}"


def plan_lines(plan: RunPlan, most: int) -> list[str]:
    """The plan as a table: of a sweep a line for each point, else for each row; ``most`` lines, and how many more."""
    if len(plan.plans) > 1:
        heads = ["Point", "trials", _memory_name(plan), "fit"]
        cells = [_point_cells(each) for each in plan.plans[:most]]
        more = len(plan.plans) - len(cells)
    else:
        heads = ["Configuration", "trials", _memory_name(plan), "fits"]
        cells = [_row_cells(plan.plans[0], name) for name in _row_names(plan.plans[0])[:most]]
        more = len(_row_names(plan.plans[0])) - len(cells)
    left = [f"and {more:,} more"] if more else []
    return [count_line(plan), "", *aligned_lines([heads, *cells]), *left]


def _memory_name(plan: RunPlan) -> str:
    return "GPU memory" if plan.placement.accelerator == "cuda" else "host memory"


def _row_names(plan: Plan) -> list[str]:
    return list(dict.fromkeys(trial.configuration.name for trial in plan.trials))


def _point_cells(plan: Plan) -> list[str]:
    sizes = [size for trial in plan.trials if (size := _predicted_bytes(trial)) is not None]
    memory = "" if not sizes else format_bytes(min(sizes))
    if sizes and max(sizes) > min(sizes):
        memory = f"{memory} – {format_bytes(max(sizes))}"
    verdicts = {trial.configuration.name: _fit_text(plan, trial) for trial in plan.trials}
    fitting, unknown = (list(verdicts.values()).count(text) for text in ("yes", "?"))
    fits = f"{fitting} of {len(verdicts)}" + (f", {unknown} ?" if unknown else "")
    return [plan.options.point_text, str(len(plan.trials)), memory, fits]


def _row_cells(plan: Plan, name: str) -> list[str]:
    trials = [trial for trial in plan.trials if trial.configuration.name == name]
    first = trials[0]
    fits = "unsupported" if first.unsupported else _fit_text(plan, first)
    prediction = stored_prediction(first)
    least = "≥ " if prediction is not None and prediction.unknown else ""
    return [first.configuration.label, str(len(trials)), least + format_bytes(_predicted_bytes(first)), fits]


def _predicted_bytes(trial: Trial) -> int | None:
    """Predicted memory of one GPU, on the CPU accelerator of the host; None without a prediction."""
    prediction = stored_prediction(trial)
    if prediction is None:
        return None
    return prediction.gpu_bytes if trial.placement.accelerator == "cuda" else prediction.host_bytes


def _fit_text(plan: Plan, trial: Trial) -> str:
    """``yes``, ``no``, or ``?`` where a part of its memory is not predicted and the rest would fit."""
    if trial.not_launched:
        return "no"
    prediction = stored_prediction(trial)
    if prediction is None:
        return "?"
    verdict = prediction.verdict(plan.facts.memory.gpu_bytes, plan.facts.memory.host_bytes)
    return {DOES_NOT_FIT: "no", UNKNOWN: "?"}.get(verdict, "yes")
