"""What every request passes: its id, its key, and the log line and error that show nothing of it."""

import logging
import secrets
import time
import traceback
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import RequestError
from .keys import Keys
from .responses import ENDED_BY, error_response

logger = logging.getLogger(__name__)

_WATCHED = ("/", "/page/{name}", "/status.json", "/metrics", "/health")
"""Routes that programs ask every few seconds."""


class BrokenAnswerError(Exception):
    """An answer that had begun could not be completed. The server's log has the cause, without content."""


class Gate:
    """ASGI middleware. Gives each request an id and lets it in if its key is right.

    The log has a line for each request: id, method, route, status and seconds; and what ended an answer
    before it was complete. The line is at DEBUG where a program asks for figures and gets them. An exception
    is logged as its type and where it was raised: messages of exceptions may quote what clients sent.
    """

    def __init__(self, app: ASGIApp, keys: Keys, routes: Sequence[BaseRoute] = ()) -> None:
        """
        Args:
            app: takes the requests that are let in.
            keys: who may ask.
            routes: name requests in the log that are not let in.
        """
        self._app = app
        self._keys = keys
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{secrets.token_hex(12)}"
        status = 0
        begin = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            scope["state"] = {**scope.get("state", {}), "request_id": request_id}
            scope["state"]["tenant"] = self._keys.admit(_path_in_app(scope), scope["headers"])
            await self._app(scope, receive, send_with_id)
        except RequestError as error:
            await error_response(error)(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # nobody reads an answer
        except Exception as error:
            logger.error("%s: %s", request_id, where(error))
            if status:
                raise BrokenAnswerError(request_id) from None  # so that the connection is closed
            internal = RequestError(500, f"an internal error; the log of the server has {request_id}")
            await error_response(internal)(scope, receive, send_with_id)
        finally:
            route = self._route_of(scope)
            seconds = time.perf_counter() - begin
            level = logging.DEBUG if route in _WATCHED and status < 400 else logging.INFO
            told = str(status or "gone")
            if status and ENDED_BY in scope["state"]:
                told += f", ended by {scope['state'][ENDED_BY]},"
            logger.log(level, "%s: %s %s %s %.3f s", request_id, scope["method"], route, told, seconds)

    def _route_of(self, scope: Scope) -> str:
        """The route of a request, also of one that was refused before it came there; "-" without a route.

        A path that no route takes may be anything, a secret, too.
        """
        route = scope.get("route")
        if route is None:
            route = next((each for each in self._routes if each.matches(scope)[0] is not Match.NONE), None)
        return getattr(route, "path", "-")


def _path_in_app(scope: Scope) -> str:
    """The path without the prefix under which the app is mounted."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


def where(error: BaseException) -> str:
    """An exception without its message: its type, and the lines of code that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    cause = error.__cause__ if error.__cause__ is not None else error.__context__
    behind = f"; behind it {type(cause).__name__}" if cause is not None else ""
    return f"{type(error).__name__} through {', '.join(places)}{behind}"
