"""The recurrences of Mamba-2 and of the gated delta net in chunks, with gradients.

Both start from a state of zeros and compute in the dtype of their inputs, which should be float32 or wider.
Sequences have any length: the last chunk is padded. Decays enter as differences of logarithms that are never
positive, so that nothing overflows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def scan_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk: int) -> Tensor:
    """h = exp(dt A) h + dt x B^T; y = h C + D x (arXiv 2405.21060, section 6).

    Args:
        x: [batch, L, H, P]. dt: [batch, L, H], after softplus. A: [H], negative. D: [H].
        B, C: [batch, L, G, N]; head h belongs to group h // (H // G).
        chunk: tokens of one chunk.

    Returns: y, the shape of `x`.
    """
    batch, length, heads, _ = x.shape
    groups = B.shape[2]
    log_decay = _in_chunks(dt * A, chunk)  # [batch, c, q, H]; padding neither decays nor adds
    scaled, B, C = (_in_chunks(part, chunk) for part in (dt[..., None] * x, B, C))
    total = log_decay.cumsum(2).movedim(3, 2)  # [batch, c, H, q]
    chunks = total.shape[1]

    scores = torch.einsum("bcign,bcjgn->bcgij", C, B).repeat_interleave(heads // groups, dim=2)
    within = scores * _decays(total, strict=False)
    scaled = scaled.movedim(3, 2)  # [batch, c, H, q, P]
    keys = B.movedim(3, 2).repeat_interleave(heads // groups, dim=2)  # [batch, c, H, q, N]
    queries = C.movedim(3, 2).repeat_interleave(heads // groups, dim=2)
    y = within @ scaled

    to_end = (total[..., -1:] - total).exp()
    added = (scaled * to_end[..., None]).mT @ keys  # [batch, c, H, P, N]: what a chunk adds to the state
    ends = total[..., -1].cumsum(1).movedim(1, 2)  # [batch, H, c]
    # The state that enters chunk i: what chunk j < i added, decayed by the chunks in between.
    before = F.pad(ends, (1, 0))[..., :-1]
    between = (before[..., :, None] - ends[..., None, :]).masked_fill(
        torch.ones(chunks, chunks, dtype=torch.bool, device=x.device).triu(), float("-inf")
    )
    entering = torch.einsum("bhij,bjhpn->bihpn", between.exp(), added)
    y = y + (queries * total.exp()[..., None]) @ entering.mT
    return y.movedim(2, 3).reshape(batch, chunks * chunk, heads, -1)[:, :length] + D[:, None] * x


def scan_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """S = exp(g) S; S = S + k (beta (v - S^T k))^T; o = S^T q (arXiv 2412.06464, section 3.3).

    Within a chunk the updates depend on each other: they solve a unit lower triangular system.

    Args:
        q, k: [batch, L, Hk, Dk], raw: they are normalised here, and q is scaled by Dk ** -0.5.
        v: [batch, L, Hv, Dv]; value head h reads key head h // (Hv // Hk).
        g: [batch, L, Hv] log decays. beta: [batch, L, Hv], between 0 and 1.
        chunk: tokens of one chunk, a power of two.

    Returns: o, the shape of `v`.
    """
    batch, length, heads, value_dim = v.shape
    key_dim, shared = q.shape[-1], heads // q.shape[2]
    q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    q, k, v = (_in_chunks(part, chunk).movedim(3, 2) for part in (q * key_dim**-0.5, k, v))
    q, k = (part.repeat_interleave(shared, dim=2) for part in (q, k))  # [batch, c, Hv, q, Dk]
    beta, total = (_in_chunks(part, chunk).movedim(3, 2) for part in (beta, g))
    total = total.cumsum(-1)  # [batch, c, Hv, q]

    k_beta = k * beta[..., None]
    strict = (k_beta @ k.mT) * _decays(total, strict=True)
    inverse = _UnitLowerInverse.apply(strict)
    updates = inverse @ (v * beta[..., None])
    known = inverse @ (k_beta * total.exp()[..., None])
    within = (q @ k.mT) * _decays(total, strict=False)
    queries = q * total.exp()[..., None]
    keys = k * (total[..., -1:] - total).exp()[..., None]
    decay = total[..., -1, None, None].exp()

    state = v.new_zeros(batch, heads, key_dim, value_dim)
    outputs = []
    parts = (queries, within, keys.mT, decay, updates, known)
    for query, inside, key, decayed, update, seen in zip(*(part.unbind(1) for part in parts), strict=True):
        new = update - seen @ state
        outputs.append(query @ state + inside @ new)
        state = decayed * state + key @ new
    return torch.stack(outputs, 1).movedim(2, 3).reshape(batch, -1, heads, value_dim)[:, :length]


class _UnitLowerInverse(torch.autograd.Function):
    """The inverse of I + `strict`, for strictly lower triangular matrices [..., q, q]; q is a power of two.

    Inverses of the blocks on the diagonal are joined in pairs. All numbers on the way are entries of the
    inverse itself. A series of powers, which is as fast, cancels numbers that are far larger.
    """

    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        size = strict.shape[-1]
        inverse = strict.new_ones(*strict.shape[:-2], size, 1, 1)
        width = 1
        while width < size:
            first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            pairs = strict.unflatten(-1, (-1, 2 * width)).unflatten(-3, (-1, 2 * width))
            below = pairs.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., width:, :width]
            joined = torch.cat([-(second @ below @ first), second], dim=-1)
            inverse = torch.cat([F.pad(first, (0, width)), joined], dim=-2)
            width *= 2
        inverse = inverse.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[batch, L, ...] -> [batch, chunks, chunk, ...], padded with zeros."""
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.unflatten(1, (-1, chunk))


def _decays(total: Tensor, strict: bool) -> Tensor:
    """[..., q] sums of log decays -> [..., q, q]: the decay from token j to i > j (or i >= j), else 0."""
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device)
    hidden = later.triu(0 if strict else 1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(hidden, float("-inf")).exp()
