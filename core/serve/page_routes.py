"""The operator's page at `/`: files of the package, and the figures that the page asks for.

The files are open to everybody: they say nothing of a server. Who may read the figures, `/status.json`, is
decided before a request comes here.
"""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fastapi import APIRouter, HTTPException, Request, Response
from starlette.concurrency import run_in_threadpool

from .errors import json_bytes

__all__ = ["router"]

MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "drawing.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""All files of the folder `page`; no other name is looked up."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class PageFile:
    """A file of the page; `etag` changes with its content."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_file(name: str) -> PageFile:
    """Read a file of the package, once.

    Raises:
        KeyError: the page has no such file.
    """
    media_type = MEDIA_TYPES[name]
    content = (resources.files(__package__) / "page" / name).read_bytes()
    return PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    return _answer("index.html", request)


@router.get("/page/{name}")
async def file(name: str, request: Request) -> Response:
    return _answer(name, request)


@router.get("/status.json")
async def status(request: Request) -> Response:
    """`Monitor.snapshot()`, of one engine or of all replicas."""
    monitor = request.app.state.monitor
    if monitor is not None:
        snapshot = await run_in_threadpool(monitor.snapshot)
    else:
        snapshot = await request.app.state.service.engine.snapshot()
        if snapshot is None:
            raise HTTPException(404, "no replica reports its figures")
    return await run_in_threadpool(_status, request, snapshot)


def _status(request: Request, snapshot: object) -> Response:
    """Not async, so that the event loop does not wait for it."""
    content = json_bytes(snapshot)
    headers = HEADERS | {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        content = gzip.compress(content, compresslevel=1)
        headers["Content-Encoding"] = "gzip"
    return Response(content, media_type="application/json", headers=headers)


def _answer(name: str, request: Request) -> Response:
    """The file, or 304 where the browser has this version of it. A browser asks each time."""
    try:
        page = page_file(name)
    except KeyError:
        raise HTTPException(404, "the page has no such file") from None
    headers = HEADERS | {"Cache-Control": "no-cache", "ETag": page.etag}
    known = request.headers.get("If-None-Match", "").split(",")
    if page.etag in {etag.strip().removeprefix("W/") for etag in known}:
        return Response(status_code=304, headers=headers)
    return Response(page.content, media_type=page.media_type, headers=headers)
