"""The secret under which cache salts are hashed, so that no salt leaves the process."""

import hmac
import secrets
from collections.abc import Mapping

from ....validation import shown
from .prefix_hash import PUBLIC_ROOT

ENVIRONMENT_NAME = "MAMBASLOTS_SALT_KEY"
"""The environment variable that is read where the configuration names no key."""
SHORTEST_KEY = 16


class SaltKey:
    """Turns a tenant's salt into the root of the tenant's hash chains.

    Who sees roots, in an export say, learns no salt without the key. Equal keys make equal roots, so replicas
    that exchange salted prefixes need one key.

    Attributes:
        key_id: tells keys apart; 16 hexadecimal digits, which say nothing about the key.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key_bytes("key", key)
        self.key_id = self._digest(b"mambaslots.key_id\0").hex()[:16]

    def root(self, salt: bytes | None) -> bytes:
        """The root digest of chains under `salt`: HMAC-SHA-256; without a salt the public root."""
        return PUBLIC_ROOT if salt is None else self._digest(b"mambaslots.salt\0" + salt)

    def _digest(self, message: bytes) -> bytes:
        return hmac.digest(self._key, message, "sha256")

    def __repr__(self) -> str:
        return f"SaltKey(key_id={self.key_id!r})"


def key_bytes(name: str, value: object) -> bytes:
    """A key as callers write it, bytes or a str, as bytes.

    Raises:
        ValueError: `value` is of another type or too short; the message shows no key.
    """
    key = value.encode(errors="surrogateescape") if isinstance(value, str) else value
    if not isinstance(key, bytes) or len(key) < SHORTEST_KEY:
        found = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(value).__name__}"
        raise ValueError(f"{name} is {found}; accepted: bytes or a str of at least {SHORTEST_KEY} bytes")
    return key


def given_key(setting: bytes | str | None, environment: Mapping[str, str]) -> bytes | None:
    """The key of the configuration, else of the environment; None where neither has one."""
    if setting is not None:
        return key_bytes("salt_key", setting)
    text = environment.get(ENVIRONMENT_NAME)
    return None if text is None else key_bytes(ENVIRONMENT_NAME, text)


def drawn_key() -> bytes:
    """A new random key."""
    return secrets.token_bytes(32)


def salt_bytes(name: str, salt: object) -> bytes | None:
    """A salt from what callers pass: bytes, a str (encoded as UTF-8), or None for no salt.

    Args:
        name: the argument's name, for errors.
        salt: the argument.

    Raises:
        ValueError: `salt` is empty, of another type, or a str that UTF-8 cannot encode. An empty salt is more
            likely a tenant's missing name than a wish to share with everybody.
    """
    if salt is None:
        return None
    if not isinstance(salt, bytes | str) or not salt:
        raise ValueError(
            f"{name} is {shown(salt)}; accepted: bytes or a str that is not empty, or None to share with all "
            "requests that have no salt"
        )
    if isinstance(salt, bytes):
        return salt
    try:
        return salt.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise ValueError(f"{name} is {shown(salt)}; accepted: a str that UTF-8 can encode") from error
