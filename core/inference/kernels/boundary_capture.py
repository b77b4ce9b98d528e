"""The launch of `state_copy.capture_boundaries` on a GPU, for a step that a CUDA graph may capture.

The grid is bounded whatever the pools hold. In a step with nothing to do the programs exit after they have
read the rows' lengths and slots.
"""

import triton
import triton.language as tl
from torch import Tensor

from .state_move import GROUP, UNSPECIALISED, PartMove, StateMove
from .state_move_kernels import move_live_pairs
from .state_tensors import StateTensors

PROGRAMS = 1056
"""Most steps find nothing to do: on an H200 that costs 2.6 us, and 6 us with `state_move.PROGRAMS`."""


@triton.jit(
    do_not_specialize=["block_size_tokens", *UNSPECIALISED],
    do_not_specialize_on_alignment=["live_slots", "sequence_lengths", "durable_slots"],
)
def capture_boundaries_kernel(
    # Pointers
    live_slots, sequence_lengths, durable_slots,
    # Dimensions
    pairs: tl.int32, block_size_tokens: tl.int32,
    # The move: layers, then addresses, sizes and strides in bytes
    layers: tl.int32, conv_source: tl.int64, conv_destination: tl.int64, conv_size: tl.int64,
    conv_source_layer: tl.int64, conv_source_slot: tl.int64,
    conv_destination_layer: tl.int64, conv_destination_slot: tl.int64,
    ssm_source: tl.int64, ssm_destination: tl.int64, ssm_size: tl.int64,
    ssm_source_layer: tl.int64, ssm_source_slot: tl.int64,
    ssm_destination_layer: tl.int64, ssm_destination_slot: tl.int64,
    # Meta-parameters
    CONV_ALIGN: tl.constexpr, CONV_TAIL: tl.constexpr, SSM_ALIGN: tl.constexpr, SSM_TAIL: tl.constexpr,
    ACCESSES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A row on a boundary is a pair, its live slot and its durable slot; a program takes tiles in turn."""
    for first in range(0, pairs, GROUP):
        rows = first + tl.arange(0, GROUP)
        inside = rows < pairs
        lengths = tl.load(sequence_lengths + rows, mask=inside, other=0)
        sources = tl.load(live_slots + rows, mask=inside, other=-1)
        destinations = tl.load(durable_slots + rows, mask=inside, other=-1)
        reached = (lengths > 0) & (lengths % block_size_tokens == 0)
        move_live_pairs(
            reached & (sources >= 0) & (destinations >= 0), sources, destinations,
            layers,
            PartMove(
                conv_source, conv_destination, conv_size, conv_source_layer, conv_source_slot,
                conv_destination_layer, conv_destination_slot, CONV_ALIGN, CONV_TAIL,
            ),
            PartMove(
                ssm_source, ssm_destination, ssm_size, ssm_source_layer, ssm_source_slot,
                ssm_destination_layer, ssm_destination_slot, SSM_ALIGN, SSM_TAIL,
            ),
            ACCESSES, True,
        )  # fmt: skip


def capture_boundaries(
    live: StateTensors,
    live_slots: Tensor,
    sequence_lengths: Tensor,
    block_size_tokens: int,
    durable: StateTensors,
    durable_slots: Tensor,
) -> None:
    """`state_copy.capture_boundaries` in one launch. Indices are not checked here."""
    rows = live_slots.shape[0]
    move = StateMove.between(live, durable)
    if rows:
        arguments = (live_slots, sequence_lengths, durable_slots, rows, block_size_tokens)
        types = (sequence_lengths.dtype,)
        move.launch(capture_boundaries_kernel, rows, arguments, (GROUP,), types, PROGRAMS)
