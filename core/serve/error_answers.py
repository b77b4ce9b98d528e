"""Answers as JSON, and the errors that clients see: a status, a sentence, its field, a word for programs."""

import json
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from starlette.responses import Response

from ..errors import EngineDeadError, KVBlockCapacityError, NoReplicaError, QueueFullError

_MAX_LENGTH = 400  # characters of a message. Messages may quote values of the client, of any length
_SHORT = reprlib.Repr(maxstring=60, maxlist=3, maxdict=3, maxlevel=2, maxlong=30, maxother=60)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


class RequestError(Exception):
    """A request that is answered with an HTTP status, a sentence, its field and a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_LENGTH else message[: _MAX_LENGTH - 3] + "..."
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> "JSONAnswer":
        return JSONAnswer(self.body, self.status, self.headers)


class JSONAnswer(Response):
    """A JSON object."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(value: Any) -> bytes:
    """`value` as JSON in UTF-8. Half surrogate pairs become JSON's escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def bad_argument(error: ValueError, fields: Collection[str]) -> RequestError:
    """Of a message of the engine, which may begin with one of `fields`, the names that the body has."""
    message = str(error)
    name = message.partition(" ")[0]
    return RequestError(400, message, param=name if name in fields else None)


def bad_field(param: str, message: str, code: str | None = None) -> RequestError:
    return RequestError(400, message, param=param, code=code)


_REFUSALS: dict[str, tuple[type[Exception] | tuple[()], int, str]] = {
    "queue_full": (QueueFullError, 429, "too many requests wait; try again later"),
    "engine_dead": (EngineDeadError, 503, "the engine has stopped; the server must be started again"),
    "no_replica": (NoReplicaError, 503, "no replica of the model can answer now; try again later"),
    "capacity": (KVBlockCapacityError, 503, "pinned prefixes leave too little memory for this request"),
    "cancelled": ((), 503, "the server ended the request before its answer was complete"),
    "draining": (RuntimeError, 503, "the server is shutting down and accepts no more requests"),
}
"""Code -> the engine's error, status and message. Of errors, the first row that fits counts."""


def refusal(reason: str | Exception) -> RequestError:
    """The error of a request that may be sent again: of a code, or of what the engine raised."""
    code = next(code for code, (kind, *_) in _REFUSALS.items() if reason == code or isinstance(reason, kind))
    _, status, message = _REFUSALS[code]
    return RequestError(status, message, code=code, headers={"retry-after": "1"})


def shortened(value: Any) -> str:
    """A JSON value as a few characters of JSON, for messages."""
    return json.dumps(value) if value is None or isinstance(value, bool) else _SHORT.repr(value)
