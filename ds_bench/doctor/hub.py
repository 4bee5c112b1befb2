"""The Hugging Face Hub: can models be had that are neither presets nor local? Presets never need it."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from .findings import Finding, SystemAccess, ok, warning

SECONDS = 3.0
"""All the time the Hub gets to answer, name look-up included."""
_TRUE = {"1", "ON", "YES", "TRUE"}
_DEFAULT = "https://huggingface.co"

Reach = Callable[[str], None]
"""Asks an address for anything; raises OSError or ValueError where it does not answer."""


def ask(address: str) -> None:
    """Any answer will do, also one that says no."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()


def check(machine: SystemAccess, reach: Reach = ask, seconds: float = SECONDS) -> Iterator[Finding]:
    """Reachable or not, and whether there is a token; the token itself is neither read nor shown."""
    yield _reachable(machine, reach, seconds)
    yield _token(machine)


def _reachable(machine: SystemAccess, reach: Reach, seconds: float) -> Finding:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if machine.environ.get(name, "").upper() in _TRUE:
            return ok("Hub", f"not asked, since {name} is set: only presets, local folders and cached models")
    endpoint = machine.environ.get("HF_ENDPOINT") or _DEFAULT
    remedy = "only models named as on the Hub need it: use a preset, a local folder, or a cached model"
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return warning("Hub", "HF_ENDPOINT is no web address", "unset HF_ENDPOINT, or give https://…")
    failure = _failure(lambda: reach(endpoint), seconds)
    if failure is not None:
        return warning("Hub", f"{parts.hostname} does not answer ({failure})", remedy)
    return ok("Hub", f"{parts.hostname} answers")


def _failure(act: Callable[[], None], seconds: float) -> str | None:
    """Why it failed; None where it did not. A look-up of a name can outlast any timeout, hence the thread."""
    failures: list[str] = []

    def run() -> None:
        try:
            act()
        except Exception as error:
            # Of what urllib raises, the reason alone: the address may hold a password.
            reason = getattr(error, "reason", error)
            failures.append(getattr(reason, "strerror", None) or type(reason).__name__)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return f"no answer within {seconds:g} s"
    return failures[0] if failures else None


def _token(machine: SystemAccess) -> Finding:
    """In the places where huggingface_hub looks."""
    variables = [name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if machine.environ.get(name, "").strip()]
    if variables:
        return ok("Hub token", f"present ({variables[0]})")
    path = _token_file(machine)
    if path is not None and path.is_file() and path.stat().st_size > 0:
        return ok("Hub token", "present (the file that hf auth login writes)")
    return ok("Hub token", "none: only gated models need one (hf auth login)")


def _token_file(machine: SystemAccess) -> Path | None:
    given = machine.environ.get("HF_TOKEN_PATH")
    if given:
        return Path(given)
    home = machine.environ.get("HF_HOME")
    if home:
        return Path(home) / "token"
    cache = machine.environ.get("XDG_CACHE_HOME")
    if not cache and not machine.environ.get("HOME"):
        return None
    return Path(cache or Path(machine.environ["HOME"]) / ".cache") / "huggingface" / "token"
