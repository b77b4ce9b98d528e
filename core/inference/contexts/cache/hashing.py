"""Chained hashes of token blocks, and the salts that keep the chains of tenants apart."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

import numpy as np

from ....validation import refused

PUBLIC_ROOT = hashlib.sha256(b"mambaslots.root\0").digest()
"""The root of chains without a salt, the same in every process."""
ENVIRONMENT_NAME = "MAMBASLOTS_SALT_KEY"
"""The environment variable that is read where the configuration names no key."""
SHORTEST_KEY = 16


def token_bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    """The bytes of token ids, as a chain hashes and the tree compares them."""
    return np.asarray(tokens, dtype="<u4").tobytes()


class PrefixHashChain:
    """The hashes of a growing token sequence's whole blocks.

    Block i's digest is SHA-256(digest of block i-1 || its token ids as little-endian 32-bit integers). Block
    0 follows the root digest. Chains under different salts have different roots, and share nothing; see
    `SaltKey.root`. A block's hash is the digest's first 63 bits, made positive.

    Attributes:
        root: the root digest.
        hashes: one int in [1, 2**63) for each whole block.
        tokens: the bytes of each block's token ids, compared on a hit.
    """

    def __init__(self, block_size_tokens: int, root: bytes = PUBLIC_ROOT) -> None:
        self.root = root
        self.hashes: list[int] = []
        self.tokens: list[bytes] = []
        self.block_size_tokens = block_size_tokens
        self._digests = [root]

    def extend_to(self, sequence: Sequence[int] | np.ndarray, length: int | None = None) -> None:
        """Hash the whole blocks of `sequence[:length]` that are not hashed yet; O(new tokens)."""
        size = self.block_size_tokens
        stop = min(len(sequence), len(sequence) if length is None else length) // size
        whole = len(self._digests) - 1  # `append` adds the digest last: an interrupted block is hashed again
        del self.hashes[whole:], self.tokens[whole:]
        if stop > whole:
            content, width = token_bytes(sequence[whole * size : stop * size]), 4 * size
            for first in range(0, len(content), width):
                self.append(content[first : first + width])

    def append(self, content: bytes) -> None:
        """Hash one more block, given as the bytes of its token ids."""
        digest = hashlib.sha256(self._digests[-1] + content).digest()
        self.hashes.append(int.from_bytes(digest[:8], "big") >> 1 or 1)
        self.tokens.append(content)
        self._digests.append(digest)

    def cut_to(self, length: int) -> None:
        """Remove all blocks but those that the first `length` tokens fill; other tokens may follow."""
        whole = length // self.block_size_tokens
        del self.hashes[whole:], self.tokens[whole:], self._digests[whole + 1 :]

    def fork(self) -> "PrefixHashChain":
        """A copy, which grows on its own."""
        copy = PrefixHashChain(self.block_size_tokens, self.root)
        copy.hashes, copy.tokens, copy._digests = self.hashes[:], self.tokens[:], self._digests[:]
        return copy


class SaltKey:
    """Turns a tenant's salt into the root of the tenant's hash chains.

    Roots, which exports contain, reveal no salt without the key. Equal keys make equal roots, so replicas
    that exchange salted prefixes need one key.

    Attributes:
        key_id: 16 hexadecimal digits that differ between keys and reveal nothing of the key.
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
    """A key, given as bytes or a str, as bytes; the ValueError for a wrong one shows no key."""
    key = value.encode(errors="surrogateescape") if isinstance(value, str) else value
    if not isinstance(key, bytes) or len(key) < SHORTEST_KEY:
        text = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(value).__name__}"
        raise ValueError(f"{name} is {text}; accepted: bytes or a str of at least {SHORTEST_KEY} bytes")
    return key


def given_key(setting: bytes | str | None, environment: Mapping[str, str]) -> bytes | None:
    """The key of the configuration, else of the environment; None where neither has one."""
    if setting is not None:
        return key_bytes("salt_key", setting)
    text = environment.get(ENVIRONMENT_NAME)
    return None if text is None else key_bytes(ENVIRONMENT_NAME, text)


def salt_bytes(name: str, salt: object) -> bytes | None:
    """A salt as bytes; ValueError for an empty one, which is a missing name rather than no salt."""
    if salt is None:
        return None
    if not isinstance(salt, bytes | str) or not salt:
        accepted = "bytes or a str that is not empty, or None to share with all requests that have no salt"
        raise refused(name, salt, accepted)
    if isinstance(salt, bytes):
        return salt
    try:
        return salt.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise refused(name, salt, "a str that UTF-8 can encode") from error
