"""Correction: a request may resume with a single token left to compute."""

from collections.abc import Callable
from typing import Any

from .host_record import MHA_METADATA
from .overrides import override


@override(MHA_METADATA, "set_state_data", part="admission", faults=(1,))
def set_state_data(
    original: Callable[..., None],
    self: Any,
    padded_active_request_count: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """Tell the prefill kernels that a query may have two tokens, even where the longest query has one.

    The number is an upper bound. Flash attention's varlen kernels take the bound 1 for a decode step, and
    crash on paged KV. For this reason the stock match computes at least two tokens, and rounds a skip down to
    a boundary without a state. Decode steps do not read the number.
    """
    original(self, padded_active_request_count, max(2, max_seqlen_q), max_seqlen_k)
