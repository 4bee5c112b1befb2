"""The Hugging Face Hub: can models be had that are neither presets nor local? Presets never need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ..system import hub
from .findings import Finding, SystemAccess, ok, warning


def check(
    system: SystemAccess,
    request: Callable[[str], None] = hub.send_request,
    seconds: float = hub.ANSWER_SECONDS,
) -> Iterator[Finding]:
    """Whether the Hub answers, and whether there is a token, which is neither read nor shown."""
    yield _check_answer(system, request, seconds)
    yield _check_token(system)


def _check_answer(system: SystemAccess, request: Callable[[str], None], seconds: float) -> Finding:
    if (name := hub.offline_variable(system.environ)) is not None:
        return ok("Hub", f"not asked, since {name} is set: only presets, local folders and cached models")
    failure = hub.connection_failure(system.environ, request, seconds)
    host = hub.host_name(system.environ)
    if failure is None:
        return ok("Hub", f"{host} answers")
    if host is None:
        return warning("Hub", failure, "unset HF_ENDPOINT, or give https://…")
    remedy = "only models named as on the Hub need it: use a preset, a local folder, or a cached model"
    return warning("Hub", failure, remedy)


def _check_token(system: SystemAccess) -> Finding:
    """Looks where huggingface_hub looks, whose own function would also read the token."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if system.environ.get(name, "").strip():
            return ok("Hub token", f"present ({name})")
    path = _token_file(system)
    if path is not None and path.is_file() and path.stat().st_size > 0:
        return ok("Hub token", "present (the file that hf auth login writes)")
    return ok("Hub token", "none: only gated models need one (hf auth login)")


def _token_file(system: SystemAccess) -> Path | None:
    """The file of the token (huggingface_hub/constants.py, HF_TOKEN_PATH); None for a user without a home."""
    environ = system.environ
    if path := environ.get("HF_TOKEN_PATH"):
        return Path(path)
    if home := environ.get("HF_HOME"):
        return Path(home) / "token"
    cache = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else None)
    return None if cache is None else Path(cache) / "huggingface" / "token"
