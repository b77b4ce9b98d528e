"""Tokens to text while they come."""

from collections.abc import Callable, Iterable, Iterator, Sequence

_REPLACEMENT = "\ufffd"
_NUM_PARTS = 3  # most tokens of a character that is not complete: UTF-8 has up to 4 bytes for a character
_NUM_KEPT = 16  # with so many tokens the first ones are dropped, where that changes no text
_MAX_KEPT = 128  # with so many tokens a new text begins, whatever it changes


class Detokenizer:
    """The text of one answer, piece by piece. A piece never holds a part of a UTF-8 character.

    All pieces and the one of `finish` together are the text of all tokens. The time for a token does not grow
    with the answer, whatever the tokens are.

    Args:
        decode: token ids to text. The beginning of a character at the end must become U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # of the last piece, on which the next text may depend, and new ones
        self._text = ""  # the text of `_tokens`
        self._start = 0  # where in `_tokens` the new ones begin
        self._num_returned = 0  # characters of `_text` that were returned

    def push(self, *token_ids: int) -> str:
        """Add tokens; return the text that they complete, perhaps empty."""
        return "".join([self._push(token) for token in token_ids])

    def finish(self) -> str:
        """The rest of the text; an incomplete character is U+FFFD. The next `push` begins a new text."""
        piece = self._take_piece(self._text)
        self._tokens = []
        self._text = ""
        self._start = 0
        self._num_returned = 0
        return piece

    def pieces(self, token_ids: Iterable[int]) -> Iterator[str]:
        """The pieces of the text of `token_ids` as these come, none of them empty."""
        for token in token_ids:
            if piece := self.push(token):
                yield piece
        if piece := self.finish():
            yield piece

    def _push(self, token: int) -> str:
        text = self._decode([*self._tokens, token])
        if text == self._text and self._is_silent(token):
            return ""
        self._tokens.append(token)
        self._text = text
        if not text.endswith(_REPLACEMENT):
            piece = self._take_piece(text)
            if piece:
                self._keep_from(self._start)
                self._start = len(self._tokens)
                self._num_returned = len(self._text)
            return piece
        num_settled = len(text.rstrip(_REPLACEMENT))  # the rest of a character may come
        if len(self._tokens) - self._start > _NUM_PARTS:
            num_settled = max(num_settled, len(text) - _NUM_PARTS)
        piece = self._take_piece(text[:num_settled])
        if len(self._tokens) % _NUM_KEPT == 0:
            piece += self._shortened()
        return piece

    def _is_silent(self, token: int) -> bool:
        """Whether `token`, which adds nothing to the text, changes nothing of what follows."""
        # A text's first token may be a space that is left out there: one without text is kept once there.
        return not self._decode([token]) and bool(self._text or token in self._tokens)

    def _shortened(self) -> str:
        """Remove tokens whose text was returned; return text where a new text begins."""
        unreturned = self._text[self._num_returned :]
        for start in range(len(self._tokens) - _NUM_PARTS - 1, 0, -1):
            text = self._decode(self._tokens[start:])
            if text.endswith(unreturned) and self._is_beginning(start, text):
                self._keep_from(start)
                self._start = 0
                self._num_returned = len(text) - len(unreturned)
                return ""
        return self.finish() if len(self._tokens) >= _MAX_KEPT else ""

    def _is_beginning(self, start: int, text: str) -> bool:
        """Whether the tokens from `start` on, whose text is `text`, have the same end whatever follows them.

        Where `start` is within a character, that is so. Where it begins one, `text` must show it: tokenizers
        with a token for each byte write no character of a run of bytes that holds a wrong byte.
        """
        for stop in range(start + 1, start + _NUM_PARTS + 2):
            first_character = self._decode(self._tokens[start:stop])
            if not first_character.startswith(_REPLACEMENT):
                return text.startswith(first_character)
        return True

    def _keep_from(self, start: int) -> None:
        if start:
            del self._tokens[:start]
            self._text = self._decode(self._tokens)

    def _take_piece(self, text: str) -> str:
        """The characters of `text` that were not returned; they count as returned."""
        piece = text[self._num_returned :]
        self._num_returned = max(self._num_returned, len(text))
        return piece
