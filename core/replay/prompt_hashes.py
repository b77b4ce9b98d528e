"""The hash chains of a trace's requests, computed once for all rows."""

from collections.abc import Sequence

import numpy as np

from ..inference.contexts.cache.prefix_hash import PrefixHashChain
from .trace import Tokens, Trace

_MAX_KEPT = 4
_kept: list[tuple[Trace, int, list[PrefixHashChain]]] = []


def chains_of(trace: Trace, block_size_tokens: int) -> Sequence[PrefixHashChain]:
    """The chains of all requests, each over prompt and answer, for readers only.

    The chains of the last few traces and block sizes are kept. Equal blocks share their bytes.
    """
    for known, size, chains in _kept:
        if known is trace and size == block_size_tokens:
            return chains
    contents: dict[int, bytes] = {}
    made = [_chain(request.prompt, request.answer, block_size_tokens, contents) for request in trace.requests]
    _kept.append((trace, block_size_tokens, made))
    del _kept[:-_MAX_KEPT]
    return made


def _chain(prompt: Tokens, answer: Tokens, size: int, contents: dict[int, bytes]) -> PrefixHashChain:
    chain = PrefixHashChain(size)
    content, width = np.concatenate([prompt, answer]).astype("<u4").tobytes(), 4 * size
    for first in range(0, len(content) - width + 1, width):
        chain.append(content[first : first + width])
    chain.tokens = [
        contents.setdefault(key, content) for key, content in zip(chain.keys, chain.tokens, strict=True)
    ]
    return chain
