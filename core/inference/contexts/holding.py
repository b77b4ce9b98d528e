"""What a request holds in a context while it runs."""

from dataclasses import dataclass

from .cache.prefix_match import CachedPath
from .cache.reasons import Span


@dataclass(eq=False)
class Holding:
    """A row, live slots, a path in the prefix cache, and how far the request is computed.

    A request that waits has no Holding, so that a released request cannot keep anything by mistake.

    Attributes:
        row: the request's row in the block table; `RequestRows` assigns the row.
        live_slots: 1 + K live slots, where K is `num_speculative_tokens`. A decode of 1 + K tokens writes the
            state after token i into slot i; the request continues from the slot of the last accepted token.
            One live slot where decodes replay.
        path: KV blocks and the pinned durable slot.
        prefill_length: tokens that the request had at its admission. Prefill computes these tokens, decodes
            the later ones.
        num_computed: tokens whose KV is in the path's blocks; only `RequestStates` writes this field.
        state_index: pool index of the state after `num_computed` tokens, or at the last grid point where
            decodes replay; -1 for zeros. Only `RequestStates` writes this field.
        branch_tokens: tokens that the prompt shares with an earlier one before the two differ, or 0; only
            `Admission` writes this field.
        spans: why the prompt tokens after the last resume point are computed; only `Admission` writes this
            field.
    """

    row: int
    live_slots: tuple[int, ...]
    path: CachedPath
    prefill_length: int
    num_computed: int = 0
    state_index: int = -1
    branch_tokens: int = 0
    spans: tuple[Span, ...] = ()

    @property
    def decoding(self) -> bool:
        return self.num_computed >= self.prefill_length
