"""Who may ask: keys of tenants and of the operator, and the salts that keep tenants apart."""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence

from .errors import RequestError

DEFAULT_TENANT = "default"
"""The tenant of every request to a server without keys."""

_TENANTS = "the key of a tenant"
_ADMIN = "the admin key"
_OPEN_PATHS = ("/", "/health")
_OPEN_FOLDERS = ("/page/",)


class Keys:
    """The keys of a server, as digests.

    Args:
        api_keys: the key of each tenant; empty for a server that is open.
        admin_key: the operator's key; None where there is none.
    """

    def __init__(self, api_keys: Mapping[str, str], admin_key: str | None) -> None:
        self._tenants = [(tenant, _digest(key.encode())) for tenant, key in api_keys.items()]
        self._admin = None if admin_key is None else _digest(admin_key.encode())

    @property
    def are_set(self) -> bool:
        """Whether tenants need keys."""
        return bool(self._tenants)

    def admit(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The tenant whose request for `path`, as routes name it, has these headers.

        Paths under /v1 are for tenants, a few are open, and all others are for the operator.

        Raises:
            RequestError: the key is missing or wrong (401), or no key opens `path` (403).
        """
        if path.startswith("/v1/"):
            return self._tenant(headers) if self._tenants else DEFAULT_TENANT
        if path not in _OPEN_PATHS and not path.startswith(_OPEN_FOLDERS):
            self._check_admin(headers)
        return DEFAULT_TENANT

    def _tenant(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        given = _digest(_bearer(headers))
        found = self._tenant_with(given)
        if found is None:
            raise _refused(
                "this is the admin key" if self._is_admin(given) else "the API key is wrong", _TENANTS
            )
        return found

    def _tenant_with(self, given: bytes) -> str | None:
        """The tenant whose key has this digest."""
        found = None
        for tenant, digest in self._tenants:  # all of them, so that the time tells nothing
            if hmac.compare_digest(given, digest):
                found = tenant
        return found

    def _is_admin(self, given: bytes) -> bool:
        return self._admin is not None and hmac.compare_digest(given, self._admin)

    def _check_admin(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if self._admin is None:
            if self._tenants:
                raise RequestError(403, "this path is for the operator, and the server has no admin_key")
            return
        given = _digest(_bearer(headers))
        if not self._is_admin(given):
            is_tenant = self._tenant_with(given) is not None
            raise _refused("this is a tenant's key" if is_tenant else "the admin key is wrong", _ADMIN)


def engine_salt(tenant: str, client_salt: str | None, has_keys: bool) -> bytes | None:
    """The engine's salt of a tenant and of the salt that its client gave.

    Different pairs have different salts. Without keys and without a client's salt it is None.
    """
    if client_salt is None and not has_keys:
        return None
    return json.dumps([tenant, client_salt]).encode()


def _digest(key: bytes) -> bytes:
    """Digests have one length, so that to compare them does not tell that of a key."""
    return hashlib.sha256(key).digest()


def _bearer(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        raise _refused("the header Authorization is missing" if not values else "there are several keys")
    scheme, _, key = values[0].strip().partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise _refused("the header Authorization is of another form")
    return key.strip()


def _refused(reason: str, accepted: str = "Authorization: Bearer and a key of this server") -> RequestError:
    message = f"{reason}; accepted: {accepted}"
    return RequestError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
