"""Hashes of token blocks, chained so that one hash stands for a whole prefix."""

import hashlib
from collections.abc import Sequence

import numpy as np

PUBLIC_ROOT = hashlib.sha256(b"mambaslots.root\0").digest()
"""The root of chains without a salt, the same in every process."""


class PrefixHashChain:
    """The hashes of a growing token sequence's whole blocks.

    Block i's digest is SHA-256(digest of block i-1 || its token ids as little-endian 32-bit integers). Block
    0 follows the root digest. Chains under different salts have different roots, and share nothing; see
    `SaltKey.root`. A block's key is the digest's first 63 bits, made positive.

    Attributes:
        root: the root digest.
        keys: one int in [1, 2**63) for each whole block.
        tokens: the bytes of each block's token ids, compared on a hit.
    """

    def __init__(self, block_size_tokens: int, root: bytes = PUBLIC_ROOT) -> None:
        self.root = root
        self.keys: list[int] = []
        self.tokens: list[bytes] = []
        self.block_size_tokens = block_size_tokens
        self._digests = [root]

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
        other = PrefixHashChain(self.block_size_tokens, self.root)
        other.keys, other.tokens, other._digests = self.keys[:], self.tokens[:], self._digests[:]
        return other
