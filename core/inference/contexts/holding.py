"""What a request holds in a context while it runs."""

from dataclasses import dataclass

from ..policies.compute_reasons import Span
from .cached_path import CachedPath


@dataclass(eq=False)
class Holding:
    """A row, live slots, a path in the prefix cache, and how far the request is computed.

    A request that waits has no Holding, so that a released request cannot keep anything by mistake.

    Attributes:
        row: of the block table and of the live slots. `RequestRows` gives it.
        live_slots: 1 + K live slots, K the most drafts of a step. A decode of 1 + K tokens writes the state
            after token i into slot i; the request continues from the slot of the last accepted token.
        path: KV blocks and the pinned durable slot.
        prefill_length: tokens that were known at the admission: prefill up to here, then decode.
        num_computed: tokens whose KV is in the path's blocks; `RequestStates` writes it with `state_index`.
        state_index: pool index of the state after `num_computed` tokens; -1 means zeros.
        seen_tokens: how far the prompt followed a known path at its last match; `Admission` writes it.
        spans: why prompt tokens are computed, from where the request last resumed; `Admission` writes it.
    """

    row: int
    live_slots: tuple[int, ...]
    path: CachedPath
    prefill_length: int
    num_computed: int = 0
    state_index: int = -1
    seen_tokens: int = 0
    spans: tuple[Span, ...] = ()

    @property
    def decoding(self) -> bool:
        return self.num_computed >= self.prefill_length
