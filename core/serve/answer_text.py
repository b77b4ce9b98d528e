"""The text of one answer while its tokens come."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..inference.contexts.request import GeneratedToken
from ..text import TextCodec
from .stop_strings import StopStrings


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer, as clients see it.

    Attributes:
        token: its id.
        text: what it adds to the text behind the token before it; U+FFFD for a part of a character.
        offset: where in the answer's text it begins.
        log_prob: None unless asked for.
        top: the likeliest tokens in its place, with log-probs, the likeliest first.
    """

    token: int
    text: str
    offset: int
    log_prob: float | None
    top: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class Piece:
    """What of an answer can be sent: text, and the tokens that lie in all text sent so far."""

    text: str
    tokens: Sequence[AnswerToken]


class TokenTexts:
    """What single tokens add to a text. Tokenizers may write a token otherwise at the beginning of a text."""

    def __init__(self, text: TextCodec | None) -> None:
        self._text = text
        self._last: tuple[int, str] | None = None
        """The last token that others were written behind, and its text."""

    def after(self, previous: int, token: int) -> str:
        """The text of `token` behind `previous`; "" for special tokens."""
        if self._text is None:
            return ""
        if self._last is None or self._last[0] != previous:
            self._last = previous, self._text.decode([previous])
        before = self._last[1]
        both = self._text.decode([previous, token])
        return both[len(before) :] if both.startswith(before) else self._text.decode([token])


class AnswerText:
    """The text of one answer, cut before its first stop string, and the tokens that belong to it.

    A token whose text reaches into a stop string does not belong to the answer.

    Args:
        text: makes text of tokens; None for a model without a tokenizer, whose answers are token ids.
        stops: strings that end the answer.
        previous: the last token of the prompt.
        keeps_tokens: whether pieces hold tokens, too.

    Attributes:
        num_tokens: tokens that were generated, up to the one that completed a stop string.
    """

    def __init__(
        self, text: TextCodec | None, stops: Sequence[str], previous: int, keeps_tokens: bool
    ) -> None:
        self.num_tokens = 0
        self._detokenizer = text.detokenizer() if text is not None else None
        self._texts = TokenTexts(text)
        self._stops = StopStrings(stops)
        self._keeps_tokens = keeps_tokens
        self._previous = previous
        self._num_characters = 0
        self._unplaced: list[AnswerToken] = []
        """Tokens whose characters are not complete."""
        self._pending: list[tuple[int, AnswerToken]] = []
        """Tokens that were not returned, and where the text that they complete ends."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.found

    def push(self, tokens: Sequence[GeneratedToken]) -> Piece:
        """Add tokens; return what can be sent. What comes behind a stop string is dropped."""
        sent = []
        for generated in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            piece = self._detokenizer.push(generated.token) if self._detokenizer is not None else ""
            self._note(generated)
            sent.append(self._placed(piece))
        return Piece("".join(sent), self._returned())

    def finish(self) -> Piece:
        """What is left of an answer that has ended."""
        if self.stopped:
            return Piece("", ())
        rest = self._placed(self._detokenizer.finish() if self._detokenizer is not None else "")
        if self.stopped:
            return Piece(rest, self._returned())
        text = rest + self._stops.finish()
        tokens = [token for _, token in self._pending] + self._unplaced
        self._pending, self._unplaced = [], []
        return Piece(text, tokens)

    def _note(self, generated: GeneratedToken) -> None:
        if not self._keeps_tokens:
            return
        likely = generated.top_log_probs or ()
        top = tuple((self._texts.after(self._previous, token), log_prob) for token, log_prob in likely)
        text = self._texts.after(self._previous, generated.token)
        token = AnswerToken(generated.token, text, self._num_characters, generated.log_prob, top)
        self._unplaced.append(token)
        self._previous = generated.token

    def _placed(self, piece: str) -> str:
        """Add characters. Returns those that stand before a stop string."""
        self._num_characters += len(piece)
        if piece or self._detokenizer is None:
            self._pending += ((self._num_characters, token) for token in self._unplaced)
            self._unplaced = []
        return self._stops.push(piece)

    def _returned(self) -> list[AnswerToken]:
        """The tokens whose text was returned."""
        end = self._stops.num_returned
        tokens = [token for place, token in self._pending if place <= end]
        self._pending = [(place, token) for place, token in self._pending if place > end]
        return tokens
