"""The gated delta rule of decode by replay in Triton; the reference is `torch_delta`.

A request keeps its state at the last grid point, and of the tokens since: keys, values, gates, new values,
and the rows of the inverse of its chunk's triangular system. A row of a chunk depends on earlier rows only.
So a step computes the rows of its new tokens, with the operands, roundings and orders of addition with which
`gated_delta_rule_scan` computes them, and its outputs have the bits of a prefill.

    stage                                          function
    what new tokens keep                           keep_rows_kernel
    new rows of the inverse, read keys, scores     delta_solve.solve_rows_kernel
    new values, outputs                            outputs_kernel
    states after complete chunks                   complete_chunks_kernel

The tail of a prefill takes the first two. They do what fla-core's stages and `delta_state_passing` do for a
whole chunk. Inputs of float32 use the scan itself.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - kernels join tuples by +, to which mypy gives one type; Triton unpacks no tuples

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .conv import convolved
from .delta import OPERAND_TOKENS, OPERAND_WARPS, normalised, scan_chunks
from .delta_solve import NewRows, decay_sums, inverse_offset, solve_rows
from .dtypes_and_strides import check_slots
from .gates import gates_of
from .mixer_inputs import DeltaInputs, RawTokens
from .step_rows import ReplayRows, ScanRows, TailRows, input_table
from .tiles import places

OUTPUT_WARPS, OUTPUT_REGISTERS = 4, 128
COMPLETION_WARPS, COMPLETION_STAGES, COMPLETION_ROWS, COMPLETION_GROUPS = 4, 2, 128, 16


def gated_delta_rule_replay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, inputs: DeltaInputs,
    rows: ReplayRows, raw: RawTokens | None = None,
) -> Tensor:  # fmt: skip
    """As `torch_delta.gated_delta_rule_replay`, in four launches; float32 takes a scan of each chunk."""
    num_rows, tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    queries = torch.empty(num_rows * tokens, key_heads, key_dim, dtype=v.dtype, device=v.device)
    q, k, v_rows, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    new_rows = NewRows(rows.input_rows, input_table(rows), rows.starts, rows.lengths)
    _keep_rows(q, k, v_rows, g, beta, None, queries, inputs, new_rows, tokens, raw)
    if inputs.inverses is None or inputs.new_v is None:
        return _scanned(queries, inputs, states, rows, new_rows.input_blocks, v.shape)
    check_slots(new_v_inputs=inputs.new_v)
    solved = solve_rows(queries, inputs, new_rows, tokens)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    blocks = output_blocks(tokens, key_dim, value_dim, states.dtype)
    read = inputs.v, inputs.beta, inputs.new_v, states
    outputs_kernel[(ceil_div(value_dim, blocks["BLOCK_V"]) * heads * num_rows,)](
        queries, *solved, *read, out, *new_rows, rows.sources,
        *(pool.stride(0) for pool in read), key_dim**-0.5,
        tokens, heads, heads // key_heads, key_dim, value_dim, rows.chunk_size, inputs.v.shape[1],
        **blocks, num_warps=OUTPUT_WARPS, num_stages=1, maxnreg=OUTPUT_REGISTERS,
    )  # fmt: skip
    if rows.destinations is not None:
        one_layer = DeltaInputs(*(pool[None] for pool in inputs if pool is not None))
        complete_delta_chunks(states[None], one_layer, rows)
    return out


def complete_delta_chunks(states: Tensor, inputs: DeltaInputs, rows: ReplayRows) -> None:
    """As `torch_delta.complete_delta_chunks`, in one launch for all layers."""
    num_rows, (layers, _, heads, key_dim, value_dim) = rows.input_rows.shape[0], states.shape
    assert inputs.inverses is not None
    pools = *inputs[:4], inputs.inverses, states
    blocks = completion_blocks(key_dim, value_dim)
    groups = min(num_rows, ceil_div(COMPLETION_GROUPS, layers))
    groups = max(groups, ceil_div(num_rows, COMPLETION_ROWS))
    complete_chunks_kernel[(ceil_div(value_dim, blocks["BLOCK_V"]) * heads * groups * layers,)](
        *pools, rows.input_rows, input_table(rows), rows.sources, rows.destinations,
        *(pool.stride(0) for pool in pools), *(pool.stride(1) for pool in pools), groups, num_rows,
        heads, heads // inputs.k.shape[3], key_dim, value_dim, rows.chunk_size, inputs.k.shape[2],
        **blocks, ROWS=COMPLETION_ROWS, num_warps=COMPLETION_WARPS, num_stages=COMPLETION_STAGES,
    )  # fmt: skip


def keep_delta_inputs(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, new_v: Tensor | None, inputs: DeltaInputs, rows: TailRows
) -> None:
    """As `torch_delta.keep_delta_inputs`, in two launches."""
    chunk_size = inputs.g.shape[1]
    tails = NewRows(rows.input_rows, input_table(rows), rows.starts, rows.query_start_loc)
    _keep_rows(k, k, v, g, beta, new_v, None, inputs, tails, chunk_size, None)
    if inputs.inverses is not None:
        solve_rows(None, inputs, tails, chunk_size)


def _scanned(
    queries: Tensor, inputs: DeltaInputs, states: Tensor, rows: ReplayRows, blocks: Tensor, shape: torch.Size
) -> Tensor:
    """The scan of each row's chunk, whose later tokens are zeros."""
    input_rows, starts, lengths, sources, destinations, *_ = rows
    assert destinations is not None, "the scan writes the states"
    (num_rows, tokens), chunk_size, device = shape[:2], inputs.g.shape[1], input_rows.device
    row, token = torch.arange(num_rows, device=device)[:, None], torch.arange(chunk_size, device=device)
    new = token - (starts % chunk_size)[:, None]  # the number of a new token
    is_new = (new >= 0) & (new < lengths[:, None]) & (input_rows >= 0)[:, None]
    real = (new < 0) & (input_rows >= 0)[:, None] | is_new

    def masked(chunks: Tensor, mask: Tensor) -> Tensor:
        """[rows, chunk_size, ...] with zeros outside of `mask`, packed."""
        return chunks.masked_fill_(~mask.view(*mask.shape, *[1] * (chunks.dim() - 2)), 0).flatten(0, 1)

    step_queries = queries.unflatten(0, (num_rows, tokens))[row, new.clamp(0, tokens - 1)]
    keys, values = (
        masked(pool[blocks.clamp(min=0)].flatten(1, 2)[:, :chunk_size], real) for pool in (inputs.k, inputs.v)
    )
    gates, strengths = (masked(pool[input_rows.clamp(min=0)], real) for pool in (inputs.g, inputs.beta))
    row_chunks = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    chunks = ScanRows(
        sources, destinations, chunk_size, row_chunks * chunk_size, row_chunks[:-1], row_chunks,
        torch.full_like(destinations, -1),
    )  # fmt: skip
    o = scan_chunks(masked(step_queries, is_new), keys, values, gates, strengths, states, chunks)
    # Padding may lie after the chunk.
    places = ((starts % chunk_size)[:, None] + token[:tokens]).clamp_(max=chunk_size - 1)
    return o.index_select(0, (row * chunk_size + places).flatten()).view(shape)


def _keep_rows(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, new_v: Tensor | None, queries: Tensor | None,
    inputs: DeltaInputs, rows: NewRows, tokens: int, raw: RawTokens | None,
) -> None:  # fmt: skip
    """Launch `keep_rows_kernel` for rows of `tokens` tokens; without queries, for tails of packed rows."""
    kept, tails, new_v_inputs = inputs[:4], queries is None, None if new_v is None else inputs.new_v
    check_slots(k_inputs=inputs.k, v_inputs=inputs.v, g_inputs=inputs.g, beta_inputs=inputs.beta)
    (block_tokens, key_heads, key_dim), (heads, value_dim) = inputs.k.shape[1:], v.shape[1:]
    q, k = (q, k) if q.stride() == k.stride() else (q.contiguous(), k.contiguous())
    g, beta = (x if x.dim() == 3 else x[:, None] for x in (g, beta))
    sizes = keep_blocks(tokens, heads, key_dim, value_dim)
    tiles = (1 if tails else 2) * ceil_div(tokens * key_heads, sizes["BLOCK_R"])
    tiles += ceil_div(tokens * heads, sizes["BLOCK_R"]) + ceil_div(tokens, sizes["BLOCK_G"])
    made_of, conv_strides = (None,) * 7, (0, 0)
    kernel, window, ring, doubled = 0, 0, 0, False
    if raw is not None:
        net, states, rings, destinations = raw
        dense = {"weight": net.weight[None], "A_log": net.A_log[None], "dt_bias": net.dt_bias[None]}
        check_slots(conv_states=states, conv_inputs=rings, **dense)
        made_of, conv_strides = (*net[:4], states, rings, destinations), (states.stride(0), rings.stride(0))
        kernel, window, ring, doubled = net.weight.shape[1], states.shape[2], rings.shape[1], net.doubled
    keep_rows_kernel[(rows.input_rows.shape[0] * tiles,)](
        q, k, v, g, beta, new_v, k if tails else queries, *kept, new_v_inputs, *rows, *made_of, *conv_strides,
        *k.stride(), *v.stride(), *g.stride(), *beta.stride(),
        *(pool.stride(0) for pool in kept), 0 if new_v_inputs is None else new_v_inputs.stride(0),
        KEY_HEADS=key_heads, VALUE_HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, INNER=g.shape[2],
        TOKENS=tokens, CHUNK=inputs.g.shape[1], BLOCK_TOKENS=block_tokens, TAILS=tails,
        KERNEL=kernel, WINDOW=window, RING=ring, DOUBLED=doubled, **sizes, num_warps=OPERAND_WARPS,
    )  # fmt: skip


def keep_blocks(tokens: int, heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """A tile of BLOCK_R rows (a head of a token), or gates; norms have the bits of the scan's tile."""
    block_h, block_k = triton.next_power_of_2(heads), triton.next_power_of_2(key_dim)
    return {
        "BLOCK_R": max(1, min(OPERAND_TOKENS, 256 * OPERAND_WARPS // block_k)),
        "BLOCK_K": block_k,
        "BLOCK_V": triton.next_power_of_2(value_dim),
        "BLOCK_H": block_h,
        "BLOCK_G": min(triton.next_power_of_2(tokens), max(1, 1024 // block_h)),
    }


@triton.jit
def _raw_at(x, token_stride, ring, at, start, inside, RING: tl.constexpr, CHANNELS: tl.constexpr):
    """What the convolution reads of tokens `at` of a row, below 0 from the ring; zeros before position 0."""
    is_kept = (at < 0) & (start + at >= 0)
    new = tl.load(x + (at * token_stride)[:, None], mask=inside & (at >= 0)[:, None], other=0.0)
    place = (start + at + RING) % RING  # C's remainder of a negative number would be negative
    kept = tl.load(ring + (place * CHANNELS)[:, None], mask=inside & is_kept[:, None], other=0.0)
    return tl.where((at >= 0)[:, None], new.to(tl.float32), kept.to(tl.float32))


@triton.jit
def _numbers(
    x, token_stride, head_stride, dim_stride, first_token, token, head, n, inside, length, channels, start,
    weight, bias, windows, rings, destination,
    DIM: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Numbers of heads of a row's tokens; with KERNEL kept, and convolved as in `conv_replay`."""
    x += (first_token * token_stride + head * head_stride)[:, None] + n[None, :] * dim_stride
    channel = (channels + head * DIM)[:, None] + n[None, :]
    if KERNEL == 0:
        return tl.load(x + (token * token_stride)[:, None], mask=inside, other=0.0)
    else:
        WIDTH: tl.constexpr = KERNEL - 1
        weights, inputs = (), ()
        if KERNEL <= 4:  # a channel's weights are neighbours: read together, then sorted by tap
            tap = tl.arange(0, 4)[None, None, :]
            weight_ptrs = weight + channel[:, :, None] * KERNEL + tap
            by_tap = tl.load(weight_ptrs, mask=inside[:, :, None] & (tap < KERNEL), other=0.0)
            even, odd = tl.split(tl.reshape(by_tap, (channel.shape[0], channel.shape[1], 2, 2)))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            weights = (first, second, third, fourth)
        taps = (0.0 if bias is None else tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32),)
        for column in tl.static_range(KERNEL):
            at = token + (column - WIDTH)
            if KERNEL > 4:
                weights = weights + (tl.load(weight + channel * KERNEL + column, mask=inside, other=0.0),)
            taps = taps + (weights[column].to(tl.float32),)
            inputs = inputs + (_raw_at(x, token_stride, rings + channel, at, start, inside, RING, CHANNELS),)
        ring = rings + ((start + token) % RING * CHANNELS)[:, None] + channel
        tl.store(ring, inputs[WIDTH].to(rings.dtype.element_ty), mask=inside)
        if destination >= 0:
            window = windows + channel.to(tl.int64) * WINDOW
            is_first = inside & (token == 0)[:, None]
            for column in tl.static_range(WIDTH):
                at = token + length + (column - WIDTH)
                raw = _raw_at(x, token_stride, rings + channel, at, start, is_first, RING, CHANNELS)
                tl.store(window + column, raw.to(windows.dtype.element_ty), mask=is_first)
        return convolved(taps, inputs, 0, KERNEL, True).to(x.dtype.element_ty)


@triton.jit
def keep_rows_kernel(
    # Pointers
    q, k, v, g, beta, new_v, queries, k_inputs, v_inputs, g_inputs, beta_inputs, new_v_inputs,
    input_rows, input_blocks, starts, ends,
    weight, bias, A_log, dt_bias, conv_states, conv_inputs, conv_destinations,
    # Strides
    conv_slot_stride: tl.int64, ring_stride: tl.int64,
    k_token_stride, k_head_stride, k_dim_stride,
    v_token_stride, v_head_stride, v_dim_stride,
    g_token_stride, g_outer_stride, g_inner_stride,
    beta_token_stride, beta_outer_stride, beta_inner_stride,
    k_input_stride: tl.int64, v_input_stride: tl.int64, g_row_stride: tl.int64, beta_row_stride: tl.int64,
    new_v_input_stride: tl.int64,
    # Meta-parameters
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    INNER: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    TAILS: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    DOUBLED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Store what new tokens keep, and their normalised queries. A program has a row and one tile.

    `starts` are positions and `ends` numbers of tokens; with TAILS, `starts` are packed tokens that begin
    chunks, `ends` [rows + 1] are where packed rows begin, and no query is stored. `new_v` is packed. With
    KERNEL, tokens are raw, as `RawTokens` says.
    """
    VALUE_SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_SIZE
    KEY_TILES: tl.constexpr = (TOKENS * KEY_HEADS + BLOCK_R - 1) // BLOCK_R
    VALUE_TILES: tl.constexpr = (TOKENS * VALUE_HEADS + BLOCK_R - 1) // BLOCK_R
    GATE_TILES: tl.constexpr = (TOKENS + BLOCK_G - 1) // BLOCK_G
    QUERY_TILES: tl.constexpr = 0 if TAILS else KEY_TILES
    PARTS: tl.constexpr = QUERY_TILES + KEY_TILES + VALUE_TILES + GATE_TILES
    part = tl.program_id(0) % PARTS
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    input_row = tl.load(input_rows + row)
    table = input_blocks + row * ((CHUNK + BLOCK_TOKENS - 1) // BLOCK_TOKENS)
    if TAILS:
        first = tl.load(starts + row).to(tl.int64)
        length = tl.load(ends + row + 1) - first
        position, start = 0, 0
    else:
        first = row * TOKENS
        length = tl.load(ends + row)
        position = tl.load(starts + row)
        start = position % CHUNK
    if input_row >= 0:
        n = tl.arange(0, BLOCK_K)
        destination = -1
        if KERNEL > 0:
            conv_inputs += input_row * ring_stride
            destination = tl.load(conv_destinations + row)
            conv_states += destination * conv_slot_stride
        if part < QUERY_TILES + KEY_TILES:
            is_key = part >= QUERY_TILES
            place, token, head = _heads_of_tokens(part % KEY_TILES, KEY_HEADS, BLOCK_R)
            inside = (token < length)[:, None] & (n < KEY_DIM)[None, :]
            key = _numbers(
                tl.where(is_key, k, q), k_token_stride, k_head_stride, k_dim_stride, first, token, head, n,
                inside, length, is_key * KEY_HEADS * KEY_DIM, position, weight, bias, conv_states,
                conv_inputs, destination, KEY_DIM, KERNEL, WINDOW, RING, CHANNELS,
            )  # fmt: skip
            key, real = normalised(key), (token < length) & is_key
            offsets = places(table, start + token, real, k_input_stride, BLOCK_TOKENS, KEY_HEADS * KEY_DIM)
            key_ptrs = k_inputs + (offsets + head * KEY_DIM)[:, None] + n[None, :]
            tl.store(key_ptrs, key.to(k_inputs.dtype.element_ty), mask=inside & is_key)
            if not TAILS:
                query_ptrs = queries + (first * KEY_HEADS + place)[:, None] * KEY_DIM + n[None, :]
                tl.store(query_ptrs, key.to(queries.dtype.element_ty), mask=inside & (part < QUERY_TILES))
        elif part < QUERY_TILES + KEY_TILES + VALUE_TILES:
            place, token, head = _heads_of_tokens(part - QUERY_TILES - KEY_TILES, VALUE_HEADS, BLOCK_R)
            p = tl.arange(0, BLOCK_V)
            inside = (token < length)[:, None] & (p < VALUE_DIM)[None, :]
            value = _numbers(
                v, v_token_stride, v_head_stride, v_dim_stride, first, token, head, p, inside, length,
                2 * KEY_HEADS * KEY_DIM, position, weight, bias, conv_states, conv_inputs, destination,
                VALUE_DIM, KERNEL, WINDOW, RING, CHANNELS,
            )  # fmt: skip
            offsets = places(table, start + token, token < length, v_input_stride, BLOCK_TOKENS, VALUE_SIZE)
            value_ptrs = v_inputs + (offsets + head * VALUE_DIM)[:, None] + p[None, :]
            tl.store(value_ptrs, value.to(v_inputs.dtype.element_ty), mask=inside)
            if new_v is not None:
                new_v_ptrs = new_v + (first * VALUE_HEADS + place)[:, None] * VALUE_DIM + p[None, :]
                new_value = tl.load(new_v_ptrs, mask=inside)
                offsets = places(table, token, token < length, new_v_input_stride, BLOCK_TOKENS, VALUE_SIZE)
                kept_ptrs = new_v_inputs + (offsets + head * VALUE_DIM)[:, None] + p[None, :]
                tl.store(kept_ptrs, new_value, mask=inside)
        else:
            block = part - QUERY_TILES - KEY_TILES - VALUE_TILES
            gate_token = block * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
            gate_head = tl.arange(0, BLOCK_H)[None, :]
            is_gate = (gate_token < length) & (gate_head < VALUE_HEADS)
            gate_offsets = (start + gate_token) * VALUE_HEADS + gate_head
            outer, inner = gate_head // INNER, gate_head % INNER
            g_ptrs = g + outer * g_outer_stride + inner * g_inner_stride
            beta_ptrs = beta + outer * beta_outer_stride + inner * beta_inner_stride
            gate = tl.load(g_ptrs + (first + gate_token) * g_token_stride, mask=is_gate, other=0.0)
            strength = tl.load(beta_ptrs + (first + gate_token) * beta_token_stride, mask=is_gate, other=0.0)
            if KERNEL > 0:
                rate = tl.load(A_log + gate_head, mask=gate_head < VALUE_HEADS, other=0.0)
                step_bias = tl.load(dt_bias + gate_head, mask=gate_head < VALUE_HEADS, other=0.0)
                gate, strength = gates_of(gate, strength, rate, step_bias, DOUBLED)
            kept_g_ptrs = g_inputs + input_row * g_row_stride + gate_offsets
            tl.store(kept_g_ptrs, gate.to(g_inputs.dtype.element_ty), mask=is_gate)
            kept_beta_ptrs = beta_inputs + input_row * beta_row_stride + gate_offsets
            tl.store(kept_beta_ptrs, strength.to(beta_inputs.dtype.element_ty), mask=is_gate)


@triton.jit
def _heads_of_tokens(tile, HEADS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The rows of a tile of all heads of all tokens: numbers, tokens and heads."""
    place = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    return place, place // HEADS, place % HEADS


def output_blocks(tokens: int, key_dim: int, value_dim: int, state_dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes without spilled registers. Other rows change no bits: rows are not counted here."""
    widest = 64 if tokens == 1 and key_dim <= 128 and state_dtype == torch.float32 else 32
    return {
        "BLOCK_Q": max(16, triton.next_power_of_2(tokens)),
        "BLOCK_K": max(16, triton.next_power_of_2(key_dim)),
        "BLOCK_V": max(16, min(widest, triton.next_power_of_2(value_dim))),
    }


@triton.jit
def outputs_kernel(
    # Pointers
    queries, solved, solved_decays, v_inputs, beta_inputs, new_v_inputs, states, out,
    input_rows, input_blocks, starts, lengths, sources,
    # Strides
    v_input_stride: tl.int64, beta_row_stride: tl.int64, new_v_input_stride: tl.int64, slot_stride: tl.int64,
    # Dimensions
    scale,
    tokens: tl.constexpr, heads: tl.constexpr, heads_of_key: tl.constexpr,
    key_dim: tl.constexpr, value_dim: tl.constexpr, chunk_size: tl.constexpr, block_tokens: tl.constexpr,
    # Meta-parameters
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """New values and outputs of new tokens. A program has a row, a value head and BLOCK_V of Dv."""
    v_blocks: tl.constexpr = (value_dim + BLOCK_V - 1) // BLOCK_V
    key_heads: tl.constexpr = heads // heads_of_key
    value_stride: tl.constexpr = heads * value_dim
    solved_size: tl.constexpr = key_dim + 2 * chunk_size
    operand: tl.constexpr = v_inputs.dtype.element_ty
    head = tl.program_id(0) // v_blocks % heads
    row = (tl.program_id(0) // (v_blocks * heads)).to(tl.int64)
    p = tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    in_value = (p < value_dim)[None, :]

    input_row = tl.load(input_rows + row)
    start = tl.load(starts + row) % chunk_size
    length = tl.load(lengths + row)
    source = tl.load(sources + row)
    if input_row >= 0:
        t = tl.arange(0, chunk_size)
        n = tl.arange(0, BLOCK_K)
        new = tl.arange(0, BLOCK_Q)
        is_new = (new < length)[:, None]
        is_old = (t < start)[:, None]
        real = t < start + length
        in_key = (n < key_dim)[None, :]
        head_states = states + source * slot_stride + head * (key_dim * value_dim)
        in_state = (n < key_dim)[:, None] & in_value & (source >= 0)
        state = tl.load(head_states + n[:, None] * value_dim + p[None, :], mask=in_state, other=0.0)
        table = input_blocks + row * ((chunk_size + block_tokens - 1) // block_tokens)
        v_offsets = places(table, t, real, v_input_stride, block_tokens, value_stride)
        new_v_offsets = places(table, t, real, new_v_input_stride, block_tokens, value_stride)
        columns = head * value_dim + p[None, :]
        v = tl.load(v_inputs + v_offsets[:, None] + columns, mask=real[:, None] & in_value, other=0.0)
        value = tl.load(new_v_inputs + new_v_offsets[:, None] + columns, mask=is_old & in_value, other=0.0)
        beta = tl.load(beta_inputs + input_row * beta_row_stride + head + t * heads, mask=real, other=0.0)
        token = row * tokens + new
        solved_ptrs = solved + (token * heads + head)[:, None] * solved_size
        read_key = tl.load(solved_ptrs + n[None, :], mask=is_new & in_key, other=0.0)
        pair_ptrs = solved_ptrs + key_dim + t[None, :]
        block_row = tl.load(pair_ptrs, mask=is_new, other=0.0)
        scores = tl.load(pair_ptrs + chunk_size, mask=is_new, other=0.0)
        query_ptrs = queries + (token * key_heads + head // heads_of_key)[:, None] * key_dim + n[None, :]
        query = tl.load(query_ptrs, mask=is_new & in_key, other=0.0)
        decay = tl.load(solved_decays + token * heads + head, mask=new < length, other=0.0)

        # The compiler shares a tile among threads where it is made, and later loads wait for that. Selecting
        # what the masks have selected makes the tiles here, when all loads are under way.
        query = tl.where(is_new, query, 0.0)
        read_key = tl.where(is_new, read_key, 0.0)
        block_row = tl.where(is_new, block_row, 0.0)
        scores = tl.where(is_new, scores, 0.0)
        beta = tl.where(real, beta, 0.0)
        v = tl.where(real[:, None], v, 0.0)
        value = tl.where(is_old, value, 0.0)
        state = tl.where((n < key_dim)[:, None], state.to(tl.float32).to(operand), 0.0)
        o = tl.dot(query, state)
        o = o * tl.exp2(decay)[:, None]
        written = tl.dot(block_row, (v * beta[:, None]).to(operand)).to(operand)
        new_value = (written.to(tl.float32) - tl.dot(read_key, state)).to(operand)
        new_offsets = places(table, start + new, new < length, new_v_input_stride, block_tokens, value_stride)
        tl.store(new_v_inputs + new_offsets[:, None] + columns, new_value, mask=is_new & in_value)
        if tokens == 1:
            fresh = tl.sum(tl.where((new == 0)[:, None], new_value.to(tl.float32), 0.0), axis=0)
            fresh = fresh.to(operand)[None, :]
        else:
            tl.debug_barrier()  # below, a thread reads what another thread has stored above
            fresh_ptrs = new_v_inputs + new_v_offsets[:, None] + columns
            fresh = tl.load(fresh_ptrs, mask=real[:, None] & ~is_old & in_value, other=0.0)
        value = tl.where(is_old | ~real[:, None], value, fresh)
        o = o * scale + tl.dot(scores, value) * scale
        out_offsets = (token * heads + head)[:, None] * value_dim + p[None, :]
        tl.store(out + out_offsets, o.to(operand), mask=is_new & in_value)


def completion_blocks(key_dim: int, value_dim: int) -> dict[str, int]:
    """Tile sizes. They do not depend on the number of rows, so that other rows change no bits.

    Keys take two turns or more, up to 32 numbers by 16. In one turn the compiler would leave no loop, and
    then ptxas of CUDA 12.8 gives products of some sizes another variable for the address of their factor.
    """
    return {
        "SLICE": 16 if key_dim <= 32 else 32,
        "BLOCK_V": max(16, min(64, triton.next_power_of_2(value_dim))),
    }


@triton.jit(do_not_specialize=["rows", "groups"])
def complete_chunks_kernel(
    # Pointers
    k_inputs, v_inputs, g_inputs, beta_inputs, inverses, states, input_rows, input_blocks,
    sources, destinations,
    # Strides
    k_layer_stride: tl.int64, v_layer_stride: tl.int64, g_layer_stride: tl.int64, beta_layer_stride: tl.int64,
    inverse_layer_stride: tl.int64, layer_stride: tl.int64,
    k_input_stride: tl.int64, v_input_stride: tl.int64, g_row_stride: tl.int64, beta_row_stride: tl.int64,
    inverse_row_stride: tl.int64, slot_stride: tl.int64,
    # Dimensions
    groups, rows,
    heads: tl.constexpr, heads_of_key: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk_size: tl.constexpr, block_tokens: tl.constexpr,
    # Meta-parameters
    SLICE: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """States after complete chunks. A program has a layer, a value head, BLOCK_V of Dv, and up to ROWS rows.

    No other program touches these parts of states, so that a row's destination may be its source. Where no
    row completes a chunk, a program reads two indices of each.
    """
    v_blocks: tl.constexpr = (value_dim + BLOCK_V - 1) // BLOCK_V
    programs: tl.constexpr = v_blocks * heads
    inverse_size: tl.constexpr = chunk_size * (chunk_size + 16) // 2
    head = tl.program_id(0) // v_blocks % heads
    first = tl.program_id(0) // programs % groups
    layer = tl.program_id(0) // programs // groups
    p = tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    candidate = first + groups * tl.arange(0, ROWS)
    completes = tl.load(destinations + candidate, mask=candidate < rows, other=-1) >= 0
    completes = completes & (tl.load(input_rows + candidate, mask=candidate < rows, other=-1) >= 0)
    row = tl.min(tl.where(completes, candidate, rows), axis=0)
    while row < rows:
        input_row = tl.load(input_rows + row)
        source = tl.load(sources + row)
        head_states = states + layer * layer_stride + head * (key_dim * value_dim)
        _complete_chunk(
            k_inputs + layer * k_layer_stride + head // heads_of_key * key_dim,
            v_inputs + layer * v_layer_stride + head * value_dim,
            input_blocks + row * ((chunk_size + block_tokens - 1) // block_tokens),
            k_input_stride, v_input_stride,
            beta_inputs + layer * beta_layer_stride + input_row * beta_row_stride + head,
            g_inputs + layer * g_layer_stride + input_row * g_row_stride + head,
            inverses + layer * inverse_layer_stride + input_row * inverse_row_stride + head * inverse_size,
            head_states + source * slot_stride, head_states + tl.load(destinations + row) * slot_stride,
            source >= 0, p,
            heads, heads // heads_of_key * key_dim, key_dim, value_dim, chunk_size, block_tokens,
            BLOCK_V, SLICE,
        )  # fmt: skip
        row = tl.min(tl.where(completes & (candidate > row), candidate, rows), axis=0)


@triton.jit
def _complete_chunk(
    keys, values, table, k_input_stride, v_input_stride, strengths, g, inverse, entering, leaving,
    has_entering, p,
    heads: tl.constexpr, key_stride: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    chunk_size: tl.constexpr, block_tokens: tl.constexpr, BLOCK_V: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Store the state after a chunk."""
    operand: tl.constexpr = keys.dtype.element_ty
    t = tl.arange(0, chunk_size)
    in_value = (p < value_dim)[None, :]
    decay = decay_sums(tl.load(g + t * heads), chunk_size)
    is_stored = t[:, None] >= t[None, :]
    solved = tl.load(inverse + inverse_offset(t[:, None], t[None, :]), mask=is_stored, other=0.0).to(operand)
    beta = tl.load(strengths + t * heads)
    key_offsets = places(table, t, t < chunk_size, k_input_stride, block_tokens, key_stride)
    value_offsets = places(table, t, t < chunk_size, v_input_stride, block_tokens, heads * value_dim)
    v = tl.load(values + value_offsets[:, None] + p[None, :], mask=in_value, other=0.0)
    written = tl.dot(solved, (v * beta[:, None]).to(operand), allow_tf32=False).to(operand)
    read_value = tl.zeros((chunk_size, BLOCK_V), dtype=tl.float32)
    key_end: tl.constexpr = max(key_dim, 2 * SLICE)  # `completion_blocks` says why there are two turns
    for first in range(0, key_end, SLICE):
        n = first + tl.arange(0, SLICE)
        key = tl.load(keys + key_offsets[:, None] + n[None, :], mask=(n < key_dim)[None, :], other=0.0)
        scaled = key * beta[:, None]
        scaled = scaled * tl.exp2(decay)[:, None]
        read_key = tl.dot(solved, scaled.to(operand)).to(operand)
        in_state = (n < key_dim)[:, None] & in_value & has_entering
        state = tl.load(entering + n[:, None] * value_dim + p[None, :], mask=in_state, other=0.0)
        read_value = tl.dot(read_key, state.to(tl.float32).to(operand), read_value)
    value = written.to(tl.float32) - read_value

    decay_of_chunk = tl.sum(tl.where(t == chunk_size - 1, decay, 0.0), axis=0)
    value *= tl.exp2(decay_of_chunk - decay)[:, None]
    for first in range(0, key_dim, SLICE):
        n = first + tl.arange(0, SLICE)
        in_state = (n < key_dim)[:, None] & in_value
        state_offsets = n[:, None] * value_dim + p[None, :]
        after = tl.load(entering + state_offsets, mask=in_state & has_entering, other=0.0)
        after = after.to(tl.float32) * tl.exp2(decay_of_chunk)
        key = tl.load(keys + n[:, None] + key_offsets[None, :], mask=(n < key_dim)[:, None], other=0.0)
        after = tl.dot(key, value.to(operand), after)
        tl.debug_barrier()  # a thread may overwrite what another thread has read
        tl.store(leaving + state_offsets, after.to(leaving.dtype.element_ty), mask=in_state)
