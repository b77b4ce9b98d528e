"""Answers as OpenAI's JSON: whole, and in the pieces of a stream."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .answer_text import AnswerToken, Piece
from .preparation import Job

_LOWEST_LOG_PROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True)
class Usage:
    """The tokens of a request: those of its prompts, those of them that were cached, those of its answers."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_answer_tokens: int

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_answer_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_answer_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass
class WholeAnswer:
    """One answer, put together from its pieces."""

    texts: list[str] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.tokens += piece.tokens

    @property
    def piece(self) -> Piece:
        return Piece("".join(self.texts), self.tokens)


class Form(Protocol):
    """How one endpoint writes answers."""

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> dict[str, Any]:
        """The answer to a request without `stream`."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream sends before the first piece of answer `index`."""

    def chunk(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        """A piece of answer `index` in a stream; with its last piece the reason why it ends."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last piece of a stream whose client asked for the counts."""


class _Heading:
    """What every answer and chunk of one request begins with."""

    def __init__(self, prefix: str, model_name: str, job: Job) -> None:
        self.options = job.options
        self._fields = {
            "id": prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model_name,
        }

    def of(self, kind: str, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        heading = {**self._fields, "object": kind, "choices": choices}
        if usage is not None:
            return {**heading, "usage": usage.json()}
        return {**heading, "usage": None} if self.options.includes_usage else heading

    def token_ids(self, piece: Piece) -> dict[str, Any]:
        ids = [token.token for token in piece.tokens]
        return {"token_ids": ids} if self.options.returns_token_ids else {}


class CompletionForm:
    """Answers of /v1/completions."""

    def __init__(self, model_name: str, job: Job) -> None:
        self._heading = _Heading("cmpl-", model_name, job)

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(i, each.piece, each.finish_reason) for i, each in enumerate(answers)]
        return self._heading.of("text_completion", choices, usage)

    def opening(self, index: int) -> None:
        return None

    def chunk(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        return self._heading.of("text_completion", [self._choice(index, piece, finish_reason)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._heading.of("text_completion", [], usage)

    def _choice(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._log_probs(piece.tokens),
            "finish_reason": finish_reason,
            **self._heading.token_ids(piece),
        }

    def _log_probs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        num_top = self._heading.options.num_top_log_probs
        if num_top is None:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_log_prob(token.log_prob) for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens] if num_top else None,
            "text_offset": [token.offset for token in tokens],
        }


class ChatForm:
    """Answers of /v1/chat/completions."""

    def __init__(self, model_name: str, job: Job) -> None:
        self._heading = _Heading("chatcmpl-", model_name, job)

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> dict[str, Any]:
        choices = []
        for i, each in enumerate(answers):
            message = {"role": "assistant", "content": each.piece.text}
            choices.append(self._choice(i, "message", message, each.piece, each.finish_reason))
        return self._heading.of("chat.completion", choices, usage)

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._heading.of("chat.completion.chunk", [{**_NO_DELTA, "index": index, "delta": delta}])

    def chunk(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        choice = self._choice(index, "delta", delta, piece, finish_reason)
        return self._heading.of("chat.completion.chunk", [choice])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._heading.of("chat.completion.chunk", [], usage)

    def _choice(
        self, index: int, name: str, message: dict[str, Any], piece: Piece, finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            name: message,
            "logprobs": self._log_probs(piece.tokens),
            "finish_reason": finish_reason,
            **self._heading.token_ids(piece),
        }

    def _log_probs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if self._heading.options.num_top_log_probs is None:
            return None
        content = []
        for token in tokens:
            top = [_token_json(text, log_prob) for text, log_prob in token.top]
            content.append({**_token_json(token.text, token.log_prob), "top_logprobs": top})
        return {"content": content, "refusal": None}


_NO_DELTA = {"logprobs": None, "finish_reason": None}


def _token_json(text: str, log_prob: float | None) -> dict[str, Any]:
    """A token with its bytes, which are unknown for a part of a character."""
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _log_prob(log_prob), "bytes": known}


def _by_text(token: AnswerToken) -> dict[str, float]:
    """The likeliest tokens by text; of tokens with the same text the likeliest."""
    return {text: _log_prob(log_prob) for text, log_prob in reversed(token.top)}


def _log_prob(value: float | None) -> float:
    return _LOWEST_LOG_PROB if value is None else max(value, _LOWEST_LOG_PROB)
