"""Guesses at what a request's next tokens are, for the model to verify."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from ...validation import INT32_MAX, integer


class Drafter(Protocol):
    """Guesses a request's next tokens: an n-gram table, a small model. Wrong guesses cost only time."""

    def draft(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Guess what follows; called once a step for each decoding request.

        Args:
            tokens: a prompt and its answer so far. This is the request's own list: do not change it, and do
                not keep a reference to it.
            max_drafts: maximum number of drafts, >= 1; the engine ignores further ones.

        Returns:
            Token ids that may follow, in order; may be empty.
        """


class NgramDrafter:
    """Prompt lookup: drafts what followed an earlier occurrence of the sequence's last tokens.

    The drafter looks for the longest suffix of `shortest` to `longest` tokens that also occurs earlier, and
    takes the most recent earlier occurrence. An occurrence that overlaps the suffix shows a period, which the
    drafts repeat.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.shortest = integer("shortest", shortest, 1, INT32_MAX)
        self.longest = integer("longest", longest, self.shortest, INT32_MAX)

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """See `Drafter`; O(tokens) a call."""
        ids = array("i", tokens)
        sequence = ids.tobytes()
        for length in range(min(self.longest, len(ids) - 1), self.shortest - 1, -1):
            start = _last_occurrence(sequence, length * ids.itemsize, ids.itemsize)
            if start >= 0:
                follows = start + length
                period = len(ids) - follows
                return [ids[follows + i % period] for i in range(max_drafts)]
        return []


def _last_occurrence(sequence: bytes, suffix_bytes: int, token_bytes: int) -> int:
    """The token position where the suffix last occurs before the end of the sequence, or -1."""
    suffix = sequence[-suffix_bytes:]
    end = len(sequence) - token_bytes
    while (at := sequence.rfind(suffix, 0, end)) >= 0:
        if at % token_bytes == 0:
            return at // token_bytes
        end = at + suffix_bytes - 1
    return -1
