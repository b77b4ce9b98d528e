"""Around every request: checks of its key and of the header Host, an id, and a log line without content."""

import ipaddress
import logging
import re
import secrets
import time
import traceback
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api_keys import ApiKeys, Headers
from .error_answers import RequestError
from .server_settings import ServerSettings

logger = logging.getLogger(__name__)

BROKEN_BY = "broken_by"
"""The key of a request's state for the code of what ended its answer before it was complete."""
_POLLED = ("/", "/page/{name}", "/status.json", "/metrics", "/health")  # asked every few seconds


class BrokenAnswerError(Exception):
    """An answer that had begun could not be completed. The server's log has the cause, without content."""


class AccessMiddleware:
    """ASGI middleware: gives each request an id and a log line, and admits it if its key is right."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{secrets.token_hex(12)}"
        status = 0
        start_s = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            scope["state"] = {**scope.get("state", {}), "request_id": request_id}
            _check_lengths(scope["headers"])
            scope["state"]["tenant"] = self._keys.tenant_of(_path_in_app(scope), scope["headers"])
            await self._app(scope, receive, send_with_id)
        except RequestError as error:
            await error.response(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception as error:
            logger.error("%s: %s", request_id, error_origin(error))
            if status:
                raise BrokenAnswerError(request_id) from None  # so that the connection is closed
            shown_error = RequestError(500, f"an internal error; the log of the server has {request_id}")
            await shown_error.response(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "-")  # other paths may be secrets
            seconds = time.perf_counter() - start_s
            level = logging.DEBUG if route in _POLLED and status < 400 else logging.INFO
            outcome = str(status or "gone")
            if status and BROKEN_BY in scope["state"]:
                outcome += f" broken by {scope['state'][BROKEN_BY]}"
            logger.log(level, "%s: %s %s %s %.3f s", request_id, scope["method"], route, outcome, seconds)


def _check_lengths(headers: Headers) -> None:
    """RequestError 400 where a body has two lengths: proxies may disagree where the next request begins."""
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        message = "the request has Content-Length and Transfer-Encoding; accepted: one of them"
        raise RequestError(400, message, headers={"connection": "close"})


def _path_in_app(scope: Scope) -> str:
    """The path without the prefix under which the app is mounted."""
    path = str(scope["path"])
    prefix = str(scope.get("root_path", ""))
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


def error_origin(error: BaseException) -> str:
    """An exception without its message, which may quote clients: its type, and the lines it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    cause = error.__cause__ if error.__cause__ is not None else error.__context__
    cause_text = f"; caused by {type(cause).__name__}" if cause is not None else ""
    return f"{type(error).__name__} through {', '.join(places)}{cause_text}"


class HostHeaderCheck:
    """ASGI middleware that refuses requests to a name that a web page lets point to this machine."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # Browsers always send the header; what comes without it is admitted, other than by Starlette's.
            hosts = [_without_port(value) for name, value in scope["headers"] if name == b"host"]
            if not all(host in self._names or _is_loopback(host) for host in hosts):
                accepted = "localhost, and the names in allowed_hosts"
                message = f"the header Host names another machine; accepted: {accepted}"
                headers = {"connection": "close"}  # `AccessMiddleware` has not seen how long the body is
                error = RequestError(403, message, code="wrong_host", headers=headers)
                await error.response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def add_host_header_check(app: Starlette, settings: ServerSettings) -> None:
    """Add the check of the header that the settings ask for. Warns where every machine can send requests."""
    if settings.api_keys:
        return
    if not _is_loopback(settings.host):
        logger.warning(
            "the server listens at %s and has no API keys: every client that reaches the port is served%s",
            settings.host, "" if settings.admin_key else ", and sees the operator's page and the metrics",
        )  # fmt: skip
    elif "*" not in settings.allowed_hosts:
        app.add_middleware(HostHeaderCheck, names=(settings.host, *settings.allowed_hosts))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def _without_port(value: bytes) -> str:
    text = value.decode("latin-1").strip().lower()
    parts = re.fullmatch(r"(?:\[([^]]*)\]|([^:]*))(?::\d*)?", text)
    return (parts[1] or parts[2] or "") if parts else text
