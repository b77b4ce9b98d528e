"""Hashes of token blocks, chained so that one hash stands for a whole prefix."""

import hashlib
from collections.abc import Sequence

import numpy as np

from ...validation import shown


class PrefixHashChain:
    """The hashes of a growing token sequence's whole blocks.

    Block i's digest is SHA-256(digest of block i-1 || its token ids as little-endian 32-bit integers);
    the root's digest holds the salt, so equal tokens under different salts share nothing. A block's key is
    the digest's first 63 bits, made positive.

    Attributes:
        keys: one int in [1, 2**63) for each whole block.
        tokens: the bytes of each block's token ids, compared on a hit.
    """

    def __init__(self, block_size_tokens: int, salt: bytes = b"") -> None:
        self.salt = salt
        self.keys: list[int] = []
        self.tokens: list[bytes] = []
        self.block_size_tokens = block_size_tokens
        self._digests = [hashlib.sha256(b"mambaslots.root\0" + salt).digest()]

    def extend_to(self, sequence: Sequence[int], length: int | None = None) -> None:
        """Hash the whole blocks of `sequence[:length]` that are not hashed yet; O(new tokens)."""
        size = self.block_size_tokens
        stop = min(len(sequence), len(sequence) if length is None else length) // size
        whole = len(self._digests) - 1  # `append` adds the digest last: an interrupted block is hashed again
        del self.keys[whole:], self.tokens[whole:]
        if stop > whole:
            content, width = np.asarray(sequence[whole * size : stop * size], dtype="<u4").tobytes(), 4 * size
            for first in range(0, len(content), width):
                self.append(content[first : first + width])

    def append(self, content: bytes) -> None:
        """Hash one more block, given as the bytes of its token ids."""
        digest = hashlib.sha256(self._digests[-1] + content).digest()
        self.keys.append(int.from_bytes(digest[:8], "big") >> 1 or 1)
        self.tokens.append(content)
        self._digests.append(digest)

    def cut_to(self, length: int) -> None:
        """Forget all blocks but those that the first `length` tokens fill; other tokens may follow."""
        whole = length // self.block_size_tokens
        del self.keys[whole:], self.tokens[whole:], self._digests[whole + 1 :]

    def fork(self) -> "PrefixHashChain":
        """A copy, which grows on its own."""
        other = PrefixHashChain(self.block_size_tokens, self.salt)
        other.keys, other.tokens, other._digests = self.keys[:], self.tokens[:], self._digests[:]
        return other


def salt_bytes(name: str, salt: object) -> bytes:
    """A hash chain's salt from what callers pass: bytes, a str (encoded as UTF-8), or None (no salt).

    Args:
        name: the argument's name, for errors.
        salt: the argument.

    Raises:
        ValueError: `salt` is of another type, or a str that UTF-8 cannot encode.
    """
    if salt is None or isinstance(salt, bytes):
        return salt or b""
    if not isinstance(salt, str):
        raise ValueError(f"{name} is {shown(salt)}; accepted: bytes, a str or None")
    try:
        return salt.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise ValueError(f"{name} is {shown(salt)}; accepted: a str that UTF-8 can encode") from error
