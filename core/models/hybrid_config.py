"""The shape of a `HybridLM`, and of one rank's part of it."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from ..inference.kernels.dtypes_and_strides import compute_dtype
from ..layers.weight_part import checked_part
from ..model_parts import ModelShard, Part
from ..parallel_groups import ParallelGroups
from ..state_spec import StateTensor, gated_delta_net_states, mamba2_states, short_conv_states
from ..validation import INT32_MAX, check_fields, float_dtype, integer, real, refused, set_field

_SHARED = ("mamba_num_groups", "delta_num_key_heads", "num_kv_heads")


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Shape of a `HybridLM`.

    Attributes:
        pattern: one letter a layer: "M" a Mamba-2 mixer, "G" a gated delta net, "C" a short convolution,
            "*" attention, "-" an MLP.
        mamba_num_heads, mamba_head_dim, mamba_state_dim: H, P and N of the SSM state [H, P, N].
        mamba_num_groups: groups of heads. The heads of a group share B and C; the gated norm normalises each
            group on its own.
        conv_kernel: taps of the causal convolution of "M" and "G", >= 2.
        ssd_chunk_size: tokens of one SSD chunk.
        delta_num_key_heads, delta_key_dim: heads of q and k of a gated delta net, and their size.
        delta_num_value_heads, delta_value_dim: heads of v, of which several share a key head, and their size.
            The state is [value heads, key dim, value dim].
        delta_chunk_size: tokens of one chunk of a gated delta net.
        short_conv_kernel: taps of a short convolution, >= 2.
        num_attention_heads, num_kv_heads: query heads, and the key/value heads that they share.
        head_dim: size of an attention head, even.
        dtype: dtype of weights, the residual stream, convolution states and KV. Norms, dt, decays, rotary
            angles, attention, SSM states, logits and log-probs are computed in float32 or wider. SSM states
            are also stored in float32 or wider.
    """

    vocab_size: int
    hidden_size: int
    pattern: str
    mamba_num_heads: int
    mamba_head_dim: int
    mamba_num_groups: int
    mamba_state_dim: int
    conv_kernel: int
    ssd_chunk_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_hidden_size: int
    rotary_base: float = 10000.0
    norm_eps: float = 1e-5
    delta_num_key_heads: int = 2
    delta_key_dim: int = 16
    delta_num_value_heads: int = 4
    delta_value_dim: int = 16
    delta_chunk_size: int = 64
    short_conv_kernel: int = 3
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type is int):
            minimum = 2 if name.endswith("conv_kernel") else 1
            set_field(self, name, integer(name, getattr(self, name), minimum, INT32_MAX))
        check_fields(self, real, rotary_base=(1.0,), norm_eps=(0.0,))
        float_dtype("dtype", self.dtype)
        if not isinstance(self.pattern, str) or not self.pattern or set(self.pattern) - set("MGC*-"):
            raise refused("pattern", self.pattern, "one or more of 'M', 'G', 'C', '*' and '-'")
        for name, divisor in (
            ("mamba_num_heads", "mamba_num_groups"),
            ("delta_num_value_heads", "delta_num_key_heads"),
            ("num_attention_heads", "num_kv_heads"),
        ):
            if getattr(self, name) % getattr(self, divisor):
                accepted = f"a multiple of {divisor} ({getattr(self, divisor)})"
                raise refused(name, getattr(self, name), accepted)
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; accepted: an even integer, for rotary pairs")

    @classmethod
    def tiny(cls, dtype: torch.dtype = torch.float32, **overrides: Any) -> "HybridConfig":
        """Vocabulary 256 (bytes), chunks of 16, three Mamba layers, one attention layer; fast on a CPU."""
        sizes: dict[str, Any] = {
            "vocab_size": 256, "hidden_size": 64, "pattern": "M-M*-M-", "mlp_hidden_size": 128,
            "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 16,
            "conv_kernel": 4, "ssd_chunk_size": 16, "delta_chunk_size": 16,
            "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        }  # fmt: skip
        return cls(dtype=dtype, **(sizes | overrides))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of intermediate results: float32 or wider."""
        return compute_dtype(self.dtype)

    def shard(self, groups: ParallelGroups) -> ModelShard:
        """This rank's layers and KV heads; a ValueError for fewer layers than stages."""
        if len(self.pattern) < groups.pipeline_size:
            accepted = f"at least one layer for each of {groups.pipeline_size} stages"
            raise refused("pattern", self.pattern, accepted)
        kv_heads = self.part_of("num_kv_heads", groups)
        return ModelShard(attention_layers=self.layers_of("*", groups), kv_heads=kv_heads)

    def layers_of(self, kind: str, groups: ParallelGroups) -> Part:
        """The layers of this letter that this rank holds, of all such layers."""
        first, stop = self.stage_layers(groups)
        num_earlier = self.pattern[:first].count(kind)
        return Part(num_earlier, num_earlier + self.pattern[first:stop].count(kind), self.pattern.count(kind))

    def part_of(self, name: str, groups: ParallelGroups) -> Part:
        """This rank's equal part of the heads, groups or channels that the field `name` counts.

        With fewer B/C groups, key heads or KV heads than ranks, several ranks hold the same one. A ValueError
        where sizes do not divide.
        """
        return checked_part(name, getattr(self, name), groups, shared=name in _SHARED)

    def states(self, groups: ParallelGroups) -> tuple[StateTensor, ...]:
        """The tensors of the state that this rank of `groups` holds."""
        states: tuple[StateTensor, ...] = ()
        if "M" in self.pattern:
            heads = self.part_of("mamba_num_heads", groups)
            head_groups = self.part_of("mamba_num_groups", groups)
            states += mamba2_states(
                self.layers_of("M", groups), heads, self.mamba_head_dim, head_groups, self.mamba_state_dim,
                self.conv_kernel, self.dtype, self.compute_dtype, self.ssd_chunk_size,
            )  # fmt: skip
        if "G" in self.pattern:
            key_heads = self.part_of("delta_num_key_heads", groups)
            value_heads = self.part_of("delta_num_value_heads", groups)
            states += gated_delta_net_states(
                self.layers_of("G", groups), key_heads, self.delta_key_dim, value_heads, self.delta_value_dim,
                self.conv_kernel, self.dtype, self.compute_dtype, self.delta_chunk_size,
            )  # fmt: skip
        if "C" in self.pattern:
            channels = self.part_of("hidden_size", groups)
            layers = self.layers_of("C", groups)
            states += short_conv_states(layers, channels, self.short_conv_kernel, self.dtype)
        return states

    def stage_layers(self, groups: ParallelGroups) -> tuple[int, int]:
        """This rank's layers, as (first layer, last layer + 1)."""
        num_layers = len(self.pattern)
        first = num_layers * groups.pipeline_rank // groups.pipeline_size
        return first, num_layers * (groups.pipeline_rank + 1) // groups.pipeline_size
