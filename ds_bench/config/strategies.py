"""The catalogue of strategies: data, not code.

Offload strategies exist at more than one stage (``--stage``); the table holds what is offloaded,
and :func:`offload_strategy` puts a stage to it.
"""

from __future__ import annotations

from .spec import Device, Strategy

ZERO_STAGES: dict[int, Strategy] = {
    stage: Strategy(name=f"zero{stage}", label=f"ZeRO-{stage}", stage=stage) for stage in (0, 1, 2, 3)
}
"""The strategies of ``zero_stage_comparison.py`` by stage."""

_OFFLOADS: dict[str, tuple[str, Device, Device]] = {
    "none": ("", "none", "none"),
    "cpu_optimizer": (" + CPU optimizer", "cpu", "none"),
    "cpu_full": (" + CPU optimizer and parameters", "cpu", "cpu"),
    "nvme": (" + NVMe optimizer and parameters", "nvme", "nvme"),
}

OFFLOAD_NAMES: tuple[str, ...] = tuple(_OFFLOADS)
"""What ``--strategies`` of ``offload_comparison.py`` takes."""


def offload_strategy(name: str, stage: int = 3) -> Strategy:
    """The offload strategy of that name at a ZeRO stage. Raises KeyError for an unknown name."""
    offloaded, optimizer_device, param_device = _OFFLOADS[name]
    return Strategy(
        name=name,
        label=f"ZeRO-{stage}{offloaded}",
        stage=stage,
        offload_optimizer=optimizer_device,
        offload_param=param_device,
    )


def matches(strategy: Strategy, text: str) -> bool:
    """Whether a user who writes ``text`` (``zero2``, ``ZeRO-2``, ``stage 2``, ``2``, ``cpu_optimizer``) means it.

    Case, spaces, hyphens and underscores do not count. A stage means a strategy only where the optimizer is not
    offloaded.
    """
    names = [strategy.name, strategy.label]
    if not strategy.offloads_optimizer:
        names += [f"zero{strategy.stage}", f"stage{strategy.stage}", str(strategy.stage)]
    return _without_separators(text) in map(_without_separators, names)


def _without_separators(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter not in " -_")
