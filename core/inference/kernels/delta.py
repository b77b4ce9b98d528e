"""The gated delta rule of a step in Triton, by pool slots; the reference is `torch_delta`.

    stage of a prefill                     function
    normalised keys and queries            delta_operands
    sums of decays                         fla-core's chunk_local_cumsum
    the WY form of a chunk, 16-bit floats  fla-core's chunk_gated_delta_rule_fwd_intra
    the WY form of a chunk, float32        fla-core's chunk_scaled_dot_kkt_fwd, solve_tril, recompute_w_u_fwd
    between chunks                         delta_state_passing
    outputs                                fla-core's chunk_fwd_o

fla-core's stages cut each packed sequence into chunks from its start. Here each chunk is passed as a sequence
of its own, and so it is its own only chunk. fla-core's faster stage for the WY form multiplies in TF32, whose
errors are 1e-3; float32 therefore uses the three other stages. Their products name no precision, and take
Triton's default, which the variable TRITON_F32_DEFAULT replaces. Importing this file sets it to "ieee",
unless it is set.
"""

import os
import warnings
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .dtypes_and_strides import check_slots
from .step_rows import ScanRows
from .tiles import any_index, load_tile

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

OPERAND_TOKENS, OPERAND_WARPS = 32, 4


def delta_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised q and k, and v, all contiguous and in the dtype of v, from views with any strides."""
    tokens, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    queries, keys = (torch.empty(k.shape, dtype=v.dtype, device=v.device) for _ in range(2))
    values = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    heads = 2 * key_heads + value_heads
    delta_operands_kernel[(ceil_div(tokens, OPERAND_TOKENS) * heads,)](
        q, k, v, queries, keys, values, tokens, *q.stride(), *k.stride(), *v.stride(),
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=triton.next_power_of_2(value_dim),
        BLOCK_T=OPERAND_TOKENS, num_warps=OPERAND_WARPS,
    )  # fmt: skip
    return queries, keys, values


@triton.jit(do_not_specialize=["tokens"])
def delta_operands_kernel(
    # Pointers
    q, k, v, queries, keys, values,
    # Dimensions
    tokens,
    # Strides
    q_token_stride, q_head_stride, q_dim_stride,
    k_token_stride, k_head_stride, k_dim_stride,
    v_token_stride, v_head_stride, v_dim_stride,
    # Meta-parameters
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_T tokens of one head of q, of k or of v."""
    HEADS: tl.constexpr = 2 * KEY_HEADS + VALUE_HEADS
    head = tl.program_id(0) % HEADS
    token = (tl.program_id(0) // HEADS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    if head < KEY_HEADS:
        _normalise(
            q + head * q_head_stride, queries + head * KEY_DIM, token, tokens,
            q_token_stride, q_dim_stride, KEY_HEADS * KEY_DIM, KEY_DIM, BLOCK_K,
        )  # fmt: skip
    elif head < 2 * KEY_HEADS:
        head -= KEY_HEADS
        _normalise(
            k + head * k_head_stride, keys + head * KEY_DIM, token, tokens,
            k_token_stride, k_dim_stride, KEY_HEADS * KEY_DIM, KEY_DIM, BLOCK_K,
        )  # fmt: skip
    else:
        head -= 2 * KEY_HEADS
        p = tl.arange(0, BLOCK_V)
        inside = (token < tokens)[:, None] & (p < VALUE_DIM)[None, :]
        raw = v + head * v_head_stride + token[:, None] * v_token_stride + p[None, :] * v_dim_stride
        packed = values + head * VALUE_DIM + token[:, None] * (VALUE_HEADS * VALUE_DIM) + p[None, :]
        tl.store(packed, tl.load(raw, mask=inside, other=0.0), mask=inside)


@triton.jit
def _normalise(
    raw, packed, token, tokens, token_stride, dim_stride,
    packed_token_stride: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (n < DIM)[None, :]
    x = tl.load(raw + token[:, None] * token_stride + n[None, :] * dim_stride, mask=inside, other=0.0)
    place = packed + token[:, None] * packed_token_stride + n[None, :]
    tl.store(place, normalised(x).to(packed.dtype.element_ty), mask=inside)


@triton.jit
def normalised(x):
    """Each row of a tile, in float32. A row's bits depend on the tile's shape and on the number of warps."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


PASSING_WARPS = 4


def delta_state_passing(
    keys: Tensor, read_keys: Tensor, written: Tensor, log_decays: Tensor, states: Tensor, rows: ScanRows,
    new_v: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """leaving = decay * entering + keys^T decayed (written - read_keys entering), over each row's chunks.

    `read_keys` and `written` are the parts of the WY form, `log_decays` sums of the decays' binary logarithms
    from each chunk's start. The state is float32; products multiply numbers of the dtype of `keys`, float32
    in three TF32 products. A row without chunks copies its source bit for bit. Returns the states that enter
    the chunks, [chunks, Hv, Dk, Dv], and the new values of tokens, in `new_v` where there is one.
    """
    check_slots(states=states)
    heads, key_dim, value_dim = states.shape[1:]
    chunks = rows.cu_chunk_seqlens.shape[0] - 1
    entering = keys.new_empty(chunks, heads, key_dim, value_dim)
    new_values = torch.empty_like(written) if new_v is None else new_v
    blocks, num_stages = passing_blocks(key_dim, value_dim, keys.dtype)
    grid = (ceil_div(value_dim, blocks["BLOCK_V"]) * heads * rows.sources.shape[0],)
    delta_state_passing_kernel[grid](
        keys, read_keys, written, log_decays, states, entering, new_values,
        rows.sources, rows.destinations, rows.cu_chunk_seqlens, rows.row_chunk_starts,
        rows.chunk_destinations,
        states.stride(0),
        heads, heads // keys.shape[1], key_dim, value_dim, rows.chunk_size,
        **blocks, num_warps=PASSING_WARPS, num_stages=num_stages,
    )  # fmt: skip
    return entering, new_values


def passing_blocks(key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Tile sizes and pipeline stages. The number of rows has no say, so that other rows change no bits."""
    wide = dtype == torch.float32
    blocks = {
        "BLOCK_K": max(16, triton.next_power_of_2(key_dim)),
        "BLOCK_V": max(16, min(32, triton.next_power_of_2(value_dim))),
        "SLICE": 16 if wide else 0,
    }
    # Five stages would leave room for one program on a multiprocessor of an H100; three leave it for two.
    return blocks, 1 if wide else 3


@triton.jit
def delta_state_passing_kernel(
    # Pointers
    keys, read_keys, written, log_decays, states, entering, new_values, sources, destinations,
    cu_chunk_seqlens, row_chunk_starts, chunk_destinations,
    # Strides
    slot_stride: tl.int64,
    # Dimensions
    heads: tl.constexpr, heads_of_key: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk_size: tl.constexpr,
    # Meta-parameters
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
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
    """Store one chunk's entering state and new values; returns the state after it.

    With SLICE, products go over so many keys or tokens at once, read back from what was just stored: float32
    operands of a whole product do not fit the registers.
    """
    operand: tl.constexpr = keys.dtype.element_ty
    n = tl.arange(0, BLOCK_K)
    token = start + tl.arange(0, chunk_size)
    real = token < end
    state_offsets = n[:, None] * value_dim + p[None, :]
    value_offsets = token[:, None] * (heads * value_dim) + p[None, :]
    in_state = (n < key_dim)[:, None] & (p < value_dim)[None, :]
    in_value = real[:, None] & (p < value_dim)[None, :]

    rounded = state.to(operand)
    tl.store(entering + state_offsets, rounded, mask=in_state)
    decay = tl.load(log_decays + token * heads, mask=real, other=0.0)
    decay_of_chunk = tl.load(log_decays + (end - 1) * heads)
    written_value = tl.load(written + value_offsets, mask=in_value, other=0.0).to(tl.float32)
    state *= tl.exp2(decay_of_chunk)
    if SLICE == 0:
        key_offsets = token[:, None] * (heads * key_dim) + n[None, :]
        read_key = tl.load(read_keys + key_offsets, mask=real[:, None] & (n < key_dim)[None, :], other=0.0)
        value = written_value - tl.dot(read_key, rounded)
        tl.store(new_values + value_offsets, value.to(operand), mask=in_value)
        key = load_tile(keys + n[:, None] + token[None, :] * (key_heads * key_dim), n < key_dim, real)
        value *= tl.where(real, tl.exp2(decay_of_chunk - decay), 0.0)[:, None]
        state = tl.dot(key, value.to(operand), state)
    else:
        tl.debug_barrier()  # below, a thread reads what another thread has stored above
        read_value = tl.zeros((chunk_size, BLOCK_V), dtype=tl.float32)
        for first_n in range(0, key_dim, SLICE):
            d = first_n + tl.arange(0, SLICE)
            read_key_ptrs = read_keys + token[:, None] * (heads * key_dim) + d[None, :]
            read_key = load_tile(read_key_ptrs, real, d < key_dim)
            part = load_tile(entering + d[:, None] * value_dim + p[None, :], d < key_dim, p < value_dim)
            read_value = tl.dot(read_key, part, read_value, input_precision="tf32x3")
        tl.store(new_values + value_offsets, written_value - read_value, mask=in_value)
        tl.debug_barrier()  # as above
        for first_token in range(0, chunk_size, SLICE):
            part_token = start + first_token + tl.arange(0, SLICE)
            is_real = part_token < end
            value_ptrs = new_values + part_token[:, None] * (heads * value_dim) + p[None, :]
            value = load_tile(value_ptrs, is_real, p < value_dim)
            part_decay = tl.load(log_decays + part_token * heads, mask=is_real, other=0.0)
            value *= tl.where(is_real, tl.exp2(decay_of_chunk - part_decay), 0.0)[:, None]
            key_ptrs = keys + n[:, None] + part_token[None, :] * (key_heads * key_dim)
            key = load_tile(key_ptrs, n < key_dim, is_real)
            state = tl.dot(key, value, state, input_precision="tf32x3")
    return state


UPDATE_WARPS = 4
_TILE_ELEMENTS = 4096  # 32 a thread: eight loads of 16 bytes in flight in float32


def gated_delta_rule_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, sources: Tensor,
    destinations: Tensor,
) -> Tensor:  # fmt: skip
    """As `torch_delta.gated_delta_rule_update`; the state stays in float32 between a call's tokens."""
    rows, tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    out = torch.empty(rows, tokens, heads, value_dim, dtype=v.dtype, device=v.device)
    block_k, block_v = update_blocks(key_dim, value_dim)
    delta_update_kernel[(rows * heads * ceil_div(value_dim, block_v),)](
        q, k, v, g, beta, states, out, sources, destinations,
        *q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(),
        *states.stride(), *destinations.stride(),
        TOKENS=tokens, HEADS=heads, HEADS_OF_KEY=heads // key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=block_k, BLOCK_V=block_v, num_warps=UPDATE_WARPS, num_stages=1,
    )  # fmt: skip
    return out


def update_blocks(key_dim: int, value_dim: int) -> tuple[int, int]:
    """A program's tile, in Dk and in Dv. The number of rows has no say, so that other rows change no bits."""
    block_k = triton.next_power_of_2(key_dim)
    return block_k, min(triton.next_power_of_2(value_dim), max(1, _TILE_ELEMENTS // block_k))


@triton.jit
def delta_update_kernel(
    # Pointers
    q, k, v, g, beta, states, out, sources, destinations,
    # Strides
    q_row_stride, q_token_stride, q_head_stride, q_dim_stride,
    k_row_stride, k_token_stride, k_head_stride, k_dim_stride,
    v_row_stride, v_token_stride, v_head_stride, v_dim_stride,
    g_row_stride, g_token_stride, g_head_stride,
    beta_row_stride, beta_token_stride, beta_head_stride,
    slot_stride, head_stride, key_stride, value_stride,
    destination_row_stride, destination_token_stride,
    # Meta-parameters
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HEADS_OF_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program has a row, a value head and BLOCK_V of Dv. Padding costs 1 + TOKENS scalar loads."""
    V_BLOCKS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    n = tl.arange(0, BLOCK_K)
    p = tl.program_id(0) % V_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(0) // V_BLOCKS % HEADS
    row = (tl.program_id(0) // (V_BLOCKS * HEADS)).to(tl.int64)
    key_head = head // HEADS_OF_KEY

    q += row * q_row_stride + key_head * q_head_stride + n * q_dim_stride
    k += row * k_row_stride + key_head * k_head_stride + n * k_dim_stride
    v += row * v_row_stride + head * v_head_stride + p * v_dim_stride
    g += row * g_row_stride + head * g_head_stride
    beta += row * beta_row_stride + head * beta_head_stride
    out += (row * TOKENS * HEADS + head) * VALUE_DIM + p
    within = n[:, None] * key_stride + p[None, :] * value_stride
    states += head.to(tl.int64) * head_stride
    destinations += row * destination_row_stride

    source = tl.load(sources + row)
    if any_index(source, destinations, destination_token_stride, TOKENS) >= 0:
        inside = (n < KEY_DIM)[:, None] & (p < VALUE_DIM)[None, :]
        state = tl.load(states + source * slot_stride + within, mask=inside & (source >= 0), other=0.0)
        state = state.to(tl.float32)
        tl.debug_barrier()  # below, a thread may overwrite what another thread has read above
        for token in tl.static_range(TOKENS):
            key = tl.load(k + token * k_token_stride, mask=n < KEY_DIM, other=0.0).to(tl.float32)
            query = tl.load(q + token * q_token_stride, mask=n < KEY_DIM, other=0.0).to(tl.float32)
            value = tl.load(v + token * v_token_stride, mask=p < VALUE_DIM, other=0.0).to(tl.float32)
            decay = tl.exp(tl.load(g + token * g_token_stride).to(tl.float32))
            strength = tl.load(beta + token * beta_token_stride).to(tl.float32)
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
            query *= tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6) * (KEY_DIM**-0.5)

            state *= decay
            read_value = tl.sum(state * key[:, None], axis=0)
            new_value = strength * (value - read_value)
            state += key[:, None] * new_value[None, :]
            o = tl.sum(state * query[:, None], axis=0)
            tl.store(out + token * HEADS * VALUE_DIM, o.to(out.dtype.element_ty), mask=p < VALUE_DIM)
            destination = tl.load(destinations + token * destination_token_stride)
            if destination >= 0:
                place = states + destination * slot_stride + within
                tl.store(place, state.to(states.dtype.element_ty), mask=inside)


CHUNK_SIZES = (16, 32, 64)  # chunk sizes that fla-core's stages take
MAX_KEY_DIM = 256
_NUM_WARPS_THAT_ADD = 2
_LOG2_E = 1.4426950408889634


def gated_delta_rule_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, rows: ScanRows,
    new_v: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `torch_delta.gated_delta_rule_scan`, in at most eight launches, without a copy of a state.

    Products multiply numbers of the dtype of v, float32 exactly or in three TF32 products. The same inputs
    and cuts give the same bits whichever rows share the batch and, in a float32 pool, however the cuts are
    spread over calls. A CUDA graph can capture a call after one with the same shapes: the first call for a
    chunk size, Hk, Hv, Dk, Dv and dtype times fla-core's stages for its number of chunks, and synchronises.
    """
    queries, keys, values = delta_operands(q, k, v)
    return scan_chunks(queries, keys, values, g.contiguous(), beta.contiguous(), states, rows, new_v)


def scan_chunks(
    queries: Tensor, keys: Tensor, values: Tensor, g: Tensor, beta: Tensor, states: Tensor, rows: ScanRows,
    new_v: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gated_delta_rule_scan` of normalised queries and keys, all contiguous."""
    fla, num_chunks = stages(), rows.cu_chunk_seqlens.shape[0] - 1
    # Chunk i is chunk 0 of sequence i. A little-endian int64 i is the pair (i, 0) of int32.
    pairs = torch.arange(num_chunks, device=values.device).view(torch.int32).view(num_chunks, 2)
    cuts: dict[str, Any] = {"cu_seqlens": rows.cu_chunk_seqlens, "chunk_indices": pairs}
    chunks = cuts | {"chunk_size": rows.chunk_size}

    queries, keys, values, strength = (x[None] for x in (queries, keys, values, beta))
    log_decays = fla.chunk_local_cumsum(g[None], scale=_LOG2_E, **chunks)
    if values.dtype == torch.float32:
        wide = {"output_dtype": torch.float32}
        coupling = fla.chunk_scaled_dot_kkt_fwd(keys, log_decays, strength, **wide, **chunks)
        inverse = fla.solve_tril(coupling, **wide, **cuts)
        read_keys, written = fla.recompute_w_u_fwd(keys, values, strength, inverse, log_decays, **cuts)
    else:
        wy_form = fla.chunk_gated_delta_rule_fwd_intra(keys, values, log_decays, strength, **chunks)
        read_keys, written, _ = wy_form
    packed = keys[0], read_keys[0], written[0], log_decays[0]
    entering, new_values = delta_state_passing(*packed, states, rows, new_v)
    o: Tensor = fla.chunk_fwd_o(
        queries, keys, new_values[None], entering[None], log_decays, scale=keys.shape[-1] ** -0.5, **chunks
    )
    return o[0]


def check_sizes(chunk_size: int, key_dim: int) -> None:
    """Raise a ValueError where fla-core's stages do not take these sizes."""
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size is {chunk_size}; accepted on a GPU: {CHUNK_SIZES}")
    if key_dim > MAX_KEY_DIM:
        raise ValueError(f"keys have {key_dim} numbers; accepted on a GPU: at most {MAX_KEY_DIM}")


def fix_orders_of_addition() -> None:
    """Restrict fla-core's tuner, for the whole process, to one order of addition: processes agree in bits.

    Where a stage adds numbers of several threads, the number of warps is an order of addition; tiles of
    products are none, because their sums go over K in order. Raises an ImportError where fla-core is missing,
    a RuntimeError where none of its configurations has that number of warps.
    """
    for kernel in stages().kernels_that_add:
        tuner = kernel.fn
        if len(tuner.configs) == 1:
            continue
        fixed = [
            config
            for config in tuner.configs
            if config.num_warps == _NUM_WARPS_THAT_ADD
            and config.kwargs.get("DOT_PRECISION", "ieee") == "ieee"
        ]
        if not fixed:
            raise RuntimeError(
                f"fla-core's {tuner.base_fn.__name__} has no configuration of {_NUM_WARPS_THAT_ADD} warps; "
                "install fla-core 0.6"
            )
        if len(fixed) < len(tuner.configs):
            tuner.configs = fixed
            tuner.cache.clear()


_STAGES = {
    "common.chunk_o": ["chunk_fwd_o"],
    "common.chunk_scaled_dot_kkt": ["chunk_scaled_dot_kkt_fwd"],
    "gated_delta_rule.chunk_fwd": [
        "chunk_gated_delta_rule_fwd_intra", "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
    ],
    "gated_delta_rule.wy_fast": ["recompute_w_u_fwd"],
    "utils": ["chunk_local_cumsum", "solve_tril"],
    "utils.cumsum": ["chunk_local_cumsum_scalar_kernel"],
    "utils.solve_tril": [
        "solve_tril_16x16_kernel", "merge_16x16_to_32x32_inverse_kernel",
        "merge_16x16_to_64x64_inverse_kernel",
    ],
}  # fmt: skip
"""Modules of fla.ops, and what is called of them; the kernels are those that add."""


@cache
def stages() -> SimpleNamespace:
    """fla-core's stages by name; the first call imports it, which takes seconds, or raises an ImportError."""
    functions: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fla warns where there is no GPU
            for module, names in _STAGES.items():
                imported = import_module(f"fla.ops.{module}")
                functions |= {name: getattr(imported, name) for name in names}
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the gated delta rule on a GPU needs fla-core ({error.name} is missing); install it with: "
            "pip install 'mambaslots[fla]'"
        ) from error
    kernels = [kernel for name, kernel in functions.items() if name.endswith("_kernel")]
    return SimpleNamespace(**functions, kernels_that_add=kernels)
