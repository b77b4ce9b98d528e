"""Inside a captured graph: keep the states of rows that have just reached a block boundary.

For kernel sets that update live slots in place and cannot write elsewhere. The grid is bounded whatever the
pools hold; in a step with nothing to do its programs exit after reading the rows' lengths and slots.
"""

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from .fused_state_copy import (
    GROUP,
    UNSPECIALISED,
    StateMove,
    move_live_pairs,
    nemotron_h_8b,
    specialisation_of,
)
from .specialisation import Specialisation
from .state_copy import StateTensors

PROGRAMS = 1056
"""Most steps find nothing to do: on an H200 that costs 2.6 us, and 6 us with `fused_state_copy.PROGRAMS`."""


@triton.jit(
    do_not_specialize=["block_size_tokens", *UNSPECIALISED],
    do_not_specialize_on_alignment=["live_slots", "sequence_lengths", "durable_slots"],
)
def _capture_boundaries(
    # Pointers
    live_slots,
    sequence_lengths,
    durable_slots,
    # Dimensions
    pairs: tl.int32,
    block_size_tokens: tl.int32,
    # Pointers, as addresses
    conv_source: tl.int64,
    conv_destination: tl.int64,
    ssm_source: tl.int64,
    ssm_destination: tl.int64,
    # Dimensions
    layers: tl.int32,
    conv_size: tl.int64,
    ssm_size: tl.int64,
    # Strides in bytes
    conv_source_layer: tl.int64,
    conv_source_slot: tl.int64,
    conv_destination_layer: tl.int64,
    conv_destination_slot: tl.int64,
    ssm_source_layer: tl.int64,
    ssm_source_slot: tl.int64,
    ssm_destination_layer: tl.int64,
    ssm_destination_slot: tl.int64,
    # Meta-parameters
    CONV_ALIGN: tl.constexpr,
    CONV_TAIL: tl.constexpr,
    SSM_ALIGN: tl.constexpr,
    SSM_TAIL: tl.constexpr,
    ACCESSES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The row with live slot s, durable slot d and a length on a boundary is the pair (s, d)."""
    for first in range(0, pairs, GROUP):
        rows = first + tl.arange(0, GROUP)
        inside = rows < pairs
        lengths = tl.load(sequence_lengths + rows, mask=inside, other=0)
        sources = tl.load(live_slots + rows, mask=inside, other=-1)
        destinations = tl.load(durable_slots + rows, mask=inside, other=-1)
        reached = (lengths > 0) & (lengths % block_size_tokens == 0)
        move_live_pairs(
            reached & (sources >= 0) & (destinations >= 0),
            sources,
            destinations,
            conv_source,
            conv_destination,
            ssm_source,
            ssm_destination,
            layers,
            conv_size,
            ssm_size,
            conv_source_layer,
            conv_source_slot,
            conv_destination_layer,
            conv_destination_slot,
            ssm_source_layer,
            ssm_source_slot,
            ssm_destination_layer,
            ssm_destination_slot,
            CONV_ALIGN,
            CONV_TAIL,
            SSM_ALIGN,
            SSM_TAIL,
            ACCESSES,
            True,
        )


def capture_boundaries(
    live: StateTensors,
    live_slots: Tensor,
    sequence_lengths: Tensor,
    block_size_tokens: int,
    durable: StateTensors,
    durable_slots: Tensor,
) -> None:
    """`state_copy.capture_boundaries` in one launch, which a CUDA graph may capture."""
    rows = live_slots.shape[0]
    move = StateMove.between(live, durable)
    if rows:
        arguments = (live_slots, sequence_lengths, durable_slots, rows, block_size_tokens)
        move.launch(_capture_boundaries, rows, arguments, (GROUP,), (sequence_lengths.dtype,), PROGRAMS)


def hopper_specialisations() -> list[Specialisation]:
    """The capture at Nemotron-H-8B's shapes."""
    pool = nemotron_h_8b()
    other_types = {
        "live_slots": "*i64",
        "sequence_lengths": "*i64",
        "durable_slots": "*i64",
        "block_size_tokens": "i32",
    }
    move = StateMove.between(pool, pool)
    constants = {"GROUP": GROUP}
    wide: tuple[Literal["load", "store"], ...] = ("load", "store")
    return [specialisation_of("capture_boundaries", _capture_boundaries, move, other_types, constants, wide)]
