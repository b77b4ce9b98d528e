"""Whose request it is: names for the roots of hash chains, and what each name has asked for."""

from collections import OrderedDict
from dataclasses import dataclass

from ..inference.contexts.cache.hashing import PUBLIC_ROOT

DEFAULT = "default"
OTHER = "other"
MAX_TENANTS = 64
MAX_SALTS = 1 << 14


@dataclass
class TenantCounts:
    """What a tenant's requests were, so far. Tokens count once they are resumed or computed."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_resumed_tokens: int = 0


class Tenants:
    """Names for root digests, and counts for names; the memory of both is bounded.

    A root without a name, and a name beyond the first 64, count as "other". Of the roots, the 16,384 named
    last have their names. No salt is kept.

    Attributes:
        counts: name -> what the name's requests were.
    """

    def __init__(self) -> None:
        self.counts: dict[str, TenantCounts] = {DEFAULT: TenantCounts()}
        self._name_of: OrderedDict[bytes, str] = OrderedDict()

    def name(self, root: bytes, tenant: str) -> None:
        """Let requests with this root count for `tenant`."""
        if tenant not in self.counts and len(self.counts) >= MAX_TENANTS:
            tenant = OTHER
        self.counts.setdefault(tenant, TenantCounts())
        self._name_of[root] = tenant
        self._name_of.move_to_end(root)
        if len(self._name_of) > MAX_SALTS:
            self._name_of.popitem(last=False)

    def of(self, root: bytes) -> str:
        """The name that a root counts for."""
        return self._name_of.get(root, DEFAULT if root == PUBLIC_ROOT else OTHER)

    def counts_of(self, name: str) -> TenantCounts:
        return self.counts.setdefault(name, TenantCounts())
