"""The server: OpenAI's endpoints over one engine. It needs the extra `mambaslots[serve]`.

A request goes through them in this order:

server, connections, settings        the process; clients that half-close, processes out of descriptors
app, middleware                      endpoints; around each: the header Host, keys, an id, a log line
service                              admits requests, within the server's limits, and streams the answers
preparation, requests                a body's bytes become a job; a body as a model, which checks each field
served_engine                        an engine as the server sees it
http_answers                         an answer's text and tokens as OpenAI's JSON, whole and in chunks
errors, metrics                      the errors that clients see; Prometheus' text
"""

from typing import TYPE_CHECKING, Any

from .settings import ServerSettings

if TYPE_CHECKING:
    from .app import make_app
    from .server import serve

__all__ = ["ServerSettings", "make_app", "serve"]

_NEEDED = "the server needs FastAPI, uvicorn and prometheus_client: pip install 'mambaslots[serve]'"


def check_installed() -> None:
    """Raise an ImportError that names the extra unless the server's packages can be imported."""
    try:
        from . import server  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(_NEEDED) from error


def __getattr__(name: str) -> Any:
    """`make_app` and `serve`, imported at their first use."""
    if name not in ("make_app", "serve"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_installed()
    from . import app, server

    return app.make_app if name == "make_app" else server.serve
