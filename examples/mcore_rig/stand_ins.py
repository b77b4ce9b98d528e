"""In plain torch, what megatron-core's inference takes from flash_attn, mamba_ssm and causal_conv1d."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    **rest: Any,
) -> Tensor:
    """Causal attention of packed queries `[tokens, heads, dim]` over a paged cache.

    `k` and `v` are `[blocks, block size, KV heads, dim]`; row i of `block_table` holds the blocks of sequence
    i, whose queries are its last ones. Rows of no sequence come out zero.
    """
    _only_plain(causal, window_size, rest)
    out = torch.zeros_like(q)
    starts, lengths = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        out[rows] = _attend(q[rows], k, v, block_table[i], length, softmax_scale)
    return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    **rest: Any,
) -> Tensor:
    """The same for queries `[sequences, tokens, heads, dim]`, the last ones of `cache_seqlens` tokens."""
    _only_plain(causal, window_size, rest)
    rows = zip(q, block_table, cache_seqlens.tolist(), strict=True)
    return torch.stack(
        [_attend(row, k_cache, v_cache, table, length, softmax_scale) for row, table, length in rows]
    )


def _only_plain(causal: bool, window_size: tuple[int, int], rest: dict[str, Any]) -> None:
    asked = {name: value for name, value in rest.items() if value}
    if not causal or tuple(window_size) != (-1, -1) or asked:
        raise NotImplementedError(
            f"this stand-in is plain causal attention: {causal=}, {window_size=}, {asked}"
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, length: int, scale: float | None) -> Tensor:
    """Of one sequence; keys beyond `length` are not read: the cache is not initialised there."""
    if not len(q) or length < len(q):  # padding
        return torch.zeros_like(q)
    blocks = table[: -(-length // k.shape[1])].long()
    keys, values = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1).float() for cache in (k, v))
    groups = q.shape[1] // keys.shape[0]
    future = torch.ones(len(q), length, dtype=torch.bool, device=q.device).triu(length - len(q) + 1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).float(),
        keys.repeat_interleave(groups, 0),
        values.repeat_interleave(groups, 0),
        attn_mask=~future,
        scale=scale,
    )
    return out.transpose(0, 1).to(q.dtype)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """`[sequences, dim, state_len]`: the last inputs of each packed sequence, zeros before its first."""
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    positions = ends - state_len + torch.arange(state_len, device=x.device)
    inputs = x[positions.clamp(0, len(x) - 1)]
    return inputs.masked_fill((positions < starts)[..., None], 0).transpose(1, 2)


class GatedRMSNorm(nn.Module):
    """mamba_ssm's RMSNorm with a gate `z`, in groups of `group_size` channels."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        hidden, gate = x.float(), F.silu(z.float())
        if not self.norm_before_gate:
            hidden = hidden * gate
        groups = hidden.unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight.float()
        return (normed * gate if self.norm_before_gate else normed).to(x.dtype)
