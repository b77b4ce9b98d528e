"""`HybridLM`'s function over whole sequences at once, with gradients: what training computes.

The weights have `HybridLM`'s names and shapes. Norms, decays, states and softmax are computed in float32 or
wider; `matmul_dtype` is the dtype of the projections and of attention alone.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunk_scans import scan_gated_delta_rule, scan_ssd

CHUNK = 64


class ParallelForward:
    """Logits of a batch of sequences that all start at position 0 with states of zeros.

    Args:
        config: sizes by `HybridConfig`'s names; an object with these attributes.
        matmul_dtype: dtype of the projections and of attention; None for the dtype of the weights.
        chunk: tokens of one chunk of a scan. It changes rounding alone.
    """

    def __init__(self, config: object, matmul_dtype: torch.dtype | None = None, chunk: int = CHUNK) -> None:
        self.config = config
        self.matmul_dtype = matmul_dtype
        self.chunk = chunk

    def __call__(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Logits [batch, L, vocab_size] in the dtype of the weights, for tokens [batch, L]."""
        config = self.config
        hidden = weights["embedding"][tokens]
        blocks = {
            "M": self._mamba,
            "G": self._gated_delta_net,
            "C": self._short_conv,
            "*": self._attention,
            "-": self._mlp,
        }
        for index, kind in enumerate(config.pattern):
            prefix = f"layers.{index}."
            layer = {
                name.removeprefix(prefix): weight
                for name, weight in weights.items()
                if name.startswith(prefix)
            }
            normed = rms_norm(hidden, weights[f"norms.{index}"], config.norm_eps)
            hidden = hidden + blocks[kind](layer, normed)
        return self._linear(rms_norm(hidden, weights["final_norm"], config.norm_eps), weights["lm_head"])

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        dtype = self.matmul_dtype or weight.dtype
        return F.linear(x.to(dtype), weight.to(dtype)).to(weight.dtype)

    def _mamba(self, layer: dict[str, Tensor], hidden: Tensor) -> Tensor:
        c = self.config
        inner, heads = c.mamba_num_heads * c.mamba_head_dim, c.mamba_num_heads
        both = c.mamba_num_groups * c.mamba_state_dim
        projected = self._linear(hidden, layer["in_proj"])
        gate, raw, dt = projected.split([inner, inner + 2 * both, heads], dim=-1)
        xBC = F.silu(convolve(raw, layer["conv_weight"], layer["conv_bias"]))
        x, B, C = xBC.split([inner, both, both], dim=-1)
        y = scan_ssd(
            x.unflatten(-1, (heads, -1)),
            softplus(dt + layer["dt_bias"]),
            -layer["A_log"].exp(),
            B.unflatten(-1, (c.mamba_num_groups, -1)),
            C.unflatten(-1, (c.mamba_num_groups, -1)),
            layer["D"],
            self.chunk,
        )
        gated = (y.flatten(2) * F.silu(gate)).unflatten(-1, (c.mamba_num_groups, -1))
        normed = rms_norm(gated, layer["norm"].unflatten(0, (c.mamba_num_groups, -1)), c.norm_eps)
        return self._linear(normed.flatten(2), layer["out_proj"])

    def _gated_delta_net(self, layer: dict[str, Tensor], hidden: Tensor) -> Tensor:
        c = self.config
        keys = c.delta_num_key_heads * c.delta_key_dim
        values, heads = c.delta_num_value_heads * c.delta_value_dim, c.delta_num_value_heads
        projected = self._linear(hidden, layer["in_proj"])
        gate, raw, b, a = projected.split([values, 2 * keys + values, heads, heads], dim=-1)
        q, k, v = F.silu(convolve(raw, layer["conv_weight"])).split([keys, keys, values], dim=-1)
        o = scan_gated_delta_rule(
            q.unflatten(-1, (c.delta_num_key_heads, -1)),
            k.unflatten(-1, (c.delta_num_key_heads, -1)),
            v.unflatten(-1, (heads, -1)),
            -layer["A_log"].exp() * softplus(a + layer["dt_bias"]),
            b.sigmoid(),
            self.chunk,
        )
        normed = rms_norm(o, layer["norm"], c.norm_eps).flatten(2) * F.silu(gate)
        return self._linear(normed, layer["out_proj"])

    def _short_conv(self, layer: dict[str, Tensor], hidden: Tensor) -> Tensor:
        B, C, x = self._linear(hidden, layer["in_proj"]).chunk(3, dim=-1)
        return self._linear(C * convolve(B * x, layer["conv_weight"]), layer["out_proj"])

    def _attention(self, layer: dict[str, Tensor], hidden: Tensor) -> Tensor:
        c = self.config
        query, key, value = (
            self._linear(hidden, layer[name]).unflatten(-1, (-1, c.head_dim)).movedim(2, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = (rotate(part, c.rotary_base) for part in (query, key))
        shared = c.num_attention_heads // c.num_kv_heads
        key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
        dtype = self.matmul_dtype or value.dtype
        attended = F.scaled_dot_product_attention(
            query.to(dtype), key.to(dtype), value.to(dtype), is_causal=True
        )
        return self._linear(attended.movedim(1, 2).flatten(2), layer["o_proj"])

    def _mlp(self, layer: dict[str, Tensor], hidden: Tensor) -> Tensor:
        return self._linear(F.relu(self._linear(hidden, layer["up_proj"])).square(), layer["down_proj"])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without torch's threshold, which costs digits in float64."""
    return torch.logaddexp(x, x.new_zeros(()))


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Depthwise causal convolution of x [batch, L, C], weight [C, kernel]; the last tap is the present."""
    length, kernel = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, kernel - 1, 0))
    out = sum(padded[:, tap : tap + length] * weight[:, tap] for tap in range(kernel))
    return out if bias is None else out + bias


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary positions for x [batch, heads, L, head_dim]; dimension i is paired with i + head_dim / 2."""
    length, half = x.shape[2], x.shape[3] // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) / half
    positions = torch.arange(length, dtype=x.dtype, device=x.device)
    angles = positions[:, None] * (base**-exponents).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
