"""The server: OpenAI's endpoints over one engine. It needs the extra `mambaslots[serve]`."""

from typing import TYPE_CHECKING

from .settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..inference.engines.dynamic_engine import DynamicInferenceEngine
    from ..loaded_model import LoadedModel

__all__ = ["ServerSettings", "make_app", "serve"]

_NEEDED = "the server needs FastAPI, uvicorn and prometheus_client: pip install 'mambaslots[serve]'"


def check_installed() -> None:
    """Raise an ImportError that names the extra unless the server's packages can be imported."""
    try:
        from . import server  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(_NEEDED) from error


def make_app(engine: "DynamicInferenceEngine", loaded: "LoadedModel", settings: ServerSettings) -> "FastAPI":
    """As `core/serve/app.py:make_app`.

    Raises:
        ImportError: the extra is not installed.
    """
    check_installed()
    from . import app

    return app.make_app(engine, loaded, settings)


def serve(engine: "DynamicInferenceEngine", loaded: "LoadedModel", settings: ServerSettings) -> int:
    """As `core/serve/server.py:serve`.

    Raises:
        ImportError: the extra is not installed.
    """
    check_installed()
    from . import server

    return server.serve(engine, loaded, settings)
