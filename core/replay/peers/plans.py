"""Which states a replayed cache takes."""

from dataclasses import dataclass
from typing import Protocol

from .loop import RunningRequest


class StatePlan(Protocol):
    """Decides which states are stored."""

    @property
    def decode(self) -> bool:
        """The last boundary that an answer passed is stored when the request ends."""

    @property
    def every(self) -> bool:
        """All boundaries of an answer are stored."""

    def of_prefill(self, request: RunningRequest, start: int, end: int, block: int) -> list[int]:
        """Blocks up to each boundary that a step from token `start` to `end` stores, shallow first."""


@dataclass(frozen=True)
class TakenStates:
    """The boundaries whose states are stored.

    Attributes:
        tail: the last boundary of a prompt.
        branch: the boundary to which KV was cached when the request came, where the state was not.
        chunk_ends: where a prefill step ends on a boundary.
        decode: the last boundary that the answer passed, stored when the request ends.
        every: all boundaries, of prompt and answer.
    """

    tail: bool = False
    branch: bool = False
    chunk_ends: bool = False
    decode: bool = False
    every: bool = False

    def of_prefill(self, request: RunningRequest, start: int, end: int, block: int) -> list[int]:
        """See `StatePlan.of_prefill`."""
        first, last = start // block + 1, end // block
        if self.every:
            return list(range(first, last + 1))
        wanted = set()
        if self.tail:
            wanted.add(request.target // block)
        if self.branch:
            wanted.add(request.matched)
        if self.chunk_ends and end % block == 0:
            wanted.add(last)
        return sorted(depth for depth in wanted if first <= depth <= last)
