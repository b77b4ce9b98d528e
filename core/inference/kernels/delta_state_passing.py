"""The gated delta rule's stage between chunks: the recurrence over a row's chunks, from slot to slot."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4


def delta_state_passing(
    keys: Tensor,
    read_keys: Tensor,
    written: Tensor,
    log_decays: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    chunk_size: int,
    cu_chunk_seqlens: Tensor,
    row_chunk_starts: Tensor,
    chunk_destinations: Tensor,
) -> tuple[Tensor, Tensor]:
    """leaving = decay * entering + keys^T decayed (written - read_keys entering), over each row's chunks.

    Keeps the state in float32. Products multiply numbers of the dtype of `keys`, float32 in three TF32
    products, and add in float32. Reads a row's initial state at its source. Stores the state that leaves a
    chunk at the chunk's destination, and the state that leaves the row at the row's destination. There is no
    other access to the pool, and each of these happens once. A row without chunks copies its source to its
    destination, bit for bit. A row without chunks and without a destination, or with its source as
    destination, costs an empty program. One launch, whose grid and addresses depend on shapes alone: a CUDA
    graph can capture it. Does not synchronise.

    Args:
        keys: [tokens, Hk, Dk] normalised; value head h reads key head h // (Hv // Hk).
        read_keys, written: [tokens, Hv, Dk] and [tokens, Hv, Dv], the two parts of the WY form. These three
            tensors have one dtype and are contiguous.
        log_decays: [tokens, Hv] float32, contiguous: sums of the decays' binary logarithms from the start of
            each chunk. The sum at the last token of a chunk is the decay of the whole chunk.
        states: [slots, Hv, Dk, Dv] float32 or narrower, with any slot stride. Written. A row's destination
            may be its own source, no other row's source or destination.
        sources, destinations: [rows] int64 pool indices. Source -1 reads zeros; destination -1: nowhere.
        chunk_size: the most tokens of a chunk, a power of two from 16 on.
        cu_chunk_seqlens: [chunks + 1] where each chunk's tokens start.
        row_chunk_starts: [rows + 1] the first chunk of each row and the trailing total. Chunks from the total
            on are padding, and are not touched.
        chunk_destinations: [chunks] int64 pool indices, -1: nowhere. A chunk's may be its own row's source.

    Returns: the states that enter the chunks, [chunks, Hv, Dk, Dv], and the new values that tokens bring,
        [tokens, Hv, Dv], both in the dtype of `keys`. Both are unspecified for padding.

    Raises:
        ValueError: a state is not contiguous.
    """
    if not states[:1].is_contiguous():
        raise ValueError(
            f"states has strides {states.stride()}; accepted: contiguous states of any slot stride"
        )
    heads, key_dim, value_dim = states.shape[1:]
    chunks = cu_chunk_seqlens.shape[0] - 1
    entering = keys.new_empty(chunks, heads, key_dim, value_dim)
    new_values = torch.empty_like(written)
    blocks, num_stages = block_sizes(key_dim, value_dim, keys.dtype)
    grid = (triton.cdiv(value_dim, blocks["BLOCK_V"]) * heads * sources.shape[0],)
    delta_state_passing_kernel[grid](
        keys, read_keys, written, log_decays, states, entering, new_values,
        sources, destinations, cu_chunk_seqlens, row_chunk_starts, chunk_destinations,
        states.stride(0),
        heads, heads // keys.shape[1], key_dim, value_dim, chunk_size,
        **blocks, num_warps=NUM_WARPS, num_stages=num_stages,
    )  # fmt: skip
    return entering, new_values


def block_sizes(key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Tile sizes and pipeline stages. The number of rows has no say, so that other rows change no bits."""
    wide = dtype == torch.float32
    blocks = {
        "BLOCK_K": max(16, triton.next_power_of_2(key_dim)),
        "BLOCK_V": max(16, min(32, triton.next_power_of_2(value_dim))),
        "SLICE": 16 if wide else 0,
    }
    # Bounds are loaded two chunks ahead, and what they bound one chunk ahead: two programs fit a
    # multiprocessor of an H100. Five stages, one chunk more ahead, would leave room for one program.
    return blocks, 1 if wide else 3


@triton.jit
def delta_state_passing_kernel(
    # Pointers
    keys,
    read_keys,
    written,
    log_decays,
    states,
    entering,
    new_values,
    sources,
    destinations,
    cu_chunk_seqlens,
    row_chunk_starts,
    chunk_destinations,
    # Strides
    slot_stride: tl.int64,
    # Dimensions
    heads: tl.constexpr,
    heads_of_key: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    chunk_size: tl.constexpr,
    # Meta-parameters
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SLICE: tl.constexpr,
):
    """A program has a row, a value head and BLOCK_V of Dv. No other program touches this part of a state."""
    v_blocks: tl.constexpr = (value_dim + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // v_blocks % heads
    row = tl.program_id(0) // (v_blocks * heads)
    n = tl.arange(0, BLOCK_K)
    p = tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (n < key_dim)[:, None] & (p < value_dim)[None, :]

    keys += head // heads_of_key * key_dim
    read_keys += head * key_dim
    written += head * value_dim
    new_values += head * value_dim
    log_decays += head
    entering += head * (key_dim * value_dim)

    first = tl.load(row_chunk_starts + row)
    end = tl.load(row_chunk_starts + row + 1)
    source = tl.load(sources + row)
    destination = tl.load(destinations + row)
    moves = (destination >= 0) & (destination != source)

    within = head * (key_dim * value_dim) + n[:, None] * value_dim + p[None, :]
    slots = states + within
    has_initial = (source >= 0) & ((first < end) | moves)
    initial = tl.load(slots + source * slot_stride, mask=inside & has_initial, other=0.0)
    tl.debug_barrier()  # below, a thread may overwrite what another thread has read above
    if first == end:
        if moves:
            tl.store(slots + destination * slot_stride, initial, mask=inside)
    else:
        state = initial.to(tl.float32)
        state_size: tl.constexpr = heads * key_dim * value_dim
        entry = entering + first.to(tl.int64) * state_size
        checkpoint = tl.load(chunk_destinations + first)
        for chunk in range(first, end):
            # Triton loads ahead in a loop that carries no value of the chunk before the last: the bounds are
            # read anew.
            start = tl.load(cu_chunk_seqlens + chunk).to(tl.int64)
            following = tl.load(cu_chunk_seqlens + chunk + 1).to(tl.int64)
            next_checkpoint = tl.load(chunk_destinations + chunk + 1, mask=chunk + 1 < end, other=-1)
            state = _chunk(
                state, keys, read_keys, written, log_decays, entry, new_values, start, following, p,
                heads, heads // heads_of_key, key_dim, value_dim, chunk_size, BLOCK_K, BLOCK_V, SLICE,
            )  # fmt: skip
            if checkpoint >= 0:
                tl.store(slots + checkpoint * slot_stride, state.to(slots.dtype.element_ty), mask=inside)
            checkpoint = next_checkpoint
            entry += state_size
        if destination >= 0:
            tl.store(slots + destination * slot_stride, state.to(slots.dtype.element_ty), mask=inside)


@triton.jit
def _chunk(
    state, keys, read_keys, written, log_decays, entering, new_values, start, end, p,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk_size: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Store what one chunk, the tokens from `start` to `end`, gets and brings; returns the state behind it.

    SLICE is 0, or the products are taken in slices of so many keys or tokens, which are read back from what
    the program has just stored: float32 operands of a whole product do not fit the registers.
    """
    operand: tl.constexpr = keys.dtype.element_ty
    n = tl.arange(0, BLOCK_K)
    token = start + tl.arange(0, chunk_size)
    real = token < end
    of_state = n[:, None] * value_dim + p[None, :]
    of_value = token[:, None] * (heads * value_dim) + p[None, :]
    in_state = (n < key_dim)[:, None] & (p < value_dim)[None, :]
    in_value = real[:, None] & (p < value_dim)[None, :]

    rounded = state.to(operand)
    tl.store(entering + of_state, rounded, mask=in_state)
    decay = tl.load(log_decays + token * heads, mask=real, other=0.0)
    decay_of_chunk = tl.load(log_decays + (end - 1) * heads)
    own = tl.load(written + of_value, mask=in_value, other=0.0).to(tl.float32)
    state *= tl.exp2(decay_of_chunk)
    if SLICE == 0:
        of_key = token[:, None] * (heads * key_dim) + n[None, :]
        read_key = tl.load(read_keys + of_key, mask=real[:, None] & (n < key_dim)[None, :], other=0.0)
        value = own - tl.dot(read_key, rounded)
        tl.store(new_values + of_value, value.to(operand), mask=in_value)
        key = tl.load(
            keys + n[:, None] + token[None, :] * (key_heads * key_dim),
            mask=(n < key_dim)[:, None] & real[None, :],
            other=0.0,
        )
        value *= tl.where(real, tl.exp2(decay_of_chunk - decay), 0.0)[:, None]
        state = tl.dot(key, value.to(operand), state)
    else:
        tl.debug_barrier()  # below, a thread reads what another thread has stored above
        held = tl.zeros((chunk_size, BLOCK_V), dtype=tl.float32)
        for first_n in range(0, key_dim, SLICE):
            some = first_n + tl.arange(0, SLICE)
            read_key = tl.load(
                read_keys + token[:, None] * (heads * key_dim) + some[None, :],
                mask=real[:, None] & (some < key_dim)[None, :],
                other=0.0,
            )
            part = tl.load(
                entering + some[:, None] * value_dim + p[None, :],
                mask=(some < key_dim)[:, None] & (p < value_dim)[None, :],
                other=0.0,
            )
            held = tl.dot(read_key, part, held, input_precision="tf32x3")
        tl.store(new_values + of_value, own - held, mask=in_value)
        tl.debug_barrier()  # as above
        for first_token in range(0, chunk_size, SLICE):
            some_token = start + first_token + tl.arange(0, SLICE)
            is_real = some_token < end
            value = tl.load(
                new_values + some_token[:, None] * (heads * value_dim) + p[None, :],
                mask=is_real[:, None] & (p < value_dim)[None, :],
                other=0.0,
            )
            some_decay = tl.load(log_decays + some_token * heads, mask=is_real, other=0.0)
            value *= tl.where(is_real, tl.exp2(decay_of_chunk - some_decay), 0.0)[:, None]
            key = tl.load(
                keys + n[:, None] + some_token[None, :] * (key_heads * key_dim),
                mask=(n < key_dim)[:, None] & is_real[None, :],
                other=0.0,
            )
            state = tl.dot(key, value, state, input_precision="tf32x3")
    return state
