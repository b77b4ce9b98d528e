"""The gated delta rule of decode by replay; the references are in `reference_replay_delta`.

A request keeps its state at the last grid point, and the inputs of the tokens since. A step gathers each
row's chunk, whose later tokens are zeros, and computes what `gated_delta_rule_scan` computes of it. A row of
a chunk depends on earlier rows only, so that the new tokens' outputs have the bits of a prefill.

    stage                                  function              file or package
    inputs since the grid point            gather_kernel         this one
    sums of decays, the triangular system  solved_chunks         gated_delta_rule.py, fla-core's stages
    outputs, the state behind a chunk      delta_replay_output   delta_replay_output.py

Float32 takes the scan itself behind the first stage.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .delta_operands import normalised
from .delta_replay_output import delta_replay_output
from .gated_delta_rule import check_sizes, gated_delta_rule_scan, solved_chunks

BLOCK_T, NUM_WARPS = 32, 4


def gated_delta_rule_replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    k_inputs: Tensor,
    v_inputs: Tensor,
    g_inputs: Tensor,
    beta_inputs: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    sources: Tensor,
    destinations: Tensor,
    chunk_size: int,
) -> Tensor:
    """`gated_delta_rule_scan` of the tokens since each row's last grid point; the outputs of the new ones.

    Inputs of 16 bits take four or five launches, and memory sees a row's state, the inputs of its chunk and
    the triangular system of each value head. Inputs of float32 take the scan of rows * chunk_size tokens.
    Launches depend on shapes alone, and nothing synchronises, on the condition that `gated_delta_rule_scan`
    names.

    Args:
        q, k: [rows, T, Hk, Dk] raw. v: [rows, T, Hv, Dv]. g, beta: [rows, T, Hv]. All with any strides.
            Tokens of a row behind its length are padding.
        states: [slots, Hv, Dk, Dv] as for the scan. Written at `destinations`.
        k_inputs, v_inputs: [slots, chunk_size, Hk, Dk] and [slots, chunk_size, Hv, Dv], contiguous in each
            slot. Position p of a sequence lies at p % chunk_size. Written at the positions of the rows'
            tokens. Read from the grid point to `starts`.
        g_inputs, beta_inputs: [slots, chunk_size, Hv] likewise.
        slots: [rows] where each row's inputs are, -1: padding, which writes nothing.
        starts, lengths: [rows] the position of each row's first token, and its number of tokens, which all
            lie in one chunk.
        sources: [rows] the index in `states` of the state at the grid point, -1: zeros.
        destinations: [rows] the index for the state behind the chunk, -1: nowhere. It may be the row's own
            source, no other row's; it is named only where the row's tokens complete the chunk.
        chunk_size: as for the scan.

    Returns: o, [rows, T, Hv, Dv] in the dtype of v; unspecified for padding.

    Raises:
        ImportError: fla-core is not installed.
        ValueError: inputs are not contiguous, or what the scan does not take.
    """
    _check_contiguous(k_inputs=k_inputs, v_inputs=v_inputs, g_inputs=g_inputs, beta_inputs=beta_inputs)
    rows, tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    check_sizes(chunk_size, key_dim)
    fused, chunk_tokens = fuses(v.dtype), rows * chunk_size

    def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)

    # The last stage reads values where they are kept, and queries without the chunk around them.
    queries = empty(v, rows * tokens if fused else chunk_tokens, key_heads, key_dim)
    keys = empty(v, chunk_tokens, key_heads, key_dim)
    values = empty(v, 0 if fused else chunk_tokens, heads, value_dim)
    gates, strengths = empty(g, chunk_tokens, heads), empty(beta, chunk_tokens, heads)
    cuts = empty(v, rows + 1, dtype=torch.int32)
    places = empty(v, rows if fused else rows * tokens, dtype=torch.int64)
    blocks = triton.cdiv(chunk_size, BLOCK_T)
    gather_kernel[(rows * blocks * (2 * key_heads + heads + 1),)](
        q, k, v, g, beta, k_inputs, v_inputs, g_inputs, beta_inputs,
        queries, keys, values, gates, strengths, cuts, places, slots, starts, lengths,
        *q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(),
        k_inputs.stride(0), v_inputs.stride(0), g_inputs.stride(0), beta_inputs.stride(0),
        KEY_HEADS=key_heads, VALUE_HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        TOKENS=tokens, CHUNK=chunk_size, **block_sizes(tokens, heads, key_dim, value_dim), FUSED=fused,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    if fused:
        inverse, log_decays = solved_chunks(keys, gates, strengths, chunk_size, cuts, places)
        return delta_replay_output(
            queries, keys, v_inputs, strengths, log_decays, inverse, states,
            slots, starts, lengths, sources, destinations, tokens,
        )  # fmt: skip
    row_chunks = torch.arange(rows + 1, dtype=torch.int32, device=v.device)
    o = gated_delta_rule_scan(
        queries, keys, values, gates, strengths, states, sources, destinations, chunk_size,
        cuts, row_chunks, row_chunks, torch.full_like(destinations, -1),
    )  # fmt: skip
    return o.index_select(0, places).view(v.shape)


def keep_delta_inputs(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    k_inputs: Tensor,
    v_inputs: Tensor,
    g_inputs: Tensor,
    beta_inputs: Tensor,
    slots: Tensor,
    tail_starts: Tensor,
    query_start_loc: Tensor,
) -> None:
    """Store the inputs of each prefill row's tail, the tokens behind its last grid point.

    One launch, whose grid depends on shapes alone. Does not synchronise.

    Args:
        k: [tokens, Hk, Dk]. v: [tokens, Hv, Dv]. g, beta: [tokens, Hv]. Packed rows with any strides.
        k_inputs, v_inputs, g_inputs, beta_inputs: as for `gated_delta_rule_replay`. Written.
        slots: [rows] where each row's inputs go, -1: nowhere.
        tail_starts: [rows] the packed token that begins the row's last, incomplete chunk. A row whose tail
            begins at the row's end stores nothing.
        query_start_loc: [rows + 1] where each row's tokens start.

    Raises:
        ValueError: inputs are not contiguous.
    """
    _check_contiguous(k_inputs=k_inputs, v_inputs=v_inputs, g_inputs=g_inputs, beta_inputs=beta_inputs)
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    rows, chunk_size = slots.shape[0], k_inputs.shape[1]
    keep_kernel[(rows * triton.cdiv(chunk_size, BLOCK_T) * (key_heads + heads + 1),)](
        k, v, g, beta, k_inputs, v_inputs, g_inputs, beta_inputs, slots, tail_starts, query_start_loc,
        *k.stride(), *v.stride(), *g.stride(), *beta.stride(),
        k_inputs.stride(0), v_inputs.stride(0), g_inputs.stride(0), beta_inputs.stride(0),
        KEY_HEADS=key_heads, VALUE_HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        CHUNK=chunk_size, **block_sizes(1, heads, key_dim, value_dim),
        num_warps=NUM_WARPS,
    )  # fmt: skip


def fuses(dtype: torch.dtype) -> bool:
    """Whether inputs of `dtype` go through `delta_replay_output`; others take all stages of the scan."""
    return dtype.itemsize == 2


def block_sizes(tokens: int, heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """A program's tile: BLOCK_T tokens of one head, or of the gates of all heads."""
    return {
        "BLOCK_T": BLOCK_T,
        "BLOCK_K": triton.next_power_of_2(key_dim),
        "BLOCK_V": triton.next_power_of_2(value_dim),
        "BLOCK_H": triton.next_power_of_2(heads),
        "BLOCK_NEW": triton.next_power_of_2(tokens),
    }


def _check_contiguous(**inputs: Tensor) -> None:
    for name, tensor in inputs.items():
        if not tensor[:1].is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()}; accepted: contiguous inputs of any slot stride"
            )


@triton.jit
def gather_kernel(
    # Pointers
    q, k, v, g, beta, k_inputs, v_inputs, g_inputs, beta_inputs,
    q_chunks, k_chunks, v_chunks, g_chunks, beta_chunks, cuts, places,
    slots, starts, lengths,
    # Strides
    q_row_stride, q_token_stride, q_head_stride, q_dim_stride,
    k_row_stride, k_token_stride, k_head_stride, k_dim_stride,
    v_row_stride, v_token_stride, v_head_stride, v_dim_stride,
    g_row_stride, g_token_stride, g_head_stride,
    beta_row_stride, beta_token_stride, beta_head_stride,
    k_slot_stride: tl.int64, v_slot_stride: tl.int64, g_slot_stride: tl.int64, beta_slot_stride: tl.int64,
    # Meta-parameters
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_NEW: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """A program has a row, BLOCK_T of its chunk, and one head of q, of k or of v, or the gates.

    Stores the row's new tokens among its inputs, and its inputs up to them, then zeros, as its chunk. What is
    loaded and what is stored among the inputs lie at different positions. Where FUSED, keys and queries are
    normalised, values stay where they are kept, and queries are those of the new tokens only.
    """
    PARTS: tl.constexpr = 2 * KEY_HEADS + VALUE_HEADS + 1
    BLOCKS: tl.constexpr = (CHUNK + BLOCK_T - 1) // BLOCK_T
    part = tl.program_id(0) % PARTS
    block = tl.program_id(0) // PARTS % BLOCKS
    row = (tl.program_id(0) // (PARTS * BLOCKS)).to(tl.int64)
    slot = tl.load(slots + row)
    start = tl.load(starts + row) % CHUNK
    length = tl.load(lengths + row)

    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    in_chunk = token < CHUNK
    fresh = token - start  # the number of a new token
    is_old = (slot >= 0) & (fresh < 0)
    is_new = (slot >= 0) & in_chunk & (fresh >= 0) & (fresh < length)
    chunk_token = row * CHUNK + token
    if part < KEY_HEADS:
        n = tl.arange(0, BLOCK_K)
        in_head = (n < KEY_DIM)[None, :]
        at = q + row * q_row_stride + part * q_head_stride + n[None, :] * q_dim_stride
        value = tl.load(at + fresh[:, None] * q_token_stride, mask=is_new[:, None] & in_head, other=0.0)
        if FUSED:
            value = normalised(value)
            into = q_chunks + part * KEY_DIM + (row * TOKENS + fresh)[:, None] * (KEY_HEADS * KEY_DIM)
            tl.store(into + n[None, :], value.to(q_chunks.dtype.element_ty), mask=is_new[:, None] & in_head)
        else:
            into = q_chunks + part * KEY_DIM + chunk_token[:, None] * (KEY_HEADS * KEY_DIM) + n[None, :]
            tl.store(into, value, mask=in_chunk[:, None] & in_head)
    elif part < 2 * KEY_HEADS:
        head = part - KEY_HEADS
        _gather(
            k + row * k_row_stride + head * k_head_stride, k_inputs + slot * k_slot_stride + head * KEY_DIM,
            k_chunks + head * KEY_DIM, token, fresh, chunk_token, is_old, is_new, in_chunk,
            k_token_stride, k_dim_stride, KEY_HEADS * KEY_DIM, KEY_DIM, BLOCK_K, FUSED, True,
        )  # fmt: skip
    elif part < 2 * KEY_HEADS + VALUE_HEADS:
        head = part - 2 * KEY_HEADS
        _gather(
            v + row * v_row_stride + head * v_head_stride, v_inputs + slot * v_slot_stride + head * VALUE_DIM,
            v_chunks + head * VALUE_DIM, token, fresh, chunk_token, is_old, is_new, in_chunk,
            v_token_stride, v_dim_stride, VALUE_HEADS * VALUE_DIM, VALUE_DIM, BLOCK_V, False, not FUSED,
        )  # fmt: skip
    else:
        _gather(
            g + row * g_row_stride, g_inputs + slot * g_slot_stride, g_chunks,
            token, fresh, chunk_token, is_old, is_new, in_chunk,
            g_token_stride, g_head_stride, VALUE_HEADS, VALUE_HEADS, BLOCK_H, False, True,
        )  # fmt: skip
        _gather(
            beta + row * beta_row_stride, beta_inputs + slot * beta_slot_stride, beta_chunks,
            token, fresh, chunk_token, is_old, is_new, in_chunk,
            beta_token_stride, beta_head_stride, VALUE_HEADS, VALUE_HEADS, BLOCK_H, False, True,
        )  # fmt: skip
        if block == 0:
            ends = tl.arange(0, 2)
            tl.store(cuts + row + ends, (row + ends) * CHUNK)  # neighbours store one number twice
            if FUSED:
                tl.store(places + row, row)  # as two int32: chunk 0 of sequence `row`
            else:
                new = tl.arange(0, BLOCK_NEW)
                place = row * CHUNK + tl.minimum(start + new, CHUNK - 1)  # padding may lie behind the chunk
                tl.store(places + row * TOKENS + new, place, mask=new < TOKENS)


@triton.jit
def _gather(
    step, inputs, chunks, token, fresh, chunk_token, is_old, is_new, in_chunk,
    token_stride, dim_stride, WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    NORMALISED: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """DIM numbers of each token of a tile; WIDTH of them are one token of the inputs and of the chunks."""
    n = tl.arange(0, BLOCK)
    in_head = (n < DIM)[None, :]
    kept = inputs + token[:, None] * WIDTH + n[None, :]
    of_step = step + fresh[:, None] * token_stride + n[None, :] * dim_stride
    new = tl.load(of_step, mask=is_new[:, None] & in_head, other=0.0)
    tl.store(kept, new.to(inputs.dtype.element_ty), mask=is_new[:, None] & in_head)
    if GATHERED:
        old = tl.load(kept, mask=is_old[:, None] & in_head, other=0.0)
        value = tl.where(is_new[:, None], new, old.to(step.dtype.element_ty))
        if NORMALISED:
            value = normalised(value).to(chunks.dtype.element_ty)
        tl.store(chunks + chunk_token[:, None] * WIDTH + n[None, :], value, mask=in_chunk[:, None] & in_head)


@triton.jit
def keep_kernel(
    # Pointers
    k, v, g, beta, k_inputs, v_inputs, g_inputs, beta_inputs, slots, tail_starts, query_start_loc,
    # Strides
    k_token_stride, k_head_stride, k_dim_stride,
    v_token_stride, v_head_stride, v_dim_stride,
    g_token_stride, g_head_stride,
    beta_token_stride, beta_head_stride,
    k_slot_stride: tl.int64, v_slot_stride: tl.int64, g_slot_stride: tl.int64, beta_slot_stride: tl.int64,
    # Meta-parameters
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_NEW: tl.constexpr,
):  # fmt: skip
    """A program has a row, BLOCK_T of its tail, and one head of k or of v, or the gates."""
    PARTS: tl.constexpr = KEY_HEADS + VALUE_HEADS + 1
    BLOCKS: tl.constexpr = (CHUNK + BLOCK_T - 1) // BLOCK_T
    part = tl.program_id(0) % PARTS
    block = tl.program_id(0) // PARTS % BLOCKS
    row = tl.program_id(0) // (PARTS * BLOCKS)
    slot = tl.load(slots + row)
    if slot >= 0:
        first = tl.load(tail_starts + row).to(tl.int64)
        length = tl.load(query_start_loc + row + 1) - first
        token = block * BLOCK_T + tl.arange(0, BLOCK_T)
        real = (token < CHUNK) & (token < length)
        if part < KEY_HEADS:
            _keep(
                k + first * k_token_stride + part * k_head_stride,
                k_inputs + slot * k_slot_stride + part * KEY_DIM,
                token, real, k_token_stride, k_dim_stride, KEY_HEADS * KEY_DIM, KEY_DIM, BLOCK_K,
            )  # fmt: skip
        elif part < KEY_HEADS + VALUE_HEADS:
            head = part - KEY_HEADS
            _keep(
                v + first * v_token_stride + head * v_head_stride,
                v_inputs + slot * v_slot_stride + head * VALUE_DIM,
                token, real, v_token_stride, v_dim_stride, VALUE_HEADS * VALUE_DIM, VALUE_DIM, BLOCK_V,
            )  # fmt: skip
        else:
            _keep(
                g + first * g_token_stride, g_inputs + slot * g_slot_stride,
                token, real, g_token_stride, g_head_stride, VALUE_HEADS, VALUE_HEADS, BLOCK_H,
            )  # fmt: skip
            _keep(
                beta + first * beta_token_stride, beta_inputs + slot * beta_slot_stride,
                token, real, beta_token_stride, beta_head_stride, VALUE_HEADS, VALUE_HEADS, BLOCK_H,
            )  # fmt: skip


@triton.jit
def _keep(
    packed, inputs, token, real, token_stride, dim_stride,
    WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK)
    mask = real[:, None] & (n < DIM)[None, :]
    raw = tl.load(packed + token[:, None] * token_stride + n[None, :] * dim_stride, mask=mask, other=0.0)
    tl.store(inputs + token[:, None] * WIDTH + n[None, :], raw.to(inputs.dtype.element_ty), mask=mask)
