"""A trace: requests with their tokens, in the order in which they came."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer[Any]]
"""[n] int32 token ids. Where a trace has hashes only, ids that are equal where the hashes are."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request, `arrival_s` after the trace began; prompt and answer have one or more tokens each."""

    arrival_s: float
    session: int  # a request arrives after the answers of its session have ended
    prompt: Tokens
    answer: Tokens


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival, and what tables call them."""

    name: str
    requests: Sequence[TraceRequest] = field(repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer together; 0 for no request."""
        return max(self._lengths, default=0)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and answers."""
        return sum(self._lengths)

    @property
    def _lengths(self) -> Iterator[int]:
        return (len(request.prompt) + len(request.answer) for request in self.requests)
