"""Removes credentials from stored environment variables, DeepSpeed configurations and typed flags.

A string is a credential if its name says so (``HF_TOKEN``, ``comet.api_key``), if it carries an issuer's prefix
(``hf_…``), or if it is an address with a user or a query. A password under an innocuous name is not recognized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"

# Patterns are text, which re compiles on first use: importing this module takes no time.
_SECRET_NAME = r"(?i)token|key|secret|passw|passphrase|_pass\b|pwd|credential|auth|bearer|jwt|cookie"
_SECRET_VALUE = r"""(?xs)
    (?:^|[\s"'=:,;])(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|nvapi-)  # prefixes of issuers
    |eyJ[\w-]*\.      # JSON web token
    |-----BEGIN       # private key
    |:.*@             # user:password@host, with or without a scheme
    |://.*\?          # a signed address carries its signature in the query
    |(?i:bearer\s|(?:token|key|secret|passw\w*|pwd|credentials?|auth\w*|sig)["']?\s*[=:])"""
_ADDRESS_CREDENTIALS = r"(://)[^/@\s]+@"


def looks_secret(name: str, value: str) -> bool:
    """Return whether a value under this name may be a credential."""
    return bool(value and (re.search(_SECRET_NAME, name) or re.search(_SECRET_VALUE, value)))


def redacted_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed configuration with :data:`REDACTED` in place of credentials."""
    return {name: _redacted(name, value) for name, value in config.items()}


def _redacted(path: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _redacted(f"{path}.{name}", item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(path, item) for item in value]
    return REDACTED if isinstance(value, str) and looks_secret(path, value) else value


def redacted_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the paths of redacted values, in the form that ``--set`` takes."""
    return [path for path, value in _texts("", config) if value == REDACTED]


def secrets_of(config: Mapping[str, Any]) -> list[str]:
    """Return the credentials in a configuration, longest first: a shorter one may be part of a longer one."""
    secrets = {value for path, value in _texts("", config) if value != REDACTED and looks_secret(path, value)}
    return sorted(secrets, key=len, reverse=True)


def _texts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Path and value of every text in a configuration."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(f"{path}.{name}" if path else str(name), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(path, item)
    elif isinstance(value, str):
        yield path, value


def without(text: str, secrets: Sequence[str]) -> str:
    """Return the text with :data:`REDACTED` in place of each secret."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a typed command without credentials in values of ``--set``, and without user and password in addresses."""
    kept: list[str] = []
    for argument in arguments:
        head, value = ("--set=", argument[6:]) if argument.startswith("--set=") else ("", argument)
        path, equals, setting = value.partition("=")
        if not equals or not (head or kept[-1:] == ["--set"]):
            kept.append(re.sub(_ADDRESS_CREDENTIALS, rf"\1{REDACTED}@", argument))
            continue
        try:
            parsed = json.loads(setting)
        except (ValueError, RecursionError):
            parsed = setting
        redacted = _redacted(path, parsed)
        if redacted != parsed:
            setting = redacted if isinstance(redacted, str) else json.dumps(redacted)
        kept.append(f"{head}{path}={setting}")
    return kept
