"""Guesses at a request's next tokens, and which of them the model's tokens confirm."""

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ...validation import INT32_MAX, integer
from ..contexts.dynamic_request import TokenView


class Drafter(Protocol):
    """Guesses a request's next tokens: an n-gram table, a small model. Wrong guesses cost only time."""

    def draft(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Guess what follows; called once a step for each decoding request.

        Args:
            tokens: a prompt and its answer so far. The engine passes a view of the request's tokens, which
                cannot be changed. Slices of the view are lists. The request passes the same view at every
                call, and earlier tokens of a view never change: a drafter may keep what it knows of a request
                in a `weakref.WeakKeyDictionary` by its view, and read only the new tokens.
            max_drafts: maximum number of drafts, >= 1; the engine ignores further ones.

        Returns:
            Token ids that may follow, in order; may be empty.
        """


class NgramDrafter:
    """Prompt lookup: drafts what followed an earlier occurrence of the sequence's last tokens.

    The drafter looks for the longest suffix of `shortest` to `longest` tokens that also occurs earlier among
    the last `window` tokens, and takes the most recent earlier occurrence. An occurrence that overlaps the
    suffix shows a period, which the drafts repeat.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, window: int = 65_536) -> None:
        """
        Args:
            longest, shortest: bounds of the suffix's length.
            window: how many of a request's last tokens are searched. A request takes at most 8 bytes for each
                of them: by default at most 512 KiB.
        """
        self.shortest = integer("shortest", shortest, 1, INT32_MAX)
        self.longest = integer("longest", longest, self.shortest, INT32_MAX)
        self.window = integer("window", window, 1, INT32_MAX)
        self._indexes: WeakKeyDictionary[TokenView, _LastTokens] = WeakKeyDictionary()

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """See `Drafter`.

        What is kept of a view goes with the view. A call reads the tokens that are new since the last call,
        and compares the last token with each of the window: 40 us for 65,536 tokens. For a sequence that is
        not a view, every call is a first call, which copies the window.
        """
        # An interrupted call keeps nothing.
        last_tokens = self._indexes.pop(tokens, None) if isinstance(tokens, TokenView) else None
        if last_tokens is None:
            last_tokens = _LastTokens(max(0, len(tokens) - self.window), array("i"))
        last_tokens.ids.extend(tokens[last_tokens.first + len(last_tokens.ids) :])
        if len(last_tokens.ids) >= 2 * self.window:
            num_old = len(last_tokens.ids) - self.window
            last_tokens = _LastTokens(last_tokens.first + num_old, last_tokens.ids[num_old:])
        if isinstance(tokens, TokenView):
            self._indexes[tokens] = last_tokens
        ids = np.frombuffer(last_tokens.ids, np.int32)[-self.window :]
        start = self._end_of_occurrence(ids)
        if start < 0:
            return []
        drafts: list[int] = np.resize(ids[start : start + max_drafts], max_drafts).tolist()
        return drafts

    def _end_of_occurrence(self, ids: npt.NDArray[np.int32]) -> int:
        """The end of the most recent earlier occurrence of the longest suffix that has one, or -1."""
        end, starts = -1, np.ones(len(ids), np.bool_)  # where an occurrence of the suffix may start
        for length in range(1, min(self.longest, len(ids) - 1) + 1):
            starts = starts[1:] & (ids[:-length] == ids[-length])
            if length >= self.shortest:
                back = int(starts[::-1].argmax())
                if not starts[-1 - back]:
                    break
                end = len(starts) - 1 - back + length
        return end


class _LastTokens(NamedTuple):
    """The last tokens of a view, those of the window among them; `first`: the position of the first one."""

    first: int
    ids: array[int]


def accepted_tokens(drafts: Sequence[int], drawn: Sequence[int], stops: Collection[int | None]) -> list[int]:
    """New tokens: `drawn` up to the first token that differs from its draft or ends the answer."""
    tokens: list[int] = []
    for i, token in enumerate(drawn):
        tokens.append(token)
        if token in stops or i == len(drafts) or token != drafts[i]:
            break
    return tokens
