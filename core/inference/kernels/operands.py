"""What callers hand to kernels: pools of states, rows of attention, draws of tokens."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WHOLE = 1 << 53  # how many parts make up probability 1
FEW_ROWS = 8  # of a product of `few_rows`, at most


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, decays, scores and states of a `dtype` model are computed."""
    return torch.promote_types(dtype, torch.float32)


class ConvAndSsm(NamedTuple):
    """Two tensors of states, conv [layers, slots, ...] and ssm [layers, slots, ...]; one may be empty."""

    conv: Tensor
    ssm: Tensor


SMALLEST = 2.0**-110
"""Groups without an entry of this size are stored as zeros; their scales stay normal float32 numbers."""
LARGEST_NUMBER = 127
INVERSE_OF_LARGEST = 1.0 / LARGEST_NUMBER


class CodedTensor(NamedTuple):
    """One state tensor in the pool of live slots, and in the store of durable slots.

    Attributes:
        states: [layers, slots, *shape], a slot of a layer contiguous.
        numbers: [layers, durable slots, *shape], a slot of a layer contiguous.
        scales: [layers, durable slots, *shape without `scale_axis`] bfloat16; None where `numbers` are
            floats.
        scale_axis: an axis of `shape`; None without scales.
    """

    states: Tensor
    numbers: Tensor
    scales: Tensor | None = None
    scale_axis: int | None = None


class DeltaNet(NamedTuple):
    """What makes q, k, v, g and beta of a gated delta net's projections: raw tokens, a and b.

    Arguments of `causal_conv1d_update`, with SiLU, and of `delta_gates`; `keys` are Hk and Dk, `values` Hv
    and Dv. In decodes by replay on a GPU all tensors are contiguous.
    """

    weight: Tensor
    bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    keys: tuple[int, int]
    values: tuple[int, int]
    doubled: bool = False

    def heads(self, qkv: Tensor) -> list[Tensor]:
        """Views of q, k and v by heads, of [..., channels]."""
        return split_heads(qkv, (self.keys, self.keys, self.values))


def split_heads(packed: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Views of [..., channels], which lie side by side: [..., heads, size] for each shape."""
    parts = torch.split_with_sizes(packed, [heads * size for heads, size in shapes], dim=-1)
    return [torch.unflatten(part, -1, shape) for part, shape in zip(parts, shapes, strict=True)]


RawTokens = tuple[DeltaNet, Tensor, Tensor, Tensor]
"""Of a decode by replay: `conv_states`, `conv_inputs` and `destinations` of the convolution, too."""


def check_slots(**pools: Tensor) -> None:
    """Raise a ValueError that names a pool [slots, ...] whose slots have gaps."""
    for name, pool in pools.items():
        if not pool[:1].is_contiguous():
            raise ValueError(f"{name} has strides {pool.stride()}; accepted: contiguous slots of any stride")


def page_table(pages: Tensor | None, input_rows: Tensor) -> Tensor:
    """[rows, pages of a chunk], dense; without pages `input_rows`, as pages of a whole chunk each."""
    return input_rows[:, None].contiguous() if pages is None else pages.contiguous()


def check_last_stride(**tensors: Tensor) -> None:
    """Raise a ValueError that names a tensor whose last dimension is not dense."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; accepted: a last stride of 1")


class AttentionRows(NamedTuple):
    """The rows of a step, decode rows first, and their places in the paged KV cache.

    A row's queries are the last tokens of the row's sequence. The tokens of decode row r lie at
    r * decode_tokens; padding lies after the row's real tokens. Prefill rows lie one after another, after
    all decode rows and their padding; padding tokens lie after the last prefill row. A padding row has no
    tokens, no KV, and 0 in the block table. Attention of padding tokens is unspecified.

    Attributes:
        block_table: [R, blocks] int32: KV blocks of each row in order, padded with 0.
        kv_lengths: [R] int32: tokens of each row's sequence, the row's real tokens included.
        query_start_loc: [R + 1] int32: the place of each row's first token in `query`; trailing total.
        query_lengths: [R] int32: the real tokens of each row.
        positions: [T] int64: the position of each token in its sequence; 0 for padding tokens.
        num_decodes: the number of decode rows, padding included.
        decode_tokens: the tokens of each decode row, padding included.
        max_query_tokens: at least the tokens of the longest prefill row.
        one_split: whether a backend that cuts a sequence's KV into parts for more thread blocks leaves it
            whole, or cuts it at fixed positions, so that the bits of a row do not depend on the other rows.
    """

    block_table: Tensor
    kv_lengths: Tensor
    query_start_loc: Tensor
    query_lengths: Tensor
    positions: Tensor
    num_decodes: int
    decode_tokens: int
    max_query_tokens: int
    one_split: bool = False

    @property
    def num_rows(self) -> int:
        return self.block_table.shape[0]

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes * self.decode_tokens

    @property
    def longest_query(self) -> int:
        """At least the tokens of the longest row, and at least 1."""
        return max(1, self.max_query_tokens, self.decode_tokens if self.num_decodes else 0)


class TokenDraw(NamedTuple):
    """How the token of one row of logits is drawn.

    Attributes:
        row: the row of logits.
        temperature: divides the logits, > 0; clamped to the normal numbers of the scores' dtype.
        top_k: keep the k most likely tokens; of equally likely ones those with the lowest ids. 0 keeps all.
        top_p: keep the smallest set of most likely tokens that reaches this probability, in (0, 1]; of
            equally likely ones those with the lowest ids. 1 keeps all.
        uniform: a random number in [0, 1).
        min_p: keep the tokens that are at least so many times as likely as the most likely one. 0 keeps all.
    """

    row: int
    temperature: float
    top_k: int
    top_p: float
    uniform: float
    min_p: float = 0.0

    @property
    def least_score(self) -> float:
        """What a token's logit is below the largest one at most, after the temperature."""
        return math.log(self.min_p) if self.min_p else -math.inf

    @property
    def needed_parts(self) -> int:
        """`top_p` in parts."""
        return math.ceil(self.top_p * WHOLE)
