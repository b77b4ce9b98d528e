"""What the ranks that share the heads of each layer compute together: sums, gated norms, logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inference.kernels.kernel_set import KernelSet
from ..parallel_groups import ParallelGroups
from ..validation import ceil_div

Ranks = ParallelGroups | None  # the ranks that share the heads of each layer; None for one rank


def gated_norm(
    y: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, ranks: Ranks,
    kernels: KernelSet, *, gates_first: bool = True,
) -> Tensor:  # fmt: skip
    """The norm of each of the model's `num_groups` groups of channels; y and gate [T, channels] of this rank.

    With `gates_first`, y is normalised after it was gated, else before. Where a group's channels lie on
    several ranks, these add up their squares.
    """
    size = 1 if ranks is None else ranks.tensor_size
    if ranks is None or num_groups >= size:
        if gates_first:
            return kernels.gate_then_rms_norm(y, gate, weight, num_groups // size, eps)
        y, gate, weight = (torch.unflatten(x, -1, (num_groups // size, -1)) for x in (y, gate, weight))
        return kernels.rms_norm_then_gate(y, gate, weight, eps).flatten(1)
    dtype = kernels.compute_dtype(y.dtype)
    silu, x = F.silu(gate.to(dtype)), y.to(dtype)
    if gates_first:
        x = x * silu
    ranks_of_group = size // num_groups
    group = ranks.tensor_rank // ranks_of_group
    squares = x.new_zeros(len(x), num_groups)
    squares[:, group] = x.square().sum(-1)
    total = ranks.sum_partials(squares)[:, group, None]
    normed = x * torch.rsqrt(total / (x.shape[1] * ranks_of_group) + eps) * weight.to(dtype)
    return (normed if gates_first else normed * silu).to(y.dtype)


def sum_over_ranks(partial: Tensor, ranks: Ranks, kernels: KernelSet) -> Tensor:
    """The sum of the ranks' results, in the dtype of `partial`, which is overwritten."""
    if ranks is None:
        return partial
    return ranks.sum_partials(partial.to(kernels.compute_dtype(partial.dtype))).to(partial.dtype)


def head_logits(hidden: Tensor, weight: Tensor, vocab_size: int, ranks: Ranks, kernels: KernelSet) -> Tensor:
    """Logits [..., vocab_size] of a head, of which each rank has the rows of `vocabulary_part_of`."""
    logits = kernels.head_product(hidden, weight)
    if ranks is None:
        return logits
    most = ceil_div(vocab_size, ranks.tensor_size)
    columns = ranks.gather_columns(F.pad(logits, (0, most - logits.shape[-1])))
    return columns[..., :vocab_size].contiguous()
