"""How far two results are apart, relative to the largest number of the first."""

import math

import torch
from torch import Tensor

from .memory_stage import Outcome

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The difference that `check_model` accepts by default, for the coarsest dtype that a model uses."""


def largest_difference(
    reference: Tensor, other: Tensor, where: Tensor | None = None, groups: int = 1
) -> float:
    """The largest difference of two tensors of one shape.

    Args:
        where: which numbers count; None for all.
        groups: how many equal parts of the tensors are each held against their own largest number.

    Returns:
        The difference divided by the largest number of `reference`; infinite where either is no number.
    """
    if reference.numel() == 0:
        return 0.0
    ours, theirs = (tensor.double().reshape(groups, -1) for tensor in (reference, other))
    if where is not None:
        outside = ~where.reshape(groups, -1)
        ours, theirs = ours.masked_fill(outside, 0), theirs.masked_fill(outside, 0)
    apart, scale = (ours - theirs).abs().amax(1), ours.abs().amax(1)
    ratio = apart / torch.where(scale > 0, scale, 1.0)
    return float(ratio.max()) if bool(ratio.isfinite().all()) else math.inf


def outcome_difference(reference: Outcome, other: Outcome, num_logits: int) -> float:
    """The largest difference of what two calls computed for one step, where the first wrote anything."""
    layers = reference.kv.shape[0]
    differences = [
        largest_difference(reference.kv, other.kv, _spread(reference.kv_written, reference.kv), 2 * layers)
    ]
    for ours, theirs, written in zip(reference.states, other.states, reference.states_written, strict=True):
        differences.append(largest_difference(ours, theirs, written, ours.shape[0]))
    if isinstance(reference.logits, Tensor):
        if not isinstance(other.logits, Tensor) or other.logits.shape[1:] != reference.logits.shape[1:]:
            return math.inf
        ours, theirs = reference.logits[:num_logits], other.logits[:num_logits]
        if ours.shape != theirs.shape:
            return math.inf
        differences.append(largest_difference(ours, theirs, groups=max(1, len(ours))))
    return max(differences)


def _spread(written: Tensor, kv: Tensor) -> Tensor:
    return written[..., None, None].expand(kv.shape)
