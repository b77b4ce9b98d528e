"""The SSD recurrence between chunks, from pool slot to pool slot."""

import triton
import triton.language as tl
from torch import Tensor

from .specialisation import Specialisation

# 8 elements a thread: two 16-byte accesses of float32, one of bfloat16. At Nemotron-H-8B's shapes one row is
# 1,024 programs, which an H200 holds all at once, with 31 KiB of loads in flight on each multiprocessor.
_BLOCK = 1024
_NUM_WARPS = 4


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

    Reads a row's initial state at `sources` and stores what leaves a chunk at `chunk_destinations`, what
    leaves the row at `destinations`: the only accesses to the pool, each once. A row without chunks moves
    its source to its destination bit for bit; without a destination, or with the source as destination, it
    costs an empty program. Launches one kernel, whose grid and addresses depend on shapes alone: it can be
    captured in a CUDA graph, and synchronises nothing.

    Args:
        chunk_states: [chunks, H, P, N] float32, contiguous: the update of each chunk, **replaced** by the
            state that enters it.
        log_decays: [H, chunks, chunk size] float32, contiguous: sums of dt * A from the start of each
            chunk; the last one belongs to the whole chunk.
        ssm_states: [slots, H, P, N] float32 or narrower, of any slot stride. Written. A row may name its
            source as its destination; no row may name another's, nor two the same.
        sources, destinations: [rows] int64 pool indices, -1: zeros, nowhere.
        row_chunk_starts: [rows + 1] int32, the first chunk of each row and the trailing total. Chunks from
            there on are padding, and are not touched.
        chunk_destinations: [chunks] int64 pool indices, -1: nowhere.

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
    grid = (triton.cdiv(state_size, _BLOCK), heads, sources.shape[0])
    _state_passing_kernel[grid](
        chunk_states, log_decays, ssm_states, sources, destinations, row_chunk_starts, chunk_destinations,
        ssm_states.stride(0), log_decays.stride(0),
        heads, state_size, log_decays.shape[2], _BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip


@triton.jit
def _state_passing_kernel(
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

    # This program reads and writes the same part of its row's slots, so that in place needs no barrier.
    slots = ssm_states + head * state_size + offsets
    wanted = (source >= 0) & ((first < end) | moves)
    initial = tl.load(slots + source * slot_stride, mask=inside & wanted, other=0.0)
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
            # One chunk ahead: by itself the load would wait for the store, which may alias it.
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


def hopper_specialisations() -> list[Specialisation]:
    """What `state_passing` launches at the shapes of Nemotron-H-8B, for pools of each dtype."""
    return [
        Specialisation(
            name=f"state_passing {pool}",
            kernel=_state_passing_kernel,
            signature={
                "chunk_states": "*fp32",
                "log_decays": "*fp32",
                "ssm_states": f"*{pool}",
                "sources": "*i64",
                "destinations": "*i64",
                "row_chunk_starts": "*i32",
                "chunk_destinations": "*i64",
                "slot_stride": "i64",
                "decay_head_stride": "i64",
            },
            constexprs={"heads": 128, "state_size": 64 * 128, "chunk_size": 128, "BLOCK": _BLOCK},
            # Rows and chunks start anywhere: the index pointers may be slices of the step's buffer.
            divisible_by_16=("chunk_states", "log_decays", "ssm_states", "slot_stride", "decay_head_stride"),
            num_warps=_NUM_WARPS,
            wide=("load", "store"),
        )
        for pool in ("fp32", "bf16")
    ]
