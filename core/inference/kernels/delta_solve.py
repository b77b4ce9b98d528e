"""New rows of a chunk's triangular system, for decodes of the gated delta rule by replay.

A row depends on earlier rows only, of which a request keeps those of the inverse. What depends on the state
follows in `delta_replay`.
"""

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
def _coupled(products, mask, decay, of_column):
    """Products of keys or queries with keys, decayed from the column's token to the row's."""
    return products * tl.where(mask, tl.exp2(decay[:, None] - of_column[None, :]), 0.0)


@triton.jit
def _in_block(table, block, i, mask, stride, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """`places` of the 16 tokens of a block; one load where no input block ends inside of it."""
    if TOKENS % 16 == 0:
        input_block = tl.load(table + 16 * block // TOKENS).to(tl.int64)
        return input_block * stride + (16 * block % TOKENS + i) * SIZE
    else:
        return places(table, 16 * block + i, mask, stride, TOKENS, SIZE)


@triton.jit
def _new_rows(
    keys, table, input_stride, queries, g, beta, inverse, solved, solved_decays, row, r, start, end,
    tokens: tl.constexpr, heads: tl.constexpr, key_stride: tl.constexpr, key_dim: tl.constexpr,
    chunk_size: tl.constexpr, block_tokens: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store the new rows of block row r: of the inverse, of the keys that read the state, and of scores;
    without `queries`, those of the inverse only. Earlier rows of the inverse are stored.

    As fla-core's chunk_gated_delta_rule_fwd_kkt_solve_kernel; for chunks of 32, solve_tril. Sums over block
    columns are in their order; blocks that they have not are zeros, which change no sum. With `WIDE` the
    blocks behind the nearest one are one tile, and all loads come first: their latency is most of the time.
    """
    operand: tl.constexpr = keys.dtype.element_ty
    precision: tl.constexpr = "tf32" if chunk_size == 64 else "ieee"
    FAR: tl.constexpr = chunk_size - 32  # tokens behind the nearest block
    i = tl.arange(0, 16)
    t = tl.arange(0, chunk_size)
    n = tl.arange(0, BLOCK_K)
    token = 16 * r + i
    in_block = token < end
    is_new = in_block & (token >= start)
    below = i[:, None] > i[None, :]
    is_solved = (token < start)[:, None] & below
    in_key = (n < key_dim)[None, :]
    new = row * tokens + token - start

    gates = tl.load(g + t * heads, mask=t < end, other=0.0)
    of_key = _in_block(table, r, i, in_block, input_stride, block_tokens, key_stride)
    block_key = tl.load(keys + of_key[:, None] + n[None, :], mask=in_block[:, None] & in_key, other=0.0)
    strength = tl.load(beta + token * heads, mask=in_block, other=0.0)
    own = tl.load(inverse + inverse_offset(token[:, None], token[None, :]), mask=is_solved, other=0.0)
    if queries is not None:
        query = tl.load(
            queries + new[:, None] * key_stride + n[None, :], mask=is_new[:, None] & in_key, other=0.0
        )
    if WIDE:
        is_near = (i >= 0) & (r > 0)
        near = tl.where(is_near, token - 16, 0)
        of_key = _in_block(table, tl.maximum(r, 1) - 1, i, is_near, input_stride, block_tokens, key_stride)
        near_key = tl.load(keys + of_key[:, None] + n[None, :], mask=is_near[:, None] & in_key, other=0.0)
        near_strength = tl.load(beta + near * heads, mask=is_near, other=0.0)
        of_near = inverse_offset(near[:, None], near[None, :])
        above = tl.load(inverse + of_near, mask=is_near[:, None], other=0.0)
    if WIDE and FAR > 0:
        f = tl.arange(0, FAR)
        is_far = f < 16 * r - 16
        of_key = places(table, f, is_far, input_stride, block_tokens, key_stride)
        far_key = tl.load(keys + of_key[:, None] + n[None, :], mask=is_far[:, None] & in_key, other=0.0)
        far_strength = tl.load(beta + f * heads, mask=is_far, other=0.0)
        is_stored = is_far[:, None] & (f[:, None] // 16 >= f[None, :] // 16)
        far_rows = tl.load(inverse + inverse_offset(f[:, None], f[None, :]), mask=is_stored, other=0.0)
        of_near = inverse_offset(near[:, None], f[None, :])
        near_rows = tl.load(inverse + of_near, mask=is_near[:, None] & is_far[None, :], other=0.0)
    decays = decay_sums(gates, chunk_size)
    decay = tl.gather(decays, token, 0)

    coupling = tl.dot(block_key, tl.trans(block_key))
    coupling = _coupled(coupling, below & in_block[:, None], decay, decay) * strength[:, None]
    own = tl.where((token < start)[:, None], own, -coupling)
    for own_row in range(tl.maximum(2, start - 16 * r), tl.minimum(16, end - 16 * r)):
        solved_row = tl.sum(tl.where((i == own_row)[:, None], -coupling, 0.0), 0)
        solved_row = tl.where(i < own_row, solved_row, 0.0)
        solved_row = solved_row + tl.sum(solved_row[:, None] * own, 0)
        own = tl.where((i == own_row)[:, None], solved_row, own)
    own += i[:, None] == i[None, :]
    tl.store(inverse + inverse_offset(token[:, None], token[None, :]), own, mask=is_new[:, None])
    if queries is not None:
        of_pair = solved + new[:, None] * (heads * (key_dim + 2 * chunk_size)) + key_dim
        tl.store(of_pair + token[None, :], own.to(operand), mask=is_new[:, None])
        scores = tl.dot(query, tl.trans(block_key))
        scores = _coupled(scores, (i[:, None] >= i[None, :]) & is_new[:, None], decay, decay)
        tl.store(of_pair + chunk_size + token[None, :], scores.to(operand), mask=is_new[:, None])
        is_later = is_new[:, None] & (t >= 16 * r + 16)[None, :]
        tl.store(of_pair + t[None, :], tl.zeros((16, chunk_size), operand), mask=is_later)
        tl.store(of_pair + chunk_size + t[None, :], tl.zeros((16, chunk_size), operand), mask=is_later)
        tl.store(solved_decays + new * heads, decay, mask=is_new)

    if WIDE:
        of_column = tl.gather(decays, near, 0)
        left = tl.dot(block_key, tl.trans(near_key))
        left = _coupled(left, in_block[:, None] & is_near[None, :], decay, of_column) * strength[:, None]
        is_stored = is_new[:, None] & is_near[None, :]
        nearest = tl.dot(own, left, input_precision=precision)
        nearest = -tl.dot(nearest, above, input_precision=precision)
        tl.store(inverse + inverse_offset(token[:, None], near[None, :]), nearest, mask=is_stored)
        read_key = tl.zeros((16, BLOCK_K), dtype=tl.float32)
        if queries is not None:
            tl.store(of_pair + near[None, :], nearest.to(operand), mask=is_stored)
            scores = tl.dot(query, tl.trans(near_key))
            scores = _coupled(scores, is_stored, decay, of_column)
            tl.store(of_pair + chunk_size + near[None, :], scores.to(operand), mask=is_stored)
            near_key = (near_key * near_strength[:, None] * tl.exp2(of_column)[:, None]).to(operand)
    if WIDE and FAR > 0:
        of_column = tl.gather(decays, f, 0)
        far_left = tl.dot(block_key, tl.trans(far_key))
        far_left = _coupled(far_left, in_block[:, None] & is_far[None, :], decay, of_column)
        sums = tl.dot(far_left * strength[:, None], far_rows, input_precision=precision)
        sums = tl.dot(left, near_rows, sums, input_precision=precision)
        further = -tl.dot(own, sums, input_precision=precision)
        is_stored = is_new[:, None] & is_far[None, :]
        tl.store(inverse + inverse_offset(token[:, None], f[None, :]), further, mask=is_stored)
        if queries is not None:
            tl.store(of_pair + f[None, :], further.to(operand), mask=is_stored)
            scores = tl.dot(query, tl.trans(far_key))
            scores = _coupled(scores, is_stored, decay, of_column)
            tl.store(of_pair + chunk_size + f[None, :], scores.to(operand), mask=is_stored)
            far_key = (far_key * far_strength[:, None] * tl.exp2(of_column)[:, None]).to(operand)
            read_key = tl.dot(further.to(operand), far_key, read_key)

    if WIDE:
        if queries is not None:
            read_key = tl.dot(nearest.to(operand), near_key, read_key)
            block_key = (block_key * strength[:, None] * tl.exp2(decay)[:, None]).to(operand)
            read_key = tl.dot(own.to(operand), block_key, read_key)
            tl.store(of_pair - key_dim + n[None, :], read_key.to(operand), mask=is_new[:, None] & in_key)
    else:
        if chunk_size > 16:
            left = tl.zeros((16, 16), dtype=tl.float32)
            sums = tl.zeros((16, chunk_size), dtype=tl.float32)
            for c in range(r):
                column = 16 * c + i
                of_key = _in_block(table, c, i, column < end, input_stride, block_tokens, key_stride)
                key = tl.load(keys + of_key[:, None] + n[None, :], mask=in_key, other=0.0)
                above = tl.load(
                    inverse + inverse_offset(column[:, None], t[None, :]),
                    mask=(column[:, None] // 16 >= t[None, :] // 16),
                    other=0.0,
                )
                of_column = tl.gather(decays, column, 0)
                left = tl.dot(block_key, tl.trans(key))
                left = _coupled(left, in_block[:, None], decay, of_column) * strength[:, None]
                sums = tl.dot(left, above, sums, input_precision=precision)
                if queries is not None:
                    scores = tl.dot(query, tl.trans(key))
                    scores = _coupled(scores, is_new[:, None], decay, of_column)
                    tl.store(of_pair + chunk_size + column[None, :], scores.to(operand), mask=is_new[:, None])
            if r > 0:
                further = -tl.dot(own, sums, input_precision=precision)
                is_further = is_new[:, None] & (t < 16 * r - 16)[None, :]
                tl.store(inverse + inverse_offset(token[:, None], t[None, :]), further, mask=is_further)
                column = 16 * r - 16 + i
                above = tl.load(inverse + inverse_offset(column[:, None], column[None, :]))
                nearest = tl.dot(own, left, input_precision=precision)
                nearest = -tl.dot(nearest, above, input_precision=precision)
                tl.store(
                    inverse + inverse_offset(token[:, None], column[None, :]), nearest, mask=is_new[:, None]
                )
                if queries is not None:
                    tl.store(of_pair + t[None, :], further.to(operand), mask=is_further)
                    tl.store(of_pair + column[None, :], nearest.to(operand), mask=is_new[:, None])

        if queries is not None:
            tl.debug_barrier()  # below, a thread reads what another thread has stored above
            read_key = tl.zeros((16, BLOCK_K), dtype=tl.float32)
            for c in range(r + 1):
                column = 16 * c + i
                real = column < end
                of_key = _in_block(table, c, i, real, input_stride, block_tokens, key_stride)
                key = tl.load(keys + of_key[:, None] + n[None, :], mask=real[:, None] & in_key, other=0.0)
                block = tl.load(of_pair + column[None, :], mask=is_new[:, None], other=0.0)
                scaled = key * tl.load(beta + column * heads, mask=real, other=0.0)[:, None]
                scaled = scaled * tl.exp2(tl.gather(decays, column, 0))[:, None]
                read_key = tl.dot(block, scaled.to(operand), read_key)
            tl.store(of_pair - key_dim + n[None, :], read_key.to(operand), mask=is_new[:, None] & in_key)


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
