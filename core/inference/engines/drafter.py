"""Guesses at what a request's next tokens are, for the model to verify."""

from array import array
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from ...validation import INT32_MAX, integer
from ..contexts.request import TokenView
from .ngram_index import NgramIndex


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
            window: how many of a request's last tokens are searched. The index of a request takes 8 bytes for
                each of them and each length of suffix that is looked up: by default at most 1.5 MiB.
        """
        self.shortest = integer("shortest", shortest, 1, INT32_MAX)
        self.longest = integer("longest", longest, self.shortest, INT32_MAX)
        self.window = integer("window", window, 1, INT32_MAX)
        self._indexes: WeakKeyDictionary[TokenView, NgramIndex] = WeakKeyDictionary()

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """See `Drafter`.

        The index of a view goes with the view. A call reads the tokens that are new since the last call, and
        costs the same however many tokens came before. The first call for a view indexes the window, at some
        2 ms for 40,000 tokens; so does the first lookup of each longer suffix. For a sequence that is not a
        view, every call is a first call.
        """
        if isinstance(tokens, TokenView):
            view, index = tokens, self._indexes.get(tokens)
        else:
            view, index = TokenView(list(array("I", tokens[-self.window :]))), None
        if index is None:
            index = self._indexes[view] = NgramIndex(self.shortest, self.longest, self.window)
        follows = index.end_of_occurrence(view)
        if follows < 0:
            return []
        continuation = view[follows : follows + max_drafts]
        num_repeats = -(-max_drafts // len(continuation))
        return (continuation * num_repeats)[:max_drafts]
