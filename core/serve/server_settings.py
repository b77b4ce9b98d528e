"""Where a server listens, whom it serves and how much it accepts."""

import re
import socket
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from ..validation import (
    INT32_MAX,
    LONGEST_TIMEOUT_S,
    boolean,
    check_fields,
    instance,
    integer,
    real,
    refused,
    set_field,
    shown,
)

_LABELS = ("default", "other")
"""The metrics' tenants of requests without a key, and of those beyond the first 64, "default" included."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the server.

    Attributes:
        model_name: the name of the model for clients.
        host: the address to listen at. The default is reached from this machine only.
        port: the port; 0 picks a free one.
        api_keys: the key of each tenant. Tenants share no cached state, and none is named "default" or
            "other". Empty: every client is served, as the tenant "default". Never shown.
        admin_key: the operator's key, for the page's data and the metrics. Never shown.
        max_waiting_requests: how many requests may wait, besides those that run, before others get status
            429. With 8 rows and max_waiting_requests=2, the 11th request gets it.
        max_body_bytes: longest body of a request. None: 1 MiB and 16 bytes for each token of the engine's
            `max_sequence_length`, at least 2 MiB. All streams pause while a body is parsed: for
            0.01 s a MiB of token ids, 0.13 s a MiB of empty lists.
        body_timeout_s: seconds from a request's arrival to the end of its body.
        request_timeout_s: seconds from a request's arrival to the end of its answer.
        drain_timeout_s: seconds that running requests have to end after SIGTERM.
        trace: whether a line about each request is written to stderr: counts, times, no text.
        allowed_origins: origins of web pages that may call the server, for example "https://chat.example";
            ("*",) allows all.
        allowed_hosts: further names accepted in the header Host. A server on loopback without `api_keys`
            accepts names of this machine and `host` only, so that no web page reaches it through a name of
            its own. ("*",) allows all.
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
                raise refused(name, getattr(self, name), "a string that is not empty")
        check_fields(self, integer, port=(0, 65535), max_waiting_requests=(1, INT32_MAX))
        check_fields(self, integer, or_none=True, max_body_bytes=(1, INT32_MAX))
        limits_s = 0.001, LONGEST_TIMEOUT_S
        check_fields(self, real, body_timeout_s=limits_s, request_timeout_s=limits_s)
        check_fields(self, real, drain_timeout_s=(0.0, LONGEST_TIMEOUT_S))
        check_fields(self, boolean, trace=())
        for name, example in (("allowed_origins", "https://chat.example"), ("allowed_hosts", "chat.example")):
            names = getattr(self, name)
            if not isinstance(names, (Sequence, Set)) or isinstance(names, (str, bytes)):
                raise refused(name, names, "a list of strings")
            for entry in names:
                has_form = isinstance(entry, str) and entry and ("://" in entry) == ("://" in example)
                if entry != "*" and (not has_form or ("/" in entry and "://" not in entry)):
                    raise ValueError(f"{name} holds {shown(entry)}; accepted: {example!r} or '*'")
            set_field(self, name, tuple(names))
        self._check_keys()

    def _check_keys(self) -> None:
        if not isinstance(self.api_keys, Mapping):
            raise ValueError(
                f"api_keys is a {type(self.api_keys).__name__}; accepted: a mapping of tenant to key"
            )
        keys = {f"api_keys: the key of tenant {tenant!r}": key for tenant, key in self.api_keys.items()}
        for tenant in self.api_keys:
            if not isinstance(tenant, str) or tenant in ("", *_LABELS):
                raise ValueError(
                    f"api_keys has the tenant {shown(tenant)}; accepted: a name that is not 'default' or "
                    "'other', which are labels of the metrics"
                )
        if self.admin_key is not None:
            keys["admin_key"] = self.admin_key
        for name, key in keys.items():  # clients can send it; the message shows no key
            if not isinstance(key, str) or not re.fullmatch("[!-~]+", key):
                raise ValueError(f"{name} is not accepted; accepted: visible ASCII characters, no spaces")
        if len(set(keys.values())) != len(keys):
            raise ValueError("api_keys and admin_key name a key twice; accepted: different keys")
        set_field(self, "api_keys", dict(self.api_keys))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at this address; an OSError says that it cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # which names the address again
        raise OSError(f"cannot listen at {host}:{port}: {reason}") from error
