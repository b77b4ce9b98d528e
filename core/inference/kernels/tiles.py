"""What several families of kernels do: load a tile, find an input, see if a row names a state, gate."""

import triton
import triton.language as tl


@triton.jit
def load_tile(pointers, rows, columns):
    """The numbers at pointers [rows, columns]; 0 outside of the rows and columns that exist."""
    return tl.load(pointers, mask=rows[:, None] & columns[None, :], other=0.0)


@triton.jit
def places(table, token, mask, stride, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """Where tokens of a chunk begin in a pool of input blocks, each TOKENS tokens of SIZE numbers.

    `table`: the row's input blocks.
    """
    block = tl.load(table + token // TOKENS, mask=mask, other=0).to(tl.int64)
    return block * stride + token % TOKENS * SIZE


@triton.jit
def any_index(source, destinations, stride, TOKENS: tl.constexpr):
    """The largest pool index of a decode row: of its source, and of a destination for each token."""
    index = source
    for token in tl.static_range(TOKENS):
        index = tl.maximum(index, tl.load(destinations + token * stride))
    return index


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    u = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, u, 1.0) / (1.0 + u)
