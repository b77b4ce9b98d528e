"""The application: endpoints, the operator's page, and the middleware around them."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..loaded_model import LoadedModel, LoadedText
from ..validation import instance
from .answer_json import AnswerFormat, ChatAnswerFormat
from .api_keys import ApiKeys
from .connections import FailedAccepts
from .error_answers import JSONAnswer, RequestError, json_bytes
from .middleware import AccessMiddleware
from .prometheus_text import connection_metrics, text_of
from .served_engine import LocalEngine, ServedEngine
from .server_settings import ServerSettings
from .service import Service

router = APIRouter()
page_router = APIRouter(include_in_schema=False)


def make_app(engine: DynamicInferenceEngine, loaded: LoadedModel, settings: ServerSettings) -> FastAPI:
    """The server as an ASGI application, for one process of any ASGI server.

    While the application runs, its thread alone may call `engine`. When the application is shut down, running
    requests have `settings.drain_timeout_s` to end.

    Args:
        engine: serves the model of `loaded`; where that is split over ranks, a `LeadingEngine`.
        loaded: text and defaults of the model.
        settings: whom the server serves, and how much it accepts.

    Returns:
        The application. Its `state` has `engine` (an `AsyncEngine`), `monitor`, `service` and `settings`.

    Raises:
        ValueError: an argument is of another kind.
    """
    instance("loaded", loaded, LoadedModel)
    instance("settings", settings, ServerSettings)
    served = LocalEngine(
        engine, model_name=settings.model_name, max_waiting_requests=settings.max_waiting_requests,
        trace=settings.trace,
    )  # fmt: skip
    app = make_app_over(served, loaded, settings)
    app.state.monitor = served.monitor
    return app


def make_app_over(served: ServedEngine, loaded: LoadedText, settings: ServerSettings) -> FastAPI:
    """The application over any `ServedEngine`, which is started and closed with it; no `monitor`."""
    app = FastAPI(
        title="mambaslots",
        docs_url=None,  # its scripts would come from another site
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        middleware=_middleware(settings),
        exception_handlers={HTTPException: _answer_http_error},  # of a RequestError: `AccessMiddleware`
    )
    app.state.service = Service(served, loaded, settings)
    app.state.engine = served
    app.state.settings = settings
    app.state.created = int(time.time())
    app.include_router(router)
    app.include_router(page_router)
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
    access = Middleware(AccessMiddleware, keys=ApiKeys(settings.api_keys, settings.admin_key))
    if not settings.allowed_origins:
        return [access]
    cross_origin = Middleware(
        CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["GET", "POST"],
        allow_headers=["*"], expose_headers=["x-request-id", "retry-after"],
    )  # fmt: skip
    return [cross_origin, access]  # a browser asks for permission without a key


# FastAPI does not parse bodies: `Service.answer` reads them within its limits, in a worker thread.


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    service = _service(request)
    return await service.answer(request, service.job_factory.completion_job, AnswerFormat)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    service = _service(request)
    return await service.answer(request, service.job_factory.chat_job, ChatAnswerFormat)


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
    error = _service(request).why_refused
    if error is not None:
        raise error
    return JSONAnswer({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    engine_metrics = [*await _service(request).engine.metrics()]
    failed_accepts: FailedAccepts | None = getattr(request.app.state, "failed_accepts", None)
    if failed_accepts is not None:
        engine_metrics += connection_metrics(failed_accepts.num_failed)
    return Response(await run_in_threadpool(text_of, engine_metrics), media_type=CONTENT_TYPE_LATEST)


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
        "max_model_len": service.job_factory.longest,
    }


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Routing's error: a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    message = "this path does not accept this method"
    if error.status_code == 404:
        paths = (str(getattr(route, "path", "")).replace(":path}", "}") for route in router.routes)
        message = f"there is no such path; accepted: {', '.join(dict.fromkeys(paths))}"
    return RequestError(error.status_code, message, headers=error.headers).response


# ---- the operator's page
# Its files are open: they hold nothing of a server. The figures, `/status.json`, need the operator's key.

_FILES = StaticFiles(directory=Path(__file__).with_name("page"))
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@page_router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    return await file("index.html", request)


@page_router.get("/page/{name}")
async def file(name: str, request: Request) -> Response:
    """The file, or 304 where the browser has this version of it. A browser asks each time."""
    try:
        response = await _FILES.get_response(name, request.scope)
    except (HTTPException, ValueError):
        raise RequestError(404, "the page has no such file") from None
    response.headers.update(_PAGE_HEADERS | {"Cache-Control": "no-cache"})
    return response


@page_router.get("/status.json")
async def status(request: Request) -> Response:
    """`Monitor.snapshot()`, of one engine or of all replicas."""
    snapshot = await request.app.state.engine.snapshot()
    if snapshot is None:
        raise RequestError(404, "no replica reports its figures")
    content = await run_in_threadpool(json_bytes, snapshot)  # the event loop does not wait for it
    headers = _PAGE_HEADERS | {"Cache-Control": "no-store"}
    return Response(content, media_type="application/json", headers=headers)
