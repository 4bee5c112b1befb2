"""The command ``advice``: explains each strategy for one model, with figures from formulas."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..config import strategies, validation
from ..config.automatic_values import TrainingFacts
from ..config.configuration_file_rows import FileRowMaker
from ..config.configuration_files import ConfigurationFile, check_remedy, read_configuration_files
from ..config.spec import Configuration, Placement, Precision
from ..errors import UsageError
from ..models import lookup
from ..models.presets import ModelFacts, preset_remedy
from ..recommend import strategy_guide
from ..system import invocation, terminal
from ..units import format_items, format_with_suffix
from .commands import PREDICTED_STRATEGIES


def show_advice(model: str, num_gpus: int, precision: Precision, grad_accum: int, configs: Sequence[Path] = ()) -> int:
    """Print when to use each strategy, and what it saves and costs for this model. Return 0; raises UsageError.

    ``configs``: files and folders of configurations to explain instead of the strategies.
    """
    facts = _model_facts(model)
    size, gpus = format_with_suffix(facts.parameters), format_items(num_gpus, "GPU")
    title = f"{facts.name}, {size} parameters, {precision}, {gpus} (computed, not measured)"
    terminal.print_text(terminal.escape_controls(title) + "\n")
    catalogue = map(strategies.named_strategy, (*PREDICTED_STRATEGIES, *strategies.REFERENCES))
    configurations = [*map(strategies.make_configuration, catalogue)]
    if configs:
        training = TrainingFacts(
            num_gpus=num_gpus, grad_accum=grad_accum, precision=precision, hidden_size=facts.hidden_size
        )
        placement = Placement(accelerator="cuda", num_gpus=num_gpus, nvme_path="/nvme")
        files, lines = read_configuration_files(configs)
        usable, refusals = usable_configurations(files, FileRowMaker(facts=training), placement)
        lines += refusals
        if not usable:
            raise UsageError(f"--configs {'; '.join(lines)}", remedy=check_remedy(configs))
        lines += [f"{each.name}: {caveat}" for each in usable for caveat in each.caveats]
        for line in lines:
            terminal.print_text(f"note: {terminal.escape_controls(line)}", sys.stderr)
        configurations = [replace(each, label=f"{each.name} (stage {each.stage})") for each in usable]
    for configuration in configurations:
        lines = strategy_guide.advice_lines(
            configuration,
            parameters=facts.parameters,
            num_gpus=num_gpus,
            precision=configuration.workload_changes.get("precision", precision),
            grad_accum=grad_accum,
        )
        terminal.print_text("\n".join(lines))
    terminal.print_text("\n" + "\n".join(strategy_guide.general_lines(num_gpus)))
    return 0


def usable_configurations(
    files: Sequence[ConfigurationFile], maker: FileRowMaker, placement: Placement
) -> tuple[list[Configuration], list[str]]:
    """Return the files' configurations that this placement can run, and why it cannot run the others."""
    usable, refusals = [], []
    for configuration in map(maker.make, files):
        reason = validation.unsupported_reason(configuration, placement)
        if reason is None:
            usable.append(configuration)
        else:
            refusals.append(f"{configuration.name}: {reason}")
    return usable, refusals


def _model_facts(model: str) -> ModelFacts:
    """Return the facts of a preset, a local folder or an already downloaded Hub model; the network is never used.

    Raises UsageError if the model is not found or its parameters cannot be counted.
    """
    offline = {"HF_HUB_OFFLINE": "1"}
    try:
        facts = lookup.resolve_model(model, factory=None, trust_remote_code=False, environment=offline).facts
    except UsageError as error:
        # An existing folder was read, so the error is about its content.
        if Path(model).is_dir():
            raise
        problem = f"--model {model} is not a built-in model, a folder or a downloaded model"
        raise UsageError(problem, remedy=preset_remedy(model)) from error
    if facts is None:
        raise UsageError(
            f"--model {model}: its parameters cannot be counted without building it",
            remedy=f"run {invocation.command('models')} to see architectures whose parameters can be counted",
        )
    return facts
