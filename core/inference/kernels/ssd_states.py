"""The SSD stages that make states, in one launch: updates of chunks, and the recurrence over a row's chunks.

Serves inputs of 16 bits. A program keeps its part of a state in registers from the first chunk of a row to
the last. Memory therefore sees no update of a chunk, and the state that enters a chunk only as the rounded
operand of `chunk_scan`: 67 MB for 4,096 tokens of Nemotron-H-8B instead of 537 MB by way of
`state_passing`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ssd_output import multiply_add, padded_side

NUM_WARPS = 4


def ssd_states(
    x: Tensor,
    B: Tensor,
    dt: Tensor,
    log_decays: Tensor,
    ssm_states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    cu_chunk_seqlens: Tensor,
    row_chunk_starts: Tensor,
    chunk_destinations: Tensor,
    operands: torch.dtype | None = None,
) -> Tensor:
    """leaving = exp(l[last]) entering + sum over k of exp(l[last] - l[k]) dt[k] x[k] B[k], chunk by chunk.

    k are tokens of one chunk, l is the chunk's `log_decays` (Dao & Gu 2024, arXiv 2405.21060, section 6).
    Products multiply numbers of the dtype `operands`, to which x with its decay and time step is rounded, and
    add in float32. The recurrence is float32. Reads a row's initial state at its source. Stores the state
    that leaves a chunk at the chunk's destination, and the state that leaves the row at the row's
    destination. There is no other access to the pool, and each of these happens once. A row without chunks
    copies its source to its destination, bit for bit. A row without chunks and without a destination, or with
    its source as destination, costs an empty program. One launch, whose grid and addresses depend on shapes
    alone: a CUDA graph can capture it. Does not synchronise.

    Args:
        x: [tokens, H, P]. B: [tokens, G, N]; head h belongs to group h // (H // G). Both have one dtype of 16
            bits, and a last stride of 1.
        dt, log_decays: [H, chunks, chunk size] float32, contiguous. log_decays are sums of dt * A from the
            start of each chunk. Behind a chunk's tokens dt is 0.
        ssm_states: [slots, H, P, N] float32 or narrower, with any slot stride. Written. A row's destination
            may be its own source, no other row's source or destination.
        sources, destinations: [rows] int64 pool indices. Source -1 reads zeros; destination -1: nowhere.
        cu_chunk_seqlens: [chunks + 1] int32, where each chunk starts, and the trailing total.
        row_chunk_starts: [rows + 1] int32, the first chunk of each row and the trailing total. Chunks from
            the total on are padding, and are not touched.
        chunk_destinations: [chunks] int64 pool indices, -1: nowhere. A chunk's may be its own row's source.
        operands: float32, or the dtype of x and B; None is the latter.

    Returns: the states that enter the chunks, [chunks, H, P, N] in the dtype `operands`; unspecified for
        padding.

    Raises:
        ValueError: a tensor has other strides.
    """
    if not ssm_states[:1].is_contiguous():
        raise ValueError(
            f"ssm_states has strides {ssm_states.stride()}; accepted: contiguous states of any slot stride"
        )
    for name, dense in (("dt", dt), ("log_decays", log_decays)):
        if not dense.is_contiguous():
            raise ValueError(f"{name} has strides {dense.stride()}; accepted: a contiguous tensor")
    for name, tokens_first in (("x", x), ("B", B)):
        if tokens_first.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tokens_first.stride()}; accepted: a last stride of 1")
    heads, head_dim, state_dim = ssm_states.shape[1:]
    chunks, chunk_size = dt.shape[1:]
    operands = operands or x.dtype
    entering = torch.empty(chunks, heads, head_dim, state_dim, dtype=operands, device=x.device)
    blocks, num_stages = block_sizes(chunk_size, head_dim, state_dim, operands)
    tiles = triton.cdiv(head_dim, blocks["BLOCK_P"]) * triton.cdiv(state_dim, blocks["BLOCK_N"])
    ssd_states_kernel[(tiles * heads * sources.shape[0],)](
        x, B, dt, log_decays, ssm_states, entering,
        sources, destinations, cu_chunk_seqlens, row_chunk_starts, chunk_destinations,
        x.stride(0), x.stride(1), B.stride(0), B.stride(1), ssm_states.stride(0), dt.stride(0),
        heads, heads // B.shape[1], head_dim, state_dim, chunk_size,
        **blocks, num_warps=NUM_WARPS, num_stages=num_stages,
    )  # fmt: skip
    return entering


def block_sizes(
    chunk_size: int, head_dim: int, state_dim: int, operands: torch.dtype = torch.bfloat16
) -> tuple[dict[str, int], int]:
    """Tile sizes and pipeline stages. The number of rows has no say, so that other rows change no bits.

    32 x 128 numbers of a state are 256 programs for a row of Nemotron-H-8B, two on each multiprocessor of an
    H100. They were the fastest of ten tiles there. Larger chunks leave shared memory for fewer stages. Larger
    tiles of float32 need more registers than a thread has.
    """
    wide = operands == torch.float32
    blocks = {
        "BLOCK_P": min(32, padded_side(head_dim)),
        "BLOCK_N": min(64 if wide else 128, padded_side(state_dim)),
        "BLOCK_K": min(16 if wide else 128, padded_side(chunk_size)),
    }
    return blocks, 1 if wide else 4 if chunk_size <= 128 else 2


@triton.jit
def add_update(update, values, keys, decay_of_chunk, decay, step, operand: tl.constexpr):
    """update + the sum over tokens k of exp(l[last] - l[k]) dt[k] x[k] B[k]; x and B are values and keys."""
    scale = tl.exp(tl.minimum(decay_of_chunk - decay, 0.0)) * step
    scaled = (values.to(tl.float32) * scale[:, None]).to(operand)
    return multiply_add(tl.trans(scaled), keys.to(operand), update, "ieee")


@triton.jit
def ssd_states_kernel(
    # Pointers
    x, B, dt, log_decays, ssm_states, entering,
    sources, destinations, cu_chunk_seqlens, row_chunk_starts, chunk_destinations,
    # Strides
    x_token_stride: tl.int64, x_head_stride: tl.int64,
    B_token_stride: tl.int64, B_group_stride: tl.int64,
    slot_stride: tl.int64, decay_head_stride: tl.int64,
    # Dimensions
    heads: tl.constexpr, heads_of_group: tl.constexpr,
    head_dim: tl.constexpr, state_dim: tl.constexpr, chunk_size: tl.constexpr,
    # Meta-parameters
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program has a row, a head, BLOCK_P of P and BLOCK_N of N. No other program touches this part."""
    operand: tl.constexpr = entering.dtype.element_ty
    n_blocks: tl.constexpr = (state_dim + BLOCK_N - 1) // BLOCK_N
    tiles: tl.constexpr = (head_dim + BLOCK_P - 1) // BLOCK_P * n_blocks
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    row = tl.program_id(0) // (tiles * heads)
    p = tile // n_blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tile % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (p < head_dim)[:, None] & (n < state_dim)[None, :]

    x += head * x_head_stride
    B += head // heads_of_group * B_group_stride
    dt += head * decay_head_stride
    log_decays += head * decay_head_stride

    first = tl.load(row_chunk_starts + row)
    end = tl.load(row_chunk_starts + row + 1)
    source = tl.load(sources + row)
    destination = tl.load(destinations + row)
    moves = (destination >= 0) & (destination != source)

    within = head * (head_dim * state_dim) + p[:, None] * state_dim + n[None, :]
    slots = ssm_states + within
    has_initial = (source >= 0) & ((first < end) | moves)
    initial = tl.load(slots + source * slot_stride, mask=inside & has_initial, other=0.0)
    tl.debug_barrier()  # below, a thread may overwrite what another thread has read above
    if first == end:
        if moves:
            tl.store(slots + destination * slot_stride, initial, mask=inside)
    else:
        state = initial.to(tl.float32)
        state_size: tl.constexpr = heads * head_dim * state_dim
        entry = entering + within + first.to(tl.int64) * state_size
        of_chunk = first.to(tl.int64) * chunk_size
        checkpoint = tl.load(chunk_destinations + first)
        for chunk in range(first, end):
            # Triton loads ahead in a loop that carries no value of the chunk before the last: the bounds are
            # read anew.
            start = tl.load(cu_chunk_seqlens + chunk).to(tl.int64)
            length = (tl.load(cu_chunk_seqlens + chunk + 1) - start).to(tl.int32)
            next_checkpoint = tl.load(chunk_destinations + chunk + 1, mask=chunk + 1 < end, other=-1)
            tl.store(entry, state.to(entering.dtype.element_ty), mask=inside)
            decay_of_chunk = tl.load(log_decays + of_chunk + chunk_size - 1)
            update = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
            for first_k in tl.static_range(0, chunk_size, BLOCK_K):
                k = first_k + tl.arange(0, BLOCK_K)
                real = k < length
                decay = tl.load(log_decays + of_chunk + k, mask=k < chunk_size, other=0.0)
                step = tl.load(dt + of_chunk + k, mask=k < chunk_size, other=0.0)
                values = tl.load(
                    x + (start + k)[:, None] * x_token_stride + p[None, :],
                    mask=real[:, None] & (p < head_dim)[None, :],
                    other=0.0,
                )
                keys = tl.load(
                    B + (start + k)[:, None] * B_token_stride + n[None, :],
                    mask=real[:, None] & (n < state_dim)[None, :],
                    other=0.0,
                )
                update = add_update(update, values, keys, decay_of_chunk, decay, step, operand)
            # Written as a sum, Triton would add within the product, where tensor cores round otherwise.
            state = tl.fma(state, tl.exp(decay_of_chunk), update)
            if checkpoint >= 0:
                tl.store(slots + checkpoint * slot_stride, state.to(slots.dtype.element_ty), mask=inside)
            checkpoint = next_checkpoint
            entry += state_size
            of_chunk += chunk_size
        if destination >= 0:
            tl.store(slots + destination * slot_stride, state.to(slots.dtype.element_ty), mask=inside)
