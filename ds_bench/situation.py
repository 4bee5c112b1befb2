"""What is known before trials are made: the model, the machine, the strategies' configurations, and how to launch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from . import plan
from .config import deepspeed_config, placement
from .config.options import Options
from .config.spec import Placement, Trial
from .errors import DsBenchError, UsageError
from .launch import Launcher, Limits, ops, rank_environment, scratch
from .launch.deepspeed import DeepSpeedLauncher
from .launch.gpu_monitor import CardWatcher
from .launch.warm import WarmLauncher
from .models.lookup import ModelChoice, find_model
from .prediction import trial_predictions
from .prediction.model_profile import ModelProfile
from .system import gpus, terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known before trials are made: model, machine, and the strategies' configurations."""

    options: Options
    choice: ModelChoice
    place: Placement
    drafts: Sequence[plan.Draft]
    variables: dict[str, str]
    """Of every process of every trial."""
    caveats: dict[str, str]
    """By strategy, known before it runs."""
    lacks_space: str | None
    """Why rows that swap to NVMe cannot run; None where they can, or there are none."""
    make_config: plan.MakeConfig
    """The script's own ``create_deepspeed_config``."""


def look_around(options: Options, make_config: plan.MakeConfig) -> Situation:
    """Everything that can be wrong with the request, found before any work."""
    if options.output_dir.exists() and not options.output_dir.is_dir():
        raise UsageError(f"--output-dir {options.output_dir} is not a folder", remedy="give a folder")
    drafts = _usable(lambda: plan.drafts(options, make_config))
    place = placement.decide(options, os.environ, gpus.NvmlQuery())
    variables = rank_environment.rank_environment(place, os.environ, None)
    choice = find_model(
        options.model,
        factory=options.model_factory is not None,
        trust_remote_code=options.trust_remote_code,
        environment=variables,
    )
    plan.seq_length(options.seq_length, choice)
    variables = rank_environment.rank_environment(place, os.environ, choice.model_type)
    if choice.source == "hub":  # looked up and cached just now: ranks need not ask again
        variables["HF_HUB_OFFLINE"] = "1"
    if place.hostfile is None:  # other nodes do not have the folder
        variables |= scratch.temporary_folder_variables(os.environ)
    _usable(lambda: plan.make_trials(options, choice, place, drafts, {}, {}))
    caveats = _check_nvme(options, drafts)
    swaps = options.nvme_path is not None and any(deepspeed_config.uses_nvme(draft.config) for draft in drafts)
    return Situation(
        options=options,
        choice=choice,
        place=place,
        drafts=drafts,
        variables=variables,
        caveats=caveats,
        lacks_space=rank_environment.lack_of_space(options.nvme_path, choice) if swaps and options.nvme_path else None,
        make_config=make_config,
    )


class Planned:
    """From drafts to trials on this machine: completed, and with the memory they are predicted to take."""

    def __init__(
        self,
        situation: Situation,
        op_states: Mapping[str, ops.OpState],
        room: trial_predictions.Room,
        profile: ModelProfile | trial_predictions.Unpredicted,
    ) -> None:
        self.situation, self.room, self.profile, self._op_states = situation, room, profile, op_states

    def trials(self, drafts: Sequence[plan.Draft]) -> list[Trial]:
        """Interleaved; those that cannot fit marked where the user asked for it."""
        known = self.situation
        made = plan.make_trials(
            known.options,
            known.choice,
            known.place,
            drafts,
            self._op_states,
            known.caveats,
            lacks_space=known.lacks_space,
        )
        options = known.options
        return trial_predictions.foresee(
            made, self.profile, self.room, skip=options.skip_predicted_oom, force=options.force
        )


Made = TypeVar("Made")


def _usable(make: Callable[[], Made]) -> Made:
    """Whatever a configuration of an odd shape, or the user's own function, raises becomes one line."""
    try:
        return make()
    except DsBenchError:
        raise
    except Exception as error:
        problem = f"the DeepSpeed configuration cannot be used: {type(error).__name__}: {error}"
        raise UsageError(problem, remedy="check --ds-config, --set and create_deepspeed_config") from None


def _check_nvme(options: Options, drafts: Sequence[plan.Draft]) -> dict[str, str]:
    """Caveats by strategy; raises where the path cannot be used."""
    users = [draft.strategy.name for draft in drafts if deepspeed_config.uses_nvme(draft.config)]
    if options.nvme_path is None or not users:
        return {}
    caveat = rank_environment.check_nvme_path(options.nvme_path)
    if options.family == "offload" and "nvme" not in options.strategies:
        terminal.print_text("note: --nvme-path is given, so the nvme strategy is added", sys.stderr)
    return {} if caveat is None else dict.fromkeys(users, caveat)


def choose_launcher(
    situation: Situation, trials: Sequence[Trial], say: Callable[[str], None]
) -> tuple[Launcher, str | None]:
    """The launcher asked for, which watches the cards on GPUs; cold with a note where ranks may not be forked warm."""
    launcher, why_cold = _launcher(situation, trials, say)
    place = situation.place
    if place.accelerator == "cpu":
        return launcher, why_cold
    used = gpus.visible_indices(os.environ, gpus.NvmlQuery())[: place.num_gpus]
    return CardWatcher(launcher, gpus.NvmlQuery(), used), why_cold


def _launcher(situation: Situation, trials: Sequence[Trial], say: Callable[[str], None]) -> tuple[Launcher, str | None]:
    options, place = situation.options, situation.place
    limits = Limits(timeout_seconds=options.timeout, stall_timeout_seconds=options.stall_timeout)
    devices = gpus.visible_indices(os.environ, gpus.NvmlQuery()) if place.accelerator == "cuda" else None
    cold = DeepSpeedLauncher(situation.variables, limits, device_indices=devices)
    if place.launcher == "deepspeed" or all(trial.not_launched for trial in trials):
        return cold, None
    warm = WarmLauncher(situation.variables, limits, otherwise=None if options.launcher == "warm" else cold)
    say("loading torch, DeepSpeed and Transformers once, for every trial …")
    reason = warm.prepare()
    if reason is None:
        return warm, None
    if options.launcher == "warm":
        raise UsageError(f"--launcher warm is not safe here: {reason}", remedy="use --launcher deepspeed")
    return cold, f"cold launch: the preloaded server may not be forked, {reason}"
