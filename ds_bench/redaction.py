"""Keeps credentials out of what is stored: whether an environment variable may hold one."""

from __future__ import annotations

import re

REDACTED = "<redacted>"

# Patterns stay text, which re compiles once when first used: importing this module must cost nothing.
_SECRET_NAME = r"(?i)token|key|secret|passw|passphrase|_pass\b|pwd|credential|auth|bearer|jwt|cookie"
_SECRET_VALUE = r"""(?xs)
    (?:^|[\s"'=:,;])(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|nvapi-)  # issuers' marks
    |eyJ[\w-]*\.      # JSON web token
    |[\w+/]{32,}={1,2}(?:\W|$)  # padded base64, also one that begins like a path
    |-----BEGIN
    |:.*@             # user:password@host, with or without a scheme
    |://.*\?          # a signed address carries its signature in the query
    |(?i:bearer\s|(?:token|key|secret|passw\w*|pwd|credentials?|auth\w*|sig)["']?\s*[=:])
    |[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"""
_LONGEST_SETTING = 4096  # characters; beyond, a value is a document, and the patterns would take seconds over it
_CARD_NAME = r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"


def looks_secret(name: str, value: str) -> bool:
    """Whether a variable may hold a token, key, password or other credential, by its name or by its value.

    Made to err on the side of hiding: a hidden setting costs a reader a question, a stored token is a leak. A short
    or wordlike password under an innocent name cannot be told from a setting, nor a rare key from a path.
    """
    if re.search(_SECRET_NAME, name) or len(value) > _LONGEST_SETTING:
        return bool(value)
    value = re.sub(_CARD_NAME, "", value)
    return bool(re.search(_SECRET_VALUE, value)) or _looks_random(value)


def _looks_random(value: str) -> bool:
    """Words and paths have separators and keep to one kind of letter; keys are long runs that mix kinds."""
    unbroken = re.findall(r"[A-Za-z0-9+=]{20,}", value)
    # With the separators of base64 in it; a run that starts inside a path is a path.
    broken = re.findall(r"(?<![\w./~+-])[\w+-][\w+/-]{31,}", value)
    return any(_kinds(run) >= 2 for run in unbroken) or any(_kinds(run) == 3 or _humps(run) > 3 for run in broken)


def _kinds(run: str) -> int:
    return sum(bool(re.search(kind, run)) for kind in ("[a-z]", "[A-Z]", "[0-9]"))


def _humps(run: str) -> int:
    """Capitals within words: few in a name, a quarter of a random text."""
    return len(re.findall("[a-z][A-Z]", run))
