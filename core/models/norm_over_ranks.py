"""The gated norm of groups of channels that lie on several ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..parallel_groups import ParallelGroups


def gated_rms_norm_over_ranks(
    y: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    num_groups: int,
    groups: ParallelGroups,
    compute_dtype: torch.dtype,
    *,
    gates_first: bool = True,
) -> Tensor:
    """`KernelSet.gated_rms_norm` where a group's channels lie on several ranks, which add up their squares.

    A collective of the tensor group.

    Args:
        y, gate: [T, channels of this rank], all of one group.
        weight: [channels of this rank].
        eps: is added to the mean square.
        num_groups: of the whole model; a divisor of the number of ranks.
        groups: the ranks.
        compute_dtype: in which the norm is computed.
        gates_first: whether y is normalised after it was gated, or before.

    Returns: the shape and dtype of `y`.
    """
    silu = F.silu(gate.to(compute_dtype))
    x = y.to(compute_dtype)
    if gates_first:
        x = x * silu
    ranks = groups.tensor_size // num_groups
    group = groups.tensor_rank // ranks
    squares = x.new_zeros(len(x), num_groups)
    squares[:, group] = x.square().sum(-1)
    total = groups.sum_partials(squares)[:, group, None]
    normed = x * torch.rsqrt(total / (x.shape[1] * ranks) + eps) * weight.to(compute_dtype)
    return (normed if gates_first else normed * silu).to(y.dtype)
