"""What a client reads where the ingress is lost before its answer is complete. Ray's HTTP proxy runs it."""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..serve.error_answers import RequestError, json_bytes

_INGRESS_LOST = RequestError(
    503, "the process that passes on answers was lost; send the request again", code="no_replica",
    headers={"retry-after": "1"},
)  # fmt: skip


def middlewares() -> list[Middleware]:
    """Those of the proxy; `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this function."""
    return [Middleware(CutAnswers)]


class CutAnswers:
    """ASGI middleware: status 503 where no answer has begun, an error event at the end of a cut stream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = has_ended = is_stream = False

        async def send_and_watch(message: Message) -> None:
            nonlocal has_started, has_ended, is_stream
            if message["type"] == "http.response.start":
                has_started = True
                is_stream = any(
                    name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message["headers"]
                )
            elif message["type"] == "http.response.body":
                has_ended = not message.get("more_body", False)
            await send(message)

        await self._app(scope, receive, send_and_watch)
        if not has_started:
            await _INGRESS_LOST.response(scope, receive, send)
        elif is_stream and not has_ended:
            event = b"data: " + json_bytes(_INGRESS_LOST.body) + b"\n\n"
            await send({"type": "http.response.body", "body": event})
