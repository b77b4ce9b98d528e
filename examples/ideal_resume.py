"""How many prompt tokens a perfect cache could have resumed: an oracle that knows nothing of ours."""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray


class IdealResume:
    """Remembers every sequence that was computed, and compares each prompt with all of them.

    Feed it between steps: call `computed` with what each request has computed before `engine.step()`, and
    `ideal` for the requests that this step admitted, so that only *earlier* steps count. Salts are those of
    `add_request`; requests with different ones share nothing.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size = block_size_tokens
        self._sequences: dict[bytes, dict[Hashable, NDArray[np.int64]]] = {}

    def computed(self, request_key: Hashable, tokens: Sequence[int], salt: bytes | str | None = None) -> None:
        """Note that the request has computed these tokens, prompt and answer, from the first one on.

        A request's longest sequence stays: one that is evicted and starts again had computed it all the same.
        """
        sequences = self._sequences.setdefault(_bytes(salt), {})
        if request_key not in sequences or len(tokens) > len(sequences[request_key]):
            sequences[request_key] = np.asarray(tokens, dtype=np.int64)

    def ideal(self, prompt: Sequence[int], salt: bytes | str | None = None) -> int:
        """The deepest block boundary <= N-1 of the longest prefix shared with anything computed so far."""
        tokens = np.asarray(prompt, dtype=np.int64)
        sequences = self._sequences.get(_bytes(salt), {}).values()
        longest = max((_common_prefix(tokens, sequence) for sequence in sequences), default=0)
        resumable = max(0, min(longest, len(tokens) - 1))  # the last token's logits must be computed
        return resumable - resumable % self._block_size


def _common_prefix(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _bytes(salt: bytes | str | None) -> bytes:
    return salt.encode() if isinstance(salt, str) else salt or b""


if __name__ == "__main__":
    print(__doc__)
