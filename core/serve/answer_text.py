"""The text of an answer while its tokens come, up to a stop string, and the tokens that belong to it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..params_and_results import GeneratedToken
from ..text import TextCodec


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer, as clients see it; `text` is U+FFFD for a part of a character."""

    token: int
    text: str
    offset: int  # in the text of the answer
    log_prob: float | None
    top: Sequence[tuple[str, float]] = ()  # the likeliest tokens in its place, the likeliest first


@dataclass
class AnswerDelta:
    """What of an answer can be sent now: more text, and the tokens that its end completes."""

    text: str = ""
    tokens: Sequence[AnswerToken] = ()
    finish_reason: str | None = None  # of the last delta

    @classmethod
    def joined(cls, deltas: Sequence["AnswerDelta"]) -> "AnswerDelta":
        """The whole of an answer."""
        tokens = [token for delta in deltas for token in delta.tokens]
        return cls("".join(delta.text for delta in deltas), tokens, deltas[-1].finish_reason)


class AnswerText:
    """The text of one answer, cut before its first stop string, and the tokens that belong to it.

    A token whose text reaches into a stop string does not belong to it; `num_tokens` counts up to
    the one that completed the stop string.
    """

    def __init__(
        self, text: TextCodec | None, stops: Sequence[str], previous_token: int, keeps_tokens: bool
    ) -> None:
        self.num_tokens = 0
        self._detokenizer = text.detokenizer() if text is not None else None
        self._codec = text
        self._stops = StopStrings(stops)
        self._keeps_tokens = keeps_tokens
        self._previous_token = previous_token
        self._num_characters = 0
        self._unplaced: list[AnswerToken] = []  # tokens whose characters are not complete
        self._pending: list[tuple[int, AnswerToken]] = []  # not returned, after the end of their text

    @property
    def has_stopped(self) -> bool:
        return self._stops.is_found

    def push(self, tokens: Sequence[GeneratedToken]) -> AnswerDelta:
        """Add tokens and return what can be sent. Tokens after a stop string are dropped."""
        text_parts = []
        for generated in tokens:
            if self.has_stopped:
                break
            self.num_tokens += 1
            text = self._detokenizer.push(generated.token) if self._detokenizer is not None else ""
            if self._keeps_tokens:
                self._unplaced.append(self._answer_token(generated))
                self._previous_token = generated.token
            text_parts.append(self._add_text(text))
        return AnswerDelta("".join(text_parts), self._take_complete_tokens())

    def finish(self) -> AnswerDelta:
        """The rest of an answer that has ended."""
        if self.has_stopped:
            return AnswerDelta()
        text = self._add_text(self._detokenizer.finish() if self._detokenizer is not None else "")
        if self.has_stopped:
            return AnswerDelta(text, self._take_complete_tokens())
        text += self._stops.finish()
        tokens = [token for _, token in self._pending] + self._unplaced
        self._pending = []
        self._unplaced = []
        return AnswerDelta(text, tokens)

    def _answer_token(self, generated: GeneratedToken) -> AnswerToken:
        previous = self._codec.decode([self._previous_token]) if self._codec is not None else ""

        def text_of(token: int) -> str:
            """What it adds; tokenizers may write a token otherwise at the beginning of a text."""
            if self._codec is None:
                return ""
            pair = self._codec.decode([self._previous_token, token])
            return pair[len(previous) :] if pair.startswith(previous) else self._codec.decode([token])

        top = tuple((text_of(token), log_prob) for token, log_prob in generated.top_log_probs or ())
        text = text_of(generated.token)
        return AnswerToken(generated.token, text, self._num_characters, generated.log_prob, top)

    def _add_text(self, text: str) -> str:
        """Add characters; return those that stand before a stop string."""
        self._num_characters += len(text)
        if text or self._detokenizer is None:
            self._pending += ((self._num_characters, token) for token in self._unplaced)
            self._unplaced = []
        return self._stops.push(text)

    def _take_complete_tokens(self) -> list[AnswerToken]:
        """The pending tokens whose text was returned; they are pending no more."""
        num_returned = self._stops.num_returned
        tokens = [token for end, token in self._pending if end <= num_returned]
        self._pending = [(end, token) for end, token in self._pending if end > num_returned]
        return tokens


class StopStrings:
    """Cuts the text of one answer before the first stop string, however the text is cut into pieces.

    The first is the one that is complete at the earliest character, of several the longest. Text that may be
    the beginning of one is kept: stop "stop", pieces "a s", "to", "p b": returns "a ", "", "".
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_found = False
        self.num_returned = 0
        self._stops = list(stops)
        self._kept = ""

    def push(self, new_text: str) -> str:
        """Add text; return what is now known to stand before the first stop string."""
        if self.is_found:
            return ""
        text = self._kept + new_text
        self._kept = ""
        spans = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if spans:
            self.is_found = True
            _, start = min(spans)
            return self._count_returned(text[:start])
        num_kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - num_kept :]
        return self._count_returned(text[: len(text) - num_kept])

    def finish(self) -> str:
        """The rest of a text that has ended without a stop string; called once."""
        return self._count_returned(self._kept)

    def _count_returned(self, text: str) -> str:
        self.num_returned += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a shorter beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
