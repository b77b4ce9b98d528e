"""JSON over HTTP: errors in OpenAI's shape, and bodies within limits."""

import asyncio
import json
import reprlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

_LONGEST_MESSAGE = 400
"""Characters of a message. Messages may quote values of the client, of any length."""
_MAX_DEPTH = 64  # objects and lists within one another; templates and tools need a fraction of it
_MAX_READ_BYTES = 64 * 2**20
"""Of a body that is too long so much is read before it is refused."""
_LONGEST_PAUSE_S = 0.5
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_SHORT = reprlib.Repr(maxstring=60, maxlist=3, maxdict=3, maxlevel=2, maxlong=30, maxother=60)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


class RequestError(Exception):
    """A request that is answered with an error: an HTTP status and one sentence for the client.

    `param` is the field that the sentence is about, `code` a word for programs.
    """

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
        self.message = (
            message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 3] + "..."
        )
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


def bad_field(param: str, message: str, code: str | None = None) -> RequestError:
    return RequestError(400, message, param=param, code=code)


_REFUSALS = {
    "queue_full": (429, "too many requests wait; try again later"),
    "draining": (503, "the server is shutting down and accepts no more requests"),
    "engine_dead": (503, "the engine has stopped; the server must be started again"),
    "no_replica": (503, "no replica of the model can answer now; try again later"),
    "capacity": (503, "pinned prefixes leave too little memory for this request"),
    "cancelled": (503, "the server ended the request before its answer was complete"),
}
"""Status and message of each code with which a server refuses right requests."""


def refusal(code: str) -> RequestError:
    """The error of a request that may be sent again; `code` is a key of `_REFUSALS`."""
    status, message = _REFUSALS[code]
    return RequestError(status, message, code=code, headers={"retry-after": "1"})


# ---- bodies


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request whose content is JSON.

    RequestError: the content is of another type (415), or longer than `max_bytes` (413).
    """
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise RequestError(415, "the header Content-Type names another type; accepted: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise RequestError(415, "the header Content-Encoding names an encoding; accepted: none")
    most = max(max_bytes, _MAX_READ_BYTES)
    num_bytes = int(request.headers.get("content-length", "0"))  # uvicorn refuses all but numbers
    parts: list[bytes] = []
    closes = num_bytes > most
    if not closes:
        num_bytes, closes = await _read_parts(request.stream(), parts, max_bytes, most)
    if num_bytes <= max_bytes:
        return b"".join(parts)
    message = f"the body is longer than the limit of {max_bytes} bytes"
    headers = {"connection": "close"} if closes else {}
    raise RequestError(413, message, code="body_too_long", headers=headers)


async def _read_parts(
    stream: AsyncIterator[bytes], parts: list[bytes], max_bytes: int, most: int
) -> tuple[int, bool]:
    """Read to the end, and keep up to `max_bytes`: a client that is cut off while it sends sees no answer.

    Returns the bytes that were read, and whether there may be more: after `most`, or after a pause in what is
    dropped.
    """
    num_bytes = 0
    try:
        async with asyncio.timeout(None) as limit:
            async for part in stream:
                num_bytes += len(part)
                if num_bytes > most:
                    return num_bytes, True
                if num_bytes <= max_bytes:
                    parts.append(part)
                else:
                    limit.reschedule(asyncio.get_running_loop().time() + _LONGEST_PAUSE_S)
    except TimeoutError:
        return num_bytes, True
    return num_bytes, False


def body_too_slow() -> RequestError:
    """The connection is closed, because the rest of the body may never come."""
    message = "the body was not complete within the server's time limit for a body"
    return RequestError(408, message, code="timeout", headers={"connection": "close"})


def parsed_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` holds; its numbers are finite, and its strings are Unicode.

    RequestError: it is no UTF-8, no JSON or no object, or is nested too deeply.
    """
    try:
        parsed = _OBJECT.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        reason = str(error).removeprefix("JSON is malformed: ").partition(" - at ")[0]
        raise RequestError(400, f"the body is no JSON object in UTF-8: {reason}") from None
    _check_depth(parsed)
    return parsed


def _check_depth(parsed: dict[str, Any]) -> None:
    level: list[Any] = [parsed]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            values = container.values() if type(container) is dict else container
            if not {list, dict}.isdisjoint(map(type, values)):
                inner += (value for value in values if type(value) in (list, dict))
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(400, f"the body is nested deeper than {_MAX_DEPTH} objects and lists")


def short(value: Any) -> str:
    """A JSON value as a few characters of JSON, for messages."""
    return json.dumps(value) if value is None or isinstance(value, bool) else _SHORT.repr(value)
