"""Tokens to text while the tokens come."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one answer, piece by piece. A piece never holds a part of a UTF-8 character.

    All pieces and the one of `finish` together are the text of all tokens.

    Args:
        decode: token ids to text. The beginning of a character at the end must become U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        """Tokens of the last piece, on which the text of the next ones may depend, and new ones."""
        self._start = 0
        """Where in `_tokens` the new ones begin."""
        self._num_returned = 0
        """Characters of the text of `_tokens` that were returned."""

    def push(self, *token_ids: int) -> str:
        """Add tokens; return the text that they complete, perhaps empty."""
        self._tokens += token_ids
        text = self._decode(self._tokens)
        if text.endswith(_REPLACEMENT):  # the rest of a character may come
            return self._new(text.rstrip(_REPLACEMENT))
        piece = self._new(text)
        if piece:
            del self._tokens[: self._start]
            self._start, self._num_returned = len(self._tokens), len(self._decode(self._tokens))
        return piece

    def finish(self) -> str:
        """The rest of the text; an incomplete character is U+FFFD. The next `push` begins a new text."""
        piece = self._new(self._decode(self._tokens))
        self._tokens, self._start, self._num_returned = [], 0, 0
        return piece

    def _new(self, text: str) -> str:
        piece = text[self._num_returned :]
        self._num_returned = max(self._num_returned, len(text))
        return piece
