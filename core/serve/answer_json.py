"""Answers as OpenAI's JSON: whole, and in the chunks of a stream."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from .answer_text import AnswerDelta, AnswerToken
from .requests import AnswerRequest

_LOWEST_LOG_PROB = -9999.0  # JSON has no minus infinity


class AnswerFormat:
    """How answers of /v1/completions are written: `whole`, or in the chunks of a stream."""

    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def __init__(self, model_name: str, request: AnswerRequest) -> None:
        self.request = request
        self._heading = {"id": self.prefix + secrets.token_hex(12), "created": int(time.time())}
        self._heading["model"] = model_name

    def whole(self, answers: Sequence[AnswerDelta], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request without `stream`, from all its answers."""
        choices = [self._choice(i, self._text(answer.text), answer) for i, answer in enumerate(answers)]
        return {**self._heading, "object": self.kind, "choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The event of a stream before the first delta of answer `index`."""
        return None

    def chunk(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        """A delta of answer `index` in a stream."""
        return self._event([self._choice(index, self._delta(delta.text), delta)])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last event of a stream whose client asked for the counts."""
        return {**self._event([]), "usage": usage}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._heading, "object": self.chunk_kind, "choices": choices}
        return {**event, "usage": None} if self.request.stream_options.include_usage else event

    def _choice(self, index: int, text: dict[str, Any], delta: AnswerDelta) -> dict[str, Any]:
        log_probs = None if self.request.num_top_log_probs is None else self._log_probs(delta.tokens)
        choice = {"index": index, **text, "logprobs": log_probs, "finish_reason": delta.finish_reason}
        if self.request.return_token_ids:
            choice["token_ids"] = [token.token for token in delta.tokens]
        return choice

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta = _text

    def _log_probs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_log_prob(token.log_prob) for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens] if self.request.num_top_log_probs else None,
            "text_offset": [token.offset for token in tokens],
        }


class ChatAnswerFormat(AnswerFormat):
    """How answers of /v1/chat/completions are written."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _log_probs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        content = []
        for token in tokens:
            top = [_token_json(text, log_prob) for text, log_prob in token.top]
            content.append({**_token_json(token.text, token.log_prob), "top_logprobs": top})
        return {"content": content, "refusal": None}


def _token_json(text: str, log_prob: float | None) -> dict[str, Any]:
    """A token with its bytes, which are unknown for a part of a character."""
    utf8 = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _log_prob(log_prob), "bytes": utf8}


def _by_text(token: AnswerToken) -> dict[str, float]:
    """The likeliest tokens by text; of tokens with the same text the likeliest."""
    return {text: _log_prob(log_prob) for text, log_prob in reversed(token.top)}


def _log_prob(value: float | None) -> float:
    return _LOWEST_LOG_PROB if value is None else max(value, _LOWEST_LOG_PROB)
