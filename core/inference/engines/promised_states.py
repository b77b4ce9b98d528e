"""States that the next step will store, which waiting requests may wait for."""

from collections.abc import Iterable

from ..contexts.cache.prefix_cache import PrefixCache
from ..contexts.cache.prefix_match import PrefixMatch
from ..contexts.request import DynamicInferenceRequest, RequestStep


class PromisedStates:
    """The states of a step that is being scheduled, as far as there are slots for them.

    A request whose prefix has a promised state waits one step and resumes from that state, instead of
    computing the same tokens in parallel. A request that waited in vain does not wait again: another state
    may have taken the slot, or the step may have failed.
    """

    def __init__(self, cache: PrefixCache, steps: Iterable[RequestStep]) -> None:
        self._cache = cache
        self._positions: dict[int, int] = {}  # hash -> the boundary that it ends
        for step in steps:
            self.add(step)

    def add(self, step: RequestStep) -> None:
        """Promise the states that `step` takes, while slots are left."""
        for boundary in step.boundaries:
            if self._cache.slots.num_available <= len(self._positions):
                return
            key = step.key_at(boundary.position)
            if key not in self._positions and key not in self._cache.slots.map.hash_to_block_id:
                self._positions[key] = boundary.position

    def is_awaited_by(self, request: DynamicInferenceRequest, match: PrefixMatch) -> bool:
        """Whether a deeper state than the match's is promised; notes in the request what it waits for."""
        if request.awaited_tokens > match.resume_tokens:
            request.awaited_tokens = 0
            request.awaits_states = False
        if not request.awaits_states:
            return False
        limit = request.max_resume_tokens
        deepest = len(request.tokens) - 1 if limit is None else limit
        size, keys = request.hashes.block_size_tokens, request.hashes.keys
        request.awaited_tokens = max(
            (
                position
                for key, position in self._positions.items()
                if match.resume_tokens < position <= deepest and keys[position // size - 1] == key
            ),
            default=0,
        )
        return request.awaited_tokens > 0
