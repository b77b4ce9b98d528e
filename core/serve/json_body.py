"""The body of a request: bytes within a limit, and the JSON object in them."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from .errors import RequestError

MAX_DEPTH = 64
"""Objects and lists within one another. Chat templates and tools need a fraction of it."""

_MAX_DISCARDED_BYTES = 64 * 2**20
_DISCARD_S = 0.5
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_CONTAINERS = {list, dict}


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request whose content is JSON.

    Raises:
        RequestError: the content is of another type (415), or longer than `max_bytes` (413).
        ClientDisconnect: the client is gone.
    """
    _check_type(request)
    length = int(request.headers.get("content-length", "0"))  # the server of HTTP lets numbers through only
    if length > max_bytes:
        raise _too_long(max_bytes, closes=length > _MAX_DISCARDED_BYTES)
    parts: list[bytes] = []
    num_bytes = 0
    stream = request.stream()
    async for part in stream:
        num_bytes += len(part)
        if num_bytes > max_bytes:  # of a body without Content-Length
            raise _too_long(max_bytes, closes=not await _ends(stream))
        parts.append(part)
    return b"".join(parts)


def parsed_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` holds.

    No other thread runs while Python parses what holds no integers.

    Raises:
        RequestError: `body` is no UTF-8, no JSON or no object, is nested too deeply, or holds NaN, an
            infinite number or half a surrogate pair.
    """
    try:
        parsed = json.loads(
            body.decode("utf-8"), parse_constant=_constant, parse_float=_finite, parse_int=_integer
        )
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is no UTF-8: the fault is at byte {error.start}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(400, f"the body is no JSON: {_reason(error)}") from None
    if not isinstance(parsed, dict):
        raise RequestError(400, f"the body is a JSON {_type_name(parsed)}; accepted: an object")
    _check_depth(parsed)
    if _SURROGATE_ESCAPE.search(body):
        _check_surrogates(parsed)
    return parsed


def body_too_slow() -> RequestError:
    """The error of a body that did not arrive in time. The connection is closed: the rest may never come."""
    message = "the body was not complete within the server's time limit for a body"
    return RequestError(408, message, code="timeout", headers={"connection": "close"})


def _check_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    kind, _, parameters = content_type.partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise RequestError(415, "the header Content-Type names another type; accepted: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise RequestError(415, "the header Content-Encoding names an encoding; accepted: none")


async def _ends(stream: AsyncIterator[bytes]) -> bool:
    """Read on and throw away. Returns whether the body ends soon.

    A client that still sends when its connection is closed may never see the answer.
    """
    num_bytes = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            async for part in stream:
                num_bytes += len(part)
                if num_bytes > _MAX_DISCARDED_BYTES:
                    return False
    except TimeoutError:
        return False
    return True


def _too_long(max_bytes: int, closes: bool) -> RequestError:
    """`closes`: whether the connection is closed; else the rest of the body is read and thrown away."""
    message = f"the body is longer than the limit of {max_bytes} bytes"
    headers = {"connection": "close"} if closes else {}
    return RequestError(413, message, code="body_too_long", headers=headers)


def _too_deep() -> RequestError:
    return RequestError(400, f"the body is nested deeper than {MAX_DEPTH} objects and lists")


def _check_depth(parsed: dict[str, Any]) -> None:
    level: list[Any] = [parsed]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            values = container.values() if type(container) is dict else container
            if not _CONTAINERS.isdisjoint(map(type, values)):
                inner += (value for value in values if type(value) in _CONTAINERS)
        if not inner:
            return
        level = inner
    raise _too_deep()


def _check_surrogates(parsed: dict[str, Any]) -> None:
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(400, "the body holds half a surrogate pair, which is no character") from None


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _integer(text: str) -> int:
    """`int`, but other threads get their turn between the integers of a long body."""
    return int(text)


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno} column {error.colno}"
    return "an integer has too many digits" if "digits" in str(error) else str(error)


def _type_name(value: Any) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]
