"""What callers hand to kernels, but for a step's rows: pools of states and of inputs, draws of tokens."""

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


class RawTokens(NamedTuple):
    """What convolves the tokens of a decode by replay, as in `causal_conv1d_replay`."""

    net: DeltaNet
    conv_states: Tensor
    conv_inputs: Tensor
    destinations: Tensor


class SsdInputs(NamedTuple):
    """Pools of what a Mamba-2 layer's tokens since the last grid point put in."""

    x: Tensor  # [blocks, tokens, H, P]
    B: Tensor  # [blocks, tokens, G, N]
    dt: Tensor  # [requests, 2, H, chunk_size]: dt, and sums of dt * A from the grid point, in `compute_dtype`


class DeltaInputs(NamedTuple):
    """Pools of what a gated delta net's tokens since the last grid point put in.

    The last two are for 16-bit tokens on a GPU. An inverse is that of a chunk's triangular system, in blocks
    of 16 x 16 on and below the diagonal; of a larger row, the first numbers, without gaps between heads.
    """

    k: Tensor  # [blocks, tokens, Hk, Dk] normalised
    v: Tensor  # [blocks, tokens, Hv, Dv]
    g: Tensor  # [requests, chunk_size, Hv]
    beta: Tensor  # [requests, chunk_size, Hv]
    new_v: Tensor | None = None  # [blocks, tokens, Hv, Dv] what each token adds to the value of its key
    inverses: Tensor | None = None  # [requests, Hv, (chunk_size + 16) // 2, chunk_size] float32


def check_slots(**pools: Tensor) -> None:
    """Raise a ValueError that names a pool [slots, ...] whose slots have gaps."""
    for name, pool in pools.items():
        if not pool[:1].is_contiguous():
            raise ValueError(f"{name} has strides {pool.stride()}; accepted: contiguous slots of any stride")


def check_last_stride(**tensors: Tensor) -> None:
    """Raise a ValueError that names a tensor whose last dimension is not dense."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; accepted: a last stride of 1")


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
