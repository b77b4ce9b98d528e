"""The keys of tenants and of the operator, and the salt of a tenant's requests."""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence

from ..monitor.figures import DEFAULT_TENANT
from .error_answers import RequestError

Headers = Sequence[tuple[bytes, bytes]]


class ApiKeys:
    """The keys of a server, as digests. Paths under /v1 are for tenants, others for the operator."""

    def __init__(self, api_keys: Mapping[str, str], admin_key: str | None) -> None:
        self._tenants = [(tenant, _digest(key.encode())) for tenant, key in api_keys.items()]
        self._admin = [] if admin_key is None else [(DEFAULT_TENANT, _digest(admin_key.encode()))]

    def tenant_of(self, path: str, headers: Headers) -> str:
        """The tenant whose request has these headers; 401 for a wrong key, 403 for a closed path."""
        is_for_tenants = path.startswith("/v1/")
        keys = self._tenants if is_for_tenants else self._admin
        is_open = path in ("/", "/health") or path.startswith("/page/")
        if is_open or not (keys or self._tenants):
            return DEFAULT_TENANT
        if not keys:
            raise RequestError(403, "this path is for the operator, and the server has no admin_key")
        tenant = None
        client_digest = _digest(_bearer(headers))
        for name, digest in keys:  # all: the time is the same
            if hmac.compare_digest(client_digest, digest):
                tenant = name
        if tenant is None:
            key = "a tenant's key" if is_for_tenants else "the admin key"
            raise RequestError(
                401, f"the key is missing or wrong; accepted: the header Authorization: Bearer, with {key}",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        return tenant


def engine_salt(tenant: str, client_salt: str | None, has_keys: bool) -> bytes | None:
    """The engine's salt of a tenant and its client's salt: b'["ann", "x"]'; None without keys and salt."""
    if client_salt is None and not has_keys:
        return None
    return json.dumps([tenant, client_salt]).encode()


def _digest(key: bytes) -> bytes:
    """Digests have one length: the time of a comparison does not depend on the key's length."""
    return hashlib.sha256(key).digest()


def _bearer(headers: Headers) -> bytes:
    """The key in the headers; b"", which is no tenant's, where there is none or more than one."""
    values = [value for name, value in headers if name == b"authorization"]
    scheme, _, key = values[0].strip().partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return key.strip() if scheme.lower() == b"bearer" else b""
