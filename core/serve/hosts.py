"""Under which names a server without keys is asked for, and who can ask it."""

import ipaddress
import logging
from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import RequestError
from .responses import error_response
from .settings import ServerSettings

logger = logging.getLogger(__package__)


class HostCheck:
    """ASGI middleware. Refuses requests whose header Host names another machine.

    A web page can let a name of its own point to this machine. The browser then takes the server for the
    page's own, and names that host. A request without the header is let through: browsers always send it.

    Args:
        app: answers the others.
        names: names that are accepted beside "localhost" and addresses of loopback.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [_without_port(value) for name, value in scope["headers"] if name == b"host"]
            if not all(host in self._names or is_loopback(host) for host in hosts):
                message = (
                    "the header Host names another machine; accepted: localhost, and the names in "
                    "allowed_hosts"
                )
                await error_response(RequestError(403, message, code="wrong_host"))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def host_checks(settings: ServerSettings) -> list[Middleware]:
    """What a server that listens as `settings` say has around its application. Warns where all can ask it."""
    if settings.api_keys:
        return []
    if not is_loopback(settings.host):
        logger.warning(
            "the server listens at %s and has no API keys: everybody who reaches the port is served%s",
            settings.host,
            "" if settings.admin_key else ", and sees the operator's page and the metrics",
        )
        return []
    if "*" in settings.allowed_hosts:
        return []
    return [Middleware(HostCheck, names=(settings.host, *settings.allowed_hosts))]


def is_loopback(host: str) -> bool:
    """Whether `host` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _without_port(value: bytes) -> str:
    host = value.decode("latin-1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
