"""The tokens of one request in the context, hashed as the host hashes prompts."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor


@dataclass
class RequestTrack:
    """Prompt and generated tokens of a request, and the hashes of their whole blocks.

    The hash chain is that of megatron-core's `compute_block_hashes_batched`: digest = SHA-256(parent digest
    || token ids as 64-bit integers), key = the digest's first 8 bytes, made positive. The host keeps keys but
    no digests, so that the prompt is hashed again here, when decoding completes its first block.

    Attributes:
        prompt_keys: the host's keys of the prompt's whole blocks.
        generated: sampled tokens, in order; the KV of the last one may be missing.
        rolling_block: the block of the newest decode state that rolls, or -1.
    """

    prompt: Tensor
    prompt_keys: list[int]
    block_size_tokens: int
    generated: list[int] = field(default_factory=list)
    rolling_block: int = -1
    _keys: list[int] = field(default_factory=list)
    _digest: bytes = b"\0" * 32

    @classmethod
    def of(cls, request: Any, block_size_tokens: int) -> "RequestTrack | None":
        """The track of a host's request, or None for a request whose blocks are not hashed."""
        hashed = getattr(request, "enable_prefix_caching", bool(request.precomputed_block_hashes))
        if not hashed or getattr(request, "block_size_tokens", block_size_tokens) != block_size_tokens:
            return None
        return cls(request.prompt_tokens, list(request.precomputed_block_hashes), block_size_tokens)

    @property
    def known_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    def keys(self, blocks: int) -> list[int] | None:
        """The keys of the first `blocks` blocks; None where the host's keys of the prompt differ."""
        size = self.block_size_tokens
        self.prompt = self.prompt.cpu()  # once, because every copy from a GPU waits
        for block in range(len(self._keys), blocks):
            tokens = self._tokens(block * size, (block + 1) * size)
            self._digest = hashlib.sha256(self._digest + tokens.tobytes()).digest()
            key = int.from_bytes(self._digest[:8], "little") % (2**63 - 1) + 1
            if block < len(self.prompt_keys) and self.prompt_keys[block] != key:
                return None
            self._keys.append(key)
        return self._keys[:blocks]

    def _tokens(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        inside = max(0, min(stop, len(self.prompt)) - start)
        head = self.prompt[start : start + inside].numpy().astype("<i8")
        first = start + inside - len(self.prompt)
        tail = np.asarray(self.generated[first : stop - len(self.prompt)] if inside < stop - start else [])
        return np.concatenate([head, tail.astype("<i8")])
