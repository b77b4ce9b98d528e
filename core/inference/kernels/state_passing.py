"""The SSD stage between chunks: the recurrence over a row's chunks, from pool slot to pool slot."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""State elements of a program, 8 a thread: two 16-byte accesses of float32, one of bfloat16. One row of
Nemotron-H-8B is 1,024 programs. An H200 holds all of them at once, with 31 KiB of loads in flight on each
multiprocessor."""
NUM_WARPS = 4


def state_passing(
    chunk_states: Tensor,
    log_decays: Tensor,
    ssm_states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    row_chunk_starts: Tensor,
    chunk_destinations: Tensor,
) -> None:
    """leaving = exp(log decay) * entering + update, over each row's chunks in order, in float32.

    Reads a row's initial state at its source. Stores the state that leaves a chunk at the chunk's
    destination, and the state that leaves the row at the row's destination. There is no other access to the
    pool, and each of these happens once. A row without chunks copies its source to its destination, bit for
    bit. A row without chunks and without a destination, or with its source as destination, costs an empty
    program. One launch, whose grid and addresses depend on shapes alone: a CUDA graph can capture it. Does
    not synchronise.

    Args:
        chunk_states: [chunks, H, P, N] float32, contiguous: the update of each chunk. **Overwritten** with
            the state that enters the chunk.
        log_decays: [H, chunks, chunk size] float32, contiguous: sums of dt * A from the start of each chunk.
            The last sum of a chunk is the decay of the whole chunk.
        ssm_states: [slots, H, P, N] float32 or narrower, with any slot stride. Written. A row's destination
            may be its own source, no other row's source or destination.
        sources, destinations: [rows] int64 pool indices. Source -1 reads zeros; destination -1: nowhere.
        row_chunk_starts: [rows + 1] int32, the first chunk of each row and the trailing total. Chunks from
            the total on are padding, and are not touched.
        chunk_destinations: [chunks] int64 pool indices, -1: nowhere. A chunk's may be its own row's source.

    Raises:
        ValueError: a state is not contiguous.
    """
    if not chunk_states.is_contiguous() or not ssm_states[:1].is_contiguous():
        raise ValueError(
            f"strides are {chunk_states.stride()} of chunk_states and {ssm_states.stride()} of ssm_states; "
            "accepted: contiguous chunk_states, and contiguous states of any slot stride"
        )
    heads, head_dim, state_dim = chunk_states.shape[1:]
    state_size = head_dim * state_dim
    grid = (triton.cdiv(state_size, BLOCK), heads, sources.shape[0])
    state_passing_kernel[grid](
        chunk_states, log_decays, ssm_states, sources, destinations, row_chunk_starts, chunk_destinations,
        ssm_states.stride(0), log_decays.stride(0),
        heads, state_size, log_decays.shape[2], BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit
def state_passing_kernel(
    # Pointers
    chunk_states,
    log_decays,
    ssm_states,
    sources,
    destinations,
    row_chunk_starts,
    chunk_destinations,
    # Strides
    slot_stride: tl.int64,
    decay_head_stride: tl.int64,
    # Dimensions
    heads: tl.constexpr,
    state_size: tl.constexpr,
    chunk_size: tl.constexpr,
    # Meta-parameters
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(2)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < state_size

    first = tl.load(row_chunk_starts + row)
    end = tl.load(row_chunk_starts + row + 1)
    source = tl.load(sources + row)
    destination = tl.load(destinations + row)
    moves = (destination >= 0) & (destination != source)

    # A stored element depends on what was loaded from its own place: an update in place needs no barrier.
    slots = ssm_states + head * state_size + offsets
    has_initial = (source >= 0) & ((first < end) | moves)
    initial = tl.load(slots + source * slot_stride, mask=inside & has_initial, other=0.0)
    if first == end:
        if moves:
            tl.store(slots + destination * slot_stride, initial, mask=inside)
    else:
        state = initial.to(tl.float32)
        chunk_stride: tl.constexpr = heads * state_size
        at = chunk_states + first.to(tl.int64) * chunk_stride + head * state_size + offsets
        decay_at = log_decays + head * decay_head_stride + first.to(tl.int64) * chunk_size + chunk_size - 1
        update = tl.load(at, mask=inside, other=0.0)
        for chunk in range(first, end):
            # The load runs one chunk ahead. In order, it would wait for the store, which may alias it.
            next_update = tl.load(at + chunk_stride, mask=inside & (chunk + 1 < end), other=0.0)
            tl.store(at, state, mask=inside)
            state = tl.exp(tl.load(decay_at)) * state + update
            checkpoint = tl.load(chunk_destinations + chunk)
            if checkpoint >= 0:
                tl.store(slots + checkpoint * slot_stride, state.to(slots.dtype.element_ty), mask=inside)
            update = next_update
            at += chunk_stride
            decay_at += chunk_size
        if destination >= 0:
            tl.store(slots + destination * slot_stride, state.to(slots.dtype.element_ty), mask=inside)
