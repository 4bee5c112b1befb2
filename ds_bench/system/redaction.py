"""Removes credentials from what is stored: environment variables, DeepSpeed configurations, typed flags."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

REDACTED = "<redacted>"

# Patterns are text, which re compiles when it is first used, so that importing this module takes no time.
_SECRET_NAME = r"(?i)token|key|secret|passw|passphrase|_pass\b|pwd|credential|auth|bearer|jwt|cookie"
_SECRET_VALUE = r"""(?xs)
    (?:^|[\s"'=:,;])(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|nvapi-)  # prefixes of issuers
    |eyJ[\w-]*\.      # JSON web token
    |[\w+/]{32,}={1,2}(?:\W|$)  # padded base64, also if it begins like a path
    |-----BEGIN
    |:.*@             # user:password@host, with or without a scheme
    |://.*\?          # a signed address carries its signature in the query
    |(?i:bearer\s|(?:token|key|secret|passw\w*|pwd|credentials?|auth\w*|sig)["']?\s*[=:])
    |[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"""
_CLASS_NAME = r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]+[a-z]+\d{0,2})+"
"""A class, with its module: words with capitals and short numbers, which an encoded key is not."""
_CLASS_NAMES_PATH = "leaf_module.classes"
_ADDRESS_CREDENTIALS = r"(://)[^/@\s]+@"
_MAX_SETTING_LENGTH = 4096  # characters; a longer value is a document, which the patterns would need seconds for
_GPU_UUID = r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"


def looks_secret(name: str, value: str) -> bool:
    """Whether a variable may hold a token, key, password or other credential, by its name or by its value.

    In doubt the answer is yes: a hidden setting is a nuisance, a stored token a leak. A short password of words under
    an unsuspicious name is not recognised, nor is an unusual key that looks like a path.
    """
    if re.search(_SECRET_NAME, name) or len(value) > _MAX_SETTING_LENGTH:
        return bool(value)
    value = re.sub(_GPU_UUID, "", value)
    return bool(re.search(_SECRET_VALUE, value)) or _looks_random(value)


def redacted_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration with :data:`REDACTED` for every text that may be a credential, by its path or value."""
    return {name: _redacted(name, value) for name, value in config.items()}


def _redacted(path: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _redacted(f"{path}.{name}", item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(path, item) for item in value]
    return REDACTED if isinstance(value, str) and _is_secret(path, value) else value


@lru_cache(maxsize=4096)
def _is_secret(path: str, value: str) -> bool:
    if path.endswith(_CLASS_NAMES_PATH) and re.fullmatch(_CLASS_NAME, value):
        value = value.rpartition(".")[0]  # a long class name with a number would look random
    return looks_secret(path, value)


def redacted_keys(config: Mapping[str, Any]) -> list[str]:
    """The paths of redacted values in a configuration, in the form that ``--set`` takes."""
    return [path for path, value in _texts("", config) if value == REDACTED]


def secrets_of(config: Mapping[str, Any]) -> list[str]:
    """The texts in a configuration that may be credentials, the longest first."""
    secrets = {value for path, value in _texts("", config) if value and value != REDACTED and _is_secret(path, value)}
    # One may contain another, of which a rest would stay if the shorter were taken out first.
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
    """The text with :data:`REDACTED` for each of the secrets."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """A typed command with possible credentials redacted: in values of ``--set`` and in addresses."""
    kept: list[str] = []
    for argument in arguments:
        head, value = ("--set=", argument[6:]) if argument.startswith("--set=") else ("", argument)
        path, equals, setting = value.partition("=")
        if (head or kept[-1:] == ["--set"]) and equals:
            kept.append(f"{head}{path}={_redacted_setting(path, setting)}")
        else:
            kept.append(re.sub(_ADDRESS_CREDENTIALS, rf"\1{REDACTED}@", argument))
    return kept


def _redacted_setting(path: str, setting: str) -> str:
    """The value of one ``--set``, which may be JSON."""
    try:
        value = json.loads(setting)
    except (ValueError, RecursionError):
        value = setting
    redacted = _redacted(path, value)
    if redacted == value:
        return setting
    return redacted if isinstance(redacted, str) else json.dumps(redacted)


def _looks_random(value: str) -> bool:
    """Whether a long part of the value mixes kinds of letters, as keys do; words and paths have separators."""
    unbroken = re.findall(r"[A-Za-z0-9+=]{20,}", value)
    # With the separators of base64 in it. A run that starts inside a path is part of the path.
    separated = re.findall(r"(?<![\w./~+-])[\w+-][\w+/-]{31,}", value)
    # Names have few capitals inside words, a random text has many.
    return any(_count_kinds(run) >= 2 for run in unbroken) or any(
        _count_kinds(run) == 3 or len(re.findall("[a-z][A-Z]", run)) > 3 for run in separated
    )


def _count_kinds(run: str) -> int:
    """How many of lower case, upper case and digits occur."""
    return sum(bool(re.search(kind, run)) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
