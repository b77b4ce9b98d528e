"""Where a server listens, whom it serves and how much it takes."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from ..validation import (
    INT32_MAX,
    LONGEST_TIMEOUT_S,
    boolean,
    instance,
    integer,
    real,
    set_field,
    shown,
)

_SHORTEST_TIMEOUT_S = 0.001


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the server.

    Attributes:
        model_name: the name of the model for clients.
        host: the address to listen at. The default is reached from this machine only.
        port: the port; 0 takes a free one.
        api_keys: the key of each tenant. Tenants share no cached state. Empty: everybody is served, as the
            tenant "default". Never shown.
        admin_key: the operator's key, for the page's data and the metrics. Never shown.
        max_waiting_requests: how many requests may wait beside those that run before others get status 429.
        max_body_bytes: longest body of a request. None: 1 MiB and 16 bytes for each token of the engine's
            `max_sequence_length`, at least 2 MiB. No stream goes on while a body is parsed, which takes up to
            some 0.2 s for each MiB.
        body_timeout_s: seconds from a request's arrival to the end of its body.
        request_timeout_s: seconds from a request's arrival to the end of its answer.
        drain_timeout_s: seconds that running requests have to end after SIGTERM.
        trace: whether a line about each request is written to stderr: counts, times, no text.
        allowed_origins: origins of web pages that may call the server, for example "https://chat.example";
            ("*",) allows all.
        allowed_hosts: further names in the header Host that `serve` takes. Where it listens on loopback and
            has no `api_keys`, it takes names of this machine and `host` only, so that no web page reaches it
            through a name of its own. ("*",) allows all.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    max_waiting_requests: int = 1024
    max_body_bytes: int | None = None
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    trace: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("model_name", "host"):
            if not instance(name, getattr(self, name), str).strip():
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: a string that is not empty")
        set_field(self, "port", integer("port", self.port, 0, 65535))
        self._check_keys()
        waiting = integer("max_waiting_requests", self.max_waiting_requests, 1, INT32_MAX)
        set_field(self, "max_waiting_requests", waiting)
        if self.max_body_bytes is not None:
            set_field(self, "max_body_bytes", integer("max_body_bytes", self.max_body_bytes, 1, INT32_MAX))
        for name in ("body_timeout_s", "request_timeout_s", "drain_timeout_s"):
            lowest = 0.0 if name == "drain_timeout_s" else _SHORTEST_TIMEOUT_S
            set_field(self, name, real(name, getattr(self, name), lowest, LONGEST_TIMEOUT_S))
        boolean("trace", self.trace)
        for name in ("allowed_origins", "allowed_hosts"):
            given = getattr(self, name)
            if not isinstance(given, (Sequence, Set)) or isinstance(given, (str, bytes)):
                raise ValueError(f"{name} is {shown(given)}; accepted: a list of strings")
            set_field(self, name, tuple(given))
        for host in self.allowed_hosts:
            if not isinstance(host, str) or not host or "/" in host:
                raise ValueError(f"allowed_hosts holds {shown(host)}; accepted: 'chat.example' or '*'")
        for origin in self.allowed_origins:
            if not isinstance(origin, str) or not (origin == "*" or "://" in origin):
                raise ValueError(
                    f"allowed_origins holds {shown(origin)}; accepted: 'https://chat.example' or '*'"
                )

    def _check_keys(self) -> None:
        if not isinstance(self.api_keys, Mapping):
            raise ValueError(
                f"api_keys is a {type(self.api_keys).__name__}; accepted: a mapping of tenant to key"
            )
        set_field(self, "api_keys", dict(self.api_keys))
        for tenant, key in self.api_keys.items():
            if not isinstance(tenant, str) or not tenant:
                raise ValueError(f"api_keys has the tenant {shown(tenant)}; accepted: a string, not empty")
            _check_key(f"api_keys: the key of tenant {tenant!r}", key)
        if self.admin_key is not None:
            _check_key("admin_key", self.admin_key)
        keys = [*self.api_keys.values(), *([] if self.admin_key is None else [self.admin_key])]
        if len(set(keys)) != len(keys):
            raise ValueError("api_keys and admin_key name a key twice; accepted: different keys")


def _check_key(name: str, key: object) -> None:
    """A key is ASCII without spaces, so that clients can send it; the message shows no key."""
    if not isinstance(key, str) or not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{name} is not accepted; accepted: visible ASCII characters, without spaces")
