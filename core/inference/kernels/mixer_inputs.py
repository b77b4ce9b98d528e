"""What mixers hand to kernels: the weights of a delta net, and the inputs that decodes by replay keep."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
