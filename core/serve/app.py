"""The application: endpoints, and what lies around them."""

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..loaded_model import LoadedModel, LoadedText
from ..validation import instance, shown
from . import page_routes
from .answers import ChatForm, CompletionForm
from .errors import RequestError
from .gate import Gate
from .keys import Keys
from .local_engine import LocalEngine
from .responses import JSONAnswer, error_response
from .served_engine import ServedEngine
from .service import Service
from .settings import ServerSettings

router = APIRouter()
_ROUTING_MESSAGES = {
    "Not Found": "there is no such path",
    "Method Not Allowed": "this path does not take this method",
}


def make_app(engine: DynamicInferenceEngine, loaded: LoadedModel, settings: ServerSettings) -> FastAPI:
    """The server as an ASGI application, for one process of any ASGI server.

    While the application runs, its thread alone may call `engine`. When the application is shut down, running
    requests have `settings.drain_timeout_s` to end.

    Args:
        engine: serves the model of `loaded`; where that is split over ranks, a `LeadingEngine`.
        loaded: text and defaults of the model.
        settings: whom the server serves, and how much it takes.

    Returns:
        The application. Its `state` has `engine` (an `AsyncEngine`), `monitor`, `service` and `settings`.

    Raises:
        ValueError: an argument is of another kind.
    """
    instance("loaded", loaded, LoadedModel)
    instance("settings", settings, ServerSettings)
    local = LocalEngine(
        engine,
        model_name=settings.model_name,
        max_waiting_requests=settings.max_waiting_requests,
        trace=_print_line if settings.trace else None,
    )
    app = make_app_over(local, loaded, settings)
    app.state.engine, app.state.monitor = local.engine, local.monitor
    return app


def make_app_over(
    served: ServedEngine, loaded: LoadedModel | LoadedText, settings: ServerSettings
) -> FastAPI:
    """The server as an ASGI application over whatever generates answers, replicas say.

    Args:
        served: started with the application, and closed with it.
        loaded: text and defaults of the model.
        settings: whom the server serves, and how much it takes. Without `trace`: `served` traces.

    Returns:
        The application. Its `state` has `engine`, which is `served`, `service`, `settings`, and a `monitor`
            of None: the page shows what `served.snapshot` returns.

    Raises:
        ValueError: an argument is of another kind.
    """
    if not isinstance(loaded, LoadedModel | LoadedText):
        raise ValueError(f"loaded is {shown(loaded)}; accepted: a LoadedModel or a LoadedText")
    instance("settings", settings, ServerSettings)
    service = Service(served, loaded, settings)
    app = FastAPI(
        title="mambaslots",
        docs_url=None,  # its scripts would come from another host
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        middleware=_middleware(settings),
        exception_handlers={RequestError: _answer_error, HTTPException: _answer_http_error},
    )
    app.state.service, app.state.engine, app.state.settings = service, served, settings
    app.state.created = int(time.time())
    app.state.monitor = None
    app.include_router(router)
    app.include_router(page_routes.router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    service.engine.start()
    try:
        yield
        if not service.is_draining:
            await service.drain()
    finally:
        await service.close()


def _middleware(settings: ServerSettings) -> list[Middleware]:
    routes = [*router.routes, *page_routes.router.routes]
    gate = Middleware(Gate, keys=Keys(settings.api_keys, settings.admin_key), routes=routes)
    if not settings.allowed_origins:
        return [gate]
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
    return [cross_origin, gate]  # a browser asks for permission without a key


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    service = _service(request)
    return await service.answer(request, request.state.tenant, service.completion_job, CompletionForm)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    service = _service(request)
    return await service.answer(request, request.state.tenant, service.chat_job, ChatForm)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return JSONAnswer({"object": "list", "data": [_model(request)]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    if name != _service(request).settings.model_name:
        raise RequestError(404, "there is no such model here", param="model", code="model_not_found")
    return JSONAnswer(_model(request))


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    trouble = _service(request).trouble
    if trouble is not None:
        raise trouble
    return JSONAnswer({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    content, media_type = await _service(request).engine.metrics_text()
    return Response(content, media_type=media_type)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _model(request: Request) -> dict[str, Any]:
    service = _service(request)
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": request.app.state.created,
        "owned_by": "mambaslots",
        "max_model_len": service.preparation.lengths.longest,
    }


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """What routing refuses: a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    message = _ROUTING_MESSAGES.get(error.detail, error.detail)
    return error_response(RequestError(error.status_code, message, headers=error.headers))
