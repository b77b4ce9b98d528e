"""The server: OpenAI's endpoints over one engine. It needs the extra `mambaslots[serve]`.

server, app, settings                the process, its endpoints and its settings
connections                          clients that half-close, and processes out of descriptors
gate                                 around each request: host, key, id, log line, errors as JSON
requests, service, generation        bodies as models; jobs within the limits; streams of an engine to HTTP
http_answers, metrics                an answer as OpenAI's JSON; Prometheus' text

May import `monitor`, `text`, `engines`, `contexts`, `cache`; no model.
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
