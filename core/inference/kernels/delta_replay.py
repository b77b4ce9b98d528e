"""The gated delta rule of decode by replay in Triton; the reference is `reference.delta`.

A request keeps its state at the last grid point, and the inputs of the tokens since. A step gathers each
row's chunk, whose later tokens are zeros, and computes what `gated_delta_rule_scan` computes of it. A row of
a chunk depends on earlier rows only, so that the new tokens' outputs have the bits of a prefill.

    stage                                       function
    inputs since the grid point                 gather_kernel
    sums of decays, the triangular system       delta.solved_chunks, fla-core's stages
    outputs, the state after a complete chunk   delta_replay_output

`delta_replay_output` does in one launch what the WY form's products, `delta_state_passing` and fla-core's
`chunk_fwd_o` do for a whole chunk, with their operands, roundings and orders of addition. Float32 uses the
scan itself after the first stage.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .delta import gated_delta_rule_scan, normalised, solved_chunks
from .state_tensors import check_slots
from .tiles import keep_tails

OUTPUT_WARPS, OUTPUT_STAGES = 4, 2


def delta_replay_output(
    queries: Tensor, keys: Tensor, v_inputs: Tensor, strength: Tensor, log_decays: Tensor,
    inverse: Tensor, states: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor, sources: Tensor,
    destinations: Tensor, tokens: int,
) -> Tensor:  # fmt: skip
    """o of each row's tokens from its chunk's keys and values, and the state at the chunk's start.

    Args:
        queries: [rows * tokens, Hk, Dk] normalised. keys: [rows * chunk_size, Hk, Dk] normalised, zeros after
            a row's tokens. Both contiguous, of the dtype of v_inputs.
        strength: [rows * chunk_size, Hv] beta. log_decays, inverse: of the same tokens, from `solved_chunks`.
        tokens: T, a row's tokens with padding. Other arguments: as for `gated_delta_rule_replay`.

    Returns: o, [rows, T, Hv, Dv] in the dtype of v_inputs; unspecified for padding.
    """
    rows, chunk_size, heads, value_dim = slots.shape[0], *v_inputs.shape[1:]
    key_heads, key_dim = keys.shape[1:]
    out = torch.empty(rows, tokens, heads, value_dim, dtype=v_inputs.dtype, device=v_inputs.device)
    blocks = output_blocks(tokens, key_dim, value_dim)
    grid = (triton.cdiv(value_dim, blocks["BLOCK_V"]) * heads * rows,)
    delta_replay_output_kernel[grid](
        queries, keys, v_inputs, strength, log_decays, inverse, states, out,
        slots, starts, lengths, sources, destinations,
        v_inputs.stride(0), states.stride(0), key_dim**-0.5,
        tokens, heads, heads // key_heads, key_dim, value_dim, chunk_size,
        **blocks, num_warps=OUTPUT_WARPS, num_stages=OUTPUT_STAGES,
    )  # fmt: skip
    return out


def output_blocks(tokens: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Tile sizes. The number of rows has no say, so that other rows change no bits.

    Keys take two turns or more, up to 32 numbers by 16. In one turn the compiler would leave no loop, and
    then ptxas of CUDA 12.8 gives products of some sizes another variable for the address of their factor.
    """
    return {
        "BLOCK_Q": max(16, triton.next_power_of_2(tokens)),
        "BLOCK_K": 16 if key_dim <= 32 else 32,
        "BLOCK_V": max(16, min(64, triton.next_power_of_2(value_dim))),
    }


@triton.jit
def delta_replay_output_kernel(
    # Pointers
    queries, keys, v_inputs, strength, log_decays, inverse, states, out,
    slots, starts, lengths, sources, destinations,
    # Strides
    v_slot_stride: tl.int64, slot_stride: tl.int64,
    # Dimensions
    scale,
    tokens: tl.constexpr, heads: tl.constexpr, heads_of_key: tl.constexpr,
    key_dim: tl.constexpr, value_dim: tl.constexpr, chunk_size: tl.constexpr,
    # Meta-parameters
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program has a row, a value head and BLOCK_V of Dv. No other program touches this part of a state."""
    v_blocks: tl.constexpr = (value_dim + BLOCK_V - 1) // BLOCK_V
    key_heads: tl.constexpr = heads // heads_of_key
    operand: tl.constexpr = keys.dtype.element_ty
    head = tl.program_id(0) // v_blocks % heads
    row = (tl.program_id(0) // (v_blocks * heads)).to(tl.int64)
    p = tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    in_value = (p < value_dim)[None, :]

    slot = tl.load(slots + row)
    if slot >= 0:
        start = tl.load(starts + row) % chunk_size
        length = tl.load(lengths + row)
        source = tl.load(sources + row)
        destination = tl.load(destinations + row)
        t = tl.arange(0, chunk_size)
        chunk_token = row * chunk_size + t
        real = t < start + length
        new = tl.arange(0, BLOCK_Q)
        is_new = new < length

        decay = tl.load(log_decays + chunk_token * heads + head)
        beta = tl.load(strength + chunk_token * heads + head)
        of_pair = (chunk_token[:, None] * heads + head) * chunk_size + t[None, :]
        solved = tl.where(t[:, None] >= t[None, :], tl.load(inverse + of_pair), 0.0)
        own = v_inputs + slot * v_slot_stride + head * value_dim
        v = tl.load(
            own + t[:, None] * (heads * value_dim) + p[None, :], mask=real[:, None] & in_value, other=0.0
        )
        written = tl.dot(solved, (v * beta[:, None]).to(operand), allow_tf32=False).to(operand)

        held = tl.zeros((chunk_size, BLOCK_V), dtype=tl.float32)
        o = tl.zeros((BLOCK_Q, BLOCK_V), dtype=tl.float32)
        scores = tl.zeros((BLOCK_Q, chunk_size), dtype=tl.float32)
        of_key = head // heads_of_key * key_dim
        of_state = states + head * (key_dim * value_dim)
        key_end: tl.constexpr = max(key_dim, 2 * BLOCK_K)  # `output_blocks` says why there are two turns
        for first in range(0, key_end, BLOCK_K):
            n = first + tl.arange(0, BLOCK_K)
            in_key = (n < key_dim)[None, :]
            key = tl.load(
                keys + of_key + chunk_token[:, None] * (key_heads * key_dim) + n[None, :],
                mask=in_key,
                other=0.0,
            )
            query = tl.load(
                queries + of_key + (row * tokens + new)[:, None] * (key_heads * key_dim) + n[None, :],
                mask=is_new[:, None] & in_key,
                other=0.0,
            )
            scaled = key * beta[:, None]
            scaled = scaled * tl.exp2(decay)[:, None]
            read_key = tl.dot(solved, scaled.to(operand)).to(operand)
            state = tl.load(
                of_state + source * slot_stride + n[:, None] * value_dim + p[None, :],
                mask=(n < key_dim)[:, None] & in_value & (source >= 0),
                other=0.0,
            )
            state = state.to(tl.float32).to(operand)
            held = tl.dot(read_key, state, held)
            o = tl.dot(query, state, o)
            scores = tl.dot(query, tl.trans(key), scores)
        value = written.to(tl.float32) - held

        at = start + new
        decay_of_new = tl.load(
            log_decays + (row * chunk_size + at) * heads + head, mask=is_new & (at < chunk_size), other=0.0
        )
        o = o * tl.exp2(decay_of_new)[:, None]
        scores = scores * tl.exp2(decay_of_new[:, None] - decay[None, :])
        scores = tl.where(is_new[:, None] & (at[:, None] >= t[None, :]), scores, 0.0)
        o = o * scale + tl.dot(scores.to(operand), value.to(operand)) * scale
        of_out = ((row * tokens + new)[:, None] * heads + head) * value_dim + p[None, :]
        tl.store(out + of_out, o.to(operand), mask=is_new[:, None] & in_value)

        if destination >= 0:
            decay_of_chunk = tl.load(log_decays + (row * chunk_size + chunk_size - 1) * heads + head)
            value *= tl.exp2(decay_of_chunk - decay)[:, None]
            for first in range(0, key_dim, BLOCK_K):
                n = first + tl.arange(0, BLOCK_K)
                in_state = (n < key_dim)[:, None] & in_value
                of_part = of_state + n[:, None] * value_dim + p[None, :]
                after = tl.load(of_part + source * slot_stride, mask=in_state & (source >= 0), other=0.0)
                after = after.to(tl.float32) * tl.exp2(decay_of_chunk)
                key = tl.load(
                    keys + of_key + n[:, None] + chunk_token[None, :] * (key_heads * key_dim),
                    mask=(n < key_dim)[:, None],
                    other=0.0,
                )
                after = tl.dot(key, value.to(operand), after)
                tl.debug_barrier()  # a thread may overwrite what another thread has read
                tl.store(
                    of_part + destination * slot_stride, after.to(states.dtype.element_ty), mask=in_state
                )


BLOCK_T, NUM_WARPS = 32, 4


def gated_delta_rule_replay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, k_inputs: Tensor,
    v_inputs: Tensor, g_inputs: Tensor, beta_inputs: Tensor, slots: Tensor, starts: Tensor,
    lengths: Tensor, sources: Tensor, destinations: Tensor, chunk_size: int,
) -> Tensor:  # fmt: skip
    """As `reference.delta.gated_delta_rule_replay`: the scan of the tokens since each row's last grid point.

    Inputs of 16 bits cost four or five launches, and memory sees a row's state, the inputs of its chunk and
    the triangular system of each value head. Inputs of float32 cost the scan of rows * chunk_size tokens.
    Launches depend on shapes alone, and nothing synchronises after a first call, as `gated_delta_rule_scan`
    says. Tokens have any strides, pools are contiguous in each slot. A destination may be the row's own
    source, no other row's.

    Raises:
        ImportError: fla-core is not installed.
        ValueError: inputs are not contiguous.
    """
    check_slots(k_inputs=k_inputs, v_inputs=v_inputs, g_inputs=g_inputs, beta_inputs=beta_inputs)
    rows, tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
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
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, k_inputs: Tensor, v_inputs: Tensor, g_inputs: Tensor,
    beta_inputs: Tensor, slots: Tensor, tail_starts: Tensor, query_start_loc: Tensor,
) -> None:  # fmt: skip
    """As `reference.delta.keep_delta_inputs`, in two launches, whose grids depend on shapes alone. Does not
    synchronise.

    Raises:
        ValueError: a last stride is not 1, or inputs are not contiguous.
    """
    rows = slots, tail_starts, query_start_loc
    keep_tails(k, k_inputs, v, v_inputs, *rows)
    keep_tails(g[:, None], g_inputs, beta[:, None], beta_inputs, *rows)


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

    Stores the row's new tokens among its inputs, and its inputs up to them, then zeros, as its chunk. Where
    FUSED, keys and queries are normalised, values stay where they are kept, and queries are those of the new
    tokens only.
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
                place = row * CHUNK + tl.minimum(start + new, CHUNK - 1)  # padding may lie after the chunk
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
