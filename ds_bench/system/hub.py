"""The Hugging Face Hub as this machine sees it: may it be asked, under which address, and does it answer?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

ANSWER_SECONDS = 3.0
"""Time that the Hub has to answer, the look-up of its name included."""
_TRUE = {"1", "ON", "YES", "TRUE"}  # as huggingface_hub reads a switch (constants.py, ENV_VARS_TRUE_VALUES)


def offline_variable(environ: Mapping[str, str]) -> str | None:
    """The variable that forbids asking the Hub; None if none is set."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if environ.get(name, "").upper() in _TRUE), None)


def _address(environ: Mapping[str, str]) -> str:
    return environ.get("HF_ENDPOINT") or "https://huggingface.co"


def host_name(environ: Mapping[str, str]) -> str | None:
    """The Hub's host, without user and password; None if ``HF_ENDPOINT`` is no web address."""
    try:
        parts = urlsplit(_address(environ))
        return parts.hostname if parts.scheme in ("http", "https") else None
    except ValueError:  # brackets that do not match
        return None


def send_request(address: str) -> None:
    """Asks the address for its headers. Any answer will do, a refusal too. Raises OSError or ValueError without one."""
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()


def connection_failure(
    environ: Mapping[str, str], request: Callable[[str], None] = send_request, seconds: float = ANSWER_SECONDS
) -> str | None:
    """Why the Hub cannot be reached, such as ``huggingface.co does not answer (…)``; None if it answers.

    Takes ``seconds`` at most.
    """
    host = host_name(environ)
    if host is None:  # also an address of a file, which must not be opened
        return "HF_ENDPOINT is no web address"
    failures: list[str] = []

    def run() -> None:
        try:
            request(_address(environ))
        except Exception as error:
            # Only the reason of urllib's errors: their text may hold the address, and that a password.
            reason = getattr(error, "reason", error)
            failures.append(getattr(reason, "strerror", None) or type(reason).__name__)

    thread = threading.Thread(target=run, daemon=True)  # the look-up of a host's name knows no timeout
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        failures.append(f"no answer within {seconds:g} s")
    return f"{host} does not answer ({failures[0]})" if failures else None
