"""Errors that clients see, in OpenAI's shape."""

import json
from collections.abc import Mapping
from typing import Any

_LONGEST_MESSAGE = 400
"""Characters of a message. Messages may quote values of the client, of any length."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


class RequestError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status, 400 to 599.
        message: one sentence for the client.
        param: the field that the sentence is about; None where it is about none.
        code: a word for programs; None where there is none.
        headers: further headers of the answer, by lower-case names.
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
        self.message = cut(message, _LONGEST_MESSAGE)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _KINDS.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_field(param: str, message: str, code: str | None = None) -> RequestError:
    """The error of a body whose field `param` is wrong."""
    return RequestError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> RequestError:
    """The error of a server that cannot answer now."""
    return RequestError(503, message, code=code, headers={"retry-after": "1"})


def cut(text: str, length: int) -> str:
    """`text`, or its beginning and "..." where it is longer than `length` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def json_bytes(value: Any) -> bytes:
    """`value` as JSON in UTF-8. Half surrogate pairs become JSON's escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")
