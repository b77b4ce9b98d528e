"""New rows of a chunk's triangular system, for decodes of the gated delta rule by replay.

A row depends on earlier rows only, of which a request keeps those of the inverse. What depends on the state
follows in `delta_replay`.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .dtypes_and_strides import check_slots
from .mixer_inputs import DeltaInputs
from .tiles import places

LOG2_E = tl.constexpr(1.4426950408889634)
FEW_PROGRAMS = 1024


class NewRows(NamedTuple):
    """Rows of new tokens: of decodes, or tails of prefills. `keep_rows_kernel` says what the last two are."""

    input_rows: Tensor
    input_blocks: Tensor
    starts: Tensor
    ends: Tensor


def solve_rows(
    queries: Tensor | None, inputs: DeltaInputs, rows: NewRows, tokens: int
) -> tuple[Tensor, Tensor]:
    """Launch `solve_rows_kernel` for decodes; without queries, for prefills' tails, as `keep_rows_kernel`.

    Returns what `outputs_kernel` reads of new tokens: [rows * tokens, Hv, Dk + 2 * chunk_size] and decays.
    """
    assert inputs.inverses is not None
    check_slots(inverses=inputs.inverses)
    read = inputs.k, inputs.g, inputs.beta, inputs.inverses
    (block_tokens, key_heads, key_dim), heads = inputs.k.shape[1:], inputs.inverses.shape[1]
    chunk_size, num_rows = inputs.g.shape[1], rows.input_rows.shape[0]
    size = 0 if queries is None else num_rows * tokens
    solved = inputs.k.new_empty(size, heads, key_dim + 2 * chunk_size)
    decays = inputs.inverses.new_empty(size, heads)
    solve_rows_kernel[(heads * num_rows,)](
        queries, *read, solved, decays, *rows, *(pool.stride(0) for pool in read),
        tokens, heads, heads // key_heads, key_dim, chunk_size, block_tokens, queries is None,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        **solve_shape(heads * num_rows, key_dim, chunk_size), num_stages=1,
    )  # fmt: skip
    return solved, decays


def solve_shape(programs: int, key_dim: int, chunk_size: int) -> dict[str, int]:
    """One warp where the programs fill a GPU and the keys fit its registers; else more warps end sooner.

    Sums have one order in all: products over K, and those over rows of 16 in threads of one warp.
    """
    few = programs <= FEW_PROGRAMS
    is_wide = few and key_dim <= 128 and chunk_size > 16
    return {"WIDE": is_wide, "num_warps": 4 if is_wide else 2 if few or key_dim > 128 else 1}


@triton.jit
def decay_sums(gates, chunk_size: tl.constexpr):
    """Sums of binary logarithms from the start of the chunk, as fla-core's chunk_local_cumsum.

    A product would be added to other numbers in one instruction, which does not round it; this is rounded.
    """
    sums = tl.cumsum(gates, axis=0)
    return tl.fma(sums, tl.full((chunk_size,), LOG2_E, tl.float32), tl.zeros((chunk_size,), tl.float32))


@triton.jit
def inverse_offset(row, column):
    """Where a number lies among those of an inverse: 16 x 16 blocks on and below the diagonal, row by row."""
    r, c = row // 16, column // 16
    return (r * (r + 1) // 2 + c) * 256 + row % 16 * 16 + column % 16


@triton.jit
def _coupled(products, mask, decay, column_decay):
    """Products of keys or queries with keys, decayed from the column's token to the row's."""
    return products * tl.where(mask, tl.exp2(decay[:, None] - column_decay[None, :]), 0.0)


_Chunk = namedtuple("_Chunk", "keys table input_stride beta inverse r end in_key")
"""What new rows read; the block row r is solved, of tokens before `end`."""
_Block = namedtuple("_Block", "token is_real is_new key strength query pair diagonal decays decay")
"""The 16 tokens of block row r. `pair`: where rows of inverse and of scores go; None without `query`."""
_Near = namedtuple("_Near", "key strength above")
_Columns = namedtuple("_Columns", "key strength above far_key far_strength far_rows near_rows")
"""The block before r, and those before that: keys, gates, and rows of the inverse in both."""


@triton.jit
def _in_block(chunk, block, mask, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """`places` of the 16 tokens of a block; one load where no input block ends inside of it."""
    i = tl.arange(0, 16)
    if TOKENS % 16 == 0:
        input_block = tl.load(chunk.table + 16 * block // TOKENS).to(tl.int64)
        return input_block * chunk.input_stride + (16 * block % TOKENS + i) * SIZE
    else:
        return places(chunk.table, 16 * block + i, mask, chunk.input_stride, TOKENS, SIZE)


@triton.jit
def _store_scores(block, key, mask, column, column_decay, chunk_size: tl.constexpr):
    """Store products of new queries with the keys of tokens `column`."""
    scores = _coupled(tl.dot(block.query, tl.trans(key)), mask, block.decay, column_decay)
    tl.store(block.pair + chunk_size + column[None, :], scores.to(key.dtype), mask=mask)


@triton.jit
def _new_rows(
    keys, table, input_stride, queries, g, beta, inverse, solved, solved_decays, row, r, start, end,
    tokens: tl.constexpr, heads: tl.constexpr, key_stride: tl.constexpr, key_dim: tl.constexpr,
    chunk_size: tl.constexpr, block_tokens: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store the new rows of block row r: of the inverse; for `queries`, also of read keys and of scores.

    As fla-core's chunk_gated_delta_rule_fwd_kkt_solve_kernel; for chunks of 32, solve_tril. Sums over block
    columns are in their order; blocks that they have not are zeros, which change no sum.
    """
    operand: tl.constexpr = keys.dtype.element_ty
    i = tl.arange(0, 16)
    t = tl.arange(0, chunk_size)
    n = tl.arange(0, BLOCK_K)
    token = 16 * r + i
    is_real = token < end
    is_new = is_real & (token >= start)
    below = i[:, None] > i[None, :]
    is_solved = (token < start)[:, None] & below
    in_key = (n < key_dim)[None, :]
    new = row * tokens + token - start
    chunk = _Chunk(keys, table, input_stride, beta, inverse, r, end, in_key)

    gates = tl.load(g + t * heads, mask=t < end, other=0.0)
    key_offsets = _in_block(chunk, r, is_real, block_tokens, key_stride)
    key = tl.load(keys + key_offsets[:, None] + n[None, :], mask=is_real[:, None] & in_key, other=0.0)
    strength = tl.load(beta + token * heads, mask=is_real, other=0.0)
    stored = tl.load(inverse + inverse_offset(token[:, None], token[None, :]), mask=is_solved, other=0.0)
    query, pair = None, None
    if queries is not None:
        is_query = is_new[:, None] & in_key
        query = tl.load(queries + new[:, None] * key_stride + n[None, :], mask=is_query, other=0.0)
    if WIDE:
        columns = _load_columns(chunk, heads, key_stride, chunk_size, block_tokens)
    decays = decay_sums(gates, chunk_size)
    decay = tl.gather(decays, token, 0)

    coupling = tl.dot(key, tl.trans(key))
    coupling = _coupled(coupling, below & is_real[:, None], decay, decay) * strength[:, None]
    diagonal = _solved(tl.where((token < start)[:, None], stored, -coupling), coupling, r, start, end)
    tl.store(inverse + inverse_offset(token[:, None], token[None, :]), diagonal, mask=is_new[:, None])
    if queries is not None:
        pair = solved + new[:, None] * (heads * (key_dim + 2 * chunk_size)) + key_dim
        tl.store(pair + token[None, :], diagonal.to(operand), mask=is_new[:, None])
        scores = tl.dot(query, tl.trans(key))
        scores = _coupled(scores, (i[:, None] >= i[None, :]) & is_new[:, None], decay, decay)
        tl.store(pair + chunk_size + token[None, :], scores.to(operand), mask=is_new[:, None])
        is_later = is_new[:, None] & (t >= 16 * r + 16)[None, :]
        tl.store(pair + t[None, :], tl.zeros((16, chunk_size), operand), mask=is_later)
        tl.store(pair + chunk_size + t[None, :], tl.zeros((16, chunk_size), operand), mask=is_later)
        tl.store(solved_decays + new * heads, decay, mask=is_new)

    block = _Block(token, is_real, is_new, key, strength, query, pair, diagonal, decays, decay)
    if WIDE:
        read_key = _wide_columns(chunk, block, columns, chunk_size)
    else:
        if chunk_size > 16:
            _serial_columns(chunk, block, key_stride, chunk_size, block_tokens)
        if queries is not None:
            read_key = _serial_read_keys(chunk, block, heads, key_stride, block_tokens)
    if queries is not None:
        tl.store(pair - key_dim + n[None, :], read_key.to(operand), mask=is_new[:, None] & in_key)


@triton.jit
def _solved(rows, coupling, r, start, end):
    """The block on the diagonal of the inverse; `rows` has its earlier rows."""
    i = tl.arange(0, 16)
    for new_row in range(tl.maximum(2, start - 16 * r), tl.minimum(16, end - 16 * r)):
        solved_row = tl.sum(tl.where((i == new_row)[:, None], -coupling, 0.0), 0)
        solved_row = tl.where(i < new_row, solved_row, 0.0)
        solved_row = solved_row + tl.sum(solved_row[:, None] * rows, 0)
        rows = tl.where((i == new_row)[:, None], solved_row, rows)
    return rows + (i[:, None] == i[None, :])


@triton.jit
def _load_columns(
    chunk, heads: tl.constexpr, key_stride: tl.constexpr, chunk_size: tl.constexpr, block_tokens: tl.constexpr
):  # fmt: skip
    """What `_wide_columns` reads: their latency is most of the time, so that all loads come first."""
    FAR: tl.constexpr = chunk_size - 32  # tokens behind the nearest block
    i = tl.arange(0, 16)
    n = tl.arange(0, chunk.in_key.shape[1])
    is_near = (i >= 0) & (chunk.r > 0)
    near = tl.where(is_near, 16 * chunk.r + i - 16, 0)
    key_offsets = _in_block(chunk, tl.maximum(chunk.r, 1) - 1, is_near, block_tokens, key_stride)
    is_key = is_near[:, None] & chunk.in_key
    near_key = tl.load(chunk.keys + key_offsets[:, None] + n[None, :], mask=is_key, other=0.0)
    near_strength = tl.load(chunk.beta + near * heads, mask=is_near, other=0.0)
    near_offsets = inverse_offset(near[:, None], near[None, :])
    above = tl.load(chunk.inverse + near_offsets, mask=is_near[:, None], other=0.0)
    if FAR > 0:
        f = tl.arange(0, FAR)
        is_far = f < 16 * chunk.r - 16
        key_offsets = places(chunk.table, f, is_far, chunk.input_stride, block_tokens, key_stride)
        is_key = is_far[:, None] & chunk.in_key
        far_key = tl.load(chunk.keys + key_offsets[:, None] + n[None, :], mask=is_key, other=0.0)
        far_strength = tl.load(chunk.beta + f * heads, mask=is_far, other=0.0)
        is_stored = is_far[:, None] & (f[:, None] // 16 >= f[None, :] // 16)
        far_rows = tl.load(chunk.inverse + inverse_offset(f[:, None], f[None, :]), mask=is_stored, other=0.0)
        row_offsets = inverse_offset(near[:, None], f[None, :])
        near_rows = tl.load(chunk.inverse + row_offsets, mask=is_near[:, None] & is_far[None, :], other=0.0)
        return _Columns(near_key, near_strength, above, far_key, far_strength, far_rows, near_rows)
    else:
        return _Near(near_key, near_strength, above)


@triton.jit
def _wide_columns(chunk, block, columns, chunk_size: tl.constexpr):
    """Store the nearest block and those behind it, as one tile; returns the keys that read the state."""
    operand: tl.constexpr = chunk.keys.dtype.element_ty
    precision: tl.constexpr = "tf32" if chunk_size == 64 else "ieee"
    FAR: tl.constexpr = chunk_size - 32
    is_near = (tl.arange(0, 16) >= 0) & (chunk.r > 0)
    near = tl.where(is_near, block.token - 16, 0)
    key, strength = columns.key, columns.strength
    column_decay = tl.gather(block.decays, near, 0)
    left = tl.dot(block.key, tl.trans(key))
    is_before = block.is_real[:, None] & is_near[None, :]
    left = _coupled(left, is_before, block.decay, column_decay) * block.strength[:, None]
    is_stored = block.is_new[:, None] & is_near[None, :]
    nearest = tl.dot(block.diagonal, left, input_precision=precision)
    nearest = -tl.dot(nearest, columns.above, input_precision=precision)
    tl.store(chunk.inverse + inverse_offset(block.token[:, None], near[None, :]), nearest, mask=is_stored)
    read_key = tl.zeros(block.key.shape, dtype=tl.float32)
    if block.query is not None:
        tl.store(block.pair + near[None, :], nearest.to(operand), mask=is_stored)
        _store_scores(block, key, is_stored, near, column_decay, chunk_size)
        near_key = (key * strength[:, None] * tl.exp2(column_decay)[:, None]).to(operand)
    if FAR > 0:
        key, strength = columns.far_key, columns.far_strength
        f = tl.arange(0, FAR)
        is_far = f < 16 * chunk.r - 16
        column_decay = tl.gather(block.decays, f, 0)
        far_left = tl.dot(block.key, tl.trans(key))
        far_left = _coupled(far_left, block.is_real[:, None] & is_far[None, :], block.decay, column_decay)
        sums = tl.dot(far_left * block.strength[:, None], columns.far_rows, input_precision=precision)
        sums = tl.dot(left, columns.near_rows, sums, input_precision=precision)
        further = -tl.dot(block.diagonal, sums, input_precision=precision)
        is_stored = block.is_new[:, None] & is_far[None, :]
        tl.store(chunk.inverse + inverse_offset(block.token[:, None], f[None, :]), further, mask=is_stored)
        if block.query is not None:
            tl.store(block.pair + f[None, :], further.to(operand), mask=is_stored)
            _store_scores(block, key, is_stored, f, column_decay, chunk_size)
            far_key = (key * strength[:, None] * tl.exp2(column_decay)[:, None]).to(operand)
            read_key = tl.dot(further.to(operand), far_key, read_key)
    if block.query is not None:
        read_key = tl.dot(nearest.to(operand), near_key, read_key)
        key = (block.key * block.strength[:, None] * tl.exp2(block.decay)[:, None]).to(operand)
        read_key = tl.dot(block.diagonal.to(operand), key, read_key)
    return read_key


@triton.jit
def _serial_columns(
    chunk, block, key_stride: tl.constexpr, chunk_size: tl.constexpr, block_tokens: tl.constexpr
):  # fmt: skip
    """Store the columns before the diagonal, which are read block by block."""
    operand: tl.constexpr = chunk.keys.dtype.element_ty
    precision: tl.constexpr = "tf32" if chunk_size == 64 else "ieee"
    i = tl.arange(0, 16)
    t = tl.arange(0, chunk_size)
    n = tl.arange(0, block.key.shape[1])
    is_new = block.is_new[:, None]
    left = tl.zeros((16, 16), dtype=tl.float32)
    sums = tl.zeros((16, chunk_size), dtype=tl.float32)
    for c in range(chunk.r):
        column = 16 * c + i
        key_offsets = _in_block(chunk, c, column < chunk.end, block_tokens, key_stride)
        key = tl.load(chunk.keys + key_offsets[:, None] + n[None, :], mask=chunk.in_key, other=0.0)
        is_stored = column[:, None] // 16 >= t[None, :] // 16
        above_ptrs = chunk.inverse + inverse_offset(column[:, None], t[None, :])
        above = tl.load(above_ptrs, mask=is_stored, other=0.0)
        column_decay = tl.gather(block.decays, column, 0)
        left = tl.dot(block.key, tl.trans(key))
        left = _coupled(left, block.is_real[:, None], block.decay, column_decay) * block.strength[:, None]
        sums = tl.dot(left, above, sums, input_precision=precision)
        if block.query is not None:
            _store_scores(block, key, is_new, column, column_decay, chunk_size)
    if chunk.r > 0:
        further = -tl.dot(block.diagonal, sums, input_precision=precision)
        is_further = is_new & (t < 16 * chunk.r - 16)[None, :]
        tl.store(chunk.inverse + inverse_offset(block.token[:, None], t[None, :]), further, mask=is_further)
        column = 16 * chunk.r - 16 + i
        above = tl.load(chunk.inverse + inverse_offset(column[:, None], column[None, :]))
        nearest = tl.dot(block.diagonal, left, input_precision=precision)
        nearest = -tl.dot(nearest, above, input_precision=precision)
        tl.store(chunk.inverse + inverse_offset(block.token[:, None], column[None, :]), nearest, mask=is_new)
        if block.query is not None:
            tl.store(block.pair + t[None, :], further.to(operand), mask=is_further)
            tl.store(block.pair + column[None, :], nearest.to(operand), mask=is_new)


@triton.jit
def _serial_read_keys(
    chunk, block, heads: tl.constexpr, key_stride: tl.constexpr, block_tokens: tl.constexpr
):  # fmt: skip
    """The keys that read the state: products of the new rows of the inverse, just stored, with keys."""
    n = tl.arange(0, block.key.shape[1])
    tl.debug_barrier()  # below, a thread reads what another thread has stored above
    read_key = tl.zeros(block.key.shape, dtype=tl.float32)
    for c in range(chunk.r + 1):
        column = 16 * c + tl.arange(0, 16)
        is_real = column < chunk.end
        key_offsets = _in_block(chunk, c, is_real, block_tokens, key_stride)
        is_key = is_real[:, None] & chunk.in_key
        key = tl.load(chunk.keys + key_offsets[:, None] + n[None, :], mask=is_key, other=0.0)
        inverse_rows = tl.load(block.pair + column[None, :], mask=block.is_new[:, None], other=0.0)
        scaled = key * tl.load(chunk.beta + column * heads, mask=is_real, other=0.0)[:, None]
        scaled = scaled * tl.exp2(tl.gather(block.decays, column, 0))[:, None]
        read_key = tl.dot(inverse_rows, scaled.to(chunk.keys.dtype.element_ty), read_key)
    return read_key


@triton.jit
def solve_rows_kernel(
    # Pointers
    queries, k_inputs, g_inputs, beta_inputs, inverses, solved, solved_decays,
    input_rows, input_blocks, starts, ends,
    # Strides
    k_input_stride: tl.int64, g_row_stride: tl.int64, beta_row_stride: tl.int64, inverse_row_stride: tl.int64,
    # Dimensions
    tokens: tl.constexpr, heads: tl.constexpr, heads_of_key: tl.constexpr, key_dim: tl.constexpr,
    chunk_size: tl.constexpr, block_tokens: tl.constexpr,
    # Meta-parameters
    TAILS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """New tokens' rows of the inverse, of read keys and of scores; a program has a row and a value head."""
    inverse_size: tl.constexpr = chunk_size * (chunk_size + 16) // 2
    key_stride: tl.constexpr = heads // heads_of_key * key_dim
    solved_size: tl.constexpr = key_dim + 2 * chunk_size
    head = tl.program_id(0) % heads
    row = (tl.program_id(0) // heads).to(tl.int64)
    input_row = tl.load(input_rows + row)
    if TAILS:
        start = 0
        end = (tl.load(ends + row + 1) - tl.load(starts + row)).to(tl.int32)
    else:
        start = tl.load(starts + row) % chunk_size
        end = start + tl.load(ends + row)
        queries += head // heads_of_key * key_dim
    if (input_row >= 0) & (end > start):
        keys = k_inputs + head // heads_of_key * key_dim
        table = input_blocks + row * ((chunk_size + block_tokens - 1) // block_tokens)
        g = g_inputs + input_row * g_row_stride + head
        beta = beta_inputs + input_row * beta_row_stride + head
        inverse = inverses + input_row * inverse_row_stride + head * inverse_size
        solved += head * solved_size
        solved_decays += head
        if tokens == 1:
            _new_rows(
                keys, table, k_input_stride, queries, g, beta, inverse, solved, solved_decays, row,
                start // 16, start, end,
                tokens, heads, key_stride, key_dim, chunk_size, block_tokens, BLOCK_K, WIDE,
            )  # fmt: skip
        else:
            for r in range(start // 16, (end + 15) // 16):
                _new_rows(
                    keys, table, k_input_stride, queries, g, beta, inverse, solved, solved_decays, row, r,
                    start, end, tokens, heads, key_stride, key_dim, chunk_size, block_tokens, BLOCK_K, WIDE,
                )  # fmt: skip
                tl.debug_barrier()  # below, a thread reads what another thread has stored
