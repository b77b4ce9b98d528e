"""The product of the language model's head on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor


def head_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """As `reference.pointwise.head_product`: logits in float32, from operands in the model's dtype.

    A bfloat16 or float16 weight is read as it lies: cuBLAS adds in float32, and writes float32. torch has
    this product for GPUs only, and for operands of one dtype; others are widened.
    """
    if not hidden.numel():
        return torch.zeros(*hidden.shape[:-1], len(weight), dtype=torch.float32, device=hidden.device)
    if hidden.dtype == torch.float32 or not hidden.is_cuda or hidden.dtype != weight.dtype:
        return F.linear(hidden.float(), weight.float())
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return logits.view(*hidden.shape[:-1], len(weight))
