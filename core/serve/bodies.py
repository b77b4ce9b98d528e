"""What a client sends before anything checks its fields: the body within its limits, and a header's salt."""

from email.message import Message
from typing import Any

import msgspec
from starlette.requests import Request

from .errors import RequestError, bad_field

_SALT_HEADER = "x-cache-salt"
_MAX_READ_BYTES = 64 * 2**20
"""Of a body that is too long so much is read before it is refused."""
_OBJECT = msgspec.json.Decoder(dict[str, Any])


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request; RequestError where it is no JSON (415) or longer than `max_bytes` (413)."""
    content = Message()
    content["content-type"] = request.headers.get("content-type", "")
    is_utf8 = content.get_content_charset("utf-8") in ("utf-8", "utf8")
    if content.get_content_type() != "application/json" or not is_utf8:
        raise RequestError(415, "the header Content-Type names another type; accepted: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise RequestError(415, "the header Content-Encoding names an encoding; accepted: none")
    most = max(max_bytes, _MAX_READ_BYTES)
    num_bytes = int(request.headers.get("content-length", "0"))  # uvicorn refuses all but numbers
    parts: list[bytes] = []
    if num_bytes <= most:
        num_bytes = 0
        async for part in request.stream():  # to the end, so that the client reads the answer
            num_bytes += len(part)
            if num_bytes <= max_bytes:
                parts.append(part)
            elif num_bytes > most:
                break
    if num_bytes <= max_bytes:
        return b"".join(parts)
    message = f"the body is longer than the limit of {max_bytes} bytes"
    headers = {"connection": "close"} if num_bytes > most else {}
    raise RequestError(413, message, code="body_too_long", headers=headers)


def body_too_slow() -> RequestError:
    """The connection is closed, because the rest of the body may never come."""
    message = "the body was not complete within the server's time limit for a body"
    return RequestError(408, message, code="timeout", headers={"connection": "close"})


def parsed_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` holds; its numbers are finite, and its strings are Unicode."""
    try:
        return _OBJECT.decode(body)
    except RecursionError:
        raise RequestError(400, "the body's objects and lists are nested too deeply") from None
    except ValueError as error:
        reason = str(error).removeprefix("JSON is malformed: ").partition(" - at ")[0]
        raise RequestError(400, f"the body is no JSON object in UTF-8: {reason}") from None


def header_salt(request: Request) -> str | None:
    values = [value for name, value in request.headers.raw if name == _SALT_HEADER.encode()]
    if not values:
        return None
    try:
        return b",".join(values).decode()
    except UnicodeDecodeError:
        raise bad_field("X-Cache-Salt", "the header X-Cache-Salt is no UTF-8") from None
