"""API keys: which tenant a key belongs to, and which keys are valid.

A configuration has the key itself, or `sha256:` and the 64 hexadecimal digits of its hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from disagg.errors import StartupError

DEFAULT_TENANT = "default"  # settings and metrics label of all tenants without their own settings

_TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")

MIN_KEY_LENGTH = 16  # of random hexadecimal digits: 64 bits, which nobody guesses over HTTP

Digest = bytes  # SHA-256 of a key


def digest_of(key: bytes) -> Digest:
    return hashlib.sha256(key).digest()


def digest_said(key: str, whose: str, param: str) -> Digest:
    """Of a key as a configuration has it.

    Raises:
        StartupError: it cannot be one; names `whose` and `param`.
    """
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise StartupError(
            f"The {whose} must be printable ASCII without spaces, and not empty.", param=param
        )
    match = _HASH.fullmatch(key)
    return bytes.fromhex(match[1]) if match else digest_of(key.encode())


def tenants_by_digest(keys: Iterable[tuple[str, str]]) -> dict[Digest, str]:
    """Whose each key is.

    Args:
        keys: a tenant's name, "" for the one without a name, and a key. A tenant may have several.

    Raises:
        StartupError: a name or a key cannot be one, or two tenants have the same key.
    """
    found: dict[Digest, str] = {}
    for name, key in keys:
        if name and (not _TENANT_NAME.fullmatch(name) or name == DEFAULT_TENANT):
            raise StartupError(
                f"{name[:64]!r} cannot be the name of a tenant: up to 64 letters, digits, '.', '_'"
                f" and '-' can; {DEFAULT_TENANT!r} stands for keys without a tenant's name.",
                param="api_keys",
            )
        whose = f"API key of {name or DEFAULT_TENANT!r}"
        digest = digest_said(key, whose, "api_keys" if name else "api_key")
        if found.setdefault(digest, name) != name:
            raise StartupError(
                "Two tenants have the same API key; give each one of its own.", param="api_keys"
            )
    return found


def can_be_guessed(key: str) -> bool:
    """Whether a key of a configuration is short. How long a hashed key is, nobody knows."""
    return len(key) < MIN_KEY_LENGTH and not _HASH.fullmatch(key)


def read_key_file(path: str) -> dict[Digest, str]:
    """Whose the keys of a file are. Raises `StartupError`, as `named_keys_in`, or for a key."""
    return tenants_by_digest(named_keys_in(path))


def named_keys_in(path: str) -> list[tuple[str, str]]:
    """Tenants, "" for no name, and keys of a file.

    It has `TENANT:KEY` a line, with `default` for no name, and comments that begin with `#`.

    Raises:
        StartupError: it cannot be read, or a line is none of these; or it has no key.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(
            f"The API keys in {path} cannot be read: {error}.", param="api_keys_file"
        ) from error
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        if not colon or not name:
            raise StartupError(
                f"Line {number} of {path} is not TENANT:KEY (default:KEY: a key without a name).",
                param="api_keys_file",
            )
        keys.append(("" if name == DEFAULT_TENANT else name, key))
    if not keys:
        raise StartupError(
            f"There is no API key in {path}; one line for each, TENANT:KEY.", param="api_keys_file"
        )
    return keys
