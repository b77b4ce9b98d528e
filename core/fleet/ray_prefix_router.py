"""Ray's own router by prefixes, for comparisons: it knows what was sent where, and nothing of evictions."""

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,  # its public place, ray.serve.llm, imports pyarrow
)
from ray.serve.request_router import PendingRequest

from .engine_request import EngineRequest

_FIRST_SURROGATE, _NUM_SURROGATES = 0xD800, 0x800


class RayPrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """`PrefixCacheAffinityRouter`, whose text of a request has a character for each token."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        """Ray asks for the text of a request; that of a question is one that no other has."""
        request = pending_request.args[0]
        if not isinstance(request, EngineRequest):
            return str(pending_request.metadata.internal_request_id)
        return "".join(map(_character, request.prompt))


def _character(token: int) -> str:
    return chr(token if token < _FIRST_SURROGATE else token + _NUM_SURROGATES)
